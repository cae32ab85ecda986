"""A micro-batch of an engine core: its sequences, their iteration in flight, and their view for policies."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, overload

from hwmodels.reach import Window
from hwmodels.totals import Totals
from policies.view import ALWAYS_NS, PartialSeq, ReplicaView, RunningSeq, WaitingSeq
from sim.engine.batch.decoding import RunningSet
from sim.engine.batch.padding import padded
from sim.engine.batch.prices import Prices
from sim.engine.batch.span import Span
from sim.engine.batch.stages import Stages
from sim.engine.batch.version import HeldPlan
from sim.engine.record.columns import BUBBLES
from sim.engine.time.clock import TICK_BITS

_LINE_ERROR_BITS = 22
"""2**-22 is above `sim.engine.batch.pricing.LINE_ERROR`."""


class Paused(NamedTuple):
    """A decoding sequence that the present plan leaves out."""

    cached: int
    blocks: int
    token_ns: int


class Prepared(NamedTuple):
    """A rank's iteration, priced together with those of the other ranks."""

    priced: Totals
    totals: Totals
    """Totals as recorded."""
    draft_steps: int
    growth: int
    """KV blocks that its decodes take."""


class Ended(NamedTuple):
    """A sequence that ended in the iteration before, where plans are made ahead: the next plan was made as if it had not."""

    cached: int
    blocks: int
    """Blocks given back."""
    growth_blocks: int
    """Blocks that its next step needed."""
    steps_on: bool
    """Its end was not known: it takes one step more, whose tokens are dropped."""
    promised_blocks: int
    """Blocks reserved for it, where the scheduler reserves."""
    emitted_last: int
    """Tokens of its last iteration."""


class MicroBatch:
    """Sequences that iterate together. Without a pipeline there is one micro-batch."""

    __slots__ = (
        "admitted", "bubbles", "bubbles_at_join", "completing", "decodes", "decoding", "growth", "held", "index",
        "last_round_ns", "leaving", "partial", "paused", "prepared", "rounds_taken", "run", "span", "through_arrivals",
        "view", "wake_ns",
    )  # fmt: skip

    def __init__(self, index: int, decoding: RunningSet) -> None:
        self.index = index
        self.decoding = decoding
        self.admitted: dict[int, None] = {}
        """All, oldest admission first: partial, decoding or paused."""
        self.partial: dict[int, PartialSeq] = {}
        self.paused: dict[int, Paused] = {}
        self.last_round_ns = -1
        self.leaving: dict[int, Ended] = {}
        """Sequences that ended in the latest iteration, where plans are made ahead; in `admitted` until the next starts."""
        self.bubbles = [0] * len(BUBBLES)
        """Idle time of stages ahead of its decodes in ns, all rounds together, by kind."""
        self.bubbles_at_join: dict[int, list[int]] = {}
        self.view = ReplicaView()
        """The engine core makes it and sets what changed before each plan."""
        self.growth = 0
        """KV blocks that its decodes need for their next step, as shown last."""
        self.wake_ns = ALWAYS_NS
        """The instant at which an empty latest plan expires."""
        self.held: HeldPlan | None = None
        self.prepared: Prepared | None = None
        """A rank's iteration that is about to start."""
        # In flight, or as it was when the latest span ended:
        self.span: Span | None = None
        self.decodes = False
        self.rounds_taken = 1
        """Decode steps of the span in flight whose KV blocks have been taken."""
        self.run: tuple[tuple[int, int], ...] = ()
        self.completing: Sequence[int] = ()
        self.through_arrivals = True

    @property
    def blocks_taken(self) -> int:
        """KV blocks that the decode steps of the span in flight have taken by now."""
        if self.span is None or not self.decodes:
            return 0
        return self.span.growth_first if self.rounds_taken == 1 else self.decoding.blocks_for(self.rounds_taken)

    def undo_prompts(self) -> None:
        """Takes back the prompt tokens of an iteration that does not come to its end."""
        for id_, tokens in self.run:
            partial = self.partial[id_]
            self.partial[id_] = partial._replace(cached_tokens=partial.cached_tokens - tokens)

    def forget_the_leaving(self) -> None:
        """Removes sequences known to have ended."""
        for id_ in self.leaving:
            del self.admitted[id_]
        self.leaving.clear()


