"""Which requests of a workload are sent only when others have ended: turns of a conversation, steps of an agent."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from workloads.columns import IntArray, first_row, int_column


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Follows:
    """For each of n requests those that it waits for: i is sent when each of `rows[offsets[i]:offsets[i + 1]]` has ended and its
    delay is over; one that waits for none arrives by itself.

    Behind the requests there may be *joins*, n, n + 1, ...: points that are reached when all that they wait for have ended, so that
    many may wait for many (a stage of load for all of the stage before) in as many entries as there are requests.

    Raises ValueError for rows that do not exist, negative delays, and a request that waits for itself, through others or not.
    """

    offsets: IntArray
    """n + joins + 1 offsets into `rows` and `delay_ns`."""
    rows: IntArray
    """Requests and joins waited for."""
    delay_ns: IntArray
    """From the end of each until it no longer holds the request up: a tool's or a person's time."""
    joins: int = 0

    def __post_init__(self) -> None:
        for name in ("offsets", "rows", "delay_ns"):
            object.__setattr__(self, name, int_column(getattr(self, name), name))
        if isinstance(self.joins, bool) or not 0 <= self.joins < max(len(self.offsets), 1):
            raise ValueError(f"joins is the number of offsets at the end that are of no request; got {self.joins!r}")
        n, offsets, rows = len(self.offsets) - 1, self.offsets, self.rows
        if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(rows) or np.any(np.diff(offsets) < 0):
            raise ValueError(f"offsets are non-decreasing numbers from 0 to the {len(rows)} of rows; got {offsets!r}")
        if len(self.delay_ns) != len(rows):
            raise ValueError(f"delay_ns needs one value for each of the {len(rows)} rows; got {len(self.delay_ns)}")
        if (place := first_row(rows >= n)) is not None:
            raise ValueError(f"rows are requests from 0 to {n - 1}; got {rows[place]}")
        if (place := first_row(np.diff(offsets)[len(self) :] == 0)) is not None:
            raise ValueError(f"join {len(self) + place} waits for nobody; leave it out")
        if (rows >= self._waiting()).any():
            self._check_order()

    def __len__(self) -> int:
        return len(self.offsets) - 1 - self.joins

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Follows):
            return NotImplemented
        return self.joins == other.joins and all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in ("offsets", "rows", "delay_ns")
        )

    def __hash__(self) -> int:
        return hash((self.rows.tobytes(), self.delay_ns.tobytes()))

    @property
    def counts(self) -> IntArray:
        """The number of others that each request waits for."""
        return np.diff(self.offsets)[: len(self)]

    @property
    def all_counts(self) -> IntArray:
        """The same, and of each join behind them."""
        return np.diff(self.offsets)

    def followers(self) -> tuple[IntArray, IntArray, IntArray]:
        """The same the other way round: offsets by request or join waited for, who waits, and the delay."""
        order = np.argsort(self.rows, kind="stable")
        counts = np.bincount(self.rows, minlength=len(self) + self.joins)
        return np.concatenate(([0], np.cumsum(counts))), self._waiting()[order], self.delay_ns[order]

    def take(self, index: ArrayLike) -> Follows | None:
        """For the requests of the given rows; who waited for one left out no longer does. None where nobody waits."""
        index = np.asarray(index, dtype=np.int64)
        n = len(self)
        kept_joins = np.arange(n, n + self.joins)
        while True:
            chosen = np.concatenate((index, kept_joins))
            place = np.full(n + self.joins, -1, dtype=np.int64)
            place[chosen] = np.arange(len(chosen))
            counts = self.all_counts[chosen]
            first = np.repeat(self.offsets[:-1][chosen], counts)
            within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            rows, delay_ns = place[self.rows[first + within]], self.delay_ns[first + within]
            kept = rows >= 0
            remaining = np.bincount(np.repeat(np.arange(len(chosen)), counts)[kept], minlength=len(chosen))
            empty = remaining[len(index) :] == 0
            if not empty.any():
                break
            kept_joins = kept_joins[~empty]
        if not remaining[: len(index)].any():
            return None
        return Follows(
            offsets=np.concatenate(([0], np.cumsum(remaining))),
            rows=rows[kept],
            delay_ns=delay_ns[kept],
            joins=len(kept_joins),
        )

    def clients(self) -> Followers:
        """Those who hold requests back in one run."""
        return Followers(self)

    def _waiting(self) -> IntArray:
        return np.repeat(np.arange(len(self) + self.joins), self.all_counts)

    def _check_order(self) -> None:
        """Some order in which each comes after all that it waits for, or ValueError."""
        offsets, followers, _ = (column.tolist() for column in self.followers())
        left = self.all_counts.tolist()
        free = deque(row for row, count in enumerate(left) if count == 0)
        done = 0
        while free:
            row = free.popleft()
            done += 1
            for follower in followers[offsets[row] : offsets[row + 1]]:
                left[follower] -= 1
                if left[follower] == 0:
                    free.append(follower)
        if done < len(left):
            stuck = next(row for row, count in enumerate(left) if count)
            raise ValueError(
                f"row {stuck}: a request cannot wait for itself, nor for one that waits for it; mend whom it follows"
            )


class Followers:
    """Counts, for each request held back, the requests it waits for, and keeps its earliest instant."""

    starts_ns: Sequence[int] = ()
    __slots__ = ("_delay_ns", "_due_ns", "_left", "_n", "_offsets", "_rows")

    def __init__(self, follows: Follows) -> None:
        offsets, rows, delay_ns = follows.followers()
        self._offsets, self._rows, self._delay_ns = (_plain(column) for column in (offsets, rows, delay_ns))
        self._n = len(follows)
        self._left = _plain(follows.all_counts)
        self._due_ns = array("q", bytes(8 * len(self._left)))

    def start(self, _now_ns: int, /) -> Iterator[tuple[int, int]]:
        return iter(())

    def ended(self, id_: int, now_ns: int, /) -> Iterator[tuple[int, int]]:
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
