import json
import math

import pytest
from typer.testing import CliRunner

from sim import RooftraceError, Scenario, simulate, sweep
from sim.cli import build_app
from sim.study import statistics as st
from sim.study.compare import Difference, compare
from tests.sample import few

BUSY = Scenario.default().with_set(
    "scheduler={policy: sarathi}",
    "workload={arrivals: {process: poisson, rate_per_s: 20}, prompt_tokens: 400, "
    "output_tokens: {distribution: uniform, min_tokens: 5, max_tokens: 40}, requests: 120}",
)


def verdict(change, metric="ttft_s.p99", low=None, high=None):
    interval = st.Change(
        mean=change, low=math.nan if low is None else low, high=math.nan if high is None else high, n=5
    )
    return Difference(metric=metric, where={}, a=1.0, b=1 + change, change=interval, why="one run").verdict


def test_verdicts_are_sentences():
    assert verdict(-0.12, low=-0.151, high=-0.089) == "B is 12.0 % faster at p99 TTFT (8.9 to 15.1 %)"
    assert verdict(0.12, low=-0.08, high=0.32) == "no difference can be told at p99 TTFT (from 8 % down to 32 % up)"
    assert verdict(0.5, "output_tokens_per_s", 0.375, 0.825) == "B has 50 % more output throughput (38 to 82 %)"
    assert verdict(0.5, "iterations", 0.39, 0.61) == "B is 50 % higher in iterations (39 to 61 %)"
    assert verdict(-0.09, low=-0.33, high=-0.004) == "B is 9.0 % faster at p99 TTFT (0.4 to 33.0 %)"
    assert verdict(0.0, low=0.0, high=0.0) == "A and B are equal at p99 TTFT"
    assert verdict(0.234) == "B is 23.4 % slower at p99 TTFT; one run"


def test_shares_differ_by_points_and_not_by_percent_of_each_other():
    assert verdict(0.031, "slo_attainment", 0.012, 0.05) == "B has 3.1 points more SLO attainment (1.2 to 5.0 points)"
    assert verdict(-0.5, "busy_fraction", -0.6, -0.4) == "B is 50.0 points lower in busy_fraction (40.0 to 60.0 points)"
    said = "no difference can be told at SLO attainment (from 8 points down to 32 points up)"
    assert verdict(0.12, "slo_attainment", -0.08, 0.32) == said


def test_a_share_that_was_none_grows_by_points():
    never, always = (BUSY.with_set(f"slo={{ttft_s: {limit_s}}}") for limit_s in (1e-6, 1e3))
    found = compare(never, always, replications=2, jobs=1, metrics=["slo_attainment"])
    (row,) = found.rows()
    assert (row["change"], row["unit"], row["a"], row["b"]) == (1.0, "points", 0.0, 1.0)
    assert row["verdict"].startswith("B has 100 points more SLO attainment")


def test_shares_over_seeds_have_an_interval_in_points():
    held = BUSY.with_set("slo={ttft_s: 0.1}", "workload.requests=100")
    found = compare(held, held.with_set("hardware=a100-80gb-sxm"), replications=4, jobs=1, metrics=["slo_attainment"])
    (row,) = found.rows()
    assert row["change"] == pytest.approx(row["b"] - row["a"])
    assert row["low"] < row["change"] < row["high"]


def test_scenarios_are_compared_on_the_same_random_numbers():
    found = compare(BUSY, BUSY.with_set("hardware=a100-80gb-sxm"), replications=4, jobs=1, metrics=["tpot_s.p50"])
    (each,) = found
    assert each.change.n == 4
    assert each.certain
    # By hand, from the same seeds.
    a, b = (
        [simulate(scenario.with_value("seed", seed)).summary["tpot_s"]["p50"] for seed in range(4)]
        for scenario in (BUSY, BUSY.with_set("hardware=a100-80gb-sxm"))
    )
    assert each.change == st.ratio_interval(a, b)
    assert each.change.mean == pytest.approx(sum(b) / sum(a) - 1)
    assert "slower at p50 TPOT" in each.verdict


