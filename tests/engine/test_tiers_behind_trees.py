"""Tiers behind a tree of pages, as SGLang's hierarchical cache has them: what is written, given up, loaded and found."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from policies.sglang import Sglang
from sim.engine import Columns
from sim.engine.record.columns import LOAD, STORE
from sim.engine.tiers.tiers import TierSpec, WriteRule
from tests.engine.radix import alike
from tests.engine.random_runs import an_experiment, run_both_ways, with_tiers
from tests.engine.test_prefix import a_trace as a_trace_of_blocks
from tests.engine.test_radix import a_pool, a_trace, put
from tests.engine.test_tiers import HOST, A, B, S, seconds, served
from tests.sample import few
from workloads import Trace

ONE_SEAT = Sglang(max_running_requests=1, disable_overlap_schedule=True)


def behind_a_tree(trace: Trace, host: TierSpec, *, pages: int) -> Columns:
    return served(trace, host, prefix_cache="tree", scheduler=ONE_SEAT, kv_blocks=pages)


def transfers(columns: Columns) -> list[tuple[int, int, int, float, float]]:
    """(what, request, bytes, asked, arrived) of each, in seconds."""
    moved = columns.transfers()
    assert moved is not None
    names = ("what", "request", "bytes")
    times = ((moved[name] / S).tolist() for name in ("asked_ns", "arrived_ns"))
    return list(zip(*(moved[name].tolist() for name in names), *times, strict=True))


def test_pages_that_the_tree_gave_up_are_loaded_from_host_memory_by_hand() -> None:
    # A's two full pages are written from 1 s to 2 s and are there at 2.5 s. B needs four pages of five and one beside them: A's
    # leaf is evicted whole. A, back at 5 s, waits on the link for B's three pages until 5.5 s and is here at 6.5 s. C takes the
    # seat meanwhile. Of A one token is computed.
    trace = a_trace_of_blocks((0, 9, 1, A), (3, 13, 1, B), (5, 9, 1, A), (5.25, 1, 1, []))
    columns = behind_a_tree(trace, HOST, pages=5)
    assert seconds(columns, "first_token_ns") == [1.0, 4.0, 7.5, 6.25]
    assert seconds(columns, "scheduled_ns") == [0.0, 3.0, 6.5, 5.25]
    assert columns.requests["host_hit_tokens"].tolist() == [0, 0, 8, 0]
    assert columns.requests["computed_prompt_tokens"].tolist() == [9, 13, 1, 1]
    assert transfers(columns) == [
        (STORE, 0, 2000, 1.0, 2.5),
        (STORE, 1, 3000, 4.0, 6.0),
        (LOAD, 2, 2000, 5.0, 6.5),
    ]


@pytest.mark.parametrize(
    ("write", "moved"),
    [
        # The prompt is written when it is put into the tree, the answer when its sequence has ended.
        ("through", [(STORE, 0, 2000, 1.0, 2.5), (STORE, 0, 1000, 5.0, 6.0), (STORE, 1, 3000, 11.0, 13.0)]),
        # The answer's page is a leaf, which goes when B needs a page, and B goes whole when the third request needs one.
        ("eviction", [(STORE, -1, 1000, 10.0, 11.0), (STORE, -1, 3000, 20.75, 22.75)]),
    ],
)
def test_a_prompt_is_found_on_the_device_and_behind_that_in_host_memory_by_hand(
    write: WriteRule, moved: list[tuple[int, int, int, float, float]]
) -> None:
    text = [1, 2, 3, 4]
    trace = a_trace_of_blocks((0, 9, 5, text), (10, 13, 1, B), (20, 14, 1, text))
    columns = behind_a_tree(trace, replace(HOST, write=write), pages=7)
    assert columns.requests["prefix_hit_tokens"].tolist() == [0, 0, 8]
    assert columns.requests["host_hit_tokens"].tolist() == [0, 0, 4]
    assert columns.requests["computed_prompt_tokens"].tolist() == [9, 13, 2]
    assert seconds(columns, "first_token_ns") == [1.0, 11.0, 21.75]
    assert [each for each in transfers(columns) if each[0] == LOAD] == [(LOAD, 2, 1000, 20.0, 20.75)]
    assert [each for each in transfers(columns) if each[0] == STORE] == moved
    iterations = columns.iterations()
    assert (iterations["prefix_hit_tokens"].sum(), iterations["loaded_tokens"].sum()) == (8, 4)


def test_a_leaf_is_given_up_chain_by_chain() -> None:
    # The second request, which alone is in the tree, leaves the first one's chain at its third page.
    pool, told = a_pool([1, 2, 3], [1, 2, 9, 9], blocks=10), list[tuple[int, int, int]]()
    pool.gives_up = lambda chain, lo, hi: told.append((chain, lo, hi))
    put(pool, 1, 4)
    pool.release(1, 4, 4)
    pool.take(8)
    assert pool.fault() is None
    assert told == [(0, 0, 2), (1, 2, 4)]


def test_what_never_enters_the_tree_is_not_written() -> None:
    scheduler = Sglang(disable_overlap_schedule=True, chunked_prefill_size=8)
    for goes_s, stored in ((0.5, 0), (1.5, 1)):
        trace = replace(a_trace_of_blocks((0, 40, 1, list(range(10)))), abort_ns=[round(goes_s * S)])
        columns = served(trace, HOST, prefix_cache="tree", scheduler=scheduler, kv_blocks=20)
        assert columns.meta["tiers"]["host"]["stores"] == stored


@pytest.mark.parametrize("write", ["through", "eviction"])
@pytest.mark.parametrize("seed", range(3))
def test_host_memory_for_everything_keeps_what_was_ever_computed(write: WriteRule, seed: int) -> None:
    rng, fresh = random.Random(seed), iter(range(10**6))
    texts, requests = [[next(fresh) for _ in range(30)] for _ in range(3)], list[tuple[list[int], list[int]]]()
    for _ in range(60):
        prompt = rng.choice(texts)[: rng.randrange(1, 50)] + [next(fresh) for _ in range(rng.randrange(10))]
        answer = [next(fresh) for _ in range(rng.randrange(1, 12))]
        requests.append((prompt, answer))
        texts += [prompt + answer] if len(prompt) < 40 and rng.random() < 0.5 else []
    trace = a_trace(*((100 * i, len(p), len(a), p + a) for i, (p, a) in enumerate(requests)))
    host = replace(HOST, capacity_bytes=10**9, write=write, read_bytes_per_s=1e6, write_bytes_per_s=1e6)
    columns = served(trace, host, prefix_cache="tree", scheduler=ONE_SEAT, kv_blocks=100, block_tokens=1)
    on_device, in_host = (columns.requests[name] for name in ("prefix_hit_tokens", "host_hit_tokens"))
    # The last token of an answer is never computed.
    computed = [prompt + answer[:-1] for prompt, answer in requests]
    longest = [
        max((alike(prompt[:-1], before) for before in computed[:row]), default=0)
        for row, (prompt, _) in enumerate(requests)
    ]
    assert (on_device + in_host).tolist() == longest
    assert min(on_device.sum(), in_host.sum()) > 50


def test_a_sequence_that_gives_way_comes_back_to_the_tree_from_host_memory() -> None:
    scheduler = Sglang(disable_overlap_schedule=True, schedule_conservativeness=0.0)
    trace = a_trace((0, 20, 30, list(range(20))), (0, 19, 30, list(range(100, 119))))
    columns = served(
        trace, replace(HOST, read_bytes_per_s=1e6), prefix_cache="tree", scheduler=scheduler, kv_blocks=84, block_tokens=1,
        swaps=True,
    )  # fmt: skip
    assert columns.meta["preemptions"] == 1
    assert columns.requests["recomputed_tokens"].tolist() == [0, 0]
    # Its prompt is on the device still, or is not.
    assert columns.requests["swap_hit_tokens"].max() > 10


TREES = (5, 76, 98, 101, 220, 329, 380, 403, 416, 466, 638)


@pytest.mark.parametrize("seeds", few([TREES[::4], TREES]))
def test_random_runs_behind_trees_keep_the_books_and_equal_stepping(seeds: tuple[int, ...]) -> None:
    loads = 0
    # Trees before host memory, disks and remote stores, written through or on eviction, with and without swapped sequences.
    for seed in seeds:
        experiment = with_tiers(an_experiment(seed, speculative=seed % 2 == 0), seed)
        assert {core.prefix_cache for core in experiment.hosted} == {"tree"}
        columns = run_both_ways(experiment)
        loads += sum(tier["loads"] for tier in columns.meta.get("tiers", {}).values())
    assert loads > 4 * len(seeds)
