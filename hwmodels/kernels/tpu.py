"""TPU kernels: systolic matrix multiplication and the serial paged attention of the JAX serving stack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

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
    row_step: float = parameter(8.0, 1.0, 256.0, "rows come in steps of this many (sublanes)")


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


_REFERENCE_WIDTH = 32.0 * 128.0  # query heads x head dimension of the measured model


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
    """Seconds of C[m, n] = A[m, k] B[k, n] on one chip; shapes broadcast, zero rows cost nothing."""
    m, n, k = (np.asarray(a, float) for a in (m, n, k))
    rows = np.ceil(m / params.row_step) * params.row_step + params.fill_m
    flops = 2.0 * rows * (n + params.fill_n) * (k + params.fill_k)
    compute_s = flops / (device.flops_per_s(dtype) * params.compute_efficiency)
    traffic = n * k * weight_bytes + 2.0 * (m * k + m * n)
    memory_s = traffic / (device.hbm_bytes_per_s * params.bandwidth_efficiency)
    seconds = np.where(m > 0, params.launch_s + smooth_max(compute_s, memory_s, params.overlap_loss), 0.0)
    return float(seconds) if seconds.ndim == 0 else seconds


def tpu_decode_s(
    params: TpuAttentionParams, *, seqs: Any, kv_tokens: Any, kv_heads: Any = 8, head_dim: Any = 128
) -> Any:
    """Seconds of decode attention over `seqs` sequences with `kv_tokens` cached tokens in all, one layer, one chip.

    The per-token cost scales with KV heads x head dimension from the measured 8 x 128.
    """
    width = kv_heads * head_dim * (1.0 / 1024.0)
    seconds = params.decode_launch_s + seqs * params.decode_seq_s + kv_tokens * (params.decode_token_s * width)
    seconds = np.where(np.asarray(seqs) > 0, seconds, 0.0)
    return float(seconds) if seconds.ndim == 0 else seconds


def tpu_prefill_s(
    params: TpuAttentionParams, *, rows: Any, pairs: Any, kv_tokens: Any, heads: Any = 32, head_dim: Any = 128
) -> Any:
    """Seconds of prompt attention; sums as in attention_prefill_s, scaled by query heads x head dimension."""
    scale = heads * head_dim * (1.0 / _REFERENCE_WIDTH)
    streaming = (rows * params.prefill_row_s + kv_tokens * params.prefill_token_s) * scale
    seconds = params.prefill_launch_s + smooth_max(
        pairs * (params.prefill_pair_s * scale), streaming, params.overlap_loss
    )
    seconds = np.where(np.asarray(rows) > 0, seconds, 0.0)
    return float(seconds) if seconds.ndim == 0 else seconds
