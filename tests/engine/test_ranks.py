"""Ranks that step together: beside a second model, by hand, and span for span."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from policies.published import OrcaPaged
from policies.ranks import PromptBalance
from policies.routers import LeastOutstanding, LlmD, RoundRobin, Router
from policies.schedulers import Sarathi
from policies.trtllm import TrtLlm
from policies.view import UNTIL_CHANGE, Plan, ReplicaView
from sim.engine import Columns, Experiment, InvariantError, MachineSpec, PolicyError, ReplicaSpec, StageTable, run
from sim.engine.batch.micro_batch import MicroBatch
from sim.engine.batch.pricing import Pricing
from sim.engine.batch.rank_prices import IDLE, CommonPrices
from sim.engine.machine import together
from sim.engine.record.columns import FINISHED, LOST
from sim.engine.serve.iterations import Iterations
from sim.engine.spec.lifecycle import FleetSpec, Outage
from tests.engine.build import patches_the_engine
from tests.engine.costs import Linear, Ranked
from tests.engine.independent import TICKS, Model, Request, Rules
from tests.engine.random_runs import HoldsTooLong, an_experiment, assert_same, run_both_ways, with_ranks
from tests.engine.test_independent import TICK_S, compared, difference, some_rules, spec_of
from tests.sample import few, some
from workloads import ClosedLoop, Trace

US = 1_000


# A second model.


def serve_on_ranks(requests: Sequence[Request], rules: Rules, n_ranks: int, shared: int, shared_row: int) -> None:
    """Requests go to ranks in turn; a step takes what the slowest takes, *shared* ticks, and *shared_row* for each row of all."""
    ranks = [Model(rules) for _ in range(n_ranks)]
    coming = deque(requests)
    end: int | None = None
    at = turn = 0
    while coming or end is not None:
        now = min([request.arrival for request in list(coming)[:1]] + ([] if end is None else [end // TICKS]))
        while coming and coming[0].arrival == now:
            request, rank = coming.popleft(), ranks[turn % n_ranks]
            turn += 1
            most = max(request.prompt, 1) + max(request.output - 1, 0)
            too_long = rules.longest is not None and request.prompt + request.output > rules.longest
            if too_long or rules.held(most) > rules.blocks:
                request.status = "rejected"
            else:
                rank.queue.append(request)
        if end is not None and end // TICKS > now:
            continue
        at = max(at, now * TICKS) if end is None else end
        if end is not None:
            for rank in ranks:
                if rank.all[0].steps is not None:
                    rank.end(rank.all[0], now, lambda _request, _now: None)
        own, rows = [], 0
        for rank in ranks:
            steps = rank.plan(rank.all[0])
            if steps:
                own.append(rank.start(rank.all[0], steps, now))
                rows += sum(tokens or 1 for _, tokens in steps)
        end = at + max(own) + shared + shared_row * rows if own else None


def both(seed: int, *, off_by: int = 0) -> tuple[list[Request], Columns]:
    """One random case by both models; *off_by*: ticks that a row of all ranks costs the second one more."""
    rng = random.Random(seed)
    rules = replace(some_rules(rng, 1, None), micro_batches=1)
    n, n_ranks = rng.randrange(1, 60), rng.randrange(2, 5)
    prompt = [rng.randrange(0, 80) for _ in range(n)]
    output = [rng.randrange(0, 50) if tokens else rng.randrange(1, 50) for tokens in prompt]
    grid, last = rng.choice([1, 10**6, 5 * 10**6]), rng.choice([1, 10**7, 10**8, 10**9])
    arrival = sorted(rng.randrange(last + 1) // grid * grid for _ in range(n))
    shared, shared_row = rng.choice([0, TICKS * 10**5]), rng.choice([0, rng.randrange(TICKS * 10**4)])
    requests = [Request(i, prompt[i], output[i], arrival=arrival[i]) for i in range(n)]
    serve_on_ranks(requests, rules, n_ranks, shared, shared_row + off_by)
    spec = spec_of(rules)
    assert isinstance(spec.cost, Linear)
    cost = ranked(spec.cost, shared_s=shared * TICK_S, shared_row_s=shared_row * TICK_S)
    machine = MachineSpec(hosted=(replace(spec, cost=cost),), ranks=n_ranks, rank_router=RoundRobin())
    trace = Trace(arrival_ns=arrival, prompt_tokens=prompt, output_tokens=output)
    return requests, run(Experiment(workload=trace, replicas=(machine,), router=RoundRobin()))


def ranked(cost: Linear, **shared: float) -> Ranked:
    return Ranked(fixed_s=cost.fixed_s, row_s=cost.row_s, pair_s=cost.pair_s, kv_s=cost.kv_s, **shared)


def test_ranks_equal_a_second_model_of_their_rules() -> None:
    seen = compared(both)
    assert seen["finished"] > 100
    assert seen["preempted"] > 10


def test_the_comparison_notices_a_row_that_costs_a_nanosecond_more() -> None:
    assert sum(difference(*both(seed, off_by=TICKS)) is not None for seed in range(8)) >= 6


# By hand.

# Whole microseconds, so that lines of decodes are exact.
COST = Ranked(fixed_s=1e-3, row_s=1e-6, kv_s=0.0)


def replay(
    ranks: int, arrivals_us: list[int], prompts: list[int], outputs: list[int], *,
    cost: Linear = COST, router: Router | None = None, fast_forward: bool = True, scheduler: object = None, kv_blocks: int = 100,
) -> Columns:  # fmt: skip
    spec = ReplicaSpec(cost=cost, scheduler=scheduler or OrcaPaged(8), kv_blocks=kv_blocks)  # type: ignore[arg-type]
    rank_router = (router or RoundRobin()) if ranks > 1 else None
    machine = MachineSpec(hosted=(spec,), ranks=ranks, rank_router=rank_router)
    trace = Trace(arrival_ns=[at * US for at in arrivals_us], prompt_tokens=prompts, output_tokens=outputs)
    return run(Experiment(workload=trace, replicas=(machine,), router=RoundRobin()), fast_forward=fast_forward)


@pytest.mark.parametrize("n_ranks", [2, 3, 8])
def test_identical_ranks_with_identical_work_take_one_ranks_times(n_ranks: int) -> None:
    work = ([0, 2500, 2500], [40, 7, 30], [20, 9, 1])
    one = replay(1, *work)
    all_ = replay(n_ranks, *([each for each in column for _ in range(n_ranks)] for column in work))
    for name in ("scheduled_ns", "first_token_ns", "finish_ns"):
        np.testing.assert_array_equal(all_.requests[name], np.repeat(one.requests[name], n_ranks))
    assert set(all_.requests["replica"].tolist()) == set(range(n_ranks))


def test_one_loaded_rank_steps_as_a_machine_alone_and_idle_ones_take_no_time() -> None:
    class First:
        def route(self, request: object, replicas: object, /) -> int:
            return 0

    work = ([0, 0, 5000], [40, 30, 20], [20, 9, 5])
    loaded = replay(4, *work, router=First())
    alone = replay(1, *work)
    np.testing.assert_array_equal(loaded.requests["finish_ns"], alone.requests["finish_ns"])
    assert [len(replica.spans) > 0 for replica in loaded.replicas] == [True, False, False, False]


def test_the_slowest_rank_and_what_all_do_together_set_the_step() -> None:
    # Rank 0 computes 40 prompt tokens and rank 1 computes 100, then each decodes once.
    cost = Ranked(fixed_s=1e-3, row_s=1e-6, shared_s=2e-4, shared_row_s=1e-6)
    columns = replay(2, [0, 0], [40, 100], [2, 2], cost=cost)
    first = 1000 + 100 + 200 + 140
    assert columns.requests["first_token_ns"].tolist() == [first * US] * 2
    assert columns.requests["finish_ns"].tolist() == [(first + 1000 + 1 + 200 + 2) * US] * 2


def test_ranks_that_draft_by_themselves_do_so_at_once() -> None:
    draft = Linear(fixed_s=1e-4)
    prices = CommonPrices(Pricing(COST, draft, 0.0), 2)
    ranks = [IDLE._replace(rows=4 * n, decode_seqs=n, logit_rows=4 * n) for n in (2, 5)]
    # The target checks 8 and 20 rows, the slower 20; drafts take a pass of 100 us a token, the longer three.
    assert prices.step(ranks, [1, 3]) == round((1e-3 + 20e-6 + 3e-4) * 1e9) * TICKS


def test_who_comes_to_an_idle_rank_during_a_step_waits_for_its_end() -> None:
    columns = replay(2, [0, 400], [40, 100], [3, 1])
    # The first step takes 1,040 us, in the second rank 1 computes its prompt while rank 0 decodes.
    assert columns.requests["scheduled_ns"].tolist() == [0, 1040 * US]
    assert columns.requests["first_token_ns"].tolist() == [1040 * US, (1040 + 1100) * US]
    assert columns.requests["finish_ns"][0] == (1040 + 1100 + 1001) * US


def test_ranks_rest_when_none_has_work_and_start_when_somebody_comes() -> None:
    columns = replay(2, [0, 9000], [40, 40], [1, 1])
    assert columns.requests["finish_ns"].tolist() == [1040 * US, (9000 + 1040) * US]
    assert columns.meta["events"] == 2


def test_steps_in_which_all_ranks_decode_the_same_are_one_event_that_an_arrival_cuts() -> None:
    alike = replay(2, [0, 0], [40, 40], [300, 300])
    assert alike.meta["events"] < 5
    cut = replay(2, [0, 0, 100_500], [40, 40, 40], [300, 300, 1])
    # The 100th step after the first ends 1,040 + 100 x 1,001 us after the start.
    assert cut.requests["scheduled_ns"][2] == (1040 + 100 * 1001) * US
    assert_same(cut, replay(2, [0, 0, 100_500], [40, 40, 40], [300, 300, 1], fast_forward=False))


def test_who_comes_while_all_seats_are_taken_does_not_cut_the_steps_in_flight() -> None:
    one_seat = OrcaPaged(1)
    work = ([0, 0, 100_500], [40, 40, 40], [300, 300, 1])
    waits = replay(2, *work, scheduler=one_seat)
    assert waits.requests["scheduled_ns"][2] == waits.requests["finish_ns"][0]
    assert waits.meta["events"] == replay(2, *([each[:2] for each in work]), scheduler=one_seat).meta["events"] + 1


def test_steps_alike_end_when_a_plan_does() -> None:
    until_ns = 100_500 * US

    def patient(view: ReplicaView, /) -> Plan:
        """Admits nobody beside decodes before an instant."""
        if view.n_decoding and view.now_ns < until_ns:
            return Plan(decode=True, hold=UNTIL_CHANGE, through_arrivals=True, until_ns=until_ns)
        run = tuple((seq.id, seq.tokens) for seq in view.waiting)
        return Plan(decode=view.n_decoding > 0, run=run, hold=1 if run else UNTIL_CHANGE)

    work = ([0, 0, 5000], [40, 40, 40], [300, 300, 1])
    found = replay(2, *work, scheduler=patient)
    # Steps of 1,001 us: the first after that instant.
    assert found.requests["scheduled_ns"][2] == (1040 + 100 * 1001) * US
    assert_same(found, replay(2, *work, scheduler=patient, fast_forward=False))


def test_a_plan_that_holds_for_so_many_steps_is_carried_out_so_often() -> None:
    def patient(view: ReplicaView, /) -> Plan:
        """Admits all that wait whenever it is asked, which is after twenty steps of decodes."""
        run = tuple((seq.id, seq.tokens) for seq in view.waiting)
        return Plan(decode=view.n_decoding > 0, run=run, hold=1 if run else 20, through_arrivals=not run)

    work = ([0, 0, 5000], [40, 40, 40], [300, 300, 1])
    assert replay(2, *work, scheduler=patient).requests["scheduled_ns"][2] == (1040 + 20 * 1001) * US


def test_each_rank_has_memory_of_its_own() -> None:
    # Two prompts of four blocks: of a pool of six one machine admits one at a time, each of two ranks its own.
    assert replay(1, [0, 0], [64, 64], [2, 2], kv_blocks=6).requests["scheduled_ns"].tolist()[1] > 0
    columns = replay(2, [0, 0], [64, 64], [2, 2], kv_blocks=6)
    assert columns.requests["scheduled_ns"].tolist() == [0, 0]
    assert columns.meta["kv_blocks_total"] == [6, 6]


def test_what_can_never_fit_a_rank_is_rejected_although_all_ranks_together_had_room() -> None:
    columns = replay(2, [0], [100], [2], kv_blocks=6)
    assert columns.reasons == ("needs 7 KV blocks for prompt and output but the replica has 6",)


def test_one_machine_with_ranks_beside_one_without() -> None:
    spec = ReplicaSpec(cost=COST, scheduler=OrcaPaged(8), kv_blocks=100)
    with_two = MachineSpec(hosted=(spec,), ranks=2, rank_router=LeastOutstanding())
    trace = Trace(arrival_ns=[0] * 4, prompt_tokens=[40] * 4, output_tokens=[3] * 4)
    experiment = Experiment(workload=trace, replicas=(with_two, spec), router=RoundRobin())
    columns = run(experiment, check_invariants=True)
    assert columns.requests["replica"].tolist() == [0, 2, 1, 2]
    assert columns.meta["ranks"] == [(0, 1)]
    assert len(experiment.hosted) == len(columns.replicas) == 3


# Prompts that wait for each other.


def with_balance(balance: PromptBalance, arrivals_us: list[int], outputs: list[int]) -> Columns:
    spec = ReplicaSpec(cost=COST, scheduler=OrcaPaged(8), kv_blocks=100)
    machine = MachineSpec(hosted=(spec,), ranks=2, rank_router=RoundRobin(), prompt_balance=balance)
    trace = Trace(arrival_ns=[at * US for at in arrivals_us], prompt_tokens=[40] * len(outputs), output_tokens=outputs)
    return run(Experiment(workload=trace, replicas=(machine,), router=RoundRobin()), check_invariants=True)


def test_a_prompt_waits_until_every_rank_has_one() -> None:
    # Two decode from 1,040 us on, steps of 1,001 us; the third prompt comes in the second step, the fourth in the fourth.
    balance = PromptBalance(timeout_iters=50, batching_wait_iters=0)
    columns = with_balance(balance, [0, 0, 1500, 3500], [20, 20, 2, 2])
    fifth = 1040 + 3 * 1001
    assert columns.requests["scheduled_ns"].tolist() == [0, 0, fifth * US, fifth * US]


def test_a_prompt_waits_no_longer_than_its_steps_and_not_for_a_rank_that_has_nothing_to_decode() -> None:
    balance = PromptBalance(timeout_iters=5, batching_wait_iters=0)
    columns = with_balance(balance, [0, 0, 1500], [20, 20, 2])
    # Steps without prompts count as well, from the second on: the sixth is the fifth of these.
    assert columns.requests["scheduled_ns"][2] == (1040 + 4 * 1001) * US
    columns = with_balance(balance, [0, 0, 1500], [20, 1, 2])
    assert columns.requests["scheduled_ns"][2] == (1040 + 1001) * US


def test_prompts_that_every_rank_has_wait_for_more() -> None:
    balance = PromptBalance(timeout_iters=50, batching_wait_iters=3)
    columns = with_balance(balance, [0, 0, 1500, 1500], [20, 20, 2, 2])
    assert columns.requests["scheduled_ns"].tolist() == [0, 0] + [(1040 + 4 * 1001) * US] * 2


@pytest.mark.parametrize("timeout_iters", [15, 25])
def test_a_rank_without_a_seat_has_all_prompts_wait_however_many_wait_there(timeout_iters: int) -> None:
    """Rank 0 has two decodes for two seats and rank 1 one; a prompt for each comes in the ninth step."""
    spec = ReplicaSpec(cost=COST, scheduler=OrcaPaged(2), kv_blocks=100)
    balance = PromptBalance(timeout_iters=timeout_iters, batching_wait_iters=0)
    machine = MachineSpec(hosted=(spec,), ranks=2, rank_router=RoundRobin(), prompt_balance=balance)
    trace = Trace(arrival_ns=[0] * 4 + [8500 * US] * 2, prompt_tokens=[40] * 6, output_tokens=[60, 60, 60, 3, 2, 2])
    experiment = Experiment(workload=trace, replicas=(machine,), router=RoundRobin())
    columns = run_both_ways(experiment)
    scheduled = columns.requests["scheduled_ns"]
    # The prompts' step takes 1,080 us and those of two decodes 1,002; each of these counts, and the last that counts has prompts.
    assert scheduled[5] == (1080 + (timeout_iters - 1) * 1002) * US
    assert scheduled[4] == columns.requests["finish_ns"][0]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_rank_whose_memory_is_promised_has_all_prompts_wait(overlap: bool) -> None:
    """All come at once, and a step holds one prompt of a rank: the prompt that is admitted in the first step has promised away the
    memory that the second one of rank 0 needs, so that rank 1's has to wait for it."""
    scheduler = TrtLlm(max_num_tokens=49, disable_overlap_scheduler=not overlap)
    spec = ReplicaSpec(cost=COST, scheduler=scheduler, kv_blocks=100, block_tokens=1)
    balance = PromptBalance(timeout_iters=50, batching_wait_iters=0)
    machine = MachineSpec(hosted=(spec,), ranks=2, rank_router=RoundRobin(), prompt_balance=balance)
    trace = Trace(arrival_ns=[0] * 4, prompt_tokens=[40, 40, 40, 10], output_tokens=[20, 40, 20, 5])
    columns = run(Experiment(workload=trace, replicas=(machine,), router=RoundRobin()), check_invariants=True)
    finish, scheduled = columns.requests["finish_ns"], columns.requests["scheduled_ns"]
    assert scheduled[:2].tolist() == [0, 0]
    assert scheduled[2] == scheduled[3] >= finish[0]


