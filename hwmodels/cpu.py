"""A cost model from a profile that was calibrated on a CPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hwmodels.device import Device
from hwmodels.kernels.cpu import CpuAttentionParams, HostParams
from hwmodels.kernels.families import CPU_DECODE, CPU_GEMM, CPU_PREFILL, ELEMENTWISE, HOST
from hwmodels.kernels.form import FoldedForm
from hwmodels.kernels.ops import DecodeForm, Ops, PrefillForm
from hwmodels.kernels.protocol import HostTimes
from hwmodels.layerwise import LayerwiseCost
from hwmodels.model import Attention, ModelSpec
from hwmodels.operations import AttentionShape, Exchange, ExpertMlp, HeadProducts, Recurrence
from hwmodels.parallel import ParallelConfig
from hwmodels.precision import precision as number_format
from hwmodels.profiles import Profile, device_of

_MATRICES_PER_LAYER = 4  # queries, keys and values; attention's output; up; down
_ELEMENTWISE_PER_LAYER = 5  # two norms, two additions, one activation


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuKernels:
    """A CPU profile's kernels for models in *dtype*: the `Kernels` that `LayerwiseCost` composes.

    Kernels of the back end that the profile was taken with. `host_params` stands in for the profile's own host times, where
    another stack drives the same kernels. One device: collectives are refused.
    """

    profile: Profile = field(hash=False)
    dtype: str
    layers: int
    vocabulary: int
    host_params: HostParams | None = None

    def __post_init__(self) -> None:
        for family in ("cpu_gemm", "cpu_prefill", "cpu_decode"):
            if self._find(family) is None:
                have = sorted({k.variant.split("/")[0] for k in self.profile.kernels if k.family == family}) or ["none"]
                raise ValueError(
                    f"profile {self.profile.name} has no {family} kernels in {self.dtype}, only {', '.join(have)}; set "
                    f"precision to one of those, or calibrate with --dtype {self.dtype}"
                )

    def _find(self, family: str) -> Any:
        wanted = f"{self.dtype}/"
        return next(
            (k.params for k in self.profile.kernels if k.family == family and k.variant.startswith(wanted)), None
        )

    def _elementwise(self, op: str) -> Any:
        found = (k.params for k in self.profile.kernels if k.family == "elementwise" and k.variant.startswith(f"{op}/"))
        return next(found, None)

    @property
    def _number_bytes(self) -> float:
        return number_format(self.dtype).weight_bytes

    @property
    def host(self) -> HostTimes:
        return HostTimes(step_s=self._step_s())

    def _step_s(self) -> float:
        if self.host_params is not None:
            return float(HOST.seconds(self.host_params, self.profile.datasheet, {"layers": self.layers}))
        params = self.profile.find("host", [k.variant for k in self.profile.kernels if k.family == "host"])
        if params is None:
            return 0.0
        # The timed layers launch their own small kernels, which the other terms charge already.
        launches = _MATRICES_PER_LAYER * self._find("cpu_gemm").launch_s + self._find("cpu_decode").launch_s
        norm = self._elementwise("norm")
        launches += 0.0 if norm is None else _ELEMENTWISE_PER_LAYER * norm.launch_s
        return params.step_s + self.layers * max(0.0, params.layer_s - launches)

    def gemm_s(self, m: Any, n: Any, k: Any, *, precision: str) -> Any:
        if precision != self.dtype:
            raise ValueError(f"a CPU profile prices matrix products in {self.dtype} only, not in {precision}")
        shape = {"m": m, "n": n, "k": k, "dtype": self.dtype, "number_bytes": self._number_bytes}
        return CPU_GEMM.seconds(self._find("cpu_gemm"), self.profile.datasheet, shape)

    def moe_s(self, rows: Any, experts: ExpertMlp) -> Any:
        raise ValueError("experts are not timed on CPUs; take a dense model")

    def head_products_s(self, rows: Any, products: HeadProducts) -> Any:
        raise ValueError("latent attention is not timed on CPUs")

    def _folded(self, form: FoldedForm[CpuAttentionParams], shape: AttentionShape) -> PrefillForm:
        if shape.kind != "gqa" or shape.windowed:
            raise ValueError(f"{shape.kind} attention with a window or latents is not timed on CPUs")
        return form.folded(
            self._find(form.family),
            self.profile.datasheet,
            heads=shape.n_heads,
            head_dim=shape.qk_dim,
            token_bytes=shape.kv_bytes,
            dtype=self.dtype,
            layers=shape.layers,
        )

    def prefill_form(self, shape: AttentionShape) -> PrefillForm:
        return self._folded(CPU_PREFILL, shape)

    def decode_form(self, shape: AttentionShape) -> DecodeForm:
        seconds = self._folded(CPU_DECODE, shape)

        def form(ops: Ops, sequences: Any, queries: Any, kv: Any, beyond: Any = None) -> Any:
            # Each of a sequence's w query tokens sees its keys but for the later of its own.
            pairs = queries / sequences * kv - 0.5 * (queries / sequences - 1.0) * queries
            return seconds(ops, queries, sequences, ops.maximum(0.0, pairs), kv)

        return form

    def elementwise_s(self, size_bytes: Any, launches: int, op: str = "") -> Any:
        # One rate for all of a layer's: the mean time of a byte over what was timed.
        timed = [p for p in (self._elementwise(op) for op in ("norm", "add", "act")) if p is not None]
        if not timed:
            return size_bytes * 0.0
        byte_s = sum(1.0 / p.bandwidth_efficiency for p in timed) / len(timed) / self.profile.datasheet.hbm_bytes_per_s
        return size_bytes * byte_s + launches * sum(p.launch_s for p in timed) / len(timed)

    def recurrence_forms(self, shape: Recurrence) -> tuple[PrefillForm, DecodeForm]:
        raise ValueError("recurrent layers are not timed on CPUs; take a model with softmax attention")

    def collective_s(self, kind: str, size_bytes: Any, n: int) -> Any:
        raise ValueError("a CPU profile is of one device; leave the degrees of parallelism at 1")

    @property
    def captured(self) -> tuple[int, ...] | None:
        return None

    @property
    def pads_ranks(self) -> bool:
        return False

    def exchange_s(self, rows: Any, exchange: Exchange) -> Any:
        raise ValueError("experts are not timed on CPUs; take a dense model")

    def send_s(self, size_bytes: Any, between_nodes: bool) -> Any:
        return size_bytes * 0.0

    def sample_s(self, logit_rows: Any) -> Any:
        params = self._elementwise("softmax")
        if params is None:
            return logit_rows * 0.0
        shape = {"op": "softmax", "rows": logit_rows, "width": self.vocabulary, "bytes_per_number": self._number_bytes}
        return ELEMENTWISE.seconds(params, self.profile.datasheet, shape)


def cpu_cost(
    spec: ModelSpec,
    profile: Profile,
    *,
    device: Device | None = None,
    parallel: ParallelConfig | None = None,
    kv_precision: str | None = None,
    host: HostParams | None = None,
) -> LayerwiseCost:
    """The cost model of *spec* by a CPU profile; ValueError for what a CPU profile does not price."""
    parallel = parallel or ParallelConfig()
    if parallel.n_devices > 1:
        raise ValueError("a CPU profile is of one device; leave the degrees of parallelism at 1")
    if not isinstance(spec.attention, Attention):
        raise ValueError(f"{spec.name} has latent attention, which is not timed on CPUs")
    dtype = {"fp16": "bf16"}.get(spec.base_precision, spec.base_precision)
    kernels = CpuKernels(profile=profile, dtype=dtype, layers=spec.n_layers, vocabulary=spec.vocab, host_params=host)
    device = device or device_of(profile)
    return LayerwiseCost(
        spec,
        parallel,
        kernels,
        peak_flops_per_s=device.first_peak(number_format(dtype).math, dtype),
        peak_bytes_per_s=device.hbm_bytes_per_s,
        devices_per_node=1,
        kv_precision=kv_precision or dtype,
    )
