"""The uncertainty of a simulated number: intervals over replications, warm-up, ratios of pairs and of batches of them.

Levels are two-sided: 0.95 leaves 2.5 % on each side. Notation follows Law, "Simulation Modeling and Analysis",
5th edition (2015), chapters 9 and 10.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sim.warmup import mser5 as mser5
from sim.warmup import steady as steady

FloatArray = NDArray[np.float64]

LEVEL = 0.95
RATIO_BATCHES = 16
"""Batches of `batch_ratio`: enough to see a skewness, few enough to be long."""
SKEW_FACTOR = 1.5
"""Skewness of 16 values, or of 5, shows less than the skewness that they come from; this much more is allowed for. Chosen,
with RATIO_BATCHES and the widening of `batch_ratio`, on squares and exponentials of autoregressive series, which are no
queues: there the intervals cover 94 to 97 % from 20 independent stretches on (`python -m benchmarks.coverage --series`)."""


_MOST_LAGS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean and how far off it may be: mean ± half_width holds at *level*, from *n* independent values."""

    mean: float
    half_width: float
    """NaN where there is only one value."""
    n: int
    level: float = LEVEL

    @property
    def low(self) -> float:
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        return self.mean + self.half_width

    def __str__(self) -> str:
        return f"{self.mean:.4g}" if math.isnan(self.half_width) else f"{self.mean:.4g} ± {self.half_width:.2g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A relative change, or a difference of shares, and the interval that holds it at *level*, from *n* pairs; longer on one side
    where they are skewed."""

    mean: float
    low: float
    """NaN, as is *high*, where there is no interval."""
    high: float
    n: int
    level: float = LEVEL

    @property
    def half_width(self) -> float:
        """Half of the interval's length; *mean* need not be its middle."""
        return (self.high - self.low) / 2

    @property
    def certain(self) -> bool:
        """Whether there is an interval and it leaves out 0."""
        return self.low > 0 or self.high < 0


def alike(runs: Sequence[Mapping[str, Any]]) -> bool:
    """Whether several runs under different seeds have the same figures in every digit: then nothing in them is random.

    Found by what the runs say, so that it holds for policies of the user's own too; False of one run, which cannot say.
    """
    # As text, in which NaN is equal to itself.
    return len(runs) > 1 and len({repr(dict(each)) for each in runs}) == 1


def student_t(probability: float, degrees: float) -> float:
    """Quantile of Student's t distribution; `student_t(0.975, 10)` is 2.228."""
    if not 0 < probability < 1:
        raise ValueError(f"probability is between 0 and 1; got {probability}")
    if degrees < 1:
        raise ValueError(f"degrees of freedom are at least 1; got {degrees}")
    from scipy.special import stdtrit

    return float(stdtrit(degrees, probability))


def mean_interval(values: ArrayLike, *, level: float = LEVEL) -> Interval:
    """Student-t interval of the mean of independent *values*, one for each replication. Shape [n], n at least 1."""
    values = _vector(values, 1)
    _check_level(level)
    n, mean = values.size, float(values.mean())
    if n == 1:
        return Interval(mean=mean, half_width=math.nan, n=1, level=level)
    standard_error = float(values.std(ddof=1)) / math.sqrt(n)
    return Interval(mean=mean, half_width=student_t((1 + level) / 2, n - 1) * standard_error, n=n, level=level)


def difference(a: ArrayLike, b: ArrayLike, *, level: float = LEVEL) -> Interval:
    """Student-t interval of mean(b - a) over pairs that share their random numbers. Shapes [n], n at least 2."""
    a, b = _pairs(a, b)
    return mean_interval(b - a, level=level)


def relative_difference(a: ArrayLike, b: ArrayLike, *, level: float = LEVEL) -> Interval:
    """Student-t interval of mean(b / a - 1) over pairs that share their random numbers; *a* above 0. Shapes [n].

    The ratio is taken within each pair, so that what the two runs of a pair have in common cancels.
    """
    a, b = _pairs(a, b)
    if not (a > 0).all():
        raise ValueError(f"a relative difference needs positive values of a; got {a.min():g}")
    return mean_interval(b / a - 1, level=level)


def ratio_interval(a: ArrayLike, b: ArrayLike, *, level: float = LEVEL) -> Change:
    """mean(b) / mean(a) - 1 over independent pairs that share their random numbers. Shapes [n], n at least 2.

    Of the means, since the mean of the ratios answers another question. The residuals b - ratio * a give the standard
    error; their skewness lengthens the interval on its side (`_arms`) and never shortens it. ValueError where mean(a) is
    not above 0.
    """
    a, b = _pairs(a, b)
    base = float(a.mean())
    if base <= 0:
        raise ValueError(f"a relative change needs a positive mean of a; got {base:g}")
    ratio = float(b.mean()) / base
    down, up = _arms((b - ratio * a) / base, level)
    return Change(mean=ratio - 1, low=ratio - 1 - down, high=ratio - 1 + up, n=a.size, level=level)


def point_interval(a: ArrayLike, b: ArrayLike, *, level: float = LEVEL) -> Change:
    """mean(b) - mean(a) of shares over independent pairs that share their random numbers. Shapes [n], n at least 2.

    The skewness of the differences lengthens the interval on its side, as in `ratio_interval`.
    """
    a, b = _pairs(a, b)
    mean = float((b - a).mean())
    down, up = _arms(b - a - mean, level)
    return Change(mean=mean, low=mean - down, high=mean + up, n=a.size, level=level)


