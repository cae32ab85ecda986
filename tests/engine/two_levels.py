"""A plain count of what a cache of blocks and a tier behind it find, block by block, requests one after the other."""

from __future__ import annotations

from collections import OrderedDict

from workloads import Trace


class _Lru:
    """Blocks, the least recently used first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: OrderedDict[int, None] = OrderedDict()

    def use(self, id_: int) -> None:
        if id_ in self.blocks:
            self.blocks.move_to_end(id_)

    def put(self, id_: int) -> None:
        self.blocks.pop(id_, None)
        self.blocks[id_] = None

    def shrink(self) -> None:
        while len(self.blocks) > self.capacity:
            self.blocks.popitem(last=False)


def found_by_level(trace: Trace, device_blocks: int, tier_blocks: int, *, on_eviction: bool) -> list[tuple[int, int]]:
    """Blocks that each request finds on the device, and behind these in the tier. A block is one of the trace's.

    What is loaded is on the device afterwards, and stays in the tier. The tier is written when a prompt has been computed, or
    (*on_eviction*) when the device gives a block up. Of a request's blocks the last is forgotten first, on both levels.
    """
    tokens = trace.prefix_block_tokens
    assert tokens is not None
    device, tier = _Lru(device_blocks), _Lru(tier_blocks)
    found: list[tuple[int, int]] = []
    for row, prompt in enumerate(trace.prompt_tokens.tolist()):
        ids = trace.prefix_of(row).tolist()[: prompt // tokens]
        most = min(len(ids), (prompt - 1) // tokens)
        hits = 0
        while hits < most and ids[hits] in device.blocks:
            hits += 1
        to = hits
        while to < most and ids[to] in tier.blocks:
            to += 1
        found.append((hits, to - hits))
        for id_ in reversed(ids[hits:to]):
            tier.use(id_)
        for id_ in ids[:hits]:
            del device.blocks[id_]
        room = device.capacity - -(-prompt // tokens)
        while len(device.blocks) > room:
            gone, _ = device.blocks.popitem(last=False)
            if on_eviction:
                tier.put(gone)
                tier.shrink()
        for id_ in reversed(ids):
            device.put(id_)
        if not on_eviction:
            for id_ in reversed(ids):
                tier.put(id_)
            tier.shrink()
    return found
