"""One model on a machine: its queue, its scheduler, its sequences, its KV memory and its prices.

A tenant has one *lane* for each micro-batch that may be in flight. It shows its scheduler a view of a lane, carries the plan out
and commits what has ended; when a lane may plan, the machine says.
"""

# pyright: reportPrivateUsage=false
# The functions below the class are the tenant's own, kept outside of it so that either can be read in one sitting.

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from hwmodels.reach import Window
from hwmodels.totals import Totals, pairs_within, seen
from policies.view import ALWAYS_NS, PartialSeq, Plan, ReplicaView, admits_in_turn, looks_itself, pads_to, plan_of
from sim.engine.ahead import as_known
from sim.engine.clock import TICK_BITS
from sim.engine.columns import IntArray, Recorder, ReplicaColumns, sum_rounds
from sim.engine.errors import PolicyError
from sim.engine.events import ARRIVALS, Alarm, Clock
from sim.engine.experiment import ReplicaSpec
from sim.engine.lane import Elsewhere, Ended, HeldPlan, Lane, LanePrice, Prepared, QueueView, RunningView
from sim.engine.loading import Loading
from sim.engine.padding import padded
from sim.engine.prices import Prices, prices_of
from sim.engine.requests import RequestState
from sim.engine.roles import OneEach, Part
from sim.engine.running import RunningSet
from sim.engine.runs import RunPool
from sim.engine.sequences import Outside, Sequences, give_way_in_turn, let_go, refuse, take_for_rounds
from sim.engine.sequences import hand_back as give_all_back
from sim.engine.span import Step
from sim.engine.spill import Spill
from sim.engine.stages import Stages
from sim.engine.taped import TapedSet
from sim.engine.tiers import SharedStores, Tiers
from sim.engine.uniform import UniformSet

NOTHING: Final = -1
"""What `Tenant.begin` returns where nothing was started."""

_LANES_AT_ONCE = 64
"""More micro-batches than these get their lanes when they are needed."""

_NOBODY: Final[Mapping[int, Ended]] = {}

_new: Final = tuple[object, ...].__new__
"""Builds a NamedTuple without the detour through its constructor: a third of the time, several times an iteration."""


class InCommon(NamedTuple):
    """What the machines of a run have in common, and their tenants."""

    clock: Clock
    state: RequestState
    outside: Outside
    seed: int
    fast_forward: bool
    prices: dict[int, Prices]
    """Prices of iterations, worked out once for all replicas that one `ReplicaSpec` describes, by its identity."""
    stores: SharedStores | None = None
    """What machines read of each other's KV."""
    spill: Spill | None = None
    """Takes the records of iterations that are more than memory should hold."""


