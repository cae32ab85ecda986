"""Blocks of prompts that hold images or speech, named by their text and by the contents of what they hold.

An engine's prefix cache keys a block by its tokens and by the images in it (vLLM: the hashes of a block's media are among its
`extra_keys`; SGLang: tokens of an image are numbers from its hash), so that equal text with equal images is found again, and
equal text with others is not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from workloads.columns import IntArray
from workloads.workload import W


class Part(NamedTuple):
    """An image or a clip among the text of a prompt."""

    content: int
    """Equal for equal parts, which have as many tokens."""
    first: int
    """The token of the prompt at which it begins."""
    tokens: int


_TEXT = -1
"""The content of text, and the number of its blocks until they have one."""


def named_by_content(workload: W, parts: Sequence[Sequence[Part]], block_tokens: int) -> W:
    """The same requests, whose prompts hold *parts*, with block ids that name them.

    The workload's own ids, where it has any, name its text without the parts; text without ids equals no other. A block has the
    greatest size that divides both *block_tokens* and the blocks of the text.
    """
    size = (
        block_tokens if workload.prefix_block_tokens is None else math.gcd(block_tokens, workload.prefix_block_tokens)
    )
    names, tokens = _Names(size), (workload.prompt_tokens + workload.output_tokens).tolist()
    adapters = [-1] * len(workload) if workload.adapter is None else workload.adapter.tolist()
    found = [
        _Prompt(parts[row], workload.prefix_of(row), workload.prefix_block_tokens or 1).named(
            names, adapter, -(-tokens[row] // size)
        )
        for row, adapter in enumerate(adapters)
    ]
    ids = np.concatenate(found)
    ids[ids == _TEXT] = names.of_text()
    return replace(
        workload,
        prefix_blocks=ids,
        prefix_offsets=np.concatenate(([0], np.cumsum([len(each) for each in found]))),
        prefix_block_tokens=size,
    )


class _Names:
    """Numbers of blocks of *size* tokens: equal for blocks that hold the same and stand behind equal blocks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._next = 0
        self._parts: dict[tuple[int, int, int], int] = {}
        self._mixed: dict[tuple[Any, ...], int] = {}
        self._text: list[IntArray] = []

    def within(self, part: tuple[int, int, int], tokens: int) -> int:
        """The number of the first whole block of a part: its adapter, content, and tokens ahead of that block."""
        if part not in self._parts:
            self._parts[part] = self._next
            self._next += tokens // self.size
        return self._parts[part]

    def mixed(self, held: tuple[Any, ...]) -> int:
        if held not in self._mixed:
            self._mixed[held] = self._next
            self._next += 1
        return self._mixed[held]

    def text(self, *columns: IntArray) -> int:
        """Notes blocks that hold text alone, by numbers that say which; `of_text` numbers them at the end."""
        self._text.append(np.column_stack(columns))
        return _TEXT

    def of_text(self) -> IntArray:
        if not self._text:
            return np.empty(0, dtype=np.int64)
        found = np.zeros(sum(map(len, self._text)), dtype=np.int64)
        for column in np.concatenate(self._text).T:
            # Numbers from 0 stay below the square of how many blocks there are.
            first, second = (np.unique(each, return_inverse=True)[1] for each in (found, column))
            found = first * (int(second.max()) + 1) + second
        return self._next + np.unique(found, return_inverse=True)[1]


class _Prompt:
    """A prompt and its answer as pieces: parts, and the text between them."""

    def __init__(self, parts: Sequence[Part], text: IntArray, text_block: int) -> None:
        self._text, self._text_block = text, text_block
        self._pieces: list[tuple[int, int, int, int]] = []
        """Begin and end in the prompt, content (`_TEXT` for text), and an offset: a place in the prompt less the offset is the
        place in the part, or in the text without the parts."""
        at = spoken = 0
        for part in parts:
            if not self._take_text(at, part.first, spoken):
                return
            self._pieces.append((part.first, part.first + part.tokens, part.content, part.first))
            at, spoken = part.first + part.tokens, spoken + part.tokens
        self._take_text(at, spoken + len(text) * text_block, spoken)

    def _take_text(self, begin: int, end: int, spoken: int) -> bool:
        """Adds the text from *begin* to *end* as far as it has ids; whether it has them to the end."""
        named = min(end, spoken + len(self._text) * self._text_block)
        if named > begin:
            self._pieces.append((begin, named, _TEXT, spoken))
        return named >= end

    def named(self, names: _Names, adapter: int, most: int) -> IntArray:
        """The number of each block, *most* at most."""
        size, end = names.size, self._pieces[-1][1] if self._pieces else 0
        blocks = min(end // size, most)
        ids = np.empty(blocks, dtype=np.int64)
        for begin, end, content, origin in self._pieces:
            first, last = -(-begin // size), min(end // size, blocks)
            if first < last and content == _TEXT:
                ids[first:last] = names.text(*self._within(np.arange(first, last) * size - origin, size))
            elif first < last:
                number = names.within((adapter, content, first * size - begin), end - first * size)
                ids[first:last] = np.arange(number, number + last - first)
            # The block in which the piece ends and another begins; the block in which it begins is that of the piece before.
            block = (end - 1) // size
            if block < blocks and not first <= block < last:
                ids[block] = names.mixed((adapter, *self._mixture(block * size, size)))
        return ids

    def _within(self, starts: IntArray, size: int) -> tuple[IntArray, IntArray, IntArray]:
        at, within = starts // self._text_block, starts % self._text_block
        # A block is no larger than one of the text, so that it holds parts of two of these at most.
        over = np.where(within + size > self._text_block, self._text[np.minimum(at + 1, len(self._text) - 1)], -1)
        return self._text[at], over, within

    def _mixture(self, start: int, size: int) -> tuple[Any, ...]:
        """Tokens of each piece that a block holds."""
        held: list[tuple[int, ...]] = []
        for begin, end, content, origin in self._pieces:
            first, last = max(begin, start), min(end, start + size)
            while first < last:
                offset = first - origin
                if content != _TEXT:
                    held.append((content, offset, last - first))
                    break
                block, within = divmod(offset, self._text_block)
                taken = min(last - first, self._text_block - within)
                held.append((_TEXT, int(self._text[block]), within, taken))
                first += taken
        return tuple(held)
