"""Running a search: scores by simulation, with a cache, several at a time, within a budget of time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from policies.placement import (
    BudgetSpent,
    ClockworkPlusPlus,
    Placement,
    PlacementSearch,
    Score,
    check,
)
from sim.placement.serving import NS_PER_S, Outcome, ScreenedBy, Serving, evaluate, evaluate_windows
from sim.processes import ProcessPool
from workloads import Trace

_LONG_S = 5.0
"""A search that took longer is told what would make it shorter."""

Progress = Callable[[int, float], None]
"""Told the number of placements scored so far and the best attainment among them."""


class Scoring:
    """A scorer for searches: simulates each placement on one workload, and each only once.

    The processes of *pool* simulate, or this one. *budget_s* seconds after the first call it raises `BudgetSpent`.
    """

    def __init__(
        self,
        serving: Serving,
        workload: Trace,
        *,
        pool: ProcessPool | None = None,
        budget_s: float | None = None,
        progress: Progress | None = None,
    ) -> None:
        if budget_s is not None and not budget_s > 0:
            raise ValueError(f"budget_s is a time above 0, or nothing; got {budget_s!r}")
        self._serving, self._workload = serving, workload
        self._one = serving.scorer(workload)
        self._pool, self._budget_s, self._progress = pool, budget_s, progress
        self._began: float | None = None
        self._cache: dict[Placement, Score] = {}
        self._best = 0.0
        self.cut_short = False
        """Whether the budget was spent before the search was done."""
        self.asked = 0
        """Placements that searches asked for, repeats included."""

    @property
    def simulations(self) -> int:
        """Placements that were simulated."""
        return len(self._cache)

    def __call__(self, placements: Sequence[Placement]) -> list[Score]:
        now = time.monotonic()
        if self._began is None:
            self._began = now
        new = list(dict.fromkeys(placement for placement in placements if placement not in self._cache))
        # In pieces, so that the budget is kept and progress shown also when many are asked for at once.
        step = 16 * (1 if self._pool is None else self._pool.jobs)
        for at in range(0, len(new), step):
            if self._budget_s is not None and time.monotonic() - self._began > self._budget_s:
                self.cut_short = True
                raise BudgetSpent
            piece = new[at : at + step]
            for placement, score in zip(piece, self._simulate(piece), strict=True):
                self._cache[placement] = score
                self._best = max(self._best, 1.0 - sum(score.unserved) / len(self._workload))
            if self._progress is not None:
                self._progress(len(self._cache), self._best)
        self.asked += len(placements)
        return [self._cache[placement] for placement in placements]

    def _simulate(self, placements: Sequence[Placement]) -> list[Score]:
        pool = self._pool
        if pool is None or len(placements) == 1:
            return [self._one(placement) for placement in placements]
        parts = [placements[at :: pool.jobs] for at in range(min(pool.jobs, len(placements)))]
        found = [pool.submit(_scores, self._serving, self._workload, part) for part in parts]
        scores = dict(
            zip(itertools.chain(*parts), itertools.chain.from_iterable(each.result() for each in found), strict=True)
        )
        return [scores[placement] for placement in placements]


def _scores(serving: Serving, workload: Trace, placements: Sequence[Placement]) -> list[Score]:
    """The scores of *placements*, in a process of its own."""
    return list(map(serving.scorer(workload), placements))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The placements that a search found, and the time and simulations that it took."""

    search: PlacementSearch
    placements: tuple[Placement, ...]
    """One, or one for each window of a search that places anew."""
    window_s: float | None
    simulations: int
    planning_s: float
    """Wall-clock seconds of the whole search."""
    processor_s: float
    cut_short: bool
    """Whether the budget was spent before the search was done, in any window."""
    screened_by: ScreenedBy
    """The loop that the simulations of the search ran on; all give the same scores."""
    train: Outcome = field(repr=False)
    """The traffic that was planned for, served with the answer."""

    @property
    def placement(self) -> Placement:
        """The placement, or that of the first window."""
        return self.placements[0]

    @property
    def note(self) -> str | None:
        """A sentence on what would have made the search shorter, where it took long enough to matter."""
        if self.screened_by != "python loop" or self.planning_s < _LONG_S:
            return None
        return (
            f"The loop that screens placements is plain Python here; compiled, it would take most of these {self.planning_s:.0f} s "
            "away: rooftrace doctor says what is missing"
        )


def find(
    search: PlacementSearch,
    serving: Serving,
    trace: Trace,
    *,
    jobs: int = 1,
    budget_s: float | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Search a placement for *trace*, checked against the memory of the cluster. *budget_s* is of the whole search."""
    began, processor = time.perf_counter(), time.process_time()
    workload = serving.workload(trace)
    window_s = search.window_s if isinstance(search, ClockworkPlusPlus) else None
    parts = [workload] if window_s is None else _windows(workload, window_s)
    placements: list[Placement] = []
    simulations, cut_short = 0, False
    with ProcessPool(jobs) as pool:
        for part in parts:
            if part is None:
                # Nothing arrives in this window; what is there stays.
                placements.append(placements[-1] if placements else Placement(groups=()))
                continue
            scoring = Scoring(
                serving,
                part,
                pool=pool if jobs > 1 else None,
                budget_s=None if budget_s is None else budget_s / len(parts),
                progress=progress,
            )
            views = serving.views(part)
            found = search.search(serving.cluster, views, scoring)
            check(found, serving.cluster, views)
            placements.append(found)
            simulations += scoring.simulations
            cut_short |= scoring.cut_short
    planning_s, processor_s = time.perf_counter() - began, time.process_time() - processor
    return Plan(
        search=search,
        placements=tuple(placements),
        window_s=window_s,
        simulations=simulations,
        planning_s=planning_s,
        processor_s=processor_s,
        cut_short=cut_short,
        screened_by=serving.screened_by,
        train=serve(serving, placements, trace, window_s),
    )


def serve(serving: Serving, placements: Sequence[Placement], trace: Trace, window_s: float | None = None) -> Outcome:
    """Serve *trace* with one placement, or with one for each window of *window_s* seconds."""
    if window_s is None:
        return evaluate(serving, placements[0], trace)
    n_windows = int(trace.arrival_ns[-1]) // round(window_s * NS_PER_S) + 1
    # Traffic that lasts longer than what was planned for keeps the last placement.
    kept = [placements[min(number, len(placements) - 1)] for number in range(n_windows)]
    return evaluate_windows(serving, kept, trace, window_s)


def _windows(workload: Trace, window_s: float) -> list[Trace | None]:
    number = workload.arrival_ns // round(window_s * NS_PER_S)
    rows = [np.flatnonzero(number == w) for w in range(int(number[-1]) + 1)]
    return [workload.take(each) if len(each) else None for each in rows]
