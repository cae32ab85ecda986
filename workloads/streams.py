"""Named streams of random numbers, and checks of what a generator is asked for.

Each kind of draw has its own stream, so that changing one leaves the others as they were and two scenarios with one seed meet
the same draws.
"""

from __future__ import annotations

import functools
import math
from enum import IntEnum
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import numpy as np
from annotated_types import Ge, Gt

Positive = Annotated[float, Gt(0)]
FromZero = Annotated[float, Ge(0)]
Count = Annotated[int, Ge(1)]
CountFromZero = Annotated[int, Ge(0)]


class Stream(IntEnum):
    """Names of the random streams; the numbers are part of what a seed means and never change."""

    ARRIVALS = 101
    PROMPT_LENGTHS = 102
    OUTPUT_LENGTHS = 103
    MODELS = 104
    THINK_TIMES = 105
    ARRIVAL_STATES = 106
    PROMPTS = 107
    TURNS = 108
    ADAPTERS = 119
    CLASSES = 120
    PREDICTIONS = 121
    MISSING_OUTPUTS = 122
    INFORMATIVE = 123
    IMAGES = 130
    AUDIO = 131
    GRAMMARS = 125
    SPREAD = 132


def stream(seed: int, name: Stream, *key: int) -> np.random.Generator:
    """The random numbers of one named stream; *key* separates models, windows and the like within it."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise ValueError(f"seed is an integer from 0; got {seed!r}")
    return np.random.default_rng([int(seed), int(name), *key])


def check_positive(value: Any, name: str) -> None:
    """ValueError but for a finite number above 0."""
    if isinstance(value, bool) or not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} is a finite number above 0; got {value!r}")


def check_from_zero(value: Any, name: str) -> None:
    """ValueError but for a finite number from 0."""
    if isinstance(value, bool) or not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} is a finite number from 0; got {value!r}")


def check_count(value: Any, name: str, *, minimum: int = 1) -> None:
    """ValueError but for a whole number from *minimum* that fits in 64 bits."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not minimum <= value < 2**63:
        raise ValueError(f"{name} is a whole number from {minimum}; got {value!r}")


def check_bounds(settings: Any) -> None:
    """ValueError but for numbers within the bounds that the types of the dataclass *settings* state."""
    for name, kind, bound in _bounds(type(settings)):
        value = getattr(settings, name)
        if kind is int:
            check_count(value, name, minimum=bound.ge)
        elif isinstance(bound, Gt):
            check_positive(value, name)
        else:
            check_from_zero(value, name)


@functools.cache
def _bounds(kind: type) -> list[tuple[str, type, Any]]:
    hints = get_type_hints(kind, include_extras=True).items()
    return [
        (name, *get_args(hint))
        for name, hint in hints
        if get_origin(hint) is Annotated and get_args(hint)[0] in (int, float)
    ]


def check_range(min_tokens: int, max_tokens: int | None) -> None:
    """ValueError but for two counts of tokens of which the second is not below the first."""
    check_count(min_tokens, "min_tokens", minimum=0)
    if max_tokens is not None:
        check_count(max_tokens, "max_tokens", minimum=0)
        if max_tokens < min_tokens:
            raise ValueError(f"max_tokens is at least min_tokens; got {max_tokens} below {min_tokens}")
