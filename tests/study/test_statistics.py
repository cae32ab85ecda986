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


def ar1(rng, n, phi, start=0.0):
    noise = rng.normal(size=n)
    series = np.empty(n)
    at = start
    for i in range(n):
        at = phi * at + noise[i]
        series[i] = at
    return series


def test_batch_means_cover_a_correlated_mean_where_naive_intervals_do_not():
    rng = np.random.default_rng(2)
    naive, batched = 0, 0
    for _ in range(300):
        series = ar1(rng, 2000, 0.8)
        plain, found = st.mean_interval(series), st.batch_means(series)
        naive += abs(plain.mean) <= plain.half_width
        batched += abs(found.mean) <= found.half_width
    # Batches of 100 against a correlation time of 9 steps: nearly independent, coverage about 0.94.
    assert batched / 300 == pytest.approx(0.94, abs=4 * math.sqrt(0.94 * 0.06 / 300))
    assert naive / 300 < 0.65


def test_batch_means_of_known_batches():
    # Two batches with means 2 and 4: mean 3, standard error 1, t(0.975, 1) = 12.706.
    found = st.batch_means([99, 1, 2, 3, 3, 4, 5], n_batches=2)
    assert found.mean == 3
    assert found.half_width == pytest.approx(12.706, abs=1e-3)


def test_batch_quantiles_cover_the_quantile_of_a_correlated_series():
    rng = np.random.default_rng(3)
    truth = 1.2815515655446004 / math.sqrt(1 - 0.5**2)  # 90 % quantile of N(0, 1 / (1 - phi^2))
    held = 0
    for _ in range(200):
        found = st.batch_quantiles(ar1(rng, 4000, 0.5), 0.9)
        held += abs(found.mean - truth) <= found.half_width
    # The quantile of a batch of 200 is slightly biased: some coverage is lost, 0.88 allows for it.
    assert held / 200 > 0.88


def test_lag_one_finds_the_correlation_of_a_series():
    series = ar1(np.random.default_rng(4), 20_000, 0.7)
    assert st.lag_one(series) == pytest.approx(0.7, abs=4 * math.sqrt((1 - 0.49) / 20_000))
    assert st.lag_one([2.0, 2.0, 2.0]) == 0.0


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


def test_the_median_of_a_textbook_sample_lies_between_its_order_statistics():
    # For n = 10, [x(2), x(9)] holds the median with probability 1 - 2 (1 + 10) / 1024 = 0.9785
    # (David and Nagaraja, Order Statistics, 3rd edition, section 7.1).
    found = st.quantile_interval(np.arange(1, 11), 0.5)
    assert (found.low, found.high, found.n) == (2, 9, 10)
    assert found.coverage == pytest.approx(1 - 22 / 1024)


def test_quantile_intervals_cover_at_least_what_they_say():
    rng = np.random.default_rng(8)
    truth = -math.log(0.01)
    samples = [st.quantile_interval(rng.exponential(size=600), 0.99) for _ in range(2000)]
    held = np.mean([found.low <= truth <= found.high for found in samples])
    coverage = samples[0].coverage
    assert coverage >= 0.95
    assert held == pytest.approx(coverage, abs=4 * math.sqrt(0.05 * 0.95 / 2000))


def test_too_few_values_for_a_quantile_interval_say_how_many_are_needed():
    with pytest.raises(ValueError, match="368 are the least"):
        st.quantile_interval(np.arange(100.0), 0.99)
    assert st.quantile_interval(np.arange(500.0), 0.99).high <= 499
    with pytest.raises(ValueError, match="too few"):
        st.quantile_interval(np.arange(5.0), 0.5)
    assert st.quantile_interval(np.arange(6.0), 0.5).coverage == pytest.approx(1 - 2 / 64)


def test_replications_needed_scale_with_the_square_of_the_precision():
    pilot = [9.0, 10.0, 11.0, 10.0]
    tenth = st.mean_interval(pilot).relative
    assert st.replications_needed(pilot, tenth) == 4
    assert st.replications_needed(pilot, tenth / 3) == 36


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: st.mean_interval([]), "at least 1"),
        (lambda: st.mean_interval([[1.0]]), "vector"),
        (lambda: st.mean_interval([1.0, math.nan]), "finite"),
        (lambda: st.mean_interval([1.0, 2.0], level=95), "level"),
        (lambda: st.student_t(1.0, 3), "probability"),
        (lambda: st.student_t(0.9, 0), "degrees"),
        (lambda: st.batch_means([1.0, 2.0, 3.0]), "at least 40"),
        (lambda: st.batch_quantiles(np.ones(100), 0.99), "at least 2000"),
        (lambda: st.difference([1.0, 2.0], [1.0]), "at least 2"),
        (lambda: st.difference([1.0, 2.0], [1.0, 2.0, 3.0]), "as many"),
        (lambda: st.quantile_interval([1.0], 1.0), "probability"),
        (lambda: st.replications_needed([1.0, 2.0], 0.0), "above 0"),
    ],
)
def test_what_cannot_be_estimated_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
