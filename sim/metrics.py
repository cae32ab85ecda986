"""Metrics as functions of a run's columns, under the names that vLLM's serving benchmark uses.

`summary` puts them all into the nested mapping that `summary.json` holds. What cannot be said (no request
finished, no SLO given) is None, never NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sim.errors import RooftraceError
from sim.warmup import mser5

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

FINISHED, REJECTED, UNFINISHED, ABORTED = 0, 1, 2, 3
STATUS_NAMES = ("finished", "rejected", "unfinished", "aborted")

STATISTICS = ("mean", "median", "std", "p50", "p90", "p95", "p99", "max")
_GAPS_TO_KEEP = 4_000_000
_QUANTILES = (0.5, 0.9, 0.95, 0.99)

_TREND_BINS = 16
_TREND_T = 2.602  # Student's t, one-sided 1 %, 15 degrees of freedom (16 bins)
_TREND_GROWTH = 0.05  # of the arrivals in the window: less than this is no overload worth the name
_TREND_MIN_ARRIVALS = 64  # in the window: fewer than 4 arrivals a bin say nothing


class Columns(Protocol):
    """What the engine returns; see `sim.engine.Columns`."""

    @property
    def requests(self) -> Mapping[str, NDArray[Any]]: ...

    @property
    def reasons(self) -> Sequence[str]: ...

    @property
    def meta(self) -> Mapping[str, Any]: ...

    def iteration_blocks(self) -> Iterable[Mapping[str, NDArray[Any]]]: ...

    def itl_blocks(self) -> Iterable[tuple[IntArray, IntArray]]: ...


def ttft_s(requests: Mapping[str, NDArray[Any]]) -> FloatArray:
    """Time to first token of each request, from its arrival; NaN where it did not finish or emitted none. Shape [n]."""
    done = _finished(requests) & (requests["first_token_ns"] >= 0)
    return _seconds_where(done, requests["first_token_ns"] - requests["arrival_ns"])


def e2el_s(requests: Mapping[str, NDArray[Any]]) -> FloatArray:
    """End-to-end latency of each request, arrival to last token; NaN where it did not finish. Shape [n]."""
    return _seconds_where(_finished(requests), requests["finish_ns"] - requests["arrival_ns"])


def queue_s(requests: Mapping[str, NDArray[Any]]) -> FloatArray:
    """Time from arrival until the first iteration that works on the request; NaN where it did not finish. Shape [n]."""
    done = _finished(requests) & (requests["scheduled_ns"] >= 0)
    return _seconds_where(done, requests["scheduled_ns"] - requests["arrival_ns"])


def tpot_s(requests: Mapping[str, NDArray[Any]]) -> FloatArray:
    """Time per output token after the first, (e2el - ttft) / (output_tokens - 1); NaN below two tokens. Shape [n]."""
    more = requests["output_tokens"] > 1
    done = _finished(requests) & more & (requests["first_token_ns"] >= 0)
    decode_s = _seconds_where(done, requests["finish_ns"] - requests["first_token_ns"])
    return decode_s / np.where(more, requests["output_tokens"] - 1, 1)


def slo_met(
    requests: Mapping[str, NDArray[Any]],
    *,
    ttft_limit_s: float | None = None,
    tpot_limit_s: float | None = None,
    e2el_limit_s: float | None = None,
) -> NDArray[np.bool_]:
    """Which requests finished within every limit given, and within their own deadline where they have one. Shape [n].

    One without a second token has no TPOT to miss. One-shot requests emit no token: their first answer is their last,
    and *ttft_limit_s* holds for it.
    """
    met = _finished(requests).copy()
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


def statistics(values: FloatArray) -> dict[str, float | None]:
    """Mean, median, population std, p50, p90, p95, p99 and max of what is not NaN; all None without any."""
    values = values[~np.isnan(values)]
    if not values.size:
        return dict.fromkeys(STATISTICS)
    p50, p90, p95, p99 = (float(q) for q in np.quantile(values, _QUANTILES))
    return _statistics(float(values.mean()), float(values.std()), p50, p90, p95, p99, float(values.max()))


Blocks = Callable[[], Iterable[tuple[IntArray, IntArray]]]
"""Values and their weights in pieces, as often as one asks: a long run's gaps are never held all at once."""


