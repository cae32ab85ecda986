"""Multi-head latent attention (DeepSeek V2/V3/R1): one compressed KV vector per token, shared by all query heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hwmodels.kernels.parameters import Datasheet, parameter, smooth_max

_TILE = 128.0  # query rows of one thread block


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaParams:
    """Latent attention of one library on one device, for one phase (times in seconds)."""

    launch_s: float = parameter(1.5e-4, 2e-6, 4e-4, "start of the chain of kernels; eager Python costs 100 us and more")
    compute_efficiency: float = parameter(0.7, 0.1, 1.0, "share of the dense peak")
    bandwidth_efficiency: float = parameter(0.85, 0.3, 1.0, "share of the datasheet bandwidth")
    row_passes: float = parameter(2.0, 0.0, 20.0, "times the query and output rows of all heads cross memory")
    overlap_loss: float = parameter(1.0, 0.0, 4.0, "0: memory and arithmetic overlap fully; 4: they add up")
    hidden_work: float = parameter(1.0, 0.0, 4.0, "0: the start hides the kernels fully; 4: start and kernels add up")


def mla_decode_s(
    params: MlaParams,
    device: Datasheet,
    *,
    seqs: Any,
    kv_tokens: Any,
    heads: Any,
    kv_rank: int = 512,
    rope_dim: int = 64,
    query_width: Any = 1,
    kv_bytes: float = 2.0,
    dtype: str = "bf16",
) -> Any:
    """Seconds of absorbed latent attention in decode, one layer, one device; no sequences cost nothing.

    Each cached token is `kv_rank` + `rope_dim` numbers and serves all `heads` of the device: 2 (2 rank + rope) FLOPs
    per head, query and token (DeepSeek-V2, section 2.1). Scalars and arrays give the same bits.
    """
    bytes_ = kv_tokens * ((kv_rank + rope_dim) * kv_bytes)
    flops = kv_tokens * query_width * (2.0 * heads * (2 * kv_rank + rope_dim))
    rows_bytes = seqs * query_width * (2.0 * heads * (2 * kv_rank + rope_dim)) * params.row_passes
    return _chain(params, device, bytes_, rows_bytes, flops, seqs, dtype)


def mla_prefill_s(
    params: MlaParams,
    device: Datasheet,
    *,
    chunks: Any,
    rows: Any,
    pairs: Any,
    kv_tokens: Any,
    heads: Any,
    qk_dim: int = 192,
    v_dim: int = 128,
    dtype: str = "bf16",
) -> Any:
    """Seconds of latent attention over expanded keys and values in prefill; sums as in attention_prefill_s.

    2 (qk_dim + v_dim) FLOPs per head and causal pair; queries, keys, values and outputs of every head cross memory.
    Scalars and arrays give the same bits.
    """
    padded = pairs + 0.5 * _TILE * rows
    flops = padded * (2.0 * heads * (qk_dim + v_dim))
    rows_bytes = (rows + kv_tokens) * (2.0 * heads * (qk_dim + v_dim)) * params.row_passes
    return _chain(params, device, 0.0 * chunks, rows_bytes, flops, rows, dtype)


def _chain(params: MlaParams, device: Datasheet, kv: Any, rows: Any, flops: Any, count: Any, dtype: str) -> Any:
    memory_s = (kv + rows) / (device.hbm_bytes_per_s * params.bandwidth_efficiency)
    compute_s = flops / (device.flops_per_s(dtype) * params.compute_efficiency)
    seconds = smooth_max(params.launch_s, smooth_max(memory_s, compute_s, params.overlap_loss), params.hidden_work)
    seconds = np.where(np.asarray(count) > 0, seconds, 0.0)
    return float(seconds) if seconds.ndim == 0 else seconds
