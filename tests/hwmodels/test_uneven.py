"""Models whose layers differ in the shape of their attention or MLP, or have none: parameters, work and cache by explicit sums."""

from __future__ import annotations

import numpy as np
import pytest

from hwmodels.cache import StageCache, held_bytes, keeps_every_token, paged
from hwmodels.calibrated import Calibrated
from hwmodels.deployment import deploy
from hwmodels.device import load_device
from hwmodels.model import Attention, load_model, spec_from_config
from hwmodels.parallel import ParallelConfig
from hwmodels.roofline import Roofline
from hwmodels.totals import Totals, pairs_within
from hwmodels.work import stage_work

H200 = load_device("h200")
STEP = {
    "model_type": "step3p7", "hidden_size": 1024, "num_hidden_layers": 5, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 64, "intermediate_size": 2048, "vocab_size": 1000, "sliding_window": 32, "moe_intermediate_size": 256,
    "num_experts": 16, "num_experts_per_tok": 4, "share_expert_dim": 512,
    "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
    "attention_other_setting": {"num_attention_heads": 12},
}  # fmt: skip
KEPT = {"attention": {"no_op": False, "n_heads_in_group": 4}, "ffn": {"no_op": False, "ffn_mult": 3.0}}
PRUNED = {
    "model_type": "nemotron-nas", "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 1000,
    "block_configs": [
        KEPT, KEPT,
        {"attention": {"no_op": True, "n_heads_in_group": None}, "ffn": {"no_op": False, "ffn_mult": 1.3}},
        {"attention": {"no_op": False, "n_heads_in_group": 4}, "ffn": {"no_op": True}},
    ],
}  # fmt: skip


def spec_of(config):
    return spec_from_config(config, name="model", where="config.json")


def test_step_counts_a_gate_for_each_head_and_more_heads_in_windowed_layers():
    spec = spec_of(STEP)
    attention = {heads: 1024 * (heads * 64 + heads + 2 * 2 * 64) + heads * 64 * 1024 + 2 * 64 for heads in (8, 12)}
    experts = (16 + 2) * 3 * 1024 * 256 + 16 * 1024 + 16
    layers = 2 * attention[8] + 3 * attention[12] + 3 * 3 * 1024 * 2048 + 2 * experts + 5 * 2 * 1024
    assert spec.params == layers + 1024 + 2 * 1000 * 1024


def test_layers_for_multi_token_prediction_behind_the_others_are_not_counted():
    padded = {**STEP, "layer_types": [*STEP["layer_types"], "sliding_attention"], "num_nextn_predict_layers": 1}
    assert spec_of(padded).layer_attention == spec_of(STEP).layer_attention
    assert spec_of(padded).params == spec_of(STEP).params


def test_pruned_blocks_lack_what_they_say():
    spec = spec_of(PRUNED)
    assert spec.dense_widths == (2048, 2048, 1024, 0)  # two thirds of 3.0 and 1.3 times 1,024, up to multiples of 256
    attention = 1024 * (8 + 2 * 2) * 128 + 1024 * 1024
    mlps = 3 * 1024 * (2048 + 2048 + 1024)
    assert spec.params == 3 * attention + mlps + 6 * 1024 + 1024 + 2 * 1000 * 1024
    assert keeps_every_token(spec)
    assert spec.kv_bytes_per_token() == 3 * 2 * 2 * 128 * 2


def test_pruned_blocks_send_and_compute_nothing_for_what_they_lack():
    work = stage_work(spec_of(PRUNED), ParallelConfig(tensor=2), 0)
    reduced = {op.name: op.layers for op in work.collectives if op.kind == "all_reduce"}
    assert reduced == {"embedding": 1, "attention": 3, "mlp": 3}
    assert sum(op.layers for op in work.linears if op.name == "qkv") == 3
    assert sorted((op.n, op.layers) for op in work.linears if op.name == "mlp_gate_up") == [(1024, 1), (2048, 2)]
    assert sum(op.launches * op.layers for op in work.elementwise if op.name == "norms") == 6


@pytest.mark.parametrize(
    ("part", "change"), [("attention", {"replace_with_linear": True}), ("ffn", {"sparsify": ["x"]})]
)
def test_pruned_blocks_with_anything_else_are_refused_by_its_name(part, change):
    odd = {**KEPT, part: {**KEPT[part], **change}}
    with pytest.raises(ValueError, match=f"block 1: {next(iter(change))} is not modelled"):
        spec_of({**PRUNED, "block_configs": [KEPT, odd, KEPT, KEPT]})


def test_pruned_blocks_with_unlike_groups_of_heads_are_refused():
    odd = {**KEPT, "attention": {"no_op": False, "n_heads_in_group": 2}}
    with pytest.raises(ValueError, match="n_heads_in_group of 2, 4 in one model is not modelled"):
        spec_of({**PRUNED, "block_configs": [KEPT, odd, KEPT, KEPT]})


