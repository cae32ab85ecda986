"""Clients that each send their next request when the last one ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from workloads.columns import NS_PER_S, IntArray, int_column
from workloads.streams import Stream, check_count, check_from_zero, stream
from workloads.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class ClosedLoop(Workload):
    """Clients that each send their next request when the last one ends.

    At time 0, or at its own `start_ns`, each of `concurrency` clients sends one; the request of row i is the i-th to be
    sent by anyone. A client sends its next `think_ns[i]` after the end of its last, i being the row then sent (0: at once).
    """

    LEAST: ClassVar = {**Workload.LEAST, "think_ns": 0, "due_ns": 0}

    concurrency: int
    think_ns: IntArray | None = None
    due_ns: IntArray | None = None
    """Instants before which requests are not sent; None: a client that is free waits for none."""
    start_ns: IntArray | None = None
    """The time at which each client sends its first request; None: all of them at time 0."""

    def __post_init__(self) -> None:
        check_count(self.concurrency, "concurrency")
        if self.start_ns is not None:
            starts = int_column(self.start_ns, "start_ns", minimum=0)
            if len(starts) != self.concurrency:
                raise ValueError(f"start_ns needs one value a client ({self.concurrency}); got {len(starts)}")
            object.__setattr__(self, "start_ns", starts)
        Workload.__post_init__(self)

    @property
    def planned_ns(self) -> IntArray | None:
        return self.due_ns

    def clients(self) -> _Loop:
        return _Loop(self)


class _Loop:
    """The clients of one run: each that is free takes the next request of the workload."""

    def __init__(self, loop: ClosedLoop) -> None:
        self._n, self._next = len(loop), 0
        self._think_ns = None if loop.think_ns is None else loop.think_ns.tolist()
        self._due_ns = None if loop.due_ns is None else loop.due_ns.tolist()
        all_at_once = [0] * min(loop.concurrency, self._n)
        self.starts_ns: Sequence[int] = all_at_once if loop.start_ns is None else loop.start_ns.tolist()

    def start(self, now_ns: int, /) -> Iterator[tuple[int, int]]:
        # A client that starts late may find that others have sent all requests.
        row = self._next
        if row < self._n:
            self._next = row + 1
            yield row, now_ns if self._due_ns is None else max(now_ns, self._due_ns[row])

    def ended(self, _row: int, now_ns: int, /) -> Iterator[tuple[int, int]]:
        thinks_ns = 0 if self._think_ns is None or self._next >= self._n else self._think_ns[self._next]
        return self.start(now_ns + thinks_ns)


def think_times_ns(n_requests: int, mean_think_s: float, seed: int) -> IntArray | None:
    """Exponential think times before each of *n_requests*; None where clients take none."""
    check_from_zero(mean_think_s, "mean_think_s")
    if not mean_think_s:
        return None
    think_s = stream(seed, Stream.THINK_TIMES).standard_exponential(n_requests) * mean_think_s
    return np.rint(think_s * NS_PER_S).astype(np.int64)
