"""Logs and scrapes as they come: incomplete, given twice, with clocks of their own, and options that do not fit them."""

from __future__ import annotations

import contextlib
import json
import socketserver
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from sim import Scenario
from sim.cli import build_app
from sim.errors import RooftraceError
from sim.explore.watching import Endpoints
from sim.observe.observation import Source, traffic_of
from sim.observe.replay import beside, hours, replay
from sim.observe.samples import Matching, read_files
from sim.observe.serving import Served
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


def test_classes_of_a_log_are_replayed(tmp_path: Path) -> None:
    late = {"class": "batch", "arrival_s": 2.0}
    _, traffic = observed_log(log(tmp_path, late, {"class": "chat"}, {"arrival_s": 1.0}))
    trace = traffic.workload(0)
    assert trace.class_index is not None
    assert [trace.classes[row] for row in trace.class_index.tolist()] == ["chat", "unknown", "batch"]


def test_classes_stay_where_one_of_two_logs_has_them(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    files = (log(tmp_path, {"class": "chat"}), log(tmp_path / "other", {"arrival_s": 1.0}))
    seen, rows = Source(files=files).read()
    logged = traffic_of(Source(), seen, rows).logged
    assert logged is not None
    assert logged.service_class == ("chat", "unknown")


def test_notes_of_a_log_say_nothing_of_lengths(tmp_path: Path) -> None:
    _, traffic = observed_log(log(tmp_path, {}, {}))
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


@pytest.fixture
def deployment(tmp_path: Path) -> Path:
    path = tmp_path / "deployment.yaml"
    path.write_text("model: llama-3.1-8b\nhardware: h100-sxm\nreplicas: 2\nrouter: round_robin\n")
    return path


@pytest.fixture
def served(tmp_path: Path) -> Path:
    """A log of requests that two instances served."""
    return log(tmp_path, *({"arrival_s": float(at), "instance": "ab"[at % 2]} for at in range(4)))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--what-if", "workload.duration_s=5"],
            "--what-if workload.duration_s: the traffic is the one that was observed",
        ),
        (["--what-if", "replicas=3; seed=4"], "--what-if seed: the traffic is the one that was observed"),
        (["--what-if", "router=leest"], "leest"),
        (["--step", "0"], "--step"),
        (["--refresh", "0"], "--refresh"),
        (["--prompt-tokens", "0"], "equal to 1"),
        (["--since", "2.9"], "half of the time between two samples"),
        (["--since", "nan"], "--since 'nan': expected a date"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_is_written(
    options: list[str], said: str, served: Path, deployment: Path, tmp_path: Path
) -> None:
    if options[1] == "2.9":
        served = tmp_path / "counters.csv"
        served.write_text("t_s,finished_total\n0,0\n1,2\n2,3\n3,5\n")
    refused(served, "--scenario", deployment, *options, "--out", tmp_path / "out", said=said)
    assert not (tmp_path / "out").exists()


def test_files_of_an_earlier_observation_are_removed(served: Path, deployment: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name in ("stack.toml", "rerouted.csv", "mine.txt"):
        (out / name).write_text("of an earlier run")
    done = run(served, "--scenario", deployment, "--no-fit", "--replications", 1, "--out", out)
    assert done.exit_code == 0, done.output
    assert {each.name for each in out.iterdir()} == {"mine.txt", "observed.yaml", "requests.csv"}
    assert "Drift" in done.stdout
    assert "no change against the simulation over" in done.stdout
    assert run(served, "--out", out).exit_code == 0
    assert {each.name for each in out.iterdir()} == {"mine.txt", "requests.csv"}


def test_the_router_that_is_laid_request_by_request_is_named(served: Path, deployment: Path, tmp_path: Path) -> None:
    routers = [each for name in ("random", "least_outstanding") for each in ("--what-if", f"router={name}")]
    done = run(served, "--scenario", deployment, "--no-fit", "--replications", 1, *routers, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "Request by request router=random: " in " ".join(done.stdout.split())
    assert "router=least_outstanding is not laid request by request; router=random is" in done.output


def test_an_end_of_serving_says_that_results_are_kept(
    served: Path, deployment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ThreadingHTTPServer, "serve_forever", ended)
    done = run(
        served, "--scenario", deployment, "--no-fit", "--replications", 1, "--serve", 0, "--out", tmp_path / "out"
    )
    assert f"Interrupted; what was written to {tmp_path / 'out'} is kept." in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "t_s,finished_total\n0,0\nnan,2\n", "line 3: t_s is nan, and no time"),
        ("a.csv", "t_s,finished_total\n0,0\n,2\n", "line 3: t_s is '', and no number"),
        ("a.csv", "t_s,finished_total\n0,0\n1,2,3\n", "line 3: it has more cells than the table has columns"),
        ("a.csv", "t_s,finished_total\n0,0\n1,1\n2,2\n1e15,3\n", "is the time of one of them wrong?"),
        ("2026-13-45T10:15:00.prom", "vllm:num_requests_running 1\n", "2026-13-45T10:15:00 in its name is no date"),
        (
            "a.prom",
            "".join(
                f'vllm:time_to_first_token_seconds_{each} {at} {at}000\n'
                for at in (1_764_000_000, 1_764_000_060) for each in ("bucket", "count", "sum")
            ),
            "a sample has no number in its label le",
        ),
    ],
)  # fmt: skip
def test_metrics_that_cannot_be_read_are_one_sentence(name: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    refused(tmp_path / name, "--prompt-tokens", 9, "--output-tokens", 9, "--out", tmp_path / "out", said=said)


@pytest.mark.parametrize(
    ("name", "at_s"),
    [
        ("pod-1234567890@1764000000.prom", 1_764_000_000),
        ("pod-a@20251124T160000.prom", 1_764_000_000),
        ("1764000000-pod@a.prom", 1_764_000_000),
        ("2025-11-24T17:00:00.25+01:00.prom", 1_764_000_000),
    ],
)
def test_the_instant_of_a_scrape_is_that_of_its_name(name: str, at_s: float, tmp_path: Path) -> None:
    (tmp_path / name).write_text("vllm:num_requests_running 1\n")
    notes: list[str] = []
    (series,) = read_files([tmp_path / name], Matching(labels={}), notes)
    assert series.at_s.tolist() == [at_s]
    assert notes == []


def test_an_instant_that_is_only_of_the_file_is_noted(tmp_path: Path) -> None:
    (tmp_path / "pod.prom").write_text("vllm:num_requests_running 1\n")
    notes: list[str] = []
    read_files([tmp_path / "pod.prom"], Matching(labels={}), notes)
    assert "it is when the file was written" in notes[0]


@contextlib.contextmanager
def server_that_speaks_no_http() -> Iterator[str]:
    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            self.request.sendall(b"SSH-2.0-nobody\r\n")

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_an_address_that_does_not_speak_http_is_one_sentence() -> None:
    with server_that_speaks_no_http() as url:
        for where in (url, f"{url}/a b"):
            refused("--prometheus", where, "--since", "1h", said="does not answer as Prometheus does")
            with pytest.raises(RooftraceError, match="does not answer"):
                Endpoints([where]).series(0.0, 0.0)


def test_renewal_goes_on_behind_an_error_that_nobody_expects() -> None:
    answers: list[Exception | str] = [KeyError("le"), RooftraceError("gone"), "new"]
    said: list[str] = []

    def renewed() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        served.stop()
        return answer

    served = Served("old", renewed, 1e-3, said.append)
    served.keep_renewing()
    assert served.text == "new"
    assert ["KeyError" in said[0], "gone" in said[1]] == [True, True]


def test_a_log_whose_ends_are_all_wrong_adds_nothing_to_metrics(tmp_path: Path) -> None:
    table = tmp_path / "counters.csv"
    table.write_text("t_s,finished_total\n0,0\n5,2\n10,3\n")
    seen, rows = Source(files=(table, log(tmp_path, {"e2el_s": -1.0}))).read()
    assert rows is not None
    assert set(seen.counters) == {"finished"}


@pytest.mark.parametrize(("end_s", "every_s"), [(10.0, 1e-5), (1e15, None)])
def test_more_intervals_than_anybody_reads_are_refused(end_s: float, every_s: float | None) -> None:
    with pytest.raises(RooftraceError, match="a longer --every makes fewer"):
        hours(0.0, end_s, end_s, every_s)
