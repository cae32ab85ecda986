"""Attention over a KV cache: prompt chunks, decode steps and both in one batch, from sums over the batch.

Arguments are sums, so that the engine can price an iteration without walking its sequences, and arithmetic is limited
to + - * /, square roots, minima and maxima: scalars and arrays give the same bits. Without `longest_kv` results do not
fall when a sum grows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hwmodels.kernels.parameters import Datasheet, parameter, smooth_max

_TILE = 128.0  # query rows of one thread block in FlashAttention's forward kernels
_CACHE_EDGE = 3.0  # residence in L2 falls from 1 to 0 between two thirds of its capacity and all of it
_SPLIT_FROM = 128.0  # cached tokens from which a decode splits the context over blocks and combines
# A verify step of w query tokens re-uses each cached key w times; FlashAttention's decode tiles reach about half of the
# tensor-core peak there (Dao et al., Flash-Decoding). No measurement at w > 1 backs a finer number.
_VERIFY_EFFICIENCY = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillParams:
    """Prompt attention of one library on one device (times in seconds)."""

    launch_s: float = parameter(1e-5, 1e-6, 4e-5, "kernel start and scheduling metadata")
    compute_efficiency: float = parameter(0.75, 0.2, 1.0, "share of the dense peak in the two products")
    softmax_flops: float = parameter(60.0, 0.0, 1000.0, "exponential and rescaling per query-key pair, as FLOPs")
    bandwidth_efficiency: float = parameter(0.8, 0.3, 1.0, "share of the datasheet bandwidth")
    cache_gain: float = parameter(0.5, 0.0, 8.0, "extra bandwidth for what stays in L2")
    block_s: float = parameter(1.5e-6, 0.0, 2e-5, "start and write-out of one thread block on one SM")
    padding: float = parameter(0.5, 0.0, 4.0, "share of half-empty query tiles, against their keys")
    unpacked: float = parameter(0.3, 0.0, 1.0, "0: query heads of a group share a tile; 1: a tile per query head")
    tail: float = parameter(0.5, 0.0, 2.0, "weight of the longest block, which runs alone at the end")
    tail_overlap_loss: float = parameter(1.0, 0.0, 4.0, "0: the longest block hides behind the others; 4: it adds up")
    overlap_loss: float = parameter(2.0, 0.0, 4.0, "0: memory and arithmetic overlap fully; 4: they add up")
    throttle: float = parameter(0.1, 0.0, 0.45, "share of the clock lost to the power limit in long kernels")
    throttle_after_s: float = parameter(1e-3, 2e-5, 2e-2, "kernel length at which half of that loss applies")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeParams:
    """Decode attention of one library on one device (times in seconds)."""

    launch_s: float = parameter(1e-5, 1e-6, 4e-5, "kernel start and scheduling metadata")
    combine_s: float = parameter(1e-6, 0.0, 2e-5, "the second kernel that merges a split context")
    regroup_s: float = parameter(2e-6, 0.0, 2e-5, "copies that bring grouped queries of a batch into kernel order")
    ramp_s: float = parameter(3e-6, 0.0, 2e-5, "filling the device with blocks, at full parallelism")
    ramp_tokens: float = parameter(2000.0, 1.0, 1e5, "KV tokens times heads at which half of the ramp is paid")
    bandwidth_efficiency: float = parameter(0.88, 0.3, 1.0, "share of the datasheet bandwidth")
    cache_gain: float = parameter(0.5, 0.0, 8.0, "extra bandwidth for what stays in L2")
    block_s: float = parameter(3e-6, 0.0, 2e-5, "one (sequence, KV head) block on one SM")
    block_group_s: float = parameter(5e-7, 0.0, 2e-5, "more of that in the kernel for grouped queries")
    block_rows_s: float = parameter(1e-6, 0.0, 2e-5, "more of that for each 64 query rows of a block")
    block_head_dim: float = parameter(0.5, 0.0, 2.0, "growth of a block's cost per 128 of head dimension")
    single_blocks: float = parameter(8.0, 0.2, 256.0, "SM shares of bandwidth one ungrouped (sequence, head) can draw")
    group_blocks: float = parameter(32.0, 0.2, 256.0, "SM shares of bandwidth one grouped (sequence, KV head) can draw")
    overlap_loss: float = parameter(0.5, 0.0, 4.0, "0: memory and blocks overlap fully; 4: they add up")


def attention_prefill_s(
    params: PrefillParams,
    device: Datasheet,
    *,
    chunks: Any,
    rows: Any,
    pairs: Any,
    kv_tokens: Any,
    heads: Any,
    kv_heads: Any,
    head_dim: Any,
    kv_bytes: float = 2.0,
    longest_kv: Any = None,
    resident: bool = False,
    dtype: str = "bf16",
) -> Any:
    """Seconds of causal attention of prompt chunks in one layer on one device; no chunks cost nothing.

    `chunks` sequences bring `rows` query tokens in all, attending to `kv_tokens` = sum of past + new tokens over
    `pairs` = sum of q * past + q (q + 1) / 2 query-key pairs (a sliding window caps pairs). Heads are per device.
    `longest_kv`, the longest context of a chunk, adds the block that finishes last; without it the blocks are taken to
    balance. `resident` lets a small cache stay in L2, as in benchmarks that repeat one layer.
    """
    per_pair_s = (4.0 * head_dim + params.softmax_flops) / (device.flops_per_s(dtype) * params.compute_efficiency)
    tile_heads = kv_heads + params.unpacked * (heads - kv_heads)
    padded = heads * (pairs + 0.5 * _TILE * rows) + (0.5 * _TILE * params.padding) * kv_tokens * tile_heads
    compute_s = padded * per_pair_s
    compute_s = compute_s / (1.0 - params.throttle * compute_s / (compute_s + params.throttle_after_s))
    if longest_kv is not None:
        last_s = (params.tail * _TILE * device.sm_count) * longest_kv * per_pair_s
        compute_s = smooth_max(compute_s, last_s, params.tail_overlap_loss)
    blocks_per_sm = (heads * rows * (1.0 / _TILE) + chunks * tile_heads) * (1.0 / device.sm_count)
    start_s = np.maximum(0.0, blocks_per_sm - 1.0) * params.block_s
    traffic = 4.0 * head_dim * rows * heads + 2.0 * kv_bytes * head_dim * kv_tokens * kv_heads
    memory_s = traffic / (
        device.hbm_bytes_per_s * params.bandwidth_efficiency * _cache(params, device, traffic, resident)
    )
    seconds = params.launch_s + smooth_max(compute_s + start_s, memory_s, params.overlap_loss)
    return _none_is_free(seconds, rows)


def attention_decode_s(
    params: DecodeParams,
    device: Datasheet,
    *,
    seqs: Any,
    kv_tokens: Any,
    heads: Any,
    kv_heads: Any,
    head_dim: Any,
    query_width: Any = 1,
    kv_bytes: float = 2.0,
    longest_kv: Any = None,
    resident: bool = False,
    widest_group: float = np.inf,
    dtype: str = "bf16",
) -> Any:
    """Seconds of decode attention in one layer on one device; no sequences cost nothing.

    `seqs` sequences with `query_width` query tokens each (1, or K + 1 to verify K drafts) read `kv_tokens` cached
    tokens in all (context plus query; a sliding window caps them). Heads are per device. `longest_kv`, the longest one,
    bounds the time by what one sequence's blocks can draw; without it contexts are taken to balance and to exceed one
    split. Groups of query heads wider than `widest_group` fall back to a block per query head (TensorRT-LLM: 32).
    `resident` lets a small cache stay in L2, as in benchmarks that repeat one layer.
    """
    group = heads / kv_heads
    packed = np.where(group > widest_group, 0.0, 1.0)
    grouped = packed * np.where(group > 1.0, 1.0, 0.0)
    readers = packed * kv_heads + (1.0 - packed) * heads
    footprint = 2.0 * kv_bytes * head_dim * kv_tokens * kv_heads
    stream = device.hbm_bytes_per_s * params.bandwidth_efficiency * _cache(params, device, footprint, resident)
    memory_s = 2.0 * kv_bytes * head_dim * kv_tokens * readers / stream
    flops = 4.0 * head_dim * kv_tokens * heads * query_width
    memory_s = np.maximum(memory_s, flops / (device.flops_per_s(dtype) * _VERIFY_EFFICIENCY))
    split = 1.0
    if longest_kv is not None:
        alone = params.single_blocks + grouped * (params.group_blocks - params.single_blocks)
        one_s = longest_kv * head_dim * (2.0 * kv_bytes * device.sm_count / device.hbm_bytes_per_s) / alone
        memory_s = np.maximum(memory_s, one_s)
        split = np.where(longest_kv > _SPLIT_FROM, 1.0, 0.0)
    rows = (packed * group + (1.0 - packed)) * query_width
    block_s = params.block_s + grouped * params.block_group_s
    block_s = block_s + params.block_rows_s * (1.0 / 64.0) * (rows - 1.0)
    block_s = block_s * (1.0 + params.block_head_dim * np.maximum(-0.5, head_dim * (1.0 / 128.0) - 1.0))
    blocks_per_sm = seqs * readers * (1.0 / device.sm_count)
    blocks_s = np.maximum(0.0, blocks_per_sm - 1.0) * block_s
    work = kv_tokens * readers
    fixed_s = params.launch_s + params.ramp_s * work / (work + params.ramp_tokens) + params.combine_s * split
    several = np.where(seqs > 1, 1.0, 0.0) * np.where(kv_heads > 1, 1.0, 0.0)
    fixed_s = fixed_s + params.regroup_s * grouped * several
    return _none_is_free(fixed_s + smooth_max(memory_s, blocks_s, params.overlap_loss), seqs)


def attention_mixed_s(
    params: PrefillParams,
    device: Datasheet,
    *,
    chunks: Any,
    rows: Any,
    pairs: Any,
    kv_tokens: Any,
    seqs: Any,
    decode_kv_tokens: Any,
    heads: Any,
    kv_heads: Any,
    head_dim: Any,
    query_width: Any = 1,
    kv_bytes: float = 2.0,
    longest_kv: Any = None,
    resident: bool = False,
    dtype: str = "bf16",
) -> Any:
    """Seconds of one variable-length kernel over prompt chunks and decodes together (FlashAttention in vLLM).

    There a decode is a chunk of `query_width` rows that wastes most of its tile, which is why a few decodes with long
    contexts cost as much as prompt work; arguments as in the two functions above.
    """
    return attention_prefill_s(
        params,
        device,
        chunks=chunks + seqs,
        rows=rows + seqs * query_width,
        pairs=pairs + decode_kv_tokens * query_width,
        kv_tokens=kv_tokens + decode_kv_tokens,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        kv_bytes=kv_bytes,
        longest_kv=longest_kv,
        resident=resident,
        dtype=dtype,
    )


def _cache(params: PrefillParams | DecodeParams, device: Datasheet, footprint_bytes: Any, resident: bool) -> Any:
    if not resident:
        return 1.0
    share = np.minimum(1.0, np.maximum(0.0, _CACHE_EDGE * (1.0 - footprint_bytes * (1.0 / device.l2_bytes))))
    return 1.0 + params.cache_gain * share


def _none_is_free(seconds: Any, count: Any) -> Any:
    seconds = np.where(np.asarray(count) > 0, seconds, 0.0)
    return float(seconds) if seconds.ndim == 0 else seconds
