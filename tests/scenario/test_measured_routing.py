"""Measured ladders of routers beside their simulation. Skipped where the shared data is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.routing import CASES, measured, simulated

DATA = Path(__file__).parents[3] / "shared" / "serving"


@pytest.mark.slow(reason="several searches or whole runs")
def test_routers_of_the_ladder_saturate_where_they_were_measured_to() -> None:
    case = CASES["ladder"]
    path = DATA / case.table
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    rows = [row for row in measured(path) if int(row["stage"]) in (3, 4)]
    for arm in case.arms:
        mine = [row for row in rows if row["arm"] == arm]
        stages = [(float(row["offered_rate_req_s"]), float(row["stage_s"])) for row in mine]
        for row, found in zip(mine, simulated(case, arm, stages, seed=0), strict=True):
            # A queue is seconds and no queue is tenths of one; single runs.
            assert (found["ttft_mean_s"] > 2) == (float(row["ttft_mean_s"]) > 2)
            assert found["output_tokens_per_s"] == pytest.approx(float(row["output_tokens_per_s"]), rel=0.2)
