"""How far off a stack's prices are on kinds of models that none of its served runs is of.

`python -m sim.validation.fit_kinds ROWS.csv` reads the errors of every row that `sim.validation.fit_stacks --out` wrote and prints
serving_kinds.toml (`hwmodels.serving_intervals`). Each architecture of each stack is left out in turn: the interval of the stack's
other rows is laid beside its own, and what counts is how much farther its ends lie, for the architecture that lies farthest out.
The terms are those of a fit that saw the rows; it has too few terms to follow one kind.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hwmodels.measured import catalogue_model
from hwmodels.serving_intervals import ANY, QUANTITIES, architecture_of, kind_of
from sim.errors import RooftraceError
from workloads.write import write_whole

FORMATS = {"fp8": "fp8", "fp4": "fp4", "int4": "int4", "bf16": "bf16", "fp16": "bf16"}
"""Formats of rows, as `hwmodels.serving_intervals.kind_of` names them."""
RECORDED = {"vllm": ("dense bf16",)}
"""Kinds of recorded runs, which are no rows of the table: Llama-3.1-8B behind vLLM, within 3 % of its TPOT and TTFT."""
_FEWEST = 8
"""Rows of an architecture, and of the others, that say how far out it lies."""
_ENDS = (0.05, 0.95)


@dataclass(frozen=True, slots=True, kw_only=True)
class Error:
    """A row, and measured over predicted."""

    stack: str
    architecture: str
    kind: str
    ratio: tuple[float, float]
    """TPOT and TTFT."""


def errors_of(path: Path) -> list[Error]:
    """The rows of a file that fit_stacks wrote; RooftraceError where it is none."""
    found = []
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            try:
                ratios = tuple(1.0 / float(row[f"{name}_fitted"] or "nan") for name in ("tpot", "ttft"))
                model = catalogue_model(row["model_path"])
                # A row that says no format is of the checkpoint's own.
                kind = f"{architecture_of(model)} {FORMATS[row['precision']]}" if row["precision"] else kind_of(model)
            except (KeyError, ValueError, ZeroDivisionError) as error:
                raise RooftraceError(f"{path}: a row is not as fit_stacks --out writes it: {error}") from None
            if all(np.isfinite(ratios)):
                found.append(
                    Error(
                        stack=row["stack"], architecture=architecture_of(model), kind=kind, ratio=(ratios[0], ratios[1])
                    )
                )  # fmt: skip
    return found


def farther(errors: Sequence[Error], quantity: int) -> tuple[float, float]:
    """The factors on the ends of an interval that the architecture needs which lies farthest out of the others' of its stack."""
    low = high = 0.0
    for stack in {each.stack for each in errors}:
        mine = [each for each in errors if each.stack == stack]
        log = np.log([each.ratio[quantity] for each in mine])
        for architecture in {each.architecture for each in mine}:
            out = np.array([each.architecture == architecture for each in mine])
            if min(out.sum(), (~out).sum()) < _FEWEST:
                continue
            theirs, own = np.quantile(log[~out], _ENDS), np.quantile(log[out], _ENDS)
            low, high = min(low, own[0] - theirs[0]), max(high, own[1] - theirs[1])
    return float(np.exp(low)), float(np.exp(high))


def entries_of(errors: Sequence[Error]) -> dict[str, dict[str, Any]]:
    """The entries of serving_kinds.toml."""
    entries: dict[str, dict[str, Any]] = {}
    for stack in sorted({each.stack for each in errors}):
        mine = [each for each in errors if each.stack == stack]
        entries[stack] = {"kinds": sorted({*(each.kind for each in mine), *RECORDED.get(stack, ())})}
        for i, quantity in enumerate(QUANTITIES):
            entries[stack][quantity] = tuple(np.quantile([each.ratio[i] for each in mine], _ENDS).tolist())
    entries[ANY] = {quantity: farther(errors, i) for i, quantity in enumerate(QUANTITIES)}
    return entries


_HEAD = """\
# Written by `python -m sim.validation.fit_kinds ROWS.csv`; `hwmodels.serving_intervals` says what they are. kinds: architectures
# and formats of a stack's served runs. tpot_s, ttft_s: 5th and 95th percentile of measured over predicted over all of its rows, at
# any load; of any: how much farther the ends lie of the architecture that lies farthest out of the interval of the others.
"""


def written(entries: Mapping[str, Mapping[str, Any]]) -> str:
    """serving_kinds.toml."""
    parts = [_HEAD]
    for name, entry in entries.items():
        parts.append(f"[{name}]")
        if "kinds" in entry:
            parts.append(f"kinds = {json.dumps(entry['kinds'])}")
        parts += [f"{quantity} = [{entry[quantity][0]:.3f}, {entry[quantity][1]:.3f}]" for quantity in QUANTITIES]
        parts.append("")
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sim.validation.fit_kinds")
    parser.add_argument("rows", type=Path, help="the errors that fit_stacks --out wrote")
    parser.add_argument("--out", type=Path, help="write serving_kinds.toml")
    told = parser.parse_args()
    text = written(entries_of(errors_of(told.rows)))
    print(text)
    if told.out is not None:
        write_whole(told.out, text)


if __name__ == "__main__":
    main()
