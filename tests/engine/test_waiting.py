"""Policies that wait for an instant, prices that they are told, and answers that are no plans."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from policies.routers import RoundRobin
from policies.view import Plan, ReplicaView, Scheduler
from policies.vllm import Vllm
from policies.wrappers import Cap, Pad, RejectLate
from sim.engine import FINISHED, REJECTED, Experiment, MachineSpec, PolicyError, ReplicaSpec, run
from tests.engine.costs import Linear, Ranked
from workloads import Trace

MS = 1_000_000


@dataclass(frozen=True)
class NotBefore:
    opens_ns: int

    def plan(self, view: ReplicaView, /) -> Plan:
        if view.now_ns < self.opens_ns and not view.n_running:
            return Plan(until_ns=self.opens_ns)
        return Plan(decode=view.n_decoding > 0, run=tuple((seq.id, seq.tokens) for seq in view.waiting))


def test_a_machine_that_is_alone_wakes_at_the_instant_that_its_policy_waits_for() -> None:
    trace = Trace(arrival_ns=[0], prompt_tokens=[10], output_tokens=[1])
    replica = ReplicaSpec(cost=Linear(), scheduler=NotBefore(7 * MS), kv_blocks=100)
    found = run(Experiment(workload=trace, replicas=(replica,), router=RoundRobin()))
    assert found.requests["scheduled_ns"].tolist() == [7 * MS]


@pytest.mark.parametrize("first_opens_ns", [0, 5 * MS])
def test_an_instant_that_one_tenant_has_waited_for_does_not_hide_anothers(first_opens_ns: int) -> None:
    def spec(fixed_s: float, opens_ns: int, model: int) -> ReplicaSpec:
        cost = Linear(fixed_s=fixed_s, n_stages=2)
        return ReplicaSpec(cost=cost, scheduler=NotBefore(opens_ns), kv_blocks=100, model=model, micro_batches=1)

    trace = Trace(
        arrival_ns=[0, 6 * MS], prompt_tokens=[10, 10], output_tokens=[1, 1], model_index=[0, 1], models=("a", "b")
    )
    machine = MachineSpec(hosted=(spec(10e-3, first_opens_ns, 0), spec(1e-3, 18 * MS, 1)))
    found = run(Experiment(workload=trace, replicas=(machine,), router=RoundRobin()))
    assert found.requests["scheduled_ns"].tolist() == [first_opens_ns, 18 * MS]


@dataclass(frozen=True)
class EachAtItsTime:
    def plan(self, view: ReplicaView, /) -> Plan:
        if not view.n_running:
            return Plan(run=tuple((seq.id, seq.tokens) for seq in list(view.waiting)[:1]))
        opens_ns = 30 * MS if view.running[0].id == 0 else 60 * MS
        return Plan(until_ns=opens_ns) if view.now_ns < opens_ns else Plan(decode=True)


def test_two_lanes_wait_each_for_its_own_instant() -> None:
    trace = Trace(arrival_ns=[0, 0], prompt_tokens=[10, 10], output_tokens=[3, 3])
    spec = ReplicaSpec(cost=Linear(), scheduler=EachAtItsTime(), kv_blocks=100, micro_batches=2)
    found = run(Experiment(workload=trace, replicas=(spec,), router=RoundRobin()))
    assert found.requests["finish_ns"].tolist() == [32 * MS, 62 * MS]


def test_a_plan_that_is_none_is_refused_with_a_sentence() -> None:
    trace = Trace(arrival_ns=[0], prompt_tokens=[10], output_tokens=[1])
    spec = ReplicaSpec(cost=Linear(), scheduler=lambda _view: None, kv_blocks=100)  # type: ignore[arg-type, return-value]
    with pytest.raises(PolicyError, match="answered None; expected a policies"):
        run(Experiment(workload=trace, replicas=(spec,), router=RoundRobin()))


@dataclass(frozen=True)
class Foretells:
    """Writes down what the price says of a whole prompt beside the decodes."""

    said: list[tuple[int, int]] = field(default_factory=list)

    def plan(self, view: ReplicaView, /) -> Plan:
        if view.waiting:
            assert view.price is not None
            self.said.append((view.now_ns, view.price.done_ns([view.waiting[0].tokens])))
            return Plan(decode=view.n_decoding > 0, run=((view.waiting[0].id, view.waiting[0].tokens),))
        return Plan(decode=True)


@pytest.mark.parametrize("padded", [False, True])
def test_a_price_is_a_bound_where_batches_are_padded_too(padded: bool) -> None:
    inner = Foretells()
    scheduler: Scheduler = Pad(inner, 64) if padded else inner
    trace = Trace(arrival_ns=[0, 3 * MS], prompt_tokens=[10, 10], output_tokens=[30, 5])
    spec = ReplicaSpec(cost=Linear(row_s=1e-4, kv_s=1e-6), scheduler=scheduler, kv_blocks=100)
    found = run(Experiment(workload=trace, replicas=(spec,), router=RoundRobin())).iterations()
    ends = dict(zip(found["start_ns"].tolist(), (found["start_ns"] + found["duration_ns"]).tolist(), strict=True))
    assert all(ends[now_ns] <= done_ns for now_ns, done_ns in inner.said)


@dataclass(frozen=True)
class RejectsOneOverdue:
    """Rejects the first overdue request of the queue with each plan, and serves the others one at a time."""

    def plan(self, view: ReplicaView, /) -> Plan:
        overdue = [(seq.id, "overdue") for seq in view.waiting[:1] if 0 <= seq.deadline_ns < view.now_ns]
        if overdue or view.n_running:
            return Plan(decode=True, reject=tuple(overdue))
        return Plan(run=tuple((seq.id, seq.tokens) for seq in view.waiting[:1]))


def machines_with(scheduler: Scheduler) -> dict[str, ReplicaSpec | MachineSpec]:
    """A machine that is alone, one with a pipeline, one with ranks and one that two models share."""
    one = ReplicaSpec(cost=Linear(), scheduler=scheduler, kv_blocks=1000)
    first, second = (ReplicaSpec(cost=Linear(), scheduler=scheduler, kv_blocks=1000, model=model) for model in (0, 1))
    ranked = ReplicaSpec(cost=Ranked(), scheduler=scheduler, kv_blocks=1000)
    return {
        "alone": one,
        "pipeline": ReplicaSpec(cost=Linear(n_stages=2), scheduler=scheduler, kv_blocks=1000),
        "ranks": MachineSpec(hosted=(ranked,), ranks=2, rank_router=RoundRobin()),
        "shared": MachineSpec(hosted=(first, second)),
    }


# The scheduler inside `Cap` is shown no more requests than there are seats, so that a plan rejects few of them.
@pytest.mark.parametrize(
    "scheduler", [Cap(RejectLate(Vllm(max_num_seqs=4)), max_sequences=1), RejectsOneOverdue()], ids=["shipped", "own"]
)
@pytest.mark.parametrize("kind", ["alone", "pipeline", "ranks", "shared"])
def test_plans_that_only_reject_may_follow_each_other_as_often_as_there_are_requests(
    kind: str, scheduler: Scheduler
) -> None:
    # The first request takes a millisecond at least; by then all others are overdue.
    n = 5001
    trace = Trace(
        arrival_ns=np.zeros(n, np.int64), prompt_tokens=np.full(n, 10), output_tokens=np.full(n, 1),
        deadline_ns=[-1, *[500_000] * (n - 1)], model_index=np.zeros(n, np.int64), models=("a", "b"),
    )  # fmt: skip
    found = run(Experiment(workload=trace, replicas=(machines_with(scheduler)[kind],), router=RoundRobin()))
    status = found.requests["status"].tolist()
    assert (status.count(FINISHED), status.count(REJECTED)) in [(1, n - 1), (2, n - 2)]
