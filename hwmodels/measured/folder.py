"""Folders of measured files: the files that were understood, and the reason for each that was not."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hwmodels.measured.files import Measurement, NotNamed, NotRecognised, read
from hwmodels.measured.names import named
from hwmodels.measured.own import Said, read_own

_TABLES = (".csv", ".parquet")


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """A folder of measurements: the files that were understood, and the reason for each that was not."""

    measurements: tuple[Measurement, ...]
    not_understood: Mapping[str, str]

    @property
    def left_out(self) -> tuple[str, ...]:
        """A sentence for each file that was not understood and each reason for refused rows; empty: all was read."""
        of_table: dict[str, int] = {}
        for m in self.measurements:
            name = _table_name(m)
            of_table[name] = of_table.get(name, 0) + len(m) + sum(m.refused.values())
        rows = [
            f"{_table_name(m)}: {count:,} of {of_table[_table_name(m)]:,} rows refused: {reason}"
            for m in self.measurements
            for reason, count in m.refused.items()
        ]
        return (*(f"{name}: not understood: {reason}" for name, reason in self.not_understood.items()), *rows)


def _table_name(m: Measurement) -> str:
    """The name of a measurement's file, which may hold several of them."""
    return re.sub(r"(?i)(\.csv|\.parquet) \([^()]*\)$", r"\1", m.path.name)


def read_folder(folder: str | Path) -> list[Measurement]:
    """Every table of a folder, sorted by name; a file or row that is not understood is an error, not a gap."""
    return list(survey(folder, strict=True).measurements)


def survey(folder: str | Path, *, strict: bool = False, said: Said | None = None) -> Survey:
    """Every CSV and Parquet of a folder, sorted by name, or one file; *said* is for those that do not say it.

    What is not understood is in `Survey.left_out`, or, with *strict*, an error.
    """
    folder, said = Path(folder), said or Said()
    if not folder.exists():
        raise ValueError(f"{folder} does not exist; give a folder of tables, or one table")
    paths = [folder] if folder.is_file() else sorted(p for p in folder.glob("*") if p.suffix.lower() in _TABLES)
    if not paths:
        raise ValueError(f"{folder} holds no CSV files and no Parquet; a file's columns say what was measured")
    found: list[Measurement] = []
    reasons: dict[str, str] = {}
    for path in paths:
        try:
            found += _read(path, said, strict)
        except (ValueError, OSError) as error:
            if strict:
                raise
            text = f"{error.strerror}" if isinstance(error, OSError) else str(error)
            reasons[path.name] = text.removeprefix(f"{path.name}: ")
    return Survey(measurements=tuple(found), not_understood=reasons)


def _read(path: Path, said: Said, strict: bool) -> list[Measurement]:
    """A file with the columns of `kinds` as it is; any other as a table of one's own."""
    if path.suffix.lower() not in _TABLES:
        raise ValueError(f"{path.name}: a table is a CSV or a Parquet file, and its name ends so")
    unknown: ValueError | None = None
    if path.suffix.lower() == ".csv":
        try:
            return [said.of(read(path, strict=strict))]
        except NotRecognised as error:
            unknown = error
    try:
        return read_own(path, said=said, strict=strict)
    except ValueError:
        if isinstance(unknown, NotNamed) or (unknown is not None and named(path.stem)):
            raise unknown from None  # it says what a file of this name has
        raise
