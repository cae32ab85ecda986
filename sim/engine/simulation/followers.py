"""Requests that are held back until others have ended."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np

from workloads import Follows


class Followers:
    """Counts, for each request held back, the requests it waits for, and keeps its earliest instant."""

    __slots__ = ("_delay_ns", "_due_ns", "_left", "_n", "_offsets", "_rows")

    def __init__(self, follows: Follows) -> None:
        offsets, rows, delay_ns = follows.followers()
        self._offsets, self._rows, self._delay_ns = (_plain(column) for column in (offsets, rows, delay_ns))
        self._n = len(follows)
        self._left = _plain(follows.all_counts)
        self._due_ns = array("q", bytes(8 * len(self._left)))

    def ended(self, id_: int, now_ns: int) -> Iterator[tuple[int, int]]:
        """Requests that waited for *id_* last of all, and when each is sent."""
        for place in range(self._offsets[id_], self._offsets[id_ + 1]):
            row = self._rows[place]
            self._left[row] -= 1
            self._due_ns[row] = max(self._due_ns[row], now_ns + self._delay_ns[place])
            if self._left[row] == 0:
                if row < self._n:
                    yield row, self._due_ns[row]
                else:
                    # A join: requests that wait for it wait for no request.
                    yield from self.ended(row, self._due_ns[row])


def _plain(column: np.ndarray) -> array[int]:
    return array("q", np.ascontiguousarray(column, np.int64).tobytes())
