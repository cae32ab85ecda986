"""Prefix hits of waiting sequences, the tokens that running ones have cached, and the blocks that ended ones free."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

from policies.view import WaitingSeq, admits_in_turn, looks_itself, rule_of
from sim.engine.batch.async_scheduling import AsyncScheduling
from sim.engine.batch.micro_batch import Ended, MicroBatch
from sim.engine.kv.pool import KvPool
from sim.engine.requests.state import RequestState
from sim.engine.spec.experiment import ReplicaSpec

_new: Final = tuple[object, ...].__new__
"""Builds a NamedTuple without the detour through its constructor."""


class PrefixLookup:
    """An engine core's prefix cache as its sequences use it; idle where there is none."""

    def __init__(self, kv: KvPool, state: RequestState, ahead: AsyncScheduling | None, spec: ReplicaSpec) -> None:
        scheduler = spec.scheduler
        self.kv = kv
        self.state = state
        self.ahead = ahead
        # A tree cannot take back what a plan would evict on its way: it describes hits, as to others.
        self.in_turn = admits_in_turn(scheduler) and not kv.caches_late
        """Whether each sequence looks its prefix up as it is admitted, and not all at once before any takes blocks."""
        self.described_to_it = kv.caches and not (self.in_turn or (kv.caches_late and looks_itself(scheduler)))
        """Whether the scheduler is shown hits of waiting sequences."""
        self.at_once = ahead is not None or (spec.decoding is not None and bool(rule_of(scheduler, "caches_verified")))
        """Whether what an iteration has emitted can be found when it has ended, and not when the sequence is planned for again."""
        self.latest_named = not kv.names_next
        """Whether the block that the latest token fills can be found before another token is known."""
        self.batches: Sequence[MicroBatch] = ()
        """Its engine core's micro-batches."""
        self.ended: list[tuple[int, int, int, int]] = []
        """(order of admission, id, blocks, cached tokens) of ended sequences that still hold their blocks. With 0 blocks: sequences
        with complete prompts, where these are found only from then on."""
        self.listed: tuple[int, ...] | None = None
        """Running sequences in their scheduler's order, where it is not that of admission: `policies.view.Plan.order`."""
        self.rounds_since = 0
        """Rounds of the span in flight that have ended, where it is inspected before its end."""
        kv.progress = self._progress

    def end(self, id_: int, blocks: int, cached: int, emitted_last: int) -> None:
        """A sequence has ended with so many tokens cached."""
        known = cached
        if not (self.kv.caches_late or self.at_once or not emitted_last):
            known = cached - emitted_last + 1
        order = self.kv.order(id_) if self.listed is None else self._rank(id_)
        self.ended.append((order, id_, blocks, known))

    def _rank(self, id_: int) -> int:
        """Its rank among sequences that end, or complete their prompts, together."""
        if self.listed is not None and id_ in self.listed:
            return self.listed.index(id_) - len(self.listed)
        return self.kv.order(id_)

    def complete(self, id_: int, cached: int) -> None:
        """A prompt is complete, *cached* tokens long; for a cache that finds it only from then on."""
        self.ended.append((self._rank(id_), id_, 0, cached))

    def go_on(self, batch: MicroBatch) -> None:
        """Chunked prompts can be found as far as they are computed."""
        for id_, cached, *_ in batch.partial.values():
            self.kv.computed(id_, cached)

    def step_on(self, ended: Mapping[int, Ended]) -> None:
        """Sequences of *ended* have taken the step whose tokens are dropped: the KV of their latest token exists."""
        for i, (order, id_, blocks, known) in enumerate(self.ended):
            if id_ in ended and blocks:
                self.ended[i] = (order, id_, blocks + ended[id_].growth_blocks, known + 1)

    def known(self, batch: MicroBatch, id_: int, made_ahead: bool, *, scheduled: bool = False) -> int:
        """Tokens of an admitted sequence that are in the prefix cache when it is planned for.

        vLLM caches a block when it schedules its last token, or, where it plans ahead, once it knows the output: that of the
        iteration in flight it does not. *scheduled*: the next step has been planned.
        """
        if not self.kv.caches or id_ in batch.partial:
            return 0
        if self.kv.caches_late:
            return batch.decoding.state_of(id_)[0] if id_ in batch.decoding else batch.paused[id_].cached
        if id_ not in batch.decoding:
            return batch.paused[id_].cached if id_ in batch.paused else 0
        cached, emitted = batch.decoding.after(self.rounds_since, id_)
        if not (self.at_once or scheduled):
            return cached - emitted + 1 if emitted else cached
        scheduled &= self.latest_named
        if made_ahead:
            # The token of its prompt's last chunk is not known yet.
            return cached - emitted + scheduled if emitted else cached - (not self.latest_named)
        return cached + scheduled

    def kept(self, batch: MicroBatch, id_: int, made_ahead: bool, *, scheduled: bool) -> int:
        """Tokens of a preempted sequence that can be found from now on; 0 where no more can than before."""
        return 0 if self.kv.caches_late else self.known(batch, id_, made_ahead, scheduled=scheduled)

    def _progress(self, id_: int) -> int:
        """`known` of a sequence that steps in the next iteration."""
        made_ahead = self.ahead is not None and (self.ahead.made or self.rounds_since > 0)
        for batch in self.batches:
            if id_ in batch.leaving:
                ended = batch.leaving[id_]
                steps_on = ended.steps_on and self.latest_named
                return ended.cached - ended.emitted_last + steps_on if made_ahead else ended.cached
            if id_ in batch.decoding:
                return self.known(batch, id_, made_ahead, scheduled=True)
        return 0

    def note_the_leaving(self, batch: MicroBatch) -> None:
        """Caches what the next iteration's plan knew of ended sequences, for those that it admits."""
        for _, id_, _, _ in self.ended:
            if id_ in batch.leaving:
                self.kv.cached(id_, self._progress(id_))

    def described(self, seq: WaitingSeq) -> WaitingSeq:
        """A waiting sequence with the prefix hit that it would have now."""
        kv = self.kv
        found = self._to_find(seq, 1)
        if not found:
            return seq
        tokens = found * kv.block_tokens
        return seq._replace(
            tokens=seq.tokens - tokens, cached_tokens=tokens, shared_blocks=found - kv.unheld_blocks(seq.id, found)
        )

    def _to_find(self, seq: WaitingSeq, tokens: int) -> int:
        """Blocks that a sequence finds if it computes *tokens* tokens at least; none where it has KV."""
        if seq.cached_tokens or not seq.tokens:
            return 0
        return min(self.kv.found_blocks(seq.id, seq.tokens), (seq.tokens - tokens) // self.kv.block_tokens)

    def keep(self, queue: deque[WaitingSeq], batch: MicroBatch, run: tuple[tuple[int, int], ...]) -> None:
        """Sequences that *run* admits hold their hits before any takes blocks, which might evict these."""
        for id_, tokens in run:
            if tokens and id_ not in batch.partial:
                first = queue[0] if queue else None
                seq = first if first and first.id == id_ else next((seq for seq in queue if seq.id == id_), None)
                if seq is not None and not seq.kept_blocks:
                    self.kv.admit(id_, self._to_find(seq, tokens))

    def find(self, seq: WaitingSeq, tokens: int) -> WaitingSeq:
        """A sequence that is being admitted to compute *tokens* tokens, with its hit in the prefix cache."""
        kv, state = self.kv, self.state
        id_ = seq.id
        if self.in_turn or not tokens:
            kv.admit(id_, self._to_find(seq, tokens))
        kv.writes_on(id_, state.prompt[id_])
        if seq.cached_tokens:
            # It has KV already.
            return seq
        found = kv.found(id_) * kv.block_tokens
        if not found:
            return seq
        if seq.preempted or (state.again is not None and state.again[id_]):
            state.prefix_hits_again[id_] += found
        else:
            state.prefix_hits[id_] += found
        _, tokens, arrival_ns, model, deadline_ns, preempted, _, priority, shared, kept = seq
        return _new(
            WaitingSeq,
            (id_, tokens - found, arrival_ns, model, deadline_ns, preempted, found, priority, shared, kept),
        )

    def free_one(self, id_: int, beside: int, unknown: int, *, scheduled: bool = False) -> None:
        """Frees the blocks of a preempted sequence that has ended, and *beside*; *unknown* of its tokens are not cached, but the
        first is where its next step had been *scheduled*."""
        entry = next((entry for entry in self.ended if entry[1] == id_), None)
        if entry is not None:
            self.ended.remove(entry)
            _, _, blocks, known = entry
            unknown -= scheduled and self.latest_named
            self.kv.release(id_, blocks + beside, 0 if self.kv.caches_late else known - unknown)

    def free_the_ended(self) -> None:
        """Frees blocks of ended sequences, and lets complete prompts be found, in their order."""
        self.ended.sort()
        for _, id_, blocks, known in self.ended:
            if blocks:
                self.kv.release(id_, blocks, known, ended=True)
            else:
                self.kv.computed(id_, known)
        self.ended.clear()
