"""SimPy as the engine uses it: a clock of whole nanoseconds, one class of events, and the order within an instant.

Events of one instant have four ranks. Control acts first; then arrivals from outside are delivered, and after them messages from
other machines; then machines, in their order, end iterations and start the next, with all that this instant has brought. No
machine feels an event of another sooner than 1 ns later, so that their order matters to nothing but limits that links share.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop
from typing import Any, Final

import simpy

from sim.engine.time.alarm import Alarm

__all__ = ["ARRIVALS", "CONTROL", "HANDOVERS", "MACHINES", "Alarm", "Clock"]

CONTROL: Final = 1
ARRIVALS: Final = 2
HANDOVERS: Final = 3
MACHINES: Final = 4
"""Ranks; 0 is SimPy's own, for the end of the run."""


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

    def ring(self) -> Any:
        """A new entry of an alarm."""
        return _Ring(self)

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
