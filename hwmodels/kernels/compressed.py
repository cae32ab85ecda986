"""Attention to compressed tokens (DeepSeek-V4): a window of tokens as they are, and keys that stand for 4 or 128 of them.

Of keys that stand for four an indexer scores every one and a query attends to the best; those that stand for 128 are all attended.
The form is of what a layer runs beside its products: norms, rotary embedding, compression, scores, choice and attention. Benchmarks
time whole modules, products with them; a fit takes these from the device's own parameters (`hwmodels.measured.compressed`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from hwmodels.kernels.ops import ALONE, ARRAYS, DecodeForm, Ops, PrefillForm, Running, none_is_free
from hwmodels.kernels.parameters import Datasheet, parameter
from hwmodels.operations import AttentionShape


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedParams:
    """The kernels that a layer of one kind of one stack runs beside its products, of prompts or of decodes (times in seconds)."""

    launch_s: float = parameter(
        1e-5, -2e-4, 2e-4, "starts of the kernels, less what a graph hides of those of products"
    )
    block_starts_s: float = parameter(
        0.0,
        0.0,
        2e-4,
        "what a graph hides more of products in blocks, where they were timed as Python launches them",
        optional=True,
    )
    sequence_s: float = parameter(5e-7, 0.0, 1e-5, "each sequence more")
    row_s: float = parameter(1e-5, 0.0, 1e-4, "a token on one SM: norms, rotary embedding, compression, cache")
    head_s: float = parameter(5e-8, 0.0, 5e-6, "a head of a token on one SM")
    wide_s: float = parameter(1e-6, 0.0, 5e-5, "a thousand numbers of a token's hidden state on one SM")
    compute_efficiency: float = parameter(0.4, 0.02, 1.0, "share of the dense peak in attention's two products")
    score_efficiency: float = parameter(
        0.3, 0.005, 1.0, "share of the 8-bit peak in the scores, their choice with them"
    )
    bandwidth_efficiency: float = parameter(0.5, 0.02, 1.0, "share of the datasheet bandwidth on the cache")
    walk_s: float = parameter(
        0.0, 0.0, 2e-7, "a key that the scores of one tile of queries come to in turn", optional=True
    )
    choose_s: float = parameter(
        0.0, 0.0, 2e-4, "start of a choice, where there are more keys than are chosen", optional=True
    )
    flat_s: float = parameter(0.0, 0.0, 3e-4, "a choice among equal scores", optional=True)
    flat_query_s: float = parameter(0.0, 0.0, 5e-4, "one query of it on one SM", optional=True)
    flat_token_s: float = parameter(
        0.0, 0.0, 5e-7, "a token beyond those that are chosen, of one query on one SM", optional=True
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedLayer:
    """The shape of a layer's attention on one device; numbers or arrays."""

    heads: Any
    head_dim: Any
    """Numbers of a query, and of a key, that each head multiplies."""
    hidden: Any
    compress: float
    """Tokens that a key stands for; 0: there are no keys but those of the window."""
    window: float
    """Latest tokens that are attended to uncompressed; infinite where the pairs count only what a query attends to."""
    chosen: Any = None
    """Keys that a query attends to; None: all."""
    index_flops: Any = 0.0
    """Work of the indexer for each key that it scores."""
    token_bytes: Any = 0.0
    """Bytes of the cache that are read for each token."""
    entry_bytes: Any = 0.0
    """Bytes that decodes read for each attended key."""
    in_blocks: Any = 0.0
    """1 where products are of FP8 in blocks, else 0."""
    multiplied_heads: Any = None
    """Heads that tensor cores multiply, where a group with fewer heads fills a tile in part."""

    @property
    def most(self) -> Any:
        """Tokens that the chosen keys stand for; None: all."""
        return None if self.chosen is None else self.chosen * self.compress


def attended(ops: Ops, rows: Any, chunks: Any, pairs: Any, most: Any) -> tuple[Any, Any]:
    """Pairs of *rows* of prompts with no more than *most* tokens each, and the rows that have more tokens than that.

    The sequences of *chunks* are taken to be alike: contexts of their rows rise by one from row to row.
    """
    each = rows / ops.where(chunks > 0, chunks, 1)
    last = pairs / rows + 0.5 * each
    first = ops.maximum(0.0, last - each)
    turn = ops.minimum(ops.maximum(most, first), last)
    beyond = (last - turn) / ops.maximum(1e-9, last - first) * rows
    below = rows - beyond
    return 0.5 * (turn + first) * below + most * beyond, beyond


