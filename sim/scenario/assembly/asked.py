"""Which of the hosted models each request asks for."""

from __future__ import annotations

import numpy as np

from sim.engine.record.columns import IntArray
from sim.errors import ScenarioError
from sim.scenario.assembly.pools import PoolOf
from sim.scenario.settings import Scenario
from sim.text import unknown
from workloads import Workload


def asked_for(scenario: Scenario, workload: Workload, pools: list[PoolOf]) -> tuple[Workload, dict[str, int]]:
    """The workload with the pools' models among its own, and the row of each; no rows where all pools host one model.

    ScenarioError where requests ask for a model that no pool hosts, unless a log names it and there is only one to go to.
    """
    names = list(dict.fromkeys(name for pool in pools for name in pool.serves))
    if len(names) == 1 and not workload.models:
        return workload, {}
    if not workload.models:
        shares = ", ".join(f"{name}: 1" for name in names)
        raise ScenarioError(
            f"{scenario.source}: the pools host {', '.join(names)}, and the workload does not say which of them a request asks "
            f"for; give workload.models, such as {{{shares}}}, or a trace with a column model"
        )
    catalogue = [
        (deployment.model.name, name)
        for pool in pools
        for name, deployment in zip(pool.serves, pool.deployments, strict=True)
    ]
    # A model given as a file is asked for by the name in it as well, and copies are told apart.
    hosted_as = {model: {name for each, name in catalogue if each == model} for model, _ in catalogue}
    aliases = {model: next(iter(served)) for model, served in hosted_as.items() if len(served) == 1}
    index = np.zeros(len(workload), np.int64) if workload.model_index is None else workload.model_index
    counts = np.bincount(index, minlength=len(workload.models)).tolist()
    asked = [name if name in names else aliases.get(name, name) for name in workload.models]
    if len(names) == 1 and scenario.workload.models is None and not set(asked) <= set(names):
        return workload, {}  # a log has the name that clients know, as without pools
    for name, count in zip(asked, counts, strict=True):
        if count and name not in names:
            what = f"{scenario.source}: {count:,} requests ask for {name}, which no pool hosts"
            raise ScenarioError(unknown(what, name, names))
    rows = {name: row for row, name in enumerate(names)}
    moved = np.array([rows.get(name, 0) for name in asked], np.int64)
    return workload.with_models(names, moved[index]), rows


def numbers_of(workload: Workload, row: int | None) -> IntArray:
    """The numbers of the requests that ask for a model; of all where none asks for a model by name, or none for this one."""
    everyone = np.arange(len(workload))
    if row is None or workload.model_index is None:
        return everyone
    chosen = np.flatnonzero(workload.model_index == row)
    return chosen if len(chosen) else everyone


def of_model(workload: Workload, numbers: IntArray) -> Workload:
    """The requests of *numbers*."""
    return workload if len(numbers) == len(workload) else workload.take(numbers)
