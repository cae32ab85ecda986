"""Classes of service: schedulers around a scheduler that share it out between classes and tenants.

Strict priority, earliest deadline and shortest predicted first are orders of the queue (`policies.wrappers.Order`). Here are
preemption across classes, weighted fair sharing, and admission that keeps a class's limit of the first token.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from policies.schedulers import setting_at_least
from policies.view import Plan, PlanFunction, ReplicaView, RunningSeq, Scheduler, WaitingSeq, plan_of

TOO_LATE_FOR_ITS_CLASS = "first token of its class cannot be kept"
DEMOTED = 1 << 40
"""Priority of requests that are served after all others."""


def without(view: ReplicaView, gone: Iterable[RunningSeq], **changes: Any) -> ReplicaView:
    """*view* as it will be when the running sequences *gone* have been preempted, with *changes*.

    It has no prefix cache, whose contents after that cannot be tried out: a scheduler that looks there itself is asked whether all
    of a prompt fits.
    """
    gone = list(gone)
    ids = {seq.id for seq in gone}
    prefilling = tuple(seq for seq in view.prefilling if seq.id not in ids)
    return replace(
        view,
        prefilling=prefilling,
        n_decoding=view.n_decoding - len(gone) + len(view.prefilling) - len(prefilling),
        free_blocks=view.free_blocks + sum(seq.blocks - seq.shared_blocks for seq in gone),
        growth_blocks=view.growth_blocks - sum(seq.growth_blocks for seq in gone),
        running=tuple(seq for seq in view.running if seq.id not in ids),
        promised_blocks=-1,
        cache=None,
        **changes,
    )


@dataclass(frozen=True)
class Preempt:
    """Strict priority with preemption: sequences of lower priority are preempted where the first of the queue is not admitted.

    The lowest are preempted first, of these the newest, and the first of the queue is admitted in the next iteration. Nothing is
    preempted while the prompt of a sequence at least as high is being computed, nor where preempting all of them would not help.
    Preempted sequences are computed again, and wait by their priority.
    """

    inner: Scheduler | PlanFunction

    def __post_init__(self) -> None:
        plan_of(self.inner)

    def plan(self, view: ReplicaView, /) -> Plan:
        if not view.waiting:
            return self._inner_plan(view)
        view = replace(view, waiting=tuple(sorted(view.waiting, key=lambda seq: seq.priority)))
        first = view.waiting[0]
        plan = self._without_giving_way(view, first)
        lower = [seq for seq in view.running if seq.priority > first.priority and not seq.leaving]
        if _admits(plan, first) or plan.preempt or not lower:
            return plan
        gone: list[RunningSeq] = []
        if all(seq.priority > first.priority for seq in view.prefilling):
            gone = self._fewest_to_admit(view, first, sorted(reversed(lower), key=lambda seq: -seq.priority))
        if not gone:
            # Their blocks grow as they decode, so that preempting them may help later.
            return plan._replace(hold=1)
        left = self._inner_plan(without(view, gone, waiting=()))
        return left._replace(preempt=(*(seq.id for seq in gone), *left.preempt), hold=1)

    def _inner_plan(self, view: ReplicaView) -> Plan:
        return plan_of(self.inner)(view)._replace(through_arrivals=False)

    def _without_giving_way(self, view: ReplicaView, first: WaitingSeq) -> Plan:
        """The inner scheduler's plan; where it would admit a class below that of *first*, the plan that it makes without that
        class."""
        plan, equals = self._inner_plan(view), _equals(view, first)
        if _admits(plan, first) or plan.preempt or not any(_admits(plan, seq) for seq in view.waiting[len(equals) :]):
            return plan
        return self._inner_plan(replace(view, waiting=equals))._replace(hold=1)

    def _fewest_to_admit(self, view: ReplicaView, first: WaitingSeq, lower: list[RunningSeq]) -> list[RunningSeq]:
        """The beginning of *lower* without which *first* would be admitted; empty where it would not even without all of them."""
        equals = _equals(view, first)

        def enough(n: int) -> bool:
            return _admits(self._inner_plan(without(view, lower[:n], waiting=equals)), first)

        if not enough(len(lower)):
            return []
        return lower[: next(n for n in range(1, len(lower) + 1) if enough(n))]


def _equals(view: ReplicaView, first: WaitingSeq) -> tuple[WaitingSeq, ...]:
    """The queued requests of the class of *first*, in order of priority."""
    return tuple(seq for seq in view.waiting if seq.priority == first.priority)


def _admits(plan: Plan, seq: WaitingSeq) -> bool:
    return any(id_ == seq.id for id_, _ in plan.run)


class Served(NamedTuple):
    """State of `WeightedFair` from one plan to the next."""

    counters: Mapping[int, int] = MappingProxyType({})
    """Counted tokens of each tenant."""
    emitted: Mapping[int, int] = MappingProxyType({})
    """Counted output tokens of running and preempted requests; -1: the prompt is not counted yet."""
    back: frozenset[int] = frozenset()
    """Preempted requests that wait."""
    queued: frozenset[int] = frozenset()
    """Tenants that had a request waiting when the plan had been made."""
    last: int = -1
    """Tenant of the request that left the queue last."""
    rounds: int = 0
    inner: object | None = None


@dataclass(frozen=True)
class WeightedFair:
    """Fair sharing by virtual token counters: the queue is shown with the requests of the least served tenant first.

    A tenant's counter grows by *prompt_weight* for each prompt token at admission and by *output_weight* for each emitted token,
    over the weight of the request's class. A tenant that arrives with nothing waiting is lifted to the least counter of waiting
    tenants, or of the last that left the queue. Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024 (arXiv
    2401.00588), algorithm 2 with the weights of section 4.1; service of two tenants that both always wait differs by 2 U at most,
    U = max(prompt_weight x longest prompt, output_weight x tokens of a batch) (theorem 4.4).

    Tokens computed again after a preemption are not counted again. Each micro-batch has counters of its own, which start anew when
    nothing is to be done. The last round of a speculating request counts one token.
    """

    inner: Scheduler | PlanFunction
    prompt_weight: int = 1
    output_weight: int = 2

    def __post_init__(self) -> None:
        plan_of(self.inner)
        setting_at_least(self, "prompt_weight", 0)
        setting_at_least(self, "output_weight", 1)

    def plan(self, view: ReplicaView, /) -> Plan:
        served = view.memo if isinstance(view.memo, Served) else Served()
        counters, emitted = counted(view, served, self.prompt_weight, self.output_weight)
        lift(counters, view, served)
        prices = {seq.id: 0 if seq.id in emitted else self.prompt_weight for seq in view.waiting}
        queue = by_least_served(view, counters, prices)
        plan = plan_of(self.inner)(replace(view, waiting=queue, memo=served.inner))
        memo = remembered(view, plan, queue, counters, emitted, served.last)
        # With several waiting tenants the first may change with every token; a speculated round's tokens are known only after it.
        hold = 1 if len(memo.queued) > 1 or view.query_tokens > 1 else plan.hold
        return plan._replace(hold=hold, through_arrivals=False, memo=memo)


def remembered(
    view: ReplicaView,
    plan: Plan,
    queue: Sequence[WaitingSeq],
    counters: Mapping[int, int],
    emitted: Mapping[int, int],
    last: int,
) -> Served:
    """The state after *plan*, made of *queue*; *last*: tenant of the request that left the queue last before."""
    tenant, waited = view.terms.tenant, {seq.id for seq in queue}
    admitted = [id_ for id_, _ in plan.run if id_ in waited]
    gone = {*admitted, *(id_ for id_, _ in plan.reject)}
    still = [seq.id for seq in queue if seq.id not in gone]
    return Served(
        counters=counters,
        emitted={**emitted, **{id_: -1 for id_ in admitted if id_ not in emitted}},
        back=frozenset(id_ for id_ in still if id_ in emitted) | {*plan.preempt},
        queued=frozenset(tenant[id_] for id_ in still),
        last=tenant[admitted[-1]] if admitted else last,
        rounds=view.rounds,
        inner=plan.memo,
    )


def counted(
    view: ReplicaView, served: Served, prompt_weight: int, output_weight: int
) -> tuple[dict[int, int], dict[int, int]]:
    """The counters with the work since *served* was written, and the counted output tokens of unfinished requests."""
    terms, rounds = view.terms, view.rounds - served.rounds
    counters, emitted = dict(served.counters), dict[int, int]()
    running = {seq.id: seq.cached_tokens for seq in view.running} if served.emitted else {}
    waiting = {seq.id: seq for seq in view.waiting} if served.emitted else {}
    for id_, before in served.emitted.items():
        prompt = view.prompt_tokens[id_] or 1
        if id_ in waiting and before < 0 and not waiting[id_].preempted:
            continue  # Planned, and not admitted after all.
        least = max(before, 0)
        if id_ in waiting:
            now = waiting[id_].tokens + waiting[id_].cached_tokens - prompt
        elif id_ in running:
            now = running[id_] - prompt + 1
        elif id_ in served.back:
            now = least  # Its client has gone.
        else:
            now = least + (max(rounds, 1) if least else 1)
        now = max(now, least)
        if id_ in waiting or id_ in running:
            emitted[id_] = now
        tokens = output_weight * (now - least) + (prompt_weight * prompt if before < 0 else 0)
        tenant = terms.tenant[id_]
        counters[tenant] = counters.get(tenant, 0) + tokens * terms.token_cost[id_]
    return counters, emitted


def lift(counters: dict[int, int], view: ReplicaView, served: Served) -> None:
    """Raise the counters of tenants that arrived with nothing waiting, in their order: to the least of those waiting, or, without
    any, to that of the last that left the queue."""
    queued = {tenant: counters.get(tenant, 0) for tenant in served.queued}
    for seq in view.waiting:
        tenant = view.terms.tenant[seq.id]
        if tenant not in queued:
            least = min(queued.values()) if queued else counters.get(served.last, 0)
            queued[tenant] = counters[tenant] = max(counters.get(tenant, 0), least)


def by_least_served(view: ReplicaView, counters: dict[int, int], prices: dict[int, int]) -> tuple[WaitingSeq, ...]:
    """The queue in order of admission: the tenant with the least counter, its first request, which counts *prices* times its prompt
    tokens; and so on. A tie goes to the tenant whose request is nearer to the head."""
    terms, of_tenant = view.terms, dict[int, list[tuple[int, WaitingSeq]]]()
    for place, seq in enumerate(view.waiting):
        of_tenant.setdefault(terms.tenant[seq.id], []).append((place, seq))
    if len(of_tenant) < 2:
        return tuple(view.waiting)
    heap = [(counters.get(tenant, 0), mine[0][0], tenant, 0) for tenant, mine in of_tenant.items()]
    heapq.heapify(heap)
    queue: list[WaitingSeq] = []
    while heap:
        counter, _, tenant, at = heap[0]
        mine = of_tenant[tenant]
        seq = mine[at][1]
        queue.append(seq)
        if at + 1 == len(mine):
            heapq.heappop(heap)
            continue
        price = prices[seq.id] and prices[seq.id] * (view.prompt_tokens[seq.id] or 1) * terms.token_cost[seq.id]
        heapq.heapreplace(heap, (counter + price, mine[at + 1][0], tenant, at + 1))
    return tuple(queue)


@dataclass(frozen=True)
class KeepSlo:
    """Waiting requests that cannot keep their class's limit of the first token are rejected, demoted or shortened (*otherwise*).

    `reject` refuses them, `demote` serves them after all others, and `shorten` serves them in their place with an answer of
    *max_tokens* tokens at most, so that those behind them wait less. A limit cannot be kept where it has passed, or when the inner
    scheduler would start them, where the first token would come too late even if their whole prompt ran in the next iteration
    beside nothing but the present decodes.

    Demoted requests keep their order; an inner scheduler that goes by priority sees them with the lowest. Needs a view with prices.
    """

    inner: Scheduler | PlanFunction
    otherwise: Literal["reject", "demote", "shorten"] = "reject"
    max_tokens: int | None = None
    """Limit of shortened answers."""

    def __post_init__(self) -> None:
        plan_of(self.inner)
        if self.otherwise not in ("reject", "demote", "shorten"):
            raise ValueError(f"otherwise is reject, demote or shorten; got {self.otherwise!r}")
        if (self.max_tokens is None) == (self.otherwise == "shorten"):
            raise ValueError("max_tokens and otherwise: shorten go together; give both or neither")
        if self.max_tokens is not None:
            setting_at_least(self, "max_tokens", 1)

    def plan(self, view: ReplicaView, /) -> Plan:
        limits = view.terms.first_token_ns
        # A preempted request was admitted in time, and is not refused.
        due = {
            seq.id: (seq.arrival_ns + limits[seq.id], seq.tokens)
            for seq in view.waiting
            if limits[seq.id] >= 0 and not seq.preempted
        }
        late = {id_ for id_, (due_ns, _) in due.items() if due_ns < view.now_ns}
        while True:
            plan = plan_of(self.inner)(replace(view, waiting=self._shown(view, late)) if late else view)
            found = [id_ for id_, _ in plan.run if id_ in due and id_ not in late and _misses(view, *due[id_])]
            if not found:
                break
            late.update(found)
        until_ns = plan.until_ns
        if plan.run or plan.decode:
            until_ns = min([until_ns, *(due_ns + 1 for id_, (due_ns, _) in due.items() if id_ not in late)])
        refused = [seq.id for seq in view.waiting if seq.id in late] if self.otherwise == "reject" else []
        reject = (*plan.reject, *((id_, TOO_LATE_FOR_ITS_CLASS) for id_ in refused))
        shorten = plan.shorten
        if self.otherwise == "shorten":
            shorten += self._shortened(view, late - {id_ for id_, _ in plan.reject})
        return plan._replace(reject=reject, until_ns=until_ns, through_arrivals=False, shorten=shorten)

    def _shortened(self, view: ReplicaView, late: set[int]) -> tuple[tuple[int, int], ...]:
        tokens = self.max_tokens
        assert tokens is not None
        return tuple((seq.id, tokens) for seq in view.waiting if seq.id in late and view.max_tokens[seq.id] > tokens)

    def _shown(self, view: ReplicaView, late: set[int]) -> Sequence[WaitingSeq]:
        if self.otherwise == "shorten":
            return view.waiting
        on_time = tuple(seq for seq in view.waiting if seq.id not in late)
        if self.otherwise == "reject":
            return on_time
        return (*on_time, *(seq._replace(priority=DEMOTED) for seq in view.waiting if seq.id in late))


def _misses(view: ReplicaView, due_ns: int, tokens: int) -> bool:
    assert view.price is not None, "a view in literals needs prices where classes have limits of the first token"
    return view.price.done_ns([tokens] if tokens else []) > due_ns
