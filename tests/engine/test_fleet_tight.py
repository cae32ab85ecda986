"""Fleets of pools that have hardly any memory, whose machines fail and drain and whose links slow down: every request ends."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from policies.control import Schedule
from policies.published import Orca
from policies.routers import LeastKv, LeastOutstanding, Random, RoundRobin
from policies.schedulers import Sarathi
from policies.sglang import Sglang
from policies.view import Scheduler
from policies.vllm import Vllm
from policies.wrappers import EvictNewest
from sim.engine import FINISHED, REJECTED, UNFINISHED, Experiment, MachineSpec, ReplicaSpec
from sim.engine.record.columns import LOST
from sim.engine.spec.lifecycle import FleetSpec, Outage, Scaling
from sim.engine.spec.roles import HandoverSpec, KvPath
from sim.engine.tiers.links import LinkSpec
from tests.engine.costs import Linear, Ranked
from tests.engine.random_runs import run_both_ways, some_slowdowns
from workloads import Trace

MS = 1_000_000


def a_scheduler(rng: random.Random) -> Scheduler:
    return rng.choice(
        [
            Vllm(max_num_seqs=rng.choice([2, 8]), max_num_batched_tokens=rng.choice([16, 64])),
            Vllm(max_num_seqs=8, max_num_batched_tokens=64, async_scheduling=False),
            EvictNewest(Sarathi(token_budget=32)),
            EvictNewest(Sglang(schedule_conservativeness=0.3)),
            Orca(max_sequences=4),
        ]
    )


def tight_pools(seed: int) -> Experiment:
    """One or two machines that prefill and one to three that decode, with room for two or three requests each; machines that fail
    come back, and one of each pool at least does not drain."""
    rng = random.Random(f"tight pools {seed}")
    n_prefill, n_decode = rng.choice([1, 1, 2]), rng.choice([1, 2, 2, 3])
    block_tokens = rng.choice([1, 4, 16])
    prompt = np.array([rng.randrange(1, 60) for _ in range(rng.choice([10, 25, 40]))])
    output = np.array([rng.choice([1, 2, 5, 20]) for _ in prompt])
    blocks = -(-(max(prompt) + max(output)) // block_tokens) + 2

    def machine(role: str) -> MachineSpec | ReplicaSpec:
        one = ReplicaSpec(
            cost=Ranked(fixed_s=1e-3, row_s=1e-5),
            scheduler=a_scheduler(rng),
            kv_blocks=int(blocks * rng.choice([1, 1.5, 2.5])),
            block_tokens=block_tokens,
            prefix_cache=rng.choice([None, "blocks"]),
        )
        if role == "decode" and rng.random() < 0.2:
            return MachineSpec(hosted=(one,), ranks=2, rank_router=RoundRobin())
        return replace(one, cost=Linear(fixed_s=1e-3, row_s=1e-5))

    room = rng.choice(["before_prefill", "before_prefill", "after_prefill"])
    roles = ("prefill",) * n_prefill + ("decode",) * n_decode
    pools = (0,) * n_prefill + (1,) * n_decode
    of_pool = [machine("prefill"), machine("decode")]

    def scaling(n: int) -> Scaling | None:
        if n == 1 or rng.random() < 0.3:
            return None
        policy = Schedule(
            at_s=(0.0, 0.03, 0.06), machines=tuple(rng.randrange(1, n + 1) for _ in range(3)), every_s=0.1
        )
        return Scaling(
            policy=policy, min_machines=1, initial=n, interval_s=0.01, down_window_s=0.0, drain_s=rng.choice([None, 0.0, 0.01])
        )  # fmt: skip

    share: dict[str, Any] = {}
    if rng.random() < 0.5:
        share = {
            "prefix_blocks": np.array([rng.randrange(4) for _ in prompt]),
            "prefix_offsets": np.arange(len(prompt) + 1),
            "prefix_block_tokens": 16,
        }
        prompt = np.maximum(prompt, 16)
    return Experiment(
        workload=Trace(
            arrival_ns=np.sort([rng.randrange(100 * MS) for _ in prompt]), prompt_tokens=prompt, output_tokens=output, **share
        ),
        replicas=tuple(of_pool[pool] for pool in pools),
        router=RoundRobin(),
        seed=seed,
        handover=HandoverSpec(
            roles=roles,
            pools=pools,
            paths={
                (0, 1): KvPath(
                    link=LinkSpec(
                        rng.choice([1e7, 3e6]),
                        latency_s=rng.choice([0.0, 1e-4]),
                        slowdowns=some_slowdowns(rng),
                    ),
                    shared=rng.choice(["sender", "receiver", "pair", "pools"]),
                    bytes_per_token=1000.0,
                    layers=rng.choice([1, 4]) if room == "before_prefill" else 1,
                )
            },
            router=rng.choice([RoundRobin(), Random(), LeastOutstanding(), LeastKv()]),
            first_token=rng.choice(["prefill", "arrival", "decode"]),
            room=room,
            local_tokens=rng.choice([0, 0, 10]),
            headroom_tokens=rng.choice([0, 0, 8]),
        ),
        fleet=FleetSpec(
            pools=pools,
            names=("p", "d"),
            scaling=(scaling(n_prefill), scaling(n_decode)),
            failing=(None, None),
            outages=tuple(
                Outage(machine=rng.randrange(len(roles)), at_s=rng.random() * 0.15, for_s=rng.choice([0.0, 0.01, 0.05]))
                for _ in range(rng.choice([1, 3, 6]))
            ),
            in_flight=rng.choice(["resume", "retry", "lose"]),
            when_none=rng.choice(["wait", "wait", "wait", "lose"]),
        ),
    )  # fmt: skip


def assert_all_end(seeds: range) -> None:
    for seed in seeds:
        experiment = tight_pools(seed)
        found = run_both_ways(experiment, check_invariants=seed % 3 == 0)
        status, facts = found.requests["status"].tolist(), found.meta["fleet"]
        assert {*status} <= {FINISHED, REJECTED, LOST}, seed
        assert status.count(LOST) == facts["lost"]
        assert UNFINISHED not in status
        assert facts["held_to_the_end"] == 0
        done = found.requests["status"] == FINISHED
        np.testing.assert_array_equal(found.requests["emitted_tokens"][done], found.requests["output_tokens"][done])
        assert (found.requests["reason"][~done] >= 0).all()


def test_every_request_of_a_fleet_of_pools_with_hardly_any_memory_ends() -> None:
    assert_all_end(range(8))


@pytest.mark.slow(reason="many random runs")
@pytest.mark.parametrize("seed", range(1000, 1500, 50))
def test_every_request_of_a_fleet_of_pools_with_hardly_any_memory_ends_over_many_runs(seed: int) -> None:
    assert_all_end(range(seed, seed + 50))
