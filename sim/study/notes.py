"""The notes of many runs, each sentence once, with the runs that it holds for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """A sentence that some runs note."""

    note: str
    where: tuple[str, ...]
    """The first of the places that it holds for, `replicas=2` of a sweep."""
    n: int
    """The number of places that it holds for."""
    of: int
    """The number of places that there are."""

    def __str__(self) -> str:
        if self.n == self.of or not all(self.where):
            return self.note
        more = f" and {self.n - len(self.where):,} more" if self.n > len(self.where) else ""
        return f"{'; '.join(self.where)}{more}: {self.note}"


class Notes:
    """Collects the notes of runs, place by place."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[list[str], int]] = {}
        self._of = 0

    def add(self, where: str, notes: Iterable[str]) -> None:
        """The notes of all runs at one place."""
        self._of += 1
        for note in dict.fromkeys(notes):
            places, n = self._found.get(note, ([], 0))
            self._found[note] = ([*places, where][:_NAMED], n + 1)

    @property
    def found(self) -> tuple[Noted, ...]:
        """Each sentence once, in order of appearance."""
        return tuple(
            Noted(note=note, where=tuple(places), n=n, of=self._of) for note, (places, n) in self._found.items()
        )


def read_notes(rows: Iterable[dict[str, Any]]) -> tuple[Noted, ...]:
    """The notes that were kept as plain values."""
    return tuple(Noted(**{**row, "where": tuple(row["where"])}) for row in rows)
