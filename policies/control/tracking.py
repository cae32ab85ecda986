"""A target for what each machine has, as Kubernetes' HorizontalPodAutoscaler keeps it."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, isfinite
from typing import ClassVar, Literal

from policies.control.seen import PoolSeen, Seen

Measure = Literal["waiting", "running", "concurrency", "kv_use", "output_tokens_per_s", "requests_per_s"]


def measured(pool: PoolSeen, measure: Measure, interval_s: float) -> float:
    """A figure of all ready machines together."""
    if measure == "kv_use":
        return pool.kv_use * pool.ready
    if measure == "output_tokens_per_s":
        return pool.finished_tokens / interval_s
    if measure == "requests_per_s":
        return pool.came / interval_s
    return float(getattr(pool, measure))


@dataclass(frozen=True, kw_only=True)
class TargetTracking:
    """ready * (mean per machine / target), rounded up; nothing changes while the ratio is within *tolerance* of 1.

    Machines that are not ready count with a figure of 0 where more are wanted. Where fewer are, pending ones are left out and the
    others count with the target. An answer that these reverse changes nothing.

    kubernetes/kubernetes, pkg/controller/podautoscaler/replica_calculator.go, calcPlainMetricReplicas, for a metric that a server
    has from when it is ready.
    """

    target: float
    """Per machine."""
    measure: Measure = "concurrency"
    tolerance: float = 0.1
    hpa: ClassVar[bool] = True
    """A HorizontalPodAutoscaler follows what it asks for (`policies.control.hpa`)."""

    def __post_init__(self) -> None:
        if not (isfinite(self.target) and self.target > 0):
            raise ValueError(f"target is a number above 0; got {self.target!r}")
        if not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance is a share of at least 0 and below 1; got {self.tolerance!r}")
        if self.measure not in Measure.__args__:
            raise ValueError(f"measure is one of {', '.join(Measure.__args__)}; got {self.measure!r}")

    def wanted(self, seen: Seen, /) -> int:
        pool = seen.mine
        total, current, ready = measured(pool, self.measure, seen.interval_s), pool.machines, pool.ready
        if not ready:
            # No machine has figures; waiting requests need one.
            return current or min(1, pool.waiting)
        ratio = total / ready / self.target
        others = current - ready - (0 if ratio > 1 else pool.pending)
        if others:
            again = (total + (0.0 if ratio > 1 else others * self.target)) / (ready + others) / self.target
            if (ratio < 1) != (again < 1):
                return current
            ratio, ready = again, ready + others
        if abs(ratio - 1.0) <= self.tolerance:
            return current
        return ceil(ratio * ready - 1e-9)
