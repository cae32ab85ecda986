"""LoRA adapters on the oracles' workloads: requests that ask for them, and slots that cost nothing."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sim.engine.spec.adapters import AdapterSpec
from workloads import Trace, keyed_by_adapter


def with_adapters(workload: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The same workload where requests ask for adapters, more than a batch may have; each in its own share of the requests."""
    rng = random.Random(f"adapters of {seed}")
    slots = rng.choice([1, 1, 2, 3, 4])
    shares = [rng.random() for _ in range(slots + rng.randrange(1, 5))]
    numbers = range(-1, len(shares))
    requests = [
        {**request, "adapter": rng.choices(numbers, [rng.choice([0.0, 0.5, 2.0]), *shares])[0]}
        for request in workload["requests"]
    ]
    settings = {**workload.get("settings", {}), "max_loras_per_batch": slots}
    own = {"settings": settings} if "settings" in workload else {"max_loras": slots}
    return {**workload, **own, "requests": requests}


def asking(trace: Trace, requests: Sequence[Mapping[str, Any]]) -> Trace:
    """*trace*, each request of which asks for its adapter; *trace* itself where none asks for any."""
    if "adapter" not in requests[0]:
        return trace
    return keyed_by_adapter(replace(trace, adapter=[request["adapter"] for request in requests]))


def free_slots(most: int | None, *, base_has_slot: bool) -> AdapterSpec | None:
    """Slots for *most* adapters of as many as there may be, which cost nothing; None without."""
    if not most:
        return None
    return AdapterSpec(
        ranks=(8,) * 20, max_loras=most, max_cpu_loras=max(most, 20), base_has_slot=base_has_slot,
        step_s=lambda rows, ranks: 0.0, disk_s=lambda rank: 0.0, slot_s=lambda rank: 0.0,
    )  # fmt: skip
