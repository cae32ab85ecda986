"""Time inside the engine.

SimPy's clock counts integer nanoseconds. A machine adds its iterations up in integer ticks of 2**-20 ns, so that n decode
iterations, whose cost is linear in the growing KV cache, are summed exactly without visiting each: the n-th iteration of a
span ends at the same tick whether the span was one event or n.
"""

from __future__ import annotations

from math import sqrt
from typing import Final

TICK_BITS: Final = 20
TICKS_PER_NS: Final = 1 << TICK_BITS
TICKS_PER_S: Final = 1e9 * TICKS_PER_NS
FRACTION: Final = TICKS_PER_NS - 1
"""Mask of the ticks past a whole nanosecond."""

LONGEST_TICKS: Final = 1 << 62
"""Spans are kept shorter than this (4,398 s), so that int64 arithmetic on their records cannot overflow."""
LONGEST_ITERATION_S: Final = LONGEST_TICKS / TICKS_PER_S


def to_ticks(seconds: float) -> int:
    """Seconds as ticks, rounded to the nearest; ValueError for a cost that is negative, NaN or beyond an hour and more."""
    if not 0.0 <= seconds < LONGEST_ITERATION_S:
        raise ValueError(
            f"a cost model returned {seconds!r} seconds for one iteration; expected 0 to {LONGEST_ITERATION_S:,.0f}"
        )
    return int(seconds * TICKS_PER_S + 0.5)


def elapsed(n: int, first: int, growth: int) -> int:
    """Ticks of n iterations that last first, first + growth, first + 2 * growth, ..."""
    return n * first + growth * (n * (n - 1) // 2)


def iterations_to_reach(ticks: int, first: int, growth: int) -> int:
    """The smallest n >= 1 with elapsed(n) >= ticks."""
    if ticks <= first:
        return 1
    if growth == 0:
        return -(-ticks // first)
    # The root of growth/2 n^2 + b n = ticks in the form that does not cancel; integers then settle the last place.
    b = first - growth / 2
    n = max(int(2 * ticks / (b + sqrt(b * b + 2.0 * growth * ticks))), 1)
    while elapsed(n, first, growth) < ticks:
        n += 1
    while n > 1 and elapsed(n - 1, first, growth) >= ticks:
        n -= 1
    return n
