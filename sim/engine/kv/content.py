"""Contents of requests, as far as a workload or a client names them: common beginnings, in KV blocks.

Contents form a tree. It is kept as *chains*: consecutive blocks that fork nowhere but where another chain begins. A
chain has a number, the chain that it leaves and the block at which it does. The content of a request is a place on one chain: the
blocks below it, on this chain and on those that it left, are named; what comes after them is the request's own.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
_EARLY = 4
"""Items that are compared one by one before halves are."""
_LATEST = 4
"""Places at which others have left a chain that are looked at before halves of it are."""

Digests: TypeAlias = "array[int] | memoryview[int]"
"""Names of a request's tokens, or a part of them: numbers of one size."""

Piece = tuple[int, int, int]
"""A chain (-1 - id: a request's own), and which of its blocks: the first, and the one after the last."""


class Contents:
    """The contents of requests in blocks of one size."""

    __slots__ = ("_shared", "block_tokens", "chain", "is_whole", "named", "next_tokens", "parent", "start")

    def __init__(self, block_tokens: int, next_tokens: int = 0) -> None:
        self.block_tokens = block_tokens
        self.next_tokens = next_tokens
        """Tokens behind a block that its name has as well: blocks are equal where these are, too."""
        self.start = array("q")
        """The first block of each chain, counted from the beginning of the prompt."""
        self.parent = array("q")
        """The chain that each one leaves; -1: none."""
        self.chain = array("q")
        """The chain on which each request's named blocks end; -1: it has none."""
        self.named = array("q")
        """Full blocks of each request's prompt and output whose content the workload names."""
        self.is_whole = False
        """Whether no more requests come."""
        self._shared: Contents | None = None

    def shared(self) -> Contents:
        """The same contents, where blocks that one request alone has are its own; once no more requests come."""
        if self._shared is not None:
            return self._shared
        found = self._shared = Contents(self.block_tokens, self.next_tokens)
        found.start, found.parent = self.start, self.parent
        # A last entry for requests that are on no chain, and for chains that leave none.
        start, parent = np.array([*self.start, 0]), np.array([*self.parent, -1])
        chain, named = np.array(self.chain, np.int64), np.array(self.named, np.int64)
        numbers, ends = np.concatenate((chain, parent)), np.concatenate((named, start))
        order = np.lexsort((ends, numbers))
        numbers, ends = numbers[order], ends[order]
        # Where requests end on a chain, or other chains leave it, the last but one: below it at least two have its blocks.
        second = start.copy()
        last_but_one = np.flatnonzero((numbers[:-1] == numbers[1:]) & (np.append(numbers[2:], -2) != numbers[1:]))
        second[numbers[last_but_one]] = np.maximum(start[numbers[last_but_one]], ends[last_but_one])
        named = np.where(chain >= 0, np.minimum(named, second[chain]), 0)
        while (outside := (chain >= 0) & (start[chain] >= named)).any():
            chain = np.where(outside, parent[chain], chain)
        found.chain.frombytes(chain.tobytes())
        found.named.frombytes(np.where(chain >= 0, named, 0).tobytes())
        return found

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

    def add_chain(self, token: int, before: int) -> None:
        """Adds a chain that leaves *before*, or one before that, at *token*."""
        block = max(token - self.next_tokens, 0) // self.block_tokens
        while before >= 0 and self.start[before] >= block:
            before = self.parent[before]
        self.start.append(block)
        self.parent.append(before)

    def add_request(self, chain: int, tokens: int) -> None:
        """Adds a request whose first *tokens* tokens are named and lie on *chain* and those before it."""
        blocks = max(tokens - self.next_tokens, 0) // self.block_tokens
        while chain >= 0 and self.start[chain] >= blocks:
            chain = self.parent[chain]
        self.chain.append(chain)
        self.named.append(blocks if chain >= 0 else 0)


class ContentsIn(Protocol):
    """Contents of a workload's requests in blocks of some size, see `GrowingContents.contents_in`."""

    def __call__(self, block_tokens: int, next_tokens: int = 0, /) -> Contents: ...


