"""The things that a run leaves out, borrows or does not use, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from itertools import chain
from typing import Any

from hwmodels.calibrated import Calibrated
from hwmodels.deployment import Deployment
from hwmodels.device import Device
from hwmodels.memory import MemoryPlan
from hwmodels.overheads import is_before
from hwmodels.power import power_model
from hwmodels.stacks import stack_with
from policies.classes import Preempt
from policies.routers import Knowledge, knowledge_of
from policies.view import reserves
from sim.scenario import named
from sim.scenario.assembly.adapters import about_adapters, asks_for_adapters
from sim.scenario.assembly.encoding import about_encoding
from sim.scenario.assembly.fleet import about_fleet
from sim.scenario.assembly.pools import PoolOf
from sim.scenario.assembly.prefix_cache import caches, sorts_by_nothing, windows_left_behind, without_cache
from sim.scenario.assembly.prices import about_prices
from sim.scenario.assembly.structured_output import about_grammars
from sim.scenario.assembly.tiers import about_tiers
from sim.scenario.classes import about_classes
from sim.scenario.settings import Scenario
from workloads import Workload


def notes_of(
    scenario: Scenario,
    pools: Sequence[PoolOf],
    schedulers: Sequence[Any],
    plans: Sequence[MemoryPlan],
    workload: Workload,
    router: Any,
) -> list[str]:
    """All notes of an experiment, each once; *schedulers*, *plans* and *router* are those that were made."""
    hosted = [pair for pool in pools for pair in zip(pool.scenarios, pool.deployments, strict=True)]
    scenarios, deployments = [each for each, _ in hosted], [deployment for _, deployment in hosted]
    machines = sum(pool.replicas * pool.scenarios[0].parallel.data for pool in pools)
    notes = chain(
        _left_out(workload, {deployment.model.name for deployment in deployments}),
        *((*each.notes, *_borrowed(each)) for each in deployments),
        *(_extra_layers(each, deployment) for each, deployment in hosted),
        *(_older_release(scenario, each) for each in deployments),
        *(_fitted_elsewhere(each) for each in deployments),
        *(_limited_power(each, deployment.device) for each, deployment in hosted),
        *(plan.notes for plan in plans),
        _unused(scenario),
        _prefixes(hosted, workload),
        *(sorts_by_nothing(each) for each in scenarios),
        *(about_tiers(each, workload, machines) for each in scenarios),
        about_fleet(pools),
        about_encoding(scenario, [each.model for each in deployments], workload),
        about_adapters(scenario, hosted, workload),
        about_grammars(scenario, pools),
        _router(scenario, router, pools, workload),
        *(_of_two_engines(each) for each in scenarios),
        _priorities(schedulers, workload),
        _allowances(schedulers, workload),
        about_prices(scenario, [each.device for each in deployments]),
        about_classes(schedulers, workload, router, sum(pool.replicas for pool in pools)),
    )
    return list(dict.fromkeys(notes))


def _prefixes(hosted: Sequence[tuple[Scenario, Deployment]], workload: Workload) -> Iterator[str]:
    """Notes where prompts that begin alike, or the caches of models for them, come to nothing."""
    if workload.prefix_blocks is not None:
        for each, _ in hosted:
            yield from without_cache(each)
        for each, deployment in hosted:
            yield from windows_left_behind(each, deployment.model)
    elif any(each.memory.prefix_caching for each, _ in hosted):
        yield "memory.prefix_caching is on, and the workload does not say which prompts begin alike: nothing is found again."


def _left_out(workload: Workload, hosted: Set[str]) -> Iterator[str]:
    """The parts of the workload that the run leaves out; *hosted* are the names of the models that serve it."""
    yield from workload.notes
    asked = workload.models
    if len(asked) > 1 and len(hosted) == 1:
        yield f"The trace asks for {len(asked)} models ({', '.join(asked[:4])}); all requests go to {next(iter(hosted))}."


def _router(scenario: Scenario, router: Any, pools: Sequence[PoolOf], workload: Workload) -> Iterator[str]:
    """A note where a router asks for a fact that is not known."""
    knows = knowledge_of(router) or Knowledge()

    def router_asking(fact: str) -> str:
        given, asks = scenario.router.model_dump(), lambda each: getattr(knowledge_of(each), fact, False)
        return f"The router {named.innermost(router, given, 'router', asks)[1]}"

    if sum(pool.replicas for pool in pools) == 1:
        return
    if knows.prefixes:
        rest = "loads and adapters" if asks_for_adapters(router) else "loads"
        nothing = f"it finds nothing anywhere, and goes by {rest} alone"
        if workload.prefix_blocks is None:
            yield (
                f"{router_asking('prefixes')} asks what machines have of a prompt, and the workload does not say which prompts "
                f"begin alike: {nothing}."
            )
        elif not any(caches(each) for pool in pools for each in pool.scenarios):
            what = nothing if knows.sent is None else "prompts go where their like went, and gain nothing there"
            yield (
                f"{router_asking('prefixes')} asks what machines have of a prompt, and none has a prefix cache: {what}; "
                "memory.prefix_caching: true has them keep prompts."
            )
    if knows.sessions and workload.session is None:
        yield (
            f"{router_asking('sessions')} asks who served a session before, and the workload has none: every request is taken for "
            "a first."
        )


def _unused(scenario: Scenario) -> list[str]:
    """A note about which settings of the top level no pool takes, each having its own."""
    if scenario.placement is not None:
        own = [{"model", "replicas", "parallel"}]
        whose = "the placement says its own"
    elif scenario.pools is not None:
        own = [
            {
                "model" if key == "models" else key
                for key, value in pool.model_dump(exclude_unset=True).items()
                if value is not None
            }
            for pool in scenario.pools.values()
        ]
        whose = "every pool has its own"
    else:
        return []
    # Of `parallel` and `memory` a pool may take some keys from the top.
    unused = set.intersection(*own) & set(scenario.settings()) - {"memory", "parallel"}
    return (
        [f"The top level's {' and '.join(sorted(unused))} {'is' if len(unused) == 1 else 'are'} not used: {whose}."]
        if unused
        else []
    )


def _extra_layers(scenario: Scenario, deployment: Deployment) -> Iterator[str]:
    """A note where a model's layers for multi-token prediction stay out."""
    n, decoding = deployment.model.mtp_layers, scenario.decoding
    if n and (decoding.method != "mtp" or decoding.draft is not None):
        yield (
            f"The multi-token-prediction layers of {deployment.model.name} ({n}) are left out: neither loaded nor run; decoding: "
            "{method: mtp, acceptance: ...} drafts with them."
        )


