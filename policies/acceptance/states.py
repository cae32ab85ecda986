"""Acceptance that comes in runs: two states of a Markov chain over rounds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from policies.acceptance.checks import drafted, probability
from policies.acceptance.draws import ONE, ROUND_STREAM, STATE_STREAM, draws, fresh_powers, threshold
from policies.acceptance.process import Chain, FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoState(Chain):
    """Acceptance that comes in runs: a good and a bad state, each with its alpha, as a Markov chain over rounds.

    *stay_good* and *stay_bad* are the probabilities that the next round is in the same state. The chain starts in its
    stationary distribution. Both states are visited, so neither probability is 1.
    """

    alpha_good: float
    alpha_bad: float
    stay_good: float
    stay_bad: float
    _limits: tuple[int, int, int] = field(init=False, repr=False, compare=False)
    """Thresholds of a state draw: good whatever was before, good after good, good in the first round."""

    def __post_init__(self) -> None:
        for name in ("alpha_good", "alpha_bad", "stay_good", "stay_bad"):
            probability(name, getattr(self, name))
        if self.alpha_bad > self.alpha_good:
            raise ValueError(f"alpha_bad cannot exceed alpha_good; got {self.alpha_bad!r} and {self.alpha_good!r}")
        if self.stay_good == 1.0 or self.stay_bad == 1.0:
            raise ValueError("stay_good and stay_bad are below 1: a state that is never left is Iid or BetaAlpha")
        limits = tuple(map(threshold, (1.0 - self.stay_bad, self.stay_good, self.good_share)))
        object.__setattr__(self, "_limits", limits)

    @classmethod
    def from_autocorrelation(
        cls, *, alpha_good: float, alpha_bad: float, lag1: float, at_k: int, good_share: float = 0.5
    ) -> TwoState:
        """The chain whose accepted counts at *at_k* have lag-1 autocorrelation *lag1* over rounds.

        *good_share* is the share of rounds in the good state. ValueError where the two alphas are too close for that
        much autocorrelation.
        """
        if not 0.0 < good_share < 1.0:
            raise ValueError(f"good_share is a share of rounds strictly between 0 and 1; got {good_share!r}")
        still = cls(alpha_good=alpha_good, alpha_bad=alpha_bad, stay_good=good_share, stay_bad=1.0 - good_share)
        between = still._share_between(at_k)
        if lag1 == 0.0:
            return still
        memory = lag1 / between if between > 0.0 else math.inf
        lowest = -min(good_share / (1.0 - good_share), (1.0 - good_share) / good_share)
        if not lowest <= memory < 1.0:
            raise ValueError(
                f"lag1 = {lag1:g} is out of reach: with these alphas at k = {at_k} it lies in "
                f"[{lowest * between:.4g}, {between:.4g}); move alpha_good and alpha_bad apart"
            )
        return cls(
            alpha_good=alpha_good,
            alpha_bad=alpha_bad,
            stay_good=min(max(good_share + (1.0 - good_share) * memory, 0.0), 1.0),
            stay_bad=min(max(1.0 - good_share + good_share * memory, 0.0), 1.0),
        )

    @property
    def good_share(self) -> float:
        """Stationary share of rounds in the good state."""
        leave_good, leave_bad = 1.0 - self.stay_good, 1.0 - self.stay_bad
        return leave_bad / (leave_good + leave_bad)

    def autocorrelation(self, k: int, lag: int = 1) -> float:
        """Autocorrelation of accepted counts *lag* rounds apart; 0 where the counts do not vary."""
        return self._share_between(k) * (self.stay_good + self.stay_bad - 1.0) ** lag

    def accepted(self, request_id: int, round_start: int, n_rounds: int, k: int, seed: int) -> IntArray:
        # The state of a round follows from those of all rounds before it.
        both = draws(seed, (ROUND_STREAM, STATE_STREAM), request_id, 0, round_start + n_rounds)
        own, bad = both[0, round_start:], self._is_bad(both[1])[round_start:]
        # Draws of bad rounds move up to where the bad state's thresholds lie, so that one search serves both states.
        own += bad * ONE
        at = _stacked_powers(self.alpha_good, self.alpha_bad, k).searchsorted(own, side="right")
        bad *= k
        bad += k
        bad -= at
        return bad

    def per_position(self, k: int) -> FloatArray:
        j, share = np.arange(1.0, drafted(k) + 1.0), self.good_share
        return share * self.alpha_good**j + (1.0 - share) * self.alpha_bad**j

    def _is_bad(self, u: IntArray) -> IntArray:
        # Every round's uniform number is a map of the state: to good, to bad, unchanged or (where states tend to
        # alternate) swapped. The state is the last constant map's, turned over once per swap since, so that no loop
        # over rounds is needed.
        if not u.size:
            return u
        from_bad, from_good, first = self._limits
        swapping = from_bad > from_good
        to_bad = u >= (from_bad if swapping else from_good)
        constant = to_bad | (u < (from_good if swapping else from_bad))
        # Twice the round plus the state that it sets: the running maximum is the last round that set one.
        setter = np.arange(0, 2 * u.size, 2)
        setter += to_bad
        setter *= constant
        setter[0] = u[0] >= first
        np.maximum.accumulate(setter, out=setter)
        state = setter & 1
        if swapping:
            constant[0] = True
            swaps = np.cumsum(~constant)
            state ^= (swaps - swaps[setter >> 1]) & 1
        return state

    def _share_between(self, k: int) -> float:
        """Share of the variance of accepted counts that lies between the states."""
        share = self.good_share
        (good_mean, good_var), (bad_mean, bad_var) = _moments(self.alpha_good, k), _moments(self.alpha_bad, k)
        between = share * (1.0 - share) * (good_mean - bad_mean) ** 2
        total = between + share * good_var + (1.0 - share) * bad_var
        return between / total if total > 0.0 else 0.0


@lru_cache(maxsize=4096)
def _stacked_powers(alpha_good: float, alpha_bad: float, k: int) -> IntArray:
    return np.concatenate([fresh_powers(alpha_good, k), ONE + fresh_powers(alpha_bad, k)])


def _moments(alpha: float, k: int) -> tuple[float, float]:
    """Mean and variance of accepted counts of k drafted tokens at *alpha*."""
    survival = alpha ** np.arange(1.0, drafted(k) + 1.0)
    mean = float(survival.sum())
    return mean, float((survival * (2.0 * np.arange(1.0, k + 1.0) - 1.0)).sum()) - mean**2
