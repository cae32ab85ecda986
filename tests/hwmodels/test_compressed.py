"""DeepSeek-V4: attention to compressed tokens and hyper-connections, by explicit sums, and what prices them."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from hwmodels.cache import keeps_every_token
from hwmodels.calibrated import Calibrated
from hwmodels.deployment import deploy
from hwmodels.device import load_device
from hwmodels.kernels.compressed import (
    CompressedParams,
    attended,
    compressed_decode_s,
    compressed_prefill_s,
    decode_form,
    prefill_form,
)
from hwmodels.kernels.ops import ARRAYS, SCALARS
from hwmodels.model import load_model, spec_from_config
from hwmodels.parallel import ParallelConfig
from hwmodels.profiles import datasheet_of
from hwmodels.roofline import Roofline
from hwmodels.totals import Totals
from hwmodels.work import stage_work

H200 = load_device("h200")
SHEET = datasheet_of(H200)
SMALL = {
    "model_type": "deepseek_v4", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 1,
    "head_dim": 128, "qk_rope_head_dim": 64, "q_lora_rank": 256, "o_groups": 4, "o_lora_rank": 64, "index_topk": 32,
    "index_n_heads": 8, "index_head_dim": 64, "sliding_window": 16, "compress_ratios": [0, 4, 128, 4, 0], "hc_mult": 4,
    "num_hash_layers": 3, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    "vocab_size": 1000,
}  # fmt: skip
LAYER = {"heads": 16, "head_dim": 512, "hidden": 4096, "window": 128.0}
CSA = {**LAYER, "compress": 4.0, "chosen": 512.0, "index_flops": 2.0 * 64 * 128, "token_bytes": 33.0}
HCA = {**LAYER, "compress": 128.0, "token_bytes": 4.6}


def spec_of(**changes):
    return spec_from_config({**SMALL, **changes}, name="model", where="config.json")


def test_parameters_by_layer():
    h, width, q, heads = 512, 128, 256, 16
    plain = h * q + q + q * heads * width + h * width + width + 4 * 64 * (4 * width) + 4 * 64 * h + heads
    hca = 2 * h * width + 128 * width + width
    csa = 2 * h * 2 * width + 4 * 2 * width + width
    indexer = 2 * h * 2 * 64 + 4 * 2 * 64 + 64 + q * 8 * 64 + h * 8
    hyper = 2 * (24 * 4 * h + 24 + 3)
    experts = (8 + 1) * 3 * h * 128 + 8 * h
    layers = 4 * (plain + hyper + experts + 2 * h) + 2 * (csa + indexer) + hca + 8  # one layer's router has a bias
    assert spec_of().params == layers + h + 4 * 4 * h + 4 + 1 + 2 * 1000 * h


def test_layers_for_multi_token_prediction_behind_the_others_are_not_counted():
    assert spec_of().layer_attention == ("window", "csa", "hca", "csa")


@pytest.mark.parametrize("ratios", [[0, 4, 128], [0, 4, 128, 8]])
def test_other_ratios_and_lists_that_are_too_short_are_refused(ratios):
    with pytest.raises(ValueError, match="compress_ratios must name 4 layers with 0, 4 or 128"):
        spec_of(compress_ratios=ratios)


def test_a_token_takes_its_share_of_compressed_vectors_and_keys_of_the_indexer():
    """V4-Flash: 448 numbers in fp8 with seven scales and 64 in 16 bits; of the indexer 128 in fp8 and a scale in 32."""
    spec = load_model("deepseek-v4-flash")
    vector, key = 448 + 7 + 128, 128 + 4
    assert spec.kv_bytes_per_token() == 21 * (vector + key) / 4 + 20 * vector / 128
    assert keeps_every_token(spec)
    assert any("3.2 MB of each sequence, are not counted" in note for note in spec.notes)
    # Each device of a group has the one vector of all heads.
    assert deploy(model="deepseek-v4-flash", hardware="h200", parallel={"tensor": 4}).kv_bytes_per_token_per_device == (
        pytest.approx(spec.kv_bytes_per_token())
    )


def test_layers_for_multi_token_prediction_see_their_window():
    draft = load_model("deepseek-v4-flash").mtp_draft()
    assert draft.layer_attention == ("window",)
    assert stage_work(draft, ParallelConfig(), 0).resident_bytes == pytest.approx(draft.weight_bytes(), rel=1e-9)


def test_formats_of_its_checkpoints():
    own = load_model("deepseek-v4-flash")
    assert (own.attention_precision, own.mlp_precision, own.expert_precision) == ("fp8_block", "fp8_block", "mxfp4")
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    side = {
        "quantization": {
            "quant_algo": "MIXED_PRECISION", "exclude_modules": ["*.attn.*"],
            "quantized_layers": {f"layers.{i}.ffn.experts": {"quant_algo": "NVFP4"} for i in range(4)},
        }
    }  # fmt: skip
    config = {**SMALL, "quantization_config": blocks, "expert_dtype": "fp4"}
    made = spec_from_config(config, name="model", where="config.json", quant_config=side)
    assert (made.attention_precision, made.mlp_precision, made.expert_precision) == ("fp8_block", "fp8_block", "nvfp4")
    with pytest.raises(ValueError, match="of experts in fp6 is not modelled"):
        spec_from_config({**config, "expert_dtype": "fp6"}, name="model", where="config.json")


@pytest.mark.parametrize("tensor", [1, 4])
def test_heads_and_groups_are_split_and_the_rest_is_on_each_device(tensor):
    work = stage_work(spec_of(), ParallelConfig(tensor=tensor), 0)
    columns = {(op.name, op.n, op.k): op.layers for op in work.linears}
    assert columns["q_up", 16 // tensor * 128, 256] == 1  # of the layer with a window alone
    assert columns["group_out", 4 // tensor * 64, 4 * 128] == 1
    assert columns["index_q", 8 * 64, 256] == 2
    kinds = {(each.compress, each.chosen, each.layers, each.n_heads) for each in work.attention}
    assert kinds == {(0, 0, 1, 16 // tensor), (4, 32, 2, 16 // tensor), (128, 0, 1, 16 // tensor)}


def test_hyper_connections_stream_four_states_at_both_places_of_a_layer():
    streams = {op.op: op for op in stage_work(spec_of(), ParallelConfig(), 0).elementwise if op.op}
    assert (streams["mhc_pre"].layers, streams["mhc_pre"].bytes_per_row) == (8, 5 * 512 * 2)
    assert (streams["mhc_post"].layers, streams["mhc_post"].bytes_per_row) == (8, 9 * 512 * 2)


def test_pairs_of_a_prompt_are_cut_where_its_contexts_are_longer():
    """Against the sum over each token, of prompts that are alike."""
    draw = random.Random(1)
    for _ in range(200):
        chunks, each, past, most = draw.randint(1, 4), draw.randint(1, 300), draw.randint(0, 300), draw.randint(1, 500)
        contexts = [past + i + 1 for i in range(each)]
        rows, pairs = chunks * each, chunks * sum(contexts)
        cut, beyond = attended(SCALARS, float(rows), float(chunks), float(pairs), float(most))
        # A context counts in part where the cut falls between it and the next.
        assert cut == pytest.approx(chunks * sum(min(c, most) for c in contexts), abs=0.13 * chunks)
        assert beyond == pytest.approx(chunks * sum(c > most for c in contexts), abs=0.51 * chunks)
        there = attended(ARRAYS, *(np.array([float(v)]) for v in (rows, chunks, pairs)), float(most))
        assert (float(there[0][0]), float(there[1][0])) == (cut, beyond)


@pytest.mark.parametrize("shape", [CSA, HCA, {**LAYER, "compress": 0.0}])
def test_scalars_and_arrays_agree_and_more_context_never_costs_less(shape):
    params = CompressedParams(choose_s=1e-5, flat_s=1e-4)
    prompts = prefill_form(params, SHEET, **shape)
    past = np.arange(0, 20_000, 7)
    pairs = 64 * past + 64 * 65 / 2
    together = prompts(ARRAYS, 64.0, 1.0, pairs, past + 64.0)
    assert together.tolist() == [
        prompts(SCALARS, 64.0, 1.0, float(p), c + 64.0) for p, c in zip(pairs, past, strict=True)
    ]
    assert (np.diff(together) >= -1e-15).all()
    decodes = decode_form(params, SHEET, **shape, entry_bytes=583.0)
    contexts = np.arange(8, 200_000, 97)
    steps = decodes(ARRAYS, 8.0, 8.0, contexts)
    assert steps.tolist() == [decodes(SCALARS, 8.0, 8.0, int(kv)) for kv in contexts]
    assert (np.diff(steps) >= -1e-15).all()


def test_a_query_attends_to_chosen_keys_and_scores_all():
    params = CompressedParams(launch_s=1e-6, row_s=0.0, head_s=0.0, wide_s=0.0)
    shape = {**CSA, "entry_bytes": 0.0, "token_bytes": 0.0}
    short, long, longer = (
        compressed_decode_s(params, SHEET, seqs=1, kv_tokens=kv, **shape) for kv in (2048, 4096, 6144)
    )
    score_s = 2048 / 4 * CSA["index_flops"] / (SHEET.flops_per_s("fp8") * params.score_efficiency)
    assert long - short == pytest.approx(score_s)
    assert longer - long == pytest.approx(score_s)
    keys_s = (128 + 512) * 4 * 16 * 512 / (SHEET.flops_per_s("bf16") * params.compute_efficiency)
    assert short == pytest.approx(1e-6 + keys_s + score_s)


def test_equal_scores_cost_more_in_a_benchmark_alone():
    params = CompressedParams(flat_s=1e-4, flat_query_s=1e-5)
    served, timed, far = (
        compressed_prefill_s(params, SHEET, rows=64, chunks=1, pairs=64 * past, kv_tokens=past, **CSA, flat_until=until)
        for past, until in ((4000, None), (4000, 8192.0), (20_000, 8192.0))
    )
    assert timed == pytest.approx(served + 1e-4 + 64 * 1e-5 / SHEET.sm_count)
    assert far == compressed_prefill_s(params, SHEET, rows=64, chunks=1, pairs=64 * 20_000, kv_tokens=20_000, **CSA)


def test_a_datasheet_bounds_scores_attention_and_cache():
    """One decode of V4-Flash over 8,192 tokens, of which 21 layers choose 512 keys, 20 attend to 64, and all to 128 tokens."""
    spec = load_model("deepseek-v4-flash")
    kernels = Roofline(spec, H200).kernels
    work = stage_work(spec, ParallelConfig(), 0)
    seconds = {
        shape.compress: kernels.decode_form(shape)(SCALARS, 1, 1, 8192) / shape.layers for shape in work.attention
    }
    entries = {0: 128, 4: 128 + 512, 128: 128 + 64}
    for compress, keys in entries.items():
        scored = 8192 / 4 if compress == 4 else 0
        moved = keys * 583 + scored * 132
        flops = keys * 4 * 64 * 512 + scored * 2 * 64 * 128
        bound = max(flops / SHEET.flops_per_s("bf16"), moved / SHEET.hbm_bytes_per_s)
        assert seconds[compress] == pytest.approx(bound)


def test_layers_are_priced_by_the_modules_of_the_stack():
    cost = Calibrated.for_stack("vllm")
    found = deploy(model="deepseek-v4-flash", hardware="b200", parallel={"tensor": 4, "expert": 4}, cost=cost)
    stage = found.cost._stages[0]
    csa = found.profile.get("compressed_decode", ["csa/vllm"])
    shape = {**CSA, "heads": 16, "token_bytes": 33.0, "entry_bytes": 583.0, "in_blocks": 1.0}
    whole = 21 * compressed_decode_s(csa, found.profile.datasheet, seqs=32, kv_tokens=32 * 4000, **shape)
    at = [each.compress for each in stage.work.attention].index(4)
    assert stage.attention[at][1](SCALARS, 32, 32, 32 * 4000) == pytest.approx(whole)
    variants = {use.kernel.variant for use in cost._gpu(found.device).uses([], found.cost.work_by_stage)}
    assert {"csa/vllm", "hca/vllm"} <= variants


@pytest.mark.parametrize(("model", "layers"), [("glm-5", (78, 0)), ("glm-5.2", (21, 57))])
def test_latent_attention_to_chosen_tokens_is_priced_by_its_modules(model, layers):
    """Layers that choose tokens by the module with an indexer, those that take another's choice by the one without."""
    found = deploy(model=model, hardware="b200", parallel={"tensor": 8}, cost=Calibrated.for_stack("sglang"))
    stage = found.cost._stages[0]
    forms = {shape.kind: stage.attention[i] for i, shape in enumerate(stage.work.attention)}
    sheet = found.profile.datasheet
    whole = {
        "heads": 8,
        "multiplied_heads": 64,
        "head_dim": 544,
        "hidden": 6144,
        "compress": 1.0,
        "window": 0.0,
        "chosen": 2048.0,
    }
    scored = {**whole, "index_flops": 2.0 * 32 * 128, "entry_bytes": 1152.0, "token_bytes": 132.0}
    params = found.profile.get("compressed_decode", ["dsa/sglang"])
    one_s = compressed_decode_s(params, sheet, seqs=32, kv_tokens=32 * 4000, **scored)
    assert forms["indexer"][1](SCALARS, 32, 32, 32 * 4000) == pytest.approx(layers[0] * one_s)
    params = found.profile.get("compressed_decode", ["dsa-shared/sglang"])
    one_s = compressed_decode_s(params, sheet, seqs=32, kv_tokens=32 * 2048, **whole, entry_bytes=1152.0)
    assert forms["mla"][1](SCALARS, 32, 32, 32 * 2048, 32 * 1952) == pytest.approx(layers[1] * one_s)
    variants = {
        use.kernel.variant
        for use in Calibrated.for_stack("sglang")._gpu(found.device).uses([], found.cost.work_by_stage)
    }
    assert ("dsa-shared/sglang" in variants) == bool(layers[1])
    assert "dsa/sglang" in variants


