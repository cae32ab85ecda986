"""Seconds of an iteration as ticks, with decode-only iterations tabulated as straight lines in the KV tokens they read."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from hwmodels.cost import CostModel
from hwmodels.totals import Totals
from sim.engine.clock import LONGEST_ITERATION_S, TICKS_PER_S, to_ticks

_new = tuple.__new__
_FIRST_KNOT = 256
_KNOTS_PER_OCTAVE = 4


def _knots() -> list[int]:
    """0, 256, then four to the octave: a chord between them is within 0.4 % of any convex power law up to the square."""
    knots = [0]
    for i in range(4 * 42):
        knots.append(round(_FIRST_KNOT * 2 ** (i / _KNOTS_PER_OCTAVE)))
    return knots


_KNOTS = _knots()


class Line(NamedTuple):
    """Ticks of a decode iteration that reads kv (and kv_window) tokens: base + slope * kv + slope_window * kv_window."""

    base: int
    slope: int
    slope_window: int
    kv_end: int
    kv_window_end: int


class Pricing:
    """Prices the iterations of one replica: target, and draft where the decoding method has one.

    Decode-only iterations are priced on chords between knots in KV tokens; both ways of running the clock use them, so
    they agree to the tick. All other iterations are priced by the cost model itself.
    """

    def __init__(self, cost: CostModel, draft: CostModel | None, round_s: float) -> None:
        """*round_s*: fixed cost of every iteration whose decodes submit more than one token each."""
        self._cost = cost
        self._iteration_s = cost.iteration_s
        self._draft = draft
        self._round_ticks = to_ticks(round_s)
        self._speculative = draft is not None or round_s > 0
        self._window = cost.window_tokens is not None
        self._draft_window = draft is not None and draft.window_tokens is not None
        self._lines: dict[tuple[int, int, int, int, int], Line] = {}
        self._draft_lines: dict[tuple[int, int], tuple[int, int]] = {}

    def decode_line(self, n: int, query_tokens: int, draft_steps: int, kv: int, kv_window: int) -> Line:
        """The line for *n* sequences of *query_tokens* each at *kv* tokens; valid below its ends."""
        cell = bisect_right(_KNOTS, kv) - 1
        cell_window = bisect_right(_KNOTS, kv_window) - 1 if self._window else 0
        key = (n, query_tokens, draft_steps, cell, cell_window)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = self._make_line(n, query_tokens, draft_steps, cell, cell_window)
        return line

    def _make_line(self, n: int, query_tokens: int, draft_steps: int, cell: int, cell_window: int) -> Line:
        kv0, kv1 = _KNOTS[cell], _KNOTS[cell + 1]
        w0, w1 = (_KNOTS[cell_window], _KNOTS[cell_window + 1]) if self._window else (0, 1)

        def ticks(kv: int, kv_window: int) -> int:
            rows = n * query_tokens
            seconds = self._cost.iteration_s(Totals(rows, 0, 0, 0, 0, n, kv, rows, 0, kv_window if self._window else 0))
            if draft_steps and self._draft is not None:
                within = kv_window if self._draft_window else 0
                seconds += draft_steps * self._draft.iteration_s(Totals(n, 0, 0, 0, 0, n, kv, n, 0, within))
            return to_ticks(seconds) + (self._round_ticks if query_tokens > 1 else 0)

        corner = ticks(kv0, w0)
        slope = max(0, (ticks(kv1, w0) - corner) // (kv1 - kv0))
        slope_window = max(0, (ticks(kv0, w1) - corner) // (w1 - w0)) if self._window else 0
        base = corner - slope * kv0 - slope_window * w0
        return Line(base, slope, slope_window, kv1, w1 if self._window else 1 << 62)

    def iteration(self, totals: Totals, draft_steps: int) -> int:
        """Ticks of one iteration on a replica without pipeline stages."""
        seconds = self._iteration_s(totals)
        # `to_ticks`, inline: this runs once an iteration.
        ticks = int(seconds * TICKS_PER_S + 0.5) if 0.0 <= seconds < LONGEST_ITERATION_S else to_ticks(seconds)
        if self._speculative:
            ticks += self._draft_ticks(totals, draft_steps)
        return ticks

    def stages(self, totals: Totals, draft_steps: int) -> tuple[list[int], int]:
        """Ticks of each stage, and of the hand-over between two of them. The draft runs with the first stage."""
        cost = self._cost
        stages = [to_ticks(cost.iteration_s(totals, stage)) for stage in range(cost.n_stages)]
        if self._speculative:
            stages[0] += self._draft_ticks(totals, draft_steps)
        return stages, to_ticks(cost.handover_s(totals.rows))

    def _draft_ticks(self, totals: Totals, draft_steps: int) -> int:
        """A draft model computes the prompt chunks too, then takes its steps for the decodes."""
        ticks = 0
        rows, prompt, chunks, pairs, prompt_kv, n, kv, _, pairs_window, kv_window = totals
        if self._draft is not None:
            if prompt:
                own = _new(Totals, (prompt, prompt, chunks, pairs, prompt_kv, 0, 0, 0, pairs_window, 0))
                ticks += to_ticks(self._draft.iteration_s(own))
            if draft_steps and n:
                if self._draft_window:
                    step = self._draft.iteration_s(Totals(n, 0, 0, 0, 0, n, kv, n, 0, kv_window))
                    ticks += to_ticks(draft_steps * step)
                else:
                    ticks += draft_steps * self._draft_pass(n, kv)
        if rows - prompt > n:
            ticks += self._round_ticks
        return ticks

    def _draft_pass(self, n: int, kv: int) -> int:
        """Ticks of one draft pass beside prompt chunks, on the chords that decode-only iterations use."""
        cell = bisect_right(_KNOTS, kv) - 1
        line = self._draft_lines.get((n, cell))
        if line is None:
            assert self._draft is not None
            kv0, kv1 = _KNOTS[cell], _KNOTS[cell + 1]
            low, high = (
                to_ticks(self._draft.iteration_s(Totals(n, 0, 0, 0, 0, n, end, n, 0, 0))) for end in (kv0, kv1)
            )
            slope = max(0, (high - low) // (kv1 - kv0))
            line = self._draft_lines[n, cell] = (low - slope * kv0, slope)
        return line[0] + line[1] * kv
