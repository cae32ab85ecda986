"""Sharing between classes and tenants, by literals; and that spans equal stepping with any of it around any scheduler."""

from __future__ import annotations

import itertools
import random
from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from policies.classes import DEMOTED, TOO_LATE_FOR_ITS_CLASS, KeepSlo, Preempt, Served, WeightedFair
from policies.published import OrcaPaged
from policies.routers import Load, Refused, Reserve, RoundRobin, RoutedRequest, Shed
from policies.schedulers import Sarathi
from policies.trtllm import TrtLlm
from policies.view import UNTIL_CHANGE, PartialSeq, Plan, RunningSeq, Terms, WaitingSeq, admits_in_turn, evicts
from policies.vllm import Vllm, VllmV0
from policies.wrappers import EvictNewest, Order, RejectLate
from sim.engine import Experiment, ReplicaSpec, run
from sim.engine.requests.state import RequestState
from sim.engine.time.errors import PolicyError
from sim.metrics import summary
from tests.engine.costs import Linear
from tests.engine.random_runs import a_trtllm, a_vllm, an_experiment, assert_same, run_both_ways, with_scheduler
from tests.policies.test_wrappers import Nanoseconds, view
from tests.sample import some
from workloads import ServiceClass, Trace, predict_outputs, with_classes

# Orders.


def test_earliest_deadline_is_of_the_first_token_by_class_and_arrival() -> None:
    queue = (WaitingSeq(1, 10, arrival_ns=0), WaitingSeq(2, 10, arrival_ns=5), WaitingSeq(3, 10, arrival_ns=6))
    terms = Terms(first_token_ns={1: -1, 2: 90, 3: 88})
    plan = Order(VllmV0(), by="first_token").plan(view(waiting=queue, terms=terms))
    assert plan.run == ((3, 10), (2, 10), (1, 10))


def test_shortest_predicted_goes_by_what_the_predictor_says() -> None:
    queue = (WaitingSeq(1, 10), WaitingSeq(2, 20), WaitingSeq(3, 30))
    terms = Terms(predicted_tokens={1: 9, 2: 3, 3: 7})
    plan = Order(VllmV0(), by="shortest_predicted").plan(view(waiting=queue, terms=terms))
    assert plan.run == ((2, 20), (3, 30), (1, 10))


# Preemption across classes.


def test_preempt_drives_out_the_newest_of_the_lowest_class_until_the_first_fits() -> None:
    queue = (WaitingSeq(7, 32, priority=1), WaitingSeq(8, 40, priority=0))
    running = (
        RunningSeq(1, 100, 7, priority=2),
        RunningSeq(2, 30, 2, priority=2),
        RunningSeq(3, 30, 2, priority=1),
        RunningSeq(4, 90, 6, priority=0),
    )
    # Request 8 needs three blocks: those of 2 are not enough, so that 1 goes as well; 3 is of a higher class, 4 of its own.
    short = view(waiting=queue, n_decoding=4, free_blocks=0, total_blocks=50, running=running)
    assert Preempt(OrcaPaged()).plan(short) == Plan(decode=True, preempt=(2, 1))


def test_preempt_drives_nobody_out_in_vain() -> None:
    queue = (WaitingSeq(8, 200, priority=0),)
    running = (RunningSeq(1, 100, 7, priority=2), RunningSeq(4, 90, 6, priority=0))
    short = view(waiting=queue, n_decoding=2, free_blocks=0, total_blocks=50, running=running)
    assert Preempt(OrcaPaged()).plan(short) == Plan(decode=True)
    # With memory, or with nobody of a lower class, the inner answer stands, but for who may come.
    ample = view(waiting=queue, n_decoding=2, running=running)
    assert Preempt(OrcaPaged()).plan(ample) == Plan(decode=True, run=((8, 200),))
    equals = view(waiting=queue, n_decoding=1, free_blocks=0, running=running[1:])
    assert Preempt(OrcaPaged()).plan(equals) == Plan(decode=True, hold=UNTIL_CHANGE)


def test_preempt_waits_for_the_prompt_of_an_equal() -> None:
    running = (RunningSeq(1, 100, 7, priority=2), RunningSeq(4, 16, 4, priority=0))

    def gone(priority: int) -> tuple[int, ...]:
        """The sequence that gives way beside a prompt of *priority* that is half computed."""
        busy = view(
            waiting=(WaitingSeq(8, 20, priority=0),),
            prefilling=(PartialSeq(4, 16, 50, priority=priority),),
            n_decoding=1,
            free_blocks=0,
            total_blocks=50,
            running=running,
        )
        return Preempt(Sarathi()).plan(busy).preempt

    assert gone(priority=0) == ()
    assert gone(priority=1) == (1,)


