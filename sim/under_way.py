"""Long work shown on a terminal: what is done of how much, how fast, and how long the rest will take.

Long work says with `under_way` what it does and how far it is, and loops with `steps`; each within another is a line of its own.
On anything but a terminal, and in processes that are no command of ours, they cost nothing and show nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Timer
from typing import TYPE_CHECKING, TypeVar

from sim.text import seconds_text

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import Progress, TaskID

SILENT_S = 2.0
"""Work that ends sooner shows nothing, and neither does a part of it."""

_LOOKS_PER_S = 2.0
"""The display asks so often how much is done."""

Number = Callable[[], float]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of the display: *done* of *total* (None: nobody knows), in *unit*, or what *said* says of it."""

    what: str
    unit: str = ""
    done: Number | None = None
    total: Callable[[], float | None] = lambda: None
    said: Callable[[], str] | None = None
    began_s: float = field(default_factory=time.monotonic)

    def text(self, now_s: float) -> str:
        """How far it is, its rate, and the time left at the pace so far."""
        if self.said is not None:
            return self.said()
        if self.done is None:
            return ""
        return pace_text(self.done(), self.total(), now_s - self.began_s, self.unit)


def pace_text(done: float, total: float | None, elapsed_s: float, unit: str) -> str:
    """'1,200 of 5,000 requests, 400/s, 9.5 s left'."""
    texts = [f"{done:,.0f} {unit}" if total is None else f"{done:,.0f} of {total:,.0f} {unit}"]
    if done > 0 and elapsed_s > 0:
        texts.append(rate_text(done / elapsed_s))
        if total is not None:
            texts.append(f"{seconds_text(round(elapsed_s / done * max(total - done, 0), 1))} left")
    return ", ".join(texts)


def rate_text(per_s: float) -> str:
    """A rate that is read at a glance: by the minute where less than one a second is done."""
    return f"{per_s:,.0f}/s" if per_s >= 10 else f"{per_s:.1f}/s" if per_s >= 1 else f"{60 * per_s:.2g}/min"


class _Display:
    """The lines that are shown, on standard error, each from `SILENT_S` after it began on."""

    def __init__(self) -> None:
        self._lines: dict[TaskID, Line] = {}
        self._progress = self._drawn()
        self._timer = Timer(SILENT_S, self._progress.start)
        self._timer.daemon = True
        self._timer.start()

    def _drawn(self) -> Progress:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        lines = self._lines

        class Asked(Progress):
            """A display that asks each line how far it is when it draws it."""

            def get_renderables(self) -> Iterable[RenderableType]:
                now_s = time.monotonic()
                for id_, line in list(lines.items()):
                    done, total = line.done, line.total()
                    self.update(
                        id_,
                        completed=0 if done is None else done(),
                        total=total,
                        visible=now_s - line.began_s >= SILENT_S,
                        text=line.text(now_s),
                    )
                yield from super().get_renderables()

        columns = (
            *(SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(bar_width=20)),
            *(TextColumn("{task.fields[text]}", markup=False), TimeElapsedColumn()),
        )
        # What is printed meanwhile goes where it was to go: a file that takes standard output keeps it.
        return Asked(
            *columns, console=Console(stderr=True), transient=True, refresh_per_second=_LOOKS_PER_S,
            redirect_stdout=sys.stdout.isatty(),
        )  # fmt: skip

    @contextmanager
    def shows(self, line: Line) -> Generator[None]:
        id_ = self._progress.add_task(line.what, total=None, text="", visible=False)
        self._lines[id_] = line
        try:
            yield
        finally:
            del self._lines[id_]
            self._progress.remove_task(id_)

    def close(self) -> None:
        self._timer.cancel()
        self._timer.join()
        self._progress.stop()


class _Process:
    """Standard error belongs to the process: whether it is shown to, and the display that is open there."""

    def __init__(self) -> None:
        self.wanted = False
        self.display: _Display | None = None


_PROCESS = _Process()


def on_terminals() -> None:
    """Show from here on, on a terminal, all long work of this process: a command of its own asks for it."""
    _PROCESS.wanted = True


@contextmanager
def under_way(
    what: str = "",
    *,
    unit: str = "",
    done: Number | None = None,
    total: Callable[[], float | None] = lambda: None,
    said: Callable[[], str] | None = None,
    asked: bool = False,
) -> Generator[None]:
    """Show *what* is done while the block runs, from `SILENT_S` on; see `Line`.

    Nothing is shown where standard error is no terminal, nor before `on_terminals`, unless it is *asked* for.
    """
    line = Line(what=what, unit=unit, done=done, total=total, said=said)
    if _PROCESS.display is not None:
        with _PROCESS.display.shows(line):
            yield
    elif (_PROCESS.wanted or asked) and sys.stderr.isatty():
        display = _PROCESS.display = _Display()
        try:
            with display.shows(line):
                yield
        finally:
            _PROCESS.display = None
            display.close()
    else:
        yield


def steps(items: Iterable[T], unit: str) -> Generator[T]:
    """*items* one by one, while it is shown how many are done of those that there are."""
    n_done, n = 0, float(len(items)) if isinstance(items, Collection) else None
    with under_way(unit=unit, done=lambda: n_done, total=lambda: n):
        for item in items:
            yield item
            n_done += 1
