"""A machine whose attention is replicated over ranks (attention data parallelism).

Each rank is a tenant with sequences, a queue, a scheduler's plans and KV memory of its own; a router inside the machine says which
one a request goes to. All of them start a step together when any has something to do, and end it together: the price is one of the
whole step (`sim.engine.common`). Who comes while a step runs, on whichever rank, waits for its end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hwmodels.totals import Totals
from policies.ranks import PromptBalance, RankWork, Waited
from policies.routers import Refused, RoutedRequest, route_of
from policies.view import ALWAYS_NS
from sim.engine.clock import TICK_BITS, TICKS_PER_S
from sim.engine.common import IDLE, CommonPrices
from sim.engine.errors import PolicyError
from sim.engine.events import MACHINES, Alarm, Clock
from sim.engine.experiment import MachineSpec
from sim.engine.machine import Machine, found_tokens, prefill_tokens, put, surrenders
from sim.engine.prices import StageTable
from sim.engine.pricing import Pricing
from sim.engine.roles import Part
from sim.engine.sequences import n_waiting, refusal
from sim.engine.span import Span, TapedSpan
from sim.engine.stages import Stages
from sim.engine.tenant import NOTHING, InCommon, Tenant
from sim.engine.uniform import UniformSet

_FEWEST, _MOST = 16, 1024
"""Steps that are one event: fewer are sooner priced one by one, and more would mostly be cut."""
_RANK_STREAM = 0x72616E6B
"""Names the random stream of routers inside machines."""


class RankLoad:
    """A rank as the router inside its machine sees it: a `policies.routers.ReplicaLoad`."""

    __slots__ = ("_clock", "_lane", "_tenant", "no_hit_order", "promised_ns")

    def __init__(self, tenant: Tenant, clock: Clock) -> None:
        self._tenant = tenant
        self._lane = tenant.lanes[0]
        self._clock = clock
        self.no_hit_order = -1
        """Of routers that do not ask for it."""
        self.promised_ns = 0

    @property
    def waiting(self) -> int:
        return n_waiting(self._tenant.sequences)

    @property
    def running(self) -> int:
        return self._tenant.sequences.n_admitted

    @property
    def grown(self) -> int:
        """Blocks that the steps in flight have taken by now beyond those of the first."""
        span = self._lane.span
        if span is None or span.n == 1:
            return 0
        return self._lane.decoding.blocks_for(span.index_at(self._clock.now_ns << TICK_BITS)) - span.growth_first

    @property
    def kv_blocks_used(self) -> int:
        return self._tenant.sequences.kv.used + self.grown

    @property
    def kv_use(self) -> float:
        return self.kv_blocks_used / self._tenant.sequences.kv.total

    @property
    def block_tokens(self) -> int:
        return self._tenant.sequences.kv.block_tokens

    @property
    def prefill_tokens(self) -> int:
        return prefill_tokens(self._tenant)

    def found_tokens(self, request: RoutedRequest) -> int:
        return found_tokens(self._tenant, request, self._clock.now_ns)

    def done_ns(self, model: int, *, waiting: bool) -> int:
        raise ValueError("ranks have no table of latencies to promise an end by")


class RankedMachine(Machine):
    """Serves the requests that are delivered to it on one of its ranks each.

    To the rest of the run it is a machine; its tenants are its ranks.
    """

    def __init__(
        self, common: InCommon, index: int, spec: MachineSpec, first_number: int, part: Part | None = None
    ) -> None:
        """*first_number*: of its first rank, among all tenants of the run; *part*: what it has to do with handing over."""
        (of_each,) = spec.tenants
        assert not isinstance(of_each.cost, StageTable)
        pricing = Pricing(of_each.cost, of_each.draft_cost, of_each.speculation_overhead_s)
        self._prices = CommonPrices(pricing, spec.ranks)
        super().__init__(common, index, spec, first_number, part)
        self._alone = False
        self._lanes = [tenant.lanes[0] for tenant in self.tenants]
        self._loads = [RankLoad(tenant, common.clock) for tenant in self.tenants]
        # Where sequences speculate each step emits what it does, and loads from tiers come when they come: one by one.
        self._joins = common.fast_forward and of_each.decoding is None and self.tenants[0].loading is None
        self._router = spec.rank_router
        assert spec.rank_router is not None
        self._route_of = route_of(spec.rank_router)
        self._luck: NDArray[np.float64] | None = None
        self._seed = common.seed
        self._n_routed = 0
        self._balance = spec.prompt_balance
        self._waited = Waited()
        self._works: list[RankWork] = []
        """As of the first of the steps in flight."""
        self._in_step = False
        self._n_steps = 0
        """Of those in flight together."""
        self._alarm = Alarm(common.clock, MACHINES, self._on_step)

    def _made(self, common: InCommon, spec: MachineSpec, first_number: int, part: Part | None) -> list[Tenant]:
        (of_each,) = spec.tenants
        return [
            Tenant(
                common,
                first_number + rank,
                of_each,
                Stages(1),
                alone=True,
                machine=self.index,
                prices=self._prices,
                part=part,
            )
            for rank in range(spec.ranks)
        ]

    @property
    def n_stages(self) -> int:
        """A rank that has nothing to do idles while others step, as a machine would."""
        return len(self.tenants)

    def found_tokens(self, request: RoutedRequest) -> int:
        """Tokens of the prompt that are cached on the rank that has most of it; the router inside may choose another."""
        return max(load.found_tokens(request) for load in self._loads)

    @property
    def _span(self) -> Span | None:
        """The steps in flight, as one of the ranks has them; each ends them when all do."""
        return next((lane.span for lane in self._lanes if lane.span is not None), None) if self._in_step else None

    @property
    def _grown(self) -> int:
        return sum(load.grown for load in self._loads)

    def tenant_of(self, model: int) -> Tenant:
        return self.tenants[0]

    # The doors.

    def deliver(self, id_: int, kv_tokens: int = 0) -> None:
        """A request comes, with the KV of its first *kv_tokens* tokens; one that can never fit is rejected with its reason."""
        rank = self._rank_for(id_)
        if isinstance(rank, Refused):
            self._state.replica[id_] = self.tenants[max(rank.at, 0)].number
            self._outside.rejected(id_, rank.reason)
            return
        tenant = self.tenants[rank]
        self._state.replica[id_] = tenant.number
        reason = refusal(tenant.sequences, id_)
        if reason is not None:
            self._outside.rejected(id_, reason)
            return
        tenant.sequences.enqueue(id_, kv_tokens, self._clock.now_ns)
        held = self._lanes[rank].held
        if self._n_steps > 1 and held is not None and held.through_arrivals and self._balance is None:
            # Its plan is the same whoever waits.
            tenant.recorder.queued_ns.append(self._clock.now_ns)
        else:
            self.interrupt(self._clock.now_ns)

    def _rank_for(self, id_: int) -> int | Refused:
        state = self._state
        if self._luck is None or id_ >= len(self._luck):
            # By request, whatever the order in which they come.
            n = max(len(state.prompt), 2 * id_)
            self._luck = np.random.default_rng([self._seed, _RANK_STREAM]).random((n, 2))
        request = RoutedRequest(
            id_,
            state.prompt[id_],
            self._model(id_),
            tuple(self._luck[id_].tolist()),
            state.arrival[id_],
            -1 if state.deadline is None else state.deadline[id_],
            self._n_routed,
            priority=0 if state.priority is None else state.priority[id_],
        )
        self._n_routed += 1
        answer = self._route_of(request, self._loads)
        if not isinstance(answer, Refused) and not 0 <= answer < len(self.tenants):
            raise PolicyError(
                f"{self._router!r} sent request {id_} to rank {answer!r}; expected 0 to {len(self.tenants) - 1}"
            )
        return answer

    def interrupt(self, now_ns: int) -> None:
        """Something has come at *now_ns*, the present instant: ranks that rest start a step, others end with the one in flight."""
        span = self._span
        if span is None:
            self._alarm.set(now_ns)
        elif self._n_steps > 1:
            j = span.index_at(now_ns << TICK_BITS)
            if j < self._n_steps:
                self._n_steps = j
                self._ticks = span.end(j)
                for tenant, lane in zip(self.tenants, self._lanes, strict=True):
                    if lane.span is not None:
                        lane.span.cut(j, tenant.recorder)
                self._alarm.set(self._ticks >> TICK_BITS)

    def tenant_for(self, id_: int) -> Tenant:
        rank = self._rank_for(id_)
        if isinstance(rank, Refused):
            raise PolicyError(
                f"{self._router!r} refused request {id_}, whose KV comes from another machine; take a router that refuses none"
            )
        return self.tenants[rank]

    def post(self, tenant: Tenant, id_: int, what: int, tokens: int = 0) -> None:
        put(tenant, self._clock.now_ns, id_, what, tokens)
        self.interrupt(self._clock.now_ns)

    def _on_loaded(self, tenant: Tenant) -> None:
        tenant.sequences.version.hear(self._clock.now_ns)
        self.interrupt(self._clock.now_ns)

    def give_up(self, id_: int) -> None:
        tenant = self.tenants[self._state.replica[id_] - self.tenants[0].number]
        tenant.sequences.given_up[id_] = self._clock.now_ns
        tenant.sequences.version.hear(self._clock.now_ns)
        self.interrupt(self._clock.now_ns)

    def abort(self, now_ns: int) -> list[int]:
        self._alarm.cancel()
        ids: list[int] = []
        span = self._span
        done = 0 if span is None else span.index_at(now_ns << TICK_BITS) - 1
        end = self._ticks if span is None or not done else span.end(done)
        for tenant, lane in zip(self.tenants, self._lanes, strict=True):
            if lane.span is not None:
                tenant.stop(lane, done, end)
            tenant.drop_in_flight()
            ids += tenant.hand_back()
        self._in_step = False
        self._waited = Waited()
        self._ticks = now_ns << TICK_BITS
        return ids

    # Steps.

    def _on_step(self, _event: object) -> None:
        clock = self._clock
        while True:
            if self._in_step:
                ticks = self._ticks
                self.events += 1
                self._in_step, n = False, self._n_steps
                if self._balance is not None:
                    for _ in range(n - 1):
                        _, self._waited = self._balance.start(self._works, self._waited)
                for tenant, lane in zip(self.tenants, self._lanes, strict=True):
                    if lane.span is not None:
                        if lane.held is not None:
                            lane.held.left -= n - 1
                        tenant.commit(lane, n, ticks)
            else:
                ticks = max(self._ticks, clock.now_ns << TICK_BITS)
            end = self._start(ticks)
            if end == NOTHING:
                self._ticks = ticks
                self._rest()
                return
            self._ticks = end
            if not self._fast_forward or not clock.runs_free_to(end >> TICK_BITS):
                self._alarm.set(end >> TICK_BITS)
                return

    def _start(self, ticks: int) -> int:
        """Ask every rank at *ticks* and start what they plan, together: the tick at which that ends, or NOTHING."""
        totals, draft_steps = [IDLE] * len(self.tenants), [0] * len(self.tenants)
        taking: list[int] = []
        if self._balance is not None:
            self._let_prompts_start(self._balance)
        for rank, (tenant, lane) in enumerate(zip(self.tenants, self._lanes, strict=True)):
            lane.wake_ns = ALWAYS_NS
            if tenant.begin(lane, ticks) != NOTHING:
                taking.append(rank)
                assert lane.prepared is not None
                totals[rank], draft_steps[rank] = lane.prepared.priced, lane.prepared.draft_steps
        if not taking:
            return NOTHING
        self._in_step = True
        n = self._alike(taking) if self._joins else 1
        if n >= _FEWEST:
            return self._start_several(taking, totals, n, ticks)
        self._n_steps = 1
        duration = self._prices.step(totals, draft_steps)
        for rank in taking:
            self.tenants[rank].iterations.launch(self._lanes[rank], ticks, duration)
        return ticks + duration

    def _alike(self, taking: Sequence[int]) -> int:
        """For how many steps all would do what they are about to do, if nobody comes: decodes, and nothing else."""
        if any(tenant.sequences.busy for rank, tenant in enumerate(self.tenants) if rank not in taking):
            return 1
        if self.tenants[0].planner.prompts_wait and any(work.prompts for work in self._works):
            # Whether they may start is asked before every step.
            return 1
        n = _MOST
        for rank in taking:
            lane, sequences = self._lanes[rank], self.tenants[rank].sequences
            held, decoding, prepared = lane.held, lane.decoding, lane.prepared
            if held is None or lane.run or not isinstance(decoding, UniformSet):
                return 1
            assert prepared is not None
            n = min(n, held.left + 1, decoding.until_finish(), decoding.until_bend())
            if n > 1:
                n = decoding.rounds_within(sequences.kv.free + prepared.growth, n)
        return n

    def _start_several(self, taking: Sequence[int], totals: Sequence[Totals], n: int, ticks: int) -> int:
        """*n* steps as one event, fewer where a plan ends at an instant."""
        growth = [(0, 0)] * len(totals)
        sets = {rank: decoding for rank in taking if isinstance(decoding := self._lanes[rank].decoding, UniformSet)}
        for rank, decoding in sets.items():
            growth[rank] = decoding.n, decoding.window_growth
        ends = self._prices.steps(totals, growth, n).cumsum()
        until_ns = min(held.until_ns for rank in taking if (held := self._lanes[rank].held) is not None)
        if until_ns < ALWAYS_NS:
            # The first is run in any case; a further one if the one before it ends before that instant.
            ends = ends[: int(ends.searchsorted((until_ns << TICK_BITS) - ticks)) + 1]
        n = len(ends)
        step = np.arange(n)
        for rank, decoding in sets.items():
            tenant, lane = self.tenants[rank], self._lanes[rank]
            prepared, sequences = lane.prepared, tenant.sequences
            assert prepared is not None
            lane.prepared = None
            kv, window = growth[rank]
            lane.span = TapedSpan(
                ticks, ends, prepared.growth, decoding,
                prepared.priced.decode_kv_tokens + step * kv, prepared.priced.decode_kv_window + step * window,
                np.full(n, decoding.n),
            )  # fmt: skip
            lane.span.open(
                tenant.recorder,
                lane.index,
                sequences.n_admitted,
                len(sequences.queue),
                sequences.kv.used,
                decoding.round,
            )
        self._n_steps = n
        return ticks + int(ends[-1])

    def _let_prompts_start(self, balance: PromptBalance) -> None:
        self._works = [
            RankWork(bool(tenant.sequences.queue or lane.partial), bool(lane.decoding.n or lane.paused))
            for tenant, lane in zip(self.tenants, self._lanes, strict=True)
        ]
        starts, self._waited = balance.start(self._works, self._waited)
        for tenant in self.tenants:
            if tenant.planner.prompts_wait is starts:
                tenant.planner.prompts_wait = not starts
                tenant.sequences.version.changes += 1

    def _rest(self) -> None:
        """Wait for the next interruption, or for the instant that a policy waits for.

        That no rank plans anything is an error when one has work.
        """
        now_ns = self._clock.now_ns
        waited = [lane.wake_ns for lane in self._lanes if now_ns < lane.wake_ns < ALWAYS_NS]
        if waited:
            self._alarm.set(min(waited))
            return
        busy = [rank for rank, tenant in enumerate(self.tenants) if tenant.sequences.busy]
        # What one rank waits for comes from other machines; ranks have no memory in common.
        busy = [rank for rank in busy if not self.tenants[rank].sequences.awaits()]
        if busy and not any(tenant.n_loading for tenant in self.tenants):
            if any([surrenders(self.tenants[rank]) for rank in busy]):
                self._alarm.set(now_ns)
                return
            tenant, lane = self.tenants[busy[0]], self._lanes[busy[0]]
            raise PolicyError(
                f"{tenant.spec.scheduler!r} planned nothing at t={self._ticks / TICKS_PER_S:.6f} s on rank {busy[0]} with "
                f"{len(tenant.sequences.queue)} waiting, {len(lane.partial)} prefilling and "
                f"{lane.decoding.n + len(lane.paused)} decoding; a plan must make progress when nothing else runs"
            )


def machine_of(common: InCommon, index: int, spec: MachineSpec, first_number: int, part: Part | None = None) -> Machine:
    """The machine that *spec* describes; *first_number* and *part*: as of a `Machine`."""
    kind = RankedMachine if spec.ranks > 1 else Machine
    return kind(common, index, spec, first_number, part)


def ranked(machines: Sequence[Machine]) -> list[tuple[int, int]]:
    """Of each machine with ranks the numbers of its first and its last."""
    return [
        (machine.tenants[0].number, machine.tenants[-1].number)
        for machine in machines
        if isinstance(machine, RankedMachine)
    ]
