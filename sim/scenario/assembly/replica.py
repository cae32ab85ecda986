"""A model on the machines of a pool: scheduler, memory and decoding method put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hwmodels.deployment import Deployment
from hwmodels.memory import MemoryPlan
from sim.engine import ReplicaSpec
from sim.engine.record.columns import IntArray
from sim.errors import ScenarioError
from sim.scenario.assembly.adapters import adapters_of, within_slots
from sim.scenario.assembly.asked import numbers_of, of_model
from sim.scenario.assembly.auto import chosen_by_auto
from sim.scenario.assembly.context import check_longest
from sim.scenario.assembly.decoding import BuiltDecoding, build_decoding, drafting_for, slots_of_drafts
from sim.scenario.assembly.draft import Drafting
from sim.scenario.assembly.media import SeenMedia, images_in_steps
from sim.scenario.assembly.memory import account_of, encoder_bytes_of, memory_of, shared_plans
from sim.scenario.assembly.pools import PoolOf
from sim.scenario.assembly.prefix_cache import cache_of
from sim.scenario.assembly.refusals import never_gets_on
from sim.scenario.assembly.scheduler import preempting, scheduler_of
from sim.scenario.assembly.structured_output import grammars_of
from sim.scenario.assembly.tiers import check_room, tiers_of
from sim.scenario.encoding import EncodeSettings
from sim.scenario.explain import told_by
from sim.scenario.settings import Scenario
from workloads import Workload


@dataclass(frozen=True, kw_only=True)
class Hosted:
    """A model on the machines of a pool."""

    spec: ReplicaSpec
    decoding: BuiltDecoding | None
    chosen: dict[str, tuple[int, str]]
    plan: MemoryPlan


class Encodes(NamedTuple):
    """Images and clips that machines encode in their steps."""

    settings: EncodeSettings | None = None
    media: SeenMedia | None = None


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A hosted model, as far as it is known before memory is divided."""

    scenario: Scenario
    deployment: Deployment
    numbers: IntArray
    """The rows of its requests in the whole workload."""
    workload: Workload
    chosen: dict[str, tuple[int, str]]
    scheduler: Any
    drafting: Drafting | None
    encodes: Encodes

    def memory(self, account: Callable[..., MemoryPlan], *, with_draft: bool = True) -> MemoryPlan:
        """Its memory as `memory_of` or `account_of` divides it."""
        draft = self.drafting.held if with_draft and self.drafting is not None else None
        beside = encoder_bytes_of(self.encodes.settings, self.deployment)
        return account(
            self.scenario, self.deployment, self.scheduler, workload=self.workload, draft=draft, encoder_bytes=beside
        )


def build_pool(pool: PoolOf, workload: Workload, rows: Mapping[str, int], encodes: Encodes) -> list[Hosted]:
    """The models of *pool*, each on its machines; *rows*: numbers of the models that the workload asks for.

    ScenarioError for what cannot be.
    """
    parts = [_part(pool, i, workload, rows.get(name), encodes) for i, name in enumerate(pool.serves)]
    return [
        _build_hosted(part, plan, workload, row=rows.get(name), models=len(parts))
        for part, plan, name in zip(parts, _plans(pool, parts), pool.serves, strict=True)
    ]


def _part(pool: PoolOf, i: int, workload: Workload, row: int | None, encodes: Encodes) -> _Part:
    scenario, deployment, shared = pool.scenarios[i], pool.deployments[i], len(pool.serves) > 1
    numbers = numbers_of(workload, row)
    asked = of_model(workload, numbers)
    chosen = chosen_by_auto(scenario, deployment, asked)
    scheduler = preempting(scenario, scheduler_of(scenario, deployment, chosen, shared=shared))
    scheduler = within_slots(scenario, scheduler)
    with told_by(scenario):
        drafting = drafting_for(scenario.decoding, target=deployment, find=scenario.find)
    return _Part(
        scenario=scenario,
        deployment=deployment,
        numbers=numbers,
        workload=asked,
        chosen=chosen,
        scheduler=scheduler,
        drafting=drafting,
        encodes=encodes,
    )


def _plans(pool: PoolOf, parts: list[_Part]) -> list[MemoryPlan]:
    """The memory of each model, its drafter included; ScenarioError for what does not fit."""
    if len(parts) > 1:
        accounts = []
        for part in parts:
            with told_by(part.scenario):
                accounts.append(part.memory(account_of))
        return shared_plans(pool, accounts)
    (part,) = parts
    with told_by(part.scenario):
        without = part.deployment.fitted(part.memory(memory_of, with_draft=False))
        if part.drafting is None:
            return [without]
        plan = part.memory(memory_of)
        part.drafting.check_fits(without, plan)
        return [plan]


def _build_hosted(part: _Part, plan: MemoryPlan, asked: Workload, *, row: int | None, models: int) -> Hosted:
    """*asked*: the workload of all models together."""
    scenario, deployment, workload, scheduler = part.scenario, part.deployment, part.workload, part.scheduler
    with told_by(scenario):
        decoding = build_decoding(
            scenario.decoding,
            target=deployment,
            drafting=part.drafting,
            scheduler=scheduler,
            workload=workload,
            numbers=part.numbers,
            find=scenario.find,
        )
        slots = slots_of_drafts(scenario, decoding)
        stuck = never_gets_on(scheduler, plan.block_tokens, decoding, slots, workload)
        if stuck is not None:
            raise ScenarioError(stuck)
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
        grammars=grammars_of(scenario, deployment, asked, scheduler),
        **cache_of(scenario, workload, plan.block_tokens, deployment.model),
        **tiers_of(scenario, deployment, plan, models=models),
        **slots,
        adapters=adapters_of(scenario, deployment, workload, shared=models > 1),
    )
    with told_by(scenario, "encode"):
        spec = replace(spec, images=images_in_steps(part.encodes.settings, deployment, scheduler, part.encodes.media))
    if decoding is not None:
        spec = replace(
            spec,
            decoding=decoding.decoding,
            draft_cost=decoding.draft_cost,
            speculation_overhead_s=decoding.overhead_s,
        )
    return Hosted(spec=spec, decoding=decoding, chosen=part.chosen, plan=plan)
