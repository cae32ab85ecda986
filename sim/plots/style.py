"""The look of every picture: colours, the sheet it is drawn on, labels and grid, and how it is saved.

matplotlib is imported where a figure is made, never when a module of this room is, and without pyplot: no global state.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from workloads.write import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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
