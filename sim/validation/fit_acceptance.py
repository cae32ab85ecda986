"""Fit the acceptance of drafted tokens to half of the deployments, and judge it by the other half.

`python -m sim.validation.fit_acceptance MEASURED` prints, and with --write puts into acceptances.toml, the share of drafted tokens
that is accepted, for each number of tokens drafted that nobody has published one for, from token times. Halves are by a hash of
model, devices, stack and layout; the value is the one that makes the median error of the first half the least, and the error that
counts is that of the other.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hwmodels.measured import read
from hwmodels.tables import read_toml
from policies.acceptance import Iid
from sim.bench.published.machines import Unmodelled
from sim.bench.published.rows import (
    Served,
    concurrency_of,
    deployment_of,
    half_of,
    most_clients,
    rows_of,
    served_run,
    served_s,
)
from sim.bench.published.speculated import FILE as ACCEPTANCES
from workloads.write import write_whole

ALPHAS = (0.4, 0.65, 0.9)
MOST_CLIENTS = 130
"""Runs of more requests in flight are not fitted, for the time that they take; all are scored by `rooftrace validate`."""
SPECULATIVE = ("e2e_silicon_speculative_agg.csv", "e2e_silicon_speculative_disagg.csv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of a file, as it is run, and what it measured."""

    served: Served
    half: int
    tpot_s: float


def rows_to_fit(path: Path) -> list[Row]:
    """The rows of *path* that can be predicted and are not too long."""
    rows = rows_of(read(path))
    found = []
    for row, clients in zip(rows, most_clients(rows), strict=True):
        try:
            served = served_run(row, path.parent, clients=clients)
        except Unmodelled:
            continue
        # Ranks take every step one by one: long answers of many clients take minutes.
        long = served.prefill is None and served.decode.parallel.data > 1 and row["osl"] > 1024
        if concurrency_of(row) <= MOST_CLIENTS and not long:
            found.append(Row(served=served, half=half_of(deployment_of(row)), tpot_s=float(row["tpot_ms"]) * 1e-3))
    return found


def _tpot_ratio(row: Row, alpha: float) -> float:
    speculation = row.served.speculation
    assert speculation is not None
    try:
        found = served_s(replace(row.served, speculation=replace(speculation, acceptance=Iid(alpha=alpha))))
    except Unmodelled:
        return np.nan
    return found.tpot_s / row.tpot_s


def best_of(grid: Sequence[float], ratios: np.ndarray, half: np.ndarray) -> tuple[float, float, float]:
    """The value between the ends of *grid* with the least median error of the rows of half 0, and the median errors of both halves.

    *ratios*: predicted over measured, shape [rows, values of the grid]; between its values their logarithms lie on straight lines.
    """
    logs = np.log(ratios)
    fine = np.linspace(grid[0], grid[-1], 61)
    between = np.array([[float(np.interp(x, grid, line)) for x in fine] for line in logs])
    off = np.abs(np.expm1(between))
    errors = np.nanmedian(off[half == 0], axis=0)
    best = int(np.argmin(errors))
    held = off[half == 1][:, best]
    return float(fine[best]), float(errors[best]), float(np.nanmedian(held)) if len(held) else np.nan


def main(folder: Path, *, write: bool, jobs: int) -> None:
    with ProcessPoolExecutor(jobs) as pool:

        def ratios(rows: Sequence[Row], grid: Sequence[float]) -> np.ndarray:
            asked = [(row, value) for row in rows for value in grid]
            found = list(pool.map(_tpot_ratio, [row for row, _ in asked], [value for _, value in asked], chunksize=4))
            return np.array(found).reshape(len(rows), len(grid))

        rows = [row for name in SPECULATIVE for row in rows_to_fit(folder / name)]
        known = read_toml(ACCEPTANCES)
        for model, table in known.items():
            for depth, entry in table.items():
                mine = [r for r in rows if r.served.speculation is not None and r.served.speculation.k == int(depth)]
                if str(entry["source"]).startswith("published") or not mine:
                    continue
                half = np.array([row.half for row in mine])
                alpha, seen, held = best_of(ALPHAS, ratios(mine, ALPHAS), half)
                entry |= {"alpha": alpha, "source": _said(half, seen, held)}
                print(f"{model}, {depth} drafted: {alpha:.3g}, {entry['source']}", flush=True)
        if write:
            tables = [
                (f"{model}.{depth}", dict(entry)) for model, table in known.items() for depth, entry in table.items()
            ]
            _write(ACCEPTANCES, _ACCEPTANCES_HEAD, tables)


def _said(half: np.ndarray, seen: float, held: float) -> str:
    return (
        f"fitted to half of the deployments, {int((half == 0).sum())} rows, where the median error of TPOT is "
        f"{100 * seen:.0f} %; on the {int((half == 1).sum())} rows of the others {100 * held:.0f} %"
    )


def _write(path: Path, head: str, tables: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    parts = [head]
    for name, entry in tables:
        values = [f"{k} = {round(v, 3) if isinstance(v, float) else json.dumps(v)}" for k, v in entry.items()]
        parts += [f"[{name}]", *values, ""]
    write_whole(path, "\n".join(parts))


_ACCEPTANCES_HEAD = """\
# Share of drafted tokens that are accepted, given that those before them were, by model and tokens drafted in a round.
# `python -m sim.validation.fit_acceptance MEASURED --write` fits those that are not published.
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m sim.validation.fit_acceptance")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", action="store_true", help="put the tables beside this file")
    parser.add_argument("--jobs", type=int, default=2)
    told = parser.parse_args()
    main(told.folder, write=told.write, jobs=told.jobs)
