"""Is B better than A, and how sure is that: two scenarios, two sweeps, or two runs of the same requests."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.errors import RooftraceError
from sim.results import Result
from sim.run import simulate
from sim.scenario import Scenario
from sim.study import statistics as st
from sim.study.notes import Noted, Notes
from sim.study.paired import STATISTICS, latency_change, queue_stretches
from sim.study.points import Sweep
from sim.study.store import Store
from sim.study.sweep import FORMAT, SweepResult, sweep
from sim.study.table import SATURATED, UNSTEADY, flatten
from sim.text import is_share, unknown

if TYPE_CHECKING:
    import pandas as pd

METRICS = (
    *("ttft_s.mean", "ttft_s.p50", "ttft_s.p99", "tpot_s.p50", "tpot_s.p99"),
    *("e2el_s.mean", "e2el_s.p50", "e2el_s.p99"),
    *("requests_per_s", "output_tokens_per_s", "slo_attainment", "goodput_requests_per_s"),
)
REPLICATIONS = 10
"""Pairs of scenarios: of 5 at a load of 0.9 the skewness shows too little to be allowed for (docs/coverage.md)."""
_TO_BE_ALIKE = 3
"""Replications that are equal in every digit, after which nothing is taken to be random."""
_NAMES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "itl_s": "ITL", "e2el_s": "E2EL", "queue_s": "queueing"}
_MORE_IS_BETTER = {
    "requests_per_s": "request throughput",
    "output_tokens_per_s": "output throughput",
    "total_tokens_per_s": "total throughput",
    "goodput_requests_per_s": "goodput",
    "slo_attainment": "SLO attainment",
}
_PER_REQUEST = ("ttft_s", "tpot_s", "e2el_s", "queue_s")


Bounds = tuple[float, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One metric of A and B. *change* is B / A - 1, or of shares B - A; None, with *why*, where there is none to give."""

    metric: str
    where: Mapping[str, Any]
    """The point of a sweep that it is about; empty where there is one only."""
    a: float | None
    b: float | None
    change: st.Change | None
    why: str = ""
    bounds: tuple[Bounds, Bounds] = (None, None)
    """Within which A and B would be measured (`intervals` of their summaries); None where these have no interval for the metric."""

    @property
    def certain(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.change is not None and self.change.certain

    @property
    def verdict(self) -> str:
        """One sentence: 'B is 12 % faster at p99 TTFT (9 to 16 %)'."""
        if self.change is None:
            return f"{_metric_name(self.metric)}: {self.why}"
        if self.a == self.b and self.change.mean == 0:
            return f"A and B are equal at {_metric_name(self.metric)}"
        percent, bounds = _sizes(self.change, " points" if is_share(self.metric) else " %")
        head = self.metric.rpartition(".")[0]
        up = self.change.mean > 0
        if self.metric in _MORE_IS_BETTER:
            said = f"B has {percent} {'more' if up else 'less'} {_MORE_IS_BETTER[self.metric]}"
        elif head in _NAMES:
            said = f"B is {percent} {'slower' if up else 'faster'} at {_metric_name(self.metric)}"
        else:
            said = f"B is {percent} {'higher' if up else 'lower'} in {_metric_name(self.metric)}"
        if not bounds:
            return f"{said}; {self.why}"
        if not self.certain:
            return f"no difference can be told at {_metric_name(self.metric)} ({bounds})"
        return f"{said} ({bounds})"


def _sizes(change: st.Change, unit: str) -> tuple[str, str]:
    """The size of a change in hundredths, which are percent of A or points of a share, and the interval around it, empty where
    there is none."""
    if math.isnan(change.half_width):
        return f"{100 * abs(change.mean):.3g}{unit}", ""
    half = 100 * change.half_width
    digits = min(2, max(0, 1 - math.floor(math.log10(half)))) if 0 < half < 10 else 0
    ends = [100 * change.low, 100 * change.high]
    if not change.certain:
        down, up = (f"{abs(end):.{digits}f}{unit}" for end in ends)
        return f"{100 * abs(change.mean):.{digits}f}{unit}", f"from {down} down to {up} up"
    low, high = sorted(map(abs, ends))
    # An interval that leaves out 0 does not end at a rounded 0.
    digits = max(digits, min(4, -math.floor(math.log10(low))))
    return f"{100 * abs(change.mean):.{digits}f}{unit}", f"{low:.{digits}f} to {high:.{digits}f}{unit}"


def _metric_name(metric: str) -> str:
    head, _, statistic = metric.rpartition(".")
    return f"{statistic} {_NAMES[head]}" if head in _NAMES else _MORE_IS_BETTER.get(metric, metric)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The differences between A and B, metric by metric, and how the pairs were made."""

    a: str
    b: str
    differences: tuple[Difference, ...]
    how: str
    level: float = st.LEVEL
    notes: tuple[Noted, ...] = ()
    """Notes of the runs of A and B."""
    trusted: tuple[Mapping[str, Any], Mapping[str, Any]] = field(default_factory=lambda: ({}, {}))
    """`intervals`, `trust`, `memory` and `kv_utilization` of the summaries of A and B; empty for sweeps of several points, whose
    tables have them."""

    def __iter__(self) -> Any:
        return iter(self.differences)

    @property
    def table(self) -> pd.DataFrame:
        """One row a metric (and point): a, b, change, low, high, half_width, unit, a_low, a_high, b_low, b_high, verdict."""
        import pandas as pd

        return pd.DataFrame(self.rows())

    def rows(self) -> list[dict[str, Any]]:
        """The differences as plain values: change, low, high and half_width are shares of A, or where *unit* is `points` the
        difference of two shares; a_low to b_high are `Difference.bounds`. None where there is none."""
        return [
            {
                **each.where,
                "metric": each.metric,
                "a": each.a,
                "b": each.b,
                "change": None if each.change is None else each.change.mean,
                **{name: _value(each.change, name) for name in ("low", "high", "half_width")},
                "unit": "points" if is_share(each.metric) else "of_a",
                **{
                    f"{side}_{end}": None if bounds is None else bounds[at]
                    for side, bounds in zip("ab", each.bounds, strict=True)
                    for at, end in enumerate(("low", "high"))
                },
                "verdict": each.verdict,
            }
            for each in self.differences
        ]

    def __str__(self) -> str:
        return "\n".join([f"A: {self.a}", f"B: {self.b}", *(each.verdict for each in self.differences), self.how])

    def _repr_html_(self) -> str:
        items = "".join(f"<li>{escape(each.verdict)}</li>" for each in self.differences)
        return (
            f"<div><b>A</b>: {escape(self.a)}<br><b>B</b>: {escape(self.b)}<ul>{items}</ul>"
            f"<small>{escape(self.how)}</small></div>"
        )


def _value(change: st.Change | None, name: str) -> float | None:
    value = math.nan if change is None else getattr(change, name)
    return None if math.isnan(value) else value


def compare(
    a: Any,
    b: Any,
    *,
    metrics: Sequence[str] | None = None,
    replications: int = REPLICATIONS,
    jobs: int | None = None,
    level: float = st.LEVEL,
) -> Comparison:
    """The difference of *b* from *a*, with intervals over pairs that share their random numbers.

    Both are of one kind. Scenarios (or their files) are run *replications* times each with the same seeds, or where
    nothing in them is random, which three equal ones say (all, where failures are drawn), once and compared as results. Sweeps (or
    their folders) are paired point by point and seed by seed. A change is mean(B) / mean(A) - 1 over the pairs, and is
    about runs as long as these (`sim.study.statistics.ratio_interval`). Results (or their folders) of the same requests
    are paired stretch by stretch, and the change is about the long run (`sim.study.paired.latency_change`); where the
    runs are too short for their load, it has no interval and says how many requests would do. Where A or B is saturated,
    latencies have that verdict instead. Figures of a `window` are compared over the requests in the windows of both.
    """
    first, second = _load(a), _load(b)
    if type(first) is not type(second):
        raise RooftraceError(
            f"A is {_kind(first)} and B {_kind(second)}; give two scenarios, two results or two sweeps"
        )
    if isinstance(first, Scenario) and isinstance(second, Scenario):
        return _scenarios(first, second, metrics, replications, jobs, level)
    if isinstance(first, SweepResult) and isinstance(second, SweepResult):
        differences = _sweeps(first, second, metrics, level)
        alone = _unmatched(first, second)
        n = min(first.manifest["replications"], second.manifest["replications"])
        return Comparison(
            a=str(first.folder),
            b=str(second.folder),
            differences=tuple(differences),
            how=_how((first, second), f"{n} replications, paired by seed", level) + alone,
            level=level,
            notes=_notes(map(str, first.notes), map(str, second.notes)),
            trusted=(_of_one_point(first), _of_one_point(second)),
        )
    places = [f"{given}: " if isinstance(given, str | os.PathLike) else "" for given in (a, b)]
    return _results(first, second, metrics, level, places)  # type: ignore[arg-type]


def _load(given: Any) -> Scenario | SweepResult | Result:
    if isinstance(given, Scenario | SweepResult | Result):
        return given
    if not isinstance(given, str | os.PathLike):
        raise TypeError(f"compare takes scenarios, results, sweeps or paths; got {type(given).__name__}")
    path = Path(given)
    if not path.is_dir():
        return Scenario.load(path)
    try:
        kind = json.loads((path / "manifest.json").read_text(encoding="utf-8")).get("format")
    except (OSError, ValueError, RecursionError, AttributeError):
        kind = None
    return SweepResult(path) if kind == FORMAT else Result.load(path)


def _kind(found: object) -> str:
    return {"Scenario": "a scenario", "SweepResult": "a sweep"}.get(type(found).__name__, "the result of a run")


def _scenarios(
    a: Scenario, b: Scenario, metrics: Sequence[str] | None, replications: int, jobs: int | None, level: float
) -> Comparison:
    if a.seed != b.seed:
        raise RooftraceError(f"A has seed {a.seed} and B seed {b.seed}; pairs share their seeds: give both the same")
    # Finished runs are found again in the folder, so that the first few cost nothing where all are needed.
    with tempfile.TemporaryDirectory(prefix="rooftrace-compare-") as folder:

        def replicated(name: str, scenario: Scenario, n: int) -> SweepResult:
            found = sweep(Sweep(base=scenario, replications=n), jobs=jobs, out=Path(folder) / name)
            if failures := found.failures(1):
                raise RooftraceError(f"{name} cannot be run: {failures[0]['error']}")
            return found

        first = replications if any(map(_may_fail, (a, b))) else min(replications, _TO_BE_ALIKE)
        both = replicated("A", a, first), replicated("B", b, first)
        labels = [f"{each.source}: {_label(side)}" for each, side in zip((a, b), both, strict=True)]
        nothing_random = all(map(_is_alike, both))
        if nothing_random:
            results = simulate(a), simulate(b)
            if _same_requests(*results):
                found = _results(*results, metrics, level, ("", ""), random=False)
                how = f"nothing in these scenarios is random, so that one run of each is compared: {found.how}"
                return replace(found, a=labels[0], b=labels[1], how=how)
        elif replications > first:
            both = replicated("A", a, replications), replicated("B", b, replications)
        return Comparison(
            a=labels[0],
            b=labels[1],
            differences=tuple(_sweeps(both[0], both[1], metrics, level)),
            how=(
                "nothing in these scenarios is random and their requests differ: there are no pairs, and no intervals"
                if nothing_random
                else _how(both, f"{replications} replications on the same random numbers", level)
            ),
            level=level,
            notes=_notes(*(map(str, side.notes) for side in both)),
            trusted=(_of_one_point(both[0]), _of_one_point(both[1])),
        )


def _may_fail(scenario: Scenario) -> bool:
    """Whether failures of machines are drawn: rare ones leave a few replications equal by chance."""
    return scenario.failures is not None and scenario.failures.mean_up_s is not None


def _is_alike(result: SweepResult) -> bool:
    """Whether nothing is random in any point of a sweep of several replications."""
    return result.counts["alike"] == result.counts["points"]


def _how(both: Sequence[SweepResult], pairs: str, level: float) -> str:
    """The sentence that says where intervals come from, and in which of two sweeps nothing is random."""
    alike = [name for name, each in zip("AB", both, strict=True) if _is_alike(each)]
    if len(alike) == 2:
        return (
            "nothing in these scenarios is random, so that replications are equal and there are no intervals; compare "
            "two results folders, which are paired request by request"
        )
    only = f", nothing in {alike[0]} being random" if alike else ""
    return f"{pairs}{only}; intervals hold at {level:.0%}"


def _notes(a: Iterable[str], b: Iterable[str]) -> tuple[Noted, ...]:
    """Notes of A and B; a sentence that both have is there once, for both."""
    notes = Notes()
    notes.add("A", a)
    notes.add("B", b)
    return notes.found


def _label(result: SweepResult) -> str:
    return str(Store(result.folder / "points").get(str(result.runs["key"].iloc[0]))["label"])


def _sweeps(a: SweepResult, b: SweepResult, metrics: Sequence[str] | None, level: float) -> list[Difference]:
    shared = [key for key in a.axes if key in b.axes]
    columns = [str(name) for name in a.runs if name in b.runs]
    chosen = _chosen(metrics, columns)
    points: dict[tuple[Any, ...], list[dict[int, dict[Any, Any]]]] = {}
    for side, result in enumerate((a, b)):
        for row in result.runs.to_dict("records"):
            if row["error"] is None or row["error"] != row["error"]:
                place = tuple(row[key] for key in shared)
                runs = points.setdefault(place, [{}, {}])[side]
                if row["run_seed"] in runs:
                    raise RooftraceError(
                        f"{result.folder} has several points at {dict(zip(shared, place, strict=True)) or 'one place'} "
                        "that the other sweep does not tell apart; compare sweeps over the same axes"
                    )
                runs[row["run_seed"]] = row
    matched = {place: runs for place, runs in points.items() if runs[0] and runs[1]}
    if not matched:
        raise RooftraceError(f"the sweeps have no point in common (axes of both: {', '.join(shared) or 'none'})")
    several = len(matched) > 1
    return [
        _paired(metric, dict(zip(shared, place, strict=True)) if several else {}, runs[0], runs[1], level)
        for place, runs in matched.items()
        for metric in chosen
    ]


def _unmatched(a: SweepResult, b: SweepResult) -> str:
    """A note about points that only one of two sweeps has a finished run of."""
    shared = [key for key in a.axes if key in b.axes]
    places = [
        {tuple(row[key] for key in shared) for row in each.runs.to_dict("records") if not _known(row["error"])}
        for each in (a, b)
    ]
    only = [len(places[0] - places[1]), len(places[1] - places[0])]
    return f"; left out: {only[0]} points of A and {only[1]} of B that the other lacks" if any(only) else ""


def _paired(
    metric: str, where: Mapping[str, Any], a: Mapping[int, Any], b: Mapping[int, Any], level: float
) -> Difference:
    seeds = [seed for seed in a if seed in b]
    values = [[run[seed][metric] for seed in seeds] for run in (a, b)]
    means = [_mean(side) for side in values]
    verdicts = [_mostly([run[seed].get(SATURATED) for seed in seeds]) for run in (a, b)]
    pairs = [(x, y) for x, y in zip(*values, strict=True) if _known(x) and _known(y)]
    why = ""
    if not seeds:
        why = "no seed in common"
    elif any(verdicts) and metric.startswith(UNSTEADY):
        why = _saturated_text(*verdicts)
    elif not pairs:
        why = "no value"
    elif sum(x for x, _ in pairs) <= 0 and not is_share(metric):
        why = "no relative change from 0"
    bounds = _bounds(metric, [[run[seed] for seed in seeds] for run in (a, b)])
    if why:
        return Difference(metric=metric, where=where, a=means[0], b=means[1], change=None, why=why, bounds=bounds)
    first, second = (np.array(side, dtype=float) for side in zip(*pairs, strict=True))
    # Equal runs under every seed say that nothing is random here, not that all is certain.
    if len(pairs) > 1 and len(set(pairs)) > 1:
        change = (st.point_interval if is_share(metric) else st.ratio_interval)(first, second, level=level)
    else:
        mean = _change(metric, float(first.mean()), float(second.mean()))
        change = st.Change(mean=mean, low=math.nan, high=math.nan, n=1, level=level)
        why = "one run has no interval" if len(pairs) == 1 else "equal replications have no interval"
    return Difference(metric=metric, where=where, a=means[0], b=means[1], change=change, why=why, bounds=bounds)


def _results(
    a: Result, b: Result, metrics: Sequence[str] | None, level: float, places: Sequence[str], *, random: bool = True
) -> Comparison:
    """A and B request by request; without anything *random* in them no sentence sends to replications."""
    first, second = a.requests, b.requests
    if not _same_requests(a, b):
        raise RooftraceError(
            f"the runs replay different requests ({len(first):,} and {len(second):,}), so that there are no pairs; give "
            "both the same workload and seed, or compare their scenarios"
        )
    flat = [_flat(each.summary) for each in (a, b)]
    chosen = _chosen(metrics, [name for name in flat[0] if name in flat[1]])
    kept = a.in_window & b.in_window
    order = np.flatnonzero(kept)[np.argsort(a.columns.requests["arrival_ns"][kept], kind="stable")]
    stretches = min(_stretches(each, order) for each in (a, b))
    saturated = (a.summary[SATURATED], b.summary[SATURATED])
    hint = {} if random else {"otherwise": ""}

    def change_of(metric: str, value: Sequence[Any]) -> tuple[st.Change | None, str]:
        """The change of one metric, and the reason where it has no interval."""
        head, _, statistic = metric.rpartition(".")
        if any(saturated) and metric.startswith(UNSTEADY):
            return None, _saturated_text(*saturated)
        if not all(map(_known, value)):
            return None, "no value"
        if value[0] <= 0 and not is_share(metric):
            return None, "no relative change from 0"
        if head in _PER_REQUEST and statistic in STATISTICS:
            before, after = (each[head].to_numpy()[order] for each in (first, second))
            change, why = latency_change(before, after, statistic, stretches=stretches, level=level, **hint)
            if change is not None or why:
                return change, why
        mean = _change(metric, *value)
        change = st.Change(mean=mean, low=math.nan, high=math.nan, n=1, level=level)
        return change, "one run has no interval" + ("; compare scenarios" if random else "")

    differences = []
    for metric in chosen:
        value = [side[metric] for side in flat]
        change, why = change_of(metric, value)
        bounds = _bounds(metric, [[side] for side in flat])
        differences.append(
            Difference(metric=metric, where={}, a=value[0], b=value[1], change=change, why=why, bounds=bounds)
        )
    part = "" if order.size == len(first) else f" ({order.size:,} in the windows of both)"
    return Comparison(
        a=places[0] + a.label,
        b=places[1] + b.label,
        differences=tuple(differences),
        how=(
            f"the same {len(first):,} requests{part} in {st.RATIO_BATCHES} batches by arrival, paired; intervals hold at "
            f"{level:.0%}"
            if any(each.change is not None and not math.isnan(each.change.half_width) for each in differences)
            else f"the same {len(first):,} requests{part}, paired; there are no intervals"
        ),
        level=level,
        notes=_notes(*(each.manifest.get("notes", ()) for each in (a, b))),
        trusted=(_trusted(a.summary), _trusted(b.summary)),
    )


def _same_requests(a: Result, b: Result) -> bool:
    names = ("arrival_ns", "prompt_tokens", "output_tokens")
    return all(np.array_equal(a.columns.requests[name], b.columns.requests[name]) for name in names)


def _stretches(result: Result, order: np.ndarray) -> float:
    """The answer of `queue_stretches` for the requests *order*; clients that wait for answers keep no queue of their own."""
    if result.manifest.get("workload", {}).get("closed_loop"):
        return math.inf
    columns = result.columns.requests
    return queue_stretches(*(columns[name][order] for name in ("arrival_ns", "scheduled_ns", "replica")))


def _bounds(metric: str, sides: Sequence[Sequence[Mapping[Any, Any]]]) -> tuple[Bounds, Bounds]:
    """Within which A and B would be measured, by their runs' dotted figures; the mean of the runs' bounds."""

    def of(runs: Sequence[Mapping[Any, Any]]) -> Bounds:
        low, high = (_mean([run.get(f"intervals.figures.{metric}.{end}") for run in runs]) for end in ("low", "high"))
        return None if low is None or high is None else (low, high)

    return of(sides[0]), of(sides[1])


def _trusted(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {key: summary[key] for key in ("intervals", "trust", "memory", "kv_utilization") if key in summary}


def _of_one_point(result: SweepResult) -> dict[str, Any]:
    """`_trusted` of the first run of a sweep of one point."""
    found = next(iter(result.summaries()), [None]) if result.counts["points"] == 1 else [None]
    return {} if found[0] is None else _trusted(found[0])


def _change(metric: str, a: float, b: float) -> float:
    return b - a if is_share(metric) else b / a - 1


def _chosen(metrics: Sequence[str] | None, columns: Sequence[str]) -> list[str]:
    if metrics is None:
        return [name for name in METRICS if name in columns]
    for name in metrics:
        if name not in columns:
            raise RooftraceError(unknown(f"{name} is not a metric of both", name, columns))
    return list(metrics)


def _flat(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in flatten(summary).items() if not isinstance(value, str | bool)}


def _saturated_text(a: bool | None, b: bool | None) -> str:
    who = "A and B are" if a and b else "A is" if a else "B is"
    return (
        f"{who} saturated: the queue grows for as long as arrivals last, and so does this latency; lower the rate or add "
        "replicas"
    )


def _mostly(verdicts: Sequence[bool | None]) -> bool:
    known = [verdict for verdict in verdicts if verdict is not None and verdict == verdict]
    return 2 * sum(known) > len(known)


def _known(value: Any) -> bool:
    return value is not None and value == value


def _mean(values: Sequence[Any]) -> float | None:
    known = [float(value) for value in values if _known(value)]
    return sum(known) / len(known) if known else None
