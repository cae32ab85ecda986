"""Fit serving stacks' overheads to measured serving runs and iterations, part of the deployments held back.

`python -m sim.fit_stacks MEASURED [STACK ...]` prints, for each stack, the errors on deployments that the fit did not
see and the terms of a fit on all of them, as they stand in hwmodels/overheads.toml.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hwmodels.kernels.parameters import bounds
from hwmodels.measured import read
from hwmodels.overheads import Overheads, ServingStack, serving_stack
from sim.measured_runs import Unmodelled, closed_loop_s, iteration_s, rows_of, served_run

SERVED = ("step_s", "sequence_s", "row_s", "layer_host_s", "launch_overlap", "narrow_loss", "expand_loss",
          "admission_s", "admission_s_per_token")  # fmt: skip
EAGER = ("step_s", "sequence_s", "row_s", "layer_host_s", "sustained_loss")
START = {"step_s": 3e-4, "sequence_s": 5e-6, "row_s": 1e-6, "layer_host_s": 7e-4, "launch_overlap": 0.1,
         "narrow_loss": 0.5, "expand_loss": 1.2, "admission_s": 2e-2, "admission_s_per_token": 4e-6}  # fmt: skip
EAGER_START = {"step_s": 2e-3, "sequence_s": 1e-4, "row_s": 2e-5, "layer_host_s": 4e-4, "sustained_loss": 0.2}
_DEPLOYMENT = ("model_path", "system", "backend_version", "gemm_quant_mode", "tp_size", "attention_dp_size",
               "moe_tp_size", "moe_ep_size")  # fmt: skip
_TTFT_WEIGHT = 0.5  # a run's TTFT varies several times as much between repeats as its TPOT
_ROWS = 44
_MOST_CLIENTS = 32
"""Runs of more clients are scored and not fitted: simulating them takes most of the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """A row, its measured seconds of two quantities, and what must be held back together with it."""

    row: Mapping[str, Any]
    measured_s: tuple[float, float]
    group: str


def left_out(row: Mapping[str, Any]) -> str:
    """Why a row cannot inform a fit: something it does not say changes its time; empty where it can."""
    if row["model_path"] == "deepseek-ai/DeepSeek-R1" and row["backend"] == "trtllm":
        # Half the TPOT of DeepSeek-V3, the same shapes, on the same software.
        return "decodes speculatively, by all appearances"
    constant = row["provenance"] == "internal-gap-analysis"
    if constant and (row["backend"] == "vllm" or row["backend_version"] == "1.3.0rc1"):
        # The same TPOT at every batch, 0.55 to 1.5 ms a layer.
        return "runs without CUDA graphs, by all appearances"
    return ""


def _served_points(folder: Path, stack: str) -> list[_Point]:
    points = []
    for row in rows_of(read(folder / "e2e_silicon_agg.csv")):
        if row["backend"] != stack or left_out(row):
            continue
        group = "|".join(str(row[name]) for name in _DEPLOYMENT)
        points.append(_Point(row=row, measured_s=(row["tpot_ms"] * 1e-3, row["ttft_ms"] * 1e-3), group=group))
    return points


def _eager_points(folder: Path) -> list[_Point]:
    points = []
    for path in sorted(folder.glob("iteration_*.csv")):
        for row in rows_of(read(path)):
            if row["flag"] == "ok":
                group = f"{row['model']}|{row['tensor_parallel']:g}"
                seconds = (row["token_time_ms"] * 1e-3, row["prompt_time_ms"] * 1e-3)
                points.append(_Point(row=row, measured_s=seconds, group=group))
    return points


def _predict(point: _Point, stack: ServingStack) -> tuple[float, float]:
    try:
        if "prompt_size" in point.row:
            prompt_s, token_s = iteration_s(point.row, stack=stack)
            return token_s, prompt_s
        ttft_s, tpot_s = closed_loop_s(served_run(point.row), stack=stack)
        return tpot_s, ttft_s
    except Unmodelled:
        return np.nan, np.nan


