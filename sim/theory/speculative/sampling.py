"""Acceptance that follows from the distributions of target and draft, and what sampling puts out."""

from __future__ import annotations

from typing import Any

import numpy as np

from sim.theory._checks import (
    FloatArray,
    Values,
    distribution,
    plain,
    positive,
)


def acceptance(target: Values, draft: Values) -> Any:
    """Acceptance probability of modified rejection sampling: sum of min(target, draft) over the last axis.

    Source: Leviathan, corollary 3.6 (alpha = 1 - D_LK); Chen, theorem 1.
    """
    q, p = _pair(target, draft)
    return plain(np.minimum(q, p).sum(axis=-1))


def naive_acceptance(target: Values, draft: Values) -> Any:
    """Probability that an independent draw from the target equals the draft's token: sum of target * draft.

    Never above the modified rule's; exact as well.

    Source: notes on the two papers, "naive" variant; collision probability.
    """
    q, p = _pair(target, draft)
    return plain((q * p).sum(axis=-1))


def one_shot_acceptance(target: Values, draft: Values) -> Any:
    """Acceptance of classic rejection sampling with M = max(target / draft), without a residual: 1 / M.

    0 where the target gives weight to a token that the draft never proposes.

    Source: Leviathan, appendix A.2.
    """
    q, p = _pair(target, draft)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(q > 0.0, p / np.where(q > 0.0, q, 1.0), np.inf)
    return plain(ratio.min(axis=-1))


def lenient_acceptance(target: Values, draft: Values, b: Values) -> Any:
    """Acceptance when the uniform number is drawn from [0, b]: sum of draft * min(1, min(1, target / draft) / b).

    For b <= 1 this is the sum of min(draft, target / b); for b > 1 it is the ordinary acceptance over b.

    Source: toyllm article, "Insights" (the idea); Leviathan, appendix A.5 with lenience l = b.
    """
    q, p = _pair(target, draft)
    accept = np.minimum(p, np.minimum(q, p) / positive("b", b)[..., None])
    return plain(accept.sum(axis=-1))


def lenient_output(target: Values, draft: Values, b: Values) -> FloatArray:
    """Distribution of the token that lenient sampling puts out, the residual left as in the exact rule.

    Equal to the target at b = 1, to the draft as b -> 0.

    Source: derived from toyllm, "Insights": accepted mass plus rejected mass times the residual.
    """
    q, p = _pair(target, draft)
    accept = np.minimum(p, np.minimum(q, p) / positive("b", b)[..., None])
    excess = np.maximum(q - p, 0.0)
    total = excess.sum(axis=-1, keepdims=True)
    # Equal distributions leave no residual; a rejection (b > 1) then draws from the target.
    residual = np.where(total > 0.0, excess / np.where(total > 0.0, total, 1.0), q)
    return accept + (1.0 - accept.sum(axis=-1, keepdims=True)) * residual


def lenient_distance(target: Values, draft: Values, b: Values) -> Any:
    """Total-variation distance between lenient output and target; for b <= 1 it equals the gain in acceptance.

    Source: derived from the lenient output distribution.
    """
    q, _ = _pair(target, draft)
    return plain(0.5 * np.abs(lenient_output(target, draft, b) - q).sum(axis=-1))


def _pair(target: Values, draft: Values) -> tuple[FloatArray, FloatArray]:
    q, p = distribution("target", target), distribution("draft", draft)
    if q.shape[-1] != p.shape[-1]:
        raise ValueError(
            f"target and draft share one vocabulary; got {q.shape[-1]} and {p.shape[-1]} entries on the last axis"
        )
    return q, p
