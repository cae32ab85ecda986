"""Model error as commands say it: the option, tables, and the probability that an SLO is kept."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sim.bench.intervals import Interval, Intervals, intervals
from sim.cli.tables import print_facts, print_table
from sim.errors import RooftraceError
from sim.results.trust import figure_text, level_facts
from sim.scenario import Scenario
from sim.study.points import Sweep
from sim.study.rates import Target, own_rate_per_s
from sim.text import is_share, points_text
from workloads.write import open_whole

POINTS = "intervals.csv"
LOWER = (1.0, 0.9, 0.8, 0.7)
"""Shares of the highest rate at which the probability of keeping the SLO is worked out."""


def kept_at(scenario: Scenario, rate_per_s: float, target: Target, replays: int) -> list[dict[str, Any]]:
    """The probability that *scenario* keeps the target at shares of *rate_per_s*."""
    own = own_rate_per_s(scenario)
    found = []
    for share in LOWER:
        rate = share * rate_per_s
        asked = scenario.with_value("workload.rate_scale", scenario.workload.rate_scale * rate / own)
        found.append({"rate_per_s": rate, **_kept(intervals(asked, replays, ("slo_attainment",)), target)})
        if found[-1]["probability"] == 1.0:
            break
    return found


def kept_by(scenario: Scenario, settings: Mapping[str, Any], target: Target, replays: int) -> list[dict[str, Any]]:
    """The probability that a candidate keeps the target."""
    for key, value in settings.items():
        scenario = scenario.with_value(key, value.item() if hasattr(value, "item") else value)
    return [_kept(intervals(scenario, replays, ("slo_attainment",)), target)]


def _kept(found: Intervals, target: Target) -> dict[str, Any]:
    return {"probability": found.kept(target.attainment), "replays": found.replays, "basis": found.basis}


def kept_facts(found: Sequence[Mapping[str, Any]] | None) -> list[tuple[str, str]]:
    """Rows of a summary that say it."""
    if not found:
        return []
    texts = []
    for each in found:
        where = f" at {each['rate_per_s']:.4g} requests/s" if "rate_per_s" in each else ""
        probability = each["probability"]
        texts.append("unknown" + where if probability is None else f"{probability:.0%}{where}")
    first = found[0]
    return [
        ("Probably kept", "; ".join(texts)),
        ("", f"share of {first['replays']} replays that keep the SLO, from {first['basis']}"),
    ]


def point_intervals(plan: Sweep, replays: int) -> list[tuple[Mapping[str, Any], Intervals | str]]:
    """The settings of each point of a sweep, with its intervals or why there are none."""
    found: list[tuple[Mapping[str, Any], Intervals | str]] = []
    for point in plan:
        run = plan.runs(point)[0]
        try:
            around = run.error if run.scenario is None else intervals(run.scenario, replays)
        except RooftraceError as error:
            around = str(error)
        found.append(({**point.settings, **point.meta}, around))
    return found


def write_point_intervals(found: Sequence[tuple[Mapping[str, Any], Intervals | str]], folder: Path) -> None:
    """A line of `POINTS` in *folder* for each point and figure."""
    with open_whole(folder / POINTS) as file:
        writer = csv.writer(file)
        keys = list(found[0][0]) if found else []
        names = ("middle", "low", "high", "simulation_low", "simulation_high")
        writer.writerow([*keys, "figure", *names, "replays", "why_not"])
        for settings, around in found:
            where = [settings[key] for key in keys]
            if isinstance(around, str):
                writer.writerow([*where, "", *[""] * len(names), "", around])
                continue
            for name, each in around.figures.items():
                writer.writerow([*where, name, *(getattr(each, key) for key in names), around.replays, ""])


def print_point_intervals(found: Sequence[tuple[Mapping[str, Any], Intervals | str]], folder: Path) -> None:
    """Mean TTFT and TPOT of each point with their intervals."""
    keys = list(found[0][0]) if found else []
    rows = []
    for settings, around in found[:40]:
        cells = []
        for name in ("ttft_s.mean", "tpot_s.mean"):
            each = None if isinstance(around, str) else around.figures.get(name)
            cells.append("-" if each is None else f"{figure_text(name, each.low)} to {figure_text(name, each.high)}")
        rows.append((*(str(settings[key]) for key in keys), *cells))
    print_table((*keys, "TTFT mean, 90 %", "TPOT mean, 90 %"), rows, left=len(keys))
    failed = [around for _, around in found if isinstance(around, str)]
    facts = [("Intervals", f"{folder}/{POINTS}, all figures")]
    replays = next((around.replays for _, around in found if not isinstance(around, str)), None)
    facts += [] if replays is None else level_facts(replays)
    if failed:
        facts.append(("Without", f"{len(failed)} points: {failed[0]}"))
    print_facts(facts)


def change_facts(found: Mapping[str, Interval]) -> dict[str, Any]:
    """Plain values, for JSON."""
    return {name: asdict(each) for name, each in found.items()}


def print_changes(found: Mapping[str, Interval], replays: int) -> None:
    """Print the difference of B from A where both are as far off as they may be: shares in points, others relative to A."""

    def shown(name: str, change: float) -> str:
        return points_text(change) if is_share(name) else f"{change:+.1%}"

    rows = [
        (
            name,
            shown(name, each.middle),
            f"{shown(name, each.low)} to {shown(name, each.high)}",
            f"{shown(name, each.simulation_low)} to {shown(name, each.simulation_high)}",
        )
        for name, each in found.items()
    ]
    print_table(("B over A, 90 %", "middle", "model and simulation", "simulation alone"), rows)
    print_facts([("From", f"{replays} replays of each, whose deployments are drawn alike"), *level_facts(replays)])
