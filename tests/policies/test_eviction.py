"""Eviction policies: what each lets go first."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from policies.eviction import (
    Belady,
    CachedBlocks,
    Fifo,
    Filo,
    Lfu,
    Lru,
    Mru,
    RankFunction,
    Retention,
    Slru,
    asks_for_more,
    foresees,
    lasts,
    rank_of,
)

OLD = CachedBlocks(used=1, entered=5, uses=3, first_token=0, next_use=9)
NEW = CachedBlocks(used=2, entered=4, uses=2, first_token=64, next_use=7)


@pytest.mark.parametrize(
    ("rank", "first"),
    [
        (Lru().rank, OLD),
        (Mru().rank, NEW),
        (Lfu().rank, NEW),
        (Fifo().rank, NEW),
        (Filo().rank, OLD),
        (Slru().rank, OLD),
        (Slru(protected_from=3).rank, NEW),
        (Slru(protected_from=4).rank, OLD),
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
    assert CachedBlocks() == (0, 0, 1, 0, inf, 0.0, "")
    assert Retention(tokens=1, priority=0, others=0).rank(CachedBlocks(used=3)) == (0, 3)


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("tokens", {"tokens": 0}),
        ("priority", {"priority": 101}),
        ("others", {"others": -1}),
        ("duration_s", {"duration_s": 0.0}),
        ("duration_s", {"duration_s": inf}),
        ("classes.chat", {"classes": {"chat": 101}}),
    ],
)
def test_priorities_are_from_0_to_100_and_of_some_tokens_for_some_time(key: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{key} is"):
        Retention(**{"tokens": 1, **settings})


def test_a_retained_beginning_has_the_priority_of_the_others_when_its_time_is_over() -> None:
    policy = Retention(tokens=64, duration_s=2.5)
    lasts_s = lasts(policy)
    assert lasts_s is not None
    assert [lasts_s(blocks) for blocks in (OLD, NEW)] == [2.5, inf]
    assert policy.rank(OLD) > policy.rank(NEW)
    assert policy.rank(OLD._replace(idle_s=2.4)) > policy.rank(NEW)
    assert policy.rank(OLD._replace(idle_s=2.5)) < policy.rank(NEW)


def test_a_class_of_service_has_a_priority_of_its_own() -> None:
    rank = Retention(tokens=64, priority=50, classes={"chat": 90, "batch": 10}).rank
    batch, none, chat = (OLD._replace(service_class=name) for name in ("batch", "", "chat"))
    assert rank(batch) < rank(NEW) < rank(none) < rank(chat)


def test_what_asks_for_time_and_classes_asks_for_more_than_a_tier_knows() -> None:
    own = [Retention(tokens=1, duration_s=1.0), Retention(tokens=1, classes={"chat": 90}), Belady()]
    assert [asks_for_more(each) for each in (*own, Retention(tokens=1), Lru(), None)] == [True] * 3 + [False] * 3
    assert lasts(Lru()) is lasts(None) is None
