"""rooftrace plot: pictures of a run or a sweep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from sim.results import Result
    from sim.study.sweep import SweepResult


def register(app: typer.Typer) -> None:
    app.command()(plot)


def plot(
    folder: Annotated[Path, typer.Argument(help="Folder of a run or of a sweep.")],
    x: Annotated[
        str | None, typer.Option("--x", metavar="KEY", help="Dotted column along the horizontal axis.")
    ] = None,
    y: Annotated[str | None, typer.Option("--y", metavar="KEY", help="Dotted column to draw, e.g. ttft_s.p99.")] = None,
    hue: Annotated[
        str | None, typer.Option("--hue", metavar="KEY", help="Dotted column that tells lines apart.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the pictures; default FOLDER-plots beside it.", show_default=False)
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", help="Write the report of FOLDER to this file, in place of pictures.", show_default=False
        ),
    ] = None,
) -> None:
    """Draw a run or a sweep as PNG and SVG; without options, what suits it; with --html its report."""
    from sim import plots
    from sim.errors import OutputError, RooftraceError
    from sim.results import Result
    from sim.study.sweep import FORMAT, SweepResult

    if out is not None and out.suffix.lower() in (".png", ".svg", ".pdf"):
        raise RooftraceError(f"--out is the folder of the pictures, of which there may be several; got {out}")
    try:
        kind = json.loads((folder / "manifest.json").read_text(encoding="utf-8")).get("format")
    except (OSError, ValueError, RecursionError, AttributeError):
        if not folder.exists():
            raise OutputError(f"{folder} does not exist; give the folder of a run or a sweep") from None
        raise OutputError(f"{folder} is not the folder of a run or a sweep: it has no readable manifest.json") from None
    if html is not None:
        for name, value in (("--x", x), ("--y", y), ("--hue", hue), ("--out", out)):
            if value is not None:
                raise RooftraceError(
                    f"{name} is about pictures, and --html writes the report in their place; leave one out"
                )
        path = _write_report(SweepResult(folder) if kind == FORMAT else Result.load(folder), html)
        typer.echo(str(path))
        return
    try:
        if kind == FORMAT:
            result = SweepResult(folder)
            figures = plots.sweep_figures(result.table, result.axes, x=x, y=y, hue=hue)
        else:
            given = [name for name, value in (("--x", x), ("--y", y), ("--hue", hue)) if value is not None]
            if given:
                raise RooftraceError(f"{given[0]} is about the columns of a sweep, and {folder} holds one run")
            run = Result.load(folder)
            figures = plots.run_figures(run.requests, run.columns.iteration_blocks)
    except ValueError as error:
        raise RooftraceError(str(error)) from None
    target = out if out is not None else folder.resolve().with_name(f"{folder.resolve().name}-plots")
    try:
        target.mkdir(parents=True, exist_ok=True)
        written = [path for name, figure in figures.items() for path in plots.save(figure, target / name)]
    except OSError as error:
        raise OutputError(f"cannot write pictures into {target}: {error.strerror}; choose another --out") from None
    for path in written:
        typer.echo(str(path))


def _write_report(found: SweepResult | Result, html: Path) -> Path:
    from sim.errors import OutputError
    from sim.report.html import write_run_report, write_sweep_report
    from sim.results import Result

    try:
        return write_run_report(found, html) if isinstance(found, Result) else write_sweep_report(found, html)
    except OutputError:  # about the folder that is read
        raise
    except OSError as error:
        raise OutputError(f"cannot write {html}: {error.strerror}") from None
