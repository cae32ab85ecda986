"""All metrics of a run or of a window of it, nested as in `summary.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.decoding import statistics_of_counts
from sim.metrics.adapters import adapter_figures
from sim.metrics.classes import fairness, limits_of, within
from sim.metrics.columns import STATUS_NAMES, Columns
from sim.metrics.fleet import fleet_figures, replica_s, serving_s, stage_s
from sim.metrics.handover import encode_figures, grammar_figures, handover_figures
from sim.metrics.iterations import iteration_sums, sums_between
from sim.metrics.ranks import rank_figures
from sim.metrics.requests import e2el_s, finished, first_arrival_ns, queue_s, span_ns, tpot_s, ttft_s
from sim.metrics.slo import with_limits
from sim.metrics.spread import kept_blocks, statistics, weighted_statistics
from sim.metrics.tiers import kv_tiers
from sim.metrics.trend import saturated
from sim.metrics.windows import OVER_THE_WHOLE_RUN, WHOLE, window_of

_OF_THE_WHOLE_RUN = {
    "handover": "handover.link_use",
    "adapters": "adapters",
    "prefix_cache": "prefix_cache.evictions",
    "kv_tiers": "kv_tiers, but for hits and load_s",
}
"""Figures of the sections that a run may have which stay those of the whole run."""


def summary(
    columns: Columns,
    *,
    slo: Mapping[str, float | None] | None = None,
    window: Mapping[str, Any] = WHOLE,
    models: Sequence[str] = (),
    classes: Sequence[Mapping[str, Any]] = (),
    tenants: Sequence[str] = (),
) -> dict[str, Any]:
    """Every metric of a run or, with a *window*, of a part of it (see `window_of`); nested as in `summary.json`.

    `window` in it says which part that is: seconds after the first arrival, and the requests that arrive in it, whose
    latencies, attainment and preemptions these are. Rates, shares of time and iterations are then those between its two
    instants; the figures of OVER_THE_WHOLE_RUN, and with a pipeline `busy_fraction`, stay those of the run and are named
    in `window.whole_run`. *classes* of service, by `class_index`, have `name`, `weight` and limits `slo` of their own, which their
    requests are held to in place of *slo*; *tenants* are names by `tenant_index`. Limits of means and percentiles in *slo*, such as
    `ttft_p95_s`, are held in `slo` and `slo_kept` (`sim.metrics.slo`).
    """
    groups = _Groups(models, classes, tenants)
    if window["rule"] == "whole":
        found = _whole_summary(columns, slo=slo, groups=groups)
        part = {"rule": "whole", "from_s": 0.0, "to_s": found["makespan_s"], "requests": found["requests"]["total"]}
        return with_limits({**found, "window": {**part, "whole_run": []}}, slo, classes)
    return with_limits(_window_summary(columns, slo, window, groups), slo, classes)


def _window_summary(
    columns: Columns, slo: Mapping[str, float | None] | None, window: Mapping[str, Any], groups: _Groups
) -> dict[str, Any]:
    requests, meta = columns.requests, columns.meta
    begin, end = window_of(requests, window)
    span_s = (end - begin) * 1e-9
    arrived = (requests["arrival_ns"] >= begin) & (requests["arrival_ns"] <= end)
    part = {name: values[arrived] for name, values in requests.items()}
    done = finished(requests) & (requests["finish_ns"] > begin) & (requests["finish_ns"] <= end)
    answered_ns = np.where(requests["first_token_ns"] >= 0, requests["first_token_ns"], requests["finish_ns"])
    answered = (answered_ns > begin) & (answered_ns <= end)
    inside = sums_between(columns, begin, end)
    pools = meta["kv_blocks_total"]
    whole = _whole_summary(columns, slo=slo, groups=_Groups((), groups.classes, ()))
    ranks = sum(last - first for first, last in meta.get("ranks", ()))
    one_stage_each = meta["n_stages"] == meta["n_machines"] + ranks == len(pools)
    whole_run = [*OVER_THE_WHOLE_RUN, *([] if one_stage_each else ["busy_fraction"])]
    whole_run += [text for section, text in _OF_THE_WHOLE_RUN.items() if section in whole]
    total = int(arrived.sum())
    met = within(requests, limits_of(requests, slo, groups.classes))
    in_time = good = None
    if met is not None:
        in_time, good = int((met & arrived).sum()), int((met & done).sum())
    first = first_arrival_ns(requests)
    prompt = int(requests["prompt_tokens"][answered].sum())
    return {
        **whole,
        "requests": {"total": total, **_counts(part)},
        "ttft_s": statistics(ttft_s(part)),
        "tpot_s": statistics(tpot_s(part)),
        "e2el_s": statistics(e2el_s(part)),
        "queue_s": statistics(queue_s(part)),
        "output_tokens_per_s": _per(inside.emitted, span_s),
        "total_tokens_per_s": _per(prompt + inside.emitted, span_s),
        "requests_per_s": _per(int(done.sum()), span_s),
        "goodput_requests_per_s": None if good is None else _per(good, span_s),
        "slo_attainment": None if in_time is None else in_time / total,
        "makespan_s": span_s,
        "iterations": inside.n,
        "preemptions": int(part["preemptions"].sum()),
        "busy_fraction": _per(inside.busy_ns * 1e-9, replica_s(meta, begin, end))
        if one_stage_each
        else whole["busy_fraction"],
        "kv_utilization": {
            "mean": _per(inside.held_ns * 1e-9, replica_s(meta, begin, end)) if inside.n else None,
            "max": inside.largest_share if inside.n else None,
        },
        **rank_figures(columns, begin, end),
        **fleet_figures(part, meta, begin, end),
        **_prefix_cache(part, meta),
        **adapter_figures(meta),
        **encode_figures(part),
        **grammar_figures(part),
        **handover_figures(part, meta, whole["makespan_s"]),
        **kv_tiers(part, meta),
        **_by_group(part, groups, slo, span_s, end),
        "window": {
            "rule": window["rule"],
            "from_s": (begin - first) * 1e-9,
            "to_s": (end - first) * 1e-9,
            "requests": total,
            "whole_run": whole_run,
        },
    }


def _whole_summary(columns: Columns, *, slo: Mapping[str, float | None] | None, groups: _Groups) -> dict[str, Any]:
    """Every metric of a run, nested as in `summary.json`; plain Python numbers, None where there is none to give.

    Rates are over the makespan (see `span_ns`). Output tokens are those emitted, prompt tokens those
    of requests whose prompt was completed. `slo_attainment` is the share of all requests, rejected and unfinished
    ones included, that met every limit of *slo* (keys `ttft_s`, `tpot_s`, `e2el_s`) and their own deadline where they
    have one; `goodput_requests_per_s` is their rate; both are None without limits and deadlines. `busy_fraction` is
    the time that pipeline stages spend on iterations over all stages (one a replica without a pipeline) and the
    makespan; `mfu` and
    `mbu` are arithmetic and memory traffic over what the replicas' GPUs could have done in the makespan.
    `kv_utilization` is the share of KV blocks in use: mean over time (idle replicas hold none) and largest.
    Of machines with ranks `ranks` says how evenly these were filled (`sim.metrics.ranks`); each rank counts as a replica.
    Of several models, names by `model_index`, there is an entry `models` with what can be said of each; of classes of service and
    tenants `classes`, `tenants` and `fairness`. `releases` names the installed releases whose schedulers have decided.
    """
    requests, meta = columns.requests, columns.meta
    iterations = iteration_sums(columns)
    status = requests["status"]
    total = int(status.size)
    counts = _counts(requests)
    begin, end = span_ns(requests, iterations.last_end_ns)
    span_s = (end - begin) * 1e-9
    peaks_s = _peak_seconds(meta, begin, end)
    emitted = int(requests["emitted_tokens"].sum())
    answered = (requests["first_token_ns"] >= 0) | finished(requests)
    prompt = int(requests["prompt_tokens"][answered].sum())
    met = within(requests, limits_of(requests, slo, groups.classes))
    in_time = None if met is None else int(met.sum())
    return {
        "requests": {"total": total, **counts},
        "ttft_s": statistics(ttft_s(requests)),
        "tpot_s": statistics(tpot_s(requests)),
        "itl_s": weighted_statistics(kept_blocks(columns.itl_blocks)),
        "e2el_s": statistics(e2el_s(requests)),
        "queue_s": statistics(queue_s(requests)),
        "output_tokens_per_s": _per(emitted, span_s),
        "total_tokens_per_s": _per(prompt + emitted, span_s),
        "requests_per_s": _per(counts["finished"], span_s),
        "goodput_requests_per_s": None if in_time is None else _per(in_time, span_s),
        "slo_attainment": None if in_time is None else in_time / total,
        "makespan_s": span_s,
        "iterations": iterations.n,
        "preemptions": int(requests["preemptions"].sum()),
        "mfu": _per(meta.get("flops"), peaks_s[0]),
        "mbu": _per(meta.get("hbm_bytes"), peaks_s[1]),
        "busy_fraction": _per(meta["busy_ns"] * 1e-9, stage_s(meta, begin, end)),
        "kv_utilization": {
            "mean": _per(iterations.held_ns * 1e-9, replica_s(meta, begin, end)) if iterations.n else None,
            "max": iterations.largest_share if iterations.n else None,
        },
        **rank_figures(columns),
        **fleet_figures(requests, meta, begin, end),
        **_prefix_cache(requests, meta),
        **adapter_figures(meta),
        **encode_figures(requests),
        **grammar_figures(requests),
        **handover_figures(requests, meta, span_s),
        **kv_tiers(requests, meta),
        **({"releases": meta["releases"]} if "releases" in meta else {}),
        "saturated": saturated(requests),
        "speculation": speculation(meta.get("speculation")),
        **_by_group(requests, groups, slo, span_s, int(requests["arrival_ns"].max())),
        "wall_s": meta.get("wall_s"),
    }


def _peak_seconds(meta: Mapping[str, Any], begin: int, end: int) -> tuple[float, float]:
    """FLOPs and bytes that the GPUs of machines could have done between two instants while they could serve; 0 where unknown."""
    serving, span_s = serving_s(meta, begin, end), (end - begin) * 1e-9
    if serving is not None and "machine_peaks" in meta:
        peaks = np.array(meta["machine_peaks"])  # machines that only encode come behind, and have none
        flops, n_bytes = (serving[: len(peaks)] @ peaks).tolist()
        return flops, n_bytes
    return span_s * (meta.get("peak_flops_per_s") or 0.0), span_s * (meta.get("peak_bytes_per_s") or 0.0)


def _prefix_cache(requests: Mapping[str, NDArray[Any]], meta: Mapping[str, Any]) -> dict[str, Any]:
    """The prompt tokens that requests looked up and found in the prefix cache when they were first scheduled, under vLLM's names:
    `queries` are all that were looked up, `hits` those that were found. `evictions` are KV blocks whose content was evicted, in
    the whole run. Empty without a cache."""
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


def _counts(requests: Mapping[str, NDArray[Any]]) -> dict[str, int]:
    """Requests by how they ended; those that their clients gave up, and those that were lost, only where there are any. Where
    answers were shortened, `degraded`: those that finished with an answer that was to be no longer than so much, and
    `shortened_tokens`, which these lack."""
    status = requests["status"]
    counts = {name: int((status == code).sum()) for code, name in enumerate(STATUS_NAMES)}
    counts = {name: n for name, n in counts.items() if n or name not in ("aborted", "lost")}
    if "shortened_tokens" in requests:
        lacking = requests["shortened_tokens"][finished(requests)]
        counts |= {"degraded": int((lacking >= 0).sum()), "shortened_tokens": int(lacking[lacking > 0].sum())}
    return counts


class _Groups(NamedTuple):
    """The groups that requests are told apart by: names by index, and of classes what is agreed of them."""

    models: Sequence[str]
    classes: Sequence[Mapping[str, Any]]
    tenants: Sequence[str]


def _by_group(
    requests: Mapping[str, NDArray[Any]],
    groups: _Groups,
    slo: Mapping[str, float | None] | None,
    span_s: float,
    last_ns: int,
) -> dict[str, Any]:
    """The figures of the requests for each model, of each class and of each tenant; rates are over *span_s*."""
    found: dict[str, Any] = {}
    for key, column, names in (
        ("models", "model_index", groups.models if len(groups.models) > 1 else ()),
        ("classes", "class_index", [each["name"] for each in groups.classes]),
        ("tenants", "tenant_index", groups.tenants),
    ):
        if names:
            found[key] = {
                name: _of_some(requests, requests[column] == row, groups, slo, span_s) for row, name in enumerate(names)
            }
    if groups.tenants:
        found["fairness"] = fairness(requests, groups.classes, groups.tenants, last_ns)
    return found


def _of_some(
    requests: Mapping[str, NDArray[Any]],
    mine: NDArray[np.bool_],
    groups: _Groups,
    slo: Mapping[str, float | None] | None,
    span_s: float,
) -> dict[str, Any]:
    part = {key: column[mine] for key, column in requests.items()}
    total = int(mine.sum())
    met = within(part, limits_of(part, slo, groups.classes))
    return {
        "requests": {"total": total, **_counts(part)},
        "ttft_s": statistics(ttft_s(part)),
        "tpot_s": statistics(tpot_s(part)),
        "e2el_s": statistics(e2el_s(part)),
        "output_tokens_per_s": _per(int(part["emitted_tokens"].sum()), span_s),
        "slo_attainment": None if met is None or not total else int(met.sum()) / total,
    }


def speculation(counts: Mapping[tuple[int, int], Sequence[int]] | None) -> dict[str, Any] | None:
    """Counts and rates of speculative rounds under vLLM's names, alpha apart; None where nothing was speculated.

    The four acceptance rates differ: alpha is of a drafted token given that those before it were accepted,
    `acceptance_rate_per_pos` of each position among all rounds that drafted it, `draft_acceptance_rate` of all drafted
    tokens, and `mean_acceptance_length` counts tokens per round with the target's own. The last round of a request
    counts in full, though the output may end within it.
    """
    if counts is None:
        return None

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
