"""The changes that a serving stack makes to a device's kernels, whatever kind of device it is: host times, overlap, losses,
links."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hwmodels.device import Device, Interconnect
from hwmodels.kernels.attention import kernel_source
from hwmodels.kernels.elementwise import streamed_s
from hwmodels.kernels.families import COLLECTIVE, EXCHANGE, STEPPED
from hwmodels.kernels.form import KernelForm
from hwmodels.kernels.ops import DecodeForm, PrefillForm, Running, streamed_forms
from hwmodels.kernels.protocol import HostTimes
from hwmodels.operations import AttentionShape, Exchange, ExpertMlp, HeadProducts, Recurrence
from hwmodels.overheads import Overheads, ServingStack, serving_stack
from hwmodels.precision import math_of
from hwmodels.precision import precision as number_format
from hwmodels.profiles import Profile
from hwmodels.stacks import default_stack, kernels_of, servers

WIDTH = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5}
"""Bytes of a number that the arithmetic of that name takes as it is."""
# Between the starts fitted to Vidur's residual additions on H100 (1.36 us) and A100 (1.91 us): `add/vidur` of the profiles.
_ELEMENTWISE_START_S = 1.5e-6
# Recurrent layers: shares of peak and bandwidth that are assumed, since no measurement of them is at hand.
RECURRENT_FLOPS_SHARE, RECURRENT_BYTES_SHARE = 0.5, 0.8

_DEEPEP_SMS = 20
"""Multiprocessors that vLLM 0.32.0 gives to DeepEP's normal kernels (distributed/device_communicators/all2all.py)."""

Table = tuple[np.ndarray, np.ndarray, float]
"""Rows, seconds at each, and the start that the seconds contain."""


def weights_of(experts: ExpertMlp) -> str:
    """The format of experts, as backends are listed by it."""
    return {"fp16": "bf16", "int4_g32": "int4"}.get(experts.precision, experts.precision)


@functools.cache
def gemm_nodes() -> np.ndarray:
    """Rows between which a GEMM's time is a straight line to within a percent: both sides of each step of tiles."""
    edges = [*range(16, 257, 16), *range(320, 1025, 64), *range(1152, 8193, 128), *range(8704, 65537, 512)]
    below = [1, 2, 4, 8, *edges]
    return np.array(sorted({*below, *(edge + 1 for edge in edges)}), float)


@functools.cache
def moe_nodes() -> np.ndarray:
    """Tokens at which a grouped GEMM is evaluated: every one to 16, then sixteen to the octave."""
    return np.unique(np.concatenate([np.arange(1.0, 17.0), np.round(16.0 * 2.0 ** (np.arange(1, 193) / 16.0))]))


