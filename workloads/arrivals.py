"""Arrivals of requests: processes of gaps, and their times in whole nanoseconds.

Asking for more requests, or a longer time, adds to the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from workloads.columns import NS_PER_S, IntArray
from workloads.streams import (
    FromZero,
    Positive,
    Stream,
    check_bounds,
    check_count,
    check_from_zero,
    check_positive,
    stream,
)

FloatArray = NDArray[np.float64]


class ArrivalProcess(Protocol):
    """Requests in time. `gaps_s` gives the seconds between them, from time 0, in chunks without end."""

    def gaps_s(self, seed: int, /, *key: int) -> Iterator[FloatArray]: ...

    @property
    def mean_rate_per_s(self) -> float: ...


_CHUNK = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class _AtRate:
    """The part that processes which are told their mean rate have in common."""

    rate_per_s: Positive

    def __post_init__(self) -> None:
        check_bounds(self)

    @property
    def mean_rate_per_s(self) -> float:
        return self.rate_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Poisson(_AtRate):
    """Independent arrivals: exponential times between them."""

    def gaps_s(self, seed: int, /, *key: int) -> Iterator[FloatArray]:
        rng = stream(seed, Stream.ARRIVALS, *key)
        while True:
            yield rng.standard_exponential(_CHUNK) / self.rate_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Gamma(_AtRate):
    """Renewal process with Gamma times between arrivals: shape 1/cv^2, mean 1/rate; cv 1 is Poisson, 0 is even.

    Time 0 counts as a renewal, so over a short time t the expected count exceeds rate * t by about (cv^2 - 1) / 2.
    """

    cv: FromZero

    def gaps_s(self, seed: int, /, *key: int) -> Iterator[FloatArray]:
        rng = stream(seed, Stream.ARRIVALS, *key)
        while True:
            if self.cv == 0:
                yield np.full(_CHUNK, 1 / self.rate_per_s)
            else:
                yield rng.standard_gamma(1 / self.cv**2, _CHUNK) * (self.cv**2 / self.rate_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deterministic(_AtRate):
    """One arrival each 1/rate seconds, the first after that time."""

    def gaps_s(self, seed: int, /, *key: int) -> Iterator[FloatArray]:
        while True:
            yield np.full(_CHUNK, 1 / self.rate_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pareto(_AtRate):
    """Renewal process with heavy-tailed times between arrivals: Pareto of the second kind (Lomax), mean 1/rate.

    Survival (1 + t / s)^-tail with s = (tail - 1) / rate; tail > 1. The CV is sqrt(tail / (tail - 2)), without
    bound for tail <= 2.
    """

    tail: float

    def __post_init__(self) -> None:
        _AtRate.__post_init__(self)
        if not (math.isfinite(self.tail) and self.tail > 1):
            raise ValueError(f"tail is a number above 1, or the mean gap has no bound; got {self.tail!r}")

    def gaps_s(self, seed: int, /, *key: int) -> Iterator[FloatArray]:
        rng = stream(seed, Stream.ARRIVALS, *key)
        while True:
            # Exponential deviates through the inverse: the tail of 1 - U would be cut at 2^-53.
            yield np.expm1(rng.standard_exponential(_CHUNK) / self.tail) * ((self.tail - 1) / self.rate_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mmpp:
    """Markov-modulated Poisson process: Poisson at the rate of a hidden state that changes from time to time.

    State i lasts exponentially with mean `mean_state_s[i]`; the next is any other with equal probability (two
    states alternate). It starts in its stationary distribution. Rates may be 0 in some states.
    """

    rates_per_s: tuple[float, ...]
    mean_state_s: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rates_per_s", tuple(map(float, self.rates_per_s)))
        object.__setattr__(self, "mean_state_s", tuple(map(float, self.mean_state_s)))
        if len(self.rates_per_s) < 2 or len(self.rates_per_s) != len(self.mean_state_s):
            raise ValueError(
                "mmpp needs at least two states with a rate and a mean duration each; "
                f"got {len(self.rates_per_s)} rates and {len(self.mean_state_s)} durations"
            )
        for rate in self.rates_per_s:
            check_from_zero(rate, "rates_per_s")
        for mean_s in self.mean_state_s:
            check_positive(mean_s, "mean_state_s")
        if max(self.rates_per_s) == 0:
            raise ValueError("mmpp needs a state with a rate above 0; got only zeros")

    @property
    def mean_rate_per_s(self) -> float:
        # The state sequence visits all states equally often, so time shares are as the durations.
        return sum(map(float.__mul__, self.rates_per_s, self.mean_state_s)) / sum(self.mean_state_s)

    def gaps_s(self, seed: int, /, *key: int) -> Iterator[FloatArray]:
        arrivals = stream(seed, Stream.ARRIVALS, *key)
        states = stream(seed, Stream.ARRIVAL_STATES, *key)
        share = np.array(self.mean_state_s) / sum(self.mean_state_s)
        state = int(states.choice(len(share), p=share))
        remaining_s = states.standard_exponential() * self.mean_state_s[state]
        while True:
            # Unit exponentials are spent as work at the state's rate; what a state leaves goes to the next.
            gaps = np.empty(256)
            for k, work in enumerate(arrivals.standard_exponential(256).tolist()):
                gap_s = 0.0
                while work > (done := self.rates_per_s[state] * remaining_s):
                    work -= done
                    gap_s += remaining_s
                    step = int(states.integers(1, len(share)))
                    state = (state + step) % len(share)
                    remaining_s = states.standard_exponential() * self.mean_state_s[state]
                used_s = work / self.rates_per_s[state] if work > 0 else 0.0
                remaining_s = max(remaining_s - used_s, 0.0)
                gaps[k] = gap_s + used_s
            yield gaps


def arrivals_ns(
    process: ArrivalProcess,
    seed: int,
    *key: int,
    n_requests: int | None = None,
    duration_s: float | None = None,
) -> IntArray:
    """Arrival times in nanoseconds: the first *n_requests*, or those before *duration_s* (maybe none)."""
    if (n_requests is None) == (duration_s is None):
        raise ValueError("give one of n_requests and duration_s")
    if n_requests is not None:
        check_count(n_requests, "n_requests")
    if duration_s is not None:
        check_positive(duration_s, "duration_s")
    most = math.inf if n_requests is None else n_requests
    # The margin covers the rounding of a sum by chunks against the sum one by one.
    end_s = math.inf if duration_s is None else duration_s * (1 + 1e-9)
    chunks: list[FloatArray] = []
    total, elapsed_s = 0, 0.0
    gaps_s = process.gaps_s(seed, *key)
    while total < most and elapsed_s <= end_s and elapsed_s * NS_PER_S < 2**63:
        chunks.append(next(gaps_s))
        total += len(chunks[-1])
        elapsed_s += float(chunks[-1].sum())
    drawn_s = np.concatenate(chunks)
    kept = n_requests if n_requests is not None else int(np.searchsorted(np.cumsum(drawn_s), end_s))
    gaps_ns = drawn_s[:kept] * NS_PER_S
    if float(gaps_ns.sum()) >= 2**62:
        raise ValueError(f"{process!r} takes more than 146 years for the requests asked for; raise its rate")
    # Whole nanoseconds are summed as integers and only fractions as floats, so that long runs do not drift.
    whole = np.trunc(gaps_ns)
    times = np.cumsum(whole.astype(np.int64)) + np.rint(np.cumsum(gaps_ns - whole)).astype(np.int64)
    return times if duration_s is None else times[times < round(duration_s * NS_PER_S)]
