"""Pictures of results: each function draws a DataFrame on an Axes that it is given, and returns nothing.

    figure = matplotlib.figure.Figure(); plots.lines(result.table, figure.subplots(), x="workload.rate_scale")

Colours are Okabe and Ito's, told apart with any colour vision, and each hue has a marker of its own. A column
`NAME.half_width` beside NAME is drawn as an error bar. matplotlib is imported where a figure is made, without pyplot.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.report.plots import OKABE_ITO, mean_level, plot_latency_ecdf, plot_level, rate_per_s
from sim.text import seconds_text

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sim.engine.columns import ReplicaColumns

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
MAX_HUES = len(MARKERS)
_COLORS = (*(color for name, color in OKABE_ITO.items() if name != "yellow"), "#5A5A5A")
_GREY = "#5A5A5A"
_LATENCIES = {
    "ttft_s": "time to first token",
    "tpot_s": "time per output token",
    "itl_s": "gap between tokens",
    "e2el_s": "end-to-end latency",
    "queue_s": "time in the queue",
}
_UNITS = {
    "output_tokens_per_s": "output tokens/s",
    "total_tokens_per_s": "prompt and output tokens/s",
    "requests_per_s": "requests/s",
    "goodput_requests_per_s": "goodput, requests/s",
    "slo_attainment": "share of requests within the SLO",
    "makespan_s": "simulated time, s",
    "mfu": "share of peak FLOP/s (MFU)",
    "mbu": "share of peak memory bandwidth (MBU)",
    "busy_fraction": "share of time busy",
    "gpus": "GPUs",
    "tokens_per_s_per_gpu": "output tokens/s per GPU",
    "tokens_per_s_per_user": "output tokens/s per user (1 / median TPOT)",
    "usd_per_mtoken": "$ per million output tokens",
    "gpu_s_per_mtoken": "GPU-seconds per million output tokens",
    "joule_per_mtoken": "J per million output tokens, at TDP",
    "rate_per_s": "requests/s within the SLO",
    "workload.rate_scale": "arrival rate, times the trace's own",
    "workload.arrivals.rate_per_s": "arrivals, requests/s",
    "workload.arrivals.concurrency": "clients",
    "scheduler.token_budget": "token budget, tokens",
    "decoding.num_speculative_tokens": "drafted tokens K",
    "parallel.tensor": "tensor-parallel GPUs",
    "parallel.pipeline": "pipeline stages",
}
_TOP = 1.12
_MOST_NAMED = 20


def label(key: str) -> str:
    """What a dotted column is called on an axis, with its unit.

    >>> label("ttft_s.p99"), label("replicas")
    ('p99 time to first token, s', 'replicas')
    """
    if key in _UNITS:
        return _UNITS[key]
    head, _, statistic = key.rpartition(".")
    if head in _LATENCIES:
        return f"{statistic} {_LATENCIES[head]}, s"
    if key in _LATENCIES:
        return f"{_LATENCIES[key]}, s"
    return key.removeprefix("meta.").replace("_", " ").replace(".", " ")


def latency_cdf(frame: pd.DataFrame, ax: Axes, *, column: str = "ttft_s", title: str | None = None) -> None:
    """Share of requests at or below each latency, logarithmic, with p50, p90 and p99 marked. *frame*: `Result.requests`."""
    _check(frame, column)
    plot_latency_ecdf(ax, frame[column].to_numpy(dtype=float), name=title or _short(column))
    ax.set_xlabel("latency, log scale", fontsize=9)
    ax.set_ylabel("share at or below", fontsize=9)


def latency_cdfs(frame: pd.DataFrame, ax: Axes, *, column: str = "ttft_s", hue: str) -> None:
    """Latency distributions of several groups on one Axes, one line for each value of *hue*."""
    from sim.report.plots import ecdf

    _check(frame, column, hue)
    for index, (name, group) in enumerate(_groups(frame, hue)):
        values = group[column].dropna().to_numpy(dtype=float)
        if values.size:
            x, share = ecdf(np.maximum(values, 1e-9))
            ax.step(x, share, where="post", color=_COLORS[index], linewidth=1.5, label=name)
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(lambda value, _: seconds_text(value))
    ax.set_ylim(0, 1.02)
    ax.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    _dress(ax, x=f"{label(column)}, log scale".replace(", s,", ","), y="share at or below")
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
    """*y* against *x*, a line for each value of *hue*, with intervals where *frame* has `y.half_width`.

    Saturated points have no latency: they are crosses at the upper edge, above where they would be.
    """
    _check(frame, x, y, *([hue] if hue else []))
    half = f"{y}.half_width"
    numeric = _numeric(frame[x])
    ticks = None if numeric else list(dict.fromkeys(map(_text, frame[x])))
    crossed = False
    for index, (name, group) in enumerate(_groups(frame, hue)):
        at = group[x].to_numpy(dtype=float) if ticks is None else np.array([ticks.index(_text(v)) for v in group[x]])
        order = np.argsort(at, kind="stable")
        at, value = at[order], group[y].to_numpy(dtype=float)[order]
        error = group[half].to_numpy(dtype=float)[order] if half in group and group[half].notna().any() else None
        color, marker = _COLORS[index], MARKERS[index]
        ax.errorbar(
            at,
            value,
            yerr=error,
            color=color,
            marker=marker,
            markersize=4.5,
            linewidth=1.4,
            capsize=2.5,
            label=name,
        )
        lost = _saturated(group)[order] & np.isnan(value)
        if lost.any():
            crossed = True
            ax.plot(at[lost], np.full(lost.sum(), 0.97), "x", color=color, markersize=7, mew=1.6,
                    transform=ax.get_xaxis_transform(), clip_on=False)  # fmt: skip
    if log_x:
        ax.set_xscale("log")
    if log_y:
        ax.set_yscale("log")
    elif frame[y].notna().any() and float(frame[y].min()) >= 0:
        ax.set_ylim(bottom=0)
        ax.set_ylim(top=ax.get_ylim()[1] * _TOP)
    if ticks is not None:
        ax.set_xticks(range(len(ticks)), ticks)
    _seconds_axis(ax, y, log_y)
    if numeric:
        _plain_ticks(ax.xaxis, frame[x])
    _dress(ax, x=label(x), y=label(y))
    if crossed:
        ax.plot([], [], "x", color=_GREY, markersize=7, mew=1.6, label="saturated")
    _legend(ax, hue, always=crossed)


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
    _check(frame, x, y, along, *([hue] if hue else []))
    crossed = False
    for index, (name, group) in enumerate(_groups(frame, hue)):
        group = group.sort_values(along)
        at, value = group[x].to_numpy(dtype=float), group[y].to_numpy(dtype=float)
        color = _COLORS[index]
        ax.plot(at, value, color=color, marker=MARKERS[index], markersize=4.5, linewidth=1.4, label=name)
        lost = _saturated(group) & np.isnan(value)
        if lost.any():
            crossed = True
            ax.plot(at[lost], np.full(lost.sum(), 0.97), "x", color=color, markersize=7, mew=1.6,
                    transform=ax.get_xaxis_transform(), clip_on=False)  # fmt: skip
    ax.set_ylim(bottom=0)
    ax.set_ylim(top=ax.get_ylim()[1] * _TOP)
    _seconds_axis(ax, y, False)
    if not _is_seconds(x):
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    _dress(ax, x=label(x), y=label(y))
    if crossed:
        ax.plot([], [], "x", color=_GREY, markersize=7, mew=1.6, label="saturated")
    _legend(ax, hue, always=crossed)


def heatmap(frame: pd.DataFrame, ax: Axes, *, x: str, y: str, value: str) -> None:
    """*value* as colour and number over a grid of *x* and *y*; a cell is 'sat.' where the deployment is saturated.

    ValueError where several rows share a cell: choose two columns that tell the rows apart.
    """
    _check(frame, x, y, value)
    if frame.duplicated([x, y]).any():
        raise ValueError(f"several rows share one cell of {x} and {y}; filter the rest of the columns to one value")
    columns, rows = (_ordered(frame[key]) for key in (x, y))
    grid = np.full((len(rows), len(columns)), np.nan)
    verdict = np.zeros(grid.shape, dtype=bool)
    for at_x, at_y, number, lost in zip(
        map(_text, frame[x]), map(_text, frame[y]), frame[value].astype(float), _saturated(frame), strict=True
    ):
        place = rows.index(at_y), columns.index(at_x)
        grid[place], verdict[place] = number, lost
    # cividis is built for colour-blind readers: Nunez, Anderton and Renslow, PLOS ONE 13(7), 2018.
    image = ax.imshow(grid, aspect="auto", origin="lower", cmap="cividis")
    ax.set_facecolor("#E8E8E8")
    middle = (np.nanmin(grid) + np.nanmax(grid)) / 2 if np.isfinite(grid).any() else 0.0
    show = seconds_text if _is_seconds(value) else _text
    for (row, column), number in np.ndenumerate(grid):
        text = "sat." if verdict[row, column] else "-" if math.isnan(number) else show(number)
        dark = not math.isnan(number) and number < middle
        ax.text(column, row, text, ha="center", va="center", fontsize=8, color="white" if dark else "black")
    ax.set_xticks(range(len(columns)), columns, fontsize=8)
    ax.set_yticks(range(len(rows)), rows, fontsize=8)
    ax.set_xlabel(label(x), fontsize=9)
    ax.set_ylabel(label(y), fontsize=9)
    bar = ax.figure.colorbar(image, ax=ax)
    bar.set_label(_short(value) if _is_seconds(value) else label(value), fontsize=9)
    if _is_seconds(value):
        bar.ax.yaxis.set_major_formatter(lambda number, _: seconds_text(number))
    bar.ax.tick_params(labelsize=8)


def pareto(
    frame: pd.DataFrame,
    ax: Axes,
    *,
    x: str = "tokens_per_s_per_user",
    y: str = "tokens_per_s_per_gpu",
    hue: str | None = None,
) -> None:
    """Every point, and the front of those that no other beats in both *x* and *y* (more is better) as a line.

    The usual picture of serving: throughput a GPU against interactivity, the speed that one user sees.
    """
    from sim.study.optimize import pareto_front

    _check(frame, x, y, *([hue] if hue else []))
    frame = frame[frame[x].notna() & frame[y].notna()]
    for index, (name, group) in enumerate(_groups(frame, hue)):
        ax.plot(group[x], group[y], MARKERS[index], color=_COLORS[index], markersize=5, label=name, alpha=0.85)
    front = frame[pareto_front(frame, x, y)].sort_values(x)
    ax.plot(front[x], front[y], color="black", linewidth=1.2, zorder=1, label="Pareto front", drawstyle="steps-pre")
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)
    _dress(ax, x=label(x), y=label(y))
    _legend(ax, hue, always=True)


def speedup(frame: pd.DataFrame, ax: Axes, *, theory: pd.DataFrame | None = None, hue: str = "alpha") -> None:
    """Speed-up of speculative decoding against drafted tokens: points of *frame* over curves of *theory*.

    Both have columns k, speedup and *hue*; *frame* may have speedup.half_width.
    """
    _check(frame, "k", "speedup", hue)
    names = [name for name, _ in _groups(frame, hue)]
    if theory is not None:
        _check(theory, "k", "speedup", hue)
        for name, group in _groups(theory, hue):
            color = _COLORS[names.index(name)] if name in names else _GREY
            group = group.sort_values("k")
            ax.plot(group["k"], group["speedup"], color=color, linewidth=1.3, zorder=1)
    for index, (name, group) in enumerate(_groups(frame, hue)):
        half = group.get("speedup.half_width")
        ax.errorbar(
            group["k"], group["speedup"], yerr=half, fmt=MARKERS[index], color=_COLORS[index], markersize=5, capsize=3,
            label=name, linewidth=1, zorder=2,
        )  # fmt: skip
    ax.axhline(1.0, color=_GREY, linewidth=0.8, linestyle=":")
    _dress(ax, x="drafted tokens K", y="speed-up over decoding token by token")
    _legend(ax, hue)


def roofline(frame: pd.DataFrame, ax: Axes, *, peak_flops_per_s: float, peak_bytes_per_s: float) -> None:
    """The roof of a device, and work under it. *frame*: columns name, flops, bytes, seconds, one row a kind of work."""
    _check(frame, "name", "flops", "bytes", "seconds")
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
    ax.axvline(ridge, color=_GREY, linewidth=0.8, linestyle=":")
    # To the left of its line, as the legend is to the right.
    ax.text(
        ridge / 1.1, 0.03, f"ridge: {ridge:,.0f} FLOP/byte", transform=ax.get_xaxis_transform(), fontsize=8, ha="right"
    )
    _dress(ax, x="arithmetic intensity, FLOP/byte of memory traffic", y="TFLOP/s")
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.legend(fontsize=8, frameon=False, loc="lower right")


def running(frame: pd.DataFrame, ax: Axes, *, bins: int = 300) -> None:
    """Requests waiting and running over time. *frame*: `Result.requests`."""
    _check(frame, "arrival_ns", "scheduled_ns", "finish_ns", "status")
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


def throughput(frame: pd.DataFrame, ax: Axes, *, bins: int = 300, arrival_ns: int | None = None) -> None:
    """Prompt and output tokens a second over time. *frame*: `Result.iterations`.

    Time counts from *arrival_ns*, that of the first request, or without it from the start of the first iteration.
    """
    _check(frame, "start_ns", "duration_ns", "prefill_tokens", "emitted_tokens", "replica", "lane")
    begin = int(frame["start_ns"].min()) if arrival_ns is None else arrival_ns
    end = int((frame["start_ns"] + frame["duration_ns"]).max())
    edges_ns = np.linspace(begin, max(end, begin + 1), bins + 1)
    levels = {"prompt": np.zeros(bins), "output": np.zeros(bins)}
    for _, lane in frame.groupby(["replica", "lane"]):
        start, duration = (lane[name].to_numpy(dtype=np.int64) for name in ("start_ns", "duration_ns"))
        for name, column in (("prompt", "prefill_tokens"), ("output", "emitted_tokens")):
            levels[name] += rate_per_s(edges_ns, start, duration, lane[column].to_numpy(dtype=np.int64))
    plot_level(ax, (edges_ns - begin) * 1e-9, levels, label="tokens/s")
    ax.set_xlabel(f"time since the first {'iteration' if arrival_ns is None else 'arrival'}, s", fontsize=9)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def gantt(replica: ReplicaColumns, ax: Axes, *, begin_s: float, end_s: float) -> None:
    """Stages of a pipelined replica (`Result.columns.replicas[i]`) between two instants, and what the colours mean.

    ValueError where the replica has no pipeline, or *end_s* is not after *begin_s*.
    """
    from matplotlib.patches import Patch

    from sim.report.gantt import COLOURS, plot_gantt

    if not end_s > begin_s:
        raise ValueError(f"end_s is after begin_s; got {begin_s} to {end_s}")
    plot_gantt(ax, replica, begin_s=begin_s, end_s=end_s)
    ax.set_xlabel("time, s", fontsize=9)
    ax.legend(
        handles=[Patch(facecolor=colour, label=name) for name, colour in COLOURS.items()],
        loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, fontsize=8, frameon=False,
    )  # fmt: skip


def figure(columns: int = 1, rows: int = 1, *, title: str = "", width: float = 5.2, height: float = 4.0) -> Figure:
    """An empty figure for `figure.subplots(rows, columns)`, laid out so that nothing overlaps."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(width * columns, height * rows + (0.3 if title else 0)), dpi=120, layout="constrained")
    if title:
        made.suptitle(title, fontsize=11)
    return made