# Machines with ranks that fail.


def that_fails(
    at_us: int, for_us: int, arrivals_us: list[int], outputs: list[int], balance: PromptBalance | None = None
) -> Columns:
    """The only machine, of two ranks, fails for a while; who was there is lost."""
    spec = ReplicaSpec(cost=COST, scheduler=OrcaPaged(8), kv_blocks=100)
    machine = MachineSpec(hosted=(spec,), ranks=2, rank_router=RoundRobin(), prompt_balance=balance)
    trace = Trace(arrival_ns=[at * US for at in arrivals_us], prompt_tokens=[40] * len(outputs), output_tokens=outputs)
    outage = Outage(machine=0, at_s=at_us * 1e-6, for_s=for_us * 1e-6)
    fleet = FleetSpec(pools=(0,), names=("all",), scaling=(None,), failing=(None,), outages=(outage,), in_flight="lose")
    experiment = Experiment(workload=trace, replicas=(machine,), router=RoundRobin(), fleet=fleet)
    return run_both_ways(experiment)


@pytest.mark.parametrize("at_us", [500, 5000])
def test_ranks_that_fail_within_a_step_are_free_when_the_machine_is_back(at_us: int) -> None:
    # In the step of the prompt, which would have lasted until 1,040 us, or in the span of decodes behind it.
    columns = that_fails(at_us, 10, [0, at_us + 20], [50, 2])
    assert columns.requests["status"].tolist() == [LOST, FINISHED]
    assert columns.requests["scheduled_ns"][1] == (at_us + 20) * US
    assert columns.requests["finish_ns"][1] == (at_us + 20 + 1040 + 1001) * US


