import json
import math

import pytest
from typer.testing import CliRunner

from sim import RooftraceError, Scenario, simulate, sweep
from sim.cli import build_app
from sim.study import statistics as st
from sim.study.compare import Difference, compare

BUSY = Scenario.default().with_set(
    "workload={arrivals: {process: poisson, rate_per_s: 20}, prompt_tokens: 400, "
    "output_tokens: {distribution: uniform, min_tokens: 5, max_tokens: 40}, requests: 300}"
)


def verdict(change, metric="ttft_s.p99", half=0.03):
    interval = st.Interval(mean=change, half_width=half, n=5)
    return Difference(metric=metric, where={}, a=1.0, b=1 + change, change=interval).verdict


def test_verdicts_are_sentences():
    assert verdict(-0.12, half=0.031) == "B is 12.0 ± 3.1 % faster at p99 TTFT"
    assert verdict(0.12, half=0.2) == "no difference can be told at p99 TTFT (12 ± 20 % up)"
    assert verdict(0.5, "output_tokens_per_s", 0.125) == "B has 50 ± 12 % more output throughput"
    assert verdict(0.5, "iterations", 0.11) == "B is 50 ± 11 % higher in iterations"
    assert verdict(0.0, half=0.0) == "A and B are equal at p99 TTFT"


def test_scenarios_are_compared_on_the_same_random_numbers():
    found = compare(BUSY, BUSY.with_set("hardware=a100-80gb-sxm"), replications=4, jobs=1, metrics=["tpot_s.p50"])
    (each,) = found
    assert each.change.n == 4
    assert each.certain
    # By hand, from the same seeds.
    ratios = []
    for seed in range(4):
        a, b = (
            simulate(scenario.with_value("seed", seed)).summary["tpot_s"]["p50"]
            for scenario in (BUSY, BUSY.with_set("hardware=a100-80gb-sxm"))
        )
        ratios.append(b / a - 1)
    assert each.change == st.mean_interval(ratios)
    assert "slower at p50 TPOT" in each.verdict


def test_a_scenario_equals_itself():
    found = compare(BUSY, BUSY, replications=2, jobs=1)
    assert {each.verdict.startswith("A and B are equal") or each.change is None for each in found} == {True}


def test_overload_is_a_verdict_and_not_a_number():
    crowded = BUSY.with_set("scheduler.max_sequences=1")
    found = {each.metric: each for each in compare(BUSY, crowded, replications=2, jobs=1)}
    assert found["ttft_s.p99"].change is None
    assert "B is saturated" in found["ttft_s.p99"].verdict
    assert found["tpot_s.p50"].change is not None


def test_results_are_paired_request_by_request(tmp_path):
    long = BUSY.with_set("workload.requests=600")
    simulate(long).save(tmp_path / "a", plots=False)
    simulate(long.with_set("hardware=a100-80gb-sxm")).save(tmp_path / "b", plots=False)
    found = {each.metric: each for each in compare(tmp_path / "a", tmp_path / "b")}
    assert found["e2el_s.p50"].change.n == 20
    assert compare(tmp_path / "a", tmp_path / "b", metrics=["e2el_s.p50"]).a.startswith(str(tmp_path / "a"))
    assert found["e2el_s.p50"].certain
    assert "too few" in found["ttft_s.p99"].verdict
    assert math.isnan(found["ttft_s.p99"].change.half_width)
    other = simulate(long.with_set("seed=1"))
    with pytest.raises(RooftraceError, match="different requests"):
        compare(tmp_path / "a", other)


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
    simulate(BUSY).save(tmp_path / "a", plots=False)
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
