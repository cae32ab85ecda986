"""Modules of DeepSeek-V4: attention to compressed tokens, whose products are priced by the device's own parameters, and
hyper-connections."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from hwmodels.gpu import gemm_seconds, product_format
from hwmodels.kernels.compressed import CompressedParams
from hwmodels.kernels.families import COMPRESSED_DECODE, COMPRESSED_PREFILL
from hwmodels.kernels.parameters import Datasheet
from hwmodels.measured.files import Measurement
from hwmodels.measured.names import catalogue_model
from hwmodels.measured.part import Columns, Part, Shape, pick
from hwmodels.measured.products import elementwise_part
from hwmodels.model import AttentionKind, CompressedAttention, ModelSpec
from hwmodels.precision import precision
from hwmodels.profiles import load_profile
from hwmodels.stacks import kernels_of, servers

_STARTS = (
    CompressedParams(choose_s=5e-6, flat_s=5e-6, flat_query_s=5e-6, flat_token_s=5e-9),
    CompressedParams(
        launch_s=3e-5, row_s=3e-6, head_s=2e-7, compute_efficiency=0.2, score_efficiency=0.1, bandwidth_efficiency=0.3,
        choose_s=2e-5, flat_s=5e-5, flat_query_s=3e-5, flat_token_s=2e-8,
    ),
)  # fmt: skip
_CHOICE = ("choose_s", "flat_s", "flat_query_s", "flat_token_s")
_OF_DECODES = ("sequence_s", "compute_efficiency")
"""A decode is a sequence of one token, and reads its keys for longer than it multiplies them."""


def _products_s(
    m: Measurement, device: Datasheet, rows: np.ndarray, kind: AttentionKind
) -> tuple[np.ndarray, list[ModelSpec]]:
    """Seconds of the products in each of *rows*, as a run prices them, and the model of each."""
    profile, software = load_profile(device.name), tuple(dict.fromkeys((m.source, *servers())))
    seconds, models = np.zeros(len(rows)), [catalogue_model(f"deepseek-{name}") for name in m.columns["model"][rows]]
    tokens = m.columns["batch_size"][rows] * m.columns.get("seq_len", np.ones(len(m)))[rows]
    keys = [(model.name, int(heads), str(fmt)) for model, heads, fmt in zip(
        models, m.columns["num_heads"][rows], m.columns["gemm_dtype"][rows], strict=True)]  # fmt: skip
    for key in set(keys):
        name, heads, fmt = key
        mine = np.array([each == key for each in keys])
        spec = next(model for model in models if model.name == name)
        attention, number = spec.attention, precision(fmt)
        assert isinstance(attention, CompressedAttention)
        dtype = next(each for each in number.math if each in device.peak_flops_per_s)
        for _, n, k in attention.matrices(spec.hidden, kind, attention.n_heads // heads):
            seconds[mine] += gemm_seconds(
                profile, software, tokens[mine], n, k, dtype=dtype, weight_bytes=number.weight_bytes,
                fmt=product_format(fmt, dtype),
            )  # fmt: skip
    return seconds, models


def module(m: Measurement, device: Datasheet) -> Iterator[Part]:
    kind: AttentionKind = "csa" if m.labels["layer"] == "csa" else "hca"
    prompts = "seq_len" in m.columns
    names = {"batch": "batch_size", "past": "kv_len", "heads": "num_heads", **({"query": "seq_len"} if prompts else {})}
    formats = [
        fmt
        for fmt in np.unique(m.columns["gemm_dtype"]).tolist()
        if set(precision(fmt).math) & set(device.peak_flops_per_s)
    ]
    rows, columns = pick(m, np.isin(m.columns["gemm_dtype"], formats), names)
    if not len(rows):
        return
    columns["products_s"], models = _products_s(m, device, rows, kind)
    shapes = [model.attention for model in models]
    columns["in_blocks"] = (m.columns["gemm_dtype"][rows] == "fp8_block").astype(float)
    columns["hidden"] = np.array([float(model.hidden) for model in models])
    columns["chosen"] = np.array([float(a.index_topk) for a in shapes if isinstance(a, CompressedAttention)])
    spec = models[0]
    a = spec.attention
    assert isinstance(a, CompressedAttention)
    compress, choosing = float(a.tokens_of(kind)), kind == "csa"

    def shape(c: Columns) -> Shape:
        found: Shape = {
            "heads": c["heads"], "head_dim": a.head_dim, "hidden": c["hidden"], "compress": compress,
            "window": float(spec.compressed_window), "products_s": c["products_s"], "in_blocks": c["in_blocks"],
            "chosen": c["chosen"] if choosing else None, "index_flops": 2.0 * a.index_heads * a.index_dim if choosing else 0.0,
            "flat_until": kernels_of(m.source).equal_scores_until if choosing else None,
        }  # fmt: skip
        scored_bytes = a.index_bytes / compress if choosing else 0.0
        if not prompts:
            own = {"seqs": c["batch"], "kv_tokens": c["batch"] * (c["past"] + 1)}
            return {**found, **own, "token_bytes": scored_bytes, "entry_bytes": a.entry_bytes}
        query, batch = c["query"], c["batch"]
        return {
            **found, "rows": batch * query, "chunks": batch, "kv_tokens": batch * (c["past"] + query),
            "pairs": batch * (query * c["past"] + 0.5 * query * (query + 1)),
            "token_bytes": spec.compressed_bytes_per_token(kind),
        }  # fmt: skip

    both = len(np.unique(columns["in_blocks"])) > 1
    fixed = (
        *(() if both else ("block_starts_s",)),
        *(() if choosing else (*_CHOICE, "score_efficiency")),
        *(() if prompts else _OF_DECODES),
    )
    yield Part(
        form=COMPRESSED_PREFILL if prompts else COMPRESSED_DECODE, sheet=device, variants=(f"{kind}/{m.source}",), rows=rows,
        columns=columns, shape=shape, groups=("heads", "batch"), fixed=fixed,
        starts=_STARTS if choosing else tuple(_without_choice(start) for start in _STARTS),
    )  # fmt: skip


def _without_choice(start: CompressedParams) -> CompressedParams:
    return CompressedParams(
        launch_s=start.launch_s, row_s=start.row_s, head_s=start.head_s, compute_efficiency=start.compute_efficiency,
        bandwidth_efficiency=start.bandwidth_efficiency,
    )  # fmt: skip


def hyper_connections(m: Measurement, device: Datasheet) -> Iterator[Part]:
    """Both places of a layer in one time."""
    for op in ("pre", "post"):
        rows, columns = pick(m, m.columns["op"] == op, {"rows": "num_tokens", "width": "hidden_size"})
        if len(rows):
            part = elementwise_part(device, f"mhc_{op}", (f"mhc_{op}/{m.source}",), rows, columns, calls=2.0)
            # What the one place wrote lies in the cache beside what the other writes.
            yield replace(part, groups=("rows", "width"), shape=lambda c, own=part.shape: {**own(c), "footprint": 2.0})
