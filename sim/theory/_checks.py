"""Argument checks shared by the closed forms: arrays in, arrays out, one sentence on refusal."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Values: TypeAlias = npt.ArrayLike
"""A number or an array of numbers; the closed forms broadcast over it."""

FloatArray: TypeAlias = npt.NDArray[np.floating[Any]]


def finite(name: str, value: Values) -> FloatArray:
    """*value* as a float64 array without NaN or infinity, else ValueError."""
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is a number or an array of numbers; got {value!r}") from None
    if not np.isfinite(array).all():
        raise ValueError(f"{name} must be finite; got {_worst(array, ~np.isfinite(array))}")
    return array


def probability(name: str, value: Values) -> FloatArray:
    """*value* as a float64 array within [0, 1], else ValueError."""
    array = finite(name, value)
    wrong = (array < 0.0) | (array > 1.0)
    if wrong.any():
        raise ValueError(f"{name} is a probability in [0, 1]; got {_worst(array, wrong)}")
    return array


def non_negative(name: str, value: Values) -> FloatArray:
    """*value* as a float64 array of numbers >= 0, else ValueError."""
    array = finite(name, value)
    if (array < 0.0).any():
        raise ValueError(f"{name} must be 0 or more; got {_worst(array, array < 0.0)}")
    return array


def positive(name: str, value: Values) -> FloatArray:
    """*value* as a float64 array of numbers > 0, else ValueError."""
    array = finite(name, value)
    if (array <= 0.0).any():
        raise ValueError(f"{name} must be greater than 0; got {_worst(array, array <= 0.0)}")
    return array


def count(name: str, value: Values, *, at_least: int = 0) -> FloatArray:
    """*value* as a float64 array of whole numbers >= *at_least*, else ValueError."""
    array = finite(name, value)
    wrong = (array < at_least) | (array != np.floor(array))
    if wrong.any():
        raise ValueError(f"{name} is a whole number, {at_least} or more; got {_worst(array, wrong)}")
    return array


def distribution(name: str, value: Values) -> FloatArray:
    """*value* as float64 with the vocabulary on the last axis, each row summing to 1 within 1e-9, else ValueError."""
    array = probability(name, value)
    if array.ndim == 0 or array.shape[-1] == 0:
        raise ValueError(f"{name} is a distribution over a vocabulary: give an array with at least one entry")
    sums = array.sum(axis=-1)
    wrong = np.abs(sums - 1.0) > 1e-9
    if wrong.any():
        raise ValueError(f"{name} must sum to 1 over its last axis; got a sum of {_worst(sums, wrong)}")
    return array


def plain(array: Any) -> Any:
    """A zero-dimensional array as a scalar; any other array as it is."""
    return array[()] if isinstance(array, np.ndarray) else array


def _worst(array: FloatArray, wrong: npt.NDArray[np.bool_]) -> str:
    return f"{float(array[wrong].flat[0]):g}"
