"""The calibrated cost model: a profile's kernels under a serving stack, for the kind of device that the profile is of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hwmodels.cpu import cpu_cost
from hwmodels.device import Device, device_catalogue
from hwmodels.gpu import GpuKernels
from hwmodels.graphs import DEFAULT_GRAPHS, STACKS, GraphSettings, captured_sizes
from hwmodels.kernels.families import FAMILIES
from hwmodels.layerwise import LayerwiseCost
from hwmodels.memory import engine_defaults
from hwmodels.model import CompressedAttention, LatentAttention, ModelSpec
from hwmodels.operations import StageWork
from hwmodels.overheads import ServingStack, serving_stack
from hwmodels.parallel import ParallelConfig
from hwmodels.profiles import Profile, borrow_for, load_profile
from hwmodels.stacks import servers, stacks
from hwmodels.tpu import TpuKernels


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """Makes cost models from a device's calibrated profile under a serving stack; a `CostFactory` for `deploy`.

    `profile` names a calibrated profile file (.toml); None takes the shipped one of the device, or of its relative.
    """

    stack: ServingStack
    profile: str | None = None
    graphs: GraphSettings = DEFAULT_GRAPHS
    handed_over: bool = False
    """Whether another machine computes the prompts: one with a single token left is then a decode, whatever the stack."""

    @classmethod
    def for_stack(cls, name: str, graphs: GraphSettings = DEFAULT_GRAPHS) -> Calibrated:
        return cls(stack=serving_stack(name), graphs=graphs)

    def captured(self, device: Device, tensor: int) -> tuple[int, ...] | None:
        """The rows of the graphs that decode steps are padded to; empty: none; None: the stack has no list of them.

        ValueError where graphs are set of a stack or device without.
        """
        if self.stack.engine in STACKS and self.load(device).kind == "gpu":
            default = engine_defaults(self.stack.engine, device, tensor=tensor).graph_sequences
            return captured_sizes(self.stack.engine, self.graphs, default)
        if self.graphs != DEFAULT_GRAPHS:
            raise ValueError(
                f"CUDA graphs of given sizes are of {', '.join(STACKS)} on GPUs; {self.stack.name} on {device.name} has none"
            )
        return None

    def load(self, device: Device) -> Profile:
        """The profile that prices *device*: its own, or its nearest relative's on its datasheet numbers."""
        if self.profile is not None:
            return load_profile(self.profile)
        if device_catalogue().get(device.name) == device:
            return load_profile(device.name)
        return borrow_for(device)

    def provenance(self, device: Device) -> dict[str, Any]:
        """For manifests: the profile, what it was fitted to, and the stack's terms with their sources."""
        profile = self.load(device)
        own = sum(not kernel.provenance.borrowed_from for kernel in profile.kernels)
        found: dict[str, Any] = {
            "profile": profile.name,
            "calibration": profile.note,
            "measured_kernels": own,
            "borrowed_kernels": sum(len(profile.variants(family)) for family in FAMILIES) - own,
            "fitted_on": sorted({kernel.provenance.fitted_on for kernel in profile.kernels}),
            "files": sorted({file for kernel in profile.kernels for file in kernel.provenance.files}),
        }
        if profile.kind != "cpu":
            found["serving_stack"] = {
                "name": self.stack.name,
                **({"release": self.stack.release, "fitted_to": self.stack.fitted_to} if self.stack.release else {}),
                "kernels": self.stack.kernels,
                "terms": {name: getattr(self.stack.overheads, name) for name in self.stack.sources},
                "sources": dict(self.stack.sources),
                **({"fit": dict(self.stack.fit)} if self.stack.fit else {}),
            }
        return found

    def stand_ins(self, spec: ModelSpec, device: Device, stages: Sequence[StageWork]) -> tuple[str, ...]:
        """A sentence for each kernel of *spec*'s *stages* that another format's, software's or device's measurements price."""
        kernels = self._gpu(device)
        if kernels is not None:
            return tuple(kernels.stand_ins(_dense(spec), stages))
        profile = self.load(device)
        if profile.kind != "tpu":
            return ()
        attention = profile.kernel("tpu_decode", ("jax",))
        lender = "" if attention is None else attention.provenance.borrowed_from
        lent = f"{device.name}: attention and what runs between matrix products are priced as measured on {lender}."
        # The JAX stack's products were timed in bf16 alone.
        others = [fmt for fmt in dict.fromkeys(_dense(spec)) if fmt not in ("bf16", "fp16")]
        formats = (f"{device.name}: {fmt} matrix products are priced as bf16 ones were measured." for fmt in others)
        return (*((lent,) if profile.kernels and lender else ()), *formats)

    def loan(
        self, spec: ModelSpec, device: Device, stages: Sequence[StageWork], *, network_alone: bool = False
    ) -> tuple[float, float]:
        """The factors of what is priced between which the times of the lent kernels of *stages* lie nine times in ten.

        The ends are the widest of any kernel's; (1, 1) where nothing is lent, and for a device that is no GPU. Kernels that only
        stream take little of a step, and are left out. *network_alone*: of kernels that run over the network between nodes.
        """
        kernels = self._gpu(device)
        uses = [] if kernels is None else kernels.uses(_dense(spec), stages)
        lent = [
            use.kernel.provenance.spread
            for use in uses
            if use.kernel.provenance.borrowed_from and (use.far or not network_alone)
        ]
        low = min((1.0 + each.low_pct / 100.0 for each in lent), default=1.0)
        return min(1.0, low), max((1.0, *(1.0 + each.high_pct / 100.0 for each in lent)))

    def lent_factors(
        self, spec: ModelSpec, device: Device, stages: Sequence[StageWork]
    ) -> Mapping[str, Sequence[float]]:
        """The factors of what is priced, by family, within which the lent kernels of *stages* lie nine times in ten."""
        kernels, profile = self._gpu(device), self.load(device)
        if kernels is None:
            # Of a TPU's kernels there is one each.
            lender, tpu = profile.lender, [family for family in FAMILIES if family.startswith("tpu_")]
            return {} if lender is None else {family: lender.factors(family) for family in tpu}
        found: dict[str, list[float]] = {}
        for use in kernels.uses(_dense(spec), stages):
            if use.kernel.provenance.borrowed_from:
                found.setdefault(use.kernel.family, []).append(use.kernel.provenance.spread.factor)
        return found

    def _gpu(self, device: Device) -> GpuKernels | None:
        profile = self.load(device)
        return GpuKernels(device=device, profile=profile, stack=self.stack, layers=1) if profile.kind == "gpu" else None

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
        if profile.kind == "cpu":
            return cpu_cost(spec, profile, device=device, parallel=parallel, kv_precision=kv_precision)
        _check_vendor((self.stack.name, self.stack.kernels), device)
        for fmt in (spec.attention_precision, spec.mlp_precision, spec.expert_precision, spec.base_precision):
            device.peak_of(fmt)
        if "fp32" in (spec.attention_precision, spec.mlp_precision, spec.expert_precision, spec.base_precision):
            raise ValueError(
                f"fp32 has been measured on CPUs alone, and the kernels of {device.name} would price it at the rate of 16 bits; "
                "price it by the datasheet (cost_model: roofline), or choose precision bf16 or fp16"
            )
        lacking = [
            what
            for needed, family, what in (
                (spec.experts is not None, "moe", "a mixture of experts"),
                (isinstance(spec.attention, LatentAttention), "mla_decode", "latent attention"),
                (
                    isinstance(spec.attention, CompressedAttention),
                    "compressed_decode",
                    "attention to compressed tokens",
                ),
                ("blocks" in spec.layer_attention, "compressed_decode", "attention to chosen blocks"),
                (profile.kind == "tpu", "tpu_decode", "attention"),
            )
            if needed and not profile.has(family)
        ]
        if lacking:
            raise ValueError(
                f"{spec.name} needs {' and '.join(lacking)}, which nobody has measured for the profile of {profile.name}; "
                "price it by the datasheet (cost_model: roofline) or choose another device"
            )
        layers = math.ceil(spec.n_layers / parallel.pipeline)
        captured = self.captured(device, parallel.tensor)
        kernels = (TpuKernels if profile.kind == "tpu" else GpuKernels)(
            device=device,
            profile=profile,
            stack=self.stack,
            layers=layers,
            expert_layers=layers if spec.experts is not None else 0,
            latent_layers=layers if isinstance(spec.attention, (LatentAttention, CompressedAttention)) else 0,
            captured=captured,
            decode_only=self.graphs.decode_only,
            handed_over=self.handed_over,
        )
        found = LayerwiseCost.on(device, spec, parallel, kernels, kv_precision=kv_precision)
        for work in found.work_by_stage:
            if work.experts is not None:
                kernels.check_backend(work.experts)
        return found


def _check_vendor(names: tuple[str, str], device: Device) -> None:
    """ValueError where a stack, or the one whose kernels stand for its own, does not run on devices of this maker."""
    for stack in (stacks()[name] for name in names if name in stacks()):
        if stack.vendors and device.vendor not in stack.vendors:
            others = [name for name in servers() if device.vendor in (stacks()[name].vendors or (device.vendor,))]
            name, instead = (stack.title, " or ".join(others)) if stack.like is None else (stack.name, stack.like)
            raise ValueError(
                f"{name} runs on {' and '.join(stack.vendors)}'s GPUs alone, and {device.name} is {device.vendor}'s; choose "
                f"serving_stack {instead}, or another device"
            )


def _dense(spec: ModelSpec) -> tuple[str, ...]:
    """The precisions of the dense layers."""
    return spec.attention_precision, spec.mlp_precision, spec.base_precision
