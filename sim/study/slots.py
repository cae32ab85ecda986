"""The number of adapter slots for a server: the numbers to try, and the fewest that are not surely slower than any other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sim.scenario.adapters import AdapterSettings
from sim.study.statistics import Change, ratio_interval

MOST_AT_FIRST = 5
"""Numbers of slots that are tried beside the scenario's own before any has run."""
NEAR = 4
"""The search ends within this part of the best number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """A number of slots that ran, under several seeds that all numbers share."""

    n: int
    keeps: bool
    """Whether it keeps the SLO."""
    e2el_s: tuple[float, ...]
    """The mean end-to-end latency under each seed; infinite where no request finished."""
    kv_tokens: float | None
    """Tokens that the KV cache of each machine has room for beside the slots; None where that is not worked out."""
    kv_tokens_a_slot: float | None
    """Tokens that each slot takes from it."""
    figures: Mapping[str, Any]
    half_widths: Mapping[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotAdvice:
    """How many slots to set, of those that were tried."""

    tried: tuple[Slots, ...]
    """By number."""
    now: Slots
    best: Slots
    change: Change | None
    """The mean end-to-end latency of the best over that of the number now, less 1, without an interval of a single seed; None where
    it is the number now, or where nothing finished with one of the two."""


def settings_of(adapters: AdapterSettings, n: int) -> dict[str, int]:
    """*n* slots by dotted settings, with room in host memory for as many where *adapters* says how much there is."""
    host = adapters.max_cpu_loras
    more = {"adapters.max_cpu_loras": n} if host is not None and host < n else {}
    return {"adapters.max_loras": n, **more}


def numbers_to_try(now: int, most: int) -> list[int]:
    """Half of the slots that there are *now*, and twice as many again and again, up to *most*, the number of adapters."""
    found, n = ([now // 2] if now > 1 else []), now
    while n < most and len(found) < MOST_AT_FIRST:
        n = min(2 * n, most)
        found.append(n)
    return found


def next_number(tried: Sequence[Slots], refused: Sequence[int], most: int) -> int | None:
    """The number to try next on the way to the best up to *most*; None where it is near enough. None of *refused* can run."""
    best = best_of(tried)
    known = [each.n for each in tried]
    above = min((n for n in (*known, *refused) if n > best.n), default=None)
    below = max((n for n in known if n < best.n), default=0)
    if above is None and best.n < most:
        return min(2 * best.n, most)
    wide = max(1, best.n // NEAR)
    for low, high in ((below, best.n), (best.n, best.n if above is None else above)):
        if high - low > wide:
            return (low + high) // 2
    return None


def best_of(tried: Sequence[Slots]) -> Slots:
    """The fewest slots whose mean end-to-end latency is not surely above the least one, of those that keep the SLO, or of all where
    none does."""
    among = [each for each in tried if each.keeps] or list(tried)
    least = min(among, key=lambda each: (_mean(each.e2el_s), each.n))
    return min((each for each in among if not _surely_above(each, least)), key=lambda each: each.n)


def advice(tried: Sequence[Slots], now: int) -> SlotAdvice:
    """How many slots to set in place of *now*, which is among those *tried*."""
    best, own = best_of(tried), next(each for each in tried if each.n == now)
    change = None if best.n == now else _change(own, best)
    if best.n != now and len(own.e2el_s) == 1 and math.isfinite(own.e2el_s[0]) and math.isfinite(best.e2el_s[0]):
        change = Change(mean=best.e2el_s[0] / own.e2el_s[0] - 1.0, low=math.nan, high=math.nan, n=1)
    return SlotAdvice(tried=tuple(sorted(tried, key=lambda each: each.n)), now=own, best=best, change=change)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _surely_above(slots: Slots, least: Slots) -> bool:
    if slots.n == least.n:
        return False
    change = _change(least, slots)
    return _mean(slots.e2el_s) > _mean(least.e2el_s) if change is None else change.low > 0


def _change(before: Slots, after: Slots) -> Change | None:
    """None where there is one seed alone, or a number with which nothing finished."""
    if len(before.e2el_s) < 2 or not all(map(math.isfinite, (*before.e2el_s, *after.e2el_s))):
        return None
    return ratio_interval(before.e2el_s, after.e2el_s)