class GrowingContents:
    """Contents of requests that come one by one.

    A chain keeps the digests of its ids, eight bytes each; forks alone are looked up in a table.
    """

    __slots__ = ("_begin", "_digests", "_forks", "_left_at", "_of", "_parent", "_rows", "id_tokens")

    def __init__(self, id_tokens: int) -> None:
        self.id_tokens = id_tokens
        """Tokens that one digest stands for."""
        self._begin = array("q")
        """The first id of each chain, counted from the prompt's beginning."""
        self._parent = array("q")
        """The chain that each one leaves; -1: none."""
        self._digests: list[Digests] = []
        self._left_at: dict[int, list[int]] = {}
        """Where the latest chains have left each one, in its digests; where one did most requests do."""
        self._forks: dict[tuple[int, int, int], int] = {}
        """The chain that begins at (chain, place, digest)."""
        self._rows: list[tuple[int, int]] = []
        """(the chain on which it ends, ids) of each request."""
        self._of: dict[tuple[int, int], Contents] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def contents_in(self, block_tokens: int, next_tokens: int = 0) -> Contents:
        """The contents in blocks of *block_tokens* tokens, which go on growing; names have the *next_tokens* tokens behind a block.

        ValueError where neither size divides the other, and for a new size after the first request.
        """
        if self.id_tokens % block_tokens and block_tokens % self.id_tokens:
            raise ValueError(
                f"ids stand for {self.id_tokens} tokens and a KV block holds {block_tokens}; one has to divide the other, for "
                "blocks to be equal where ids are"
            )
        if (block_tokens, next_tokens) not in self._of:
            if self._rows:
                raise ValueError("contents are asked for before the first request comes")
            self._of[block_tokens, next_tokens] = Contents(block_tokens, next_tokens)
        return self._of[block_tokens, next_tokens]

    def add(self, digests: Sequence[int], prompt_tokens: int, output_tokens: int) -> None:
        """Adds a request, whose tokens *digests* name, each of `id_tokens` tokens.

        Where there are more of them than the prompt needs, they name the tokens that the request emits as well, otherwise none of
        these. A block is named when all its tokens are.
        """
        named = digests if isinstance(digests, array | memoryview) else array("q", digests)
        number, count = self._place(named), len(digests)
        self._rows.append((number, count))
        of_the_prompt = -(-prompt_tokens // self.id_tokens)
        told = min(count * self.id_tokens, prompt_tokens + (output_tokens if count > of_the_prompt else 0))
        for contents in self._of.values():
            contents.add_request(number, told)

    def _place(self, digests: Digests) -> int:
        """The chain on which *digests* end, made or extended where they are new; -1: there are none."""
        count, at = len(digests), 0
        number = self._forks.get((-1, 0, digests[0]), -1) if count else -1
        while number >= 0:
            mine, begin = self._digests[number], self._begin[number]
            end = begin + len(mine)
            at += _alike(mine, at - begin, digests, at, (end if end < count else count) - at, self._left_at.get(number))
            if at == count:
                return number
            if at == end:
                if isinstance(mine, array):
                    mine.extend(digests[at:])
                else:
                    self._digests[number] = digests[begin:]
                return number
            following = self._forks.get((number, at, digests[at]), -1)
            if following < 0:
                break
            number = following
        return number if at == count else self._fork(number, at, digests[at:])

    def _fork(self, before: int, at: int, digests: Digests) -> int:
        """The number of a new chain that leaves *before* at id *at*."""
        new = self._forks[before, at, digests[0]] = len(self._begin)
        self._begin.append(at)
        self._parent.append(before)
        self._digests.append(digests)
        if before >= 0:
            left_at, place = self._left_at.get(before), at - self._begin[before]
            if left_at is None:
                self._left_at[before] = [place]
            elif place not in left_at:
                left_at[:] = [*left_at[1 - _LATEST :], place]
        for contents in self._of.values():
            contents.add_chain(at * self.id_tokens, before)
        return new

    def digests_of(self, row: int) -> list[int]:
        """The digests of a request's tokens."""
        number, count = self._rows[row]
        pieces: list[Digests] = []
        while number >= 0:
            begin = self._begin[number]
            pieces.append(self._digests[number][: count - begin])
            number, count = self._parent[number], begin
        return [digest for piece in reversed(pieces) for digest in piece]


def _alike(one: Digests, first: int, other: Digests, at: int, size: int, likely: list[int] | None) -> int:
    """How many of *size* items from *first* of *one* on, and from *at* of *other* on, are equal before two differ; *likely*: items
    of *one* that may be the first to."""
    # Most differ early or not at all.
    for i in range(size if size < _EARLY else _EARLY):
        if one[first + i] != other[at + i]:
            return i
    low, high = 0, size
    for place in likely or ():
        if 0 < place - first < high and one[place] != other[at + place - first]:
            high = place - first
    one, other = one[first : first + high], other[at : at + high]
    # Bytes are compared several times as fast as the numbers in them.
    if one.tobytes() == other.tobytes():
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle].tobytes() == other[low:middle].tobytes():
            low = middle
        else:
            high = middle
    return low


def contents_of(
    ids: IntArray,
    offsets: IntArray,
    id_tokens: int,
    prompt_tokens: IntArray,
    output_tokens: IntArray,
    block_tokens: int,
    next_tokens: int = 0,
) -> Contents:
    """Contents in blocks of *block_tokens* from ids of *id_tokens* tokens each, request after request.

    Equal ids behind equal ids are equal tokens, as far as both requests have them. ValueError where neither size divides the other.
    """
    forks = GrowingContents(id_tokens)
    contents = forks.contents_in(block_tokens, next_tokens)
    ends, named = offsets.tolist(), np.ascontiguousarray(ids).data
    for first, end, prompt, output in zip(ends, ends[1:], prompt_tokens.tolist(), output_tokens.tolist(), strict=False):
        forks.add(named[first:end], prompt, output)
    contents.is_whole = True
    return contents
