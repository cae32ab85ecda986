"""Pictures of batching: what prefill and decode cost a token, what chunking gains, and what it costs.

Every function draws data that it is given on an Axes; `sim.reproduce.sarathi` runs what they show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sim.plots.style import GREY, MARKERS, OKABE_ITO, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINES = (OKABE_ITO["blue"], OKABE_ITO["vermillion"], OKABE_ITO["green"], OKABE_ITO["purple"], OKABE_ITO["orange"])
Points = Sequence[tuple[float, float]]


def plain_numbers(axis: Any, values: Sequence[float]) -> None:
    """Ticks of a logarithmic axis at *values*, written out."""
    axis.set_ticks(list(values), labels=[f"{value:g}" for value in values])
    axis.set_ticks([], minor=True)


def plot_lines(ax: Axes, lines: Mapping[str, Points], *, log_x: bool = False, log_y: bool = False) -> None:
    """Draw named series of (x, y)."""
    for (name, points), colour, marker in zip(lines.items(), LINES, MARKERS, strict=False):
        xs, ys = zip(*points, strict=True)
        ax.plot(xs, ys, color=colour, marker=marker, markersize=3.5, linewidth=1.4, label=name)
    if log_x:
        ax.set_xscale("log")
    if log_y:
        ax.set_yscale("log")
    ax.legend(fontsize=8, frameon=False)


def plot_gain_over_pd(
    ax: Axes, lines: Mapping[int, Points], peaks: Mapping[int, float], *, uncut: Mapping[int, Points]
) -> None:
    """Throughput gain against the ratio of prompt to decodes, one line a chunk size, with theory's peaks marked.

    All have the chunk size as key; *uncut* is with prompts run whole where decodes are short.
    """
    for (chunk, points), colour, marker in zip(lines.items(), LINES, MARKERS, strict=False):
        xs, ys = zip(*sorted(points), strict=True)
        ax.plot(xs, ys, color=colour, marker=marker, markersize=3, linewidth=1.3, label=f"chunk {chunk}")
        ax.axvline(peaks[chunk], color=colour, linestyle="--", linewidth=1.0)
        ax.annotate(
            f"{peaks[chunk]:.1f}",
            (peaks[chunk], 1.0),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            xytext=(2, -8),
            fontsize=8,
            color=colour,
        )
    for chunk, points in uncut.items():
        xs, ys = zip(*sorted(points), strict=True)
        colour = LINES[list(lines).index(chunk)]
        ax.plot(
            xs, ys, color=colour, linestyle=":", linewidth=1.3, label=f"chunk {chunk}, whole when decodes are short"
        )
    ax.axhline(1.0, color=GREY, linewidth=0.8)
    ax.set_xscale("log")
    plain_numbers(ax.xaxis, (2, 5, 10, 20, 50, 100))
    # On a white ground, as dashed lines run behind it.
    ax.legend(
        fontsize=7.5,
        loc="lower left",
        framealpha=0.8,
        edgecolor="none",
        title="dashed: (C - B + 1) / (B - 1)",
        title_fontsize=7.5,
        alignment="left",
    )


def plot_tradeoff(ax: Axes, points: Mapping[str, tuple[float, float]]) -> None:
    """Named points (x, y) on axes from zero."""
    for (name, (x, y)), colour, marker in zip(points.items(), LINES, MARKERS, strict=False):
        ax.plot([x], [y], marker=marker, color=colour, markersize=8, linestyle="none")
        ax.annotate(name, (x, y), textcoords="offset points", xytext=(0, 7), fontsize=8, color=colour, ha="center")
    ax.set_xlim(0, 1.25 * max(x for x, _ in points.values()))
    ax.set_ylim(0, 1.2 * max(y for _, y in points.values()))


def plot_bars(ax: Axes, groups: Mapping[str, Mapping[str, float]]) -> None:
    """Grouped bars: group, then named bar; each bar carries its value."""
    names = list(next(iter(groups.values())))
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        xs = [at - 0.4 + width * (index + 0.5) for at in range(len(groups))]
        bars = ax.bar(xs, [group[name] for group in groups.values()], width * 0.92, color=LINES[index], label=name)
        ax.bar_label(bars, fmt="%.2f", fontsize=8, padding=1)
    ax.set_xticks(range(len(groups)), labels=list(groups))
    ax.margins(y=0.18)
    ax.legend(fontsize=8, frameon=False)


def figure_of(columns: int, title: str) -> tuple[Figure, list[Axes]]:
    """A figure with so many panels side by side."""
    figure = sheet(5.5 * columns, 4.2, title=title, layout=None)
    axes = figure.subplots(1, columns)
    figure.subplots_adjust(
        left=0.115 / columns + 0.012, right=0.985, bottom=0.13, top=0.85, wspace=0.26 if columns > 1 else 0
    )
    return figure, [axes] if columns == 1 else list(axes)
