"""Mixture-of-experts layers: how many experts a batch wakes, the grouped GEMMs over them and the router."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hwmodels.kernels.parameters import Datasheet, parameter, smooth_max

_QUANTILES = 64  # expert loads are summed over this many equally likely classes
_TILE_ROWS = (16, 32, 64, 128)  # token side of a grouped tile; the library's tables pick by tokens per expert
_TILE_COLUMNS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeParams:
    """A fused mixture-of-experts kernel chain on a device (times in seconds)."""

    launch_s: float = parameter(2.5e-5, 2e-6, 2e-4, "alignment, two GEMMs, activation and reduction starts")
    compute_efficiency: float = parameter(0.7, 0.2, 1.0, "share of the dense peak with full tiles")
    bandwidth_efficiency: float = parameter(0.85, 0.3, 1.0, "share of the datasheet bandwidth on expert weights")
    fill_k: float = parameter(150.0, 0.0, 1500.0, "pipeline prologue and epilogue, as elements of k")
    tile_edge: float = parameter(20.0, 0.0, 120.0, "a tile of r x c costs r c + edge^2")
    block_bandwidth: float = parameter(0.8, 0.1, 4.0, "share of the memory bandwidth one 64-edge block per SM can draw")
    overlap_loss: float = parameter(0.3, 0.0, 4.0, "0: memory and arithmetic overlap fully; 4: they add up")
    slot_passes: float = parameter(4.0, 0.0, 20.0, "times a (token, expert) row of the hidden size crosses memory")
    inner_passes: float = parameter(3.0, 0.0, 20.0, "times a row of the inner size does")
    expert_s: float = parameter(2e-8, 0.0, 1e-6, "bookkeeping for each local expert")
    rank_skew: float = parameter(
        1.0, 0.0, 2.0, "how far the fullest expert-parallel rank exceeds the mean, in deviations"
    )


def power_law_loads(alpha: float, tokens: Any) -> tuple[np.ndarray, np.ndarray]:
    """Relative expert loads (mean 1) at `_QUANTILES` quantiles, last axis, and their coefficient of variation.

    Loads follow a power law of exponent `alpha` between 1 and 0.8 `tokens`, the skewed routing of aiconfigurator's MoE
    benchmarks (its `power_law_1.01` and `power_law_1.2`). alpha must exceed 0 and differ from 1.
    """
    if not (alpha > 0 and alpha != 1.0):
        raise ValueError(f"alpha must be positive and not 1; got {alpha:g}; use 1.01 for the limit")
    top = np.maximum(1.0, 0.8 * np.asarray(tokens, float))[..., None]
    u = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    loads = ((top ** (1.0 - alpha) - 1.0) * u + 1.0) ** (1.0 / (1.0 - alpha))
    loads = loads / loads.mean(axis=-1, keepdims=True)
    return loads, loads.std(axis=-1)


def active_experts(tokens: Any, *, topk: int, experts: int, distribution: str = "uniform") -> Any:
    """Expected number of distinct experts that `tokens` tokens wake, each choosing `topk` of `experts`.

    "uniform": independent choices, E (1 - (1 - k/E)^T). "balanced": round robin, min(E, T k). "power_law_A": skewed.
    """
    tokens = np.asarray(tokens, float)
    if distribution == "balanced":
        return np.minimum(experts, tokens * topk)
    if distribution == "uniform":
        if topk >= experts:
            return np.where(tokens > 0, float(experts), 0.0)
        return experts * -np.expm1(tokens * math.log1p(-topk / experts))
    loads, _ = power_law_loads(_exponent(distribution), tokens)
    return experts * -np.expm1(-loads * (tokens * topk / experts)[..., None]).mean(axis=-1)


def moe_s(
    params: MoeParams,
    device: Datasheet,
    tokens: Any,
    *,
    hidden_size: Any,
    inter_size: Any,
    topk: Any,
    experts: Any,
    tp: Any = 1,
    ep: Any = 1,
    distribution: Any = "uniform",
    gated: Any = True,
    dtype: str = "bf16",
    weight_bytes: float = 2.0,
    experts_active: Any = None,
) -> Any:
    """Seconds of the routed experts of one layer on the busiest device of its group; the router comes apart.

    `tokens` of the whole expert-parallel group reach E / ep experts here, whose inner size is divided by `tp`.
    `experts_active` overrides the expected number of experts awake on this device. Zero tokens cost nothing. What
    describes the layer is one value, or a column beside a column of tokens.
    """
    layer = _Layer(hidden_size, inter_size, topk, experts, tp, ep, distribution, gated)
    if not any(isinstance(value, np.ndarray) for value in layer):
        return _one_layer_s(params, device, tokens, layer, dtype, weight_bytes, experts_active)
    columns = [np.broadcast_to(np.asarray(value), np.shape(tokens)) for value in layer]
    _, first, inverse = np.unique(
        np.stack([column.astype(str) for column in columns]), axis=1, return_index=True, return_inverse=True
    )
    inverse = inverse.reshape(-1)
    found = np.empty(len(tokens))
    for group, at in enumerate(first):
        mine = inverse == group
        *sizes, routing, has_gate = (column[at] for column in columns)
        one = _Layer(*(int(size) for size in sizes), distribution=str(routing), gated=bool(has_gate))
        active = None if experts_active is None else experts_active[mine]
        found[mine] = _one_layer_s(params, device, tokens[mine], one, dtype, weight_bytes, active)
    return found


class _Layer(NamedTuple):
    """What describes the experts of one layer; arguments of `moe_s`."""

    hidden_size: Any
    inter_size: Any
    topk: Any
    experts: Any
    tp: Any
    ep: Any
    distribution: Any
    gated: Any


def _one_layer_s(
    params: MoeParams,
    device: Datasheet,
    tokens: Any,
    layer: _Layer,
    dtype: str,
    weight_bytes: float,
    experts_active: Any,
) -> Any:
    hidden_size, inter_size, topk, experts, tp, ep, distribution, gated = layer
    if experts % ep:
        raise ValueError(f"experts ({experts}) must divide by ep ({ep}); choose an ep that divides it")
    tokens = np.asarray(tokens, float)
    shape, flat = tokens.shape, np.atleast_1d(tokens)
    local = experts // ep
    slots = flat * topk
    mean_load = slots / experts
    if distribution in ("balanced", "uniform"):
        load = mean_load[:, None] * np.ones((1, 1))
        spread = np.zeros_like(flat) if distribution == "balanced" else np.sqrt(1.0 / np.maximum(mean_load, 1e-9))
    else:
        relative, spread = power_law_loads(_exponent(distribution), flat)
        load = mean_load[:, None] * relative
    if ep > 1:
        # Largest of ep sums over E / ep experts: mean + sqrt(2 ln ep) standard deviations, at most every slot.
        excess = 1.0 + params.rank_skew * math.sqrt(2.0 * math.log(ep)) * spread / math.sqrt(local)
        load = (
            load * np.minimum(np.minimum(excess, ep), np.maximum(1.0, 1.0 / np.maximum(mean_load, 1e-9)) * ep)[:, None]
        )
    load = np.minimum(load, flat[:, None])
    awake_share = np.minimum(1.0, load) if distribution == "balanced" else -np.expm1(-load)
    if experts_active is None:
        awake = np.minimum(local * awake_share.mean(axis=-1), slots)
        # One token wakes its k experts wherever they sit: the busiest rank has at least one of them.
        awake = np.maximum(awake, np.minimum(1.0, slots))
    else:
        awake = np.broadcast_to(np.asarray(experts_active, float), shape).reshape(flat.shape)
        load = (slots / np.maximum(awake, 1.0))[:, None]
        awake_share = (awake / local)[:, None]
    local_slots = local * load.mean(axis=-1) if experts_active is None else slots / ep
    inner = inter_size / tp
    stream = device.hbm_bytes_per_s * params.bandwidth_efficiency
    sm_rate = device.flops_per_s(dtype) * params.compute_efficiency / device.sm_count
    total = np.zeros_like(flat)
    for n, k in ((inner * (2 if gated else 1), float(hidden_size)), (float(hidden_size), inner)):
        weights_s = awake * (n * k * weight_bytes) / stream
        depth = math.ceil(k / 64.0) * 64.0 + params.fill_k
        best = np.full(flat.shape, np.inf)
        for rows in _TILE_ROWS:
            if experts_active is None:
                tiles = local * (awake_share + np.maximum(0.0, load / rows - 0.5)).mean(axis=-1)
            else:
                tiles = awake * (1.0 + np.maximum(0.0, load[:, 0] / rows - 0.5))
            # Fewer tiles than experts awake cannot be: few tokens on a narrow rank.
            tiles = np.maximum(tiles, awake)
            blocks_per_sm = tiles * (math.ceil(n / _TILE_COLUMNS) / device.sm_count)
            waves = np.maximum(1.0, blocks_per_sm)
            compute_s = waves * (depth * 2.0 * (rows * _TILE_COLUMNS + params.tile_edge**2) / sm_rate)
            drawn = np.minimum(1.0, blocks_per_sm * (params.block_bandwidth * (rows + _TILE_COLUMNS) / 128.0))
            memory_s = weights_s / np.maximum(drawn, 1e-9)
            best = np.minimum(best, smooth_max(compute_s, memory_s, params.overlap_loss))
        total = total + best
    rows_bytes = 2.0 * params.slot_passes * hidden_size * slots + 2.0 * params.inner_passes * inner * local_slots
    seconds = params.launch_s + total + rows_bytes / device.hbm_bytes_per_s + params.expert_s * local
    seconds = np.where(flat > 0, seconds, 0.0).reshape(shape)
    return seconds if shape else float(seconds)


def _exponent(distribution: str) -> float:
    prefix = "power_law_"
    if not distribution.startswith(prefix):
        raise ValueError(f"distribution must be balanced, uniform or power_law_<exponent>; got {distribution!r}")
    try:
        return float(distribution[len(prefix) :])
    except ValueError:
        raise ValueError(f"distribution {distribution!r} lacks a number after {prefix}") from None
