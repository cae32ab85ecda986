"""A serving stack fitted to one deployment, as a file: `rooftrace bench fit` writes it, `serving_stack: my-stack.toml` reads it.

The file has every term, so that what it predicts does not move when the catalogue does; kernels and graphs are those of the stack
that it was fitted over. Besides it says to what it was fitted, how well, and what is left unknown (`posterior`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from hwmodels.kernels.parameters import check_bounds
from hwmodels.overheads import Overheads, ServingStack, serving_stack
from hwmodels.tables import read_toml

FORMAT = "rooftrace-stack-1"
_TABLES = ("terms", "fit", "errors", "posterior", "memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class StackFile:
    """The content of a file."""

    stack: ServingStack
    """The stack with the terms of the file, and in `fit` what they were fitted to."""
    release: str | None
    """That the scenario asked for, whose terms the fit began at."""
    kv_factor: float = 1.0
    """KV blocks over what the account of memory gives."""
    errors: Mapping[str, Any] = field(default_factory=dict)
    """Standard deviations of logarithms: `repeat` and `model` by quantity, and `scale`, how many times those the residuals are."""
    posterior: Mapping[str, Any] = field(default_factory=dict)
    """names, own (the values before the fit), at, widths and covariance, as `sim.bench.fitting.Posterior` has them."""


def load_stack_file(path: str | Path) -> StackFile:
    """The fitted stack in the file at *path*; ValueError, naming the file, where it is none or is not whole."""
    table = read_toml(path)
    if table.get("format") != FORMAT:
        raise ValueError(
            f"{path} is not a fitted serving stack of this version (format {table.get('format')!r}, expected {FORMAT!r}); "
            "`rooftrace bench fit` writes one"
        )
    for name in _TABLES:
        if not isinstance(table.get(name), dict):
            raise ValueError(
                f"{path} has no table {name}; is the file truncated? `rooftrace bench fit` writes it whole"
            )
    try:
        base = serving_stack(str(table["stack"]), table.get("release"))
        values, sources = _terms(table["terms"])
        overheads = Overheads(**values)
        check_bounds(overheads)
        kv_factor = float(table["memory"].get("kv_factor", 1.0))
        if not (math.isfinite(kv_factor) and 0.05 <= kv_factor <= 20.0):
            raise ValueError(f"memory.kv_factor is a number between 0.05 and 20; got {kv_factor:g}")
        _check_posterior(table["posterior"])
    except KeyError as error:
        raise ValueError(f"{path} lacks {error.args[0]}; `rooftrace bench fit` writes it whole") from None
    except (ValueError, TypeError, IndexError) as error:
        raise ValueError(f"{path}: {error}") from None
    facts = {"file": str(path), **table["fit"]}
    stack = replace(
        base, overheads=overheads, sources=sources, fit=facts, held_back="", fitted_to=str(table["fit"]["of"])
    )
    return StackFile(
        stack=stack,
        release=table.get("release"),
        kv_factor=kv_factor,
        errors=table["errors"],
        posterior=table["posterior"],
    )


def _terms(given: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, str]]:
    known = [each.name for each in fields(Overheads)]
    values, sources = {}, {}
    for name, pair in given.items():
        if name not in known:
            raise ValueError(f"terms.{name} is not a term of a serving stack; valid: {', '.join(known)}")
        if not (isinstance(pair, list) and len(pair) == 2):
            raise ValueError(f"terms.{name} is a value and where it comes from; got {pair!r}")
        values[name], sources[name] = float(pair[0]), str(pair[1])
    return values, sources


def _check_posterior(given: Mapping[str, Any]) -> None:
    n = len(given["names"])
    for name in ("own", "at", "widths"):
        if len(given[name]) != n:
            raise ValueError(f"posterior.{name} has a number for each of the {n} names; got {len(given[name])}")
    rows = given["covariance"]
    if len(rows) != n or any(len(row) != n for row in rows):
        raise ValueError(f"posterior.covariance has {n} rows of {n} numbers")
    numbers = [*given["own"], *given["at"], *given["widths"], *(value for row in rows for value in row)]
    if not all(isinstance(value, (int, float)) and math.isfinite(value) for value in numbers):
        raise ValueError("posterior has numbers that are not finite")


def dump_stack_file(
    *,
    stack: ServingStack,
    release: str | None,
    kv_factor: float,
    fit: Mapping[str, Any],
    errors: Mapping[str, Any],
    posterior: Mapping[str, Any],
) -> str:
    """The text of a file that `load_stack_file` reads back. Values are texts, numbers, booleans and lists of them."""
    lines = [
        "# Written by `rooftrace bench fit`; use it as serving_stack: THIS FILE in a scenario.",
        f"format = {_text(FORMAT)}",
        f"stack = {_text(stack.name)}",
        *([] if release is None else [f"release = {_text(release)}"]),
        "",
        "[terms]",
    ]
    values = {each.name: getattr(stack.overheads, each.name) for each in fields(Overheads)}
    lines += [
        f"{name} = [{_text(float(value))}, {_text(stack.sources.get(name, 'left as it was'))}]"
        for name, value in values.items()
        if value or name in stack.sources
    ]
    for name, table in (
        ("memory", {"kv_factor": kv_factor}),
        ("fit", fit),
        ("errors", {key: value for key, value in errors.items() if not isinstance(value, Mapping)}),
        *((f"errors.{key}", value) for key, value in errors.items() if isinstance(value, Mapping)),
        ("posterior", posterior),
    ):
        lines += ["", f"[{name}]", *(f"{key} = {_text(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _text(value: Any) -> str:
    """A TOML value; JSON's texts, numbers and lists are TOML's as well."""
    if isinstance(value, float) and not math.isfinite(value):
        return '"not known"'
    return json.dumps(value, ensure_ascii=True, allow_nan=False)
