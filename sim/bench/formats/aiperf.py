"""AIPerf and genai-perf: aggregates as JSON or CSV, and AIPerf's requests as JSON lines.

ai-dynamo/aiperf, triton-inference-server/perf_analyzer. Their inter-token latency is a value a request, (latency - TTFT) /
(tokens - 1), which is TPOT here; AIPerf's inter-chunk latency is a value a gap. Units stand beside the figures.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sim.bench.fields import (
    Fields,
    Unreadable,
    checked,
    config,
    latency,
    lengths,
    number,
    of_values,
    rate,
    rows_of,
    run_of_rows,
    whole_number,
)
from sim.bench.measured import BenchRun, Latency, Lengths, Offered

FORMAT = "AIPerf"
_STATISTICS = {"avg": "mean", "p50": "median", "std": "std", "min": "min", "max": "max"}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "seconds": 1.0, "nanoseconds": 1e-9}
_SECONDS |= {"milliseconds": 1e-3, "microseconds": 1e-6}
_NAMES = {
    "time_to_first_token": "ttft", "request_latency": "request_latency", "inter_token_latency": "inter_token_latency",
    "inter_chunk_latency": "inter_chunk_latency", "input_sequence_length": "input_sequence_length",
    "output_sequence_length": "output_sequence_length", "request_count": "request_count",
    "error_request_count": "error_request_count", "request_throughput": "request_throughput",
    "output_token_throughput": "output_token_throughput", "benchmark_duration": "benchmark_duration",
    "total_input_sequence_length": "total_isl", "total_output_sequence_length": "total_osl", "total_isl": "total_isl",
    "total_osl": "total_osl", "ttft": "ttft",
}  # fmt: skip
"""The name of a figure in JSON of either tool, or in words as CSV heads have it -> its tag."""


def is_aggregate(document: Any) -> bool:
    """Whether *document* is an aggregate as JSON."""
    if not isinstance(document, Mapping):
        return False
    values = document.get("records", document)
    return isinstance(values, Mapping) and any(
        isinstance(values.get(key), Mapping) and "unit" in values[key]
        for key in ("request_latency", "request_throughput")
    )


def is_lines(documents: Sequence[Any]) -> bool:
    """Whether *documents* are requests, one a line."""
    return bool(documents) and any(
        isinstance(one, Mapping)
        and isinstance(one.get("metadata"), Mapping)
        and isinstance(one.get("metrics"), Mapping)
        for one in documents
    )


def is_csv(text: str) -> bool:
    """Whether *text* is an aggregate as CSV."""
    return re.match(r"\s*\"?Metric\"?\s*,\s*\"?(avg|Value)\"?", text, re.IGNORECASE) is not None


def read(document: Mapping[str, Any], name: str, file: str) -> list[BenchRun]:
    """The run in an aggregate."""
    fields = Fields(document)
    values = fields.inner("records") if "records" in document else fields
    figures = {}
    for key, tag in _NAMES.items():
        if isinstance(values.values.get(key), Mapping):
            figures.setdefault(tag, values.inner(key))
    tool = (
        FORMAT
        if "records" in document or "aiperf_version" in document or "schema_version" in document
        else "genai-perf"
    )
    tool = FORMAT if "aiperf" in str(fields.inner("input_config").values.get("cli_command", "")) else tool
    return [checked(_run(figures, fields.inner("input_config"), name, file, f"{tool} JSON", fields))]


def read_csv(text: str, name: str, file: str) -> list[BenchRun]:
    """The run in an aggregate as CSV: tables one under the other, each with a head that begins with Metric."""
    figures: dict[str, Fields] = {}
    heads: list[str] = []
    try:
        lines = list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise Unreadable(f"it is not a CSV file: {error}") from None
    for line in lines:
        cells = [cell.strip() for cell in line]
        if not any(cells):
            heads = []
            continue
        if cells[0].lower() == "metric":
            heads = ["avg" if head.lower() == "value" else head.lower() for head in cells[1:]]
            continue
        if not heads:
            continue
        words = re.match(r"(.*?)\s*(?:\(([^()]*)\))?$", cells[0])
        assert words is not None
        tag = _NAMES.get(words[1].strip().lower().replace(" ", "_"))
        if tag is None:
            continue
        given = {head: _cell(cell, f"{cells[0]}, {head}") for head, cell in zip(heads, cells[1:], strict=False)}
        figures.setdefault(tag, Fields({"unit": words[2] or "", **given}, words[1]))
    if not figures:
        raise Unreadable("it has none of the figures of AIPerf or genai-perf")
    return [checked(_run(figures, Fields({}), name, file, f"{FORMAT} CSV", Fields({})))]


def read_lines(documents: Sequence[Any], name: str, file: str) -> list[BenchRun]:
    """The run whose requests *documents* are."""
    lines = [Fields(one, f"line {at + 1}") for at, one in enumerate(documents)]
    metrics = [line.inner("metrics") for line in lines]
    sent, failed = [], []
    columns: dict[str, list[float]] = {key: [] for key in ("ttft", "request_latency", "input", "output")}
    chunks: list[float] = []
    warmup = 0
    for line, found in zip(lines, metrics, strict=True):
        metadata = line.inner("metadata")
        if metadata.values.get("credit_phase") == "warmup" or metadata.values.get("benchmark_phase") == "warmup":
            warmup += 1
            continue
        at_ns = next(
            (
                value
                for key in ("request_start_ns", "timestamp_ns")
                if (value := metadata.number(key, scale=1e-9)) is not None
            ),
            math.nan,
        )
        sent.append(at_ns)
        failed.append(line.values.get("error") is not None or bool(metadata.values.get("was_cancelled")))
        for key, tags in (("ttft", ("ttft", "time_to_first_token")), ("request_latency", ("request_latency",))):
            columns[key].append(_of_request(found, tags, seconds=True))
        for key in ("input", "output"):
            columns[key].append(_of_request(found, (f"{key}_sequence_length",), seconds=False))
        gaps = found.inner("inter_chunk_latency")
        values = gaps.values.get("value")
        if isinstance(values, list):
            scale = _unit(gaps)
            chunks += [v for each in values if (v := number(each, gaps.path("value"), scale=scale)) is not None]
    rows, notes = rows_of(
        sent_s=sent,
        ttft_s=columns["ttft"],
        e2el_s=columns["request_latency"],
        prompt_tokens=columns["input"],
        output_tokens=columns["output"],
        failed=failed,
    )
    known = {"offered": {"warmup_requests": warmup or None}, "itl": of_values(chunks)}
    return [run_of_rows(rows, notes, name=name, file=file, format=f"{FORMAT} JSON lines", **known)]


def _of_request(found: Fields, tags: Sequence[str], *, seconds: bool) -> float:
    for tag in tags:
        if tag in found.values:
            inner = found.inner(tag)
            value = inner.number("value", least=None, scale=_unit(inner) if seconds else 1.0)
            if value is not None:
                return value
    return math.nan


def _cell(text: str, name: str) -> float | None:
    text = text.replace(",", "")
    if text in ("", "N/A", "None", "nan"):
        return None
    try:
        return float(text)
    except ValueError:
        raise Unreadable(f"{name} is a number; got {text!r}") from None


def _unit(figure: Fields) -> float:
    unit = figure.values.get("unit")
    if unit not in _SECONDS:
        raise Unreadable(f"{figure.where} is in a unit of time such as ms; got {unit!r}")
    return _SECONDS[unit]


def _latency(figures: Mapping[str, Fields], tag: str) -> Latency | None:
    figure = figures.get(tag)
    if figure is None:
        return None
    found = figure.statistics(_STATISTICS, scale=_unit(figure))
    return latency(found, count=figure.count("count") if "count" in figure.values else None)


def _lengths(figures: Mapping[str, Fields], tag: str) -> Lengths:
    return lengths(figures[tag].statistics(_STATISTICS)) if tag in figures else Lengths()


def _amount(figures: Mapping[str, Fields], tag: str) -> float | None:
    return figures[tag].number("avg") if tag in figures else None


def _run(figures: Mapping[str, Fields], asked: Fields, name: str, file: str, kind: str, whole: Fields) -> BenchRun:
    phase, notes = _phase(asked)
    generator = asked.inner("loadgen") if phase is None else phase
    stimulus = asked.inner("perf_analyzer").inner("stimulus")
    loads = [generator, stimulus, asked]
    concurrency = next((value for each in loads if (value := _whole(each, "concurrency"))), None)
    offered_rate = next(
        (
            rate(each.values.get(key), each.path(key))
            for each in loads
            for key in ("request_rate", "rate")
            if each.values.get(key)
        ),
        None,
    )
    completed, failed = (_amount(figures, tag) for tag in ("request_count", "error_request_count"))
    count = next((latency.count for tag in ("request_latency", "ttft") if (latency := _latency(figures, tag))), None)
    completed = int(completed) if completed is not None else count
    input_total, output_total = (_amount(figures, tag) for tag in ("total_isl", "total_osl"))
    prompt, output = _lengths(figures, "input_sequence_length"), _lengths(figures, "output_sequence_length")
    if whole.values.get("was_cancelled"):
        notes.append("the run was cancelled before its end")
    duration = figures.get("benchmark_duration")
    # genai-perf has the models beside the endpoint.
    models = asked.inner("endpoint").values.get("model_names") or asked.values.get("model_names")
    tpot = _latency(figures, "inter_token_latency")
    ttft, e2el = _latency(figures, "ttft"), _latency(figures, "request_latency")
    if ttft is None and e2el is None and tpot is None:
        raise Unreadable("it has no latencies: neither time to first token, inter-token latency nor request latency")
    return BenchRun(
        name=name,
        file=file,
        format=kind,
        offered=Offered(
            rate_per_s=offered_rate,
            concurrency=concurrency,
            burstiness=_burstiness(generator),
            warmup_requests=_whole(generator, "warmup_request_count") or None,
            ramp=_ramp(generator),
            requests=None if completed is None else completed + int(failed or 0),
            prompt=prompt,
            output=output,
        ),
        duration_s=None if duration is None else duration.number("avg", scale=_unit(duration)),
        completed=completed,
        failed=whole_number(failed),
        input_tokens=whole_number(input_total),
        output_tokens=whole_number(output_total),
        requests_per_s=_amount(figures, "request_throughput"),
        output_tokens_per_s=_amount(figures, "output_token_throughput"),
        ttft=ttft,
        tpot=tpot,
        itl=_latency(figures, "inter_chunk_latency"),
        e2el=e2el,
        config=config(
            model=models[0] if isinstance(models, list) and models else None,
            endpoint=asked.inner("endpoint").values.get("type"),
            date=whole.values.get("start_time"),
            version=whole.values.get("aiperf_version"),
        ),
        notes=tuple(notes),
    )


def _phase(asked: Fields) -> tuple[Fields | None, list[str]]:
    """The phase of load that was measured, as 0.13 and later write it, and notes; None where there are no phases, or several."""
    phases = [
        Fields(one, asked.path(f"phases[{at}]"))
        for at, one in enumerate(asked.items("phases"))
        if isinstance(one, Mapping) and one.get("kind") != "warmup" and not one.get("exclude_from_results")
    ]
    if len(phases) > 1:
        return None, [f"{len(phases)} phases were measured, each with a load of its own, and the figures are of all"]
    notes = []
    for phase in phases:
        if phase.values.get("rate_series"):
            notes.append("the rate followed a series, which is not simulated; run.rate_per_s or run.ramp says another")
        if phase.values.get("rate_ramp"):
            notes.append("the rate rose to its value at the beginning, which is not simulated")
    return (phases[0] if phases else None), notes


def _whole(fields: Fields, key: str) -> int | None:
    value = fields.values.get(key)
    return None if isinstance(value, list) else fields.count(key)


def _burstiness(generator: Fields) -> float | None:
    modes = (generator.values.get(key) for key in ("request_rate_mode", "arrival_pattern", "type"))
    mode = str(next(filter(None, modes), ""))
    if "constant" in mode:
        return math.inf
    if "gamma" in mode:
        return generator.first("arrival_smoothness", "smoothness")
    return 1.0 if "poisson" in mode else None


def _ramp(generator: Fields) -> dict[str, Any]:
    ramp = generator.values.get("concurrency_ramp")
    if isinstance(ramp, Mapping):
        seconds = generator.inner("concurrency_ramp").number("duration")
    else:
        seconds = generator.first("concurrency_ramp_duration", "concurrency_ramp_duration_sec", "concurrency_ramp")
    return {"clients_s": seconds} if seconds else {}
