"""rooftrace schema: the JSON Schema of a scenario file, or of a placement scenario."""

from __future__ import annotations

from typing import Annotated

import typer

from sim.cli.tables import print_json


def register(app: typer.Typer) -> None:
    app.command()(schema)


def schema(
    place: Annotated[bool, typer.Option("--place", help="Of a placement scenario (rooftrace place) instead.")] = False,
) -> None:
    """Print the JSON Schema of a scenario file, for editors and checkers."""
    if place:
        from sim.placement.scenario import describe_schema

        print_json(describe_schema())
        return
    from sim.scenario.schema import json_schema

    print_json(json_schema())
