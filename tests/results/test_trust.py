"""A summary says how far to trust it, alike wherever the summary goes."""

import json
from html import unescape

import pytest

from sim import Scenario, simulate, sweep
from sim.engine import Experiment
from sim.launch import export, recommended
from sim.report.html import write_run_report
from sim.results import Result, fact_rows, interval_text
from sim.results.trust import REPLAYED
from sim.study.advise import advise
from sim.study.compare import compare

BASE = Scenario.default().with_set("scheduler={policy: vllm}", "workload.limit=20")
PARTS = ("intervals", "trust", "memory")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return simulate(BASE).save(tmp_path_factory.mktemp("trust") / "r")


@pytest.fixture(scope="module")
def summary(folder):
    return Result.load(folder).summary


def test_a_saved_summary_has_intervals_their_basis_what_prices_are_from_and_the_memory(folder, summary):
    assert json.loads((folder / "summary.json").read_text()) == simulate(BASE).summary | {"wall_s": summary["wall_s"]}
    assert summary["intervals"]["level"] == 0.9
    for name, each in summary["intervals"]["figures"].items():
        latency, _, statistic = name.partition(".")
        assert each["low"] < summary[latency][statistic] < each["high"]
    assert summary["trust"]["tier"] == "model not seen by the fit"
    assert summary["intervals"]["basis"].endswith("whose model no fit had seen")
    assert summary["memory"]["blocks"] * summary["memory"]["block_tokens"] > 1e5
    assert summary["kv_utilization"]["max"] > 0
    assert summary["request_limits"] == {"ttft_s": 1.0, "tpot_s": 0.05}


def test_pages_exports_comparisons_sweeps_and_advice_say_the_same_of_a_run(folder, summary, tmp_path):
    said = interval_text(summary["intervals"])
    assert dict(fact_rows(summary))["Expect to measure"] == said
    page = unescape(write_run_report(Result.load(folder), tmp_path / "r.html").read_text())
    assert page.count(said) == 2  # the sentence at the head, and the table
    for target in ("vllm", "kubernetes", "dynamo"):
        text = export(recommended(folder), target).text
        assert said in text
        assert dict(fact_rows(summary))["KV cache"] in text
    for found in (compare(folder, folder), compare(BASE, BASE, replications=2, jobs=1)):
        for side in found.trusted:
            assert {key: side[key] for key in PARTS} == {key: summary[key] for key in PARTS}
    (row,) = [row for row in compare(folder, folder).rows() if row["metric"] == "ttft_s.mean"]
    bounds = summary["intervals"]["figures"]["ttft_s.mean"]
    assert [row[f"{side}_{end}"] for side in "ab" for end in ("low", "high")] == [bounds["low"], bounds["high"]] * 2
    table = sweep(BASE, axes={"replicas": [1]}, jobs=1).table.iloc[0]
    advised = advise(BASE, only=["precision"], replications=1, jobs=1).now.figures
    for figures in (table, advised):
        assert figures["intervals.figures.tpot_s.mean.high"] == summary["intervals"]["figures"]["tpot_s.mean"]["high"]
        assert (figures["intervals.basis"], figures["trust.tier"]) == (
            summary["intervals"]["basis"],
            summary["trust"]["tier"],
        )
        assert figures["memory.blocks"] == summary["memory"]["blocks"]


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("cost_model=roofline", "no measured deployment was laid beside this cost model"),
        ("serving_stack=ideal", "no measured deployment was held back of serving_stack ideal on h100-sxm"),
        ("decoding={method: ngram, num_speculative_tokens: 2, acceptance: {alpha: 0.5}}", "speculative decoding"),
        ("pools={a: {replicas: 1}, b: {replicas: 1}}", "of several pools, or models, together"),
        ("workload.rate_scale=500", "the run is saturated"),
    ],
)
def test_where_there_is_no_interval_a_sentence_says_why(setting, why):
    found = simulate(BASE.with_set("workload.limit=200", setting)).summary
    assert set(found["intervals"]) == {"why_not"}
    assert why in found["intervals"]["why_not"]
    assert dict(fact_rows(found))["Expect to measure"] == f"no interval: {found['intervals']['why_not']}"
    assert found["trust"]
    assert found["memory"]


def test_an_experiment_made_by_hand_says_that_nothing_is_known_of_it():
    from sim.scenario.assembly import resolve

    experiment = resolve(BASE).experiment
    assert isinstance(experiment, Experiment)
    assert simulate(experiment).summary["intervals"] == {"why_not": "nothing is said of the deployment"}


def test_intervals_of_replays_take_the_place_of_those_of_the_table():
    given = {
        "level": 0.5, "replays": 3, "simulations": 4, "basis": "3 draws", "saturated_replays": 1,
        "figures": {"tpot_s.mean": {"middle": 0.02, "low": 0.01, "high": 0.03, "simulation_low": 0.02, "simulation_high": 0.021}},
    }  # fmt: skip
    run = simulate(BASE)
    summary = Result(run.columns, manifest={**run.manifest, REPLAYED: given}, slo=run.slo).summary
    assert summary["intervals"] == given
    facts = fact_rows(summary)
    assert ("Expect to measure", "mean TPOT 10 ms to 30 ms (50 % interval), from 3 draws") in facts
    assert ("Too few", "the farthest of 3 replays hold 50% on average; 90 % take 19 of them or more") in facts
    assert ("Saturated", "1 of 3 replays") in facts
