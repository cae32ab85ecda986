"""rooftrace reproduce: published numbers beside simulated ones."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from sim.errors import OutputError, RooftraceError

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
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", min=1, help="Processes; without it one for each processor.", show_default=False),
    ] = None,
) -> None:
    """Run the published experiments; exit code 1 when a row is out of its tolerance."""
    from sim.reproduce import groups, load_group, write_csv

    names = [group] if group else groups()
    if group and group not in groups():
        raise RooftraceError(f"{group} is not a group of documents; there are {', '.join(groups())}")
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"cannot make the folder {out}: {error.strerror}") from error

    rows: list[Row] = []
    for name, found in _computed(names, quick, jobs or _processors()):
        rows += found
        module = load_group(name)
        _print_group(module.TITLE, found, failures_only)
        if out is not None:
            for path in module.plots(out):
                typer.echo(f"Picture {path}")
    if len(names) > 1:
        _print_summary("All groups", rows)
    if out is not None:
        write_csv(rows, out / "reproduce.csv")
        typer.echo(f"Rows    {out / 'reproduce.csv'}")
    if any(row.ok is False for row in rows):
        raise typer.Exit(1)


class _Task(NamedTuple):
    group: str
    place: int
    title: str
    seconds: float


def _computed(names: Sequence[str], quick: bool, jobs: int) -> Iterator[tuple[str, list[Row]]]:
    """Each group with its rows, in the order of *names*, as soon as it and those before it are there."""
    from sim.reproduce import load_group, parts

    tasks = [
        _Task(name, index, f"{name}: {part.name}", part.seconds)
        for name in names
        for index, part in enumerate(parts(load_group(name)))
    ]
    found: dict[tuple[str, int], list[Row]] = {}
    waiting = list(names)
    with _shown(sum(task.seconds for task in tasks), len(tasks), jobs) as tell:
        for task, rows in _run(tasks, quick, jobs):
            found[task.group, task.place] = rows
            tell(task)
            while waiting and all((each.group, each.place) in found for each in tasks if each.group == waiting[0]):
                name = waiting.pop(0)
                yield name, [row for each in tasks if each.group == name for row in found[name, each.place]]


def _run(tasks: Sequence[_Task], quick: bool, jobs: int) -> Iterator[tuple[_Task, list[Row]]]:
    """Tasks and their rows as they are done."""
    if jobs == 1 or len(tasks) == 1:
        for task in tasks:
            yield task, _part_rows(task.group, task.place, quick)
        return
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor, as_completed

    # Spawned, because a forked copy of a process with threads may hang. The longest first, so that none is left alone.
    with ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {
            pool.submit(_part_rows, task.group, task.place, quick): task
            for task in sorted(tasks, key=lambda task: -task.seconds)
        }
        try:
            for done in as_completed(running):
                yield running[done], done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _part_rows(group: str, index: int, quick: bool) -> list[Row]:
    from sim.reproduce import load_group, parts

    return list(parts(load_group(group))[index].run(quick))


def _processors() -> int:
    from joblib import cpu_count

    return cpu_count()


@contextlib.contextmanager
def _shown(expected_s: float, total: int, jobs: int) -> Iterator[Callable[[_Task], None]]:
    """A function to be told of finished tasks: a bar on a terminal, a line now and then on standard error otherwise."""
    began = last = time.monotonic()
    done = done_s = 0.0

    def left_s() -> float:
        # The expectation is of another machine; what has been done says how much slower or faster this one is.
        elapsed = time.monotonic() - began
        pace = elapsed / done_s if done_s else 1.0 / jobs
        return max(expected_s - done_s, 0.0) * pace

    def progress() -> str:
        return f"{done:.0f} of {total} parts, about {_duration(left_s())} left"

    if not sys.stderr.isatty():
        if expected_s / jobs > _SECONDS_BETWEEN_LINES:
            typer.echo(progress(), err=True)

        def line(task: _Task) -> None:
            nonlocal done, done_s, last
            done, done_s = done + 1, done_s + task.seconds
            if done < total and time.monotonic() - last >= _SECONDS_BETWEEN_LINES:
                last = time.monotonic()
                typer.echo(progress(), err=True)

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        shown = bar.add_task(progress(), total=expected_s)

        def advance(task: _Task) -> None:
            nonlocal done, done_s
            done, done_s = done + 1, done_s + task.seconds
            bar.update(shown, completed=done_s, description=progress())

        yield advance


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _print_group(title: str, rows: Sequence[Row], failures_only: bool) -> None:
    from sim.cli.tables import print_table
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


def _print_summary(title: str, rows: Sequence[Row]) -> None:
    from sim.cli.tables import print_table
    from sim.reproduce import summary

    counts = summary(rows)
    judged, within = sum(asked for _, _, asked, _ in counts), sum(met for *_, met in counts)
    typer.echo(f"{title}: {len(rows)} rows, {judged} judged, {within} of those within tolerance, {judged - within} not")
    table = [(name, str(n), str(asked), str(met), str(asked - met)) for name, n, asked, met in counts if n]
    print_table(("evidence", "rows", "judged", "within", "not"), table)
