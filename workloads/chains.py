"""Block ids as chained hashes: equal only behind equal ones."""

from __future__ import annotations

import numpy as np

from workloads.columns import IntArray


def chained(ids: IntArray, offsets: IntArray, roots: IntArray | None = None) -> IntArray:
    """The ids numbered from 0 such that each number has one predecessor; shape as *ids*.

    *offsets*: n + 1, request i owns `ids[offsets[i]:offsets[i + 1]]`. *roots*: of each request a number from 0; the first ids of
    requests with different ones are told apart. Ids that are chained already come back as they are, where they have few gaps.
    """
    # Ids that are numbers from 0 with few gaps serve as they are.
    compact = len(ids) == 0 or int(ids.max()) < 2 * len(ids)
    dense = ids if compact else np.unique(ids, return_inverse=True)[1].astype(np.int64)
    before = np.empty_like(dense)
    before[1:] = dense[:-1]
    filled = np.diff(offsets) > 0
    before[offsets[:-1][filled]] = -1 if roots is None else -1 - roots[filled]
    # Some predecessor of each id; whoever has another one shows that the ids are not chained.
    some = np.zeros(int(dense.max()) + 1 if len(dense) else 0, dtype=np.int64)
    some[dense] = before
    if all(np.array_equal(some[part], before[at : at + len(part)]) for at, part in _parts(dense)):
        return dense
    numbers: dict[tuple[int, int], int] = {}
    linked = np.empty_like(dense)
    node = 0
    for place, (block, previous) in enumerate(zip(dense.tolist(), before.tolist(), strict=True)):
        node = numbers.setdefault((previous if previous < 0 else node, block), len(numbers))
        linked[place] = node
    return linked


def _parts(values: IntArray, size: int = 1 << 20) -> list[tuple[int, IntArray]]:
    """*values* in pieces, so that what is made of them stays small."""
    return [(at, values[at : at + size]) for at in range(0, len(values), size)]
