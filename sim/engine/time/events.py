"""SimPy as the engine uses it: a clock of whole nanoseconds, one class of events, and the order within an instant.

Events of one instant have four ranks. Control acts first; then arrivals from outside are delivered, and after them messages from
other machines; then machines, in their order, end iterations and start the next, with all that this instant has brought. No
machine feels an event of another sooner than 1 ns later, so that their order matters to nothing but limits that links share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import Any, Final

import simpy

CONTROL: Final = 1
ARRIVALS: Final = 2
HANDOVERS: Final = 3
MACHINES: Final = 4
"""Ranks; 0 is SimPy's own, for the end of the run."""

_NOBODY: list[Any] = []


class Clock(simpy.Environment):
    """A SimPy environment whose time is a whole number of nanoseconds."""

    def __init__(self) -> None:
        super().__init__(initial_time=0)
        self.short_cuts = True
        """Whether `runs_free_to` may be answered by yes."""
        self._until_ns: float = float("inf")

    @property
    def now_ns(self) -> int:
        return self._now  # type: ignore[return-value]

    def entries(self) -> tuple[list[Any], Iterator[int]]:
        """SimPy's queue, to which callers add without the detour through an event of its own, and the numbers of its entries."""
        return self._queue, self._eid

    def next_due(self) -> tuple[int, int] | None:
        """Instant and rank of the next event; None where there is none."""
        return self._queue[0][:2] if self._queue else None  # type: ignore[return-value]

    def expects(self, rank: int) -> bool:
        """Whether anything is due of a rank beyond *rank*."""
        # SimPy leaves open what its callbacks take.
        later: list[Any] = [entry[3].callbacks for entry in self._queue if entry[1] > rank]  # pyright: ignore[reportUnknownMemberType]
        return any(later)

    def runs_free_to(self, at_ns: int) -> bool:
        """Move on to *at_ns* at once if nothing else is due until then, that instant included; return whether it did.

        A caller in its turn would otherwise set an alarm for *at_ns* only to be called back as the next event.
        """
        queue = self._queue
        if (queue and queue[0][0] <= at_ns) or at_ns >= self._until_ns or not self.short_cuts:
            return False
        self._now = at_ns
        return True

    def run(self, until: Any = None) -> Any:
        """As SimPy's, for an instant: what is due before it happens, and it is then the present. With None, all that is due.

        A loop of its own: SimPy's checks whether every event has failed, which alarms do not, and takes twice the time.
        """
        if until is not None and not isinstance(until, int):
            return super().run(until)
        queue: list[Any] = self._queue
        self._until_ns = end_ns = float("inf") if until is None else until
        while queue and queue[0][0] < end_ns:
            self._now, _, _, event = heappop(queue)
            callbacks, event.callbacks = event.callbacks, None
            for callback in callbacks:
                callback(event)
        if until is not None:
            self._now = until
        self._until_ns = float("inf")
        return None


class _Ring(simpy.Event):
    """The entry of an alarm in SimPy's queue. It fires like any event, without effect once its alarm was set anew."""

    _value = None
    _ok = True
    _defused = False

    def __init__(self, env: Clock) -> None:
        self.env = env
        self.callbacks: Any = None  # as of an event that has been processed: free to be scheduled


class Alarm:
    """Calls *callback* (with SimPy's event) once, at the instant that it was last set to; may be set again before or after that."""

    __slots__ = ("_at_ns", "_callbacks", "_clock", "_ids", "_order", "_queue", "_rank", "_ring")

    def __init__(self, clock: Clock, rank: int, callback: Callable[[Any], None], *, order: int = 0) -> None:
        """*order*: alarms of one instant and rank ring in this order, and those of the same in the order in which they were set."""
        self._clock = clock
        self._order = order << 48
        self._queue, self._ids = clock.entries()
        self._rank = rank
        self._callbacks = [callback]
        self._ring = _Ring(clock)
        self._at_ns = 0

    def set(self, at_ns: int) -> None:
        """Ring at *at_ns*, now or later, and not at any time set before."""
        ring = self._ring
        if ring.callbacks is not None:
            if at_ns == self._at_ns:
                return
            ring.callbacks = _NOBODY
            ring = self._ring = _Ring(self._clock)
        ring.callbacks = self._callbacks
        self._at_ns = at_ns
        # As `Environment.schedule`, for an instant in place of a delay.
        heappush(self._queue, (at_ns, self._rank, self._order + next(self._ids), ring))

    def cancel(self) -> None:
        """Do not ring."""
        if self._ring.callbacks is not None:
            self._ring.callbacks = _NOBODY
            self._ring = _Ring(self._clock)
