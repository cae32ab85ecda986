"""Plain CSV files with named columns: one measured run a row, or one request a row (a production log).

A run's columns are a load (rate_req_s, concurrency), lengths and figures such as ttft_mean_s or p99_tpot_ms; a request's are when
it came, when its first token and its end came, and its tokens. What a run's row says beyond that is kept as its configuration.
"""

from __future__ import annotations

import csv
import datetime
import io
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sim.bench.fields import LARGEST, Unreadable, checked, latency, number, rate, rows_of, run_of_rows, whole_number
from sim.bench.measured import BenchRun, Lengths, Offered, ServerSide

FORMAT = "table of runs"
LOG = "request log"
_QUANTITIES = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2e": "e2el", "e2el": "e2el", "latency": "e2el"}
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_NAMES = "|".join(_QUANTITIES)
_STATISTIC = r"mean|avg|median|std|min|max|p\d+(?:\.\d+)?"
_BEFORE = re.compile(rf"^(server_)?({_NAMES})_({_STATISTIC})_({'|'.join(_UNITS)})$")
_AFTER = re.compile(rf"^({_STATISTIC})_({_NAMES})_({'|'.join(_UNITS)})$")
_OFFERED = (
    "offered_rate_req_s",
    "requested_rate_req_s",
    "rate_req_s",
    "rate_per_s",
    "request_rate",
    "rps",
    "qps",
    "rate",
)
_COMPLETED = ("completed_rate_req_s", "request_rate_req_s", "request_throughput", "requests_per_s")
_CONCURRENCY = ("concurrency", "max_concurrency")
_PROMPT = ("prompt_tokens_mean", "input_tokens_mean", "input_tokens", "prompt_tokens", "isl", "mean_input_tokens")
_OUTPUT = ("output_tokens_mean", "output_tokens", "osl", "output_tokens_retokenised_mean", "mean_output_tokens")
_REQUESTS = ("requests", "num_prompts", "num_requests", "completed")
_TIMES = {
    "sent": re.compile(
        r"^(arrival|arrived|sent|start|started|timestamp|request_start|arrival_time|start_time)(?:_(s|ms|us|ns))?$",
        re.I,
    ),
    "first": re.compile(r"^(first_token|first_token_time)(?:_(s|ms|us|ns))?$", re.I),
    "ttft": re.compile(r"^(ttft|time_to_first_token)_(s|ms|us|ns)$", re.I),
    "end": re.compile(
        r"^(last_token|end|ended|finish|finished|end_time|finish_time|completed_at)(?:_(s|ms|us|ns))?$", re.I
    ),
    "e2el": re.compile(r"^(e2e|e2el|latency|request_latency|duration)_(s|ms|us|ns)$", re.I),
}
"""Names of the columns of times in a log, with a unit or without."""
_NEEDED = {("first", "ttft"): "first tokens (first_token_s or ttft_s)", ("end", "e2el"): "ends (end_s or e2el_s)"}
_TOKENS = {
    "prompt": ("prompt_tokens", "input_tokens", "input_toks", "input_length", "num_prompt_tokens", "contexttokens"),
    "output": (
        "output_tokens",
        "output_toks",
        "generated_tokens",
        "output_length",
        "num_output_tokens",
        "completion_tokens",
        "generatedtokens",
    ),
}
_FAILED = ("failed", "error", "status")
_FINE = ("", "0", "false", "no", "none", "null", "ok", "success", "200", "finished", "stop", "length", "completed")
_NOTHING = ("", "nan", "null", "none", "n/a", "-")


def heads_of(text: str) -> list[str]:
    """The names in the first line of *text*; none where it is no table."""
    first = text.lstrip().partition("\n")[0]
    if "," not in first or len(first) > 100_000:
        return []
    return [head.strip() for head in next(csv.reader([first]), [])]


def is_runs(text: str) -> bool:
    """Whether *text* is a table with a figure of a latency, and so of runs."""
    return any(_figure(head) for head in heads_of(text))


def is_log(text: str) -> bool:
    """Whether *text* is a table of requests with their times."""
    found = {what for head in heads_of(text) for what, pattern in _TIMES.items() if pattern.match(head)}
    return "sent" in found and len(found) > 1


def read_runs(text: str, name: str, file: str) -> tuple[list[BenchRun], list[str]]:
    """A run for each row of *text*, and a sentence for each row that is none."""
    found, problems = [], []
    for at, row in enumerate(_table(text)):
        try:
            found.append(checked(_run(row, f"{name}, row {at + 1}", file)))
        except Unreadable as error:
            problems.append(f"row {at + 1}: {error}")
    if not found and not problems:
        raise Unreadable("the table has no rows")
    return found, problems


