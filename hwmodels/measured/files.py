"""Reading measured files: columns say what a file measured, and what is not understood is refused or counted aloud."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hwmodels.measured.kinds import COUNTS, FLAGS, MAY_BE_BLANK, SAME_FORMAT, SEVERAL, TEXT
from hwmodels.measured.names import card_of, recognise
from hwmodels.stacks import kernels_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One measured file: what its name says, its columns as numpy arrays, and for kernels the measured seconds."""

    path: Path
    kind: str
    device: str
    source: str
    version: str
    dtype: str
    labels: Mapping[str, str]
    columns: Mapping[str, np.ndarray]
    measured_s: np.ndarray | None
    refused: Mapping[str, int] = field(default_factory=dict)
    """Reason -> rows of the file that were refused for it; they are in no column."""
    notes: tuple[str, ...] = ()
    """The facts that neither columns nor name say and that were assumed."""

    @property
    def on_cpu(self) -> bool:
        return self.device.startswith("cpu")

    @property
    def number_bytes(self) -> float:
        """The bytes of one number where nothing is quantised."""
        return 4.0 if self.dtype == "fp32" else 2.0

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))


class NotRecognised(ValueError):
    """A file whose columns and name are those of no kind."""


class NotNamed(NotRecognised):
    """A file with the columns of a kind, whose name does not say what the columns leave open."""


def read(path: str | Path, *, strict: bool = True) -> Measurement:
    """Read one file; ValueError names the file and what was expected where header or cells do not fit.

    Without *strict* rows that do not fit are left out and counted in `refused`; ValueError when no row is left.
    """
    path = Path(path)
    header, rows, lines = read_csv(path)
    kind, labels = recognise(path.stem, header)
    if kind is None:
        raise (NotNamed if "kind" in labels else NotRecognised)(f"{path.name}: {labels['reason']}")
    refusals = Refusals(path.name, lines, strict)
    rows = _whole(header, rows, refusals)
    columns: dict[str, np.ndarray] = {}
    for name, cells in zip(header, zip(*rows, strict=True) if rows else [()] * len(header), strict=True):
        columns[name] = _column(kind, name, cells, refusals.refuse)
    for name in filter(columns.__contains__, ("latency_us", *SEVERAL.get(kind, ()))):
        must = f"{name} must be positive"
        refusals.refuse(~(columns[name] > 0), must, f"{must}; line {{line}} is not; remove or repair it")
    kept = refusals.kept()
    columns = {name: column[kept] for name, column in columns.items()}
    if kind in SEVERAL:
        columns = _unfolded(columns, SEVERAL[kind])
    word = (labels.get("dtype") or "bf16").replace("_", "")
    dtype = SAME_FORMAT.get(word, word)
    return Measurement(
        path=path,
        kind=kind,
        device=card_of(labels.get("device") or "", labels.get("topology") or ""),
        source=labels.get("source") or "",
        version=labels.get("version") or "",
        dtype=dtype,
        labels={name: value for name, value in labels.items() if value and name != "assumed"},
        columns=columns,
        measured_s=_seconds(kind, labels.get("source") or "", columns),
        refused=refusals.refused,
        notes=(labels["assumed"],) if labels.get("assumed") else (),
    )


