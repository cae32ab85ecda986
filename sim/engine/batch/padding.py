"""The totals of padded shapes, where request-level batching pads them."""

from __future__ import annotations

from collections.abc import Sequence

from hwmodels.reach import Window
from hwmodels.totals import Totals, pairs_within, seen


def padded(
    totals: Totals, run: Sequence[tuple[int, int]], query_tokens: int, context: int, sequences: int, window: Window
) -> Totals:
    """*totals* as they are priced where a batch is padded.

    Chunks of an iteration (*run*: id, tokens) take as long as the longest of them, a decode step as long as one of *sequences*
    at least, all of *context* cached tokens and the query tokens.
    """
    if run:
        length = max(tokens for _, tokens in run)
        gaps = [(tokens, length - tokens) for _, tokens in run if tokens < length]
        rows = sum(gap for _, gap in gaps)
        # Padding attends to what is before it, as causal attention over the padded length does.
        pairs = sum(length * (length + 1) // 2 - tokens * (tokens + 1) // 2 for tokens, _ in gaps)
        pairs_window = 0
        if window is not None:
            pairs_window = sum(pairs_within(0, length, window) - pairs_within(0, tokens, window) for tokens, _ in gaps)
        totals = totals._replace(
            rows=totals.rows + rows,
            prefill_rows=totals.prefill_rows + rows,
            prefill_pairs=totals.prefill_pairs + pairs,
            prefill_kv_tokens=totals.prefill_kv_tokens + rows,
            prefill_pairs_window=totals.prefill_pairs_window + pairs_window,
        )
    if totals.decode_seqs:
        n, longest = max(totals.decode_seqs, sequences), context + query_tokens
        more = (n - totals.decode_seqs) * query_tokens
        totals = totals._replace(
            rows=totals.rows + more,
            decode_seqs=n,
            decode_kv_tokens=max(n * longest, totals.decode_kv_tokens),
            logit_rows=totals.logit_rows + more,
            decode_kv_window=0 if window is None else max(n * seen(longest, window), totals.decode_kv_window),
        )
    return totals
