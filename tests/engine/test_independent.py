"""The engine beside a second model of its rules: request by request, to the nanosecond, over random small workloads."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from policies.published import OrcaPaged
from policies.routers import LeastOutstanding, RoundRobin
from policies.schedulers import Sarathi
from policies.wrappers import EvictNewest
from sim.engine import Columns, Experiment, MachineSpec, ReplicaSpec, run
from tests.engine.costs import Linear
from tests.engine.independent import TICKS, Request, Rules, serve
from tests.sample import some
from workloads import ClosedLoop, Trace

TICK_S = 1 / (TICKS * 1e9)
STATUS = ("finished", "rejected", "unfinished")


def some_rules(rng: random.Random, n_stages: int, model: int | None) -> Rules:
    block_tokens = rng.choice([1, 4, 16])
    return Rules(
        fixed=rng.choice([TICKS * 10**6, TICKS * 5 * 10**6, TICKS * 10**6 + rng.randrange(TICKS)]),
        row=rng.choice([0, rng.randrange(TICKS * 10**5), TICKS * 10**4]),
        pair=rng.choice([0, rng.randrange(TICKS * 10**2)]),
        kv=rng.choice([0, TICKS * 10**3, rng.randrange(TICKS * 10**3)]),
        handover=rng.choice([0, TICKS * 10**5, rng.randrange(TICKS * 10**6)]) if n_stages > 1 else 0,
        n_stages=n_stages,
        micro_batches=rng.choice([n_stages, n_stages, 1, 2, 3]),
        budget=rng.choice([None, rng.randrange(4, 200)]),
        seats=rng.randrange(1, 13),
        watermark=rng.choice([0.0, 0.01, 0.1]),
        blocks=rng.choice([60, 120, 400, 4000]) // block_tokens + 4,
        block_tokens=block_tokens,
        longest=rng.choice([None, None, 90]),
        model=model,
    )


def spec_of(rules: Rules) -> ReplicaSpec:
    cost = Linear(
        fixed_s=rules.fixed * TICK_S, row_s=rules.row * TICK_S, pair_s=rules.pair * TICK_S, kv_s=rules.kv * TICK_S,
        n_stages=rules.n_stages, transfer_s=rules.handover * TICK_S,
    )  # fmt: skip
    inner = (
        OrcaPaged(rules.seats, watermark=rules.watermark)
        if rules.budget is None
        else Sarathi(rules.budget, rules.seats, watermark=rules.watermark)
    )
    return ReplicaSpec(
        cost=cost, scheduler=EvictNewest(inner), kv_blocks=rules.blocks, block_tokens=rules.block_tokens,
        max_model_len=rules.longest, micro_batches=rules.micro_batches, model=rules.model,
    )  # fmt: skip


def both(seed: int, *, off_by: int = 0) -> tuple[list[Request], Columns]:
    """One random case by both models; *off_by*: ticks that a row costs the second one more."""
    rng = random.Random(seed)
    n, n_models = rng.randrange(1, 60), rng.choice([1, 1, 2])
    prompt = [rng.randrange(0, 80) for _ in range(n)]
    output = [rng.randrange(0, 50) if tokens else rng.randrange(1, 50) for tokens in prompt]
    model = [rng.randrange(n_models) for _ in range(n)]
    machines = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        n_stages = rng.choice([1, 1, 2, 3, 4])
        machines.append([some_rules(rng, n_stages, i if n_models > 1 else None) for i in range(n_models)])
    concurrency = rng.randrange(1, 10) if n_models == 1 and rng.random() < 0.4 else None
    think = [rng.choice([0, rng.randrange(10**7)]) for _ in range(n)]
    grid = rng.choice([1, 10**6, 5 * 10**6])
    last = rng.choice([1, 10**7, 10**8, 10**9])
    arrival = sorted(rng.randrange(last + 1) // grid * grid for _ in range(n))
    router = rng.choice(["round_robin", "least_outstanding"])
    delay_ns, delay_ns_per_token = rng.choice([(0, 0), (0, 0), (10**6, 0), (1234, 10**4)])
    horizon_ns = rng.choice([None, None, None, rng.randrange(1, 10**9)])

    requests = [
        Request(i, prompt[i], output[i], think[i], model[i], arrival[i] if concurrency is None else -1)
        for i in range(n)
    ]
    slower = [[replace(rules, row=rules.row + off_by) for rules in machine] for machine in machines]
    serve(
        requests, slower, router=router, concurrency=concurrency, delay_ns=delay_ns,
        delay_ns_per_token=delay_ns_per_token, horizon_ns=horizon_ns,
    )  # fmt: skip
    workload: Trace | ClosedLoop
    if concurrency is None:
        columns = {"model_index": model, "models": ("a", "b")} if n_models > 1 else {}
        workload = Trace(arrival_ns=arrival, prompt_tokens=prompt, output_tokens=output, **columns)
    else:
        workload = ClosedLoop(
            prompt_tokens=np.array(prompt), output_tokens=np.array(output), concurrency=concurrency, think_ns=np.array(think)
        )  # fmt: skip
    experiment = Experiment(
        workload=workload,
        replicas=tuple(MachineSpec(hosted=tuple(spec_of(rules) for rules in machine)) for machine in machines),
        router=RoundRobin() if router == "round_robin" else LeastOutstanding(),
        horizon_ns=horizon_ns,
        admission_s=delay_ns * 1e-9,
        admission_s_per_token=delay_ns_per_token * 1e-9,
    )
    return requests, run(experiment)


def difference(requests: list[Request], columns: Columns) -> str | None:
    """Where the two first differ."""
    found = columns.requests
    for request in requests:
        names = {
            "status": request.status, "arrival_ns": request.arrival, "scheduled_ns": request.scheduled,
            "first_token_ns": request.first_token, "finish_ns": request.finish, "emitted_tokens": request.emitted,
            "preemptions": request.preemptions, "recomputed_tokens": request.recomputed,
        }  # fmt: skip
        for name, value in names.items():
            engine = STATUS[found["status"][request.id]] if name == "status" else int(found[name][request.id])
            if engine != value:
                return f"request {request.id}: {name} is {engine}, by the other model {value}"
    return None


def compared(both: Callable[[int], tuple[list[Request], Columns]]) -> Counter[str]:
    """What happened to the requests of twenty cases, in which the engine and the second model are the same."""
    seen: Counter[str] = Counter()
    for seed in range(20):
        requests, columns = both(seed)
        assert difference(requests, columns) is None, f"seed {seed}"
        seen.update(request.status for request in requests)
        seen["preempted"] += sum(request.preemptions for request in requests)
    return seen


def test_the_engine_equals_a_second_model_of_its_rules() -> None:
    seen = compared(both)
    assert min(seen["finished"], seen["rejected"], seen["unfinished"], seen["preempted"]) > 10


@pytest.mark.slow(reason="many random runs")
@pytest.mark.parametrize("seed", range(1000, 5000, 1000))
def test_the_engine_equals_a_second_model_of_its_rules_over_many_runs(seed: int) -> None:
    for case in some(range(seed, seed + 1000)):
        assert difference(*both(case)) is None, f"seed {case}"


def test_the_comparison_notices_a_row_that_costs_a_nanosecond_more() -> None:
    noticed = sum(difference(*both(seed, off_by=TICKS)) is not None for seed in range(8))
    assert noticed >= 6
