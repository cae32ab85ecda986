"""A forecast by a local linear trend, whose level and trend a Kalman filter follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite
from typing import NamedTuple

import numpy as np

from policies.control.forecasts.base import Forecast, History
from policies.control.forecasts.seasonal import DAY_S


class Followed(NamedTuple):
    """Level and trend (a step) after the last observation, and their covariance as a multiple of the noise's variance."""

    level: float
    trend: float
    covariance: tuple[float, float, float]
    """The variance of the level, the covariance of both, the variance of the trend."""


@dataclass(frozen=True, kw_only=True)
class Kalman(Forecast):
    """A level that wanders and a trend that wanders, seen through noise: the level goes on by its trend (Harvey 1989).

    It begins with the first two steps; before there are two, the rate of the last step. *level* and *trend* are the variances of
    their changes in a step, as multiples of the variance of the noise: what follows the load faster, and heeds noise more.
    """

    level: float = 0.1
    trend: float = 0.001
    damping: float = 1.0
    """The share of the trend that each further step keeps: below 1 it fades."""
    remembered_s: float = DAY_S
    """Seconds of history that it is made from."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("level", "trend"):
            if not (isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name} is a ratio of variances of at least 0; got {getattr(self, name)!r}")
        if not 0 <= self.damping <= 1:
            raise ValueError(f"damping is a share from 0 to 1; got {self.damping!r}")
        if not (isfinite(self.remembered_s) and self.remembered_s >= 2 * self.step_s):
            raise ValueError(f"remembered_s is two steps at least; got {self.remembered_s!r}")

    @property
    def history_s(self) -> float:
        return self.remembered_s

    def ahead(self, history: History, steps: int, /) -> Sequence[float]:
        if len(history.rates_per_s) < 2:
            return history.rates_per_s * steps
        found = followed(history.rates_per_s, self.level, self.trend)
        slope = np.cumsum(self.damping ** np.arange(steps)) * found.trend
        return (found.level + slope).tolist()


@lru_cache(maxsize=32)
def followed(rates: tuple[float, ...], level: float, trend: float) -> Followed:
    """The filter of the local linear trend over *rates*, of which the first two say where it begins."""
    moves = np.array([[1.0, 1.0], [0.0, 1.0]])
    wanders = np.diag([level, trend])
    state = np.array([rates[1], rates[1] - rates[0]])
    # Two observations, each with its noise; the trend and the level have changed once in between.
    spread = np.array([[1.0, 1.0], [1.0, 2.0 + level + trend]])
    for rate in rates[2:]:
        state = moves @ state
        spread = moves @ spread @ moves.T + wanders
        gain = spread[:, 0] / (spread[0, 0] + 1.0)
        state = state + gain * (rate - state[0])
        spread = spread - np.outer(gain, spread[0])
    return Followed(float(state[0]), float(state[1]), (float(spread[0, 0]), float(spread[0, 1]), float(spread[1, 1])))
