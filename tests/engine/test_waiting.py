"""Policies that wait for an instant, prices that they are told, and answers that are no plans."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from policies.routers import RoundRobin
from policies.view import Plan, ReplicaView, Scheduler
from policies.wrappers import Pad
from sim.engine import Experiment, MachineSpec, PolicyError, ReplicaSpec, run
from tests.engine.costs import Linear
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
    machine = MachineSpec(tenants=(spec(10e-3, first_opens_ns, 0), spec(1e-3, 18 * MS, 1)))
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
