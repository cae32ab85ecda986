"""KV blocks outside the device: the memory of a tier, of one machine's or of several."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from policies.eviction import RankFunction
from sim.engine.kv.content_store import ContentStore, Piece

_MOVED: Final = -3
"""Changes of a shared store have, in place of *ready_ns*, this less an id: it is moved here; above it: how contents are used."""


class Store(ContentStore):
    """Blocks of a tier, and sequences that were moved there."""

    def __init__(self, capacity_bytes: int, eviction: RankFunction | None = None) -> None:
        super().__init__(capacity_bytes, eviction)
        self._moved: dict[int, int] = {}

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

    def clear(self) -> None:
        """Drops all: the memory is gone."""
        super().clear()
        self._moved.clear()

    def fault(self, beside: int = 0) -> str | None:
        return super().fault(beside + sum(self._moved.values()))


class SharedStore(Store):
    """A store that several machines read: changes by one are seen by all one nanosecond later, in the order of machines."""

    def __init__(self, capacity_bytes: int, eviction: RankFunction | None = None) -> None:
        super().__init__(capacity_bytes, eviction)
        self._coming: list[tuple[int, int, int, tuple[Piece, ...], int]] = []
        self._told = 0
        self._writes: dict[int, deque[tuple[int, tuple[Piece, ...]]]] = {}
        """Writes by machine: the instant of the last byte, and the pieces."""
        self._given: dict[int, int] = {}
        """Bytes of sequences that have been given room here, which they take a nanosecond later."""
        self.passes_on: Callable[[list[Piece], int], None] | None = None
        """Called with evicted pieces and the instant; set by the owning machine."""

    def later(self, machine: int, now_ns: int, pieces: Sequence[Piece], ready_ns: int) -> None:
        """Uses (*ready_ns* below 0 says how) or keeps *pieces* from the next nanosecond on, to be found from *ready_ns* on."""
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
                self.use(pieces, ready_ns)
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
                    self.drop(key, lo, hi, ready_ns)
