"""Classes of service of a scenario: put on its requests, and asked for by policies that cannot do without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from policies.classes import KeepSlo, Preempt, WeightedFair
from policies.routers import Reserve, Shed
from sim.errors import ScenarioError
from sim.scenario import named
from sim.scenario.explain import told_by
from sim.scenario.settings import Scenario
from workloads import ServiceClass, Workload, draw_classes, predict_outputs, with_classes


def classed(scenario: Scenario, workload: Workload) -> Workload:
    """The same requests with the scenario's classes and its predictor's guesses; ScenarioError where these do not fit them."""
    predictor, asked = scenario.workload.predictor, scenario.classes
    if predictor is not None:
        with told_by(scenario, "workload.predictor"):
            workload = predict_outputs(workload, predictor.error, scenario.seed)
    if asked is None:
        return workload
    shares = [each.share for each in asked.values() if each.share is not None]
    if shares and workload.class_index is not None:
        raise ScenarioError(f"{scenario.source}: classes: the trace has a column class; leave out the shares")
    if workload.class_index is not None:
        strangers = [name for name in workload.classes if name not in asked]
        if strangers:
            raise ScenarioError(
                f"{scenario.source}: classes: the trace has requests of class {strangers[0]}, which is not declared; declared are "
                f"{', '.join(asked)}"
            )
    elif not shares:
        raise ScenarioError(
            f"{scenario.source}: classes: give each a share, as the trace has no column class that says which a request is of"
        )
    with told_by(scenario, "classes"):
        classes = terms_of(scenario)
        return draw_classes(workload, classes, shares, scenario.seed) if shares else with_classes(workload, classes)


def terms_of(scenario: Scenario) -> list[ServiceClass]:
    """The terms that the scenario states for its classes, limits of the top level included; empty without classes."""
    top = scenario.slo.of_each
    return [
        ServiceClass(
            name=name,
            priority=each.priority,
            weight=each.weight,
            tenant=each.tenant,
            deadline_s=each.deadline_s,
            **{**top, **each.slo.of_each},
        )
        for name, each in (scenario.classes or {}).items()
    ]


def check_classes(scenario: Scenario, schedulers: Sequence[Any], workload: Workload) -> None:
    """ScenarioError where a scheduler sorts by a fact that the requests do not have."""
    for each in (layer for scheduler in schedulers for layer in named.layers(scheduler)):
        by = getattr(each, "by", None)
        limits = [limit.ttft_s for limit in workload.terms if limit.ttft_s is not None]
        why = None
        if isinstance(each, WeightedFair) and workload.tenant_index is None:
            why = "weighted_fair shares between tenants, and nobody says who sends a request; give classes, or a column tenant"
        elif (isinstance(each, KeepSlo) or by == "first_token") and not limits:
            name = "keep_slo" if isinstance(each, KeepSlo) else "order by first_token"
            why = f"{name} goes by a class's limit of the first token, and no class has one; give classes that have slo.ttft_s"
        elif by == "shortest_predicted" and workload.predicted_tokens is None:
            why = "order by shortest_predicted needs a predictor; give workload.predictor, or a column predicted_tokens"
        if why is not None:
            raise ScenarioError(f"{scenario.source}: scheduler: {why}")


def about_classes(schedulers: Sequence[Any], workload: Workload, router: Any, machines: int) -> Iterator[str]:
    """Notes where requests have classes or predictions, and what runs takes no heed of them."""
    given = workload.priority
    same = given is None or bool((given == given[0]).all())
    layers = [layer for scheduler in schedulers for layer in named.layers(scheduler)]
    yield from _about_schedulers(layers, workload, same_priority=same)
    for each in named.layers(router):
        yield from _about_router(each, machines, same_priority=same)


def _about_schedulers(layers: Sequence[Any], workload: Workload, *, same_priority: bool) -> Iterator[str]:
    if workload.class_index is not None and not workload.terms:
        yield (
            "The trace says of which class a request is, and the scenario says nothing of classes: they are names in the figures; "
            "classes: {NAME: {priority: ..., weight: ..., slo: ...}} says what they mean."
        )
    own = [each for each in layers if not _ours(each)]
    predicted = workload.predicted_tokens is not None
    if predicted and not own and all(getattr(each, "by", None) != "shortest_predicted" for each in layers):
        yield "Output lengths are predicted and no scheduler goes by it; {policy: order, by: shortest_predicted} does."
    weights = {each.weight for each in workload.terms}
    if len(weights) > 1 and not own and not any(isinstance(each, WeightedFair) for each in layers):
        yield "Classes have weights and no scheduler goes by them, only the index of fairness does; {policy: weighted_fair} does."
    if same_priority and any(isinstance(each, Preempt) for each in layers):
        yield "The scheduler preempts across priorities and all requests have the same, so that none preempts another."


def _about_router(router: Any, machines: int, *, same_priority: bool) -> Iterator[str]:
    name = "reserve" if isinstance(router, Reserve) else "shed" if isinstance(router, Shed) else ""
    if name and machines == 1:
        yield f"The router {name} is not asked: with one machine there is nothing to route."
    elif name and same_priority:
        yield f"The router {name} goes by priority and all requests have the same."
    elif isinstance(router, Reserve) and router.machines >= machines:
        yield f"The router reserve keeps {router.machines} machines of {machines}, so that nobody is kept from any."


def _ours(policy: Any) -> bool:
    return (getattr(policy, "__module__", None) or type(policy).__module__).startswith("policies.")
