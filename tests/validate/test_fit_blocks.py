"""The terms of experts in FP8 blocks that lie on several devices."""

import numpy as np
import pytest

from hwmodels.overheads import serving_stack
from sim.validation.fit_blocks import FITS, at, rows_with_spread_experts

GRID = (0.0, 2.0, 4.0)


def test_errors_between_the_values_that_were_replayed_lie_on_straight_lines_of_logarithms():
    ratios = np.exp(np.outer([1.0, -1.0], GRID) / GRID[-1])
    assert at(GRID[-1] / 2, GRID, ratios) == pytest.approx(np.mean(np.abs(np.expm1([0.5, -0.5]))))
    assert at(0.0, GRID, ratios) == 0.0


@pytest.mark.parametrize("fit", FITS, ids=lambda fit: fit.stack)
def test_rows_that_judge_a_term_are_of_another_model_or_speculate_and_all_are_of_its_release(fit, shared):
    fitted, judged = (
        [served for name in names for served, _ in rows_with_spread_experts(fit, shared / "measured2" / name)]
        for names in (fit.fitted, fit.judged)
    )
    assert fitted
    assert judged
    assert all(serving_stack(fit.stack, served.release).release == fit.release for served in [*fitted, *judged])
    seen = {(served.model.name, served.speculation is None) for served in fitted}
    assert not seen & {(served.model.name, served.speculation is None) for served in judged}


@pytest.mark.parametrize("fit", FITS, ids=lambda fit: fit.stack)
def test_the_release_has_the_term(fit):
    value = getattr(serving_stack(fit.stack, fit.release).overheads, fit.term)
    assert fit.grid[0] < value < fit.grid[-1]
