"""The term of prompts through experts that lie on several devices, behind SGLang."""

import numpy as np
import pytest

from sim.validation.fit_spread import FITTED, GRID, JUDGED, at, rows_with_spread_experts


def test_errors_between_the_values_that_were_replayed_lie_on_straight_lines_of_logarithms():
    ratios = np.exp(np.outer([1.0, -1.0], GRID) / GRID[-1])
    assert at(GRID[-1] / 2, ratios) == pytest.approx(np.mean(np.abs(np.expm1([0.5, -0.5]))))
    assert at(0.0, ratios) == 0.0


def test_the_rows_of_the_fit_and_of_its_verdict_are_of_different_models(shared):
    fitted, judged = (
        {served.model.name for name in names for served, _ in rows_with_spread_experts(shared / "measured2" / name)}
        for names in (FITTED, JUDGED)
    )
    assert fitted
    assert judged
    assert not fitted & judged
