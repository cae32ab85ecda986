"""rooftrace optimize: the highest rate within an SLO, or the deployment that keeps it at least cost."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sim.cli.exits import going_on, interrupted
from sim.cli.exports import takes_export
from sim.cli.options import Axes, IntervalReplays, Jobs, Json, Limits, set_option
from sim.cli.tables import print_facts, print_json, print_notes, print_table, written
from sim.errors import RooftraceError
from sim.text import unknown

if TYPE_CHECKING:
    from sim.scenario import Scenario
    from sim.study.notes import Noted
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
    axis: Axes = None,
    set_: Annotated[list[str] | None, set_option("Change a setting, e.g. --set slo.ttft_s=1.")] = None,
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
    jobs: Jobs = None,
    intervals: IntervalReplays = None,
    as_json: Json = False,
) -> None:
    """Find the highest rate within the SLO, or the candidate that keeps it at least cost. Exit code 1 if there is none."""
    from sim.cli.given import read_scenario, with_limits
    from sim.cli.intervals import kept_by, kept_facts
    from sim.results import over
    from sim.study.points import read_axes
    from sim.study.rates import target_of

    chosen = with_limits(read_scenario(scenario, set_), limit)
    if tolerance is not None and not 0 < tolerance < 1:
        raise RooftraceError(f"--tolerance is a share in (0, 1); got {tolerance}")
    axes = read_axes(axis)
    target = target_of(chosen, attainment)
    if goal == "rate":
        _check_rate(axes, out=out)
        rates = _rates(chosen, axes, target, replications=replications, tolerance=tolerance, jobs=jobs)
        print_notes(rates.notes)
        if intervals is not None:
            rates.ask_how_probable(intervals)
        if as_json:
            print_json(rates.facts())
        else:
            _print_rates(rates)
        keeps = rates.reached
    else:
        _check_choice(goal, axes, tolerance=tolerance)
        choice = _choice(chosen, axes, target, goal=goal, replications=replications, out=out, jobs=jobs)
        if out is not None:
            _write(choice, out)
        best = choice.best
        kept = None
        if intervals is not None and best is not None:
            kept = kept_by(chosen, {key: best[key] for key in axes}, target, intervals)
        part = over(chosen.resolved(), list(axes))
        if as_json:
            print_json(_facts(choice, kept, part))
        else:
            _print(choice, chosen, target, out, part)
            print_facts(kept_facts(kept))
        print_notes(choice.notes)
        keeps = best is not None
    if not keeps:
        raise typer.Exit(1)


def _check_rate(axes: Mapping[str, Any], *, out: Path | None) -> None:
    """RooftraceError for options that the search of a rate does not take."""
    from sim.study.points import check_key

    if out is not None:
        raise RooftraceError("--out keeps candidates of a sweep, and --goal rate makes none; leave it out")
    for key in axes:
        check_key(key)


def _check_choice(goal: str, axes: Mapping[str, Any], *, tolerance: float | None) -> None:
    """RooftraceError for a goal that is none, and for options that a choice between candidates does not take."""
    from sim.study.optimize import GOALS

    if goal not in GOALS:
        raise RooftraceError(unknown(f"--goal {goal} is not known", goal, ["rate", *GOALS]))
    if not axes:
        raise RooftraceError(f"--goal {goal} chooses between candidates: give --axis")
    if tolerance is not None:
        raise RooftraceError(f"--tolerance is about --goal rate, and the goal is {goal}; leave it out")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rates:
    """The highest rate of each candidate within the SLO, and the rates that were tried."""

    scenario: Scenario
    axes: Mapping[str, Sequence[Any]]
    target: Target
    rows: list[dict[str, Any]]
    notes: Sequence[Noted]

    @property
    def best(self) -> dict[str, Any]:
        return max(self.rows, key=lambda row: row["rate_per_s"])

    @property
    def as_high(self) -> list[dict[str, Any]]:
        """The other candidates whose rate is as high as the best one's, each by its settings."""
        best = self.best
        others = (row for row in self.rows if row["rate_per_s"] == best["rate_per_s"] and row is not best)
        return [self.settings_of(row) for row in others]

    @property
    def reached(self) -> bool:
        """Whether any rate keeps the SLO."""
        return self.best["rate_per_s"] > 0

    @property
    def figures_over(self) -> str:
        from sim.results import over

        return over(self.scenario.resolved(), list(self.axes))

    def settings_of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {key: row[key] for key in self.axes}

    def ask_how_probable(self, replays: int) -> None:
        """Put the probability that the best candidate keeps the SLO, at its rate and below, into its row."""
        if self.reached:
            from sim.cli.intervals import kept_at

            best = self.best
            chosen = _with_values(self.scenario, self.settings_of(best))
            best["kept"] = kept_at(chosen, best["rate_per_s"], self.target, replays)

    def facts(self) -> dict[str, Any]:
        return {
            "goal": "rate",
            "attainment": self.target.attainment,
            "figures_over": self.figures_over,
            "best": self.best,
            "as_high": self.as_high,
            "candidates": self.rows,
            "notes": [str(each) for each in self.notes],
        }


