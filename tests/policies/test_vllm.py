"""The rules of vLLM 0.32.0, each in literals. Places are in `vllm/v1/core/sched/scheduler.py` unless another file is named."""

from __future__ import annotations

from typing import Any

import pytest

from policies.view import (
    UNTIL_CHANGE,
    PartialSeq,
    Plan,
    ReplicaView,
    RunningSeq,
    WaitingSeq,
    evicts,
    plans_ahead,
    takes_by_chunk,
)
from policies.vllm import Vllm, VllmV0
from policies.wrappers import Cap

QUEUE = (WaitingSeq(1, 300), WaitingSeq(2, 100, 5), WaitingSeq(3, 50, 9))


def view(**changes: Any) -> ReplicaView:
    return ReplicaView(**{"free_blocks": 1000, "total_blocks": 1000, **changes})


def vllm(**settings: Any) -> Vllm:
    return Vllm(**{"max_num_batched_tokens": 512, "max_num_seqs": 8, **settings})


def test_decodes_come_first_and_prompts_fill_what_is_left_of_the_budget() -> None:
    # "First, schedule the RUNNING requests", then the waiting ones while token_budget > 0.
    plan = vllm().plan(view(n_decoding=4, waiting=QUEUE, prefilling=(PartialSeq(9, 40, 60),)))
    assert plan == Plan(decode=True, run=((9, 60), (1, 300), (2, 100), (3, 48)))


def test_decodes_alone_are_held_and_an_arrival_ends_that_where_there_is_a_seat() -> None:
    assert vllm().plan(view(n_decoding=7)) == Plan(decode=True, hold=UNTIL_CHANGE)
    assert vllm().plan(view(n_decoding=8)) == Plan(decode=True, hold=UNTIL_CHANGE, through_arrivals=True)
    # Steps that take the last free blocks as well.
    assert vllm().plan(view(n_decoding=7, free_blocks=7, growth_blocks=7)) == Plan(decode=True, hold=UNTIL_CHANGE)
    # A higher priority may come before those that wait.
    assert not vllm(scheduling_policy="priority").plan(view(n_decoding=8)).through_arrivals


def test_a_decode_that_verifies_drafts_takes_a_token_of_the_budget_for_each() -> None:
    plan = vllm(max_num_batched_tokens=100).plan(view(n_decoding=4, query_tokens=6, waiting=QUEUE))
    assert plan.run == ((1, 76),)
    # `max_num_new_slots_for_drafting`: a draft model takes one more for each sequence, prompts included.
    plan = vllm(max_num_batched_tokens=100).plan(view(n_decoding=4, query_tokens=6, draft_slots=1, waiting=QUEUE))
    assert plan.run == ((1, 71),)


def test_no_more_are_admitted_than_there_are_seats() -> None:
    # `max_num_active_reqs`; those who leave keep theirs until it is known.
    assert vllm().plan(view(n_decoding=7, waiting=QUEUE)).run == ((1, 300),)
    assert vllm(max_num_active_seqs=5).plan(view(n_decoding=4, waiting=QUEUE)).run == ((1, 300),)
    assert vllm().plan(view(n_decoding=7, n_leaving=1, waiting=QUEUE)).run == ()
    # Of a pipeline all micro-batches together.
    assert vllm().plan(view(n_decoding=3, elsewhere=(7, 8, 9, 10), waiting=QUEUE)).run == ((1, 300),)
    assert vllm().plan(view(n_decoding=3, elsewhere=(7, 8, 9, 10, 11), waiting=QUEUE)).run == ()


def test_room_for_a_whole_prompt_is_asked_for_or_for_its_first_chunk() -> None:
    # `scheduler_reserve_full_isl`, allocate_slots(full_sequence_must_fit) of kv_cache_manager.py.
    short = view(n_decoding=1, free_blocks=20, waiting=(WaitingSeq(1, 400),))
    assert vllm(max_num_batched_tokens=200).plan(short).run == ()
    assert vllm(max_num_batched_tokens=200, scheduler_reserve_full_isl=False).plan(short).run == ((1, 199),)


def test_blocks_that_a_loaded_sequence_holds_are_counted_once() -> None:
    # 320 of its 400 tokens have been loaded into 20 blocks of its own: it lacks 5.
    loaded = WaitingSeq(1, 80, cached_tokens=320, shared_blocks=20)
    for whole in (True, False):
        at_once = vllm(scheduler_reserve_full_isl=whole)
        assert at_once.plan(view(n_decoding=1, free_blocks=5, waiting=(loaded,))).run == ((1, 80),)
        assert at_once.plan(view(n_decoding=1, free_blocks=4, waiting=(loaded,))).run == ()


