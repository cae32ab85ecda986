"""SGLang's rules by literals, each with the file of release 0.5.23 that has it, under sglang/srt/; and what the engine does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest

from policies.routers import RoundRobin
from policies.sglang import OUT_OF_ROOM, Past, Sglang
from policies.view import UNTIL_CHANGE, Looks, PartialSeq, Plan, ReplicaView, RunningSeq, WaitingSeq
from sim.engine import Experiment, ReplicaSpec, run
from tests.engine.costs import Linear
from tests.engine.random_runs import an_experiment, run_both_ways, with_scheduler
from workloads import Trace

PROMPTS = {1: 100, 2: 100, 3: 100, 4: 100, 7: 40, 8: 50, 9: 60}
LIMITS = dict.fromkeys(PROMPTS, 200)


def a_view(**fields: Any) -> ReplicaView:
    """A pool of 10,000 pages of one token, all free, prompts of 40, 50, 60 and four times 100 tokens, and limits of 200."""
    known = {
        "block_tokens": 1,
        "free_blocks": 10_000,
        "total_blocks": 10_000,
        "prompt_tokens": PROMPTS,
        "max_tokens": LIMITS,
    }
    return ReplicaView(**{**known, **fields})


def decodes(*cached: int, growth: int = 1) -> dict[str, Any]:
    """Fields of a view with decoding sequences 1, 2, ... that hold so many tokens; each needs *growth* pages for its next step."""
    running = tuple(RunningSeq(i, tokens, tokens, growth) for i, tokens in enumerate(cached, 1))
    return {"running": running, "n_decoding": len(running), "growth_blocks": growth * len(running)}


def waits(*ids: int) -> tuple[WaitingSeq, ...]:
    return tuple(WaitingSeq(id_, PROMPTS[id_]) for id_ in ids)


def past(plan: Plan) -> Past:
    assert isinstance(plan.memo, Past)
    return plan.memo


SYNCHRONOUS = Sglang(disable_overlap_schedule=True)


# Who joins: managers/schedule_policy.py, PrefillAdder.


def test_prompts_run_while_decodes_wait() -> None:
    plan = SYNCHRONOUS.plan(a_view(waiting=waits(7, 8), **decodes(150, 120)))
    assert (plan.decode, plan.run, plan.hold) == (False, ((7, 40), (8, 50)), 1)


def test_the_prompt_that_a_chunk_has_no_room_for_is_cut_and_goes_on_first() -> None:
    scheduler = replace(SYNCHRONOUS, chunked_prefill_size=64)
    assert scheduler.plan(a_view(waiting=waits(7, 8, 9))).run == ((7, 40), (8, 24))
    view = a_view(waiting=waits(9), prefilling=(PartialSeq(8, 24, 26),))
    assert scheduler.plan(view).run == ((8, 26), (9, 38))


def test_chunks_end_with_a_page_and_each_prompt_is_charged_in_whole_pages() -> None:
    scheduler = replace(SYNCHRONOUS, chunked_prefill_size=64)
    view = a_view(waiting=waits(7, 8), block_tokens=16, free_blocks=600, total_blocks=600)
    assert scheduler.plan(view).run == ((7, 40), (8, 16))


def test_prompts_are_whole_without_chunks_and_the_first_may_exceed_what_an_iteration_takes() -> None:
    scheduler = Sglang(chunked_prefill_size=-1, max_prefill_tokens=91, disable_overlap_schedule=True)
    assert scheduler.plan(a_view(waiting=waits(1, 7))).run == ((1, 100),)
    assert scheduler.plan(a_view(waiting=waits(7, 8, 9))).run == ((7, 40), (8, 50))
    # A later one takes less than what is left.
    assert replace(scheduler, max_prefill_tokens=90).plan(a_view(waiting=waits(7, 8))).run == ((7, 40),)


def test_an_iteration_has_so_many_prompts_at_most() -> None:
    scheduler = replace(SYNCHRONOUS, prefill_max_requests=1)
    assert scheduler.plan(a_view(waiting=waits(7, 8))).run == ((7, 40),)


def test_no_more_requests_run_than_have_seats() -> None:
    scheduler = replace(SYNCHRONOUS, max_running_requests=3)
    plan = scheduler.plan(a_view(waiting=waits(7, 8), **decodes(150, 120)))
    assert plan.run == ((7, 40),)
    plan = scheduler.plan(a_view(waiting=waits(7), **decodes(150, 120, 110)))
    assert plan._replace(memo=None) == Plan(True, hold=UNTIL_CHANGE, through_arrivals=True)


def test_seats_by_default_are_2048_to_4096_and_half_the_pool_at_most() -> None:
    """mem_cache/kv_cache_configurator.py, resolve_max_num_reqs."""
    assert Sglang().seats(400_000, 131_072) == 2048
    assert Sglang().seats(700_000, 131_072) == int(700_000 / 131_072 * 512)
    assert Sglang().seats(400_000, 8192) == 4096
    assert Sglang(max_running_requests=5000).seats(400_000, 131_072) == 5000
    assert Sglang().seats(1000, 131_072) == 500


def test_a_request_joins_if_less_than_the_free_pool_holds_all_that_it_may_become() -> None:
    # 40 of prompt, 200 to come, and a page.
    assert SYNCHRONOUS.plan(a_view(waiting=waits(7), free_blocks=242)).run == ((7, 40),)
    plan = SYNCHRONOUS.plan(a_view(waiting=waits(7), free_blocks=241, **decodes(150)))
    assert plan.decode
    assert not plan.run


def test_a_share_of_what_running_ones_may_still_emit_is_kept_for_them() -> None:
    # Sequence 1 has emitted 51 of 200: 0.7 times 149 is 104.3.
    view = a_view(waiting=waits(7), **decodes(150))
    assert SYNCHRONOUS.plan(replace(view, free_blocks=346)).run == ((7, 40),)
    assert SYNCHRONOUS.plan(replace(view, free_blocks=345)).run == ()
    all_of_it = replace(SYNCHRONOUS, ignore_eos=True)
    assert all_of_it.plan(replace(view, free_blocks=391)).run == ((7, 40),)
    assert all_of_it.plan(replace(view, free_blocks=390)).run == ()


def test_who_has_joined_in_the_same_iteration_counts_with_all_that_it_may_become() -> None:
    view = a_view(waiting=waits(7, 8))
    # 241 for the first, 251 for the second.
    assert SYNCHRONOUS.plan(replace(view, free_blocks=493)).run == ((7, 40), (8, 50))
    assert SYNCHRONOUS.plan(replace(view, free_blocks=492)).run == ((7, 40),)


def test_nobody_is_expected_to_emit_more_than_4096_tokens_or_than_the_pool_holds() -> None:
    unlimited = {"max_tokens": dict.fromkeys(PROMPTS, 10**9), "total_blocks": 100_000}
    view = a_view(waiting=waits(7), **decodes(150), **unlimited)
    share = 0.7 * 4096
    assert SYNCHRONOUS.plan(replace(view, free_blocks=int(40 + 4096 + 1 + share) + 1)).run == ((7, 40),)
    assert SYNCHRONOUS.plan(replace(view, free_blocks=int(40 + 4096 + 1 + share))).run == ()
    # managers/scheduler.py, init_req_max_new_tokens; mem_cache/allocator/base.py, max_new_tokens_for_memory.
    alone = a_view(waiting=waits(7), max_tokens=unlimited["max_tokens"], free_blocks=1000, total_blocks=1000)
    assert SYNCHRONOUS.plan(alone).run == ((7, 40),)
    # Two tokens of the context are kept: 78 to come, and a page.
    short = a_view(waiting=waits(7), max_tokens=unlimited["max_tokens"], max_model_len=120)
    assert SYNCHRONOUS.plan(replace(short, free_blocks=120)).run == ((7, 40),)
    assert SYNCHRONOUS.plan(replace(short, free_blocks=119)).run == ()


def test_a_cut_prompt_goes_on_within_the_memory_left_and_takes_its_chunk_where_none_is() -> None:
    """mem_cache/prefill_budget.py, available_chunk_tokens."""
    scheduler = replace(SYNCHRONOUS, chunked_prefill_size=64)
    view = a_view(prefilling=(PartialSeq(2, 10, 90),), **decodes(150))
    view = replace(view, running=(*view.running, RunningSeq(2, 10, 10)))
    # 104.3 are kept for the decode.
    assert scheduler.plan(replace(view, free_blocks=130)).run == ((2, 25),)
    assert scheduler.plan(replace(view, free_blocks=104)).run == ((2, 64),)


def test_a_prompt_that_never_fits_is_refused_and_the_next_one_runs() -> None:
    """managers/utils.py, validate_input_length."""
    view = a_view(waiting=waits(9, 8), free_blocks=66, total_blocks=66, max_tokens=dict.fromkeys(PROMPTS, 1))
    plan = SYNCHRONOUS.plan(view)
    assert (plan.reject, plan.run) == (((9, OUT_OF_ROOM),), ((8, 50),))
    assert SYNCHRONOUS.plan(replace(view, free_blocks=67, total_blocks=67)).reject == ()


def test_those_who_may_emit_most_go_first_with_lof() -> None:
    scheduler = replace(SYNCHRONOUS, schedule_policy="lof", prefill_max_requests=2)
    limits = {7: 10, 8: 30, 9: 30}
    assert scheduler.plan(a_view(waiting=waits(7, 8, 9), max_tokens=limits)).run == ((8, 50), (9, 60))


def test_with_ends_known_a_request_joins_as_soon_as_the_pool_lasts_at_each_of_them() -> None:
    """managers/schedule_policy.py, add_one_req_ignore_eos."""
    scheduler = replace(SYNCHRONOUS, ignore_eos=True, disable_radix_cache=True)
    # Sequence 1 ends in 10 steps and gives 290 back; by then both take 20; request 7 goes on alone for 190.
    view = a_view(waiting=waits(7), **decodes(289))
    assert scheduler.plan(replace(view, free_blocks=64)).run == ((7, 40),)
    assert scheduler.plan(replace(view, free_blocks=63)).run == ()
    # Without what others give back: 41 now, 200 to come, one in reserve.
    assert scheduler.plan(a_view(waiting=waits(7), free_blocks=243)).run == ((7, 40),)
    assert scheduler.plan(a_view(waiting=waits(7), free_blocks=242, **decodes(298))).run == ((7, 40),)
    assert scheduler.plan(a_view(waiting=waits(7), free_blocks=242)).run == ()


# `batch_is_full`: managers/scheduler.py.


def test_after_a_request_did_not_fit_nobody_is_let_in_until_somebody_leaves() -> None:
    view = a_view(waiting=waits(7), free_blocks=241, **decodes(150, 120))
    plan = SYNCHRONOUS.plan(view)
    assert plan._replace(memo=None) == Plan(True, hold=UNTIL_CHANGE, through_arrivals=True)
    later = a_view(waiting=waits(7), memo=plan.memo, rounds=30, **decodes(180, 150))
    assert SYNCHRONOUS.plan(later).run == ()
    left = a_view(waiting=waits(7), memo=plan.memo, rounds=30, **decodes(180))
    assert SYNCHRONOUS.plan(left).run == ((7, 40),)


def test_a_batch_that_an_iteration_with_prompts_starts_is_not_full() -> None:
    scheduler = replace(SYNCHRONOUS, max_running_requests=2)
    alone = scheduler.plan(a_view(waiting=waits(7, 8, 9)))
    assert (alone.run, past(alone).full, past(alone).n_running) == (((7, 40), (8, 50)), False, 2)
    beside = scheduler.plan(a_view(waiting=waits(7, 8), **decodes(150)))
    assert (beside.run, past(beside).full, past(beside).n_running) == (((7, 40),), True, 2)
    cut = replace(scheduler, chunked_prefill_size=20).plan(a_view(waiting=waits(7, 8), **decodes(150)))
    assert (cut.run, past(cut).full, past(cut).n_running) == (((7, 20),), False, 1)


# The new-token ratio: managers/scheduler_components/new_token_ratio_tracker.py.


def test_the_ratio_starts_at_seven_tenths_of_the_conservativeness_and_falls_to_a_seventh() -> None:
    assert Sglang().first_ratio == 0.7
    assert Sglang(schedule_conservativeness=0.3).first_ratio == 0.7 * 0.3
    assert Sglang(schedule_conservativeness=2.0).first_ratio == 1.0
    assert Sglang().last_ratio == 0.7 * 0.14
    assert Sglang().ratio_after(0.7, 1) == 0.7 - (0.7 - 0.7 * 0.14) / 600
    assert Sglang().ratio_after(0.7, 300) == pytest.approx(0.7 - (0.7 - 0.098) / 2)
    assert Sglang().ratio_after(0.7, 601) == Sglang().ratio_after(0.7, 10**9) == 0.7 * 0.14
    assert Sglang().ratio_after(0.01, 1) == 0.7 * 0.14
    assert Sglang().ratio_after(0.01, 0) == 0.01


def test_the_ratio_falls_with_decode_steps_and_not_beside_prompts() -> None:
    plan = SYNCHRONOUS.plan(a_view(rounds=5, **decodes(150)))
    again = SYNCHRONOUS.plan(a_view(rounds=15, memo=plan.memo, **decodes(160)))
    assert past(again).ratio == SYNCHRONOUS.ratio_after(0.7, 10)
    mixed = Sglang(enable_mixed_chunk=True, max_running_requests=64, disable_overlap_schedule=True)
    plan = mixed.plan(a_view(waiting=waits(7), rounds=5, **decodes(150)))
    assert plan.decode
    assert past(mixed.plan(a_view(rounds=6, memo=plan.memo, **decodes(151, 40)))).ratio == 0.7


def test_after_a_pause_the_ratio_starts_anew() -> None:
    assert past(SYNCHRONOUS.plan(a_view(rounds=900, **decodes(150)))).ratio == 0.7


# Mixed chunks: managers/scheduler.py, _get_new_batch_prefill_raw; managers/schedule_batch.py, mix_with_running.


def test_with_mixed_chunks_decodes_share_the_iteration_and_its_tokens() -> None:
    scheduler = Sglang(
        enable_mixed_chunk=True, max_running_requests=8, chunked_prefill_size=32, disable_overlap_schedule=True
    )
    plan = scheduler.plan(a_view(waiting=waits(7), **decodes(150, 120)))
    assert (plan.decode, plan.run) == (True, ((7, 30),))


def test_decodes_for_which_prompts_leave_no_memory_sit_out() -> None:
    scheduler = Sglang(
        enable_mixed_chunk=True, max_running_requests=8, schedule_conservativeness=0, disable_overlap_schedule=True
    )
    limits = {**LIMITS, 7: 0}
    view = a_view(waiting=waits(7), max_tokens=limits, **decodes(150, growth=8))
    # A page each of which the budget counts one, and the pool eight.
    plan = scheduler.plan(replace(view, free_blocks=44))
    assert (plan.decode, plan.run) == (False, ((7, 40),))
    plan = scheduler.plan(replace(view, free_blocks=48))
    assert (plan.decode, plan.run) == (True, ((7, 40),))


# Retraction: managers/schedule_batch.py, retract_decode.


def test_those_that_have_emitted_least_are_retracted_of_equals_the_longest_prompt_and_the_last() -> None:
    prompts = {1: 100, 2: 90, 3: 100, 4: 100}
    fields = {"prompt_tokens": prompts, "max_tokens": dict.fromkeys(prompts, 200), "free_blocks": 0}
    view = a_view(**decodes(109, 99, 109, 119), **fields)
    assert SYNCHRONOUS.plan(view).preempt == (3,)
    needy = a_view(**decodes(109, 99, 109, 119, growth=120), **fields)
    assert SYNCHRONOUS.plan(needy).preempt == (3, 1, 2)
    plan = SYNCHRONOUS.plan(a_view(**decodes(109, 99, 109, 119), **{**fields, "free_blocks": 4}))
    assert plan.preempt == ()


def test_a_retraction_sets_the_ratio_by_what_is_left_of_the_batch_and_reopens_it() -> None:
    plan = SYNCHRONOUS.plan(a_view(free_blocks=1, **decodes(109, 149)))
    assert (plan.decode, plan.preempt, plan.hold) == (True, (1,), 1)
    # 50 emitted and 20 steps to come, of 200 allowed.
    assert past(plan).ratio == 70 / 201
    assert not past(plan).full
    # The step itself does not lower it.
    again = SYNCHRONOUS.plan(
        a_view(rounds=1, memo=plan.memo, running=(RunningSeq(2, 150, 150, 1),), n_decoding=1, growth_blocks=1)
    )
    assert past(again).ratio == 70 / 201


def test_the_batch_is_listed_as_the_retraction_sorted_it() -> None:
    """The last one listed among equals is retracted; filter_batch(keep_indices=sorted_indices)."""
    memo = past(SYNCHRONOUS.plan(a_view(free_blocks=0, **decodes(109, 119, 129))))
    assert memo.order == (3, 2)
    plan = SYNCHRONOUS.plan(a_view(free_blocks=0, memo=memo._replace(order=(2, 1)), **decodes(109, 109)))
    assert plan.preempt == (1,)


# Polling: managers/scheduler_components/recv_skipper.py.


def test_between_polls_nobody_who_comes_is_seen() -> None:
    scheduler = replace(SYNCHRONOUS, scheduler_recv_interval=10)
    first = scheduler.plan(a_view(**decodes(150)))
    assert (first.hold, first.through_arrivals) == (10, True)
    early = scheduler.plan(a_view(waiting=waits(7), rounds=4, memo=first.memo, **decodes(154)))
    assert (early.run, early.hold) == ((), 6)
    polled = scheduler.plan(a_view(waiting=waits(7), rounds=10, memo=early.memo, **decodes(160)))
    assert polled.run == ((7, 40),)
    # A step with prompts is followed by a poll.
    after = scheduler.plan(a_view(waiting=waits(8), rounds=10, memo=polled.memo, **decodes(160, 40)))
    assert after.run == ((8, 50),)


def test_with_nothing_to_do_the_next_poll_is_at_once() -> None:
    scheduler = replace(SYNCHRONOUS, scheduler_recv_interval=10)
    first = scheduler.plan(a_view(**decodes(150)))
    assert scheduler.plan(a_view(waiting=waits(7), rounds=4, memo=first.memo)).run == ((7, 40),)


# Overlap: managers/scheduler.py, event_loop_overlap.


def test_planned_ahead_the_latest_token_is_not_known_yet() -> None:
    ahead = Sglang()
    assert ahead.async_scheduling
    assert not SYNCHRONOUS.async_scheduling
    memo = past(ahead.plan(a_view(**decodes(149))))
    # 51 emitted, 50 of them known: 105 are kept, and as the ratio has fallen by a step less than 104.9.
    view = a_view(waiting=waits(7), memo=memo, rounds=1, **decodes(150))
    kept = ahead.ratio_after(0.7, 1) * 150
    assert ahead.plan(replace(view, free_blocks=int(241 + kept) + 1)).run == ((7, 40),)
    assert ahead.plan(replace(view, free_blocks=int(241 + kept))).run == ()


def test_planned_ahead_those_who_end_hold_seats_and_reopen_the_batch_for_the_next_step() -> None:
    ahead = Sglang(max_running_requests=2)
    plan = ahead.plan(a_view(waiting=waits(7), n_leaving=1, **decodes(150)))
    assert (plan.run, plan.decode, past(plan).full, plan.hold) == ((), True, False, 1)


def test_planned_ahead_who_cannot_grow_waits_for_those_who_end() -> None:
    """update_running_batch: None where kv_full_retract_flag and finishing_reqs."""
    plan = Sglang().plan(a_view(free_blocks=0, n_leaving=1, **decodes(150)))
    assert plan._replace(memo=None) == Plan()
    assert past(plan).ratio == 0.7
    assert Sglang().plan(a_view(free_blocks=0, memo=plan.memo, **decodes(150, 160))).preempt == (1,)


# What is refused.


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"schedule_policy": "hrrn"}, "schedule_policy hrrn orders requests by the prefix cache in a way that is not modelled"),
        ({"schedule_policy": "random"}, "schedule_policy is fcfs, lof or lpm; got 'random'"),
        ({"schedule_conservativeness": -1.0}, "schedule_conservativeness is a number of at least 0; got -1.0"),
        ({"enable_mixed_chunk": True, "chunked_prefill_size": 2048}, "give max_running_requests below chunked_prefill_size"),
        ({"scheduler_recv_interval": 1001}, "scheduler_recv_interval is at most 1000; got 1001"),
        ({"chunked_prefill_size": 0}, "chunked_prefill_size is a whole number of at least 1; got 0"),
        ({"prefill_max_requests": 0}, "prefill_max_requests is a whole number of at least 1; got 0"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Sglang(**settings)


# In the engine.


@dataclass(frozen=True)
class Counts:
    """Counts the plans that it has made in its memo, retracts request 0 at the third, and writes down what it was shown."""

    shown: list[tuple[object, tuple[int, ...]]]
    preempted_last: ClassVar[bool] = True

    def plan(self, view: ReplicaView, /) -> Plan:
        made = view.memo
        assert made is None or isinstance(made, int)
        self.shown.append((made, tuple(seq.id for seq in view.waiting)))
        memo = (made or 0) + 1
        if made == 2:
            return Plan(decode=view.n_decoding > 1, preempt=(0,), memo=memo)
        if view.waiting and view.n_decoding == 0:
            return Plan(run=((view.waiting[0].id, view.waiting[0].tokens),), memo=memo)
        return Plan(decode=True, memo=memo)


def test_a_memo_comes_back_until_there_is_nothing_to_do_and_preempted_wait_last_if_asked() -> None:
    shown: list[tuple[object, tuple[int, ...]]] = []
    trace = Trace(arrival_ns=[0, 1000, 10**9], prompt_tokens=[5, 5, 5], output_tokens=[4, 1, 1])
    replica = ReplicaSpec(cost=Linear(fixed_s=1e-3), scheduler=Counts(shown), kv_blocks=100)
    run(Experiment(workload=trace, replicas=(replica,), router=RoundRobin()))
    assert shown[:4] == [(None, (0,)), (1, (1,)), (2, (1,)), (3, (1, 0))]
    assert shown[-1] == (None, (2,))


@pytest.mark.parametrize("overlap", [False, True], ids=["synchronous", "overlap"])
def test_spans_equal_stepping(overlap: bool) -> None:
    """Over random runs, some of which starve; the ratio falls in spans as it does in steps."""
    preempted = 0
    for seed in (*range(5), 33):
        scheduler = Sglang(
            chunked_prefill_size=[16, 64, -1][seed % 3],
            max_running_requests=[3, 12][seed % 2],
            schedule_conservativeness=[0.1, 1.0][seed // 2 % 2],
            enable_mixed_chunk=seed % 3 < 2 and seed % 5 == 0,
            scheduler_recv_interval=[1, 1, 5][seed // 3 % 3],
            disable_overlap_schedule=not overlap,
        )
        experiment = with_scheduler(an_experiment(seed, speculative=False), scheduler)
        fast = run_both_ways(experiment)
        preempted += fast.meta["preemptions"]
    assert preempted


# What is looked up: managers/schedule_policy.py, calc_priority.


@dataclass
class Cached:
    """A prefix cache in literals, whose requests find so many pages each."""

    pages: dict[int, int]
    queue_looks: int = 0

    def found_blocks(self, id_: int, tokens: int) -> int:
        return min(self.pages[id_], tokens - 1)

    def unheld_blocks(self, id_: int, blocks: int, held: Mapping[object, int]) -> int:
        return 0

    def hold(self, id_: int, blocks: int, held: dict[object, int]) -> None: ...

    def beginning(self, id_: int, tokens: int) -> object:
        return id_


def looked_up(scheduler: Sglang, n: int, queue_looks: int) -> Any:
    """The look-ups for the first of *n* who wait, of whom one is admitted."""
    waiting = tuple(WaitingSeq(100 + i, 40) for i in range(n))
    numbers = {seq.id: 40 for seq in waiting}
    cache: Any = Cached(dict.fromkeys(numbers, 8), queue_looks)
    view = a_view(waiting=waiting, cache=cache, prompt_tokens=numbers, max_tokens=numbers)
    return replace(scheduler, prefill_max_requests=1).plan(view).looks


def test_every_32nd_look_over_the_queue_uses_what_its_first_128_would_find() -> None:
    # The first of them is used last, and then what is found for the one that is admitted, and for the next.
    first = tuple((100 + i, 41) for i in reversed(range(128)))
    considered = ((100, 40), (101, 40))
    for n in (128, 129, 200):
        for queue_looks in (0, 32, 64):
            assert looked_up(SYNCHRONOUS, n, queue_looks) == Looks((*first, *considered), of_queue=True)
    for queue_looks in (1, 31, 33):
        assert looked_up(SYNCHRONOUS, 200, queue_looks) == Looks(considered, of_queue=True)
    assert looked_up(SYNCHRONOUS, 1, 0) == Looks(((100, 41), (100, 40)), of_queue=True)


def test_a_queue_that_is_sorted_is_looked_up_one_by_one() -> None:
    lpm = replace(SYNCHRONOUS, schedule_policy="lpm")
    assert looked_up(lpm, 3, 0) == Looks(((100, 41), (101, 41), (102, 41), (100, 40), (101, 40)))
    assert looked_up(lpm, 128, 0).of_queue is False
    assert looked_up(lpm, 129, 0).of_queue is True


def test_without_a_cache_nothing_is_looked_up() -> None:
    assert SYNCHRONOUS.plan(a_view(waiting=waits(7))).looks is None
    assert looked_up(replace(SYNCHRONOUS, disable_radix_cache=True), 3, 0) is None


def test_what_a_running_request_may_still_emit_fits_the_context() -> None:
    # 300 tokens less two leave 198 of the 200 that the client allows.
    view = a_view(max_model_len=300, free_blocks=1, **decodes(120, 115))
    assert past(SYNCHRONOUS.plan(view)).ratio == (21 + 20) / (198 + 1)


@pytest.mark.parametrize("interval", [2, 3])
def test_decodes_are_held_until_the_next_look_at_who_has_come(interval: int) -> None:
    plan = replace(SYNCHRONOUS, scheduler_recv_interval=interval).plan(a_view(**decodes(150)))
    assert (plan.hold, plan.through_arrivals) == (interval, True)


def test_a_plan_made_ahead_knows_whose_latest_token_it_has_not_seen() -> None:
    """Those whose prompts it completes, or all of a mixed batch; 21 and 1 emitted are then 20 and 0 (event_loop_overlap)."""
    assert past(Sglang().plan(a_view(waiting=waits(7, 8), **decodes(150)))).late == (7, 8)
    mixed = Sglang(enable_mixed_chunk=True, max_running_requests=8)
    assert past(mixed.plan(a_view(waiting=waits(7), **decodes(150)))).late is True
    assert past(SYNCHRONOUS.plan(a_view(waiting=waits(7, 8), **decodes(150)))).late == ()


# Rounds without prompts: managers/scheduler.py, _should_defer_prefill.


def kinds(scheduler: Sglang, *, fast_forward: bool = True) -> str:
    """The iterations of three requests that are there at first: p, of prompts; d, of decodes alone."""
    trace = Trace.from_arrays(arrival_ns=[0, 0, 0], prompt_tokens=[20, 20, 20], output_tokens=[9, 9, 9])
    spec = ReplicaSpec(cost=Linear(fixed_s=1e-3), scheduler=scheduler, kv_blocks=1000, block_tokens=1)
    columns = run(Experiment(workload=trace, replicas=(spec,), router=RoundRobin()), fast_forward=fast_forward)
    return "".join("p" if tokens else "d" for tokens in columns.iterations()["prefill_tokens"].tolist())


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({}, "pppdddddddd"),
        ({"prefill_decode_interval": 2}, "pddpddpdddddddd"),
        # A batch of one decode is too small to wait for, one of two is not.
        ({"prefill_decode_interval": 2, "prefill_decode_interval_min_bs": 2}, "ppddpdddddddd"),
        # The first has ended when the rounds are over, and an engine without work waits for none.
        ({"prefill_decode_interval": 20}, "pddddddddpddddddddpdddddddd"),
    ],
)
def test_decodes_go_on_for_some_rounds_after_prompts(settings: Mapping[str, int], found: str) -> None:
    for overlap in (False, True):
        scheduler = replace(SYNCHRONOUS, prefill_max_requests=1, disable_overlap_schedule=not overlap, **settings)
        assert kinds(scheduler) == kinds(scheduler, fast_forward=False) == found


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"prefill_decode_interval": -1}, "prefill_decode_interval is a whole number of at least 0"),
        ({"enable_prefill_delayer": True, "disable_overlap_schedule": True}, "enable_prefill_delayer needs overlap"),
        ({"enable_prefill_delayer": True, "prefill_decode_interval_min_bs": 1}, "waits for all of them for ever"),
    ],
)
def test_rules_for_the_moments_of_prompts_that_cannot_be(settings: Mapping[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Sglang(**settings)


def test_the_delayer_is_between_ranks() -> None:
    spec = ReplicaSpec(cost=Linear(), scheduler=Sglang(enable_prefill_delayer=True), kv_blocks=1000)
    trace = Trace.from_arrays(arrival_ns=[0], prompt_tokens=[1], output_tokens=[1])
    with pytest.raises(ValueError, match="is modelled for machines with ranks and without prompt_balance"):
        Experiment(workload=trace, replicas=(spec,), router=RoundRobin())
