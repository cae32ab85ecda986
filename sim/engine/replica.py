"""One replica: shows its scheduler a view, prices the plan, sleeps, commits.

A replica has one *lane* for each micro-batch that may be in flight: one without a pipeline, as many as stages with one. A lane has
its own running set; queue and KV pool are shared. With one lane, decode iterations between which nothing can change are one event
(a span), cut at the iteration in flight when a request arrives.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import simpy

from hwmodels.totals import Totals
from policies.view import PartialSeq, ReplicaView, RunningSeq, WaitingSeq
from sim.engine.clock import (
    ITERATION_PRIORITY,
    LONGEST_TICKS,
    TICK_BITS,
    TICKS_PER_S,
    Clock,
    elapsed,
    iterations_to_reach,
)
from sim.engine.columns import BUBBLES, Recorder, ReplicaColumns, sum_rounds
from sim.engine.experiment import ReplicaSpec
from sim.engine.lane import Cluster, Lane, Paused, PolicyError, QueueView, RequestState, RunningView, Turn
from sim.engine.pricing import Pricing
from sim.engine.running import Departure, TapedSet, UniformSet

_FRACTION = (1 << TICK_BITS) - 1
_PB1, _PB2, _PB3, _DEPTH = range(len(BUBBLES))
_LONGEST_SPAN = 1 << 20
_LONGEST_TAPED_SPAN = 4096


_new = tuple.__new__
"""Builds a NamedTuple without the detour through its constructor: a third of the time, several times an iteration."""


class Replica:
    """Serves the requests routed to it."""

    def __init__(
        self, env: Clock, index: int, spec: ReplicaSpec, state: RequestState, cluster: Cluster,
        seed: int, fast_forward: bool,
    ) -> None:  # fmt: skip
        self.index = index
        self.recorder = Recorder()
        self._record = self.recorder.spans.add
        self.events = 0
        self._env = env
        self._spec = spec
        self._state = state
        self._cluster = cluster
        self._fast_forward = fast_forward
        self._plan = spec.scheduler.plan
        self._window = spec.cost.window_tokens
        self._block_tokens = spec.block_tokens
        self._total_blocks = spec.kv_blocks
        self._free_blocks = spec.kv_blocks
        self._pricing = Pricing(spec.cost, spec.draft_cost, spec.speculation_overhead_s)
        self._queue: deque[WaitingSeq] = deque()
        self._queue_view = QueueView(self._queue)
        self._priority = ITERATION_PRIORITY + 2 * index
        n_stages = spec.cost.n_stages
        n_lanes = spec.micro_batches or n_stages
        self._lanes = [self._new_lane(i, seed) for i in range(n_lanes)]
        self._lane = self._lanes[0]
        self._pipelined = n_stages > 1 or n_lanes > 1
        self._ready = deque(self._lanes)
        """Lanes that are not in flight, the longest idle first."""
        self._stage_free = [0] * n_stages
        self._stage_used = [False] * n_stages
        """Whether the stage has worked since the replica was last idle: only then is its waiting a bubble."""
        self._n_in_flight = 0
        self._ticks = 0
        self._end_callbacks = [self._on_end]
        self._kicked = False
        self._committing = False
        self._interrupted_token_ns: dict[int, int] = {}
        self._n_admitted = 0
        self._n_dispatched = 0
        self._dispatched: tuple[bool, list[int]] = (False, [0] * n_stages)
        """Of the micro-batch sent off last: whether it had prompt tokens, and its ticks in each stage."""
        # KV slots that a request needs beyond its own tokens: those of drafted tokens.
        self._lookahead = 0 if spec.decoding is None else spec.decoding.max_query_tokens - 1

    def _new_lane(self, index: int, seed: int) -> Lane:
        spec = self._spec
        if spec.decoding is None:
            lane = Lane(index, UniformSet(spec.block_tokens, self._window))
        else:
            lane = Lane(index, TapedSet(spec.block_tokens, self._window, spec.decoding, seed))
        lane.running_view = RunningView(lane, self.running_seq)
        return lane

    # What routers see: iterations that have ended.

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def running(self) -> int:
        return self._n_admitted

    @property
    def kv_blocks_used(self) -> int:
        used = self._total_blocks - self._free_blocks
        lane = self._lane
        if not self._pipelined and lane.in_flight and lane.n > 1:
            used += lane.decoding.blocks_for(self._in_flight_now(lane)) - lane.growth_first
        return used

    # Arrivals.

    def enqueue(self, id_: int) -> None:
        """Take a request at the present instant; one that can never fit is rejected with its reason."""
        state = self._state
        prompt, output = state.prompt[id_], state.output[id_]
        state.replica[id_] = self.index
        limit = self._spec.max_model_len
        if limit is not None and prompt + output > limit:
            self._cluster.rejected(id_, f"prompt and output exceed the model's context of {limit} tokens")
            return
        # The last token is never cached: nothing comes after it.
        needed = -(-((prompt or 1) + (output - 1 + self._lookahead if output else 0)) // self._block_tokens)
        if needed > self._total_blocks:
            self._cluster.rejected(
                id_, f"needs {needed} KV blocks for prompt and output but the replica has {self._total_blocks}"
            )
            return
        # A request without a prompt starts from one begin-of-sequence token.
        if state.deadline is None and state.model is None:
            self._queue.append(WaitingSeq(id_, prompt or 1, state.arrival[id_]))
        else:
            self._queue.append(self._waiting_seq(id_, prompt or 1, False))
        if self._committing:
            return
        lane = self._lane
        if self._pipelined:
            if self._ready and not self._kicked and self._stage_free[0] >> TICK_BITS <= self._env.now:
                self._kick()
        elif not lane.in_flight:
            if not self._kicked:
                self._kick()
        elif not lane.through_arrivals:
            self._cut(lane)
        elif lane.n > 1:
            self.recorder.queued_ns.append(self._env.now + (self._cluster.turn > self._priority))

    def _waiting_seq(self, id_: int, tokens: int, preempted: bool) -> WaitingSeq:
        state = self._state
        model = 0 if state.model is None else state.model[id_]
        deadline = -1 if state.deadline is None else state.deadline[id_]
        return WaitingSeq(id_, tokens, state.arrival[id_], model, deadline, preempted)

    def _kick(self) -> None:
        """Plan at the end of this instant, when all that arrives in it has arrived."""
        self._kicked = True
        Turn(self._env, [self._on_kick]).arm(self._priority + 1, 0)

    def _on_kick(self, _event: simpy.Event) -> None:
        self._kicked = False
        self._ticks = max(self._ticks, self._env.now << TICK_BITS)
        if self._pipelined:
            self._pump()
        elif not self._lane.in_flight and not self._begin(self._lane):
            self._refuse_idling()

    def _in_flight_now(self, lane: Lane) -> int:
        """Which iteration of the span is in flight, from 1.

        Until the iteration ends of an instant have had their turn, one that ends in it is still in flight.
        """
        late = self._cluster.turn > self._priority
        target = ((self._env.now + late) << TICK_BITS) - lane.start_ticks
        if lane.end_ticks is not None:
            j = int(lane.end_ticks.searchsorted(target)) + 1
        else:
            j = iterations_to_reach(target, lane.first_ticks, lane.growth_ticks)
        return min(j, lane.n)

    def _cut(self, lane: Lane) -> None:
        lane.through_arrivals = True
        if lane.n > 1:
            j = self._in_flight_now(lane)
            if j < lane.n:
                lane.n = j
                if lane.end_ticks is None:
                    self.recorder.spans.change_last("n", j)
                self._sleep(lane)

    def _sleep(self, lane: Lane) -> None:
        if lane.end_ticks is not None:
            end = lane.start_ticks + int(lane.end_ticks[lane.n - 1])
        else:
            end = lane.start_ticks + elapsed(lane.n, lane.first_ticks, lane.growth_ticks)
        self._sleep_until(lane, end)

    def _sleep_until(self, lane: Lane, end_ticks: int) -> None:
        lane.span_end_ticks = end_ticks
        event = lane.event
        if event is None or event.callbacks is not None:
            # The one before was cut short: it will find another in its place.
            event = lane.event = Turn(self._env, self._end_callbacks)
            event.lane = lane
        event.callbacks = self._end_callbacks
        env = self._env
        env.schedule(event, self._priority, (end_ticks >> TICK_BITS) - env.now)

    # Planning.

    def running_seq(self, lane: Lane, id_: int) -> RunningSeq:
        arrival = self._state.arrival[id_]
        if id_ in lane.decoding:
            cached, blocks = lane.decoding.state_of(id_)
            return RunningSeq(id_, cached, blocks, lane.decoding.growth_of(id_), arrival)
        if id_ in lane.partial:
            partial = lane.partial[id_]
            return RunningSeq(id_, partial.cached_tokens, self._blocks_of(partial), 0, arrival)
        paused = lane.paused[id_]
        return RunningSeq(id_, paused.cached, paused.blocks, self._paused_growth(lane, paused), arrival)

    def _blocks_of(self, partial: PartialSeq) -> int:
        """KV blocks are taken for all of a prompt when it is admitted."""
        return -(-(partial.cached_tokens + partial.remaining_tokens) // self._block_tokens)

    def _paused_growth(self, lane: Lane, paused: Paused) -> int:
        query = lane.decoding.query_tokens if lane.taped else 1
        return max(0, -(-(paused.cached + query) // self._block_tokens) - paused.blocks)

    def _begin(self, lane: Lane) -> bool:
        """Ask the scheduler, and start what it plans at tick `_ticks`; False if it plans nothing."""
        decoding = lane.decoding
        n_decoding = decoding.n
        query = 1
        if lane.taped:
            decoding.follow_batch()
            query = decoding.query_tokens
        growth = decoding.growth_blocks if n_decoding else 0
        if lane.paused:
            n_decoding += len(lane.paused)
            growth += sum(self._paused_growth(lane, paused) for paused in lane.paused.values())
        partial = lane.partial
        if not (n_decoding or partial or self._queue):
            return False
        view = _new(
            ReplicaView,
            (
                self._queue_view if self._queue else (),
                tuple(partial.values()),
                n_decoding,
                query,
                self._free_blocks,
                growth,
                self._block_tokens,
                self._total_blocks,
                self._ticks >> TICK_BITS,
                lane.running_view,
                None,
                bool(lane.chunks),
            ),
        )
        decode, chunks, preempt, hold, through_arrivals, pad_tokens, pad_sequences = self._plan(view)
        if preempt or decode is not True or lane.paused:
            for id_ in preempt:
                self._preempt(lane, id_)
            if decode is not True or lane.paused:
                self._choose_decodes(lane, decode)
            n_decoding = decoding.n if decode else 0
            growth = decoding.growth_blocks if n_decoding else 0
        if chunks or (n_decoding and (self._pipelined or pad_tokens)):
            self._start_iteration(lane, chunks, n_decoding, growth, pad_tokens, pad_sequences)
        elif n_decoding:
            hold = min(hold, _LONGEST_SPAN) if self._fast_forward and hold > 1 else 1
            self._start_rounds(lane, hold, through_arrivals, growth)
        elif preempt:
            return self._begin(lane)
        else:
            return False
        return True

    def _refuse_idling(self) -> None:
        """An empty plan is an error when there is work and nothing in flight that could change what the policy sees."""
        prefilling = sum(len(lane.partial) for lane in self._lanes)
        decoding = sum(lane.decoding.n + len(lane.paused) for lane in self._lanes)
        if self._n_in_flight or not (self._queue or prefilling or decoding):
            return
        raise PolicyError(
            f"{self._spec.scheduler!r} planned nothing at t={self._ticks / TICKS_PER_S:.6f} s with {len(self._queue)} waiting, "
            f"{prefilling} prefilling and {decoding} decoding; a plan must make progress when nothing else runs"
        )

    def _choose_decodes(self, lane: Lane, decode: bool | tuple[int, ...]) -> None:
        """Bring the decoding set in line with the plan: pause who is left out, resume who is named again."""
        if decode is False:
            return
        decoding, paused = lane.decoding, lane.paused
        wanted = set(paused) | set(decoding) if decode is True else set(decode)
        unknown = [id_ for id_ in wanted if id_ not in decoding and id_ not in paused]
        if unknown:
            raise PolicyError(
                f"{self._spec.scheduler!r} planned a decode step for request {unknown[0]}, which is not decoding here"
            )
        if decode is not True:
            for id_ in [id_ for id_ in decoding if id_ not in wanted]:
                departure = self._leave(lane, id_)
                paused[id_] = Paused(departure.cached_tokens, departure.blocks, self._last_token_ns(lane, departure))
        for id_ in [id_ for id_ in paused if id_ in wanted]:
            seq = paused.pop(id_)
            # Slots held for drafted tokens beyond what is cached go back while it waits.
            self._join(lane, id_, seq.cached, seq.token_ns)

    def _leave(self, lane: Lane, id_: int) -> Departure:
        departure = lane.decoding.leave(id_)
        self._log_departure(lane, departure)
        self._state.left[id_] -= departure.emitted
        kept = -(-departure.cached_tokens // self._block_tokens)
        self._free_blocks += departure.blocks - kept
        return departure._replace(blocks=kept)

    def _join(self, lane: Lane, id_: int, cached: int, token_ns: int) -> None:
        lane.decoding.join(id_, cached, self._state.left[id_], token_ns)
        if self._pipelined:
            lane.bubbles_at_join[id_] = lane.bubbles.copy()

    def _log_departure(self, lane: Lane, departure: Departure) -> None:
        if self._pipelined:
            before = lane.bubbles_at_join.pop(departure.id)
            for kind, column in enumerate(self._state.bubbles):
                column[departure.id] += lane.bubbles[kind] - before[kind]
        self.recorder.joins.add(
            lane.index, departure.since, lane.decoding.round, departure.cached_before, departure.token_ns
        )

    def _last_token_ns(self, lane: Lane, departure: Departure) -> int:
        return lane.last_round_ns if departure.emitted else departure.token_ns

    def _preempt(self, lane: Lane, id_: int) -> None:
        """Give back a sequence's blocks; it returns to the head of the queue to be computed again."""
        state = self._state
        if id_ in lane.decoding:
            departure = self._leave(lane, id_)
            blocks = departure.blocks
            self._interrupted_token_ns[id_] = self._last_token_ns(lane, departure)
        elif id_ in lane.paused:
            paused = lane.paused.pop(id_)
            blocks = paused.blocks
            self._interrupted_token_ns[id_] = paused.token_ns
        elif id_ in lane.partial:
            blocks = self._blocks_of(lane.partial.pop(id_))
        else:
            raise PolicyError(f"{self._spec.scheduler!r} preempted request {id_}, which is not running here")
        self._free_blocks += blocks
        del lane.admitted[id_]
        self._n_admitted -= 1
        state.preemptions[id_] += 1
        tokens = (state.prompt[id_] or 1) + state.output[id_] - state.left[id_]
        self._queue.appendleft(self._waiting_seq(id_, tokens, True))

    def _admit(self, lane: Lane, id_: int, now_ns: int) -> PartialSeq:
        queue = self._queue
        if queue and queue[0].id == id_:
            seq = queue.popleft()
        else:
            seq = next((seq for seq in queue if seq.id == id_), None)
            if seq is None:
                raise PolicyError(
                    f"{self._spec.scheduler!r} planned prompt tokens for request {id_}, which neither waits nor prefills here"
                )
            queue.remove(seq)
        self._free_blocks -= -(-seq.tokens // self._block_tokens)
        lane.admitted[id_] = None
        self._n_admitted += 1
        if self._state.scheduled[id_] < 0:
            self._state.scheduled[id_] = now_ns
        return PartialSeq(id_, 0, seq.tokens)

    def _start_iteration(
        self, lane: Lane, chunks: tuple[tuple[int, int], ...], n: int, growth: int, pad_tokens: int, pad_sequences: int
    ) -> None:
        """One iteration with prompt chunks and a decode step of *n* sequences, all or none, that takes *growth* blocks."""
        decoding = lane.decoding
        start = self._ticks
        now_ns = start >> TICK_BITS
        free_before = self._free_blocks
        self._free_blocks -= growth
        rows = pairs = pairs_window = kv = 0
        window = self._window
        completing: list[int] = []
        partials = lane.partial
        for id_, tokens in chunks:
            partial = partials.get(id_)
            if partial is None:
                partial = self._admit(lane, id_, now_ns)
            _, cached, remaining = partial
            remaining -= tokens
            if remaining < 0 or tokens <= 0:
                raise PolicyError(
                    f"{self._spec.scheduler!r} planned {tokens} prompt tokens for request {id_}, "
                    f"of which {partial.remaining_tokens} are left to compute"
                )
            rows += tokens
            pairs += tokens * cached + tokens * (tokens + 1) // 2
            if window is not None:
                pairs_window += _pairs_within(cached, tokens, window)
            cached += tokens
            kv += cached
            partials[id_] = _new(PartialSeq, (id_, cached, remaining))
            if remaining == 0:
                completing.append(id_)
        if self._free_blocks < 0:
            raise PolicyError(
                f"{self._spec.scheduler!r} planned {free_before - self._free_blocks} new KV blocks at "
                f"t={now_ns / 1e9:.6f} s but only {free_before} are free; wrap it in EvictNewest or admit less"
            )
        query, draft_steps = 1, 0
        decode_rows = decode_kv = decode_window = 0
        emitted = n
        if lane.taped:
            query, draft_steps = decoding.query_tokens, decoding.draft_steps
            if n:
                emitted = int(decoding.emitted_in(1)[0])
        if n:
            decode_rows = n * query
            decode_kv = decoding.cached + decode_rows
            if window is not None:
                decode_window = int(decoding.window_in(1)[0]) if lane.taped else decoding.window_sum
        completions, n_chunks = len(completing), len(chunks)
        left = self._state.left
        for id_ in completing:
            emitted += left[id_] > 0
        lane.chunks = chunks
        lane.completing = completing
        lane.decodes = n > 0
        lane.growth_first = growth
        lane.through_arrivals = True
        totals = _new(
            Totals,
            (
                rows + decode_rows, rows, n_chunks, pairs, kv, n, decode_kv, decode_rows + completions,
                pairs_window, decode_window,
            ),
        )  # fmt: skip
        if pad_tokens:
            totals = _padded(totals, chunks, n and max(n, pad_sequences), query, pad_tokens, window)
        lane.start_ticks = start
        lane.n = 1
        lane.growth_ticks = 0
        lane.end_ticks = None
        lane.in_flight = True
        self._n_in_flight += 1
        if self._pipelined:
            end, bubble_ns = self._through_stages(lane, totals, draft_steps)
        else:
            end, bubble_ns = start + self._pricing.iteration(totals, draft_steps), 0
        lane.first_ticks = end - start
        self._record(
            now_ns, start & _FRACTION, 1, end - start, 0, lane.index, rows, n_chunks, pairs, kv, pairs_window, n, query,
            draft_steps, decode_kv, decode_window, 0, completions, emitted, self._n_admitted, len(self._queue),
            self._total_blocks - self._free_blocks, decoding.round, bubble_ns,
        )  # fmt: skip
        self._sleep_until(lane, end)

    def _start_rounds(self, lane: Lane, hold: int, through_arrivals: bool, growth: int) -> None:
        """Decode iterations only, as many as nothing can change in, *hold* at most; the first takes *growth* blocks."""
        decoding = lane.decoding
        if growth > self._free_blocks:
            raise PolicyError(
                f"{self._spec.scheduler!r} planned {growth} new KV blocks at t={self._ticks / TICKS_PER_S:.6f} s "
                f"but only {self._free_blocks} are free; wrap it in EvictNewest or admit less"
            )
        lane.chunks = ()
        lane.completing = []
        lane.decodes = True
        lane.growth_first = growth
        lane.through_arrivals = through_arrivals
        n = decoding.n
        if lane.taped:
            self._start_taped_rounds(lane, hold, n, growth)
            return
        kv = decoding.cached + n
        window, window_growth = decoding.window_sum, decoding.window_growth
        base, slope, slope_window, kv_end, window_end = self._pricing.decode_line(n, 1, 0, kv, window)
        rounds = min(hold, decoding.until_finish(), (kv_end - 1 - kv) // n + 1)
        if self._window is not None:
            rounds = min(rounds, decoding.until_bend())
            if window_growth:
                rounds = min(rounds, (window_end - 1 - window) // window_growth + 1)
        if rounds > 1:
            rounds = decoding.rounds_within(self._free_blocks, rounds)
        self._free_blocks -= growth
        start = self._ticks
        first = base + slope * kv + slope_window * window
        growth_ticks = slope * n + slope_window * window_growth
        if elapsed(rounds, first, growth_ticks) >= LONGEST_TICKS:
            rounds = max(1, iterations_to_reach(LONGEST_TICKS, first, growth_ticks) - 1)
        lane.n = rounds
        lane.start_ticks = start
        lane.first_ticks = first
        lane.growth_ticks = growth_ticks
        lane.end_ticks = None
        lane.in_flight = True
        self._n_in_flight = 1
        self._record(
            start >> TICK_BITS, start & _FRACTION, rounds, first, growth_ticks, lane.index, 0, 0, 0, 0, 0, n, 1, 0, kv,
            window, window_growth, 0, n, self._n_admitted, len(self._queue), self._total_blocks - self._free_blocks,
            decoding.round, 0,
        )  # fmt: skip
        self._sleep_until(lane, start + elapsed(rounds, first, growth_ticks))

    def _start_taped_rounds(self, lane: Lane, hold: int, n: int, growth: int) -> None:
        decoding = lane.decoding
        query, steps = decoding.query_tokens, decoding.draft_steps
        kv = decoding.cached + n * query
        rounds = min(hold, decoding.until_finish(), _LONGEST_TAPED_SPAN)
        if rounds > 1:
            rounds = decoding.rounds_within(self._free_blocks, rounds)
        emitted = decoding.emitted_in(rounds)
        kvs = emitted.cumsum()
        kvs -= emitted
        kvs += kv
        windows = None
        if self._window is not None:
            windows = decoding.window_in(rounds)
            line = self._pricing.decode_line(n, query, steps, kv, int(windows[0]))
            inside = (kvs < line.kv_end) & (windows < line.kv_window_end)
            if not inside.all():
                rounds = int(inside.argmin())
            durations = line.base + line.slope * kvs[:rounds] + line.slope_window * windows[:rounds]
        else:
            line = self._pricing.decode_line(n, query, steps, kv, 0)
            if kvs[-1] >= line.kv_end:
                rounds = int(kvs.searchsorted(line.kv_end))
            durations = kvs[:rounds] * line.slope
            durations += line.base
        longest = int(durations[-1])
        if longest * rounds >= LONGEST_TICKS:
            rounds = max(1, LONGEST_TICKS // longest)
            durations = durations[:rounds]
        self._free_blocks -= growth
        lane.n = rounds
        lane.start_ticks = self._ticks
        lane.first_ticks = int(durations[0])
        lane.growth_ticks = 0
        lane.end_ticks = durations.cumsum()
        lane.record = (n, query, steps, kvs, windows, emitted, len(self._queue), len(self.recorder.queued_ns))
        lane.in_flight = True
        self._n_in_flight = 1
        self._sleep(lane)

    def _through_stages(self, lane: Lane, totals: Totals, draft_steps: int) -> tuple[int, int]:
        """Send a micro-batch through the stages of the pipeline; the tick it leaves the last at, and its bubble in ns."""
        stages, handover = self._pricing.stages(totals, draft_steps)
        prefills = totals.prefill_rows > 0
        prefilled, before = self._dispatched
        self._dispatched = prefills, stages
        kind = _PB2 if prefills != prefilled else _PB1 if prefills else _PB3
        if self._n_in_flight < len(stages):
            kind = _DEPTH
        ready = lane.start_ticks
        bubbles = [0] * len(BUBBLES)
        for stage, duration in enumerate(stages):
            free = self._stage_free[stage]
            begin = max(ready, free)
            begin_ns = begin >> TICK_BITS
            bubble_ns = begin_ns - (free >> TICK_BITS) if self._stage_used[stage] else 0
            of_kind = kind if duration != before[stage] else _DEPTH
            bubbles[of_kind] += bubble_ns
            self._stage_used[stage] = True
            end = self._stage_free[stage] = begin + duration
            duration_ns = (end >> TICK_BITS) - begin_ns
            self.recorder.stages.add(self._n_dispatched, stage, begin_ns, duration_ns, bubble_ns, of_kind)
            ready = end + handover
        self._n_dispatched += 1
        for kind, bubble_ns in enumerate(bubbles):
            if bubble_ns:
                if lane.decodes:
                    lane.bubbles[kind] += bubble_ns
                for id_, _ in lane.chunks:
                    self._state.bubbles[kind][id_] += bubble_ns
        Turn(self._env, [self._on_stage_free]).arm(
            self._priority + 1, (self._stage_free[0] >> TICK_BITS) - self._env.now
        )
        return ready - handover, sum(bubbles)

    # Pipelines.

    def _on_stage_free(self, _event: simpy.Event) -> None:
        self._pump()

    def _pump(self) -> None:
        """Plan the next micro-batch if the first stage is free: the lane that has been idle longest and has work goes first."""
        if self._stage_free[0] >> TICK_BITS > self._env.now:
            return
        self._ticks = max(self._stage_free[0], self._env.now << TICK_BITS)
        for _ in range(len(self._ready)):
            lane = self._ready.popleft()
            if self._begin(lane):
                return
            self._ready.append(lane)
        self._refuse_idling()

    # Commit.

    def _on_end(self, event: Any) -> None:
        lane: Lane = event.lane
        if lane.event is not event:
            return
        end_ticks = lane.span_end_ticks
        self._committing = True
        self.events += 1
        end_ns = end_ticks >> TICK_BITS
        lane.in_flight = False
        self._n_in_flight -= 1
        self._finish_iterations(lane, end_ns)
        self._committing = False
        if self._pipelined:
            self._ready.append(lane)
            if not self._n_in_flight and not self._queue and not self._n_admitted:
                self._stage_used = [False] * len(self._stage_used)
            if not self._kicked and self._stage_free[0] >> TICK_BITS <= self._env.now:
                self._kick()
            return
        self._ticks = end_ticks
        if not self._begin(lane):
            self._refuse_idling()

    def _finish_iterations(self, lane: Lane, end_ns: int) -> None:
        state, decoding = self._state, lane.decoding
        if lane.decodes:
            n = lane.n
            if lane.end_ticks is not None:
                self._write_taped(lane)
            if n > 1:
                self._free_blocks -= decoding.blocks_for(n) - lane.growth_first
            lane.last_round_ns = end_ns
            for departure in decoding.advance(n):
                self._log_departure(lane, departure)
                id_ = departure.id
                state.left[id_] -= departure.emitted
                self._free_blocks += departure.blocks
                self._end_request(lane, id_, end_ns)
        for id_ in lane.completing:
            partial = lane.partial.pop(id_)
            left = state.left[id_]
            if left:
                if state.first_token[id_] < 0:
                    state.first_token[id_] = end_ns
                else:
                    self.recorder.resumed_gaps_ns.append(end_ns - self._interrupted_token_ns.pop(id_))
                state.left[id_] = left = left - 1
            if left:
                self._join(lane, id_, partial.cached_tokens, end_ns)
            else:
                self._free_blocks += self._blocks_of(partial)
                self._end_request(lane, id_, end_ns)

    def _end_request(self, lane: Lane, id_: int, end_ns: int) -> None:
        del lane.admitted[id_]
        self._n_admitted -= 1
        self._state.finish[id_] = end_ns
        self._state.status[id_] = 0
        self._cluster.finished(end_ns, self._priority)

    def _write_taped(self, lane: Lane) -> None:
        """A taped span: what its iterations have in common, and an array for what they have not."""
        n_rounds = lane.n
        n, query, steps, kvs, windows, emitted, waiting, n_queued = lane.record
        decoding, start = lane.decoding, lane.start_ticks
        self.recorder.add_taped(
            (
                start >> TICK_BITS, start & _FRACTION, n_rounds, -1, 0,
                lane.index, 0, 0, 0, 0, 0, n, query, steps, 0, 0,
                0, 0, 0, self._n_admitted, waiting, 0, decoding.round, 0,
            ),
            self._total_blocks - self._free_blocks - lane.growth_first,
            n_queued,
            lane.end_ticks[:n_rounds], kvs[:n_rounds], None if windows is None else windows[:n_rounds],
            emitted[:n_rounds], decoding.blocks_in(n_rounds),
        )  # fmt: skip

    # The end of the run.

    def stop(self) -> None:
        """Account for what is in flight when the clock stops: iterations that have ended count, the others have not been."""
        if self._pipelined:
            self.recorder.spans.drop_last(self._n_in_flight)
            self.recorder.stages.drop_last(self._n_in_flight * len(self._stage_free))
        for lane in self._lanes:
            if lane.in_flight and not self._pipelined:
                done = self._in_flight_now(lane) - 1
                if lane.end_ticks is None:
                    if done:
                        self.recorder.spans.change_last("n", done)
                    else:
                        self.recorder.spans.drop_last(1)
                if done:
                    lane.n = done
                    ticks = (
                        int(lane.end_ticks[done - 1])
                        if lane.end_ticks is not None
                        else elapsed(done, lane.first_ticks, lane.growth_ticks)
                    )
                    self._finish_iterations(lane, (lane.start_ticks + ticks) >> TICK_BITS)
            for id_ in list(lane.decoding):
                self._leave(lane, id_)

    def columns(self) -> ReplicaColumns:
        speculation = None
        if self._spec.decoding is not None:
            sets = [lane.decoding for lane in self._lanes if isinstance(lane.decoding, TapedSet)]
            speculation = sum_rounds([set_.rounds_by_k for set_ in sets])
        return ReplicaColumns(
            spans=self.recorder.all_spans(),
            joins=self.recorder.joins.array(),
            queued_ns=np.array(self.recorder.queued_ns, np.int64),
            resumed_gaps_ns=np.array(self.recorder.resumed_gaps_ns, np.int64),
            stages=self.recorder.stages.array(),
            kv_blocks_total=self._total_blocks,
            block_tokens=self._block_tokens,
            n_stages=len(self._stage_free),
            speculation=speculation,
        )


def _pairs_within(past: int, tokens: int, window: int) -> int:
    """Query-key pairs of a chunk whose queries see *window* keys at most, themselves included."""
    growing = max(0, min(tokens, window - past))
    return growing * past + growing * (growing + 1) // 2 + (tokens - growing) * window


def _padded(
    totals: Totals, chunks: tuple[tuple[int, int], ...], n: int, query: int, pad_tokens: int, window: int | None
) -> Totals:
    """What an iteration takes whose chunks are padded to *pad_tokens* each, and its decodes to *n* of that context."""
    short = [pad_tokens - tokens for _, tokens in chunks if tokens < pad_tokens]
    rows = sum(short)
    # Padding attends to what is before it, as causal attention over the padded length does.
    pairs = sum(pad_tokens * (pad_tokens + 1) // 2 - (pad_tokens - gap) * (pad_tokens - gap + 1) // 2 for gap in short)
    pairs_window = 0
    if window is not None:
        pairs_window = sum(
            _pairs_within(0, pad_tokens, window) - _pairs_within(0, pad_tokens - gap, window) for gap in short
        )
    return totals._replace(
        rows=totals.prefill_rows + rows + n * query,
        prefill_rows=totals.prefill_rows + rows,
        prefill_pairs=totals.prefill_pairs + pairs,
        prefill_kv_tokens=totals.prefill_kv_tokens + rows,
        decode_seqs=n,
        decode_kv_tokens=max(n * pad_tokens, totals.decode_kv_tokens) if n else 0,
        logit_rows=totals.logit_rows - totals.decode_seqs * query + n * query,
        prefill_pairs_window=totals.prefill_pairs_window + pairs_window,
        decode_kv_window=max(n * min(pad_tokens, window), totals.decode_kv_window) if n and window is not None else 0,
    )
