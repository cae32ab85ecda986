"""Means and quantiles: of values, and of weighted values in pieces that are never held all at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.metrics.columns import FloatArray, IntArray

STATISTICS = ("mean", "median", "std", "p50", "p90", "p95", "p99", "max")
_QUANTILES = (0.5, 0.9, 0.95, 0.99)
_BYTES_TO_KEEP = 64_000_000
Blocks = Callable[[], Iterable[tuple[IntArray, IntArray]]]
"""Values and their weights in pieces, as often as one asks: a long run's gaps are never held all at once."""


def statistics(values: FloatArray) -> dict[str, float | None]:
    """Mean, median, population std, p50, p90, p95, p99 and max of what is not NaN; all None without any."""
    values = values[~np.isnan(values)]
    if not values.size:
        return dict.fromkeys(STATISTICS)
    p50, p90, p95, p99 = (float(q) for q in np.quantile(values, _QUANTILES))
    return _as_named(float(values.mean()), float(values.std()), p50, p90, p95, p99, float(values.max()))


def weighted_statistics(blocks: Blocks) -> dict[str, float | None]:
    """`statistics` in seconds of gaps in nanoseconds of which each counts weight times; all None without any."""
    size, count, total_ns, largest_ns = 0, 0, 0, 0
    for gaps_ns, weights in blocks():
        size += gaps_ns.size
        count += int(weights.sum())
        total_ns += int(np.dot(gaps_ns, weights))
        largest_ns = max(largest_ns, int(gaps_ns.max(initial=0)))
    if not count:
        return dict.fromkeys(STATISTICS)
    mean_ns = total_ns / count
    squares = 0.0

    def summed() -> Iterator[tuple[IntArray, IntArray]]:
        nonlocal squares
        for gaps_ns, weights in blocks():
            squared = gaps_ns - mean_ns
            np.square(squared, out=squared)
            squared *= weights
            squares += float(squared.sum())
            yield gaps_ns, weights

    p50, p90, p95, p99 = (float(q) * 1e-9 for q in _quantiles(summed(), blocks, size, largest_ns, _QUANTILES))
    return _as_named(mean_ns * 1e-9, math.sqrt(squares / count) * 1e-9, p50, p90, p95, p99, largest_ns * 1e-9)


def weighted_quantile(values: IntArray, weights: IntArray, probabilities: Sequence[float]) -> FloatArray:
    """Quantiles of *values* each repeated *weights* times, equal to `np.quantile(np.repeat(values, weights), ...)`."""
    return block_quantile(lambda: ((values, weights),), probabilities)


def block_quantile(blocks: Blocks, probabilities: Sequence[float]) -> FloatArray:
    """`weighted_quantile` of values and weights in pieces.

    Values are non-negative integers, weights at least 1.
    """
    size, largest = 0, 0
    for values, _ in _in_bulk(blocks()):
        size += values.size
        largest = max(largest, int(values.max(initial=0)))
    return _quantiles(blocks(), blocks, size, largest, probabilities)


