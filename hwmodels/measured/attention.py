"""Attention of prompts, decodes and both at once, with windows and without, and on CPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from hwmodels.kernels.attention import WIDE_HEADS, DecodeParams, PrefillParams, kernel_source, widest_group
from hwmodels.kernels.cpu import CpuAttentionParams
from hwmodels.kernels.families import CPU_DECODE, CPU_PREFILL, DECODE, ENCODER, MIXED, PREFILL
from hwmodels.kernels.form import KernelForm
from hwmodels.kernels.parameters import Datasheet, optional_defaults
from hwmodels.measured.files import Measurement
from hwmodels.measured.kinds import CALIBRATING
from hwmodels.measured.names import HEADS, catalogue_model
from hwmodels.measured.part import Columns, Part, Shape, every, pick
from hwmodels.model import Attention
from hwmodels.stacks import default_stack, kernels_of

CACHE_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0, "fp8q": 1.0}
_HEAD_COLUMNS = {"batch": "batch_size", "heads": "num_heads", "kv_heads": "num_kv_heads", "head_dim": "head_dim"}
_SHAPE = ("heads", "kv_heads", "head_dim")
_STRATA = ("head_dim", "window", "alone")
_FEWEST_ROWS = 30  # that determine the parameters of a kernel of its own


def causal(b: np.ndarray, q: np.ndarray, past: np.ndarray, window: np.ndarray | float = np.inf) -> Shape:
    """Sums of b chunks of q tokens each behind as many of the past, where a query sees `window` keys at the most."""
    rising = np.minimum(q, np.maximum(0.0, window - past))
    level = np.where(q > rising, np.minimum(window, past + q), 0.0)
    pairs = rising * past + rising * (rising + 1) / 2 + (q - rising) * level
    return {"rows": b * q, "pairs": b * pairs, "kv_tokens": b * (q + past)}


def _heads(c: Columns) -> Shape:
    return {name: c[name] for name in ("heads", "kv_heads", "head_dim")}


def _formats(m: Measurement, fmt: str) -> Shape:
    """The ways in which benchmarks of one layer differ from a served model; 8-bit queries are multiplied at the 8-bit rate."""
    kv_bytes = 2.0 if m.source in CALIBRATING else CACHE_BYTES[fmt]
    return {"resident": True, "kv_bytes": kv_bytes, **({"dtype": "fp8"} if fmt == "fp8q" else {})}


def variants_of(source: str, fmt: str) -> tuple[str, ...]:
    """Parameter sets for a software and a format (of the cache; fp8q: of the queries too), the best first."""
    wanted = {"fp8": ("fp8/", ""), "fp8q": ("fp8q/", "fp8/", "")}.get(fmt, ("",))
    names = dict.fromkeys((source, source.partition("-")[0], default_stack().name))
    return tuple(prefix + name for name in names for prefix in wanted)


def _unseen(kind: type[PrefillParams] | type[DecodeParams], columns: Columns) -> tuple[str, ...]:
    """Optional parameters of which these rows say nothing."""
    unseen = {name for name in optional_defaults(kind) if "window" in name or name.startswith("beyond")}
    if (columns["window"] < np.inf).sum() >= _FEWEST_ROWS:
        unseen = set()
    seen_any = (columns["head_dim"] <= min(above for above, _ in WIDE_HEADS.values())).any()
    for width, (above, up_to) in WIDE_HEADS.items():
        rows = (columns["head_dim"] > above) & (columns["head_dim"] <= up_to)
        # Where all heads are wide, the narrowest are what wider ones are compared with.
        if rows.sum() < _FEWEST_ROWS or not seen_any:
            unseen |= {name for name in optional_defaults(kind) if f"_{width}" in name}
        seen_any = seen_any or bool(rows.any())
    return tuple(sorted(unseen))


def _prefill_part(
    m: Measurement,
    device: Datasheet,
    rows: np.ndarray,
    columns: dict[str, np.ndarray],
    groups: tuple[str, ...],
    fmt: str = "",
) -> Part:
    fmt = fmt or m.dtype
    columns.setdefault("window", np.full(len(rows), np.inf))
    columns["alone"] = columns["heads"] == columns["kv_heads"]

    def shape(c: Columns) -> Shape:
        b, q, past, window = c["batch"], c["query"], c["past"], c["window"]
        sums = {"chunks": b, "longest_kv": q + past, "window_tokens": window, **causal(b, q, past, window)}
        return {**sums, **_heads(c), **_formats(m, fmt)}

    return Part(
        form=PREFILL, sheet=device, variants=variants_of(m.source, fmt), rows=rows, columns=columns, shape=shape,
        groups=groups, strata=_STRATA if "head_dim" in groups else (),
        starts=(PrefillParams(), PrefillParams(launch_s=3e-6)), fixed=_unseen(PrefillParams, columns),
    )  # fmt: skip


def _decode_part(
    m: Measurement,
    device: Datasheet,
    rows: np.ndarray,
    columns: dict[str, np.ndarray],
    groups: tuple[str, ...],
    fmt: str = "",
) -> Part:
    fmt = fmt or m.dtype
    widest = widest_group(m.source)
    columns.setdefault("window", np.full(len(rows), np.inf))
    columns.setdefault("width", np.ones(len(rows)))
    columns["alone"] = columns["heads"] == columns["kv_heads"]

    def shape(c: Columns) -> Shape:
        b, kv = c["batch"], np.minimum(c["kv"], c["window"])
        sums = {"seqs": b, "kv_tokens": b * kv, "beyond_tokens": b * (c["kv"] - kv), "longest_kv": kv}
        return {"widest_group": widest, "query_width": c["width"], **sums, **_heads(c), **_formats(m, fmt)}

    return Part(
        form=DECODE, sheet=device, variants=variants_of(m.source, fmt), rows=rows, columns=columns, shape=shape,
        groups=groups, strata=_STRATA if "head_dim" in groups else (),
        starts=(DecodeParams(), DecodeParams(single_blocks=1.0), DecodeParams(launch_s=3e-6, combine_s=0.0)),
        fixed=_unseen(DecodeParams, columns),
    )  # fmt: skip


def _on_cpu(m: Measurement, device: Datasheet, form: KernelForm[CpuAttentionParams]) -> Part:
    query, past = ("query_len", "kv_len") if form is CPU_DECODE else ("seq_len", "past_len")
    rows, columns = pick(m, every(m), dict(_HEAD_COLUMNS))
    ones = np.ones(len(rows))
    columns["query"], columns["past"] = m.columns.get(query, ones), m.columns.get(past, 0.0 * ones)

    def shape(c: Columns) -> Shape:
        b = c["batch"]
        format_of = {"dtype": m.dtype, "kv_bytes": m.number_bytes}
        return {"sequences": b, **causal(b, c["query"], c["past"]), **_heads(c), **format_of}

    return Part(
        form=form, sheet=device, variants=(f"{m.dtype}/{m.source}",), rows=rows, columns=columns, shape=shape,
        groups=("batch", "past", "query"),
        starts=(CpuAttentionParams(), CpuAttentionParams(compute_efficiency=0.1, softmax_flops=300.0)),
    )  # fmt: skip


def _by_format(m: Measurement) -> Iterator[tuple[str, np.ndarray]]:
    """Formats of cache and queries in a file, with the rows of each; the name says it, or columns do."""
    if "kv_dtype" not in m.columns:
        if m.dtype in CACHE_BYTES:
            yield m.dtype, every(m)
        return
    queries, cache = m.columns["query_dtype"], m.columns["kv_dtype"]
    yield "bf16", (queries == "bf16") & (cache == "bf16")
    yield "fp8", (queries == "bf16") & (cache == "fp8")
    yield "fp8q", (queries == "fp8") & (cache == "fp8")


def _by_kernel(m: Measurement, device: Datasheet, prompts: bool) -> Iterator[tuple[str, np.ndarray]]:
    """Names of the kernels that a software runs, with the rows of each."""
    c = m.columns
    names = kernel_source(
        m.source, device, prompts=prompts, windowed="window_size" in c, head_dim=c["head_dim"],
        group=c["num_heads"] / c["num_kv_heads"],
    )  # fmt: skip
    for name in np.unique(names).tolist():
        yield name, names == name


def _window_of(m: Measurement, rows: np.ndarray) -> dict[str, np.ndarray]:
    return {"window": m.columns["window_size"][rows]} if "window_size" in m.columns else {}


def encoder(m: Measurement, device: Datasheet) -> Iterator[Part]:
    """Attention of vision encoders, in which every token of a sequence sees every other: a part for each width of a head."""
    names = {"batch": "batch_size", "heads": "num_heads", "query": "seq_len", "head_dim": "head_dim"}

    def shape(c: Columns) -> Shape:
        tokens = c["batch"] * c["query"]
        return {
            "chunks": c["batch"], "rows": tokens, "pairs": tokens * c["query"], "kv_tokens": tokens, "heads": c["heads"],
            "kv_heads": c["heads"], "head_dim": c["head_dim"], "longest_kv": c["query"], "resident": True,
        }  # fmt: skip

    for width in np.unique(m.columns["head_dim"]).tolist():
        rows, columns = pick(m, m.columns["head_dim"] == width, names)
        yield Part(
            form=ENCODER, sheet=device, variants=(f"{width:g}/{m.source}",), rows=rows, columns=columns, shape=shape,
            groups=("heads", "query"), starts=(PrefillParams(), PrefillParams(launch_s=3e-6)),
            fixed=("unpacked", *sorted(optional_defaults(PrefillParams).keys() - {"cache_reach"})),
        )  # fmt: skip


def prefill(m: Measurement, device: Datasheet) -> Iterator[Part]:
    if m.on_cpu:
        yield _on_cpu(m, device, CPU_PREFILL)
        return
    # vLLM runs a prompt of one token as a decode without a past: predicted so, and not fitted.
    single = (m.columns["seq_len"] <= 1) & kernels_of(m.source).one_token_is_decode
    for fmt, mask in _by_format(m):
        for source, own in _by_kernel(m, device, True):
            rows, columns = pick(m, mask & own & ~single, {**_HEAD_COLUMNS, "query": "seq_len"})
            columns["past"] = m.columns["past_len"][rows] if "past_len" in m.columns else 0.0 * columns["query"]
            if len(rows):
                columns |= _window_of(m, rows)
                part = _prefill_part(m, device, rows, columns, _SHAPE, fmt)
                # FlashAttention and TensorRT-LLM's kernels pass over the tiles outside a window; Triton's do not.
                fixed = part.fixed if source.endswith("-triton") else (*part.fixed, "window_waste")
                yield replace(part, variants=variants_of(source, fmt), fixed=tuple(dict.fromkeys(fixed)))
        rows, columns = pick(m, mask & single, {**_HEAD_COLUMNS, "kv": "seq_len"})
        if len(rows):
            yield _decode_part(m, device, rows, columns | _window_of(m, rows), (), fmt)


def decode(m: Measurement, device: Datasheet) -> Iterator[Part]:
    if m.on_cpu:
        yield _on_cpu(m, device, CPU_DECODE)
        return
    for fmt, mask in _by_format(m):
        for source, own in _by_kernel(m, device, False):
            rows, columns = pick(m, mask & own, {**_HEAD_COLUMNS, "kv": "kv_len"})
            columns["width"] = m.columns["query_len"][rows] if "query_len" in m.columns else np.ones(len(rows))
            columns["kv"] = columns["kv"] + columns["width"]
            if len(rows):
                columns |= _window_of(m, rows)
                yield replace(_decode_part(m, device, rows, columns, _SHAPE, fmt), variants=variants_of(source, fmt))


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
        return {"chunks": one, "resident": True, **causal(one, q, past), **decoding, **_heads(c)}

    yield Part(
        form=MIXED, sheet=device, variants=(m.source, "lss"), rows=rows, columns=columns, shape=shape,
        groups=("query", "past"), starts=(PrefillParams(unpacked=0.5, padding=2.0, block_s=5e-6),),
        fixed=tuple(optional_defaults(PrefillParams)),
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
