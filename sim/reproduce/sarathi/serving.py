"""Sarathi-Serve's serving experiments: times of its machines, capacities within limits, its ablation.

Lengths are lognormal through the published medians and 90th percentiles, an assumption; arrivals are Poisson.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from hwmodels.cost import CostModel
from hwmodels.deployment import Deployment
from hwmodels.memory import LargestBatch, memory_plan
from policies.published import OrcaPaged
from policies.sarathi import ChunkedOnly
from policies.schedulers import Sarathi
from policies.view import Scheduler
from policies.vllm import VllmV0
from policies.wrappers import EvictNewest
from sim.metrics import summary, ttft_s, weighted_quantile
from sim.reproduce.rows import Row
from sim.reproduce.sarathi.machines import A100_WITH_SERVER, deployment
from sim.reproduce.sarathi.runs import MEASURED, SHOWN, THEORY, cost_of, iteration_s, prefill_s, published, replay
from sim.study.rates import Target, bisect
from workloads import LogNormal, Poisson, Trace, synthesize

# Medians and 90th percentiles of prompts and outputs, and the longest total. Sarathi-Serve, table 2.
DATASETS = {
    "openchat": ((1730, 5696), (415, 834), 8192),
    "arxiv": ((7059, 12985), (208, 371), 16384),
}
_Z90 = 1.2815515655446004


def _lognormal(median: float, p90: float, most: int) -> LogNormal:
    return LogNormal(mu=float(np.log(median)), sigma=float(np.log(p90 / median)) / _Z90, max_tokens=most)


def serve_trace(dataset: str, rate_per_s: float, requests: int, seed: int) -> Trace:
    """Requests with a data set's medians and 90th percentiles, at random."""
    prompt, output, most = DATASETS[dataset]
    return synthesize(
        arrivals=Poisson(rate_per_s=rate_per_s),
        prompt=_lognormal(*prompt, most - 1024),
        output=_lognormal(*output, 1024),
        n_requests=requests,
        seed=seed,
    )


def rows(quick: bool) -> Iterator[Row]:
    yield from _times()
    yield from _chunk_overhead()
    yield from _stalls()
    yield from _capacities(400)
    yield from _ablation(16)


# Times.


def _times() -> Iterator[Row]:
    for line in published("serve_times"):
        tensor, pipeline = int(line["tensor"]), int(line["pipeline"])
        cost = cost_of(line["model"], line["machine"], tensor, pipeline)
        prompt, decodes, context = int(line["prompt_tokens"]), int(line["decodes"]), int(line["context"])
        what = f"{decodes} decodes at {context} tokens" if decodes else f"a prompt of {prompt} tokens"
        seconds = iteration_s(cost, prompt, decodes, context)
        # The paper sets this time beside a decode's to size a bubble, so it is what one of the stages takes.
        if line["quantity"] == "ms in a stage":
            seconds /= pipeline
        yield Row(
            "Sarathi-Serve times", f"{line['model']}, {line['machine']}, TP{tensor}-PP{pipeline}, {what}",
            line["quantity"], float(line["ms"]), 1e3 * seconds, kind="emulated", evidence=MEASURED, within_pct=30.0,
        )  # fmt: skip


def _chunk_overhead() -> Iterator[Row]:
    cost = cost_of("yi-34b", "a100-80gb-sxm", 2)
    whole, _ = prefill_s(cost, 8192, 8192)
    for chunk, figure in ((512, 25.0), (2048, 0.0)):
        yield Row(
            "chunking overhead",
            f"Yi-34B, 2 A100, 8192 tokens, chunk {chunk}; Sarathi-Serve, section 5.4: "
            + ("at most about 25 %" if figure else "nearly none"),
            "more prefill time, %", figure, 100 * (prefill_s(cost, 8192, chunk)[0] / whole - 1), kind="emulated",
            evidence=MEASURED, within_abs=10.0,
        )  # fmt: skip


