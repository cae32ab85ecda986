"""Figures of LoRA adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def adapter_figures(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The entry `adapters` of a summary, over the whole run: different adapters in an iteration and requests that wait for a slot,
    means over the time of iterations, and loads from disk to host memory and from there to slots with the time that they took.
    Empty without adapters."""
    found = meta.get("adapters")
    if not found:
        return {}
    busy = found["busy_ns"]
    return {
        "adapters": {
            "max_loras": found["max_loras"],
            "running_mean": found["adapter_ns"] / busy if busy else None,
            "running_max": found["most_running"],
            "waiting_for_slot_mean": found["waiting_ns"] / busy if busy else None,
            "disk_loads": found["disk_loads"],
            "disk_load_s": found["disk_load_ns"] * 1e-9,
            "slot_loads": found["slot_loads"],
            "slot_load_s": found["slot_load_ns"] * 1e-9,
        }
    }
