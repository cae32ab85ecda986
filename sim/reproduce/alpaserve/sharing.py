"""When model parallelism helps: eight models of 2.7 B on eight GPUs (section 3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from hwmodels.single_pass import load_single_pass
from policies.placement import (
    Cluster,
    Group,
    Placement,
)
from sim.placement import Serving, evaluate
from sim.reproduce.alpaserve.cases import GIB, traffic
from sim.reproduce.rows import Row


def _eight(
    rate: float, cv: float, *, memory_gib: float, inter_op: int, slo_scale: float | None, seed: int, span_s: float
) -> tuple[float, float]:
    """Mean latency and attainment of eight models on eight devices in equal groups of *inter_op* stages."""
    names = [f"m{i}" for i in range(8)]
    trace = traffic([rate / 8] * 8, cv, seed, span_s=span_s)
    serving = Serving(
        cluster=Cluster(n_devices=8, memory_bytes=memory_gib * GIB),
        models=dict.fromkeys(names, load_single_pass("bert-2.7b")),
        slo_scale=slo_scale,
    )
    sizes = serving.views_without_traffic
    groups = [Group(inter_op=inter_op, intra_op=1) for _ in range(8 // inter_op)]
    # Models in turn to every group, each shifted by one, as far as memory goes: replication without a search.
    copies = int(serving.cluster.memory_bytes / sizes[0].device_bytes[inter_op, 1] + 1e-9)
    per_group = min(copies, 8)
    step = 8 // len(groups)
    groups = [
        Group(inter_op=inter_op, intra_op=1, models=tuple(sorted({(g * step + k) % 8 for k in range(per_group)})))
        for g in range(len(groups))
    ]
    outcome = evaluate(serving, Placement(groups=tuple(groups)), trace, screening=True)
    return float(outcome.latency_s.mean()), outcome.attainment


def _gain(rate: float, cv: float, memory_gib: float, *, seeds: int, span_s: float, pipeline: int = 8) -> float:
    """Mean latency of replication over that of pipelines."""
    means = {1: 0.0, pipeline: 0.0}
    for seed in range(seeds):
        for stages in means:
            means[stages] += _eight(
                rate, cv, memory_gib=memory_gib, inter_op=stages, slo_scale=None, seed=seed, span_s=span_s
            )[0]
    return means[1] / means[pipeline]


def when_it_helps(quick: bool) -> Iterator[Row]:
    seeds, span_s = (2, 4000.0) if quick else (4, 20_000.0)
    experiment = "when model parallelism helps (section 3)"

    def trend(case: str, quantity: str, published: str, values: Sequence[float], holds: bool, ours: str = "") -> Row:
        return Row(
            experiment, case, quantity, published, " ".join(f"{value:.2f}" for value in values), kind="qualitative",
            evidence="event loop against theory", holds=holds,
            note=f"the settings are the artifact's; the points of the sweep are ours{ours}",
        )  # fmt: skip

    memory = [_gain(20.0, 3.0, gib, seeds=seeds, span_s=span_s) for gib in (5.5, 11.0, 22.0, 44.0)]
    yield trend(
        "5.5, 11, 22, 44 GiB a GPU, 20/s, CV 3",
        "latency of replication over pipeline: falls with memory, below 1 where every model fits on every GPU",
        "falls",
        memory,
        all(a > b for a, b in pairwise(memory)) and memory[0] > 1 > memory[-1],
    )
    load = [_gain(rate, 3.0, 13.0, seeds=seeds, span_s=span_s) for rate in (4.0, 12.0, 20.0, 31.0)]
    yield trend(
        "4, 12, 20, 31 /s (peak 33.6), CV 3",
        "latency of replication over pipeline: the gain is lost near peak load",
        "last lower",
        load,
        max(load[:3]) > load[3],
    )
    bursts = [_gain(20.0, cv, 13.0, seeds=seeds, span_s=span_s) for cv in (0.5, 2.0, 4.0, 6.0)]
    yield trend(
        "CV 0.5, 2, 4, 6 at 20/s",
        "latency of replication over pipeline: the gain rises with burstiness",
        "rises",
        bursts,
        bursts[0] < bursts[1] < bursts[-1],
    )
    slo = []
    for scale in (2.0, 5.0, 10.0, 20.0):
        pair = [
            np.mean(
                [
                    _eight(30.0, 3.0, memory_gib=13.0, inter_op=stages, slo_scale=scale, seed=seed, span_s=500.0)[1]
                    for seed in range(seeds)
                ]
            )
            for stages in (8, 1)
        ]
        slo.append(float(pair[0] - pair[1]))
    yield trend(
        "SLO scale 2, 5, 10, 20 at 30/s, CV 3",
        "attainment of pipeline less that of replication: larger where the SLO is tight",
        "last lower",
        slo,
        slo[0] > 0 and max(slo[:2]) > slo[-1],
    )
