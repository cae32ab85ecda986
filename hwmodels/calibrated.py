"""A cost model from calibrated kernels and a serving stack's overheads, compiled to tables and closed forms."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hwmodels.cost import CostModel
from hwmodels.device import Device, Interconnect, device_catalogue
from hwmodels.kernels.calibrated import CalibratedKernels
from hwmodels.layerwise import SCALARS, DecodeForm, LayerwiseCost, Ops, PrefillForm
from hwmodels.model import LatentAttention, ModelSpec
from hwmodels.overheads import Overheads, ServingStack, serving_stack
from hwmodels.parallel import ParallelConfig
from hwmodels.precision import precision as number_format
from hwmodels.profiles import Profile, borrow_for, load_profile
from hwmodels.roofline import Roofline
from hwmodels.work import AttentionShape, ExpertMlp

_TILE = 128.0  # query rows of a thread block, as in kernels.attention
_VERIFY_EFFICIENCY = 0.5  # as in kernels.attention
_ROUTING = "power_law_1.01"
"""How unevenly tokens choose experts: the mildest skew that the measured tables hold."""


@functools.cache
def _gemm_nodes() -> np.ndarray:
    """Rows between which a GEMM's time is a straight line to within a percent: both sides of each step of tiles."""
    edges = [*range(16, 257, 16), *range(320, 1025, 64), *range(1152, 8193, 128), *range(8704, 65537, 512)]
    below = [1, 2, 4, 8, *edges]
    return np.array(sorted({*below, *(edge + 1 for edge in edges)}), float)


@functools.cache
def _moe_nodes() -> np.ndarray:
    """Tokens at which a grouped GEMM is evaluated: every one to 16, then sixteen to the octave."""
    return np.unique(np.concatenate([np.arange(1.0, 17.0), np.round(16.0 * 2.0 ** (np.arange(1, 193) / 16.0))]))