def weighted_statistics(blocks: Blocks) -> dict[str, float | None]:
    """`statistics` in seconds of gaps in nanoseconds of which each counts weight times; all None without any."""
    count, total_ns, largest_ns = 0, 0, 0
    for gaps_ns, weights in blocks():
        count += int(weights.sum())
        total_ns += int((gaps_ns * weights).sum())
        largest_ns = max(largest_ns, int(gaps_ns.max(initial=0)))
    if not count:
        return dict.fromkeys(STATISTICS)
    mean_ns = total_ns / count
    squares = sum(float((np.square(gaps_ns - mean_ns) * weights).sum()) for gaps_ns, weights in blocks())
    p50, p90, p95, p99 = (float(q) * 1e-9 for q in block_quantile(blocks, _QUANTILES))
    return _statistics(mean_ns * 1e-9, math.sqrt(squares / count) * 1e-9, p50, p90, p95, p99, largest_ns * 1e-9)


def weighted_quantile(values: IntArray, weights: IntArray, probabilities: Sequence[float]) -> FloatArray:
    """Quantiles of *values* each repeated *weights* times, equal to `np.quantile(np.repeat(values, weights), ...)`."""
    return block_quantile(lambda: ((values, weights),), probabilities)


def block_quantile(blocks: Blocks, probabilities: Sequence[float]) -> FloatArray:
    """`weighted_quantile` of values and weights in pieces.

    Values are non-negative integers, weights at least 1. Nothing is expanded and nothing sorted as a whole: a
    histogram finds the few narrow ranges that hold the ranks asked for, and only those are sorted.
    """
    largest = max((int(values.max(initial=0)) for values, _ in blocks()), default=0)
    # 2^20 bins: the histogram stays in cache, and a bin holds few distinct values.
    shift = max(0, largest.bit_length() - 20)
    n_bins = (largest >> shift) + 1
    counts = np.zeros(n_bins, np.int64)
    for values, weights in blocks():
        # Sums of integers below 2^53 in floats: exact.
        counts += np.bincount(values >> shift, weights=weights, minlength=n_bins).astype(np.int64)
    reached = np.cumsum(counts)
    last = int(reached[-1]) - 1
    if last < 0:
        raise ValueError("weighted_quantile needs at least one value; got none")
    positions = [last * probability for probability in probabilities]
    ranks = sorted({min(math.floor(position) + more, last) for position in positions for more in (0, 1)})
    wanted = np.unique(np.searchsorted(reached, ranks, side="right"))
    found: list[IntArray] = []
    found_weights: list[IntArray] = []
    for values, weights in blocks():
        inside = np.isin(values >> shift, wanted)
        found.append(values[inside])
        found_weights.append(weights[inside])
    members, member_weights = np.concatenate(found), np.concatenate(found_weights)
    order = np.argsort(members, kind="stable")
    members, cumulative = members[order], np.cumsum(member_weights[order])
    # Ranks among the members: those of bins that nobody asked for lie in between.
    skipped = np.cumsum(np.where(np.isin(np.arange(n_bins), wanted), 0, counts))

    def at_rank(rank: int) -> float:
        index = int(np.searchsorted(reached, rank, side="right"))
        return float(members[np.searchsorted(cumulative, rank - int(skipped[index]), side="right")])

    quantiles = []
    for position in positions:
        rank = math.floor(position)
        t = position - rank
        low, high = at_rank(rank), at_rank(min(rank + 1, last))
        # numpy's own two-sided interpolation, so that the bits agree.
        quantiles.append(low + (high - low) * t if t < 0.5 else high - (high - low) * (1 - t))
    return np.array(quantiles)


