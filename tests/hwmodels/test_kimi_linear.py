"""Kimi delta attention beside latent attention: parameters, work and cache by explicit sums, and what prices it."""

from __future__ import annotations

import pytest

from hwmodels.calibrated import Calibrated
from hwmodels.device import load_device
from hwmodels.kernels.linear_attention import linear_decode_s, linear_prefill_s
from hwmodels.kernels.ops import SCALARS
from hwmodels.measured import predict, read
from hwmodels.model import spec_from_config
from hwmodels.parallel import ParallelConfig
from hwmodels.profiles import load_profile
from hwmodels.work import stage_work

SMALL = {
    "model_type": "kimi_linear", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "kv_lora_rank": 128,
    "q_lora_rank": None, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "intermediate_size": 1024,
    "moe_intermediate_size": 128, "num_experts": 16, "num_experts_per_token": 4, "num_shared_experts": 1,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "vocab_size": 1000,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 8, "head_dim": 64, "short_conv_kernel_size": 4,
    },
}  # fmt: skip
LATER = {
    "q_lora_rank": 256, "routed_expert_hidden_size": 256, "latent_moe_use_norm": True, "mla_use_output_gate": True,
    "attn_res_block_size": 12, "linear_attn_config": {**SMALL["linear_attn_config"], "use_full_rank_gate": True},
}  # fmt: skip


def spec_of(**changes):
    return spec_from_config({**SMALL, **changes}, name="model", where="config.json")


def test_parameters_by_layer():
    h, wide = 512, 8 * 64
    delta = 3 * h * wide + wide * h + h * 8 + 2 * (h * 64 + 64 * wide) + 4 * 3 * wide + 8 + wide + 64
    latent = h * 8 * (64 + 32) + h * (128 + 32) + 128 + 128 * 8 * (64 + 64) + 8 * 64 * h
    experts = (16 + 1) * 3 * h * 128 + 16 * (h + 1)
    layers = 3 * delta + latent + 3 * h * 1024 + 3 * experts + 4 * 2 * h
    assert spec_of().params == layers + h + 2 * 1000 * h


def test_what_later_models_have_more_is_counted_as_its_keys_name_it():
    h, wide = 512, 8 * 64
    plain, later = spec_of(q_lora_rank=256), spec_of(**LATER)
    gates = 3 * (h * wide - (h * 64 + 64 * wide)) + h * wide
    experts = 3 * (16 * 3 * (256 - h) * 128 + 2 * 256 * h + 256)
    assert later.params - plain.params == gates + experts
    assert any("Attention residuals (attn_res_block_size 12) are neither counted nor priced" in n for n in later.notes)


def test_one_layer_of_four_caches_latents_and_three_keep_a_state():
    spec = spec_of()
    assert spec.layer_attention == ("linear", "linear", "linear", "full")
    assert spec.kv_bytes_per_token() == (128 + 32) * 2
    assert spec.state_bytes_per_sequence == 3 * (8 * 64 * 64 * 4 + 3 * 3 * 8 * 64 * 2)


@pytest.mark.parametrize("tensor", [1, 4])
def test_devices_hold_the_weights_that_are_counted(tensor):
    spec = spec_of(**LATER)
    held = stage_work(spec, ParallelConfig(tensor=tensor), 0).resident_bytes * tensor
    assert held >= spec.weight_bytes() * (1 - 1e-12)
    if tensor == 1:
        assert held == pytest.approx(spec.weight_bytes(), rel=1e-12)


def test_layers_are_priced_by_their_convolution_and_update():
    stack, device = Calibrated.for_stack("sglang"), load_device("h200")
    stage = stack(spec_of(), device)._stages[0]
    profile, overlap = load_profile("h200"), stack.stack.overheads.launch_overlap
    shape = {"key_heads": 8, "key_dim": 64, "value_heads": 8, "value_dim": 64, "conv_width": 4}

    def layer_s(family, equation, **batch):
        seconds = 0.0
        for kernel in ("kda-conv", "kda"):
            params = profile.get(family, [f"{kernel}/sglang"])
            seconds += equation(params, profile.datasheet, kernel=kernel, **shape, **batch) - params.launch_s * overlap
        return seconds

    prefill, decode, _ = stage.attention[-1]
    assert prefill(SCALARS, 8192, 4, 0, 0) == pytest.approx(
        3 * layer_s("linear_prefill", linear_prefill_s, rows=8192, chunks=4)
    )
    assert decode(SCALARS, 64, 64, 0) == pytest.approx(3 * layer_s("linear_decode", linear_decode_s, seqs=64))


def test_a_table_with_the_launches_of_python_is_not_priced(tmp_path):
    """vLLM's convolution of prompts was timed call by call; its core and SGLang's convolution were not."""
    header = "kernel,phase,num_heads,batch_size,seq_len,latency_us"
    rows = ("causal_conv1d_fn_qkv3,prefill,96,4,1024,1600", "flashkda_fwd,prefill,96,4,1024,513")
    path = tmp_path / "kda_h100_bf16_vllm0.33.csv"
    path.write_text("\n".join((header, *rows)) + "\n")
    found = predict(read(path), load_profile("h100"))
    assert dict(found.unmodelled) == {"timed as Python launches them: the host is in them": 1}
    assert found.seconds[1] == pytest.approx(513e-6, rel=0.15)


def test_verification_reads_a_state_once_and_writes_one_for_each_token(tmp_path):
    """Rows of 128 sequences on one H100, which no fit saw; a decode of each token would read the state as often."""
    header = "kernel,phase,num_heads,batch_size,seq_len,latency_us"
    rows = [f"fused_recurrent_kda,verify,96,128,{width},{us}" for width, us in ((2, 845.98), (4, 1436.3), (8, 2656.9))]
    path = tmp_path / "kda_h100_bf16_vllm0.33.csv"
    path.write_text("\n".join((header, *rows, "fused_kda_decode,decode,96,128,1,612.9")) + "\n")
    table = read(path)
    found = predict(table, load_profile("h100"))
    assert found.seconds[:3] == pytest.approx(table.measured_s[:3], rel=0.1)
    (reason,) = found.unmodelled
    assert reason.startswith("one kernel for convolution, update and norm")


@pytest.mark.torch
@pytest.mark.slow(reason="transformers is imported, which takes seconds")
def test_parameters_are_those_that_transformers_makes():
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    data = {key: value for key, value in SMALL.items() if key != "model_type"}
    config = transformers.AutoConfig.for_model("kimi_linear", **data, pad_token_id=None, bos_token_id=1, eos_token_id=2)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    biases = sum(each.numel() for name, each in model.named_buffers() if "correction_bias" in name)
    assert sum(each.numel() for each in model.parameters()) + biases == spec_of().params - 1000 * 512
