"""Classes of service of a workload: the terms that policies see, and the columns of a run."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

from policies.view import NO_TERMS, Terms
from sim.engine.record.columns import IntArray
from workloads import Workload, token_costs


def terms_of(workload: Workload) -> Terms:
    """Terms of the workload's classes, tenants and predictions; `NO_TERMS` where it has none."""
    found: dict[str, Any] = {}
    if workload.class_index is not None:
        found["classes"] = [workload.classes[at] for at in workload.class_index.tolist()]
    if workload.tenant_index is not None:
        found["tenant"] = _as_array(workload.tenant_index)
        found["token_cost"] = _as_array(token_costs(workload))
    if workload.terms and workload.class_index is not None:
        limits = np.array([each.first_token_ns for each in workload.terms], np.int64)
        found["first_token_ns"] = _as_array(limits[workload.class_index])
    if workload.predicted_tokens is not None:
        found["predicted_tokens"] = _as_array(workload.predicted_tokens)
    return Terms(**found) if found else NO_TERMS


def class_columns(workload: Workload) -> dict[str, IntArray]:
    """Class, tenant and prediction of each request, where the workload says them."""
    columns = {
        "class_index": workload.class_index,
        "tenant_index": workload.tenant_index,
        "predicted_tokens": workload.predicted_tokens,
    }
    return {name: column for name, column in columns.items() if column is not None}


def _as_array(column: IntArray) -> array[int]:
    found = array("q")
    found.frombytes(np.ascontiguousarray(column, np.int64).tobytes())
    return found
