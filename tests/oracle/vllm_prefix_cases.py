"""Random workloads whose prompts have beginnings in common, for vLLM's scheduler and ours with the prefix cache on."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import sim.engine.cache.block_cache
from policies.routers import RoundRobin
from policies.view import Plan, ReplicaView
from policies.vllm import Vllm
from sim.engine import ABORTED, FINISHED, Experiment
from sim.engine.cache.block_cache import BlockCache
from sim.engine.serve.engine_core import EngineCore
from sim.engine.simulation.cluster import Cluster
from tests.oracle.adapter_cases import asking
from tests.oracle.vllm_cases import STEP_NS, a_case, computed_by, scheduler_of, spec_of
from workloads import Trace


def with_prefixes(case: dict[str, Any]) -> dict[str, Any]:
    """The same workload with contents: groups that begin alike, prompts that are repeated, and conversations whose next prompt
    contains the last answer (sent before it is there, sometimes). Ids are of half a block to four."""
    rng = random.Random(case["seed"] + 13)
    block_tokens = case["block_tokens"]
    id_tokens = rng.choice([block_tokens // 2, block_tokens, block_tokens, block_tokens * 2, block_tokens * 4])
    fresh = iter(range(1, 10**6))
    groups = [[next(fresh) for _ in range(rng.randrange(1, 30))] for _ in range(rng.choice([1, 2, 4]))]
    longest = max(request["prompt"] for request in case["requests"])
    requests: list[dict[str, Any]] = []
    for request in case["requests"]:
        prompt, output = request["prompt"], request["output"]
        kind = rng.random()
        before = rng.choice(requests) if requests else None
        if kind < 0.15:
            ids: list[int] = []
        elif kind < 0.3 and before is not None:
            prompt = before["prompt"] + rng.choice([0, 0, 0, 1, -1])
            ids = before["ids"][: -(-prompt // id_tokens)]
        elif kind < 0.55 and before is not None:
            # The next turn of a conversation.
            prompt = min(before["prompt"] + before["output"] + rng.randrange(0, 50), 2 * longest)
            ids = list(before["ids"])
        else:
            ids = rng.choice(groups)[: rng.randrange(0, 1 + -(-prompt // id_tokens))]
        prompt = max(prompt, 2)
        whole = prompt + (output if rng.random() < 0.5 else 0)
        most = -(-whole // id_tokens)
        # No two requests emit what the workload says is equal: of whose blocks are found first nobody keeps count.
        ids = ids[: prompt // id_tokens if whole > prompt else most]
        if ids or rng.random() < 0.5:
            ids = [*ids, *(next(fresh) for _ in range(max(most - len(ids), 0)))][:most]
        requests.append({**request, "prompt": prompt, "ids": ids})
    most = max(request["prompt"] + request["output"] for request in requests) + 4 * (case["k"] + 1)
    least = -(-most // block_tokens) + 1
    enough = sum(-(-(r["prompt"] + r["output"] + 20) // block_tokens) for r in requests)
    blocks = rng.choice([least, least + enough // 10, least + enough // 4, least + enough])
    budget = case["max_num_batched_tokens"]
    if not case["enable_chunked_prefill"]:
        budget = max(budget, max(request["prompt"] + request["output"] for request in requests))
    return {
        **case,
        "id_tokens": id_tokens,
        "kv_blocks": blocks,
        "max_num_batched_tokens": budget,
        "max_model_len": max(case["max_model_len"], 2 * most),
        "requests": requests,
    }


def a_prefix_case(seed: int) -> dict[str, Any]:
    return with_prefixes(a_case(seed))


def a_drafter_case(seed: int) -> dict[str, Any]:
    """The same, where every other workload that speculates has a drafter that reads the target's states."""
    case = a_prefix_case(seed)
    return case | {"reads_target": case["k"] > 0 and random.Random(seed + 17).random() < 0.5}


class Counted(BlockCache):
    """A pool that notes how many blocks are held once a step has been planned."""

    __slots__ = ("held_after", "keeps", "preempting")

    def take(self, blocks: int) -> None:
        super().take(blocks)
        self.held_after = self.used

    def release(self, id_: int, blocks: int, tokens: int, *, ended: bool = False) -> None:
        super().release(id_, blocks, tokens, ended=ended)
        if id_ in self.preempting:
            self.held_after = self.used


