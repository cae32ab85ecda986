"""A machine whose attention is replicated over ranks (attention data parallelism).

Each rank is an engine core with sequences, a queue, a scheduler's plans and KV memory of its own; a router inside the machine
assigns each request to a rank. All start a step together when any has work, and end it together: the price is one of the whole step
(`sim.engine.batch.rank_prices`). Requests that arrive at any rank during a step wait for its end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hwmodels.totals import Totals
from policies.ranks import PromptBalance, RankWork, Waited
from policies.routers import Refused, RoutedRequest, route_of
from policies.view import ALWAYS_NS
from sim.engine.batch.decode_set import DecodeSet
from sim.engine.batch.micro_batch import MicroBatch
from sim.engine.batch.prices import StageTable
from sim.engine.batch.pricing import Pricing
from sim.engine.batch.rank_prices import IDLE, CommonPrices
from sim.engine.batch.span import Span, SpeculativeSpan
from sim.engine.batch.stages import Stages
from sim.engine.machine.machine import Machine
from sim.engine.machine.turns import Turns
from sim.engine.serve.engine_core import NOTHING, EngineCore, InCommon
from sim.engine.spec.experiment import MachineSpec
from sim.engine.spec.roles import Part
from sim.engine.time.clock import TICK_BITS
from sim.engine.time.errors import PolicyError
from sim.engine.time.events import Clock

_FEWEST, _MOST = 16, 1024
"""Steps that are one event: fewer are sooner priced one by one, and more would mostly be cut."""
_RANK_STREAM = 0x72616E6B
"""Names the random stream of routers inside machines."""


class Together(Turns):
    """The micro-batches of ranks, one each, that start and end every step together."""

    def __init__(
        self, cores: Sequence[EngineCore], prices: CommonPrices, balance: PromptBalance | None, clock: Clock, *,
        fast_forward: bool,
    ) -> None:  # fmt: skip
        super().__init__(cores, clock, fast_forward=fast_forward)
        self._prices = prices
        self._batches = [core.batches[0] for core in cores]
        # Speculating sequences emit different numbers each step, and loads from tiers end at any time: steps are single.
        first = cores[0]
        self._joins = fast_forward and first.spec.decoding is None and first.loading is None
        self._balance = balance
        self._waited = Waited()
        self._works: list[RankWork] = []
        """The work of each rank behind the first of the steps in flight."""
        self._n_steps = 0
        """Steps in flight; 0: none."""

    @property
    def _span(self) -> Span:
        """The steps in flight, as one of the ranks has them; each ends them when all do."""
        return next(batch.span for batch in self._batches if batch.span is not None)

    def _turn(self, now_ns: int, /) -> int:
        ticks = self._ticks
        if self._n_steps:
            self._end(ticks)
        elif ticks < now_ns << TICK_BITS:
            ticks = now_ns << TICK_BITS
        end = self._start(ticks)
        if end != NOTHING:
            self._ticks = end
            return end >> TICK_BITS
        self._ticks = ticks
        return self._rest(now_ns, ticks)

    def _end(self, ticks: int) -> None:
        """The steps in flight have ended, on all ranks."""
        n, self._n_steps = self._n_steps, 0
        self.events += 1
        if self._balance is not None:
            for _ in range(n - 1):
                _, self._waited = self._balance.start(self._works, self._waited)
        for core, batch in zip(self.cores, self._batches, strict=True):
            if batch.span is not None:
                if batch.held is not None:
                    batch.held.left -= n - 1
                core.commit(batch, n, ticks)

    def _start(self, ticks: int) -> int:
        """Ask every rank at *ticks* and start what they plan, together; return the tick at which that ends, or NOTHING."""
        totals, draft_steps = [IDLE] * len(self.cores), [0] * len(self.cores)
        taking: list[int] = []
        if self._balance is not None:
            self._let_prompts_start(self._balance)
        for rank, (core, batch) in enumerate(zip(self.cores, self._batches, strict=True)):
            if core.begin(batch, ticks) != NOTHING:
                taking.append(rank)
                assert batch.prepared is not None
                totals[rank], draft_steps[rank] = batch.prepared.priced, batch.prepared.draft_steps
        if not taking:
            return NOTHING
        n = self._steps_alike(taking) if self._joins else 1
        if n >= _FEWEST:
            return self._start_several(taking, totals, n, ticks)
        self._n_steps = 1
        duration = self._prices.step(totals, draft_steps)
        for rank in taking:
            self.cores[rank].iterations.launch(self._batches[rank], ticks, duration)
        return ticks + duration

    def _let_prompts_start(self, balance: PromptBalance) -> None:
        starts, self._waited = balance.start(self._works_now(), self._waited)
        for core in self.cores:
            core.planner.let_prompts_start(starts)

    def _works_now(self) -> list[RankWork]:
        return [
            RankWork(bool(core.sequences.queue or batch.partial), bool(batch.decoding.n or batch.paused))
            for core, batch in zip(self.cores, self._batches, strict=True)
        ]

    # Several steps as one event.

    def _steps_alike(self, taking: Sequence[int]) -> int:
        """The number of steps in which all ranks do the same if nothing arrives: decodes, and nothing else."""
        if any(core.sequences.busy for rank, core in enumerate(self.cores) if rank not in taking):
            return 1
        if self._balance is not None:
            # Messages may have brought prompts since the last check of whether prompts may start, which precedes every step.
            self._works = self._works_now()
            if self.cores[0].planner.prompts_wait and any(work.prompts for work in self._works):
                return 1
        n = _MOST
        for rank in taking:
            n = self._steps_of(self.cores[rank], self._batches[rank], n)
        return n

    def _steps_of(self, core: EngineCore, batch: MicroBatch, n: int) -> int:
        """The most of *n* steps for which a rank does what it is about to do."""
        held, decoding, prepared = batch.held, batch.decoding, batch.prepared
        if n == 1 or held is None or batch.run or not isinstance(decoding, DecodeSet):
            return 1
        assert prepared is not None
        n = min(n, held.left + 1, decoding.until_finish(), decoding.until_bend())
        return decoding.rounds_within(core.sequences.kv.free + prepared.growth, n) if n > 1 else n

    def _start_several(self, taking: Sequence[int], totals: Sequence[Totals], n: int, ticks: int) -> int:
        """*n* steps as one event, fewer where a plan ends at an instant."""
        growth = [(0, 0)] * len(totals)
        sets = {rank: decoding for rank in taking if isinstance(decoding := self._batches[rank].decoding, DecodeSet)}
        for rank, decoding in sets.items():
            growth[rank] = decoding.n, decoding.window_growth
        ends = self._prices.steps(totals, growth, n).cumsum()
        until_ns = min(held.until_ns for rank in taking if (held := self._batches[rank].held) is not None)
        if until_ns < ALWAYS_NS:
            # The first is run in any case; a further one if the one before it ends before that instant.
            ends = ends[: int(ends.searchsorted((until_ns << TICK_BITS) - ticks)) + 1]
        n = len(ends)
        step = np.arange(n)
        for rank, decoding in sets.items():
            core, batch = self.cores[rank], self._batches[rank]
            prepared = batch.prepared
            assert prepared is not None
            batch.prepared = None
            kv, window = growth[rank]
            batch.span = SpeculativeSpan(
                ticks, ends, prepared.growth, decoding,
                prepared.priced.decode_kv_tokens + step * kv, prepared.priced.decode_kv_window + step * window,
                np.full(n, decoding.n),
            )  # fmt: skip
            batch.span.open(core.recorder, core.iterations.standing(batch))
        self._n_steps = n
        return ticks + int(ends[-1])

    # Called by the machine.

    def arrive(self, core: EngineCore, now_ns: int, /) -> None:
        held = core.batches[0].held
        if self._n_steps > 1 and held is not None and held.through_arrivals and self._balance is None:
            # Its plan is the same whatever waits.
            core.recorder.queued_ns.append(now_ns)
        else:
            self.heed(now_ns)

    def heed(self, now_ns: int, /) -> None:
        """Idle ranks start a step; others end with the one in flight."""
        if not self._n_steps:
            self._alarm.set(now_ns)
        elif self._n_steps > 1:
            j = self._span.index_at(now_ns << TICK_BITS)
            if j < self._n_steps:
                self._n_steps = j
                self._ticks = self._span.end(j)
                for core, batch in zip(self.cores, self._batches, strict=True):
                    if batch.span is not None:
                        batch.span.cut(j, core.recorder)
                self._alarm.set(self._ticks >> TICK_BITS)

    def stop(self, now_ns: int, /) -> None:
        self._alarm.cancel()
        if self._n_steps:
            span = self._span
            done = span.index_at(now_ns << TICK_BITS) - 1
            end = span.end(done) if done else self._ticks
            for core, batch in zip(self.cores, self._batches, strict=True):
                if batch.span is not None:
                    core.stop(batch, done, end)
        self._n_steps = 0
        self._waited = Waited()
        self._ticks = now_ns << TICK_BITS

    # Nothing planned.

    def _stuck(self) -> list[EngineCore]:
        # A rank waits for other machines alone; ranks have no memory in common.
        if any(core.n_loading for core in self.cores):
            return []
        return [core for core in self.cores if core.sequences.busy and not core.sequences.connector.awaits]

    def _planned_nothing(self, core: EngineCore, ticks: int, where: str = "") -> PolicyError:
        return super()._planned_nothing(core, ticks, f" on rank {self.cores.index(core)}")


class RankedMachine(Machine):
    """Serves the requests that are delivered to it on one of its ranks each.

    To the rest of the run it is a machine; its engine cores are its ranks.
    """

    def __init__(
        self, common: InCommon, index: int, spec: MachineSpec, first_number: int, part: Part | None = None
    ) -> None:
        """*first_number*: of its first rank, among all engine cores of the run; *part*: what it has to do with handing over."""
        (of_each,) = spec.hosted
        assert not isinstance(of_each.cost, StageTable)
        pricing = Pricing(of_each.cost, of_each.draft_cost, of_each.speculation_overhead_s)
        self._prices = CommonPrices(pricing, spec.ranks)
        super().__init__(common, index, spec, first_number, part)
        self._router = spec.rank_router
        assert spec.rank_router is not None
        self._route_of = route_of(spec.rank_router)
        self._draws: NDArray[np.float64] | None = None
        """Numbers that the router draws, by request."""
        self._seed = common.seed
        self._n_routed = 0

    def _made(self, common: InCommon, spec: MachineSpec, first_number: int, part: Part | None) -> list[EngineCore]:
        (of_each,) = spec.hosted
        return [
            EngineCore(
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

    def _turns_of(self, common: InCommon, spec: MachineSpec) -> Turns:
        fast_forward = common.fast_forward
        return Together(self.cores, self._prices, spec.prompt_balance, common.clock, fast_forward=fast_forward)

    @property
    def n_stages(self) -> int:
        """A rank that has no work idles while others step, as a machine would."""
        return len(self.cores)

    def found_tokens(self, request: RoutedRequest) -> int:
        """Tokens of the prompt that are cached on the rank that has most of it; the router inside may choose another."""
        return max(load.found_tokens(request) for load in self._loads)

    def core_of(self, model: int) -> EngineCore:
        return self.cores[0]

    # Called from outside.

    def deliver(self, id_: int, kv_tokens: int = 0) -> None:
        """Queue a request with the KV of its first *kv_tokens* tokens; one that can never fit is rejected with its reason."""
        rank = self._rank_for(id_)
        if isinstance(rank, Refused):
            self._state.replica[id_] = self.cores[max(rank.at, 0)].number
            self._outside.rejected(id_, rank.reason)
            return
        core = self.cores[rank]
        if self._accept(core, id_, kv_tokens):
            self.turns.arrive(core, self._clock.now_ns)

    def _rank_for(self, id_: int) -> int | Refused:
        state = self._state
        if self._draws is None or id_ >= len(self._draws):
            # By request, in whatever order requests arrive.
            n = max(len(state.prompt), 2 * id_)
            self._draws = np.random.default_rng([self._seed, _RANK_STREAM]).random((n, 2))
        request = RoutedRequest(
            id_,
            state.prompt[id_],
            self._model(id_),
            tuple(self._draws[id_].tolist()),
            state.arrival[id_],
            -1 if state.deadline is None else state.deadline[id_],
            self._n_routed,
            priority=0 if state.priority is None else state.priority[id_],
        )
        self._n_routed += 1
        answer = self._route_of(request, self._loads)
        if not isinstance(answer, Refused) and not 0 <= answer < len(self.cores):
            raise PolicyError(
                f"{self._router!r} sent request {id_} to rank {answer!r}; expected 0 to {len(self.cores) - 1}"
            )
        return answer

    def core_for(self, id_: int) -> EngineCore:
        rank = self._rank_for(id_)
        if isinstance(rank, Refused):
            raise PolicyError(
                f"{self._router!r} refused request {id_}, whose KV comes from another machine; take a router that refuses none"
            )
        return self.cores[rank]

    def _serving(self, id_: int) -> EngineCore:
        return self.cores[self._state.replica[id_] - self.cores[0].number]


def machine_of(common: InCommon, index: int, spec: MachineSpec, first_number: int, part: Part | None = None) -> Machine:
    """The machine that *spec* describes; *first_number* and *part*: as of a `Machine`."""
    kind = RankedMachine if spec.ranks > 1 else Machine
    return kind(common, index, spec, first_number, part)


def ranked(machines: Sequence[Machine]) -> list[tuple[int, int]]:
    """The numbers of the first and the last rank, for each machine with ranks."""
    return [
        (machine.cores[0].number, machine.cores[-1].number)
        for machine in machines
        if isinstance(machine, RankedMachine)
    ]
