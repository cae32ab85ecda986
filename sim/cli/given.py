"""Options that several commands have are read here: a scenario with its settings and limits, and configs of models."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from hwmodels.model import fetch_unknown
from sim.errors import RooftraceError
from sim.scenario import Scenario


def read_scenario(path: Path | None, settings: Sequence[str] | None = None) -> Scenario:
    """The scenario of the file *path*, or the built-in default without one, with the *settings* that --set gives."""
    found = Scenario.default() if path is None else Scenario.load(path)
    return found.with_set(*(settings or ()))


def fetch_models(names: Iterable[str]) -> None:
    """Carry out --fetch, before a command reads its models; RooftraceError in one sentence where the hub gives no config.json."""
    try:
        for name in names:
            fetch_unknown(name)
    except ValueError as error:
        raise RooftraceError(f"--fetch: {error}") from None


_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0}


def with_limits(scenario: Scenario, limits: Sequence[str] | None) -> Scenario:
    """*scenario* with what --limit gives in its `slo`."""
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