def _table(text: str) -> list[dict[str, str]]:
    try:
        reader = csv.reader(io.StringIO(text.lstrip()))
        heads = [head.strip() for head in next(reader, [])]
        twice = next((head for at, head in enumerate(heads) if head and head in heads[:at]), None)
        if twice is not None:
            raise Unreadable(f"the column {twice} is there twice, and which one counts is not said")
        rows = []
        for at, cells in enumerate(reader):
            if not any(cell.strip() for cell in cells):
                continue
            if len(cells) != len(heads):
                raise Unreadable(
                    f"row {at + 1} has {len(cells)} cells where the head has {len(heads)}; the file is cut off or broken"
                )
            rows.append(dict(zip(heads, (cell.strip() for cell in cells), strict=True)))
    except csv.Error as error:
        raise Unreadable(f"it is not a CSV file: {error}") from None
    return rows


def _number(row: dict[str, str], name: str, *, scale: float = 1.0, least: float | None = 0.0) -> float | None:
    text = row.get(name, "")
    if text.lower() in _NOTHING:
        return None
    try:
        value = float(text)
    except ValueError:
        raise Unreadable(f"{name} is a number; got {text[:60]!r}") from None
    return number(value, name, scale=scale, least=least)


class _Figure(NamedTuple):
    """The parts of the name of a column with a latency."""

    server: bool
    quantity: str
    statistic: str
    unit_s: float


def _figure(head: str) -> _Figure | None:
    """The latency that the column *head* has; None for any other column."""
    match = _BEFORE.match(head)
    if match:
        server, quantity, statistic, unit = match.groups()
    elif match := _AFTER.match(head):
        server, (statistic, quantity, unit) = None, match.groups()
    else:
        return None
    statistic = "mean" if statistic == "avg" else statistic
    return _Figure(server is not None, _QUANTITIES[quantity], statistic, _UNITS[unit])


class _Row:
    """The cells of a row by the names of their columns, and which of them have been used."""

    def __init__(self, cells: dict[str, str]) -> None:
        self._cells = cells
        self._used = set[str]()

    def latencies(self, *, server: bool) -> dict[str, Any]:
        """The latencies by quantity that the clients, or the server, measured."""
        found: dict[str, dict[str, float]] = {}
        for head in self._cells:
            figure = _figure(head)
            if figure is None or figure.server != server:
                continue
            self._used.add(head)
            value = _number(self._cells, head, scale=figure.unit_s)
            if value is not None:
                found.setdefault(figure.quantity, {})[figure.statistic] = value
        return {quantity: latency(values) for quantity, values in found.items()}

    def first(self, *heads: str) -> float | None:
        """The number in the first of these columns that has one."""
        for head in heads:
            value = _number(self._cells, head)
            if value is not None:
                self._used.add(head)
                return value
        return None

    def concurrency(self) -> int | None:
        """Requests in flight, of clients in a closed loop."""
        found = self.first(*_CONCURRENCY)
        if found is not None and (found < 1 or found != int(found)):
            raise Unreadable(f"concurrency is a whole number of at least 1; got {found:g}")
        return whole_number(found)

    def offered_rate(self, concurrency: int | None) -> float | None:
        """Requests a second that were offered; None where a request_rate is what came out of a closed loop."""
        head = next((head for head in _OFFERED if self._cells.get(head, "").lower() not in _NOTHING), None)
        if head is None or (head == "request_rate" and concurrency is not None):
            return None
        self._used.add(head)
        text = self._cells[head]
        return rate(text if "inf" in text.lower() else _number(self._cells, head), head)

    def rest(self) -> dict[str, str | float | int]:
        """The cells that have not been used, and the model's name."""
        model = {"model": self._cells["model"]} if self._cells.get("model") else {}
        others = {head: text for head, text in self._cells.items() if head not in (*self._used, *model)}
        return {**model, **{head: _plain(text) for head, text in others.items() if text.lower() not in _NOTHING}}


