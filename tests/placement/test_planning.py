"""Searching with the simulator: scores, cache, budget, windows, files."""

from __future__ import annotations

import json

import numpy as np
import pytest

from policies.placement import ClockworkPlusPlus, EqualGroups, Group, PartitionSearch, Placement, SelectiveReplication
from sim.errors import ScenarioError
from sim.placement import Scoring, Serving, evaluate, find, load_placement, save_placement, serve
from sim.plots.placement import attainment_figure, busy_share, placement_figure
from tests.study.test_sweep import InThreads


def test_search_finds_that_sharing_pipelines_serves_bursts_better(serving, traffic):
    tight = Serving(cluster=serving.cluster, models=serving.models, slo_scale=2.0)
    replicated = find(SelectiveReplication(), tight, traffic)
    shared = find(PartitionSearch(), tight, traffic)
    assert shared.train.attainment > replicated.train.attainment + 0.1
    assert max(group.inter_op for group in shared.placement.groups) > 1
    assert shared.simulations > 0
    assert shared.planning_s > 0


def test_replication_serves_nothing_at_an_slo_of_its_own_latency(serving, traffic):
    tight = Serving(cluster=serving.cluster, models=serving.models, slo_scale=1.0, overhead_s=0.011)
    assert find(SelectiveReplication(), tight, traffic).train.attainment == 0.0
    assert find(PartitionSearch(), tight, traffic).train.attainment > 0.2


def test_a_placement_is_simulated_once_however_often_it_is_asked_for(serving, traffic):
    scoring = Scoring(serving, serving.workload(traffic))
    placement = Placement(groups=(Group(inter_op=8, intra_op=1, models=(0, 1)),))
    first, again = scoring([placement, placement])
    assert first == again == scoring([placement])[0]
    assert (scoring.simulations, scoring.asked) == (1, 3)


@pytest.mark.parametrize("slo_scale", [None, 1.5, 5.0])
def test_screened_scores_are_those_of_the_event_loop(serving, traffic, slo_scale):
    held = Serving(cluster=serving.cluster, models=serving.models, slo_scale=slo_scale, overhead_s=0.011)
    workload = held.workload(traffic)
    shared, alone = Group(inter_op=4, intra_op=1, models=(0, 1)), Group(inter_op=4, intra_op=1, models=(1,))
    score = held.scorer(workload)
    for groups in ((shared, alone), (shared, shared), (alone,), ()):
        placement = Placement(groups=groups)
        assert score(placement) == held.outcome(placement, workload).score(placement.replicas)


@pytest.mark.parametrize(
    "workers", ["threads", pytest.param("processes", marks=pytest.mark.slow(reason="starts processes"))]
)
def test_parallel_scores_are_those_of_one_at_a_time(serving, traffic, monkeypatch, workers):
    if workers == "threads":
        monkeypatch.setattr("joblib.externals.loky.ProcessPoolExecutor", InThreads)
    one = find(EqualGroups(inter_op=4, beam=2), serving, traffic)
    two = find(EqualGroups(inter_op=4, beam=2), serving, traffic, jobs=2)
    assert one.placements == two.placements
    assert one.simulations == two.simulations


def test_spent_budget_still_gives_a_placement_that_fits(serving, traffic):
    found = find(PartitionSearch(), serving, traffic, budget_s=1e-9)
    assert found.simulations == 0
    assert found.cut_short
    assert not find(PartitionSearch(), serving, traffic, budget_s=3600.0).cut_short
    assert found.placement.n_devices <= 8


def test_progress_is_told_the_count_and_the_best_attainment(serving, traffic):
    told = []
    found = find(EqualGroups(inter_op=4), serving, traffic, progress=lambda n, best: told.append((n, best)))
    assert told[-1] == (found.simulations, pytest.approx(found.train.attainment))
    assert [n for n, _ in told] == sorted(n for n, _ in told)


