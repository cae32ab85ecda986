"""How fast the page of `rooftrace explore` answers, and how much memory it takes, as a browser sees it.

    python -m benchmarks.explore [--moves 50] [--long 500]

Starts the server, asks for the page, and moves settings one after another: prints the medians of the time to the first paint's
content, to an estimate and to the exact run of 2,500 requests, the processor time that a move takes, which says more on a machine
that others use, and memory of the server and its workers after many moves of which each supersedes the one before.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

COMMAND = [sys.executable, "-c", "from sim.cli import main; main()", "explore", "--port", "0", "--until-stdin-ends"]
REQUESTS = 2500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--moves", type=int, default=50)
    parser.add_argument("--long", type=int, default=500, help="moves that supersede each other, for memory")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rooftrace-bench-") as folder:
        begun = time.perf_counter()
        server = subprocess.Popen([*COMMAND, "--out", folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            _measure(server, begun, asked.moves, asked.long)
        finally:
            assert server.stdin is not None
            server.stdin.close()
            server.wait(20)


def _measure(server: subprocess.Popen[str], begun: float, moves: int, long: int) -> None:
    assert server.stdout is not None
    found = re.search(r"http://\S+?(?=;)", server.stdout.readline())
    assert found is not None, "the server did not start"
    where = urlsplit(found[0]).netloc
    size = _get(where, "/")
    print(f"command to a page with an answer on it   {time.perf_counter() - begun:8.2f} s  ({size / 1e3:.0f} kB)")
    paints = [_timed(lambda: _get(where, "/")) for _ in range(20)]
    print(f"content of the first paint, median of 20 {statistics.median(paints) * 1e3:8.1f} ms")
    estimates, exacts = [], []
    used_s = _processor_s(server.pid)
    for state in list(_states())[:moves]:
        times = _answers(where, state)
        estimates.append(times["estimate"])
        exacts.append(times["exact"])
    for name, times in (("estimate", estimates), (f"exact run of {REQUESTS:,} requests", exacts)):
        worst = f"worst {max(times) * 1e3:.0f} ms"
        print(f"{name}, median of {len(times)}".ljust(40), f"{statistics.median(times) * 1e3:8.1f} ms  ({worst})")
    used_s = (_processor_s(server.pid) - used_s) / len(exacts)
    print(f"processor time of a move, both           {used_s * 1e3:8.1f} ms")
    before = _memory_mb(server.pid)
    for i in range(long):
        _move_away(where, {"workload.rate_scale": 1 + i / 1000})
    _answers(where, {"seed": 10_000})
    after = _memory_mb(server.pid)
    print(f"memory before {long} superseded moves       {sum(before):8.0f} MB  (server {before[0]:.0f})")
    print(f"memory after them                        {sum(after):8.0f} MB  (server {after[0]:.0f})")


def _states() -> Iterator[dict[str, Any]]:
    """Moves as a person makes them: rate, count, layout, token budget, stack, seed."""
    for i in range(20):
        yield {"workload.rate_scale": round(0.55 + 0.1 * i, 2)}
    for i in range(2, 10):
        yield {"replicas": i}
    for i in (256, 512, 1024, 2048, 4096, 16384):
        yield {"scheduler.max_num_batched_tokens": i}
    for stack in ("sglang", "trtllm"):
        yield {"serving_stack": stack}
    for i in (2, 4, 8):
        yield {"parallel.tensor": i}
    for device in ("h200", "a100-sxm-80gb", "b200-sxm", "l40s"):
        yield {"hardware": device}
    for i in range(1, 200):
        yield {"seed": i}


def _timed(do: Any) -> float:
    begun = time.perf_counter()
    do()
    return time.perf_counter() - begun


def _get(where: str, path: str) -> int:
    connection = http.client.HTTPConnection(where, timeout=120)
    connection.request("GET", path)
    size = len(connection.getresponse().read())
    connection.close()
    return size


def _asked(where: str, settings: dict[str, Any]) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(where, timeout=120)
    connection.request("POST", "/api/run", json.dumps({"set": settings}), {"X-Client": "benchmark"})
    return connection, connection.getresponse()


def _answers(where: str, settings: dict[str, Any]) -> dict[str, float]:
    """Seconds until each kind of answer is there in whole."""
    begun = time.perf_counter()
    connection, response = _asked(where, settings)
    times: dict[str, float] = {}
    name = ""
    for line in response:
        if line.startswith(b"event: "):
            name = line[7:].strip().decode()
        elif not line.strip():
            times.setdefault(name, time.perf_counter() - begun)
    connection.close()
    assert "exact" in times, f"{settings}: {list(times)}"
    return times


def _move_away(where: str, settings: dict[str, Any]) -> None:
    """Ask, and go as soon as there is an estimate."""
    connection, response = _asked(where, settings)
    response.readline()
    connection.close()


def _with_all_below(pid: int) -> list[int]:
    """A process and all that it started, itself first."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in listed.splitlines()]
    found = [pid]
    for parent in found:
        found += [child for child, of in pairs if of == parent]
    return found


def _processor_s(pid: int) -> float:
    """Seconds of processor time that a process and all below it have used."""
    ticks = 0
    for each in _with_all_below(pid):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{each}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _memory_mb(pid: int) -> list[float]:
    """Memory of a process and of all below it that is its own (PSS)."""
    return [each for one in _with_all_below(pid) if (each := _pss_mb(one)) is not None]


def _pss_mb(pid: int) -> float | None:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8")
    except OSError:
        return None
    return int(re.search(r"^Pss:\s+(\d+)", text, re.MULTILINE)[1]) / 1024


if __name__ == "__main__":
    main()
