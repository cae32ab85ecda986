"""`vllm bench serve --save-result`, with and without details, and the same in seconds as InferenceX's benchmark_serving.py has it.

vllm-project/vllm, vllm/benchmarks/serve.py (0.6 to 0.32): one JSON object a run. Times between requests are gamma-distributed and
stretched so that all are sent in requests / rate; releases that wrote `request_goodput:` did not stretch them: two published files
end before a last request at that time could have been answered. TTFT counts from when the client's limit lets a request go.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from sim.bench.fields import (
    Fields,
    Unreadable,
    burstiness,
    checked,
    column,
    config,
    latencies_of,
    latency,
    number,
    of_values,
    rate,
    rows_of,
    split_gaps,
)
from sim.bench.measured import BenchRun, Latency, Lengths, Offered, RequestRows, ServerSide

FORMAT = "vllm bench serve"
ENGINES = {"tensorrt-llm": "trtllm"}
"""The engine that a backend asks, by its --help; the other backends ask any server."""
_FIGURE = re.compile(r"^(mean|median|std|p\d+(?:\.\d+)?)_(ttft|tpot|itl|e2el|e2e_latency)(_ms)?$")
_DETAILS = ("input_lens", "output_lens", "ttfts", "itls")
_KNOWN = {
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate", "burstiness"),
    *("max_concurrency", "ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps", "rps_change_events", "duration", "completed"),
    *("failed", "total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput", "request_goodput:"),
    *("output_throughput", "input_throughput", "total_token_throughput", "good_completed", "latencies", "start_times"),
    *("queue_times", "generated_texts", "errors", *_DETAILS),
}  # fmt: skip
_TEXTS = ("generated_texts", "errors")


def is_one(document: Any) -> bool:
    """Whether *document* is a result of it."""
    return (
        isinstance(document, Mapping)
        and "request_throughput" in document
        and ("num_prompts" in document or "model_id" in document)
        and "mean_e2e_latency_ms" not in document
    )


def read(document: Mapping[str, Any], name: str, file: str) -> list[BenchRun]:
    """The run in *document*."""
    fields = Fields(document)
    found = figures(fields)
    if not found and not fields.items("ttfts"):
        raise Unreadable(
            "it has no latencies: no mean_ttft_ms, p99_tpot_ms or the like, and no ttfts of single requests"
        )
    completed, prompts = fields.count("completed"), fields.count("num_prompts")
    if completed is None:
        raise Unreadable("completed, the number of requests that were answered, is missing")
    failed = fields.count("failed")
    notes = []
    if failed is None and prompts is not None:
        if prompts < completed:
            raise Unreadable(f"completed is {completed:,}, more than the {prompts:,} prompts that were sent")
        failed = prompts - completed
        if failed:
            notes.append("failed requests are counted as those of num_prompts that did not complete")
    requests = completed + failed if failed is not None else prompts
    rows, more = single_requests(fields)
    notes += more
    of_rows = {} if rows is None else latencies_of(rows)
    gaps = _gaps(fields)
    itl = of_values([gap for each in gaps for gap in each if gap >= 0])
    taken: dict[str, Any] = {
        key: found.get(key) or (itl if key == "itl" else of_rows.get(key)) for key in ("ttft", "tpot", "itl", "e2el")
    }
    speculation = fields.number("spec_decode_acceptance_length")
    drafted = fields.number("spec_decode_acceptance_rate")
    own_seconds = any(match and not match[3] for match in map(_FIGURE.match, document))
    run = BenchRun(
        name=name,
        file=file,
        format=f"{FORMAT} (seconds)" if own_seconds else FORMAT,
        offered=Offered(
            rate_per_s=rate(document.get("request_rate"), "request_rate"),
            concurrency=positive(fields, "max_concurrency"),
            burstiness=burstiness(document.get("burstiness"), "burstiness"),
            fills_time="request_goodput:" not in document,
            ramp=_ramp(fields),
            requests=requests,
            prompt=lengths(fields, "input_lens", "total_input_tokens", completed),
            output=lengths(fields, "output_lens", "total_output_tokens", completed),
        ),
        duration_s=fields.number("duration"),
        completed=completed,
        failed=failed,
        input_tokens=fields.count("total_input_tokens"),
        output_tokens=fields.count("total_output_tokens"),
        requests_per_s=fields.number("request_throughput"),
        goodput_per_s=fields.first("request_goodput", "request_goodput:"),
        input_tokens_per_s=fields.number("input_throughput"),
        output_tokens_per_s=fields.number("output_throughput"),
        total_tokens_per_s=fields.number("total_token_throughput"),
        rows=rows,
        server=None
        if speculation is None and drafted is None
        else ServerSide(acceptance_length=speculation, accepted=None if drafted is None else drafted / 100),
        config=_config(fields),
        notes=tuple(notes),
        **taken,
        **_split(fields, gaps),
    )
    return [checked(run)]


def figures(fields: Fields) -> dict[str, Latency | None]:
    """The latencies by quantity, of names such as p99_ttft_ms."""
    found: dict[str, dict[str, float]] = {}
    for key in fields.values:
        match = _FIGURE.match(key)
        value = fields.number(key, scale=1e-3 if match[3] else 1.0) if match else None
        if match and value is not None:
            found.setdefault(match[2].replace("e2e_latency", "e2el"), {})[match[1]] = value
    return {name: latency(values) for name, values in found.items()}


def positive(fields: Fields, key: str) -> int | None:
    """The count at *key*, None where it is absent; `Unreadable` for 0."""
    value = fields.count(key)
    if value == 0:
        raise Unreadable(f"{fields.path(key)} is at least 1 or null; got 0")
    return value


def _ramp(fields: Fields) -> dict[str, Any]:
    strategy = fields.text("ramp_up_strategy")
    if strategy is None:
        return {}
    if strategy not in ("linear", "exponential"):
        raise Unreadable(f"ramp_up_strategy is linear or exponential; got {strategy!r}")
    start, end = fields.number("ramp_up_start_rps"), fields.number("ramp_up_end_rps")
    if not start or not end:
        raise Unreadable("ramp_up_strategy needs ramp_up_start_rps and ramp_up_end_rps above 0")
    return {"strategy": strategy, "start_per_s": start, "end_per_s": end}


def lengths(fields: Fields, each: str, total: str, completed: int) -> Lengths:
    """Lengths from the list at *each*, or else their mean from the *total* of those that completed."""
    values = [int(value) for value in column(fields.items(each), each, least=0.0) if math.isfinite(value)]
    amount = fields.count(total)
    mean = amount / completed if amount is not None and completed else None
    if not values:
        return Lengths(mean_tokens=mean)
    # A request that failed has an output of 0; what it would have been is not known, and the others stand for it.
    kept = tuple(value for value in values if value) if each == "output_lens" else tuple(values)
    return Lengths(mean_tokens=mean, each_tokens=kept)


def single_requests(fields: Fields) -> tuple[RequestRows | None, list[str]]:
    """Single requests, where there are details."""
    lists = {key: fields.items(key) for key in (*_DETAILS, "start_times", "latencies", "errors")}
    n = len(lists["ttfts"])
    if not n:
        return None, []
    notes = []
    for key in ("input_lens", "output_lens", "itls", "start_times", "latencies", "errors"):
        if lists[key] and len(lists[key]) != n:
            notes.append(f"{key} has {len(lists[key]):,} entries where ttfts has {n:,}, and is left out")
            lists[key] = []
    nothing = [math.nan] * n
    ttft = column(lists["ttfts"], "ttfts")
    output = column(lists["output_lens"], "output_lens", least=0.0) or nothing
    latencies = column(lists["latencies"], "latencies") or _summed(ttft, lists["itls"]) or nothing
    errors = [bool(error) for error in lists["errors"]] or [False] * n
    failed = [error or length == 0 for error, length in zip(errors, output, strict=True)]
    rows, more = rows_of(
        sent_s=column(lists["start_times"], "start_times") or nothing,
        ttft_s=ttft,
        e2el_s=latencies,
        prompt_tokens=column(lists["input_lens"], "input_lens", least=0.0) or nothing,
        output_tokens=output,
        failed=failed,
    )
    return rows, notes + more


def _summed(ttft: list[float], itls: list[Any]) -> list[float]:
    """Latencies as TTFT and the gaps after it; nothing where the gaps are not given."""
    if not itls:
        return []
    return [
        first + math.fsum(_numbers(gaps, f"itls[{at}]"))
        for at, (first, gaps) in enumerate(zip(ttft, itls, strict=True))
    ]


def _numbers(values: Any, name: str) -> list[float]:
    if isinstance(values, str) or not isinstance(values, list):
        raise Unreadable(f"{name} is a list of gaps in seconds; got {type(values).__name__}")
    found = [number(value, f"{name}[{at}]", least=None) for at, value in enumerate(values)]
    return [value for value in found if value is not None]


def _gaps(fields: Fields) -> list[list[float]]:
    """The gaps between the tokens of each request."""
    return [_numbers(gaps, f"itls[{at}]") for at, gaps in enumerate(fields.items("itls"))]


def _split(fields: Fields, gaps: list[list[float]]) -> dict[str, Any]:
    """The gaps with and without another request's first token, where the file says when requests were sent."""
    sent, ttft = column(fields.items("start_times"), "start_times"), column(fields.items("ttfts"), "ttfts")
    if not len(sent) == len(ttft) == len(gaps):
        return {}
    some = [i for i in range(len(gaps)) if ttft[i] > 0 and math.isfinite(sent[i])]
    return split_gaps([sent[i] + ttft[i] for i in some], [gaps[i] for i in some])


def _config(fields: Fields) -> dict[str, str | int | float | bool]:
    values = fields.values
    own = {
        key: value
        for key, value in values.items()
        if key not in _KNOWN
        and not _FIGURE.match(key)
        and isinstance(value, str | int | float | bool)
        and key not in _TEXTS
    }
    return config(
        model=values.get("model_id"),
        tokenizer=values.get("tokenizer_id"),
        backend=values.get("backend") or values.get("endpoint_type"),
        label=values.get("label"),
        date=values.get("date"),
        **{key: value for key, value in own.items() if key not in ("model", "tokenizer")},
    )
