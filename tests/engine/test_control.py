"""The facts that a control policy is shown, counted by hand, and which machines go when it asks for fewer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from policies.control import PoolSeen, Seen
from policies.routers import RoundRobin
from sim.engine import Experiment, run
from sim.engine.spec.lifecycle import DRAINING, OFF, STARTING, Outage, Scaling
from tests.engine.test_fleet import S, Says, changes, fleet_of, one_at_a_time
from workloads import Trace


@dataclass(frozen=True)
class Watches:
    """Keeps what it is shown, and asks for what there is, or for *least*."""

    shown: list[Seen] = field(default_factory=list)
    least: int = 0

    def wanted(self, seen: Seen, /) -> int:
        self.shown.append(seen)
        return max(seen.mine.machines, self.least)


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


def test_of_machines_that_start_the_last_to_begin_goes_whatever_phase_the_others_are_in() -> None:
    """Machine 1 begins at 1 s and is in its second phase from 5 s on; machine 2 begins at 4 s and is in its first at 6 s."""
    workload = Trace(arrival_ns=[0], prompt_tokens=[8], output_tokens=[25])
    phases = (("image", 4.0), ("weights", 40.0))
    policy = Says((2, 2, 2, 3, 3, 2))
    found = fleet_run(workload, Scaling(policy=policy, min_machines=1, initial=1, interval_s=1.0, phases=phases), 3)
    assert changes(found) == [(1, 1, STARTING, 0), (4, 2, STARTING, 0), (5, 1, STARTING, 1), (6, 2, OFF, -1)]


@pytest.mark.parametrize(("asks", "below", "above"), [((0, 0, 1), 2, 0), ((9, 1, 9, 1), 0, 2)])
def test_what_lies_outside_of_the_least_and_the_most_is_counted(asks: tuple[int, ...], below: int, above: int) -> None:
    workload = Trace(arrival_ns=[0, 22 * S], prompt_tokens=[8] * 2, output_tokens=[1] * 2)
    scaling = Scaling(policy=Says(asks), min_machines=1, initial=1, interval_s=5.0)
    facts = fleet_run(workload, scaling, 2).meta["fleet"]
    assert (facts["asked_below_least"], facts["asked_above_most"]) == (below, above)


@pytest.mark.parametrize(("window_s", "drained_s"), [(0.0, 5), (9.0, 10), (10.0, 10), (10.5, 15)])
def test_machines_of_the_beginning_count_as_asked_for_then(window_s: float, drained_s: int) -> None:
    """Three at 0 s and one asked for after each 5 s: two go when the window does not reach back to 0 s any more."""
    workload = Trace(arrival_ns=[0, 22 * S], prompt_tokens=[8] * 2, output_tokens=[1] * 2)
    scaling = Scaling(policy=Says((1,)), min_machines=1, initial=3, interval_s=5.0, down_window_s=window_s)
    drained = [at_s for at_s, _, state, _ in changes(fleet_run(workload, scaling, 3)) if state == DRAINING]
    assert drained == [drained_s] * 2


@pytest.mark.parametrize(("window_s", "started_s"), [(0.0, 5), (5.0, 5), (5.5, 10)])
def test_machines_come_when_more_were_asked_for_since_the_beginning(window_s: float, started_s: int) -> None:
    workload = Trace(arrival_ns=[0, 22 * S], prompt_tokens=[8] * 2, output_tokens=[1] * 2)
    scaling = Scaling(policy=Says((3,)), min_machines=1, initial=1, interval_s=5.0, up_window_s=window_s)
    assert [at_s for at_s, _, _, _ in changes(fleet_run(workload, scaling, 3))] == [started_s] * 2


def test_what_is_asked_above_the_most_is_counted_when_it_has_been_asked_for_throughout_the_window() -> None:
    """Nine at 5 and 10 s, of which a window of 6 s lets the second through; two from 20 s on."""
    workload = Trace(arrival_ns=[0, 32 * S], prompt_tokens=[8] * 2, output_tokens=[1] * 2)
    scaling = Scaling(policy=Says((9, 9, 1, 2)), min_machines=1, initial=1, interval_s=5.0, up_window_s=6.0)
    replicas = (one_at_a_time(),) * 2

    def above(*outages: Outage) -> int:
        fleet = fleet_of(2, scaling, outages=outages)
        columns = run(Experiment(workload=workload, replicas=replicas, router=RoundRobin(), fleet=fleet))
        return columns.meta["fleet"]["asked_above_most"]

    assert above() == 1
    assert above(Outage(machine=0, at_s=17.0, for_s=1.0)) == 1
    # One that has failed for good cannot be asked for: looks at 25 and 30 s.
    assert above(Outage(machine=0, at_s=17.0)) == 3


def test_an_autoscaler_without_behavior_goes_on_to_a_peak_that_its_limit_cut() -> None:
    """One machine; 12 asked for once, then one: 4, 8 and 12 are there, until the window ends."""
    workload = Trace(arrival_ns=[0, 62 * S], prompt_tokens=[8] * 2, output_tokens=[1] * 2)
    scaling = Scaling(
        policy=Says((12, 1)), min_machines=1, initial=1, interval_s=5.0, down_window_s=30.0, hpa="default"
    )
    found = [(at_s, state) for at_s, _, state, _ in changes(fleet_run(workload, scaling, 12))]
    counts = {at_s: sum(1 for each, _ in found if each == at_s) for at_s, _ in found}
    assert counts == {5: 3, 10: 4, 15: 4, 35: 22}


def test_with_behavior_at_most_four_more_come_in_fifteen_seconds() -> None:
    workload = Trace(arrival_ns=[0, 42 * S], prompt_tokens=[8] * 2, output_tokens=[1] * 2)
    scaling = Scaling(policy=Says((12,)), min_machines=1, initial=1, interval_s=5.0, hpa="behavior")
    assert [at_s for at_s, _, _, _ in changes(fleet_run(workload, scaling, 12))] == [5] * 4 + [20] * 5 + [35] * 2


def test_machines_are_pending_until_their_server_begins() -> None:
    """Machine 1 gets its image from 1 to 5 s and loads its weights until 9 s."""
    workload = Trace(arrival_ns=[0], prompt_tokens=[8], output_tokens=[12])
    policy = Watches(least=2)
    phases = (("image", 4.0), ("weights", 4.0))
    fleet_run(workload, Scaling(policy=policy, min_machines=1, initial=1, interval_s=1.0, phases=phases), 2)
    counted = [(seen.mine.machines, seen.mine.ready, seen.mine.pending) for seen in policy.shown[:11]]
    assert counted == [(1, 1, 0)] + [(2, 1, 1)] * 3 + [(2, 1, 0)] * 4 + [(2, 2, 0)] * 3
