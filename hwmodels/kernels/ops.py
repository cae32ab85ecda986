"""Arithmetic that gives the same bits for Python numbers and for arrays, and how a serving stack runs a kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hwmodels.kernels import arrays, scalars


class Ops(Protocol):
    """The arithmetic beyond + - * / that equations of kernels are written with."""

    def maximum(self, x: Any, y: Any, /) -> Any: ...

    def minimum(self, x: Any, y: Any, /) -> Any: ...

    def sqrt(self, x: Any, /) -> Any: ...

    def ceil(self, x: Any, /) -> Any: ...

    def where(self, condition: Any, x: Any, y: Any, /) -> Any: ...


SCALARS: Ops = scalars
ARRAYS: Ops = arrays

PrefillForm = Callable[..., Any]
"""(ops, prompt rows, chunks, query-key pairs, KV tokens) -> seconds of all the shape's layers.

Forms of windowed layers may be given, as a fifth argument, the pairs outside the window beside those within.
"""
DecodeForm = Callable[..., Any]
"""(ops, sequences, query tokens of all of them, KV tokens of all of them) -> seconds of all the shape's layers.

Forms of windowed layers may be given, as a fifth argument, the KV tokens outside the window beside those within.
"""


def streamed_forms(row_s: float, sequence_s: float) -> tuple[PrefillForm, DecodeForm]:
    """Forms of what takes the longer of its arithmetic, *row_s* a token, and its memory traffic, *sequence_s* a sequence."""

    def prefill(ops: Ops, rows: Any, chunks: Any, pairs: Any, kv: Any) -> Any:
        return ops.maximum(rows * row_s, chunks * sequence_s)

    def decode(ops: Ops, seqs: Any, queries: Any, kv: Any) -> Any:
        return ops.maximum(queries * row_s, seqs * sequence_s)

    return prefill, decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """The changes of a kernel that was timed alone, in the layers of a served model; the defaults leave it alone."""

    layers: float = 1.0
    start_share: float = 1.0
    """The share of the kernel's start that the kernel before it does not hide."""
    pair_lost_s: float = 0.0
    """Seconds lost on each query-key pair of a prompt to sustained arithmetic."""
    window_tokens: Any = None
    """Keys that a query sees at the most."""


ALONE = Running()


def none_is_free(seconds: Any, count: Any) -> Any:
    """*seconds* where *count* is above zero and 0 elsewhere; a float where both are numbers."""
    found = np.where(np.asarray(count) > 0, seconds, 0.0)
    return float(found) if found.ndim == 0 else found
