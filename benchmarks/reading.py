"""Time and memory that reading a long trace takes, all of it and its first 500 requests.

    python -m benchmarks.reading [ROWS]

writes a trace of ROWS rows (10,000,000 unless said) in each format to a temporary folder, one after the other, and reads it in a
process of its own.
"""

from __future__ import annotations

import gzip
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

FIRST = 500
_ROWS_AT_ONCE = 100_000
_READ = """
import resource, sys, time
from workloads import read_trace
before_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
began = time.perf_counter()
trace = read_trace(sys.argv[1], limit=int(sys.argv[2]) or None)
took_s = time.perf_counter() - began
peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(f"{len(trace):12,} requests {took_s:8.2f} s {peak_mb:8.0f} MB at most, of which {before_mb:.0f} before it was read")
"""

FORMATS: dict[str, tuple[str, Callable[[int], str]]] = {
    "plain": ("arrival_s,prompt_tokens,output_tokens\n", lambda i: f"{i / 100},{i % 4000 + 1},{i % 500}\n"),
    "azure_llm": (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n",
        lambda i: (
            f"2023-11-{1 + i // 86_400_00 % 30:02} {i // 360_000 % 24:02}:{i // 6000 % 60:02}:{i // 100 % 60:02}.{i % 100:02},9,9\n"
        ),
    ),
    "burstgpt": (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n",
        lambda i: f"{i / 100},GPT-4,{i % 4000 + 1},{i % 500},0,API log\n",
    ),
    "export": (
        "startTime,promptTokens,completionTokens,status\n",
        lambda i: f"{1_700_000_000_000 + 10 * i},{i % 4000 + 1},{i % 500},ok\n",
    ),
    "mooncake": (
        "",
        lambda i: f'{{"timestamp": {i}, "input_length": {i % 4000 + 1}, "output_length": {i % 500}, "hash_ids": []}}\n',
    ),
}


def pieces(head: str, row: Callable[[int], str], n: int) -> Iterator[bytes]:
    """A file of *n* rows, some at a time."""
    yield head.encode()
    for at in range(0, n, _ROWS_AT_ONCE):
        yield "".join(map(row, range(at, min(at + _ROWS_AT_ONCE, n)))).encode()


def main() -> None:
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000_000
    with tempfile.TemporaryDirectory() as folder:
        for name, (head, row) in FORMATS.items():
            text, packed = Path(folder, name), Path(folder, f"{name}.gz")
            with text.open("wb") as file, gzip.open(packed, "wb", compresslevel=1) as smaller:
                for piece in pieces(head, row, n):
                    file.write(piece)
                    smaller.write(piece)
            for path, limit in ((text, FIRST), (packed, FIRST), (text, 0)):
                told = subprocess.run(
                    [sys.executable, "-c", _READ, str(path), str(limit)], check=True, capture_output=True, text=True
                ).stdout
                print(f"{path.name:14} {path.stat().st_size / 1e6:7.0f} MB {told}", end="", flush=True)
            text.unlink()
            packed.unlink()


if __name__ == "__main__":
    main()
