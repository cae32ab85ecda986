"""Settings of what encodes that which comes with prompts: `encode`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from sim.scenario.chosen import Router
from sim.scenario.fleet import Autoscale
from sim.scenario.section import Section

_Time = Annotated[float, Field(ge=0)]
_OF_POOLS = (
    "replicas", "encoder_tokens", "request_s", "batch_s", "max_batch", "bytes_per_token", "bandwidth_gb_per_s", "latency_s",
    "router", "autoscale", "hardware", "tensor",
)  # fmt: skip
_OF_STEPS = ("budget_tokens",)


class EncodeSettings(Section):
    """The encoding of images and the like: by machines of their own, before prompts are computed, or the machines that compute
    prompts, in their steps."""

    at: Literal["pool", "engine"] = "pool"
    """`engine`: images are encoded in the steps of the machines that compute prompts, by the rules of their engine."""
    replicas: Annotated[int, Field(ge=1, le=100_000)] = 1
    """Machines that encode."""
    encoder_tokens: Annotated[int, Field(ge=0)] | None = None
    """Tokens that are encoded for each request, where neither the trace has a column `encoder_tokens` nor the workload images.
    Those that the model reads are among the tokens of the prompt."""
    token_s: _Time | None = None
    """Seconds that each of them takes; where it is left out, what the model's own encoder takes for images."""
    request_s: _Time = 0.0
    """Seconds that each request takes beside its tokens."""
    batch_s: _Time = 0.0
    """Seconds that each batch takes beside its requests."""
    max_batch: Annotated[int, Field(ge=1)] = 1
    """Requests that are encoded together, first come, first served, and end together."""
    hardware: Annotated[str, Field(min_length=1)] | None = None
    """The device that encodes images, where `token_s` is left out; where it is left out too, that of the machines that compute
    prompts."""
    tensor: Annotated[int, Field(ge=1)] = 1
    """Devices of a machine that encodes, which share its layers."""
    bytes_per_token: _Time | None = None
    """Bytes that are sent for each token; where it is left out, an embedding in numbers of two bytes."""
    bandwidth_gb_per_s: Annotated[float, Field(gt=0)] | None = None
    """The bandwidth of a machine's link to those that compute prompts, in 10^9 bytes; a transfer at a time."""
    latency_s: _Time = 0.0
    """The time that each transfer takes beside its bytes."""
    router: Router = Router(policy="round_robin")
    """Which machine encodes a request."""
    autoscale: Autoscale | None = None
    """Machines that encode come and go; where it is left out, all of them are there from beginning to end."""
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    """Embeddings that a step of vLLM encodes at most; where it is left out, as many as a step has tokens at most
    (max_num_batched_tokens), and one image at least. SGLang has no such limit."""
    cache_tokens: Annotated[int, Field(ge=1)] | None = None
    """Embeddings that a machine keeps by what they are of, those that were used longest ago going first; where it is left out, as
    many as `budget_tokens` in steps of vLLM, what 100 MiB hold in those of SGLang, and none on machines that only encode."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        strange, fields = _OF_POOLS if self.at == "engine" else _OF_STEPS, type(self).model_fields
        # Results state every setting, those at their defaults too.
        wrong = [name for name in strange if getattr(self, name) != fields[name].default]
        if wrong:
            whose = (
                "machines that only encode"
                if self.at == "engine"
                else "encoding in the steps of an engine (at: engine)"
            )
            raise ValueError(
                f"{wrong[0]} is of {whose}; leave it out, or give at: {'pool' if self.at == 'engine' else 'engine'}"
            )
        if self.at == "pool" and self.bandwidth_gb_per_s is None:
            raise ValueError("bandwidth_gb_per_s is missing: what machines that only encode send crosses a link")
        return self
