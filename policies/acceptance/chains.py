"""Drafted tokens accepted one after another, alike in all rounds of a request: by rate, position, mean length or request."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Le

from policies.acceptance.checks import drafted, is_whole, probabilities, probability
from policies.acceptance.draws import (
    ONE,
    REQUEST_STREAM,
    ROUND_STREAM,
    count_below,
    draws,
    fresh_powers,
    survival_thresholds,
)
from policies.acceptance.process import Chain, FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Iid(Chain):
    """Every drafted token is accepted with probability *alpha*, given that those before it were.

    Leviathan et al., ICML 2023, section 3.1.
    """

    alpha: float

    def __post_init__(self) -> None:
        probability("alpha", self.alpha)

    def accepted(self, request_id: int, round_start: int, n_rounds: int, k: int, seed: int) -> IntArray:
        return count_below(draws(seed, ROUND_STREAM, request_id, round_start, n_rounds), _powers(self.alpha, k))

    def per_position(self, k: int) -> FloatArray:
        return self.alpha ** np.arange(1.0, drafted(k) + 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PerPosition(Chain):
    """Acceptance that depends on the position in the round, alike in all rounds.

    *rates* holds one probability per position: conditional (given that all before it were accepted) or unconditional
    (never rising with the position). A k beyond them is refused.
    """

    rates: tuple[float, ...]
    kind: Literal["conditional", "unconditional"]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rates", probabilities("rates", self.rates))
        if self.kind not in ("conditional", "unconditional"):
            raise ValueError(f"kind is conditional or unconditional; got {self.kind!r}")
        if self.kind == "unconditional" and any(b > a for a, b in pairwise(self.rates)):
            raise ValueError(
                f"unconditional rates cannot rise with the position; got {list(self.rates)}: "
                "say kind='conditional' if each is given that those before it were accepted"
            )

    def accepted(self, request_id: int, round_start: int, n_rounds: int, k: int, seed: int) -> IntArray:
        thresholds = survival_thresholds(self._survival(k))
        return count_below(draws(seed, ROUND_STREAM, request_id, round_start, n_rounds), thresholds)

    def per_position(self, k: int) -> FloatArray:
        return np.array(self._survival(k))

    def _survival(self, k: int) -> tuple[float, ...]:
        if drafted(k) > len(self.rates):
            raise ValueError(
                f"k = {k} drafts more positions than the {len(self.rates)} that have a rate; give more rates or lower k"
            )
        return self.rates[:k] if self.kind == "unconditional" else _running_products(self.rates[:k])


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanLength(Chain):
    """I.i.d. acceptance with the alpha that gives *mean_length* tokens per round when *at_k* tokens are drafted."""

    mean: float
    at_k: int
    alpha: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not is_whole(self.at_k):
            raise ValueError(
                f"at_k is the number of drafted tokens behind the mean length, 1 or more; got {self.at_k!r}"
            )
        if not 1.0 <= self.mean <= self.at_k + 1.0:
            raise ValueError(
                f"mean length counts the target's own token and lies in [1, k + 1] = [1, {self.at_k + 1}]; "
                f"got {self.mean!r}"
            )
        object.__setattr__(self, "alpha", _alpha_of_mean_length(float(self.mean), self.at_k))

    def accepted(self, request_id: int, round_start: int, n_rounds: int, k: int, seed: int) -> IntArray:
        return count_below(draws(seed, ROUND_STREAM, request_id, round_start, n_rounds), _powers(self.alpha, k))

    def per_position(self, k: int) -> FloatArray:
        return self.alpha ** np.arange(1.0, drafted(k) + 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BetaAlpha(Chain):
    """Every request has an alpha of its own from a Beta distribution.

    ``per_position`` averages over requests that run equally many rounds.
    """

    mean: Annotated[float, Ge(0), Le(1)]
    sd: Annotated[float, Ge(0)]
    """Standard deviation; 0 gives all requests the mean."""

    def __post_init__(self) -> None:
        probability("mean", self.mean)
        if not 0.0 <= self.sd < math.inf:
            raise ValueError(f"sd is a standard deviation, 0 or more; got {self.sd!r}")
        if self.sd > 0.0 and self.sd**2 >= self.mean * (1.0 - self.mean):
            raise ValueError(
                f"sd must stay below sqrt(mean (1 - mean)) = {math.sqrt(self.mean * (1.0 - self.mean)):.4g} "
                f"for a Beta distribution; got {self.sd!r}"
            )

    def alpha_of(self, request_id: int, seed: int) -> float:
        """The alpha of one request."""
        return _beta_alpha(self.mean, self.sd, request_id, seed)

    def accepted(self, request_id: int, round_start: int, n_rounds: int, k: int, seed: int) -> IntArray:
        thresholds = fresh_powers(self.alpha_of(request_id, seed), k)
        return count_below(draws(seed, ROUND_STREAM, request_id, round_start, n_rounds), thresholds)

    def per_position(self, k: int) -> FloatArray:
        j = np.arange(1.0, drafted(k) + 1.0)
        if self.sd == 0.0:
            return self.mean**j
        a, b = _beta_shape(self.mean, self.sd)
        return np.cumprod((a + j - 1.0) / (a + b + j - 1.0))


@lru_cache(maxsize=4096)
def _powers(alpha: float, k: int) -> IntArray:
    return fresh_powers(alpha, k)


def _running_products(rates: tuple[float, ...]) -> tuple[float, ...]:
    products: list[float] = []
    product = 1.0
    for rate in rates:
        product *= rate
        products.append(product)
    return tuple(products)


def _alpha_of_mean_length(mean: float, k: int) -> float:
    if mean == 1.0:
        return 0.0
    if mean == k + 1.0:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        if sum(middle**j for j in range(k + 1)) < mean:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


@lru_cache(maxsize=65536)
def _beta_alpha(mean: float, sd: float, request_id: int, seed: int) -> float:
    if sd == 0.0:
        return mean
    from scipy.special import betaincinv  # pyright: ignore[reportMissingTypeStubs]

    u = (int(draws(seed, REQUEST_STREAM, request_id, 0, 1)[0]) + 0.5) / ONE
    return float(betaincinv(*_beta_shape(mean, sd), u))


def _beta_shape(mean: float, sd: float) -> tuple[float, float]:
    size = mean * (1.0 - mean) / sd**2 - 1.0
    return mean * size, (1.0 - mean) * size
