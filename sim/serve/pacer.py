"""Simulated time on the wall clock: events happen when their instant has come, and how late that was is counted."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable
from select import select
from typing import Any, Protocol

from sim.serve.prometheus import Histogram

LAG_BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_AT_ONCE_NS = 2_000_000
"""Wall time after which a pacer that is behind lets others have a turn."""
_WARN_EVERY_NS = 10_000_000_000


class Run(Protocol):
    """A run that is paced."""

    @property
    def now_ns(self) -> int: ...

    def next_ns(self) -> int | None: ...

    def advance(self, to_ns: int, /) -> None: ...


class Lag:
    """How late something was, in seconds of the wall clock."""

    def __init__(self) -> None:
        self.histogram = Histogram(LAG_BOUNDS_S)
        self.worst_s = 0.0
        self.late = 0
        """How often it was beyond the bound."""

    def add(self, lag_s: float, bound_s: float) -> None:
        self.histogram.add(lag_s)
        if lag_s > self.worst_s:
            self.worst_s = lag_s
        if lag_s > bound_s:
            self.late += 1


class Pacer:
    """Runs the events of a run when they are due: simulated instant s at wall instant zero + s / speed."""

    def __init__(self, run: Run, speed: float, *, bound_s: float, warn: Callable[[str], None]) -> None:
        """*bound_s*: lag of the wall clock above which *warn* is told, once in ten seconds at most."""
        self.speed = speed
        self.lag = Lag()
        """The lag of events, from when they were due until they had happened."""
        self.handed = Lag()
        """The lag of tokens, from when they were due until they were written to their connections."""
        self.bound_s = bound_s
        self._run = run
        self.warn = warn
        self._warned_ns = -_WARN_EVERY_NS
        self._late_before = 0
        self._worst_s = 0.0
        self._zero_ns = time.perf_counter_ns()
        self._rung: asyncio.Future[None] | None = None

    def start(self) -> None:
        """Now is instant 0."""
        self._zero_ns = time.perf_counter_ns()

    def present_ns(self) -> int:
        """The simulated instant that it should be."""
        return self.instant_ns(time.perf_counter_ns())

    def instant_ns(self, wall_ns: int) -> int:
        """The simulated instant of one of `time.perf_counter_ns`."""
        return int((wall_ns - self._zero_ns) * self.speed)

    def behind_s(self, due_ns: int) -> float:
        """Seconds of the wall clock since *due_ns* was due."""
        return (time.perf_counter_ns() - self._zero_ns - due_ns / self.speed) * 1e-9

    def catch_up(self) -> None:
        """Let everything happen that is due."""
        run = self._run
        while (due_ns := run.next_ns()) is not None and due_ns <= self.present_ns():
            self._step(due_ns)
        run.advance(max(self.present_ns(), run.now_ns))

    def _step(self, due_ns: int) -> None:
        self._run.advance(due_ns + 1)
        self.lag.add(self.behind_s(due_ns), self.bound_s)

    def handed_over(self, due_ns: int) -> None:
        """A token that was due then is written."""
        behind_s = self.behind_s(due_ns)
        self.handed.add(behind_s, self.bound_s)
        self._worst_s = max(self._worst_s, behind_s)
        if behind_s > self.bound_s:
            self._complain()

    def _complain(self) -> None:
        now_ns = time.perf_counter_ns()
        if now_ns - self._warned_ns < _WARN_EVERY_NS:
            return
        self._warned_ns = now_ns
        late, self._late_before = self.handed.late - self._late_before, self.handed.late
        self.warn(
            f"the endpoint runs late: {late} writes since the last warning came more than {self.bound_s * 1e3:g} ms behind "
            f"simulated time, the worst {self._worst_s * 1e3:.0f} ms; what clients measure includes that. Send less, lower "
            "--speed, or give it a core of its own"
        )
        self._worst_s = 0.0

    def ring(self) -> None:
        """Something has come: look again at what is due next."""
        if self._rung is not None and not self._rung.done():
            self._rung.set_result(None)

    async def go(self) -> None:
        """Run what is due, for as long as the task lives."""
        run, loop = self._run, asyncio.get_running_loop()
        while True:
            began_ns = time.perf_counter_ns()
            due_ns = run.next_ns()
            while due_ns is not None and due_ns <= self.present_ns():
                self._step(due_ns)
                due_ns = run.next_ns()
                if time.perf_counter_ns() - began_ns > _AT_ONCE_NS:
                    break
            self._rung = rung = loop.create_future()
            alarm: asyncio.TimerHandle | None = None
            if due_ns is not None:
                wait_s = -self.behind_s(due_ns)
                if wait_s <= 0:
                    await asyncio.sleep(0)
                    continue
                alarm = loop.call_later(wait_s, self.ring)
            try:
                await rung
            finally:
                if alarm is not None:
                    alarm.cancel()


def loop_factory() -> asyncio.AbstractEventLoop:
    """An event loop whose timers are good to some microseconds: epoll's own count whole milliseconds."""
    poller: Any = getattr(selectors, "EpollSelector", None)
    if poller is None:
        return asyncio.new_event_loop()

    class Precise(poller):  # type: ignore[misc]
        def select(self, timeout: float | None = None) -> Any:
            if timeout is not None and timeout > 0 and self.fileno() < 1024:
                select([self.fileno()], [], [], timeout)
                timeout = 0
            return super().select(timeout)

    return asyncio.SelectorEventLoop(Precise())
