"""Random workloads for vLLM's scheduler and ours, and what ours decides in each step, in the words of `vllm_release`."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from policies.acceptance import Iid
from policies.decoding import Speculative
from policies.routers import RoundRobin
from policies.view import Plan, ReplicaView
from policies.vllm import Vllm
from sim.engine import ABORTED, FINISHED, Experiment, ReplicaSpec
from sim.engine.serve.engine_core import EngineCore
from sim.engine.simulation.cluster import Cluster
from tests.engine.costs import Linear
from tests.oracle.adapter_cases import asking, free_slots
from workloads import Trace

STEP_NS = 1_000_000_000
SETTINGS = (
    "max_num_seqs", "max_num_batched_tokens", "max_num_active_seqs", "long_prefill_token_threshold",
    "long_prefill_token_threshold_adaptive", "enable_chunked_prefill", "scheduler_reserve_full_isl", "watermark",
    "scheduling_policy", "async_scheduling", "max_num_scheduled_tokens",
)  # fmt: skip


def a_case(seed: int) -> dict[str, Any]:
    """A workload and the settings of the engine that serves it."""
    rng = random.Random(seed)
    block_tokens = rng.choice([8, 16, 16, 32])
    sequences = rng.choice([2, 4, 8, 16, 32])
    longest = rng.choice([60, 300, 1500])
    k = rng.choice([0, 0, 1, 3, 5])
    has_kv = k > 0 and rng.random() < 0.7
    draft_slots = int(has_kv and rng.random() < 0.4)
    # A budget that ends within the drafts of a sequence is left out of the comparison: whoever runs can take a whole step.
    least = sequences * (k + 1 + draft_slots)
    chunked = rng.random() < 0.9
    budget = least + rng.choice([0, 16, 100, 500, 2000])
    threshold = rng.choice([0, 0, 32, 200]) if not k else 0
    async_scheduling = rng.random() < 0.5
    requests, second = [], 0
    gives_up, stops_early = rng.choice([0.0, 0.0, 0.2]), rng.choice([0.0, 0.5])
    speculation = (
        Speculative(method="eagle", num_speculative_tokens=k, acceptance=Iid(alpha=rng.choice([0.3, 0.7])))
        if k
        else None
    )
    for id_ in range(rng.randrange(5, 40)):
        second += rng.choice([0, 0, 0, 1, 3, 10])
        output = rng.randrange(1, rng.choice([3, 20, 120]))
        prompt = rng.randrange(2, longest)
        tape = speculation.round_tokens(id_, 0, output + 20 * (k + 1), k, seed).tolist() if speculation else []
        requests.append(
            {
                "arrival": second,
                "prompt": prompt,
                "output": output,
                "priority": rng.randrange(3),
                # Seconds at which the client goes, and tokens that it allows at most: fewer may come.
                "abort": second + rng.choice([0, 1, 3, 30]) if rng.random() < gives_up else -1,
                "max_tokens": output + rng.choice([1, 2, 50]) if rng.random() < stops_early else output,
                "tape": tape,
            }
        )
    most = max(request["prompt"] + request["output"] for request in requests) + 3 * (k + 1) + k
    enough = sum(-(-(r["prompt"] + r["output"] + 20) // block_tokens) for r in requests)
    least_blocks = -(-most // block_tokens) + 1
    return {
        "seed": seed,
        "max_num_seqs": sequences,
        "max_num_batched_tokens": budget if chunked else max(budget, 4096),
        "max_num_active_seqs": rng.choice([None, None, max(1, sequences // 2)]),
        "max_num_scheduled_tokens": None,
        "max_model_len": 4096,
        "long_prefill_token_threshold": threshold,
        "long_prefill_token_threshold_adaptive": bool(threshold) and rng.random() < 0.3,
        "enable_chunked_prefill": chunked,
        "scheduler_reserve_full_isl": rng.random() < 0.6,
        "watermark": rng.choice([0.0, 0.0, 0.05]),
        "scheduling_policy": rng.choice(["fcfs", "fcfs", "priority"]),
        "async_scheduling": async_scheduling,
        "block_tokens": block_tokens,
        "kv_blocks": rng.choice(
            [least_blocks, least_blocks + enough // 10, least_blocks + enough // 4, least_blocks + enough]
        ),
        "k": k,
        "reads_target": False,
        "lookahead_tokens": k if has_kv else 0,
        "draft_slots": draft_slots,
        "alpha": speculation.acceptance.alpha if speculation else None,
        "requests": requests,
    }


def with_more_limits(case: dict[str, Any]) -> dict[str, Any]:
    """The same workload, limited in what iterations have without drafts, and in long prompts where there is speculation."""
    rng = random.Random(case["seed"] + 7)
    # As in `a_case`: whoever runs can take a whole step.
    least, budget = case["max_num_seqs"] * (case["k"] + 1), case["max_num_batched_tokens"]
    threshold = rng.choice([8, 32, 200]) if case["k"] else case["long_prefill_token_threshold"]
    return {
        **case,
        "long_prefill_token_threshold": threshold,
        "long_prefill_token_threshold_adaptive": bool(threshold) and rng.random() < 0.3,
        "max_num_scheduled_tokens": (
            rng.choice([None, least, min(budget, least + rng.choice([1, 50]))])
            if case["enable_chunked_prefill"]
            else None
        ),
    }


def computed_by(plan: Plan, view: ReplicaView) -> dict[int, int]:
    """The tokens of each request that *plan* has the next step compute."""
    prefilling = {seq.id for seq in view.prefilling}
    run = dict(plan.run)
    if plan.decode is True:
        gone = set(plan.preempt)
        run |= {
            seq.id: view.query_tokens for seq in view.running if seq.id not in prefilling | gone and not seq.leaving
        }
    elif plan.decode:
        run |= dict.fromkeys(plan.decode, view.query_tokens)
    return run


def scheduler_of(case: dict[str, Any], release: str) -> Vllm:
    return Vllm(**{name: case[name] for name in SETTINGS}, max_loras=case.get("max_loras"), release=release)


def speculation_of(case: Mapping[str, Any]) -> Speculative | None:
    if not case["k"]:
        return None
    return Speculative(method="eagle", num_speculative_tokens=case["k"], acceptance=Iid(alpha=case["alpha"]))


def spec_of(case: Mapping[str, Any], scheduler: Any, **more: Any) -> ReplicaSpec:
    """The machine of a case, on which each step takes a second."""
    return ReplicaSpec(
        cost=Linear(fixed_s=1.0),
        scheduler=scheduler,
        kv_blocks=case["kv_blocks"],
        block_tokens=case["block_tokens"],
        max_model_len=case["max_model_len"],
        lookahead_tokens=case["lookahead_tokens"],
        draft_slots=case["draft_slots"],
        adapters=free_slots(case.get("max_loras"), base_has_slot=False),
        decoding=speculation_of(case),
        **more,
    )


@dataclass(frozen=True)
class Logged:
    """Writes down what the inner scheduler decides, as `vllm_release` does."""

    inner: Vllm
    steps: list[Any] = field(default_factory=list, compare=False, repr=False)
    cores: list[EngineCore] = field(default_factory=list, compare=False, repr=False)
    """The one that it plans for, once there is one."""

    def plan(self, view: ReplicaView, /) -> Plan:
        plan = self.inner.plan(view)
        run = computed_by(plan, view)
        if run or plan.preempt:
            # Blocks of those who have ended are the release's until the next iteration, and those of a step that comes to nothing.
            (core,) = self.cores
            ended = core.batches[0].leaving
            held = sum(gone.blocks for id_, gone in ended.items() if id_ not in plan.preempt)
            held += sum(gone.growth_blocks for id_, gone in ended.items() if gone.steps_on and id_ in run)
            self.steps.append([view.now_ns // STEP_NS, run, sorted(plan.preempt), held])
        return plan


def our_decisions(case: dict[str, Any], release: str = "0.32") -> list[Any]:
    """[second, {request: tokens}, preempted, blocks held once it was planned] of each step of our engine."""
    scheduler = Logged(scheduler_of(case, release))
    requests = case["requests"]
    trace = Trace.from_arrays(
        arrival_ns=[request["arrival"] * STEP_NS for request in requests],
        prompt_tokens=[request["prompt"] for request in requests],
        output_tokens=[request["output"] for request in requests],
        priority=[request["priority"] for request in requests],
        max_tokens=[request["max_tokens"] for request in requests],
        abort_s=[request["abort"] - request["arrival"] if request["abort"] >= 0 else np.nan for request in requests],
    )
    spec = spec_of(case, scheduler)
    experiment = Experiment(workload=asking(trace, requests), replicas=(spec,), router=RoundRobin(), seed=case["seed"])
    cluster = Cluster(experiment, fast_forward=False, check_invariants=False)
    scheduler.cores.extend(cluster._machines[0].cores)
    columns = cluster.run()
    assert set(columns.requests["status"].tolist()) <= {FINISHED, ABORTED}, columns.reasons
    iterations = columns.iterations()
    held = dict(zip((iterations["start_ns"] // STEP_NS).tolist(), iterations["kv_blocks_used"].tolist(), strict=True))
    merged: list[Any] = []
    for second, run, preempted, kept in scheduler.steps:
        if merged and merged[-1][0] == second:
            # A plan that only gave memory back was followed by another.
            merged[-1][1] |= run
            merged[-1][2] = sorted(merged[-1][2] + preempted)
            merged[-1][3] = held.get(second, 0) + kept
        else:
            merged.append([second, dict(run), preempted, held.get(second, 0) + kept])
    return merged
