"""Attention of one iteration: the equations of `hwmodels.kernels.attention` in numbers, which a run asks for in each iteration.

They are apart so that they are compiled, and give the same bits as those over arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Final

SINGLE: Final = "single"
"""The attribute by which a form says the object here that gives its times of numbers, where it has one."""


class PromptTimes:
    """Seconds of prompt chunks, without a window and without what a cached token of the past costs beforehand."""

    __slots__ = (
        "after", "before_s", "block_s", "by_kv", "by_pair", "by_row", "chunk_blocks", "kv_bytes_s", "launch", "layers",
        "loss", "lost_s", "row_blocks", "row_bytes_s", "throttle",
    )  # fmt: skip

    def __init__(
        self, by: tuple[float, float, float], blocks: tuple[float, float, float], stream: tuple[float, float],
        throttle: tuple[float, float], loss: float, layers: tuple[float, float, float, float],
    ) -> None:  # fmt: skip
        """*by*: a pair, row and KV token; *blocks*: a row, a chunk, and those that are hidden; *stream*: a row and a KV token;
        *layers*: their number, and in each the launch, what a KV token takes before, and what a pair loses."""
        self.by_pair, self.by_row, self.by_kv = by
        self.row_blocks, self.chunk_blocks, self.block_s = blocks
        self.row_bytes_s, self.kv_bytes_s = stream
        self.throttle, self.after = throttle
        self.loss = loss
        self.layers, self.launch, self.before_s, self.lost_s = layers

    def seconds(self, rows: float, chunks: float, pairs: float, kv: float) -> float:
        compute = pairs * self.by_pair + rows * self.by_row + kv * self.by_kv
        compute = compute / (1.0 - self.throttle * compute / (compute + self.after))
        memory = rows * self.row_bytes_s + kv * self.kv_bytes_s
        beyond = rows * self.row_blocks + chunks * self.chunk_blocks - self.block_s
        if beyond > 0.0:
            compute = compute + beyond
        gap = compute - memory
        both = 0.5 * (compute + memory + sqrt(gap * gap + self.loss * (compute * memory)))
        return self.layers * (self.launch + both + kv * self.before_s + pairs * self.lost_s)


class DecodeTimes:
    """Seconds of decodes by their KV tokens."""

    __slots__ = ("_known", "_of_batch", "launch", "layers", "loss", "ramp", "ramp_tokens")

    def __init__(
        self, layers: float, launch: float, loss: float, ramp: tuple[float, float],
        of_batch: Callable[[float, float], tuple[float, float, float]],
    ) -> None:  # fmt: skip
        """*ramp*: seconds, and the tokens at which half of them are reached. *of_batch*: the terms that do not depend on the KV
        tokens by the sequences and their query tokens: seconds of a KV token, of blocks, and of having several sequences."""
        self._of_batch = of_batch
        self._known: dict[tuple[float, float], tuple[float, float, float]] = {}
        self.layers = layers
        self.launch = launch
        self.loss = loss
        self.ramp, self.ramp_tokens = ramp

    def seconds(self, seqs: float, queries: float, kv: float, split_over: float) -> float:
        """*split_over*: KV tokens over which the work is split, those outside a window included."""
        key = (seqs, queries)
        batch = self._known.get(key)
        if batch is None:
            batch = self._known[key] = self._of_batch(seqs, queries)
        by_token, blocks, more = batch
        memory = kv * by_token
        gap = memory - blocks
        both = 0.5 * (memory + blocks + sqrt(gap * gap + self.loss * (memory * blocks)))
        return self.layers * (self.launch + self.ramp * (split_over / (split_over + self.ramp_tokens)) + more + both)
