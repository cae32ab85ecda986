"""Mixtures of experts: tables by shape and routing, and layers of one model by the experts that were awake."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from hwmodels.kernels.families import MOE
from hwmodels.kernels.moe import MoeParams
from hwmodels.kernels.parameters import Datasheet
from hwmodels.measured.files import Measurement
from hwmodels.measured.names import EXPERTS, catalogue_model
from hwmodels.measured.part import Columns, Part, Shape, every, pick
from hwmodels.precision import precision

# moe_dtype -> arithmetic and weight format; a weight-only format is expanded to the arithmetic.
_MOE_DTYPES = {
    "bfloat16": ("bf16", "bf16"), "float16": ("bf16", "bf16"), "fp8_block": ("fp8", "fp8"), "fp8": ("fp8", "fp8"),
    "nvfp4": ("fp4", "nvfp4"), "int4_wo": ("bf16", "int4"), "w4a16_mxfp4": ("bf16", "mxfp4"), "w4afp8": ("fp8", "int4"),
}  # fmt: skip
_FALL_BACK = {"bf16": ("bf16",), "fp8": ("fp8",), "fp4": ("fp8", "bf16")}
_SHAPE = ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")


def moe(m: Measurement, device: Datasheet) -> Iterator[Part]:
    for name in np.unique(m.columns["moe_dtype"]):
        if str(name) not in _MOE_DTYPES:
            continue
        dtype, weights = _MOE_DTYPES[str(name)]
        names = {c: c for c in (*_SHAPE, "num_tokens", "distribution")}
        rows, columns = pick(m, (m.columns["moe_dtype"] == name) & ~unspread(m), names)
        if not len(rows):
            continue

        def shape(c: Columns, dtype: str = dtype, width: float = precision(weights).weight_bytes) -> Shape:
            # Nemotron's experts have two matrices (squared ReLU), all others of the tables three.
            nemotron = (c["topk"] == 22) | ((c["hidden_size"] == 2688) & (c["inter_size"] == 1856))
            return {
                "tokens": c["num_tokens"], "hidden_size": c["hidden_size"], "inter_size": c["inter_size"],
                "topk": c["topk"], "experts": c["num_experts"], "tp": c["moe_tp_size"], "ep": c["moe_ep_size"],
                "distribution": c["distribution"], "gated": ~nemotron, "dtype": dtype, "weight_bytes": width,
            }  # fmt: skip

        yield Part(
            form=MOE, sheet=device, rows=rows, columns=columns, shape=shape, groups=_SHAPE, starts=(MoeParams(),),
            variants=(
                *((f"{weights}/{m.source}",) if weights != dtype else ()),
                *(f"{wide}/{name}" for wide in _FALL_BACK[dtype] for name in (m.source, "vllm")),
            ),
        )  # fmt: skip


def unspread(m: Measurement) -> np.ndarray:
    """Rows whose routing follows no known distribution."""
    return np.array([not re.fullmatch(r"balanced|uniform|power_law_\d+(\.\d+)?", d) for d in m.columns["distribution"]])


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
        form=MOE, sheet=device, variants=(f"bf16/{m.source}", "bf16/vllm"), rows=rows, columns=columns, shape=shape,
        groups=("tokens", "active"), starts=(MoeParams(),), fixed=("rank_skew", "expert_s", "fill_k", "inner_passes"),
    )  # fmt: skip
