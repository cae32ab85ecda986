"""Contents of requests, as far as a workload or a client names them: common beginnings, in KV blocks.

Contents form a tree. It is kept as *chains*: consecutive blocks that fork nowhere but where another chain begins. A
chain has a number, the chain that it leaves and the block at which it does. The content of a request is a place on one chain: the
blocks below it, on this chain and on those that it left, are named; what comes after them is the request's own.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from workloads import chained

IntArray = NDArray[np.int64]


Piece = tuple[int, int, int]
"""A chain (-1 - id: a request's own), and which of its blocks: the first, and the one after the last."""


class Contents:
    """The contents of requests in blocks of one size."""

    __slots__ = ("block_tokens", "chain", "named", "parent", "start")

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.start = array("q")
        """The first block of each chain, counted from the beginning of the prompt."""
        self.parent = array("q")
        """The chain that each one leaves; -1: none."""
        self.chain = array("q")
        """The chain on which each request's named blocks end; -1: it has none."""
        self.named = array("q")
        """Full blocks of each request's prompt and output whose content the workload names."""

    def path(self, id_: int, upto: int, lo: int = 0) -> list[Piece]:
        """Blocks *lo* to *upto* of a request, chain by chain from the first on: those that are named, and the request's own."""
        start, parent = self.start, self.parent
        hi, named = upto, self.named[id_]
        pieces: list[Piece] = []
        if hi > named:
            if hi > lo:
                pieces.append((-1 - id_, named if named > lo else lo, hi))
            hi = named
        chain = self.chain[id_]
        while hi > lo and chain >= 0:
            begin = start[chain]
            if hi > begin:
                pieces.append((chain, begin if begin > lo else lo, hi))
                hi = begin
            chain = parent[chain]
        pieces.reverse()
        return pieces

    def add_chain(self, block: int, before: int) -> None:
        """Adds a chain that leaves *before*, or one before that, at *block*."""
        while before >= 0 and self.start[before] >= block:
            before = self.parent[before]
        self.start.append(block)
        self.parent.append(before)

    def add_request(self, chain: int, blocks: int) -> None:
        """Adds a request whose first *blocks* blocks are named and lie on *chain* and those before it."""
        while chain >= 0 and self.start[chain] >= blocks:
            chain = self.parent[chain]
        self.chain.append(chain)
        self.named.append(blocks if chain >= 0 else 0)


class _Forks:
    """Chains in ids, and the contents in blocks of some sizes that they name."""

    __slots__ = ("_begin", "_n", "_of", "id_tokens")

    def __init__(self, id_tokens: int) -> None:
        self.id_tokens = id_tokens
        """Tokens that one id stands for."""
        self._begin = array("q")
        """The first id of each chain, counted from the prompt's beginning."""
        self._n = 0
        self._of: dict[int, Contents] = {}

    def __len__(self) -> int:
        return self._n

    def contents_in(self, block_tokens: int) -> Contents:
        """The contents in blocks of *block_tokens* tokens, which go on growing.

        ValueError where neither size divides the other, and for a new size after the first request.
        """
        if self.id_tokens % block_tokens and block_tokens % self.id_tokens:
            raise ValueError(
                f"ids stand for {self.id_tokens} tokens and a KV block holds {block_tokens}; one has to divide the other, for "
                "blocks to be equal where ids are"
            )
        if block_tokens not in self._of:
            if self._n:
                raise ValueError("contents are asked for before the first request comes")
            self._of[block_tokens] = Contents(block_tokens)
        return self._of[block_tokens]

    def _fork(self, at: int, before: int) -> int:
        """The number of a new chain that leaves *before* at id *at*."""
        for size, contents in self._of.items():
            contents.add_chain(at * self.id_tokens // size, before)
        self._begin.append(at)
        return len(self._begin) - 1

    def _end(self, chain: int, count: int, prompt_tokens: int, output_tokens: int) -> None:
        """The next request's *count* ids end on *chain*."""
        self._n += 1
        of_the_prompt = -(-prompt_tokens // self.id_tokens)
        told = min(count * self.id_tokens, prompt_tokens + (output_tokens if count > of_the_prompt else 0))
        for size, contents in self._of.items():
            contents.add_request(chain, told // size)


class _TraceForks(_Forks):
    __slots__ = ()

    def read(self, ids: IntArray, offsets: IntArray, prompt_tokens: IntArray, output_tokens: IntArray) -> None:
        ends = array("q")
        """The place behind each chain's last id, counted in ids from the beginning of the prompt."""
        extended = array("q")
        """The chain that each request extended or began; -1: earlier ones had all of its ids."""
        counts, knowns, sources = _first_had(chained(ids, offsets), offsets)
        rows = zip(counts, knowns, sources, prompt_tokens.tolist(), output_tokens.tolist(), strict=True)
        for count, known, source, prompt, output in rows:
            number = extended[source] if known else -1
            if known == count:
                extended.append(-1)
            else:
                if number < 0 or ends[number] != known:
                    # Earlier requests went on differently.
                    number = self._fork(known, number)
                    ends.append(known)
                extended.append(number)
                ends[number] = count
            self._end(number, count, prompt, output)


def contents_of(
    ids: IntArray,
    offsets: IntArray,
    id_tokens: int,
    prompt_tokens: IntArray,
    output_tokens: IntArray,
    block_tokens: int,
) -> Contents:
    """Contents in blocks of *block_tokens* from ids of *id_tokens* tokens each, request after request.

    Equal ids behind equal ids are equal tokens, as far as both requests have them. Where there are more ids than the prompt needs,
    they name the tokens that the request emits as well, otherwise none of these. A block is named when all its tokens are.
    ValueError where neither size divides the other.
    """
    forks = _TraceForks(id_tokens)
    contents = forks.contents_in(block_tokens)
    forks.read(ids, offsets, prompt_tokens, output_tokens)
    return contents


class GrowingContents(_Forks):
    """Contents of requests that come one by one; equal to `contents_of` of all of them.

    A chain keeps the digests of its ids, eight bytes each; forks alone are looked up in a table.
    """

    __slots__ = ("_digests", "_forks", "_parent", "_rows")

    def __init__(self, id_tokens: int) -> None:
        super().__init__(id_tokens)
        self._parent = array("q")
        """The chain that each one leaves; -1: none."""
        self._digests: list[array[int]] = []
        self._forks: dict[tuple[int, int, int], int] = {}
        """The chain that begins at (chain, place, digest)."""
        self._rows: list[tuple[int, int]] = []
        """(the chain on which it ends, ids) of each request."""

    def add(self, digests: Sequence[int], prompt_tokens: int, output_tokens: int) -> None:
        """Adds a request, whose tokens *digests* name, each of `id_tokens` tokens and from 0 to 2**63 - 1."""
        number = self._place(digests)
        self._rows.append((number, len(digests)))
        self._end(number, len(digests), prompt_tokens, output_tokens)

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
        new = self._fork(at, number)
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


def _first_had(nodes: IntArray, offsets: IntArray) -> tuple[list[int], list[int], list[int]]:
    """(ids, known ids, source) of each request: earlier ones had the known ids, behind the same others, and the source is the
    first with the last of these (0: there are none).

    Ids are processed in parts: there are many more of them than requests.
    """
    counts = np.diff(offsets)
    rows = np.arange(len(counts), dtype=np.int64)
    parts: list[tuple[int, int, int, int]] = [
        (a, b, int(offsets[a]), int(offsets[b])) for a, b in pairwise(_requests_of_parts(offsets))
    ]
    first = np.zeros(int(nodes.max()) + 1 if len(nodes) else 0, dtype=np.int64)
    for a, b, begin, end in reversed(parts):
        # The first of several equal ids is written last.
        first[nodes[begin:end][::-1]] = np.repeat(rows[a:b], counts[a:b])[::-1]
    known = np.empty(len(counts), dtype=np.int64)
    for a, b, begin, end in parts:
        before = first[nodes[begin:end]] < np.repeat(rows[a:b], counts[a:b])
        below = np.concatenate(([0], np.cumsum(before)))
        known[a:b] = below[offsets[a + 1 : b + 1] - begin] - below[offsets[a:b] - begin]
    source = np.zeros(len(counts), dtype=np.int64)
    some = known > 0
    source[some] = first[nodes[offsets[:-1][some] + known[some] - 1]]
    return counts.tolist(), known.tolist(), source.tolist()


def _requests_of_parts(offsets: IntArray, ids: int = 1 << 20) -> list[int]:
    """Requests at which parts of about *ids* ids begin, and how many requests there are."""
    begins = np.searchsorted(offsets, np.arange(ids, int(offsets[-1]), ids))
    return np.unique([0, *begins.tolist(), len(offsets) - 1]).tolist()
