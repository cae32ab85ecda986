import json
import re
import shlex

import pytest
from typer.testing import CliRunner

from sim import RooftraceError, Scenario
from sim.cli import build_app
from sim.study.advise import DEFAULT_SLO, advise, command
from sim.study.table import flatten

BASE = Scenario.default().with_set(
    "workload={arrivals: {process: poisson, rate_per_s: 20}, prompt_tokens: 600, output_tokens: 60, requests: 100}",
    "slo={ttft_p95_s: 0.5, tpot_p95_s: 0.05}",
)
SHARED = BASE.with_set(
    "workload={shared_prefix: {groups: 4, prompts_per_group: 10, system_prompt_tokens: 4000, question_tokens: 50, "
    "output_tokens: 20, stages: [{rate_per_s: 10, duration_s: 4}]}}"
)


def names(found):
    return {row.candidate.name: row for row in found.rows}


def test_the_figures_are_those_of_the_runs_that_are_named(tmp_path):
    file = tmp_path / "s.yaml"
    file.write_text(BASE.to_yaml())
    arguments = ["advise", str(file), "--only", "machines,precision", "--set", "seed=3", "--limit", "ttft_p99=2s"]
    done = CliRunner().invoke(build_app(), [*arguments, "--replications", "2", "--jobs", "1", "--json"])
    assert done.exit_code == 0, done.output
    found = {each["change"]: each for each in json.loads(done.stdout)["candidates"]}
    for change in ("2 machines", "FP8 weights"):
        program, *again = shlex.split(found[change]["run"])
        assert program == "rooftrace"
        run = CliRunner().invoke(build_app(), [*again, "--json", "--no-plots", "--out", str(tmp_path / "run")])
        assert run.exit_code == 0, run.output
        figures = flatten(json.loads(run.stdout))
        expected = found[change]["figures"]
        assert {"ttft_s.p95", "costs.usd_per_month", "slo.ttft_p99_s.value_s"} <= set(expected)
        assert {key: figures.get(key, "missing") for key in expected} == expected
    assert found["2 machines"]["half_widths"]["ttft_s.p95"] > 0


def test_what_keeps_the_slo_is_ranked_by_cost_and_equals_share_a_rank():
    found = advise(BASE, only=["machines", "tensor", "precision"], replications=1, jobs=1)
    costs = [row.usd_per_hour or 0.0 for row in found.rows if row.keeps]
    assert costs == sorted(costs)
    ranks = {row.candidate.name: rank for row, rank in zip(found.rows, found.ranks(), strict=True)}
    assert ranks["as it is"] == ranks["FP8 weights"] == ranks["FP8 KV cache"] == 1
    assert ranks["2 machines"] == ranks["tensor parallel 2"] == 5
    assert found.least == 1


def test_an_fp8_kv_cache_is_tried_once():
    found = names(advise(BASE, only=["precision"], replications=1, jobs=1))
    assert found["FP8 KV cache"].candidate.settings["kv_precision"] == "fp8"
    again = advise(BASE.with_set("kv_precision=fp8"), only=["precision"], replications=1, jobs=1)
    assert "FP8 KV cache" not in names(again)
    assert "precision: the KV cache is in fp8 already." in again.said


