"""Iterations of one micro-batch slot with no decision in between, as one event.

A running set makes them; the engine core opens one when it starts and closes it with the number of iterations that were done.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

from sim.engine.record.columns import DrawnRounds, IntArray, Piece, Reads, Recorder, SpeculativeStart, Standing
from sim.engine.time.clock import elapsed, iterations_to_reach


class Span:
    """*n* iterations in flight from *start_ticks* on; a cut leaves fewer of them."""

    __slots__ = ("growth_first", "n", "start_ticks")

    is_recorded: ClassVar[bool] = True
    """Whether its record is complete from the start, if nothing is cut."""

    def __init__(self, start_ticks: int, n: int, growth_first: int) -> None:
        self.start_ticks = start_ticks
        self.n = n
        self.growth_first = growth_first
        """KV blocks that the first iteration takes."""

    def end(self, j: int, /) -> int:
        """Tick at which iteration *j*, from 1, ends: the same whether it is part of this span or a span of its own."""
        raise NotImplementedError

    def index_at(self, ticks: int, /) -> int:
        """The iteration in flight at a tick; one that ends there still is."""
        raise NotImplementedError

    def open(self, recorder: Recorder, standing: Standing, /) -> None:
        """Records its start."""
        raise NotImplementedError

    def cut(self, j: int, recorder: Recorder, /) -> None:
        """Keeps *j* iterations."""
        raise NotImplementedError

    def close(self, recorder: Recorder, done: int, /) -> None:
        """Corrects the record to *done* iterations: all, or fewer at the end of the run. Not called for all of a span that
        `is_recorded`."""
        raise NotImplementedError


class HeldBlocks(Protocol):
    """The part of a running set that its speculative span reads."""

    n: int
    query_tokens: int
    draft_steps: int

    def blocks_in(self, rounds: int, /) -> IntArray: ...


class Step(Span):
    """A single iteration, recorded as it started: it is not opened, and there is nothing to cut."""

    __slots__ = ("_end",)

    def __init__(self, start_ticks: int, end_ticks: int, growth_first: int) -> None:
        self.start_ticks = start_ticks
        self.n = 1
        self.growth_first = growth_first
        self._end = end_ticks

    def end(self, j: int, /) -> int:
        return self._end

    def index_at(self, ticks: int, /) -> int:
        return 1

    def close(self, recorder: Recorder, done: int, /) -> None:
        if not done:
            recorder.spans.drop_last(1)


class DecodeSpan(Span):
    """Decodes of the same sequences that last first, first + growth, first + 2 * growth, ... ticks."""

    __slots__ = ("_first_ticks", "_growth_ticks", "_reads")

    def __init__(
        self, start_ticks: int, n: int, first_ticks: int, growth_ticks: int, growth_first: int, reads: Reads
    ) -> None:
        self.start_ticks = start_ticks
        self.n = n
        self.growth_first = growth_first
        self._first_ticks = first_ticks
        self._growth_ticks = growth_ticks
        self._reads = reads

    def end(self, j: int, /) -> int:
        return self.start_ticks + j * self._first_ticks + self._growth_ticks * (j * (j - 1) // 2)

    def index_at(self, ticks: int, /) -> int:
        return min(iterations_to_reach(ticks - self.start_ticks, self._first_ticks, self._growth_ticks), self.n)

    def open(self, recorder: Recorder, standing: Standing, /) -> None:
        recorder.add_decodes(self.start_ticks, self.n, self._first_ticks, self._growth_ticks, self._reads, standing)

    def cut(self, j: int, recorder: Recorder, /) -> None:
        self.n = j
        recorder.spans.change_last("n", j)

    def close(self, recorder: Recorder, done: int, /) -> None:
        if done:
            recorder.spans.change_last("n", done)
        else:
            recorder.spans.drop_last(1)


class PiecewiseSpan(Span):
    """Decodes of the same sequences whose price bends on the way: pieces one after the other."""

    __slots__ = ("_pieces", "_reads", "_ticks")

    is_recorded = False

    def __init__(
        self, start_ticks: int, pieces: list[Piece], n: int, ticks: int, growth_first: int, reads: Reads
    ) -> None:
        """*n* iterations in all, which last *ticks*."""
        self.start_ticks = start_ticks
        self.n = n
        self.growth_first = growth_first
        self._pieces = pieces
        self._ticks = ticks
        self._reads = reads

    def end(self, j: int, /) -> int:
        if j == self.n:
            return self.start_ticks + self._ticks
        for start, n, first, growth in self._pieces:
            if j <= n:
                return self.start_ticks + start + elapsed(j, first, growth)
            j -= n
        raise IndexError("the span has fewer iterations")

    def index_at(self, ticks: int, /) -> int:
        before = 0
        ticks -= self.start_ticks
        for start, n, first, growth in self._pieces:
            # The earlier of two pieces that meet at a tick: what ends there still is in flight.
            if ticks <= start + n * first + growth * (n * (n - 1) // 2):
                return min(before + iterations_to_reach(ticks - start, first, growth), self.n)
            before += n
        return self.n

    def open(self, recorder: Recorder, standing: Standing, /) -> None:
        recorder.add_piecewise(self.start_ticks, self.n, self._reads, standing)

    def cut(self, j: int, recorder: Recorder, /) -> None:
        pieces, rest, i = self._pieces, j, 0
        while rest > pieces[i][1]:
            rest -= pieces[i][1]
            i += 1
        start, _, first, growth = pieces[i]
        pieces[i:] = [(start, rest, first, growth)]
        self.n = j
        self._ticks = start + elapsed(rest, first, growth)
        recorder.spans.change_last("n", j)

    def close(self, recorder: Recorder, done: int, /) -> None:
        if not done:
            recorder.drop_piecewise()
            return
        if done < self.n:
            self.cut(done, recorder)
        recorder.add_pieces(self._pieces)


class SpeculativeSpan(Span):
    """Iterations whose durations differ in more than a constant growth: read off arrays with one entry each."""

    __slots__ = ("_set", "_start", "emitted", "ends", "kv", "windows")

    is_recorded = False

    def __init__(
        self, start_ticks: int, ends: IntArray, growth_first: int,
        running_set: HeldBlocks, kv: IntArray, windows: IntArray | None, emitted: IntArray,
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
        self._start: SpeculativeStart | None = None

    def end(self, j: int, /) -> int:
        return self.start_ticks + int(self.ends[j - 1])

    def index_at(self, ticks: int, /) -> int:
        return min(int(self.ends.searchsorted(ticks - self.start_ticks)) + 1, self.n)

    def open(self, recorder: Recorder, standing: Standing, /) -> None:
        # The common part of its iterations is known now, their number only when it closes.
        decoding = self._set
        batch, running, waiting, blocks_used, round_ = standing
        before = (batch, running, waiting, blocks_used - self.growth_first, round_)
        self._start = SpeculativeStart(
            before, decoding.n, decoding.query_tokens, decoding.draft_steps, len(recorder.queued_ns)
        )

    def cut(self, j: int, recorder: Recorder, /) -> None:
        self.n = j

    def close(self, recorder: Recorder, done: int, /) -> None:
        if not done:
            return
        assert self._start is not None
        windows = None if self.windows is None else self.windows[:done]
        drawn = DrawnRounds(self.ends[:done], self.kv[:done], windows, self.emitted[:done], self._set.blocks_in(done))
        recorder.add_speculative(self.start_ticks, self._start, drawn)
