"""A session of the page: the scenario that it was opened with, what has been found, and how each question is answered."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sim.explore.measured as measured
import sim.explore.work as work
from sim.errors import RooftraceError
from sim.explore.candidates import Candidate, Search, asked_for, by_cost, front
from sim.explore.controls import controls
from sim.explore.state import Refused, refusal, scenario_in, settings_in
from sim.explore.theories import VIEWS, theory
from sim.explore.watching import Watched
from sim.explore.work import Asked
from sim.explore.workers import Died, Event, Job, Lane, Workers, merged
from sim.scenario import Scenario
from sim.study.points import content_key
from sim.study.rates import TOLERANCE
from sim.text import shown

Stream = Callable[[str, Mapping[str, Any]], AsyncGenerator[Event, None]]
"""Answers a client's question about a state, event by event."""
_ESTIMATE_S = 0.05
"""Time that the short run of an estimate is to take."""
_SHORTEST, _LONGEST = 60, 400
"""Requests of a short run."""
_POINTS, _CANDIDATES = 10, 32
"""Points of a curve, and candidates of a search, where no number is asked for."""
_FACTORS = (1.0, 0.5, 2.0, 0.25, 4.0)
"""Multiples of the scenario's rate that a curve begins with."""
_LEAST_FACTOR = 1 / 64
_CHANGES = ("precision", "prefix", "memory", "speculation")
"""Groups of changes of `rooftrace advise` that a search tries beside layouts and stacks."""
_PROBABLE = 3
"""Candidates that keep the SLO whose probability is worked out."""
_REPLAYS, _REPLAYED = 10, 1000
"""Replays for it, and requests of each."""
_FILES = 8
"""Measured files that are kept."""


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
    streams: int = 64
    """Questions under way at once."""
    kept: int = 200
    """Answers that are kept in memory."""
    rows: int = 2500
    """Requests of a run that are sent at once."""


