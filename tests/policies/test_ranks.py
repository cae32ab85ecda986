"""When prompts of ranks may start."""

from __future__ import annotations

import pytest

from policies.ranks import Balance, Moment, PromptBalance, RankWork
from policies.sglang.delayer import PrefillDelayer

BOTH, DECODES, PROMPT = RankWork(True, True), RankWork(False, True), RankWork(True, False)
BALANCE = PromptBalance(timeout_iters=3, batching_wait_iters=2)


def steps(
    balance: Balance, ranks: list[tuple[RankWork, ...]], *, step_ms: int = 0, since_prompts: int = 1 << 62
) -> list[bool]:
    state, found = balance.begin(), []
    for i, works in enumerate(ranks):
        starts, state = balance.start(works, state, Moment(i * step_ms * 1_000_000, since_prompts))
        found.append(starts)
    return found


def test_prompts_that_not_every_rank_has_start_at_every_third_step() -> None:
    assert steps(BALANCE, [(BOTH, DECODES)] * 7) == [False, False, True, False, False, True, False]


def test_where_every_rank_has_one_they_wait_for_more_and_the_count_of_the_others_starts_anew() -> None:
    works = [(BOTH, DECODES), (BOTH, DECODES), (BOTH, BOTH), (BOTH, BOTH), (BOTH, BOTH), (BOTH, DECODES)]
    assert steps(BALANCE, works) == [False, False, False, False, True, False]


def test_nobody_waits_while_a_rank_has_nothing_to_decode() -> None:
    assert steps(BALANCE, [(BOTH, PROMPT), (PROMPT, DECODES), (PROMPT, PROMPT)]) == [True, True, True]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"timeout_iters": 0}, "timeout_iters is at least 1; got 0"),
        ({"batching_wait_iters": -1}, "batching_wait_iters is at least 0; got -1"),
    ],
)
def test_what_cannot_be_waited(settings: dict[str, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        PromptBalance(**settings)


# SGLang's delayer: managers/prefill_delayer.py.

ABLE, FULL = RankWork(True, True, running=6, waiting=2), RankWork(False, True, running=8)
DELAYER = PrefillDelayer(seats=8, max_delay_passes=3)


def test_prompts_that_some_ranks_could_compute_and_others_not_are_delayed_for_one_pass_less_than_the_most() -> None:
    assert steps(DELAYER, [(ABLE, FULL)] * 7) == [False, False, True, False, False, True, False]


def test_a_step_in_which_no_rank_could_ends_the_count() -> None:
    assert steps(DELAYER, [(ABLE, FULL), (FULL, FULL), (ABLE, FULL), (ABLE, FULL), (ABLE, FULL)]) == [
        *(False, True, False, False, True)
    ]


def test_a_rank_with_memory_to_spare_lets_prompts_of_all_start() -> None:
    delayer = PrefillDelayer(seats=8, low_watermark=0.5)
    assert steps(delayer, [(ABLE._replace(used=0.4), FULL)]) == [True]
    assert steps(delayer, [(ABLE._replace(used=0.6), FULL)]) == [False]
    # The one that could not compute any does not count.
    assert steps(delayer, [(ABLE._replace(used=0.6), FULL._replace(used=0.1))]) == [False]


def test_where_all_could_they_wait_for_as_many_seats_as_the_largest_recent_batch_had_but_not_the_first_time() -> None:
    began = (ABLE._replace(running=0, waiting=4),) * 2
    after = (ABLE._replace(running=6, waiting=4, started=4),) * 2
    # Two seats are free and four prompts were started together: let pass once, then delayed.
    assert steps(DELAYER, [began, after, after, after]) == [True, True, False, False]
    assert steps(DELAYER, [began, *[(ABLE._replace(running=4, waiting=4, started=4),) * 2] * 3]) == [True] * 4


def test_a_batch_is_forgotten_after_sixteen_attempts() -> None:
    large = [(ABLE._replace(running=0, waiting=6),) * 2]
    small = (ABLE._replace(running=4, waiting=1, started=1),) * 2
    first = (ABLE._replace(running=4, waiting=1, started=6),) * 2
    found = steps(PrefillDelayer(seats=8, max_delay_passes=2), [*large, first, *[small] * 40])
    # Four seats are free for a batch of six: delayed every other time, until there has been no such batch among sixteen.
    assert found[:6] == [True, True, False, True, False, True]
    assert all(found[24:])


def test_where_all_could_they_wait_for_a_queue_but_not_for_ever() -> None:
    works = (ABLE._replace(running=4, waiting=1, started=0),) * 2
    first = (ABLE._replace(running=0, waiting=4),) * 2
    delayer = PrefillDelayer(seats=40, max_delay_passes=30, queue_min_ratio=0.5, max_delay_ms=2500)
    started = (works[0]._replace(started=4),) * 2
    assert steps(delayer, [first, started, *[works] * 5], step_ms=1000) == [
        True,
        True,
        False,
        False,
        False,
        True,
        False,
    ]
    assert steps(delayer, [first, *[(works[0]._replace(waiting=2, started=4),) * 2] * 4]) == [True] * 5


def test_the_rounds_after_prompts_ask_nobody() -> None:
    delayer = PrefillDelayer(seats=8, interval=3)
    assert steps(delayer, [(ABLE, FULL)] * 3, since_prompts=2) == [True] * 3
    assert steps(delayer, [(ABLE, FULL)] * 3, since_prompts=3) == [False] * 3


def test_prompts_that_were_delayed_count_as_a_batch_of_the_queue_or_of_the_free_seats() -> None:
    few = PrefillDelayer(seats=8)
    mixed = (ABLE._replace(running=2, waiting=4), FULL)
    all_able = (ABLE._replace(running=5, waiting=1),) * 2
    # Four were to start, and three seats are free: let pass once, then delayed.
    assert steps(few, [mixed, all_able, all_able, all_able]) == [False, True, False, False]
    # Two were, by the queue, or three, by the seats.
    for works in (mixed[0]._replace(waiting=2), mixed[0]._replace(running=5)):
        assert steps(few, [(works, FULL), all_able, all_able, all_able]) == [False, True, True, True]
