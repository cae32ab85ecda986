"""Imported by the fork server alone: catalogues are read and a first run is over before a worker is forked of it."""

from __future__ import annotations

import sim.explore.answer as answers
import sim.explore.measured
import sim.explore.theories
from sim.run import run_built
from sim.scenario import Scenario
from sim.scenario.assembly import resolve

__all__ = ["sim"]


def _warm_up() -> None:
    result = run_built(resolve(Scenario.default().with_value("workload.limit", 20))).kept()
    answers.course(result)
    answers.commands(Scenario.default(), (None, ()), {})


_warm_up()
