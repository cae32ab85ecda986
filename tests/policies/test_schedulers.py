"""Schedulers, by literals: a reader can predict each plan from its view."""

from __future__ import annotations

from typing import Any

import pytest

from policies.published import OrcaPaged, Static
from policies.schedulers import Sarathi
from policies.view import DECODES, UNTIL_CHANGE, PartialSeq, Plan, ReplicaView, WaitingSeq, decodes_below
from policies.vllm import Vllm, VllmV0
from policies.wrappers import Cap, EvictNewest
from tests.engine.build import patches_the_engine

QUEUE = (WaitingSeq(1, tokens=300), WaitingSeq(2, tokens=100), WaitingSeq(3, tokens=50))


def view(**fields: object) -> ReplicaView:
    """Ample memory unless said otherwise."""
    return ReplicaView(**{"free_blocks": 1000, "total_blocks": 1000, **fields})  # type: ignore[arg-type]


def test_vllm_runs_prompts_alone_and_stalls_the_decodes() -> None:
    assert VllmV0().plan(view(waiting=QUEUE, n_decoding=4)) == Plan(run=((1, 300), (2, 100), (3, 50)))
    assert VllmV0().plan(view(n_decoding=4)) == Plan(decode=True, hold=UNTIL_CHANGE)


def test_vllm_batches_prompts_up_to_its_token_budget() -> None:
    assert VllmV0(max_num_batched_tokens=400).plan(view(waiting=QUEUE)).run == ((1, 300), (2, 100))
    assert VllmV0(max_num_batched_tokens=399).plan(view(waiting=QUEUE)).run == ((1, 300),)


def test_vllm_runs_a_prompt_beyond_the_budget_alone() -> None:
    assert VllmV0(max_num_batched_tokens=128).plan(view(waiting=QUEUE)).run == ((1, 300),)


def test_sarathi_fills_what_the_decodes_leave_of_the_budget() -> None:
    plan = Sarathi(token_budget=128).plan(view(waiting=QUEUE, n_decoding=28))
    assert plan == Plan(decode=True, run=((1, 100),))


def test_sarathi_goes_on_with_a_prompt_before_it_admits_another() -> None:
    plan = Sarathi(token_budget=128).plan(view(waiting=QUEUE, prefilling=(PartialSeq(9, 400, 60),), n_decoding=8))
    assert plan.run == ((9, 60), (1, 60))


def test_sarathi_goes_on_with_the_older_of_two_prompts_first() -> None:
    begun = (PartialSeq(1, 64, 300), PartialSeq(2, 64, 300))
    assert Sarathi(token_budget=400).plan(view(prefilling=begun)) == Plan(run=((1, 300), (2, 100)))


def test_unfinished_prompts_have_a_seat() -> None:
    full = view(waiting=QUEUE, prefilling=(PartialSeq(9, 64, 10),), n_decoding=1)
    assert Sarathi(max_sequences=2).plan(full) == Plan(decode=True, run=((9, 10),))


@pytest.mark.parametrize("scheduler", [OrcaPaged(), VllmV0(), Sarathi()])
def test_nobody_overtakes_a_request_that_memory_holds_up(scheduler: OrcaPaged | VllmV0 | Sarathi) -> None:
    # 19 blocks of 16 are wanted for the first, 4 would do for the last.
    plan = scheduler.plan(view(waiting=QUEUE, n_decoding=1, free_blocks=15, total_blocks=20))
    assert plan == Plan(decode=True, hold=UNTIL_CHANGE, through_arrivals=True)


@pytest.mark.parametrize("policy", [Sarathi(), OrcaPaged()])
def test_who_joins_the_decodes_takes_a_step_beside_a_prompt_although_nobody_decodes_yet(
    policy: Sarathi | OrcaPaged,
) -> None:
    queue = (WaitingSeq(1, tokens=0, cached_tokens=40, kept_blocks=3), WaitingSeq(2, tokens=100))
    assert policy.plan(view(waiting=queue)) == Plan(decode=True, run=((1, 0), (2, 100)))


def test_sarathi_charges_the_budget_for_every_query_token_of_a_speculative_decode() -> None:
    plan = Sarathi(token_budget=128).plan(view(waiting=QUEUE, n_decoding=20, query_tokens=5))
    assert plan.run == ((1, 28),)


def test_sarathi_with_its_budget_spent_by_decodes_holds_through_arrivals() -> None:
    plan = Sarathi(token_budget=16).plan(view(waiting=QUEUE, n_decoding=16))
    assert plan == Plan(decode=True, hold=UNTIL_CHANGE, through_arrivals=True)


def test_an_arrival_would_change_the_plan_of_a_replica_with_room() -> None:
    assert Sarathi().plan(view(n_decoding=3)) == Plan(decode=True, hold=UNTIL_CHANGE)


@pytest.mark.parametrize("scheduler", [OrcaPaged(watermark=0.1), VllmV0(watermark=0.1), Sarathi(watermark=0.1)])
def test_admission_leaves_the_watermark_and_what_decodes_need_free(scheduler: OrcaPaged | VllmV0 | Sarathi) -> None:
    # 100 of 1,000 blocks stay free, and the decodes take 3: of 122 free, 19 may go to the first prompt, not one less.
    queue = QUEUE[:1]
    assert scheduler.plan(view(waiting=queue, n_decoding=5, free_blocks=122, growth_blocks=3)).run
    assert not scheduler.plan(view(waiting=queue, n_decoding=5, free_blocks=121, growth_blocks=3)).run


def test_an_empty_replica_keeps_no_watermark() -> None:
    assert Sarathi(watermark=0.5).plan(view(waiting=QUEUE[:1], free_blocks=19, total_blocks=20)).run == ((1, 300),)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Static(batch_size=0), "batch_size is a whole number of at least 1; got 0"),
        (lambda: Sarathi(token_budget=True), "token_budget is a whole number of at least 1; got True"),
        (lambda: VllmV0(watermark=1.0), r"watermark is a fraction in \[0, 1\); got 1.0"),
    ],
)
def test_settings_out_of_bounds_are_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("scheduler", [Sarathi(40, 12), Sarathi(9, 30), Vllm(40, 12), Vllm(40, 30, 9), VllmV0(40, 12)])
def test_decodes_that_the_engine_does_not_ask_about_are_planned_as_it_takes_them_to_be(scheduler: Any) -> None:
    below = decodes_below(scheduler)
    assert 0 < decodes_below(EvictNewest(scheduler)) == below
    planned = {
        EvictNewest(scheduler).plan(ReplicaView(n_decoding=n, n_leaving=leaving, free_blocks=7, growth_blocks=7))
        for n in range(1, below)
        for leaving in range(below - n)
    }
    assert planned == {DECODES}


@patches_the_engine
def test_a_scheduler_that_plans_itself_is_asked_about_every_iteration() -> None:
    class Derived(Sarathi):
        def plan(self, view: ReplicaView, /) -> Plan:
            return Plan(decode=view.n_decoding > 0)

    assert decodes_below(Derived()) == decodes_below(Cap(Sarathi(), max_sequences=2)) == decodes_below(max) == 0
