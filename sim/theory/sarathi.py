"""Closed forms of chunked prefill and decode-maximal batches.

SARATHI = Agrawal et al., arXiv 2308.16369; Sarathi-Serve = Agrawal et al., OSDI 2024, arXiv 2403.02310.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sim.theory._checks import Values, count, non_negative, plain, positive


def kv_bytes_per_token(layers: Values, hidden: Values, value_bytes: Values = 2) -> Any:
    """Bytes of KV cache per token with full multi-head attention: 2 * layers * hidden * bytes.

    Source: SARATHI, section 4.3.1 (m_kv).
    """
    values = count("layers", layers, at_least=1) * count("hidden", hidden, at_least=1)
    return plain(2.0 * values * positive("value_bytes", value_bytes))


def batch_capacity(
    memory_bytes: Values,
    weight_bytes: Values,
    sequence_tokens: Values,
    kv_bytes_per_token: Values,
    reserve_bytes: Values = 0.0,
) -> Any:
    """Sequences of full length that fit: floor((memory - weights - reserve) / (L m_kv)); 0 where nothing is left.

    *reserve_bytes* is what activations and workspace take; the paper's formula has none and its stated batches do.

    Source: SARATHI, section 4.3.1.
    """
    pool = positive("memory_bytes", memory_bytes) - non_negative("weight_bytes", weight_bytes)
    pool = pool - non_negative("reserve_bytes", reserve_bytes)
    each = count("sequence_tokens", sequence_tokens, at_least=1) * positive("kv_bytes_per_token", kv_bytes_per_token)
    return plain(np.maximum(np.floor(pool / each), 0.0).astype(np.int64))


def implied_pool_bytes(batch: Values, sequence_tokens: Values, kv_bytes_per_token: Values) -> tuple[Any, Any]:
    """The KV pools from which the capacity formula gives *batch*: at least the first value, below the second.

    Source: SARATHI, section 4.3.1, solved for the memory.
    """
    each = count("sequence_tokens", sequence_tokens, at_least=1) * positive("kv_bytes_per_token", kv_bytes_per_token)
    n = count("batch", batch)
    return plain(n * each), plain((n + 1.0) * each)


def tile_adjusted_chunk(chunk: Values, batch: Values) -> Any:
    """Prefill tokens beside batch - 1 decodes so that both together fill *chunk*: C - (B - 1).

    Source: SARATHI, section 4.4.
    """
    c, b = count("chunk", chunk, at_least=1), count("batch", batch, at_least=1)
    if (b > c).any():
        raise ValueError(f"batch - 1 decodes must leave room in the chunk for prefill; got {chunk!r} and {batch!r}")
    return plain(c - b + 1.0)


def optimal_pd_ratio(chunk: Values, batch: Values, tile_adjusted: bool = True) -> Any:
    """Prompt-to-output ratio at which prefill chunks and piggybacked decodes run out together.

    (C - (B - 1)) / (B - 1), or C / (B - 1) with tile_adjusted=False. Infinite at batch 1, which has no decode to carry.

    Source: SARATHI, sections 4.4 and 5.1.3.
    """
    decodes = count("batch", batch, at_least=1) - 1.0
    prefill = tile_adjusted_chunk(chunk, batch) if tile_adjusted else count("chunk", chunk, at_least=1)
    return plain(np.where(decodes > 0.0, prefill / np.where(decodes > 0.0, decodes, 1.0), np.inf))


def chunk_count(prompt_tokens: Values, chunk: Values) -> Any:
    """Chunks that a prompt is cut into: ceil(P / C).

    Source: SARATHI, section 4.2.
    """
    p, c = count("prompt_tokens", prompt_tokens), count("chunk", chunk, at_least=1)
    return plain(np.ceil(p / c).astype(np.int64))


def kv_chunk_reads(chunks: Values, first_touch: bool = True) -> Any:
    """Chunk-sized KV reads of a prompt cut in N chunks: N (N + 1) / 2, or N (N - 1) / 2 without the first touch.

    Source: SARATHI, section 4.2; Sarathi-Serve leaves out the first touch.
    """
    n = count("chunks", chunks)
    return plain(n * (n + (1.0 if first_touch else -1.0)) / 2.0)


def linear_intensity(rows: Values, fan_in: Values, fan_out: Values, value_bytes: Values = 2) -> Any:
    """Arithmetic intensity in FLOP/byte of a matrix product: 2 n i o / (bytes (i o + n i + n o)).

    *rows* is the number of tokens in the batch. It tends to rows at 2 bytes per value while rows are few.

    Source: Williams, Waterman, Patterson, CACM 2009; SARATHI, section 3.1.
    """
    n, i, o = (
        count("rows", rows, at_least=1),
        count("fan_in", fan_in, at_least=1),
        count("fan_out", fan_out, at_least=1),
    )
    return plain(2.0 * n * i * o / (positive("value_bytes", value_bytes) * (i * o + n * i + n * o)))


def attention_intensity(
    query_tokens: Values,
    context_tokens: Values,
    query_heads_per_kv_head: Values = 1,
    value_bytes: Values = 2,
) -> Any:
    """Arithmetic intensity in FLOP/byte of attention over a cached context, scores kept on chip.

    One KV head: 4 g n s d operations over reads of K and V (2 s d) and traffic of Q and output (2 g n d), with g query
    heads sharing it, so 2 g n s / (bytes (s + g n)): about 1 for a decode with 2-byte values, whatever the batch.

    Source: counts of Dao et al., FlashAttention, arXiv 2205.14135; SARATHI, section 3.1.
    """
    n, s = count("query_tokens", query_tokens, at_least=1), count("context_tokens", context_tokens, at_least=1)
    g = count("query_heads_per_kv_head", query_heads_per_kv_head, at_least=1)
    return plain(2.0 * g * n * s / (positive("value_bytes", value_bytes) * (s + g * n)))


def ridge_intensity(peak_flops_per_s: Values, bytes_per_s: Values) -> Any:
    """Intensity in FLOP/byte at which compute and memory take equal time.

    Source: Williams, Waterman, Patterson, "Roofline", CACM 2009.
    """
    return plain(positive("peak_flops_per_s", peak_flops_per_s) / positive("bytes_per_s", bytes_per_s))


def ridge_tokens(peak_flops_per_s: Values, bytes_per_s: Values, weight_bytes: Values = 2) -> Any:
    """Tokens per batch at which linear layers turn from memory-bound to compute-bound, weights dominating the reads.

    Each weight of *weight_bytes* does 2 FLOP per token: ridge intensity * bytes / 2.

    Source: roofline ridge applied to a matrix product; Sarathi-Serve, section 3.1.
    """
    return plain(
        np.asarray(ridge_intensity(peak_flops_per_s, bytes_per_s)) * positive("weight_bytes", weight_bytes) / 2
    )
