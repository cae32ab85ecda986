"""The moments at which prompts of ranks may start: `managers/prefill_delayer.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from policies.ranks import Moment, RankWork

ATTEMPTS = 16
"""Latest attempts of a rank among which the one with most prompts counts: environ.py."""

DELAY_MS = 5000.0


class Delayed(NamedTuple):
    """The delayer's state from step to step."""

    passes: int = 0
    """Steps in sequence for which prompts have been delayed."""
    since_ns: int = -1
    """When the first of them was; -1: none is."""
    once: bool = False
    """Whether a step that every rank could compute prompts in has been let pass although they had reason to wait."""
    attempts: tuple[tuple[int, ...], ...] = ()
    """Prompts of the latest attempts of each rank."""
    tried: tuple[int, ...] = ()
    """Prompts that each rank would have computed in the latest step."""


@dataclass(frozen=True)
class PrefillDelayer:
    """Prompts wait while some ranks could compute some and others could not, or while every rank could and its seats or its queue
    say that more are to come; `max_delay_passes` steps in all. A prompt that has begun goes on."""

    seats: int
    """Requests that run at once on a rank."""
    interval: int = 0
    """Steps after one with prompts in which no rank is asked (`prefill_decode_interval`)."""
    max_delay_passes: int = 30
    low_watermark: float | None = None
    """Nobody waits while a rank that could compute some uses less of its KV memory."""
    queue_min_ratio: float | None = None
    """With every rank able, prompts wait until some queue holds this share of the running requests; None: they do not."""
    max_delay_ms: float = DELAY_MS
    """Time after which that is no reason any more."""
    prefill_max_requests: int | None = None

    chunks_go_on: ClassVar[bool] = True
    counts_idle: ClassVar[bool] = True

    def begin(self) -> Delayed:
        return Delayed()

    def start(self, ranks: Sequence[RankWork], state: Delayed, moment: Moment, /) -> tuple[bool, Delayed]:
        attempts = _observed(state, ranks)
        if moment.since_prompts < self.interval:
            return True, state._replace(attempts=attempts, tried=())
        tried = tuple(self._tried(rank) if rank.prompts else 0 for rank in ranks)
        waits, once = self._waits(ranks, state, attempts, moment)
        if waits and state.passes < self.max_delay_passes - 1:
            since_ns = moment.now_ns if state.since_ns < 0 else state.since_ns
            return False, Delayed(state.passes + 1, since_ns, once, attempts, tried)
        return True, Delayed(0, -1, once, attempts, tried)

    def _tried(self, rank: RankWork) -> int:
        return min(max(rank.waiting, 1), max(self.seats - rank.running, 1))

    def _waits(
        self, ranks: Sequence[RankWork], state: Delayed, attempts: Sequence[tuple[int, ...]], moment: Moment
    ) -> tuple[bool, bool]:
        """Whether there is reason to wait; and `Delayed.once`."""
        able = [rank for rank in ranks if rank.prompts]
        low = self.low_watermark
        if not able or (low is not None and any(rank.used < low for rank in able)):
            return False, state.once
        if len(able) < len(ranks):
            return True, state.once
        running, most = max(rank.running for rank in ranks), max(max(each, default=0) for each in attempts)
        if self.seats - running >= most and not self._waits_for_queue(ranks, running, most, state, moment):
            return False, state.once
        return state.once, True

    def _waits_for_queue(
        self, ranks: Sequence[RankWork], running: int, most: int, state: Delayed, moment: Moment
    ) -> bool:
        if self.queue_min_ratio is None or not running:
            return False
        least = min(int(running * self.queue_min_ratio), self.prefill_max_requests or most)
        late = state.since_ns >= 0 and (moment.now_ns - state.since_ns) * 1e-6 >= self.max_delay_ms
        return 0 < least > max(rank.waiting for rank in ranks) and not late


def _observed(state: Delayed, ranks: Sequence[RankWork]) -> tuple[tuple[int, ...], ...]:
    """The latest attempts of each rank, with those of the step before this one."""
    before = state.attempts or ((),) * len(ranks)
    if not state.tried:
        return before
    found = [rank.started or tried for rank, tried in zip(ranks, state.tried, strict=True)]
    return tuple((*each, n)[-ATTEMPTS:] if n else each for each, n in zip(before, found, strict=True))
