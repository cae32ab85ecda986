"""Shows how far a sweep is: a bar where someone watches, one line of JSON a run for machines, nothing otherwise."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sim.text import seconds_text
from sim.under_way import rate_text, under_way


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a sweep. *reused* runs were found finished; *key* and *error* are of the run that has just ended."""

    total: int
    done: int
    failed: int
    reused: int
    elapsed_s: float
    key: str = ""
    error: str = ""

    @property
    def left_s(self) -> float | None:
        """Seconds still to go at the pace so far; None before anything has run."""
        ran = self.done - self.reused
        return None if ran <= 0 else self.elapsed_s / ran * (self.total - self.done)


Report = Callable[[Progress], None]


@contextmanager
def shown(progress: Report | bool | None) -> Iterator[Report]:
    """A function that reports: *progress* itself, or a bar for True, nothing for False, what suits for None."""
    if callable(progress):
        yield progress
    elif progress is False:
        yield _nothing
    elif _in_notebook():
        yield from _notebook()
    elif progress or sys.stderr.isatty():
        yield from _bar()
    else:
        yield _nothing


def json_line(progress: Progress) -> str:
    """*progress* as one line of JSON."""
    left_s = progress.left_s
    event: dict[str, Any] = {
        "event": "run",
        "key": progress.key,
        "done": progress.done,
        "total": progress.total,
        "failed": progress.failed,
        "reused": progress.reused,
        "elapsed_s": round(progress.elapsed_s, 3),
        "left_s": None if left_s is None else round(left_s, 3),
    }
    if progress.error:
        event["error"] = progress.error
    return json.dumps(event)


def _nothing(_: Progress) -> None:
    pass


def _bar() -> Iterator[Report]:
    latest: Progress | None = None

    def report(progress: Progress) -> None:
        nonlocal latest
        latest = progress

    with under_way(
        "Simulating",
        done=lambda: 0 if latest is None else latest.done,
        total=lambda: None if latest is None else latest.total,
        said=lambda: "" if latest is None else _text(latest),
        asked=True,
    ):
        yield report


def _text(progress: Progress) -> str:
    ran = progress.done - progress.reused
    rate = [rate_text(ran / progress.elapsed_s)] if ran and progress.elapsed_s > 0 else []
    return ", ".join(filter(None, [f"{progress.done:,} of {progress.total:,} runs", *rate, _left(progress)]))


def _left(progress: Progress) -> str:
    texts = [] if progress.left_s is None else [f"{seconds_text(round(progress.left_s, 1))} left"]
    if progress.reused:
        texts.append(f"{progress.reused:,} were done")
    if progress.failed:
        texts.append(f"{progress.failed:,} failed")
    return ", ".join(texts)


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"


def _notebook() -> Iterator[Report]:
    """One line of output that is replaced as the sweep goes on; needs no widgets."""
    from IPython.display import HTML, display  # type: ignore[import-not-found]

    handle = display(HTML("<progress></progress>"), display_id=True)
    assert handle is not None  # display_id was asked for
    last_s = -1.0

    def report(progress: Progress) -> None:
        nonlocal last_s
        if progress.done < progress.total and progress.elapsed_s - last_s < 0.2:
            return
        last_s = progress.elapsed_s
        handle.update(
            HTML(
                f"<progress value='{progress.done}' max='{progress.total}'></progress> "
                f"{progress.done:,} of {progress.total:,} runs, {_left(progress)}"
            )
        )

    yield report
