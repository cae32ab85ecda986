"""rooftrace validate: measured files against the models."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hwmodels.measured import Said
    from hwmodels.profiles import Profile


def register(app: typer.Typer) -> None:
    app.command()(validate)


def validate(
    measured: Annotated[
        Path | None, typer.Option(help="Folder of measured tables (CSV, Parquet), or one table.", show_default=False)
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(help="Device or profile (.toml) to price every file with; default: the device in its name."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Number format of tables that do not say theirs; bf16 without.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write the table as CSV, and groups of serving runs beside it (NAME_served.csv).", show_default=False
        ),
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(help="Write the table as Markdown, with the reasons of what is not modelled.")
    ] = None,
    plots: Annotated[
        Path | None, typer.Option(help="Draw measured against predicted, and errors by size, into this folder.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse a folder with a file or row that is not understood.")
    ] = False,
    live: Annotated[
        bool, typer.Option("--live", help="Run transformers on this machine beside their simulation.")
    ] = False,
    backend: Annotated[str, typer.Option(help="With --live: torch runs the models.")] = "torch",
    device: Annotated[str, typer.Option(help="With --live: auto, cuda or cpu.")] = "auto",
    scale: Annotated[
        float | None, typer.Option(help="With --live: share of the models' parameters, in (0, 1].")
    ] = None,
    target: Annotated[str | None, typer.Option(help="With --live: the target's shape, a GPT-2 or Llama model.")] = None,
    draft: Annotated[str | None, typer.Option(help="With --live: the draft's shape.")] = None,
    alpha: Annotated[float, typer.Option(help="With --live: probability that a drafted token is accepted.")] = 0.8,
) -> None:
    """Predict every row of a folder of measurements and say how far off the models are, file by file.

    Tables are recognised by their columns, which carry their units
    (docs/calibration.md). Exit code 3 when a file or row that is not
    understood was left out.
    """
    from sim.errors import OutputError, RooftraceError

    if live == (measured is not None):
        raise RooftraceError("give one of --measured DIR (files) and --live (models that run here)")
    if live:
        from sim.cli.live import validate_live

        if backend != "torch":
            raise RooftraceError(f"--live runs its models with torch; got --backend {backend}")
        validate_live(
            hardware=hardware, device=device, scale=scale, target=target, draft=draft, alpha=alpha, out=out, plots=plots
        )
        return
    assert measured is not None
    for path in (out, markdown):  # before the minutes that the simulations take
        if path is not None and not path.parent.is_dir():
            raise OutputError(f"cannot write {path}: its folder does not exist; create it first")
    if plots is not None:
        there = next(path for path in (plots, *plots.parents) if path.exists())
        if not there.is_dir():
            raise OutputError(f"cannot draw into {plots}: {there} is a file, not a folder; choose another --plots")
    from hwmodels.left_out import loans
    from sim.validation.files import LEFT_OUT, comparisons, read_measured
    from sim.validation.intervals import coverage, coverage_markdown, loans_markdown
    from sim.validation.served import served_pair, served_pairs, text_tables, write_groups
    from sim.validation.tables import to_markdown, write_csv
    from workloads.write import write_whole

    folder = read_measured(measured, hardware=hardware, strict=strict, said=_said(hardware, dtype))
    found = list(comparisons(folder, hardware=hardware))
    lines = [comparison.line for comparison in found]
    covered = coverage(folder.measurements, _profile_of(hardware))
    if out is not None:
        write_csv(lines, out)
        if pairs := served_pairs(found):
            write_groups(pairs, out.with_name(f"{out.stem}_served.csv"))
    if markdown is not None:
        try:
            sections = (coverage_markdown(covered), loans_markdown(loans(folder.measurements)))
            page = to_markdown(lines, folder.left_out, sections, served=found)
            write_whole(markdown, page)
        except OSError as error:
            raise OutputError(f"cannot write {markdown}: {error.strerror}") from None
    typer.echo(f"{'file, quantity':<66}{'rows':>8}{'unmod.':>8}{'MAPE %':>8}{'median':>8}{'p90':>8}{'bias':>8}")
    for line in lines:
        errors = (line.mape_pct, line.median_pct, line.p90_pct, line.bias_pct)
        cells = "".join(f"{'-':>8}" if value is None else f"{value:>8.1f}" for value in errors)
        name = line.file.removesuffix(".csv") + ("" if line.quantity == "latency" else f", {line.quantity}")
        typer.echo(f"{name:<66}{line.rows:>8,}{line.unmodelled:>8,}{cells}")
    if covered:
        typer.echo(f"\n{'90 % intervals of':<66}{'rows':>8}{'held-back rows in %':>24}{'all rows in %':>16}")
    for line in covered:
        cells = (f"{'-' if math.isnan(value) else format(value, '.1f'):>{width}}"
                 for value, width in ((line.held_pct, 24), (line.inside_pct, 16)))  # fmt: skip
        typer.echo(f"{line.family:<66}{line.rows:>8,}{''.join(cells)}")
    seen: set[tuple[str, str]] = set()
    for line in lines:
        for reason, count in line.reasons.items():
            if (line.file, reason) not in seen:
                seen.add((line.file, reason))
                typer.echo(f"{line.file}: {count:,} rows without a prediction: {reason}")
        for note in line.notes:
            if (line.file, note) not in seen:
                seen.add((line.file, note))
                typer.echo(f"{line.file}: {note}")
    pair = served_pair(found)
    for text in text_tables(pair) if pair is not None else ():
        typer.echo(text)
    if plots is not None and pair is not None:
        from sim.plots.served import draw_served

        for path in draw_served(pair, plots):
            typer.echo(f"Plot: {path}")
    if plots is not None:
        from sim.plots.validation import draw_validation

        for path in draw_validation(found, plots):
            typer.echo(f"Plot: {path}")
    for sentence in folder.left_out:
        typer.echo(f"Left out: {sentence}", err=True)
    if folder.left_out:
        typer.echo(folder.verdict, err=True)
        raise typer.Exit(LEFT_OUT)


def _profile_of(hardware: str | None) -> Profile | None:
    """The one that `--hardware` prices every file with; None where each file names its device."""
    from hwmodels.profiles import load_profile

    return None if hardware is None else load_profile(hardware)


def _said(hardware: str | None, dtype: str | None) -> Said:
    """What is said for tables that do not say their device or format themselves."""
    from hwmodels.device import load_device
    from hwmodels.measured import Said, format_of
    from hwmodels.profiles import load_profile
    from sim.errors import RooftraceError

    try:
        device = (
            "" if hardware is None else (load_profile if hardware.endswith(".toml") else load_device)(hardware).name
        )
        return Said(device=device, dtype=format_of(dtype) if dtype else "")
    except (ValueError, OSError) as error:
        raise RooftraceError(str(error)) from None
