"""Calibrated cost models: bounds, monotonicity, scalars equal to arrays, overheads by name, profiles by relative."""

import dataclasses
import pickle
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hwmodels.calibrated import Calibrated
from hwmodels.deployment import FrontEnd, deploy
from hwmodels.device import load_device
from hwmodels.experts import ExpertLayout
from hwmodels.gpu import GpuKernels
from hwmodels.kernels.attention import attention_decode_s, attention_prefill_s
from hwmodels.kernels.families import MLA_DECODE, MLA_PREFILL
from hwmodels.kernels.fitting import errors
from hwmodels.kernels.ops import ARRAYS, SCALARS
from hwmodels.measured import read
from hwmodels.model import load_model
from hwmodels.operations import AttentionShape
from hwmodels.overheads import Overheads, serving_stack, serving_stacks
from hwmodels.parallel import ParallelConfig
from hwmodels.profiles import load_profile
from hwmodels.roofline import Roofline
from hwmodels.totals import Totals
from tests.hwmodels.test_roofline import assert_scalars_and_arrays_agree, assert_time_does_not_fall, totals

DEPLOYMENTS = {
    "dense": ("llama-3.1-8b", "h100-sxm", {}, None, "vllm"),
    "tensor and pipeline": ("llama-3.1-70b", "a100-80gb-sxm", {"tensor": 4, "pipeline": 2}, None, "trtllm"),
    "windows and experts": ("gpt-oss-120b", "h200", {"tensor": 2}, None, "vllm"),
    "latent attention": ("deepseek-r1", "h200", {"tensor": 8}, None, "sglang"),
    "expert and data parallel": ("deepseek-v3", "h200", {"data": 8, "expert": 8}, None, "trtllm"),
    "sparse attention": ("glm-5", "b200", {"tensor": 8}, "fp8", "sglang"),
    "eight bits": ("llama-3.1-70b", "h200", {"tensor": 2}, "fp8", "vllm"),
    "four bits": ("llama-3.1-70b", "gb200", {}, "nvfp4", "vllm"),
    "weights alone in four bits": ("llama-3.1-8b", "rtx-pro-6000", {}, "int4", "vllm"),
    "eager": ("llama-2-70b", "a100-80gb-sxm", {"tensor": 4}, None, "eager"),
    "amd": ("llama-3.1-70b", "mi355x", {"tensor": 2}, "fp8", "vllm-rocm"),
    "amd, experts": ("deepseek-r1", "mi355x", {"tensor": 8}, None, "sglang-rocm"),
    "tpu": ("llama-3.1-8b", "tpu-v6e", {}, None, "ideal"),
}


@cache
def deployed(name):
    model, device, degrees, precision, stack = DEPLOYMENTS[name]
    return deploy(model=model, hardware=device, parallel=degrees, precision=precision, cost=Calibrated.for_stack(stack))


DECODE = Totals(8, 0, 0, 0, 0, 8, 8 * 1500, 8)