def test_nobody_overtakes_one_that_memory_holds_up() -> None:
    queue = (WaitingSeq(1, 400), WaitingSeq(2, 16))
    plan = vllm().plan(view(n_decoding=1, free_blocks=20, waiting=queue))
    assert plan == Plan(decode=True, hold=UNTIL_CHANGE, through_arrivals=True)


def test_the_watermark_is_kept_for_those_who_run() -> None:
    # kv_cache_manager.py: `watermark_blocks`, of all blocks with the null block, when anything runs.
    waiting = (WaitingSeq(1, 160),)
    assert vllm(watermark=0.1).plan(view(n_decoding=1, free_blocks=109, waiting=waiting)).run == ()
    assert vllm(watermark=0.1).plan(view(n_decoding=1, free_blocks=110, waiting=waiting)).run == ((1, 160),)
    assert vllm(watermark=0.1).plan(view(free_blocks=10, waiting=waiting)).run == ((1, 160),)


def test_a_long_prompt_is_limited_unless_it_is_alone() -> None:
    # `long_prefill_token_threshold`.
    plan = vllm(long_prefill_token_threshold=64).plan(view(waiting=QUEUE))
    assert plan.run == ((1, 64), (2, 64), (3, 50))
    assert vllm(long_prefill_token_threshold=64).plan(view(waiting=QUEUE[:1])).run == ((1, 300),)
    # `long_prefill_token_threshold_adaptive`: no lower than an even share of the budget.
    plan = vllm(long_prefill_token_threshold=64, long_prefill_token_threshold_adaptive=True).plan(view(waiting=QUEUE))
    assert plan.run == ((1, 170), (2, 100), (3, 50))


def test_without_chunks_a_prompt_waits_for_a_budget_that_holds_it() -> None:
    plan = vllm(max_num_batched_tokens=350, enable_chunked_prefill=False).plan(view(waiting=QUEUE))
    assert plan.run == ((1, 300),)


def test_the_last_admitted_gives_way_and_nobody_is_admitted_with_it() -> None:
    # `preempted_req = self.running[-1]`; the waiting ones are not looked at when anybody was preempted.
    running = (RunningSeq(1, 64, 4, 1), RunningSeq(2, 64, 4, 1), RunningSeq(3, 64, 4, 1))
    short = view(n_decoding=3, free_blocks=1, growth_blocks=3, running=running, waiting=(WaitingSeq(4, 10),))
    assert vllm().plan(short) == Plan(decode=True, preempt=(3,))
    # Of the lowest priority, and of the latest arrival among those.
    ranked = (
        RunningSeq(1, 64, 4, 1, 7, 0, -1, 2),
        RunningSeq(2, 64, 4, 1, 3, 0, -1, 2),
        RunningSeq(3, 64, 4, 1, 9, 0, -1, 0),
    )
    short = view(n_decoding=3, free_blocks=1, growth_blocks=3, running=ranked)
    assert vllm(scheduling_policy="priority").plan(short) == Plan(decode=True, preempt=(1,))


def test_one_who_leaves_may_give_way_but_takes_no_step() -> None:
    running = (RunningSeq(1, 64, 4, 1), RunningSeq(2, 64, 4, leaving=True))
    short = view(n_decoding=1, n_leaving=1, free_blocks=0, growth_blocks=1, running=running)
    assert vllm().plan(short) == Plan(decode=True, preempt=(2,))
    running = (RunningSeq(1, 64, 4, leaving=True), RunningSeq(2, 64, 4, 1), RunningSeq(3, 64, 4, 1))
    short = view(n_decoding=2, n_leaving=1, free_blocks=1, growth_blocks=2, running=running)
    assert vllm().plan(short) == Plan(decode=True, preempt=(3,))


def test_the_tokens_of_one_who_gives_way_are_for_others() -> None:
    # `token_budget += num_scheduled_tokens.pop(preempted_req_id)`, where one that was looked at before has the lowest priority.
    running = (RunningSeq(1, 64, 4, 0, priority=5), RunningSeq(2, 64, 4, 1), RunningSeq(3, 32, 3))
    short = view(n_decoding=2, free_blocks=0, growth_blocks=1, running=running, prefilling=(PartialSeq(3, 32, 64),))
    plan = vllm(max_num_batched_tokens=8, scheduling_policy="priority").plan(short)
    assert plan == Plan(decode=True, run=((3, 7),), preempt=(1,))


def test_a_sequence_that_is_alone_in_lacking_room_gives_way_itself() -> None:
    running = (RunningSeq(1, 64, 4, 0), RunningSeq(2, 64, 4, 1))
    short = view(n_decoding=2, free_blocks=0, growth_blocks=1, running=running)
    assert vllm().plan(short) == Plan(decode=True, preempt=(2,))