def test_a_prompt_attends_to_no_more_than_was_chosen():
    """A prompt of 16,384 tokens against the sum over its tokens, whether a layer chooses or is given the pairs as they are."""
    params = CompressedParams(launch_s=0.0, row_s=0.0, head_s=0.0, wide_s=0.0)
    shape = {"heads": 64, "head_dim": 544, "hidden": 0.0}
    n, most = 16_384, 2048
    kept = sum(min(i + 1, most) for i in range(n))
    key_s = 4.0 * 64 * 544 / (SHEET.flops_per_s("bf16") * params.compute_efficiency)
    choosing = compressed_prefill_s(
        params,
        SHEET,
        rows=n,
        chunks=1,
        pairs=n * (n + 1) / 2,
        kv_tokens=n,
        **shape,
        compress=1.0,
        window=0.0,
        chosen=2048.0,
    )
    given = compressed_prefill_s(
        params, SHEET, rows=n, chunks=1, pairs=kept, kv_tokens=n, **shape, compress=0.0, window=math.inf
    )
    assert given == pytest.approx(kept * key_s)
    assert choosing == pytest.approx(given, rel=1e-3)


def test_no_prompt_takes_less_than_no_time():
    hidden = CompressedParams(launch_s=-2e-4)
    assert prefill_form(hidden, SHEET, **CSA)(SCALARS, 1, 1, 1, 1) == 0.0


