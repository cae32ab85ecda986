"""Synthetic workloads: arrivals, lengths and popularity together, closed loops, and one that looks like a public trace."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from workloads.arrivals import ArrivalProcess, Gamma, arrivals_ns
from workloads.lengths import Empirical, LengthDistribution
from workloads.loops import ClosedLoop, think_times_ns
from workloads.streams import Stream, check_count, stream
from workloads.trace import Trace

FloatArray = NDArray[np.float64]


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
    check_count(n_requests, "n_requests")
    return ClosedLoop(
        prompt_tokens=prompt.sample(stream(seed, Stream.PROMPT_LENGTHS), n_requests),
        output_tokens=output.sample(stream(seed, Stream.OUTPUT_LENGTHS), n_requests),
        concurrency=concurrency,
        think_ns=think_times_ns(n_requests, mean_think_s, seed),
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
