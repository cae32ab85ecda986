"""Contents of requests, as far as a workload names them: common beginnings, in KV blocks.

Contents form a tree. It is kept as *chains*: consecutive blocks that fork nowhere but where another chain begins. A
chain has a number, the chain that it leaves and the block at which it does. The content of a request is a place on one chain: the
blocks below it, on this chain and on those that it left, are named; what comes after them is the request's own.
"""

from __future__ import annotations

from array import array
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from workloads import chained

IntArray = NDArray[np.int64]


class Contents:
    """The contents of a workload's requests in blocks of one size."""

    __slots__ = ("block_tokens", "chain", "named", "parent", "start")

    def __init__(
        self, block_tokens: int, start: array[int], parent: array[int], chain: array[int], named: array[int]
    ) -> None:
        self.block_tokens = block_tokens
        self.start = start
        """The first block of each chain, counted from the beginning of the prompt."""
        self.parent = parent
        """The chain that each one leaves; -1: none."""
        self.chain = chain
        """The chain on which each request's named blocks end; -1: it has none."""
        self.named = named
        """Full blocks of each request's prompt and output whose content the workload names."""


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
    if id_tokens % block_tokens and block_tokens % id_tokens:
        raise ValueError(
            f"ids stand for {id_tokens} tokens and a KV block holds {block_tokens}; one has to divide the other, for blocks to be "
            "equal where ids are"
        )
    start, parent, chain, named = array("q"), array("q"), array("q"), array("q")
    ends = array("q")
    """The place behind each chain's last id, counted in ids from the beginning of the prompt."""
    loaded_kv = array("q")
    """The chain that each request extended or began; -1: earlier ones had all of its ids."""
    counts, knowns, sources = _first_had(chained(ids, offsets), offsets)
    rows = zip(counts, knowns, sources, prompt_tokens.tolist(), output_tokens.tolist(), strict=True)
    for count, known, source, prompt, output in rows:
        number = loaded_kv[source] if known else -1
        if known == count:
            loaded_kv.append(-1)
        else:
            if number < 0 or ends[number] != known:
                # A fork: earlier requests went on differently.
                begin = known * id_tokens // block_tokens
                before = number
                while before >= 0 and start[before] >= begin:
                    before = parent[before]
                number = len(start)
                start.append(begin)
                parent.append(before)
                ends.append(known)
            loaded_kv.append(number)
            ends[number] = count
        of_the_prompt = -(-prompt // id_tokens)
        blocks = min(count * id_tokens, prompt + output if count > of_the_prompt else prompt) // block_tokens
        while number >= 0 and start[number] >= blocks:
            number = parent[number]
        chain.append(number)
        named.append(blocks if number >= 0 else 0)
    return Contents(block_tokens, start, parent, chain, named)


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