def save(figure: Figure, path: Path) -> list[Path]:
    """Write *figure* as PNG and SVG beside each other, without dates, and return both paths."""
    from matplotlib import rc_context

    png, svg = path.with_suffix(".png"), path.with_suffix(".svg")
    figure.savefig(png, metadata={"Software": "rooftrace"})
    with rc_context({"svg.hashsalt": "rooftrace", "svg.fonttype": "none"}):
        figure.savefig(svg, metadata={"Date": None, "Creator": "rooftrace"})
    return [png, svg]


def _check(frame: pd.DataFrame, *columns: str) -> None:
    from difflib import get_close_matches

    from sim.text import unknown

    for column in columns:
        if column not in frame:
            names = [name for name in map(str, frame.columns) if not name.endswith(".half_width")]
            problem = f"{column} is not a column"
            if len(names) > _MOST_NAMED and not get_close_matches(column, names, n=1):
                some = ", ".join(names[:_MOST_NAMED])
                raise ValueError(f"{problem}; valid here: {some} and {len(names) - _MOST_NAMED} more")
            raise ValueError(unknown(problem, column, names))


def _groups(frame: pd.DataFrame, hue: str | None) -> Iterator[tuple[str, pd.DataFrame]]:
    if hue is None:
        yield "", frame
        return
    texts = frame[hue].map(_text)
    names = _ordered(frame[hue])
    if len(names) > MAX_HUES:
        raise ValueError(f"{hue} has {len(names)} values, and {MAX_HUES} lines are the most that can be told apart")
    for name in names:
        yield name, frame[texts == name]


