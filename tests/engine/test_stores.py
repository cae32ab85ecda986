"""The blocks that a tier keeps, those that give way, and when machines see what others did."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from policies.eviction import CachedBlocks, Fifo, Lfu, Lru, Mru, Rank, RankFunction, Retention
from sim.engine.kv.content import contents_of
from sim.engine.kv.content_store import LOADED, WRITTEN_AGAIN, Key
from sim.engine.record.columns import Recorder
from sim.engine.tiers.stores import SharedStore, Store
from sim.engine.tiers.tiers import SharedStores, Tiers, TierSpec

ONE: Key = ((0, 4, 1), 1)
"""A chain of contents whose blocks are a byte each."""
TWO: Key = ((0, 4, 1), 2)


def test_of_a_prompt_that_forks_the_last_block_used_gives_way_first() -> None:
    store = Store(4)
    store.put([(ONE, 0, 2)], 0, 0)
    store.put([(TWO, 2, 4)], 1, 1)
    # One prompt has all four; the two that came first are the first of it.
    store.use([(ONE, 0, 2), (TWO, 2, 4)])
    assert store.put([(ONE, 7, 8)], 2, 2) == [(TWO, 3, 4)]
    assert store.covered([(ONE, 0, 2), (TWO, 2, 4)], 0, 2) == 3
    assert store.fault() is None


def test_blocks_written_together_are_found_each_when_it_has_come() -> None:
    store = Store(8)
    store.put([(ONE, 0, 2)], 0, 5)
    # The prompt goes on: its first blocks are on their way still, and the others come later.
    assert store.missing([(ONE, 0, 4)]) == 2
    store.put([(ONE, 0, 4)], 1, 9)
    assert [store.covered([(ONE, 0, 4)], 0, now_ns) for now_ns in (4, 5, 8, 9)] == [0, 2, 2, 4]


def test_sequences_that_were_moved_here_make_contents_give_way_and_not_each_other() -> None:
    store = Store(4)
    store.put([(ONE, 0, 3)], 0, 0)
    assert store.move_in(7, 2) == [(ONE, 2, 3)]
    assert store.move_in(8, 3) is None
    assert store.move_in(8, 2) == [(ONE, 0, 2)]
    store.move_out(7)
    store.move_out(7)
    assert (store.used_bytes, store.fault()) == (2, None)


def test_of_blocks_that_are_on_their_way_those_are_dropped_that_were_to_come_then() -> None:
    store = Store(100)
    of_ten_bytes: Key = ((0, 4, 10), 1)
    store.put([(of_ten_bytes, 0, 2)], 0, 5)
    store.put([(of_ten_bytes, 0, 6)], 0, 9)
    store.drop(of_ten_bytes, 0, 2, 9)
    store.drop(of_ten_bytes, 3, 4, 9)
    assert (store.used_bytes, store.missing([(of_ten_bytes, 0, 6)]), store.fault()) == (50, 1, None)
    assert [store.covered([(of_ten_bytes, 0, 6)], at, 9) for at in (0, 3, 4)] == [3, 3, 6]


def test_what_a_machine_does_to_a_shared_store_is_seen_a_nanosecond_later_in_the_order_of_machines() -> None:
    store = SharedStore(2)
    store.later(1, 10, [(TWO, 0, 2)], 10)
    store.later(0, 10, [(ONE, 0, 2)], 10)
    store.bring_up_to(10)
    assert store.used_bytes == 0
    store.bring_up_to(11)
    # The second machine's came last, whoever told of it first.
    assert (store.covered([(ONE, 0, 2)], 0, 11), store.covered([(TWO, 0, 2)], 0, 11)) == (0, 2)


def test_what_is_written_to_a_shared_store_at_the_first_instant_is_kept() -> None:
    store = SharedStore(2)
    store.later(0, 0, [(ONE, 0, 2)], 0)
    store.bring_up_to(1)
    assert store.covered([(ONE, 0, 2)], 0, 1) == 2


def test_a_sequence_that_left_a_shared_store_before_it_was_seen_there_takes_no_room() -> None:
    store = SharedStore(2)
    assert store.move_in_later(0, 10, 7, 2)
    store.move_out(7)
    store.bring_up_to(11)
    assert (store.used_bytes, store.move_in_later(0, 11, 8, 2)) == (0, True)


def test_what_another_machine_has_written_is_not_written_again_on_eviction() -> None:
    # A remote store takes what devices evict; the second machine evicts without having looked anything up since.
    contents = contents_of(np.arange(4), np.array([0, 4]), 4, np.array([16]), np.ones(1, np.int64), 4)
    spec = TierSpec(kind="remote", read_bytes_per_s=1e9, capacity_bytes=1000, write="eviction", store="all")
    shared, recorders = SharedStores(peers=False), (Recorder(), Recorder())
    first, second = (
        Tiers((spec,), (0, 4, 10), contents, recorder, shared, machine=number, number=number)
        for number, recorder in enumerate(recorders)
    )
    first.now_ns = 100
    first.evicted(0, 0, 2)
    second.now_ns = 200
    second.evicted(0, 0, 3)
    # Two blocks, and then the third alone.
    assert [recorder.transfers.array()["bytes"].tolist() for recorder in recorders] == [[20], [10]]


def first_blocks_first(blocks: CachedBlocks) -> Rank:
    return blocks.first_token


class BlockByBlock:
    """A store that has each block by itself: (entry, uses, last use, byte of arrival) by chain and place."""

    def __init__(self, capacity: int, rank: RankFunction) -> None:
        self.capacity, self.rank, self.now = capacity, rank, 0
        self.blocks: dict[tuple[int, int], tuple[int, int, int]] = {}

    def touch(self, pieces: list[tuple[Key, int, int]], *, uses: int, new: bool) -> None:
        for (_, chain), lo, hi in reversed(pieces):
            self.now += 1
            for block in range(lo, hi):
                if new or (chain, block) in self.blocks:
                    entered, before, _ = self.blocks.get((chain, block), (self.now, 1, 0))
                    self.blocks[chain, block] = entered, before + uses, self.now

    def shrink(self) -> set[tuple[int, int]]:
        gone: set[tuple[int, int]] = set()
        while len(self.blocks) > self.capacity:
            first = min(self.blocks, key=self.order)
            gone.add(first)
            del self.blocks[first]
        return gone

    def order(self, at: tuple[int, int]) -> tuple[Rank, int, int]:
        entered, uses, used = self.blocks[at]
        return self.rank(CachedBlocks(used, entered, uses, 4 * at[1])), used, -at[1]


POLICIES: dict[str, Callable[[CachedBlocks], Rank]] = {
    "lru": Lru().rank,
    "mru": Mru().rank,
    "lfu": Lfu().rank,
    "fifo": Fifo().rank,
    "retention": Retention(tokens=9).rank,
    "first blocks": first_blocks_first,
}


@pytest.mark.parametrize("name", [None, *POLICIES])
def test_a_store_evicts_what_a_store_of_single_blocks_would(name: str | None) -> None:
    rng, evicted = random.Random(name), 0
    for _ in range(40):
        capacity = rng.randrange(3, 20)
        store = Store(capacity, None if name is None else POLICIES[name])
        plain = BlockByBlock(capacity, POLICIES[name or "lru"])
        for now in range(30):
            # A prompt of two chains, the second from where the first ends on.
            fork, end = rng.randrange(1, 6), rng.randrange(6, 9)
            pieces = [(((0, 4, 1), 0), rng.randrange(fork), fork), (((0, 4, 1), rng.randrange(1, 4)), fork, end)]
            pieces = pieces[: rng.choice([1, 2, 2])]
            what = rng.choice(["put", "put", "load", "again"])
            if what == "put":
                gone = {(key[1], block) for key, lo, hi in store.put(pieces, now, now) for block in range(lo, hi)}
                plain.touch(pieces, uses=0, new=True)
                assert gone == plain.shrink()
                evicted += len(gone)
            else:
                store.use(pieces, LOADED if what == "load" else WRITTEN_AGAIN)
                plain.touch(pieces, uses=what == "load", new=False)
            here = {
                (chain, at)
                for chain in range(4)
                for at in range(9)
                if not store.missing([(((0, 4, 1), chain), at, at + 1)])
            }
            assert here == {*plain.blocks}
            assert store.fault() is None
    assert evicted > 500
