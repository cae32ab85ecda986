"""How much a deployment holds and carries: sequences in memory, requests a second within an SLO, tokens in a batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hwmodels.cost import CostModel
from hwmodels.totals import Totals
from sim.errors import RooftraceError
from sim.theory.sarathi import batch_capacity, implied_pool_bytes

if TYPE_CHECKING:
    from hwmodels.deployment import Deployment
    from sim.results import Result
    from sim.scenario import Scenario

BUDGET_STEP = 32
"""Budgets tried are multiples of this, as Sarathi-Serve's own scheduler rounds its chunks."""
LARGEST_BUDGET = 4096


class CapacityError(RooftraceError, ValueError):
    """A capacity that cannot be worked out; the message says why and what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """Sequences of one length that a replica holds; bytes are those of one device of the fullest stage."""

    sequence_tokens: int
    sequences: int
    memory_bytes: float
    weight_bytes: float
    reserve_bytes: float
    kv_bytes_per_token: float

    @property
    def pool_bytes(self) -> float:
        """What is left for the KV cache."""
        return self.memory_bytes - self.weight_bytes - self.reserve_bytes


def batch_plan(
    *,
    memory_bytes: float,
    weight_bytes: float,
    kv_bytes_per_token: float,
    sequence_tokens: int,
    reserve_bytes: float = 0.0,
) -> BatchPlan:
    """B = floor((M_G - M_S - reserve) / (L m_kv)). SARATHI, arXiv 2308.16369, section 4.3.1, which has no reserve."""
    sequences = batch_capacity(memory_bytes, weight_bytes, sequence_tokens, kv_bytes_per_token, reserve_bytes)
    return BatchPlan(
        sequence_tokens=sequence_tokens,
        sequences=int(sequences),
        memory_bytes=memory_bytes,
        weight_bytes=weight_bytes,
        reserve_bytes=reserve_bytes,
        kv_bytes_per_token=kv_bytes_per_token,
    )


def deployment_plan(deployment: Deployment, sequence_tokens: int, *, reserve_bytes: float = 0.0) -> BatchPlan:
    """The plan of a deployment; *reserve_bytes* of each device are kept for activations and workspace."""
    return batch_plan(
        memory_bytes=deployment.device.memory_bytes,
        weight_bytes=deployment.weight_bytes_per_device,
        kv_bytes_per_token=deployment.kv_bytes_per_token_per_device,
        sequence_tokens=sequence_tokens,
        reserve_bytes=reserve_bytes,
    )


def reserve_range(
    *, memory_bytes: float, weight_bytes: float, kv_bytes_per_token: float, batches: Mapping[int, int]
) -> tuple[float, float] | None:
    """Reserves with which the capacity formula gives every batch of *batches* (sequence tokens to sequences).

    Above the first value, up to the second; None where no single reserve gives them all. A negative reserve means that
    the batches need more memory than there is.
    """
    free = memory_bytes - weight_bytes
    pools = [implied_pool_bytes(batch, tokens, kv_bytes_per_token) for tokens, batch in batches.items()]
    least, below = max(low for low, _ in pools), min(high for _, high in pools)
    return (free - below, free - least) if least < below else None


# Requests a second within an SLO.


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a run must keep to. Sarathi-Serve limits the 99th percentile of token gaps, and the median delay."""

    tbt_p99_s: float | None = None
    queue_p50_s: float | None = 2.0
    """Time until the first iteration of a request. Sarathi-Serve, section 5: two seconds."""
    attainment: float | None = None
    """Share of requests that meet the scenario's `slo`."""

    def miss(self, summary: Mapping[str, Any]) -> str | None:
        """The first limit that a summary misses, in words; None where it meets all."""
        total, finished = summary["requests"]["total"], summary["requests"]["finished"]
        if finished < total:
            return f"{total - finished} of {total} requests did not finish"
        if summary["saturated"]:
            return "the queue still grows when arrivals end"
        if self.tbt_p99_s is not None:
            value = summary["itl_s"]["p99"]
            if value is not None and value > self.tbt_p99_s:
                return f"p99 gap between tokens {value:.3f} s > {self.tbt_p99_s:g} s"
        if self.queue_p50_s is not None:
            value = summary["queue_s"]["p50"]
            if value is not None and value > self.queue_p50_s:
                return f"median delay {value:.3f} s > {self.queue_p50_s:g} s"
        if self.attainment is not None:
            value = summary["slo_attainment"]
            if value is None:
                raise CapacityError("an attainment needs limits: give slo.ttft_s, slo.tpot_s or slo.e2el_s")
            if value < self.attainment:
                # Rounded down, so that 98.96 % does not read as the 99.0 % that it misses.
                return f"{math.floor(1000 * value) / 10:.1f}% of requests within the SLO < {self.attainment:.1%}"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One run of the search: arrivals a second, and the limit missed (None: within all)."""

    rate_per_s: float
    miss: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The highest rate found within the limits (0.0: none was), the lowest found outside, and the runs behind them."""

    rate_per_s: float
    outside_per_s: float
    probes: tuple[Probe, ...]


