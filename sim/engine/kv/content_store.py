"""Blocks found by their content outside of a device: the store of a tier, and what a router has sent to a machine.

A store keeps *pieces*, consecutive blocks on one chain of contents (`sim.engine.kv.content`), and not every block by itself,
so that work grows with the forks of prompts. Unlike those of a device its blocks may lack others before them: what a device evicts
is the end of a prompt.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import ClassVar, Final

from policies.eviction import CachedBlocks, Rank, RankFunction
from sim.engine.kv.caching_pool import end_of_rank

Space = tuple[int, int, int]
"""A space in which contents compare: model, tokens and bytes of a block."""

Key = tuple[Space, int]
"""A chain of contents: its number, or -1 - id for a request's own."""

Piece = tuple[Key, int, int]
"""A chain, and which of its blocks, counted from the beginning of the prompt."""

LOADED: Final = -1
"""In place of *ready_ns*: blocks are loaded."""

WRITTEN_AGAIN: Final = -2
"""In place of *ready_ns*: blocks that are here are computed again, or found before they are looked up here."""


class _Kept:
    """Blocks *lo* to *hi* of a chain that were used together."""

    __slots__ = ("entered", "hi", "key", "lo", "ready_ns", "stamp", "uses")

    def __init__(self, key: Key, lo: int, hi: int, ready_ns: int, stamp: int, entered: int, uses: int) -> None:
        self.key = key
        self.lo = lo
        self.hi = hi
        self.ready_ns = ready_ns
        """The instant of their last byte; look-ups miss before."""
        self.stamp = stamp
        self.entered = entered
        """The stamp of their entry. This and what follows is kept for an eviction policy alone."""
        self.uses = uses
        """One for the entry, and one for each load."""

    def part(self, lo: int, hi: int) -> _Kept:
        return _Kept(self.key, lo, hi, self.ready_ns, self.stamp, self.entered, self.uses)


