"""Gains of drafting in time, arithmetic and memory traffic, and how many tokens to draft."""

from __future__ import annotations

from typing import Any

import numpy as np

from sim.theory._checks import (
    FloatArray,
    Values,
    count,
    non_negative,
    plain,
    positive,
    probability,
)
from sim.theory.speculative.rounds import alpha_of_expected, expected_tokens, one_k


def speedup(alpha: Values, k: Values, c: Values) -> Any:
    """Expected wall-time speed-up over plain decoding: expected tokens / (k c + 1).

    Assumes i.i.d. acceptance and a verify pass that costs one plain step (memory-bound).

    Source: Leviathan, theorem 3.8.
    """
    return plain(np.asarray(expected_tokens(alpha, k)) / (count("k", k) * non_negative("c", c) + 1.0))


def operations_factor(alpha: Values, k: Values, c_ops: Values = 0.0) -> Any:
    """Arithmetic done over arithmetic of plain decoding: (k c_ops + k + 1) / expected tokens.

    *c_ops* is the draft's operations per token over the target's.

    Source: Leviathan, theorem 3.11.
    """
    n = count("k", k)
    return plain((n * non_negative("c_ops", c_ops) + n + 1.0) / np.asarray(expected_tokens(alpha, k)))


def memory_reads_reduction(alpha: Values, k: Values) -> Any:
    """Factor by which reads of the target's weights and KV cache fall: once per round instead of once per token.

    Source: Leviathan, section 3.4.
    """
    return expected_tokens(alpha, k)


def improves(alpha: Values, c: Values) -> Any:
    """Whether some k beats plain decoding: alpha > c.

    Source: Leviathan, corollary 3.9.
    """
    return plain(probability("alpha", alpha) > non_negative("c", c))


def guaranteed_speedup(alpha: Values, c: Values) -> Any:
    """Speed-up that one drafted token gives, a lower bound of the best one where alpha > c: (1 + alpha) / (1 + c).

    Source: Leviathan, corollary 3.9.
    """
    return plain((1.0 + probability("alpha", alpha)) / (1.0 + non_negative("c", c)))


def break_even_alpha(k: Values, c: Values) -> Any:
    """Acceptance at which *k* drafted tokens neither gain nor lose: the root of expected tokens = 1 + k c.

    0 where k = 0 or c = 0; NaN where c > 1 and k > 0, since even full acceptance then loses.

    Source: Leviathan, theorem 3.8, set to 1.
    """
    n, ratio = np.broadcast_arrays(count("k", k), non_negative("c", c))
    lost = (ratio > 1.0) & (n > 0)
    target = 1.0 + n * np.where(lost, 0.0, ratio)
    return plain(np.where(lost, np.nan, alpha_of_expected(target, n)))


def optimal_k(alpha: Values, c: Values, k_max: int = 1024) -> Any:
    """The k with the largest speed-up; the smaller one of a tie; *k_max* where the speed-up still rises there.

    Scans until the speed-up falls, which ends at the optimum because it has a single peak in k: one more token pays
    while alpha^(k+1) (1 + k c) > c E(k). With c = 0 and alpha > 0 it never falls.

    Source: Leviathan, section 3.5.
    """
    top = one_k(k_max)
    a, ratio = np.broadcast_arrays(probability("alpha", alpha), non_negative("c", c))
    best = np.zeros(a.shape, dtype=np.int64)
    rising = np.ones(a.shape, dtype=bool)
    expected, power = np.ones(a.shape), a.copy()
    for k in range(top):
        # The margin keeps an exact tie (alpha 0.5, c 0.2: k = 1 and 2) from being decided by rounding.
        rising &= power * (1.0 + k * ratio) > ratio * expected * (1.0 + 1e-12)
        if not rising.any():
            break
        best[rising] = k + 1
        expected, power = expected + power, power * a
    # alpha^k underflows long after a free draft has stopped mattering; it still never hurts.
    best[(ratio == 0.0) & (a > 0.0)] = top
    return plain(best)


def best_speedup(alpha: Values, c: Values, k_max: int = 1024) -> Any:
    """The speed-up at the optimal k.

    Source: Leviathan, section 3.5.
    """
    return speedup(alpha, optimal_k(alpha, c, k_max), c)


def measured_rate_speedup(r_prime: Values, k: Values, draft_s: Values, target_s: Values) -> Any:
    """Speed-up from a measured rate r' = tokens per round / (k + 1): r' (k + 1) t_target / (k t_draft + t_target).

    Source: toyllm article, "Complexity Analysis"; r'(k + 1) is Leviathan's expected tokens.
    """
    tokens, loop = _tokens_per_round(r_prime, k), _loop_s(k, draft_s, target_s)
    return plain(tokens * positive("target_s", target_s) / loop)


def time_for_tokens_s(
    n_tokens: Values,
    r_prime: Values,
    k: Values,
    draft_s: Values,
    target_s: Values,
) -> Any:
    """Seconds for *n_tokens* at a measured rate r': n / (r' (k + 1)) rounds of k t_draft + t_target.

    Source: toyllm article, "Complexity Analysis".
    """
    rounds = non_negative("n_tokens", n_tokens) / _tokens_per_round(r_prime, k)
    return plain(rounds * _loop_s(k, draft_s, target_s))


def _tokens_per_round(r_prime: Values, k: Values) -> FloatArray:
    n = count("k", k)
    tokens = probability("r_prime", r_prime) * (n + 1.0)
    if (tokens < 1.0 - 1e-12).any():
        raise ValueError(
            f"r_prime is tokens per round over k + 1 and at least 1 / (k + 1); got {r_prime!r} with k = {k!r}"
        )
    return tokens


def _loop_s(k: Values, draft_s: Values, target_s: Values) -> FloatArray:
    return count("k", k) * non_negative("draft_s", draft_s) + positive("target_s", target_s)
