"""rooftrace bench: what benchmark tools have measured, as one table and beside its simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sim.cli.commands.bench.fitting import fit, next_run
from sim.cli.exits import USER_ERROR
from sim.cli.options import Before, Csv, Facts, Files, Json, Where, set_option
from sim.cli.tables import console, print_json, print_notes, print_table
from sim.errors import RooftraceError

if TYPE_CHECKING:
    from sim.bench import BenchRun
    from sim.bench.compare import Compared
    from sim.bench.replay import Replayed
    from sim.scenario import Scenario

EXCEEDED = 1
_TITLES = {"tpot": "TPOT", "ttft": "TTFT", "e2el": "E2EL", "output_tokens_per_s": "tok/s"}
"""The heads of the columns of `sim.bench.compare.HEADLINES`."""


def register(app: typer.Typer) -> None:
    group = typer.Typer(
        help="Read measured runs, lay them beside their simulation, and fit to them.", no_args_is_help=True
    )
    group.command()(show)
    group.command()(compare)
    group.command("fit")(fit)
    group.command("next")(next_run)
    app.add_typer(group, name="bench")


def show(
    files: Files,
    set_: Facts = None,
    where: Where = None,
    before: Before = None,
    as_json: Json = False,
    csv: Csv = False,
) -> None:
    """Print what result files say: what was offered, what was measured, and what a simulation still needs to be told."""
    from sim.bench import to_frame
    from sim.bench.facts import divided
    from sim.cli.measured_files import read

    _one_form(as_json, csv)
    settings, facts = divided(set_ or ())
    if settings:
        raise RooftraceError(
            f"--set {settings[0]!r}: without a scenario only facts of runs can be set, such as run.rate_per_s=4"
        )
    runs = read(files, facts, where or (), before)
    if csv:
        typer.echo(to_frame(runs).to_csv(index=False), nl=False)
    elif as_json:
        print_json([run.to_record() for run in runs])
    else:
        _print_runs(runs)


def compare(
    scenario_file: Annotated[Path, typer.Argument(metavar="SCENARIO", help="Scenario file (YAML): the deployment.")],
    files: Files,
    set_: Annotated[
        list[str] | None, set_option("Change a setting of the scenario, or with run.KEY say what files do not.")
    ] = None,
    where: Where = None,
    before: Before = None,
    replications: Annotated[
        int | None, typer.Option(min=1, help="Draws of each load; 3 without.", show_default=False)
    ] = None,
    max_error: Annotated[
        list[str] | None,
        typer.Option(
            "--max-error",
            metavar="PCT",
            help="Exit with 1 where errors below saturation are above this, in percent: 15, or tpot=15; repeatable.",
        ),
    ] = None,
    statistic: Annotated[str, typer.Option(help="Of errors over runs, for --max-error: mean or median.")] = "mean",
    html: Annotated[Path | None, typer.Option("--html", help="Write a page to this file.", show_default=False)] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw the runs over their load (PNG).", show_default=False)
    ] = None,
    as_json: Json = False,
    csv: Csv = False,
) -> None:
    """Simulate measured runs, each as its clients asked, and say how far off the simulation is."""
    from sim.bench.compare import compared, frame_of, to_json
    from sim.cli.measured_files import read_both

    _one_form(as_json, csv)
    if statistic not in ("mean", "median"):
        raise RooftraceError(f"--statistic is mean or median; got {statistic!r}")
    for option, path in (("--html", html), ("--plot", plot)):
        if path is not None and not path.parent.is_dir():
            raise RooftraceError(f"{option} {path}: there is no folder {path.parent}")
    limits = _limits(max_error or ())
    scenario, runs = read_both(scenario_file, files, set_, where, before)
    found = compared(scenario, runs, replications=replications)
    print_notes(found.problems, head="Left out")
    if not found.replays:
        raise typer.Exit(USER_ERROR)
    if csv:
        typer.echo(frame_of(found).to_csv(index=False), nl=False)
    elif as_json:
        print_json(to_json(found))
    else:
        _print_compared(found)
    written = _write(found, scenario, html=html, plot=plot)
    if not (csv or as_json):
        for text in written:
            typer.echo(f"Written: {text}")
    exceeded = found.exceeded(limits, statistic) if limits else []
    print_notes(exceeded, head="Above --max-error")
    if exceeded:
        raise typer.Exit(EXCEEDED)


def _one_form(as_json: bool, csv: bool) -> None:
    if as_json and csv:
        raise RooftraceError("--json and --csv both print to standard output; give one of them")


def _write(found: Compared, scenario: Scenario, *, html: Path | None, plot: Path | None) -> list[str]:
    """Write the page and the picture that are asked for; returns what each is called."""
    written = []
    if html is not None:
        from sim.report.measured import write_measured_report

        write_measured_report(found, scenario, html)
        written.append(f"{html}, for a browser")
    if plot is not None:
        from sim.plots.measured import draw_measured

        draw_measured(found.replays, plot)
        written.append(str(plot))
    return written


def _limits(given: Sequence[str]) -> dict[str, float]:
    from sim.bench.compare import HEADLINES
    from sim.text import unknown

    limits = {}
    for each in (part for text in given for part in text.split(",")):
        name, equals, value = each.strip().rpartition("=")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if not limit >= 0:
            raise RooftraceError(f"--max-error {each}: expected a percentage such as 15, or tpot=15")
        if equals and name not in HEADLINES:
            raise RooftraceError(unknown(f"--max-error {name} is not a quantity", name, HEADLINES))
        limits[name if equals else "all"] = limit / 100
    return limits


def _ms(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return ""
    ms = value * 1e3
    return f"{ms:,.0f}" if ms >= 1000 else f"{ms:.4g}"


def _short(runs: Sequence[BenchRun]) -> list[str]:
    """Names without the file where all are of one, which is then printed above them."""
    if len({run.file for run in runs}) > 1 or not all(", " in run.name for run in runs):
        return [run.name for run in runs]
    console().print(runs[0].file, markup=False, soft_wrap=True)
    return [run.name.rpartition(", ")[2] for run in runs]


def _print_runs(runs: Sequence[BenchRun]) -> None:
    """Print a table of *runs*, and below it their formats, their servers' figures, notes, and what files do not say of them."""
    from sim.cli.measured_files import several

    heads = ("run", "load", "requests", "tokens in + out", "TTFT ms", "TPOT ms", "ITL ms", "E2EL ms", "out tok/s")
    rows = [_run_cells(run, name) for run, name in zip(runs, _short(runs), strict=True)]
    print_table(heads, rows, left=2, fold_left=True)
    marks = "".join(cell for row in rows for cell in row)
    legend = [
        "latencies are means",
        *(["~ a median"] if "~" in marks else []),
        *(["* by the server"] if "*" in marks else []),
    ]
    console().print(f"{', '.join(legend)}; --csv and --json have every figure", markup=False)
    for format_, names in _names_by(runs, lambda run: run.format).items():
        console().print(f"{format_}: {several(names)}", markup=False)
    for run in runs:
        if said := _server_text(run):
            console().print(f"{run.name}, the server: {said}", markup=False, soft_wrap=True)
    _print_notes([(run.name, note) for run in runs for note in run.notes])
    for missing, names in _names_by(runs, lambda run: run.missing).items():
        if missing:
            console().print(f"{several(names)}: {_asked_text(missing)}", markup=False, soft_wrap=True)


