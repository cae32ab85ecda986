"""Plans that are made ahead: each while the iteration before it runs (see `policies.view.plans_ahead`).

The engine asks for a plan when its iteration is to start, and shows only what was known when the iteration before started: later
arrivals are hidden, and an ended sequence keeps its place and its blocks. One that was not known to end takes the planned step.
"""

from __future__ import annotations

from collections import deque

from policies.view import ALWAYS_NS, Plan
from sim.engine.batch.micro_batch import Ended, MicroBatch, QueueView
from sim.engine.batch.version import Version


class AsyncScheduling:
    """The instants that bound what a micro-batch's plans know."""

    __slots__ = ("_came_ns", "_planned_ns", "made", "seen_ns")

    def __init__(self, came_ns: deque[int]) -> None:
        self._came_ns = came_ns
        """Arrivals (ns) that may be later than the next plan."""
        self._planned_ns = -1
        """The instant of the latest plan."""
        self.seen_ns = ALWAYS_NS
        """The instant of the next plan: the start of the iteration that has just ended. ALWAYS_NS: it is made now."""
        self.made = False
        """Whether the latest plan was made ahead, or counts as if it had been; an empty one is followed by one that knows all."""

    @property
    def n_unknown(self) -> int:
        """Requests that arrived after the latest plan, while it is carried out."""
        return len(self._came_ns)

    @property
    def planned_ns(self) -> int:
        """The instant at which the latest iteration was planned."""
        # A plan that a micro-batch holds counts as made anew, with no call of the scheduler.
        return self._planned_ns if self.seen_ns == ALWAYS_NS else self.seen_ns

    def hide(self, batch: MicroBatch, queue: QueueView, *, given: bool) -> None:
        """Leaves in the view of *batch* what the next plan knew. *given*: blocks of ended sequences are free already."""
        seen_ns = self.seen_ns
        self._note_plan(batch)
        self.leave(batch, queue, seen_ns, given=given)

    def go_on(self, batch: MicroBatch, queue: QueueView) -> None:
        """As `hide`, for a plan that is known without a view."""
        queue.hidden = came_after(self._came_ns, self.seen_ns) if self._came_ns else 0
        self._note_plan(batch)

    def _note_plan(self, batch: MicroBatch) -> None:
        """The next plan is made."""
        seen_ns = self.seen_ns
        if seen_ns != ALWAYS_NS:
            self.seen_ns, self.made, self._planned_ns = ALWAYS_NS, True, seen_ns
            return
        self.made, self._planned_ns = False, batch.view.now_ns
        if batch.leaving:
            batch.forget_the_leaving()

    def leave(self, batch: MicroBatch, queue: QueueView, seen_ns: int, *, given: bool) -> None:
        """As `hide`, for a plan that is not made: what was known at *seen_ns*."""
        view = batch.view
        queue.hidden = came_after(self._came_ns, seen_ns) if self._came_ns else 0
        view.waiting = queue if queue else ()
        view.n_leaving = view.leaving_blocks = 0
        for _, blocks, growth_blocks, steps_on, promised, _ in batch.leaving.values():
            view.free_blocks -= blocks if given else 0
            if steps_on:
                view.promised_blocks += promised
                view.n_decoding += 1
                view.growth_blocks += growth_blocks
            else:
                view.n_leaving += 1
                view.leaving_blocks += blocks

    def n_hidden(self) -> int:
        """Requests in the queue that the coming plan does not know."""
        return came_after(self._came_ns, self.seen_ns) if self._came_ns else 0

    def misses(self, version: Version, *, through_arrivals: bool) -> bool:
        """Whether news or an arrival that the plan to be carried out now does not let pass came after it was made."""
        if not self.made:
            return False
        return version.news_ns > self._planned_ns or (not through_arrivals and version.arrived_ns > self._planned_ns)

    def reset(self) -> None:
        """The next plan is made when it is asked for."""
        self.seen_ns = ALWAYS_NS


def came_after(came_ns: deque[int], seen_ns: int) -> int:
    """The number of arrivals after *seen_ns*: the end of the queue. Calls come in order of time; earlier arrivals are dropped."""
    while came_ns and came_ns[0] <= seen_ns:
        came_ns.popleft()
    return len(came_ns)


def as_known(leaving: dict[int, Ended], plan: Plan) -> tuple[bool | tuple[int, ...], dict[int, Ended]]:
    """The decodes of *plan* without *leaving*, and the sequences of *leaving* that take a step all the same: *plan* did not know
    that they had ended."""
    if plan.decode is True and not plan.preempt:
        return True, {id_: ended for id_, ended in leaving.items() if ended.steps_on}
    wanted = leaving.keys() - set(plan.preempt) if plan.decode is True else set(plan.decode or ())
    wasted = {id_: ended for id_, ended in leaving.items() if ended.steps_on and id_ in wanted}
    if isinstance(plan.decode, tuple):
        return tuple(id_ for id_ in plan.decode if id_ not in leaving), wasted
    return plan.decode, wasted
