"""A thousand streams, and clients that mean no good: nothing is left of them but their rows."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the serve extra (pip install -e '.[serve]')")

from sim.serve.app import Limits
from tests.serve.serving import HELD, Serving, serving, until

pytestmark = pytest.mark.slow(reason="clients talk to a server in real time")

ABUSE_S = float(os.environ.get("ROOFTRACE_ABUSE_S", "20"))
"""An hour is ROOFTRACE_ABUSE_S=3600."""


def head(body: bytes, length: int | None = None) -> bytes:
    n = len(body) if length is None else length
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (n, body)


async def talk(at: Serving, data: bytes, *, most: int | None = None) -> bytes:
    """The answer to *data*, up to *most* bytes, after which the client goes without a word."""
    host, port = at.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(data)
        await writer.drain()
        parts, got = [], 0
        while (most is None or got < most) and (part := await asyncio.wait_for(reader.read(1 << 16), 120)):
            parts.append(part)
            got += len(part)
        return b"".join(parts)
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort()


def test_a_thousand_streams_get_all_of_their_tokens() -> None:
    body = json.dumps({"prompt": "a b c d", "max_tokens": 20, "stream": True}).encode()
    most = 0

    async def all_of_them(at: Serving) -> list[bytes]:
        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, len(at.session.open))
                if most == 1000 and at.session.pacer.speed == HELD:
                    at.run_on(1.0)
                await asyncio.sleep(0.01)

        watching = asyncio.create_task(watch())
        try:
            return await asyncio.gather(*(talk(at, head(body)) for _ in range(1000)))
        finally:
            watching.cancel()

    # Held, so that all of them are under way before the first has ended, whatever the machine.
    with serving(speed=HELD, bound_s=60.0) as at:
        found = asyncio.run(all_of_them(at))
        assert not at.session.open
    assert most == 1000
    assert [each.count(b"data: {") for each in found] == [20] * 1000
    assert all(each.count(b"data: [DONE]") == 1 for each in found)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="reads resident memory from /proc, which only Linux has"
)
def test_nothing_but_rows_is_left_of_random_abuse(capfd: pytest.CaptureFixture[str]) -> None:
    luck = random.Random(7)

    def hostile() -> tuple[bytes, int | None]:
        """Something that a client sends, and after how many bytes of the answer it goes."""
        kind = luck.randrange(8)
        words: Any = " ".join(
            luck.choice(("a", "bb", "ccc", "é", "中", "\x00", "9")) for _ in range(luck.randrange(1, 400))
        )
        good = {"prompt": words, "max_tokens": luck.randrange(1, 200), "stream": luck.random() < 0.7}
        data = json.dumps(good).encode()
        if kind == 0:
            return head(bytes(luck.randrange(256) for _ in range(luck.randrange(300)))), None
        if kind == 1:
            return head(data, len(data) + 500), 1 if luck.random() < 0.5 else 0
        if kind == 2:
            wrong = luck.choice((None, -1, 1e9, "x", [], {}, True, 2**70, [[1]], [None]))
            return head(json.dumps({**good, luck.choice(list(good)): wrong}).encode()), None
        if kind == 3:
            return head(data), luck.randrange(1, 2000)
        if kind == 4:
            return b"\x16\x03\x01 not http\r\n\r\n", None
        if kind == 5:
            return head(b'{"prompt": "' + b"x " * 600_000 + b'"}'), None
        if kind == 6:
            return head(b"[" * 50_000), None
        return head(data), None

    async def for_a_while(at: Serving, seconds: float) -> int:
        end, n = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            sent = [hostile() for _ in range(16)]
            n += len(sent)
            await asyncio.gather(*(talk(at, data, most=most) for data, most in sent if most != 0))
        return n

    with serving(speed=50.0, limits=Limits(body_bytes=1 << 20, streams=64, body_s=1.0), bound_s=1e3) as at:
        asyncio.run(for_a_while(at, ABUSE_S / 4))
        gc.collect()
        before, rows_before = resident_bytes(), len(at.session.run)
        n = 0
        for part in range(1, 7):
            n += asyncio.run(for_a_while(at, ABUSE_S / 6))
            rows, grown = len(at.session.run) - rows_before, resident_bytes() - before
            with capfd.disabled():
                print(
                    f"\n{part * ABUSE_S / 6:.0f} s: {n} attempts, {rows} requests, {grown / 1e6:.1f} MB more",
                    flush=True,
                )
        until(lambda: not (at.session.open or at.endpoint.busy or at.endpoint.bytes_of_bodies))
        gc.collect()
        rows, grown = len(at.session.run) - rows_before, resident_bytes() - before
        spans = sum(len(core.recorder.spans.buffer) for machine in at.session.run._machines for core in machine.cores)
    with capfd.disabled():
        print(f"{n} attempts, {rows} requests, {grown / 1e6:.1f} MB more, records of iterations {spans / 1e6:.1f} MB")
    # What is kept of a request, an allowance for the allocator, and the records of iterations, which grow by doubling.
    assert grown < 8_000 * rows + 2 * spans + 30e6
    assert 500 not in at.endpoint.refused
    assert {400, 413} <= set(at.endpoint.refused)
    assert "Traceback" not in capfd.readouterr().err
