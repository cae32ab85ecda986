"""Requests described in numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from workloads.columns import NS_PER_S, IntArray
from workloads.requests import Requests

FloatArray = NDArray[np.float64]


def describe(requests: Requests) -> dict[str, Any]:
    """Counts, rates and lengths ready for JSON; `Trace.describe` says what they are."""
    gaps_s = np.diff(requests.arrival_ns) / NS_PER_S
    mean_gap_s = float(gaps_s.mean()) if len(gaps_s) else 0.0
    return {
        "source": requests.source,
        "requests": len(requests),
        "duration_s": requests.duration_s,
        "rate_per_s": len(gaps_s) / requests.duration_s if requests.duration_s > 0 else None,
        "interarrival_cv": float(gaps_s.std()) / mean_gap_s if mean_gap_s > 0 else None,
        "prompt_tokens": _lengths(requests.prompt_tokens),
        "output_tokens": _lengths(requests.output_tokens),
        **_by_name(requests),
        **_more(requests),
    }


def _lengths(values: IntArray) -> dict[str, float | int]:
    p50, p90, p99 = (float(x) for x in np.percentile(values, [50, 90, 99]))
    return {
        "mean": float(values.mean()),
        "median": p50,
        "p90": p90,
        "p99": p99,
        "min": int(values.min()),
        "max": int(values.max()),
        # Python integers: sums of legal token counts may pass int64.
        "total": sum(values.tolist()),
    }


def _by_name(requests: Requests) -> dict[str, Any]:
    """The requests of each model, priority, class and tenant."""
    out: dict[str, Any] = {}
    if requests.models:
        index = np.zeros(len(requests), dtype=np.int64) if requests.model_index is None else requests.model_index
        counts = np.bincount(index, minlength=len(requests.models))
        out["requests_of_model"] = dict(zip(requests.models, counts.tolist(), strict=True))
    if requests.priority is not None:
        values, counts = np.unique(requests.priority, return_counts=True)
        out["priorities"] = {str(value): n for value, n in zip(values.tolist(), counts.tolist(), strict=True)}
    for index, names, key in (
        (requests.class_index, requests.classes, "requests_of_class"),
        (requests.tenant_index, requests.tenants, "requests_of_tenant"),
    ):
        if index is not None:
            out[key] = dict(zip(names, np.bincount(index, minlength=len(names)).tolist(), strict=True))
    return out


def _more(requests: Requests) -> dict[str, Any]:
    """Describe the optional columns of a trace: deadlines, prefixes, sessions and others that it has."""
    out: dict[str, Any] = {}
    if requests.deadline_ns is not None:
        out["with_deadline"] = int(np.count_nonzero(requests.deadline_ns >= 0))
    if requests.session is not None:
        out["sessions"] = len(np.unique(requests.session[requests.session >= 0]))
    if requests.predicted_tokens is not None:
        out["predicted_tokens"] = _lengths(requests.predicted_tokens)
    if requests.encoder_tokens is not None:
        out["encoder_tokens"] = _lengths(requests.encoder_tokens)
    if requests.adapter is not None:
        out["adapters"] = len(np.unique(requests.adapter[requests.adapter >= 0]))
    if requests.image_offsets is not None:
        out["images"] = _lengths(np.diff(requests.image_offsets))
    if requests.audio_offsets is not None:
        out["audio"] = _lengths(np.diff(requests.audio_offsets))
    if requests.follows is not None:
        out["waiting_for_others"] = int(np.count_nonzero(requests.follows.counts))
    if requests.abort_ns is not None:
        out["given_up"] = int(np.count_nonzero(requests.abort_ns >= 0))
    if requests.max_tokens is not None:
        out["max_tokens"] = _lengths(requests.max_tokens)
    if requests.prefix_blocks is not None and requests.prefix_block_tokens is not None:
        distinct = len(np.unique(requests.prefix_blocks))
        total = len(requests.prefix_blocks)
        out["prefix_block_tokens"] = requests.prefix_block_tokens
        out["prefix_blocks_seen_before"] = 1 - distinct / total if total else 0.0
    return out


def rates_over_time(requests: Requests, windows: int) -> tuple[float, FloatArray]:
    """The length in seconds of each of at most *windows* equal windows from the first arrival to the last, and the arrivals a
    second in each; fewer windows where there are fewer requests, and none where all arrive at once."""
    if requests.duration_s == 0:
        return 0.0, np.empty(0)
    n = max(1, min(windows, len(requests) // 2))
    since_s = (requests.arrival_ns - requests.arrival_ns[0]) / NS_PER_S
    width_s = requests.duration_s / n
    return width_s, np.histogram(since_s, bins=n, range=(0.0, requests.duration_s))[0] / width_s


def turns_of_sessions(requests: Requests) -> IntArray:
    """The number of requests of each session; empty without sessions."""
    if requests.session is None:
        return np.empty(0, dtype=np.int64)
    return np.unique(requests.session[requests.session >= 0], return_counts=True)[1]
