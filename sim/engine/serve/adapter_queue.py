"""A queue whose requests ask for LoRA adapters."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable

from policies.view import WaitingSeq


class AdapterQueue(deque[WaitingSeq]):
    """A queue that counts its requests by adapter."""

    def __init__(self, of: array[int]) -> None:
        super().__init__()
        self.of = of
        self.counts: dict[int, int] = {}
        """Requests by adapter; those without any are left out."""

    def _came(self, seq: WaitingSeq) -> None:
        adapter = self.of[seq.id]
        self.counts[adapter] = self.counts.get(adapter, 0) + 1

    def _left(self, seq: WaitingSeq) -> None:
        adapter = self.of[seq.id]
        n = self.counts.pop(adapter) - 1
        if n:
            self.counts[adapter] = n

    def append(self, seq: WaitingSeq, /) -> None:
        self._came(seq)
        super().append(seq)

    def appendleft(self, seq: WaitingSeq, /) -> None:
        self._came(seq)
        super().appendleft(seq)

    def extend(self, seqs: Iterable[WaitingSeq], /) -> None:
        for seq in seqs:
            self.append(seq)

    def insert(self, place: int, seq: WaitingSeq, /) -> None:
        self._came(seq)
        super().insert(place, seq)

    def popleft(self) -> WaitingSeq:
        seq = super().popleft()
        self._left(seq)
        return seq

    def remove(self, seq: WaitingSeq, /) -> None:
        super().remove(seq)
        self._left(seq)

    def clear(self) -> None:
        super().clear()
        self.counts.clear()
