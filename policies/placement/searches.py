"""Searches over groups of one shape: equal groups, replication, Clockwork++, round robin, dedicated groups."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from policies.placement.groups import (
    BudgetSpent,
    Cluster,
    Group,
    ModelView,
    Placement,
    Scorer,
    group_bytes,
    uniform_groups,
)
from policies.placement.selection import Best, Room, check_beam, drive, selection


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualGroups:
    """Groups of one shape, models chosen by simulation (Algorithm 1, or its fast heuristic)."""

    inter_op: int = 4
    intra_op: int = 1
    beam: int | None = None
    """Placements kept at each step of Algorithm 1; without it the fast heuristic."""

    def __post_init__(self) -> None:
        check_beam(self.beam)
        Group(inter_op=self.inter_op, intra_op=self.intra_op)

    def search(self, cluster: Cluster, models: Sequence[ModelView], score: Scorer, /) -> Placement:
        empty, best = uniform_groups(cluster.n_devices, self.inter_op, self.intra_op), Best()
        with contextlib.suppress(BudgetSpent):
            drive([(selection(empty, cluster, models, range(len(models)), self.beam), best)], score)
        return best.found(empty)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveReplication:
    """Every device a group of its own, models replicated by simulation: no model parallelism."""

    beam: int | None = None

    def __post_init__(self) -> None:
        check_beam(self.beam)

    def search(self, cluster: Cluster, models: Sequence[ModelView], score: Scorer, /) -> Placement:
        return EqualGroups(inter_op=1, intra_op=1, beam=self.beam).search(cluster, models, score)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockworkPlusPlus:
    """Selective replication that is solved anew for each window of the traffic that it serves, moving at no cost.

    A search sees one window; `sim.placement.serve` calls it for each window.
    """

    window_s: float
    beam: int | None = None

    def __post_init__(self) -> None:
        check_beam(self.beam)
        if not (isfinite(self.window_s) and self.window_s > 0):
            raise ValueError(f"window_s is a finite time above 0; got {self.window_s!r}")

    def search(self, cluster: Cluster, models: Sequence[ModelView], score: Scorer, /) -> Placement:
        return SelectiveReplication(beam=self.beam).search(cluster, models, score)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRobin:
    """Equal groups; models are dealt to groups in turn until one does not fit.

    Nothing is simulated. A group that hosts the model already is passed over. The artifact's stopping rule is not published; this
    one follows from drops in its recorded results, which therefore cannot judge it.
    """

    inter_op: int = 4
    intra_op: int = 1

    def __post_init__(self) -> None:
        Group(inter_op=self.inter_op, intra_op=self.intra_op)

    def search(self, cluster: Cluster, models: Sequence[ModelView], score: Scorer, /) -> Placement:
        placement = uniform_groups(cluster.n_devices, self.inter_op, self.intra_op)
        room = Room(placement, cluster, models)
        n = len(placement.groups)
        if n:
            turn = 0
            for model in itertools.cycle(range(len(models))):
                hosting = [group for group in range(n) if model in room.placement.groups[group].models]
                if len(hosting) == n:
                    break
                while turn % n in hosting:
                    turn += 1
                if turn % n not in room.groups(model):
                    break
                room.put(model, turn % n)
                turn += 1
        return room.placement


@dataclass(frozen=True, slots=True, kw_only=True)
class DedicatedGroups:
    """One group of the given shape for each model, the busiest models first. Nothing is simulated."""

    inter_op: int
    intra_op: int = 1

    def __post_init__(self) -> None:
        Group(inter_op=self.inter_op, intra_op=self.intra_op)

    def search(self, cluster: Cluster, models: Sequence[ModelView], score: Scorer, /) -> Placement:
        groups = list(uniform_groups(cluster.n_devices, self.inter_op, self.intra_op).groups)
        order = sorted(range(len(models)), key=lambda m: -models[m].rate_per_s * models[m].latency_s)
        for index, model in enumerate(order):
            if index < len(groups):
                hosting = groups[index].adding(model)
                if group_bytes(hosting, models) <= cluster.memory_bytes:
                    groups[index] = hosting
        return Placement(groups=tuple(groups))