def _ordered(column: pd.Series) -> list[str]:
    """The different values as text: numbers by size, texts in order of appearance."""
    values = list(dict.fromkeys(column))
    return list(dict.fromkeys(map(_text, sorted(values) if _numeric(column) else values)))


def _numeric(column: pd.Series) -> bool:
    return column.dtype.kind in "iuf"


def _saturated(frame: pd.DataFrame) -> Any:
    if "saturated" not in frame:
        return np.zeros(len(frame), dtype=bool)
    return np.array([value is not None and value == value and bool(value) for value in frame["saturated"]], dtype=bool)


def _text(value: Any) -> str:
    if value is None or value != value:
        return "-"
    if isinstance(value, str):
        return value if len(value) <= 30 else f"{value[:29]}…"
    if isinstance(value, bool | np.bool_) or not isinstance(value, float | int | np.number):
        return str(value)
    small = isinstance(value, float | np.floating) and abs(value) < 1e4
    return f"{value:.4g}" if small else f"{value:,.0f}"


def _is_seconds(key: str) -> bool:
    return key.rpartition(".")[0] in _LATENCIES or key in _LATENCIES


def _seconds_axis(ax: Axes, key: str, log: bool) -> None:
    if _is_seconds(key):
        ax.yaxis.set_major_formatter(lambda value, _: seconds_text(value))
    elif not log:
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")


