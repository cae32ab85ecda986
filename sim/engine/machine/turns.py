"""The one run loop of a machine: what has ended is committed, what may start is started, and the clock moves to what is due next.

Three kinds of turns differ in which micro-batch may start when: one that is alone with its stage (`Alone`), several that take turns
on the first stage (`InTurn`), and those of ranks that are alone with their stage (`sim.engine.machine.together.Together`). What
takes a turn is a group (`sim.engine.machine.groups`): micro-batches of the ranks of a model, or the one of a model without.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from policies.view import ALWAYS_NS
from sim.engine.batch.micro_batch import MicroBatch
from sim.engine.batch.stages import Stages
from sim.engine.machine.groups import Group
from sim.engine.serve.engine_core import NOTHING, EngineCore
from sim.engine.time.clock import TICK_BITS, TICKS_PER_S
from sim.engine.time.errors import PolicyError
from sim.engine.time.events import MACHINES, Alarm, Clock


class Turns:
    """The loop that the turns of all machines have in common."""

    def __init__(self, groups: Sequence[Group], clock: Clock, *, fast_forward: bool) -> None:
        self.events = 0
        self._groups = groups
        self._cores = [core for group in groups for core in group.cores]
        self._clock = clock
        self._agenda = clock.agenda
        self._fast_forward = fast_forward
        self._ticks = 0
        """The end of the latest iteration, if it is known here."""
        self._alarm = Alarm(clock, MACHINES, self._on_turn, order=self._cores[0].number)
        """Rings for the next turn."""
        self._moved: set[int] | None = None
        self._machine = -1

    def tell(self, moved: set[int], machine: int) -> None:
        """Put *machine* into *moved* at every turn from now on."""
        self._moved, self._machine = moved, machine

    def _on_turn(self, _event: object) -> None:
        agenda = self._agenda
        if self._moved is not None:
            self._moved.add(self._machine)
        next_ns = agenda.now_ns
        while True:
            next_ns = self._turn(next_ns)
            if next_ns == ALWAYS_NS:
                return
            # If nothing else is due before that, continue without the detour through the queue.
            if not self._fast_forward or not agenda.runs_free_to(next_ns):
                self._alarm.set(next_ns)
                return

    def _turn(self, now_ns: int, /) -> int:
        """End what has ended by *now_ns* and start what may start; return the next turn's instant, ALWAYS_NS until something
        arrives."""
        raise NotImplementedError

    # Called by the machine.

    def arrive(self, core: EngineCore, now_ns: int, /) -> None:
        """A request has entered the queue of *core* at *now_ns*, the present: a span that does not let it pass is cut short."""
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
        for core in self._cores:
            for batch in core.batches:
                if now_ns < batch.wake_ns < wake_ns:
                    wake_ns = batch.wake_ns
        if wake_ns < ALWAYS_NS:
            return wake_ns
        stuck = self._stuck()
        if not stuck:
            return ALWAYS_NS
        if any([core.gives_room_up() for core in stuck]):
            return now_ns
        raise self._planned_nothing(stuck[0], ticks)

    def _stuck(self) -> list[EngineCore]:
        """The engine cores that have work, while nothing is on its way that could change what their policy sees."""
        if any([core.n_loading for core in self._cores]):
            return []
        # One that waits for other machines waits alone: engine cores have no memory in common.
        return [core for core in self._cores if core.sequences.busy and not core.sequences.connector.awaits]

    def _planned_nothing(self, core: EngineCore, ticks: int) -> PolicyError:
        (group,) = [group for group in self._groups if core in group.cores]
        where = f" on rank {group.cores.index(core)}" if len(group.cores) > 1 else ""
        prefilling = sum(len(batch.partial) for batch in core.batches)
        decoding = sum(batch.decoding.n + len(batch.paused) for batch in core.batches)
        return PolicyError(
            f"{core.spec.scheduler!r} planned nothing at t={ticks / TICKS_PER_S:.6f} s{where} with "
            f"{len(core.sequences.queue)} waiting, {prefilling} prefilling and {decoding} decoding; a plan must make progress "
            "when nothing else runs"
        )


class Alone(Turns):
    """One micro-batch on one stage: decode iterations between which nothing can change are one event, a span, which other events
    cut short."""

    def __init__(self, group: Group, clock: Clock, *, fast_forward: bool) -> None:
        super().__init__((group,), clock, fast_forward=fast_forward)
        (core,) = group.cores
        self._core = core
        self._batch = core.batches[0]
        self._ahead = int(core.sequences.ahead is not None)
        """Iterations that have been planned beside the one in flight."""

    def _turn(self, now_ns: int, /) -> int:
        core, batch, ticks = self._core, self._batch, self._ticks
        span = batch.span
        if span is not None:
            self.events += 1
            core.commit(batch, span.n, ticks)
        elif ticks < now_ns << TICK_BITS:
            ticks = now_ns << TICK_BITS
        end = core.begin(batch, ticks)
        if end != NOTHING:
            self._ticks = end
            return end >> TICK_BITS
        self._ticks = ticks
        return self._rest(now_ns, ticks)

    def arrive(self, core: EngineCore, now_ns: int, /) -> None:
        batch = self._batch
        span = batch.span
        if span is None:
            self._alarm.set(now_ns)
            return
        cuts = not batch.through_arrivals
        if span.n > 1 and (self._ahead or not cuts):
            # It waits while an iteration runs that has been planned.
            core.recorder.queued_ns.append(now_ns)
        if cuts:
            batch.through_arrivals = True
            self._cut_short(now_ns)

    def heed(self, now_ns: int, /) -> None:
        if self._batch.span is None:
            self._alarm.set(now_ns)
        else:
            self._cut_short(now_ns)

    def _cut_short(self, now_ns: int) -> None:
        """End the span in flight with the iteration in flight, or with the one after it where that has been planned."""
        span = self._batch.span
        if span is None or span.n == 1:
            return
        j = span.index_at(now_ns << TICK_BITS) + self._ahead
        if j < span.n:
            span.cut(j, self._core.recorder)
            self._ticks = span.end(j)
            self._alarm.set(self._ticks >> TICK_BITS)

    def stop(self, now_ns: int, /) -> None:
        self._alarm.cancel()
        span = self._batch.span
        if span is not None:
            done = span.index_at(now_ns << TICK_BITS) - 1
            self._core.stop(self._batch, done, span.end(done) if done else self._ticks)
        self._ticks = now_ns << TICK_BITS


class InTurn(Turns):
    """Micro-batches of one or several groups, one of which enters the stages whenever the first is free."""

    def __init__(
        self, groups: Sequence[Group], stages: Stages, clock: Clock, *, fast_forward: bool, oldest_first: bool
    ) -> None:
        """*oldest_first*: the group with the oldest waiting request plans first, and not each in rotation."""
        super().__init__(groups, clock, fast_forward=fast_forward)
        self._stages = stages
        self._oldest_first = oldest_first
        self._first = 0
        """The group that is first in rotation."""
        self._ends: list[tuple[int, int, Group, tuple[MicroBatch, ...]]] = []
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
        """The micro-batches that are first to leave the last stage have left it."""
        _, _, group, batches = heappop(self._ends)
        self.events += 1
        self._stages.in_flight -= 1
        group.end(batches)
        busy = self._stages.in_flight or any(core.sequences.busy for core in self._cores)
        if not busy and not any([each.queues for each in self._groups]):
            self._stages.idle()
            for each in self._groups:
                each.count_steps(0)
        if self._stages.first_free_ns <= now_ns:
            self._look_ns = now_ns

    def _send_next(self, now_ns: int) -> int:
        """Send off the next micro-batches, if any have something to do; when to look again."""
        self._ticks = ticks = max(self._stages.free[0], now_ns << TICK_BITS)
        for group in self._in_order():
            if not group.has_work:
                continue
            sent = group.send_next(ticks)
            if sent is not None:
                end, batches = sent
                self._first = (self._groups.index(group) + 1) % len(self._groups)
                self._n_sent += 1
                heappush(self._ends, (end >> TICK_BITS, self._n_sent, group, batches))
                return self._stages.first_free_ns
        return self._rest(now_ns, ticks)

    def _in_order(self) -> Sequence[Group]:
        """The groups in the order in which they may plan."""
        if self._oldest_first:
            return sorted(self._groups, key=lambda group: group.oldest)
        return (*self._groups[self._first :], *self._groups[: self._first])

    def _stuck(self) -> list[EngineCore]:
        return [] if self._stages.in_flight else super()._stuck()

    def arrive(self, core: EngineCore, now_ns: int, /) -> None:
        self.heed(now_ns)

    def heed(self, now_ns: int, /) -> None:
        if self._stages.first_free_ns <= now_ns:
            self._look_ns = now_ns
            self._alarm.set(now_ns)

    def stop(self, now_ns: int, /) -> None:
        self._alarm.cancel()
        self._look_ns = ALWAYS_NS
        self._ends.clear()
