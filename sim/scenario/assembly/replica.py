"""A model on the machines of a pool: scheduler, memory and decoding method put together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sim.engine import ReplicaSpec
from sim.errors import ScenarioError
from sim.scenario.assembly.asked import of_model
from sim.scenario.assembly.auto import chosen_by_auto
from sim.scenario.assembly.context import check_longest
from sim.scenario.assembly.decoding import BuiltDecoding, build_decoding, slots_of_drafts
from sim.scenario.assembly.memory import memory_of, shared_plan
from sim.scenario.assembly.pools import PoolOf
from sim.scenario.assembly.prefix_cache import cache_of
from sim.scenario.assembly.ranks import check_ranks
from sim.scenario.assembly.refusals import never_gets_on
from sim.scenario.assembly.scheduler import preempting, scheduler_of
from sim.scenario.assembly.tiers import check_room, tiers_of
from sim.scenario.explain import told_by

if TYPE_CHECKING:
    from hwmodels.memory import MemoryPlan
    from workloads import ClosedLoop, Trace


@dataclass(frozen=True, kw_only=True)
class Hosted:
    """A model on the machines of a pool."""

    spec: ReplicaSpec
    decoding: BuiltDecoding | None
    chosen: dict[str, tuple[int, str]]
    plan: MemoryPlan


def build_pool(pool: PoolOf, workload: Trace | ClosedLoop, rows: Mapping[str, int]) -> list[Hosted]:
    """The models of *pool*, each on its machines; *rows*: numbers of the models that the workload asks for.

    ScenarioError for what cannot be.
    """
    return [
        _build_hosted(pool, i, of_model(workload, rows.get(name)), rows.get(name)) for i, name in enumerate(pool.serves)
    ]


def _build_hosted(pool: PoolOf, i: int, workload: Trace | ClosedLoop, row: int | None) -> Hosted:
    scenario, deployment = pool.scenarios[i], pool.deployments[i]
    alone = len(pool.serves) == 1
    check_ranks(scenario, shared=not alone)
    chosen = chosen_by_auto(scenario, deployment, workload)
    scheduler = preempting(scenario, scheduler_of(scenario, deployment, chosen, shared=not alone))
    with told_by(scenario):
        plan = (
            deployment.fitted(memory_of(scenario, deployment, scheduler, workload=workload))
            if alone
            else shared_plan(pool, i, scheduler, workload)
        )
        decoding = build_decoding(
            scenario.decoding,
            target=deployment,
            plan=plan,
            beside=lambda draft: memory_of(scenario, deployment, scheduler, workload=workload, draft=draft),
            scheduler=scheduler,
            workload=workload,
            find=scenario.find,
        )
        slots = slots_of_drafts(scenario, decoding)
        stuck = never_gets_on(scheduler, plan.block_tokens, decoding, slots, workload)
        if stuck is not None:
            raise ScenarioError(stuck)
        if decoding is not None and not alone:
            raise ScenarioError(
                "decoding: models that share a machine do not speculate yet; give each a pool of its own"
            )
    if deployment.model.is_encoder and workload.output_tokens.any():
        raise ScenarioError(
            f"{scenario.source}: {deployment.model.name} is an encoder and emits no tokens, but the workload asks for "
            "some; give output_tokens: 0 or another model"
        )
    check_room(scenario, plan)
    check_longest(scenario, plan)
    spec = ReplicaSpec(
        cost=deployment.cost,
        scheduler=scheduler,
        kv_blocks=plan.rank_blocks,
        block_tokens=plan.block_tokens,
        micro_batches=scenario.micro_batches,
        max_model_len=deployment.model.max_positions,
        model=row,
        **cache_of(scenario, workload, plan.block_tokens, deployment.model),
        **tiers_of(scenario, deployment, plan, models=len(pool.serves)),
        **slots,
    )
    if decoding is not None:
        spec = replace(
            spec,
            decoding=decoding.decoding,
            draft_cost=decoding.draft_cost,
            kv_blocks=decoding.plan.rank_blocks,
            speculation_overhead_s=decoding.overhead_s,
        )
        plan = decoding.plan
    return Hosted(spec=spec, decoding=decoding, chosen=chosen, plan=plan)
