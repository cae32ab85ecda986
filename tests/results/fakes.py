"""Columns as the engine would return them, made by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

REQUEST_DEFAULTS = {
    "model_index": 0,
    "prompt_tokens": 100,
    "output_tokens": 3,
    "emitted_tokens": 3,
    "replica": 0,
    "preemptions": 0,
    "status": 0,
    "reason": -1,
    "bubble_ns": 0,
}
ITERATION_KEYS = (
    "replica",
    "lane",
    "start_ns",
    "duration_ns",
    "rows",
    "prefill_tokens",
    "decode_tokens",
    "sequences",
    "kv_tokens",
    "emitted_tokens",
    "waiting",
    "kv_blocks_used",
)


@dataclass
class FakeColumns:
    requests: dict[str, Any]
    iteration_columns: dict[str, Any]
    gaps: tuple[Any, Any]
    reasons: tuple[str, ...] = ()
    meta: dict[str, Any] = field(
        default_factory=lambda: {"kv_blocks_total": [1000], "wall_s": 0.1, "busy_ns": 0, "n_stages": 1, "n_machines": 1}
    )

    def iterations(self) -> dict[str, Any]:
        return self.iteration_columns

    def iteration_blocks(self) -> tuple[dict[str, Any], ...]:
        return (self.iterations(),)

    def itl_blocks(self) -> tuple[tuple[Any, Any], ...]:
        return (self.itl(),)

    def itl(self) -> tuple[Any, Any]:
        return self.gaps


def requests(arrival_ns: Any, **columns: Any) -> dict[str, Any]:
    """Request columns; what is not given is filled with a plain finished request."""
    arrival = np.asarray(arrival_ns, dtype=np.int64)
    given = {
        "request_id": np.arange(arrival.size),
        "scheduled_ns": arrival,
        "first_token_ns": arrival + 10,
        "finish_ns": arrival + 20,
        **REQUEST_DEFAULTS,
        **columns,
    }
    out = {"arrival_ns": arrival}
    for key, value in given.items():
        dtype = np.int8 if key == "status" else np.int64
        out[key] = np.broadcast_to(np.asarray(value, dtype=dtype), arrival.shape).copy()
    return out


def iterations(start_ns: Any, duration_ns: Any, **columns: Any) -> dict[str, Any]:
    start = np.asarray(start_ns, dtype=np.int64)
    out = {key: np.zeros(start.size, dtype=np.int64) for key in ITERATION_KEYS}
    given = {"start_ns": start, "duration_ns": duration_ns, **columns}
    for key, value in given.items():
        out[key] = np.broadcast_to(np.asarray(value, dtype=np.int64), start.shape).copy()
    return out


def plausible(n_requests: int = 500, n_iterations: int = 5000, seed: int = 0) -> FakeColumns:
    """A run that looks like one: Poisson arrivals, lognormal lengths, iterations back to back."""
    rng = np.random.default_rng(seed)
    duration = rng.integers(8_000_000, 30_000_000, n_iterations)
    start = np.concatenate([[0], np.cumsum(duration)[:-1]])
    horizon = int(start[-1])
    arrival = np.sort(rng.integers(0, max(1, int(horizon * 0.9)), n_requests))
    scheduled = arrival + rng.exponential(5e7, n_requests).astype(np.int64)
    first = scheduled + rng.lognormal(18, 0.6, n_requests).astype(np.int64)
    output = np.maximum(1, rng.lognormal(4.6, 0.9, n_requests).astype(np.int64))
    finish = first + (output - 1) * 20_000_000
    prefill = rng.integers(0, 500, n_iterations)
    sequences = rng.integers(1, 128, n_iterations)
    return FakeColumns(
        requests=requests(
            arrival,
            scheduled_ns=scheduled,
            first_token_ns=first,
            finish_ns=finish,
            prompt_tokens=np.maximum(1, rng.lognormal(6.5, 0.9, n_requests)),
            output_tokens=output,
            emitted_tokens=output,
        ),
        iteration_columns=iterations(
            start,
            duration,
            rows=prefill + sequences,
            prefill_tokens=prefill,
            decode_tokens=sequences,
            sequences=sequences,
            kv_tokens=sequences * 1200,
            emitted_tokens=sequences,
            waiting=rng.poisson(3, n_iterations),
            kv_blocks_used=rng.integers(1, 1000, n_iterations),
        ),
        gaps=(duration, sequences),
        meta={
            "kv_blocks_total": [1000],
            "busy_ns": 0,
            "n_stages": 1,
            "n_machines": 1,
            "makespan_ns": int(finish.max() - arrival.min()),
            "preemptions": 0,
            "wall_s": 0.123,
            "events": n_iterations,
            "flops": 1e15,
            "hbm_bytes": 1e13,
            "peak_flops_per_s": 989e12,
            "peak_bytes_per_s": 3.35e12,
        },
    )
