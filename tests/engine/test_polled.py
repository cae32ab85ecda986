"""Machines publish the same to routers that poll whether time was stepped or spanned."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from policies.routers import Knowledge, Refused, ReplicaLoad, RoundRobin, RoutedRequest, Shed, VllmRanks, route_of
from policies.schedulers import Sarathi
from policies.sglang import Sglang
from policies.trtllm import TrtLlm
from policies.view import Scheduler
from policies.vllm import Vllm
from policies.wrappers import EvictNewest
from sim.engine import Experiment, MachineSpec, ReplicaSpec, run
from sim.engine.spec.roles import HandoverSpec, KvPath
from sim.engine.tiers.links import LinkSpec
from tests.engine.costs import Ranked
from tests.engine.random_runs import DECODINGS, assert_same, beginnings, with_fleet
from tests.routers import ROUTERS, Around
from tests.sample import some
from workloads import Trace


@dataclass(frozen=True)
class Polls(Around):
    """Routes as *inner* by loads that are read every *poll_s* seconds, and writes down what it is told."""

    poll_s: float
    told: list[list[tuple[int, int, int, float, int]]] = field(default_factory=list[Any])

    @property
    def knows(self) -> Knowledge:
        return replace(super().knows or Knowledge(), poll_s=self.poll_s)

    def route(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad], /) -> int | Refused:
        self.told.append(
            [(each.waiting, each.running, each.kv_blocks_used, each.kv_use, each.prefill_tokens) for each in replicas]
        )
        return route_of(self.inner)(request, replicas)


def a_scheduler(rng: random.Random) -> Scheduler:
    """One with few seats, more often with plans made ahead than not."""
    seats = rng.choice([1, 2, 3, 6])
    later = rng.random() < 0.4
    return rng.choice(
        [
            *[
                Vllm(
                    max_num_batched_tokens=rng.choice([16, 200]),
                    max_num_seqs=seats,
                    async_scheduling=not later,
                    scheduler_reserve_full_isl=rng.random() < 0.5,
                )
            ]
            * 4,
            EvictNewest(TrtLlm(max_batch_size=seats, max_num_tokens=200, disable_overlap_scheduler=later)),
            EvictNewest(Sglang(max_running_requests=seats, disable_overlap_schedule=later)),
            EvictNewest(Sarathi(64, seats)),
        ]
    )


def a_run(seed: int) -> Experiment:
    """Machines that are full, answers so long that many polls fall into one span: alone, with ranks, in pipelines, shared by
    two models, with prefill and decode apart, in fleets that change and fail."""
    rng = random.Random(f"polls of {seed}")
    n = rng.randrange(10, 30)
    prompt = [rng.randrange(1, 60) for _ in range(n)]
    output = [rng.choice([2, 60, 400]) + rng.randrange(60) for _ in range(n)]
    last_ns = rng.choice([10**8, 10**9, 3 * 10**9])
    trace = Trace(
        arrival_ns=sorted(rng.randrange(last_ns) // 10**6 * 10**6 + rng.choice([0, 1]) for _ in range(n)),
        prompt_tokens=prompt,
        output_tokens=output,
        session=np.array([rng.randrange(-1, 4) for _ in range(n)]),
        priority=np.array([rng.randrange(2) for _ in range(n)]),
        **beginnings(random.Random(f"contents of polls of {seed}"), prompt, output),
    )
    kind = rng.choice(["alone", "alone", "alone", "ranks", "ranks", "stages", "shared", "shared", "apart"])
    speculates = rng.random() < 0.15
    cost = Ranked(
        fixed_s=rng.choice([1e-3, 1.2345e-3]),
        kv_s=rng.choice([0.0, 1e-7]),
        row_s=rng.choice([0.0, 1e-5]),
        n_stages=2 if kind == "stages" else 1,
    )
    tenant = ReplicaSpec(
        cost=cost,
        scheduler=a_scheduler(rng),
        kv_blocks=rng.choice([140, 300, 2000]),
        block_tokens=4,
        prefix_cache="blocks",
        decoding=rng.choice(DECODINGS) if speculates else None,
    )
    machine: MachineSpec | ReplicaSpec = tenant
    if kind == "ranks":
        machine = MachineSpec(hosted=(tenant,), ranks=2, rank_router=rng.choice([RoundRobin(), VllmRanks()]))
    if kind == "shared":
        machine = MachineSpec(hosted=(replace(tenant, model=0), replace(tenant, model=1, scheduler=a_scheduler(rng))))
        trace = trace.with_models(("small", "large"), np.array([rng.randrange(2) for _ in range(n)]))
    poll_s = rng.choice([1e-3, 7e-3, 0.05])
    experiment = Experiment(
        workload=trace,
        replicas=(machine,) * rng.choice([2, 3]),
        router=Polls(rng.choice(ROUTERS), poll_s),
        seed=seed,
    )
    if kind == "apart":
        many = len(experiment.replicas)
        handover = HandoverSpec(
            roles=("prefill",) * many + ("decode",) * many,
            pools=(0,) * many + (1,) * many,
            paths={(0, 1): KvPath(link=LinkSpec(1e7, latency_s=1e-4), bytes_per_token=1000.0)},
            router=Polls(rng.choice([router for router in ROUTERS if not isinstance(router, Shed)]), poll_s),
            room=rng.choice(["after_prefill", "before_prefill"]),
        )
        experiment = replace(experiment, replicas=experiment.replicas * 2, handover=handover)
    return with_fleet(experiment, seed) if rng.random() < 0.3 else experiment


def told(experiment: Experiment) -> list[Any]:
    routers = (experiment.router, None if experiment.handover is None else experiment.handover.router)
    return [router.told for router in routers if isinstance(router, Polls)]


def assert_published_alike(seeds: range) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        spanned, stepped = a_run(seed), a_run(seed)
        fast, slow = run(spanned), run(stepped, fast_forward=False)
        assert told(spanned) == told(stepped), f"seed {seed}"
        assert_same(fast, slow)
        seen["events"] += fast.meta["events"]
        seen["iterations"] += slow.meta["events"]
        seen["preemptions"] += fast.meta["preemptions"]
        seen["fleets"] += spanned.fleet is not None
        seen["asked while somebody waited"] += sum(
            any(load[0] for load in loads) for each in told(spanned) for loads in each
        )
    return seen


def test_machines_publish_the_same_in_spans_as_in_steps() -> None:
    seen = assert_published_alike(range(13))
    assert seen["events"] < 0.5 * seen["iterations"]
    assert min(seen["preemptions"], seen["fleets"], seen["asked while somebody waited"]) > 3


@pytest.mark.slow(reason="many random runs")
@pytest.mark.parametrize("seed", range(1000, 3000, 500))
def test_machines_publish_the_same_in_spans_as_in_steps_over_many_runs(seed: int) -> None:
    assert_published_alike(some(range(seed, seed + 500)))
