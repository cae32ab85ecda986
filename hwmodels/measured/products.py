"""Matrix products, and what runs between them: normalisation, activation, residuals, whole layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from hwmodels.kernels.cpu import CpuGemmParams
from hwmodels.kernels.elementwise import OPS, ElementwiseParams
from hwmodels.kernels.families import CPU_GEMM, ELEMENTWISE, GEMM
from hwmodels.kernels.gemm import QUANTISE_FIELDS, GemmParams, library_of
from hwmodels.kernels.parameters import Datasheet
from hwmodels.measured.files import Measurement
from hwmodels.measured.kinds import CALIBRATING
from hwmodels.measured.part import Columns, Part, Shape, every, pick
from hwmodels.precision import precision
from hwmodels.stacks import kernels_of, servers

# Formats of operands below 16 bits whose products are timed, and the arithmetic of each.
_NARROW = {"fp8": "fp8", "fp8_block": "fp8", "int8": "int8", "nvfp4": "fp4", "mxfp4": "fp4"}
_NARROW_START = GemmParams(launch_s=5e-6, fill_k=500.0, tile_edge=2.0, l2_intensity=60.0, block_bandwidth=3.0)
# Tables that may stand in for one of a narrow format, the best first.
_STAND_IN = {"fp8_block": ("fp8_block", "fp8"), "fp8": ("fp8",), "int8": ("int8", "fp8"), "nvfp4": ("nvfp4", "fp8")}
# The mean of what NVIDIA's tables hold of it: AITER's operands are in the format already.
_LENT_QUANTISATION = {"quantise_efficiency": 0.5, "quantise_short_row_s": 5e-8}


def _gemm_options(dtype: str, source: str, device: str) -> dict[str, Any]:
    """The options with which a benchmark of this software and format ran its GEMMs."""
    number = precision(dtype)
    options: dict[str, Any] = {
        "dtype": _NARROW.get(dtype, dtype), "weight_bytes": number.weight_bytes, "activation_bytes": number.weight_bytes,
    }  # fmt: skip
    if source in CALIBRATING:  # cuBLAS on operands that are in the format already, from buffers larger than the cache
        return options | {"weight_copies": np.inf}
    if source == "aiter":  # the same, rotated over more memory than any cache holds
        return options | {"weight_copies": np.inf, "library": library_of(dtype, source, device)}
    if dtype in _NARROW:
        options |= {"quantise_activations": True, "library": library_of(dtype, source, device)}
    return options | {"weight_copies": kernels_of(source).weight_copies}


def _gemm_part(m: Measurement, device: Datasheet, mask: np.ndarray) -> Part:
    source, dtype = m.source, m.dtype
    rows, columns = pick(m, mask, {"m": "m", "n": "n", "k": "k"})
    device.flops_per_s(_NARROW.get(dtype, dtype))  # ValueError where the device does not multiply the format
    stands_in = kernels_of(source).gemm_timed_as.get(dtype, ())
    options = _gemm_options(dtype, next(iter(stands_in), source), device.name)
    fixed = () if options.get("quantise_activations") else QUANTISE_FIELDS
    start = GemmParams(launch_s=3e-5) if source == "llmcompass" else GemmParams()
    if dtype in _NARROW and source not in CALIBRATING:
        start, fixed = _NARROW_START, ("split_s",)
    starts = (start,)
    if source == "aiter":
        lent = _LENT_QUANTISATION if dtype in _NARROW else {}
        starts = (GemmParams(launch_s=2e-6, **lent), replace(_NARROW_START, **lent))
        fixed = QUANTISE_FIELDS
    if source == "llmcompass":  # 20 points: what a few large shapes can tell
        fixed = (*QUANTISE_FIELDS, "cache_gain", "block_bandwidth", "split_s", "throttle_after_s", "wave_softness",
                 "l2_intensity", "fill_k")  # fmt: skip
    return Part(
        form=GEMM,
        sheet=device,
        variants=tuple(
            f"{fmt}/{name}"
            for fmt in (_STAND_IN.get(dtype, (dtype,)) if source not in CALIBRATING else (dtype,))
            for name in stands_in or dict.fromkeys((source, *servers(), "vidur", "aiter"))
        ),
        rows=rows,
        columns=columns,
        shape=lambda c: {**c, **options},
        groups=() if stands_in else ("n", "k"),
        starts=starts,
        fixed=fixed,
    )


def _on_cpu(m: Measurement, device: Datasheet) -> Part:
    rows, columns = pick(m, every(m), {"m": "m", "n": "n", "k": "k"})
    return Part(
        form=CPU_GEMM, sheet=device, variants=(f"{m.dtype}/{m.source}",), rows=rows, columns=columns,
        shape=lambda c: {**c, "dtype": m.dtype, "number_bytes": m.number_bytes}, groups=("n", "k"),
        starts=(CpuGemmParams(), CpuGemmParams(launch_s=2e-5, vector_efficiency=1.0, bandwidth_efficiency=0.4),
                CpuGemmParams(launch_s=2e-5, vector_efficiency=1.0, extra_rows=4.0, overlap_loss=1.0)),
    )  # fmt: skip


def gemm(m: Measurement, device: Datasheet) -> Iterator[Part]:
    if m.on_cpu:
        yield _on_cpu(m, device)
    elif m.dtype in ("fp32", "bf16", *_NARROW):
        yield _gemm_part(m, device, every(m))


def elementwise_part(
    device: Datasheet, op: str, variants: tuple[str, ...], rows: np.ndarray, columns: dict[str, np.ndarray],
    calls: float = 1.0, number_bytes: float = 2.0, fixed: tuple[str, ...] = ("number_s",),
) -> Part:  # fmt: skip
    def shape(c: Columns) -> Shape:
        return {"gated": False, **c, "op": op, "bytes_per_number": number_bytes}

    return Part(
        form=ELEMENTWISE, sheet=device, variants=variants, rows=rows, columns=columns, shape=shape, groups=("rows",),
        starts=(ElementwiseParams(), ElementwiseParams(launch_s=2e-5)), fixed=fixed, calls=calls,
    )  # fmt: skip


def quantize(m: Measurement, device: Datasheet) -> Iterator[Part]:
    """16-bit activations to 8 bits with a scale that is given."""
    if m.dtype == "fp8":
        yield _quantisation(m, device, "quantise", *(f"quantise/{name}" for name in servers() if name != m.source))


def compute_scale(m: Measurement, device: Datasheet) -> Iterator[Part]:
    """The time that finding the scale in the call adds to the quantisation of 16-bit activations with a scale that is given.

    Where one kernel finds each row's scale and quantises it, that kernel.
    """
    if m.dtype == "fp8":
        yield _quantisation(m, device, "quantise-token" if kernels_of(m.source).quantises_by_row else "scale")


def _quantisation(m: Measurement, device: Datasheet, name: str, *others: str) -> Part:
    rows, columns = pick(m, every(m), {"rows": "m", "width": "k"})
    part = elementwise_part(
        device, "scale" if name == "scale" else "quantise", (f"{name}/{m.source}", *others), rows, columns
    )
    # A row's time grows with its width where one block has it, so that widths are what has to be held back.
    return replace(part, fixed=(), groups=("width",)) if kernels_of(m.source).quantises_by_row else part


_VIDUR_OPS = {
    "add": "add", "attn_rope": "rope", "emb": "embedding", "input_layernorm": "norm", "mlp_act": "act",
    "post_attention_layernorm": "norm",
}  # fmt: skip


def elementwise(m: Measurement, device: Datasheet) -> Iterator[Part]:
    if m.source in CALIBRATING:
        for op in np.unique(m.columns["op"]):
            if op in OPS:
                rows, columns = pick(m, m.columns["op"] == op, {"rows": "m", "width": "width"})
                yield elementwise_part(
                    device, str(op), (f"{op}/{m.source}",), rows, columns, number_bytes=m.number_bytes,
                    fixed=("row_s", "overlap_loss", "number_s"),  # a handful of points for each operation
                )  # fmt: skip
        return
    ops = np.array([_VIDUR_OPS.get(str(op), "") for op in m.columns["op"]])
    for op in np.unique(ops):
        for gated in (True, False):
            mask = (ops == op) & (m.columns["gated"] == gated)
            if not op or not mask.any():
                continue
            rows, columns = pick(m, mask, {"rows": "m", "width": "width", "gated": "gated"})
            # Models with a gated feed-forward use RMSNorm from elementary kernels; the others LayerNorm from one, and
            # add attention and feed-forward to the residual in two calls.
            name = "layer-norm" if op == "norm" and not gated else op
            calls = 2.0 if op == "add" and not gated else 1.0
            variants = (f"{name}/{m.source}", f"{op}/{m.source}", f"{op}/lss", f"{op}/llmcompass")
            yield elementwise_part(device, op, variants, rows, columns, calls)


def elementwise_rates(m: Measurement, device: Datasheet) -> Iterator[Part]:
    for name, op in (("gelu", "act"), ("layernorm", "norm"), ("softmax", "softmax")):
        mask = m.columns["op"] == name
        if mask.any():
            rows, columns = pick(m, mask, {"rows": "rows", "width": "cols"})
            # gelu ran over one long vector: rows of 1024 numbers stand for its blocks.
            if op == "act":
                columns = {"rows": columns["rows"] / 1024.0, "width": np.full(len(rows), 1024.0)}
            yield elementwise_part(device, op, (f"{op}/{m.source}", f"{op}/vidur"), rows, columns)


LAYER_OPS = {
    "act_fn": "act", "embedding": "embedding", "final_layernorm": "norm", "layernorm": "norm", "rotary_emb": "rope",
    "rope": "rope", "sampler": "softmax", "input_layernorm": "norm", "post_layernorm": "norm",
}  # fmt: skip


def layer_widths(m: Measurement, tp: float | None = None) -> dict[str, float]:
    """Widths of the elementwise layers, from the GEMMs of the same file and parallelism."""
    mine = ~np.isnan(m.columns["k"])
    if tp is not None:
        mine &= m.columns["tp"] == tp
    shapes = {
        str(layer): (n, k) for layer, n, k in zip(*(m.columns[c][mine] for c in ("layer", "n", "k")), strict=True)
    }
    inputs = [name for name in ("qkv_proj", "q_proj", "gate_up_proj", "gate_proj") if name in shapes]
    if not inputs:
        raise ValueError("no matrix multiplication in the file says how wide its other layers are; keep their rows")
    hidden = shapes[inputs[0]][1]
    inner = shapes["gate_up_proj"][0] / 2 if "gate_up_proj" in shapes else shapes.get("gate_proj", (hidden, 0))[0]
    rotary = shapes.get("qkv_proj", shapes.get("q_proj", (hidden, 0)))[0]
    vocabulary = shapes.get("lm_head", (hidden, 0))[0]
    widths = {"norm": hidden, "embedding": hidden, "act": inner, "rope": rotary, "softmax": vocabulary}
    return {name: float(width) for name, width in widths.items()}


def layers(m: Measurement, device: Datasheet) -> Iterator[Part]:
    matrix = ~np.isnan(m.columns["k"])
    yield _gemm_part(m, device, matrix)
    for layer in np.unique(m.columns["layer"][~matrix]):
        op = LAYER_OPS.get(str(layer))
        mask = ~matrix & (m.columns["layer"] == layer)
        if op is None:
            continue
        rows, columns = pick(m, mask, {"rows": "m", "tp": "tp"})
        by_tp = {tp: layer_widths(m, tp)[op] for tp in np.unique(columns["tp"])}
        columns["width"] = np.array([by_tp[tp] for tp in columns.pop("tp")])
        columns["gated"] = np.full(len(rows), op == "act")
        name = str(layer).replace("_", "-") if op in ("norm", "softmax") else op
        yield elementwise_part(device, op, (f"{name}/{m.source}", f"{op}/vidur"), rows, columns)
