"""The cost model of each machine of these documents: one for a machine, whatever the experiment.

**A100.** Kernels measured on it (GEMMs, attention, element-wise), NCCL's measured all-reduce, which both code bases of 2023
called, not overlapped with anything, and the two terms of PyTorch without graphs that a fit to another system gave
(Llama-2-70B on A100, Splitwise): the time to launch a layer, and what long arithmetic loses. The host work of that
system's own server is left out: no document here ran on it. Nothing is fitted to a row of this group.

**A6000 and A40**, one chip: five published times of LLaMA-13B on an A6000 (`hwmodels.published`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hwmodels.calibrated import Calibrated
from hwmodels.deployment import Deployment, deploy
from hwmodels.device import Device, Interconnect, load_device
from hwmodels.gpu import GpuKernels
from hwmodels.kernels import collectives
from hwmodels.layerwise import LayerwiseCost
from hwmodels.model import Attention, ModelSpec, load_model
from hwmodels.overheads import Overheads, ServingStack, serving_stack
from hwmodels.parallel import ParallelConfig
from hwmodels.profiles import load_profile
from hwmodels.published import Published


@functools.cache
def pytorch(server: bool = False, more_s: float = 0.0) -> ServingStack:
    """PyTorch on A100 without graphs, collectives by NCCL.

    *server*: with the host work of vLLM of 2023 as well, as fitted to Splitwise's runs. *more_s*: seconds more in every
    iteration of a stage, to say how much is missing.
    """
    eager = serving_stack("eager")
    found = eager.overheads
    if not server:
        found = Overheads(layer_host_s=found.layer_host_s, sustained_loss=found.sustained_loss)
    return dataclasses.replace(
        eager,
        name="pytorch",
        title="PyTorch without graphs on A100",
        # Under this name collectives are NCCL's; the matrix products and attention are those that vLLM calls.
        kernels=eager.kernels,
        overheads=dataclasses.replace(found, step_s=found.step_s + more_s),
    )


A100 = Calibrated(stack=pytorch())
"""Cost models on A100, all GPUs of a node behind switches."""
A100_WITH_SERVER = Calibrated(stack=pytorch(server=True))
"""The same with the host work of vLLM of 2023: shown beside, judged nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedKernels(GpuKernels):
    """A100 whose GPUs are joined by NVLink in pairs and pairs by PCIe: all-reduces as measured on such a node."""

    reduces_a_layer: int = 2
    """All-reduces of a layer: one where attention and MLP run side by side and are added before, as in Falcon."""

    def collective_s(self, kind: str, size_bytes: Any, n: int) -> Any:
        if kind != "all_reduce":
            return GpuKernels.collective_s(self, kind, size_bytes, n)
        variant, link = "nccl", self.profile.datasheet.link_bytes_per_s
        if n > 2:
            variant = "vidur-pairs-node"
        if n > self.device.devices_per_node:
            # Measured between nodes at 4 to 8 GB/s, which is below what 100 Gb/s carry: so not scaled to the wire.
            variant, link = "vidur-network", collectives.NETWORK_BYTES_PER_S
        params = self.profile.get("collective", [f"all_reduce/{variant}"])
        return self.reduces_a_layer / 2 * collectives.collective_s(params, "all_reduce", size_bytes, n, link)


def paired_a100(
    spec: ModelSpec, device: Device, parallel: ParallelConfig | None = None, *, kv_precision: str | None = None
) -> LayerwiseCost:
    """`A100` on nodes of `PAIRED_A100`; a `CostFactory`. Only the links differ."""
    parallel = parallel or ParallelConfig()
    kernels = PairedKernels(
        device=device,
        profile=load_profile("a100-80gb-sxm"),
        stack=pytorch(),
        layers=math.ceil(spec.n_layers / parallel.pipeline),
        reduces_a_layer=1 if spec.family == "falcon" else 2,
    )
    return LayerwiseCost.on(device, spec, parallel, kernels, kv_precision=kv_precision)


@functools.cache
def paired_a100_node() -> Device:
    """An A100 of a node of four in two NVLink pairs, nodes joined by 100 Gb/s Ethernet. Sarathi-Serve, section 5."""
    return dataclasses.replace(
        load_device("a100-80gb-sxm"),
        name="a100-80gb-pairs",
        network=Interconnect(kind="Ethernet", latency_s=10e-6, bytes_per_s=12.5e9),
        devices_per_node=4,
    )


@functools.cache
def falcon_180b() -> ModelSpec:
    """Falcon-180B: 80 layers, attention and MLP side by side. Almazrouei et al., arXiv 2311.16867, table 1."""
    layers, hidden = 80, 14848
    return ModelSpec(
        name="falcon-180b",
        family="falcon",
        hidden=hidden,
        vocab=65024,
        attention=Attention(n_heads=232, n_kv_heads=8, head_dim=64),
        ffn=4 * hidden,
        layer_is_moe=(False,) * layers,
        layer_attention=("full",) * layers,
        gated_mlp=False,
        norm_params=2 * hidden,
        tied_embeddings=True,
        source="arXiv 2311.16867, table 1; config.json of tiiuae/falcon-180B",
    )


MACHINES: dict[str, tuple[Callable[[], Device], Callable[..., Any]]] = {
    "a6000": (lambda: load_device("a6000"), Published),
    "a40": (lambda: load_device("a40"), Published),
    "a100-80gb-sxm": (lambda: load_device("a100-80gb-sxm"), A100),
    "a100-80gb-pairs": (paired_a100_node, paired_a100),
}
"""Machine -> its device, and what prices it."""


@functools.cache
def deployment(
    model: str, machine: str, tensor: int = 1, pipeline: int = 1, factory: Callable[..., Any] | None = None
) -> Deployment:
    """A replica of *model* in fp16 on a machine of `MACHINES`, priced by its account or by *factory*."""
    device, priced = MACHINES[machine]
    return deploy(
        model=falcon_180b() if model == "falcon-180b" else load_model(model),
        hardware=device(),
        parallel=ParallelConfig(tensor=tensor, pipeline=pipeline),
        precision="fp16",
        cost=factory or priced,
    )
