"""Acceptance rates that were published, by name, with where each was read."""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import dataclass
from typing import Literal

import numpy as np

from policies.acceptance.chains import PerPosition


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Rates of the drafted positions, what they were measured with, and their source."""

    rates: tuple[float, ...]
    model: str
    method: str
    """As `policies.decoding.Method` calls it, and otherwise as its source does."""
    source: str
    kind: Literal["conditional", "unconditional"] = "conditional"

    @property
    def acceptance(self) -> PerPosition:
        """The rates as a process; a K beyond them is refused."""
        return PerPosition(rates=self.rates, kind=self.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Mean acceptance lengths by the number of drafted tokens, as a benchmark published them."""

    lengths: tuple[float, ...]
    """Tokens a round, the target's own counted, with 1, 2, ... drafted tokens."""
    model: str
    method: str
    source: str

    def published(self) -> Published:
        """The rates whose lengths are nearest to those of the curve, by least squares; the source says how near."""
        rates, off = rates_of(self.lengths)
        source = f"{self.source}; rates by position fitted to it, {off:.2f} tokens off at most"
        return Published(rates=rates, model=self.model, method=self.method, source=source)


@functools.cache
def rates_of(lengths: tuple[float, ...]) -> tuple[tuple[float, ...], float]:
    """Conditional rates by position, and by how many tokens their mean lengths are off at most; ValueError for lengths that rounds
    of 1, 2, ... drafted tokens cannot have.

    A position is reached no more often than the one before it, and a token more never shortens a round: a curve that bends up or
    falls, as measured ones do by chance, is not met exactly.
    """
    wrong = [n for n, each in enumerate(lengths, start=1) if not 1 <= each <= n + 1]
    if wrong or not lengths:
        found = f"; got {lengths[wrong[0] - 1]:g} with {wrong[0]}" if wrong else ""
        raise ValueError(
            f"give the mean length for 1, 2, ... drafted tokens, each from 1 to one more than these{found}"
        )
    from scipy.optimize import nnls  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

    k = np.arange(1, len(lengths) + 1)
    # Of the rounds, share[i] accept i + 1 drafted tokens where as many are drafted; the rest, 1 - sum, accept none.
    share = np.asarray(nnls(np.minimum.outer(k, k).astype(float), np.array(lengths) - 1.0)[0], float)
    reached = np.minimum(np.cumsum(share[::-1])[::-1], 1.0)
    off = float(np.abs(1.0 + np.cumsum(reached) - lengths).max())
    before = np.concatenate([[1.0], reached[:-1]])
    rates = np.divide(reached, before, out=np.zeros_like(reached), where=before > 0)
    return tuple(rates.tolist()), off


_REPORT = "DeepSeek-V3 technical report, arXiv 2412.19437, section 5.4.3: 85 to 90 % of second tokens are accepted across topics"
_GOLDEN = "InferenceX's golden acceptance lengths (SemiAnalysisAI/InferenceX at 843c6254, Apache-2.0)"
PUBLISHED: dict[str, Published] = {
    name: Published(rates=(rate,), model="deepseek-v3", method="mtp", source=f"{_REPORT}; {which}")
    for name, rate, which in (
        ("deepseek-v3", 0.875, "the middle of the range"),
        ("deepseek-v3-low", 0.85, "its lower end"),
        ("deepseek-v3-high", 0.90, "its upper end"),
    )
}
"""Published rates."""
CURVES: dict[str, Curve] = {
    name: Curve(
        lengths=lengths,
        model=re.split("-(mtp|eagle3|dspark)", name)[0],
        method="eagle" if "-eagle3" in name else "mtp" if "-mtp" in name else "dspark",
        source=f"{_GOLDEN}, run {run}: tokens a round on SPEED-Bench's coding prompts, vLLM, B300",
    )
    for name, run, lengths in (
        ("deepseek-v4-pro-mtp", 27180633016, (1.92, 2.61, 2.97, 3.00, 3.10, 3.16, 3.00, 3.11)),
        ("deepseek-v4-pro-mtp-thinking", 27180633016, (1.79, 2.27, 2.49, 2.54, 2.55, 2.55, 2.54, 2.58)),
        ("deepseek-v4-pro-dspark-thinking", 31742838308, (1.84, 2.51, 3.01, 3.36, 3.61, 3.77, 3.73, 3.47)),
        ("glm-5.2-mtp-thinking", 28058352479, (1.84, 2.50, 2.99, 3.33, 3.61, 3.78, 3.91, 4.06)),
        ("kimi-k2.5-eagle3", 28122195822, (1.80, 2.33, 2.75, 3.06, 3.25, 3.43, 3.46, 3.51)),
        ("kimi-k2.5-eagle3-thinking", 28122195822, (1.83, 2.43, 2.88, 3.24, 3.46, 3.62, 3.71, 3.77)),
        ("minimax-m3-eagle3", 28061204145, (1.84, 2.52, 2.93, 3.41, 3.59, 3.57, 3.85, 4.06)),
        ("minimax-m3-eagle3-thinking", 28061204145, (1.78, 2.38, 2.83, 3.11, 3.35, 3.45, 3.53, 3.74)),
        ("minimax-m3-eagle3-gqa", 29784780049, (1.83, 2.46, 2.97, 3.29, 3.72, 3.76, 3.75, 3.93)),
        ("minimax-m3-eagle3-gqa-thinking", 29784780049, (1.79, 2.39, 2.78, 3.02, 3.21, 3.30, 3.52, 3.51)),
    )
}
"""Published curves. Names begin with the model, and end in the method, and in `thinking` where the model reasoned before it
answered."""


def published(name: str) -> Published:
    """The rates called *name*; ValueError with the nearest names for another."""
    if name in CURVES:
        return CURVES[name].published()
    found = PUBLISHED.get(name)
    if found is None:
        near = difflib.get_close_matches(name.lower(), [*PUBLISHED, *CURVES], n=1)
        meant = f"did you mean {near[0]}?" if near else f"known are {', '.join([*PUBLISHED, *CURVES])}"
        raise ValueError(f"{name!r} is not a published acceptance; {meant}")
    return found
