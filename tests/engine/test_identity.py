"""Spans give what stepping gives, to the nanosecond, over random runs; and who lies about a plan is found out."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from policies.routers import RoundRobin
from policies.sglang import Sglang
from policies.trtllm import TrtLlm
from policies.view import ALWAYS_NS, Scheduler
from policies.vllm import Vllm
from policies.wrappers import EvictNewest
from sim.engine import Columns, Experiment, MachineSpec, ReplicaSpec, run
from sim.engine.spec.roles import HandoverSpec, KvPath
from sim.engine.tiers.links import LinkSpec
from tests.engine.costs import Linear
from tests.engine.random_runs import (
    HoldsTooLong,
    Noting,
    OpensAt,
    an_experiment,
    apart,
    assert_same,
    beginnings,
    partly_speculative,
    ran,
    run_both_ways,
    with_fleet,
    with_late_news,
    with_long_answers,
    with_looks,
    with_tiers,
)
from tests.sample import few, some
from workloads import ClosedLoop, Trace


def assert_spans_equal_stepping(cases: range, speculative: bool) -> None:
    for case in cases:
        experiment = an_experiment(case, speculative=speculative)
        assert_same(ran(case, speculative=speculative), run(experiment, fast_forward=False))


@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])
@pytest.mark.parametrize("seeds", few([range(20), range(20, 100)]))
def test_spans_equal_stepping(seeds: range, speculative: bool) -> None:
    assert_spans_equal_stepping(seeds, speculative)


@pytest.mark.slow(reason="many random runs")
@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])
@pytest.mark.parametrize("seed", range(1000, 4000, 500))
def test_spans_equal_stepping_over_many_runs(seed: int, speculative: bool) -> None:
    assert_spans_equal_stepping(some(range(seed, seed + 500)), speculative)


@pytest.mark.slow(reason="many random runs")
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


@pytest.mark.parametrize("seed", few(range(0, 18, 6)))
def test_spans_equal_stepping_with_long_answers_late_news_and_models_of_which_some_speculate(seed: int) -> None:
    for case in range(seed, seed + 6):
        spanned, stepped = [
            with_late_news(
                with_long_answers(partly_speculative(an_experiment(case, speculative=False), case), case), case
            )
            for _ in range(2)
        ]
        assert_same(run(spanned), run(stepped, fast_forward=False))
        assert isinstance(spanned.router, Noting)
        assert isinstance(stepped.router, Noting)
        assert spanned.router.told == stepped.router.told


ASYNCHRONOUS = (Vllm(), EvictNewest(Sglang()), EvictNewest(TrtLlm()))


@pytest.mark.parametrize("scheduler", ASYNCHRONOUS, ids=["vllm", "sglang", "trtllm"])
def test_a_request_that_asks_for_room_in_a_span_finds_what_steps_made_ahead_would_have_cached(
    scheduler: Scheduler,
) -> None:
    """The prompt of the second request is the first one's and most of its answer, of which the machine that decodes has computed
    more or less when the second comes."""
    machine = ReplicaSpec(
        cost=Linear(fixed_s=1e-3), scheduler=scheduler, kv_blocks=200, block_tokens=1, prefix_cache="blocks"
    )
    handover = HandoverSpec(
        roles=("prefill", "decode"),
        pools=(0, 1),
        paths={(0, 1): KvPath(link=LinkSpec(1e7), bytes_per_token=1000.0)},
        router=RoundRobin(),
    )
    contents = list(range(1, 47))
    for at_ns in range(1_000_000, 25_000_000, 2_700_001):
        trace = Trace(
            arrival_ns=[0, at_ns],
            prompt_tokens=[6, 40],
            output_tokens=[40, 3],
            prefix_blocks=np.array(contents + contents[:40]),
            prefix_offsets=np.array([0, 46, 86]),
            prefix_block_tokens=1,
        )
        experiment = Experiment(workload=trace, replicas=(machine,) * 2, router=RoundRobin(), handover=handover)
        spanned, stepped = run(experiment), run(experiment, fast_forward=False)
        assert_same(spanned, stepped)
        assert spanned.meta["events"] < stepped.meta["events"]


@pytest.mark.parametrize("seed", [0, 2, 3, 4, 5])
def test_a_chunk_that_fits_once_a_tree_has_given_a_leaf_up_is_not_passed_over_by_a_span(seed: int) -> None:
    """Decodes evict, a leaf at a time, what waiting prompts would find: less is then taken with their first chunk."""
    rng = random.Random(seed)
    prompt, output = ([rng.randrange(20, most) for _ in range(20)] for most in (90, 300))
    contents: dict[str, Any] = {}
    while not contents:
        contents = beginnings(rng, prompt, output)
    trace = Trace(
        arrival_ns=sorted(rng.randrange(10**8) for _ in prompt), prompt_tokens=prompt, output_tokens=output, **contents
    )
    scheduler = Vllm(
        max_num_batched_tokens=rng.choice([20, 40, 63]),
        max_num_seqs=12,
        scheduler_reserve_full_isl=False,
        async_scheduling=rng.random() < 0.5,
    )
    machine = ReplicaSpec(
        cost=Linear(fixed_s=1e-3), scheduler=scheduler, kv_blocks=140, block_tokens=4, prefix_cache="tree"
    )
    experiment = Experiment(workload=trace, replicas=(machine,), router=RoundRobin())
    assert_same(run(experiment), run(experiment, fast_forward=False))


@pytest.mark.parametrize("seed", few([223, 78]))
def test_a_machine_that_hands_over_computes_the_last_token_of_a_request_of_which_tiers_have_all_others(
    seed: int,
) -> None:
    # A request whose machine has failed comes back with tokens emitted: with the KV of all but the last it might decode.
    experiment = with_fleet(with_tiers(apart(seed, speculative=False), seed), seed)
    run_both_ways(experiment)


@pytest.mark.slow(reason="many random runs")
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