class Tenant:
    """Serves the requests of one model that are routed to its machine."""

    def __init__(
        self, common: InCommon, number: int, spec: ReplicaSpec, stages: Stages, *,
        alone: bool, machine: int, prices: Prices | None = None, part: Part | None = None,
    ) -> None:  # fmt: skip
        """*number*: of the run's tenants; *alone*: no pipeline and no other tenant, so that decodes may be held; *prices*: of a
        rank, whose steps its machine takes together with others, and ends (`launch`); *part*: what the machine has to do with
        handing over."""
        state = common.state
        self._is_rank = prices is not None
        self.number = number
        self.spec = spec
        self._max_lanes = spec.micro_batches or len(stages)
        self.recorder = Recorder(common.spill, n_recent=0 if alone else self._max_lanes, n_stages=len(stages))
        self.sequences = sequences = Sequences(spec, state, common.outside, self.recorder, alone=alone, part=part)
        self._exchange = sequences.exchange
        self.n_in_flight = 0
        if prices is None:
            prices = common.prices.get(id(spec)) or prices_of(spec.cost, spec.draft_cost, spec.speculation_overhead_s)
            common.prices[id(spec)] = prices
        self.prices = prices
        self.state = state
        self.stages = stages
        self.alone = alone
        self.prompts_wait = False
        """Of a rank: no prompt is shown to the scheduler, whoever waits."""
        self._by_step = self._is_rank or not alone
        """Decodes are started one iteration after the other, by a plan that a lane holds."""
        self._fast_forward = common.fast_forward
        self._seed = common.seed
        # object: what a policy of somebody else's answers is looked at before it is believed.
        self._plan: Callable[[ReplicaView], object] = plan_of(spec.scheduler)
        self._pads_to = pads_to(spec.scheduler)
        self._window: Window = spec.cost.window_tokens
        self._kv = sequences.kv
        self._queue = sequences.queue
        self._ahead = sequences.ahead
        self._by_chunk = sequences.kv.by_chunk
        self._caches = sequences.kv.caches
        self._late = sequences.kv.caches_late
        self._finding = sequences.finding
        self._in_turn = sequences.finding.in_turn
        shown = sequences.finding.described if sequences.finding.described_to_it else None
        self._queue_view = QueueView(sequences.queue, shown)
        self.n_sent = 0
        self._speculates = spec.decoding is not None
        self.lanes: list[Lane] = []
        sequences.finding.lanes = self.lanes
        self.loading: Loading | None = None
        if spec.tiers and (self._caches or spec.swaps):
            self.loading = _loading_of(self, machine, common.stores or SharedStores(peers=False))
        self.ready: deque[Lane] = deque()
        """Lanes that are not in flight, the longest idle first."""
        for _ in range(self._max_lanes if self._max_lanes <= _LANES_AT_ONCE else 1):
            _add_lane(self)

    def next_lane(self) -> Lane | None:
        """The lane that has been idle longest, taken from `ready`; None where all are in flight."""
        if not self.ready and len(self.lanes) < self._max_lanes:
            _add_lane(self)
        return self.ready.popleft() if self.ready else None

    # Planning.

    def begin(self, lane: Lane, ticks: int) -> int:
        """Ask the scheduler at *ticks* and start what it plans: the tick at which that ends, or NOTHING.

        Of a rank it is not known yet: what it answers stands for something, and `launch` says the end.
        """
        decoding, sequences = lane.decoding, self.sequences
        loading = self.loading
        while True:
            if loading is not None:
                loading.tiers.now_ns = ticks >> TICK_BITS
                loading.land(ALWAYS_NS if self._ahead is None else self._ahead.seen_ns)
            if sequences.given_up:
                let_go(sequences, lane)
            if self._finding.ended and self._ahead is not None and self._ahead.seen_ns == ALWAYS_NS:
                self._finding.free_the_ended()
            exchange = self._exchange
            if exchange is not None and (exchange.mail or exchange.asked):
                exchange.read(lane, ticks)
            if self._late and lane.partial:
                self._finding.go_on(lane)
            held = lane.held
            if held is not None:
                if _still_holds(self, held, decoding, ticks):
                    held.left -= 1
                    # Routers that poll are told of it as of a plan that is made now.
                    lane.view.now_ns = ticks >> TICK_BITS
                    return self._start_iteration(lane, (), decoding.n, decoding.growth_blocks, ticks)
                lane.held = None
            if self._speculates:
                decoding.follow_batch()
            n = decoding.n
            growth = decoding.growth_blocks if n else 0
            n_decoding, growth_of_all = n, growth
            if lane.paused:
                n_decoding += len(lane.paused)
                growth_of_all += sum(sequences.paused_growth(lane, paused) for paused in lane.paused.values())
            partial, queue = lane.partial, self._queue
            if lane.leaving and sequences.hands_over and not (n_decoding or partial or queue):
                # They are known to take no step, so that no plan is needed to say so.
                lane.forget_the_leaving()
            if not (n_decoding or partial or queue or lane.leaving):
                lane.view.memo = None
                if self._ahead is not None and _has_come(self, lane, ticks):
                    continue
                return NOTHING
            if sequences.brought.at_hand and growth_of_all > self._kv.free:
                assert loading is not None
                loading.make_room(growth_of_all)
            view = lane.view
            view.waiting = self._queue_view if queue else ()
            view.prefilling = tuple(partial.values()) if partial else ()
            view.n_decoding = n_decoding
            view.query_tokens = decoding.query_tokens
            view.free_blocks = self._kv.free
            view.growth_blocks = growth_of_all
            view.now_ns, view.rounds = ticks >> TICK_BITS, decoding.round
            view.after_prefill = bool(lane.run)
            # Those who have landed are still to be admitted.
            view.promised_blocks = sequences.promises.blocks - (0 if exchange is None else exchange.promised)
            unknown = self._ahead is not None and self._ahead.hide(lane, self._queue_view, given=not self._caches)
            if self.prompts_wait:
                view.waiting = view.prefilling = ()
            plan = self._plan(view)
            if not isinstance(plan, Plan):
                raise PolicyError(f"{self.spec.scheduler!r} answered {plan!r}; expected a policies.view.Plan")
            if loading is not None:
                plan = _with_loads(self, loading, lane, plan, growth_of_all)
            decode, run, preempt, hold, _, reject, _, view.memo, undone, order, shorten, looks = plan
            if looks is not None:
                self._kv.use(looks)
            stepping_on: Mapping[int, Ended] = _NOBODY
            if unknown:
                plan, stepping_on = as_known(lane, self._queue_view, plan)
                decode, _, _, hold, *_ = plan
            # Refused requests give back blocks that the plan did not count on, and preempted ones blocks that others ask for.
            if hold > 1 and (
                reject
                or (preempt and exchange is not None and exchange.asked)
                or _may_see_more(self, lane, ticks, unknown=unknown)
            ):
                hold, plan = 1, plan._replace(hold=1)
            if reject or shorten:
                refuse(sequences, reject, shorten)
            if self._late:
                self._finding.listed = order
            if preempt or decode is not True or lane.paused or sequences.n_computed:
                if preempt:
                    _give_way(self, lane, decode, run + undone, preempt, growth_of_all)
                if sequences.n_computed:
                    run = sequences.join_the_decodes(lane, run, ticks)
                if decode is not False:
                    sequences.choose_decodes(lane, decode)
                n = decoding.n if decode else 0
                growth = decoding.growth_blocks if n else 0
            if unknown:
                if self._caches and self._kv.writes:
                    self._finding.note_the_leaving(lane)
                lane.forget_the_leaving()
            if stepping_on:
                return self._start_iteration(lane, run, n, growth, ticks, stepping_on)
            if run or (n and (self._pads_to or self._by_step)):
                if hold > 1 and not run and self._fast_forward and not self._pads_to:
                    arrivals = -1 if plan.through_arrivals else sequences.n_arrivals
                    lane.held = HeldPlan(hold - 1, sequences.n_changes, arrivals, plan.until_ns)
                return self._start_iteration(lane, run, n, growth, ticks)
            if n:
                return _start_rounds(self, lane, plan, growth, ticks)
            changes = bool(preempt or reject) or len(run) < len(plan.run)
            if not _asks_again(self, lane, ticks, plan.until_ns, changes=changes):
                lane.wake_ns = plan.until_ns
                return NOTHING

    # Starting.

    def _start_iteration(
        self, lane: Lane, run: tuple[tuple[int, int], ...], n: int, growth: int, ticks: int,
        ended: Mapping[int, Ended] = _NOBODY,
    ) -> int:  # fmt: skip
        """One iteration with prompt chunks and a decode step of *n* sequences, all or none, that takes *growth* blocks; and a step
        of those who have *ended*, which comes to nothing."""
        sequences, kv, window = self.sequences, self._kv, self._window
        decoding, partials = lane.decoding, lane.partial
        block_tokens, by_chunk = kv.block_tokens, self._by_chunk
        blocks, in_vain = growth, 0
        found = loaded = evicted = 0
        caches = self._caches
        if caches:
            # Those who have ended take the blocks of a step that comes to nothing, and give them back.
            if ended:
                in_vain = sum(gone.growth_blocks for gone in ended.values())
            if not self._in_turn:
                self._finding.keep(self._queue, lane, run)
            blocks = 0
            if self._late:
                kv.before_prompts(sum(tokens for _, tokens in run), len(run))
            elif growth or in_vain:
                sequences.take(growth + in_vain, ticks)
        rows = pairs = pairs_window = prompt_kv = 0
        completing: list[int] = []
        for id_, tokens in run:
            partial = partials.get(id_)
            if partial is None:
                _, left, arrival_ns, model, deadline_ns, _, cached, priority, _, kept = sequences.admit(
                    lane, id_, ticks >> TICK_BITS, tokens
                )
                if not by_chunk:
                    blocks -= -(left + cached) // block_tokens
                had = kept or (kv.found(id_) if caches else 0)
                blocks -= had
                found += 0 if kept else had * block_tokens
                came = 0 if kept else sequences.brought.loaded_last
                if came:
                    # Its blocks are cached, too.
                    found -= min(-(-came // block_tokens), had) * block_tokens
                    loaded += came
            else:
                _, cached, left, arrival_ns, model, deadline_ns, priority = partial
                if by_chunk:
                    blocks -= kv.held(cached)
            remaining = left - tokens
            if remaining < 0 or tokens <= 0:
                raise PolicyError(
                    f"{self.spec.scheduler!r} planned {tokens} prompt tokens for request {id_}, "
                    f"of which {left} are left to compute"
                )
            rows += tokens
            pairs += tokens * cached + tokens * (tokens + 1) // 2
            if window is not None:
                pairs_window += pairs_within(cached, tokens, window)
            cached += tokens
            if by_chunk:
                blocks += kv.held(cached)
            if caches:
                if blocks:
                    sequences.take(blocks, ticks)
                kv.cached(id_, cached)
                blocks = 0
            prompt_kv += cached
            partials[id_] = _new(PartialSeq, (id_, cached, remaining, arrival_ns, model, deadline_ns, priority))
            if remaining == 0:
                completing.append(id_)
        if blocks:
            sequences.take(blocks, ticks)
        if caches:
            _all_taken(self, n, growth + in_vain, in_vain, ticks, ended)
            evicted = self.recorder.newly_evicted(kv.evicted) if run else 0
        query, draft_steps = decoding.query_tokens, decoding.draft_steps
        decode_rows = decode_kv = decode_window = emitted = 0
        if n:
            decode_rows = n * query
            decode_kv = decoding.cached + decode_rows
            emitted, decode_window = decoding.next_round()
        for gone in ended.values():
            kv_read = gone.cached + query
            decode_rows += query
            decode_kv += kv_read
            decode_window += 0 if window is None else seen(kv_read, window)
        output_left = self.state.left
        if self._exchange is None or not self._exchange.drops_token:
            for id_ in completing:
                emitted += output_left[id_] > 0
        n_completing = len(completing)
        totals = _new(
            Totals,
            (
                rows + decode_rows, rows, len(run), pairs, prompt_kv, n + len(ended), decode_kv, decode_rows + n_completing,
                pairs_window, decode_window,
            ),
        )  # fmt: skip
        lane.run = run
        lane.completing = completing
        lane.decodes = n > 0
        lane.through_arrivals = True
        self.n_in_flight += 1
        priced, bubble_ns = totals, 0
        if self._pads_to:
            context = max((seq.cached_tokens for seq in lane.view.running), default=0) if n else 0
            priced = padded(totals, run, query, context, self._pads_to, window)
        if self._is_rank:
            lane.prepared = Prepared(
                priced,
                draft_steps,
                (totals, draft_steps, query, n_completing, emitted),
                growth,
                len(ended),
                found,
                loaded,
                evicted,
            )
            return ticks
        if self.alone:
            duration = self.prices.iteration(priced, draft_steps)
        else:
            duration, bubble_ns = _through_stages(self, lane, priced, draft_steps, ticks)
        end = ticks + duration
        lane.span = Step(ticks, end, growth)
        self.recorder.add_iteration(
            ticks, duration, lane.index, totals, draft_steps, query, n_completing, emitted, sequences.n_admitted,
            len(self._queue), kv.total - kv.free, decoding.round, bubble_ns, len(ended), found, loaded, evicted,
        )  # fmt: skip
        return end

    # Ending.

    def commit(self, lane: Lane, done: int, end_ticks: int) -> None:
        """Account for the first *done* iterations of the span in flight, which end at *end_ticks*: all of them, or fewer when
        the machine stops."""
        span = lane.span
        assert span is not None
        lane.span = None
        self.n_in_flight -= 1
        if done < span.n or not span.is_recorded:
            span.close(self.recorder, done)
            if not done:
                _undo_prompts(lane)
                return
        if self._ahead is not None:
            self._ahead.seen_ns = (span.end(done - 1) if done > 1 else span.start_ticks) >> TICK_BITS
        sequences = self.sequences
        if lane.decodes:
            sequences.end_rounds(lane, done, span.growth_first, end_ticks >> TICK_BITS)
        if self.loading is not None and lane.run:
            _write_prompts(self.loading.tiers, lane, self.state.prompt, self._kv.block_tokens, end_ticks >> TICK_BITS)
        if lane.completing:
            sequences.complete_prompts(lane, end_ticks >> TICK_BITS)
        if self.state.told is not None:
            self.state.told(lane, end_ticks >> TICK_BITS)
        if self._finding.ended and self._ahead is None:
            self._finding.free_the_ended()


def _may_see_more(tenant: Tenant, lane: Lane, ticks: int, *, unknown: bool) -> bool:
    """Whether the next plan is the first that knows who has gone, or may be shown who waits, find more of a prompt or hear from
    another machine: the present one is then for one iteration."""
    sequences, loading, exchange = tenant.sequences, tenant.loading, tenant._exchange
    if tenant.prompts_wait and (tenant._queue or lane.partial):
        return True
    if sequences.given_up or (loading is not None and _may_learn(loading, ticks)):
        return True
    if tenant._queue and tenant._caches and tenant._finding.may_find_more(alone=tenant.alone):
        return True
    return exchange is not None and exchange.may_act(unknown=unknown)


def _asks_again(tenant: Tenant, lane: Lane, ticks: int, until_ns: int, *, changes: bool) -> bool:
    """Whether to plan anew where a plan starts nothing: it did not know all, *changes* what the next one sees, or leaves memory to
    those who hold it from each other. *until_ns*: the instant that it waits for."""
    sequences, ahead = tenant.sequences, tenant._ahead
    if ahead is not None and ahead.made:
        if tenant._speculates:
            sequences.start_anew(lane)
        return True
    if changes:
        return True
    closed = ticks >> TICK_BITS < until_ns < ALWAYS_NS
    if not sequences.brought.at_hand or sequences.n_admitted or lane.leaving or closed:
        return False
    # They hold memory from each other, or from who is ahead of them.
    assert tenant.loading is not None
    last = next(seq for seq in reversed(sequences.queue) if seq.id in sequences.brought.at_hand)
    tenant.loading.let_go_of(last.id)
    return True


def _start_rounds(tenant: Tenant, lane: Lane, plan: Plan, growth: int, ticks: int) -> int:
    """Decode iterations only, as many as nothing can change in; the first takes *growth* blocks."""
    decoding, sequences, kv = lane.decoding, tenant.sequences, tenant._kv
    free = kv.free
    if tenant._late:
        kv.before_decodes(decoding.n)
    if growth:
        sequences.take(growth, ticks)
    if tenant._finding.ended:
        tenant._finding.free_the_ended()
    lane.run = ()
    lane.completing = ()
    lane.decodes = True
    lane.through_arrivals = plan.through_arrivals
    hold = plan.hold if tenant._fast_forward else 1
    span = lane.span = decoding.span(ticks, hold, plan.until_ns, free, growth, tenant.prices)
    tenant.n_in_flight += 1
    used = kv.total - kv.free
    span.open(tenant.recorder, lane.index, sequences.n_admitted, len(tenant._queue), used, decoding.round)
    return span.end(span.n)


def _has_come(tenant: Tenant, lane: Lane, ticks: int) -> bool:
    """Whether there is something to plan after all, which came since a plan would have been made ahead: none was that it could
    come too late for."""
    sequences, exchange, loading = tenant.sequences, tenant.sequences.exchange, tenant.loading
    assert sequences.ahead is not None
    sequences.ahead.seen_ns = ALWAYS_NS
    if exchange is not None and (exchange.mail or exchange.asked):
        exchange.read(lane, ticks)
    return bool(sequences.queue) or (loading is not None and loading.next_ns() <= ticks >> TICK_BITS)


def read_at_rest(tenant: Tenant, now_ns: int) -> bool:
    """Read news from other machines while nothing runs and nobody waits; whether that is all that there is to do."""
    exchange, sequences = tenant.sequences.exchange, tenant.sequences
    assert exchange is not None
    if (
        sequences.queue
        or sequences.n_admitted
        or (sequences.ahead is not None and sequences.ahead.seen_ns != ALWAYS_NS)
    ):
        return False
    exchange.read(tenant.lanes[0], now_ns << TICK_BITS)
    return not sequences.queue and not exchange.asked


def awaits(tenant: Tenant) -> bool:
    """Whether something will come from a tier or from another machine that frees blocks or brings work."""
    return n_loading(tenant) > 0 or tenant.sequences.awaits()


def _add_lane(tenant: Tenant) -> Lane:
    spec = tenant.spec
    decoding = (
        UniformSet(spec.block_tokens, tenant._window)
        if spec.decoding is None
        else TapedSet(
            spec.block_tokens, tenant._window, spec.decoding, tenant._seed, tenant.state.rounds,
            lookahead_tokens=tenant._kv.lookahead_tokens, max_model_len=spec.max_model_len,
            ahead=tenant._ahead is not None,
        )
    )  # fmt: skip
    lane = Lane(len(tenant.lanes), decoding)
    lane.view = ReplicaView(
        block_tokens=spec.block_tokens,
        total_blocks=tenant._kv.total,
        running=RunningView(lane, tenant.sequences.running_seq),
        price=LanePrice(lane, tenant.prices, tenant.stages, tenant._window, tenant._pads_to),
        elsewhere=Elsewhere(tenant.lanes, lane),
        prompt_tokens=tenant.state.prompt,
        max_tokens=OneEach(tenant.state.carried) if tenant.sequences.hands_over else tenant.state.max_tokens,
        by_chunk=tenant._by_chunk,
        lookahead_tokens=tenant._kv.lookahead_tokens,
        draft_slots=spec.draft_slots,
        max_model_len=ALWAYS_NS if spec.max_model_len is None else spec.max_model_len,
        terms=tenant.state.terms,
        cache=tenant._kv
        if tenant._caches and (looks_itself if tenant._late else admits_in_turn)(spec.scheduler)
        else None,
    )
    tenant.lanes.append(lane)
    tenant.ready.append(lane)
    return lane


def _loading_of(tenant: Tenant, machine: int, shared: SharedStores) -> Loading:
    spec, kv, state = tenant.spec, tenant._kv, tenant.state
    contents = state.contents_in(spec.block_tokens) if kv.caches and state.contents_in is not None else None
    space = (-1 if spec.model is None else spec.model, spec.block_tokens, spec.block_bytes)
    tiers = Tiers(spec.tiers, space, contents, tenant.recorder, shared, machine=machine, number=tenant.number)
    tiers.price_ns = partial(_prompt_ns, tenant)
    if isinstance(kv, RunPool):
        kv.gives_up = tiers.evicted if tiers.takes_evicted else None
    return Loading(tenant.sequences, tiers, swaps=spec.swaps)


def rings(tenant: Tenant, clock: Clock, callback: Callable[[object], None]) -> None:
    """Have *callback* called whenever KV that was asked for comes."""
    if tenant.loading is not None:
        tenant.loading.rings_at = lambda at_ns: Alarm(clock, ARRIVALS, callback).set(at_ns)


def _prompt_ns(tenant: Tenant, tokens: int, cached: int) -> int:
    """What an iteration takes that computes *tokens* prompt tokens behind *cached* others, and nothing else."""
    window = tenant._window
    pairs = tokens * cached + tokens * (tokens + 1) // 2
    within = 0 if window is None else pairs_within(cached, tokens, window)
    totals = Totals(tokens, tokens, 1, pairs, cached + tokens, 0, 0, 1, within, 0)
    return sum(tenant.prices.stages(totals, 0)[0]) >> TICK_BITS


def _with_loads(tenant: Tenant, loading: Loading, lane: Lane, plan: Plan, growth: int) -> Plan:
    """Start the loads of those whom *plan* admits, and what is planned without them."""
    view, kv, sequences = lane.view, tenant._kv, tenant.sequences
    while plan.run:
        held_back = growth
        for id_, tokens in plan.run:
            if tenant._by_chunk and id_ in lane.partial:
                cached = lane.partial[id_].cached_tokens
                held_back += kv.held(cached + tokens) - kv.held(cached)
        # Who gives way has not given its memory back yet.
        started = -1 if plan.preempt and loading.wanted(plan.run) else loading.start(plan.run, held_back)
        if started > 0:
            view.waiting = tenant._queue_view if tenant._queue_view else ()
            view.free_blocks = kv.free
            plan = _asked(tenant, view)
            continue
        run = loading.before_the_first(plan.run) if started < 0 else plan.run
        if not tenant._in_turn and (loading.in_flight or sequences.brought.at_hand or sequences.awaits()):
            run = loading.that_fit(run, held_back)
        if run or plan.decode or not view.n_decoding:
            return plan if run == plan.run else plan._replace(run=run, hold=1, through_arrivals=False)
        # It put off the decodes for the sake of prompts that have to wait.
        view.waiting = ()
        return _asked(tenant, view)._replace(hold=1, through_arrivals=False)
    return plan


def _asked(tenant: Tenant, view: ReplicaView) -> Plan:
    answer = tenant._plan(view)
    if not isinstance(answer, Plan):
        raise PolicyError(f"{tenant.spec.scheduler!r} answered {answer!r}; expected a policies.view.Plan")
    return answer


def _may_learn(loading: Loading, ticks: int) -> bool:
    """Whether the next plan may know what this one could not, that KV has come since, or blocks are evicted with every step and
    written somewhere."""
    return loading.next_ns() <= ticks >> TICK_BITS or loading.tiers.takes_evicted


def n_loading(tenant: Tenant) -> int:
    """Requests whose KV is on its way."""
    return 0 if tenant.loading is None else len(tenant.loading.in_flight)


def hand_back(tenant: Tenant) -> list[int]:
    """Give up everything; see `Sequences.hand_back`."""
    ids = give_all_back(tenant.sequences, tenant.lanes)
    return ids if tenant.loading is None else ids + tenant.loading.reset()


def _write_prompts(tiers: Tiers, lane: Lane, prompt: Sequence[int], block_tokens: int, end_ns: int) -> None:
    """Tell the tiers which prompt blocks a step has computed."""
    tiers.now_ns = end_ns
    for id_, _ in lane.run:
        tiers.computed(id_, min(lane.partial[id_].cached_tokens, prompt[id_]) // block_tokens)


def stop(tenant: Tenant, lane: Lane, done: int, end_ticks: int) -> None:
    """Commit the first *done* iterations of the span in flight, in the middle of which the machine stops."""
    n = 0 if lane.span is None else lane.span.n
    tenant.commit(lane, done, end_ticks)
    if 0 < done < n:
        # The step in flight had taken its blocks, and what gave way to them is gone.
        take_for_rounds(tenant.sequences.kv, lane.decoding, 1, 0)


def _undo_prompts(lane: Lane) -> None:
    """The prompt tokens of an iteration that does not come to its end have not been computed."""
    for id_, tokens in lane.run:
        partial = lane.partial[id_]
        lane.partial[id_] = partial._replace(cached_tokens=partial.cached_tokens - tokens)


def drop_in_flight(tenant: Tenant) -> None:
    """Forget the micro-batches that have not left the last stage."""
    tenant.recorder.spans.drop_last(tenant.n_in_flight)
    tenant.recorder.stages.drop_last(tenant.n_in_flight * len(tenant.stages))
    for lane in tenant.lanes:
        if lane.span is not None:
            _undo_prompts(lane)
        lane.span = None
        lane.held = lane.view.memo = None
    tenant.n_in_flight = 0
    tenant.ready.clear()
    tenant.ready.extend(tenant.lanes)


def launch(tenant: Tenant, lane: Lane, ticks: int, duration: int) -> None:
    """What `Tenant.begin` prepared at *ticks*, for a rank, takes *duration* ticks."""
    prepared, sequences = lane.prepared, tenant.sequences
    assert prepared is not None
    lane.prepared = None
    lane.span = Step(ticks, ticks + duration, prepared.growth)
    tenant.recorder.add_iteration(
        ticks, duration, lane.index, *prepared.recorded, sequences.n_admitted, len(sequences.queue), sequences.kv.used,
        lane.decoding.round, 0, prepared.in_vain, prepared.found, prepared.loaded, prepared.evicted,
    )  # fmt: skip


def _give_way(
    tenant: Tenant,
    lane: Lane,
    decode: bool | tuple[int, ...],
    run: tuple[tuple[int, int], ...],
    preempt: tuple[int, ...],
    growth: int,
) -> None:
    """Preempt those whom a plan names; *growth*: blocks that all would have taken who decode."""
    sequences, kv = tenant.sequences, tenant.sequences.kv
    if kv.caches and sequences.finding.in_turn:
        give_way_in_turn(sequences, lane, decode, run, preempt)
        return
    if kv.caches_late:
        # Before anybody gives way, what nobody holds does.
        kv.make_room(growth)
    kept = lane.decoding.n + len(lane.paused) + len(lane.leaving)
    for id_ in preempt:
        sequences.preempt(lane, id_)
        kept -= 1
        kv.gave_way(kept)


def _all_taken(tenant: Tenant, n: int, decodes: int, in_vain: int, ticks: int, ended: Mapping[int, Ended]) -> None:
    """The prompts of an iteration have taken their blocks: what is left of it, *decodes* of the decodes where these come last."""
    sequences, finding = tenant.sequences, tenant.sequences.finding
    if sequences.kv.caches_late:
        sequences.kv.before_decodes(n + len(ended))
        sequences.take(decodes, ticks)
        finding.step_on(ended)
    else:
        sequences.kv.give(in_vain)
    if finding.ended:
        finding.free_the_ended()


def _still_holds(tenant: Tenant, held: HeldPlan, decoding: RunningSet, ticks: int) -> bool:
    """Whether the plan that a lane holds in a pipeline would be made again: nobody has ended, joined, left or come that
    matters, memory lasts, and it is not too late. What spans are to a machine that is alone."""
    return (
        held.left > 0
        and held.changes == tenant.sequences.n_changes
        and held.arrivals in (-1, tenant.sequences.n_arrivals)
        and ticks >> TICK_BITS < held.until_ns
        and decoding.growth_blocks <= tenant.sequences.kv.free
    )


def _through_stages(tenant: Tenant, lane: Lane, totals: Totals, draft_steps: int, ticks: int) -> tuple[int, int]:
    """Send a micro-batch through the machine's stages; ticks until it has left the last, and its bubbles in ns."""
    durations, handover = tenant.prices.stages(totals, draft_steps)
    end, bubbles = tenant.stages.send(
        ticks, durations, handover, bool(lane.run), tenant.n_sent, tenant.recorder.stages.add
    )
    tenant.n_sent += 1
    for kind, bubble_ns in enumerate(bubbles):
        if bubble_ns:
            if lane.decodes:
                lane.bubbles[kind] += bubble_ns
            for id_, _ in lane.run:
                tenant.state.bubbles[kind][id_] += bubble_ns
    return end - ticks, sum(bubbles)


def columns_of(tenant: Tenant) -> ReplicaColumns:
    """What it leaves behind."""
    recorder = tenant.recorder
    speculates = tenant.spec.decoding is not None
    return ReplicaColumns(
        spans=recorder.all_spans(tenant.sequences.kv.block_tokens),
        joins=recorder.joins.array(),
        queued_ns=np.array(recorder.queued_ns, np.int64),
        resumed_gaps_ns=np.array(recorder.resumed_gaps_ns, np.int64),
        stages=recorder.all_stages(),
        kv_blocks_total=tenant.sequences.kv.total,
        block_tokens=tenant.sequences.kv.block_tokens,
        n_stages=len(tenant.stages),
        transfers=recorder.transfers.array() if tenant.loading is not None else None,
        emitted=_emitted(tenant.lanes) if speculates else None,
        speculation=sum_rounds(lane.decoding.speculation() for lane in tenant.lanes) if speculates else None,
    )


def _emitted(lanes: list[Lane]) -> dict[int, IntArray]:
    found = {lane.index: lane.decoding.emitted() for lane in lanes}
    return {index: tokens for index, tokens in found.items() if tokens is not None}
