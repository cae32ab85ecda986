"""Machines whose attention is replicated over ranks (`parallel.data`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hwmodels.stacks import stacks
from policies.routers import RoundRobin
from sim.engine import MachineSpec, ReplicaSpec
from sim.errors import ScenarioError
from sim.scenario import named
from sim.scenario.assembly.pools import PoolOf
from sim.scenario.explain import told_by
from sim.scenario.settings import Scenario


def check_asked(scenario: Scenario, pools: Sequence[PoolOf]) -> None:
    """ScenarioError for settings between ranks where there are none: of a pool, or of the top level and no pool has any."""
    of_pools = list((scenario.pools or {}).items())
    asked = [(name, own, [pool for pool in pools if pool.name == name]) for name, own in of_pools]
    for where, settings, meant in [("", scenario, pools), *asked]:
        for key in ("rank_router", "prompt_balance"):
            if getattr(settings, key) is not None and all(pool.scenarios[0].parallel.data == 1 for pool in meant):
                path = f"pools.{where}.{key}" if where else key
                raise ScenarioError(
                    f"{scenario.source}: {path}: this is between the ranks of a machine, and it has one; leave it out, or give "
                    "parallel.data"
                )


def machine_of(scenario: Scenario, hosted: Sequence[ReplicaSpec]) -> ReplicaSpec | MachineSpec:
    """A machine that hosts these models, each on as many ranks as *scenario* asks for."""
    if scenario.parallel.data == 1:
        return hosted[0] if len(hosted) == 1 else MachineSpec(hosted=tuple(hosted))
    router = _router(scenario)
    with told_by(scenario, "rank_router"):
        return MachineSpec(
            hosted=tuple(hosted),
            ranks=scenario.parallel.data,
            rank_router=router,
            prompt_balance=scenario.prompt_balance,
        )


def ranks_of(scenario: Scenario) -> dict[str, Any]:
    """The manifest's facts about the ranks; empty where there are none."""
    if scenario.parallel.data == 1:
        return {}
    balance = scenario.prompt_balance
    return {
        "ranks": {
            "per_machine": scenario.parallel.data,
            "router": named.shown_policy(_router(scenario)),
            **({} if balance is None else {"prompt_balance": asdict(balance)}),
        }
    }


def rank_router_of(stack: str) -> Any:
    """The default router of a serving stack among the ranks of a machine; in turn for stacks that say no other.

    SGLang 0.5.23's `load_balance_method` auto is in turn as well (srt/arg_groups/serving_hook.py).
    """
    return named_rank_router(stacks()[stack].rank_router)


def named_rank_router(name: str | None) -> Any:
    """The router of this name among the ranks of a machine; in turn for None."""
    return RoundRobin() if name is None else named.policy(name, {}, named.ROUTERS, key="rank_router", method="route")


def _router(scenario: Scenario) -> Any:
    asked = scenario.rank_router
    if asked is None:
        return rank_router_of(scenario.stack_name)
    with told_by(scenario, "rank_router"):
        return asked.made("rank_router")
