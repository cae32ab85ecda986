"""Arguments and options that mean the same to several commands."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

ScenarioFile = Annotated[
    Path | None, typer.Argument(help="Scenario file (YAML); without one, the built-in default.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
SummaryJson = Annotated[bool, typer.Option("--json", help="Print the summary as JSON and nothing else.")]

Fetch = Annotated[
    bool,
    typer.Option("--fetch", help="Ask the HuggingFace hub for the config.json of a model that is unknown otherwise."),
]


def fetch_models(names: Iterable[str]) -> None:
    """What --fetch does before a command reads its models; RooftraceError in one sentence where the hub gives no config.json."""
    from hwmodels.model import fetch_unknown
    from sim.errors import RooftraceError

    try:
        for name in names:
            fetch_unknown(name)
    except ValueError as error:
        raise RooftraceError(f"--fetch: {error}") from None


def wants_json(ctx: typer.Context, as_json: bool) -> bool:
    """Whether --json stands behind a subcommand, or behind the command that it belongs to."""
    return as_json or (ctx.parent is not None and bool(ctx.parent.params.get("as_json")))
