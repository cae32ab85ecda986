"""The radix cache: what a tree of tokens finds, what gives way, and in what order SGLang's scheduler asks for it."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from policies.routers import Prefix, RoundRobin
from policies.schedulers import Sarathi
from policies.sglang import Sglang
from policies.view import Looks, Scheduler
from policies.vllm import Vllm
from policies.wrappers import EvictNewest
from sim.engine import Columns, Experiment, ReplicaSpec, run
from sim.engine.cache.radix_cache import RadixCache
from sim.engine.kv.content import contents_of
from tests.engine.contents import hits, trace_of_ids
from tests.engine.costs import Linear
from tests.engine.radix import found_tokens
from tests.engine.random_runs import an_experiment, run_both_ways
from workloads import Trace


def a_trace(*requests: tuple[float, int, int, list[int]], tokens: int = 1) -> Trace:
    return trace_of_ids(*requests, tokens=tokens)


def served(trace: Trace, *, blocks: int = 100, scheduler: Scheduler | None = None, **spec: Any) -> Columns:
    chosen = Sglang(disable_overlap_schedule=True) if scheduler is None else scheduler
    replica = ReplicaSpec(
        cost=Linear(fixed_s=1.0),
        scheduler=chosen,
        kv_blocks=blocks,
        **{"block_tokens": 1, "prefix_cache": "tree", **spec},
    )
    return run(Experiment(workload=trace, replicas=(replica,), router=RoundRobin()), check_invariants=True)


def test_single_tokens_are_found_and_one_at_least_is_computed() -> None:
    columns = served(a_trace((0, 5, 1, [1, 2, 3, 4, 5]), (10, 5, 1, [1, 2, 3, 4, 5]), (20, 5, 1, [1, 2, 3, 9, 9])))
    assert hits(columns) == [0, 4, 3]


def test_pages_are_found_whole() -> None:
    ids = list(range(10))
    columns = served(a_trace((0, 10, 1, ids), (10, 10, 1, ids), (20, 9, 1, ids[:9])), block_tokens=4, blocks=25)
    assert hits(columns) == [0, 8, 8]


def test_who_is_admitted_together_computes_the_same_twice_and_holds_it_once() -> None:
    ids = list(range(20))
    columns = served(a_trace((0, 20, 4, ids), (0, 20, 4, ids), (10, 20, 1, ids)))
    assert hits(columns) == [0, 0, 19]
    # Tokens held while the two decode: 20 of the prompt once, and what each has emitted.
    assert columns.iterations()["kv_blocks_used"].tolist()[:3] == [40, 22, 24]


def test_what_was_decoded_is_found_when_its_sequence_has_ended_and_not_before() -> None:
    ids = list(range(30))
    columns = served(a_trace((0, 10, 6, ids[:16]), (3.5, 18, 1, ids[:18]), (20, 18, 1, ids[:18])))
    # The sixth token is never computed; the third request finds all that the second has.
    assert hits(columns) == [0, 10, 17]
    columns = served(a_trace((0, 10, 6, ids[:16]), (20, 18, 1, ids[:18])))
    assert hits(columns) == [0, 15]


def test_the_leaf_that_was_used_least_recently_gives_way_whole_its_answer_before_its_prompt() -> None:
    one, two = list(range(20)), list(range(100, 120))
    last = list(range(200, 230))
    # Of 100 tokens two prompts of 20 take 58, with answers of which 9 are kept each; the next takes 30, and the fourth lacks 8.
    columns = served(
        a_trace((0, 20, 10, one), (20, 20, 10, two), (40, 30, 1, last), (50, 20, 1, [300 + i for i in last[:20]]),
                (60, 20, 1, one), (70, 20, 1, two)),
    )  # fmt: skip
    assert columns.meta["prefix_evictions"] == 9
    assert hits(columns) == [0, 0, 0, 0, 19, 19]


def test_what_a_retracted_sequence_decoded_is_gone_and_its_prompt_is_not() -> None:
    columns = served(
        a_trace((0, 20, 30, list(range(20))), (0, 19, 30, list(range(100, 119)))),
        blocks=84,
        scheduler=Sglang(disable_overlap_schedule=True, schedule_conservativeness=0.0),
    )
    assert columns.meta["preemptions"] == 1
    # Its prompt may have had to go as well, but for what room was needed.
    assert columns.requests["prefix_hit_again_tokens"].tolist() in ([20, 0], [0, 19])


def test_the_last_page_of_what_is_found_is_computed_again_for_a_drafter_that_needs_it() -> None:
    trace = a_trace(
        (0, 5, 1, [1, 2, 3, 4, 5]), (10, 5, 1, [1, 2, 3, 4, 5]), (20, 5, 1, [1, 9, 9, 9, 9]), (30, 5, 1, [8] * 5)
    )
    for scheduler in (None, EvictNewest(Sarathi(token_budget=64, max_sequences=8))):
        assert hits(served(trace, prefix_drops_last=True, scheduler=scheduler)) == [0, 3, 0, 0]
        assert hits(served(trace, scheduler=scheduler)) == [0, 4, 1, 0]


def a_pool(*rows: list[int], blocks: int, used_by_looks: bool = True, page: int = 1) -> RadixCache:
    """A tree over prompts of these ids, each a page of *page* tokens."""
    prompts = np.array([page * len(row) for row in rows])
    offsets = np.cumsum([0, *(len(row) for row in rows)])
    contents = contents_of(np.concatenate(rows), offsets, page, prompts, np.zeros_like(prompts), page)
    tree = RadixCache(blocks, page, contents, array("q", prompts.tolist()))
    tree.used_by_looks = used_by_looks
    return tree


def put(pool: RadixCache, id_: int, tokens: int) -> None:
    """A request computes all of its prompt."""
    pool.admit(id_, 0)
    pool.take(tokens)
    pool.computed(id_, tokens)


def test_the_upper_part_of_a_node_that_is_split_is_as_old_as_the_rest() -> None:
    """A request that holds the first half of a node splits it; when both halves are free, the upper one goes in its turn and not
    before."""
    older, younger = list(range(10)), list(range(100, 110))
    pool = a_pool(older, younger, younger, list(range(200, 230)), blocks=20)
    put(pool, 0, 10)
    put(pool, 1, 10)
    pool.release(1, 10, 10)
    pool.admit(2, 5)
    pool.release(2, 5, 5)
    # The lower half of the younger goes, as the older is held; and then the older.
    pool.admit(3, 0)
    pool.take(5)
    assert pool.found_blocks(1, 11) == 5
    pool.release(0, 10, 10)
    pool.take(1)
    assert (pool.found_blocks(0, 11), pool.found_blocks(1, 11)) == (0, 5)


def test_looks_count_as_use_once_and_those_over_the_queue_are_counted() -> None:
    one, two = list(range(10)), list(range(100, 110))
    pool = a_pool(one, two, one[:5], blocks=20)
    for id_ in (0, 1):
        put(pool, id_, 10)
        pool.release(id_, 10, 10)
    # Asked for, nothing is used; used, the older outlives the younger, and is split where it was found.
    pool.found_blocks(0, 11)
    pool.use(Looks(((2, 6),)))
    pool.use(Looks((), of_queue=True))
    assert pool.queue_looks == 1
    pool.admit(2, 0)
    pool.take(10)
    assert (pool.found_blocks(0, 11), pool.found_blocks(1, 11)) == (10, 0)
    pool.take(1)
    assert pool.found_blocks(0, 11) == 5


@pytest.mark.parametrize(("first", "last"), [(0, 1), (1, 0)])
def test_what_is_looked_up_last_for_a_plan_is_evicted_last(first: int, last: int) -> None:
    pool = a_pool(list(range(10)), list(range(100, 110)), list(range(200, 230)), blocks=20)
    for id_ in (0, 1):
        put(pool, id_, 10)
        pool.release(id_, 10, 10)
    pool.use(Looks(((first, 11), (last, 11))))
    pool.admit(2, 0)
    pool.take(10)
    assert (pool.found_blocks(first, 11), pool.found_blocks(last, 11)) == (0, 10)


def test_what_was_looked_up_in_vain_is_found_once_it_is_there() -> None:
    pool = a_pool(list(range(10)), list(range(12)), blocks=20)
    assert pool.found_blocks(1, 13) == 0
    put(pool, 0, 10)
    assert pool.found_blocks(1, 13) == 10


@pytest.mark.parametrize(
    ("page", "room", "evicted"),
    [
        (1, ("before_prompts", 9, 1), 0),
        (1, ("before_decodes", 6), 0),
        (2, ("before_prompts", 8, 1), 5),
        (2, ("before_prompts", 9, 1), 10),
        (2, ("before_decodes", 5), 5),
        (2, ("before_decodes", 6), 10),
    ],
)
def test_room_is_made_before_it_is_taken_where_pages_are_long(page: int, room: tuple[Any, ...], evicted: int) -> None:
    """Two leaves of five pages are all that there is."""
    pool = a_pool(list(range(5)), list(range(10, 15)), blocks=10, page=page)
    for id_ in (0, 1):
        pool.admit(id_, 0)
        pool.take(5)
        pool.release(id_, 5, 5 * page)
    getattr(pool, room[0])(*room[1:])
    assert (pool.evicted, pool.free, pool.fault()) == (evicted, 10, None)


def with_six(rows: list[list[int]]) -> RadixCache:
    """A tree of the first six prompts, the first of which still runs."""
    pool = a_pool(*rows, blocks=200)
    for id_ in range(6):
        put(pool, id_, len(rows[id_]))
        if id_:
            pool.release(id_, len(rows[id_]), len(rows[id_]))
    return pool


def test_what_is_noted_as_held_counts_as_if_it_were_and_nothing_changes() -> None:
    rng, shared = random.Random(5), 0
    for _ in range(200):
        starts = [[100 * g + i for i in range(12)] for g in range(2)]
        rows = [[*rng.choice(starts)[: rng.randrange(13)], *(1000 * n + i for i in range(3))] for n in range(12)]
        pool, admitted = with_six(rows), with_six(rows)
        before = [(node.lo, node.hi, node.refs, node.used) for node in pool._all()]
        held = dict[object, int]()
        for id_ in range(6, 12):
            found = pool.found_blocks(id_, len(rows[id_]) + 1)
            unheld = pool.unheld_blocks(id_, found, held)
            assert unheld == admitted.unheld_blocks(id_, found)
            shared += unheld < pool.unheld_blocks(id_, found)
            if rng.random() < 0.7:
                blocks = rng.randrange(found + 1)
                pool.hold(id_, blocks, held)
                admitted.admit(id_, blocks)
        assert [(node.lo, node.hi, node.refs, node.used) for node in pool._all()] == before
    assert shared > 100


def test_lpm_serves_those_first_who_find_most_and_one_of_those_who_begin_alike() -> None:
    known, new = list(range(60)), list(range(1000, 1060))
    trace = a_trace(
        (0, 60, 1, known),
        (10, 50, 1, new[:50]), (10, 50, 1, [*new[:49], 7]), (10, 40, 1, known[:40]), (10, 50, 1, known[:50]),
    )  # fmt: skip
    one_by_one = {"prefill_max_requests": 1, "disable_overlap_schedule": True}
    lpm = served(trace, blocks=1000, scheduler=Sglang(schedule_policy="lpm", **one_by_one))
    assert hits(lpm) == [0, 0, 49, 39, 49]
    order = np.argsort(lpm.requests["scheduled_ns"], kind="stable").tolist()
    assert order == [0, 4, 3, 1, 2]
    fcfs = served(trace, blocks=1000, scheduler=Sglang(**one_by_one))
    assert np.argsort(fcfs.requests["scheduled_ns"], kind="stable").tolist() == [0, 1, 2, 3, 4]
    # In one batch the second of the like would have computed all of it.
    at_once = served(trace, blocks=1000)
    assert hits(at_once) == [0, 0, 0, 39, 49]


def test_lpm_leaves_a_queue_of_more_than_128_as_it_came() -> None:
    known = list(range(60))
    others = [(10.0, 50, 1, [1000 + 100 * i + j for j in range(50)]) for i in range(128)]
    scheduler = Sglang(schedule_policy="lpm", prefill_max_requests=1, disable_overlap_schedule=True)
    trace = a_trace((0, 60, 1, known), *others, (10, 50, 1, known[:50]))
    columns = served(trace, blocks=20_000, scheduler=scheduler)
    scheduled = columns.requests["scheduled_ns"]
    # The first of 129 goes as it came; then the queue is short enough to be sorted.
    assert np.argsort(scheduled, kind="stable").tolist()[:3] == [0, 1, 129]


@pytest.mark.parametrize("seed", range(6))
def test_requests_one_at_a_time_find_what_a_plain_count_does(seed: int) -> None:
    rng = random.Random(seed)
    capacity = rng.choice([120, 200, 400])
    fresh = iter(range(10**6))
    texts: list[list[int]] = [[next(fresh) for _ in range(30)] for _ in range(3)]
    requests = []
    for _ in range(100):
        text = rng.choice(texts)
        prompt = text[: rng.randrange(1, 50)]
        prompt = prompt + [next(fresh) for _ in range(rng.randrange(0 if prompt else 1, 20))]
        answer = [next(fresh) for _ in range(rng.randrange(1, 12))]
        requests.append((prompt, answer))
        if rng.random() < 0.5:
            texts.append(prompt + answer)
    requests = [(prompt[-60:], answer) for prompt, answer in requests]
    trace = a_trace(*((100 * i, len(p), len(a), p + a) for i, (p, a) in enumerate(requests)))
    columns = served(trace, blocks=capacity)
    expected, evicted = found_tokens(requests, capacity)
    assert hits(columns) == expected
    assert columns.meta["prefix_evictions"] == evicted
    assert sum(expected) > 200
    assert evicted > 200


@pytest.mark.parametrize(
    "scheduler",
    [
        EvictNewest(Sarathi(token_budget=64, max_sequences=8)),
        Vllm(max_num_batched_tokens=64, max_num_seqs=8, async_scheduling=False),
    ],
)
def test_other_schedulers_find_in_the_tree_what_they_are_shown(scheduler: Scheduler) -> None:
    ids = list(range(20))
    columns = served(a_trace((0, 20, 3, ids), (10, 20, 3, ids), (20, 15, 3, ids[:15])), scheduler=scheduler)
    assert hits(columns) == [0, 19, 14]


@pytest.mark.parametrize("cache", ["blocks", "tree"])
def test_iterations_say_what_was_found_and_evicted(cache: str) -> None:
    one, two, other = list(range(20)), list(range(100, 120)), list(range(200, 280))
    trace = a_trace((0, 20, 4, one), (10, 80, 1, other), (20, 20, 4, one), (30, 20, 4, two), (40, 20, 1, one))
    columns = served(trace, prefix_cache=cache)
    table = columns.iterations()
    prompts = table["prefill_tokens"] > 0
    found = table["prefix_hit_tokens"][prompts].tolist()
    assert found == hits(columns)
    assert (table["prefill_tokens"][prompts] + found).tolist() == [20, 80, 20, 20, 20]
    assert not table["prefix_hit_tokens"][~prompts].any()
    # What decodes evict is said with the next prompt.
    assert 0 < table["prefix_evictions"].sum() == columns.meta["prefix_evictions"]


def test_runs_without_contents_say_nothing_of_what_is_found() -> None:
    bare = Trace(arrival_ns=[0], prompt_tokens=[5], output_tokens=[2])
    assert "prefix_hit_tokens" not in served(bare).iterations()


def test_routers_that_look_into_trees_see_what_stepping_sees_and_leave_them_as_they_are() -> None:
    """While a machine decodes, what its growth has evicted by now is gone for who looks, and nothing is taken by looking."""
    found = looked = 0
    for seed in range(50):
        experiment = an_experiment(seed, speculative=False)
        if any(tenant.prefix_cache != "tree" for tenant in experiment.hosted):
            continue
        if getattr(experiment.workload, "prefix_blocks", None) is None:
            continue
        experiment = replace(experiment, replicas=experiment.machines[:1] * 2, router=Prefix())
        columns = run_both_ways(experiment)
        found += int(columns.requests["prefix_hit_tokens"].sum())
        looked += 1
    assert looked > 5
    assert found > 100
