"""Requests that a server or gateway logged one by one: access logs, OpenTelemetry spans and tables with a row a request.

Columns are found by the names that traces are read by (`workloads.synonyms`), OpenTelemetry's conventions for generative AI among
them, and by those of `_MORE`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.errors import RooftraceError
from sim.observe.curves import Counted, Curve, Observed
from sim.observe.samples import Matching
from sim.observe.traffic import NO_CLASS, Arrival, taken
from workloads.records import Rows, rows_of
from workloads.synonyms import SYNONYMS, matching, unit_of
from workloads.times import moments_ns

_MORE: Mapping[str, tuple[str, ...]] = {
    "arrival": ("arrival_s", "start_s", *SYNONYMS["arrival"]),
    "session": ("gen_ai_conversation_id", *SYNONYMS["session"], "user"),
    "instance": (
        *("instance", "pod", "replica", "k8s_pod_name", "service_instance_id", "server_address", "upstream_host"),
        *("upstream_addr", "worker_id", "endpoint"),
    ),
    "cached_tokens": (
        *("cached_tokens", "cache_read_input_tokens", "usage_cache_read_input_tokens", "prefix_hit_tokens"),
        "client_hit_tokens",
    ),
    "ttft": (
        *("time_to_first_token", "ttft", "ttft_s", "ttft_ms", "latency_time_to_first_token", "time_to_first_chunk"),
        "server_time_to_first_token",
    ),
    "e2el": ("latency_e2e", "e2e_latency", "e2el_s", "e2e_ms", "e2e_s", "duration", "duration_s", "duration_ms"),
}
_DATED_S = 1e8
"""Times below this count from a beginning of their own and are no Unix time."""
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


def is_log(path: Path) -> bool:
    """Whether a file is a log of requests rather than of metrics: JSON lines, or a table without the times of scrapes."""
    names = path.name.lower()
    if names.endswith((".jsonl", ".jsonl.gz", ".ndjson", ".parquet")):
        return True
    if not names.endswith(".csv"):
        return False
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return "t_s" not in file.readline().strip().split(",")
    except OSError:
        return False


def read_logs(files: Sequence[Path], match: Matching) -> Arrival | None:
    """The requests of *files* by arrival; None without a file. RooftraceError names the column that a file lacks."""
    parts = [_read(path, match) for path in files]
    if not parts:
        return None
    if len({bool(each.at_s.min() < _DATED_S) for each in parts}) > 1:
        raise RooftraceError(
            "some logs have dates and others count from a beginning of their own, so that they cannot be laid together; observe "
            "them one by one"
        )
    joined = parts[0] if len(parts) == 1 else _joined(parts)
    return taken(joined, np.argsort(joined.at_s, kind="stable"))


def _read(path: Path, match: Matching) -> Arrival:
    try:
        rows = rows_of(path, None)
    except (ValueError, OSError) as error:
        raise RooftraceError(f"{path}: {error}") from None
    of = {field: _column(rows, names) for field, names in {**SYNONYMS, **_MORE}.items()}
    for field in ("arrival", "prompt_tokens", "output_tokens"):
        if of[field] is None:
            raise RooftraceError(
                f"{path}: no column says {field.replace('_', ' ')}; there are {', '.join(rows.names[:20])}. rooftrace trace "
                "convert writes a log whose columns it has, with --map FIELD=COLUMN for others"
            )
    at_s = _moments(path, rows, of["arrival"] or "")
    prompt, output = (_numbers(rows, of[name]) for name in ("prompt_tokens", "output_tokens"))
    asked = _kept(path, rows, match)
    keep = asked & np.isfinite(at_s) & (np.nan_to_num(prompt) >= 1) & (np.nan_to_num(output) >= 1)
    if not keep.any():
        raise RooftraceError(
            f"{path}: none of its {asked.sum():,} rows is a request with a time, a prompt and an output"
        )
    ttft, e2el = (_seconds(rows, of[name]) for name in ("ttft", "e2el"))
    if e2el is None and of["end"] is not None:
        e2el = _moments(path, rows, of["end"]) - at_s
    notes = []
    if left_out := int((asked & ~keep).sum()):
        notes.append(f"{path}: {left_out:,} of {asked.sum():,} rows left out: no time, prompt or output")
    if e2el is not None:
        early = (e2el < 0) if ttft is None else (e2el < 0) | (e2el < ttft)
        e2el = np.where(early, np.nan, e2el)
        if n := int((early & keep).sum()):
            notes.append(
                f"{path}: {n:,} rows end before they begin or before their first token, and count as without an end"
            )
    cached = (
        None
        if of["cached_tokens"] is None
        else np.nan_to_num(_numbers(rows, of["cached_tokens"]), nan=-1).astype(np.int64)
    )
    found = Arrival(
        at_s=at_s,
        prompt_tokens=np.nan_to_num(prompt).astype(np.int64),
        output_tokens=np.nan_to_num(output).astype(np.int64),
        cached_tokens=cached,
        session=_sessions(rows, of["session"]),
        instance=None if of["instance"] is None else tuple(str(each or "") for each in rows.column(of["instance"])),
        service_class=tuple(str(each or NO_CLASS) for each in rows.column("class")) if "class" in rows.names else None,
        ttft_s=ttft,
        e2el_s=e2el,
        notes=tuple(notes),
    )
    return taken(found, np.flatnonzero(keep))


def _column(rows: Rows, names: Sequence[str]) -> str | None:
    return next((name for name, _ in matching(rows.names, names)), None)


def _moments(path: Path, rows: Rows, column: str) -> NDArray[np.float64]:
    found, bad, _ = moments_ns(rows.column(column), unit_of(column))
    if bad is not None:
        raise RooftraceError(f"{path}: row {rows.numbers[bad]} of {column} is no time")
    return np.array([np.nan if each is None else each * 1e-9 for each in found])


def _numbers(rows: Rows, column: str | None) -> NDArray[np.float64]:
    values = [] if column is None else rows.column(column)
    found = np.full(len(rows), np.nan)
    for row, value in enumerate(values):
        try:
            found[row] = float(value)
        except (TypeError, ValueError):
            continue
    return found


def _seconds(rows: Rows, column: str | None) -> NDArray[np.float64] | None:
    """A column of times in seconds, by the unit that its name ends in; seconds without one, as the conventions have it."""
    return None if column is None else _numbers(rows, column) * _SECONDS[unit_of(column) or "s"]


def _sessions(rows: Rows, column: str | None) -> NDArray[np.int64] | None:
    if column is None:
        return None
    names: dict[str, int] = {}
    return np.array([-1 if not each else names.setdefault(str(each), len(names)) for each in rows.column(column)])


def _kept(path: Path, rows: Rows, match: Matching) -> NDArray[np.bool_]:
    """The rows that say what *match* asks for; RooftraceError where a column is not there or none does."""
    kept = np.ones(len(rows), bool)
    for label, value in match.labels.items():
        if label not in rows.names:
            raise RooftraceError(
                f"{path}: --match {label}: no column is called that; there are {', '.join(rows.names[:20])}"
            )
        kept &= np.array([str(each) == value for each in rows.column(label)])
    if not kept.any():
        raise RooftraceError(f"{path}: none of its {len(rows):,} rows has what --match asks for")
    return kept


def _joined(parts: Sequence[Arrival]) -> Arrival:
    """Several logs together. What one of them does not say is not known of any, but for classes; conversations of two logs are
    apart."""
    sessions = None
    if all(each.session is not None for each in parts):
        first, shifted = 0, []
        for each in parts:
            assert each.session is not None
            shifted.append(np.where(each.session < 0, -1, each.session + first))
            first += int(each.session.max(initial=-1)) + 1
        sessions = np.concatenate(shifted)

    def column(name: str) -> NDArray[Any] | None:
        values = [getattr(each, name) for each in parts]
        return None if any(each is None for each in values) else np.concatenate(values)

    instances, classes = column("instance"), None
    if any(each.service_class is not None for each in parts):
        classes = tuple(name for each in parts for name in each.service_class or (NO_CLASS,) * len(each))
    return Arrival(
        at_s=np.concatenate([each.at_s for each in parts]),
        prompt_tokens=np.concatenate([each.prompt_tokens for each in parts]),
        output_tokens=np.concatenate([each.output_tokens for each in parts]),
        cached_tokens=column("cached_tokens"),
        session=sessions,
        instance=None if instances is None else tuple(instances.tolist()),
        service_class=classes,
        ttft_s=column("ttft_s"),
        e2el_s=column("e2el_s"),
        notes=tuple(note for each in parts for note in each.notes),
    )


_INSTANTS = 400
"""Instants at which requests in flight are counted."""


def observed_of(logged: Arrival) -> Observed:
    """A deployment without metrics, as its log describes it: counts at the instants at which requests ended or had their first
    token.

    RooftraceError where it has no end of requests.
    """
    if logged.e2el_s is None or not np.isfinite(logged.e2el_s).any():
        raise RooftraceError(
            "the log does not say when requests ended (a duration or an end), so that it shows no rate of its own"
        )
    ended_s = logged.at_s + logged.e2el_s
    known = np.isfinite(ended_s)
    names = np.array(logged.instance if logged.instance is not None else [""] * len(logged))
    begin_s, end_s = float(logged.at_s.min()), max(float(ended_s[known].max()), float(logged.at_s.max()))
    instants_s = np.linspace(begin_s, end_s, _INSTANTS)
    counters: dict[str, dict[str, Curve]] = {"finished": {}, "prompt_tokens": {}, "output_tokens": {}}
    gauges: dict[str, dict[str, Curve]] = {"in_flight": {}}
    histograms: dict[str, dict[str, Counted]] = {}
    for name in dict.fromkeys(names.tolist()):
        mine = np.flatnonzero((names == name) & known)
        one = np.ones(len(mine))
        amounts = {
            "finished": one,
            "prompt_tokens": logged.prompt_tokens[mine],
            "output_tokens": logged.output_tokens[mine],
        }
        for quantity, amount in amounts.items():
            counters[quantity][name] = _counted_up(ended_s[mine], amount, begin_s)
        came, gone = np.sort(logged.at_s[mine]), np.sort(ended_s[mine])
        level = np.searchsorted(came, instants_s, "right") - np.searchsorted(gone, instants_s, "right")
        gauges["in_flight"][name] = Curve(at_s=instants_s, values=level.astype(np.float64))
        for quantity, at_s, n, seconds in _latencies(logged, mine, ended_s):
            keep = np.isfinite(at_s) & np.isfinite(seconds) & (n > 0)
            if keep.any():
                histograms.setdefault(quantity, {})[name] = Counted(
                    count=_counted_up(at_s[keep], n[keep], begin_s),
                    total=_counted_up(at_s[keep], seconds[keep], begin_s),
                    edges=np.empty(0),
                )
    return Observed(
        makers=("a log of requests",),
        begin_s=begin_s,
        end_s=end_s,
        scrape_s=(end_s - begin_s) / (_INSTANTS - 1),
        counters=counters,
        gauges=gauges,
        histograms=histograms,
        notes=(
            "metrics were not given: rates, requests in flight and latencies are those of the log, and KV use is not known",
        ),
    )


def _latencies(
    logged: Arrival, mine: NDArray[np.int64], ended_s: NDArray[np.float64]
) -> Iterator[tuple[str, NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]]:
    """Quantity, instants, how many values and their sum, of the requests *mine*."""
    assert logged.e2el_s is not None
    one = np.ones(len(mine))
    yield "e2el", ended_s[mine], one, logged.e2el_s[mine]
    if logged.ttft_s is not None:
        ttft_s = logged.ttft_s[mine]
        yield "ttft", logged.at_s[mine] + ttft_s, one, ttft_s
        yield "itl", ended_s[mine], (logged.output_tokens[mine] - 1).astype(np.float64), logged.e2el_s[mine] - ttft_s


def _counted_up(at_s: NDArray[np.float64], amounts: NDArray[Any], begin_s: float) -> Curve:
    order = np.argsort(at_s, kind="stable")
    return Curve(
        at_s=np.concatenate(([begin_s], at_s[order])), values=np.concatenate(([0.0], np.cumsum(amounts[order])))
    )
