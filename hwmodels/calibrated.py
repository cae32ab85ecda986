"""The calibrated cost model: a profile's kernels under a serving stack, for the kind of device that the profile is of."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hwmodels.cpu import cpu_cost
from hwmodels.device import Device, device_catalogue
from hwmodels.gpu import GpuKernels
from hwmodels.kernels.families import FAMILIES
from hwmodels.layerwise import LayerwiseCost
from hwmodels.model import LatentAttention, ModelSpec
from hwmodels.overheads import ServingStack, serving_stack
from hwmodels.parallel import ParallelConfig
from hwmodels.precision import precision as number_format
from hwmodels.profiles import Profile, borrow_for, load_profile
from hwmodels.tpu import TpuKernels


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """Makes cost models from a device's calibrated profile under a serving stack; a `CostFactory` for `deploy`.

    `profile` names a calibrated profile file (.toml); None takes the shipped one of the device, or of its relative.
    """

    stack: ServingStack
    profile: str | None = None

    @classmethod
    def for_stack(cls, name: str, profile: str | None = None, release: str | None = None) -> Calibrated:
        return cls(stack=serving_stack(name, release), profile=profile)

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
            }
        return found

    def stand_ins(self, spec: ModelSpec, device: Device) -> tuple[str, ...]:
        """A sentence for each format of *spec* that another format's, software's or device's measurements price."""
        profile = self.load(device)
        if profile.kind != "gpu":
            return ()
        kernels = GpuKernels(device=device, profile=profile, stack=self.stack, layers=1)
        products = (spec.attention_precision, spec.mlp_precision, spec.base_precision)
        if spec.experts is None:
            return tuple(kernels.stand_ins(products, None, spec.hidden, 0, 0))
        topk, count = spec.experts.per_token, spec.experts.n_experts
        return tuple(kernels.stand_ins(products, spec.expert_precision, spec.hidden, topk, count))

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
        for fmt in (spec.attention_precision, spec.mlp_precision, spec.expert_precision, spec.base_precision):
            device.first_peak(number_format(fmt).math, f"precision {fmt}")
        lacking = [
            what
            for needed, family, what in (
                (spec.experts is not None, "moe", "a mixture of experts"),
                (isinstance(spec.attention, LatentAttention), "mla_decode", "latent attention"),
            )
            if needed and not profile.has(family)
        ]
        if lacking:
            raise ValueError(
                f"{spec.name} needs {' and '.join(lacking)}, which nobody has measured for the profile of {profile.name}; "
                "price it by the datasheet (cost_model: roofline) or choose another device"
            )
        layers = math.ceil(spec.n_layers / parallel.pipeline)
        kernels = (TpuKernels if profile.kind == "tpu" else GpuKernels)(
            device=device,
            profile=profile,
            stack=self.stack,
            layers=layers,
            expert_layers=layers if spec.experts is not None else 0,
        )
        return LayerwiseCost.on(device, spec, parallel, kernels, kv_precision=kv_precision)
