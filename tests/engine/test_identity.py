"""Spans give what stepping gives, to the nanosecond, over random runs; and a policy that lies is found out."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest

from policies.acceptance import BetaAlpha, Iid, PerPosition
from policies.decoding import Speculative
from policies.routers import LeastKv, LeastOutstanding, PowerOfTwo, Random, RoundRobin
from policies.sarathi import ChunkedOnly, DecodeMaximal, Padded
from policies.schedulers import Orca, Sarathi, Static, Vllm
from policies.view import UNTIL_CHANGE, Plan, ReplicaView
from policies.wrappers import EvictNewest
from sim.engine import Columns, Experiment, ReplicaSpec, run
from tests.engine.costs import Linear
from workloads import ClosedLoop, Trace

DECODINGS = (
    Speculative(method="draft_model", num_speculative_tokens=3, acceptance=Iid(alpha=0.6)),
    Speculative(method="eagle", num_speculative_tokens=4, acceptance=BetaAlpha(mean=0.7, sd=0.1)),
    Speculative(method="ngram", num_speculative_tokens=2, acceptance=PerPosition(rates=(0.5, 0.3), kind="conditional")),
    Speculative(
        method="draft_model",
        num_speculative_tokens=[[1, 2, 5], [3, 6, 2], [7, None, 0]],
        acceptance=Iid(alpha=0.8),
    ),
)


@dataclass(frozen=True)
class FewestFirst:
    """Admits whole prompts one at a time, and lets only the few sequences with the least context decode."""

    n: int

    def plan(self, view: ReplicaView, /) -> Plan:
        free = view.free_blocks - view.growth_blocks
        chunks = tuple((seq.id, seq.tokens) for seq in view.waiting[:1] if view.blocks(seq.tokens) <= free)
        ranked = sorted(view.running, key=lambda seq: (seq.cached_tokens, seq.id))
        return Plan(decode=tuple(seq.id for seq in ranked[: self.n]), run=chunks)


def a_scheduler(rng: random.Random):
    return EvictNewest(
        rng.choice(
            [
                Static(rng.randrange(1, 6)),
                Orca(rng.randrange(1, 12)),
                Vllm(rng.randrange(10, 400), rng.randrange(1, 12)),
                Sarathi(rng.randrange(4, 200), rng.randrange(1, 12)),
                Sarathi(rng.randrange(4, 100), rng.randrange(4, 40)),
                DecodeMaximal(chunk=rng.randrange(8, 64), max_sequences=rng.randrange(1, 8), align=False),
                ChunkedOnly(rng.randrange(4, 100), rng.randrange(1, 12)),
                Padded(rng.randrange(1, 6)),
                FewestFirst(rng.randrange(1, 4)),
            ]
        )
    )


def an_experiment(seed: int, *, speculative: bool) -> Experiment:
    """Anything that users might run, small: pools tight and ample, arrivals on and off the grid of iteration ends."""
    rng = random.Random(seed)
    n = rng.randrange(1, 60)
    cost = Linear(
        fixed_s=rng.choice([1e-3, 5e-3, 1.25e-3]),
        row_s=rng.choice([0.0, 1e-5, 1e-4]),
        kv_s=rng.choice([0.0, 4e-8, 1e-6]),
        window_s=1e-8,
        window_tokens=rng.choice([None, None, 40]),
    )
    block_tokens = rng.choice([1, 4, 16])
    prompt = [rng.randrange(0, 80) for _ in range(n)]
    output = [rng.randrange(0, 50) if tokens else rng.randrange(1, 50) for tokens in prompt]
    if rng.random() < 0.3:
        think_ns = None if rng.random() < 0.5 else np.array([rng.randrange(0, 10**7) for _ in range(n)])
        workload = ClosedLoop(
            prompt_tokens=np.array(prompt),
            output_tokens=np.array(output),
            concurrency=rng.randrange(1, 10),
            think_ns=think_ns,
        )
    else:
        grid = rng.choice([1, 1_000_000, 5_000_000, 1_250_000])
        last = rng.choice([1, 10**7, 10**8, 10**9])
        arrival = sorted(rng.randrange(0, last + 1) // grid * grid for _ in range(n))
        workload = Trace(arrival_ns=arrival, prompt_tokens=prompt, output_tokens=output)
    replica = ReplicaSpec(
        cost=cost,
        scheduler=a_scheduler(rng),
        kv_blocks=rng.choice([60, 120, 400, 4000]) // block_tokens + 4,
        block_tokens=block_tokens,
        decoding=rng.choice(DECODINGS) if speculative else None,
        draft_cost=rng.choice([None, Linear(fixed_s=2e-4, kv_s=1e-9)]) if speculative else None,
        speculation_overhead_s=rng.choice([0.0, 1e-4]) if speculative else 0.0,
    )
    return Experiment(
        workload=workload,
        replicas=(replica,) * rng.choice([1, 1, 2, 3]),
        router=rng.choice([RoundRobin(), Random(), LeastOutstanding(), PowerOfTwo(), LeastKv()]),
        seed=seed,
        horizon_ns=rng.choice([None, None, None, rng.randrange(1, 10**9)]),
        admission_s=rng.choice([0.0, 0.0, 1e-3]),
        admission_s_per_token=rng.choice([0.0, 1e-5]),
    )


def gap_counts(columns: Columns) -> dict[int, int]:
    gaps, weights = columns.itl()
    lengths, index = np.unique(gaps, return_inverse=True)
    return dict(zip(lengths.tolist(), np.bincount(index, weights=weights).tolist(), strict=True))


def assert_same(a: Columns, b: Columns) -> None:
    for name, column in a.requests.items():
        np.testing.assert_array_equal(column, b.requests[name], err_msg=name)
    iterations, stepped = a.iterations(), b.iterations()
    for name, column in iterations.items():
        np.testing.assert_array_equal(column, stepped[name], err_msg=name)
    assert gap_counts(a) == gap_counts(b)


@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])
@pytest.mark.parametrize("seed", range(0, 200, 50))
def test_spans_equal_stepping(seed: int, speculative: bool) -> None:
    for case in range(seed, seed + 50):
        experiment = an_experiment(case, speculative=speculative)
        assert_same(run(experiment), run(experiment, fast_forward=False))


@pytest.mark.slow
@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])
def test_spans_equal_stepping_over_two_thousand_runs(speculative: bool) -> None:
    for case in range(1000, 2000):
        experiment = an_experiment(case, speculative=speculative)
        assert_same(run(experiment), run(experiment, fast_forward=False))


def test_the_random_runs_cover_what_they_should() -> None:
    runs = [run(an_experiment(seed, speculative=False)) for seed in range(100)]
    assert sum(columns.meta["preemptions"] for columns in runs) > 100
    statuses = np.concatenate([columns.requests["status"] for columns in runs])
    assert set(statuses.tolist()) == {0, 1, 2}
    assert sum(columns.meta["events"] for columns in runs) < 0.9 * sum(
        len(columns.iterations()["start_ns"]) for columns in runs
    )


@dataclass(frozen=True)
class Liar:
    """Says that its plan holds until something changes, yet changes its mind with the clock."""

    def plan(self, view: ReplicaView, /) -> Plan:
        if view.waiting and view.now_ns % 2:
            return Plan(decode=view.n_decoding > 0, run=((view.waiting[0].id, view.waiting[0].tokens),))
        if not view.n_decoding:
            return Plan(run=tuple((seq.id, seq.tokens) for seq in list(view.waiting)[:1]))
        return Plan(decode=True, hold=UNTIL_CHANGE, through_arrivals=True)


def test_a_policy_that_lies_about_how_long_its_plan_holds_is_caught() -> None:
    trace = Trace(arrival_ns=[0, 3_000_000], prompt_tokens=[5, 5], output_tokens=[60, 5])
    # 1,000,001 ns: every other iteration ends at an odd nanosecond.
    replica = ReplicaSpec(cost=Linear(fixed_s=1.000001e-3), scheduler=Liar(), kv_blocks=100)
    experiment = Experiment(workload=trace, replicas=(replica,), router=RoundRobin())
    fast, stepped = run(experiment), run(experiment, fast_forward=False)
    assert not np.array_equal(fast.requests["finish_ns"], stepped.requests["finish_ns"])
