"""Groups of devices that several models take turns on."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from sim.placement.groups import GroupColumns, GroupExperiment, GroupSpec, run_groups, stage_record
from sim.theory.queueing import pipeline_placement_latency_s, simple_placement_latency_s
from tests.sample import few
from workloads import Fixed, Poisson, Trace, multi_model

NEVER = -1


def trace(arrival_ns: list[int], model: list[int] | None = None, deadline_ns: int | list[int] = NEVER) -> Trace:
    n = len(arrival_ns)
    index = [0] * n if model is None else model
    names = tuple(f"m{i}" for i in range(max(index) + 1))
    deadlines = [deadline_ns] * n if isinstance(deadline_ns, int) else deadline_ns
    return Trace(
        arrival_ns=np.array(arrival_ns),
        prompt_tokens=np.ones(n, int),
        output_tokens=np.zeros(n, int),
        model_index=np.array(index),
        models=names,
        deadline_ns=np.array(deadlines),
    )


def group(stages: dict[int, tuple[int, ...]]) -> GroupSpec:
    """A group without batches: model -> nanoseconds of its stages."""
    return GroupSpec(
        models=tuple(stages), stage_ns=tuple((times,) for times in stages.values()), n_stages=len(min(stages.values()))
    )


def batching_group(rows: dict[int, tuple[tuple[int, ...], ...]]) -> GroupSpec:
    return GroupSpec(models=tuple(rows), stage_ns=tuple(rows.values()), n_stages=len(next(iter(rows.values()))[0]))


def finishes(workload: Trace, *groups: GroupSpec, **settings: object) -> list[int]:
    experiment = GroupExperiment(workload=workload, groups=groups, **settings)  # type: ignore[arg-type]
    return run_groups(experiment, engine="events").finish_ns.tolist()


def test_stages_overlap_and_the_slowest_sets_the_pace():
    assert finishes(trace([0, 0, 0]), group({0: (10, 20)})) == [30, 50, 70]


def test_models_of_a_group_take_turns_in_order_of_arrival():
    shared = group({0: (10, 10), 1: (5, 5)})
    assert finishes(trace([0, 1, 2], [0, 1, 0]), shared) == [20, 25, 35]


def test_request_that_would_be_late_is_rejected_and_costs_nothing():
    assert finishes(trace([0, 1, 2], deadline_ns=[20, 15, 18]), group({0: (10,)})) == [10, -1, 20]


def test_overhead_counts_against_the_deadline_and_occupies_nothing():
    assert finishes(trace([0, 0], deadline_ns=22), group({0: (10,)}), overhead_ns=3) == [13, -1]
    assert finishes(trace([0, 0], deadline_ns=23), group({0: (10,)}), overhead_ns=3) == [13, 23]


def test_request_goes_to_the_hosting_group_whose_last_stage_is_free_first():
    found = run_groups(GroupExperiment(workload=trace([0, 0, 0]), groups=(group({0: (10,)}), group({0: (3,)}))))
    assert found.group.tolist() == [0, 1, 1]
    assert found.finish_ns.tolist() == [10, 3, 6]


def test_model_that_no_group_hosts_is_never_served():
    found = run_groups(GroupExperiment(workload=trace([0, 0], [0, 1]), groups=(group({0: (10,)}),)))
    assert found.finish_ns.tolist() == [10, -1]
    assert found.group.tolist() == [0, -1]


def test_largest_batch_that_keeps_the_oldest_deadline_goes_next():
    rows = {0: ((10,), (12,), (16,))}
    settings = {"batch_sizes": (1, 2, 4)}
    assert finishes(trace([0, 1, 2, 3, 4]), batching_group(rows), **settings) == [10, 26, 26, 26, 26]
    # Four at once would end at 26, and the oldest of them has until 23.
    deadlines = [NEVER, 22, NEVER, NEVER, NEVER]
    assert finishes(trace([0, 1, 2, 3, 4], deadline_ns=deadlines), batching_group(rows), **settings) == [
        *(10, 22, 22, 34, 34)
    ]


def test_batches_are_of_one_model_the_one_whose_request_is_oldest():
    rows = {0: ((10,), (11,)), 1: ((10,), (11,))}
    found = finishes(trace([0, 1, 2, 3], [0, 1, 0, 1]), batching_group(rows), batch_sizes=(1, 2))
    assert found == [10, 21, 31, 21]


def test_arrivals_of_one_instant_share_a_batch():
    assert finishes(trace([5, 5]), batching_group({0: ((10,), (12,))}), batch_sizes=(1, 2)) == [17, 17]


def test_with_batches_a_request_goes_to_the_group_with_the_shortest_queue():
    # Group 0 is promised to be free first, and has two requests where group 1 has one.
    quick, slow = batching_group({0: ((10,), (11,))}), batching_group({0: ((30,), (31,))})
    workload = trace([0, 0, 1, 2])
    found = run_groups(GroupExperiment(workload=workload, groups=(quick, slow), batch_sizes=(1, 2)))
    assert found.group.tolist() == [0, 1, 0, 1]


def test_queued_request_that_has_become_too_late_is_dropped():
    rows = {0: ((10,), (25,)), 1: ((10,), (25,))}
    # Request 1 could still have made it when it came; the batch of two ahead of it takes longer than it can wait.
    workload = trace([0, 0, 1, 2], [0, 0, 1, 0], deadline_ns=[NEVER, NEVER, 30, NEVER])
    assert finishes(workload, batching_group(rows), batch_sizes=(1, 2)) == [25, 25, -1, 35]


def test_every_stage_is_recorded_once_and_never_used_twice_at_a_time():
    workload = trace([0, 0, 3, 30], [0, 1, 0, 1])
    record = stage_record(GroupExperiment(workload=workload, groups=(group({0: (4, 6), 1: (5, 1)}),)))
    assert len(record) == 8
    for stage in (0, 1):
        uses = record[record[:, 1] == stage]
        assert np.all(uses[1:, 2] >= (uses[:, 2] + uses[:, 3])[:-1])


def random_experiment(seed: int) -> GroupExperiment:
    draw = np.random.default_rng(seed)
    n, n_models, n_groups = int(draw.integers(1, 150)), int(draw.integers(1, 5)), int(draw.integers(0, 5))
    groups = []
    for _ in range(n_groups):
        hosted = np.flatnonzero(draw.random(n_models) < 0.7).tolist()
        n_stages = int(draw.integers(1, 4))
        times = tuple((tuple(draw.integers(0, 15, n_stages).tolist()),) for _ in hosted)
        groups.append(GroupSpec(models=tuple(hosted), stage_ns=times, n_stages=n_stages))
    workload = dataclasses.replace(
        trace(np.sort(draw.integers(0, 4 * n, n)).tolist(), deadline_ns=draw.choice([-1, 5, 20, 60, 200], n).tolist()),
        models=tuple(f"m{i}" for i in range(n_models)),
        model_index=draw.integers(0, n_models, n),
    )
    return GroupExperiment(workload=workload, groups=tuple(groups), overhead_ns=int(draw.integers(0, 6)))


def differences(a: GroupColumns, b: GroupColumns) -> int:
    return sum(
        int(np.count_nonzero(getattr(a, name) != getattr(b, name)))
        for name in ("start_ns", "finish_ns", "group", "batch")
    )


def test_loop_without_events_equals_the_event_loop_request_by_request():
    rejected = 0
    for seed in range(60):
        experiment = random_experiment(seed)
        events = run_groups(experiment, engine="events")
        assert differences(events, run_groups(experiment, engine="loop")) == 0, f"seed {seed}"
        rejected += int(np.count_nonzero(events.finish_ns < 0))
    assert rejected > 400  # the comparison has met both outcomes


def test_comparison_notices_a_group_that_is_a_nanosecond_slower():
    noticed = 0
    for seed in range(20):
        experiment = random_experiment(seed)
        slower = tuple(
            dataclasses.replace(
                spec,
                stage_ns=tuple(tuple((first + 1, *rest) for first, *rest in batches) for batches in spec.stage_ns),
            )
            for spec in experiment.groups
        )
        changed = dataclasses.replace(experiment, groups=slower)
        noticed += differences(run_groups(experiment, engine="events"), run_groups(changed, engine="loop")) > 0
    assert noticed >= 14  # the others host nothing that is asked for


@pytest.mark.parametrize("load", few([0.8, 0.4, 1.6], reason="long runs, much alike"))
def test_two_devices_keep_the_closed_forms(load):
    """Within 2 % at a load of at most 0.8 a device: 200,000 requests, standard error below 0.7 %."""
    service_s = 0.1
    rate = load / service_s
    arrivals = {name: Poisson(rate_per_s=rate / 2) for name in ("a", "b")}
    workload = multi_model(arrivals, prompt=Fixed(tokens=1), n_requests=200_000, seed=1)
    whole, half = (100_000_000,), (50_000_000, 50_000_000)
    for groups, form in (
        ((group({0: whole}), group({1: whole})), simple_placement_latency_s(rate, service_s)),
        ((group({0: half, 1: half}),), pipeline_placement_latency_s(rate, service_s)),
    ):
        found = run_groups(GroupExperiment(workload=workload, groups=groups))
        mean_s = float((found.finish_ns - workload.arrival_ns).mean()) / 1e9
        assert mean_s == pytest.approx(float(form), rel=0.02)


def test_generative_request_is_refused_by_name():
    workload = dataclasses.replace(trace([0]), output_tokens=np.array([3]))
    with pytest.raises(ValueError, match="single-pass models, whose requests have output_tokens 0"):
        GroupExperiment(workload=workload, groups=(group({0: (1,)}),))


def test_batches_need_events():
    experiment = GroupExperiment(workload=trace([0]), groups=(batching_group({0: ((1,), (2,))}),), batch_sizes=(1, 2))
    with pytest.raises(ValueError, match="cannot form batches"):
        run_groups(experiment, engine="loop")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_sizes": (2, 1)}, "ascending and start with 1"),
        ({"batch_sizes": (1, 2)}, "one row for each of the 2 batch sizes"),
        ({"overhead_ns": -1}, "at least 0"),
        ({"groups": (group({3: (1,)}),)}, "the workload has 1"),
    ],
)
def test_impossible_experiment_is_refused(change, message):
    settings = {"workload": trace([0]), "groups": (group({0: (1,)}),), **change}
    with pytest.raises(ValueError, match=message):
        GroupExperiment(**settings)
