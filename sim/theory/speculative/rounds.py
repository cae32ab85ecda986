"""Tokens of a round of speculative decoding at one rate of acceptance."""

from __future__ import annotations

from typing import Any

import numpy as np

from sim.theory._checks import (
    FloatArray,
    Values,
    count,
    plain,
    probability,
)


def expected_tokens(alpha: Values, k: Values) -> Any:
    """Expected tokens per round, counting the one that the target always adds: (1 - alpha^(k+1)) / (1 - alpha).

    Exact in the limits: k + 1 at alpha = 1, and 1 at alpha = 0 or k = 0.

    Source: Leviathan, equation 1.
    """
    a, n = probability("alpha", alpha), count("k", k) + 1.0
    d = 1.0 - a
    with np.errstate(divide="ignore", invalid="ignore"):
        value = -np.expm1(n * np.log1p(-d)) / d
    value = np.where(a == 1.0, n, value)
    return plain(np.where((n == 1.0) | (a == 0.0), 1.0, value))


def accepted_drafts(alpha: Values, k: Values) -> Any:
    """Expected drafted tokens accepted per round, without the target's own token: expected tokens less one.

    Source: Leviathan, equation 1, less the token that the target adds.
    """
    return plain(np.asarray(expected_tokens(alpha, k)) - 1.0)


def tokens_pmf(alpha: Values, k: int) -> FloatArray:
    """Probability of 1, 2, ..., k + 1 tokens in a round, on a new last axis of length k + 1.

    Source: Leviathan, section 3.1 (capped geometric distribution).
    """
    a, top = probability("alpha", alpha)[..., None], one_k(k)
    n = np.arange(1, top + 2)
    return np.where(n <= top, a ** (n - 1.0) * (1.0 - a), a ** float(top))


def tokens_variance(alpha: Values, k: int) -> Any:
    """Variance of the tokens of one round.

    Source: second moment of the capped geometric distribution of Leviathan, section 3.1.
    """
    pmf, n = tokens_pmf(alpha, k), np.arange(1, one_k(k) + 2)
    mean = (pmf * n).sum(axis=-1)
    return plain((pmf * (n - mean[..., None]) ** 2).sum(axis=-1))


def expected_rounds(n_tokens: int, alpha: float, k: int) -> float:
    """Expected rounds until *n_tokens* are out, the last round being cut at the end of the output.

    Renewal recursion m(n) = 1 + sum_j P(j tokens) m(n - j). It exceeds n / E by what the cut throws away, which is
    the end effect that a long-run rate leaves out.

    Source: renewal argument on the round distribution of Leviathan, section 3.1.
    """
    n, top = int(count("n_tokens", n_tokens)), one_k(k)
    pmf = tokens_pmf(float(probability("alpha", alpha)), top)
    rounds = np.zeros(n + 1)
    for left in range(1, n + 1):
        reach = min(left, top + 1)
        rounds[left] = 1.0 + float(pmf[:reach] @ rounds[left - reach : left][::-1])
    return float(rounds[n])


def oracle_tokens(alpha: Values) -> Any:
    """Expected tokens per round if an oracle drafted exactly as many as will be accepted: 1 / (1 - alpha).

    Infinite at alpha = 1.

    Source: Leviathan, section 3.5.
    """
    a = probability("alpha", alpha)
    with np.errstate(divide="ignore"):
        return plain(1.0 / (1.0 - a))


def alpha_of_expected(expected: FloatArray, k: FloatArray) -> FloatArray:
    """Root of expected_tokens(alpha, k) = expected for 1 <= expected <= k + 1; 0 where k = 0."""
    low, high = np.zeros(expected.shape), np.ones(expected.shape)
    for _ in range(60):
        middle = 0.5 * (low + high)
        below = np.asarray(expected_tokens(middle, k)) < expected
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    root = 0.5 * (low + high)
    return np.where(expected <= 1.0, 0.0, np.where(expected >= k + 1.0, 1.0, root))


def one_k(k: int) -> int:
    """*k* where a form has it as one number; ValueError for an array."""
    value = count("k", k)
    if value.ndim:
        raise ValueError(f"k is one whole number here; got an array of shape {value.shape}")
    return int(value)
