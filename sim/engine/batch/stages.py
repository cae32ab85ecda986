"""The pipeline stages of a machine: when each is free, and what a micro-batch waits for. The one recurrence of stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sim.engine.record.columns import BUBBLES
from sim.engine.time.clock import TICK_BITS

_PB1, _PB2, _PB3, _DEPTH = range(len(BUBBLES))

StageRecord = Callable[[int, int, int, int, int, int], None]
"""Takes micro-batch, stage, begin_ns, duration_ns, bubble_ns and the bubble's kind."""


class Stages:
    """Micro-batches pass stage k at max(done at k - 1 plus hand-over, free at k)."""

    def __init__(self, n_stages: int) -> None:
        self.free = [0] * n_stages
        """Tick at which each is done with what was sent through."""
        self.in_flight = 0
        self._used = [False] * n_stages
        """Whether the stage has worked since the machine was last idle: only then is its waiting a bubble."""
        self._sent: tuple[bool, Sequence[int]] = (False, [0] * n_stages)
        """The micro-batch sent last: whether it had prompt tokens, and its ticks in each stage."""

    def __len__(self) -> int:
        return len(self.free)

    @property
    def first_free_ns(self) -> int:
        return self.free[0] >> TICK_BITS

    def idle(self) -> None:
        """Marks the stages idle: waiting from here on is no bubble."""
        self._used = [False] * len(self.free)

    def stop(self, ticks: int) -> None:
        """Drops what is in flight: all stages are free."""
        self.free = [ticks] * len(self.free)
        self.in_flight = 0
        self.idle()

    def through(
        self, start_ticks: int, durations: Sequence[int], clocks: Sequence[int] | None = None, handover: int = 0
    ) -> list[int]:
        """Ticks at which a micro-batch that is ready at *start_ticks* would leave each stage, if sent now.

        *clocks*: ticks to use in place of `free`.
        """
        ready = start_ticks
        ends: list[int] = []
        for free, duration in zip(self.free if clocks is None else clocks, durations, strict=True):
            end = max(ready, free) + duration
            ends.append(end)
            ready = end + handover
        return ends

    def send(
        self,
        start_ticks: int,
        durations: Sequence[int],
        handover: int,
        prefills: bool,
        micro_batch: int,
        record: StageRecord,
    ) -> tuple[int, list[int]]:
        """Sends a micro-batch through; returns the tick at which it is done, and the bubbles ahead of it in ns by kind."""
        prefilled, before = self._sent
        self._sent = prefills, durations
        self.in_flight += 1
        kind = _PB2 if prefills != prefilled else _PB1 if prefills else _PB3
        if self.in_flight < len(durations):
            kind = _DEPTH
        bubbles = [0] * len(BUBBLES)
        ends = self.through(start_ticks, durations, handover=handover)
        for stage, (duration, end) in enumerate(zip(durations, ends, strict=True)):
            begin_ns = (end - duration) >> TICK_BITS
            bubble_ns = begin_ns - (self.free[stage] >> TICK_BITS) if self._used[stage] else 0
            of_kind = kind if duration != before[stage] else _DEPTH
            bubbles[of_kind] += bubble_ns
            self._used[stage] = True
            record(micro_batch, stage, begin_ns, (end >> TICK_BITS) - begin_ns, bubble_ns, of_kind)
        self.free = ends
        return ends[-1], bubbles