def _plain_ticks(axis: Any, values: pd.Series) -> None:
    from matplotlib.ticker import NullFormatter

    found = sorted(set(values.dropna()))
    if len(found) <= 10:
        axis.set_ticks(found, [_text(value) for value in found])
        axis.set_minor_formatter(NullFormatter())


def _dress(ax: Axes, *, x: str, y: str) -> None:
    seconds = y.endswith(", s")
    ax.set_xlabel(x, fontsize=9)
    # The ticks carry their own units: 8 ms, 1.2 s.
    ax.set_ylabel(y.removesuffix(", s") if seconds else y, fontsize=9)
    ax.set_axisbelow(True)
    ax.grid(True, which="major", color="#DDDDDD", linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=8)


def _legend(ax: Axes, hue: str | None, *, always: bool = False) -> None:
    if hue is not None or always:
        handles, names = ax.get_legend_handles_labels()
        kept = [(handle, name) for handle, name in zip(handles, names, strict=True) if name]
        kept.sort(key=lambda pair: pair[1] in ("saturated", "Pareto front"))  # what is no hue comes last
        if kept:
            ax.legend(
                [handle for handle, _ in kept], [name for _, name in kept], title=None if hue is None else label(hue),
                fontsize=8, title_fontsize=8, framealpha=0.85, edgecolor="#DDDDDD",
            )  # fmt: skip


