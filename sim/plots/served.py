"""One picture of serving runs beside their predictions: which models, which loads, how far and in which direction."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hwmodels.stacks import servers
from sim.plots.style import OKABE_ITO, save, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from sim.validation.files import Comparison

_COLOURS = dict(zip(servers(), ("blue", "vermillion", "green"), strict=False))
_MARKERS = dict(zip(servers(), "os^", strict=False))
_REACH = 100.0
"""Percent at which the horizontal axis ends; what lies beyond is drawn at the end."""


def draw_served(pair: tuple[Comparison, Comparison], folder: str | Path) -> list[Path]:
    """served.png in *folder*: errors of TPOT and TTFT by model, device and stack above, by requests in flight below; its path."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    labels, order = _models(pair[0])
    figure = sheet(12, 3.6 + 0.24 * len(order))
    grid = figure.add_gridspec(2, 2, height_ratios=(0.24 * len(order), 2.4))
    medians = []
    for column, (one, aim, name) in enumerate(zip(pair, (9.0, 20.0), ("TPOT", "TTFT"), strict=True)):
        above, below = figure.add_subplot(grid[0, column]), figure.add_subplot(grid[1, column])
        _by_model(above, one, labels, order, aim, names=column == 0)
        _by_load(below, one, aim)
        ratio = one.predicted / one.measured - 1.0
        medians.append(f"{name} {100 * np.nanmedian(np.abs(ratio)):.1f} %")
        above.set_title(f"{name}: error of each model on each device", loc="left", fontsize=9)
        below.set_title(f"{name}: median error by requests in flight", loc="left", fontsize=9)
    rows = len(pair[0].measured)
    figure.suptitle(
        f"Predicted serving runs lie around the measured ones: median error {', '.join(medians)} over {rows:,} rows.\n"
        "Points right of zero are predicted too slow; those outside the grey band miss the aim.",
        fontsize=10,
        x=0.01,
        ha="left",
    )
    return save(figure, folder / "served.png", svg=False)


def _models(one: Comparison) -> tuple[np.ndarray, list[str]]:
    """A label of model, format, device, stack and family for each row, and the labels from top to bottom."""
    short = {"internal-gap-analysis": "gap", "InferenceX": ""}
    rows = zip(*(one.groups[name] for name in ("model", "precision", "device", "stack", "family")), strict=True)
    found = []
    for model, precision, device, stack, family in rows:
        parts = [str(model).rpartition("/")[2], str(precision or "bf16"), str(device).partition("_")[0], str(stack)]
        found.append(" ".join([*parts, short.get(str(family), str(family))]).strip())
    stacks = dict(zip(found, one.groups["stack"].tolist(), strict=True))
    order = sorted(
        set(found), key=lambda name: (list(_COLOURS).index(stacks[name]) if stacks[name] in _COLOURS else 9, name)
    )
    return np.array(found), order


def _by_model(ax: Axes, one: Comparison, labels: np.ndarray, order: list[str], aim: float, *, names: bool) -> None:
    ratio = 100.0 * (one.predicted / one.measured - 1.0)
    ax.axvspan(-aim, aim, color="#dddddd", linewidth=0)
    ax.axvline(0, color=OKABE_ITO["black"], linewidth=0.8)
    for place, label in enumerate(order):
        mine = ratio[(labels == label) & np.isfinite(ratio)]
        if not len(mine):
            continue
        stack = str(one.groups["stack"][np.flatnonzero(labels == label)[0]])
        colour = OKABE_ITO[_COLOURS.get(stack, "black")]
        low, middle, high = np.clip(np.percentile(mine, (10, 50, 90)), -_REACH, _REACH)
        ax.plot([low, high], [place, place], color=colour, linewidth=1.6, alpha=0.6)
        ax.plot(middle, place, _MARKERS.get(stack, "D"), color=colour, markersize=5)
    ax.set_xlim(-1.05 * _REACH, 1.05 * _REACH)
    ax.set_ylim(len(order) - 0.5, -0.5)
    ax.set_yticks(range(len(order)), order if names else [""] * len(order), fontsize=7)
    ax.set_xlabel("predicted / measured - 1, %: median and the middle 80 %", fontsize=8)
    ax.tick_params(axis="x", labelsize=8)
    ax.grid(axis="y", color="#eeeeee", linewidth=0.6)
    ax.set_axisbelow(True)


def _by_load(ax: Axes, one: Comparison, aim: float) -> None:
    size = 100.0 * np.abs(one.predicted / one.measured - 1.0)
    load = one.groups["load"]
    for stack in dict.fromkeys(one.groups["stack"].tolist()):
        mine = (one.groups["stack"] == stack) & np.isfinite(size) & np.isfinite(load)
        octave = np.round(np.log2(np.maximum(load[mine], 1.0)))
        places = [each for each in np.unique(octave) if (octave == each).sum() >= 5]
        colour = OKABE_ITO[_COLOURS.get(str(stack), "black")]
        ax.plot(
            [2.0**each for each in places],
            [np.median(size[mine][octave == each]) for each in places],
            marker=_MARKERS.get(str(stack), "D"),
            color=colour,
            linewidth=1.2,
            markersize=4,
            label=str(stack),
        )
    ax.axhline(aim, color="#999999", linewidth=1.0, linestyle="--")
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set_ylim(bottom=0)
    ax.set_xlabel("requests in flight", fontsize=8)
    ax.set_ylabel("median error, %", fontsize=8)
    ax.tick_params(labelsize=8)
    ax.legend(fontsize=8, frameon=False)
