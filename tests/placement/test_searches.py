"""Searches for placements: what they may never do, and what small cases they must get right."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.placement import (
    BudgetSpent,
    ClockworkPlusPlus,
    Cluster,
    DedicatedGroups,
    EqualGroups,
    Group,
    ModelView,
    PartitionSearch,
    Placement,
    PlacementSearch,
    RoundRobin,
    Score,
    SelectiveReplication,
    bucketings,
    check,
    device_splits,
    group_bytes,
    uniform_groups,
)

ALL: tuple[PlacementSearch, ...] = (
    PartitionSearch(max_inter_op=4, max_intra_op=2, max_splits=3),
    PartitionSearch(buckets=False, beam=2, max_inter_op=2, max_intra_op=2),
    EqualGroups(inter_op=2),
    EqualGroups(inter_op=2, beam=3),
    SelectiveReplication(),
    ClockworkPlusPlus(window_s=10.0),
    RoundRobin(inter_op=2),
    DedicatedGroups(inter_op=2, intra_op=1),
)


def model(name: str, size: float, *, latency_s: float = 1.0, rate: float = 1.0) -> ModelView:
    """A model whose weights split evenly over any shape."""
    shapes = {(a, b): size / (a * b) for a in range(1, 17) for b in range(1, 9)}
    return ModelView(name=name, latency_s=latency_s, rate_per_s=rate, device_bytes=shapes)


def coverage(models: Sequence[ModelView]):
    """A score that rewards hosting: a model's requests are served by as much as it has replicas, up to three."""

    def score(placements: Sequence[Placement]) -> list[Score]:
        found = []
        for placement in placements:
            replicas = [sum(m in group.models for group in placement.groups) for m in range(len(models))]
            unserved = [max(3 - n, 0) * 10 for n in replicas]
            requests = [10 * len(group.models) for group in placement.groups]
            found.append(Score(value=-float(sum(unserved)), unserved=unserved, requests=requests))
        return found

    return score


@settings(max_examples=25, deadline=None)
@given(
    n_devices=st.integers(1, 13),
    memory=st.floats(1.0, 30.0),
    sizes=st.lists(st.floats(0.5, 40.0), min_size=1, max_size=6),
    latencies=st.lists(st.floats(0.1, 5.0), min_size=6, max_size=6),
    which=st.integers(0, len(ALL) - 1),
)
def test_search_never_breaks_memory_or_takes_devices_that_are_not_there(n_devices, memory, sizes, latencies, which):
    cluster = Cluster(n_devices=n_devices, memory_bytes=memory, devices_per_node=4)
    models = [model(f"m{i}", size, latency_s=latencies[i]) for i, size in enumerate(sizes)]
    found = ALL[which].search(cluster, models, coverage(models))
    check(found, cluster, models)
    assert found.n_devices <= n_devices
    assert all(group_bytes(group, models) <= memory for group in found.groups)


def test_check_notices_what_it_is_for():
    cluster, models = Cluster(n_devices=2, memory_bytes=10.0), [model("a", 6.0), model("b", 6.0)]
    full = Placement(groups=(Group(inter_op=1, intra_op=1, models=(0, 1)),))
    with pytest.raises(ValueError, match="host fewer models"):
        check(full, cluster, models)
    with pytest.raises(ValueError, match="takes 4 devices and the cluster has 2"):
        check(uniform_groups(4, 2, 2), cluster, models)


def test_heuristic_puts_the_model_with_most_unserved_requests_on_the_least_asked_group():
    models = [model("busy", 6.0, rate=5.0), model("idle", 6.0)]
    asked: list[Placement] = []

    def score(placements: Sequence[Placement]) -> list[Score]:
        asked.extend(placements)
        hosted = [any(0 in group.models for group in p.groups) for p in placements]
        return [
            Score(value=float(p.replicas), unserved=[0 if h else 50, 10], requests=[7, 3])
            for p, h in zip(placements, hosted, strict=True)
        ]

    SelectiveReplication().search(Cluster(n_devices=2, memory_bytes=10.0), models, score)
    assert [tuple(group.models for group in placement.groups) for placement in asked[:3]] == [
        ((), ()),
        ((), (0,)),
        ((1,), (0,)),
    ]


