"""LoRA adapters of a scenario: put on its requests, held to the slots of its servers, and priced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hwmodels.adapters import AdapterCost, least_slot_rank, times_of
from hwmodels.deployment import Deployment
from policies.adapters import MaxLoras
from policies.driving import driving
from policies.view import rule_of
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
        max_lora_rank=settings.max_lora_rank or least_slot_rank(max(settings.ranks)),
        times=times_of(_release(scenario)),
    )


def _release(scenario: Scenario) -> str | None:
    """The release of vLLM that is served; None: the newest, and for other stacks."""
    return scenario.serving_release if scenario.stack_name == "vllm" else None


def adapters_of(
    scenario: Scenario, deployment: Deployment, workload: Workload, *, shared: bool, speculates: bool
) -> AdapterSpec | None:
    """The adapters that an engine core serves; None without any. *shared*: its machine serves other models, too. ScenarioError for
    what is not modelled beside them."""
    settings = scenario.adapters
    if settings is None or workload.adapter is None:
        return None
    with told_by(scenario, "adapters"):
        parallel = deployment.parallel
        for what, there in (
            ("a pipeline (parallel.pipeline, micro_batches)", parallel.pipeline > 1 or (scenario.micro_batches or 1) > 1),
            ("ranks (parallel.data)", parallel.data > 1),
            ("models that share a machine", shared),
            ("speculation (decoding)", speculates),
        ):
            if there:
                raise ScenarioError(f"adapters beside {what} are not modelled; leave out one of the two")
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
    """*scheduler* with the limit of adapters in a batch around it; ScenarioError for one whose rule is not known."""
    settings = scenario.adapters
    if settings is None:
        return scheduler
    inner = list(named.layers(scheduler))[-1]
    name = scenario.scheduler.policy
    why = None
    if driving(inner):
        why = f"{name} runs an installed scheduler, which is not told of adapters; take policy vllm"
    elif getattr(inner, "scheduling_policy", "fcfs") != "fcfs":
        why = "slots are modelled for queues in order of arrival; give scheduling_policy: fcfs"
    elif type(inner).__module__.partition(".")[2].partition(".")[0] in ("sglang", "trtllm"):
        why = f"the rule of slots is vLLM's, and {name} has another, which is not modelled; take policy vllm"
    if why is not None:
        raise ScenarioError(f"{scenario.source}: adapters: {why}")
    return MaxLoras(
        scheduler, max_loras=settings.max_loras, counts_leaving=bool(rule_of(scheduler, "goes_on"))
    )


def about_adapters(scenario: Scenario, workload: Workload) -> Iterator[str]:
    """Notes where the trace has adapters that nothing serves, and on what times of adapters were measured with."""
    if scenario.adapters is None:
        if workload.adapter is not None:
            yield "The trace says which adapters requests ask for, and there is no section adapters: all are served by the model itself."
        return
    times = times_of(_release(scenario))
    yield (
        f"What adapters add to iterations and what loads take is that of vLLM {'0.8.5' if times.release != '0.5' else '0.5.0'} on one "
        "GPU of 64 GB, by the shapes of the model's layers."
    )
    if scenario.stack_name != "vllm":
        yield f"Slots and times of adapters are vLLM's, and serving_stack is {scenario.stack_name}."
