"""A session of the page: the scenario that it was opened with, what has been found, and how each question is answered."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sim.explore.work as work
from sim.errors import RooftraceError
from sim.explore.controls import controls
from sim.explore.state import Refused, scenario_in, settings_in
from sim.explore.work import Asked
from sim.explore.workers import Died, Event, Job, Lane, Workers, merged
from sim.scenario import Scenario
from sim.study.points import content_key

Stream = Callable[[str, Mapping[str, Any]], AsyncGenerator[Event, None]]
"""Answers a client's question about a state, event by event."""
_ESTIMATE_S = 0.05
"""Time that the short run of an estimate is to take."""
_SHORTEST, _LONGEST = 60, 400
"""Requests of a short run."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The most that a client can ask for."""

    requests: int = 20_000
    """In one run."""
    points: int = 64
    """In one curve, or candidates of one table."""
    body_bytes: int = 16 << 20
    job_s: float = 300.0
    """The time of one job."""
    kept: int = 200
    """Answers that are kept in memory."""
    rows: int = 2500
    """Requests of a run that are sent at once."""


class Session:
    """Answers about states over one scenario."""

    def __init__(self, base: Scenario, store: Path, workers: Workers, *, file: str | None, limits: Limits) -> None:
        """*file*: where *base* is from; None for the default scenario."""
        self.base, self.limits = base, limits
        self._store, self._workers, self._file = store, workers, file
        self._answers: OrderedDict[str, Mapping[str, Any]] = OrderedDict()
        self._asked: OrderedDict[str, Asked] = OrderedDict()
        self._s_per_request = 1e-4
        """Of the latest run, from which the length of the next estimate follows."""
        self._start: asyncio.Task[Mapping[str, Any]] | None = None

    # What the page begins with.

    def begin(self) -> None:
        """Run the scenario that the page opens with."""
        self._start = asyncio.create_task(self._begin())

    async def started(self) -> Mapping[str, Any]:
        """The scenario, its controls and its answer."""
        if self._start is None:
            self.begin()
        assert self._start is not None
        return await asyncio.shield(self._start)

    async def _begin(self) -> Mapping[str, Any]:
        start = {"scenario": self.base.settings(), "name": self.base.name, "controls": controls(self.base)}
        try:
            return {**start, "answer": await self._exact({})}
        except RooftraceError as error:
            return {**start, "answer": None, "refused": {"sentence": str(error)}}

    def controls(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return controls(scenario_in(self.base, state))

    # One run.

    def _about(self, state: Mapping[str, Any]) -> Asked:
        scenario = scenario_in(self.base, state)
        try:
            key = content_key(scenario)
        except (RooftraceError, OSError) as error:
            raise Refused(str(error)) from None
        asked = Asked(
            key=key, scenario=scenario, settings=settings_in(state), file=self._file, store=str(self._store),
            most_requests=max(self.limits.requests, 0),
        )  # fmt: skip
        _keep(self._asked, key, asked, 5 * self.limits.kept)
        return asked

    async def run(self, _client: str, state: Mapping[str, Any]) -> AsyncGenerator[Event, None]:
        """An estimate, and then the whole run."""
        asked = self._about(state)
        if (known := self._answers.get(asked.key)) is not None:
            self._answers.move_to_end(asked.key)
            yield Event("exact", known)
            return
        exact = self._events("exact", functools.partial(work.exact, asked))
        over = False
        async with contextlib.aclosing(merged(self._estimates(asked), exact)) as events:
            async for number, event in events:
                over |= number == 1
                if number == 1 and "series" in event.data:
                    self._learn(asked, event.data)
                if number == 1 or not over:
                    yield event
                if event.name == "refused":
                    return

    async def _estimates(self, asked: Asked) -> AsyncGenerator[Event, None]:
        """A short run, where the workload can be cut short and its beginning runs."""
        if asked.scenario.workload.protocol is not None:
            return
        n = min(max(int(_ESTIMATE_S / self._s_per_request), _SHORTEST), _LONGEST)
        limit = asked.scenario.workload.limit
        job = functools.partial(work.estimate, asked, n if limit is None else min(n, limit))
        async with contextlib.aclosing(self._events("quick", job)) as events:
            async for event in events:
                if event.name != "refused":  # the whole run says so too
                    yield event

    def _learn(self, asked: Asked, answer: Mapping[str, Any]) -> None:
        _keep(self._answers, asked.key, answer, self.limits.kept)
        seconds = answer.get("took_s")
        if seconds:
            self._s_per_request = max(seconds / max(answer["requests"], 1), 1e-6)

    async def _exact(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """The answer of the whole run."""
        asked = self._about(state)
        if asked.key in self._answers:
            return self._answers[asked.key]
        last: Event | None = None
        async for event in self._events("exact", functools.partial(work.exact, asked)):
            last = event
        if last is None or last.name == "refused":
            raise Refused("nothing came of the run" if last is None else last.data["sentence"])
        self._learn(asked, last.data)
        return last.data

    async def _events(self, lane: Lane, job: Job) -> AsyncGenerator[Event, None]:
        """What *job* says in a worker; once more where the process died before it said anything."""
        for last in (False, True):
            said = False
            try:
                async with contextlib.aclosing(self._workers.events(lane, job, most_s=self.limits.job_s)) as events:
                    async for event in events:
                        said = True
                        yield event
                return
            except Died:
                if said or last:
                    raise


def _keep(kept: OrderedDict[str, Any], key: str, value: Any, most: int) -> None:
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > most:
        kept.popitem(last=False)
