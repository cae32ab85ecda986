"""Whether a run was overloaded: the trend of its queue."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.metrics.columns import REJECTED

_TREND_BINS = 16
_TREND_T = 2.602  # Student's t, one-sided 1 %, 15 degrees of freedom (16 bins)
_TREND_GROWTH = 0.05  # of the arrivals in the window: less than this is no overload worth the name
TREND_MIN_ARRIVALS = 64  # in the window: fewer than 4 arrivals a bin say nothing


def saturated(requests: Mapping[str, NDArray[Any]]) -> bool | None:
    """Whether the queue is still growing when arrivals end; None where there are too few arrivals to say.

    Waiting requests (sent, not rejected, not yet scheduled) are counted at 17 evenly spaced instants over the
    second half of the arrivals' time span. The queue grows when both hold: the mean of its 16 increments is above
    zero by Student's t at 1 % (one-sided; increments of a stable queue correlate negatively, which makes the test
    conservative), and over the window it grew by at least 5 % of the requests that arrived in it, which means that
    service kept up with less than 95 % of them. Fewer than 64 arrivals in the window, or all at one instant: None.
    """
    queued = (requests["status"] != REJECTED) & (requests["arrival_ns"] >= 0)
    arrival_ns = np.sort(requests["arrival_ns"][queued])
    if not arrival_ns.size or arrival_ns[0] == arrival_ns[-1]:
        return None
    begin, end = int(arrival_ns[0]), int(arrival_ns[-1])
    at = np.linspace((begin + end) / 2, end, _TREND_BINS + 1)
    scheduled_ns = requests["scheduled_ns"][queued]
    scheduled_ns = np.sort(scheduled_ns[scheduled_ns >= 0])
    arrived = np.searchsorted(arrival_ns, at, side="right")
    waiting = arrived - np.searchsorted(scheduled_ns, at, side="right")
    arrivals = int(arrived[-1] - arrived[0])
    if arrivals < TREND_MIN_ARRIVALS:
        return None
    steps = np.diff(waiting)
    grew = float(waiting[-1] - waiting[0])
    standard_error = float(steps.std(ddof=1)) / math.sqrt(_TREND_BINS)
    return grew >= _TREND_GROWTH * arrivals and float(steps.mean()) > _TREND_T * standard_error
