"""Modules of attention to compressed or chosen tokens (DeepSeek-V4 and V3.2, GLM-5, MiniMax-M3), whose products are priced by the
device's own parameters, and hyper-connections."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from hwmodels.gpu import gemm_seconds, product_format
from hwmodels.kernels.compressed import CompressedParams
from hwmodels.kernels.families import COMPRESSED_DECODE, COMPRESSED_PREFILL, MLA_BMM
from hwmodels.kernels.parameters import Datasheet
from hwmodels.measured.attention import CACHE_BYTES
from hwmodels.measured.files import Measurement
from hwmodels.measured.names import catalogue_model
from hwmodels.measured.part import Columns, Part, Shape, pick
from hwmodels.measured.products import elementwise_part
from hwmodels.model import EXPAND, Attention, AttentionKind, CompressedAttention, LatentAttention, ModelSpec
from hwmodels.operations import HEAD_TILE
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


_Matrices = Callable[[str, int], list[tuple[str, int, int]]]
"""Model and heads of a device -> name, n and k of a layer's products."""


def _formats(m: Measurement, device: Datasheet) -> np.ndarray:
    """The mask of rows whose products the device has the arithmetic for."""
    names = np.unique(m.columns["gemm_dtype"]).tolist()
    return np.isin(
        m.columns["gemm_dtype"], [fmt for fmt in names if set(precision(fmt).math) & set(device.peak_flops_per_s)]
    )


def _products_s(m: Measurement, device: Datasheet, rows: np.ndarray, matrices: _Matrices) -> np.ndarray:
    """Seconds of the products in each of *rows*, as a run prices them."""
    profile, software = load_profile(device.name), tuple(dict.fromkeys((m.source, *servers())))
    every_row = np.ones(len(m))
    tokens = (m.columns["batch_size"] * m.columns.get("seq_len", every_row))[rows]
    models, formats = (
        m.columns.get("model", every_row.astype(str))[rows].tolist(),
        m.columns["gemm_dtype"][rows].tolist(),
    )
    keys = list(zip(models, m.columns["num_heads"][rows].astype(int).tolist(), formats, strict=True))
    seconds = np.zeros(len(rows))
    for key in set(keys):
        model, heads, fmt = key
        mine, number = np.array([each == key for each in keys]), precision(fmt)
        dtype = next(each for each in number.math if each in device.peak_flops_per_s)
        for _, n, k in matrices(model, heads):
            seconds[mine] += gemm_seconds(
                profile, software, tokens[mine], n, k, dtype=dtype, weight_bytes=number.weight_bytes,
                fmt=product_format(fmt, dtype),
            )  # fmt: skip
    return seconds


def _deepseek(label: str) -> tuple[ModelSpec, CompressedAttention]:
    spec = catalogue_model(f"deepseek-{label}")
    assert isinstance(spec.attention, CompressedAttention)
    return spec, spec.attention


def _sums(c: Columns, prompts: bool) -> Shape:
    if not prompts:
        return {"seqs": c["batch"], "kv_tokens": c["batch"] * (c["past"] + 1)}
    query, batch = c["query"], c["batch"]
    pairs = batch * (query * c["past"] + 0.5 * query * (query + 1))
    return {"rows": batch * query, "chunks": batch, "pairs": pairs, "kv_tokens": batch * (c["past"] + query)}


