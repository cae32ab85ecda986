"""A plain count of what a cache of blocks and a tier behind it find, block by block, requests one after the other."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from workloads import Trace

Key = Callable[[int, int, int, int], object]
"""(number of the last use, number of the entry, uses, place in the prompt) of a block -> what orders those that go."""


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


class _Ordered(_Lru):
    """Blocks in the order of a key; a use is the write that brought them, and each load."""

    def __init__(self, capacity: int, key: Key, places: dict[int, int]) -> None:
        super().__init__(capacity)
        self.key, self.places = key, places
        self.now = 0
        self.known: dict[int, tuple[int, int, int]] = {}
        """(last use, entry, uses) by block."""

    def use(self, id_: int) -> None:
        if id_ in self.blocks:
            _, entered, uses = self.known[id_]
            self.now += 1
            self.known[id_] = self.now, entered, uses + 1

    def put(self, id_: int) -> None:
        self.now += 1
        _, entered, uses = self.known[id_] if id_ in self.blocks else (0, self.now, 1)
        self.blocks[id_] = None
        self.known[id_] = self.now, entered, uses

    def shrink(self) -> None:
        while len(self.blocks) > self.capacity:
            del self.blocks[
                min(self.blocks, key=lambda id_: (self.key(*self.known[id_], self.places[id_]), self.known[id_]))
            ]


def found_by_level(
    trace: Trace, device_blocks: int, tier_blocks: int, *, on_eviction: bool, key: Key | None = None
) -> list[tuple[int, int]]:
    """Blocks that each request finds on the device, and behind these in the tier. A block is one of the trace's.

    What is loaded is on the device afterwards, and stays in the tier. The tier is written when a prompt has been computed, or
    (*on_eviction*) when the device gives a block up. Of a request's blocks the last is forgotten first, on both levels; of
    the tier's in the order of *key*, without it the least recently used.
    """
    tokens = trace.prefix_block_tokens
    assert tokens is not None
    places = {id_: i for row in range(len(trace.prompt_tokens)) for i, id_ in enumerate(trace.prefix_of(row).tolist())}
    device, tier = _Lru(device_blocks), _Lru(tier_blocks) if key is None else _Ordered(tier_blocks, key, places)
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
