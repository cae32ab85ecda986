"""The change of a latency between two runs of the same requests, from those two runs alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.study import statistics as st

LEAST_STRETCHES = 12
"""Independent stretches below which there is no interval: the variance of fewer is a guess, whatever one does with it."""
ENOUGH_STRETCHES = 20
"""The number that a longer run should aim for, since the number is an estimate."""
LEAST_BEYOND, ENOUGH_BEYOND = 2, 4
"""Independent excursions beyond a quantile: the same two numbers. With fewer than two, all that is known of the tail is
one episode."""
_LEAST_IN_LINE = 30
STATISTICS: Mapping[str, float | None] = {
    "mean": None, "median": 0.5, "p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99,
}  # fmt: skip
"""The statistics that `latency_change` can compare, and the quantile of each; None for the mean."""


def latency_change(
    a: NDArray[Any],
    b: NDArray[Any],
    statistic: str,
    *,
    stretches: float = math.inf,
    level: float = st.LEVEL,
    otherwise: str = ", or compare the scenarios over replications",
) -> tuple[st.Change | None, str]:
    """The change of *statistic* from latencies *a* to *b* of the same requests, in order of arrival, and why it is unsure.

    Shapes [n]; requests without a value in either are left out. *stretches*: how many independent ones the queues allow
    for (`queue_stretches`); the correlation of the latencies, or of being beyond the quantile, may allow for fewer. Where
    there are too few of them, or of requests, the change has no interval and the sentence says how many would do, and what
    would *otherwise*. None
    for the change where *a* has no value above 0. Intervals of means are exact to a percent or two, those of quantiles
    err on the wide side (docs/coverage.md).
    """
    probability = STATISTICS[statistic]
    known = ~(np.isnan(a) | np.isnan(b))
    a, b = a[known], b[known]
    of = _statistic(probability)
    if not a.size or of(a) <= 0:
        return None, "no request has a value in both" if not a.size else "no relative change from 0"
    alone = st.Change(mean=float(of(b) / of(a)) - 1, low=math.nan, high=math.nan, n=1, level=level)
    in_a_batch = 2 if probability is None else max(2, math.ceil(1 / (1 - probability) - 1e-9))
    least = in_a_batch * st.RATIO_BATCHES
    if a.size < least:
        return alone, (
            f"{a.size:,} requests are too few for an interval of this: {least:,} are the least; replay more{otherwise}"
        )
    if probability is None:
        seen = min(st.independent_values(each) for each in (a, b, b - b.mean() / a.mean() * a))
        short = min(stretches, seen) / LEAST_STRETCHES, ENOUGH_STRETCHES / LEAST_STRETCHES
    else:
        seen = min(probability, 1 - probability) * min(_independent_beyond(side, probability) for side in (a, b))
        # Few stretches of a queue reach its far quantiles at all: so many that one of them would.
        least_stretches = max(LEAST_STRETCHES, 1 / min(probability, 1 - probability) - 1e-9)
        short = min(stretches / least_stretches, seen / LEAST_BEYOND), ENOUGH_BEYOND / LEAST_BEYOND
    share, aim = short
    if stretches <= 0:
        return alone, (
            "requests arrive as fast as they are served, so that no number of them gives an interval; lower the rate or "
            "add replicas"
        )
    if share < 1:
        return alone, (
            f"{a.size:,} requests are too few for an interval of this at this load: about "
            f"{_round_up(a.size * aim / share)} would do; replay so many{otherwise}"
        )
    return st.batch_ratio(a, b, of, stretches=min(stretches, seen), level=level), ""


def queue_stretches(
    arrival_ns: NDArray[np.int64], scheduled_ns: NDArray[np.int64], replica: NDArray[np.int64]
) -> float:
    """The number of independent stretches of its queue that a run holds; infinite where requests hardly wait for one another.

    A queue forgets after about 2 (c_a^2 + c_s^2) / (1 - load)^2 requests, c_a and c_s being the coefficients of variation
    of gaps between arrivals and of service: Whitt, "Planning queueing simulations", Management Science 35 (1989). Here
    load is the arrival rate over the rate at which replicas take requests that stand in line, those that had arrived
    before the one ahead of them was taken; their gaps have c_s. This tells far more than the latencies' own
    correlation, which looks short in just those runs that happened to meet no long queue. Shapes [n]; scheduled_ns is -1
    where a request was never taken.
    """
    taken = scheduled_ns >= 0
    arrival_ns, scheduled_ns, replica = arrival_ns[taken], scheduled_ns[taken], replica[taken]
    gaps_ns = []
    hosts = np.unique(replica)
    for index in hosts:
        mine = replica == index
        order = np.lexsort((arrival_ns[mine], scheduled_ns[mine]))
        start, since = scheduled_ns[mine][order], arrival_ns[mine][order]
        gaps_ns.append(np.diff(start)[since[1:] < start[:-1]])
    gaps = np.concatenate([np.empty(0), *gaps_ns])
    between = np.diff(np.sort(arrival_ns)).astype(np.float64)
    if gaps.size < _LEAST_IN_LINE or between.mean() <= 0 or gaps.mean() <= 0:
        return math.inf
    load = float(gaps.mean() / (between.mean() * hosts.size))
    if load >= 1:
        return 0.0
    spread = float(between.var() / between.mean() ** 2 + gaps.var() / gaps.mean() ** 2)
    return math.inf if spread == 0 else arrival_ns.size * (1 - load) ** 2 / (2 * spread)


def _independent_beyond(values: NDArray[Any], probability: float) -> float:
    """The number of independent values that the series of being beyond its quantile is worth."""
    at = np.quantile(values, probability)
    beyond = values > at
    return st.independent_values(beyond if beyond.any() else values >= at)


def _statistic(probability: float | None) -> Callable[[NDArray[Any]], float]:
    return np.mean if probability is None else lambda values: float(np.quantile(values, probability))


def _round_up(n: float) -> str:
    """*n* to two digits, upwards."""
    step = 10 ** max(0, math.floor(math.log10(n)) - 1)
    return f"{math.ceil(n / step) * step:,}"
