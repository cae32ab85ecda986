"""The tokens and bytes that were loaded from the memory behind the KV cache, and written to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.metrics.columns import PLACES
from sim.metrics.spread import statistics

KINDS = PLACES[1:]


def kv_tiers(requests: Mapping[str, NDArray[Any]], meta: Mapping[str, Any]) -> dict[str, Any]:
    """By kind of tier the prompt tokens loaded for first admissions (`hits`, `hit_rate` of all prompt tokens looked up), and of the
    whole run loads and stores with their bytes and mean waits for the link. `load_s` are the times that requests were held for
    loads, of those that were. Empty without tiers."""
    if "load_ns" not in requests:
        return {}
    queries = int(requests["prompt_tokens"][requests["scheduled_ns"] >= 0].sum())
    held_ns = requests["load_ns"]
    found: dict[str, Any] = {
        "load_s": statistics(held_ns[held_ns > 0] * 1e-9),
        "hits_after_preemption": int(requests["tier_again_hit_tokens"].sum()),
        "swapped_tokens": int(requests["swap_hit_tokens"].sum()) if "swap_hit_tokens" in requests else 0,
    }
    facts = meta.get("tiers", {})
    for kind in KINDS:
        name = f"{kind}_hit_tokens"
        if name in requests:
            hits = int(requests[name].sum())
            found[kind] = {
                "hits": hits,
                "hit_rate": hits / queries if queries else None,
                **_in_seconds(facts.get(kind, {})),
            }
    return {"kv_tiers": found}


def _in_seconds(facts: Mapping[str, int]) -> dict[str, Any]:
    found: dict[str, Any] = {name: value for name, value in facts.items() if not name.endswith("_ns")}
    if facts:
        loads, stores = facts["loads"], facts["stores"]
        found["load_wait_mean_s"] = facts["load_wait_ns"] / loads * 1e-9 if loads else None
        found["load_mean_s"] = facts["load_ns"] / loads * 1e-9 if loads else None
        found["store_wait_mean_s"] = facts["store_wait_ns"] / stores * 1e-9 if stores else None
        found["link_busy_s"] = float(np.round(facts["link_busy_ns"] * 1e-9, 9))
    return found
