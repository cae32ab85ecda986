"""Mixtures of experts: tables by shape and routing, and layers of one model by the experts that were awake."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from hwmodels.kernels.families import MOE
from hwmodels.kernels.moe import ALIGNED, EXPERT_FORMATS, ExpertFormat, MoeParams
from hwmodels.kernels.parameters import Datasheet
from hwmodels.measured.files import Measurement
from hwmodels.measured.names import EXPERTS, catalogue_model
from hwmodels.measured.part import Columns, Part, Shape, every, pick
from hwmodels.stacks import default_stack, kernels_of, servers

# Names of aiconfigurator's tables -> formats of `EXPERT_FORMATS`.
_MOE_DTYPES = {
    "bfloat16": "bf16", "float16": "bf16", "bf16": "bf16", "fp8_block": "fp8_block", "fp8block": "fp8_block", "fp8": "fp8",
    "nvfp4": "nvfp4", "int4_wo": "int4", "w4a16_mxfp4": "mxfp4", "w4a8_mxfp4_mxfp8": "mxfp4_mxfp8",
    "mxfp4": "mxfp4_mxfp4", "w4afp8": "int4_fp8",
}  # fmt: skip
_SHAPE = ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")


def moe(m: Measurement, device: Datasheet) -> Iterator[Part]:
    for name in np.unique(m.columns["moe_dtype"]):
        if str(name) not in _MOE_DTYPES:
            continue
        fmt = EXPERT_FORMATS[_MOE_DTYPES[str(name)]]
        mine = (m.columns["moe_dtype"] == name) & ~unspread(m)
        names = ("hidden_size", "topk", "num_experts")
        layers = np.column_stack([*(m.columns[c] for c in names), ~_nemotron(m.columns)]).astype(int)
        by_kernel: dict[tuple[str, ...], np.ndarray] = {}
        for layer in np.unique(layers[mine], axis=0):
            hidden, topk, experts, gate = layer.tolist()
            variants = fmt.variants(
                dict.fromkeys((m.source, *servers())), layer=(hidden, topk, experts), gated=bool(gate),
                blackwell="fp4" in device.peak_flops_per_s,
            )  # fmt: skip
            rows = mine & (layers == layer).all(axis=1)
            by_kernel[variants] = by_kernel.get(variants, np.zeros(len(m), bool)) | rows
        for variants, rows in by_kernel.items():
            yield _table_part(m, device, rows, fmt, variants)


def _nemotron(c: Columns) -> np.ndarray:
    """Nemotron's experts have two matrices (squared ReLU), all others of the tables three."""
    return (c["topk"] == 22) | ((c["hidden_size"] == 2688) & (c["inter_size"] == 1856))


def _table_part(
    m: Measurement, device: Datasheet, mask: np.ndarray, fmt: ExpertFormat, variants: tuple[str, ...]
) -> Part:
    rows, columns = pick(m, mask, {c: c for c in (*_SHAPE, "num_tokens", "distribution")})
    columns["distribution"] = np.char.replace(columns["distribution"], "uniform_random", "uniform")
    rotated = m.source == "aiter"  # over more memory than any cache holds

    def shape(c: Columns) -> Shape:
        return {
            "tokens": c["num_tokens"], "hidden_size": c["hidden_size"], "inter_size": c["inter_size"],
            "topk": c["topk"], "experts": c["num_experts"], "tp": c["moe_tp_size"], "ep": c["moe_ep_size"],
            "distribution": c["distribution"], "gated": ~_nemotron(c), "weight_copies": np.inf if rotated else 1.0,
            **fmt.options,
        }  # fmt: skip

    models = {tuple(row) for row in np.column_stack([columns[c] for c in _SHAPE[:4]]).tolist()}
    fixed = _FIXED_FOR_FEW_MODELS if len(models) < 4 else ()
    # Kernels for narrow weights pad their rows.
    if fmt.weight_bytes < 2.0 or not (columns["inter_size"] / columns["moe_tp_size"] % ALIGNED > 0).any():
        fixed = tuple(dict.fromkeys((*fixed, "unaligned")))
    if not (kernels_of(m.source).maps_experts and fmt.largest_tile == _EXPANDED_TILE):
        fixed = (*fixed, "map_s")
    # Nor is a tile's own time told from what else grows with the rows.
    if len({tuple(row) for row in np.column_stack([columns[c] for c in _SHAPE]).tolist()}) < _FEW_SPLITS:
        fixed = tuple(dict.fromkeys((*fixed, "tile_s")))
    starts = MOE_STARTS
    if rotated:
        # On one device all experts are local, and no layer stays in a cache.
        fixed = tuple(dict.fromkeys((*_FIXED_FOR_FEW_MODELS, "unaligned", "remote_share")))
        if len(models) < 3:
            fixed, starts = (*fixed, "sort_s", "reread", "overlap_loss", "tile_s"), _FEW_ROTATED
    return Part(
        form=MOE, sheet=device, rows=rows, columns=columns, shape=shape, groups=_SHAPE, starts=starts,
        variants=variants, fixed=fixed,
    )  # fmt: skip


