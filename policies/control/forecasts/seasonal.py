"""Forecasts of a load that repeats: seasonal naive, and Holt and Winters' exponential smoothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite
from typing import Final

import numpy as np

from policies.control.forecasts.base import Forecast, History, steps_of

DAY_S: Final = 86_400.0
_UNFITTED: Final = (0.2, 0.01, 0.2)
"""Weights of level, trend and season where there is not yet enough to fit them to."""
_STARTS: Final = (_UNFITTED, (0.6, 0.01, 0.1), (0.05, 0.001, 0.4))
"""Weights at which the search for the best begins."""
_REACH, _FINEST = 0.1, 0.005
"""The first and the last step of that search."""


def check_season(season_s: float, step_s: float) -> None:
    """ValueError where a season is no whole number of steps, or only one."""
    steps = season_s / step_s
    if not (isfinite(season_s) and steps > 1 and abs(steps - round(steps)) < 1e-9):
        raise ValueError(f"season_s is a multiple of step_s ({step_s:g} s), at least twice it; got {season_s!r}")


@dataclass(frozen=True, kw_only=True)
class SeasonalNaive(Forecast):
    """The mean rate at the same time of the last *seasons* seasons; before there is one, the rate of the last step."""

    season_s: float = DAY_S
    seasons: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_season(self.season_s, self.step_s)
        if self.seasons < 1:
            raise ValueError(f"seasons is at least 1; got {self.seasons}")

    @property
    def history_s(self) -> float:
        return self.seasons * self.season_s

    def ahead(self, history: History, steps: int, /) -> Sequence[float]:
        return repeated(history.rates_per_s, steps_of(self.season_s, self.step_s), steps)


def repeated(rates: Sequence[float], m: int, steps: int) -> list[float]:
    """The next *steps* values: the mean of those that came whole seasons of *m* before, or the last value without a season."""
    if len(rates) < m:
        return [rates[-1]] * steps
    whole = len(rates) // m
    seasons = np.reshape(rates[len(rates) - whole * m :], (whole, m))
    season = seasons.mean(axis=0) if whole > 1 else seasons[0]
    return [float(season[h % m]) for h in range(steps)]


@dataclass(frozen=True, kw_only=True)
class HoltWinters(Forecast):
    """Exponential smoothing of level, trend and season, which add up (Holt 1957, Winters 1960).

    It begins with the level, trend and season of the first two seasons of its history. Weights that are left out are those of the
    least squared error one step ahead, found anew after each season. With less than two seasons it is seasonal naive.
    """

    season_s: float = DAY_S
    seasons: int = 7
    """Seasons of history that it is made from, at least 2."""
    level: float | None = None
    """The weight of the last step in the level, from 0 to 1; likewise trend and season."""
    trend: float | None = None
    season: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_season(self.season_s, self.step_s)
        if self.seasons < 2:
            raise ValueError(f"seasons is at least 2; got {self.seasons}")
        for name in ("level", "trend", "season"):
            weight = getattr(self, name)
            if weight is not None and not 0 <= weight <= 1:
                raise ValueError(f"{name} is a weight from 0 to 1; got {weight!r}")

    @property
    def history_s(self) -> float:
        # One season more: what the weights were fitted to is still remembered when the next is complete.
        return (self.seasons + 1) * self.season_s

    def ahead(self, history: History, steps: int, /) -> Sequence[float]:
        m = steps_of(self.season_s, self.step_s)
        own = history.last(self.seasons * self.season_s)
        if len(own.rates_per_s) < 2 * m:
            return repeated(own.rates_per_s, m, steps)
        level, trend, seasons, _ = smoothed(own.rates_per_s, m, self.weights(history))
        return [level + (h + 1) * trend + seasons[h % m] for h in range(steps)]

    def weights(self, history: History) -> tuple[float, float, float]:
        """The weights of level, trend and season; where they are fitted, to the whole seasons that history has."""
        given = (self.level, self.trend, self.season)
        m = steps_of(self.season_s, self.step_s)
        end = (history.first + len(history.rates_per_s)) // m * m
        known = history.until(end).last(self.seasons * self.season_s).rates_per_s
        # The first two seasons make the beginning, and nothing can be learnt from them.
        return _fitted(known if None in given and len(known) >= 3 * m else (), m, given)


def smoothed(
    rates: Sequence[float], m: int, weights: tuple[float, float, float]
) -> tuple[float, float, list[float], float]:
    """Level, trend and the next season of *m* steps after *rates*, and the squared error of the forecasts one step ahead."""
    alpha, beta, gamma = weights
    first, second = (np.asarray(rates[begin : begin + m], dtype=np.float64) for begin in (0, m))
    # The line through the middles of two seasons, and the mean distance from it; with the level just before the first step.
    trend = float(second.mean() - first.mean()) / m
    level = float(first.mean()) - trend * (m + 1) / 2
    line = level + trend * np.arange(1, 2 * m + 1)
    seasons: list[float] = ((np.concatenate((first, second)) - line).reshape(2, m).mean(axis=0)).tolist()
    squared = 0.0
    for i, rate in enumerate(rates):
        before, place = level + trend, i % m
        error = rate - before - seasons[place]
        squared += error * error
        level = alpha * (rate - seasons[place]) + (1.0 - alpha) * before
        trend += beta * (level - before)
        seasons[place] += gamma * (1.0 - alpha) * error
    turned = len(rates) % m
    return level, trend, seasons[turned:] + seasons[:turned], squared


@lru_cache(maxsize=32)
def _fitted(
    rates: tuple[float, ...], m: int, given: tuple[float | None, float | None, float | None]
) -> tuple[float, float, float]:
    """The weights, those not *given* by the least squared error; the same for the same arguments."""
    free = [i for i, weight in enumerate(given) if weight is None]

    def filled(values: Sequence[float]) -> tuple[float, float, float]:
        found = [0.0 if weight is None else weight for weight in given]
        for i, value in zip(free, values, strict=True):
            found[i] = value
        return found[0], found[1], found[2]

    starts = [[start[i] for i in free] for start in _STARTS]
    if not (rates and free):
        return filled(starts[0])

    def squared(values: Sequence[float]) -> float:
        return smoothed(rates, m, filled(values))[3]

    best = min(starts, key=squared)
    least, reach = squared(best), _REACH
    while reach >= _FINEST:
        # A step along each weight, either way, and half as far where none is better.
        tried = [[*best[:i], best[i] + way * reach, *best[i + 1 :]] for i in range(len(best)) for way in (1, -1)]
        inside = [each for each in tried if all(0.0 <= value <= 1.0 for value in each)]
        found, values = min((squared(each), each) for each in inside)
        if found < least:
            least, best = found, values
        else:
            reach /= 2
    return filled(best)
