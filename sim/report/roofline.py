"""Plots of the hardware models: a roofline with operations on it, measured against predicted, errors by size.

Figures are made without pyplot, and matplotlib is imported where one is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hwmodels.roofline import roof_flops_per_s
from hwmodels.totals import Totals
from sim.report.plots import OKABE_ITO

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from hwmodels.cost import CostModel
    from sim.validate import Comparison

_MARKERS = {"prefill": "o", "chunk": "D", "decode": "s", "verify": "^"}
_COLORS = {
    "prefill": OKABE_ITO["blue"],
    "chunk": OKABE_ITO["green"],
    "decode": OKABE_ITO["vermillion"],
    "verify": OKABE_ITO["purple"],
}
_MOST_POINTS = 4000
_DPI = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """An iteration placed on a roofline: its arithmetic intensity and the rate it is priced at."""

    kind: str
    label: str
    flops_per_byte: float
    flops_per_s: float


def operations(
    cost: CostModel,
    *,
    prompt_tokens: int = 2048,
    chunk_tokens: int = 512,
    context_tokens: int = 2048,
    batches: Sequence[int] = (1, 8, 32, 128),
    drafts: Sequence[int] = (4,),
) -> list[Operation]:
    """A prefill, a chunk behind a context, decodes at several *batches*, and verifies of K *drafts* at a batch of 8."""
    window = cost.window_tokens

    def within(tokens: int) -> int:
        return min(tokens, window) if window else 0

    def prompt(tokens: int, past: int) -> Totals:
        pairs = tokens * past + tokens * (tokens + 1) // 2
        capped = min(pairs, tokens * window) if window else 0
        return Totals(tokens, tokens, 1, pairs, past + tokens, 0, 0, 1, capped, 0)

    def decode(n: int, queries: int) -> Totals:
        rows = n * queries
        return Totals(
            rows, 0, 0, 0, 0, n, n * (context_tokens + queries), rows, 0, n * within(context_tokens + queries)
        )

    asked = [
        ("prefill", f"prefill {prompt_tokens}", prompt(prompt_tokens, 0)),
        ("chunk", f"chunk {chunk_tokens} at {context_tokens}", prompt(chunk_tokens, context_tokens)),
        *(("decode", f"decode x{n}", decode(n, 1)) for n in batches),
        *(("verify", f"verify K={k} x8", decode(8, k + 1)) for k in drafts),
    ]
    found = []
    for kind, label, totals in asked:
        seconds = sum(cost.iteration_s(totals, stage) for stage in range(cost.n_stages))
        work = cost.work(totals)
        flops, hbm_bytes = float(work.flops), float(work.hbm_bytes)
        # All stages' GPUs together, as the peaks are: one micro-batch keeps one stage busy at a time.
        rate = flops / seconds * cost.n_stages
        found.append(Operation(kind=kind, label=label, flops_per_byte=flops / hbm_bytes, flops_per_s=rate))
    return found


def plot_roofline(ax: Axes, cost: CostModel, placed: Iterable[Operation], *, title: str) -> None:
    """Draw the roof of *cost*'s GPUs and the operations *placed* under it, on logarithmic axes."""
    placed = list(placed)
    peak, stream = cost.peak_flops_per_s, cost.peak_bytes_per_s
    ridge = peak / stream
    low = min([op.flops_per_byte for op in placed] + [ridge / 100]) / 2
    high = max([op.flops_per_byte for op in placed] + [ridge * 3]) * 2
    x = np.array([low, ridge, high])
    ax.plot(x, roof_flops_per_s(x, peak, stream) / 1e12, color=OKABE_ITO["black"], linewidth=1.6)
    ax.axvline(ridge, color="#BBBBBB", linewidth=0.8, linestyle=":")
    ax.set_xscale("log")
    ax.set_yscale("log")
    lowest = min([op.flops_per_s for op in placed] + [peak]) / 1e12
    ax.set_ylim(lowest / 3, peak / 1e12 * 3)
    ax.set_xlim(low, high)
    ax.text(high / 1.1, peak / 1e12 * 1.12, f"peak {peak / 1e12:,.0f} TFLOP/s", ha="right", fontsize=8)
    ax.text(low * 1.3, low * 1.3 * stream / 1e12 * 2.2, f"{stream / 1e12:.2f} TB/s", fontsize=8)
    seen: set[str] = set()
    for op in placed:
        ax.plot(
            [op.flops_per_byte], [op.flops_per_s / 1e12], _MARKERS[op.kind], color=_COLORS[op.kind], markersize=6,
            label=op.kind if op.kind not in seen else None,
        )  # fmt: skip
        seen.add(op.kind)
        roof = roof_flops_per_s(op.flops_per_byte, peak, stream)
        # Prefill lies at the right edge under the flat roof, a chunk just left of it.
        offset, side = {"prefill": ((-8, -3), "right"), "chunk": ((0, -17), "center")}.get(op.kind, ((7, -11), "left"))
        ax.annotate(
            f"{op.label}, {100 * op.flops_per_s / roof:.0f} %",
            (op.flops_per_byte, op.flops_per_s / 1e12),
            xytext=offset,
            textcoords="offset points",
            ha=side,
            fontsize=7,
        )
    ax.set_xlabel("arithmetic intensity, FLOP per byte of memory traffic")
    ax.set_ylabel("TFLOP/s")
    ax.set_title(title, fontsize=10)
    ax.legend(loc="lower right", fontsize=8, frameon=False)
    ax.grid(True, which="major", color="#EEEEEE", linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)


def draw_roofline(cost: CostModel, path: str | Path, *, title: str, placed: Sequence[Operation] | None = None) -> Path:
    """The roofline of *cost* as a PNG; *placed* defaults to `operations(cost)`. Percentages are shares of the roof."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.2), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    plot_roofline(figure.subplots(), cost, operations(cost) if placed is None else placed, title=title)
    figure.savefig(path)
    return Path(path)


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
    ax.set_xlabel("measured, ms")
    ax.set_ylabel("predicted, ms")
    ax.set_title(title, fontsize=9)
    ax.spines[["top", "right"]].set_visible(False)


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
    ax.set_xlabel("measured, ms")
    ax.set_ylabel("error, %")
    ax.legend(fontsize=8, frameon=False)
    ax.grid(True, axis="y", color="#EEEEEE", linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)


def draw_validation(comparisons: Iterable[Comparison], folder: str | Path) -> list[Path]:
    """One PNG a file and quantity in seconds: measured against predicted beside the error by size; their paths."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for one in comparisons:
        known = np.isfinite(one.predicted) & np.isfinite(one.measured) & (one.measured > 0) & (one.predicted > 0)
        if not known.any() or one.quantity in ("prompt_throughput", "generation_throughput", "running"):
            continue
        measured, predicted = one.measured[known], one.predicted[known]
        figure = Figure(figsize=(10, 4.2), dpi=_DPI, layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        line: Any = one.line
        title = f"{one.file.removesuffix('.csv')}, {one.quantity}: median {line.median_pct:.1f} %"
        plot_measured_against_predicted(left, measured, predicted, title=title)
        plot_error_by_size(right, measured, predicted)
        right.set_title(f"{known.sum():,} rows, bias {line.bias_pct:+.1f} %", fontsize=9)
        paths.append(folder / f"{one.file.removesuffix('.csv')}.{one.quantity}.png")
        figure.savefig(paths[-1])
    return paths


def _thinned(*columns: np.ndarray) -> list[np.ndarray]:
    step = -(-len(columns[0]) // _MOST_POINTS)
    return [column[::step] for column in columns]
