"""The terms of experts behind an older release, from servers that were kept full."""

import numpy as np
import pytest

from sim.validation.fit_experts import Row, fitted, rows_with_experts, verdict, with_term

TERM = "untuned_experts"


def rows_of(model, units, n=8, term=TERM):
    """Rows that take *units* of the term, each with an error of its own."""
    rng = np.random.default_rng(len(model))
    return [
        Row(model=model, term=term, measured=1.0 + 0.4 * units + off, without=1.0, added=0.4)
        for off in rng.normal(0.0, 0.01, n)
    ]


def test_the_term_is_what_rows_were_measured_to_take():
    assert fitted(rows_of("one", 0.7, 100)) == pytest.approx(0.7, abs=0.01)
    assert fitted(rows_of("faster than its kernels", -0.5)) == 0.0


def test_errors_are_of_models_that_the_fit_had_not_seen():
    rows = [*rows_of("one", 0.5), *rows_of("another", 1.0), *rows_of("of another term", 9.0, term="block_experts_s")]
    found = verdict(rows, TERM)
    assert "16 rows of another, one;" in found
    without, held = (float(part.split(" %")[0].split()[-1]) for part in found.split(": ")[-1].split(", "))
    # Each has the other's term: 0.2 too much of 1.2, and too little of 1.4; without any 0.2 of 1.2 and 0.4 of 1.4.
    assert without == pytest.approx(100 * (0.2 / 1.2 + 0.4 / 1.4) / 2, abs=1.5)
    assert held == pytest.approx(100 * (0.2 / 1.2 + 0.2 / 1.4) / 2, abs=1.5)


def test_rows_that_the_term_hardly_lengthens_say_nothing_of_it():
    idle = Row(model="one", term=TERM, measured=2.0, without=1.0, added=0.001)
    rows = [*rows_of("one", 0.5), *rows_of("another", 0.5)]
    assert verdict([*rows, idle], TERM) == verdict(rows, TERM)


def test_servers_of_dense_models_of_one_device_and_of_long_prompts_are_left_out(shared):
    rows = rows_with_experts(shared / "measured3")
    assert {str(row["precision"]) for row in rows} == {"bfloat16", "fp8"}
    assert all(row["num_gpus"] > 1 and row["task"] != "sourcegraph-fim" for row in rows)
    assert not any("Llama-3.1" in str(row["model"]) for row in rows)


def test_a_term_stands_in_place_of_the_releases_own():
    assert with_term(TERM, 0.0).overheads.untuned_experts == 0.0
    assert with_term(TERM, 2.0).overheads.untuned_experts == 2.0