DRAFTS = "decoding={method: ngram, num_speculative_tokens: 2, acceptance: {alpha: 0.7}}"


@pytest.mark.parametrize("folders", few([False, True], reason="several whole runs"))
@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        ("replicas=1", "scheduler=vllm-v0", "no intervals"),
        ("replicas=1", DRAFTS, "nothing in A being random; intervals hold"),
        (DRAFTS, "replicas=1", "nothing in B being random; intervals hold"),
        (DRAFTS, "router=random", "3 replications"),
    ],
)
def test_what_is_said_of_intervals_holds_of_those_that_are_there(tmp_path, a, b, said, folders):
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{i / 9},{90 * i},30\n" for i in range(1, 9)))
    fixed = Scenario.default().with_set(f"workload.trace={trace}", "replicas=2")
    a, b = fixed.with_set(a), fixed.with_set(b)
    if folders:
        a, b = (sweep(each, replications=3, jobs=1, out=tmp_path / name) for each, name in ((a, "a"), (b, "b")))
    found = compare(a, b, replications=3, jobs=1)
    assert said in found.how
    some = any(row["half_width"] is not None for row in found.rows())
    assert some == ("no intervals" not in found.how) == ("intervals hold" in found.how)


def test_scenarios_in_which_nothing_is_random_are_paired_request_by_request(tmp_path, monkeypatch):
    """A log of one's own behind a router that draws nothing: equal replications tell nothing, the requests do."""
    trace = tmp_path / "trace.csv"
    rows = "".join(f"{i / 4},{100 + i * 37 % 900},{5 + i % 30}\n" for i in range(400))
    trace.write_text(f"arrival_s,prompt_tokens,output_tokens\n{rows}")
    a = Scenario.default().with_set(f"workload.trace={trace}")
    b = a.with_set("hardware=a100-80gb-sxm")
    sizes = []
    monkeypatch.setattr(
        "sim.study.compare.sweep", lambda plan, **given: sizes.append(plan.replications) or sweep(plan, **given)
    )
    found = compare(a, b, jobs=1)
    assert sizes == [3, 3]  # of 10
    assert [each.change for each in found] == [each.change for each in compare(simulate(a), simulate(b))]
    assert {each.metric: each for each in found}["e2el_s.mean"].certain
    assert "nothing in these scenarios is random" in found.how
    assert not any("compare" in each.verdict for each in found)  # no sending from scenarios to folders and back
    differ = compare(a, b.with_set("workload.rate_scale=2"), jobs=1)
    assert "their requests differ" in differ.how
    assert {each.why for each in differ} == {"equal replications have no interval"}
    # In the first three replications no machine fails, in the fourth one does.
    sizes.clear()
    failing = [
        each.with_set("failures={mean_up_s: 500, mean_down_s: 20, in_flight: retry}", "seed=3") for each in (a, b)
    ]
    assert "nothing in these scenarios" not in compare(*failing, replications=4, jobs=1).how
    assert sizes == [4, 4]


def test_a_scenario_equals_itself():
    found = compare(BUSY, BUSY, replications=2, jobs=1)
    assert {each.verdict.startswith("A and B are equal") or each.change is None for each in found} == {True}


def test_overload_is_a_verdict_and_not_a_number():
    busy = BUSY.with_set("workload.requests=300")
    crowded = busy.with_set("scheduler.max_sequences=1")
    found = {each.metric: each for each in compare(busy, crowded, replications=2, jobs=1)}
    assert found["ttft_s.p99"].change is None
    assert "B is saturated" in found["ttft_s.p99"].verdict
    assert found["tpot_s.p50"].change is not None


