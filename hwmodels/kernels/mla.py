"""Multi-head latent attention (DeepSeek V2/V3/R1): one compressed KV vector per token, shared by all query heads.

Prompts attend to keys and values that are expanded from the latent, decodes to the latent itself (DeepSeek-V2, arXiv
2405.04434, 2.1). Each equation stands here once, as a form, as in `kernels.attention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hwmodels.kernels.ops import ALONE, ARRAYS, DecodeForm, Ops, PrefillForm, Running, none_is_free
from hwmodels.kernels.parameters import Datasheet, parameter

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


def prefill_form(
    params: MlaParams,
    sheet: Datasheet,
    *,
    pair_flops: Any,
    row_numbers: Any,
    token_bytes: Any,
    expand_flops: Any = 0.0,
    expanded: bool = True,
    dtype: str = "bf16",
    run: Running = ALONE,
) -> PrefillForm:
    """Latent attention of prompts: FLOPs of a query-key pair, numbers of a token's query and output rows, one layer.

    Keys and values of the past are expanded from `token_bytes` of latents, for `expand_flops` a token, and cross memory as
    rows do; where they are not `expanded`, queries meet the latents themselves.
    """
    rate = sheet.flops_per_s(dtype) * params.compute_efficiency
    by_pair, by_past = pair_flops / rate, expand_flops / rate
    stream = sheet.hbm_bytes_per_s * params.bandwidth_efficiency
    row_bytes_s = 2.0 * row_numbers * params.row_passes / stream
    kv_bytes_s = token_bytes / stream + (row_bytes_s if expanded else 0.0)
    loss, hidden, launch = params.overlap_loss, params.hidden_work, params.launch_s * run.start_share
    layers, lost_s, window = run.layers, run.pair_lost_s, run.window_tokens

    def form(ops: Ops, rows: Any, chunks: Any, pairs: Any, kv: Any) -> Any:
        if window is not None:
            kv = ops.minimum(kv, chunks * window + rows)
        compute = (pairs + 0.5 * _TILE * rows) * by_pair + ops.maximum(kv - rows, 0.0) * by_past
        memory = rows * row_bytes_s + kv * kv_bytes_s
        gap = compute - memory
        both = 0.5 * (compute + memory + ops.sqrt(gap * gap + loss * (compute * memory)))
        gap = both - launch
        whole = 0.5 * (both + launch + ops.sqrt(gap * gap + hidden * (both * launch)))
        return layers * (whole + pairs * lost_s)

    return form


def decode_form(
    params: MlaParams,
    sheet: Datasheet,
    *,
    pair_flops: Any,
    row_numbers: Any,
    token_bytes: Any,
    dtype: str = "bf16",
    run: Running = ALONE,
) -> DecodeForm:
    """Latent attention of decodes; arguments as in `prefill_form`, of the latents that queries meet."""
    by_pair = pair_flops / (sheet.flops_per_s(dtype) * params.compute_efficiency)
    stream = sheet.hbm_bytes_per_s * params.bandwidth_efficiency
    by_kv = token_bytes / stream
    by_row = 2.0 * row_numbers * params.row_passes / stream
    loss, hidden, launch = params.overlap_loss, params.hidden_work, params.launch_s * run.start_share
    layers = run.layers

    def form(ops: Ops, seqs: Any, queries: Any, kv: Any) -> Any:
        compute = kv * (queries / seqs) * by_pair
        memory = kv * by_kv + queries * by_row
        gap = compute - memory
        both = 0.5 * (compute + memory + ops.sqrt(gap * gap + loss * (compute * memory)))
        gap = both - launch
        return layers * 0.5 * (both + launch + ops.sqrt(gap * gap + hidden * (both * launch)))

    return form


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
    numbers = heads * (2 * kv_rank + rope_dim)
    form = decode_form(
        params,
        device,
        pair_flops=2.0 * numbers,
        row_numbers=numbers,
        token_bytes=(kv_rank + rope_dim) * kv_bytes,
        dtype=dtype,
    )
    some = np.where(np.asarray(seqs) > 0, seqs, 1)
    return none_is_free(form(ARRAYS, some, some * query_width, kv_tokens), seqs)


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
    kv_rank: int = 512,
    rope_dim: int = 64,
    kv_bytes: float = 2.0,
    dtype: str = "bf16",
) -> Any:
    """Seconds of latent attention over expanded keys and values in prefill; sums as in attention_prefill_s.

    2 (qk_dim + v_dim) FLOPs per head and causal pair; queries, keys, values and outputs of every head cross memory, and
    2 rank (nope + v_dim) FLOPs expand a cached token for a head. Scalars and arrays give the same bits.
    """
    form = prefill_form(
        params,
        device,
        pair_flops=2.0 * heads * (qk_dim + v_dim),
        row_numbers=heads * (qk_dim + v_dim),
        token_bytes=(kv_rank + rope_dim) * kv_bytes,
        expand_flops=2.0 * kv_rank * heads * (qk_dim - rope_dim + v_dim),
        dtype=dtype,
    )
    return none_is_free(form(ARRAYS, rows, chunks, pairs, kv_tokens), rows)
