"""Dense matrix multiplication: the fastest of the tilings a library could pick, each priced by waves and traffic."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from hwmodels.kernels.parameters import Datasheet, parameter, smooth_max
from hwmodels.stacks import kernels_of

# Output rows x columns of one thread block. The weight side takes the 64..256 edge of the tensor-core instruction, the
# token side shrinks when there are few tokens; 256 x 256 does not fit a register file.
_SEARCHED_TILES = (
    (16, 32), (16, 64), (32, 64), (64, 32), (64, 64), (64, 128), (128, 32), (128, 64), (128, 128), (128, 256),
    (256, 128),
)  # fmt: skip
_SPLITS = (1, 2, 3, 4, 6, 8, 16, 32)
# vLLM's CUTLASS fp8 kernels choose a tile by the number of rows and never split k (vllm, scaled_mm_sm90_fp8_dispatch):
# rows above, rows up to, tile rows, tile columns.
_DISPATCHED_TILES = (
    (-1.0, 16.0, 16, 64), (-1.0, 64.0, 64, 64), (64.0, 128.0, 64, 128), (128.0, np.inf, 128, 128),
    (128.0, np.inf, 256, 128),
)  # fmt: skip
# CUTLASS's and DeepGEMM's kernels for narrow operands on data-centre parts take 64 rows and more, those for FP4 on
# workstation parts one tile.
_UNSPLIT_TILES = ((64, 64), (64, 128), (128, 32), (128, 64), (128, 128), (128, 256), (256, 128))
_ONE_TILE = ((128, 128),)
LIBRARIES = ("search", "unsplit", "narrow", "one", "dispatch")
_DISPATCHED_ON = ("h100-sxm", "h100-pcie", "h200", "h20", "gh200")
_ROWS_AT_ONCE = 512  # so that the candidates of as many shapes stay in cache
_CACHE_EDGE = 3.0  # residence in L2 falls from 1 to 0 between two thirds of its capacity and all of it
_SHORT_ROW = 512  # elements of k up to which the fp8 quantisation pass runs one row at a time


def library_of(fmt: str, software: str, device: str) -> str:
    """The way in which the GEMMs of a format choose their tiles, in a piece of software on a device; one of `LIBRARIES`."""
    kernels = kernels_of(software)
    if (fmt, device) in kernels.gemm_on:
        return kernels.gemm_on[fmt, device]
    library = kernels.gemm.get(fmt, "search")
    return "dispatch" if fmt == "fp8" and library == "unsplit" and device in _DISPATCHED_ON else library


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmParams:
    """The parameters that a datasheet does not give of a GEMM library on a device (times in seconds)."""

    launch_s: float = parameter(
        2.6e-6, 3e-7, 6e-5, "one kernel start takes 1 to 5 us in a CUDA graph, more from eager code"
    )
    compute_efficiency: float = parameter(0.92, 0.4, 1.0, "share of the dense peak with full tiles")
    bandwidth_efficiency: float = parameter(0.88, 0.4, 1.0, "share of the datasheet bandwidth a stream reaches")
    # A number of cycles, in which a faster tensor core passes more elements.
    fill_k: float = parameter(
        150.0, 0.0, 3000.0, "pipeline prologue and epilogue, as elements of k",
        scales_with={"peak": 1, "sms": -1, "clock": -1},
    )  # fmt: skip
    tile_edge: float = parameter(10.0, 0.0, 80.0, "a tile of r x c costs r c + edge^2: what small tiles waste")
    l2_intensity: float = parameter(50.0, 5.0, 300.0, "peak FLOP/s over L2 bytes/s: limits tiles with little reuse")
    block_bandwidth: float = parameter(0.8, 0.1, 8.0, "share of the memory bandwidth one 64 x 64 block per SM can draw")
    overlap_loss: float = parameter(0.15, 0.0, 4.0, "0: memory and arithmetic overlap fully; 4: they add up")
    split_s: float = parameter(2e-6, 0.0, 1e-5, "synchronisation of a split along k")
    cache_gain: float = parameter(0.5, 0.0, 6.0, "extra bandwidth for what stays in L2")
    throttle: float = parameter(0.1, 0.0, 0.7, "share of the clock lost to the power limit in long kernels")
    throttle_after_s: float = parameter(4e-4, 2e-5, 5e-3, "kernel length at which half of that loss applies")
    wave_softness: float = parameter(0.2, 0.0, 1.0, "0: a part wave costs a whole one; 1: its share only (persistent)")
    quantise_efficiency: float = parameter(
        0.25, 0.05, 1.0, "share of the bandwidth the activation quantisation reaches"
    )
    quantise_short_row_s: float = parameter(8e-7, 0.0, 5e-6, "quantisation of one row of at most 512 on one SM")


QUANTISE_FIELDS = ("quantise_efficiency", "quantise_short_row_s")


def gemm_s(
    params: GemmParams,
    device: Datasheet,
    m: Any,
    n: Any,
    k: Any,
    *,
    library: str = "search",
    dtype: str = "bf16",
    weight_bytes: float = 2.0,
    activation_bytes: float = 2.0,
    output_bytes: float = 2.0,
    weight_copies: float = np.inf,
    quantise_activations: bool = False,
) -> Any:
    """Seconds of C[m, n] = A[m, k] B[k, n] on one device; shapes broadcast, zero rows cost nothing.

    `library` is how tiles are chosen: "search" takes the fastest tile and split of k (cuBLAS), "unsplit" the fastest
    tile of 64 rows and more (DeepGEMM), "narrow" the fastest of all, "one" has 128 x 128 alone, and "dispatch" picks by
    the number of rows (CUTLASS fp8); none but the first splits. `dtype` names the tensor-core rate, the `*_bytes` are
    per element (weights may be narrower than the arithmetic). `weight_copies` is how many weight tensors the caller
    cycles through: a benchmark with six keeps small ones in L2, a served model never does. `quantise_activations` adds
    the pass that turns 16-bit activations into the format.

    Not promised: equal bits for arrays and scalars, nor that a row more never takes less time. Where a row more opens
    another row of tiles, more blocks draw on the memory and libraries do become faster; callers that need a
    non-decreasing function of rows take the running maximum.
    """
    m, n, k = np.broadcast_arrays(np.asarray(m, float), np.asarray(n, float), np.asarray(k, float))
    shape = m.shape
    m, n, k = (a.reshape(-1) for a in (m, n, k))
    stream = device.hbm_bytes_per_s * params.bandwidth_efficiency
    weights = n * k * weight_bytes
    activations = m * k * activation_bytes + m * n * output_bytes
    copies = weights * weight_copies
    stream_s = weights / (stream * _cache_speed(params, copies, device)) + activations / (
        stream * _cache_speed(params, activations, device)
    )
    sm_rate = device.flops_per_s(dtype) * params.compute_efficiency / device.sm_count
    best = np.concatenate(
        [
            _fastest_s(params, device, library, sm_rate, stream, weight_bytes, activation_bytes,
                       *(a[at : at + _ROWS_AT_ONCE] for a in (m, n, k, stream_s)))
            for at in range(0, max(1, len(m)), _ROWS_AT_ONCE)
        ]
    )  # fmt: skip
    seconds = params.launch_s + best
    if quantise_activations:
        seconds = seconds + m * k * (2.0 + activation_bytes) / (device.hbm_bytes_per_s * params.quantise_efficiency)
        seconds = seconds + (k <= _SHORT_ROW) * m * (params.quantise_short_row_s / device.sm_count)
    seconds = np.where(m > 0, seconds, 0.0).reshape(shape)
    return seconds if shape else float(seconds)


def _cache_speed(params: GemmParams, footprint_bytes: Any, device: Datasheet) -> Any:
    resident = np.minimum(1.0, np.maximum(0.0, _CACHE_EDGE * (1.0 - footprint_bytes / device.l2_bytes)))
    return 1.0 + params.cache_gain * resident


def _fastest_s(
    params: GemmParams, device: Datasheet, library: str, sm_rate: float, stream: float, weight_bytes: float,
    activation_bytes: float, m: np.ndarray, n: np.ndarray, k: np.ndarray, stream_s: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Seconds without the start under the best of the candidates (first axis) that the library has for each shape."""
    split, rows, columns, above, up_to = _candidates(library)
    depth = np.ceil(k / (64.0 * split)) * 64.0 + params.fill_k
    blocks_per_sm = np.ceil(m / rows) * np.ceil(n / columns) * (split / device.sm_count)
    waves = np.ceil(blocks_per_sm)
    waves = waves - params.wave_softness * (waves - blocks_per_sm) * (1.0 - 1.0 / np.maximum(waves, 1.0))
    width = np.minimum(n, columns)
    operands = np.minimum(m, rows) * activation_bytes + width * weight_bytes
    # What comes from memory comes through L2, which is no slower: on devices with little arithmetic a loan would say so.
    l2_intensity = min(params.l2_intensity, sm_rate * device.sm_count / device.hbm_bytes_per_s)
    work = np.maximum(2.0 * (rows * columns + params.tile_edge**2), l2_intensity * operands)
    compute_s = waves * depth * work / sm_rate
    compute_s = compute_s / (1.0 - params.throttle * compute_s / (compute_s + params.throttle_after_s))
    drawn = np.minimum(1.0, blocks_per_sm * (rows + width) * (params.block_bandwidth / 128.0))
    total = smooth_max(compute_s, stream_s / np.maximum(drawn, 1e-9), params.overlap_loss)
    combine_s = params.split_s + 4.0 * (split + 1) * m * n / stream
    total = total + np.where(split > 1, combine_s, 0.0)
    allowed = (m > above) & (m <= up_to) & ((split == 1) | (k >= 128.0 * split))
    return np.where(allowed, total, np.inf).min(axis=0)


_TILES = {"search": _SEARCHED_TILES, "unsplit": _UNSPLIT_TILES, "narrow": _SEARCHED_TILES, "one": _ONE_TILE}


@functools.cache
def _candidates(library: str) -> tuple[np.ndarray, ...]:
    """Split of k, tile rows and columns, and the rows above and up to which each is taken: columns, one candidate a row."""
    if library in _TILES:
        splits = _SPLITS if library == "search" else (1,)
        found = [(split, rows, columns, -1.0, np.inf) for split in splits for rows, columns in _TILES[library]]
    elif library == "dispatch":
        found = [(1, rows, columns, above, up_to) for above, up_to, rows, columns in _DISPATCHED_TILES]
    else:
        raise ValueError(f"library must be one of {', '.join(LIBRARIES)}; got {library!r}")
    table = np.array(found, float).T[:, :, None]
    return tuple(table)
