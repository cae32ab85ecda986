"""The rule that all forecasts share: from the rates of arrivals seen so far to the machines that the next ones need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, isfinite
from typing import ClassVar, NamedTuple

from policies.control.seen import Control, Seen, remembers_s, wanted_of


class History(NamedTuple):
    """Rates of arrivals in steps of equal length, the latest last."""

    rates_per_s: tuple[float, ...]
    first: int
    """The number of the first step; step 0 begins with the run, and those before it have negative numbers."""
    step_s: float

    def last(self, seconds: float) -> History:
        """Its last *seconds*, in whole steps."""
        left_out = max(len(self.rates_per_s) - steps_of(seconds, self.step_s), 0)
        return self._replace(rates_per_s=self.rates_per_s[left_out:], first=self.first + left_out)

    def until(self, end: int) -> History:
        """Its steps before the one with the number *end*."""
        return self._replace(rates_per_s=self.rates_per_s[: max(end - self.first, 0)])


class Outlook(NamedTuple):
    """A forecast at one instant, and what it was made of."""

    begin_s: float
    """The beginning of its first step, which has begun already."""
    step_s: float
    rates_per_s: tuple[float, ...]
    """Forecast rates of the steps until the horizon."""
    waiting_per_s: float
    """The rate at which what waits now is served by the horizon."""
    machines: int
    """Machines that the highest rate, with its headroom, and what waits need."""


def steps_of(seconds: float, step_s: float) -> int:
    """The steps that *seconds* are, at least one."""
    return max(round(seconds / step_s), 1)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The machines that the highest rate forecast between now and the horizon needs, and those that serve by then what waits.

    A class of one's own has one method more, `ahead(history, steps)`: the rates of the next *steps* steps, the one under way first.
    """

    rate_per_s: float
    """Requests/s that one machine serves within its limits, as `rooftrace capacity --slo` finds them."""
    step_s: float = 300.0
    """Arrivals are counted, and forecast, in steps of this length: a multiple of the interval."""
    horizon_s: float | None = None
    """How far ahead rates count; where it is left out, the time that a machine takes to start, and one interval."""
    headroom: float = 0.0
    """Share by which machines can serve more than is forecast."""
    before: tuple[float, ...] = ()
    """Requests/s in each step before the run, the oldest first: what was known when it began."""
    inner: Control | None = None
    """A policy that has at least what it asks for: of the present load, for what no forecast knows."""
    interval_s: ClassVar[float] = 60.0
    """The run's default."""

    def __post_init__(self) -> None:
        for name in ("rate_per_s", "step_s", "horizon_s"):
            value = getattr(self, name)
            if value is not None and not (isfinite(value) and value > 0):
                raise ValueError(f"{name} is a number above 0; got {value!r}")
        if not (isfinite(self.headroom) and self.headroom >= 0):
            raise ValueError(f"headroom is a share of at least 0; got {self.headroom!r}")
        if any(not (isfinite(rate) and rate >= 0) for rate in self.before):
            raise ValueError("before has rates of at least 0")

    @property
    def history_s(self) -> float:
        """Seconds of history that the forecast is made from."""
        return self.step_s

    @property
    def remembers_s(self) -> float:
        # Two steps more: one that has begun, and one of which a part is forgotten.
        own_s = self.history_s + 2 * self.step_s
        return own_s if self.inner is None else max(own_s, remembers_s(self.inner))

    def fitting(self, interval_s: float, lead_s: float) -> Forecast:
        """The same, for a run that asks after each interval and whose machines start in *lead_s*; ValueError where steps are no
        multiples of the interval."""
        times = self.step_s / interval_s
        if abs(times - round(times)) > 1e-9 or not round(times):
            raise ValueError(f"step_s is a multiple of the interval of {interval_s:g} s; got {self.step_s:g}")
        return self if self.horizon_s is not None else replace(self, horizon_s=lead_s + interval_s)

    def ahead(self, history: History, steps: int, /) -> Sequence[float]:
        """The rates of the next *steps* steps; *history* has one step at least."""
        raise NotImplementedError(f"{type(self).__name__} has no method ahead")

    def history(self, seen: Seen) -> History:
        """The complete steps that were seen, and those before the run."""
        each = round(self.step_s / seen.interval_s)
        now = round(seen.now_s / seen.interval_s)
        past = (seen.past or (seen.mine,))[-now:]
        begins = now - len(past)
        first = -(-begins // each)
        came = [pool.came for pool in past[first * each - begins :]]
        rates = [sum(came[i : i + each]) / self.step_s for i in range(0, len(came) - each + 1, each)]
        if first == 0:
            rates, first = [*self.before, *rates], -len(self.before)
        return History(tuple(rates), first, self.step_s).last(self.history_s)

    def outlook(self, seen: Seen) -> Outlook:
        """The forecast at this instant."""
        horizon_s = seen.interval_s if self.horizon_s is None else self.horizon_s
        history = self.history(seen)
        begin_s = (history.first + len(history.rates_per_s)) * self.step_s
        steps = ceil((seen.now_s - begin_s + horizon_s) / self.step_s - 1e-9)
        if history.rates_per_s:
            rates = tuple(max(float(rate), 0.0) for rate in self.ahead(history, steps))
        else:
            # No step is complete: the mean of what has been seen.
            past = seen.past or (seen.mine,)
            rates = (sum(pool.came for pool in past) / (len(past) * seen.interval_s),) * steps
        waiting_per_s = seen.mine.waiting / horizon_s
        needed = max(rates) * (1.0 + self.headroom) + waiting_per_s
        return Outlook(begin_s, self.step_s, rates, waiting_per_s, ceil(needed / self.rate_per_s - 1e-9))

    def wanted(self, seen: Seen, /) -> int:
        machines = max(self.outlook(seen).machines, min(1, seen.mine.concurrency))
        if self.inner is None:
            return machines
        kept = max(ceil(remembers_s(self.inner) / seen.interval_s - 1e-9), 1)
        return max(machines, wanted_of(self.inner)(replace(seen, past=seen.past[-kept:])))


@dataclass(frozen=True, kw_only=True)
class LastValue(Forecast):
    """The rate of the last step goes on."""

    def ahead(self, history: History, steps: int, /) -> Sequence[float]:
        return (history.rates_per_s[-1],) * steps
