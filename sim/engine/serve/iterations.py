"""Starting iterations: KV blocks are taken, totals are added up, and the iteration is priced and recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from hwmodels.reach import Window
from hwmodels.totals import Totals, pairs_within, seen
from policies.view import PartialSeq, Plan, WaitingSeq, pads_to, rule_of
from sim.engine.batch.masks import Masks
from sim.engine.batch.micro_batch import Ended, MicroBatch, Prepared
from sim.engine.batch.padding import padded
from sim.engine.batch.prices import Prices
from sim.engine.batch.span import Step
from sim.engine.batch.stages import Stages
from sim.engine.kv.pool import OutOfBlocks
from sim.engine.record.columns import IMAGES, MASKS, Recorder, Standing, Tally
from sim.engine.serve.adapters import Adapters
from sim.engine.serve.images import Images
from sim.engine.serve.sequences import Sequences
from sim.engine.spec.experiment import ReplicaSpec
from sim.engine.time.clock import TICK_BITS
from sim.engine.time.errors import PolicyError

_new: Final = tuple[object, ...].__new__
"""Builds a NamedTuple without the detour through its constructor: a third of the time, several times an iteration."""

NO_PROMPTS: Final[tuple[tuple[int, int], ...]] = ()
NOBODY: Final[Mapping[int, Ended]] = {}


class Work(Tally):
    """Totals of an iteration that is being started."""

    __slots__ = ("blocks", "completing", "encode_ticks", "kv_tokens", "pairs", "pairs_window", "rows")

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0
        """Prompt tokens."""
        self.pairs = 0
        self.pairs_window = 0
        self.kv_tokens = 0
        """KV tokens that the prompt tokens attend to."""
        self.completing: list[int] = []
        """Requests whose prompts are complete after this iteration."""
        self.encode_ticks = 0
        """The time of encoding images, beside the model's."""
        self.blocks = 0
        """KV blocks that are still to be taken."""


