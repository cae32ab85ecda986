"""Plans that are made ahead: each while the iteration before it runs (see `policies.view.plans_ahead`).

The engine asks for a plan when it is to start, and shows it no more than was known when the iteration before started: requests that
came since are hidden, and who has ended keeps its seat and its blocks. Who was not known to end takes the step that was planned.
"""

from __future__ import annotations

from collections import deque

from policies.view import ALWAYS_NS, Plan
from sim.engine.batch.lane import Ended, Lane, QueueView
from sim.engine.batch.version import Version


class Ahead:
    """What the plans of a lane do not know when they are made."""

    __slots__ = ("_came_ns", "_planned_ns", "made", "seen_ns")

    def __init__(self, came_ns: deque[int]) -> None:
        self._came_ns = came_ns
        """When those came who may have come after the coming plan was made."""
        self._planned_ns = -1
        """When the latest plan was made."""
        self.seen_ns = ALWAYS_NS
        """When the coming plan was made: when the iteration that has just ended started. ALWAYS_NS: it is made now."""
        self.made = False
        """Whether the latest plan was made ahead; where it is empty, one is made that knows all."""

    @property
    def n_unknown(self) -> int:
        """Requests that came after the latest plan was made, while it is carried out."""
        return len(self._came_ns)

    @property
    def planned_ns(self) -> int:
        """When the plan was made of the iteration that was started last."""
        # A plan that a lane holds is taken for one made anew, and has not been asked for.
        return self._planned_ns if self.seen_ns == ALWAYS_NS else self.seen_ns

    def hide(self, lane: Lane, queue: QueueView, *, given: bool) -> bool:
        """Leave in the view of *lane* what the coming plan knew; whether that hides anything. *given*: those who have ended have
        given their blocks back."""
        view, seen_ns = lane.view, self.seen_ns
        self.seen_ns, self.made = ALWAYS_NS, seen_ns != ALWAYS_NS
        self._planned_ns = seen_ns if self.made else view.now_ns
        queue.hidden = came_after(self._came_ns, seen_ns)
        view.waiting = queue if queue else ()
        view.n_leaving = view.leaving_blocks = 0
        if seen_ns == ALWAYS_NS:
            lane.forget_the_leaving()
        for _, blocks, growth_blocks, steps_on, promised, _ in lane.leaving.values():
            view.free_blocks -= blocks if given else 0
            if steps_on:
                view.promised_blocks += promised
                view.n_decoding += 1
                view.growth_blocks += growth_blocks
            else:
                view.n_leaving += 1
                view.leaving_blocks += blocks
        return queue.hidden > 0 or bool(lane.leaving)

    def misses(self, version: Version, *, through_arrivals: bool) -> bool:
        """Whether something came after the latest plan was made, which is to be carried out now, that it does not let pass."""
        if not self.made:
            return False
        return version.news_ns > self._planned_ns or (not through_arrivals and version.arrived_ns > self._planned_ns)

    def reset(self) -> None:
        """The next plan is made when it is asked for."""
        self.seen_ns = ALWAYS_NS


def came_after(came_ns: deque[int], seen_ns: int) -> int:
    """How many came after *seen_ns*: the last of the queue. No earlier instant is asked for later, and what came before it is
    forgotten."""
    while came_ns and came_ns[0] <= seen_ns:
        came_ns.popleft()
    return len(came_ns)


def stepping_on(leaving: dict[int, Ended], plan: Plan) -> dict[int, Ended]:
    """Those of *leaving* that take a step all the same, since *plan* did not know that they had ended."""
    wanted = leaving.keys() - set(plan.preempt) if plan.decode is True else set(plan.decode or ())
    return {id_: ended for id_, ended in leaving.items() if ended.steps_on and id_ in wanted}
