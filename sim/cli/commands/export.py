"""rooftrace export: the commands that start what was simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command()(export)


def export(
    result: Annotated[Path, typer.Argument(help="Results folder of a run, or that of rooftrace optimize --out.")],
    target: Annotated[str, typer.Option("--for", help="vllm, sglang, trtllm or dynamo.")] = "vllm",
) -> None:
    """Write the commands, or the manifest, that start a simulated deployment; what they do not carry goes to standard error."""
    from sim.launch import export as write
    from sim.launch import recommended

    found = write(recommended(result), target)
    for text in found.left_out:
        typer.echo(f"Not carried over: {text}", err=True)
    typer.echo(found.text, nl=False)
