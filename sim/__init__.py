"""Rooftrace: replay LLM request traces against models of real hardware.

>>> from sim import Scenario, simulate
>>> result = simulate(Scenario.default().with_set("replicas=2"))
>>> result.summary["requests"]["finished"]
2500
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.packages import handed_on

if TYPE_CHECKING:
    from sim.errors import OutputError, RooftraceError, ScenarioError
    from sim.explore.notebook import explore
    from sim.results import Result
    from sim.run import simulate
    from sim.scenario import Scenario
    from sim.study.sweep import sweep

__all__ = ["OutputError", "Result", "RooftraceError", "Scenario", "ScenarioError", "explore", "simulate", "sweep"]

# Imported when first looked at: the command line's --help needs none of them.
_HOMES = {
    "OutputError": "sim.errors",
    "Result": "sim.results",
    "RooftraceError": "sim.errors",
    "Scenario": "sim.scenario",
    "ScenarioError": "sim.errors",
    "explore": "sim.explore:",
    "simulate": "sim.run",
    "sweep": "sim.study.sweep",
}


__getattr__ = handed_on("sim", _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
