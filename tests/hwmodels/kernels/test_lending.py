"""Constants that a device borrows: from whom, how it scales, how far off it may be; and the intervals of what was measured."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

import numpy as np
import pytest

from hwmodels.calibrated import Calibrated
from hwmodels.deployment import deploy
from hwmodels.device import device_catalogue, load_device
from hwmodels.kernels.families import FAMILIES
from hwmodels.kernels.intervals import Spread, coverage_pct, spread
from hwmodels.kernels.parameters import blended, bounds, parameter
from hwmodels.left_out import Loan, covered_pct, widths
from hwmodels.profiles import borrow_for, calibrated_devices, load_profile
from hwmodels.profiles.lending import Loans, distance, quantities

H100, H200 = (quantities(load_device(name)) for name in ("h100-sxm", "h200"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Toy:
    share: float = parameter(0.5, 0.01, 1.0, "a share")
    extra_s: float = parameter(0.0, 0.0, 1.0, "a time that may be none")
    in_flight: float = parameter(1.0, 0.001, 100.0, "SM shares of bandwidth", scales_with={"sms": 1, "hbm": -1})


def test_borrowed_parameters_are_the_donors_mean_after_scaling_with_the_datasheet():
    one = [(1.0, Toy(share=0.8, extra_s=0.2, in_flight=2.0), H100)]
    assert blended(Toy, one, H100) == Toy(share=0.8, extra_s=0.2, in_flight=2.0)
    assert blended(Toy, one, H200).in_flight == pytest.approx(2.0 * H100["hbm"] / H200["hbm"])
    # A time is a number of cycles where nothing else is said.
    assert blended(Toy, one, {**H100, "clock": 2 * H100["clock"]}).extra_s == pytest.approx(0.1)
    two = [(0.5, Toy(share=0.2), H200), (0.5, Toy(share=0.8, extra_s=0.4), H100)]
    assert blended(Toy, two, H200).share == pytest.approx(0.4)  # geometric: sqrt(0.2 * 0.8)
    assert blended(Toy, two, H200).extra_s == pytest.approx(0.2)  # a time that may be 0 has no geometric mean


def test_a_parameter_scales_with_datasheet_quantities_only():
    with pytest.raises(ValueError, match="colour is not a datasheet quantity; there are sms, clock, peak"):
        parameter(1.0, 0.0, 2.0, "why", scales_with={"colour": 1})


def test_the_nearest_donor_counts_most_and_a_device_does_not_lend_to_itself():
    for name in calibrated_devices():
        assert name not in Loans(device=load_device(name), without=(name,)).donors
    lent = load_profile("gb200").kernel("collective", ["all_reduce/nccl"])
    assert lent is not None
    assert lent.provenance.borrowed_from.startswith("b200, ")
    own = load_profile("b200").get("collective", ["all_reduce/nccl"])
    far = load_profile("h200").get("collective", ["all_reduce/nccl"])
    assert abs(math.log(lent.params.start_s / own.start_s)) < abs(math.log(lent.params.start_s / far.start_s))


def test_weights_of_donors_fall_with_the_square_of_their_distance():
    device = load_device("h100-pcie")
    lender = load_profile("h100-pcie").lender
    assert lender is not None
    kernel = lender.kernel("gemm", "fp8/vllm")
    apart = np.array(
        [distance(device, load_device(name), "gemm") for name in kernel.provenance.borrowed_from.split(", ")]
    )
    assert len(apart) > 2
    weights = 1.0 / (0.15 + apart) ** 2
    assert lender.distance("gemm", "fp8/vllm") == pytest.approx(float(weights @ apart / weights.sum()))


def test_behind_a_switch_nothing_is_borrowed_from_servers_without_one():
    for name, makers in (("gb300", "NVLink"), ("h20", "NVLink")):
        kernel = load_profile(name).kernel("collective", ["all_reduce/nccl"])
        assert kernel is not None
        assert {load_device(donor).link.kind for donor in kernel.provenance.borrowed_from.split(", ")} == {makers}
    card = load_profile("rtx-4090").kernel("collective", ["all_reduce/nccl"])
    assert card is not None
    assert {"l40s", "rtx-pro-6000", "h100-sxm"} <= set(card.provenance.borrowed_from.split(", "))


def test_a_measured_device_keeps_its_own_and_is_lent_only_the_rest():
    l40s = load_profile("l40s")
    gemm, moe = l40s.kernel("gemm", ["bf16/vllm"]), l40s.kernel("moe", ["bf16/vllm"])
    assert gemm is not None
    assert moe is not None
    assert not gemm.provenance.borrowed_from
    assert "h200" in moe.provenance.borrowed_from
    assert all(not kernel.provenance.borrowed_from for kernel in l40s.kernels)
    whole = l40s.whole()
    assert whole.lender is None
    assert {kernel.variant for kernel in whole.kernels if kernel.family == "moe"} == set(l40s.variants("moe"))


BORROWERS = sorted(set(device_catalogue()) - {"gaudi3", "b60", "trainium2"})  # nobody lends to their makers' devices


@pytest.mark.parametrize(
    "names",
    [BORROWERS[::4], pytest.param(BORROWERS, marks=pytest.mark.slow(reason="whole tables of measurements"))],
    ids=["some", "all"],
)
def test_every_loan_of_every_device_is_within_its_bounds(names):
    for name in names:
        for kernel in load_profile(name).whole().kernels:
            for field, (_, low, high) in bounds(FAMILIES[kernel.family].parameters).items():
                assert low <= getattr(kernel.params, field) <= high, (name, kernel.family, kernel.variant, field)


def test_distance_is_none_to_itself_and_grows_with_the_datasheet():
    h100 = load_device("h100-sxm")
    assert distance(h100, h100, "gemm") == distance(h100, h100, "collective") == 0.0
    near, far = (replace(h100, hbm_bytes_per_s=h100.hbm_bytes_per_s * times) for times in (1.2, 4.0))
    assert 0 < distance(h100, near, "gemm") < distance(h100, far, "gemm")
    assert distance(h100, load_device("h100-pcie"), "collective") > 2


def test_intervals_of_loans_are_wider_than_those_of_measurements():
    shape = {"kind": "all_reduce", "message_bytes": 1e6, "devices": 4, "link_bytes_per_s": 450e9}
    own = load_profile("h100-sxm").estimate("collective", ["all_reduce/nccl"], **shape)
    lent = borrow_for(load_device("h100-sxm")).estimate("collective", ["all_reduce/nccl"], **shape)
    assert own.low < own.seconds < own.high
    assert lent.high / lent.low > own.high / own.low > 1.05


def test_an_interval_widens_outside_what_was_measured():
    within = Spread(low_pct=-20.0, high_pct=25.0, shortest_s=1e-6, longest_s=1e-3)
    inside, outside = within.around(1e-4), within.around(math.e * 1e-3)
    assert (inside.low, inside.high) == (pytest.approx(0.8e-4), pytest.approx(1.25e-4))
    assert outside.high / outside.seconds == pytest.approx(1.25**2)
    assert outside.low / outside.seconds == pytest.approx(0.8**2)
    columns = within.around(np.array([1e-4, math.e * 1e-3]))
    assert columns.high.tolist() == [inside.high, outside.high]
    assert within.factor == pytest.approx(1.25)
    with pytest.raises(ValueError, match="an interval runs from above -100 %"):
        Spread(low_pct=5.0, high_pct=-5.0)


def test_nine_in_ten_of_what_is_held_back_lie_inside():
    """The covered share of 4000 draws has a standard error of half a percent: 88 to 92 % fails by chance once in 10,000."""
    ratio = np.random.default_rng(5).lognormal(0.0, 0.2, 4000)
    low, high = spread(ratio)
    assert (low, high) == (pytest.approx(100 * (math.exp(-0.329) - 1), abs=2), pytest.approx(39, abs=4))
    assert 88 < coverage_pct(ratio, np.arange(4000)) < 92
    assert math.isnan(coverage_pct([1.0, 1.1], ["same", "same"]))


def test_few_rows_take_the_extremes():
    assert spread([0.9, 1.0, 1.2]) == (pytest.approx(-10.0), pytest.approx(20.0))


def loan(device, ratio, distance=0.0, family="gemm"):
    return Loan(
        file="f.csv", device=device, family=family, variant="bf16/vllm", wanted="bf16/vllm", distance=distance,
        ratio=np.asarray(ratio),
    )  # fmt: skip


def test_the_width_of_loans_is_that_of_devices_left_out_for_each_unit_of_distance():
    ratios = np.exp(np.linspace(-1.0, 1.0, 1001))
    near = widths([loan("a", ratios), loan("b", ratios)])
    assert near["gemm"] == near["other"] == (pytest.approx(-0.95, abs=0.01), pytest.approx(0.95, abs=0.01))
    far = widths([loan("a", ratios, distance=1.0), loan("b", ratios, distance=1.0)])
    assert far["gemm"][1] == pytest.approx(near["gemm"][1] / 2)
    assert "gemm" not in widths([loan("a", ratios)])
    assert covered_pct([loan("a", ratios), loan("b", ratios)], ["gemm"]) == pytest.approx(95.0, abs=0.5)
    assert covered_pct([loan("a", ratios), loan("b", 10 * ratios)], ["gemm"]) < 30.0


@pytest.mark.parametrize("name", ["l4", "rtx-4090", "h100-pcie", "gb200"])
def test_no_interval_of_a_product_reaches_below_the_reading_of_its_weights(name):
    device = load_device(name)
    shape = {"n": 16384.0, "k": 8192.0, "dtype": "bf16", "weight_bytes": 2.0, "library": "vllm"}
    profile = load_profile(name)
    shape = {**shape, "m": 1.0, "activation_bytes": 2.0, "library": "search", "quantise_activations": False}
    found = profile.estimate("gemm", ["bf16/vllm"], **shape)
    floor_s = 16384 * 8192 * 2 / device.hbm_bytes_per_s
    kernel = profile.kernel("gemm", ["bf16/vllm"])
    assert kernel is not None
    assert kernel.provenance.spread.around(found.seconds).low < floor_s
    assert found.low == pytest.approx(floor_s)
    columns = profile.estimate("gemm", ["bf16/vllm"], **{**shape, "n": np.array([64.0, 16384.0])})
    assert columns.low[1] == pytest.approx(floor_s)
    # A weight that stays in the cache is bounded by no bandwidth of memory.
    assert columns.low[0] == pytest.approx(kernel.provenance.spread.around(columns.seconds).low[0])


def test_a_note_of_loans_names_the_families_asked_for():
    lender = load_profile("gb200").lender
    assert lender is not None
    assert (
        lender.note_of({"gemm": [1.5, 2.0], "decode": [1.7, 1.7]}).rpartition("priced: ")[2]
        == "GEMM 1.5 to 2, decodes 1.7"
    )
    assert "latent attention" in lender.note


@pytest.mark.parametrize(
    ("name", "model", "word", "family"),
    [
        ("rtx-4090", "deepseek-r1", "latent attention", "mla_decode"),
        ("l4", "qwen3-30b-a3b", "experts", "moe"),
        ("h100-pcie", "llama-3.1-8b", "collectives", "collective"),
    ],
)
def test_a_note_states_the_factors_of_those_who_lend(name, model, word, family):
    """Not of the nearest device, which may have nothing of the kind to lend, as L40S has no latent attention."""
    parallel = {"tensor": 2, "expert": 2 if family == "moe" else 1}
    found = deploy(model=model, hardware=name, parallel=parallel, cost=Calibrated.for_stack("vllm"))
    assert found.profile is not None
    lender = found.profile.lender
    assert lender is not None
    stated = re.search(rf"{word} (?:[\d.]+ to )?([\d.]+)", lender.note_of(found.lent_factors))
    assert stated is not None
    lenders = lender.factors(family)
    assert min(lenders) * 0.94 < float(stated[1]) < max(lenders) * 1.06
    for factor in found.lent_factors[family]:
        assert np.isclose(factor, lenders).any()


def test_what_a_datasheet_does_not_state_is_no_distance():
    v5p, v6e = load_device("tpu-v5p"), load_device("tpu-v6e")
    assert v5p.l2_bytes is None
    known = replace(v5p, l2_bytes=2.0 * (v6e.l2_bytes or 0.0))
    assert distance(v5p, v6e, "tpu_gemm") == pytest.approx(distance(known, v6e, "tpu_gemm") * math.sqrt(4 / 3))


def test_no_interval_of_a_decode_reaches_below_the_reading_of_its_cache():
    profile = load_profile("gb200")
    shape = {"seqs": 64.0, "kv_tokens": 64.0 * 8001, "heads": 32.0, "kv_heads": 8.0, "head_dim": 128.0}
    found = profile.estimate("decode", ["vllm"], **shape)
    kernel = profile.kernel("decode", ["vllm"])
    assert kernel is not None
    floor_s = 64 * 8000 * 2 * 8 * 128 * 2.0 / load_device("gb200").hbm_bytes_per_s
    assert kernel.provenance.spread.around(found.seconds).low < floor_s < found.seconds
    assert found.low == pytest.approx(floor_s)