def module(m: Measurement, device: Datasheet) -> Iterator[Part]:
    kind: AttentionKind = "csa" if m.labels["layer"] == "csa" else "hca"
    prompts = "seq_len" in m.columns
    names = {"batch": "batch_size", "past": "kv_len", "heads": "num_heads", **({"query": "seq_len"} if prompts else {})}
    rows, columns = pick(m, _formats(m, device), names)
    if not len(rows):
        return

    def matrices(label: str, heads: int) -> list[tuple[str, int, int]]:
        spec, attention = _deepseek(label)
        return attention.matrices(spec.hidden, kind, attention.n_heads // heads)

    columns["products_s"] = _products_s(m, device, rows, matrices)
    columns["in_blocks"] = (m.columns["gemm_dtype"][rows] == "fp8_block").astype(float)
    shapes = [_deepseek(label) for label in m.columns["model"][rows].tolist()]
    columns["hidden"] = np.array([float(spec.hidden) for spec, _ in shapes])
    columns["chosen"] = np.array([float(attention.index_topk) for _, attention in shapes])
    spec, a = shapes[0]
    compress, choosing = float(a.tokens_of(kind)), kind == "csa"

    def shape(c: Columns) -> Shape:
        found: Shape = {
            "heads": c["heads"], "head_dim": a.head_dim, "hidden": c["hidden"], "compress": compress,
            "window": float(spec.compressed_window), "products_s": c["products_s"], "in_blocks": c["in_blocks"],
            "chosen": c["chosen"] if choosing else None, "index_flops": 2.0 * a.index_heads * a.index_dim if choosing else 0.0,
            "flat_until": kernels_of(m.source).equal_scores_until if choosing else None, **_sums(c, prompts),
        }  # fmt: skip
        if prompts:
            return {**found, "token_bytes": spec.compressed_bytes_per_token(kind)}
        return {**found, "token_bytes": a.index_bytes / compress if choosing else 0.0, "entry_bytes": a.entry_bytes}

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


def blocks(m: Measurement, device: Datasheet) -> Iterator[Part]:
    """MiniMax-M3's attention to chosen blocks of tokens, each of which is a key."""
    prompts = "seq_len" in m.columns
    names = {"batch": "batch_size", "past": "kv_len", "heads": "num_heads", **({"query": "seq_len"} if prompts else {})}
    spec = catalogue_model("minimax-m3")
    a = spec.attention
    assert isinstance(a, Attention)

    def shape(c: Columns) -> Shape:
        entry_bytes = (
            np.maximum(1.0, a.n_kv_heads * c["heads"] / a.n_heads) * (a.head_dim + a.v_dim) * c["number_bytes"]
        )
        index_bytes = a.index_dim * c["number_bytes"]
        found: Shape = {
            "heads": c["heads"], "head_dim": a.head_dim, "hidden": float(spec.hidden), "compress": 1.0, "window": 0.0,
            "products_s": c["products_s"], "in_blocks": c["in_blocks"], "chosen": float(a.index_tokens),
            "multiplied_heads": np.maximum(c["heads"], a.n_heads / a.n_kv_heads),
            "index_flops": 2.0 * a.index_heads * a.index_dim, **_sums(c, prompts),
        }  # fmt: skip
        if prompts:
            return {**found, "token_bytes": entry_bytes + index_bytes}
        return {**found, "token_bytes": index_bytes, "entry_bytes": entry_bytes}

    for name, number_bytes, kind in (("bf16", 2.0, "msa"), ("fp8", 1.0, "msa-fp8")):
        rows, columns = pick(m, _formats(m, device) & (m.columns["kv_dtype"] == name), names)
        if not len(rows):
            continue
        columns["products_s"] = _products_s(
            m, device, rows, lambda _, heads: a.matrices(spec.hidden, "blocks", a.n_heads // heads)
        )
        columns["in_blocks"] = (m.columns["gemm_dtype"][rows] == "fp8_block").astype(float)
        columns["number_bytes"] = np.full(len(rows), number_bytes)
        both = len(np.unique(columns["in_blocks"])) > 1
        fixed = ("wide_s", "flat_s", "flat_query_s", "flat_token_s", *(() if both else ("block_starts_s",)))
        yield Part(
            form=COMPRESSED_PREFILL if prompts else COMPRESSED_DECODE, sheet=device,
            variants=(f"{kind}/{m.source}", f"msa/{m.source}"), rows=rows, columns=columns, shape=shape, groups=("heads", "batch"),
            fixed=(*fixed, *(() if prompts else ("sequence_s", "walk_s"))),
            starts=tuple(replace(_without_choice(start), choose_s=1e-5, wide_s=0.0, walk_s=1e-8 * prompts) for start in _STARTS),
        )  # fmt: skip


def sparse(m: Measurement, device: Datasheet) -> Iterator[Part]:
    """Latent attention to chosen tokens (DeepSeek-V3.2, GLM-5): layers that choose them, and (`shared`) layers that take what
    another chose.

    Short prompts to which SGLang attends densely run another kernel: they are compared, and fit nothing.
    """
    every_row = np.ones(len(m))
    chooses = m.columns.get("indexer", every_row) > 0
    dense = np.char.startswith(m.columns.get("kernel", every_row.astype(str)).astype(str), "dense")
    for choosing, cache, fitted in itertools.product((True, False), CACHE_BYTES, (True, False)):
        mask = (chooses == choosing) & (m.columns["kv_dtype"] == cache) & (dense != fitted)
        yield from _sparse_part(m, device, mask, choosing, cache, fitted)


def _sparse_part(
    m: Measurement, device: Datasheet, mask: np.ndarray, choosing: bool, cache: str, fitted: bool
) -> Iterator[Part]:
    prompts = "seq_len" in m.columns
    names = {"batch": "batch_size", "past": "kv_len", "heads": "num_heads", **({"query": "seq_len"} if prompts else {})}
    rows, columns = pick(m, _formats(m, device) & mask, names)
    if not len(rows):
        return
    specs = [catalogue_model(label) for label in m.columns["model"][rows].tolist()]
    latent = _latent_of(specs[0])
    columns["products_s"] = _products_s(m, device, rows, functools.partial(_sparse_matrices, choosing=choosing))
    columns["products_s"] += _head_products_s(device, specs, columns)
    columns["in_blocks"] = (m.columns["gemm_dtype"][rows] == "fp8_block").astype(float)
    columns["hidden"] = np.array([float(spec.hidden) for spec in specs])
    columns["index_flops"] = np.array([2.0 * _latent_of(spec).index_heads * latent.index_dim for spec in specs])
    scored_bytes = float(specs[0].index_bytes_per_layer()) * choosing
    entry_bytes = (latent.kv_lora_rank + latent.rope_dim) * CACHE_BYTES[cache]

    def shape(c: Columns) -> Shape:
        found: Shape = {
            "heads": c["heads"], "head_dim": latent.absorbed_width, "hidden": c["hidden"], "compress": 1.0, "window": 0.0,
            "products_s": c["products_s"], "in_blocks": c["in_blocks"], "chosen": float(latent.index_topk),
            "index_flops": c["index_flops"] * choosing, "token_bytes": scored_bytes,
            "multiplied_heads": np.maximum(c["heads"], float(HEAD_TILE)), **_sums(c, prompts),
        }  # fmt: skip
        return found if prompts else {**found, "entry_bytes": entry_bytes}

    both = len(np.unique(columns["in_blocks"])) > 1
    fixed = (
        *("flat_s", "flat_query_s", "flat_token_s", "walk_s", "sequence_s"),
        *(() if both else ("block_starts_s",)),
        *(() if choosing else ("score_efficiency", "choose_s")),
    )
    name = "dsa" if choosing else "dsa-shared"
    own = f"{name}-fp8" if cache == "fp8" else name
    yield Part(
        form=COMPRESSED_PREFILL if prompts else COMPRESSED_DECODE, sheet=device,
        variants=tuple(dict.fromkeys((f"{own}/{m.source}", f"{name}/{m.source}"))), rows=rows, columns=columns, shape=shape,
        groups=("heads", "batch") if fitted else (), fixed=fixed,
        starts=tuple(replace(_without_choice(start), choose_s=1e-5 * choosing, sequence_s=0.0) for start in _STARTS),
    )  # fmt: skip


def _latent_of(spec: ModelSpec) -> LatentAttention:
    if not isinstance(spec.attention, LatentAttention) or not spec.attention.index_topk:
        raise ValueError(f"the attention of {spec.name} does not choose among latent keys")
    return spec.attention


def _sparse_matrices(label: str, heads: int, *, choosing: bool) -> list[tuple[str, int, int]]:
    spec = catalogue_model(label)
    latent = _latent_of(spec)
    found = [each for each in latent.matrices(spec.hidden, "window", latent.n_heads // heads) if each[0] != EXPAND]
    return [*found, *(latent.index_matrices(spec.hidden) if choosing else ())]


def _head_products_s(device: Datasheet, specs: Sequence[ModelSpec], columns: Columns) -> np.ndarray:
    """Seconds of the products head by head in each row, in 16 bits, which a run prices by themselves."""
    params = load_profile(device.name).get("mla_bmm", ["bf16/cublas"])
    tokens = columns["batch"] * columns.get("query", np.ones(len(specs)))
    latents = [_latent_of(spec) for spec in specs]
    found = np.zeros(len(specs))
    for n, k in (("kv_lora_rank", "nope_dim"), ("v_dim", "kv_lora_rank")):
        wide, deep = (np.array([float(getattr(each, name)) for each in latents]) for name in (n, k))
        found += MLA_BMM.seconds(params, device, {"tokens": tokens, "heads": columns["heads"], "n": wide, "k": deep})
    return found


def hyper_connections(m: Measurement, device: Datasheet) -> Iterator[Part]:
    """Both places of a layer in one time."""
    for op in ("pre", "post"):
        rows, columns = pick(m, m.columns["op"] == op, {"rows": "num_tokens", "width": "hidden_size"})
        if len(rows):
            part = elementwise_part(device, f"mhc_{op}", (f"mhc_{op}/{m.source}",), rows, columns, calls=2.0)
            # What the one place wrote lies in the cache beside what the other writes.
            yield replace(part, groups=("rows", "width"), shape=lambda c, own=part.shape: {**own(c), "footprint": 2.0})
