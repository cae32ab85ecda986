"""The picture of what prefix caches of all sizes find of a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.plots.style import GREY, OKABE_ITO, dress
from workloads.reuse import ReuseCurve

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_reuse(ax: Axes, curve: ReuseCurve, *, bytes_per_token: float | None = None, model: str = "") -> None:
    """Share of prompt tokens found over the cache's size, logarithmic; with *bytes_per_token* in GB of *model* on top as well."""
    best = 100.0 * curve.best_hit_rate
    if len(curve.capacity_blocks) == 0:
        ax.text(0.5, 0.5, "no block is ever named again", transform=ax.transAxes, ha="center", fontsize=10)
        dress(ax, x="cache, tokens", y="prompt tokens found, %")
        return
    ends = curve.capacity_blocks[[0, -1]] * curve.block_tokens
    sizes = np.geomspace(ends[0] / 2, ends[1] * 2, 400)
    ax.axhspan(best, 100, color="#EEEEEE", linewidth=0)
    ax.axhline(best, color=GREY, linewidth=0.9, linestyle="--")
    ax.text(
        sizes[0],
        best + 1,
        f"named for the first time: no cache finds the other {100 - best:.1f} %",
        fontsize=8,
        color=GREY,
        va="bottom",
    )
    ax.plot(sizes, 100.0 * curve.hit_rate(sizes), color=OKABE_ITO["blue"], linewidth=1.8)
    ax.set_xscale("log")
    ax.set_xlim(sizes[0], sizes[-1])
    ax.set_ylim(0, max(100.0, best))
    dress(ax, x="cache, tokens (least recently used goes first)", y="prompt tokens found, %")
    if bytes_per_token:
        per_token_gb = bytes_per_token / 1e9
        top = ax.secondary_xaxis("top", functions=(_times(per_token_gb), _times(1 / per_token_gb)))
        top.set_xlabel(f"GB of {model}" if model else "GB", fontsize=9)
        top.tick_params(labelsize=8)


def _times(factor: float) -> Callable[[Any], Any]:
    return lambda x: x * factor
