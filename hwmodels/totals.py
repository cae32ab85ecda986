"""The facts about one iteration that a cost model is given: a few integers, summed over the batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hwmodels.reach import Chunk, Window


def seen(context: Any, window: Window) -> Any:
    """Tokens that the last of *context* tokens sees, itself included, within *window*: its own chunk for a `Chunk`.

    Ints or int64 arrays, each of at least 1.
    """
    if type(window) is Chunk:
        return (context - 1) % int(window) + 1
    if type(context) is int:
        return context if context < window else window
    return np.minimum(context, window)


def pairs_within(past: int, tokens: int, window: Window) -> int:
    """Query-key pairs of *tokens* queries after *past* tokens that see what `seen` says."""
    if type(window) is Chunk:
        return _pairs_in_chunks(past + tokens, int(window)) - _pairs_in_chunks(past, int(window))
    growing = max(0, min(tokens, window - past))
    return growing * past + growing * (growing + 1) // 2 + (tokens - growing) * window


def _pairs_in_chunks(tokens: int, chunk: int) -> int:
    whole, rest = divmod(tokens, chunk)
    return whole * (chunk * (chunk + 1) // 2) + rest * (rest + 1) // 2


class Totals(NamedTuple):
    """One iteration's work on one replica, as sums over its batch.

    Every field is an int, or every field is an int64 array of one common shape: cost models use
    elementwise arithmetic only, so that both give the same bits.
    """

    rows: Any
    """Tokens through the linear layers: prompt tokens of this iteration plus decode query tokens."""
    prefill_rows: Any = 0
    """The prompt tokens among `rows`."""
    prefill_chunks: Any = 0
    """Sequences that contribute prompt tokens."""
    prefill_pairs: Any = 0
    """Causal query-key pairs of the prompt tokens: sum over chunks of q * past + q * (q + 1) / 2."""
    prefill_kv_tokens: Any = 0
    """KV tokens the prompt chunks attend to: sum of past + q."""
    decode_seqs: Any = 0
    """Sequences that decode; each submits (rows - prefill_rows) / decode_seqs query tokens."""
    decode_kv_tokens: Any = 0
    """KV tokens the decodes read: sum over them of cached context plus their query tokens."""
    logit_rows: Any = 0
    """Rows through the LM head: decode query tokens plus one for each prompt that completes."""
    prefill_pairs_window: Any = 0
    """`prefill_pairs` with each query limited to the model's sliding window or chunk (0 when it has none)."""
    decode_kv_window: Any = 0
    """`decode_kv_tokens` with each sequence limited to the sliding window or chunk (0 when it has none)."""
