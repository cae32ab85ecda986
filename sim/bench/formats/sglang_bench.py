"""`sglang.bench_serving --output-file`: one JSON object a run, appended as a line.

sgl-project/sglang, python/sglang/bench_serving.py (0.4 to 0.5.23). Times between requests are exponential and not stretched; a
semaphore limits requests in flight. A random data set draws lengths evenly from a share of the nominal ones to all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sim.bench.fields import Fields, Unreadable, checked, config, latencies_of, rate
from sim.bench.formats import vllm_bench
from sim.bench.measured import BenchRun, Lengths, Offered, ServerSide

FORMAT = "sglang.bench_serving"
ENGINES = {
    **dict.fromkeys(("sglang", "sglang-native", "sglang-oai", "sglang-oai-chat"), "sglang"),
    **dict.fromkeys(("vllm", "vllm-chat"), "vllm"),
    "trt": "trtllm",
}
"""The engine that a backend asks, by its --help; the other backends ask any server."""


def is_one(document: Any) -> bool:
    """Whether *document* is a result of it."""
    return (
        isinstance(document, Mapping)
        and "request_throughput" in document
        and ("mean_e2e_latency_ms" in document or "total_output_tokens_retokenized" in document)
    )


def read(document: Mapping[str, Any], name: str, file: str) -> list[BenchRun]:
    """The run in *document*."""
    fields = Fields(document)
    found = vllm_bench.figures(fields)
    if not found:
        raise Unreadable("it has no latencies: no mean_ttft_ms, p99_itl_ms or the like")
    completed = fields.count("completed")
    if completed is None:
        raise Unreadable("completed, the number of requests that were answered, is missing")
    rows, notes = vllm_bench.single_requests(fields)
    taken: dict[str, Any] = {**({} if rows is None else latencies_of(rows)), **found}
    requests = len(rows) if rows is not None else completed
    offered_rate = document.get("request_rate")
    if offered_rate == "trace":
        notes.append("requests were sent at the times of a trace, which the file does not have")
        offered_rate = None
    accepted = fields.number("accept_length")
    run = BenchRun(
        name=name,
        file=file,
        format=FORMAT,
        offered=Offered(
            rate_per_s=rate(offered_rate, "request_rate"),
            concurrency=vllm_bench.positive(fields, "max_concurrency"),
            burstiness=1.0 if offered_rate is not None else None,
            requests=requests,
            prompt=_lengths(fields, "input", completed),
            output=_lengths(fields, "output", completed),
        ),
        duration_s=fields.number("duration"),
        completed=completed,
        failed=None if rows is None else requests - completed if requests >= completed else None,
        input_tokens=fields.count("total_input_tokens"),
        output_tokens=fields.count("total_output_tokens"),
        requests_per_s=fields.number("request_throughput"),
        input_tokens_per_s=fields.number("input_throughput"),
        output_tokens_per_s=fields.number("output_throughput"),
        total_tokens_per_s=fields.number("total_throughput"),
        rows=rows,
        server=None if not accepted else ServerSide(acceptance_length=accepted),
        config=config(
            backend=document.get("backend"),
            dataset=document.get("dataset_name"),
            tag=document.get("tag"),
            mean_in_flight=fields.number("concurrency"),
        )
        | _server(fields),
        notes=tuple(notes),
        **taken,
    )
    return [checked(run)]


def _lengths(fields: Fields, side: str, completed: int) -> Lengths:
    lengths = vllm_bench.lengths(fields, f"{side}_lens", f"total_{side}_tokens", completed)
    asked = fields.count("sharegpt_output_len") if side == "output" else None
    if not lengths.each_tokens and fields.text("dataset_name") == "sharegpt" and asked:
        return replace(lengths, min_tokens=float(asked), max_tokens=float(asked))
    nominal, ratio = fields.count(f"random_{side}_len"), fields.number("random_range_ratio")
    if (
        lengths.each_tokens
        or fields.text("dataset_name") not in ("random", "random-ids")
        or not nominal
        or ratio is None
    ):
        return lengths
    least = max(1, math.floor(nominal * min(ratio, 1.0)))
    return Lengths(
        mean_tokens=lengths.mean_tokens,
        distribution={"distribution": "uniform", "min_tokens": least, "max_tokens": nominal},
    )


def _server(fields: Fields) -> dict[str, str | int | float | bool]:
    """The server's own arguments, as newer releases keep them."""
    info = fields.values.get("server_info")
    if not isinstance(info, Mapping):
        return {}
    wanted = {
        "model_path": "model",
        "tp_size": "tensor_parallel",
        "version": "version",
        "chunked_prefill_size": "chunked_prefill_size",
    }
    return config(**{name: info.get(key) for key, name in wanted.items()})
