"""rooftrace export: the commands that start what was simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hwmodels.stacks import default_stack, servers


def register(app: typer.Typer) -> None:
    app.command()(export)


def export(
    result: Annotated[
        Path, typer.Argument(help="Results folder of a run or of rooftrace optimize --out, or a scenario file.")
    ],
    target: Annotated[
        str, typer.Option("--for", help=f"{', '.join(servers())}, dynamo, kubernetes, llm-d or kserve.")
    ] = default_stack().name,
    forced_acceptance: Annotated[
        bool,
        typer.Option(
            help="For benchmarks: make the server accept drafted tokens as the scenario says, whatever the texts become."
        ),
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File for it, in place of standard output.")] = None,
) -> None:
    """Write the commands, or the manifest, that start a simulated deployment; what they do not carry goes to standard error."""
    from sim.launch import export as write
    from sim.launch import recommended
    from workloads.write import write_whole

    found = write(recommended(result), target, forced_acceptance=forced_acceptance)
    for text in found.left_out:
        typer.echo(f"Not carried over: {text}", err=True)
    if out is None:
        typer.echo(found.text, nl=False)
    else:
        write_whole(out, found.text)
