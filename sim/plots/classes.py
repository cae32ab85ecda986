"""Time to first token of each class of service against its limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import sim.metrics as metrics
from sim.plots.latency import plot_latency_ecdf
from sim.plots.style import OKABE_ITO, sheet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST = 8


def classes_figure(*, requests: Mapping[str, NDArray[Any]], classes: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """The distribution of TTFT of each of *classes* (`name` and `slo`, by `class_index`) over those that finished, side by side;
    its limit as a line, and in the heading how many are within it of all that came. The first eight where there are more."""
    shown, ttft_s = classes[:_MOST], metrics.ttft_s(requests)
    figure = sheet(max(4.0, 3.2 * len(shown)), 4.1, title=title, layout=None)
    figure.subplots_adjust(left=0.2 / len(shown) + 0.02, right=0.985, bottom=0.14, top=0.75, wspace=0.09)
    axes = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for row, (ax, each) in enumerate(zip(axes, shown, strict=True)):
        values = ttft_s[requests["class_index"] == row]
        limit_s = each["slo"]["ttft_s"]
        name = f"{each['name']}, {values.size:,}"
        if limit_s is not None and values.size:
            name += f": {np.count_nonzero(values <= limit_s) / values.size:.1%} in {limit_s:g} s"
        plot_latency_ecdf(ax, values, name=name)
        if limit_s is not None:
            ax.axvline(limit_s, color=OKABE_ITO["vermillion"], linewidth=1.0, linestyle="--")
        ax.set_xlabel("TTFT, log scale" + ("" if limit_s is None else " (dashed: limit)"), fontsize=9)
    axes[0].set_ylabel("share at or below, of those that finished", fontsize=9)
    return figure