def _borrowed(deployment: Deployment) -> Iterator[str]:
    """A note where another device's measurements stand in."""
    profile = deployment.profile
    if profile is None:
        return
    if deployment.parallel.n_devices > 1 and not profile.links_measured:
        yield (
            f"{deployment.device.name}'s links have not been measured: what crosses them is priced as rings at the "
            "datasheet's bandwidth."
        )
    if profile.note.startswith("efficiencies"):
        note = profile.note if profile.lender is None else profile.lender.note_of(deployment.lent_factors)
        yield f"{deployment.device.name} has not been calibrated: {note}."
    yield from deployment.stand_ins


def _older_release(scenario: Scenario, deployment: Deployment) -> Iterator[str]:
    """A note where the release asked for is older than any whose overheads are known."""
    made_by, asked = deployment.made_by, scenario.serving_release
    if asked is not None and isinstance(made_by, Calibrated) and is_before(asked, made_by.stack.release):
        yield (
            f"serving_release {asked} is older than all of {made_by.stack.name} whose overheads are known: those of "
            f"{made_by.stack.release} stand in."
        )


def _fitted_elsewhere(deployment: Deployment) -> Iterator[str]:
    """A note where the stack was fitted to another model, on another device, or to another tensor parallelism."""
    if not isinstance(deployment.made_by, Calibrated):
        return
    fit = deployment.made_by.stack.fit
    here = {"model": deployment.model.name, "hardware": deployment.device.name, "tensor": deployment.parallel.tensor}
    strange = [
        f"{key} {fit.get(key, 'that it does not name')} (here {name})"
        for key, name in here.items()
        if fit and fit.get(key) != name
    ]
    if strange:
        yield (
            f"serving_stack {fit['file']} was fitted with {' and '.join(strange)}: its host times may hold here too, its "
            "efficiencies may not."
        )


