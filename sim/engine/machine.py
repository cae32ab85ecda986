"""A machine: stages, and the tenants that take turns on them.

Three doors lead in from outside: `interrupt`, when something has come that may change what runs next, `give_up`, when a client
has gone, and `abort`, which stops everything and hands the requests back. All else happens in the machine's own turns.

A machine with one tenant, one stage and one lane is *alone* with its clock: decode iterations between which nothing can change
are one event (a span), cut at the iteration in flight when a request arrives that matters. Others send micro-batches through their
stages, one whenever the first stage is free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

from policies.routers import RoutedRequest
from policies.view import ALWAYS_NS
from sim.engine.ahead import came_after
from sim.engine.clock import TICK_BITS, TICKS_PER_S
from sim.engine.errors import PolicyError
from sim.engine.events import MACHINES, Alarm
from sim.engine.experiment import MachineSpec
from sim.engine.lane import Lane
from sim.engine.prices import StageTable
from sim.engine.roles import Part
from sim.engine.sequences import n_waiting, refusal, take_for_rounds
from sim.engine.stages import Stages
from sim.engine.tenant import NOTHING, InCommon, Tenant


def found_tokens(tenant: Tenant, request: RoutedRequest, now_ns: int) -> int:
    """Tokens of the prompt, in full blocks, that are cached at *now_ns* on a tenant with one lane, or with no span in flight."""
    kv, lane = tenant.sequences.kv, tenant.lanes[0]
    if not kv.caches:
        return 0
    span, finding = lane.span, tenant.sequences.finding
    kv.try_out()
    if span is not None and span.n > 1:
        # As if the span had been taken step by step: what its growth evicts is gone, and what it has emitted is there.
        rounds = span.index_at(now_ns << TICK_BITS)
        finding.rounds_since = rounds - 1
        if lane.decoding.blocks_for(rounds) > span.growth_first:
            take_for_rounds(kv, lane.decoding, rounds, span.growth_first)
    found = kv.found_blocks(request.id, request.prompt_tokens + 1)
    finding.rounds_since = 0
    kv.undo()
    return found * kv.block_tokens


def prefill_tokens(tenant: Tenant) -> int:
    """Tokens of prompts that a tenant has still to compute."""
    partial = (each.remaining_tokens for lane in tenant.lanes for each in lane.partial.values())
    return sum(seq.tokens for seq in tenant.sequences.queue) + sum(partial)


def note_arrivals(tenant: Tenant) -> None:
    """Have a tenant keep what `left_waiting` asks."""
    if tenant.sequences.came_ns is None:
        tenant.sequences.came_ns = deque()


def left_waiting(tenant: Tenant, now_ns: int) -> int:
    """Requests that the latest plan left waiting: who came since, or while it was planned ahead, is not among them."""
    sequences = tenant.sequences
    assert sequences.came_ns is not None
    known = len(sequences.queue) - came_after(sequences.came_ns, _planned_ns(tenant, now_ns))
    return max(known, 0) + (0 if sequences.exchange is None else sequences.exchange.coming)


def _planned_ns(tenant: Tenant, now_ns: int) -> int:
    """When the plan of the iteration in flight was made, or the latest where none is in flight."""
    ahead, span = tenant.sequences.ahead, tenant.lanes[0].span
    at = span.index_at(now_ns << TICK_BITS) if tenant.alone and span is not None else 1
    if span is not None and at > 1:
        ended = at - 1 if ahead is None else at - 2
        return (span.end(ended) if ended else span.start_ticks) >> TICK_BITS
    if ahead is not None:
        return ahead.planned_ns
    return max(lane.view.now_ns if lane.span is None else lane.span.start_ticks >> TICK_BITS for lane in tenant.lanes)


def put(tenant: Tenant, now_ns: int, id_: int, what: int, tokens: int) -> None:
    """Leave news where a tenant reads it."""
    exchange = tenant.sequences.exchange
    assert exchange is not None
    exchange.tell(now_ns, what, id_, tokens)


def surrenders(tenant: Tenant) -> bool:
    """Whether somebody gave up its room; see `sim.engine.exchange.Exchange.surrender`."""
    exchange = tenant.sequences.exchange
    return exchange is not None and exchange.surrender()


def _in_turn(tenants: list[Tenant], turn: int, oldest_first: bool) -> Sequence[Tenant]:
    """Whom to ask: in rotation, or those with the oldest waiting request first."""
    if oldest_first:
        # Requests are numbered in order of arrival.
        return sorted(tenants, key=lambda tenant: tenant.sequences.queue[0].id if tenant.sequences.queue else ALWAYS_NS)
    return tenants[turn:] + tenants[:turn]


def _stuck(tenant: Tenant, ticks: int) -> PolicyError:
    """Nothing runs, and the plan for who waits is empty."""
    prefilling = sum(len(lane.partial) for lane in tenant.lanes)
    decoding = sum(lane.decoding.n + len(lane.paused) for lane in tenant.lanes)
    return PolicyError(
        f"{tenant.spec.scheduler!r} planned nothing at t={ticks / TICKS_PER_S:.6f} s with {len(tenant.sequences.queue)} waiting, "
        f"{prefilling} prefilling and {decoding} decoding; a plan must make progress when nothing else runs"
    )


class Machine:
    """Serves the requests that are delivered to it; routers see it as a `policies.routers.ReplicaLoad`."""

    def __init__(
        self, common: InCommon, index: int, spec: MachineSpec, first_number: int, part: Part | None = None
    ) -> None:
        """*first_number*: of its first tenant, among all of the run; *part*: what it has to do with handing over."""
        self.index = index
        self.events = 0
        self.no_hit_order = -1
        """Of routers that do not ask for it."""
        self.awaited = self.awaited_tokens = 0
        """Requests that have been sent here and wait elsewhere: for room, or for their prompt to be computed; and tokens of those
        whose prompt is to be computed here."""
        self._clock = common.clock
        self._state = common.state
        self._outside = common.outside
        self._fast_forward = common.fast_forward
        self._oldest_first = spec.turn == "oldest"
        first = spec.tenants[0]
        n_stages = first.cost.n_stages
        self._alone = len(spec.tenants) == 1 and n_stages == 1 and (first.micro_batches or 1) == 1
        self.stages = Stages(n_stages)
        self.tenants = self._made(common, spec, first_number, part)
        for tenant in self.tenants:
            tenant.ring_when_loaded(common.clock, self._on_loaded)
        self._hosting = {tenant.spec.model: tenant for tenant in self.tenants}
        self._turn = 0
        self._promised = [0] * n_stages if isinstance(first.cost, StageTable) else []
        self._alarm = Alarm(common.clock, MACHINES, self._on_turn_alone if self._alone else self._on_turn)
        """Rings for its next turn."""
        self._lane = self.tenants[0].lanes[0]
        """The only one, of a machine that is alone."""
        self._ticks = 0
        """Where the latest span of a machine that is alone ends."""
        self._ends: list[tuple[int, int, Tenant, Lane]] = []
        """Micro-batches in flight: when they have left the last stage, and their number, which orders those of one instant."""
        self._n_sent = 0
        self._look_ns = ALWAYS_NS
        """When to see whether the first stage has something to do."""

    def _made(self, common: InCommon, spec: MachineSpec, first_number: int, part: Part | None) -> list[Tenant]:
        """The tenants, in order."""
        return [
            Tenant(common, first_number + i, each, self.stages, alone=self._alone, machine=self.index, part=part)
            for i, each in enumerate(spec.tenants)
        ]

    # What routers see: iterations that have ended.

    @property
    def waiting(self) -> int:
        if self._alone:
            return n_waiting(self.tenants[0].sequences) + self.awaited
        return sum(n_waiting(tenant.sequences) for tenant in self.tenants) + self.awaited

    @property
    def running(self) -> int:
        if self._alone:
            return self.tenants[0].sequences.n_admitted
        return sum(tenant.sequences.n_admitted for tenant in self.tenants)

    @property
    def kv_blocks_used(self) -> int:
        return sum(tenant.sequences.kv.used for tenant in self.tenants) + self._grown

    @property
    def _grown(self) -> int:
        """Blocks that the span in flight has taken by now beyond those of its first iteration."""
        span = self._lane.span
        if self._alone and span is not None and span.n > 1:
            return self._lane.decoding.blocks_for(span.index_at(self._clock.now_ns << TICK_BITS)) - span.growth_first
        return 0

    @property
    def kv_use(self) -> float:
        return self.kv_blocks_used / sum(tenant.sequences.kv.total for tenant in self.tenants)

    @property
    def block_tokens(self) -> int:
        return self.tenants[0].sequences.kv.block_tokens

    @property
    def prefill_tokens(self) -> int:
        return sum(map(prefill_tokens, self.tenants)) + self.awaited_tokens

    @property
    def n_stages(self) -> int:
        return len(self.stages)

    def found_tokens(self, request: RoutedRequest) -> int:
        """Tokens of the prompt, in full blocks, that are cached here."""
        return found_tokens(self.tenant_of(request.model), request, self._clock.now_ns)

    @property
    def promised_ns(self) -> int:
        """When its last stage will have done all that was accepted, for models on tables of latencies."""
        return self._promised[-1] >> TICK_BITS

    def done_ns(self, model: int, *, waiting: bool) -> int:
        """When a request that came now would be done, alone in its batch: after all that was accepted, or (not *waiting*)
        after all that has been started. For models on tables of latencies."""
        clocks = self._promised if waiting else self.stages.free
        return self.stages.through(self._clock.now_ns << TICK_BITS, self._one(model), clocks)[-1] >> TICK_BITS

    def _one(self, model: int) -> list[int]:
        table = self.tenant_of(model).spec.cost
        if not isinstance(table, StageTable):
            raise ValueError(f"machine {self.index} has no table of latencies to promise an end by")
        return [ns << TICK_BITS for ns in table.of(1)]

    def hosts(self, model: int) -> bool:
        return model in self._hosting or None in self._hosting

    def tenant_of(self, model: int) -> Tenant:
        return self._hosting.get(model) or self._hosting[None]

    # The doors.

    def deliver(self, id_: int, kv_tokens: int = 0) -> None:
        """A request comes, with the KV of its first *kv_tokens* tokens; one that can never fit is rejected with its reason."""
        tenant = self.tenants[0] if self._alone else self.tenant_of(self._model(id_))
        self._state.replica[id_] = tenant.number
        sequences = tenant.sequences
        reason = refusal(sequences, id_)
        if reason is not None:
            self._outside.rejected(id_, reason)
            return
        if self._promised:
            now = self._clock.now_ns << TICK_BITS
            self._promised = self.stages.through(now, self._one(self._model(id_)), self._promised)
        sequences.enqueue(id_, kv_tokens, self._clock.now_ns)
        self.interrupt(self._clock.now_ns)

    def _model(self, id_: int) -> int:
        return 0 if self._state.model is None else self._state.model[id_]

    def interrupt(self, now_ns: int) -> None:
        """Something has come at *now_ns*, the present instant: whatever depends on it ends or begins."""
        lane = self._lane
        if not self._alone or lane.span is None:
            self._look_again(now_ns)
            return
        tenant = self.tenants[0]
        if not lane.through_arrivals:
            if lane.span.n > 1 and tenant.sequences.ahead is not None:
                # It waits while the next iteration runs, which has been planned.
                tenant.recorder.queued_ns.append(now_ns)
            lane.through_arrivals = True
            self._cut_short(now_ns)
        elif lane.span.n > 1:
            tenant.recorder.queued_ns.append(now_ns)

    def _look_again(self, now_ns: int) -> None:
        """Have a turn now, unless the first stage is at work."""
        if self._alone:
            self._alarm.set(now_ns)
        elif self.stages.first_free_ns <= now_ns:
            self._look_ns = now_ns
            self._alarm.set(now_ns)

    def _heed(self, now_ns: int) -> None:
        """Plan anew as soon as what is in flight has ended."""
        if self._alone and self._lane.span is not None:
            self._cut_short(now_ns)
        else:
            self._look_again(now_ns)

    def _cut_short(self, now_ns: int) -> None:
        """End the span in flight with the iteration in flight, or with the one after it where that has been planned."""
        tenant, span = self.tenants[0], self._lane.span
        if span is None or span.n == 1:
            return
        j = span.index_at(now_ns << TICK_BITS) + (tenant.sequences.ahead is not None)
        if j < span.n:
            span.cut(j, tenant.recorder)
            self._ticks = span.end(j)
            self._alarm.set(self._ticks >> TICK_BITS)

    def _on_loaded(self, tenant: Tenant) -> None:
        """KV that was asked for has come: who waits for it may go on."""
        tenant.sequences.version.hear(self._clock.now_ns)
        self._heed(self._clock.now_ns)

    def give_up(self, id_: int) -> None:
        """The client of a request that is here has gone: it takes no further iteration, and its KV is free when the present one
        ends (where plans are made ahead, when the next one does)."""
        tenant = self.tenants[0] if self._alone else self.tenant_of(self._model(id_))
        now_ns = self._clock.now_ns
        tenant.sequences.given_up[id_] = now_ns
        tenant.sequences.version.hear(now_ns)
        self._heed(now_ns)

    def tenant_for(self, id_: int) -> Tenant:
        """The tenant that decodes a request whose prompt is computed elsewhere."""
        return self.tenants[0] if self._alone else self.tenant_of(self._model(id_))

    def post(self, tenant: Tenant, id_: int, what: int, tokens: int = 0) -> None:
        """News of a request from another machine (`sim.engine.exchange`); it is read when the next iteration is planned."""
        now_ns = self._clock.now_ns
        put(tenant, now_ns, id_, what, tokens)
        self._heed(now_ns)

    def abort(self, now_ns: int) -> list[int]:
        """Stop at *now_ns*: iterations that have ended by then count, the others have not been. All memory is free afterwards;
        the requests are handed back, those that ran before those that waited."""
        self._alarm.cancel()
        self._look_ns = ALWAYS_NS
        if self._alone and self._lane.span is not None:
            span = self._lane.span
            done = span.index_at(now_ns << TICK_BITS) - 1
            self.tenants[0].stop(self._lane, done, span.end(done) if done else self._ticks)
        for tenant in self.tenants:
            tenant.drop_in_flight()
        self._ends.clear()
        self._ticks = now_ns << TICK_BITS
        self._promised = [self._ticks] * len(self._promised)
        self.stages.stop(self._ticks)
        return [id_ for tenant in self.tenants for id_ in tenant.hand_back()]

    # Turns of a machine that is alone.

    def _on_turn_alone(self, _event: object) -> None:
        tenant, lane = self.tenants[0], self._lane
        begin, commit, runs_free_to = tenant.begin, tenant.commit, self._clock.runs_free_to
        fast_forward, ticks = self._fast_forward, self._ticks
        if lane.span is None:
            ticks = max(ticks, self._clock.now_ns << TICK_BITS)
        while True:
            span = lane.span
            if span is not None:
                self.events += 1
                commit(lane, span.n, ticks)
            end = begin(lane, ticks)
            if end == NOTHING:
                self._ticks = ticks
                self._rest()
                return
            # Where nothing else is due before it ends, go on without the detour through the queue.
            ticks = end
            if not fast_forward or not runs_free_to(end >> TICK_BITS):
                self._ticks = end
                self._alarm.set(end >> TICK_BITS)
                return

    # Turns of a machine with stages, lanes or tenants to share.

    def _on_turn(self, _event: object) -> None:
        clock, ends = self._clock, self._ends
        while True:
            now_ns = clock.now_ns
            while ends and ends[0][0] <= now_ns:
                self._end(now_ns)
            if self._look_ns <= now_ns:
                self._look_ns = ALWAYS_NS
                self._look(now_ns)
            next_ns = min(self._look_ns, ends[0][0] if ends else ALWAYS_NS)
            if next_ns == ALWAYS_NS:
                return
            if not self._fast_forward or not clock.runs_free_to(next_ns):
                self._alarm.set(next_ns)
                return

    def _look(self, now_ns: int) -> None:
        """Send off the next micro-batch if the first stage is free."""
        if self.stages.first_free_ns > now_ns:
            return
        ticks = max(self.stages.free[0], now_ns << TICK_BITS)
        for tenant in _in_turn(self.tenants, self._turn, self._oldest_first):
            if not tenant.sequences.busy and not tenant.n_loading:
                continue
            refused = False
            for _ in range(max(len(tenant.ready), 1)):
                lane = tenant.next_lane()
                if lane is None:
                    break
                # To an empty lane a policy says what it said to the one before.
                lane.wake_ns = ALWAYS_NS
                end = NOTHING if refused and not lane.admitted else tenant.begin(lane, ticks)
                if end != NOTHING:
                    self._turn = (self.tenants.index(tenant) + 1) % len(self.tenants)
                    self._n_sent += 1
                    heappush(self._ends, (end >> TICK_BITS, self._n_sent, tenant, lane))
                    self._look_ns = self.stages.first_free_ns
                    return
                refused = refused or not lane.admitted
                tenant.ready.append(lane)
        self._rest()

    def _end(self, now_ns: int) -> None:
        """The micro-batch that is first to leave the last stage has left it."""
        _, _, tenant, lane = heappop(self._ends)
        self.events += 1
        self.stages.in_flight -= 1
        tenant.commit(lane, 1, lane.span.end(1))  # type: ignore[union-attr]
        tenant.ready.append(lane)
        if not self.stages.in_flight and not any(tenant.sequences.busy for tenant in self.tenants):
            self.stages.idle()
        if self.stages.first_free_ns <= now_ns:
            self._look_ns = now_ns

    # Nothing planned.

    def _rest(self) -> None:
        """Wait for the next interruption, or for the instant that a policy waits for.

        An empty plan is an error when there is work and nothing in flight that could change what the policy sees.
        """
        now_ns = self._clock.now_ns
        busy = [tenant for tenant in self.tenants if tenant.sequences.busy]
        waited = [lane.wake_ns for tenant in busy for lane in tenant.ready if lane.wake_ns > now_ns]
        if self._alone and self._lane.wake_ns > now_ns:
            waited = [self._lane.wake_ns]
        wake_ns = min(waited, default=ALWAYS_NS)
        if wake_ns < ALWAYS_NS:
            if self._alone:
                self._alarm.set(wake_ns)
            self._look_ns = wake_ns
        elif busy and not self.stages.in_flight and not any(tenant.awaits_kv for tenant in self.tenants):
            if any([surrenders(each) for each in busy]):
                self._look_again(now_ns)
                return
            raise _stuck(busy[0], max(self._ticks, now_ns << TICK_BITS))
