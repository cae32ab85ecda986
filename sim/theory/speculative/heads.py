"""Extra heads and trees of candidates, as in Medusa."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from policies.acceptance import dense_tree, greedy_tree, path_products
from sim.theory._checks import (
    Values,
    count,
    distribution,
    plain,
    positive,
)


def medusa_speedup(tokens_per_step: Values, overhead: Values) -> Any:
    """Speed-up of extra heads: tokens per step over (step time / plain step time).

    Source: Medusa, appendix B.1 and table 1 (acceleration rate over overhead).
    """
    return plain(positive("tokens_per_step", tokens_per_step) / positive("overhead", overhead))


def typical_acceptance_threshold(target: Values, epsilon: Values = 0.3, delta: Values = 0.09) -> Any:
    """Target probability above which a candidate is kept: min(epsilon, delta * exp(-entropy)).

    Source: Medusa, section 2.3.1; defaults of FasterDecoding/Medusa, medusa/model/utils.py.
    """
    q = distribution("target", target)
    entropy = -(q * np.log(np.where(q > 0.0, q, 1.0))).sum(axis=-1)
    return plain(np.minimum(positive("epsilon", epsilon), positive("delta", delta) * np.exp(-entropy)))


def dense_tree_nodes(branching: Sequence[int]) -> int:
    """Nodes of a tree in which every node of level i has branching[i] children, without the root.

    Source: Medusa, section 2.1.2.
    """
    sizes = count("branching", np.asarray(branching), at_least=1)
    return int(np.cumprod(sizes).sum())


def tree_mean_length(accuracies: Sequence[Sequence[float]], paths: Sequence[Sequence[int]]) -> float:
    """Mean acceptance length of a tree: 1 + the sum over its nodes of the product of accuracies along the path.

    accuracies[h][i] is the probability that the (i + 1)-th best guess of head h is right; a node is a path of such
    indices from the root.

    Source: Medusa, section 2.3.3.
    """
    return 1.0 + sum(path_products(accuracies, paths))


def sparse_tree_mean_length(accuracies: Sequence[Sequence[float]], nodes: int) -> float:
    """Mean acceptance length of the best tree of *nodes* nodes (root not counted), grown greedily.

    Source: Medusa, section 2.3.3.
    """
    return tree_mean_length(accuracies, greedy_tree(accuracies, nodes))


def dense_tree_mean_length(accuracies: Sequence[Sequence[float]], branching: Sequence[int]) -> float:
    """Mean acceptance length of a tree with branching[i] children below every node of level i.

    Source: Medusa, sections 2.1.2 and 2.3.3.
    """
    return tree_mean_length(accuracies, dense_tree(branching))
