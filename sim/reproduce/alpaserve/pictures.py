"""Pictures of AlpaServe's experiments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from policies.placement import ClockworkPlusPlus, PartitionSearch, PlacementSearch, RoundRobin, SelectiveReplication
from sim.placement.groups import GroupExperiment, stage_record
from sim.plots.placement import attainment_figure, busy_share, draw_latencies, draw_utilisation
from sim.plots.style import save, sheet
from sim.reproduce.alpaserve.cases import SEARCHES, attainment, latencies_s, pair_groups, single, table, traffic
from sim.reproduce.alpaserve.queueing import PAIRS
from sim.reproduce.alpaserve.very_large import very_large_point

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_Panel = tuple[Sequence[float], dict[str, list[float]]]


def plots(folder: Path) -> list[Path]:
    """Draw the two-model example, the sweeps of the policies, set S4, and simulator against cluster."""
    made = []
    for name, figure in (
        ("alpaserve-two-models.png", _two_models_figure()),
        ("alpaserve-policies.png", _policies_figure()),
        ("alpaserve-very-large.png", _very_large_figure()),
        ("alpaserve-cluster.png", _cluster_figure()),
    ):
        made += save(figure, folder / name, svg=False)
    return made


def _two_models_figure() -> Figure:
    figure = sheet(11, 7, title="Two 6.7B models on two GPUs, 3 requests a second")
    axes = figure.subplots(2, 2).ravel()
    for ax, (case, rates, cv, _, _) in zip(axes, PAIRS, strict=False):
        trace = traffic(rates, cv, 0, n=60_000)
        latencies = {
            "one model a GPU": latencies_s(trace, pair_groups(False)),
            "two-stage pipeline": latencies_s(trace, pair_groups(True)),
        }
        draw_latencies(ax, latencies, title=case)
    trace = traffic((1.5, 1.5), 3.0, 3, span_s=240.0)
    edges_s = np.arange(0.0, 241.0, 2.0)
    lines = {}
    for name, pipelined, devices in (("one model a GPU", False, {0: 1, 1: 1}), ("two-stage pipeline", True, {0: 1})):
        record = stage_record(GroupExperiment(workload=trace, groups=pair_groups(pipelined)))
        lines[name] = busy_share(record, edges_s, devices, 2)
    draw_utilisation(axes[3], edges_s, lines, title="(d) Gamma CV 3: cluster utilisation, means of 2 s")
    return figure


def _policies_figure() -> Figure:
    policies: dict[str, PlacementSearch] = {
        "AlpaServe": PartitionSearch(),
        "Clockwork++ (50 s)": ClockworkPlusPlus(window_s=50.0),
        "selective replication": SelectiveReplication(),
        "round robin, (4, 1)": RoundRobin(),
    }

    def sweep(key: str, values: Sequence[float]) -> _Panel:
        lines: dict[str, list[float]] = {name: [] for name in policies}
        for value in values:
            settings: dict[str, float] = {"slo_scale": 5.0, key: value}
            for name, search in policies.items():
                found = []
                for seed in range(2):
                    case = single(seed, 5.0, devices=int(value)) if key == "devices" else single(seed, **settings)
                    found.append(attainment(search, case))
                lines[name].append(float(np.mean(found)))
        return values, lines

    panels = {
        "devices": sweep("devices", (8, 12, 16, 20, 24, 32)),
        "rate (1/s)": sweep("rate", (5, 10, 20, 40, 60, 80)),
        "CV": sweep("cv", (0.5, 1, 2, 4, 6, 8)),
        "SLO scale": sweep("slo_scale", (0.75, 1, 1.5, 2, 3, 5, 10)),
    }
    return attainment_figure(panels, title="24 models of 2.7B; where not varied: 16 GPUs, 40/s, CV 4, SLO scale 5")


def _very_large_figure() -> Figure:
    def sweep(points: Sequence[tuple[float, tuple[float, float, float]]]) -> _Panel:
        found = [very_large_point(*point, seeds=2, span_s=600.0) for _, point in points]
        return [x for x, _ in points], {name: [each[name] for each in found] for name in found[0]}

    panels = {
        "rate (1/s)": sweep([(rate, (rate, 4.0, 2.0)) for rate in (0.5, 2, 4, 6, 8)]),
        "CV": sweep([(cv, (8.0, cv, 2.0)) for cv in (1, 2, 3, 4)]),
        "SLO scale": sweep([(scale, (8.0, 4.0, scale)) for scale in (0.5, 1, 2, 4, 6, 8)]),
    }
    return attainment_figure(panels, title="Four 104B models on 64 GPUs (set S4); rate 8/s, CV 4, SLO scale 2")


def _cluster_figure() -> Figure:
    recorded = table("sim_vs_cluster")
    scales = sorted({float(row["slo_scale"]) for row in recorded})
    lines: dict[str, list[float]] = {}
    for policy, title in (("mp-search", "AlpaServe"), ("sr-greedy", "replication")):
        lines[f"{title}, recorded"] = [
            float(row["cluster"])
            for scale in scales
            for row in recorded
            if (float(row["slo_scale"]), row["policy"]) == (scale, policy)
        ]
        lines[f"{title}, here"] = [
            float(np.mean([attainment(SEARCHES[policy], single(seed, scale)) for seed in range(3)])) for scale in scales
        ]
    return attainment_figure({"SLO scale": (scales, lines)}, title="Recorded on 16 V100")
