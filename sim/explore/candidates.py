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
    """Layouts and stacks around *base*, and for each the least machines that keep its SLO: `next` as long as it gives any."""

    def __init__(self, base: Scenario, most: int) -> None:
        self._base, self._most = base, most
        self._kept: dict[tuple[Any, ...], dict[int, bool]] = {}
        for tensor, stack in itertools.product(_tensors(base), _stacks(base)):
            self._kept[tensor, stack] = {}
        self._n = 0

    def next(self) -> list[Candidate]:
        """The candidates to try now; empty when there is nothing more to find out."""
        wanted = [(kind, n) for kind, seen in self._kept.items() if (n := self._count(seen)) is not None]
        wanted = wanted[: self._most - self._n]
        self._n += len(wanted)
        return [self._of(kind, n) for kind, n in wanted]

    def tell(self, candidate: Candidate, kept: bool | None) -> None:
        """Whether *candidate* keeps the SLO; None where it cannot be, or there is none: no other count of it is tried."""
        settings = candidate.settings
        kind = (settings.get("parallel.tensor"), settings.get("serving_stack"))
        if kept is None:
            self._kept.pop(kind, None)
        elif kind in self._kept:
            self._kept[kind][settings.get("replicas", self._base.replicas)] = kept

    def _count(self, seen: Mapping[int, bool]) -> int | None:
        """The next count of machines to try of a kind; None when the least that keeps the SLO is known, or too many would be."""
        if not seen:
            return self._base.replicas
        if self._base.autoscale is not None or self._base.pools is not None:
            return None
        kept = min((n for n, keeps in seen.items() if keeps), default=None)
        missed = max((n for n, keeps in seen.items() if not keeps and (kept is None or n < kept)), default=0)
        if kept is None:
            return 2 * missed if 2 * missed <= MOST_TIMES * self._base.replicas else None
        return (kept + missed) // 2 if kept - missed > max(1, kept // 50) else None

    def _of(self, kind: tuple[Any, ...], n: int) -> Candidate:
        tensor, stack = kind
        settings: dict[str, Any] = {}
        words = []
        if stack is not None:
            settings["serving_stack"] = stack
            words.append(str(stack))
        if tensor is not None:
            settings["parallel.tensor"] = tensor
            words.append(f"tensor {tensor}")
        settings["replicas"] = n
        return Candidate(name=", ".join([*words, f"{n} machine{'s' * (n != 1)}"]), settings=settings)


def _tensors(base: Scenario) -> Sequence[int | None]:
    if base.pools is not None or base.placement is not None:
        return [None]
    return sorted({base.parallel.tensor, *(n for n in (1, 2, 4, 8) if n <= 4 * base.parallel.tensor)})


def _stacks(base: Scenario) -> list[str | None]:
    if base.pools is not None or base.placement is not None or base.stack_file is not None:
        return [None]
    # A scheduler that was chosen is of one stack.
    others = [] if "scheduler" in base.model_fields_set else servers()
    return [base.serving_stack, *(name for name in others if name != base.serving_stack)]


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
