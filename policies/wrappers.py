"""Schedulers around a scheduler: each changes the view or the answer of the inner one, and nests in any other.

Each says how long its answer holds. A held plan spares looks, so a wrapper whose answer depends on something that the inner policy
does not see (the time, an arrival that overtakes) shortens the inner one's hold.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from policies.schedulers import setting_at_least
from policies.view import (
    ALWAYS_NS,
    Plan,
    PlanFunction,
    ReplicaView,
    Scheduler,
    Terms,
    WaitingSeq,
    decodes_below,
    plan_of,
)

OVERDUE = "deadline has passed"
TOO_LATE = "deadline cannot be met"


@dataclass(frozen=True)
class EvictNewest:
    """Preemption by recomputation around any scheduler: when the decodes cannot grow, the newest sequences are preempted."""

    inner: Scheduler | PlanFunction

    evicts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        plan_of(self.inner)

    @functools.cached_property
    def _plan_inner(self) -> PlanFunction:
        return plan_of(self.inner)

    @property
    def decodes_below(self) -> int:
        """See `policies.view.decodes_below`."""
        return decodes_below(self.inner)

    def plan(self, view: ReplicaView, /) -> Plan:
        free, growth = view.free_blocks, view.growth_blocks
        if growth <= free:
            return self._plan_inner(view)
        evicted: list[int] = []
        for seq in reversed(view.running):
            evicted.append(seq.id)
            free += seq.blocks - seq.shared_blocks
            growth -= seq.growth_blocks
            if growth <= free:
                break
        gone = set(evicted)
        prefilling = tuple(seq for seq in view.prefilling if seq.id not in gone)
        n_evicted_decoding = len(evicted) - (len(view.prefilling) - len(prefilling))
        # No request is admitted in an iteration that preempts, since memory is short.
        rest = replace(
            view,
            waiting=(),
            prefilling=prefilling,
            n_decoding=view.n_decoding - n_evicted_decoding,
            free_blocks=free,
            growth_blocks=growth,
            running=tuple(seq for seq in view.running if seq.id not in gone),
            promised_blocks=-1,
        )
        plan = self._plan_inner(rest)
        return plan._replace(preempt=(*evicted, *plan.preempt), hold=1)


@dataclass(frozen=True)
class Pad:
    """Batches of the inner scheduler are priced at one shape; what runs does not change, only what it costs.

    Prompts of an iteration are priced at the longest of them, a decode step at *sequences* sequences with the longest context.
    """

    inner: Scheduler | PlanFunction
    sequences: int

    def __post_init__(self) -> None:
        plan_of(self.inner)
        setting_at_least(self, "sequences", 1)

    @property
    def pads_to(self) -> int:
        """See `policies.view.pads_to`."""
        return self.sequences

    def plan(self, view: ReplicaView, /) -> Plan:
        return plan_of(self.inner)(view)


def _deadline(seq: WaitingSeq) -> int:
    """The instant by which it should have finished."""
    return ALWAYS_NS if seq.deadline_ns < 0 else seq.arrival_ns + seq.deadline_ns


def _first_token(seq: WaitingSeq, terms: Terms) -> int:
    """The instant by which its first token should have come."""
    limit_ns = terms.first_token_ns[seq.id]
    return ALWAYS_NS if limit_ns < 0 else seq.arrival_ns + limit_ns


_ORDERS: dict[str, Callable[[WaitingSeq, Terms], Any]] = {
    "arrival": lambda seq, _: seq.arrival_ns,
    "priority": lambda seq, _: seq.priority,
    "deadline": lambda seq, _: _deadline(seq),
    "first_token": _first_token,
    "shortest_prompt": lambda seq, _: seq.tokens,
    "shortest_predicted": lambda seq, terms: terms.predicted_tokens[seq.id],
}


@dataclass(frozen=True)
class Order:
    """The inner scheduler sees the queue in another order; equals stay as they are in the queue.

    The order is by arrival, by priority (smaller first), by deadline of the whole answer or of the first token (its class's limit;
    requests without one last), or with the fewest tokens to compute, or the shortest predicted output, first. Running sequences are
    not preempted for one that comes before them.
    """

    inner: Scheduler | PlanFunction
    by: Literal["arrival", "priority", "deadline", "first_token", "shortest_prompt", "shortest_predicted"] = "priority"

    def __post_init__(self) -> None:
        plan_of(self.inner)
        if self.by not in _ORDERS:
            raise ValueError(f"by is one of {', '.join(_ORDERS)}; got {self.by!r}")

    def plan(self, view: ReplicaView, /) -> Plan:
        if len(view.waiting) > 1:
            key, terms = _ORDERS[self.by], view.terms
            view = replace(view, waiting=tuple(sorted(view.waiting, key=lambda seq: key(seq, terms))))
        # An arrival may overtake requests that the inner policy has seen: even by arrival, where a front end takes longer for
        # longer prompts, and they reach the queue in another order than the front end.
        plan = plan_of(self.inner)(view)._replace(through_arrivals=False)
        # With a prefix cache the tokens to compute change with what is evicted.
        return plan._replace(hold=1) if view.cache is not None and self.by == "shortest_prompt" else plan


@dataclass(frozen=True)
class Cap:
    """The inner scheduler sees no more of the queue than limits on sequences, context and prompts admit.

    At most *max_sequences* sequences are admitted at once, with at most *max_tokens* tokens of context, those to be computed
    included; and no iteration computes more than *max_prompts* prompts. Later requests do not overtake one that does not fit.

    Limits are of each micro-batch. The context of admitted sequences grows further as they decode; a request that alone has more
    than *max_tokens* runs by itself rather than never.
    """

    inner: Scheduler | PlanFunction
    max_sequences: int | None = None
    max_tokens: int | None = None
    max_prompts: int | None = None

    def __post_init__(self) -> None:
        plan_of(self.inner)
        if self.max_sequences is None and self.max_tokens is None and self.max_prompts is None:
            raise ValueError("give max_sequences, max_tokens or max_prompts; a cap without a limit caps nothing")
        for name in ("max_sequences", "max_tokens", "max_prompts"):
            if getattr(self, name) is not None:
                setting_at_least(self, name, 1)

    def plan(self, view: ReplicaView, /) -> Plan:
        if not view.waiting:
            return plan_of(self.inner)(view)
        seen: list[WaitingSeq] = []
        seats = len(view.waiting) if self.max_sequences is None else self.max_sequences - view.n_running
        if self.max_prompts is not None:
            seats = min(seats, self.max_prompts - len(view.prefilling))
        tokens = ALWAYS_NS if self.max_tokens is None else self.max_tokens - self._context(view)
        for seq in view.waiting:
            tokens -= seq.tokens + seq.cached_tokens
            alone = not seen and not view.n_running
            if len(seen) >= seats or (tokens < 0 and not alone):
                break
            seen.append(seq)
        hidden = len(seen) < len(view.waiting)
        plan = plan_of(self.inner)(replace(view, waiting=tuple(seen)) if hidden else view)
        # The context grows with every step, so that less of the queue is seen; what is rejected makes way for what is hidden.
        # An arrival is behind all that is hidden.
        hold = 1 if (seen and self.max_tokens is not None) or plan.reject else plan.hold
        return plan._replace(hold=hold, through_arrivals=hidden or plan.through_arrivals)

    def _context(self, view: ReplicaView) -> int:
        return sum(seq.cached_tokens for seq in view.running) + sum(seq.remaining_tokens for seq in view.prefilling)


@dataclass(frozen=True)
class RejectLate:
    """Waiting requests whose deadline cannot be met any more are rejected, with the reason.

    They are rejected at once where it has passed, and otherwise when the inner scheduler would start them, where a first answer
    would come too late even if their whole prompt ran in the next iteration beside nothing but the present decodes. Needs a view
    with prices where requests have deadlines.
    """

    inner: Scheduler | PlanFunction

    def __post_init__(self) -> None:
        plan_of(self.inner)

    def plan(self, view: ReplicaView, /) -> Plan:
        due = {seq.id: (_deadline(seq), seq.tokens) for seq in view.waiting if seq.deadline_ns >= 0}
        rejected = {id_: OVERDUE for id_, (due_ns, _) in due.items() if due_ns < view.now_ns}
        while True:
            waiting = tuple(seq for seq in view.waiting if seq.id not in rejected) if rejected else view.waiting
            plan = plan_of(self.inner)(replace(view, waiting=waiting) if rejected else view)
            late = [id_ for id_, _ in plan.run if id_ in due and self._done_ns(view, due[id_][1]) > due[id_][0]]
            if not late:
                break
            rejected.update(dict.fromkeys(late, TOO_LATE))
        until_ns = plan.until_ns
        if plan.run or plan.decode:
            until_ns = min([until_ns, *(due_ns + 1 for id_, (due_ns, _) in due.items() if id_ not in rejected)])
        # An arrival may be late before the inner policy would look again.
        reject = (*plan.reject, *rejected.items())
        return plan._replace(reject=reject, until_ns=until_ns, through_arrivals=False)

    def _done_ns(self, view: ReplicaView, tokens: int) -> int:
        assert view.price is not None, "a view in literals needs prices where requests have deadlines"
        return view.price.done_ns([tokens] if tokens else [])
