"""rooftrace bench: measured runs read, laid beside their simulation, and fitted."""

from __future__ import annotations

import typer

from sim.cli import bench_fit


def register(app: typer.Typer) -> None:
    bench = typer.Typer(help="Measured runs: a deployment fitted to them.", no_args_is_help=True)
    bench.command("fit")(bench_fit.fit)
    bench.command("next")(bench_fit.next_run)
    app.add_typer(bench, name="bench")
