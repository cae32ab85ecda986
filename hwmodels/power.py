"""Power of a device by what it does: idle, bound by its memory, bound by its arithmetic.

Measured on one device, a B200 (power.toml says where). Other devices are taken to draw the same share of their limit (TDP) at the
same shares of their peaks; that is an assumption, and `PowerModel.basis` says so.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hwmodels.tables import ROOM, read_toml

FloatArray = NDArray[np.float64]
_MEASURED = "b200"
_SHORTEST_S = 1e-4
"""Shorter kernels end before the sensor has seen them alone."""
_PARTS = {"decode": "attention/vllm/0.22.0/generation_attention_perf.parquet",
          "prefill": "attention/vllm/0.22.0/context_attention_perf.parquet",
          "experts": "moe/vllm/0.22.0/moe_perf.parquet"}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerModel:
    """Shares of a device's power limit."""

    idle: float
    """The power of a device on which nothing runs: the least that was measured with tiny kernels running, so rather too much."""
    memory: float
    memory_exponent: float
    compute: float
    compute_exponent: float
    low: float
    high: float
    """Measured over predicted, 5th and 95th percentile over kinds of kernels that a fit had not seen."""
    limit_w: float
    basis: str = ""

    def share(self, bandwidth_share: ArrayLike, arithmetic_share: ArrayLike) -> FloatArray:
        """Share of the limit at these shares of peak bandwidth and arithmetic, elementwise; 1 at most."""
        memory = self.memory * np.clip(np.asarray(bandwidth_share, float), 0.0, 1.0) ** self.memory_exponent
        compute = self.compute * np.clip(np.asarray(arithmetic_share, float), 0.0, 1.0) ** self.compute_exponent
        return np.minimum(1.0, self.idle + memory + compute)


def power_share(bandwidth_share: ArrayLike, arithmetic_share: ArrayLike) -> FloatArray:
    """The share of power of any device, as measured on one; see `PowerModel.share`."""
    return power_model(_MEASURED).share(bandwidth_share, arithmetic_share)


@functools.cache
def power_model(device: str) -> PowerModel:
    """The model for the device called *device*, borrowed from the measured one where it is another."""
    table = read_toml(ROOM / "power.toml")[_MEASURED]
    return PowerModel(basis=basis_of([device]), **table)


def basis_of(devices: Iterable[str]) -> str:
    """The basis of the power of *devices* (catalogue names), for people."""
    borrowed = [name for name in dict.fromkeys(devices) if name != _MEASURED]
    return f"shares of TDP as measured on b200, not on {' and '.join(borrowed)}" if borrowed else "measured on b200"


# Fitting


def fit_power(kinds: Mapping[str, tuple[FloatArray, FloatArray, FloatArray]], limit_w: float) -> dict[str, float]:
    """Parameters of `PowerModel` for rows of (bandwidth share, arithmetic share, watts) by kind of kernel.

    Kinds weigh alike. Errors are those of each kind predicted from the others.
    """
    idle = min(float(watts.min()) for _, _, watts in kinds.values()) / limit_w
    found = _least_squares(kinds, idle, limit_w)
    ratios = []
    for name, (bandwidth, arithmetic, watts) in kinds.items():
        others = _least_squares({key: rows for key, rows in kinds.items() if key != name}, idle, limit_w)
        predicted = _share(others, idle, bandwidth, arithmetic) * limit_w
        # As many of each kind, evenly through its sorted ratios.
        ratios.append(np.quantile(watts / predicted, np.linspace(0, 1, 2001)))
    low, high = np.quantile(np.concatenate(ratios), [0.05, 0.95])
    names = ("memory", "memory_exponent", "compute", "compute_exponent")
    return {
        "limit_w": limit_w,
        "idle": idle,
        **dict(zip(names, found.tolist(), strict=True)),
        "low": float(low),
        "high": float(high),
    }


def _share(parameters: FloatArray, idle: float, bandwidth: FloatArray, arithmetic: FloatArray) -> FloatArray:
    memory, a, compute, b = parameters
    return np.minimum(1.0, idle + memory * bandwidth**a + compute * arithmetic**b)


