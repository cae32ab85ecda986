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
from typing import Any

import numpy as np

from sim.bench.fields import LARGEST, Unreadable, checked, latency, number, rate, rows_of, run_of_rows
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
_ARRIVAL = re.compile(
    r"^(arrival|arrived|sent|start|started|timestamp|request_start|arrival_time|start_time)(?:_(s|ms|us|ns))?$", re.I
)
_FIRST = re.compile(r"^(first_token|first_token_time)(?:_(s|ms|us|ns))?$", re.I)
_TTFT = re.compile(r"^(ttft|time_to_first_token)_(s|ms|us|ns)$", re.I)
_END = re.compile(r"^(end|ended|finish|finished|end_time|finish_time|completed_at)(?:_(s|ms|us|ns))?$", re.I)
_LATENCY = re.compile(r"^(e2e|e2el|latency|request_latency|duration)_(s|ms|us|ns)$", re.I)
_TOKENS = {
    "prompt": ("prompt_tokens", "input_tokens", "input_length", "num_prompt_tokens", "contexttokens"),
    "output": (
        "output_tokens",
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
    heads = heads_of(text)
    return any(_ARRIVAL.match(head) for head in heads) and any(
        pattern.match(head) for head in heads for pattern in (_FIRST, _TTFT, _END, _LATENCY)
    )


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


def _first(row: dict[str, str], names: Sequence[str]) -> tuple[str | None, float | None]:
    for name in names:
        value = _number(row, name) if name in row else None
        if value is not None:
            return name, value
    return None, None


def _figure(head: str) -> tuple[bool, str, str, float] | None:
    """The parts of a column's name: whether it is the server's, the quantity, the statistic and the unit in seconds; None for any
    other."""
    match = _BEFORE.match(head)
    if match:
        server, quantity, statistic, unit = match.groups()
    elif match := _AFTER.match(head):
        server, (statistic, quantity, unit) = None, match.groups()
    else:
        return None
    return server is not None, _QUANTITIES[quantity], "mean" if statistic == "avg" else statistic, _UNITS[unit]


def _run(row: dict[str, str], name: str, file: str) -> BenchRun:
    figures: dict[bool, dict[str, dict[str, float]]] = {False: {}, True: {}}
    used = set()
    for head in row:
        of = _figure(head)
        if of is None:
            continue
        used.add(head)
        value = _number(row, head, scale=of[3])
        if value is not None:
            figures[of[0]].setdefault(of[1], {})[of[2]] = value
    taken: dict[str, Any] = {key: latency(values) for key, values in figures[False].items()}
    if not taken:
        raise Unreadable("no latency is given")

    def first(names: Sequence[str]) -> float | None:
        head, value = _first(row, names)
        if head is not None:
            used.add(head)
        return value

    concurrency = first(_CONCURRENCY)
    if concurrency is not None and (concurrency < 1 or concurrency != int(concurrency)):
        raise Unreadable(f"concurrency is a whole number of at least 1; got {concurrency:g}")
    offered_head = next((head for head in _OFFERED if row.get(head, "").lower() not in _NOTHING), None)
    # With clients in a closed loop a rate is what came out of it.
    closed = concurrency is not None and offered_head == "request_rate"
    per_s = None
    if offered_head is not None and not closed:
        used.add(offered_head)
        text = row[offered_head]
        per_s = rate(text if "inf" in text.lower() else _number(row, offered_head), offered_head)
    completed_per_s = first(_COMPLETED)
    requests, failed = first(_REQUESTS), first(("failures", "failed", "errors"))
    prompt, output = first(_PROMPT), first(_OUTPUT)
    duration, notes = first(("duration_s", "benchmark_duration_s")), []
    completed = None if requests is None else requests - (failed or 0)
    if duration is None and completed and completed_per_s:
        duration = completed / completed_per_s
        notes.append("the duration is worked out from the requests and the rate at which they completed")
    burst = first(("burstiness",))
    model = row.get("model") or None
    used |= {"model"} if model else set()
    given = {key: first((f"{key}_tokens_per_s", f"{key}_throughput_tokens_s")) for key in ("input", "output", "total")}
    goodput = first(("goodput_req_s",))
    sending = first(("sending_s", "stage_s"))
    server = {key: latency(values) for key, values in figures[True].items()}
    return BenchRun(
        name=name,
        file=file,
        format=FORMAT,
        offered=Offered(
            rate_per_s=per_s,
            concurrency=None if concurrency is None else int(concurrency),
            burstiness=burst,
            requests=None if requests is None else int(requests),
            duration_s=sending,
            prompt=Lengths(mean_tokens=prompt),
            output=Lengths(mean_tokens=output),
        ),
        duration_s=duration,
        completed=None if completed is None else int(completed),
        failed=None if failed is None else int(failed),
        requests_per_s=completed_per_s,
        goodput_per_s=goodput,
        input_tokens_per_s=given["input"],
        output_tokens_per_s=given["output"],
        total_tokens_per_s=given["total"],
        server=ServerSide(**server) if server else None,  # type: ignore[arg-type]
        config={
            **({"model": model} if model else {}),
            **{head: _plain(text) for head, text in row.items() if head not in used and text.lower() not in _NOTHING},
        },
        notes=tuple(notes),
        **{key: taken.get(key) for key in ("ttft", "tpot", "itl", "e2el")},
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
    heads = list(rows[0])
    arrival, first, ttft, end, whole = (
        next(((head, match[2]) for head in heads if (match := pattern.match(head))), None)
        for pattern in (_ARRIVAL, _FIRST, _TTFT, _END, _LATENCY)
    )
    assert arrival is not None
    tokens = {side: next((head for head in heads if head.lower() in names), None) for side, names in _TOKENS.items()}
    absent = [f"{side} tokens ({names[0]})" for side, names in _TOKENS.items() if tokens[side] is None]
    if first is None and ttft is None:
        absent.append("first tokens (first_token_s or ttft_s)")
    if end is None and whole is None:
        absent.append("ends (end_s or e2el_s)")
    if absent:
        raise Unreadable(f"a log of requests needs columns of {' and of '.join(absent)}")
    sent = _times(rows, arrival)
    begun = [0.0] * len(rows)
    ttft_s = _times(rows, ttft, since=begun) if ttft is not None else _times(rows, first, since=sent)
    e2el_s = _times(rows, whole, since=begun) if whole is not None else _times(rows, end, since=sent)
    failing = next((head for head in heads if head.lower() in _FAILED), None)
    bad = [failing is not None and row[failing].lower() not in _FINE for row in rows]
    columns = {
        side: [math.nan if (value := _number(row, str(tokens[side]))) is None else value for row in rows]
        for side in tokens
    }
    lacking = [
        any(math.isnan(value) for value in values)
        for values in zip(sent, ttft_s, e2el_s, columns["prompt"], columns["output"], strict=True)
    ]
    notes = []
    n_lacking = sum(one and not other for one, other in zip(lacking, bad, strict=True))
    if n_lacking:
        notes.append(f"{n_lacking} rows lack a time or a count of tokens and are counted as failed")
    found, more = rows_of(
        sent_s=sent,
        ttft_s=ttft_s,
        e2el_s=e2el_s,
        prompt_tokens=columns["prompt"],
        output_tokens=columns["output"],
        failed=[one or other for one, other in zip(bad, lacking, strict=True)],
    )
    sent_again = found.sent_s[np.isfinite(found.sent_s)]
    if (np.diff(sent_again) < 0).any():
        notes.append("rows are not in order of arrival, and are put in order")
    return [run_of_rows(found, [*notes, *more], name=name, file=file, format=LOG)]


def _times(rows: list[dict[str, str]], of: Any, *, since: list[float] | None = None) -> list[float]:
    """Seconds of a column, less *since*; numbers in its unit (seconds without one), or dates as ISO 8601 has them."""
    head, unit = of
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
        found.append(value if since is None else value - since[at])
    return found


def _date(text: str, name: str) -> float:
    try:
        found = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise Unreadable(f"{name} is a number or a date; got {text[:60]!r}") from None
    return (found if found.tzinfo else found.replace(tzinfo=datetime.UTC)).timestamp()
