"""The time of sending the KV of a request from machine to machine: a fixed cost, and its bytes over a share of the line rate."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from hwmodels.tables import ROOM, read_toml


class TransferTerms(NamedTuple):
    """The terms of a connector."""

    share: float
    """The share of the adapters' line rate that bytes get."""
    fixed_s: float
    """The time of each transfer beside its bytes."""


@functools.lru_cache(maxsize=1)
def _catalogue() -> Mapping[str, Mapping[str, Any]]:
    return read_toml(ROOM / "transfers.toml")


def transfer_terms(connector: str) -> TransferTerms:
    """The terms that *connector* reached; KeyError for one that was not measured."""
    found = _catalogue()[connector]
    return TransferTerms(found["share"], found["fixed_s"])


def fitted(n_bytes: ArrayLike, seconds: ArrayLike, line_bytes_per_s: float) -> TransferTerms:
    """The terms with the least squares of relative errors over measured transfers: *n_bytes* in *seconds*, two or more.

    ValueError where they do not grow with bytes.
    """
    sizes, times = np.asarray(n_bytes, float), np.asarray(seconds, float)
    columns = np.stack([np.ones_like(sizes), sizes], axis=1) / times[:, None]
    (fixed_s, s_per_byte), *_ = np.linalg.lstsq(columns, np.ones_like(times), rcond=None)
    if s_per_byte <= 0:
        raise ValueError("transfers that do not take longer with more bytes have no bandwidth")
    if fixed_s < 0:
        fixed_s, s_per_byte = 0.0, float((columns[:, 1] @ np.ones_like(times)) / (columns[:, 1] @ columns[:, 1]))
    return TransferTerms(1.0 / (float(s_per_byte) * line_bytes_per_s), float(fixed_s))


def seconds(terms: TransferTerms, n_bytes: float, line_bytes_per_s: float) -> float:
    """The time that a transfer alone on its link takes."""
    return terms.fixed_s + n_bytes / (terms.share * line_bytes_per_s)
