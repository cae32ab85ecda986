"""Random workloads for ranks in step with a prefill cadence, and what our ranks compute in every common step."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from policies.routers import RoundRobin
from policies.view import Plan, ReplicaView
from policies.vllm import Vllm
from sim.engine import FINISHED, Columns, Experiment, MachineSpec, ReplicaSpec, run
from tests.engine.costs import Ranked
from tests.oracle.vllm_cases import STEP_NS, a_case, computed_by
from workloads import Trace

OURS = (
    "max_num_seqs", "max_num_batched_tokens", "max_num_active_seqs", "long_prefill_token_threshold",
    "long_prefill_token_threshold_adaptive", "scheduler_reserve_full_isl", "async_scheduling", "prefill_schedule_interval",
)  # fmt: skip


def a_ranks_case(seed: int) -> dict[str, Any]:
    """A workload and the settings of ranks; memory is ample, and nobody gives up."""
    rng = random.Random(seed + 29)
    case = a_case(seed)
    requests = [
        {
            **request, "priority": 0, "abort": -1, "tape": [],
            # A prompt of one token is never put off.
            "prompt": 1 if rng.random() < 0.15 else request["prompt"],
        }
        for request in case["requests"]
        for _ in range(rng.choice([1, 2]))
    ]  # fmt: skip
    blocks = sum(-(-(request["prompt"] + request["max_tokens"]) // case["block_tokens"]) for request in requests)
    return {
        **case,
        "requests": requests,
        "k": 0,
        "lookahead_tokens": 0,
        "draft_slots": 0,
        "enable_chunked_prefill": True,
        "watermark": 0.0,
        "scheduling_policy": "fcfs",
        "kv_blocks": 2 * blocks + 10,
        "ranks": rng.choice([2, 3, 4]),
        "prefill_schedule_interval": rng.choice([1, 2, 3, 4, 7]),
    }


@dataclass(frozen=True)
class Noted:
    """Writes down what each rank is about to compute."""

    inner: Vllm
    steps: dict[int, dict[int, int]] = field(default_factory=dict, compare=False, repr=False)
    """By second; requests are of one rank each."""

    def plan(self, view: ReplicaView, /) -> Plan:
        # Every step is asked for, so that each is noted.
        plan = self.inner.plan(view)._replace(hold=1)
        run = computed_by(plan, view)
        if run:
            self.steps.setdefault(view.now_ns // STEP_NS, {}).update(run)
        return plan


def ran_on_ranks(case: dict[str, Any], scheduler: Any, **how: bool) -> Columns:
    """A case on its ranks, all of whose requests finish."""
    spec = ReplicaSpec(
        cost=Ranked(fixed_s=1.0),
        scheduler=scheduler,
        kv_blocks=case["kv_blocks"],
        block_tokens=case["block_tokens"],
        max_model_len=case["max_model_len"],
    )
    requests = case["requests"]
    trace = Trace.from_arrays(
        arrival_ns=[request["arrival"] * STEP_NS for request in requests],
        prompt_tokens=[request["prompt"] for request in requests],
        output_tokens=[request["output"] for request in requests],
        max_tokens=[request["max_tokens"] for request in requests],
    )
    machine = MachineSpec(hosted=(spec,), ranks=case["ranks"], rank_router=RoundRobin())
    columns = run(Experiment(workload=trace, replicas=(machine,), router=RoundRobin()), **how)
    assert set(columns.requests["status"].tolist()) == {FINISHED}
    return columns


def our_ranks(case: dict[str, Any], *, asked_each_step: bool = True) -> list[Any]:
    """[second, {request: tokens}] of every step, all ranks together; with *asked_each_step* off what ran is read from the columns:
    [second, tokens]."""
    inner = Vllm(**{name: case[name] for name in OURS})
    noted = Noted(inner)
    columns = ran_on_ranks(case, noted if asked_each_step else inner)
    if asked_each_step:
        return [[second, run] for second, run in sorted(noted.steps.items())]
    rows: dict[int, int] = {}
    iterations = columns.iterations()
    for start_ns, tokens in zip(iterations["start_ns"].tolist(), iterations["rows"].tolist(), strict=True):
        rows[start_ns // STEP_NS] = rows.get(start_ns // STEP_NS, 0) + tokens
    return [[second, tokens] for second, tokens in sorted(rows.items())]
