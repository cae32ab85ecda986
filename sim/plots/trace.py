"""The picture of a trace: how its requests arrive, how long they are, and what of their prompts comes again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sim.plots.reuse import plot_reuse
from sim.plots.style import GREY, OKABE_ITO, dress, sheet
from workloads import Trace
from workloads.columns import NS_PER_S
from workloads.describe import rates_over_time, turns_of_sessions
from workloads.reuse import ReuseCurve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_trace(trace: Trace, curve: ReuseCurve | None) -> Figure:
    """Rate over time, lengths, gaps between arrivals, and reuse by size of cache (*curve*) or turns of sessions, on one sheet."""
    made = sheet(9.6, 6.8, title=f"{trace.source}: {len(trace):,} requests in {trace.duration_s:,.6g} s")
    ((rate, lengths), (gaps, last)) = made.subplots(2, 2)
    _rate(rate, trace)
    _lengths(lengths, trace)
    _gaps(gaps, trace)
    turns = turns_of_sessions(trace)
    if curve is not None:
        plot_reuse(last, curve)
        last.set_title("Reuse by an ideal prefix cache", fontsize=9, loc="left")
    elif len(turns):
        at, counts = np.unique(turns, return_counts=True)
        last.bar(at, counts, color=OKABE_ITO["blue"])
        dress(last, x="requests of a session", y="sessions", title="Sessions")
    else:
        _says(last, "the trace does not say which prompts begin alike,\nnor which requests are of one session")
        dress(last, title="Reuse")
    return made


def _rate(ax: Axes, trace: Trace) -> None:
    width_s, rates = rates_over_time(trace, 60)
    if len(rates) == 0:
        _says(ax, "all requests arrive at once")
    else:
        ax.stairs(rates, np.arange(len(rates) + 1) * width_s, color=OKABE_ITO["blue"], linewidth=1.5)
        mean = len(trace) / trace.duration_s
        ax.axhline(mean, color=GREY, linewidth=0.9, linestyle="--")
        ax.annotate(
            f" mean {mean:.3g}", (1, mean), xycoords=("axes fraction", "data"), fontsize=8, color=GREY, va="center"
        )
        ax.set_ylim(bottom=0)
    dress(ax, x="s since the first arrival", y="requests/s", title="Arrivals over time")


def _lengths(ax: Axes, trace: Trace) -> None:
    for name, values, colour in (
        ("prompt", trace.prompt_tokens, "blue"), ("output", trace.output_tokens, "vermillion")
    ):  # fmt: skip
        found = np.sort(np.maximum(values, 1))
        share = np.arange(1, len(found) + 1) / len(found) * 100
        ax.step(found, share, where="post", color=OKABE_ITO[colour], linewidth=1.5, label=name)
    ax.set_xscale("log")
    ax.set_ylim(0, 100)
    ax.legend(fontsize=8, frameon=False)
    dress(ax, x="tokens", y="requests of at most so many, %", title="Lengths")


def _gaps(ax: Axes, trace: Trace) -> None:
    gaps_s = np.sort(np.diff(trace.arrival_ns) / NS_PER_S)
    mean_s = float(gaps_s.mean()) if len(gaps_s) else 0.0
    if mean_s == 0.0:
        _says(ax, "no time passes between arrivals")
        dress(ax, title="Gaps between arrivals")
        return
    least = max(float(gaps_s[gaps_s > 0].min()), mean_s * 1e-4)
    over = np.geomspace(least, float(gaps_s.max()) * 1.2, 300)
    measured = 100 * (1 - np.searchsorted(gaps_s, over, side="right") / len(gaps_s))
    ax.plot(over, measured, color=OKABE_ITO["blue"], linewidth=1.5, label="the trace")
    ax.plot(over, 100 * np.exp(-over / mean_s), color=GREY, linewidth=0.9, linestyle="--", label="Poisson of this rate")
    ax.set_xscale("log")
    ax.set_ylim(0, 100)
    ax.legend(fontsize=8, frameon=False)
    cv = float(gaps_s.std()) / mean_s
    dress(ax, x="s", y="gaps longer than that, %", title=f"Gaps between arrivals: CV {cv:.2f} (Poisson 1)")


def _says(ax: Axes, text: str) -> None:
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", fontsize=9, color=GREY)
    ax.set_xticks([])
    ax.set_yticks([])
