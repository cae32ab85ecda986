"""LoRA adapters of a scenario: put on its requests, held to the slots of its servers, and priced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hwmodels.adapters import AdapterCost, slot_rules, times_of
from hwmodels.deployment import Deployment
from policies.adapters import MaxLoras
from policies.classes import Preempt
from policies.routers import AdapterAffinity
from policies.view import orders_queue
from sim.engine.spec.adapters import AdapterSpec
from sim.errors import ScenarioError
from sim.scenario import named
from sim.scenario.explain import told_by
from sim.scenario.settings import Scenario
from workloads import check_adapters, draw_adapters, keyed_by_adapter

if TYPE_CHECKING:
    from workloads import Workload


def with_adapters(scenario: Scenario, workload: Workload) -> Workload:
    """The same requests with the adapters that they ask for; ScenarioError where the trace and the settings do not fit."""
    settings = scenario.adapters
    if settings is None:
        return workload
    with told_by(scenario, "adapters"):
        shares = settings.shares
        if shares is None:
            if workload.adapter is None:
                raise ScenarioError(
                    "popularity trace goes by a column adapter, and the workload has none; give uniform, zipf or shares"
                )
            check_adapters(workload, settings.count)
        elif workload.adapter is not None:
            raise ScenarioError("the trace has a column adapter; give popularity: trace")
        else:
            workload = draw_adapters(workload, shares, scenario.seed, base_share=settings.base_share)
        return keyed_by_adapter(workload)


def adapter_cost_of(scenario: Scenario, deployment: Deployment) -> AdapterCost | None:
    """The memory and times of the slots of *scenario*'s servers; None without adapters. ScenarioError for what is not modelled."""
    settings = scenario.adapters
    if settings is None:
        return None
    rules = slot_rules(scenario.stack_name)
    with told_by(scenario, "adapters"):
        slots = settings.slots(rules)
        return AdapterCost(
            spec=deployment.model,
            parallel=deployment.parallel,
            max_loras=slots.max_loras,
            max_lora_rank=slots.rank,
            target_modules=slots.modules,
            times=times_of(scenario.stack_name, scenario.serving_release),
            rules=rules,
            host_bytes_per_s=None if deployment.device.host is None else deployment.device.host.bytes_per_s,
        )


def adapters_of(scenario: Scenario, deployment: Deployment, workload: Workload, *, shared: bool) -> AdapterSpec | None:
    """The adapters that an engine core serves; None without any. *shared*: its machine serves other models, too. ScenarioError for
    what is not modelled beside them."""
    settings = scenario.adapters
    if settings is None or workload.adapter is None:
        return None
    with told_by(scenario, "adapters"):
        if shared:
            raise ScenarioError(
                "adapters of models that share a machine are not modelled; give each model machines of its own"
            )
        cost = adapter_cost_of(scenario, deployment)
        assert cost is not None
        return AdapterSpec(
            ranks=settings.ranks,
            max_loras=cost.max_loras,
            max_cpu_loras=settings.slots(cost.rules).max_cpu_loras,
            step_s=cost.step_s,
            disk_s=cost.disk_s,
            slot_s=cost.slot_s,
            loaded=settings.loaded_at_start,
            base_has_slot=cost.rules.base_has_slot,
            eviction=settings.eviction or "lru",
        )


def within_slots(scenario: Scenario, scheduler: Any) -> Any:
    """*scheduler* with the limit of adapters in a batch around the innermost; ScenarioError for one whose rule is not known."""
    settings = scenario.adapters
    if settings is None:
        return scheduler
    *outer, inner = named.layers(scheduler)
    rules, why = slot_rules(scenario.stack_name), None
    with told_by(scenario, "adapters"):
        max_loras = settings.slots(rules).max_loras
    has_rule = hasattr(inner, "with_max_loras")
    if orders_queue(inner) and not has_rule:
        why = (
            f"slots are modelled for schedulers that admit in the order of arrival, and {scenario.scheduler.policy} has "
            "another; take one that does, or wrap it in policy order"
        )
    elif any(isinstance(each, Preempt) for each in outer):
        why = "policy preempt makes room for the first of the queue, which may wait for a slot; take policy order"
    if why is not None:
        raise ScenarioError(f"{scenario.source}: adapters: {why}")
    limited: Any = (
        inner.with_max_loras(max_loras)
        if has_rule
        else MaxLoras(inner, max_loras=max_loras, counts_base=rules.base_has_slot)
    )
    for each in reversed(outer):
        limited = replace(each, inner=limited)
    return limited


