"""Options that say how a trace is read that a tool exported."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable
from typing import Annotated, Any

import typer

from sim.errors import RooftraceError

_Trace = Annotated[
    str | None,
    typer.Option("--trace", metavar="FILE", help="Trace to replay: a file, folder or pattern.", show_default=False),
]
Columns = Annotated[
    list[str] | None,
    typer.Option(
        "--map",
        metavar="FIELD=COLUMN,...",
        help="What is in which column, e.g. arrival=ts,prompt_tokens=usage.prompt; fields: arrival, end, duration, "
        "prompt_tokens, output_tokens, max_tokens, model, session, prompt, answer, blocks, tenant, class, priority, deadline_s, "
        "abort_s, encoder_tokens, predicted_tokens, adapter, images, audio_s, status",
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
Since = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="Leave out requests before: a date (2026-11-03T09:00, UTC where no zone is said) or seconds from the first row.",
        show_default=False,
    ),
]
Until = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Leave out requests from then on; reads no further.", show_default=False),
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


def takes_export(command: Callable[..., None]) -> Callable[..., None]:
    """*command*, which takes settings as `set_`, with options for a trace and how it is read; they are settings of `workload`."""
    signature = inspect.signature(command, eval_str=True)
    options = {
        "trace": _Trace,
        "columns": Columns,
        "missing_output": MissingOutput,
        "keep_failed": KeepFailed,
        "tokenizer": Tokenizer,
        "since": Since,
        "until": Until,
    }
    parameters = []
    for each in signature.parameters.values():
        parameters.append(each)
        if each.name == "set_":
            parameters += [
                inspect.Parameter(
                    name, each.kind, default=False if name == "keep_failed" else None, annotation=annotation
                )
                for name, annotation in options.items()
            ]

    @functools.wraps(command)
    def with_options(**given: Any) -> None:
        told = {name: given.pop(name) for name in options}
        told["columns"] = columns_of(told["columns"])
        settings = [f"workload.{name}={json.dumps(value)}" for name, value in told.items() if value]
        command(**given | {"set_": [*(given["set_"] or ()), *settings] or None})

    with_options.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {each.name: each.annotation for each in parameters}
    return with_options