class ContentStore:
    """Blocks by content, evicted in the order of an eviction policy. Its methods are called in order of time."""

    first_block_first: ClassVar[bool] = False
    """Whether the first of blocks that were used together is evicted first, and not the last."""

    def __init__(self, capacity_bytes: int, eviction: RankFunction | None = None) -> None:
        """*eviction*: None for the least recently used first. Each block goes by its own rank, others behind it kept or not."""
        self.capacity_bytes = capacity_bytes
        self.eviction = eviction
        self.used_bytes: int = 0
        """Bytes of contents, and of whatever else takes room here."""
        self.evicted = 0
        """Evicted blocks."""
        self._kept: dict[Key, list[_Kept]] = {}
        self._oldest: list[tuple[Rank, int, int, int, _Kept]] = []
        """A heap in order of eviction, blocks that are gone included: (rank, stamp, order in it, number, blocks)."""
        self._n = self._stamp = 0

    def covered(self, pieces: Sequence[Piece], at: int, now_ns: int) -> int:
        """The block up to which consecutive *pieces* are here from block *at* on."""
        for key, _, hi in pieces:
            if hi <= at:
                continue
            for kept in self._kept.get(key, ()):
                if kept.lo > at or at >= hi:
                    break
                if kept.hi > at and kept.ready_ns <= now_ns:
                    at = min(kept.hi, hi)
            if at < hi:
                return at
        return at

    def missing(self, pieces: Sequence[Piece]) -> int:
        """Blocks of *pieces* that are not here, nor on their way."""
        found = 0
        for key, lo, hi in pieces:
            found += hi - lo
            for kept in self._kept.get(key, ()):
                found -= max(min(kept.hi, hi) - max(kept.lo, lo), 0)
        return found

    def use(self, pieces: Sequence[Piece], how: int = LOADED) -> None:
        """Marks blocks of *pieces* that are here as used now."""
        for key, lo, hi in reversed(pieces):
            self._renew(key, lo, hi, how, 0)

    def put(self, pieces: Sequence[Piece], now_ns: int, ready_ns: int) -> list[Piece]:
        """Keeps *pieces* from now on, to be found from *ready_ns* on; returns what they evict."""
        for key, lo, hi in pieces if self.first_block_first else reversed(pieces):
            self._renew(key, lo, hi, ready_ns, now_ns)
        return self._make_room()

    def _renew(self, key: Key, lo: int, hi: int, ready_ns: int, now_ns: int) -> None:
        """Marks blocks *lo* to *hi* of a chain as used last: those here, and (*ready_ns* of at least 0) all others."""
        self._stamp += 1
        stamp, at = self._stamp, lo
        rest: list[_Kept] = []
        mine: list[_Kept] = []
        for kept in self._kept.get(key, ()):
            if kept.hi <= lo or kept.lo >= hi:
                rest.append(kept)
                continue
            begin, end = max(kept.lo, lo), min(kept.hi, hi)
            if ready_ns >= 0 and at < begin:
                mine.append(self._new(key, at, begin, ready_ns, stamp))
            uses = kept.uses + (ready_ns == LOADED)
            mine.append(_Kept(key, begin, end, kept.ready_ns, stamp, kept.entered, uses))
            at = end
            if kept.hi > end:
                rest.append(self._rest(kept, end))
            kept.hi = begin
            if kept.lo < begin:
                rest.append(kept)
        if ready_ns >= 0 and at < hi:
            mine.append(self._new(key, at, hi, ready_ns, stamp))
        joined = _joined(mine, now_ns, apart=self.eviction is not None)
        if self.eviction is not None:
            joined = [part for kept in joined for part in self._of_one_rank(kept)]
        for kept in joined:
            self._enlist(kept)
        if rest or joined:
            self._kept[key] = sorted((*rest, *joined), key=lambda kept: kept.lo)

    def _new(self, key: Key, lo: int, hi: int, ready_ns: int, stamp: int) -> _Kept:
        self.used_bytes += (hi - lo) * key[0][2]
        return _Kept(key, lo, hi, ready_ns, stamp, stamp, 1)

    def _rest(self, kept: _Kept, at: int) -> _Kept:
        """The blocks of *kept* from *at* on, which go in the order that they had."""
        rest = kept.part(at, kept.hi)
        self._enlist(rest)
        return rest

    def _rank(self, kept: _Kept, block: int) -> Rank:
        if self.eviction is None:
            return kept.stamp
        return self.eviction(CachedBlocks(kept.stamp, kept.entered, kept.uses, block * kept.key[0][1]))

    def _of_one_rank(self, kept: _Kept) -> list[_Kept]:
        """*kept* in parts of which each has one rank."""
        parts: list[_Kept] = []
        at = kept.lo
        while at < kept.hi:
            end = end_of_rank(lambda block: self._rank(kept, block), at, kept.hi)
            parts.append(kept.part(at, end))
            at = end
        return parts

    def _enlist(self, kept: _Kept) -> None:
        self._n += 1
        order = kept.lo if self.first_block_first else -kept.lo
        heapq.heappush(self._oldest, (self._rank(kept, kept.lo), kept.stamp, order, self._n, kept))

    def _make_room(self) -> list[Piece]:
        gone: list[Piece] = []
        while self.used_bytes > self.capacity_bytes and self._oldest:
            self._evict(self.used_bytes - self.capacity_bytes, gone)
        return gone

    def _evict(self, n_bytes: int, gone: list[Piece]) -> None:
        """Evicts blocks of *n_bytes* or more, or all, of those that come first."""
        kept = self._oldest[0][4]
        if kept.hi <= kept.lo:
            heapq.heappop(self._oldest)
            return
        size = kept.key[0][2]
        blocks = min(-(-n_bytes // size), kept.hi - kept.lo)
        if self.first_block_first:
            kept.lo += blocks
            gone.append((kept.key, kept.lo - blocks, kept.lo))
        else:
            kept.hi -= blocks
            gone.append((kept.key, kept.hi, kept.hi + blocks))
        self.used_bytes -= blocks * size
        self.evicted += blocks
        if kept.hi == kept.lo:
            heapq.heappop(self._oldest)
            left = self._kept[kept.key]
            left.remove(kept)
            if not left:
                del self._kept[kept.key]

    def clear(self) -> None:
        """Drops all: the memory is gone."""
        self.used_bytes = 0
        self._kept.clear()
        self._oldest.clear()

    def drop(self, key: Key, lo: int, hi: int, ready_ns: int) -> None:
        """Drops blocks *lo* to *hi* of a chain that were to come at *ready_ns*."""
        left: list[_Kept] = []
        for kept in self._kept.get(key, ()):
            begin, end = max(kept.lo, lo), min(kept.hi, hi)
            if begin >= end or kept.ready_ns != ready_ns:
                left.append(kept)
                continue
            self.used_bytes -= (end - begin) * key[0][2]
            after = self._rest(kept, end) if kept.hi > end else None
            kept.hi = begin
            if kept.lo < begin:
                left.append(kept)
            if after is not None:
                left.append(after)
        if left:
            self._kept[key] = left
        else:
            self._kept.pop(key, None)

    def fault(self, beside: int = 0) -> str | None:
        """The first invariant that does not hold, or None; *beside*: bytes of what is no content."""
        used = beside
        for key, pieces in self._kept.items():
            at = 0
            for kept in pieces:
                if kept.lo < at or kept.hi <= kept.lo:
                    return f"blocks {kept.lo} to {kept.hi} of a chain are kept twice, or none are"
                at = kept.hi
                used += (kept.hi - kept.lo) * key[0][2]
        if used != self.used_bytes:
            return f"{used} bytes are kept and {self.used_bytes} are said to be"
        if used > self.capacity_bytes:
            return f"{used} bytes are kept in {self.capacity_bytes}"
        return None


def _joined(pieces: list[_Kept], now_ns: int, *, apart: bool) -> list[_Kept]:
    """*pieces* with consecutive ones as one, where both can be found from the same instant on; *apart*: and where they have one
    entry and as many uses."""
    joined: list[_Kept] = []
    for kept in pieces:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.hi == kept.lo
            and max(last.ready_ns, now_ns) == max(kept.ready_ns, now_ns)
            and not (apart and (last.entered, last.uses) != (kept.entered, kept.uses))
        ):
            last.hi = kept.hi
        else:
            joined.append(kept)
    return joined