def _stalls() -> Iterator[Row]:
    """Prompts first stop the decodes for as long as a prompt takes; a budget stops them for its own iterations."""
    row_of = partial(Row, "generation stall", kind="theory", evidence=THEORY)
    cost = cost_of("yi-34b", "a100-80gb-sxm", 2)
    # Eight sequences decode when a prompt of 4096 tokens comes.
    prompts = np.array([1000] * 8 + [4096], np.int64)
    trace = Trace(
        arrival_ns=np.array([0] * 8 + [2_000_000_000], np.int64),
        prompt_tokens=prompts,
        output_tokens=np.array([200] * 8 + [2], np.int64),
    )
    longest = {}
    for name, scheduler in (("vLLM", VllmV0(16384, 128)), ("Sarathi-Serve", Sarathi(512))):
        columns = replay(cost, scheduler, trace)
        iterations = columns.iterations()
        ends = (iterations["start_ns"] + iterations["duration_ns"])[iterations["decode_tokens"] > 0]
        longest[name] = float(np.diff(ends).max()) * 1e-9
    prompt = iteration_s(cost, 4096, 0)
    yield row_of(
        "Yi-34B, 2 A100, a prompt of 4096 tokens comes while eight decode, prompts first",
        "longest gap less a decode / time of the prompt", 1.0,
        (longest["vLLM"] - iteration_s(cost, 0, 8, 1050)) / prompt, within_pct=2.0,
    )  # fmt: skip
    chunk = max(iteration_s(cost, 504, 8, 1050), prefill_s(cost, 4096, 512)[0] / 8)
    yield row_of(
        "the same under a budget of 512 tokens", "longest gap / an iteration of 504 prompt tokens and eight decodes",
        "at most 1.25 (the last chunk reads the whole past)", longest["Sarathi-Serve"] / chunk,
        holds=longest["Sarathi-Serve"] <= 1.25 * chunk,
    )  # fmt: skip


# Capacities.


def _scheduler(name: str, tbt_p99_s: float, strict: bool) -> Scheduler:
    # Budgets of the paper's section 5.1 for its strict and relaxed limits.
    return {"vLLM": VllmV0(16384, 128), "Orca": OrcaPaged(128), "Sarathi-Serve": Sarathi(512 if strict else 2048)}[name]


STRICT_S = {"mistral-7b": 0.1, "yi-34b": 0.2, "llama-2-70b": 1.0, "falcon-180b": 1.0}
"""99th percentile of token gaps; relaxed limits are five times that. Sarathi-Serve, section 5.1."""


def capacity(deployed: Deployment, system: str, dataset: str, tbt_p99_s: float, requests: int) -> float:
    """Highest rate within a limit on token gaps and two seconds of median delay; 0.0 where none was found.

    The cache has what the weights leave of 90 % of the memory; each layer keeps each token.
    """
    # Equal deployments may be priced differently, so what is kept goes by the price.
    strict = tbt_p99_s <= STRICT_S[deployed.model.name]
    scheduler = _scheduler(system, tbt_p99_s, strict)
    # Blocks are counted at a context within every window, as if there were none.
    plan = deployed.fitted(memory_plan(deployed, None, largest=LargestBatch(0, 0), context_tokens=16))
    return _capacity(deployed.cost, plan.kv_blocks, scheduler, dataset, tbt_p99_s, requests)


@functools.cache
def _capacity(
    cost: CostModel, kv_blocks: int, scheduler: Scheduler, dataset: str, tbt_p99_s: float, requests: int
) -> float:
    base = serve_trace(dataset, 1.0, requests, 0)
    target = Target(attainment=None, tbt_p99_s=tbt_p99_s, queue_p50_s=2.0, all_finish=True)

    def probe(rate: float) -> str | None:
        return target.miss(summary(replay(cost, EvictNewest(scheduler), base.scale_rate(rate), kv_blocks=kv_blocks)))

    within, _ = bisect(probe, start_per_s=0.5, tolerance=0.03)
    return within


def _ratio(ours: float, theirs: float) -> float:
    return ours / theirs if theirs else float("inf")


def _capacities(requests: int) -> Iterator[Row]:
    row_of = partial(Row, "Sarathi-Serve capacity", kind="emulated")
    for line in published("serve_capacity"):
        model, machine, limit = line["model"], line["machine"], float(line["tbt_p99_s"])
        degrees = int(line["tensor"]), int(line["pipeline"])
        theirs = int(line["baseline_tensor"]), int(line["baseline_pipeline"])
        ours = capacity(deployment(model, machine, *degrees), "Sarathi-Serve", line["dataset"], limit, requests)
        base = capacity(deployment(model, machine, *theirs), line["baseline"], line["dataset"], limit, requests)
        reading = f"; {line['reading']}" if line["reading"] else ""
        yield row_of(
            f"{model}, {degrees[0] * degrees[1]} {machine}, TP{degrees[0]}-PP{degrees[1]}, {line['dataset']} lengths, "
            f"p99 TBT within {limit:g} s{reading}",
            f"requests/s, Sarathi-Serve / {line['baseline']}"
            + (f" on TP{theirs[0]}-PP{theirs[1]}" if theirs != degrees else ""),
            float(line["ratio"]), _ratio(ours, base), evidence=MEASURED, within_pct=30.0,
        )  # fmt: skip
    # The same with the host work of another system's server: how much hangs on leaving it out.
    with_server = deployment("yi-34b", "a100-80gb-sxm", 2, 1, A100_WITH_SERVER)
    for line in published("serve_capacity"):
        if line["model"] == "yi-34b":
            limit = float(line["tbt_p99_s"])
            ours = capacity(with_server, "Sarathi-Serve", line["dataset"], limit, requests)
            base = capacity(with_server, line["baseline"], line["dataset"], limit, requests)
            yield row_of(
                f"yi-34b, 2 a100-80gb-sxm, {line['dataset']} lengths, p99 TBT within {limit:g} s; "
                "with the host work of vLLM of 2023 as Splitwise's runs have it",
                f"requests/s, Sarathi-Serve / {line['baseline']}", float(line["ratio"]), _ratio(ours, base),
                evidence=SHOWN, note="another system's server",
            )  # fmt: skip


