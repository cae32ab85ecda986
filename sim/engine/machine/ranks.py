"""A machine whose attention is replicated over ranks (attention data parallelism).

Each rank is an engine core with sequences, a queue, a scheduler's plans and KV memory of its own; a router inside the machine
assigns each request to a rank of its model. The i-th micro-batches of all ranks start together when any has work, and end together
(`sim.engine.machine.groups`): the price is one of all of them (`sim.engine.batch.rank_prices`). Requests that arrive at any rank
meanwhile wait for the next.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from policies.routers import Refused, RoutedRequest, route_of, spread_of
from policies.view import seats
from sim.engine.machine.any_machine import AnyMachine
from sim.engine.machine.loads import CoreLoad, place_of
from sim.engine.machine.machine import Machine
from sim.engine.machine.one_queue import OneQueue
from sim.engine.record.columns import ABORTED
from sim.engine.serve.engine_core import EngineCore, InCommon
from sim.engine.spec.experiment import MachineSpec
from sim.engine.spec.roles import Part
from sim.engine.time.errors import PolicyError

_RANK_STREAM = 0x72616E6B
"""Names the random stream of routers inside machines."""


class RankedMachine(Machine):
    """Serves the requests that are delivered to it on one of its ranks each.

    To the rest of the run it is a machine; its engine cores are the ranks of its models.
    """

    def __init__(
        self, common: InCommon, index: int, spec: MachineSpec, first_number: int, part: Part | None = None
    ) -> None:
        super().__init__(common, index, spec, first_number, part)
        self._router = spec.rank_router
        assert spec.rank_router is not None
        self._route_of = route_of(spec.rank_router)
        self._draws: NDArray[np.float64] | None = None
        """Numbers that the router draws, by request."""
        self._seed = common.seed
        self._n_routed = dict.fromkeys(self._hosting, 0)
        """Requests that have been sent to the ranks of each model."""
        spread = spread_of(spec.rank_router)
        for hosted in spec.hosted:
            n_seats, model = seats(hosted.scheduler), hosted.model
            if spread is not None and n_seats is not None:
                n_seats *= hosted.micro_batches or hosted.cost.n_stages
                queue = OneQueue(spread, self._loads_of(0 if model is None else model), n_seats, self._put)
                self._hosting[model].one_queue = queue
                self._hosting[model].cores[0].sequences.behind = queue.waiting
        self._queues = [group.one_queue for group in self.groups if group.one_queue is not None]

    # Called from outside.

    def deliver(self, id_: int, kv_tokens: int = 0) -> None:
        """Queue a request with the KV of its first *kv_tokens* tokens; one that can never fit is rejected with its reason."""
        group = self._group_of(self._model(id_))
        if group.one_queue is not None and group.one_queue.holds:
            self._hold(group.one_queue, group.cores[0], id_, kv_tokens)
            return
        ranks, rank = self._rank_for(id_)
        if isinstance(rank, Refused):
            self._state.replica[id_] = ranks[max(rank.at, 0)].number
            self._outside.rejected(id_, rank.reason)
            return
        core = ranks[rank]
        if self._accept(core, id_, kv_tokens):
            self.turns.arrive(core, self._clock.now_ns)

    def _hold(self, queue: OneQueue, first: EngineCore, id_: int, kv_tokens: int) -> None:
        """Put a request into the queue of all ranks, the *first* of which stands for them."""
        self._state.replica[id_] = first.number
        reason = first.sequences.refusal(id_)
        if reason is not None:
            self._outside.rejected(id_, reason)
            return
        queue.waiting.append((id_, self._state.prompt[id_], kv_tokens))
        self.turns.arrive(first, self._clock.now_ns)

    def _put(self, load: CoreLoad, id_: int, kv_tokens: int) -> None:
        """A request leaves the queue of all ranks for one of them."""
        self._accept(load.core, id_, kv_tokens)

    def give_up(self, id_: int) -> None:
        if any([queue.take_out(id_) for queue in self._queues]):
            self._state.status[id_] = ABORTED
        else:
            super().give_up(id_)

    def abort(self, now_ns: int) -> list[int]:
        ids = super().abort(now_ns)
        for queue in self._queues:
            ids += [id_ for id_, _, _ in queue.waiting]
            queue.waiting.clear()
        return ids

    @property
    def waiting(self) -> int:
        return super().waiting + sum(len(queue.waiting) for queue in self._queues)

    @property
    def prefill_tokens(self) -> int:
        return super().prefill_tokens + sum(queue.prompt_tokens for queue in self._queues)

    @property
    def prompt_tokens(self) -> int:
        return super().prompt_tokens + sum(queue.prompt_tokens for queue in self._queues)

    def _rank_for(self, id_: int) -> tuple[Sequence[EngineCore], int | Refused]:
        """The ranks of the model that a request asks for, and which of them is to serve it."""
        state, model = self._state, self._model(id_)
        hosted = model if model in self._hosting else None
        ranks = self._group_of(model).cores
        if self._draws is None or id_ >= len(self._draws):
            # By request, in whatever order requests arrive.
            n = max(len(state.prompt), 2 * id_)
            self._draws = np.random.default_rng([self._seed, _RANK_STREAM]).random((n, 2))
        request = RoutedRequest(
            id_,
            state.prompt[id_],
            model,
            tuple(self._draws[id_].tolist()),
            state.arrival[id_],
            -1 if state.deadline is None else state.deadline[id_],
            self._n_routed[hosted],
            priority=0 if state.priority is None else state.priority[id_],
        )
        self._n_routed[hosted] += 1
        answer = self._route_of(request, self._loads_of(model))
        if isinstance(answer, Refused):
            return ranks, answer
        return ranks, place_of(answer, len(ranks), router=self._router, request=id_, of="rank")

    def core_for(self, id_: int) -> EngineCore:
        ranks, rank = self._rank_for(id_)
        if isinstance(rank, Refused):
            raise PolicyError(
                f"{self._router!r} refused request {id_}, whose KV comes from another machine; take a router that refuses none"
            )
        return ranks[rank]

    def _serving(self, id_: int) -> EngineCore:
        return self.cores[self._state.replica[id_] - self.cores[0].number]


def machine_of(common: InCommon, index: int, spec: MachineSpec, first_number: int, part: Part | None = None) -> Machine:
    """The machine that *spec* describes; *first_number* and *part*: as of a `Machine`."""
    kind = RankedMachine if spec.ranks > 1 else Machine
    return kind(common, index, spec, first_number, part)


def ranked(machines: Sequence[AnyMachine]) -> list[tuple[int, int]]:
    """The numbers of the first and the last rank, for each model on a machine with ranks."""
    groups = [group for machine in machines for group in machine.groups if len(group.cores) > 1]
    return [(group.cores[0].number, group.cores[-1].number) for group in groups]
