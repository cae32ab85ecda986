"""Rooftrace: replay LLM request traces against models of real hardware.

>>> from sim import Scenario, simulate
>>> result = simulate(Scenario.default().with_set("replicas=2"))
>>> result.summary["requests"]["finished"]
2500
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sim.errors import OutputError, RooftraceError, ScenarioError
    from sim.results import Result
    from sim.run import simulate
    from sim.scenario import Scenario
    from sim.study.sweep import sweep

__all__ = ["OutputError", "Result", "RooftraceError", "Scenario", "ScenarioError", "simulate", "sweep"]

# Imported when first looked at (PEP 562): the command line's --help needs none of them.
_HOMES = {
    "OutputError": "sim.errors",
    "Result": "sim.results",
    "RooftraceError": "sim.errors",
    "Scenario": "sim.scenario",
    "ScenarioError": "sim.errors",
    "simulate": "sim.run",
    "sweep": "sim.study.sweep",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'sim' has no attribute {name!r}")
    from sim.packages import intruder

    strange = intruder()
    if strange:
        raise ImportError(strange)
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
