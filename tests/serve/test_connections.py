"""Connections that ask for nothing, ask slowly, or are too many: others are served all the while."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("httpx", reason="needs httpx (pip install -e '.[test]')")
pytest.importorskip("uvicorn", reason="needs the serve extra (pip install -e '.[serve]')")

import httpx

from sim.serve.app import Limits
from sim.serve.server import _short_of_files, listen
from tests.serve.serving import Serving, patiently, serving, until

WHOLE = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
HALVES = {
    "nothing": b"",
    "a letter": b"G",
    "a line": b"POST /v1/completions HTTP/1.1\r\n",
    "headers": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n",
    "a second one": WHOLE + b"GET /health HTTP/1.1\r\nHo",
    "half of a second one": b"GET /heal",
}


@contextlib.contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as made:
        yield made


def wait_until_closed(there: socket.socket) -> None:
    """Returns when the other side has closed; a side that does not is a timeout."""
    with contextlib.suppress(ConnectionError):
        while there.recv(4096):
            pass


@pytest.fixture(scope="module")
def quick() -> Iterator[Serving]:
    with serving(limits=Limits(head_s=0.3, connections=40)) as at:
        yield at


@pytest.mark.parametrize("kind", HALVES)
def test_a_half_sent_head_is_closed_in_time(quick: Serving, kind: str) -> None:
    with contextlib.ExitStack() as stack:
        many = [patiently(lambda: begun(quick, stack, kind)) for _ in range(20)]
        assert patiently(lambda: httpx.get(f"{quick.url}/health")).status_code == 200
        for each in many:
            wait_until_closed(each)


def begun(at: Serving, stack: contextlib.ExitStack, kind: str) -> socket.socket:
    """A connection on which half of a head was sent; ConnectionError where it was closed before, as it came late."""
    there = stack.enter_context(connected(at.url))
    if kind == "half of a second one":
        there.sendall(WHOLE)
        if not there.recv(4096).startswith(b"HTTP/1.1 200"):
            raise ConnectionError
    there.sendall(HALVES[kind])
    return there


def test_a_head_that_drips_is_closed_in_time(quick: Serving) -> None:
    def drips(there: socket.socket) -> None:
        there.sendall(b"GET /health HTTP/1.1\r\n")
        for _ in range(1000):
            there.sendall(b"X-a: b\r\n")
            time.sleep(0.02)

    with connected(quick.url) as there, pytest.raises(ConnectionError):
        drips(there)


@pytest.mark.slow(reason="rests for longer than a server waits for a head")
def test_a_connection_that_is_kept_may_rest_for_longer_than_a_head_may_take(quick: Serving) -> None:
    with httpx.Client() as client:
        for _ in range(2):
            assert patiently(lambda: client.get(f"{quick.url}/health")).status_code == 200
            time.sleep(0.6)


def test_one_connection_too_many_is_told_so_and_closed() -> None:
    with serving(limits=Limits(connections=3)) as at:
        with contextlib.ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(connected(at.url))
            answer = httpx.get(f"{at.url}/health")
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert "as many connections as the endpoint takes" in answer.json()["error"]["message"]
            assert at.endpoint.refused == {503: 1}
        until(lambda: httpx.get(f"{at.url}/health").status_code == 200)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_try_to_take_connections_again_after_the_end_is_no_error(
    caplog: pytest.LogCaptureFixture, stopped: bool
) -> None:
    """As asyncio tries a second after it could open no more files, whatever has become of the endpoint."""
    listening, warnings = listen("127.0.0.1", 0), list[str]()
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(_short_of_files(listening, warnings.append))

    async def tries_again() -> None:
        if stopped:
            listening.close()
        loop.call_soon(selectors.DefaultSelector().register, listening if stopped else -1, selectors.EVENT_READ)

    try:
        loop.run_until_complete(tries_again())
        loop.run_until_complete(asyncio.sleep(0))
    finally:
        loop.close()
        listening.close()
    assert [record.exc_info is not None for record in caplog.records] == ([] if stopped else [True])
    assert not warnings


def test_a_lack_of_files_is_told_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, warnings = [100.0], list[str]()
    monkeypatch.setattr("sim.serve.server.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    with listen("127.0.0.1", 0) as listening:
        tell, loop = _short_of_files(listening, warnings.append), asyncio.new_event_loop()
        for now_s[0] in (100.0, 101.0, 159.0, 160.0, 219.0):
            tell(loop, {"exception": OSError(errno.EMFILE, os.strerror(errno.EMFILE))})
        loop.close()
    assert len(warnings) == 2


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    return False


@pytest.mark.slow(reason="a server in real time")
@pytest.mark.parametrize("counts", [True, False])
def test_where_no_more_files_can_be_opened_it_goes_on_when_some_are_closed(tmp_path: Path, counts: bool) -> None:
    """*counts*: whether it keeps fewer connections than it may open files, which it does unless something else opens them."""
    pytest.importorskip("resource")
    start = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100)); import sim.serve.server as server; "
        f"server._OWN_FILES = {64 if counts else -1000}; from sim.cli import main; main()"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", start, "serve", "--port", "0", "--head-timeout-s", "2", "--no-plots", "--out", "out"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment,
    ) as process, contextlib.ExitStack() as stack:  # fmt: skip
        assert process.stdout is not None
        found = re.search(r"http://[\d.:]+", process.stdout.readline())
        assert found is not None
        # It stands still while they come, so that it finds more of them at once than it has files, however fast either side is.
        process.send_signal(signal.SIGSTOP)
        for _ in range(150):
            stack.enter_context(connected(found[0])).sendall(b"GET /health HTTP/1.1\r\n")
        process.send_signal(signal.SIGCONT)
        try:
            until(lambda: answers(found[0]))
        finally:
            process.terminate()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in err, err
    # Told anew where the machine is so busy that it is short of them for long.
    assert "no connection is taken for now" in err
