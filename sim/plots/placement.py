"""Pictures of placements and of what they serve."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from policies.placement import Cluster, Placement
from sim.plots.style import GREY, MARKERS, OKABE_ITO, dress, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FloatArray = NDArray[np.float64]

_COLOURS = tuple(colour for name, colour in OKABE_ITO.items() if name not in ("black", "yellow"))
_ROW_MODELS = 44  # characters of model names in one line of a group's box
_MAX_LINES = 6
GOAL = 0.99
"""The share of requests in time that AlpaServe compares policies at."""


def placement_figure(placement: Placement, names: Sequence[str], cluster: Cluster) -> Figure:
    """Devices in nodes, groups as boxes around them with their shape, stages as columns, and the models they host."""
    per_row = min(cluster.devices_per_node, cluster.n_devices)
    rows = math.ceil(cluster.n_devices / per_row)
    texts = [
        _model_lines([names[m] for m in group.models], max(int(_ROW_MODELS / 4 * min(group.n_devices, per_row)), 9))
        for group in placement.groups
    ]
    n_lines = max((len(lines) for lines in texts), default=1)
    # One row of the picture is a node: a line of devices above the lines of text.
    height = 0.95 + 0.2 * n_lines
    figure = sheet(1.3 * per_row + 1.6, height * rows + 0.9)
    ax = figure.add_subplot()
    device = 0
    for index, (group, lines) in enumerate(zip(placement.groups, texts, strict=True)):
        colour = _COLOURS[index % len(_COLOURS)]
        left = group.n_devices
        while left:
            row, column = divmod(device, per_row)
            here = min(left, per_row - column)
            done = group.n_devices - left
            stages = [(done + k) // group.intra_op for k in range(here)]
            _draw_box(ax, (column, -row * height), here, height, colour)
            _draw_devices(ax, (column, -row * height), device, stages, colour)
            title = "continued" if done else f"({group.inter_op}, {group.intra_op})"
            _draw_texts(ax, (column, -row * height), title, None if done else lines, colour)
            device += here
            left -= here
    for number in range(device, cluster.n_devices):
        row, column = divmod(number, per_row)
        _draw_devices(ax, (column, -row * height), number, [None], GREY)
    for row in range(rows):
        ax.text(-0.1, -row * height - 0.44, f"node {row}", ha="right", va="center", fontsize=9, color=GREY)
    ax.set_xlim(-0.8, per_row + 0.05)
    ax.set_ylim(-rows * height, 0.1)
    ax.axis("off")
    kinds = sorted({name.split("#")[0] for name in names})
    kind_text = ", ".join(kinds[:4]) + (", ..." if len(kinds) > 4 else "")
    ax.set_title(
        f"{placement.replicas} replicas of {len(names)} models ({kind_text})"
        f" on {placement.n_devices} of {cluster.n_devices} devices; (inter-op, intra-op); shades are stages",
        fontsize=9.5,
        loc="left",
    )
    return figure


def _draw_box(ax: Axes, corner: tuple[float, float], n_devices: int, height: float, colour: str) -> None:
    """A group's devices of one node, or some of them; *corner*: the upper left."""
    from matplotlib.patches import FancyBboxPatch

    x, y = corner
    ax.add_patch(
        FancyBboxPatch(
            (x + 0.06, y - height + 0.12),
            n_devices - 0.12,
            height - 0.2,
            boxstyle="round,pad=0,rounding_size=0.06",
            facecolor=colour,
            alpha=0.13,
            edgecolor="none",
        )
    )


def _draw_devices(ax: Axes, corner: tuple[float, float], first: int, stages: Sequence[int | None], colour: str) -> None:
    """Devices side by side from the number *first* on, shaded by stage; None: of no group."""
    from matplotlib.patches import Rectangle

    x, y = corner
    for k, stage in enumerate(stages):
        if stage is None:
            patch = Rectangle((x + k + 0.14, y - 0.62), 0.72, 0.36, fill=False, edgecolor=colour)
        else:
            patch = Rectangle(
                (x + k + 0.14, y - 0.62),
                0.72,
                0.36,
                facecolor=colour,
                edgecolor="white",
                alpha=0.45 if stage % 2 else 0.8,
            )
        ax.add_patch(patch)
        number_colour = colour if stage is None else "white"
        ax.text(x + k + 0.5, y - 0.44, str(first + k), ha="center", va="center", color=number_colour, fontsize=9)


def _draw_texts(ax: Axes, corner: tuple[float, float], title: str, lines: list[str] | None, colour: str) -> None:
    """The title of a group's box, and the *lines* of its models; None: they stand in its first box."""
    x, y = corner
    ax.text(x + 0.14, y - 0.12, title, va="top", fontsize=8.5, color=colour, fontweight="bold")
    if lines is not None:
        ax.text(
            x + 0.14,
            y - 0.7,
            "\n".join(lines) or "hosts nothing",
            va="top",
            fontsize=7.5,
            color="black" if lines else GREY,
            linespacing=1.35,
        )