# The ablation.

SERVE_SYSTEMS: dict[str, Scheduler] = {
    "hybrid-only": OrcaPaged(128),
    "chunked-only": ChunkedOnly(1024),
    "both": Sarathi(1024),
}
SERVE_RATES = {"openchat": 0.8, "arxiv": 0.35}
"""Requests a second: ours. The paper gives no rate for this table."""
TRIED = (0.1, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)
"""Multiples of `SERVE_RATES` at which the order is looked at, to say where it holds."""


@functools.cache
def serve_ablation(dataset: str, seeds: int, rate_per_s: float | None = None) -> dict[str, tuple[float, float]]:
    """Median TTFT and 99th percentile of token gaps in seconds of each system, over runs of 128 requests."""
    cost = cost_of("yi-34b", "a100-80gb-sxm", 2)
    found = {}
    for system, scheduler in SERVE_SYSTEMS.items():
        first, gaps, weights = [], [], []
        for seed in range(seeds):
            trace = serve_trace(dataset, rate_per_s or SERVE_RATES[dataset], 128, seed)
            columns = replay(cost, EvictNewest(scheduler), trace)
            first.append(ttft_s(columns.requests))
            gap, weight = columns.itl()
            gaps.append(gap)
            weights.append(weight)
        tbt_ns = weighted_quantile(np.concatenate(gaps), np.concatenate(weights), [0.99])[0]
        found[system] = float(np.median(np.concatenate(first))), float(tbt_ns) * 1e-9
    return found


def _order(values: Mapping[str, Sequence[float]], index: int) -> list[str]:
    return sorted(values, key=lambda system: values[system][index])


def _initials(systems: Sequence[str]) -> str:
    return " < ".join(system[0].upper() for system in systems)


def range_of_order(dataset: str, index: int, order: Sequence[str]) -> tuple[float, float] | None:
    """Lowest and highest of the rates tried, around ours and without a gap, at which the systems are in *order*."""
    holds = [
        _order(serve_ablation(dataset, 4, factor * SERVE_RATES[dataset]), index) == list(order) for factor in TRIED
    ]
    ours = TRIED.index(1.0)
    if not holds[ours]:
        return None
    low = high = ours
    while low > 0 and holds[low - 1]:
        low -= 1
    while high + 1 < len(TRIED) and holds[high + 1]:
        high += 1
    return TRIED[low] * SERVE_RATES[dataset], TRIED[high] * SERVE_RATES[dataset]


def _ablation(seeds: int) -> Iterator[Row]:
    row_of = partial(Row, "Sarathi-Serve ablation", kind="emulated", evidence=MEASURED)
    for dataset in DATASETS:
        found = serve_ablation(dataset, seeds)
        lines = {line["scheduler"]: line for line in published("serve_ablation") if line["dataset"] == dataset}
        ours = f"at {SERVE_RATES[dataset]:g} requests/s, a rate of ours as none is published"
        for index, (column, name) in enumerate((("ttft_p50_s", "median TTFT"), ("tbt_p99_s", "p99 TBT"))):
            order = sorted(lines, key=lambda system: float(lines[system][column]))
            span = range_of_order(dataset, index, order)
            tried = f"{TRIED[0] * SERVE_RATES[dataset]:.3g} to {TRIED[-1] * SERVE_RATES[dataset]:.3g} tried"
            where = f"holds from {span[0]:.3g} to {span[1]:.3g}" if span else "holds there at none"
            yield row_of(
                f"Yi-34B, 2 A100, {dataset}, budget 1024, {ours}; {where} ({tried})",
                f"order of {name} (H hybrid-only, C chunked-only, B both)", _initials(order),
                _initials(_order(found, index)), within_abs=0.0,
            )  # fmt: skip
            for system in order:
                yield row_of(
                    f"{dataset}, {system}, {ours}", f"{name}, s", float(lines[system][column]), found[system][index],
                    within_pct=30.0,
                )  # fmt: skip
