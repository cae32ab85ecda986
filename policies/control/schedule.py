"""Numbers of machines that are known before: a timetable, and the choice of a controller that knew all arrivals."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, isfinite

from policies.control.seen import Seen


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """*machines*[i] from *at_s*[i] on; after *every_s* seconds it begins again, and without it the last number holds to the end."""

    at_s: Sequence[float]
    machines: Sequence[int]
    every_s: float | None = None

    def __post_init__(self) -> None:
        at_s, machines = list(self.at_s), list(self.machines)
        if not at_s or at_s[0] != 0 or any(b <= a for a, b in pairwise(at_s)):
            raise ValueError(f"at_s starts with 0 and ascends; got {at_s!r}")
        if len(machines) != len(at_s):
            raise ValueError(f"a schedule has as many machines as times; got {len(machines)} and {len(at_s)}")
        if min(machines) < 0:
            raise ValueError(f"a schedule has at least 0 machines; got {min(machines)}")
        if self.every_s is not None and not (isfinite(self.every_s) and self.every_s > at_s[-1]):
            raise ValueError(f"every_s lies after the last of at_s, {at_s[-1]:g}; got {self.every_s!r}")

    def wanted(self, seen: Seen, /) -> int:
        now_s = seen.now_s if self.every_s is None else seen.now_s % self.every_s
        return self.machines[bisect_right(self.at_s, now_s + 1e-9) - 1]


@dataclass(frozen=True, kw_only=True)
class Perfect:
    """The machines needed for arrivals until one started now would be ready: a bound, as no policy knows arrivals.

    Each serves *rate_per_s* requests/s, counted in steps of *step_s*.
    """

    rate_per_s: float
    step_s: float = 60.0
    counts: tuple[int, ...] = ()
    """Arrivals in each step of the run, which the run fills in."""
    lead_s: float = 0.0
    """Time that a machine takes to start, likewise."""

    def __post_init__(self) -> None:
        for name in ("rate_per_s", "step_s"):
            value = getattr(self, name)
            if not (isfinite(value) and value > 0):
                raise ValueError(f"{name} is a number above 0; got {value!r}")

    def told(self, arrival_s: Sequence[float], lead_s: float) -> Perfect:
        """The same, knowing when requests arrive (ascending) and how long machines take to start."""
        counts: list[int] = []
        for at_s in arrival_s:
            place = int(at_s / self.step_s + 1e-9)
            counts += [0] * (place + 1 - len(counts))
            counts[place] += 1
        return replace(self, counts=tuple(counts), lead_s=lead_s)

    def wanted(self, seen: Seen, /) -> int:
        first = int(seen.now_s / self.step_s + 1e-9)
        # Until the next look a machine that is started then could not be ready any sooner.
        last = ceil((seen.now_s + self.lead_s + seen.interval_s) / self.step_s - 1e-9)
        most = max(self.counts[first:last], default=0)
        return max(ceil(most / (self.rate_per_s * self.step_s) - 1e-9), min(1, seen.mine.concurrency))
