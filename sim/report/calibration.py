"""The page about a calibrated profile, with its pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hwmodels.calibrate.fitting import residuals
from hwmodels.calibrate.samples import Sample
from hwmodels.profiles import Profile
from sim.plots.calibration import draw_fit, draw_roofline, title_of
from workloads.write import write_whole


def write_report(folder: str | Path, profile: Profile, samples: Sequence[Sample]) -> list[Path]:
    """Draw `roofline.png` and `fit.png` and write `report.md` into *folder*; their paths."""
    folder = Path(folder)
    rows = residuals(folder, profile)
    paths = [folder / "roofline.png", folder / "fit.png", folder / "report.md"]
    draw_roofline(profile, samples, paths[0])
    draw_fit(rows, paths[1])
    write_whole(paths[2], _page(folder, profile, samples, rows))
    return paths


def scenario_line(path: Path) -> str:
    """The ways to use a profile: the line for a scenario file and the option that does the same."""
    return f"hardware: {path}   (in a scenario, or: rooftrace run --set hardware={path})"


def _page(folder: Path, profile: Profile, samples: Sequence[Sample], rows: Sequence[dict[str, Any]]) -> str:
    own, sheet = profile.calibration, profile.datasheet
    assert own is not None
    peaks = ", ".join(f"{name} {value / 1e9:,.1f} GFLOP/s" for name, value in sheet.peak_flops_per_s.items())
    lines = [
        f"# {title_of(profile)}",
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