def _quantiles(
    once: Iterable[tuple[IntArray, IntArray]], again: Blocks, size: int, largest: int, probabilities: Sequence[float]
) -> FloatArray:
    """`block_quantile` of pieces, *size* values in all, that are read *once* and *again*. Nothing is expanded and nothing sorted as
    a whole: a histogram finds the few narrow ranges that hold the ranks asked for, and only those are sorted."""
    # About a bin a value, so that one holds few distinct ones, and at most 2^16, so that the histogram stays in cache.
    shift = max(0, largest.bit_length() - min(size.bit_length(), 16))
    n_bins = (largest >> shift) + 1
    in_floats = np.zeros(n_bins)
    for values, weights in _in_bulk(once):
        # Sums of integers below 2^53 in floats: exact.
        in_floats += np.bincount(values >> shift, weights=weights, minlength=n_bins)
    counts = in_floats.astype(np.int64)
    reached = np.cumsum(counts)
    last = int(reached[-1]) - 1
    if last < 0:
        raise ValueError("weighted_quantile needs at least one value; got none")
    positions = [last * probability for probability in probabilities]
    ranks = sorted({min(math.floor(position) + more, last) for position in positions for more in (0, 1)})
    wanted = np.zeros(n_bins, bool)
    wanted[np.searchsorted(reached, ranks, side="right")] = True
    found: list[IntArray] = []
    found_weights: list[IntArray] = []
    for values, weights in _in_bulk(again()):
        inside = wanted[values >> shift]
        found.append(values[inside])
        found_weights.append(weights[inside])
    members, member_weights = np.concatenate(found), np.concatenate(found_weights)
    order = np.argsort(members, kind="stable")
    members, cumulative = members[order], np.cumsum(member_weights[order])
    # Ranks among the members: those of bins that are not asked for lie in between.
    skipped = np.cumsum(np.where(wanted, 0, counts))

    def at_rank(rank: int) -> float:
        index = int(np.searchsorted(reached, rank, side="right"))
        return float(members[np.searchsorted(cumulative, rank - int(skipped[index]), side="right")])

    quantiles = []
    for position in positions:
        rank = math.floor(position)
        t = position - rank
        low, high = at_rank(rank), at_rank(min(rank + 1, last))
        # numpy's own two-sided interpolation, so that the bits agree.
        quantiles.append(low + (high - low) * t if t < 0.5 else high - (high - low) * (1 - t))
    return np.array(quantiles)


class KeptBlocks:
    """Values and weights in pieces as often as one asks: kept from the first whole pass on where they are few, and made again on
    each where they are many."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._kept: list[tuple[NDArray[Any], NDArray[Any]]] | None = None
        self._many = False

    def __call__(self) -> Iterable[tuple[IntArray, IntArray]]:
        if self._kept is not None:
            return ((values.astype(np.int64), weights.astype(np.int64)) for values, weights in self._kept)
        return self._blocks() if self._many else self._keeping()

    def _keeping(self) -> Iterator[tuple[IntArray, IntArray]]:
        kept: list[tuple[NDArray[Any], NDArray[Any]]] = []
        n_bytes = 0
        for values, weights in self._blocks():
            if not self._many:
                kept.append((narrow(values), narrow(weights)))
                n_bytes += sum(column.nbytes for column in kept[-1])
                if n_bytes > _BYTES_TO_KEEP:
                    self._many, kept = True, []
            yield values, weights
        if not self._many:
            self._kept = kept


def narrow(values: IntArray) -> NDArray[Any]:
    """The same numbers, none of which is negative, in as few bytes as the largest needs."""
    narrowest = np.min_scalar_type(int(values.max(initial=0)))
    return values if narrowest.itemsize == values.itemsize else values.astype(narrowest)


def kept_blocks(blocks: Blocks) -> Blocks:
    """*blocks* as `KeptBlocks`."""
    return blocks if isinstance(blocks, KeptBlocks) else KeptBlocks(blocks)


def _in_bulk(blocks: Iterable[tuple[IntArray, IntArray]], least: int = 1 << 18) -> Iterator[tuple[IntArray, IntArray]]:
    """The same values and weights in pieces of at least *least*, but for the last: many machines give many small ones."""
    kept: list[tuple[IntArray, IntArray]] = []
    n = 0
    for block in blocks:
        kept.append(block)
        n += len(block[0])
        if n >= least:
            yield _joined(kept)
            kept, n = [], 0
    if kept:
        yield _joined(kept)


def _joined(blocks: list[tuple[IntArray, IntArray]]) -> tuple[IntArray, IntArray]:
    if len(blocks) == 1:
        return blocks[0]
    return np.concatenate([values for values, _ in blocks]), np.concatenate([weights for _, weights in blocks])


def _as_named(
    mean: float, std: float, p50: float, p90: float, p95: float, p99: float, largest: float
) -> dict[str, float | None]:
    return {"mean": mean, "median": p50, "std": std, "p50": p50, "p90": p90, "p95": p95, "p99": p99, "max": largest}