def _limited_power(scenario: Scenario, device: Device) -> Iterator[str]:
    """A note where devices may not draw their TDP: what follows from that was measured nowhere."""
    if scenario.power_limit_w is not None:
        clock = power_model(device.name).limited(scenario.power_limit_w, device.tdp_w).clock_share
        yield (
            f"power_limit_w {scenario.power_limit_w:g}: {device.name} is taken to run at {clock:.0%} of its clock, so that "
            f"arithmetic takes {1 / clock:.2f} times as long and memory keeps its speed; no measurement of a limit is behind it."
        )


def _of_two_engines(scenario: Scenario) -> Iterator[str]:
    """A note where the scheduler is one engine's and the serving stack another's."""
    own = scenario.stack
    for _, settings in named.chain({"policy": scenario.scheduler.policy, **scenario.scheduler.settings}, "scheduler"):
        policy = settings.get("policy")
        engine = stack_with(policy, own.name) if isinstance(policy, str) else None
        if engine is not None and engine is not own and own.scheduler is not None:
            yield (
                f"The scheduler {policy} plans here for the serving stack {own.name}, whose host work, memory and pages the run "
                f"has; scheduler: {{policy: {own.scheduler}}} plans as {own.name} does, and serving_stack: {engine.name} has what "
                f"else is {engine.name}'s."
            )


def _priorities(schedulers: Sequence[Any], workload: Workload) -> Iterator[str]:
    """A note where priorities are given and not asked for, or asked for and not given."""
    given = workload.priority is not None
    if given and not any(map(_asks_for_priority, schedulers)):
        yield (
            "Requests have priorities and no scheduler asks for them; take {policy: vllm, scheduling_policy: priority}, or wrap "
            "one in {policy: order, by: priority} or {policy: preempt}."
        )
    if not given and any(map(_orders_by_priority, schedulers)):
        yield (
            "The scheduler orders by priority and no request has one, so that all stay in the order of the queue; give the trace a "
            "column priority or order by something else."
        )


def _asks_for_priority(scheduler: Any) -> bool:
    """Whether *scheduler* orders by priority, or may do so, not being one of ours."""
    return _orders_by_priority(scheduler) or any(
        not (getattr(each, "__module__", None) or type(each).__module__).startswith("policies.")
        for each in named.layers(scheduler)
    )


def _orders_by_priority(scheduler: Any) -> bool:
    """Whether *scheduler*, or one that it wraps, is a policy of ours that orders by priority."""
    return any(
        isinstance(each, Preempt) or "priority" in (getattr(each, "by", None), getattr(each, "scheduling_policy", None))
        for each in named.layers(scheduler)
    )


def _allowances(schedulers: Sequence[Any], workload: Workload) -> Iterator[str]:
    """A note where memory is kept for what clients allow, and nothing says what that is."""
    if workload.max_tokens is None and any(map(reserves, schedulers)) and workload.output_tokens.any():
        yield (
            "The scheduler keeps KV memory for the longest answer that a client allows, and the workload does not say how long "
            "that is. It keeps as much as each answer takes in the end, which no server knows beforehand; workload.max_tokens, or "
            "a column max_tokens of a plain trace, says what clients allow."
        )
