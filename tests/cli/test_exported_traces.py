"""Traces that tools exported, from the command line and from scenario files."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import get_args

import pytest
from typer.testing import CliRunner

from sim.cli import build_app
from sim.cli.exports import Columns
from sim.scenario import Scenario
from sim.scenario.assembly import resolve
from workloads import Trace
from workloads.synonyms import FIELDS

APP = build_app()
MAP = "arrival=when,prompt_tokens=u.in,output_tokens=u.out"
COLUMNS = {"arrival": "when", "prompt_tokens": "u.in", "output_tokens": "u.out"}


@pytest.fixture(autouse=True)
def log(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    records = [
        {
            "when": f"2025-05-01T12:00:{i:02}",
            "u": {"in": 100 + i, "out": 5},
            "status": 500 if i == 3 else 200,
            "host": "a",
        }
        for i in range(10)
    ]
    Path("log.jsonl").write_text("\n".join(map(json.dumps, records)))
    return tmp_path / "log.jsonl"


def rooftrace(*arguments):
    return CliRunner().invoke(APP, [str(argument) for argument in arguments])


def test_help_names_every_field_that_map_takes():
    (option,) = (each for each in get_args(Columns) if hasattr(each, "param_decls"))
    assert sorted(option.help.partition("fields: ")[2].split(", ")) == sorted(FIELDS)
    table = Path(__file__).parents[2].joinpath("docs/trace_formats.md").read_text()
    assert [name for name in FIELDS if f"`{name}`" not in table] == []


def test_run_takes_a_trace_with_columns_of_its_own_and_says_what_it_left_out():
    done = rooftrace("run", "--trace", "log.jsonl", "--map", MAP, "--no-plots", "--out", "out", "--json")
    assert done.exit_code == 0, done.output
    manifest = json.loads(Path("out/manifest.json").read_text())
    said = [note for note in manifest["notes"] if note.startswith("log.jsonl")]
    assert [f"Note: {note}" in done.stderr for note in said] == [True, True, True]
    assert "of 10 rows 9 are taken; left out are 1 failed" in said[0]
    assert "Columns that are not used: host." in said[2]
    kept = rooftrace(
        "run", "--trace", "log.jsonl", "--map", MAP, "--keep-failed", "--no-plots", "--out", "kept", "--json"
    )
    counts = [json.loads(each.stdout)["requests"]["finished"] for each in (done, kept)]
    assert counts == [9, 10]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            (),
            "no column is known to say arrival and prompt_tokens; it has when, u.in, u.out, status, host: name them, with --map",
        ),
        (("--map", "when"), "--map 'when': expected FIELD=COLUMN"),
        (("--map", "arival=when"), "'arival' is no column of a trace"),
        (("--map", MAP, "--missing-output", "guess"), "missing_output"),
        (("--map", MAP, "--tokenizer", "none.json"), "none.json does not exist"),
    ],
)
@pytest.mark.parametrize("command", ["run", "describe"])
def test_what_cannot_be_read_is_one_sentence_and_exit_code_two(command, options, expected):
    start = ("run", "--trace", "log.jsonl") if command == "run" else ("trace", "describe", "log.jsonl")
    done = rooftrace(*start, *options)
    assert (done.exit_code, done.stdout) == (2, "")
    assert expected in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("advise", ("--only", "release", "--replications", 1, "--jobs", 1)),
        ("optimize", ("--goal", "cost", "--axis", "replicas=1", "--replications", 2, "--jobs", 1)),
        ("capacity", ("--slo", "--tolerance", 0.5, "--limit", "ttft_p95=15ms")),
        ("sweep", ("--axis", "replicas=1", "--jobs", 1)),
        ("compare", ("s.yaml", "s.yaml", "--replications", 2, "--jobs", 1)),
    ],
)
def test_every_command_that_replays_a_workload_takes_a_trace_as_run_does(command, options):
    Path("s.yaml").write_text("model: llama-3.1-8b\nworkload: {trace: conversation}\nslo: {ttft_p95_s: 2}\n")
    first = () if command == "compare" else ("s.yaml",)
    done = rooftrace(
        command, *first, *options, "--trace", "log.jsonl", "--map", MAP, "--missing-output", "draw", "--keep-failed"
    )
    assert done.exit_code == 0, done.output
    assert "host" in done.stderr
    refused = rooftrace(command, *first, *options, "--trace", "log.jsonl", "--map", "when")
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert "expected FIELD=COLUMN" in refused.stderr


def test_advise_prints_commands_that_read_the_trace_as_it_did():
    Path("s.yaml").write_text("model: llama-3.1-8b\nworkload: {trace: conversation}\nslo: {ttft_p95_s: 2}\n")
    asked = ("advise", "s.yaml", "--only", "precision", "--replications", 1, "--jobs", 1, "--json")
    done = rooftrace(*asked, "--trace", "log.jsonl", "--map", MAP)
    found = json.loads(done.stdout)["candidates"][0]
    again = rooftrace(*shlex.split(found["run"])[1:], "--json", "--no-plots", "--out", "again")
    summary = json.loads(again.stdout)
    assert summary["requests"]["finished"] == 9
    assert summary["ttft_s"]["p95"] == found["figures"]["ttft_s.p95"]


def test_describe_says_rates_bursts_and_what_is_left_out_and_draws_it():
    done = rooftrace("trace", "describe", "log.jsonl", "--map", MAP, "--out", "p/log.png", "--json")
    found = json.loads(done.stdout)
    assert (found["requests"], found["requests_of_a_session"], found["best_prefix_hit_rate"]) == (9, None, None)
    assert found["interarrival_cv"] == pytest.approx(0.294, abs=1e-3)
    rates = found["rate_over_time"]
    assert sum(rates["per_s"]) * rates["window_s"] == pytest.approx(9)
    assert "1 failed" in found["notes"][0]
    assert Path("p/log.png").read_bytes().startswith(b"\x89PNG")
    assert "From, s" in rooftrace("trace", "describe", "log.jsonl", "--map", MAP).stdout
    assert rooftrace("trace", "describe", "log.jsonl", "--map", MAP, "--out", "log.pdf").exit_code == 2


def test_a_window_is_said_in_the_scenario_and_behind_every_command(log):
    window = ("--since", "2025-05-01T12:00:02", "--until", 6)
    described = rooftrace("trace", "describe", "log.jsonl", "--map", MAP, *window, "--json")
    assert json.loads(described.stdout)["requests"] == 3
    assert "Line 7 is the first from 6 on" in described.stderr
    done = rooftrace("run", "--trace", "log.jsonl", "--map", MAP, *window, "--no-plots", "--out", "out", "--json")
    assert json.loads(done.stdout)["requests"]["finished"] == 3
    assert "left out are 2 before 2025-05-01T12:00:02; 1 failed" in done.stderr
    columns = json.dumps(COLUMNS)
    for since in ("2025-05-01T12:00:02", "'2025-05-01T14:00:02+02:00'", 2):
        log.with_name("s.yaml").write_text(
            f"workload: {{trace: log.jsonl, columns: {columns}, since: {since}, until: 6}}"
        )
        assert resolve(Scenario.load("s.yaml")).experiment.workload.prompt_tokens.tolist() == [102, 104, 105]
    drawn = {"arrivals": {"process": "poisson", "rate_per_s": 2.0}}
    only = Scenario(workload={"trace": "log.jsonl", "columns": COLUMNS, "since": 8, **drawn})
    assert resolve(only).experiment.workload.prompt_tokens.tolist() == [108, 109]
    wrong = rooftrace("run", "--set", "workload.since=3")
    assert (wrong.exit_code, "workload.since is about reading a file" in wrong.stderr) == (2, True)


def test_a_trace_without_times_is_replayed_under_arrivals_of_its_own():
    turns = [{"from": "human", "value": "Hello there " * 30}, {"from": "gpt", "value": "Hi " * 20}]
    Path("chat.json").write_text(json.dumps([{"id": str(i), "conversations": turns} for i in range(5)]))
    alone = rooftrace("run", "--trace", "chat.json")
    assert alone.exit_code == 2
    assert "or draw them (workload.arrivals)" in alone.stderr
    drawn = Scenario(workload={"trace": "chat.json", "arrivals": {"process": "poisson", "rate_per_s": 2.0}})
    workload = resolve(drawn).experiment.workload
    assert len(workload) == 5
    assert isinstance(workload, Trace)
    assert workload.prefix_blocks is not None
    assert rooftrace("trace", "describe", "chat.json", "--untimed").exit_code == 0


def test_the_hash_of_a_scenario_follows_every_file_of_a_folder_and_every_setting(log):
    Path("hours").mkdir()
    text = log.read_text()
    for hour in ("12", "13"):
        Path("hours", f"{hour}.jsonl").write_text(text)
    workload = {"trace": "hours", "columns": COLUMNS}
    before = Scenario(workload=workload).hash
    assert Scenario(workload={**workload, "trace": "hours/*.jsonl"}).hash == before
    changed = [{"keep_failed": True}, {"missing_output": "draw"}, {"columns": {**COLUMNS, "output_tokens": "u.in"}}]
    others = {Scenario(workload=workload | each).hash for each in changed} | {before}
    assert len(others) == 4
    Path("hours", "13.jsonl").write_text(text.replace("101", "111"))
    assert Scenario(workload=workload).hash not in others


@pytest.mark.parametrize(
    "setting", [{"columns": COLUMNS}, {"keep_failed": True}, {"missing_output": "drop"}, {"tokenizer": "t"}]
)
def test_settings_of_exports_are_refused_where_nothing_is_read(setting):
    generated = {
        "arrivals": {"process": "poisson", "rate_per_s": 1.0},
        "prompt_tokens": 9,
        "output_tokens": 9,
        "requests": 3,
    }
    with pytest.raises(ValueError, match=f"{next(iter(setting))} is about reading a trace"):
        Scenario(workload={**generated, **setting})
    with pytest.raises(
        ValueError, match=f"{next(iter(setting))} is about reading a file, and 'conversation' is built in"
    ):
        resolve(Scenario(workload={"trace": "conversation", **setting}))
