"""The number of sequences of one length that a deployment holds in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hwmodels.deployment import Deployment
from sim.theory.sarathi import batch_capacity, implied_pool_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """Sequences of one length that a replica holds; bytes are those of one device of the fullest stage."""

    sequence_tokens: int
    sequences: int
    memory_bytes: float
    weight_bytes: float
    reserve_bytes: float
    kv_bytes_per_token: float

    @property
    def pool_bytes(self) -> float:
        """The bytes that are left for the KV cache."""
        return self.memory_bytes - self.weight_bytes - self.reserve_bytes


def batch_plan(
    *,
    memory_bytes: float,
    weight_bytes: float,
    kv_bytes_per_token: float,
    sequence_tokens: int,
    reserve_bytes: float = 0.0,
) -> BatchPlan:
    """B = floor((M_G - M_S - reserve) / (L m_kv)). SARATHI, arXiv 2308.16369, section 4.3.1, which has no reserve."""
    sequences = batch_capacity(memory_bytes, weight_bytes, sequence_tokens, kv_bytes_per_token, reserve_bytes)
    return BatchPlan(
        sequence_tokens=sequence_tokens,
        sequences=int(sequences),
        memory_bytes=memory_bytes,
        weight_bytes=weight_bytes,
        reserve_bytes=reserve_bytes,
        kv_bytes_per_token=kv_bytes_per_token,
    )


def deployment_plan(deployment: Deployment, sequence_tokens: int, *, reserve_bytes: float = 0.0) -> BatchPlan:
    """The plan of a deployment; *reserve_bytes* of each device are kept for activations and workspace."""
    return batch_plan(
        memory_bytes=deployment.device.memory_bytes,
        weight_bytes=deployment.weight_bytes_per_device,
        kv_bytes_per_token=deployment.kv_bytes_per_token_per_device,
        sequence_tokens=sequence_tokens,
        reserve_bytes=reserve_bytes,
    )


def reserve_range(
    *, memory_bytes: float, weight_bytes: float, kv_bytes_per_token: float, batches: Mapping[int, int]
) -> tuple[float, float] | None:
    """Reserves with which the capacity formula gives every batch of *batches* (sequence tokens to sequences).

    Above the first value, up to the second; None where no single reserve gives them all. A negative reserve means that
    the batches need more memory than there is.
    """
    free = memory_bytes - weight_bytes
    pools = [implied_pool_bytes(batch, tokens, kv_bytes_per_token) for tokens, batch in batches.items()]
    least, below = max(low for low, _ in pools), min(high for _, high in pools)
    return (free - below, free - least) if least < below else None
