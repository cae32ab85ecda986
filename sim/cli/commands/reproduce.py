"""rooftrace reproduce: published numbers beside simulated ones."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from sim.cli.exits import interrupted
from sim.cli.options import Jobs, Json
from sim.cli.tables import print_json, print_notes, print_table
from sim.errors import OutputError, RooftraceError
from sim.under_way import under_way

if TYPE_CHECKING:
    from sim.reproduce import Row

_SECONDS_BETWEEN_LINES = 20.0
_PRINTED = ("experiment", "case", "quantity", "published", "simulated", "error_pct", "tolerance", "evidence", "ok")


def register(app: typer.Typer) -> None:
    app.command()(reproduce)


def reproduce(
    group: Annotated[str | None, typer.Argument(help="Group of documents; without one all are run.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for reproduce.csv and the pictures.", show_default=False)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Shorter runs; intervals are wider.")] = False,
    failures_only: Annotated[bool, typer.Option("--failures", help="Print only rows out of tolerance.")] = False,
    jobs: Jobs = None,
    as_json: Json = False,
) -> None:
    """Run the published experiments; exit code 1 when a row is out of its tolerance."""
    names = _asked(group)
    if out is not None:
        _make(out)
    print_notes(_notes(names))
    done: dict[_Task, list[Row]] = {}
    try:
        with contextlib.closing(_computed(names, quick, jobs or _processors(), done)) as computed:
            for name, found in computed:
                _show_group(name, found, out=out, failures_only=failures_only, as_json=as_json)
    except KeyboardInterrupt as error:
        raise interrupted(error, _kept(done, names, out)) from None
    rows = _rows(done, names)
    if as_json:
        print_json(_facts(rows, failures_only))
    elif len(names) > 1:
        _print_summary("All groups", rows)
    if out is not None:
        typer.echo(f"Rows    {_write(rows, out)}", err=as_json)
    if any(row.ok is False for row in rows):
        raise typer.Exit(1)


def _asked(group: str | None) -> list[str]:
    """The groups to run; RooftraceError for one that is none."""
    from sim.reproduce import groups

    if group and group not in groups():
        raise RooftraceError(f"{group} is not a group of documents; there are {', '.join(groups())}")
    return [group] if group else groups()


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot make the folder {folder}: {error.strerror}") from error


def _notes(names: Sequence[str]) -> Iterator[str]:
    """Sentences that groups have to say before they run."""
    from sim.reproduce import load_group

    for name in names:
        note = getattr(load_group(name), "note", None)
        if note is not None and (said := note()) is not None:
            yield said


def _show_group(name: str, rows: Sequence[Row], *, out: Path | None, failures_only: bool, as_json: bool) -> None:
    """Print the rows of a group, and draw its pictures into *out*."""
    from sim.reproduce import load_group

    module = load_group(name)
    if not as_json:
        _print_group(module.TITLE, rows, failures_only)
    if out is not None:
        for path in module.plots(out):
            typer.echo(f"Picture {path}", err=as_json)


def _kept(done: Mapping[_Task, list[Row]], names: Sequence[str], out: Path | None) -> str:
    """A sentence about what an interrupted run has done; its rows are written where there is a folder for them."""
    if not done:
        return "parts done: 0."
    kept = "--out keeps its rows" if out is None else f"its rows are in {_write(_rows(done, names), out)}"
    return f"parts done: {len(done)}; {kept}."


def _write(rows: Sequence[Row], out: Path) -> Path:
    from sim.reproduce import write_csv

    path = out / "reproduce.csv"
    write_csv(rows, path)
    return path


def _facts(rows: Sequence[Row], failures_only: bool) -> dict[str, Any]:
    shown = [row for row in rows if row.ok is False or not failures_only]
    return {
        "rows": [
            {**asdict(row), "informational": row.informational, "error_pct": row.error_pct, "ok": row.ok}
            for row in shown
        ],
        "summary": _counts(rows),
    }


class _Task(NamedTuple):
    group: str
    place: int
    title: str
    seconds: float


def _rows(done: Mapping[_Task, list[Row]], names: Sequence[str]) -> list[Row]:
    """The rows of the parts that are *done*, in the order of *names* and of their parts."""
    return [row for task in sorted(done, key=lambda task: (names.index(task.group), task.place)) for row in done[task]]


def _computed(
    names: Sequence[str], quick: bool, jobs: int, done: dict[_Task, list[Row]]
) -> Generator[tuple[str, list[Row]]]:
    """Each group with its rows, in the order of *names*, as soon as it and those before it are there; parts go into *done*."""
    from sim.reproduce import load_group, parts

    tasks = [
        _Task(name, index, f"{name}: {part.name}", part.seconds)
        for name in names
        for index, part in enumerate(parts(load_group(name)))
    ]
    waiting = list(names)
    progress = _Progress(_order(tasks, jobs), jobs)
    with _shown(progress):
        for task, rows in _run(progress.tasks, quick, jobs):
            done[task] = rows
            progress.done.append(task)
            while waiting and all(each in done for each in tasks if each.group == waiting[0]):
                name = waiting.pop(0)
                yield name, _rows({each: done[each] for each in tasks if each.group == name}, names)


def _order(tasks: Sequence[_Task], jobs: int) -> Sequence[_Task]:
    """One process goes group by group; several begin with the longest, so that none is left alone with it."""
    return tasks if jobs == 1 else sorted(tasks, key=lambda task: -task.seconds)


def _run(tasks: Sequence[_Task], quick: bool, jobs: int) -> Iterator[tuple[_Task, list[Row]]]:
    """Tasks and their rows as they are done."""
    if jobs == 1 or len(tasks) == 1:
        for task in tasks:
            yield task, _part_rows(task.group, task.place, quick)
        return
    from concurrent.futures import FIRST_COMPLETED, Future, wait

    from sim.processes import ProcessPool

    waiting = iter(tasks)
    running: dict[Future[list[Row]], _Task] = {}
    with ProcessPool(min(jobs, len(tasks))) as pool:
        # No more are handed over than run: of those that wait, a pool that is ended loses count.
        while True:
            for task in itertools.islice(waiting, jobs - len(running)):
                running[pool.submit(_part_rows, task.group, task.place, quick)] = task
            if not running:
                break
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(done), done.result()


def _part_rows(group: str, index: int, quick: bool) -> list[Row]:
    from sim.reproduce import load_group, parts

    return list(parts(load_group(group))[index].run(quick))


def _processors() -> int:
    from joblib import cpu_count

    return cpu_count()


@dataclass(slots=True)
class _Progress:
    """The progress of a run. *tasks* in the order in which they are started, *jobs* of them at a time."""

    tasks: Sequence[_Task]
    jobs: int
    done: list[_Task] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)

    def left_s(self) -> float:
        """Seconds that are left, from the pace so far, what is under way being half done.

        The parts' own seconds are of another machine and serve for their proportions; before the first part is done they
        are also the least that is believed.
        """
        waiting = [task.seconds for task in self.tasks if task not in self.done]
        expected_s = sum(task.seconds for task in self.tasks)
        worked_s = expected_s - sum(waiting) + sum(waiting[: self.jobs]) / 2
        elapsed_s = time.monotonic() - self.began_s
        by_pace_s = (expected_s - worked_s) * elapsed_s / worked_s if worked_s > 0 else 0.0
        return by_pace_s if self.done else max(by_pace_s, expected_s / self.jobs - elapsed_s)

    def __str__(self) -> str:
        left_s = self.left_s()
        left = f"{left_s:.0f} s" if left_s < 90 else f"{left_s / 60:.0f} min"
        return f"{len(self.done)} of {len(self.tasks)} parts, about {left} left"


@contextlib.contextmanager
def _shown(progress: _Progress) -> Iterator[None]:
    """Shows *progress* while the block runs: a bar on a terminal, a line now and then on standard error otherwise."""
    if sys.stderr.isatty():
        total_s = sum(task.seconds for task in progress.tasks)
        with under_way(
            done=lambda: sum(each.seconds for each in progress.done), total=lambda: total_s, said=lambda: str(progress)
        ):
            yield
        return
    ended = threading.Event()

    def lines() -> None:
        told = 0
        while not ended.wait(_SECONDS_BETWEEN_LINES):
            if len(progress.done) > told:
                told = len(progress.done)
                typer.echo(str(progress), err=True)

    if progress.left_s() > _SECONDS_BETWEEN_LINES:
        typer.echo(str(progress), err=True)
    writer = threading.Thread(target=lines, daemon=True)
    writer.start()
    try:
        yield
    finally:
        ended.set()
        writer.join()


def _print_group(title: str, rows: Sequence[Row], failures_only: bool) -> None:
    from sim.reproduce import COLUMNS

    wrong = [row for row in rows if row.ok is False]
    shown = wrong if failures_only else rows
    if shown:
        places = [COLUMNS.index(name) for name in _PRINTED]
        cells = ([row.cells()[place] for place in places] for row in shown)
        print_table(_PRINTED, cells, title=title, left=3, fold_left=True, fold=2)
    for row in wrong:
        if row.note:
            typer.echo(f"Out of tolerance: {row.experiment}, {row.case}, {row.quantity}: {row.note}")
    _print_summary(title, rows)


def _counts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    from sim.reproduce import summary

    return [
        {"evidence": name, "rows": n, "judged": asked, "within": met, "not": asked - met}
        for name, n, asked, met in summary(rows)
    ]


def _print_summary(title: str, rows: Sequence[Row]) -> None:
    from sim.reproduce import summary

    counts = summary(rows)
    judged, within = sum(asked for _, _, asked, _ in counts), sum(met for *_, met in counts)
    typer.echo(f"{title}: {len(rows)} rows, {judged} judged, {within} of those within tolerance, {judged - within} not")
    table = [(name, str(n), str(asked), str(met), str(asked - met)) for name, n, asked, met in counts if n]
    print_table(("evidence", "rows", "judged", "within", "not"), table)
