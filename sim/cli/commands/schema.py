"""rooftrace schema: the JSON Schema of a scenario file, or of a placement scenario."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command()(schema)


def schema(
    place: Annotated[bool, typer.Option("--place", help="Of a placement scenario (rooftrace place) instead.")] = False,
) -> None:
    """Print the JSON Schema of a scenario file, for editors and checkers."""
    if place:
        from sim.placement.scenario import describe_schema

        typer.echo(json.dumps(describe_schema(), indent=2))
        return
    from sim.scenario.schema import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))
