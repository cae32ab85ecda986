"""Ctrl-C and SIGTERM end every command with one sentence and an exit code of their own, and nothing that was computed is lost."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import types
import urllib.request
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from sim.cli import build_app
from sim.cli.exits import Terminated
from sim.reproduce import Part, Row

SIGNALS = [(KeyboardInterrupt, 130, "Interrupted"), (Terminated, 143, "Terminated")]


def rows(name, n):
    return [
        Row(
            experiment=name, case=str(i), quantity="s", published=1.0, simulated=1.0, kind="theory", within_pct=1.0,
            evidence="event loop against theory",
        )
        for i in range(n)
    ]  # fmt: skip


@pytest.mark.parametrize(("error", "code", "said"), SIGNALS)
@pytest.mark.parametrize("keeps", [True, False])
def test_reproduce_keeps_the_rows_of_parts_that_are_done(monkeypatch, tmp_path, error, code, said, keeps):
    def stop(quick):
        raise error

    parts = {
        "whole": (Part("one", lambda quick: rows("whole", 2), 1.0),),
        "cut": (Part("one", lambda quick: rows("cut", 3), 1.0), Part("two", stop, 1.0)),
    }
    load = {
        name: types.SimpleNamespace(TITLE=name, PARTS=each, plots=lambda folder: []) for name, each in parts.items()
    }
    monkeypatch.setattr("sim.reproduce.groups", lambda: list(load))
    monkeypatch.setattr("sim.reproduce.load_group", load.__getitem__)
    out = ("--out", str(tmp_path)) if keeps else ()
    answer = CliRunner().invoke(build_app(), ["reproduce", "--jobs", "1", *out])
    assert answer.exit_code == code
    kept = f"its rows are in {tmp_path}/reproduce.csv" if keeps else "--out keeps its rows"
    assert answer.stderr == f"{said}; parts done: 2; {kept}.\n"
    assert "whole: 2 rows" in answer.stdout
    if keeps:
        assert pd.read_csv(tmp_path / "reproduce.csv").experiment.tolist() == ["whole"] * 2 + ["cut"] * 3


@pytest.mark.parametrize(("error", "code", "said"), SIGNALS)
@pytest.mark.parametrize(
    ("asked", "where", "kept"),
    [
        (["run", "--out", "out"], "sim.run.run_built", "nothing was written."),
        (["sweep", "--replications", "2", "--out", "out"], "sim.study.sweep.run_sweep", "kept in out/"),
        (["optimize", "--goal", "cost", "--axis", "replicas=1,2", "--out", "out"], "sim.study.optimize.cheapest", "kept in out/"),
        (["optimize"], "sim.study.rates.highest_rate", "nothing was written."),
        (["capacity"], "sim.scenario.Scenario.with_set", "nothing was written."),
        (["compare", "s.yaml", "s.yaml"], "sim.study.compare.sweep", "nothing was written."),
    ],
)  # fmt: skip
def test_a_signal_is_answered_by_one_sentence(monkeypatch, tmp_path, asked, where, kept, error, code, said):
    def stop(*_arguments, **_settings):
        raise error

    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text("workload: {trace: conversation, limit: 5}\n")
    monkeypatch.setattr(where, stop)
    answer = CliRunner().invoke(build_app(), asked)
    assert answer.exit_code == code, answer.output
    assert answer.stderr.startswith(f"{said}; ")
    assert kept in answer.stderr
    assert len(answer.stderr.splitlines()) == 1


def in_group(group: int) -> int:
    """How many processes a process that leads a group has with it, and itself."""
    listed = subprocess.run(["ps", "-A", "-o", "pgid="], capture_output=True, text=True, check=True).stdout.split()
    return listed.count(str(group))


def answers(process: subprocess.Popen[str]) -> bool:
    """Whether the endpoint answers at the address that its first line has."""
    assert process.stdout is not None
    found = re.search(r"http://[\d.:]+", process.stdout.readline())
    assert found is not None
    for _ in range(1000):
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{found[0]}/health"):
            return True
        time.sleep(0.05)
    return False


LONG = {
    "reproduce": ["reproduce", "--quick", "--jobs", "2", "--out", "out"],
    "sweep": ["sweep", "--axis", "seed=0:40:41", "--jobs", "2", "--set", "workload.requests=4000", "--out", "out"],
    "cost": ["optimize", "--goal", "cost", "--axis", "replicas=1,2,3,4", "--set", "workload.requests=40000", "--jobs", "2",
             "--out", "out"],
    "rate": ["optimize", "--axis", "replicas=1,2", "--set", "workload.requests=40000", "--jobs", "2"],
    "place": ["place", "s.yaml", "--out", "out"],
    "serve": ["serve", "--port", "0", "--out", "out"],
}  # fmt: skip
PLACES = """
cluster: {devices: 16, memory_gib: 13.0}
models: [{model: bert-2.7b, copies: 24}]
workload: {arrivals: {process: gamma, rate_per_s: 40, cv: 4}, popularity: 0.5, duration_s: 2000}
serving: {slo_scale: 5}
placement: {policy: partition}
jobs: 2
"""


@pytest.mark.slow(reason="processes are started and ended")
@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        *((name, 143, "Terminated") for name in LONG),
        *((name, 130, "Interrupted") for name in ("sweep", "rate", "place")),
    ],
)
def test_a_signal_ends_processes_in_the_middle_of_their_work(tmp_path, name, code, said):
    (tmp_path / "s.yaml").write_text(PLACES)
    start = "from sim.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", start, *LONG[name]], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        env=environment, start_new_session=True,
    ) as process:  # fmt: skip
        # It has begun when it answers, or as soon as it starts a process beside those that count resources.
        while process.poll() is None and not (answers(process) if name == "serve" else in_group(process.pid) > 3):
            time.sleep(0.05)
        assert process.poll() is None
        if code == 130:
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        else:
            process.terminate()
        _, err = process.communicate(timeout=600)
    assert process.returncode == (0 if name == "serve" else code)
    if name == "sweep":  # the points that were to come were not waited for
        assert len(list((tmp_path / "out" / "points").glob("*"))) < 41
    assert "Traceback" not in err
    if name != "serve":
        assert [line for line in err.splitlines() if line.startswith(f"{said}; ")] == err.splitlines()[-1:]
    for _ in range(100):  # what counts resources ends when it sees that nobody is there
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("it left processes behind")
