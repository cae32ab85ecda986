"""Spans give what stepping gives, to the nanosecond, over random runs; and who lies about a plan is found out."""

from __future__ import annotations

import numpy as np
import pytest

from policies.routers import RoundRobin
from policies.view import ALWAYS_NS, Scheduler
from sim.engine import Columns, Experiment, MachineSpec, ReplicaSpec, run
from tests.engine.costs import Linear
from tests.engine.random_runs import HoldsTooLong, OpensAt, an_experiment, assert_same, with_looks
from tests.sample import some
from workloads import ClosedLoop, Trace


def assert_spans_equal_stepping(cases: range, speculative: bool) -> None:
    for case in cases:
        experiment = an_experiment(case, speculative=speculative)
        assert_same(run(experiment), run(experiment, fast_forward=False))


@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])
@pytest.mark.parametrize("seed", range(0, 200, 50))
def test_spans_equal_stepping(seed: int, speculative: bool) -> None:
    assert_spans_equal_stepping(range(seed, seed + 50), speculative)


@pytest.mark.slow
@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])
@pytest.mark.parametrize("seed", range(1000, 4000, 500))
def test_spans_equal_stepping_over_many_runs(seed: int, speculative: bool) -> None:
    assert_spans_equal_stepping(some(range(seed, seed + 500)), speculative)


@pytest.mark.slow
@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])
@pytest.mark.parametrize("seed", range(1000, 1600, 200))
def test_spans_equal_stepping_behind_routers_that_look_into_caches(seed: int, speculative: bool) -> None:
    for case in some(range(seed, seed + 200)):
        experiments = [with_looks(an_experiment(case, speculative=speculative), case) for _ in range(2)]
        (experiment, fast), (again, slow) = experiments
        assert_same(run(experiment), run(again, fast_forward=False))
        assert fast.told == slow.told


@pytest.mark.parametrize(("seed", "speculative"), [(1846, False), (2708, True), (3726, True)])
def test_plans_held_in_micro_batches_see_what_others_do_to_the_prefix_cache(seed: int, speculative: bool) -> None:
    # Prompts wait that would find blocks, while another micro-batch or model caches and evicts some.
    experiment = an_experiment(seed, speculative=speculative)
    assert_same(run(experiment), run(experiment, fast_forward=False))


def test_the_random_runs_cover_what_they_should() -> None:
    experiments = [an_experiment(seed, speculative=seed % 2 == 0) for seed in range(200)]
    runs = [run(experiment) for experiment in experiments]
    assert sum(columns.meta["preemptions"] for columns in runs) > 200
    statuses = np.concatenate([columns.requests["status"] for columns in runs])
    assert set(statuses.tolist()) == {0, 1, 2, 3}
    assert {"too late", "prompt and output exceed the model's context of 90 tokens", "no machine hosts the model"} <= {
        reason for columns in runs for reason in columns.reasons
    }
    tenants = [tenant for experiment in experiments for tenant in experiment.hosted]
    assert {tenant.cost.n_stages for tenant in tenants} == {1, 2, 3, 4}
    assert {tenant.micro_batches for tenant in tenants} == {None, 1, 2, 3}
    assert {len(spec.hosted) for experiment in experiments for spec in experiment.machines} == {1, 2, 3}
    assert sum(isinstance(experiment.workload, ClosedLoop) for experiment in experiments) > 10
    assert sum(getattr(experiment.workload, "follows", None) is not None for experiment in experiments) > 20
    assert sum(experiment.in_flight is not None for experiment in experiments) > 10
    kinds = {type(getattr(tenant.scheduler, "inner", tenant.scheduler)).__name__ for tenant in tenants}
    assert {"OnTheHour", "Impatient", "FasterTransformer", "FewestFirst", "Sarathi", "ChunkedOnly", "Vllm"} <= kinds
    alone = [
        columns for columns, e in zip(runs, experiments, strict=True) if all(_is_alone(spec) for spec in e.machines)
    ]
    assert sum(columns.meta["events"] for columns in alone) < 0.9 * sum(
        len(columns.iterations()["start_ns"]) for columns in alone
    )


def _is_alone(spec: MachineSpec) -> bool:
    return len(spec.hosted) == 1 and spec.hosted[0].cost.n_stages == 1 and spec.hosted[0].micro_batches in (None, 1)


def both_ways(scheduler: Scheduler, *, n_stages: int = 1) -> tuple[Columns, Columns]:
    trace = Trace(arrival_ns=[0, 3_000_000], prompt_tokens=[5, 5], output_tokens=[60, 5])
    # 1,000,001 ns: every other iteration ends at an odd nanosecond.
    replica = ReplicaSpec(
        cost=Linear(fixed_s=1.000001e-3, n_stages=n_stages), scheduler=scheduler, kv_blocks=100, micro_batches=1
    )
    experiment = Experiment(workload=trace, replicas=(replica,), router=RoundRobin())
    return run(experiment), run(experiment, fast_forward=False)


def finishes_differ(fast: Columns, stepped: Columns) -> bool:
    return not np.array_equal(fast.requests["finish_ns"], stepped.requests["finish_ns"])


def test_a_policy_that_lies_about_how_long_its_plan_holds_is_caught() -> None:
    assert finishes_differ(*both_ways(HoldsTooLong()))


def test_a_policy_that_lies_about_the_instant_until_which_its_plan_holds_is_caught() -> None:
    opens_ns = 20_000_500
    assert not finishes_differ(*both_ways(OpensAt(opens_ns, says_ns=opens_ns)))
    assert finishes_differ(*both_ways(OpensAt(opens_ns, says_ns=opens_ns + 2_000_000)))
    assert finishes_differ(*both_ways(OpensAt(opens_ns, says_ns=ALWAYS_NS)))


def test_a_plan_held_in_a_pipeline_ends_at_the_instant_that_was_said() -> None:
    opens_ns = 40_000_500
    assert not finishes_differ(*both_ways(OpensAt(opens_ns, says_ns=opens_ns), n_stages=2))
    assert finishes_differ(*both_ways(OpensAt(opens_ns, says_ns=ALWAYS_NS), n_stages=2))
