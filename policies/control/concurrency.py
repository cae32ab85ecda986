"""Numbers of machines by the requests that wait or run: KEDA's, and Knative's."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from math import ceil, isfinite
from typing import ClassVar

from policies.control.seen import Seen


def _check_target(target: float, utilization: float = 1.0) -> None:
    if not (isfinite(target) and target > 0):
        raise ValueError(f"target is a number of requests above 0; got {target!r}")
    if not 0 < utilization <= 1:
        raise ValueError(f"utilization is a share above 0 and at most 1; got {utilization!r}")


@dataclass(frozen=True, kw_only=True)
class Concurrency:
    """All requests that wait or run over *target*, rounded up, however many machines are ready; 0 without requests.

    KEDA's rule for Kubernetes with a metric of type AverageValue: the total is divided, and within a *tolerance* of the present
    number nothing changes (kubernetes' replica_calculator.go, GetExternalPerPodMetricReplicas). KEDA scales from and to zero by
    itself (kedacore/keda, pkg/scaling/executor/scale_executor.go).
    """

    target: float
    tolerance: float = 0.1
    hpa: ClassVar[bool] = True
    """The HorizontalPodAutoscaler that KEDA makes follows what it asks for (`policies.control.hpa`)."""

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
    """Mean concurrency of the last *stable_s* over *target* x *utilization*, rounded up; at least half of the ready machines.

    There is a panic where the last *panic_s* ask for *panic_at* times the ready machines, or did within *stable_s*, and where a run
    starts with more than one: what they ask for is then the least, and no machine is drained. The last one goes after *stable_s*
    and *grace_s* without a request. Knative's pod autoscaler (knative/serving, pkg/autoscaler/scaling/autoscaler.go, and
    pkg/reconciler/autoscaling/kpa/scaler.go).
    """

    target: float
    utilization: float = 0.7
    """`container-concurrency-target-percentage`."""
    stable_s: float = 60.0
    panic_s: float = 6.0
    panic_at: float = 2.0
    grace_s: float = 30.0
    """`scale-to-zero-grace-period`."""
    interval_s: ClassVar[float] = 2.0
    """Knative's, the run's default."""

    def __post_init__(self) -> None:
        _check_target(self.target, self.utilization)
        if not (isfinite(self.stable_s) and 0 < self.panic_s <= self.stable_s):
            raise ValueError(f"panic_s is above 0 and at most stable_s; got {self.panic_s} and {self.stable_s}")
        if not self.panic_at > 1:
            raise ValueError(f"panic_at is above 1; got {self.panic_at}")
        if not (isfinite(self.grace_s) and self.grace_s >= 0):
            raise ValueError(f"grace_s is a finite time of at least 0; got {self.grace_s}")

    @property
    def remembers_s(self) -> float:
        return self.stable_s + max(self.panic_s, self.grace_s)

    def wanted(self, seen: Seen, /) -> int:
        past, pool = seen.past or (seen.mine,), seen.mine
        sums, now = [0, *accumulate(each.concurrency for each in past)], len(past)

        def asked(seconds: float, end: int) -> int:
            """The number by the mean of so many seconds, up to and including the interval before *end*."""
            n = min(max(round(seconds / seen.interval_s), 1), end)
            return ceil((sums[end] - sums[end - n]) / n / (self.target * self.utilization) - 1e-9)

        recent = range(max(now - max(round(self.stable_s / seen.interval_s), 1), 0), now)
        panic = any(asked(self.panic_s, i + 1) >= self.panic_at * max(past[i].ready, 1) for i in recent)
        stable = max(asked(self.stable_s, now), pool.ready // 2)
        if panic or (seen.now_s < self.stable_s and past[0].machines > 1):
            return max(asked(self.panic_s, now), stable, pool.machines)
        idle = max(int((self.stable_s + self.grace_s) / seen.interval_s), 1)
        return stable or min(int(now < idle or sums[now] > sums[now - idle]), pool.machines)
