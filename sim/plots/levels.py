"""Levels and rates over time: how many are inside, how much is done a second, and step lines of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sim.plots.style import OKABE_ITO, dress

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FloatArray = NDArray[np.float64]
Blocks = Callable[[], Iterable[Mapping[str, NDArray[Any]]]]
"""Iterations in pieces, in order of start within a replica, as often as one asks."""


def mean_level(edges_ns: FloatArray, enter_ns: NDArray[Any], leave_ns: NDArray[Any]) -> FloatArray:
    """Mean number of things inside during each interval between *edges_ns*; entries and leaves need no pairing.

    Exact, from the integral of the counting process. Shape [len(edges_ns) - 1].
    """

    def integral(times_ns: NDArray[Any]) -> FloatArray:
        ordered = np.sort(times_ns).astype(np.float64) - edges_ns[0]
        before = np.concatenate([[0.0], np.cumsum(ordered)])
        count = np.searchsorted(ordered, edges_ns - edges_ns[0], side="right")
        return count * (edges_ns - edges_ns[0]) - before[count]

    # Rounding of the two integrals can leave a whisker below zero.
    return np.maximum(np.diff(integral(enter_ns) - integral(leave_ns)) / np.diff(edges_ns), 0.0)


def rate_per_s(
    edges_ns: FloatArray, start_ns: NDArray[Any], duration_ns: NDArray[Any], amount: NDArray[Any]
) -> FloatArray:
    """Amount a second in each interval between *edges_ns*, each iteration's amount spread evenly over its duration.

    Iterations are those of one lane: they do not overlap, and are in order of start.
    """
    if not start_ns.size:
        return np.zeros(edges_ns.size - 1)
    done = np.concatenate([[0.0], np.cumsum(amount, dtype=np.float64)])
    at = np.maximum(np.searchsorted(start_ns, edges_ns, side="right") - 1, 0)
    part = np.clip((edges_ns - start_ns[at]) / np.maximum(duration_ns[at], 1), 0.0, 1.0)
    return np.diff(done[at] + part * amount[at]) / np.diff(edges_ns) * 1e9


def token_rates(edges_ns: FloatArray, blocks: Blocks, columns: Sequence[str]) -> list[FloatArray]:
    """Tokens a second in each interval between *edges_ns*, of iterations in blocks, for each of *columns*."""
    rates = [np.zeros(edges_ns.size - 1) for _ in columns]
    for block in blocks():
        lane_of = block["replica"].astype(np.int64) << 32 | block["lane"]
        order = np.argsort(lane_of, kind="stable")
        heads = np.flatnonzero(np.diff(lane_of[order], prepend=-1)).tolist()
        start, duration = block["start_ns"][order], block["duration_ns"][order]
        for rate, name in zip(rates, columns, strict=True):
            amount = block[name][order]
            for at, to in itertools.pairwise((*heads, len(order))):
                rate += rate_per_s(edges_ns, start[at:to], duration[at:to], amount[at:to])
    return rates


def plot_level(
    ax: Axes, edges_s: FloatArray, levels: Mapping[str, FloatArray], *, label: str, fill: bool = False
) -> None:
    """Draw step lines, one for each named level, over intervals between *edges_s*."""
    colors = (OKABE_ITO["blue"], OKABE_ITO["vermillion"], OKABE_ITO["green"], OKABE_ITO["orange"])
    for color, (name, level) in zip(colors, levels.items(), strict=False):
        ax.stairs(level, edges_s, color=color, linewidth=1.2, label=name, baseline=None)
        if fill:
            ax.stairs(level, edges_s, color=color, alpha=0.2, fill=True)
    dress(ax, y=label)
    top = max((float(np.nan_to_num(level).max(initial=0.0)) for level in levels.values()), default=0.0)
    ax.set_ylim(0, (1.3 if len(levels) > 1 else 1.08) * top or 1.0)  # head room for the legend
    if len(levels) > 1:
        ax.legend(fontsize=8, frameon=False, loc="upper right", ncols=len(levels))
