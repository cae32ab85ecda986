"""Eviction policies: what each lets go first."""

from __future__ import annotations

from math import inf

import pytest

from policies.eviction import Belady, CachedBlocks, Fifo, Lfu, Lru, Mru, RankFunction, Retention, foresees, rank_of

OLD = CachedBlocks(used=1, entered=5, uses=3, first_token=0, next_use=9)
NEW = CachedBlocks(used=2, entered=4, uses=2, first_token=64, next_use=7)


@pytest.mark.parametrize(
    ("rank", "first"),
    [
        (Lru().rank, OLD),
        (Mru().rank, NEW),
        (Lfu().rank, NEW),
        (Fifo().rank, NEW),
        (Retention(tokens=64).rank, NEW),
        (Retention(tokens=65).rank, OLD),
        (Retention(tokens=64, priority=10).rank, OLD),
        (Belady().rank, OLD),
    ],
)
def test_the_lowest_rank_goes_first(rank: RankFunction, first: CachedBlocks) -> None:
    assert min(OLD, NEW, key=rank) == first


def test_of_equals_the_least_recently_used_goes_first() -> None:
    for rank in (Lfu().rank, Belady().rank, Retention(tokens=1).rank):
        assert rank(OLD._replace(used=3)) > rank(OLD._replace(used=2))


def test_belady_alone_asks_for_the_next_use() -> None:
    assert [foresees(each) for each in (Belady(), Lru(), None)] == [True, False, False]


def test_a_function_ranks_as_well_as_a_class() -> None:
    assert rank_of(lambda blocks: blocks.uses)(OLD) == 3
    assert rank_of(Lfu())(OLD) == (3, 1)


def test_a_rank_is_tried_with_blocks_that_say_only_what_it_looks_at() -> None:
    assert CachedBlocks() == (0, 0, 1, 0, inf)
    assert Retention(tokens=1, priority=0, others=0).rank(CachedBlocks(used=3)) == (0, 3)


@pytest.mark.parametrize("settings", [{"tokens": 0}, {"tokens": 1, "priority": 101}, {"tokens": 1, "others": -1}])
def test_priorities_are_from_0_to_100_and_of_some_tokens(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{[*settings][-1]} is"):
        Retention(**settings)
