"""The time of a stage's kernels by rows, divided by what it is spent on."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from hwmodels.kernels.protocol import Kernels
from hwmodels.kernels.rates import with_rates
from hwmodels.operations import Linear, StageWork
from hwmodels.row_table import FloatArray

PARTS = {
    "weights": "reading the weights of dense layers: what of their products' time goes with the memory bandwidth",
    "kv": "reading the KV cache for decodes: their attention, or linear attention",
    "arithmetic": "arithmetic of dense layers: the rest of their products' time, the starts of kernels included",
    "prompt_attention": "attention of prompts",
    "experts": "routed experts, their weights and their arithmetic",
    "elementwise": "norms, rotary embeddings and other kernels that stream",
    "collectives": "all-reduces, exchanges with experts, hand-overs between pipeline stages",
    "padding": "rows up to the next captured graph",
    "host": "host work of a step, its sequences and rows, sampling, and launches that the device waits for",
}
"""The parts of an iteration's time, and what each is."""

Parts = dict[str, FloatArray]
"""Seconds by part, one an iteration."""


def no_parts(shape: tuple[int, ...]) -> Parts:
    """Zeros of *shape* for every part."""
    return {name: np.zeros(shape) for name in PARTS}


def layer_parts(
    work: StageWork,
    kernels: Kernels,
    rows: NDArray[np.int64],
    share: float,
    of_all_rows: Callable[[FloatArray], tuple[FloatArray, FloatArray]],
) -> Parts:
    """Seconds of a stage's layers but attention and host for *rows*, of which each group of devices has *share*.

    *of_all_rows* gives the seconds of experts and of the exchange with them.
    """

    def parts(each: FloatArray) -> Parts:
        own = np.ceil(each * share)
        reading, more = _products(kernels, (op for op in work.linears if not (op.of_logits or op.of_prompts)), own)
        streamed = sum(
            stream.layers * kernels.elementwise_s(own * stream.bytes_per_row, stream.launches, stream.op)
            for stream in work.elementwise
        )
        experts, exchange = of_all_rows(each)
        collectives = exchange + _collectives(work, kernels, own, of_logits=False)
        return {
            "weights": reading, "arithmetic": more, "elementwise": streamed + np.zeros_like(own), "experts": experts,
            "collectives": collectives,
        }  # fmt: skip

    return _by_rows(parts, rows)


def head_parts(work: StageWork, kernels: Kernels, logit_rows: NDArray[np.int64], share: float) -> Parts:
    """Seconds of the LM head and of sampling for *logit_rows*."""

    def parts(each: FloatArray) -> Parts:
        own = np.ceil(each * share)
        reading, more = _products(kernels, (op for op in work.linears if op.of_logits), own)
        collectives = _collectives(work, kernels, own, of_logits=True)
        return {"weights": reading, "arithmetic": more, "collectives": collectives, "host": kernels.sample_s(own)}

    return _by_rows(parts, logit_rows)


def scaled(parts: Parts, seconds: FloatArray) -> Parts:
    """*parts* in proportion, so that they add up to *seconds*: zeros where they are nothing."""
    whole = np.zeros_like(seconds)
    for each in parts.values():
        whole = whole + each
    factor = np.divide(seconds, whole, out=np.zeros_like(seconds), where=whole > 0)
    return {name: each * factor for name, each in parts.items()}


def add_parts(found: Parts, parts: Parts) -> None:
    """Add *parts* to those *found*."""
    for name, each in parts.items():
        found[name] = found[name] + each


def _products(kernels: Kernels, linears: Iterable[Linear], rows: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Seconds of dense products: what goes with the memory bandwidth, and what does not.

    Of the longer of reading and arithmetic all is the one or the other; where kernels overlap them in part, what a tenth more
    bandwidth takes off says how much is reading.
    """
    faster = with_rates(kernels, bandwidth=_TENTH)
    reading, rest = np.zeros_like(rows), np.zeros_like(rows)
    for op in linears:
        seconds = op.layers * np.asarray(kernels.gemm_s(rows, op.n, op.k, precision=op.precision))
        then = op.layers * np.asarray(faster.gemm_s(rows, op.n, op.k, precision=op.precision))
        read = np.clip((seconds - then) / (1.0 - 1.0 / _TENTH), 0.0, seconds)
        reading += read
        rest += seconds - read
    return reading, rest


_TENTH = 1.1


def _collectives(work: StageWork, kernels: Kernels, rows: FloatArray, *, of_logits: bool) -> FloatArray:
    total = np.zeros_like(rows)
    for op in work.collectives:
        if op.of_logits == of_logits:
            total = total + op.layers * kernels.collective_s(op.kind, rows * op.bytes_per_row, op.n)
    return total


def _by_rows(parts: Callable[[FloatArray], Parts], rows: NDArray[np.int64]) -> Parts:
    """*parts* of each of *rows*, worked out once for each number of rows; nothing for none."""
    distinct, back = np.unique(rows, return_inverse=True)
    some = distinct > 0
    return {name: (each * some)[back] for name, each in parts(np.maximum(distinct, 1).astype(float)).items()}
