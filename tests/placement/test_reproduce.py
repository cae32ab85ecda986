"""The published numbers beside the simulated ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sim.reproduce import alpaserve

REFERENCE = Path(__file__).parents[3] / "shared" / "reference"


@pytest.mark.slow
def test_quick_reproduction_is_within_its_tolerances():
    rows = alpaserve.rows(quick=True)
    assert [row.cells() for row in rows if not row.ok] == []
    assert {"theory", "calibrated", "emulated", "qualitative"} == {row.kind for row in rows}


@pytest.mark.slow
def test_pictures_are_drawn(tmp_path):
    made = alpaserve.plots(tmp_path)
    assert len(made) == 4
    assert all(path.stat().st_size > 10_000 for path in made)


@pytest.mark.parametrize(
    ("mine", "theirs", "columns"),
    [
        ("alpaserve_ablation.csv", "alpaserve_ablation_artifact.csv", {"attainment": "slo_attainment"}),
        (
            "alpaserve_sim_vs_cluster.csv",
            "alpaserve_sim_vs_real_artifact.csv",
            {"cluster": "attain_real", "their_simulator": "attain_sim"},
        ),
    ],
)
def test_recorded_numbers_are_those_of_the_reference(mine, theirs, columns):
    import csv

    if not (REFERENCE / theirs).exists():
        pytest.skip(f"{theirs} is not beside the repository{os.sep}")
    with (REFERENCE / theirs).open(newline="") as file:
        reference = list(csv.DictReader(file))
    own = alpaserve._table(mine)
    for column, other in columns.items():
        assert [float(row[column]) for row in own] == [float(row[other]) for row in reference]


def test_orderings_are_counted_where_policies_differ_by_more_than_three_points():
    def found(case: str, policy: str, published: float, simulated: float) -> alpaserve._Recorded:
        return alpaserve._Recorded(experiment="e", case=case, policy=policy, published=published, simulated=simulated)

    part = [found("x", "a", 0.9, 0.8), found("x", "b", 0.5, 0.85), found("x", "c", 0.52, 0.1), found("y", "a", 0.1, 1)]
    assert alpaserve._ordering(part) == (2, 1)
