"""rooftrace trace: look at request traces and convert them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from sim.cli.options import Json
from sim.errors import OutputError, RooftraceError

_File = Annotated[Path, typer.Argument(help="Trace file; its format is recognised by its content.")]
_Format = Annotated[str, typer.Option("--format", help="auto, azure_llm, burstgpt, mooncake or plain.")]
_Sort = Annotated[bool, typer.Option("--sort", help="Accept arrivals out of order.")]
_DropEmpty = Annotated[bool, typer.Option("--drop-empty", help="Leave out rows with neither prompt nor output.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Look at request traces and convert them.", no_args_is_help=True)
    group.command()(describe)
    group.command()(convert)
    app.add_typer(group, name="trace")


def describe(
    file: _File,
    format_: _Format = "auto",
    sort: _Sort = False,
    drop_empty: _DropEmpty = False,
    as_json: Json = False,
) -> None:
    """Print how many requests a trace holds, how they arrive and how long they are."""
    found = _read(file, format_, sort, drop_empty).describe()
    if as_json:
        typer.echo(json.dumps(found, indent=2, allow_nan=False))
        return
    from sim.cli.tables import print_facts, print_table

    lengths = {key: value for key, value in found.items() if isinstance(value, dict) and "p99" in value}
    heads = list(next(iter(lengths.values())))
    print_facts([(key, _text(value)) for key, value in found.items() if key not in lengths])
    print_table(("", *heads), [(key, *(_text(values[head]) for head in heads)) for key, values in lengths.items()])


def convert(
    file: _File,
    out: Annotated[Path, typer.Argument(help="CSV file to write: arrival_s, prompt_tokens, output_tokens, ...")],
    format_: _Format = "auto",
    sort: _Sort = False,
    drop_empty: _DropEmpty = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Keep the first requests.", show_default=False)] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT where it exists.")] = False,
) -> None:
    """Write a trace in Rooftrace's plain CSV format."""
    trace = _read(file, format_, sort, drop_empty)
    if out.exists() and not overwrite:
        raise OutputError(f"{out} exists already; give another name or --overwrite")
    try:
        (trace if limit is None else trace.limit(limit)).to_csv(out)
    except OSError as error:
        raise OutputError(f"cannot write {out}: {error.strerror}") from None
    typer.echo(f"{len(trace) if limit is None else min(limit, len(trace)):,} requests written to {out}", err=True)


def _read(file: Path, format_: str, sort: bool, drop_empty: bool) -> Any:
    from workloads import read_trace

    with _user_errors(file):
        return read_trace(file, format_, sort=sort, drop_empty=drop_empty)


@contextlib.contextmanager
def _user_errors(file: Path) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise RooftraceError(str(error)) from None
    except OSError as error:
        raise RooftraceError(f"cannot read {file}: {error.strerror}") from None


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_text(inner)}" for key, inner in value.items())
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.5g}" if isinstance(value, float) else "-" if value is None else str(value)
