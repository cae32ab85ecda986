"""The longest of many answers and the bounds of packing, against draws and against schedules that are tried one by one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from sim.theory.rollout import longest_lognormal_tokens, packing_bound_s, packing_worst_s


@pytest.mark.parametrize(("mean", "median", "answers"), [(3000, 1500, 256), (900, 800, 7), (200, 100, 3)])
def test_the_longest_of_many_is_that_of_drawn_answers(mean: float, median: float, answers: int) -> None:
    sigma = np.sqrt(2 * np.log(mean / median))
    drawn = median * np.exp(sigma * np.random.default_rng(1).standard_normal((8_000, answers))).max(axis=1)

    within = 4 * drawn.std() / np.sqrt(len(drawn))
    assert longest_lognormal_tokens(mean, median, answers) == pytest.approx(drawn.mean(), abs=within)


def test_the_longest_of_one_is_the_mean_and_of_equal_answers_their_length() -> None:
    assert longest_lognormal_tokens(200, 100, 1) == pytest.approx(200, rel=1e-9)
    assert longest_lognormal_tokens(100, 100, 50) == 100
    with pytest.raises(ValueError, match="mean is not below its median"):
        longest_lognormal_tokens(100, 200, 5)


def test_no_assignment_beats_the_bound_and_no_list_is_worse_than_the_worst() -> None:
    rng = np.random.default_rng(2)
    for _ in range(30):
        jobs, machines = rng.integers(1, 20, size=6).tolist(), int(rng.integers(1, 4))
        best = min(
            max(sum(job for job, at in zip(jobs, places, strict=True) if at == m) for m in range(machines))
            for places in itertools.product(range(machines), repeat=len(jobs))
        )
        listed = [0] * machines
        for job in jobs:
            listed[listed.index(min(listed))] += job

        bound = packing_bound_s(max(jobs), sum(jobs), machines)
        assert bound <= best <= max(listed) <= packing_worst_s(max(jobs), sum(jobs), machines) + 1e-9
        assert best < 2 * bound
