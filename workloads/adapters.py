"""Requests that ask for LoRA adapters: drawn by popularity, or read, and their prompts told apart by adapter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np

from workloads.columns import IntArray, first_row
from workloads.rollout import prompts_of
from workloads.streams import Stream, check_count, stream
from workloads.times import number_of
from workloads.workload import W, Workload


def draw_adapters(trace: W, shares: Sequence[float], seed: int, *, base_share: float = 0.0) -> W:
    """The same requests, each asking for an adapter at random in proportion to *shares*, one for each adapter; *base_share* of them
    ask for the base model. Requests of one session ask for the same, and so do all samples of a rollout's prompt.

    Draws have a stream of their own, so that arrivals and lengths are those without adapters.
    """
    if trace.adapter is not None:
        raise ValueError("the trace has a column adapter already, which says what each request asks for")
    share = np.asarray(shares, dtype=float)
    if share.ndim != 1 or not len(share) or not np.all(np.isfinite(share) & (share >= 0)) or share.sum() <= 0:
        raise ValueError(f"shares are one number from 0 for each adapter, not all of them 0; got {shares!r}")
    if not 0 <= base_share <= 1:
        raise ValueError(f"base_share is a share from 0 to 1; got {base_share!r}")
    draws = stream(seed, Stream.ADAPTERS)
    below = np.cumsum(share)
    of_row = _drawn_together(trace)
    n = int(of_row.max(initial=-1)) + 1
    drawn = np.searchsorted(below, draws.random(n) * below[-1], side="right")
    if base_share:
        drawn = np.where(draws.random(n) < base_share, -1, drawn)
    return replace(trace, adapter=drawn[of_row].astype(np.int64))


_PLAIN = (type(None), str, int, float)


def adapter_numbers(cells: Sequence[Any], refuse: Callable[[int, str], NoReturn]) -> tuple[IntArray, list[str]]:
    """The number of each cell's adapter, -1 (the base model) where the cell is empty, and a note where cells hold names, which are
    numbered in the order in which they are first seen. *refuse* is called with the first row that is wrong, and what it lacks."""
    found: dict[Any, int] = {None: -1, "": -1}
    numbers, names = dict[Any, Any](), dict[Any, int]()
    plain = [
        None if cell != cell else cell if type(cell) in _PLAIN else str(cell) for cell in cells
    ]  # NaN is an empty cell
    for row, cell in enumerate(plain):
        if cell in found:
            continue
        number = number_of(cell)
        if number is None:
            found[cell] = names[cell] = len(names)
        elif number == int(number) and -1 <= number < 2**63:
            found[cell] = numbers[cell] = int(number)
        else:
            refuse(row, "a whole number from 0, or the name of an adapter")
        if numbers and names:
            refuse(row, f"a {'name' if number is not None else 'whole number'} of an adapter, as in the rows above")
    said = f"{len(names):,} name{'s' * (len(names) > 1)}"
    note = f"adapters have {said}, numbered from 0 in the order in which they are first seen; adapters.count is that, or more"
    return np.array([found[cell] for cell in plain], dtype=np.int64), [note] if names else []


def _drawn_together(trace: Workload) -> np.ndarray:
    """A number for each row, the same for rows that ask for one adapter."""
    prompts = prompts_of(trace)
    if trace.session is None:
        return prompts
    # A row without a session is one of its own.
    return np.unique(np.where(trace.session < 0, -1 - prompts, trace.session), return_inverse=True)[1]


def check_adapters(trace: Workload, count: int) -> None:
    """ValueError for a request that asks for another adapter than the *count* that there are."""
    check_count(count, "count")
    if trace.adapter is not None and (row := first_row(trace.adapter >= count)) is not None:
        raise ValueError(
            f"{trace.called(row)} asks for adapter {trace.adapter[row]}, and adapters are numbers below the {count} there are"
        )


def keyed_by_adapter(trace: W) -> W:
    """The same requests with other block ids for each adapter, so that equal tokens are found again by requests for the same
    adapter alone, as where an engine hashes the adapter with the tokens."""
    if trace.adapter is None or trace.prefix_blocks is None or trace.prefix_offsets is None:
        return trace
    several = int(trace.adapter.max(initial=-1)) + 2
    of_block = np.repeat(trace.adapter + 1, np.diff(trace.prefix_offsets))
    highest = int(trace.prefix_blocks.max(initial=0))
    if highest > (2**63 - 1) // several - 1:
        _, small = np.unique(trace.prefix_blocks, return_inverse=True)
        return replace(trace, prefix_blocks=small.astype(np.int64) * several + of_block)
    return replace(trace, prefix_blocks=trace.prefix_blocks.astype(np.int64) * several + of_block)
