"""Machines in time: how they start, how many there should be, how they fail, and what then happens to requests."""

from __future__ import annotations

from dataclasses import dataclass
from math import gamma, isfinite
from typing import Annotated, Final, Literal

import numpy as np
from annotated_types import Ge

from policies.control import Control, Hpa, remembers_s

InFlight = Literal["resume", "retry", "lose"]
WhenNone = Literal["wait", "lose"]

OFF, STARTING, READY, DRAINING, FAILED = range(5)

PENDING: Final = ("provision", "image", "container")
"""Names of the phases of a start in which no server runs yet: Kubernetes calls such a pod pending."""

_FAILURE_STREAM: Final = 0x6661696C
"""Names the random stream of failures; draws belong to (machine, number of the failure)."""


def _time(name: str, value: float, *, least: float = 0.0) -> None:
    if not (isfinite(value) and value >= least):
        raise ValueError(f"{name} is a finite time of at least {least:g} s; got {value!r}")


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Growth and shrinking of a pool."""

    policy: Control
    min_machines: int
    initial: int
    """Ready when the run begins; the pool's machines are the most that there may be."""
    interval_s: float = 15.0
    """The policy is asked at the end of each."""
    phases: tuple[tuple[str, float], ...] = ()
    """Names and seconds of what a machine does until it is ready, in this order."""
    down_window_s: float = 0.0
    """See `policies.control.stabilised`."""
    up_window_s: float = 0.0
    hpa: Hpa | None = None
    """A HorizontalPodAutoscaler limits how many machines come at once, and without a `behavior` in its spec takes the most that was
    asked for within *down_window_s*, both ways; None: there is none."""
    drain_s: float | None = None
    """A machine that still has requests so long after it began to drain stops all the same, and its requests are treated as when it
    fails; None: it waits for their end."""

    def __post_init__(self) -> None:
        _time("interval_s", self.interval_s)
        if round(self.interval_s * 1e9) < 1:
            raise ValueError(f"interval_s is above 0; got {self.interval_s!r}")
        for name in ("down_window_s", "up_window_s", "drain_s"):
            if getattr(self, name) is not None:
                _time(name, getattr(self, name))
        for name, seconds in self.phases:
            _time(f"phase {name}", seconds)
        if self.min_machines < 0:
            raise ValueError(f"min_machines is at least 0; got {self.min_machines}")
        if self.initial < self.min_machines:
            raise ValueError(f"a pool begins with no fewer than its least, {self.min_machines}; got {self.initial}")
        remembers_s(self.policy)


@dataclass(frozen=True, kw_only=True)
class Life:
    """A time drawn anew for each failure: Weibull with *shape*, which is exponential with 1; 0 fixes it at its mean."""

    mean_s: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        _time("mean_s", self.mean_s)
        if not (isfinite(self.shape) and self.shape >= 0):
            raise ValueError(f"shape is at least 0; got {self.shape!r}")

    def draw_ns(self, rng: np.random.Generator) -> int:
        """At least 1 ns."""
        seconds = self.mean_s
        if self.shape > 0:
            seconds *= float(rng.weibull(self.shape)) / gamma(1.0 + 1.0 / self.shape)
        return max(round(seconds * 1e9), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """A failure at a known time."""

    machine: Annotated[int, Ge(0)]
    """The machine's number, from 0, through all pools."""
    at_s: Annotated[float, Ge(0)]
    for_s: Annotated[float, Ge(0)] | None = None
    """Where it is left out, the machine does not come back."""

    def __post_init__(self) -> None:
        _time("at_s", self.at_s)
        if self.for_s is not None:
            _time("for_s", self.for_s)


@dataclass(frozen=True, kw_only=True)
class Failing:
    """Distributions of a machine's time from becoming ready to failure, and of the time that it is down."""

    up: Life
    down: Life

    def draw_ns(self, seed: int, machine: int, number: int) -> tuple[int, int]:
        """Time that a machine is up before its failure *number*, and down after it."""
        rng = np.random.default_rng([seed, _FAILURE_STREAM, machine, number])
        return self.up.draw_ns(rng), self.down.draw_ns(rng)


@dataclass(frozen=True, kw_only=True)
class FleetSpec:
    """Changes of machines in time."""

    pools: tuple[int, ...]
    """The number of each machine's pool."""
    names: tuple[str, ...]
    """Names of pools."""
    scaling: tuple[Scaling | None, ...]
    """One for each pool; None: all of its machines are there from the beginning."""
    failing: tuple[Failing | None, ...]
    """One for each pool; None: its machines fail only by `outages`."""
    outages: tuple[Outage, ...] = ()
    in_flight: InFlight = "resume"
    """Treatment of the requests of a machine that fails: they continue elsewhere, where the tokens that they have emitted are
    computed like a prompt; begin anew elsewhere; or are lost."""
    retries: int | None = 3
    """A request whose machine fails more often is lost; None: it is sent again each time."""
    when_none: WhenNone = "wait"
    """Treatment of a request for which no machine is ready."""

    def __post_init__(self) -> None:
        n = len(self.names)
        if len(self.scaling) != n or len(self.failing) != n:
            raise ValueError(
                f"{n} pools have a scaling and a failing each; got {len(self.scaling)}, {len(self.failing)}"
            )
        if any(not 0 <= pool < n for pool in self.pools):
            raise ValueError(f"pools are numbers from 0 to {n - 1}; got {self.pools!r}")
        if self.retries is not None and self.retries < 0:
            raise ValueError(f"retries is at least 0; got {self.retries}")
        for outage in self.outages:
            if not 0 <= outage.machine < len(self.pools):
                raise ValueError(f"there is no machine {outage.machine}; they count from 0 to {len(self.pools) - 1}")
        for name, scaling, number in zip(self.names, self.scaling, range(n), strict=True):
            have = self.pools.count(number)
            if scaling is not None and scaling.initial > have:
                raise ValueError(f"pool {name} begins with {scaling.initial} machines and can have {have} at most")

    def machines_of(self, pool: int) -> list[int]:
        return [machine for machine, number in enumerate(self.pools) if number == pool]
