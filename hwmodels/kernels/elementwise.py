"""Elementwise kernels: normalisation, activation, residual, rotary embedding, look-up, softmax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hwmodels.kernels.ops import none_is_free
from hwmodels.kernels.parameters import Datasheet, parameter, smooth_max

# Numbers read and written per row of `width` outputs: (per width, what it counts).
_PASSES = {
    "norm": 2.0,  # read x, write y
    "act": 2.0,  # read x, write y; gated reads two halves
    "add": 3.0,  # read both, write one
    "rope": 2.0,  # in place
    "embedding": 2.0,  # gather a row, write it
    "softmax": 2.0,
    "copy": 2.0,
    "read": 1.0,
    "quantise": 1.5,  # read 16 bits, write 8
    "scale": 1.0,  # read all to find the largest
    "mhc_pre": 5.0,  # read four residual streams, write the input that they are mixed to
    "mhc_post": 9.0,  # read them and the result, write them
}
OPS = tuple(_PASSES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementwiseParams:
    """One elementwise kernel on one device (times in seconds)."""

    launch_s: float = parameter(2e-6, 1e-7, 5e-5, "kernel start, or the share of it that is not hidden")
    bandwidth_efficiency: float = parameter(0.7, 0.02, 1.0, "share of the datasheet bandwidth")
    row_s: float = parameter(1e-8, 0.0, 5e-6, "one row on one SM: a block's start, reduction or index arithmetic")
    cache_gain: float = parameter(1.0, 0.0, 8.0, "extra bandwidth for what stays in L2")
    overlap_loss: float = parameter(1.0, 0.0, 4.0, "0: rows and bytes overlap fully; 4: they add up")
    number_s: float = parameter(
        0.0,
        0.0,
        1e-9,
        "a number of a row in the one block that has the whole row, whatever the others do",
        optional=True,
    )


def elementwise_s(
    params: ElementwiseParams,
    device: Datasheet,
    op: str,
    rows: Any,
    width: Any,
    *,
    gated: Any = False,
    bytes_per_number: float = 2.0,
    footprint: float = 1.0,
) -> Any:
    """Seconds of an elementwise operation on rows x width numbers (output width); no rows cost nothing.

    `gated` activations read twice the width. Activations were just written, so that small ones are taken from L2.
    *footprint* is what lies in the cache, over what one call reads and writes. Scalars and arrays give the same bits.
    """
    if op not in _PASSES:
        raise ValueError(f"op must be one of {', '.join(OPS)}; got {op!r}")
    numbers = _PASSES[op] + (np.asarray(gated, float) if op == "act" else 0.0)
    traffic = rows * (width * (numbers * bytes_per_number))
    rows_s = rows * (params.row_s / device.sm_count)
    least_s = params.launch_s + width * params.number_s
    seconds = least_s + smooth_max(rows_s, streamed_s(params, device, traffic, footprint), params.overlap_loss)
    return none_is_free(seconds, rows)


def streamed_s(params: ElementwiseParams, device: Datasheet, traffic_bytes: Any, footprint: float = 1.0) -> Any:
    """Seconds of the bytes alone, without start and rows."""
    resident = np.maximum(0.0, 1.0 - traffic_bytes * (footprint / device.l2_bytes))
    return traffic_bytes / (device.hbm_bytes_per_s * params.bandwidth_efficiency * (1.0 + params.cache_gain * resident))
