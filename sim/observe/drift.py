"""When a deployment and its simulation part, and what may be the cause: a slow machine, or a router that does not see load.

The change test is of log(observed / simulated) by interval: its deviations from their mean are added up, and the largest such sum,
over the scatter of one interval and the root of their number, raises an alarm above 1.63. Without a change and with independent
scatter that happens in one observation of a hundred (the distribution of Kolmogorov; Ploberger and Kraemer, Econometrica 60, 1992).
The change began behind the interval in which the sum is largest. The scatter is that of differences between neighbours, and no less
than a repeated measurement has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sim.observe.replay import Beside, Replayed, Run
from sim.study.statistics import student_t

if TYPE_CHECKING:
    from sim.observe.curves import Observed

FloatArray = NDArray[np.float64]
ALARM = 1.628
"""The 99th percentile of the largest sum without a change."""
FEWEST = 8
"""Intervals below which nothing is said about changes."""
LEAST_SCATTER: Mapping[str, float] = {"ttft_s": 0.06, "itl_s": 0.02, "requests_per_s": 0.02, "kv_used": 0.05}
"""Scatter of the log that a repeated measurement has (`sim.bench.fitting.ERRORS`), below which none is taken."""
WATCHED = ("itl_s", "ttft_s")
"""Quantities whose change is a drift of the deployment; rates are what clients ask for."""
SLOW = 0.05
"""A machine is called slow whose iterations take so much longer than those of its like, and more than chance gives."""
UNEVEN = 1.5
"""A router is said not to see load where requests in flight differ between machines so many times as they would under its rule."""
_LEVEL = 0.999
"""The level of both comparisons, which are made for every machine."""
_NS = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A quantity that changed against its simulation."""

    quantity: str
    since_s: float
    """Unix time from which on it did."""
    by: float
    """Observed over simulated after it over the same before it, less 1."""


def scatter(values: FloatArray, least: float) -> float:
    """The standard deviation of *values* around a level that may change once: of differences between neighbours."""
    return max(least, float(np.sqrt(np.mean(np.diff(values) ** 2) / 2.0)))


def change_in(values: FloatArray, unit: float) -> int | None:
    """The first of *values* behind a change of their level, where there is one; *unit* is their scatter without it."""
    sums = np.abs(np.cumsum(values - values.mean()))[:-1]
    at = int(np.argmax(sums))
    return at + 1 if sums[at] / (unit * math.sqrt(len(values))) > ALARM else None


