"""KV blocks outside the device: a tier's blocks by content, the least recently used evicted first.

A store keeps *pieces*, consecutive blocks on one chain of contents (`sim.engine.kv.content`), and not every block by itself,
so that work grows with the forks of prompts. Unlike those of a device its blocks may lack others before them: what a device evicts
is the end of a prompt.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

Space = tuple[int, int, int]
"""A space in which contents compare: model, tokens and bytes of a block."""

Key = tuple[Space, int]
"""A chain of contents: its number, or -1 - id for a request's own."""

Piece = tuple[Key, int, int]
"""A chain, and which of its blocks, counted from the beginning of the prompt."""


_MOVED: Final = -2
"""Changes of a shared store have, in place of *ready_ns*, this less an id: it is moved here; -1: contents are used."""


class _Kept:
    """Blocks *lo* to *hi* of a chain that were used together."""

    __slots__ = ("hi", "key", "lo", "ready_ns", "stamp")

    def __init__(self, key: Key, lo: int, hi: int, ready_ns: int, stamp: int) -> None:
        self.key = key
        self.lo = lo
        self.hi = hi
        self.ready_ns = ready_ns
        """The instant of their last byte; look-ups miss before."""
        self.stamp = stamp


class Store:
    """Blocks of a tier. Its methods are called in order of time."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        """Bytes of contents, and of sequences moved here."""
        self.evicted = 0
        """Evicted blocks."""
        self._kept: dict[Key, list[_Kept]] = {}
        self._oldest: list[tuple[int, int, int, _Kept]] = []
        """A heap in order of eviction, stale entries included: (stamp, -lo, number, blocks)."""
        self._n = self._stamp = 0
        self._moved: dict[int, int] = {}

    # Contents.

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

    def use(self, pieces: Sequence[Piece]) -> None:
        """Marks blocks of *pieces* that are here as used now; the last of those used together is evicted first."""
        for key, lo, hi in reversed(pieces):
            self._renew(key, lo, hi, -1, 0)

    def put(self, pieces: Sequence[Piece], now_ns: int, ready_ns: int) -> list[Piece]:
        """Keeps *pieces* from now on, to be found from *ready_ns* on; returns what they evict."""
        for key, lo, hi in reversed(pieces):
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
            mine.append(_Kept(key, begin, end, kept.ready_ns, stamp))
            at = end
            if kept.hi > end:
                after = _Kept(key, end, kept.hi, kept.ready_ns, kept.stamp)
                self._enlist(after)
                rest.append(after)
            kept.hi = begin
            if kept.lo < begin:
                rest.append(kept)
        if ready_ns >= 0 and at < hi:
            mine.append(self._new(key, at, hi, ready_ns, stamp))
        joined = _joined(mine, now_ns)
        for kept in joined:
            self._enlist(kept)
        if rest or joined:
            self._kept[key] = sorted((*rest, *joined), key=lambda kept: kept.lo)

    def _new(self, key: Key, lo: int, hi: int, ready_ns: int, stamp: int) -> _Kept:
        self.used_bytes += (hi - lo) * key[0][2]
        return _Kept(key, lo, hi, ready_ns, stamp)

    def _enlist(self, kept: _Kept) -> None:
        self._n += 1
        heapq.heappush(self._oldest, (kept.stamp, -kept.lo, self._n, kept))

    def _make_room(self) -> list[Piece]:
        gone: list[Piece] = []
        while self.used_bytes > self.capacity_bytes and self._oldest:
            stamp, _, _, kept = self._oldest[0]
            if kept.stamp != stamp or kept.hi <= kept.lo:
                heapq.heappop(self._oldest)
                continue
            size = kept.key[0][2]
            blocks = min(-(-(self.used_bytes - self.capacity_bytes) // size), kept.hi - kept.lo)
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
        return gone

    def clear(self) -> None:
        """Drops all: the memory is gone."""
        self.used_bytes = 0
        self._kept.clear()
        self._oldest.clear()
        self._moved.clear()

    def _drop(self, key: Key, lo: int, hi: int, ready_ns: int) -> None:
        """Drops blocks *lo* to *hi* of a chain that were to come at *ready_ns*."""
        left: list[_Kept] = []
        for kept in self._kept.get(key, ()):
            begin, end = max(kept.lo, lo), min(kept.hi, hi)
            if begin >= end or kept.ready_ns != ready_ns:
                left.append(kept)
                continue
            self.used_bytes -= (end - begin) * key[0][2]
            if kept.hi > end:
                after = _Kept(key, end, kept.hi, kept.ready_ns, kept.stamp)
                self._enlist(after)
            else:
                after = None
            kept.hi = begin
            if kept.lo < begin:
                left.append(kept)
            if after is not None:
                left.append(after)
        if left:
            self._kept[key] = left
        else:
            self._kept.pop(key, None)

    # Sequences that were moved here.

    def move_in(self, id_: int, n_bytes: int) -> list[Piece] | None:
        """Makes room for a sequence, unshared; returns the pieces evicted. None, and nothing changes, where others that
        were moved here leave none."""
        if sum(self._moved.values()) + n_bytes > self.capacity_bytes:
            return None
        self._moved[id_] = n_bytes
        self.used_bytes += n_bytes
        return self._make_room()

    def move_out(self, id_: int) -> None:
        """Removes a sequence that was moved here, if it is here."""
        self.used_bytes -= self._moved.pop(id_, 0)

    def fault(self) -> str | None:
        """The first invariant that does not hold, or None. For `sim.engine.simulation.invariants`."""
        used = sum(self._moved.values())
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


def _joined(pieces: list[_Kept], now_ns: int) -> list[_Kept]:
    """*pieces* with consecutive ones as one, where both can be found from the same instant on."""
    joined: list[_Kept] = []
    for kept in pieces:
        last = joined[-1] if joined else None
        if last is not None and last.hi == kept.lo and max(last.ready_ns, now_ns) == max(kept.ready_ns, now_ns):
            last.hi = kept.hi
        else:
            joined.append(kept)
    return joined


class SharedStore(Store):
    """A store that several machines read: changes by one are seen by all one nanosecond later, in the order of machines."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self._coming: list[tuple[int, int, int, tuple[Piece, ...], int]] = []
        self._told = 0
        self._writes: dict[int, deque[tuple[int, tuple[Piece, ...]]]] = {}
        """Writes by machine: the instant of the last byte, and the pieces."""
        self._given: dict[int, int] = {}
        """Bytes of sequences that have been given room here, which they take a nanosecond later."""
        self.passes_on: Callable[[list[Piece], int], None] | None = None
        """Called with evicted pieces and the instant; set by the owning machine."""

    def later(self, machine: int, now_ns: int, pieces: Sequence[Piece], ready_ns: int) -> None:
        """Uses (*ready_ns* -1) or keeps *pieces* from the next nanosecond on, to be found from *ready_ns* on."""
        self._told += 1
        heapq.heappush(self._coming, (now_ns + 1, machine, self._told, tuple(pieces), ready_ns))
        if ready_ns >= 0:
            mine = self._writes.setdefault(machine, deque())
            while mine and mine[0][0] <= now_ns:
                mine.popleft()
            mine.append((ready_ns, tuple(pieces)))

    def move_in_later(self, machine: int, now_ns: int, id_: int, n_bytes: int) -> bool:
        """`move_in` from the next nanosecond on; returns whether others moved here leave room."""
        if sum(self._given.values()) + n_bytes > self.capacity_bytes:
            return False
        self._given[id_] = n_bytes
        self._told += 1
        heapq.heappush(self._coming, (now_ns + 1, machine, self._told, (), _MOVED - id_))
        return True

    def move_out(self, id_: int) -> None:
        self._given.pop(id_, None)
        super().move_out(id_)

    def bring_up_to(self, now_ns: int) -> None:
        """Makes changes before *now_ns* seen."""
        while self._coming and self._coming[0][0] <= now_ns:
            at_ns, _, _, pieces, ready_ns = heapq.heappop(self._coming)
            gone: list[Piece] | None = None
            if ready_ns >= 0:
                gone = self.put(pieces, at_ns, max(ready_ns, at_ns))
            elif ready_ns > _MOVED:
                self.use(pieces)
            elif (id_ := _MOVED - ready_ns) in self._given and id_ not in self._moved:
                gone = self.move_in(id_, self._given[id_])
            if gone and self.passes_on is not None:
                self.passes_on(gone, at_ns)

    def clear(self) -> None:
        super().clear()
        self._given.clear()
        self._coming.clear()
        self._writes.clear()

    def writer_gone(self, machine: int, now_ns: int) -> None:
        """Drops what *machine* was writing and had not come when it stopped."""
        self.bring_up_to(now_ns)
        self._coming = [each for each in self._coming if each[1] != machine or each[4] < 0]
        heapq.heapify(self._coming)
        for ready_ns, pieces in self._writes.pop(machine, ()):
            if ready_ns > now_ns:
                for key, lo, hi in pieces:
                    self._drop(key, lo, hi, ready_ns)
