"""rooftrace validate --live: tables of a live run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from sim.cli.tables import print_json, print_table
from sim.errors import RooftraceError
from sim.plots.calibration import draw_live
from sim.validation.live import MEANINGLESS, LiveSettings, run_live
from workloads.write import write_whole


def live_settings(
    hardware: str | None,
    *,
    backend: str,
    device: str,
    scale: float | None,
    target: str | None,
    draft: str | None,
    alpha: float,
) -> LiveSettings:
    """The settings of a live run as options give them; RooftraceError for what cannot be run or compared with."""
    if backend != "torch":
        raise RooftraceError(f"--live runs its models with torch; got --backend {backend}")
    if hardware is None or not hardware.endswith(".toml"):
        raise RooftraceError(
            "--live compares with a profile of this machine: take one with `rooftrace calibrate --backend torch --quick "
            "--out DIR`, then give --hardware DIR/profile.toml"
        )
    if not 0.0 <= alpha <= 1.0:
        raise RooftraceError(f"alpha is a probability in [0, 1]; got {alpha:g}")
    return LiveSettings(
        profile=Path(hardware), device=device, scale=scale, target=target, draft=draft, alpha=alpha
    )  # fmt: skip


def validate_live(settings: LiveSettings, *, out: Path | None, plots: Path | None, as_json: bool) -> None:
    """Run, print measured beside simulated beside closed form, and write JSON to *out* and a picture into *plots*."""
    result = run_live(settings, report=lambda text: typer.echo(f"... {text}", err=True))
    if as_json:
        print_json(result.as_json())
    else:
        _print(result)
    if out is not None:
        write_whole(out, json.dumps(result.as_json(), indent=2) + "\n")
    if plots is not None:
        plots.mkdir(parents=True, exist_ok=True)
        picture = draw_live(result, plots / "live.png")
        if not as_json:
            typer.echo(f"Plot: {picture}")


def _print(result: Any) -> None:

    typer.echo(f"{result.target} and {result.draft} on {result.device}, {result.clock} clock. {MEANINGLESS}")
    typer.echo(
        f"The stack's own time, from models of hardly any arithmetic: {result.host['step_s'] * 1e3:.2f} ms a step and "
        f"{result.host['layer_s'] * 1e6:.0f} us a layer. Closed form of steps: roofline at the profile's peaks."
    )
    print_table(
        ("Step", "Case", "measured, ms", "spread %", "simulated, ms", "error %", "closed form, ms", "error %"),
        [
            (
                s.name, s.case, f"{s.measured_s * 1e3:.2f}", f"{100 * s.spread:.0f}", f"{s.simulated_s * 1e3:.2f}",
                f"{100 * s.error:+.1f}", f"{s.closed_form_s * 1e3:.2f}", f"{100 * s.closed_form_error:+.1f}",
            )
            for s in result.steps
        ],
        left=2,
    )  # fmt: skip
    print_table(
        ("K", "alpha", "speed-up measured", "simulated", "error %", "closed form", "error %"),
        [
            (
                str(s.k), f"{s.alpha:.3f}", f"{s.measured:.3f}", f"{s.simulated:.3f}", f"{100 * s.error:+.1f}",
                f"{s.closed_form:.3f}", f"{100 * (s.closed_form / s.measured - 1):+.1f}",
            )
            for s in result.speedups
        ],
        left=1,
    )  # fmt: skip
    best = result.best_k
    typer.echo(f"c, draft step over target step: {result.c_measured:.3f} measured, {result.c_simulated:.3f} simulated")
    typer.echo(f"Median error of the target's steps: {100 * result.median_step_error:.1f} %")
    typer.echo(f"Largest error of a speed-up: {100 * result.worst_speedup_error:.1f} %")
    typer.echo(f"Best K: {best[0]} measured, {best[1]} simulated")