def _gap_blocks(columns: Columns) -> Blocks:
    """The gaps of a run, kept where they are few and made again on each pass where they are many."""
    kept, n = [], 0
    for gaps, weights in columns.itl_blocks():
        kept.append((gaps, weights))
        n += gaps.size
        if n > _GAPS_TO_KEEP:
            return columns.itl_blocks
    return lambda: kept


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationSums:
    """What the metrics need of the iterations, which may be too many to be held at once."""

    n: int
    last_end_ns: int
    """-1 without iterations."""
    held_ns: float
    """Share of its replica's KV blocks in use times how long, summed over replicas."""
    largest_share: float


def kv_holdings(
    blocks: Iterable[Mapping[str, NDArray[Any]]],
) -> Iterator[tuple[int, IntArray, IntArray, IntArray]]:
    """(replica, start_ns, held_ns, KV blocks in use) in pieces, from iterations in order of start within a replica.

    What is in use when an iteration starts is held until the replica starts its next (micro-batches in flight share one
    pool) or, where it falls idle, until the last of those in flight has ended.
    """
    latest: dict[int, tuple[int, int, int]] = {}
    for block in blocks:
        for replica in np.unique(block["replica"]).tolist():
            mine = block["replica"] == replica
            start_ns, used = block["start_ns"][mine], block["kv_blocks_used"][mine]
            end_ns = np.maximum.accumulate(start_ns + block["duration_ns"][mine])
            if replica in latest:
                since_ns, in_use, busy_until_ns = latest[replica]
                start_ns, used = np.append(since_ns, start_ns), np.append(in_use, used)
                end_ns = np.append(busy_until_ns, np.maximum(end_ns, busy_until_ns))
            latest[replica] = (int(start_ns[-1]), int(used[-1]), int(end_ns[-1]))
            yield replica, start_ns[:-1], np.minimum(start_ns[1:], end_ns[:-1]) - start_ns[:-1], used[:-1]
    for replica, (start, in_use, end) in latest.items():
        yield replica, np.array([start]), np.array([end - start]), np.array([in_use])


def last_iteration_end_ns(columns: Columns) -> int:
    """When the last iteration ended; -1 without any."""
    ends = (block["start_ns"] + block["duration_ns"] for block in columns.iteration_blocks())
    return max((int(end_ns.max(initial=-1)) for end_ns in ends), default=-1)


def iteration_sums(columns: Columns) -> IterationSums:
    """A few passes over the iterations of a run."""
    n = sum(block["duration_ns"].size for block in columns.iteration_blocks())
    held_ns, largest_share = 0.0, 0.0
    pools = columns.meta["kv_blocks_total"]
    for replica, _, lengths_ns, used in kv_holdings(columns.iteration_blocks()):
        share = used / pools[replica]
        held_ns += float((share * lengths_ns).sum())
        largest_share = max(largest_share, float(share.max(initial=0.0)))
    return IterationSums(n=n, last_end_ns=last_iteration_end_ns(columns), held_ns=held_ns, largest_share=largest_share)


def makespan_s(requests: Mapping[str, NDArray[Any]], last_iteration_end_ns: int = -1) -> float:
    """Seconds from the first arrival to the last finish or end of an iteration; 0.0 where nothing ran."""
    end_ns = max(last_iteration_end_ns, int(requests["finish_ns"].max()))
    return max(0, end_ns - int(requests["arrival_ns"].min())) * 1e-9


def saturated(requests: Mapping[str, NDArray[Any]]) -> bool | None:
    """Whether the queue is still growing when arrivals end; None where there are too few arrivals to say.

    Waiting requests (arrived, not rejected, not yet scheduled) are counted at 17 evenly spaced instants over the
    second half of the arrivals' time span. The queue grows when both hold: the mean of its 16 increments is above
    zero by Student's t at 1 % (one-sided; increments of a stable queue correlate negatively, which makes the test
    conservative), and over the window it grew by at least 5 % of the requests that arrived in it, which means that
    service kept up with less than 95 % of them. Fewer than 64 arrivals in the window, or all at one instant: None.
    """
    queued = requests["status"] != REJECTED
    arrival_ns = np.sort(requests["arrival_ns"][queued])
    if not arrival_ns.size or arrival_ns[0] == arrival_ns[-1]:
        return None
    begin, end = int(arrival_ns[0]), int(arrival_ns[-1])
    at = np.linspace((begin + end) / 2, end, _TREND_BINS + 1)
    scheduled_ns = requests["scheduled_ns"][queued]
    scheduled_ns = np.sort(scheduled_ns[scheduled_ns >= 0])
    arrived = np.searchsorted(arrival_ns, at, side="right")
    waiting = arrived - np.searchsorted(scheduled_ns, at, side="right")
    arrivals = int(arrived[-1] - arrived[0])
    if arrivals < _TREND_MIN_ARRIVALS:
        return None
    steps = np.diff(waiting)
    grew = float(waiting[-1] - waiting[0])
    standard_error = float(steps.std(ddof=1)) / math.sqrt(_TREND_BINS)
    return grew >= _TREND_GROWTH * arrivals and float(steps.mean()) > _TREND_T * standard_error


