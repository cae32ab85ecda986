"""Rates that are measured, and the alpha and lengths that they stand for."""

from __future__ import annotations

from typing import Any

import numpy as np

from sim.theory._checks import (
    FloatArray,
    Values,
    count,
    finite,
    plain,
    probability,
)
from sim.theory.speculative.rounds import alpha_of_expected


def alpha_from_mean_length(mean_length: Values, k: Values) -> Any:
    """The i.i.d. alpha whose expected tokens per round equal *mean_length* at *k*, by bisection.

    *mean_length* lies in [1, k + 1], else ValueError; k is 1 or more.

    Source: inverse of Leviathan, equation 1.
    """
    length, n = np.broadcast_arrays(finite("mean_length", mean_length), count("k", k, at_least=1))
    wrong = (length < 1.0) | (length > n + 1.0)
    if wrong.any():
        raise ValueError(
            f"mean_length counts the target's own token and lies in [1, k + 1]; "
            f"got {length[wrong].flat[0]:g} with k = {n[wrong].flat[0]:g}"
        )
    return plain(alpha_of_expected(length, n))


def draft_acceptance_rate(mean_length: Values, k: Values) -> Any:
    """Accepted over drafted tokens: (mean acceptance length - 1) / k. It falls as k grows; it is not alpha.

    Source: vLLM's metric of that name.
    """
    return plain((finite("mean_length", mean_length) - 1.0) / count("k", k, at_least=1))


def mean_length_from_positions(rates: Values) -> Any:
    """Mean acceptance length from unconditional per-position rates: 1 + their sum over the last axis.

    Source: vLLM's mean acceptance length; linearity of expectation.
    """
    p = probability("rates", rates)
    _falling(p)
    return plain(1.0 + p.sum(axis=-1))


def unconditional_rates(conditional: Values) -> FloatArray:
    """Probability that position i is accepted, from the probabilities given that all before it were.

    Source: chain rule, cumulative product over the last axis.
    """
    return np.cumprod(probability("conditional", conditional), axis=-1)


def conditional_rates(unconditional: Values) -> FloatArray:
    """Probability that position i is accepted given that all before it were; 0 after a position never reached.

    Unconditional rates never rise with the position, else ValueError.

    Source: chain rule, ratio of neighbours.
    """
    p = probability("unconditional", unconditional)
    _falling(p)
    before = np.concatenate([np.ones((*p.shape[:-1], 1)), p[..., :-1]], axis=-1)
    return np.where(before > 0.0, p / np.where(before > 0.0, before, 1.0), 0.0)


def _falling(rates: FloatArray) -> None:
    if rates.ndim == 0:
        raise ValueError("per-position rates are an array with one entry per drafted position")
    if (np.diff(rates, axis=-1) > 0.0).any():
        raise ValueError(
            "unconditional per-position rates cannot rise with the position; unconditional_rates takes conditional ones"
        )