def test_the_machines_that_are_needed_are_not_said_where_fewer_were_not_tried(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    idle = ["--set", "workload.requests=20", "--set", "replicas=3", "--replications", "1", "--jobs", "1"]
    of_one = CliRunner().invoke(build_app(), ["advise", *idle, "--only", "release"]).output
    assert "3 or fewer, and 3 now: not searched for, which --only machines does" in of_one
    searched = CliRunner().invoke(build_app(), ["advise", *idle, "--only", "machines"]).output
    assert re.search(r"Machines needed +1, and 3 now", searched)


def test_the_least_machines_are_found_beyond_those_that_were_proposed():
    few = BASE.with_set("slo={tpot_p95_s: 0.0065}", "workload.arrivals.rate_per_s=40")
    found = advise(few, only=["machines"], replications=1, jobs=1)
    tried = {row.candidate.settings.get("replicas", 1): row.keeps for row in found.rows}
    assert found.least is not None
    assert found.least > 2
    assert not tried[found.least - 1]
    assert tried[found.least]


def test_prefix_caching_is_judged_where_the_workload_names_blocks_and_only_there():
    blind = advise(BASE, only=["prefix", "memory"], replications=1, jobs=1)
    assert list(names(blind)) == ["as it is"]
    assert any("does not say which prompts begin alike" in text for text in blind.said)
    found = advise(SHARED, only=["prefix", "memory"], replications=1, jobs=1)
    assert any("a cache without limit would find 8" in text for text in found.said)
    rows = names(found)
    assert rows["no prefix caching"].figures["ttft_s.p95"] > rows["as it is"].figures["ttft_s.p95"]
    assert rows["200 GiB host memory"].candidate.settings == {"memory.tiers": [{"kind": "host", "gib": 200.0}]}


def test_a_change_that_cannot_be_is_listed_with_its_reason():
    big = BASE.with_set("model=llama-3.1-70b", "parallel.tensor=2", "workload.requests=5")
    found = advise(big, only=["tensor"], replications=1, jobs=1)
    ((name, reason),) = [(each.candidate.name, each.reason) for each in found.refused]
    assert name == "tensor parallel 1"
    assert reason.startswith("llama-3.1-70b")
    assert list(names(found)) == ["as it is", "tensor parallel 4"]


@pytest.mark.slow(reason="several searches or whole runs")
def test_devices_that_hold_the_model_are_tried_and_others_are_listed():
    big = BASE.with_set("model=llama-3.1-70b", "parallel.tensor=2", "workload.requests=5")
    found = advise(big, only=["devices"], replications=1, jobs=1)
    assert {"h200", "b200", "gb200"} <= set(names(found))
    reasons = {each.candidate.name: each.reason for each in found.refused}
    assert {"l4", "v100-32"} <= set(reasons)
    assert any("have no price here" in text for text in found.said)


def test_without_an_slo_one_is_assumed_and_in_the_command():
    plain = BASE.with_set("slo={}")
    found = advise(plain, only=["release"], replications=1, jobs=1)
    assert found.assumed == DEFAULT_SLO
    assert found.base.slo.of_all == {"ttft_p95_s": 1.0, "tpot_p95_s": 0.05}
    done = CliRunner().invoke(build_app(), ["advise", "--set", "slo={}", "--set", "workload.requests=20",
                                            "--only", "release", "--replications", "1", "--jobs", "1"])  # fmt: skip
    assert "assumed, as the scenario has no SLO" in done.output
    assert "tpot_p95_s" in done.output.split("To run one of them:")[1]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([], "list prices of different providers and dates (rooftrace hardware show NAME); --set costs.provider="),
        (["--set", "costs.provider=aws"], "list prices of aws, of different dates (rooftrace hardware show NAME)\n"),
    ],
)
def test_whose_prices_the_rows_have_is_said(settings, said, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    given = ["advise", "--set", "workload.requests=20", "--only", "devices", "--replications", "1", "--jobs", "1"]
    done = CliRunner().invoke(build_app(), [*given, *settings])
    assert said in re.sub(r" +\n", "\n", done.output)


def test_pools_and_unknown_groups_are_refused():
    with pytest.raises(RooftraceError, match="did you mean machines"):
        advise(BASE, only=["machine"])
    with pytest.raises(RooftraceError, match="has pools"):
        advise(BASE.with_set("pools={a: {replicas: 1}, b: {replicas: 1}}"))


def test_pools_for_prefill_and_decode_are_a_scenario_to_run():
    found = advise(BASE.with_set("replicas=4"), only=["pools"], replications=1, jobs=1)
    assert set(names(found)) == {"as it is", "2 prefill and 2 decode machines", "1 prefill and 3 decode machines"}
    assert command("my file.yaml", ["replicas=2"]) == "rooftrace run 'my file.yaml' --set replicas=2"


@pytest.mark.parametrize(
    ("model", "change", "source"),
    [
        ("llama-3.1-8b", "EAGLE-3, 3 drafted, acceptance as published", "EAGLE-3 of Llama-3.1-8B on MT-Bench"),
        ("llama-3.1-8b", "EAGLE, 3 drafted, acceptance as published", "EAGLE-1 of Llama-3.1-8B on MT-Bench"),
        ("deepseek-v3", "MTP, 1 drafted, acceptance as published", "arXiv 2412.19437"),
    ],
)
def test_speculation_is_judged_by_acceptance_that_was_published_and_says_that_it_is_assumed(model, change, source):
    devices = ("hardware=h200", "parallel.tensor=8") if model == "deepseek-v3" else ()
    found = advise(
        BASE.with_set(f"model={model}", "workload.requests=5", *devices), only=["speculation"], replications=1, jobs=1
    )
    row = names(found)[change]
    assert row.figures["tpot_s.mean"] < found.now.figures["tpot_s.mean"]
    (note,) = [str(each) for each in found.notes if change in each.where and "assumed" in each.note]
    assert note.startswith(f"{change}: acceptance is assumed: ")
    assert source in note


def test_a_model_whose_drafters_nobody_has_published_is_told_so():
    found = advise(BASE.with_set("model=qwen3-8b", "workload.requests=5"), only=["speculation"], replications=1, jobs=1)
    assert list(names(found)) == ["as it is"]
    assert any("no acceptance is published for qwen3-8b" in text for text in found.said)
