"""Linear attention: a short causal convolution and the update of a state of each value head.

A layer runs one kernel of each: gated delta nets (Yang et al., Gated Delta Networks, arXiv 2412.06464), Mamba-2 (Dao and Gu,
arXiv 2405.21060). A prompt goes through its chunks of 64 or 128 tokens one behind the other, in blocks of a sequence and a
value head; a decode reads and writes the state of every sequence. Each equation stands here once, as a form, as in
`kernels.attention`: its time does not depend on the context.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hwmodels.kernels.ops import ALONE, ARRAYS, Ops, Running, none_is_free
from hwmodels.kernels.parameters import Datasheet, parameter

_CHUNKS = {"delta": 64.0, "kda": 64.0, "mamba-scan": 128.0}
"""Tokens that a state takes at once (flash-linear-attention, FlashInfer; the `chunk_size` of Nemotron-H's configs)."""
_CHANNEL_TOKENS = 512.0  # that a block of Mamba's convolution takes at once, of one channel
_SHORT = 8.0  # tokens of a sequence below which Mamba's convolution is another, slower kernel
_STATE_BYTES = 4.0  # of a number of the state, which serving stacks keep in fp32
_CACHE_EDGE = 3.0  # residence in L2 falls from 1 to 0 between two thirds of its capacity and all of it
_CHANNELS = 256.0  # of the convolution in one block
KERNELS: Mapping[str, tuple[str, str]] = {
    "delta": ("conv", "delta"),
    "kda": ("kda-conv", "kda"),
    "mamba2": ("mamba-conv", "mamba-scan"),
}
"""Rule of an update -> its convolution and its update."""
DECODED_AS: Mapping[str, str] = {"mamba-scan": "delta"}
"""Kernels whose decodes were not timed -> those that stand in: both read and write a state once."""

LinearPrefillForm = Callable[[Ops, Any, Any], Any]
"""(ops, prompt rows, chunks) -> seconds of all the shape's layers."""
LinearDecodeForm = Callable[[Ops, Any], Any]
"""(ops, sequences) -> seconds of all the shape's layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearParams:
    """One kernel of linear attention, of one library, for prompts or for decodes (times in seconds)."""

    launch_s: float = parameter(4e-6, 5e-7, 1e-4, "start of the kernel, or of the chain of them")
    sequence_s: float = parameter(0.0, 0.0, 1e-5, "each sequence more, where they are taken in turn")
    block_s: float = parameter(2e-6, 0.0, 5e-5, "a block on one SM: its start, its state or its first rows")
    step_s: float = parameter(1e-6, 0.0, 5e-5, "a chunk of 64 tokens in one block of the delta rule; a convolved token")
    tile: float = parameter(8.0, 1.0, 128.0, "blocks of a value head; tokens of one block of the convolution")
    whole_waves: float = parameter(0.5, 0.0, 1.0, "1: blocks that fill a wave in part cost all of it; 0: their share")
    bandwidth_efficiency: float = parameter(0.8, 0.03, 1.0, "share of the datasheet bandwidth")
    cache_gain: float = parameter(0.5, 0.0, 8.0, "extra bandwidth for what stays in L2")
    overlap_loss: float = parameter(1.0, 0.0, 4.0, "0: memory and blocks overlap fully; 4: they add up")
    row_passes: float = parameter(
        1.0, 0.2, 40.0, "times that queries, keys, values and outputs cross memory", optional=True
    )
    value_share: float = parameter(1.0, 0.0, 1.0, "share of the values' channels that are convolved", optional=True)
    short_share: float = parameter(0.0, 0.0, 1.0, "added share of blocks of a few tokens, run otherwise", optional=True)


def _waves(ops: Ops, blocks_per_sm: Any, whole: float) -> Any:
    up = ops.ceil(blocks_per_sm)
    return ops.maximum(1.0, blocks_per_sm + whole * (up - blocks_per_sm))


def _speed(ops: Ops, params: LinearParams, sheet: Datasheet, footprint_bytes: Any, resident: bool) -> Any:
    if not resident:
        return 1.0
    share = ops.minimum(1.0, ops.maximum(0.0, _CACHE_EDGE * (1.0 - footprint_bytes * (1.0 / sheet.l2_bytes))))
    return 1.0 + params.cache_gain * share


def linear_form(
    params: LinearParams,
    sheet: Datasheet,
    *,
    kernel: str,
    key_heads: Any,
    key_dim: Any,
    value_heads: Any,
    value_dim: Any,
    conv_width: Any = 4,
    run: Running = ALONE,
    resident: bool = False,
) -> LinearPrefillForm:
    """The kernel of prompts, one of `KERNELS`, with heads per device. Decodes are chunks of one token: see `decode_form`.

    `resident` lets a small state stay in L2, as in benchmarks that repeat one layer, and sequences of a few tokens cost what they
    do there: more than longer ones, which times that are priced may not.
    """
    stream = sheet.hbm_bytes_per_s * params.bandwidth_efficiency
    launch, layers, loss = params.launch_s * run.start_share, run.layers, params.overlap_loss
    in_turn, block, step, tile, whole = (
        params.sequence_s,
        params.block_s,
        params.step_s,
        params.tile,
        params.whole_waves,
    )
    sm_count = float(sheet.sm_count)
    chunk = _CHUNKS.get(kernel, 0.0)
    if chunk:
        row_bytes = 4.0 * (key_heads * key_dim + value_heads * value_dim) * params.row_passes
        sequence_bytes = 2.0 * _STATE_BYTES * value_heads * key_dim * value_dim
        groups = tile * value_heads / sm_count
    elif kernel in ("conv", "kda-conv", "mamba-conv"):
        channels = 2.0 * key_heads * key_dim + params.value_share * value_heads * value_dim
        row_bytes, sequence_bytes = 4.0 * channels, 4.0 * (conv_width - 1.0) * channels
        groups = channels / (sm_count if kernel == "mamba-conv" else _CHANNELS * sm_count)
    else:
        known = ", ".join(name for names in KERNELS.values() for name in names)
        raise ValueError(f"kernel must be one of {known}; got {kernel!r}")
    few, more = (chunk or _SHORT) if resident else 0.0, params.short_share

    def form(ops: Ops, rows: Any, chunks: Any) -> Any:
        each = rows / chunks
        if kernel == "mamba-conv":
            # An SM has a part of many blocks' channels at a time: no wave of them is seen.
            one = block + ops.ceil(each * (1.0 / _CHANNEL_TOKENS)) * step
            busy = chunks * groups * one
        elif not chunk:
            # Tiles of tokens run side by side; within one a token follows the other.
            blocks = chunks * groups * ops.maximum(1.0, each / tile)
            busy = _waves(ops, blocks, whole) * (block + ops.minimum(each, tile) * step)
        else:
            one = block + ops.maximum(1.0, each * (1.0 / chunk)) * step
            busy = _waves(ops, chunks * groups, whole) * one
        if few and more:
            busy = busy * (1.0 + more * ops.where(each < few, 1.0, 0.0))
        moved = rows * row_bytes + chunks * sequence_bytes
        memory = moved / (stream * _speed(ops, params, sheet, 0.5 * moved, resident))
        gap = busy - memory
        both = 0.5 * (busy + memory + ops.sqrt(gap * gap + loss * (busy * memory)))
        return layers * (launch + in_turn * (chunks - 1.0) + both)

    return form


def decode_form(params: LinearParams, sheet: Datasheet, **shape: Any) -> LinearDecodeForm:
    """The kernel of decodes, each a chunk of one token; *shape* as in `linear_form`."""
    form = linear_form(params, sheet, **shape)

    def of_sequences(ops: Ops, seqs: Any) -> Any:
        return form(ops, seqs, seqs)

    return of_sequences


def linear_prefill_s(params: LinearParams, device: Datasheet, *, rows: Any, chunks: Any, **shape: Any) -> Any:
    """Seconds of one kernel over `chunks` sequences that bring `rows` tokens in all, in one layer on one device.

    *shape* as in `linear_form`. No rows cost nothing; a sequence's tokens are taken to be alike in number.
    """
    some = np.where(np.asarray(chunks) > 0, chunks, 1)
    return none_is_free(linear_form(params, device, **shape)(ARRAYS, rows, some), rows)


def linear_decode_s(params: LinearParams, device: Datasheet, *, seqs: Any, **shape: Any) -> Any:
    """Seconds of one kernel over a decode step of `seqs` sequences, in one layer on one device; none cost nothing."""
    return linear_prefill_s(params, device, rows=seqs, chunks=seqs, **shape)


def layer_forms(
    sheet: Datasheet,
    prefill: Sequence[LinearParams],
    decode: Sequence[LinearParams],
    *,
    rule: str,
    **shape: Any,
) -> tuple[LinearPrefillForm, LinearDecodeForm]:
    """Prompts and decodes of whole layers, convolution and update together: parameters as `KERNELS` has those of the *rule*."""
    names = KERNELS[rule]
    prompts = [
        linear_form(params, sheet, kernel=kernel, **shape) for kernel, params in zip(names, prefill, strict=True)
    ]
    steps = [decode_form(params, sheet, kernel=kernel, **shape) for kernel, params in zip(names, decode, strict=True)]

    def of_prompts(ops: Ops, rows: Any, chunks: Any) -> Any:
        return prompts[0](ops, rows, chunks) + prompts[1](ops, rows, chunks)

    def of_decodes(ops: Ops, seqs: Any) -> Any:
        return steps[0](ops, seqs) + steps[1](ops, seqs)

    return of_prompts, of_decodes
