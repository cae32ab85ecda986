"""rooftrace sweep: many scenarios, one table."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sim.cli.exits import going_on, interrupted
from sim.cli.exports import takes_export
from sim.cli.options import Axes, IntervalReplays, Jobs, Limits, set_option
from sim.cli.tables import print_facts, print_notes, print_table, written

if TYPE_CHECKING:
    from sim.study.points import Sweep

_SHOWN = 40


def register(app: typer.Typer) -> None:
    app.command()(takes_export(sweep))


def sweep(
    scenario: Annotated[
        Path | None, typer.Argument(help="Scenario or sweep file (YAML); default scenario without.", show_default=False)
    ] = None,
    axis: Axes = None,
    set_: Annotated[list[str] | None, set_option("Change a setting of every point.")] = None,
    limit: Limits = None,
    points: Annotated[
        Path | None,
        typer.Option(help="CSV with a row a point; columns are dotted settings or meta.NAME.", show_default=False),
    ] = None,
    replications: Annotated[
        int | None, typer.Option(min=1, help="Runs of each point, with seeds that all points share.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the sweep; default results/sweep-NAME.", show_default=False)
    ] = None,
    jobs: Jobs = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Dask scheduler, tcp://HOST:PORT.", show_default=False)
    ] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run failed points again.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON for each run, and one at the end.")
    ] = False,
    html: Annotated[bool, typer.Option("--html", help="Write report.html into the folder too.")] = False,
    intervals: IntervalReplays = None,
) -> None:
    """Run every combination of the axes' values; the same command goes on after an interruption.

    Exit code 1 when a point failed; the others are in the table all the same.
    """
    from sim.cli.intervals import point_intervals, print_point_intervals, write_point_intervals
    from sim.errors import RooftraceError
    from sim.study.progress import json_line, shown
    from sim.study.sweep import SweepResult, run_sweep

    plan = _plan(scenario, axis or [], set_ or [], limit, points, replications)
    folder = out if out is not None else Path("results") / f"sweep-{plan.base.name}"
    if not plan.axes and plan.points is None and plan.replications == 1:
        raise RooftraceError("nothing to vary: give --axis, --points or --replications, or use `rooftrace run`")
    try:
        with shown((lambda progress: typer.echo(json_line(progress))) if as_json else None) as report:
            counts = run_sweep(plan, folder, jobs=jobs, cluster=cluster, retry_failed=retry_failed, on_progress=report)
    except KeyboardInterrupt as error:
        raise interrupted(error, going_on(folder)) from None
    if html:
        from sim.report.html import write_sweep_report

        write_sweep_report(folder, folder / "report.html")
    around = None if intervals is None else point_intervals(plan, intervals)
    if around is not None:
        write_point_intervals(around, folder)
    if as_json:
        typer.echo(json.dumps({"event": "end", **counts, "folder": str(folder)}))
    else:
        _print(SweepResult(folder), folder)
        if around is not None:
            print_point_intervals(around, folder)
    print_notes(SweepResult(folder).notes)
    if counts["alike"]:
        typer.echo(
            f"Note: the replications of {counts['alike']} points are equal, since nothing in them is random; "
            "they have no interval",
            err=True,
        )
    if counts["failed"]:
        raise typer.Exit(1)


def _plan(
    scenario: Path | None,
    axis: list[str],
    set_: list[str],
    limit: list[str] | None,
    points: Path | None,
    replications: int | None,
) -> Sweep:
    from dataclasses import replace

    from sim.cli.given import with_limits
    from sim.scenario import Scenario
    from sim.study.points import Sweep, load_sweep, read_axes

    axes = read_axes(axis)  # before the scenario, for which the values of an axis without = are taken
    found = Scenario.default() if scenario is None else load_sweep(scenario)
    plan = found if isinstance(found, Sweep) else Sweep(base=found)
    return replace(
        plan,
        base=with_limits(plan.base.with_set(*set_), limit),
        axes={**plan.axes, **axes},
        points=plan.points if points is None else points,
        replications=plan.replications if replications is None else replications,
    )


def _print(result: object, folder: Path) -> None:
    from sim.results import over
    from sim.study.sweep import SweepResult, expected_facts, short_table
    from sim.text import short_keys

    assert isinstance(result, SweepResult)
    counts = result.counts
    heads, rows = short_table(result, most=_SHOWN, errors=False)
    heads[: len(result.axes)] = short_keys(heads[: len(result.axes)])
    print_table(heads, rows, left=len(result.axes), fold_left=True)
    if counts["points"] > _SHOWN:
        typer.echo(f"and {counts['points'] - _SHOWN:,} more points")
    facts = [("Points", f"{counts['points']:,}"), ("Runs", f"{counts['runs']:,}")]
    if counts["saturated"]:
        facts.append(("Saturated", f"{counts['saturated']:,} points: arrivals outrun the deployment"))
    facts.append(("Figures over", over(result.manifest["base"], result.axes)))
    facts += expected_facts(result)
    name = shlex.quote(str(folder))
    print_facts([*facts, *written(folder, f"rooftrace plot {name}", f"rooftrace compare {name} OTHER")])
    failures = result.failures(20)
    if failures:
        typer.echo(f"{counts['failed']:,} run{'s' * (counts['failed'] != 1)} failed:", err=True)
        for row in failures:
            where = ", ".join(f"{key}={row[key]}" for key in result.axes)
            typer.echo(f"  {where}: {row['error']}", err=True)
        if counts["failed"] > len(failures):
            typer.echo(f"  and {counts['failed'] - len(failures):,} more in {folder}/failures.csv", err=True)
