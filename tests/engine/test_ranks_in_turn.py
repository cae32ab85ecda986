"""Ranks whose micro-batches take turns: with pipeline stages, with several micro-batches, and with other models on the machine."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import fields, replace
from heapq import heappop, heappush

import numpy as np
import pytest

from policies.classes import Preempt
from policies.published import OrcaPaged
from policies.ranks import PromptBalance
from policies.routers import LeastOutstanding, Prefix, RoundRobin
from policies.view import UNTIL_CHANGE, Plan, ReplicaView
from policies.vllm import Vllm
from policies.wrappers import Pad
from sim.engine import Columns, Experiment, InvariantError, MachineSpec, PolicyError, ReplicaSpec, run
from sim.engine.batch.micro_batch import MicroBatch
from sim.engine.batch.pricing import Pricing
from sim.engine.batch.rank_prices import IDLE, CommonPrices
from sim.engine.record.columns import ABORTED, FINISHED, LOST
from sim.engine.serve.iterations import Iterations
from sim.engine.spec.lifecycle import FleetSpec, Outage
from tests.engine.build import patches_the_engine
from tests.engine.costs import Linear, Ranked
from tests.engine.independent import TICKS, Batch, Model, Request, Rules
from tests.engine.random_runs import (
    an_experiment,
    apart,
    assert_same,
    run_both_ways,
    with_fleet,
    with_ranks,
    with_tiers,
)
from tests.engine.test_independent import TICK_S, compared, difference, some_rules, spec_of
from tests.sample import few, some
from workloads import Trace

US = 1_000
# Whole microseconds: a millisecond, and one more for each row of the fullest rank.
COST = Ranked(fixed_s=1e-3, row_s=1e-6)


def a_machine(*costs: Linear, ranks: int = 2, micro_batches: int | None = None, kv_blocks: int = 100) -> MachineSpec:
    hosted = tuple(
        ReplicaSpec(
            cost=cost,
            scheduler=OrcaPaged(8),
            kv_blocks=kv_blocks,
            micro_batches=micro_batches,
            model=model if len(costs) > 1 else None,
        )
        for model, cost in enumerate(costs)
    )
    return MachineSpec(hosted=hosted, ranks=ranks, rank_router=RoundRobin() if ranks > 1 else None)


def serve(
    machine: MachineSpec, arrivals_us: list[int], prompts: list[int], outputs: list[int], models: Sequence[int] = ()
) -> Columns:
    columns = {"model_index": list(models), "models": ("a", "b")} if models else {}
    trace = Trace(arrival_ns=[at * US for at in arrivals_us], prompt_tokens=prompts, output_tokens=outputs, **columns)
    experiment = Experiment(workload=trace, replicas=(machine,), router=RoundRobin())
    return run_both_ways(experiment)


def in_us(columns: Columns, name: str) -> list[int]:
    ns = columns.requests[name]
    assert not (ns[ns >= 0] % US).any()
    return (ns // US).tolist()


# By hand.


def test_micro_batches_of_all_ranks_pass_the_stages_together() -> None:
    cost = replace(COST, n_stages=2, shared_row_s=1e-6, transfer_row_s=1e-6)
    columns = serve(a_machine(cost), [0, 0, 500], [40, 100, 10], [2, 2, 1])
    # The fullest rank's 100 rows and the 140 of both: 1,240 us a stage. Each rank hands as many rows over as the fullest.
    first = 1240 + 200 + 1240
    # The third request is on rank 0 in the second micro-batch, and waits for the second stage.
    third = first + 1000 + 10 + 10
    # One row on each rank; the second stage is free when the third request has left it.
    last = third + 1000 + 1 + 2
    assert in_us(columns, "first_token_ns") == [first, first, third]
    assert in_us(columns, "scheduled_ns") == [0, 0, 1240]
    assert in_us(columns, "finish_ns") == [last, last, third]
    assert columns.requests["replica"].tolist() == [0, 1, 0]
    assert columns.meta["n_stages"] == 4


def test_micro_batches_of_ranks_take_turns_on_one_stage() -> None:
    columns = serve(a_machine(COST, micro_batches=2), [0, 0, 500], [40, 100, 10], [2, 1, 2])
    # The third request is in a micro-batch of its own, and does not decode beside the first.
    assert in_us(columns, "first_token_ns") == [1100, 1100, 1100 + 1010]
    assert in_us(columns, "finish_ns") == [2110 + 1001, 1100, 3111 + 1001]


def test_models_with_ranks_take_turns_on_one_machine() -> None:
    machine = a_machine(COST, replace(COST, fixed_s=2e-3))
    columns = serve(machine, [0] * 4, [40, 100, 10, 20], [2, 2, 1, 1], models=[0, 0, 1, 1])
    assert in_us(columns, "first_token_ns") == [1100, 1100, 1100 + 2020, 1100 + 2020]
    assert in_us(columns, "finish_ns") == [3120 + 1001, 3120 + 1001, 3120, 3120]
    assert columns.requests["replica"].tolist() == [0, 1, 2, 3]
    assert columns.meta["ranks"] == [(0, 1), (2, 3)]
    assert columns.meta["n_stages"] == 2


def test_the_model_whose_rank_has_the_oldest_request_goes_first() -> None:
    machine = replace(a_machine(COST, COST), turn="oldest")
    columns = serve(machine, [0, 100, 200], [40, 40, 40], [1, 1, 1], models=[1, 1, 0])
    assert in_us(columns, "scheduled_ns") == [0, 1040, 2080]


def test_each_rank_has_memory_of_its_own_for_all_of_its_micro_batches() -> None:
    # Two prompts of four blocks on each rank: of a pool of six one at a time is admitted, in whichever micro-batch.
    columns = serve(a_machine(COST, micro_batches=2, kv_blocks=6), [0] * 4, [60] * 4, [3] * 4)
    scheduled = in_us(columns, "scheduled_ns")
    assert scheduled[:2] == [0, 0]
    assert scheduled[2] == scheduled[3] == in_us(columns, "finish_ns")[0]


def test_of_many_micro_batches_ranks_make_those_that_are_needed() -> None:
    machine = a_machine(replace(COST, n_stages=2), micro_batches=1000)
    machine = replace(machine, hosted=(replace(machine.hosted[0], scheduler=OrcaPaged(1)),))
    columns = serve(machine, [0] * 6, [40] * 6, [3] * 6)
    # At 3,081 us the first has begun to decode, and the second is on the last stage.
    assert in_us(columns, "scheduled_ns") == [0, 0, 1040, 1040, 3081, 3081]
    assert [set(replica.spans["lane"]) for replica in columns.replicas] == [{0, 1, 2}] * 2


def test_a_stage_is_recorded_for_each_rank_that_it_works_for() -> None:
    columns = serve(a_machine(replace(COST, n_stages=2)), [0, 0, 0], [40, 100, 20], [1, 1, 1])
    found = [replica.stages for replica in columns.replicas]
    assert [len(stages) for stages in found] == [2, 2]
    assert [stages["stage"].tolist() for stages in found] == [[0, 1]] * 2
    assert [stages["duration_ns"].tolist() for stages in found] == [[1100 * US] * 2] * 2
    assert [replica.busy_ns() for replica in columns.replicas] == [2 * 1100 * US] * 2


def test_drafts_of_ranks_run_with_the_first_stage() -> None:
    cost, draft = replace(COST, n_stages=2), Linear(fixed_s=1e-4)
    prices = CommonPrices(Pricing(cost, draft, 0.0), 2)
    ranks = [IDLE._replace(rows=4 * n, decode_seqs=n, logit_rows=4 * n) for n in (2, 5)]
    us = [1000 + 20 + 300, 1000 + 20]
    assert prices.common_stages(ranks, [1, 3])[0] == [each * US * TICKS for each in us]


def test_a_stage_of_one_rank_among_idle_ones_is_priced_with_them() -> None:
    cost = replace(COST, n_stages=2, shared_s=1e-4, transfer_row_s=1e-6)
    totals = IDLE._replace(rows=30, prefill_rows=30)
    pricing = Pricing(cost, None, 0.0)
    assert CommonPrices(pricing, 3).stages(totals, 0) == ([1130 * US * TICKS] * 2, 90 * US * TICKS)
    unshared = Pricing(replace(cost, shared_s=0.0), None, 0.0)
    assert CommonPrices(unshared, 1).stages(totals, 0) == unshared.stages(totals, 0)


@pytest.mark.parametrize("kind", ["stages", "micro-batches", "models"])
def test_prompts_of_ranks_wait_for_each_other_in_turns_too(kind: str) -> None:
    """With the balance a prompt waits until the other rank has one as well, in every micro-batch that decodes on both."""
    cost = replace(COST, n_stages=2) if kind == "stages" else COST
    machine = a_machine(
        *(cost, cost) if kind == "models" else (cost,), micro_batches=1 if kind != "micro-batches" else 2
    )
    balanced = replace(machine, prompt_balance=PromptBalance(timeout_iters=50, batching_wait_iters=0))
    # Requests 0 to 3 fill both ranks of each micro-batch with decodes; 4 comes alone, 5 for the other rank later.
    n_first = 4 if kind == "micro-batches" else 2
    arrivals = [0] * 2 + [100] * (n_first - 2) + [8000, 20_000]
    models = [0] * len(arrivals) if kind == "models" else []
    work = (arrivals, [40] * len(arrivals), [60] * n_first + [2, 2])
    waits, starts = serve(balanced, *work, models), serve(machine, *work, models)
    early, late = starts.requests["scheduled_ns"][-2:]
    assert early < 11_000 * US < 20_000 * US < late
    assert (waits.requests["scheduled_ns"][-2:] > 20_000 * US).all()


@pytest.mark.parametrize(("n_stages", "expected_us"), [(1, 1040 + 2 * 1001), (2, 2 * 1040 + 2 * 1001)])
def test_prompts_do_not_wait_for_decodes_whose_clients_have_gone(n_stages: int, expected_us: int) -> None:
    """Both ranks decode when a prompt comes, and both of these clients go: the prompt starts when the step in flight ends."""
    machine = a_machine(replace(COST, n_stages=n_stages), micro_batches=1)
    balance = PromptBalance(timeout_iters=50, batching_wait_iters=0)
    trace = Trace(
        arrival_ns=[0, 0, 1500 * US],
        prompt_tokens=[40] * 3,
        output_tokens=[20, 20, 2],
        abort_ns=[2500 * US, 2500 * US, -1],
    )
    experiment = Experiment(workload=trace, replicas=(replace(machine, prompt_balance=balance),), router=RoundRobin())
    columns = run_both_ways(experiment)
    assert columns.requests["status"].tolist() == [ABORTED, ABORTED, FINISHED]
    assert in_us(columns, "scheduled_ns")[2] == expected_us


def test_ranks_are_asked_once_at_an_instant_for_all_of_their_empty_micro_batches() -> None:
    asked = Counter[int]()

    def not_before_60_ms(view: ReplicaView, /) -> Plan:
        asked[view.now_ns // US] += 1
        if 50_000 * US <= view.now_ns < 60_000 * US:
            return Plan(until_ns=60_000 * US)
        return OrcaPaged(1).plan(view)

    machine = a_machine(replace(COST, n_stages=2), micro_batches=3)
    machine = replace(machine, hosted=(replace(machine.hosted[0], scheduler=not_before_60_ms),))
    # The first six fill three micro-batches of each rank and are long gone.
    trace = Trace(arrival_ns=[0] * 6 + [50_000 * US] * 2, prompt_tokens=[40] * 8, output_tokens=[3] * 8)
    columns = run(Experiment(workload=trace, replicas=(machine,), router=RoundRobin()))
    assert in_us(columns, "scheduled_ns")[6:] == [60_000] * 2
    assert asked[50_000] == asked[60_000] == 2


def test_ranks_are_asked_for_an_empty_micro_batch_although_another_one_waits() -> None:
    def decodes_from_60_ms_on(view: ReplicaView, /) -> Plan:
        if view.n_decoding and view.now_ns < 60_000 * US:
            return Plan(until_ns=60_000 * US)
        return OrcaPaged(1).plan(view)

    machine = a_machine(COST, micro_batches=2)
    machine = replace(machine, hosted=(replace(machine.hosted[0], scheduler=decodes_from_60_ms_on),))
    # The first two wait to decode, in the first micro-batch; the next two end with their prompt, in the second.
    columns = serve(machine, [0] * 4 + [20_000] * 2, [40] * 6, [3, 3, 1, 1, 1, 1])
    assert in_us(columns, "scheduled_ns") == [0, 0, 1040, 1040, 20_000, 20_000]


def test_ranks_in_turn_that_plan_nothing_although_there_is_work_are_an_error() -> None:
    def idle(view: ReplicaView, /) -> Plan:
        return Plan(hold=UNTIL_CHANGE)

    machine = a_machine(COST, micro_batches=2)
    machine = replace(machine, hosted=(replace(machine.hosted[0], scheduler=idle),))
    trace = Trace(arrival_ns=[0, 0], prompt_tokens=[5, 5], output_tokens=[5, 5])
    with pytest.raises(PolicyError, match=r"planned nothing at t=0\.000000 s on rank 0 with 1 waiting"):
        run(Experiment(workload=trace, replicas=(machine,), router=RoundRobin()))


def test_a_request_takes_the_seat_of_one_whose_client_has_gone_while_prompts_of_ranks_wait_for_each_other() -> None:
    balance = PromptBalance(timeout_iters=50, batching_wait_iters=0)
    machine = replace(a_machine(replace(COST, n_stages=2)), prompt_balance=balance)
    machine = replace(machine, hosted=(replace(machine.hosted[0], scheduler=Vllm(max_num_seqs=1)),))
    # The last one waits for the seat of the first, which is in the second of two micro-batches to be asked.
    trace = Trace.from_arrays(
        arrival_ns=[0, 0, 10 * US], prompt_tokens=[40] * 3, output_tokens=[50, 2, 3], abort_s=[20e-3, np.nan, np.nan]
    )
    columns = run(Experiment(workload=trace, replicas=(machine,), router=RoundRobin()), check_invariants=True)
    assert columns.requests["status"].tolist() == [ABORTED, FINISHED, FINISHED]


def of_clients_that_leave(rng: random.Random) -> Experiment:
    stages, n = rng.choice([1, 2]), 8
    scheduler: Vllm | Preempt = Vllm(max_num_seqs=rng.choice([1, 2]), max_num_batched_tokens=64)
    scheduler = Preempt(Pad(scheduler, 64)) if rng.random() < 0.5 else scheduler
    balance = PromptBalance(timeout_iters=rng.choice([1, 5]), batching_wait_iters=rng.choice([0, 3]))
    machine = a_machine(replace(COST, n_stages=stages), micro_batches=rng.choice([2, 3]))
    spec = replace(machine.hosted[0], scheduler=scheduler, kv_blocks=rng.choice([8, 40]))
    machine = replace(machine, hosted=(spec,), prompt_balance=balance if rng.random() < 0.8 else None)
    trace = Trace.from_arrays(
        arrival_ns=sorted(rng.randrange(100_000) * US for _ in range(n)),
        prompt_tokens=[rng.randrange(1, 80) for _ in range(n)],
        output_tokens=[rng.randrange(1, 40) for _ in range(n)],
        priority=[rng.randrange(2) for _ in range(n)],
        abort_s=[rng.choice([np.nan, rng.uniform(1e-3, 40e-3)]) for _ in range(n)],
    )
    return Experiment(workload=trace, replicas=(machine,), router=RoundRobin())


@pytest.mark.parametrize("seeds", few([range(8), some(range(8, 400))]))
def test_clients_that_leave_ranks_in_turn_leave_no_other_request_waiting(seeds: range) -> None:
    for seed in seeds:
        experiment = of_clients_that_leave(random.Random(f"clients that leave, {seed}"))
        columns = run_both_ways(experiment, check_invariants=seed % 4 == 0)
        assert set(columns.requests["status"].tolist()) <= {ABORTED, FINISHED}, seed


@pytest.mark.parametrize("at_us", [500, 1500, 9000])
def test_ranks_in_turn_that_fail_are_free_when_the_machine_is_back(at_us: int) -> None:
    machine = a_machine(replace(COST, n_stages=2))
    back = at_us + 20
    trace = Trace(arrival_ns=[0, 0, back * US], prompt_tokens=[40] * 3, output_tokens=[50, 50, 2])
    outage = Outage(machine=0, at_s=at_us * 1e-6, for_s=10e-6)
    fleet = FleetSpec(pools=(0,), names=("all",), scaling=(None,), failing=(None,), outages=(outage,), in_flight="lose")
    experiment = Experiment(workload=trace, replicas=(machine,), router=RoundRobin(), fleet=fleet)
    columns = run_both_ways(experiment)
    assert columns.requests["status"].tolist() == [LOST, LOST, FINISHED]
    assert in_us(columns, "finish_ns")[2] == back + 2 * 1040 + 2 * 1001


@patches_the_engine
def test_ranks_that_leave_the_last_stage_apart_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Iterations.launch

    def longer(iterations: Iterations, batch: MicroBatch, ticks: int, end: int, *rest: object) -> None:
        launch(iterations, batch, ticks, end + len(batch.admitted), *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Iterations, "launch", longer)
    trace = Trace(arrival_ns=[0] * 3, prompt_tokens=[40] * 3, output_tokens=[3] * 3)
    machine = a_machine(COST, micro_batches=2)
    with pytest.raises(InvariantError, match="INV-8 at t="):
        run(Experiment(workload=trace, replicas=(machine,), router=RoundRobin()), check_invariants=True)


# A second model.


def serve_together(
    requests: Sequence[Request], models: Sequence[Rules], n_ranks: int, shared: int, shared_row: int, sent_row: int
) -> None:
    """The i-th micro-batches of all ranks of a model enter the stages at once: a stage takes what the fullest rank takes, *shared*
    ticks, and *shared_row* for each row of all; a hand-over *sent_row* for each row of as many ranks as full as the fullest."""
    groups = [[Model(rules) for _ in range(n_ranks)] for rules in models]
    idle = [deque(range(rules.micro_batches)) for rules in models]
    free = [0] * models[0].n_stages
    flying: list[tuple[int, int, int, int]] = []
    turns, first, sent = [0] * len(models), 0, 0
    coming = deque(requests)
    look: int | None = None
    while coming or flying or look is not None:
        now = min(
            [each.arrival for each in list(coming)[:1]] + [each[0] for each in flying[:1]] + [look] * (look is not None)
        )
        while coming and coming[0].arrival == now:
            request = coming.popleft()
            group, turns[request.model] = groups[request.model], turns[request.model] + 1
            rank = group[(turns[request.model] - 1) % n_ranks]
            most = max(request.prompt, 1) + max(request.output - 1, 0)
            too_long = rank.rules.longest is not None and request.prompt + request.output > rank.rules.longest
            if too_long or rank.rules.held(most) > rank.rules.blocks:
                request.status = "rejected"
            else:
                rank.queue.append(request)
                look = now if free[0] // TICKS <= now else look
        while flying and flying[0][0] == now:
            _, _, index, i = heappop(flying)
            for rank in groups[index]:
                if rank.all[i].steps is not None:
                    rank.end(rank.all[i], now, lambda _request, _now: None)
            idle[index].append(i)
            look = now if free[0] // TICKS <= now else look
        if look != now:
            continue
        look = None
        for index in [(first + k) % len(models) for k in range(len(models))]:
            for _ in range(len(idle[index])):
                i = idle[index].popleft()
                begun: list[tuple[Batch, int, int]] = []
                at = max(free[0], now * TICKS)
                for rank in groups[index]:
                    steps = rank.plan(rank.all[i])
                    if steps:
                        rows = sum(tokens or 1 for _, tokens in ((who, t) for who, t in steps))
                        begun.append((rank.all[i], rank.start(rank.all[i], steps, now), rows))
                if not begun:
                    idle[index].append(i)
                    continue
                ticks = max(own for _, own, _ in begun) + shared + shared_row * sum(rows for _, _, rows in begun)
                handover = models[index].handover + sent_row * n_ranks * max(rows for _, _, rows in begun)
                for stage, was in enumerate(free):
                    free[stage] = max(at, was) + ticks
                    at = free[stage] + handover
                sent += 1
                heappush(flying, (free[-1] // TICKS, sent, index, i))
                first, look = (index + 1) % len(models), free[0] // TICKS
                break
            if look is not None:
                break


def both(seed: int, *, off_by: int = 0) -> tuple[list[Request], Columns]:
    """One random case by both models; *off_by*: ticks that a row of all ranks costs the second one more."""
    rng = random.Random(seed)
    n, n_ranks, n_models = rng.randrange(1, 60), rng.randrange(2, 5), rng.choice([1, 1, 2])
    n_stages = rng.choice([1, 2, 2, 3])
    models = [some_rules(rng, n_stages, i if n_models > 1 else None) for i in range(n_models)]
    if n_models == n_stages == 1:
        models = [replace(models[0], micro_batches=rng.choice([2, 3]))]
    prompt = [rng.randrange(0, 80) for _ in range(n)]
    output = [rng.randrange(0, 50) if tokens else rng.randrange(1, 50) for tokens in prompt]
    grid, last = rng.choice([1, 10**6, 5 * 10**6]), rng.choice([1, 10**7, 10**8, 10**9])
    arrival = sorted(rng.randrange(last + 1) // grid * grid for _ in range(n))
    model = [rng.randrange(n_models) for _ in range(n)]
    shared, shared_row = rng.choice([0, TICKS * 10**5]), rng.choice([0, rng.randrange(TICKS * 10**4)])
    sent_row = rng.choice([0, rng.randrange(TICKS * 10**4)]) if n_stages > 1 else 0
    requests = [Request(i, prompt[i], output[i], arrival=arrival[i], model=model[i]) for i in range(n)]
    serve_together(requests, models, n_ranks, shared, shared_row + off_by, sent_row)
    hosted = []
    for rules in models:
        spec = spec_of(rules)
        assert isinstance(spec.cost, Linear)
        own = {field.name: getattr(spec.cost, field.name) for field in fields(Linear)}
        cost = Ranked(
            **own, shared_s=shared * TICK_S, shared_row_s=shared_row * TICK_S, transfer_row_s=sent_row * TICK_S
        )
        hosted.append(replace(spec, cost=cost))
    machine = MachineSpec(hosted=tuple(hosted), ranks=n_ranks, rank_router=RoundRobin())
    columns = {"model_index": model, "models": ("a", "b")} if n_models > 1 else {}
    trace = Trace(arrival_ns=arrival, prompt_tokens=prompt, output_tokens=output, **columns)
    return requests, run(Experiment(workload=trace, replicas=(machine,), router=RoundRobin()))


def test_ranks_in_turn_equal_a_second_model_of_their_rules() -> None:
    seen = compared(both)
    assert seen["finished"] > 100
    assert seen["preempted"] > 10


@pytest.mark.slow(reason="many random runs")
@pytest.mark.parametrize("first", range(1000, 4000, 1000))
def test_ranks_in_turn_equal_a_second_model_of_their_rules_over_many_runs(first: int) -> None:
    for seed in some(range(first, first + 1000)):
        assert difference(*both(seed)) is None, f"seed {seed}"


def test_the_comparison_notices_a_row_of_all_ranks_that_costs_a_nanosecond_more() -> None:
    assert sum(difference(*both(seed, off_by=TICKS)) is not None for seed in range(8)) >= 6


# Over random runs.


def in_turn(spec: MachineSpec) -> bool:
    first = spec.hosted[0]
    return spec.ranks > 1 and (len(spec.hosted) > 1 or first.cost.n_stages > 1 or (first.micro_batches or 1) > 1)


def random_ranks(cases: Sequence[int]) -> list[Experiment]:
    found = [with_ranks(an_experiment(case, speculative=case % 2 == 0), case, in_turn=True) for case in cases]
    return [experiment for experiment in found if any(in_turn(machine) for machine in experiment.machines)]


def test_random_runs_have_ranks_of_every_kind() -> None:
    machines = [machine for each in random_ranks(range(60)) for machine in each.machines if in_turn(machine)]
    assert any(machine.hosted[0].cost.n_stages > 1 for machine in machines)
    assert any(machine.hosted[0].cost.n_stages == 1 and len(machine.hosted) == 1 for machine in machines)
    assert any(len(machine.hosted) > 1 for machine in machines)
    assert any(machine.prompt_balance is not None for machine in machines)
    assert any(spec.decoding is not None for machine in machines for spec in machine.hosted)


def test_ranks_in_turn_step_as_they_fast_forward() -> None:
    for experiment in random_ranks(range(10)):
        assert_same(run(experiment), run(experiment, fast_forward=False))


def test_the_invariants_hold_for_ranks_in_turn_at_every_event() -> None:
    for experiment in random_ranks(range(24, 28)):
        assert_same(run(experiment), run(experiment, check_invariants=True))


@pytest.mark.slow(reason="many random runs")
@pytest.mark.parametrize("first", range(1000, 4000, 500))
def test_ranks_in_turn_step_as_they_fast_forward_over_many_runs(first: int) -> None:
    for experiment in random_ranks(some(range(first, first + 500))):
        assert_same(run(experiment), run(experiment, fast_forward=False, check_invariants=True))


def everything(case: int) -> Experiment:
    """Ranks in turn between machines that prefill and that decode, with tiers, and in fleets that change."""
    experiment = with_ranks(
        (apart if case % 3 == 0 else an_experiment)(case, speculative=case % 4 == 1), case, in_turn=True
    )
    if case % 2:
        experiment = with_tiers(experiment, case)
    return with_fleet(experiment, case) if case % 5 < 2 and isinstance(experiment.workload, Trace) else experiment


def test_ranks_in_turn_hand_over_and_load_and_fail() -> None:
    for case in range(2):
        assert_same(run(everything(case)), run(everything(case), fast_forward=False, check_invariants=True))


@pytest.mark.slow(reason="many random runs")
@pytest.mark.parametrize("first", range(1000, 3000, 500))
def test_ranks_in_turn_hand_over_and_load_and_fail_over_many_runs(first: int) -> None:
    for case in some(range(first, first + 500)):
        assert_same(run(everything(case)), run(everything(case), fast_forward=False, check_invariants=True))


def test_tokens_of_ranks_in_turn_balance() -> None:
    for experiment in random_ranks(range(200, 210)):
        columns = run(experiment)
        requests, iterations = columns.requests, columns.iterations()
        done = requests["status"] == FINISHED
        np.testing.assert_array_equal(requests["emitted_tokens"][done], requests["output_tokens"][done])
        assert iterations["emitted_tokens"].sum() == requests["emitted_tokens"].sum()
        total = np.array([core.kv_blocks for core in experiment.hosted])
        assert (iterations["kv_blocks_used"] <= total[iterations["replica"]]).all()


class ToTheFirst:
    """Sends every request to the first rank."""

    def route(self, request: object, replicas: object, /) -> int:
        return 0


def test_a_machine_that_uses_one_of_its_ranks_is_the_machine_without() -> None:
    """Where ranks do nothing together, and idle ones nothing at all, pipelines, micro-batches and shared machines are as they are
    without ranks."""
    seen = 0
    for case in range(15):
        plain = an_experiment(case, speculative=False)
        # Each machine by its index is the same in both, whatever its loads: routers between machines see no difference.
        plain = replace(plain, router=RoundRobin())
        ranked = tuple(
            replace(
                spec,
                hosted=tuple(
                    replace(
                        core,
                        cost=Ranked(**{field.name: getattr(core.cost, field.name) for field in fields(Linear)}),
                    )
                    for core in spec.hosted
                ),
                ranks=3,
                rank_router=ToTheFirst(),
            )
            for spec in plain.machines
        )
        if not any(map(in_turn, ranked)):
            continue
        seen += 1
        one, several = run(plain), run(replace(plain, replicas=ranked))
        for name, column in one.requests.items():
            if name != "replica":
                np.testing.assert_array_equal(column, several.requests[name], err_msg=f"case {case}: {name}")
    assert seen > 10


def test_a_router_sees_what_any_rank_of_its_model_has_cached() -> None:
    """Between two machines that host both models on two ranks the one is chosen whose rank has the prompt's beginning."""
    machine = a_machine(COST, COST)
    machine = replace(
        machine, hosted=tuple(replace(core, prefix_cache="blocks") for core in machine.hosted), rank_router=Prefix()
    )
    trace = Trace(
        arrival_ns=[0, 0, 10**8],
        prompt_tokens=[48, 32, 48],
        output_tokens=[2, 2, 2],
        model_index=[1, 1, 1],
        models=("a", "b"),
        prefix_blocks=[7, 8, 9, 5, 6, 7, 8, 9],
        prefix_offsets=[0, 3, 5, 8],
        prefix_block_tokens=16,
    )
    columns = run(Experiment(workload=trace, replicas=(machine, machine), router=Prefix()))
    assert columns.requests["replica"][2] == columns.requests["replica"][0]


# Refusals.


@pytest.mark.parametrize("changes", [{"n_stages": 2}, {}])
def test_every_model_of_a_machine_with_ranks_says_what_they_take_together(changes: dict[str, int]) -> None:
    other = ReplicaSpec(cost=Linear(**changes), scheduler=OrcaPaged(8), kv_blocks=100, model=1)  # type: ignore[arg-type]
    one = replace(other, cost=replace(COST, **changes), model=0)
    with pytest.raises(ValueError, match="does not say what a step of 2 ranks takes"):
        MachineSpec(hosted=(one, other), ranks=2, rank_router=LeastOutstanding())
