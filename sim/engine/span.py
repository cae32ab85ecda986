"""Iterations of one micro-batch slot that need no look in between, as one event.

A running set makes them; the tenant opens one when it starts and closes it with the number of iterations that were done.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Protocol

from sim.engine.clock import TICK_BITS, elapsed, iterations_to_reach
from sim.engine.columns import IntArray, Recorder


class Span(Protocol):
    """*n* iterations in flight from *start_ticks* on; a cut leaves fewer of them."""

    n: int
    start_ticks: int
    growth_first: int
    """KV blocks that the first iteration takes."""

    def end(self, j: int, /) -> int:
        """Tick at which iteration *j*, from 1, ends: the same whether it is part of this span or a span of its own."""
        ...

    def index_at(self, ticks: int, /) -> int:
        """The iteration in flight at a tick; one that ends there still is."""
        ...

    def open(self, recorder: Recorder, lane: int, running: int, waiting: int, blocks_used: int, round_: int, /) -> None:
        """Record it as it starts: sequences admitted, requests waiting, KV blocks in its first iteration, rounds before."""
        ...

    def cut(self, j: int, recorder: Recorder, /) -> None:
        """Leave *j* iterations."""
        ...

    def close(self, recorder: Recorder, done: int, /) -> None:
        """Bring the record in line with what was done: all iterations, or fewer at the end of the run."""
        ...


class Blocks(Protocol):
    """What a bent span asks of the running set that made it."""

    def blocks_for(self, rounds: int, /) -> int: ...


class Tapes(Protocol):
    """What a taped span asks of the running set that made it."""

    n: int
    query_tokens: int
    draft_steps: int

    def blocks_in(self, rounds: int, /) -> IntArray: ...


class LinearSpan:
    """Iterations that last first, first + growth, first + 2 * growth, ... ticks.

    Of decodes alone it also has how many sequences there are (*seqs*), the KV tokens that the first iteration reads (*kv*),
    those within the window and what they grow by; the running set sets these four.
    """

    __slots__ = (
        "first_ticks", "growth_first", "growth_ticks", "kv", "n", "seqs", "start_ticks", "window", "window_growth",
    )  # fmt: skip

    def __init__(self, start_ticks: int, n: int, first_ticks: int, growth_ticks: int, growth_first: int) -> None:
        self.start_ticks = start_ticks
        self.n = n
        self.first_ticks = first_ticks
        self.growth_ticks = growth_ticks
        self.growth_first = growth_first

    seqs: int
    kv: int
    window: int
    window_growth: int

    def end(self, j: int, /) -> int:
        return self.start_ticks + elapsed(j, self.first_ticks, self.growth_ticks)

    def index_at(self, ticks: int, /) -> int:
        return min(iterations_to_reach(ticks - self.start_ticks, self.first_ticks, self.growth_ticks), self.n)

    def open(self, recorder: Recorder, lane: int, running: int, waiting: int, blocks_used: int, round_: int, /) -> None:
        recorder.add_decodes(
            self.start_ticks, self.n, self.first_ticks, self.growth_ticks, lane, self.seqs, self.kv, self.window,
            self.window_growth, running, waiting, blocks_used, round_,
        )  # fmt: skip

    def cut(self, j: int, recorder: Recorder, /) -> None:
        self.n = j
        recorder.spans.change_last("n", j)

    def close(self, recorder: Recorder, done: int, /) -> None:
        if done == self.n:
            return
        if done:
            recorder.spans.change_last("n", done)
        else:
            recorder.spans.drop_last(1)


class BentSpan:
    """Linear spans one after the other: iterations of the same sequences whose price bends on the way."""

    __slots__ = ("_pieces", "_record", "_set", "_starts", "growth_first", "n", "start_ticks")

    def __init__(self, pieces: list[LinearSpan], running_set: Blocks) -> None:
        self._pieces = pieces
        self._set = running_set
        self._starts = [piece.start_ticks for piece in pieces]
        self.start_ticks = self._starts[0]
        self.growth_first = pieces[0].growth_first
        self.n = sum(piece.n for piece in pieces)
        self._record = (0, 0, 0, 0, 0, 0)

    def end(self, j: int, /) -> int:
        for piece in self._pieces:
            if j <= piece.n:
                return piece.end(j)
            j -= piece.n
        raise IndexError("the span has fewer iterations")

    def index_at(self, ticks: int, /) -> int:
        # Of two pieces that meet at a tick the earlier: what ends there still is in flight.
        which = max(bisect_left(self._starts, ticks) - 1, 0)
        before = sum(piece.n for piece in self._pieces[:which])
        return min(before + self._pieces[which].index_at(ticks), self.n)

    def open(self, recorder: Recorder, lane: int, running: int, waiting: int, blocks_used: int, round_: int, /) -> None:
        self._record = (lane, running, waiting, blocks_used, round_, len(recorder.queued_ns))

    def cut(self, j: int, recorder: Recorder, /) -> None:
        self.n = j

    def close(self, recorder: Recorder, done: int, /) -> None:
        lane, running, waiting, blocks_used, round_, n_queued = self._record
        queued = recorder.queued_ns[n_queued:]
        before = 0
        for piece in self._pieces:
            if before >= done:
                return
            if before:
                # Blocks and requests that have come since the first iteration.
                blocks = blocks_used + self._set.blocks_for(before + 1) - self.growth_first
                came = bisect_right(queued, piece.start_ticks >> TICK_BITS)
            else:
                blocks, came = blocks_used, 0
            recorder.add_decodes(
                piece.start_ticks, min(piece.n, done - before), piece.first_ticks, piece.growth_ticks, lane, piece.seqs,
                piece.kv, piece.window, piece.window_growth, running, waiting + came, blocks, round_ + before,
            )  # fmt: skip
            before += piece.n


class TapedSpan:
    """Iterations whose durations differ in more than a constant growth: read off arrays with one entry each."""

    __slots__ = ("_record", "_set", "emitted", "ends", "growth_first", "kv", "n", "start_ticks", "windows")

    def __init__(
        self, start_ticks: int, ends: IntArray, growth_first: int,
        running_set: Tapes, kv: IntArray, windows: IntArray | None, emitted: IntArray,
    ) -> None:  # fmt: skip
        self.start_ticks = start_ticks
        self.n = len(ends)
        self.ends = ends
        """Ticks from the start."""
        self.growth_first = growth_first
        self.kv = kv
        self.windows = windows
        self.emitted = emitted
        self._set = running_set
        self._record = (0, 0, 0, 0, 0, 0)

    def end(self, j: int, /) -> int:
        return self.start_ticks + int(self.ends[j - 1])

    def index_at(self, ticks: int, /) -> int:
        return min(int(self.ends.searchsorted(ticks - self.start_ticks)) + 1, self.n)

    def open(self, recorder: Recorder, lane: int, running: int, waiting: int, blocks_used: int, round_: int, /) -> None:
        # What its iterations have in common is known now, how many they are only when it closes.
        self._record = (lane, running, waiting, blocks_used - self.growth_first, round_, len(recorder.queued_ns))

    def cut(self, j: int, recorder: Recorder, /) -> None:
        self.n = j

    def close(self, recorder: Recorder, done: int, /) -> None:
        if not done:
            return
        lane, running, waiting, blocks_before, round_, n_queued = self._record
        decoding = self._set
        recorder.add_taped(
            self.start_ticks, lane, decoding.n, decoding.query_tokens, decoding.draft_steps, running, waiting, round_,
            blocks_before, n_queued,
            self.ends[:done], self.kv[:done], None if self.windows is None else self.windows[:done],
            self.emitted[:done], decoding.blocks_in(done),
        )  # fmt: skip
