"""Nemotron-H: layers of Mamba-2, of attention, of experts and of MLPs, by explicit sums, and what prices them."""

from __future__ import annotations

import dataclasses

import pytest

from hwmodels.calibrated import Calibrated
from hwmodels.deployment import deploy
from hwmodels.device import load_device
from hwmodels.kernels.linear_attention import linear_decode_s, linear_prefill_s
from hwmodels.kernels.ops import SCALARS
from hwmodels.model import load_model, spec_from_config
from hwmodels.parallel import ParallelConfig
from hwmodels.roofline import Roofline
from hwmodels.totals import Totals
from hwmodels.work import stage_work

SMALL = {
    "model_type": "nemotron_h", "hidden_size": 512, "hybrid_override_pattern": "M-ME*", "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1000, "intermediate_size": 1024, "ssm_state_size": 32,
    "mamba_num_heads": 16, "mamba_head_dim": 64, "n_groups": 4, "conv_kernel": 4, "use_conv_bias": True,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "moe_shared_expert_intermediate_size": 768,
    "moe_latent_size": 128,
}  # fmt: skip


def spec_of(**changes):
    return spec_from_config({**SMALL, **changes}, name="model", where="config.json")


def test_parameters_by_layer():
    channels = 16 * 64 + 2 * 4 * 32
    mamba = 512 * (16 * 64 + channels + 16) + 16 * 64 * 512 + 5 * channels + 3 * 16 + 16 * 64
    attention = 512 * (8 + 2 * 2) * 64 + 8 * 64 * 512
    experts = 8 * 2 * 128 * 256 + 2 * 512 * 768 + 2 * 512 * 128 + 8 * (512 + 1)
    layers = 2 * mamba + 2 * 512 * 1024 + experts + attention + 5 * 512
    assert spec_of().params == layers + 512 + 2 * 1000 * 512


def test_parameters_of_nemotron_nano_9b_v2():
    """8.89 billion, as its report says (arXiv 2508.14444): 27 layers of Mamba-2, 4 of attention, 25 of two matrices."""
    spec, h, inner, channels = load_model("nemotron-nano-9b-v2"), 4480, 128 * 80, 128 * 80 + 2 * 8 * 128
    mamba = h * (inner + channels + 128) + inner * h + 5 * channels + 3 * 128 + inner
    attention = h * (40 + 2 * 8) * 128 + 40 * 128 * h
    assert spec.params == 27 * mamba + 4 * attention + 25 * 2 * h * 15_680 + 56 * h + h + 2 * 131_072 * h
    assert spec.params / 1e9 == pytest.approx(8.89, abs=0.005)


def test_a_list_of_layers_says_what_the_pattern_says():
    names = ["mamba", "mlp", "linear_attention", "moe", "full_attention"]
    listed = spec_of(layers_block_type=names, hybrid_override_pattern=None)
    assert dataclasses.replace(listed, source="") == dataclasses.replace(spec_of(), source="")


def test_layers_of_another_kind_are_refused_by_their_letter():
    with pytest.raises(ValueError, match="layers of 'X'; known are mamba, attention, moe, mlp"):
        spec_of(hybrid_override_pattern="MX")


def test_one_layer_of_five_caches_tokens_and_two_keep_a_state():
    spec = spec_of()
    assert spec.kv_bytes_per_token() == 2 * 2 * 64 * 2
    assert spec.state_bytes_per_sequence == 2 * (16 * 64 * 32 * 4 + 3 * (16 * 64 + 2 * 4 * 32) * 2)


