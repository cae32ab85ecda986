"""A fleet that runs: its present state, the traffic so far, and what a control policy would do. Nothing is written to it."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np

from policies.control import Forecast, Outlook, Perfect, PoolSeen, Seen, highest, remembers_s, stabilised, wanted_of
from sim.bench.formats.prometheus import text_sample
from sim.engine.spec.lifecycle import Scaling
from sim.errors import RooftraceError
from sim.observe.curves import Observed, observed
from sim.observe.names import makers
from sim.observe.query import query_range
from sim.observe.samples import Collected, Matching, Series
from sim.observe.traffic import observed_traffic
from sim.scenario import Scenario
from sim.scenario.assembly import build

_QUANTITIES = ("came", "finished", "running", "waiting", "in_flight", "kv_used", "prompt_tokens", "output_tokens")
"""The quantities that the page needs; nothing else is kept."""
_SHOWN_S = 3600.0
"""The least past that is asked of a Prometheus server."""
_TIMEOUT_S = 5.0
_MOST_BYTES = 16 << 20


class Source(Protocol):
    """Gives the samples of a deployment."""

    where: str

    def series(self, now_s: float, since_s: float) -> list[Series]:
        """Those between two instants, Unix time; RooftraceError where they cannot be had."""
        ...


def source_of(urls: Sequence[str]) -> Source:
    """The source at *urls*: addresses that end in /metrics are endpoints, one other address is a Prometheus server."""
    for url in urls:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            raise RooftraceError(f"--watch {url!r}: expected an address such as http://localhost:8000/metrics")
    endpoints = [url for url in urls if urlsplit(url).path.endswith("/metrics")]
    if len(endpoints) == len(urls):
        return Endpoints(urls)
    if len(urls) > 1:
        raise RooftraceError("--watch takes several addresses that end in /metrics, or that of one Prometheus server")
    return Prometheus(urls[0])


def _wanted_names() -> frozenset[str]:
    return frozenset(
        name
        for maker in makers().values()
        if maker.role == "engine"
        for each in _QUANTITIES
        for name in maker.names_of(each)
    )


_PICK = "explore watches one deployment and has no --match: give --watch the /metrics of its own servers, once for each"


class _Kept:
    """Samples that were read, the latest so many seconds of them."""

    def __init__(self) -> None:
        self._names = _wanted_names()
        self._rows: deque[tuple[float, str, tuple[tuple[str, str], ...], float]] = deque()

    def add(self, at_s: float, metric: str, labels: Mapping[str, str], value: float) -> None:
        if metric in self._names and isfinite(value):
            self._rows.append((at_s, metric, tuple(sorted(labels.items())), value))

    def series(self, since_s: float) -> list[Series]:
        while self._rows and self._rows[0][0] < since_s:
            self._rows.popleft()
        collected = Collected()
        for at_s, metric, labels, value in self._rows:
            collected.add(metric, dict(labels), at_s, value)
        return collected.series(Matching(labels={}))


class Endpoints:
    """The /metrics of one or more servers, read each time that somebody asks; the past is what was read before."""

    def __init__(self, urls: Sequence[str], read: Callable[[str], str] | None = None) -> None:
        self.where = ", ".join(urls)
        self._urls, self._read, self._kept = tuple(urls), read or _text_at, _Kept()

    def series(self, now_s: float, since_s: float) -> list[Series]:
        failed: list[str] = []
        for url in self._urls:
            try:
                text = self._read(url)
            except RooftraceError as error:
                failed.append(str(error))
                continue
            for line in text.splitlines():
                sample = None if not line or line.startswith("#") else text_sample(line.strip())
                if sample is not None:
                    self._kept.add(
                        now_s, sample.name, {"instance": urlsplit(url).netloc, **sample.labels}, sample.value
                    )
        if len(failed) == len(self._urls):
            raise RooftraceError(failed[0])
        return self._kept.series(since_s)


class Prometheus:
    """A Prometheus server: each time, what has come since the time before."""

    def __init__(self, url: str) -> None:
        self.where, self._kept = url, _Kept()
        self._until_s: float | None = None

    def series(self, now_s: float, since_s: float) -> list[Series]:
        step_s = 15.0
        begin_s = since_s if self._until_s is None else self._until_s + step_s
        end_s = begin_s + (now_s - begin_s) // step_s * step_s
        if end_s > begin_s:
            found = query_range(self.where, since_s=begin_s, until_s=end_s, step_s=step_s, matching=Matching(labels={}))
            rows = [(at, each, value) for each in found for at, value in zip(each.at_s, each.values, strict=True)]
            for at_s, each, value in sorted(rows, key=lambda row: row[0]):
                self._kept.add(float(at_s), each.metric, each.labels, float(value))
            self._until_s = end_s
        return self._kept.series(since_s)


def _text_at(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:
            return response.read(_MOST_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise RooftraceError(f"{url} does not answer: {getattr(error, 'reason', error)}") from None


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """A pool's policy and the number of machines that it may go to."""

    name: str
    """The policy's name in the scenario."""
    scaling: Scaling
    most: int


