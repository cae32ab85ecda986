"""Gantt charts of pipeline stages and micro-batches, in which bubbles are seen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sim.engine.record.columns import ReplicaColumns
from sim.plots.style import OKABE_ITO, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS: Mapping[str, str] = {
    "prompt only": OKABE_ITO["blue"],
    "prompt and decodes": OKABE_ITO["sky"],
    "decodes only": OKABE_ITO["orange"],
    "bubble": "#E8E8E8",
}


def kinds_of(replica: ReplicaColumns) -> NDArray[np.int64]:
    """For each stage record an index into COLOURS: what the micro-batch computes. Shape [len(replica.stages)]."""
    spans = replica.spans[replica.stages["micro_batch"]]
    prompt, decodes = spans["prefill_rows"] > 0, spans["decode_seqs"] > 0
    return np.where(prompt & decodes, 1, np.where(prompt, 0, 2))


def bubble_share(replica: ReplicaColumns, begin_s: float, end_s: float) -> float:
    """Share of the stages' time between two instants in which they idle, the replica having work."""
    stages = replica.stages
    begin_ns, end_ns = begin_s * 1e9, end_s * 1e9
    until = stages["start_ns"].astype(float)
    since = until - stages["bubble_ns"]
    idle = np.clip(np.minimum(until, end_ns) - np.maximum(since, begin_ns), 0.0, None).sum()
    return float(idle / ((end_ns - begin_ns) * (int(stages["stage"].max()) + 1)))


def plot_gantt(ax: Axes, replica: ReplicaColumns, *, begin_s: float, end_s: float) -> None:
    """Draw the stages of one replica between two instants, the first stage on top; ValueError without a pipeline."""
    stages = replica.stages
    if not len(stages):
        raise ValueError("there are no stages to draw: the replica has no pipeline, or nothing ran")
    start = stages["start_ns"] * 1e-9
    length = stages["duration_ns"] * 1e-9
    idle = stages["bubble_ns"] * 1e-9
    inside = (start + length > begin_s) & (start - idle < end_s)
    kinds = kinds_of(replica)
    colours = list(COLOURS.values())
    n_stages = int(stages["stage"].max()) + 1
    for stage in range(n_stages):
        mine = inside & (stages["stage"] == stage)
        row = (stage - 0.4, 0.8)
        gaps = mine & (idle > 0)
        ax.broken_barh(
            list(zip((start - idle)[gaps], idle[gaps], strict=True)), row, facecolors=colours[3], edgecolors="none"
        )
        for kind in range(3):
            these = mine & (kinds == kind)
            ax.broken_barh(
                list(zip(start[these], length[these], strict=True)),
                row,
                facecolors=colours[kind],
                edgecolors="white",
                linewidth=0.3,
            )
    ax.set_xlim(begin_s, end_s)
    ax.set_ylim(n_stages - 0.5, -0.5)
    ax.set_yticks(range(n_stages))
    ax.set_yticklabels([str(stage + 1) for stage in range(n_stages)])
    ax.set_ylabel("stage", fontsize=9)
    ax.tick_params(labelsize=8)
    ax.spines[["top", "right"]].set_visible(False)


def gantt_figure(replicas: Mapping[str, ReplicaColumns], *, begin_s: float, end_s: float, title: str) -> Figure:
    """One chart for each named replica over the same stretch of time, one above the other."""
    from matplotlib.patches import Patch

    n = len(replicas)
    figure = sheet(11, 1.1 + 2.35 * n, title=title, layout=None)
    axes: Any = np.atleast_1d(figure.subplots(n, 1, sharex=True))
    for ax, (name, replica) in zip(axes, replicas.items(), strict=True):
        plot_gantt(ax, replica, begin_s=begin_s, end_s=end_s)
        share = bubble_share(replica, begin_s, end_s)
        ax.set_title(f"{name}: stages idle {share:.0%} of the time", fontsize=9, loc="left")
    axes[-1].set_xlabel("time, s", fontsize=9)
    top = 1 - 0.55 / (1.1 + 2.35 * n)
    figure.legend(
        handles=[Patch(facecolor=colour, label=name) for name, colour in COLOURS.items()],
        loc="lower center",
        ncols=4,
        fontsize=8,
        frameon=False,
    )
    figure.subplots_adjust(left=0.06, right=0.985, bottom=0.85 / (1.1 + 2.35 * n), top=top - 0.03, hspace=0.28)
    return figure
