"""The best of many deployments: least cost for a target, and the front between two aims."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hwmodels.hardware import load_hardware
from sim.errors import RooftraceError
from sim.scenario import Scenario
from sim.scenario.assembly.prices import price_of
from sim.study.notes import Noted
from sim.study.points import Sweep, axis_values
from sim.study.progress import Progress
from sim.study.rates import REPLICATIONS, Judgement, Target, judge, target_of
from sim.study.sweep import SweepResult, sweep

if TYPE_CHECKING:
    import pandas as pd

GOALS: Mapping[str, str] = {
    "cost": "usd_per_mtoken",
    "gpu-seconds": "gpu_s_per_mtoken",
    "energy": "joule_per_mtoken",
    "devices": "gpus",
    "latency": "e2el_s.p50",
}
"""The goals that `cheapest` can minimise, and the column of each."""
UNITS: Mapping[str, str] = {
    "cost": "$ per M tokens",
    "gpu-seconds": "GPU s per M tokens",
    "energy": "J per M tokens",
    "devices": "GPUs",
    "latency": "E2EL p50, s",
}
"""The head of each goal's column, as people read it."""
_TIES = 3
"""Candidates that are named beside one that has as little."""


def with_costs(table: pd.DataFrame, base: Scenario) -> pd.DataFrame:
    """*table* of a sweep over *base* with what serving costs and gives: the columns of `GOALS`, per GPU, per user.

    tokens_per_s_per_gpu; tokens_per_s_per_user, which is 1 / median TPOT; gpu_s_per_mtoken, over the whole run;
    usd_per_mtoken from what the deployment costs an hour (NaN where no price is known); joule_per_mtoken by what
    the devices do (`hwmodels.power`), or at their TDP for the whole run, an upper bound, where their work is not known. Both are
    sums over pools. Tokens are output tokens.
    """
    hardware = table["hardware"] if "hardware" in table else [base.device_name] * len(table)
    prices, watts = [], []
    for name in hardware:
        device = _device(base, str(name))
        usd_per_hour, _ = price_of(base, device)
        prices.append(math.nan if usd_per_hour is None else usd_per_hour)
        watts.append(device.tdp_w)
    price, watt = np.array(prices), np.array(watts)
    if "fleet.tdp_w" in table:
        # Of pools with different devices: the mean GPU.
        pooled = table["fleet.tdp_w"].notna()
        watt = np.where(pooled, table["fleet.tdp_w"] / table["gpus"], watt)
    # Where the work of the devices is not known, all are paid for from beginning to end.
    usd_per_hour = _known(table, "costs.usd_per_hour").fillna(table["gpus"] * price)
    mtoken_s = table["output_tokens_per_s"] / 1e6
    gpu_s = (table["gpus"] / mtoken_s).where(mtoken_s > 0)
    return table.assign(
        tokens_per_s_per_gpu=table["output_tokens_per_s"] / table["gpus"],
        tokens_per_s_per_user=1.0 / table["tpot_s.p50"],
        gpu_s_per_mtoken=gpu_s,
        usd_per_mtoken=(usd_per_hour / 3600.0 / mtoken_s).where(mtoken_s > 0),
        joule_per_mtoken=(_known(table, "costs.joule_per_output_token") * 1e6).fillna(gpu_s * watt),
    )


def _known(table: pd.DataFrame, name: str) -> pd.Series[float]:
    """A column of each row's costs; NaN where the work of the devices is not known."""
    import pandas as pd

    return table[name].astype(float) if name in table else pd.Series(math.nan, index=table.index)


def _device(base: Scenario, name: str) -> Any:
    try:
        return load_hardware(base.with_value("hardware", name).find(name) or name)
    except ValueError as error:
        raise RooftraceError(str(error)) from None


