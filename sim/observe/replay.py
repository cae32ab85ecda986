"""The observed traffic through a simulated deployment, and both beside each other, interval by interval."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

import sim.metrics as metrics
from sim.errors import RooftraceError
from sim.plots.levels import mean_level, rate_of_parts, rate_per_s
from sim.run import run_built
from sim.scenario.assembly import resolve
from sim.study.statistics import alike
from sim.under_way import steps

if TYPE_CHECKING:
    from policies.routers import Router
    from sim.metrics.columns import Columns
    from sim.observe.curves import Observed
    from sim.observe.traffic import ObservedTraffic
    from sim.results import Result
    from sim.scenario import Scenario
    from sim.scenario.assembly import Built

FloatArray = NDArray[np.float64]
QUANTITIES: Mapping[str, str] = {
    "requests_per_s": "requests/s",
    "output_tokens_per_s": "output tokens/s",
    "ttft_s": "TTFT",
    "itl_s": "ITL",
    "running": "running",
    "in_flight": "in flight",
    "waiting": "waiting",
    "kv_used": "KV use",
}
"""The quantities that are laid beside each other, each with its head in tables: rates are of requests that end and of tokens,
latencies are means."""
RELATIVE = ("requests_per_s", "output_tokens_per_s", "ttft_s", "itl_s", "running", "in_flight", "waiting")
"""Those of which an error is a share of what was observed; of KV use it is a difference of shares."""
COUNTED: Mapping[str, str] = {"ttft_s": "ttft_n", "itl_s": "itl_n"}
"""For latencies, the row that says how many values an interval's mean is of."""
LEAST_HOUR_S = 3600.0
MOST_HOURS = 100_000
"""Intervals by which both are compared."""
_HOURS = 24
_LEAST_SCRAPES = 4
_NEVER = np.iinfo(np.int64).max // 4
_NS = 1e9

Rows = Mapping[str, FloatArray]
"""Quantities by interval, shape [n] each; NaN where there is nothing."""


def hours(begin_s: float, end_s: float, scrape_s: float, every_s: float | None = None) -> FloatArray:
    """Edges of equal intervals, Unix time: of about *every_s*, without it an hour; less where the time is short, so that there are
    a dozen, and no less than a few scrapes."""
    span_s = end_s - begin_s
    if every_s is None:
        every_s = min(LEAST_HOUR_S, max(span_s / (_HOURS / 2), _LEAST_SCRAPES * scrape_s))
    n = max(1, round(span_s / every_s))
    if n > MOST_HOURS:
        raise RooftraceError(
            f"{n:,} intervals of {every_s:.3g} s are more than {MOST_HOURS:,}; a longer --every makes fewer"
        )
    return begin_s + span_s * np.arange(n + 1) / n


def observed_rows(seen: Observed, edges_s: FloatArray) -> dict[str, FloatArray]:
    """The observed quantities, by the intervals between *edges_s* (Unix time); what no metric counts is left out."""
    widths_s = np.diff(edges_s)
    found: dict[str, FloatArray] = {}
    for name, quantity in (("requests_per_s", "finished"), ("output_tokens_per_s", "output_tokens")):
        grown = seen.grown(quantity, edges_s)
        if grown is None and name == "output_tokens_per_s" and (lengths := seen.mean("output_length", edges_s)):
            grown = np.nan_to_num(lengths[0] * lengths[1])
        if grown is not None:
            found[name] = grown / widths_s
    for name, quantities in (("ttft_s", ("ttft",)), ("itl_s", ("itl", "tpot"))):
        mean = next((mean for quantity in quantities if (mean := seen.mean(quantity, edges_s)) is not None), None)
        if mean is not None:
            found[COUNTED[name]], found[name] = mean
    for name in ("running", "waiting", "in_flight", "kv_used"):
        gauge = seen.gauge(name, edges_s)
        if gauge is not None:
            found[name] = gauge
    return found


