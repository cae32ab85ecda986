"""Drafted tokens that a round of speculative decoding accepts: random processes with addressable draws.

The draw of a round is one number that depends on (seed, request, round) alone: neither the batch, nor the schedule, nor
k moves it. A round that accepts n of 8 drafted tokens accepts min(n, k) of k, so that two values of k, two schedulers
and two machines are compared on the same draws.

Each process is a frozen value with

* ``accepted(request_id, round_start, n_rounds, k, seed)``: drafted tokens accepted in rounds round_start,
  round_start + 1, ... as int64, each in [0, k];
* ``per_position(k)``: unconditional probability that position 1, ..., k is accepted, averaged over requests and rounds;
* ``mean_length(k)``: mean acceptance length, 1 + their sum;
* ``width(k)``: query tokens that the target verifies per sequence, k + 1 for a chain, nodes + 1 for a tree.
"""

from policies.acceptance.chains import BetaAlpha, Iid, MeanLength, PerPosition
from policies.acceptance.distributions import FromDistributions, Rule, check_rule
from policies.acceptance.process import Acceptance, Chain
from policies.acceptance.published import CURVES, PUBLISHED, Curve, Published, published, rates_of
from policies.acceptance.recorded import Recorded, read_recorded
from policies.acceptance.states import TwoState
from policies.acceptance.trees import Tree, dense_tree, greedy_tree, path_products

__all__ = [
    "CURVES",
    "PUBLISHED",
    "Acceptance",
    "BetaAlpha",
    "Chain",
    "Curve",
    "FromDistributions",
    "Iid",
    "MeanLength",
    "PerPosition",
    "Published",
    "Recorded",
    "Rule",
    "Tree",
    "TwoState",
    "check_rule",
    "dense_tree",
    "greedy_tree",
    "path_products",
    "published",
    "rates_of",
    "read_recorded",
]