def test_beam_finds_what_greed_misses():
    """The best single model blocks the pair that is best together; a beam of two keeps the way open."""
    models = [model("big", 10.0), model("left", 5.0), model("right", 5.0)]
    values = {(): 0.0, (0,): 2.0, (1,): 1.5, (2,): 1.0, (1, 2): 4.0}

    def score(placements: Sequence[Placement]) -> list[Score]:
        return [Score(value=values[p.groups[0].models], unserved=[1, 1, 1], requests=[0]) for p in placements]

    cluster = Cluster(n_devices=1, memory_bytes=10.0)
    greedy = SelectiveReplication(beam=1).search(cluster, models, score)
    beamed = SelectiveReplication(beam=2).search(cluster, models, score)
    assert greedy.groups[0].models == (0,)
    assert beamed.groups[0].models == (1, 2)


def test_search_answers_with_its_best_when_the_budget_is_spent():
    models = [model("a", 1.0), model("b", 1.0)]
    inner, calls = coverage(models), 0

    def score(placements: Sequence[Placement]) -> list[Score]:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise BudgetSpent
        return inner(placements)

    found = PartitionSearch().search(Cluster(n_devices=4, memory_bytes=10.0), models, score)
    assert found.replicas == 1


def test_round_robin_deals_until_one_does_not_fit():
    models = [model("a", 2.0), model("b", 8.0), model("c", 8.0), model("d", 1.0)]
    found = RoundRobin(inter_op=1).search(Cluster(n_devices=2, memory_bytes=9.0), models, coverage(models))
    assert [group.models for group in found.groups] == [(0,), (1,)]


def test_dedicated_groups_host_one_model_each_the_busiest_first():
    models = [model("a", 4.0, rate=1.0), model("b", 4.0, rate=9.0), model("c", 4.0, rate=5.0)]
    search = DedicatedGroups(inter_op=2, intra_op=1)
    found = search.search(Cluster(n_devices=4, memory_bytes=10.0), models, coverage(models))
    assert [group.models for group in found.groups] == [(1,), (2,)]


def test_left_over_devices_form_groups_of_falling_powers_of_two():
    assert [group.shape for group in uniform_groups(15, 4, 2).groups] == [(4, 2), (2, 2), (1, 2), (1, 1)]
    assert [group.shape for group in uniform_groups(15, 1, 4).groups] == [(1, 4), (1, 4), (1, 4), (1, 2), (1, 1)]


def test_shapes_beyond_a_node_are_whole_nodes():
    shapes = PartitionSearch(max_inter_op=64, max_intra_op=1).shapes(
        Cluster(n_devices=64, memory_bytes=1.0, devices_per_node=8), 64
    )
    assert shapes == [(1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (32, 1), (64, 1)]
    odd = Cluster(n_devices=24, memory_bytes=1.0, devices_per_node=6)
    assert (8, 1) not in PartitionSearch().shapes(odd, 24)


def test_models_are_parted_only_where_latency_jumps():
    models = [model(name, 1.0, latency_s=s) for name, s in (("a", 0.15), ("b", 0.4), ("c", 0.17), ("d", 0.23))]
    assert bucketings(models, 0.38) == [((0, 1, 2, 3),), ((0, 2, 3), (1,))]


def test_devices_are_split_near_the_shares_of_the_load():
    models = [model("a", 1.0, rate=3.0), model("b", 1.0, rate=1.0)]
    splits = device_splits(8, ((0,), (1,)), models, 3)
    assert splits[0] == (6, 2)
    assert len(splits) == 3
    assert all(sum(split) == 8 for split in splits)


@pytest.mark.parametrize("bad", [0, -1, True, 1.5])
def test_beam_is_a_whole_number(bad):
    with pytest.raises(ValueError, match="beam is a whole number"):
        EqualGroups(beam=bad)
