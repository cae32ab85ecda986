"""One observation from end to end: metrics and logs read, traffic rebuilt, the stack fitted, the present replayed and compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sim.bench.fitting import Fit
from sim.bench.overlay import stack_text
from sim.errors import RooftraceError
from sim.observe.curves import Observed, observed
from sim.observe.drift import Cause, Change, causes, changes
from sim.observe.fit import KvBlocks, kv_blocks
from sim.observe.fit import fit as fitted
from sim.observe.logs import is_log, observed_of, read_logs
from sim.observe.query import query_range
from sim.observe.replay import Beside, Replayed, beside, hours, replay
from sim.observe.samples import Matching, read_files
from sim.observe.traffic import Arrival, ObservedTraffic, observed_traffic
from sim.scenario import Scenario
from workloads.write import write_whole

if TYPE_CHECKING:
    from workloads import Trace

FloatArray = NDArray[np.float64]
TRACE, SCENARIO, STACK = "requests.csv", "observed.yaml", "stack.toml"
"""Files of an observation's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where metrics and logs come from: files, or a Prometheus server between two instants."""

    files: tuple[Path, ...] = ()
    url: str | None = None
    since_s: float | None = None
    until_s: float | None = None
    step_s: float = 15.0
    match: tuple[str, ...] = ()

    def read(self) -> tuple[Observed, Arrival | None]:
        """The quantities that were observed, and the requests where they were logged; RooftraceError where there is nothing."""
        matching = Matching.of(self.match)
        paths = [path.resolve() for path in self.files]
        if len(set(paths)) < len(paths):
            raise RooftraceError("a file is given twice, so that its requests would count twice; give each once")
        logged = read_logs([path for path in self.files if is_log(path)], matching)
        scraped = [path for path in self.files if not is_log(path)]
        if self.url is not None and scraped:
            raise RooftraceError(
                f"{scraped[0]} is no log of requests, and beside --prometheus only logs are read; give metrics by one way"
            )
        if self.url is not None:
            if self.since_s is None or self.until_s is None:
                raise RooftraceError("a Prometheus server is asked between two instants; give --since and --until")
            series = query_range(
                self.url, since_s=self.since_s, until_s=self.until_s, step_s=self.step_s, matching=matching
            )
            if not series:
                raise RooftraceError(
                    f"{self.url} has none of the names that are known between those two instants; is --match too narrow, or does "
                    "it scrape another fleet?"
                )
            return _completed(observed(series, self.url), logged), logged
        if scraped:
            notes: list[str] = []
            series = read_files(scraped, matching, notes)
            if not series and self.match:
                raise RooftraceError(
                    f"{scraped[0]}: no sample has what --match {' --match '.join(self.match)} asks for"
                )
            seen = observed(series, ", ".join(map(str, scraped[:3])))
            return _completed(replace(seen, notes=(*seen.notes, *notes)), logged), logged
        if logged is None:
            raise RooftraceError("give files of metrics or logs, or --prometheus URL")
        return observed_of(logged), logged


