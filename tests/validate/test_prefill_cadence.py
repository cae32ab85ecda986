"""The measured points of a server with a prefill cadence."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.prefill_cadence import INTERVAL, POINTS, errors, tpot_ms


@pytest.mark.slow(reason="whole tables of measurements")
def test_tpot_with_the_cadence_is_within_ten_percent_of_what_was_measured() -> None:
    assert np.abs(errors(INTERVAL)).mean() < 0.10


@pytest.mark.slow(reason="whole tables of measurements")
def test_without_the_cadence_every_point_is_slower() -> None:
    assert all(tpot_ms(point, 1) > tpot_ms(point, INTERVAL) for point in POINTS)