class Run(NamedTuple):
    """A simulation of observed traffic."""

    result: Result
    front_ns: FloatArray
    """The delay of each request in the front end, where a server's gauge does not see it wait."""

    @property
    def columns(self) -> Columns:
        return self.result.columns

    @property
    def machines(self) -> int:
        """Models on machines, in the order of the results."""
        return len(self.columns.meta["kv_blocks_total"])


def simulated_rows(run: Run, edges_s: FloatArray) -> dict[str, FloatArray]:
    """The same of a simulation, whose clock is 0 where *edges_s* count from."""
    return _rows(run, np.ones(len(run.columns.requests["arrival_ns"]), bool), edges_s, range(run.machines))


def simulated_by_machine(run: Run, edges_s: FloatArray) -> list[dict[str, FloatArray]]:
    """The same of each machine; requests belong to the one that served them last."""
    machine = run.columns.requests["replica"]
    return [_rows(run, machine == m, edges_s, [m]) for m in range(run.machines)]


def _rows(run: Run, mine: NDArray[np.bool_], edges_s: FloatArray, replicas: Iterable[int]) -> dict[str, FloatArray]:
    columns, edges_ns = run.columns, edges_s * _NS
    requests = columns.requests
    widths_s = np.diff(edges_s)
    came, first, ended = (requests[name] for name in ("arrival_ns", "first_token_ns", "finish_ns"))
    scheduled = np.where(requests["scheduled_ns"] >= 0, requests["scheduled_ns"], _NEVER)
    finish = np.where(ended >= 0, ended, _NEVER)
    mine = mine & (requests["status"] != 1) & (came >= 0)
    done = mine & (requests["status"] == 0)
    begun = mine & (first >= 0)
    place = np.searchsorted(edges_ns, first, side="right") - 1
    inside = begun & (place >= 0) & (place < len(widths_s))
    n = np.bincount(place[inside], minlength=len(widths_s))
    waited = np.bincount(place[inside], (first - came)[inside] / _NS, minlength=len(widths_s))
    gaps = done & (requests["output_tokens"] > 1) & (finish > first)
    decoding_s = mean_level(edges_ns, first[gaps], finish[gaps]) * widths_s
    tokens = (requests["output_tokens"] - 1)[gaps].astype(np.float64)
    (decoded_per_s,) = rate_per_s(edges_ns, first[gaps], (finish - first)[gaps], tokens)
    decoded = decoded_per_s * widths_s
    chosen = set(replicas)
    blocks = columns.meta["kv_blocks_total"]
    held = (
        (start, held_ns, used / blocks[replica] * (held_ns / _NS))
        for replica, start, held_ns, used in metrics.kv_holdings(columns.iteration_blocks())
        if replica in chosen
    )
    return {
        "requests_per_s": np.histogram(finish[done], edges_ns)[0] / widths_s,
        "output_tokens_per_s": (decoded + n) / widths_s,
        "ttft_n": n.astype(np.float64),
        "itl_n": decoded,
        "ttft_s": np.where(n > 0, waited / np.maximum(n, 1), np.nan),
        "itl_s": np.where(decoded >= 1, decoding_s / np.maximum(decoded, 1), np.nan),
        "running": mean_level(edges_ns, scheduled[mine], finish[mine]),
        "in_flight": mean_level(edges_ns, came[mine], finish[mine]),
        "waiting": mean_level(edges_ns, np.minimum(came + run.front_ns, scheduled)[mine], scheduled[mine]),
        "kv_used": rate_of_parts(edges_ns, held) / max(len(chosen), 1),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Observed and simulated quantities, by interval."""

    edges_s: FloatArray
    """Unix time."""
    observed: Rows
    simulated: Rows
    """Means over the replications."""
    replications: int = 1

    def error(self, name: str) -> FloatArray:
        """Simulated over observed less 1, or of KV use simulated less observed; NaN where either is missing."""
        theirs, ours = self.observed.get(name), self.simulated[name]
        if theirs is None:
            return np.full(len(ours), np.nan)
        if name not in RELATIVE:
            return ours - theirs
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(theirs > 0, ours / theirs - 1.0, np.nan)

    def whole(self, name: str) -> tuple[float, float] | None:
        """Observed and simulated over all intervals: of latencies the mean of all values that each has, of others means by time
        where both are known. None where one has nothing."""
        theirs, ours = self.observed.get(name), self.simulated[name]
        if theirs is None:
            return None
        if name in COUNTED:
            pair = tuple(_weighted(rows[name], rows[COUNTED[name]]) for rows in (self.observed, self.simulated))
        else:
            weights = np.where(np.isfinite(theirs) & np.isfinite(ours), np.diff(self.edges_s), 0.0)
            pair = tuple(_weighted(values, weights) for values in (theirs, ours))
        return (pair[0], pair[1]) if np.isfinite(pair).all() else None


def _weighted(values: FloatArray, weights: FloatArray) -> float:
    """The mean of what is known and weighs something; NaN where nothing does."""
    known = np.isfinite(values) & (weights > 0)
    return float(np.average(values[known], weights=weights[known])) if known.any() else float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Simulations of the observed traffic on one deployment, one a replication."""

    runs: tuple[Run, ...]
    edges_s: FloatArray
    """Instants of the simulated clock."""

    @property
    def rows(self) -> dict[str, FloatArray]:
        """Means over the replications by interval."""
        return _means([simulated_rows(each, self.edges_s) for each in self.runs])

    @property
    def by_machine(self) -> list[dict[str, FloatArray]]:
        """The same for each machine."""
        of_all = [simulated_by_machine(each, self.edges_s) for each in self.runs]
        machines = min(len(each) for each in of_all)
        return [_means([each[m] for each in of_all]) for m in range(machines)]


def _means(rows: Sequence[Mapping[str, FloatArray]]) -> dict[str, FloatArray]:
    found = {}
    for name in rows[0]:
        values = np.array([each[name] for each in rows])
        known = np.isfinite(values)
        total = np.where(known, values, 0.0).sum(axis=0)
        found[name] = np.where(known.any(axis=0), total / np.maximum(known.sum(axis=0), 1), np.nan)
    return found


def replay(
    scenario: Scenario, traffic: ObservedTraffic, edges_s: FloatArray, *, seeds: Sequence[int],
    router: Router | None = None,
) -> Replayed:  # fmt: skip
    """*traffic* on the deployment of *scenario*, drawn and run once for each of *seeds*; *edges_s* are Unix time. One run stands
    for all where nothing is random. *router*: in place of the scenario's."""
    found: list[Run] = []
    for seed in steps(seeds, "replays"):
        trace = traffic.workload(seed)
        built = resolve(scenario, trace)
        limit = traffic.in_flight if traffic.in_flight is not None and traffic.in_flight < len(trace) else None
        own = built.experiment.router if router is None else router
        found.append(
            run_of(replace(built, experiment=replace(built.experiment, seed=seed, router=own, in_flight=limit)))
        )
        if alike([each.result.summary for each in found]):
            found = found[:1]
            break
    return Replayed(runs=tuple(found), edges_s=edges_s - traffic.begin_s)


def run_of(built: Built) -> Run:
    """The simulation of what a scenario and observed traffic make."""
    result = run_built(built)
    tokens, own = result.columns.requests["prompt_tokens"], built.experiment
    front_s = own.admission_s + own.admission_serial_s + own.admission_s_per_token * tokens
    return Run(result=result, front_ns=front_s * _NS)


def beside(seen: Observed, edges_s: FloatArray, replayed: Replayed) -> Beside:
    """The quantities that were observed between *edges_s* beside its simulation."""
    return Beside(
        edges_s=edges_s,
        observed=observed_rows(seen, edges_s),
        simulated=replayed.rows,
        replications=len(replayed.runs),
    )


def intervals(edges_s: FloatArray) -> list[tuple[float, float]]:
    """Begin and end of each interval."""
    return list(itertools.pairwise(edges_s.tolist()))
