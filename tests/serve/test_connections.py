"""Connections that ask for nothing, ask slowly, or are too many: others are served all the while."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("httpx", reason="needs httpx (pip install -e '.[test]')")
pytest.importorskip("uvicorn", reason="needs the serve extra (pip install -e '.[serve]')")

import httpx

from sim.serve.app import Limits
from tests.serve.serving import Serving, serving

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


def closed_after_s(there: socket.socket) -> float:
    """Seconds until the other side has closed."""
    begun = time.monotonic()
    with contextlib.suppress(ConnectionError):
        while there.recv(4096):
            pass
    return time.monotonic() - begun


@pytest.fixture(scope="module")
def quick() -> Iterator[Serving]:
    with serving(limits=Limits(head_s=0.3, connections=40)) as at:
        yield at


@pytest.mark.parametrize("kind", HALVES)
def test_a_half_sent_head_is_closed_in_time(quick: Serving, kind: str) -> None:
    with contextlib.ExitStack() as stack:
        many = [stack.enter_context(connected(quick.url)) for _ in range(20)]
        for each in many:
            if kind == "half of a second one":
                each.sendall(WHOLE)
                assert each.recv(4096).startswith(b"HTTP/1.1 200")
            each.sendall(HALVES[kind])
        assert httpx.get(f"{quick.url}/health").status_code == 200
        assert max(map(closed_after_s, many)) < 10


def test_a_head_that_drips_is_closed_in_time(quick: Serving) -> None:
    with connected(quick.url) as there:
        begun = time.monotonic()
        with contextlib.suppress(ConnectionError):
            there.sendall(b"GET /health HTTP/1.1\r\n")
            while time.monotonic() - begun < 10:
                there.sendall(b"X-a: b\r\n")
                time.sleep(0.02)
        assert time.monotonic() - begun < 10


def test_a_connection_that_is_kept_may_rest_for_longer_than_a_head_may_take(quick: Serving) -> None:
    with httpx.Client() as client:
        for _ in range(2):
            assert client.get(f"{quick.url}/health").status_code == 200
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
        for _ in range(100):
            if httpx.get(f"{at.url}/health").status_code == 200:
                return
            time.sleep(0.05)
    pytest.fail("no connection was taken after the others had gone")


@pytest.mark.slow
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
        end = time.monotonic() + 30
        answered = False
        while not answered and time.monotonic() < end:
            with contextlib.suppress(httpx.HTTPError):
                answered = httpx.get(f"{found[0]}/health", timeout=5).status_code == 200
            time.sleep(0.2)
        process.terminate()
        _, err = process.communicate(timeout=60)
    assert answered
    assert process.returncode == 0
    assert "Traceback" not in err, err
    assert err.count("no connection is taken for now") == 1, err
