"""A plain count of what a cache of blocks finds, least recently used first, requests one after the other."""

from __future__ import annotations

from collections import OrderedDict

from workloads import Trace


def found_blocks(trace: Trace, capacity: int | None) -> list[int]:
    """Blocks that each request finds in a cache that holds *capacity* blocks, None: any number. A block is one of the trace's.

    Whole blocks are kept and found, one token at least of each prompt is computed, and while a request is served it has room for
    its last block, which is not whole. Of a request's blocks the last is forgotten first.
    """
    tokens = trace.prefix_block_tokens
    assert tokens is not None
    cache: OrderedDict[int, None] = OrderedDict()
    found: list[int] = []
    for row, prompt in enumerate(trace.prompt_tokens.tolist()):
        ids = trace.prefix_of(row).tolist()[: prompt // tokens]
        hits = 0
        while hits < min(len(ids), (prompt - 1) // tokens) and ids[hits] in cache:
            hits += 1
        found.append(hits)
        for id_ in ids[:hits]:
            # Held while the request is served.
            del cache[id_]
        if capacity is not None:
            room = capacity - -(-prompt // tokens)
            while len(cache) > room:
                cache.popitem(last=False)
        # A block that is computed again, the whole prompt being known, replaces the one that was there.
        for id_ in reversed(ids):
            cache.pop(id_, None)
            cache[id_] = None
    return found
