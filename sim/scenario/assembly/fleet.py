"""Machines in time: from `autoscale` and `failures` to a `FleetSpec`, and what cannot be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

from hwmodels.cold_starts import cold_start, cold_starts
from hwmodels.cost import CostModel
from hwmodels.slowed import slowed
from policies.control import Forecast, Perfect, PoolSeen, Schedule, Seen
from policies.control.hpa import WINDOW_S
from sim.engine import MachineSpec, ReplicaSpec
from sim.engine.spec.lifecycle import Failing, FleetSpec, Life, Scaling
from sim.errors import ScenarioError
from sim.scenario.assembly.pools import PoolOf
from sim.scenario.encoding import EncodeSettings
from sim.scenario.explain import told_by
from sim.scenario.fleet import Autoscale
from sim.scenario.settings import Scenario
from sim.text import unknown
from workloads import Workload


def fleet_of(
    scenario: Scenario, pools: Sequence[PoolOf], workload: Workload, encoders: EncodeSettings | None
) -> FleetSpec | None:
    """The fleet of the machines of *pools*, and of those that encode, if any, behind them; None where all of them are there from
    beginning to end.

    ScenarioError for what cannot be, or is not modelled.
    """
    failures = scenario.failures
    scaled = [pool.autoscale for pool in pools] + ([] if encoders is None else [encoders.autoscale])
    if failures is None and not any(scaled):
        return None
    failing = None
    if failures is not None and failures.mean_up_s is not None and failures.mean_down_s is not None:
        failing = Failing(
            up=Life(mean_s=failures.mean_up_s, shape=failures.shape), down=Life(mean_s=failures.mean_down_s)
        )
    with told_by(scenario, "failures"):
        counts, names = [pool.replicas for pool in pools], [pool.name or "all" for pool in pools]
        scaling = [
            None if pool.autoscale is None else _scaling(scenario, pool, pool.autoscale, pools, workload)
            for pool in pools
        ]
        if encoders is not None:
            counts.append(encoders.replicas if encoders.autoscale is None else encoders.autoscale.max)
            names.append("encode")
            scaling.append(None if encoders.autoscale is None else _scaling_of_encoders(scenario, encoders))
        return FleetSpec(
            pools=tuple(number for number, n in enumerate(counts) for _ in range(n)),
            names=tuple(names),
            scaling=tuple(scaling),
            failing=(failing,) * len(counts),
            outages=() if failures is None else tuple(failures.times),
            **({} if failures is None else failures.model_dump(include={"in_flight", "retries", "when_none"})),
        )


def _scaling(
    scenario: Scenario, pool: PoolOf, settings: Autoscale, pools: Sequence[PoolOf], workload: Workload
) -> Scaling:
    prefix = f"{scenario.source}: {f'pools.{pool.name}.' if pool.name else ''}autoscale"
    arrivals = partial(_known_arrivals_s, scenario, pool, pools, workload)
    return _scaled(settings, prefix, pool.scenarios[0].replicas, arrivals)


def _scaling_of_encoders(scenario: Scenario, encoders: EncodeSettings) -> Scaling:
    assert encoders.autoscale is not None
    return _scaled(encoders.autoscale, f"{scenario.source}: encode.autoscale", encoders.replicas, lambda: None)


def _scaled(
    settings: Autoscale, prefix: str, initial: int, known_arrivals_s: Callable[[], list[float] | None]
) -> Scaling:
    """The scaling of one that begins with *initial* machines, and whose requests arrive as *known_arrivals_s* says, if it does."""
    policy = settings.policy.made(f"{prefix}.policy")
    phases = _phases(settings, prefix)
    interval_s: float = getattr(policy, "interval_s", 15.0) if settings.interval_s is None else settings.interval_s
    if isinstance(policy, Schedule):
        outside = [n for n in policy.machines if not settings.min <= n <= settings.max]
        if outside:
            raise ScenarioError(
                f"{prefix}.policy: the schedule asks for {outside[0]} machines, and there are {settings.min} (min) to "
                f"{settings.max} (max); change one of them"
            )
    if isinstance(policy, Perfect):
        arrival_s = known_arrivals_s()
        if arrival_s is None:
            raise ScenarioError(
                f"{prefix}.policy: perfect knows when requests of a trace arrive that no other pool can serve; "
                "closed-loop clients have no such times, and where several pools serve a model, or short prompts skip those that "
                "prefill, the router says which gets a request; choose another policy"
            )
        policy = policy.told(arrival_s, sum(seconds for _, seconds in phases))
    if isinstance(policy, Forecast):
        try:
            policy = policy.fitting(interval_s, sum(seconds for _, seconds in phases))
        except ValueError as error:
            raise ScenarioError(f"{prefix}.policy: {error}") from None
    if isinstance(policy, (Schedule, Perfect)):
        # What they know holds from the beginning.
        asked = policy.wanted(Seen(interval_s=interval_s, mine=PoolSeen()))
        initial = min(max(asked, settings.min), settings.max)
    if not settings.min <= initial <= settings.max:
        raise ScenarioError(
            f"{prefix}: the run begins with {initial} machines (replicas), and there are {settings.min} (min) to {settings.max} "
            "(max); change one of them"
        )
    down_s, hpa = settings.down_window_s, None
    if getattr(policy, "hpa", False):
        hpa = "default" if down_s is None and settings.up_window_s is None else "behavior"
    if down_s is None:
        down_s = 0.0 if hpa is None else WINDOW_S
    return Scaling(
        policy=policy,
        min_machines=settings.min,
        initial=initial,
        interval_s=interval_s,
        phases=phases,
        down_window_s=down_s,
        up_window_s=settings.up_window_s or 0.0,
        hpa=hpa,
        drain_s=settings.drain_s,
    )


def _known_arrivals_s(
    scenario: Scenario, pool: PoolOf, pools: Sequence[PoolOf], workload: Workload
) -> list[float] | None:
    """The times at which the requests of *pool* arrive at the deployment; None where that is not known before the run."""
    rivals = [each for each in pools if each is not pool and set(each.serves) & set(pool.serves)]
    arrival_ns = workload.planned_ns
    if arrival_ns is None or any("both" in (each.role, pool.role) or each.role == pool.role for each in rivals):
        return None
    if pool.role == "prefill" and scenario.handover is not None and scenario.handover.local_prefill_tokens:
        return None
    if workload.model_index is not None:
        arrival_ns = arrival_ns[[workload.models[index] in pool.serves for index in workload.model_index.tolist()]]
    return (arrival_ns * 1e-9).tolist()


def _phases(settings: Autoscale, prefix: str) -> tuple[tuple[str, float], ...]:
    start = settings.start
    if isinstance(start, str):
        if start not in cold_starts():
            raise ScenarioError(unknown(f"{prefix}.start: {start!r} is not a measured start", start, cold_starts()))
        found = cold_start(start).phases
    else:
        found = tuple((start or {}).items())
    return (*([("provision", settings.provision_s)] if settings.provision_s else []), *found)


def with_slow(scenario: Scenario, machines: Sequence[ReplicaSpec | MachineSpec]) -> list[ReplicaSpec | MachineSpec]:
    """The machines, those slower that `failures.slow` names; ScenarioError for one that is not there."""
    found = list(machines)
    for each in () if scenario.failures is None else scenario.failures.slow:
        if each.machine >= len(found):
            raise ScenarioError(
                f"{scenario.source}: failures.slow: there is no machine {each.machine}; they count from 0 to {len(found) - 1}"
            )
        spec = found[each.machine]
        specs = spec.hosted if isinstance(spec, MachineSpec) else (spec,)
        slower = tuple(
            replace(
                hosted,
                cost=slowed(cast("CostModel", hosted.cost), each.factor),
                draft_cost=None if hosted.draft_cost is None else slowed(hosted.draft_cost, each.factor),
                speculation_overhead_s=hosted.speculation_overhead_s * each.factor,
            )
            for hosted in specs
        )
        found[each.machine] = replace(spec, hosted=slower) if isinstance(spec, MachineSpec) else slower[0]
    return found


def about_fleet(pools: Sequence[PoolOf]) -> Iterator[str]:
    """A note about how machines start where no start is given, or where that of another model stands in."""
    for pool in pools:
        settings = pool.autoscale
        if settings is None:
            continue
        if settings.start is None:
            after = f"{settings.provision_s:g} s of provisioning" if settings.provision_s else "no time at all"
            yield (
                f"autoscale.start says nothing, so that machines are ready after {after}; give its phases, such as start: {{image: "
                "2, weights: 130}, or a measured start by name."
            )
        elif isinstance(settings.start, str):
            found = cold_start(settings.start)
            yield f"Machines start as measured of {found.what} ({found.source}), whatever is started here."
