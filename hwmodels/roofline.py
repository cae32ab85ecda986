"""The datasheet roofline: each operation takes the longer of its arithmetic and its memory traffic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hwmodels.device import Device, Interconnect
from hwmodels.kernels.compressed import bound_of_decodes, bound_of_prompts
from hwmodels.kernels.ops import DecodeForm, Ops, PrefillForm, streamed_forms
from hwmodels.kernels.protocol import HostTimes
from hwmodels.layerwise import LayerwiseCost
from hwmodels.model import ModelSpec
from hwmodels.operations import AttentionShape, Exchange, ExpertMlp, HeadProducts, Recurrence
from hwmodels.parallel import ParallelConfig
from hwmodels.precision import precision as number_format


def roof_flops_per_s(flops_per_byte: Any, peak_flops_per_s: float, peak_bytes_per_s: float) -> Any:
    """The rate that no operation of that arithmetic intensity exceeds (Williams et al., CACM 52(4), 2009)."""
    return np.minimum(peak_flops_per_s, flops_per_byte * peak_bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineKernels:
    """Kernels of a datasheet, each max(FLOPs / peak, bytes / bandwidth), without launch or step overheads.

    Bytes follow `hwmodels.work`: weights and KV cache; activations, norms and sampling cost nothing, so this is the
    lower bound that kernels approach. The three efficiencies scale peak, memory bandwidth and link bandwidth.
    """

    device: Device
    base_precision: str = "bf16"
    compute_efficiency: float = 1.0
    bandwidth_efficiency: float = 1.0
    link_efficiency: float = 1.0
    step_s: float = 0.0
    sequence_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("compute_efficiency", "bandwidth_efficiency", "link_efficiency"):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise ValueError(f"{name} is a share in (0, 1] of the datasheet; got {value!r}")
        for name in ("step_s", "sequence_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be a finite time of at least 0; got {getattr(self, name)!r}")

    def _flops_per_s(self, fmt: str) -> float:
        return self.device.peak_of(fmt) * self.compute_efficiency

    @property
    def _bytes_per_s(self) -> float:
        return self.device.hbm_bytes_per_s * self.bandwidth_efficiency

    def _link(self, between_nodes: bool) -> Interconnect:
        link = self.device.network if between_nodes else self.device.link
        return Interconnect(
            kind=link.kind, latency_s=link.latency_s, bytes_per_s=link.bytes_per_s * self.link_efficiency
        )

    @property
    def host(self) -> HostTimes:
        return HostTimes(step_s=self.step_s, sequence_s=self.sequence_s)

    def gemm_s(self, m: Any, n: Any, k: Any, *, precision: str) -> Any:
        weights = n * k * number_format(precision).weight_bytes
        return np.maximum(2.0 * m * n * k / self._flops_per_s(precision), weights / self._bytes_per_s)

    def moe_s(self, rows: Any, experts: ExpertMlp) -> Any:
        flops_s = experts.flops(rows) / experts.layers / self._flops_per_s(experts.precision)
        return np.maximum(flops_s, experts.read_bytes(rows) / experts.layers / self._bytes_per_s)

    def head_products_s(self, rows: Any, products: HeadProducts) -> Any:
        weights = products.flops(0.5) * number_format(products.precision).weight_bytes
        return np.maximum(products.flops(rows) / self._flops_per_s(products.precision), weights / self._bytes_per_s)

    def prefill_form(self, shape: AttentionShape) -> PrefillForm:
        peak = self._flops_per_s(shape.precision)
        if shape.kind == "compressed":
            return bound_of_prompts(shape, peak, self._bytes_per_s)
        pair_s = shape.prefill_flops_per_pair * shape.layers / peak
        past_s = shape.expand_flops * shape.layers / peak
        kv_s = shape.kv_bytes * shape.layers / self._bytes_per_s
        window = shape.window_tokens
        if window is not None and not shape.absorbed:

            def windowed(ops: Ops, rows: Any, chunks: Any, pairs: Any, kv: Any, outside: Any = None) -> Any:
                return ops.maximum(pairs * pair_s, ops.minimum(kv, chunks * window + rows) * kv_s)

            return windowed
        if past_s:

            def latent(ops: Ops, rows: Any, chunks: Any, pairs: Any, kv: Any, outside: Any = None) -> Any:
                return ops.maximum(pairs * pair_s + ops.maximum(kv - rows, 0) * past_s, kv * kv_s)

            return latent

        def plain(ops: Ops, rows: Any, chunks: Any, pairs: Any, kv: Any, outside: Any = None) -> Any:
            return ops.maximum(pairs * pair_s, kv * kv_s)

        return plain

    def decode_form(self, shape: AttentionShape) -> DecodeForm:
        if shape.kind == "compressed":
            return bound_of_decodes(shape, self._flops_per_s(shape.precision), self._bytes_per_s)
        pair_s = shape.decode_flops_per_pair * shape.layers / self._flops_per_s(shape.precision)
        kv_s = shape.kv_bytes * shape.layers / self._bytes_per_s

        def form(ops: Ops, seqs: Any, queries: Any, kv: Any, beyond: Any = None) -> Any:
            return kv * ops.maximum(queries / seqs * pair_s, kv_s)

        return form

    def elementwise_s(self, size_bytes: Any, launches: int, op: str = "") -> Any:
        return size_bytes * 0.0

    def recurrence_forms(self, shape: Recurrence) -> tuple[PrefillForm, DecodeForm]:
        return streamed_forms(
            shape.flops_per_row / self._flops_per_s(self.base_precision), shape.bytes_per_sequence / self._bytes_per_s
        )

    def collective_s(self, kind: str, size_bytes: Any, n: int) -> Any:
        return self._link(n > self.device.devices_per_node).collective_s(kind, size_bytes, n)

    @property
    def captured(self) -> tuple[int, ...] | None:
        return None

    @property
    def pads_ranks(self) -> bool:
        return False

    def exchange_s(self, rows: Any, exchange: Exchange) -> Any:
        """Unless told otherwise the fewest bytes: each row to the devices of its experts alone.

        To all devices where each has a slice of every expert, or where the exchange is an all-gather; in DeepEP's direct mode
        once for each expert.
        """
        if exchange.expert == 1 or exchange.mode == "allgather_reducescatter":
            return 2.0 * self.collective_s("all_gather", rows * exchange.row_bytes, exchange.n)
        # The device that most rows are sent to has as many bytes over its link.
        load = exchange.load
        copies = load.rank_slots if exchange.mode == "deepep_low_latency" else load.hits()
        arriving = float(copies.max()) * exchange.expert
        return 2.0 * self.collective_s("all_to_all", rows / exchange.n * arriving * exchange.row_bytes, exchange.n)

    def send_s(self, size_bytes: Any, between_nodes: bool) -> Any:
        return self._link(between_nodes).send_s(size_bytes)

    def sample_s(self, logit_rows: Any) -> Any:
        return logit_rows * 0.0


def Roofline(
    spec: ModelSpec,
    device: Device,
    parallel: ParallelConfig | None = None,
    *,
    kv_precision: str | None = None,
    compute_efficiency: float = 1.0,
    bandwidth_efficiency: float = 1.0,
    link_efficiency: float = 1.0,
) -> LayerwiseCost:
    """The datasheet roofline of *spec* on *device* as a `CostModel`.

    ValueError if the device lacks the arithmetic that the model's precision needs, or the model cannot be split so.
    """
    parallel = parallel or ParallelConfig()
    kernels = RooflineKernels(
        device=device,
        base_precision=spec.base_precision,
        compute_efficiency=compute_efficiency,
        bandwidth_efficiency=bandwidth_efficiency,
        link_efficiency=link_efficiency,
    )
    for fmt in (spec.attention_precision, spec.mlp_precision, spec.expert_precision, spec.base_precision):
        device.peak_of(fmt)
    return LayerwiseCost.on(device, spec, parallel, kernels, kv_precision=kv_precision)
