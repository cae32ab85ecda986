"""Experts and products by format: routing by hand, limits of the forms, and the tables of each format read and priced."""

from __future__ import annotations

import numpy as np
import pytest

from hwmodels.device import load_device
from hwmodels.gpu import expert_format, product_format
from hwmodels.kernels.elementwise import ElementwiseParams, elementwise_s
from hwmodels.kernels.fitting import errors
from hwmodels.kernels.gemm import GemmParams, gemm_s, library_of
from hwmodels.kernels.moe import EXPERT_FORMATS, MoeParams, moe_s
from hwmodels.kernels.parameters import Datasheet
from hwmodels.kernels.routing import TILE_ROWS, power_law_counts, routed, routed_row
from hwmodels.measured import catalogue_name, parts, predict, read
from hwmodels.profiles import datasheet_of, load_profile

DEVICE = Datasheet(
    name="test",
    peak_flops_per_s={"bf16": 1000e12, "fp8": 2000e12, "fp4": 4000e12},
    vector_flops_per_s=60e12,
    hbm_bytes_per_s=4e12,
    sm_count=128,
    l2_bytes=50e6,
    link_bytes_per_s=450e9,
)
LAYER = {"hidden_size": 4096, "inter_size": 2048, "topk": 8, "experts": 128}


def test_balanced_tokens_fill_every_expert_alike():
    found = routed(np.array([4.0, 1024.0]), topk=8, experts=256, distribution="balanced")
    assert found.slots.tolist() == [32, 8192]
    assert found.awake.tolist() == [32, 256]
    assert found.tiles[0].tolist() == [32] * len(TILE_ROWS)
    # 32 tokens an expert: four tiles of 8, two of 16, one of any larger.
    assert found.tiles[1].tolist() == [1024, 512, 256, 256, 256, 256]


def test_balanced_ranks_hold_their_share():
    found = routed(np.array([1.0, 4096.0]), topk=8, experts=256, ep=8, distribution="balanced")
    assert found.slots.tolist() == [1, 4096]
    assert found.awake.tolist() == [1, 32]


@pytest.mark.parametrize("tokens", [1, 7, 32, 33, 1000, 16384])
@pytest.mark.parametrize("alpha", [1.01, 1.2])
def test_a_power_law_hands_out_every_slot_and_no_expert_has_a_token_twice(tokens, alpha):
    draws = np.random.default_rng(3).random((4, 64))
    counts = power_law_counts(np.array([tokens]), topk=6, experts=64, alpha=alpha, draws=draws)
    assert counts.sum(axis=-1).tolist() == [[6.0 * tokens] * 4]
    assert (counts >= 0).all()
    # Rounding may hand one more to an expert that already has all.
    assert counts.max() <= tokens + 1


def test_the_busiest_rank_has_at_least_the_mean():
    for tokens in (1.0, 64.0, 4096.0):
        slots, awake, *_ = routed_row(tokens, 8, 256, 8, "power_law_1.2")
        assert slots >= tokens * 8 / 8
        assert awake <= min(32, slots)


def test_one_token_of_wide_experts_takes_the_time_to_read_them():
    params = MoeParams(
        launch_s=2e-6, bandwidth_efficiency=1.0, overlap_loss=0.0, tile_s=0.0, reread=0.0, sort_s=0.0, l2_intensity=0.0,
        block_bandwidth=8.0, slot_passes=0.0, inner_passes=0.0, expert_s=0.0,
    )  # fmt: skip
    wide = {"hidden_size": 8192, "inter_size": 16384, "topk": 2, "experts": 16, "distribution": "balanced"}
    expected = 2e-6 + 2 * 3 * 8192 * 16384 * 2.0 / 4e12
    assert moe_s(params, DEVICE, 1, **wide) == pytest.approx(expected, rel=1e-9)
    four_bit = moe_s(params, DEVICE, 1, **wide, weight_bytes=0.5)
    assert four_bit - 2e-6 == pytest.approx((expected - 2e-6) / 4, rel=1e-9)


def test_many_tokens_run_at_the_efficiency_of_the_peak():
    params = MoeParams(
        launch_s=2e-6, compute_efficiency=0.8, tile_s=0.0, reread=0.0, sort_s=0.0, l2_intensity=0.0, overlap_loss=0.0,
        slot_passes=0.0, inner_passes=0.0, expert_s=0.0,
    )  # fmt: skip
    tokens = 2**20
    flops = tokens * 8 * 6 * 4096 * 2048
    assert moe_s(params, DEVICE, tokens, **LAYER, distribution="balanced") == pytest.approx(
        flops / (0.8 * 1000e12), rel=2e-3
    )


def test_experts_of_a_gate_have_three_matrices_and_others_two():
    params = MoeParams(launch_s=2e-6, tile_s=0.0, sort_s=0.0, slot_passes=0.0, inner_passes=0.0, expert_s=0.0)
    gated, plain = (moe_s(params, DEVICE, 2**20, **LAYER, gated=gate) for gate in (True, False))
    assert gated / plain == pytest.approx(1.5, rel=0.02)


