"""The jobs of the workers: each answers one question of the page by a generator of events, with what the rest of Rooftrace has."""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sim.explore.answer as answers
from sim.bench.intervals import intervals
from sim.errors import RooftraceError
from sim.report.timeline import write_timeline
from sim.results import Result
from sim.run import run_built
from sim.scenario import Scenario
from sim.scenario.assembly import Built, resolve
from sim.study.advise import proposals
from sim.study.compare import compare as compared
from sim.study.explain import CAUSES, check_explained, explained
from sim.study.rates import own_rate_per_s, target_of
from sim.study.records import beginning, failed, finished
from sim.study.store import Store
from sim.study.what_if import bound, effects

_COMPARED = {
    **{
        f"{measure}_s.{statistic}": f"{name}_{statistic}_s"
        for name, measure in (("ttft", "ttft"), ("tpot", "tpot"), ("e2e", "e2el"))
        for statistic in ("mean", "p50", "p99")
    },
    "requests_per_s": "requests_per_s",
    "output_tokens_per_s": "output_tokens_per_s",
    "slo_attainment": "slo_share",
    "goodput_requests_per_s": "goodput_per_s",
}
"""Figures that two states are compared by, and their names on the page."""
_PAIRS = 5

Events = Iterator[tuple[str, dict[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The subject of a job."""

    key: str
    """The key of the scenario in the store (`sim.study.points.content_key`)."""
    scenario: Scenario
    settings: Mapping[str, Any]
    """Those changed over the scenario that the page was opened with."""
    opened: tuple[str | None, tuple[str, ...]]
    """The file of that scenario, None for the default, and the settings that the command changed in it."""
    store: str
    """The folder of finished runs."""
    most_requests: int

    @property
    def said(self) -> dict[str, Any]:
        return {"commands": answers.commands(self.scenario, self.opened, self.settings)}


class TooMany(RooftraceError):
    """A run of more requests than a page may ask for."""


def built(asked: Asked) -> Built:
    """The experiment to run; TooMany where it has more requests than a page may ask for: before they are drawn, where it says
    so."""
    amount = asked.scenario.workload.requests
    if amount is None or amount <= asked.most_requests:
        found = resolve(asked.scenario)
        amount = len(found.experiment.workload)
        if amount <= asked.most_requests:
            return found
    raise TooMany(
        f"a run on the page has at most {asked.most_requests:,} requests, and this one {amount:,}; set workload.limit or "
        "workload.requests to fewer, or open the page with --most-requests"
    )


def stored(asked: Asked) -> dict[str, Any] | None:
    """The record of an earlier run, here or of a sweep; None where there is none. RooftraceError where it ended with an error."""
    store = Store(Path(asked.store))
    if asked.key not in store:
        return None
    record = store.get(asked.key)
    if "error" in record:
        raise RooftraceError(record["error"])
    return record


def put(asked: Asked, record: Mapping[str, Any]) -> None:
    folder = Path(asked.store)
    folder.mkdir(parents=True, exist_ok=True)
    Store(folder).put(asked.key, json.dumps(record, allow_nan=False))


def ran(asked: Asked) -> tuple[dict[str, Any], Result]:
    """The record of a run, which is put into the store, and the run."""
    record = beginning(asked.key, asked.scenario)
    try:
        of = built(asked)
        result = run_built(of).kept()
        whole = result.or_whole()
        done = {**record, **finished(asked.scenario, of, whole)}
        if whole is not result:
            # Without the window that it asks for, a point of a sweep is a failure.
            done["notes"] = list(whole.manifest["notes"])
            return done, whole
    except TooMany:
        raise  # a sweep may run it
    except RooftraceError as error:
        put(asked, failed(record, str(error)))
        raise
    put(asked, done)
    return done, whole


def exact(asked: Asked) -> Events:
    """The whole run: at once what the store has of it, then what only the run itself has."""
    record = stored(asked)
    if record is not None:
        how = f"Run before: {record['summary']['requests']['total']:,} requests, as the store has them."
        yield "exact", answers.answer(asked.key, asked.scenario, record, kind="exact", how=how, said=asked.said)
    began = time.perf_counter()
    done, result = ran(asked)
    took_s = time.perf_counter() - began
    how = f"Run: {done['summary']['requests']['total']:,} requests in {took_s:.2f} s."
    said = {**asked.said, **answers.course(result)}
    # What was stored stays what is said; the same code gives the same figures.
    answer = answers.answer(asked.key, asked.scenario, record or done, kind="exact", how=how, said=said)
    yield "exact", {**answer, "took_s": took_s}


def estimate(asked: Asked, n: int) -> Events:
    """The first *n* requests alone."""
    short = asked.scenario.with_value("workload.limit", n)
    of = resolve(short)
    result = run_built(of).kept().or_whole()
    record = {**beginning(asked.key, asked.scenario), **finished(short, of, result)}
    total = record["summary"]["requests"]["total"]
    how = f"Estimate: the first {total:,} requests alone, from an empty deployment."
    yield "estimate", answers.answer(asked.key, asked.scenario, record, kind="estimate", how=how, said=asked.said)


def rows(asked: Asked, most: int) -> Events:
    """The requests of a run."""
    yield "rows", answers.rows(run_built(built(asked)), most)


def timeline(asked: Asked) -> Events:
    """The run as Perfetto opens it: JSON, compressed."""
    result = run_built(built(asked))
    columns: Any = result.columns  # the engine's own, since it has just run
    with tempfile.TemporaryDirectory(prefix="rooftrace-explore-") as folder:
        file = Path(folder) / "timeline.json"
        try:
            write_timeline(columns, file, pools=result.manifest.get("pools"))
        except ValueError as error:
            raise RooftraceError(str(error)) from None
        yield "file", {"content": gzip.compress(file.read_bytes(), compresslevel=3)}


def point(asked: Asked) -> Events:
    """The figures of a run, from the store where it has them."""
    record = stored(asked)
    if record is None:
        record, _ = ran(asked)
    yield "point", {"figures": answers.figures(record["summary"], record["gpus"]), **_verdict(asked, record["summary"])}


def _verdict(asked: Asked, summary: Mapping[str, Any]) -> dict[str, Any]:
    return {"slo": answers.kept(asked.scenario, summary), "saturated": summary["saturated"]}


def own_rate(asked: Asked) -> Events:
    """Requests a second that the workload brings by itself."""
    yield "rate", {"rate_per_s": own_rate_per_s(asked.scenario)}


def changes(asked: Asked, groups: Sequence[str]) -> Events:
    """The changes of *groups* that `rooftrace advise` would try."""
    scenario = asked.scenario
    found = [] if scenario.pools is not None or scenario.placement is not None else proposals(scenario, groups)
    yield "changes", {"changes": [{"name": each.name, "settings": dict(each.settings)} for each in found]}


def probability(asked: Asked, replays: int, n: int) -> Events:
    """The share of replays of the first *n* requests, on deployments as they may be, that keep the SLO; none where nothing says how
    far off they may be."""
    workload = asked.scenario.workload
    cut = workload.protocol is None and (workload.limit is None or workload.limit > n)
    try:
        target = target_of(asked.scenario)
        short = asked.scenario.with_value("workload.limit", n) if cut else asked.scenario
        found = intervals(short, replays, ("slo_attainment",))
    except RooftraceError as error:
        yield "probability", {"why_not": str(error)}
        return
    of = f" of the first {n:,} requests" if cut else ""
    how = f"share of {replays} replays{of} that keep the SLO, from {found.basis}"
    yield "probability", {"value": found.kept(target.attainment), "how": how}


def compare(a: Asked, b: Asked) -> Events:
    """The differences of *b* from *a* with their intervals: of one run each over the same requests, or where these differ of
    several runs with the same seeds."""
    one, other = (run_built(built(each)) for each in (a, b))
    metrics = [
        name for name in _COMPARED if None not in (answers.at(one.summary, name), answers.at(other.summary, name))
    ]
    try:
        found = compared(one, other, metrics=metrics)
    except RooftraceError:  # other requests, so that there are no pairs of them
        found = compared(a.scenario, b.scenario, metrics=metrics, replications=_PAIRS, jobs=1)
    rows = {_COMPARED[row["metric"]]: row for row in found.rows()}
    told = ("change", "low", "high", "unit", "verdict")
    yield (
        "compared",
        {"how": found.how, "differences": {name: {key: row[key] for key in told} for name, row in rows.items()}},
    )


def explain(asked: Asked) -> Events:
    """Where the time of tokens goes, what bounds the deployment, and what a tenth more of each resource would change."""
    of = built(asked)
    check_explained(of.experiment)
    result = run_built(of)
    found = explained(of.experiment, result.columns)
    shares = {}
    for name in ("tpot", "ttft"):
        mean, slowest = found.means(f"{name}_s", result.in_window)
        if mean:
            shares[name] = {**_parts(mean), "slowest": _parts(slowest)}
    causes = [{"name": name, "label": label} for name, label in CAUSES.items()]
    yield "explained", {"sentence": bound(found), "causes": causes, **shares}
    for each in effects(of.experiment, result.summary):
        shared = {f"{name}_share": getattr(each, name) for name in ("tpot", "ttft", "e2el")}
        yield "what_if", {"name": each.name, **shared}
    yield "done", {}


def _parts(parts: Mapping[str, float]) -> dict[str, Any]:
    return {"mean_s": sum(parts.values()), "parts": dict(parts)}
