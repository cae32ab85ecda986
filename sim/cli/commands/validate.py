"""rooftrace validate: measured files against the models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sim.cli.options import Json

if TYPE_CHECKING:
    from hwmodels.measured import Said
    from hwmodels.profiles import Profile
    from sim.validation.files import ErrorLine
    from sim.validation.intervals import Coverage
    from sim.validation.served import GroupErrors


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
    as_json: Json = False,
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
            hardware=hardware, device=device, scale=scale, target=target, draft=draft, alpha=alpha, out=out, plots=plots,
            as_json=as_json,
        )  # fmt: skip
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
    from sim.cli.tables import print_json
    from sim.validation.files import LEFT_OUT, comparisons, read_measured
    from sim.validation.intervals import coverage, coverage_markdown, loans_markdown
    from sim.validation.served import BREAKDOWNS, errors_by, served_pair, served_pairs, write_groups
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
    pair = served_pair(found)
    served = [] if pair is None else [(title, errors_by(pair, *names)) for title, names in BREAKDOWNS]
    if as_json:
        print_json(
            {
                "files": [asdict(line) for line in lines],
                "intervals": [asdict(line) for line in covered],
                "served": [{"by": title, **asdict(group)} for title, groups in served for group in groups],
                "left_out": folder.left_out,
            }
        )
    else:
        _print(lines, covered)
        for title, groups in served:
            _print_served(title, groups)
    told: list[Path] = [path for path in (out, markdown) if path is not None]
    if plots is not None and pair is not None:
        from sim.plots.served import draw_served

        told += draw_served(pair, plots)
    if plots is not None:
        from sim.plots.validation import draw_validation

        told += draw_validation(found, plots)
    for path in told if not as_json else ():
        typer.echo(f"Written: {path}")
    for sentence in folder.left_out:
        typer.echo(f"Left out: {sentence}", err=True)
    if folder.left_out:
        typer.echo(folder.verdict, err=True)
        raise typer.Exit(LEFT_OUT)


def _print(lines: Sequence[ErrorLine], covered: Sequence[Coverage]) -> None:
    from sim.cli.tables import print_table

    def shown(*values: float | None) -> list[str]:
        return ["-" if value is None or math.isnan(value) else f"{value:.1f}" for value in values]

    rows = [
        (
            line.file.removesuffix(".csv") + ("" if line.quantity == "latency" else f", {line.quantity}"),
            f"{line.rows:,}",
            f"{line.unmodelled:,}",
            *shown(line.mape_pct, line.median_pct, line.p90_pct, line.bias_pct),
        )
        for line in lines
    ]
    print_table(("file, quantity", "rows", "unmod.", "MAPE %", "median", "p90", "bias"), rows, fold_left=True)
    if covered:
        rows = [(line.family, f"{line.rows:,}", *shown(line.held_pct, line.inside_pct)) for line in covered]
        print_table(("90 % intervals of", "rows", "held-back rows in %", "all rows in %"), rows)
    seen: set[tuple[str, str]] = set()
    for line in lines:
        said = [(f"{count:,} rows without a prediction: {reason}", reason) for reason, count in line.reasons.items()]
        for text, key in (*said, *((note, note) for note in line.notes)):
            if (line.file, key) not in seen:
                seen.add((line.file, key))
                typer.echo(f"{line.file}: {text}")


def _print_served(title: str, groups: Sequence[GroupErrors]) -> None:
    """Errors of serving runs by family, stack, model or load."""
    from sim.cli.tables import print_table

    def shown(value: float, how: str) -> str:
        return "-" if math.isnan(value) else format(value, how)

    rows = [
        (
            group.name, f"{group.rows:,}", f"{group.unmodelled:,}", shown(group.tpot_median_pct, ".1f"),
            shown(group.tpot_bias_pct, "+.1f"), shown(group.ttft_median_pct, ".1f"), shown(group.ttft_bias_pct, "+.1f"),
        )
        for group in groups
    ]  # fmt: skip
    heads = (f"Serving runs {title}", "rows", "unmod.", "TPOT %", "TPOT bias", "TTFT %", "TTFT bias")
    print_table(heads, rows, fold_left=True)


def _profile_of(hardware: str | None) -> Profile | None:
    """The one that `--hardware` prices every file with; None where each file names its device."""
    from hwmodels.profiles import load_profile

    return None if hardware is None else load_profile(hardware)


def _said(hardware: str | None, dtype: str | None) -> Said:
    """The device and format of tables that do not say them themselves."""
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
