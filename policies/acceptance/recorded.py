"""Accepted counts that were measured, replayed."""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from policies.acceptance.checks import drafted, is_whole
from policies.acceptance.process import Chain, FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded(Chain):
    """Accepted counts measured on a real pair of models, replayed.

    rows[i][r] is the number of drafted tokens accepted in round r of recording i, out of *recorded_k*. Request n
    replays row n modulo the number of rows, from its first round. Fewer drafted tokens replay as min(count, k); more
    than were recorded, or more rounds, are refused. The seed changes nothing.
    """

    finite: ClassVar[bool] = True
    rows: tuple[tuple[int, ...], ...]
    recorded_k: int
    _columns: tuple[IntArray, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not is_whole(self.recorded_k):
            raise ValueError(f"recorded_k is the number of tokens drafted in the recording; got {self.recorded_k!r}")
        if not self.rows:
            raise ValueError("rows is empty; give the accepted counts of at least one request")
        columns: list[IntArray] = []
        for i, row in enumerate(self.rows):
            values = np.asarray(row)
            if values.ndim != 1 or values.size == 0 or values.dtype.kind not in "iu":
                raise ValueError(f"row {i} is a sequence of whole accepted counts, at least one; got {row!r}")
            if values.min() < 0 or values.max() > self.recorded_k:
                raise ValueError(
                    f"row {i} holds accepted counts in [0, {self.recorded_k}]; got {values.min()} to {values.max()}"
                )
            columns.append(values.astype(np.int64))
        object.__setattr__(self, "rows", tuple(tuple(c.tolist()) for c in columns))
        object.__setattr__(self, "_columns", tuple(columns))

    def accepted(self, request_id: int, round_start: int, n_rounds: int, k: int, seed: int) -> IntArray:
        self._check(k)
        row = request_id % len(self._columns)
        counts = self._columns[row]
        if round_start + n_rounds > counts.size:
            raise ValueError(
                f"request {request_id} needs round {round_start + n_rounds} but row {row} of the recording ends after "
                f"{counts.size}; record longer answers or shorten the outputs"
            )
        return np.minimum(counts[round_start : round_start + n_rounds], k)

    def per_position(self, k: int) -> FloatArray:
        self._check(k)
        counts = np.concatenate(self._columns)
        return (counts[:, None] >= np.arange(1, k + 1)).mean(axis=0)

    def _check(self, k: int) -> None:
        if drafted(k) > self.recorded_k:
            raise ValueError(
                f"k = {k} drafts more than the {self.recorded_k} of the recording, which says nothing about further "
                "tokens; lower k or record with a larger one"
            )


def read_recorded(path: Path | str, *, recorded_k: int) -> Recorded:
    """Recorded acceptance from a CSV with the columns request, round, accepted.

    Requests in ascending order become rows 0, 1, ...; the rounds of each are 0, 1, ... without a gap, in any order.
    """
    counts: dict[int, dict[int, int]] = {}
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = {"request", "round", "accepted"} - set(reader.fieldnames or ())
        if missing:
            raise ValueError(f"{path}: columns request, round and accepted are needed; missing {sorted(missing)}")
        for line in reader:
            try:
                request, round_, accepted = (int(line[name]) for name in ("request", "round", "accepted"))
            except (TypeError, ValueError):
                raise ValueError(
                    f"{path}, line {reader.line_num}: request, round and accepted are whole numbers"
                ) from None
            if round_ in counts.setdefault(request, {}):
                raise ValueError(f"{path}, line {reader.line_num}: round {round_} of request {request} comes twice")
            counts[request][round_] = accepted
    rows: list[tuple[int, ...]] = []
    for request in sorted(counts):
        rounds = counts[request]
        if set(rounds) != set(range(len(rounds))):
            raise ValueError(f"{path}: rounds of request {request} must run from 0 without a gap")
        rows.append(tuple(rounds[r] for r in range(len(rounds))))
    return Recorded(rows=tuple(rows), recorded_k=recorded_k)