def test_what_prompts_of_ranks_have_waited_for_is_forgotten_when_their_machine_fails() -> None:
    """Prompts of both ranks have waited for two steps of the three that they would when it fails: the next ones wait for three."""
    balance = PromptBalance(timeout_iters=50, batching_wait_iters=3)
    back = 3500 + 20
    arrivals = [0, 0, 1500, 1500, back, back, back + 500, back + 500]
    columns = that_fails(3500, 10, arrivals, [20, 20, 2, 2] * 2, balance)
    expected = [0, 0, -1, -1, back, back, back + 1040 + 3 * 1001, back + 1040 + 3 * 1001]
    assert columns.requests["scheduled_ns"].tolist() == [-1 if at < 0 else at * US for at in expected]


# Over random runs.


def random_ranks(cases: range) -> list[Experiment]:
    found = [with_ranks(an_experiment(case, speculative=case % 2 == 0), case) for case in cases]
    return [experiment for experiment in found if any(machine.ranks > 1 for machine in experiment.machines)]


@pytest.mark.parametrize("first", few([0, 40]))
def test_plans_that_are_held_give_what_plans_of_each_step_give(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "_FEWEST", 2)  # small runs have few steps alike
    for experiment in random_ranks(range(first, first + 40)):
        assert_same(run(experiment), run(experiment, fast_forward=False))


