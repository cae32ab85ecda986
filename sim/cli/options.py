"""Arguments and options that mean the same to several commands."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from sim.scenario import Scenario

ScenarioFile = Annotated[
    Path | None, typer.Argument(help="Scenario file (YAML); without one, the built-in default.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
SummaryJson = Annotated[bool, typer.Option("--json", help="Print the summary as JSON and nothing else.")]


def read_scenario(path: Path | None, settings: Sequence[str] | None = None) -> Scenario:
    """The scenario of the file *path*, or the built-in default without one, with the *settings* that --set gives."""
    from sim.scenario import Scenario

    found = Scenario.default() if path is None else Scenario.load(path)
    return found.with_set(*(settings or ()))


def read_axes(given: Sequence[str] | None) -> dict[str, Any]:
    """The values of each --axis by its key; RooftraceError where a key is given twice."""
    from sim.errors import RooftraceError
    from sim.study.points import read_axis

    axes: dict[str, Any] = {}
    for text in given or ():
        key, values = read_axis(text)
        if key in axes:
            raise RooftraceError(f"--axis {key} is given twice; put its values into one list")
        axes[key] = values
    return axes


Fetch = Annotated[
    bool,
    typer.Option("--fetch", help="Ask the HuggingFace hub for the config.json of a model that is unknown otherwise."),
]


def fetch_models(names: Iterable[str]) -> None:
    """Carry out --fetch, before a command reads its models; RooftraceError in one sentence where the hub gives no config.json."""
    from hwmodels.model import fetch_unknown
    from sim.errors import RooftraceError

    try:
        for name in names:
            fetch_unknown(name)
    except ValueError as error:
        raise RooftraceError(f"--fetch: {error}") from None


Limits = Annotated[
    list[str] | None,
    typer.Option(
        "--limit",
        metavar="NAME=TIME",
        help="A limit beside those of the scenario's slo: ttft_p95=1s, tpot_p99=40ms, or of each request ttft=1s; repeatable.",
    ),
]
_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0}


def with_limits(scenario: Scenario, limits: Sequence[str] | None) -> Scenario:
    """*scenario* with what --limit gives in its `slo`."""
    from sim.errors import RooftraceError

    for text in limits or ():
        found = re.fullmatch(r"\s*(\w+?)(?:_s)?\s*=\s*([\d.eE+-]+?)\s*(s|ms|us|min)?\s*", text)
        try:
            value_s = None if found is None else float(f"{float(found[2]) * _UNITS[found[3] or '']:.12g}")
        except ValueError:
            value_s = None
        if found is None or value_s is None:
            raise RooftraceError(f"--limit {text!r}: expected NAME=TIME, such as ttft_p95=1s or tpot_p95=40ms")
        scenario = scenario.with_value(f"slo.{found[1]}_s", value_s)
    return scenario


def wants_json(ctx: typer.Context, as_json: bool) -> bool:
    """Whether --json stands behind a subcommand, or behind the command that it belongs to."""
    return as_json or (ctx.parent is not None and bool(ctx.parent.params.get("as_json")))
