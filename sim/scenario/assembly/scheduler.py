"""Policies of a scenario made: routers, and schedulers with what is chosen for them and put around them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hwmodels.deployment import Deployment
from policies.view import evicts
from policies.wrappers import EvictNewest
from sim.errors import ScenarioError
from sim.scenario import named
from sim.scenario.assembly.engines import left_to_the_engine
from sim.scenario.explain import told_by
from sim.scenario.settings import Scenario


def scheduler_of(
    scenario: Scenario, deployment: Deployment, chosen: Mapping[str, tuple[int, str]], *, shared: bool = False
) -> Any:
    """The scheduler of *scenario*, without what `memory.preemption` puts around it; *shared*: its machine serves others too."""
    tokens = {key: value for key, (value, _) in chosen.items()}
    settings = {**tokens, **left_to_the_engine(scenario, deployment, tokens, shared=shared)}
    return policy_of(scenario, "scheduler", settings)


def policy_of(scenario: Scenario, key: str, chosen: Mapping[str, int] | None = None) -> Any:
    """The policy at *key* of *scenario*, with the settings that were *chosen* for it; ScenarioError where it cannot be."""
    settings = getattr(scenario, key)
    with told_by(scenario, key):
        found = settings.settings
        for path, value in (chosen or {}).items():
            found = _with_value(found, path.split(".")[1:], value)
        return settings.made(key, found)


def preempting(scenario: Scenario, scheduler: Any) -> Any:
    """*scheduler* with what `memory.preemption` puts around it; ScenarioError where two would choose the sequences to preempt."""
    if any(isinstance(each, EvictNewest) and evicts(each.inner) for each in named.layers(scheduler)):
        raise ScenarioError(
            f"{scenario.source}: scheduler: evict_newest wraps a scheduler that says itself who is preempted when memory runs "
            "out; leave evict_newest out"
        )
    if scenario.memory.preemption == "none" and evicts(scheduler):
        raise ScenarioError(
            f"{scenario.source}: memory.preemption none: {scenario.scheduler.policy} says itself who is preempted when memory runs "
            "out; leave it out, or choose another scheduler"
        )
    if scenario.memory.preemption != "none" and not evicts(scheduler):
        return EvictNewest(inner=scheduler)
    return scheduler


def _with_value(settings: Mapping[str, Any] | str, path: list[str], value: Any) -> dict[str, Any]:
    if isinstance(settings, str):
        settings = {"policy": settings}
    first, *rest = path
    return {**settings, first: _with_value(settings[first], rest, value) if rest else value}
