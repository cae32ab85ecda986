"""Collectives between devices: alpha-beta per protocol, the fastest protocol wins, as NCCL's tuner does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hwmodels.kernels.ops import none_is_free
from hwmodels.kernels.parameters import parameter

NETWORK_BYTES_PER_S = 25e9  # a 200 Gb/s adapter: shares of a link between nodes refer to it
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveParams:
    """One collective of one library on one topology (times in seconds, bandwidths as shares of one link direction)."""

    start_s: float = parameter(4e-6, 5e-7, 2e-4, "launch and synchronisation with the fewest devices")
    hop_low_s: float = parameter(1e-6, 0.0, 5e-5, "each further device, low-latency protocol (flags beside the data)")
    hop_mid_s: float = parameter(1.5e-6, 0.0, 1e-4, "each further device, 128-byte-line protocol")
    hop_high_s: float = parameter(3e-6, 0.0, 3e-4, "each further device, bulk protocol")
    mid_extra_s: float = parameter(2e-6, 0.0, 1e-4, "more start of the 128-byte-line protocol")
    high_extra_s: float = parameter(1e-5, 0.0, 3e-4, "more start of the bulk protocol")
    bandwidth_low: float = parameter(0.08, 0.001, 1.0, "low-latency protocol: half the bytes are flags, one channel")
    bandwidth_mid: float = parameter(0.4, 0.002, 1.3, "128-byte-line protocol: 120 of 128 bytes are data")
    bandwidth_high: float = parameter(0.8, 0.005, 2.0, "bulk protocol; above 1 where switches reduce in flight")
    contention: float = parameter(0.02, 0.0, 4.0, "bandwidth lost to each device beyond two that shares the path")
    host_s: float = parameter(1e-6, 0.0, 1e-4, "time the host needs to start it: a floor outside CUDA graphs")


def moved_share(kind: str, devices: Any) -> Any:
    """Bytes each device sends over its link as a multiple of the message (ring algorithms).

    The message is the buffer on each rank (all-reduce, send), or the whole gathered or scattered buffer.
    """
    n = np.maximum(1.0, np.asarray(devices, float))
    if kind == "all_reduce":
        return 2.0 * (n - 1.0) / n
    if kind in ("all_gather", "reduce_scatter", "all_to_all"):
        return (n - 1.0) / n
    if kind == "send_recv":
        return np.ones_like(n)
    raise ValueError(f"collective must be one of {', '.join(KINDS)}; got {kind!r}")


def collective_s(params: CollectiveParams, kind: str, message_bytes: Any, devices: Any, link_bytes_per_s: Any) -> Any:
    """Seconds of one collective; one device or no bytes cost nothing.

    `link_bytes_per_s` is one direction of a device's link: NVLink or PCIe in a node, the network between nodes.
    Scalars and arrays give the same bits, and time does not fall when the message grows.
    """
    n = np.asarray(devices, float)
    size = np.asarray(message_bytes, float)
    further = np.maximum(0.0, n - 2.0)
    volume_s = size * moved_share(kind, devices) * (1.0 + params.contention * further) / link_bytes_per_s
    low = params.hop_low_s * further + volume_s / params.bandwidth_low
    mid = params.mid_extra_s + params.hop_mid_s * further + volume_s / params.bandwidth_mid
    high = params.high_extra_s + params.hop_high_s * further + volume_s / params.bandwidth_high
    seconds = np.maximum(params.host_s, params.start_s + np.minimum(low, np.minimum(mid, high)))
    return none_is_free(seconds, (n > 1) & (size > 0))
