"""CPU kernels: BLAS matrix multiplication, attention over a KV cache, and the host's own time, of one thread count.

Peaks and bandwidth are those that calibration measured on the machine, since no datasheet knows its share of a host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hwmodels.kernels.ops import ARRAYS, Ops, PrefillForm, none_is_free
from hwmodels.kernels.parameters import Datasheet, parameter, smooth_max


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuGemmParams:
    """Matrix multiplication by a BLAS on a CPU (times in seconds)."""

    launch_s: float = parameter(5e-6, 1e-7, 2e-4, "call, dispatch and waking the threads")
    compute_efficiency: float = parameter(0.9, 0.2, 1.2, "share of the measured peak in large products")
    bandwidth_efficiency: float = parameter(0.6, 0.02, 1.5, "share of the measured bandwidth while weights are packed")
    vector_efficiency: float = parameter(0.8, 0.02, 1.5, "the same for one row, which needs no packing")
    vector_repeat: float = parameter(0.8, 0.0, 1.0, "share of a stream that each further row takes, row by row")
    activation_efficiency: float = parameter(0.5, 0.02, 2.0, "share of the bandwidth for activations in and out")
    extra_rows: float = parameter(1.0, 0.0, 32.0, "rows' worth of arithmetic lost before the first: short vectors")
    fill_n: float = parameter(8.0, 0.0, 512.0, "columns lost at the edges of register tiles")
    column_start: float = parameter(64.0, 0.0, 1024.0, "numbers' worth of packing lost at the start of each column")
    fill_k: float = parameter(16.0, 0.0, 512.0, "inner elements lost to starting and ending a tile")
    overlap_loss: float = parameter(3.0, 0.0, 4.0, "0: packing and arithmetic overlap fully; 4: they add up")


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuAttentionParams:
    """Attention of prompts, or of decodes, on a CPU (times in seconds)."""

    launch_s: float = parameter(1e-5, 1e-7, 5e-4, "call, dispatch and waking the threads")
    compute_efficiency: float = parameter(0.4, 0.01, 1.2, "share of the measured peak in the two products")
    bandwidth_efficiency: float = parameter(0.5, 0.01, 2.0, "share of the measured bandwidth for the cache")
    softmax_flops: float = parameter(30.0, 0.0, 2000.0, "exponential, mask and rescaling per query-key pair, as FLOPs")
    block_s: float = parameter(5e-7, 0.0, 5e-5, "one (sequence, query head): loop set-up")
    row_s: float = parameter(2e-8, 0.0, 2e-6, "one query row of one head")
    masked_share: float = parameter(
        0.3, 0.0, 1.0, "share of the pairs above the diagonal that is computed all the same"
    )
    overlap_loss: float = parameter(2.0, 0.0, 4.0, "0: memory and arithmetic overlap fully; 4: they add up")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostParams:
    """The costs of a step beside its kernels (times in seconds)."""

    step_s: float = parameter(1e-4, 0.0, 5e-2, "start and end of a step: inputs, masks, positions")
    layer_s: float = parameter(5e-5, 0.0, 5e-3, "interpreter and dispatch of a layer's operations")


def cpu_gemm_s(
    params: CpuGemmParams, device: Datasheet, m: Any, n: Any, k: Any, *, dtype: str = "fp32", number_bytes: float = 4.0
) -> Any:
    """Seconds of C[m, n] = A[m, k] B[k, n] with weights from memory; shapes broadcast, zero rows cost nothing.

    The faster of two ways: row by row, each streaming the weights that the last one may have left in the cache, or
    packed. Both grow with the rows, and so does the faster one.
    """
    m, n, k = np.broadcast_arrays(np.asarray(m, float), np.asarray(n, float), np.asarray(k, float))
    rate = device.flops_per_s(dtype) * params.compute_efficiency
    compute_s = 2.0 * (m + params.extra_rows) * (n + params.fill_n) * (k + params.fill_k) / rate
    stream = device.hbm_bytes_per_s
    packing_s = n * (k + params.column_start) * number_bytes / (stream * params.bandwidth_efficiency)
    activations_s = m * (n + k) * number_bytes / (stream * params.activation_efficiency)
    packed_s = smooth_max(compute_s, packing_s, params.overlap_loss) + activations_s
    vector_s = n * k * number_bytes / (stream * params.vector_efficiency)
    row_by_row_s = vector_s * (1.0 + params.vector_repeat * (m - 1.0))
    return none_is_free(params.launch_s + np.minimum(packed_s, row_by_row_s), m)


def attention_form(
    params: CpuAttentionParams,
    sheet: Datasheet,
    *,
    heads: Any,
    head_dim: Any,
    token_bytes: Any,
    dtype: str = "fp32",
    layers: int = 1,
) -> PrefillForm:
    """Causal attention: heads of the model, `token_bytes` cached for a token in one layer."""
    pair_s = (4.0 * head_dim + params.softmax_flops) / (sheet.flops_per_s(dtype) * params.compute_efficiency)
    pair_s = layers * heads * pair_s
    kv_s = layers * token_bytes / (sheet.hbm_bytes_per_s * params.bandwidth_efficiency)
    launch_s, block_s = layers * params.launch_s, layers * heads * params.block_s
    # Half of the new square lies above the diagonal; (rows per sequence)^2 / 2 pairs of it for each sequence.
    row_s, above, loss = layers * heads * params.row_s, 0.5 * params.masked_share, params.overlap_loss

    def form(ops: Ops, rows: Any, sequences: Any, pairs: Any, kv: Any, outside: Any = None) -> Any:
        compute_s = (pairs + above * rows * ops.maximum(0.0, rows / sequences - 1.0)) * pair_s
        memory_s = kv * kv_s
        gap = compute_s - memory_s
        overlapped = 0.5 * (compute_s + memory_s + ops.sqrt(gap * gap + loss * (compute_s * memory_s)))
        return launch_s + sequences * block_s + rows * row_s + overlapped

    return form


def cpu_attention_s(
    params: CpuAttentionParams,
    device: Datasheet,
    *,
    sequences: Any,
    rows: Any,
    pairs: Any,
    kv_tokens: Any,
    heads: Any,
    kv_heads: Any,
    head_dim: Any,
    dtype: str = "fp32",
    kv_bytes: float = 4.0,
) -> Any:
    """Seconds of causal attention of one layer from sums over the batch; no rows cost nothing.

    `sequences` bring `rows` query tokens that see `pairs` keys in all, and read `kv_tokens` cached tokens. Arithmetic
    is + - * /, minima and square roots: scalars and arrays give the same bits, and no result falls as a sum grows.
    """
    form = attention_form(
        params, device, heads=heads, head_dim=head_dim, token_bytes=2.0 * kv_bytes * head_dim * kv_heads, dtype=dtype
    )
    some = np.where(np.asarray(sequences) > 0, sequences, 1)
    return none_is_free(form(ARRAYS, rows, some, pairs, kv_tokens), rows)


def host_s(params: HostParams, layers: Any) -> Any:
    """Seconds of a step's host work through a model of *layers* layers."""
    return params.step_s + layers * params.layer_s
