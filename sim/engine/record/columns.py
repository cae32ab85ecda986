"""The results of a run: columns of integers, one row a request and one row a span of iterations."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from hwmodels.totals import Totals
from sim.engine.record.iterations import IterationRows, IterationTable, joined
from sim.engine.record.spill import Place, Spill, in_blocks, let_go, together
from sim.engine.record.streaming import IntArray, Stream, expand, streamed_gaps
from sim.engine.time.clock import FRACTION, TICK_BITS

Table = dict[str, NDArray[Any]]

FINISHED, REJECTED, UNFINISHED, ABORTED, LOST = 0, 1, 2, 3, 4
STATUS_NAMES = ("finished", "rejected", "unfinished", "aborted", "lost")


RoundCounts = dict[tuple[int, int], list[int]]
"""Numbers of rounds that accepted 0, 1, 2, ... drafts, by (drafted positions, tokens verified besides the one before them)."""


def sum_rounds(counts: Iterable[RoundCounts]) -> RoundCounts:
    """The counts of several micro-batches or replicas together."""
    total: RoundCounts = {}
    for of_one in counts:
        for key, by_accepted in of_one.items():
            have = total.setdefault(key, [0] * len(by_accepted))
            for accepted, rounds in enumerate(by_accepted):
                have[accepted] += rounds
    return total


Piece = tuple[int, int, int, int]
"""Iterations with a linear price: ticks from the start of their span, how many, ticks of the first, and the increment of each."""

_SPECULATIVE: Final = -1
_PIECEWISE: Final = -2
"""In the place of `first_ticks` until the end of the run: a record that stands for several, which are kept elsewhere. Its `loaded`
is the number of entries of `queued_ns` when it started."""


class Layout:
    """Names, codes and meaning of a record's fields; records are packed, so that a million take little memory and time."""

    def __init__(self, *fields: tuple[str, str]) -> None:
        codes = "<" + "".join(code for _, code in fields)
        self.dtype = np.dtype([(name, {"q": "<i8", "i": "<i4"}[code]) for name, code in fields])
        self.size = struct.calcsize(codes)
        self.pack = struct.Struct(codes).pack
        self.offset = {name: int(self.dtype.fields[name][1]) for name, _ in fields}  # type: ignore[index]


SPAN = Layout(
    # Iterations of one micro-batch that differ only in the KV tokens they read.
    ("start_ns", "q"),
    ("start_frac", "i"),  # ticks past start_ns
    ("n", "i"),
    ("first_ticks", "q"),
    ("growth_ticks", "q"),  # the i-th iteration, from 0, lasts first_ticks + i * growth_ticks
    ("lane", "i"),
    ("prefill_rows", "i"),
    ("prefill_chunks", "i"),
    ("prefill_pairs", "q"),
    ("prefill_kv_tokens", "q"),
    ("prefill_pairs_window", "q"),
    ("decode_seqs", "i"),
    ("query_tokens", "i"),
    ("draft_steps", "i"),
    ("decode_kv_tokens", "q"),  # read by the first iteration; grows by decode_seqs with each
    ("decode_kv_window", "q"),
    ("window_growth", "i"),
    ("completions", "i"),  # prompts that complete
    ("emitted", "i"),  # tokens that each iteration emits
    ("running", "i"),
    ("waiting", "i"),
    ("kv_blocks_used", "i"),  # in the first iteration
    ("round", "i"),  # decode rounds of the micro-batch before this span
    ("bubble_ns", "q"),  # idle time of the stages ahead of this micro-batch
    ("in_vain", "i"),  # sequences of decode_seqs that had ended
    ("found", "q"),  # prefix-cache hits of the sequences it admits
    ("loaded", "q"),  # tokens loaded for them from tiers
    ("evicted", "i"),  # blocks evicted since the span before it that had prompt tokens
)

_pack_span: Final = SPAN.pack

JOIN = Layout(
    # One stay of a sequence in a micro-batch's decoding set.
    ("lane", "i"),
    ("since", "i"),  # round after which it joined
    ("until", "i"),  # round after which it left
    ("cached", "i"),  # tokens cached when it joined
    ("token_ns", "q"),  # time of its latest token when it joined
    ("request", "q"),
)

BUBBLES = ("pb1", "pb2", "pb3", "depth")
"""Reasons for which a stage idles ahead of a micro-batch while the replica has work (SARATHI, arXiv 2308.16369, section 3.2): it
and the one before it have prompt chunks that take unequal times; one of them has prompt tokens and the other has none; both only
decode, over unequal contexts. `depth`: too few micro-batches in flight to fill the pipeline and its hand-overs."""

STAGE = Layout(
    ("micro_batch", "i"),
    ("stage", "i"),
    ("start_ns", "q"),
    ("duration_ns", "q"),
    ("bubble_ns", "q"),  # idle time of the stage just before
    ("bubble", "i"),  # its kind, an index into BUBBLES
)

