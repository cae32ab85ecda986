"""Arrivals whose rate follows the hour: piecewise constant or sinusoidal over a period, with bursts, as long as one asks."""

from __future__ import annotations

import csv
import itertools
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workloads.streams import FromZero, Positive, Stream, check_bounds, check_from_zero, stream

FloatArray = NDArray[np.float64]
_CHUNK = 4096
DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Curve:
    """A renewal process in operational time: gaps of mean 1 and variation *cv*, stretched so that the rate follows the curve.

    With cv 1 that is a Poisson process of that rate. During bursts the rate is *burst_factor* times the curve's; they last
    *burst_s* on average and *burst_every_s* passes between them, both exponential.
    """

    cv: FromZero = 1.0
    burst_factor: FromZero = 1.0
    burst_every_s: Positive = 3600.0
    burst_s: Positive = 60.0

    def expected(self, seconds: FloatArray) -> FloatArray:
        """Requests that the curve brings on average until each of *seconds*, without bursts."""
        raise NotImplementedError

    def reached(self, requests: FloatArray) -> FloatArray:
        """The time at which that many have come on average: the inverse of `expected`."""
        raise NotImplementedError

    @property
    def _curve_mean_per_s(self) -> float:
        raise NotImplementedError

    @property
    def mean_rate_per_s(self) -> float:
        share = self.burst_s / (self.burst_s + self.burst_every_s)
        return self._curve_mean_per_s * (1 + share * (self.burst_factor - 1))

    def gaps_s(self, seed: int, /, *key: int) -> Iterator[FloatArray]:
        rng = stream(seed, Stream.ARRIVALS, *key)
        bursts = None if self.burst_factor == 1 else _Bursts(self, stream(seed, Stream.ARRIVAL_STATES, *key))
        level, last_s = 0.0, 0.0
        while True:
            gaps = rng.standard_gamma(1 / self.cv**2, _CHUNK) * self.cv**2 if self.cv else np.ones(_CHUNK)
            levels = level + np.cumsum(gaps)
            level = float(levels[-1])
            times = self.reached(levels) if bursts is None else bursts.reached(levels)
            yield np.diff(times, prepend=last_s)
            last_s = float(times[-1])


