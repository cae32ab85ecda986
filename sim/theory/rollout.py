"""Closed forms of rollouts: the longest of many answers, and how short a step on several machines can be.

A step waits for its longest answer. Lengths are in tokens, times in seconds.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sim.theory._checks import Values, count, non_negative, plain, positive

_STEP = 0.01
"""The step of the trapezoid rule, in standard deviations; the integrand is smooth, and a hundred times as many points change
nothing."""


def longest_lognormal_tokens(mean_tokens: float, median_tokens: float, answers: int) -> float:
    """Expected longest of *answers* independent lognormal lengths with this mean and median.

    The integral of 1 - F(x)^n over lengths x, F being their distribution and n the answers.

    Source: expectation of the largest order statistic (David and Nagaraja, Order Statistics, section 3.1).
    """
    mean, median = float(positive("mean_tokens", mean_tokens)), float(positive("median_tokens", median_tokens))
    if mean < median:
        raise ValueError(f"a lognormal's mean is not below its median; got {mean:g} and {median:g}")
    n, sigma = float(count("answers", answers, at_least=1)), math.sqrt(2.0 * math.log(mean / median))

    # Lengths in standard deviations of their logarithm: beyond 12, moved by the weight of long lengths, less than 1e-30 is left.
    z = np.arange(-12.0 - sigma, 12.0 + sigma + math.sqrt(2.0 * math.log(n)), _STEP)
    above = np.array([0.5 * math.erfc(each / math.sqrt(2.0)) for each in z])
    # -expm1 and log1p keep what is left of 1 - F^n where F is nearly 1.
    tail = -np.expm1(n * np.log1p(-np.minimum(above, 1.0 - 1e-16)))
    lengths = median * np.exp(sigma * z)
    weighted = tail * sigma * lengths
    return float(lengths[0] + _STEP * (weighted.sum() - 0.5 * (weighted[0] + weighted[-1])))


def packing_bound_s(longest_s: Values, work_s: Values, machines: Values) -> Any:
    """Least time in which *machines* that serve one answer at a time can finish all answers: max(longest, work / m).

    *longest_s* is the time of the longest answer, *work_s* that of all together. No order of answers and no routing beats it.

    Source: Graham, Bounds on Multiprocessing Timing Anomalies, SIAM J. Appl. Math. 17 (1969), section 1.
    """
    longest, work = non_negative("longest_s", longest_s), non_negative("work_s", work_s)
    return plain(np.maximum(longest, work / count("machines", machines, at_least=1)))


def packing_worst_s(longest_s: Values, work_s: Values, machines: Values) -> Any:
    """Most time that they take where a free machine always takes the next answer: work / m + (1 - 1 / m) longest.

    Source: Graham 1969, theorem 1.
    """
    longest, work = non_negative("longest_s", longest_s), non_negative("work_s", work_s)
    m = count("machines", machines, at_least=1)
    return plain(work / m + (1.0 - 1.0 / m) * longest)
