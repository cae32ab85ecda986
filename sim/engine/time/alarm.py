"""Alarms: what machines, arrivals and control set the clock for. See `sim.engine.time.events`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappush
from typing import Any, Final, Protocol

_NOBODY: Final[list[Any]] = []


class Rings(Protocol):
    """The clock, as an alarm uses it."""

    def entries(self) -> tuple[list[Any], Iterator[int]]: ...

    def ring(self) -> Any: ...


class Alarm:
    """Calls *callback* (with SimPy's event) once, at the instant that it was last set to; may be set again before or after that."""

    __slots__ = ("_at_ns", "_callbacks", "_clock", "_ids", "_order", "_queue", "_rank", "_ring")

    def __init__(self, clock: Rings, rank: int, callback: Callable[[Any], None], *, order: int = 0) -> None:
        """*order*: alarms of one instant and rank ring in this order, and those of the same in the order in which they were set."""
        self._clock = clock
        self._order = order << 48
        self._queue, self._ids = clock.entries()
        self._rank = rank
        self._callbacks = [callback]
        self._ring = clock.ring()
        self._at_ns = 0

    def set(self, at_ns: int) -> None:
        """Ring at *at_ns*, now or later, and not at any time set before."""
        ring = self._ring
        if ring.callbacks is not None:
            if at_ns == self._at_ns:
                return
            ring.callbacks = _NOBODY
            ring = self._ring = self._clock.ring()
        ring.callbacks = self._callbacks
        self._at_ns = at_ns
        # As `Environment.schedule`, for an instant in place of a delay.
        heappush(self._queue, (at_ns, self._rank, self._order + next(self._ids), ring))

    def cancel(self) -> None:
        """Do not ring."""
        if self._ring.callbacks is not None:
            self._ring.callbacks = _NOBODY
            self._ring = self._clock.ring()