class _Bursts:
    """A curve times a factor that changes between 1 and its `burst_factor`; knots are drawn as far as they are needed."""

    def __init__(self, curve: _Curve, rng: np.random.Generator) -> None:
        self._curve = curve
        self._rng = rng
        self._knots_s, self._expected, self._level = [0.0], [0.0], [0.0]

    def reached(self, levels: FloatArray) -> FloatArray:
        while self._level[-1] <= levels[-1]:
            calm = len(self._knots_s) % 2 == 1
            mean_s = self._curve.burst_every_s if calm else self._curve.burst_s
            knot = self._knots_s[-1] + float(self._rng.standard_exponential()) * mean_s
            expected = float(self._curve.expected(np.array([knot]))[0])
            factor = 1.0 if calm else self._curve.burst_factor
            self._level.append(self._level[-1] + factor * (expected - self._expected[-1]))
            self._knots_s.append(knot)
            self._expected.append(expected)
        level = np.array(self._level)
        part = np.searchsorted(level, levels, side="right") - 1
        factor = np.where(part % 2 == 0, 1.0, self._curve.burst_factor)
        return self._curve.reached(np.array(self._expected)[part] + (levels - level[part]) / factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piecewise(_Curve):
    """One rate after the other, each for *window_s* seconds, and then again from the first."""

    rates_per_s: tuple[FromZero, ...]
    window_s: Positive = 3600.0

    def __post_init__(self) -> None:
        check_bounds(self)
        object.__setattr__(self, "rates_per_s", tuple(map(float, self.rates_per_s)))
        for rate in self.rates_per_s:
            check_from_zero(rate, "rates_per_s")
        if not any(self.rates_per_s):
            raise ValueError("piecewise needs a rate above 0; got " + ("only zeros" if self.rates_per_s else "none"))

    @property
    def _curve_mean_per_s(self) -> float:
        return sum(self.rates_per_s) / len(self.rates_per_s)

    def _sums(self) -> FloatArray:
        """Requests until the begin of each window and the end of the last."""
        return np.concatenate(([0.0], np.cumsum(np.array(self.rates_per_s) * self.window_s)))

    def expected(self, seconds: FloatArray) -> FloatArray:
        sums, n = self._sums(), len(self.rates_per_s)
        window = np.floor(seconds / self.window_s)
        rounds, at = np.divmod(window, n)
        index = at.astype(np.int64)
        return rounds * sums[-1] + sums[index] + np.array(self.rates_per_s)[index] * (seconds - window * self.window_s)

    def reached(self, requests: FloatArray) -> FloatArray:
        sums, n = self._sums(), len(self.rates_per_s)
        rounds, rest = np.divmod(requests, sums[-1])
        # Left of windows without requests: a level is reached where it is reached first.
        index = np.maximum(np.searchsorted(sums, rest, side="left") - 1, 0)
        rate = np.array(self.rates_per_s)[index]
        within = np.where(rate > 0, (rest - sums[index]) / np.where(rate > 0, rate, 1.0), 0.0)
        return (rounds * n + index) * self.window_s + within


@dataclass(frozen=True, slots=True, kw_only=True)
class Sinusoidal(_Curve):
    """rate_per_s * (1 + amplitude * cos(2 pi (t - peak_s) / period_s)): a day with one peak, from midnight on by default."""

    rate_per_s: Positive
    """The mean of a period."""
    amplitude: float = 0.5
    """At the peak the rate is 1 + amplitude times the mean, at its lowest 1 - amplitude."""
    period_s: Positive = DAY_S
    peak_s: float = 50_400.0
    """Two in the afternoon."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if not 0 <= self.amplitude <= 1:
            raise ValueError(f"amplitude lies between 0 and 1, or the rate falls below 0; got {self.amplitude!r}")
        if not math.isfinite(self.peak_s):
            raise ValueError(f"peak_s is a finite number; got {self.peak_s!r}")

    @property
    def _curve_mean_per_s(self) -> float:
        return self.rate_per_s

    def expected(self, seconds: FloatArray) -> FloatArray:
        turn = 2 * math.pi / self.period_s
        wave = np.sin(turn * (seconds - self.peak_s)) + math.sin(turn * self.peak_s)
        return self.rate_per_s * (seconds + self.amplitude / turn * wave)

    def reached(self, requests: FloatArray) -> FloatArray:
        rounds, rest = np.divmod(requests, self.rate_per_s * self.period_s)
        grid = np.linspace(0.0, self.period_s, 1025)
        table = self.expected(grid)
        index = np.clip(np.searchsorted(table, rest, side="right") - 1, 0, len(grid) - 2)
        low, high = grid[index], grid[index + 1]
        # `expected` never falls, so halving holds the answer: 44 times, and a grid step of a day is below a picosecond.
        for _ in range(44):
            middle = (low + high) / 2
            beyond = self.expected(middle) > rest
            low, high = np.where(beyond, low, middle), np.where(beyond, middle, high)
        return rounds * self.period_s + (low + high) / 2


def read_rates(path: str | os.PathLike[str]) -> dict[str, Any]:
    """rates_per_s and window_s of a CSV with the columns start_s and rate_per_s, for `Piecewise`.

    Windows begin at 0 and are equally long. Raises ValueError in one sentence.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text; expected a CSV with the columns start_s and rate_per_s") from None
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    if not rows or not {"start_s", "rate_per_s"} <= set(rows[0]):
        raise ValueError(f"{path}: expected a CSV with the columns start_s and rate_per_s")
    try:
        starts = [float(row["start_s"]) for row in rows]
        rates = tuple(float(row["rate_per_s"]) for row in rows)
    except (TypeError, ValueError):
        raise ValueError(f"{path}: start_s and rate_per_s are numbers in every row") from None
    gaps = {round(later - earlier, 6) for earlier, later in itertools.pairwise(starts)}
    if starts[0] != 0 or len(gaps) != 1 or min(gaps) <= 0:
        raise ValueError(f"{path}: start_s begins at 0 and rises by equal steps, of two windows at least")
    return {"rates_per_s": rates, "window_s": gaps.pop()}
