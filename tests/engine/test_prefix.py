"""The prefix cache: what is found, what gives way, and that nothing else changes."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies.eviction import Belady, Eviction, Lfu, Lru, Mru, Retention, lasts, rank_of
from policies.routers import RoundRobin
from policies.schedulers import Sarathi
from policies.view import Plan, ReplicaView, Scheduler
from policies.vllm import Vllm
from policies.wrappers import EvictNewest
from sim.engine import Columns, Experiment, ReplicaSpec, run
from sim.engine.cache.block_cache import BlockCache
from sim.engine.cache.radix_cache import RadixCache
from sim.engine.kv.content import Contents, contents_of
from sim.engine.kv.next_uses import NextUses
from sim.engine.kv.pool import KvPool
from sim.engine.simulation import cluster
from sim.engine.spec.experiment import LeftBehind
from tests.engine.build import patches_the_engine
from tests.engine.contents import S, hits, trace_of_ids
from tests.engine.costs import Linear
from tests.engine.lru import found_blocks
from tests.engine.random_runs import an_experiment, assert_same, run_both_ways
from tests.sample import some
from workloads import Trace, read_trace

MOONCAKE = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation.jsonl"


def a_trace(*requests: tuple[float, int, int, list[int]], tokens: int = 4) -> Trace:
    return trace_of_ids(*requests, tokens=tokens)


def served(trace: Trace, *, blocks: int = 100, scheduler: Scheduler | None = None, **spec: Any) -> Columns:
    chosen = Vllm(max_num_batched_tokens=64, max_num_seqs=8, async_scheduling=False) if scheduler is None else scheduler
    replica = ReplicaSpec(
        cost=Linear(fixed_s=1.0),
        scheduler=chosen,
        kv_blocks=blocks,
        **{"block_tokens": 4, "prefix_cache": "blocks", **spec},
    )
    return run(Experiment(workload=trace, replicas=(replica,), router=RoundRobin()), check_invariants=True)


def test_whole_blocks_are_found_and_one_token_at_least_is_computed() -> None:
    same = [1, 2, 3]
    columns = served(a_trace((0, 12, 1, same), (10, 12, 1, same), (20, 13, 1, [*same, 4]), (30, 12, 1, [1, 9, 3])))
    assert hits(columns) == [0, 8, 12, 4]
    assert columns.requests["computed_prompt_tokens"].tolist() == [12, 4, 1, 8]
    assert columns.iterations()["prefill_tokens"].tolist() == [12, 4, 1, 8]


def test_who_is_admitted_in_the_same_iteration_finds_what_it_is_to_compute() -> None:
    columns = served(a_trace((0, 10, 1, [1, 2, 3]), (0, 10, 1, [1, 2, 4])))
    assert hits(columns) == [0, 8]
    assert columns.iterations()["kv_blocks_used"].tolist() == [4]


def test_a_request_without_ids_shares_nothing() -> None:
    assert hits(served(a_trace((0, 12, 1, [1, 2, 3]), (10, 12, 1, []), (20, 12, 1, [])))) == [0, 0, 0]


def test_the_next_turn_finds_the_answer_that_was_named() -> None:
    # 6 tokens of prompt and 7 of answer, of which the last has no KV: three whole blocks.
    first = (0, 6, 7, [1, 2, 3, 4])
    assert hits(served(a_trace(first, (20, 20, 1, [1, 2, 3, 4, 5])))) == [0, 12]
    # Ids that the prompt alone needs do not say what is emitted.
    assert hits(served(a_trace((0, 6, 7, [1, 2]), (20, 20, 1, [1, 2, 3, 4, 5])))) == [0, 4]


def test_an_answer_is_found_as_far_as_it_has_come() -> None:
    first = (0, 4, 30, list(range(1, 10)))
    for at, found in ((4.5, 8), (8.5, 12), (12.5, 16)):
        columns = served(a_trace(first, (at, 34, 1, list(range(1, 10)))))
        assert hits(columns) == [0, found]


def test_a_plan_that_is_made_ahead_does_not_know_the_token_in_flight() -> None:
    # Planned at 7 s for 8 s: 10 tokens have KV and an eleventh is known; the third block is full with the one in flight.
    ahead = Vllm(max_num_batched_tokens=64, max_num_seqs=8, async_scheduling=True)
    trace = a_trace((0, 4, 30, list(range(1, 10))), (6.5, 34, 1, list(range(1, 10))))
    assert hits(served(trace, scheduler=ahead)) == [0, 8]


@pytest.mark.parametrize("fast_forward", [True, False])
def test_a_span_ends_when_who_waits_may_find_more(fast_forward: bool) -> None:
    # With 9 blocks the second waits until the first has filled another block of what it is to read: no memory has come free.
    trace = a_trace((0, 4, 30, list(range(1, 10))), (1.5, 34, 1, list(range(1, 10))))
    spec = ReplicaSpec(
        cost=Linear(fixed_s=1.0),
        scheduler=Vllm(max_num_batched_tokens=64, max_num_seqs=8, async_scheduling=False),
        kv_blocks=11,
        block_tokens=4,
        prefix_cache="blocks",
    )
    columns = run(
        Experiment(workload=trace, replicas=(spec,), router=RoundRobin()),
        fast_forward=fast_forward,
        check_invariants=True,
    )
    assert columns.requests["scheduled_ns"].tolist() == [0, 2 * S]
    tight = run(
        Experiment(workload=trace, replicas=(replace(spec, kv_blocks=9),), router=RoundRobin()),
        fast_forward=fast_forward,
    )
    assert tight.requests["scheduled_ns"].tolist() == [0, 4 * S]


def test_the_least_recently_freed_give_way_the_last_block_of_a_sequence_first() -> None:
    # 7 blocks. The first two leave 3 cached blocks each. The third takes the one that is left and the last two of the first; the
    # first, when it comes again, finds one and takes the last two of the second; and so on.
    trace = a_trace(
        (0, 12, 1, [1, 2, 3]), (10, 12, 1, [4, 5, 6]), (20, 12, 1, [7, 8, 9]), (30, 12, 1, [1, 2, 3]), (40, 12, 1, [4, 5, 6])
    )  # fmt: skip
    columns = served(trace, blocks=7)
    assert hits(columns) == [0, 0, 0, 4, 4]
    assert columns.meta["prefix_evictions"] == 2 + 2 + 2
    assert hits(served(trace, blocks=15)) == [0, 0, 0, 8, 8]


def test_what_is_found_stays_while_it_is_held() -> None:
    # The second holds blocks of the first while the third asks for all that is left.
    trace = a_trace((0, 8, 1, [1, 2]), (10, 9, 12, [1, 2, 3]), (12, 16, 1, [5, 6, 7, 8]), (40, 9, 1, [1, 2, 3]))
    assert hits(served(trace, blocks=9)) == [0, 8, 0, 8]


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    trace = a_trace((0, 8, 12, []), (0, 8, 12, []))
    columns = served(trace, blocks=6)
    assert columns.requests["preemptions"].tolist() == [0, 1]
    # It had 10 tokens cached when the memory ran out, two blocks of which stayed until it came back.
    found = columns.requests["prefix_hit_again_tokens"].tolist()
    assert found[0] == 0
    assert found[1] in (4, 8)
    assert hits(columns) == [0, 0]


def test_a_drafter_that_reads_the_target_has_the_last_block_computed_again() -> None:
    trace = a_trace((0, 12, 1, [1, 2, 3]), (10, 13, 1, [1, 2, 3, 4]))
    assert hits(served(trace, prefix_drops_last=True)) == [0, 8]


@pytest.mark.parametrize(("windows", "released"), [(0, 31), (1, 16), (5, 5)])
def test_what_windows_leave_behind_takes_its_share_of_the_cache(windows: int, released: int) -> None:
    # vLLM 0.32.0's own KVCacheManager (a group of FullAttentionSpec and so many of SlidingWindowSpec of 128 tokens, 4,000 blocks of
    # 128) finds again as many of eighty prompts of 16,256 tokens, computed one after the other in chunks of 8,192. Of five groups
    # one less than here: what they leave in the last chunk gives way after a prompt's own blocks there, and before them here.
    n, tokens = 80, 16_256
    trace = a_trace(*((i, tokens, 1, list(range(127 * i, 127 * i + 127))) for i in range(n)), tokens=128)
    assert trace.prefix_blocks is not None
    assert trace.prefix_offsets is not None
    contents = contents_of(
        trace.prefix_blocks, trace.prefix_offsets, 128, trace.prompt_tokens, trace.output_tokens, 128
    )
    left = LeftBehind(per_block=float(windows), window_blocks=1) if windows else None
    pool = BlockCache(4000, 128, contents)
    pool.left_behind = left
    for id_ in range(n):
        pool.admit(id_, pool.found_blocks(id_, tokens))
        pool.take(127)
        pool.release(id_, 127, tokens)
        assert pool.fault() is None
        assert pool.free == 4000
    found = [id_ for id_ in range(n) if pool.found_blocks(id_, tokens) == 126]
    assert found == list(range(n - len(found), n))
    assert len(found) == released + (windows == 5)


def test_nothing_is_left_behind_by_what_was_found_nor_by_the_last_windows() -> None:
    trace = a_trace((0, 12, 1, [1, 2, 3]), (10, 13, 1, [1, 2, 3, 4]), (20, 12, 1, [11, 12, 13]), (30, 12, 1, [1, 2, 3]))
    # Of its three blocks the first leaves one behind, the second, which finds all that it has, none. The third takes the three
    # blank ones of seven, and what the first left gives way to what it leaves.
    kept = served(trace, blocks=7, left_behind=LeftBehind(per_block=1.0, window_blocks=2))
    assert hits(kept) == [0, 12, 0, 8]
    # Three left by the first: two give way to the third's own blocks, the last and two of the first's to what the third leaves.
    none_kept = served(trace, blocks=7, left_behind=LeftBehind(per_block=1.0, window_blocks=0))
    assert hits(none_kept) == [0, 12, 0, 4]


def test_who_finds_all_of_its_blocks_leaves_nothing_behind() -> None:
    # Two prompts of three full blocks leave as many, and a block is blank: the first, asked for again and again, takes no more.
    a, b = [1, 2, 3, 4], [11, 12, 13, 14]
    trace = a_trace(*((10 * i, 13, 1, ids) for i, ids in enumerate((a, b, a, a, a, b))))
    left = LeftBehind(per_block=1.0, window_blocks=0)
    assert hits(served(trace, blocks=13, left_behind=left)) == [0, 0, 12, 12, 12, 12]


def test_a_sequence_leaves_no_more_behind_than_there_is_room_for() -> None:
    columns = served(
        a_trace((0, 12, 1, [1, 2, 3]), (10, 12, 1, [1, 2, 3])),
        blocks=4,
        left_behind=LeftBehind(per_block=9.0, window_blocks=0),
    )
    assert hits(columns) == [0, 8]


def test_what_is_left_behind_is_something_and_not_less_than_nothing() -> None:
    with pytest.raises(ValueError, match=r"per_block is above 0 and window_blocks at least 0; got 0\.0 and 1"):
        LeftBehind(per_block=0.0, window_blocks=1)


def test_spans_equal_stepping_where_windows_leave_something_behind() -> None:
    found = [0, 0]
    for seed in range(40, 50):
        drawn = an_experiment(seed, speculative=seed % 2 == 0)
        left = LeftBehind(per_block=(0.5, 1.0, 5.0)[seed % 3], window_blocks=seed % 2)
        machines = tuple(
            replace(spec, hosted=tuple(replace(tenant, left_behind=left) for tenant in spec.hosted))
            for spec in drawn.machines
        )
        experiment = replace(drawn, replicas=machines)
        checked = run_both_ways(experiment)
        for at, columns in enumerate((run(drawn), checked)):
            found[at] += int(columns.requests.get("prefix_hit_tokens", np.zeros(1)).sum())
    assert found[1] < found[0]


@pytest.mark.parametrize(("ids_of", "blocks_of"), [(4, 1), (4, 4), (4, 16), (16, 4)])
def test_ids_and_blocks_may_be_of_different_sizes(ids_of: int, blocks_of: int) -> None:
    shared = 48 // ids_of
    ids = list(range(1, shared + 1))
    trace = a_trace(
        (0, 56, 1, [*ids, 101, 102][: -(-56 // ids_of)]),
        (10, 56, 1, [*ids, 201, 202][: -(-56 // ids_of)]),
        tokens=ids_of,
    )
    assert hits(served(trace, block_tokens=blocks_of)) == [0, 48]


def test_sizes_of_which_neither_divides_the_other_are_refused() -> None:
    with pytest.raises(ValueError, match="ids stand for 4 tokens and a KV block holds 6; one has to divide the other"):
        served(a_trace((0, 12, 1, [1, 2, 3])), block_tokens=6)


def test_contents_fork_where_ids_differ() -> None:
    rows = [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [1, 2, 7], [8], [1, 2, 7, 9], []]
    found = contents_of(
        np.array([id_ for row in rows for id_ in row]), np.cumsum([0, *map(len, rows)]), 4,
        np.array([16, 24, 12, 3, 16, 50]), np.ones(6, np.int64), 4,
    )  # fmt: skip
    # A prompt that goes on where another ended stays on its chain.
    assert found.chain == array("q", [0, 0, 1, -1, 1, -1])
    assert found.named == array("q", [4, 6, 3, 0, 4, 0])
    assert (list(found.start[:2]), list(found.parent[:2])) == ([0, 2], [-1, 0])


class Busy:
    """A cache in which random requests with common beginnings run, and have run; some emit what others look for."""

    def __init__(self, seed: int, eviction: Eviction | None, *, at_once: bool = False) -> None:
        """*at_once*: blocks are evicted as they are taken, and not when somebody looks."""
        self.rng = rng = random.Random(seed)
        starts = [[100 * group + i for i in range(12)] for group in range(3)]
        rows = [[*rng.choice(starts)[: rng.randrange(13)], *(1000 * n + i for i in range(3))] for n in range(40)]
        self.tokens = [4 * len(row) for row in rows]
        contents = contents_of(
            np.array([id_ for row in rows for id_ in row]), np.cumsum([0, *map(len, rows)]), 4,
            np.array(self.tokens), np.ones(40, np.int64), 4,
        )  # fmt: skip
        self.pool = pool = BlockCache(rng.choice([60, 150, 300]), 4, contents)
        pool.drops_last = rng.random() < 0.5
        self.now_ns = 0
        pool.now_ns = lambda: self.now_ns
        if eviction is not None:
            pool.eviction, pool.lasts_s = rank_of(eviction), lasts(eviction)
        if isinstance(eviction, Belady):
            pool.next_uses = NextUses(contents, self.tokens)
        if at_once:
            pool.gives_up = lambda chain, lo, hi: None
        self.emitted = dict[int, int]()
        pool.progress = lambda id_: self.emitted[id_]
        self.held = dict[int, int]()
        for id_ in range(30):
            self.now_ns += rng.randrange(3 * 10**9)
            self.serve(id_)

    def serve(self, id_: int) -> None:
        """Another request runs as far as there is room, and perhaps some end."""
        pool, rng, blocks = self.pool, self.rng, self.tokens[id_] // 4
        found = pool.found_blocks(id_, self.tokens[id_])
        if blocks - found + pool.unheld_blocks(id_, found) <= pool.free:
            pool.admit(id_, found)
            pool.take(blocks - found)
            computed = 4 * rng.randrange(found, blocks + 1)
            pool.cached(id_, computed)
            self.held[id_] = blocks
            if computed < self.tokens[id_] and rng.random() < 0.3:
                pool.writes_on(id_, computed)
            self.emitted[id_] = rng.randrange(computed, self.tokens[id_] + 1)
        for other in [other for other in self.held if rng.random() < 0.35]:
            pool.release(other, self.held.pop(other), self.emitted[other])

    def state(self) -> Any:
        pool = self.pool
        return (
            [(run.lo, run.hi, run.refs, run.entered) for run in pool._all()],
            [(run.lo, run.hi) for run in pool._queued()],
            [(id_, held.full, len(held.entries)) for id_, held in pool._held.items()],
            (pool.free, pool._blank, pool.evicted, pool.fault()),
        )


EVICTIONS = (None, None, None, Lru(), Lfu(), Mru(), Retention(tokens=20, duration_s=4.0), Belady())


def test_a_lookup_after_another_finds_what_has_been_computed_since() -> None:
    contents = contents_of(
        np.tile(np.arange(6), 2), np.array([0, 6, 12]), 4, np.array([24, 24]), np.ones(2, np.int64), 4
    )
    pool = BlockCache(20, 4, contents)
    pool.admit(0, 0)
    pool.take(6)
    for blocks in (2, 5):
        pool.cached(0, 4 * blocks)
        assert (pool.found_blocks(1, 24), pool.finds(1, 24)) == (blocks, (blocks, 0))
        assert pool.found_blocks(1, 4) == 0
    pool.cached(0, 24)
    assert (pool.found_blocks(1, 24), pool.found_blocks(1, 25)) == (5, 6)


def test_a_lookup_after_any_moves_finds_what_is_there_then() -> None:
    changed = 0
    for seed in range(80):
        busy = Busy(seed, EVICTIONS[seed % len(EVICTIONS)])
        pool, held, rng = busy.pool, busy.held, random.Random(seed)
        for coming in range(30, 36):
            id_ = rng.randrange(36, 40)
            before = pool.finds(id_, busy.tokens[id_])[0]
            if rng.random() < 0.2:
                busy.serve(coming)
            for first in list(held)[: rng.choice([0, 0, 1, 2, 9])]:
                pool.release(first, held.pop(first), busy.emitted[first])
            pool.take(rng.randrange(pool.free // 2 + 1))
            found = pool.found_blocks(id_, busy.tokens[id_])
            assert found == pool.finds(id_, busy.tokens[id_])[0]
            changed += found != before
    assert changed > 30


@pytest.mark.parametrize(
    "seeds",
    [range(80), pytest.param(some(range(80, 6000)), marks=pytest.mark.slow(reason="many random runs"))],
    ids=["some", "many"],
)
def test_what_a_plan_finds_is_found_when_it_is_carried_out_and_until_then_nothing_changes(seeds: range) -> None:
    asked = 0
    for seed in seeds:
        eviction = EVICTIONS[seed % len(EVICTIONS)]
        planning, moving = Busy(seed, eviction), Busy(seed, eviction, at_once=True)
        before, pool, rng = planning.state(), moving.pool, random.Random(seed)
        both = planning.pool.planned(), pool
        most = rng.choice([2, 6, 20])
        for id_ in list(moving.held):
            # A decode step, or a prompt's next chunk.
            blocks = rng.randrange(min(pool.free, most) + 1)
            tokens = rng.randrange(4 * pool.full_blocks(id_), moving.tokens[id_] + 1)
            for each in both:
                each.take(blocks)
                if id_ % 3 == 0:
                    each.cached(id_, tokens)
        for id_ in range(30, 40):
            found = pool.found_blocks(id_, moving.tokens[id_])
            unheld = pool.unheld_blocks(id_, found)
            assert both[0].finds(id_, moving.tokens[id_]) == (found, unheld)
            asked += found > 0
            if rng.random() < 0.6 and unheld <= pool.free:
                blocks, tokens = rng.randrange(most), rng.randrange(4 * found, moving.tokens[id_] + 1)
                blocks = min(blocks, pool.free - unheld)
                for each in both:
                    each.admit(id_, found)
                    each.take(blocks)
                    each.cached(id_, tokens)
            assert pool.fault() is None
        assert planning.state() == before
    assert asked > 3 * len(seeds)


def test_without_ids_or_without_a_cache_nothing_changes() -> None:
    for seed in range(15):
        experiment = an_experiment(seed, speculative=seed % 2 == 0)
        workload = experiment.workload
        off = tuple(
            replace(machine, hosted=tuple(replace(tenant, prefix_cache=None) for tenant in machine.hosted))
            for machine in experiment.machines
        )
        if isinstance(workload, Trace) and workload.prefix_blocks is not None:
            bare = replace(workload, prefix_blocks=None, prefix_offsets=None, prefix_block_tokens=None)
        else:
            bare = workload
        assert_same(run(replace(experiment, replicas=off)), run(replace(experiment, workload=bare)))


@patches_the_engine
@pytest.mark.parametrize(
    "seeds",
    [range(12), pytest.param(some(range(12, 1500)), marks=pytest.mark.slow(reason="many random runs"))],
    ids=["some", "many"],
)
def test_what_one_request_alone_has_is_its_own(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    def said_to_grow(*given: Any) -> Contents:
        contents = contents_of(*given)
        contents.is_whole = False
        return contents

    for seed in seeds:
        experiment = an_experiment(seed, speculative=seed % 3 == 0)
        found = run(experiment, check_invariants=seed % 5 == 0)
        with monkeypatch.context() as patched:
            patched.setattr(cluster, "contents_of", said_to_grow)
            assert_same(found, run(experiment))


def test_who_gives_way_within_its_prompt_finds_what_it_alone_had_computed() -> None:
    contents = contents_of(np.arange(6), np.array([0, 6]), 4, np.array([24]), np.ones(1, np.int64), 4)
    pool = BlockCache(20, 4, contents.shared())
    pool.puts_off = True
    pool.admit(0, 0)
    pool.take(3)
    pool.cached(0, 12)
    assert (pool.full_blocks(0), pool.free, pool.fault()) == (0, 17, None)
    pool.release(0, 3, 0)
    assert (pool.found_blocks(0, 24), pool.free, pool.fault()) == (3, 20, None)


def test_the_names_that_are_left_are_those_that_two_requests_have() -> None:
    left = 0
    for seed in range(60):
        rng = random.Random(seed)
        rows: list[list[int]] = []
        for _ in range(rng.randrange(1, 60)):
            before = rng.choice(rows)[: rng.randrange(12)] if rows and rng.random() < 0.8 else []
            rows.append([*before, *(rng.randrange(4) for _ in range(rng.randrange(6)))])
        flat, offsets = np.array([id_ for row in rows for id_ in row], np.int64), np.cumsum([0, *map(len, rows)])
        tokens = 16 * np.diff(offsets) + 3
        whole = contents_of(flat, offsets, 16, tokens, np.ones(len(rows), np.int64), rng.choice([1, 16, 64]), seed % 2)
        shared = whole.shared()
        named = [blocks_of(whole, id_, whole.named[id_]) for id_ in range(len(rows))]
        holders = Counter(block for blocks in named for block in blocks)
        for id_, blocks in enumerate(named):
            kept = shared.named[id_]
            assert blocks_of(shared, id_, kept) == blocks[:kept]
            assert all(holders[block] == 1 for block in blocks[kept:])
            assert kept == 0 or holders[blocks[kept - 1]] > 1
            left += kept
    assert left > 1000


def blocks_of(contents: Contents, id_: int, upto: int) -> list[tuple[int, int]]:
    return [(chain, block) for chain, lo, hi in contents.path(id_, upto) for block in range(lo, hi)]


@pytest.mark.slow(reason="many random runs")
def test_the_random_runs_find_and_evict() -> None:
    experiments = [an_experiment(seed, speculative=seed % 2 == 0) for seed in range(120)]
    for kind in ("blocks", "tree"):
        runs = [run(experiment) for experiment in experiments if experiment.hosted[0].prefix_cache == kind]
        caching = [columns for columns in runs if "prefix_hit_tokens" in columns.requests]
        assert len(caching) > 15
        assert sum(sum(hits(columns)) for columns in caching) > 2000
        assert sum(columns.meta["prefix_evictions"] for columns in caching) > 1000
        assert sum(int(columns.requests["prefix_hit_again_tokens"].sum()) for columns in caching) > 100


def test_another_scheduler_keeps_what_it_was_shown() -> None:
    trace = a_trace((0, 12, 3, [1, 2, 3]), (10, 13, 3, [1, 2, 3, 4]), (10, 13, 3, [1, 2, 3, 5]))
    columns = served(trace, scheduler=EvictNewest(Sarathi(token_budget=64, max_sequences=8)))
    assert hits(columns) == [0, 12, 12]


def one_at_a_time(trace: Trace) -> Trace:
    n = len(trace)
    return replace(trace, arrival_ns=np.arange(n) * 10**12, output_tokens=np.ones(n, np.int64))


def found_by_the_engine(trace: Trace, blocks: int) -> list[int]:
    tokens = trace.prefix_block_tokens
    assert tokens is not None
    spec = ReplicaSpec(
        cost=Linear(fixed_s=1e-3),
        scheduler=Vllm(async_scheduling=False, max_num_batched_tokens=200_000, max_num_seqs=1),
        kv_blocks=blocks,
        block_tokens=tokens,
        prefix_cache="blocks",
    )
    columns = run(Experiment(workload=trace, replicas=(spec,), router=RoundRobin()))
    return (columns.requests["prefix_hit_tokens"] // tokens).tolist()


def test_requests_one_at_a_time_find_what_a_plain_count_does() -> None:
    rng = np.random.default_rng(7)
    requests: list[tuple[float, int, int, list[int]]] = []
    fresh = iter(range(1, 10**6))
    for _ in range(300):
        ids = (
            list(requests[rng.integers(len(requests))][3][: rng.integers(0, 12)])
            if requests and rng.random() < 0.7
            else []
        )
        prompt = int(rng.integers(1, 60))
        ids = ids[: -(-prompt // 4)]
        requests.append((0, prompt, 1, [*ids, *(next(fresh) for _ in range(-(-prompt // 4) - len(ids)))]))
    trace = one_at_a_time(a_trace(*requests))
    for blocks in (20, 50, 200, 10_000):
        assert found_by_the_engine(trace, blocks) == found_blocks(trace, blocks)


@pytest.mark.slow(reason="a whole recorded trace")
@pytest.mark.skipif(not MOONCAKE.exists(), reason="needs the Mooncake trace in ../shared")
def test_the_mooncake_trace_one_at_a_time_is_the_plain_count() -> None:
    trace = one_at_a_time(read_trace(MOONCAKE))
    assert trace.prefix_blocks is not None
    share = {}
    for blocks in (1_000, 10_000, 50_000, 10_000_000):
        found = found_by_the_engine(trace, blocks)
        assert found == found_blocks(trace, None if blocks == 10_000_000 else blocks)
        share[blocks] = round(sum(found) / len(trace.prefix_blocks), 3)
    assert share == {1_000: 0.045, 10_000: 0.215, 50_000: 0.356, 10_000_000: 0.366}


# Three sequences of two full blocks and a third, the last of which begins as the others or by itself. With the step at 4 s each
# takes another block, and none is free: the last one frees one block or three.
@pytest.mark.parametrize("cache", ["blocks", "tree"])
@pytest.mark.parametrize(("ids", "blocks", "preempted"), [([1, 2], 5, (2, 1)), ([11, 12], 7, (2,))])
def test_blocks_that_others_hold_do_not_come_free_with_a_sequence(
    cache: str, ids: list[int], blocks: int, preempted: tuple[int, ...]
) -> None:
    gone: list[tuple[int, ...]] = []
    inner = EvictNewest(Sarathi(token_budget=64))

    def noting(view: ReplicaView, /) -> Plan:
        plan = inner.plan(view)
        if plan.preempt:
            gone.append(plan.preempt)
        return plan

    trace = a_trace((0, 9, 6, [1, 2]), (1, 10, 6, [1, 2]), (2, 11, 6, ids))
    served(trace, blocks=blocks, scheduler=noting, prefix_cache=cache)
    assert gone == [preempted]


def test_a_pool_without_a_cache_finds_and_shares_nothing() -> None:
    pool = KvPool(10, 4)
    assert (pool.found_blocks(0, 9), pool.unheld_blocks(0, 0), pool.shared_blocks(0), pool.found(0)) == (0, 0, 0, 0)
    assert (pool.full_blocks(0), pool.freed_by(0, {}), pool.held_again, pool.order(0)) == (0, 0, 0, 0)


def a_pool(kind: type[BlockCache] | type[RadixCache], rows: list[list[int]], outputs: list[int]) -> Any:
    """A cache of 20 blocks of four tokens, and requests whose prompts are whole blocks."""
    ids = np.array([id_ for row in rows for id_ in row], np.int64)
    prompts = np.array([4 * len(row) for row in rows]) - outputs
    contents = contents_of(ids, np.cumsum([0, *map(len, rows)]), 4, prompts, np.array(outputs), 4)
    return BlockCache(20, 4, contents) if kind is BlockCache else RadixCache(20, 4, contents, array("q", prompts))


def holds(pool: Any, id_: int, blocks: int, new: int) -> None:
    """A request finds *blocks* blocks, and computes *new*."""
    pool.admit(id_, blocks)
    pool.take(new)
    (pool.cached if isinstance(pool, BlockCache) else pool.computed)(id_, 4 * (blocks + new))


@pytest.mark.parametrize("kind", [BlockCache, RadixCache])
def test_preempting_frees_what_no_other_holds_and_of_several_the_rest(kind: Any) -> None:
    # Five blocks of both, three of the first alone and two of the second.
    pool = a_pool(kind, [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 9, 10]], [0, 0])
    holds(pool, 0, 0, 8)
    holds(pool, 1, 5, 2)
    for one, other, alone in ((0, 1, 3), (1, 0, 2)):
        gone: dict[object, int] = {}
        assert (pool.freed_by(one, gone), pool.freed_by(other, gone)) == (alone, 10 - alone)


@pytest.mark.parametrize("kind", [BlockCache, RadixCache])
def test_a_cache_that_is_lost_holds_nothing_and_finds_nothing(kind: Any) -> None:
    pool = a_pool(kind, [[1, 2, 3], [1, 2, 4]], [0, 0])
    for _ in range(2):
        holds(pool, 0, 0, 3)
        holds(pool, 1, 2, 1)
        assert (pool.free, pool.full_blocks(0), pool.found(1)) == (16, 3, 2)
        pool.reset()
        assert (pool.free, pool.found_blocks(0, 99), pool.held_again, pool.fault()) == (20, 0, 0, None)


def test_a_cache_says_while_what_the_workload_names_is_emitted() -> None:
    # The prompts are two blocks, and the third is emitted.
    pool = a_pool(BlockCache, [[1, 2, 3], [1, 2, 3]], [4, 4])
    pool.progress = lambda id_: 8
    for id_ in (0, 1):
        holds(pool, id_, 0, 2)
        pool.writes_on(id_, 8)
    pool.release(0, 2, 8)
    assert pool.writes
    pool.release(1, 2, 8)
    assert not pool.writes
