"""A picture of each table of sessions: hit rates by users, and KV in use over time, as measured and as simulated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sim.plots.style import OKABE_ITO, dress, save, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from sim.validation.sessions import Session

_COLOURS = [OKABE_ITO[name] for name in ("blue", "vermillion", "green", "orange")]
_MOST_RUNS = 4
"""Runs whose KV in use is drawn over time."""


def draw_sessions(runs: Sequence[Session], folder: str | Path) -> list[Path]:
    """sessions_FILE.png in *folder* for each table of *runs*, of which those that stood still are left out; their paths."""
    folder = Path(folder)
    found: list[Path] = []
    for file in dict.fromkeys(run.file for run in runs if run.clean):
        folder.mkdir(parents=True, exist_ok=True)
        mine = [run for run in runs if run.clean and run.file == file]
        timed = [run for run in mine if run.kv.t_s]
        figure = sheet(
            10 if timed else 5.2, 4.0, title=f"{file.removesuffix('.csv')}: measured (lines) and simulated (dashes)"
        )
        axes = figure.subplots(1, 2 if timed else 1, squeeze=False)[0]
        _hit_rates(axes[0], mine)
        if timed:
            _kv_in_use(axes[1], timed)
        found += save(figure, folder / f"sessions_{file.removesuffix('.csv')}.png", svg=False)
    return found


def _hit_rates(ax: Axes, runs: Sequence[Session]) -> None:
    for colour, tensor in zip(_COLOURS, sorted({run.tensor for run in runs}), strict=False):
        mine = sorted((run for run in runs if run.tensor == tensor), key=lambda run: run.users)
        users = [run.users for run in mine]
        ax.plot(users, [run.measured.hit for run in mine], "o-", color=colour, label=f"{tensor} GPUs")
        ax.plot(users, [run.simulated.hit for run in mine], "x--", color=colour)
    ax.set_xscale("log", base=2)
    ax.set_ylim(-0.02, 1.02)
    ax.legend(frameon=False, fontsize=8)
    dress(ax, x="users", y="hit rate of the GPUs' cache")


def _kv_in_use(ax: Axes, runs: Sequence[Session]) -> None:
    chosen = sorted(runs, key=lambda run: (run.tensor, run.users))
    step = max(1, len(chosen) // _MOST_RUNS)
    for colour, run in zip(_COLOURS, chosen[::step], strict=False):
        ax.plot(run.kv.t_s, run.kv.measured, "-", color=colour, label=f"{run.tensor} GPUs, {run.users} users")
        ax.plot(run.kv.t_s, run.kv.simulated, "--", color=colour)
    ax.set_ylim(-0.02, 1.02)
    ax.legend(frameon=False, fontsize=8, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    dress(ax, x="time (s)", y="share of KV blocks in use")