def _rates(
    scenario: Scenario,
    axes: Mapping[str, Sequence[Any]],
    target: Target,
    *,
    replications: int,
    tolerance: float | None,
    jobs: int | None,
) -> _Rates:
    """The highest rates of all combinations of the axes' values."""
    from sim.study.notes import Notes
    from sim.study.rates import TOLERANCE, highest_rates

    settings = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    rates = highest_rates(
        [_with_values(scenario, each) for each in settings],
        target,
        jobs=jobs,
        replications=replications,
        tolerance=TOLERANCE if tolerance is None else tolerance,
    )
    rows: list[dict[str, Any]] = []
    notes = Notes()
    for where, found in zip(settings, rates, strict=True):
        notes.add(_where(where), map(str, found.notes))
        tried = [
            {"rate_per_s": each.rate_per_s, "met": each.met,
             "attainment": None if each.attainment is None else each.attainment.mean,
             "replications": each.runs, "why": each.why}
            for each in found.judgements
        ]  # fmt: skip
        rows.append({**where, "rate_per_s": found.rate_per_s, "outside_per_s": found.outside_per_s, "tried": tried})
    return _Rates(scenario=scenario, axes=axes, target=target, rows=rows, notes=notes.found)


def _with_values(scenario: Scenario, settings: Mapping[str, Any]) -> Scenario:
    for key, value in settings.items():
        scenario = scenario.with_value(key, value)
    return scenario


def _print_rates(found: _Rates) -> None:
    from sim.cli.intervals import kept_facts

    axes, rows, best = found.axes, found.rows, found.best
    if len(rows) == 1:
        tried = sorted(best["tried"], key=lambda each: each["rate_per_s"])
        cells = [(f"{each['rate_per_s']:.4g}", str(each["replications"]), each["why"]) for each in tried]
        print_table(("requests/s", "runs", "verdict"), cells, left=0, fold=1)
    else:
        cells = [(*map(str, found.settings_of(row).values()), f"{row['rate_per_s']:.4g}") for row in rows]
        print_table((*axes, "requests/s within the SLO"), cells, left=len(axes), fold_left=True)
    facts = [
        *_slo_rows(found.scenario, found.target),
        ("Highest", _highest(found)),
        *kept_facts(best.get("kept")),
        ("Figures over", found.figures_over),
    ]
    print_facts(facts)


def _slo_rows(scenario: Scenario, target: Target) -> list[tuple[str, str]]:
    """The limits that a candidate has to keep, of all requests and of each class."""
    from sim.results.words import limits_text

    share = "" if target.attainment is None else f" for {100 * target.attainment:g} % of requests"
    rows = []
    slos = {"SLO": scenario.slo, **{f"SLO of {name}": each.slo for name, each in (scenario.classes or {}).items()}}
    for name, slo in slos.items():
        texts = [limits_text(slo.of_each) + share] if slo.of_each else []
        texts += [limits_text(slo.of_all)] if slo.of_all else []
        rows += [(name, "; ".join(texts))] if texts else []
    return rows


def _highest(found: _Rates) -> str:
    """The answer in a sentence: the best candidate and its rate, or how far from any the SLO is."""
    best = found.best
    if not found.reached:
        lowest = min(row["outside_per_s"] for row in found.rows)
        share = found.target.attainment
        asked = "the SLO" if share is None else f"{share:.4g} of requests"
        return f"none: {asked} is not reached even at {lowest:.3g} requests/s"
    choice = _where(found.settings_of(best))
    said = f"{best['rate_per_s']:.4g} requests/s within the SLO, not {best['outside_per_s']:.4g}"
    equal = "; ".join(map(_where, found.as_high))
    return (f"{choice}: " if choice else "") + said + (f"; as high: {equal}" if found.as_high else "")


def _choice(
    scenario: Scenario,
    axes: Mapping[str, Any],
    target: Target,
    *,
    goal: str,
    replications: int,
    out: Path | None,
    jobs: int | None,
) -> Choice:
    """The candidates by their costs; an interruption keeps what *out* holds."""
    from sim.study.optimize import cheapest

    try:
        return cheapest(scenario, axes, goal=goal, target=target, replications=replications, out=out, jobs=jobs)
    except KeyboardInterrupt as error:
        if out is None:
            raise
        raise interrupted(error, going_on(out)) from None


def _facts(found: Choice, kept: Sequence[Mapping[str, Any]] | None, part: str) -> dict[str, Any]:
    return {
        "goal": found.goal,
        "figures_over": part,
        "best": found.best,
        "as_little": [{key: row[key] for key in found.axes} for row in found.least[1:]],
        "kept": kept,
        "candidates": json.loads(found.table.to_json(orient="records")),
        "notes": [str(each) for each in found.notes],
    }


def _where(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in settings.items())


def attained_text(share: float, target: float | None) -> str:
    """The share that was attained, with as many digits as show where it is below the *target*."""
    least = math.inf if target is None or share >= target else target
    digits = next((n for n in range(1, 9) if round(share, n + 2) < least), 9)
    return f"{share:.{digits}%}"


def _print(found: Choice, scenario: Scenario, target: Target, out: Path | None, part: str) -> None:
    from sim.results import figure_text
    from sim.study.optimize import UNITS
    from sim.text import short_keys

    ranked = found.table.sort_values(["keeps", found.column], ascending=[False, True])
    columns = [found.column, "costs.usd_per_month", "slo_attainment", "tokens_per_s_per_gpu", "tokens_per_s_per_user"]
    rows = [
        (
            *(str(row[key]) for key in found.axes),
            *(
                "-"
                if row.get(key) is None or row[key] != row[key]
                else attained_text(row[key], target.attainment)
                if key == "slo_attainment"
                else figure_text(key, row[key])
                for key in columns
            ),
            "yes" if row["keeps"] else "no",
            "yes" if row["on_front"] else "",
        )
        for row in ranked.head(_SHOWN).to_dict("records")
    ]
    heads = (
        *short_keys(found.axes),
        UNITS[found.goal],
        "$/month",
        "attained",
        "tok/s/GPU",
        "tok/s/user",
        "keeps",
        "front",
    )
    print_table(heads, rows, left=len(found.axes), fold_left=True)
    facts = [
        *_slo_rows(scenario, target),
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
