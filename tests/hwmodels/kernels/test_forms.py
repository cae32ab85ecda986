"""Kernel times: positive, non-decreasing, equal for scalars and arrays, and right in limits known by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hwmodels.kernels.attention import (
    DecodeParams,
    PrefillParams,
    attention_decode_s,
    attention_mixed_s,
    attention_prefill_s,
)
from hwmodels.kernels.collectives import KINDS, CollectiveParams, collective_s, moved_share
from hwmodels.kernels.elementwise import ElementwiseParams, elementwise_s
from hwmodels.kernels.gemm import LIBRARIES, GemmParams, gemm_s
from hwmodels.kernels.linear_attention import KERNELS, LinearParams, linear_decode_s, linear_prefill_s
from hwmodels.kernels.mla import MlaDecodeParams, mla_decode_s, mla_prefill_s
from hwmodels.kernels.moe import MoeParams, active_experts, moe_s
from hwmodels.kernels.parameters import Datasheet, check_bounds, smooth_max, with_values
from hwmodels.kernels.tpu import TpuAttentionParams, TpuGemmParams, tpu_decode_s, tpu_gemm_s, tpu_prefill_s
from tests.sample import few

DEVICE = Datasheet(
    name="test",
    peak_flops_per_s={"bf16": 1000e12, "fp8": 2000e12},
    vector_flops_per_s=60e12,
    hbm_bytes_per_s=4e12,
    sm_count=128,
    l2_bytes=50e6,
    link_bytes_per_s=450e9,
)
HEADS = {"heads": 32, "kv_heads": 8, "head_dim": 128}
counts = st.integers(0, 300)
tokens = st.integers(0, 10**6)
EXACT = 1e-15


def prefill(chunks, rows, pairs, kv_tokens):
    sums = {"chunks": chunks, "rows": rows, "pairs": pairs, "kv_tokens": kv_tokens}
    return attention_prefill_s(PrefillParams(), DEVICE, **sums, **HEADS)


def decode(seqs, kv_tokens, query_width=1):
    return attention_decode_s(DecodeParams(), DEVICE, seqs=seqs, kv_tokens=kv_tokens, query_width=query_width, **HEADS)


def mixed(chunks, rows, pairs, kv_tokens, seqs, decode_kv_tokens):
    return attention_mixed_s(
        PrefillParams(), DEVICE, chunks=chunks, rows=rows, pairs=pairs, kv_tokens=kv_tokens, seqs=seqs,
        decode_kv_tokens=decode_kv_tokens, **HEADS,
    )  # fmt: skip


def mla_decode(seqs, kv_tokens):
    return mla_decode_s(MlaDecodeParams(), DEVICE, seqs=seqs, kv_tokens=kv_tokens, heads=128)


def mla_prefill(chunks, rows, pairs, past):
    # A row that were counted as one of the past would no longer be expanded from there.
    sums = {"chunks": chunks, "rows": rows, "pairs": pairs, "kv_tokens": past + rows}
    return mla_prefill_s(PrefillParams(), DEVICE, **sums, heads=16)


def tpu_decode(seqs, kv_tokens):
    return tpu_decode_s(TpuAttentionParams(), seqs=seqs, kv_tokens=kv_tokens)


def tpu_prefill(rows, pairs, kv_tokens):
    return tpu_prefill_s(TpuAttentionParams(), rows=rows, pairs=pairs, kv_tokens=kv_tokens)


def all_reduce(message_bytes, devices):
    return collective_s(CollectiveParams(), "all_reduce", message_bytes, devices, 450e9)


def norm(rows, width):
    return elementwise_s(ElementwiseParams(), DEVICE, "norm", rows, width)


FORMS = {
    prefill: 4, decode: 2, mixed: 6, mla_decode: 2, mla_prefill: 4, tpu_decode: 2, tpu_prefill: 3, all_reduce: 2,
    norm: 2,
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_scalars_and_arrays_give_the_same_bits(form):
    columns = np.random.default_rng(3).integers(0, 100_000, (FORMS[form], 200))
    together = form(*columns)
    alone = [form(*(int(v) for v in column)) for column in columns.T]
    assert together.tolist() == alone
    assert all(type(seconds) is float for seconds in alone)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_more_work_never_takes_less_time(form, data):
    work = [data.draw(tokens) for _ in range(FORMS[form])]
    more = [value + data.draw(counts) for value in work]
    before, after = form(*work), form(*more)
    assert 0 <= before <= after + EXACT
    assert np.isfinite(after)


@pytest.mark.parametrize("k", few([14336, 128, 4096], reason="much like the first"))
@pytest.mark.parametrize("n", [64, 1024, 6144, 28672])
@pytest.mark.parametrize("library", LIBRARIES)
def test_gemm_is_positive_and_falls_only_where_a_new_row_of_tiles_opens(library, n, k):
    m = np.arange(9002)
    seconds = gemm_s(GemmParams(), DEVICE, m, n, k, library=library)
    assert seconds[0] == 0
    assert (seconds[1:] > 0).all()
    fall = seconds[1:-1] / seconds[2:]
    opens = m[1:-1] % 16 == 0
    assert (fall[~opens] < 1).all()
    # A search for the best tile hardly falls. Dispatch by rows takes smaller tiles beyond 64 of them, so twice as many blocks draw
    # on the memory; where one column of tiles has the device to itself, that nearly halves the time.
    assert fall.max() < (1.05 if library == "search" else 1.42 if n > 64 else 1.92)


def test_four_times_the_rows_of_a_model_layer_never_take_less_time():
    m = np.arange(1, 2049)
    for n, k in ((1024, 4096), (6144, 14336), (28672, 4096)):
        seconds = gemm_s(GemmParams(), DEVICE, m, n, k)
        assert (gemm_s(GemmParams(), DEVICE, 4 * m, n, k) >= seconds).all()


def test_a_large_gemm_runs_at_the_efficiency_of_the_peak():
    params = GemmParams(throttle=0.0, tile_edge=0.0, fill_k=0.0, overlap_loss=0.0)
    seconds = gemm_s(params, DEVICE, 65536, 65536, 8192)
    assert seconds == pytest.approx(2 * 65536 * 65536 * 8192 / (1000e12 * params.compute_efficiency), rel=0.01)


def test_a_gemm_of_one_row_takes_the_time_to_read_its_weights():
    params = GemmParams(launch_s=1e-6, overlap_loss=0.0)
    seconds = gemm_s(params, DEVICE, 1, 32768, 16384)
    assert seconds == pytest.approx(1e-6 + 2 * 32768 * 16384 / (4e12 * params.bandwidth_efficiency), rel=0.01)


def test_a_last_wave_of_one_tile_costs_a_whole_wave():
    params = GemmParams(wave_softness=0.0, split_s=1e-5, cache_gain=0.0)
    full, over = gemm_s(params, DEVICE, 128 * 8, np.array([128 * 16, 128 * 16 + 1]) * 2, 16384)
    assert over > 1.2 * full


def test_half_the_weight_bytes_halve_a_memory_bound_gemm():
    params = GemmParams(launch_s=3e-7, overlap_loss=0.0)
    whole = gemm_s(params, DEVICE, 1, 32768, 16384)
    half = gemm_s(params, DEVICE, 1, 32768, 16384, weight_bytes=1.0)
    assert half / whole == pytest.approx(0.5, abs=0.01)


def test_gemm_refuses_an_unknown_library_and_a_format_the_device_lacks():
    with pytest.raises(ValueError, match="library must be one of search, unsplit, narrow, one, dispatch"):
        gemm_s(GemmParams(), DEVICE, 1, 64, 64, library="fastest")
    with pytest.raises(ValueError, match="no fp4 tensor cores; it has bf16, fp8"):
        gemm_s(GemmParams(), DEVICE, 1, 64, 64, dtype="fp4")


def test_a_long_prompt_costs_its_causal_flops():
    params = PrefillParams(softmax_flops=0.0, throttle=0.0, padding=0.0, block_s=0.0, launch_s=1e-6)
    rows = 65536
    seconds = attention_prefill_s(
        params, DEVICE, chunks=1, rows=rows, pairs=rows * (rows + 1) / 2, kv_tokens=rows, **HEADS
    )
    flops = 4 * 128 * 32 * rows * (rows + 1) / 2
    assert seconds == pytest.approx(flops / (1000e12 * params.compute_efficiency), rel=0.02)


def test_a_long_decode_takes_the_time_to_read_its_cache_and_half_of_it_in_fp8():
    params = DecodeParams(ramp_s=0.0, block_s=0.0, block_group_s=0.0, block_rows_s=0.0, combine_s=0.0, regroup_s=0.0)
    cached = 64 * 65536
    bf16, fp8 = (
        attention_decode_s(params, DEVICE, seqs=64, kv_tokens=cached, kv_bytes=size, **HEADS) for size in (2.0, 1.0)
    )
    read_s = cached * 2 * 2 * 8 * 128 / (4e12 * params.bandwidth_efficiency)
    assert bf16 - params.launch_s == pytest.approx(read_s, rel=1e-9)
    assert fp8 - params.launch_s == pytest.approx(read_s / 2, rel=1e-9)


def test_verifying_drafts_costs_more_than_one_token_and_less_than_one_step_each():
    one, five = decode(64, 64 * 2048), decode(64, 64 * 2048, query_width=5)
    assert one < five < 5 * one


def test_a_wide_group_falls_back_to_one_block_per_query_head():
    shape = {"seqs": 64, "kv_tokens": 64 * 4096, "heads": 64, "kv_heads": 1, "head_dim": 128}
    packed = attention_decode_s(DecodeParams(), DEVICE, **shape)
    fallen = attention_decode_s(DecodeParams(), DEVICE, **shape, widest_group=32)
    assert fallen > 5 * packed


def test_a_mixed_call_without_decodes_is_the_prompt_call():
    assert mixed(1, 512, 131328, 512, 0, 0) == prefill(1, 512, 131328, 512)


def test_smooth_max_runs_from_the_larger_to_the_sum():
    assert smooth_max(3.0, 4.0, 0.0) == pytest.approx(4.0)
    assert smooth_max(3.0, 4.0, 4.0) == pytest.approx(7.0)


@pytest.mark.parametrize("kind", KINDS)
def test_one_device_needs_no_collective_and_a_large_one_runs_at_link_speed(kind):
    params = CollectiveParams(widening=0.0)
    assert collective_s(params, kind, 1e6, 1, 450e9) == 0.0
    seconds = collective_s(params, kind, 1e12, 8, 450e9)
    assert seconds == pytest.approx(1e12 * moved_share(kind, 8) / (450e9 * params.bandwidth_high), rel=1e-3)


def test_small_messages_take_the_low_latency_protocol():
    params = CollectiveParams()
    assert collective_s(params, "all_reduce", 8, 8, 450e9) == pytest.approx(params.start_s + 6 * params.hop_s, rel=1e-3)


def test_expected_active_experts_by_hand():
    assert active_experts(1, topk=8, experts=256) == pytest.approx(8)
    assert active_experts(2, topk=1, experts=2) == pytest.approx(1.5)
    assert active_experts(4, topk=8, experts=256, distribution="balanced") == 32
    assert active_experts(10**6, topk=8, experts=256, distribution="power_law_1.2") == pytest.approx(256, rel=0.01)


def test_skewed_routing_wakes_fewer_experts_than_uniform_routing():
    skewed = active_experts(64, topk=8, experts=256, distribution="power_law_1.2")
    assert skewed < active_experts(64, topk=8, experts=256)


@given(rows=st.integers(1, 16000), ep=st.sampled_from([1, 4, 32]), skew=st.sampled_from(["uniform", "power_law_1.2"]))
@settings(max_examples=40, deadline=None)
def test_moe_is_positive_and_does_not_fall_by_more_than_a_rounding_of_tiles(rows, ep, skew):
    shape = {"hidden_size": 4096, "inter_size": 1536, "topk": 8, "experts": 128, "ep": ep, "distribution": skew}
    before, after = moe_s(MoeParams(), DEVICE, np.array([rows, rows + 64]), **shape)
    assert 0 < before <= after * 1.02


def test_few_tokens_read_the_weights_of_their_experts_only():
    shape = {"hidden_size": 4096, "inter_size": 1536, "topk": 8, "experts": 128}
    params = MoeParams()
    one = moe_s(params, DEVICE, 1, **shape) - params.launch_s
    all_ = moe_s(params, DEVICE, 512, **shape) - params.launch_s
    assert 8 < all_ / one < 20


def test_moe_refuses_an_expert_parallelism_that_does_not_divide():
    with pytest.raises(ValueError, match="choose an ep that divides it"):
        moe_s(MoeParams(), DEVICE, 1, hidden_size=64, inter_size=64, topk=2, experts=8, ep=3)
    with pytest.raises(ValueError, match="power_law_<exponent>"):
        active_experts(4, topk=2, experts=8, distribution="zipf")


def test_a_tpu_gemm_streams_its_weights():
    params = TpuGemmParams(fill_m=0.0, overlap_loss=0.0)
    v6e = Datasheet(
        name="v6e", peak_flops_per_s={"bf16": 918e12}, vector_flops_per_s=1e12, hbm_bytes_per_s=1.64e12, sm_count=1,
        l2_bytes=1e8, link_bytes_per_s=1e11,
    )  # fmt: skip
    seconds = tpu_gemm_s(params, v6e, 8, 14336, 4096)
    expected = params.launch_s + 2 * (14336 * 4096 + 8 * (14336 + 4096)) / (1.64e12 * params.bandwidth_efficiency)
    assert seconds == pytest.approx(expected)


def test_parameters_outside_their_bounds_are_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"compute_efficiency must lie in \[0.25, 1\] .* got 1.3"):
        check_bounds(GemmParams(compute_efficiency=1.3))
    with pytest.raises(ValueError, match="launch_s must be a finite number"):
        check_bounds(GemmParams(launch_s=float("nan")))
    with pytest.raises(ValueError, match="speed is not a parameter of GemmParams"):
        with_values(GemmParams, {"speed": 1.0})


@pytest.mark.parametrize(("seqs", "kv_heads", "paid"), [(1, 8, 0.0), (2, 8, 1e-5), (2, 1, 0.0), (2, 32, 0.0)])
def test_grouped_queries_of_several_sequences_are_brought_into_order(seqs, kv_heads, paid):
    """One sequence, one KV head, or a KV head for every query head need no regrouping."""
    shape = {"seqs": seqs, "kv_tokens": 4096, "heads": 32, "kv_heads": kv_heads, "head_dim": 128}
    none, dear = (attention_decode_s(DecodeParams(regroup_s=cost), DEVICE, **shape) for cost in (0.0, 1e-5))
    assert dear - none == pytest.approx(paid, abs=1e-12)


def test_half_empty_query_tiles_are_paid_against_their_keys():
    shape = {"chunks": 1, "rows": 16, "pairs": 16 * 30_000, "kv_tokens": 30_016, **HEADS}
    plain = {"unpacked": 0.0, "throttle": 0.0, "overlap_loss": 4.0, "block_s": 0.0, "softmax_flops": 0.0}
    none, half = (attention_prefill_s(PrefillParams(padding=p, **plain), DEVICE, **shape) for p in (0.0, 4.0))
    # 64 rows of a tile for each of 8 KV heads, four times over, at 512 FLOPs a pair and 75 % of the peak.
    extra = 4.0 * 64 * 8 * 30_016 * 512 / (1000e12 * 0.75)
    assert half - none == pytest.approx(extra, rel=1e-6)


WINDOWED = PrefillParams(window_tiles=0.5)
CUT = DecodeParams(window_tokens_more=100.0, beyond_ramp=0.5)


def windowed_prefill(window, params=WINDOWED, *, past=0, length=4096):
    rising = max(0, min(length, window - past))
    pairs = rising * past + rising * (rising + 1) // 2 + (length - rising) * min(window, past + length)
    sums = {"chunks": 4, "rows": 4 * length, "pairs": 4 * pairs, "kv_tokens": 4 * (past + length)}
    return attention_prefill_s(params, DEVICE, window_tokens=window, longest_kv=past + length, **sums, **HEADS)


def windowed_decode(window, params=CUT, kv=4096):
    seen = min(kv, window)
    sums = {"seqs": 16, "kv_tokens": 16 * seen, "beyond_tokens": 16 * (kv - seen), "longest_kv": seen}
    return attention_decode_s(params, DEVICE, **sums, **HEADS)


@pytest.mark.parametrize("past", [0, 1000])
def test_a_window_longer_than_the_context_is_full_attention(past):
    sums = {
        "chunks": 4,
        "rows": 4 * 4096,
        "pairs": 4 * (4096 * past + 4096 * 4097 // 2),
        "kv_tokens": 4 * (past + 4096),
    }
    full = attention_prefill_s(PrefillParams(), DEVICE, **sums, longest_kv=past + 4096, **HEADS)
    assert windowed_prefill(past + 4096, past=past) == pytest.approx(full, rel=1e-12)
    assert windowed_prefill(10**7, past=past) == pytest.approx(full, rel=1e-12)
    alone = attention_decode_s(DecodeParams(), DEVICE, seqs=16, kv_tokens=16 * 4096, longest_kv=4096, **HEADS)
    assert windowed_decode(4096) == alone
    assert windowed_decode(10**7) == alone


def test_a_window_bounds_what_a_long_context_costs():
    assert windowed_prefill(128) < windowed_prefill(1024) < windowed_prefill(4096)
    assert windowed_prefill(128, length=16384) < 4.5 * windowed_prefill(128)
    cut = DecodeParams(window_tokens_more=100.0)
    assert windowed_decode(128, cut, kv=4096) == windowed_decode(128, cut, kv=100_000)
    assert windowed_decode(128, kv=4096) < windowed_decode(128, kv=100_000) < windowed_decode(100_000, kv=100_000)


def test_tiles_that_a_window_cuts_cost_time():
    assert windowed_prefill(128, PrefillParams(window_tiles=1.0)) > windowed_prefill(128, PrefillParams())


@pytest.mark.parametrize(("width", "name"), [(192, "192"), (256, "256"), (512, "512")])
def test_wide_heads_have_a_kernel_of_their_own(width, name):
    heads = {"heads": 8, "kv_heads": 1, "head_dim": width}
    slow = DecodeParams(**{f"speed_{name}": 0.5, f"start_{name}_s": 1e-5})
    plain, own = (
        attention_decode_s(params, DEVICE, seqs=64, kv_tokens=64 * 65536, **heads) for params in (DecodeParams(), slow)
    )
    assert own == pytest.approx(1e-5 + 2 * plain, rel=0.1)
    narrow = {"seqs": 64, "kv_tokens": 64 * 65536, **HEADS}
    assert attention_decode_s(slow, DEVICE, **narrow) == attention_decode_s(DecodeParams(), DEVICE, **narrow)


def test_optional_parameters_may_be_left_out():
    names = {name: getattr(CUT, name) for name in DecodeParams.__dataclass_fields__ if name != "beyond_ramp"}
    assert with_values(DecodeParams, names) == DecodeParams(window_tokens_more=100.0)
    with pytest.raises(ValueError, match="DecodeParams needs launch_s"):
        with_values(DecodeParams, {name: value for name, value in names.items() if name != "launch_s"})


def test_absorbed_prompts_multiply_the_latent_and_expanded_ones_the_heads():
    rows = 16384
    sums = {"chunks": 1, "rows": rows, "pairs": rows * (rows + 1) / 2, "kv_tokens": rows, "heads": 128}
    params = PrefillParams(softmax_flops=0.0, throttle=0.0)
    expanded, absorbed = (mla_prefill_s(params, DEVICE, **sums, absorbed=how) for how in (False, True))
    assert absorbed / expanded == pytest.approx((2 * 512 + 64) / (192 + 128), rel=0.05)


def test_a_long_latent_decode_reads_its_cache_or_multiplies_its_heads():
    params = MlaDecodeParams(ramp_s=0.0, row_passes=0.0, overlap_loss=0.0)
    few = mla_decode_s(params, DEVICE, seqs=64, kv_tokens=64 * 65536, heads=16) - params.launch_s
    assert few == pytest.approx(64 * 65536 * 576 * 2 / (4e12 * params.bandwidth_efficiency), rel=1e-9)
    many = mla_decode_s(params, DEVICE, seqs=64, kv_tokens=64 * 65536, heads=512) - params.launch_s
    blocks_s = (64 * 512 / 64 / 128 - 1) * params.block_s
    flops = 64 * 65536 * 512 * 2 * (2 * 512 + 64)
    assert many == pytest.approx(blocks_s + flops / (1000e12 * params.compute_efficiency), rel=1e-9)


NET = {"key_heads": 16, "key_dim": 128, "value_heads": 32, "value_dim": 128}


@pytest.mark.parametrize("kernel", [name for names in KERNELS.values() for name in names])
def test_linear_attention_prices_scalars_and_arrays_alike_and_more_rows_never_less(kernel):
    rows, chunks = np.array([1, 64, 65, 4096, 10_000, 65_536]), np.array([1, 1, 1, 2, 7, 8])
    together = linear_prefill_s(LinearParams(), DEVICE, rows=rows, chunks=chunks, kernel=kernel, **NET)
    alone = [
        linear_prefill_s(LinearParams(), DEVICE, rows=int(r), chunks=int(c), kernel=kernel, **NET)
        for r, c in zip(rows, chunks, strict=True)
    ]
    assert together.tolist() == alone
    longer = linear_prefill_s(LinearParams(), DEVICE, rows=np.arange(1, 4000), chunks=1, kernel=kernel, **NET)
    assert (np.diff(longer) >= -EXACT).all()
    batch = linear_decode_s(LinearParams(), DEVICE, seqs=np.arange(0, 600), kernel=kernel, **NET)
    assert batch[0] == 0
    assert (np.diff(batch) >= -EXACT).all()


def test_a_large_step_of_linear_attention_reads_and_writes_its_states():
    params = LinearParams(block_s=0.0, step_s=0.0, overlap_loss=0.0)
    seconds = linear_decode_s(params, DEVICE, seqs=2048, kernel="delta", **NET) - params.launch_s
    state, rows = 2 * 4 * 32 * 128 * 128, 4 * (16 * 128 + 32 * 128)
    assert seconds == pytest.approx(2048 * (state + rows) / (4e12 * params.bandwidth_efficiency), rel=1e-9)


def test_a_prompt_of_linear_attention_walks_its_chunks_and_grows_with_them_alone():
    params = LinearParams(tile=1.0, bandwidth_efficiency=1.0, launch_s=1e-6, overlap_loss=0.0)
    once, twice = (
        linear_prefill_s(params, DEVICE, rows=n, chunks=1, kernel="delta", **NET) - 1e-6 - params.block_s
        for n in (8192, 16384)
    )
    assert once == pytest.approx(8192 / 64 * params.step_s, rel=1e-9)
    assert twice == pytest.approx(2 * once, rel=1e-9)


def test_sequences_shorter_than_a_chunk_of_a_state_cost_more_where_one_layer_is_timed_alone():
    """They run another kernel there; a price never falls as a prompt grows."""
    params = LinearParams(short_share=0.5)
    few, whole = (
        [
            linear_prefill_s(params, DEVICE, rows=n, chunks=1, kernel="mamba-scan", resident=alone, **NET)
            for n in (127, 128)
        ]
        for alone in (True, False)
    )
    assert few[0] > few[1]
    assert whole[0] <= whole[1]


def test_a_block_of_mambas_convolution_takes_512_tokens_of_a_channel():
    params = LinearParams(launch_s=1e-6, block_s=0.0, step_s=1e-6, overlap_loss=0.0, bandwidth_efficiency=1.0)
    one, two = (
        linear_prefill_s(params, DEVICE, rows=n, chunks=1, kernel="mamba-conv", **NET) - 1e-6 for n in (512, 513)
    )
    assert one == pytest.approx((2 * 16 * 128 + 32 * 128) / DEVICE.sm_count * 1e-6)
    assert two == pytest.approx(2 * one)
