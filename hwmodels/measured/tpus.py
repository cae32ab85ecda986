"""The JAX serving stack's kernels on TPUs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hwmodels.kernels.families import TPU_DECODE, TPU_GEMM, TPU_PREFILL
from hwmodels.kernels.parameters import Datasheet
from hwmodels.kernels.tpu import TpuAttentionParams, TpuGemmParams
from hwmodels.measured.files import Measurement
from hwmodels.measured.part import Columns, Part, Shape, every, pick
from hwmodels.measured.products import LAYER_OPS, elementwise_part, layer_widths

_DECODE_FIELDS = ("decode_launch_s", "decode_seq_s", "decode_token_s")
_PREFILL_FIELDS = ("prefill_launch_s", "prefill_row_s", "prefill_pair_s", "prefill_token_s", "overlap_loss")
# Compiled into their neighbours: what is left takes 30 ns to 4 us without a trend in the rows.
FUSED = ("final_layernorm", "post_layernorm")


def _decode_shape(c: Columns) -> Shape:
    return {"seqs": c["batch"], "kv_tokens": c["batch"] * c["kv"], "kv_heads": c["kv_heads"]}


def _prefill_shape(c: Columns) -> Shape:
    b, q, past = c["batch"], c["query"], c["kv"]
    pairs = b * (q * past + q * (q + 1) / 2)
    return {"rows": b * q, "heads": c["heads"], "kv_tokens": b * (past + q), "pairs": pairs}


def attention(m: Measurement, device: Datasheet) -> Iterator[Part]:
    names = {"batch": "batch_size", "query": "prefill_chunk_size", "kv": "kv_cache_size", "heads": "heads_per_rank",
             "kv_heads": "kv_heads_per_rank"}  # fmt: skip
    prompt = m.columns["is_prefill"]
    rows, columns = pick(m, ~prompt, names)
    yield Part(
        form=TPU_DECODE, sheet=device, variants=("jax",), rows=rows, columns=columns, shape=_decode_shape,
        groups=("batch", "kv"), starts=(TpuAttentionParams(),), fixed=_PREFILL_FIELDS,
    )  # fmt: skip
    rows, columns = pick(m, prompt, names)
    yield Part(
        form=TPU_PREFILL, sheet=device, variants=("jax",), rows=rows, columns=columns, shape=_prefill_shape,
        groups=("query", "kv"), starts=(TpuAttentionParams(),), fixed=_DECODE_FIELDS,
    )  # fmt: skip


_PADDING = ("column_step", "depth_step", "spill")
_NKI = TpuGemmParams(launch_s=1.6e-5, row_step=2048.0, column_step=2048.0, depth_step=1024.0)
"""nkilib pads rows and columns to multiples of 2,048 and the inner side to those of 1,024."""


def gemm(m: Measurement, device: Datasheet) -> Iterator[Part]:
    """Products on one core of the chip: JAX sees a TPU v7's two chiplets as devices, Neuron pairs of Trainium's cores."""
    rows, columns = pick(m, every(m), {"m": "m", "n": "n", "k": "k"})
    starts, fixed = (TpuGemmParams(),), ("fill_m", "fill_n", "fill_k", "row_step", "column_step", "depth_step")
    if m.source == "nki":
        starts, fixed = (_NKI,), ("row_step", "fill_m", *_PADDING)
    yield Part(
        form=TPU_GEMM, sheet=device, variants=("bf16",), rows=rows, columns=columns, groups=("n", "k"),
        shape=lambda c: {**c, "n": c["n"] * device.sm_count}, starts=starts, fixed=fixed,
    )  # fmt: skip


def layers(m: Measurement, device: Datasheet) -> Iterator[Part]:
    clean, matrix = m.columns["flag"] == "ok", ~np.isnan(m.columns["k"])
    rows, columns = pick(m, clean & matrix, {"m": "m", "n": "n", "k": "k"})
    yield Part(
        form=TPU_GEMM, sheet=device, variants=("bf16",), rows=rows, columns=columns, groups=("m",),
        starts=(TpuGemmParams(),), fixed=_PADDING,
    )  # fmt: skip
    widths = layer_widths(m)
    for layer in np.unique(m.columns["layer"][~matrix]):
        op = LAYER_OPS.get(str(layer))
        mask = clean & ~matrix & (m.columns["layer"] == layer)
        if op is None or layer in FUSED or not mask.any():
            continue
        rows, columns = pick(m, mask, {"rows": "m"})
        columns["width"] = np.full(len(rows), widths[op])
        columns["gated"] = np.full(len(rows), op == "act")
        name = str(layer).replace("_", "-") if op == "norm" else op
        yield elementwise_part(device, op, (f"{name}/jax",), rows, columns)
