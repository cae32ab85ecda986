"""rooftrace compare: is B better than A, and how sure is that."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sim.cli.exports import takes_export
from sim.cli.intervals import IntervalReplays, change_facts, print_changes
from sim.cli.options import Json
from sim.cli.tables import print_json


def register(app: typer.Typer) -> None:
    app.command()(takes_export(compare))


def compare(
    a: Annotated[Path, typer.Argument(help="Scenario file, results folder or sweep folder.")],
    b: Annotated[Path, typer.Argument(help="Another of the same kind.")],
    metric: Annotated[
        list[str] | None, typer.Option("--metric", help="Dotted name, such as ttft_s.p99; repeatable.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of both scenarios.")
    ] = None,
    replications: Annotated[
        int | None, typer.Option(min=2, help="Runs of each scenario; 10 without.", show_default=False)
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes for scenarios; all cores by default.", show_default=False)
    ] = None,
    intervals: IntervalReplays = None,
    as_json: Json = False,
) -> None:
    """Say by how much B differs from A, over pairs that share their random numbers."""
    from sim.errors import RooftraceError
    from sim.scenario import Scenario
    from sim.study.compare import REPLICATIONS
    from sim.study.compare import compare as compared

    for name, value in (("--replications", replications), ("--jobs", jobs)):
        folder = next((path for path in (a, b) if path.is_dir()), None)
        if value is not None and folder is not None:
            raise RooftraceError(f"{name} is about running scenarios, and {folder} holds results; leave it out")
    sides: list[Path | Scenario] = [a, b]
    if set_:
        for index, path in enumerate((a, b)):
            if path.is_dir():
                raise RooftraceError(
                    f"--set, like --trace, changes scenarios before they run, and {path} holds results"
                )
            sides[index] = Scenario.load(path).with_set(*set_)
    around = None
    if intervals is not None:
        from sim.bench.intervals import FIGURES, changes

        folder = next((path for path in (a, b) if path.is_dir()), None)
        if folder is not None:
            raise RooftraceError(f"--intervals replays scenarios, and {folder} holds results; leave it out")
        one, other = (side if isinstance(side, Scenario) else Scenario.load(side) for side in sides)
        around = changes(one, other, intervals, tuple(metric) if metric else FIGURES)
    found = compared(*sides, metrics=metric, replications=replications or REPLICATIONS, jobs=jobs)
    for each in found.notes:
        typer.echo(f"Note: {each}", err=True)
    if as_json:
        more = {} if around is None else {"intervals": change_facts(around)}
        facts = {"a": found.a, "b": found.b, "how": found.how, "differences": found.rows(), **more}
        facts |= {"trusted": dict(zip("ab", found.trusted, strict=True))}
        print_json(facts)
        return
    from sim.cli.tables import console, print_facts
    from sim.results import interval_text

    print_facts([("A", found.a), ("B", found.b)])
    where: object = {}
    for each in found.differences:
        if each.where != where:
            where = each.where
            console().print(
                ", ".join(f"{key}={value}" for key, value in each.where.items()), style="bold", markup=False
            )
        console().print(f"  {each.verdict}", markup=False, soft_wrap=True)
    console().print(f"({found.how})", markup=False, soft_wrap=True)
    print_facts(
        [
            (f"Expect to measure of {side}", interval_text(trusted["intervals"]))
            for side, trusted in zip("AB", found.trusted, strict=True)
            if "intervals" in trusted
        ]
    )
    if around is not None and intervals is not None:
        print_changes(around, intervals)
