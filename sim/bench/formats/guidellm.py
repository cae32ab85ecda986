"""GuideLLM's benchmarks.json, versions 1 (up to 0.5) and 2: several benchmarks a file.

vllm-project/guidellm. Its inter-token latency is a value a request, (last token - first) / (tokens - 1), which is TPOT here; in
version 2 each request counts once for each of its gaps. Its own time_per_output_token counts the first token too and is left out.
Duration and requests are those of the measured part, between warm-up and cool-down (guidellm 0.8.1, schemas/benchmark.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sim.bench.fields import Fields, Unreadable, checked, config, latencies_of, latency, lengths, number, rate, rows_of
from sim.bench.measured import BenchRun, Latency, Lengths, Offered, RequestRows, SharedPrompts

FORMAT = "GuideLLM"
_STATISTICS = {"mean": "mean", "median": "median", "std_dev": "std", "min": "min", "max": "max"}
_PERCENTILES = {
    "p001": "p0.1", "p01": "p1", "p05": "p5", "p10": "p10", "p25": "p25", "p75": "p75", "p90": "p90", "p95": "p95", "p99": "p99",
    "p999": "p99.9",
}  # fmt: skip


def is_one(document: Any) -> bool:
    """Whether *document* is a report of it."""
    benchmarks = document.get("benchmarks") if isinstance(document, Mapping) else None
    return (
        isinstance(benchmarks, list)
        and bool(benchmarks)
        and isinstance(benchmarks[0], Mapping)
        and isinstance(benchmarks[0].get("metrics"), Mapping)
    )


def read(document: Mapping[str, Any], name: str, file: str) -> list[BenchRun]:
    """The runs in *document*, one a benchmark."""
    fields = Fields(document)
    version = number(fields.inner("metadata").values.get("version"), "metadata.version")
    found = []
    for at, benchmark in enumerate(fields.items("benchmarks")):
        one = Fields(benchmark, f"benchmarks[{at}]")
        own = f"{name}, {at + 1}" if len(fields.items("benchmarks")) > 1 else name
        found.append(_benchmark(one, fields, own, file, 1 if version is None else int(version)))
    return found


def _benchmark(one: Fields, whole: Fields, name: str, file: str, version: int) -> BenchRun:
    metrics = one.inner("metrics")
    # Version 1 keeps what was asked for in args, version 2 in config.
    asked = one.inner("config" if "config" in one.values else "args")
    strategy = asked.inner("strategy")
    if not strategy.values:
        strategy = one.inner("scheduler").inner("strategy")
    totals = (one if "request_totals" in one.values else metrics).inner("request_totals")
    completed, errored, incomplete = (totals.count(key) for key in ("successful", "errored", "incomplete"))
    notes = []
    if version > 2:
        notes.append(
            f"the report is of version {version}, which is newer than those known here, and is read as version 2"
        )
    if incomplete:
        notes.append(f"requests under way when the run ended, and in none of its figures: {incomplete}")
    latencies = _latencies(metrics, completed)
    rows, more = _complete_rows(one, completed, errored)
    of_rows = {} if rows is None else latencies_of(rows)
    rate_per_s, concurrency, burstiness = _load(strategy, asked)
    measured_s = one.number("duration")
    warmup_s, cooldown_s = one.number("warmup_duration") or None, one.number("cooldown_duration") or None
    outside_s = (warmup_s or 0.0) + (cooldown_s or 0.0)
    sent, estimated = _sent(completed, errored, measured_s, outside_s)
    input_tokens, output_tokens = (_total(metrics, f"{side}_token_count") for side in ("prompt", "output"))
    backend = {**one.inner("worker").values, **whole.inner("config").inner("spec").inner("backend").values}
    run = BenchRun(
        name=name,
        file=file,
        format=f"{FORMAT} v{min(version, 2)}",
        offered=Offered(
            rate_per_s=rate_per_s,
            concurrency=concurrency,
            burstiness=burstiness,
            ramp=_ramp(strategy),
            warmup_s=warmup_s,
            cooldown_s=cooldown_s,
            requests=sent,
            prompt=_lengths(metrics, "prompt_token_count"),
            output=_lengths(metrics, "output_token_count"),
            shared=_shared(whole),
        ),
        duration_s=None if measured_s is None else measured_s + outside_s,
        completed=completed,
        failed=errored,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        requests_per_s=_rate_of(completed, measured_s),
        output_tokens_per_s=_rate_of(output_tokens, measured_s),
        input_tokens_per_s=_rate_of(input_tokens, measured_s),
        ttft=latencies["ttft"] or of_rows.get("ttft"),
        tpot=latencies["tpot"] or of_rows.get("tpot"),
        e2el=latencies["e2el"] or of_rows.get("e2el"),
        rows=rows,
        config=config(
            strategy=strategy.text("type_"),
            model=backend.get("model") or backend.get("backend_model"),
            backend=backend.get("kind") or backend.get("backend_type"),
            version=whole.inner("metadata").values.get("guidellm_version"),
            output_tokens_per_s_of_the_tool=_successful(metrics, "output_tokens_per_second").number("mean"),
        ),
        notes=(*notes, *more, *estimated),
    )
    return checked(run)


def _latencies(metrics: Fields, completed: int | None) -> dict[str, Latency | None]:
    """TTFT, TPOT and E2EL of successful requests; `Unreadable` where none of them is given."""
    found = {
        "ttft": _latency(metrics, "time_to_first_token_ms", 1e-3),
        "tpot": _latency(metrics, "inter_token_latency_ms", 1e-3),
        "e2el": _latency(metrics, "request_latency", 1.0),
    }
    if not any(found.values()):
        raise Unreadable(f"{metrics.where} has no latencies of successful requests")
    tpot = found["tpot"]
    if tpot is not None and completed and tpot.count and tpot.count > completed:
        found["tpot"] = replace(tpot, how="as given, each request counted once for each gap")
    return found


def _complete_rows(one: Fields, completed: int | None, errored: int | None) -> tuple[RequestRows | None, list[str]]:
    """The requests of a benchmark with notes on them; None where they are none or a sample, as version 1 may keep them."""
    rows, notes = _rows(one)
    if rows is None or completed == int((~rows.failed).sum()):
        return rows, notes
    listed = f"of {(completed or 0) + (errored or 0):,} requests the file keeps {len(rows):,}; these rows are left out"
    return None, [*notes, listed]


def _sent(
    completed: int | None, errored: int | None, measured_s: float | None, outside_s: float
) -> tuple[int | None, list[str]]:
    """Requests sent, those of warm-up and cool-down at the rate of the measured part, with a note where there are such."""
    if completed is None:
        return None, []
    within = completed + (errored or 0)
    if not (outside_s and measured_s):
        return within, []
    sent = round(within * (measured_s + outside_s) / measured_s)
    return sent, [
        f"{within:,} requests in the {measured_s:.4g} s that were measured; {sent:,} are taken to have been sent, "
        f"with {outside_s:.4g} s of warm-up and cool-down"
    ]


def _successful(metrics: Fields, key: str) -> Fields:
    return metrics.inner(key).inner("successful")


def _total(metrics: Fields, key: str) -> int | None:
    value = _successful(metrics, key).number("total_sum")
    return None if value is None else round(value)


def _rate_of(total: int | None, duration: float | None) -> float | None:
    return total / duration if total is not None and duration else None


def _named(found: Fields, scale: float) -> dict[str, float]:
    """Statistics by name; none where there were no values."""
    if found.number("count") == 0:
        return {}
    percentiles = found.inner("percentiles").statistics(_PERCENTILES, scale=scale)
    return {**found.statistics(_STATISTICS, scale=scale), **percentiles}


def _latency(metrics: Fields, key: str, scale: float) -> Latency | None:
    found = _successful(metrics, key)
    values = _named(found, scale)
    return latency(values, count=found.count("count")) if values else None


def _lengths(metrics: Fields, key: str) -> Lengths:
    values = _named(_successful(metrics, key), 1.0)
    # Sums of squares leave 1e-14 where all are equal.
    return lengths({**values, "std": 0.0} if values.get("std", 1.0) < 1e-6 else values)


def _load(strategy: Fields, asked: Fields) -> tuple[float | None, int | None, float | None]:
    """Rate, requests in flight and burstiness of a strategy by name."""
    kind = strategy.text("type_") or strategy.text("kind")
    streams = (
        strategy.count("streams")
        or strategy.count("max_concurrency")
        or asked.inner("profile").count("max_concurrency")
    )
    if kind == "synchronous":
        return None, 1, None
    if kind == "concurrent":
        return None, streams, None
    if kind == "throughput":
        return math.inf, streams, None
    if kind in ("constant", "async", "poisson"):
        even = kind == "constant"
        per_s = rate(strategy.values.get("rate"), strategy.path("rate"))
        return per_s, strategy.count("max_concurrency"), math.inf if even else 1.0
    return None, streams, None


def _ramp(strategy: Fields) -> dict[str, Any]:
    seconds = strategy.number("rampup_duration")
    return {"clients_s": seconds} if seconds else {}


def _shared(whole: Fields) -> SharedPrompts | None:
    """Groups of prefixes of synthetic data, where there is one kind of them."""
    spec = whole.inner("config").inner("spec")
    data = spec.items("data") if spec.values else []
    if len(data) != 1 or not isinstance(data[0], Mapping):
        return None
    buckets = Fields(data[0], "config.spec.data[0]").items("prefix_buckets")
    if len(buckets) != 1 or not isinstance(buckets[0], Mapping):
        return None
    bucket = Fields(buckets[0], "prefix_buckets[0]")
    groups, tokens = bucket.count("prefix_count"), bucket.count("prefix_tokens")
    return SharedPrompts(groups=groups, prefix_tokens=tokens) if groups and tokens else None


def _rows(one: Fields) -> tuple[RequestRows | None, list[str]]:
    kinds = one.inner("requests")
    listed = [
        (Fields(row, f"{kinds.where}.{kind}[{at}]"), kind != "successful")
        for kind in ("successful", "errored")
        for at, row in enumerate(kinds.items(kind))
    ]
    if not listed:
        return None, []

    def each(*keys: str, scale: float = 1.0) -> list[float]:
        values = [row.first(*keys, least=None, scale=scale) for row, _ in listed]
        return [math.nan if value is None else value for value in values]

    return rows_of(
        sent_s=each("start_time", "request_start_time"),
        ttft_s=each("time_to_first_token_ms", scale=1e-3),
        e2el_s=each("request_latency"),
        prompt_tokens=each("prompt_tokens"),
        output_tokens=each("output_tokens"),
        failed=[failed for _, failed in listed],
    )