@pytest.mark.parametrize("tensor", [1, 8])
def test_each_layer_has_one_of_attention_and_mlp_to_send_and_to_compute(tensor):
    """Eight devices replicate the four groups, as they do key-value heads."""
    work = stage_work(spec_of(), ParallelConfig(tensor=tensor), 0)
    assert sum(op.launches * op.layers for op in work.elementwise if op.name == "norms") == 5
    groups = max(1, 4 // tensor)
    columns = {op.name: op.n for op in work.linears}
    assert columns["linear_attention_in"] == (2 * 16 * 64 + 16) // tensor + 2 * groups * 32
    assert columns["latent_in"] == 128
    assert work.recurrence is not None
    assert (work.recurrence.n_key_heads, work.recurrence.n_value_heads) == (groups, 16 // tensor)
    if tensor > 1:
        reduced = {op.name: op.layers for op in work.collectives if op.kind == "all_reduce"}
        assert reduced == {"embedding": 1, "attention": 3, "mlp": 2}


def test_heads_that_devices_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="does not divide the 12 linear-attention heads"):
        stage_work(spec_of(mamba_num_heads=12), ParallelConfig(tensor=8), 0)


def test_work_of_nemotron_3_nano_by_an_explicit_sum():
    """23 layers of Mamba-2, 6 of attention, 23 with 6 of 128 experts and a shared one, two matrices each."""
    h, decodes, context = 2688, 7, 900
    cost = Roofline(load_model("nemotron-3-nano-30b-a3b"), load_device("h200"))
    found = cost.work(Totals(decodes, 0, 0, 0, 0, decodes, decodes * context, decodes))
    channels = 64 * 64 + 2 * 8 * 128
    cells = 64 * 64 * 128
    mamba = 2 * h * (64 * 64 + channels + 64) + 2 * 64 * 64 * h + 2 * 4 * channels + 4 * cells
    softmax = 2 * h * (32 + 2 * 2) * 128 + 2 * 32 * 128 * h
    experts = 2 * h * 128 + 6 * 4 * h * 1856 + 4 * h * 3712
    rows = 23 * mamba + 6 * softmax + 23 * experts + 2 * h * 131_072
    assert found.flops == pytest.approx(decodes * (rows + 6 * 4 * 32 * 128 * context), rel=1e-12)
    one_more = cost.work(Totals(decodes + 1, 0, 0, 0, 0, decodes + 1, decodes * context, decodes + 1)).hbm_bytes
    # Its state and the last three inputs of the convolution are read and written, and it wakes experts.
    assert one_more - found.hbm_bytes > 2 * 23 * (cells * 4 + 3 * channels * 2)


def test_layers_are_priced_by_their_convolution_and_scan():
    """Decodes of a state were timed of gated delta nets alone, whose kernel stands in for them, and a note says so."""
    cost = Calibrated.for_stack("trtllm")
    found = deploy(model="nemotron-3-nano-30b-a3b", hardware="b200", parallel={"tensor": 2}, cost=cost)
    shape = {"key_heads": 4, "key_dim": 128, "value_heads": 32, "value_dim": 64, "conv_width": 4}
    profile, overlap = found.profile, cost.stack.overheads.launch_overlap
    prefill, decode, _ = found.cost._stages[0].attention[-1]

    def layer_s(family, equation, update, **batch):
        seconds = 0.0
        for kernel, variant in (("mamba-conv", "mamba-conv"), ("mamba-scan", update)):
            params = profile.get(family, [f"{variant}/trtllm"])
            seconds += equation(params, profile.datasheet, kernel=kernel, **shape, **batch) - params.launch_s * overlap
        return seconds

    prompts = layer_s("linear_prefill", linear_prefill_s, "mamba-scan", rows=8192, chunks=4)
    assert prefill(SCALARS, 8192, 4, 0, 0) == pytest.approx(23 * prompts)
    assert decode(SCALARS, 64, 64, 0) == pytest.approx(23 * layer_s("linear_decode", linear_decode_s, "delta", seqs=64))
    said = cost.stand_ins(found.model, found.device, found.cost.work_by_stage)
    assert any("mamba-scan kernels for decodes under trtllm are priced as delta/trtllm was measured" in s for s in said)


def test_experts_without_a_gate_are_priced_by_their_own_kernels():
    cost = Calibrated.for_stack("vllm")
    spec, device = load_model("nemotron-3-nano-30b-a3b"), load_device("h200")
    uses = cost._gpu(device).uses(["bf16"], [stage_work(spec, ParallelConfig(), 0)])
    assert [use.kernel.variant for use in uses if use.kernel.family == "moe"] == ["bf16-plain/vllm"]
    gated = dataclasses.replace(spec, experts=dataclasses.replace(spec.experts, gated=True))
    plain_s, gated_s = (
        Calibrated.for_stack("vllm")(each, device).iteration_s(Totals(64, 0, 0, 0, 0, 64, 64, 64))
        for each in (spec, gated)
    )
    assert plain_s < gated_s