def pareto_front(frame: pd.DataFrame, x: str, y: str, *, among: np.ndarray | None = None) -> np.ndarray:
    """Which rows no other beats: none has more of both *x* and *y*, or as much of one and more of the other.

    Boolean, shape [len(frame)]; rows with a NaN are never on the front, and with *among* (boolean) none but those are looked at.
    """
    first, second = frame[x].to_numpy(dtype=float), frame[y].to_numpy(dtype=float)
    front = np.zeros(len(frame), dtype=bool)
    known = ~np.isnan(first) & ~np.isnan(second)
    valid = np.flatnonzero(known if among is None else known & among)
    # From the largest x down, and within equal x from the largest y: a row is on the front if its y is a new high.
    best_y, best_x = -math.inf, math.nan
    for index in valid[np.lexsort((-second[valid], -first[valid]))]:
        if second[index] > best_y or (second[index] == best_y and first[index] == best_x):
            front[index] = True
            best_y, best_x = second[index], first[index]
    return front


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The outcome of `cheapest`: all candidates, those that keep the SLO, and the best of them."""

    table: pd.DataFrame
    """One row a candidate: the sweep's columns, those of `with_costs`, `keeps` and `on_front`, the front of those that keep the SLO
    (of all, where none does)."""
    axes: tuple[str, ...]
    goal: str
    target: Target
    folder: Path | None = None
    notes: tuple[Noted, ...] = ()
    """Notes of the runs, each with the candidates that it holds for."""

    @property
    def column(self) -> str:
        return GOALS[self.goal]

    @property
    def asked(self) -> str:
        """The limits that a candidate has to keep, in words."""
        share = self.target.attainment
        return "the limits of the SLO" if share is None else f"{share:.1%} of requests within the SLO"

    @property
    def best(self) -> dict[str, Any] | None:
        """The candidate that keeps the target and has least of the goal, the first of them where several have; None where none
        keeps it."""
        return next(iter(self.least), None)

    @property
    def least(self) -> list[dict[str, Any]]:
        """All candidates that keep the target and have least of the goal, which are several where they are equal."""
        kept = self.table[self.table["keeps"] & self.table[self.column].notna()]
        rows = kept[kept[self.column] == kept[self.column].min()].to_dict("records")
        return [{str(key): value for key, value in row.items()} for row in rows]

    def __str__(self) -> str:
        best = self.best
        unknown = self._places(self.table[self.table["keeps"] & self.table[self.column].isna()].to_dict("records"))
        left_out = ""
        if unknown:
            way_out = " (costs.usd_per_device_hour says it)" if self.goal == "cost" else ""
            left_out = f". Within the SLO at a {self.goal} that is not known{way_out}: {_some(unknown)}"
        if best is None:
            known = f" at a {self.goal} that is known" if unknown else ""
            return f"none of {len(self.table)} candidates keeps {self.asked}{known}{left_out}"
        places = self._places(self.least)
        said = f"least {self.goal}: {places[0]} at {best[self.column]:,.4g} {UNITS[self.goal]}"
        return said + (f", and as little of it: {_some(places[1:])}" if len(places) > 1 else "") + left_out

    def _places(self, rows: Sequence[Mapping[Any, Any]]) -> list[str]:
        return [", ".join(f"{key}={row[key]}" for key in self.axes) for row in rows]

    def _repr_html_(self) -> str:
        shown = [*self.axes, self.column, "slo_attainment", "tokens_per_s_per_gpu", "tokens_per_s_per_user", "keeps"]
        ranked = self.table.sort_values(["keeps", self.column], ascending=[False, True])
        return f"<b>{escape(str(self))}</b>{ranked[shown].head(12).to_html(index=False, float_format=lambda value: f'{value:.4g}')}"


def _some(places: Sequence[str]) -> str:
    more = f" and {len(places) - _TIES} more" if len(places) > _TIES else ""
    return f"{'; '.join(places[:_TIES])}{more}"


def cheapest(
    scenario: Scenario,
    axes: Mapping[str, Any],
    *,
    goal: str = "cost",
    target: Target | None = None,
    replications: int = REPLICATIONS,
    out: str | os.PathLike[str] | None = None,
    jobs: int | None = None,
    progress: Callable[[Progress], None] | bool | None = None,
) -> Choice:
    """Try every combination of *axes* on *scenario*'s workload and rank those that meet *target* by *goal*.

    *axes* as in `sim.sweep`: drafted tokens, token budget, parallelism, replicas, hardware. A candidate keeps the target
    where `judge` says so of its runs: the lower end of its attainment's interval does, and most runs are not saturated and miss
    no other limit. *out* keeps the sweep, which then goes on where it was interrupted.
    """
    if goal not in GOALS:
        raise RooftraceError(f"goal is one of {', '.join(GOALS)}; got {goal!r}")
    target = target or target_of(scenario)
    plan = Sweep(
        base=scenario, axes={key: axis_values(values, key) for key, values in axes.items()}, replications=replications
    )
    result = sweep(plan, out=out, jobs=jobs, progress=progress)
    return choose(result, scenario, goal=goal, target=target)


def judged(result: SweepResult, target: Target) -> list[Judgement | None]:
    """The judgements of the runs of each point about *target*, in the order of the table; None where one of them failed."""
    found: list[Judgement | None] = []
    for runs in result.summaries():
        whole = [each for each in runs if each is not None]
        found.append(judge(whole, target, math.nan, level=result.level) if len(whole) == len(runs) else None)
    return found


def choose(result: SweepResult, base: Scenario, *, goal: str, target: Target) -> Choice:
    """Rank the points of a finished sweep over *base*; RooftraceError where none of them ran."""
    table = result.table
    if not (table["replications"] > 0).any():
        failure = next(iter(result.failures(1)), {"error": "no run"})
        raise RooftraceError(f"none of the candidates could be run: {failure['error']}")
    table = with_costs(table, base)
    if table["usd_per_mtoken"].isna().all() and goal == "cost":
        raise RooftraceError(
            f"no price of {base.device_name} is known; give costs.usd_per_device_hour, costs.provider or --goal gpu-seconds"
        )
    table = table.assign(keeps=[found is not None and found.met is True for found in judged(result, target)])
    # Candidates that miss the SLO are not chosen; where all do, the front still says what there is.
    kept = table["keeps"].to_numpy(dtype=bool)
    table["on_front"] = pareto_front(
        table, "tokens_per_s_per_user", "tokens_per_s_per_gpu", among=kept if kept.any() else None
    )
    return Choice(
        table=table, axes=tuple(result.axes), goal=goal, target=target, folder=result.folder, notes=result.notes
    )