def bounds_of(scenario: Scenario) -> Bounds | None:
    """The settings of `autoscale` in *scenario*; None without it. RooftraceError for a policy that cannot watch."""
    if scenario.autoscale is None:
        return None
    fleet = build(scenario).fleet
    scaling = None if fleet is None else fleet.scaling[0]
    assert scaling is not None
    if isinstance(scaling.policy, Perfect):
        raise RooftraceError(
            "autoscale.policy: perfect knows when requests come, which nobody does of a fleet that runs"
        )
    return Bounds(name=scenario.autoscale.policy.policy, scaling=scaling, most=scenario.autoscale.max)


class Watched:
    """A deployment as it is looked at again and again: what the policy has asked for since."""

    def __init__(self, source: Source, scenario: Scenario, clock: Callable[[], float] = time.time) -> None:
        self.where = source.where
        self._source, self._clock = source, clock
        self._bounds = bounds_of(scenario)
        self._interval_s = 15.0 if self._bounds is None else self._bounds.scaling.interval_s
        self._asked: deque[tuple[float, int]] = deque()
        self.every_s = max(self._interval_s / 4, 5.0)
        """Seconds between two looks."""

    def look(self) -> dict[str, Any]:
        """The view of the page at this instant."""
        now_s = self._clock()
        remembers = 0.0 if self._bounds is None else remembers_s(self._bounds.scaling.policy)
        series = self._source.series(now_s, now_s - max(remembers + 2 * self._interval_s, _SHOWN_S))
        found: dict[str, Any] = {"now_s": now_s, "interval_s": self._interval_s, "where": self.where}
        if len({at for each in series for at in each.at_s.tolist()}) < 2:
            return {**found, "waits": f"There is one look so far; rates need two, {self.every_s:g} s apart."}
        seen = observed(series, self.where, _PICK)
        edges_s, past = self._past(seen)
        found |= _fleet(seen, past, self._interval_s)
        if len(past):
            found["history"] = {
                "time_s": edges_s[1:].tolist(),
                "rate_per_s": [pool.came / self._interval_s for pool in past],
                "running": [pool.running for pool in past],
                "waiting": [pool.waiting for pool in past],
            }
        else:
            found["waits"] = f"The first interval of {self._interval_s:g} s is not over yet."
        if self._bounds is not None and past:
            found["policy"] = self._decided(self._bounds, past, float(edges_s[-1]))
        return found

    def _past(self, seen: Observed) -> tuple[np.ndarray, list[PoolSeen]]:
        """The ends of intervals that are over, at whole multiples of the interval, and the pool at the end of each."""
        every_s = self._interval_s
        first, last = np.ceil(seen.begin_s / every_s), np.floor(seen.end_s / every_s)
        edges_s = np.arange(first, last + 1) * every_s
        if len(edges_s) < 2:
            return edges_s, []
        traffic = observed_traffic(seen, since_s=edges_s[0], until_s=edges_s[-1], every_s=every_s)
        # Whole requests whose running total is that of what came.
        came = np.diff(np.concatenate(([0], np.rint(np.cumsum(traffic.arrivals))))).astype(np.int64)
        finished, tokens = (seen.grown(name, edges_s) for name in ("finished", "output_tokens"))
        ends = edges_s[1:]
        running, waiting = _in_flight(seen, ends)
        kv = seen.gauge("kv_used", edges_s)
        ready = _instances(seen, ends)
        return edges_s, [
            PoolSeen(
                machines=int(ready[i]),
                ready=int(ready[i]),
                waiting=round(float(waiting[i])),
                running=round(float(running[i])),
                kv_use=0.0 if kv is None or np.isnan(kv[i]) else float(kv[i]),
                came=int(came[i]),
                finished=0 if finished is None else round(float(finished[i])),
                finished_tokens=0 if tokens is None else round(float(tokens[i])),
            )
            for i in range(len(ends))
        ]

    def _decided(self, bounds: Bounds, past: list[PoolSeen], at_s: float) -> dict[str, Any]:
        scaling, policy, mine = bounds.scaling, bounds.scaling.policy, past[-1]
        kept = max(int(remembers_s(scaling.policy) / self._interval_s + 1e-9), 1)
        seen = Seen(now_s=at_s, interval_s=self._interval_s, mine=mine, pools={"all": mine}, past=tuple(past[-kept:]))
        asked = wanted_of(policy)(seen)
        if not self._asked or self._asked[-1][0] < at_s:
            self._asked.append((at_s, asked))
        longest_s = max(scaling.down_window_s, scaling.up_window_s)
        while self._asked[0][0] <= at_s - longest_s and len(self._asked) > 1:
            self._asked.popleft()
        if scaling.hpa == "default":
            settled = highest(tuple(self._asked), at_s, scaling.down_window_s)
        else:
            settled = stabilised(
                tuple(self._asked), at_s, mine.machines,
                down_window_s=scaling.down_window_s, up_window_s=scaling.up_window_s,
            )  # fmt: skip
        wanted = min(max(settled, scaling.min_machines), bounds.most)
        outlook = policy.outlook(seen) if isinstance(policy, Forecast) else None
        return {
            "name": bounds.name,
            "asks": asked,
            "goes_to": wanted,
            "looks_again_s": at_s + self._interval_s,
            "does": _does(wanted, mine.machines),
            "why": [*_why(bounds, outlook, asked, mine, self._interval_s), *_held_back(bounds, asked, settled, wanted)],
            **({"forecast": _drawn(outlook)} if outlook is not None else {}),
        }


