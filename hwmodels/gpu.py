"""A GPU's calibrated kernels under a serving stack."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hwmodels.kernels.attention import WIDEST_GROUP
from hwmodels.kernels.families import DECODE, GEMM, MLA_DECODE, MLA_PREFILL, MOE, PREFILL
from hwmodels.kernels.mla import MlaParams
from hwmodels.kernels.ops import DecodeForm, PrefillForm
from hwmodels.operations import AttentionShape, ExpertMlp
from hwmodels.profiles import Profile
from hwmodels.stack_kernels import WIDTH, StackKernels, Table, gemm_nodes, moe_nodes

_CALIBRATED = ("torch", "jax")  # cuBLAS on operands that are in the format already
_ROUTING = "power_law_1.01"
"""How unevenly tokens choose experts: the mildest skew that the measured tables hold."""
# Formats whose fitted efficiencies may serve one, the best first.
_FORMATS = {"fp8": ("fp8", "bf16"), "int8": ("int8", "fp8", "bf16"), "fp4": ("fp4", "fp8", "bf16")}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuKernels(StackKernels):
    """GEMMs and experts by tiles and waves, attention by blocks; ValueError names what the profile lacks."""

    def gemm_s(self, m: Any, n: Any, k: Any, *, precision: str) -> Any:
        def table(dtype: str, weight_bytes: float) -> Table:
            return _gemm_table(self.profile, self.sources, int(n), int(k), dtype, weight_bytes)

        return self.tabulated_s(m, 2.0 * m * n * k, precision, table)

    def moe_s(self, rows: Any, experts: ExpertMlp) -> Any:
        def table(dtype: str, weight_bytes: float) -> Table:
            return _moe_table(self.profile, self.sources, experts, dtype, weight_bytes)

        return self.tabulated_s(rows, experts.flops(rows) / experts.layers, experts.precision, table)

    def prefill_form(self, shape: AttentionShape) -> PrefillForm:
        run, sheet = self.running(shape), self.profile.datasheet
        if shape.kind == "gqa":
            return PREFILL.folded(
                self.profile.get("prefill", self.sources),
                sheet,
                heads=shape.n_heads,
                kv_heads=shape.n_kv_heads,
                head_dim=shape.qk_dim,
                token_bytes=shape.kv_bytes,
                run=run,
            )
        return MLA_PREFILL.folded(
            self._latent("mla_prefill"),
            sheet,
            pair_flops=shape.prefill_flops_per_pair,
            row_numbers=shape.n_heads * (shape.qk_dim + shape.v_dim),
            token_bytes=shape.kv_bytes,
            expand_flops=shape.expand_flops,
            expanded=not shape.absorbed,
            run=run,
        )

    def decode_form(self, shape: AttentionShape) -> DecodeForm:
        run, sheet = self.running(shape), self.profile.datasheet
        if shape.kind == "gqa":
            kernel = self.profile.kernel("decode", self.sources)
            return DECODE.folded(
                self.profile.get("decode", self.sources),
                sheet,
                heads=shape.n_heads,
                kv_heads=shape.n_kv_heads,
                head_dim=shape.qk_dim,
                token_bytes=shape.kv_bytes,
                widest_group=WIDEST_GROUP.get("" if kernel is None else kernel.variant, np.inf),
                run=run,
            )
        return MLA_DECODE.folded(
            self._latent("mla_decode"),
            sheet,
            pair_flops=shape.decode_flops_per_pair,
            row_numbers=shape.n_heads * (2 * shape.latent_dim + shape.rope_dim),
            token_bytes=shape.kv_bytes,
            run=run,
        )

    def _latent(self, family: str) -> MlaParams:
        """The measured chain that stands for the stack's: as a graph replays it, or as Python launches it call by call.

        All stacks expand keys and values of fresh prompts, as TensorRT-LLM's table has it; SGLang's times its absorbed
        kernel, which its server runs behind a short prefix only (0.5.23, srt/models/deepseek_common/
        attention_backend_handler.py). vLLM decodes by FlashAttention, as SGLang does.
        """
        expanded = family == "mla_prefill" or self.stack.kernels == "trtllm"
        replayed = ("trtllm", "sglang") if expanded else ("sglang", "trtllm")
        return self.profile.get(family, (*replayed, "vllm") if self.stack.graph else ("vllm", *replayed))


def _variants(sources: Sequence[str], dtype: str) -> list[str]:
    return [f"{name}/{source}" for name in _FORMATS.get(dtype, ("bf16",)) for source in sources]


def gemm_seconds(
    profile: Profile, sources: Sequence[str], m: Any, n: Any, k: Any, *, dtype: str, weight_bytes: float
) -> Any:
    """C[m, n] = A[m, k] B[k, n] with weights from memory; weight-only formats: dtype bf16 and their bytes."""
    wanted, narrow = _variants(sources, dtype), WIDTH.get(dtype, 2.0)
    params = profile.get("gemm", wanted)
    kernel = profile.kernel("gemm", wanted)
    # Serving software's tables of narrow operands: the tile-by-rows library, with the quantisation pass inside.
    fitted, _, source = ("", "", "") if kernel is None else kernel.variant.partition("/")
    dispatched = fitted in ("fp8", "int8", "fp4") and source not in _CALIBRATED
    shape = {
        "m": m,
        "n": n,
        "k": k,
        "dtype": dtype,
        "weight_bytes": weight_bytes,
        "activation_bytes": narrow,
        "library": "dispatch" if dispatched else "search",
        "quantise_activations": narrow < 2.0,
    }
    return GEMM.seconds(params, profile.datasheet, shape)


@functools.lru_cache(maxsize=4096)
def _gemm_table(profile: Profile, sources: tuple[str, ...], n: int, k: int, dtype: str, weight_bytes: float) -> Table:
    nodes = gemm_nodes()
    seconds = gemm_seconds(profile, sources, nodes, n, k, dtype=dtype, weight_bytes=weight_bytes)
    start_s = profile.get("gemm", _variants(sources, dtype)).launch_s
    return nodes, np.maximum.accumulate(np.asarray(seconds, float)), start_s


@functools.lru_cache(maxsize=1024)
def _moe_table(
    profile: Profile, sources: tuple[str, ...], experts: ExpertMlp, dtype: str, weight_bytes: float
) -> Table:
    nodes = moe_nodes()
    params = profile.get("moe", _variants(sources, dtype))
    shape = {
        "tokens": nodes,
        "dtype": dtype,
        "weight_bytes": weight_bytes,
        "hidden_size": experts.hidden,
        "inter_size": experts.ffn,
        "topk": experts.per_token,
        "experts": experts.n_experts,
        "ep": experts.expert,
        "distribution": _ROUTING,
    }
    seconds = MOE.seconds(params, profile.datasheet, shape)
    return nodes, np.maximum.accumulate(np.asarray(seconds, float)), params.launch_s
