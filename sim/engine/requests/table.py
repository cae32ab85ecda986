"""Columns with one entry for each request."""

from __future__ import annotations

from array import array


class RequestTable:
    """Columns of requests that grow together, each with its value for a request of which nothing is known yet."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._columns: list[tuple[array[int], int]] = []

    def column(self, code: str, blank: int = 0) -> array[int]:
        """A new column of integers of the type *code* of `array`."""
        values: array[int] = array(code, [blank]) * self._n
        self._columns.append((values, blank))
        return values

    def clear(self) -> None:
        """Remove all requests."""
        for values, _ in self._columns:
            del values[:]

    def add(self) -> None:
        """Add a request after all others."""
        for values, blank in self._columns:
            values.append(blank)