def highest_rate(
    probe: Callable[[float], str | None], *, start_per_s: float, tolerance: float = 0.02, most_probes: int = 40
) -> Capacity:
    """Bisect for the highest rate at which *probe* misses no limit, to within *tolerance* of itself.

    *probe* takes requests a second and returns the limit missed, or None. It is taken to be monotone: what fails at a
    rate fails at all above. CapacityError if neither end is found in *most_probes* runs.
    """
    if not 0 < start_per_s < math.inf or not 0 < tolerance < 1:
        raise ValueError(f"start_per_s is a rate above 0 and tolerance in (0, 1); got {start_per_s!r}, {tolerance!r}")
    probes: list[Probe] = []

    def within(rate: float) -> bool:
        miss = probe(rate)
        probes.append(Probe(rate_per_s=rate, miss=miss))
        return miss is None

    low, high, rate = 0.0, math.inf, start_per_s
    while len(probes) < most_probes:
        if within(rate):
            low = rate
        else:
            high = rate
        if math.isinf(high):
            rate = 2 * rate
        elif low == 0.0:
            if rate < start_per_s / 2**12:
                return Capacity(rate_per_s=0.0, outside_per_s=high, probes=tuple(probes))
            rate /= 2
        elif high - low <= tolerance * low:
            return Capacity(rate_per_s=low, outside_per_s=high, probes=tuple(probes))
        else:
            rate = (low + high) / 2
    raise CapacityError(
        f"no limit of capacity found up to {probes[-1].rate_per_s:.4g} requests/s in {most_probes} runs; "
        "tighten the limits or give more requests"
    )


def slo_capacity(scenario: Scenario, limits: Limits, *, tolerance: float = 0.02) -> Capacity:
    """The highest arrival rate at which *scenario* keeps to *limits*, by bisection over `workload.rate_scale`.

    Every run replays the same requests faster or slower. CapacityError for closed-loop clients, who have no rate, and
    where all requests arrive at once.
    """
    from sim.run import run_built
    from sim.scenario.build import resolve, workload_of
    from workloads import Trace

    workload = workload_of(scenario)
    if not isinstance(workload, Trace):
        raise CapacityError("closed-loop clients have no arrival rate to search; give another workload.arrivals")
    span_s = float(workload.arrival_ns[-1] - workload.arrival_ns[0]) * 1e-9
    if span_s <= 0:
        raise CapacityError("all requests arrive at once, so there is no rate to search; give arrivals over time")
    own_rate = (len(workload) - 1) / span_s
    scale = scenario.workload.rate_scale

    def probe(rate: float) -> str | None:
        result: Result = run_built(resolve(scenario.with_value("workload.rate_scale", scale * rate / own_rate)))
        return limits.miss(result.summary)

    return highest_rate(probe, start_per_s=own_rate, tolerance=tolerance)


# Tokens in a batch.


def _prefill_s(cost: CostModel, tokens: int) -> float:
    pairs = tokens * (tokens + 1) // 2
    totals = Totals(tokens, tokens, 1, pairs, tokens, 0, 0, 1, pairs if cost.window_tokens else 0)
    return max(float(cost.iteration_s(totals, stage)) for stage in range(cost.n_stages))


def saturating_tokens(cost: CostModel, *, loss: float = 0.2) -> int:
    """The fewest tokens in a batch whose throughput is within *loss* of the best of any batch of up to LARGEST_BUDGET.

    What SARATHI does by profiling (arXiv 2308.16369, section 4.4): saturation shows as a plateau, and tiles as steps, of
    which the last tokens come for nothing and are taken too.
    """
    sizes = range(BUDGET_STEP, LARGEST_BUDGET + 1, BUDGET_STEP)
    seconds = [_prefill_s(cost, tokens) for tokens in sizes]
    rates = [tokens / each for tokens, each in zip(sizes, seconds, strict=True)]
    enough = (1 - loss) * max(rates)
    found = next(i for i, rate in enumerate(rates) if rate >= enough)
    while found + 1 < len(sizes) and seconds[found + 1] < 1.01 * seconds[found]:
        found += 1
    return sizes[found]


def tokens_within(cost: CostModel, *, tbt_s: float, decodes: int, context_tokens: int) -> int:
    """The largest budget whose iteration, with *decodes* at *context_tokens* each and a chunk at the end of such a
    context in the rest, takes at most *tbt_s* over all stages.

    Sarathi-Serve, OSDI 2024, section 4.3. CapacityError where not even the decodes and one step of tokens fit.
    """
    best = 0
    for budget in range(BUDGET_STEP, LARGEST_BUDGET + 1, BUDGET_STEP):
        chunk = budget - decodes
        if chunk <= 0:
            continue
        past = max(context_tokens - chunk, 0)
        window = cost.window_tokens
        pairs = chunk * past + chunk * (chunk + 1) // 2
        totals = Totals(
            budget, chunk, 1, pairs, past + chunk, decodes, decodes * context_tokens, decodes + 1,
            min(pairs, chunk * window) if window else 0,
            decodes * min(context_tokens, window) if window else 0,
        )  # fmt: skip
        seconds = sum(float(cost.iteration_s(totals, stage)) for stage in range(cost.n_stages))
        seconds += (cost.n_stages - 1) * float(cost.handover_s(budget))
        if seconds > tbt_s:
            break
        best = budget
    if not best:
        raise CapacityError(
            f"no token budget keeps an iteration with {decodes} decodes of {context_tokens} tokens within {tbt_s:g} s; "
            "allow more time, fewer sequences or more devices"
        )
    return best
