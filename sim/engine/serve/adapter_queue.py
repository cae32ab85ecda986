"""A queue whose requests ask for LoRA adapters."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from heapq import merge
from typing import Any

from policies.view import WaitingSeq

_LEAST_STALE = 64
"""Places that may be left over from requests that have gone before all are numbered anew."""


def _unheard() -> None:
    return


class AdapterQueue(deque[WaitingSeq]):
    """A queue that finds the requests of some adapters without looking at the others, and takes one out by its id.

    Each request has a place, a number that grows along the queue. Places stay in lists when a request goes, and are skipped.
    """

    def __init__(self, of: array[int]) -> None:
        super().__init__()
        self.of = of
        self.counts: dict[int, int] = {}
        """Requests by adapter; those without any are left out."""
        self._seqs: dict[int, tuple[int, WaitingSeq]] = {}
        """The place of each request, and the request, by id."""
        self._all: deque[tuple[int, int]] = deque()
        """(place, id), first to last."""
        self._by_adapter: dict[int, deque[tuple[int, int]]] = {}
        self._first = self._last = 0
        self.changing: Callable[[], None] = _unheard
        """Called before requests come or go."""

    # What has come and gone.

    def append(self, seq: WaitingSeq, /) -> None:
        self._last += 1
        self._all.append((self._last, seq.id))
        self._put(seq, self._last).append((self._last, seq.id))

    def appendleft(self, seq: WaitingSeq, /) -> None:
        self._first -= 1
        self._all.appendleft((self._first, seq.id))
        self._put(seq, self._first).appendleft((self._first, seq.id))

    def extend(self, seqs: Iterable[WaitingSeq], /) -> None:
        for seq in seqs:
            self.append(seq)

    def insert(self, place: int, seq: WaitingSeq, /) -> None:
        if place <= 0:
            self.appendleft(seq)
        elif place >= len(self):
            self.append(seq)
        else:
            seqs = list(self)
            self._anew([*seqs[:place], seq, *seqs[place:]])

    def popleft(self) -> WaitingSeq:
        return self.take(self[0].id)

    def remove(self, seq: WaitingSeq, /) -> None:
        self.take(seq.id)

    def take(self, id_: int) -> WaitingSeq:
        """Take a request out; KeyError where it is not here."""
        self.changing()
        _, seq = self._seqs.pop(id_)
        adapter = self.of[id_]
        n = self.counts.pop(adapter) - 1
        if n:
            self.counts[adapter] = n
        else:
            del self._by_adapter[adapter]
        if len(self._all) > 2 * len(self._seqs) + _LEAST_STALE:
            self._anew(list(self))
        return seq

    def clear(self) -> None:
        self._anew([])

    def _put(self, seq: WaitingSeq, place: int) -> deque[tuple[int, int]]:
        """The places of its adapter, after *seq* has got one."""
        self.changing()
        adapter = self.of[seq.id]
        self._seqs[seq.id] = (place, seq)
        self.counts[adapter] = self.counts.get(adapter, 0) + 1
        return self._by_adapter.setdefault(adapter, deque())

    def _anew(self, seqs: list[WaitingSeq]) -> None:
        """Have *seqs*, and no places left over."""
        self.changing()
        self._seqs.clear()
        self._all.clear()
        self._by_adapter.clear()
        self.counts.clear()
        self._first = self._last = 0
        self.extend(seqs)

    # What is there.

    def __len__(self) -> int:
        return len(self._seqs)

    def __bool__(self) -> bool:
        return bool(self._seqs)

    def __iter__(self) -> Iterator[WaitingSeq]:
        return self._those(self._all)

    def __reversed__(self) -> Iterator[WaitingSeq]:
        return self._those(reversed(self._all))

    def __getitem__(self, index: Any, /) -> WaitingSeq:
        if index == 0 and self._seqs:
            while not self._is_there(self._all[0]):
                self._all.popleft()
            return self._seqs[self._all[0][1]][1]
        return list(self)[index]

    def __setitem__(self, index: Any, seq: WaitingSeq, /) -> None:
        seqs = list(self)
        seqs[index] = seq
        self._anew(seqs)

    def index(self, seq: WaitingSeq, /, *within: int) -> int:
        return list(self).index(seq, *within)

    def among(self, adapters: Iterable[int], behind: int) -> Iterator[WaitingSeq]:
        """Requests for these *adapters*, first to last, of those behind the request *behind*; -1: of all."""
        after = self._seqs[behind][0] if behind >= 0 else self._first - 1
        each = [self._by_adapter[adapter] for adapter in adapters if adapter in self._by_adapter]
        for places in each:
            while not self._is_there(places[0]):
                places.popleft()
        return self._those(entry for entry in merge(*each) if entry[0] > after)

    def _is_there(self, entry: tuple[int, int]) -> bool:
        place, id_ = entry
        found = self._seqs.get(id_)
        return found is not None and found[0] == place

    def _those(self, entries: Iterable[tuple[int, int]]) -> Iterator[WaitingSeq]:
        for place, id_ in entries:
            found = self._seqs.get(id_)
            if found is not None and found[0] == place:
                yield found[1]