WHOLE: Mapping[str, Any] = {"rule": "whole"}
OVER_THE_WHOLE_RUN = ("itl_s", "mfu", "mbu", "saturated", "speculation")
"""Figures of a window that are still about the run as a whole: what they are made of is not kept by time."""


def window_of(requests: Mapping[str, NDArray[Any]], window: Mapping[str, Any]) -> tuple[int, int]:
    """First and last instant of a *window* (keys rule, from_s, to_s), ns; both belong to it.

    `whole` ends with the last finish; every other rule at the last arrival at the latest, so that the tail in which the
    deployment empties is left out. `after_warmup` cuts what MSER-5 finds in the end-to-end latencies of the requests that
    finished, in order of arrival. RooftraceError where no request is left, or no warm-up ends in the first half.
    """
    arrival_ns = requests["arrival_ns"]
    first, last = int(arrival_ns.min()), int(arrival_ns.max())
    rule = window["rule"]
    if rule == "whole":
        return first, max(last, int(requests["finish_ns"].max()))
    if rule == "after_warmup":
        order = np.argsort(arrival_ns, kind="stable")
        order = order[_finished(requests)[order]]
        try:
            cut = mser5(e2el_s(requests)[order])
        except ValueError as error:
            raise RooftraceError(
                f"window: after_warmup cannot be had ({error}); or state it, such as window: {{from_s: 60}}"
            ) from None
        return int(arrival_ns[order[cut]]), last
    begin = first + round((window["from_s"] or 0.0) * 1e9)
    end = last if window["to_s"] is None else min(last, first + round(window["to_s"] * 1e9))
    if not ((arrival_ns >= begin) & (arrival_ns <= end)).any():
        raise RooftraceError(
            f"window: no request arrives in it; arrivals last {(last - first) * 1e-9:.4g} s, and it begins at "
            f"{(begin - first) * 1e-9:.4g} s"
        )
    return begin, end


def summary(
    columns: Columns,
    *,
    slo: Mapping[str, float | None] | None = None,
    window: Mapping[str, Any] = WHOLE,
    models: Sequence[str] = (),
) -> dict[str, Any]:
    """Every metric of a run or, with a *window*, of a part of it (see `window_of`); nested as in `summary.json`.

    `window` in it says which part that is: seconds after the first arrival, and the requests that arrive in it, whose
    latencies, attainment and preemptions these are. Rates, shares of time and iterations are then those between its two
    instants; the figures of OVER_THE_WHOLE_RUN, and with a pipeline `busy_fraction`, stay those of the run and are named
    in `window.whole_run`.
    """
    if window["rule"] == "whole":
        found = _whole_summary(columns, slo=slo, models=models)
        part = {"rule": "whole", "from_s": 0.0, "to_s": found["makespan_s"], "requests": found["requests"]["total"]}
        return {**found, "window": {**part, "whole_run": []}}
    return _window_summary(columns, slo, window, models)


