"""Plots of a run. Each draws on an Axes that it is given, from arrays; figures are put together at the end.

matplotlib is imported where a figure is made, never when this module is, and without pyplot: no global state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sim.metrics import kv_holdings
from sim.text import seconds_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FloatArray = NDArray[np.float64]

# Okabe and Ito, "Color Universal Design" (2008): eight colours told apart with any colour vision.
OKABE_ITO: Mapping[str, str] = {
    "blue": "#0072B2",
    "vermillion": "#D55E00",
    "green": "#009E73",
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "purple": "#CC79A7",
    "black": "#000000",
    "yellow": "#F0E442",
}
_GREY = "#5A5A5A"
_MARKED = (0.5, 0.9, 0.99)
_ECDF_POINTS = 2000
_TIMELINE_BINS = 300
_DPI = 120


def ecdf(values: NDArray[Any], weights: NDArray[Any] | None = None) -> tuple[FloatArray, FloatArray]:
    """Where the empirical distribution of positive *values* steps, and the share at or below each: two arrays.

    Beyond 2,000 values the steps are gathered on a logarithmic grid of 2,000 points, finer than a line is wide.
    """
    weights = np.ones(values.size) if weights is None else weights
    if values.size <= _ECDF_POINTS:
        order = np.argsort(values, kind="stable")
        return values[order].astype(np.float64), np.cumsum(weights[order]) / weights.sum()
    logs = np.log(values)
    low, high = float(logs.min()), float(logs.max())
    step = (high - low) / _ECDF_POINTS or 1.0
    bins = np.minimum(((logs - low) / step).astype(np.int64), _ECDF_POINTS - 1)
    share = np.cumsum(np.bincount(bins, weights=weights, minlength=_ECDF_POINTS)) / weights.sum()
    return np.exp(low + step * np.arange(1, _ECDF_POINTS + 1)), share


def plot_latency_ecdf(
    ax: Axes,
    values_s: FloatArray,
    *,
    name: str,
    weights: NDArray[Any] | None = None,
    quantiles_s: Sequence[float] | None = None,
    color: str = OKABE_ITO["blue"],
) -> None:
    """Draw the share of *values_s* at or below each latency on a logarithmic axis, with p50, p90 and p99 marked.

    NaN values are left out. *quantiles_s* are the three marks where they are known exactly; otherwise they are
    taken from the values.
    """
    ax.set_title(name, fontsize=10)
    ax.set_ylim(0, 1.04)
    ax.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    ax.grid(True, which="major", color="#DDDDDD", linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)
    if weights is None:
        values_s = values_s[~np.isnan(values_s)]
    if not values_s.size:
        ax.set_xticks([])
        ax.text(0.5, 0.5, "no request has one", transform=ax.transAxes, ha="center", color=_GREY)
        return
    positive = np.maximum(values_s, 1e-9)
    x, share = ecdf(positive, weights)
    ax.set_xscale("log")
    ax.step(np.concatenate([x[:1], x]), np.concatenate([[0.0], share]), where="post", color=color, linewidth=1.6)
    if x[-1] < 1.5 * x[0]:
        ax.set_xlim(x[0] / 2, x[-1] * 2)
    marks = np.quantile(values_s, _MARKED) if quantiles_s is None else quantiles_s
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


def _label_seconds(ax: Axes) -> None:
    """Label a logarithmic axis of seconds at every decade, or more finely where it spans few decades."""
    from matplotlib.ticker import LogLocator

    low, high = ax.get_xlim()
    decades = float(np.log10(high / low))
    subs = (1.0,) if decades > 1.9 else (1.0, 2.0, 5.0) if decades > 0.7 else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
    ax.xaxis.set_major_locator(LogLocator(subs=subs, numticks=12))
    ax.xaxis.set_major_formatter(lambda value, _: seconds_text(value))
    ax.xaxis.set_minor_formatter(lambda value, _: "")
    ax.tick_params(labelsize=8)


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


def plot_level(
    ax: Axes, edges_s: FloatArray, levels: Mapping[str, FloatArray], *, label: str, fill: bool = False
) -> None:
    """Draw step lines, one for each named level, over intervals between *edges_s*."""
    colors = (OKABE_ITO["blue"], OKABE_ITO["vermillion"], OKABE_ITO["green"], OKABE_ITO["orange"])
    for color, (name, level) in zip(colors, levels.items(), strict=False):
        ax.stairs(level, edges_s, color=color, linewidth=1.2, label=name, baseline=None)
        if fill:
            ax.stairs(level, edges_s, color=color, alpha=0.2, fill=True)
    ax.set_ylabel(label, fontsize=9)
    top = max((float(level.max(initial=0.0)) for level in levels.values()), default=0.0)
    ax.set_ylim(0, (1.3 if len(levels) > 1 else 1.08) * top or 1.0)  # head room for the legend
    ax.set_axisbelow(True)
    ax.grid(True, color="#DDDDDD", linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=8)
    if len(levels) > 1:
        ax.legend(fontsize=8, frameon=False, loc="upper right", ncols=len(levels))


def latency_figure(
    *,
    ttft_s: FloatArray,
    e2el_s: FloatArray,
    itl_ns: tuple[NDArray[Any], NDArray[Any]],
    itl_quantiles_s: Sequence[float] | None,
    title: str,
) -> Figure:
    """Distributions of TTFT, ITL and end-to-end latency side by side; latencies with NaN where there is none."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.1), dpi=_DPI)
    figure.subplots_adjust(left=0.07, right=0.985, bottom=0.14, top=0.79, wspace=0.09)
    figure.suptitle(title, fontsize=11)
    ttft, itl, e2e = figure.subplots(1, 3, sharey=True)
    plot_latency_ecdf(ttft, ttft_s, name="Time to first token (TTFT)")
    gaps_ns, weights = itl_ns
    plot_latency_ecdf(
        itl, gaps_ns * 1e-9, weights=weights, quantiles_s=itl_quantiles_s, name="Gap between tokens (ITL)"
    )
    plot_latency_ecdf(e2e, e2el_s, name="End to end (E2EL)")
    ttft.set_ylabel("share at or below", fontsize=9)
    for ax in (ttft, itl, e2e):
        ax.set_xlabel("latency, log scale", fontsize=9)
    return figure