def asks_for_adapters(router: Any) -> bool:
    """Whether *router*, or one that it wraps, goes by the adapters that machines have."""
    return any(getattr(each, "by_adapter", False) for each in named.layers(router))


def at_home(scenario: Scenario, router: Any, machines: int) -> Any:
    """*router* of *machines*, wrapped in one that sends each adapter to machines of its own where the settings ask for it.
    ScenarioError for a router by adapters where there are none, and for machines that cannot be given to adapters."""
    settings = scenario.adapters
    if settings is None:
        if asks_for_adapters(router):
            raise ScenarioError(
                f"{scenario.source}: router: {scenario.router.policy} routes by the LoRA adapters that machines have, and the "
                "scenario has none; give adapters, or another router"
            )
        return router
    placed, own = settings.placement == "apart", _most_own(router)
    if not placed and not own:
        return router
    setting = "adapters.placement apart" if placed else "router: apart"
    if placed and own:
        raise ScenarioError(
            f"{scenario.source}: adapters.placement apart and apart of the router both say which machines an adapter has; leave "
            "out one of the two"
        )
    if scenario.autoscale is not None or any(pool.autoscale for pool in (scenario.pools or {}).values()):
        raise ScenarioError(
            f"{scenario.source}: {setting} gives each adapter machines of its own, and autoscale adds and removes machines; leave "
            "out one of the two"
        )
    if own > machines:
        raise ScenarioError(
            f"{scenario.source}: router: each adapter has {own} machines, and there are {machines}; give each at most {machines}, "
            "or more replicas"
        )
    return AdapterAffinity(router, apart=True) if placed else router


def _most_own(router: Any) -> int:
    """The most machines that an adapter has to itself by *router*, or by one that it wraps; 0 where it has none."""
    apart = (each for each in named.layers(router) if isinstance(each, AdapterAffinity) and each.apart)
    return max((each.each for each in apart), default=0)


def about_adapters(
    scenario: Scenario, hosted: Sequence[tuple[Scenario, Deployment]], workload: Workload
) -> Iterator[str]:
    """Notes where the trace has adapters that nothing serves, on what times of adapters were measured with, and on the host memory
    that they take."""
    if scenario.adapters is None:
        if workload.adapter is not None:
            yield "The trace has adapters and the scenario has no section adapters: the model itself serves all requests."
        return
    times, stack = times_of(scenario.stack_name, scenario.serving_release), scenario.stack_name
    yield (
        f"What adapters add to iterations, and what loads take, was measured with {times.measured} on one GPU of 64 GB, and "
        "follows the shapes of the model's layers."
    )
    if stack != times.stack:
        yield f"Times of adapters are those of {times.stack}, and serving_stack is {stack}."
    for each, deployment in hosted:
        yield from _in_host_memory(each, deployment)


def _in_host_memory(scenario: Scenario, deployment: Deployment) -> Iterator[str]:
    """A note on the memory of the largest adapters that a host keeps."""
    settings, cost = scenario.adapters, adapter_cost_of(scenario, deployment)
    if settings is None or cost is None:
        return
    kept = sorted(settings.ranks)[-settings.slots(cost.rules).max_cpu_loras :]
    gib = sum(map(cost.host_bytes, kept)) / (1 << 30)
    yield (
        f"Up to {len(kept):,} adapter{'s' * (len(kept) > 1)} take{'s' * (len(kept) == 1)} {gib:.3g} GiB of host memory for each "
        "device (adapters.max_cpu_loras); whether the host has as much is not checked."
    )