class QueueView(Sequence[WaitingSeq]):
    """The queue as policies see it, read-only."""

    __slots__ = ("_describe", "_queue", "hidden")

    def __init__(self, queue: deque[WaitingSeq], describe: Callable[[WaitingSeq], WaitingSeq] | None = None) -> None:
        """*describe*: what is shown of each; None: as it is."""
        self._queue = queue
        self._describe = describe
        self.hidden = 0
        """Arrivals since the plan: the end of the queue."""

    def __len__(self) -> int:
        return len(self._queue) - self.hidden

    def __bool__(self) -> bool:
        return len(self._queue) > self.hidden

    def __iter__(self) -> Iterator[WaitingSeq]:
        known = iter(self._queue) if not self.hidden else islice(self._queue, len(self))
        return known if self._describe is None else map(self._describe, known)

    def within(self, found: Iterator[WaitingSeq]) -> Iterator[WaitingSeq]:
        """Those of *found*, which are in the queue, that are shown, as they are shown."""
        if self.hidden:
            unknown = {seq.id for seq in islice(reversed(self._queue), self.hidden)}
            found = (seq for seq in found if seq.id not in unknown)
        return found if self._describe is None else map(self._describe, found)

    @overload
    def __getitem__(self, index: int) -> WaitingSeq: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[WaitingSeq, ...]: ...

    def __getitem__(self, index: int | slice) -> WaitingSeq | tuple[WaitingSeq, ...]:
        if self.hidden or isinstance(index, slice):
            return tuple(self)[index]
        seq = self._queue[index]
        return seq if self._describe is None else self._describe(seq)


class RunningView(Sequence[RunningSeq]):
    """A micro-batch's admitted sequences, oldest first, built on access."""

    __slots__ = ("_batch", "_describe")

    def __init__(self, batch: MicroBatch, describe: Callable[[MicroBatch, int], RunningSeq]) -> None:
        self._batch = batch
        self._describe = describe

    def __len__(self) -> int:
        return len(self._batch.admitted)

    @overload
    def __getitem__(self, index: int) -> RunningSeq: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[RunningSeq, ...]: ...

    def __getitem__(self, index: int | slice) -> RunningSeq | tuple[RunningSeq, ...]:
        ids = list(self._batch.admitted)
        if isinstance(index, slice):
            return tuple(self._describe(self._batch, id_) for id_ in ids[index])
        return self._describe(self._batch, ids[index])

    def __reversed__(self) -> Iterator[RunningSeq]:
        for id_ in reversed(self._batch.admitted):
            yield self._describe(self._batch, id_)


class Elsewhere(Sequence[int]):
    """Ids of sequences admitted to the other micro-batches, built on access."""

    __slots__ = ("_batch", "_batches")

    def __init__(self, batches: Sequence[MicroBatch], batch: MicroBatch) -> None:
        self._batches = batches
        self._batch = batch

    def __len__(self) -> int:
        return sum(len(batch.admitted) for batch in self._batches if batch is not self._batch)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        return [id_ for batch in self._batches if batch is not self._batch for id_ in batch.admitted][index]

    def __iter__(self) -> Iterator[int]:
        return (id_ for batch in self._batches if batch is not self._batch for id_ in batch.admitted)


class BatchPrice:
    """The price of a micro-batch's next iteration; see `policies.view.StepPrice`."""

    __slots__ = ("_batch", "_pads_to", "_prices", "_stages", "_window")

    def __init__(self, batch: MicroBatch, prices: Prices, stages: Stages, window: Window, pads_to: int) -> None:
        self._batch = batch
        self._prices = prices
        self._stages = stages
        self._window = window
        self._pads_to = pads_to

    def done_ns(self, prompts: Sequence[int], /) -> int:
        batch, decoding = self._batch, self._batch.decoding
        n = decoding.n + len(batch.paused)
        queries = n * decoding.query_tokens
        kv = decoding.cached + sum(paused.cached for paused in batch.paused.values()) + queries if n else 0
        tokens = sum(prompts)
        pairs = sum(prompt * (prompt + 1) // 2 for prompt in prompts)
        totals = Totals(queries + tokens, tokens, len(prompts), pairs, tokens, n, kv, queries + len(prompts), pairs, kv)
        if self._pads_to:
            context = max((seq.cached_tokens for seq in batch.view.running), default=0)
            run = [(0, prompt) for prompt in prompts]
            totals = padded(totals, run, decoding.query_tokens, context, self._pads_to, self._window)
        durations, handover = self._prices.stages(totals, decoding.draft_steps)
        # Iterations of decodes alone are priced on lines, a little beside the cost model.
        durations = [ticks + (ticks >> _LINE_ERROR_BITS) for ticks in durations] if n and not prompts else durations
        ends = self._stages.through(batch.view.now_ns << TICK_BITS, durations, handover=handover)
        return -(-ends[-1] >> TICK_BITS)
