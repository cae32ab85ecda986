"""Against tables in textbooks, closed forms and known laws; random tests state their false-alarm rate."""

import math

import numpy as np
import pytest

from sim.study import statistics as st


@pytest.mark.parametrize(
    ("probability", "degrees", "table"),
    # Law, Simulation Modeling and Analysis, table T.1.
    [(0.975, 1, 12.706), (0.975, 4, 2.776), (0.975, 10, 2.228), (0.95, 9, 1.833), (0.995, 30, 2.750), (0.9, 5, 1.476)],
)
def test_student_t_gives_the_tabulated_critical_points(probability, degrees, table):
    assert st.student_t(probability, degrees) == pytest.approx(table, abs=6e-4)


def test_ten_observations_of_law_give_his_interval():
    # Law 2015, example 4.26: mean 1.34, 90 % interval 1.34 ± 0.24.
    values = [1.20, 1.50, 1.68, 1.89, 0.95, 1.49, 1.58, 1.55, 0.50, 1.09]
    found = st.mean_interval(values, level=0.9)
    assert found.mean == pytest.approx(1.343, abs=5e-4)
    assert found.half_width == pytest.approx(0.24, abs=5e-3)
    assert (found.n, found.low, found.high) == (10, found.mean - found.half_width, found.mean + found.half_width)


def test_one_replication_has_a_mean_and_no_half_width():
    found = st.mean_interval([3.0])
    assert found.mean == 3.0
    assert math.isnan(found.half_width)
    assert str(found) == "3"


def test_intervals_hold_the_truth_as_often_as_they_say():
    samples = np.random.default_rng(1).normal(loc=1, size=(4000, 10))
    held = [abs(found.mean - 1) <= found.half_width for found in map(st.mean_interval, samples)]
    # Four standard deviations of the count: one false alarm in 16,000 seeds.
    assert np.mean(held) == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / 4000))


def test_mser5_cuts_the_transient_and_nothing_of_a_flat_series():
    rng = np.random.default_rng(5)
    transient = np.concatenate([np.linspace(10, 0, 200), np.zeros(1800)]) + rng.normal(scale=0.3, size=2000)
    assert 150 <= st.mser5(transient) <= 230
    assert st.mser5(np.ones(100)) == 0
    assert abs(st.steady(transient).mean()) < 0.05 < transient.mean()


def test_mser5_matches_the_definition_tried_at_every_cut():
    series = np.exp(-np.arange(300) / 40) + np.random.default_rng(6).normal(scale=0.1, size=300)
    means = series.reshape(-1, 5).mean(axis=1)
    errors = [np.sum((means[d:] - means[d:].mean()) ** 2) / (60 - d) ** 2 for d in range(31)]
    assert st.mser5(series) == 5 * int(np.argmin(errors)) > 0


def test_mser5_refuses_a_series_that_never_settles():
    with pytest.raises(ValueError, match="run longer"):
        st.mser5(np.arange(400.0))


def test_pairs_that_share_their_luck_compare_far_more_sharply():
    rng = np.random.default_rng(7)
    luck = rng.normal(scale=5, size=20)
    a = 100 + luck
    b = 99 + luck + rng.normal(scale=0.1, size=20)
    paired = st.difference(a, b, level=0.9999)
    unpaired = st.difference(a, rng.permutation(b), level=0.9999)
    assert paired.half_width < unpaired.half_width / 20
    assert paired.low <= -1 <= paired.high


def test_relative_difference_is_of_each_pair():
    found = st.relative_difference([100, 200], [90, 180])
    assert found.mean == pytest.approx(-0.1)
    assert found.half_width == pytest.approx(0, abs=1e-12)
    with pytest.raises(ValueError, match="positive"):
        st.relative_difference([0, 1], [1, 1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: st.mean_interval([]), "at least 1"),
        (lambda: st.mean_interval([[1.0]]), "vector"),
        (lambda: st.mean_interval([1.0, math.nan]), "finite"),
        (lambda: st.mean_interval([1.0, 2.0], level=95), "level"),
        (lambda: st.student_t(1.0, 3), "probability"),
        (lambda: st.student_t(0.9, 0), "degrees"),
        (lambda: st.difference([1.0, 2.0], [1.0]), "at least 2"),
        (lambda: st.difference([1.0, 2.0], [1.0, 2.0, 3.0]), "as many"),
    ],
)
def test_what_cannot_be_estimated_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
