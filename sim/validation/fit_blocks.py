"""Fit what experts in FP8 blocks on several devices take longer than their kernels; judge it by rows that the fit did not see.

`python -m sim.validation.fit_blocks MEASURED` replays the rows of each of `FITS` with several values of its term. The term is the
one with the least median error of the figures that it is fitted to; the errors that count are those of the rows that judge it. Why
experts take longer there is not known.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hwmodels.measured import read
from hwmodels.overheads import serving_stack
from hwmodels.tables import read_toml
from sim.bench.published.machines import Unmodelled
from sim.bench.published.rows import Served, concurrency_of, most_clients, rows_of, served_run, served_s
from sim.protocols import Figures
from sim.validation.fit_acceptance import MOST_CLIENTS, best_of

Figure = Literal["TTFT", "TPOT"]
FIGURES: tuple[Figure, ...] = ("TTFT", "TPOT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A term of a stack, and the tables whose rows determine and judge it."""

    stack: str
    release: str
    """The release that has the term."""
    term: str
    grid: tuple[float, ...]
    fitted: tuple[str, ...]
    judged: tuple[str, ...]
    to: tuple[Figure, ...] = FIGURES
    """The figures that it is fitted to."""


def _fits() -> tuple[Fit, ...]:
    found = []
    for stack, entry in read_toml(Path(__file__).with_suffix(".toml")).items():
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()
        }
        found.append(Fit(stack=stack, **given))
    return tuple(found)


FITS = _fits()
"""The fits of `fit_blocks.toml`."""


def rows_with_spread_experts(fit: Fit, path: Path) -> list[tuple[Served, Figures]]:
    """The rows of *path* whose prompts pass experts in FP8 blocks on several devices, with what they measured."""
    rows = rows_of(read(path))
    found = []
    for row, clients in zip(rows, most_clients(rows), strict=True):
        if row["backend"] != fit.stack or concurrency_of(row) > MOST_CLIENTS:
            continue
        try:
            served = served_run(row, path.parent, clients=clients)
        except Unmodelled:
            continue
        prompts = served.prefill or served.decode
        spread = served.model.expert_precision == "fp8_block" and prompts.parallel.expert > 1
        if spread and serving_stack(fit.stack, served.release).release == fit.release:
            found.append((served, Figures(float(row["ttft_ms"]) * 1e-3, float(row["tpot_ms"]) * 1e-3)))
    return found


def ratios_of(served: Served, measured: Figures, term: str, value: float) -> tuple[float, float]:
    """Simulated over measured TTFT and TPOT with this value of the term; NaN where the row cannot be replayed."""
    stack = serving_stack(served.stack, served.release)
    try:
        found = served_s(served, stack=replace(stack, overheads=replace(stack.overheads, **{term: value})))
    except Unmodelled:
        return np.nan, np.nan
    return found.ttft_s / measured.ttft_s, found.tpot_s / measured.tpot_s


def said_of(fit: Fit, folder: Path, pool: ProcessPoolExecutor) -> str:
    """The term, and the errors of the rows without it and with it."""
    tables = [[row for name in names for row in rows_with_spread_experts(fit, folder / name)]
              for names in (fit.fitted, fit.judged)]  # fmt: skip
    rows = [row for table in tables for row in table]
    asked = [(served, measured, fit.term, value) for served, measured in rows for value in fit.grid]
    found = np.array(list(pool.map(ratios_of, *zip(*asked, strict=True), chunksize=4)))
    ratios = dict(zip(FIGURES, np.moveaxis(found.reshape(len(rows), len(fit.grid), 2), -1, 0), strict=True))
    held = np.repeat([0, 1], [len(table) for table in tables])
    value, _, _ = best_of(fit.grid, np.vstack([ratios[name] for name in fit.to]), np.tile(held, len(fit.to)))
    said = []
    for which, what in enumerate(("rows", "rows that it was not fitted to")):
        mine = {name: ratios[name][held == which] for name in FIGURES}
        errors = [
            f"{name} {100 * at(0.0, fit.grid, each):.0f} to {100 * at(value, fit.grid, each):.0f} %"
            for name, each in mine.items()
        ]
        said.append(f"{(held == which).sum()} {what}: {', '.join(errors)}")
    return f"{fit.stack} {fit.release} {fit.term} = {value:.3g}  # median errors of {'; '.join(said)}"


def at(value: float, grid: tuple[float, ...], ratios: np.ndarray) -> float:
    """The median error of rows at *value*, from their *ratios* at the values of *grid*."""
    logs = [float(np.interp(value, grid, line)) for line in np.log(ratios)]
    return float(np.nanmedian(np.abs(np.expm1(logs))))


def main(folder: Path, jobs: int) -> None:
    with ProcessPoolExecutor(jobs) as pool:
        for fit in FITS:
            print(said_of(fit, folder, pool), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m sim.validation.fit_blocks")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    told = parser.parse_args()
    main(told.folder, told.jobs)
