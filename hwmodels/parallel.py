"""The layout of one replica of a model over devices."""

from __future__ import annotations

from dataclasses import dataclass, field

from hwmodels.experts import ExpertLayout
from hwmodels.model import Attention, CompressedAttention, LatentAttention, LinearAttention, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Degrees of parallelism of one replica, on `tensor * pipeline * data * prefill_context` devices.

    `data` is the degree of data-parallel attention in a mixture-of-experts deployment: each group of `tensor` devices
    holds its own attention weights and its share of the sequences, while the experts spread over all `tensor * data`
    devices of a stage. `expert` of those groups hold different experts; within a group an expert is split by columns.

    `decode_context` devices of the `tensor` share the KV of each sequence, `kv_interleave` tokens by turns.
    `prefill_context` groups of `tensor` devices have the same attention weights and KV and share the tokens of each step: a part of
    every prompt, and every decode on one of them. Both as vLLM 0.32.0 has them (`vllm/config/parallel.py`).
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    data: int = 1
    decode_context: int = 1
    prefill_context: int = 1
    kv_interleave: int = 1
    layout: ExpertLayout = field(default=ExpertLayout(), kw_only=True)
    """The way in which experts are chosen, placed and reached."""

    def __post_init__(self) -> None:
        for name in (
            "tensor", "pipeline", "expert", "data", "decode_context", "prefill_context", "kv_interleave",
        ):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"parallel.{name} must be an integer of at least 1, got {value!r}")
        if (self.tensor * self.groups) % self.expert:
            product = "tensor * data" if self.prefill_context == 1 else "tensor * prefill_context"
            raise ValueError(
                f"parallel.expert {self.expert} must divide {product} = {self.tensor * self.groups}, "
                "the devices that share a layer's experts"
            )
        self._check_context()

    def _check_context(self) -> None:
        if self.tensor % self.decode_context:
            raise ValueError(
                f"parallel.decode_context {self.decode_context} does not divide parallel.tensor {self.tensor}, whose devices share "
                "the KV cache"
            )
        if self.kv_interleave > 1 and self.decode_context == 1:
            raise ValueError(
                "parallel.kv_interleave is between devices that share KV; give parallel.decode_context, or leave it out"
            )
        for name in ("data", "decode_context"):
            if self.prefill_context > 1 and getattr(self, name) > 1:
                raise ValueError(
                    f"parallel.prefill_context together with parallel.{name} is not modelled; leave one of the two at 1"
                )

    @property
    def groups(self) -> int:
        """Groups of `tensor` devices in a stage, each with all of its attention weights."""
        return self.data * self.prefill_context

    @property
    def n_devices(self) -> int:
        return self.tensor * self.pipeline * self.groups

    @property
    def expert_tensor(self) -> int:
        """Devices that split one expert by columns."""
        return self.tensor * self.groups // self.expert

    def stage_layers(self, n_layers: int) -> tuple[range, ...]:
        """Layers of each stage: equal shares, the remainder one by one to the first stages.

        The last stage also runs the LM head, which is why it is the last to get an extra layer.
        """
        share, extra = divmod(n_layers, self.pipeline)
        found, start = [], 0
        for stage in range(self.pipeline):
            stop = start + share + (stage < extra)
            found.append(range(start, stop))
            start = stop
        return tuple(found)

    def _check_heads(self, name: str, attention: Attention | LatentAttention | CompressedAttention) -> None:
        heads = attention.n_heads
        if heads % self.tensor:
            fits = [str(t) for t in range(1, heads + 1) if heads % t == 0]
            raise ValueError(
                f"parallel.tensor {self.tensor} does not divide the {heads} attention heads of {name}; "
                f"it may be {', '.join(fits)}"
            )
        if isinstance(attention, Attention):
            kv = attention.n_kv_heads
            if kv % self.tensor and self.tensor % kv:
                raise ValueError(
                    f"parallel.tensor {self.tensor} neither divides the {kv} key-value heads of {name} nor is a "
                    "multiple of them"
                )

    def _check_state(self, name: str, linear: LinearAttention) -> None:
        # Groups of a state space are replicated, as key-value heads are.
        by_group = linear.rule == "mamba2" and self.tensor % linear.n_key_heads == 0
        heads = linear.n_value_heads if by_group else linear.n_key_heads
        if heads % self.tensor:
            raise ValueError(
                f"parallel.tensor {self.tensor} does not divide the {heads} linear-attention heads of {name}"
            )

    def _check_shared_context(self, spec: ModelSpec) -> None:
        """Sequences are shared between devices where every layer keeps all tokens and reads them all."""
        if self.decode_context * self.prefill_context == 1:
            return
        name = "decode_context" if self.decode_context > 1 else "prefill_context"
        attention = spec.attention
        plain = isinstance(attention, Attention) or (
            isinstance(attention, LatentAttention) and not attention.index_topk
        )
        if not plain or set(spec.layer_attention) != {"full"} or spec.is_encoder:
            raise ValueError(
                f"parallel.{name} is modelled for layers with full attention alone, and {spec.name} has others; leave it at 1"
            )
        if self.decode_context == 1 or not isinstance(attention, Attention):
            return
        kv, heads = attention.n_kv_heads, attention.n_heads
        if self.tensor < kv * self.decode_context:
            raise ValueError(
                f"parallel.decode_context {self.decode_context} takes {self.decode_context} devices for each of the {kv} "
                f"key-value heads of {spec.name}, and parallel.tensor is {self.tensor}; give tensor {kv * self.decode_context} or "
                "more, or leave decode_context at 1"
            )
        if heads // kv % self.decode_context:
            raise ValueError(
                f"parallel.decode_context {self.decode_context} does not divide the {heads // kv} query heads that share a "
                f"key-value head of {spec.name}"
            )

    def check(self, spec: ModelSpec) -> None:
        """ValueError in one sentence if *spec* cannot be split this way."""
        for attention in (spec.attention, spec.local_attention):
            if attention is not None:
                self._check_heads(spec.name, attention)
        for width in (spec.ffn, *spec.layer_ffn):
            if width % self.tensor:
                raise ValueError(f"parallel.tensor {self.tensor} does not divide the MLP width {width} of {spec.name}")
        if spec.linear_attention is not None:
            self._check_state(spec.name, spec.linear_attention)
        self._check_shared_context(spec)
        if self.pipeline > spec.n_layers:
            raise ValueError(f"parallel.pipeline {self.pipeline} exceeds the {spec.n_layers} layers of {spec.name}")
        n_experts = None if spec.experts is None else spec.experts.n_experts
        self.layout.check(spec.name, n_experts, self.expert, self.data)
        if spec.experts is None:
            for name in ("expert", "data"):
                if getattr(self, name) > 1:
                    raise ValueError(
                        f"parallel.{name} needs a mixture of experts, and {spec.name} is dense; use replicas or tensor"
                    )
            return
        if spec.experts.n_experts % self.expert:
            raise ValueError(
                f"parallel.expert {self.expert} does not divide the {spec.experts.n_experts} experts of {spec.name}"
            )
        if spec.experts.ffn % self.expert_tensor:
            raise ValueError(
                f"an expert of {spec.name} is {spec.experts.ffn} wide, which tensor * groups / expert = "
                f"{self.expert_tensor} does not divide; raise parallel.expert"
            )