def prompt(tokens):
    return Totals(tokens, tokens, 1, tokens * (tokens + 1) // 2, tokens, 0, 0, 1)


@pytest.mark.parametrize("device", ["mi300x", "mi325x", "mi350x", "mi355x"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_costs_the_same_on_amd_under_either_name(device, engine):
    def seconds(stack):
        cost = deploy(model="llama-3.1-8b", hardware=device, cost=Calibrated.for_stack(stack)).cost
        return cost.iteration_s(DECODE), cost.iteration_s(prompt(2048))

    assert seconds(engine) == seconds(f"{engine}-rocm")


@pytest.mark.parametrize("name", ["h100-sxm", "rtx-4090"])
def test_fp32_is_refused_where_it_would_cost_what_16_bits_do(name):
    fp32 = {"model": "llama-3.1-8b", "hardware": name, "precision": "fp32"}
    with pytest.raises(ValueError, match=r"fp32 has been measured on CPUs alone.*cost_model: roofline"):
        deploy(**fp32, cost=Calibrated.for_stack("vllm"))
    ratio = deploy(**fp32, cost=Roofline).cost.iteration_s(prompt(4096)) / deploy(
        model="llama-3.1-8b", hardware=name, cost=Roofline
    ).cost.iteration_s(prompt(4096))
    peaks = load_device(name).peak_flops_per_s
    assert ratio == pytest.approx(peaks["bf16"] / peaks["fp32"], rel=0.01)


@pytest.mark.parametrize("name", ["mi300x", "tpu-v6e"])
def test_tensorrt_llm_is_refused_where_it_does_not_run(name):
    with pytest.raises(
        ValueError, match=f"TensorRT-LLM runs on NVIDIA's GPUs alone, and {name} is (AMD|Google)'s; choose"
    ):
        deploy(model="llama-3.1-8b", hardware=name, cost=Calibrated.for_stack("trtllm"))
    deploy(model="llama-3.1-8b", hardware=name, cost=Calibrated.for_stack("vllm"))


@pytest.mark.parametrize("name", DEPLOYMENTS)
@settings(max_examples=15, deadline=None)
@given(batch=st.lists(totals(), min_size=1, max_size=8))
def test_scalars_and_arrays_agree_bit_for_bit(name, batch):
    assert_scalars_and_arrays_agree(deployed(name).cost, batch)


@pytest.mark.parametrize("name", DEPLOYMENTS)
@settings(max_examples=25, deadline=None)
@given(base=totals(), field=st.sampled_from(Totals._fields), more=st.integers(1, 5000))
def test_times_are_positive_finite_and_do_not_fall_when_a_total_grows(name, base, field, more):
    assert_time_does_not_fall(deployed(name).cost, base, field, more, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "replayed"),
    [
        ("windows and experts", True),
        ("latent attention", False),
        ("expert and data parallel", False),
        ("amd, experts", False),
    ],
)
def test_prompts_of_one_token_are_replayed_as_decodes_by_vllm_alone(name, replayed):
    cost = deployed(name).cost
    one, two = prompt(1), prompt(2)
    both = Totals(*(2 * total for total in one))
    quiet = [Totals(*(0 for _ in one))] * (cost.parallel.data - 1)
    for seconds in (cost.iteration_s, lambda totals: cost.common_step([totals, *quiet])):
        # As a decode each takes the time of its kernels, a fraction of what launching those of a prompt takes.
        assert (seconds(both) < 0.5 * seconds(two)) == (seconds(one) < 0.5 * seconds(two)) == replayed
    for ranks in ([both, *quiet], [two, *quiet]):
        arrays = [Totals(*(np.array([total]) for total in totals)) for totals in ranks]
        assert cost.common_step(arrays).tolist() == [cost.common_step(ranks)]


@pytest.mark.parametrize("stack", ["vllm", "sglang", "trtllm"])
def test_a_prompt_that_another_machine_has_computed_is_a_decode_of_any_stack(stack):
    launched = Calibrated.for_stack(stack)
    here, over = (
        deploy(model="deepseek-r1", hardware="h200", parallel=ParallelConfig(tensor=8), cost=each).cost
        for each in (launched, dataclasses.replace(launched, handed_over=True))
    )
    assert over.iteration_s(prompt(1)) < 0.5 * over.iteration_s(prompt(2))
    assert over.iteration_s(prompt(2)) == here.iteration_s(prompt(2))
    assert (over.iteration_s(prompt(1)) == here.iteration_s(prompt(1))) == (stack == "vllm")


@pytest.mark.parametrize("name", [name for name in DEPLOYMENTS if name != "tpu"])
def test_nothing_is_faster_than_the_roofline_of_the_datasheet(name):
    model, device, degrees, precision, _ = DEPLOYMENTS[name]
    roof = deploy(model=model, hardware=device, parallel=degrees, precision=precision, cost=Roofline).cost
    for batch in (DECODE, prompt(512), prompt(4096)):
        for stage in range(roof.n_stages):
            # Collectives of the roofline are rings; switches that reduce in flight beat them.
            assert deployed(name).cost.iteration_s(batch, stage) > 0.8 * roof.iteration_s(batch, stage)


def test_attention_forms_are_the_kernels_that_were_fitted():
    cost = deployed("dense").cost
    profile, stack = cost.kernels.profile, cost.kernels.stack.overheads
    shape = cost._stages[0].work.attention[0]
    prefill, decode = cost.kernels.prefill_form(shape), cost.kernels.decode_form(shape)
    params = profile.get("prefill", ("vllm",))
    sums = {"rows": 1000, "pairs": 500_500, "kv_tokens": 1000}
    alone = attention_prefill_s(params, profile.datasheet, chunks=1, heads=32, kv_heads=8, head_dim=128, **sums)
    lost = 500_500 * shape.prefill_flops_per_pair * stack.sustained_loss / profile.datasheet.flops_per_s("bf16")
    expected = 32 * (alone - stack.launch_overlap * params.launch_s + lost)
    assert prefill(SCALARS, 1000, 1, 500_500, 1000) == pytest.approx(expected, rel=1e-9)
    params = profile.get("decode", ("vllm",))
    alone = attention_decode_s(params, profile.datasheet, seqs=64, kv_tokens=64_000, heads=32, kv_heads=8, head_dim=128)
    hidden = stack.launch_overlap * (params.launch_s + params.combine_s + params.regroup_s)
    assert decode(SCALARS, 64, 64, 64_000) == pytest.approx(32 * (alone - hidden), rel=1e-9)


def latent_shape(heads):
    """DeepSeek-V3's attention with as many heads on the device, a cache of 16 bits, one layer."""
    return AttentionShape(
        kind="mla", n_heads=heads, n_kv_heads=1, qk_dim=192, v_dim=128, kv_bytes=1152.0, precision="bf16",
        latent_dim=512, rope_dim=64, expand_flops=2.0 * 512 * heads * 256,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("stack", "device", "eight_bits", "first"),
    [
        # SGLang's kernel over 8 bits takes four times vLLM's whole module on Hopper: TensorRT-LLM's stands in there.
        ("vllm", "h200", True, "fp8/trtllm"),
        ("vllm", "h200", False, "sglang"),
        ("vllm", "b200", True, "fp8/sglang"),
        ("sglang", "h200", True, "fp8/sglang"),
    ],
)
def test_whose_decodes_of_latent_attention_stand_in(stack, device, eight_bits, first):
    found = deploy(
        model="deepseek-v3", hardware=device, parallel={"tensor": 8}, kv_precision="fp8" if eight_bits else "bf16",
        cost=Calibrated.for_stack(stack),
    )  # fmt: skip
    (shape,) = found.cost.work_by_stage[0].attention
    profile = load_profile(device)
    params = profile.get("mla_decode", (first,))
    form = MLA_DECODE.folded(
        params, profile.datasheet, heads=16, kv_rank=512, rope_dim=64, latent_bytes=1.0 if eight_bits else 2.0,
        run=found.cost.kernels.running(shape),
    )  # fmt: skip
    assert found.cost.kernels.decode_form(shape)(SCALARS, 64, 64, 128_000) == form(SCALARS, 64, 64, 128_000)


@pytest.mark.parametrize(
    ("stack", "device", "prompts", "first"),
    [
        ("sglang", "h100-sxm", True, "fp8q/sglang"),
        ("trtllm", "b200", True, "fp8q/trtllm"),
        ("vllm", "h100-sxm", True, "fp8/vllm"),
        ("sglang", "h100-sxm", False, "fp8/sglang"),
        ("sglang", "a100-80gb-sxm", True, "fp8/sglang"),
    ],
)
def test_prompts_over_an_8_bit_cache_have_8_bit_queries_where_a_stack_casts_them(stack, device, prompts, first):
    cost = deploy(model="llama-3.1-8b", hardware=device, kv_precision="fp8", cost=Calibrated.for_stack(stack)).cost
    (shape,) = cost.work_by_stage[0].attention
    assert cost.kernels.attention_variants(shape, 1.0, prompts=prompts)[0] == first


@pytest.mark.parametrize(("device", "dtype"), [("b200", "fp8"), ("rtx-pro-6000", "fp8"), ("h100-sxm", "bf16")])
def test_mxfp4_meets_8_bit_activations_where_tensor_cores_scale_blocks(device, dtype):
    found = deploy(model="gpt-oss-120b", hardware=device, parallel={"tensor": 4}, cost=Calibrated.for_stack("vllm"))
    assert found.cost.kernels.arithmetic("mxfp4")[0] == dtype
    experts = [
        use for use in found.cost.kernels.uses(["bf16"], found.cost.work_by_stage) if use.what == "mxfp4 experts"
    ]
    assert [use.kernel.variant.startswith("mxfp4_mxfp8/") for use in experts] == [dtype == "fp8"]


def test_a_launched_prompt_takes_at_least_the_host_work_of_its_layers_by_their_kind():
    own = Overheads(layer_host_s=1.0, expert_host_s=10.0, latent_host_s=100.0)
    stack = dataclasses.replace(serving_stack("vllm"), overheads=own)
    for model, layers, with_experts, latent in (
        ("llama-3.1-8b", 32, 0, 0),
        ("qwen3-30b-a3b", 48, 48, 0),
        ("deepseek-v3", 61, 61, 61),
    ):
        cost = Calibrated(stack=stack)(load_model(model), load_device("h200"), ParallelConfig(tensor=8))
        assert cost.iteration_s(prompt(64)) == pytest.approx(layers + 10.0 * with_experts + 100.0 * latent)


def seconds_of_a_layers_experts(precision, expert, handed_over=False, **terms):
    """Seconds by tokens of one layer of Qwen3-30B-A3B, whose 128 experts lie on *expert* devices."""
    stack = dataclasses.replace(serving_stack("vllm"), overheads=Overheads(**terms))
    parallel = ParallelConfig(tensor=8, expert=expert)
    model = load_model("qwen3-30b-a3b").with_precision(precision)
    cost = Calibrated(stack=stack, handed_over=handed_over)(model, load_device("h100-sxm"), parallel)
    (work,) = cost.work_by_stage
    return lambda tokens: float(cost.kernels.moe_s(np.array([tokens]), work.experts)[0])


@pytest.mark.parametrize(
    ("precision", "expert", "longer"),
    [
        ("bf16", 8, {16: 1.0, 17: 1.5, 4096: 1.5}),
        ("bf16", 1, {129: 1.0}),
        ("fp8", 8, {17: 1.0}),
        ("fp8_block", 8, {17: 1.0}),
    ],
)
def test_untuned_tiles_lengthen_experts_in_16_bits_from_more_tokens_than_a_device_holds_experts(
    precision, expert, longer
):
    plain = seconds_of_a_layers_experts(precision, expert)
    untuned = seconds_of_a_layers_experts(precision, expert, untuned_experts=0.5)
    for tokens, factor in longer.items():
        assert untuned(tokens) == pytest.approx(factor * plain(tokens), rel=1e-12)


@pytest.mark.parametrize(("precision", "more_s"), [("bf16", 0.0), ("fp8", 0.0), ("fp8_block", 1e-4)])
@pytest.mark.parametrize("expert", [1, 8])
def test_experts_in_blocks_take_more_as_far_as_their_tiles_of_64_tokens_are_empty(precision, more_s, expert):
    plain = seconds_of_a_layers_experts(precision, expert)
    found = seconds_of_a_layers_experts(precision, expert, block_experts_s=1e-4)
    # 8 of 128 experts a token: 1,024 tokens give each 64.
    for tokens, empty in ((64, 15 / 16), (512, 0.5), (1024, 0.0), (4096, 0.0)):
        assert found(tokens) == pytest.approx(plain(tokens) + more_s * empty, rel=1e-12)
    assert found(0) == plain(0)


def tiles_of_experts(tokens, device="b200", precision="fp8_block", backend=None, **terms):
    """Pairs of token and expert of Qwen3-30B-A3B on 4 devices that are multiplied only to fill tiles: of a device and layer, and
    those in the work of an iteration without attention."""
    stack = dataclasses.replace(serving_stack("vllm"), overheads=Overheads(**terms))
    parallel = ParallelConfig(tensor=4, expert=4, layout=ExpertLayout(backend=backend))
    cost = Calibrated(stack=stack)(load_model("qwen3-30b-a3b").with_precision(precision), load_device(device), parallel)
    work = cost.work(Totals(tokens, 0, 0, 0, 0, tokens, 0, tokens))
    return work.tile_flops / (4 * 48 * 2 * 3 * 2048 * 768)


def test_experts_in_blocks_fill_tiles_of_128_rows():
    """8 of 128 experts a token: 32 experts a device. Blackwell multiplies a tile but a row for each of them, Hopper those awake."""
    for tokens in (1, 64, 4096):
        assert tiles_of_experts(tokens, block_experts_s=1e-4) == pytest.approx(32 * 127)
    few, many = (tiles_of_experts(tokens, "h100-sxm", block_experts_s=1e-4) for tokens in (1, 4096))
    assert few == pytest.approx(8 / 4 * 128 - 8 / 4, rel=0.02)
    assert many == pytest.approx(32 * 63.5, rel=0.05)


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"precision": "bf16", "block_experts_s": 1e-4},
        {"precision": "fp8", "block_experts_s": 1e-4},
        {"backend": "triton", "block_experts_s": 1e-4},
    ],
)
def test_other_experts_and_releases_fill_no_tiles(asked):
    assert tiles_of_experts(64, **asked) == 0