def test_slots_of_other_ranks_cost_what_the_parameter_says():
    own, all_ = (
        moe_s(MoeParams(remote_share=share), DEVICE, 16384, **LAYER, ep=8, distribution="balanced")
        for share in (0.0, 1.0)
    )
    moved = 16384 * 8 * 7 / 8 * 2.0 * (4.0 * 4096 + 3.0 * 2048) / 4e12
    assert all_ - own == pytest.approx(moved, rel=1e-6)


def test_unaligned_rows_cost_their_share_more():
    bare = {"launch_s": 2e-6, "sort_s": 0.0, "slot_passes": 0.0, "inner_passes": 0.0, "expert_s": 0.0}
    narrow = {**LAYER, "inter_size": 88, "distribution": "balanced"}
    slow, fast = (moe_s(MoeParams(**bare, unaligned=loss), DEVICE, 64, **narrow) for loss in (2.0, 0.0))
    assert slow - 2e-6 == pytest.approx(3 * (fast - 2e-6))


def test_columns_of_layers_price_as_each_layer_alone():
    tokens, ep, kind = np.array([4.0, 256.0]), np.array([1, 4]), np.array(["balanced", "power_law_1.2"])
    together = moe_s(MoeParams(), DEVICE, tokens, **LAYER, ep=ep, distribution=kind)
    alone = [
        moe_s(MoeParams(), DEVICE, t, **LAYER, ep=int(e), distribution=str(k))
        for t, e, k in zip(tokens, ep, kind, strict=True)
    ]
    assert together == pytest.approx(alone, rel=1e-12)


def test_a_library_that_does_not_split_is_never_faster_than_one_that_may():
    m = np.array([1.0, 16.0, 300.0, 4096.0])
    search, unsplit = (gemm_s(GemmParams(), DEVICE, m, 512, 16384, library=name) for name in ("search", "unsplit"))
    assert (unsplit >= search).all()
    assert unsplit[0] > search[0]


def test_which_library_multiplies_what():
    assert library_of("bf16", "vllm", "h200") == "search"
    assert library_of("fp8", "trtllm", "h200") == "search"
    assert library_of("fp8", "vllm", "h200") == "dispatch"
    assert library_of("fp8", "vllm", "b200") == "unsplit"
    assert library_of("nvfp4", "trtllm", "b200") == "unsplit"
    assert library_of("nvfp4", "vllm", "rtx-pro-6000") == "one"
    assert library_of("fp8", "vllm", "rtx-pro-6000") == "narrow"
    assert library_of("fp8_block", "trtllm", "l40s") == "narrow"
    assert library_of("fp8_block", "trtllm", "h200") == "unsplit"


def test_a_library_of_one_tile_pads_to_it():
    params = GemmParams(
        launch_s=3e-7, wave_softness=0.0, overlap_loss=0.0, throttle=0.0, l2_intensity=5.0, tile_edge=0.0
    )
    part, full = (gemm_s(params, DEVICE, m, 128 * 128, 4096, library="one", dtype="fp4", weight_bytes=0.5)
                  for m in (1024 + 1, 1024 + 128))  # fmt: skip
    assert part == pytest.approx(full, rel=1e-9)


def test_tiles_of_few_rows_cost_more_where_many_tokens_meet_an_expert():
    many = {**LAYER, "distribution": "balanced", "dtype": "fp4", "weight_bytes": 0.5}
    small, large = (moe_s(MoeParams(), DEVICE, 16384, **many, largest_tile=rows) for rows in (16, 256))
    assert small > 1.2 * large


def test_quantising_reads_sixteen_bits_and_writes_eight():
    params = ElementwiseParams(launch_s=1e-6, bandwidth_efficiency=0.5, row_s=0.0, cache_gain=0.0, overlap_loss=0.0)
    seconds = elementwise_s(params, DEVICE, "quantise", 65536, 8192)
    assert seconds == pytest.approx(1e-6 + 65536 * 8192 * 3 / (4e12 * 0.5))


@pytest.mark.parametrize(
    ("precision", "arithmetic", "first"),
    [
        ("fp8", "fp8", "fp8"),
        ("fp8_block", "fp8", "fp8_block"),
        ("nvfp4", "fp4", "nvfp4"),
        ("nvfp4", "bf16", "mxfp4"),
        ("mxfp4", "fp8", "mxfp4_mxfp8"),
        ("mxfp4", "bf16", "mxfp4"),
        ("int4", "bf16", "int4"),
        ("int4_g32", "bf16", "int4"),
        ("fp8", "bf16", "bf16"),
        ("bf16", "bf16", "bf16"),
    ],
)
def test_each_format_prices_with_its_own_experts(precision, arithmetic, first):
    fmt = expert_format(precision, arithmetic)
    assert fmt.variants(("vllm", "trtllm"), layer=(2880, 4, 128))[0] == f"{first}/vllm"
    assert fmt.dtype == arithmetic


