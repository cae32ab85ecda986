"""Acceptance that follows from two distributions of the next token and a rule for taking a draft's token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, cast

import numpy as np

from policies.acceptance.chains import Iid, PerPosition
from policies.acceptance.process import Chain, FloatArray, IntArray

Rule: TypeAlias = Literal["modified_rejection", "naive_match", "lenient"]
RULES: tuple[Rule, ...] = ("modified_rejection", "naive_match", "lenient")


@dataclass(frozen=True, slots=True, kw_only=True)
class FromDistributions(Chain):
    """Acceptance that follows from the target's and the draft's next-token probabilities.

    *target* and *draft* are one distribution each (the same at every position), or one per drafted position. *rule* is
    modified_rejection (sum of min(q, p)), naive_match (sum of q p) or lenient (uniform number from [0, b]).
    Leviathan et al., ICML 2023, corollary 3.6; for lenience, its appendix A.5.
    """

    target: Sequence[Sequence[float]] | Sequence[float]
    draft: Sequence[Sequence[float]] | Sequence[float]
    rule: Rule = "modified_rejection"
    b: float | None = None
    rates: tuple[float, ...] = field(init=False, repr=False, compare=False)
    _everywhere: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        q, p = _distributions("target", self.target), _distributions("draft", self.draft)
        if q.shape != p.shape:
            raise ValueError(
                f"target and draft share one vocabulary and as many positions; got shapes {q.shape} and {p.shape}"
            )
        check_rule(self.rule, self.b)
        both = np.minimum(q, p)
        if self.rule == "naive_match":
            rates = (q * p).sum(axis=-1)
        else:
            rates = np.minimum(p, both / (1.0 if self.b is None else self.b)).sum(axis=-1)
        for name, rows in (("target", q), ("draft", p)):
            lists: list[list[float]] = np.atleast_2d(rows).tolist()
            object.__setattr__(self, name, tuple(tuple(row) for row in lists))
        object.__setattr__(self, "rates", tuple(np.clip(np.atleast_1d(rates), 0.0, 1.0).tolist()))
        object.__setattr__(self, "_everywhere", len(self.rates) == 1)

    @property
    def alpha(self) -> float:
        """The acceptance probability, where it is the same at every position."""
        if not self._everywhere:
            raise ValueError("these distributions differ by position and have no single alpha; use rates")
        return self.rates[0]

    def accepted(self, request_id: int, round_start: int, n_rounds: int, k: int, seed: int) -> IntArray:
        return self._process(k).accepted(request_id, round_start, n_rounds, k, seed)

    def per_position(self, k: int) -> FloatArray:
        return self._process(k).per_position(k)

    def _process(self, k: int) -> Iid | PerPosition:
        return Iid(alpha=self.rates[0]) if self._everywhere else PerPosition(rates=self.rates, kind="conditional")


def check_rule(rule: str, b: float | None) -> None:
    """ValueError unless *rule* is known and *b* is given for lenient sampling, and only for it."""
    if rule not in RULES:
        raise ValueError(f"rule is one of {', '.join(RULES)}; got {rule!r}")
    if rule == "lenient" and (b is None or not 0.0 < b < math.inf):
        raise ValueError(f"rule lenient needs b > 0, the upper end of the uniform number; got {b!r}")
    if rule != "lenient" and b is not None:
        raise ValueError(f"b belongs to rule lenient; got b = {b!r} with rule {rule}")


def _distributions(name: str, values: Sequence[Sequence[float]] | Sequence[float]) -> FloatArray:
    try:
        array = np.asarray(cast("Sequence[float]", values), dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name} is one distribution or one per position, all over one vocabulary") from None
    if array.ndim not in (1, 2) or array.shape[-1] == 0:
        raise ValueError(f"{name} is one distribution or one per position; got an array of shape {array.shape}")
    if not (np.isfinite(array).all() and (array >= 0.0).all()):
        raise ValueError(f"{name} holds probabilities of 0 or more")
    sums = np.atleast_1d(array.sum(axis=-1))
    if (np.abs(sums - 1.0) > 1e-9).any():
        raise ValueError(f"{name} must sum to 1; got {float(sums[np.abs(sums - 1.0) > 1e-9][0]):g}")
    return array