def sweep_figures(
    table: pd.DataFrame, axes: Sequence[str], *, x: str | None = None, y: str | None = None, hue: str | None = None
) -> Mapping[str, Figure]:
    """Figures of a sweep by file name: *y* against *x* by *hue*, or what suits the columns that vary.

    Without *x* and *y*: the headline metrics against the first varied number, and for two varied numbers heat maps.
    ValueError where nothing can be drawn.
    """
    _check(table, *(key for key in (x, y, hue) if key is not None))
    varied = [key for key in axes if len(set(map(_text, table[key]))) > 1]
    numbers = [key for key in varied if _numeric(table[key])]
    if x is None and not varied:
        raise ValueError("nothing varies in this sweep; give --x and --y")
    if x is None:
        rates = [key for key in numbers if "rate" in key or "concurrency" in key]
        x = (rates or numbers or varied)[0]
    if hue is None:
        others = [key for key in varied if key != x and len(set(map(_text, table[key]))) <= MAX_HUES]
        hue = others[0] if others else None
    fixed = [key for key in varied if key not in (x, hue)]
    out: dict[str, Figure] = {}
    shown = table
    note = ""
    if fixed:
        # One picture shows three columns at most; the others are held at their first value, and the title says so.
        for key in fixed:
            first = shown[key].iloc[0]
            shown = shown[shown[key].map(_text) == _text(first)]
            note += f"{', ' if note else ' at '}{label(key)} = {_text(first)}"
    ys = [y] if y else [name for name in ("ttft_s.p99", "tpot_s.p99", "output_tokens_per_s") if name in shown]
    ys = [name for name in ys if y or shown[name].notna().any()]
    if not ys:
        raise ValueError("no metric has a value in this sweep; see its error column")
    made = figure(len(ys), title=f"{_title(ys, x, hue)}{note}")
    log_x = _numeric(shown[x]) and _spans(shown[x])
    for ax, name in zip(np.atleast_1d(made.subplots(1, len(ys))), ys, strict=True):
        lines(shown, ax, x=x, y=name, hue=hue, log_x=log_x)
        legend = ax.get_legend()
        if legend is not None and name != ys[0] and not _lost(shown, name):
            legend.remove()
    out[f"{'sweep' if y is None else _file(y)}-by-{_file(x)}"] = made
    if y is None and "rate" in x and shown["ttft_s.p99"].notna().any():
        made = figure(title=f"Latency against throughput as load grows{note}", width=6.5, height=4.5)
        throughput_latency(shown, made.subplots(), hue=hue, along=x)
        out["throughput-latency"] = made
    if (
        y is None
        and hue is not None
        and _numeric(shown[hue])
        and _numeric(shown[x])
        and not shown.duplicated([x, hue]).any()
    ):
        name = ys[0]
        made = figure(title=f"{_short(name)}{note}", width=6.5, height=4.5)
        heatmap(shown, made.subplots(), x=x, y=hue, value=name)
        out[f"heatmap-{_file(name)}"] = made
    return out


