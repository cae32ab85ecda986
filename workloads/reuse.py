"""The share of a trace's prompts that a prefix cache can find again, for every size of cache at once.

The cache is an ideal one: it holds blocks of prompts, gives up the least recently used when it is full, and within a prompt the
last block before the first, as vLLM frees a sequence's blocks. A block is then never held without those before it, and a
reference finds its block if and only if fewer distinct blocks were used since its last use than the cache holds: the stack
distance of Mattson, Gecsei, Slutz and Traiger, "Evaluation techniques for storage hierarchies" (IBM Systems Journal 9(2), 1970).

All blocks of a prompt that were last used by the same earlier prompt have one distance, so that a prompt costs as many steps as it
has such runs, not as many as it has blocks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workloads.chains import chained
from workloads.columns import IntArray
from workloads.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReuseCurve:
    """The tokens of one trace's prompts that ideal caches of all sizes find again."""

    block_tokens: int
    """Prompt tokens of one block."""
    prompt_tokens: int
    """Tokens of all requests together."""
    blocks: int
    """Blocks that the prompts name, repeated ones included."""
    distinct_blocks: int
    capacity_blocks: IntArray
    """Sizes at which a cache begins to find more, ascending; empty where nothing is ever found."""
    hit_tokens: IntArray
    """Prompt tokens that a cache of each of these sizes finds."""
    hit_blocks: IntArray
    """Blocks that a cache of each of these sizes finds."""

    @property
    def best_hit_rate(self) -> float:
        """Share of the prompt tokens that a cache without limit finds; what is left no cache can find."""
        return float(self.hit_tokens[-1]) / self.prompt_tokens if len(self.hit_tokens) else 0.0

    def hit_rate(self, capacity_tokens: ArrayLike) -> NDArray[np.float64]:
        """Share of the prompt tokens found by caches of so many tokens (whole blocks count), of the same shape."""
        return (
            self._at(np.asarray(capacity_tokens, dtype=float) // self.block_tokens, self.hit_tokens)
            / self.prompt_tokens
        )

    def block_hit_rate(self, capacity_blocks: ArrayLike) -> NDArray[np.float64]:
        """Share of the blocks found by caches of so many blocks, of the same shape."""
        return self._at(np.asarray(capacity_blocks, dtype=float), self.hit_blocks) / max(self.blocks, 1)

    def tokens_for(self, share_of_best: float) -> int:
        """The least cache, in tokens, that finds at least *share_of_best* (0 to 1) of what a cache without limit finds."""
        if not 0 <= share_of_best <= 1:
            raise ValueError(f"share_of_best is from 0 to 1; got {share_of_best!r}")
        if not len(self.hit_tokens) or share_of_best == 0:
            return 0
        row = int(np.searchsorted(self.hit_tokens, share_of_best * self.hit_tokens[-1] * (1 - 1e-12)))
        return int(self.capacity_blocks[row]) * self.block_tokens

    def _at(self, blocks: NDArray[np.float64], hits: IntArray) -> NDArray[np.float64]:
        rows = np.searchsorted(self.capacity_blocks, blocks, side="right")
        return np.concatenate(([0], hits))[rows].astype(float)


def reuse(trace: Workload) -> ReuseCurve:
    """The reuse curve of a trace whose prompts name their blocks, requests one after the other in order of arrival.

    A block counts as the same only after the same blocks and for the same model: ids that follow different ids are told apart, as
    chained hashes do. What is looked for are prompts; what is held are answers as well, where the trace names them. Raises
    ValueError for a trace without prefix blocks.
    """
    ids, offsets, block_tokens = trace.prefix_blocks, trace.prefix_offsets, trace.prefix_block_tokens
    if ids is None or offsets is None or block_tokens is None:
        raise ValueError(
            f"{trace.source or 'the trace'} does not say which prompts share blocks; "
            "give a trace with hash_ids (mooncake) or a column prefix_blocks_N (plain)"
        )
    nodes = chained(ids, offsets, trace.model_index)
    last_use = np.full(int(nodes.max()) + 1 if len(nodes) else 0, -1, dtype=np.int64)
    uses = _Counts(len(trace))
    tokens_at: Counter[int] = Counter()
    blocks_at: Counter[int] = Counter()
    asked = np.minimum(np.diff(offsets), -(-trace.prompt_tokens // block_tokens))
    for row, (start, end, prompt, blocks) in enumerate(
        zip(offsets[:-1].tolist(), offsets[1:].tolist(), trace.prompt_tokens.tolist(), asked.tolist(), strict=True)
    ):
        count = end - start
        if count == 0:
            continue
        path = nodes[start:end]
        before = last_use[path]
        edges = [0, *(np.flatnonzero(before[1:] != before[:-1]) + 1).tolist(), count]
        for low, high in pairwise(edges):
            used = int(before[low])
            if used < 0:
                break
            # Used since: this prompt's other blocks, and others'; what this prompt used of those is no longer counted there.
            size = count + uses.between(used + 1, row)
            if low < blocks:
                blocks_at[size] += min(high, blocks) - low
                tokens_at[size] += min(high * block_tokens, prompt) - low * block_tokens
            uses.add(used, low - high)
        uses.add(row, count)
        last_use[path] = row
    distinct = int(np.count_nonzero(last_use >= 0))
    sizes = np.array(sorted(tokens_at), dtype=np.int64)
    return ReuseCurve(
        block_tokens=block_tokens,
        prompt_tokens=sum(trace.prompt_tokens.tolist()),
        blocks=int(asked.sum()),
        distinct_blocks=distinct,
        capacity_blocks=sizes,
        hit_tokens=np.cumsum([tokens_at[size] for size in sizes.tolist()], dtype=np.int64),
        hit_blocks=np.cumsum([blocks_at[size] for size in sizes.tolist()], dtype=np.int64),
    )


class _Counts:
    """Numbers by row, with sums over ranges: a binary indexed tree (Fenwick, Software: Practice and Experience 24(3), 1994)."""

    __slots__ = ("_tree",)

    def __init__(self, rows: int) -> None:
        self._tree = [0] * (rows + 1)

    def add(self, row: int, change: int) -> None:
        row += 1
        while row < len(self._tree):
            self._tree[row] += change
            row += row & -row

    def between(self, low: int, high: int) -> int:
        """The sum over rows from *low* to *high* - 1."""
        return self._below(high) - self._below(low)

    def _below(self, row: int) -> int:
        total = 0
        while row > 0:
            total += self._tree[row]
            row &= row - 1
        return total
