"""A machine that is slower than its like: heat, a bad link, a neighbour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, cast

from hwmodels.cost import CostModel, RankedCostModel, Work
from hwmodels.totals import Totals


@dataclass(frozen=True)
class Slowed:
    """The time that *inner* takes, *factor* times as long."""

    inner: CostModel
    factor: float

    def __post_init__(self) -> None:
        if not (isfinite(self.factor) and self.factor > 0):
            raise ValueError(f"factor is a number above 0; got {self.factor!r}")

    @property
    def n_stages(self) -> int:
        return self.inner.n_stages

    @property
    def window_tokens(self) -> int | None:
        return self.inner.window_tokens

    @property
    def peak_flops_per_s(self) -> float:
        return self.inner.peak_flops_per_s

    @property
    def peak_bytes_per_s(self) -> float:
        return self.inner.peak_bytes_per_s

    @property
    def parallel(self) -> Any:
        """The layout of a draft, where *inner* is one."""
        return getattr(self.inner, "parallel", None)

    @property
    def reads_whole_step(self) -> bool:
        """Whether the first pass of a draft reads what the target has verified."""
        return getattr(self.inner, "reads_whole_step", False)

    def iteration_s(self, totals: Totals, stage: int = 0, /) -> Any:
        return self.factor * self.inner.iteration_s(totals, stage)

    def handover_s(self, rows: Any, /) -> Any:
        return self.factor * self.inner.handover_s(rows)

    def work(self, totals: Totals, /) -> Work:
        work = self.inner.work(totals)
        return work._replace(still_s=self.factor * work.still_s)


@dataclass(frozen=True)
class SlowedRanks(Slowed):
    """The same of a machine with ranks."""

    inner: RankedCostModel

    def common_step(self, ranks: Sequence[Totals], stage: int = 0, /) -> Any:
        return self.factor * self.inner.common_step(ranks, stage)


def slowed(cost: CostModel, factor: float) -> Slowed:
    """*cost*, *factor* times as long."""
    if hasattr(cost, "common_step"):
        return SlowedRanks(cast(RankedCostModel, cost), factor)
    return Slowed(cost, factor)
