"""Options that say how a trace is read that a tool exported."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from sim.errors import RooftraceError

if TYPE_CHECKING:
    from sim.scenario import Scenario

Columns = Annotated[
    list[str] | None,
    typer.Option(
        "--map",
        metavar="FIELD=COLUMN,...",
        help="What is in which column, e.g. arrival=ts,prompt_tokens=usage.prompt; fields: arrival, end, duration, "
        "prompt_tokens, output_tokens, max_tokens, model, session, prompt, answer, status, ...",
    ),
]
MissingOutput = Annotated[
    str | None,
    typer.Option(help="Requests without an output length: drop, max_tokens or draw.", show_default=False),
]
KeepFailed = Annotated[bool, typer.Option("--keep-failed", help="Keep failed requests that have tokens.")]
Tokenizer = Annotated[
    str | None,
    typer.Option(help="A tokenizer.json that counts tokens of texts; approximate without.", show_default=False),
]


def columns_of(given: list[str] | None) -> dict[str, str] | None:
    """The columns that `--map` names, as a mapping; RooftraceError where it is no FIELD=COLUMN."""
    if not given:
        return None
    found: dict[str, str] = {}
    for part in (part for text in given for part in re.split(r",(?=\s*[a-z_]+=)", text)):
        name, equals, column = part.partition("=")
        if not equals or not name.strip() or not column.strip():
            raise RooftraceError(f"--map {part!r}: expected FIELD=COLUMN, such as arrival=timestamp")
        found[name.strip()] = column.strip()
    return found


def with_export(
    chosen: Scenario,
    trace: str | None,
    columns: list[str] | None,
    missing_output: str | None,
    keep_failed: bool,
    tokenizer: str | None,
) -> Scenario:
    """*chosen* with the settings of `workload` that the options stand for."""
    given = {"trace": trace, "columns": columns_of(columns), "missing_output": missing_output, "tokenizer": tokenizer}
    given["keep_failed"] = True if keep_failed else None
    for name, value in given.items():
        if value is not None:
            chosen = chosen.with_value(f"workload.{name}", value)
    return chosen
