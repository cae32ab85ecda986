"""Functions of rows, tabulated where they are asked for: a look instead of a kernel's price."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
EXACT_ROWS = 8192
COARSE_ROWS = 256


class RowTable:
    """A non-decreasing function of rows, tabulated where it is asked for.

    Exact for each row up to `EXACT_ROWS`, linear between multiples of `COARSE_ROWS` above. Zero rows cost nothing.
    """

    def __init__(self, of_rows: Callable[[FloatArray], FloatArray]) -> None:
        self._of_rows = of_rows
        self.exact: list[float] = [0.0]
        """By rows, as far as has been asked for."""
        self._exact_array: FloatArray = np.asarray(self.exact)
        self._nodes: list[float] = []

    def _evaluate(self, rows: FloatArray, at_least: float) -> list[float]:
        values = np.asarray(self._of_rows(rows), dtype=np.float64)
        if not np.isfinite(values).all() or (values < 0).any():
            raise ValueError("a kernel returned a time that is negative or not finite; check the hardware profile")
        return np.maximum(np.maximum.accumulate(values), at_least).tolist()

    def _grow(self, rows: int) -> None:
        have = len(self.exact)
        stop = min(EXACT_ROWS, max(512, -(-rows // 512) * 512)) + 1
        if have < stop:
            self.exact += self._evaluate(np.arange(have, stop, dtype=np.float64), self.exact[-1])
            self._exact_array = np.asarray(self.exact)
        if rows > EXACT_ROWS:
            if not self._nodes:
                self._nodes.append(self.exact[EXACT_ROWS])
            have, need = len(self._nodes), (rows - EXACT_ROWS) // COARSE_ROWS + 2
            if have < need:
                nodes = EXACT_ROWS + COARSE_ROWS * np.arange(have, max(2 * have, need), dtype=np.float64)
                self._nodes += self._evaluate(nodes, self._nodes[-1])

    def scalar(self, rows: int) -> float:
        if rows <= EXACT_ROWS:
            if rows < 0:
                raise ValueError(f"totals must not be negative, got {rows} rows")
            try:
                return self.exact[rows]
            except IndexError:
                self._grow(rows)
                return self.exact[rows]
        i = (rows - EXACT_ROWS) // COARSE_ROWS
        if i + 1 >= len(self._nodes):
            self._grow(rows)
        low = self._nodes[i]
        return low + (self._nodes[i + 1] - low) * ((rows - EXACT_ROWS - i * COARSE_ROWS) * (1.0 / COARSE_ROWS))

    def array(self, rows: NDArray[np.int64]) -> FloatArray:
        if not rows.size:
            return np.zeros(rows.shape)
        if rows.min() < 0:
            raise ValueError(f"totals must not be negative, got {rows.min()} rows")
        most = int(rows.max())
        if most >= len(self.exact):
            self._grow(most)
        found = self._exact_array[np.minimum(rows, EXACT_ROWS)]
        if most > EXACT_ROWS:
            nodes = np.asarray(self._nodes)
            i = np.maximum(rows - EXACT_ROWS, 0) // COARSE_ROWS
            i = np.minimum(i, len(nodes) - 2)
            low = nodes[i]
            above = low + (nodes[i + 1] - low) * ((rows - EXACT_ROWS - i * COARSE_ROWS) * (1.0 / COARSE_ROWS))
            found = np.where(rows > EXACT_ROWS, above, found)
        return found
