"""The time of an encoder of images or of speech: its products, attention and streams, priced as those of the language model."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from hwmodels.kernels.ops import SCALARS, PrefillForm
from hwmodels.kernels.protocol import Kernels
from hwmodels.model.tower import Encoded, Tower
from hwmodels.operations import AttentionShape
from hwmodels.overheads import serving_stack

_LAUNCHES = 6
"""Kernels of a layer that only stream: two norms, two sums, the activation, and the rotary embedding of queries and keys."""


class EncoderCost:
    """Seconds in which *tensor* devices of a machine encode images, or clips of speech, together.

    The devices share each layer's heads and widths, as vLLM does it unless told otherwise (`mm_encoder_tp_mode: weights`), in 16
    bits. No graph of it is captured (vLLM 0.32.0), so that no layer takes less than its launches: those of the stack `eager`
    where a stack's times are priced.
    """

    def __init__(self, tower: Tower, kernels: Kernels, *, tensor: int = 1, launched: bool = True) -> None:
        """*launched*: launches take time on the host; False where a datasheet alone gives the times."""
        if tower.heads % tensor:
            raise ValueError(f"an encoder of {tower.heads} heads cannot be shared by {tensor} devices")
        self._tower, self._kernels, self._tensor = tower, kernels, tensor
        layer_s = serving_stack("eager").overheads.layer_host_s if launched else 0.0
        self._floor_s = layer_s * tower.layers
        self._full = self._form(tower.full_layers)
        self._windowed = self._form(tower.layers - tower.full_layers)
        self._rows_s = functools.lru_cache(maxsize=1 << 16)(self._products_s)

    def _form(self, layers: int) -> PrefillForm | None:
        v, heads = self._tower, self._tower.heads // self._tensor
        if not layers:
            return None
        width = v.hidden // v.heads
        return self._kernels.prefill_form(
            AttentionShape(
                kind="encoder", n_heads=heads, n_kv_heads=heads, qk_dim=width, v_dim=width, kv_bytes=4.0 * heads * width,
                precision="bf16", layers=layers,
            )
        )  # fmt: skip

    def seconds(self, items: Sequence[Encoded]) -> float:
        """Seconds of one pass over *items*, all of them together; none take no time."""
        if not items:
            return 0.0
        rows = sum(item.sequences * item.positions for item in items)
        total = self._rows_s(rows, sum(item.embeddings for item in items))
        if self._full is not None:
            chunks = sum(item.sequences for item in items)
            pairs = sum(item.sequences * item.positions**2 for item in items)
            total += self._full(SCALARS, rows, chunks, pairs, rows)
        if self._windowed is not None:
            window = self._tower.window
            chunks = sum(item.sequences * -(-item.positions // window) for item in items)
            total += self._windowed(SCALARS, rows, chunks, rows * window, rows)
        return max(float(total), self._floor_s)

    def _products_s(self, rows: int, embeddings: int) -> float:
        v, t, kernels = self._tower, self._tensor, self._kernels
        m = np.array([float(rows)])
        up = 2 if v.gated else 1
        layer = [
            (3 * v.hidden // t, v.hidden),
            (v.hidden, v.hidden // t),
            (up * v.ffn // t, v.hidden),
            (v.hidden, v.ffn // t),
        ]
        per_layer = sum(kernels.gemm_s(m, n, k, precision="bf16") for n, k in layer)
        numbers = 14 * v.hidden + (up + 1) * v.ffn // t
        per_layer = per_layer + kernels.elementwise_s(2.0 * numbers * m, _LAUNCHES)
        if t > 1:
            per_layer = per_layer + 2.0 * kernels.collective_s("all_reduce", 2.0 * v.hidden * m, t)
        out = np.array([float(embeddings)])
        rest = sum(kernels.gemm_s(each * m, n, k, precision="bf16") for each, k, n in v.stem)
        rest = rest + sum(kernels.gemm_s(out, n, k, precision="bf16") for k, n in v.projection)
        return float((v.layers * per_layer + rest)[0])