def test_a_request_in_the_queue_of_all_ranks_counts_as_waiting_from_the_step_after_it_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(together, "_FEWEST", 2)
    (experiment,) = random_ranks(range(2049, 2050))
    assert_same(run(experiment), run(experiment, fast_forward=False))


@pytest.mark.slow(reason="many random runs")
@pytest.mark.parametrize("first", range(1000, 4000, 500))
def test_plans_that_are_held_give_what_plans_of_each_step_give_over_many_runs(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together, "_FEWEST", 2)
    for experiment in random_ranks(some(range(first, first + 500))):
        assert_same(run(experiment), run(experiment, fast_forward=False, check_invariants=True))


def test_the_invariants_hold_at_every_event() -> None:
    for experiment in random_ranks(range(25)):
        checked, plain = run(experiment, check_invariants=True), run(experiment)
        np.testing.assert_array_equal(checked.requests["finish_ns"], plain.requests["finish_ns"])


def test_tokens_of_ranks_balance() -> None:
    for experiment in random_ranks(range(200, 240)):
        columns = run(experiment)
        requests, iterations = columns.requests, columns.iterations()
        done = requests["status"] == 0
        np.testing.assert_array_equal(requests["emitted_tokens"][done], requests["output_tokens"][done])
        assert iterations["emitted_tokens"].sum() == requests["emitted_tokens"].sum()
        total = np.array([tenant.kv_blocks for tenant in experiment.hosted])
        assert (iterations["kv_blocks_used"] <= total[iterations["replica"]]).all()