ADAPTERS, IMAGES, MASKS, RUNNING_ADAPTERS = 0, 1, 2, 3
EXTRA = Layout(
    # From an iteration of a micro-batch on, what each takes beside the model and its drafter; until the next of the same kind.
    ("lane", "i"),
    ("what", "i"),  # ADAPTERS: their kernels and loads; IMAGES; MASKS; RUNNING_ADAPTERS: how many different ones
    ("start_ticks", "q"),
    ("amount", "q"),  # ticks; of MASKS and RUNNING_ADAPTERS their number
)

LOAD, STORE, MOVE_IN, HAND_OVER = 0, 1, 2, 3
TRANSFER_NAMES = ("load", "store", "swap_out", "hand_over")
TierKind = Literal["host", "disk", "remote", "peer"]
"""Kinds of memory behind the KV cache; `sim.metrics.columns` has them too, for folders that are read without an engine."""
PLACES: Final[tuple[str, ...]] = ("device", *get_args(TierKind))
"""Where KV comes from, and goes to."""
DEVICE: Final = 0

TRANSFER = Layout(
    # KV that crosses a link, of a tier or between machines.
    ("tier", "i"),  # -1: of no tier
    ("what", "i"),  # an index into TRANSFER_NAMES
    ("request", "q"),  # -1: of blocks that were evicted
    ("bytes", "q"),
    ("asked_ns", "q"),
    ("begin_ns", "q"),
    ("sent_ns", "q"),
    ("arrived_ns", "q"),
    ("source", "i"),  # an index into PLACES
    ("source_replica", "i"),  # -1: a store that no replica has to itself
    ("destination", "i"),
    ("destination_replica", "i"),
)

_UNDER_WAY = ("loads_under_way", "stores_under_way")
_ROUND_FIELDS = ("n", "start_ns", "start_frac", "first_ticks", "growth_ticks")

_DRAWN_AT_ONCE = 4096
_SPECULATIVE_BYTES = 5 * 8
_PIECES_AT_ONCE = 1 << 16
_SPANS_AT_ONCE = 1 << 16
_NEVER: Final = 1 << 60


class Records:
    """Packed records of one layout, appended one at a time to one growing buffer."""

    __slots__ = ("_layout", "_pack", "_size", "buffer")

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._pack = layout.pack
        self._size = layout.size
        self.buffer = bytearray()

    def add(self, *fields: int) -> None:
        self.buffer += self._pack(*fields)

    def change_last(self, name: str, value: int) -> None:
        buffer = self.buffer
        struct.pack_into("<i", buffer, len(buffer) - self._size + self._layout.offset[name], value)

    def drop_last(self, n: int) -> None:
        if n:
            del self.buffer[-n * self._size :]

    def write_older(self, spill: Spill, n_recent: int) -> Place:
        """Write all but the last *n_recent* to the file, and forget them here."""
        end = max(len(self.buffer) - n_recent * self._size, 0)
        with memoryview(self.buffer) as records, records[:end] as older:
            place = spill.write(older)
        del self.buffer[:end]
        return place

    def array(self) -> NDArray[Any]:
        """All records, in the memory they were written to: nothing can be added afterwards."""
        return np.frombuffer(self.buffer, self._layout.dtype)


Standing = tuple[int, int, int, int, int]
"""State of a micro-batch and its model when iterations start: the micro-batch, sequences admitted, requests in the queue, KV blocks
used in the first iteration, and decode rounds of the micro-batch before it. A plain tuple, here and below, is made and taken apart
several times as fast as one with names, and that is done for every span."""


class Tally:
    """Counts of one iteration beside its totals."""

    __slots__ = (
        "bubble_ns", "completions", "draft_steps", "emitted", "evicted", "found", "loaded", "query_tokens", "wasted",
    )  # fmt: skip

    def __init__(self) -> None:
        self.query_tokens = 1
        self.draft_steps = 0
        self.completions = 0
        """Prompts that are complete after it."""
        self.emitted = 0
        self.bubble_ns = 0
        """Idle time of the stages ahead of it."""
        self.wasted = 0
        """Sequences that had ended, and take a wasted step."""
        self.found = 0
        """Tokens that sequences find in the prefix cache when they are admitted."""
        self.loaded = 0
        """Tokens that had been loaded for them from tiers."""
        self.evicted = 0
        """Blocks evicted since the iteration with prompt tokens before."""


Reads = tuple[int, int, int, int]
"""KV that decodes of the same sequences read in their first iteration: the sequences, their KV tokens, those of them within the
window, and the growth of these by each iteration."""


class SpeculativeStart(NamedTuple):
    """Common values of the iterations of a speculated span."""

    standing: Standing
    """As it is before them, `blocks_used` too."""
    seqs: int
    query_tokens: int
    draft_steps: int
    n_queued: int
    """Entries of `Recorder.queued_ns` when they started."""


class DrawnRounds(NamedTuple):
    """Arrays with one entry an iteration."""

    ends: IntArray
    """Ticks from the start."""
    kv: IntArray
    windows: IntArray | None
    emitted: IntArray
    blocks: IntArray
    """New KV blocks."""


