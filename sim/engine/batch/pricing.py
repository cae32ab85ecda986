"""Seconds of an iteration as ticks, with decode-only iterations tabulated as straight lines in the KV tokens they read."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hwmodels.cost import CostModel
from hwmodels.totals import Totals
from sim.engine.time.clock import LONGEST_ITERATION_S, TICKS_PER_S, to_ticks

_new: Final = tuple[object, ...].__new__

LINE_ERROR: Final = 2e-7
"""The most that a line is off the cost model where it is checked, as a share of the iteration."""
WINDOW_LINE_ERROR: Final = 1e-8
"""The same along windowed tokens: they stay where they are once windows are full, so that an error would add up."""
_FIRST_BITS: Final = 8
_HALVINGS: Final = 7
"""An octave is halved this many times; a part of 2**-7 of it that is still bent is halved in the same way."""

_FULL: Final = 0.98
"""The share of a line's full length that is tried first: a few of full length are a little too bent, and are halved."""

_Key = tuple[int, int, int]
"""Sequences, query tokens of each, draft steps."""
_Ticks = Callable[[_Key, Any, Any], Any]
"""(key, KV tokens, windowed KV tokens) -> ticks, elementwise: int64 arrays in, float64 whole numbers out."""


class Line(NamedTuple):
    """Ticks of a decode iteration that reads kv (and kv_window) tokens: base + slope * kv + slope_window * kv_window."""

    base: int
    slope: int
    slope_window: int
    kv_end: int
    kv_window_end: int


LineAt = Callable[[int, int], Line]
"""(KV tokens, windowed KV tokens) -> the line there, valid below its ends. Without a window the latter are ignored."""


class _Side(NamedTuple):
    """2**bits tokens from *low*."""

    low: int
    bits: int


class _Cell(NamedTuple):
    """A side in slots of 2**shift tokens; each holds the line there, a cell, or None until it is asked for."""

    low: int
    shift: int
    slots: list[Line | _Cell | None]


class _Box(NamedTuple):
    """Two sides over which a cost is the sum of a part of each: the lines of both, and the ticks at the low corner."""

    kv: _Cell
    window: _Cell
    corner: int


class Lines:
    """A cost as straight lines, each as long as `LINE_ERROR` allows: an octave where it is straight, one token at a jump.

    Which line holds at a point depends on the point alone, never on what was asked before. The error of a line is zero on
    average, so that a run of iterations is closer to the cost model than each of them.
    """

    def __init__(self, ticks: _Ticks, windowed: bool) -> None:
        self._ticks = ticks
        self._windowed = windowed
        self._of: dict[_Key, LineAt] = {}
        self._boxes: dict[tuple[_Key, _Side, _Side], _Box | None] = {}

    def of(self, n: int, query_tokens: int, draft_steps: int) -> LineAt:
        """The lines of all iterations with *n* sequences, *query_tokens* of each, and *draft_steps* draft steps."""
        key = (n, query_tokens, draft_steps)
        lines = self._of.get(key)
        if lines is None:
            lines = self._of[key] = self._windowed_lines(key) if self._windowed else self._plain_lines(key)
        return lines

    def _plain_lines(self, key: _Key) -> LineAt:
        octaves: list[_Cell | None] = [None] * 64
        along_kv = self._along_kv(key, 0)

        def line_at(kv: int, _: int, /) -> Line:
            octave = kv >> _FIRST_BITS and kv.bit_length()
            cell = octaves[octave]
            if cell is None:
                cell = octaves[octave] = _cut(along_kv, _octave(kv), LINE_ERROR)
            low, shift, slots = cell
            slot = slots[(kv - low) >> shift]
            return slot if type(slot) is Line else _look_up(cell, kv, along_kv, LINE_ERROR)

        return line_at

    def _windowed_lines(self, key: _Key) -> LineAt:
        return lambda kv, kv_window, /: self._windowed_line(key, kv, kv_window)

    def _windowed_line(self, key: _Key, kv: int, kv_window: int) -> Line:
        side, side_window = _octave(kv), _octave(kv_window)
        while True:
            address = (key, side, side_window)
            if address in self._boxes:
                box = self._boxes[address]
            else:
                box = self._boxes[address] = self._box(key, side, side_window)
            if box is not None:
                break
            side, side_window = _half(side, kv), _half(side_window, kv_window)
        a = _look_up(box.kv, kv, self._along_kv(key, side_window.low), LINE_ERROR)
        b = _look_up(box.window, kv_window, self._along_window(key, side.low), WINDOW_LINE_ERROR)
        return Line(a.base + b.base - box.corner, a.slope, b.slope, a.kv_end, b.kv_end)

    def _box(self, key: _Key, side: _Side, side_window: _Side) -> _Box | None:
        """The lines over two sides, or None where what the one adds depends on the other: as under a floor."""
        kv, window = _points(side, 2), _points(side_window, 2)
        ticks = self._ticks(key, np.repeat(kv, len(window)), np.tile(window, len(kv))).reshape(len(kv), len(window))
        mixed = ticks - ticks[:, :1] - ticks[:1] + ticks[0, 0]
        if (np.abs(mixed) > LINE_ERROR * ticks).any() and (side.bits or side_window.bits):
            return None
        along_kv, along_window = self._along_kv(key, side_window.low), self._along_window(key, side.low)
        return _Box(
            _cut(along_kv, side, LINE_ERROR), _cut(along_window, side_window, WINDOW_LINE_ERROR), int(ticks[0, 0])
        )

    def _along_kv(self, key: _Key, kv_window: int) -> Callable[[Any], Any]:
        return lambda kv: self._ticks(key, kv, np.full_like(kv, kv_window))

    def _along_window(self, key: _Key, kv: int) -> Callable[[Any], Any]:
        return lambda kv_window: self._ticks(key, np.full_like(kv_window, kv), kv_window)


