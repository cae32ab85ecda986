"""What overheads.toml calls fitted: inside the bounds of its fit, moved by its data, and fitted to nothing left out."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from hwmodels.measured import read
from hwmodels.overheads import serving_stack, serving_stacks
from sim.validation.fit_stacks import (
    EAGER,
    NOT_OFFERED,
    SERVED,
    _eager_points,
    _given,
    _Point,
    _predict,
    _served_points,
    expansion_loss,
    fit_what_matters,
    left_out,
    limits,
    on_bound,
    undetermined,
)
from sim.validation.runs import rows_of, speculates, speculative_rows
from tests.validate.test_validate import DENSE, row_of

STACKS = [name for name in serving_stacks() if name != "ideal"]


def fitted_terms(name):
    stack = serving_stack(name)
    return tuple(term for term, source in stack.sources.items() if source.startswith("fitted"))


def price(points, stack):
    return np.array([_predict(point, stack) for point in points])


@pytest.mark.parametrize("name", STACKS)
def test_nothing_fitted_lies_on_a_bound_of_its_fit(name):
    names = EAGER if name == "eager" else SERVED
    terms = fitted_terms(name)
    assert terms
    for term in terms:
        value = getattr(serving_stack(name).overheads, term)
        low, high = limits(names)[term]
        assert on_bound(term, value, low, high) == "", f"{term} = {value} in [{low}, {high}]"


@pytest.mark.parametrize("name", STACKS)
def test_every_term_says_what_it_is_and_a_fitted_one_is_one_that_the_fit_has(name):
    offered = EAGER if name == "eager" else [term for term in SERVED if term not in _given(name)]
    for term, source in serving_stack(name).sources.items():
        assert re.match(r"fitted to|derived, not fitted|taken from", source), source
        assert (term in offered) == source.startswith("fitted"), term
    assert all(getattr(serving_stack(name).overheads, term) == 0.0 for term in NOT_OFFERED.get(name, ()))


@pytest.mark.parametrize(("value", "side"), [(0.0, "low"), (0.019, "low"), (0.03, ""), (1.97, ""), (1.99, "high")])
def test_a_bound_is_touched_within_a_hundredth_of_the_range(value, side):
    assert on_bound("sustained_loss", value, 0.0, 2.0) == side


def of_deployments(points):
    """A row of 4-bit experts, or the first, and one of 8-bit weights, with a short load and a shorter one each.

    Whether a term matters there at all is no matter of the load: long prompts for losses, short ones for launches.
    """
    four = [point for point in points if "gpt-oss" in point.row["model_path"]] or points
    eight = [point for point in points if str(point.row["gemm_quant_mode"]).startswith("fp8")]
    return [
        replace(point, row={**point.row, "isl": isl, "osl": 4.0, "concurrency": 1.0})
        for point, isl in ((four[0], 2048.0), (four[0], 64.0), (eight[0], 2048.0))
    ]


@pytest.mark.parametrize("name", STACKS)
def test_the_fit_moves_all_that_is_called_fitted(name, shared):
    folder = shared / "measured"
    points = _eager_points(folder)[::9] if name == "eager" else of_deployments(_served_points(folder, name))
    assert undetermined(points, serving_stack(name), fitted_terms(name), price) == []


def test_a_term_that_no_row_touches_is_named():
    point = _Point(row=row_of(DENSE) | {"osl": "4", "concurrency": "1"}, measured_s=(0.01, 0.09), group="x")
    assert undetermined([point], serving_stack("vllm"), ("step_s", "expand_loss"), price) == ["expand_loss"]


def test_a_fit_leaves_out_what_its_data_put_on_zero_and_refuses_a_bound_above(capsys):
    truth = replace(serving_stack("ideal"), name="vllm")
    truth = replace(truth, overheads=replace(truth.overheads, step_s=1e-3))

    def made(stack):
        return np.array([(stack.overheads.step_s + 1e-2 + stack.overheads.sequence_s, 0.1)] * 4)

    points = [_Point(row={}, measured_s=tuple(made(truth)[0]), group=str(n)) for n in range(4)]
    start = replace(truth, overheads=replace(truth.overheads, step_s=0.0))
    fitted, names = fit_what_matters(points, start, ("step_s",), lambda _, s: made(s), steps=30)
    assert names == ("step_s",)
    assert fitted.overheads.step_s == pytest.approx(1e-3, rel=1e-3)
    faster = [replace(point, measured_s=(9e-3, 0.1)) for point in points]
    fitted, names = fit_what_matters(faster, start, ("step_s",), lambda _, s: made(s), steps=30)
    assert (fitted.overheads.step_s, names) == (0.0, ())
    assert "put step_s on zero: left out" in capsys.readouterr().out
    slower = [replace(point, measured_s=(9e-1, 0.1)) for point in points]
    with pytest.raises(ValueError, match="vllm: step_s ends on its upper bound"):
        fit_what_matters(slower, start, ("step_s",), lambda _, s: made(s), steps=60)


def test_the_rule_that_leaves_rows_out_reads_how_they_were_run_and_no_prediction(shared):
    rows = rows_of(read(shared / "measured" / "e2e_silicon_agg.csv"))
    out = [row for row in rows if left_out(row)]
    assert len(rows) == 821
    assert len(out) == len(speculative_rows()) == 75
    assert {row["model_path"] for row in out} == {"deepseek-ai/DeepSeek-R1"}
    assert {row["backend"] for row in out} == {"trtllm", "sglang"}
    assert {str(row["provenance"]) for row in rows if not left_out(row)} >= {"internal-gap-analysis", "db-dump"}


@pytest.mark.parametrize(("said", "expected"), [("mtp", True), ("", False), ("none", False)])
def test_a_column_of_speculation_goes_before_the_list(said, expected):
    assert speculates({**speculative_rows()[0], "speculation": said}) is expected
    assert speculates(speculative_rows()[0])


def test_expansion_is_derived_from_grouped_products_of_narrow_weights(tmp_path):
    from hwmodels.measured import predict
    from hwmodels.profiles import load_profile

    head = (
        "moe_dtype,num_tokens,hidden_size,inter_size,topk,num_experts,moe_tp_size,moe_ep_size,distribution,latency_us"
    )
    row = "w4a16_mxfp4,8192,2880,2880,4,128,1,1,power_law_1.01,"
    path = tmp_path / "moe_h100_w4a16_mxfp4_trtllm1.3.csv"
    path.write_text(f"{head}\n{row}1000\n")
    profile = load_profile("h100")
    plain_s = predict(read(path), profile).seconds[0]
    at_peak_s = 6.0 * 8192 * 4 * 2880 * 2880 / profile.datasheet.flops_per_s("bf16")
    path.write_text(f"{head}\n{row}{(plain_s + 1.5 * at_peak_s) * 1e6}\n")
    assert expansion_loss(tmp_path, "trtllm") == pytest.approx(1.5, rel=1e-6)
    with pytest.raises(ValueError, match="no grouped GEMMs of sglang"):
        expansion_loss(tmp_path, "sglang")
