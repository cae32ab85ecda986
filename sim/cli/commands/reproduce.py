"""rooftrace reproduce: published numbers beside simulated ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sim.errors import OutputError, RooftraceError


def register(app: typer.Typer) -> None:
    app.command()(reproduce)


def reproduce(
    group: Annotated[str | None, typer.Argument(help="Group of documents; without one all are run.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for reproduce.csv and the pictures.", show_default=False)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Shorter runs; intervals are wider.")] = False,
    failures_only: Annotated[bool, typer.Option("--failures", help="Print only rows out of tolerance.")] = False,
) -> None:
    """Run the published experiments; exit code 1 when a row is out of its tolerance."""
    from sim.reproduce import COLUMNS, groups, load_group, write_csv

    names = [group] if group else groups()
    if group and group not in groups():
        raise RooftraceError(f"{group} is not a group of documents; there are {', '.join(groups())}")
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"cannot make the folder {out}: {error.strerror}") from error
    from sim.cli.tables import print_table

    rows = []
    for name in names:
        module = load_group(name)
        found = module.rows(quick=quick)
        rows += found
        wrong = [row for row in found if not row.ok]
        typer.echo(f"{module.TITLE}: {len(found) - len(wrong)} of {len(found)} rows within tolerance")
        shown = wrong if failures_only else found
        if shown:
            print_table(COLUMNS, [row.cells() for row in shown], left=3, fold_left=True)
        if out is not None:
            for path in module.plots(out):
                typer.echo(f"Picture {path}")
    if out is not None:
        write_csv(rows, out / "reproduce.csv")
        typer.echo(f"Rows    {out / 'reproduce.csv'}")
    if any(not row.ok for row in rows):
        raise typer.Exit(1)