@dataclass(frozen=True, slots=True, kw_only=True)
class StackKernels:
    """A profile's kernels as a serving stack runs them: the `Kernels` that `LayerwiseCost` composes.

    Formats that the device cannot multiply are expanded to 16 bits; attention computes in 16 bits whatever the cache.
    """

    device: Device
    profile: Profile = field(repr=False, hash=False)
    stack: ServingStack
    profile_path: str | None = None
    """Where the profile was read from, if it is not the shipped one."""
    layers: int
    """Of one stage, for host work by the layer."""
    expert_layers: int = 0
    """Those of them with experts."""
    base_precision: str = "bf16"

    @property
    def _own(self) -> Overheads:
        return self.stack.overheads

    @property
    def _kernels(self) -> CalibratedKernels:
        return CalibratedKernels(profile=self.profile, stack=self.stack.kernels)

    @property
    def step_s(self) -> float:
        return self._own.step_s

    @property
    def sequence_s(self) -> float:
        return self._own.sequence_s

    @property
    def row_s(self) -> float:
        return self._own.row_s

    @property
    def prompt_floor_s(self) -> float:
        return self._own.layer_host_s * self.layers + self._own.expert_host_s * self.expert_layers

    @property
    def decode_floor_s(self) -> float:
        return 0.0 if self.stack.graph else self.prompt_floor_s

    def _start(self, seconds: float) -> float:
        """What is left of a kernel's start behind the kernel before it."""
        return seconds * (1.0 - self._own.launch_overlap)

    def _math(self, fmt: str) -> tuple[str, float, bool]:
        """The arithmetic the device multiplies *fmt* in, the bytes of a weight, and whether weights are expanded."""
        number = number_format(fmt)
        peaks = self.profile.datasheet.peak_flops_per_s
        if fmt == "mxfp4" and "fp4" in peaks and "fp8" in peaks:
            # Tensor cores that know block-scaled formats take MXFP4 weights beside MXFP8 activations, at the fp8 rate.
            return "fp8", number.weight_bytes, False
        names = ["bf16" if choice in ("fp16", "fp32") else choice for choice in number.math]
        dtype = next((name for name in names if name in peaks), "bf16")
        return dtype, number.weight_bytes, number.weight_bytes < 0.75 * _WIDTH[dtype]

    def _loss_s(self, flops: Any, dtype: str, weight_bytes: float = 2.0, expanded: bool = False) -> Any:
        own = self._own
        loss = own.sustained_loss + (own.narrow_loss if weight_bytes < 1.5 else 0.0)
        loss += own.expand_loss if expanded else 0.0
        return flops * (loss / self.profile.datasheet.flops_per_s(dtype))

    def gemm_s(self, m: Any, n: Any, k: Any, *, precision: str) -> Any:
        dtype, weight_bytes, expanded = self._math(precision)
        nodes, seconds, start_s = _gemm_table(self._kernels, int(n), int(k), dtype, weight_bytes)
        seconds = seconds - (start_s - self._start(start_s))
        flops = 2.0 * m * n * k
        return (
            np.interp(m, nodes, seconds)
            + self._beyond(m, nodes, seconds)
            + self._loss_s(flops, dtype, weight_bytes, expanded)
        )

    @staticmethod
    def _beyond(m: Any, nodes: np.ndarray, seconds: np.ndarray) -> Any:
        """Past the last node time grows with the rows."""
        return np.maximum(0.0, m - nodes[-1]) * (seconds[-1] / nodes[-1])

    def moe_s(self, rows: Any, experts: ExpertMlp) -> Any:
        dtype, weight_bytes, expanded = self._math(experts.precision)
        nodes, seconds, start_s = _moe_table(self._kernels, experts, dtype, weight_bytes)
        seconds = seconds - (start_s - self._start(start_s))
        flops = experts.flops(rows) / experts.layers
        return (
            np.interp(rows, nodes, seconds)
            + self._beyond(rows, nodes, seconds)
            + self._loss_s(flops, dtype, weight_bytes, expanded)
        )

    def prefill_form(self, shape: AttentionShape) -> PrefillForm:
        if self._kernels.is_tpu:
            return self._tpu_prefill(shape)
        if shape.kind == "gqa":
            return self._gqa_prefill(shape)
        return self._latent_prefill(shape)

    def decode_form(self, shape: AttentionShape) -> DecodeForm:
        if self._kernels.is_tpu:
            return self._tpu_decode(shape)
        if shape.kind == "gqa":
            return self._gqa_decode(shape)
        return self._latent_decode(shape)

    def _gqa_prefill(self, shape: AttentionShape) -> PrefillForm:
        """`kernels.attention.attention_prefill_s` without the longest chunk, its constants folded."""
        params = self.profile.get("prefill", self._kernels._sources())
        sheet = self.profile.datasheet
        layers, heads, kv_heads = float(shape.layers), shape.n_heads, shape.n_kv_heads
        tile_heads = kv_heads + params.unpacked * (heads - kv_heads)
        pair = (4.0 * shape.qk_dim + params.softmax_flops) / (sheet.flops_per_s("bf16") * params.compute_efficiency)
        by_pair, by_row = heads * pair, 0.5 * _TILE * heads * pair
        by_kv = 0.5 * _TILE * params.padding * tile_heads * pair
        row_blocks = heads / (_TILE * sheet.sm_count) * params.block_s
        chunk_blocks = tile_heads / sheet.sm_count * params.block_s
        first_block = params.block_s
        stream = sheet.hbm_bytes_per_s * params.bandwidth_efficiency
        row_bytes_s = 4.0 * shape.qk_dim * heads / stream
        kv_bytes_s = shape.kv_bytes / stream
        throttle, after = params.throttle, params.throttle_after_s
        loss, launch = params.overlap_loss, self._start(params.launch_s)
        by_pair_lost = self._loss_s(shape.prefill_flops_per_pair, "bf16")
        window = shape.window_tokens

        def form(ops: Ops, rows: Any, chunks: Any, pairs: Any, kv: Any) -> Any:
            if window is not None:
                kv = ops.minimum(kv, chunks * window + rows)
            compute = pairs * by_pair + rows * by_row + kv * by_kv
            compute = compute / (1.0 - throttle * compute / (compute + after))
            compute = compute + ops.maximum(0.0, rows * row_blocks + chunks * chunk_blocks - first_block)
            memory = rows * row_bytes_s + kv * kv_bytes_s
            gap = compute - memory
            both = 0.5 * (compute + memory + ops.sqrt(gap * gap + loss * (compute * memory)))
            return layers * (launch + both + pairs * by_pair_lost)

        return form

    def _gqa_decode(self, shape: AttentionShape) -> DecodeForm:
        """`kernels.attention.attention_decode_s` without the longest context, its constants folded."""
        kernel = self.profile.kernel("decode", self._kernels._sources())
        params = self.profile.get("decode", self._kernels._sources()) if kernel is None else kernel.params
        sheet = self.profile.datasheet
        layers, heads, kv_heads, head_dim = float(shape.layers), shape.n_heads, shape.n_kv_heads, shape.qk_dim
        group = heads / kv_heads
        packed = not (kernel is not None and kernel.variant == "trtllm" and group > 32.0)
        grouped = 1.0 if packed and group > 1 else 0.0
        readers = float(kv_heads if packed else heads)
        stream = sheet.hbm_bytes_per_s * params.bandwidth_efficiency
        by_kv = shape.kv_bytes / kv_heads * readers / stream
        # Query tokens of all sequences together: the arithmetic of one is the share of the KV tokens each reads.
        by_pair = 4.0 * head_dim * heads / (sheet.flops_per_s("bf16") * _VERIFY_EFFICIENCY)
        width = group if packed else 1.0
        grow = 1.0 + params.block_head_dim * max(-0.5, head_dim / 128.0 - 1.0)
        block = (params.block_s + grouped * params.block_group_s - params.block_rows_s / 64.0) * grow
        row_block = params.block_rows_s / 64.0 * width * grow
        per_seq = readers / sheet.sm_count
        launch = self._start(params.launch_s + params.combine_s)
        several = self._start(params.regroup_s) * grouped * (kv_heads > 1)
        ramp, ramp_tokens = params.ramp_s, params.ramp_tokens / readers
        loss = params.overlap_loss

        def of_batch(ops: Ops, seqs: Any, queries: Any) -> tuple[Any, Any, Any]:
            """What does not depend on the KV tokens: seconds of each of them, of blocks, and of having several sequences."""
            each = queries / seqs
            blocks = ops.maximum(0.0, seqs * per_seq - 1.0) * ops.maximum(0.0, block + each * row_block)
            return (
                ops.maximum(by_kv, each * by_pair),
                blocks,
                several * ops.minimum(1.0, ops.maximum(0.0, seqs - 1.0)),
            )

        known: dict[tuple[float, float], tuple[Any, Any, Any]] = {}

        def form(ops: Ops, seqs: Any, queries: Any, kv: Any) -> Any:
            if ops is SCALARS:
                batch = known.get((seqs, queries))
                if batch is None:
                    batch = known[seqs, queries] = of_batch(ops, seqs, queries)
            else:
                batch = of_batch(ops, seqs, queries)
            by_token, blocks, more = batch
            memory = kv * by_token
            gap = memory - blocks
            both = 0.5 * (memory + blocks + ops.sqrt(gap * gap + loss * (memory * blocks)))
            return layers * (launch + ramp * (kv / (kv + ramp_tokens)) + more + both)

        return form

    def _mla_launch_s(self, launch_s: float) -> float:
        """The measured chain was launched from Python; in a graph its handful of kernels costs a few microseconds."""
        return self._start(min(launch_s, _GRAPH_CHAIN_S)) if self.stack.graph else launch_s

    def _latent_prefill(self, shape: AttentionShape) -> PrefillForm:
        params = self.profile.get("mla_prefill", self._kernels._sources())
        sheet = self.profile.datasheet
        layers = float(shape.layers)
        rate = sheet.flops_per_s("bf16") * params.compute_efficiency
        by_pair = shape.prefill_flops_per_pair / rate
        by_pair_lost = self._loss_s(shape.prefill_flops_per_pair, "bf16")
        by_past = shape.expand_flops / rate
        stream = sheet.hbm_bytes_per_s * params.bandwidth_efficiency
        row_bytes_s = 2.0 * shape.n_heads * (shape.qk_dim + shape.v_dim) * params.row_passes / stream
        kv_bytes_s = shape.kv_bytes / stream + (0.0 if shape.absorbed else row_bytes_s)
        loss, hidden, launch = params.overlap_loss, params.hidden_work, self._mla_launch_s(params.launch_s)
        window = shape.window_tokens

        def form(ops: Ops, rows: Any, chunks: Any, pairs: Any, kv: Any) -> Any:
            if window is not None:
                kv = ops.minimum(kv, chunks * window + rows)
            compute = (pairs + 0.5 * _TILE * rows) * by_pair + ops.maximum(kv - rows, 0.0) * by_past
            memory = rows * row_bytes_s + kv * kv_bytes_s
            gap = compute - memory
            both = 0.5 * (compute + memory + ops.sqrt(gap * gap + loss * (compute * memory)))
            gap = both - launch
            whole = 0.5 * (both + launch + ops.sqrt(gap * gap + hidden * (both * launch)))
            return layers * (whole + pairs * by_pair_lost)

        return form

    def _latent_decode(self, shape: AttentionShape) -> DecodeForm:
        params = self.profile.get("mla_decode", self._kernels._sources())
        sheet = self.profile.datasheet
        layers = float(shape.layers)
        by_pair = shape.decode_flops_per_pair / (sheet.flops_per_s("bf16") * params.compute_efficiency)
        stream = sheet.hbm_bytes_per_s * params.bandwidth_efficiency
        by_kv = shape.kv_bytes / stream
        by_row = 2.0 * shape.n_heads * (2 * shape.latent_dim + shape.rope_dim) * params.row_passes / stream
        loss, hidden, launch = params.overlap_loss, params.hidden_work, self._mla_launch_s(params.launch_s)

        def form(ops: Ops, seqs: Any, queries: Any, kv: Any) -> Any:
            compute = kv * (queries / seqs) * by_pair
            memory = kv * by_kv + queries * by_row
            gap = compute - memory
            both = 0.5 * (compute + memory + ops.sqrt(gap * gap + loss * (compute * memory)))
            gap = both - launch
            return layers * 0.5 * (both + launch + ops.sqrt(gap * gap + hidden * (both * launch)))

        return form

    def _tpu_prefill(self, shape: AttentionShape) -> PrefillForm:
        params = self.profile.get("tpu_prefill", ("jax",))
        layers = float(shape.layers)
        scale = shape.n_heads * (shape.qk_dim + shape.v_dim) / (2.0 * 32.0 * 128.0)
        by_pair, by_row = params.prefill_pair_s * scale, params.prefill_row_s * scale
        by_kv, launch, loss = params.prefill_token_s * scale, params.prefill_launch_s, params.overlap_loss

        def form(ops: Ops, rows: Any, chunks: Any, pairs: Any, kv: Any) -> Any:
            x, y = pairs * by_pair, rows * by_row + kv * by_kv
            gap = x - y
            return layers * (launch + 0.5 * (x + y + ops.sqrt(gap * gap + loss * (x * y))))

        return form

    def _tpu_decode(self, shape: AttentionShape) -> DecodeForm:
        params = self.profile.get("tpu_decode", ("jax",))
        layers = float(shape.layers)
        # The kernel walks the cache: its cost follows the cached bytes, from 8 x 128 keys and values of 2 bytes.
        by_kv = params.decode_token_s * shape.kv_bytes / 4096.0
        by_seq, launch = params.decode_seq_s, params.decode_launch_s

        def form(ops: Ops, seqs: Any, queries: Any, kv: Any) -> Any:
            return layers * (launch + queries * by_seq + kv * (queries / seqs) * by_kv)

        return form

    def elementwise_s(self, size_bytes: Any, launches: int) -> Any:
        """Kernels that only stream: their start, and their bytes at the share of the bandwidth a stream reaches."""
        params = self.profile.get("elementwise", ("add/vidur", "rope/lss", "rope/jax", "add/torch"))
        sheet = self.profile.datasheet
        start = self._start(_ELEMENTWISE_START_S)
        resident = np.maximum(0.0, 1.0 - size_bytes * (1.0 / sheet.l2_bytes))
        stream = sheet.hbm_bytes_per_s * params.bandwidth_efficiency * (1.0 + params.cache_gain * resident)
        return launches * start + size_bytes / stream

    def stream_s(self, flops: Any, hbm_bytes: Any) -> Any:
        sheet = self.profile.datasheet
        return np.maximum(flops / (sheet.flops_per_s("bf16") * 0.5), hbm_bytes / (sheet.hbm_bytes_per_s * 0.8))

    def _collective_s(self, kind: str, size_bytes: Any, n: int) -> Any:
        network = self.device.network
        # A ring over each adapter of a node, one a device on InfiniBand; in an exchange each device has its own alone.
        rings = kind != "all_to_all" and network.kind == "InfiniBand"
        return self._kernels.collective_s(
            kind,
            size_bytes,
            n,
            between_nodes=n > self.device.devices_per_node,
            network_bytes_per_s=network.bytes_per_s,
            adapters=self.device.devices_per_node if rings else 1,
        )

    def _datasheet_link(self, between_nodes: bool) -> Interconnect | None:
        """The link of the datasheet where the profile has no measured collectives (TPU pods); None where it has."""
        if links_measured(self.profile):
            return None
        return self.device.network if between_nodes else self.device.link

    def all_reduce_s(self, size_bytes: Any, n: int) -> Any:
        link = self._datasheet_link(n > self.device.devices_per_node)
        return link.ring_all_reduce_s(size_bytes, n) if link else self._collective_s("all_reduce", size_bytes, n)

    def all_gather_s(self, size_bytes: Any, n: int) -> Any:
        link = self._datasheet_link(n > self.device.devices_per_node)
        return link.ring_all_gather_s(size_bytes, n) if link else self._collective_s("all_gather", size_bytes, n)

    def all_to_all_s(self, size_bytes: Any, n: int) -> Any:
        link = self._datasheet_link(n > self.device.devices_per_node)
        return link.all_to_all_s(size_bytes, n) if link else self._collective_s("all_to_all", size_bytes, n)

    def send_s(self, size_bytes: Any, between_nodes: bool) -> Any:
        link = self._datasheet_link(between_nodes)
        if link:
            return link.send_s(size_bytes)
        return self._kernels.collective_s(
            "send_recv",
            size_bytes,
            2,
            between_nodes=between_nodes,
            network_bytes_per_s=self.device.network.bytes_per_s,
        )

    def sample_s(self, logit_rows: Any) -> Any:
        return self._own.sample_s + logit_rows * 0.0


