"""Lengths of prompts and outputs: distributions of whole numbers of tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workloads.columns import IntArray, int_column
from workloads.streams import CountFromZero, FromZero, check_bounds, check_positive, check_range

FloatArray = NDArray[np.float64]


class LengthDistribution(Protocol):
    """A distribution of the number of tokens of prompts or outputs."""

    def sample(self, rng: np.random.Generator, n: int, /) -> IntArray:
        """*n* lengths in tokens, int64 from 0."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """The same number for all."""

    tokens: CountFromZero

    def __post_init__(self) -> None:
        check_bounds(self)

    def sample(self, rng: np.random.Generator, n: int, /) -> IntArray:
        return np.full(n, self.tokens, dtype=np.int64)


NO_OUTPUT = Fixed(tokens=0)
"""The output of single-pass models, whose answer is one pass over the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform:
    """Whole numbers from `min_tokens` to `max_tokens`, both included, all equally likely."""

    min_tokens: int
    max_tokens: int

    def __post_init__(self) -> None:
        check_range(self.min_tokens, self.max_tokens)

    def sample(self, rng: np.random.Generator, n: int, /) -> IntArray:
        return rng.integers(self.min_tokens, self.max_tokens, size=n, endpoint=True, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """exp of a normal(mu, sigma), rounded to whole tokens and clipped to the given range.

    Clipping moves the mean; without it the mean is exp(mu + sigma^2 / 2) and the median exp(mu), in tokens.
    """

    mu: float
    sigma: FromZero
    min_tokens: int = 1
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.mu):
            raise ValueError(f"mu is a finite number; got {self.mu!r}")
        check_bounds(self)
        check_range(self.min_tokens, self.max_tokens)

    @classmethod
    def from_mean_median(
        cls, *, mean: float, median: float, min_tokens: int = 1, max_tokens: int | None = None
    ) -> LogNormal:
        """The lognormal with this mean and median in tokens; the mean cannot be below the median."""
        check_positive(median, "median")
        check_positive(mean, "mean")
        if mean < median:
            raise ValueError(f"a lognormal's mean is at least its median; got mean {mean!r} and median {median!r}")
        sigma = math.sqrt(2 * math.log(mean / median))
        return cls(mu=math.log(median), sigma=sigma, min_tokens=min_tokens, max_tokens=max_tokens)

    def sample(self, rng: np.random.Generator, n: int, /) -> IntArray:
        top = self.max_tokens if self.max_tokens is not None else 2**53
        logs = np.minimum(self.mu + self.sigma * rng.standard_normal(n), math.log(2**53))
        return np.clip(np.rint(np.exp(logs)), self.min_tokens, top).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Zipf:
    """Whole numbers from min to max with probability of min + k in proportion to (k + 1)^-theta.

    SARATHI draws total lengths so, with theta 0.4 on 1K to 4K (arXiv 2308.16369, section 5.3).
    """

    theta: FromZero
    min_tokens: int
    max_tokens: int

    def __post_init__(self) -> None:
        check_bounds(self)
        check_range(self.min_tokens, self.max_tokens)

    def sample(self, rng: np.random.Generator, n: int, /) -> IntArray:
        weight = np.arange(1, self.max_tokens - self.min_tokens + 2, dtype=float) ** -self.theta
        below = np.cumsum(weight)
        drawn = np.searchsorted(below, rng.random(n) * below[-1], side="right")
        return np.minimum(self.min_tokens + drawn, self.max_tokens).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Empirical:
    """Lengths with the given quantiles, straight lines between them, rounded to whole tokens.

    `probabilities` rise from 0 to 1 and `tokens` do not fall. With *stratified*, n draws take one from each
    n-th of the distribution in random order, so that every sample has nearly these quantiles itself; a larger
    sample then is not the smaller one with more at the end.
    """

    probabilities: tuple[float, ...]
    tokens: tuple[float, ...]
    stratified: bool = False

    def __post_init__(self) -> None:
        p = np.asarray(self.probabilities, dtype=float)
        q = np.asarray(self.tokens, dtype=float)
        object.__setattr__(self, "probabilities", tuple(p.tolist()))
        object.__setattr__(self, "tokens", tuple(q.tolist()))
        if len(p) < 2 or len(p) != len(q):
            raise ValueError(f"quantiles are at least two pairs; got {len(p)} probabilities and {len(q)} tokens")
        if not (p[0] == 0 and p[-1] == 1 and np.all(np.diff(p) > 0)):
            raise ValueError(f"probabilities rise from 0 to 1; got {self.probabilities!r}")
        if not (np.all(np.isfinite(q)) and q[0] >= 0 and np.all(np.diff(q) >= 0)):
            raise ValueError(f"tokens at the quantiles are finite, from 0 and do not fall; got {self.tokens!r}")

    def sample(self, rng: np.random.Generator, n: int, /) -> IntArray:
        u = (rng.permutation(n) + rng.random(n)) / n if self.stratified else rng.random(n)
        return np.rint(np.interp(u, self.probabilities, self.tokens)).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resampled:
    """Draws with replacement from lengths that were seen, each equally likely."""

    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        values = int_column(self.tokens, "tokens")
        if len(values) == 0:
            raise ValueError("an empirical distribution needs at least one length; got none")
        object.__setattr__(self, "tokens", tuple(values.tolist()))

    def sample(self, rng: np.random.Generator, n: int, /) -> IntArray:
        return np.array(self.tokens, dtype=np.int64)[rng.integers(0, len(self.tokens), size=n)]


def split_total(total_tokens: ArrayLike, prompt_per_output: float) -> tuple[IntArray, IntArray]:
    """Prompt and output tokens of requests known by their sum and the ratio P:D of prompt to output.

    Output is the sum / (1 + ratio), rounded, at least 1; the prompt is the rest (SARATHI's P:D ratio).
    """
    check_positive(prompt_per_output, "prompt_per_output")
    total = int_column(total_tokens, "total_tokens", minimum=2)
    output = np.clip(np.rint(total / (1 + prompt_per_output)), 1, total - 1).astype(np.int64)
    return total - output, output
