"""The systems of papers, by literals: a reader can predict each plan from its view."""

from __future__ import annotations

from typing import Any

import pytest

from policies.published import FasterTransformer, Orca, OrcaPaged, Static
from policies.view import UNTIL_CHANGE, Plan, ReplicaView, RunningSeq, WaitingSeq
from sim.errors import ScenarioError
from sim.scenario.named import SCHEDULERS, policy

QUEUE = (WaitingSeq(1, tokens=300), WaitingSeq(2, tokens=100), WaitingSeq(3, tokens=50))
PROMPTS = {1: 300, 2: 100, 3: 50}


def view(**fields: Any) -> ReplicaView:
    """Ample memory unless said otherwise."""
    return ReplicaView(**{"free_blocks": 1000, "total_blocks": 1000, **fields})


def test_static_takes_a_batch_from_an_idle_replica_only() -> None:
    assert Static(batch_size=2).plan(view(waiting=QUEUE)) == Plan(run=((1, 300), (2, 100)))
    held = Static(batch_size=2).plan(view(waiting=QUEUE, n_decoding=1))
    assert held == Plan(decode=True, hold=UNTIL_CHANGE, through_arrivals=True)


def test_static_takes_no_more_than_memory_holds() -> None:
    # 300 tokens are 19 blocks of 16, 100 are 7.
    assert Static(batch_size=3).plan(view(waiting=QUEUE, free_blocks=25)) == Plan(run=((1, 300),))


def test_paged_orca_joins_whole_prompts_to_the_running_decodes() -> None:
    assert OrcaPaged().plan(view(waiting=QUEUE, n_decoding=4)) == Plan(decode=True, run=((1, 300), (2, 100), (3, 50)))


def test_paged_orca_admits_up_to_its_seats() -> None:
    assert OrcaPaged(max_sequences=5).plan(view(waiting=QUEUE, n_decoding=4)).run == ((1, 300),)
    full = OrcaPaged(max_sequences=4).plan(view(waiting=QUEUE, n_decoding=4))
    assert full == Plan(decode=True, hold=UNTIL_CHANGE, through_arrivals=True)


def test_orca_joins_whole_prompts_to_the_running_decodes() -> None:
    running = tuple(RunningSeq(10 + i, cached_tokens=20, blocks=2) for i in range(4))
    prompts = {**PROMPTS, **{seq.id: 10 for seq in running}}
    limits = dict.fromkeys(prompts, 40)
    busy = view(waiting=QUEUE, n_decoding=4, running=running, prompt_tokens=prompts, max_tokens=limits)
    assert Orca().plan(busy) == Plan(decode=True, run=((1, 300), (2, 100), (3, 50)))
    assert Orca(max_sequences=5).plan(busy).run == ((1, 300),)
    full = Plan(decode=True, hold=UNTIL_CHANGE, through_arrivals=True)
    assert Orca(max_sequences=4).plan(busy) == full


@pytest.mark.parametrize(("free", "admitted"), [(41, (1, 2)), (40, (1,)), (27, (1,)), (26, ())])
def test_orca_reserves_the_longest_that_a_request_may_become(free: int, admitted: tuple[int, ...]) -> None:
    # 300 + 50 tokens are 22 blocks of 16, 100 + 120 are 14; the one that runs holds 2 and may come to 7.
    running = (RunningSeq(9, cached_tokens=20, blocks=2),)
    busy = view(
        waiting=QUEUE[:2], n_decoding=1, running=running, free_blocks=free, total_blocks=free + 2,
        prompt_tokens={9: 12, **PROMPTS}, max_tokens={9: 100, 1: 50, 2: 120},
    )  # fmt: skip
    plan = Orca().plan(busy)
    assert tuple(id_ for id_, _ in plan.run) == admitted
    assert admitted or plan == Plan(decode=True, hold=UNTIL_CHANGE, through_arrivals=True)


