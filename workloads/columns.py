"""Columns of whole numbers: what is given, checked row by row and made read-only."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

IntArray = NDArray[np.int64]

NS_PER_S = 1_000_000_000
INT64_MAX = 2**63 - 1


def seconds_to_ns(seconds: ArrayLike, name: str) -> IntArray:
    """Nanoseconds, rounded to the nearest, from finite non-negative seconds; *name* is for the error."""
    values = np.asarray(seconds, dtype=float)
    if values.ndim != 1:
        raise ValueError(f"{name} is a one-dimensional column; got {values.ndim} dimensions")
    bad = ~np.isfinite(values) | (values < 0) | (values * NS_PER_S >= INT64_MAX)
    if (row := first_row(bad)) is not None:
        raise ValueError(f"row {row}: {name} is a finite number of seconds from 0; got {values[row]}")
    return np.rint(values * NS_PER_S).astype(np.int64)


def int_column(
    values: ArrayLike, name: str, *, minimum: int = 0, rows_from: int = 0, may_be_short: bool = False
) -> IntArray:
    """A read-only int64 copy of whole numbers from *minimum*; floats must be whole. ValueError, with the row, which is counted
    from *rows_from* on: 0 for arrays, 1 for files. *may_be_short*: an int32 column stays one."""
    column = np.asarray(values)
    kind: Any = np.int32 if may_be_short and column.dtype == np.int32 else np.int64
    if column.ndim != 1:
        raise ValueError(f"{name} is a one-dimensional column; got {column.ndim} dimensions")
    if column.dtype == kind and not column.flags.writeable and column.base is None:
        whole = column
    elif column.dtype.kind in "iu":
        if column.dtype.kind == "u" and (row := first_row(column > INT64_MAX)) is not None:
            raise ValueError(f"row {row + rows_from}: {name} must fit in 64 bits; got {column[row]}")
        whole = column.astype(kind)
    elif len(column) == 0:
        whole = np.empty(0, dtype=np.int64)
    elif column.dtype.kind == "f":
        bad = ~np.isfinite(column) | (column != np.trunc(column)) | (np.abs(column) >= np.float64(INT64_MAX))
        if (row := first_row(bad)) is not None:
            raise ValueError(f"row {row + rows_from}: {name} is a whole number; got {column[row]}")
        whole = column.astype(np.int64)
    else:
        whole = np.empty(len(column), dtype=np.int64)
        for row, value in enumerate(column.tolist()):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or value != int(value) or abs(value) > INT64_MAX:
                raise ValueError(f"row {row + rows_from}: {name} is a whole number that fits in 64 bits; got {value!r}")
            whole[row] = int(value)
    if (row := first_row(whole < minimum)) is not None:
        raise ValueError(f"row {row + rows_from}: {name} must be at least {minimum}; got {whole[row]}")
    whole.flags.writeable = False
    return whole


def first_row(mask: NDArray[np.bool_]) -> int | None:
    """The first row of which *mask* is true; None where there is none."""
    return int(np.argmax(mask)) if mask.any() else None
