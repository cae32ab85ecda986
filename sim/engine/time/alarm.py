"""Alarms: what machines, arrivals and control set the clock for. See `sim.engine.time.events`."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any, Protocol


class Agenda:
    """The present and SimPy's queue: the part of a clock that is used at every step.

    It is apart from the clock, whose class is SimPy's, so that it is compiled.
    """

    __slots__ = ("ids", "now_ns", "queue", "short_cuts", "until_ns")

    def __init__(self) -> None:
        self.now_ns = 0
        self.queue: list[Any] = []
        """A heap of (instant in ns, rank, order, event)."""
        self.ids = count()
        """The numbers of its entries."""
        self.short_cuts = True
        """Whether `runs_free_to` may be answered by yes."""
        self.until_ns = -1
        """The end of the present call of `run`; -1: it has none."""

    def runs_free_to(self, at_ns: int) -> bool:
        """Move on to *at_ns* at once if nothing else is due until then, that instant included; return whether it did.

        A caller in its turn would otherwise set an alarm for *at_ns* only to be called back as the next event.
        """
        queue = self.queue
        if (queue and queue[0][0] <= at_ns) or 0 <= self.until_ns <= at_ns or not self.short_cuts:
            return False
        self.now_ns = at_ns
        return True

    def run(self, until_ns: int) -> None:
        """Let happen what is due before *until_ns*; -1: all that is due.

        A loop of its own: SimPy's checks whether every event has failed, which alarms do not, and takes twice the time.
        """
        queue = self.queue
        self.until_ns = until_ns
        while queue and (until_ns < 0 or queue[0][0] < until_ns):
            self.now_ns, _, order, event = heappop(queue)
            if isinstance(event, Alarm):
                event.ring(order)
            else:
                _process(event)
        self.until_ns = -1

    def step(self) -> None:
        """Let the next event happen."""
        self.now_ns, _, order, event = heappop(self.queue)
        if isinstance(event, Alarm):
            event.ring(order)
        else:
            _process(event)


class Rings(Protocol):
    """The clock, as an alarm uses it."""

    agenda: Agenda


class Alarm:
    """Calls *callback* with itself once, at the instant that it was last set to; may be set again before or after that."""

    __slots__ = ("_agenda", "_at_ns", "_callback", "_order", "_rank", "_rings")

    def __init__(self, clock: Rings, rank: int, callback: Callable[[Any], None], *, order: int = 0) -> None:
        """*order*: alarms of one instant and rank ring in this order, and those of the same in the order in which they were set."""
        self._agenda = clock.agenda
        self._order = order << 48
        self._rank = rank
        self._callback = callback
        self._at_ns = 0
        self._rings = -1
        """The order of the entry in the queue that it rings for; -1: for none. Older entries have no effect."""

    def set(self, at_ns: int) -> None:
        """Ring at *at_ns*, now or later, and not at any time set before."""
        if self._rings >= 0 and at_ns == self._at_ns:
            return
        agenda = self._agenda
        self._at_ns = at_ns
        self._rings = order = self._order + next(agenda.ids)
        # As `Environment.schedule`, for an instant in place of a delay.
        heappush(agenda.queue, (at_ns, self._rank, order, self))

    def cancel(self) -> None:
        """Do not ring."""
        self._rings = -1

    def rings_for(self, order: int) -> bool:
        """Whether it rings for this entry of the queue."""
        return order == self._rings

    def ring(self, order: int) -> None:
        """Ring, if it does for this entry of the queue."""
        if order == self._rings:
            self._rings = -1
            self._callback(self)


def _process(event: Any) -> None:
    """Call back for one of SimPy's own events."""
    callbacks, event.callbacks = event.callbacks, None
    for callback in callbacks:
        callback(event)