class Recorder:
    """Records of one model of a machine while it runs. Records are made here, beside their layouts, and nowhere else."""

    def __init__(self, spill: Spill | None = None, n_recent: int = 0, n_stages: int = 1) -> None:
        """*spill* takes records beyond those that memory should hold, without the last *n_recent* spans of *n_stages* stages each,
        which may be dropped again; without it all stay in memory."""
        self._spill = spill
        self._n_recent = n_recent
        self._n_stages = n_stages
        self._at_bytes = _NEVER if spill is None else spill.at_bytes + n_recent * SPAN.size
        self._written: list[tuple[Place, Place, Place, Place]] = []
        """Places of spans, their pieces and speculated iterations, and stages."""
        self._closed: tuple[Place, Place] | None = None
        """Places of all spans and all stages, in the end."""
        self.spans = Records(SPAN)
        self._span_buffer = self.spans.buffer
        self.joins = Records(JOIN)
        self.stages = Records(STAGE)
        """Pipelines: micro-batches numbered as they are sent off."""
        self.transfers = Records(TRANSFER)
        self.extras = Records(EXTRA)
        self._extra: dict[tuple[int, int], int] = {}
        """The latest amount by micro-batch and kind."""
        self.queued_ns: list[int] = []
        """Arrivals during a span that they did not cut: the first instant whose iterations find them in the queue."""
        self.resumed_gaps_ns: list[int] = []
        """Inter-token gaps across a preemption."""
        self._drawn = np.zeros((5, 0), np.int64)
        """One column for each iteration of a speculated span: its end (ticks from the span's start), KV tokens, the same within the
        window, tokens emitted and KV blocks added."""
        self._n_drawn = 0
        self._pieces = array("q")
        """The `Piece` of every piece of a piecewise span."""
        self._evicted = 0

    def add_transfer(
        self, what: int, request: int, n_bytes: int, times: tuple[int, int, int, int], source: tuple[int, int],
        destination: tuple[int, int], tier: int = -1,
    ) -> None:  # fmt: skip
        """A transfer from one place of a replica to another. *times*: asked for, begun, sent, arrived."""
        self.transfers.add(tier, what, request, n_bytes, *times, *source, *destination)

    def add_extra(self, lane: int, what: int, start_ticks: int, amount: int) -> None:
        """The iteration of *lane* that starts at *start_ticks* has so much of *what* beside the model, and those after it, too."""
        if self._extra.get((lane, what), 0) != amount:
            self._extra[lane, what] = amount
            self.extras.add(lane, what, start_ticks, amount)

    def add_adapters(self, lane: int, start_ticks: int, extra_ticks: int, running: int) -> None:
        """The same of LoRA adapters: the ticks that they add, and how many different ones there are."""
        self.add_extra(lane, ADAPTERS, start_ticks, extra_ticks)
        self.add_extra(lane, RUNNING_ADAPTERS, start_ticks, running)

    def newly_evicted(self, evicted: int) -> int:
        """Blocks evicted since the last call, *evicted* being all so far."""
        before, self._evicted = self._evicted, evicted
        return evicted - before

    def add_iteration(self, start_ticks: int, ticks: int, totals: Totals, tally: Tally, standing: Standing) -> None:
        """One iteration of its own."""
        _, prompt, chunks, pairs, prompt_kv, n, kv, _, pairs_window, kv_window = totals
        batch, running, waiting, blocks_used, round_ = standing
        buffer = self._span_buffer
        if len(buffer) > self._at_bytes:
            self._to_file()
        buffer += _pack_span(
            start_ticks >> TICK_BITS, start_ticks & FRACTION, 1, ticks, 0, batch, prompt, chunks, pairs, prompt_kv,
            pairs_window, n, tally.query_tokens, tally.draft_steps, kv, kv_window, 0, tally.completions, tally.emitted,
            running, waiting, blocks_used, round_, tally.bubble_ns, tally.wasted, tally.found, tally.loaded, tally.evicted,
        )  # fmt: skip

    def add_decodes(
        self, start_ticks: int, n: int, first_ticks: int, growth_ticks: int, reads: Reads, standing: Standing
    ) -> None:
        """*n* iterations of decodes alone, one token a sequence."""
        seqs, kv, kv_window, window_growth = reads
        batch, running, waiting, blocks_used, round_ = standing
        buffer = self._span_buffer
        buffer += _pack_span(
            start_ticks >> TICK_BITS, start_ticks & FRACTION, n, first_ticks, growth_ticks, batch, 0, 0, 0, 0,
            0, seqs, 1, 0, kv, kv_window, window_growth, 0, seqs, running, waiting, blocks_used, round_, 0, 0, 0, 0, 0,
        )  # fmt: skip

    def add_piecewise(self, start_ticks: int, n: int, reads: Reads, standing: Standing) -> None:
        """Add *n* iterations of decodes alone whose price bends: one record now, one a piece in `all_spans`."""
        seqs, kv, kv_window, window_growth = reads
        batch, running, waiting, blocks_used, round_ = standing
        buffer = self._span_buffer
        buffer += _pack_span(
            start_ticks >> TICK_BITS, start_ticks & FRACTION, n, _PIECEWISE, 0, batch, 0, 0, 0, 0,
            0, seqs, 1, 0, kv, kv_window, window_growth, 0, seqs, running, waiting, blocks_used, round_, 0, 0, 0,
            len(self.queued_ns), 0,
        )  # fmt: skip

    def add_speculative(self, start_ticks: int, start: SpeculativeStart, drawn: DrawnRounds) -> None:
        """Iterations that differ in more than a constant growth: one record now, one an iteration in `all_spans`."""
        ends, kv, window, emitted, blocks = drawn
        batch, running, waiting, blocks_before, round_ = start.standing
        buffer = self._span_buffer
        if self._n_drawn * _SPECULATIVE_BYTES > self._at_bytes:
            self._to_file()
        buffer += _pack_span(
            start_ticks >> TICK_BITS, start_ticks & FRACTION, len(ends), _SPECULATIVE, 0, batch, 0, 0, 0, 0,
            0, start.seqs, start.query_tokens, start.draft_steps, 0, 0, 0, 0, 0, running, waiting, blocks_before, round_,
            0, 0, 0, start.n_queued, 0,
        )  # fmt: skip
        at = self._n_drawn
        self._n_drawn = end = at + len(ends)
        table = self._drawn
        if end > table.shape[1]:
            self._drawn = np.zeros((5, max(2 * end, _DRAWN_AT_ONCE)), np.int64)
            self._drawn[:, :at] = table[:, :at]
            table = self._drawn
        table[0, at:end] = ends
        table[1, at:end] = kv
        if window is not None:
            table[2, at:end] = window
        table[3, at:end] = emitted
        table[4, at:end] = blocks

    def add_pieces(self, pieces: list[Piece]) -> None:
        """The pieces of the piecewise span that was added last, now that it is over."""
        self._pieces.fromlist([value for piece in pieces for value in piece])

    def drop_piecewise(self) -> None:
        """Forget the piecewise span that was added last."""
        self.spans.drop_last(1)

    def _to_file(self) -> None:
        """Write the records; called before one is added, when no open span lacks its pieces."""
        spill = self._spill
        assert spill is not None
        spans = self.spans.write_older(spill, self._n_recent)
        pieces, drawn = spill.write(self._pieces), spill.write(np.ascontiguousarray(self._drawn_rounds()))
        stages = self.stages.write_older(spill, self._n_recent * self._n_stages)
        self._written.append((spans, pieces, drawn, stages))
        self._pieces = array("q")
        self._n_drawn = 0

    def close(self, block_tokens: int) -> None:
        """If there are records in the file, write them there once more in their final form, those of a kind one after another."""
        spill = self._spill
        if spill is None or not self._written:
            return
        self._n_recent = 0
        self._to_file()
        growth_of = _BlockGrowth(self.joins.array(), block_tokens)
        places: list[Place] = []
        for spans, pieces, drawn, _ in self._written:
            records = np.frombuffer(spill.read(spans), SPAN.dtype)
            of_pieces = np.frombuffer(spill.read(pieces), np.int64)
            of_drawn = np.frombuffer(spill.read(drawn), np.int64).reshape(5, -1)
            places.append(spill.write(self._taken_apart(records, of_pieces, of_drawn, growth_of)))
        of_stages = [spill.write(spill.read(stages)) for _, _, _, stages in self._written]
        self._closed = together(places), together(of_stages)

    def all_stages(self) -> NDArray[Any]:
        """Structured by STAGE."""
        if self._closed is None or self._spill is None:
            return self.stages.array()
        return self._spill.array(self._closed[1], STAGE.dtype)

    def all_spans(self, block_tokens: int) -> NDArray[Any]:
        """Structured by SPAN, speculated spans taken apart into iterations and piecewise ones into their pieces."""
        if self._closed is not None and self._spill is not None:
            return self._spill.array(self._closed[0], SPAN.dtype)
        pieces = np.frombuffer(self._pieces, np.int64)
        growth_of = _BlockGrowth(self.joins.array(), block_tokens) if len(pieces) else None
        return self._taken_apart(self.spans.array(), pieces, self._drawn_rounds(), growth_of)

    def _drawn_rounds(self) -> IntArray:
        return self._drawn[:, : self._n_drawn]

    def _taken_apart(
        self, spans: NDArray[Any], pieces: IntArray, drawn: IntArray, growth_of: _BlockGrowth | None
    ) -> NDArray[Any]:
        if len(pieces):
            assert growth_of is not None
            spans = self._with_pieces(spans, pieces.reshape(-1, 4), growth_of)
        return self._with_iterations(spans, drawn) if drawn.shape[1] else spans

    def _with_pieces(self, spans: NDArray[Any], pieces_of: IntArray, growth_of: _BlockGrowth) -> NDArray[Any]:
        which = np.flatnonzero(spans["first_ticks"] == _PIECEWISE)
        start, n, first, growth = pieces_of.T
        # The pieces of a span have as many iterations together as it has.
        ends = np.searchsorted(np.cumsum(n), np.cumsum(spans["n"][which], dtype=np.int64)) + 1
        pieces = np.diff(ends, prepend=0)
        lengths = np.ones(len(spans), np.int64)
        lengths[which] = pieces
        table = np.repeat(spans, lengths)
        piecewise = np.flatnonzero(table["first_ticks"] == _PIECEWISE)
        of, step = expand(pieces)
        rounds = np.cumsum(n) - n
        rounds -= rounds[ends - pieces][of]
        start = start + table["start_frac"][piecewise]
        start_ns: IntArray = table["start_ns"][piecewise] + (start >> TICK_BITS)
        before: IntArray = table["loaded"][piecewise]
        queued = np.searchsorted(np.array(self.queued_ns, np.int64), start_ns, side="right")
        queued -= before
        table["loaded"][piecewise] = 0
        table["start_ns"][piecewise] = start_ns
        table["start_frac"][piecewise] = start & FRACTION
        table["n"][piecewise] = n
        table["first_ticks"][piecewise] = first
        table["growth_ticks"][piecewise] = growth
        table["decode_kv_tokens"][piecewise] += rounds * table["decode_seqs"][piecewise]
        table["decode_kv_window"][piecewise] += rounds * table["window_growth"][piecewise]
        # A request that arrives in the instant in which the span starts was seen by its first piece.
        table["waiting"][piecewise] += np.where(step > 0, np.maximum(queued, 0), 0)
        round_ = table["round"][piecewise].astype(np.int64)
        for at in range(0, len(piecewise), _PIECES_AT_ONCE):
            some = slice(at, at + _PIECES_AT_ONCE)
            taken = growth_of.between(round_[some] + 1, round_[some] + rounds[some] + 1)
            table["kv_blocks_used"][piecewise[some]] += taken
        table["round"][piecewise] += rounds
        return table

    def _with_iterations(self, spans: NDArray[Any], drawn: IntArray) -> NDArray[Any]:
        which = np.flatnonzero(spans["first_ticks"] == _SPECULATIVE)
        ends, kv, window, emitted, blocks = drawn
        lengths = np.ones(len(spans), np.int64)
        lengths[which] = spans["n"][which]
        table = np.repeat(spans, lengths)
        speculated = np.repeat(spans["first_ticks"] == _SPECULATIVE, lengths)
        n = lengths[which]
        of = np.repeat(np.arange(len(which)), n)
        first = np.cumsum(n) - n
        step = np.arange(len(of)) - first[of]
        durations = np.diff(ends, prepend=0)
        durations[first] = ends[first]
        starts = spans["start_frac"][which][of] + ends - durations
        start_ns: IntArray = spans["start_ns"][which][of] + (starts >> TICK_BITS)
        queued = (
            np.searchsorted(np.array(self.queued_ns, np.int64), start_ns, side="right") - table["loaded"][speculated]
        )
        summed = np.cumsum(blocks)
        table["start_ns"][speculated] = start_ns
        table["start_frac"][speculated] = starts & FRACTION
        table["n"][speculated] = 1
        table["first_ticks"][speculated] = durations
        table["decode_kv_tokens"][speculated] = kv
        table["decode_kv_window"][speculated] = window
        table["emitted"][speculated] = emitted
        # An entry counts from the instant after its own when the span's end has had its turn, so before it may be later.
        table["waiting"][speculated] += np.maximum(queued, 0)
        table["kv_blocks_used"][speculated] += summed - (summed[first] - blocks[first])[of]
        table["loaded"][speculated] = 0
        table["round"][speculated] += step
        return table


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterColumns:
    """The record of one replica's LoRA adapters. Times are of iterations, in nanoseconds."""

    max_loras: int
    """Slots on the device."""
    busy_ns: int
    adapter_ns: int
    """Time of iterations by the number of different adapters in each, summed."""
    waiting_ns: int
    """The same by the number of waiting requests whose adapter had no slot."""
    most_running: int
    loads: tuple[tuple[int, int, int, int], ...]
    """(start, adapter, 0 from disk to host memory or 1 from there to a slot, duration), in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaColumns:
    """The record of one replica."""

    spans: NDArray[Any]
    """Structured by SPAN, in the order in which they started."""
    joins: NDArray[Any]
    """Structured by JOIN."""
    queued_ns: IntArray
    resumed_gaps_ns: IntArray
    stages: NDArray[Any]
    """Structured by STAGE, micro_batch being a row of `spans`; empty without a pipeline."""
    kv_blocks_total: int
    block_tokens: int
    n_stages: int = 1
    transfers: NDArray[Any]
    """Structured by TRANSFER, in the order in which this replica asked for them."""
    tiered: bool = False
    """Whether it has tiers."""
    emitted: dict[int, IntArray] | None = None
    """Tokens of every round of every stay for each micro-batch, in the order of `joins`; None where a round emits one."""
    speculation: RoundCounts | None = None
    """Counts of the rounds that drafted tokens, by the number drafted; None without speculation."""
    adapters: AdapterColumns | None = None
    """None without adapters."""
    extras: NDArray[Any] = field(default_factory=lambda: np.zeros(0, EXTRA.dtype))
    """Structured by EXTRA, in order; empty where iterations take what the model takes."""

    def busy_ns(self) -> int:
        """Time that its stages have spent on micro-batches, all stages together."""
        if len(self.stages):
            return int(self.stages["duration_ns"].sum())
        whole_ns = rest = 0
        for spans in in_blocks(self.spans, _SPANS_AT_ONCE):
            n = spans["n"].astype(np.int64)
            ticks = n * spans["first_ticks"] + spans["growth_ticks"] * (n * (n - 1) // 2)
            # Whole nanoseconds and the rest apart: exact, whatever the spans.
            whole_ns += int((ticks >> TICK_BITS).sum())
            rest += int((ticks & FRACTION).sum())
        return whole_ns + (rest >> TICK_BITS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """All that a run recorded. Times are nanoseconds from the start; -1 where an event did not happen."""

    requests: Table
    reasons: tuple[str, ...]
    replicas: tuple[ReplicaColumns, ...]
    stream: Stream = Stream()  # noqa: RUF009 (frozen, so that all may share one)
    """The tokens that reach a client together."""
    meta: dict[str, Any] = field(default_factory=dict[str, Any])

    def iterations(self) -> Table:
        """One row an iteration, ordered by start time, then replica.

        Columns: replica, lane (which micro-batch), start_ns, duration_ns, rows, prefill_tokens, decode_tokens (query tokens of
        the decodes), sequences (that take part), running, waiting, kv_tokens (read by the decodes), kv_blocks_used,
        emitted_tokens, bubble_ns; with a prefix cache, prefix_hit_tokens (that the sequences it admits have found on the device,
        beside what it computes of prompts) and prefix_evictions (blocks evicted since the replica's iteration with prompt tokens
        before, for this one and for decodes between; 0 where an iteration has none); with tiers loaded_tokens (for sequences that
        it admits to compute the rest of their prompts, from all tiers), loads_under_way and stores_under_way as well, which are
        -1 on replicas without; with LoRA adapters adapters (different ones among its sequences, the base model not counted; -1 on
        replicas without).
        """
        table = joined(list(self.iteration_blocks()))
        order = np.lexsort((table["replica"], table["start_ns"]))
        return {name: column[order] for name, column in table.items()}

    def iteration_blocks(self, max_rows: int = 1 << 18) -> Iterator[Mapping[str, NDArray[Any]]]:
        """The same in pieces of about *max_rows* rows, replica after replica, in the order in which they were planned: of one long
        replica, or of several short ones. A column is worked out when it is asked for."""
        held: list[Mapping[str, NDArray[Any]]] = []
        n, latest = 0, -1
        for index, rows, piece in self._iteration_pieces(max_rows):
            n += rows
            if held and (n > max_rows or index == latest):
                yield joined(held)
                held, n = [], rows
            held.append(piece)
            latest = index
            let_go(self.replicas[index].spans)
        if held:
            yield joined(held)

    def _iteration_pieces(self, max_rows: int) -> Iterator[tuple[int, int, IterationTable]]:
        """(replica, number of rows, rows)."""
        # A table has the same columns for all, whether they have tiers and adapters or not.
        kinds = {(replica.tiered, replica.adapters is not None) for replica in self.replicas}
        tiered, adapted = any(with_tiers for with_tiers, _ in kinds), any(with_adapters for _, with_adapters in kinds)
        for index, replica in enumerate(self.replicas):
            spans = replica.spans
            several = any(int(block["n"].max()) > 1 for block in in_blocks(spans, _SPANS_AT_ONCE))
            rows_of = IterationRows(
                index,
                replica.queued_ns,
                _BlockGrowth(replica.joins, replica.block_tokens).before_each if several else None,
                "prefix_hit_tokens" in self.requests,
                _of_tiers(replica) if tiered else {},
                (_of_adapters(replica),) if adapted else (),
            )
            at, some = 0, max_rows
            while at < len(spans) or (at == 0 and not len(spans)):
                ends = np.cumsum(spans["n"][at : at + some], dtype=np.int64)
                if some < max_rows and int(ends[-1]) <= max_rows:
                    some = max_rows
                    continue
                to = at + max(1, int(np.searchsorted(ends, max_rows, side="right")))
                rows = int(ends[min(to - at, len(ends)) - 1]) if len(ends) else 0
                yield index, rows, rows_of.table(spans[at:to])
                # About as many spans as before make a piece.
                at, some = to, min(2 * (to - at), max_rows)

    def transfers(self) -> Table | None:
        """One row a transfer of KV between a device and a tier or from one machine to another, in the order in which they were
        asked for; None where there are neither tiers nor machines that hand requests over.

        Columns: replica (that asked for it), tier (its place, nearest first; -1: between machines), what (an index into
        `TRANSFER_NAMES`), request (-1: of evicted blocks), bytes, asked_ns, begin_ns, sent_ns, arrived_ns, source and destination
        (indices into `PLACES`), source_replica and destination_replica (-1: a store that replicas share).
        """
        if not (any(replica.tiered for replica in self.replicas) or "sent_bytes" in self.requests):
            return None
        parts = [replica.transfers for replica in self.replicas]
        rows = np.concatenate(parts)
        table: Table = {"replica": np.repeat(np.arange(len(parts), dtype=np.int32), [len(part) for part in parts])}
        table |= {name: rows[name] for name in TRANSFER.offset}
        order = np.lexsort((table["replica"], table["asked_ns"]))
        return {name: column[order] for name, column in table.items()}

    def itl(self) -> tuple[IntArray, IntArray]:
        """Inter-token gaps in ns and how many gaps have that length, as clients see them.

        A sequence that decodes in two rounds of its micro-batch, one after the other, sees the time between their ends; one that
        joins sees the time since its latest token. Tokens that a speculative round emits together count as one arrival, and
        so do those that `stream` sends together. Tokens that a retry has discarded do not count.
        """
        parts = list(self.itl_blocks())
        if not parts:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        return np.concatenate([gaps for gaps, _ in parts]), np.concatenate([weights for _, weights in parts])

    def itl_blocks(self, max_rounds: int = 1 << 18) -> Iterator[tuple[IntArray, IntArray]]:
        """The same in pieces of about *max_rounds* rounds."""
        # A micro-batch's records do not say whose tokens a retry has discarded.
        if self.stream.interval > 1 or self.meta.get("fleet", {}).get("discarded_tokens"):
            yield from streamed_gaps(self.replicas, self.requests, self.stream)
            return
        for replica in self.replicas:
            yield from ((gaps, weights) for gaps, weights, _ in _replica_gaps(replica, max_rounds))
            if len(replica.resumed_gaps_ns):
                yield replica.resumed_gaps_ns, np.ones(len(replica.resumed_gaps_ns), np.int64)

    def itl_ends(self, max_rounds: int = 1 << 18) -> Iterator[tuple[IntArray, IntArray, IntArray]]:
        """The same with the time at which each gap ends, without gaps between machines; nothing where tokens are sent several at
        once or were discarded."""
        if self.stream.interval == 1 and not self.meta.get("fleet", {}).get("discarded_tokens"):
            for replica in self.replicas:
                yield from _replica_gaps(replica, max_rounds)


def batches_of(spans: NDArray[Any]) -> list[int]:
    """The micro-batches that have any."""
    found: set[int] = set()
    for block in in_blocks(spans, _SPANS_AT_ONCE):
        found.update(np.unique(block["lane"]).tolist())
    return sorted(found)


def _rounds_in_blocks(spans: NDArray[Any], batch: int, max_rounds: int) -> Iterator[IntArray]:
    """The spans of a micro-batch that have decodes, in pieces of at most *max_rounds* rounds or of one span: rows of
    `_ROUND_FIELDS`, and one of the sequences that had not ended."""
    held = np.empty((len(_ROUND_FIELDS) + 1, 0), np.int64)
    for block in in_blocks(spans, _SPANS_AT_ONCE):
        seqs = block["decode_seqs"] - block["in_vain"]
        mine = (block["lane"] == batch) & (seqs > 0)
        # Field by field: a record is several times as long as these are together.
        fields = np.stack([*(block[name][mine] for name in _ROUND_FIELDS), seqs[mine]], dtype=np.int64)
        held = np.concatenate((held, fields), axis=1) if held.shape[1] else fields
        rounds = np.cumsum(held[0])
        at, before = 0, 0
        # The last piece may have more in the next block.
        while (to := max(at + 1, int(np.searchsorted(rounds, before + max_rounds, side="right")))) < held.shape[1]:
            yield held[:, at:to]
            at, before = to, int(rounds[to - 1])
        held = held[:, at:]
    if held.shape[1]:
        yield held


def _replica_gaps(replica: ReplicaColumns, max_rounds: int) -> Iterator[tuple[IntArray, IntArray, IntArray]]:
    """Gaps, weights and ends of one replica, but those of sequences that another has resumed."""
    spans, joins = replica.spans, replica.joins
    for batch in batches_of(spans):
        yield from _batch_gaps(_rounds_in_blocks(spans, batch, max_rounds), joins[joins["lane"] == batch])


def _batch_gaps(rounds: Iterable[IntArray], joins: NDArray[Any]) -> Iterator[tuple[IntArray, IntArray, IntArray]]:
    """Gaps, weights and ends of one micro-batch from its *rounds*, spans with decodes."""
    joins = joins[joins["until"] > joins["since"]]
    joins = joins[np.argsort(joins["since"], kind="stable")]
    since, token_ns = joins["since"].astype(np.int64), joins["token_ns"]
    first, last_end_ns = 0, 0
    for spans in rounds:
        ends, seqs = _round_ends(spans)
        low, high = np.searchsorted(since, (first, first + len(ends)))
        joined = since[low:high] - first
        gaps = np.diff(ends, prepend=last_end_ns)
        # A sequence that joined since the round before has a gap of its own; in a micro-batch's first round these are all.
        weights = seqs - np.bincount(joined, minlength=len(ends))
        kept = np.flatnonzero(weights > 0)
        yield (
            np.concatenate((gaps[kept], ends[joined] - token_ns[low:high])),
            np.concatenate((weights[kept], np.ones(high - low, np.int64))),
            np.concatenate((ends[kept], ends[joined])),
        )
        first, last_end_ns = first + len(ends), int(ends[-1])


def sent_bytes(transfers: Iterable[NDArray[Any]], n: int) -> IntArray:
    """The bytes that were handed over for each of *n* requests."""
    found = np.zeros(n, np.int64)
    for rows in transfers:
        handed = rows[rows["what"] == HAND_OVER]
        np.add.at(found, handed["request"], handed["bytes"])
    return found


def transfer_facts(rows: NDArray[Any]) -> dict[str, int]:
    """Totals over *rows*, transfers from and to a tier."""
    waited = rows["begin_ns"] - rows["asked_ns"]
    load = rows["what"] == LOAD
    return {
        "loads": int(load.sum()),
        "load_bytes": int(rows["bytes"][load].sum()),
        "load_ns": int((rows["arrived_ns"] - rows["asked_ns"])[load].sum()),
        "load_wait_ns": int(waited[load].sum()),
        "stores": int((~load).sum()),
        "store_bytes": int(rows["bytes"][~load].sum()),
        "store_wait_ns": int(waited[~load].sum()),
    }


def _of_adapters(replica: ReplicaColumns) -> NDArray[Any] | None:
    """The replica's records of how many adapters run; None where it has none."""
    return None if replica.adapters is None else replica.extras[replica.extras["what"] == RUNNING_ADAPTERS]


