"""A replay whose schedule stays: how the means of TTFT and TPOT move when its iterations last longer or shorter.

Who runs when is taken to stay as it was, so that a term of a serving stack is felt through the seconds of each iteration alone.
That is the slope of a prediction for the cost of pricing an iteration twice, where another replay costs many times as much; a
step that changes who runs when is seen by the next replay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hwmodels.totals import Totals
from sim.engine.clock import TICK_BITS

if TYPE_CHECKING:
    from hwmodels.cost import CostModel
    from sim.engine.columns import Columns

_ROUNDING_NS = 2


class Frozen(NamedTuple):
    """The spans of a run, and what a second more in each of their iterations adds to the means."""

    totals: Totals
    """Of the middle of each span."""
    ttft: np.ndarray
    tpot: np.ndarray

    def moved_s(self, before: CostModel, after: CostModel) -> tuple[float, float]:
        """How much longer TTFT and TPOT get where *after* prices the iterations in place of *before*."""
        longer_s = np.asarray(after.iteration_s(self.totals)) - np.asarray(before.iteration_s(self.totals))
        return float(longer_s @ self.ttft), float(longer_s @ self.tpot)


def frozen(columns: Columns, counted: np.ndarray) -> Frozen:
    """The schedule of a run of one replica without a pipeline, for the means over the requests of the mask *counted*."""
    (replica,) = columns.replicas
    spans = replica.spans[np.argsort(replica.spans["start_ns"], kind="stable")]
    n = spans["n"].astype(np.int64)
    ticks = n * spans["first_ticks"] + spans["growth_ticks"] * (n * (n - 1) // 2)
    end_ns = spans["start_ns"] + ((spans["start_frac"] + ticks) >> TICK_BITS)
    sent, first, finish, output = (
        columns.requests[name] for name in ("arrival_ns", "first_token_ns", "finish_ns", "output_tokens")
    )
    some = np.flatnonzero(counted & (finish >= 0))
    several = some[output[some] > 1]

    def after(at_ns: np.ndarray) -> np.ndarray:
        """How many spans had ended by then."""
        return np.searchsorted(end_ns, at_ns + _ROUNDING_NS, side="right")

    def weights(begins: np.ndarray, ends: np.ndarray, each: np.ndarray) -> np.ndarray:
        steps = np.zeros(len(spans) + 1)
        np.add.at(steps, after(begins), each)
        np.subtract.at(steps, after(ends), each)
        return np.cumsum(steps)[:-1] * n

    ones = np.full(len(some), 1.0 / max(len(some), 1))
    rates = 1.0 / np.maximum(output[several] - 1, 1) / max(len(several), 1)
    middle = (n - 1) // 2
    decode = spans["decode_seqs"].astype(np.int64)
    queries = decode * spans["query_tokens"]
    whole = {
        name: spans[name].astype(np.int64)
        for name in ("prefill_rows", "prefill_chunks", "prefill_pairs", "prefill_kv_tokens", "prefill_pairs_window")
    }
    totals = Totals(
        rows=whole["prefill_rows"] + queries,
        decode_seqs=decode,
        decode_kv_tokens=spans["decode_kv_tokens"] + middle * decode,
        logit_rows=queries + spans["completions"],
        decode_kv_window=spans["decode_kv_window"] + middle * spans["window_growth"],
        **whole,
    )
    return Frozen(
        totals=Totals(*(np.asarray(column, np.int64) for column in totals)),
        ttft=weights(sent[some], first[some], ones),
        tpot=weights(first[several], finish[several], rates),
    )