def _fleet(seen: Observed, past: Sequence[PoolSeen], interval_s: float) -> dict[str, Any]:
    at = np.array([seen.end_s])
    running, waiting = _in_flight(seen, at)
    kv = seen.gauge("kv_used", np.array([seen.end_s - 1.5 * seen.scrape_s, seen.end_s + 1e-3]))
    figures: dict[str, Any] = {
        "machines": {"value": int(_instances(seen, at)[0]), "unit": ""},
        "running": {"value": round(float(running[0])), "unit": ""},
        "waiting": {"value": round(float(waiting[0])), "unit": ""},
    }
    if kv is not None and not np.isnan(kv[0]):
        figures["kv_used_share"] = {"value": float(kv[0]), "unit": "share"}
    if past:
        figures["arrivals_per_s"] = {"value": past[-1].came / interval_s, "unit": "req/s"}
    return {"at_s": seen.end_s, "serves": ", ".join((*seen.makers, *seen.models)), "figures": figures}


def _in_flight(seen: Observed, at_s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Requests that run and that wait; where a server counts only those in flight, they run."""
    running, waiting = (seen.level(name, at_s) for name in ("running", "waiting"))
    if running is None and waiting is None:
        running = seen.level("in_flight", at_s)
    nothing = np.zeros(len(at_s))
    return nothing if running is None else running, nothing if waiting is None else waiting


def _instances(seen: Observed, at_s: np.ndarray) -> np.ndarray:
    """How many servers answered about then."""
    near = 1.5 * seen.scrape_s
    there = {
        name: (float(each.at_s[0]) - near, float(each.at_s[-1]) + near)
        for table in (*seen.counters.values(), *seen.gauges.values()) for name, each in table.items()
    }  # fmt: skip
    return np.sum([(at_s >= low) & (at_s <= high) for low, high in there.values()], axis=0)


def _drawn(outlook: Outlook) -> dict[str, Any]:
    begins = [outlook.begin_s + i * outlook.step_s for i in range(len(outlook.rates_per_s))]
    return {
        "time_s": [at for begin in begins for at in (begin, begin + outlook.step_s)],
        "rate_per_s": [rate for rate in outlook.rates_per_s for _ in range(2)],
    }


def _does(wanted: int, have: int) -> str:
    if wanted == have:
        return f"It would leave the {_machines(have)} that there are."
    return (
        f"It would start {_machines(wanted - have)}."
        if wanted > have
        else f"It would drain {_machines(have - wanted)}."
    )


def _machines(n: int) -> str:
    return f"{n} machine" + ("" if n == 1 else "s")


def _why(bounds: Bounds, outlook: Outlook | None, asked: int, mine: PoolSeen, interval_s: float) -> list[str]:
    """Why the policy asks for as many as it does."""
    ran = "1 request" if mine.running == 1 else f"{mine.running} requests"
    now = (
        f"{ran} ran and {mine.waiting} waited on {_machines(mine.ready)}, and {mine.came / interval_s:.3g} a second came in the "
        "last interval"
    )
    policy = bounds.scaling.policy
    if outlook is None or not isinstance(policy, Forecast):
        return [f"{now}: {bounds.name} asks for {_machines(asked)}."]
    more = f", {policy.headroom:.0%} of headroom" if policy.headroom else ""
    waits = f", and {outlook.waiting_per_s:.3g} a second for what waits" if outlook.waiting_per_s else ""
    found = [
        f"{now}.",
        f"Until a machine that starts now would serve, {max(outlook.rates_per_s):.3g} requests a second at most are "
        f"forecast{more}{waits}: at {policy.rate_per_s:.3g} a second each, {_machines(outlook.machines)}.",
    ]
    if asked > outlook.machines:
        within = "the policy within it asks for more" if policy.inner is not None else "somebody waits"
        found.append(f"It asks for {_machines(asked)}, since {within}.")
    return found


def _held_back(bounds: Bounds, asked: int, settled: int, wanted: int) -> list[str]:
    """The reason that keeps the fleet from going to what is asked for."""
    found: list[str] = []
    if settled > asked:
        found.append(f"{_machines(settled)} stay, as many as were asked for within {bounds.scaling.down_window_s:g} s.")
    if settled < asked:
        found.append(f"More come only when they were asked for throughout {bounds.scaling.up_window_s:g} s.")
    if wanted != settled:
        limit = f"max {bounds.most}" if wanted < settled else f"min {bounds.scaling.min_machines}"
        found.append(f"The scenario's {limit} holds it at {_machines(wanted)}.")
    return found
