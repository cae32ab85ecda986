"""Serving systems of papers, as published, and what papers compared with. SARATHI's are in `sarathi`, AlpaServe's in `single_pass`.

Orca = Yu et al., OSDI 2022. FasterTransformer = NVIDIA's library under a scheduler that works by requests, as Orca's paper
describes it (sections 2 and 6.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from policies.reserving import longest_blocks, longest_tokens, unpromised_blocks
from policies.schedulers import admissible_blocks, at_least, fraction
from policies.view import UNTIL_CHANGE, Plan, ReplicaView


@dataclass(frozen=True)
class Static:
    """Request-level batching without padding: no request joins a batch before all of its requests have finished.

    A finished sequence leaves at once: its memory is free and steps get cheaper, which no engine of the papers does
    (`FasterTransformer` keeps the shape of its batch). Prompts of the batch are computed together, or *max_prompts* in an
    iteration, before the first decode step: with 1 it is the baseline of SARATHI's paper.
    """

    batch_size: int = 8
    max_prompts: int | None = None

    def __post_init__(self) -> None:
        at_least("batch_size", self.batch_size, 1)
        if self.max_prompts is not None:
            at_least("max_prompts", self.max_prompts, 1)

    def plan(self, view: ReplicaView, /) -> Plan:
        if view.prefilling:
            return Plan(run=tuple((seq.id, seq.remaining_tokens) for seq in view.prefilling))
        chunks: list[tuple[int, int]] = []
        # With a limit on prompts the batch is still being formed until it has decoded.
        if not view.n_decoding or (self.max_prompts is not None and view.after_prefill):
            seats = self.batch_size - view.n_decoding
            if self.max_prompts is not None:
                seats = min(seats, self.max_prompts)
            free = view.free_blocks - view.growth_blocks
            for seq in view.waiting:
                free -= view.blocks_to_admit(seq)
                if free < 0 or len(chunks) >= seats:
                    break
                chunks.append((seq.id, seq.tokens))
        if chunks:
            return Plan(run=tuple(chunks))
        return Plan(decode=view.n_decoding > 0, hold=UNTIL_CHANGE, through_arrivals=True)


@dataclass(frozen=True)
class Orca:
    """Iteration-level batching as published (algorithm 1): whole prompts join the running decodes, first come first served.

    They join as long as the batch has a seat and memory has slots for the longest that each request may become, its prompt and its
    `max_tokens`. Slots are kept from the first iteration to the last, so that nothing is ever evicted, and a request that does not
    fit holds up all behind it. A slot is the KV of a token; here they come in blocks (`memory.block_tokens: 1` gives the paper's),
    and a request that may become longer than all memory runs alone. With a pipeline a sequence stays in its micro-batch, where the
    paper forms each one anew.
    """

    max_sequences: int = 128
    """The paper's max_bs, for each micro-batch."""
    n_slots: int | None = None
    """KV tokens that may be reserved; None: all that memory holds."""

    reserves: ClassVar[bool] = True

    def __post_init__(self) -> None:
        at_least("max_sequences", self.max_sequences, 1)
        if self.n_slots is not None:
            at_least("n_slots", self.n_slots, 1)

    def plan(self, view: ReplicaView, /) -> Plan:
        chunks = [(seq.id, seq.remaining_tokens) for seq in view.prefilling]
        seats = self.max_sequences - view.n_running
        blocked = seats <= 0
        if view.waiting and not blocked:
            drafted = view.query_tokens - 1
            free, slots = unpromised_blocks(view, drafted), self._slots_left(view)
            for seq in view.waiting:
                free -= longest_blocks(view, seq.id, drafted)
                slots -= self._slots_of(view, seq.id)
                if seats <= 0 or free < 0 or slots < 0:
                    blocked = True
                    break
                seats -= 1
                chunks.append((seq.id, seq.tokens))
        return _with_decodes(view, chunks, blocked=blocked)

    def _slots_of(self, view: ReplicaView, id_: int) -> int:
        return min(longest_tokens(view, id_), self.n_slots) if self.n_slots is not None else 0

    def _slots_left(self, view: ReplicaView) -> int:
        if self.n_slots is None:
            return 0
        admitted = [*(seq.id for seq in view.running[:]), *view.elsewhere]
        return self.n_slots - sum(self._slots_of(view, id_) for id_ in admitted)


@dataclass(frozen=True)
class OrcaPaged:
    """Orca's iterations on vLLM's memory, as SARATHI's and Sarathi-Serve's authors ran it.

    Whole prompts join the running decodes in one iteration, blocks are taken as they are needed, and a sequence that runs out of
    them is evicted. *max_prompts* limits the prompts of an iteration; 1 is the best case that SARATHI is compared with.
    """

    max_sequences: int = 128
    watermark: float = 0.01
    max_prompts: int | None = None

    def __post_init__(self) -> None:
        at_least("max_sequences", self.max_sequences, 1)
        fraction("watermark", self.watermark)
        if self.max_prompts is not None:
            at_least("max_prompts", self.max_prompts, 1)

    def plan(self, view: ReplicaView, /) -> Plan:
        chunks = [(seq.id, seq.remaining_tokens) for seq in view.prefilling]
        seats = self.max_sequences - view.n_running
        if self.max_prompts is not None:
            seats = min(seats, self.max_prompts - len(chunks))
        free = admissible_blocks(view, self.watermark)
        blocked = False
        for seq in view.waiting:
            free -= view.blocks_to_admit(seq)
            if seats <= 0 or free < 0:
                blocked = True
                break
            seats -= 1
            chunks.append((seq.id, seq.tokens))
        return _with_decodes(view, chunks, blocked=blocked or seats <= 0)


def _with_decodes(view: ReplicaView, chunks: Sequence[tuple[int, int]], *, blocked: bool) -> Plan:
    """All decodes beside *chunks*; without any the plan holds until something changes, through arrivals where all are *blocked*."""
    if chunks:
        return Plan(decode=view.n_decoding > 0 or any(not tokens for _, tokens in chunks), run=tuple(chunks))
    return Plan(decode=view.n_decoding > 0, hold=UNTIL_CHANGE, through_arrivals=blocked)


@dataclass(frozen=True)
class FasterTransformer:
    """Request-level batching with padding: one shape for a whole batch until all have ended.

    Prompts are computed at the length of the batch's longest, and every decode step at *batch_size* sequences with the longest
    context, ended ones included. No request joins until all have left. The batch's memory is kept from its start for as many
    sequences of the longest prompt and the largest `max_tokens` in it, so that nothing is ever evicted; a request for which all
    memory is too little by that rule runs alone.
    """

    batch_size: int = 8

    reserves: ClassVar[bool] = True

    def __post_init__(self) -> None:
        at_least("batch_size", self.batch_size, 1)

    @property
    def pads_to(self) -> int:
        """Sequences that every decode step takes as long as; see `policies.view.pads_to`."""
        return self.batch_size

    def plan(self, view: ReplicaView, /) -> Plan:
        if view.prefilling:
            return Plan(run=tuple((seq.id, seq.remaining_tokens) for seq in view.prefilling))
        if view.n_decoding:
            return Plan(decode=True, through_arrivals=True)
        free, drafted = unpromised_blocks(view, view.query_tokens - 1), max(view.query_tokens - 2, 0)
        chunks: list[tuple[int, int]] = []
        prompt = output = 0
        for seq in view.waiting:
            prompt = max(prompt, view.prompt_tokens[seq.id] or 1)
            output = max(output, view.max_tokens[seq.id])
            wanted = (len(chunks) + 1) * view.blocks(prompt + output + drafted)
            # While other micro-batches hold memory, the first of a batch waits for it as well.
            empty = view.free_blocks >= view.total_blocks
            alone = not chunks and not view.elsewhere and (empty or view.blocks_to_admit(seq) <= view.free_blocks)
            if len(chunks) == self.batch_size or (wanted > free and not alone):
                break
            chunks.append((seq.id, seq.tokens))
        return Plan(run=tuple(chunks))
