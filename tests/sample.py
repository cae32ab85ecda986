"""How much of the longest tests is run.

By default a tenth of the random runs that were drawn when a rule was written, and of a test of many cases those that say most:
enough to meet a slip, and short enough for every change. `ROOFTRACE_TESTS=all` runs all of it, as after a change to the engine.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest

ALL = os.environ.get("ROOFTRACE_TESTS") == "all"
SHARE = 0.1

with_all = pytest.mark.skipif(not ALL, reason="minutes long, and much like its neighbour: ROOFTRACE_TESTS=all runs it")
"""Marks what is run with everything only."""


def some(seeds: range) -> range:
    """The first tenth of `seeds`, at least one; or all of them."""
    return seeds if ALL else seeds[: max(1, round(len(seeds) * SHARE))]


def few(values: Sequence[Any], n: int = 1, *, reason: str = "many random runs") -> list[Any]:
    """*values* of a parameter, of which the fast tests take the first *n* and the slow ones, for *reason*, the others."""
    slow = pytest.mark.slow(reason=reason)
    return [*values[:n], *(pytest.param(value, marks=slow) for value in values[n:])]
