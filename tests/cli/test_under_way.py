"""Long work says on a terminal what it is, short work and files hear nothing."""

from __future__ import annotations

import io
import sys
import time

import pytest

from sim.cli.under_way import under_way


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("terminal", "silent_s", "said"), [(True, 0.01, True), (True, 60.0, False), (False, 0.01, False)]
)
def test_what_takes_long_is_said_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, silent_s: float, said: bool
) -> None:
    heard = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", heard)
    monkeypatch.setenv("TERM", "xterm")
    with under_way("Simulating 3 requests", silent_s):
        time.sleep(0.3)
    assert ("Simulating 3 requests" in heard.getvalue()) == said
