"""Which replica a request goes to. Each router is a frozen dataclass with one pure method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast


class RoutedRequest(NamedTuple):
    """A request at the router. *luck*: two uniform draws in [0, 1) that belong to this request."""

    id: int
    prompt_tokens: int = 0
    model: int = 0
    luck: tuple[float, float] = (0.0, 0.0)
    arrival_ns: int = 0
    deadline_ns: int = -1
    """From arrival; -1: none."""
    turn: int = 0
    """How many requests for the same model have a lower number; where every machine serves every model, how many have."""


class Refused(NamedTuple):
    """What a router answers instead of a replica: the request is rejected, and costs nothing.

    *at*: the replica on whose account, for the record; -1: none.
    """

    reason: str
    at: int = -1


class ReplicaLoad(Protocol):
    """A machine as the router sees it: what has happened up to the last iteration that has ended.

    Only machines that host the request's model are shown.
    """

    @property
    def waiting(self) -> int: ...

    @property
    def running(self) -> int: ...

    @property
    def kv_blocks_used(self) -> int: ...

    @property
    def promised_ns(self) -> int:
        """When the last stage will have done all that was accepted; of machines that serve single-pass models."""
        ...

    def done_ns(self, model: int, *, waiting: bool) -> int:
        """When a request of *model* would be done if it came now: behind all that was accepted, or (not *waiting*) behind what has
        been started; of machines that serve single-pass models."""
        ...


@dataclass(frozen=True)
class Load:
    """A `ReplicaLoad` in literals, for tests and examples. *service_ns*: of one request, for `done_ns`."""

    waiting: int = 0
    running: int = 0
    kv_blocks_used: int = 0
    promised_ns: int = 0
    service_ns: int = 0

    def done_ns(self, model: int, *, waiting: bool) -> int:
        return self.promised_ns + self.service_ns


class Router(Protocol):
    def route(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad], /) -> int | Refused: ...


RouteFunction = Callable[[RoutedRequest, Sequence[ReplicaLoad]], "int | Refused"]


def route_of(router: Router | RouteFunction) -> RouteFunction:
    """The function that routes: the router's method, or the function itself. TypeError for anything else."""
    route = getattr(router, "route", router)
    if not callable(route):
        raise TypeError(f"a router has a method route(request, replicas) or is such a function; got {router!r}")
    return cast(RouteFunction, route)


def _outstanding(load: ReplicaLoad) -> int:
    return load.waiting + load.running


@dataclass(frozen=True)
class RoundRobin:
    """The requests for a model go to the replicas that host it in turn, in order of their numbers."""

    def route(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad], /) -> int:
        return request.turn % len(replicas)


@dataclass(frozen=True)
class Random:
    """A replica drawn uniformly."""

    def route(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad], /) -> int:
        return int(request.luck[0] * len(replicas))


@dataclass(frozen=True)
class LeastOutstanding:
    """The replica with the fewest requests waiting and running; the lowest index among equals."""

    def route(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad], /) -> int:
        best, fewest = 0, _outstanding(replicas[0])
        for index in range(1, len(replicas)):
            outstanding = _outstanding(replicas[index])
            if outstanding < fewest:
                best, fewest = index, outstanding
        return best


@dataclass(frozen=True)
class PowerOfTwo:
    """The less loaded of two replicas drawn at random (Mitzenmacher, 2001)."""

    def route(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad], /) -> int:
        n = len(replicas)
        if n == 1:
            return 0
        first = int(request.luck[0] * n)
        second = int(request.luck[1] * (n - 1))
        second += second >= first
        if _outstanding(replicas[second]) < _outstanding(replicas[first]):
            return second
        return first


@dataclass(frozen=True)
class LeastKv:
    """The replica with the fewest KV blocks in use; then the fewest requests; then the lowest index."""

    def route(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad], /) -> int:
        return min(range(len(replicas)), key=lambda i: (replicas[i].kv_blocks_used, _outstanding(replicas[i]), i))
