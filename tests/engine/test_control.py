"""What a control policy is shown, counted by hand, and which machines go when it asks for fewer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from policies.control import PoolSeen, Seen
from policies.routers import RoundRobin
from sim.engine import Experiment, run
from sim.engine.lives import DRAINING, Scaling
from tests.engine.test_fleet import S, Says, changes, fleet_of, one_at_a_time
from workloads import Trace


@dataclass(frozen=True)
class Watches:
    """Keeps what it is shown, and asks for what there is."""

    shown: list[Seen] = field(default_factory=list)

    def wanted(self, seen: Seen, /) -> int:
        self.shown.append(seen)
        return seen.mine.machines


def fleet_run(workload: Trace, scaling: Scaling, n: int, seconds: float = 1.0) -> Any:
    replicas = (one_at_a_time(seconds),) * n
    return run(Experiment(workload=workload, replicas=replicas, router=RoundRobin(), fleet=fleet_of(n, scaling)))


def test_a_policy_is_shown_what_came_and_ended_in_the_interval() -> None:
    """Twenty at once on one machine, a second each: first tokens after 1 to 20 s, of which 9 have come by 9.5 s."""
    workload = Trace(arrival_ns=[0] * 20 + [18 * S], prompt_tokens=[8] * 21, output_tokens=[1] * 21)
    policy = Watches()
    fleet_run(workload, Scaling(policy=policy, min_machines=1, initial=1, interval_s=9.5), 1)
    first, second = (seen.mine for seen in policy.shown[:2])
    assert first == PoolSeen(
        machines=1,
        ready=1,
        waiting=10,
        running=1,
        kv_use=first.kv_use,
        came=20,
        came_tokens=160,
        finished=9,
        finished_tokens=9,
        ttft_mean_s=5.0,
        ttft_p95_s=9.0,
    )
    # Nine more, at 10 to 18 s; what ends at the very instant of the look is for the next.
    assert (second.came, second.finished, second.ttft_mean_s, second.ttft_p95_s) == (1, 9, 14.0, 18.0)
    assert policy.shown[0].pools["all"] == first


def test_p95_is_the_rank_that_holds_nineteen_of_twenty() -> None:
    workload = Trace(arrival_ns=[0] * 21, prompt_tokens=[8] * 21, output_tokens=[1] * 21)
    policy = Watches()
    fleet_run(workload, Scaling(policy=policy, min_machines=1, initial=1, interval_s=20.5), 1)
    assert policy.shown[0].mine.ttft_p95_s == 19.0
    assert policy.shown[0].mine.ttft_mean_s == 10.5


def test_of_machines_that_are_ready_the_least_busy_goes() -> None:
    """One request each; that of machine 0 is done at 3 s, the others' go on."""
    workload = Trace(arrival_ns=[0, 0, 0, 30 * S], prompt_tokens=[8] * 4, output_tokens=[3, 20, 20, 1])
    scaling = Scaling(policy=Says((2,)), min_machines=1, initial=3, interval_s=5.0)
    drained = [
        (at_s, machine) for at_s, machine, state, _ in changes(fleet_run(workload, scaling, 3)) if state == DRAINING
    ]
    assert drained == [(5, 0)]


@pytest.mark.parametrize(("asks", "below", "above"), [((0, 0, 1), 2, 0), ((9, 1, 9, 1), 0, 2)])
def test_what_lies_outside_of_the_least_and_the_most_is_counted(asks: tuple[int, ...], below: int, above: int) -> None:
    workload = Trace(arrival_ns=[0, 22 * S], prompt_tokens=[8] * 2, output_tokens=[1] * 2)
    scaling = Scaling(policy=Says(asks), min_machines=1, initial=1, interval_s=5.0)
    facts = fleet_run(workload, scaling, 2).meta["fleet"]
    assert (facts["asked_below_least"], facts["asked_above_most"]) == (below, above)