def test_spread_experts_take_more_for_each_operation_where_no_graph_replays_them():
    largest, per_flop = 512, 4e-15
    # Qwen3-30B-A3B: three matrices of 2048 x 768 for each of 8 experts, on each of 8 devices an eighth of all operations.
    flops = 2 * 3 * 8 * 2048 * 768 / 8
    for precision, expert, more_s in (
        ("fp8_block", 8, per_flop * flops),
        ("fp8_block", 4, per_flop * flops),
        ("fp8_block", 1, 0.0),
        ("fp8", 8, 0.0),
    ):
        plain = seconds_of_a_layers_experts(precision, expert)
        found = seconds_of_a_layers_experts(precision, expert, spread_experts_s_per_flop=per_flop)
        assert found(largest) == plain(largest)
        assert found(largest + 1) == pytest.approx(plain(largest + 1) + more_s * (largest + 1), rel=1e-12)
    # A machine that is handed prompts computes none.
    decodes = seconds_of_a_layers_experts("fp8_block", 8, handed_over=True, spread_experts_s_per_flop=per_flop)
    assert decodes(4096) == seconds_of_a_layers_experts("fp8_block", 8)(4096)


@pytest.mark.parametrize("stack", ["vllm", "sglang", "trtllm"])
def test_experts_that_other_software_alone_was_timed_with_on_a_device_are_priced_by_that(stack):
    """RTX PRO 6000 in 16 bits: one layer of Qwen3-30B-A3B, by LLMServingSim, which keeps others from lending theirs."""
    found = deploy(model="qwen3-30b-a3b", hardware="rtx-pro-6000", cost=Calibrated.for_stack(stack))
    # The experts that eight tokens wake are read, 50 of 128 where each chooses 8 evenly.
    read_s = 48 * 128 * (1 - (1 - 8 / 128) ** 8) * 3 * 2048 * 768 * 2 / 1.6e12
    assert read_s < found.cost.iteration_s(DECODE) < 2 * read_s
    said = f"rtx-pro-6000: bf16 experts under {stack} are priced as bf16/lss was measured on rtx-pro-6000."
    assert said in found.stand_ins


def test_a_tpu_says_which_products_were_not_timed():
    def said(precision):
        found = deploy(model="llama-3.1-8b", hardware="tpu-v6e", precision=precision, cost=Calibrated.for_stack("vllm"))
        return found.stand_ins

    assert said("int8") == ("tpu-v6e: int8 matrix products are priced as bf16 ones were measured.",)
    assert said(None) == ()


@pytest.mark.parametrize(("stack", "prefill", "decode"), [("trtllm", "trtllm", "trtllm"), ("vllm", "trtllm", "sglang")])
def test_latent_attention_is_priced_by_the_form_that_was_fitted(stack, prefill, decode):
    plain = dataclasses.replace(serving_stack(stack), overheads=Overheads())
    kernels = Calibrated(stack=plain)(load_model("deepseek-v3"), load_device("h200"), ParallelConfig(tensor=8)).kernels
    profile = load_profile("h200")
    sums = {"rows": 600, "pairs": 600 * 400 + 600 * 601 / 2, "kv_tokens": 1000, "chunks": 1, "heads": 16}
    expected = MLA_PREFILL.seconds(profile.get("mla_prefill", (prefill,)), profile.datasheet, sums)
    assert kernels.prefill_form(latent_shape(16))(SCALARS, 600, 1, sums["pairs"], 1000) == pytest.approx(expected)
    sums = {"seqs": 8, "kv_tokens": 8 * 3000, "query_width": 3, "heads": 16}
    expected = MLA_DECODE.seconds(profile.get("mla_decode", (decode,)), profile.datasheet, sums)
    assert kernels.decode_form(latent_shape(16))(SCALARS, 8, 24, 24_000) == pytest.approx(expected)


