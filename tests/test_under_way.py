"""Long work shows on a terminal how far it is, at what rate and for how long still; short work and files hear nothing."""

from __future__ import annotations

import io
import os
import pty
import sys
import threading
import time

import pytest
from typer.testing import CliRunner

from sim import Scenario, simulate, sweep, under_way
from sim.cli import build_app
from sim.study.points import Sweep


class Terminal:
    """A pseudo-terminal in place of standard error, and all that was written to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ours, theirs = pty.openpty()
        self._ours, self._bytes = ours, b""
        self._listens = threading.Thread(target=self._listen, daemon=True)
        self._listens.start()
        self._file = os.fdopen(theirs, "w")
        monkeypatch.setattr(sys, "stderr", self._file)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "120")

    def _listen(self) -> None:
        while True:
            try:
                self._bytes += os.read(self._ours, 65536)
            except OSError:  # the other end is closed
                return

    def shows(self, said: str) -> None:
        """Returns when *said* has been shown; for a display that never shows it, the test fails."""
        for _ in range(6000):
            if said in self._bytes.decode(errors="ignore"):
                return
            time.sleep(0.01)
        pytest.fail(f"never shown: {said}")

    def heard(self) -> str:
        self._file.close()
        self._listens.join(10)
        os.close(self._ours)
        return self._bytes.decode()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_way, "SILENT_S", 0.01)
    monkeypatch.setattr(under_way, "_LOOKS_PER_S", 100.0)


def test_a_run_shows_its_requests_their_rate_and_the_time_left(
    impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal(monkeypatch)
    monkeypatch.setattr(under_way._PROCESS, "wanted", True)
    simulate(Scenario.default().with_set("workload.requests=1000"), fast_forward=False)
    heard = terminal.heard()
    assert "Simulating" in heard
    assert " of 1,000 requests" in heard
    assert "/s, " in heard
    assert " left" in heard


def test_a_sweep_shows_its_runs_without_being_a_command(impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch)
    monkeypatch.setattr(under_way._PROCESS, "wanted", False)
    sweep(Sweep(base=Scenario.default().with_set("workload.requests=50"), replications=3), jobs=1)
    heard = terminal.heard()
    assert "Simulating" in heard.split(" of 3 runs")[0]  # before the first of them has ended
    assert " of 3 runs" in heard


def test_steps_within_steps_are_lines_of_their_own(impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch)
    monkeypatch.setattr(under_way._PROCESS, "wanted", True)
    for rate in under_way.steps([1, 2], "rates"):
        for replay in under_way.steps(range(3), "replays"):
            if (rate, replay) == (2, 2):
                terminal.shows("1 of 2 rates")
                terminal.shows("2 of 3 replays")


def test_short_work_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch)
    monkeypatch.setattr(under_way._PROCESS, "wanted", True)
    for _ in under_way.steps(range(3), "runs"):
        pass
    assert terminal.heard() == ""


def test_a_file_in_place_of_a_terminal_gets_nothing(impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_way._PROCESS, "wanted", True)
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    for _ in under_way.steps(range(2), "runs"):
        time.sleep(0.05)
    assert file.getvalue() == ""


def test_a_script_of_ones_own_gets_nothing(impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch)
    monkeypatch.setattr(under_way._PROCESS, "wanted", False)
    for _ in under_way.steps(range(2), "runs"):
        time.sleep(0.05)
    assert terminal.heard() == ""


def test_commands_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_way._PROCESS, "wanted", False)
    assert CliRunner().invoke(build_app(), ["theory"]).exit_code == 0
    assert under_way._PROCESS.wanted


@pytest.mark.parametrize(
    ("done", "total", "elapsed_s", "said"),
    [
        (1_200, 5_000, 3.0, "1,200 of 5,000 requests, 400/s, 9.5 s left"),
        (1, 4, 60.0, "1 of 4 requests, 1/min, 180 s left"),
        (7, None, 2.0, "7 requests, 3.5/s"),
        (0, 10, 2.0, "0 of 10 requests"),
    ],
)
def test_the_time_left_goes_on_at_the_pace_so_far(
    done: float, total: float | None, elapsed_s: float, said: str
) -> None:
    assert under_way.pace_text(done, total, elapsed_s, "requests") == said
