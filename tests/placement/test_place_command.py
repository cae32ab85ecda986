"""rooftrace place, from the file to the folder."""

from __future__ import annotations

import itertools
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from typer.testing import CliRunner

from sim.cli import build_app
from sim.placement.scenario import PlaceScenario, describe_schema

EXAMPLES = Path(__file__).parents[2] / "examples"

SMALL = {
    "cluster": {"devices": 4},
    "models": [{"model": "bert-1.3b", "copies": 3}, "moe-2.4b"],
    "workload": {"arrivals": {"process": "gamma", "rate_per_s": 12.0, "cv": 3.0}, "duration_s": 20.0},
}


def run(*arguments: str):
    return CliRunner().invoke(build_app(), ["place", *arguments])


def write(folder: Path, settings: dict) -> str:
    path = folder / "place.yaml"
    path.write_text(yaml.safe_dump(settings))
    return str(path)


def test_place_prints_the_placement_its_attainment_and_the_planning_time(tmp_path):
    result = run(write(tmp_path, SMALL))
    assert result.exit_code == 0, result.output
    for word in ("(inter, intra)", "bert-1.3b#0", "In time, planned traffic", "Planning"):
        assert word in result.output


def test_saved_placement_is_replayed_to_the_same_attainment(tmp_path):
    scenario, out = write(tmp_path, SMALL), tmp_path / "out"
    searched = run(scenario, "--out", str(out), "--json")
    assert searched.exit_code == 0, searched.output
    assert (out / "placement.png").stat().st_size > 5000
    replayed = run(scenario, "--replay", str(out / "placement.json"), "--json")
    assert json.loads(replayed.output)["train"] == json.loads(searched.output)["train"]
    assert "planning" not in json.loads(replayed.output)


def test_every_model_is_named_and_those_without_a_place_besides(tmp_path):
    models = [{"model": "bert-6.7b", "copies": 12}]
    result = run(write(tmp_path, {**SMALL, "models": models}))
    table, _, facts = result.output.partition("Groups ")
    named = {int(word) for word in re.findall(r"#(\d+)", table)}
    missing = {int(word) for word in re.findall(r"#(\d+)", facts.partition("In time")[0])}
    assert f"{len(missing)} of 12 models" in facts
    assert 0 < len(missing) < 12
    assert named == set(range(12)) - missing


def words(text: str) -> str:
    """*text* as one line: where a table breaks its lines depends on the length of paths and figures in it."""
    return " ".join(text.split())


