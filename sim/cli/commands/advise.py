"""rooftrace advise: what this traffic needs, and what each change of the deployment would do."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sim.cli.exits import going_on, interrupted
from sim.cli.exports import takes_export
from sim.cli.options import Jobs, Json, Limits, ScenarioFile, set_option
from sim.cli.tables import print_facts, print_json, print_notes, print_table, written

if TYPE_CHECKING:
    from sim.study.advise import Advice, Row
    from sim.study.slots import SlotAdvice, Slots

_SHOWN = ("ttft_p95_s", "tpot_p95_s")
"""Percentiles that the table has where the SLO limits none."""


def register(app: typer.Typer) -> None:
    app.command()(takes_export(advise))


def advise(
    scenario: ScenarioFile = None,
    set_: Annotated[list[str] | None, set_option("Change a setting, as in rooftrace run.")] = None,
    limit: Limits = None,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="GROUP,...",
            help="Some of machines, devices, tensor, precision, prefix, memory, speculation, pools, release, adapters; all "
            "by default.",
            show_default=False,
        ),
    ] = None,
    attainment: Annotated[float, typer.Option(help="Share of requests that must keep limits of each request.")] = 0.99,
    replications: Annotated[int, typer.Option(min=1, help="Runs of each change, with seeds that all share.")] = 3,
    out: Annotated[
        Path | None, typer.Option(help="Folder that keeps the runs, as of a sweep.", show_default=False)
    ] = None,
    jobs: Jobs = None,
    as_json: Json = False,
) -> None:
    """Say what this traffic needs and what each change of the deployment would do, ranked by cost. Exit code 1 if nothing keeps the
    SLO."""
    from sim.cli.given import read_scenario, with_limits
    from sim.study.advise import advise as run

    given = list(set_ or ())
    chosen = with_limits(read_scenario(scenario, given), limit)
    groups = [name.strip() for name in (only or "").split(",") if name.strip()]
    try:
        found = run(
            chosen, only=groups, attainment=attainment, replications=replications, out=out, jobs=jobs,
            progress=False if as_json else None,
        )  # fmt: skip
    except KeyboardInterrupt as error:
        if out is None:
            raise
        raise interrupted(error, going_on(out)) from None
    if limit or found.assumed:
        given.append(f"slo={json.dumps(found.base.slo.model_dump(exclude_none=True))}")
    commands = {row.candidate.name: _command(scenario, given, row) for row in found.rows}
    if as_json:
        print_json(_facts(found, commands))
    else:
        _print(found, commands, out)
    print_notes(found.notes)
    if not any(row.keeps for row in found.rows):
        raise typer.Exit(1)


def _command(scenario: Path | None, given: list[str], row: Row) -> str:
    from sim.study.advise import command

    return command("" if scenario is None else str(scenario), [*given, *row.candidate.assignments])


def _facts(found: Advice, commands: Mapping[str, str]) -> dict[str, Any]:
    return {
        "slo": found.base.slo.model_dump(exclude_none=True),
        "slo_assumed": bool(found.assumed),
        "attainment": found.target.attainment,
        "replications": found.replications,
        "least_machines": found.least,
        "least_machines_is_known": found.least_is_known,
        "candidates": [
            {
                "group": row.candidate.group,
                "change": row.candidate.name,
                "rank": rank,
                "keeps": row.keeps,
                "why": row.judgement.why,
                "as_now": row.as_now,
                "set": row.candidate.assignments,
                "run": commands[row.candidate.name],
                "figures": row.figures,
                "half_widths": {key: half for key, half in row.half_widths.items() if half is not None},
            }
            for row, rank in zip(found.rows, found.ranks(), strict=True)
        ],
        "cannot_be": [
            {"group": each.candidate.group, "change": each.candidate.name, "reason": each.reason}
            for each in found.refused
        ],
        "adapter_slots": _slot_facts(found),
        "not_tried": list(found.said),
        "notes": [str(each) for each in found.notes],
    }


def _print(found: Advice, commands: Mapping[str, str], out: Path | None) -> None:
    print_facts(_needs(found))
    _print_rows(found)
    advice = found.adapter_slots
    if advice is not None:
        _print_slots(advice)
    facts = [*([] if advice is None else _slots_to_set(advice)), *_about_rows(found), *_expected(found)]
    if out is not None:
        facts += written(out, f"rooftrace plot {shlex.quote(str(out))}")
    print_facts(facts)
    if found.refused:
        print_table(
            ("cannot be", "why"), [(each.candidate.name, each.reason) for each in found.refused], left=1, fold=1
        )
    print_facts([("Groups" if i == 0 else "", text) for i, text in enumerate(found.said)])
    typer.echo("\nTo run one of them:")
    for name, command in commands.items():
        typer.echo(f"  {name}: {command}")


def _print_rows(found: Advice) -> None:
    from sim.results.words import money

    keys = list(found.base.slo.of_all) or list(_SHOWN)
    share = found.base.has_request_limits
    rows = []
    for row, rank in zip(found.rows, found.ranks(), strict=True):
        costs = [row.figures.get(f"costs.{name}") for name in ("usd_per_month", "usd_per_m_output")]
        rows.append(
            (
                "-" if rank is None else str(rank),
                row.candidate.name,
                *([_attained(row)] if share else []),
                *(_latency(row, key) for key in keys),
                *("-" if usd is None else money(usd) for usd in costs),
                "as now, to the bit" if row.as_now else "" if row.keeps else row.judgement.why,
            )
        )
    heads = [f"{measure.upper()} {statistic}" for measure, statistic, _ in (key.split("_") for key in keys)]
    heads = ["", "change", *(["in SLO"] if share else []), *heads, "$/month", "$/M out", "what it misses"]
    said = any(row[-1] for row in rows)
    width = len(heads) if said else len(heads) - 1
    print_table(heads[:width], [row[:width] for row in rows], left=2, fold=int(said), fold_left=True)


def _slot_facts(found: Advice) -> dict[str, Any] | None:
    advice = found.adapter_slots
    if advice is None:
        return None
    change = advice.change
    return {
        "best": advice.best.n,
        "now": advice.now.n,
        "e2el_change": None if change is None else {"mean": change.mean, "low": change.low, "high": change.high},
        "tried": [
            {
                "slots": each.n,
                "keeps": each.keeps,
                "kv_tokens": each.kv_tokens,
                "kv_tokens_a_slot": each.kv_tokens_a_slot,
            }
            for each in advice.tried
        ],
    }


def _print_slots(advice: SlotAdvice) -> None:
    """The numbers of adapter slots that were tried, side by side."""
    rows = [
        (
            f"{each.n} (now)" if each.n == advice.now.n else str(each.n),
            _of_seeds(each, "output_tokens_per_s"),
            _of_seeds(each, "e2el_s.mean"),
            f"{each.figures['adapters.waiting_for_slot_mean'] or 0:,.3g}",
            "-" if each.kv_tokens is None else f"{each.kv_tokens:,}",
            "kept" if each.keeps else "not kept",
        )
        for each in advice.tried
    ]
    heads = ("adapter slots", "output tokens/s", "mean E2EL", "waiting for a slot", "KV tokens", "SLO")
    print_table(heads, rows, left=1, fold=1)


def _slots_to_set(advice: SlotAdvice) -> Iterator[tuple[str, str]]:
    best, now, change = advice.best, advice.now, advice.change
    said = f"{now.n}, as now" if best.n == now.n else f"adapters.max_loras={best.n}"
    if change is not None:
        said += f": mean E2EL {change.mean:+.1%} against {now.n} slots"
        said += (
            f", {change.low:+.1%} to {change.high:+.1%} by seeds"
            if change.n > 1
            else " (one seed, so without an interval)"
        )
    yield "Slots to set", said
    among = "those that keep the SLO" if best.keeps else "all, as none keeps the SLO"
    said = f"of {among}, the fewest whose mean E2EL is not surely above the least"
    if best.kv_tokens_a_slot is not None:
        said += f"; each slot takes the memory of {best.kv_tokens_a_slot:,.0f} KV tokens on every machine"
    yield "Why", said


def _about_rows(found: Advice) -> Iterator[tuple[str, str]]:
    """By what the rows are ranked, and where their prices and figures are from."""
    yield (
        "Ranked",
        "by what the deployment costs an hour, among those that keep the SLO; what costs as much has the same rank",
    )
    if len({row.figures.get("costs.price_basis") for row in found.rows}) > 1:
        one = found.base.costs is not None and found.base.costs.provider
        of = f"{one}, of different dates" if one else "different providers and dates"
        more = "" if one else "; --set costs.provider=... takes one"
        yield "Prices", f"list prices of {of} (rooftrace hardware show NAME){more}"
    if found.replications > 1:
        n = found.replications
        text = f"those of the first seed, as the commands below print them; ± half-widths, and what is missed, are over {n} seeds"
        yield "Figures", text


def _expected(found: Advice) -> list[tuple[str, str]]:
    """Within what the means of candidates would be measured, relative to what is simulated: once for those that share it."""
    of: dict[str, list[str]] = {}
    for row in found.rows:
        of.setdefault(_bounds_text(row.figures), []).append(row.candidate.name)
    return [
        ("Expect to measure" if i == 0 else "", f"{'all' if len(of) == 1 else ', '.join(names)}: {text}")
        for i, (text, names) in enumerate(of.items())
    ]


def _bounds_text(figures: Mapping[str, Any]) -> str:
    basis = figures.get("intervals.basis")
    if basis is None:
        return f"no interval: {figures['intervals.why_not']}"
    texts = []
    for name in ("ttft_s", "tpot_s"):
        mean, low = figures[f"{name}.mean"], figures.get(f"intervals.figures.{name}.mean.low")
        if mean and low is not None:
            high = figures[f"intervals.figures.{name}.mean.high"]
            texts.append(f"{name[:-2].upper()} {low / mean:.2f} to {high / mean:.2f}")
    level = 100 * figures["intervals.level"]
    return f"mean {', '.join(texts)} times what is simulated ({level:.0f} % interval), by the errors on {basis}"


def _needs(found: Advice) -> list[tuple[str, str]]:
    """Rows on the traffic, what it is held to, and what it takes of the deployment as it is."""
    from sim.results.words import limits_text

    base, now = found.base, found.now
    figures = now.figures
    limits = limits_text(base.slo.model_dump(exclude_none=True))
    if base.classes:
        limits = ", ".join(filter(None, [limits, "and those of classes"]))
    if found.target.attainment is not None:
        limits += f"; by {found.target.attainment:.4g} of requests"
    if found.assumed:
        limits += "; assumed, as the scenario has no SLO: give slo in it, or --limit"
    total, span_s = figures["requests.total"], figures["makespan_s"]
    kv, busy = figures.get("kv_utilization.max"), figures.get("busy_fraction")
    uses = [f"busy {busy:.0%} of the time"] if busy is not None else []
    uses += [f"KV memory {kv:.0%} full at most"] if kv is not None else []
    least = "more than were tried" if found.least is None else f"{found.least}, and {base.replicas} now"
    if not found.least_is_known:
        few = "" if found.least is None else f"{found.least} or fewer, and {base.replicas} now: "
        least = f"{few}not searched for, which --only machines does"
    return [
        ("Traffic", f"{total:,} requests in {span_s:,.0f} s, {figures['total_tokens_per_s']:,.0f} tokens/s in and out"),
        ("Deployment", f"{base.model} on {base.replicas} x {base.parallel.gpus} {base.device_name}; {', '.join(uses)}"),
        ("SLO", limits),
        ("Now", "keeps it" if now.keeps else now.judgement.why),
        *([("Machines needed", least)] if base.autoscale is None else []),
    ]


def _latency(row: Row, key: str) -> str:
    measure, statistic, _ = key.split("_")
    return _of_seeds(row, f"{measure}_s.{statistic}")


def _of_seeds(run: Row | Slots, name: str) -> str:
    """A figure of the first seed with the half-width of its mean over all of them."""
    from sim.text import seconds_text, within_text

    value = run.figures.get(name)
    text = seconds_text if "_s." in name else "{:,.4g}".format
    return "-" if value is None else within_text(value, run.half_widths.get(name), text)


def _attained(row: Row) -> str:
    from sim.text import points_text

    value, half = row.figures.get("slo_attainment"), row.half_widths.get("slo_attainment")
    return "-" if value is None else f"{value:.1%}" + ("" if not half else f" ± {points_text(half, signed=False)}")
