"""Settings of the machines that encode what comes with prompts: `encode`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from sim.scenario.chosen import Router
from sim.scenario.section import Section

_Time = Annotated[float, Field(ge=0)]


class EncodeSettings(Section):
    """Machines of their own that encode what comes with prompts, such as images, before the prompts are computed."""

    replicas: Annotated[int, Field(ge=1, le=100_000)] = 1
    """Machines that encode."""
    encoder_tokens: Annotated[int, Field(ge=0)] | None = None
    """Tokens that are encoded for each request, where the trace has no column `encoder_tokens`. Those that the model reads are
    among the tokens of the prompt."""
    token_s: _Time
    """Seconds that each of them takes."""
    request_s: _Time = 0.0
    """Seconds that each request takes beside its tokens."""
    batch_s: _Time = 0.0
    """Seconds that each batch takes beside its requests."""
    max_batch: Annotated[int, Field(ge=1)] = 1
    """Requests that are encoded together, first come, first served, and end together."""
    bytes_per_token: _Time | None = None
    """Bytes that are sent for each token; where it is left out, the model's hidden size in numbers of two bytes."""
    bandwidth_gb_per_s: Annotated[float, Field(gt=0)]
    """The bandwidth of a machine's link to those that compute prompts, in 10^9 bytes; a transfer at a time."""
    latency_s: _Time = 0.0
    """The time that each transfer takes beside its bytes."""
    router: Router = Router(policy="round_robin")
    """Which machine encodes a request."""