def fit_stack(
    points: Sequence[_Point],
    stack: ServingStack,
    names: Sequence[str],
    price: Callable[[Sequence[_Point], ServingStack], np.ndarray],
    *,
    steps: int,
) -> ServingStack:
    """*stack* with the terms *names* fitted to *points* within their bounds, by robust least squares on log ratios."""
    from scipy.optimize import least_squares

    limits = {name: bounds(Overheads)[name] for name in names}
    begin = EAGER_START if names == EAGER else START
    scale = np.array([begin[name] * 3.0 for name in names])
    high = np.array([limits[name][2] for name in names]) / scale
    measured = np.log([p.measured_s for p in points])
    weight = np.array([1.0, _TTFT_WEIGHT])

    def built(x: np.ndarray) -> ServingStack:
        terms = {name: float(value) for name, value in zip(names, x * scale, strict=True)}
        return replace(stack, overheads=replace(stack.overheads, **terms))

    def residual(x: np.ndarray) -> np.ndarray:
        off = (np.log(price(points, built(x))) - measured) * weight
        return np.nan_to_num(off, nan=0.0).ravel()

    start = np.minimum(np.full(len(names), 1.0 / 3.0), 0.9 * high)
    # Wide steps: tiles and batches make the simulated time a staircase.
    best = least_squares(
        residual, start, bounds=(0.0, high), loss="cauchy", f_scale=0.08, diff_step=0.04, max_nfev=steps
    )
    return built(best.x)


def _held(group: str, part: int) -> bool:
    # Not the parity of a CRC: that is linear in the bits of the text, and names that differ in pairs fall together.
    return hashlib.blake2b(group.encode(), digest_size=8).digest()[0] % 2 == part


def _scores(points: Sequence[_Point], predicted: np.ndarray) -> str:
    measured = np.array([p.measured_s for p in points])
    off = 100.0 * np.abs(predicted / measured - 1.0)
    found = np.nanmedian(off, axis=0)
    mean = np.nanmean(off, axis=0)
    return f"median {found[0]:.1f} % and {found[1]:.1f} %, mean {mean[0]:.1f} % and {mean[1]:.1f} %"


def main(folder: Path, stacks: Sequence[str]) -> None:
    with ProcessPoolExecutor(2) as pool:

        def price(points: Sequence[_Point], stack: ServingStack) -> np.ndarray:
            return np.array(list(pool.map(_predict, points, [stack] * len(points), chunksize=4)))

        for name in stacks:
            stack = serving_stack(name)
            points = _eager_points(folder) if name == "eager" else _served_points(folder, name)
            names = EAGER if name == "eager" else SERVED
            rng = np.random.default_rng(0)

            def some(of: Sequence[_Point], rng: np.random.Generator = rng) -> list[_Point]:
                light = [p for p in of if not p.row.get("concurrency", 0) > _MOST_CLIENTS]
                return [light[i] for i in sorted(rng.permutation(len(light))[:_ROWS])]

            held: list[tuple[list[_Point], np.ndarray]] = []
            for part in (0, 1):
                seen = [p for p in points if not _held(p.group, part)]
                unseen = [p for p in points if _held(p.group, part)]
                if seen and unseen:
                    fitted = fit_stack(some(seen), stack, names, price, steps=30 if name == "eager" else 4)
                    held.append((unseen, price(unseen, fitted)))
            if held:
                together = [p for of, _ in held for p in of]
                print(f"{name}: held back, second quantity after the first: ", end="")
                print(_scores(together, np.concatenate([values for _, values in held])), flush=True)
            final = fit_stack(some(points), stack, names, price, steps=30 if name == "eager" else 5)
            print(f"{name}: all {len(points)} rows: {_scores(points, price(points, final))}")
            for term in names:
                print(f"{term} = {getattr(final.overheads, term):.4g}")
            sys.stdout.flush()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m sim.fit_stacks MEASURED_DIR [STACK ...]")
    main(Path(sys.argv[1]), sys.argv[2:] or ["vllm", "trtllm", "sglang", "eager"])