def test_experts_that_run_other_kernels_look_for_those_first():
    fmt = EXPERT_FORMATS["mxfp4"]
    assert fmt.variants(("vllm",), layer=(2880, 4, 128))[0] == "mxfp4/vllm"
    assert fmt.variants(("vllm",), layer=(7168, 8, 384))[:2] == ("mxfp4-other/vllm", "mxfp4/vllm")
    wide = EXPERT_FORMATS["bf16"]
    assert wide.variants(("sglang",), layer=(4096, 22, 512), gated=False) == ("bf16-plain/sglang", "bf16/sglang")
    mixtral = {"layer": (4096, 2, 8)}
    assert wide.variants(("sglang",), **mixtral) == ("bf16/sglang",)
    assert wide.variants(("sglang",), **mixtral, blackwell=True) == ("bf16-refused/sglang", "bf16/sglang")


def test_blocks_of_scales_are_a_format_of_products():
    assert product_format("fp8_block", "fp8") == "fp8_block"
    assert product_format("fp8_block", "bf16") == "bf16"
    assert product_format("mxfp4", "fp8") == "fp8"


@pytest.mark.parametrize(
    "name", ["quantize_b200_fp8_vllm0.24", "moe_b200_int4_wo_vllm0.24", "gemm_b200_fp8block_vllm0.24"]
)
def test_tables_of_new_formats_are_read_and_priced(shared, name):
    m = read(shared / "measured2" / f"{name}.csv")
    result = predict(m, load_profile(catalogue_name(m.device)))
    assert not result.unmodelled
    assert (result.seconds > 0).all()


# Mean error in percent that a table's prediction must not exceed, by the longest prefix: what was reached and a tenth.
# The profiles were fitted on these tables; errors on shapes that a fit did not see are in the profiles.
CEILINGS = {
    "gemm_a100": 8.8, "gemm_b200_bf16": 10.6, "gemm_b200_fp8": 12.4, "gemm_b200_fp8block": 13.2, "gemm_b200_nvfp4": 11.2,
    "gemm_h100_bf16": 7.0, "gemm_h100_fp16": 8.5, "gemm_h100_fp8": 10.9, "gemm_h100_fp8block": 12.3,
    "gemm_h100_llama70b": 5.0, "gemm_h200_bf16": 8.5, "gemm_h200_fp8": 11.8, "gemm_h200_fp8block": 13.4,
    "gemm_l40s_bf16": 12.7, "gemm_l40s_fp8": 15.4, "gemm_l40s_fp8block": 18.6, "gemm_rtxpro6000_bf16": 8.7,
    "gemm_rtxpro6000_fp8": 9.7, "gemm_rtxpro6000_fp8block": 14.7, "gemm_rtxpro6000_nvfp4": 11.8,
    "moe": 13.7, "moe_b200_w4a8": 15.8, "moe_b200_nvfp4": 13.7, "moe_h100_bf16_sglang": 16.8, "moe_h100_bf16_trtllm": 17.5,
    "moe_h200_bf16": 18.9, "moe_h100_fp8_trtllm": 14.2, "moe_h200_fp8_trtllm": 14.8, "moe_rtxpro6000": 4.9,
    "moe_b200_bf16_trtllm": 14.0, "quantize": 11.4, "elementwise": 9.3, "layers": 8.5,
}  # fmt: skip


@pytest.mark.slow(reason="whole tables of measurements")
@pytest.mark.parametrize("kind", ["gemm", "moe", "quantize", "elementwise", "layers"])
def test_every_table_is_priced_row_by_row_with_parameters_of_its_own_device(shared, kind):
    tables = sorted((shared / "measured2").glob(f"{kind}_*.csv"))
    assert tables
    for path in tables:
        m = read(path)
        profile = load_profile(catalogue_name(m.device))
        result = predict(m, profile)
        assert not result.unmodelled, path.name
        assert m.measured_s is not None
        ceiling = CEILINGS[max((name for name in CEILINGS if path.name.startswith(name)), key=len)]
        assert errors(result.seconds, m.measured_s).mape_pct <= ceiling, path.name
        for part in parts(m, datasheet_of(load_device(catalogue_name(m.device)))):
            kernel = profile.kernel(part.family, part.variants)
            assert kernel is not None
            assert not kernel.provenance.borrowed_from, (path.name, kernel.variant)


@pytest.mark.parametrize("device", ["h100", "h200"])
def test_marlins_experts_have_launches_of_their_own_where_other_ranks_have_experts(tmp_path, device):
    """One token on gpt-oss-120b's layer behind vLLM: a thirty-second of every expert, and a sixteenth of the experts."""
    header = (
        "moe_dtype,num_tokens,hidden_size,inter_size,topk,num_experts,moe_tp_size,moe_ep_size,distribution,latency_us"
    )
    rows = ["w4a16_mxfp4,1,2880,2880,4,128,32,1,balanced,37.5", "w4a16_mxfp4,1,2880,2880,4,128,1,16,balanced,68"]
    path = tmp_path / f"moe_{device}_w4a16_mxfp4_vllm0.24.csv"
    path.write_text("\n".join((header, *rows)) + "\n")
    table = read(path)
    assert predict(table, load_profile(device)).seconds == pytest.approx(table.measured_s, rel=0.15)
