"""The division of the memory of a replica's devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from hwmodels.cache import keeps_every_token
from hwmodels.deployment import Deployment
from hwmodels.memory import (
    LargestBatch,
    MemoryPlan,
    StackMemory,
    engine_defaults,
    memory_plan,
    share_machine,
    stack_memories,
    stack_memory,
    usual_block_tokens,
    with_encoder,
    with_slots,
)
from hwmodels.overheads import at_or_before, is_before
from hwmodels.stack_files import load_stack_file
from sim.errors import ScenarioError
from sim.scenario import named
from sim.scenario.assembly.adapters import adapter_cost_of
from sim.scenario.assembly.auto import chosen_by_auto, left_to_choose
from sim.scenario.assembly.deployment import deployment_of
from sim.scenario.assembly.pools import PoolOf
from sim.scenario.assembly.scheduler import scheduler_of
from sim.scenario.encoding import EncodeSettings
from sim.scenario.explain import told_by
from sim.scenario.settings import Scenario
from sim.scenario.workload import mean_context, workload_of
from workloads import Workload


def memory_plan_of(scenario: Scenario) -> tuple[Deployment, MemoryPlan]:
    """The replica that *scenario* describes and how its memory is divided, without a draft model; ScenarioError where it does
    not fit."""
    deployment = deployment_of(scenario)
    chosen = chosen_by_auto(scenario, deployment, workload_of(scenario)) if left_to_choose(scenario) else {}
    scheduler = scheduler_of(scenario, deployment, chosen)
    with told_by(scenario):
        # Only where layers do not keep every token does the workload matter.
        workload = None if keeps_every_token(deployment.model) else workload_of(scenario)
        beside = encoder_bytes_of(scenario.encode, deployment)
        plan = memory_of(scenario, deployment, scheduler, workload=workload, encoder_bytes=beside)
        return deployment, deployment.fitted(plan)


def memory_of(
    scenario: Scenario,
    deployment: Deployment,
    scheduler: Any = None,
    *,
    workload: Workload | None = None,
    draft: Deployment | None = None,
    encoder_bytes: float = 0.0,
) -> MemoryPlan:
    """The division of the memory of *scenario*'s devices, as `account_of` has it, with the blocks that a fitted stack was found
    to have."""
    plan = account_of(scenario, deployment, scheduler, workload=workload, draft=draft, encoder_bytes=encoder_bytes)
    return _as_fitted(scenario, plan)


def account_of(
    scenario: Scenario,
    deployment: Deployment,
    scheduler: Any = None,
    *,
    workload: Workload | None = None,
    draft: Deployment | None = None,
    encoder_bytes: float = 0.0,
) -> MemoryPlan:
    """The division of the memory of *scenario*'s devices; its *scheduler*'s limits, or else the stack's, are those of the profile
    run, and *encoder_bytes* on each device are an encoder's weights. Layers that do not keep every token are counted at the mean
    context of *workload*, or else at the longest. ValueError for a share by another stack's name, or a release that is not
    known. What is given and changes nothing, and an account of another release than the overheads', are among the plan's notes."""
    memory, stack, rules = scenario.memory, _stack(scenario), _rules(scenario)
    setting = "gpu_memory_utilization" if rules is None else rules.setting
    strange = next((name for name in memory.shares if name != setting), None)
    if strange is not None:
        who = "cost_model roofline" if scenario.cost_model == "roofline" else f"serving_stack {stack}"
        raise ValueError(f"memory.{strange} is another stack's name; with {who} it is memory.{setting}")
    defaults = engine_defaults(stack, deployment.device, tensor=deployment.parallel.tensor)
    tokens = named.limit_of(scheduler, named.ITERATION_TOKENS)
    sequences = named.limit_of(scheduler, named.SEQUENCES)
    plan = memory_plan(
        deployment,
        rules,
        largest=LargestBatch(
            defaults.max_num_batched_tokens if tokens is None else tokens,
            defaults.max_num_seqs if sequences is None else sequences,
        ),
        share=memory.shares.get(setting),
        reserve_bytes=memory.reserve_bytes,
        block_tokens=memory.block_tokens,
        draft=draft,
        context_tokens=None if workload is None else mean_context(workload),
    )
    plan = with_encoder(plan, encoder_bytes)
    slots = adapter_cost_of(scenario, deployment)
    plan = plan if slots is None else with_slots(plan, slots)
    notes = (*plan.notes, *_without_effect(scenario), *_of_two_releases(scenario, rules))
    return replace(plan, override=memory.kv_blocks, notes=notes)


def encoder_bytes_of(settings: EncodeSettings | None, deployment: Deployment) -> float:
    """The weights of the encoders on one device of a machine that encodes in its steps; 0 where it does not."""
    if settings is None or settings.at != "engine":
        return 0.0
    towers = (deployment.model.vision, deployment.model.speech)
    return sum(tower.weight_bytes for tower in towers if tower is not None) / deployment.parallel.tensor


def block_tokens_of(scenario: Scenario) -> int:
    """Tokens of a KV block on one device: those that *scenario* says, or else its stack's."""
    asked = scenario.memory.block_tokens
    return usual_block_tokens(_rules(scenario)) if asked is None else asked


