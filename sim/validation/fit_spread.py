"""Fit what prompts take longer behind SGLang with experts in FP8 blocks on several devices; judge it by another model's pools.

`python -m sim.validation.fit_spread MEASURED` replays the aggregated rows with such experts with several values of the term
`spread_experts_s`; the term is the one with the least median error of TTFT and TPOT together. The errors that count are the TTFT
of separate pools whose prefill workers have such experts, which are of another model. Why prompts take longer there is not known.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from hwmodels.measured import read
from hwmodels.overheads import serving_stack
from sim.bench.published.machines import Unmodelled
from sim.bench.published.rows import Served, concurrency_of, most_clients, rows_of, served_run, served_s
from sim.protocols import Figures
from sim.validation.fit_acceptance import MOST_CLIENTS, best_of

STACK, TERM = "sglang", "spread_experts_s"
GRID = (0.0, 2e-7, 4e-7, 6e-7)
FITTED = ("e2e_silicon_agg.csv",)
JUDGED = ("e2e_silicon_disagg.csv", "e2e_silicon_speculative_disagg.csv")


def rows_with_spread_experts(path: Path) -> list[tuple[Served, Figures]]:
    """The rows of *path* whose prompts pass experts in FP8 blocks on several devices, with what they measured."""
    rows = rows_of(read(path))
    found = []
    for row, clients in zip(rows, most_clients(rows), strict=True):
        if row["backend"] != STACK or concurrency_of(row) > MOST_CLIENTS:
            continue
        try:
            served = served_run(row, path.parent, clients=clients)
        except Unmodelled:
            continue
        prompts = served.prefill or served.decode
        if served.model.expert_precision == "fp8_block" and prompts.parallel.expert > 1:
            found.append((served, Figures(float(row["ttft_ms"]) * 1e-3, float(row["tpot_ms"]) * 1e-3)))
    return found


def ratios_of(served: Served, measured: Figures, value: float) -> tuple[float, float]:
    """Simulated over measured TTFT and TPOT with this value of the term; NaN where the row cannot be replayed."""
    stack = serving_stack(STACK, served.release)
    try:
        found = served_s(served, stack=replace(stack, overheads=replace(stack.overheads, **{TERM: value})))
    except Unmodelled:
        return np.nan, np.nan
    return found.ttft_s / measured.ttft_s, found.tpot_s / measured.tpot_s


def main(folder: Path, jobs: int) -> None:
    rows, half = [], []
    for held, names in enumerate((FITTED, JUDGED)):
        for name in names:
            found = rows_with_spread_experts(folder / name)
            rows += found
            half += [held] * len(found)
    asked = [(served, measured, value) for served, measured in rows for value in GRID]
    with ProcessPoolExecutor(jobs) as pool:
        found = list(pool.map(ratios_of, *zip(*asked, strict=True), chunksize=4))
    ttft, tpot = np.moveaxis(np.array(found).reshape(len(rows), len(GRID), 2), -1, 0)
    held = np.array(half)
    value, _, _ = best_of(GRID, np.vstack([ttft, tpot]), np.tile(held, 2))
    said = []
    for which, what in enumerate(("aggregated rows", "rows of separate pools, which it was not fitted to,")):
        mine = held == which
        errors = [
            f"{name} {100 * np.nanmedian(np.abs(ratios[mine, 0] - 1)):.0f} to {100 * at(value, ratios[mine]):.0f} %"
            for name, ratios in (("TTFT", ttft), ("TPOT", tpot))
        ]
        said.append(f"{mine.sum()} {what} {', '.join(errors)}")
    print(f"{TERM} = {value:.3g}  # median errors: {'; '.join(said)}")


def at(value: float, ratios: np.ndarray) -> float:
    """The median error of rows at *value*, from their *ratios* at `GRID`."""
    logs = [float(np.interp(value, GRID, line)) for line in np.log(ratios)]
    return float(np.nanmedian(np.abs(np.expm1(logs))))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m sim.validation.fit_spread")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    told = parser.parse_args()
    main(told.folder, told.jobs)
