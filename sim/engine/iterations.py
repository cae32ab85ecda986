"""Starting iterations: KV blocks are taken, totals are added up, and the iteration is priced and recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from hwmodels.reach import Window
from hwmodels.totals import Totals, pairs_within, seen
from policies.view import PartialSeq, Plan, pads_to
from sim.engine.clock import TICK_BITS
from sim.engine.columns import Recorder
from sim.engine.errors import PolicyError
from sim.engine.experiment import ReplicaSpec
from sim.engine.lane import Ended, Lane, Prepared
from sim.engine.padding import padded
from sim.engine.prices import Prices
from sim.engine.sequences import Sequences
from sim.engine.span import Step
from sim.engine.stages import Stages

_new: Final = tuple[object, ...].__new__
"""Builds a NamedTuple without the detour through its constructor: a third of the time, several times an iteration."""

NO_PROMPTS: Final[tuple[tuple[int, int], ...]] = ()
NOBODY: Final[Mapping[int, Ended]] = {}


class Prompts:
    """What the prompt chunks of one iteration add up to."""

    __slots__ = ("blocks", "completing", "found", "kv_tokens", "loaded", "pairs", "pairs_window", "rows")

    def __init__(self) -> None:
        self.rows = 0
        self.pairs = 0
        self.pairs_window = 0
        self.kv_tokens = 0
        self.blocks = 0
        """KV blocks that are still to be taken."""
        self.found = 0
        """Tokens that sequences find in the prefix cache when they are admitted ..."""
        self.loaded = 0
        """... and tokens that had been loaded for them from tiers."""
        self.completing: list[int] = []
        """Requests whose prompts are complete after this iteration."""


class Iterations:
    """Starts the iterations of one model on a machine."""

    def __init__(
        self, spec: ReplicaSpec, sequences: Sequences, recorder: Recorder, prices: Prices, stages: Stages, *,
        alone: bool, is_rank: bool, fast_forward: bool,
    ) -> None:  # fmt: skip
        self.prices = prices
        self.pads_to = pads_to(spec.scheduler)
        self.window: Window = spec.cost.window_tokens
        self.n_in_flight = 0
        self._scheduler = spec.scheduler
        self._sequences = sequences
        self._kv = sequences.kv
        self._queue = sequences.queue
        self._finding = sequences.finding
        self._left = sequences.state.left
        self._bubbles = sequences.state.bubbles
        self._recorder = recorder
        self._stages = stages
        self._alone = alone
        self._is_rank = is_rank
        self._fast_forward = fast_forward
        self._by_chunk = sequences.kv.by_chunk
        self._caches = sequences.kv.caches
        self._finds = sequences.kv.caches or bool(spec.tiers)
        self._late = sequences.kv.caches_late
        self._looks_up_at_once = sequences.kv.caches and not sequences.finding.in_turn
        exchange = sequences.exchange
        self._drops_token = exchange is not None and exchange.drops_token
        self._n_sent = 0

    # An iteration of its own.

    def start(self, lane: Lane, run: tuple[tuple[int, int], ...], n: int, growth: int, ticks: int) -> int:
        """Start one iteration with prompt chunks and a decode step of *n* sequences, all or none, that takes *growth* blocks; the
        tick at which it ends."""
        return self.start_with_wasted(lane, run, n, growth, ticks, NOBODY)

    def start_with_wasted(
        self, lane: Lane, run: tuple[tuple[int, int], ...], n: int, growth: int, ticks: int, ended: Mapping[int, Ended]
    ) -> int:
        """The same, with a step of those that have *ended*, which comes to nothing."""
        sequences, recorder, decoding = self._sequences, self._recorder, lane.decoding
        prompts = self._take_cached(lane, run, n, growth, ticks, ended) if self._caches else Prompts()
        if not self._caches:
            prompts.blocks = growth
            self._compute(lane, run, prompts, ticks)
            if prompts.blocks:
                sequences.take(prompts.blocks, ticks)
        evicted = recorder.newly_evicted(self._kv.evicted) if self._caches and run else 0
        query, draft_steps = decoding.query_tokens, decoding.draft_steps
        decode_rows = decode_kv = decode_window = emitted = 0
        if n:
            decode_rows = n * query
            decode_kv = decoding.cached + decode_rows
            emitted, decode_window = decoding.next_round()
        for gone in ended.values():
            decode_rows += query
            decode_kv += gone.cached + query
            decode_window += 0 if self.window is None else seen(gone.cached + query, self.window)
        completing = prompts.completing
        if completing and not self._drops_token:
            left = self._left
            for id_ in completing:
                emitted += left[id_] > 0
        rows = prompts.rows
        totals = _new(
            Totals,
            (
                rows + decode_rows, rows, len(run), prompts.pairs, prompts.kv_tokens, n + len(ended), decode_kv,
                decode_rows + len(completing), prompts.pairs_window, decode_window,
            ),
        )  # fmt: skip
        lane.run = run
        lane.completing = completing
        lane.decodes = n > 0
        lane.through_arrivals = True
        self.n_in_flight += 1
        priced = totals if not self.pads_to else self._padded(lane, totals, n)
        if self._is_rank:
            recorded = (totals, draft_steps, query, len(completing), emitted)
            lane.prepared = Prepared(
                priced, draft_steps, recorded, growth, len(ended), prompts.found, prompts.loaded, evicted
            )
            return ticks
        bubble_ns = 0
        if self._alone:
            duration = self.prices.iteration(priced, draft_steps)
        else:
            duration, bubble_ns = self._through_stages(lane, priced, draft_steps, ticks)
        lane.span = Step(ticks, ticks + duration, growth)
        recorder.add_iteration(
            ticks, duration, lane.index, totals, draft_steps, query, len(completing), emitted, sequences.n_admitted,
            len(self._queue), self._kv.total - self._kv.free, decoding.round, bubble_ns, len(ended), prompts.found, prompts.loaded, evicted,
        )  # fmt: skip
        return ticks + duration

    def _compute(self, lane: Lane, run: tuple[tuple[int, int], ...], prompts: Prompts, ticks: int) -> None:
        """Add up the prompt chunks of *run*, and admit those that wait; with a prefix cache each takes its blocks in its turn."""
        partials, kv, by_chunk, caches = lane.partial, self._kv, self._by_chunk, self._caches
        rows = pairs = kv_tokens = 0
        for id_, tokens in run:
            partial = partials.get(id_)
            if partial is None:
                partial = self._admit(lane, id_, tokens, prompts, ticks)
            elif by_chunk:
                prompts.blocks -= kv.held(partial[1])
            _, cached, left, arrival_ns, model, deadline_ns, priority = partial
            remaining = left - tokens
            if remaining < 0 or tokens <= 0:
                raise PolicyError(
                    f"{self._scheduler!r} planned {tokens} prompt tokens for request {id_}, "
                    f"of which {left} are left to compute"
                )
            rows += tokens
            pairs += tokens * cached + tokens * (tokens + 1) // 2
            if self.window is not None:
                prompts.pairs_window += pairs_within(cached, tokens, self.window)
            cached += tokens
            kv_tokens += cached
            if by_chunk:
                prompts.blocks += kv.held(cached)
            if caches:
                self._take_chunk(id_, cached, prompts, ticks)
            partials[id_] = _new(PartialSeq, (id_, cached, remaining, arrival_ns, model, deadline_ns, priority))
            if remaining == 0:
                prompts.completing.append(id_)
        prompts.rows = rows
        prompts.pairs = pairs
        prompts.kv_tokens = kv_tokens

    def _admit(self, lane: Lane, id_: int, tokens: int, prompts: Prompts, ticks: int) -> PartialSeq:
        """A sequence of the queue that is admitted, before its first chunk."""
        seq = self._sequences.admit(lane, id_, ticks >> TICK_BITS, tokens)
        if not self._by_chunk:
            prompts.blocks += -(-(seq.tokens + seq.cached_tokens) // self._kv.block_tokens)
        prompts.blocks -= seq.kept_blocks
        if self._finds and not seq.kept_blocks:
            self._note_found(id_, prompts)
        return _new(
            PartialSeq,
            (id_, seq.cached_tokens, seq.tokens, seq.arrival_ns, seq.model, seq.deadline_ns, seq.priority),
        )

    # With a prefix cache.

    def _take_cached(
        self, lane: Lane, run: tuple[tuple[int, int], ...], n: int, growth: int, ticks: int, ended: Mapping[int, Ended]
    ) -> Prompts:
        """Take the blocks of an iteration one after the other, since each may evict what the next would find."""
        kv, sequences, finding, prompts = self._kv, self._sequences, self._finding, Prompts()
        # Those that have ended take the blocks of a step that comes to nothing, and give them back.
        wasted = sum(gone.growth_blocks for gone in ended.values())
        if self._looks_up_at_once:
            finding.keep(self._queue, lane, run)
        if self._late:
            kv.before_prompts(sum(tokens for _, tokens in run), len(run))
        elif growth or wasted:
            sequences.take(growth + wasted, ticks)
        self._compute(lane, run, prompts, ticks)
        if self._late:
            kv.before_decodes(n + len(ended))
            sequences.take(growth + wasted, ticks)
            finding.step_on(ended)
        else:
            kv.give(wasted)
        if finding.ended:
            finding.free_the_ended()
        return prompts

    def _note_found(self, id_: int, prompts: Prompts) -> None:
        """Count what a sequence has found as it is admitted, on the device and loaded from tiers."""
        block_tokens = self._kv.block_tokens
        found = self._kv.found(id_)
        loaded = self._sequences.brought.loaded_last
        prompts.blocks -= found
        prompts.loaded += loaded
        # The blocks of what was loaded are cached, too.
        prompts.found += (found - min(-(-loaded // block_tokens), found)) * block_tokens

    def _take_chunk(self, id_: int, cached: int, prompts: Prompts, ticks: int) -> None:
        if prompts.blocks:
            self._sequences.take(prompts.blocks, ticks)
        self._kv.cached(id_, cached)
        prompts.blocks = 0

    # What it takes.

    def _padded(self, lane: Lane, totals: Totals, n: int) -> Totals:
        context = max((seq.cached_tokens for seq in lane.view.running), default=0) if n else 0
        return padded(totals, lane.run, lane.decoding.query_tokens, context, self.pads_to, self.window)

    def _through_stages(self, lane: Lane, totals: Totals, draft_steps: int, ticks: int) -> tuple[int, int]:
        """Send a micro-batch through the machine's stages; ticks until it has left the last, and its bubbles in ns."""
        durations, handover = self.prices.stages(totals, draft_steps)
        end, bubbles = self._stages.send(
            ticks, durations, handover, bool(lane.run), self._n_sent, self._recorder.stages.add
        )
        self._n_sent += 1
        for kind, bubble_ns in enumerate(bubbles):
            if bubble_ns:
                if lane.decodes:
                    lane.bubbles[kind] += bubble_ns
                for id_, _ in lane.run:
                    self._bubbles[kind][id_] += bubble_ns
        return end - ticks, sum(bubbles)

    def launch(self, lane: Lane, ticks: int, duration: int) -> None:
        """Start what was prepared at *ticks* for a rank, now that the whole step is known to take *duration* ticks."""
        prepared, sequences = lane.prepared, self._sequences
        assert prepared is not None
        lane.prepared = None
        lane.span = Step(ticks, ticks + duration, prepared.growth)
        self._recorder.add_iteration(
            ticks, duration, lane.index, *prepared.recorded, sequences.n_admitted, len(self._queue), self._kv.used,
            lane.decoding.round, 0, prepared.in_vain, prepared.found, prepared.loaded, prepared.evicted,
        )  # fmt: skip

    # Several at once.

    def start_span(self, lane: Lane, plan: Plan, growth: int, ticks: int) -> int:
        """Start decode iterations alone, as many as nothing can change in, the first of which takes *growth* blocks; the tick at
        which they end."""
        decoding, sequences, kv = lane.decoding, self._sequences, self._kv
        free = kv.free
        if self._late:
            kv.before_decodes(decoding.n)
        if growth:
            sequences.take(growth, ticks)
        if self._finding.ended:
            self._finding.free_the_ended()
        lane.run = NO_PROMPTS
        lane.completing = ()
        lane.decodes = True
        lane.through_arrivals = plan.through_arrivals
        hold = plan.hold if self._fast_forward else 1
        span = lane.span = decoding.span(ticks, hold, plan.until_ns, free, growth, self.prices)
        self.n_in_flight += 1
        span.open(self._recorder, lane.index, sequences.n_admitted, len(self._queue), kv.used, decoding.round)
        return span.end(span.n)
