"""Rollouts that have machines stand still, or give answers to others, and what is not modelled beside that."""

from __future__ import annotations

from collections.abc import Sequence

from policies.driving import driving
from sim.engine import ReplicaSpec
from sim.errors import ScenarioError
from sim.scenario.assembly.pools import PoolOf
from sim.scenario.settings import Scenario


def check_stops(scenario: Scenario, pools: Sequence[PoolOf], hosted: Sequence[ReplicaSpec]) -> None:
    """ScenarioError where machines stand still, and something that is there is not modelled so."""
    rollout = scenario.workload.rollout
    if rollout is None or not rollout.stops_machines:
        return
    name, without = ("redistribute", "null") if rollout.redistribute is not None else ("pause_s", "0")
    if rollout.leftover == "recompute":
        name, without = "leftover", "abort"
    lacks = {
        "autoscale": any(pool.autoscale is not None for pool in pools),
        "failures": scenario.failures is not None,
        "encode": scenario.encode is not None,
        "pools that prefill or decode alone": any(pool.role != "both" for pool in pools),
        "memory.tiers": any(spec.tiers for spec in hosted),
        "an installed scheduler": any(driving(spec.scheduler) for spec in hosted),
    }
    found = next((what for what, there in lacks.items() if there), None)
    if found is not None:
        raise ScenarioError(
            f"{scenario.source}: workload.rollout.{name} has machines stop what runs, which is not modelled with {found}; leave "
            f"one of the two out (--set workload.rollout.{name}={without})"
        )
