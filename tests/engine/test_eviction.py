"""Eviction policies in the caches of both engines, and Belady's bound."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from policies.eviction import Belady, Eviction, Fifo, Filo, Lfu, Lru, Mru, Retention, Slru
from policies.routers import RoundRobin
from policies.vllm import Vllm
from sim.engine import Columns, Experiment, MachineSpec, ReplicaSpec, run
from sim.engine.cache.block_cache import BlockCache
from sim.engine.cache.replayed import found_tokens
from sim.engine.kv.content import contents_of
from sim.engine.simulation.online import LiveRun, live_trace
from sim.scenario.named import EVICTIONS, load
from tests.engine.contents import trace_of_ids
from tests.engine.costs import Linear
from tests.engine.random_runs import an_experiment, assert_same
from tests.engine.test_live import Log
from tests.sample import few, some
from workloads import Trace, reuse

POLICIES: tuple[Eviction, ...] = (
    Lru(), Mru(), Lfu(), Fifo(), Filo(), Slru(), Retention(tokens=8), Retention(tokens=8, duration_s=0.01), Belady(),
)  # fmt: skip


def a_trace(rows: list[list[int]], *, tokens: int = 4) -> Trace:
    """Prompts of whole blocks, by the ids of these, a second apart."""
    return trace_of_ids(*((i, tokens * len(row), 1, row) for i, row in enumerate(rows)), tokens=tokens)


def with_eviction(experiment: Experiment, policy: Eviction | None) -> Experiment:
    machines: list[MachineSpec] = []
    for machine in experiment.machines:
        hosted = tuple(replace(each, eviction=policy if each.prefix_cache else None) for each in machine.hosted)
        machines.append(replace(machine, hosted=hosted))
    return replace(experiment, replicas=tuple(machines))


def test_every_policy_that_is_shipped_is_run() -> None:
    assert {type(each) for each in POLICIES} == {load(path) for path in EVICTIONS.values()}


def test_the_least_recently_used_by_rank_are_those_that_engines_evict() -> None:
    seen = set[str]()
    for seed in (6, 61, 93):
        experiment = an_experiment(seed, speculative=seed % 2 == 0)
        plain = run(experiment)
        assert plain.meta["prefix_evictions"] > 0
        assert_same(plain, run(with_eviction(experiment, Lru())))
        seen |= {str(each.prefix_cache) for each in experiment.hosted}
    assert {"blocks", "tree"} <= seen


@pytest.mark.parametrize("seeds", few([(84,), (68, 84, 111)]))
def test_every_policy_keeps_the_invariants_of_every_cache(seeds: tuple[int, ...]) -> None:
    hits = {repr(each): 0 for each in POLICIES}
    for seed in seeds:
        for policy in POLICIES:
            columns = run(with_eviction(an_experiment(seed, speculative=seed % 2 == 0), policy), check_invariants=True)
            hits[repr(policy)] += int(columns.requests["prefix_hit_tokens"].sum())
    assert len({*hits.values()}) > 3, hits


@pytest.mark.slow(reason="many random runs")
@pytest.mark.parametrize("seed", some(range(400)))
def test_random_runs_with_every_policy(seed: int) -> None:
    experiment = an_experiment(seed, speculative=seed % 2 == 0)
    if not any(each.prefix_cache for each in experiment.hosted):
        return
    assert_same(run(experiment), run(with_eviction(experiment, Lru())))
    for policy in POLICIES[1:]:
        run(with_eviction(experiment, policy), check_invariants=True)


@pytest.mark.parametrize("cache_", ["blocks", "tree"])
def test_what_two_requests_used_stays_with_lfu_and_goes_with_lru(cache_: str) -> None:
    trace = a_trace([[1, 2], [1, 2], [3, 4], [5, 6], [7, 8], [1, 2]])

    def last_hit(policy: Eviction | None) -> int:
        spec = ReplicaSpec(
            cost=Linear(fixed_s=0.01), scheduler=Vllm(64, 1), kv_blocks=5, block_tokens=4, prefix_cache=cache_,
            eviction=policy,
        )  # fmt: skip
        return int(
            run(Experiment(workload=trace, replicas=(spec,), router=RoundRobin())).requests["prefix_hit_tokens"][-1]
        )

    assert last_hit(None) == last_hit(Lru()) == 0
    assert last_hit(Lfu()) == last_hit(Belady()) == 4


@pytest.mark.parametrize("cache_", ["blocks", "tree"])
def test_the_end_of_a_prompt_goes_before_the_retained_beginning_of_an_older_one(cache_: str) -> None:
    # With room for nine blocks, the third prompt needs blocks of the first two: their ends, and not the beginning of the first.
    trace = a_trace([[1, 2, 3, 4], [5, 6, 7, 8], [11, 12, 13, 14, 15, 16], [1, 20, 21]])
    for policy, hit in ((Lru(), 0), (Retention(tokens=4), 4), (Retention(tokens=4, priority=35), 0)):
        spec = ReplicaSpec(
            cost=Linear(fixed_s=0.01), scheduler=Vllm(64, 1), kv_blocks=9, block_tokens=4, prefix_cache=cache_,
            eviction=policy,
        )  # fmt: skip
        columns = run(Experiment(workload=trace, replicas=(spec,), router=RoundRobin()), check_invariants=True)
        assert columns.requests["prefix_hit_tokens"][-1] == hit


def literally_found(rows: list[list[int]], capacity: int, key: Callable[[int, int, int], object]) -> int:
    """Blocks found by a cache of prefixes that evicts block by block, of those that no other needs the one with the least *key*
    of its place, its uses and its last use, and of equals the one that is furthest into its prompt."""
    cached: dict[tuple[int, ...], tuple[int, int]] = {}
    found = 0
    for now, row in enumerate(rows):
        path = [tuple(row[: i + 1]) for i in range(len(row))]
        hits = next((i for i, block in enumerate(path) if block not in cached), len(path))
        found += hits
        while len(cached) + len(path) - hits > capacity:
            needed = {block[:-1] for block in cached} | {*path}
            free = (block for block in cached if block not in needed)
            del cached[min(free, key=lambda block: (key(len(block) - 1, *cached[block]), -len(block)))]
        for block in path:
            cached[block] = cached.get(block, (0, 0))[0] + 1, now
    return found


def test_policies_find_what_a_cache_that_evicts_block_by_block_finds() -> None:
    policies: dict[Eviction, Callable[[int, int, int], object]] = {
        Lru(): lambda place, uses, used: used,
        Lfu(): lambda place, uses, used: (uses, used),
        Slru(): lambda place, uses, used: (uses > 1, used),
        Retention(tokens=4): lambda place, uses, used: (place < 1, used),
        Retention(tokens=11): lambda place, uses, used: (place < 3, used),
    }
    rng, differ = random.Random(8), 0
    for _ in range(60):
        starts = [[rng.randrange(3) for _ in range(4)] for _ in range(4)]
        rows = [
            [*rng.choice(starts)[: rng.randrange(5)], *rng.sample(range(9), rng.randrange(1, 4))] for _ in range(20)
        ]
        capacity = rng.randrange(7, 14)
        found = [found_tokens(a_trace(rows), capacity, policy) // 4 for policy in policies]
        assert found == [literally_found(rows, capacity, key) for key in policies.values()]
        differ += len({*found}) > 2
    assert differ > 20


def literally_retained(trace: Trace, capacity: int, policy: Retention) -> int:
    """Blocks found by a cache that keeps priorities as TensorRT-LLM's queues do: one for each priority, first in first out; a block
    enters when it is free, at the end of its queue, and goes to the end of that of *others* when its time is over."""
    assert trace.prefix_blocks is not None
    assert trace.prefix_offsets is not None
    queues: dict[int, list[tuple[int, ...]]] = {}
    due: dict[tuple[int, ...], float] = {}
    found = 0
    for id_, (first, end) in enumerate(zip(trace.prefix_offsets[:-1], trace.prefix_offsets[1:], strict=True)):
        now_s, row = id_, trace.prefix_blocks[first:end].tolist()
        for block in sorted((block for block in due if due[block] <= now_s), key=lambda block: due[block]):
            for queue in queues.values():
                if block in queue:
                    queue.remove(block)
            queues.setdefault(policy.others, []).append(block)
            del due[block]
        cached = {block for queue in queues.values() for block in queue}
        path = [tuple(row[: i + 1]) for i in range(len(row))]
        hits = next((i for i, block in enumerate(path) if block not in cached), len(path))
        found += hits
        cached |= {*path}
        while len(cached) > capacity:
            needed = {block[:-1] for block in cached} | {*path}
            block = next(
                block
                for priority in sorted(queues)
                for block in queues[priority]
                if block in cached and block not in needed
            )
            cached.remove(block)
        for priority, queue in queues.items():
            queues[priority] = [block for block in queue if block in cached and block not in path]
        due = {block: at_s for block, at_s in due.items() if block in cached}
        named = "" if trace.class_index is None else trace.classes[trace.class_index[id_]]
        for block in reversed(path):
            retained = 4 * (len(block) - 1) < policy.tokens
            priority = (policy.classes or {}).get(named, policy.priority) if retained else policy.others
            queues.setdefault(priority, []).append(block)
            if retained and policy.duration_s is not None:
                due[block] = now_s + policy.duration_s
    return found


def test_priorities_with_time_and_class_find_what_queues_of_single_blocks_find() -> None:
    rng = random.Random(9)
    differ, by_time, by_class = 0, False, False
    for _ in range(30):
        starts = [[rng.randrange(3) for _ in range(4)] for _ in range(4)]
        rows = [
            [*rng.choice(starts)[: rng.randrange(5)], *rng.sample(range(9), rng.randrange(1, 4))] for _ in range(30)
        ]
        # Those that begin alike are of one class: the end of a prompt never outranks the beginning.
        classed = {"class_index": [row[0] % 3 for row in rows], "classes": ("a", "b", "c")}
        trace, capacity = replace(a_trace(rows), **classed), rng.randrange(7, 14)
        tokens, classes = rng.choice([4, 10]), {"a": 90, "b": 40}
        policies = [
            Retention(tokens=tokens, duration_s=duration_s, classes=each)
            for duration_s in (None, 2.5, 5.0)
            for each in (None, classes)
        ]
        found = [found_tokens(trace, capacity, policy) // 4 for policy in policies]
        assert found == [literally_retained(trace, capacity, policy) for policy in policies]
        by_time |= found[2] not in (found[0], found[4])
        by_class |= found[1] != found[0]
        differ += len({*found}) > 1
    assert by_time
    assert by_class
    assert differ > 15


@pytest.mark.parametrize("cache_", ["blocks", "tree"])
def test_a_beginning_is_retained_for_its_time_or_by_its_class(cache_: str) -> None:
    rows = [[1, 2], [3, 4], [5, 6], [7, 8, 9], [10, 11, 12], [1, 20]]
    trace = replace(a_trace(rows), class_index=[0, 1, 1, 1, 1, 1], classes=("chat", "batch"))

    def hit(policy: Retention) -> int:
        spec = ReplicaSpec(
            cost=Linear(fixed_s=0.01), scheduler=Vllm(64, 1), kv_blocks=7, block_tokens=4, prefix_cache=cache_,
            eviction=policy,
        )  # fmt: skip
        columns = run(Experiment(workload=trace, replicas=(spec,), router=RoundRobin()), check_invariants=True)
        return int(columns.requests["prefix_hit_tokens"][-1])

    assert hit(Retention(tokens=4, priority=35, classes={"chat": 90})) == 4
    assert hit(Retention(tokens=4, priority=35, classes={"batch": 90})) == 0
    assert hit(Retention(tokens=4, priority=35, classes={"chat": 90}, duration_s=9.0)) == 4
    assert hit(Retention(tokens=4, priority=35, classes={"chat": 90}, duration_s=0.5)) == 0


def test_what_a_span_of_decodes_evicts_goes_by_its_rank_at_each_step() -> None:
    # The answer of the third takes the last free block shortly before its end, and the first block loses its priority after that.
    trace = replace(
        a_trace([[1], [2], [3], [1, 4]]),
        output_tokens=np.array([1, 1, 40, 1]),
        class_index=[0, 1, 1, 1],
        classes=("chat", "batch"),
    )

    def served(duration_s: float, *, fast_forward: bool = True) -> Columns:
        spec = ReplicaSpec(
            cost=Linear(fixed_s=0.01), scheduler=Vllm(64, 1), kv_blocks=12, block_tokens=4, prefix_cache="blocks",
            eviction=Retention(tokens=4, duration_s=duration_s, classes={"chat": 90, "batch": 50}),
        )  # fmt: skip
        return run(Experiment(workload=trace, replicas=(spec,), router=RoundRobin()), fast_forward=fast_forward)

    finish_ns = served(9.0).requests["finish_ns"]
    for before_end_s, hit in ((0.015, 4), (0.3, 0)):
        duration_s = (finish_ns[2] - finish_ns[0]) / 1e9 - before_end_s
        spans, steps = served(duration_s), served(duration_s, fast_forward=False)
        assert_same(spans, steps)
        assert spans.requests["prefix_hit_tokens"][-1] == hit


def test_a_policy_that_names_a_class_that_no_request_is_of_is_refused() -> None:
    spec = ReplicaSpec(
        cost=Linear(), scheduler=Vllm(), kv_blocks=9, block_tokens=4, prefix_cache="blocks",
        eviction=Retention(tokens=4, classes={"chat": 90}),
    )  # fmt: skip
    with pytest.raises(ValueError, match="names the class chat, and the workload has no classes"):
        Experiment(workload=a_trace([[1]]), replicas=(spec,), router=RoundRobin())


def best(rows: list[list[int]], capacity: int) -> int:
    """Blocks found by the best choice of all: prefixes kept after each request, those of its own as far as there is room."""
    paths = [tuple(tuple(row[: i + 1]) for i in range(len(row))) for row in rows]

    def closed(blocks: frozenset[tuple[int, ...]]) -> bool:
        return all(len(block) == 1 or block[:-1] in blocks for block in blocks)

    @cache
    def of(at: int, kept: frozenset[tuple[int, ...]]) -> int:
        if at == len(paths):
            return 0
        path = paths[at]
        found = next((i for i, block in enumerate(path) if block not in kept), len(path))
        own = frozenset(path[:capacity])
        others = [*(kept - own)]
        most = 0
        for chosen in range(1 << len(others)):
            after = own | {block for i, block in enumerate(others) if chosen >> i & 1}
            if len(after) <= capacity and closed(after):
                most = max(most, of(at + 1, after))
        return found + most

    return of(0, frozenset())


def test_belady_finds_what_the_best_choice_of_all_does() -> None:
    rng = random.Random(31)
    better = 0
    for _ in range(60):
        starts = [rng.sample(range(3), 2) for _ in range(3)]
        rows = [[*rng.choice(starts)[: rng.randrange(0, 3)], rng.randrange(6)] for _ in range(9)]
        trace, capacity = a_trace(rows), rng.randrange(3, 6)
        bound = found_tokens(trace, capacity, Belady()) // 4
        assert bound == best(rows, capacity)
        others = [found_tokens(trace, capacity, policy) // 4 for policy in POLICIES]
        assert max(others) == bound
        better += bound > min(others)
    assert better > 20


def test_a_cache_with_room_for_all_finds_what_can_be_found_by_any_policy() -> None:
    trace = a_trace([[1, 2, 3], [1, 2, 4], [5], [1, 2, 3], [5, 6]])
    curve = reuse(trace)
    for policy in (None, *POLICIES):
        assert found_tokens(trace, curve.distinct_blocks, policy) == curve.hit_tokens[-1]


def test_an_eviction_policy_needs_a_cache() -> None:
    with pytest.raises(ValueError, match="an eviction policy orders the blocks of a prefix cache, and there is none"):
        ReplicaSpec(cost=Linear(), scheduler=Vllm(), kv_blocks=9, block_tokens=4, eviction=Lru())


def test_requests_that_come_one_by_one_have_no_next_uses_that_are_known() -> None:
    spec = ReplicaSpec(
        cost=Linear(), scheduler=Vllm(), kv_blocks=9, block_tokens=4, prefix_cache="blocks", eviction=Belady()
    )
    with pytest.raises(ValueError, match="needs a trace"):
        LiveRun(Experiment(workload=live_trace((), 4), replicas=(spec,), router=RoundRobin()), Log())


def test_blocks_that_are_held_again_do_not_go_whatever_their_rank_was() -> None:
    rows = [[1, 2], [1, 2, 3], [4, 5]]
    ids = np.array([id_ for row in rows for id_ in row], np.int64)
    tokens = np.array([4 * len(row) for row in rows])
    contents = contents_of(ids, np.cumsum([0, *map(len, rows)]), 4, tokens, np.ones(3, np.int64), 4)
    pool = BlockCache(5, 4, contents)
    pool.eviction = Lru().rank
    for id_ in (0, 2):
        pool.admit(id_, 0)
        pool.take(2)
        pool.release(id_, 2, 8)
    pool.admit(1, 2)
    pool.take(2)
    assert [pool.found_blocks(id_, 9) for id_ in (0, 2)] == [2, 1]
    assert pool.fault() is None
