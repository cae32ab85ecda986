"""Temperature, filters and Markov models."""

import numpy as np
import pytest

from sim.tokens import Markov, filtered

P = np.array([0.1, 0.4, 0.2, 0.3])


def test_no_filter_normalises_only():
    np.testing.assert_allclose(filtered(P * 5.0), P)


def test_temperature_sharpens_and_flattens():
    np.testing.assert_allclose(filtered(P, temperature=0.5), P**2 / (P**2).sum())
    np.testing.assert_allclose(filtered(P, temperature=1e9), np.full(4, 0.25), atol=1e-8)


def test_temperature_zero_takes_the_first_of_a_tie():
    np.testing.assert_array_equal(filtered([0.2, 0.4, 0.4], temperature=0.0), [0.0, 1.0, 0.0])


def test_a_low_temperature_does_not_overflow():
    np.testing.assert_allclose(filtered([0.3, 0.7, 0.0], temperature=1e-4), [0.0, 1.0, 0.0], atol=1e-12)


def test_top_k_keeps_the_most_probable():
    np.testing.assert_allclose(filtered(P, top_k=2), [0.0, 4 / 7, 0.0, 3 / 7])
    np.testing.assert_allclose(filtered(P, top_k=9), P)
    np.testing.assert_array_equal(filtered([0.25] * 4, top_k=1), [1.0, 0.0, 0.0, 0.0])


def test_nucleus_keeps_the_token_that_crosses_the_mass():
    np.testing.assert_allclose(filtered(P, top_p=0.5), [0.0, 4 / 7, 0.0, 3 / 7])
    np.testing.assert_allclose(filtered(P, top_p=0.7), [0.0, 4 / 7, 0.0, 3 / 7])
    np.testing.assert_allclose(filtered(P, top_p=1.0), P)
    np.testing.assert_allclose(filtered(P, top_p=1e-9), [0.0, 1.0, 0.0, 0.0])


def test_filters_work_on_rows_in_the_order_temperature_top_k_top_p():
    rows = filtered([P, P[::-1]], temperature=0.5, top_k=3, top_p=0.8)
    sharp = P**2 * [0, 1, 1, 1]
    sharp /= sharp.sum()
    expected = sharp * (sharp > 0.2)
    np.testing.assert_allclose(rows[0], expected / expected.sum())
    np.testing.assert_allclose(rows[1], rows[0][::-1])


def test_a_model_of_a_lower_order_ignores_the_older_token():
    bigram = Markov(order=1, probabilities=np.array([[0.9, 0.1], [0.2, 0.8]]))
    np.testing.assert_array_equal(bigram.lifted(2), bigram.probabilities[[0, 1, 0, 1]])


def test_a_token_without_probability_never_comes():
    model = Markov(order=1, probabilities=np.array([[0.0, 1.0, 0.0], [0.5, 0.0, 0.5], [1.0, 0.0, 0.0]]))
    rng = np.random.default_rng(3)
    state = np.repeat([0, 1, 2], 100_000)
    token = model.sample(state, rng)
    assert (token[state == 0] == 1).all()
    assert set(token[state == 1].tolist()) == {0, 2}
    assert (token[state == 2] == 0).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: filtered([0.5, -0.5]), "probabilities are finite, 0 or more"),
        (lambda: filtered([0.0, 0.0]), "sum to more than 0"),
        (lambda: filtered(P, temperature=-1.0), "temperature is 0"),
        (lambda: filtered(P, top_k=0), "top_k is a whole number, 1 or more"),
        (lambda: filtered(P, top_p=0.0), "top_p is a mass in"),
        (lambda: Markov(order=1, probabilities=np.full((2, 3), 1 / 3)), "vocabulary \\*\\* order rows"),
        (lambda: Markov.from_distribution([0.5, 0.4]), "sums to 1"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
