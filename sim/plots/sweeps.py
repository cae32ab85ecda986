"""Pictures of a sweep: which columns to draw against which, and how the rest is held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from sim.plots.columns import MAX_HUES, check, is_number, label, present, saturated, short, texts_of
from sim.plots.frames import heatmap, lines, throughput_latency
from sim.plots.style import figure

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

HEADLINE = ("ttft_s.p99", "tpot_s.p99", "output_tokens_per_s")


def sweep_figures(
    table: pd.DataFrame, axes: Sequence[str], *, x: str | None = None, y: str | None = None, hue: str | None = None
) -> Mapping[str, Figure]:
    """Figures of a sweep by file name: *y* against *x* by *hue*, or what suits the columns that vary.

    Without *x* and *y*: the headline metrics against the first varied number, and for two varied numbers heat maps.
    ValueError where nothing can be drawn.
    """
    check(table, *(key for key in (x, y, hue) if key is not None))
    varied = [key for key in axes if len(texts_of(table[key])) > 1]
    if x is None:
        x = _along(table, varied)
    if hue is None:
        others = [key for key in varied if key != x and len(texts_of(table[key])) <= MAX_HUES]
        hue = others[0] if others else None
    shown, note = _held(table, [key for key in varied if key not in (x, hue)])
    ys = _metrics(shown, y)
    out = {f"{'sweep' if y is None else _file(y)}-by-{_file(x)}": _line_figure(shown, x, ys, hue, note)}
    if y is not None:
        return out
    if "rate" in x and shown["ttft_s.p99"].notna().any():
        made = figure(title=f"Latency against throughput as load grows{note}", width=6.5, height=4.5)
        throughput_latency(shown, made.subplots(), hue=hue, along=x)
        out["throughput-latency"] = made
    if hue is not None and _spans_a_grid(shown, x, hue):
        made = figure(title=f"{short(ys[0])}{note}", width=6.5, height=4.5)
        heatmap(shown, made.subplots(), x=x, y=hue, value=ys[0])
        out[f"heatmap-{_file(ys[0])}"] = made
    return out


def _along(table: pd.DataFrame, varied: Sequence[str]) -> str:
    """The varied column for the horizontal axis: a rate before other numbers, and those before names."""
    if not varied:
        raise ValueError("nothing varies in this sweep; give --x and --y")
    numbers = [key for key in varied if is_number(table[key])]
    rates = [key for key in numbers if "rate" in key or "concurrency" in key]
    return (rates or numbers or varied)[0]


def _held(table: pd.DataFrame, fixed: Sequence[str]) -> tuple[pd.DataFrame, str]:
    """The rows with the first value of each *fixed* column, and what a title says of that.

    One picture shows three columns at most; the others are held.
    """
    said = []
    for key in fixed:
        names, own = texts_of(table[key]), list(map(present, table[key]))
        table = table[[each == own[0] for each in own]]
        said.append(f"{label(key)} = {names[own[0]]}")
    return table, f" at {', '.join(said)}" if said else ""


def _metrics(shown: pd.DataFrame, y: str | None) -> list[str]:
    if y is not None:
        return [y]
    found = [name for name in HEADLINE if name in shown and shown[name].notna().any()]
    if not found:
        raise ValueError("no metric has a value in this sweep; see its error column")
    return found


def _line_figure(shown: pd.DataFrame, x: str, ys: Sequence[str], hue: str | None, note: str) -> Figure:
    made = figure(len(ys), title=f"{_title(ys, x, hue)}{note}")
    log_x = is_number(shown[x]) and _spans(shown[x])
    for ax, name in zip(np.atleast_1d(made.subplots(1, len(ys))), ys, strict=True):
        lines(shown, ax, x=x, y=name, hue=hue, log_x=log_x)
        legend = ax.get_legend()
        if legend is not None and name != ys[0] and not _lost(shown, name):
            legend.remove()
    return made


def _spans_a_grid(shown: pd.DataFrame, x: str, y: str) -> bool:
    """Whether two columns are numbers of which each pair stands in one row."""
    return is_number(shown[x]) and is_number(shown[y]) and not shown.duplicated([x, y]).any()


def _title(ys: Sequence[str], x: str, hue: str | None) -> str:
    what = short(ys[0]) if len(ys) == 1 else "Latency and throughput"
    return f"{what[0].upper()}{what[1:]} against {short(x)}" + ("" if hue is None else f", by {short(hue)}")


def _lost(frame: pd.DataFrame, name: str) -> bool:
    """Whether some points of *name* are drawn as crosses, which need a legend."""
    return bool((saturated(frame) & frame[name].isna().to_numpy()).any())


def _spans(values: pd.Series) -> bool:
    low, high = float(values.min()), float(values.max())
    return low > 0 and high / low >= 8


def _file(key: str) -> str:
    return key.replace(".", "-").replace("_", "-")
