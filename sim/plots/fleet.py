"""Machines in time, in one picture: what comes and what is served, machines by state, TTFT against its limit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import sim.metrics as metrics
from sim.plots.levels import mean_level, plot_level
from sim.plots.style import GREY, OKABE_ITO, dress, sheet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BINS = 200
_COLORS = {
    "ready": OKABE_ITO["green"],
    "draining": OKABE_ITO["sky"],
    "starting": OKABE_ITO["orange"],
    "failed": OKABE_ITO["vermillion"],
}


def fleet_figure(
    *,
    requests: Mapping[str, NDArray[Any]],
    fleet: Mapping[str, Any],
    last_end_ns: int,
    ttft_limit_s: float | None,
    title: str,
) -> Figure:
    """Three panels over one time axis. *fleet*: the engine's facts of machines; *last_end_ns*: of the last iteration, or -1."""
    arrival_ns, finish_ns, first_ns = (requests[name] for name in ("arrival_ns", "finish_ns", "first_token_ns"))
    begin = int(arrival_ns.min())
    end = max(int(finish_ns.max()), int(arrival_ns.max()), last_end_ns, begin + 1)
    edges_ns = np.linspace(begin, end, _BINS + 1)
    edges_s, width_s = (edges_ns - begin) * 1e-9, (end - begin) * 1e-9 / _BINS
    figure = sheet(11, 7.2, title=title, layout=None)
    figure.subplots_adjust(left=0.075, right=0.985, bottom=0.07, top=0.9, hspace=0.12)
    rate_ax, machines_ax, ttft_ax = figure.subplots(3, 1, sharex=True)
    offered, served = (np.histogram(each, edges_ns)[0] / width_s for each in (arrival_ns, finish_ns[finish_ns >= 0]))
    plot_level(rate_ax, edges_s, {"offered": offered, "served": served}, label="requests/s")

    stays = metrics.stays(fleet, begin, end)
    below = np.zeros(_BINS)
    for name, color in _COLORS.items():
        mine = stays["state"] == metrics.MACHINE_STATES.index(name)
        level = mean_level(edges_ns, stays["begin_ns"][mine], stays["end_ns"][mine])
        if not level.any():
            continue
        machines_ax.stairs(below + level, edges_s, baseline=below, color=color, fill=True, alpha=0.75, label=name)
        below = below + level
    dress(machines_ax, y="machines")
    machines_ax.set_ylim(0, 1.25 * float(below.max()) or 1.0)
    machines_ax.legend(fontsize=8, frameon=False, loc="upper right", ncols=4)

    has_first = first_ns >= 0
    place = np.clip(np.searchsorted(edges_ns, arrival_ns[has_first], side="right") - 1, 0, _BINS - 1)
    ttft_s = (first_ns - arrival_ns)[has_first] * 1e-9
    order = np.argsort(place, kind="stable")
    groups = np.split(ttft_s[order], np.searchsorted(place[order], np.arange(1, _BINS)))
    for share, color, name in ((50, OKABE_ITO["blue"], "p50"), (95, OKABE_ITO["purple"], "p95")):
        level = np.array([np.percentile(group, share) if group.size else np.nan for group in groups])
        ttft_ax.stairs(level, edges_s, color=color, linewidth=1.2, label=f"{name} of those that arrive", baseline=None)
    if ttft_limit_s is not None:
        ttft_ax.axhline(ttft_limit_s, color=GREY, linestyle="--", linewidth=1.0, label="limit")
    if ttft_s.size and float(ttft_s.min()) > 0:
        ttft_ax.set_yscale("log")
    dress(ttft_ax, x="seconds after the first arrival", y="TTFT, s")
    ttft_ax.legend(fontsize=8, frameon=False, loc="upper right", ncols=3)
    ttft_ax.set_xlim(0, edges_s[-1])
    return figure
