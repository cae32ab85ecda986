"""The look of every picture: colours, the sheet it is drawn on, labels and grid, and how it is saved.

matplotlib is imported where a figure is made, never when a module of this room is, and without pyplot: no global state.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from workloads.write import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Okabe and Ito, "Color Universal Design" (2008): eight colours told apart with any colour vision.
OKABE_ITO: Mapping[str, str] = {
    "blue": "#0072B2",
    "vermillion": "#D55E00",
    "green": "#009E73",
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "purple": "#CC79A7",
    "black": "#000000",
    "yellow": "#F0E442",
}
GREY = "#5A5A5A"
GRID = "#DDDDDD"
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_DPI = 120


def figure(columns: int = 1, rows: int = 1, *, title: str = "", width: float = 5.2, height: float = 4.0) -> Figure:
    """An empty figure for `figure.subplots(rows, columns)`, laid out so that nothing overlaps."""
    return sheet(width * columns, height * rows + (0.3 if title else 0), title=title)


def sheet(
    width: float, height: float, *, title: str = "", layout: Literal["constrained"] | None = "constrained"
) -> Figure:
    """An empty figure of a size in inches; without *layout* the caller places its Axes, which is faster."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), dpi=_DPI, layout=layout)
    if title:
        made.suptitle(title, fontsize=11)
    return made


def dress(ax: Axes, *, x: str | None = None, y: str | None = None, title: str | None = None) -> None:
    """Labels, grid and spines; what is None stays as it is."""
    if x is not None:
        ax.set_xlabel(x, fontsize=9)
    if y is not None:
        ax.set_ylabel(y, fontsize=9)
    if title is not None:
        ax.set_title(title, fontsize=9, loc="left")
    ax.set_axisbelow(True)
    ax.grid(True, which="major", color=GRID, linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=8)


def lighten(figure: Figure) -> None:
    """Replace the axes of *figure*, whose limits, ticks and labels are final, by one artist for all tick marks, one for the grid
    and a text for each label: matplotlib makes five artists for each tick, which takes half of the time of a picture."""
    widest = 0
    for ax in figure.axes:
        _lighten(ax, True, _LABEL_BELOW)
        widest = max([widest, *(len(text) for _, text in _labelled(ax.yaxis, "labelleft"))])
    for ax in figure.axes:
        # Beside the widest of all, digits of which are 0.64 of their height wide, so that labels of panels above each other align.
        _lighten(ax, False, 7 + 0.64 * 8 * widest + 4)


_LABEL_BELOW = 19.5
"""Points from an axis down to its label, as far as matplotlib puts it below ticks with labels."""


def _labelled(axis: Axis, switch: str) -> list[tuple[float, str]]:
    """Ticks in view with their labels, which are empty where *switch* is off."""
    low, high = sorted(axis.get_view_interval())
    close = 1e-10 * (high - low)
    ticks = axis.get_majorticklocs().tolist()
    texts = axis.get_major_formatter().format_ticks(ticks)
    shown = axis.get_tick_params("major")[switch]
    return [
        (value, text if shown else "")
        for value, text in zip(ticks, texts, strict=True)
        if low - close <= value <= high + close
    ]


def _lighten(ax: Axes, along_x: bool, label_points: float) -> None:
    from matplotlib.collections import LineCollection
    from matplotlib.lines import Line2D
    from matplotlib.markers import TICKDOWN, TICKLEFT
    from matplotlib.transforms import ScaledTranslation

    axis = ax.xaxis if along_x else ax.yaxis
    across = ax.get_xaxis_transform("grid") if along_x else ax.get_yaxis_transform("grid")
    ticks = _labelled(axis, "labelbottom" if along_x else "labelleft")
    at = [value for value, _ in ticks]

    def marks(at: Sequence[float], size: float, width: float) -> Line2D:
        x, y = (at, [0.0] * len(at)) if along_x else ([0.0] * len(at), at)
        marker: Any = TICKDOWN if along_x else TICKLEFT
        look = {"markersize": size, "markeredgewidth": width, "color": "black", "clip_on": False, "zorder": 2.01}
        return Line2D(x, y, linestyle="none", marker=marker, transform=across, **look)

    low, high = sorted(axis.get_view_interval())
    minor = [value for value in axis.get_minorticklocs().tolist() if low <= value <= high]
    sides = [((value, 0), (value, 1)) if along_x else ((0, value), (1, value)) for value in at]
    ax.add_artist(LineCollection(sides, colors=GRID, linewidths=0.6, transform=across, zorder=0.5))
    for values, size, width in ((at, 3.5, 0.8), (minor, 2.0, 0.6)):
        if values:
            ax.add_artist(marks(values, size, width))

    def below(points: float) -> Any:
        offset = (0.0, -points / 72) if along_x else (-points / 72, 0.0)
        return ScaledTranslation(*offset, ax.figure.dpi_scale_trans)

    aligned: dict[str, Any] = {"ha": "center", "va": "top"} if along_x else {"ha": "right", "va": "center_baseline"}
    for value, text in ticks:
        if text:
            place = (value, 0) if along_x else (0, value)
            ax.text(*place, text, fontsize=8, transform=across + below(7), **aligned)
    # What all are multiplied by, such as 1e6.
    if unit := axis.get_major_formatter().get_offset():
        end, shift = ((1, 0), below(_LABEL_BELOW)) if along_x else ((0, 1), below(0))
        beyond: dict[str, Any] = {"ha": "right", "va": "top"} if along_x else {"ha": "left", "va": "bottom"}
        ax.text(*end, unit, fontsize=8, transform=ax.transAxes + shift, **beyond)
    if label := axis.get_label_text():
        place, turned = ((0.5, 0), 0) if along_x else ((0, 0.5), 90)
        beside: dict[str, Any] = {"ha": "center", "va": "top"} if along_x else {"ha": "center", "va": "bottom"}
        moved = ax.transAxes + below(label_points)
        ax.text(*place, label, fontsize=9, rotation=turned, rotation_mode="anchor", transform=moved, **beside)
    axis.set_visible(False)


def save(figure: Figure, path: Path, *, svg: bool = True) -> list[Path]:
    """Write *figure* as PNG, and with *svg* as SVG beside it; the paths. Without dates: equal figures are equal files."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    picture = io.BytesIO()
    # Straight to the renderer: Figure.savefig draws everything once more beforehand, to measure it.
    FigureCanvasAgg(figure).print_png(picture, metadata={"Software": "rooftrace"}, pil_kwargs={"compress_level": 3})
    written = {path.with_suffix(".png"): picture.getvalue()}
    if svg:
        written[path.with_suffix(".svg")] = svg_bytes(figure)
    for file, content in written.items():
        write_whole(file, content)
    return list(written)


def svg_bytes(figure: Figure) -> bytes:
    """*figure* as SVG, for a page that holds it."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    buffer = io.BytesIO()
    with rc_context({"svg.hashsalt": "rooftrace", "svg.fonttype": "none"}):
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None, "Creator": "rooftrace"})
    return buffer.getvalue()
