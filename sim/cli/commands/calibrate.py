"""rooftrace calibrate: turn the machine at hand into a hardware profile."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sim.cli.exits import interrupted
from sim.cli.options import Json
from sim.cli.tables import print_json, print_table
from sim.errors import RooftraceError
from sim.under_way import under_way

if TYPE_CHECKING:
    from hwmodels.calibrate.backend import Facts
    from hwmodels.calibrate.session import Progress


def register(app: typer.Typer) -> None:
    app.command()(calibrate)


def calibrate(
    out: Annotated[Path, typer.Option(help="Folder for the profile, the samples and the report.", show_default=False)],
    backend: Annotated[str, typer.Option(help="auto, torch, jax or numpy.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cuda, tpu or cpu.")] = "auto",
    model: Annotated[
        list[str] | None,
        typer.Option(help="Time this model's shapes (name or config.json); more than once for several."),
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="fp32, bf16, fp16 or fp8; more than once for several.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Spend two minutes.")] = False,
    budget: Annotated[
        str | None,
        typer.Option(help="Time to spend, such as 10min; earlier runs into the folder count. Default 15min."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads of a CPU; default: the cores that are free of other work.")
    ] = None,
    clock: Annotated[
        str, typer.Option(help="auto, wall, or cpu: processor time, for one thread on a shared machine.")
    ] = "auto",
    allow_noise: Annotated[bool, typer.Option("--allow-noise", help="Go on when repeats scatter.")] = False,
    fit_only: Annotated[bool, typer.Option("--fit-only", help="Fit the samples that the folder has.")] = False,
    as_json: Json = False,
) -> None:
    """Time the kernels that serving uses, fit a profile to them, and report how good it is."""
    import datetime

    from hwmodels.calibrate.backend import CalibrationError
    from hwmodels.calibrate.fitting import PROFILE, fit_samples
    from hwmodels.calibrate.samples import read_log
    from hwmodels.calibrate.take import FULL_S, QUICK_S, Request, seconds_of

    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    try:
        if quick and budget is not None:
            raise CalibrationError("--quick is a budget of its own; give one of --quick and --budget")
        budget_s = seconds_of(budget) if budget is not None else QUICK_S if quick else FULL_S
        if not fit_only:
            request = Request(
                out=out, backend=backend, device=device, models=tuple(model or ()), dtypes=tuple(dtype or ()),
                budget_s=budget_s, threads=threads, clock=clock, allow_noise=allow_noise,
            )  # fmt: skip
            _take(request, today, quiet=as_json)
        profile = fit_samples(out, fitted_on=today)
        _, _, samples = read_log(out)
    except CalibrationError as error:
        raise RooftraceError(str(error)) from None
    except OSError as error:
        raise RooftraceError(f"cannot use the folder {out}: {error.strerror}; choose another --out") from None
    from sim.report.calibration import scenario_line, write_report

    paths = write_report(out, profile, samples)
    if as_json:
        kernels = [{"kernel": f"{each.family} {each.variant}", **asdict(each.provenance)} for each in profile.kernels]
        print_json({"profile": out / PROFILE, "report": paths[-1], "note": profile.note, "kernels": kernels})
        return
    rows = [
        (
            f"{kernel.family} {kernel.variant}",
            f"{kernel.provenance.points:,}",
            f"{kernel.provenance.fit_median_pct:.1f}",
            f"{kernel.provenance.held_median_pct:.1f}",
            f"{kernel.provenance.held_p90_pct:.1f}",
        )
        for kernel in profile.kernels
    ]
    print_table(("Kernel", "Points", "Fit, median %", "Held back, median %", "Held back, p90 %"), rows)
    typer.echo(profile.note)
    typer.echo(f"Report: {paths[-1]}")
    typer.echo(f"Profile: {out / PROFILE}")
    typer.echo(f"Use it with  {scenario_line(out / PROFILE)}")


def _take(request: Any, today: str, *, quiet: bool) -> None:
    from hwmodels.calibrate.take import take

    latest: Progress | None = None

    def opened(facts: Facts) -> None:
        typer.echo(
            f"{facts.title}: {facts.backend} {facts.backend_version} on {facts.device}, {facts.cores} cores, "
            f"{facts.clock} clock",
            err=quiet,
        )

    def report(progress: Progress) -> None:
        nonlocal latest
        latest = progress

    def said() -> str:
        if latest is None:
            return "opening the device"
        return f"{latest.taken} operations, {latest.left_s:.0f} s left: {latest.now}"

    try:
        with under_way(
            "Measuring", said=said, total=lambda: request.budget_s,
            done=lambda: 0.0 if latest is None else request.budget_s - latest.left_s,
        ):  # fmt: skip
            taken = take(request, taken_on=today, opened=opened, report=report)
    except KeyboardInterrupt as error:
        raise interrupted(error, f"the samples in {request.out} are kept, and the same command goes on.") from None
    for reason, count in taken.skipped.items():
        typer.echo(f"Left out: {reason} ({count} operations)", err=quiet)
