"""Cost models without kernels: a constant, a share of another, a line in a few totals. For drafts and published fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hwmodels.cost import CostModel, Work
from hwmodels.totals import Totals


class _WithoutKernels:
    """A cost model whose arithmetic and traffic are not known and count as none; pipeline stages send for nothing."""

    def handover_s(self, rows: Any, /) -> Any:
        return 0.0 * rows

    def work(self, totals: Totals, /) -> Work:
        zero = 0.0 * totals.rows
        return Work(zero, zero)


@dataclass(frozen=True, kw_only=True)
class StepTime(_WithoutKernels):
    """Every pass takes *step_s*, whatever it computes; its arithmetic and traffic are not known and count as none."""

    step_s: float
    n_stages: int = 1
    window_tokens: int | None = None
    peak_flops_per_s: float = 0.0
    peak_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.step_s < float("inf"):
            raise ValueError(f"step_s is a finite time of at least 0; got {self.step_s!r}")

    def iteration_s(self, totals: Totals, stage: int = 0, /) -> Any:
        return self.step_s + 0.0 * totals.rows


class ShareOfTarget(_WithoutKernels):
    """A draft whose pass takes *ratio* of what the target would need for the same pass: Leviathan's c.

    A pass of a target with pipeline stages is the sum of its stages and hand-overs. Arithmetic and traffic are not
    known and count as none.
    """

    def __init__(self, target: CostModel, ratio: float) -> None:
        if not 0.0 <= ratio < float("inf"):
            raise ValueError(f"ratio is a finite number of at least 0; got {ratio!r}")
        self.target = target
        self.ratio = ratio
        self.n_stages = 1
        self.window_tokens = target.window_tokens
        self.peak_flops_per_s = 0.0
        self.peak_bytes_per_s = 0.0

    def iteration_s(self, totals: Totals, stage: int = 0, /) -> Any:
        target = self.target
        seconds = target.iteration_s(totals, 0)
        for later in range(1, target.n_stages):
            seconds = seconds + target.iteration_s(totals, later) + target.handover_s(totals.rows)
        return self.ratio * seconds

    def __repr__(self) -> str:
        return f"ShareOfTarget(ratio={self.ratio!r})"


@dataclass(frozen=True, kw_only=True)
class LinearTime(_WithoutKernels):
    """Seconds linear in rows and in the KV tokens that decodes read, as published fits of whole servers are.

    Prompt tokens cost *row_s* like any other; work is not known and counts as none.
    """

    fixed_s: float
    row_s: float = 0.0
    kv_token_s: float = 0.0
    n_stages: int = 1
    window_tokens: int | None = None
    peak_flops_per_s: float = 0.0
    peak_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("fixed_s", "row_s", "kv_token_s"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is a finite time of at least 0; got {getattr(self, name)!r}")

    def iteration_s(self, totals: Totals, stage: int = 0, /) -> Any:
        return self.fixed_s + self.row_s * totals.rows + self.kv_token_s * totals.decode_kv_tokens
