"""Latencies of each request from the columns of a run, and which requests kept to limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.metrics.columns import FINISHED, FloatArray


def first_arrival_ns(requests: Mapping[str, NDArray[Any]]) -> int:
    """The instant at which the first request was sent, ns; those that their clients never sent (-1) do not count. 0 where none was
    sent."""
    arrival_ns = requests["arrival_ns"]
    sent_ns = arrival_ns[arrival_ns >= 0]
    return int(sent_ns.min()) if sent_ns.size else 0


def span_ns(requests: Mapping[str, NDArray[Any]], last_iteration_end_ns: int) -> tuple[int, int]:
    """The times between which a run lasts and is paid: from the first arrival to the last finish or end of an iteration
    (-1: there is none), whichever is later. Both are the same instant where nothing ran."""
    begin_ns = first_arrival_ns(requests)
    return begin_ns, max(begin_ns, last_iteration_end_ns, int(requests["finish_ns"].max()))


def ttft_s(requests: Mapping[str, NDArray[Any]]) -> FloatArray:
    """Time to first token of each request, from its arrival; NaN where it did not finish or emitted none. Shape [n]."""
    done = finished(requests) & (requests["first_token_ns"] >= 0)
    return _seconds_where(done, requests["first_token_ns"] - requests["arrival_ns"])


def e2el_s(requests: Mapping[str, NDArray[Any]]) -> FloatArray:
    """End-to-end latency of each request, arrival to last token; NaN where it did not finish. Shape [n]."""
    return _seconds_where(finished(requests), requests["finish_ns"] - requests["arrival_ns"])


def queue_s(requests: Mapping[str, NDArray[Any]]) -> FloatArray:
    """Time from arrival until the first iteration that works on the request; NaN where it did not finish. Shape [n]."""
    done = finished(requests) & (requests["scheduled_ns"] >= 0)
    return _seconds_where(done, requests["scheduled_ns"] - requests["arrival_ns"])


def tpot_s(requests: Mapping[str, NDArray[Any]]) -> FloatArray:
    """Time per output token after the first, (e2el - ttft) / (output_tokens - 1); NaN below two tokens. Shape [n]."""
    more = requests["output_tokens"] > 1
    done = finished(requests) & more & (requests["first_token_ns"] >= 0)
    decode_s = _seconds_where(done, requests["finish_ns"] - requests["first_token_ns"])
    return decode_s / np.where(more, requests["output_tokens"] - 1, 1)


def slo_met(
    requests: Mapping[str, NDArray[Any]],
    *,
    ttft_limit_s: float | FloatArray | None = None,
    tpot_limit_s: float | FloatArray | None = None,
    e2el_limit_s: float | FloatArray | None = None,
) -> NDArray[np.bool_]:
    """Which requests finished within every limit given (one for all, or one a request), and within their own deadline where they
    have one. Shape [n].

    One without a second token has no TPOT to miss. Requests to single-pass models emit no token: their first answer is their last,
    and *ttft_limit_s* holds for it.
    """
    met = finished(requests).copy()
    e2el = e2el_s(requests)
    first_s = np.where(requests["output_tokens"] == 0, e2el, ttft_s(requests))
    for limit_s, value_s in ((ttft_limit_s, first_s), (e2el_limit_s, e2el)):
        if limit_s is not None:
            met &= value_s <= limit_s
    if tpot_limit_s is not None:
        tpot = tpot_s(requests)
        met &= np.isnan(tpot) | (tpot <= tpot_limit_s)
    deadlines = requests.get("deadline_ns")
    if deadlines is not None:
        met &= (deadlines < 0) | (requests["finish_ns"] - requests["arrival_ns"] <= deadlines)
    return met


def finished(requests: Mapping[str, NDArray[Any]]) -> NDArray[np.bool_]:
    """Which requests have emitted all that was asked. Shape [n]."""
    return requests["status"] == FINISHED


def _seconds_where(valid: NDArray[np.bool_], nanoseconds: NDArray[Any]) -> FloatArray:
    return np.where(valid, nanoseconds * 1e-9, np.nan)
