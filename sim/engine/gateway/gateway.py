"""A router and the machines that it may choose from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic

import numpy as np

from policies.routers import Refused, RoutedRequest, Router, route_of
from sim.engine.gateway.in_order import InOrder
from sim.engine.gateway.routing import routing_of
from sim.engine.machine.any_machine import AnyMachine, M
from sim.engine.machine.loads import place_of
from sim.engine.requests.state import RequestState
from sim.engine.time.events import Clock
from workloads import Workload

Rejects = Callable[[int, str], None]


def eligible(machines: Sequence[M], workload: Workload) -> list[list[M]] | None:
    """For each model the machines that host it; None where every machine serves every request."""
    if all(core.spec.model is None for machine in machines for core in machine.cores):
        return None
    return [[machine for machine in machines if machine.hosts(model)] for model in range(max(len(workload.models), 1))]


class Gateway(Generic[M]):
    """Routes each request by its router."""

    def __init__(
        self, router: Router, machines: Sequence[M], everybody: Sequence[AnyMachine], workload: Workload,
        state: RequestState, clock: Clock, draw_stream: Sequence[int], rejects: Rejects,
    ) -> None:  # fmt: skip
        """*machines*: its choice, out of *everybody*."""
        self._router = router
        self._state = state
        self._machines = list(machines)
        self._rejects = rejects
        self._route_of = route_of(router)
        self._hosting = eligible(machines, workload)
        self._rng = np.random.default_rng(draw_stream)
        self._draws = self._rng.random((len(workload), 2))
        self.routing = routing_of(router, everybody, clock, state)
        self.in_order: InOrder | None = None
        """Set where the router takes the least loaded machine of all, and nothing but their turns changes their loads."""

    @property
    def in_part(self) -> bool:
        """Whether some machines do not host all models."""
        return self._hosting is not None

    def hosting(self, id_: int) -> list[M]:
        """The machines that host the model that the request asks for."""
        if self._hosting is None:
            return self._machines
        return self._hosting[0 if self._state.model is None else self._state.model[id_]]

    def request(self, id_: int) -> RoutedRequest:
        """The request as a router sees it."""
        state = self._state
        while id_ >= len(self._draws):
            # A live run has no number of requests.
            self._draws = np.concatenate((self._draws, self._rng.random((len(self._draws), 2))))
        return RoutedRequest(
            id_,
            state.prompt[id_],
            0 if state.model is None else state.model[id_],
            tuple(self._draws[id_].tolist()),
            state.arrival[id_],
            -1 if state.deadline is None else state.deadline[id_],
            id_ if self._hosting is None or state.turn is None else state.turn[id_],
            -1 if state.session is None else state.session[id_],
            priority=0 if state.priority is None else state.priority[id_],
            adapter=-1 if state.adapter is None else state.adapter[id_],
        )

    def choose(self, id_: int, machines: Sequence[M] | None = None) -> M | None:
        """The machine that gets the request, of *machines* or of all that host its model; None: it has been rejected."""
        if machines is None:
            machines = self.hosting(id_)
        if not machines:
            self._rejects(id_, "no machine hosts the model")
            return None
        if self.in_order is not None:
            return machines[self.in_order.first()]
        request = self.request(id_)
        routing = self.routing
        if routing is None:
            answer = self._route_of(request, machines)
        else:
            request, shown = routing.show(request, machines)
            answer = self._route_of(request, shown)
        if isinstance(answer, Refused):
            if answer.at >= 0:
                self._state.replica[id_] = machines[answer.at].core_number(request.model)
            self._rejects(id_, answer.reason)
            return None
        chosen = machines[place_of(answer, len(machines), router=self._router, request=id_, of="replica")]
        if routing is not None:
            routing.sent(request, chosen)
        return chosen
