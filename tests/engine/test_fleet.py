"""Machines that come, go and fail."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from policies.control import Concurrency, Control, Knative, Perfect, RateModel, Schedule, Seen, TargetTracking
from policies.published import OrcaPaged
from policies.routers import LeastOutstanding, RoundRobin
from policies.schedulers import Sarathi
from sim.engine import FINISHED, UNFINISHED, Experiment, PolicyError, ReplicaSpec, run
from sim.engine.lives import DRAINING, FAILED, OFF, READY, STARTING, Failing, FleetSpec, Life, Outage, Scaling
from sim.engine.columns import ABORTED, LOST, REJECTED
from tests.engine.costs import Linear
from tests.engine.random_runs import an_experiment, assert_same
from workloads import Trace

MS = 1_000_000
S = 1_000_000_000


def one_at_a_time(service_s: float = 1.0) -> ReplicaSpec:
    return ReplicaSpec(cost=Linear(fixed_s=service_s), scheduler=OrcaPaged(max_sequences=1), kv_blocks=10)


def fleet_of(n: int, scaling: Scaling | None = None, failing: Failing | None = None, **rest: Any) -> FleetSpec:
    return FleetSpec(pools=(0,) * n, names=("all",), scaling=(scaling,), failing=(failing,), **rest)


def changes(columns: Any) -> list[tuple[float, int, int, int]]:
    """When (s), which machine, its state and its phase; but for those of the beginning."""
    log = columns.meta["fleet"]["log"]
    rows = zip(log["at_ns"], log["machine"], log["state"], log["phase"], strict=True)
    return [(at_ns / S, machine, state, phase) for at_ns, machine, state, phase in rows if at_ns]


@dataclass(frozen=True)
class Says:
    """Asks for what it was told, interval after interval."""

    numbers: tuple[int, ...]

    def wanted(self, seen: Seen, /) -> int:
        return self.numbers[min(round(seen.now_s / seen.interval_s) - 1, len(self.numbers) - 1)]


def test_a_machine_is_ready_after_its_phases_and_gets_nothing_before() -> None:
    workload = Trace(arrival_ns=[0, 0, 12 * S, 26 * S, 26 * S], prompt_tokens=[8] * 5, output_tokens=[0] * 5)
    scaling = Scaling(
        policy=Says((2,)), min_machines=1, initial=1, interval_s=10.0, phases=(("provision", 10.0), ("load", 5.0))
    )
    columns = run(
        Experiment(
            workload=workload, replicas=(one_at_a_time(),) * 2, router=LeastOutstanding(), fleet=fleet_of(2, scaling)
        ),
        check_invariants=True,
    )
    assert changes(columns) == [(10, 1, STARTING, 0), (20, 1, STARTING, 1), (25, 1, READY, -1)]
    assert columns.requests["replica"].tolist() == [0, 0, 0, 0, 1]
    assert columns.requests["finish_ns"].tolist() == [S, 2 * S, 13 * S, 27 * S, 27 * S]


def test_a_machine_that_drains_ends_what_it_has_and_gets_nothing_more() -> None:
    workload = Trace(arrival_ns=[9 * S, 9 * S, 10 * S], prompt_tokens=[8] * 3, output_tokens=[0] * 3)
    scaling = Scaling(policy=Says((1,)), min_machines=1, initial=2, interval_s=10.0)
    columns = run(
        Experiment(
            workload=workload, replicas=(one_at_a_time(3.0),) * 2, router=RoundRobin(), fleet=fleet_of(2, scaling)
        ),
        check_invariants=True,
    )
    assert columns.requests["replica"].tolist() == [0, 1, 0]
    assert changes(columns) == [(10, 1, DRAINING, -1), (12 + 1e-9, 1, OFF, -1)]
    assert columns.requests["finish_ns"].tolist() == [12 * S, 12 * S, 15 * S]


@pytest.mark.parametrize(
    ("rule", "finish_s", "emitted", "computed", "again"),
    [("resume", 18, 9, 8 + 12, 1), ("retry", 22, 9, 8 + 8, 1), ("lose", -1e-9, 4, 8, 0)],
)
def test_requests_of_a_machine_that_fails_go_on_begin_anew_or_are_lost(
    rule: Any, finish_s: float, emitted: int, computed: int, again: int
) -> None:
    """One second an iteration: 4 tokens at 4 s, the machine fails at 4.5 s, and is back at 13 s."""
    workload = Trace(arrival_ns=[0], prompt_tokens=[8], output_tokens=[9])
    spec = ReplicaSpec(cost=Linear(fixed_s=1.0), scheduler=Sarathi(), kv_blocks=10)
    fleet = fleet_of(1, outages=(Outage(machine=0, at_s=4.5, for_s=8.5),), in_flight=rule)
    for fast_forward in (True, False):
        columns = run(
            Experiment(workload=workload, replicas=(spec,), router=RoundRobin(), fleet=fleet),
            check_invariants=True,
            fast_forward=fast_forward,
        )
        requests = columns.requests
        assert requests["finish_ns"].tolist() == [round(finish_s * S)]
        assert requests["emitted_tokens"].tolist() == [emitted]
        assert columns.iterations()["prefill_tokens"].sum() == computed
        assert requests["failures"].tolist() == [1]
        assert requests["recomputed_tokens"].tolist() == [8 + 3]
        assert requests["status"].tolist() == [FINISHED if again else LOST]
        assert columns.meta["fleet"]["discarded_tokens"] == (4 if rule == "retry" else 0)
        assert requests["held_ns"].tolist() == [(8_500_000_000 - 1) * again]


@pytest.mark.parametrize("when_none", ["wait", "lose"])
def test_requests_wait_or_are_lost_where_all_machines_have_failed_for_good(when_none: Any) -> None:
    workload = Trace(arrival_ns=[0, 2 * S, 3 * S], prompt_tokens=[8] * 3, output_tokens=[0] * 3)
    outages = tuple(Outage(machine=machine, at_s=1.5) for machine in (0, 1))
    columns = run(
        Experiment(
            workload=workload,
            replicas=(one_at_a_time(),) * 2,
            router=RoundRobin(),
            fleet=fleet_of(2, outages=outages, when_none=when_none),
        ),
        check_invariants=True,
    )
    ended = UNFINISHED if when_none == "wait" else LOST
    assert columns.requests["status"].tolist() == [FINISHED, ended, ended]
    assert columns.reasons == (() if when_none == "wait" else ("no machine was ready",))


def test_a_request_whose_machines_fail_again_and_again_is_lost() -> None:
    workload = Trace(arrival_ns=[0], prompt_tokens=[8], output_tokens=[0])
    outages = tuple(Outage(machine=0, at_s=at_s, for_s=0.1) for at_s in (1, 2, 3, 4))
    columns = run(
        Experiment(
            workload=workload, replicas=(one_at_a_time(50.0),), router=RoundRobin(), fleet=fleet_of(1, outages=outages, retries=2)
        )
    )  # fmt: skip
    assert columns.requests["status"].tolist() == [LOST]
    assert columns.reasons == ("its machine failed 3 times",)
    # The fourth comes when nobody is left.
    assert columns.meta["fleet"]["failures"] == 3


@pytest.mark.parametrize(("answer", "text"), [(-1, "asked for -1 machines of pool all"), (1.5, "asked for 1.5 machines")])
def test_a_policy_that_asks_for_what_cannot_be_is_told_so(answer: Any, text: str) -> None:
    workload = Trace(arrival_ns=[0, 9 * S], prompt_tokens=[8] * 2, output_tokens=[0] * 2)
    scaling = Scaling(policy=Says((answer,)), min_machines=0, initial=1, interval_s=5.0)
    experiment = Experiment(
        workload=workload, replicas=(one_at_a_time(),), router=RoundRobin(), fleet=fleet_of(1, scaling)
    )
    with pytest.raises(PolicyError, match=text):
        run(experiment)


def test_a_policy_that_leaves_requests_without_a_machine_for_ever_ends_the_run_in_a_sentence() -> None:
    workload = Trace(arrival_ns=[9 * S], prompt_tokens=[8], output_tokens=[0])
    scaling = Scaling(policy=Says((0,)), min_machines=0, initial=1, interval_s=5.0)
    experiment = Experiment(
        workload=workload, replicas=(one_at_a_time(),), router=RoundRobin(), fleet=fleet_of(1, scaling)
    )
    with pytest.raises(PolicyError, match=r"asked for no machine of pool all 10,000 times in a row while 1 requests wait"):
        run(experiment)