def _rules(scenario: Scenario) -> StackMemory | None:
    """The account of memory of the stack; None where nothing is set aside, as with cost_model roofline."""
    return stack_memory(_stack(scenario), scenario.memory.release)


def _stack(scenario: Scenario) -> str:
    return "ideal" if scenario.cost_model == "roofline" else scenario.stack_name


def _as_fitted(scenario: Scenario, plan: MemoryPlan) -> MemoryPlan:
    """*plan* with as many blocks as a fitted stack was found to have over those that are accounted for; *plan* itself for a stack
    by name, where blocks are given, and where there are none."""
    file = scenario.stack_file
    if file is None or plan.override is not None or plan.rank_blocks < 1:
        return plan
    factor = load_stack_file(file).kv_factor
    return (
        plan if factor == 1.0 else replace(plan, override=max(1, round(plan.rank_blocks * factor)) + plan.null_blocks)
    )


def _without_effect(scenario: Scenario) -> Iterator[str]:
    """A note where the cache's size is given and something beside it that would have decided it."""
    memory = scenario.memory
    if memory.kv_blocks is None:
        return
    keys = [*memory.shares, *(key for key in ("reserve_bytes", "release") if key in memory.model_fields_set)]
    beside = [f"memory.{key}" for key in keys if getattr(memory, key) is not None]
    if beside:
        yield (
            f"memory.kv_blocks says how large the cache is; {' and '.join(beside)} beside it change{'s' * (len(beside) == 1)} "
            "the account of the memory that the manifest has, not the blocks."
        )


def _of_two_releases(scenario: Scenario, rules: StackMemory | None) -> Iterator[str]:
    """Notes where overheads are those of one release of the stack, and the account of memory that of another; and where that is
    older than all whose account is known."""
    release, asked = scenario.serving_release, scenario.memory.release
    if rules is not None and asked is not None and is_before(asked, rules.release):
        yield (
            f"memory.release {asked} is older than all of {rules.stack} whose account of memory is known: that of {rules.release} "
            "stands in."
        )
    if release is None or rules is None or scenario.memory.release is None or scenario.memory.kv_blocks is not None:
        return
    meant = at_or_before(release, stack_memories()[rules.stack])
    if meant != rules.release:
        yield (
            f"serving_release is {release}, and memory is divided as {rules.stack} {rules.release} does it; the account of memory "
            f"for that release is memory.release: '{meant}'."
        )


def shared_plans(pool: PoolOf, accounts: Sequence[MemoryPlan]) -> list[MemoryPlan]:
    """The memory of each of the models that share a machine: what is its own, its drafter included, as its account in *accounts*
    has it, and an equal part of what all of them leave, stage by stage. ScenarioError where they do not fit."""
    plans = [
        _as_fitted(scenario, plan)
        for scenario, plan in zip(pool.scenarios, share_machine(tuple(accounts)), strict=True)
    ]
    for i, plan in enumerate(plans):
        if plan.rank_blocks >= 1:
            continue
        used = max(
            sum(stage.used_bytes - stage.reserve_bytes for stage in stages)
            for stages in zip(*(each.stages for each in accounts), strict=True)
        )
        drafters = any(stage.draft_bytes for each in accounts for stage in each.stages)
        raise ScenarioError(
            f"{', '.join(pool.serves)} do not fit beside each other: their weights{', their drafters' if drafters else ''} and "
            f"what their stack sets aside take {used / 1e9:.1f} GB of the {accounts[i].stages[0].budget_bytes / 1e9:.1f} GB that a "
            f"{pool.deployments[i].device.name} offers, and a KV cache of each has to fit as well; share less or spread them "
            "over more devices (parallel)"
        )
    return plans
