"""The load of a model on a machine, as routers see it."""

from __future__ import annotations

from operator import index
from typing import SupportsIndex, cast

from policies.routers import NO_ADAPTERS, AdapterLoad, Booked, RoutedRequest
from sim.engine.batch.async_scheduling import came_after
from sim.engine.serve.engine_core import EngineCore
from sim.engine.serve.sequences import take_for_rounds
from sim.engine.time.clock import TICK_BITS
from sim.engine.time.errors import PolicyError
from sim.engine.time.events import Clock


def place_of(answer: object, n: int, *, router: object, request: int, of: str) -> int:
    """The place among *n* (*of*: replicas, ranks) that a router's *answer* names; PolicyError where it names none."""
    try:
        place = index(cast(SupportsIndex, answer))
    except TypeError:
        place = -1
    if not 0 <= place < n:
        raise PolicyError(
            f"{router!r} sent request {request} to {of} {answer!r}; expected a whole number, 0 to {n - 1}"
        )
    return place


class CoreLoad:
    """An engine core as a `policies.routers.ReplicaLoad`: iterations that have ended."""

    __slots__ = ("_batch", "_clock", "_sequences", "core", "no_hit_order", "promised_ns")

    def __init__(self, core: EngineCore, clock: Clock) -> None:
        self.core = core
        self._sequences = core.sequences
        self._batch = core.batches[0]
        """The only one that may have more than one iteration in flight."""
        self._clock = clock
        self.no_hit_order = -1
        """Only `gateway.routing.Seen` keeps it."""
        self.promised_ns = 0

    @property
    def waiting(self) -> int:
        return self._sequences.n_waiting

    @property
    def running(self) -> int:
        return self._sequences.n_admitted

    @property
    def kv_blocks_used(self) -> int:
        """Blocks in use, including those that the span in flight has begun to use by now."""
        batch, used = self._batch, self._sequences.kv.used
        rounds = self._rounds()
        return used if rounds == 1 else used + batch.decoding.blocks_for(rounds) - batch.blocks_taken

    def _rounds(self) -> int:
        """The iteration of the span in flight, from 1, that has begun by now; 1 where there is none."""
        span = self._batch.span
        return 1 if span is None or span.n == 1 else span.index_at(self._clock.now_ns << TICK_BITS)

    @property
    def kv_use(self) -> float:
        return self.kv_blocks_used / self._sequences.kv.total

    @property
    def block_tokens(self) -> int:
        return self._sequences.kv.block_tokens

    @property
    def prefill_tokens(self) -> int:
        """Tokens of prompts that are still to be computed."""
        partial = (each.remaining_tokens for batch in self.core.batches for each in batch.partial.values())
        return sum(seq.tokens for seq in self._sequences.queue) + sum(partial)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts of all requests that wait or run."""
        sequences, prompt = self._sequences, self._sequences.state.prompt
        running = sum(prompt[id_] for batch in self.core.batches for id_ in batch.admitted if id_ not in batch.leaving)
        return running + sum(prompt[seq.id] for seq in sequences.queue) + sequences.connector.prompts_coming()

    def booked(self, request: RoutedRequest) -> Booked:
        """Only `gateway.routing.Seen` keeps it."""
        return Booked()

    @property
    def adapter_load(self) -> AdapterLoad:
        """Ranks serve no adapters."""
        return NO_ADAPTERS

    def found_tokens(self, request: RoutedRequest) -> int:
        """Tokens of the prompt, in full blocks, that are cached now."""
        kv, prefix_lookup = self._sequences.kv, self._sequences.prefix_lookup
        if not kv.caches:
            return 0
        # As if the span in flight were taken step by step: what its growth evicts is gone, and what it has emitted is there.
        rounds = self._rounds()
        take_for_rounds(kv, self._batch, rounds)
        prefix_lookup.rounds_since = rounds - 1
        found = kv.found_blocks(request.id, request.prompt_tokens + 1)
        prefix_lookup.rounds_since = 0
        return found * kv.block_tokens

    def done_ns(self, model: int, *, waiting: bool) -> int:
        raise ValueError("ranks have no table of latencies to predict ends from")


def left_waiting(core: EngineCore, now_ns: int) -> int:
    """Requests that the latest plan left waiting, without those that arrived since or while it was planned ahead.

    `Sequences.note_arrivals` has to have been called before the first of them arrived.
    """
    sequences = core.sequences
    assert sequences.came_ns is not None
    known = len(sequences.queue) - came_after(sequences.came_ns, _planned_ns(core, now_ns))
    return max(known, 0) + sequences.connector.coming


def _planned_ns(core: EngineCore, now_ns: int) -> int:
    """Time of the plan of the iteration in flight, or of the latest plan where none is in flight."""
    ahead, span = core.sequences.ahead, core.batches[0].span
    at = span.index_at(now_ns << TICK_BITS) if core.alone and span is not None else 1
    if span is not None and at > 1:
        ended = at - 1 if ahead is None else at - 2
        return (span.end(ended) if ended else span.start_ticks) >> TICK_BITS
    if ahead is not None:
        return ahead.planned_ns
    return max(
        batch.view.now_ns if batch.span is None else batch.span.start_ticks >> TICK_BITS for batch in core.batches
    )
