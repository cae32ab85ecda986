"""Processor time of `rooftrace --help`, and of `rooftrace run` until its first event.

    python -m benchmarks.start_up [--times 5] [--imports]

Each is started anew `--times` times from modules that Python has compiled before, as installed ones are, and the least time counts:
other processes add to it and take nothing off. More than is allowed is exit code 1. `--imports` shows which modules take longest.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile

_MAIN = "from sim.cli import main; main()"
_HELP = f"import atexit, sys, time; atexit.register(lambda: print(time.process_time(), file=sys.stderr)); {_MAIN}"
_RUN = f"""
import os, sys, time
from sim.engine.time.events import Clock
def first_event(*_, **__):
    print(time.process_time(), file=sys.stderr, flush=True)
    os._exit(0)
Clock.run = first_event
{_MAIN}
"""
CASES = (
    ("rooftrace --help", 0.4, (_HELP, "--help")),
    ("rooftrace run, to its first event", 1.0, (_RUN, "run")),
)
"""Each case: its name, the seconds that it may take on one core of a common server, and how it is started."""


def said(arguments: tuple[str, ...], folder: str, *options: str) -> str:
    """The standard error of a new process; its compiled modules are kept in *folder*."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, *options, "-c", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, env={**kept, "PYTHONPYCACHEPREFIX": folder}
    ).stderr


def slowest_imports(text: str, most: int = 20) -> list[tuple[float, str]]:
    """The modules that take longest to import by themselves, in ms."""
    lines = [line.removeprefix("import time:").split("|") for line in text.splitlines() if "|" in line]
    found = [(int(own) * 1e-3, name.strip()) for own, _, name in lines if own.strip().isdigit()]
    return sorted(found, reverse=True)[:most]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--imports", action="store_true")
    options = parser.parse_args()
    slow = False
    with tempfile.TemporaryDirectory() as folder:
        for name, allowed_s, arguments in CASES:
            said(arguments, folder)
            seconds = min(float(said(arguments, folder).split()[-1]) for _ in range(options.times))
            slow = slow or seconds > allowed_s
            print(f"{name:<36} {seconds:5.2f} s of processor time, {allowed_s:g} s allowed")
            if options.imports:
                for own_ms, module in slowest_imports(said(arguments, folder, "-X", "importtime")):
                    print(f"    {own_ms:7.1f} ms {module}")
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
