"""What a command is at, on a terminal, once that takes a while."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from threading import Timer

SILENT_S = 2.0


@contextmanager
def under_way(what: str, silent_s: float = SILENT_S) -> Generator[None]:
    """Say *what* is being done, and for how long, on standard error where that is a terminal, from *silent_s* on."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    shown = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    shown.add_task(what, total=None)
    timer = Timer(silent_s, shown.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        shown.stop()
