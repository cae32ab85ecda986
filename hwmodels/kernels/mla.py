"""Multi-head latent attention (DeepSeek V2/V3/R1): one compressed KV vector per token, shared by all query heads.

Prompts attend to keys and values that are expanded from the latent, or, absorbed, to the latent itself, as decodes do
(DeepSeek-V2, arXiv 2405.04434, 2.1). What is read and computed tells the two apart, not the parameters: prompts are the
form of `kernels.attention` with the heads and widths of either way. Each equation stands here once, as a form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hwmodels.kernels import attention
from hwmodels.kernels.attention import PrefillParams
from hwmodels.kernels.ops import ALONE, ARRAYS, DecodeForm, Ops, PrefillForm, Running, none_is_free
from hwmodels.kernels.parameters import Datasheet, parameter

_HEAD_TILE = 64.0  # query rows of one block of the decode kernels (FlashMLA, FlashInfer's)
_CACHE_EDGE = 3.0  # residence in L2 falls from 1 to 0 between two thirds of its capacity and all of it


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaDecodeParams:
    """Latent decode attention of one library on one device (times in seconds)."""

    launch_s: float = parameter(1e-5, 1e-6, 4e-5, "start of the kernel")
    ramp_s: float = parameter(3e-6, 0.0, 4e-5, "filling the device with blocks, at full parallelism")
    ramp_tokens: float = parameter(4000.0, 10.0, 1e6, "KV tokens at which half of the ramp is paid")
    compute_efficiency: float = parameter(0.6, 0.1, 1.0, "share of the dense peak in the two products")
    bandwidth_efficiency: float = parameter(0.88, 0.3, 1.0, "share of the datasheet bandwidth")
    cache_gain: float = parameter(0.5, 0.0, 8.0, "extra bandwidth for what stays in L2")
    block_s: float = parameter(4e-6, 0.0, 4e-5, "one block, of a sequence and 64 query rows, on one SM")
    row_passes: float = parameter(1.0, 0.0, 20.0, "times the query and output rows of all heads cross memory")
    overlap_loss: float = parameter(0.5, 0.0, 4.0, "0: memory and arithmetic overlap fully; 4: they add up")


def prefill_form(
    params: PrefillParams,
    sheet: Datasheet,
    *,
    heads: Any,
    qk_dim: Any,
    v_dim: Any,
    kv_rank: Any,
    rope_dim: Any,
    latent_bytes: float = 2.0,
    expand_flops: Any = 0.0,
    absorbed: bool = False,
    dtype: str = "bf16",
    run: Running = ALONE,
    longest_kv: Any = None,
    resident: bool = False,
) -> PrefillForm:
    """Latent attention of prompts: heads per device, one layer.

    Expanded, every head has keys and values of its own in 16 bits, and `expand_flops` expand a cached token of the past;
    absorbed, all heads share the latent, of `latent_bytes` a number, and meet it in its full width.
    """
    shape: dict[str, Any] = {"heads": heads, "dtype": dtype, "run": run, "longest_kv": longest_kv, "resident": resident}
    if absorbed:
        width = kv_rank + rope_dim
        return attention.prefill_form(
            params, sheet, kv_heads=1.0, head_dim=width, v_dim=kv_rank, token_bytes=width * latent_bytes, **shape
        )
    token_bytes = 2.0 * heads * (qk_dim + v_dim)
    past_s = expand_flops / (sheet.flops_per_s(dtype) * params.compute_efficiency)
    return attention.prefill_form(
        params, sheet, kv_heads=heads, head_dim=qk_dim, v_dim=v_dim, token_bytes=token_bytes, past_s=past_s, **shape
    )


def decode_form(
    params: MlaDecodeParams,
    sheet: Datasheet,
    *,
    heads: Any,
    kv_rank: Any,
    rope_dim: Any,
    latent_bytes: float = 2.0,
    dtype: str = "bf16",
    run: Running = ALONE,
    resident: bool = False,
) -> DecodeForm:
    """Latent attention of decodes: `heads` per device meet the latents of `latent_bytes` a number, absorbed.

    `resident` lets a small cache stay in L2, as in benchmarks that repeat one layer.
    """
    maximum = ARRAYS.maximum if isinstance(heads, np.ndarray) else max
    # Fewer heads than a tile's rows fill it in part: the tensor cores take all of them.
    tiles = maximum(1.0, heads / _HEAD_TILE)
    numbers = 2.0 * kv_rank + rope_dim
    by_pair = 2.0 * numbers * tiles * _HEAD_TILE / (sheet.flops_per_s(dtype) * params.compute_efficiency)
    stream = sheet.hbm_bytes_per_s * params.bandwidth_efficiency
    token_bytes = (kv_rank + rope_dim) * latent_bytes
    by_kv = token_bytes / stream
    by_row = 2.0 * heads * numbers * params.row_passes / stream
    per_seq = tiles / sheet.sm_count
    launch = params.launch_s * run.start_share
    ramp, ramp_tokens, block = params.ramp_s, params.ramp_tokens, params.block_s
    loss, layers, gain = params.overlap_loss, run.layers, params.cache_gain

    def form(ops: Ops, seqs: Any, queries: Any, kv: Any, beyond: Any = None) -> Any:
        compute = kv * (queries / seqs) * by_pair
        blocks = queries * per_seq
        if ops is ARRAYS:
            compute = compute + ops.maximum(0.0, blocks - 1.0) * block
        elif blocks > 1.0:
            compute += (blocks - 1.0) * block
        memory = kv * by_kv
        if resident:
            fits = _CACHE_EDGE * (1.0 - kv * token_bytes * (1.0 / sheet.l2_bytes))
            memory = memory / (1.0 + gain * ops.minimum(1.0, ops.maximum(0.0, fits)))
        memory = memory + queries * by_row
        gap = compute - memory
        both = 0.5 * (compute + memory + ops.sqrt(gap * gap + loss * (compute * memory)))
        return layers * (launch + ramp * (kv / (kv + ramp_tokens)) + both)

    return form


def mla_decode_s(
    params: MlaDecodeParams,
    device: Datasheet,
    *,
    seqs: Any,
    kv_tokens: Any,
    heads: Any,
    kv_rank: int = 512,
    rope_dim: int = 64,
    query_width: Any = 1,
    kv_bytes: float = 2.0,
    resident: bool = False,
    dtype: str = "bf16",
) -> Any:
    """Seconds of absorbed latent attention in decode, one layer, one device; no sequences cost nothing.

    Each cached token is `kv_rank` + `rope_dim` numbers and serves all `heads` of the device: 2 (2 rank + rope) FLOPs
    per head, query and token (DeepSeek-V2, section 2.1). Scalars and arrays give the same bits.
    """
    form = decode_form(
        params,
        device,
        heads=heads,
        kv_rank=kv_rank,
        rope_dim=rope_dim,
        latent_bytes=kv_bytes,
        dtype=dtype,
        resident=resident,
    )
    some = np.where(np.asarray(seqs) > 0, seqs, 1)
    return none_is_free(form(ARRAYS, some, some * query_width, kv_tokens), seqs)


def mla_prefill_s(
    params: PrefillParams,
    device: Datasheet,
    *,
    chunks: Any,
    rows: Any,
    pairs: Any,
    kv_tokens: Any,
    heads: Any,
    qk_dim: int = 192,
    v_dim: int = 128,
    kv_rank: int = 512,
    rope_dim: int = 64,
    absorbed: bool = False,
    kv_bytes: float = 2.0,
    longest_kv: Any = None,
    resident: bool = False,
    dtype: str = "bf16",
) -> Any:
    """Seconds of latent attention in prefill; sums as in attention_prefill_s.

    Expanded: 2 (qk_dim + v_dim) FLOPs per head and causal pair, and 2 rank (nope + v_dim) expand a cached token for a
    head. Absorbed: 2 (2 rank + rope) FLOPs. Scalars and arrays give the same bits.
    """
    form = prefill_form(
        params,
        device,
        heads=heads,
        qk_dim=qk_dim,
        v_dim=v_dim,
        kv_rank=kv_rank,
        rope_dim=rope_dim,
        latent_bytes=kv_bytes,
        expand_flops=2.0 * kv_rank * heads * (qk_dim - rope_dim + v_dim),
        absorbed=absorbed,
        dtype=dtype,
        longest_kv=longest_kv,
        resident=resident,
    )
    return none_is_free(form(ARRAYS, rows, chunks, pairs, kv_tokens), rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaBmmParams:
    """The products beside absorbed attention, a matrix for each head, of one library on one device (times in seconds)."""

    launch_s: float = parameter(4e-6, 5e-7, 4e-5, "start of the kernel, with that of quantisation")
    compute_efficiency: float = parameter(0.7, 0.05, 1.0, "share of the dense peak")
    bandwidth_efficiency: float = parameter(0.85, 0.05, 1.0, "share of the datasheet bandwidth")
    cache_gain: float = parameter(0.5, 0.0, 8.0, "extra bandwidth for what stays in L2")
    overlap_loss: float = parameter(0.5, 0.0, 4.0, "0: memory and arithmetic overlap fully; 4: they add up")
    idle_rows: float = parameter(30.0, 0.0, 256.0, "rows of a tile that tokens leave empty")
    row_passes: float = parameter(1.0, 1.0, 20.0, "times that rows cross memory, quantisation included")


def mla_bmm_s(
    params: MlaBmmParams,
    device: Datasheet,
    *,
    tokens: Any,
    heads: Any,
    n: Any,
    k: Any,
    dtype: str = "bf16",
    weight_bytes: float = 2.0,
) -> Any:
    """Seconds of `heads` products [tokens, k] [k, n] of 16-bit rows; no tokens cost nothing."""
    weights = heads * n * k * weight_bytes
    rows = heads * tokens * (n + k) * (2.0 * params.row_passes)
    compute = (
        2.0 * heads * (tokens + params.idle_rows) * n * k / (device.flops_per_s(dtype) * params.compute_efficiency)
    )
    stream = device.hbm_bytes_per_s * params.bandwidth_efficiency
    fits = np.minimum(1.0, np.maximum(0.0, _CACHE_EDGE * (1.0 - (weights + rows) / device.l2_bytes)))
    memory = (weights + rows) / (stream * (1.0 + params.cache_gain * fits))
    gap = compute - memory
    both = 0.5 * (compute + memory + np.sqrt(gap * gap + params.overlap_loss * (compute * memory)))
    return none_is_free(params.launch_s + both, tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaModuleParams:
    """The attention module of a DeepSeek-V3 layer, from input to output projection, of one stack (times in seconds)."""

    launch_s: float = parameter(5e-5, 1e-6, 3e-4, "the chain of a dozen kernels")
    quantise_s: float = parameter(0.0, -4e-5, 1e-4, "more of it where projections quantise their rows")
    narrow_cache_s: float = parameter(0.0, -4e-5, 1e-4, "more of it where the cache is in 8 bits")
    gemm_efficiency: float = parameter(0.6, 0.05, 1.0, "share of the peak of 16-bit projections")
    narrow_efficiency: float = parameter(0.4, 0.02, 1.0, "share of the peak of narrower ones")
    pair_efficiency: float = parameter(0.5, 0.05, 1.0, "share of the dense peak in attention")
    bandwidth_efficiency: float = parameter(0.8, 0.2, 1.0, "share of the datasheet bandwidth")
    row_passes: float = parameter(
        5.0, 0.0, 100.0, "times that a token's rows of all heads cross memory between kernels"
    )
    overlap_loss: float = parameter(1.0, 0.0, 4.0, "0: memory and arithmetic overlap fully; 4: they add up")
    hidden_work: float = parameter(1.0, 0.0, 4.0, "0: starts hide the kernels fully; 4: starts and kernels add up")


_HIDDEN, _Q_RANK, _RANK, _ROPE, _NOPE, _VALUE = 7168.0, 1536.0, 512.0, 64.0, 128.0, 128.0
"""Widths of DeepSeek-V3, whose modules were measured (its config.json)."""


def mla_module_s(
    params: MlaModuleParams,
    device: Datasheet,
    *,
    chunks: Any,
    rows: Any,
    pairs: Any,
    kv_tokens: Any,
    heads: Any,
    decode: bool,
    weight_bytes: Any = 2.0,
    kv_bytes: Any = 2.0,
) -> Any:
    """Seconds of a DeepSeek-V3 attention module: projections, norms, cache write and attention of one layer.

    Prompts of `rows` tokens in `chunks` sequences over `pairs` expanded query-key pairs; or, absorbed, decodes of `rows`
    tokens over `kv_tokens`. Projections multiply in the format of `weight_bytes` a number where the device has it (columns
    may mix formats); the per-head products keep 16 bits. It is a sum of what the parts read and compute.
    """
    dense = device.flops_per_s("bf16")
    peaks = device.peak_flops_per_s
    rate_8, rate_4 = peaks.get("fp8", dense), peaks.get("fp4", peaks.get("fp8", dense))
    narrow = np.where(np.asarray(weight_bytes) < 0.75, rate_4, rate_8) * params.narrow_efficiency
    rate = np.where(np.asarray(weight_bytes) < 1.5, narrow, dense * params.gemm_efficiency)
    stream = device.hbm_bytes_per_s * params.bandwidth_efficiency
    down_up_out = _HIDDEN * (_Q_RANK + _RANK + _ROPE) + heads * (_Q_RANK * (_NOPE + _ROPE) + _HIDDEN * _VALUE)
    per_head = heads * _RANK * (_NOPE + _VALUE)
    width = _HIDDEN + heads * (_NOPE + _ROPE + _VALUE)
    projections = 2.0 * rows * (down_up_out / rate + per_head / (dense * params.gemm_efficiency))
    if decode:
        tiles = np.maximum(1.0, heads / _HEAD_TILE) * _HEAD_TILE
        attended = 2.0 * kv_tokens * tiles * (2.0 * _RANK + _ROPE) / (dense * params.pair_efficiency)
        cache = kv_tokens * (_RANK + _ROPE) * kv_bytes
    else:
        attended = 2.0 * pairs * heads * (_NOPE + _ROPE + _VALUE) / (dense * params.pair_efficiency)
        cache = 0.0
    weights = down_up_out * weight_bytes + 2.0 * per_head
    moved = rows * width * (2.0 * params.row_passes)
    # Projections, then attention: each overlaps its own memory and arithmetic.
    loss = params.overlap_loss

    def overlapped(x: Any, y: Any) -> Any:
        return 0.5 * (x + y + np.sqrt((x - y) * (x - y) + loss * (x * y)))

    both = overlapped(projections, weights / stream) + overlapped(attended, cache / stream) + moved / stream
    launch = params.launch_s + np.where(np.asarray(weight_bytes) < 1.5, params.quantise_s, 0.0)
    launch = np.maximum(1e-6, launch + np.where(np.asarray(kv_bytes) < 1.5, params.narrow_cache_s, 0.0))
    gap = both - launch
    whole = 0.5 * (both + launch + np.sqrt(gap * gap + params.hidden_work * (both * launch)))
    return none_is_free(whole, chunks)
