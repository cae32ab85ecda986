"""rooftrace validate: measured files against the models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command()(validate)


def validate(
    measured: Annotated[Path, typer.Option(help="Folder of measured CSV files.", show_default=False)],
    hardware: Annotated[
        str | None,
        typer.Option(help="Device or profile (.toml) to price every file with; default: the device in its name."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the table as CSV.", show_default=False)] = None,
    plots: Annotated[
        Path | None, typer.Option(help="Draw measured against predicted, and errors by size, into this folder.")
    ] = None,
) -> None:
    """Predict every row of a folder of measurements and say how far off the models are, file by file."""
    from sim.cli.tables import print_table
    from sim.validate import comparisons, write_csv

    found = list(comparisons(measured, hardware=hardware))
    lines = [comparison.line for comparison in found]
    if out is not None:
        write_csv(lines, out)
    heads = ("File", "Quantity", "Device", "Rows", "Unmodelled", "MAPE %", "Median %", "p90 %", "Bias %")
    rows = [
        (
            line.file,
            line.quantity,
            line.device,
            f"{line.rows:,}",
            f"{line.unmodelled:,}",
            *("-" if v is None else f"{v:.1f}" for v in (line.mape_pct, line.median_pct, line.p90_pct, line.bias_pct)),
        )
        for line in lines
    ]
    print_table(heads, rows, left=3)
    seen: set[tuple[str, str]] = set()
    for line in lines:
        for reason, count in line.reasons.items():
            if (line.file, reason) not in seen:
                seen.add((line.file, reason))
                typer.echo(f"{line.file}: {count:,} rows without a prediction: {reason}")
        for note in line.notes:
            typer.echo(f"{line.file}: {note}")
    if plots is not None:
        from sim.report.roofline import draw_validation

        for path in draw_validation(found, plots):
            typer.echo(f"Plot: {path}")
