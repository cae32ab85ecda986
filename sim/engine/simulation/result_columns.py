"""The columns that a run leaves of its requests, and the facts of its tiers, from their state."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.engine.record.columns import BUBBLES, IntArray, ReplicaColumns, transfer_facts
from sim.engine.requests.service_classes import class_columns
from sim.engine.requests.state import RequestState
from sim.engine.serve.engine_core import EngineCore
from sim.engine.tiers.tiers import Tiers
from workloads import Workload

_HITS = {"again": "tier_again"}
"""Columns of what was loaded that are not called as a tier."""


def as_column(values: array[int], dtype: type[np.signedinteger] = np.int64) -> NDArray[Any]:
    """The same memory as a numpy column."""
    return np.frombuffer(values, dtype)


def request_columns(state: RequestState, workload: Workload, *, caching: bool) -> dict[str, NDArray[Any]]:
    """One entry a request in each column. *caching*: some machine has a prefix cache."""
    n = len(state.prompt)
    none = np.zeros(n, np.int64)
    output = as_column(state.output)
    found: dict[str, NDArray[Any]] = {
        "request_id": np.arange(n),
        "deadline_ns": as_column(state.deadline) if state.deadline is not None else none - 1,
        "model_index": none if state.model is None else as_column(state.model),
        **({} if state.priority is None else {"priority": as_column(state.priority)}),
        **({} if state.adapter is None else {"adapter": as_column(state.adapter)}),
        **class_columns(workload),
        "arrival_ns": as_column(state.arrival),
        "scheduled_ns": as_column(state.scheduled),
        "first_token_ns": as_column(state.first_token),
        "finish_ns": as_column(state.finish),
        "prompt_tokens": as_column(state.prompt),
        "output_tokens": output,
        "emitted_tokens": output - as_column(state.left),
        "replica": as_column(state.replica, np.int32),
        "preemptions": as_column(state.preemptions, np.int32),
        "recomputed_tokens": as_column(state.recomputed),
        "status": np.frombuffer(state.status, np.int8),
        "reason": as_column(state.reason, np.int32),
        **({"shortened_tokens": _shortened(state)} if state.shortened else {}),
        **({"grammar_wait_ns": as_column(state.grammar_wait_ns)} if state.grammar_wait_ns else {}),
        "bubble_ns": np.sum(_bubbles(state), axis=0),
    }
    if state.encoded_images:
        found["encoded_images"] = as_column(state.encoded_images, np.int32)
        found["image_hits"] = as_column(state.image_hits, np.int32)
        found["encode_ns"] = as_column(state.encode_ns)
    if caching:
        hits = as_column(state.prefix_hits)
        computed = as_column(state.prompt) - hits - _loaded(state)
        found["prefix_hit_tokens"] = hits
        found["prefix_hit_again_tokens"] = as_column(state.prefix_hits_again)
        found["computed_prompt_tokens"] = np.where(as_column(state.scheduled) >= 0, computed, 0)
    return found


def bubble_columns(state: RequestState) -> dict[str, NDArray[Any]]:
    """Idle time of stages ahead of each request, by kind."""
    return {f"bubble_{name}_ns": kind for name, kind in zip(BUBBLES[:3], _bubbles(state), strict=False)}


def _bubbles(state: RequestState) -> list[NDArray[Any]]:
    return [as_column(kind) for kind in state.bubbles] or [np.zeros(len(state.prompt), np.int64)] * len(BUBBLES)


def _shortened(state: RequestState) -> IntArray:
    """Tokens by which each answer was shortened; -1 for others."""
    column = np.full(len(state.output), -1, np.int64)
    column[list(state.shortened)] = list(state.shortened.values())
    return column


def tier_columns(state: RequestState) -> dict[str, NDArray[Any]]:
    """Tokens of each request that were loaded, by kind of tier, and how long it was held; empty without tiers."""
    if not state.tier_hits:
        return {}
    return {
        **{f"{_HITS.get(kind, kind)}_hit_tokens": as_column(hits) for kind, hits in state.tier_hits.items()},
        "load_ns": np.maximum(as_column(state.load_ns), 0),
    }


def _loaded(state: RequestState) -> NDArray[Any]:
    """Prompt tokens of each request that were loaded when it was first admitted."""
    none = np.zeros(len(state.prompt), np.int64)
    return sum((as_column(hits) for kind, hits in state.tier_hits.items() if kind not in ("again", "swap")), none)


def adapter_facts(replicas: Sequence[ReplicaColumns]) -> dict[str, Any]:
    """Sums over the LoRA adapters of all *replicas*: time by the number of them that run, and the loads; empty without any."""
    found = [replica.adapters for replica in replicas if replica.adapters is not None]
    if not found:
        return {}
    loads = [load for each in found for load in each.loads]
    from_disk, to_slots = ([ns for _, _, to, ns in loads if to == place] for place in (0, 1))
    return {
        "max_loras": max(each.max_loras for each in found),
        "busy_ns": sum(each.busy_ns for each in found),
        "adapter_ns": sum(each.adapter_ns for each in found),
        "waiting_ns": sum(each.waiting_ns for each in found),
        "most_running": max(each.most_running for each in found),
        "disk_loads": len(from_disk),
        "disk_load_ns": sum(from_disk),
        "slot_loads": len(to_slots),
        "slot_load_ns": sum(to_slots),
    }


def tier_facts(cores: Sequence[EngineCore]) -> dict[str, dict[str, int]]:
    """Capacity, what was loaded and stored and how long it waited for its turn, by kind of tier, all *cores* together."""
    found: dict[str, dict[str, int]] = {}
    seen: set[int] = set()
    for core, tiers in [(core, core.loading.tiers) for core in cores if core.loading is not None]:
        transfers = core.recorder.transfers.array()
        for place, spec in enumerate(tiers.specs):
            mine = found.setdefault(spec.kind, {})
            for name, value in _facts_of(tiers, place, transfers[transfers["tier"] == place], seen).items():
                mine[name] = mine.get(name, 0) + value
    return found


def _facts_of(tiers: Tiers, place: int, transfers: NDArray[Any], seen: set[int]) -> dict[str, int]:
    """The facts of one tier of a machine; a store or link that others share counts once."""
    store, link = tiers.stores[place], tiers.links[place]
    own, busy_ns = None if id(store) in seen else store, 0 if id(link) in seen else link.busy_ns
    seen.update((id(store), id(link)))
    crossed = transfer_facts(transfers)
    return {
        "capacity_bytes": 0 if own is None else own.capacity_bytes,
        "used_bytes": 0 if own is None else own.used_bytes,
        "evicted_blocks": 0 if own is None else own.evicted,
        "loaded_tokens": crossed["load_bytes"] // tiers.block_bytes * tiers.block_tokens,
        **crossed,
        "skipped_short": tiers.skipped[place, "short"],
        "skipped_slower": tiers.skipped[place, "slower"],
        "link_busy_ns": busy_ns,
    }
