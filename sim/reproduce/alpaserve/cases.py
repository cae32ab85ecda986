"""The cases that AlpaServe's experiments are made of: traffic, clusters, searches, and the packaged tables."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hwmodels.single_pass import load_single_pass
from policies.placement import (
    Cluster,
    EqualGroups,
    PartitionSearch,
    PlacementSearch,
    RoundRobin,
    SelectiveReplication,
)
from sim.placement import ARTIFACT_OVERHEAD_S, ARTIFACT_STAGE_OVERHEAD, Serving, find
from sim.placement.groups import GroupExperiment, GroupSpec, run_groups
from sim.theory.published import published
from workloads import Fixed, Gamma, Trace, multi_model, power_law_rates

SERVICE_S = 0.39625  # one 6.7B model on one V100 (artifact, illustrative_example.py)
NS = 1_000_000_000
GIB = 2**30
TOKENS = Fixed(tokens=2048)
_MIXED = ("bert-1.3b", "bert-2.7b", "bert-6.7b", "moe-1.3b", "moe-2.4b", "moe-5.3b")
SEARCHES: dict[str, PlacementSearch] = {
    "mp-round-robin": RoundRobin(inter_op=4),
    "mp-greedy-4": EqualGroups(inter_op=4),
    "sr-greedy": SelectiveReplication(),
    "mp-search": PartitionSearch(buckets=False),
    "mp-search-sep": PartitionSearch(max_splits=7),
}


def table(name: str) -> list[dict[str, str]]:
    """Rows of a packaged table, `data/alpaserve_NAME.csv`."""
    return published(f"alpaserve_{name}")


def traffic(
    rates: Sequence[float], cv: float, seed: int, *, n: int | None = None, span_s: float | None = None
) -> Trace:
    """Requests to single-pass models m0, m1, ... by Gamma arrivals."""
    arrivals = {f"m{i}": Gamma(rate_per_s=rate, cv=cv) for i, rate in enumerate(rates)}
    return multi_model(arrivals, prompt=TOKENS, n_requests=n, duration_s=span_s, seed=seed)


def pair_groups(pipelined: bool, alpha: float = 1.0, beta: float = 1.0) -> tuple[GroupSpec, ...]:
    """Two models on two devices: one each, or both in two stages with communication *alpha* and unevenness *beta*."""
    service_ns = round(SERVICE_S * NS)
    if not pipelined:
        return tuple(GroupSpec(models=(m,), stage_ns=(((service_ns,),),), n_stages=1) for m in (0, 1))
    slow = round(alpha * beta * service_ns / 2)
    stages = (slow, round(alpha * service_ns) - slow)
    return (GroupSpec(models=(0, 1), stage_ns=((stages,), (stages,)), n_stages=2),)


def latencies_s(trace: Trace, groups: tuple[GroupSpec, ...]) -> NDArray[np.float64]:
    """The latency of each request."""
    columns = run_groups(GroupExperiment(workload=trace, groups=groups))
    return (columns.finish_ns - trace.arrival_ns) / NS


@functools.lru_cache(maxsize=64)
def single(
    seed: int, slo_scale: float, rate: float = 40.0, cv: float = 4.0, devices: int = 16
) -> tuple[Serving, Trace]:
    """24 copies of the 2.7B model: the artifact's comparison of its simulator with its cluster."""
    names = [f"m{i}" for i in range(24)]
    trace = traffic(power_law_rates(rate, 24).tolist(), cv, seed, span_s=200.0)
    return on_cluster(dict.fromkeys(names, "bert-2.7b"), devices, slo_scale), trace


@functools.lru_cache(maxsize=64)
def mixed(seed: int, rate: float, devices: int, cv: float = 4.0, slo_scale: float = 5.0) -> tuple[Serving, Trace]:
    """Ten copies of each of six models, dealt in turn: the artifact's ablation."""
    trace = traffic(power_law_rates(rate, 60).tolist(), cv, seed, span_s=200.0)
    return on_cluster({f"m{i}": _MIXED[i % 6] for i in range(60)}, devices, slo_scale), trace


def on_cluster(models: dict[str, str], devices: int, slo_scale: float, memory_gib: float = 13.0) -> Serving:
    """Models by instance name on so many V100, with the overheads that the artifact found its cluster to have."""
    return Serving(
        cluster=Cluster(n_devices=devices, memory_bytes=memory_gib * GIB),
        models={name: load_single_pass(model) for name, model in models.items()},
        slo_scale=slo_scale,
        overhead_s=ARTIFACT_OVERHEAD_S,
        stage_overhead=ARTIFACT_STAGE_OVERHEAD,
    )


def attainment(search: PlacementSearch, case: tuple[Serving, Trace]) -> float:
    """Share in time of the traffic that the search placed for."""
    return find(search, *case).train.attainment
