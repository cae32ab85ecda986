"""Rooftrace: replay LLM request traces against models of real hardware.

>>> import rooftrace
>>> result = rooftrace.simulate(rooftrace.Scenario.default().with_set("replicas=2"))
>>> result.summary["requests"]["finished"]
2500

What most need is here, and is imported when it is first used; `docs/reference/python.md` lists the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.packages import handed_on

if TYPE_CHECKING:
    from hwmodels.deployment import deploy
    from hwmodels.device import load_device
    from hwmodels.model import load_model
    from policies.view import Plan, ReplicaView
    from sim import bench, plots, protocols
    from sim.engine import Experiment, MachineSpec, ReplicaSpec
    from sim.engine import run as run_experiment
    from sim.errors import OutputError, RooftraceError, ScenarioError
    from sim.explore.notebook import explore
    from sim.results import Result
    from sim.run import simulate
    from sim.scenario import Scenario
    from sim.study.advise import Advice, advise
    from sim.study.compare import Comparison, compare
    from sim.study.optimize import cheapest
    from sim.study.rates import Target, highest_rate
    from sim.study.sweep import SweepResult, sweep
    from workloads import Trace, read_trace

_HOMES = {
    "Advice": "sim.study.advise",
    "Comparison": "sim.study.compare",
    "Experiment": "sim.engine",
    "MachineSpec": "sim.engine",
    "OutputError": "sim.errors",
    "Plan": "policies.view",
    "ReplicaSpec": "sim.engine",
    "ReplicaView": "policies.view",
    "Result": "sim.results",
    "RooftraceError": "sim.errors",
    "Scenario": "sim.scenario",
    "ScenarioError": "sim.errors",
    "SweepResult": "sim.study.sweep",
    "Target": "sim.study.rates",
    "Trace": "workloads",
    "advise": "sim.study.advise",
    "bench": "sim.bench:",
    "cheapest": "sim.study.optimize",
    "compare": "sim.study.compare",
    "deploy": "hwmodels.deployment",
    "explore": "sim.explore:",
    "highest_rate": "sim.study.rates",
    "load_device": "hwmodels.device",
    "load_model": "hwmodels.model",
    "plots": "sim.plots:",
    "protocols": "sim.protocols:",
    "read_trace": "workloads",
    "run_experiment": "sim.engine:run",
    "simulate": "sim.run",
    "sweep": "sim.study.sweep",
}
"""Public name -> the module that has it, as `handed_on` takes it."""

__all__ = [
    "Advice",
    "Comparison",
    "Experiment",
    "MachineSpec",
    "OutputError",
    "Plan",
    "ReplicaSpec",
    "ReplicaView",
    "Result",
    "RooftraceError",
    "Scenario",
    "ScenarioError",
    "SweepResult",
    "Target",
    "Trace",
    "advise",
    "bench",
    "cheapest",
    "compare",
    "deploy",
    "explore",
    "highest_rate",
    "load_device",
    "load_model",
    "plots",
    "protocols",
    "read_trace",
    "run_experiment",
    "simulate",
    "sweep",
]


__getattr__ = handed_on("rooftrace", _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
