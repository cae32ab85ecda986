"""The decisions of an installed SGLang on the oracle's workloads where it drives inside our event loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from policies.driving import Driven, Engine
from policies.installed import SglangInstalled
from policies.routers import RoundRobin
from sim.engine import FINISHED, Experiment, ReplicaSpec, run
from tests.engine.costs import Linear
from tests.oracle.adapter_cases import asking, free_slots
from tests.oracle.vllm_driven import Overhearing
from workloads import Trace

STEP_NS = 1_000_000
SETTINGS = (
    "chunked_prefill_size", "max_prefill_tokens", "prefill_max_requests", "max_running_requests", "schedule_policy",
    "schedule_conservativeness", "enable_mixed_chunk", "scheduler_recv_interval", "disable_overlap_schedule", "ignore_eos",
    "prefill_decode_interval", "prefill_decode_interval_min_bs", "max_loras_per_batch",
)  # fmt: skip


@dataclass(frozen=True)
class Overheard(SglangInstalled):
    """Writes down the steps that the release plans."""

    plans: list[dict[str, Any]] = field(default_factory=list, compare=False, repr=False)

    def connect(self, engine: Engine, /) -> Driven:
        return Overhearing(super().connect(engine), self.plans)


def release_of(python: str) -> str:
    """The name and number of the release that an interpreter has."""
    return SglangInstalled(python=python).connect(Engine(100, 16, 1024, False, 0, 0, 0)).release


def trace_of(workload: Mapping[str, Any]) -> Trace:
    """The requests of a workload, with contents where it has any."""
    requests, id_tokens = workload["requests"], workload["settings"].get("id_tokens", 0)
    contents: dict[str, Any] = {}
    if id_tokens:
        contents = {
            "prefix_blocks": np.array([id_ for request in requests for id_ in request["ids"]], np.int64),
            "prefix_offsets": np.cumsum([0, *(len(request["ids"]) for request in requests)]),
            "prefix_block_tokens": id_tokens,
        }
    trace = Trace(
        arrival_ns=[request["step"] * STEP_NS for request in requests],
        prompt_tokens=[request["prompt"] for request in requests],
        output_tokens=[request["output"] for request in requests],
        max_tokens=[request["max_tokens"] for request in requests],
        **contents,
    )
    return asking(trace, requests)


def given(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the scheduler among those of a workload."""
    return {name: settings[name] for name in SETTINGS if name in settings}


def driven(workload: Mapping[str, Any], python: str, **options: Any) -> dict[str, Any]:
    """The `steps` of the release in the words of `test_sglang.ours`; `died` where it stopped before all requests had ended."""
    settings = workload["settings"]
    caching, page = "id_tokens" in settings, settings["page_size"]
    scheduler = Overheard(python=python, options=options, **given(settings))
    spec = ReplicaSpec(
        cost=Linear(fixed_s=1e-3),
        scheduler=scheduler,
        kv_blocks=settings["pool_tokens"] // page,
        block_tokens=page,
        prefix_cache="tree" if caching else None,
        adapters=free_slots(settings.get("max_loras_per_batch"), base_has_slot=True),
    )
    columns = run(Experiment(workload=trace_of(workload), replicas=(spec,), router=RoundRobin()))
    died = None if set(columns.requests["status"].tolist()) == {FINISHED} else "stalled"
    starts = (columns.iterations()["start_ns"] // STEP_NS).tolist()
    assert len(scheduler.plans) == len(starts)
    steps: list[Any] = []
    for start, plan in zip(starts, scheduler.plans, strict=True):
        prompts, decodes = plan["run"][: plan["prompts"]], plan["run"][plan["prompts"] :]
        step = {
            "step": start,
            "run": [[id_, tokens] for id_, tokens, _ in prompts],
            "decode": sorted(id_ for id_, _, _ in decodes),
            "retract": plan["preempted"],
            "free": (spec.kv_blocks - plan["held"] - plan["kept"]) * page,
        }
        if caching:
            step |= {
                "found": {id_: tokens for id_, tokens in plan["found"]},
                "evictable": plan["kept"] * page,
                "evicted": plan["evicted"] * page,
            }
        steps.append(step)
    return {"steps": steps, "died": died}