def _completed(seen: Observed, logged: Arrival | None) -> Observed:
    """*seen* with the latencies and counts of a log where the metrics have none."""
    if logged is None or logged.e2el_s is None or not np.isfinite(logged.e2el_s).any():
        return seen
    other = observed_of(logged)
    return replace(
        seen,
        counters={**other.counters, **seen.counters},
        histograms={**other.histograms, **seen.histograms},
        missing=tuple(
            each for each in seen.missing if not each.startswith(("TTFT", "ITL", "The number", "The lengths"))
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """The way in which an observation is replayed."""

    every_s: float | None = None
    """The intervals by which both are compared; None: an hour, or a twelfth of less than half a day."""
    fits: bool = True
    replications: int = 3
    """Draws of the traffic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A deployment as it was observed, beside the simulation of its present."""

    seen: Observed
    traffic: ObservedTraffic
    edges_s: FloatArray
    told: Scenario
    """The scenario as it was given."""
    present: Scenario
    """The same with what was fitted, and the KV blocks that were observed."""
    replayed: Replayed
    beside: Beside
    fit: Fit | None
    kv: KvBlocks | None
    changes: tuple[Change, ...]
    causes: tuple[Cause, ...]
    notes: tuple[str, ...] = ()


def traffic_of(
    source: Source, seen: Observed, logged: Arrival | None, *, prompt_tokens: float | None = None,
    output_tokens: float | None = None,
) -> ObservedTraffic:  # fmt: skip
    """The traffic that *source* shows."""
    return observed_traffic(
        seen, since_s=source.since_s, until_s=source.until_s, prompt_tokens=prompt_tokens, output_tokens=output_tokens,
        logged=logged,
    )  # fmt: skip


def observe(
    scenario: Scenario, seen: Observed, traffic: ObservedTraffic, *, out: Path, files: Sequence[str] = (),
    how: How | None = None,
) -> Observation:  # fmt: skip
    """The deployment of *scenario* fitted to what was *seen*, replayed under the observed *traffic*, and compared hour by hour.

    The folder *out* exists; the fitted stack, the scenario of the present and its requests are written there. *files* are named in
    the stack.
    """
    how, notes = how or How(), list[str]()
    begin_s, end_s = (traffic.begin_s + float(traffic.edges_s[at]) for at in (0, -1))
    edges_s = hours(begin_s, end_s, seen.scrape_s, how.every_s)
    told, said = scenario, list(seen.kv_blocks.values())
    given = scenario.memory.kv_blocks is not None
    if said and not given:
        scenario = scenario.with_value("memory.kv_blocks", round(float(np.median(said))))
    present, found = scenario, None
    if how.fits and scenario.stack_file is not None:
        notes.append(f"serving_stack is {scenario.serving_stack}, a fit already, and stays as it is")
    elif how.fits:
        found = fitted(scenario, seen, traffic, kv_known=bool(said) or given)
        write_whole(out / STACK, stack_text(found, scenario, files, []))
        present = scenario.with_value("serving_stack", str((out / STACK).resolve()))
    seeds = range(present.seed, present.seed + how.replications)
    replayed = replay(present, traffic, edges_s, seeds=seeds)
    both = beside(seen, edges_s, replayed)
    machines, instances = replayed.runs[0].machines, len(seen.instances)
    if instances > 1 and machines != instances:
        notes.append(
            f"metrics are of {instances} instances, and the scenario has {machines} machines; if they are the same fleet: "
            f"--set replicas={instances}"
        )
    blocks = int(replayed.runs[0].columns.meta["kv_blocks_total"][0])
    kv = kv_blocks(both, blocks, said)
    if kv is not None and not kv.exact and not given and not kv.low <= blocks <= kv.high and np.isfinite(kv.low):
        notes.append(
            f"KV use tells {kv.told:,.0f} blocks a machine ({kv.low:,.0f} to {kv.high:,.0f}) where memory has room for {blocks:,}: "
            "the present has those that it tells"
        )
        present = present.with_value("memory.kv_blocks", max(1, round(kv.told)))
        replayed = replay(present, traffic, edges_s, seeds=seeds)
        both = beside(seen, edges_s, replayed)
    write(present, traffic.workload(present.seed), out)
    return Observation(
        seen=seen,
        traffic=traffic,
        edges_s=edges_s,
        told=told,
        present=present,
        replayed=replayed,
        beside=both,
        fit=found,
        kv=kv,
        changes=tuple(changes(both)),
        causes=tuple(causes(seen, edges_s, replayed)),
        notes=tuple(notes),
    )


def write(present: Scenario, trace: Trace, out: Path) -> None:
    """The scenario of the present and its requests into the folder *out*, where `rooftrace run` and `advise` take them."""
    trace.to_csv(out / TRACE)
    settings = {**present.settings_from_anywhere(), "workload": {"trace": TRACE}}
    if (out / STACK).is_file() and present.serving_stack == str((out / STACK).resolve()):
        settings["serving_stack"] = STACK
    write_whole(out / SCENARIO, Scenario.from_mapping(settings, source=SCENARIO, folder=out).to_yaml())
