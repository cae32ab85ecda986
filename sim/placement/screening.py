"""Single-pass models on groups of devices without events: what becomes of a request is known when it arrives.

Searches of placements ask this thousands of times. `sim.placement.groups` has the rules, and a test that the event loop gives the
same. Records of classes and their whole numbers, because this is compiled where the engine is: there they are fields of C structs.
"""

from __future__ import annotations

from collections.abc import Sequence

NEVER_NS = 1 << 60


class Stage:
    """A stage of a group's pipeline."""

    __slots__ = ("free_ns", "until_ns")

    def __init__(self) -> None:
        self.free_ns = 0
        self.until_ns = 0
        """When the request that is looked at would leave it."""


class Step:
    """A model's time on a stage."""

    __slots__ = ("ns", "stage")

    def __init__(self, stage: Stage, ns: int) -> None:
        self.stage = stage
        self.ns = ns


class Line:
    """The stages of a group, and what it has served."""

    __slots__ = ("number", "ready_ns", "served", "stages")

    def __init__(self, number: int, n_stages: int) -> None:
        self.number = number
        self.stages = [Stage() for _ in range(n_stages)]
        self.ready_ns = 0
        """When the last of its stages is free."""
        self.served = 0


class Host:
    """A group that hosts a model."""

    __slots__ = ("line", "steps")

    def __init__(self, line: Line, stage_ns: Sequence[int]) -> None:
        self.line = line
        self.steps = [Step(stage, ns) for stage, ns in zip(line.stages, stage_ns, strict=True)]


class Times:
    """Start, end and group of each request, where they are asked for; -1 where there is none."""

    __slots__ = ("group", "left_ns", "start_ns")

    def __init__(self) -> None:
        self.start_ns: list[int] = []
        self.left_ns: list[int] = []
        """When it has left its last stage."""
        self.group: list[int] = []

    def add(self, start_ns: int, left_ns: int, group: int) -> None:
        self.start_ns.append(start_ns)
        self.left_ns.append(left_ns)
        self.group.append(group)


class Hosted:
    """A model: the groups that host it, by number, and the requests that none of them served."""

    __slots__ = ("hosts", "unserved")

    def __init__(self) -> None:
        self.hosts: list[Host] = []
        self.unserved = 0

    def miss(self, group: int, times: Times | None) -> None:
        """Leave a request unserved that was sent to *group*, -1 where there is none."""
        self.unserved += 1
        if times is not None:
            times.add(-1, -1, group)


def serve(
    arrival_ns: list[int], model: list[int], latest_ns: list[int], models: list[Hosted], times: Times | None = None
) -> int:
    """Serve the requests in order of arrival; returns the time from arrival until the last stage, summed over those served.

    *latest_ns* is when the last stage may end. Conditions stand for `max`, whose call takes Python as long as a stage.
    """
    total_ns = 0
    for i, arrived in enumerate(arrival_ns):
        hosted = models[model[i]]
        hosts = hosted.hosts
        if not hosts:
            hosted.miss(-1, times)
            continue
        host = hosts[0]
        if len(hosts) > 1:
            least = host.line.ready_ns
            for other in hosts:
                backlog = other.line.ready_ns
                if backlog < least:
                    least = backlog
                    host = other
        t = arrived
        for step in host.steps:
            stage = step.stage
            free = stage.free_ns
            if free > t:
                t = free
            t += step.ns
            stage.until_ns = t
        line = host.line
        if t > latest_ns[i]:
            hosted.miss(line.number, times)
            continue
        if times is not None:
            times.add(max(arrived, line.stages[0].free_ns), t, line.number)
        for stage in line.stages:
            stage.free_ns = stage.until_ns
        line.ready_ns = t
        line.served += 1
        total_ns += t - arrived
    return total_ns
