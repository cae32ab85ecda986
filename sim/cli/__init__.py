"""The command line. Each module of `sim.cli.commands` adds one command and is found by being there.

`app` puts the commands together, `exits` has their exit codes, `options` and `exports` the options that several take, `given` what
they stand for, `tables` prints tables and JSON, `outputs` writes files. Nothing else in the project knows this room. Read
`commands/run` first.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from sim.cli.app import build_app
from sim.cli.exits import USER_ERROR, Terminated, code_of
from sim.packages import intruder


def main() -> None:
    """Run the command line and exit with its code."""
    strange = intruder()
    if strange:
        print(f"Error: {strange}", file=sys.stderr)
        sys.exit(USER_ERROR)
    # A policy of the user's own may lie in the current folder; appended, it can shadow nothing.
    sys.path.append(os.getcwd())
    signal.signal(signal.SIGTERM, _terminate)
    try:
        build_app()()
    except KeyboardInterrupt as error:
        sys.exit(code_of(error))


def _terminate(_number: int, _frame: FrameType | None) -> None:
    # An exception rather than the default, so that half-written results are removed on the way out; one is enough.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated
