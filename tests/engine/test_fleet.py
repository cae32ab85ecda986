"""Machines that come, go and fail."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from policies.control import Perfect, Seen
from policies.published import OrcaPaged
from policies.routers import LeastOutstanding, RoundRobin
from policies.schedulers import Sarathi
from policies.sglang import Sglang
from sim.engine import FINISHED, UNFINISHED, Experiment, PolicyError, ReplicaSpec, UnservedError, run
from sim.engine.record.columns import ABORTED, LOST, REJECTED
from sim.engine.spec.lifecycle import DRAINING, FAILED, OFF, READY, STARTING, Failing, FleetSpec, Life, Outage, Scaling
from tests.engine.costs import Linear
from tests.engine.random_runs import an_experiment, apart, assert_same, with_fleet, with_ranks, with_tiers
from tests.sample import few, some
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


@dataclass(frozen=True)
class ComesAndGoes:
    """Asks for a machine where there is none, and for none where there is one."""

    def wanted(self, seen: Seen, /) -> int:
        return 1 - min(seen.mine.machines, 1)


def on_a_machine_that_comes_and_goes(output_tokens: int, **rest: Any) -> Any:
    """A request whose iterations take a second, on a machine that is there for 2.5 of 5 seconds."""
    workload = Trace(arrival_ns=[0], prompt_tokens=[8], output_tokens=[output_tokens])
    scaling = Scaling(policy=ComesAndGoes(), min_machines=0, initial=1, interval_s=2.5, drain_s=0.0)
    spec = replace(one_at_a_time(), kv_blocks=1000)
    fleet = fleet_of(1, scaling, **rest)
    return Experiment(workload=workload, replicas=(spec,), router=RoundRobin(), fleet=fleet)


@pytest.mark.parametrize("fast_forward", [True, False])
def test_a_request_that_starts_again_and_again_without_one_token_more_is_an_error(fast_forward: bool) -> None:
    """Tokens are discarded each time; a second and a third one come, and a fourth never does."""
    experiment = on_a_machine_that_comes_and_goes(4, in_flight="retry", retries=None)
    with pytest.raises(
        UnservedError, match=r"request 0 has come to a machine 1,000 times until t=5000.0\d* s without one"
    ):
        run(experiment, fast_forward=fast_forward)


def test_a_request_that_has_one_token_more_each_time_may_start_again_as_often_as_it_has_to() -> None:
    columns = run(on_a_machine_that_comes_and_goes(2400, in_flight="resume", retries=None))
    assert columns.requests["status"].tolist() == [FINISHED]
    assert columns.requests["failures"][0] > 1000


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


def test_what_gave_way_to_the_step_in_which_a_machine_fails_is_counted() -> None:
    """The first prompt leaves 10 of 16 pages in the tree, the second takes 3, and one every fourth round: the ninth takes the last
    that is blank, and the tenth, in which the machine fails, has room made for one although it takes none."""
    workload = Trace(
        arrival_ns=[0, 2 * S], prompt_tokens=[40, 12], output_tokens=[1, 40],
        prefix_blocks=list(range(13)), prefix_offsets=[0, 10, 13], prefix_block_tokens=4,
    )  # fmt: skip
    spec = ReplicaSpec(
        cost=Linear(fixed_s=1.0), scheduler=Sglang(disable_overlap_schedule=True), kv_blocks=16, block_tokens=4, prefix_cache="tree"
    )  # fmt: skip
    fleet = fleet_of(1, outages=(Outage(machine=0, at_s=12.5, for_s=1.0),))
    experiment = Experiment(workload=workload, replicas=(spec,), router=RoundRobin(), fleet=fleet)
    for fast_forward in (True, False):
        iterations = run(experiment, fast_forward=fast_forward).iterations()
        prompts = iterations["prefill_tokens"] > 0
        assert iterations["prefill_tokens"][prompts].tolist() == [40, 12, 22]
        assert iterations["prefix_evictions"][prompts].tolist() == [0, 0, 10]


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


@pytest.mark.parametrize(
    ("answer", "text"), [(-1, "asked for -1 machines of pool all"), (1.5, "asked for 1.5 machines")]
)
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
    with pytest.raises(
        PolicyError, match=r"asked for no machine of pool all 10,000 times in a row while 1 requests wait"
    ):
        run(experiment)


def test_a_policy_or_schedule_that_forgets_nothing_comes_back_to_those_that_drain() -> None:
    """Two long requests; one machine drains at 5 s and is called back at 10 s, warm."""
    workload = Trace(arrival_ns=[0, 0, 11 * S, 11 * S], prompt_tokens=[8] * 4, output_tokens=[0] * 4)
    scaling = Scaling(policy=Says((1, 2)), min_machines=1, initial=2, interval_s=5.0, phases=(("load", 100.0),))
    columns = run(
        Experiment(
            workload=workload, replicas=(one_at_a_time(20.0),) * 2, router=RoundRobin(), fleet=fleet_of(2, scaling)
        ),
        check_invariants=True,
    )
    assert changes(columns) == [(5, 1, DRAINING, -1), (10, 1, READY, -1)]
    assert columns.meta["fleet"]["called_back"] == 1
    assert columns.requests["replica"].tolist() == [0, 1, 0, 1]


def test_a_machine_that_is_called_back_has_all_of_its_time_when_it_drains_again() -> None:
    """It is to drain within 12 s at 5 s, is called back at 10 s, drains anew at 15 s and is cut short at 27 s, not at 17 s."""
    workload = Trace(arrival_ns=[0, 0], prompt_tokens=[8] * 2, output_tokens=[0] * 2)
    scaling = Scaling(policy=Says((1, 2, 1)), min_machines=1, initial=2, interval_s=5.0, drain_s=12.0)
    experiment = Experiment(
        workload=workload, replicas=(one_at_a_time(40.0),) * 2, router=RoundRobin(), fleet=fleet_of(2, scaling)
    )
    columns = run(experiment, check_invariants=True)
    assert changes(columns) == [(5, 1, DRAINING, -1), (10, 1, READY, -1), (15, 1, DRAINING, -1), (27, 1, OFF, -1)]
    # Called back for good, it serves beyond the 17 s at which it was to go.
    stays = replace(scaling, policy=Says((1, 2)))
    columns = run(replace(experiment, fleet=fleet_of(2, stays)), check_invariants=True)
    assert changes(columns) == [(5, 1, DRAINING, -1), (10, 1, READY, -1)]
    assert columns.meta["fleet"]["drains_cut_short"] == 0
    assert columns.requests["finish_ns"].tolist() == [40 * S] * 2


@pytest.mark.parametrize(("for_s", "state"), [(2.0, OFF), (None, FAILED)])
def test_a_machine_that_fails_while_it_drains_does_not_come_back(for_s: float | None, state: int) -> None:
    """It was to go: what it had goes elsewhere, and only one that fails for good cannot be started again."""
    workload = Trace(arrival_ns=[0, 0, 30 * S], prompt_tokens=[8] * 3, output_tokens=[0] * 3)
    scaling = Scaling(policy=Says((1,)), min_machines=1, initial=2, interval_s=5.0)
    fleet = fleet_of(2, scaling, outages=(Outage(machine=1, at_s=7.0, for_s=for_s),))
    columns = run(
        Experiment(workload=workload, replicas=(one_at_a_time(10.0),) * 2, router=RoundRobin(), fleet=fleet),
        check_invariants=True,
    )
    assert changes(columns) == [(5, 1, DRAINING, -1), (7, 1, state, -1)]
    assert columns.requests["replica"].tolist() == [0, 0, 0]
    assert columns.meta["fleet"]["failures"] == 1


def test_outages_of_machines_that_do_not_serve_are_counted_and_change_nothing() -> None:
    """Machine 1 is off until 10 s, starts until 15 s, serves, and is down from 20 to 24 s; machine 0 serves all the time."""
    workload = Trace(arrival_ns=[0, 29 * S], prompt_tokens=[8] * 2, output_tokens=[0] * 2)
    scaling = Scaling(policy=Says((2,)), min_machines=1, initial=1, interval_s=10.0, phases=(("load", 5.0),))
    outages = tuple(Outage(machine=1, at_s=at_s, for_s=4.0) for at_s in (3.0, 12.0, 20.0, 22.0))
    columns = run(
        Experiment(
            workload=workload, replicas=(one_at_a_time(),) * 2, router=RoundRobin(), fleet=fleet_of(2, scaling, outages=outages)
        ),
        check_invariants=True,
    )  # fmt: skip
    assert changes(columns) == [(10, 1, STARTING, 0), (15, 1, READY, -1), (20, 1, FAILED, -1), (24, 1, READY, -1)]
    facts = columns.meta["fleet"]
    assert (facts["failures"], facts["outages_missed"]) == (1, 3)


def balance(seed: int, *, stepped: bool, in_pools: bool = False, tiers: bool = False) -> None:
    """A random fleet with failures: invariants at every event, the same stepped, and nothing vanishes or is counted twice."""
    if in_pools:
        experiment = apart(seed, speculative=seed % 3 == 0)
    else:
        experiment = an_experiment(seed, speculative=seed % 3 == 0)
        if seed % 5 == 0:
            experiment = with_ranks(experiment, seed)
    if tiers:
        experiment = with_tiers(experiment, seed)
    experiment = with_fleet(experiment, seed)
    fleet = experiment.fleet
    assert fleet is not None
    columns = run(experiment, check_invariants=True)
    facts = columns.meta["fleet"]
    if stepped:
        slow = run(experiment, fast_forward=False)
        assert_same(columns, slow)
        assert facts == slow.meta["fleet"]
    requests, iterations = columns.requests, columns.iterations()
    status, times = requests["status"], requests["failures"]
    finished = status == FINISHED
    assert np.isin(status, (FINISHED, REJECTED, UNFINISHED, ABORTED, LOST)).all()
    assert facts["lost"] == (status == LOST).sum()
    # Each failure of a request's machine sends it again or loses it; who was lost for want of a machine need not have met one.
    named = np.array([*columns.reasons, ""])[requests["reason"]]
    failed = np.char.startswith(named, "its machine failed") & (status == LOST)
    assert times.sum() == facts["resumed"] + facts["retried"] + failed.sum()
    assert fleet.retries is None or (times <= fleet.retries + 1).all()
    np.testing.assert_array_equal(requests["emitted_tokens"][finished], requests["output_tokens"][finished])
    assert iterations["emitted_tokens"].sum() == requests["emitted_tokens"].sum() + facts["discarded_tokens"]
    again = (requests["preemptions"] > 0) | (times > 0)
    if experiment.handover is not None:
        # Rejected by the machine that decodes.
        again |= requests["prompts_computed"] > 0
    if experiment.horizon_ns is None and not (status == ABORTED).any() and not ((status == REJECTED) & again).any():
        output = requests["output_tokens"]
        asked = np.maximum(requests["prompt_tokens"], 1) + np.maximum(output - 1, 0)
        completions = sum(int(replica.spans["completions"].sum()) for replica in columns.replicas)
        completions -= int((finished & (output == 0)).sum())
        between = 0
        if experiment.handover is not None:
            if experiment.handover.first_token == "decode":
                # Tokens that are dropped.
                completions -= requests["prompts_computed"].sum()
            left = (status == UNFINISHED) & (requests["prefilled_ns"] >= 0) & (requests["landed_ns"] < 0)
            assert (left <= (requests["held_ns"] > 0)).all()
            # Emitted tokens that were carried are computed like a prompt; the last of one who waits for a machine is prefill's.
            mine = 0 if experiment.handover.first_token == "decode" else 1
            between = (np.maximum(requests["prompt_tokens"], 1) + np.maximum(requests["emitted_tokens"] - mine, 0))[
                left
            ].sum()
        decoded = iterations["emitted_tokens"].sum() - completions
        # What was moved when a sequence gave way, and came back, was neither computed again nor found.
        hits = [f"{name}_hit_tokens" for name in ("prefix", "host", "disk", "remote", "peer", "tier_again")]
        found = sum(requests[name].sum() for name in (*hits, "prefix_hit_again_tokens") if name in requests)
        beyond = iterations["prefill_tokens"].sum() + decoded + found
        beyond -= asked[finished].sum() + requests["recomputed_tokens"].sum() + between
        swapped = requests["preemptions"].any() and any(tenant.swaps for tenant in experiment.hosted)
        # The device may still have of a sequence that comes back what was never given up: it counts as found, and in nothing else.
        assert 0 <= beyond <= (requests.get("prefix_hit_again_tokens", np.zeros(1)).sum() if swapped else 0)
    log = facts["log"]
    for machine in range(len(fleet.pools)):
        states = [state for at, state in zip(log["machine"], log["state"], strict=True) if at == machine]
        follows = {
            OFF: {STARTING, READY},
            STARTING: {STARTING, READY, OFF},
            READY: {DRAINING, FAILED},
            DRAINING: {READY, OFF, FAILED},
            FAILED: {READY, OFF},
        }
        assert all(b in follows[a] for a, b in itertools.pairwise(states))


@pytest.mark.parametrize("seed", few([10, 0, 20]))
def test_fleets_with_failures_keep_their_books(seed: int) -> None:
    for case in range(seed, seed + 10):
        balance(case, stepped=case % 5 == 1)


@pytest.mark.parametrize("seed", few([10, 0]))
def test_fleets_of_pools_with_failures_keep_their_books(seed: int) -> None:
    for case in range(seed, seed + 10):
        balance(case, stepped=case % 5 == 1, in_pools=True)


@pytest.mark.parametrize("in_pools", [False, True], ids=["plain", "pools"])
def test_fleets_with_tiers_and_failures_keep_their_books(in_pools: bool) -> None:
    for case in range(2):
        balance(case, stepped=case % 3 == 1, in_pools=in_pools, tiers=True)


@pytest.mark.slow(reason="many random runs")
@pytest.mark.parametrize("in_pools", [False, True], ids=["plain", "pools"])
@pytest.mark.parametrize("seed", range(100, 300, 50))
def test_many_fleets_with_tiers_and_failures_keep_their_books(seed: int, in_pools: bool) -> None:
    for case in some(range(seed, seed + 50)):
        balance(case, stepped=True, in_pools=in_pools, tiers=True)


@pytest.mark.slow(reason="many random runs")
@pytest.mark.parametrize("seed", range(100, 500, 50))
def test_many_fleets_of_pools_with_failures_keep_their_books(seed: int) -> None:
    for case in some(range(seed, seed + 50)):
        balance(case, stepped=True, in_pools=True)


@pytest.mark.slow(reason="many random runs")
@pytest.mark.parametrize("seed", range(100, 2100, 200))
def test_many_fleets_with_failures_keep_their_books(seed: int) -> None:
    for case in some(range(seed, seed + 200)):
        balance(case, stepped=True)


def test_without_a_reason_to_change_a_fleet_is_what_it_was() -> None:
    """A fleet in which nothing happens runs to the nanosecond as machines without one do."""
    for seed in range(5):
        plain = an_experiment(seed, speculative=False)
        n = len(plain.replicas)
        idle = replace(plain, fleet=FleetSpec(pools=(0,) * n, names=("",), scaling=(None,), failing=(None,)))
        assert_same(run(plain), _without_fleet(run(idle)))


def _without_fleet(columns: Any) -> Any:
    requests = {name: column for name, column in columns.requests.items() if name not in ("failures", "held_ns")}
    return replace(columns, requests=requests)


def test_the_availability_of_machines_that_fail_is_what_renewal_theory_says() -> None:
    """Up 30 s, down 10 s on average, Weibull and exponential: ready for 3/4 of the time. 20 machines for 4,000 s are 2,000 cycles;
    the share's standard deviation is about 0.005 by the central limit theorem for alternating renewals, and the bound is 4 of it
    (a false alarm in 16,000 for each)."""
    n, horizon_s = 20, 4_000.0
    for shape in (1.0, 2.0):
        workload = Trace(arrival_ns=[0, round(horizon_s * S)], prompt_tokens=[8] * 2, output_tokens=[0] * 2)
        failing = Failing(up=Life(mean_s=30.0, shape=shape), down=Life(mean_s=10.0))
        columns = run(
            Experiment(
                workload=workload,
                replicas=(one_at_a_time(),) * n,
                router=RoundRobin(),
                fleet=fleet_of(n, failing=failing),
                horizon_ns=round(horizon_s * S),
                seed=3,
            )
        )
        log = columns.meta["fleet"]["log"]
        ready_s = 0.0
        for machine in range(n):
            at_s = [at_ns / S for at_ns, of in zip(log["at_ns"], log["machine"], strict=True) if of == machine]
            states = [state for state, of in zip(log["state"], log["machine"], strict=True) if of == machine]
            for state, begin, end in zip(states, at_s, [*at_s[1:], horizon_s], strict=True):
                ready_s += (end - begin) * (state == READY)
        # Of k cycles: variance (down^2 var(up) + up^2 var(down)) / (up + down)^4 / k.
        variance_up = 900.0 if shape == 1.0 else 900.0 * (4 / np.pi - 1)
        deviation = np.sqrt((100 * variance_up + 900 * 100.0) / 40.0**4 / (n * horizon_s / 40.0))
        assert abs(ready_s / (n * horizon_s) - 0.75) < 4 * deviation + 0.25 * 30 / horizon_s


def staircase() -> Trace:
    """Requests evenly spaced: 1/s for 600 s, 3/s for 600 s, 2/s for 600 s, 1/s for 600 s."""
    at_s = [600 * stair + i / rate for stair, rate in enumerate((1, 3, 2, 1)) for i in range(600 * rate)]
    return Trace(
        arrival_ns=[round(at * S) for at in at_s], prompt_tokens=[8] * len(at_s), output_tokens=[0] * len(at_s)
    )


def test_the_perfect_controller_has_as_many_machine_hours_as_a_staircase_counts() -> None:
    """At 1 request/s each, machines that take 60 s to start: one all the time, two more that are started at 540 s and
    serve from 600 s, of which one goes at 1,200 s and the other at 1,800 s: 600 (1 + 3 + 2 + 1) s, and 2 * 60 s of starting."""
    workload = staircase()
    policy = Perfect(rate_per_s=1.0, step_s=60.0).told((workload.arrival_ns / S).tolist(), 60.0)
    scaling = Scaling(policy=policy, min_machines=1, initial=1, interval_s=60.0, phases=(("load", 60.0),))
    columns = run(
        Experiment(
            workload=workload,
            replicas=(one_at_a_time(0.5),) * 4,
            router=LeastOutstanding(),
            fleet=fleet_of(4, scaling),
            horizon_ns=2400 * S,
        )
    )
    starting, ready = (_seconds(columns, state, 2400.0) for state in (STARTING, READY))
    assert starting == 2 * 60
    assert ready == 600 * (1 + 3 + 2 + 1)
    assert _seconds(columns, DRAINING, 2400.0) < 2 * 0.5 + 1e-6


def _seconds(columns: Any, wanted: int, end_s: float) -> float:
    log = columns.meta["fleet"]["log"]
    total_ns = 0
    for machine in set(log["machine"]):
        rows = [i for i, of in enumerate(log["machine"]) if of == machine]
        for row, after in zip(rows, [*rows[1:], None], strict=True):
            until = round(end_s * S) if after is None else log["at_ns"][after]
            total_ns += (until - log["at_ns"][row]) * (log["state"][row] == wanted)
    return total_ns / S
