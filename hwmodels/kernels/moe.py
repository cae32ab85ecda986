"""Mixture-of-experts layers: the grouped GEMMs over the experts that a batch wakes, and what moves rows to them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hwmodels.experts import ExpertLoad
from hwmodels.kernels.parameters import Datasheet, parameter, smooth_max
from hwmodels.kernels.routing import TILE_ROWS, routed, routed_by, routed_row
from hwmodels.stacks import kernels_of

_GPT_OSS_HIDDEN = 2880


class ExpertFormat(NamedTuple):
    """The way in which experts of one format are multiplied, and whose tables may stand in for theirs."""

    dtype: str
    """The arithmetic: a key of `Datasheet.peak_flops_per_s`."""
    weight_bytes: float
    """The bytes of a weight with its share of the scales."""
    activation_bytes: float
    stand_in: tuple[str, ...]
    """Formats whose fitted parameters may serve, the best first, itself included."""
    largest_tile: int = 256
    """Token rows of the largest tile: 64 in Marlin and in FlashInfer's kernels for weights that are expanded."""

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `moe_s`."""
        return {"dtype": self.dtype, "weight_bytes": self.weight_bytes, "activation_bytes": self.activation_bytes,
                "largest_tile": self.largest_tile}  # fmt: skip

    def variants(
        self, software: Iterable[str], *, layer: tuple[int, int, int], gated: bool = True, blackwell: bool = False
    ) -> tuple[str, ...]:
        """Parameter sets that may serve kernels of *software* (the nearest first), the best first.

        Of one `layer` (hidden size, experts a token, experts). Experts without a gate, 4-bit ones other than gpt-oss's,
        and those that a stack's fast kernels on Blackwell do not take, run other kernels than the format's usual ones.
        """
        names = tuple(software)
        own = self.stand_in[0]
        special = () if gated else (f"{own}-plain",)
        if blackwell and layer in kernels_of(names[0]).refused_experts.get(own, ()):
            special = (*special, f"{own}-refused")
        if own == "mxfp4" and layer[0] != _GPT_OSS_HIDDEN and names[0] != "aiter":
            special = (*special, "mxfp4-other")
        return tuple(f"{fmt}/{name}" for fmt in (*special, *self.stand_in) for name in names)


# Weight-only formats (int4, mxfp4 on 16-bit activations) are expanded to 16 bits; mxfp4_mxfp8 multiplies 4-bit weights
# with 8-bit activations at the fp8 rate, mxfp4_mxfp4 (AMD's Quark) with 4-bit ones. Widths as in `hwmodels.precision`;
# int4 of the tables is in groups of 32.
EXPERT_FORMATS = {
    "bf16": ExpertFormat("bf16", 2.0, 2.0, ("bf16",)),
    "fp8": ExpertFormat("fp8", 1.0, 1.0, ("fp8", "fp8_block", "bf16")),
    "fp8_block": ExpertFormat("fp8", 1.0, 1.0, ("fp8_block", "fp8", "bf16")),
    "int8": ExpertFormat("int8", 1.0, 1.0, ("int8", "fp8", "fp8_block", "bf16")),
    "nvfp4": ExpertFormat("fp4", 0.5625, 0.5625, ("nvfp4", "mxfp4_mxfp8", "fp8_block", "fp8", "bf16")),
    "mxfp4": ExpertFormat("bf16", 0.53125, 2.0, ("mxfp4", "int4", "bf16"), 64),
    "mxfp4_mxfp8": ExpertFormat("fp8", 0.53125, 1.03125, ("mxfp4_mxfp8", "mxfp4", "fp8_block", "fp8", "bf16")),
    "mxfp4_mxfp4": ExpertFormat(
        "fp4", 0.53125, 0.53125, ("mxfp4_mxfp4", "mxfp4_mxfp8", "nvfp4", "fp8_block", "fp8", "bf16")
    ),
    "int4": ExpertFormat("bf16", 0.5625, 2.0, ("int4", "mxfp4", "bf16"), 64),
    "int4_fp8": ExpertFormat("fp8", 0.5625, 1.0, ("int4_fp8", "mxfp4_mxfp8", "fp8_block", "fp8", "bf16")),
}

# Candidates of a grouped tile: its token side and its weight side.
_ROW_OF = np.repeat(np.arange(len(TILE_ROWS)), 2)
_ROWS = np.repeat(np.array(TILE_ROWS, float), 2)[:, None]
_COLUMNS = np.tile(np.array([64.0, 128.0]), len(TILE_ROWS))[:, None]
_CACHE_EDGE = 2.0
_MANY_SLOTS = 256.0
ALIGNED = 16.0  # elements: compilers vectorise loads of rows that are multiples of it


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeParams:
    """A fused mixture-of-experts kernel chain on a device (times in seconds)."""

    launch_s: float = parameter(2.5e-5, 2e-6, 4e-4, "alignment, two GEMMs, activation and reduction starts")
    sort_s: float = parameter(3e-6, 0.0, 2e-4, "sorting many slots by expert takes more and longer kernels than few")
    compute_efficiency: float = parameter(0.7, 0.1, 1.0, "share of the dense peak with full tiles")
    bandwidth_efficiency: float = parameter(0.85, 0.3, 1.0, "share of the datasheet bandwidth on expert weights")
    tile_s: float = parameter(5e-7, 0.0, 6e-6, "prologue and epilogue of a tile")
    reread: float = parameter(0.1, 0.0, 1.0, "share of an expert's weights that its further row tiles read again")
    l2_intensity: float = parameter(65.0, 0.0, 250.0, "peak FLOP/s over L2 bytes/s: limits tiles with little reuse")
    block_bandwidth: float = parameter(
        1.5, 0.1, 8.0, "share of the memory bandwidth that one block an SM draws if it stages only weights"
    )
    overlap_loss: float = parameter(0.3, 0.0, 4.0, "0: memory and arithmetic overlap fully; 4: they add up")
    slot_passes: float = parameter(4.0, 0.0, 40.0, "times a (token, expert) row of the hidden size crosses memory")
    inner_passes: float = parameter(3.0, 0.0, 40.0, "times a row of the inner size does")
    remote_share: float = parameter(0.3, 0.0, 1.0, "what a slot of another rank's expert costs of one here")
    cache_gain: float = parameter(0.5, 0.0, 6.0, "extra bandwidth for expert weights that stay in L2")
    expert_s: float = parameter(1e-8, 0.0, 1e-6, "bookkeeping for each local expert")
    unaligned: float = parameter(0.0, 0.0, 6.0, "added share of time where an expert's inner size is no multiple of 16")
    wave_softness: float = parameter(0.1, 0.0, 1.0, "0: a part wave costs a whole one; 1: its share only (persistent)")
    map_s: float = parameter(
        0.0,
        0.0,
        2e-4,
        "kernels more where other ranks have experts: slots are mapped, theirs are left out",
        optional=True,
    )


def active_experts(tokens: Any, *, topk: int, experts: int, distribution: str = "uniform") -> Any:
    """Expected number of distinct experts that `tokens` tokens wake, each choosing `topk` of `experts`.

    "uniform": independent choices, E (1 - (1 - k/E)^T). "balanced": round robin, min(E, T k). "power_law_A": skewed.
    """
    tokens = np.asarray(tokens, float)
    found = routed(np.atleast_1d(tokens), topk=topk, experts=experts, distribution=distribution).awake
    return found.reshape(tokens.shape)


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
    by: ExpertLoad | None = None,
    gated: Any = True,
    dtype: str = "bf16",
    weight_bytes: float = 2.0,
    activation_bytes: float = 2.0,
    largest_tile: int = 256,
    experts_active: Any = None,
    weight_copies: float = np.inf,
) -> Any:
    """Seconds of the routed experts of one layer on the busiest device of its group; the router comes apart.

    `tokens` of the whole expert-parallel group reach E / ep experts here, whose inner size is divided by `tp`. No tile
    has more than `largest_tile` rows. `by` says in place of `distribution` who chooses and who holds which expert.
    `experts_active` overrides the expected number of experts awake on this device. `weight_copies` is how many layers the
    caller cycles through: a benchmark of one keeps few and small experts in L2, a served model never does. Zero tokens cost
    nothing. What describes the layer is one value, or a column beside a column of tokens.
    """
    tokens = np.asarray(tokens, float)
    shape, flat = tokens.shape, np.atleast_1d(tokens)
    slots, awake, tiles = _routed(flat, topk, experts, ep, distribution) if by is None else routed_by(by, flat)
    every = flat * np.asarray(topk, float)
    if experts_active is not None:
        awake = np.broadcast_to(np.asarray(experts_active, float), shape).reshape(flat.shape)
        slots = every / np.asarray(ep, float)
        load = (slots / np.maximum(awake, 1.0))[:, None]
        tiles = awake[:, None] * (1.0 + np.maximum(0.0, load / np.array(TILE_ROWS) - 0.5))
    local = np.asarray(experts, float) / np.asarray(ep, float)
    hidden, inner = np.asarray(hidden_size, float), np.asarray(inter_size, float) / np.asarray(tp, float)
    matrices = 2.0 + np.asarray(gated, float)
    stream = device.hbm_bytes_per_s * params.bandwidth_efficiency
    footprint = awake * (matrices * hidden * inner * weight_bytes) * weight_copies
    resident = np.clip(_CACHE_EDGE * (1.0 - footprint / device.l2_bytes), 0.0, 1.0)
    stream = stream * (1.0 + params.cache_gain * resident)
    sm_rate = device.flops_per_s(dtype) * params.compute_efficiency / device.sm_count
    # L2 is no slower than the memory behind it.
    l2_intensity = min(params.l2_intensity, sm_rate * device.sm_count / device.hbm_bytes_per_s)
    load = slots / np.maximum(awake, 1e-9)
    total = np.zeros_like(flat)
    for n, k in ((inner * (matrices - 1.0), hidden), (hidden, inner)):
        weights_s = awake * (n * k * weight_bytes) / stream
        depth = np.ceil(k / 64.0) * 64.0
        # Candidates are the first axis: tile rows for each width of tile columns.
        per_sm = tiles.T[_ROW_OF] * (np.ceil(n / _COLUMNS) / device.sm_count)
        waves = np.ceil(per_sm)
        waves = waves - params.wave_softness * (waves - per_sm) * (1.0 - 1.0 / np.maximum(waves, 1.0))
        operands = _COLUMNS * weight_bytes + np.minimum(_ROWS, load) * activation_bytes
        work = np.maximum(2.0 * _ROWS * _COLUMNS, l2_intensity * operands)
        compute_s = waves * (params.tile_s + depth * (work / sm_rate))
        # Of what a block stages in shared memory the activations take their share, full rows or not.
        staged = _COLUMNS * weight_bytes / (_COLUMNS * weight_bytes + _ROWS * activation_bytes)
        drawn = np.minimum(1.0, np.minimum(1.0, per_sm) * (params.block_bandwidth * staged))
        again = 1.0 + params.reread * np.maximum(0.0, tiles.T[_ROW_OF] / np.maximum(awake, 1e-9) - 1.0)
        memory_s = weights_s * again / np.maximum(drawn, 1e-9)
        candidates_s = smooth_max(compute_s, memory_s, params.overlap_loss)
        total = total + candidates_s[_ROWS[:, 0] <= largest_tile].min(axis=0)
    total = total * (1.0 + params.unaligned * (inner % ALIGNED > 0))
    moved = slots + params.remote_share * np.maximum(0.0, every - slots)
    row_bytes = 2.0 * (params.slot_passes * hidden + params.inner_passes * inner)
    seconds = (
        params.launch_s
        + params.map_s * (np.asarray(ep, float) > 1.0)
        + params.sort_s * every / (every + _MANY_SLOTS)
        + total
        + moved * row_bytes / device.hbm_bytes_per_s
        + params.expert_s * local
    )
    seconds = np.where(flat > 0, seconds, 0.0).reshape(shape)
    return seconds if shape else float(seconds)


def _routed(flat: np.ndarray, topk: Any, experts: Any, ep: Any, distribution: Any) -> tuple[Any, Any, Any]:
    """Slots, experts awake and tiles of each row, by one layer's routing or by columns that describe each row's."""
    if not any(isinstance(value, np.ndarray) for value in (topk, experts, ep, distribution)):
        return routed(flat, topk=int(topk), experts=int(experts), ep=int(ep), distribution=str(distribution))
    columns = (np.broadcast_to(np.asarray(value), flat.shape).tolist() for value in (topk, experts, ep, distribution))
    found = np.array(
        [
            routed_row(t, int(k), int(e), int(group), d)
            for t, k, e, group, d in zip(flat.tolist(), *columns, strict=True)
        ]
    )
    return found[:, 0], found[:, 1], found[:, 2:]
