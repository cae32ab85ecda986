"""Synthetic workloads: arrival processes, lengths, popularity, and what they make together.

Each kind of draw has its own stream of random numbers, so that changing one leaves the others as they were and
two scenarios with one seed meet the same luck. Asking for more requests, or a longer time, adds to the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workloads.trace import NS_PER_S, IntArray, Trace, int_column

FloatArray = NDArray[np.float64]


class Stream(IntEnum):
    """Names of the random streams; the numbers are part of what a seed means and never change."""

    ARRIVALS = 101
    PROMPT_LENGTHS = 102
    OUTPUT_LENGTHS = 103
    MODELS = 104
    THINK_TIMES = 105
    ARRIVAL_STATES = 106


def stream(seed: int, name: Stream, *key: int) -> np.random.Generator:
    """The random numbers of one named stream; *key* separates models, windows and the like within it."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise ValueError(f"seed is an integer from 0; got {seed!r}")
    return np.random.default_rng([int(seed), int(name), *key])


def _positive(value: Any, name: str) -> None:
    if isinstance(value, bool) or not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} is a finite number above 0; got {value!r}")


def _from_zero(value: Any, name: str) -> None:
    if isinstance(value, bool) or not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} is a finite number from 0; got {value!r}")


def _count(value: Any, name: str, *, minimum: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not minimum <= value < 2**63:
        raise ValueError(f"{name} is a whole number from {minimum}; got {value!r}")


def _range(min_tokens: int, max_tokens: int | None) -> None:
    _count(min_tokens, "min_tokens", minimum=0)
    if max_tokens is not None:
        _count(max_tokens, "max_tokens", minimum=0)
        if max_tokens < min_tokens:
            raise ValueError(f"max_tokens is at least min_tokens; got {max_tokens} below {min_tokens}")


# Arrivals


class ArrivalProcess(Protocol):
    """Requests in time. `gaps_s` gives the seconds between them, from time 0, in chunks without end."""

    def gaps_s(self, seed: int, /, *key: int) -> Iterator[FloatArray]: ...

    @property
    def mean_rate_per_s(self) -> float: ...


_CHUNK = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Poisson:
    """Independent arrivals: exponential times between them."""

    rate_per_s: float

    def __post_init__(self) -> None:
        _positive(self.rate_per_s, "rate_per_s")

    @property
    def mean_rate_per_s(self) -> float:
        return self.rate_per_s

    def gaps_s(self, seed: int, /, *key: int) -> Iterator[FloatArray]:
        rng = stream(seed, Stream.ARRIVALS, *key)
        while True:
            yield rng.standard_exponential(_CHUNK) / self.rate_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Gamma:
    """Renewal process with Gamma times between arrivals: shape 1/cv^2, mean 1/rate; cv 1 is Poisson, 0 is even.

    Time 0 counts as a renewal, so over a short time t the expected count exceeds rate * t by about (cv^2 - 1) / 2.
    """

    rate_per_s: float
    cv: float

    def __post_init__(self) -> None:
        _positive(self.rate_per_s, "rate_per_s")
        _from_zero(self.cv, "cv")

    @property
    def mean_rate_per_s(self) -> float:
        return self.rate_per_s

    def gaps_s(self, seed: int, /, *key: int) -> Iterator[FloatArray]:
        rng = stream(seed, Stream.ARRIVALS, *key)
        while True:
            if self.cv == 0:
                yield np.full(_CHUNK, 1 / self.rate_per_s)
            else:
                yield rng.standard_gamma(1 / self.cv**2, _CHUNK) * (self.cv**2 / self.rate_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deterministic:
    """One arrival each 1/rate seconds, the first after that time."""

    rate_per_s: float

    def __post_init__(self) -> None:
        _positive(self.rate_per_s, "rate_per_s")

    @property
    def mean_rate_per_s(self) -> float:
        return self.rate_per_s

    def gaps_s(self, seed: int, /, *key: int) -> Iterator[FloatArray]:
        while True:
            yield np.full(_CHUNK, 1 / self.rate_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pareto:
    """Renewal process with heavy-tailed times between arrivals: Pareto of the second kind (Lomax), mean 1/rate.

    Survival (1 + t / s)^-tail with s = (tail - 1) / rate; tail > 1. The CV is sqrt(tail / (tail - 2)), without
    bound for tail <= 2.
    """

    rate_per_s: float
    tail: float

    def __post_init__(self) -> None:
        _positive(self.rate_per_s, "rate_per_s")
        if not (math.isfinite(self.tail) and self.tail > 1):
            raise ValueError(f"tail is a number above 1, or the mean gap has no bound; got {self.tail!r}")

    @property
    def mean_rate_per_s(self) -> float:
        return self.rate_per_s

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
            _from_zero(rate, "rates_per_s")
        for mean_s in self.mean_state_s:
            _positive(mean_s, "mean_state_s")
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
        _count(n_requests, "n_requests")
    if duration_s is not None:
        _positive(duration_s, "duration_s")
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


# Lengths


class LengthDistribution(Protocol):
    def sample(self, rng: np.random.Generator, n: int, /) -> IntArray: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    tokens: int

    def __post_init__(self) -> None:
        _count(self.tokens, "tokens", minimum=0)

    def sample(self, rng: np.random.Generator, n: int, /) -> IntArray:
        return np.full(n, self.tokens, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform:
    """Whole numbers from `min_tokens` to `max_tokens`, both included, all equally likely."""

    min_tokens: int
    max_tokens: int

    def __post_init__(self) -> None:
        _range(self.min_tokens, self.max_tokens)

    def sample(self, rng: np.random.Generator, n: int, /) -> IntArray:
        return rng.integers(self.min_tokens, self.max_tokens, size=n, endpoint=True, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """exp of a normal(mu, sigma), rounded to whole tokens and clipped to the given range.

    Clipping moves the mean; without it the mean is exp(mu + sigma^2 / 2) and the median exp(mu), in tokens.
    """

    mu: float
    sigma: float
    min_tokens: int = 1
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.mu):
            raise ValueError(f"mu is a finite number; got {self.mu!r}")
        _from_zero(self.sigma, "sigma")
        _range(self.min_tokens, self.max_tokens)

    @classmethod
    def from_mean_median(
        cls, *, mean: float, median: float, min_tokens: int = 1, max_tokens: int | None = None
    ) -> LogNormal:
        """The lognormal with this mean and median in tokens; the mean cannot be below the median."""
        _positive(median, "median")
        _positive(mean, "mean")
        if mean < median:
            raise ValueError(f"a lognormal's mean is at least its median; got mean {mean!r} and median {median!r}")
        sigma = math.sqrt(2 * math.log(mean / median))
        return cls(mu=math.log(median), sigma=sigma, min_tokens=min_tokens, max_tokens=max_tokens)

    def sample(self, rng: np.random.Generator, n: int, /) -> IntArray:
        top = self.max_tokens if self.max_tokens is not None else 2**53
        logs = np.minimum(self.mu + self.sigma * rng.standard_normal(n), math.log(2**53))
        return np.clip(np.rint(np.exp(logs)), self.min_tokens, top).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Zipf:
    """Whole numbers from min to max with probability of min + k in proportion to (k + 1)^-theta.

    SARATHI draws total lengths so, with theta 0.4 on 1K to 4K (arXiv 2308.16369, section 5.3).
    """

    theta: float
    min_tokens: int
    max_tokens: int

    def __post_init__(self) -> None:
        _from_zero(self.theta, "theta")
        _range(self.min_tokens, self.max_tokens)

    def sample(self, rng: np.random.Generator, n: int, /) -> IntArray:
        weight = np.arange(1, self.max_tokens - self.min_tokens + 2, dtype=float) ** -self.theta
        below = np.cumsum(weight)
        drawn = np.searchsorted(below, rng.random(n) * below[-1], side="right")
        return np.minimum(self.min_tokens + drawn, self.max_tokens).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Empirical:
    """Lengths with the given quantiles, straight lines between them, rounded to whole tokens.

    `probabilities` rise from 0 to 1 and `tokens` do not fall. With *stratified*, n draws take one from each
    n-th of the distribution in random order, so that every sample has nearly these quantiles itself; a larger
    sample then is not the smaller one with more at the end.
    """

    probabilities: tuple[float, ...]
    tokens: tuple[float, ...]
    stratified: bool = False

    def __post_init__(self) -> None:
        p = np.asarray(self.probabilities, dtype=float)
        q = np.asarray(self.tokens, dtype=float)
        object.__setattr__(self, "probabilities", tuple(p.tolist()))
        object.__setattr__(self, "tokens", tuple(q.tolist()))
        if len(p) < 2 or len(p) != len(q):
            raise ValueError(f"quantiles are at least two pairs; got {len(p)} probabilities and {len(q)} tokens")
        if not (p[0] == 0 and p[-1] == 1 and np.all(np.diff(p) > 0)):
            raise ValueError(f"probabilities rise from 0 to 1; got {self.probabilities!r}")
        if not (np.all(np.isfinite(q)) and q[0] >= 0 and np.all(np.diff(q) >= 0)):
            raise ValueError(f"tokens at the quantiles are finite, from 0 and do not fall; got {self.tokens!r}")

    def sample(self, rng: np.random.Generator, n: int, /) -> IntArray:
        u = (rng.permutation(n) + rng.random(n)) / n if self.stratified else rng.random(n)
        return np.rint(np.interp(u, self.probabilities, self.tokens)).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resampled:
    """Draws with replacement from lengths that were seen, each equally likely."""

    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        values = int_column(self.tokens, "tokens")
        if len(values) == 0:
            raise ValueError("an empirical distribution needs at least one length; got none")
        object.__setattr__(self, "tokens", tuple(values.tolist()))

    def sample(self, rng: np.random.Generator, n: int, /) -> IntArray:
        return np.array(self.tokens, dtype=np.int64)[rng.integers(0, len(self.tokens), size=n)]


def split_total(total_tokens: ArrayLike, prompt_per_output: float) -> tuple[IntArray, IntArray]:
    """Prompt and output tokens of requests known by their sum and the ratio P:D of prompt to output.

    Output is the sum / (1 + ratio), rounded, at least 1; the prompt is the rest (SARATHI's P:D ratio).
    """
    _positive(prompt_per_output, "prompt_per_output")
    total = int_column(total_tokens, "total_tokens", minimum=2)
    output = np.clip(np.rint(total / (1 + prompt_per_output)), 1, total - 1).astype(np.int64)
    return total - output, output


def synthesize(
    *,
    arrivals: ArrivalProcess,
    prompt: LengthDistribution,
    output: LengthDistribution,
    n_requests: int | None = None,
    duration_s: float | None = None,
    seed: int,
    model: str | None = None,
    source: str | None = None,
) -> Trace:
    """A trace of one model: *n_requests* requests, or those that arrive before *duration_s*.

    Arrivals, prompts and outputs draw from their own streams. Raises ValueError where nothing arrives in time.
    """
    arrival = arrivals_ns(arrivals, seed, n_requests=n_requests, duration_s=duration_s)
    if len(arrival) == 0:
        raise ValueError(f"{arrivals!r} brings no request before {duration_s} s; lengthen the time or raise the rate")
    return Trace(
        arrival_ns=arrival,
        prompt_tokens=prompt.sample(stream(seed, Stream.PROMPT_LENGTHS), len(arrival)),
        output_tokens=output.sample(stream(seed, Stream.OUTPUT_LENGTHS), len(arrival)),
        models=() if model is None else (model,),
        source=source or f"{arrivals!r}, prompt {prompt!r}, output {output!r}, seed {seed}",
    )


# Many models


def power_law_rates(total_rate_per_s: float, n_models: int, exponent: float = 0.5) -> FloatArray:
    """Rates of models whose popularity falls as (i + 1)^-exponent, which sum to the total.

    AlpaServe's synthetic traffic uses exponent 0.5 (its artifact, alpa-projects/mms).
    """
    _positive(total_rate_per_s, "total_rate_per_s")
    _count(n_models, "n_models")
    if not math.isfinite(exponent):
        raise ValueError(f"exponent is a finite number; got {exponent!r}")
    weight = np.arange(1, n_models + 1, dtype=float) ** -exponent
    return total_rate_per_s * weight / weight.sum()


def multi_model(
    arrivals: Mapping[str, ArrivalProcess],
    *,
    prompt: LengthDistribution | Mapping[str, LengthDistribution],
    output: LengthDistribution | Mapping[str, LengthDistribution] = Fixed(tokens=0),
    n_requests: int | None = None,
    duration_s: float | None = None,
    seed: int,
    source: str | None = None,
) -> Trace:
    """A trace of several models, each with its own arrival process and random streams, merged by arrival.

    Changing one model, or adding one at the end, leaves the draws of the others as they were. *n_requests* counts
    all models together. Raises ValueError where nothing arrives before *duration_s*.
    """
    if not arrivals:
        raise ValueError("multi_model needs at least one model; got none")
    if (n_requests is None) == (duration_s is None):
        raise ValueError("give one of n_requests and duration_s")
    horizon_s = duration_s or 0.0
    if n_requests is not None:
        _count(n_requests, "n_requests")
        horizon_s = n_requests / sum(process.mean_rate_per_s for process in arrivals.values())
    while True:
        times = [arrivals_ns(process, seed, i, duration_s=horizon_s) for i, process in enumerate(arrivals.values())]
        if n_requests is None or sum(map(len, times)) >= n_requests:
            break
        horizon_s *= 1.5
    trace = _merge_models(tuple(arrivals), times, prompt, output, seed, source)
    return trace if n_requests is None else trace.limit(n_requests)


def _merge_models(
    models: tuple[str, ...],
    times: Sequence[IntArray],
    prompt: LengthDistribution | Mapping[str, LengthDistribution],
    output: LengthDistribution | Mapping[str, LengthDistribution],
    seed: int,
    source: str | None,
) -> Trace:
    def lengths(given: LengthDistribution | Mapping[str, LengthDistribution], name: Stream, what: str) -> IntArray:
        columns = []
        for i, (model, arrival) in enumerate(zip(models, times, strict=True)):
            if isinstance(given, Mapping) and model not in given:
                raise ValueError(f"{what} lengths name each model; {model!r} is missing from {sorted(given)!r}")
            distribution = given[model] if isinstance(given, Mapping) else given
            columns.append(distribution.sample(stream(seed, name, i), len(arrival)))
        return np.concatenate(columns)

    arrival = np.concatenate(times)
    if len(arrival) == 0:
        raise ValueError("no request of any model arrives in time; lengthen the time or raise the rates")
    index = np.repeat(np.arange(len(models)), [len(part) for part in times])
    order = np.argsort(arrival, kind="stable")
    return Trace(
        arrival_ns=arrival[order],
        prompt_tokens=lengths(prompt, Stream.PROMPT_LENGTHS, "prompt")[order],
        output_tokens=lengths(output, Stream.OUTPUT_LENGTHS, "output")[order],
        model_index=index[order],
        models=models,
        source=source or f"{len(models)} models, seed {seed}",
    )


def assign_models(trace: Trace, models: Sequence[str], popularity: ArrayLike, seed: int) -> Trace:
    """The same requests, each asking for one of *models* at random in proportion to *popularity*."""
    weight = np.asarray(popularity, dtype=float)
    if weight.shape != (len(models),) or not np.all(np.isfinite(weight) & (weight >= 0)) or weight.sum() <= 0:
        raise ValueError(f"popularity is one number from 0 for each of {len(models)} models; got {popularity!r}")
    below = np.cumsum(weight)
    drawn = np.searchsorted(below, stream(seed, Stream.MODELS).random(len(trace)) * below[-1], side="right")
    return trace.with_models(models, drawn)


# Replay by windows


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
        _positive(self.window_s, "window_s")
        if rate.ndim != 2 or not np.all(np.isfinite(rate) & (rate >= 0)) or not np.all(np.isfinite(cv) & (cv >= 0)):
            raise ValueError("rates and CVs are finite numbers from 0, models x windows")

    def arrivals_ns(self, seed: int, *, rate_scale: float = 1.0, cv_scale: float = 1.0) -> tuple[IntArray, ...]:
        """Arrival times of each model; window w of model m draws from stream (seed, m, w)."""
        _positive(rate_scale, "rate_scale")
        _from_zero(cv_scale, "cv_scale")
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
        output: LengthDistribution | Mapping[str, LengthDistribution] = Fixed(tokens=0),
        seed: int,
        rate_scale: float = 1.0,
        cv_scale: float = 1.0,
    ) -> Trace:
        """A trace drawn from the windows, the m-th row of rates for the m-th of *models*."""
        if len(models) != len(self.rate_per_s):
            raise ValueError(f"the windows are of {len(self.rate_per_s)} models; got {len(models)} names")
        times = self.arrivals_ns(seed, rate_scale=rate_scale, cv_scale=cv_scale)
        source = f"{self.source}, Gamma windows of {self.window_s:g} s, rate x {rate_scale:g}, cv x {cv_scale:g}"
        return _merge_models(tuple(models), times, prompt, output, seed, f"{source}, seed {seed}")


def gamma_windows_from_counts(
    counts: ArrayLike, *, window_s: float = 60.0, cv: float = 1.0, source: str = ""
) -> GammaWindows:
    """Windows from numbers of arrivals, models x windows (see `FunctionCounts.stripe`).

    Counts tell no CV, so it is given: AlpaServe uses its cv_scale as the CV itself.
    """
    _positive(window_s, "window_s")
    table = np.asarray(counts)
    if table.ndim != 2 or table.dtype.kind not in "iu" or np.any(table < 0):
        raise ValueError("counts are whole numbers from 0, models x windows")
    _from_zero(cv, "cv")
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
    _positive(window_s, "window_s")
    _positive(duration_s, "duration_s")
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


# Closed loop


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClosedLoop:
    """Clients that each send their next request when the last one ends.

    At time 0 each of `concurrency` clients sends one; the request of row i is the i-th to be sent by anyone. A
    client sends its next `think_ns[i]` after the end of its last, i being the row then sent (0: at once).
    """

    prompt_tokens: IntArray
    output_tokens: IntArray
    concurrency: int
    think_ns: IntArray | None = None
    source: str = ""
    deadline_ns: IntArray | None = None
    """Nanoseconds after it was sent by which a request should be finished; -1 where it has no deadline."""
    left_out: tuple[str, ...] = ()
    """What the trace that the lengths are from says besides, in words."""

    def __post_init__(self) -> None:
        _count(self.concurrency, "concurrency")
        # The same rules hold for lengths as in a trace.
        lengths = Trace.from_arrays(
            arrival_ns=np.zeros(len(self.prompt_tokens), dtype=np.int64),
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
        )
        object.__setattr__(self, "prompt_tokens", lengths.prompt_tokens)
        object.__setattr__(self, "output_tokens", lengths.output_tokens)
        for name, floor in (("think_ns", 0), ("deadline_ns", -1)):
            value = getattr(self, name)
            if value is not None:
                column = int_column(value, name, minimum=floor)
                if len(column) != len(self):
                    raise ValueError(f"{name} needs one value a request ({len(self)}); got {len(column)}")
                object.__setattr__(self, name, column)

    def __len__(self) -> int:
        return len(self.prompt_tokens)


def closed_loop(
    *,
    n_requests: int,
    concurrency: int,
    prompt: LengthDistribution,
    output: LengthDistribution,
    seed: int,
    mean_think_s: float = 0.0,
    source: str | None = None,
) -> ClosedLoop:
    """Closed-loop clients with lengths drawn as in `synthesize` and exponential think times of the given mean."""
    _count(n_requests, "n_requests")
    _from_zero(mean_think_s, "mean_think_s")
    think_ns = None
    if mean_think_s > 0:
        think_s = stream(seed, Stream.THINK_TIMES).standard_exponential(n_requests) * mean_think_s
        think_ns = np.rint(think_s * NS_PER_S).astype(np.int64)
    return ClosedLoop(
        prompt_tokens=prompt.sample(stream(seed, Stream.PROMPT_LENGTHS), n_requests),
        output_tokens=output.sample(stream(seed, Stream.OUTPUT_LENGTHS), n_requests),
        concurrency=concurrency,
        think_ns=think_ns,
        source=source or f"closed loop of {concurrency} clients, prompt {prompt!r}, output {output!r}, seed {seed}",
    )


# The built-in workload. Quantiles and inter-arrival moments of AzureLLMInferenceTrace_conv.csv (19,366 requests,
# 2023-11-16; github.com/Azure/AzurePublicDataset, CC BY 4.0; Patel et al., Splitwise, ISCA 2024).
_CONVERSATION_PROBABILITIES = (
    *(0.0, 0.01, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65),
    *(0.7, 0.75, 0.8, 0.85, 0.9, 0.925, 0.95, 0.97, 0.98, 0.985, 0.99, 0.995, 0.999, 1.0),
)
_CONVERSATION_PROMPT = (
    *(2, 29, 181, 207, 372, 387, 396, 403, 414, 703, 984, 1020, 1045, 1071, 1097),
    *(1130, 1189, 1315, 1876.2, 2734.5, 4075, 4083, 4090, 4098, 4110, 4142, 4831, 6179.1, 14050),
)
_CONVERSATION_OUTPUT = (
    *(7, 16, 41, 54, 67, 77, 85, 91, 96, 103, 113, 129, 151, 177, 217),
    *(384, 395, 400, 411, 424, 430, 451, 509, 540, 571, 601, 643.2, 954, 1000),
)
CONVERSATION_RATE_PER_S = 1 / 0.180827
CONVERSATION_CV = 1.0942


def azure_conversation_like(n_requests: int = 2000, seed: int = 0) -> Trace:
    """Requests whose arrivals and lengths follow the Azure 2023 conversation trace, without its file.

    Arrivals are a Gamma process with the trace's mean and CV of times between arrivals (5.53 requests/s, 1.094);
    prompt and output lengths follow its quantiles. Lengths are drawn stratified, because 10 % of the prompts
    sit behind a jump from 2,700 to 4,070 tokens at the 90th percentile, which a plain sample of a few thousand
    would miss by up to half its value. Not kept: the slight link between prompt and output lengths (rank
    correlation 0.07) and between neighbouring times (0.06).
    """
    return synthesize(
        arrivals=Gamma(rate_per_s=CONVERSATION_RATE_PER_S, cv=CONVERSATION_CV),
        prompt=Empirical(probabilities=_CONVERSATION_PROBABILITIES, tokens=_CONVERSATION_PROMPT, stratified=True),
        output=Empirical(probabilities=_CONVERSATION_PROBABILITIES, tokens=_CONVERSATION_OUTPUT, stratified=True),
        n_requests=n_requests,
        seed=seed,
        source=f"built-in conversation workload after the Azure 2023 trace, seed {seed}",
    )