def _run_cells(run: BenchRun, name: str) -> tuple[str, ...]:
    """The row of a run: latencies are its clients', or its server's where the clients have none."""
    from sim.bench.compare import load_text

    record = run.to_record()
    load = load_text(run) if not {"rate_per_s", "concurrency"} & set(run.missing) else "not said"
    lengths = [f"{value:,.0f}" if (value := record[f"{side}_tokens_mean"]) else "?" for side in ("prompt", "output")]
    return (
        name,
        load + (" saturated" if run.saturated else ""),
        "" if run.offered.requests is None else f"{run.offered.requests:,}",
        " + ".join(lengths),
        *(_latency_cell(run, each) for each in ("ttft", "tpot", "itl", "e2el")),
        "" if run.output_tokens_per_s is None else f"{run.output_tokens_per_s:,.1f}",
    )


def _latency_cell(run: BenchRun, name: str) -> str:
    """A mean in milliseconds, or with ~ a median; with * where the server has measured it."""
    for where in (run, run.server):
        latency = None if where is None else getattr(where, name)
        if latency is not None:
            value = latency.mean_s if latency.mean_s is not None else latency.median_s
            return _ms(value) + ("" if latency.mean_s is not None else "~") + ("*" if where is run.server else "")
    return ""


def _server_text(run: BenchRun) -> str:
    """The figures that the server of a run gives of itself."""
    side = run.server
    if side is None:
        return ""
    facts = {
        "running": side.running, "waiting": side.waiting, "KV used": side.kv_used, "KV tokens": side.kv_tokens,
        "preemptions": side.preemptions, "prefix hits": side.prefix_hit, "drafts accepted": side.accepted,
        "tokens a round": side.acceptance_length,
    }  # fmt: skip
    return ", ".join(f"{key} {value:,.4g}" for key, value in facts.items() if value is not None)


def _names_by(runs: Sequence[BenchRun], key: Callable[[BenchRun], Any]) -> dict[Any, list[str]]:
    """The names of *runs* by what *key* says of each."""
    names: dict[Any, list[str]] = {}
    for run in runs:
        names.setdefault(key(run), []).append(run.name)
    return names


