"""The seam between the engine and hardware models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from hwmodels.totals import Totals


class Work(NamedTuple):
    """Arithmetic and traffic of one iteration over all stages and GPUs of a replica (floats or float arrays)."""

    flops: Any
    hbm_bytes: Any
    tile_flops: Any = 0.0
    """Arithmetic beside `flops` of rows that only fill the tiles of kernels: it takes power, and is no work."""
    still_s: Any = 0.0
    """Seconds of kernels that multiply nothing, such as all-reduces, on each device."""


class CostModel(Protocol):
    """Seconds of an iteration as a function of its totals.

    Scalars in, float out; int64 arrays in, float64 arrays out, equal bit for bit. Times are finite, non-negative
    and do not fall when a total grows.

    One may also have `scalar_s(totals)`, a shorter way to `iteration_s` of the first stage, bit for bit, where all totals are
    ints. It is no member, so that cost models of one's own need not have it; the engine takes it where it is there.
    """

    n_stages: int
    """The number of stages of the pipeline; 1 without one."""
    window_tokens: int | None
    """The most that local layers see of the past (a `Chunk` where it lies in fixed places); None where all layers see all."""
    peak_flops_per_s: float
    """The peak of all GPUs of the replica together, as is `peak_bytes_per_s`."""
    peak_bytes_per_s: float

    def iteration_s(self, totals: Totals, stage: int = 0, /) -> Any:
        """Seconds on one stage."""
        ...

    def handover_s(self, rows: Any, /) -> Any:
        """Seconds in which the activations of *rows* tokens go from one stage to the next."""
        ...

    def work(self, totals: Totals, /) -> Work:
        """Over all stages and GPUs."""
        ...


class RankedCostModel(CostModel, Protocol):
    """A cost model that also knows the ranks of data-parallel attention apart.

    `handover_s` takes the rows of all ranks, which go from stage to stage side by side: an even share on each rank.
    """

    def common_step(self, ranks: Sequence[Totals], stage: int = 0, /) -> Any:
        """Seconds of one stage in the step that all ranks take together: the slowest rank's own part, and what they do with all
        tokens.

        One Totals a rank, all of ints (float out) or of int64 arrays (float64 out), equal bit for bit; a rank without
        tokens has zeros. With one rank it is `iteration_s`.
        """
        ...


CostFactory = Callable[..., CostModel]
"""(spec, device, parallel, *, kv_precision) -> CostModel, such as `hwmodels.roofline.Roofline` or a `Calibrated`."""
