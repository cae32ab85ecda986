"""Requests that arrive in time, and what makes them valid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from workloads.columns import NS_PER_S, IntArray, first_row
from workloads.follows import Follows
from workloads.workload import Clients, Workload


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Requests(Workload):
    """Requests in order of arrival. Raises ValueError as `Workload` does, and for arrivals out of order."""

    LEAST: ClassVar = {"arrival_ns": 0, **Workload.LEAST}

    arrival_ns: IntArray
    """Arrivals of the requests, nanoseconds from the start of the run; non-decreasing."""
    follows: Follows | None = None
    """Which requests are sent only when others have ended; `arrival_ns` of such a one is but its place in the order."""

    def called(self, row: int) -> str:
        return f"{Workload.called(self, row)}, which arrives at {self.arrival_ns[row] / NS_PER_S:.9g} s,"

    def __post_init__(self) -> None:
        if self.follows is not None and len(self.follows) != len(self):
            raise ValueError(f"follows needs one entry a request ({len(self)}); got {len(self.follows)}")
        Workload.__post_init__(self)
        if (row := first_row(np.diff(self.arrival_ns) < 0)) is not None:
            raise ValueError(
                f"arrival_ns must not decrease; row {row + 1} has {self.arrival_ns[row + 1]} "
                f"after {self.arrival_ns[row]}: sort the requests by arrival (Trace.from_arrays(..., sort=True))"
            )

    @property
    def planned_ns(self) -> IntArray:
        return self.arrival_ns

    @property
    def sent_ns(self) -> IntArray:
        return self.arrival_ns if self.follows is None else np.where(self.follows.counts > 0, -1, self.arrival_ns)

    def clients(self) -> Clients | None:
        return None if self.follows is None else self.follows.clients()

    def taken(self, index: IntArray) -> dict[str, Any]:
        follows = None if self.follows is None else self.follows.take(index)
        return Workload.taken(self, index) | {"follows": follows}

    @property
    def duration_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return int(self.arrival_ns[-1] - self.arrival_ns[0]) / NS_PER_S

    @property
    def arrival_s(self) -> NDArray[np.float64]:
        return self.arrival_ns / NS_PER_S