def changes(found: Beside) -> list[Change]:
    """The quantities that changed against their simulation; none with fewer than `FEWEST` intervals."""
    said = []
    for name in WATCHED:
        theirs, ours = found.observed.get(name), found.simulated[name]
        if theirs is None:
            continue
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.log(theirs / ours)
        known = np.flatnonzero(np.isfinite(logs))
        if len(known) < FEWEST:
            continue
        values = logs[known]
        began = change_in(values, scatter(values, LEAST_SCATTER[name]))
        if began is not None:
            since_s = float(found.edges_s[known[began]])
            by = float(np.expm1(values[began:].mean() - values[:began].mean()))
            said.append(Change(quantity=name, since_s=since_s, by=by))
    return said


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A candidate for what is wrong, with its evidence."""

    kind: str
    """slow machine, or router that does not see load."""
    instance: str
    """Empty for a router."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """An instance against the simulation of its like."""

    instance: str
    slower: float
    """Its ITL over what the simulation has at as many running requests, against the other instances, less 1."""
    half_width: float
    """Half of the interval around it."""
    in_flight: float


def machines(seen: Observed, edges_s: FloatArray, replayed: Replayed) -> list[Machine]:
    """Every instance whose ITL is observed, against the median of the others at as many running requests; none where there are
    fewer than two.

    ITL at a number of running requests is a straight line through all simulated machines and intervals.
    """
    itl = {name: each.mean(edges_s) for name, each in seen.histograms.get("itl", {}).items()}
    level = "running" if "running" in seen.gauges else "in_flight"
    running = {name: _gauge_of(seen, level, name, edges_s) for name in itl}
    residuals: dict[str, FloatArray] = {}
    slope, base = _line(replayed, level)
    for name, values in itl.items():
        expected = base + slope * running[name] if np.isfinite(running[name]).any() else np.full(len(values), base)
        with np.errstate(divide="ignore", invalid="ignore"):
            residuals[name] = np.log(values / expected)
    if len(residuals) < 2:
        return []
    found = []
    for name, own in residuals.items():
        others = np.array([each for other, each in residuals.items() if other != name])
        with np.errstate(all="ignore"):
            apart = own - _middle(others)
        known = apart[np.isfinite(apart)]
        if len(known) < 3:
            continue
        half = student_t((1 + _LEVEL) / 2, len(known) - 1) * float(known.std(ddof=1)) / math.sqrt(len(known))
        in_flight = running[name][np.isfinite(running[name])]
        found.append(
            Machine(
                instance=name,
                slower=float(np.expm1(known.mean())),
                half_width=half,
                in_flight=float(in_flight.mean()) if len(in_flight) else float("nan"),
            )
        )
    return found


def _middle(values: FloatArray) -> FloatArray:
    """Medians of columns over what is known; NaN where nothing is."""
    return np.array(
        [np.median(column[np.isfinite(column)]) if np.isfinite(column).any() else np.nan for column in values.T]
    )


def _gauge_of(seen: Observed, gauge: str, instance: str, edges_s: FloatArray) -> FloatArray:
    curve = seen.gauges.get(gauge, {}).get(instance)
    return np.full(len(edges_s) - 1, np.nan) if curve is None else curve.mean_between(edges_s)


def _line(replayed: Replayed, level: str) -> tuple[float, float]:
    """Slope and value at none of ITL over requests that run or are in flight, through all simulated machines and intervals."""
    x = np.concatenate([each[level] for each in replayed.by_machine])
    y = np.concatenate([each["itl_s"] for each in replayed.by_machine])
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    if len(x) < 3 or np.ptp(x) < 1e-9:
        return 0.0, float(y.mean()) if len(y) else float("nan")
    slope, base = np.polyfit(x, y, 1)
    return float(slope), float(base)


def unevenness(levels: Sequence[FloatArray]) -> FloatArray:
    """The standard deviation of requests in flight between machines, by interval, in roots of their mean."""
    values = np.array(levels)
    mean = values.mean(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(mean > 0, values.std(axis=0) / np.sqrt(mean), np.nan)


def causes(seen: Observed, edges_s: FloatArray, replayed: Replayed) -> list[Cause]:
    """Candidates for why the deployment is not as its simulation: a machine that is slower than its like, and a router that gives
    machines requests as its rule would not."""
    found = []
    slow: set[str] = set()
    for each in machines(seen, edges_s, replayed):
        if each.slower - each.half_width > 0 and each.slower > SLOW:
            slow.add(each.instance)
            found.append(
                Cause(
                    kind="slow machine",
                    instance=each.instance,
                    text=f"{each.instance or 'an instance'} takes {each.slower:.0%} longer between tokens than its like do at as "
                    f"many running requests (± {each.half_width:.0%})",
                )
            )
    router = _router(seen, edges_s, replayed, slow)
    return found + ([router] if router is not None else [])


def _router(seen: Observed, edges_s: FloatArray, replayed: Replayed, slow: set[str]) -> Cause | None:
    """A router that does not see load, told by scrapes: how unevenly requests are in flight at an instant, machines that are slow
    left out, against the same instants of the simulated rule."""
    levels = [seen.gauges[name] for name in ("running", "waiting") if name in seen.gauges]
    if "running" not in seen.gauges:
        levels = [seen.gauges["in_flight"]] if "in_flight" in seen.gauges else []
    names = [name for name in (levels[0] if levels else ()) if name not in slow]
    if len(names) < 2 or replayed.runs[0].machines < 2:
        return None
    at_s = levels[0][names[0]].at_s
    at_s = at_s[(at_s >= edges_s[0]) & (at_s <= edges_s[-1])]
    in_flight = [np.sum([each[name].at(at_s) for each in levels if name in each], axis=0) for name in names]
    theirs = unevenness(in_flight)
    begin_s = float(edges_s[0] - replayed.edges_s[0])
    of_runs = np.array([unevenness(_simulated_at(run, (at_s - begin_s) * _NS)) for run in replayed.runs])
    ours = np.nan_to_num(of_runs).mean(axis=0)
    known = np.isfinite(theirs) & np.isfinite(of_runs).all(axis=0)
    if known.sum() < FEWEST or ours[known].mean() <= 0:
        return None
    apart = theirs[known] - UNEVEN * ours[known]
    n = len(apart)
    sure = student_t((1 + _LEVEL) / 2, n - 1) * float(apart.std(ddof=1)) / math.sqrt(n)
    if apart.mean() - sure <= 0:
        return None
    times = float(theirs[known].mean() / ours[known].mean())
    return Cause(
        kind="router that does not see load",
        instance="",
        text=f"requests in flight differ {times:.1f} times as much between machines as under the scenario's router ({n} scrapes)",
    )


def _simulated_at(run: Run, at_ns: FloatArray) -> list[FloatArray]:
    """Requests in flight on each machine at instants."""
    requests = run.columns.requests
    found = []
    for machine in range(run.machines):
        mine = (requests["replica"] == machine) & (requests["status"] != 1)
        came = np.sort(requests["arrival_ns"][mine])
        gone = np.sort(np.where(requests["finish_ns"] >= 0, requests["finish_ns"], np.iinfo(np.int64).max)[mine])
        found.append((np.searchsorted(came, at_ns, "right") - np.searchsorted(gone, at_ns, "right")).astype(np.float64))
    return found
