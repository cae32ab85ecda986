"""A release's scheduler in an interpreter of its own, over a pipe: a line of JSON each way for a step.

One process for each interpreter holds all engines of a run. What the lines say is told in `lines`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import IO, Any, cast

from policies.driving import DrivingError

_LAST_CHARACTERS = 400
_LINES = Path(__file__).with_name("lines.py")


def _found(python: str) -> str:
    """The program that a shell would start."""
    found = shutil.which(os.path.expanduser(python))
    if found is None:
        where = "not a program that can be run" if os.sep in python else "no program of that name is on the PATH"
        raise DrivingError(f"python {python}: {where}; give the path of an interpreter")
    return found


class Worker:
    """A process in which a release runs."""

    def __init__(self, python: str, script: Path) -> None:
        """*script*: the worker, as `policies.installed.lines` runs it."""
        self._python = python
        program = _found(python)
        self._lock = Lock()
        self._engines = 0
        with contextlib.ExitStack() as stack:
            self._errors: IO[bytes] = stack.enter_context(tempfile.TemporaryFile())
            self._open = stack.pop_all()
        try:
            self._process = subprocess.Popen(
                [program, str(_LINES), str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
            )
        except OSError as error:
            self._open.close()
            raise DrivingError(f"python {python}: {error.strerror}; give the path of an interpreter") from error
        atexit.register(self.close)

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def new_engine(self) -> int:
        with self._lock:
            self._engines += 1
            return self._engines

    def ask(self, engine: int, order: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to *order*; DrivingError where the release refuses or has failed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            try:
                self._process.stdin.write(json.dumps({"engine": engine, **order}, separators=(",", ":")) + "\n")
                self._process.stdin.flush()
                line = self._process.stdout.readline()
            except BrokenPipeError:
                line = ""
        try:
            answer: Any = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            words = self._said(line)
            self.close()
            raise DrivingError(f"{self._python} does not answer as a driven release does{words}")
        found = cast("dict[str, Any]", answer)
        if "error" in found:
            raise DrivingError(found["error"])
        return found

    def _said(self, line: str) -> str:
        self._process.poll()
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(size - _LAST_CHARACTERS, 0))
        words = " ".join((line or self._errors.read().decode(errors="replace")).split())
        return f": {words}" if words else ""

    def close(self) -> None:
        """End the process; it is not asked again."""
        with contextlib.suppress(OSError):
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._open):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()
        atexit.unregister(self.close)


_WORKERS: dict[tuple[str, Path, int], Worker] = {}
_WORKERS_LOCK = Lock()


def _worker(python: str, script: Path) -> Worker:
    """The process of an interpreter, started when it is first asked for; a forked process starts its own."""
    key = (python, script, os.getpid())
    with _WORKERS_LOCK:
        worker = _WORKERS.get(key)
        if worker is None or not worker.runs:
            worker = _WORKERS[key] = Worker(python, script)
        return worker


class Connection:
    """One engine of an installed release."""

    def __init__(self, python: str, script: Path, settings: Mapping[str, Any]) -> None:
        self._worker = _worker(python, script)
        self._number = self._worker.new_engine()
        self._settings = dict(settings)
        self.release: str = self._started()
        """Its name and number."""
        weakref.finalize(self, _drop, self._worker, self._number)

    def _started(self) -> str:
        answer = self._worker.ask(self._number, {"start": self._settings})
        release = answer.get("release")
        if not isinstance(release, str):
            raise DrivingError(f"a driven release says which one it is; got {answer!r}")
        return release

    def anew(self) -> None:
        """Begin with no request and an empty cache, as a machine that has been started again."""
        self._started()

    def step(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """Tell the release what has happened; what it has emitted, and what it plans."""
        return self._worker.ask(self._number, told)


def _drop(worker: Worker, number: int) -> None:
    if worker.runs:
        with contextlib.suppress(DrivingError, ValueError):
            worker.ask(number, {"drop": True})
