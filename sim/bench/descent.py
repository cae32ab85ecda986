"""Robust least squares by simulation: straight lines around a place, gone along as far as another replay bears them out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
Loss = Callable[[FloatArray], FloatArray]
"""The loss of squared residuals in scipy's three rows: itself and its first and second slope."""


def soft_l1(z: FloatArray) -> FloatArray:
    """Squares of small residuals, and the sizes of large ones."""
    root = np.sqrt(1.0 + z)
    return np.stack((2.0 * (root - 1.0), 1.0 / root, -0.5 / root**3))


def cauchy(z: FloatArray) -> FloatArray:
    """Squares of small residuals; large ones count less and less."""
    return np.stack((np.log1p(z), 1.0 / (1.0 + z), -1.0 / (1.0 + z) ** 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Residuals around a place, as straight lines. Shapes: [parameters], [residuals] and [residuals, parameters]."""

    at: FloatArray
    residual: FloatArray
    slope: FloatArray


def least(
    lines: Lines, low: FloatArray, high: FloatArray, loss: Loss, *, scale: float = 1.0, widths: FloatArray | None = None
) -> FloatArray:
    """The place between *low* and *high* where the *loss* of the residuals in units of *scale* is least.

    *widths* are those of priors around 0, whose squares count whole.
    """
    from scipy.optimize import least_squares

    # It takes functions for `jac` and `loss` as well; scipy has no types, and its defaults are texts.
    solve: Callable[..., Any] = least_squares
    here, slope = lines.residual / scale, lines.slope / scale
    n, priors = len(here), np.zeros(0) if widths is None else 1.0 / widths
    jacobian = np.vstack((slope, np.diag(priors))) if len(priors) else slope

    def rho(z: FloatArray) -> FloatArray:
        ones = np.ones(len(z) - n)
        return np.hstack((loss(z[:n]), np.stack((z[n:], ones, 0.0 * ones))))

    return solve(
        lambda x: np.concatenate((here + slope @ (x - lines.at), x[: len(priors)] * priors)),
        np.clip(lines.at, low + 1e-6, high - 1e-6),
        jac=lambda _: jacobian.copy(),  # SciPy scales it in its place, up to 1.15
        bounds=(low, high),
        loss=rho,
        x_scale=1.0 if widths is None else widths,
    ).x


def descended(
    at: FloatArray,
    rounds: int,
    *,
    lines_of: Callable[[FloatArray], Lines],
    residual_of: Callable[[FloatArray], FloatArray],
    goal_of: Callable[[Lines], FloatArray | None],
    cost_of: Callable[[FloatArray, FloatArray], float],
    learns: bool = False,
    gain: float = 0.0,
) -> Lines:
    """The lines where going on from *at* ends: a round goes to the goal of its lines, or half as far and half again where the
    residuals there cost no less.

    It ends where there is no goal, no step is better or the cost falls by less than the share *gain*. With *learns* lines are bent
    to what a step in vain has shown (Broyden's update). `residual_of` is asked for a place before `lines_of` is.
    """
    lines = lines_of(at)
    for _ in range(rounds):
        goal = goal_of(lines)
        if goal is None:
            break
        cost, step, whole = cost_of(lines.residual, lines.at), 1.0, goal - lines.at
        while step > 0.2:
            moved = step * whole
            there = residual_of(lines.at + moved)
            if cost_of(there, lines.at + moved) < cost:
                break
            if learns:
                missed = there - lines.residual - lines.slope @ moved
                bend = np.outer(missed, moved) / max(float(moved @ moved), 1e-12)
                lines = replace(lines, slope=lines.slope + bend)
            step /= 2
        else:
            break
        lines = lines_of(lines.at + step * whole)
        if cost - cost_of(lines.residual, lines.at) < gain * cost:
            break
    return lines
