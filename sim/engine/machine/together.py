"""Ranks that are alone with their stage, and end every step together (attention data parallelism).

Steps in which all of them do the same are one event, which other events cut short.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hwmodels.totals import Totals
from policies.view import ALWAYS_NS
from sim.engine.batch.decode_set import DecodeSet
from sim.engine.batch.micro_batch import MicroBatch
from sim.engine.batch.rank_prices import CommonPrices
from sim.engine.batch.span import Span, SpeculativeSpan
from sim.engine.machine.groups import Group
from sim.engine.machine.turns import Turns
from sim.engine.serve.engine_core import NOTHING, EngineCore
from sim.engine.time.clock import TICK_BITS
from sim.engine.time.events import Clock

_FEWEST, _MOST = 16, 1024
"""Steps that are one event: fewer are sooner priced one by one, and more would mostly be cut."""


class Together(Turns):
    """The micro-batches of ranks, one each, with one stage that nothing else uses."""

    def __init__(self, group: Group, prices: CommonPrices, clock: Clock, *, fast_forward: bool) -> None:
        super().__init__((group,), clock, fast_forward=fast_forward)
        self._group = group
        self._prices = prices
        self._balances = group.balances
        self._batches = [core.batches[0] for core in group.cores]
        # Speculating sequences emit different numbers each step, and loads from tiers end at any time: steps are single.
        first = group.cores[0]
        self._joins = fast_forward and first.spec.decoding is None and first.loading is None
        self._decode: list[bool] = []
        """Whether each rank has decodes behind the first of the steps in flight."""
        self._n_steps = 0
        """Steps in flight; 0: none."""

    @property
    def _span(self) -> Span:
        """The steps in flight, as one of the ranks has them; each ends them when all do."""
        return next(batch.span for batch in self._batches if batch.span is not None)

    def _turn(self, now_ns: int, /) -> int:
        ticks = self._ticks
        if self._n_steps:
            self._end(ticks)
        elif ticks < now_ns << TICK_BITS:
            ticks = now_ns << TICK_BITS
        end = self._start(ticks)
        if end != NOTHING:
            self._ticks = end
            return end >> TICK_BITS
        self._ticks = ticks
        return self._rest(now_ns, ticks)

    def _end(self, ticks: int) -> None:
        """The steps in flight have ended, on all ranks."""
        n, self._n_steps = self._n_steps, 0
        self.events += 1
        self._group.count_steps(n, prompts=any([batch.span is not None and bool(batch.run) for batch in self._batches]))
        if self._balances:
            self._group.pass_steps(self._decode, n - 1)
        for core, batch in zip(self._cores, self._batches, strict=True):
            if batch.span is not None:
                if batch.held is not None:
                    batch.held.left -= n - 1
                core.commit(batch, n, ticks)

    def _start(self, ticks: int) -> int:
        """Ask every rank at *ticks* and start what they plan, together; return the tick at which that ends, or NOTHING."""
        taking, totals, draft_steps = self._group.prepare(self._batches, ticks)
        if not taking:
            if not self._group.has_work:
                self._group.count_steps(0)
            return NOTHING
        n = self._steps_alike(taking) if self._joins else 1
        if n >= _FEWEST:
            return self._start_several(taking, totals, n, ticks)
        self._n_steps = 1
        end = ticks + self._prices.step(totals, draft_steps)
        for rank in taking:
            self._cores[rank].iterations.launch(self._batches[rank], ticks, end)
        return end

    # Several steps as one event.

    def _steps_alike(self, taking: Sequence[int]) -> int:
        """The number of steps in which all ranks do the same if nothing arrives: decodes, and nothing else."""
        if any(core.sequences.busy for rank, core in enumerate(self._cores) if rank not in taking):
            return 1
        if self._balances:
            # Messages may have brought prompts since the last check of whether prompts may start, which precedes every step.
            self._decode = self._group.decodes(self._batches)
            if self._group.prompts_wait(self._batches):
                return 1
        n = _MOST
        for rank in taking:
            n = self._steps_of(self._cores[rank], self._batches[rank], n)
        return n

    def _steps_of(self, core: EngineCore, batch: MicroBatch, n: int) -> int:
        """The most of *n* steps for which a rank does what it is about to do."""
        held, decoding, prepared = batch.held, batch.decoding, batch.prepared
        if n == 1 or held is None or batch.run or not isinstance(decoding, DecodeSet):
            return 1
        assert prepared is not None
        n = min(n, held.left + 1, decoding.until_finish(), decoding.until_bend())
        return decoding.rounds_within(core.sequences.kv.free + prepared.growth, n) if n > 1 else n

    def _start_several(self, taking: Sequence[int], totals: Sequence[Totals], n: int, ticks: int) -> int:
        """*n* steps as one event, fewer where a plan ends at an instant."""
        growth = [(0, 0)] * len(totals)
        sets = {rank: decoding for rank in taking if isinstance(decoding := self._batches[rank].decoding, DecodeSet)}
        for rank, decoding in sets.items():
            growth[rank] = decoding.n, decoding.window_growth
        ends = self._prices.steps(totals, growth, n).cumsum()
        until_ns = min(held.until_ns for rank in taking if (held := self._batches[rank].held) is not None)
        if until_ns < ALWAYS_NS:
            # The first is run in any case; a further one if the one before it ends before that instant.
            ends = ends[: int(ends.searchsorted((until_ns << TICK_BITS) - ticks)) + 1]
        n = len(ends)
        step = np.arange(n)
        for rank, decoding in sets.items():
            core, batch = self._cores[rank], self._batches[rank]
            prepared = batch.prepared
            assert prepared is not None
            batch.prepared = None
            kv, window = growth[rank]
            batch.span = SpeculativeSpan(
                ticks, ends, prepared.growth, decoding,
                prepared.priced.decode_kv_tokens + step * kv, prepared.priced.decode_kv_window + step * window,
                np.full(n, decoding.n),
            )  # fmt: skip
            batch.span.open(core.recorder, core.iterations.standing(batch))
        self._n_steps = n
        return ticks + int(ends[-1])

    # Called by the machine.

    def arrive(self, core: EngineCore, now_ns: int, /) -> None:
        held = core.batches[0].held
        if self._n_steps > 1 and held is not None and held.through_arrivals and not self._balances:
            # Its plan is the same whatever waits.
            core.recorder.queued_ns.append(now_ns)
        else:
            self.heed(now_ns)

    def heed(self, now_ns: int, /) -> None:
        """Idle ranks start a step; others end with the one in flight."""
        if not self._n_steps:
            self._alarm.set(now_ns)
        elif self._n_steps > 1:
            j = self._span.index_at(now_ns << TICK_BITS)
            if j < self._n_steps:
                self._n_steps = j
                self._ticks = self._span.end(j)
                for core, batch in zip(self._cores, self._batches, strict=True):
                    if batch.span is not None:
                        batch.span.cut(j, core.recorder)
                self._alarm.set(self._ticks >> TICK_BITS)

    def stop(self, now_ns: int, /) -> None:
        self._alarm.cancel()
        if self._n_steps:
            span = self._span
            done = span.index_at(now_ns << TICK_BITS) - 1
            end = span.end(done) if done else self._ticks
            for core, batch in zip(self._cores, self._batches, strict=True):
                if batch.span is not None:
                    core.stop(batch, done, end)
        self._n_steps = 0
        self._ticks = now_ns << TICK_BITS
