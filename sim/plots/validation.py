"""Pictures of the hardware models against measurements: measured against predicted, and errors by size."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.plots.style import OKABE_ITO, dress, save, sheet
from sim.validation.files import Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_POINTS = 4000


def plot_measured_against_predicted(ax: Axes, measured_s: np.ndarray, predicted_s: np.ndarray, *, title: str) -> None:
    """Scatter of predictions over measurements (seconds) with the diagonal and bands of 20 %; at most 4,000 points."""
    x, y = _thinned(measured_s, predicted_s)
    ax.plot(x * 1e3, y * 1e3, ".", color=OKABE_ITO["blue"], markersize=2.5, alpha=0.35, rasterized=True)
    ends = np.array([min(x.min(), y.min()), max(x.max(), y.max())]) * 1e3
    ax.plot(ends, ends, color=OKABE_ITO["black"], linewidth=1.0)
    for factor in (0.8, 1.2):
        ax.plot(ends, ends * factor, color="#999999", linewidth=0.7, linestyle="--")
    ax.set_xscale("log")
    ax.set_yscale("log")
    dress(ax, x="measured, ms", y="predicted, ms", title=title)


def plot_error_by_size(ax: Axes, measured_s: np.ndarray, predicted_s: np.ndarray, *, bins: int = 16) -> None:
    """Relative error over the measured time: median and the middle 80 % in each of *bins* bins of equal width in log."""
    error = 100.0 * (predicted_s / measured_s - 1.0)
    edges = np.geomspace(measured_s.min() * 0.999, measured_s.max() * 1.001, bins + 1)
    which = np.digitize(measured_s, edges) - 1
    centre, low, middle, high = [], [], [], []
    for index in range(bins):
        mine = error[which == index]
        if len(mine) >= 3:
            centre.append(math.sqrt(edges[index] * edges[index + 1]) * 1e3)
            q10, q50, q90 = np.percentile(mine, (10, 50, 90))
            low.append(q10)
            middle.append(q50)
            high.append(q90)
    ax.axhline(0, color=OKABE_ITO["black"], linewidth=0.8)
    ax.fill_between(centre, low, high, color=OKABE_ITO["sky"], alpha=0.4, linewidth=0, label="10 % to 90 %")
    ax.plot(centre, middle, "o-", color=OKABE_ITO["vermillion"], markersize=3, linewidth=1.2, label="median")
    ax.set_xscale("log")
    ax.legend(fontsize=8, frameon=False)
    dress(ax, x="measured, ms", y="error, %")


def draw_validation(comparisons: Iterable[Comparison], folder: str | Path) -> list[Path]:
    """One PNG a file and quantity in seconds: measured against predicted beside the error by size; their paths."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for one in comparisons:
        known = np.isfinite(one.predicted) & np.isfinite(one.measured) & (one.measured > 0) & (one.predicted > 0)
        if not known.any() or one.quantity in ("prompt_throughput", "generation_throughput", "running"):
            continue
        measured, predicted = one.measured[known], one.predicted[known]
        figure = sheet(10, 4.2)
        left, right = figure.subplots(1, 2)
        line: Any = one.line
        title = f"{one.file.removesuffix('.csv')}, {one.quantity}: median {line.median_pct:.1f} %"
        plot_measured_against_predicted(left, measured, predicted, title=title)
        plot_error_by_size(right, measured, predicted)
        right.set_title(f"{known.sum():,} rows, bias {line.bias_pct:+.1f} %", fontsize=9, loc="left")
        paths += save(figure, folder / f"{one.file.removesuffix('.csv')}.{one.quantity}.png", svg=False)
    return paths


def _thinned(*columns: np.ndarray) -> list[np.ndarray]:
    step = -(-len(columns[0]) // _MOST_POINTS)
    return [column[::step] for column in columns]
