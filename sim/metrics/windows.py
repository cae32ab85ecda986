"""The part of a run that figures are over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.errors import RooftraceError
from sim.metrics.requests import e2el_s, finished, first_arrival_ns
from sim.warmup import mser5

WHOLE: Mapping[str, Any] = {"rule": "whole"}
OVER_THE_WHOLE_RUN = ("itl_s", "mfu", "mbu", "saturated", "speculation")
"""Figures of a window that are still about the run as a whole: what they are made of is not kept by time."""


class WindowError(RooftraceError):
    """A run has not got the part that its figures were to be over."""


def window_of(requests: Mapping[str, NDArray[Any]], window: Mapping[str, Any]) -> tuple[int, int]:
    """First and last instant of a *window* (keys rule, from_s, to_s), ns; both belong to it.

    `whole` ends with the last finish; every other rule at the last arrival at the latest, so that the tail in which the
    deployment empties is left out. `after_warmup` cuts what MSER-5 finds in the end-to-end latencies of the requests that
    finished, in order of arrival. WindowError where no request is left, or no warm-up ends in the first half.
    """
    arrival_ns = requests["arrival_ns"]
    first, last = first_arrival_ns(requests), int(arrival_ns.max())
    rule = window["rule"]
    if rule == "whole":
        return first, max(last, int(requests["finish_ns"].max()))
    if rule == "after_warmup":
        order = np.argsort(arrival_ns, kind="stable")
        order = order[finished(requests)[order]]
        try:
            cut = mser5(e2el_s(requests)[order])
        except ValueError as error:
            raise WindowError(
                f"window: after_warmup cannot be had ({error}); or state it, such as window: {{from_s: 60}}"
            ) from None
        return int(arrival_ns[order[cut]]), last
    begin = first + round((window["from_s"] or 0.0) * 1e9)
    end = last if window["to_s"] is None else min(last, first + round(window["to_s"] * 1e9))
    if not ((arrival_ns >= begin) & (arrival_ns <= end)).any():
        ends = "" if window["to_s"] is None else f" and ends at {window['to_s']:.4g} s"
        raise WindowError(
            f"window: no request arrives in it; arrivals last {(last - first) * 1e-9:.4g} s, and it begins at "
            f"{(begin - first) * 1e-9:.4g} s{ends}"
        )
    return begin, end


def in_window(requests: Mapping[str, NDArray[Any]], summary: Mapping[str, Any]) -> NDArray[np.bool_]:
    """Which requests the latencies of a *summary* are of. Shape [n]."""
    window = summary.get("window", WHOLE)
    arrival_ns = requests["arrival_ns"]
    if window["rule"] == "whole":
        return np.ones(arrival_ns.size, dtype=bool)
    since = arrival_ns - first_arrival_ns(requests)
    return (since >= round(window["from_s"] * 1e9)) & (since <= round(window["to_s"] * 1e9))
