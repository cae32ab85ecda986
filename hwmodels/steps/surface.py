"""Seconds over tokens of a step and keys that each of them attends to, between measured points."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Points(NamedTuple):
    """Measured steps of one kind, all float64[n].

    `rows` are tokens that a step computes, `keys` the keys that each of them attends to on average, itself included.
    """

    rows: Floats
    keys: Floats
    seconds: Floats

    def at(self, chosen: Any) -> Points:
        return Points(self.rows[chosen], self.keys[chosen], self.seconds[chosen])


class Line(NamedTuple):
    """Seconds as fixed_s + row_s * rows + pair_s * rows * keys, none of which is negative."""

    fixed_s: float
    row_s: float
    pair_s: float

    def at(self, rows: Any, keys: Any) -> Any:
        return self.fixed_s + self.row_s * rows + self.pair_s * rows * keys


_RIDGE = 0.02
"""The relative error at which one point would have to be off for the line to put all of the longest step on its pairs."""


def fitted_line(points: Points) -> Line:
    """The line of least squared relative error through *points*; where they do not tell rows from pairs, it is of rows."""
    from scipy.optimize import nnls

    terms = np.column_stack((np.ones_like(points.rows), points.rows, points.rows * points.keys))
    scale = terms.max(axis=0)
    weighed = np.vstack((terms / scale / points.seconds[:, None], [0.0, 0.0, _RIDGE / points.seconds.max()]))
    found, _ = nnls(weighed, np.append(np.ones_like(points.seconds), 0.0))
    return Line(*(found / scale).tolist())


class Surface:
    """Bilinear between measured points, which it passes through where they do not fall as rows or keys grow.

    Where the grid of the points has no measurement, the line through all of them stands, times what the nearest measurements with
    as many rows are off it. Values that fall along rows, or along keys, are levelled by isotonic regression. Beyond the largest
    rows or keys the line's slopes are added to the edge; below the smallest the time is that of the edge. So seconds do not fall as
    rows grow at equal keys, or keys at equal rows.
    """

    def __init__(self, points: Points, *, anchor: Surface | None = None) -> None:
        """*anchor*: the surface that one row is taken from, where *points* begin above one row."""
        self.line = fitted_line(points)
        rows, keys = np.unique(points.rows), np.unique(points.keys)
        self.rows_range = float(rows[0]), float(rows[-1])
        self.keys_range = float(keys[0]), float(keys[-1])
        values = np.array([self._curve(points.at(points.rows == each), keys) for each in rows.tolist()])
        if anchor is not None and rows[0] > 1:
            rows = np.concatenate(([1.0], rows))
            values = np.vstack((anchor.seconds(np.ones_like(keys), keys), values))
        rows, values = _with_two(rows, values)
        keys, columns = _with_two(keys, values.T)
        self._grid: Floats = _levelled(_levelled(columns.T).T).T
        self._rows: list[float] = rows.tolist()
        self._keys: list[float] = keys.tolist()
        self._values: list[list[float]] = self._grid.tolist()

    @property
    def least_s(self) -> float:
        """No step takes less."""
        return self._values[0][0]

    def _curve(self, points: Points, keys: Floats) -> Floats:
        """Seconds at all *keys* of *points* with equal rows: the median where one was measured, the line times its error else."""
        at, which = np.unique(points.keys, return_inverse=True)
        measured = np.array([np.median(points.seconds[which == i]) for i in range(len(at))])
        rows = points.rows[0]
        return self.line.at(rows, keys) * np.interp(np.log(keys), np.log(at), measured / self.line.at(rows, at))

    def second(self, rows: float, keys: float) -> float:
        """`seconds` of one step, bit for bit."""
        every, each = self._rows, self._keys
        low_rows, low_keys = (rows if rows > every[0] else every[0]), (keys if keys > each[0] else each[0])
        x, y = (low_rows if low_rows < every[-1] else every[-1]), (low_keys if low_keys < each[-1] else each[-1])
        i, j = min(bisect_right(every, x), len(every) - 1) - 1, min(bisect_right(each, y), len(each) - 1) - 1
        right = (x - every[i]) / (every[i + 1] - every[i])
        up = (y - each[j]) / (each[j + 1] - each[j])
        here, there = self._values[i], self._values[i + 1]
        low = here[j] + right * (there[j] - here[j])
        high = here[j + 1] + right * (there[j + 1] - here[j + 1])
        _, row_s, pair_s = self.line
        return low + up * (high - low) + (row_s * (low_rows - x) + pair_s * (low_rows * low_keys - x * y))

    def seconds(self, rows: Floats, keys: Floats) -> Floats:
        """Seconds of steps; shapes are equal."""
        every, each = np.array(self._rows), np.array(self._keys)
        low_rows, low_keys = np.maximum(rows, every[0]), np.maximum(keys, each[0])
        x, y = np.minimum(low_rows, every[-1]), np.minimum(low_keys, each[-1])
        i = np.minimum(np.searchsorted(every, x, side="right"), len(every) - 1) - 1
        j = np.minimum(np.searchsorted(each, y, side="right"), len(each) - 1) - 1
        right = (x - every[i]) / (every[i + 1] - every[i])
        up = (y - each[j]) / (each[j + 1] - each[j])
        low = self._grid[i, j] + right * (self._grid[i + 1, j] - self._grid[i, j])
        high = self._grid[i, j + 1] + right * (self._grid[i + 1, j + 1] - self._grid[i, j + 1])
        _, row_s, pair_s = self.line
        return low + up * (high - low) + (row_s * (low_rows - x) + pair_s * (low_rows * low_keys - x * y))


def _with_two(at: Floats, values: Floats) -> tuple[Floats, Floats]:
    """A second place beside a single one, with the same values, so that there is something to interpolate between."""
    if len(at) > 1:
        return at, values
    return np.concatenate((at, at + 1e-9 * at)), np.vstack((values, values))


def _levelled(values: Floats) -> Floats:
    """Each row of *values* as the nearest sequence that does not fall."""
    from scipy.optimize import isotonic_regression

    return np.array([isotonic_regression(row).x for row in values])
