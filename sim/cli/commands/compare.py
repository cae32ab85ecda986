"""rooftrace compare: is B better than A, and how sure is that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sim.cli.exports import takes_export
from sim.cli.options import IntervalReplays, Jobs, Json, set_option
from sim.cli.tables import console, print_facts, print_json, print_notes
from sim.errors import RooftraceError

if TYPE_CHECKING:
    from sim.bench.intervals import Interval
    from sim.scenario import Scenario
    from sim.study.compare import Comparison


def register(app: typer.Typer) -> None:
    app.command()(takes_export(compare))


def compare(
    a: Annotated[Path, typer.Argument(help="Scenario file, results folder or sweep folder.")],
    b: Annotated[Path, typer.Argument(help="Another of the same kind.")],
    metric: Annotated[
        list[str] | None, typer.Option("--metric", help="Dotted name, such as ttft_s.p99; repeatable.")
    ] = None,
    set_: Annotated[list[str] | None, set_option("Change a setting of both scenarios.")] = None,
    replications: Annotated[
        int | None, typer.Option(min=2, help="Runs of each scenario; 10 without.", show_default=False)
    ] = None,
    jobs: Jobs = None,
    intervals: IntervalReplays = None,
    as_json: Json = False,
) -> None:
    """Say by how much B differs from A, over pairs that share their random numbers."""
    from sim.cli.given import read_scenario
    from sim.cli.intervals import print_changes
    from sim.study.compare import REPLICATIONS
    from sim.study.compare import compare as compared

    _check(a, b, replications=replications, jobs=jobs, set_=set_, intervals=intervals)
    sides = [read_scenario(path, set_) for path in (a, b)] if set_ else [a, b]
    around = None if intervals is None else _changes(sides, intervals, metric)
    found = compared(*sides, metrics=metric, replications=replications or REPLICATIONS, jobs=jobs)
    print_notes(found.notes)
    if as_json:
        print_json(_facts(found, around))
        return
    _print(found)
    if around is not None and intervals is not None:
        print_changes(around, intervals)


def _check(
    a: Path,
    b: Path,
    *,
    replications: int | None,
    jobs: int | None,
    set_: Sequence[str] | None,
    intervals: int | None,
) -> None:
    """RooftraceError for options about running scenarios where one side is a folder of results."""
    folder = next((path for path in (a, b) if path.is_dir()), None)
    if folder is None:
        return
    for name, value in (("--replications", replications), ("--jobs", jobs)):
        if value is not None:
            raise RooftraceError(f"{name} is about running scenarios, and {folder} holds results; leave it out")
    if set_:
        raise RooftraceError(f"--set, like --trace, changes scenarios before they run, and {folder} holds results")
    if intervals is not None:
        raise RooftraceError(f"--intervals replays scenarios, and {folder} holds results; leave it out")


def _changes(sides: Sequence[Path | Scenario], replays: int, metrics: Sequence[str] | None) -> dict[str, Interval]:
    """The difference of the second scenario from the first, from replays of both."""
    from sim.bench.intervals import FIGURES, changes
    from sim.cli.given import read_scenario

    one, other = (read_scenario(side) if isinstance(side, Path) else side for side in sides)
    return changes(one, other, replays, tuple(metrics) if metrics else FIGURES)


def _facts(found: Comparison, around: Mapping[str, Interval] | None) -> dict[str, Any]:
    from sim.cli.intervals import change_facts

    return {
        "a": found.a,
        "b": found.b,
        "how": found.how,
        "differences": found.rows(),
        **({} if around is None else {"intervals": change_facts(around)}),
        "trusted": dict(zip("ab", found.trusted, strict=True)),
    }


def _print(found: Comparison) -> None:
    from sim.results import interval_text

    print_facts([("A", found.a), ("B", found.b)])
    where: object = {}
    for each in found.differences:
        if each.where != where:
            where = each.where
            settings = ", ".join(f"{key}={value}" for key, value in each.where.items())
            console().print(settings, style="bold", markup=False)
        console().print(f"  {each.verdict}", markup=False, soft_wrap=True)
    console().print(f"({found.how})", markup=False, soft_wrap=True)
    print_facts(
        [
            (f"Expect to measure of {side}", interval_text(trusted["intervals"]))
            for side, trusted in zip("AB", found.trusted, strict=True)
            if "intervals" in trusted
        ]
    )
