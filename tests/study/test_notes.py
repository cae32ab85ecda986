"""Commands that run a scenario many times print what `rooftrace run` notes, and call no candidate best that another equals."""

import json

import pytest
from typer.testing import CliRunner

from sim.cli import build_app
from sim.scenario import Scenario
from sim.scenario.assembly import resolve
from sim.study.compare import compare
from sim.study.notes import Notes
from sim.study.optimize import cheapest
from sim.study.sweep import sweep

UNSAID = "the workload does not say which prompts begin alike"


@pytest.fixture
def scenario(tmp_path):
    rows = "".join(f"{0.2 * number},300,20\n" for number in range(30))
    (tmp_path / "trace.csv").write_text(f"arrival_s,prompt_tokens,output_tokens\n{rows}")
    file = tmp_path / "scenario.yaml"
    file.write_text(
        "model: llama-3.2-1b\nscheduler: {policy: vllm}\nmemory: {prefix_caching: true}\n"
        "workload: {trace: trace.csv}\nslo: {ttft_s: 0.05}\n"
    )
    return file


def test_a_sentence_stands_once_with_the_places_that_it_holds_for():
    notes = Notes()
    for place in range(6):
        notes.add(f"replicas={place}", ["always", "always", *(["not at 5"] if place < 5 else [])])
    assert [str(each) for each in notes.found] == [
        "always",
        "replicas=0; replicas=1; replicas=2 and 2 more: not at 5",
    ]


SEARCHES = pytest.mark.slow(reason="several searches or whole runs")


@pytest.mark.parametrize(
    "command",
    [
        ["run", "SCENARIO", "--out", "OUT", "--no-plots"],
        ["sweep", "SCENARIO", "--axis", "replicas=1,2", "--jobs", "1", "--out", "OUT"],
        ["optimize", "SCENARIO", "--goal", "cost", "--axis", "replicas=1,2", "--replications", "2", "--jobs", "1"],
        ["compare", "SCENARIO", "SCENARIO", "--replications", "2", "--jobs", "1"],
        ["optimize", "SCENARIO", "--goal", "rate", "--replications", "2", "--tolerance", "0.9"],
        pytest.param(["capacity", "SCENARIO", "--slo", "--tolerance", "0.9"], marks=SEARCHES),
    ],
    ids=lambda command: " ".join(word for word in command[:4] if word.islower()),
)
def test_the_notes_of_run_are_printed_by_every_command_that_runs(command, scenario, tmp_path):
    wanted = resolve(Scenario.load(scenario)).manifest["notes"]
    assert any(UNSAID in note for note in wanted)
    words = [{"SCENARIO": str(scenario), "OUT": str(tmp_path / "out")}.get(word, word) for word in command]
    printed = CliRunner().invoke(build_app(), words)
    assert printed.exit_code == 0, printed.output
    for note in wanted:
        assert printed.stderr.count(note) == 1


def test_the_rows_of_a_note_are_named_where_others_lack_it(scenario):
    result = sweep(scenario, axes={"memory.prefix_caching": [True, False]}, jobs=1)
    (note,) = (each for each in result.notes if UNSAID in each.note)
    assert (note.where, note.n, note.of) == (("memory.prefix_caching=True",), 1, 2)
    assert str(note).startswith("memory.prefix_caching=True: ")
    assert result.counts["points"] == 2


def test_notes_of_one_side_of_a_comparison_say_of_which(scenario):
    base = Scenario.load(scenario)
    found = compare(base, base.with_set("memory.prefix_caching=false"), replications=2, jobs=1)
    (note,) = (each for each in found.notes if UNSAID in each.note)
    assert note.where == ("A",)


def test_candidates_that_are_equal_are_all_said(scenario):
    base = Scenario.load(scenario)
    axes = {"memory.prefix_caching": [True, False]}
    found = cheapest(base, axes, goal="gpu-seconds", replications=2, jobs=1)
    assert [row["memory.prefix_caching"] for row in found.least] == [True, False]
    assert "memory.prefix_caching=True" in str(found)
    assert "as little of it: memory.prefix_caching=False" in str(found)
    apart = cheapest(base, {"replicas": [1, 2]}, goal="gpu-seconds", replications=2, jobs=1)
    assert len(apart.least) == 1
    assert "as little" not in str(apart)


@pytest.mark.parametrize(
    ("goal", "equal", "head"),
    [
        ("gpu-seconds", "as_little", "Equal"),
        pytest.param("rate", "as_high", "; as high:", marks=SEARCHES),
    ],
)
def test_optimize_says_which_candidates_equal_the_one_that_it_names(goal, equal, head, scenario):
    words = ["optimize", str(scenario), "--goal", goal, "--axis", "memory.prefix_caching=true,false"]
    words += ["--replications", "2"] + (["--tolerance", "0.9"] if goal == "rate" else ["--jobs", "1"])
    found = CliRunner().invoke(build_app(), [*words, "--json"])
    assert json.loads(found.stdout)[equal] == [{"memory.prefix_caching": False}]
    printed = " ".join(CliRunner().invoke(build_app(), words).stdout.split())
    assert head in printed
    assert "Best" not in printed
