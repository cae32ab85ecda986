"""TPU kernels: systolic matrix multiplication and the serial paged attention of the JAX serving stack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hwmodels.kernels.ops import ARRAYS, DecodeForm, Ops, PrefillForm, none_is_free
from hwmodels.kernels.parameters import Datasheet, parameter, smooth_max


@dataclass(frozen=True, slots=True, kw_only=True)
class TpuGemmParams:
    """Matrix multiplication on a systolic array (times in seconds)."""

    launch_s: float = parameter(2.5e-6, 1e-7, 2e-5, "start of one fused operation")
    compute_efficiency: float = parameter(0.9, 0.3, 1.0, "share of the dense peak")
    bandwidth_efficiency: float = parameter(0.93, 0.4, 1.0, "share of the datasheet bandwidth")
    fill_m: float = parameter(16.0, 0.0, 512.0, "rows lost to filling the array")
    fill_n: float = parameter(16.0, 0.0, 2048.0, "columns lost to filling the array")
    fill_k: float = parameter(16.0, 0.0, 2048.0, "inner elements lost to filling the array")
    overlap_loss: float = parameter(0.2, 0.0, 4.0, "0: memory and arithmetic overlap fully; 4: they add up")
    row_step: float = parameter(
        8.0, 1.0, 4096.0, "rows come in steps of this many (sublanes, or what a library pads to)"
    )
    column_step: float = parameter(1.0, 1.0, 4096.0, "columns do", optional=True)
    depth_step: float = parameter(1.0, 1.0, 4096.0, "inner elements do", optional=True)
    spill: float = parameter(
        0.0,
        0.0,
        2.0,
        "added share of the arithmetic where activations have outgrown the memory on the chip",
        optional=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TpuAttentionParams:
    """Paged attention that walks sequences one after the other (times in seconds, for 32 query and 8 KV heads)."""

    decode_launch_s: float = parameter(4e-6, 1e-7, 5e-5, "start of the decode kernel")
    decode_seq_s: float = parameter(2.3e-6, 0.0, 2e-5, "one sequence: page table and block set-up")
    decode_token_s: float = parameter(8.6e-9, 1e-10, 1e-7, "one cached token")
    prefill_launch_s: float = parameter(5e-6, 1e-7, 5e-5, "start of the prompt kernel")
    prefill_row_s: float = parameter(1e-8, 0.0, 1e-6, "one prompt token")
    prefill_pair_s: float = parameter(1e-10, 1e-13, 1e-8, "one causal query-key pair")
    prefill_token_s: float = parameter(1e-9, 0.0, 1e-7, "one key a chunk attends to")
    overlap_loss: float = parameter(4.0, 0.0, 4.0, "0: pairs and streaming overlap fully; 4: they add up")


_SPILLED_BYTES = float(2**28)
"""Activations for which `spill` counts whole: about those of the largest product that was measured."""
_REFERENCE_WIDTH = 32.0 * 128.0  # query heads x head dimension of the measured model
_REFERENCE_BYTES = 4096.0  # of a cached token there: keys and values of 2 bytes, 8 heads x 128


def tpu_gemm_s(
    params: TpuGemmParams,
    device: Datasheet,
    m: Any,
    n: Any,
    k: Any,
    *,
    dtype: str = "bf16",
    weight_bytes: float = 2.0,
) -> Any:
    """Seconds of C[m, n] = A[m, k] B[k, n] on one chip; shapes broadcast, zero rows cost nothing.

    The cores of a chip take equal parts of the columns, each at its share of the chip's arithmetic and bandwidth.
    """
    m, n, k = (np.asarray(a, float) for a in (m, n, k))
    cores = float(device.sm_count)
    n = n / cores
    rows = np.ceil(m / params.row_step) * params.row_step
    columns = np.ceil(n / params.column_step) * params.column_step if params.column_step > 1.0 else n
    depth = np.ceil(k / params.depth_step) * params.depth_step if params.depth_step > 1.0 else k
    flops = 2.0 * (rows + params.fill_m) * (columns + params.fill_n) * (depth + params.fill_k)
    compute_s = flops * cores / (device.flops_per_s(dtype) * params.compute_efficiency)
    compute_s = compute_s * (1.0 + params.spill * np.minimum(1.0, m * k * (2.0 / _SPILLED_BYTES)))
    traffic = n * k * weight_bytes + 2.0 * (m * k + m * n)
    memory_s = traffic * cores / (device.hbm_bytes_per_s * params.bandwidth_efficiency)
    return none_is_free(params.launch_s + smooth_max(compute_s, memory_s, params.overlap_loss), m)


def prefill_form(params: TpuAttentionParams, *, width: Any, layers: float = 1.0) -> PrefillForm:
    """Prompt attention; `width` is that of all query heads."""
    scale = width / _REFERENCE_WIDTH
    by_pair, by_row = params.prefill_pair_s * scale, params.prefill_row_s * scale
    by_kv, launch, loss = params.prefill_token_s * scale, params.prefill_launch_s, params.overlap_loss

    def form(ops: Ops, rows: Any, chunks: Any, pairs: Any, kv: Any, outside: Any = None) -> Any:
        x, y = pairs * by_pair, rows * by_row + kv * by_kv
        gap = x - y
        return layers * (launch + 0.5 * (x + y + ops.sqrt(gap * gap + loss * (x * y))))

    return form


def decode_form(params: TpuAttentionParams, *, token_bytes: Any, layers: float = 1.0) -> DecodeForm:
    """Decode attention: its kernel walks the cache, so that its cost follows the cached bytes."""
    by_kv = params.decode_token_s * token_bytes / _REFERENCE_BYTES
    by_seq, launch = params.decode_seq_s, params.decode_launch_s

    def form(ops: Ops, seqs: Any, queries: Any, kv: Any, beyond: Any = None) -> Any:
        return layers * (launch + queries * by_seq + kv * (queries / seqs) * by_kv)

    return form


def tpu_decode_s(
    params: TpuAttentionParams, *, seqs: Any, kv_tokens: Any, kv_heads: Any = 8, head_dim: Any = 128
) -> Any:
    """Seconds of decode attention over `seqs` sequences with `kv_tokens` cached tokens in all, one layer, one chip."""
    form = decode_form(params, token_bytes=4.0 * kv_heads * head_dim)
    some = np.where(np.asarray(seqs) > 0, seqs, 1)
    return none_is_free(form(ARRAYS, some, some, kv_tokens), seqs)


def tpu_prefill_s(
    params: TpuAttentionParams, *, rows: Any, pairs: Any, kv_tokens: Any, heads: Any = 32, head_dim: Any = 128
) -> Any:
    """Seconds of prompt attention; sums as in attention_prefill_s."""
    form = prefill_form(params, width=heads * head_dim)
    return none_is_free(form(ARRAYS, rows, 1, pairs, kv_tokens), rows)