def test_a_search_per_window_says_what_is_saved(tmp_path):
    windows = {**SMALL, "placement": {"policy": "clockwork_plus_plus", "window_s": 5.0}}
    result = run(write(tmp_path, windows), "--out", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    assert "the placement saved is that of the first window" in words(result.output)


@pytest.mark.parametrize(("budget_s", "spent"), [(1.5, True), (1e6, False)])
def test_a_search_says_that_its_budget_was_spent(tmp_path, monkeypatch, budget_s, spent):
    # A clock of its own, a second later at every look, so that how far the search comes is no matter of the machine.
    ticks = itertools.count()
    clock = SimpleNamespace(
        monotonic=lambda: float(next(ticks)), perf_counter=time.perf_counter, process_time=time.process_time
    )
    monkeypatch.setattr("sim.placement.planning.time", clock)
    scenario = write(tmp_path, {**SMALL, "budget_s": budget_s})
    assert json.loads(run(scenario, "--json").output)["planning"]["cut_short"] is spent
    assert ("cut short by budget_s" in words(run(scenario).output)) is spent


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_long_search_in_plain_python_says_what_would_make_it_shorter(tmp_path, monkeypatch, is_compiled):
    monkeypatch.setattr("sim.placement.serving.loop_is_compiled", lambda: is_compiled)
    scenario = write(tmp_path, SMALL)
    assert "plain Python" not in run(scenario, "--json").stderr
    monkeypatch.setattr("sim.placement.planning._LONG_S", 0.0)
    long = run(scenario, "--json")
    assert ("Note: The loop that screens placements is plain Python here" in long.stderr) is not is_compiled
    assert json.loads(long.stdout)["planning"]["screened_by"] == ("compiled loop" if is_compiled else "python loop")


def test_a_file_without_groups_is_no_placement(tmp_path):
    (tmp_path / "bad.json").write_text('{"format": "rooftrace-placement-1"}')
    result = run(write(tmp_path, SMALL), "--replay", str(tmp_path / "bad.json"))
    assert result.exit_code == 2
    assert "is not a placement: it lacks 'groups'" in result.output


def test_train_and_test_traffic_are_apart(tmp_path):
    found = {}
    for test in ({"seed": 5}, {"train_share": 0.5}):
        result = run(write(tmp_path, {**SMALL, "test": test}), "--json")
        assert result.exit_code == 0, result.output
        found[next(iter(test))] = json.loads(result.output)
    assert found["seed"]["test"]["requests"] != found["seed"]["train"]["requests"]
    halves = found["train_share"]
    assert halves["train"]["requests"] + halves["test"]["requests"] == found["seed"]["train"]["requests"]


@pytest.mark.parametrize(
    ("policy", "groups"),
    [
        ({"policy": "selective_replication"}, "4 x (1, 1)"),
        ({"policy": "equal_groups", "inter_op": 2}, "2 x (2, 1)"),
        ({"policy": "dedicated_groups", "inter_op": 1}, "4 x (1, 1)"),
        ({"policy": "round_robin", "inter_op": 4}, "1 x (4, 1)"),
        ({"policy": "clockwork_plus_plus", "window_s": 5.0}, "4 x (1, 1)"),
        ({"policy": "partition", "beam": 1, "max_inter_op": 2, "max_intra_op": 1, "buckets": False}, None),
    ],
)
def test_every_policy_is_there_by_name(tmp_path, policy, groups):
    result = run(write(tmp_path, {**SMALL, "placement": policy}), "--json")
    assert result.exit_code == 0, result.output
    assert groups is None or json.loads(result.output)["groups"] == groups


def test_set_changes_one_setting(tmp_path):
    result = run(
        write(tmp_path, SMALL), "--set", "cluster.devices=2", "--set", "placement.policy=round_robin", "--json"
    )
    assert json.loads(result.output)["scenario"]["cluster"]["devices"] == 2


def test_azure_counts_and_invocations_drive_the_traffic(tmp_path):
    minutes = ",".join(str(m) for m in range(1, 1441))
    row = ",".join("30" if m < 5 else "0" for m in range(1440))
    (tmp_path / "counts.csv").write_text(
        f"HashOwner,HashApp,HashFunction,Trigger,{minutes}\no,a,f,http,{row}\no,a,g,http,{row}\n"
    )
    calls = "".join(f"a,{'fg'[i % 2]},{i * 0.5 + 1},0.25\n" for i in range(400))
    (tmp_path / "calls.csv").write_text("app,func,end_timestamp,duration\n" + calls)
    base = {**SMALL, "models": ["bert-1.3b", "moe-1.3b"]}
    for functions in (
        {"counts": ["counts.csv"], "end_s": 300.0, "window_s": 60.0, "cv_scale": 2.0},
        {"invocations": "calls.csv", "end_s": 200.0, "window_s": 100.0, "rate_scale": 2.0},
    ):
        result = run(write(tmp_path, {**base, "workload": {"functions": functions}}), "--json")
        assert result.exit_code == 0, result.output
        assert 150 < json.loads(result.output)["train"]["requests"] < 1500


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cluster": {"devices": 4, "memory": 3}}, "cluster.memory is not a setting; did you mean memory_gib"),
        ({"models": ["bert-9b"]}, "models of AlpaServe's table are bert-1.3b"),
        ({"models": ["bert-1.3b", "bert-1.3b"]}, "given twice; use copies"),
        ({"placement": "partitoin"}, "did you mean partition?"),
        ({"placement": {"policy": "partition", "bucket": 1}}, "placement.bucket is not a setting"),
        ({"workload": {"duration_s": 5.0}}, "give arrivals or functions"),
        ({"workload": {"arrivals": {"process": "closed_loop", "concurrency": 2}, "duration_s": 1.0}}, "closed_loop"),
        ({"test": {}}, "give seed or train_share"),
        ({"serving": {"batch_sizes": [1, 3]}}, "batch_sizes"),
        ({"models": [{"model": "bert-1.3b", "prompt_tokens": 512}]}, "measured at 2048"),
        ({"workload": {"arrivals": {"process": "gamma", "cv": 1.0}, "duration_s": 5.0}}, "rate_per_s is a number"),
    ],
)
def test_bad_scenario_is_one_sentence_and_exit_code_2(tmp_path, change, message):
    result = run(write(tmp_path, {**SMALL, **change}))
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_catalogue_model_is_served_beside_those_of_the_table(tmp_path):
    result = run(write(tmp_path, {**SMALL, "models": ["bert-1.3b", {"model": "bert-large", "prompt_tokens": 512}]}))
    assert result.exit_code == 0, result.output
    assert "bert-large" in result.output


@pytest.mark.parametrize("name", ["alpaserve.yaml", "alpaserve-very-large.yaml", "alpaserve-generative.yaml"])
def test_examples_are_read_and_their_searches_made(name):
    scenario = PlaceScenario.load(EXAMPLES / "placement" / name)
    assert scenario.serving.cluster.n_devices >= 1
    assert callable(scenario.search.search)


def test_schema_lists_every_section():
    done = CliRunner().invoke(build_app(), ["schema", "--place"])
    assert done.exit_code == 0
    schema = json.loads(done.stdout)
    assert schema == describe_schema()
    assert {"cluster", "models", "workload", "placement", "test"} <= set(schema["properties"])
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["ClusterSection"]["properties"]["memory_gib"]["description"].startswith("For weights")
    processes = [option["properties"]["process"]["const"] for option in schema["$defs"]["Process"]["anyOf"]]
    assert "poisson" in processes
