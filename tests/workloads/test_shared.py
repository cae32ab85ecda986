"""Generated prompts that share their beginnings: groups in stages, and conversations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from workloads import Conversations, Follows, LoadStage, Poisson, SharedPrefix, Uniform

LOAD = SharedPrefix(
    groups=3,
    prompts_per_group=2,
    system_prompt_tokens=20,
    question_tokens=12,
    output_tokens=5,
    block_tokens=8,
    stages=(LoadStage(rate_per_s=4.0, duration_s=2.0), LoadStage(rate_per_s=10.0, duration_s=1.5)),
)


def test_requests_of_a_group_share_the_full_blocks_of_its_system_prompt() -> None:
    trace = LOAD.trace(seed=3)
    ids = np.array([trace.prefix_of(row) for row in range(6)])
    assert ids.shape == (6, 4)
    # 20 tokens are two blocks of 8, and a third that the question begins in.
    assert len({tuple(row[:2]) for row in ids.tolist()}) == 3
    assert len({row[2] for row in ids.tolist()}) == len({row[3] for row in ids.tolist()}) == 6
    assert len(set(ids.reshape(-1).tolist())) == 3 * 2 + 6 * 2


def test_each_stage_begins_again_with_the_first_text() -> None:
    trace = LOAD.trace(seed=3)
    texts = [tuple(trace.prefix_of(row)) for row in range(8 + 15)]
    assert texts[6:8] == texts[:2]
    assert texts[8:14] == texts[14:20] == texts[:6]


def test_groups_come_one_after_another_where_they_are_not_shuffled() -> None:
    trace = replace(LOAD, shuffle=False).trace(seed=3)
    system_prompts = [trace.prefix_of(row)[0] for row in range(6)]
    assert system_prompts == sorted(system_prompts)
    assert [trace.prefix_of(row)[0] for row in range(8, 14)] == system_prompts
    assert [LOAD.trace(seed=3).prefix_of(row)[0] for row in range(6)] != system_prompts


def test_a_poisson_stage_has_its_number_and_about_its_rate() -> None:
    load = replace(LOAD, stages=(LoadStage(rate_per_s=50.0, duration_s=200.0),))
    trace = load.trace(seed=1)
    assert len(trace) == 10_000
    assert trace.follows is None
    # 10,000 Poisson arrivals: 200 s within five standard deviations (2 s each).
    assert trace.duration_s == pytest.approx(200, abs=10)
    counts = np.bincount((trace.arrival_s).astype(int), minlength=190)[:190]
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.5)


def test_constant_fills_the_stage_with_uneven_gaps() -> None:
    trace = replace(LOAD, arrival="constant", stages=(LoadStage(rate_per_s=50.0, duration_s=20.0),)).trace(seed=1)
    assert trace.arrival_s[-1] == pytest.approx(20.0)
    gaps = np.diff(trace.arrival_s)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.2)


def test_a_stage_has_as_many_requests_as_rate_and_time_say() -> None:
    assert LoadStage(rate_per_s=0.1, duration_s=30.0).requests == 3
    assert LoadStage(rate_per_s=3.0, duration_s=1.5).requests == 4
    with pytest.raises(ValueError, match="at least one request"):
        LoadStage(rate_per_s=0.1, duration_s=5.0)


def test_a_prompt_is_all_that_was_said_before_and_something_new() -> None:
    talk = Conversations(sessions=20, turns=Uniform(min_tokens=1, max_tokens=6), user_tokens=Uniform(min_tokens=1, max_tokens=40),
                         answer_tokens=Uniform(min_tokens=1, max_tokens=30), system_prompt_tokens=37, mean_think_s=4.0,
                         block_tokens=8)  # fmt: skip
    trace = talk.trace(Poisson(rate_per_s=2.0), seed=9)
    assert trace.follows is not None
    assert trace.session is not None
    for row in range(len(trace)):
        waits = trace.follows.rows[trace.follows.offsets[row] : trace.follows.offsets[row + 1]]
        if len(waits) == 0:
            assert 38 <= trace.prompt_tokens[row] <= 77
            continue
        (before,) = waits.tolist()
        through = int(trace.prompt_tokens[before] + trace.output_tokens[before])
        assert trace.session[before] == trace.session[row]
        assert 1 <= trace.prompt_tokens[row] - through <= 40
        full = through // 8
        assert trace.prefix_of(row)[:full].tolist() == trace.prefix_of(before)[:full].tolist()
    # No token of a prompt is without a name, for engines with smaller blocks.
    assert trace.prefix_offsets is not None
    assert (np.diff(trace.prefix_offsets) * 8 >= trace.prompt_tokens).all()
    firsts = np.flatnonzero(trace.follows.counts == 0)
    assert len({tuple(trace.prefix_of(row)[:4]) for row in firsts}) == 1
    assert len({int(trace.prefix_of(row)[4]) for row in firsts}) == 20
    assert trace.follows.delay_ns.mean() == pytest.approx(4e9, rel=0.6)


def test_joins_wait_for_all_and_are_left_out_with_those_they_wait_for() -> None:
    # Requests 0 and 1, a join of both (4), and 2 and 3 that wait for it.
    follows = Follows(offsets=[0, 0, 0, 1, 2, 4], rows=[4, 4, 0, 1], delay_ns=[5, 6, 0, 0], joins=1)
    assert len(follows) == 4
    assert follows.counts.tolist() == [0, 0, 1, 1]
    assert follows.take([0, 2]) == Follows(offsets=[0, 0, 1, 2], rows=[2, 0], delay_ns=[5, 0], joins=1)
    assert follows.take([2, 3]) is None
    assert follows.take([0, 1]) is None
    with pytest.raises(ValueError, match="waits for nobody"):
        Follows(offsets=[0, 0, 1, 1], rows=[2], delay_ns=[0], joins=1)
    with pytest.raises(ValueError, match="cannot wait for itself"):
        Follows(offsets=[0, 1, 2], rows=[1, 0], delay_ns=[0, 0], joins=1)
