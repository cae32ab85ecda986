"""Asking a scheduler: what it is shown of a micro-batch, and what its answer is worth.

How long a plan may be carried out without asking again is decided here (`Planner._may_hold`), by the version that it was made for
(`sim.engine.batch.version`) and by the events that cut a span; nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from policies.view import ALWAYS_NS, DECODES, Plan, ReplicaView, decodes_below, held_once, plan_of, reserves
from sim.engine.batch.micro_batch import MicroBatch, QueueView
from sim.engine.serve.loading import Loading
from sim.engine.serve.sequences import Sequences
from sim.engine.spec.experiment import ReplicaSpec
from sim.engine.time.clock import TICK_BITS
from sim.engine.time.errors import PolicyError

_DECODES_ONCE: Final = DECODES._replace(hold=1)


class Planner:
    """Shows a model's scheduler the views of its micro-batches and takes its plans."""

    def __init__(
        self, spec: ReplicaSpec, sequences: Sequences, loading: Loading | None, *, alone: bool, is_rank: bool
    ) -> None:
        self._scheduler = spec.scheduler
        # object: the answer of a policy from elsewhere is checked first.
        self._plan: Callable[[ReplicaView], object] = plan_of(spec.scheduler)
        self._sequences = sequences
        self._kv = sequences.kv
        self._queue = sequences.queue
        self._connector = sequences.connector
        self._ahead = sequences.ahead
        self._loading = loading
        self._speculates = spec.decoding is not None
        self._by_chunk = sequences.kv.by_chunk
        self._late = sequences.kv.caches_late
        self._shares_cache = sequences.kv.caches and not alone
        writes_evicted = loading is not None and loading.tiers.takes_evicted
        self._eviction_is_timed = writes_evicted or sequences.kv.lasts_s is not None
        self._shows_more = self._ahead is not None or is_rank or reserves(spec.scheduler)
        apart = (
            self._connector.takes_part or self._ahead is not None or loading is not None or spec.grammars is not None
        )
        self._is_plain = not (apart or sequences.kv.caches)
        """A plan knows or causes all that happens."""
        shown = sequences.prefix_lookup.described if sequences.prefix_lookup.described_to_it else None
        self.queue_view = QueueView(sequences.queue, shown)
        in_common = is_rank or not alone or loading is not None or self._connector.takes_part
        self._decodes_below = 0 if in_common else decodes_below(spec.scheduler)
        self.prompts_wait = False
        """No prompt is shown to the scheduler: the ranks of a machine start prompts together."""
        self._chunks_go_on = False

    def plan(self, batch: MicroBatch, ticks: int) -> Plan | None:
        """Show *batch* as it is to the scheduler, and take its plan, held for no longer than it holds; None where there is nothing
        to plan."""
        decoding, view = batch.decoding, batch.view
        if self._speculates:
            decoding.follow_batch()
            view.query_tokens = decoding.query_tokens
        n = decoding.n
        batch.growth = growth = decoding.growth_blocks if n else 0
        if batch.paused:
            n += len(batch.paused)
            growth = self._sequences.growth_of(batch)
        if not (n or batch.partial or self._queue) and not self._is_leaving(batch):
            view.memo = None
            return None
        kv = self._kv
        if n < self._decodes_below and n and not (batch.partial or self._queue):
            known = self._known(batch, n, growth, ticks)
            if known is not None:
                return known
        if growth > kv.free and self._connector.tiers.here:
            assert self._loading is not None
            self._loading.make_room(growth)
        self._show(batch, n, growth, ticks)
        if self._shows_more:
            self._show_more(batch)
        plan = self._plan(view)
        if not isinstance(plan, Plan):
            raise self._no_plan(plan)
        if plan.reject or not self._is_plain:
            plan = self._taken_up(batch, plan)
        view.memo = plan.memo
        return plan

    def _known(self, batch: MicroBatch, n: int, growth: int, ticks: int) -> Plan | None:
        """The plan for *n* decodes, whose step takes *growth* blocks, where no request waits and the scheduler need not be asked:
        see `policies.view.decodes_below`."""
        view, ahead = batch.view, self._ahead
        if batch.leaving:
            for ended in batch.leaving.values():
                if ended.steps_on:
                    return None
                n += 1
                growth += ended.blocks
        if self._speculates:
            n *= view.query_tokens + view.draft_slots
        if n >= self._decodes_below or growth > self._kv.free:
            return None
        view.now_ns = ticks >> TICK_BITS
        if ahead is not None:
            ahead.go_on(batch, self.queue_view)
        return DECODES if self._is_plain or self._may_hold(batch, DECODES) else _DECODES_ONCE

    def _show(self, batch: MicroBatch, n: int, growth: int, ticks: int) -> None:
        """Show *batch* with *n* decodes, which take *growth* blocks in the coming iteration."""
        partial, view = batch.partial, batch.view
        view.waiting = self.queue_view if self._queue else ()
        view.prefilling = tuple(partial.values()) if partial else ()
        view.n_decoding = n
        view.free_blocks = self._kv.free
        view.growth_blocks = growth
        view.now_ns, view.rounds = ticks >> TICK_BITS, batch.decoding.round
        view.after_prefill = len(batch.run) > 0

    def schedules_prompts(self, batch: MicroBatch, ticks: int) -> bool:
        """Whether the scheduler would have prompts in the coming iteration were they shown. Nothing is planned by that."""
        sequences, queue = self._sequences, self.queue_view
        if not (batch.partial or self._queue):
            return False
        hidden, view = queue.hidden, batch.view
        growth = sequences.growth_of(batch) if batch.paused else batch.decoding.growth_blocks if batch.decoding.n else 0
        self._show(batch, batch.decoding.n + len(batch.paused), growth, ticks)
        view.promised_blocks = sequences.reservations.blocks - self._connector.promised
        if self._ahead is not None:
            self._ahead.leave(batch, queue, self._ahead.seen_ns, given=not self._kv.caches)
        answer = self._answer(view)
        queue.hidden = hidden
        return len(answer.run) > 0

    def seen(self, batch: MicroBatch) -> tuple[int, int, float]:
        """Sequences in the decode batch, requests in the queue, and the share of the KV blocks that is held, as the coming plan
        knows them."""
        kv, hidden = self._kv, 0 if self._ahead is None else self._ahead.n_hidden()
        held = kv.total - kv.free + (0 if kv.caches else sum([ended.blocks for ended in batch.leaving.values()]))
        n = batch.decoding.n + len(batch.paused) + len(batch.leaving)
        return n, len(self._queue) - hidden, held / kv.total

    def _is_leaving(self, batch: MicroBatch) -> bool:
        """Whether sequences that have ended keep their seats in an otherwise empty micro-batch until a plan knows it."""
        if batch.leaving and self._sequences.hands_over:
            # They are known to take no step, so that no plan is needed for it.
            batch.forget_the_leaving()
        return bool(batch.leaving)

    def _show_more(self, batch: MicroBatch) -> None:
        """Show what only some schedulers see, and hide what the coming plan does not know."""
        view = batch.view
        # Sequences whose KV has come from another machine are still to be admitted.
        view.promised_blocks = self._sequences.reservations.blocks - self._connector.promised
        if self._ahead is not None:
            self._ahead.hide(batch, self.queue_view, given=not self._kv.caches)
        if self.prompts_wait:
            view.waiting = ()
            view.prefilling = view.prefilling if self._chunks_go_on else ()

    def _taken_up(self, batch: MicroBatch, plan: Plan) -> Plan:
        """*plan* as it is carried out where it rejects requests, or where more happens than it knows or causes."""
        if self._loading is not None:
            plan = self._with_loads(self._loading, batch, plan)
        if self._late:
            self._sequences.prefix_lookup.listed = plan.order
            if plan.looks is not None:
                self._kv.use(plan.looks)
        if plan.hold > 1 and (plan.reject or not (self._is_plain or self._may_hold(batch, plan))):
            plan = held_once(plan)
        return plan

    def _answer(self, view: ReplicaView) -> Plan:
        answer = self._plan(view)
        if not isinstance(answer, Plan):
            raise self._no_plan(answer)
        return answer

    def _no_plan(self, answer: object) -> PolicyError:
        return PolicyError(f"{self._scheduler!r} answered {answer!r}; expected a policies.view.Plan")

    def _may_hold(self, batch: MicroBatch, plan: Plan) -> bool:
        """Whether the scheduler would plan the same again if nothing happened: where it may not, it is asked each iteration.

        A plan does not hold that did not know of something, nor one that would see something else after every iteration. Any later
        event ends it by the version that it was made for.
        """
        kv, ahead = self._kv, self._ahead
        asked = bool(self._connector.machines.wanted)
        waits = asked or bool(self._queue)
        if self._eviction_is_timed or (asked and plan.preempt) or self._sequences.given_up:
            # Requests of clients that have gone leave with the next plan where they have only just arrived.
            return False
        if waits and (self._shares_cache or kv.writes or (self._late and self._by_chunk)):
            # Waiting requests find more after each step that emits named content, and less after each that evicts: a tree evicts
            # whole leaves, so that a request's hit and first chunk may then fit.
            return False
        if ahead is None:
            return True
        ends_matter = waits or plan.through_arrivals
        unknown_ends = bool(batch.leaving or self._sequences.prefix_lookup.ended)
        return not (unknown_ends and ends_matter) and not ahead.misses(
            self._sequences.version, through_arrivals=plan.through_arrivals
        )

    def let_prompts_start(self, starts: bool, *, chunks: bool = False) -> None:
        """Show prompts from now on, or none; with *chunks* those that have begun."""
        self._chunks_go_on = chunks
        if self.prompts_wait is starts:
            self.prompts_wait = not starts
            self._sequences.version.changes += 1

    # Loads from tiers.

    def _with_loads(self, loading: Loading, batch: MicroBatch, plan: Plan) -> Plan:
        """Start the loads of requests that *plan* admits, and return what is planned without them."""
        view, kv, sequences = batch.view, self._kv, self._sequences
        while plan.run:
            held_back = sequences.growth_of(batch) + self._growth_of_chunks(batch, plan)
            # Preempted sequences have not given their memory back yet.
            started = -1 if plan.preempt and loading.wanted(plan.run) else loading.start(plan.run, held_back)
            if started > 0:
                view.waiting = self.queue_view if self.queue_view else ()
                view.free_blocks = kv.free
                plan = self._answer(view)
                continue
            run = loading.before_the_first(plan.run) if started < 0 else plan.run
            books = self._connector.tiers
            waits = books.in_transit or books.here or self._connector.awaits
            if waits and not sequences.prefix_lookup.in_turn:
                run = loading.that_fit(run, held_back)
            if run or plan.decode or not view.n_decoding:
                return plan if run == plan.run else plan._replace(run=run, hold=1, through_arrivals=False)
            # It put off the decodes for the sake of prompts that have to wait.
            view.waiting = ()
            return self._answer(view)._replace(hold=1, through_arrivals=False)
        return plan

    def _growth_of_chunks(self, batch: MicroBatch, plan: Plan) -> int:
        """KV blocks that the next chunks of admitted prompts take, where they take them by chunk."""
        if not self._by_chunk:
            return 0
        kv, partial = self._kv, batch.partial
        chunks = ((partial[id_].cached_tokens, tokens) for id_, tokens in plan.run if id_ in partial)
        return sum(kv.held(cached + tokens) - kv.held(cached) for cached, tokens in chunks)

    # After a plan that starts nothing.

    def knows_more_now(self, batch: MicroBatch) -> bool:
        """Whether the latest plan was made ahead, and one that is made now would know more."""
        if self._ahead is None or not self._ahead.made:
            return False
        if self._speculates:
            self._sequences.start_anew(batch)
        return True

    def plans_now(self) -> bool:
        """Have the coming plan know all that has happened, where it would have been made ahead; False where it does anyway."""
        if self._ahead is None or self._ahead.seen_ns == ALWAYS_NS:
            return False
        self._ahead.seen_ns = ALWAYS_NS
        return True

    def takes_memory_back(self, batch: MicroBatch, until_ns: int, now_ns: int) -> bool:
        """Have the last waiting sequence with loaded KV give its blocks back where such sequences block each other; whether one
        did.

        *until_ns*: the instant that the empty plan waits for, if any.
        """
        sequences, waits_for_time = self._sequences, now_ns < until_ns < ALWAYS_NS
        if not self._connector.tiers.here or sequences.n_admitted or batch.leaving or waits_for_time:
            return False
        assert self._loading is not None
        self._loading.let_go_of_last()
        return True
