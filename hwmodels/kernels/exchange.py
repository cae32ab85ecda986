"""The exchange of tokens between devices that hold different experts: dispatch to the experts, and combining after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from hwmodels.kernels.ops import none_is_free
from hwmodels.kernels.parameters import Datasheet, parameter, smooth_max


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeParams:
    """One direction of an exchange in one mode of a library."""

    start_s: float = parameter(1.5e-5, 1e-6, 2e-4, "launches, barrier and the exchange of counts")
    byte_start_s: float = parameter(5e-10, 0.0, 1e-8, "each byte of one row, which one SM handles from end to end")
    expert_s: float = parameter(1e-8, 0.0, 1e-6, "counts and flags of one expert")
    token_s: float = parameter(1e-7, 0.0, 1e-5, "one token on one SM: its choice of experts, its slot in the queues")
    copy_s: float = parameter(1e-7, 0.0, 1e-5, "one copy of a token on one SM")
    own_copies: float = parameter(1.0, 0.0, 10.0, "rows that an SM moves beside the copies: its input, the sum")
    sm_bytes_per_s: float = parameter(2.5e10, 1e9, 2e11, "bytes in flight from one SM over the latency of the link")
    bandwidth: float = parameter(0.7, 0.02, 1.2, "share of one link direction")
    overlap_loss: float = parameter(0.3, 0.0, 4.0, "0: SMs and link overlap fully; 4: they add up")


_where = cast("Callable[..., Any]", np.where)


def distinct_devices(devices: Any, topk: Any, experts: Any) -> Any:
    """Devices that hold at least one of `topk` different experts, chosen at random of `experts` spread evenly."""
    n, k, all_of = (np.asarray(value, float) for value in (devices, topk, experts))
    held = all_of / n
    missed = np.ones(np.broadcast_shapes(n.shape, k.shape, all_of.shape))
    for drawn in range(int(k.max())):
        left = np.maximum(1.0, all_of - drawn)
        missed = np.where(drawn < k, missed * np.clip((left - held) / left, 0.0, 1.0), missed)
    return n * (1.0 - missed)


def exchange_s(
    params: ExchangeParams,
    sheet: Datasheet,
    *,
    tokens: Any,
    hidden: Any,
    topk: Any,
    experts: Any,
    devices: Any,
    number_bytes: float,
    sms: Any,
    copies: Any = None,
    fullest: float = 1.0,
) -> Any:
    """Seconds to send each of *tokens* (of every device) to its experts, or to bring their rows back; 0 without tokens.

    With *sms* above 0 a token goes once to each device that holds one of its experts, by that many SMs. With 0 (the
    low-latency mode) it goes once to each expert, and an SM works for each expert, as long as there are SMs. Choices
    are even and independent, unless `copies` says how often a token goes, and `fullest` how much more than the mean the
    device receives that receives most. `number_bytes`: of one number of a row on the way. DeepEP (github.com/deepseek-ai/DeepEP).
    """
    sms = np.asarray(sms, float)
    direct = sms == 0
    if copies is None:
        copies = _where(direct, topk, distinct_devices(devices, topk, experts))
    workers = _where(direct, np.minimum(experts, sheet.sm_count), sms)
    row_bytes = np.asarray(hidden, float) * number_bytes
    each = params.token_s + params.copy_s * copies
    by_sms = tokens / workers * (each + (params.own_copies + copies) * (row_bytes / params.sm_bytes_per_s))
    away = 1.0 - 1.0 / np.asarray(devices, float)
    by_link = tokens * copies * (fullest * away) * row_bytes / (sheet.link_bytes_per_s * params.bandwidth)
    start = params.start_s + params.byte_start_s * row_bytes + params.expert_s * experts
    return none_is_free(start + smooth_max(by_sms, by_link, params.overlap_loss), tokens)
