"""Machines whose attention is replicated over ranks (`parallel.data`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.errors import ScenarioError
from sim.scenario import named
from sim.scenario.assembly.auto import left_to_choose
from sim.scenario.explain import told_by
from sim.scenario.settings import Scenario

if TYPE_CHECKING:
    from policies.ranks import PromptBalance
    from sim.engine import MachineSpec, ReplicaSpec


def check_ranks(scenario: Scenario, *, shared: bool) -> None:
    """ScenarioError for settings about ranks that say nothing, or what is not modelled; *shared*: the machine hosts others."""
    ranks = scenario.parallel.data
    if ranks == 1:
        for key in ("rank_router", "prompt_balance"):
            if getattr(scenario, key) is not None:
                raise ScenarioError(
                    f"{scenario.source}: {key}: this is between the ranks of a machine, and it has one; leave it out, or give "
                    "parallel.data"
                )
        return
    if shared:
        raise ScenarioError(
            f"{scenario.source}: parallel.data {ranks}: models that share a machine have no ranks; give each a pool of its own"
        )
    if (scenario.micro_batches or 1) > 1:
        raise ScenarioError(
            f"{scenario.source}: micro_batches {scenario.micro_batches}: ranks take one batch a step each, and overlapping two of "
            "them is not modelled; leave micro_batches out"
        )
    if found := left_to_choose(scenario):
        raise ScenarioError(
            f"{scenario.source}: {found[0][0]}: {named.AUTO_VALUE} chooses for a machine with one scheduler, and each of the "
            f"{ranks} ranks has its own; give a number"
        )


def with_ranks(scenario: Scenario, spec: ReplicaSpec) -> ReplicaSpec | MachineSpec:
    """A machine of *spec*, or of as many ranks of it as *scenario* asks for."""
    from sim.engine import MachineSpec

    if scenario.parallel.data == 1:
        return spec
    router = _router(scenario)
    with told_by(scenario, "rank_router"):
        return MachineSpec(
            tenants=(spec,), ranks=scenario.parallel.data, rank_router=router, prompt_balance=_balance(scenario)
        )


def ranks_of(scenario: Scenario) -> dict[str, Any]:
    """What the manifest says of them; empty where there are none."""
    if scenario.parallel.data == 1:
        return {}
    balance = scenario.prompt_balance
    return {
        "ranks": {
            "per_machine": scenario.parallel.data,
            "router": named.shown_policy(_router(scenario)),
            **({} if balance is None else {"prompt_balance": balance.model_dump()}),
        }
    }


def _balance(scenario: Scenario) -> PromptBalance | None:
    from policies.ranks import PromptBalance

    return None if scenario.prompt_balance is None else PromptBalance(**scenario.prompt_balance.model_dump())


def _router(scenario: Scenario) -> Any:
    from policies.routers import rank_router_of

    asked = scenario.rank_router
    if asked is None:
        return rank_router_of(scenario.serving_stack)
    with told_by(scenario, "rank_router"):
        return named.policy(asked.policy, asked.settings, named.ROUTERS, key="rank_router", method="route")
