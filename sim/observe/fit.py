"""The terms of a stack that an observed deployment tells, as `bench fit` finds them, and how many KV blocks its gauge tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hwmodels.calibrated import Calibrated
from sim.bench.cases import case_of, priors_of
from sim.bench.fitting import Case, Fit
from sim.bench.fitting import fit as fitted
from sim.bench.parameters import KV, PARAMETERS, Setting
from sim.errors import RooftraceError
from sim.observe.replay import Beside, observed_rows
from sim.observe.traffic import ObservedTraffic
from sim.scenario.assembly import resolve
from sim.scenario.assembly.deployment import deployment_of
from sim.study import statistics as st

if TYPE_CHECKING:
    from sim.engine.record.columns import Columns
    from sim.observe.curves import Observed
    from sim.scenario import Scenario
    from workloads import Trace

FloatArray = NDArray[np.float64]
CASES = 4
"""Stretches of the observation that a fit replays."""
REQUESTS = 800
"""Requests of each at most, those of its beginning included."""
_FEWEST = 20
_LEAD = 0.2
"""The share of a stretch's requests that only fill the deployment."""
_NS = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A part of the observation with what was measured in it."""

    begin_s: float
    end_s: float
    rate_per_s: float
    measured_s: Mapping[str, float]
    by_running: bool = False
    """Whether time per token is how long requests run over their output tokens, since no metric has the gaps."""


def stretches(
    seen: Observed, traffic: ObservedTraffic, *, most: int = CASES, requests: int = REQUESTS
) -> list[Stretch]:
    """Parts of the observation from the least to the most load, each of at most so many *requests*; none where too few came."""
    edges_s = traffic.begin_s + traffic.edges_s
    total = np.concatenate(([0.0], np.cumsum(traffic.arrivals)))
    found: list[Stretch] = []
    at = 0
    while at < len(edges_s) - 1:
        end = int(np.searchsorted(total, total[at] + requests, side="right")) - 1
        end = min(max(end, at + 2), len(edges_s) - 1)
        lead = int(np.searchsorted(total, total[at] + _LEAD * (total[end] - total[at])))
        lead = min(max(lead, at + 1), end - 1) if end - at > 1 else at
        rows = observed_rows(seen, edges_s[[lead, end]])
        measured = {
            f"{name}_s": float(rows[of][0])
            for name, of in (("tpot", "itl_s"), ("ttft", "ttft_s"))
            if of in rows and np.isfinite(rows[of][0]) and rows[of][0] > 0
        }
        by_running = "itl_s" not in rows and {"running", "output_tokens_per_s"} <= set(rows)
        if by_running and rows["output_tokens_per_s"][0] > 0 and rows["running"][0] > 0:
            measured["tpot_s"] = float(rows["running"][0] / rows["output_tokens_per_s"][0])
        if measured and total[end] - total[at] >= _FEWEST:
            rate = float((total[end] - total[at]) / (edges_s[end] - edges_s[at]))
            found.append(
                Stretch(
                    begin_s=float(edges_s[lead]),
                    end_s=float(edges_s[end]),
                    rate_per_s=rate,
                    measured_s=measured,
                    by_running=by_running,
                )
            )
        at = end
    found.sort(key=lambda each: each.rate_per_s)
    places = np.unique(np.rint(np.linspace(0, len(found) - 1, min(most, len(found)))).astype(int)) if found else ()
    return [found[place] for place in places]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Within:
    """TTFT and time per token between two instants of a simulation, as `sim.observe.replay` has them."""

    begin_ns: float
    end_ns: float
    by_running: bool = False
    """`Stretch.by_running`."""

    def __call__(self, columns: Columns) -> tuple[NDArray[np.bool_], Mapping[str, float]]:
        requests = columns.requests
        came, first, ended = (requests[name] for name in ("arrival_ns", "first_token_ns", "finish_ns"))
        counted = (requests["status"] == 0) & (first >= self.begin_ns) & (first < self.end_ns)
        gaps = (requests["status"] == 0) & (requests["output_tokens"] > 1) & (ended > first)
        inside = self._inside(first, ended, gaps)
        tokens = (requests["output_tokens"] - 1) * inside / np.maximum(ended - first, 1)
        if self.by_running:
            inside = self._inside(requests["scheduled_ns"], ended, gaps)
        nan = float("nan")
        return counted, {
            "ttft_s": float((first - came)[counted].mean() / _NS) if counted.any() else nan,
            "tpot_s": float(inside.sum() / tokens.sum() / _NS) if tokens.sum() >= 1 else nan,
        }

    def _inside(self, begin: NDArray[np.int64], end: NDArray[np.int64], mine: NDArray[np.bool_]) -> NDArray[np.float64]:
        """The part of each time between two instants that lies within."""
        inside = np.minimum(end, self.end_ns) - np.maximum(begin, self.begin_ns)
        return np.where(mine, np.maximum(inside, 0.0), 0.0)


def fit(
    scenario: Scenario, seen: Observed, traffic: ObservedTraffic, *, most: int = CASES,
    requests: int = REQUESTS, kv_known: bool = False,
) -> Fit:  # fmt: skip
    """The stack of *scenario* fitted to what was observed, by stretches from the least to the most load.

    RooftraceError where TTFT and time per token are not observed, or the scenario has no stack whose terms could be fitted.
    """
    deployment = deployment_of(scenario)
    if not isinstance(deployment.made_by, Calibrated) or deployment.profile is None or deployment.profile.kind != "gpu":
        raise RooftraceError(
            f"{scenario.source}: only deployments on GPUs, calibrated and not by measured steps, have terms that can be fitted; "
            "--no-fit replays it as it is"
        )
    trace = traffic.workload(scenario.seed)
    cases: list[Case] = []
    for each in stretches(seen, traffic, most=most, requests=requests):
        part, begin_ns = _part(trace, traffic, each, seen)
        experiment = replace(resolve(scenario, part).experiment, seed=scenario.seed, in_flight=_limit(part, traffic))
        within = _Within(
            begin_ns=begin_ns, end_ns=begin_ns + (each.end_s - each.begin_s) * _NS, by_running=each.by_running
        )
        name = f"{each.begin_s - traffic.begin_s:.0f} to {each.end_s - traffic.begin_s:.0f} s, {each.rate_per_s:.3g}/s"
        try:
            cases.append(case_of(name, each.measured_s, experiment, deployment, within))
        except ValueError as error:
            raise RooftraceError(f"{scenario.source}: {error}; --no-fit replays it as it is") from None
    if not cases:
        raise RooftraceError(
            f"nothing to fit to: no stretch of the observation has {_FEWEST} requests and a TTFT or an ITL; --no-fit replays the "
            "scenario as it is"
        )
    names = [p.name for p in PARAMETERS if p.name != KV] if kv_known else None
    try:
        return fitted(cases, Setting(stack=deployment.made_by.stack), priors_of(cases[0]), names=names)
    except ValueError as error:
        raise RooftraceError(f"{scenario.source}: {error}") from None


def _limit(part: Trace, traffic: ObservedTraffic) -> int | None:
    """The limit of clients, where there are more requests."""
    return traffic.in_flight if traffic.in_flight is not None and traffic.in_flight < len(part) else None


def _part(trace: Trace, traffic: ObservedTraffic, each: Stretch, seen: Observed) -> tuple[Trace, float]:
    """The requests of a stretch and of what fills the deployment before it, and when the stretch begins on their clock.

    Those in flight when that begins are there at once: as many of the latest before it as were observed.
    """
    span_s = each.end_s - each.begin_s
    lead_s = min(span_s * _LEAD / (1 - _LEAD), each.begin_s - traffic.begin_s)
    at_s = trace.arrival_ns / _NS + traffic.begin_s
    rows = np.flatnonzero((at_s >= each.begin_s - lead_s) & (at_s < each.end_s))
    first_s = each.begin_s - lead_s
    in_flight = seen.in_flight(np.array([first_s]))
    before = np.flatnonzero(at_s < first_s)
    before = before[max(0, len(before) - round(0.0 if in_flight is None else float(in_flight[0]))) :]
    arrival_s = np.concatenate((np.zeros(len(before)), at_s[rows] - first_s))
    part = trace.take(np.concatenate((before, rows)))
    return replace(part, arrival_ns=np.rint(arrival_s * _NS).astype(np.int64)), lead_s * _NS


@dataclass(frozen=True, slots=True, kw_only=True)
class KvBlocks:
    """The KV blocks of a machine, by how full its cache was said to be and how many blocks the same requests hold in simulation."""

    simulated: int
    """Those of the simulated deployment."""
    told: float
    low: float
    """The ends of the 95 % interval; NaN with fewer than three intervals of time."""
    high: float
    exact: bool = False
    """Whether the deployment says it itself."""


def kv_blocks(found: Beside, blocks: int, said: Sequence[float] = ()) -> KvBlocks | None:
    """The KV blocks of a machine whose simulation has *blocks*; *said*: what machines say themselves. None where no metric says how
    full the cache was, or hardly anything was in it."""
    if said:
        own = float(np.median(said))
        return KvBlocks(simulated=blocks, told=own, low=own, high=own, exact=True)
    theirs, running = (found.observed.get(name) for name in ("kv_used", "running"))
    if theirs is None:
        return None
    ours = found.simulated["kv_used"]
    if running is not None and found.simulated["running"].mean() > 0:
        # Two gauges of one scrape see the same requests, however few scrapes there are; simulation says what a request holds.
        ours = running * ours.mean() / found.simulated["running"].mean()
    known = np.isfinite(theirs) & np.isfinite(ours) & (theirs > 0)
    if known.sum() < 1 or theirs[known].mean() <= 0 or ours[known].mean() <= 0:
        return None
    if known.sum() < 3:
        return KvBlocks(
            simulated=blocks, told=float(blocks * ours[known].mean() / theirs[known].mean()), low=np.nan, high=np.nan
        )
    ratio = st.ratio_interval(theirs[known], ours[known])
    told, low, high = (blocks * (1.0 + each) for each in (ratio.mean, ratio.low, ratio.high))
    return KvBlocks(simulated=blocks, told=float(told), low=float(low), high=float(high))
