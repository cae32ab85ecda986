"""What requests read and write, as far as a workload says: who begins as whom, in KV blocks.

Contents form a tree. It is kept as *chains*: runs of blocks behind each other that fork nowhere but where another chain begins. A
chain has a number, the chain that it leaves and the block at which it does. The content of a request is a place on one chain: the
blocks below it, on this chain and on those that it left, are named; what comes after them is the request's own.
"""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


class Contents:
    """The contents of a workload's requests in blocks of one size."""

    __slots__ = ("block_tokens", "chain", "named", "parent", "start")

    def __init__(
        self, block_tokens: int, start: array[int], parent: array[int], chain: array[int], named: array[int]
    ) -> None:
        self.block_tokens = block_tokens
        self.start = start
        """Of each chain, its first block, counted from the beginning of the prompt ..."""
        self.parent = parent
        """... and the chain whose blocks come before; -1: none."""
        self.chain = chain
        """Of each request, the chain that its named blocks end on; -1: it has none."""
        self.named = named
        """Of each request, full blocks of prompt and output whose content the workload names."""


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
    """Of each chain the place behind its last id."""
    nodes, known_ids = _nodes(ids, offsets)
    chain_of = array("q", bytes(8 * (int(nodes.max(initial=-1)) + 1)))
    """Of each node; a node is an id with all that come before it."""
    bounds = offsets.tolist()
    columns = zip(
        prompt_tokens.tolist(), output_tokens.tolist(), np.diff(offsets).tolist(), known_ids.tolist(), strict=True
    )
    for row, (prompt, output, n, known) in enumerate(columns):
        first = bounds[row]
        number = chain_of[nodes[first + known - 1]] if known else -1
        if known < n:
            if number < 0 or ends[number] != known:
                # A fork: whoever was here before went on differently.
                begin = known * id_tokens // block_tokens
                before = number
                while before >= 0 and start[before] >= begin:
                    before = parent[before]
                number = len(start)
                start.append(begin)
                parent.append(before)
                ends.append(known)
            at = int(nodes[first + known])
            chain_of[at : at + n - known] = array("q", [number]) * (n - known)
            ends[number] = n
        blocks = min(n * id_tokens, prompt + output if n > -(-prompt // id_tokens) else prompt) // block_tokens
        while number >= 0 and start[number] >= blocks:
            number = parent[number]
        chain.append(number)
        named.append(blocks if number >= 0 else 0)
    return Contents(block_tokens, start, parent, chain, named)


def _nodes(ids: IntArray, offsets: IntArray) -> tuple[IntArray, IntArray]:
    """The node of every id, numbered as they are first met, and of each request how many ids lead through nodes met before."""
    n = len(ids)
    if not n:
        return ids, np.zeros(len(offsets) - 1, np.int64)
    before = np.concatenate(([-1], ids[:-1]))
    starts = offsets[:-1][offsets[:-1] < offsets[1:]]
    before[starts] = -1
    _, first, which = np.unique(ids, return_index=True, return_inverse=True)
    if (before == before[first][which]).all():
        # As in traces whose ids are hashes of all that comes before: each stands behind the same one wherever it is.
        order = np.empty(len(first), np.int64)
        order[np.argsort(first, kind="stable")] = np.arange(len(first))
        nodes = order[which]
    else:
        nodes = np.empty(n, np.int64)
        after: dict[tuple[int, int], int] = {}
        listed, bounds = ids.tolist(), offsets.tolist()
        for row in range(len(bounds) - 1):
            node = -1
            for at in range(bounds[row], bounds[row + 1]):
                node = nodes[at] = after.setdefault((node, listed[at]), len(after))
    new = np.zeros(n + 1, np.int64)
    new[1:] = np.cumsum(np.concatenate(([True], nodes[1:] > np.maximum.accumulate(nodes)[:-1])))
    return nodes, np.diff(offsets) - (new[offsets[1:]] - new[offsets[:-1]])
