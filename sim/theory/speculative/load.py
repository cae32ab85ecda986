"""Speculation on a loaded server, where verifying more tokens takes longer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sim.theory._checks import (
    FloatArray,
    Values,
    count,
    finite,
    non_negative,
    plain,
    positive,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearServer:
    """A server whose step times are linear in tokens and in KV tokens, in seconds.

    The draft's time is for a whole proposal: one per speculative step, whatever k.
    """

    base_s: float
    per_token_s: float
    per_kv_token_s: float
    draft_base_s: float
    draft_per_kv_token_s: float
    overhead_s: float

    def step_s(self, width: Values, batch: Values, context: Values) -> Any:
        """Target's seconds for *batch* sequences of *width* query tokens and *context* KV tokens each."""
        b = non_negative("batch", batch)
        rows, kv = b * count("width", width), b * non_negative("context", context)
        return plain(self.base_s + self.per_token_s * rows + self.per_kv_token_s * kv)

    def draft_s(self, batch: Values, context: Values) -> Any:
        """Draft's seconds for one proposal of all k tokens for *batch* sequences."""
        kv = non_negative("batch", batch) * non_negative("context", context)
        return plain(self.draft_base_s + self.draft_per_kv_token_s * kv)


SPECDECODE_BENCH = LinearServer(
    # Llama-3.1-8B with EAGLE on one H100, fitted constants of SpecDecode-Bench, arXiv 2601.11580.
    base_s=5.886e-3,
    per_token_s=21.0e-6,
    per_kv_token_s=39.3e-9,
    draft_base_s=2.135e-3,
    draft_per_kv_token_s=2.38e-9,
    overhead_s=1.207e-3,
)


def load_aware_speedup(
    mean_length: Values,
    k: Values,
    plain_s: Values,
    verify_s: Values,
    draft_s: Values,
    overhead_s: Values = 0.0,
    speculation_s: Values = 0.0,
) -> Any:
    """Speed-up at a given load: AL (T(1, b) + o) / (T(k+1, b) + k D(b) + o + f).

    plain_s = T(1, b) and verify_s = T(k+1, b) are the target's steps at that batch, draft_s = D(b) one draft step,
    overhead_s = o what every step pays, speculation_s = f what only a speculative step pays.

    Source: generalises Leviathan, theorem 3.8, to step times that depend on width and batch.
    """
    common = non_negative("overhead_s", overhead_s)
    plain_step = positive("plain_s", plain_s) + common
    step = positive("verify_s", verify_s) + count("k", k) * non_negative("draft_s", draft_s)
    step = step + common + non_negative("speculation_s", speculation_s)
    return plain(length_of(mean_length, k) * plain_step / step)


def server_speedup(
    mean_length: Values,
    k: Values,
    batch: Values,
    context: Values,
    server: LinearServer = SPECDECODE_BENCH,
) -> Any:
    """Speed-up of *k* drafted tokens at *batch* running sequences of *context* tokens on a linear server.

    k = 0 is plain decoding: no draft time, speed-up 1 with a mean length of 1.

    Source: SpecDecode-Bench, arXiv 2601.11580 (constants); the load-aware form of Leviathan, theorem 3.8.
    """
    n = count("k", k)
    draft = np.where(n > 0, np.asarray(server.draft_s(batch, context)), 0.0)
    plain_step = np.asarray(server.step_s(1, batch, context)) + server.overhead_s
    step = np.asarray(server.step_s(n + 1, batch, context)) + draft + server.overhead_s
    return plain(length_of(mean_length, n) * plain_step / step)


def crossover_batch(
    mean_length: Values,
    k: Values,
    context: Values,
    server: LinearServer = SPECDECODE_BENCH,
) -> Any:
    """Batch at which the speed-up on a linear server is exactly 1.

    Speculation gains below it. Infinite where it gains at every batch, 0 where it gains at none or only beyond some
    batch. k is 1 or more.

    Source: the load-aware speed-up set to 1, solved for the batch.
    """
    n, length = count("k", k, at_least=1), length_of(mean_length, k)
    kv = non_negative("context", context)
    fixed = (length - 1.0) * (server.base_s + server.overhead_s) - server.draft_base_s
    slope = (n + 1.0 - length) * server.per_token_s
    slope = slope + kv * (server.draft_per_kv_token_s - (length - 1.0) * server.per_kv_token_s)
    fixed, slope = np.broadcast_arrays(fixed, slope)
    batch = np.where(slope > 0.0, fixed / np.where(slope > 0.0, slope, 1.0), np.inf)
    return plain(np.where(fixed <= 0.0, 0.0, batch))


def free_verification_batch(ridge_tokens: Values, k: Values) -> Any:
    """Batch up to which verifying k + 1 tokens per sequence stays memory-bound: ridge / (k + 1).

    Source: roofline argument of Leviathan, section 6, and Medusa, appendix G.
    """
    return plain(positive("ridge_tokens", ridge_tokens) / (count("k", k) + 1.0))


def length_of(mean_length: Values, k: Values) -> FloatArray:
    """A mean number of tokens a round with *k* drafted, which lies in [1, k + 1]; ValueError elsewhere."""
    length, n = finite("mean_length", mean_length), count("k", k)
    if ((length < 1.0) | (length > n + 1.0)).any():
        raise ValueError(f"mean_length lies in [1, k + 1]; got {mean_length!r} with k = {k!r}")
    return length
