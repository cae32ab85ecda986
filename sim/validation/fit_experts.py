"""Fit what experts of an older vLLM take longer than their kernels, to servers that are kept full, whole models held back.

`python -m sim.validation.fit_experts MEASURED` replays the rows of the tables power_mlenergy3*_text.csv with experts, without the
term of their format and with it. A run's time is straight in the term, so that two replays say how much of it a row was measured to
take; the term is the median. Rows of prompts of thousands of tokens, whose lengths are assumed, and of more than `MOST_SEATS`
sequences, where the host has a part, are not among them.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hwmodels.measured import catalogue_model
from hwmodels.overheads import ServingStack, serving_stack
from sim.bench.published.machines import Unmodelled
from sim.bench.published.powered import RELEASES, STACK, TASKS, drawn
from sim.bench.published.rows import rows_of
from sim.validation.fit_power import tables

SET = "mlenergy3"
TERMS = {"bfloat16": ("untuned_experts", 1.0), "fp8": ("block_experts_s", 2e-4)}
"""The term of each format, and what rows are replayed with; experts in 16 bits take it on several GPUs."""
MOST_SEATS = 64
_LEAST = 0.02
"""Rows of which one unit of the term is a smaller share say nothing of it."""
LONG_TOKENS = 1000
"""Tasks of prompts of so many tokens are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Seconds over output tokens, as measured and as replayed."""

    model: str
    term: str
    measured: float
    without: float
    added: float
    """The seconds that one unit of the term adds."""

    @property
    def wanted(self) -> float:
        """The units of the term with which the replay is as fast as the row."""
        return (self.measured - self.without) / self.added


def with_term(term: str, value: float) -> ServingStack:
    """The release behind the rows with this value of a term in place of its own."""
    stack = serving_stack(STACK, RELEASES[SET])
    return replace(stack, overheads=replace(stack.overheads, **{term: value}))


def _replayed(row: Mapping[str, Any]) -> Row | None:
    term, unit = TERMS[str(row["precision"])]
    try:
        without, more = (1.0 / drawn(row, RELEASES[SET], with_term(term, value)).tokens_per_s for value in (0.0, unit))
    except Unmodelled:
        return None
    model = catalogue_model(str(row["model"])).name.removesuffix("-2507")
    measured = 1.0 / float(row["output_tokens_per_s"])
    return Row(model=model, term=term, measured=measured, without=without, added=more - without)


def rows_with_experts(folder: Path) -> list[dict[str, Any]]:
    """The rows that are replayed."""
    found = []
    for table in tables(folder):
        for row in rows_of(table) if f"{table.source}{table.version}" == SET else ():
            task = TASKS.get(str(row["task"]))
            if task is None or task.prompt_tokens >= LONG_TOKENS or row["max_num_seqs"] > MOST_SEATS:
                continue
            if row["precision"] not in TERMS or (row["precision"] == "bfloat16" and row["num_gpus"] < 2):
                continue
            try:
                if catalogue_model(str(row["model"])).experts is not None:
                    found.append(row)
            except ValueError:  # a model that the catalogue lacks
                continue
    return found


def fitted(rows: Sequence[Row]) -> float:
    """The term of *rows*, in its units."""
    return max(0.0, float(np.median([row.wanted for row in rows])))


def verdict(rows: Sequence[Row], term: str) -> str:
    """The term by all rows that it lengthens, and the errors on models that the fit had not seen."""
    mine = [row for row in rows if row.term == term and row.added > _LEAST * row.without]
    before, after = [], []
    models = sorted({row.model for row in mine})
    for model in models:
        units = fitted([row for row in mine if row.model != model])
        held = [row for row in mine if row.model == model]
        before += [abs(row.without / row.measured - 1) for row in held]
        after += [abs((row.without + units * row.added) / row.measured - 1) for row in held]
    units = next(unit for name, unit in TERMS.values() if name == term)
    return (
        f"{term} = {fitted(mine) * units:.4g}  # {len(mine)} rows of {', '.join(models)}; seconds a token of models held back: "
        f"{100 * np.median(before):.1f} % off in the median without, {100 * np.median(after):.1f} % with"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sim.validation.fit_experts")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    told = parser.parse_args()
    with ProcessPoolExecutor(told.jobs) as pool:
        found = pool.map(_replayed, rows_with_experts(told.folder), chunksize=2)
        rows = [row for row in found if row is not None]
    for term, _ in TERMS.values():
        print(verdict(rows, term))


if __name__ == "__main__":
    main()