_WIDTH = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5}  # bytes of a weight that needs no expanding
_GRAPH_CHAIN_S = 1.2e-5
_ELEMENTWISE_START_S = 1.5e-6


@functools.lru_cache(maxsize=4096)
def _gemm_table(
    kernels: CalibratedKernels, n: int, k: int, dtype: str, weight_bytes: float
) -> tuple[np.ndarray, np.ndarray, float]:
    nodes = _gemm_nodes()
    seconds = np.asarray(kernels.gemm_s(nodes, n, k, dtype=dtype, weight_bytes=weight_bytes), float)
    return nodes, np.maximum.accumulate(seconds), kernels.gemm_start_s(dtype)


@functools.lru_cache(maxsize=1024)
def _moe_table(
    kernels: CalibratedKernels, experts: ExpertMlp, dtype: str, weight_bytes: float
) -> tuple[np.ndarray, np.ndarray, float]:
    nodes = _moe_nodes()
    seconds = kernels.moe_s(
        nodes,
        dtype=dtype,
        weight_bytes=weight_bytes,
        hidden_size=experts.hidden,
        inter_size=experts.ffn,
        topk=experts.per_token,
        experts=experts.n_experts,
        ep=experts.expert,
        distribution=_ROUTING,
    )
    return nodes, np.maximum.accumulate(np.asarray(seconds, float)), kernels.moe_start_s(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """Makes cost models from a device's calibrated profile under a serving stack; a `CostFactory` for `deploy`.

    `profile` names a calibrated profile file (.toml); None takes the shipped one of the device, or of its relative.
    """

    stack: ServingStack
    profile: str | None = None

    @classmethod
    def for_stack(cls, name: str, profile: str | None = None) -> Calibrated:
        return cls(stack=serving_stack(name), profile=profile)

    def load(self, device: Device) -> Profile:
        """The profile that prices *device*: its own, or its nearest relative's on its datasheet numbers."""
        if self.profile is not None:
            return load_profile(self.profile)
        if device_catalogue().get(device.name) == device:
            return load_profile(device.name)
        return borrow_for(device)

    def __call__(
        self,
        spec: ModelSpec,
        device: Device,
        parallel: ParallelConfig | None = None,
        *,
        kv_precision: str | None = None,
    ) -> LayerwiseCost:
        """The calibrated cost model of *spec* on *device*.

        ValueError if the profile lacks a kernel that the model needs, or the model cannot be split so.
        """
        parallel = parallel or ParallelConfig()
        profile = self.load(device)
        if any(kernel.family == "cpu_gemm" for kernel in profile.kernels):
            # Imported here: most runs are not on a CPU.
            from hwmodels.cpu import cpu_cost

            return cpu_cost(spec, profile, device=device, parallel=parallel, kv_precision=kv_precision)
        for fmt in (spec.attention_precision, spec.mlp_precision, spec.expert_precision, spec.base_precision):
            device.first_peak(number_format(fmt).math, f"precision {fmt}")
        lacking = [
            what
            for needed, family, what in (
                (spec.experts is not None, "moe", "a mixture of experts"),
                (isinstance(spec.attention, LatentAttention), "mla_decode", "latent attention"),
            )
            if needed and not any(kernel.family == family for kernel in profile.kernels)
        ]
        if lacking:
            raise ValueError(
                f"{spec.name} needs {' and '.join(lacking)}, which nobody has measured for the profile of {profile.name}; "
                "price it by the datasheet (cost_model: roofline) or choose another device"
            )
        layers = math.ceil(spec.n_layers / parallel.pipeline)
        kernels = StackKernels(
            device=device,
            profile=profile,
            profile_path=self.profile,
            stack=self.stack,
            layers=layers,
            expert_layers=layers if spec.experts is not None else 0,
            base_precision=spec.base_precision,
        )
        return LayerwiseCost(
            spec,
            parallel,
            kernels,
            peak_flops_per_s=device.first_peak(number_format(spec.mlp_precision).math, spec.mlp_precision),
            peak_bytes_per_s=device.hbm_bytes_per_s,
            devices_per_node=device.devices_per_node,
            kv_precision=kv_precision,
        )


def factory_of(cost: CostModel) -> Calibrated | Callable[..., LayerwiseCost]:
    """What makes cost models of other models as *cost* was made: the same profile and stack, or the roofline."""
    kernels = getattr(cost, "kernels", None)
    if isinstance(kernels, StackKernels):
        return Calibrated(stack=kernels.stack, profile=kernels.profile_path)
    return Roofline


def links_measured(profile: Profile) -> bool:
    """Whether the profile has collectives, its own or borrowed."""
    return any(kernel.family == "collective" for kernel in profile.kernels)


def overheads_of(cost: CostModel) -> Overheads:
    """The serving stack's overheads inside *cost*, and beside it in the front end; none for other cost models."""
    kernels = getattr(cost, "kernels", None)
    return kernels.stack.overheads if isinstance(kernels, StackKernels) else Overheads()


def profile_of(cost: CostModel) -> Profile:
    """The calibrated profile behind *cost*; TypeError where there is none."""
    profile = getattr(getattr(cost, "kernels", None), "profile", None)
    if not isinstance(profile, Profile):
        raise TypeError(f"{cost!r} was not made from a calibrated profile")
    return profile


def provenance(cost: CostModel) -> dict[str, Any]:
    """For manifests: the profile, what it was fitted to, and the stack's terms with their sources."""
    profile = profile_of(cost)
    kernels = getattr(cost, "kernels", None)
    own = [kernel for kernel in profile.kernels if not kernel.provenance.borrowed_from]
    found: dict[str, Any] = {
        "profile": profile.name,
        "calibration": profile.note,
        "measured_kernels": len(own),
        "borrowed_kernels": len(profile.kernels) - len(own),
        "fitted_on": sorted({kernel.provenance.fitted_on for kernel in profile.kernels}),
        "files": sorted({file for kernel in profile.kernels for file in kernel.provenance.files}),
    }
    if isinstance(kernels, StackKernels):
        stack = kernels.stack
        found["serving_stack"] = {
            "name": stack.name,
            "kernels": stack.kernels,
            "terms": {name: getattr(stack.overheads, name) for name in stack.sources},
            "sources": dict(stack.sources),
        }
    return found