class Session:
    """Answers about states over one scenario."""

    def __init__(
        self, base: Scenario, store: Path, workers: Workers, *, file: str | None = None, settings: Sequence[str] = (),
        given: Sequence[tuple[str, bytes]] = (), limits: Limits | None = None, watched: Watched | None = None,
    ) -> None:  # fmt: skip
        """*file*: where *base* is from, with *settings* changed as `--set` takes them; None for the default scenario. *given*:
        names and contents of files of measured runs. *watched*: a fleet that runs, which the page shows too."""
        self.base, self.limits = base, limits or Limits()
        self._store, self._workers, self._given = store, workers, given
        self._from = (file, tuple(settings))
        self._answers: OrderedDict[str, Mapping[str, Any]] = OrderedDict()
        self._asked: OrderedDict[str, Asked] = OrderedDict()
        self._files: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        """The latest measured files, by client and name."""
        self._s_per_request = 1e-4
        """Processor time of the latest run, from which the length of the next estimate follows."""
        self._start: asyncio.Task[Mapping[str, Any]] | None = None
        self._watched, self._looking = watched, asyncio.Lock()
        self._looked: tuple[float, Event] | None = None
        """When the fleet was last looked at, and what was seen."""

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
        start = {
            "scenario": self.base.settings(),
            "name": self.base.name,
            "controls": controls(self.base),
            **({} if self._watched is None else {"watch": {"where": self._watched.where}}),
        }
        try:
            answer, *benches = await asyncio.gather(self._exact({}), *map(self._laid_over, self._given))
            return {**start, "answer": answer, "benches": benches}
        except RooftraceError as error:
            return {**start, "answer": None, "refused": {"sentence": str(error)}}

    async def _laid_over(self, given: tuple[str, bytes]) -> Mapping[str, Any]:
        """A file of measured runs that the page was opened with, beside its simulation; where that cannot be, a note says why."""
        name, data = given
        try:
            return await self._last("behind", functools.partial(measured.bench, self._about({}), name, data))
        except RooftraceError as error:
            return {"name": name, "points": [], "notes": [str(error)]}

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
            key=key, scenario=scenario, settings=settings_in(state), opened=self._from, store=str(self._store),
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
        answer = await self._last("exact", functools.partial(work.exact, asked))
        self._learn(asked, answer)
        return answer

    # Many runs.

    async def curve(self, _client: str, state: Mapping[str, Any]) -> AsyncGenerator[Event, None]:
        """Figures over the rate of requests, closer where the SLO, or else the deployment, stops being kept; and the knee."""
        asked = self._about(state)
        left = self._most(state, "points", _POINTS)
        own_per_s = (await self._last("behind", functools.partial(work.own_rate, asked)))["rate_per_s"]
        scale = asked.scenario.workload.rate_scale
        kept: dict[float, bool] = {}
        factors = list(_FACTORS[:left])
        while factors:
            left -= len(factors)
            about = [self._with(state, {"workload.rate_scale": scale * factor}) for factor in factors]
            jobs = (self._events("behind", functools.partial(work.point, each)) for each in about)
            async with contextlib.aclosing(merged(*jobs)) as events:
                async for i, event in events:
                    if event.name == "refused":
                        yield event
                        return
                    kept[factors[i]] = _keeps(event.data)
                    facts = {"rate_per_s": own_per_s * factors[i], "kind": "exact", **_facts(about[i])}
                    yield Event("point", {**facts, **event.data})
            factors = [factor for factor in [_next_factor(kept)] if factor is not None and left > 0]
        best = max((factor for factor, keeps in kept.items() if keeps), default=None)
        yield Event("done", {"arrival_per_s": own_per_s, **({} if best is None else {"knee_per_s": own_per_s * best})})

    async def candidates(self, _client: str, state: Mapping[str, Any]) -> AsyncGenerator[Event, None]:
        """Deployments with their figures, ranked by cost, and how probably those that matter keep the SLO."""
        base = scenario_in(self.base, state)
        most = self._most(state, "points", _CANDIDATES)
        over = state.get("over") or {}
        found: dict[str, _Found] = {}
        async with contextlib.aclosing(self._tried(state, base, over, most, found)) as events:
            async for event in events:
                yield event
        if base.has_limits:
            async with contextlib.aclosing(self._probabilities(state, found)) as events:
                async for event in events:
                    yield event
        ranked = [(name, each.facts["figures"], each.keeps) for name, each in found.items()]
        yield Event("done", {"front": front(ranked), "ranked": list(by_cost(ranked))})

    async def _tried(
        self, state: Mapping[str, Any], base: Scenario, over: Any, most: int, found: dict[str, _Found]
    ) -> AsyncGenerator[Event, None]:
        """Candidates as they have run, which go into *found*: those of *over*, or those of a search and separate pools after it."""
        search = None if over else Search(base, await self._changes(state, _CHANGES), most)
        tried = asked_for(over, self.limits.points) if search is None else search.next()
        pools = search is not None
        while tried:
            jobs = [self._candidate(state, each) for each in tried]
            async with contextlib.aclosing(merged(*jobs)) as events:
                async for i, event in events:
                    candidate, data = tried[i], event.data
                    keeps = None if event.name == "refused" else _keeps(data)
                    if search is not None:
                        search.tell(candidate, keeps if base.has_limits else None)
                    facts = {"name": candidate.name, "set": dict(candidate.settings)}
                    if keeps is None:
                        sentence = data["sentence"].removeprefix(f"{base.source}: ")
                        yield Event("candidate", {**facts, "refused": sentence})
                        continue
                    found[candidate.name] = _Found(candidate, {**facts, **data}, keeps)
                    yield Event("candidate", self._told(found, candidate.name))
            tried = [] if search is None else search.next()
            if search is not None and not tried and pools:
                pools = False
                tried = await self._changes(self._over(state, {"replicas": search.least}), ("pools",))

    async def _changes(self, state: Mapping[str, Any], groups: Sequence[str]) -> list[Candidate]:
        """The changes of *groups* that `rooftrace advise` would try."""
        found = await self._last("behind", functools.partial(work.changes, self._about(state), groups))
        return [Candidate(**each) for each in found["changes"]]

    async def _candidate(self, state: Mapping[str, Any], candidate: Candidate) -> AsyncGenerator[Event, None]:
        try:
            asked = self._with(state, candidate.settings)
        except RooftraceError as error:
            yield Event("refused", {"sentence": str(error)})
            return
        async with contextlib.aclosing(self._events("behind", functools.partial(work.point, asked))) as events:
            async for event in events:
                yield event

    def _told(self, found: Mapping[str, _Found], name: str) -> dict[str, Any]:
        ranked = [(each, of.facts["figures"], of.keeps) for each, of in found.items()]
        return {**found[name].facts, "slo_probability": None, "on_front": name in front(ranked)}

    async def _probabilities(
        self, state: Mapping[str, Any], found: Mapping[str, _Found]
    ) -> AsyncGenerator[Event, None]:
        """Again the cheapest candidates that keep the SLO, and the next that does not, with how probably they do."""
        ranked = list(by_cost([(name, each.facts["figures"], each.keeps) for name, each in found.items()]))
        first_missed = next((i for i, name in enumerate(ranked) if not found[name].keeps), len(ranked))
        names = [*ranked[: min(first_missed, _PROBABLE)], *ranked[first_missed : first_missed + 1]]
        about = [self._with(state, found[name].candidate.settings) for name in names]
        jobs = [
            self._events("behind", functools.partial(work.probability, each, _REPLAYS, _REPLAYED)) for each in about
        ]
        async with contextlib.aclosing(merged(*jobs)) as events:
            async for i, event in events:
                told = self._told(found, names[i])
                if event.name == "probability" and "value" in event.data:
                    told["slo_probability"] = event.data["value"]
                    told["slo_probability_from"] = event.data["how"]
                else:
                    told["slo_probability_why_not"] = event.data.get("why_not", event.data.get("sentence"))
                yield Event("candidate", told)

    # Why, theory, measurements.

    async def explain(self, _client: str, state: Mapping[str, Any]) -> AsyncGenerator[Event, None]:
        job = functools.partial(work.explain, self._about(state))
        async with contextlib.aclosing(self._events("exact", job)) as events:
            async for event in events:
                yield event

    async def compare(self, _client: str, state: Mapping[str, Any]) -> AsyncGenerator[Event, None]:
        """The differences of a state from the one in its `from`, with their intervals."""
        before = state.get("from", {})
        if not isinstance(before, Mapping):
            raise Refused(f"from is a state, such as {{'set': {{}}}}; got {shown(before)}")
        job = functools.partial(work.compare, self._about(before), self._about(state))
        async with contextlib.aclosing(self._events("behind", job)) as events:
            async for event in events:
                yield event

    async def theory(self, _client: str, state: Mapping[str, Any]) -> AsyncGenerator[Event, None]:
        job = functools.partial(theory, self._about(state), state.get("view"))
        async with contextlib.aclosing(self._events("behind", job)) as events:
            async for event in events:
                yield event

    async def bench(self, client: str, state: Mapping[str, Any], name: str, data: bytes) -> Mapping[str, Any]:
        """The measured runs in *data*, a file that *client* gives, beside their simulation."""
        found = await self._last("exact", functools.partial(measured.bench, self._about(state), name, data))
        _keep(self._files, (client, name), data, _FILES)
        return found

    async def fit(self, client: str, state: Mapping[str, Any]) -> AsyncGenerator[Event, None]:
        """A stack fitted to a file that *client* has given, or that the page was opened with; *state* has its name in `file`."""
        name = state.get("file")
        data = dict(self._given).get(str(name), self._files.get((client, str(name))))
        if data is None:
            raise Refused(f"there is no measured file {shown(name)} here; drop it on the page again")
        folder = self._store.parent.parent / "fits"
        job = functools.partial(measured.fit, self._about(state), str(name), data, str(folder))
        async with contextlib.aclosing(self._events("exact", job)) as events:
            async for event in events:
                yield event

    # A fleet that runs.

    async def watch(self, _client: str, _state: Mapping[str, Any]) -> AsyncGenerator[Event, None]:
        """The fleet as it is now, again and again until the client goes."""
        if self._watched is None:
            raise Refused("no fleet is watched here; start the page with --watch ADDRESS")
        while True:
            yield await self._look(self._watched)
            await asyncio.sleep(self._watched.every_s)

    async def _look(self, watched: Watched) -> Event:
        """One look, which clients share that ask within half the time between two."""
        async with self._looking:
            now_s = asyncio.get_running_loop().time()
            if self._looked is None or now_s - self._looked[0] > watched.every_s / 2:
                try:
                    event = Event("fleet", await asyncio.to_thread(watched.look))
                except RooftraceError as error:
                    event = Event("unread", {"sentence": str(error)})
                self._looked = now_s, event
            return self._looked[1]

    # What is taken away.

    async def requests(self, key: str) -> Mapping[str, Any]:
        return await self._last("exact", functools.partial(work.rows, self._known(key), self.limits.rows))

    async def timeline(self, key: str) -> bytes:
        return (await self._last("exact", functools.partial(work.timeline, self._known(key))))["content"]

    async def frozen(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """All that the page shows of *state*: what it begins with, and the events that answer each of its questions."""
        scenario = scenario_in(self.base, state)
        asks: dict[str, tuple[Stream, Mapping[str, Any]]] = {
            "/api/curve": (self.curve, state),
            "/api/candidates": (self.candidates, state),
            "/api/explain": (self.explain, state),
            **{view: (self.theory, {**state, "view": view}) for view in VIEWS},
        }
        answer = await self._exact(state)
        told = await asyncio.gather(*(_all(answers("export", asked)) for answers, asked in asks.values()))
        events: dict[str, Any] = {"/api/run": [["exact", answer]], **dict(zip(asks, told, strict=True))}
        events["/api/theory"] = {view: events.pop(view) for view in VIEWS}
        explained = next((data for name, data in events["/api/explain"] if name == "explained"), None)
        return {
            "scenario": scenario.settings(),
            "name": scenario.name,
            "state": {"set": settings_in(state)},
            "controls": controls(scenario),
            "answer": answer,
            "explained": explained,
            "events": events,
            "requests": await self.requests(answer["key"]),
            "benches": (await self.started()).get("benches", []),
        }

    # Helpers.

    def _with(self, state: Mapping[str, Any], settings: Mapping[str, Any]) -> Asked:
        """The state that is asked about, with *settings* over those of *state*."""
        return self._about(self._over(state, settings))

    @staticmethod
    def _over(state: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
        return {"set": {**settings_in(state), **settings}}

    def _known(self, key: str) -> Asked:
        if key not in self._asked:
            raise Refused("this run is not known here any more; run it again")
        return self._asked[key]

    def _most(self, state: Mapping[str, Any], name: str, default: int) -> int:
        """The number that *state* gives by *name*, bounded. Refused where it is none."""
        given = state.get(name, default)
        if isinstance(given, bool) or not isinstance(given, int) or not 1 <= given <= self.limits.points:
            raise Refused(f"{name} is a whole number from 1 to {self.limits.points}; got {shown(given)}")
        return given

    async def _last(self, lane: Lane, job: Job) -> Mapping[str, Any]:
        """The last thing that *job* says. Refused where it is a refusal."""
        last: Event | None = None
        async with contextlib.aclosing(self._events(lane, job)) as events:
            async for event in events:
                last = event
        if last is None or last.name == "refused":
            raise Refused("nothing came of it" if last is None else last.data["sentence"])
        return last.data

    async def _events(self, lane: Lane, job: Job) -> AsyncGenerator[Event, None]:
        """The events of *job* in a worker; once more where the process died before it said anything."""
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


@dataclass(frozen=True, slots=True)
class _Found:
    """A candidate that ran, what is told of it, and whether it keeps the SLO."""

    candidate: Candidate
    facts: Mapping[str, Any]
    keeps: bool


def _keeps(point: Mapping[str, Any]) -> bool:
    """Whether a run keeps its SLO; without one, whether it keeps up with its arrivals."""
    slo = point["slo"]
    return not point["saturated"] if slo is None else slo["kept"]


def _facts(asked: Asked) -> dict[str, Any]:
    return {"key": asked.key, "set": dict(asked.settings)}


def _next_factor(kept: Mapping[float, bool]) -> float | None:
    """The next multiple of the rate on the way to the highest that is kept; None where it is known."""
    best = max((factor for factor, keeps in kept.items() if keeps), default=None)
    if best is None:
        lowest = min(kept)
        return lowest / 2 if lowest > _LEAST_FACTOR else None
    missed = min((factor for factor, keeps in kept.items() if not keeps and factor > best), default=None)
    if missed is None:
        return 2 * best if best < 1 / _LEAST_FACTOR else None
    return math.sqrt(best * missed) if missed > best * (1 + TOLERANCE) else None


async def _all(events: AsyncGenerator[Event, None]) -> list[list[Any]]:
    """All *events*, an error being the last of them."""
    found: list[list[Any]] = []
    try:
        async with contextlib.aclosing(events):
            async for event in events:
                found.append([event.name, event.data])
    except RooftraceError as error:
        found.append(["refused", refusal(error, {}).facts])
    return found


def _keep(kept: OrderedDict[Any, Any], key: Any, value: Any, most: int) -> None:
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > most:
        kept.popitem(last=False)
