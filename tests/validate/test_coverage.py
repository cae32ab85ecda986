"""Intervals and devices left out, as `rooftrace validate` states them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from hwmodels import measured
from hwmodels.fit import with_intervals
from hwmodels.left_out import loans
from hwmodels.measured import predict
from hwmodels.profiles import load_profile
from sim.validation.coverage import coverage, coverage_markdown, loans_markdown


def collectives(folder, *, off=1.0, name="collectives_nccl_h100.csv"):
    """All-reduces on H100 as predicted, *off* times as long."""
    sizes = 2.0 ** np.arange(9, 30)
    bare = folder / name
    rows = [(n, int(size)) for n in (2, 4, 8) for size in sizes]
    head = "collective,dtype,num_gpus,message_bytes,latency_us\n"
    bare.write_text(head + "".join(f"all_reduce,half,{n},{size},1.0\n" for n, size in rows))
    seconds = predict(measured.read(bare), load_profile("h100-sxm")).seconds * off
    bare.write_text(
        head + "".join(f"all_reduce,half,{n},{size},{1e6 * s}\n" for (n, size), s in zip(rows, seconds, strict=True))
    )
    return measured.read(bare)


def test_rows_as_predicted_lie_inside_and_rows_twice_as_long_outside(tmp_path):
    (line,) = coverage([collectives(tmp_path)])
    assert (line.family, line.rows, line.inside_pct) == ("collective", 63, 100.0)
    assert 80 < line.held_pct < 97
    (line,) = coverage([collectives(tmp_path, off=2.0)])
    assert line.inside_pct == 0.0
    assert "| collective | 63 |" in coverage_markdown([line])


def test_a_loan_is_compared_with_the_device_that_did_not_lend(tmp_path):
    (loan,) = loans([collectives(tmp_path)])
    assert (loan.device, loan.variant, loan.wanted) == ("h100-sxm", "all_reduce/nccl", "all_reduce/nccl")
    assert 0 < loan.mape_pct < 30
    assert loan.distance > 0
    page = loans_markdown([loan])
    assert "| kernels | h100-sxm | mean of the devices |" in page
    assert f"| collectives | {loan.mape_pct:.1f} (" in page


def test_a_profile_gets_the_intervals_that_it_does_not_state(tmp_path):
    own = load_profile("h100-sxm")
    kernel = own.kernel("collective", ["all_reduce/nccl"])
    assert kernel is not None
    bare = replace(kernel, provenance=replace(kernel.provenance, held_low_pct=None, held_high_pct=None))
    profile = with_intervals(replace(own, kernels=(bare,)), [collectives(tmp_path)], max_points=50)
    found = profile.kernels[0].provenance
    assert found.held_low_pct is not None
    assert found.held_high_pct is not None
    assert -5.0 < found.held_low_pct <= found.held_high_pct < 5.0  # rows that the equation itself made
    assert (found.shortest_us or math.nan) < 10.0 < 1000.0 < (found.longest_us or math.nan)
    assert with_intervals(profile, [], max_points=50) == profile


def test_a_profile_without_stated_ends_has_the_ninth_decile_of_its_errors():
    kernel = load_profile("h100-sxm").kernel("collective", ["all_reduce/nccl"])
    assert kernel is not None
    origin = replace(kernel.provenance, held_low_pct=None, held_high_pct=None, held_p90_pct=25.0)
    assert origin.spread.high_pct == 25.0
    assert origin.spread.low_pct == pytest.approx(-20.0)
