"""The results of a run, as its metrics see them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
FINISHED, REJECTED, UNFINISHED, ABORTED, LOST = 0, 1, 2, 3, 4
STATUS_NAMES = ("finished", "rejected", "unfinished", "aborted", "lost")


TRANSFER_NAMES = ("load", "store", "swap_out", "hand_over")
PLACES = ("device", "host", "disk", "remote", "peer")
"""Where KV comes from, and goes to."""


def transfers_of(columns: Columns) -> Mapping[str, NDArray[Any]] | None:
    """The transfers of KV, from and to tiers and between machines, one row a transfer; None where there are neither, or they were
    not kept."""
    transfers = getattr(columns, "transfers", None)
    return None if transfers is None else transfers()


class Columns(Protocol):
    """The columns that the engine returns; see `sim.engine.Columns`."""

    @property
    def requests(self) -> Mapping[str, NDArray[Any]]: ...

    @property
    def reasons(self) -> Sequence[str]: ...

    @property
    def meta(self) -> Mapping[str, Any]: ...

    def iteration_blocks(self) -> Iterable[Mapping[str, NDArray[Any]]]: ...

    def itl_blocks(self) -> Iterable[tuple[IntArray, IntArray]]: ...
