"""Everything of a scenario resolved to one `Experiment`, with what its results say of where it came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from sim.engine import Experiment
from sim.engine.record.streaming import Stream
from sim.errors import ScenarioError
from sim.scenario.assembly.adapters import at_home, with_adapters
from sim.scenario.assembly.asked import asked_for
from sim.scenario.assembly.context import beyond_own_context, limits_of, within_context
from sim.scenario.assembly.deployment import deployment_of
from sim.scenario.assembly.encoding import encode_of
from sim.scenario.assembly.fleet import fleet_of, with_slow
from sim.scenario.assembly.handover import check_models, handover_of
from sim.scenario.assembly.manifest import manifest_of
from sim.scenario.assembly.media import with_media
from sim.scenario.assembly.pools import PoolOf, pools_of
from sim.scenario.assembly.prefix_cache import check_router
from sim.scenario.assembly.ranks import check_asked, machine_of
from sim.scenario.assembly.replica import Encodes, build_pool
from sim.scenario.assembly.scheduler import policy_of
from sim.scenario.assembly.shared_context import check_shared_context
from sim.scenario.assembly.stopping import check_stops
from sim.scenario.assembly.tiers import check_stores
from sim.scenario.classes import check_classes, classed
from sim.scenario.explain import told_by
from sim.scenario.settings import Scenario
from sim.scenario.workload import workload_of
from workloads import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """An experiment, and what its results should say about where it came from."""

    experiment: Experiment
    manifest: dict[str, Any]
    slo: dict[str, float | None]
    class_limits: dict[str, dict[str, float]]
    """The limits that requests of a class keep together, by its name."""


def build(scenario: Scenario) -> Experiment:
    """Everything resolved to objects: files read, workload generated, model placed in memory.

    ScenarioError for what cannot be found, read or fitted.
    """
    return resolve(scenario).experiment


def resolve(scenario: Scenario, workload: Workload | None = None) -> Built:
    """The experiment that *scenario* describes, with its provenance; *workload* in place of the one that it names.

    Raises ScenarioError, naming the scenario and the key, where something cannot be found, read or fitted.
    """
    pools = [_deployed(pool) for pool in pools_of(scenario)]
    for pool in pools:
        check_shared_context(pool)
    limits = limits_of(scenario, pools)
    check_models(scenario, pools)
    check_asked(scenario, pools)
    workload = classed(scenario, workload_of(scenario)) if workload is None else workload
    workload = with_adapters(scenario, workload)
    workload, media = with_media(scenario, pools, workload)
    if scenario.pools is not None or scenario.placement is not None:
        workload, rows = asked_for(scenario, workload, pools)
    else:
        rows = {}
    workload, cut = within_context(workload, limits, rows)
    router = at_home(scenario, policy_of(scenario, "router"), sum(pool.replicas for pool in pools))
    check_stores(scenario, pools)
    built = [build_pool(pool, workload, rows, Encodes(scenario.encode, media)) for pool in pools]
    check_router(scenario, router, workload, (hosted.spec.block_tokens for pool in built for hosted in pool))
    check_classes(scenario, [hosted.spec.scheduler for pool in built for hosted in pool], workload)
    check_stops(scenario, pools, [hosted.spec for pool in built for hosted in pool])
    handover = handover_of(scenario, pools, built, workload)
    machines = [
        machine
        for pool, hosted in zip(pools, built, strict=True)
        for machine in (machine_of(pool.scenarios[0], [each.spec for each in hosted]),) * pool.replicas
    ]
    encode = encode_of(scenario, pools, workload, media)
    with told_by(scenario):
        experiment = Experiment(
            workload=workload,
            replicas=tuple(with_slow(scenario, machines)),
            router=router,
            seed=scenario.seed,
            stream=_stream(scenario, pools),
            handover=handover,
            encode=encode,
            fleet=fleet_of(scenario, pools, workload, None if encode is None else scenario.encode),
            **_front_end(scenario, pools),
        )
    manifest = manifest_of(scenario, pools, built, experiment)
    manifest["notes"] += [*cut, *dict.fromkeys(beyond_own_context(pools))]
    return Built(
        experiment=experiment,
        manifest=manifest,
        slo=scenario.slo.model_dump(),
        class_limits={name: each.slo.of_all for name, each in (scenario.classes or {}).items()},
    )


def _deployed(pool: PoolOf) -> PoolOf:
    return replace(pool, deployments=tuple(deployment_of(scenario) for scenario in pool.scenarios))


def _stream(scenario: Scenario, pools: Sequence[PoolOf]) -> Stream:
    """Which tokens reach a client together, by the rule of the serving stack."""
    rules: dict[str, Literal["tokens", "iterations"]] = {
        each.stack_name: each.stack.stream_by for pool in pools for each in pool.scenarios
    }
    if scenario.stream_interval > 1 and len(set(rules.values())) > 1:
        raise ScenarioError(
            f"{scenario.source}: stream_interval: {' and '.join(rules)} group tokens by different rules; give all pools one "
            "serving_stack"
        )
    return Stream(scenario.stream_interval, next(iter(rules.values())))


def _front_end(scenario: Scenario, pools: list[PoolOf]) -> dict[str, Any]:
    """The delays before the router, which stands in front of all pools."""
    found = {deployment.front_end for pool in pools for deployment in pool.deployments}
    if len(found) > 1:
        delays = ", ".join(
            f"{each.admission_s * 1e3:g} ms and {each.admission_s_per_token * 1e6:g} us a token"
            for each in sorted(found)
        )
        raise ScenarioError(
            f"{scenario.source}: pools: the serving stacks' front ends take different times ({delays}), and one router with "
            "several front ends is not modelled; give all pools one serving_stack and cost_model"
        )
    (front_end,) = found
    gateway = scenario.gateway
    per_token_s = gateway.delay_s_per_token + (front_end.admission_s_per_token if gateway.tokenizes else 0.0)
    return front_end._replace(
        admission_s=front_end.admission_s + gateway.delay_s,
        admission_s_per_token=front_end.admission_s_per_token + per_token_s,
    )._asdict()