def _octave(token: int) -> _Side:
    """The numbers with as many bits as *token*; all those below the first octave together."""
    bits = token.bit_length() - 1
    return _Side(1 << bits, bits) if bits >= _FIRST_BITS else _Side(0, _FIRST_BITS)


def _half(side: _Side, token: int) -> _Side:
    """The half of *side* that *token* is in."""
    if side.bits == 0:
        return side
    bits = side.bits - 1
    return _Side(side.low + ((token - side.low) >> bits << bits), bits)


def _points(side: _Side, halvings: int) -> Any:
    """Both ends of the parts that halvings give, single tokens at the finest. int64[points]."""
    if side.bits == 0:
        return np.array([side.low], np.int64)
    halvings = min(side.bits, halvings)
    return side.low + (np.arange((1 << halvings) + 1, dtype=np.int64) << (side.bits - halvings))


def _look_up(cell: _Cell, token: int, ticks: Callable[[Any], Any], most_error: float) -> Line:
    while True:
        low, shift, slots = cell
        i = (token - low) >> shift
        slot = slots[i]
        if isinstance(slot, Line):
            return slot
        if slot is None:
            slot = slots[i] = _cut(ticks, _Side(low + (i << shift), shift), most_error)
        cell = slot


def _cut(ticks: Callable[[Any], Any], side: _Side, most_error: float) -> _Cell:
    """*ticks* of tokens over a side in lines; None where even the shortest is too bent."""
    # Points are twice as dense as slots, so that each has one inside; where slots are single tokens none is needed.
    points = _points(side, _HALVINGS + 1)
    values: NDArray[np.float64] = ticks(points)
    cut = min(side.bits, _HALVINGS)
    shift, last = side.bits - cut, len(points) - 1
    if last == 0:
        return _Cell(side.low, 0, [Line(int(values[0]), 0, 0, side.low + 1, 1 << 62)])
    shortest = last >> cut
    weights = np.ones(last + 1)
    if shortest == 2:
        weights[1::2], weights[::2] = 4 / 3, 2 / 3  # Simpson's rule
    knots: NDArray[np.int64] = _first_knots(values, shortest, most_error)
    while True:
        starts, lengths = knots[:-1], np.diff(knots)
        rises = np.diff(values[knots])
        off = values - np.interp(np.arange(last + 1), knots, values[knots])
        centres = np.add.reduceat(off[:-1] * weights[:-1], starts) / lengths
        high, low = np.maximum.reduceat(off[:-1], starts), np.minimum.reduceat(off[:-1], starts)
        curved = np.maximum(high - centres, centres - low) > most_error * values[starts]
        curved |= (rises < 0) & ((lengths > 1) | (shortest > 1))
        longer = curved & (lengths > shortest)
        if not longer.any():
            break
        middles = starts[longer] + lengths[longer] // (2 * shortest) * shortest
        knots = np.sort(np.concatenate((knots, middles)))
    slots: list[Line | _Cell | None] = []
    width = int(points[1] - points[0])
    slopes = np.maximum(0, np.rint(rises / (lengths * width))).astype(np.int64).tolist()
    at_begin = np.rint(values[starts] + centres).astype(np.int64).tolist()
    begins, tokens = points[starts].tolist(), (lengths * width).tolist()
    for begin, n, slope, value, too_curved in zip(begins, tokens, slopes, at_begin, curved.tolist(), strict=True):
        # Python's integers: slope * begin may be beyond int64 at a jump.
        line = None if too_curved else _new(Line, (value - slope * begin, slope, 0, begin + n, 1 << 62))
        slots += [line] * (n >> shift)
    return _Cell(side.low, shift, slots)