def test_results_are_paired_request_by_request(tmp_path):
    long = BUSY.with_set("workload.requests=600")
    simulate(long).save(tmp_path / "a")
    simulate(long.with_set("hardware=a100-80gb-sxm")).save(tmp_path / "b")
    found = {each.metric: each for each in compare(tmp_path / "a", tmp_path / "b")}
    assert found["e2el_s.p50"].change.n == 16
    assert compare(tmp_path / "a", tmp_path / "b", metrics=["e2el_s.p50"]).a.startswith(str(tmp_path / "a"))
    assert found["e2el_s.p50"].certain
    assert "600 requests are too few for an interval of this: 1,600 are the least" in found["ttft_s.p99"].verdict
    assert math.isnan(found["ttft_s.p99"].change.half_width)
    other = simulate(long.with_set("seed=1"))
    with pytest.raises(RooftraceError, match=r"different requests .* same workload and seed"):
        compare(tmp_path / "a", other)


def test_the_change_of_two_results_is_that_of_the_figures_shown():
    long = BUSY.with_set("workload.requests=603")
    (each,) = compare(simulate(long), simulate(long.with_set("hardware=a100-80gb-sxm")), metrics=["e2el_s.mean"])
    assert each.change.mean == pytest.approx(each.b / each.a - 1, rel=1e-12)


def test_what_is_nothing_in_a_has_no_relative_change():
    run = BUSY.with_set("workload.requests=20")
    (each,) = compare(simulate(run), simulate(run.with_set("seed=0")), metrics=["preemptions"])
    assert (each.a, each.change, each.why) == (0, None, "no relative change from 0")


def test_figures_of_a_window_are_compared_over_the_requests_of_both():
    run = BUSY.with_set("workload.requests=600", "window={from_s: 10, to_s: 25}")
    a, b = simulate(run), simulate(run.with_set("hardware=a100-80gb-sxm"))
    found = compare(a, b, metrics=["e2el_s.mean"])
    (each,) = found
    inside = a.requests["arrival_ns"] - a.requests["arrival_ns"].min()
    inside = (inside >= 10_000_000_000) & (inside <= 25_000_000_000)
    means = [side.requests["e2el_s"][inside].mean() for side in (a, b)]
    assert each.change.mean == pytest.approx(means[1] / means[0] - 1)
    assert f"({inside.sum():,} in the windows of both)" in found.how


def crowd(rate_per_s, seats):
    arrivals = f"workload.arrivals={{process: poisson, rate_per_s: {rate_per_s}}}"
    return simulate(BUSY.with_set(arrivals, "workload.requests=600", f"scheduler.max_sequences={seats}"))


def test_results_whose_queues_remember_for_long_are_told_how_many_requests_would_do():
    """At 22 requests a second eight seats hardly fill, and four leave a queue of five independent stretches."""
    idle, busy = crowd(22, 8), crowd(22, 4)
    for a, b in ((idle, busy), (busy, idle)):
        (each,) = compare(a, b, metrics=["e2el_s.mean"])
        assert math.isnan(each.change.half_width)
        assert "600 requests are too few for an interval of this at this load" in each.verdict
    assert not math.isnan(compare(idle, crowd(22, 7), metrics=["e2el_s.mean"]).differences[0].change.half_width)


def test_saturated_results_have_a_verdict_and_no_change():
    (each,) = compare(crowd(24, 8), crowd(24, 3), metrics=["e2el_s.mean"])
    assert each.change is None
    assert "B is saturated" in each.verdict
    assert "lower the rate or add replicas" in each.verdict


def test_requests_outside_the_window_of_either_are_left_out():
    whole, part = simulate(BUSY), simulate(BUSY.with_set("hardware=a100-80gb-sxm", "window={from_s: 5}"))
    means = [side.requests["e2el_s"][part.in_window].mean() for side in (whole, part)]
    there, back = (compare(*pair, metrics=["e2el_s.mean"]).differences[0] for pair in ((whole, part), (part, whole)))
    assert there.change.mean == pytest.approx(means[1] / means[0] - 1)
    assert back.change.mean == pytest.approx(means[0] / means[1] - 1)


