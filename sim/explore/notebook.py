"""The page in the output of a notebook: its server runs as a process beside the kernel, and ends with it."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import weakref
from html import escape
from pathlib import Path

from sim.errors import RooftraceError
from sim.scenario import Scenario

_COMMAND = "from sim.cli import main; main()"
_ADDRESS = re.compile(r"http://\S+?(?=;|\s)")
_GRACE_S = 10


class Page:
    """A page with a server of its own, which runs until `close` or the end of the process. Notebooks show it in a frame."""

    def __init__(self, process: subprocess.Popen[str], url: str, height: int) -> None:
        self.url, self._height = url, height
        self._end = weakref.finalize(self, _stop, process)
        atexit.register(self._end)

    def close(self) -> None:
        """End the server and its workers."""
        self._end()

    def _repr_html_(self) -> str:
        return f'<iframe src="{escape(self.url)}" title="Rooftrace" style="width:100%;height:{self._height}px;border:0"></iframe>'

    def __repr__(self) -> str:
        return f"Page({self.url!r})"


def explore(
    scenario: Scenario | str | os.PathLike[str] | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    height: int = 900,
) -> Page:
    """Open the page of `rooftrace explore` on *scenario*: a Scenario, the path of a file, or None for the default.

    *out*: the folder of finished runs, as of `sweep`; results/sweep-NAME without. RooftraceError where the server does not start.
    """
    arguments = ["explore", "--port", "0", "--until-stdin-ends"]
    arguments += [] if out is None else ["--out", os.path.abspath(out)]
    with tempfile.TemporaryDirectory(prefix="rooftrace-explore-") as folder:
        where = None
        if isinstance(scenario, Scenario):
            file = Path(folder) / f"{scenario.name}.yaml"
            file.write_text(scenario.to_yaml(), encoding="utf-8")
            arguments.append(str(file))
            where = scenario.folder
        elif scenario is not None:
            arguments.append(os.fspath(scenario))
        path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
        process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, cwd=where, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        assert process.stdout is not None
        found = _ADDRESS.search(process.stdout.readline())
    if found is None:
        _, said = process.communicate()
        raise RooftraceError(said.strip().removeprefix("Error: ") or "the page's server did not start")
    return Page(process, found[0], height)


def _stop(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
