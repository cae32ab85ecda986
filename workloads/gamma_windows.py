"""Traffic fitted window by window with Gamma arrivals, and drawn anew, as AlpaServe does with the Azure Functions traces."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workloads.arrivals import Gamma, arrivals_ns
from workloads.columns import NS_PER_S, IntArray
from workloads.lengths import NO_OUTPUT, LengthDistribution
from workloads.popularity import merge_models
from workloads.streams import check_from_zero, check_positive
from workloads.trace import Trace

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GammaWindows:
    """Rate and CV of each model's traffic in each window of time, from which like traffic is drawn.

    As AlpaServe replays the Azure Functions traces: within a window arrivals are a Gamma process that starts
    anew (its artifact, alpa-projects/mms, trace.py).
    """

    rate_per_s: FloatArray
    """Models x windows; 0 where nothing arrives."""
    cv: FloatArray
    """Models x windows."""
    window_s: float
    source: str = ""

    def __post_init__(self) -> None:
        rate = np.asarray(self.rate_per_s, dtype=float)
        cv = np.broadcast_to(np.asarray(self.cv, dtype=float), rate.shape)
        object.__setattr__(self, "rate_per_s", rate)
        object.__setattr__(self, "cv", cv)
        check_positive(self.window_s, "window_s")
        if rate.ndim != 2 or not np.all(np.isfinite(rate) & (rate >= 0)) or not np.all(np.isfinite(cv) & (cv >= 0)):
            raise ValueError("rates and CVs are finite numbers from 0, models x windows")

    def arrivals_ns(self, seed: int, *, rate_scale: float = 1.0, cv_scale: float = 1.0) -> tuple[IntArray, ...]:
        """Arrival times of each model; window w of model m draws from stream (seed, m, w)."""
        check_positive(rate_scale, "rate_scale")
        check_from_zero(cv_scale, "cv_scale")
        window_ns = round(self.window_s * NS_PER_S)
        out = []
        for m, (rates, cvs) in enumerate(zip(self.rate_per_s.tolist(), self.cv.tolist(), strict=True)):
            parts = [np.empty(0, dtype=np.int64)]
            for w, (rate, cv) in enumerate(zip(rates, cvs, strict=True)):
                if rate > 0:
                    process = Gamma(rate_per_s=rate * rate_scale, cv=cv * cv_scale)
                    parts.append(w * window_ns + arrivals_ns(process, seed, m, w, duration_s=self.window_s))
            out.append(np.concatenate(parts))
        return tuple(out)

    def trace(
        self,
        *,
        models: Sequence[str],
        prompt: LengthDistribution | Mapping[str, LengthDistribution],
        output: LengthDistribution | Mapping[str, LengthDistribution] = NO_OUTPUT,
        seed: int,
        rate_scale: float = 1.0,
        cv_scale: float = 1.0,
    ) -> Trace:
        """A trace drawn from the windows, the m-th row of rates for the m-th of *models*."""
        if len(models) != len(self.rate_per_s):
            raise ValueError(f"the windows are of {len(self.rate_per_s)} models; got {len(models)} names")
        times = self.arrivals_ns(seed, rate_scale=rate_scale, cv_scale=cv_scale)
        source = f"{self.source}, Gamma windows of {self.window_s:g} s, rate x {rate_scale:g}, cv x {cv_scale:g}"
        return merge_models(tuple(models), times, prompt, output, seed, f"{source}, seed {seed}")


def gamma_windows_from_counts(
    counts: ArrayLike, *, window_s: float = 60.0, cv: float = 1.0, source: str = ""
) -> GammaWindows:
    """Windows from numbers of arrivals, models x windows (see `FunctionCounts.stripe`).

    Counts tell no CV, so it is given: AlpaServe uses its cv_scale as the CV itself.
    """
    check_positive(window_s, "window_s")
    table = np.asarray(counts)
    if table.ndim != 2 or table.dtype.kind not in "iu" or np.any(table < 0):
        raise ValueError("counts are whole numbers from 0, models x windows")
    check_from_zero(cv, "cv")
    return GammaWindows(rate_per_s=table / window_s, cv=np.full(table.shape, cv), window_s=window_s, source=source)


def fit_gamma_windows(
    arrivals: Sequence[IntArray],
    *,
    window_s: float,
    duration_s: float,
    method: Literal["likelihood", "moments"] = "likelihood",
    source: str = "",
) -> GammaWindows:
    """Rate and CV of each model's arrivals (nanoseconds, sorted) in each window of [0, duration_s).

    Within a window the rate is one over the mean time between arrivals and the CV that of the Gamma
    distribution of most likelihood (or, with `moments`, the sample's own). Times between arrivals count as at
    least a microsecond, since likelihood has no use for zeros. Three arrivals are the least that are fitted;
    with fewer, the rate is count / window and the CV 1. A fitted rate above five times count / window, from
    arrivals crowded into a part of the window, is set to count / window (as AlpaServe's trace replay does).
    """
    check_positive(window_s, "window_s")
    check_positive(duration_s, "duration_s")
    if method not in ("likelihood", "moments"):
        raise ValueError(f"method is likelihood or moments; got {method!r}")
    n_windows = math.ceil(duration_s / window_s - 1e-9)
    window_ns = round(window_s * NS_PER_S)
    rate = np.zeros((len(arrivals), n_windows))
    cv = np.ones((len(arrivals), n_windows))
    for m, times in enumerate(arrivals):
        cuts = np.searchsorted(times, np.arange(n_windows + 1) * window_ns)
        for w in range(n_windows):
            part = times[cuts[w] : cuts[w + 1]]
            rate[m, w] = len(part) / window_s
            if len(part) < 3:
                continue
            gaps_s = np.maximum(np.diff(part) / NS_PER_S, 1e-6)
            mean_s = float(gaps_s.mean())
            if 1 / mean_s <= 5 * rate[m, w]:
                rate[m, w] = 1 / mean_s
            if method == "moments":
                cv[m, w] = float(gaps_s.std()) / mean_s
            else:
                cv[m, w] = 1 / math.sqrt(gamma_shape(math.log(mean_s) - float(np.log(gaps_s).mean())))
    return GammaWindows(rate_per_s=rate, cv=cv, window_s=window_s, source=source)


def gamma_shape(log_ratio: float) -> float:
    """The shape k of most likelihood for a Gamma sample: log k - digamma(k) = *log_ratio*, at most 1e12.

    *log_ratio* is the log of the sample's mean less the mean of its logs. Newton's method on 1/k from Minka's
    start ("Estimating a Gamma distribution", 2002).
    """
    if log_ratio < 5e-13:
        return 1e12
    from scipy.special import digamma, polygamma

    s = log_ratio
    k = (3 - s + math.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
    for _ in range(50):
        change = (math.log(k) - float(digamma(k)) - s) / (k * k * (1 / k - float(polygamma(1, k))))
        following = 1 / (1 / k + change)
        if not following > 0:
            following = k / 2
        if abs(following - k) <= 1e-10 * k:
            return following
        k = following
    return k