def _numbers(ops: Ops, every: Any, most: Any, compress: float) -> Any:
    return every / compress if most is None else ops.minimum(every, most) / compress


def prefill_form(
    params: CompressedParams, sheet: Datasheet, *, run: Running = ALONE, flat_until: float | None = None, **layer: Any
) -> PrefillForm:
    """A layer's work for prompts beside its products; *layer* as in `CompressedLayer`.

    *flat_until*: all scores are equal, as in a benchmark with dummy weights, and the kernel that chooses among up to so many tokens
    is slow; None: scores differ, as in use.
    """
    shape = CompressedLayer(**layer)
    by_pair, by_row, by_score, by_kv = _rates(params, sheet, shape)
    compress, window, most = shape.compress, shape.window, shape.most
    launch, more, layers = params.launch_s - shape.in_blocks * params.block_starts_s, params.sequence_s, run.layers

    def form(ops: Ops, rows: Any, chunks: Any, pairs: Any, kv: Any, outside: Any = None) -> Any:
        keys = pairs if window == math.inf else attended(ops, rows, chunks, pairs, window)[0]
        seconds = launch + more * (chunks - 1.0) * ops.where(rows > chunks, 1.0, 0.0) + rows * by_row + kv * by_kv
        if compress:
            some, beyond = (pairs, 0.0) if most is None else attended(ops, rows, chunks, pairs, most)
            keys = keys + some / compress
            scores = pairs / compress * by_score
            seconds = seconds + ops.maximum(scores, kv / ops.where(chunks > 0, chunks, 1) / compress * params.walk_s)
            if most is not None:
                seconds = seconds + params.choose_s * ops.where(beyond > 0.0, 1.0, 0.0)
                if flat_until is not None:
                    seconds = seconds + _flat_s(params, sheet, ops, (rows, chunks, pairs), most, flat_until)
        # Launches that a graph hides of products are no more than a few prompt tokens take.
        return layers * ops.maximum(0.0, seconds + keys * by_pair)

    return form


def decode_form(
    params: CompressedParams, sheet: Datasheet, *, run: Running = ALONE, flat_until: float | None = None, **layer: Any
) -> DecodeForm:
    """As `prefill_form`, of decodes."""
    shape = CompressedLayer(**layer)
    by_pair, by_row, by_score, by_kv = _rates(params, sheet, shape)
    by_entry = shape.entry_bytes / (sheet.hbm_bytes_per_s * params.bandwidth_efficiency)
    compress, window, most = shape.compress, shape.window, shape.most
    launch, layers = params.launch_s - shape.in_blocks * params.block_starts_s, run.layers

    def form(ops: Ops, seqs: Any, queries: Any, kv: Any, beyond: Any = None) -> Any:
        each = kv / seqs
        keys = ops.minimum(each, window)
        seconds = launch + queries * by_row + kv * by_kv
        if compress:
            keys = keys + _numbers(ops, each, most, compress)
            seconds = seconds + each * queries / compress * by_score
            if most is not None:
                seconds = seconds + params.choose_s * ops.where(each > most, 1.0, 0.0)
                if flat_until is not None:
                    pairs = queries * (each - 0.5 * (queries / seqs - 1.0))
                    seconds = seconds + _flat_s(params, sheet, ops, (queries, seqs, pairs), most, flat_until)
        return layers * (seconds + queries * keys * by_pair + seqs * keys * by_entry)

    return form


def _rates(params: CompressedParams, sheet: Datasheet, shape: CompressedLayer) -> tuple[Any, Any, Any, Any]:
    """Seconds of an attended key, of a row, of a scored key and of a token of the cache."""
    by_pair = 4.0 * shape.heads * shape.head_dim / (sheet.flops_per_s("bf16") * params.compute_efficiency)
    if shape.multiplied_heads is not None:
        by_pair = by_pair * (shape.multiplied_heads / shape.heads)
    return (
        by_pair,
        (params.row_s + params.head_s * shape.heads + params.wide_s * 1e-3 * shape.hidden) / sheet.sm_count,
        shape.index_flops / (_eight_bits(sheet) * params.score_efficiency),
        shape.token_bytes / (sheet.hbm_bytes_per_s * params.bandwidth_efficiency),
    )


def _eight_bits(sheet: Datasheet) -> float:
    return sheet.flops_per_s("fp8" if "fp8" in sheet.peak_flops_per_s else "bf16")