def _title(ys: Sequence[str], x: str, hue: str | None) -> str:
    what = _short(ys[0]) if len(ys) == 1 else "Latency and throughput"
    return f"{what[0].upper()}{what[1:]} against {_short(x)}" + ("" if hue is None else f", by {_short(hue)}")


def _short(key: str) -> str:
    """The label of a column without its unit."""
    return label(key).partition(", ")[0].partition(" (")[0]


def _lost(frame: pd.DataFrame, name: str) -> bool:
    """Whether some points of *name* are drawn as crosses, which need a legend."""
    return bool((_saturated(frame) & frame[name].isna().to_numpy()).any())


def _spans(values: pd.Series) -> bool:
    low, high = float(values.min()), float(values.max())
    return low > 0 and high / low >= 8


def _file(key: str) -> str:
    return key.replace(".", "-").replace("_", "-")


def run_figures(requests: pd.DataFrame, iterations: pd.DataFrame) -> Mapping[str, Figure]:
    """Figures of one run by file name: latency distributions, and what went on over time."""
    columns = [name for name in ("ttft_s", "tpot_s", "e2el_s") if requests[name].notna().any()]
    if not columns:
        raise ValueError("no request finished in this run, so that there is nothing to draw")
    latency = figure(len(columns), title="How long requests took", width=4.2)
    for ax, name in zip(np.atleast_1d(latency.subplots(1, len(columns))), columns, strict=True):
        latency_cdf(requests, ax, column=name)
    over_time = figure(1, 2, title="Requests in the system, and tokens worked on", width=9, height=2.8)
    top, bottom = over_time.subplots(2, 1, sharex=True)
    running(requests, top)
    top.set_xlabel("")
    if len(iterations):
        throughput(iterations, bottom, arrival_ns=int(requests["arrival_ns"].min()))
    return {"latency-distributions": latency, "over-time": over_time}
