"""Where the warm-up of a run ends."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]

MSER_BATCH = 5  # White and Robinson, "The problem of the initial transient (again), or why MSER works" (2010)


def mser5(values: ArrayLike, *, batch: int = MSER_BATCH) -> int:
    """How many of the first *values* to leave out as warm-up, by the rule MSER-5.

    Over means of *batch* values, the cut d minimises the squared standard error of what is left,
    sum((z - mean)^2) / (n - d)^2, among the first half. A minimum at the very end of that half says that the series is
    too short to be past its warm-up: ValueError. White, Cobb and Spratt, Proc. Winter Simulation Conf. (2000).
    """
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 1 or not np.isfinite(values).all():
        raise ValueError("values are a vector of finite numbers; leave out NaN and infinity beforehand")
    if values.size < 4 * batch:
        raise ValueError(f"at least {4 * batch} values are needed; got {values.size}")
    means = values[: values.size // batch * batch].reshape(-1, batch).mean(axis=1)
    n = means.size
    # Sums over the tail that starts at each d, from the back; centred first, so that squares do not cancel.
    means = means - means.mean()
    left = np.arange(n, 0, -1)
    sums = np.cumsum(means[::-1])[::-1]
    squares = np.cumsum((means**2)[::-1])[::-1]
    error = np.maximum(squares - sums**2 / left, 0.0) / left.astype(np.float64) ** 2
    half = n // 2
    cut = int(np.argmin(error[: half + 1]))
    if cut == half:
        raise ValueError(
            f"the series of {values.size} values has no end of its warm-up in its first half; run longer, "
            "or it has no steady state"
        )
    return cut * batch


def steady(values: ArrayLike) -> FloatArray:
    """*values* without their warm-up by `mser5`; ValueError where it does not end in the first half."""
    values = np.asarray(values, dtype=np.float64)
    return values[mser5(values) :]
