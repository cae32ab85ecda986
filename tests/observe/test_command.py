"""The command `observe`: its options, the files that it writes, and what it serves."""

from __future__ import annotations

from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from sim.errors import RooftraceError
from sim.observe.serving import Served
from tests.observe.observing import log, refused, run


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
        (["--prompt-tokens", "0"], "Invalid value for '--prompt-tokens'"),
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