def test_a_chunk_takes_the_blocks_of_its_tokens_and_of_what_it_looks_ahead() -> None:
    partial, running = (PartialSeq(2, 32, 64),), (RunningSeq(1, 20, 2, 0), RunningSeq(2, 32, 2))
    both = {"n_decoding": 1, "prefilling": partial, "running": running}
    assert vllm(max_num_batched_tokens=65).plan(view(free_blocks=4, **both)) == Plan(decode=True, run=((2, 64),))
    # 32 + 64 + 5 slots are 7 blocks, of which 3 are held with those looked ahead.
    ahead = view(free_blocks=3, lookahead_tokens=5, **{**both, "running": (running[0], RunningSeq(2, 32, 3))})
    assert vllm(max_num_batched_tokens=65).plan(ahead) == Plan(decode=True, preempt=(2,))


def test_priorities_order_the_queue() -> None:
    # request_queue.py: by priority, then by arrival.
    queue = (WaitingSeq(1, 10, 0, priority=1), WaitingSeq(2, 10, 5), WaitingSeq(3, 10, 3))
    assert [id_ for id_, _ in vllm(scheduling_policy="priority").plan(view(waiting=queue)).run] == [3, 2, 1]


def test_one_with_its_kv_at_hand_joins_the_decodes() -> None:
    plan = vllm().plan(view(waiting=(WaitingSeq(1, 0, cached_tokens=40), WaitingSeq(2, 30))))
    assert plan == Plan(decode=True, run=((1, 0), (2, 30)))


def test_what_the_schedulers_ask_of_the_engine() -> None:
    assert [asks(vllm()) for asks in (takes_by_chunk, plans_ahead, evicts)] == [True] * 3
    assert [asks(VllmV0()) for asks in (takes_by_chunk, plans_ahead, evicts)] == [False] * 3
    assert takes_by_chunk(Cap(vllm(), max_sequences=3))
    assert not plans_ahead(vllm(async_scheduling=False))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_seqs": 600}, r"max_num_batched_tokens \(512\) is at least max_num_seqs \(600\)"),
        ({"max_num_active_seqs": 9}, "max_num_active_seqs is at most max_num_seqs; got 9"),
        ({"max_num_scheduled_tokens": 513}, "max_num_scheduled_tokens is at most max_num_batched_tokens; got 513"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy is fcfs or priority; got 'lifo'"),
        ({"watermark": 1.0}, r"watermark is a fraction in \[0, 1\); got 1.0"),
        ({"max_num_batched_tokens": True}, "max_num_batched_tokens is a whole number of at least 1; got True"),
    ],
)
def test_settings_that_the_release_refuses_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vllm(**settings)


def test_ranks_compute_prompts_in_every_so_many_of_their_steps() -> None:
    # `DPEngineCoreProc._should_throttle_prefills`, and `defer_prefills` of the scheduler.
    cadence = vllm(prefill_schedule_interval=4)
    assert cadence.plan(view(step=4, n_decoding=2, waiting=QUEUE)).run == ((1, 300), (2, 100), (3, 50))
    put_off = cadence.plan(view(step=5, n_decoding=2, waiting=QUEUE, prefilling=(PartialSeq(9, 40, 60),)))
    assert put_off == Plan(decode=True, hold=3, memo=False)
    # Without ranks, without decodes, and where the latest such step left some waiting, they are not put off.
    for changes in ({"step": -1}, {"n_decoding": 0}, {"memo": True}):
        assert cadence.plan(view(**{"step": 5, "n_decoding": 2, "waiting": QUEUE, **changes})).run[0] == (1, 300)
    # A sequence that has ended, which the plan does not know, counts as one that decodes.
    assert not cadence.plan(view(step=5, n_leaving=1, waiting=QUEUE)).run


def test_a_cadence_lets_the_last_token_of_a_prompt_through_and_those_behind_it_wait() -> None:
    queue = (WaitingSeq(1, 1), WaitingSeq(2, 100, 5), WaitingSeq(3, 1, 9))
    assert vllm(prefill_schedule_interval=4).plan(view(step=5, n_decoding=2, waiting=queue)).run == ((1, 1),)


def test_a_step_that_leaves_some_waiting_ends_the_cadence_until_one_leaves_none() -> None:
    cadence = vllm(prefill_schedule_interval=4, max_num_seqs=3)
    assert cadence.plan(view(step=4, n_decoding=2, waiting=QUEUE)).memo is True
    assert cadence.plan(view(step=5, n_decoding=2, waiting=QUEUE[:1], memo=True)).memo is False
    # A plan that may be overtaken by the next such step does not let arrivals pass.
    assert not cadence.plan(view(step=5, n_decoding=3)).through_arrivals
