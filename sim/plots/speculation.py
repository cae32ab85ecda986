"""Pictures of speculative decoding: simulated points over closed forms. Each draws arrays on Axes that it is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sim.plots.style import GREY, MARKERS, OKABE_ITO, dress, sheet
from sim.study.speedup import Gap, Measured

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FloatArray = NDArray[np.floating[Any]]
_COLORS = tuple(OKABE_ITO[name] for name in ("blue", "vermillion", "green", "purple", "orange", "sky"))


def figure(
    width: float, height: float, *, title: str, rows: int = 1, columns: int = 1, **grid: Any
) -> tuple[Figure, Any]:
    """A figure with a title and its Axes (an array where there are several); *grid* goes to `Figure.subplots`."""
    made = sheet(width, height, title=title)
    return made, made.subplots(rows, columns, **grid)


def plot_speedup_against_k(
    ax: Axes,
    curves: Mapping[float, tuple[NDArray[np.int64], FloatArray]],
    points: Mapping[float, Sequence[tuple[int, Measured]]],
    *,
    c: float,
) -> None:
    """Closed-form speed-up by alpha as (K, speed-up) curves, and simulated points with their 99 % intervals over them."""
    for i, (alpha, (k, value)) in enumerate(curves.items()):
        color = _COLORS[i % len(_COLORS)]
        ax.plot(k, value, color=color, linewidth=1.2, zorder=1)
        at = np.array([k for k, _ in points[alpha]])
        mean = np.array([measured.mean for _, measured in points[alpha]])
        half = np.array([measured.half_width for _, measured in points[alpha]])
        ax.errorbar(
            at, mean, yerr=half, fmt=MARKERS[i % len(MARKERS)], color=color, markersize=4, capsize=3, linewidth=1,
            label=f"alpha {alpha:g}", zorder=2,
        )  # fmt: skip
    ax.axhline(1.0, color=GREY, linewidth=0.8, linestyle=":")
    ax.set_title(f"c = {c:g}", fontsize=10)
    dress(ax, x="drafted tokens K")


def plot_tokens_per_round(ax: Axes, rounds: NDArray[np.int64], pmf: FloatArray, *, alpha: float) -> None:
    """Bars of the simulated share of rounds by tokens put out, and the closed form's probabilities as dashes."""
    n = np.arange(1, len(rounds) + 1)
    share = rounds / rounds.sum()
    ax.bar(n, share, color=OKABE_ITO["sky"], width=0.75, label="event loop")
    ax.hlines(pmf, n - 0.42, n + 0.42, color=OKABE_ITO["vermillion"], linewidth=2, label="closed form")
    mean = float((n * share).sum())
    ax.set_title(f"alpha {alpha:g}: {mean:.2f} tokens a round", fontsize=10)
    ax.set_xticks(n)
    dress(ax, x="tokens put out by a round")


def plot_speedup_against_batch(
    ax: Axes, batch: FloatArray, curves: Mapping[str, FloatArray], points: Mapping[str, Sequence[tuple[int, float]]]
) -> None:
    """Closed-form speed-up against the running batch, simulated points over it, and where speculation starts to hurt."""
    for i, (name, value) in enumerate(curves.items()):
        color = _COLORS[i % len(_COLORS)]
        ax.plot(batch, value, color=color, linewidth=1.2)
        at, simulated = zip(*points[name], strict=True)
        ax.plot(at, simulated, MARKERS[i % len(MARKERS)], color=color, markersize=5, label=name)
    ax.set_xscale("log", base=2)
    ax.set_xlim(float(batch[0]), float(batch[-1]))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set_xlabel("sequences that decode together", fontsize=9)
    _hurts_below_one(ax)
    ax.legend(fontsize=8, frameon=False)


def plot_speedup_against_rate(
    ax: Axes, rate_per_s: FloatArray, measures: Mapping[str, tuple[FloatArray, NDArray[np.bool_]]]
) -> None:
    """Speed-up of latencies against the request rate, one line for each measure, hollow where it comes with what is saturated."""
    for i, (name, (value, saturated)) in enumerate(measures.items()):
        style = {"marker": MARKERS[i], "markersize": 5, "linewidth": 1.2, "color": _COLORS[i % len(_COLORS)]}
        ax.plot(rate_per_s, value, label=name, **style)
        ax.plot(rate_per_s[saturated], value[saturated], **{**style, "linestyle": "", "markerfacecolor": "white"})
    if any(saturated.any() for _, saturated in measures.values()):
        ax.plot(
            [],
            [],
            "o",
            color=GREY,
            markerfacecolor="white",
            markersize=5,
            label="saturated, so that it depends on the run's length",
        )
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set_xlabel("requests per second", fontsize=9)
    _hurts_below_one(ax)
    ax.legend(fontsize=8, frameon=False, loc="lower left")


