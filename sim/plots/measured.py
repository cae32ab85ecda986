"""Measured runs beside their simulation, over the load: what was measured as open marks, what was simulated as filled ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sim.bench.replay import Replayed
from sim.plots.style import GREY, MARKERS, OKABE_ITO, dress, save, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANELS = (
    (("tpot_mean_s", "tpot_median_s"), "TPOT, {} (ms)", 1e3),
    (("ttft_median_s", "ttft_mean_s"), "TTFT, {} (ms)", 1e3),
    (("output_tokens_per_s", "requests_per_s"), "output tokens/s", 1.0),
)
_COLOURS = ("blue", "vermillion", "green", "purple", "orange", "sky")
_MOST = len(_COLOURS)
_WIDE = 4.0
"""Latencies farther apart than this are drawn on logarithms."""


def measured_figure(replays: Sequence[Replayed]) -> Figure:
    """Three panels, TPOT, TTFT and throughput over the load, a colour for each series of runs (`series_of`)."""
    series = series_of(replays)
    figure = sheet(12.6, 4.4)
    panels = figure.subplots(1, len(_PANELS))
    by_rate = all(each.run.offered.open for each in replays)
    by_clients = all(not each.run.offered.open and each.run.offered.concurrency for each in replays)
    for ax, (names, label, scale) in zip(panels, _PANELS, strict=True):
        shown = names[0] if any(names[0] in each.measured for each in replays) else names[1]
        for number, (name, runs) in enumerate(series.items()):
            colour = OKABE_ITO[_COLOURS[number % _MOST]]
            _draw(ax, runs, shown, scale, colour, MARKERS[number % len(MARKERS)], name, (by_rate, bool(by_clients)))
        x = "requests/s" if by_rate else "requests in flight" if by_clients else "run"
        dress(ax, x=x, y=label.format("mean" if "mean" in shown else "median") if "ttft" in shown or "tpot" in shown
              else "output tokens/s" if shown == names[0] else "requests/s")  # fmt: skip
        if by_clients:
            ax.set_xscale("log", base=2)
            ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        values = [
            found[shown] for each in replays for found in (each.measured, each.predicted) if found.get(shown, 0.0) > 0.0
        ]
        if scale != 1.0 and values and max(values) > _WIDE * min(values):
            ax.set_yscale("log")
            ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            ax.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if str(value)[0] in "25" else "")
            ax.tick_params(axis="y", which="minor", labelsize=7)
        else:
            ax.set_ylim(bottom=0)
    panels[0].legend(fontsize=7, frameon=False)
    figure.suptitle(
        "Open marks were measured, filled ones with a line are simulated; crosses lie beyond saturation",
        fontsize=10, x=0.01, ha="left",
    )  # fmt: skip
    return figure


def _draw(
    ax: Axes,
    runs: Sequence[Replayed],
    name: str,
    scale: float,
    colour: str,
    marker: str,
    label: str,
    by: tuple[bool, bool],
) -> None:
    points = sorted(
        (
            (_place(each, at, by), each)
            for at, each in enumerate(runs)
            if name in each.measured or name in each.predicted
        ),
        key=lambda point: point[0],
    )
    ours = [
        (x, each.predicted[name] * scale, each.spread.get(name, 0.0) * scale)
        for x, each in points
        if name in each.predicted
    ]
    theirs = [(x, each.measured[name] * scale, bool(each.run.saturated)) for x, each in points if name in each.measured]
    if ours:
        x, y, spread = zip(*ours, strict=True)
        ax.errorbar(
            x, y, yerr=spread, color=colour, linewidth=1.0, marker=marker, markersize=3.5, capsize=2, label=label
        )
    for beyond in (False, True):
        mine = [(x, y) for x, y, saturated in theirs if saturated is beyond]
        if mine:
            x, y = zip(*mine, strict=True)
            if beyond:
                ax.plot(x, y, linestyle="", marker="x", markersize=7, color=GREY if len(runs) == 1 else colour)
            else:
                ax.plot(x, y, linestyle="", marker=marker, markersize=8, markerfacecolor="none", markeredgecolor=colour)


def _place(each: Replayed, at: int, by: tuple[bool, bool]) -> float:
    offered = each.run.offered
    if by[0] and offered.rate_per_s is not None and math.isfinite(offered.rate_per_s):
        return float(offered.rate_per_s)
    if by[1] and offered.concurrency is not None:
        return float(offered.concurrency)
    return float(at + 1)


def series_of(replays: Sequence[Replayed]) -> dict[str, list[Replayed]]:
    """Runs that belong to one line: of one file, and alike in the words of their configuration and in their nominal lengths."""
    words = {
        key
        for each in replays
        for key, value in each.run.config.items()
        if isinstance(value, str) and key not in ("date", "timestamp")
    }
    varied = sorted(key for key in words if len({str(each.run.config.get(key, "")) for each in replays}) > 1)
    lengths = {_nominal(each) for each in replays}
    files = {each.run.file for each in replays}
    together = len(files) == len(replays)
    found: dict[str, list[Replayed]] = {}
    for each in replays:
        parts = [] if together or len(files) == 1 else [Path(each.run.file).stem]
        parts += [str(each.run.config.get(key, "")).rpartition("/")[2] for key in varied]
        parts += [f"{_nominal(each)} tokens"] if 1 < len(lengths) < len(replays) else []
        found.setdefault(" ".join(filter(None, parts)) or "simulated", []).append(each)
    return found if len(found) < len(replays) or len(replays) == 1 else {"simulated": list(replays)}


def _nominal(each: Replayed) -> str:
    prompt, output = (round(each.predicted.get(f"{side}_tokens_mean", 0)) for side in ("prompt", "output"))
    return f"{prompt}+{output}"


def draw_measured(replays: Sequence[Replayed], path: str | Path) -> Path:
    """`measured_figure` as PNG at *path*; its path."""
    return save(measured_figure(replays), Path(path), svg=False)[0]
