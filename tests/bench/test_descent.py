"""Robust least squares on lines, and how far along them a fit goes."""

from __future__ import annotations

import numpy as np
import pytest

from sim.bench.descent import Lines, cauchy, descended, least, soft_l1


def lines(residual, slope, at=(0.0,)):
    return Lines(at=np.array(at), residual=np.array(residual), slope=np.array(slope, float))


def test_one_residual_far_off_hardly_moves_what_many_agree_on() -> None:
    most = lines([*[-1.0] * 9, -50.0], [[1.0]] * 10)
    for loss in (soft_l1, cauchy):
        assert least(most, np.array([-9.0]), np.array([9.0]), loss)[0] == pytest.approx(1.0, abs=0.4)


def test_a_prior_holds_what_the_residuals_do_not_tell_and_bounds_hold_all() -> None:
    told = lines([-5.0], [[1.0, 0.0]], at=(0.0, 0.0))
    low, high = np.full(2, -3.0), np.full(2, 3.0)
    assert least(told, low, high, cauchy, widths=np.array([100.0, 0.1])) == pytest.approx([3.0, 0.0], abs=1e-6)


def walked(residual_of, slope: float, **how):
    """The place where a descent ends whose lines have one slope, and the places that it asked for."""
    asked = []

    def tried(x):
        asked.append(float(x[0]))
        return np.array([residual_of(x[0])])

    found = descended(
        np.zeros(1),
        20,
        lines_of=lambda x: Lines(at=x, residual=np.array([residual_of(x[0])]), slope=np.array([[slope]])),
        residual_of=tried,
        goal_of=lambda each: None if abs(each.residual[0]) < 1e-3 else each.at - each.residual / each.slope[0],
        cost_of=lambda residual, _: float(residual @ residual),
        **how,
    )
    return found, asked


def test_a_step_that_costs_more_is_halved_and_the_descent_ends_at_its_goal() -> None:
    found, asked = walked(lambda x: x - 1.0, slope=0.3)
    assert asked[:3] == pytest.approx([10 / 3, 5 / 3, asked[2]])
    assert found.at[0] == pytest.approx(1.0, abs=1e-3)


def test_a_descent_that_gets_no_further_ends_where_it_is_and_may_learn_the_slope() -> None:
    found, asked = walked(lambda x: 1.0 + abs(x), slope=1.0)
    assert (found.at[0], found.slope[0, 0], len(asked)) == (0.0, 1.0, 3)
    found, _ = walked(lambda x: 1.0 + abs(x), slope=1.0, learns=True)
    assert found.slope[0, 0] == pytest.approx(-1.0)


def test_a_descent_ends_where_a_round_gains_too_little() -> None:
    _, asked = walked(lambda x: 2.0 - x, slope=-100.0, gain=0.5)
    assert len(asked) == 1