@pytest.mark.parametrize("stretches", [(3.0, math.inf), (math.inf, 3.0)])
def test_the_queue_that_remembers_longer_decides(monkeypatch, stretches):
    busy = BUSY.with_set("workload.requests=300")
    one = simulate(busy)
    other = simulate(busy.with_set("hardware=a100-80gb-sxm"))
    (free,) = compare(one, other, metrics=["e2el_s.mean"])
    assert not math.isnan(free.change.half_width)
    found = iter(stretches)
    monkeypatch.setattr("sim.study.compare.queue_stretches", lambda *_: next(found))
    (bound,) = compare(one, other, metrics=["e2el_s.mean"])
    assert math.isnan(bound.change.half_width)
    assert "about 2,000 would do" in bound.verdict


def test_clients_that_wait_for_answers_are_not_taken_for_a_queue_without_end():
    workload = "workload={arrivals: {process: closed_loop, concurrency: 8}, prompt_tokens: 400, output_tokens: 20, requests: 400}"
    a = BUSY.with_set(workload, "scheduler.max_sequences=2")
    (each,) = compare(simulate(a), simulate(a), metrics=["e2el_s.mean"])
    assert each.verdict == "A and B are equal at mean E2EL"
    assert each.change.half_width == 0


def test_sweeps_are_paired_point_by_point(tmp_path):
    axes = {"workload.rate_scale": [0.5, 1.0]}
    for name, scenario in (("a", BUSY), ("b", BUSY.with_set("hardware=a100-80gb-sxm"))):
        sweep(scenario, axes=axes, replications=2, out=tmp_path / name, jobs=1)
    found = compare(tmp_path / "a", tmp_path / "b", metrics=["tpot_s.mean", "e2el_s.mean"])
    assert [(each.where["workload.rate_scale"], each.metric) for each in found] == [
        (0.5, "tpot_s.mean"),
        (0.5, "e2el_s.mean"),
        (1.0, "tpot_s.mean"),
        (1.0, "e2el_s.mean"),
    ]
    assert found.table["change"].gt(0).all()
    assert "left out" not in found.how
    more = sweep(BUSY, axes={"workload.rate_scale": [0.5, 2.0, 3.0]}, replications=2, jobs=1)
    found = compare(tmp_path / "a", more, metrics=["tpot_s.mean"])
    assert len(found.differences) == 1
    assert "left out: 1 points of A and 2 of B" in found.how


def test_runs_that_are_done_take_no_replications(tmp_path):
    done = CliRunner().invoke(build_app(), ["compare", str(tmp_path), str(tmp_path), "--replications", "9"])
    assert done.exit_code == 2
    assert "--replications is about running scenarios" in done.stderr


def test_unlike_things_are_not_compared(tmp_path):
    simulate(BUSY).save(tmp_path / "a")
    with pytest.raises(RooftraceError, match="A is the result of a run and B a scenario"):
        compare(tmp_path / "a", BUSY)
    with pytest.raises(RooftraceError, match="share their seeds"):
        compare(BUSY, BUSY.with_set("seed=3"))
    with pytest.raises(RooftraceError, match=r"did you mean ttft_s\.p99"):
        compare(BUSY, BUSY, metrics=["ttft.p99"], replications=2, jobs=1)
    with pytest.raises(RooftraceError, match="B cannot be run"):
        compare(BUSY, BUSY.with_set("scheduler.token_budget=-1"), replications=2, jobs=1)


def test_the_command_prints_sentences_or_json(tmp_path):
    a, b = tmp_path / "a.yaml", tmp_path / "b.yaml"
    a.write_text(BUSY.to_yaml())
    b.write_text(BUSY.with_set("hardware=a100-80gb-sxm").to_yaml())
    arguments = ["compare", str(a), str(b), "--replications", "2", "--jobs", "1"]
    text = CliRunner().invoke(build_app(), arguments)
    assert text.exit_code == 0, text.output
    assert "B is" in text.stdout
    assert "2 replications" in text.stdout
    found = json.loads(CliRunner().invoke(build_app(), [*arguments, "--json"]).stdout)
    assert {each["metric"] for each in found["differences"]} >= {"ttft_s.p99", "tpot_s.p50"}
    refused = CliRunner().invoke(build_app(), ["compare", str(a), str(tmp_path / "none.yaml")])
    assert refused.exit_code == 2
