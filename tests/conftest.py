"""Fixtures and settings that tests share."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
from hypothesis import settings

# Continuous integration tries the same examples every time, so that a failure is a change's own; at a desk they are new each time.
settings.register_profile("ci", derandomize=True, deadline=None, database=None)
if os.environ.get("CI"):
    settings.load_profile("ci")

PASSED = os.environ.get("ROOFTRACE_PASSED")
"""A file that names tests, one a line: written with those that passed where it is not there, and where it is, these are left out.
Of two runs in different surroundings the second then does what the first could not."""

SHARED = Path(__file__).parents[2] / "shared"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if PASSED and Path(PASSED).exists():
        passed = set(Path(PASSED).read_text(encoding="utf-8").splitlines())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
        items[:] = [item for item in items if item.nodeid not in passed]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    # Not by a worker, which knows its own tests only.
    if PASSED and "PYTEST_XDIST_WORKER" not in os.environ and not Path(PASSED).exists():
        names = [report.nodeid for report in terminalreporter.getreports("passed")]
        Path(PASSED).write_text("\n".join([*names, ""]), encoding="utf-8")


@pytest.fixture(autouse=True)
def _same_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Help, errors and tables are laid out for one width without colours, whatever terminal the tests run in."""
    for name in ("TERMINAL_WIDTH", "LINES", "FORCE_COLOR", "PY_COLORS", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "dumb")


@pytest.fixture(scope="session", autouse=True)
def _one_application() -> Iterator[None]:
    """The command line is built once for all tests that call it in this process: that takes longer than most of their calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.testing._get_command", functools.cache(typer.main.get_command))
        yield


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of public traces and measurements beside the repository; tests that need it are skipped without it."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the public traces and measurements in {SHARED}, which is not there")
    return SHARED
