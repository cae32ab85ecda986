"""Pictures and a page about a calibrated profile: roofline with measured points, fitted against measured, live runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hwmodels.profiles import Profile

if TYPE_CHECKING:
    from hwmodels.calibrate.samples import Sample
    from sim.validation.live import LiveResult

_COLOURS = {"gemm": "#2563a8", "attention": "#c2571a", "memory": "#3a7d44", "other": "#6b6b6b"}


def write_report(folder: str | Path, profile: Profile, samples: Sequence[Sample]) -> list[Path]:
    """Draw `roofline.png` and `fit.png` and write `report.md` into *folder*; their paths."""
    from hwmodels.calibrate.fitting import residuals

    folder = Path(folder)
    rows = residuals(folder, profile)
    paths = [folder / "roofline.png", folder / "fit.png", folder / "report.md"]
    _draw_roofline(profile, samples, paths[0])
    _draw_fit(rows, paths[1])
    paths[2].write_text(_page(folder, profile, samples, rows), encoding="utf-8")
    return paths


def _draw_roofline(profile: Profile, samples: Sequence[Sample], path: Path) -> None:
    from matplotlib.figure import Figure

    sheet = profile.datasheet
    figure = Figure(figsize=(7.0, 4.6), layout="constrained")
    axes = figure.subplots()
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
    for dtype, peak in sheet.peak_flops_per_s.items():
        if any(name.endswith(f" {dtype}") for name in points):
            y = np.minimum(peak, x * sheet.hbm_bytes_per_s)
            axes.plot(x, y / 1e9, color="black", lw=1.2)
            axes.annotate(f"{dtype}: {peak / 1e9:,.0f} GFLOP/s", (x[-1], peak / 1e9), xytext=(0, 4),
                          textcoords="offset points", ha="right", fontsize=8)  # fmt: skip
    for index, (name, group) in enumerate(sorted(points.items())):
        at = np.array(group)
        colour = _COLOURS.get(name.split()[0], f"C{index}") if len(points) <= 3 else f"C{index}"
        axes.scatter(at[:, 0], at[:, 1] / 1e9, s=12, alpha=0.6, label=name, color=colour, linewidths=0)
    axes.text(
        0.02, 0.97, f"{sheet.hbm_bytes_per_s / 1e9:,.1f} GB/s", transform=axes.transAxes, va="top", fontsize=8
    )  # fmt: skip
    axes.set(
        xscale="log", yscale="log", xlabel="FLOPs per byte", ylabel="GFLOP/s", title=f"{_title(profile)}: roofline"
    )
    axes.legend(loc="lower right", fontsize=8)
    axes.grid(alpha=0.25)
    figure.savefig(path, dpi=130)


def _draw_fit(rows: Sequence[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    families = sorted({row["family"] for row in rows})
    for index, family in enumerate(families):
        mine = [row for row in rows if row["family"] == family]
        measured = np.array([row["measured_s"] for row in mine])
        predicted = np.array([row["predicted_s"] for row in mine])
        left.scatter(measured * 1e3, predicted * 1e3, s=9, alpha=0.6, color=f"C{index}", label=family, linewidths=0)
        right.scatter(
            measured * 1e3, 100.0 * (predicted / measured - 1.0), s=9, alpha=0.6, color=f"C{index}", linewidths=0
        )
    ends = np.array([min(r["measured_s"] for r in rows), max(r["measured_s"] for r in rows)]) * 1e3
    left.plot(ends, ends, color="black", lw=1)
    left.set(xscale="log", yscale="log", xlabel="measured, ms", ylabel="fitted, ms", title="Fitted against measured")
    left.legend(fontsize=8)
    right.axhline(0.0, color="black", lw=1)
    right.set(xscale="log", xlabel="measured, ms", ylabel="error, %", title="Error by size")
    for axes in (left, right):
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=130)


def _title(profile: Profile) -> str:
    own = profile.calibration
    if own is None:
        return profile.name
    threads = f", {own.cores} thread{'s' if own.cores > 1 else ''}" if own.clock != "device" else ""
    return f"{own.title} with {own.backend}{threads}"


def scenario_line(path: Path) -> str:
    """How to use a profile: the line for a scenario file and the option that does the same."""
    return f"hardware: {path}   (in a scenario, or: rooftrace run --set hardware={path})"


def _page(folder: Path, profile: Profile, samples: Sequence[Sample], rows: Sequence[dict[str, Any]]) -> str:
    own, sheet = profile.calibration, profile.datasheet
    assert own is not None
    peaks = ", ".join(f"{name} {value / 1e9:,.1f} GFLOP/s" for name, value in sheet.peak_flops_per_s.items())
    lines = [
        f"# {_title(profile)}",
        "",
        f"Taken {own.taken_on}: {own.operations} operations, {own.clock} clock, {own.libraries}"
        + (f", driver {own.driver}" if own.driver else "")
        + (f", {own.clocks}" if own.clocks else "")
        + ".",
        f"Repeats of one operation scatter by {own.median_spread_pct:.1f} % (interquartile range over median, median "
        f"over operations); {own.outliers} repeats took more than half again their median and are kept in samples.jsonl.",
        "",
        f"Peaks: {peaks}; memory {sheet.hbm_bytes_per_s / 1e9:,.1f} GB/s.",
        "",
        "| kernel | points | error of the fit, median % | held-back shapes, median % | p90 % |",
        "|---|---:|---:|---:|---:|",
    ]
    for kernel in profile.kernels:
        p = kernel.provenance
        lines.append(
            f"| {kernel.family} {kernel.variant} | {p.points} | {p.fit_median_pct:.1f} | {p.held_median_pct:.1f} | "
            f"{p.held_p90_pct:.1f} |"
        )
    spread = {s.operation.key: s.spread for s in samples}
    noisiest = sorted(spread, key=lambda key: -spread[key])[:5]
    worst = sorted(rows, key=lambda row: -abs(np.log(row["predicted_s"] / row["measured_s"])))[:10]
    lines += [
        "",
        "## Worst shapes",
        "",
        "| kernel | shape | measured, us | fitted, us | error % |",
        "|---|---|---:|---:|---:|",
    ]
    lines += [
        f"| {row['family']} | {row['shape']} | {row['measured_s'] * 1e6:,.1f} | {row['predicted_s'] * 1e6:,.1f} | "
        f"{100 * (row['predicted_s'] / row['measured_s'] - 1):+.0f} |"
        for row in worst
    ]
    lines += ["", "## Noisiest operations", ""]
    lines += [f"- {key}: {100 * spread[key]:.0f} %" for key in noisiest]
    lines += [
        "",
        "## Use",
        "",
        f"`{scenario_line(folder / 'profile.toml')}`",
        "",
        f"Check it against its own samples: `rooftrace validate --measured {folder / 'measured'} "
        f"--hardware {folder / 'profile.toml'}`",
        "",
        "![roofline](roofline.png)",
        "",
        "![fit](fit.png)",
        "",
    ]
    return "\n".join(lines)


def draw_live(result: LiveResult, path: str | Path) -> Path:
    """Step times simulated against measured, and the speed-up over K three ways."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for index, name in enumerate(sorted({step.name for step in result.steps})):
        mine = [step for step in result.steps if step.name == name]
        left.scatter([s.measured_s * 1e3 for s in mine], [s.simulated_s * 1e3 for s in mine], s=22,
                     color=f"C{index}", label=name)  # fmt: skip
    ends = [min(s.measured_s for s in result.steps) * 1e3, max(s.measured_s for s in result.steps) * 1e3]
    left.plot(ends, ends, color="black", lw=1)
    left.set(xscale="log", yscale="log", xlabel="measured, ms", ylabel="simulated, ms", title="Steps")
    left.legend(fontsize=8)
    ks = [s.k for s in result.speedups]
    right.plot(ks, [s.measured for s in result.speedups], "o-", color="black", label="measured")
    right.plot(ks, [s.simulated for s in result.speedups], "s-", color="C0", label="simulated")
    right.plot(ks, [s.closed_form for s in result.speedups], "^--", color="C1", label="closed form")
    right.set(xlabel="drafted tokens K", ylabel="speed-up", title="Speculative decoding", ylim=(0, None))
    right.legend(fontsize=8)
    for axes in (left, right):
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=130)
    return Path(path)
