"""A cost model from a handful of published times, where no profile of the machine exists.

Five times of LLaMA-13B on one RTX A6000 (Agrawal et al., SARATHI, arXiv 2308.16369) fix five numbers: the efficiency of
matrix products in arithmetic and in memory traffic, how sharply one gives way to the other, and the efficiency of
attention in prefill and in decode. Other models on the A6000 follow from their shapes. The A40 has the same chip (GA102,
84 multiprocessors) at its own clocks and memory, so the efficiencies are carried over to the datasheet's peaks: an
assumption. Other chips are refused: where their kernels were measured, `hwmodels.calibrated` prices them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from hwmodels.device import Device, load_device
from hwmodels.kernels.ops import DecodeForm, Ops, PrefillForm
from hwmodels.layerwise import LayerwiseCost
from hwmodels.model import ModelSpec, load_model
from hwmodels.operations import AttentionShape, Exchange, ExpertMlp, HeadProducts
from hwmodels.parallel import ParallelConfig
from hwmodels.precision import precision as number_format
from hwmodels.roofline import RooflineKernels
from hwmodels.work import stage_work

# What a `Deployment` says of such prices.
PROVENANCE = (
    "five published times of LLaMA-13B on one A6000 (SARATHI, arXiv 2308.16369, table 2 and section 4.4); "
    "efficiencies carried over to the A40, which has the same chip"
)
DEVICES = ("a6000", "a40")
"""Devices with the chip that the times are of."""
TILE_ROWS = 128
"""Rows of a thread block's tile in matrix products. SARATHI, section 4.4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedTimes:
    """LLaMA-13B on an A6000, fp16. SARATHI, table 2 (first four) and section 4.4 (the last)."""

    prefill_linear_s: float = 224.8e-3
    """Linear layers of one prompt of 1024 tokens."""
    prefill_attention_s: float = 10.0e-3
    """Its attention."""
    decode_linear_s: float = 44.28e-3
    """Linear layers of four decodes."""
    decode_attention_s: float = 5.68e-3
    """Their attention, 1024 tokens of context each."""
    batch_256_s: float = 69.8e-3
    """An iteration of 256 prompt tokens, linear layers and attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiencies:
    """Shares of a datasheet's peaks.

    *sharpness* p joins the two limits of a matrix product: (memory^p + compute^p)^(1/p).
    """

    gemm_flops: float
    gemm_bandwidth: float
    sharpness: float
    prefill_attention_flops: float
    decode_attention_bandwidth: float


def _tiled(rows: Any) -> Any:
    """Rows that are computed: whole tiles; below one tile smaller tiles serve, with no more arithmetic than needed."""
    return np.where(rows <= TILE_ROWS, rows, np.ceil(rows / TILE_ROWS) * TILE_ROWS)


def _joined(memory_s: Any, compute_s: Any, sharpness: float) -> Any:
    larger = np.maximum(memory_s, compute_s)
    smaller = np.minimum(memory_s, compute_s)
    share = smaller / np.maximum(larger, 1e-300)
    return larger * (1.0 + share**sharpness) ** (1.0 / sharpness)


@functools.cache
def efficiencies(times: PublishedTimes | None = None) -> Efficiencies:
    """The five efficiencies that give *times* (default: the published ones) for LLaMA-13B on an A6000.

    ValueError where the times contradict each other: no sharpness joins the two limits as they ask.
    """
    t = times or PublishedTimes()
    device, spec = load_device("a6000"), load_model("llama-13b")
    work = stage_work(spec, ParallelConfig(), 0, kv_precision="fp16")
    peak = device.first_peak(number_format("fp16").math, "fp16")
    body_flops = sum(op.flops(1) for op in work.linears if not op.of_logits)
    body_bytes = sum(op.weight_bytes for op in work.linears if not op.of_logits)
    head = sum(op.weight_bytes for op in work.linears if op.of_logits) / body_bytes
    (attention,) = work.attention
    pair_flops = attention.prefill_flops_per_pair * attention.layers
    pairs = 1024 * 1025 / 2
    batch_256_linear_s = t.batch_256_s - t.prefill_attention_s * (256 * 257 / 2) / pairs

    def linear_s(memory_s: float, row_s: float, p: float, rows: int, logits: int) -> float:
        body = _joined(memory_s, row_s * float(_tiled(rows)), p)
        return float(body + head * _joined(memory_s, row_s * float(_tiled(logits)), p))

    def limits(p: float) -> tuple[float, float]:
        """Seconds of the weights' traffic, and of one row's arithmetic, that give the first two times."""
        memory_s, row_s = t.decode_linear_s, t.prefill_linear_s / 1024
        for _ in range(100):
            memory_s *= t.decode_linear_s / linear_s(memory_s, row_s, p, 4, 4)
            row_s *= t.prefill_linear_s / linear_s(memory_s, row_s, p, 1024, 1)
        return memory_s, row_s

    low, high = 1.05, 40.0
    # A sharper corner makes the batch of 256 tokens faster.
    if not linear_s(*limits(high), high, 256, 1) < batch_256_linear_s < linear_s(*limits(low), low, 256, 1):
        raise ValueError(f"times contradict each other: 256 tokens cannot take {t.batch_256_s} s beside the others")
    for _ in range(60):
        p = (low + high) / 2
        if linear_s(*limits(p), p, 256, 1) > batch_256_linear_s:
            low = p
        else:
            high = p
    p = (low + high) / 2
    memory_s, row_s = limits(p)
    return Efficiencies(
        gemm_flops=body_flops / row_s / peak,
        gemm_bandwidth=body_bytes / memory_s / device.hbm_bytes_per_s,
        sharpness=p,
        prefill_attention_flops=pairs * pair_flops / t.prefill_attention_s / peak,
        decode_attention_bandwidth=4 * 1024 * attention.kv_bytes * attention.layers
        / (t.decode_attention_s * device.hbm_bytes_per_s),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedKernels(RooflineKernels):
    """Kernels with `efficiencies`; collectives and links as on the datasheet."""

    efficiency: Efficiencies

    def _peak(self, fmt: str) -> float:
        return self.device.first_peak(number_format(fmt).math, f"precision {fmt}")

    def gemm_s(self, m: Any, n: Any, k: Any, *, precision: str) -> Any:
        of = self.efficiency
        memory_s = n * k * number_format(precision).weight_bytes / (self.device.hbm_bytes_per_s * of.gemm_bandwidth)
        compute_s = 2.0 * _tiled(m) * n * k / (self._peak(precision) * of.gemm_flops)
        return np.where(np.asarray(m) > 0, _joined(memory_s, compute_s, of.sharpness), 0.0)

    def moe_s(self, rows: Any, experts: ExpertMlp) -> Any:
        raise ValueError("the published times are of dense models; use another cost model for a mixture of experts")

    def exchange_s(self, rows: Any, exchange: Exchange) -> Any:
        raise ValueError("the published times are of dense models; use another cost model for a mixture of experts")

    def head_products_s(self, rows: Any, products: HeadProducts) -> Any:
        raise ValueError("the published times are of full multi-head attention; use another cost model")

    def prefill_form(self, shape: AttentionShape) -> PrefillForm:
        if shape.kind != "gqa" or shape.windowed:
            raise ValueError("the published times are of full multi-head attention; use another cost model")
        pair_s = shape.prefill_flops_per_pair * shape.layers
        pair_s /= self._peak(shape.precision) * self.efficiency.prefill_attention_flops
        kv_s = shape.kv_bytes * shape.layers
        kv_s /= self.device.hbm_bytes_per_s * self.efficiency.decode_attention_bandwidth

        def form(ops: Ops, rows: Any, chunks: Any, pairs: Any, kv: Any, outside: Any = None) -> Any:
            return ops.maximum(pairs * pair_s, kv * kv_s)

        return form

    def decode_form(self, shape: AttentionShape) -> DecodeForm:
        kv_s = shape.kv_bytes * shape.layers
        kv_s /= self.device.hbm_bytes_per_s * self.efficiency.decode_attention_bandwidth
        pair_s = shape.decode_flops_per_pair * shape.layers
        pair_s /= self._peak(shape.precision) * self.efficiency.prefill_attention_flops

        def form(ops: Ops, seqs: Any, queries: Any, kv: Any, beyond: Any = None) -> Any:
            return kv * ops.maximum(queries / seqs * pair_s, kv_s)

        return form


def Published(
    spec: ModelSpec, device: Device, parallel: ParallelConfig | None = None, *, kv_precision: str | None = None
) -> LayerwiseCost:
    """The cost model of *spec* on *device* from published times; a `CostFactory` for `hwmodels.deployment.deploy`.

    ValueError for mixtures of experts, latent or windowed attention, and for a device with another chip.
    """
    if spec.experts is not None:
        raise ValueError(f"the published times are of dense models and {spec.name} has experts; use Roofline")
    if device.name not in DEVICES:
        raise ValueError(
            f"the published times are of an RTX A6000 and hold for its chip ({', '.join(DEVICES)}), not for {device.name}; "
            "use Calibrated or Roofline"
        )
    kernels = PublishedKernels(device=device, efficiency=efficiencies(), base_precision=spec.base_precision)
    return LayerwiseCost.on(device, spec, parallel or ParallelConfig(), kernels, kv_precision=kv_precision)