def _asked_text(missing: Sequence[str]) -> str:
    """A sentence about what a simulation needs beside the file; of rate and concurrency one is enough."""
    either = {"rate_per_s", "concurrency"} <= set(missing)
    keys = [f"run.{name}" for name in missing if not (either and name in ("rate_per_s", "concurrency"))]
    keys = (["run.rate_per_s or run.concurrency"] if either else []) + keys
    return f"a simulation needs to be told {', '.join(keys)} (--set)"


def _print_notes(said: Sequence[tuple[str, str]]) -> None:
    from sim.cli.measured_files import by_run

    for text in by_run(said):
        console().print(text, markup=False, soft_wrap=True)


def _print_compared(found: Compared) -> None:
    """Print a table of runs beside their simulation, and below it what it shows, errors over runs, saturation and notes."""
    names = _short([each.run for each in found.replays])
    rows = [_compared_cells(each, name) for each, name in zip(found.replays, names, strict=True)]
    heads = [head for title in _TITLES.values() for head in (title, "sim.", "error")]
    print_table(["run", "load", *heads], rows, left=2, fold_left=True, together=3)
    for line in (_legend(found, rows), *_gap_lines(found, names), *_error_lines(found), *_saturation_lines(found)):
        console().print(line, markup=False, soft_wrap=True)
    _print_notes([(each.run.name, note) for each in found.replays for note in (*each.run.notes, *each.assumed)])


def _compared_cells(each: Replayed, name: str) -> list[str]:
    """The row of a run: every headline as measured and as simulated, and the error."""
    from sim.bench.compare import HEADLINES, headline, load_text, saturation_text

    mark = {"": "", "saturated": " !"}.get(saturation_text(each), " ?")
    cells = [name, load_text(each.run) + mark]
    for quantity in HEADLINES:
        _, theirs, ours, error = headline(each, quantity)
        shown = "{:,.0f}".format if quantity == "output_tokens_per_s" else _ms
        cells += ["" if value is None else shown(value) for value in (theirs, ours)]
        absent = "~" if quantity in each.unjudged and None not in (theirs, ours) else ""
        cells.append(absent if error is None else f"{error:+.0%}" if abs(error) >= 1 else f"{error:+.1%}")
    return cells


def _legend(found: Compared, rows: Sequence[Sequence[str]]) -> str:
    from sim.bench.compare import HEADLINES, headline

    stated = []
    for quantity in HEADLINES:
        headlines = [headline(each, quantity) for each in found.replays]
        stated += sorted({name for name, theirs, *_ in headlines if theirs is not None})
    legend = f"Measured, simulated (sim.) and error; latencies in ms. Figures: {', '.join(stated)}; simulated over {_draws(found)}."
    if any(row[1][-1] in "!?" for row in rows):
        legend += " ! saturated, ? saturated on one side only."
    if any("~" in row for row in rows):
        legend += " ~ not judged: clients wait for answers whose lengths differ, and the file does not say how."
    return legend


def _gap_lines(found: Compared, names: Sequence[str]) -> Iterator[str]:
    """Gaps between tokens with and without another request's first token in them, of runs whose files have single tokens."""
    for each, name in zip(found.replays, names, strict=True):
        parts = []
        for gaps, words in (("itl_prompt", "with"), ("itl_decode", "without")):
            figure = f"{gaps}_mean_s"
            theirs, ours, error = each.measured.get(figure), each.predicted.get(figure), each.error(figure)
            if theirs is not None and ours is not None and error is not None:
                parts.append(f"{words} {_ms(theirs)} measured, {_ms(ours)} simulated ({error:+.1%})")
        if parts:
            yield f"{name}, mean gap between tokens, another's first token in it: {'; '.join(parts)}"


def _error_lines(found: Compared) -> Iterator[str]:
    open_loads = any(each.run.saturated is not None for each in found.replays)
    for saturated, where in ((False, "below saturation" if open_loads else "over all"), (True, "beyond saturation")):
        for name, of in found.errors(saturated=saturated).items():
            figures = f"mean error {of.mean:.1%}, median {of.median:.1%}, farthest {of.worst:+.1%}"
            yield f"{where}, {_TITLES[name]}: {figures} ({of.runs} runs)"


def _saturation_lines(found: Compared) -> Iterator[str]:
    from sim.bench.compare import saturation_text

    theirs = [each for each in found.replays if each.run.saturated is not None]
    if theirs:
        right = sum(bool(each.run.saturated) == bool(each.saturated) for each in theirs)
        yield f"saturation: simulated as measured in {right} of {len(theirs)} open loads"
    for each in found.replays:
        if said := saturation_text(each):
            yield f"  {each.run.name}: {said}"


def _draws(found: Compared) -> str:
    counts = sorted({each.replications for each in found.replays})
    return " or ".join(f"{n} draw{'s' if n > 1 else ''}" for n in counts)
