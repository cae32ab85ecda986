"""Fixtures and settings that tests share."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
from hypothesis import settings

from sim.scenario import modules

# Continuous integration tries the same examples every time, so that a failure is a change's own; at a desk they are new each time.
settings.register_profile("ci", derandomize=True, deadline=None, database=None)
if os.environ.get("CI"):
    settings.load_profile("ci")

PASSED = os.environ.get("ROOFTRACE_PASSED")
"""A file that names tests, one a line: written with those that passed where it is not there, and where it is, these are left out.
Of two runs in different surroundings the second then does what the first could not."""

SHARED = Path(__file__).parents[2] / "shared"


def pytest_configure(config: pytest.Config) -> None:
    if sys.dont_write_bytecode and "PYTEST_XDIST_WORKER" not in os.environ:
        # Nothing is written beside the sources, and workers and commands in processes of their own share what is compiled.
        folder = tempfile.mkdtemp(prefix="rooftrace-bytecode-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = folder
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        sys.dont_write_bytecode = False


def pytest_collection(session: pytest.Session) -> None:
    # Modules and tests are made by the ten thousand, and none is given up: looking for garbage takes a fifth of the time.
    gc.disable()
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if worker:
        _import_a_share(session.config.args, int(worker), int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))


def _import_a_share(asked: list[str], worker: int, workers: int) -> None:
    """All workers import all files. Each begins with others: one file in *workers* is compiled here, which takes longer than all
    else, and of the others is read what another worker has compiled."""
    root = Path(__file__).parents[1]
    paths = [Path(each.partition("::")[0]).absolute() for each in asked]
    files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("test_*.py")))]
    for file in files[worker::workers]:
        # Why one cannot be imported, or is skipped, is said when it is collected.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(file.relative_to(root).with_suffix("").parts))


def pytest_collection_finish() -> None:
    gc.freeze()
    # Hardly any object outlives its test: looking for cycles after every 700 of them takes a fortieth of the time.
    gc.set_threshold(20_000)
    gc.enable()


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


@pytest.fixture(scope="session", autouse=True)
def _same_terminal() -> Iterator[None]:
    """Help, errors and tables are laid out for one width without colours, whatever terminal the tests run in."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TERMINAL_WIDTH", "LINES", "FORCE_COLOR", "PY_COLORS", "NO_COLOR", "TTY_COMPATIBLE"):
            patch.delenv(name, raising=False)
        patch.setenv("COLUMNS", "100")
        patch.setenv("TERM", "dumb")
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_application() -> Iterator[None]:
    """The command line is built once for all tests that call it in this process: that takes longer than most of their calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.testing._get_command", functools.cache(typer.main.get_command))
        yield


@pytest.fixture(scope="session", autouse=True)
def _tests_are_not_looked_through() -> Iterator[None]:
    """A test's own policy belongs to the package of all tests, whose imports take a second to parse for a hash."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modules, "_INSTALLED", {*modules._INSTALLED, str(Path(__file__).parents[1])})
        yield


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of public traces and measurements beside the repository; tests that need it are skipped without it."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the public traces and measurements in {SHARED}, which is not there")
    return SHARED
