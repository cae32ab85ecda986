"""Windows of time over the rows of a trace's file: which are within, and where reading may stop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from workloads.columns import INT64_MAX, NS_PER_S
from workloads.records import Rows, Wanted, pieces_of
from workloads.times import number_of, text_ns

_DATES_FROM_NS = 10**8 * NS_PER_S
"""Times below are those of a clock of their own, from a zero that is no date; as `unit_by_size` tells them apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The arrivals from *since* on and before *until*: each a date, or seconds from the first row of the trace, or not given.

    Dates are as those of traces: without a zone they are UTC. ValueError for what is neither, and where nothing can be between.
    """

    since: str | float | None = None
    until: str | float | None = None

    def __post_init__(self) -> None:
        low, high = _bound("since", self.since), _bound("until", self.until)
        if low is not None and high is not None and low.is_date == high.is_date and low.ns >= high.ns:
            raise ValueError(f"since is before until; got {self.since} and {self.until}")

    def __bool__(self) -> bool:
        return self.since is not None or self.until is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bound:
    ns: int
    is_date: bool


def _bound(name: str, value: str | float | None) -> _Bound | None:
    if value is None:
        return None
    number = number_of(value)
    if number is not None:
        return _Bound(ns=round(number * NS_PER_S), is_date=False)
    read = text_ns(value) if isinstance(value, str) else None
    if read is None:
        raise ValueError(
            f"{name} is a date with a time, such as 2026-11-03T09:00, or seconds from the first row; got {value!r}"
        )
    return _Bound(ns=read[0], is_date=True)


class Cut:
    """The rows of one file that are within a window, told piece by piece in the order of the file."""

    def __init__(self, window: Window, origin_ns: int | None = None) -> None:
        self._window = window
        self._limits: tuple[int, int] | None = None
        self._earliest = self._latest = 0
        self._in_order = True
        self.origin_ns = origin_ns
        """The time of the first row, of this file where none was given."""
        self.left_out: Counter[str] = Counter()
        self.stopped_at: int | None = None
        """The row of the last piece that is the first behind the window, where times up to it are in order: reading may stop."""

    def rows(self, arrival_ns: Sequence[int | None]) -> list[int]:
        """Those of the file's next rows that are within the window."""
        kept = []
        for row, at in enumerate(arrival_ns):
            if at is None:
                self.left_out["without a time"] += 1
                continue
            low, high = self._limits or self._found(at)
            if at < self._latest:
                self._in_order = False
                self._earliest = min(self._earliest, at)
            else:
                self._latest = at
            if at >= high:
                if self._in_order:
                    self.stopped_at = row
                    break
                self.left_out[f"from {self._window.until} on"] += 1
            elif at < low:
                self.left_out[f"before {self._window.since}"] += 1
            else:
                kept.append(row)
        return kept

    def _found(self, first_ns: int) -> tuple[int, int]:
        self._earliest = self._latest = first_ns
        if self.origin_ns is None:
            self.origin_ns = first_ns
        limits = []
        for name, none in (("since", -INT64_MAX), ("until", INT64_MAX)):
            bound = _bound(name, getattr(self._window, name))
            if bound is not None and bound.is_date and first_ns < _DATES_FROM_NS:
                raise ValueError(
                    f"{name} is a date, {getattr(self._window, name)}, and the times of the trace are none: they count from a zero "
                    f"of their own; give {name} in seconds from the first row"
                )
            limits.append(none if bound is None else bound.ns if bound.is_date else self.origin_ns + bound.ns)
        self._limits = (limits[0], limits[1])
        return self._limits

    def span(self) -> str:
        """The arrivals that were read, in words."""
        if self._limits is None:
            return "no row has a time"
        first, last = (_text(at, self.origin_ns or 0) for at in (self._earliest, self._latest))
        return f"arrivals run from {first} to {last}" + ("" if self.stopped_at is None else " and on")

    def stop(self, where: str, number: int) -> str:
        """The note on a reading that stopped at the row *number*."""
        return (
            f"{where.capitalize()} {number:,} is the first from {self._window.until} on; as times are in order up to it, nothing "
            "behind it is read."
        )


def _text(at_ns: int, origin_ns: int) -> str:
    if at_ns < _DATES_FROM_NS:
        return f"{(at_ns - origin_ns) / NS_PER_S:g} s"
    return datetime.fromtimestamp(at_ns / NS_PER_S, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def rows_within(
    path: Path, n_rows: int | None, cut: Cut, arrivals: Callable[[Rows], Sequence[int | None]], wanted: Wanted
) -> tuple[Rows, tuple[str, ...]]:
    """The rows of a file that *cut* keeps, of these the first *n_rows*, in the columns that *wanted* names when it is shown the
    first of their pieces; and notes. *arrivals* reads the times of a piece. Nothing that is outside is held."""
    kept: dict[str, list[Any]] = {}
    numbers: list[int] = []
    notes: list[str] = []
    names: Collection[str] = ()
    where, is_all = "line", True
    for piece in pieces_of(path):
        where = piece.where
        rows = cut.rows(arrivals(piece))
        if rows and not numbers:
            names = piece.names
            kept = {name: [] for name in wanted(piece)}
        for name, values in kept.items() if rows else ():
            column = piece.column(name)
            values.extend(column[row] for row in rows)
        numbers.extend(piece.numbers[row] for row in rows)
        if cut.stopped_at is not None:
            notes.append(cut.stop(where, piece.numbers[cut.stopped_at]))
            break
        if n_rows is not None and len(numbers) >= n_rows:
            is_all = False
            break
    return Rows(path=path, names=tuple(names), numbers=numbers, is_all=is_all, source=kept, where=where), tuple(notes)
