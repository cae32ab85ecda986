"""Arguments and options that mean the same to several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ScenarioFile = Annotated[
    Path | None, typer.Argument(help="Scenario file (YAML); without one, the built-in default.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
SummaryJson = Annotated[bool, typer.Option("--json", help="Print the summary as JSON and nothing else.")]


def wants_json(ctx: typer.Context, as_json: bool) -> bool:
    """Whether --json stands behind a subcommand, or behind the command that it belongs to."""
    return as_json or (ctx.parent is not None and bool(ctx.parent.params.get("as_json")))
