"""SimPy as the engine uses it: a clock of whole nanoseconds, one class of events, and the order within an instant.

Events of one instant have four ranks. Control acts first; then arrivals from outside are delivered, and after them messages from
other machines; then machines, in their order, end iterations and start the next, with all that this instant has brought. No
machine feels an event of another sooner than 1 ns later, so that their order matters to nothing but limits that links share.
"""

from __future__ import annotations

from typing import Any, Final

import simpy

from sim.engine.time.alarm import Agenda, Alarm

__all__ = ["ARRIVALS", "CONTROL", "HANDOVERS", "MACHINES", "Alarm", "Clock"]

CONTROL: Final = 1
ARRIVALS: Final = 2
HANDOVERS: Final = 3
MACHINES: Final = 4
"""Ranks; 0 is SimPy's own, for the end of the run."""


class Clock(simpy.Environment):
    """A SimPy environment whose time is a whole number of nanoseconds."""

    def __init__(self) -> None:
        self.agenda = Agenda()
        super().__init__(initial_time=0)
        # SimPy types its queue as one of its own events; alarms are entries of this one too.
        self._queue = self.agenda.queue  # type: ignore[assignment]
        self._eid = self.agenda.ids

    # SimPy has an attribute here, which the agenda keeps in its place, as a whole number.
    @property
    def _now(self) -> int:  # type: ignore[override]
        return self.agenda.now_ns

    @_now.setter
    def _now(self, now_ns: int) -> None:
        self.agenda.now_ns = now_ns

    @property
    def now_ns(self) -> int:
        return self.agenda.now_ns

    def next_due(self) -> tuple[int, int] | None:
        """Instant and rank of the next event; None where there is none."""
        queue = self.agenda.queue
        return queue[0][:2] if queue else None

    def expects(self, rank: int) -> bool:
        """Whether an event of a rank beyond *rank* is to happen."""
        return any(at > rank and _happens(event, order) for _, at, order, event in self.agenda.queue)

    def step(self) -> None:
        self.agenda.step()

    def run(self, until: Any = None) -> Any:
        """As SimPy's, for an instant: what is due before it happens, and it is then the present. With None, all that is due."""
        if until is not None and not isinstance(until, int):
            return super().run(until)
        self.agenda.run(-1 if until is None else until)
        if until is not None:
            self.agenda.now_ns = until
        return None


def _happens(event: Any, order: int) -> bool:
    """Whether an entry of the queue is not one of an alarm that was set again or cancelled."""
    return not isinstance(event, Alarm) or event.rings_for(order)
