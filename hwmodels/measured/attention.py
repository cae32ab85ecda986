"""Attention of prompts, decodes and both at once; grouped, latent, and on CPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from hwmodels.kernels.attention import WIDEST_GROUP, DecodeParams, PrefillParams
from hwmodels.kernels.cpu import CpuAttentionParams
from hwmodels.kernels.families import CPU_DECODE, CPU_PREFILL, DECODE, MIXED, MLA_DECODE, MLA_PREFILL, PREFILL
from hwmodels.kernels.form import KernelForm
from hwmodels.kernels.mla import MlaParams
from hwmodels.kernels.parameters import Datasheet
from hwmodels.measured.files import Measurement
from hwmodels.measured.kinds import CALIBRATING
from hwmodels.measured.names import HEADS, catalogue_model
from hwmodels.measured.part import Columns, Part, Shape, every, pick
from hwmodels.model import Attention

_CACHE_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0}
_HEAD_COLUMNS = {"batch": "batch_size", "heads": "num_heads", "kv_heads": "num_kv_heads", "head_dim": "head_dim"}
WIDEST_HEAD = 256.0  # wider heads run a fallback kernel, up to 200 times slower than the bandwidth allows


def _causal(b: np.ndarray, q: np.ndarray, past: np.ndarray) -> Shape:
    """Sums of b chunks of q tokens each behind as many of the past."""
    return {"rows": b * q, "pairs": b * (q * past + q * (q + 1) / 2), "kv_tokens": b * (q + past)}


def _heads(c: Columns) -> Shape:
    return {name: c[name] for name in ("heads", "kv_heads", "head_dim")}


def _alone(m: Measurement) -> Shape:
    """How benchmarks of one layer differ from a served model."""
    return {"resident": True, "kv_bytes": 2.0 if m.source in CALIBRATING else _CACHE_BYTES[m.dtype]}


def _prefill_part(
    m: Measurement, device: Datasheet, rows: np.ndarray, columns: dict[str, np.ndarray], groups: tuple[str, ...]
) -> Part:
    def shape(c: Columns) -> Shape:
        b, q, past = c["batch"], c["query"], c["past"]
        return {"chunks": b, "longest_kv": q + past, **_causal(b, q, past), **_heads(c), **_alone(m)}

    return Part(
        form=PREFILL, sheet=device, variants=(m.source, "vllm"), rows=rows, columns=columns, shape=shape, groups=groups,
        starts=(PrefillParams(), PrefillParams(launch_s=3e-6)),
    )  # fmt: skip


def _decode_part(
    m: Measurement, device: Datasheet, rows: np.ndarray, columns: dict[str, np.ndarray], groups: tuple[str, ...]
) -> Part:
    widest = WIDEST_GROUP.get(m.source, np.inf)

    def shape(c: Columns) -> Shape:
        b, kv = c["batch"], c["kv"]
        sums = {"seqs": b, "kv_tokens": b * kv, "longest_kv": kv, "query_width": c.get("width", 1)}
        return {"widest_group": widest, **sums, **_heads(c), **_alone(m)}

    return Part(
        form=DECODE, sheet=device, variants=(m.source, "vllm"), rows=rows, columns=columns, shape=shape, groups=groups,
        starts=(DecodeParams(), DecodeParams(single_blocks=1.0), DecodeParams(launch_s=3e-6, combine_s=0.0)),
    )  # fmt: skip


def _on_cpu(m: Measurement, device: Datasheet, form: KernelForm[CpuAttentionParams]) -> Part:
    query, past = ("query_len", "kv_len") if form is CPU_DECODE else ("seq_len", "past_len")
    rows, columns = pick(m, every(m), dict(_HEAD_COLUMNS))
    ones = np.ones(len(rows))
    columns["query"], columns["past"] = m.columns.get(query, ones), m.columns.get(past, 0.0 * ones)

    def shape(c: Columns) -> Shape:
        b = c["batch"]
        format_of = {"dtype": m.dtype, "kv_bytes": m.number_bytes}
        return {"sequences": b, **_causal(b, c["query"], c["past"]), **_heads(c), **format_of}

    return Part(
        form=form, sheet=device, variants=(f"{m.dtype}/{m.source}",), rows=rows, columns=columns, shape=shape,
        groups=("batch", "past", "query"),
        starts=(CpuAttentionParams(), CpuAttentionParams(compute_efficiency=0.1, softmax_flops=300.0)),
    )  # fmt: skip


def prefill(m: Measurement, device: Datasheet) -> Iterator[Part]:
    if m.on_cpu:
        yield _on_cpu(m, device, CPU_PREFILL)
        return
    if m.dtype not in _CACHE_BYTES:
        return
    usual = m.columns["head_dim"] <= WIDEST_HEAD
    # vLLM runs a prompt of one token as a decode without a past: predicted so, and not fitted.
    single = (m.columns["seq_len"] <= 1) & (m.source != "trtllm")
    rows, columns = pick(m, usual & ~single, {**_HEAD_COLUMNS, "query": "seq_len"})
    columns["past"] = m.columns["past_len"][rows] if "past_len" in m.columns else 0.0 * columns["query"]
    yield _prefill_part(m, device, rows, columns, ("heads", "kv_heads", "head_dim"))
    rows, columns = pick(m, usual & single, {**_HEAD_COLUMNS, "kv": "seq_len"})
    if len(rows):
        yield _decode_part(m, device, rows, columns, ())


def decode(m: Measurement, device: Datasheet) -> Iterator[Part]:
    if m.on_cpu:
        yield _on_cpu(m, device, CPU_DECODE)
        return
    if m.dtype not in _CACHE_BYTES:
        return
    rows, columns = pick(m, m.columns["head_dim"] <= WIDEST_HEAD, {**_HEAD_COLUMNS, "kv": "kv_len"})
    columns["width"] = m.columns["query_len"][rows] if "query_len" in m.columns else np.ones(len(rows))
    columns["kv"] = columns["kv"] + columns["width"]
    yield _decode_part(m, device, rows, columns, ("heads", "kv_heads", "head_dim"))


def _heads_of(m: Measurement) -> tuple[float, float, float]:
    model, tp = m.labels["model"], float(m.labels.get("tp", "1"))
    if model not in HEADS:
        found = catalogue_model(model).attention
        if not isinstance(found, Attention):
            raise ValueError(f"{model} has latent attention; the columns of {m.path.name} describe heads")
        return found.n_heads / tp, max(1.0, found.n_kv_heads / tp), float(found.head_dim)
    heads, kv_heads, head_dim = HEADS[model]
    return heads / tp, max(1.0, kv_heads / tp), float(head_dim)


def mixed(m: Measurement, device: Datasheet) -> Iterator[Part]:
    heads, kv_heads, head_dim = _heads_of(m)
    prompt, decodes = m.columns["prefill_chunk"] > 0, m.columns["n_decode"] > 0
    of_model = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}

    def filled(mask: np.ndarray, names: Mapping[str, str]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        rows, columns = pick(m, mask, names)
        return rows, columns | {name: np.full(len(rows), value) for name, value in of_model.items()}

    rows, columns = filled(prompt & ~decodes, {"query": "prefill_chunk", "past": "kv_prefill"})
    columns["batch"] = np.ones(len(rows))
    yield _prefill_part(m, device, rows, columns, ("query", "past"))
    rows, columns = filled(decodes & ~prompt, {"batch": "n_decode", "kv": "kv_decode"})
    columns["kv"] = columns["kv"] + 1.0
    yield _decode_part(m, device, rows, columns, ("batch", "kv"))
    rows, columns = filled(
        prompt & decodes, {"query": "prefill_chunk", "past": "kv_prefill", "seqs": "n_decode", "kv": "kv_decode"}
    )

    def shape(c: Columns) -> Shape:
        q, past, kv = c["query"], c["past"], c["kv"] + 1.0
        one = np.ones_like(q)
        decoding = {"seqs": c["seqs"], "decode_kv_tokens": c["seqs"] * kv, "longest_kv": np.maximum(q + past, kv)}
        return {"chunks": one, "resident": True, **_causal(one, q, past), **decoding, **_heads(c)}

    yield Part(
        form=MIXED, sheet=device, variants=(m.source, "lss"), rows=rows, columns=columns, shape=shape,
        groups=("query", "past"), starts=(PrefillParams(unpacked=0.5, padding=2.0, block_s=5e-6),),
    )  # fmt: skip


def paged(m: Measurement, device: Datasheet) -> Iterator[Part]:
    names = {"batch": "batch_size", "heads": "heads_per_rank", "kv_heads": "kv_heads_per_rank"}
    prompt = m.columns["is_prefill"]
    rows, columns = pick(m, prompt, {**names, "query": "prefill_chunk_size", "past": "kv_cache_size"})
    columns["head_dim"] = np.full(len(rows), 128.0)
    yield _prefill_part(m, device, rows, columns, ("query", "past"))
    # Fewer cached tokens than sequences: some have no cache, and the profiled kernel returned at once.
    cached = m.columns["kv_cache_size"] >= 2 * m.columns["batch_size"]
    rows, columns = pick(m, ~prompt & cached, {**names, "kv": "kv_cache_size"})
    # On GPUs the column sums the batch (times fall with the batch at one size); on the TPU it is each sequence's.
    columns["kv"] = columns["kv"] / columns["batch"] + 1.0
    columns["head_dim"] = np.full(len(rows), 128.0)
    yield _decode_part(m, device, rows, columns, ("batch", "kv"))


def latent(m: Measurement, device: Datasheet) -> Iterator[Part]:
    if m.dtype not in _CACHE_BYTES:
        return
    width = _CACHE_BYTES[m.dtype]
    rows, columns = pick(m, every(m), {"batch": "batch_size", "isl": "isl", "step": "step", "heads": "num_heads"})

    def of_decodes(c: Columns) -> Shape:
        kv = c["batch"] * (c["isl"] + c["step"])
        return {"seqs": c["batch"], "kv_tokens": kv, "heads": c["heads"], "kv_bytes": width}

    def of_prompts(c: Columns) -> Shape:
        sums = _causal(c["batch"], c["isl"], c["step"])
        return {"chunks": c["batch"], **sums, "heads": c["heads"], "kv_bytes": width}

    decodes, source = m.labels["phase"] == "decode", m.source or "vllm"
    variants = (source, "vllm") if m.dtype == "bf16" else (f"{m.dtype}/{source}", source, "vllm")
    yield Part(
        form=MLA_DECODE if decodes else MLA_PREFILL, sheet=device, variants=variants, rows=rows,
        columns=columns, shape=of_decodes if decodes else of_prompts, groups=("heads", "batch", "isl", "step"),
        starts=(MlaParams(),),
    )  # fmt: skip
