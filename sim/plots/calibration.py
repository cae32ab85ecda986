"""Pictures of a calibrated profile: roofline with measured points, fitted against measured, live runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hwmodels.calibrate.samples import Sample
from hwmodels.profiles import Profile
from hwmodels.roofline import roof_flops_per_s
from sim.plots.style import OKABE_ITO, dress, save, sheet
from sim.validation.live import LiveResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = tuple(colour for name, colour in OKABE_ITO.items() if name not in ("black", "yellow"))


def draw_roofline(profile: Profile, samples: Sequence[Sample], path: Path) -> None:
    """The roof of a profile's device, and what was timed under it."""
    peaks = profile.datasheet
    figure = sheet(7.0, 4.6)
    ax = figure.subplots()
    points: dict[str, list[tuple[float, float]]] = {}
    for sample in samples:
        op = sample.operation
        if op.flops and op.traffic_bytes:
            points.setdefault(f"{op.kind} {op.dtype}", []).append(
                (op.flops / op.traffic_bytes, op.flops / sample.median_s)
            )
    everything = np.array([p for group in points.values() for p in group])
    low, high = everything[:, 0].min() / 2.0, everything[:, 0].max() * 2.0
    x = np.geomspace(low, high, 200)
    for dtype, peak in peaks.peak_flops_per_s.items():
        if any(name.endswith(f" {dtype}") for name in points):
            y = roof_flops_per_s(x, peak, peaks.hbm_bytes_per_s)
            ax.plot(x, y / 1e9, color="black", linewidth=1.2)
            ax.annotate(f"{dtype}: {peak / 1e9:,.0f} GFLOP/s", (x[-1], peak / 1e9), xytext=(0, 4),
                        textcoords="offset points", ha="right", fontsize=8)  # fmt: skip
    for index, (name, group) in enumerate(sorted(points.items())):
        _dots(ax, [flops for flops, _ in group], [rate / 1e9 for _, rate in group], index, name)
    ax.text(0.02, 0.97, f"{peaks.hbm_bytes_per_s / 1e9:,.1f} GB/s", transform=ax.transAxes, va="top", fontsize=8)
    ax.set(xscale="log", yscale="log")
    ax.legend(loc="lower right", fontsize=8)
    dress(ax, x="FLOPs per byte", y="GFLOP/s", title=f"{title_of(profile)}: roofline")
    save(figure, path, svg=False)


def draw_fit(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Fitted seconds against measured, and the error by size; a colour for each family of kernels."""
    figure = sheet(9.0, 4.4)
    left, right = figure.subplots(1, 2)
    for index, family in enumerate(sorted({row["family"] for row in rows})):
        mine = [row for row in rows if row["family"] == family]
        measured = np.array([row["measured_s"] for row in mine])
        predicted = np.array([row["predicted_s"] for row in mine])
        _dots(left, measured * 1e3, predicted * 1e3, index, family)
        _dots(right, measured * 1e3, 100.0 * (predicted / measured - 1.0), index, family)
    _diagonal(left, [row["measured_s"] for row in rows])
    left.set(xscale="log", yscale="log")
    left.legend(fontsize=8)
    right.axhline(0.0, color="black", linewidth=1)
    right.set(xscale="log")
    dress(left, x="measured, ms", y="fitted, ms", title="Fitted against measured")
    dress(right, x="measured, ms", y="error, %", title="Error by size")
    save(figure, path, svg=False)


def draw_live(result: LiveResult, path: Path) -> Path:
    """Step times simulated against measured, and the speed-up over K three ways."""
    figure = sheet(9.0, 4.4)
    left, right = figure.subplots(1, 2)
    for index, name in enumerate(sorted({step.name for step in result.steps})):
        mine = [step for step in result.steps if step.name == name]
        _dots(left, [s.measured_s * 1e3 for s in mine], [s.simulated_s * 1e3 for s in mine], index, name)
    _diagonal(left, [s.measured_s for s in result.steps])
    left.set(xscale="log", yscale="log")
    left.legend(fontsize=8)
    ks = [s.k for s in result.speedups]
    right.plot(ks, [s.measured for s in result.speedups], "o-", color="black", label="measured")
    right.plot(ks, [s.simulated for s in result.speedups], "s-", color=_COLOURS[0], label="simulated")
    right.plot(ks, [s.closed_form for s in result.speedups], "^--", color=_COLOURS[1], label="closed form")
    right.set(ylim=(0, None))
    right.legend(fontsize=8)
    dress(left, x="measured, ms", y="simulated, ms", title="Steps")
    dress(right, x="drafted tokens K", y="speed-up", title="Speculative decoding")
    save(figure, path, svg=False)
    return path


def title_of(profile: Profile) -> str:
    """The device that was calibrated, and with which library and threads."""
    own = profile.calibration
    if own is None:
        return profile.name
    threads = f", {own.cores} thread{'s' if own.cores > 1 else ''}" if own.clock != "device" else ""
    return f"{own.title} with {own.backend}{threads}"


def _dots(ax: Axes, x: Any, y: Any, index: int, name: str) -> None:
    ax.scatter(x, y, s=11, alpha=0.6, color=_COLOURS[index % len(_COLOURS)], label=name, linewidths=0)


def _diagonal(ax: Axes, measured_s: Sequence[float]) -> None:
    ends = np.array([min(measured_s), max(measured_s)]) * 1e3
    ax.plot(ends, ends, color="black", linewidth=1)
