"""Next-token distributions: temperature, top-k and nucleus filtering, and Markov models made of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.floating[Any]]
IntArray: TypeAlias = npt.NDArray[np.int64]


def filtered(
    probabilities: npt.ArrayLike,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> FloatArray:
    """*probabilities* (vocabulary on the last axis) as a sampler uses them, in this order.

    Temperature raises them to 1 / temperature; 0 is greedy, all weight on the most probable token, the first of a tie.
    *top_k* keeps that many, *top_p* the fewest of the most probable ones that reach this mass. Ties go to the smaller
    index; the rest is normalised.
    """
    p = np.array(probabilities, dtype=np.float64)
    if p.ndim == 0 or p.shape[-1] == 0 or not np.isfinite(p).all() or (p < 0.0).any() or (p.sum(axis=-1) <= 0.0).any():
        raise ValueError("probabilities are finite, 0 or more, and sum to more than 0 along the last axis")
    if not 0.0 <= temperature < np.inf:
        raise ValueError(f"temperature is 0 (greedy) or more; got {temperature!r}")
    if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1):
        raise ValueError(f"top_k is a whole number, 1 or more; got {top_k!r}")
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p is a mass in (0, 1]; got {top_p!r}")
    if temperature == 0.0:
        best = p.argmax(axis=-1)
        return (np.arange(p.shape[-1]) == best[..., None]).astype(np.float64)
    if temperature != 1.0:
        with np.errstate(divide="ignore"):
            logits = np.log(p) / temperature
        p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    if top_k is None and top_p is None:
        return p
    order = np.argsort(-p, axis=-1, kind="stable")
    ranked = np.take_along_axis(p, order, axis=-1)
    if top_k is not None:
        ranked[..., top_k:] = 0.0
        ranked /= ranked.sum(axis=-1, keepdims=True)
    if top_p is not None:
        before = np.cumsum(ranked, axis=-1) - ranked
        # A mass reached up to rounding is reached: 0.5 + 0.3 is not short of 0.8.
        ranked[before >= top_p - 1e-12] = 0.0
        ranked /= ranked.sum(axis=-1, keepdims=True)
    np.put_along_axis(p, order, ranked, axis=-1)
    return p


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Markov:
    """A language model that looks at the last *order* tokens.

    probabilities[s] is the next-token distribution in state s, shape (vocabulary ** order, vocabulary). The state is
    the last *order* tokens as digits in base vocabulary, the newest the lowest digit. Order 0 knows one state.
    """

    order: int
    probabilities: FloatArray
    cumulative: FloatArray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        p = np.array(self.probabilities, dtype=np.float64, ndmin=2)
        if self.order < 0 or p.ndim != 2 or p.shape[0] != p.shape[1] ** self.order:
            raise ValueError(
                f"a model of order {self.order} has vocabulary ** order rows over the vocabulary; got shape {p.shape}"
            )
        if not np.isfinite(p).all() or (p < 0.0).any() or (np.abs(p.sum(axis=-1) - 1.0) > 1e-9).any():
            raise ValueError("every row of probabilities is 0 or more and sums to 1")
        p.flags.writeable = False
        object.__setattr__(self, "probabilities", p)
        object.__setattr__(self, "cumulative", flat_cumulative(p))

    @classmethod
    def from_distribution(cls, distribution: npt.ArrayLike) -> Markov:
        """The model with the same distribution in every position."""
        return cls(order=0, probabilities=np.array(distribution, dtype=np.float64, ndmin=2))

    @property
    def vocabulary(self) -> int:
        """Number of tokens."""
        return self.probabilities.shape[1]

    def filtered(self, *, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None) -> Markov:
        """The same model behind temperature, top-k and nucleus filtering; see :func:`filtered`."""
        rows = filtered(self.probabilities, temperature=temperature, top_k=top_k, top_p=top_p)
        return Markov(order=self.order, probabilities=rows)

    def lifted(self, order: int) -> FloatArray:
        """Rows of this model for states of a larger *order*: shape (vocabulary ** order, vocabulary)."""
        if order < self.order:
            raise ValueError(f"a model of order {self.order} cannot be told from {order} tokens")
        return np.tile(self.probabilities, (self.vocabulary ** (order - self.order), 1))

    def sample(self, state: IntArray, rng: np.random.Generator) -> IntArray:
        """One token for each state."""
        return draw(self.cumulative, self.vocabulary, state, rng)


def flat_cumulative(rows: FloatArray) -> FloatArray:
    """Cumulative sums of all rows in one ascending array, row s running from s to s + 1, for :func:`draw`."""
    cumulative = np.cumsum(rows, axis=-1)
    # Dividing by the row's end makes it exactly 1, and leaves a token of probability 0 an empty interval.
    cumulative /= cumulative[:, -1:]
    return (cumulative + np.arange(rows.shape[0])[:, None]).ravel()


def draw(cumulative: FloatArray, vocabulary: int, row: IntArray, rng: np.random.Generator) -> IntArray:
    """One token from each named row of distributions, by inversion; a token of probability 0 never comes."""
    level = np.minimum(row + rng.random(row.shape), np.nextafter(row + 1.0, 0.0))
    return np.searchsorted(cumulative, level, side="right") - row * vocabulary
