"""The one run loop of a machine: what has ended is committed, what may start is started, and the clock moves to what is due next.

Three kinds of turns differ in which lane may start when: a lane that is *alone* with its stage (`Alone`), lanes that take turns on
the first stage (`InTurn`), and the lanes of ranks, which step together (`sim.engine.machine.ranks.Together`).
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from policies.view import ALWAYS_NS
from sim.engine.batch.lane import Lane
from sim.engine.batch.stages import Stages
from sim.engine.serve.tenant import NOTHING, Tenant
from sim.engine.time.clock import TICK_BITS, TICKS_PER_S
from sim.engine.time.errors import PolicyError
from sim.engine.time.events import MACHINES, Alarm, Clock


class Turns:
    """The loop that the turns of all machines have in common."""

    # A base class and not a protocol: compiled, its methods are found without a look-up by name.

    def __init__(self, tenants: Sequence[Tenant], clock: Clock, *, fast_forward: bool) -> None:
        self.tenants = tenants
        self.events = 0
        self._clock = clock
        self._fast_forward = fast_forward
        self._ticks = 0
        """The end of the latest iteration, if it is known here."""
        self._alarm = Alarm(clock, MACHINES, self._on_turn)
        """Rings for the next turn."""

    def _on_turn(self, _event: object) -> None:
        clock = self._clock
        while True:
            next_ns = self._turn(clock.now_ns)
            if next_ns == ALWAYS_NS:
                return
            # If nothing else is due before that, continue without the detour through the queue.
            if not self._fast_forward or not clock.runs_free_to(next_ns):
                self._alarm.set(next_ns)
                return

    def _turn(self, now_ns: int, /) -> int:
        """End what has ended by *now_ns* and start what may start; return the next turn's instant, ALWAYS_NS until something
        arrives."""
        raise NotImplementedError

    # Called by the machine.

    def arrive(self, tenant: Tenant, now_ns: int, /) -> None:
        """A request has entered the queue of *tenant* at *now_ns*, the present: a span that does not let it pass is cut short."""
        raise NotImplementedError

    def heed(self, now_ns: int, /) -> None:
        """Something has happened at *now_ns*, the present: plan anew as soon as what is in flight has ended."""
        raise NotImplementedError

    def stop(self, now_ns: int, /) -> None:
        """Stop the machine at *now_ns*: iterations that have ended by then count, others are dropped."""
        raise NotImplementedError

    # Nothing planned.

    def _rest(self, now_ns: int, ticks: int) -> int:
        """The instant to look again although nothing was started: the one that a policy waits for, or ALWAYS_NS.

        An empty plan is an error when there is work and nothing that could change what the policy sees.
        """
        wake_ns = ALWAYS_NS
        for tenant in self.tenants:
            for lane in tenant.lanes:
                if now_ns < lane.wake_ns < wake_ns:
                    wake_ns = lane.wake_ns
        if wake_ns < ALWAYS_NS:
            return wake_ns
        stuck = self._stuck()
        if not stuck:
            return ALWAYS_NS
        if any([tenant.gives_room_up() for tenant in stuck]):
            return now_ns
        raise self._planned_nothing(stuck[0], ticks)

    def _stuck(self) -> list[Tenant]:
        """The tenants that have work, while nothing is on its way that could change what their policy sees."""
        if any(tenant.awaits_kv for tenant in self.tenants):
            return []
        return [tenant for tenant in self.tenants if tenant.sequences.busy]

    def _planned_nothing(self, tenant: Tenant, ticks: int, where: str = "") -> PolicyError:
        prefilling = sum(len(lane.partial) for lane in tenant.lanes)
        decoding = sum(lane.decoding.n + len(lane.paused) for lane in tenant.lanes)
        return PolicyError(
            f"{tenant.spec.scheduler!r} planned nothing at t={ticks / TICKS_PER_S:.6f} s{where} with "
            f"{len(tenant.sequences.queue)} waiting, {prefilling} prefilling and {decoding} decoding; a plan must make progress "
            "when nothing else runs"
        )


class Alone(Turns):
    """One lane on one stage: decode iterations between which nothing can change are one event, a span, which events cut short."""

    def __init__(self, tenant: Tenant, clock: Clock, *, fast_forward: bool) -> None:
        super().__init__((tenant,), clock, fast_forward=fast_forward)
        self._tenant = tenant
        self._lane = tenant.lanes[0]
        self._ahead = int(tenant.sequences.ahead is not None)
        """Iterations that have been planned beside the one in flight."""

    def _turn(self, now_ns: int, /) -> int:
        tenant, lane, ticks = self._tenant, self._lane, self._ticks
        span = lane.span
        if span is not None:
            self.events += 1
            tenant.commit(lane, span.n, ticks)
        elif ticks < now_ns << TICK_BITS:
            ticks = now_ns << TICK_BITS
        end = tenant.begin(lane, ticks)
        if end != NOTHING:
            self._ticks = end
            return end >> TICK_BITS
        self._ticks = ticks
        return self._rest(now_ns, ticks)

    def arrive(self, tenant: Tenant, now_ns: int, /) -> None:
        lane = self._lane
        span = lane.span
        if span is None:
            self._alarm.set(now_ns)
            return
        cuts = not lane.through_arrivals
        if span.n > 1 and (self._ahead or not cuts):
            # It waits while an iteration runs that has been planned.
            tenant.recorder.queued_ns.append(now_ns)
        if cuts:
            lane.through_arrivals = True
            self._cut_short(now_ns)

    def heed(self, now_ns: int, /) -> None:
        if self._lane.span is None:
            self._alarm.set(now_ns)
        else:
            self._cut_short(now_ns)

    def _cut_short(self, now_ns: int) -> None:
        """End the span in flight with the iteration in flight, or with the one after it where that has been planned."""
        span = self._lane.span
        if span is None or span.n == 1:
            return
        j = span.index_at(now_ns << TICK_BITS) + self._ahead
        if j < span.n:
            span.cut(j, self._tenant.recorder)
            self._ticks = span.end(j)
            self._alarm.set(self._ticks >> TICK_BITS)

    def stop(self, now_ns: int, /) -> None:
        self._alarm.cancel()
        span = self._lane.span
        if span is not None:
            done = span.index_at(now_ns << TICK_BITS) - 1
            self._tenant.stop(self._lane, done, span.end(done) if done else self._ticks)
        self._ticks = now_ns << TICK_BITS


class InTurn(Turns):
    """Lanes of one or several tenants that send micro-batches through the stages, one whenever the first stage is free."""

    def __init__(
        self, tenants: Sequence[Tenant], stages: Stages, clock: Clock, *, fast_forward: bool, oldest_first: bool
    ) -> None:
        """*oldest_first*: the tenant with the oldest waiting request plans first, and not each in rotation."""
        super().__init__(tenants, clock, fast_forward=fast_forward)
        self._stages = stages
        self._oldest_first = oldest_first
        self._first = 0
        """The tenant that is first in rotation."""
        self._ends: list[tuple[int, int, Tenant, Lane]] = []
        """Micro-batches in flight: the instant at which they leave the last stage, and their number, which breaks ties."""
        self._n_sent = 0
        self._look_ns = ALWAYS_NS
        """The instant at which to see whether the first stage can start something."""

    def _turn(self, now_ns: int, /) -> int:
        ends = self._ends
        while ends and ends[0][0] <= now_ns:
            self._end(now_ns)
        if self._look_ns <= now_ns:
            self._look_ns = ALWAYS_NS
            if self._stages.first_free_ns <= now_ns:
                self._look_ns = self._send_next(now_ns)
        return min(self._look_ns, ends[0][0] if ends else ALWAYS_NS)

    def _end(self, now_ns: int) -> None:
        """The micro-batch that is first to leave the last stage has left it."""
        _, _, tenant, lane = heappop(self._ends)
        self.events += 1
        self._stages.in_flight -= 1
        assert lane.span is not None
        tenant.commit(lane, 1, lane.span.end(1))
        tenant.ready.append(lane)
        if not self._stages.in_flight and not any(tenant.sequences.busy for tenant in self.tenants):
            self._stages.idle()
        if self._stages.first_free_ns <= now_ns:
            self._look_ns = now_ns

    def _send_next(self, now_ns: int) -> int:
        """Send off the next micro-batch, if any lane has something to do; when to look again."""
        self._ticks = ticks = max(self._stages.free[0], now_ns << TICK_BITS)
        for tenant in self._in_order():
            if not tenant.sequences.busy and not tenant.n_loading:
                continue
            sent = self._send_one_of(tenant, ticks)
            if sent is not None:
                end, lane = sent
                self._first = (self.tenants.index(tenant) + 1) % len(self.tenants)
                self._n_sent += 1
                heappush(self._ends, (end >> TICK_BITS, self._n_sent, tenant, lane))
                return self._stages.first_free_ns
        return self._rest(now_ns, ticks)

    def _in_order(self) -> Sequence[Tenant]:
        """The tenants in the order in which they may plan."""
        if self._oldest_first:
            # Requests are numbered in order of arrival.
            return sorted(
                self.tenants, key=lambda tenant: tenant.sequences.queue[0].id if tenant.sequences.queue else ALWAYS_NS
            )
        return (*self.tenants[self._first :], *self.tenants[: self._first])

    def _send_one_of(self, tenant: Tenant, ticks: int) -> tuple[int, Lane] | None:
        """Start that lane of *tenant* with work that has been idle longest; return it and the time at which it ends."""
        refused = False
        for _ in range(max(len(tenant.ready), 1)):
            lane = tenant.next_lane()
            if lane is None:
                break
            lane.wake_ns = ALWAYS_NS
            # A policy plans the same for an empty lane as for the one before.
            end = NOTHING if refused and not lane.admitted else tenant.begin(lane, ticks)
            if end != NOTHING:
                return end, lane
            refused = refused or not lane.admitted
            tenant.ready.append(lane)
        return None

    def _stuck(self) -> list[Tenant]:
        return [] if self._stages.in_flight else super()._stuck()

    def arrive(self, tenant: Tenant, now_ns: int, /) -> None:
        self.heed(now_ns)

    def heed(self, now_ns: int, /) -> None:
        if self._stages.first_free_ns <= now_ns:
            self._look_ns = now_ns
            self._alarm.set(now_ns)

    def stop(self, now_ns: int, /) -> None:
        self._alarm.cancel()
        self._look_ns = ALWAYS_NS
        self._ends.clear()