def _of_tiers(replica: ReplicaColumns) -> dict[str, NDArray[Any] | None]:
    """Loads and stores of a replica's tiers, by the column that counts those under way; None where it has no tiers."""
    if not replica.tiered:
        return dict.fromkeys(_UNDER_WAY)
    transfers = replica.transfers
    loads = transfers["what"] == LOAD
    parts = transfers[loads], transfers[(transfers["tier"] >= 0) & ~loads]
    return dict(zip(_UNDER_WAY, parts, strict=True))


class _BlockGrowth:
    """KV blocks that the decoding sequences of a micro-batch have taken between two of its rounds."""

    def __init__(self, joins: NDArray[Any], block_tokens: int) -> None:
        self._block = block = block_tokens
        self._until = joins["until"].astype(np.int64)
        # A sequence that joined after round r with c tokens takes a block in round d (from 0) when (c + d - r) % block == 0.
        self._first = joins["since"] + (-joins["cached"].astype(np.int64)) % block

    def between(self, first: IntArray, last: IntArray) -> IntArray:
        """Blocks taken in rounds first, ..., last - 1 for each pair; the rounds of one call should lie close together."""
        if not len(first):
            return np.empty(0, np.int64)
        low = int(first.min())
        total = self.before_each(low, int(last.max()))
        return total[last - low] - total[first - low]

    def before_each(self, low: int, high: int) -> IntArray:
        """Blocks taken in rounds low, ..., r - 1 for each r from *low* to *high*."""
        block = self._block
        inside = (self._first < high) & (self._until > low)
        begin, until = self._first[inside], np.minimum(self._until[inside], high)
        begin += np.maximum(0, -(-(low - begin) // block)) * block
        which, turn = expand(np.maximum(0, -(-(until - begin) // block)))
        taken = np.bincount(begin[which] + turn * block - low, minlength=high - low)
        return np.concatenate(([0], np.cumsum(taken)))


def _round_ends(spans: IntArray) -> tuple[IntArray, IntArray]:
    """End time in ns, and number of sequences that had not ended, of every round of *spans*, rows as in `_rounds_in_blocks`."""
    n, start_ns, start_frac, first, growth, seqs = spans
    row = np.repeat(np.arange(len(n)), n)
    done = np.arange(1, len(row) + 1) - (np.cumsum(n) - n)[row]
    elapsed = first[row]
    elapsed *= done
    if growth.any():
        grown = done * (done - 1)
        grown >>= 1
        grown *= growth[row]
        elapsed += grown
    elapsed += start_frac[row]
    elapsed >>= TICK_BITS
    elapsed += start_ns[row]
    return elapsed, seqs[row]
