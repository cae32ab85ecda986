"""The error that a prediction may have: 90 % intervals from errors on rows that a fit did not see."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

LEVEL = 0.90
"""Share of measurements that an interval is meant to hold."""


class Estimate(NamedTuple):
    """Predicted seconds, and the ends of the interval that holds the measured ones nine times in ten."""

    seconds: Any
    low: Any
    high: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Where the middle 90 % of measured / predicted lie, in percent off 1, and the range of seconds that was measured."""

    low_pct: float
    high_pct: float
    shortest_s: float = 0.0
    longest_s: float = math.inf

    def __post_init__(self) -> None:
        if not -100.0 < self.low_pct <= self.high_pct:
            raise ValueError(
                f"an interval runs from above -100 % up to its other end; got {self.low_pct} to {self.high_pct}"
            )

    @property
    def factor(self) -> float:
        """The wider side as a factor: 1.2 is a measured time up to 1.2 times, or down to 1 / 1.2 of, the predicted."""
        return max(1.0 + self.high_pct / 100.0, 1.0 / (1.0 + self.low_pct / 100.0))

    def around(self, seconds: Any) -> Estimate:
        """The interval around predicted seconds.

        Outside the measured range both sides grow, in logarithms, by their own width for each factor e of distance, and
        an end that lies on the wrong side of the prediction (a biased fit) moves to it.
        """
        at = np.asarray(seconds, float)
        floor = np.maximum(at, 1e-300)
        beyond = np.maximum(0.0, np.log(self.shortest_s / floor) if self.shortest_s > 0 else 0.0)
        if math.isfinite(self.longest_s):
            beyond = beyond + np.maximum(0.0, np.log(floor / self.longest_s))
        low = at * np.exp(min(0.0, math.log1p(self.low_pct / 100.0)) * (1.0 + beyond))
        high = at * np.exp(max(0.0, math.log1p(self.high_pct / 100.0)) * (1.0 + beyond))
        if at.ndim == 0:
            return Estimate(float(at), float(low), float(high))
        return Estimate(at, low, high)


def spread(measured_over_predicted: Any) -> tuple[float, float]:
    """The ends between which a further ratio lies with 90 %, in percent off 1.

    Split conformal prediction (Vovk et al., Algorithmic Learning in a Random World, 2005): of n ratios the order
    statistics of n + 1, which few ratios move outward, to the extremes at most.
    """
    ratio = np.sort(np.asarray(measured_over_predicted, float))
    n, tail = len(ratio), (1.0 - LEVEL) / 2.0
    low = ratio[max(0, math.floor((n + 1) * tail) - 1)]
    high = ratio[min(n, math.ceil((n + 1) * (1.0 - tail))) - 1]
    return float(100.0 * (low - 1.0)), float(100.0 * (high - 1.0))


def coverage_pct(measured_over_predicted: Any, groups: Any) -> float:
    """Percent of ratios inside the interval that the other half of the *groups* gives: no ratio judges itself.

    `groups`: a text for each ratio; equal ones stay together. NaN where one half would be empty.
    """
    ratio = np.asarray(measured_over_predicted, float)
    names = np.asarray(groups).astype(str)
    # The last bit of a checksum is as even as any; the seed tells this halving from the one that holds rows back.
    side = {name: zlib.crc32(f"interval:{name}".encode()) >> 7 & 1 for name in set(names.tolist())}
    half = np.array([side[name] for name in names.tolist()], bool)
    if not half.any() or half.all():
        return math.nan
    held = 0
    for scored in (half, ~half):
        low, high = spread(ratio[~scored])
        offset = 100.0 * (ratio[scored] - 1.0)
        held += int(((offset >= min(low, 0.0)) & (offset <= max(high, 0.0))).sum())
    return 100.0 * held / len(ratio)
