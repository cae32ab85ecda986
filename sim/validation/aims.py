"""The aims for served runs beside the figures that are reached, and intervals of predictions held back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hwmodels.tables import read_toml
from sim.validation.choices import CHOICES, LIMITS_S, right_pct, scores, servers, whole_pct

if TYPE_CHECKING:
    from sim.validation.files import Comparison

HELD_BACK = Path(__file__).with_name("held_back.toml")
"""The file that `python -m sim.validation.fit_held_back` writes."""
AIMS = Path(__file__).with_name("aims.toml")
"""The figures that are aimed at."""
_POOL_FILES = ("e2e_silicon_disagg.csv", "e2e_silicon_speculative_disagg.csv")


def held_back() -> Mapping[str, Mapping[str, Any]]:
    """Errors, intervals and choices with deployments and with models held back."""
    return read_toml(HELD_BACK)


def aims_markdown(
    pairs: Mapping[str, tuple[Comparison, Comparison]], aggregated: tuple[Comparison, Comparison]
) -> Iterator[str]:
    """The part of docs/validation.md with aims and what is reached, of the *aggregated* rows and of separate pools."""
    held, aims = held_back(), read_toml(AIMS)
    yield _AIMS
    yield "| figure | aim | reached | met |"
    yield "| --- | --: | --: | --- |"
    for kind, each in held.items():
        for name, (_, *medians) in each["errors"].items():
            most = aims[kind].get(name, aims[kind]["each"])
            yield _most(f"{kind} held back, {name}: median TPOT, TTFT %", most, medians)
    for file in _POOL_FILES:
        if file in pairs:
            yield from _pools(file, pairs[file], aims["pools"])
    found = [scores(servers(aggregated)), *(each["choices"] for each in held.values())]
    for name, title in CHOICES.items():
        cases, ties, *_ = found[0][name]
        if cases > ties:
            yield _least(f"{title}, %", aims["named"][name], [right_pct(each[name]) for each in found])
    for limit in (f"{1e3 * limit:g} ms" for limit in LIMITS_S):
        if found[0][limit][0]:
            losses = [whole_pct(each[limit]) for each in found]
            yield _most(f"loss of picks within {limit} TPOT, a miss as all, %", [aims["loss"]] * len(found), losses)
    yield _INTERVALS.format(*aims["inside"])
    stacks = held["deployments"]["inside"]
    yield f"| held back | {' | '.join(f'{stack}, TPOT % | {stack}, TTFT %' for stack in stacks)} |"
    yield f"| --- |{' --: | --: |' * len(stacks)}"
    for kind in held:
        cells = " | ".join(f"{share:.1f}" for shares in held[kind]["inside"].values() for share in shares)
        yield f"| {kind} | {cells} |"


def _pools(file: str, pair: tuple[Comparison, Comparison], aims: Mapping[str, Sequence[float]]) -> Iterator[str]:
    """The rows of separate pools in *file*, all of them and those of the stacks that have an aim of their own."""
    stacks = pair[0].groups["stack"]
    for name, most in aims.items():
        mine = np.full(len(stacks), True) if name == "all" else stacks == name
        off = np.array([100.0 * np.abs(one.predicted / one.measured - 1.0)[mine] for one in pair])
        if np.isfinite(off).any(axis=1).all():
            yield _most(f"`{file}`, {name}: median TPOT, TTFT %", most, np.nanmedian(off, axis=1).tolist())


def _most(title: str, most: Sequence[float], reached: Sequence[float]) -> str:
    met = all(value <= limit for value, limit in zip(reached, most, strict=True))
    return _line(title, f"<= {', '.join(f'{value:g}' for value in dict.fromkeys(most))}", reached, met)


def _least(title: str, least: float, reached: Sequence[float]) -> str:
    return _line(title, f">= {least:g}", reached, min(reached) >= least)


def _line(title: str, aim: str, reached: Sequence[float], met: bool) -> str:
    return f"| {title} | {aim} | {', '.join(f'{value:.1f}' for value in reached)} | {'yes' if met else 'no'} |"


_AIMS = """
### Aims and what is reached

Rows held back are predicted as if no fit had seen their deployment, or any row of their model (`python -m
sim.validation.fit_held_back`). Separate pools are of this run, over the rows that could be replayed; choices are of this run, then
with deployments, then with models held back.
"""
_INTERVALS = """
Share of the rows within the 90 % interval that all other deployments (models) of their stack give; the aim for
each is {:g} to {:g} %.
"""
