"""Arrivals that a log rounded to whole seconds and the like: found by what they are multiples of, and spread over it again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from workloads.columns import NS_PER_S, IntArray
from workloads.streams import Stream, stream
from workloads.trace import Trace

_LEAST_TICK_NS = NS_PER_S // 10
"""Shorter ones are of the order of a step of a server, in which requests wait whenever they come."""
_LEAST_TOGETHER = 0.1
"""The share of requests that come at the instant of another, from which it shows in how long they wait."""
_LEAST_INSTANTS, _LEAST_REQUESTS = 3, 20
"""Fewer are multiples of something by chance, or written by hand."""


def tick_ns(arrival_ns: IntArray) -> int:
    """The step that all arrivals are multiples of, from the first on, where many come together; 0 where it is short or few do."""
    instants, counts = np.unique(arrival_ns, return_counts=True)
    n = len(arrival_ns)
    if len(instants) < _LEAST_INSTANTS or n < _LEAST_REQUESTS or counts[counts > 1].sum() < _LEAST_TOGETHER * n:
        return 0
    tick = _multiple_of(instants)
    return tick if tick >= _LEAST_TICK_NS else 0


def _multiple_of(instants: IntArray) -> int:
    return int(np.gcd.reduce(np.diff(instants))) if len(instants) > 1 else 0


def rounded(trace: Trace) -> str:
    """A sentence where the arrivals of *trace* look rounded, else an empty one."""
    tick = tick_ns(trace.arrival_ns)
    if not tick:
        return ""
    _, counts = np.unique(trace.arrival_ns, return_counts=True)
    return (
        f"All arrivals are multiples of {tick / NS_PER_S:g} s, and {counts[counts > 1].sum():,} of {len(trace):,} requests come at "
        "the instant of another. Where the log rounded them, requests wait longer here than they did; "
        "workload.spread_arrivals: true spreads them over that time."
    )


def spread(trace: Trace, seed: int) -> Trace:
    """The same requests in the same order, each later by a time drawn evenly from what all arrivals are multiples of.

    ValueError where that is shorter than a log rounds to. Requests that all come at one instant stay so: nothing says for how long.
    """
    tick = _multiple_of(np.unique(trace.arrival_ns))
    if not tick:
        return trace
    if tick < _LEAST_TICK_NS:
        raise ValueError(
            f"spread_arrivals: the arrivals of the trace are no multiples of {_LEAST_TICK_NS / NS_PER_S:g} s or more; leave it out"
        )
    drawn = stream(seed, Stream.SPREAD).integers(0, tick, len(trace))
    # Sorted within a tick, so that requests that were logged in order stay so.
    order = np.lexsort((drawn, trace.arrival_ns))
    note = f"Arrivals, multiples of {tick / NS_PER_S:g} s in the trace, are spread evenly over that time."
    return replace(trace, arrival_ns=trace.arrival_ns + drawn[order], notes=(*trace.notes, note))
