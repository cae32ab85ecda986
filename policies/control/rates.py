"""As many machines as keep a limit on TTFT at the present rate of arrivals, by a model of a machine's capacity."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, isfinite

from policies.control.seen import Seen


def waits_longer(load: float, machines: int, rate_per_s: float, limit_s: float) -> float:
    """The share of requests that wait longer than *limit_s* for one of *machines* that each serve *rate_per_s*, when *load* of them
    would be busy: an M/M/c queue (Erlang 1917). 1 where the machines cannot keep up."""
    if load >= machines:
        return 1.0
    blocked = 1.0
    for n in range(1, machines + 1):
        blocked = load * blocked / (n + load * blocked)
    waits = blocked / (1.0 - load / machines * (1.0 - blocked))
    return waits * exp(-(machines - load) * rate_per_s * limit_s)


@dataclass(frozen=True, kw_only=True)
class RateModel:
    """The fewest machines at which no more than 1 - *share* of requests wait longer than *ttft_s*, at the highest rate of the last
    *remembers_s*; one more than there are where p95 of TTFT is over the limit all the same and all machines are ready."""

    rate_per_s: float
    """Requests/s that one machine serves within the limit, as `rooftrace capacity --slo` finds them."""
    ttft_s: float
    share: float = 0.95
    remembers_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("rate_per_s", "ttft_s"):
            value = getattr(self, name)
            if not (isfinite(value) and value > 0):
                raise ValueError(f"{name} is a number above 0; got {value!r}")
        if not 0 < self.share < 1:
            raise ValueError(f"share is above 0 and below 1; got {self.share!r}")

    def wanted(self, seen: Seen, /) -> int:
        pool = seen.mine
        rate = max((each.came for each in seen.past), default=pool.came) / seen.interval_s
        load = rate / self.rate_per_s
        machines = int(load) + (load > 0)
        while load and waits_longer(load, machines, self.rate_per_s, self.ttft_s) > 1.0 - self.share:
            machines += 1
        late = pool.ttft_p95_s is not None and pool.ttft_p95_s > self.ttft_s
        if late and pool.ready == pool.machines:
            machines = max(machines, pool.machines + 1)
        return max(machines, min(1, pool.concurrency))
