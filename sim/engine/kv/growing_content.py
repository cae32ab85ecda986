"""Contents of prompts that come one by one: the tree of `sim.engine.kv.content`, grown with every request.

A chain keeps the digests of its blocks, eight bytes each; forks alone are looked up in a table.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from sim.engine.kv.content import Contents


class GrownContents:
    """Contents of requests in the order in which they come; equal to `contents_of` of all of them."""

    __slots__ = ("_begin", "_digests", "_forks", "_of", "_parent", "_rows", "id_tokens")

    def __init__(self, id_tokens: int) -> None:
        self.id_tokens = id_tokens
        """Tokens that one digest stands for."""
        self._begin = array("q")
        """The first id of each chain, counted from the prompt's beginning."""
        self._parent = array("q")
        """The chain that each one leaves; -1: none."""
        self._digests: list[array[int]] = []
        self._forks: dict[tuple[int, int, int], int] = {}
        """The chain that begins at (chain, place, digest)."""
        self._rows: list[tuple[int, int]] = []
        """(the chain on which it ends, ids) of each request."""
        self._of: dict[int, Contents] = {}

    def contents_in(self, block_tokens: int) -> Contents:
        """The contents in blocks of *block_tokens* tokens, which go on growing.

        ValueError where neither size divides the other, and for a new size after the first request.
        """
        if self.id_tokens % block_tokens and block_tokens % self.id_tokens:
            raise ValueError(
                f"ids stand for {self.id_tokens} tokens and a KV block holds {block_tokens}; one has to divide the other"
            )
        if block_tokens not in self._of:
            if self._rows:
                raise ValueError("contents are asked for before the first request comes")
            self._of[block_tokens] = Contents(block_tokens, array("q"), array("q"), array("q"), array("q"))
        return self._of[block_tokens]

    def add(self, digests: Sequence[int], prompt_tokens: int, output_tokens: int) -> None:
        """Adds a request, whose tokens *digests* name, each of `id_tokens` tokens and from 0 to 2**63 - 1."""
        number = self._place(digests)
        count = len(digests)
        self._rows.append((number, count))
        of_the_prompt = -(-prompt_tokens // self.id_tokens)
        told = min(count * self.id_tokens, prompt_tokens + (output_tokens if count > of_the_prompt else 0))
        for size, contents in self._of.items():
            for chain in range(len(contents.start), len(self._begin)):
                begin = self._begin[chain] * self.id_tokens // size
                before = self._parent[chain]
                while before >= 0 and contents.start[before] >= begin:
                    before = contents.parent[before]
                contents.start.append(begin)
                contents.parent.append(before)
            blocks, chain = told // size, number
            while chain >= 0 and contents.start[chain] >= blocks:
                chain = contents.parent[chain]
            contents.chain.append(chain)
            contents.named.append(blocks if chain >= 0 else 0)

    def _place(self, digests: Sequence[int]) -> int:
        """The chain on which *digests* end, made or extended where they are new; -1: there are none."""
        count, at = len(digests), 0
        number = self._forks.get((-1, 0, digests[0]), -1) if count else -1
        while number >= 0:
            mine, begin = self._digests[number], self._begin[number]
            end = begin + len(mine)
            upto = min(count, end)
            while at < upto and mine[at - begin] == digests[at]:
                at += 1
            if at == count:
                return number
            if at == end:
                mine.extend(digests[at:])
                return number
            following = self._forks.get((number, at, digests[at]), -1)
            if following < 0:
                break
            number = following
        if at == count:
            return number
        new = len(self._begin)
        self._begin.append(at)
        self._parent.append(number)
        self._digests.append(array("q", digests[at:]))
        self._forks[number, at, digests[at]] = new
        return new

    def digests_of(self, row: int) -> list[int]:
        """The digests of a request's tokens."""
        number, count = self._rows[row]
        pieces: list[array[int]] = []
        while number >= 0:
            begin = self._begin[number]
            pieces.append(self._digests[number][: count - begin])
            number, count = self._parent[number], begin
        return [digest for piece in reversed(pieces) for digest in piece]

    def __len__(self) -> int:
        return len(self._rows)
