"""rooftrace run: replay a workload and write its results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from sim.cli.exports import Columns, KeepFailed, MissingOutput, Tokenizer, with_export
from sim.cli.intervals import IntervalReplays, print_intervals
from sim.cli.options import Fetch, ScenarioFile, SummaryJson, fetch_models
from sim.under_way import under_way

REPORT = "report.html"
INTERVALS = "intervals.json"


def register(app: typer.Typer) -> None:
    app.command()(run)


def run(
    scenario: ScenarioFile = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, e.g. --set replicas=2; VALUE is YAML."),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Trace to replay: a file, folder or pattern.", show_default=False),
    ] = None,
    columns: Columns = None,
    missing_output: MissingOutput = None,
    keep_failed: KeepFailed = False,
    tokenizer: Tokenizer = None,
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
    from sim.results import FILES, SOMETIMES, staging
    from sim.results.folder import write_json
    from sim.run import run_built
    from sim.scenario import Scenario
    from sim.scenario.assembly import resolve

    chosen = Scenario.default() if scenario is None else Scenario.load(scenario)
    chosen = chosen.with_set(*(set_ or ()))
    chosen = with_export(chosen, trace, columns, missing_output, keep_failed, tokenizer)
    if fetch:
        fetch_models(chosen.models)
    with under_way("Reading the workload and building the deployment"):
        built = resolve(chosen)
    for note in built.manifest["notes"]:
        typer.echo(f"Note: {note}", err=True)
    folder = out if out is not None else Path("results") / f"{chosen.name}-{chosen.hash[:8]}"
    if timeline is not None:
        _check_writable(timeline)
    around = None
    if intervals is not None:
        from sim.bench.intervals import intervals as intervals_of

        around = intervals_of(chosen, intervals)
    with staging(folder, files=(*FILES, *SOMETIMES, REPORT, INTERVALS)) as scratch:
        run = run_built(built, spill_to=scratch.parent)
        result = run.kept().or_whole()
        for note in result.manifest["notes"][len(built.manifest["notes"]) :]:
            typer.echo(f"Note: {note}", err=True)
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
        if around is not None:
            write_json(scratch / INTERVALS, around.facts())
    if as_json:
        more = {} if around is None else {"intervals": around.facts()}
        typer.echo(json.dumps({**result.summary, **more}, indent=2, allow_nan=False))
    else:
        _print(result, folder)
        if around is not None:
            print_intervals(around)


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


def _print(result: Any, folder: Path) -> None:
    from sim.cli.tables import console, print_facts, print_table
    from sim.results import GROUP_HEADS, LATENCY_HEADS, STAGE_HEADS, fact_rows, group_rows, latency_rows, stage_rows

    console().print(result.label, style="bold", markup=False)
    rows = [(name, *cells) for name, cells in latency_rows(result.summary)]
    print_table(("Latency", *LATENCY_HEADS), rows)
    if stages := stage_rows(result.summary):
        print_table(("Where the time went", *STAGE_HEADS), [(name, *cells) for name, cells in stages])
    groups = group_rows(result.summary)
    if groups:
        print_table(("Who", "requests", *GROUP_HEADS), [(name, total, *cells) for name, total, cells in groups])
    facts = fact_rows(result.summary)
    rejections = result.rejections
    if rejections:
        reason, count = max(rejections.items(), key=lambda item: item[1])
        more = len(rejections) - 1
        others = f", and {more} more reason{'s' if more > 1 else ''} in requests.parquet" if more else ""
        facts.append(("Rejected", f"{count:,} x {reason}{others}"))
    print_facts([*facts, *_expected(result), *_memory(result.manifest), ("Results", f"{folder}/")])


def _expected(result: Any) -> list[tuple[str, str]]:
    """Rows on what the protocol reports, and within what the means would be measured."""
    from sim.text import seconds_text

    rows = []
    if result.figures is not None:
        ttft, tpot = (seconds_text(each) if each == each else "-" for each in result.figures)
        rows.append(("As the protocol reports", f"TTFT {ttft}, TPOT {tpot}"))
    if result.intervals:
        texts = [
            f"{name.removesuffix('_s').upper()} {seconds_text(each['low'])} to {seconds_text(each['high'])}"
            for name, each in result.intervals.items()
        ]
        basis = next(iter(result.intervals.values()))["basis"]
        rows.append(("Expect to measure", f"mean {', '.join(texts)} (90 % interval), by the errors on {basis}"))
    elif "interval" in result.manifest and result.summary["saturated"]:
        rows.append(
            ("Expect to measure", "no interval: the run is saturated, and the runs that were held back are not")
        )
    return rows


def _memory(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The KV cache and what else takes memory, to lay beside the log of an engine."""
    from hwmodels.memory import cache_text, parts_text

    if "memory" in manifest:
        found = [("", manifest["memory"])]
    else:
        found = [
            (f" of {name}/{model['serves']}" if len(pool["models"]) > 1 else f" of {name}", model["memory"])
            for name, pool in manifest["pools"].items()
            for model in pool["models"]
        ]
    rows = []
    for whose, facts in found:
        rows += [(f"KV cache{whose}", cache_text(facts)), (f"Memory{whose}", parts_text(facts))]
    return rows
