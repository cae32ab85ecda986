"""Where the time goes: a bar for each latency, divided by cause."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sim.plots.style import GREY, OKABE_ITO, dress, save, sheet

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
_REST = OKABE_ITO["yellow"]
_LEAST = 0.02
"""The share below which causes are drawn as one."""


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
    for row, (_, parts) in enumerate(bars):
        whole, left = sum(parts.values()), 0.0
        shares = {cause: seconds / whole for cause, seconds in parts.items() if seconds / whole >= _LEAST}
        shares["all others"] = max(0.0, 1.0 - sum(shares.values()))
        for cause, share in shares.items():
            text = cause.replace("_", " ")
            ax.barh(
                row,
                100 * share,
                left=100 * left,
                color=_COLOURS.get(cause, _REST if cause != "all others" else "#EEEEEE"),
                edgecolor="white",
                label=text if text not in named else None,
            )
            named.add(text)
            if share > 0.045:
                dark = cause in ("weights", "host", "vermillion", "arithmetic", "experts", "prompts")
                ax.text(
                    100 * (left + share / 2), row, f"{share:.0%}", ha="center", va="center", fontsize=8,
                    color="white" if dark else "black",
                )  # fmt: skip
            left += share
    ax.set_yticks(range(len(bars)), [f"{name}\n{1e3 * sum(parts.values()):.3g} ms" for name, parts in bars])
    ax.invert_yaxis()
    ax.set_xlim(0, 100)
    dress(ax, x="share of the time, %", title=f"Where the time goes: {label}")
    ax.grid(False, axis="y")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=6, fontsize=8, frameon=False, labelcolor=GREY)
    return save(figure, path, svg=False)
