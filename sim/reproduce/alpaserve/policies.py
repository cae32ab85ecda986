"""Which policy is better, on traffic of our own where that of the paper is not here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from policies.placement import (
    ClockworkPlusPlus,
    PartitionSearch,
    PlacementSearch,
    SelectiveReplication,
)
from sim.placement import Serving, evaluate, find, serve
from sim.reproduce.alpaserve.cases import TOKENS, attainment, on_cluster, single, traffic
from sim.reproduce.rows import Row
from workloads import GammaWindows, Trace, power_law_rates

_SEARCHES: Mapping[str, PlacementSearch] = {
    "replication": SelectiveReplication(),
    "Clockwork++": ClockworkPlusPlus(window_s=60.0),
    "AlpaServe": PartitionSearch(),
}


def policies(quick: bool) -> Iterator[Row]:
    seeds = range(2 if quick else 5)
    yield _on_shifting_traffic(seeds)
    yield _highest_rates(seeds)
    yield from _headlines()
    yield from _other_traffic(seeds)
    yield from _batches(seeds)


def _on_shifting_traffic(seeds: Sequence[int]) -> Row:
    mean = {
        name: float(np.mean([attainment(search, _shifting(seed)) for seed in seeds]))
        for name, search in _SEARCHES.items()
    }
    return Row(
        "Clockwork++ on shifting traffic", "popularity changes every 60 s",
        "attainment of replication, Clockwork++, AlpaServe", "rises",
        " ".join(f"{value:.3f}" for value in mean.values()), kind="emulated", evidence="event loop against theory",
        holds=mean["replication"] < mean["Clockwork++"] < mean["AlpaServe"],
        note="the traffic is ours (24 models by a power law of 1, dealt anew every 60 s, CV 4, 36/s); the order is the same "
        "from 12/s to 60/s",
    )  # fmt: skip


def _shifting(seed: int, rate: float = 36.0) -> tuple[Serving, Trace]:
    """Traffic whose popular models change every minute, on the cluster of `single`."""
    rng = np.random.default_rng([seed, 0x616C70])
    rates = np.stack([rng.permutation(power_law_rates(rate, 24, 1.0)) for _ in range(5)], axis=1)
    windows = GammaWindows(rate_per_s=rates, cv=np.full(rates.shape, 4.0), window_s=60.0)
    names = [f"m{i}" for i in range(24)]
    return on_cluster(dict.fromkeys(names, "bert-2.7b"), 16, 5.0), windows.trace(models=names, prompt=TOKENS, seed=seed)


def _highest_rates(seeds: Sequence[int]) -> Row:
    rates = [
        float(np.mean([_rate_at_goal(search, seed) for seed in seeds]))
        for search in (SelectiveReplication(), PartitionSearch())
    ]
    factor = rates[1] / rates[0]
    return Row(
        "rate at 99 % attainment", f"24 x 2.7B on 16 GPUs, SLO scale 5, CV 3: {rates[1]:.2f}/s and {rates[0]:.2f}/s",
        "rate of AlpaServe over that of replication (recorded for S3 on MAF2: 5; abstract: up to 10)", "3 to 10",
        f"{factor:.1f}", kind="emulated", evidence="event loop against theory", holds=3.0 <= factor <= 10.0,
        note="the case is ours, since the traces are not here. Replication is held back by the rarest models: a model with one "
        "replica and CV 3 misses its deadlines at any but the lowest rates, and recorded traffic mixes functions",
    )  # fmt: skip


def _rate_at_goal(search: PlacementSearch, seed: int) -> float:
    """The highest rate at which at least 99 % of requests are in time, to 5 %."""
    names = [f"m{i}" for i in range(24)]
    serving = on_cluster(dict.fromkeys(names, "bert-2.7b"), 16, 5.0)

    def keeps(rate: float) -> bool:
        # At low rates a longer run keeps the number of requests.
        span_s = max(200.0, 2000.0 / rate)
        trace = traffic(power_law_rates(rate, 24).tolist(), 3.0, seed, span_s=span_s)
        return attainment(search, (serving, trace)) >= 0.99

    low, high = 1.0, 64.0
    while not keeps(low):
        low, high = low / 4, low
    while high / low > 1.05:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low


def _headlines() -> Iterator[Row]:
    """Factors that are printed without their settings."""
    for case, printed in (
        ("burstiness (CV)", "6 (abstract)"),
        ("tighter SLO", "2.5 (secondary source)"),
        ("fewer devices", "up to 2.3 (secondary source)"),
    ):
        yield Row(
            "headline factors at 99 % attainment", case, "AlpaServe over replication, the most over all settings",
            printed, "not run", kind="emulated", evidence="shown only",
            note="the setting that it belongs to is not stated, and those of the paper need the traces",
        )  # fmt: skip


def _other_traffic(seeds: Sequence[int]) -> Iterator[Row]:
    """A placement for one seed serving another, and how long planning it took."""
    unseen = {name: [] for name in ("replication", "AlpaServe")}
    planned = []
    for seed in seeds:
        serving, train = single(seed, 5.0)
        _, test = single(seed + 100, 5.0)
        for name, found in unseen.items():
            plan = find(_SEARCHES[name], serving, train)
            found.append(serve(serving, plan.placements, test).attainment)
            if name == "AlpaServe":
                planned.append(plan)
    yield Row(
        "a placement for other traffic than it was made for", "24 x 2.7B on 16 GPUs, SLO scale 5, another seed",
        "attainment of replication, AlpaServe: AlpaServe stays ahead", "rises",
        f"{np.mean(unseen['replication']):.3f} {np.mean(unseen['AlpaServe']):.3f}", kind="qualitative",
        evidence="event loop against theory", holds=bool(np.mean(unseen["AlpaServe"]) > np.mean(unseen["replication"])),
        note="the case is that of the comparison with the cluster; that the test differs by its seed alone is ours",
    )  # fmt: skip
    yield Row(
        "planning time", "24 x 2.7B on 16 GPUs", "seconds a search, and simulations (the paper leaves planning out)",
        "not given",
        f"{np.mean([p.planning_s for p in planned]):.2f} s, {np.mean([p.simulations for p in planned]):.0f}",
        kind="qualitative", evidence="shown only",
        note="the paper leaves planning out of its figures; the seconds are of the machine that ran this",
    )  # fmt: skip


def _batches(seeds: Sequence[int]) -> Iterator[Row]:
    for rate, scales in ((64.0, (2.0, 5.0, 10.0)), (30.0, (2.0,))):
        for scale in scales:
            off, on = zip(*(_batching(rate, scale, seed) for seed in seeds), strict=True)
            yield Row(
                "batching", f"16 x 1.3B on 8 GPUs, {rate:g}/s, CV 4, SLO scale {scale:g}",
                "attainment gained by batches up to 8: small either way", 0.0, float(np.mean(on) - np.mean(off)),
                kind="qualitative", evidence="event loop against theory", within_abs=0.03,
                note=("the rate is ours; " if rate == 30.0 else "")
                + "no batched run is recorded. A batch of two is read as taking 1.97 times as long (1024-token batches as "
                "half as many of 2048), and the others of the group wait for it",
            )  # fmt: skip


def _batching(rate: float, slo_scale: float, seed: int) -> tuple[float, float]:
    """Attainment of one placement without batches and with them."""
    names = [f"m{i}" for i in range(16)]
    serving = on_cluster(dict.fromkeys(names, "bert-1.3b"), 8, slo_scale)
    trace = traffic(power_law_rates(rate, 16).tolist(), 4.0, seed, span_s=100.0)
    plan = find(PartitionSearch(), serving, trace)
    batching = Serving(
        cluster=serving.cluster,
        models=serving.models,
        slo_scale=slo_scale,
        batch_sizes=(1, 2, 4, 8),
        overhead_s=serving.overhead_s,
        stage_overhead=serving.stage_overhead,
    )
    return plan.train.attainment, evaluate(batching, plan.placement, trace).attainment