def test_nobody_overtakes_whom_orca_has_no_slots_for() -> None:
    running = (RunningSeq(9, cached_tokens=20, blocks=2),)
    # 22 blocks are wanted for the first, 10 would do for the last.
    busy = view(
        waiting=QUEUE, n_decoding=1, running=running, free_blocks=20, total_blocks=22,
        prompt_tokens={9: 12, **PROMPTS}, max_tokens={9: 10, 1: 50, 2: 50, 3: 100},
    )  # fmt: skip
    assert Orca().plan(busy).run == ()


@pytest.mark.parametrize(("n_slots", "admitted"), [(682, (1, 2)), (681, (1,)), (462, (1,)), (461, ())])
def test_orca_keeps_to_its_slots_where_memory_has_more(n_slots: int, admitted: tuple[int, ...]) -> None:
    # 112 slots are the running one's, 350 the first one's, 220 the second's.
    busy = view(
        waiting=QUEUE[:2], n_decoding=1, running=(RunningSeq(9, 20, 2),),
        prompt_tokens={9: 12, **PROMPTS}, max_tokens={9: 100, 1: 50, 2: 120},
    )  # fmt: skip
    assert tuple(id_ for id_, _ in Orca(n_slots=n_slots).plan(busy).run) == admitted


def test_a_request_longer_than_all_memory_has_orca_to_itself() -> None:
    limits = {"prompt_tokens": PROMPTS, "max_tokens": {1: 5000, 2: 10, 3: 10}}
    assert Orca().plan(view(waiting=QUEUE, free_blocks=100, total_blocks=100, **limits)).run == ((1, 300),)
    assert Orca(n_slots=64).plan(view(waiting=QUEUE, **limits)).run == ((1, 300),)
    running = (RunningSeq(2, cached_tokens=100, blocks=7),)
    busy = view(waiting=QUEUE[:1], n_decoding=1, running=running, free_blocks=93, total_blocks=100, **limits)
    assert Orca().plan(busy).run == ()


def test_orca_sees_what_other_micro_batches_may_come_to() -> None:
    limits = {"prompt_tokens": {9: 12, **PROMPTS}, "max_tokens": {9: 100, 1: 50, 2: 50, 3: 50}}
    # 22 blocks for the first, 7 for the one in flight elsewhere, which holds 2 yet.
    assert Orca().plan(view(waiting=QUEUE[:1], elsewhere=(9,), free_blocks=27, total_blocks=29, **limits)).run
    assert not Orca().plan(view(waiting=QUEUE[:1], elsewhere=(9,), free_blocks=26, total_blocks=28, **limits)).run


@pytest.mark.parametrize(("free", "admitted"), [(66, 3), (65, 2), (44, 2), (43, 1), (3, 1)])
def test_fastertransformer_keeps_memory_for_a_batch_of_its_longest(free: int, admitted: int) -> None:
    # 300 prompt tokens and 50 of output: 22 blocks for each of those that share the batch.
    idle = view(
        waiting=QUEUE, free_blocks=free, total_blocks=free, prompt_tokens=PROMPTS, max_tokens={1: 20, 2: 50, 3: 7}
    )
    assert len(FasterTransformer(4).plan(idle).run) == admitted


def test_fastertransformer_lets_nobody_in_until_all_have_left() -> None:
    busy = view(waiting=QUEUE, n_decoding=1, prompt_tokens=PROMPTS, max_tokens=dict.fromkeys(PROMPTS, 1))
    assert FasterTransformer(4).plan(busy) == Plan(decode=True, through_arrivals=True)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("vllm-v1", {}, "scheduler: 'vllm-v1' is called vllm here; did you mean vllm?"),
        ("vllm", {"max_sequences": 3}, "scheduler.max_sequences is not a setting of vllm; did you mean max_num_seqs?"),
        ("vllm", {"max_num_partial_prefills": 2}, "release 0.32.0 has it no more; long_prefill_token_threshold limits"),
        ("vllm", {"token_budget": 2}, "it is max_num_batched_tokens here; token_budget is sarathi's"),
    ],
)
def test_names_that_one_may_look_for_say_what_to_write(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        policy(name, settings, SCHEDULERS, key="scheduler", method="plan")
