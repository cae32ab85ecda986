"""rooftrace schema: the JSON Schema of a scenario file."""

from __future__ import annotations

import json

import typer


def register(app: typer.Typer) -> None:
    app.command()(schema)


def schema() -> None:
    """Print the JSON Schema of a scenario file, for editors and checkers."""
    from sim.scenario.schema import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))
