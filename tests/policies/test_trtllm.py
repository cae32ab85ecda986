"""TensorRT-LLM's scheduler, by literals: each rule of its capacity scheduler, of its micro-batch scheduler and of its executor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from policies.published import FasterTransformer, Orca
from policies.reserving import unpromised_blocks
from policies.routers import RoundRobin
from policies.trtllm import TrtLlm
from policies.view import UNTIL_CHANGE, PartialSeq, Plan, ReplicaView, RunningSeq, WaitingSeq, plans_ahead
from policies.wrappers import EvictNewest
from sim.engine import Experiment, ReplicaSpec, run
from tests.engine.costs import Linear
from tests.engine.random_runs import an_experiment, assert_same, with_scheduler
from tests.sample import few
from workloads import Trace

QUEUE = (WaitingSeq(1, tokens=300), WaitingSeq(2, tokens=100), WaitingSeq(3, tokens=50))
PROMPTS = {1: 300, 2: 100, 3: 50}
LIMITS = {1: 40, 2: 40, 3: 40}
HELD = Plan(decode=True, hold=UNTIL_CHANGE)
HELD_WHOEVER_COMES = Plan(decode=True, hold=UNTIL_CHANGE, through_arrivals=True)


def view(*decoding: RunningSeq, **fields: Any) -> ReplicaView:
    """Ample memory unless said otherwise; *decoding* run, with prompts of 16 tokens and limits of 16."""
    told = {
        "prompt_tokens": {**{seq.id: 16 for seq in decoding}, **PROMPTS},
        "max_tokens": {**{seq.id: 16 for seq in decoding}, **LIMITS},
    }
    memory = {"free_blocks": 1000, "total_blocks": 1000}
    growth = sum(seq.growth_blocks for seq in decoding)
    running = {"running": decoding, "n_decoding": len(decoding), "growth_blocks": growth}
    return ReplicaView(**{**memory, **told, **running, **fields})


def some(n: int) -> tuple[RunningSeq, ...]:
    """Sequences that decode, hold one block and may come to two."""
    return tuple(RunningSeq(10 + i, cached_tokens=16, blocks=1) for i in range(n))


def test_whole_prompts_join_the_decodes_within_the_budget() -> None:
    assert TrtLlm(max_num_tokens=404).plan(view(*some(4), waiting=QUEUE)) == Plan(decode=True, run=((1, 300), (2, 100)))
    assert TrtLlm(max_num_tokens=403).plan(view(*some(4), waiting=QUEUE)).run == ((1, 300),)
    assert TrtLlm().plan(view(waiting=QUEUE)) == Plan(run=((1, 300), (2, 100), (3, 50)))


def test_every_token_that_a_speculative_decode_submits_is_of_the_budget() -> None:
    assert TrtLlm(max_num_tokens=420).plan(view(*some(4), waiting=QUEUE, query_tokens=5)).run == ((1, 300), (2, 100))
    assert TrtLlm(max_num_tokens=419).plan(view(*some(4), waiting=QUEUE, query_tokens=5)).run == ((1, 300),)


def test_what_is_cached_of_a_prompt_is_of_the_budget_in_1_x_and_not_in_2026() -> None:
    # 300 tokens of which 256 are cached, and 100: 400 with two decodes are 402.
    found = (WaitingSeq(1, tokens=44, cached_tokens=256), WaitingSeq(2, tokens=100))
    both, first = ((1, 44), (2, 100)), ((1, 44),)
    assert TrtLlm(max_num_tokens=402).plan(view(*some(2), waiting=found)).run == both
    assert TrtLlm(max_num_tokens=401).plan(view(*some(2), waiting=found)).run == first
    of_2026 = TrtLlm(max_num_tokens=146, count_cached_tokens=False)
    assert of_2026.plan(view(*some(2), waiting=found)).run == both
    # A prompt is too long by all of its tokens.
    refused = TrtLlm(max_num_tokens=299).plan(view(waiting=found[:1])).reject
    assert refused == ((1, "a prompt of 300 tokens exceeds max_num_tokens (299) and enable_chunked_prefill is off"),)


def test_cached_tokens_move_a_chunk_on_and_do_not_shorten_it() -> None:
    # 128 of 300 tokens fit: those behind the cached ones. The end of a prompt counts all of it, cached tokens included.
    chunked = TrtLlm(max_num_tokens=128, enable_chunked_prefill=True)
    for cached, chunk in ((0, 128), (64, 128), (192, 108), (256, 44)):
        seq = WaitingSeq(1, tokens=300 - cached, cached_tokens=cached)
        assert chunked.plan(view(waiting=(seq,), block_tokens=16)).run == ((1, chunk),)
    # One that has begun counts what is left of it.
    partial = PartialSeq(1, cached_tokens=256, remaining_tokens=44)
    assert chunked.plan(view(waiting=QUEUE[1:2], prefilling=(partial,), block_tokens=16)).run == ((1, 44), (2, 80))


def test_kv_that_has_come_from_another_machine_counts_for_nothing() -> None:
    come = WaitingSeq(1, tokens=0, cached_tokens=300), WaitingSeq(2, tokens=1, cached_tokens=299, kept_blocks=19)
    assert TrtLlm(max_num_tokens=100).plan(view(waiting=come)).run == ((1, 0), (2, 1))


def test_nobody_overtakes_a_prompt_that_the_decodes_leave_no_budget_for() -> None:
    assert TrtLlm(max_num_tokens=302).plan(view(*some(3), waiting=QUEUE)) == HELD_WHOEVER_COMES


def test_a_batch_has_so_many_seats() -> None:
    assert TrtLlm(max_batch_size=6).plan(view(*some(4), waiting=QUEUE)).run == ((1, 300), (2, 100))
    assert TrtLlm(max_batch_size=4).plan(view(*some(4), waiting=QUEUE)) == HELD_WHOEVER_COMES
    assert TrtLlm(max_batch_size=4).plan(view(*some(4))) == HELD_WHOEVER_COMES
    assert TrtLlm(max_batch_size=5).plan(view(*some(4))) == HELD


def test_decodes_beyond_the_budget_wait_for_those_admitted_before_them() -> None:
    plan = TrtLlm(max_num_tokens=7).plan(view(*some(3), waiting=QUEUE, query_tokens=3))
    assert plan == Plan(decode=(10, 11))


def test_a_prompt_longer_than_the_budget_is_refused_unless_it_may_be_cut() -> None:
    reason = "a prompt of 300 tokens exceeds max_num_tokens (299) and enable_chunked_prefill is off"
    plan = TrtLlm(max_num_tokens=299).plan(view(waiting=QUEUE))
    assert plan == Plan(run=((2, 100), (3, 50)), reject=((1, reason),))
    assert TrtLlm(max_num_tokens=299).plan(view(*some(1), waiting=QUEUE[:1])) == Plan(True, reject=((1, reason),))
    assert TrtLlm(max_num_tokens=300).plan(view(waiting=QUEUE[:1])) == Plan(run=((1, 300),))


def test_who_was_evicted_and_has_become_longer_than_the_budget_runs_without_decodes() -> None:
    again = (WaitingSeq(1, tokens=310, preempted=True), WaitingSeq(3, tokens=50))
    scheduler = TrtLlm(max_num_tokens=300, capacity_scheduler_policy="MAX_UTILIZATION")
    assert scheduler.plan(view(waiting=again)) == Plan(run=((1, 310),))
    assert scheduler.plan(view(*some(1), waiting=again)) == HELD_WHOEVER_COMES


# GUARANTEED_NO_EVICT.


@pytest.mark.parametrize(("free", "admitted"), [(34, (1, 2)), (33, (1,)), (25, (1,)), (24, ())])
def test_a_request_is_admitted_when_memory_holds_the_longest_that_all_may_become(
    free: int, admitted: tuple[int, ...]
) -> None:
    # 340 tokens are 22 blocks of 16, 140 are 9; the three that run may take one more each.
    plan = TrtLlm().plan(view(*some(3), waiting=QUEUE[:2], free_blocks=free, total_blocks=free + 3))
    assert tuple(id_ for id_, _ in plan.run) == admitted
    assert admitted or plan == HELD_WHOEVER_COMES


def test_nobody_overtakes_a_request_that_memory_has_no_room_for() -> None:
    # 25 blocks would do for the first, 9 for the last.
    assert TrtLlm().plan(view(*some(3), waiting=QUEUE, free_blocks=20, total_blocks=23)) == HELD_WHOEVER_COMES


def test_a_sequence_half_way_through_its_prompt_keeps_what_it_may_become() -> None:
    # All 10 blocks of its 150 prompt tokens are held, and 12 may be.
    begun = {"prefilling": (PartialSeq(7, 64, 86),), "running": (RunningSeq(7, 64, blocks=10),)}
    told = {"prompt_tokens": {7: 150, **PROMPTS}, "max_tokens": {7: 42, **LIMITS}}
    cut = TrtLlm(enable_chunked_prefill=True)
    assert cut.plan(view(waiting=QUEUE[:1], free_blocks=24, **begun, **told)).run == ((7, 86), (1, 300))
    assert cut.plan(view(waiting=QUEUE[:1], free_blocks=23, **begun, **told)).run == ((7, 86),)


def test_slots_for_drafted_tokens_are_kept_too_and_twice_where_plans_are_made_ahead() -> None:
    # 340 tokens and 4 that are drafted, of which the first takes the last token's place: 343, and 347 planned ahead.
    told = {"waiting": QUEUE[:1], "query_tokens": 5, "block_tokens": 1}
    ahead, behind = TrtLlm(), TrtLlm(disable_overlap_scheduler=True)
    assert ahead.plan(view(free_blocks=347, **told)).run
    assert not ahead.plan(view(free_blocks=346, **told)).run
    assert behind.plan(view(free_blocks=343, **told)).run
    assert not behind.plan(view(free_blocks=342, **told)).run


def test_a_request_that_may_outgrow_memory_waits_until_it_is_alone() -> None:
    long = {"waiting": QUEUE[:1], "max_tokens": {1: 5000, 10: 16}, "total_blocks": 30}
    assert TrtLlm().plan(view(free_blocks=30, **long)).run == ((1, 300),)
    assert not TrtLlm().plan(view(*some(1), free_blocks=29, **long)).run


def test_what_other_micro_batches_may_come_to_is_kept() -> None:
    told = {"prompt_tokens": {9: 16, **PROMPTS}, "max_tokens": {9: 16, **LIMITS}, "elsewhere": (9,)}
    assert TrtLlm().plan(view(waiting=QUEUE[:1], free_blocks=23, total_blocks=24, **told)).run
    assert not TrtLlm().plan(view(waiting=QUEUE[:1], free_blocks=22, total_blocks=23, **told)).run


def test_who_has_reached_its_limit_keeps_its_blocks_and_its_seat_until_that_is_known_and_nothing_more() -> None:
    gone = RunningSeq(10, cached_tokens=16, blocks=1, leaving=True)
    left = {"n_decoding": 1, "n_leaving": 1, "waiting": QUEUE[:1], "total_blocks": 25}
    assert TrtLlm().plan(view(gone, *some(2)[1:], free_blocks=23, **left)).run
    assert not TrtLlm().plan(view(gone, *some(2)[1:], free_blocks=22, **left)).run
    assert not TrtLlm(max_batch_size=2).plan(view(gone, *some(2)[1:], free_blocks=23, **left)).run


def test_who_has_reached_its_limit_gives_way_to_nobody() -> None:
    gone = RunningSeq(20, cached_tokens=48, blocks=3, leaving=True)
    plan = PACKED.plan(view(*growing(2), gone, n_decoding=2, n_leaving=1, free_blocks=1))
    assert plan == Plan(decode=(10,), preempt=(11,))


def test_nobody_becomes_longer_than_the_model_takes() -> None:
    long = {"waiting": QUEUE[:1], "max_tokens": {1: 5000}, "max_model_len": 320, "total_blocks": 1000}
    assert TrtLlm().plan(view(free_blocks=20, **long)).run
    assert not TrtLlm().plan(view(free_blocks=19, **long)).run


# MAX_UTILIZATION.

PACKED = TrtLlm(capacity_scheduler_policy="MAX_UTILIZATION")


def growing(n: int) -> tuple[RunningSeq, ...]:
    """Sequences that decode, hold three blocks and need one more now."""
    return tuple(RunningSeq(10 + i, cached_tokens=48, blocks=3, growth_blocks=1) for i in range(n))


@pytest.mark.parametrize(("free", "admitted"), [(28, (1, 2)), (27, (1,)), (21, (1,)), (20, ())])
def test_a_request_is_admitted_when_its_prompt_fits_beside_what_decodes_need_now(
    free: int, admitted: tuple[int, ...]
) -> None:
    plan = PACKED.plan(view(*growing(2), waiting=QUEUE[:2], free_blocks=free))
    assert tuple(id_ for id_, _ in plan.run) == admitted
    assert admitted or plan == HELD_WHOEVER_COMES


def test_the_last_to_have_come_gives_way_to_the_first() -> None:
    # Two blocks are free for five that want one each: the fifth gives three back, for the third and the fourth.
    plan = PACKED.plan(view(*growing(5), free_blocks=2))
    assert plan == Plan(decode=(10, 11, 12, 13), preempt=(14,))


def test_as_many_give_way_as_it_takes_and_nobody_is_admitted_meanwhile() -> None:
    full = (*(RunningSeq(20 + i, 16, blocks=1, growth_blocks=1) for i in range(5)),)
    plan = PACKED.plan(view(*full, free_blocks=0, waiting=QUEUE[2:]))
    # The fifth's block is the first one's, the fourth's the second one's; the third cannot grow and gives its own back.
    assert plan == Plan(decode=(20, 21), preempt=(24, 23, 22))


def test_a_prompt_half_computed_is_the_last_to_have_come() -> None:
    half = {"prefilling": (PartialSeq(7, 64, 86),), "running": (*growing(2), RunningSeq(7, 64, blocks=10))}
    plan = TrtLlm(capacity_scheduler_policy="MAX_UTILIZATION", enable_chunked_prefill=True).plan(
        view(n_decoding=2, growth_blocks=2, free_blocks=1, **half)
    )
    assert plan == Plan(decode=(10, 11), preempt=(7,))


# STATIC_BATCH.


def test_a_static_batch_is_taken_when_nothing_decodes() -> None:
    static = TrtLlm(capacity_scheduler_policy="STATIC_BATCH", max_num_tokens=420, enable_chunked_prefill=True)
    assert static.plan(view(waiting=QUEUE)).run == ((1, 300), (2, 100), (3, 16))
    begun = {
        "prefilling": (PartialSeq(3, 16, 34),),
        "running": (*some(2), RunningSeq(3, 16, blocks=4)),
        "n_decoding": 2,
    }
    assert static.plan(view(waiting=QUEUE[:1], **begun)) == HELD_WHOEVER_COMES
    assert not static.plan(view(waiting=QUEUE[:1], free_blocks=21, total_blocks=1000)).run


# KV manager v2, which passes over what does not fit.

V2 = TrtLlm(use_kv_cache_manager_v2=True)


def test_v2_passes_over_prompts_that_do_not_fit() -> None:
    # Three prompts of 19, 7 and 4 blocks in 12.
    assert V2.plan(view(waiting=QUEUE, free_blocks=12)).run == ((2, 100), (3, 50))
    assert TrtLlm(capacity_scheduler_policy="MAX_UTILIZATION").plan(view(waiting=QUEUE, free_blocks=12)).run == ()
    # 300 tokens do not fit beside two decodes in 152, and the others do.
    assert replace(V2, max_num_tokens=152).plan(view(*some(2), waiting=QUEUE[1:])).run == ((2, 100), (3, 50))
    assert replace(V2, max_num_tokens=301).plan(view(*some(2), waiting=QUEUE)).run == ((2, 100), (3, 50))


def test_v2_packs_memory_whatever_policy_is_asked_for() -> None:
    for policy in ("GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"):
        assert replace(V2, capacity_scheduler_policy=policy).evicts
        assert not replace(V2, capacity_scheduler_policy=policy).reserves


def test_v2_resumes_a_suspended_sequence_where_memory_is_not_too_full_afterwards() -> None:
    suspended = (WaitingSeq(2, tokens=100, preempted=True),)
    # 7 of 100 blocks; 5 have to be free behind them.
    assert V2.plan(view(*some(1), waiting=suspended, free_blocks=12, total_blocks=100)).run == ((2, 100),)
    assert V2.plan(view(*some(1), waiting=suspended, free_blocks=11, total_blocks=100)).run == ()
    # Alone it fills all of it.
    assert V2.plan(view(waiting=suspended, free_blocks=7, total_blocks=100)).run == ((2, 100),)


# Prompts that are to find what others compute.


@dataclass
class Named:
    """A cache in which requests begin alike up to so many tokens."""

    alike: dict[frozenset[int], int]

    def beginning(self, id_: int, tokens: int, /) -> object:
        return next((both for both, upto in self.alike.items() if id_ in both and tokens <= upto), id_)


def test_a_prompt_waits_for_another_that_computes_its_first_block_and_those_behind_do_not() -> None:
    cache: Any = Named({frozenset({1, 2}): 64})
    assert TrtLlm().plan(view(waiting=QUEUE, cache=cache)).run == ((1, 300), (3, 50))
    assert TrtLlm(enable_prefix_aware_scheduling=False).plan(view(waiting=QUEUE, cache=cache)).run == (
        (1, 300), (2, 100), (3, 50),
    )  # fmt: skip
    static = TrtLlm(capacity_scheduler_policy="STATIC_BATCH")
    assert len(static.plan(view(waiting=QUEUE, cache=cache)).run) == 3


def test_a_prompt_waits_while_another_is_half_computed_and_not_for_blocks_that_are_there() -> None:
    cache: Any = Named({frozenset({1, 2}): 64})
    chunked = TrtLlm(enable_chunked_prefill=True, max_num_tokens=512)
    half = {"prefilling": (PartialSeq(1, 32, 268),), "running": (RunningSeq(1, 32, 19),)}
    # What it finds is shown as cached: 32 tokens, and the block behind them is what the other computes; 64, and it is not.
    found = {"waiting": (WaitingSeq(2, tokens=68, cached_tokens=32),)}
    assert chunked.plan(view(**{**half, **found}, cache=cache)).run == ((1, 268),)
    found = {"waiting": (WaitingSeq(2, tokens=36, cached_tokens=64),)}
    assert chunked.plan(view(**{**half, **found}, cache=cache)).run == ((1, 268), (2, 36))


def test_prompts_that_come_together_compute_what_they_share_once() -> None:
    def tokens_of_steps(**settings: Any) -> list[int]:
        ids = np.array([*range(8), *range(4), 20, 21, 22, 23])
        trace = Trace(
            arrival_ns=[0, 0], prompt_tokens=[128, 128], output_tokens=[1, 1], prefix_blocks=ids,
            prefix_offsets=np.array([0, 8, 16]), prefix_block_tokens=16,
        )  # fmt: skip
        spec = ReplicaSpec(
            cost=Linear(),
            scheduler=TrtLlm(disable_overlap_scheduler=True, **settings),
            kv_blocks=100,
            prefix_cache="blocks",
        )
        columns = run(Experiment(workload=trace, replicas=(spec,), router=RoundRobin()))
        return columns.iterations()["prefill_tokens"].tolist()

    # 64 tokens are alike: the second prompt waits a step, and computes the other 64.
    assert tokens_of_steps() == [128, 64]
    assert tokens_of_steps(enable_prefix_aware_scheduling=False) == [256]


def test_chunks_are_multiples_of_the_unit() -> None:
    chunked = TrtLlm(enable_chunked_prefill=True, max_num_tokens=290)
    assert chunked.plan(view(waiting=QUEUE)).run == ((1, 288),)
    assert replace(chunked, chunk_unit_size=256).plan(view(waiting=QUEUE)).run == ((1, 256),)


def test_where_the_budget_cuts_the_decodes_prompts_go_on_only_if_looked_at_before() -> None:
    begun = {"prefilling": (PartialSeq(3, 16, 1),), "running": (RunningSeq(3, 16, blocks=4), *some(3)), "n_decoding": 3}
    cut = TrtLlm(max_num_tokens=7, enable_chunked_prefill=True)
    assert cut.plan(view(query_tokens=3, **begun)) == Plan(decode=(10, 11))
    packed = TrtLlm(max_num_tokens=7, enable_chunked_prefill=True, capacity_scheduler_policy="MAX_UTILIZATION")
    assert packed.plan(view(query_tokens=3, **begun)) == Plan(decode=(10, 11), run=((3, 1),))


# Chunked context.

CHUNKED = TrtLlm(enable_chunked_prefill=True, max_num_tokens=250)


def test_prompts_that_fit_are_not_cut() -> None:
    assert CHUNKED.plan(view(waiting=QUEUE[1:])).run == ((2, 100), (3, 50))


def test_a_prompt_is_cut_to_whole_blocks_and_what_is_left_goes_to_one_that_it_holds() -> None:
    # 247 tokens beside three decodes: 15 blocks of 16 are 240, and 7 are left.
    assert CHUNKED.plan(view(*some(3), waiting=QUEUE)).run == ((1, 240),)
    short = (*QUEUE, WaitingSeq(4, tokens=7))
    told = {"prompt_tokens": {4: 7, **PROMPTS, 10: 16, 11: 16, 12: 16}, "max_tokens": dict.fromkeys([*range(13)], 16)}
    assert CHUNKED.plan(view(*some(3), waiting=short, **told)).run == ((1, 240), (4, 7))


def test_a_prompt_begun_goes_on_before_another() -> None:
    begun = {"prefilling": (PartialSeq(7, 64, 86),), "running": (RunningSeq(7, 64, blocks=10),)}
    told = {"prompt_tokens": {7: 150, **PROMPTS}, "max_tokens": {7: 1, **LIMITS}}
    assert CHUNKED.plan(view(waiting=QUEUE, **begun, **told)).run == ((7, 86), (1, 160))


def test_decodes_go_on_alone_where_no_chunk_fits_beside_them() -> None:
    tight = TrtLlm(enable_chunked_prefill=True, max_num_tokens=18)
    assert tight.plan(view(*some(3), waiting=QUEUE)) == HELD
    assert TrtLlm(enable_chunked_prefill=True, max_num_tokens=10).plan(view(waiting=QUEUE)).run == ((1, 10),)


def test_prompts_may_progress_in_turns() -> None:
    fair = TrtLlm(
        enable_chunked_prefill=True, max_num_tokens=250, context_chunking_policy="EQUAL_PROGRESS", max_batch_size=3
    )
    # Rounds of 16: three of 48, then the last two tokens of the shortest, and so on with the others until 250 are spent.
    assert fair.plan(view(waiting=QUEUE)).run == ((1, 100 - 4), (2, 100), (3, 50))


# Waiting for company.

WAITS = TrtLlm(max_num_tokens=1000, batch_wait_timeout_iters=2, batch_wait_max_tokens_ratio=0.5)


def test_prompts_wait_beside_decodes_until_there_are_enough_of_them() -> None:
    assert WAITS.plan(view(*some(49), waiting=QUEUE)) == Plan(decode=True, memo=1)
    assert WAITS.plan(view(*some(50), waiting=QUEUE)) == Plan(True, ((1, 300), (2, 100), (3, 50)), memo=0)


def test_prompts_wait_for_so_many_iterations() -> None:
    assert WAITS.plan(view(*some(1), waiting=QUEUE, memo=1)) == Plan(decode=True, memo=2)
    assert WAITS.plan(view(*some(1), waiting=QUEUE, memo=2)) == Plan(True, ((1, 300), (2, 100), (3, 50)), memo=0)


def test_prompts_do_not_wait_where_nothing_decodes_and_the_count_stays() -> None:
    assert WAITS.plan(view(waiting=QUEUE, memo=1)) == Plan(run=((1, 300), (2, 100), (3, 50)), memo=1)
    assert WAITS.plan(view(*some(1), memo=1)) == HELD._replace(memo=1)


def test_prompts_do_not_wait_without_both_settings() -> None:
    for scheduler in (
        TrtLlm(max_num_tokens=1000, batch_wait_timeout_iters=2),
        TrtLlm(max_num_tokens=1000, batch_wait_max_tokens_ratio=0.5),
    ):
        assert scheduler.plan(view(*some(1), waiting=QUEUE)).run


def test_a_prompt_that_is_cut_counts_in_full_towards_company() -> None:
    begun = {
        "prefilling": (PartialSeq(7, 450, 40),),
        "running": (*some(1), RunningSeq(7, 450, blocks=31)),
        "n_decoding": 1,
    }
    waits = TrtLlm(
        enable_chunked_prefill=True, max_num_tokens=1000, batch_wait_timeout_iters=2, batch_wait_max_tokens_ratio=0.4
    )
    assert waits.plan(view(**begun)).run == ((7, 40),)
    later = TrtLlm(
        enable_chunked_prefill=True, max_num_tokens=1000, batch_wait_timeout_iters=2, batch_wait_max_tokens_ratio=0.5
    )
    assert later.plan(view(**begun)) == Plan(decode=True, memo=1)


def test_prompts_wait_while_others_give_way() -> None:
    half = {"prefilling": (PartialSeq(7, 64, 86),), "running": (RunningSeq(7, 64, blocks=10), *growing(2))}
    waits = TrtLlm(
        capacity_scheduler_policy="MAX_UTILIZATION", enable_chunked_prefill=True,
        batch_wait_timeout_iters=2, batch_wait_max_tokens_ratio=0.5,
    )  # fmt: skip
    busy = view(n_decoding=2, growth_blocks=2, free_blocks=1, **half)
    assert waits.plan(busy) == Plan(decode=(10,), preempt=(11,), memo=1)
    busy.memo = 2
    assert waits.plan(busy) == Plan(decode=(10,), run=((7, 86),), preempt=(11,), memo=0)


# Overlap, settings.


def test_iterations_are_planned_ahead_unless_the_overlap_scheduler_is_off() -> None:
    assert plans_ahead(TrtLlm())
    assert plans_ahead(EvictNewest(TrtLlm()))
    assert not plans_ahead(TrtLlm(disable_overlap_scheduler=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_batch_size": 0}, "max_batch_size is a whole number of at least 1; got 0"),
        ({"batch_wait_timeout_iters": -1}, "batch_wait_timeout_iters is a whole number of at least 0; got -1"),
        ({"batch_wait_max_tokens_ratio": 1.5}, r"is a share of max_num_tokens in \[0, 1\]; got 1.5"),
        (
            {"capacity_scheduler_policy": "NEVER"},
            "is one of GUARANTEED_NO_EVICT, MAX_UTILIZATION, STATIC_BATCH; got 'NEVER'",
        ),
        ({"context_chunking_policy": "LIFO"}, "is one of FIRST_COME_FIRST_SERVED, EQUAL_PROGRESS; got 'LIFO'"),
    ],
)
def test_settings_out_of_bounds_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrtLlm(**settings)


# In the engine.


def preemptions(scheduler: TrtLlm) -> int:
    trace = Trace(arrival_ns=[0] * 24, prompt_tokens=[40] * 24, output_tokens=[60] * 24)
    spec = ReplicaSpec(cost=Linear(), scheduler=scheduler, kv_blocks=60, block_tokens=4)
    columns = run(Experiment(workload=trace, replicas=(spec,), router=RoundRobin()), check_invariants=True)
    assert (columns.requests["status"] == 0).all()
    return int(columns.requests["preemptions"].sum())


def test_nobody_is_evicted_by_default_and_memory_is_packed_otherwise() -> None:
    # Nothing stands around them that would evict.
    assert preemptions(TrtLlm()) == 0
    assert preemptions(TrtLlm(capacity_scheduler_policy="MAX_UTILIZATION")) > 10


@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])
@pytest.mark.parametrize(
    "scheduler",
    [
        TrtLlm(6, 100, disable_overlap_scheduler=True),
        TrtLlm(6, 40, "MAX_UTILIZATION", enable_chunked_prefill=True),
        TrtLlm(5, 60, "STATIC_BATCH", enable_chunked_prefill=True, context_chunking_policy="EQUAL_PROGRESS"),
        TrtLlm(8, 100, batch_wait_timeout_iters=3, batch_wait_max_tokens_ratio=0.7),
    ],
    ids=repr,
)
@pytest.mark.parametrize("seeds", few([range(2), range(2, 20)]))
def test_spans_equal_stepping(scheduler: TrtLlm, speculative: bool, seeds: range) -> None:
    for seed in seeds:
        experiment = with_scheduler(an_experiment(seed, speculative=speculative), EvictNewest(scheduler))
        assert_same(run(experiment), run(experiment, fast_forward=False))


@dataclass(frozen=True)
class Checking:
    """Works out at every look what has been promised, and compares it with what the engine keeps."""

    inner: Any

    def plan(self, view: ReplicaView, /) -> Plan:
        assert view.promised_blocks >= 0
        assert unpromised_blocks(view) == unpromised_blocks(replace(view, promised_blocks=-1))
        return self.inner.plan(view)


def without_prefixes(experiment: Experiment) -> Experiment:
    """The same without a prefix cache: what is promised of a block that several hold counts for each of them."""
    machines = tuple(
        replace(spec, hosted=tuple(replace(tenant, prefix_cache=None) for tenant in spec.hosted))
        for spec in experiment.machines
    )
    return replace(experiment, replicas=machines)


@pytest.mark.parametrize("scheduler", [TrtLlm(8, 100), Orca(8), FasterTransformer(4)], ids=repr)
@pytest.mark.parametrize("seeds", few([range(4), range(4, 80)]))
def test_the_engine_keeps_count_of_what_is_promised(scheduler: Any, seeds: range) -> None:
    for seed in seeds:
        experiment = without_prefixes(an_experiment(seed, speculative=False))
        run(with_scheduler(experiment, Checking(EvictNewest(scheduler))), fast_forward=seed % 2 == 0)
