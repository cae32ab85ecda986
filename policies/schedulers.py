"""Batching policies. Each is a frozen dataclass with one pure method; CONTRIBUTING.md says how to add one.

`policies.wrappers` has those that change what another policy sees or answers.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.view import UNTIL_CHANGE, Plan, ReplicaView, prompts

_DECODES = Plan(decode=True, hold=UNTIL_CHANGE)
_DECODES_WHOEVER_COMES = Plan(decode=True, hold=UNTIL_CHANGE, through_arrivals=True)


def at_least(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is a whole number of at least {least}; got {value!r}")


def _fraction(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"{name} is a fraction in [0, 1); got {value!r}")


def _admissible_blocks(view: ReplicaView, watermark: float) -> int:
    """KV blocks that admissions may take: free, less what the decodes need now, less the watermark.

    An empty replica keeps no watermark, or a request as large as the pool would wait for ever.
    """
    reserve = int(watermark * view.total_blocks) if view.n_running else 0
    return view.free_blocks - view.growth_blocks - reserve


def _chunks_within(
    view: ReplicaView, budget: int, max_sequences: int, watermark: float
) -> tuple[tuple[tuple[int, int], ...], bool]:
    """Prompt chunks of *budget* tokens at most, unfinished prompts before new ones; and whether the queue's head is
    held up, or the seats are taken, so that an arrival could not join either."""
    chunks: list[tuple[int, int]] = []
    for partial in view.prefilling:
        if budget <= 0:
            break
        tokens = min(partial.remaining_tokens, budget)
        budget -= tokens
        chunks.append((partial.id, tokens))
    seats = max_sequences - view.n_decoding - len(view.prefilling)
    full = seats <= 0
    if view.waiting and budget > 0:
        free = _admissible_blocks(view, watermark)
        for seq in view.waiting:
            free -= view.blocks_to_admit(seq)
            if budget <= 0 or seats <= 0 or free < 0:
                full = True
                break
            tokens = min(seq.tokens, budget)
            budget -= tokens or view.query_tokens
            seats -= 1
            chunks.append((seq.id, tokens))
    return tuple(chunks), full


@dataclass(frozen=True)
class Static:
    """Request-level batching (FasterTransformer): a batch is taken from the queue; nobody joins until all have left.

    Prompts of the batch are computed together, or *max_prompts* in an iteration, before the first decode step.
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
    """Iteration-level batching (Yu et al., OSDI 2022): whole prompts join the running decodes in one iteration.

    *max_prompts* limits the prompts of an iteration; 1 is the best case that SARATHI is compared with.
    """

    max_sequences: int = 128
    watermark: float = 0.01
    max_prompts: int | None = None

    def __post_init__(self) -> None:
        at_least("max_sequences", self.max_sequences, 1)
        _fraction("watermark", self.watermark)
        if self.max_prompts is not None:
            at_least("max_prompts", self.max_prompts, 1)

    def plan(self, view: ReplicaView, /) -> Plan:
        chunks = [(seq.id, seq.remaining_tokens) for seq in view.prefilling]
        seats = self.max_sequences - view.n_running
        if self.max_prompts is not None:
            seats = min(seats, self.max_prompts - len(chunks))
        free = _admissible_blocks(view, self.watermark)
        blocked = False
        for seq in view.waiting:
            free -= view.blocks_to_admit(seq)
            if seats <= 0 or free < 0:
                blocked = True
                break
            seats -= 1
            chunks.append((seq.id, seq.tokens))
        if chunks:
            return Plan(decode=view.n_decoding > 0, run=tuple(chunks))
        return Plan(decode=view.n_decoding > 0, hold=UNTIL_CHANGE, through_arrivals=blocked or seats <= 0)


@dataclass(frozen=True)
class Sarathi:
    """Stall-free batching (Sarathi-Serve, OSDI 2024): all decodes, then prompt chunks up to the token budget."""

    token_budget: int = 512
    max_sequences: int = 128
    watermark: float = 0.01

    def __post_init__(self) -> None:
        at_least("token_budget", self.token_budget, 1)
        at_least("max_sequences", self.max_sequences, 1)
        _fraction("watermark", self.watermark)

    def plan(self, view: ReplicaView, /) -> Plan:
        n_decoding = view.n_decoding
        left = self.token_budget - n_decoding * view.query_tokens
        if n_decoding and left <= 0:
            return _DECODES_WHOEVER_COMES
        if n_decoding and not view.waiting and not view.prefilling:
            return _DECODES_WHOEVER_COMES if n_decoding >= self.max_sequences else _DECODES
        prefilling = view.prefilling
        if len(prefilling) == 1 and prefilling[0].remaining_tokens >= left:
            return prompts(((prefilling[0].id, left),), n_decoding > 0)
        chunks, full = _chunks_within(view, left, self.max_sequences, self.watermark)
        if chunks:
            return prompts(chunks, n_decoding > 0)
        return Plan(n_decoding > 0, (), (), UNTIL_CHANGE, full)