def timeline_figure(
    *,
    requests: Mapping[str, NDArray[Any]],
    iterations: Callable[[], Iterable[Mapping[str, NDArray[Any]]]],
    last_end_ns: int,
    kv_blocks_total: Sequence[int],
    title: str,
) -> Figure:
    """Requests waiting and running, KV memory in use and tokens a second over time, one above the other.

    *iterations* gives them in blocks, in order of start within a replica, as often as it is called; *last_end_ns* is the
    end of the last, -1 without any.
    """
    from matplotlib.figure import Figure

    arrival_ns = requests["arrival_ns"]
    begin = int(arrival_ns.min())
    end = max(int(requests["finish_ns"].max()), int(arrival_ns.max()), last_end_ns)
    edges_ns = np.linspace(begin, max(end, begin + 1), _TIMELINE_BINS + 1)
    edges_s = (edges_ns - begin) * 1e-9

    never = np.iinfo(np.int64).max // 4
    scheduled = np.where(requests["scheduled_ns"] >= 0, requests["scheduled_ns"], never)
    finish = np.where(requests["finish_ns"] >= 0, requests["finish_ns"], never)
    accepted = requests["status"] != 1
    waiting = mean_level(edges_ns, arrival_ns[accepted], scheduled[accepted])
    running = mean_level(edges_ns, scheduled[accepted], finish[accepted])

    kv_share = np.zeros(_TIMELINE_BINS)
    prompt_rate, output_rate = np.zeros(_TIMELINE_BINS), np.zeros(_TIMELINE_BINS)
    total_blocks = float(sum(kv_blocks_total)) or 1.0
    for block in iterations():
        lane_of = block["replica"].astype(np.int64) << 32 | block["lane"]
        for lane in np.unique(lane_of):
            mine = np.flatnonzero(lane_of == lane)
            mine = slice(None) if mine.size == lane_of.size else mine
            start, duration = block["start_ns"][mine], block["duration_ns"][mine]
            prompt_rate += rate_per_s(edges_ns, start, duration, block["prefill_tokens"][mine])
            output_rate += rate_per_s(edges_ns, start, duration, block["emitted_tokens"][mine])
    for _, start, held_ns, used in kv_holdings(iterations()):
        kv_share += rate_per_s(edges_ns, start, held_ns, used * (held_ns * 1e-9)) / total_blocks

    figure = Figure(figsize=(11, 8.4), dpi=_DPI)
    figure.subplots_adjust(left=0.085, right=0.985, bottom=0.06, top=0.92, hspace=0.12)
    figure.suptitle(title, fontsize=11)
    queue_ax, running_ax, kv_ax, prompt_ax, output_ax = figure.subplots(5, 1, sharex=True)
    plot_level(queue_ax, edges_s, {"waiting": waiting}, label="requests waiting", fill=True)
    plot_level(running_ax, edges_s, {"running": running}, label="requests running", fill=True)
    plot_level(kv_ax, edges_s, {"KV": kv_share * 100}, label="KV blocks used, %", fill=True)
    plot_level(prompt_ax, edges_s, {"prompt": prompt_rate}, label="prompt tokens/s", fill=True)
    plot_level(output_ax, edges_s, {"output": output_rate}, label="output tokens/s", fill=True)
    for ax in (prompt_ax, output_ax):
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    width = seconds_text(float(edges_s[1] - edges_s[0]))
    output_ax.set_xlabel(f"time since the first arrival, s (means over intervals of {width})", fontsize=9)
    output_ax.set_xlim(0, float(edges_s[-1]))
    figure.align_ylabels()
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write *figure* as PNG, without a date, so that equal figures are equal files."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    # Straight to the renderer: Figure.savefig draws everything once more beforehand, to measure it.
    FigureCanvasAgg(figure).print_png(path, metadata={"Software": "rooftrace"}, pil_kwargs={"compress_level": 3})