def _run(cells: dict[str, str], name: str, file: str) -> BenchRun:
    row = _Row(cells)
    clients, server = row.latencies(server=False), row.latencies(server=True)
    if not clients:
        raise Unreadable("no latency is given")
    concurrency = row.concurrency()
    rate_per_s, completed_per_s = row.offered_rate(concurrency), row.first(*_COMPLETED)
    requests, failed = row.first(*_REQUESTS), row.first("failures", "failed", "errors")
    completed = None if requests is None else requests - (failed or 0)
    duration_s, notes = row.first("duration_s", "benchmark_duration_s"), ()
    if duration_s is None and completed and completed_per_s:
        duration_s = completed / completed_per_s
        notes = ("the duration is worked out from the requests and the rate at which they completed",)
    tokens_per_s = {
        f"{side}_tokens_per_s": row.first(f"{side}_tokens_per_s", f"{side}_throughput_tokens_s")
        for side in ("input", "output", "total")
    }
    return BenchRun(
        name=name,
        file=file,
        format=FORMAT,
        offered=Offered(
            rate_per_s=rate_per_s,
            concurrency=concurrency,
            burstiness=row.first("burstiness"),
            requests=whole_number(requests),
            duration_s=row.first("sending_s", "stage_s"),
            prompt=Lengths(mean_tokens=row.first(*_PROMPT)),
            output=Lengths(mean_tokens=row.first(*_OUTPUT)),
        ),
        duration_s=duration_s,
        completed=whole_number(completed),
        failed=whole_number(failed),
        requests_per_s=completed_per_s,
        goodput_per_s=row.first("goodput_req_s"),
        **tokens_per_s,
        server=ServerSide(**server) if server else None,
        config=row.rest(),
        notes=notes,
        **clients,
    )


def _plain(text: str) -> str | float | int:
    try:
        value = float(text)
    except ValueError:
        return text
    if not math.isfinite(value):
        return text
    return int(value) if value == int(value) and abs(value) < 1e15 and "." not in text else value


def read_log(text: str, name: str, file: str) -> list[BenchRun]:
    """The run whose requests are the rows of *text*: an open load, sent when it was."""
    rows = _table(text)
    if not rows:
        raise Unreadable("the table has no rows")
    times, tokens = _log_columns(list(rows[0]))
    sent_s = _seconds(rows, *times["sent"])

    def after_sent(span: str, instant: str) -> np.ndarray:
        return _seconds(rows, *times[span]) if span in times else _seconds(rows, *times[instant]) - sent_s

    known = {"sent_s": sent_s, "ttft_s": after_sent("ttft", "first"), "e2el_s": after_sent("e2el", "end")}
    for side, head in tokens.items():
        values = [_number(row, head) for row in rows]
        known[f"{side}_tokens"] = np.array([math.nan if value is None else value for value in values])
    failing = next((head for head in rows[0] if head.lower() in _FAILED), None)
    failed = np.array([failing is not None and row[failing].lower() not in _FINE for row in rows])
    lacking = np.isnan(list(known.values())).any(axis=0)
    notes = []
    if (lacking & ~failed).any():
        n_lacking = int((lacking & ~failed).sum())
        notes.append(f"{n_lacking} rows lack a time or a count of tokens and are counted as failed")
    found, more = rows_of(**known, failed=failed | lacking)
    if (np.diff(found.sent_s[np.isfinite(found.sent_s)]) < 0).any():
        notes.append("rows are not in order of arrival, and are put in order")
    return [run_of_rows(found, [*notes, *more], name=name, file=file, format=LOG)]


def _log_columns(heads: Sequence[str]) -> tuple[dict[str, tuple[str, str | None]], dict[str, str]]:
    """The columns of a log by what they have: times, each with its unit, and tokens. `Unreadable` where some are absent."""
    times: dict[str, tuple[str, str | None]] = {}
    for head in heads:
        for what, pattern in _TIMES.items():
            if match := pattern.match(head):
                times.setdefault(what, (head, match[2]))
    by_side = ((side, next((head for head in heads if head.lower() in names), "")) for side, names in _TOKENS.items())
    tokens = {side: head for side, head in by_side if head}
    absent = [f"{side} tokens ({names[0]})" for side, names in _TOKENS.items() if side not in tokens]
    absent += [text for kinds, text in _NEEDED.items() if times.keys().isdisjoint(kinds)]
    if absent:
        raise Unreadable(f"a log of requests needs columns of {' and of '.join(absent)}")
    return times, tokens


def _seconds(rows: list[dict[str, str]], head: str, unit: str | None) -> np.ndarray:
    """The times of a column: numbers in its unit (seconds without one), or dates as ISO 8601 has them."""
    scale = _UNITS[(unit or "s").lower()]
    found = []
    for at, row in enumerate(rows):
        text = row[head]
        if text.lower() in _NOTHING:
            value = math.nan
        else:
            try:
                value = float(text) * scale
            except ValueError:
                value = _date(text, f"{head} of row {at + 1}")
        if abs(value) > LARGEST:
            raise Unreadable(f"{head} of row {at + 1} is a finite time; got {text[:60]!r}")
        found.append(value)
    return np.array(found)


def _date(text: str, name: str) -> float:
    try:
        found = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise Unreadable(f"{name} is a number or a date; got {text[:60]!r}") from None
    return (found if found.tzinfo else found.replace(tzinfo=datetime.UTC)).timestamp()
