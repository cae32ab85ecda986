"""Sums over the iterations of a run, which are too many to be held at once: memory held, and when the last ended."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.metrics.columns import Columns, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationSums:
    """The sums that the metrics need over the iterations, which may be too many to be held at once."""

    n: int
    last_end_ns: int
    """-1 without iterations."""
    held_ns: float
    """Share of its replica's KV blocks in use times how long, summed over replicas."""
    largest_share: float


def by_replica(block: Mapping[str, NDArray[Any]]) -> Iterator[tuple[int, slice]]:
    """The replicas of a block of iterations, in order, and which rows are theirs."""
    replica = block["replica"]
    heads = np.flatnonzero(np.diff(replica, prepend=-1)).tolist()
    for at, to in itertools.pairwise((*heads, len(replica))):
        yield int(replica[at]), slice(at, to)


def kv_holdings(
    blocks: Iterable[Mapping[str, NDArray[Any]]],
) -> Iterator[tuple[int, IntArray, IntArray, IntArray]]:
    """(replica, start_ns, held_ns, KV blocks in use) in pieces, from iterations in order of start within a replica.

    What is in use when an iteration starts is held until the replica starts its next (micro-batches in flight share one
    pool) or, where it falls idle, until the last of those in flight has ended.
    """
    latest: dict[int, tuple[int, int, int]] = {}
    for block in blocks:
        for replica, mine in by_replica(block):
            start_ns, used = block["start_ns"][mine], block["kv_blocks_used"][mine]
            end_ns = start_ns + block["duration_ns"][mine]
            # Nearly always in order: a look costs a fifth of the running maximum.
            if (end_ns[1:] < end_ns[:-1]).any():
                end_ns = np.maximum.accumulate(end_ns)
            if replica in latest:
                since_ns, in_use, busy_until_ns = latest[replica]
                start_ns, used = np.append(since_ns, start_ns), np.append(in_use, used)
                end_ns = np.append(busy_until_ns, np.maximum(end_ns, busy_until_ns))
            latest[replica] = (int(start_ns[-1]), int(used[-1]), int(end_ns[-1]))
            yield replica, start_ns[:-1], np.minimum(start_ns[1:], end_ns[:-1]) - start_ns[:-1], used[:-1]
    for replica, (start, in_use, end) in latest.items():
        yield replica, np.array([start]), np.array([end - start]), np.array([in_use])


def last_iteration_end_ns(columns: Columns) -> int:
    """The instant at which the last iteration ended; -1 without any."""
    if (kept := getattr(columns, "iteration_sums", None)) is not None:
        return kept.last_end_ns
    return max(map(_last_end_ns, columns.iteration_blocks()), default=-1)


def _last_end_ns(block: Mapping[str, NDArray[Any]]) -> int:
    return int((block["start_ns"] + block["duration_ns"]).max(initial=-1))


def iteration_sums(columns: Columns) -> IterationSums:
    """The sums over all iterations; as *columns* have them, where they keep them."""
    kept = getattr(columns, "iteration_sums", None)
    return sums_of(columns) if kept is None else kept


def sums_of(columns: Columns) -> IterationSums:
    """`iteration_sums`, worked out."""
    n, last_end_ns = 0, -1

    def counted() -> Iterator[Mapping[str, NDArray[Any]]]:
        nonlocal n, last_end_ns
        for block in columns.iteration_blocks():
            n += block["duration_ns"].size
            last_end_ns = max(last_end_ns, _last_end_ns(block))
            yield block

    held_ns, largest_share = 0.0, 0.0
    pools = columns.meta["kv_blocks_total"]
    for replica, _, lengths_ns, used in kv_holdings(counted()):
        share = used / pools[replica]
        held_ns += float((share * lengths_ns).sum())
        largest_share = max(largest_share, float(share.max(initial=0.0)))
    return IterationSums(n=n, last_end_ns=last_end_ns, held_ns=held_ns, largest_share=largest_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class SumsBetween:
    """The sums over iterations that the metrics of a part of a run need."""

    emitted: int
    """Tokens of iterations that end in it."""
    n: int
    """Iterations that start in it."""
    busy_ns: int
    held_ns: float
    """As of the whole run, within the part."""
    largest_share: float


def sums_between(columns: Columns, begin: int, end: int) -> SumsBetween:
    """The sums over the iterations from instant *begin* to instant *end*, ns."""
    emitted, n, busy_ns = 0, 0, 0
    for block in columns.iteration_blocks():
        start_ns, end_ns = block["start_ns"], block["start_ns"] + block["duration_ns"]
        emitted += int(block["emitted_tokens"][(end_ns > begin) & (end_ns <= end)].sum())
        n += int(((start_ns >= begin) & (start_ns < end)).sum())
        busy_ns += int(np.maximum(np.minimum(end_ns, end) - np.maximum(start_ns, begin), 0).sum())
    held_ns, largest_share = 0.0, 0.0
    pools = columns.meta["kv_blocks_total"]
    for replica, start_ns, lengths_ns, used in kv_holdings(columns.iteration_blocks()):
        inside = np.maximum(np.minimum(start_ns + lengths_ns, end) - np.maximum(start_ns, begin), 0)
        share = used / pools[replica]
        held_ns += float((share * inside).sum())
        largest_share = max(largest_share, float(share[inside > 0].max(initial=0.0)))
    return SumsBetween(emitted=emitted, n=n, busy_ns=busy_ns, held_ns=held_ns, largest_share=largest_share)