def test_score_prefers_attainment_then_speed_then_replicas(serving, traffic):
    workload = serving.workload(traffic)
    few = Placement(groups=(Group(inter_op=8, intra_op=1, models=(0,)),))
    outcome = evaluate(serving, few, traffic)
    score = outcome.score(few.replicas)
    mean_s = outcome.latency_s.sum() / len(workload)
    assert score.value == pytest.approx(outcome.attainment - mean_s / 1e4 + 1e-6)
    assert sum(score.unserved) + sum(score.requests) == len(workload)


def test_clockwork_places_anew_for_each_window(serving, names, traffic):
    half = len(traffic) // 2
    # The first half asks for the first model only, the second half for the last.
    shifted = traffic.with_models(names, np.where(np.arange(len(traffic)) < half, 0, 5))
    window_s = float(traffic.arrival_ns[half]) / 1e9
    plan = find(ClockworkPlusPlus(window_s=window_s), serving, shifted)
    assert len(plan.placements) == int(traffic.arrival_ns[-1]) // round(window_s * 1e9) + 1
    hosted = [{m for group in placement.groups for m in group.models} for placement in plan.placements[:2]]
    assert 0 in hosted[0]
    assert 5 in hosted[1]
    assert plan.train.attainment >= find(SelectiveReplication(), serving, shifted).train.attainment


def test_placement_of_one_traffic_serves_another(serving, traffic, names):
    plan = find(PartitionSearch(), serving, traffic)
    reversed_popularity = traffic.with_models(names[::-1], traffic.model_index)
    other = serve(serving, plan.placements, reversed_popularity)
    assert 0 < other.attainment <= 1
    assert other.attainment != plan.train.attainment


def test_saved_placement_is_read_back_and_numbers_its_devices(tmp_path, serving, traffic):
    plan = find(PartitionSearch(), serving, traffic)
    save_placement(plan.placement, serving.names, tmp_path / "p.json", about={"why": "test"})
    assert load_placement(tmp_path / "p.json", serving.names) == plan.placement
    written = json.loads((tmp_path / "p.json").read_text())
    devices = [device for group in written["groups"] for device in group["devices"]]
    assert devices == list(range(plan.placement.n_devices))


def test_placement_of_other_models_is_refused(tmp_path, serving):
    placement = Placement(groups=(Group(inter_op=1, intra_op=1, models=(0,)),))
    save_placement(placement, ["stranger"], tmp_path / "p.json")
    with pytest.raises(ScenarioError, match="hosts stranger, which the scenario does not have"):
        load_placement(tmp_path / "p.json", serving.names)
    (tmp_path / "q.json").write_text("{}")
    with pytest.raises(ScenarioError, match="not a placement of this version"):
        load_placement(tmp_path / "q.json", serving.names)


def test_placement_beyond_memory_is_refused(serving, traffic):
    crowded = Placement(groups=(Group(inter_op=1, intra_op=1, models=(0, 1, 2)),))
    with pytest.raises(ValueError, match=r"needs 16\.20 GB .* and has 13\.96 GB; host fewer models"):
        evaluate(serving, crowded, traffic)


def test_workload_of_unknown_models_is_refused(serving, traffic):
    with pytest.raises(ValueError, match="asks for models x"):
        serving.workload(traffic.with_models(("x", *traffic.models[1:]), traffic.model_index))


def test_pictures_are_drawn(tmp_path, serving, traffic):
    plan = find(SelectiveReplication(), serving, traffic)
    placement_figure(plan.placement, serving.names, serving.cluster).savefig(tmp_path / "placement.png")
    panels = {"rate": ([1.0, 2.0], {"a": [0.5, 0.9], "b": [0.2, 0.4]})}
    attainment_figure(panels, title="t").savefig(tmp_path / "attainment.png")
    assert all((tmp_path / name).stat().st_size > 5000 for name in ("placement.png", "attainment.png"))


def test_busy_share_of_one_use_is_its_overlap_with_each_interval():
    second = 10**9
    stages = np.array([[0, 0, second // 2, second, 1]])
    assert busy_share(stages, np.array([0.0, 1.0, 2.0, 3.0]), {0: 1}, 2) == pytest.approx([0.25, 0.25, 0.0])
