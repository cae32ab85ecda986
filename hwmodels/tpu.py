"""A TPU's calibrated kernels under a serving stack: the systolic and paged equations of `kernels.tpu`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from hwmodels.kernels.families import TPU_DECODE, TPU_GEMM, TPU_PREFILL
from hwmodels.kernels.ops import DecodeForm, PrefillForm
from hwmodels.operations import AttentionShape, ExpertMlp
from hwmodels.profiles import Profile
from hwmodels.stack_kernels import StackKernels, Table, gemm_nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class TpuKernels(StackKernels):
    """One variant of each kernel: bf16 products and the paged attention of the JAX serving stack."""

    def gemm_s(self, m: Any, n: Any, k: Any, *, precision: str) -> Any:
        def table(dtype: str, weight_bytes: float) -> Table:
            return _gemm_table(self.profile, int(n), int(k), dtype, weight_bytes)

        return self.tabulated_s(m, 2.0 * m * n * k, precision, table)

    def moe_s(self, rows: Any, experts: ExpertMlp) -> Any:
        raise ValueError(f"profile {self.profile.name} has no moe parameters: experts have not been measured on TPUs")

    def prefill_form(self, shape: AttentionShape) -> PrefillForm:
        params = self.profile.get("tpu_prefill", ("jax",))
        width = shape.n_heads * (shape.qk_dim + shape.v_dim) / 2.0
        return TPU_PREFILL.folded(params, width=width, layers=float(shape.layers))

    def decode_form(self, shape: AttentionShape) -> DecodeForm:
        params = self.profile.get("tpu_decode", ("jax",))
        return TPU_DECODE.folded(params, token_bytes=shape.kv_bytes, layers=float(shape.layers))


@functools.lru_cache(maxsize=1024)
def _gemm_table(profile: Profile, n: int, k: int, dtype: str, weight_bytes: float) -> Table:
    nodes = gemm_nodes()
    params = profile.get("tpu_gemm", ("bf16",))
    shape = {"m": nodes, "n": n, "k": k, "dtype": dtype, "weight_bytes": weight_bytes}
    seconds = TPU_GEMM.seconds(params, profile.datasheet, shape)
    return nodes, np.maximum.accumulate(np.asarray(seconds, float)), params.launch_s
