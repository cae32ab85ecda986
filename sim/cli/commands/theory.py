"""rooftrace theory: closed forms, listed, described and evaluated."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from sim.cli.options import Json
from sim.cli.tables import print_json, print_table
from sim.errors import RooftraceError


def register(app: typer.Typer) -> None:
    app.command()(theory)


def theory(
    name: Annotated[str | None, typer.Argument(help="Closed form; without one, all are listed.")] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ARGUMENT=VALUE]...",
            help="Such as alpha=0.8, alpha=0.5,0.7,0.9, k=1:8 or target=0.7,0.3; without any, the form is described.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the closed forms, describe one, or evaluate it: rooftrace theory speedup alpha=0.8 k=1:8 c=0.05."""
    from sim.theory import THEORIES
    from sim.theory import theory as find

    if name is None:
        _list(list(THEORIES.values()), as_json)
        return
    try:
        entry = find(name)
        if not arguments:
            _describe(entry, as_json)
            return
        given = dict(_split(argument) for argument in arguments)
        if len(given) < len(arguments):
            raise RooftraceError("an argument is given twice; give each once")
        value = entry.evaluate(given)
    except (ValueError, TypeError) as error:
        raise RooftraceError(str(error)) from None
    if as_json:
        print_json({"theory": name, "arguments": given, "value": value})
    else:
        _show(entry, given, value)


def _split(argument: str) -> tuple[str, str]:
    name, equals, text = argument.partition("=")
    if not equals or not name or not text:
        raise RooftraceError(f"{argument!r}: expected ARGUMENT=VALUE, such as alpha=0.8")
    return name, text


def _list(entries: list[Any], as_json: bool) -> None:
    if as_json:
        found = [
            {"name": e.name, "group": e.group, "parameters": _parameters(e), "summary": e.summary, "source": e.source}
            for e in entries
        ]
        print_json(found)
        return

    for group in dict.fromkeys(entry.group for entry in entries):
        rows = [
            (
                entry.name,
                " ".join(p.name if p.required else f"{p.name}={p.default}" for p in entry.parameters),
                entry.summary,
            )
            for entry in entries
            if entry.group == group
        ]
        print_table(("Closed form", "Arguments", "What it is"), rows, title=group, left=2, fold=1, fold_left=True)


def _parameters(entry: Any) -> list[dict[str, Any]]:
    return [{"name": p.name, "required": p.required, "default": p.default, "whole": p.whole} for p in entry.parameters]


def _describe(entry: Any, as_json: bool) -> None:
    if as_json:
        found = {"name": entry.name, "group": entry.group, "description": entry.description}
        found["parameters"] = _parameters(entry)
        print_json(found)
        return
    typer.echo(f"{entry.name}\n\n{entry.description}\n")
    for p in entry.parameters:
        typer.echo(f"  {p.name}" + ("" if p.required else f" (default {p.default})"))


def _show(entry: Any, given: dict[str, str], value: Any) -> None:
    import numpy as np

    from sim.theory import parse_value

    result = np.asarray(value)
    if not result.ndim:
        typer.echo(_text(result[()]))
        return
    columns = {name: np.asarray(parse_value(text)) for name, text in given.items()}
    varied = {name: column for name, column in columns.items() if column.ndim == 1 and column.size == result.size}
    if result.ndim == 1:
        rows = [(*(_text(column[i]) for column in varied.values()), _text(result[i])) for i in range(result.size)]
        print_table((*varied, entry.name), rows, left=0)
        return
    for row in result.reshape(-1, result.shape[-1]):
        typer.echo("  ".join(_text(x) for x in row))


def _text(value: Any) -> str:
    import numpy as np

    return str(bool(value)) if isinstance(value, bool | np.bool_) else f"{value:.6g}"
