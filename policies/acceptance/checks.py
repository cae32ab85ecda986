"""Arguments of acceptance processes, checked where they enter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def drafted(k: int) -> int:
    """*k* drafted tokens, 0 or more; ValueError below."""
    if k < 0:
        raise ValueError(f"k is the number of drafted tokens, 0 or more; got {k!r}")
    return k


def probability(name: str, value: float) -> float:
    """*value* in [0, 1]; ValueError outside, TypeError for what is no number."""
    if not _is_number(value):
        raise TypeError(f"{name} is a probability; got {value!r}")
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} is a probability in [0, 1]; got {value!r}")
    return float(value)


def probabilities(name: str, values: Sequence[float]) -> tuple[float, ...]:
    """One or more of them; ValueError for none."""
    rates = tuple(probability(name, v) for v in values)
    if not rates:
        raise ValueError(f"{name}: give at least one probability")
    return rates


def is_whole(value: object) -> bool:
    """Whether *value* is a whole number, 1 or more; files and callers without types give others."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.floating) and not isinstance(value, bool)
