"""Deployments that the page tries: those that are asked for, or layouts, stacks and counts around the one that is shown."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hwmodels.stacks import servers
from sim.explore.state import Refused
from sim.scenario import Scenario
from sim.study.advise import MOST_TIMES
from sim.study.optimize import pareto_front
from sim.study.points import axis_values, check_key
from sim.text import shown

Figures = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A deployment by the settings in which it differs from the one that is shown."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    kind: str = ""
    """The name of those that differ from it in the count of machines alone."""


def asked_for(over: Any, most: int) -> list[Candidate]:
    """Every combination of the values in *over*, by dotted setting. Refused where they are too many, or keys are no settings."""
    if not isinstance(over, Mapping):
        raise Refused(f"over is a mapping from dotted settings to lists of values; got {shown(over)}")
    axes = {}
    for key, values in over.items():
        check_key(key)
        axes[key] = axis_values(values, key)
    n = math.prod(map(len, axes.values()))
    if n > most:
        raise Refused(f"at most {most} candidates are tried on the page, and these are {n:,}; use rooftrace optimize")
    combined = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
    return [
        Candidate(name=", ".join(f"{key}={value}" for key, value in settings.items()), settings=settings)
        for settings in combined
    ]


class Search:
    """Layouts and stacks around *base* and *changes* of it, and for each the least machines that keep its SLO: `next` gives what to
    try as long as there is anything."""

    def __init__(self, base: Scenario, changes: Sequence[Candidate], most: int) -> None:
        self._base, self._left = base, most
        self._scales = base.autoscale is None and base.pools is None and base.placement is None
        self._kinds = {each.name: each for each in (*_around(base), *changes)}
        self._kept: dict[str, dict[int, bool]] = {name: {} for name in self._kinds}

    def next(self) -> list[Candidate]:
        """The candidates to try now; empty when there is nothing more to find out."""
        wanted = [(name, n) for name, seen in self._kept.items() if (n := self._count(seen)) is not None][: self._left]
        self._left -= len(wanted)
        return [self._of(name, n) for name, n in wanted]

    def tell(self, candidate: Candidate, kept: bool | None) -> None:
        """Whether *candidate* keeps the SLO; None where it cannot be, or there is none: no other count of it is tried."""
        kind = candidate.kind or candidate.name
        if kept is None:
            self._kept.pop(kind, None)
        elif kind in self._kept:
            self._kept[kind][candidate.settings.get("replicas", self._base.replicas)] = kept

    @property
    def least(self) -> int:
        """The least machines of any kind that keep the SLO, or as many as *base* has where none does."""
        kept = [n for seen in self._kept.values() for n, keeps in seen.items() if keeps]
        return min(kept, default=self._base.replicas)

    def _count(self, seen: Mapping[int, bool]) -> int | None:
        """The next count of machines to try of a kind; None when the least that keeps the SLO is known, or too many would be."""
        if not seen:
            return self._base.replicas
        if not self._scales:
            return None
        kept = min((n for n, keeps in seen.items() if keeps), default=None)
        missed = max((n for n, keeps in seen.items() if not keeps and (kept is None or n < kept)), default=0)
        if kept is None:
            return 2 * missed if 2 * missed <= MOST_TIMES * self._base.replicas else None
        return (kept + missed) // 2 if kept - missed > max(1, kept // 50) else None

    def _of(self, kind: str, n: int) -> Candidate:
        if not self._scales:
            return self._kinds[kind]
        settings = {**self._kinds[kind].settings, "replicas": n}
        return Candidate(name=f"{kind}, {n} machine{'s' * (n != 1)}", settings=settings, kind=kind)


def _around(base: Scenario) -> list[Candidate]:
    """The deployment as it is, other layouts of it, and other stacks under it."""
    if base.pools is not None or base.placement is not None:
        return [Candidate(name="as it is")]
    own = base.parallel.tensor
    found = [Candidate(name=f"{base.serving_stack}, tensor {own}")]
    found += [
        Candidate(name=f"{base.serving_stack}, tensor {n}", settings={"parallel.tensor": n})
        for n in (1, 2, 4, 8)
        if n != own and n <= 4 * own
    ]
    # A scheduler that was chosen is of one stack, and so is a fit.
    others = () if "scheduler" in base.model_fields_set or base.stack_file is not None else servers()
    found += [
        Candidate(name=f"{name}, tensor {own}", settings={"serving_stack": name})
        for name in others
        if name != base.serving_stack
    ]
    return found


def front(found: Sequence[tuple[str, Figures, bool]]) -> list[str]:
    """The names of those on the front between tokens a second per user and per device; where some keep the SLO, of these."""
    import pandas as pd

    def column(name: str) -> list[float]:
        return [each.get(name, {}).get("value", np.nan) for _, each, _ in found]

    if not found:
        return []
    user, device = "output_tokens_per_s_per_user", "output_tokens_per_s_per_device"
    kept = np.array([keeps for *_, keeps in found])
    frame = pd.DataFrame({user: column(user), device: column(device)})
    on_front = pareto_front(frame, user, device, among=kept if kept.any() else None)
    return [name for (name, *_), mine in zip(found, on_front, strict=True) if mine]


def by_cost(found: Sequence[tuple[str, Figures, bool]]) -> Iterator[str]:
    """Names in the order in which they are ranked: those that keep the SLO first, by what they cost an hour."""

    def place(each: tuple[str, Figures, bool]) -> tuple[bool, float]:
        return not each[2], each[1].get("cost_per_hour", each[1].get("devices", {})).get("value", math.inf)

    return (name for name, *_ in sorted(found, key=place))
