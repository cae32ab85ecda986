"""Metrics as functions of a run's columns, under the names that vLLM's serving benchmark uses.

`summary` puts them all into the nested mapping that `summary.json` holds. What cannot be said (no request
finished, no SLO given) is None, never NaN. Read `figures` first; other modules have one subject each.
"""

from sim.metrics.columns import PLACES, STATUS_NAMES, TRANSFER_NAMES, Columns, transfers_of
from sim.metrics.figures import summary
from sim.metrics.fleet import STATES as MACHINE_STATES
from sim.metrics.fleet import stays
from sim.metrics.iterations import IterationSums, kv_holdings, last_iteration_end_ns, sums_of
from sim.metrics.requests import e2el_s, first_arrival_ns, queue_s, slo_met, span_ns, tpot_s, ttft_s
from sim.metrics.slo import limits_in
from sim.metrics.spread import (
    STATISTICS,
    Blocks,
    kept_blocks,
    narrow,
    statistics,
    weighted_quantile,
    weighted_statistics,
)
from sim.metrics.tiers import KINDS as TIER_KINDS
from sim.metrics.trend import saturated
from sim.metrics.windows import WHOLE, WindowError, in_window, window_of

__all__ = [
    "MACHINE_STATES",
    "PLACES",
    "STATISTICS",
    "STATUS_NAMES",
    "TIER_KINDS",
    "TRANSFER_NAMES",
    "WHOLE",
    "Blocks",
    "Columns",
    "IterationSums",
    "WindowError",
    "e2el_s",
    "first_arrival_ns",
    "in_window",
    "kept_blocks",
    "kv_holdings",
    "last_iteration_end_ns",
    "limits_in",
    "narrow",
    "queue_s",
    "saturated",
    "slo_met",
    "span_ns",
    "statistics",
    "stays",
    "summary",
    "sums_of",
    "tpot_s",
    "transfers_of",
    "ttft_s",
    "weighted_quantile",
    "weighted_statistics",
    "window_of",
]