def _window_summary(
    columns: Columns, slo: Mapping[str, float | None] | None, window: Mapping[str, Any], models: Sequence[str]
) -> dict[str, Any]:
    requests, meta = columns.requests, columns.meta
    begin, end = window_of(requests, window)
    span_s = (end - begin) * 1e-9
    arrived = (requests["arrival_ns"] >= begin) & (requests["arrival_ns"] <= end)
    part = {name: values[arrived] for name, values in requests.items()}
    finished = _finished(requests) & (requests["finish_ns"] > begin) & (requests["finish_ns"] <= end)
    answered_ns = np.where(requests["first_token_ns"] >= 0, requests["first_token_ns"], requests["finish_ns"])
    answered = (answered_ns > begin) & (answered_ns <= end)
    emitted, n_iterations, busy_ns = 0, 0, 0
    for block in columns.iteration_blocks():
        start_ns, end_ns = block["start_ns"], block["start_ns"] + block["duration_ns"]
        emitted += int(block["emitted_tokens"][(end_ns > begin) & (end_ns <= end)].sum())
        n_iterations += int(((start_ns >= begin) & (start_ns < end)).sum())
        busy_ns += int(np.maximum(np.minimum(end_ns, end) - np.maximum(start_ns, begin), 0).sum())
    held_ns, largest_share = 0.0, 0.0
    pools = meta["kv_blocks_total"]
    for replica, start_ns, lengths_ns, used in kv_holdings(columns.iteration_blocks()):
        inside = np.maximum(np.minimum(start_ns + lengths_ns, end) - np.maximum(start_ns, begin), 0)
        share = used / pools[replica]
        held_ns += float((share * inside).sum())
        largest_share = max(largest_share, float(share[inside > 0].max(initial=0.0)))
    whole = _whole_summary(columns, slo=slo)
    stated = {key: value for key, value in (slo or {}).items() if value is not None}
    whole_run: list[str] = [*OVER_THE_WHOLE_RUN]
    one_stage_each = meta["n_stages"] == len(pools)
    if not one_stage_each:
        whole_run.append("busy_fraction")
    if "prefix_cache" in whole:
        whole_run.append("prefix_cache.evictions")
    total = int(arrived.sum())
    within = good = None
    if whole["slo_attainment"] is not None:
        limits = {f"{name.removesuffix('_s')}_limit_s": value for name, value in (slo or {}).items()}
        met = slo_met(requests, **limits)
        within, good = int((met & arrived).sum()), int((met & finished).sum())
    first = int(requests["arrival_ns"].min())
    prompt = int(requests["prompt_tokens"][answered].sum())
    return {
        **whole,
        "requests": {
            "total": total,
            **_counts(part["status"]),
        },
        "ttft_s": statistics(ttft_s(part)),
        "tpot_s": statistics(tpot_s(part)),
        "e2el_s": statistics(e2el_s(part)),
        "queue_s": statistics(queue_s(part)),
        "output_tokens_per_s": _per(emitted, span_s),
        "total_tokens_per_s": _per(prompt + emitted, span_s),
        "requests_per_s": _per(int(finished.sum()), span_s),
        "goodput_requests_per_s": None if good is None else _per(good, span_s),
        "slo_attainment": None if within is None else within / total,
        "makespan_s": span_s,
        "iterations": n_iterations,
        "preemptions": int(part["preemptions"].sum()),
        "busy_fraction": _per(busy_ns * 1e-9, span_s * len(pools)) if one_stage_each else whole["busy_fraction"],
        "kv_utilization": {
            "mean": _per(held_ns * 1e-9, span_s * len(pools)) if n_iterations else None,
            "max": largest_share if n_iterations else None,
        },
        **_prefix_cache(part, meta),
        **({"models": _of_models(part, models, stated, span_s)} if len(models) > 1 else {}),
        "window": {
            "rule": window["rule"],
            "from_s": (begin - first) * 1e-9,
            "to_s": (end - first) * 1e-9,
            "requests": total,
            "whole_run": whole_run,
        },
    }


def in_window(requests: Mapping[str, NDArray[Any]], summary: Mapping[str, Any]) -> NDArray[np.bool_]:
    """Which requests the latencies of a *summary* are of. Shape [n]."""
    window = summary.get("window", WHOLE)
    arrival_ns = requests["arrival_ns"]
    if window["rule"] == "whole":
        return np.ones(arrival_ns.size, dtype=bool)
    first = int(arrival_ns.min())
    since = arrival_ns - first
    return (since >= round(window["from_s"] * 1e9)) & (since <= round(window["to_s"] * 1e9))


