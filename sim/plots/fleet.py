"""Machines in time, in one picture: what comes and is served, machines by state, TTFT by class against its limit, money."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import sim.metrics as metrics
from sim.plots.levels import mean_level, plot_level
from sim.plots.style import GREY, OKABE_ITO, dress, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FloatArray = NDArray[np.float64]
_BINS = 200
_COLORS = {
    "ready": OKABE_ITO["green"],
    "draining": OKABE_ITO["sky"],
    "starting": OKABE_ITO["orange"],
    "failed": OKABE_ITO["vermillion"],
}


_CLASS_COLORS = tuple(OKABE_ITO[name] for name in ("blue", "vermillion", "green", "purple", "orange"))
_HOURS_FROM_S = 7200.0
"""Longer runs have hours on the axis."""


def fleet_figure(
    *,
    requests: Mapping[str, NDArray[Any]],
    fleet: Mapping[str, Any],
    last_end_ns: int,
    ttft_limit_s: float | None,
    title: str,
    classes: Sequence[Mapping[str, Any]] = (),
    usd_per_hour: Sequence[float] | None = None,
) -> Figure:
    """Panels over one time axis. *fleet*: the engine's facts of machines; *last_end_ns*: of the last iteration, or -1; *classes*:
    `name` and `slo`, by `class_index`, the first five; *usd_per_hour*: of each machine that is not off, None without a panel."""
    arrival_ns, finish_ns = requests["arrival_ns"], requests["finish_ns"]
    begin = metrics.first_arrival_ns(requests)
    end = max(int(finish_ns.max()), int(arrival_ns.max()), last_end_ns, begin + 1)
    edges_ns = np.linspace(begin, end, _BINS + 1)
    scale, unit = (3600.0, "hours") if (end - begin) * 1e-9 > _HOURS_FROM_S else (1.0, "seconds")
    edges, width_s = (edges_ns - begin) * 1e-9 / scale, (end - begin) * 1e-9 / _BINS
    panels = 3 if usd_per_hour is None else 4
    figure = sheet(11, 2.4 * panels, title=title, layout=None)
    figure.subplots_adjust(left=0.075, right=0.985, bottom=0.21 / panels, top=1 - 0.3 / panels, hspace=0.12)
    rate_ax, machines_ax, ttft_ax, *usd_ax = figure.subplots(panels, 1, sharex=True)
    offered, served = (np.histogram(each, edges_ns)[0] / width_s for each in (arrival_ns, finish_ns[finish_ns >= 0]))
    plot_level(rate_ax, edges, {"offered": offered, "served": served}, label="requests/s")
    stays = metrics.stays(fleet, begin, end)
    _plot_machines(machines_ax, stays, edges_ns, edges)
    _plot_ttft(ttft_ax, requests, edges_ns, edges, ttft_limit_s, classes[: len(_CLASS_COLORS)])
    if usd_per_hour is not None:
        _plot_spent(usd_ax[0], stays, edges_ns, edges, np.array(usd_per_hour))
    (usd_ax or [ttft_ax])[0].set_xlabel(f"{unit} after the first arrival")
    ttft_ax.set_xlim(0, edges[-1])
    return figure


def _plot_machines(ax: Axes, stays: Mapping[str, NDArray[Any]], edges_ns: FloatArray, edges: FloatArray) -> None:
    below = np.zeros(_BINS)
    for name, color in _COLORS.items():
        mine = stays["state"] == metrics.MACHINE_STATES.index(name)
        level = mean_level(edges_ns, stays["begin_ns"][mine], stays["end_ns"][mine])
        if not level.any():
            continue
        ax.stairs(below + level, edges, baseline=below, color=color, fill=True, alpha=0.75, label=name)
        below = below + level
    dress(ax, y="machines")
    ax.set_ylim(0, 1.25 * float(below.max()) or 1.0)
    ax.legend(fontsize=8, frameon=False, loc="upper right", ncols=4)


def _plot_ttft(
    ax: Axes,
    requests: Mapping[str, NDArray[Any]],
    edges_ns: FloatArray,
    edges: FloatArray,
    limit_s: float | None,
    classes: Sequence[Mapping[str, Any]],
) -> None:
    """TTFT of those that arrive in each interval: median and p95, or with *classes* p95 of each beside its own limit."""
    has_first = requests["first_token_ns"] >= 0
    arrival_ns = requests["arrival_ns"][has_first]
    place = np.clip(np.searchsorted(edges_ns, arrival_ns, side="right") - 1, 0, _BINS - 1)
    ttft_s = (requests["first_token_ns"][has_first] - arrival_ns) * 1e-9
    if classes:
        index = requests["class_index"][has_first]
        for row, (color, each) in enumerate(zip(_CLASS_COLORS, classes, strict=False)):
            level = _percentile_by_bin(ttft_s[index == row], place[index == row], 95)
            ax.stairs(level, edges, color=color, linewidth=1.2, label=f"{each['name']}, p95", baseline=None)
            if each["slo"].get("ttft_s") is not None:
                ax.axhline(each["slo"]["ttft_s"], color=color, linestyle="--", linewidth=1.0)
        ax.plot([], [], color=GREY, linestyle="--", linewidth=1.0, label="limit of the class")
    else:
        for share, color in ((50, OKABE_ITO["blue"]), (95, OKABE_ITO["purple"])):
            level = _percentile_by_bin(ttft_s, place, share)
            ax.stairs(level, edges, color=color, linewidth=1.2, label=f"p{share} of those that arrive", baseline=None)
        if limit_s is not None:
            ax.axhline(limit_s, color=GREY, linestyle="--", linewidth=1.0, label="limit")
    if ttft_s.size and float(ttft_s.min()) > 0:
        ax.set_yscale("log")
    dress(ax, y="TTFT, s")
    ax.legend(fontsize=8, frameon=False, loc="upper right", ncols=len(classes) + 1 if classes else 3)


def _percentile_by_bin(values: FloatArray, place: NDArray[Any], share: int) -> FloatArray:
    order = np.argsort(place, kind="stable")
    groups = np.split(values[order], np.searchsorted(place[order], np.arange(1, _BINS)))
    return np.array([np.percentile(group, share) if group.size else np.nan for group in groups])


def _plot_spent(
    ax: Axes, stays: Mapping[str, NDArray[Any]], edges_ns: FloatArray, edges: FloatArray, usd_per_hour: FloatArray
) -> None:
    """Money spent so far: machines that are not off, by the hour."""
    there = stays["state"] != metrics.MACHINE_STATES.index("off")
    rate = np.zeros(_BINS)
    for price in np.unique(usd_per_hour):
        mine = there & (usd_per_hour[stays["machine"]] == price)
        rate += price * mean_level(edges_ns, stays["begin_ns"][mine], stays["end_ns"][mine])
    spent = np.concatenate([[0.0], np.cumsum(rate * np.diff(edges_ns) * 1e-9 / 3600)])
    ax.plot(edges, spent, color=OKABE_ITO["blue"], linewidth=1.4)
    ax.annotate(f"${spent[-1]:,.2f}", (edges[-1], spent[-1]), xytext=(-6, -12), textcoords="offset points", ha="right")
    dress(ax, y="$ spent")
    ax.set_ylim(0, 1.15 * float(spent[-1]) or 1.0)