@dataclass(frozen=True)
class Logged:
    """Writes down what the inner scheduler decides, as `vllm_release` does."""

    inner: Vllm
    steps: list[Any] = field(default_factory=list, compare=False, repr=False)
    cores: list[EngineCore] = field(default_factory=list, compare=False, repr=False)
    """The one that it plans for, once there is one."""

    def plan(self, view: ReplicaView, /) -> Plan:
        (core,) = self.cores
        kv = core.sequences.kv
        assert isinstance(kv, Counted)
        self.close(kv)
        evicted = kv.evicted
        plan = self.inner.plan(view)
        assert kv.evicted == evicted
        run = computed_by(plan, view)
        if run or plan.preempt:
            waiting = {seq.id for seq in view.waiting}
            admitted = [id_ for id_, _ in plan.run if id_ in waiting]
            before = dict.fromkeys(admitted, 0)
            state = core.sequences.state
            before = {id_: state.prefix_hits[id_] + state.prefix_hits_again[id_] for id_ in admitted}
            kv.held_after = kv.used
            kv.preempting = plan.preempt
            kv.keeps = (evicted, before)
            self.steps.append([view.now_ns // STEP_NS, run, sorted(plan.preempt), kv.held_after, {}, 0])
        return plan

    def close(self, kv: Counted) -> None:
        """The outcome of the step before."""
        if self.steps and kv.keeps is not None:
            evicted, before = kv.keeps
            state = self.cores[0].sequences.state
            found = {id_: state.prefix_hits[id_] + state.prefix_hits_again[id_] - had for id_, had in before.items()}
            self.steps[-1][3:] = [kv.held_after, found, kv.evicted - evicted]
            kv.keeps = None


@contextmanager
def counted() -> Iterator[None]:
    kept = sim.engine.cache.block_cache.BlockCache
    sim.engine.cache.block_cache.BlockCache = Counted  # type: ignore[misc]
    try:
        yield
    finally:
        sim.engine.cache.block_cache.BlockCache = kept  # type: ignore[misc]


def our_decisions(case: dict[str, Any], release: str = "0.32") -> list[Any]:
    """[second, {request: tokens}, preempted, blocks held once it was planned, {request: tokens found}, blocks evicted] of each
    step."""
    scheduler = Logged(scheduler_of(case, release))
    spec = spec_of(case, scheduler, prefix_cache="blocks", prefix_drops_last=case["reads_target"])
    experiment = Experiment(workload=trace_of(case), replicas=(spec,), router=RoundRobin(), seed=case["seed"])
    with counted():
        cluster = Cluster(experiment, fast_forward=False, check_invariants=False)
    (core,) = cluster._machines[0].cores
    scheduler.cores.append(core)
    kv = core.sequences.kv
    assert isinstance(kv, Counted)
    kv.keeps = None
    kv.preempting = ()
    columns = cluster.run()
    assert set(columns.requests["status"].tolist()) <= {FINISHED, ABORTED}, columns.reasons
    scheduler.close(kv)
    # Each is counted once, those as well that were to go and had ended by then.
    gone = Counter(id_ for step in scheduler.steps for id_ in step[2])
    assert columns.requests["preemptions"].tolist() == [gone[id_] for id_ in range(len(case["requests"]))]
    merged: list[Any] = []
    for second, run, preempted, held, found, evicted in scheduler.steps:
        if merged and merged[-1][0] == second:
            # A plan that only gave memory back was followed by another.
            last = merged[-1]
            merged[-1] = [
                second, last[1] | run, sorted(last[2] + preempted), held, last[4] | found, last[5] + evicted,
            ]  # fmt: skip
        else:
            merged.append([second, dict(run), preempted, held, found, evicted])
    return merged


def trace_of(case: dict[str, Any]) -> Trace:
    requests = case["requests"]
    trace = Trace(
        arrival_ns=[request["arrival"] * STEP_NS for request in requests],
        prompt_tokens=[request["prompt"] for request in requests],
        output_tokens=[request["output"] for request in requests],
        priority=[request["priority"] for request in requests],
        max_tokens=[request["max_tokens"] for request in requests],
        abort_ns=[
            (request["abort"] - request["arrival"]) * STEP_NS if request["abort"] >= 0 else -1 for request in requests
        ],
        prefix_blocks=np.array([id_ for request in requests for id_ in request["ids"]], np.int64),
        prefix_offsets=np.cumsum([0, *(len(request["ids"]) for request in requests)]),
        prefix_block_tokens=case["id_tokens"],
    )
    return asking(trace, requests)
