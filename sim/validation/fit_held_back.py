"""Errors, intervals and choices of predictions held back, as docs/validation.md has them.

`python -m sim.validation.fit_held_back MEASURED ERRORS.csv ...`, where ERRORS.csv are what `python -m sim.validation.fit_stacks
MEASURED --as-they-stand --out ERRORS.csv` wrote for one or more stacks, all of them together, writes held_back.toml, and the errors
in words into the stacks' overheads.toml.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hwmodels.measured import Measurement, read
from hwmodels.tables import ROOM
from sim.bench.published.rows import rows_of
from sim.validation.aims import HELD_BACK
from sim.validation.choices import scores, servers
from sim.validation.files import Comparison, row_groups
from sim.validation.fit_stacks import Point, by_family, held_of, model_factors, served_points
from sim.validation.fit_stacks import scores as scores_in_words
from workloads.write import write_whole

KINDS = {"deployments": "deployment", "models": "model"}
"""Each kind of rows that are held back together, and its name in the columns of the errors."""
_QUANTITIES = ("tpot", "ttft")


Errors = Mapping[str, tuple[Sequence[Point], Sequence[Mapping[str, str]]]]
"""The rows of each stack, and the line of errors of each."""


def ratios_of(folder: Path, paths: Sequence[Path]) -> Errors:
    """The errors that *paths* have for the rows in *folder*; ValueError where lines are of other rows."""
    lines = [
        line for path in paths for line in csv.DictReader(path.read_text(encoding="utf-8").splitlines(keepends=True))
    ]
    found = {}
    for stack in dict.fromkeys(line["stack"] for line in lines):
        mine, points = [line for line in lines if line["stack"] == stack], served_points(folder, stack)
        same = ("model_path", "system", "isl", "osl", "concurrency", "tp_size")
        if [[line[name] for name in same] for line in mine] != [[str(p.row[name]) for name in same] for p in points]:
            raise ValueError(f"the errors of {stack} are not those of the rows in {folder}")
        found[stack] = points, mine
    return found


def held_pair(measurement: Measurement, found: Errors, kind: str) -> tuple[Comparison, Comparison]:
    """TPOT and TTFT of the rows as predicted with their *kind* held back."""
    rows = rows_of(measurement)
    groups = row_groups(measurement, rows)
    pair = []
    for quantity in _QUANTITIES:
        measured = measurement.columns[f"{quantity}_ms"] * 1e-3
        predicted = np.full(len(rows), np.nan)
        for stack, (_, lines) in found.items():
            at = groups["stack"] == stack
            predicted[at] = measured[at] * [float(line[f"{quantity}_{KINDS[kind]}"]) for line in lines]
        name = measurement.path.name
        pair.append(
            Comparison(file=name, device="", quantity=quantity, predicted=predicted, measured=measured, groups=groups)
        )
    return pair[0], pair[1]


def inside_unseen(models: Sequence[str], log_ratios: np.ndarray) -> float:
    """Share of the known ratios within the interval for models never seen that the rows of all other models give."""
    names, known = np.array(models), np.isfinite(log_ratios)
    inside = np.zeros(len(names), bool)
    for each in set(models):
        mine = names == each
        low, high = np.log(model_factors(names[~mine].tolist(), log_ratios[~mine]))
        inside |= mine & (log_ratios >= low) & (log_ratios <= high)
    return float(inside[known].mean())


def held_back(measurement: Measurement, found: Errors) -> dict[str, Any]:
    """The tables of held_back.toml."""
    tables: dict[str, Any] = {}
    for kind in KINDS:
        errors: dict[str, list[float]] = {}
        inside: dict[str, list[float]] = {}
        every = []
        for stack, (points, lines) in found.items():
            ratios = np.array([[float(line[f"{q}_{KINDS[kind]}"]) for q in _QUANTITIES] for line in lines])
            every.append(ratios)
            errors[stack] = _medians(ratios)
            if kind == "deployments":
                shares = [held_of([p.group for p in points], -np.log(column)) for column in ratios.T]
            else:
                shares = [inside_unseen([p.model for p in points], -np.log(column)) for column in ratios.T]
            inside[stack] = [round(100.0 * share, 1) for share in shares]
        choices = scores(servers(held_pair(measurement, found, kind)))
        tables[kind] = {
            "errors": {"all": _medians(np.concatenate(every)), **errors},
            "inside": inside,
            "choices": {name: [round(number, 1) for number in numbers] for name, numbers in choices.items()},
        }
    return tables


def _medians(ratios: np.ndarray) -> list[float]:
    """Rows that have a prediction, and the median error of TPOT and of TTFT in percent."""
    return [
        int(np.isfinite(ratios).all(axis=1).sum()),
        *(round(float(value), 2) for value in np.nanmedian(100.0 * np.abs(ratios - 1.0), axis=0)),
    ]


def in_words(points: Sequence[Point], lines: Sequence[Mapping[str, str]]) -> str:
    """The errors of a stack as its overheads.toml states them."""
    measured, parts = np.array([p.measured_s for p in points]), []
    for what, column in (("Deployments", "deployment"), ("Whole models", "model")):
        found = measured * [[float(line[f"{q}_{column}"]) for q in _QUANTITIES] for line in lines]
        parts.append(f"{what} held back: {scores_in_words(points, found)}; {by_family(points, found)}")
    return ". ".join(parts)


def state(path: Path, words: str) -> None:
    """Put *words* into the `held_back` of a stack's file, before what it says of a recorded run."""
    old = path.read_text(encoding="utf-8")
    (said,) = re.findall(r'^held_back = "(.*)"$', old, re.MULTILINE)
    recorded = re.search(r"\. The recorded .*", said)
    write_whole(path, old.replace(said, words + (recorded.group() if recorded else "")))


_HEAD = """\
# Written by `python -m sim.validation.fit_held_back`: predictions of aggregated rows whose deployment, or model, no fit had seen.
# errors: rows that have one, and medians of TPOT and TTFT in percent; inside: percent of them within the 90 % interval of TPOT and
# of TTFT that all other deployments (models) give; choices: `sim.validation.choices.Scores`.
"""


def write(tables: Mapping[str, Any], path: Path) -> None:
    """Write *tables* as TOML."""
    parts = [_HEAD]
    for kind, each in tables.items():
        for part, entries in each.items():
            parts += [f"[{kind}.{part}]", *(f"{json.dumps(name)} = {json.dumps(v)}" for name, v in entries.items()), ""]
    write_whole(path, "\n".join(parts))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m sim.validation.fit_held_back")
    parser.add_argument("folder", type=Path)
    parser.add_argument("errors", type=Path, nargs="+")
    told = parser.parse_args()
    of_stacks = ratios_of(told.folder, told.errors)
    write(held_back(read(told.folder / "e2e_silicon_agg.csv"), of_stacks), HELD_BACK)
    for name, of_rows in of_stacks.items():
        state(ROOM / "stacks" / name / "overheads.toml", in_words(*of_rows))