def test_a_policy_that_lies_about_how_long_its_plan_holds_is_caught_on_ranks() -> None:
    work = ([0, 0, 3000, 3000], [5] * 4, [60, 60, 5, 5])
    cost = Ranked(fixed_s=1.000001e-3)
    fast, stepped = (replay(2, *work, cost=cost, scheduler=HoldsTooLong(), fast_forward=ff) for ff in (True, False))
    assert not np.array_equal(fast.requests["finish_ns"], stepped.requests["finish_ns"])


@patches_the_engine
def test_ranks_that_do_not_end_together_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    launch, lengths = Iterations.launch, count()

    def longer(iterations: Iterations, batch: MicroBatch, ticks: int, end: int) -> None:
        launch(iterations, batch, ticks, end + next(lengths))

    monkeypatch.setattr(Iterations, "launch", longer)
    spec = ReplicaSpec(cost=COST, scheduler=OrcaPaged(8), kv_blocks=100)
    machine = MachineSpec(hosted=(spec,), ranks=2, rank_router=RoundRobin())
    trace = Trace(arrival_ns=[0, 0], prompt_tokens=[40, 40], output_tokens=[3, 3])
    with pytest.raises(InvariantError, match="INV-8 at t="):
        run(Experiment(workload=trace, replicas=(machine,), router=RoundRobin()), check_invariants=True)


