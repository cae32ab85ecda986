"""Kernel times of one device and software stack, from a profile: what composes layers asks here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hwmodels.kernels import attention, collectives, elementwise, gemm, mla, moe, tpu

if TYPE_CHECKING:
    from hwmodels.profiles import Profile

NETWORK_BYTES_PER_S = 25e9  # a 200 Gb/s adapter: network bandwidths of the profiles are shares of it
_CALIBRATED = ("torch", "jax")  # cuBLAS on operands that are in the format already
_MEASURED_STACKS = {"sglang": "vllm", "eager": "vllm", "ideal": "vllm"}  # stacks without kernel tables of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedKernels:
    """A profile's kernels as one serving stack runs them; every function returns seconds on one device.

    `stack` is vllm, trtllm, sglang, eager or ideal; stacks that were not measured use vLLM's kernels. TPU profiles
    answer with their systolic and paged forms. ValueError names what the profile lacks.
    """

    profile: Profile
    stack: str = "vllm"

    @property
    def is_tpu(self) -> bool:
        return self.profile.find("tpu_gemm", ("bf16",)) is not None

    @property
    def source(self) -> str:
        """The measured software whose kernels stand for the stack."""
        return _MEASURED_STACKS.get(self.stack, self.stack)

    def gemm_s(self, m: Any, n: Any, k: Any, *, dtype: str = "bf16", weight_bytes: float | None = None) -> Any:
        """C[m, n] = A[m, k] B[k, n] with weights from memory; weight-only formats: dtype bf16 and their bytes."""
        device = self.profile.datasheet
        narrow = {"fp8": 1.0, "int8": 1.0, "fp4": 0.5}.get(dtype, 2.0)
        weights = narrow if weight_bytes is None else weight_bytes
        if self.is_tpu:
            params = self.profile.get("tpu_gemm", ("bf16",))
            return tpu.tpu_gemm_s(params, device, m, n, k, dtype=dtype, weight_bytes=weights)
        wanted = self._gemm_variants(dtype)
        kernel = self.profile.kernel("gemm", wanted)
        params = self.profile.get("gemm", wanted) if kernel is None else kernel.params
        # Serving software's tables of narrow operands: the tile-by-rows library, with the quantisation pass inside.
        fitted, _, source = ("", "", "") if kernel is None else kernel.variant.partition("/")
        dispatched = fitted in ("fp8", "int8", "fp4") and source not in _CALIBRATED
        return gemm.gemm_s(
            params,
            device,
            m,
            n,
            k,
            dtype=dtype,
            weight_bytes=weights,
            activation_bytes=narrow,
            library="dispatch" if dispatched else "search",
            quantise_activations=narrow < 2.0,
        )

    def gemm_start_s(self, dtype: str) -> float:
        """Of a matrix multiplication's time, the start of its kernel."""
        if self.is_tpu:
            return self.profile.get("tpu_gemm", ("bf16",)).launch_s
        return self.profile.get("gemm", self._gemm_variants(dtype)).launch_s

    def moe_start_s(self, dtype: str) -> float:
        """Of a layer of experts, the starts of its kernels."""
        return self.profile.get("moe", self._gemm_variants(dtype)).launch_s

    def _gemm_variants(self, dtype: str) -> Sequence[str]:
        return [f"{name}/{source}" for name in _formats(dtype) for source in self._sources()]

    def attention_prefill_s(self, **sums: Any) -> Any:
        """Prompt attention of one layer; arguments of kernels.attention.attention_prefill_s after the device."""
        if self.is_tpu:
            params = self.profile.get("tpu_prefill", ("jax",))
            names = ("rows", "pairs", "kv_tokens", "heads", "head_dim")
            return tpu.tpu_prefill_s(params, **{name: sums[name] for name in names if name in sums})
        params = self.profile.get("prefill", self._sources())
        return attention.attention_prefill_s(params, self.profile.datasheet, **sums)

    def attention_decode_s(self, **sums: Any) -> Any:
        """Decode attention of one layer; arguments of kernels.attention.attention_decode_s after the device."""
        if self.is_tpu:
            params = self.profile.get("tpu_decode", ("jax",))
            names = ("seqs", "kv_tokens", "kv_heads", "head_dim")
            return tpu.tpu_decode_s(params, **{name: sums[name] for name in names if name in sums})
        kernel = self.profile.kernel("decode", self._sources())
        params = self.profile.get("decode", self._sources()) if kernel is None else kernel.params
        if kernel is not None and kernel.variant == "trtllm":
            sums = {"widest_group": 32.0, **sums}
        return attention.attention_decode_s(params, self.profile.datasheet, **sums)

    def attention_mixed_s(self, **sums: Any) -> Any:
        """Prompt chunks and decodes in one variable-length call; arguments of kernels.attention.attention_mixed_s."""
        params = self.profile.get("mixed", (self.source, "lss"))
        return attention.attention_mixed_s(params, self.profile.datasheet, **sums)

    def mla_prefill_s(self, **sums: Any) -> Any:
        """Latent attention of prompts; arguments of kernels.mla.mla_prefill_s after the device."""
        return mla.mla_prefill_s(self.profile.get("mla_prefill", self._sources()), self.profile.datasheet, **sums)

    def mla_decode_s(self, **sums: Any) -> Any:
        """Latent attention of decodes; arguments of kernels.mla.mla_decode_s after the device."""
        return mla.mla_decode_s(self.profile.get("mla_decode", self._sources()), self.profile.datasheet, **sums)

    def moe_s(self, tokens: Any, *, dtype: str = "bf16", weight_bytes: float | None = None, **shape: Any) -> Any:
        """Routed experts of one layer without the router; shape arguments of kernels.moe.moe_s."""
        wanted = self._gemm_variants(dtype)
        narrow = {"fp8": 1.0, "int8": 1.0, "fp4": 0.5}.get(dtype, 2.0)
        params = self.profile.get("moe", wanted)
        weights = narrow if weight_bytes is None else weight_bytes
        return moe.moe_s(params, self.profile.datasheet, tokens, dtype=dtype, weight_bytes=weights, **shape)

    def elementwise_s(self, op: str, rows: Any, width: Any, *, gated: Any = False) -> Any:
        """Norm, act, add, rope, embedding or softmax over rows x width numbers."""
        names = {"norm": ("layernorm", "input-layernorm", "norm"), "softmax": ("softmax", "sampler")}.get(op, (op,))
        wanted = [f"{name}/{source}" for source in ("lss", "jax", "vidur", "llmcompass", "torch") for name in names]
        params = self.profile.get("elementwise", wanted)
        return elementwise.elementwise_s(params, self.profile.datasheet, op, rows, width, gated=gated)

    def collective_s(
        self,
        kind: str,
        message_bytes: Any,
        devices: Any,
        *,
        between_nodes: bool = False,
        network_bytes_per_s: float = NETWORK_BYTES_PER_S,
        adapters: Any = 1,
    ) -> Any:
        """A collective in a node, or between nodes over `adapters` network adapters for each node."""
        if between_nodes:
            wanted = [f"{kind}/vidur-network", "all_reduce/vidur-network"]
            params = self.profile.get("collective", wanted)
            return collectives.collective_s(params, kind, message_bytes, devices, network_bytes_per_s * adapters)
        wanted = [f"{kind}/nccl", f"{kind}/vidur-node", "all_gather/nccl", "all_reduce/nccl"]
        if kind == "all_reduce" and self.stack != "eager":
            wanted.insert(0, "all_reduce/vllm-graph")
        params = self.profile.get("collective", wanted)
        return collectives.collective_s(params, kind, message_bytes, devices, self.profile.datasheet.link_bytes_per_s)

    def _sources(self) -> Sequence[str]:
        return tuple(dict.fromkeys((self.source, "vllm", "trtllm", "vidur", "torch", "jax")))


def _formats(dtype: str) -> Sequence[str]:
    """Formats whose fitted efficiencies may serve one, the best first."""
    return {"fp8": ("fp8", "bf16"), "int8": ("int8", "fp8", "bf16"), "fp4": ("fp4", "fp8", "bf16")}.get(
        dtype, ("bf16",)
    )
