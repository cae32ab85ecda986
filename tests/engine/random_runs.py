"""Random runs over all that the engine can do, small: what the tests of identity, balance and invariants draw from."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from math import inf
from typing import Any

import numpy as np

from hwmodels.reach import Chunk
from policies.acceptance import BetaAlpha, Iid, PerPosition
from policies.adapters import MaxLoras
from policies.control import Concurrency, Control, Knative, RateModel, Schedule, TargetTracking
from policies.decoding import Speculative
from policies.published import FasterTransformer, Orca, OrcaPaged, Static
from policies.ranks import PromptBalance
from policies.routers import (
    Knowledge,
    LeastKv,
    LeastOutstanding,
    PowerOfTwo,
    Prefix,
    Random,
    ReplicaLoad,
    RoundRobin,
    RoutedRequest,
    TrtLlmRanks,
    VllmRanks,
)
from policies.sarathi import ChunkedOnly, DecodeMaximal
from policies.schedulers import Sarathi
from policies.sglang import Sglang
from policies.trtllm import TrtLlm
from policies.view import UNTIL_CHANGE, Plan, ReplicaView, Scheduler, asked, evicts
from policies.vllm import Vllm, VllmV0
from policies.wrappers import EvictNewest
from sim.engine import Columns, Experiment, MachineSpec, ReplicaSpec, run
from sim.engine.batch.grammars import GrammarSpec
from sim.engine.spec.adapters import AdapterSpec
from sim.engine.spec.lifecycle import Failing, FleetSpec, Life, Outage, Scaling
from sim.engine.spec.roles import HandoverSpec, KvPath, Role, Room
from sim.engine.tiers.links import Limit, LinkSpec, Slowdown
from sim.engine.tiers.tiers import TierKind, TierSpec, WriteRule
from tests.engine.costs import Linear, Ranked
from workloads import ClosedLoop, Follows, Trace, keyed_by_adapter

DECODINGS = (
    Speculative(method="draft_model", num_speculative_tokens=3, acceptance=Iid(alpha=0.6)),
    Speculative(method="eagle", num_speculative_tokens=4, acceptance=BetaAlpha(mean=0.7, sd=0.1)),
    Speculative(method="ngram", num_speculative_tokens=2, acceptance=PerPosition(rates=(0.5, 0.3), kind="conditional")),
    Speculative(
        method="draft_model",
        num_speculative_tokens=[[1, 2, 5], [3, 6, 2], [7, None, 0]],
        acceptance=Iid(alpha=0.8),
    ),
)


@dataclass(frozen=True)
class FewestFirst:
    """Admits whole prompts one at a time, and lets only the few sequences with the least context decode."""

    n: int

    def plan(self, view: ReplicaView, /) -> Plan:
        free = view.free_blocks - view.growth_blocks
        chunks = tuple((seq.id, seq.tokens) for seq in view.waiting[:1] if view.blocks_to_admit(seq) <= free)
        ranked = sorted(view.running, key=lambda seq: (seq.cached_tokens, seq.id))
        return Plan(decode=tuple(seq.id for seq in ranked[: self.n]), run=chunks)


@dataclass(frozen=True)
class OnTheHour:
    """Lets nobody in but at the first look after each multiple of *period_ns*, and says so."""

    inner: Scheduler
    period_ns: int

    def plan(self, view: ReplicaView, /) -> Plan:
        next_ns = (view.now_ns // self.period_ns + 1) * self.period_ns
        if view.now_ns % self.period_ns < self.period_ns // 4:
            return self.inner.plan(view)._replace(hold=1)
        closed = replace(view, waiting=())
        if not (view.n_decoding or view.prefilling):
            return Plan(until_ns=next_ns)
        plan = self.inner.plan(closed)
        return plan._replace(until_ns=next_ns)


@dataclass(frozen=True)
class Impatient:
    """Refuses whoever has waited beyond its deadline when it comes to the head of the queue."""

    inner: Scheduler

    def plan(self, view: ReplicaView, /) -> Plan:
        late = []
        for seq in view.waiting:
            if seq.deadline_ns < 0 or view.now_ns <= seq.arrival_ns + seq.deadline_ns:
                break
            late.append((seq.id, "too late"))
        if late:
            return Plan(reject=tuple(late))
        # Whoever comes may have to be refused in its turn.
        plan = self.inner.plan(view)._replace(through_arrivals=False)
        if view.waiting and view.waiting[0].deadline_ns >= 0:
            return plan._replace(
                until_ns=min(plan.until_ns, view.waiting[0].arrival_ns + view.waiting[0].deadline_ns + 1)
            )
        return plan


def a_scheduler(rng: random.Random) -> Scheduler:
    inner: Scheduler = rng.choice(
        [
            Static(rng.randrange(1, 6)),
            OrcaPaged(rng.randrange(1, 12)),
            VllmV0(rng.randrange(10, 400), rng.randrange(1, 12)),
            Sarathi(rng.randrange(4, 200), rng.randrange(1, 12)),
            Sarathi(rng.randrange(4, 100), rng.randrange(4, 40)),
            DecodeMaximal(chunk=rng.randrange(8, 64), max_sequences=rng.randrange(1, 8), align=False),
            ChunkedOnly(rng.randrange(4, 100), rng.randrange(1, 12)),
            FasterTransformer(rng.randrange(1, 6)),
            FewestFirst(rng.randrange(1, 4)),
            *[a_vllm(rng) for _ in range(3)],
            Orca(rng.randrange(1, 12)),
            a_trtllm(rng),
        ]
    )
    if not isinstance(inner, (FasterTransformer, Static, FewestFirst)) and rng.random() < 0.2:
        inner = OnTheHour(inner, rng.choice([10**6, 7 * 10**6, 10**8]))
    if rng.random() < 0.3:
        inner = Impatient(inner)
    return inner if isinstance(inner, (Vllm, TrtLlm)) and evicts(inner) and rng.random() < 0.8 else EvictNewest(inner)


def a_trtllm(rng: random.Random) -> TrtLlm:
    chunked = rng.random() < 0.6
    return TrtLlm(
        max_batch_size=rng.choice([1, 4, 12]),
        max_num_tokens=rng.randrange(20, 100) if chunked else 200,
        capacity_scheduler_policy=rng.choice(["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"]),
        enable_chunked_prefill=chunked,
        context_chunking_policy=rng.choice(["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"]),
        batch_wait_timeout_iters=rng.choice([0, 0, 3]),
        batch_wait_max_tokens_ratio=0.6,
        disable_overlap_scheduler=rng.random() < 0.5,
    )


def a_vllm(rng: random.Random) -> Vllm:
    sequences = rng.choice([1, 2, 4, 12, 40])
    chunked = rng.random() < 0.9
    found = Vllm(
        max_num_batched_tokens=sequences + rng.randrange(12, 100) if chunked else 4000,
        max_num_seqs=sequences,
        long_prefill_token_threshold=rng.choice([0, 0, 0, 4, 16]),
        long_prefill_token_threshold_adaptive=rng.random() < 0.3,
        enable_chunked_prefill=chunked,
        scheduler_reserve_full_isl=rng.random() < 0.6,
        watermark=rng.choice([0.0, 0.0, 0.05]),
        scheduling_policy=rng.choice(["fcfs", "fcfs", "priority"]),
        async_scheduling=rng.random() < 0.5,
    )
    # Sequences that are admitted by their first chunk, and give way by priority, may take memory from each other for ever.
    return replace(found, scheduler_reserve_full_isl=True) if found.scheduling_policy == "priority" else found


def a_tenant(rng: random.Random, *, speculative: bool, n_stages: int, model: int | None) -> ReplicaSpec:
    block_tokens = rng.choice([1, 4, 16])
    cost = Linear(
        fixed_s=rng.choice([1e-3, 5e-3, 1.25e-3]),
        row_s=rng.choice([0.0, 1e-5, 1e-4]),
        kv_s=rng.choice([0.0, 4e-8, 1e-6]),
        window_s=1e-8,
        window_tokens=rng.choice([None, Chunk(25), 40]),
        n_stages=n_stages,
        transfer_s=rng.choice([0.0, 1e-4]) if n_stages > 1 else 0.0,
    )
    return ReplicaSpec(
        cost=cost,
        scheduler=a_scheduler(rng),
        kv_blocks=rng.choice([60, 120, 400, 4000]) // block_tokens + 4,
        block_tokens=block_tokens,
        decoding=rng.choice(DECODINGS) if speculative else None,
        draft_cost=rng.choice([None, Linear(fixed_s=2e-4, kv_s=1e-9)]) if speculative else None,
        speculation_overhead_s=rng.choice([0.0, 1e-4]) if speculative else 0.0,
        micro_batches=rng.choice([None, None, None, 1, 2, 3]),
        model=model,
        max_model_len=rng.choice([None, None, 90]),
        lookahead_tokens=rng.choice([0, 3]) if speculative else 0,
        draft_slots=rng.choice([0, 0, 1]) if speculative else 0,
        prefix_cache="blocks",
    )


def a_machine(rng: random.Random, *, speculative: bool, n_models: int) -> MachineSpec | ReplicaSpec:
    n_stages = rng.choice([1, 1, 1, 2, 3, 4])
    if n_models == 1:
        return a_tenant(rng, speculative=speculative, n_stages=n_stages, model=None)
    hosted = rng.sample(range(n_models), rng.randrange(1, n_models + 1))
    return MachineSpec(
        hosted=tuple(a_tenant(rng, speculative=speculative, n_stages=n_stages, model=model) for model in hosted),
        turn=rng.choice(["rotation", "oldest"]),
    )


def with_ranks(experiment: Experiment, seed: int, *, in_turn: bool = False) -> Experiment:
    """The same with ranks in the machines that have one stage, one micro-batch and one model; *in_turn*: in all others, too."""
    rng, of_others = random.Random(f"ranks of {seed}"), random.Random(f"ranks in turn of {seed}")
    machines: list[MachineSpec] = []
    for spec in experiment.machines:
        first = spec.hosted[0]
        alone = len(spec.hosted) == first.cost.n_stages == (first.micro_batches or 1) == 1
        if alone:
            machines.append(_with_ranks(spec, rng))
        else:
            machines.append(_with_ranks(spec, of_others) if in_turn else spec)
    return replace(experiment, replicas=tuple(machines))


def _with_ranks(spec: MachineSpec, rng: random.Random) -> MachineSpec:
    """The same machine with a few ranks."""
    shared_s, shared_row_s = rng.choice([0.0, 1e-4]), rng.choice([0.0, 1e-5])
    ranks = rng.randrange(2, 5)
    router = rng.choice([RoundRobin(), Random(), LeastOutstanding(), LeastKv(), Prefix(), VllmRanks(), TrtLlmRanks()])
    return replace(
        spec,
        hosted=tuple(
            replace(
                tenant,
                cost=Ranked(
                    **{field.name: getattr(tenant.cost, field.name) for field in fields(Linear)},
                    shared_s=shared_s,
                    shared_row_s=shared_row_s,
                    transfer_row_s=shared_row_s if tenant.cost.n_stages > 1 else 0.0,
                ),
            )
            for tenant in spec.hosted
        ),
        ranks=ranks,
        rank_router=router,
        prompt_balance=rng.choice([None, None, PromptBalance(), PromptBalance(timeout_iters=5, batching_wait_iters=1)]),
    )


def an_experiment(seed: int, *, speculative: bool) -> Experiment:
    """Anything that users might run, small: pools tight and ample, pipelines, micro-batches, models that share a machine,
    arrivals on and off the grid of iteration ends."""
    rng = random.Random(seed)
    n = rng.randrange(1, 60)
    n_models = rng.choice([1, 1, 1, 2, 3])
    prompt = [rng.randrange(0, 80) for _ in range(n)]
    output = [rng.randrange(0, 50) if tokens else rng.randrange(1, 50) for tokens in prompt]
    workload: Trace | ClosedLoop
    if n_models == 1 and rng.random() < 0.3:
        think_ns = None if rng.random() < 0.5 else np.array([rng.randrange(0, 10**7) for _ in range(n)])
        workload = ClosedLoop(
            prompt_tokens=np.array(prompt),
            output_tokens=np.array(output),
            concurrency=rng.randrange(1, 10),
            think_ns=think_ns,
        )
    else:
        grid = rng.choice([1, 1_000_000, 5_000_000, 1_250_000])
        last = rng.choice([1, 10**7, 10**8, 10**9])
        columns: dict[str, Any] = {}
        if n_models > 1:
            columns = {
                "model_index": [rng.randrange(n_models) for _ in range(n)],
                "models": tuple(f"m{i}" for i in range(n_models)),
            }
        if rng.random() < 0.4:
            columns["deadline_ns"] = [rng.choice([-1, 10**6, 10**8, rng.randrange(1, 10**9)]) for _ in range(n)]
        columns |= clients_who_go(random.Random(f"clients of {seed}"), output)
        if "abort_ns" not in columns:
            columns |= clients_who_wait(random.Random(f"sessions of {seed}"), n)
        workload = Trace(
            arrival_ns=sorted(rng.randrange(0, last + 1) // grid * grid for _ in range(n)),
            prompt_tokens=prompt,
            output_tokens=output,
            **columns,
            **beginnings(random.Random(f"contents of {seed}"), prompt, output),
        )
    machine = a_machine(rng, speculative=speculative, n_models=n_models)
    machines = (machine,) * rng.choice([1, 1, 2, 3])
    if n_models > 1 or rng.random() < 0.2:
        machines = tuple(a_machine(rng, speculative=speculative, n_models=n_models) for _ in machines)
    machines = with_trees(random.Random(f"trees of {seed}"), machines)
    return Experiment(
        workload=workload,
        in_flight=a_limit(random.Random(f"limit of {seed}"), workload),
        replicas=machines,
        router=rng.choice([RoundRobin(), Random(), LeastOutstanding(), PowerOfTwo(), LeastKv()]),
        seed=seed,
        horizon_ns=rng.choice([None, None, None, rng.randrange(1, 10**9)]),
        admission_s=rng.choice([0.0, 0.0, 1e-3]),
        admission_s_per_token=rng.choice([0.0, 1e-5]),
        admission_serial_s=rng.choice([0.0, 0.0, 2e-3]),
    )


@functools.cache
def ran(seed: int, *, speculative: bool) -> Columns:
    """The columns of `an_experiment`, run once for all tests that look at them."""
    return run(an_experiment(seed, speculative=speculative))


def apart(seed: int, *, speculative: bool) -> Experiment:
    """The same workloads on machines that prefill and machines that decode, with some that do both, and links between them."""
    experiment = an_experiment(seed, speculative=speculative)
    rng = random.Random(f"pools of {seed}")
    workload = experiment.workload
    n_models = max(len(workload.models), 1) if isinstance(workload, Trace) else 1
    roles: list[Role] = ["prefill", "decode"]
    roles += [rng.choice(("prefill", "decode", "decode", "both")) for _ in range(rng.choice([0, 0, 1, 2, 3]))]
    rng.shuffle(roles)
    kinds = {
        (role, i): a_machine(rng, speculative=speculative, n_models=n_models)
        for role in sorted(set(roles))
        for i in (0, 1)
    }
    pools = [rng.choice([0, 0, 1]) for _ in roles]
    numbers = {kind: number for number, kind in enumerate(kinds)}
    room: Room = rng.choice(["after_prefill", "before_prefill"])
    slowdowns = some_slowdowns(random.Random(f"slowdowns of {seed}"))
    paths = {
        (numbers["prefill", i], numbers["decode", j]): KvPath(
            link=LinkSpec(
                rng.choice([inf, 1e9, 1e7, 1e6]),
                latency_s=rng.choice([0.0, 1e-5, 3e-3]),
                concurrent_transfers=rng.choice([1, 1, 2]),
                slowdowns=slowdowns,
            ),
            shared=rng.choice(["sender", "receiver", "pair", "pools"]),
            bytes_per_token=rng.choice([0.0, 1000.0, 333.3]),
            bytes_per_sequence=rng.choice([0.0, 5e4]),
            layers=rng.choice([1, 4]) if room == "before_prefill" else 1,
            repack_s_per_byte=rng.choice([0.0, 1e-9]),
        )
        for i in (0, 1)
        for j in (0, 1)
    }
    spec = HandoverSpec(
        roles=tuple(roles),
        pools=tuple(numbers[role, i] for role, i in zip(roles, pools, strict=True)),
        paths=paths,
        router=rng.choice([RoundRobin(), Random(), LeastOutstanding(), PowerOfTwo(), LeastKv(), Prefix()]),
        first_token=rng.choice(["prefill", "arrival", "decode"]),
        room=room,
        local_tokens=rng.choice([0, 0, 0, 20]),
        headroom_tokens=rng.choice([0, 0, 8]),
    )
    of_kinds = dict(zip(kinds, with_trees(random.Random(f"trees of {seed}"), tuple(kinds.values())), strict=True))
    machines = tuple(of_kinds[role, i] for role, i in zip(roles, pools, strict=True))
    found = replace(experiment, replicas=machines, handover=spec)
    return with_ranks(found, seed) if seed % 4 == 0 else found


def some_slowdowns(rng: random.Random) -> tuple[Slowdown, ...]:
    """For half of the links none, for others up to three, from beginning to end or for some ms."""
    at_s, found = 0.0, list[Slowdown]()
    for _ in range(rng.choice([0, 0, 0, 1, 2, 3])):
        at_s += rng.choice([0.0, 0.0113, 0.2])
        for_s = rng.choice([1e-3, 0.03, 0.2])
        factor, more_s = rng.choice([(0.0, 0.0), (0.2, 0.0), (0.01, 1e-3), (1.0, 4e-3)])
        found.append(Slowdown(at_s=at_s, for_s=for_s, factor=factor, added_latency_s=more_s))
        at_s += for_s
    return tuple(found)


def with_trees(
    rng: random.Random, machines: tuple[MachineSpec | ReplicaSpec, ...]
) -> tuple[MachineSpec | ReplicaSpec, ...]:
    """For some workloads the same machines with a radix cache, under SGLang's scheduler or whatever they have."""
    if rng.random() < 0.6:
        return machines
    scheduler = an_sglang(rng) if rng.random() < 0.6 else None
    page = rng.choice([1, 4, None])

    def of(spec: ReplicaSpec) -> ReplicaSpec:
        tokens = spec.kv_blocks * spec.block_tokens
        size = spec.block_tokens if page is None else page
        tree = replace(spec, prefix_cache="tree", block_tokens=size, kv_blocks=tokens // size)
        return tree if scheduler is None else replace(tree, scheduler=EvictNewest(scheduler))

    return tuple(
        of(each) if isinstance(each, ReplicaSpec) else replace(each, hosted=tuple(map(of, each.hosted)))
        for each in machines
    )


def an_sglang(rng: random.Random) -> Sglang:
    return Sglang(
        chunked_prefill_size=rng.choice([-1, 48, 96]),
        max_prefill_tokens=rng.choice([60, 16384]),
        max_running_requests=rng.choice([4, 12, 40]),
        schedule_policy=rng.choice(["fcfs", "lof", "lpm"]),
        schedule_conservativeness=rng.choice([0.0, 0.3, 1.0]),
        enable_mixed_chunk=False,
        scheduler_recv_interval=rng.choice([1, 1, 5]),
        disable_overlap_schedule=rng.random() < 0.5,
    )


def a_limit(rng: random.Random, workload: Trace | ClosedLoop) -> int | None:
    """For some traces: requests that clients have under way at most."""
    if isinstance(workload, ClosedLoop) or workload.follows is not None or workload.abort_ns is not None:
        return None
    return rng.choice([None, None, 1, rng.randrange(1, 20)])


def clients_who_go(rng: random.Random, output: Any) -> dict[str, Any]:
    """For some workloads: when clients give their requests up, and what they allow at most."""
    n = len(output)
    found = {}
    if rng.random() < 0.4:
        found["abort_ns"] = np.array([rng.choice([-1, -1, 0, 10**6, rng.randrange(1, 10**8)]) for _ in range(n)])
    if rng.random() < 0.4:
        found["max_tokens"] = np.asarray(output) + np.array([rng.choice([0, 1, 2, 50]) for _ in range(n)])
    return found


def clients_who_wait(rng: random.Random, n: int) -> dict[str, Any]:
    """For some workloads: requests that are sent when up to three others have ended."""
    if rng.random() < 0.6:
        return {}
    rows = [rng.sample(range(row), min(row, rng.choice([0, 0, 1, 1, 1, 2, 3]))) for row in range(n)]
    flat = [row for each in rows for row in each]
    return {
        "follows": Follows(
            offsets=np.cumsum([0, *(len(each) for each in rows)]),
            rows=np.array(flat, dtype=np.int64),
            delay_ns=np.array([rng.choice([0, 0, 1, 10**6, rng.randrange(1, 10**8)]) for _ in flat], dtype=np.int64),
        )
    }


def beginnings(rng: random.Random, prompt: Any, output: Any) -> dict[str, Any]:
    """For some workloads: what prompts have in common. Groups begin alike, some prompts are repeated, and some contain what
    another has emitted."""
    if rng.random() < 0.5:
        return {}
    tokens = rng.choice([4, 16, 48])
    fresh = iter(range(1, 1 << 30))
    groups = [[next(fresh) for _ in range(40)] for _ in range(rng.choice([1, 3]))]
    rows: list[list[int]] = []
    for of_prompt, of_output in zip(prompt, output, strict=True):
        most = -(-of_prompt // tokens)
        kind = rng.random()
        begin = (
            rng.choice(groups)[: rng.randrange(0, 20)]
            if kind < 0.6
            else rng.choice(rows)
            if rows and kind < 0.9
            else []
        )
        mine = begin[:most]
        mine += [next(fresh) for _ in range(most - len(mine))]
        if rng.random() < 0.5:
            mine += [next(fresh) for _ in range(-(-(of_prompt + of_output) // tokens) - most)]
        rows.append(mine if rng.random() < 0.9 else [])
    return {
        "prefix_blocks": np.array([id_ for row in rows for id_ in row], np.int64),
        "prefix_offsets": np.cumsum([0, *map(len, rows)]),
        "prefix_block_tokens": tokens,
    }


def some_tiers(rng: random.Random, block_bytes: int) -> tuple[TierSpec, ...]:
    """One to three tiers: small and large, fast and slow, written through or when something is evicted."""

    kinds: list[list[TierKind]] = [
        ["host"],
        ["host"],
        ["disk"],
        ["host", "disk"],
        ["remote"],
        ["host", "remote"],
        ["host", "peer"],
    ]
    chosen = rng.choice(kinds)
    if "peer" in chosen:
        chosen = rng.choice([chosen, ["host", "disk", "peer"]])

    def one(kind: TierKind, write: WriteRule) -> TierSpec:
        return TierSpec(
            kind=kind,
            capacity_bytes=0 if kind == "peer" else block_bytes * rng.choice([3, 20, 200]),
            read_bytes_per_s=block_bytes * rng.choice([50.0, 1e3, 1e5]),
            write_bytes_per_s=rng.choice([None, block_bytes * 400.0]),
            latency_s=rng.choice([0.0, 0.0, 1e-4, 5e-3]),
            write=write,
            min_load_tokens=rng.choice([0, 0, 12]),
            skip_when_slower=rng.random() < 0.3,
            concurrent_transfers=rng.choice([1, 1, 2]),
            staged=kind != "host" and "host" in chosen and rng.random() < 0.5,
            store="all" if kind == "remote" else "",
        )

    rules: list[WriteRule] = ["through", "eviction"]
    return tuple(one(kind, "through" if kind in ("remote", "peer") else rng.choice(rules)) for kind in chosen)


def with_tiers(experiment: Experiment, seed: int) -> Experiment:
    """The same with tiers behind every machine, and little memory on it; some move sequences that give way to the host tier."""
    rng = random.Random(f"tiers of {seed}")
    block_bytes = 1000
    slowdowns = some_slowdowns(random.Random(f"slow tiers of {seed}"))
    tiers = tuple(replace(tier, slowdowns=slowdowns) for tier in some_tiers(rng, block_bytes))
    kinds = [tier.kind for tier in tiers]
    swaps = "host" in kinds and rng.random() < 0.5

    def behind(tenant: ReplicaSpec) -> ReplicaSpec:
        mine = (
            tiers if "remote" in kinds or rng.random() < 0.5 else tuple(replace(tier, latency_s=1e-3) for tier in tiers)
        )
        # A tree may have pages of single tokens.
        size = 60 * tenant.block_tokens if tenant.prefix_cache == "tree" else block_bytes
        return replace(tenant, tiers=mine, swaps=swaps, block_bytes=size)

    machines = tuple(
        replace(spec, hosted=tuple(behind(tenant) for tenant in spec.hosted)) for spec in experiment.machines
    )
    workload = experiment.workload
    if isinstance(workload, Trace) and workload.prefix_blocks is None:
        shared: dict[str, Any] = {}
        while not shared:
            shared = beginnings(rng, workload.prompt_tokens.tolist(), workload.output_tokens.tolist())
        workload = replace(workload, **shared)
    return replace(experiment, replicas=machines, workload=workload)


def with_limits(experiment: Experiment, seed: int) -> Experiment:
    """The same with limits that links share, of stores over all machines and of a fabric that tiers and hand-overs cross; on some
    machines models share the links of their tiers."""
    rng = random.Random(f"limits of {seed}")
    fabric = Limit("fabric", rng.choice([2e5, 1e6, 1e7]))
    store = (Limit("read", rng.choice([1e5, 2e6]), "read"), Limit("written", rng.choice([1e5, 2e6]), "write"))
    crosses = {kind: rng.random() < 0.6 for kind in ("host", "disk", "remote", "peer")}

    def limited(tier: TierSpec, first: TierSpec, kinds: Sequence[str], *, shared: bool) -> TierSpec:
        tier = replace(first, min_load_tokens=tier.min_load_tokens, link=tier.kind) if shared else tier
        if "peer" in kinds and tier.write == "eviction" and tier.kind != "host":
            return tier
        mine = (*(store if tier.kind == "remote" else ()), *((fabric,) if crosses[tier.kind] else ()))
        return replace(tier, limits=mine)

    machines = list[MachineSpec]()
    for spec in experiment.machines:
        firsts, shared = spec.hosted[0].tiers, rng.random() < 0.5
        kinds = [tier.kind for tier in firsts]
        hosted = (
            replace(
                core, tiers=tuple(limited(*pair, kinds, shared=shared) for pair in zip(core.tiers, firsts, strict=True))
            )
            for core in spec.hosted
        )
        machines.append(replace(spec, hosted=tuple(hosted)))
    handover = experiment.handover
    if handover is not None:
        paths = {
            ends: replace(path, link=replace(path.link, limits=(fabric,))) if rng.random() < 0.7 else path
            for ends, path in handover.paths.items()
        }
        handover = replace(handover, paths=paths)
    return replace(experiment, replicas=tuple(machines), handover=handover)


def _within(core: ReplicaSpec, spec: AdapterSpec, rng: random.Random) -> ReplicaSpec:
    """The same with adapters, whose limit the innermost scheduler holds to itself where it can."""
    counts = rng.random() < 0.5

    def limited(scheduler: Any) -> Any:
        if hasattr(scheduler, "with_max_loras"):
            return scheduler.with_max_loras(spec.max_loras)
        if hasattr(scheduler, "inner"):
            return replace(scheduler, inner=limited(scheduler.inner))
        return MaxLoras(scheduler, max_loras=spec.max_loras, counts_base=counts)

    if asked(core.scheduler, "rules") is None:
        # vLLM's base model takes no slot.
        spec = replace(spec, base_has_slot=counts, eviction=rng.choice(["lru", "fifo"]))
    return replace(core, adapters=spec, scheduler=limited(core.scheduler))


def with_adapters(experiment: Experiment, seed: int) -> Experiment:
    """The same where requests ask for LoRA adapters, on the machines that can serve them; without any where none can."""
    rng = random.Random(f"adapters of {seed}")
    count = rng.randrange(1, 8)
    slots = rng.randrange(1, 6)
    host = slots + rng.randrange(0, 4)
    times = [rng.choice([0.0, 1e-5, 3e-4]) for _ in range(3)]
    spec = AdapterSpec(
        ranks=tuple(rng.choice([8, 16]) for _ in range(count)),
        max_loras=slots,
        max_cpu_loras=host,
        step_s=lambda rows, ranks: times[0] + times[1] * sum(ranks) / 16 + times[2] * rows,
        disk_s=lambda rank: 1e-3 * rank,
        slot_s=lambda rank: rng_s + 1e-5 * rank,
        loaded=rng.random() < 0.5,
    )
    rng_s = rng.choice([0.0, 2e-3])
    machines: list[MachineSpec] = []
    for machine in experiment.machines:
        serves = all(core.cost.n_stages == (core.micro_batches or 1) == 1 for core in machine.hosted)
        if machine.ranks > 1 or not serves:
            machines.append(machine)
            continue
        hosted = tuple(_within(core, spec, rng) for core in machine.hosted)
        machines.append(replace(machine, hosted=hosted))
    adapter = np.array([rng.randrange(-1, count) for _ in range(len(experiment.workload))])
    workload = keyed_by_adapter(replace(experiment.workload, adapter=adapter))
    return replace(experiment, workload=workload, replicas=tuple(machines))


@dataclass(frozen=True)
class Noting:
    """Sends requests to who has most of them cached, and writes down what it is told."""

    knows: Knowledge
    told: list[list[int]] = field(default_factory=list[list[int]])

    def route(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad], /) -> int:
        found = [load.found_tokens(request) for load in replicas]
        self.told.append(found)
        return found.index(max(found))


def with_grammars(experiment: Experiment, seed: int) -> Experiment:
    """The same where some requests, or all, have grammars: few of them that are kept and used again, or many. Machines with ranks
    have none."""
    rng = random.Random(f"grammars of {seed}")
    n = rng.choice([1, 3, 40])
    share = rng.choice([0.3, 0.8, 1.0])
    spec = GrammarSpec(
        grammar=[rng.randrange(n) if rng.random() < share else -1 for _ in range(len(experiment.workload))],
        compile_s=[rng.choice([0.0, 1e-3, 0.0137, 0.2]) for _ in range(n)],
        threads=rng.choice([1, 2, 8]),
        kept=rng.choice([1, 2, 100]),
        step_s=rng.choice([0.0, 5e-6]),
        mask_s=rng.choice([0.0, 1e-5, 3e-4, 2e-3]),
        apply_s=rng.choice([0.0, 1e-6]),
        overlapped=rng.random() < 0.7,
        goes_first=rng.random() < 0.6,
    )

    return grammars_on(experiment, spec)


def grammars_on(experiment: Experiment, spec: GrammarSpec) -> Experiment:
    """The same with these grammars on every machine without ranks."""

    def of(machine: MachineSpec | ReplicaSpec) -> MachineSpec | ReplicaSpec:
        if isinstance(machine, ReplicaSpec):
            return replace(machine, grammars=spec)
        if machine.ranks > 1:
            return machine
        return replace(machine, hosted=tuple(replace(core, grammars=spec) for core in machine.hosted))

    return replace(experiment, replicas=tuple(of(machine) for machine in experiment.replicas))


def with_looks(experiment: Experiment, seed: int) -> tuple[Experiment, Noting]:
    """The same behind a router that looks what machines have cached, at once or late."""
    router = Noting(Knowledge(prefixes=True, event_delay_s=random.Random(f"looks of {seed}").choice([0.0, 3e-3])))
    return replace(experiment, router=router), router


def partly_speculative(experiment: Experiment, seed: int) -> Experiment:
    """The same, with speculation in some of the models of each shared machine, or in those of one that had none."""
    rng = random.Random(f"drafts of {seed}")

    def of(spec: MachineSpec) -> MachineSpec:
        if len(spec.hosted) == 1:
            return spec
        return replace(
            spec, hosted=tuple(replace(core, decoding=rng.choice([None, *DECODINGS])) for core in spec.hosted)
        )

    return replace(experiment, replicas=tuple(map(of, experiment.machines)))


def with_long_answers(experiment: Experiment, seed: int) -> Experiment:
    """The same with outputs that are many times as long, and memory to match: spans of hundreds of iterations. Half have no
    pipelines and no micro-batches, and half a scheduler that plans asynchronously where it can."""
    rng = random.Random(f"long answers of {seed}")
    workload, times = experiment.workload, rng.choice([10, 20])
    output = np.asarray(workload.output_tokens) * times
    if isinstance(workload, Trace):
        allowed = workload.max_tokens
        grown = None if allowed is None else allowed + output - workload.output_tokens
        longer: Trace | ClosedLoop = replace(workload, output_tokens=output, max_tokens=grown)
    else:
        longer = replace(workload, output_tokens=output)
    more = rng.choice([times, times // 2])
    scheduler = EvictNewest(replace(a_vllm(rng), async_scheduling=True)) if rng.random() < 0.5 else None
    alone = rng.random() < 0.5

    def of(core: ReplicaSpec) -> ReplicaSpec:
        assert isinstance(core.cost, Linear)
        grown = replace(core, kv_blocks=core.kv_blocks * more, scheduler=scheduler or core.scheduler)
        return replace(grown, cost=replace(core.cost, n_stages=1), micro_batches=1) if alone else grown

    machines = tuple(replace(spec, hosted=tuple(map(of, spec.hosted))) for spec in experiment.machines)
    return replace(experiment, workload=longer, replicas=machines)


def with_late_news(experiment: Experiment, seed: int) -> Experiment:
    """The same behind a router that hears late what machines have cached, or reads their loads as published now and then."""
    rng = random.Random(f"late news of {seed}")
    event_delay_s, poll_s = rng.choice([(1e-3, 0.0), (0.02, 0.0), (0.0, 7e-3), (3e-3, 7e-3)])
    return replace(experiment, router=Noting(Knowledge(prefixes=True, event_delay_s=event_delay_s, poll_s=poll_s)))


def with_scheduler(experiment: Experiment, scheduler: Scheduler) -> Experiment:
    """The same with one scheduler for every model."""
    machines = tuple(
        replace(spec, hosted=tuple(replace(tenant, scheduler=scheduler) for tenant in spec.hosted))
        for spec in experiment.machines
    )
    return replace(experiment, replicas=machines)


def gap_counts(columns: Columns) -> dict[int, int]:
    gaps, weights = columns.itl()
    lengths, index = np.unique(gaps, return_inverse=True)
    return dict(zip(lengths.tolist(), np.bincount(index, weights=weights).tolist(), strict=True))


def assert_same(a: Columns, b: Columns) -> None:
    """Two runs, alike in every column of requests, iterations and transfers, in every gap between tokens, and in what tiers and
    adapters did."""
    for name, column in a.requests.items():
        np.testing.assert_array_equal(column, b.requests[name], err_msg=name)
    assert a.reasons == b.reasons
    iterations, stepped = a.iterations(), b.iterations()
    for name, column in iterations.items():
        np.testing.assert_array_equal(column, stepped[name], err_msg=name)
    assert gap_counts(a) == gap_counts(b)
    assert [each.adapters for each in a.replicas] == [each.adapters for each in b.replicas]
    assert a.meta.get("tiers") == b.meta.get("tiers")
    for column, other in zip((a.transfers() or {}).values(), (b.transfers() or {}).values(), strict=True):
        np.testing.assert_array_equal(column, other)


def run_both_ways(experiment: Experiment, *, check_invariants: bool = True) -> Columns:
    """A run with spans, which is the same as one that steps."""
    found = run(experiment, check_invariants=check_invariants)
    assert_same(found, run(experiment, fast_forward=False))
    return found


@dataclass(frozen=True)
class HoldsTooLong:
    """Says that its plan holds until something changes, yet changes its mind with the clock."""

    def plan(self, view: ReplicaView, /) -> Plan:
        if view.waiting and view.now_ns % 2:
            return Plan(decode=view.n_decoding > 0, run=((view.waiting[0].id, view.waiting[0].tokens),))
        if not view.n_decoding:
            return Plan(run=tuple((seq.id, seq.tokens) for seq in list(view.waiting)[:1]))
        return Plan(decode=True, hold=UNTIL_CHANGE, through_arrivals=True)


@dataclass(frozen=True)
class OpensAt:
    """Lets nobody but the first in before *opens_ns*, and says that its answer holds until *says_ns*."""

    opens_ns: int
    says_ns: int

    def plan(self, view: ReplicaView, /) -> Plan:
        if view.waiting and (view.now_ns >= self.opens_ns or not view.n_decoding):
            return Plan(decode=view.n_decoding > 0, run=((view.waiting[0].id, view.waiting[0].tokens),))
        return Plan(decode=True, hold=UNTIL_CHANGE, through_arrivals=True, until_ns=self.says_ns)


def with_fleet(experiment: Experiment, seed: int) -> Experiment:
    """The same with machines that come, go and fail: pools by what their machines host, any policy, any rule."""
    rng = random.Random(f"fleet of {seed}")
    times = [rng.choice([1, 1, 2, 3]) for _ in experiment.machines]
    specs = [spec for spec, n in zip(experiment.machines, times, strict=True) for _ in range(n)]
    handover = experiment.handover
    pools: list[Any] = specs
    if handover is not None:
        roles = tuple(role for role, n in zip(handover.roles, times, strict=True) for _ in range(n))
        pools = [pool for pool, n in zip(handover.pools, times, strict=True) for _ in range(n)]
        handover = replace(handover, roles=roles, pools=tuple(pools))
    kinds = list(dict.fromkeys(pools))
    n = len(kinds)

    def policy() -> Control:
        return rng.choice(
            [
                TargetTracking(
                    target=rng.choice([1.0, 4.0]), measure=rng.choice(["concurrency", "running", "waiting"])
                ),
                TargetTracking(target=0.5, measure="kv_use"),
                Concurrency(target=rng.choice([1.0, 5.0])),
                Knative(target=2.0, stable_s=0.3, panic_s=0.05),
                RateModel(rate_per_s=20.0, ttft_s=0.05, remembers_s=0.1),
                Schedule(at_s=(0.0, 0.05, 0.1), machines=(1, rng.randrange(0, 3), rng.randrange(1, 4)), every_s=0.2),
            ]
        )

    def scaling(have: int) -> Scaling | None:
        if rng.random() < 0.3:
            return None
        least = rng.randrange(0, min(have, 2) + 1)
        found = policy()
        if isinstance(found, Schedule):
            found = replace(found, every_s=0.2)
        return Scaling(
            policy=found,
            min_machines=least,
            initial=rng.randrange(least, have + 1),
            interval_s=rng.choice([5e-3, 0.013, 0.05]),
            phases=rng.choice([(), (("provision", 0.01), ("nothing", 0.0), ("load", 0.0301))]),
            down_window_s=rng.choice([0.0, 0.05]),
            up_window_s=rng.choice([0.0, 0.0, 0.03]),
            drain_s=rng.choice([None, 0.0, 0.02]),
        )

    def failing() -> Failing | None:
        if rng.random() < 0.4:
            return None
        up = Life(mean_s=rng.choice([0.02, 0.1, 1.0]), shape=rng.choice([1.0, 0.7, 2.0, 0.0]))
        return Failing(up=up, down=Life(mean_s=rng.choice([1e-3, 0.05]), shape=rng.choice([1.0, 0.0])))

    fleet = FleetSpec(
        pools=tuple(kinds.index(pool) for pool in pools),
        names=tuple(f"p{i}" for i in range(n)),
        scaling=tuple(scaling(pools.count(kind)) for kind in kinds),
        failing=tuple(failing() for _ in kinds),
        outages=tuple(
            Outage(machine=rng.randrange(len(specs)), at_s=rng.random() * 0.2, for_s=rng.choice([None, 0.05, 0.0]))
            for _ in range(rng.choice([0, 0, 1, 4]))
        ),
        in_flight=rng.choice(["resume", "resume", "retry", "lose"]),
        retries=rng.choice([0, 3, 20]),
        when_none=rng.choice(["wait", "wait", "lose"]),
    )
    return replace(experiment, replicas=tuple(specs), fleet=fleet, handover=handover)
