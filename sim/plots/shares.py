"""Where the time goes: a bar for each latency, divided by cause."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path

from sim.plots.style import GREY, OKABE_ITO, dress, save, sheet
from sim.text import seconds_text

_COLOURS = {
    "weights": OKABE_ITO["blue"],
    "kv": OKABE_ITO["sky"],
    "arithmetic": OKABE_ITO["vermillion"],
    "prompt_attention": OKABE_ITO["orange"],
    "experts": OKABE_ITO["green"],
    "collectives": OKABE_ITO["purple"],
    "host": OKABE_ITO["black"],
    "prompts": "#B8860B",
    "queue": "#999999",
    "front_end": "#CCCCCC",
}
_HATCHES = ("", "//", "\\\\", "||", "--", "++", "xx", "oo", "..", "**", "/o", "|o", "-o", "+o")
_OTHERS = "all others"
_DARK = ("weights", "host", "arithmetic", "experts", "prompts")
"""Causes whose colour takes white text."""
_LEAST = 0.02
"""The share below which causes are drawn as one."""


def looks_of(causes: Iterable[str]) -> dict[str, tuple[str, str]]:
    """The colour and the hatch of each of *causes*; those without a colour of their own are yellow with a hatch each."""
    hatches = itertools.cycle(_HATCHES)
    return {
        cause: (_COLOURS[cause], "") if cause in _COLOURS else (OKABE_ITO["yellow"], next(hatches))
        for cause in dict.fromkeys(causes)
    }


def draw_shares(means: Mapping[str, Mapping[str, Mapping[str, float]]], label: str, path: Path) -> list[Path]:
    """One bar a latency and group of requests, each cause with its share; *means* by measure, group and cause in seconds."""
    bars = [
        (f"{measure.removesuffix('_s').upper()}, {group}", parts)
        for measure, groups in means.items()
        for group, parts in groups.items()
        if parts
    ]
    figure = sheet(10, 0.9 + 0.75 * len(bars))
    ax = figure.subplots()
    named: set[str] = set()
    drawn = [_large(parts) for _, parts in bars]
    looks = {**looks_of(cause for shares in drawn for cause in shares), _OTHERS: ("#EEEEEE", "")}
    for row, shares in enumerate(drawn):
        left = 0.0
        for cause, share in {**shares, _OTHERS: max(0.0, 1.0 - sum(shares.values()))}.items():
            colour, hatch = looks[cause]
            text = cause.replace("_", " ")
            ax.barh(
                row,
                100 * share,
                left=100 * left,
                facecolor=colour,
                hatch=hatch,
                # A hatch has the colour of the edge.
                edgecolor=GREY if hatch else "white",
                linewidth=0.0 if hatch else None,
                label=text if text not in named else None,
            )
            named.add(text)
            if share > 0.045:
                ax.text(
                    100 * (left + share / 2), row, f"{share:.0%}", ha="center", va="center", fontsize=8,
                    color="white" if cause in _DARK else "black",
                    bbox={"facecolor": colour, "edgecolor": "none", "pad": 1.5} if hatch else None,
                )  # fmt: skip
            left += share
    ax.set_yticks(range(len(bars)), [f"{name}\n{seconds_text(sum(parts.values()))}" for name, parts in bars])
    ax.invert_yaxis()
    ax.set_xlim(0, 100)
    dress(ax, x="share of the time, %", title=f"Where the time goes: {label}")
    ax.grid(False, axis="y")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=6, fontsize=8, frameon=False, labelcolor=GREY)
    return save(figure, path, svg=False)


def _large(parts: Mapping[str, float]) -> dict[str, float]:
    """The shares of the causes that are drawn by themselves."""
    whole = sum(parts.values())
    return {cause: seconds / whole for cause, seconds in parts.items() if seconds / whole >= _LEAST}
