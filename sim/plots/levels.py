"""Levels and rates over time: how many are inside, how much is done a second, and step lines of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sim.plots.style import OKABE_ITO, dress

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FloatArray = NDArray[np.float64]
Blocks = Callable[[], Iterable[Mapping[str, NDArray[Any]]]]
"""Iterations in pieces, in order of start within a replica, as often as one asks."""
_AT_ONCE = 1 << 18
_LEAST_IN_ORDER = 2000
"""Iterations of a run in order from which on it is cut where intervals begin."""


def mean_level(edges_ns: FloatArray, enter_ns: NDArray[Any], leave_ns: NDArray[Any]) -> FloatArray:
    """Mean number of things inside during each interval between *edges_ns*; entries and leaves need no pairing.

    Exact, from the integral of the counting process. Shape [len(edges_ns) - 1].
    """

    def integral(times_ns: NDArray[Any]) -> FloatArray:
        ordered = np.sort(times_ns).astype(np.float64) - edges_ns[0]
        before = np.concatenate([[0.0], np.cumsum(ordered)])
        count = np.searchsorted(ordered, edges_ns - edges_ns[0], side="right")
        return count * (edges_ns - edges_ns[0]) - before[count]

    # Rounding of the two integrals can leave a whisker below zero.
    return np.maximum(np.diff(integral(enter_ns) - integral(leave_ns)) / np.diff(edges_ns), 0.0)


def rate_per_s(
    edges_ns: FloatArray, start_ns: NDArray[Any], duration_ns: NDArray[Any], *amounts: NDArray[Any]
) -> list[FloatArray]:
    """The rate of each of *amounts* in each interval between *edges_ns*; an iteration's is spread evenly over its duration."""
    # Runs in order of start, such as those of a replica, are cut where intervals begin, without a look-up for each iteration.
    heads = np.flatnonzero(start_ns[1:] < start_ns[:-1]) + 1
    if len(start_ns) < _LEAST_IN_ORDER * (len(heads) + 1):
        return _rates_of_any(edges_ns, start_ns, duration_ns, *amounts)
    total = [np.zeros(edges_ns.size - 1) for _ in amounts]
    for at, to in itertools.pairwise((0, *heads.tolist(), len(start_ns))):
        rates = _rates_in_order(edges_ns, start_ns[at:to], duration_ns[at:to], *(each[at:to] for each in amounts))
        for sum_, rate in zip(total, rates, strict=True):
            sum_ += rate
    return total


def _rates_in_order(
    edges_ns: FloatArray, start_ns: NDArray[Any], duration_ns: NDArray[Any], *amounts: NDArray[Any]
) -> list[FloatArray]:
    """`rate_per_s` of iterations in order of start."""
    begin = np.searchsorted(start_ns, np.ceil(edges_ns).astype(np.int64))
    counts = np.diff(begin)
    first, last = int(begin[0]), int(begin[-1])
    limit_ns = np.repeat(np.floor(edges_ns[1:]).astype(np.int64), counts)
    cut = np.flatnonzero(start_ns[first:last] + np.maximum(duration_ns[first:last], 1) > limit_ns) + first
    others = np.concatenate((np.arange(first), cut))
    rates = _rates_of_any(edges_ns, start_ns[others], duration_ns[others], *(each[others] for each in amounts))
    some = np.flatnonzero(counts)
    if some.size:
        for rate, amount in zip(rates, amounts, strict=True):
            whole = amount[:last].copy()
            whole[cut] = 0
            rate[some] += np.add.reduceat(whole, begin[some]) / np.diff(edges_ns)[some] * 1e9
    return rates