def _seconds(kind: str, source: str, columns: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """The measured seconds of each row; None where the file times no kernel."""
    if kind == "computescale" and kernels_of(source).quantises_by_row:
        # Its `latency_us` is the difference of two kernels, of which the second is what runs.
        return columns["dynamic_us"] * 1e-6
    return columns["latency_us"] * 1e-6 if "latency_us" in columns else None


class Refusals:
    """The rows of a file that are refused, and why; the first of them is an error where all must fit."""

    def __init__(self, file: str, lines: np.ndarray, strict: bool) -> None:
        self._file, self._lines, self._strict = file, lines, strict
        self.bad = np.zeros(len(lines), bool)
        self.refused: dict[str, int] = {}

    def refuse(self, mask: np.ndarray, reason: str, plainly: str) -> None:
        """Refuse the rows of *mask*; *plainly* is the sentence where nothing may be refused, {line} the first's line."""
        fresh = mask & ~self.bad
        if not fresh.any():
            return
        line = int(self._lines[np.flatnonzero(fresh)[0]])
        if self._strict:
            raise ValueError(f"{self._file}: {plainly.replace('{line}', str(line))}")
        self.refused[f"{reason} (line {line}{' and others' if fresh.sum() > 1 else ''})"] = int(fresh.sum())
        self.bad |= fresh

    def kept(self) -> np.ndarray:
        """The rows that were not refused; ValueError where there is none."""
        if self.bad.all():
            raise ValueError(f"{self._file}: no row is left: {'; '.join(self.refused)}")
        return ~self.bad

    def drop(self) -> None:
        """Go on with the rows that were not refused so far."""
        self._lines = self._lines[~self.bad]
        self.bad = np.zeros(len(self._lines), bool)


def _whole(header: Sequence[str], rows: Sequence[Sequence[str]], refusals: Refusals) -> list[Sequence[str]]:
    """The rows with as many cells as the *header*."""
    lengths = np.array([len(row) for row in rows])
    for length in np.unique(lengths[lengths != len(header)]):
        text = f"{length} cells, the header {len(header)}"
        refusals.refuse(lengths == length, f"the line has {text}", f"line {{line}} has {text}; truncated file?")
    kept = [row for row, bad in zip(rows, refusals.bad, strict=True) if not bad]
    refusals.drop()
    return kept


def _unfolded(columns: dict[str, np.ndarray], times: Sequence[str]) -> dict[str, np.ndarray]:
    """A row for each of several times of a line: the time as latency_us, and its name, less the unit, as operation."""
    rows = len(columns[times[0]])
    shared = {name: np.tile(column, len(times)) for name, column in columns.items() if name not in times}
    return {
        **shared,
        "operation": np.repeat([name.removesuffix("_us") for name in times], rows),
        "latency_us": np.concatenate([columns[name] for name in times]),
    }


def is_kernel_level(measurement: Measurement) -> bool:
    """Whether `predict` covers the file; iteration and end-to-end files need a whole model or a simulation."""
    return not measurement.kind.startswith(("iteration", "e2e_"))


def read_csv(path: Path) -> tuple[list[str], list[list[str]], np.ndarray]:
    """Header, rows as they stand and the line that each ends on; ValueError for what is no table."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            header = next(reader, None)
            if not header:
                raise ValueError(f"{path.name}: the file is empty; expected a header and rows")
            numbered = [(row, reader.line_num) for row in reader if row]
    except UnicodeDecodeError:
        raise ValueError(f"{path.name}: the file is no text in UTF-8; export it as CSV") from None
    except csv.Error as error:
        raise ValueError(f"{path.name}: the file is no CSV: {error}") from None
    if not numbered:
        raise ValueError(f"{path.name}: there is a header but no row; the file looks truncated")
    return [name.strip() for name in header], [row for row, _ in numbered], np.array([line for _, line in numbered])


def _column(kind: str, name: str, cells: Sequence[str], refuse: Callable[[np.ndarray, str, str], None]) -> np.ndarray:
    """A column's values; cells that do not fit are given to *refuse* with the reason, and hold NaN or False."""
    if name in TEXT:
        return np.array(cells, dtype=str)
    if name in FLAGS:
        words = np.char.lower(np.array(cells, dtype=str))
        wrong = ~np.isin(words, ("true", "false"))
        got = repr(cells[int(np.flatnonzero(wrong)[0])]) if wrong.any() else ""
        text = f"{name} must be True or False; got {got}"
        refuse(wrong, text, text)
        return words == "true"
    allowed = MAY_BE_BLANK.get(kind, set())
    may_be_blank = allowed is None or name in allowed
    values, wrong, text = np.full(len(cells), np.nan), np.zeros(len(cells), bool), ""
    for index, cell in enumerate(cells):
        if cell == "" and may_be_blank:
            continue
        try:
            values[index] = float(cell)
        except ValueError:
            wrong[index] = True
            text = text or cell
    refuse(wrong, f"{name} must be a number; got {text!r}", f"{name} in line {{line}} must be a number; got {text!r}")
    endless = np.isinf(values) | (np.isnan(values) & ~wrong & (not may_be_blank))
    refuse(endless, f"{name} must be finite", f"{name} must be finite numbers; line {{line}} is not")
    if name in COUNTS:
        least = 0 if kind.startswith("e2e_") and name in _NONE_WHEN_DENSE else 1
        refuse(
            values < least,
            f"{name} must be at least {least}",
            f"{name} must be at least {least}; line {{line}} is not; remove or repair it",
        )
    timed = name == "latency_us" or name in SEVERAL.get(kind, ())  # which is above 0, as the caller says
    text = f"{name} must lie between 0 and {_LARGEST:.0e}"
    refuse(
        ((values < 0) & (not timed)) | (values > _LARGEST), text, f"{text}; line {{line}} does not; remove or repair it"
    )
    return values


_LARGEST = 1e12
"""The largest number that a table may hold: more bytes than a collective has sent, and more microseconds than a run has taken."""
_NONE_WHEN_DENSE = ("moe_tp_size", "moe_ep_size")
"""Columns that serving files fill with 0 for a model without experts; `sim.bench.published.rows` reads that as 1."""