def _whole_summary(
    columns: Columns, *, slo: Mapping[str, float | None] | None = None, models: Sequence[str] = ()
) -> dict[str, Any]:
    """Every metric of a run, nested as in `summary.json`; plain Python numbers, None where there is none to give.

    Rates are over the makespan (first arrival to last finish). Output tokens are those emitted, prompt tokens those
    of requests whose prompt was completed. `slo_attainment` is the share of all requests, rejected and unfinished
    ones included, that met every limit of *slo* (keys `ttft_s`, `tpot_s`, `e2el_s`) and their own deadline where they
    have one; `goodput_requests_per_s` is their rate; both are None without limits and deadlines. `busy_fraction` is
    the time that pipeline stages spend on iterations over all stages (one a replica without a pipeline) and the
    makespan; `mfu` and
    `mbu` are arithmetic and memory traffic over what the replicas' GPUs could have done in the makespan.
    `kv_utilization` is the share of KV blocks in use: mean over time (idle replicas hold none) and largest.
    Of several *models*, names by `model_index`, there is an entry `models` with what can be said of each.
    """
    requests, meta = columns.requests, columns.meta
    iterations = iteration_sums(columns)
    status = requests["status"]
    total = int(status.size)
    counts = _counts(status)
    span_s = makespan_s(requests, iterations.last_end_ns)
    replicas_s = span_s * len(meta["kv_blocks_total"])
    emitted = int(requests["emitted_tokens"].sum())
    answered = (requests["first_token_ns"] >= 0) | _finished(requests)
    prompt = int(requests["prompt_tokens"][answered].sum())
    limits = {key: value for key, value in (slo or {}).items() if value is not None}
    within = _within(requests, limits)
    return {
        "requests": {"total": total, **counts},
        "ttft_s": statistics(ttft_s(requests)),
        "tpot_s": statistics(tpot_s(requests)),
        "itl_s": weighted_statistics(_gap_blocks(columns)),
        "e2el_s": statistics(e2el_s(requests)),
        "queue_s": statistics(queue_s(requests)),
        "output_tokens_per_s": _per(emitted, span_s),
        "total_tokens_per_s": _per(prompt + emitted, span_s),
        "requests_per_s": _per(counts["finished"], span_s),
        "goodput_requests_per_s": None if within is None else _per(within, span_s),
        "slo_attainment": None if within is None else within / total,
        "makespan_s": span_s,
        "iterations": iterations.n,
        "preemptions": int(requests["preemptions"].sum()),
        "mfu": _per(meta.get("flops"), span_s * (meta.get("peak_flops_per_s") or 0.0)),
        "mbu": _per(meta.get("hbm_bytes"), span_s * (meta.get("peak_bytes_per_s") or 0.0)),
        "busy_fraction": _per(meta["busy_ns"] * 1e-9, span_s * meta["n_stages"]),
        "kv_utilization": {
            "mean": _per(iterations.held_ns * 1e-9, replicas_s) if iterations.n else None,
            "max": iterations.largest_share if iterations.n else None,
        },
        **_prefix_cache(requests, meta),
        "saturated": saturated(requests),
        "speculation": speculation(meta.get("speculation")),
        **({"models": _of_models(requests, models, limits, span_s)} if len(models) > 1 else {}),
        "wall_s": meta.get("wall_s"),
    }


def _prefix_cache(requests: Mapping[str, NDArray[Any]], meta: Mapping[str, Any]) -> dict[str, Any]:
    """What prompts found in the prefix cache when they were first admitted, in tokens, under vLLM's names: `queries` are all prompt
    tokens that were looked up, `hits` those that were found. `evictions` are KV blocks whose content gave way, in the whole run.
    Empty without a cache."""
    if "prefix_hit_tokens" not in requests:
        return {}
    looked_up = requests["scheduled_ns"] >= 0
    queries = int(requests["prompt_tokens"][looked_up].sum())
    hits = int(requests["prefix_hit_tokens"].sum())
    return {
        "prefix_cache": {
            "hit_rate": hits / queries if queries else None,
            "queries": queries,
            "hits": hits,
            "hits_after_preemption": int(requests["prefix_hit_again_tokens"].sum()),
            "evictions": meta["prefix_evictions"],
        }
    }


