"""One model on a machine: its queue, its scheduler, its sequences, its KV memory and its prices.

An engine core has one `MicroBatch` for each that may be in flight. The machine decides when one may plan; `EngineCore.begin` then
reads what has arrived, shows the micro-batch to the scheduler, carries its plan out and starts the iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple, Protocol

import numpy as np

from hwmodels.totals import Totals, pairs_within
from policies.view import ALWAYS_NS, Plan, ReplicaView, admits_in_turn, asks_beginnings, drafts_prompts, looks_itself
from sim.engine.batch.async_scheduling import as_known
from sim.engine.batch.decode_set import DecodeSet
from sim.engine.batch.micro_batch import BatchPrice, Elsewhere, MicroBatch, RunningView
from sim.engine.batch.prices import AdapterPrices, Prices, prices_of
from sim.engine.batch.speculative_set import SpeculativeSet
from sim.engine.batch.stages import Stages
from sim.engine.batch.version import HeldPlan
from sim.engine.cache.radix_cache import RadixCache
from sim.engine.kv.caching_pool import CachingPool
from sim.engine.record.columns import ABORTED, IntArray, Recorder, ReplicaColumns, RoundCounts, sum_rounds
from sim.engine.record.spill import Spill
from sim.engine.requests.state import RequestState
from sim.engine.serve.adapters import Adapters
from sim.engine.serve.images import Images
from sim.engine.serve.iterations import NO_PROMPTS, Iterations
from sim.engine.serve.kv_connector import Outside
from sim.engine.serve.loading import Loading
from sim.engine.serve.planner import Planner
from sim.engine.serve.preemption import preempt_in_turn
from sim.engine.serve.sequences import Sequences, let_go, refuse, take_for_rounds
from sim.engine.serve.sequences import hand_back as give_all_back
from sim.engine.spec.experiment import ReplicaSpec
from sim.engine.spec.roles import OneEach, Part
from sim.engine.tiers.tiers import SharedStores, Tiers
from sim.engine.time.clock import TICK_BITS
from sim.engine.time.events import ARRIVALS, Alarm, Clock

NOTHING: Final = -1
"""`EngineCore.begin` returns this where nothing was started."""
ASK_AGAIN: Final = -2
"""Nothing was started, and the scheduler would see something else now."""

_MADE_AT_ONCE = 64
"""A model that may have more micro-batches than these makes each of them when it is needed."""


class RoundsElsewhere(Protocol):
    """Rounds of sequences that are not kept in the micro-batch."""

    @property
    def release(self) -> str: ...

    def emitted(self) -> dict[int, IntArray] | None: ...

    def speculation(self) -> RoundCounts | None: ...


class InCommon(NamedTuple):
    """The machines of a run, and their engine cores, share this."""

    clock: Clock
    state: RequestState
    outside: Outside
    seed: int
    fast_forward: bool
    prices: dict[int, Prices]
    """Prices of iterations, worked out once for all replicas that one `ReplicaSpec` describes, by its identity."""
    stores: SharedStores
    """KV memory and links that machines share."""
    spill: Spill | None = None
    """Takes the records of iterations that are more than memory should hold."""


class EngineCore:
    """Serves the requests of one model that are routed to its machine."""

    def __init__(
        self, common: InCommon, number: int, spec: ReplicaSpec, stages: Stages, *,
        alone: bool, machine: int, prices: Prices | None = None, part: Part | None = None,
    ) -> None:  # fmt: skip
        """*number*: of the run's engine cores; *alone*: no pipeline and no other engine core, so that decodes may be held;
        *prices*: for a rank, whose iterations begin and end with those of others; *part*: the machine's part in hand-over."""
        state = common.state
        is_rank = prices is not None
        self.number = number
        self.spec = spec
        self._max_batches = spec.micro_batches or len(stages)
        self.recorder = recorder = Recorder(
            common.spill, n_recent=0 if alone else self._max_batches, n_stages=len(stages)
        )
        self.sequences = sequences = Sequences(spec, state, common.outside, recorder, alone=alone, part=part)
        if prices is None:
            prices = common.prices.get(id(spec)) or prices_of(
                spec.cost, spec.draft_cost, spec.speculation_overhead_s, drafts_prompts=drafts_prompts(spec.scheduler)
            )
            common.prices[id(spec)] = prices
        self.adapters: Adapters | None = None
        if spec.adapters is not None and sequences.waiting_by_adapter is not None:
            prices = AdapterPrices(prices)
            self.adapters = Adapters(spec.adapters, sequences.waiting_by_adapter, prices, common.clock)
        self.state = state
        self.stages = stages
        self.alone = alone
        self._seed = common.seed
        self._kv = sequences.kv
        clock = common.clock
        sequences.kv.now_ns = lambda: clock.now_ns
        self.driven: RoundsElsewhere | None = None
        """Set where the scheduler drives itself (`sim.engine.machine.driven`)."""
        self._version = sequences.version
        self._ahead = sequences.ahead
        self._finding = sequences.prefix_lookup
        self._late = sequences.kv.caches_late
        self._frees_at_the_end = sequences.kv.caches and sequences.ahead is None
        """Sequences that have ended free their blocks at once, and not when a plan knows it."""
        self.loading: Loading | None = None
        if spec.tiers and (sequences.kv.caches or spec.swaps):
            self.loading = self._loading_of(machine, common.stores)
        self.iterations = iterations = Iterations(
            spec, sequences, recorder, prices, stages, alone=alone, is_rank=is_rank, fast_forward=common.fast_forward
        )
        iterations.adapters = self.adapters
        self.planner = Planner(spec, sequences, self.loading, alone=alone, is_rank=is_rank)
        by_step = is_rank or not alone
        self._steps_singly = by_step or bool(iterations.pads_to)
        """Decodes are started one iteration after the other, and not as spans."""
        self._holds = by_step and common.fast_forward and not iterations.pads_to
        """A micro-batch holds plans of decodes alone, and carries them out one iteration after the other."""
        self._hears = self._what_it_hears()
        self._paused_ns = self.paused_until_ns = 0
        """The latest pause; 0: there was none."""
        self._notes = self._what_it_notes()
        self.batches: list[MicroBatch] = []
        self.images = None if spec.images is None else Images(spec.images, state, self.batches)
        iterations.images = self.images
        sequences.prefix_lookup.batches = self.batches
        for _ in range(self._max_batches if self._max_batches <= _MADE_AT_ONCE else 1):
            self.add_batch()

    # Micro-batches.

    @property
    def may_add_batch(self) -> bool:
        """Whether more micro-batches may be in flight than there are."""
        return len(self.batches) < self._max_batches

    def add_batch(self) -> MicroBatch:
        """Make one micro-batch more."""
        spec, kv, state, iterations = self.spec, self._kv, self.state, self.iterations
        decoding = (
            DecodeSet(spec.block_tokens, iterations.window)
            if spec.decoding is None
            else SpeculativeSet(
                spec.block_tokens, iterations.window, spec.decoding, self._seed, state.rounds,
                lookahead_tokens=kv.lookahead_tokens, max_model_len=spec.max_model_len, ahead=self._ahead is not None,
            )
        )  # fmt: skip
        batch = MicroBatch(len(self.batches), decoding)
        looks_for_itself = looks_itself if self._late else admits_in_turn
        batch.view = ReplicaView(
            block_tokens=spec.block_tokens,
            total_blocks=kv.total,
            running=RunningView(batch, self.sequences.running_seq),
            price=BatchPrice(batch, iterations.prices, self.stages, iterations.window, iterations.pads_to),
            elsewhere=Elsewhere(self.batches, batch) if self._max_batches > 1 else (),
            prompt_tokens=state.prompt,
            max_tokens=OneEach(state.carried) if self.sequences.hands_over else state.max_tokens,
            by_chunk=kv.by_chunk,
            lookahead_tokens=kv.lookahead_tokens,
            draft_slots=spec.draft_slots,
            max_model_len=ALWAYS_NS if spec.max_model_len is None else spec.max_model_len,
            terms=state.terms,
            adapters=None if self.adapters is None else self.adapters.seen(batch),
            images=self.images,
            cache=kv if kv.caches and (looks_for_itself(spec.scheduler) or asks_beginnings(spec.scheduler)) else None,
        )
        self.batches.append(batch)
        return batch

    # Planning.

    def begin(self, batch: MicroBatch, ticks: int) -> int:
        """Ask the scheduler at *ticks* and start what it plans; return the tick at which that ends, or NOTHING.

        For a rank the tick is not known yet: any other answer than NOTHING means that an iteration is prepared, and the machine
        launches it (`sim.engine.machine.groups`).
        """
        if self.paused_until_ns and self._is_paused(batch, ticks >> TICK_BITS):
            batch.wake_ns = self.paused_until_ns
            return NOTHING
        planner = self.planner
        while True:
            for hear in self._hears:
                hear(batch, ticks)
            if batch.held is not None:
                if self._still_holds(batch, batch.held, ticks):
                    return self._go_on(batch, batch.held, ticks)
                batch.held = None
            plan = planner.plan(batch, ticks)
            if plan is None:
                if planner.plans_now():
                    continue
                batch.wake_ns = ALWAYS_NS
                return NOTHING
            end = self._carry_out(batch, plan, ticks)
            if end >= 0:
                return end
            if not self._asks_again(batch, plan, ticks, changed=end == ASK_AGAIN):
                batch.wake_ns = plan.until_ns
                return NOTHING

    def pause(self, now_ns: int, until_ns: int) -> None:
        """No iteration is planned from now on until then."""
        self._paused_ns, self.paused_until_ns = now_ns, until_ns
        self.sequences.version.hear(now_ns)

    def _is_paused(self, batch: MicroBatch, now_ns: int) -> bool:
        """Whether the coming iteration would be planned in the pause; one that was planned ahead of it is carried out."""
        ahead = self._ahead
        planned_ns = now_ns if ahead is None or ahead.seen_ns == ALWAYS_NS else ahead.seen_ns
        if now_ns >= self.paused_until_ns or planned_ns < self._paused_ns:
            return False
        if ahead is not None:
            # The next plan is made when the pause is over, and knows which sequences have ended.
            ahead.reset()
            if batch.leaving:
                self._forget_the_leaving(batch)
        return True

    def schedules_prompts(self, batch: MicroBatch, ticks: int) -> bool:
        """Whether the scheduler would have prompts in the coming iteration were they shown."""
        for hear in self._hears:
            hear(batch, ticks)
        return self.planner.schedules_prompts(batch, ticks)

    def _still_holds(self, batch: MicroBatch, held: HeldPlan, ticks: int) -> bool:
        """Whether nothing has happened that a held plan does not let pass, and there is memory for its next iteration."""
        return held.holds(self._version, ticks >> TICK_BITS) and batch.decoding.growth_blocks <= self._kv.free

    def _asks_again(self, batch: MicroBatch, plan: Plan, ticks: int, *, changed: bool) -> bool:
        """Whether a plan that starts nothing was made ahead, has *changed* what the next one sees, or leaves sequences that block
        each other's memory, one of which gives it back."""
        planner = self.planner
        if planner.knows_more_now(batch) or changed:
            return True
        return planner.takes_memory_back(batch, plan.until_ns, ticks >> TICK_BITS)

    def _go_on(self, batch: MicroBatch, held: HeldPlan, ticks: int) -> int:
        """Carry a held plan out for one iteration more."""
        held.left -= 1
        # Routers that poll see it as a plan that is made now.
        batch.view.now_ns = ticks >> TICK_BITS
        return self.iterations.start(batch, NO_PROMPTS, batch.decoding.n, batch.decoding.growth_blocks, ticks)

    def _carry_out(self, batch: MicroBatch, plan: Plan, ticks: int) -> int:
        """Reject, preempt and pause as *plan* says, and start what it plans; return the tick at which that ends, or NOTHING."""
        sequences, iterations = self.sequences, self.iterations
        decode, run = plan.decode, plan.run
        wasted = None
        if batch.leaving:
            decode, wasted = as_known(batch.leaving, plan)
        if plan.reject or plan.shorten:
            refuse(sequences, plan.reject, plan.shorten)
        if plan.preempt or sequences.n_computed or batch.paused or (decode is not True and decode is not False):
            run = self._move(batch, plan, decode, ticks)
        n, growth = (batch.decoding.n, batch.growth) if decode else (0, 0)
        if wasted is not None:
            self._forget_the_leaving(batch)
            if wasted:
                return iterations.start(batch, run, n, growth, ticks, wasted)
        if run:
            return iterations.start(batch, run, n, growth, ticks)
        if not n:
            # The next plan sees its changes.
            return ASK_AGAIN if plan.preempt or plan.reject or plan.run else NOTHING
        if not self._steps_singly:
            return iterations.start_span(batch, plan, growth, ticks)
        if self._holds and plan.hold > 1:
            batch.held = HeldPlan(
                plan.hold - 1, self._version, through_arrivals=plan.through_arrivals, until_ns=plan.until_ns
            )
        return iterations.start(batch, run, n, growth, ticks)

    def _forget_the_leaving(self, batch: MicroBatch) -> None:
        if self._kv.writes:
            self._finding.note_the_leaving(batch)
        batch.forget_the_leaving()

    def _move(
        self, batch: MicroBatch, plan: Plan, decode: bool | tuple[int, ...], ticks: int
    ) -> tuple[tuple[int, int], ...]:
        """Preempt, join and pause as *plan* says; return what is left of its prompts."""
        sequences, decoding, run = self.sequences, batch.decoding, plan.run
        if plan.preempt:
            self._preempt_for(batch, plan, decode)
        if sequences.n_computed:
            run = sequences.join_the_decodes(batch, run, ticks)
        if decode is not False:
            sequences.choose_decodes(batch, decode)
        batch.growth = decoding.growth_blocks if decoding.n else 0
        return run

    def _preempt_for(self, batch: MicroBatch, plan: Plan, decode: bool | tuple[int, ...]) -> None:
        """Preempt the sequences that *plan* names."""
        sequences, kv = self.sequences, self._kv
        if kv.caches and self._finding.in_turn:
            preempt_in_turn(sequences, batch, decode, plan.run + plan.undone, plan.preempt)
            return
        if self._late:
            # Cached blocks are evicted before any sequence is preempted.
            kv.make_room(sequences.growth_of(batch))
        kept = batch.decoding.n + len(batch.paused) + len(batch.leaving)
        for id_ in plan.preempt:
            sequences.preempt(batch, id_)
            kept -= 1
            kv.gave_way(kept)

    # Reading what has arrived.

    def _what_it_hears(self) -> tuple[Callable[[MicroBatch, int], None], ...]:
        """The steps before a plan that this engine core needs, in order; none without a cache, tiers, other machines and aborted
        requests."""
        sequences, steps = self.sequences, list[Callable[[MicroBatch, int], None]]()
        if self.loading is not None:
            steps.append(self._land_loads)
        if sequences.given_up:
            steps.append(self._let_go)
        if sequences.grammars is not None and sequences.grammars.goes_first:
            steps.append(self._take_compiled)
        if self._ahead is not None and sequences.kv.caches:
            steps.append(self._free_the_ended)
        if sequences.connector.takes_part:
            steps.append(self._read_news)
        if self._late:
            steps.append(self._show_chunks)
        return tuple(steps)

    def give_up(self, id_: int, now_ns: int) -> None:
        """The client of a request that is here has gone."""
        grammars = self.sequences.grammars
        if grammars is not None and grammars.give_up(id_):
            self.state.status[id_] = ABORTED
            return
        first = not self.sequences.given_up
        self.sequences.give_up(id_, now_ns)
        if first:
            self._hears = self._what_it_hears()

    def _land_loads(self, batch: MicroBatch, ticks: int) -> None:
        assert self.loading is not None
        self.loading.tiers.now_ns = ticks >> TICK_BITS
        self.loading.land(ALWAYS_NS if self._ahead is None else self._ahead.seen_ns)

    def _let_go(self, batch: MicroBatch, ticks: int) -> None:
        if self.sequences.given_up:
            let_go(self.sequences, batch)
        else:
            self._hears = self._what_it_hears()

    def _take_compiled(self, batch: MicroBatch, ticks: int) -> None:
        self.sequences.take_compiled(ALWAYS_NS if self._ahead is None else self._ahead.seen_ns)

    def _free_the_ended(self, batch: MicroBatch, ticks: int) -> None:
        assert self._ahead is not None
        if self._finding.ended and self._ahead.seen_ns == ALWAYS_NS:
            self._finding.free_the_ended()

    def _read_news(self, batch: MicroBatch, ticks: int) -> None:
        connector = self.sequences.connector
        if connector.mail or connector.machines.wanted:
            connector.read(batch, ticks)

    def _show_chunks(self, batch: MicroBatch, ticks: int) -> None:
        if batch.partial:
            self._finding.go_on(batch)

    # Ending.

    def commit(self, batch: MicroBatch, done: int, end_ticks: int) -> None:
        """Account for the first *done* iterations of the span in flight, one at least, which end at *end_ticks*: all of them, or
        fewer when the machine stops."""
        span = batch.span
        assert span is not None
        if done < span.n or not span.is_recorded:
            span.close(self.recorder, done)
        if self._ahead is not None:
            # Each iteration of a span but its first goes on with a plan that counts as made while the one before ran.
            self._ahead.made |= done > 1
            self._ahead.seen_ns = (span.end(done - 1) if done > 1 else span.start_ticks) >> TICK_BITS
        sequences, end_ns = self.sequences, end_ticks >> TICK_BITS
        for note in self._notes:
            note(batch, span.start_ticks, end_ticks)
        if done > 1:
            take_for_rounds(self._kv, batch, done)
        batch.span = None
        batch.rounds_taken = 1
        if batch.decodes:
            batch.last_round_ns = end_ns
            departures = batch.decoding.advance(done)
            sequences.in_vain = 0
            if departures:
                sequences.end_all(batch, departures, end_ns)
        if batch.completing:
            sequences.complete_prompts(batch, end_ns)
        if self.state.told is not None:
            self.state.told(batch, end_ns)
        if self._frees_at_the_end and self._finding.ended:
            self._finding.free_the_ended()

    def _what_it_notes(self) -> tuple[Callable[[MicroBatch, int, int], None], ...]:
        """The steps at the end of iterations that this engine core needs, in order; none without adapters and tiers."""
        steps = list[Callable[[MicroBatch, int, int], None]]()
        if self.adapters is not None:
            steps.append(self._note_adapters)
        if self.loading is not None:
            steps.append(self._write_prompts)
        return tuple(steps)

    def _note_adapters(self, batch: MicroBatch, start_ticks: int, end_ticks: int) -> None:
        assert self.adapters is not None
        self.adapters.ran(start_ticks, end_ticks)

    def _write_prompts(self, batch: MicroBatch, start_ticks: int, end_ticks: int) -> None:
        """Tell the tiers which prompt blocks a step has computed. A tree tells them itself what is put into it."""
        assert self.loading is not None
        tiers = self.loading.tiers
        tiers.now_ns = end_ticks >> TICK_BITS
        for id_, _ in () if self._late else batch.run:
            computed = min(batch.partial[id_].cached_tokens, self.state.prompt[id_])
            tiers.computed(id_, computed // self._kv.block_tokens)

    def stop(self, batch: MicroBatch, done: int, end_ticks: int) -> None:
        """Commit the first *done* iterations of the span in flight, in the middle of which the machine stops."""
        span = batch.span
        assert span is not None
        if not done:
            batch.span = None
            span.close(self.recorder, 0)
            batch.undo_prompts()
            return
        if done < span.n:
            # The step in flight has taken its blocks, and what was evicted for them is gone.
            take_for_rounds(self._kv, batch, done + 1)
        self.commit(batch, done, end_ticks)

    def drop_in_flight(self) -> None:
        """Forget the micro-batches that have not left the last stage."""
        n_in_flight = sum(batch.span is not None for batch in self.batches)
        self.recorder.spans.drop_last(n_in_flight)
        self.recorder.stages.drop_last(n_in_flight * len(self.stages))
        for batch in self.batches:
            if batch.span is not None:
                batch.undo_prompts()
            batch.span = None
            batch.held = batch.view.memo = None
            batch.wake_ns = ALWAYS_NS

    def hand_back(self) -> list[int]:
        """Give up everything; see `sim.engine.serve.sequences.hand_back`."""
        if self.adapters is not None:
            self.adapters.reset()
        if self.images is not None:
            self.images.reset()
        return give_all_back(self.sequences, self.batches)

    # KV from elsewhere.

    def _loading_of(self, machine: int, shared: SharedStores) -> Loading:
        spec, kv, state = self.spec, self._kv, self.state
        contents = state.contents_in(spec.block_tokens) if kv.caches and state.contents_in is not None else None
        space = (-1 if spec.model is None else spec.model, spec.block_tokens, spec.block_bytes)
        tiers = Tiers(spec.tiers, space, contents, self.recorder, shared, machine=machine, number=self.number)
        tiers.price_ns = self._prompt_ns
        if isinstance(kv, CachingPool):
            kv.gives_up = tiers.evicted if tiers.takes_evicted else None
        if isinstance(kv, RadixCache):
            kv.put_in = tiers.computed
        return Loading(self.sequences, tiers, swaps=spec.swaps)

    def _prompt_ns(self, tokens: int, cached: int) -> int:
        """Time of an iteration (ns) that computes *tokens* prompt tokens behind *cached* others, and nothing else."""
        window = self.iterations.window
        pairs = tokens * cached + tokens * (tokens + 1) // 2
        within = 0 if window is None else pairs_within(cached, tokens, window)
        totals = Totals(tokens, tokens, 1, pairs, cached + tokens, 0, 0, 1, within, 0)
        return sum(self.iterations.prices.stages(totals, 0)[0]) >> TICK_BITS

    def ring_when_loaded(self, clock: Clock, callback: Callable[[EngineCore], None]) -> None:
        """Have *callback* called whenever a load from a tier ends."""
        if self.loading is not None:
            self.loading.rings_at = partial(self._ring_at, clock, callback)

    def _ring_at(self, clock: Clock, callback: Callable[[EngineCore], None], at_ns: int) -> None:
        Alarm(clock, ARRIVALS, lambda _event: callback(self)).set(at_ns)

    def ring_when_compiled(self, clock: Clock, callback: Callable[[EngineCore, int, int], None]) -> None:
        """Have *callback* called with a request, and its tokens with KV, whenever the grammar that it waits for is done."""
        grammars = self.sequences.grammars
        if grammars is None:
            return

        def ring(id_: int, at_ns: int) -> None:
            Alarm(clock, ARRIVALS, lambda _event: done(id_)).set(at_ns)

        def done(id_: int) -> None:
            kv_tokens = grammars.done(id_, clock.now_ns)
            if kv_tokens >= 0:
                callback(self, id_, kv_tokens)

        grammars.rings_at = ring

    @property
    def n_loading(self) -> int:
        """Requests whose KV is on its way from a tier."""
        return len(self.sequences.connector.tiers.in_transit)

    def gives_room_up(self) -> bool:
        """Call `KvConnector.surrender` where a sequence with its KV cannot be admitted; return whether one gave its blocks up."""
        return self.sequences.connector.surrender()

    # Results.

    @property
    def finds(self) -> bool:
        """Whether blocks are found again by their content, here or by a scheduler that drives itself."""
        by_content = self.spec.prefix_cache is not None and self.state.contents_in is not None
        return self._kv.caches or (self.driven is not None and by_content)

    def columns(self) -> ReplicaColumns:
        """The records of the run."""
        recorder, kv = self.recorder, self._kv
        speculates = self.spec.decoding is not None
        return ReplicaColumns(
            spans=recorder.all_spans(kv.block_tokens),
            joins=recorder.joins.array(),
            queued_ns=np.array(recorder.queued_ns, np.int64),
            resumed_gaps_ns=np.array(recorder.resumed_gaps_ns, np.int64),
            stages=recorder.all_stages(),
            kv_blocks_total=kv.total,
            block_tokens=kv.block_tokens,
            n_stages=len(self.stages),
            transfers=recorder.transfers.array(),
            tiered=self.loading is not None,
            adapters=None if self.adapters is None else self.adapters.columns(),
            extras=recorder.extras.array(),
            emitted=self.driven.emitted()
            if self.driven is not None
            else _emitted(self.batches)
            if speculates
            else None,
            speculation=(
                self.driven.speculation()
                if self.driven is not None
                else sum_rounds(batch.decoding.speculation() for batch in self.batches)
                if speculates
                else None
            ),
        )


def _emitted(batches: Sequence[MicroBatch]) -> dict[int, IntArray]:
    found = {batch.index: batch.decoding.emitted() for batch in batches}
    return {index: tokens for index, tokens in found.items() if tokens is not None}