def _model_lines(names: Sequence[str], width: int) -> list[str]:
    """Models in lines: copies of one model gathered as 'bert-1.3b #0 #4', cut short after a few lines."""
    by_kind: dict[str, list[str]] = {}
    for name in names:
        kind, _, copy = name.partition("#")
        by_kind.setdefault(kind, []).append(copy)
    words: list[str] = []
    for kind, copies in by_kind.items():
        words.append(kind)
        words += [f"#{copy}" for copy in copies if copy]
    lines, line = [], ""
    for word in words:
        # A model's name starts a line of its own.
        fits = line and word.startswith("#") and len(line) + 1 + len(word) <= width
        if fits:
            line = f"{line} {word}"
        else:
            if line:
                lines.append(line)
            line = word
    lines += [line] if line else []
    if len(lines) > _MAX_LINES:
        return [*lines[: _MAX_LINES - 1], f"... {len(names)} models"]
    return lines


def draw_latencies(ax: Axes, latencies_s: Mapping[str, FloatArray], *, title: str) -> None:
    """Cumulative distributions of latency, one line a policy, with its mean as a dashed line."""
    for (name, values), colour in zip(latencies_s.items(), _COLOURS, strict=False):
        ordered = np.sort(values)
        shown = np.unique(np.linspace(0, len(ordered) - 1, 800).astype(int))
        mean_s = float(values.mean())
        ax.plot(ordered[shown], (shown + 1) / len(ordered), color=colour, label=f"{name}, mean {mean_s:.2f} s")
        ax.axvline(mean_s, color=colour, linestyle="--", linewidth=0.9)
    _log_seconds(ax)
    ax.set_ylim(0, 1.02)
    ax.legend(fontsize=8, loc="lower right")
    dress(ax, x="latency, s", y="share of requests", title=title)


def _log_seconds(ax: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())


def draw_utilisation(ax: Axes, times_s: FloatArray, utilisation: Mapping[str, FloatArray], *, title: str) -> None:
    """Share of the devices busy in each interval, one line a policy; *times_s* are the edges of the intervals."""
    for (name, values), colour in zip(utilisation.items(), _COLOURS, strict=False):
        ax.stairs(values, times_s, color=colour, label=name, linewidth=1.4)
    # Room above full use, so that the legend covers no line.
    ax.set_ylim(0, 1.28)
    ax.set_yticks(np.arange(0, 1.01, 0.2))
    ax.legend(fontsize=8, loc="upper right", ncols=2)
    dress(ax, x="time, s", y="devices busy", title=title)


def draw_attainment(
    ax: Axes, x: Sequence[float], attainment: Mapping[str, Sequence[float]], *, label: str, goal: float | None = GOAL
) -> None:
    """Attainment against one quantity, one line a policy, the goal as a dashed line."""
    for index, (name, values) in enumerate(attainment.items()):
        ax.plot(
            x,
            [100 * value for value in values],
            color=_COLOURS[index % len(_COLOURS)],
            marker=MARKERS[index % len(MARKERS)],
            markersize=4,
            label=name,
        )
    if goal is not None:
        ax.axhline(100 * goal, color=GREY, linestyle="--", linewidth=0.9)
        ax.text(
            0.99, 100 * goal + 1.2, f"{goal:.0%}", transform=ax.get_yaxis_transform(), ha="right", va="top", fontsize=8
        )
    ax.set_ylim(0, 108)
    dress(ax, x=label, y="SLO attainment, %")


def attainment_figure(
    panels: Mapping[str, tuple[Sequence[float], Mapping[str, Sequence[float]]]], *, title: str
) -> Figure:
    """Panels side by side: axis label -> (values, attainment by policy)."""
    figure = sheet(3.6 * len(panels) + 0.6, 3.4, title=title)
    axes = np.atleast_1d(figure.subplots(1, len(panels)))
    for ax, (label, (x, lines)) in zip(axes, panels.items(), strict=True):
        draw_attainment(ax, x, lines, label=label)
    axes[0].legend(fontsize=8, loc="best")
    return figure


def busy_share(
    stages: NDArray[np.int64], edges_s: FloatArray, devices: Mapping[int, int], n_devices: int
) -> FloatArray:
    """Share of device time in use in each interval, from the rows of `sim.placement.groups.stage_record`.

    *devices* maps a group to the devices that share each of its stages.
    """
    edges_ns = edges_s * 1e9
    start, end = stages[:, 2].astype(float), (stages[:, 2] + stages[:, 3]).astype(float)
    weight = np.array([devices[int(group)] for group in stages[:, 0]], float)
    # Busy time before an edge: for each use, what of it lies before; sorted sums keep that linear.
    order_start, order_end = np.argsort(start), np.argsort(end)

    def before(points: FloatArray, order: NDArray[np.intp], at: FloatArray) -> FloatArray:
        sorted_points, w = points[order], weight[order]
        counts = np.searchsorted(sorted_points, at)
        sums_w = np.concatenate(([0.0], np.cumsum(w)))
        sums_wp = np.concatenate(([0.0], np.cumsum(w * sorted_points)))
        return at * sums_w[counts] - sums_wp[counts]

    total = before(start, order_start, edges_ns) - before(end, order_end, edges_ns)
    return np.diff(total) / (np.diff(edges_ns) * n_devices)