def plot_crossover(
    ax: Axes,
    batch: FloatArray,
    alpha: FloatArray,
    speedup: FloatArray,
    points: Sequence[tuple[int, float, float]],
    *,
    k: int,
    limits: tuple[float, float],
) -> Any:
    """Speed-up over batch and alpha as a heat map, the line where it is 1, and simulated points in the same colours.

    *speedup* has shape [len(alpha), len(batch)]; *points* are (batch, alpha, simulated speed-up). Returns what a colour
    bar needs.
    """
    from matplotlib.colors import TwoSlopeNorm

    norm = TwoSlopeNorm(vcenter=1.0, vmin=limits[0], vmax=limits[1])
    shown = ax.pcolormesh(batch, alpha, speedup, cmap="RdBu", norm=norm, shading="gouraud", rasterized=True)
    if (speedup < 1.0).any() and (speedup > 1.0).any():
        ax.contour(batch, alpha, speedup, levels=[1.0], colors="black", linewidths=1.6)
    at, of, value = (np.array(column) for column in zip(*points, strict=True))
    ax.scatter(at, of, c=value, cmap="RdBu", norm=norm, edgecolors="black", linewidths=0.8, s=34, zorder=3)
    ax.set_xscale("log", base=2)
    ax.set_xlim(float(batch[0]) / 1.25, float(batch[-1]) * 1.25)
    ax.set_ylim(float(alpha[0]) - 0.02, min(1.0, float(alpha[-1]) + 0.02))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set_title(f"K = {k}", fontsize=10)
    ax.set_xlabel("sequences that decode together", fontsize=9)
    ax.tick_params(labelsize=8)
    return shown


def plot_gap(ax: Axes, gap: Gap) -> None:
    """The paper's speed-up, what each effect takes off it, and what is left, as a waterfall."""
    labels = [*gap.labels, "simulated"]
    first, last = gap.speedups[0], gap.speedups[-1]
    ax.bar([0, len(labels) - 1], [first, last], color=OKABE_ITO["blue"], width=0.65)
    for i, (before, after) in enumerate(zip(gap.speedups, gap.speedups[1:], strict=False), start=1):
        color = OKABE_ITO["vermillion"] if after < before else OKABE_ITO["green"]
        ax.bar(i, abs(before - after), bottom=min(before, after), color=color, width=0.65)
        ax.plot([i - 1 + 0.325, i - 0.325], [before, before], color=GREY, linewidth=0.8)
        said = f"{round(after - before, 2) + 0.0:+.2f}"
        ax.text(i, max(before, after) + 0.015 * first, said, ha="center", va="bottom", fontsize=9)
    ax.plot([len(labels) - 2 + 0.325, len(labels) - 1.325], [last, last], color=GREY, linewidth=0.8)
    for at, value in ((0, first), (len(labels) - 1, last)):
        ax.text(at, value + 0.015 * first, f"{value:.2f}", ha="center", va="bottom", fontsize=10, weight="bold")
    ax.axhline(1.0, color=GREY, linewidth=0.8, linestyle=":")
    ax.set_xticks(range(len(labels)), [_wrapped(label) for label in labels], fontsize=9)
    ax.set_ylim(0, 1.12 * max(gap.speedups))
    ax.set_ylabel("speed-up over plain decoding", fontsize=9)
    ax.spines[["top", "right"]].set_visible(False)


def _wrapped(label: str) -> str:
    words, lines = label.split(), [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + len(word) > 11:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


def _hurts_below_one(ax: Axes) -> None:
    low, high = ax.get_ylim()
    low = min(low, 0.9)
    ax.set_ylim(low, high)
    ax.axhspan(low, 1.0, color="#F3D9CC", zorder=0, linewidth=0)
    ax.text(0.02, 1.0, " speculation hurts below", transform=ax.get_yaxis_transform(), fontsize=8, va="top", color=GREY)
    dress(ax)
