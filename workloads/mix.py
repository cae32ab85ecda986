"""Requests with classes of service: drawn or read, with what the classes say, and with a predictor's guesses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from workloads.classes import ServiceClass
from workloads.columns import NS_PER_S, IntArray
from workloads.streams import Stream, check_from_zero, stream
from workloads.workload import W, Workload

TOKEN_COST = 1 << 20
"""A token of weight 1 counts as much, so that those of any weight count whole numbers and sums are exact."""


def draw_classes(trace: W, classes: Sequence[ServiceClass], shares: Sequence[float], seed: int) -> W:
    """The same requests, each of one of *classes* at random in proportion to *shares*; what trace says of priorities and deadlines
    stays where the classes say nothing of them.

    Draws have a stream of their own, so that arrivals and lengths are those without classes.
    """
    share = np.asarray(shares, dtype=float)
    if share.shape != (len(classes),) or not np.all(np.isfinite(share) & (share >= 0)) or share.sum() <= 0:
        raise ValueError(f"shares are one number from 0 for each of {len(classes)} classes; got {shares!r}")
    below = np.cumsum(share)
    drawn = np.searchsorted(below, stream(seed, Stream.CLASSES).random(len(trace)) * below[-1], side="right")
    return with_classes(replace(trace, class_index=drawn, classes=tuple(each.name for each in classes)), classes)


def with_classes(trace: W, classes: Sequence[ServiceClass]) -> W:
    """The same requests with what their classes say: priority, deadline, tenant, weight, limit of the first token.

    ValueError for a class of the trace that is not among *classes*, for a trace without any, and where both say the same thing.
    """
    of_request = _row_of_class(trace, classes)
    _check_said_once(trace, classes)
    columns: dict[str, Any] = {
        "class_index": of_request,
        "classes": tuple(each.name for each in classes),
        "terms": tuple(classes),
    }
    if any(each.priority is not None for each in classes):
        columns["priority"] = np.array([each.priority or 0 for each in classes], np.int64)[of_request]
    if any(each.deadline_s is not None for each in classes):
        limits = [-1 if each.deadline_s is None else round(each.deadline_s * NS_PER_S) for each in classes]
        columns["deadline_ns"] = np.array(limits, np.int64)[of_request]
    if trace.tenant_index is None:
        tenants = tuple(dict.fromkeys(each.tenant or each.name for each in classes))
        rows = [tenants.index(each.tenant or each.name) for each in classes]
        columns |= {"tenants": tenants, "tenant_index": np.array(rows, np.int64)[of_request]}
    return replace(trace, **columns)


def _row_of_class(trace: Workload, classes: Sequence[ServiceClass]) -> IntArray:
    """The place among *classes* of each request's class."""
    if trace.class_index is None:
        raise ValueError("the trace does not say which class a request is of; give each class a share")
    position = {each.name: row for row, each in enumerate(classes)}
    strangers = [name for name in trace.classes if name not in position]
    if strangers:
        raise ValueError(f"the trace has requests of class {strangers[0]!r}, which is not declared")
    return np.array([position[name] for name in trace.classes], np.int64)[trace.class_index]


def _check_said_once(trace: Workload, classes: Sequence[ServiceClass]) -> None:
    """ValueError where the trace has a column for something that a class sets as well."""
    for column, said in (("priority", "priority"), ("deadline_ns", "deadline_s"), ("tenant_index", "tenant")):
        if getattr(trace, column) is None:
            continue
        both = next((each for each in classes if getattr(each, said) is not None), None)
        if both is not None:
            raise ValueError(
                f"the trace has a column {said} and class {both.name} sets it as well; leave one of them out"
            )


def predict_outputs(trace: W, error: float, seed: int) -> W:
    """The same requests with a predictor's guess of their output tokens: the true number times exp(*error* x a standard normal
    draw), rounded, 1 at least. The median guess is right; *error* 0 knows all.

    Each request's draw is its row's in a stream of its own: another policy, or another error, meets the same draws.
    """
    check_from_zero(error, "error")
    if trace.predicted_tokens is not None:
        raise ValueError("the trace has a column predicted_tokens already")
    drawn = stream(seed, Stream.PREDICTIONS).standard_normal(len(trace))
    guessed = np.rint(trace.output_tokens * np.exp(error * drawn))
    if not np.isfinite(guessed).all() or guessed.max() >= 2**62:
        raise ValueError(
            f"error is the standard deviation of the guess's logarithm, a few units at most; got {error!r}"
        )
    return replace(trace, predicted_tokens=np.maximum(guessed, 1).astype(np.int64))


def token_costs(trace: Workload) -> IntArray:
    """Costs of each token of each request in its tenant's share: `TOKEN_COST` over its class's weight, 1 at least."""
    if not trace.terms or trace.class_index is None:
        return np.full(len(trace), TOKEN_COST, np.int64)
    each = [max(1, math.floor(TOKEN_COST / of.weight + 0.5)) for of in trace.terms]
    return np.array(each, np.int64)[trace.class_index]
