"""The base of pools whose blocks are found again by their content."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from math import ceil, inf
from typing import Any, Generic, Protocol, TypeVar

from policies.eviction import CachedBlocks, Rank, RankFunction
from sim.engine.kv.content import Contents
from sim.engine.kv.next_uses import NextUses
from sim.engine.kv.pool import WHOLE_PROMPTS, KvPool, Slots


class Blocks(Protocol):
    """Consecutive blocks that have the same holders, counted from the beginning of the prompts."""

    lo: int
    hi: int
    refs: int
    used: int
    entered: int
    uses: int
    used_ns: int
    """The instant of their latest use. This and what follows is kept for an eviction policy alone."""
    idle_s: float
    """The time since then when they were ranked again; 0: they have not been."""
    user: int
    """The request that used them last."""


class Held:
    """A sequence's part of the cache."""

    __slots__ = ("found", "order")

    def __init__(self, order: int, found: int) -> None:
        self.order = order
        """The number of its admission."""
        self.found = found
        """Blocks that were cached when it was admitted."""


H = TypeVar("H", bound=Held)


class CachingPool(KvPool, Generic[H]):
    """A pool whose free blocks are blank, or cached and held by no sequence."""

    __slots__ = (
        "_blank", "_contents", "_due", "_held", "_n_admitted", "classes", "drops_last", "eviction", "gives_up",
        "next_uses",
    )  # fmt: skip

    def __init__(self, total: int, block_tokens: int, contents: Contents, slots: Slots = WHOLE_PROMPTS) -> None:
        super().__init__(total, block_tokens, slots)
        self.caches = True
        self.drops_last = False
        """Whether the last block found is computed again, for a drafter that needs the target's states there."""
        self.eviction: RankFunction | None = None
        """Which cached blocks go first; None: the least recently used."""
        self.next_uses: NextUses | None = None
        """For an eviction policy that foresees."""
        self.classes: Sequence[str] = ()
        """The name of each request's class of service; empty: there are none."""
        self._due: list[tuple[int, int, int, Any]] = []
        """A heap of what is to be ranked again: (instant, number of its ranking, of its use, blocks)."""
        self.gives_up: Callable[[int, int, int], None] | None = None
        """Called on eviction: the chain's number (-1 - id: a request's own), the first block, and the one after the last."""
        self._contents = contents
        self._blank = total
        """Free blocks without content: the first to be taken."""
        self._held: dict[int, H] = {}
        self._n_admitted = 0

    @abstractmethod
    def _parts(self, id_: int) -> Iterable[Blocks]:
        """The cached blocks of an admitted request."""

    @abstractmethod
    def _all(self) -> Iterable[Blocks]:
        """All blocks that can be found."""

    def found(self, id_: int) -> int:
        """Blocks that a request found when it was admitted."""
        return self._held[id_].found

    def order(self, id_: int) -> int:
        """The number of its admission."""
        return self._held[id_].order

    def give(self, blocks: int) -> None:
        """Frees blocks without content."""
        self.free += blocks
        self._blank += blocks

    def shared_blocks(self, id_: int) -> int:
        """Blocks of a request that other sequences hold too."""
        shared = 0
        if id_ in self._held:
            for part in self._parts(id_):
                if part.refs > 1:
                    shared += part.hi - part.lo
        return shared

    def freed_by(self, id_: int, gone: dict[object, int]) -> int:
        """Cached blocks that preempting a request after others frees; *gone* counts the holds given up, by part."""
        freed = 0
        for part in self._parts(id_):
            before = gone[part] = gone.get(part, 0) + 1
            freed += part.hi - part.lo if before == part.refs else 0
        return freed

    @property
    def held_again(self) -> int:
        return sum((part.hi - part.lo) * (part.refs - 1) for part in self._all() if part.refs > 1)

    def _holders(self) -> dict[Blocks, int]:
        """The number of sequences that hold each part."""
        holders: dict[Blocks, int] = {}
        for id_ in self._held:
            for part in self._parts(id_):
                holders[part] = holders.get(part, 0) + 1
        return holders

    def _rank(self, part: Blocks, block: int, next_use: float) -> Rank:
        """The rank of a block of *part*."""
        assert self.eviction is not None
        return self.eviction(self._described(part, block, next_use))

    def _described(self, part: Blocks, block: int, next_use: float) -> CachedBlocks:
        name = self.classes[part.user] if self.classes and part.user >= 0 else ""
        first_token = block * self.block_tokens
        return CachedBlocks(part.used, part.entered, part.uses, first_token, next_use, part.idle_s, name)

    def _end_of_rank(self, part: Blocks, upto: int, next_use: float) -> int:
        """The block of *part* up to which all have the rank of its first, for as long; *upto* at most."""
        lasts_s = self.lasts_s
        if lasts_s is None:
            return end_of_rank(lambda block: self._rank(part, block, next_use), part.lo, upto)
        return end_of_rank(
            lambda block: (self._rank(part, block, next_use), lasts_s(self._described(part, block, next_use))),
            part.lo,
            upto,
        )

    def _note_when_due(self, part: Blocks, number: int, next_use: float) -> None:
        """Notes when *part*, which has been ranked, is to be ranked again."""
        if self.lasts_s is None or part.idle_s:
            return
        lasts_s = self.lasts_s(self._described(part, part.lo, next_use))
        if lasts_s < inf:
            heappush(self._due, (part.used_ns + ceil(lasts_s * 1e9), number, part.used, part))

    def _idle(self, part: Blocks) -> None:
        """*part* is to be ranked again: for its policy it has not been used for as long as its rank held."""
        assert self.lasts_s is not None
        lasts_s = self.lasts_s(self._described(part, part.lo, inf))
        part.idle_s = max((self.now_ns() - part.used_ns) / 1e9, lasts_s)

    def rank_again(self) -> None:
        """Ranks blocks again whose ranks hold no longer: they count as used now."""
        while self._due and self._due[0][0] <= self.now_ns():
            self._rank_again(*heappop(self._due)[1:])

    @abstractmethod
    def _rank_again(self, number: int, used: int, part: Any) -> None:
        """Ranks blocks again, unless they have gone, or been used, since their ranking of that *number*."""


def end_of_rank(rank: Callable[[int], Any], first: int, upto: int) -> int:
    """The block up to which all have the rank of block *first*, *upto* at most."""
    of_first = rank(first)
    if rank(upto - 1) == of_first:
        return upto
    return bisect_left(range(upto), True, first, key=lambda block: rank(block) != of_first)
