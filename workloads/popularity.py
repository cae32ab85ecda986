"""Requests for several models: how often each is asked for, and their traffic on one clock."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workloads.arrivals import ArrivalProcess, arrivals_ns
from workloads.columns import IntArray
from workloads.lengths import NO_OUTPUT, LengthDistribution
from workloads.streams import Stream, check_count, check_positive, stream
from workloads.trace import Trace
from workloads.workload import W

FloatArray = NDArray[np.float64]


def power_law_rates(total_rate_per_s: float, n_models: int, exponent: float = 0.5) -> FloatArray:
    """Rates of models whose popularity falls as (i + 1)^-exponent, which sum to the total.

    AlpaServe's synthetic traffic uses exponent 0.5 (its artifact, alpa-projects/mms).
    """
    check_positive(total_rate_per_s, "total_rate_per_s")
    check_count(n_models, "n_models")
    if not math.isfinite(exponent):
        raise ValueError(f"exponent is a finite number; got {exponent!r}")
    weight = np.arange(1, n_models + 1, dtype=float) ** -exponent
    return total_rate_per_s * weight / weight.sum()


def multi_model(
    arrivals: Mapping[str, ArrivalProcess],
    *,
    prompt: LengthDistribution | Mapping[str, LengthDistribution],
    output: LengthDistribution | Mapping[str, LengthDistribution] = NO_OUTPUT,
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
        check_count(n_requests, "n_requests")
        horizon_s = n_requests / sum(process.mean_rate_per_s for process in arrivals.values())
    while True:
        times = [arrivals_ns(process, seed, i, duration_s=horizon_s) for i, process in enumerate(arrivals.values())]
        if n_requests is None or sum(map(len, times)) >= n_requests:
            break
        horizon_s *= 1.5
    trace = merge_models(tuple(arrivals), times, prompt, output, seed, source)
    return trace if n_requests is None else trace.limit(n_requests)


def merge_models(
    models: tuple[str, ...],
    times: Sequence[IntArray],
    prompt: LengthDistribution | Mapping[str, LengthDistribution],
    output: LengthDistribution | Mapping[str, LengthDistribution],
    seed: int,
    source: str | None,
) -> Trace:
    """Requests of several models as one trace, each with arrivals of its own (ns, ascending) and lengths drawn for it.

    ValueError for a model without a distribution, and where nothing arrives.
    """

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


def assign_models(trace: W, models: Sequence[str], popularity: ArrayLike, seed: int) -> W:
    """The same requests, each asking for one of *models* at random in proportion to *popularity*."""
    weight = np.asarray(popularity, dtype=float)
    if weight.shape != (len(models),) or not np.all(np.isfinite(weight) & (weight >= 0)) or weight.sum() <= 0:
        raise ValueError(f"popularity is one number from 0 for each of {len(models)} models; got {popularity!r}")
    below = np.cumsum(weight)
    drawn = np.searchsorted(below, stream(seed, Stream.MODELS).random(len(trace)) * below[-1], side="right")
    return trace.with_models(models, drawn)


# Replay by windows
