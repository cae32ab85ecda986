"""rooftrace run: replay a workload and write its results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from sim.cli.exports import takes_export
from sim.cli.options import Fetch, IntervalReplays, Limits, ScenarioFile, SummaryJson, set_option
from sim.cli.tables import console, print_facts, print_json, print_notes, print_table, seen_by, written
from sim.under_way import under_way

REPORT = "report.html"
_OLD = "intervals.json"
"""A file that older folders have; the summary holds what it held."""


def register(app: typer.Typer) -> None:
    app.command()(takes_export(run))


def run(
    scenario: ScenarioFile = None,
    set_: Annotated[list[str] | None, set_option("Change a setting, e.g. --set replicas=2; VALUE is YAML.")] = None,
    limit: Limits = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results; default results/NAME-HASH.", show_default=False)
    ] = None,
    as_json: SummaryJson = False,
    plots: Annotated[bool, typer.Option(help="Draw latency.png and timeline.png (classes.png, fleet.png).")] = True,
    timeline: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write trace events that Perfetto (ui.perfetto.dev) opens.", show_default=False
        ),
    ] = None,
    html: Annotated[bool, typer.Option("--html", help="Write report.html: the results on one page.")] = False,
    intervals: IntervalReplays = None,
    fetch: Fetch = False,
) -> None:
    """Replay a workload on a simulated deployment and answer with latency, throughput and utilisation."""
    from sim.cli.given import fetch_models, read_scenario, with_limits
    from sim.results import FILES, SOMETIMES, staging
    from sim.results.trust import REPLAYED
    from sim.run import run_built
    from sim.scenario.assembly import resolve

    chosen = with_limits(read_scenario(scenario, set_), limit)
    if fetch:
        fetch_models(chosen.models)
    with under_way("Reading the workload and building the deployment"):
        built = resolve(chosen)
    print_notes(built.manifest["notes"])
    folder = out if out is not None else Path("results") / f"{chosen.name}-{chosen.hash[:8]}"
    if timeline is not None:
        _check_writable(timeline)
    around = None
    if intervals is not None:
        from sim.bench.intervals import intervals as intervals_of

        around = intervals_of(chosen, intervals)
        built = replace(built, manifest={**built.manifest, REPLAYED: around.facts()})
    with staging(folder, files=(*FILES, *SOMETIMES, REPORT, _OLD)) as scratch:
        run = run_built(built, spill_to=scratch.parent)
        result = run.kept().or_whole()
        print_notes(result.manifest["notes"][len(built.manifest["notes"]) :])
        with under_way("Writing the results"):
            result.write(scratch)
            if plots:
                from sim.plots import save_run

                save_run(result, scratch)
        if html:
            from sim.report.html import write_run_report

            write_run_report(result, scratch / REPORT)
        if timeline is not None:
            _write_events(run, timeline)
    if as_json:
        print_json(result.summary)
    else:
        _print(result, folder, timeline)


def _check_writable(path: Path) -> None:
    """OutputError before the run rather than after it, where *path* cannot be written."""
    from sim.errors import OutputError
    from workloads.write import unwritable

    if why := unwritable(path):
        raise OutputError(f"cannot write the timeline to {path}: {why}; give another --timeline")


def _write_events(result: Any, path: Path) -> None:
    from sim.errors import OutputError
    from sim.report.timeline import write_timeline

    try:
        write_timeline(result.columns, path, pools=result.manifest.get("pools"))
    except OSError as error:
        raise OutputError(f"cannot write the timeline to {path}: {error.strerror}; give another --timeline") from None
    except ValueError as error:
        raise OutputError(str(error)) from error


def _print(result: Any, folder: Path, timeline: Path | None) -> None:
    from sim.results import fact_rows, tables

    console().print(result.label, style="bold", markup=False)
    for title, heads, rows in tables(result.summary):
        print_table((title, *heads), rows)
    facts = fact_rows(result.summary)
    rejections = result.rejections
    if rejections:
        reason, count = max(rejections.items(), key=lambda item: item[1])
        more = len(rejections) - 1
        others = f", and {more} more reason{'s' if more > 1 else ''} in requests.parquet" if more else ""
        facts.append(("Rejected", f"{count:,} x {reason}{others}"))
    if timeline is not None:
        facts.append(("Timeline", f"{timeline}, which ui.perfetto.dev opens"))
    print_facts([*facts, *written(folder, *seen_by(folder))])