def test_preempt_keeps_the_room_for_the_class_of_the_first() -> None:
    def takes_the_last(view: Any, /) -> Plan:
        return Plan(run=((view.waiting[-1].id, view.waiting[-1].tokens),))

    queue = (WaitingSeq(1, 10, priority=2), WaitingSeq(2, 20, priority=0), WaitingSeq(3, 30, priority=0))
    assert Preempt(takes_the_last).plan(view(waiting=queue)) == Plan(run=((3, 30),))


# Weighted fair sharing.

ALICE, BOB = 0, 1


def test_weighted_fair_shows_the_least_served_tenant_first_and_counts_prompts_on_the_way() -> None:
    queue = tuple(WaitingSeq(id_, tokens=10) for id_ in (1, 2, 3, 4))
    terms = Terms(
        tenant={1: ALICE, 2: ALICE, 3: BOB, 4: BOB}, token_cost={1: 1, 2: 1, 3: 2, 4: 2}
    )  # Bob has half of Alice's weight.
    shown = view(waiting=queue, terms=terms, prompt_tokens=dict.fromkeys((1, 2, 3, 4), 10))
    plan = WeightedFair(VllmV0()).plan(shown)
    # 1 (Alice 10), 3 (Bob 20), 2 (Alice 20), then Bob has the lower counter no more than Alice: 4.
    assert plan.run == ((1, 10), (3, 10), (2, 10), (4, 10))
    assert plan.memo == Served(counters={ALICE: 0, BOB: 0}, emitted={1: -1, 3: -1, 2: -1, 4: -1}, last=BOB)


def test_weighted_fair_counts_prompts_twice_emitted_tokens_and_what_the_gone_emitted() -> None:
    terms = Terms(tenant={1: ALICE, 2: BOB, 3: BOB}, token_cost={1: 1, 2: 1, 3: 1})
    memo = Served(counters={BOB: 5}, emitted={1: -1, 2: 4, 3: 1}, rounds=10)
    running = (RunningSeq(1, 12, 1), RunningSeq(2, 26, 2))
    now = view(n_decoding=2, running=running, terms=terms, prompt_tokens={1: 10, 2: 20, 3: 30}, rounds=13, memo=memo)
    found = WeightedFair(VllmV0()).plan(now).memo
    # 1: a prompt of 10 and 3 tokens; 2: 7 tokens, 4 of them counted; 3 has ended, and emitted 3 more in 3 rounds.
    assert isinstance(found, Served)
    assert found.counters == {ALICE: 10 + 2 * 3, BOB: 5 + 2 * 3 + 2 * 3}
    assert found.emitted == {1: 3, 2: 7}


def test_weighted_fair_counts_a_token_three_times_at_a_third_of_the_weight() -> None:
    terms = Terms(tenant={1: ALICE, 2: BOB}, token_cost={1: 3, 2: 1})
    memo = Served(emitted={1: -1, 2: -1})
    running = (RunningSeq(1, 14, 1), RunningSeq(2, 14, 1))
    now = view(n_decoding=2, running=running, terms=terms, prompt_tokens={1: 10, 2: 10}, rounds=4, memo=memo)
    found = WeightedFair(VllmV0()).plan(now).memo
    assert isinstance(found, Served)
    assert found.counters == {ALICE: 3 * (10 + 2 * 5), BOB: 10 + 2 * 5}


def test_weighted_fair_counts_nothing_more_of_who_gave_way_and_whose_client_has_gone() -> None:
    """1 gave way with 4 of its tokens counted and still waits; then its client goes. Who ends in its place has a token counted."""
    terms = Terms(tenant={1: ALICE}, token_cost={1: 1})
    waiting = WaitingSeq(1, tokens=14, preempted=True)
    memo = Served(counters={ALICE: 18}, emitted={1: 4})
    shown = view(waiting=(waiting,), n_decoding=1, free_blocks=0, terms=terms, prompt_tokens={1: 10}, memo=memo)
    found = WeightedFair(VllmV0()).plan(shown).memo
    assert isinstance(found, Served)
    assert (found.counters, found.emitted, found.back) == ({ALICE: 18}, {1: 4}, {1})
    gone = WeightedFair(VllmV0()).plan(view(n_decoding=1, terms=terms, prompt_tokens={1: 10}, rounds=1, memo=found))
    assert isinstance(gone.memo, Served)
    assert gone.memo.counters == {ALICE: 18}
    ended = WeightedFair(VllmV0()).plan(view(n_decoding=1, terms=terms, prompt_tokens={1: 10}, rounds=1, memo=memo))
    assert isinstance(ended.memo, Served)
    assert ended.memo.counters == {ALICE: 20}