@dataclass(frozen=True, slots=True, kw_only=True)
class StackKernels:
    """A profile's kernels as a serving stack runs them: what GPUs and TPUs have in common.

    Formats that the device cannot multiply are expanded to 16 bits; attention computes in 16 bits whatever the cache, but
    for the stacks that bring queries to its 8 bits (`quantises_queries`).
    """

    device: Device
    profile: Profile = field(repr=False, hash=False)
    stack: ServingStack
    layers: int
    """The layers of one stage, for host work by the layer."""
    expert_layers: int = 0
    """All of them where the model has experts, the few dense ones of DeepSeek's kind counted too; else none."""
    latent_layers: int = 0
    """Those of them with latent attention."""
    captured: tuple[int, ...] | None = None
    """The rows of the graphs of decode steps; empty: the server was told to run without any (`hwmodels.graphs`)."""
    decode_only: bool = False
    """Whether it was told to have graphs for decode steps alone."""
    handed_over: bool = False
    """Whether another machine computes the prompts: one with a single token left is then a decode, whatever the stack."""

    @property
    def _own(self) -> Overheads:
        return self.stack.overheads

    @property
    def sources(self) -> tuple[str, ...]:
        """The software whose measured kernels stand for the stack's, the best first: on AMD's devices AITER, which engines take."""
        own = "aiter" if self.device.vendor == "AMD" else self.stack.kernels
        return tuple(dict.fromkeys((own, *servers(), "vidur", "torch", "jax", "aiter", "lss")))

    def attention_variants(self, shape: AttentionShape, cache_bytes: float, *, prompts: bool) -> list[str]:
        """Parameter sets that may price softmax attention over a cache of `cache_bytes` a number, the best first.

        A set of the stack itself for another format comes before another stack's for this one.
        """
        sheet, formats = self.profile.datasheet, ("",)
        if cache_bytes < 1.5:
            eight = prompts and kernels_of(self.sources[0]).quantises_queries and "fp8" in sheet.peak_flops_per_s
            formats = ("fp8q/", "fp8/", "") if eight else ("fp8/", "")
        group = shape.n_heads / shape.n_kv_heads
        own = kernel_source(
            self.sources[0], sheet, prompts=prompts, windowed=shape.windowed, head_dim=shape.qk_dim, group=group
        )
        return [f"{fmt}{source}" for source in dict.fromkeys((own, *self.sources)) for fmt in formats]

    @property
    def host(self) -> HostTimes:
        own = self._own
        floor_s = own.layer_host_s * self.layers
        floor_s += own.expert_host_s * self.expert_layers + own.latent_host_s * self.latent_layers
        decode_floor_s = 0.0 if self.stack.graph else floor_s
        launch_floor_s = decode_floor_s
        if self.captured is not None:
            # Of a dense layer launches were fitted to the eager stack's runs alone. What a stack's prompts with experts or latent
            # attention take was fitted with nothing for the rest of the layer, and holds it.
            any_layer_s = serving_stack("eager").overheads.layer_host_s * self.layers
            launch_floor_s = floor_s if own.layer_host_s else max(any_layer_s, floor_s)
            if not self.captured or self.decode_only:
                floor_s = launch_floor_s
            if not self.captured:
                decode_floor_s = launch_floor_s
        return HostTimes(
            step_s=own.step_s,
            sequence_s=own.sequence_s,
            row_s=own.row_s,
            prompt_floor_s=floor_s,
            decode_floor_s=decode_floor_s,
            launch_floor_s=launch_floor_s,
            decode_tokens=int(self.handed_over or kernels_of(self.stack.engine).one_token_is_decode),
            compute_factor=1.0 + own.compute_excess,
            bandwidth_factor=1.0 + own.bandwidth_excess,
            prompt_factor=1.0 + own.prompt_excess,
        )

    def check_backend(self, experts: ExpertMlp) -> None:
        """ValueError where the stack has no such backend for the format, or its backends are not known."""
        if experts.backend is None:
            return
        backends, weights = kernels_of(self.stack.kernels).expert_backends, weights_of(experts)
        known = () if backends is None else backends.of(weights, self.device.name)[0]
        if experts.backend not in known:
            have = f"it has {', '.join(known)}" if known else "none are known; leave experts.backend out"
            raise ValueError(f"{self.stack.name} has no backend {experts.backend!r} for experts in {weights}; {have}")

    def running(self, shape: AttentionShape) -> Running:
        """The way in which the stack runs the attention of *shape*."""
        return Running(
            layers=float(shape.layers),
            start_share=1.0 - self._own.launch_overlap,
            pair_lost_s=self._loss_s(shape.prefill_flops_per_pair, "bf16"),
            window_tokens=shape.window_tokens,
        )

    def arithmetic(self, fmt: str) -> tuple[str, float, bool]:
        """The arithmetic the device multiplies *fmt* in, the bytes of a weight, and whether weights are expanded."""
        number = number_format(fmt)
        peaks = self.profile.datasheet.peak_flops_per_s
        math = math_of(fmt, peaks, self.device.vendor)
        if math != number.math:
            return math[0], number.weight_bytes, False
        names = ["bf16" if choice in ("fp16", "fp32") else choice for choice in math]
        dtype = next((name for name in names if name in peaks), "bf16")
        return dtype, number.weight_bytes, number.weight_bytes < 0.75 * WIDTH[dtype]

    def _loss_s(self, flops: Any, dtype: str, weight_bytes: float = 2.0) -> Any:
        own = self._own
        loss = own.sustained_loss + (own.narrow_loss if weight_bytes < 1.5 else 0.0)
        return flops * (loss / self.profile.datasheet.flops_per_s(dtype))

    def tabulated_s(
        self,
        rows: Any,
        flops: Any,
        precision: str,
        table_of: Callable[[str, float], Table],
    ) -> Any:
        """Seconds at *rows* of what `table_of(arithmetic, weight_bytes)` holds, with what the stack hides and loses."""
        dtype, weight_bytes, _ = self.arithmetic(precision)
        nodes, seconds, start_s = table_of(dtype, weight_bytes)
        seconds = seconds - (start_s - start_s * (1.0 - self._own.launch_overlap))
        # Past the last node time grows with the rows.
        beyond = np.maximum(0.0, rows - nodes[-1]) * (seconds[-1] / nodes[-1])
        return np.interp(rows, nodes, seconds) + beyond + self._loss_s(flops, dtype, weight_bytes)

    def elementwise_s(self, size_bytes: Any, launches: int, op: str = "") -> Any:
        """Kernels that only stream: their start, and their bytes at the share of the bandwidth a stream reaches."""
        own = self.profile.find("elementwise", [f"{op}/{source}" for source in self.sources]) if op else None
        if own is not None:
            hidden_s = own.launch_s * self._own.launch_overlap
            return launches * (own.launch_s - hidden_s) + streamed_s(own, self.profile.datasheet, size_bytes)
        params = self.profile.get("elementwise", ("add/vidur", "rope/lss", "rope/jax", "add/torch"))
        start_s = _ELEMENTWISE_START_S * (1.0 - self._own.launch_overlap)
        return launches * start_s + streamed_s(params, self.profile.datasheet, size_bytes)

    def head_products_s(self, rows: Any, products: HeadProducts) -> Any:
        raise ValueError(
            f"profile {self.profile.name} has no mla_bmm parameters: latent attention has not been measured"
        )

    def recurrence_forms(self, shape: Recurrence) -> tuple[PrefillForm, DecodeForm]:
        sheet = self.profile.datasheet
        return streamed_forms(
            shape.flops_per_row / (sheet.flops_per_s("bf16") * RECURRENT_FLOPS_SHARE),
            shape.bytes_per_sequence / (sheet.hbm_bytes_per_s * RECURRENT_BYTES_SHARE),
        )

    def _datasheet_link(self, between_nodes: bool) -> Interconnect | None:
        """The link of the datasheet where the profile has no measured collectives (TPU pods); None where it has."""
        if self.profile.links_measured:
            return None
        return self.device.network if between_nodes else self.device.link

    def link_variants(self, kind: str, between_nodes: bool) -> list[str]:
        """Parameter sets that may price a collective of *kind*, the best first."""
        if between_nodes:
            return [f"{kind}/vidur-network", "all_reduce/vidur-network"]
        wanted = [f"{kind}/nccl", f"{kind}/vidur-node", "all_gather/nccl", "all_reduce/nccl"]
        if kind == "all_reduce" and self._has_own_all_reduce:
            makers = dict.fromkeys((self.stack.name, self.stack.kernels, default_stack().name))
            wanted = [*(f"all_reduce/{maker}-graph" for maker in makers), *wanted]
        return wanted

    def link_form(self, kind: str, between_nodes: bool) -> tuple[KernelForm[Any], list[str]]:
        """The form that prices a collective of *kind* and the parameter sets that may, the best first.

        Within a node of AMD's devices it is RCCL's, whose all-reduce stands for its other collectives.
        """
        if not between_nodes and self.device.link.kind != "PCIe" and self.profile.has("stepped"):
            return STEPPED, ["all_reduce/rccl"]
        return COLLECTIVE, self.link_variants(kind, between_nodes)

    def _measured_s(self, kind: str, size_bytes: Any, n: int, between_nodes: bool, adapters: int) -> Any:
        """By the profile: in a node, or between nodes over `adapters` network adapters for each node."""
        form, wanted = self.link_form(kind, between_nodes)
        # Shares of `NETWORK_BYTES_PER_S` were fitted; they are taken to hold for the network of this device.
        network_bytes_per_s = self.device.network.bytes_per_s * adapters
        link_bytes_per_s = network_bytes_per_s if between_nodes else self.profile.datasheet.link_bytes_per_s
        shape = {"kind": kind, "message_bytes": size_bytes, "devices": n, "link_bytes_per_s": link_bytes_per_s}
        if form is STEPPED:
            shape["rising"] = True
        return form.seconds(self.profile.get(form.family, wanted), self.profile.datasheet, shape)

    @property
    def _has_own_all_reduce(self) -> bool:
        """Serving stacks write to their peers' memory behind a switch; over PCIe they leave it to NCCL, as PyTorch does.

        vLLM 0.32.0, vllm/distributed/device_communicators/custom_all_reduce.py: not for more than two devices on PCIe.
        """
        return self.stack.graph and self.device.link.kind != "PCIe"

    def collective_s(self, kind: str, size_bytes: Any, n: int) -> Any:
        between_nodes = n > self.device.devices_per_node
        if link := self._datasheet_link(between_nodes):
            return link.collective_s(kind, size_bytes, n)
        # A ring over each adapter of a node, one a device on InfiniBand; in an exchange each device has its own alone.
        rings = kind != "all_to_all" and self.device.network.kind == "InfiniBand"
        return self._measured_s(kind, size_bytes, n, between_nodes, self.device.devices_per_node if rings else 1)

    @property
    def pads_ranks(self) -> bool:
        """A graph is replayed on all ranks at once (vLLM 0.32.0, v1/worker/dp_utils.py; SGLang, dp_attention.py)."""
        return self.stack.graph and self.captured != ()

    @property
    def _reduces_prompts(self) -> bool:
        return kernels_of(self.stack.kernels).prompts_by_all_reduce

    def exchange_s(self, rows: Any, exchange: Exchange) -> Any:
        """Dispatch and combine of one layer. ValueError for DeepEP without a switch between the devices of a node.

        Unless told otherwise stacks send all rows to every device and bring their sums back: vLLM's `allgather_reducescatter`
        (0.32.0, distributed/device_communicators/all2all.py), whichever experts a row needs. Where experts are on all devices
        SGLang may run DeepEP, so that its own way with prompts is taken where they are on fewer.
        """
        n, load = exchange.n, exchange.load
        if exchange.mode in (None, "allgather_reducescatter"):
            size_bytes = rows * exchange.row_bytes
            apart_s = self.collective_s("all_gather", size_bytes, n) + self.collective_s(
                "reduce_scatter", size_bytes, n
            )
            if exchange.mode is None and exchange.expert < n and not self.handed_over and self._reduces_prompts:
                replayed = max(self.captured or (0,)) * (n // exchange.tensor)
                return np.where(
                    np.asarray(rows) > replayed, 2.0 * self.collective_s("all_reduce", size_bytes, n), apart_s
                )
            return apart_s
        # One copy to each group that holds one of a token's experts, and there to each device that has a part of it.
        split = n // exchange.expert
        if exchange.mode == "all_to_all":
            arriving = float(load.hits().max()) * exchange.expert * split
            return 2.0 * self.collective_s("all_to_all", rows / n * arriving * exchange.row_bytes, n)
        return sum(self._deepep_s(operation, rows / n, exchange) for operation in ("dispatch", "combine"))

    def _deepep_s(self, operation: str, tokens: Any, exchange: Exchange) -> Any:
        """One direction for *tokens* of each device, by the measured kernels.

        They were measured within a node. Between nodes the network carries beside them, at its own rate, one copy for each node
        that a token goes to (normal mode, which forwards it there by NVLink), or one for each expert (low latency).
        """
        if self.device.link.kind == "PCIe" or self._datasheet_link(False) is not None:
            raise ValueError(
                f"DeepEP needs NVLink, and devices of {self.device.name} are joined by {self.device.link.kind}; "
                "set experts.exchange: allgather_reducescatter"
            )
        load, n, direct = exchange.load, exchange.n, exchange.mode == "deepep_low_latency"
        reached = load.rank_slots if direct else load.hits()
        number_bytes = exchange.sent_bytes if operation == "dispatch" else 2.0
        shape = {
            "tokens": tokens,
            "hidden": exchange.hidden,
            "topk": exchange.per_token,
            "experts": exchange.n_experts,
            "devices": n,
            "number_bytes": number_bytes,
            "sms": 0 if direct else _DEEPEP_SMS,
            "copies": float(reached.sum()) * (n // exchange.expert),
            "fullest": float(reached.max() / reached.mean()),
        }
        params = self.profile.get("exchange", self.exchange_variants(operation, exchange.mode))
        within_s = EXCHANGE.seconds(params, self.profile.datasheet, shape)
        nodes = n // self.device.devices_per_node
        if n <= self.device.devices_per_node:
            return within_s
        copies = exchange.per_token * (1.0 - 1.0 / nodes)
        if not direct:
            copies = float(load.hits(nodes).max()) * nodes * (1.0 - 1.0 / nodes)
        network = self.device.network
        across_s = network.latency_s + tokens * (copies * exchange.hidden * number_bytes / network.bytes_per_s)
        return np.maximum(within_s, np.where(np.asarray(tokens) > 0, across_s, 0.0))

    @staticmethod
    def exchange_variants(operation: str, mode: str | None) -> list[str]:
        """Parameter sets of one direction of DeepEP's exchange."""
        return [f"{operation}/deepep-{'low-latency' if mode == 'deepep_low_latency' else 'normal'}"]

    def send_s(self, size_bytes: Any, between_nodes: bool) -> Any:
        if link := self._datasheet_link(between_nodes):
            return link.send_s(size_bytes)
        return self._measured_s("send_recv", size_bytes, 2, between_nodes, 1)

    def sample_s(self, logit_rows: Any) -> Any:
        return self._own.sample_s + logit_rows * 0.0