def _least_squares(
    kinds: Mapping[str, tuple[FloatArray, FloatArray, FloatArray]], idle: float, limit_w: float
) -> FloatArray:
    from scipy.optimize import least_squares

    def residuals(parameters: FloatArray) -> FloatArray:
        return np.concatenate(
            [
                np.log(_share(parameters, idle, bandwidth, arithmetic) * limit_w / watts) / np.sqrt(len(watts))
                for bandwidth, arithmetic, watts in kinds.values()
            ]
        )

    bounds = ([0.0, 0.01, 0.0, 0.01], [2.0, 3.0, 3.0, 3.0])
    return least_squares(residuals, [0.3, 0.5, 0.5, 0.5], bounds=bounds, loss="soft_l1", f_scale=0.01).x


def measured_kinds(folder: Path) -> dict[str, tuple[FloatArray, FloatArray, FloatArray]]:
    """Rows of the published tables below *folder* (`.../data/b200_sxm`) as `fit_power` takes them."""
    import pyarrow.parquet as pq

    found = {}
    for name, part in _PARTS.items():
        rows = pq.read_table(folder / part).to_pandas()
        n_bytes, flops, peak = _experts(rows) if name == "experts" else _attention(rows, decode=name == "decode")
        seconds = rows["latency"].to_numpy() * 1e-3
        bandwidth, arithmetic = n_bytes / seconds / 8e12, flops / seconds / peak
        # Beyond 1.05 of the peak a row has read less than its whole tables.
        kept = (seconds > _SHORTEST_S) & (bandwidth < 1.05) & (arithmetic < 1.05)
        found[name] = (np.minimum(bandwidth, 1)[kept], np.minimum(arithmetic, 1)[kept], rows["power"].to_numpy()[kept])
    return found


def _attention(rows: Any, *, decode: bool) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Bytes, FLOPs and peak of rows of attention."""
    kv = (rows["step"] + 1 if decode else rows["isl"]).to_numpy(float)
    queries = np.ones(len(rows)) if decode else rows["isl"].to_numpy(float)
    window = rows["window_size"].where(rows["window_size"] > 0, 1e9).to_numpy(float)
    seen = np.minimum(kv, window)
    heads, width, batch = (rows[name].to_numpy(float) for name in ("num_heads", "head_dim", "batch_size"))
    kv_heads = rows["num_key_value_heads"].where(rows["num_key_value_heads"] > 0, rows["num_heads"]).to_numpy(float)
    kv_bytes = np.where(rows["kv_cache_dtype"].str.contains("fp8"), 1.0, 2.0)
    read = seen if decode else kv
    n_bytes = batch * width * (2 * read * kv_heads * kv_bytes + 4 * queries * heads)
    pairs = seen if decode else np.where(window > kv, kv * (kv + 1) / 2, kv * seen - seen * seen / 2)
    return n_bytes, 4 * batch * heads * width * pairs, np.full(len(rows), 2.25e15)


def _experts(rows: Any) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Bytes, FLOPs and peak of rows of experts: the weights of those that are expected to be touched are read once."""
    short = rows["moe_dtype"].astype(str)
    weight_bytes = short.map({"bfloat16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "int4_wo": 0.53}).to_numpy(float)
    peak = np.where(short.str.startswith("fp8"), 4.5e15, 2.25e15)
    held = (rows["num_experts"] / rows["moe_ep_size"]).to_numpy(float)
    inner = (rows["inter_size"] / rows["moe_tp_size"]).to_numpy(float)
    tokens, hidden = rows["num_tokens"].to_numpy(float), rows["hidden_size"].to_numpy(float)
    routed = tokens * (rows["topk"] / rows["moe_ep_size"]).to_numpy(float)
    touched = held * -np.expm1(-routed / held)
    return touched * 3 * hidden * inner * weight_bytes + 4 * tokens * hidden, 6 * routed * hidden * inner, peak


def main() -> None:
    """Print the table of power.toml for the folder that is named."""
    if len(sys.argv) != 2:
        raise SystemExit("python -m hwmodels.power .../systems/data/b200_sxm")
    print(f"[{_MEASURED}]")
    for key, value in fit_power(measured_kinds(Path(sys.argv[1])), 1000.0).items():
        print(f"{key} = {value:.4g}")


if __name__ == "__main__":
    main()
