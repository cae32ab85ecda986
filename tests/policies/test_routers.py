"""Routers, by literals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from policies.routers import (
    AdapterAffinity,
    AdapterLoad,
    Booked,
    Dynamo,
    LeastKv,
    LeastKvUse,
    LeastOutstanding,
    LeastQueue,
    LlmD,
    Load,
    PowerOfTwo,
    Prefix,
    Random,
    RoundRobin,
    RoutedRequest,
    SessionAffinity,
    TrtLlmRanks,
    VllmRanks,
)

BUSY, CALM, IDLE = Load(waiting=5, running=3), Load(running=2), Load()


def test_round_robin_takes_turns_by_the_number_of_the_request_among_those_for_its_model() -> None:
    loads = (BUSY, CALM, IDLE)
    assert [RoundRobin().route(RoutedRequest(2 * i, turn=i), loads) for i in range(5)] == [0, 1, 2, 0, 1]


def test_least_outstanding_counts_waiting_and_running_and_prefers_the_first_of_equals() -> None:
    assert LeastOutstanding().route(RoutedRequest(0), (BUSY, CALM, IDLE)) == 2
    assert LeastOutstanding().route(RoutedRequest(0), (BUSY, CALM, CALM)) == 1
    assert LeastOutstanding().route(RoutedRequest(0), (Load(waiting=2), Load(running=1), Load(running=1))) == 1


@pytest.mark.parametrize(("draw", "expected"), [(0.0, 0), (0.34, 1), (0.99, 2)])
def test_random_takes_its_request_s_own_draw(draw: float, expected: int) -> None:
    assert Random().route(RoutedRequest(0, draws=(draw, 0.0)), (BUSY, CALM, IDLE)) == expected


def test_power_of_two_takes_the_less_loaded_of_two_different_replicas() -> None:
    loads = (BUSY, CALM, IDLE)
    assert PowerOfTwo().route(RoutedRequest(0, draws=(0.0, 0.0)), loads) == 1  # BUSY against CALM
    assert PowerOfTwo().route(RoutedRequest(0, draws=(0.5, 0.0)), loads) == 1  # CALM against BUSY
    assert PowerOfTwo().route(RoutedRequest(0, draws=(0.5, 0.9)), loads) == 2  # CALM against IDLE
    assert PowerOfTwo().route(RoutedRequest(0, draws=(0.9, 0.9)), (IDLE,)) == 0


def test_power_of_two_draws_every_pair_alike() -> None:
    # Of three equal replicas each is drawn first a third of the time, and equals stay with the first drawn.
    draws = np.random.default_rng(0).random((3000, 2)).tolist()
    chosen = [PowerOfTwo().route(RoutedRequest(0, draws=tuple(pair)), (IDLE, IDLE, IDLE)) for pair in draws]
    # 5 standard deviations of a binomial count.
    assert np.abs(np.bincount(chosen, minlength=3) - 1000).max() < 5 * np.sqrt(3000 * 2 / 9)


def test_least_kv_looks_at_memory_first() -> None:
    loads = (Load(waiting=9, kv_blocks_used=10), Load(kv_blocks_used=20), Load(waiting=1, kv_blocks_used=10))
    assert LeastKv().route(RoutedRequest(0), loads) == 2


def test_least_queue_counts_who_waits_before_who_runs():
    assert LeastQueue().route(RoutedRequest(0), (Load(waiting=1), Load(running=9), Load(running=8))) == 2


def test_least_kv_use_takes_shares_not_blocks():
    assert (
        LeastKvUse().route(RoutedRequest(0), (Load(kv_blocks_used=5, kv_use=0.9), Load(kv_blocks_used=50, kv_use=0.1)))
        == 1
    )


def test_a_session_stays_where_it_was_unless_the_queue_there_is_long():
    loads = (Load(waiting=3), IDLE, Load(waiting=1))
    stay = SessionAffinity(inner=LeastOutstanding())
    assert stay.route(RoutedRequest(0, session=7, served_by=0), loads) == 0
    assert stay.route(RoutedRequest(0, session=7), loads) == 1
    shy = SessionAffinity(inner=LeastOutstanding(), max_waiting=2)
    assert [shy.route(RoutedRequest(0, session=7, served_by=at), loads) for at in (0, 2)] == [1, 2]
    just = SessionAffinity(inner=LeastOutstanding(), max_waiting=3)
    assert just.route(RoutedRequest(0, session=7, served_by=0), loads) == 0


def test_prefix_takes_the_longest_then_the_least_loaded():
    loads = (Load(found=32), Load(found=64, running=2), Load(found=64, running=1))
    assert Prefix().route(RoutedRequest(0, prompt_tokens=100), loads) == 2
    assert Prefix().route(RoutedRequest(0, prompt_tokens=10), (BUSY, CALM, IDLE)) == 2


def test_shares_are_of_the_blocks_that_the_index_looks_at():
    loads = (Load(found=64), Load(found=0))
    request = RoutedRequest(0, prompt_tokens=200)
    assert Prefix().shares(request, loads) == [64 / 192, 0.0]
    short = Prefix(index="approximate", block_tokens=32, max_blocks=4)
    assert short.shares(request, loads) == [0.5, 0.0]


def test_scores_of_llm_d_by_hand():
    loads = (
        Load(waiting=4, kv_use=0.5, found=160),
        Load(waiting=0, kv_use=0.25),
        Load(waiting=1, kv_use=0.0, found=80),
    )
    router = LlmD(queue=2.0, kv=1.0, prefix=3.0, session=1.0, no_hit_lru=2.0)
    scores = router.scores(RoutedRequest(0, prompt_tokens=160, served_by=1), loads)
    # The same half for all where somebody has something of the prompt.
    assert scores == pytest.approx([0.5 + 3.0 + 1.0, 2.0 + 0.75 + 1.0 + 1.0, 1.5 + 1.0 + 1.5 + 1.0])
    assert router.route(RoutedRequest(0, prompt_tokens=160, served_by=1), loads) == 2


def test_llm_d_sends_what_nobody_has_to_who_got_such_last_longest_ago():
    loads = tuple(Load(no_hit_order=order) for order in (4, -1, 2))
    assert LlmD(no_hit_lru=2.0).scores(RoutedRequest(0, prompt_tokens=160), loads) == [4.0, 6.0, 5.0]


def test_llm_d_weighs_queue_memory_and_prefix_alone_unless_it_is_told_more() -> None:
    load = Load(kv_use=0.5, found=32, no_hit_order=0)
    assert LlmD().scores(RoutedRequest(0, prompt_tokens=64), (load,)) == [2.0 + 2.0 * 0.5 + 3.0 * 0.5]
    assert not LlmD().knows.no_hits


@pytest.mark.parametrize(
    ("prompt", "blocks"), [(15, 0), (16, 1), (17, 2), (32, 2), (4095, 256), (4096, 256), (4097, 256), (9000, 256)]
)
def test_llm_d_looks_at_256_blocks_of_the_engine_the_rest_of_a_prompt_among_them(prompt: int, blocks: int) -> None:
    sent = LlmD(index="approximate").knows.sent
    assert sent is not None
    assert sent.blocks_of(prompt, sent.tokens_in(16)) == blocks
    (share,) = LlmD(index="approximate").shares(RoutedRequest(0, prompt_tokens=prompt), (Load(found=16),))
    assert share == (1 / blocks if blocks else 0.0)


def test_an_index_has_the_engine_s_blocks_and_dynamo_s_forgets_after_two_minutes() -> None:
    of_llm_d, of_dynamo = (router(index="approximate").knows.sent for router in (LlmD, Dynamo))
    assert of_llm_d is not None
    assert of_dynamo is not None
    assert [of_llm_d.tokens_in(size) for size in (16, 64, 1)] == [16, 64, 16]
    assert (of_llm_d.capacity_blocks, of_llm_d.max_age_s) == (None, None)
    assert (of_dynamo.max_age_s, of_dynamo.max_blocks, of_dynamo.blocks_of(10**6 + 15, 16)) == (120.0, None, 62500)
    assert Dynamo(index="approximate", block_tokens=64).knows.sent == replace(of_dynamo, block_tokens=64)


def test_llm_d_draws_among_equals():
    assert [LlmD(no_hit_lru=0.0).route(RoutedRequest(0, draws=(draw, 0.0)), (IDLE, IDLE)) for draw in (0.4, 0.6)] == [
        0,
        1,
    ]


def test_costs_of_dynamo_by_hand():
    # 70 tokens are 5 blocks. The first has booked 10 and shares none; the second 14, and shares 3 of the 4 that it has cached.
    loads = (Load(account=Booked(10, 0, 32), kv_blocks_used=99), Load(account=Booked(14, 3, 0), found=64))
    request = RoutedRequest(0, prompt_tokens=70, draws=(0.0, 0.0))
    # (32 + 70) / 16 blocks to compute on the first, (70 - 64) / 16 on the second; held: 10 + 5 and 14 + 2.
    assert Dynamo(overlap_weight=2.0).costs(request, loads) == [2 * 102 / 16 + 15, 2 * 6 / 16 + 16]
    assert Dynamo().route(request, loads) == 1
    assert Dynamo(overlap_weight=0.0).route(request, loads) == 0


def test_a_cached_block_saves_dynamo_one_and_two_where_a_request_in_flight_has_it():
    request = RoutedRequest(0, prompt_tokens=64)
    loads = (Load(), Load(found=16), Load(found=16, account=Booked(blocks=1, shared_blocks=1)))
    nothing, idle, in_flight = Dynamo().costs(request, loads)
    assert (nothing, idle, in_flight - 1) == (8, 7, 6)


def test_dynamo_at_a_temperature_draws_by_exp_of_the_scaled_cost():
    loads = (Load(account=Booked(blocks=10)), Load(account=Booked(blocks=20)))
    # Costs 10 and 20 are one range apart: the first has 1 / (1 + 1/e) of the draws.
    warm = Dynamo(temperature=1.0)
    assert [warm.route(RoutedRequest(0, draws=(draw, 0.0)), loads) for draw in (0.0, 0.73, 0.74)] == [0, 0, 1]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"index": "exact", "capacity_blocks": 5}, "capacity_blocks is a setting of index: approximate"),
        ({"index": "approximate", "event_delay_s": 1.0}, "event_delay_s is a setting of index: exact"),
        ({"index": "approximate", "block_tokens": 0}, "block_tokens is at least 1; got 0"),
        ({"event_delay_s": -1.0}, "event_delay_s is a finite time of at least 0"),
        ({"index": "guess"}, "index is exact or approximate; got 'guess'"),
    ],
)
def test_settings_of_an_index_that_do_not_fit_are_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        Prefix(**settings)


def test_weights_are_not_negative_nor_all_zero():
    with pytest.raises(ValueError, match="prefix is a weight of at least 0; got -1"):
        LlmD(prefix=-1.0)
    with pytest.raises(ValueError, match="some weight has to be above 0"):
        LlmD(queue=0.0, kv=0.0, prefix=0.0, no_hit_lru=0.0)


# Between ranks.


def test_vllm_counts_requests_and_weighs_those_that_wait_where_memory_is_short() -> None:
    # 4 requests each; the first's queue counts 2 x 6 x (0.75 - 0.5) = 3 more, that of the second nothing below half of its memory.
    loads = (Load(waiting=2, running=2, kv_use=0.75), Load(waiting=2, running=2, kv_use=0.4), Load(running=5))
    assert [VllmRanks().route(RoutedRequest(0, turn=turn), loads) for turn in range(3)] == [1, 1, 1]
    assert VllmRanks().route(RoutedRequest(0), (loads[0], Load(running=6), Load(running=8))) == 1


def test_vllm_goes_on_from_the_next_rank_among_equals() -> None:
    assert [VllmRanks().route(RoutedRequest(9, turn=turn), (IDLE, IDLE, CALM)) for turn in range(4)] == [0, 1, 0, 0]


def test_vllm_before_counted_four_for_each_that_waits() -> None:
    loads = (Load(waiting=1), Load(running=3), Load(running=5))
    assert VllmRanks(waiting_weight=4.0).route(RoutedRequest(0), loads) == 1
    assert VllmRanks().route(RoutedRequest(0), loads) == 0
    with pytest.raises(ValueError, match="waiting_weight is a finite number of at least 0; got -1"):
        VllmRanks(waiting_weight=-1)


def test_trtllm_spreads_requests_evenly_before_it_looks_at_tokens() -> None:
    # Seven requests with this one are three a rank at most: the first has them, of the others the one with the fewest tokens.
    # Outputs and what is computed do not count.
    few, many = (
        Load(running=1, prompt_tokens=300),
        Load(running=2, prompt_tokens=200, kv_blocks_used=90, prefill_tokens=9),
    )
    assert TrtLlmRanks().route(RoutedRequest(0), (Load(running=3), few, many)) == 2
    assert TrtLlmRanks().route(RoutedRequest(0), (IDLE, IDLE)) == 0
    assert (
        TrtLlmRanks().route(RoutedRequest(0), (Load(running=2, prompt_tokens=5), Load(running=2, prompt_tokens=4))) == 1
    )


def test_a_machine_that_runs_the_adapter_is_best_then_one_with_room_then_one_where_it_waits() -> None:
    full = frozenset({1, 2})
    loads = [
        Load(adapter_load=AdapterLoad(running=full, max_loras=2)),
        Load(adapter_load=AdapterLoad(running=full, waiting=frozenset({7}), max_loras=2)),
        Load(adapter_load=AdapterLoad(running=frozenset({1}), max_loras=2)),
        Load(adapter_load=AdapterLoad(running=frozenset({7, 2}), max_loras=2)),
    ]
    request = RoutedRequest(0, adapter=7)
    assert [load.adapter_load.score(7) for load in loads] == [0.0, 0.6, 0.8, 1.0]
    for shown in (loads, loads[:3], loads[:2]):
        assert AdapterAffinity().route(request, shown) == len(shown) - 1
        assert LlmD(queue=0.0, kv=0.0, prefix=0.0, adapter=1.0).route(request, shown) == len(shown) - 1


def test_the_inner_router_chooses_among_the_best_machines_for_an_adapter_and_among_all_for_the_base_model() -> None:
    has = AdapterLoad(running=frozenset({3}), max_loras=1)
    loads = [Load(running=0), Load(running=5, adapter_load=has), Load(running=2, adapter_load=has)]
    assert AdapterAffinity().route(RoutedRequest(0, adapter=3), loads) == 2
    assert AdapterAffinity().route(RoutedRequest(0), loads) == 0
    assert AdapterAffinity(SessionAffinity()).route(RoutedRequest(0, adapter=3, served_by=1), loads) == 1


def test_an_adapter_that_has_a_machine_of_its_own_is_served_there() -> None:
    homes = [AdapterAffinity(apart=True).route(RoutedRequest(0, adapter=i), [Load(running=i)] * 3) for i in range(6)]
    assert homes == [0, 1, 2, 0, 1, 2]


def test_a_router_chooses_among_the_machines_that_an_adapter_has() -> None:
    apart = AdapterAffinity(LeastOutstanding(), apart=True, each=2)
    loads = [Load(running=running) for running in (3, 1, 2)]
    assert [apart.route(RoutedRequest(0, adapter=adapter), loads) for adapter in range(3)] == [1, 2, 1]
    assert AdapterAffinity(apart=True, each=9).route(RoutedRequest(0, adapter=0), loads) == 1
    with pytest.raises(ValueError, match="each is the machines of an adapter: at least 1, and more only with apart"):
        AdapterAffinity(each=2)
