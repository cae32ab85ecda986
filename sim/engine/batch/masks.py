"""Masks of tokens that grammars forbid: what they add to the ticks of an iteration."""

from __future__ import annotations

from collections.abc import Iterable

from sim.engine.batch.grammars import GrammarSpec
from sim.engine.batch.pricing import Line, LineAt, Prices
from sim.engine.time.clock import to_ticks


class Masks:
    """Prices of iterations in which some tokens are sampled under a grammar."""

    def __init__(self, spec: GrammarSpec, prices: Prices) -> None:
        self._grammar = spec.grammar
        self._step_ticks, self._mask_ticks, self._apply_ticks = (
            to_ticks(each) for each in (spec.step_s, spec.mask_s, spec.apply_s)
        )
        self._overlapped = spec.overlapped
        self._prices = prices
        self._masked: dict[int, MaskedPrices] = {}

    def rows(self, decoding: Iterable[int], query_tokens: int, completing: Iterable[int]) -> int:
        """Masks of an iteration: one for each token that is verified or sampled for a request with a grammar."""
        grammar = self._grammar
        rows = query_tokens * sum([grammar[id_] >= 0 for id_ in decoding])
        return rows + sum([grammar[id_] >= 0 for id_ in completing])

    def added(self, ticks: int, rows: int) -> int:
        """Ticks that *rows* masks add to an iteration of *ticks*."""
        if not rows:
            return 0
        host = self._step_ticks + rows * self._mask_ticks
        return (max(host - ticks, 0) if self._overlapped else host) + rows * self._apply_ticks

    def prices(self, rows: int) -> Prices:
        """Prices of decode iterations with *rows* masks each."""
        if not rows:
            return self._prices
        found = self._masked.get(rows)
        if found is None:
            host = self._step_ticks + rows * self._mask_ticks
            added = rows * self._apply_ticks + (0 if self._overlapped else host)
            found = self._masked[rows] = MaskedPrices(self._prices, host if self._overlapped else 0, added)
        return found


class MaskedPrices(Prices):
    """Prices of decode iterations that take *least* ticks each, and *added* more."""

    def __init__(self, prices: Prices, least: int, added: int) -> None:
        self._inner = prices
        self._least = least
        self._added = added

    def decode_lines(self, n: int, query_tokens: int, draft_steps: int, /) -> LineAt:
        inner, least, added = self._inner.decode_lines(n, query_tokens, draft_steps), self._least, self._added

        def line_at(kv: int, kv_window: int, /) -> Line:
            base, slope, slope_window, kv_end, kv_window_end = inner(kv, kv_window)
            below = least - (base + slope * kv + slope_window * kv_window)
            if below <= 0:
                return Line(base + added, slope, slope_window, kv_end, kv_window_end)
            # The forward pass is the longer of the two when its tokens have grown by as much; half of that along each side.
            if slope:
                kv_end = min(kv_end, kv + below // (2 * slope if slope_window else slope) + 1)
            if slope_window:
                kv_window_end = min(kv_window_end, kv_window + below // (2 * slope_window) + 1)
            return Line(least + added, 0, 0, kv_end, kv_window_end)

        return line_at
