"""The highest request rate that a scenario carries: one search, whatever is to be kept and however often a rate is run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sim.errors import RooftraceError
from sim.metrics import limits_in
from sim.processes import ProcessPool
from sim.results.words import limit_text
from sim.run import simulate
from sim.scenario import Scenario
from sim.scenario.workload import workload_of
from sim.study import statistics as st
from sim.study.notes import Noted, Notes
from sim.under_way import steps, under_way

ATTAINMENT = 0.99
REPLICATIONS = 3
MOST_REPLICATIONS = 12
TOLERANCE = 0.03
_MOST_PROBES = 40
_GIVE = "give slo.ttft_s, slo.tpot_s or slo.e2el_s, or limits of percentiles such as slo.ttft_p95_s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The limits that a run must keep to count, beside a queue that is steady and the limits of means and percentiles in its
    `slo`."""

    attainment: float | None = ATTAINMENT
    """Share of requests that meet the scenario's `slo`."""
    tbt_p99_s: float | None = None
    """99th percentile of token gaps; Sarathi-Serve's limit."""
    queue_p50_s: float | None = None
    """Median time until the first iteration of a request; two seconds in Sarathi-Serve, section 5."""
    all_finish: bool = False
    """Whether a request that is rejected, or has not ended, is a miss by itself."""

    def __post_init__(self) -> None:
        if self.attainment is not None and not 0 < self.attainment <= 1:
            raise RooftraceError(f"attainment is a share above 0 and at most 1; got {self.attainment}")
        for name in ("tbt_p99_s", "queue_p50_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise RooftraceError(f"{name} is a finite number of seconds above 0; got {value}")

    def miss(self, summary: Mapping[str, Any]) -> str | None:
        """The first limit that one run's summary misses, in words; None where it meets all."""
        found = self.miss_beside_attainment(summary)
        if found is not None or self.attainment is None:
            return found
        value = summary["slo_attainment"]
        if value is None:
            raise RooftraceError(f"an attainment needs limits of each request: {_GIVE}")
        if value < self.attainment:
            # Rounded down, so that 98.96 % does not read as the 99.0 % that it misses.
            return f"{math.floor(1000 * value) / 10:.1f}% of requests within the SLO < {self.attainment:.1%}"
        return None

    def miss_beside_attainment(self, summary: Mapping[str, Any]) -> str | None:
        """`miss` of all but the attainment, of which several runs together say more."""
        if self.all_finish:
            total, finished = summary["requests"]["total"], summary["requests"]["finished"]
            if finished < total:
                return f"{total - finished} of {total} requests did not finish"
        if summary["saturated"]:
            return "saturated: the queue still grows when arrivals end"
        if self.tbt_p99_s is not None:
            value = summary["itl_s"]["p99"]
            if value is not None and value > self.tbt_p99_s:
                return f"p99 gap between tokens {value:.3f} s > {self.tbt_p99_s:g} s"
        if self.queue_p50_s is not None:
            value = summary["queue_s"]["p50"]
            if value is not None and value > self.queue_p50_s:
                return f"median delay {value:.3f} s > {self.queue_p50_s:g} s"
        for name, key, limit in limits_in(summary):
            if not limit["kept"]:
                return f"{name}: {limit_text(key, limit)}" if name else limit_text(key, limit)
        return None


def target_of(scenario: Scenario, attainment: float = ATTAINMENT) -> Target:
    """The target of *scenario*'s `slo`: *attainment* where requests have limits of their own. Where only means and percentiles have
    limits, which do not see a request that is rejected, every request has to finish. RooftraceError where there is no limit."""
    if not scenario.has_limits:
        raise RooftraceError(f"there is no SLO to keep: {_GIVE}")
    of_each = scenario.has_request_limits
    return Target(attainment=attainment if of_each else None, all_finish=not of_each)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Whether a target is met at one rate: True, False, or None where the replications leave it open."""

    rate_per_s: float
    met: bool | None
    attainment: st.Interval | None
    """None where the scenario has no `slo`."""
    why: str
    runs: int

    @property
    def miss(self) -> str | None:
        """Why the rate does not count; None where it does. What stays open counts as missed."""
        return None if self.met else self.why


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """The highest rate found at which the target is met (0.0: none was), and the lowest tried at which it is not."""

    rate_per_s: float
    outside_per_s: float
    judgements: tuple[Judgement, ...]
    level: float = st.LEVEL
    notes: tuple[Noted, ...] = ()
    """Notes of the runs, each with the rates that it holds for."""

    def __str__(self) -> str:
        return f"{self.rate_per_s:.4g} requests/s (not at {self.outside_per_s:.4g}; {len(self.judgements)} rates tried)"


def judge(summaries: Sequence[Mapping[str, Any]], target: Target, rate_per_s: float, *, level: float) -> Judgement:
    """The judgement of runs at one rate about *target*.

    Of one run, whether it misses a limit. Of several: missed where most of them miss a limit beside the attainment, or where
    the whole interval of their attainment lies below; met where all of it lies at or above; open otherwise. Where every
    replication attains the same, there is nothing to weigh.
    """
    shares = [summary["slo_attainment"] for summary in summaries]
    interval = None if None in shares else st.mean_interval(shares, level=level)

    def verdict(met: bool | None, why: str) -> Judgement:
        return Judgement(rate_per_s=rate_per_s, met=met, attainment=interval, why=why, runs=len(summaries))

    if len(summaries) == 1:
        found = target.miss(summaries[0])
        return verdict(found is None, found or "within all limits")
    misses = [found for found in map(target.miss_beside_attainment, summaries) if found is not None]
    if 2 * len(misses) > len(summaries):
        return verdict(False, misses[0])
    if target.attainment is None:
        return verdict(True, f"{len(summaries) - len(misses)} of {len(summaries)} runs within all limits")
    if interval is None:
        raise RooftraceError(f"an attainment needs limits of each request: {_GIVE}")
    half = 0.0 if math.isnan(interval.half_width) else interval.half_width
    low, high = interval.mean - half, interval.mean + half
    met = True if low >= target.attainment else False if high < target.attainment else None
    sure = {True: "within", False: "outside", None: "open"}[met]
    return verdict(met, f"{interval.mean:.2%} attained, {sure}")


def highest_rate(
    scenario: Scenario,
    target: Target | None = None,
    *,
    replications: int = REPLICATIONS,
    most_replications: int = MOST_REPLICATIONS,
    tolerance: float = TOLERANCE,
    level: float = st.LEVEL,
    on_judgement: Callable[[Judgement], None] = lambda _: None,
) -> Rate:
    """The highest arrival rate at which *scenario* meets *target*, by bisection over `workload.rate_scale`.

    Every rate is judged by replications on the same random numbers, faster or slower; with one there is no confidence in
    the verdict. With several, more are added up to *most_replications* while the interval straddles the target, and what
    stays open counts as missed: the answer errs on the safe side. Each look at the interval is at *level*, and looking
    again after every replication makes the verdict less sure than that: of rates that attain exactly the target, one look
    at three replications takes 2.5 % for met, and looks at 3, 4, ... 12 together 9 % (normal attainments, by simulation).
    The bracket is narrowed to *tolerance*, as a share of the rate. RooftraceError for an attainment without an `slo`, and
    for clients that wait for answers, who have no rate.
    """
    target = target or target_of(scenario)
    if target.attainment is not None:
        target_of(scenario)
    if replications < 1:
        raise RooftraceError(f"a rate is judged by at least 1 run; got {replications} replications")
    # A second run adds confidence only where the first was to be one of several.
    most = 1 if replications == 1 else max(replications, most_replications)
    versions = [scenario.with_value("seed", scenario.seed + i) for i in range(most)]
    own = [own_rate_per_s(version) for version in versions]
    scale = scenario.workload.rate_scale
    judgements: list[Judgement] = []
    notes = Notes()

    def probe(rate: float) -> str | None:
        summaries: list[Mapping[str, Any]] = []
        noted: list[str] = []
        while True:
            wanted = replications if not summaries else len(summaries) + 1
            for version, own_rate in list(zip(versions, own, strict=True))[len(summaries) : wanted]:
                result = simulate(version.with_value("workload.rate_scale", scale * rate / own_rate))
                summaries.append(result.summary)
                noted += result.manifest["notes"]
            found = judge(summaries, target, rate, level=level)
            if found.met is not None or len(summaries) >= most:
                break
        notes.add(f"{rate:.4g} requests/s", noted)
        judgements.append(found)
        on_judgement(found)
        return found.miss

    within, outside = bisect(probe, start_per_s=sum(own) / len(own), tolerance=tolerance)
    return Rate(rate_per_s=within, outside_per_s=outside, judgements=tuple(judgements), level=level, notes=notes.found)


def highest_rates(
    scenarios: Sequence[Scenario],
    target: Target | None = None,
    *,
    jobs: int | None = None,
    replications: int = REPLICATIONS,
    tolerance: float = TOLERANCE,
) -> list[Rate]:
    """`highest_rate` of each of *scenarios*, in their order, on *jobs* processes (None: all cores)."""
    if jobs is None:
        import joblib

        jobs = joblib.cpu_count()
    search = partial(highest_rate, target=target, replications=replications, tolerance=tolerance)
    jobs = min(jobs, len(scenarios))
    if jobs == 1:
        return [search(each) for each in steps(scenarios, unit="candidates")]
    with ProcessPool(jobs) as pool:
        searches = [pool.submit(search, each) for each in scenarios]
        return [each.result() for each in steps(searches, unit="candidates")]


def bisect(
    probe: Callable[[float], str | None],
    *,
    start_per_s: float,
    tolerance: float = 0.02,
    most_probes: int = _MOST_PROBES,
) -> tuple[float, float]:
    """The highest rate found at which *probe* misses no limit (0.0: none was), and the lowest at which it misses one.

    *probe* takes requests a second and returns the limit missed, or None. It is taken to be monotone: what fails at a
    rate fails at all above. The two are at most *tolerance* apart, as a share of the lower. RooftraceError if either is
    not found in *most_probes* runs.
    """
    if not start_per_s > 0 or not 0 < tolerance < 1:
        raise ValueError(f"start_per_s is a rate above 0 and tolerance in (0, 1); got {start_per_s!r}, {tolerance!r}")
    low, high, rate, tried, probes = 0.0, math.inf, start_per_s, start_per_s, 0

    def in_all() -> float | None:
        """Probes from the first to the last, once there is a rate on both sides."""
        known = low > 0.0 and not math.isinf(high)
        return probes + max(math.ceil(math.log2((high - low) / (tolerance * low))), 0) if known else None

    with under_way(unit="rates", done=lambda: probes, total=in_all):
        for _ in range(most_probes):
            tried = rate
            missed = probe(rate)
            probes += 1
            if missed is None:
                low = rate
            else:
                high = rate
            if math.isinf(high):
                rate = 2 * rate
            elif low == 0.0:
                if rate < start_per_s / 2**12:
                    return 0.0, high
                rate /= 2
            elif high - low <= tolerance * low:
                return low, high
            else:
                rate = (low + high) / 2
    raise RooftraceError(
        f"no limit of capacity found up to {tried:.4g} requests/s in {most_probes} runs; "
        "tighten the limits or give more requests"
    )


def own_rate_per_s(scenario: Scenario) -> float:
    """Requests a second that *scenario*'s workload brings by itself; RooftraceError where it has no rate."""
    arrival_ns = workload_of(scenario).planned_ns
    if arrival_ns is None:
        raise RooftraceError("closed-loop clients have no arrival rate to search; give other workload.arrivals")
    span_s = float(arrival_ns[-1] - arrival_ns[0]) * 1e-9
    if span_s <= 0:
        raise RooftraceError("all requests arrive at once, so there is no rate to search; give arrivals over time")
    return (len(arrival_ns) - 1) / span_s
