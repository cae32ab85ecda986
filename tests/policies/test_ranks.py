"""When prompts of ranks may start."""

from __future__ import annotations

import pytest

from policies.ranks import PromptBalance, RankWork, Waited

BOTH, DECODES, PROMPT = RankWork(True, True), RankWork(False, True), RankWork(True, False)
BALANCE = PromptBalance(timeout_iters=3, batching_wait_iters=2)


def steps(balance: PromptBalance, ranks: list[tuple[RankWork, ...]]) -> list[bool]:
    waited, found = Waited(), []
    for works in ranks:
        starts, waited = balance.start(works, waited)
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