def test_a_device_without_such_kernels_says_which_are_missing():
    with pytest.raises(ValueError, match="needs a mixture of experts and attention to compressed tokens"):
        _ = deploy(
            model="deepseek-v4-flash", hardware="tpu-v6e", precision="bf16", parallel={"tensor": 8},
            cost=Calibrated.for_stack("vllm"),
        ).cost  # fmt: skip


def test_steps_of_more_context_take_longer():
    cost = Calibrated.for_stack("sglang")(load_model("deepseek-v4-flash"), H200, ParallelConfig(tensor=8))
    times = [cost.iteration_s(Totals(16, 0, 0, 0, 0, 16, 16 * kv, 16)) for kv in (100, 2000, 50_000, 500_000)]
    assert times == sorted(times)


@pytest.mark.parametrize("model", ["deepseek-v4-flash", "minimax-m3"])
@pytest.mark.parametrize("past", [0, 1000, 100_000])
def test_work_counts_the_keys_that_queries_attend_to_and_score(model, past):
    """Of 64 prompt tokens and of three decodes, against the sum over queries; as numbers and as arrays."""
    cost = Roofline(load_model(model), H200)
    shapes = [shape for shape in cost.work_by_stage[0].attention if shape.kind == "compressed"]
    full = [shape for shape in cost.work_by_stage[0].attention if shape.kind != "compressed"]

    def keys_of(shape, context):
        if not shape.compress:
            return min(context, shape.near)
        most = shape.chosen * shape.compress if shape.chosen else context
        return min(context, shape.near) + min(context, most) / shape.compress

    def flops_of(contexts):
        own = sum(4 * shape.layers * shape.n_heads * shape.qk_dim * sum(contexts) for shape in full)
        for shape in shapes:
            one = 4 * shape.n_heads * shape.qk_dim
            scored = shape.index_flops / shape.compress if shape.compress else 0
            own += shape.layers * sum(one * keys_of(shape, c) + scored * c for c in contexts)
        return own

    contexts = [past + i + 1 for i in range(64)]
    prompt = Totals(64, 64, 1, sum(contexts), past + 64, 0, 0, 0)
    bare = cost.work(Totals(64, 64, 1, 0, 0, 0, 0, 0))
    assert cost.work(prompt).flops - bare.flops == pytest.approx(flops_of(contexts), rel=1e-3)
    context = past + 64
    decodes = Totals(3, 0, 0, 0, 0, 3, 3 * context, 3)
    found, bare = cost.work(decodes), cost.work(decodes._replace(decode_kv_tokens=0))
    assert found.flops - bare.flops == pytest.approx(flops_of([context] * 3))
    moved = sum(shape.layers * shape.kv_bytes * 3 * context for shape in full)
    for shape in shapes:
        scored = shape.kv_bytes - shape.entry_bytes / shape.compress if shape.compress else 0
        moved += 3 * shape.layers * (keys_of(shape, context) * shape.entry_bytes + scored * context)
    assert found.hbm_bytes - bare.hbm_bytes == pytest.approx(moved)
    for totals in (prompt, decodes):
        arrays = cost.work(Totals(*(np.array([each]) for each in totals)))
        assert [float(np.asarray(each).ravel()[0]) for each in arrays] == [float(each) for each in cost.work(totals)]