def batch_ratio(
    a: ArrayLike,
    b: ArrayLike,
    statistic: Callable[[FloatArray], float] = np.mean,
    *,
    stretches: float = math.inf,
    n_batches: int = RATIO_BATCHES,
    level: float = LEVEL,
) -> Change:
    """statistic(b) / statistic(a) - 1 of two correlated series over the same requests. Shapes [n], in order of arrival.

    The jackknife leaves out one of *n_batches* stretches at a time, in both series at once; its pseudo-values are taken
    as independent and their skewness as in `ratio_interval`. *stretches*: how many independent ones the series are worth.
    Batches that share what lasts longer than they do make the variance look smaller by about n_batches / stretches of
    it, so the interval is wider by the root of 1 + n_batches / stretches. ValueError below two values a batch.
    """
    a, b = _pairs(a, b)
    if a.size < 2 * n_batches:
        raise ValueError(f"{n_batches} batches need at least {2 * n_batches} values; got {a.size}")
    whole = statistic(a)
    if whole <= 0:
        raise ValueError(f"a relative change needs a statistic of a above 0; got {whole:g}")
    ratio = float(statistic(b) / whole)
    edges = np.linspace(0, a.size, n_batches + 1).round().astype(int)
    without = np.array(
        [
            statistic(np.concatenate([b[:i], b[j:]])) / statistic(np.concatenate([a[:i], a[j:]]))
            for i, j in itertools.pairwise(edges)
        ]
    )
    down, up = _arms((n_batches - 1) * (without.mean() - without), level)
    wider = math.sqrt(1 + n_batches / stretches)
    return Change(mean=ratio - 1, low=ratio - 1 - wider * down, high=ratio - 1 + wider * up, n=n_batches, level=level)


def _arms(residuals: FloatArray, level: float) -> tuple[float, float]:
    """The reach, down and up, of an interval of the mean of independent *residuals* (of mean 0).

    Student's t, and on the side of the skewness Johnson's correction inverted as by Hall (1992) and Willink, Comm. Stat.
    Theory and Methods 34 (2005), with SKEW_FACTOR times the skewness, where that is longer. The other side is not
    shortened: the skewness of few values is too unsure to give anything away for it.
    """
    _check_level(level)
    n = residuals.size
    t = student_t((1 + level) / 2, n - 1)
    error = float(residuals.std(ddof=1)) / math.sqrt(n)
    if n < 3 or error == 0:
        return t * error, t * error
    bend = SKEW_FACTOR * skewness(residuals) / (6 * math.sqrt(n))
    k = abs(bend)
    longer = t if k < 1e-9 else max(t, (1 - math.cbrt(1 - 6 * k * (t + k))) / (2 * k))
    return (t * error, longer * error) if bend > 0 else (longer * error, t * error)


def skewness(values: ArrayLike) -> float:
    """Third standardised moment with the usual correction for few values, n at least 3; 0 for a constant series."""
    values = _vector(values, 3)
    n, centred = values.size, values - values.mean()
    power = float((centred**2).mean())
    if power <= 0:
        return 0.0
    return float((centred**3).mean()) / power**1.5 * math.sqrt(n * (n - 1)) / (n - 2)


def independent_values(values: ArrayLike) -> float:
    """The number of independent values whose mean is as sure as that of this correlated series. Shape [n], n at least 16.

    n over the sum of its autocorrelations, by the initial monotone sequence of Geyer, Statistical Science 7 (1992), over
    means of neighbours where there are more than 512 values. A series much shorter than its correlation seems surer
    than it is, so that a small number is believed sooner than a large one.
    """
    values = _vector(values, 16)
    n = min(values.size, _MOST_LAGS)
    means = values[values.size % n :].reshape(n, -1).mean(axis=1)
    means = means - means.mean()
    if not means.any():
        return float(n)
    spectrum = np.fft.rfft(means, 2 * n)
    correlation = np.fft.irfft(np.abs(spectrum) ** 2)[:n]
    pairs = (correlation[: n // 2 * 2] / correlation[0]).reshape(-1, 2).sum(axis=1)
    negative = np.flatnonzero(pairs <= 0)
    pairs = np.minimum.accumulate(pairs[: negative[0]] if negative.size else pairs)
    return n / max(1.0, 2 * float(pairs.sum()) - 1)


def _vector(values: ArrayLike, least: int) -> FloatArray:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1:
        raise ValueError(f"values are a vector; got shape {array.shape}")
    if array.size < least:
        raise ValueError(f"at least {least} values are needed; got {array.size}")
    if not np.isfinite(array).all():
        raise ValueError("values are finite numbers; leave out NaN and infinity beforehand")
    return array


def _pairs(a: ArrayLike, b: ArrayLike) -> tuple[FloatArray, FloatArray]:
    first, second = _vector(a, 2), _vector(b, 2)
    if first.size != second.size:
        raise ValueError(f"pairs need as many values of a as of b; got {first.size} and {second.size}")
    return first, second


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level is a probability between 0 and 1; got {level}")