@pytest.mark.parametrize("key", ["num_kv_shared_layers", "hidden_size_per_layer_input"])
def test_gemma_4_with_what_small_ones_have_is_refused_by_its_key(key):
    with pytest.raises(ValueError, match=key):
        spec_of({**STEP, key: 2})


def test_work_of_gemma_4_by_an_explicit_sum():
    """31B: 50 layers see 1,024 tokens with 16 key-value heads of 256, ten see all with 4 of 512 whose values are their keys."""
    h, contexts = 5376, [300, 5000]
    window = sum(min(c, 1024) for c in contexts)
    found = Roofline(load_model("gemma-4-31b"), H200).work(Totals(2, 0, 0, 0, 0, 2, sum(contexts), 2, 0, window))
    local = 2 * h * (32 + 2 * 16) * 256 + 2 * 32 * 256 * h
    full = 2 * h * (32 + 4) * 512 + 2 * 32 * 512 * h
    attend = 4 * 32 * (10 * 512 * sum(contexts) + 50 * 256 * window)
    dense = 50 * local + 10 * full + 60 * 6 * h * 21_504 + 2 * h * 262_144
    assert found.flops == 2 * dense + attend
    cache = 2 * 2 * (10 * 4 * 512 * sum(contexts) + 50 * 16 * 256 * window)
    assert found.hbm_bytes == pytest.approx(dense + cache, rel=1e-12)


def test_the_dense_mlp_beside_gemma_4s_experts_is_read_for_every_token():
    work = stage_work(load_model("gemma-4-26b-a4b"), ParallelConfig(), 0)
    assert work.experts is not None
    assert (work.experts.n_experts, work.experts.per_token, work.experts.layers) == (128, 8, 30)
    assert [(op.n, op.k, op.layers) for op in work.linears if op.name == "shared_gate_up"] == [(2 * 2112, 2816, 30)]


def test_mimo_caches_keys_and_values_of_unlike_widths():
    spec = load_model("mimo-v2-flash")
    assert isinstance(spec.attention, Attention)
    full, local = (spec.kv_elements_per_layer(kind) for kind in ("full", "window"))
    assert (full, local) == (4 * (192 + 128), 8 * (192 + 128))
    assert spec.kv_bytes_per_token() == 2 * (9 * full + 39 * local)


@pytest.mark.parametrize("name", ["gemma-4-26b-a4b", "gemma-4-31b", "mimo-v2-flash"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_devices_hold_the_weights_that_are_counted(name, tensor):
    """Norms, routers and the like are on each device of a group; the rest is split."""
    spec = load_model(name)
    held = stage_work(spec, ParallelConfig(tensor=tensor), 0).resident_bytes
    assert tensor * held == pytest.approx(spec.weight_bytes(), rel=1e-12 if tensor == 1 else 2e-3)


def test_pages_of_layers_with_fewer_bytes_a_token_hold_more_tokens():
    """Blocks of one pool are alike in bytes: 16 tokens of a wide layer, 32 of one with half of its bytes."""
    wide = StageCache(
        kinds=("full", "window"), layers=range(2), token_bytes=10.0, local_token_bytes=20.0, state_bytes=0.0, window_tokens=64
    )  # fmt: skip
    pages = paged(wide, 16)
    assert (pages.page_tokens, pages.local_page_tokens, pages.block_bytes) == (32, 16, 320.0)
    # 100 tokens and the next in pages of 32; of a window of 64 the first 37 are past, two pages of 16 with them.
    assert pages.blocks(100) == 4 + (7 - 2)
    assert held_bytes(wide, 100) == 100 * 10.0 + 63 * 20.0
    narrow = StageCache(
        kinds=("full", "window"), layers=range(2), token_bytes=20.0, local_token_bytes=10.0, state_bytes=0.0, window_tokens=64
    )  # fmt: skip
    assert (paged(narrow, 16).page_tokens, paged(narrow, 16).local_page_tokens) == (16, 32)


@pytest.mark.parametrize(("model", "device", "tensor"), [("mimo-v2-flash", "b200", 4), ("gemma-4-26b-a4b", "h200", 1)])
def test_windowed_layers_that_multiply_all_keys_cost_the_pairs_of_each_prompt(model, device, tensor):
    """SGLang's Triton kernels of wide heads multiply keys outside the window too: of a long prompt no fewer beside a short one."""
    cost = deploy(model=model, hardware=device, parallel={"tensor": tensor}, cost=Calibrated.for_stack("sglang")).cost

    def seconds(*prompts):
        columns = [
            (q, q, 1, pairs_within(past, q, 1 << 40), past + q, 0, 0, 1, pairs_within(past, q, cost.window_tokens), 0)
            for q, past in prompts
        ]
        totals = Totals(*map(sum, zip(*columns, strict=True)))
        arrays = Totals(*(np.array([each]) for each in totals))
        assert cost.iteration_s(arrays).tolist() == [cost.iteration_s(totals)]
        return cost.iteration_s(totals)

    long, short = (2048, 60_000), (2, 0)
    assert seconds(long) <= seconds(long, short) < 1.05 * seconds(long)