@pytest.mark.parametrize(("device", "stack", "file", "median_pct"), [
    ("h200", "trtllm", "h200_trtllm1.3rc20", 6.0),
    ("b200", "trtllm", "b200_trtllm1.3rc20", 7.0),
    ("b200", "vllm", "b200_vllm0.24", 13.0),
])  # fmt: skip
def test_parts_of_latent_attention_add_up_to_the_module_that_was_timed_as_a_whole(
    shared, device, stack, file, median_pct
):
    """Nothing of what prices the parts was fitted to the modules."""
    columns = read(shared / "measured2" / f"mla_module_decode_{file}.csv").columns
    plain = dataclasses.replace(serving_stack(stack), overheads=Overheads())
    off = []
    for heads in (4, 16, 128):
        spec, parallel = load_model("deepseek-v3").with_precision("bf16"), ParallelConfig(tensor=128 // heads)
        cost = Calibrated(stack=plain)(spec, load_device(device), parallel, kv_precision="bf16")
        (work,), kernels = cost.work_by_stage, cost.kernels
        some = (columns["num_heads"] == heads) & (columns["gemm_dtype"] == "bf16") & (columns["kv_dtype"] == "bf16")
        rows, kv = columns["batch_size"][some].astype(float), columns["kv_len"][some].astype(float)
        own = {op.name: op for op in work.linears}
        products = [own[name] for name in ("qkv_down", "q_up", "attention_out")]
        (moved,) = (op for op in work.elementwise if op.name == "rotary_and_cache")
        seconds = (
            sum(kernels.gemm_s(rows, op.n, op.k, precision="bf16") for op in products)
            + kernels.head_products_s(rows, work.head_products)
            + kernels.decode_form(work.attention[0])(ARRAYS, rows, rows, rows * (kv + 1)) / 61
            + kernels.elementwise_s(rows * moved.bytes_per_row, moved.launches)
        )
        off.append(np.abs(seconds / (columns["latency_us"][some] * 1e-6) - 1.0))
    assert 100.0 * np.median(np.concatenate(off)) < median_pct


@pytest.mark.parametrize("device", ["h100", "h200"])
@pytest.mark.parametrize(("stack", "phase", "file", "median_pct"), [
    ("sglang", "decode", "sglang0.5.14", 12.0),
    ("trtllm", "decode", "trtllm1.3rc20", 7.0),
    ("trtllm", "prefill", "trtllm1.3rc20", 8.0),
    ("vllm", "decode", "sglang0.5.14", 12.0),
])  # fmt: skip
def test_latent_attention_is_priced_as_it_was_measured(shared, device, stack, phase, file, median_pct):
    measured = read(shared / "measured2" / f"mla_{phase}_{device}_{file}.csv")
    plain = dataclasses.replace(serving_stack(stack), overheads=Overheads())
    kernels = Calibrated(stack=plain)(load_model("deepseek-v3"), load_device(device), ParallelConfig(tensor=8)).kernels
    columns = (measured.columns[name] for name in ("batch_size", "isl", "step", "num_heads"))
    priced = []
    for batch, new, past, heads in zip(*(column.tolist() for column in columns), strict=True):
        if phase == "decode":
            form = kernels.decode_form(latent_shape(int(heads)))
            priced.append(form(SCALARS, batch, batch, batch * (new + past)))
        else:
            form = kernels.prefill_form(latent_shape(int(heads)))
            pairs = batch * (new * past + new * (new + 1) / 2)
            priced.append(form(SCALARS, batch * new, batch, pairs, batch * (new + past)))
    assert errors(priced, measured.measured_s).median_pct < median_pct


def test_an_ideal_stack_adds_nothing():
    assert serving_stack("ideal").overheads == Overheads()
    assert Overheads() == Overheads(**dict.fromkeys((f.name for f in dataclasses.fields(Overheads)), 0.0))
    ideal = deploy(model="llama-3.1-8b", hardware="h100-sxm", cost=Calibrated.for_stack("ideal")).cost
    # vLLM's own may be less: its graphs hide part of the starts that kernels alone have.
    step = dataclasses.replace(serving_stack("ideal"), overheads=Overheads(step_s=1e-3))
    stepping = deploy(model="llama-3.1-8b", hardware="h100-sxm", cost=Calibrated(stack=step)).cost
    assert stepping.iteration_s(DECODE) == pytest.approx(ideal.iteration_s(DECODE) + 1e-3)
    eager = deploy(model="llama-3.1-8b", hardware="h100-sxm", cost=Calibrated.for_stack("eager")).cost
    assert ideal.iteration_s(DECODE) < eager.iteration_s(DECODE)


def test_each_term_of_a_stack_has_its_source_and_lengthens_what_it_names():
    for stack in serving_stacks().values():
        terms = {f.name for f in dataclasses.fields(Overheads) if getattr(stack.overheads, f.name)}
        assert terms <= set(stack.sources)
        assert all(stack.sources.values())
    base = serving_stack("ideal")

    def with_terms(**terms):
        stack = dataclasses.replace(base, overheads=Overheads(**terms))
        return deploy(model="llama-3.1-8b", hardware="h100-sxm", cost=Calibrated(stack=stack)).cost

    plain = with_terms()
    assert with_terms(step_s=1e-3).iteration_s(DECODE) == pytest.approx(plain.iteration_s(DECODE) + 1e-3)
    assert with_terms(sequence_s=1e-4).iteration_s(DECODE) == pytest.approx(plain.iteration_s(DECODE) + 8e-4)
    assert with_terms(row_s=1e-5).iteration_s(DECODE) == pytest.approx(plain.iteration_s(DECODE) + 8e-5)
    assert with_terms(sample_s=1e-3).iteration_s(DECODE) == pytest.approx(plain.iteration_s(DECODE) + 1e-3)
    # A prompt is launched kernel by kernel: 32 layers of a millisecond. A graph replays decodes, and prompts with one token left.
    assert with_terms(layer_host_s=1e-3).iteration_s(prompt(2)) == pytest.approx(32e-3)
    assert with_terms(layer_host_s=1e-3).iteration_s(prompt(1)) == plain.iteration_s(prompt(1))
    assert with_terms(layer_host_s=1e-3).iteration_s(DECODE) == plain.iteration_s(DECODE)
    assert with_terms(launch_overlap=0.5).iteration_s(DECODE) < plain.iteration_s(DECODE)
    flops = 4096 * 2 * (8_030_261_248 - 2 * 128_256 * 4096 - 65 * 4096)
    longer = with_terms(sustained_loss=1.0).iteration_s(prompt(4096)) - plain.iteration_s(prompt(4096))
    assert longer == pytest.approx(flops / 989.4e12, rel=0.1)


def test_an_eager_stack_launches_decodes_too():
    eager = dataclasses.replace(serving_stack("eager"), overheads=Overheads(layer_host_s=1e-3))
    cost = deploy(model="llama-3.1-8b", hardware="h200", cost=Calibrated(stack=eager)).cost
    assert cost.iteration_s(DECODE) == pytest.approx(32e-3)


def test_devices_without_measurements_borrow_and_say_so():
    deployment = deployed("four bits")
    assert deployment.profile is not None
    assert "borrowed from b200, " in deployment.profile.note
    assert not deployment.profile.kernels
    gemm = deployment.profile.kernel("gemm", ["bf16/vllm"])
    assert gemm is not None
    assert "h200" in gemm.provenance.borrowed_from
    said = deployment.provenance
    assert said["measured_kernels"] == 0
    assert said["serving_stack"]["name"] == "vllm"


def test_formats_are_priced_by_tables_of_their_own_and_what_stands_in_is_said():
    assert deployed("eight bits").stand_ins == ()
    four_bit = deploy(model="llama-3.1-70b", hardware="b200", precision="nvfp4", cost=Calibrated.for_stack("vllm"))
    assert four_bit.stand_ins == ()
    assert deployed("weights alone in four bits").stand_ins == (
        "rtx-pro-6000: int4 matrix products under vllm are priced as bf16/vllm was measured on rtx-pro-6000.",
    )
    lent = deploy(
        model="gpt-oss-120b", hardware="l40s", parallel={"tensor": 4}, cost=Calibrated.for_stack("vllm")
    ).stand_ins
    assert any(
        note.startswith("l40s: mxfp4 experts under vllm are priced as mxfp4/vllm was measured on ") for note in lent
    )


def test_a_device_of_ones_own_borrows_from_its_maker_and_a_strange_one_is_refused():
    own = dataclasses.replace(load_device("h100-sxm"), name="h100-overclocked", hbm_bytes_per_s=4e12)
    cost = Calibrated.for_stack("vllm")(load_model("llama-3.1-8b"), own)
    assert cost.iteration_s(DECODE) < deployed("dense").cost.iteration_s(DECODE)
    strange = dataclasses.replace(own, vendor="Nobody")
    with pytest.raises(ValueError, match="no calibrated device is of a kind with those from Nobody"):
        Calibrated.for_stack("vllm")(load_model("llama-3.1-8b"), strange)


def test_a_deployment_knows_its_front_end_and_what_prices_other_models_alike():
    deployment = deployed("dense")
    own = serving_stack("vllm").overheads
    assert deployment.front_end == FrontEnd(own.admission_s, own.admission_s_per_token)
    assert deployment.front_end.admission_s > 0
    assert deployment.made_by == Calibrated.for_stack("vllm")
    roof = deploy(model="llama-3.1-8b", hardware="h100-sxm", cost=Roofline)
    assert roof.made_by is Roofline
    assert roof.front_end == FrontEnd()
    assert roof.profile is None


def test_unknown_stacks_are_answered_with_the_nearest():
    with pytest.raises(ValueError, match="'vlm' is not a serving stack; valid here: vllm"):
        serving_stack("vlm")


def test_models_survive_pickling():
    cost = deployed("windows and experts").cost
    again = pickle.loads(pickle.dumps(cost))
    assert again == cost
    assert again.iteration_s(DECODE) == cost.iteration_s(DECODE)


def test_kernels_are_priced_for_a_table_once_and_never_for_a_scalar(monkeypatch):
    asked = []
    for name in ("gemm_s", "elementwise_s", "prefill_form", "decode_form"):
        price = getattr(GpuKernels, name)

        def counted(self, *arguments, _price=price, _name=name, **settings):
            asked.append(_name)
            return _price(self, *arguments, **settings)

        monkeypatch.setattr(GpuKernels, name, counted)
    stack = dataclasses.replace(serving_stack("vllm"), overheads=Overheads(step_s=1.25e-4))
    spec, device = load_model("qwen3-8b"), load_device("h200")
    cost = Calibrated(stack=stack)(spec, device)
    cost.iteration_s(DECODE)
    # Once for each operation of a layer and the head, over all rows of the table together.
    assert 0 < len(asked) < 20
    asked.clear()
    for _ in range(1000):
        cost.iteration_s(DECODE)
    assert asked == []


def test_a_tensor_group_over_two_nodes_uses_the_adapter_of_every_device():
    rows = Totals(8192, 8192, 1, 8192 * 8193 // 2, 8192, 0, 0, 1)
    one_node, two_nodes = (
        deploy(
            model="qwen3-32b",
            hardware="h100",
            parallel=ParallelConfig(tensor=tensor),
            cost=Calibrated(stack=serving_stack("ideal")),
        ).cost.iteration_s(rows)
        for tensor in (8, 16)
    )
    # 128 all-reduces of 84 MB: a ring through one 25 GB/s adapter alone would take 128 * 2 * 84e6 / 25e9 = 0.86 s.
    assert one_node < two_nodes < 0.86 / 2


def test_what_stands_in_for_attention_and_links_is_said_too():
    def said(model: str, hardware: str, tensor: int, stack: str) -> str:
        cost = Calibrated.for_stack(stack)
        return "\n".join(deploy(model=model, hardware=hardware, parallel={"tensor": tensor}, cost=cost).stand_ins)

    assert "latent-attention kernels for decodes under vllm are priced as sglang was measured on h200." in said(
        "deepseek-v3", "h200", 8, "vllm"
    )
    lent = said("llama-3.1-8b", "l40s", 1, "trtllm")
    assert "attention kernels for decodes under trtllm are priced as trtllm was measured on h100-sxm" in lent
    linear = said("qwen3-next-80b-a3b", "a100-80gb-sxm", 4, "vllm")
    assert (
        "linear attention's conv kernels for decodes under vllm are priced as conv/vllm was measured on h100-sxm"
        in linear
    )
    assert (
        "linear attention's delta kernels for decodes under vllm are priced as delta/vllm was measured on h100"
        in linear
    )
    across = "collectives between nodes under vllm are priced as all_reduce/vidur-network was measured on a100-80gb-sxm"
    assert across in said("llama-3.1-70b", "b200", 16, "vllm")
    assert across.removesuffix(" on a100-80gb-sxm") in said("deepseek-v3", "gb200", 128, "vllm")
    assert said("llama-3.1-70b", "b200", 8, "vllm") == ""


def test_a_borrowed_device_says_formats_that_stand_in_and_not_what_is_usual():
    def said(precision: str | None) -> tuple[str, ...]:
        return deploy(
            model="gemma-3-12b", hardware="rtx-4090", precision=precision, cost=Calibrated.for_stack("vllm")
        ).stand_ins

    assert said(None) == ()
    (note,) = said("int4")
    assert note.startswith("rtx-4090: int4 matrix products under vllm are priced as bf16/vllm was measured on l40s, ")


def test_loans_are_as_wide_as_the_widest_kernel_that_is_lent():
    def loan(model: str, hardware: str, stack: str = "vllm", **which: bool) -> tuple[float, float]:
        return deploy(model=model, hardware=hardware, cost=Calibrated.for_stack(stack)).loan(**which)

    assert loan("llama-3.1-8b", "h100-sxm") == (1.0, 1.0)
    low, high = loan("llama-3.1-8b", "gb200")
    assert low < 1 < high
    wider = loan("deepseek-v3", "gb200", "sglang")
    assert wider[0] < low
    assert wider[1] > 2 * high
    assert loan("deepseek-v3", "gb200", "sglang", network_alone=True) == (1.0, 1.0)
    assert loan("llama-3.1-8b", "tpu-v7") == (1.0, 1.0)
