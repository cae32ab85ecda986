"""Samples of metrics from a Prometheus server, by range queries of its HTTP API. Nothing is ever written to it."""

from __future__ import annotations

import http.client
import json
import math
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from sim.errors import RooftraceError
from sim.observe.names import all_metrics
from sim.observe.samples import Collected, Matching, Series, read_answer

MOST_POINTS = 10_000
"""Samples of one series in one answer; Prometheus gives 11,000 at most."""
_TIMEOUT_S = 60.0
_SPANS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def instant_of(text: str, option: str, *, now_s: float | None = None) -> float:
    """Unix seconds of *text*: a number, an ISO date and time (UTC without a zone), `now`, or so long ago (90m, 6h, 2d)."""
    now_s = time.time() if now_s is None else now_s
    word = text.strip()
    if word == "now":
        return now_s
    try:
        at_s = now_s - float(word[:-1]) * _SPANS[word[-1]] if word[-1:] in _SPANS else float(word)
        if math.isfinite(at_s):
            return at_s
    except ValueError:
        pass
    try:
        when = datetime.fromisoformat(word.replace("Z", "+00:00"))
    except ValueError:
        raise RooftraceError(
            f"{option} {text!r}: expected a date and time (2026-11-23T10:00), Unix seconds, or so long ago (90m, 6h, 2d)"
        ) from None
    return (
        when.timestamp() if when.tzinfo is not None else datetime.fromisoformat(f"{when.isoformat()}+00:00").timestamp()
    )


def duration_of(text: str, option: str) -> float:
    """Seconds of *text*: a number of them, or one of minutes, hours or days (15m, 1h, 2d)."""
    word = text.strip()
    try:
        seconds = float(word[:-1]) * _SPANS[word[-1]] if word[-1:] in _SPANS else float(word)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e10:
        raise RooftraceError(f"{option} {text!r}: expected a time above 0, such as 900, 15m or 1h")
    return seconds


def query_range(url: str, *, since_s: float, until_s: float, step_s: float, matching: Matching) -> list[Series]:
    """The samples of every known name between two instants, one each *step_s*; RooftraceError where the server gives none."""
    if not until_s > since_s:
        raise RooftraceError("--since is not before --until, so that there is nothing to observe")
    if not step_s > 0:
        raise RooftraceError(f"--step is a time above 0 s; got {step_s:g}")
    selector = "".join(f",{label}={json.dumps(value)}" for label, value in matching.labels.items())
    names = "|".join(all_metrics())
    collected = Collected()
    for begin_s, end_s in _pieces(since_s, until_s, step_s):
        query = {"query": f'{{__name__=~"{names}"{selector}}}', "start": begin_s, "end": end_s, "step": step_s}
        answer = _asked(url, query)
        try:
            read_answer(answer, collected)
        except (KeyError, TypeError, ValueError):
            raise RooftraceError(f"{url} answers /api/v1/query_range with something that is no matrix") from None
    return collected.series(Matching(labels={}))


def _pieces(since_s: float, until_s: float, step_s: float) -> Iterator[tuple[float, float]]:
    """Parts of a range that an answer holds, so that no instant is in two of them."""
    at = 0
    last = int((until_s - since_s) / step_s + 1e-9)
    while at <= last:
        end = min(at + MOST_POINTS - 1, last)
        yield since_s + at * step_s, since_s + end * step_s
        at = end + 1


def _asked(url: str, query: dict[str, Any]) -> Any:
    """The answer to a query, which is posted as a form since names are many; RooftraceError where there is none."""
    if not url.startswith(("http://", "https://")):
        raise RooftraceError(f"--prometheus {url!r}: expected an address such as http://localhost:9090")
    where = f"{url.rstrip('/')}/api/v1/query_range"
    request = urllib.request.Request(where, data=urllib.parse.urlencode(query).encode(), method="POST")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        said = error.read(2000).decode("utf-8", "replace").strip()
        raise RooftraceError(f"{where} answers {error.code}: {said or error.reason}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise RooftraceError(f"{where} does not answer as Prometheus does: {reason}") from None
