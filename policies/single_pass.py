"""Serving of models that answer in one pass, with deadlines, as AlpaServe does (Li et al., OSDI 2023; alpa-projects/mms)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from policies.routers import Refused, ReplicaLoad, RoutedRequest
from policies.view import Plan, ReplicaView, WaitingSeq

TOO_LATE = "deadline cannot be met"


@dataclass(frozen=True)
class InOrder:
    """One request at a time, in order of arrival."""

    def plan(self, view: ReplicaView, /) -> Plan:
        return Plan(run=tuple((seq.id, seq.tokens) for seq in view.waiting[:1]))


@dataclass(frozen=True)
class DeadlineBatches:
    """Heads that would miss their deadline even alone are dropped; then the largest batch that is there and keeps the oldest
    one's deadline is taken. Nothing waits for a batch to fill.

    *overhead_ns* counts against deadlines beside the time on the stages. Needs a view with prices.
    """

    batch_sizes: tuple[int, ...] = (1,)
    overhead_ns: int = 0

    def plan(self, view: ReplicaView, /) -> Plan:
        assert view.price is not None
        waiting = list(view.waiting)
        dropped = 0
        while dropped < len(waiting) and not self._in_time(view, waiting[dropped], waiting[dropped : dropped + 1]):
            dropped += 1
        reject = tuple((seq.id, TOO_LATE) for seq in waiting[:dropped])
        rest = waiting[dropped:]
        for size in reversed(self.batch_sizes):
            batch = rest[:size]
            if len(batch) == size and (size == 1 or self._in_time(view, rest[0], batch)):
                return Plan(run=tuple((seq.id, seq.tokens) for seq in batch), reject=reject)
        return Plan(reject=reject)

    def _in_time(self, view: ReplicaView, oldest: WaitingSeq, batch: Sequence[WaitingSeq]) -> bool:
        if oldest.deadline_ns < 0:
            return True
        assert view.price is not None
        done_ns = view.price.done_ns([seq.tokens for seq in batch])
        return done_ns + self.overhead_ns <= oldest.arrival_ns + oldest.deadline_ns


@dataclass(frozen=True)
class LeastBacklog:
    """AlpaServe's controller: a request is sent to the hosting machine with the least backlog, or refused if it is late there.

    A request is late where it would miss its deadline; the lowest index wins a tie.

    The backlog is the promised end of work at the last stage or, with *batching*, where that is not known before, the number of
    requests waiting or in service.
    """

    batching: bool = False
    overhead_ns: int = 0

    def route(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad], /) -> int | Refused:
        if self.batching:
            best = min(range(len(replicas)), key=lambda i: replicas[i].waiting + replicas[i].running)
        else:
            best = min(range(len(replicas)), key=lambda i: replicas[i].promised_ns)
        if request.deadline_ns >= 0:
            done_ns = replicas[best].done_ns(request.model, waiting=not self.batching)
            if done_ns + self.overhead_ns > request.arrival_ns + request.deadline_ns:
                return Refused(TOO_LATE, at=best)
        return best
