"""Figures by class of service and by tenant, and how evenly service was shared out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.metrics.columns import FloatArray
from sim.metrics.requests import first_arrival_ns, slo_met

LIMITS = ("ttft_s", "tpot_s", "e2el_s")
Limits = Mapping[str, "float | FloatArray"]


def limits_of(
    requests: Mapping[str, NDArray[Any]], slo: Mapping[str, float | None] | None, classes: Sequence[Mapping[str, Any]]
) -> Limits:
    """The limits of *requests*: those of *slo* that are given, or with *classes* one a request, its class's, infinite where it has
    none. Empty where no request has any."""
    if not classes:
        return {key: value for key in LIMITS if (value := (slo or {}).get(key)) is not None}
    found: dict[str, FloatArray] = {}
    for key in LIMITS:
        given = [each["slo"].get(key) for each in classes]
        if any(limit is not None for limit in given):
            each = np.array([np.inf if limit is None else limit for limit in given])
            found[key] = each[requests["class_index"]]
    return found


def within(requests: Mapping[str, NDArray[Any]], limits: Limits) -> NDArray[np.bool_] | None:
    """Which requests met all limits and their deadline; None where there is neither. Shape [n]."""
    deadlines = requests.get("deadline_ns")
    if not limits and (deadlines is None or not (deadlines >= 0).any()):
        return None
    return slo_met(
        requests,
        ttft_limit_s=limits.get("ttft_s"),
        tpot_limit_s=limits.get("tpot_s"),
        e2el_limit_s=limits.get("e2el_s"),
    )


def service_tokens(requests: Mapping[str, NDArray[Any]], begin_ns: int, end_ns: int) -> FloatArray:
    """Tokens of prompt and output that each request was served in (*begin_ns*, *end_ns*]. Shape [n].

    A prompt counts when the first token comes (of a request that emits none: when it ends), and later tokens as if they came evenly
    from then to the end; those of a request that has not ended are left out.
    """
    first, last = requests["first_token_ns"], requests["finish_ns"]
    first = np.where(first >= 0, first, last)
    done = last >= 0

    def until(at_ns: int) -> FloatArray:
        span = np.maximum(last - first, 1)
        later = np.clip((at_ns - first) / span, 0.0, 1.0) * np.maximum(requests["emitted_tokens"] - 1, 0)
        begun = requests["prompt_tokens"] + np.minimum(requests["emitted_tokens"], 1) + later
        return np.where(done & (first <= at_ns), begun, 0.0)

    return until(end_ns) - until(begin_ns)


def jain(shares: FloatArray) -> float | None:
    """Jain's index of fairness: 1 where all *shares* are equal, 1/n where one has everything; None where all are 0.

    Source: Jain, Chiu and Hawe, "A quantitative measure of fairness", DEC-TR-301, 1984.
    """
    squares = float(np.square(shares).sum())
    return float(shares.sum()) ** 2 / (len(shares) * squares) if squares else None


def fairness(
    requests: Mapping[str, NDArray[Any]], classes: Sequence[Mapping[str, Any]], tenants: Sequence[str], last_ns: int
) -> dict[str, Any]:
    """Jain's index over tenants of the service that each got for its weight while requests still came, from the first arrival to
    *last_ns* at the latest: afterwards everybody gets what is left. Tokens of prompt and output, each over the weight of its class.

    A tenant that asks for less gets less, so that the index says something of a policy where all tenants always wait.
    """
    begin = first_arrival_ns(requests)
    served = service_tokens(requests, begin, max(last_ns, begin))
    if classes:
        served = served / np.array([each["weight"] for each in classes])[requests["class_index"]]
    by_tenant = np.bincount(requests["tenant_index"], weights=served, minlength=len(tenants)).astype(float)
    return {"jain": jain(by_tenant), "service_per_weight": dict(zip(tenants, by_tenant.tolist(), strict=True))}