def _counts(status: NDArray[Any]) -> dict[str, int]:
    """Requests by how they ended; those that their clients gave up only where there are any."""
    counts = {name: int((status == code).sum()) for code, name in enumerate(STATUS_NAMES)}
    return counts if counts["aborted"] else {name: n for name, n in counts.items() if name != "aborted"}


def _within(requests: Mapping[str, NDArray[Any]], limits: Mapping[str, float]) -> int | None:
    """Requests that met all limits and their deadline; None where there is neither."""
    deadlines = requests.get("deadline_ns")
    if not limits and (deadlines is None or not (deadlines >= 0).any()):
        return None
    met = slo_met(
        requests,
        ttft_limit_s=limits.get("ttft_s"),
        tpot_limit_s=limits.get("tpot_s"),
        e2el_limit_s=limits.get("e2el_s"),
    )
    return int(met.sum())


def _of_models(
    requests: Mapping[str, NDArray[Any]], models: Sequence[str], limits: Mapping[str, float], span_s: float
) -> dict[str, Any]:
    """What can be said of the requests for each model; rates are over the makespan of the whole run."""
    found = {}
    for row, name in enumerate(models):
        mine = requests["model_index"] == row
        part = {key: column[mine] for key, column in requests.items()}
        total = int(mine.sum())
        within = _within(part, limits)
        counts = _counts(part["status"])
        found[name] = {
            "requests": {"total": total, **counts},
            "ttft_s": statistics(ttft_s(part)),
            "tpot_s": statistics(tpot_s(part)),
            "e2el_s": statistics(e2el_s(part)),
            "output_tokens_per_s": _per(int(part["emitted_tokens"].sum()), span_s),
            "slo_attainment": None if within is None or not total else within / total,
        }
    return found


def speculation(counts: Mapping[tuple[int, int], Sequence[int]] | None) -> dict[str, Any] | None:
    """Counts and rates of speculative rounds under vLLM's names, alpha apart; None where nothing was speculated.

    The four acceptance rates differ: alpha is of a drafted token given that those before it were accepted,
    `acceptance_rate_per_pos` of each position among all rounds that drafted it, `draft_acceptance_rate` of all drafted
    tokens, and `mean_acceptance_length` counts tokens per round with the target's own. The last round of a request
    counts in full, though the output may end within it.
    """
    if counts is None:
        return None
    from policies.decoding import statistics_of_counts

    found = statistics_of_counts(counts)
    drafted = found.num_drafts > 0
    return {
        "num_drafts": found.num_drafts,
        "num_draft_tokens": found.num_draft_tokens,
        "num_accepted_tokens": found.num_accepted_tokens,
        "num_accepted_tokens_per_pos": list(found.num_accepted_tokens_per_pos),
        "mean_acceptance_length": found.mean_acceptance_length if drafted else None,
        "draft_acceptance_rate": found.draft_acceptance_rate if drafted else None,
        "acceptance_rate_per_pos": list(found.acceptance_rate_per_pos),
        "alpha": found.alpha if drafted else None,
    }


def _per(amount: float | None, denominator: float) -> float | None:
    return None if amount is None or denominator <= 0 else amount / denominator


def _finished(requests: Mapping[str, NDArray[Any]]) -> NDArray[np.bool_]:
    return requests["status"] == FINISHED


def _seconds_where(valid: NDArray[np.bool_], nanoseconds: NDArray[Any]) -> FloatArray:
    return np.where(valid, nanoseconds * 1e-9, np.nan)


def _statistics(
    mean: float, std: float, p50: float, p90: float, p95: float, p99: float, largest: float
) -> dict[str, float | None]:
    return {"mean": mean, "median": p50, "std": std, "p50": p50, "p90": p90, "p95": p95, "p99": p99, "max": largest}
