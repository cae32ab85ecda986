"""Logs and scrapes as they come: incomplete, given twice, with clocks of their own, and options that do not fit them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from sim import Scenario
from sim.cli import build_app
from sim.observe.observation import Source, traffic_of
from sim.observe.replay import beside, hours, replay
from sim.observe.traffic import Arrival, ObservedTraffic

ROW = {"arrival_s": 0.0, "prompt_tokens": 100, "output_tokens": 20, "ttft_s": 0.05, "e2el_s": 0.5}


def log(folder: Path, *rows: dict[str, Any], name: str = "log.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps({**ROW, **row}) + "\n" for row in rows))
    return path


def run(*arguments: object) -> Any:
    return CliRunner().invoke(build_app(), ["observe", *map(str, arguments)])


def test_means_over_all_intervals_are_of_all_requests_that_each_side_has(tmp_path: Path) -> None:
    ttft_s = (0.09, 0.05, 0.16, 0.06)
    path = log(tmp_path, *({"arrival_s": float(at), "ttft_s": each} for at, each in enumerate(ttft_s)))
    seen, rows = Source(files=(path,)).read()
    traffic = traffic_of(Source(), seen, rows)
    edges_s = hours(seen.begin_s, seen.end_s, seen.scrape_s)
    replayed = replay(Scenario.default(), traffic, edges_s, seeds=[0])
    whole = beside(seen, edges_s, replayed).whole("ttft_s")
    requests = replayed.runs[0].columns.requests
    simulated_s = (requests["first_token_ns"] - requests["arrival_ns"]).mean() / 1e9
    assert whole == (pytest.approx(np.mean(ttft_s)), pytest.approx(simulated_s))


@pytest.mark.parametrize(
    "row", [{"prompt_tokens": -5}, {"prompt_tokens": "many"}, {"arrival_s": None}, {"output_tokens": 0}], ids=str
)
def test_rows_that_are_no_requests_are_counted_in_a_note(row: dict[str, Any], tmp_path: Path) -> None:
    found, traffic = observed_log(log(tmp_path, {}, {"arrival_s": 1.0}, row))
    assert len(found) == 2
    assert any("1 of 3 rows left out: no time, prompt or output" in each for each in traffic.how)


def observed_log(path: Path) -> tuple[Arrival, ObservedTraffic]:
    seen, rows = Source(files=(path,)).read()
    traffic = traffic_of(Source(), seen, rows)
    assert traffic.logged is not None
    return traffic.logged, traffic


def test_a_request_after_the_last_known_end_is_replayed(tmp_path: Path) -> None:
    found, _ = observed_log(log(tmp_path, {}, {"arrival_s": 9.0, "e2el_s": None}))
    assert found.at_s.tolist() == [0.0, 9.0]


@pytest.mark.parametrize("e2el_s", [-1.0, 0.01])
def test_a_request_that_ends_before_its_first_token_has_no_end(e2el_s: float, tmp_path: Path) -> None:
    found, traffic = observed_log(log(tmp_path, {}, {"e2el_s": e2el_s}))
    assert found.e2el_s is not None
    assert np.isnan(found.e2el_s).tolist() == [False, True]
    assert any("1 rows end before they begin or before their first token" in each for each in traffic.how)


def test_notes_of_a_log_say_what_is_not_read_and_nothing_of_lengths(tmp_path: Path) -> None:
    _, traffic = observed_log(log(tmp_path, {"class": "chat"}, {}))
    assert any("column class is not read" in each for each in traffic.how)
    assert not any(each.startswith(("prompts:", "outputs:")) for each in traffic.how)


def test_requests_outside_the_time_that_is_observed_are_counted_in_a_note(tmp_path: Path) -> None:
    seen, rows = Source(files=(log(tmp_path, {}, {"arrival_s": 1.0}, {"arrival_s": 2.0}),)).read()
    assert "1 requests of the log came outside" in " ".join(traffic_of(Source(since_s=0.5), seen, rows).how)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--match", "pod=a"], "--match pod: no column is called that; there are"),
        (["--match", "output_tokens=7"], "none of its 2 rows has what --match asks for"),
        (["--prompt-tokens", "5"], "a log says the lengths of each request"),
        (["--output-tokens", "5"], "a log says the lengths of each request"),
        (["log.jsonl"], "a file is given twice"),
        (["dated.jsonl"], "some logs have dates and others count from a beginning of their own"),
        (["--prometheus", "http://127.0.0.1:9", "--since", "1h", "scrape.prom"], "scrape.prom is no log of requests"),
    ],
)
def test_options_that_do_not_fit_a_log_are_refused(
    options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    log(tmp_path, {}, {"arrival_s": 1.0})
    log(tmp_path, {"arrival_s": 1_764_000_000}, name="dated.jsonl")
    (tmp_path / "scrape.prom").write_text("vllm:num_requests_running 1\n")
    refused("log.jsonl", *options, said=said)


def refused(*arguments: object, said: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.output.split())
    assert isinstance(done.exception, SystemExit)
