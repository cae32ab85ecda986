"""A replay whose schedule stays: how the means of TTFT and TPOT move when its iterations last longer or shorter.

The schedule is taken to stay as it was, so that a term of a serving stack changes the seconds of each iteration alone. That is the
slope of a prediction for the cost of pricing an iteration twice, where another replay costs many times as much; a step that changes
the schedule is seen by the next replay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from hwmodels.totals import Totals
from sim.engine.time.clock import TICK_BITS

if TYPE_CHECKING:
    from hwmodels.cost import CostModel, RankedCostModel
    from sim.engine.record.columns import Columns

_ROUNDING_NS = 2


class Frozen(NamedTuple):
    """The spans of a run, and what a second more in each of their iterations adds to the means."""

    ranks: tuple[Totals, ...]
    """The work that each rank of the replica has in the middle of each span; a replica without ranks is one."""
    ttft: np.ndarray
    tpot: np.ndarray

    def moved_s(self, before: CostModel, after: CostModel) -> tuple[float, float]:
        """The time by which TTFT and TPOT grow where *after* prices the iterations in place of *before*."""
        longer_s = self._priced_s(after) - self._priced_s(before)
        return float(longer_s @ self.ttft), float(longer_s @ self.tpot)

    def _priced_s(self, cost: CostModel) -> np.ndarray:
        if len(self.ranks) == 1:
            return np.asarray(cost.iteration_s(self.ranks[0]))
        return np.asarray(cast("RankedCostModel", cost).common_step(self.ranks))


_WHOLE = ("prefill_rows", "prefill_chunks", "prefill_pairs", "prefill_kv_tokens", "prefill_pairs_window")


def frozen(columns: Columns, counted: np.ndarray) -> Frozen:
    """The schedule of a run of one replica without a pipeline, for the means over the requests of the mask *counted*.

    Ranks of data-parallel attention are replicas of the run. Those that have something to do start a step together, and their
    records are of one step each; a rank that has nothing to do in it has no record, and zeros here.
    """
    recorded = [replica.spans for replica in columns.replicas]
    # No step is shorter than a nanosecond.
    starts_ns, which, step = np.unique(
        np.concatenate([spans["start_ns"] for spans in recorded]), return_index=True, return_inverse=True
    )
    some = np.concatenate(recorded)[which]
    n = some["n"].astype(np.int64)
    ticks = n * some["first_ticks"] + some["growth_ticks"] * (n * (n - 1) // 2)
    end_ns = starts_ns + ((some["start_frac"] + ticks) >> TICK_BITS)
    rank_of = np.repeat(np.arange(len(recorded)), [len(spans) for spans in recorded])
    ttft, tpot = _weights(columns, counted, end_ns, n)
    return Frozen(
        ranks=tuple(_totals(spans, step[rank_of == rank], len(some)) for rank, spans in enumerate(recorded)),
        ttft=ttft,
        tpot=tpot,
    )


def _weights(columns: Columns, counted: np.ndarray, end_ns: np.ndarray, n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The seconds that one more second in each of the *n* iterations of a span adds to the mean TTFT and TPOT."""
    sent, first, finish, output = (
        columns.requests[name] for name in ("arrival_ns", "first_token_ns", "finish_ns", "output_tokens")
    )
    some = np.flatnonzero(counted & (finish >= 0))
    several = some[output[some] > 1]

    def after(at_ns: np.ndarray) -> np.ndarray:
        """The number of spans that had ended by then."""
        return np.searchsorted(end_ns, at_ns + _ROUNDING_NS, side="right")

    def between(begins: np.ndarray, ends: np.ndarray, each: np.ndarray) -> np.ndarray:
        steps = np.zeros(len(end_ns) + 1)
        np.add.at(steps, after(begins), each)
        np.subtract.at(steps, after(ends), each)
        return np.cumsum(steps)[:-1] * n

    ones = np.full(len(some), 1.0 / max(len(some), 1))
    rates = 1.0 / np.maximum(output[several] - 1, 1) / max(len(several), 1)
    return between(sent[some], first[some], ones), between(first[several], finish[several], rates)


def _totals(spans: np.ndarray, step: np.ndarray, n_steps: int) -> Totals:
    """The work of one rank in the middle iteration of each of *n_steps* spans; *step* says which of them its *spans* are."""
    middle = (spans["n"].astype(np.int64) - 1) // 2
    decode = spans["decode_seqs"].astype(np.int64)
    queries = decode * spans["query_tokens"]
    whole = {name: spans[name].astype(np.int64) for name in _WHOLE}
    found = Totals(
        rows=whole["prefill_rows"] + queries,
        decode_seqs=decode,
        decode_kv_tokens=spans["decode_kv_tokens"] + middle * decode,
        logit_rows=queries + spans["completions"],
        decode_kv_window=spans["decode_kv_window"] + middle * spans["window_growth"],
        **whole,
    )
    columns = np.zeros((len(found), n_steps), np.int64)
    columns[:, step] = found
    return Totals(*columns)
