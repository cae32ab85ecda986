"""Trees of candidates: which paths there are, how likely each is to be right, and acceptance in a tree."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Ge

from policies.acceptance.checks import drafted, is_whole, probabilities
from policies.acceptance.draws import ROUND_STREAM, count_below, draws, survival_thresholds
from policies.acceptance.process import FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A tree of candidates verified at once, as Medusa's heads and EAGLE make them: `nodes`, `branching` or `paths` says which.

    k is the depth: a smaller k keeps the nodes down to that level.
    Cai et al., Medusa, arXiv 2401.10774, sections 2.1.2 and 2.3.3.
    """

    finite: ClassVar[bool] = False
    accuracies: tuple[tuple[float, ...], ...]
    """Rates by head, then by rank of the guess, given that the guesses before it on the path were right; those of a head fall, and
    add up to 1 at most."""
    nodes: Annotated[int, Ge(1)] | None = None
    """The best tree of that many nodes, root not counted."""
    branching: tuple[int, ...] | None = None
    """A dense tree: children of every node, level by level."""
    paths: tuple[tuple[int, ...], ...] | None = None
    """An explicit tree: each node as ranks of guesses from the root."""
    _mass: tuple[float, ...] = field(init=False, repr=False, compare=False)
    _sizes: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "accuracies", check_accuracies(self.accuracies))
        given = [name for name in ("nodes", "branching", "paths") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of nodes, branching and paths; got {given or 'none'}")
        if self.nodes is not None:
            tree = greedy_tree(self.accuracies, self.nodes)
        elif self.branching is not None:
            object.__setattr__(self, "branching", tuple(self.branching))
            tree = dense_tree(self.branching)
        else:
            tree = tuple(map(tuple, self.paths or ()))
            object.__setattr__(self, "paths", tree)
            if not tree:
                raise ValueError("paths is empty; a tree has at least one node besides its root")
            _check_paths(tree)
        products = path_products(self.accuracies, tree)
        depth = max(map(len, tree))
        levels = [[m for path, m in zip(tree, products, strict=True) if len(path) == d] for d in range(1, depth + 1)]
        object.__setattr__(self, "_mass", tuple(min(math.fsum(level), 1.0) for level in levels))
        object.__setattr__(self, "_sizes", tuple(map(len, levels)))

    @property
    def depth(self) -> int:
        """Levels below the root: the largest k."""
        return len(self._mass)

    def accepted(self, request_id: int, round_start: int, n_rounds: int, k: int, seed: int) -> IntArray:
        thresholds = survival_thresholds(self._levels(k))
        return count_below(draws(seed, ROUND_STREAM, request_id, round_start, n_rounds), thresholds)

    def per_position(self, k: int) -> FloatArray:
        return np.array(self._levels(k))

    def mean_length(self, k: int) -> float:
        """Mean acceptance length: 1 + the sum of path products over the nodes down to level *k*."""
        return 1.0 + math.fsum(self._levels(k))

    def width(self, k: int) -> int:
        """Query tokens verified per sequence: the nodes down to level *k* and the root."""
        return 1 + sum(self._sizes[: len(self._levels(k))])

    def _levels(self, k: int) -> tuple[float, ...]:
        if drafted(k) > self.depth:
            raise ValueError(f"k = {k} is deeper than the tree, which has {self.depth} levels; lower k or add nodes")
        return self._mass[:k]


def check_accuracies(accuracies: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    """Head accuracies as tuples; ValueError unless each head's fall and sum to at most 1."""
    heads = tuple(probabilities(f"accuracies of head {h}", head) for h, head in enumerate(accuracies))
    if not heads:
        raise ValueError("accuracies is empty; give one list of accuracies per head")
    for h, head in enumerate(heads):
        if any(b > a for a, b in pairwise(head)):
            raise ValueError(f"accuracies of head {h} are by rank of the guess and cannot rise; got {list(head)}")
        if math.fsum(head) > 1.0 + 1e-9:
            raise ValueError(
                f"guesses of head {h} exclude each other, so they sum to 1 at most; got {math.fsum(head):g}"
            )
    return heads


def path_products(accuracies: Sequence[Sequence[float]], paths: Iterable[Sequence[int]]) -> list[float]:
    """For each path, the probability that all its guesses are right: the product of accuracies along it."""
    heads = check_accuracies(accuracies)
    products: list[float] = []
    for path in paths:
        if not 1 <= len(path) <= len(heads):
            raise ValueError(f"path {tuple(path)} has {len(path)} levels; there are {len(heads)} heads")
        for h, i in enumerate(path):
            if not 0 <= i < len(heads[h]):
                raise ValueError(
                    f"path {tuple(path)} takes guess {i} of head {h}, which has {len(heads[h])} accuracies"
                )
        products.append(math.prod(heads[h][i] for h, i in enumerate(path)))
    return products


def greedy_tree(accuracies: Sequence[Sequence[float]], nodes: int) -> tuple[tuple[int, ...], ...]:
    """The tree of *nodes* nodes (root not counted) with the largest sum of path products, in the order of growth.

    A node's first child and its next sibling never have a larger product than itself, so taking the best open node each
    time is optimal; ties go to the shallower, then leftmost. Medusa, section 2.3.3.
    """
    heads = check_accuracies(accuracies)
    possible = sum(math.prod(map(len, heads[: d + 1])) for d in range(len(heads)))
    if not is_whole(nodes) or nodes > possible:
        raise ValueError(f"nodes is a whole number in [1, {possible}] with these accuracies; got {nodes!r}")
    heap: list[tuple[float, int, tuple[int, ...]]] = [(-heads[0][0], 1, (0,))]
    tree: list[tuple[int, ...]] = []
    while len(tree) < nodes:
        negative, depth, path = heapq.heappop(heap)
        tree.append(path)
        if depth < len(heads):
            heapq.heappush(heap, (negative * heads[depth][0], depth + 1, (*path, 0)))
        if path[-1] + 1 < len(heads[depth - 1]):
            sibling = (*path[:-1], path[-1] + 1)
            heapq.heappush(heap, (-math.prod(heads[h][i] for h, i in enumerate(sibling)), depth, sibling))
    return tuple(tree)


def dense_tree(branching: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """All paths of a tree in which every node of level i has branching[i] children. Medusa, section 2.1.2."""
    if not branching or not all(map(is_whole, branching)):
        raise ValueError(f"branching is a list of whole numbers, 1 or more; got {list(branching)}")
    paths: list[tuple[int, ...]] = []
    level: list[tuple[int, ...]] = [()]
    for size in branching:
        level = [(*path, i) for path in level for i in range(size)]
        paths += level
    return tuple(paths)


def _check_paths(paths: Sequence[tuple[int, ...]]) -> None:
    known = set(paths)
    if len(known) != len(paths):
        raise ValueError("paths name a node twice")
    for path in paths:
        if len(path) > 1 and path[:-1] not in known:
            raise ValueError(f"path {path} hangs in the air: its parent {path[:-1]} is not in the tree")
