"""A run over time: requests, memory and tokens as means over equal intervals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import sim.metrics as metrics
from sim.plots.levels import Blocks, add_rates, mean_level, rate_of_parts

FloatArray = NDArray[np.float64]
BINS = 300


class OverTime(NamedTuple):
    """Means over the intervals between `edges_s`, which count from the first arrival."""

    edges_s: FloatArray
    waiting: FloatArray
    """Requests that wait."""
    running: FloatArray
    kv_share: FloatArray
    """The mean share of the KV blocks in use of the replicas that could serve then, as in the summary."""
    prompt_tokens_per_s: FloatArray
    output_tokens_per_s: FloatArray
    prefix_share: FloatArray | None
    """The share of the prompt tokens found in a prefix cache, NaN where no request is admitted; None without a cache."""
    replicas: FloatArray | None
    """Replicas on machines that are ready or drain; None where machines neither come, go nor fail."""


def over_time(
    requests: Mapping[str, NDArray[Any]],
    iterations: Blocks,
    *,
    last_end_ns: int,
    kv_blocks_total: Sequence[int],
    fleet: Mapping[str, Any] | None = None,
    bins: int = BINS,
) -> OverTime:
    """The course of a run with these *requests* and *iterations*. *last_end_ns* is the end of the last iteration, -1 without any;
    *fleet* says which replicas could serve when, all without it."""
    arrival_ns = requests["arrival_ns"]
    begin = metrics.first_arrival_ns(requests)
    end = max(int(requests["finish_ns"].max()), int(arrival_ns.max()), last_end_ns)
    edges_ns = np.linspace(begin, max(end, begin + 1), bins + 1)

    never = np.iinfo(np.int64).max // 4
    scheduled = np.where(requests["scheduled_ns"] >= 0, requests["scheduled_ns"], never)
    finish = np.where(requests["finish_ns"] >= 0, requests["finish_ns"], never)
    accepted = (requests["status"] != 1) & (arrival_ns >= 0)
    waiting = mean_level(edges_ns, arrival_ns[accepted], scheduled[accepted])
    running = mean_level(edges_ns, scheduled[accepted], finish[accepted])

    names = ["prefill_tokens", "emitted_tokens", *(("prefix_hit_tokens",) if "prefix_hit_tokens" in requests else ())]
    rates = [np.zeros(bins) for _ in names]

    def added() -> Iterator[Mapping[str, NDArray[Any]]]:
        for block in iterations():
            add_rates(rates, edges_ns, _with_loaded(block, names), names)
            yield block

    held = (
        (start, held_ns, used / kv_blocks_total[replica] * (held_ns * 1e-9))
        for replica, start, held_ns, used in metrics.kv_holdings(added())
    )
    kv_share = rate_of_parts(edges_ns, held)
    prompt_rate, output_rate, *found_rates = rates
    prefix_share = None
    if found_rates:
        asked = prompt_rate + found_rates[0]
        prefix_share = np.divide(found_rates[0], asked, out=np.full(bins, np.nan), where=asked > 0)
    replicas = None if fleet is None else _serving(fleet, edges_ns)
    serving = np.full(bins, float(len(kv_blocks_total))) if replicas is None else replicas
    kv_share = np.divide(kv_share, serving, out=np.zeros(bins), where=serving > 0)
    return OverTime(
        (edges_ns - begin) * 1e-9, waiting, running, kv_share, prompt_rate, output_rate, prefix_share, replicas
    )


def _with_loaded(block: Mapping[str, NDArray[Any]], names: Sequence[str]) -> Mapping[str, NDArray[Any]]:
    """The columns of *names* and the times; tokens that were loaded from tiers have been found as well."""
    found = {name: block[name] for name in ("start_ns", "duration_ns", *names)}
    if "loaded_tokens" in block and "prefix_hit_tokens" in found:
        found["prefix_hit_tokens"] = found["prefix_hit_tokens"] + np.maximum(block["loaded_tokens"], 0)
    return found


def _serving(fleet: Mapping[str, Any], edges_ns: FloatArray) -> FloatArray:
    """Replicas on machines that are ready or drain, as a mean over each interval between *edges_ns*."""
    stays = metrics.stays(fleet, int(edges_ns[0]), int(edges_ns[-1]))
    up = np.isin(stays["state"], [metrics.MACHINE_STATES.index(name) for name in ("ready", "draining")])
    tenants = np.asarray(fleet["n_tenants"])[stays["machine"]]
    level = np.zeros(edges_ns.size - 1)
    for n in np.unique(tenants[up]):
        mine = up & (tenants == n)
        level += n * mean_level(edges_ns, stays["begin_ns"][mine], stays["end_ns"][mine])
    return level
