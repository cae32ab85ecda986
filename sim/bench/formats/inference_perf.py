"""inference-perf's reports, as JSON or YAML: the client's lifecycle metrics of a stage or of all, the server's from Prometheus.

kubernetes-sigs/inference-perf. Releases before April 2026 counted every line of the event stream as a token, blank ones included:
2 L + 1 gaps where L output tokens have L - 1. Such a file shows itself by a time per output token that is half of what latency,
TTFT and output length say, and is corrected with a note.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sim.bench.fields import (
    Fields,
    Unreadable,
    checked,
    column,
    latency,
    lengths,
    of_values,
    rows_of,
    run_of_rows,
    split_gaps,
)
from sim.bench.measured import BenchRun, Latency, Offered, ServerSide

FORMAT = "inference-perf"
_STATISTICS = ("mean", "median", "std", "min", "max")
_LATENCIES = {
    "ttft": "time_to_first_token",
    "tpot": "time_per_output_token",
    "itl": "inter_token_latency",
    "e2el": "request_latency",
}


def is_one(document: Any) -> bool:
    """Whether *document* is a report of it."""
    return isinstance(document, Mapping) and isinstance(document.get("successes"), Mapping) and "failures" in document


def is_requests(document: Any) -> bool:
    """Whether *document* is its list of single requests."""
    return (
        isinstance(document, list)
        and bool(document)
        and all(isinstance(one, Mapping) and {"start_time", "end_time", "info"} <= set(one) for one in document[:3])
    )


def read(document: Mapping[str, Any], name: str, file: str) -> list[BenchRun]:
    """The run in *document*."""
    fields = Fields(document)
    successes, failures, load = fields.inner("successes"), fields.inner("failures"), fields.inner("load_summary")
    if "latency" not in successes.values and "time_to_first_token" in successes.values:
        return [checked(_server(successes, name, file))]
    found = successes.inner("latency")
    taken: dict[str, Any] = {name: _latency(found, key) for name, key in _LATENCIES.items()}
    completed = successes.count("count")
    if completed == 0:
        raise Unreadable("no request completed, so that nothing was measured")
    if not any(taken.values()):
        raise Unreadable("successes.latency has none of the latencies of inference-perf")
    throughput = successes.inner("throughput")
    prompt, output = (lengths(successes.inner(f"{side}_len").statistics()) for side in ("prompt", "output"))
    requests_per_s = throughput.number("requests_per_sec")
    duration = fields.number("benchmark_time_seconds")
    if duration is None and completed and requests_per_s:
        duration = completed / requests_per_s
    failed = failures.count("count")
    asked = load.number("requested_rate")
    notes = []
    if not asked and load.number("achieved_rate"):
        notes.append("no rate was asked for; the rate is the one at which requests were sent")
    if not load.values or (asked is None and "send_duration" not in load.values):
        notes.append("the report is over all stages of a load, whose rates it does not say")
    delay = load.inner("schedule_delay").number("p99", least=None)
    if delay is not None and delay > 0.1:
        notes.append(
            f"1 % of the requests were sent {delay:.3g} s or more after they were due: clients were at their limit, "
            "which run.concurrency says"
        )
    images = [kind for kind in ("image", "audio", "video") if kind in successes.values]
    if images:
        notes.append(f"prompts also hold {', '.join(images)}, which are not simulated")
    run = BenchRun(
        name=name,
        file=file,
        format=f"{FORMAT} lifecycle",
        offered=Offered(
            rate_per_s=asked or load.number("achieved_rate") or None,
            fills_time=True,
            burstiness=1.0,
            requests=load.count("count") or (None if completed is None else completed + (failed or 0)),
            prompt=prompt,
            output=output,
        ),
        duration_s=duration,
        completed=completed,
        failed=failed,
        requests_per_s=requests_per_s,
        input_tokens_per_s=throughput.number("input_tokens_per_sec"),
        output_tokens_per_s=throughput.number("output_tokens_per_sec"),
        total_tokens_per_s=throughput.number("total_tokens_per_sec"),
        notes=tuple(notes),
        **taken,
    )
    return [checked(_without_blank_lines(run))]


def read_requests(document: list[Any], name: str, file: str) -> list[BenchRun]:
    """The run whose requests *document* lists."""
    listed = [Fields(one, f"[{at}]") for at, one in enumerate(document)]
    columns: dict[str, list[float]] = {key: [] for key in ("start", "end", "first", "input", "output")}
    failed, gaps, timed, blank = [], [], [], 0
    for one in listed:
        info = one.inner("info")
        times = column(info.items("output_token_times"), info.path("output_token_times"))
        output = info.number("output_tokens")
        columns["start"].append(_or_nan(one.number("start_time", least=None)))
        columns["end"].append(_or_nan(one.number("end_time", least=None)))
        columns["first"].append(times[0] if times else math.nan)
        columns["input"].append(_or_nan(info.number("input_tokens")))
        columns["output"].append(_or_nan(output))
        failed.append(bool(one.values.get("error")))
        if output and len(times) > 1.5 * output:
            blank += 1
        else:
            gaps += [late - early for early, late in itertools.pairwise(times) if late >= early]
            timed.append(times)
    rows, notes = rows_of(
        sent_s=columns["start"],
        ttft_s=[first - start for first, start in zip(columns["first"], columns["start"], strict=True)],
        e2el_s=[end - start for end, start in zip(columns["end"], columns["start"], strict=True)],
        prompt_tokens=columns["input"],
        output_tokens=columns["output"],
        failed=failed,
    )
    if blank:
        notes.append(f"{blank} requests have a time for each blank line too, as before April 2026; gaps leave them out")
    return [
        run_of_rows(
            rows, notes, name=name, file=file, format=f"{FORMAT} requests", itl=of_values(gaps), **_split(timed)
        )
    ]


def _split(timed: list[list[float]]) -> dict[str, Latency | None]:
    """The gaps with and without another request's first token, of requests by the times of their tokens."""
    some = [times for times in timed if times]
    gaps = [[late - early for early, late in itertools.pairwise(times)] for times in some]
    return split_gaps([times[0] for times in some], gaps)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _without_blank_lines(run: BenchRun) -> BenchRun:
    """The run with a true time per output token, where its own says that blank lines were counted."""
    tokens = run.offered.output.mean_tokens
    if not (run.tpot and run.ttft and run.e2el and tokens and tokens > 2):
        return run
    if run.tpot.mean_s is None or run.ttft.mean_s is None or run.e2el.mean_s is None or run.tpot.mean_s <= 0:
        return run
    true_s = (run.e2el.mean_s - run.ttft.mean_s) / (tokens - 1)
    factor = (2 * tokens + 1) / (tokens - 1)
    if not 0.8 * factor < true_s / run.tpot.mean_s < 1.2 * factor:
        return run
    return replace(
        run,
        tpot=_times(run.tpot, factor),
        itl=None,
        notes=(
            *run.notes,
            f"this release counted blank lines as tokens (before April 2026): TPOT is the published one times {factor:.4g} for "
            f"{tokens:.4g} output tokens, and gaps between tokens are left out",
        ),
    )


