"""LoRA adapters of a scenario: put on its requests, held to the slots of its servers, and priced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hwmodels.adapters import AdapterCost, times_of
from hwmodels.deployment import Deployment
from policies.adapters import MaxLoras
from policies.classes import Preempt
from policies.driving import driving
from policies.routers import AdapterAffinity
from policies.view import orders_queue, rule_of
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
    """The memory and times of the slots of *scenario*'s servers; None without adapters. ValueError for what is not modelled."""
    settings = scenario.adapters
    if settings is None:
        return None
    return AdapterCost(
        spec=deployment.model,
        parallel=deployment.parallel,
        max_loras=settings.max_loras,
        max_lora_rank=settings.slot_rank,
        times=times_of(scenario.stack_name, scenario.serving_release),
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
            max_loras=settings.max_loras,
            max_cpu_loras=settings.slots_on_host,
            step_s=cost.step_s,
            disk_s=cost.disk_s,
            slot_s=cost.slot_s,
            loaded=settings.loaded_at_start,
        )


def within_slots(scenario: Scenario, scheduler: Any) -> Any:
    """*scheduler* with the limit of adapters in a batch around the innermost; ScenarioError for one whose rule is not known."""
    settings = scenario.adapters
    if settings is None:
        return scheduler
    *outer, inner = named.layers(scheduler)
    why = None
    if driving(inner):
        why = "an installed scheduler is not told of adapters; take one of the simulator's own"
    elif orders_queue(inner):
        why = (
            f"slots are modelled for schedulers that admit in the order of arrival, and {scenario.scheduler.policy} has "
            "another; take one that does, or wrap it in policy order"
        )
    elif any(isinstance(each, Preempt) for each in outer):
        why = "policy preempt makes room for the first of the queue, which may wait for a slot; take policy order"
    if why is not None:
        raise ScenarioError(f"{scenario.source}: adapters: {why}")
    leaving = bool(rule_of(inner, "goes_on"))
    limited: Any = MaxLoras(inner, max_loras=settings.max_loras, counts_leaving=leaving)
    for each in reversed(outer):
        limited = replace(each, inner=limited)
    return limited


def at_home(scenario: Scenario, router: Any) -> Any:
    """*router*, or what sends each adapter to its own machine, around it."""
    settings = scenario.adapters
    if settings is None or settings.placement == "everywhere":
        return router
    if scenario.autoscale is not None or any(pool.autoscale for pool in (scenario.pools or {}).values()):
        raise ScenarioError(
            f"{scenario.source}: adapters.placement apart has a machine for each adapter, and autoscale has them come and go; "
            "leave out one of the two"
        )
    return AdapterAffinity(router, apart=True)


def about_adapters(scenario: Scenario, workload: Workload) -> Iterator[str]:
    """Notes where the trace has adapters that nothing serves, and on what times of adapters were measured with."""
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
        yield f"Slots and times of adapters are those of {times.stack}, and serving_stack is {stack}."