def _flat_s(
    params: CompressedParams, sheet: Datasheet, ops: Ops, sums: tuple[Any, Any, Any], most: Any, until: float
) -> Any:
    """Time that equal scores add: queries between *most* and *until* tokens, each by the tokens that it has too many."""
    last = ops.maximum(until, most)
    few, more = attended(ops, *sums, most)
    many, beyond = attended(ops, *sums, last)
    slow = more - beyond
    excess = many - few - beyond * (last - most)
    on_sms = (slow * params.flat_query_s + excess * params.flat_token_s) / sheet.sm_count
    return params.flat_s * ops.where(slow > 0.0, 1.0, 0.0) + on_sms


def work_of_prompts(shape: AttentionShape, ops: Ops, rows: Any, chunks: Any, pairs: Any, kv: Any) -> tuple[Any, Any]:
    """Operations of one layer of *shape* on scored and attended keys, and bytes of the cache that it reads."""
    most = float(shape.chosen * shape.compress) if shape.chosen else None
    keys, _ = attended(ops, rows, chunks, pairs, float(shape.near))
    flops = 0.0
    if shape.compress:
        some = pairs if most is None else attended(ops, rows, chunks, pairs, most)[0]
        keys = keys + some / shape.compress
        flops = pairs * (shape.index_flops / shape.compress)
    return flops + keys * (4.0 * shape.n_heads * shape.qk_dim), kv * shape.kv_bytes


def work_of_decodes(shape: AttentionShape, ops: Ops, seqs: Any, queries: Any, kv: Any) -> tuple[Any, Any]:
    """As `work_of_prompts`, of decodes, which read the indexer's keys and those that they attend to."""
    most = float(shape.chosen * shape.compress) if shape.chosen else None
    scored_bytes = shape.kv_bytes - shape.entry_bytes / shape.compress if shape.compress else 0.0
    each = kv / seqs
    keys = ops.minimum(each, float(shape.near))
    flops = 0.0
    if shape.compress:
        keys = keys + _numbers(ops, each, most, shape.compress)
        flops = each * (shape.index_flops / shape.compress)
    flops = queries * (flops + keys * (4.0 * shape.n_heads * shape.qk_dim))
    return flops, seqs * keys * shape.entry_bytes + kv * scored_bytes


def bound_of_prompts(shape: AttentionShape, flops_per_s: float, bytes_per_s: float) -> PrefillForm:
    """All layers of *shape* on a datasheet: the longer of their arithmetic and of reading the cache."""

    def form(ops: Ops, rows: Any, chunks: Any, pairs: Any, kv: Any) -> Any:
        flops, moved = work_of_prompts(shape, ops, rows, chunks, pairs, kv)
        return shape.layers * ops.maximum(flops / flops_per_s, moved / bytes_per_s)

    return form


def bound_of_decodes(shape: AttentionShape, flops_per_s: float, bytes_per_s: float) -> DecodeForm:
    """As `bound_of_prompts`, of decodes."""

    def form(ops: Ops, seqs: Any, queries: Any, kv: Any, beyond: Any = None) -> Any:
        flops, moved = work_of_decodes(shape, ops, seqs, queries, kv)
        return shape.layers * ops.maximum(flops / flops_per_s, moved / bytes_per_s)

    return form


def compressed_prefill_s(
    params: CompressedParams,
    device: Datasheet,
    *,
    rows: Any,
    chunks: Any,
    pairs: Any,
    kv_tokens: Any,
    products_s: Any = 0.0,
    **shape: Any,
) -> Any:
    """Seconds of one layer's prompts on one device, with its products where their time is given; *shape* as in `prefill_form`."""
    some = np.where(np.asarray(rows) > 0, rows, 1)
    each = np.where(np.asarray(rows) > 0, chunks, 1)
    seconds = prefill_form(params, device, **shape)(ARRAYS, some, each, pairs, kv_tokens)
    return none_is_free(np.maximum(seconds + products_s, _LEAST_S), rows)


def compressed_decode_s(
    params: CompressedParams, device: Datasheet, *, seqs: Any, kv_tokens: Any, products_s: Any = 0.0, **shape: Any
) -> Any:
    """Seconds of one layer's decodes on one device, with its products where their time is given; *shape* as in `decode_form`."""
    some = np.where(np.asarray(seqs) > 0, seqs, 1)
    seconds = decode_form(params, device, **shape)(ARRAYS, some, some, kv_tokens)
    return none_is_free(np.maximum(seconds + products_s, _LEAST_S), seqs)


_LEAST_S = 1e-7
"""No fit ends below it, however many launches its products hold."""
