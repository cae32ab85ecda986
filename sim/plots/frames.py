"""Pictures of a DataFrame of results, drawn on an Axes: one function a kind of picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.engine.record.columns import ReplicaColumns
from sim.plots.columns import (
    MAX_HUES,
    check,
    groups,
    is_number,
    is_seconds,
    label,
    present,
    saturated,
    short,
    texts_of,
    value_text,
)
from sim.plots.latency import ecdf, plot_latency_ecdf, share_axis
from sim.plots.levels import Blocks, mean_level, plot_level, token_rates
from sim.plots.stages import COLOURS, plot_gantt
from sim.plots.style import GREY, GRID, MARKERS, OKABE_ITO, dress
from sim.study.optimize import pareto_front
from sim.text import is_share, seconds_text, short_keys

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

_COLORS = (*(color for name, color in OKABE_ITO.items() if name != "yellow"), GREY)
_WIDE = 60
"""Letters below an axis, all names together."""
_TOP = 1.12


def latency_cdf(
    frame: pd.DataFrame, ax: Axes, *, column: str = "ttft_s", hue: str | None = None, title: str | None = None
) -> None:
    """Share of requests at or below each latency, logarithmic. *frame*: `Result.requests`, or several with a column *hue*.

    With p50, p90 and p99 marked or, with *hue*, a line for each of its values.
    """
    check(frame, column, *([hue] if hue else []))
    if hue is None:
        plot_latency_ecdf(ax, frame[column].to_numpy(dtype=float), name=title or short(column))
        dress(ax, x="latency, log scale", y="share at or below")
        return
    for index, (name, group) in enumerate(groups(frame, hue)):
        values = group[column].dropna().to_numpy(dtype=float)
        if values.size:
            x, share = ecdf(np.maximum(values, 1e-9))
            ax.step(x, share, where="post", color=_COLORS[index], linewidth=1.5, label=name)
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(lambda value, _: seconds_text(value))
    ax.set_ylim(0, 1.02)
    share_axis(ax)
    dress(ax, x=f"{short(column)}, log scale", y="share at or below", title=title)
    _legend(ax, hue)


def lines(
    frame: pd.DataFrame,
    ax: Axes,
    *,
    x: str,
    y: str = "ttft_s.p99",
    hue: str | None = None,
    log_x: bool = False,
    log_y: bool = False,
) -> None:
    """*y* against *x*, a line for each value of *hue*, with intervals where *frame* has `y.half_width`; of shares up to 0 and 1.

    Saturated points have no latency: they are crosses at the upper edge, above where they would be.
    """
    check(frame, x, y, *([hue] if hue else []))
    half = f"{y}.half_width"
    number = is_number(frame[x])
    ticks = None if number else texts_of(frame[x])
    places = {value: index for index, value in enumerate(ticks or ())}
    crossed = False
    for index, (name, group) in enumerate(groups(frame, hue)):
        at = group[x].to_numpy(dtype=float) if ticks is None else np.array([places[present(v)] for v in group[x]])
        order = np.argsort(at, kind="stable")
        at, value = at[order], group[y].to_numpy(dtype=float)[order]
        error = group[half].to_numpy(dtype=float)[order] if half in group and group[half].notna().any() else None
        if error is not None and is_share(y):
            error = np.minimum(error, np.maximum([value, 1.0 - value], 0.0))
        color, marker = _COLORS[index], MARKERS[index]
        # Between names there is nothing.
        wide = 1.4 if ticks is None else 0.0
        ax.errorbar(
            at, value, yerr=error, color=color, marker=marker, markersize=4.5, linewidth=wide, elinewidth=1.4, capsize=2.5,
            label=name,
        )  # fmt: skip
        crossed |= _crosses(ax, at[saturated(group)[order] & np.isnan(value)], color)
    if log_x:
        ax.set_xscale("log")
    if log_y:
        ax.set_yscale("log")
    elif frame[y].notna().any() and float(frame[y].min()) >= 0:
        ax.set_ylim(bottom=0)
        ax.set_ylim(top=ax.get_ylim()[1] * _TOP)
    if ticks is not None:
        letters = max(_WIDE // max(len(ticks), 1), 8)
        ax.set_xticks(range(len(ticks)), [fill(text, letters, break_on_hyphens=False) for text in ticks.values()])
    _seconds_axis(ax, y, log_y)
    if number:
        _plain_ticks(ax.xaxis, frame[x])
    _dress_columns(ax, x, y)
    _legend(ax, hue, crossed=crossed)


def throughput_latency(
    frame: pd.DataFrame,
    ax: Axes,
    *,
    x: str = "output_tokens_per_s",
    y: str = "ttft_s.p99",
    hue: str | None = None,
    along: str = "workload.rate_scale",
) -> None:
    """Latency against throughput as load grows *along* a column: the further right and down a line, the better.

    Where the deployment saturates the line ends, with a cross at the throughput that it reached.
    """
    check(frame, x, y, along, *([hue] if hue else []))
    crossed = False
    for index, (name, group) in enumerate(groups(frame, hue)):
        group = group.sort_values(along)
        at, value = group[x].to_numpy(dtype=float), group[y].to_numpy(dtype=float)
        color = _COLORS[index]
        ax.plot(at, value, color=color, marker=MARKERS[index], markersize=4.5, linewidth=1.4, label=name)
        crossed |= _crosses(ax, at[saturated(group) & np.isnan(value)], color)
    ax.set_ylim(bottom=0)
    ax.set_ylim(top=ax.get_ylim()[1] * _TOP)
    _seconds_axis(ax, y, False)
    if not is_seconds(x):
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    _dress_columns(ax, x, y)
    _legend(ax, hue, crossed=crossed)


def heatmap(frame: pd.DataFrame, ax: Axes, *, x: str, y: str, value: str) -> None:
    """*value* as colour and number over a grid of *x* and *y*; a cell is 'sat.' where the deployment is saturated.

    ValueError where several rows share a cell: choose two columns that tell the rows apart.
    """
    check(frame, x, y, value)
    if frame.duplicated([x, y]).any():
        raise ValueError(f"several rows share one cell of {x} and {y}; filter the rest of the columns to one value")
    columns, rows = (texts_of(frame[key]) for key in (x, y))
    at_column, at_row = ({value: index for index, value in enumerate(each)} for each in (columns, rows))
    grid = np.full((len(rows), len(columns)), np.nan)
    verdict = np.zeros(grid.shape, dtype=bool)
    for at_x, at_y, number, lost in zip(
        map(present, frame[x]), map(present, frame[y]), frame[value].astype(float), saturated(frame), strict=True
    ):
        place = at_row[at_y], at_column[at_x]
        grid[place], verdict[place] = number, lost
    # cividis is built for colour-blind readers: Nunez, Anderton and Renslow, PLOS ONE 13(7), 2018.
    image = ax.imshow(grid, aspect="auto", origin="lower", cmap="cividis")
    ax.set_facecolor("#E8E8E8")
    middle = (np.nanmin(grid) + np.nanmax(grid)) / 2 if np.isfinite(grid).any() else 0.0
    show = seconds_text if is_seconds(value) else value_text
    for (row, column), number in np.ndenumerate(grid):
        text = "sat." if verdict[row, column] else "-" if math.isnan(number) else show(number)
        dark = not math.isnan(number) and number < middle
        ax.text(column, row, text, ha="center", va="center", fontsize=8, color="white" if dark else "black")
    ax.set_xticks(range(len(columns)), list(columns.values()), fontsize=8)
    ax.set_yticks(range(len(rows)), list(rows.values()), fontsize=8)
    ax.set_xlabel(label(x), fontsize=9)
    ax.set_ylabel(label(y), fontsize=9)
    bar = ax.figure.colorbar(image, ax=ax)
    bar.set_label(short(value) if is_seconds(value) else label(value), fontsize=9)
    if is_seconds(value):
        bar.ax.yaxis.set_major_formatter(lambda number, _: seconds_text(number))
    bar.ax.tick_params(labelsize=8)


def pareto(
    frame: pd.DataFrame,
    ax: Axes,
    *,
    x: str = "tokens_per_s_per_user",
    y: str = "tokens_per_s_per_gpu",
    hue: str | None = None,
    named: Sequence[str] = (),
) -> None:
    """Every point, and the front of those that no other beats in both *x* and *y* (more is better) as a line.

    The usual picture of serving: throughput a GPU against interactivity, the speed that one user sees. Where *frame* has a column
    `keeps`, points that do not keep the SLO are hollow, and the front is that of those that do, if any does. Points on the front
    are numbered from the left, those too near for a number each with one label, and below the picture named by the columns *named*.
    """
    check(frame, x, y, *([hue] if hue else []))
    frame = frame[frame[x].notna() & frame[y].notna()]
    kept = frame["keeps"].to_numpy(dtype=bool) if "keeps" in frame else np.ones(len(frame), dtype=bool)
    missed = set(frame.index[~kept])
    for index, (name, group) in enumerate(groups(frame, hue)):
        hollow = np.array([each in missed for each in group.index], dtype=bool)
        full = MARKERS[index], _COLORS[index]
        style = {"marker": full[0], "color": full[1], "linestyle": "", "markersize": 5}
        ax.plot(group[x][~hollow], group[y][~hollow], label=name, alpha=0.85, **style)
        ax.plot(group[x][hollow], group[y][hollow], markerfacecolor="none", **style)
    if missed:
        ax.plot([], [], "o", color=GREY, markerfacecolor="none", markersize=5, label="misses the SLO")
    front = frame[pareto_front(frame, x, y, among=kept if kept.any() else None)].sort_values(x)
    ax.plot(front[x], front[y], color="black", linewidth=1.2, zorder=1, label="Pareto front", drawstyle="steps-pre")
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)
    _dress_columns(ax, x, y)
    _legend(ax, hue, always=True)
    if not named:
        return
    at = front[[x, y]].to_numpy(dtype=float)
    points = ax.transData.transform(at) * 72 / ax.figure.dpi
    near = (np.abs(np.diff(points, axis=0)) < (14, 10)).all(axis=1)
    for together in np.split(np.arange(len(at)), np.flatnonzero(~near) + 1) if len(at) else []:
        first, last = int(together[0]) + 1, int(together[-1]) + 1
        text = str(first) if first == last else f"{first}, {last}" if last == first + 1 else f"{first} to {last}"
        ax.annotate(text, at[last - 1], xytext=(4, 4), textcoords="offset points", fontsize=8)
    lines = []
    texts = {key: texts_of(frame[key]) for key in named}
    for number, (_, row) in enumerate(front.iterrows(), start=1):
        settings = (f"{key} {texts[of][present(row[of])]}" for key, of in zip(short_keys(named), named, strict=True))
        lines.append(f"{number}: {', '.join(settings)}")
    ax.text(0.0, -0.14, "\n".join(lines), transform=ax.transAxes, fontsize=8, va="top", ha="left")


def speedup(frame: pd.DataFrame, ax: Axes, *, theory: pd.DataFrame | None = None, hue: str = "alpha") -> None:
    """Speed-up of speculative decoding against drafted tokens: points of *frame* over curves of *theory*.

    Both have columns k, speedup and *hue*; *frame* may have speedup.half_width.
    """
    check(frame, "k", "speedup", hue)
    names = [name for name, _ in groups(frame, hue)]
    if theory is not None:
        check(theory, "k", "speedup", hue)
        for name, group in groups(theory, hue):
            color = _COLORS[names.index(name)] if name in names else GREY
            group = group.sort_values("k")
            ax.plot(group["k"], group["speedup"], color=color, linewidth=1.3, zorder=1)
    for index, (name, group) in enumerate(groups(frame, hue)):
        half = group.get("speedup.half_width")
        ax.errorbar(
            group["k"], group["speedup"], yerr=half, fmt=MARKERS[index], color=_COLORS[index], markersize=5, capsize=3,
            label=name, linewidth=1, zorder=2,
        )  # fmt: skip
    ax.axhline(1.0, color=GREY, linewidth=0.8, linestyle=":")
    dress(ax, x="drafted tokens K", y="speed-up over decoding token by token")
    _legend(ax, hue)


def roofline(frame: pd.DataFrame, ax: Axes, *, peak_flops_per_s: float, peak_bytes_per_s: float) -> None:
    """The roof of a device, and work under it. *frame*: columns name, flops, bytes, seconds, one row a kind of work."""
    check(frame, "name", "flops", "bytes", "seconds")
    intensity = frame["flops"] / frame["bytes"]
    reached = frame["flops"] / frame["seconds"]
    ridge = peak_flops_per_s / peak_bytes_per_s
    low = min(float(intensity.min()), ridge) / 4
    high = max(float(intensity.max()), ridge) * 4
    at = np.geomspace(low, high, 200)
    ax.plot(at, np.minimum(at * peak_bytes_per_s, peak_flops_per_s) / 1e12, color="black", linewidth=1.4)
    for index, (name, i, r) in enumerate(zip(frame["name"], intensity, reached, strict=True)):
        ax.plot([i], [r / 1e12], MARKERS[index % MAX_HUES], color=_COLORS[index % MAX_HUES], markersize=7, label=name)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.axvline(ridge, color=GREY, linewidth=0.8, linestyle=":")
    # To the left of its line, as the legend is to the right.
    ax.text(
        ridge / 1.1, 0.03, f"ridge: {ridge:,.0f} FLOP/byte", transform=ax.get_xaxis_transform(), fontsize=8, ha="right"
    )
    dress(ax, x="arithmetic intensity, FLOP/byte of memory traffic", y="TFLOP/s")
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.legend(fontsize=8, frameon=False, loc="lower right")


def running(frame: pd.DataFrame, ax: Axes, *, bins: int = 300) -> None:
    """Requests waiting and running over time. *frame*: `Result.requests`."""
    check(frame, "arrival_ns", "scheduled_ns", "finish_ns", "status")
    kept = frame[frame["status"] != "rejected"]
    begin = int(frame["arrival_ns"].min())
    end = int(np.nanmax([kept["finish_ns"].max(), kept["arrival_ns"].max()]))
    edges_ns = np.linspace(begin, max(end, begin + 1), bins + 1)
    never = np.iinfo(np.int64).max // 4
    arrival, scheduled, finish = (
        kept[name].fillna(never).to_numpy(dtype=np.int64) for name in ("arrival_ns", "scheduled_ns", "finish_ns")
    )
    levels = {
        "waiting": mean_level(edges_ns, arrival, scheduled),
        "running": mean_level(edges_ns, scheduled, finish),
    }
    plot_level(ax, (edges_ns - begin) * 1e-9, levels, label="requests")
    ax.set_xlabel("time since the first arrival, s", fontsize=9)


def blocks_of(iterations: pd.DataFrame | Blocks) -> Blocks:
    """Iterations in blocks, a table being one."""
    if callable(iterations):
        return iterations
    names = ("start_ns", "duration_ns", "prefill_tokens", "emitted_tokens", "replica", "lane")
    check(iterations, *names)
    block = {name: iterations[name].to_numpy(dtype=np.int64) for name in names}
    return lambda: (block,)


def throughput(frame: pd.DataFrame | Blocks, ax: Axes, *, bins: int = 300, arrival_ns: int | None = None) -> None:
    """Prompt and output tokens a second over time. *frame*: `Result.iterations`, or `Result.columns.iteration_blocks`.

    Time counts from *arrival_ns*, that of the first request, or without it from the start of the first iteration.
    """
    blocks = blocks_of(frame)
    spans = [
        (int(block["start_ns"].min()), int((block["start_ns"] + block["duration_ns"]).max()))
        for block in blocks()
        if len(block["start_ns"])
    ]
    begin = min(start for start, _ in spans) if arrival_ns is None else arrival_ns
    end = max(end for _, end in spans)
    edges_ns = np.linspace(begin, max(end, begin + 1), bins + 1)
    prompt, output = token_rates(edges_ns, blocks, ("prefill_tokens", "emitted_tokens"))
    levels = {"prompt": prompt, "output": output}
    plot_level(ax, (edges_ns - begin) * 1e-9, levels, label="tokens/s")
    ax.set_xlabel(f"time since the first {'iteration' if arrival_ns is None else 'arrival'}, s", fontsize=9)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def gantt(replica: ReplicaColumns, ax: Axes, *, begin_s: float, end_s: float) -> None:
    """Stages of a pipelined replica (`Result.columns.replicas[i]`) between two instants, and what the colours mean.

    ValueError where the replica has no pipeline, or *end_s* is not after *begin_s*.
    """
    from matplotlib.patches import Patch

    if not end_s > begin_s:
        raise ValueError(f"end_s is after begin_s; got {begin_s} to {end_s}")
    plot_gantt(ax, replica, begin_s=begin_s, end_s=end_s)
    ax.set_xlabel("time, s", fontsize=9)
    ax.legend(
        handles=[Patch(facecolor=colour, label=name) for name, colour in COLOURS.items()],
        loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, fontsize=8, frameon=False,
    )  # fmt: skip


def _seconds_axis(ax: Axes, key: str, log: bool) -> None:
    if is_seconds(key):
        ax.yaxis.set_major_formatter(lambda value, _: seconds_text(value))
    elif not log:
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")


def _plain_ticks(axis: Any, values: pd.Series) -> None:
    from matplotlib.ticker import NullFormatter

    found = texts_of(values.dropna())
    if len(found) <= 10:
        axis.set_ticks(list(found), list(found.values()))
        axis.set_minor_formatter(NullFormatter())


def _dress_columns(ax: Axes, x: str, y: str) -> None:
    """Labels by column. The ticks of seconds carry their own units: 8 ms, 1.2 s."""
    dress(ax, x=label(x), y=label(y).removesuffix(", s"))


def _crosses(ax: Axes, at: Any, color: str) -> bool:
    """Crosses at the upper edge for points without a latency; whether there are any."""
    if len(at):
        ax.plot(at, np.full(len(at), 0.97), "x", color=color, markersize=7, mew=1.6,
                transform=ax.get_xaxis_transform(), clip_on=False)  # fmt: skip
    return bool(len(at))


def _legend(ax: Axes, hue: str | None, *, always: bool = False, crossed: bool = False) -> None:
    if crossed:
        ax.plot([], [], "x", color=GREY, markersize=7, mew=1.6, label="saturated")
    if hue is not None or always or crossed:
        handles, names = ax.get_legend_handles_labels()
        kept = [(handle, name) for handle, name in zip(handles, names, strict=True) if name]
        kept.sort(key=lambda pair: pair[1] in ("saturated", "Pareto front"))  # what is no hue comes last
        if kept:
            ax.legend(
                [handle for handle, _ in kept], [name for _, name in kept], title=None if hue is None else label(hue),
                fontsize=8, title_fontsize=8, framealpha=0.85, edgecolor=GRID,
            )  # fmt: skip
