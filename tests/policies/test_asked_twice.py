"""Policies are pure: one that is asked twice answers the same twice, and leaves the run as it was."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from policies.classes import KeepSlo, Preempt, WeightedFair
from policies.control import (
    Arima,
    Concurrency,
    Control,
    HoltWinters,
    Kalman,
    Knative,
    LastValue,
    Perfect,
    RateModel,
    Schedule,
    SeasonalNaive,
    Seen,
    TargetTracking,
    remembers_s,
)
from policies.driving import driving
from policies.eviction import Belady, Lfu, Lru, Retention
from policies.published import FasterTransformer, Orca, OrcaPaged, Static
from policies.ranks import PromptBalance
from policies.routers import (
    Refused,
    ReplicaLoad,
    RoundRobin,
    RoutedRequest,
)
from policies.sarathi import ChunkedOnly, DecodeMaximal
from policies.schedulers import Sarathi
from policies.view import Plan, PlanFunction, ReplicaView, Scheduler, evicts, plan_of
from policies.vllm import VllmV0
from policies.wrappers import Cap, EvictNewest, Order, Pad, RejectLate
from sim.engine import Columns, Experiment, MachineSpec, ReplicaSpec, run
from sim.engine.spec.lifecycle import FleetSpec, Scaling
from sim.scenario.named import CONTROLS, ROUTERS, SCHEDULERS, load
from tests.engine.costs import Linear, Ranked
from tests.engine.random_runs import (
    DECODINGS,
    a_trtllm,
    a_vllm,
    an_experiment,
    an_sglang,
    assert_same,
    with_scheduler,
    with_tiers,
)
from tests.routers import ROUTED, Around, may_be_of_ranks
from tests.sample import some
from workloads import ServiceClass, Trace, predict_outputs, with_classes

Draw = Callable[[random.Random], Scheduler]
Wrap = Callable[[random.Random, Scheduler], Scheduler]

ALONE: Mapping[str, Draw] = {
    "static": lambda rng: Static(rng.randrange(1, 6), max_prompts=rng.choice([None, 1])),
    "fastertransformer": lambda rng: FasterTransformer(rng.randrange(1, 6)),
    "orca": lambda rng: Orca(rng.randrange(1, 12)),
    "orca_paged": lambda rng: OrcaPaged(rng.randrange(1, 12)),
    # Who gives way by order of admission and who comes by priority would drive each other out for ever.
    "vllm": lambda rng: replace(a_vllm(rng), scheduler_reserve_full_isl=True),
    "vllm-v0": lambda rng: VllmV0(rng.randrange(10, 400), rng.randrange(1, 12)),
    "sglang": lambda rng: replace(an_sglang(rng), enable_mixed_chunk=rng.random() < 0.3, chunked_prefill_size=48),
    "sarathi": lambda rng: Sarathi(rng.randrange(4, 100), rng.randrange(1, 12)),
    "trtllm": lambda rng: a_trtllm(rng),
    "decode_maximal": lambda rng: DecodeMaximal(chunk=rng.randrange(8, 64), max_sequences=6, align=False),
    "chunked_only": lambda rng: ChunkedOnly(rng.randrange(4, 100), rng.randrange(1, 12)),
}
AROUND: Mapping[str, Wrap] = {
    "evict_newest": lambda _, inner: EvictNewest(inner),
    "pad": lambda rng, inner: Pad(inner, rng.randrange(1, 6)),
    "order": lambda rng, inner: Order(
        inner,
        by=rng.choice(["arrival", "priority", "deadline", "first_token", "shortest_prompt", "shortest_predicted"]),
    ),
    "cap": lambda rng, inner: (
        Cap(inner, max_sequences=rng.randrange(1, 8)) if rng.random() < 0.5 else Cap(inner, max_tokens=200)
    ),
    "reject": lambda _, inner: RejectLate(inner),
    "preempt": lambda _, inner: Preempt(inner),
    "weighted_fair": lambda _, inner: WeightedFair(inner),
    "keep_slo": lambda rng, inner: (
        KeepSlo(inner, otherwise=rng.choice(["reject", "demote"]))
        if rng.random() < 0.7
        else KeepSlo(inner, otherwise="shorten", max_tokens=rng.randrange(1, 20))
    ),
}


@dataclass(frozen=True)
class AskedTwice:
    """Asks a scheduler for a plan of the view, for one of half of its queue, and for the same again."""

    inner: Scheduler | PlanFunction

    def plan(self, view: ReplicaView, /) -> Plan:
        plan = plan_of(self.inner)
        first = plan(view)
        plan(replace(view, waiting=tuple(view.waiting)[len(view.waiting) // 2 :]))
        again = plan(view)
        assert again == first
        return again


def test_every_scheduler_that_is_shipped_is_asked() -> None:
    # An installed release plans for itself, and is asked nothing.
    assert {*ALONE, *AROUND} == {name for name, path in SCHEDULERS.items() if not driving(load(path))}
    wrappers = {name for name, path in SCHEDULERS.items() if "inner" in load(path).__dataclass_fields__}
    assert wrappers == {*AROUND}


def chain(rng: random.Random, name: str, wrappers: Sequence[str]) -> Scheduler:
    """The scheduler called *name* inside *wrappers*, the last of them outermost, with settings drawn at random."""
    found = ALONE[name](rng)
    for wrapper in wrappers:
        found = AROUND[wrapper](rng, found)
    return found if evicts(found) else EvictNewest(found)


def a_workload(rng: random.Random, n: int) -> Trace:
    """Prompts that begin alike, some with what another request emits, classes, deadlines, priorities, and more of them at once than
    memory holds."""
    groups = [rng.sample(range(10**6), 20) for _ in range(3)]
    rows: list[list[int]] = []
    for _ in range(n):
        begin = rng.choice(groups)[: rng.randrange(0, 16)]
        if rows and rng.random() < 0.3:
            begin = rng.choice(rows[-4:])[:16]
        rows.append([*begin, *rng.sample(range(10**6, 10**9), 4)])
    # The last ids of some name tokens that are emitted.
    prompts = [len(row) - rng.choice([0, 0, 3]) for row in rows]
    trace = Trace(
        arrival_ns=sorted(rng.randrange(10**8) for _ in range(n)),
        prompt_tokens=[4 * blocks - rng.randrange(4) for blocks in prompts],
        output_tokens=[rng.randrange(1 + 5 * (len(row) - n), 40) for row, n in zip(rows, prompts, strict=True)],
        prefix_blocks=np.array([id_ for row in rows for id_ in row]),
        prefix_offsets=np.cumsum([0, *map(len, rows)]),
        prefix_block_tokens=4,
        deadline_ns=[rng.choice([-1, -1, rng.randrange(10**8), 10**9]) for _ in rows],
    )
    return with_terms(rng, trace)


def with_terms(rng: random.Random, trace: Trace) -> Trace:
    terms = [
        ServiceClass(name=f"c{i}", priority=i - 1, ttft_s=rng.choice([None, 0.02, 0.2]), weight=rng.choice([1.0, 2.0]))
        for i in range(3)
    ]
    index = [rng.randrange(3) for _ in range(len(trace))]
    classed = with_classes(replace(trace, class_index=index, classes=("c0", "c1", "c2")), terms)
    return predict_outputs(classed, 0.5, rng.randrange(100))


def small(rng: random.Random, scheduler: Scheduler, cache: Any) -> Experiment:
    tokens = rng.choice([160, 260])
    block = 1 if cache == "tree" and rng.random() < 0.5 else 4
    speculates = rng.random() < 0.25
    spec = ReplicaSpec(
        cost=Linear(fixed_s=2e-3, row_s=1e-5),
        scheduler=scheduler,
        kv_blocks=tokens // block,
        block_tokens=block,
        prefix_cache=cache,
        prefix_drops_last=rng.random() < 0.3,
        eviction=rng.choice([None, Lru(), Lfu(), Retention(tokens=20), Retention(tokens=20, duration_s=0.01), Belady()])
        if cache
        else None,
        decoding=rng.choice(DECODINGS) if speculates else None,
        lookahead_tokens=3 if speculates else 0,
    )
    return Experiment(workload=a_workload(rng, 24), replicas=(spec,), router=RoundRobin())


def assert_asking_twice_changes_nothing(experiment: Experiment, scheduler: Scheduler) -> Columns:
    once = run(with_scheduler(experiment, scheduler))
    twice = run(with_scheduler(experiment, AskedTwice(scheduler)))
    assert_same(once, twice)
    assert {**once.meta, "wall_s": 0} == {**twice.meta, "wall_s": 0}
    return once


@pytest.mark.parametrize("name", ALONE)
def test_a_scheduler_that_is_asked_twice_alone_or_in_wrappers_leaves_the_run_as_it_was(name: str) -> None:
    rng = random.Random(f"{name} asked twice")
    wrappers = rng.sample([*AROUND], len(AROUND))
    found = evicted = 0
    for around, cache in (
        ([], "tree"),
        (wrappers[:4], "blocks"),
        (wrappers[4:], "tree"),
    ):
        scheduler = chain(rng, name, around)
        columns = assert_asking_twice_changes_nothing(small(rng, scheduler, cache), scheduler)
        evicted += columns.meta.get("prefix_evictions", 0)
        found += int(columns.requests["prefix_hit_tokens"].sum()) if cache else 0
    assert found > 40
    assert evicted > 20


@pytest.mark.slow(reason="many random runs")
@pytest.mark.parametrize("name", ALONE)
def test_schedulers_in_wrappers_that_are_asked_twice_leave_many_runs_as_they_were(name: str) -> None:
    """Each in each wrapper, and in several drawn at random, on machines of any kind."""
    for seed in some(range(40)):
        rng = random.Random(f"{name} asked twice {seed}")
        for around in (*([wrapper] for wrapper in AROUND), rng.choices([*AROUND], k=rng.randrange(2, 5))):
            scheduler = chain(rng, name, around)
            assert_asking_twice_changes_nothing(small(rng, scheduler, rng.choice(["tree", "blocks", None])), scheduler)
        scheduler = chain(rng, name, rng.choices([*AROUND], k=rng.randrange(3)))
        experiment = an_experiment(seed, speculative=rng.random() < 0.4)
        if isinstance(experiment.workload, Trace):
            experiment = replace(experiment, workload=with_terms(rng, experiment.workload))
            if rng.random() < 0.4:
                experiment = with_tiers(experiment, seed)
            assert_asking_twice_changes_nothing(experiment, scheduler)


# Routers, those of ranks, and control policies.


@dataclass(frozen=True)
class RoutedTwice(Around):
    """Asks a router twice."""

    def route(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad], /) -> int | Refused:
        first, again = (self.inner.route(request, replicas) for _ in range(2))
        assert again == first
        return again


@dataclass(frozen=True)
class WantedTwice:
    inner: Any

    @property
    def remembers_s(self) -> float:
        return remembers_s(self.inner)

    def wanted(self, seen: Seen, /) -> int:
        first, again = (self.inner.wanted(seen) for _ in range(2))
        assert again == first
        return again


WANTED: dict[str, Control] = {
    "target_tracking": TargetTracking(target=2.0),
    "concurrency": Concurrency(target=2.0),
    "knative": Knative(target=2.0, stable_s=0.03, panic_s=0.01),
    "rate_model": RateModel(rate_per_s=100.0, ttft_s=0.02, remembers_s=0.05),
    "schedule": Schedule(at_s=(0.0, 0.02, 0.06), machines=(1, 3, 2), every_s=0.1),
    "perfect": Perfect(rate_per_s=100.0, step_s=0.01).told([0.002 * i for i in range(50)], 0.01),
    "last_value": LastValue(rate_per_s=100.0, step_s=0.02),
    "kalman": Kalman(rate_per_s=100.0, step_s=0.01, remembered_s=1.0, inner=Concurrency(target=2.0)),
    "seasonal_naive": SeasonalNaive(rate_per_s=100.0, step_s=0.01, season_s=0.04),
    "holt_winters": HoltWinters(rate_per_s=100.0, step_s=0.01, season_s=0.02, seasons=4),
}
if find_spec("statsmodels") is not None:
    WANTED["arima"] = Arima(rate_per_s=100.0, step_s=0.01, remembered_s=1.0, refit_s=0.1)


def test_every_router_and_control_policy_that_is_shipped_is_asked() -> None:
    assert {*ROUTED} == {*ROUTERS}
    assert {*WANTED, "arima"} == {*CONTROLS}


@pytest.mark.parametrize("name", ROUTED)
def test_a_router_that_is_asked_twice_leaves_the_run_as_it_was(name: str) -> None:
    for number, router in enumerate(ROUTED[name]):
        rng = random.Random(f"{name} {number} asked twice")
        one = small(rng, chain(rng, "sglang", []), "tree")
        two = small(rng, chain(rng, "vllm", []), "blocks")
        sessions = replace(one.workload, session=[rng.randrange(-1, 6) for _ in range(len(one.workload))])
        machines = (one.machines[0], two.machines[0], two.machines[0])
        experiment = replace(one, workload=sessions, replicas=machines)
        once, twice = (run(replace(experiment, router=each)) for each in (router, RoutedTwice(router)))
        assert_same(once, twice)
        if not may_be_of_ranks(router):
            continue
        spec = replace(two.machines[0].hosted[0], cost=Ranked(fixed_s=2e-3))
        ranked = MachineSpec(hosted=(spec,), ranks=2, rank_router=router, prompt_balance=PromptBalance())
        again = replace(ranked, rank_router=RoutedTwice(router))
        assert_same(*(run(replace(two, replicas=(machine,))) for machine in (ranked, again)))


@pytest.mark.parametrize("name", WANTED)
def test_a_control_policy_that_is_asked_twice_leaves_the_run_as_it_was(name: str) -> None:
    rng = random.Random(f"{name} asked twice")
    experiment = small(rng, chain(rng, "vllm", []), "blocks")

    def scaled(policy: Control) -> Columns:
        scaling = Scaling(policy=policy, min_machines=1, initial=1, interval_s=0.01, phases=(("load", 0.01),))
        fleet = FleetSpec(pools=(0, 0, 0), names=("p",), scaling=(scaling,), failing=(None,))
        return run(replace(experiment, replicas=experiment.machines * 3, fleet=fleet))

    once = scaled(WANTED[name])
    assert_same(once, scaled(WantedTwice(WANTED[name])))
    assert len(np.unique(once.requests["replica"])) > 1