def _times(of: Latency, factor: float) -> Latency:
    scaled = {f"{key}_s": value * factor for key in _STATISTICS if (value := getattr(of, f"{key}_s")) is not None}
    return Latency(
        **scaled,  # type: ignore[arg-type]
        quantiles_s={share: value * factor for share, value in of.quantiles_s.items()},
        count=of.count,
        how="corrected for blank lines",
    )


def _latency(fields: Fields, key: str) -> Latency | None:
    return latency(fields.inner(key).statistics())


def _server(successes: Fields, name: str, file: str) -> BenchRun:
    """The server's side of a stage, over the window that Prometheus was asked about."""
    kv, queue = successes.inner("kv_cache_usage_percentage"), successes.inner("queue_len")
    hits, preempted = successes.inner("prefix_cache_hit_percent"), successes.inner("num_preemptions_total")
    used = kv.number("mean")
    hit = hits.number("mean")
    preemptions = preempted.number("mean")
    taken: dict[str, Any] = {name: _latency(successes, key) for name, key in _LATENCIES.items()}
    server = ServerSide(
        **taken,  # type: ignore[arg-type]
        waiting=queue.number("mean"),
        kv_used=None if used is None else used / 100,
        prefix_hit=None if hit is None else hit / 100,
        preemptions=None if preemptions is None else round(preemptions),
        finished=successes.count("count"),
    )
    return BenchRun(
        name=name,
        file=file,
        format=f"{FORMAT} Prometheus",
        completed=successes.count("count"),
        requests_per_s=successes.number("rate"),
        output_tokens_per_s=successes.inner("output_len").number("rate"),
        input_tokens_per_s=successes.inner("prompt_len").number("rate"),
        server=server,
        notes=(
            "the server's own histograms over the window around a stage, their percentiles interpolated in coarse buckets; "
            "what clients offered and measured is in the lifecycle report",
        ),
    )
