"""Latent attention: the kernel alone, the products beside it, and the module around them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hwmodels.kernels.attention import PrefillParams
from hwmodels.kernels.families import MLA_BMM, MLA_DECODE, MLA_MODULE, MLA_PREFILL
from hwmodels.kernels.mla import MlaBmmParams, MlaDecodeParams, MlaModuleParams
from hwmodels.kernels.parameters import Datasheet, optional_defaults
from hwmodels.measured.attention import CACHE_BYTES, causal, variants_of
from hwmodels.measured.files import Measurement
from hwmodels.measured.part import Columns, Part, Shape, every, pick
from hwmodels.stacks import default_stack, kernels_of, latent_alone, narrow_heads

_WEIGHT_BYTES = {"bf16": 2.0, "fp8_block": 1.0, "nvfp4": 0.5}
_RANK, _NOPE, _VALUE = 512.0, 128.0, 128.0


def launched_by_call(m: Measurement) -> bool:
    """Whether a file times Python's launches and not the kernel: vLLM 0.14's tables, which name no software."""
    return m.kind == "mla" and not kernels_of(m.source or default_stack().name).latent_alone


def _absorbed(m: Measurement) -> bool:
    """Whether prompts were timed over the latent rather than over expanded keys and values."""
    return m.device in kernels_of(m.source).latent_absorbed_on


def kernel(m: Measurement, device: Datasheet) -> Iterator[Part]:
    if m.dtype not in CACHE_BYTES:
        return
    width = CACHE_BYTES[m.dtype]
    rows, columns = pick(m, every(m), {"batch": "batch_size", "isl": "isl", "step": "step", "heads": "num_heads"})
    decodes, source = m.labels["phase"] == "decode", m.source or default_stack().name
    # What times launches is compared with, and fits nothing.
    groups = () if launched_by_call(m) else ("heads", "batch", "isl", "step")
    if decodes:

        def of_decodes(c: Columns) -> Shape:
            sums = {"seqs": c["batch"], "kv_tokens": c["batch"] * (c["isl"] + c["step"])}
            return {**sums, "heads": c["heads"], "kv_bytes": width, "resident": True}

        yield Part(
            form=MLA_DECODE, sheet=device, variants=(*variants_of(source, m.dtype), *latent_alone()[::-1]), rows=rows,
            columns=columns, shape=of_decodes, groups=groups, starts=(MlaDecodeParams(), MlaDecodeParams(ramp_tokens=1e5)),
        )  # fmt: skip
        return
    absorbed = _absorbed(m)

    def of_prompts(c: Columns) -> Shape:
        sums = {"chunks": c["batch"], **causal(c["batch"], c["isl"], c["step"]), "longest_kv": c["isl"] + c["step"]}
        return {**sums, "heads": c["heads"], "kv_bytes": width, "absorbed": absorbed, "resident": True}

    variants = variants_of(f"{source}-absorbed" if absorbed else source, m.dtype)
    yield Part(
        form=MLA_PREFILL, sheet=device, variants=(*variants, latent_alone()[0]), rows=rows, columns=columns, shape=of_prompts,
        groups=groups, starts=(PrefillParams(), PrefillParams(unpacked=1.0)),
        fixed=tuple(optional_defaults(PrefillParams)),
    )  # fmt: skip


def products(m: Measurement, device: Datasheet) -> Iterator[Part]:
    for dtype in [name for name in np.unique(m.columns["dtype"]).tolist() if name in CACHE_BYTES]:
        rows, columns = pick(m, m.columns["dtype"] == dtype, {"tokens": "num_tokens", "heads": "num_heads"})
        before = m.columns["op"][rows] == "pre"
        columns["n"] = np.where(before, _RANK, _VALUE)
        columns["k"] = np.where(before, _NOPE, _RANK)

        # In 16 bits every stack calls cuBLAS.
        source = "cublas" if dtype == "bf16" else m.source

        def shape(c: Columns, dtype: str = dtype) -> Shape:
            return {**c, "dtype": dtype, "weight_bytes": CACHE_BYTES[dtype]}

        yield Part(
            form=MLA_BMM, sheet=device, variants=(f"{dtype}/{source}", f"{dtype}/{narrow_heads()[0]}"), rows=rows,
            columns=columns, shape=shape, groups=("heads", "n", "tokens"),
            starts=(MlaBmmParams(), MlaBmmParams(row_passes=3.0)),
        )  # fmt: skip


def module(m: Measurement, device: Datasheet) -> Iterator[Part]:
    decodes = m.kind == "mla_module_decode"
    names = {"batch": "batch_size", "heads": "num_heads", "tokens": "kv_len" if decodes else "seq_len"}
    known = np.isin(m.columns["gemm_dtype"], list(_WEIGHT_BYTES)) & np.isin(m.columns["kv_dtype"], list(CACHE_BYTES))
    if not known.any():
        return
    rows, columns = pick(m, known, names)
    columns["weight_bytes"] = np.array([_WEIGHT_BYTES[name] for name in m.columns["gemm_dtype"][rows].tolist()])
    columns["kv_bytes"] = np.array([CACHE_BYTES[name] for name in m.columns["kv_dtype"][rows].tolist()])

    def shape(c: Columns) -> Shape:
        b, n = c["batch"], c["tokens"]
        sums = {"chunks": b, **causal(b, n, 0.0 * n)}
        if decodes:
            sums = {"chunks": b, "rows": b, "pairs": 0.0 * b, "kv_tokens": b * n}
        formats = {name: c[name] for name in ("weight_bytes", "kv_bytes")}
        return {**sums, "heads": c["heads"], "decode": decodes, **formats}

    phase = "decode" if decodes else "prefill"
    yield Part(
        form=MLA_MODULE, sheet=device, variants=(f"{phase}/{m.source}", f"{phase}/{default_stack().name}"), rows=rows,
        columns=columns, shape=shape, groups=("heads", "batch", "tokens"), starts=(MlaModuleParams(),),
    )  # fmt: skip
