"""A trace is replayed on a prefix cache alone: the tokens that it finds by each eviction policy."""

from __future__ import annotations

import numpy as np

from policies.eviction import Eviction, RankFunction, foresees, lasts, rank_of
from sim.engine.cache.block_cache import BlockCache
from sim.engine.kv.content import contents_of
from sim.engine.kv.next_uses import NextUses
from workloads import Trace, chained


def found_tokens(trace: Trace, capacity_blocks: int, eviction: Eviction | RankFunction | None) -> int:
    """Prompt tokens that a cache of *capacity_blocks* blocks of the trace finds, requests one after the other in order of arrival.

    A request holds what it finds, and takes blocks for the rest, of a prompt that is longer than the cache for its beginning.
    ValueError for a trace without prefix blocks.
    """
    ids, offsets, tokens = trace.prefix_blocks, trace.prefix_offsets, trace.prefix_block_tokens
    if ids is None or offsets is None or tokens is None:
        raise ValueError("the trace does not say which prompts share blocks")
    counts = np.diff(offsets)
    none = np.zeros(len(counts), np.int64)
    contents = contents_of(chained(ids, offsets, trace.model_index), offsets, tokens, counts * tokens, none, tokens)
    asked = np.minimum(counts, -(-trace.prompt_tokens // tokens)).tolist()
    pool = BlockCache(capacity_blocks, tokens, contents)
    if eviction is not None:
        pool.eviction, pool.lasts_s = rank_of(eviction), lasts(eviction)
        if trace.class_index is not None:
            pool.classes = [trace.classes[at] for at in trace.class_index.tolist()]
    if foresees(eviction):
        pool.next_uses = NextUses(contents, [blocks * tokens + 1 for blocks in asked])
    total = now_ns = 0
    pool.now_ns = lambda: now_ns
    arrivals = trace.arrival_ns.tolist()
    for id_, (count, blocks, prompt) in enumerate(
        zip(counts.tolist(), asked, trace.prompt_tokens.tolist(), strict=True)
    ):
        now_ns = arrivals[id_]
        found = pool.found_blocks(id_, blocks * tokens + 1)
        total += min(found * tokens, prompt)
        held = min(count, capacity_blocks)
        pool.admit(id_, found)
        pool.take(held - found)
        pool.release(id_, held, held * tokens)
    return total
