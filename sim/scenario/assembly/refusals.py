"""Schedulers that could plan nothing for some sequence, and are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from policies.view import Largest
from sim.scenario import named
from sim.scenario.assembly.decoding import BuiltDecoding
from workloads import Workload


def never_gets_on(
    scheduler: Any,
    block_tokens: int,
    decoding: BuiltDecoding | None,
    slots: Mapping[str, int],
    workload: Workload,
) -> str | None:
    """Why *scheduler*, or one that it wraps, could plan nothing for some sequence, whatever else runs; None where it can."""
    query = 1 if decoding is None else decoding.decoding.max_query_tokens
    longest = int((workload.prompt_tokens + workload.output_tokens).max(initial=0))
    largest = Largest(block_tokens, query, query + slots.get("draft_slots", 0), longest)
    asked = (each.never_planned for each in named.layers(scheduler) if hasattr(each, "never_planned"))
    return next((f"scheduler: {why}" for never_planned in asked if (why := never_planned(largest)) is not None), None)