def test_ranks_that_plan_nothing_although_there_is_work_are_an_error() -> None:
    def idle(view: ReplicaView, /) -> Plan:
        return Plan(hold=UNTIL_CHANGE)

    with pytest.raises(PolicyError, match=r"planned nothing at t=0\.000000 s on rank 0 with 1 waiting"):
        replay(2, [0], [5], [5], scheduler=idle)


def test_a_horizon_drops_the_step_in_flight_on_every_rank() -> None:
    spec = ReplicaSpec(cost=COST, scheduler=Sarathi(64, 8), kv_blocks=100)
    machine = MachineSpec(hosted=(spec,), ranks=2, rank_router=RoundRobin())
    clients = ClosedLoop(prompt_tokens=np.full(9, 40), output_tokens=np.full(9, 30), concurrency=4, think_ns=None)
    experiment = Experiment(workload=clients, replicas=(machine,), router=RoundRobin(), horizon_ns=10_500_000)
    columns = run(experiment, check_invariants=True)
    ends = columns.iterations()
    assert (ends["start_ns"] + ends["duration_ns"]).max() <= 10_500_000
    assert ends["emitted_tokens"].sum() == columns.requests["emitted_tokens"].sum() > 0


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"ranks": 0}, "ranks is at least 1; got 0"),
        ({"rank_router": None}, "a rank_router is of a machine with ranks"),
        ({"ranks": 1}, "a rank_router is of a machine with ranks"),
        ({"ranks": 1, "rank_router": None, "prompt_balance": PromptBalance()}, "has nothing to balance"),
        ({"rank_router": LlmD(no_hit_lru=2.0)}, "which no router inside a machine is told"),
        ({"cost": Linear()}, "does not say what a step of 2 ranks takes"),
        ({"cost": StageTable(batch_sizes=(1,), stage_ns=((5,),))}, "does not say what a step of 2 ranks takes"),
    ],
)
def test_what_ranks_cannot_be_is_refused(changes: dict[str, object], sentence: str) -> None:
    spec = replace(
        ReplicaSpec(cost=COST, scheduler=OrcaPaged(8), kv_blocks=100),
        **{key: value for key, value in changes.items() if key == "cost"},  # type: ignore[arg-type]
    )
    rest = {key: value for key, value in changes.items() if key != "cost"}
    with pytest.raises(ValueError, match=sentence):
        MachineSpec(**{"hosted": (spec,), "ranks": 2, "rank_router": RoundRobin(), **rest})  # type: ignore[arg-type]