def _rates_of_any(
    edges_ns: FloatArray, start_ns: NDArray[Any], duration_ns: NDArray[Any], *amounts: NDArray[Any]
) -> list[FloatArray]:
    """`rate_per_s` of iterations in any order."""
    n, widths_ns = edges_ns.size - 1, np.diff(edges_ns)
    lasting = np.maximum(duration_ns, 1)
    end_ns = start_ns + lasting
    interval = np.searchsorted(edges_ns, start_ns, side="right") - 1
    within = (interval >= 0) & (interval < n)
    interval = np.maximum(interval, 0)
    # Nearly all lie in one interval whole: what needs no arithmetic of its own.
    within &= end_ns <= edges_ns[np.minimum(interval, n - 1) + 1]
    others = np.flatnonzero(~within)
    row: NDArray[Any] | slice = slice(None)
    if others.size:
        pieces = np.ones(len(interval), np.int64)
        last = np.minimum(np.searchsorted(edges_ns, end_ns[others], side="left"), n)
        pieces[others] = np.maximum(last - interval[others], 0)
        row = np.repeat(np.arange(len(pieces)), pieces)
        interval = interval[row] + np.arange(len(row)) - (np.cumsum(pieces) - pieces)[row]
    share = (1.0 / widths_ns * 1e9)[interval]
    if others.size:
        cut = np.flatnonzero(~within[row])
        assert isinstance(row, np.ndarray)
        of, at = row[cut], interval[cut]
        inside_ns = np.minimum(edges_ns[at + 1], end_ns[of]) - np.maximum(edges_ns[at], start_ns[of])
        share[cut] = inside_ns / lasting[of] / widths_ns[at] * 1e9
    return [
        np.bincount(interval, amount[row] * share, minlength=n).astype(np.float64, copy=False) for amount in amounts
    ]


def token_rates(edges_ns: FloatArray, blocks: Blocks, columns: Sequence[str]) -> list[FloatArray]:
    """Tokens a second in each interval between *edges_ns*, of iterations in blocks, for each of *columns*."""
    total = [np.zeros(edges_ns.size - 1) for _ in columns]
    for block in blocks():
        add_rates(total, edges_ns, block, columns)
    return total


def add_rates(
    total: Sequence[FloatArray], edges_ns: FloatArray, block: Mapping[str, NDArray[Any]], columns: Sequence[str]
) -> None:
    """Add the tokens a second of a block of iterations to *total*, for each of *columns*."""
    rates = rate_per_s(edges_ns, block["start_ns"], block["duration_ns"], *(block[name] for name in columns))
    for sum_, rate in zip(total, rates, strict=True):
        sum_ += rate


def rate_of_parts(edges_ns: FloatArray, parts: Iterable[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]) -> FloatArray:
    """The rate of all *parts* together, each of which has starts, durations and amounts; short ones are taken together."""
    rate = np.zeros(edges_ns.size - 1)
    held: list[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]] = []
    n = 0
    for part in parts:
        held.append(part)
        n += len(part[0])
        if n > _AT_ONCE:
            rate += _of_all(edges_ns, held)
            held, n = [], 0
    return rate + _of_all(edges_ns, held) if held else rate


def _of_all(edges_ns: FloatArray, parts: Sequence[tuple[NDArray[Any], ...]]) -> FloatArray:
    starts, durations, amounts = map(np.concatenate, zip(*parts, strict=True))
    return rate_per_s(edges_ns, starts, durations, amounts)[0]


def plot_level(
    ax: Axes, edges_s: FloatArray, levels: Mapping[str, FloatArray], *, label: str, fill: bool = False
) -> None:
    """Draw step lines, one for each named level, over intervals between *edges_s*."""
    from matplotlib.patches import StepPatch

    colors = (OKABE_ITO["blue"], OKABE_ITO["vermillion"], OKABE_ITO["green"], OKABE_ITO["orange"])
    for color, (name, level) in zip(colors, levels.items(), strict=False):
        # Not `Axes.stairs`, which looks at each step as a curve to find the limits, for longer than it takes to draw them all.
        looks: list[dict[str, Any]] = [
            {"baseline": None, "fill": False, "edgecolor": color, "linewidth": 1.2, "label": name},
            {"baseline": 0, "facecolor": color, "alpha": 0.2, "linewidth": 0},
        ]
        for look in looks if fill else looks[:1]:
            ax.add_artist(StepPatch(level, edges_s, **look))
    ax.update_datalim([(edges_s[0], 0.0), (edges_s[-1], 0.0)])
    ax.autoscale_view()
    dress(ax, y=label)
    top = max((float(np.nan_to_num(level).max(initial=0.0)) for level in levels.values()), default=0.0)
    ax.set_ylim(0, (1.3 if len(levels) > 1 else 1.08) * top or 1.0)  # head room for the legend
    if len(levels) > 1:
        ax.legend(fontsize=8, frameon=False, loc="upper right", ncols=len(levels))
