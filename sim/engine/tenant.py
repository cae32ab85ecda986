"""One model on a machine: its queue, its scheduler, its sequences, its KV memory and its prices.

A tenant has one *lane* for each micro-batch that may be in flight. It shows its scheduler a view of a lane, carries the plan out
and commits what has ended; when a lane may plan, the machine says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from hwmodels.totals import Totals
from policies.view import ALWAYS_NS, PartialSeq, Plan, ReplicaView, RunningSeq, WaitingSeq, pads_to, plan_of
from sim.engine.clock import TICK_BITS, TICKS_PER_S
from sim.engine.columns import Recorder, ReplicaColumns, sum_rounds
from sim.engine.errors import PolicyError
from sim.engine.experiment import ReplicaSpec
from sim.engine.kv import KvPool, OutOfBlocks
from sim.engine.lane import Lane, LanePrice, Paused, QueueView, RunningView
from sim.engine.padding import padded, pairs_within
from sim.engine.prices import Prices, prices_of
from sim.engine.requests import RequestState
from sim.engine.running import Departure, TapedSet, UniformSet
from sim.engine.span import Step
from sim.engine.stages import Stages

NOTHING = -1
"""What `Tenant.begin` returns where nothing was started."""

_LANES_AT_ONCE = 64
"""More micro-batches than these get their lanes when they are needed."""

_new = tuple.__new__
"""Builds a NamedTuple without the detour through its constructor: a third of the time, several times an iteration."""


class Outside(Protocol):
    """What a machine tells the cluster."""

    def finished(self, id_: int, now_ns: int, /) -> None: ...

    def rejected(self, id_: int, reason: str, /) -> None: ...


class Tenant:
    """Serves the requests of one model that are routed to its machine."""

    def __init__(
        self, number: int, spec: ReplicaSpec, state: RequestState, outside: Outside, stages: Stages, *,
        alone: bool, seed: int, fast_forward: bool,
    ) -> None:  # fmt: skip
        """*alone*: no pipeline and no other tenant, so that decodes may be held; *number*: of the run's tenants."""
        self.number = number
        self.spec = spec
        self.recorder = Recorder()
        self._record = self.recorder.add_iteration
        self.queue: deque[WaitingSeq] = deque()
        self.n_admitted = 0
        self.n_in_flight = 0
        self.kv = KvPool(spec.kv_blocks, spec.block_tokens)
        self.prices: Prices = prices_of(spec.cost, spec.draft_cost, spec.speculation_overhead_s)
        self._price = self.prices.iteration
        self.wake_ns = ALWAYS_NS
        """Where the latest plan was empty: when its answer ends."""
        self._n_changes = self._n_arrivals = 0
        """Counts of what may end a plan that is held in a lane: who ends, joins or leaves in any lane, and who comes."""
        self._n_computed = 0
        """Of those that wait: with nothing to compute before they decode."""
        self._state = state
        self._outside = outside
        self._stages = stages
        self._alone = alone
        self._fast_forward = fast_forward
        self._seed = seed
        self._plan = plan_of(spec.scheduler)
        self._pads_to = pads_to(spec.scheduler)
        self._window = spec.cost.window_tokens
        self._queue_view = QueueView(self.queue)
        self._n_sent = 0
        # KV slots that a request needs beyond its own tokens: those of drafted tokens.
        self._lookahead = 0 if spec.decoding is None else spec.decoding.max_query_tokens - 1
        self._speculates = spec.decoding is not None
        self._max_lanes = spec.micro_batches or len(stages)
        self.lanes: list[Lane] = []
        self.ready: deque[Lane] = deque()
        """Lanes that are not in flight, the longest idle first."""
        for _ in range(self._max_lanes if self._max_lanes <= _LANES_AT_ONCE else 1):
            self._add_lane()

    def _add_lane(self) -> Lane:
        spec = self.spec
        decoding = (
            UniformSet(spec.block_tokens, self._window)
            if spec.decoding is None
            else TapedSet(spec.block_tokens, self._window, spec.decoding, self._seed, self._state.rounds)
        )
        lane = Lane(len(self.lanes), decoding)
        lane.view = ReplicaView(
            block_tokens=spec.block_tokens,
            total_blocks=self.kv.total,
            running=RunningView(lane, self.running_seq),
            price=LanePrice(lane, self.prices, self._stages),
        )
        self.lanes.append(lane)
        self.ready.append(lane)
        return lane

    # The queue.

    def refusal(self, id_: int) -> str | None:
        """Why a request can never be served here; None where it can."""
        prompt, output = self._state.prompt[id_], self._state.output[id_]
        limit = self.spec.max_model_len
        if limit is not None and prompt + output > limit:
            return f"prompt and output exceed the model's context of {limit} tokens"
        # The last token is never cached: nothing comes after it.
        kv = self.kv
        needed = -(-((prompt or 1) + (output - 1 + self._lookahead if output else 0)) // kv.block_tokens)
        if needed > kv.total:
            return f"needs {needed} KV blocks for prompt and output but the replica has {kv.total}"
        return None

    def enqueue(self, id_: int, kv_tokens: int) -> None:
        """Let a request wait; KV of its first *kv_tokens* tokens is at hand."""
        seq = self._state.waiting_seq(id_, cached_tokens=kv_tokens)
        self.queue.append(seq)
        self._n_computed += not seq.tokens
        self._n_arrivals += 1

    @property
    def busy(self) -> bool:
        """Whether any request waits or has been admitted."""
        return self.n_admitted > 0 or bool(self.queue)

    def next_lane(self) -> Lane | None:
        """The lane that has been idle longest, taken from `ready`; None where all are in flight."""
        if not self.ready and len(self.lanes) < self._max_lanes:
            self._add_lane()
        return self.ready.popleft() if self.ready else None

    # Planning.

    def running_seq(self, lane: Lane, id_: int) -> RunningSeq:
        """An admitted sequence as policies see it."""
        if id_ in lane.decoding:
            cached, blocks = lane.decoding.state_of(id_)
            growth = lane.decoding.growth_of(id_)
        elif id_ in lane.partial:
            partial = lane.partial[id_]
            cached, blocks, growth = partial.cached_tokens, self._blocks_of(partial), 0
        else:
            paused = lane.paused[id_]
            cached, blocks, growth = paused.cached, paused.blocks, self._paused_growth(lane, paused)
        request = self._state.waiting_seq(id_)
        return RunningSeq(
            id_, cached, blocks, growth, request.arrival_ns, request.model, request.deadline_ns, request.priority
        )

    def _blocks_of(self, partial: PartialSeq) -> int:
        """KV blocks are taken for all of a prompt when it is admitted."""
        return self.kv.blocks(partial.cached_tokens + partial.remaining_tokens)

    def _paused_growth(self, lane: Lane, paused: Paused) -> int:
        return max(0, self.kv.blocks(paused.cached + lane.decoding.query_tokens) - paused.blocks)

    def begin(self, lane: Lane, ticks: int) -> int:
        """Ask the scheduler at *ticks* and start what it plans: the tick at which that ends, or NOTHING."""
        decoding = lane.decoding
        if lane.hold:
            if self._still_holds(lane, ticks):
                lane.hold -= 1
                return self._start_iteration(lane, (), decoding.n, decoding.growth_blocks, ticks)
            lane.hold = 0
        if self._speculates:
            decoding.follow_batch()
        n = decoding.n
        growth = decoding.growth_blocks if n else 0
        n_decoding, growth_of_all = n, growth
        if lane.paused:
            n_decoding += len(lane.paused)
            growth_of_all += sum(self._paused_growth(lane, paused) for paused in lane.paused.values())
        partial, queue = lane.partial, self.queue
        if not (n_decoding or partial or queue):
            return NOTHING
        view = lane.view
        view.waiting = self._queue_view if queue else ()
        view.prefilling = tuple(partial.values()) if partial else ()
        view.n_decoding = n_decoding
        view.query_tokens = decoding.query_tokens
        view.free_blocks = self.kv.free
        view.growth_blocks = growth_of_all
        view.now_ns = ticks >> TICK_BITS
        view.after_prefill = bool(lane.run)
        plan = self._plan(view)
        decode, run, preempt, hold, _, reject, _ = plan
        if reject:
            self._reject(reject)
        if preempt or decode is not True or lane.paused or self._n_computed:
            for id_ in preempt:
                self._preempt(lane, id_)
            if self._n_computed:
                run = self._join_the_decodes(lane, run, ticks)
            if decode is not False:
                self._choose_decodes(lane, decode)
            n = decoding.n if decode else 0
            growth = decoding.growth_blocks if n else 0
        if run or (n and (self._pads_to or not self._alone)):
            if hold > 1 and not run and self._fast_forward and not self._pads_to:
                lane.hold = hold - 1
                lane.held_changes = self._n_changes
                lane.held_arrivals = -1 if plan.through_arrivals else self._n_arrivals
                lane.held_until_ns = plan.until_ns
            return self._start_iteration(lane, run, n, growth, ticks)
        if n:
            return self._start_rounds(lane, plan, growth, ticks)
        if preempt or reject or len(run) < len(plan.run):
            return self.begin(lane, ticks)
        self.wake_ns = plan.until_ns
        return NOTHING

    def _still_holds(self, lane: Lane, ticks: int) -> bool:
        """Whether the plan that a lane holds in a pipeline would be made again: nobody has ended, joined, left or come that
        matters, memory lasts, and it is not too late. What spans are to a machine that is alone."""
        return (
            lane.held_changes == self._n_changes
            and lane.held_arrivals in (-1, self._n_arrivals)
            and ticks >> TICK_BITS < lane.held_until_ns
            and lane.decoding.growth_blocks <= self.kv.free
        )

    def _reject(self, refused: Sequence[tuple[int, str]]) -> None:
        for id_, reason in refused:
            seq = next((seq for seq in self.queue if seq.id == id_), None)
            if seq is None:
                raise PolicyError(f"{self.spec.scheduler!r} rejected request {id_}, which does not wait here")
            self.queue.remove(seq)
            self._n_computed -= not seq.tokens
            self._n_changes += 1
            self._outside.rejected(id_, reason)

    def _choose_decodes(self, lane: Lane, decode: bool | tuple[int, ...]) -> None:
        """Bring the decoding set in line with the plan: pause who is left out, resume who is named again."""
        decoding, paused = lane.decoding, lane.paused
        wanted = set(paused) | set(decoding) if decode is True else set(decode)  # type: ignore[arg-type]
        unknown = [id_ for id_ in wanted if id_ not in decoding and id_ not in paused]
        if unknown:
            raise PolicyError(
                f"{self.spec.scheduler!r} planned a decode step for request {unknown[0]}, which is not decoding here"
            )
        if decode is not True:
            for id_ in [id_ for id_ in decoding if id_ not in wanted]:
                departure = self._leave(lane, id_)
                paused[id_] = Paused(departure.cached_tokens, departure.blocks, _last_token_ns(lane, departure))
        for id_ in [id_ for id_ in paused if id_ in wanted]:
            seq = paused.pop(id_)
            # Slots held for drafted tokens beyond what is cached go back while it waits.
            self._join(lane, id_, seq.cached, seq.token_ns)

    def _leave(self, lane: Lane, id_: int) -> Departure:
        departure = lane.decoding.leave(id_)
        self._log_departure(lane, departure)
        self._state.left[id_] -= departure.emitted
        kept = self.kv.blocks(departure.cached_tokens)
        self.kv.give(departure.blocks - kept)
        return departure._replace(blocks=kept)

    def _join(self, lane: Lane, id_: int, cached: int, token_ns: int) -> None:
        self._n_changes += 1
        lane.decoding.join(id_, cached, self._state.left[id_], token_ns)
        if not self._alone:
            lane.bubbles_at_join[id_] = lane.bubbles.copy()

    def _log_departure(self, lane: Lane, departure: Departure) -> None:
        if not self._alone:
            before = lane.bubbles_at_join.pop(departure.id)
            for kind, column in enumerate(self._state.bubbles):
                column[departure.id] += lane.bubbles[kind] - before[kind]
        _, _, _, _, since, cached_before, token_ns = departure
        self.recorder.joins.add(lane.index, since, lane.decoding.round, cached_before, token_ns)

    def _preempt(self, lane: Lane, id_: int) -> None:
        """Give back a sequence's blocks; it returns to the head of the queue to be computed again."""
        state = self._state
        if id_ in lane.decoding:
            departure = self._leave(lane, id_)
            cached, blocks = departure.cached_tokens, departure.blocks
            state.token_ns[id_] = _last_token_ns(lane, departure)
        elif id_ in lane.paused:
            cached, blocks, state.token_ns[id_] = lane.paused.pop(id_)
        elif id_ in lane.partial:
            partial = lane.partial.pop(id_)
            cached, blocks = partial.cached_tokens, self._blocks_of(partial)
        else:
            raise PolicyError(f"{self.spec.scheduler!r} preempted request {id_}, which is not running here")
        self.kv.give(blocks)
        del lane.admitted[id_]
        self.n_admitted -= 1
        self._n_changes += 1
        state.preemptions[id_] += 1
        state.recomputed[id_] += cached
        self.queue.appendleft(state.waiting_seq(id_, preempted=True))

    def _admit(self, lane: Lane, id_: int, now_ns: int) -> WaitingSeq:
        """Take a request from the queue into the lane; its KV blocks are the caller's to take."""
        queue = self.queue
        if queue and queue[0].id == id_:
            seq = queue.popleft()
        else:
            found = next((seq for seq in queue if seq.id == id_), None)
            if found is None:
                raise PolicyError(
                    f"{self.spec.scheduler!r} planned prompt tokens for request {id_}, which neither waits nor prefills here"
                )
            queue.remove(found)
            seq = found
        lane.admitted[id_] = None
        self.n_admitted += 1
        self._n_changes += 1
        if self._state.scheduled[id_] < 0:
            self._state.scheduled[id_] = now_ns
        return seq

    def _join_the_decodes(
        self, lane: Lane, run: tuple[tuple[int, int], ...], ticks: int
    ) -> tuple[tuple[int, int], ...]:
        """Admit those of *run* that have nothing to compute; what is left of *run*."""
        for id_, tokens in run:
            if tokens:
                continue
            seq = self._admit(lane, id_, ticks >> TICK_BITS)
            if seq.tokens:
                raise PolicyError(
                    f"{self.spec.scheduler!r} planned 0 prompt tokens for request {id_}, of which {seq.tokens} are left to compute"
                )
            self._n_computed -= 1
            self._take(self.kv.blocks(seq.cached_tokens), ticks)
            self._join(lane, id_, seq.cached_tokens, self._state.token_ns[id_])
        return tuple(entry for entry in run if entry[1])

    def _take(self, blocks: int, ticks: int) -> None:
        try:
            self.kv.take(blocks)
        except OutOfBlocks:
            raise PolicyError(
                f"{self.spec.scheduler!r} planned {blocks} new KV blocks at t={ticks / TICKS_PER_S:.6f} s but only "
                f"{self.kv.free} are free; wrap it in EvictNewest or admit less"
            ) from None

    # Starting.

    def _start_iteration(self, lane: Lane, run: tuple[tuple[int, int], ...], n: int, growth: int, ticks: int) -> int:
        """One iteration with prompt chunks and a decode step of *n* sequences, all or none, that takes *growth* blocks."""
        decoding, partials, kv, window = lane.decoding, lane.partial, self.kv, self._window
        block_tokens = kv.block_tokens
        blocks = growth
        rows = pairs = pairs_window = prompt_kv = 0
        completing: list[int] = []
        for id_, tokens in run:
            partial = partials.get(id_)
            if partial is None:
                _, left, arrival_ns, model, deadline_ns, _, cached, priority = self._admit(
                    lane, id_, ticks >> TICK_BITS
                )
                blocks -= -(left + cached) // block_tokens
            else:
                _, cached, left, arrival_ns, model, deadline_ns, priority = partial
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
            prompt_kv += cached
            partials[id_] = _new(PartialSeq, (id_, cached, remaining, arrival_ns, model, deadline_ns, priority))
            if remaining == 0:
                completing.append(id_)
        if blocks:
            self._take(blocks, ticks)
        query, draft_steps = decoding.query_tokens, decoding.draft_steps
        decode_rows = decode_kv = decode_window = emitted = 0
        if n:
            decode_rows = n * query
            decode_kv = decoding.cached + decode_rows
            emitted, decode_window = decoding.next_round()
        output_left = self._state.left
        for id_ in completing:
            emitted += output_left[id_] > 0
        n_completing = len(completing)
        totals = _new(
            Totals,
            (
                rows + decode_rows, rows, len(run), pairs, prompt_kv, n, decode_kv, decode_rows + n_completing,
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
        if self._alone:
            duration = self._price(priced, draft_steps)
        else:
            duration, bubble_ns = self._through_stages(lane, priced, draft_steps, ticks)
        end = ticks + duration
        lane.span = Step(ticks, end, growth)
        self._record(
            ticks, duration, lane.index, totals, draft_steps, query, n_completing, emitted, self.n_admitted,
            len(self.queue), kv.total - kv.free, decoding.round, bubble_ns,
        )  # fmt: skip
        return end

    def _start_rounds(self, lane: Lane, plan: Plan, growth: int, ticks: int) -> int:
        """Decode iterations only, as many as nothing can change in; the first takes *growth* blocks."""
        decoding, kv = lane.decoding, self.kv
        free = kv.free
        if growth:
            self._take(growth, ticks)
        lane.run = ()
        lane.completing = ()
        lane.decodes = True
        lane.through_arrivals = plan.through_arrivals
        hold = plan.hold if self._fast_forward else 1
        span = lane.span = decoding.span(ticks, hold, plan.until_ns, free, growth, self.prices)
        self.n_in_flight += 1
        used = kv.total - kv.free
        span.open(self.recorder, lane.index, self.n_admitted, len(self.queue), used, decoding.round)
        return span.end(span.n)

    def _through_stages(self, lane: Lane, totals: Totals, draft_steps: int, ticks: int) -> tuple[int, int]:
        """Send a micro-batch through the machine's stages; ticks until it has left the last, and its bubbles in ns."""
        durations, handover = self.prices.stages(totals, draft_steps)
        end, bubbles = self._stages.send(
            ticks, durations, handover, bool(lane.run), self._n_sent, self.recorder.stages.add
        )
        self._n_sent += 1
        for kind, bubble_ns in enumerate(bubbles):
            if bubble_ns:
                if lane.decodes:
                    lane.bubbles[kind] += bubble_ns
                for id_, _ in lane.run:
                    self._state.bubbles[kind][id_] += bubble_ns
        return end - ticks, sum(bubbles)

    # Ending.

    def commit(self, lane: Lane, done: int, end_ticks: int) -> None:
        """Account for the first *done* iterations of the span in flight, which end at *end_ticks*: all of them, or fewer when
        the machine stops."""
        span = lane.span
        assert span is not None
        lane.span = None
        self.n_in_flight -= 1
        span.close(self.recorder, done)
        if not done:
            return
        state, decoding, kv = self._state, lane.decoding, self.kv
        end_ns = end_ticks >> TICK_BITS
        if lane.decodes:
            if done > 1:
                kv.take(decoding.blocks_for(done) - span.growth_first)
            lane.last_round_ns = end_ns
            for departure in decoding.advance(done):
                self._log_departure(lane, departure)
                id_, _, blocks, emitted, _, _, _ = departure
                state.left[id_] -= emitted
                kv.give(blocks)
                self._end_request(lane, id_, end_ns)
        for id_ in lane.completing:
            _, cached, _, _, _, _, _ = lane.partial.pop(id_)
            left = state.left[id_]
            if left:
                if state.first_token[id_] < 0:
                    state.first_token[id_] = end_ns
                else:
                    self.recorder.resumed_gaps_ns.append(end_ns - state.token_ns[id_])
                state.left[id_] = left = left - 1
            if left:
                self._join(lane, id_, cached, end_ns)
            else:
                kv.give(kv.blocks(cached))
                self._end_request(lane, id_, end_ns)

    def _end_request(self, lane: Lane, id_: int, end_ns: int) -> None:
        del lane.admitted[id_]
        self.n_admitted -= 1
        self._n_changes += 1
        state = self._state
        state.finish[id_] = end_ns
        state.status[id_] = 0
        self._outside.finished(id_, end_ns)

    def drop_in_flight(self) -> None:
        """Forget the micro-batches that have not left the last stage."""
        self.recorder.spans.drop_last(self.n_in_flight)
        self.recorder.stages.drop_last(self.n_in_flight * len(self._stages))
        for lane in self.lanes:
            lane.span = None
        self.n_in_flight = 0

    def hand_back(self) -> list[int]:
        """Give up everything: all blocks are free, and the requests that ran or waited, oldest first, are the caller's."""
        ids: list[int] = []
        for lane in self.lanes:
            for id_ in list(lane.decoding):
                departure = self._leave(lane, id_)
                self._state.token_ns[id_] = _last_token_ns(lane, departure)
            ids += lane.admitted
            lane.admitted.clear()
            lane.partial.clear()
            lane.paused.clear()
        ids += [seq.id for seq in self.queue]
        self.queue.clear()
        self.n_admitted = self._n_computed = 0
        self.kv.give(self.kv.used)
        return ids

    # What it leaves behind.

    def columns(self) -> ReplicaColumns:
        recorder = self.recorder
        speculates = self.spec.decoding is not None
        return ReplicaColumns(
            spans=recorder.all_spans(),
            joins=recorder.joins.array(),
            queued_ns=np.array(recorder.queued_ns, np.int64),
            resumed_gaps_ns=np.array(recorder.resumed_gaps_ns, np.int64),
            stages=recorder.stages.array(),
            kv_blocks_total=self.kv.total,
            block_tokens=self.kv.block_tokens,
            n_stages=len(self._stages),
            speculation=sum_rounds(lane.decoding.speculation() for lane in self.lanes) if speculates else None,
        )


def _last_token_ns(lane: Lane, departure: Departure) -> int:
    return lane.last_round_ns if departure.emitted else departure.token_ns