_EXPANDED_TILE = 64
"""Token rows of the largest tile of kernels that expand narrow weights, Marlin's among them."""
_FEW_SPLITS = 4
# What the few shapes of one or two models cannot tell.
_FIXED_FOR_FEW_MODELS = ("l2_intensity", "cache_gain", "expert_s", "inner_passes", "wave_softness")
# One or two layers determine their starts, rates and copies; the rest is as MI355X's block-scaled experts of 18 layers have it.
_FEW_ROTATED = (
    MoeParams(launch_s=1.5e-5, sort_s=1.6e-6, compute_efficiency=0.25, bandwidth_efficiency=0.8, tile_s=0.0, reread=0.3,
              block_bandwidth=1.0, overlap_loss=0.1, slot_passes=4.7),
)  # fmt: skip
MOE_STARTS = (
    MoeParams(),
    MoeParams(launch_s=1.2e-5, block_bandwidth=2.0, tile_s=1e-6, unaligned=2.0, overlap_loss=1.0),
    MoeParams(
        launch_s=2e-5, compute_efficiency=0.5, bandwidth_efficiency=0.7, block_bandwidth=1.2, tile_s=2e-6, reread=0.5,
        unaligned=2.0, slot_passes=8.0, wave_softness=0.2,
    ),
)  # fmt: skip


def unspread(m: Measurement) -> np.ndarray:
    """Rows whose routing follows no known distribution."""
    return np.array(
        [not re.fullmatch(r"balanced|uniform(_random)?|power_law_\d+(\.\d+)?", d) for d in m.columns["distribution"]]
    )


def moe_layer(m: Measurement, device: Datasheet) -> Iterator[Part]:
    model = m.labels["model"]
    if model in EXPERTS:
        hidden, inner, topk, experts = EXPERTS[model]
    else:
        spec = catalogue_model(model)
        if spec.experts is None:
            raise ValueError(f"model {model} has no experts; the columns of {m.path.name} describe them")
        hidden, inner = spec.hidden, spec.experts.ffn
        topk, experts = spec.experts.per_token, spec.experts.n_experts
    layer = {
        "hidden_size": hidden, "inter_size": inner, "topk": topk, "experts": experts, "tp": int(m.labels["tp"]),
    }  # fmt: skip

    def shape(c: Columns) -> Shape:
        return {"tokens": c["tokens"], "experts_active": c["active"], **layer}

    rows, columns = pick(m, every(m), {"tokens": "tokens", "active": "activated_experts"})
    yield Part(
        form=MOE, sheet=device, variants=(f"bf16/{m.source}", f"bf16/{default_stack().name}"), rows=rows,
        columns=columns, shape=shape,
        groups=("tokens", "active"), starts=(MoeParams(),),
        fixed=("remote_share", "expert_s", "tile_s", "inner_passes", "unaligned", "cache_gain", "l2_intensity"),
    )  # fmt: skip
