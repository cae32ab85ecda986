"""What tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Continuous integration tries the same examples every time, so that a failure is a change's own; at a desk they are new each time.
settings.register_profile("ci", derandomize=True, deadline=None, database=None)
if os.environ.get("CI"):
    settings.load_profile("ci")

SHARED = Path(__file__).parents[2] / "shared"


@pytest.fixture(autouse=True)
def _same_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Help, errors and tables are laid out for one width without colours, whatever terminal the tests run in."""
    for name in ("TERMINAL_WIDTH", "LINES", "FORCE_COLOR", "PY_COLORS", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "dumb")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of public traces and measurements beside the repository; tests that need it are skipped without it."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the public traces and measurements in {SHARED}, which is not there")
    return SHARED