def _first_knots(values: Any, shortest: int, most_error: float) -> Any:
    """Indices where lines might end, by the bend of *values* where each begins: multiples of *shortest*."""
    last = len(values) - 1
    if last < 2:
        return np.array([0, last])
    # A chord over m steps is off by m**2 / 8 of the second difference; less its mean, by two thirds of that. Each step takes
    # this share of a line:
    bends = np.abs(values[2:] - 2.0 * values[1:-1] + values[:-2])
    shares = np.sqrt(bends / (12.0 * most_error * values[1:-1] + 1e-300))
    taken = np.concatenate(([0.0], np.cumsum(shares), [0.0]))
    taken[-1] = taken[-2] + shares[-1]
    before = taken.tolist()
    knots, at = [0], 0
    while at < last:
        reach = bisect_left(before, before[at] + _FULL, at) - 1
        at = min(at + max(shortest, (reach - at) // shortest * shortest), last)
        knots.append(at)
    return np.array(knots)


class Prices:
    """Ticks of an engine core's iterations."""

    # A base class and not a protocol, whose methods are looked up by name: with this one and `RunningSet` as protocols the compiled
    # conversation trace takes 9 % longer (0.30 for 0.28 s, Sarathi 0.36 for 0.33).

    def decode_lines(self, n: int, query_tokens: int, draft_steps: int, /) -> LineAt:
        """The lines of decode iterations with *n* sequences, *query_tokens* of each, and *draft_steps*."""
        raise NotImplementedError

    def iteration(self, totals: Totals, draft_steps: int, /) -> int:
        """Ticks of one iteration without pipeline stages."""
        raise NotImplementedError

    def stages(self, totals: Totals, draft_steps: int, /) -> tuple[list[int], int]:
        """Ticks of each stage, and of a hand-over between two."""
        raise NotImplementedError


class Pricing(Prices):
    """Prices the iterations of one replica: target, and draft where the decoding method has one.

    Decode-only iterations are priced on `Lines`; both ways of running the clock use them, so they agree to the tick. All
    other iterations are priced by the cost model itself, but for the passes of a draft in them.
    """

    def __init__(
        self, cost: CostModel, draft: CostModel | None, round_s: float, *, drafts_prompts: bool = False
    ) -> None:
        """*round_s*: fixed cost of every iteration whose decodes submit more than one token each. *drafts_prompts*: sequences that
        compute prompts take part in all passes of the draft, as in vLLM, and not in the one that reads their tokens alone."""
        self.cost = cost
        self._iteration_s: Callable[[Totals], float] = getattr(cost, "scalar_s", cost.iteration_s)
        """Seconds of an iteration whose totals are ints: by a shorter way, where the cost model has one."""
        self.draft = draft
        self.drafts_prompts = drafts_prompts
        self.round_ticks = to_ticks(round_s)
        self.speculative = draft is not None or round_s > 0
        self._window = cost.window_tokens is not None
        self._draft_window = draft is not None and draft.window_tokens is not None
        self.draft_rereads: bool = getattr(draft, "reads_whole_step", False)
        """The first pass of a round reads all tokens that the target verifies."""
        self._decode_lines = Lines(self._decode_ticks, self._window)
        self._draft_lines = Lines(self._draft_pass_ticks, False)

    def decode_lines(self, n: int, query_tokens: int, draft_steps: int, /) -> LineAt:
        return self._decode_lines.of(n, query_tokens, draft_steps)

    def _decode_ticks(self, key: _Key, kv: Any, kv_window: Any) -> Any:
        """Ticks of decode-only iterations. int64[k], int64[k] -> float64[k]."""
        n, query_tokens, draft_steps = key
        seconds = self.cost.iteration_s(_decodes(n, query_tokens, kv, kv_window if self._window else 0 * kv))
        if draft_steps and self.draft is not None:
            within = kv_window if self._draft_window else 0 * kv
            if self.draft_rereads:
                seconds = seconds + self.draft.iteration_s(_drafted(n, query_tokens, kv, within))
                draft_steps -= 1
            seconds = seconds + draft_steps * self.draft.iteration_s(_decodes(n, 1, kv, within))
        return whole_ticks(seconds) + (self.round_ticks if query_tokens > 1 else 0)

    def _draft_pass_ticks(self, key: _Key, kv: Any, _: Any) -> Any:
        assert self.draft is not None
        return whole_ticks(self.draft.iteration_s(_drafted(key[0], key[1], kv, 0 * kv)))

    def iteration(self, totals: Totals, draft_steps: int, /) -> int:
        seconds = self._iteration_s(totals)
        # `to_ticks`, inline: this runs once an iteration.
        ticks = int(seconds * TICKS_PER_S + 0.5) if 0.0 <= seconds < LONGEST_ITERATION_S else to_ticks(seconds)
        if self.speculative:
            ticks += self.draft_ticks(totals, draft_steps)
        return ticks

    def stages(self, totals: Totals, draft_steps: int, /) -> tuple[list[int], int]:
        """The draft runs with the first stage."""
        cost = self.cost
        stages = [to_ticks(cost.iteration_s(totals, stage)) for stage in range(cost.n_stages)]
        if self.speculative:
            stages[0] += self.draft_ticks(totals, draft_steps)
        return stages, to_ticks(cost.handover_s(totals.rows))

    def draft_ticks(self, totals: Totals, draft_steps: int) -> int:
        """A draft model computes the prompt chunks too, then takes its steps for the decodes."""
        ticks = 0
        rows, prompt, chunks, pairs, prompt_kv, n, kv, _, pairs_window, kv_window = totals
        if self.draft is not None:
            if prompt:
                own = _new(Totals, (prompt, prompt, chunks, pairs, prompt_kv, 0, 0, 0, pairs_window, 0))
                ticks += to_ticks(self.draft.iteration_s(own))
            if draft_steps and n:
                width, times = ((rows - prompt) // n, 1) if self.draft_rereads else (1, draft_steps)
                # Passes behind the first are taken with the prompts' sequences, where these are drafted for.
                times = 1 if chunks and self.drafts_prompts else times
                ticks += self._passes(n, width, kv, kv_window, times)
                draft_steps -= times
            elif draft_steps:
                draft_steps -= 1
            if draft_steps and (n or self.drafts_prompts):
                ticks += self._passes(*self.later_passes(totals), draft_steps)
        if rows - prompt > n:
            ticks += self.round_ticks
        return ticks

    def later_passes(self, totals: Totals) -> tuple[int, int, int, int]:
        """Sequences of a draft's passes behind the first, tokens of each, KV tokens, and those within its window."""
        n, kv, within = totals.decode_seqs, totals.decode_kv_tokens, totals.decode_kv_window
        if self.drafts_prompts and totals.prefill_chunks:
            n += totals.prefill_chunks
            kv += totals.prefill_kv_tokens
            window = getattr(self.draft, "window_tokens", None)
            within += totals.prefill_kv_tokens if window is None else min(totals.prefill_kv_tokens, n * window)
        return n, 1, kv, within

    def _passes(self, n: int, width: int, kv: int, kv_window: int, times: int) -> int:
        """Ticks of *times* draft passes over *width* tokens of each of *n* sequences."""
        assert self.draft is not None
        if self._draft_window:
            step = self.draft.iteration_s(Totals(n * width, 0, 0, 0, 0, n, kv, n, 0, kv_window))
            return to_ticks(times * step)
        line = self._draft_lines.of(n, width, 1)(kv, 0)
        return times * (line.base + line.slope * kv)


def _decodes(n: int, query_tokens: int, kv: Any, kv_window: Any) -> Totals:
    """Totals of decode-only iterations that differ in KV tokens alone."""
    none = 0 * kv
    rows = none + n * query_tokens
    return Totals(rows, none, none, none, none, none + n, kv, rows, none, kv_window)


def _drafted(n: int, tokens: int, kv: Any, kv_window: Any) -> Totals:
    """Totals of draft passes that read *tokens* tokens of each sequence and propose the next one of each."""
    none = 0 * kv
    return Totals(none + n * tokens, none, none, none, none, none + n, kv, none + n, none, kv_window)


def whole_ticks(seconds: Any) -> Any:
    """`to_ticks`, elementwise: float64 whole numbers."""
    seconds = np.asarray(seconds, np.float64)
    wrong = ~((seconds >= 0.0) & (seconds < LONGEST_ITERATION_S))
    if wrong.any():
        to_ticks(float(seconds[wrong][0]))
    return np.floor(seconds * TICKS_PER_S + 0.5)