def test_weighted_fair_lifts_who_comes_back_to_those_who_wait_or_to_the_last_who_left() -> None:
    terms = Terms(tenant={1: ALICE, 2: BOB}, token_cost={1: 1, 2: 1})
    queue = (WaitingSeq(1, 10), WaitingSeq(2, 10))
    waiting = view(waiting=queue, n_decoding=1, free_blocks=0, terms=terms, prompt_tokens={1: 10, 2: 10})
    some = Served(counters={ALICE: 70, BOB: 9}, queued=frozenset({ALICE}))
    assert WeightedFair(VllmV0()).plan(replace(waiting, memo=some)).memo.counters == {ALICE: 70, BOB: 70}  # type: ignore[union-attr]
    none = Served(counters={ALICE: 7, BOB: 9}, last=BOB)
    assert WeightedFair(VllmV0()).plan(replace(waiting, memo=none)).memo.counters == {ALICE: 9, BOB: 9}  # type: ignore[union-attr]


def test_weighted_fair_keeps_the_difference_of_service_within_its_bound() -> None:
    """Sheng et al., theorem 4.4: both tenants always wait, and Alice's requests are ten times as long as Bob's. In order of arrival
    Alice would have had ten times the service."""
    n, prompt_a, prompt_b, output, seats = 60, 100, 10, 20, 4
    tenants = [ALICE, BOB] * n
    trace = Trace(
        arrival_ns=np.zeros(2 * n, np.int64),
        prompt_tokens=[prompt_a, prompt_b] * n,
        output_tokens=[output] * (2 * n),
        tenant_index=tenants,
        tenants=("alice", "bob"),
    )

    def most_apart(scheduler: Any) -> int:
        replica = ReplicaSpec(cost=Linear(), scheduler=scheduler, kv_blocks=1000)
        columns = run(Experiment(workload=trace, replicas=(replica,), router=RoundRobin())).requests
        first, finish = columns["first_token_ns"], columns["finish_ns"]
        # Both wait until the last of either is scheduled.
        until = min(columns["scheduled_ns"][np.equal(tenants, who)].max() for who in (ALICE, BOB))
        apart = [0]
        for at in sorted({*first.tolist(), *finish.tolist()}):
            if at >= until:
                break
            emitted = np.clip((at - first) // 10**6 + 1, 0, output)
            served = (columns["scheduled_ns"] < at) * columns["prompt_tokens"] + 2 * emitted
            apart.append(int(served[0::2].sum() - served[1::2].sum()))
        return max(map(abs, apart))

    bound = 2 * max(prompt_a, 2 * seats * (prompt_a + output))
    assert most_apart(WeightedFair(OrcaPaged(max_sequences=seats))) <= bound
    assert most_apart(OrcaPaged(max_sequences=seats)) > 2 * bound


# Admission.


def test_keep_slo_refuses_or_demotes_who_cannot_have_its_first_token_in_time() -> None:
    queue = (WaitingSeq(1, 300), WaitingSeq(2, 100), WaitingSeq(3, 50), WaitingSeq(4, 70))
    terms = Terms(first_token_ns={1: 999, 2: 1099, 3: 1050, 4: -1})
    now = view(waiting=queue, now_ns=1000, price=Nanoseconds(1000), terms=terms)
    plan = KeepSlo(VllmV0()).plan(now)
    late = TOO_LATE_FOR_ITS_CLASS
    assert plan == Plan(run=((3, 50), (4, 70)), reject=((1, late), (2, late)), until_ns=1051)
    behind = KeepSlo(VllmV0(), otherwise="demote").plan(now)
    assert behind == Plan(run=((3, 50), (4, 70), (1, 300), (2, 100)), until_ns=1051)


def test_keep_slo_shortens_the_answers_of_the_late_and_leaves_them_their_place() -> None:
    """1 has waited too long, 2 would be late, 3 is in time; 4 is late, and its client allows no more than that anyhow."""
    queue = (WaitingSeq(1, 300), WaitingSeq(2, 100), WaitingSeq(3, 50), WaitingSeq(4, 70))
    terms = Terms(first_token_ns={1: 999, 2: 1099, 3: 1050, 4: 10})
    now = view(
        waiting=queue,
        now_ns=1000,
        price=Nanoseconds(1000),
        terms=terms,
        max_tokens={1: 90, 2: 33, 3: 90, 4: 32},
    )
    plan = KeepSlo(VllmV0(), otherwise="shorten", max_tokens=32).plan(now)
    assert plan == Plan(run=((1, 300), (2, 100), (3, 50), (4, 70)), until_ns=1051, shorten=((1, 32), (2, 32)))


@pytest.mark.parametrize("given", [{"otherwise": "shorten"}, {"max_tokens": 5}, {"otherwise": "cut"}])
def test_keep_slo_is_told_how_short(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="otherwise"):
        KeepSlo(VllmV0(), **given)


def test_a_shortened_answer_ends_early_and_what_it_lacks_is_kept_count_of() -> None:
    """One at a time, a second an iteration, and 2 s to the first token: the first of nine tokens is done at 9 s, the second is late
    then and has 4 tokens for its 9, the third its two, and nobody else is touched."""
    trace = Trace(
        arrival_ns=[0, 0, 0, 100 * 10**9],
        prompt_tokens=[8] * 4,
        output_tokens=[9, 9, 2, 9],
        class_index=np.zeros(4, np.int64),
        classes=("chat",),
    )
    trace = with_classes(trace, [ServiceClass(name="chat", ttft_s=2.0)])
    spec = ReplicaSpec(
        cost=Linear(fixed_s=1.0),
        scheduler=KeepSlo(Sarathi(max_sequences=1), otherwise="shorten", max_tokens=4),
        kv_blocks=10,
    )
    columns = run(
        Experiment(workload=trace, replicas=(spec,), router=RoundRobin()),
        check_invariants=True,
    )
    assert (columns.requests["finish_ns"] / 1e9).tolist() == [9, 13, 15, 109]
    assert columns.requests["emitted_tokens"].tolist() == columns.requests["output_tokens"].tolist() == [9, 4, 2, 9]
    # The third was allowed two anyhow, since nothing says otherwise.
    assert columns.requests["shortened_tokens"].tolist() == [-1, 5, -1, -1]
    allowed = run(Experiment(workload=replace(trace, max_tokens=np.full(4, 50)), replicas=(spec,), router=RoundRobin()))
    assert allowed.requests["shortened_tokens"].tolist() == [-1, 5, 0, -1]
    counts = summary(columns, classes=[{"name": "chat", "weight": 1.0, "slo": {"ttft_s": 2.0}}])["classes"]["chat"]
    assert (counts["requests"]["degraded"], counts["requests"]["shortened_tokens"]) == (1, 5)


@pytest.mark.parametrize(("answer", "says"), [((5, 3), "does not wait here"), ((0, 0), "the least is 1")])
def test_a_policy_that_shortens_what_it_cannot_is_told_so(answer: tuple[int, int], says: str) -> None:
    spec = ReplicaSpec(cost=Linear(fixed_s=1.0), scheduler=lambda _: Plan(shorten=(answer,)), kv_blocks=10)
    workload = Trace(arrival_ns=[0], prompt_tokens=[8], output_tokens=[9])
    with pytest.raises(PolicyError, match=says):
        run(Experiment(workload=workload, replicas=(spec,), router=RoundRobin()))


def test_a_shortened_answer_never_ends_before_what_it_has() -> None:
    state = RequestState(array("q", [8]), array("q", [9]), array("q", [0]))
    state.left[0] = 3
    state.shorten(0, 2)
    assert (state.output[0], state.left[0], state.shortened) == (7, 1, {0: 2})
    state.shorten(0, 2)
    assert (state.output[0], state.left[0], state.shortened) == (7, 1, {0: 2})
    allowed = RequestState(array("q", [8]), array("q", [9]), array("q", [0]), max_tokens=array("q", [50]))
    allowed.shorten(0, 20)
    assert (allowed.output[0], allowed.max_tokens[0], allowed.shortened) == (9, 20, {0: 0})


def test_keep_slo_shows_the_demoted_with_the_lowest_priority() -> None:
    seen: list[int] = []

    def look(view: Any, /) -> Plan:
        seen[:] = [seq.priority for seq in view.waiting]
        return Plan()

    queue = (WaitingSeq(1, 300, priority=-3), WaitingSeq(2, 100, priority=2))
    KeepSlo(look, otherwise="demote").plan(view(waiting=queue, now_ns=9, terms=Terms(first_token_ns={1: 8, 2: 10})))
    assert seen == [2, DEMOTED]


# Against what is known to be best of all orders.


def ends_s(order: str, **columns: Any) -> np.ndarray:
    """When six requests end that are there from the beginning and are served one at a time, a second a token."""
    trace = Trace(arrival_ns=[0] * 6, prompt_tokens=[8] * 6, **columns)
    spec = ReplicaSpec(
        cost=Linear(fixed_s=1.0), scheduler=Order(OrcaPaged(max_sequences=1), by=order), kv_blocks=100
    )  # fmt: skip
    requests = run(Experiment(workload=trace, replicas=(spec,), router=RoundRobin())).requests
    return requests["finish_ns"] / 1e9


@pytest.mark.parametrize("seed", range(5))
def test_earliest_deadline_has_the_least_lateness_of_all_orders(seed: int) -> None:
    """Jackson, "Scheduling a production line to minimize maximum tardiness", 1955: of all 720 orders."""
    rng = np.random.default_rng(seed)
    seconds, due_s = rng.integers(1, 20, 6), rng.integers(5, 60, 6)
    late_s = ends_s("deadline", output_tokens=seconds, deadline_ns=due_s * 10**9) - due_s
    orders = np.array(list(itertools.permutations(range(6))))
    of_all = (np.cumsum(seconds[orders], axis=1) - due_s[orders]).max(axis=1)
    assert late_s.max() == of_all.min() < np.median(of_all)


@pytest.mark.parametrize("seed", range(5))
def test_shortest_first_has_the_least_mean_of_all_orders(seed: int) -> None:
    """Smith, "Various optimizers for single-stage production", 1956: of all 720 orders."""
    rng = np.random.default_rng(seed)
    seconds = rng.integers(1, 20, 6)
    found = ends_s("shortest_predicted", output_tokens=seconds, predicted_tokens=seconds)
    orders = np.array(list(itertools.permutations(range(6))))
    of_all = np.cumsum(seconds[orders], axis=1).mean(axis=1)
    assert found.mean() == pytest.approx(of_all.min())


# Routers.


def test_reserve_keeps_machines_for_the_first_classes() -> None:
    loads = (Load(), Load(), Load())
    router = Reserve(RoundRobin(), machines=1, priority=0)
    assert router.route(RoutedRequest(0, turn=3, priority=0), loads) == 0
    assert [router.route(RoutedRequest(0, turn=turn, priority=1), loads) for turn in (0, 1, 2)] == [1, 2, 1]


@pytest.mark.parametrize(
    ("loads", "saturated"),
    [
        # The larger of queue / 5 and memory / 0.8, on average: exactly 1 is enough.
        ((Load(waiting=5), Load(kv_use=0.8)), True),
        ((Load(waiting=5), Load(waiting=4, kv_use=0.79)), False),
        ((Load(waiting=6), Load(waiting=4)), True),
        # One long queue saturates eight machines.
        ((Load(waiting=40), *[Load()] * 7), True),
        ((Load(waiting=39), *[Load()] * 7), False),
        ((Load(waiting=5, kv_use=0.8), Load()), False),
    ],
)
def test_shed_refuses_the_last_classes_where_machines_are_full_on_average(
    loads: tuple[Load, ...], saturated: bool
) -> None:
    router = Shed(RoundRobin(), priority=1, max_waiting=5, max_kv_use=0.8)
    answer = router.route(RoutedRequest(0, priority=1), loads)
    assert answer == (Refused("class is shed: the machines are saturated") if saturated else 0)
    assert router.route(RoutedRequest(0, priority=0), loads) == 0


# Whole runs.


def test_with_a_perfect_predictor_the_shortest_output_goes_first() -> None:
    rng = np.random.default_rng(4)
    output = rng.permutation(np.arange(1, 31))
    trace = Trace(arrival_ns=np.zeros(30, np.int64), prompt_tokens=np.full(30, 5), output_tokens=output)
    scheduler = Order(OrcaPaged(max_sequences=1), by="shortest_predicted")
    replica = ReplicaSpec(cost=Linear(), scheduler=scheduler, kv_blocks=100)

    def order(error: float) -> list[int]:
        workload = predict_outputs(trace, error, seed=3)
        columns = run(Experiment(workload=workload, replicas=(replica,), router=RoundRobin())).requests
        return output[np.argsort(columns["scheduled_ns"])].tolist()

    assert order(0.0) == sorted(output.tolist())
    assert order(1.0) != sorted(output.tolist())


def a_classed(rng: random.Random) -> Any:
    """Up to three of them in any order around a scheduler, and eviction around them all where the scheduler does not evict."""
    inner: Any = rng.choice(
        [
            Sarathi(rng.randrange(4, 200), rng.randrange(1, 12)),
            OrcaPaged(rng.randrange(1, 12)),
            VllmV0(rng.randrange(10, 400), rng.randrange(1, 12)),
            a_vllm(rng),
            a_vllm(rng),
            a_trtllm(rng),
        ]
    )
    if isinstance(inner, Vllm):
        # Who gives way by order of admission and who comes by priority would drive each other out for ever.
        inner = replace(inner, scheduler_reserve_full_isl=True)
    preempts = not isinstance(inner, TrtLlm)
    for _ in range(rng.randrange(1, 4)):
        inner = rng.choice(
            [
                WeightedFair,
                lambda inner: WeightedFair(inner, prompt_weight=0, output_weight=1),
                Preempt if preempts else WeightedFair,
                KeepSlo,
                lambda inner: KeepSlo(inner, otherwise="demote"),
                lambda inner: KeepSlo(inner, otherwise="shorten", max_tokens=rng.randrange(1, 20)),
                lambda inner: Order(inner, by=rng.choice(["first_token", "shortest_predicted", "priority"])),
                RejectLate,
            ]
        )(inner)
    return inner if evicts(inner) else EvictNewest(inner)


def a_run(seed: int) -> Experiment | None:
    """As `an_experiment`, with classes where the workload is a trace; None where it is not."""
    rng = random.Random(f"classes of {seed}")
    experiment = an_experiment(seed, speculative=seed % 3 == 0)
    workload = experiment.workload
    if not isinstance(workload, Trace):
        return None
    names = [f"c{i}" for i in range(rng.randrange(1, 5))]
    longest = rng.choice([0.01, 0.1, 1.0])
    terms = [
        ServiceClass(
            name=name,
            priority=rng.randrange(-1, 3),
            weight=rng.choice([0.3, 1.0, 2.0]),
            tenant=rng.choice([None, "shared"]),
            ttft_s=rng.choice([None, rng.random() * longest]),
        )
        for name in names
    ]
    index = [rng.randrange(len(names)) for _ in range(len(workload))]
    workload = with_classes(replace(workload, class_index=index, classes=tuple(names)), terms)
    workload = predict_outputs(workload, rng.choice([0.0, 0.5]), seed)
    scheduler = a_classed(rng)
    experiment = with_scheduler(replace(experiment, workload=workload), scheduler)
    if not admits_in_turn(scheduler):
        return experiment
    # Who looks in the cache itself looks in blocks, and not in a tree.
    machines = tuple(
        replace(spec, hosted=tuple(replace(each, prefix_cache="blocks") for each in spec.hosted))
        for spec in experiment.machines
    )
    return replace(experiment, replicas=machines)


def test_spans_equal_stepping_with_classes() -> None:
    reasons: set[str] = set()
    preemptions = events = iterations = 0
    for seed in range(15):
        experiment = a_run(seed)
        if experiment is None:
            continue
        columns = run_both_ways(experiment, check_invariants=seed % 4 == 0 and experiment.horizon_ns is None)
        reasons |= set(columns.reasons)
        preemptions += columns.meta["preemptions"]
        events += columns.meta["events"]
        iterations += len(columns.iterations()["start_ns"])
    assert TOO_LATE_FOR_ITS_CLASS in reasons
    assert preemptions > 5
    assert events < iterations


@pytest.mark.slow(reason="many random runs")
def test_spans_equal_stepping_with_classes_over_many_runs() -> None:
    for seed in some(range(1000, 3000)):
        experiment = a_run(seed)
        if experiment is not None:
            assert_same(run(experiment), run(experiment, fast_forward=False))


def test_classes_that_no_policy_asks_for_change_nothing() -> None:
    for seed in range(5):
        experiment = an_experiment(seed, speculative=False)
        workload = experiment.workload
        if not isinstance(workload, Trace):
            continue
        terms = [ServiceClass(name="a", weight=2.0, ttft_s=0.1), ServiceClass(name="b")]
        index = np.arange(len(workload)) % 2
        classed = with_classes(replace(workload, class_index=index, classes=("a", "b")), terms)
        columns = run(experiment)
        other = run(replace(experiment, workload=classed))
        for name, column in columns.requests.items():
            np.testing.assert_array_equal(column, other.requests[name], err_msg=name)
