"""Cost models small enough to compute by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hwmodels.cost import Work
from hwmodels.totals import Totals


@dataclass(frozen=True, kw_only=True)
class Linear:
    """Seconds linear in the totals; one stage, or several that are alike."""

    fixed_s: float = 1e-3
    row_s: float = 0.0
    pair_s: float = 0.0
    kv_s: float = 0.0
    window_s: float = 0.0
    n_stages: int = 1
    transfer_s: float = 0.0
    window_tokens: int | None = None
    peak_flops_per_s: float = 1e15
    peak_bytes_per_s: float = 1e12

    def iteration_s(self, totals: Totals, stage: int = 0, /) -> Any:
        return (
            self.fixed_s
            + self.row_s * totals.rows
            + self.pair_s * totals.prefill_pairs
            + self.kv_s * totals.decode_kv_tokens
            + self.window_s * totals.decode_kv_window
        )

    def handover_s(self, rows: Any, /) -> Any:
        return self.transfer_s + 0.0 * rows

    def work(self, totals: Totals, /) -> Work:
        return Work(2.0 * totals.rows, 1.0 * totals.decode_kv_tokens)


@dataclass(frozen=True, kw_only=True)
class Ranked(Linear):
    """The same of the slowest rank, and what all ranks do together: seconds linear in all their rows."""

    shared_s: float = 0.0
    shared_row_s: float = 0.0
    transfer_row_s: float = 0.0

    def handover_s(self, rows: Any, /) -> Any:
        return Linear.handover_s(self, rows) + self.transfer_row_s * rows

    def common_step(self, ranks: Sequence[Totals], stage: int = 0, /) -> Any:
        slowest = self.iteration_s(ranks[0])
        for totals in ranks[1:]:
            slowest = np.maximum(slowest, self.iteration_s(totals))
        return slowest + (self.shared_s + self.shared_row_s * sum(totals.rows for totals in ranks))
