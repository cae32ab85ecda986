"""Collectives between devices: a start and a bandwidth per protocol, the fastest protocol wins, as NCCL's tuner does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hwmodels.kernels.ops import none_is_free
from hwmodels.kernels.parameters import parameter

NETWORK_BYTES_PER_S = 25e9  # a 200 Gb/s adapter: shares of a link between nodes refer to it
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
WIDEST_MEASURED = 8
"""Devices of the widest node that was measured: beyond it the shares of the link are those of so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveParams:
    """One collective of one library on one topology (times in seconds, bandwidths as shares of one link direction).

    The shares are those of two devices; with n they change as a power of n / 2.
    """

    start_s: float = parameter(5e-6, 5e-7, 2e-4, "launch and synchronisation with the fewest devices")
    hop_s: float = parameter(1.5e-6, 0.0, 1e-4, "each further device, whatever the protocol")
    mid_extra_s: float = parameter(2e-6, 0.0, 1e-4, "more start of the 128-byte-line or two-shot protocol")
    high_extra_s: float = parameter(1e-5, 0.0, 3e-4, "more start of the bulk protocol")
    bandwidth_low: float = parameter(0.08, 0.001, 1.5, "low-latency protocol: half the bytes are flags, one channel")
    bandwidth_mid: float = parameter(0.4, 0.002, 2.0, "128-byte-line protocol: 120 of 128 bytes are data")
    bandwidth_high: float = parameter(0.8, 0.005, 3.0, "bulk protocol; above 1 where switches reduce in flight")
    low_widening: float = parameter(
        0.5, -0.5, 4.0, "power of n / 2 of the low-latency time; 1: each sends its whole message to every other",
        server=True,
    )  # fmt: skip
    widening: float = parameter(
        0.1, -0.5, 4.0, "the same of the others; below 0: switches reduce in flight, above: devices share a path",
        server=True,
    )  # fmt: skip
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


def _widened(devices: np.ndarray, power: float) -> Any:
    """(n / 2)^power, number by number: numpy's power of an array may differ from that of a number in the last bit."""
    if devices.ndim == 0:
        return (min(max(float(devices), 2.0), float(WIDEST_MEASURED)) / 2.0) ** power
    n, where = np.unique(np.clip(devices, 2.0, WIDEST_MEASURED), return_inverse=True)
    return np.array([(float(value) / 2.0) ** power for value in n])[where].reshape(devices.shape)


def collective_s(params: CollectiveParams, kind: str, message_bytes: Any, devices: Any, link_bytes_per_s: Any) -> Any:
    """Seconds of one collective; one device or no bytes cost nothing.

    `link_bytes_per_s` is one direction of a device's link: NVLink or PCIe in a node, the network between nodes.
    Scalars and arrays give the same bits, and time does not fall when the message grows.
    """
    n = np.asarray(devices, float)
    size = np.asarray(message_bytes, float)
    volume_s = size * moved_share(kind, devices) / link_bytes_per_s
    low = volume_s * (_widened(n, params.low_widening) / params.bandwidth_low)
    wide = _widened(n, params.widening)
    mid = params.mid_extra_s + volume_s * (wide / params.bandwidth_mid)
    high = params.high_extra_s + volume_s * (wide / params.bandwidth_high)
    start = params.start_s + params.hop_s * np.maximum(0.0, n - 2.0)
    seconds = np.maximum(params.host_s, start + np.minimum(low, np.minimum(mid, high)))
    return none_is_free(seconds, (n > 1) & (size > 0))
