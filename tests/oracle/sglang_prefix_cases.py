"""Random workloads whose prompts have beginnings in common, for SGLang's scheduler and ours with the radix cache on."""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

import sim.engine.cache.block_cache
from policies.routers import RoundRobin
from policies.sglang import Sglang
from policies.view import Plan, ReplicaView
from sim.engine import Experiment, ReplicaSpec
from sim.engine.cache.radix_cache import RadixCache
from sim.engine.serve.engine_core import EngineCore
from sim.engine.simulation.cluster import Cluster
from sim.engine.time.errors import PolicyError
from tests.engine.costs import Linear
from tests.oracle.adapter_cases import free_slots
from tests.oracle.sglang_driven import given, trace_of

STEP_NS = 1_000_000


def with_prefixes(workload: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """The same workload with contents: groups that begin alike, prompts that are repeated, and conversations whose next prompt
    contains the last answer (sent before it is there, sometimes)."""
    settings = dict(workload["settings"])
    page, pool = settings["page_size"], settings["pool_tokens"]
    id_tokens = page * rng.choice([1, 2, 8]) if page > 1 else rng.choice([1, 4, 16, 40])
    fresh = iter(range(1, 10**6))
    groups = [[next(fresh) for _ in range(rng.randrange(1, 30))] for _ in range(rng.choice([1, 2, 4]))]
    requests: list[dict[str, Any]] = []
    for request in workload["requests"]:
        prompt, output = request["prompt"], request["output"]
        slack = request["max_tokens"] - output
        kind = rng.random()
        before = rng.choice(requests) if requests else None
        if kind < 0.15:
            ids: list[int] = []
        elif kind < 0.3 and before is not None:
            prompt = before["prompt"] + rng.choice([0, 0, 0, 1, -1])
            ids = before["ids"][: -(-prompt // id_tokens)]
        elif kind < 0.6 and before is not None:
            # The next turn of a conversation.
            prompt = before["prompt"] + before["output"] + rng.randrange(0, 20)
            ids = list(before["ids"])
        else:
            ids = rng.choice(groups)[: rng.randrange(0, 1 + -(-prompt // id_tokens))]
        prompt = max(min(prompt, pool - 2 * page - 8, pool // 2), 1)
        output = max(min(output, pool - -(-prompt // page) * page - page - 1), 1)
        room = pool - -(-prompt // page) * page - page - 1
        whole = prompt + (output if rng.random() < 0.5 else 0)
        most = -(-whole // id_tokens)
        # No two requests emit what the workload says is equal.
        ids = ids[: prompt // id_tokens if whole > prompt else most]
        if ids or rng.random() < 0.5:
            ids = [*ids, *(next(fresh) for _ in range(max(most - len(ids), 0)))][:most]
        requests.append(
            {**request, "prompt": prompt, "output": output, "max_tokens": min(output + slack, room), "ids": ids}
        )
    settings["schedule_policy"] = rng.choice(["fcfs", "fcfs", "lpm", "lpm", "lof"])
    return {"settings": {**settings, "id_tokens": id_tokens}, "requests": requests}


class Counted(RadixCache):
    """A pool that notes what there is once an iteration has taken its pages."""

    __slots__ = ("after",)

    def take(self, blocks: int) -> None:
        super().take(blocks)
        self.note()

    def before_decodes(self, sequences: int) -> None:
        super().before_decodes(sequences)
        self.note()

    def note(self) -> None:
        self.after = (self._blank, self.free - self._blank, self.evicted)


@dataclass(frozen=True)
class Noted:
    """A scheduler whose plans are written down as they are made, with what comes of them."""

    inner: Sglang
    steps: list[dict[str, Any]] = field(default_factory=list)
    cores: list[EngineCore] = field(default_factory=list, compare=False, repr=False)
    """The one that it plans for, once there is one."""
    evicted: list[int] = field(default_factory=lambda: [0])

    def plan(self, view: ReplicaView, /) -> Plan:
        self.close()
        plan = self.inner.plan(view)
        gone = set(plan.preempt)
        partial = {seq.id for seq in view.prefilling}
        staying = [seq for seq in view.running[:] if seq.id not in partial | gone and not seq.leaving]
        if plan.reject:
            self.steps.append({"reject": [id_ for id_, _ in plan.reject]})
        if plan.run or plan.decode:
            self.steps.append(
                {
                    "step": view.now_ns // STEP_NS,
                    "run": [list(entry) for entry in plan.run],
                    "decode": sorted(seq.id for seq in staying) if plan.decode else [],
                    "retract": list(plan.preempt),
                    "found": [id_ for id_, _ in plan.run if id_ not in partial],
                }
            )
        return plan

    def close(self) -> None:
        """The outcome of the step before."""
        if self.steps and isinstance(self.steps[-1].get("found"), list):
            step, sequences = self.steps[-1], self.cores[0].sequences
            kv, state = sequences.kv, sequences.state
            assert isinstance(kv, Counted)
            page = kv.block_tokens
            blank, evictable, evicted = kv.after
            before = self.evicted[0]
            self.evicted[0] = evicted
            found = {}
            for id_ in step["found"]:
                found[id_] = state.prefix_hits[id_] + state.prefix_hits_again[id_] - self.had.get(id_, 0)
                self.had[id_] = state.prefix_hits[id_] + state.prefix_hits_again[id_]
            step |= {"found": found, "free": blank * page, "evictable": evictable * page}
            step["evicted"] = (evicted - before) * page

    had: dict[int, int] = field(default_factory=dict, compare=False, repr=False)


def ours(workload: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps of our engine, up to where memory is not there."""
    settings = workload["settings"]
    scheduler = Noted(Sglang(**given(settings)))
    replica = ReplicaSpec(
        cost=Linear(fixed_s=1e-3),
        scheduler=scheduler,
        kv_blocks=settings["pool_tokens"] // settings["page_size"],
        block_tokens=settings["page_size"],
        prefix_cache="tree",
        adapters=free_slots(settings.get("max_loras_per_batch"), base_has_slot=True),
    )
    experiment = Experiment(workload=trace_of(workload), replicas=(replica,), router=RoundRobin())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sim.engine.cache.block_cache, "RadixCache", Counted)
        cluster = Cluster(experiment, fast_forward=False, check_invariants=False)
    (core,) = cluster._machines[0].cores
    scheduler.cores.append(core)
    with contextlib.suppress(PolicyError):
        cluster.run()
    scheduler.close()
    return scheduler.steps
