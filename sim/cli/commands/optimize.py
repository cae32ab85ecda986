"""rooftrace optimize: the highest rate within an SLO, or the deployment that keeps it at least cost."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sim.cli.exits import interrupted
from sim.cli.exports import takes_export
from sim.cli.intervals import IntervalReplays, kept_at, kept_by, kept_facts
from sim.cli.options import Json, Limits, with_limits
from sim.cli.tables import print_json

if TYPE_CHECKING:
    from sim.scenario import Scenario
    from sim.study.optimize import Choice
    from sim.study.rates import Target

_SHOWN = 15


def register(app: typer.Typer) -> None:
    app.command()(takes_export(optimize))


def optimize(
    scenario: Annotated[
        Path | None,
        typer.Argument(help="Scenario file (YAML) with an slo; default scenario without.", show_default=False),
    ] = None,
    goal: Annotated[
        str, typer.Option(help="rate, or what to make least of: cost, gpu-seconds, energy, devices, latency.")
    ] = "rate",
    axis: Annotated[
        list[str] | None,
        typer.Option("--axis", metavar="KEY=VALUES", help="What may be chosen, as in rooftrace sweep; repeatable."),
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, e.g. --set slo.ttft_s=1.")
    ] = None,
    limit: Limits = None,
    attainment: Annotated[float, typer.Option(help="Share of requests that must keep the SLO.")] = 0.99,
    replications: Annotated[int, typer.Option(min=2, help="Runs of each candidate.")] = 3,
    tolerance: Annotated[
        float | None,
        typer.Option(help="With --goal rate: width of the answer, as a share of it; 0.03 without.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the candidates, ranked.csv and the Pareto front.", show_default=False),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1, help="Processes for candidates, not for --goal rate; all cores by default.", show_default=False
        ),
    ] = None,
    intervals: IntervalReplays = None,
    as_json: Json = False,
) -> None:
    """Find the highest rate within the SLO, or the candidate that keeps it at least cost. Exit code 1 if there is none."""
    from sim.cli.tables import print_facts
    from sim.errors import RooftraceError
    from sim.scenario import Scenario
    from sim.study.optimize import GOALS
    from sim.study.points import read_axis
    from sim.study.rates import TOLERANCE, target_of
    from sim.text import unknown

    chosen = Scenario.default() if scenario is None else Scenario.load(scenario)
    chosen = with_limits(chosen.with_set(*(set_ or ())), limit)
    if tolerance is not None and not 0 < tolerance < 1:
        raise RooftraceError(f"--tolerance is a share in (0, 1); got {tolerance}")
    axes: dict[str, Any] = {}
    for text in axis or ():
        key, values = read_axis(text)
        if key in axes:
            raise RooftraceError(f"--axis {key} is given twice; put its values into one list")
        axes[key] = values
    target = target_of(chosen, attainment)
    if goal == "rate":
        if jobs is not None:
            raise RooftraceError("--goal rate tries one rate after the other in this process; leave out --jobs")
        _rate(chosen, axes, target, replications, TOLERANCE if tolerance is None else tolerance, out, as_json,
              intervals)  # fmt: skip
        return
    if goal not in GOALS:
        raise RooftraceError(unknown(f"--goal {goal} is not known", goal, ["rate", *GOALS]))
    if not axes:
        raise RooftraceError(f"--goal {goal} chooses between candidates: give --axis")
    if tolerance is not None:
        raise RooftraceError(f"--tolerance is about --goal rate, and the goal is {goal}; leave it out")
    from sim.results import over
    from sim.study.optimize import cheapest

    try:
        found = cheapest(chosen, axes, goal=goal, target=target, replications=replications, out=out, jobs=jobs)
    except KeyboardInterrupt as error:
        if out is None:
            raise
        raise interrupted(error, f"what was finished is kept in {out}/, and the same command goes on.") from None
    if out is not None:
        _write(found, out)
    best = found.best
    kept = None
    if intervals is not None and best is not None:
        kept = kept_by(chosen, {key: best[key] for key in axes}, target, intervals)
    if as_json:
        rows = json.loads(found.table.to_json(orient="records"))
        part = over(chosen.resolved(), list(axes))
        print_json(
            {
                "goal": goal,
                "figures_over": part,
                "best": best,
                "as_little": [{key: row[key] for key in axes} for row in found.least[1:]],
                "kept": kept,
                "candidates": rows,
                "notes": [str(each) for each in found.notes],
            }
        )
    else:
        _print(found, out, over(chosen.resolved(), list(axes)))
        print_facts(kept_facts(kept))
    for each in found.notes:
        typer.echo(f"Note: {each}", err=True)
    if best is None:
        raise typer.Exit(1)


def _rate(
    scenario: Scenario, axes: dict[str, Any], target: Target, replications: int, tolerance: float, out: Path | None,
    as_json: bool, intervals: int | None,
) -> None:  # fmt: skip
    from itertools import product

    from sim.errors import RooftraceError
    from sim.results import over
    from sim.study.notes import Notes
    from sim.study.points import check_key
    from sim.study.rates import highest_rate

    if out is not None:
        raise RooftraceError("--out keeps candidates of a sweep, and --goal rate makes none; leave it out")
    for key in axes:
        check_key(key)
    rows: list[dict[str, Any]] = []
    notes = Notes()
    for values in product(*axes.values()):
        candidate = scenario
        where = dict(zip(axes, values, strict=True))
        for key, value in where.items():
            candidate = candidate.with_value(key, value)
        found = highest_rate(candidate, target, replications=replications, tolerance=tolerance)
        notes.add(_where(where), map(str, found.notes))
        rows.append(
            {
                **where,
                "rate_per_s": found.rate_per_s,
                "outside_per_s": found.outside_per_s,
                "tried": [
                    {"rate_per_s": each.rate_per_s, "met": each.met,
                     "attainment": None if each.attainment is None else each.attainment.mean,
                     "replications": each.runs, "why": each.why}
                    for each in found.judgements
                ],
            }
        )  # fmt: skip
    best = max(rows, key=lambda row: row["rate_per_s"])
    as_high = [row for row in rows if row["rate_per_s"] == best["rate_per_s"] and row is not best]
    for each in notes.found:
        typer.echo(f"Note: {each}", err=True)
    if intervals is not None and best["rate_per_s"] > 0:
        chosen = scenario
        for key in axes:
            chosen = chosen.with_value(key, best[key])
        best["kept"] = kept_at(chosen, best["rate_per_s"], target, intervals)
    if as_json:
        print_json(
            {
                "goal": "rate",
                "attainment": target.attainment,
                "figures_over": over(scenario.resolved(), list(axes)),
                "best": best,
                "as_high": [{key: row[key] for key in axes} for row in as_high],
                "candidates": rows,
                "notes": [str(each) for each in notes.found],
            }
        )
    else:
        from sim.cli.tables import print_facts, print_table

        if len(rows) == 1:
            tried = sorted(best["tried"], key=lambda each: each["rate_per_s"])
            cells = [(f"{each['rate_per_s']:.4g}", str(each["replications"]), each["why"]) for each in tried]
            print_table(("requests/s", "runs", "verdict"), cells, left=0, fold=1)
        else:
            cells = [(*map(str, (row[key] for key in axes)), f"{row['rate_per_s']:.4g}") for row in rows]
            print_table((*axes, "requests/s within the SLO"), cells, left=len(axes), fold_left=True)
        choice = _where({key: best[key] for key in axes})
        if best["rate_per_s"] > 0:
            said = f"{best['rate_per_s']:.4g} requests/s within the SLO, not {best['outside_per_s']:.4g}"
            said = f"{choice}: {said}" if choice else said
            if as_high:
                said += f"; as high: {'; '.join(_where({key: row[key] for key in axes}) for row in as_high)}"
        else:
            lowest = min(row["outside_per_s"] for row in rows)
            share = "the SLO" if target.attainment is None else f"{target.attainment:.4g} of requests"
            said = f"none: {share} is not reached even at {lowest:.3g} requests/s"
        print_facts(
            [("Highest", said), *kept_facts(best.get("kept")), ("Figures over", over(scenario.resolved(), list(axes)))]
        )
    if best["rate_per_s"] <= 0:
        raise typer.Exit(1)


def _where(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in settings.items())


def _print(found: Choice, out: Path | None, part: str) -> None:
    from sim.cli.tables import print_facts, print_table, written
    from sim.results import figure_text
    from sim.text import short_keys

    ranked = found.table.sort_values(["keeps", found.column], ascending=[False, True])
    columns = [found.column, "costs.usd_per_month", "slo_attainment", "tokens_per_s_per_gpu", "tokens_per_s_per_user"]
    rows = [
        (
            *(str(row[key]) for key in found.axes),
            *("-" if row.get(key) is None or row[key] != row[key] else figure_text(key, row[key]) for key in columns),
            "yes" if row["keeps"] else "no",
            "yes" if row["on_front"] else "",
        )
        for row in ranked.head(_SHOWN).to_dict("records")
    ]
    heads = (
        *short_keys(found.axes),
        found.column,
        "$/month",
        "attained",
        "tok/s/GPU",
        "tok/s/user",
        "keeps",
        "front",
    )
    print_table(heads, rows, left=len(found.axes), fold_left=True)
    facts = [
        ("Candidates", f"{len(found.table)}, {int(found.table['keeps'].sum())} keep the SLO"),
        ("Best" if len(found.least) < 2 else "Equal", str(found)),
        ("Figures over", part),
    ]
    if out is not None:
        name = shlex.quote(str(out))
        facts += written(out, f"rooftrace export {name} --for vllm", f"rooftrace plot {name}")
    print_facts(facts)
    failed = found.table[found.table["failed"] > 0]
    if len(failed):
        typer.echo(f"{len(failed):,} of {len(found.table):,} candidates failed:", err=True)
        for row in failed.head(_SHOWN).to_dict("records"):
            where = ", ".join(f"{key}={row[key]}" for key in found.axes)
            typer.echo(f"  {where}: {row['error']}", err=True)
        if len(failed) > _SHOWN:
            typer.echo(f"  and {len(failed) - _SHOWN:,} more", err=True)


def _write(found: Choice, out: Path) -> None:
    from sim import plots
    from workloads.write import write_whole

    ranked = found.table.sort_values(["keeps", found.column], ascending=[False, True])
    write_whole(out / "ranked.csv", ranked.to_csv(index=False))
    varied = [key for key in found.axes if 1 < found.table[key].map(str).nunique() <= plots.MAX_HUES]
    front = int(found.table["on_front"].sum())
    # Those on the front are named under the picture.
    figure = plots.figure(
        title="Throughput per GPU against the speed that one user sees", width=7, height=5 + 0.18 * front
    )
    plots.pareto(found.table, figure.subplots(), hue=varied[0] if varied else None, named=found.axes)
    plots.save(figure, out / "pareto")
