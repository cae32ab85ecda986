"""Numbers of machines by the requests that wait or run: KEDA's, and Knative's."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from math import ceil, isfinite
from typing import ClassVar

from policies.control.seen import Seen


def _check_target(target: float) -> None:
    if not (isfinite(target) and target > 0):
        raise ValueError(f"target is a number of requests above 0; got {target!r}")


@dataclass(frozen=True, kw_only=True)
class Concurrency:
    """All requests that wait or run over *target*, rounded up, however many machines are ready; 0 without requests.

    KEDA's rule for Kubernetes with a metric of type AverageValue: the total is divided, within a *tolerance* of the present number
    nothing changes, and KEDA scales from and to zero by itself (kedacore/keda and kubernetes' replica_calculator.go,
    GetExternalPerPodMetricReplicas; from knowledge, to be checked there).
    """

    target: float
    tolerance: float = 0.1
    down_window_s: ClassVar[float] = 300.0
    """Kubernetes' stabilisation of scaling down, the run's default."""

    def __post_init__(self) -> None:
        _check_target(self.target)
        if not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance is a share of at least 0 and below 1; got {self.tolerance!r}")

    def wanted(self, seen: Seen, /) -> int:
        total, current = seen.mine.concurrency, seen.mine.machines
        if not (total and current):
            return min(1, total)
        if abs(total / (self.target * current) - 1.0) <= self.tolerance:
            return current
        return ceil(total / self.target - 1e-9)


@dataclass(frozen=True, kw_only=True)
class Knative:
    """Mean concurrency of the last *stable_s* over *target*, rounded up; in a panic at least that of the last *panic_s*.

    There is a panic where the latter asks for *panic_at* times the ready machines, or did so within *stable_s*; no machine is then
    drained.

    Knative's pod autoscaler (knative/serving, pkg/autoscaler/scaling/autoscaler.go; from knowledge, to be checked there).
    """

    target: float
    stable_s: float = 60.0
    panic_s: float = 6.0
    panic_at: float = 2.0

    def __post_init__(self) -> None:
        _check_target(self.target)
        if not (isfinite(self.stable_s) and 0 < self.panic_s <= self.stable_s):
            raise ValueError(f"panic_s is above 0 and at most stable_s; got {self.panic_s} and {self.stable_s}")
        if not self.panic_at > 1:
            raise ValueError(f"panic_at is above 1; got {self.panic_at}")

    @property
    def remembers_s(self) -> float:
        return 2 * self.stable_s

    def wanted(self, seen: Seen, /) -> int:
        past = seen.past or (seen.mine,)
        sums = [0, *accumulate(pool.concurrency for pool in past)]

        def asked(seconds: float, end: int) -> int:
            """The number by the mean of so many seconds, up to and including the interval before *end*."""
            n = min(max(round(seconds / seen.interval_s), 1), end)
            return ceil((sums[end] - sums[end - n]) / n / self.target - 1e-9)

        n, now = max(round(self.stable_s / seen.interval_s), 1), len(past)
        recent = range(max(now - n, 0), now)
        if any(asked(self.panic_s, i + 1) >= self.panic_at * max(past[i].ready, 1) for i in recent):
            return max(asked(self.panic_s, now), asked(self.stable_s, now), seen.mine.machines)
        return asked(self.stable_s, now)