class Iterations:
    """Starts the iterations of one model on a machine."""

    def __init__(
        self, spec: ReplicaSpec, sequences: Sequences, recorder: Recorder, prices: Prices, stages: Stages, *,
        alone: bool, is_rank: bool, fast_forward: bool,
    ) -> None:  # fmt: skip
        self.prices = prices
        self.adapters: Adapters | None = None
        """Set where requests may ask for adapters."""
        self._masks = None if spec.grammars is None else Masks(spec.grammars, prices)
        self.pads_to = pads_to(spec.scheduler)
        self.window: Window = spec.cost.window_tokens
        self._scheduler = spec.scheduler
        self._sequences = sequences
        self._kv = sequences.kv
        self._queue = sequences.queue
        self._finding = sequences.prefix_lookup
        self._left = sequences.state.left
        self._bubbles = sequences.state.bubbles
        self._recorder = recorder
        self._stages = stages
        self._fast_forward = fast_forward
        self._by_chunk = sequences.kv.by_chunk
        self._caches = sequences.kv.caches
        self._finds = sequences.kv.caches or bool(spec.tiers)
        self._late = sequences.kv.caches_late
        self._drops_token = sequences.connector.drops_token
        self._n_sent = 0
        self._speculates = spec.decoding is not None
        # A draft model of its own goes on; see `policies.vllm_settings.Rules`.
        self._drafts_if_used = spec.prefix_drops_last and bool(rule_of(spec.scheduler, "drafts_if_used"))
        self._price: Callable[[MicroBatch, Totals, int, int], int] | None = (
            self._price_later if is_rank else None if alone else self._price_stages
        )
        """Prices and starts an iteration that is not on the only stage of a machine."""
        self._work = Work()
        self.images: Images | None = None
        """The images that are encoded beside prompts."""

    # An iteration of its own.

    def start(
        self, batch: MicroBatch, run: tuple[tuple[int, int], ...], n: int, growth: int, ticks: int,
        ended: Mapping[int, Ended] = NOBODY,
    ) -> int:  # fmt: skip
        """Start one iteration with prompt chunks and a decode step of all *n* sequences or none, which takes *growth* blocks;
        return the tick at which it ends. The step of sequences that have *ended* is wasted."""
        decoding, work = batch.decoding, self._work
        work.completing = []
        if self._finds:
            self._take_in_turn(batch, run, n, growth, ticks, ended)
        else:
            work.blocks = growth
            self._compute(batch, run, ticks)
            try:
                self._kv.take(work.blocks)
            except OutOfBlocks:
                raise self._sequences.short_of(work.blocks, ticks) from None
        decode_rows = decode_kv = decode_window = work.emitted = 0
        if n:
            decode_rows = n * decoding.query_tokens
            decode_kv = decoding.cached + decode_rows
            work.emitted, decode_window = decoding.next_round()
        if self._speculates:
            work.query_tokens, work.draft_steps = decoding.query_tokens, self._draft_steps(batch, n)
        rows, completing = work.rows, work.completing
        work.completions = len(completing)
        if completing:
            self._count_first_tokens(completing)
        totals: Totals = _new(
            Totals,
            (
                rows + decode_rows, rows, len(run), work.pairs, work.kv_tokens, n, decode_kv, decode_rows + work.completions,
                work.pairs_window, decode_window,
            ),
        )  # fmt: skip
        if ended or work.wasted:
            totals = self._with_wasted(totals, decoding.query_tokens, ended)
        if self.adapters is not None:
            self.adapters.begin(batch, self.adapters.wanted(batch, run, n > 0), totals.rows, ticks)
            self._recorder.add_adapters(batch.index, ticks, self.adapters.extra_ticks, self.adapters.n_running)
        batch.run = run
        batch.completing = completing
        batch.decodes = n > 0
        batch.through_arrivals = True
        if self.images is not None:
            work.encode_ticks = self.images.encode(batch, run)
            self._recorder.add_extra(batch.index, IMAGES, ticks, work.encode_ticks)
        if self._price is not None:
            return self._price(batch, totals, growth, ticks)
        kv = self._kv
        duration = self._duration_ticks(batch, totals, ticks)
        batch.span = Step(ticks, ticks + duration, growth)
        standing = (batch.index, self._sequences.n_admitted, len(self._queue), kv.total - kv.free, decoding.round)
        self._recorder.add_iteration(ticks, duration, totals, work, standing)
        return ticks + duration

    def _duration_ticks(self, batch: MicroBatch, totals: Totals, start_ticks: int) -> int:
        """The time of an iteration on one stage, encoding and masks included."""
        ticks = self.prices.iteration(self._padded(batch, totals) if self.pads_to else totals, self._work.draft_steps)
        ticks += self._work.encode_ticks
        if self._masks is not None:
            ticks += self._masks.added(ticks, self._mask_rows(self._masks, batch, start_ticks))
        return ticks

    def _draft_steps(self, batch: MicroBatch, n: int) -> int:
        """Passes of the draft in an iteration with *n* decodes: the one that reads the prompts' tokens alone where the scheduler
        leaves out those whose drafts no sequence can use. A chunk of a prompt uses none, nor does a request that may emit one
        token."""
        steps = batch.decoding.draft_steps
        if n or steps < 2 or not self._drafts_if_used:
            return steps
        state = self._sequences.state
        for id_ in self._work.completing:
            emitted = state.output[id_] - self._left[id_]
            if not self._drops_token and emitted + 1 < state.max_tokens[id_]:
                return steps
        return 1

    def _count_first_tokens(self, completing: Sequence[int]) -> None:
        """Prompts that are complete emit a token each, unless it is dropped or none is left to emit."""
        if not self._drops_token:
            left = self._left
            for id_ in completing:
                self._work.emitted += left[id_] > 0

    def _with_wasted(self, totals: Totals, query_tokens: int, ended: Mapping[int, Ended]) -> Totals:
        """*totals* with the wasted step of *ended* sequences."""
        self._work.wasted = len(ended)
        reads = [gone.cached + query_tokens for gone in ended.values()]
        in_window = 0 if self.window is None else sum(seen(kv, self.window) for kv in reads)
        return totals._replace(
            rows=totals.rows + len(reads) * query_tokens,
            decode_seqs=totals.decode_seqs + len(reads),
            decode_kv_tokens=totals.decode_kv_tokens + sum(reads),
            logit_rows=totals.logit_rows + len(reads) * query_tokens,
            decode_kv_window=totals.decode_kv_window + in_window,
        )

    # Prices.

    def _price_stages(self, batch: MicroBatch, totals: Totals, growth: int, ticks: int) -> int:
        """Send it through the machine's stages; the tick at which it has left the last."""
        priced = totals if not self.pads_to else self._padded(batch, totals)
        durations, handover = self.prices.stages(priced, self._work.draft_steps)
        durations[0] += self._work.encode_ticks
        if self._masks is not None:
            # Tokens are sampled on the last stage, and their masks are filled while the others compute.
            durations[-1] += self._masks.added(sum(durations), self._mask_rows(self._masks, batch, ticks))
        end, bubbles = self._stages.send(
            ticks, durations, handover, bool(batch.run), self._n_sent, self._recorder.stages.add
        )
        self._leave_with(batch, totals, growth, ticks, end, bubbles)
        return end

    def _leave_with(
        self, batch: MicroBatch, totals: Totals, growth: int, ticks: int, end: int, bubbles: Sequence[int]
    ) -> None:
        """Record an iteration that was sent off at *ticks* and leaves the last stage at *end*; *bubbles*: ahead of it, none
        where it is alone with its stage."""
        self._n_sent += 1
        if bubbles:
            self._work.bubble_ns = sum(bubbles)
            for kind, bubble_ns in enumerate(bubbles):
                if bubble_ns:
                    if batch.decodes:
                        batch.bubbles[kind] += bubble_ns
                    for id_, _ in batch.run:
                        self._bubbles[kind][id_] += bubble_ns
        batch.span = Step(ticks, end, growth)
        self._recorder.add_iteration(ticks, end - ticks, totals, self._work, self.standing(batch))

    def _mask_rows(self, masks: Masks, batch: MicroBatch, ticks: int) -> int:
        """Masks of the iteration that *batch* is about to start."""
        decoding = batch.decoding if batch.decodes else ()
        rows = masks.rows(decoding, batch.decoding.query_tokens, batch.completing)
        self._recorder.add_extra(batch.index, MASKS, ticks, rows)
        return rows

    def _price_later(self, batch: MicroBatch, totals: Totals, growth: int, ticks: int) -> int:
        """Leave it to `launch`: how long a rank takes is known when all ranks have planned."""
        priced = totals if not self.pads_to else self._padded(batch, totals)
        batch.prepared = Prepared(priced, totals, self._work.draft_steps, growth)
        return ticks

    def launch(self, batch: MicroBatch, ticks: int, end: int, bubbles: Sequence[int] = ()) -> None:
        """Start what was prepared at *ticks* for a rank, now that all that start together are known to end at *end*."""
        prepared = batch.prepared
        assert prepared is not None
        batch.prepared = None
        self._leave_with(batch, prepared.totals, prepared.growth, ticks, end, bubbles)

    def add_stage(self, stage: int, begin_ns: int, duration_ns: int, bubble_ns: int, kind: int) -> None:
        """Record how what is about to be launched passes a stage."""
        self._recorder.stages.add(self._n_sent, stage, begin_ns, duration_ns, bubble_ns, kind)

    def standing(self, batch: MicroBatch) -> Standing:
        """State of *batch* and the model now."""
        kv, sequences = self._kv, self._sequences
        waiting = len(self._queue) + len(sequences.behind)
        return batch.index, sequences.n_admitted, waiting, kv.total - kv.free, batch.decoding.round

    def _padded(self, batch: MicroBatch, totals: Totals) -> Totals:
        context = max((seq.cached_tokens for seq in batch.view.running), default=0) if batch.decodes else 0
        return padded(totals, batch.run, batch.decoding.query_tokens, context, self.pads_to, self.window)

    # Prompts.

    def _compute(self, batch: MicroBatch, run: tuple[tuple[int, int], ...], ticks: int) -> None:
        """Add up the prompt chunks of *run*, and admit waiting sequences; with a prefix cache each takes its blocks in its turn."""
        partials, kv, work = batch.partial, self._kv, self._work
        by_chunk, caches, window = self._by_chunk, self._caches, self.window
        rows = pairs = pairs_window = kv_tokens = 0
        for id_, tokens in run:
            partial = partials.get(id_)
            if partial is None:
                _, left, arrival_ns, model, deadline_ns, _, cached, priority, _, _ = self._admit(
                    batch, id_, tokens, ticks
                )
            else:
                _, cached, left, arrival_ns, model, deadline_ns, priority = partial
                if by_chunk:
                    work.blocks -= kv.held(cached)
            remaining = left - tokens
            if remaining < 0 or tokens <= 0:
                raise PolicyError(
                    f"{self._scheduler!r} planned {tokens} prompt tokens for request {id_}, "
                    f"of which {left} are left to compute"
                )
            rows += tokens
            pairs += tokens * cached + tokens * (tokens + 1) // 2
            if window is not None:
                pairs_window += pairs_within(cached, tokens, window)
            cached += tokens
            kv_tokens += cached
            if by_chunk:
                work.blocks += kv.held(cached)
            if caches:
                if work.blocks:
                    self._sequences.take(work.blocks, ticks)
                    work.blocks = 0
                kv.cached(id_, cached, is_all=not remaining)
            partials[id_] = _new(PartialSeq, (id_, cached, remaining, arrival_ns, model, deadline_ns, priority))
            if remaining == 0:
                work.completing.append(id_)
        work.rows = rows
        work.pairs = pairs
        work.pairs_window = pairs_window
        work.kv_tokens = kv_tokens

    def _admit(self, batch: MicroBatch, id_: int, tokens: int, ticks: int) -> WaitingSeq:
        """A sequence of the queue that is admitted, before its first chunk."""
        work = self._work
        seq = self._sequences.admit(batch, id_, ticks >> TICK_BITS, tokens)
        if not self._by_chunk:
            work.blocks += -(-(seq.tokens + seq.cached_tokens) // self._kv.block_tokens)
        work.blocks -= seq.kept_blocks
        if self._finds and not seq.kept_blocks:
            found, loaded = self._kv.found(id_), self._sequences.connector.loaded_last
            work.blocks -= found
            work.loaded += loaded
            # The blocks of what was loaded are cached, too.
            work.found += max(found - -(-loaded // self._kv.block_tokens), 0) * self._kv.block_tokens
        return seq

    # With a prefix cache or tiers.

    def _take_in_turn(
        self,
        batch: MicroBatch,
        run: tuple[tuple[int, int], ...],
        n: int,
        growth: int,
        ticks: int,
        ended: Mapping[int, Ended],
    ) -> None:
        """Take the blocks of an iteration sequence by sequence, since each may evict what the next would find, and count what is
        found."""
        kv, sequences, prefix_lookup, work = self._kv, self._sequences, self._finding, self._work
        work.blocks = work.found = work.loaded = 0
        if not self._caches:
            work.blocks = growth
            self._compute(batch, run, ticks)
            sequences.take(work.blocks, ticks)
            return
        # Sequences that have ended take the blocks of a wasted step, and give them back.
        wasted = sum(gone.growth_blocks for gone in ended.values()) if ended else 0
        if not prefix_lookup.in_turn:
            prefix_lookup.keep(self._queue, batch, run)
        if self._late:
            kv.before_prompts(sum(tokens for _, tokens in run), len(run))
        elif growth or wasted:
            sequences.take(growth + wasted, ticks)
        self._compute(batch, run, ticks)
        if self._late:
            kv.before_decodes(n + len(ended))
            sequences.take(growth + wasted, ticks)
            if ended:
                prefix_lookup.step_on(ended)
        elif wasted:
            kv.give(wasted)
        if prefix_lookup.ended:
            prefix_lookup.free_the_ended()
        work.evicted = self._recorder.newly_evicted(kv.evicted) if run else 0

    # Several at once.

    def start_span(self, batch: MicroBatch, plan: Plan, growth: int, ticks: int) -> int:
        """Start a span of decode iterations in which nothing can change, the first of which takes *growth* blocks; return the tick
        at which they end."""
        decoding, sequences, kv = batch.decoding, self._sequences, self._kv
        free = kv.free
        if self._late:
            kv.before_decodes(decoding.n)
        if growth:
            sequences.take(growth, ticks)
        if self._finding.ended:
            self._finding.free_the_ended()
        batch.run = NO_PROMPTS
        batch.completing = ()
        batch.decodes = True
        batch.through_arrivals = plan.through_arrivals
        hold = plan.hold if self._fast_forward else 1
        if self.adapters is not None:
            wanted = self.adapters.wanted(batch, NO_PROMPTS, True)
            # A load is part of one iteration.
            hold = 1 if self.adapters.begin(batch, wanted, decoding.n * decoding.query_tokens, ticks) else hold
            self._recorder.add_adapters(batch.index, ticks, self.adapters.extra_ticks, self.adapters.n_running)
        if self.images is not None:
            self._recorder.add_extra(batch.index, IMAGES, ticks, 0)
        prices = self.prices
        if self._masks is not None:
            prices = self._masks.prices(self._mask_rows(self._masks, batch, ticks))
        span = batch.span = decoding.span(ticks, hold, plan.until_ns, free, growth, prices)
        span.open(self._recorder, self.standing(batch))
        return span.end(span.n)
