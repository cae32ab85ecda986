"""Distributions of latency: the empirical distribution of many values, and how it is drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sim.plots.style import GREY, OKABE_ITO, dress
from sim.text import seconds_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FloatArray = NDArray[np.float64]

_MARKED = (0.5, 0.9, 0.99)
_ECDF_POINTS = 2000


def ecdf(values: NDArray[Any]) -> tuple[FloatArray, FloatArray]:
    """Where the empirical distribution of positive *values* steps, and the share at or below each: two arrays.

    Beyond 2,000 values the steps are gathered on a logarithmic grid of 2,000 points, finer than a line is wide.
    """
    return weighted_ecdf(lambda: ((values, np.ones(values.size)),))


def weighted_ecdf(blocks: Callable[[], Iterable[tuple[NDArray[Any], NDArray[Any]]]]) -> tuple[FloatArray, FloatArray]:
    """The same of values of which each counts weight times, in pieces that *blocks* gives as often as it is called."""
    n, low, high, total = 0, np.inf, -np.inf, 0
    for values, weights in blocks():
        n, total = n + values.size, total + weights.sum()
        if values.size:
            least, most = np.log([values.min(), values.max()]).tolist()
            low, high = min(low, least), max(high, most)
    if n <= _ECDF_POINTS:
        values, weights = (np.concatenate(column) for column in zip(*blocks(), strict=True))
        order = np.argsort(values, kind="stable")
        return values[order].astype(np.float64), np.cumsum(weights[order]) / total
    step = (high - low) / _ECDF_POINTS or 1.0
    counts = np.zeros(_ECDF_POINTS)
    for values, weights in blocks():
        bins = np.minimum(((np.log(values) - low) / step).astype(np.int64), _ECDF_POINTS - 1)
        counts += np.bincount(bins, weights=weights, minlength=_ECDF_POINTS)
    return np.exp(low + step * np.arange(1, _ECDF_POINTS + 1)), np.cumsum(counts) / total


def plot_latency_ecdf(ax: Axes, values_s: FloatArray, *, name: str, color: str = OKABE_ITO["blue"]) -> None:
    """Draw the share of *values_s* at or below each latency on a logarithmic axis, with p50, p90 and p99 marked.

    NaN values are left out.
    """
    values_s = values_s[~np.isnan(values_s)]
    found = (ecdf(np.maximum(values_s, 1e-9)), np.quantile(values_s, _MARKED).tolist()) if values_s.size else None
    plot_steps(ax, found, name=name, color=color)


def plot_steps(
    ax: Axes,
    found: tuple[tuple[FloatArray, FloatArray], Sequence[float]] | None,
    *,
    name: str,
    color: str = OKABE_ITO["blue"],
) -> None:
    """The same of what `weighted_ecdf` has *found*, and p50, p90 and p99; None where there are no values."""
    ax.set_title(name, fontsize=10)
    ax.set_ylim(0, 1.04)
    share_axis(ax)
    dress(ax)
    if found is None:
        ax.set_xticks([])
        ax.text(0.5, 0.5, "no request has one", transform=ax.transAxes, ha="center", color=GREY)
        return
    (x, share), marks = found
    ax.set_xscale("log")
    ax.step(np.concatenate([x[:1], x]), np.concatenate([[0.0], share]), where="post", color=color, linewidth=1.6)
    if x[-1] < 1.5 * x[0]:
        ax.set_xlim(x[0] / 2, x[-1] * 2)
    for probability, mark_s in zip(_MARKED, marks, strict=True):
        at = max(float(mark_s), 1e-9)
        ax.plot([at], [probability], "o", color=OKABE_ITO["vermillion"], markersize=4, zorder=3)
    text = "\n".join(f"p{p * 100:g}{seconds_text(float(q)):>9}" for p, q in zip(_MARKED, marks, strict=True))
    box = {"facecolor": "white", "edgecolor": "#CCCCCC", "boxstyle": "round,pad=0.4", "alpha": 0.9}
    # The curve is low on the left and high on the right, so that one of two corners is always free.
    middle = float(np.sqrt(ax.get_xlim()[0] * ax.get_xlim()[1]))
    left = float(marks[0]) > middle
    ax.text(
        0.04 if left else 0.96,
        0.93 if left else 0.07,
        text,
        transform=ax.transAxes,
        ha="left" if left else "right",
        va="top" if left else "bottom",
        fontsize=8,
        family="monospace",
        bbox=box,
    )
    _label_seconds(ax)


def share_axis(ax: Axes) -> None:
    """Ticks of a vertical axis of shares, in percent."""
    from matplotlib.ticker import FixedLocator

    # Not `set_yticks`, which makes artists for the ticks at once.
    ax.yaxis.set_major_locator(FixedLocator([0, 0.25, 0.5, 0.75, 1]))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}".replace("%", " %"))


def _label_seconds(ax: Axes) -> None:
    """Label a logarithmic axis of seconds at every decade, or more finely where it spans few decades."""
    from matplotlib.ticker import LogLocator

    low, high = ax.get_xlim()
    decades = float(np.log10(high / low))
    subs = (1.0,) if decades > 1.9 else (1.0, 2.0, 5.0) if decades > 0.7 else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
    ax.xaxis.set_major_locator(LogLocator(subs=subs, numticks=12))
    ax.xaxis.set_major_formatter(lambda value, _: seconds_text(value))
    ax.xaxis.set_minor_formatter(lambda value, _: "")
