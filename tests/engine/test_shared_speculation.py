"""Models that share a machine and draft each by a method of its own, or not at all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from policies.acceptance import Iid, Recorded
from policies.decoding import Speculative
from policies.routers import RoundRobin
from policies.schedulers import Sarathi
from sim.engine import Columns, Experiment, MachineSpec, ReplicaSpec
from tests.engine.costs import Linear
from tests.engine.random_runs import an_experiment, assert_same, partly_speculative, run_both_ways
from tests.sample import few
from workloads import Trace

US = 1_000
TWO = Trace(
    arrival_ns=[0, 0], prompt_tokens=[4, 4], output_tokens=[7, 4], model_index=[0, 1], models=("drafts", "does not")
)
PLAIN = (
    ReplicaSpec(cost=Linear(fixed_s=1e-3), scheduler=Sarathi(), kv_blocks=1000, model=0),
    ReplicaSpec(cost=Linear(fixed_s=3e-3), scheduler=Sarathi(), kv_blocks=1000, model=1),
)


def served(first: ReplicaSpec, second: ReplicaSpec = PLAIN[1], trace: Trace = TWO) -> Columns:
    experiment = Experiment(
        workload=trace, replicas=(MachineSpec(hosted=(first, second)),), router=RoundRobin(), seed=3
    )
    return run_both_ways(experiment)


def test_rounds_of_one_model_take_turns_with_steps_of_the_other() -> None:
    """A pass of the draft takes 0.2 ms, verifying 1 ms and a round 0.1 ms more: a prompt is computed in 1.2 ms, by the draft as
    well, and a round of two drafted tokens takes 1.5 ms. Rounds accept 2, 0 and 1 tokens. The other model's iterations take 3
    ms."""
    columns = served(
        replace(
            PLAIN[0],
            decoding=Speculative(
                method="draft_model",
                num_speculative_tokens=2,
                acceptance=Recorded(rows=((2, 0, 1),), recorded_k=2),
            ),
            draft_cost=Linear(fixed_s=2e-4),
            speculation_overhead_s=1e-4,
        )
    )
    iterations = columns.iterations()
    assert (iterations["start_ns"] // US).tolist() == [0, 1200, 4200, 5700, 8700, 10200, 13200, 14700]
    assert (iterations["duration_ns"] // US).tolist() == [1200, 3000, 1500, 3000, 1500, 3000, 1500, 3000]
    assert iterations["emitted_tokens"].tolist() == [1, 1, 3, 1, 1, 1, 2, 1]
    assert columns.requests["finish_ns"].tolist() == [14_700_000, 17_700_000]
    assert [each.speculation for each in columns.replicas] == [{(2, 2): [1, 1, 1]}, None]


def test_rounds_without_drafts_are_plain_steps() -> None:
    none = Speculative(method="ngram", num_speculative_tokens=[[1, None, 0]], acceptance=Iid(alpha=0.5))
    plain = served(*PLAIN)
    assert_same(plain, served(replace(PLAIN[0], decoding=none)))
    assert_same(plain, served(*(replace(each, decoding=none) for each in PLAIN)))


def test_acceptance_of_a_request_does_not_depend_on_what_else_the_machine_hosts() -> None:
    n = 30
    trace = Trace(
        arrival_ns=[500_000 * (row // 2) for row in range(2 * n)],
        prompt_tokens=[20] * 2 * n,
        output_tokens=[40] * 2 * n,
        model_index=[0, 1] * n,
        models=("drafts", "other"),
    )
    methods = [
        Speculative(method="draft_model", num_speculative_tokens=4, acceptance=Iid(alpha=alpha)) for alpha in (0.3, 0.9)
    ]
    drafts = replace(PLAIN[0], decoding=methods[1])

    def rounds(second: ReplicaSpec) -> object:
        return served(drafts, second, trace).replicas[0].speculation

    beside_none = rounds(PLAIN[1])
    assert beside_none == rounds(replace(PLAIN[1], decoding=methods[0]))
    assert beside_none == rounds(replace(PLAIN[1], scheduler=Sarathi(token_budget=64, max_sequences=2)))


@pytest.mark.parametrize("seed", few(range(3)))
def test_what_is_asked_of_models_that_draft_beside_others_is_emitted(seed: int) -> None:
    n_mixed = 0
    for case in range(20 * seed, 20 * seed + 20):
        experiment = partly_speculative(an_experiment(case, speculative=False), case)
        drafts = [[core.decoding is not None for core in machine.hosted] for machine in experiment.machines]
        if not any(any(each) and len(each) > 1 for each in drafts):
            continue
        n_mixed += any(any(each) and not all(each) for each in drafts)
        columns = run_both_ways(experiment)
        drafted = [each for machine in drafts for each in machine]
        assert [each.speculation is not None for each in columns.replicas] == drafted
        finished = columns.requests["status"] == 0
        emitted = columns.iterations()["emitted_tokens"].sum()
        if experiment.horizon_ns is None and np.all(finished | (columns.requests["replica"] < 0)):
            assert emitted == columns.requests["output_tokens"][finished].sum()
    assert n_mixed > 1
