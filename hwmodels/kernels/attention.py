"""Attention over a KV cache: prompt chunks, decode steps and both in one batch, from sums over the batch.

Each equation stands here once, as a form: shapes, parameters and datasheet folded into a function of an iteration's sums.
The engine prices iterations with it, without walking their sequences; fits and validation call it through the `*_s`
functions below. Its arithmetic is limited to + - * /, square roots, minima and maxima: scalars and arrays give the same
bits. Forms write `smooth_max` out, since they are priced once an iteration and a call takes 60 ns of some 1,800. Without
`longest_kv` results do not fall when a sum grows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hwmodels.kernels.ops import ALONE, ARRAYS, SCALARS, DecodeForm, Ops, PrefillForm, Running, none_is_free
from hwmodels.kernels.parameters import Datasheet, parameter, smooth_max
from hwmodels.kernels.single import SINGLE, DecodeTimes, PromptTimes
from hwmodels.stacks import kernels_of

_TILE = 128.0  # query rows of one thread block in FlashAttention's forward kernels
_CACHE_EDGE = 3.0  # residence in L2 falls from 1 to 0 between two thirds of its capacity and all of it
_TURNS = 512.0  # sequences up to which vLLM's fallback for heads above 256 takes them in turn
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
    cache_reach: float = parameter(1.0, 0.6, 2.0, "L2 capacities at which nothing stays there", optional=True)
    kv_passes: float = parameter(
        0.0, 0.0, 40.0, "times keys and values cross memory in 16 bits beforehand", optional=True
    )
    window_tiles: float = parameter(0.0, 0.0, 4.0, "tiles of keys that a window cuts, for each query", optional=True)
    window_waste: float = parameter(0.0, 0.0, 1.0, "share of the pairs outside a window computed anyway", optional=True)
    start_192_s: float = parameter(
        0.0, -1e-5, 4e-5, "more of the start in the kernel for 192 wide heads", optional=True
    )
    speed_192: float = parameter(1.0, 0.02, 3.0, "its arithmetic against that of heads up to 128", optional=True)
    block_192: float = parameter(1.0, 0.0, 20.0, "its blocks against those of heads up to 128", optional=True)
    start_256_s: float = parameter(0.0, -1e-5, 4e-5, "the same for 256 wide heads", optional=True)
    speed_256: float = parameter(1.0, 0.02, 3.0, "the same for 256 wide heads", optional=True)
    block_256: float = parameter(1.0, 0.0, 20.0, "the same for 256 wide heads", optional=True)
    start_512_s: float = parameter(0.0, -1e-5, 4e-5, "the same for wider heads, often a fallback", optional=True)
    speed_512: float = parameter(1.0, 0.004, 3.0, "the same for wider heads", optional=True)
    block_512: float = parameter(1.0, 0.0, 100.0, "the same for wider heads", optional=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeParams:
    """Decode attention of one library on one device (times in seconds)."""

    launch_s: float = parameter(1e-5, 1e-6, 4e-5, "kernel start and scheduling metadata")
    combine_s: float = parameter(1e-6, 0.0, 2e-5, "the second kernel that merges a split context")
    regroup_s: float = parameter(2e-6, 0.0, 2e-5, "copies that bring grouped queries of a batch into kernel order")
    ramp_s: float = parameter(3e-6, 0.0, 1e-4, "filling the device with blocks, at full parallelism")
    ramp_tokens: float = parameter(2000.0, 1.0, 3e6, "KV tokens times heads at which half of the ramp is paid")
    bandwidth_efficiency: float = parameter(0.88, 0.3, 1.0, "share of the datasheet bandwidth")
    cache_gain: float = parameter(0.5, 0.0, 8.0, "extra bandwidth for what stays in L2")
    block_s: float = parameter(3e-6, 0.0, 2e-5, "one (sequence, KV head) block on one SM")
    block_group_s: float = parameter(5e-7, 0.0, 2e-5, "more of that in the kernel for grouped queries")
    block_rows_s: float = parameter(1e-6, 0.0, 2e-5, "more of that for each 64 query rows of a block")
    block_head_dim: float = parameter(0.5, 0.0, 2.0, "growth of a block's cost per 128 of head dimension")
    single_blocks: float = parameter(8.0, 0.2, 256.0, "SM shares of bandwidth one ungrouped (sequence, head) can draw")
    group_blocks: float = parameter(32.0, 0.2, 256.0, "SM shares of bandwidth one grouped (sequence, KV head) can draw")
    overlap_loss: float = parameter(0.5, 0.0, 4.0, "0: memory and blocks overlap fully; 4: they add up")
    cache_reach: float = parameter(1.0, 0.6, 2.0, "L2 capacities at which nothing stays there", optional=True)
    window_tokens_more: float = parameter(0.0, 0.0, 512.0, "keys read before a window begins: tiles", optional=True)
    beyond_ramp: float = parameter(0.0, 0.0, 1.0, "0: splits follow the window; 1: the whole context", optional=True)
    start_192_s: float = parameter(
        0.0, -1e-5, 4e-5, "more of the start in the kernel for 192 wide heads", optional=True
    )
    speed_192: float = parameter(1.0, 0.02, 3.0, "its stream of keys against that of heads up to 128", optional=True)
    block_192: float = parameter(1.0, 0.0, 20.0, "its blocks against those of heads up to 128", optional=True)
    start_256_s: float = parameter(0.0, -1e-5, 4e-5, "the same for 256 wide heads", optional=True)
    speed_256: float = parameter(1.0, 0.02, 3.0, "the same for 256 wide heads", optional=True)
    block_256: float = parameter(1.0, 0.0, 20.0, "the same for 256 wide heads", optional=True)
    start_512_s: float = parameter(0.0, -1e-5, 4e-5, "the same for wider heads, often a fallback", optional=True)
    speed_512: float = parameter(1.0, 0.004, 3.0, "the same for wider heads", optional=True)
    block_512: float = parameter(1.0, 0.0, 100.0, "the same for wider heads", optional=True)
    sequence_512_s: float = parameter(0.0, 0.0, 2e-5, "each sequence more, where it takes them in turn", optional=True)


WIDE_HEADS = {"192": (128.0, 192.0), "256": (192.0, 256.0), "512": (256.0, np.inf)}
"""Kernels of their own for wide heads: name in the parameters -> above which and up to which width."""


def widest_group(software: str) -> float:
    """Query heads of a group that one block takes; above, each head has its own.

    The profiler of the Llama-70B tables (lssv) called FlashAttention without packing.
    """
    return 1.0 if software == "lssv" else kernels_of(software).widest_group


def kernel_source(source: str, sheet: Datasheet, *, prompts: bool, windowed: Any, head_dim: Any, group: Any) -> Any:
    """The software whose kernel *source* runs on the device of *sheet*: its own, but for two that have another beside it.

    Before Blackwell TensorRT-LLM decodes by XQA, and head by head ("trtllm-single", its masked multi-head attention)
    where query heads share no KV head or more than 32 do (its dispatch, attentionOp.cpp). SGLang falls back on Triton
    ("sglang-triton") where its first choice lacks a shape: on Hopper FlashAttention 3, which was not timed with windows
    over heads wider than 192; on Blackwell TensorRT-LLM's, which lacks 192 wide heads, and 256 wide ones in groups of
    three (prompts) or of no power of two (decodes). `windowed`, `head_dim` and `group` (query heads of a KV head) may be
    columns; so is the answer then.
    """
    blackwell = "fp4" in sheet.peak_flops_per_s
    choice = kernels_of(source).attention
    if choice == "single heads apart" and not prompts and not blackwell:
        alone = (np.asarray(group) <= 1) | (np.asarray(group) > widest_group(source))
        found = np.where(alone, f"{source}-single", source)
        return str(found) if found.ndim == 0 else found
    if choice != "triton behind":
        return source if np.ndim(head_dim) == 0 else np.full(np.shape(head_dim), source)
    wide = np.asarray(head_dim) > WIDE_HEADS["256"][0]
    if blackwell:
        odd = np.asarray(group) == 3 if prompts else np.log2(group) % 1 > 0
        falls = ((np.asarray(head_dim) > WIDE_HEADS["192"][0]) & ~wide) | (wide & odd)
    else:
        falls = wide & np.asarray(windowed)
    found = np.where(falls, f"{source}-triton", source)
    return str(found) if found.ndim == 0 else found


def _kernel_of(params: PrefillParams | DecodeParams, head_dim: Any) -> tuple[Any, Any, Any]:
    """Seconds more of the start, speed and cost of blocks in the kernel that takes heads of this width."""
    where = (ARRAYS if isinstance(head_dim, np.ndarray) else SCALARS).where
    start_s, speed, block = 0.0, 1.0, 1.0
    for name, (above, _) in WIDE_HEADS.items():
        wider = head_dim > above
        start_s = where(wider, getattr(params, f"start_{name}_s"), start_s)
        speed = where(wider, getattr(params, f"speed_{name}"), speed)
        block = where(wider, getattr(params, f"block_{name}"), block)
    return start_s, speed, block


def prefill_form(
    params: PrefillParams,
    sheet: Datasheet,
    *,
    heads: Any,
    kv_heads: Any,
    head_dim: Any,
    token_bytes: Any,
    v_dim: Any = None,
    past_s: Any = None,
    dtype: str = "bf16",
    run: Running = ALONE,
    longest_kv: Any = None,
    resident: bool = False,
) -> PrefillForm:
    """Causal attention of prompt chunks: heads per device, `token_bytes` cached for a token in one layer.

    Values are `v_dim` wide where not as wide as keys. What a cached token of the past costs before it can be met takes
    `past_s`. `longest_kv` and `resident` as in `attention_prefill_s`.
    """
    tile_heads = kv_heads + params.unpacked * (heads - kv_heads)
    more_s, speed, block = _kernel_of(params, head_dim)
    rate = sheet.flops_per_s(dtype) * params.compute_efficiency * speed
    pair_s = (2.0 * (head_dim + (head_dim if v_dim is None else v_dim)) + params.softmax_flops) / rate
    by_pair, by_row = heads * pair_s, 0.5 * _TILE * heads * pair_s
    by_kv = 0.5 * _TILE * params.padding * tile_heads * pair_s
    block_s = params.block_s * block
    row_blocks = heads / (_TILE * sheet.sm_count) * block_s
    chunk_blocks = tile_heads / sheet.sm_count * block_s
    stream = sheet.hbm_bytes_per_s * params.bandwidth_efficiency
    row_bytes_s = 2.0 * (head_dim + (head_dim if v_dim is None else v_dim)) * heads / stream
    kv_bytes_s = token_bytes / stream
    # Dequantised or copied by a kernel of its own, whatever the cache's format.
    before_s = 4.0 * head_dim * kv_heads * params.kv_passes / sheet.hbm_bytes_per_s
    throttle, after, loss = params.throttle, params.throttle_after_s, params.overlap_loss
    layers, launch = run.layers, (params.launch_s + more_s) * run.start_share
    lost_s, window = run.pair_lost_s, run.window_tokens
    edge, waste = params.window_tiles * _TILE * heads * pair_s, params.window_waste
    if longest_kv is not None and window is not None:
        longest_kv = np.minimum(longest_kv, window + _TILE)
    last_s = 0.0 if longest_kv is None else (params.tail * _TILE * sheet.sm_count) * longest_kv * pair_s
    alone = resident or longest_kv is not None
    numbers = (heads, kv_heads, head_dim, token_bytes, v_dim or 0.0)
    single: PromptTimes | None = None
    if window is None and past_s is None and not alone and all(isinstance(each, (int, float)) for each in numbers):
        single = PromptTimes(
            (by_pair, by_row, by_kv), (row_blocks, chunk_blocks, block_s), (row_bytes_s, kv_bytes_s), (throttle, after),
            loss, (layers, launch, before_s, lost_s),
        )  # fmt: skip

    def form(ops: Ops, rows: Any, chunks: Any, pairs: Any, kv: Any, outside: Any = None) -> Any:
        if single is not None and ops is SCALARS:
            return single.seconds(rows, chunks, pairs, kv)
        if window is None:
            compute = pairs * by_pair + rows * by_row + kv * by_kv
        else:
            # Queries with more keys behind them than the window holds; a tile of theirs sees the window and itself.
            beyond = ops.minimum(rows, ops.maximum(0.0, kv - chunks * window))
            in_tile = ops.minimum(kv, chunks * (window + _TILE))
            compute = pairs * by_pair + rows * by_row + in_tile * by_kv + beyond * edge
            if waste:
                if outside is None:
                    outside = rows * (kv - 0.5 * rows) / ops.maximum(1.0, chunks) - pairs
                compute = compute + ops.maximum(0.0, outside) * (waste * by_pair)
            kv = ops.minimum(kv, chunks * window + rows)
        compute = compute / (1.0 - throttle * compute / (compute + after))
        memory = rows * row_bytes_s + kv * kv_bytes_s
        if alone:
            compute = smooth_max(compute, last_s, params.tail_overlap_loss)
            memory = memory / _cache_speed(params, sheet, memory * stream, resident)
        compute = compute + ops.maximum(0.0, rows * row_blocks + chunks * chunk_blocks - block_s)
        gap = compute - memory
        both = 0.5 * (compute + memory + ops.sqrt(gap * gap + loss * (compute * memory)))
        if past_s is not None:
            both = both + ops.maximum(kv - rows, 0.0) * past_s
        return layers * (launch + both + kv * before_s + pairs * lost_s)

    setattr(form, SINGLE, single)
    return form


def decode_form(
    params: DecodeParams,
    sheet: Datasheet,
    *,
    heads: Any,
    kv_heads: Any,
    head_dim: Any,
    token_bytes: Any,
    dtype: str = "bf16",
    run: Running = ALONE,
    widest_group: float = np.inf,
    longest_kv: Any = None,
    resident: bool = False,
) -> DecodeForm:
    """Attention of decode steps: heads per device, `token_bytes` cached for a token in one layer.

    `widest_group`, `longest_kv` and `resident` as in `attention_decode_s`.
    """
    group = heads / kv_heads
    where = (ARRAYS if isinstance(group * head_dim, np.ndarray) else SCALARS).where
    packed = where(group > widest_group, 0.0, 1.0)
    grouped = packed * where(group > 1.0, 1.0, 0.0)
    readers = where(packed > 0.0, kv_heads, heads) * 1.0
    width = where(packed > 0.0, group, 1.0)
    more_s, speed, block_more = _kernel_of(params, head_dim)
    stream = sheet.hbm_bytes_per_s * params.bandwidth_efficiency * speed
    by_kv = token_bytes / kv_heads * readers / stream
    # Query tokens of all sequences together: the arithmetic of one is the share of the KV tokens each reads.
    by_pair = 4.0 * head_dim * heads / (sheet.flops_per_s(dtype) * _VERIFY_EFFICIENCY)
    narrow = head_dim / 128.0 - 1.0
    grow = (1.0 + params.block_head_dim * where(narrow < -0.5, -0.5, narrow)) * block_more
    block = (params.block_s + grouped * params.block_group_s - params.block_rows_s / 64.0) * grow
    row_block = params.block_rows_s / 64.0 * width * grow
    per_seq = readers / sheet.sm_count
    split = 1.0 if longest_kv is None else np.where(longest_kv > _SPLIT_FROM, 1.0, 0.0)
    launch = (params.launch_s + more_s + params.combine_s * split) * run.start_share
    several = params.regroup_s * run.start_share * grouped * where(kv_heads > 1, 1.0, 0.0)
    in_turn = where(head_dim > WIDE_HEADS["512"][0], params.sequence_512_s, 0.0)
    ramp, ramp_tokens = params.ramp_s, params.ramp_tokens / readers
    loss, layers = params.overlap_loss, run.layers
    one_s = 0.0
    if longest_kv is not None:
        drawn = params.single_blocks + grouped * (params.group_blocks - params.single_blocks)
        one_s = longest_kv * (token_bytes / kv_heads) * (sheet.sm_count / (sheet.hbm_bytes_per_s * speed)) / drawn
    alone = resident or longest_kv is not None

    def of_batch(ops: Ops, seqs: Any, queries: Any) -> tuple[Any, Any, Any]:
        """The terms that do not depend on the KV tokens: seconds of each of them, of blocks, and of having several sequences."""
        each = queries / seqs
        turns = ops.minimum(_TURNS - 1.0, ops.maximum(0.0, seqs - 1.0))
        if resident:
            # Larger batches run another kernel and are faster; times that are priced may not fall as a batch grows.
            turns = np.where(seqs > _TURNS, 0.0, turns)
        return (
            ops.maximum(by_kv, each * by_pair),
            ops.maximum(0.0, seqs * per_seq - 1.0) * ops.maximum(0.0, block + each * row_block),
            several * ops.minimum(1.0, ops.maximum(0.0, seqs - 1.0)) + in_turn * turns,
        )

    cut_tokens, beyond_ramp = params.window_tokens_more, params.beyond_ramp
    single: DecodeTimes | None = None
    if not alone and all(isinstance(each, (int, float)) for each in (heads, kv_heads, head_dim, token_bytes)):
        single = DecodeTimes(
            layers, launch, loss, (ramp, ramp_tokens), lambda seqs, queries: of_batch(SCALARS, seqs, queries)
        )

    def form(ops: Ops, seqs: Any, queries: Any, kv: Any, beyond: Any = None) -> Any:
        if beyond is not None:
            beyond = ops.maximum(0.0, beyond)
            split_over = kv + beyond_ramp * beyond
            kv = kv + ops.minimum(beyond, seqs * cut_tokens)
            split_over = ops.maximum(kv, split_over)
        else:
            split_over = kv
        if single is not None and ops is SCALARS:
            return single.seconds(seqs, queries, kv, split_over)
        by_token, blocks, more = of_batch(ops, seqs, queries)
        if alone:
            cached_s = by_kv / _cache_speed(params, sheet, kv * token_bytes, resident)
            memory = ops.maximum(kv * ops.maximum(cached_s, queries / seqs * by_pair), one_s)
        else:
            memory = kv * by_token
        gap = memory - blocks
        both = 0.5 * (memory + blocks + ops.sqrt(gap * gap + loss * (memory * blocks)))
        return layers * (launch + ramp * (split_over / (split_over + ramp_tokens)) + more + both)

    setattr(form, SINGLE, single)
    return form


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
    window_tokens: Any = None,
    resident: bool = False,
    dtype: str = "bf16",
) -> Any:
    """Seconds of causal attention of prompt chunks in one layer on one device; no chunks cost nothing.

    `chunks` sequences bring `rows` query tokens in all, attending to `kv_tokens` = sum of past + new tokens over
    `pairs` = sum of q * past + q (q + 1) / 2 query-key pairs. Heads are per device. Where a query sees `window_tokens` keys
    at the most, pairs count those alone; a window at least as long as the contexts changes nothing.
    `longest_kv`, the longest context of a chunk, adds the block that finishes last; without it the blocks are taken to
    balance. `resident` lets a small cache stay in L2, as in benchmarks that repeat one layer.
    """
    form = prefill_form(
        params,
        device,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        token_bytes=2.0 * kv_bytes * head_dim * kv_heads,
        dtype=dtype,
        run=replace(ALONE, window_tokens=window_tokens),
        longest_kv=longest_kv,
        resident=resident,
    )
    return none_is_free(form(ARRAYS, rows, chunks, pairs, kv_tokens), rows)


def attention_decode_s(
    params: DecodeParams,
    device: Datasheet,
    *,
    seqs: Any,
    kv_tokens: Any,
    heads: Any,
    kv_heads: Any,
    head_dim: Any,
    beyond_tokens: Any = None,
    query_width: Any = 1,
    kv_bytes: float = 2.0,
    longest_kv: Any = None,
    resident: bool = False,
    widest_group: float = np.inf,
    dtype: str = "bf16",
) -> Any:
    """Seconds of decode attention in one layer on one device; no sequences cost nothing.

    `seqs` sequences with `query_width` query tokens each (1, or K + 1 to verify K drafts) read `kv_tokens` cached
    tokens in all (context plus query; a sliding window caps them and leaves `beyond_tokens` outside). Heads are per
    device. `longest_kv`, the longest one, bounds the time by what one sequence's blocks can draw; without it contexts
    are taken to balance and to exceed one split. Groups of query heads wider than `widest_group` fall back to a block
    per query head (TensorRT-LLM: 32). `resident` lets a small cache stay in L2, as in benchmarks that repeat one layer.
    """
    form = decode_form(
        params,
        device,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        token_bytes=2.0 * kv_bytes * head_dim * kv_heads,
        dtype=dtype,
        widest_group=widest_group,
        longest_kv=longest_kv,
        resident=resident,
    )
    some = np.where(np.asarray(seqs) > 0, seqs, 1)
    return none_is_free(form(ARRAYS, some, some * query_width, kv_tokens, beyond_tokens), seqs)


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
    query_width: Any = 1,
    **shape: Any,
) -> Any:
    """Seconds of one variable-length kernel over prompt chunks and decodes together (FlashAttention in vLLM).

    There a decode is a chunk of `query_width` rows that wastes most of its tile, which is why a few decodes with long
    contexts cost as much as prompt work; *shape* and the sums as in the two functions above.
    """
    return attention_prefill_s(
        params,
        device,
        chunks=chunks + seqs,
        rows=rows + seqs * query_width,
        pairs=pairs + decode_kv_tokens * query_width,
        kv_tokens=kv_tokens + decode_kv_tokens,
        **shape,
    )


def _cache_speed(params: PrefillParams | DecodeParams, sheet: Datasheet, footprint_bytes: Any, resident: bool) -> Any:
    if not resident:
        return 1.0
    full = footprint_bytes * (1.0 / (params.cache_reach * sheet.l2_bytes))
    return 1.0 + params.cache_gain * np.minimum(1.0, np.maximum(0.0, _CACHE_EDGE * (1.0 - full)))
