"""MiniMax-M3: attention to chosen blocks of tokens, by explicit sums, and what prices it."""

from __future__ import annotations

import pytest

from hwmodels.cache import keeps_every_token
from hwmodels.calibrated import Calibrated
from hwmodels.deployment import deploy
from hwmodels.device import load_device
from hwmodels.kernels.compressed import CompressedParams, compressed_decode_s, compressed_prefill_s
from hwmodels.kernels.ops import SCALARS
from hwmodels.model import load_model, spec_from_config
from hwmodels.parallel import ParallelConfig
from hwmodels.profiles import datasheet_of
from hwmodels.roofline import Roofline
from hwmodels.work import stage_work

SHEET = datasheet_of(load_device("h200"))
SMALL = {
    "model_type": "minimax_m3", "hidden_size": 512, "num_hidden_layers": 3, "num_attention_heads": 16, "num_key_value_heads": 4,
    "head_dim": 64, "intermediate_size": 128, "dense_intermediate_size": 1024, "shared_intermediate_size": 256,
    "num_local_experts": 8, "num_experts_per_tok": 2, "moe_layer_freq": [0, 1, 1], "vocab_size": 1000, "use_qk_norm": True,
    "qk_norm_type": "per_head",
    "sparse_attention_config": {
        "sparse_attention_freq": [0, 1, 1], "sparse_num_index_heads": 4, "sparse_index_dim": 32, "sparse_topk_blocks": 4,
        "sparse_block_size": 32,
    },
}  # fmt: skip
LAYER = {
    "heads": 8, "head_dim": 128, "hidden": 6144, "compress": 1.0, "window": 0.0, "chosen": 2048.0, "index_flops": 2.0 * 4 * 128,
}  # fmt: skip


def spec_of(**changes):
    return spec_from_config({**SMALL, **changes}, name="model", where="config.json")


def test_parameters_by_layer():
    h = 512
    attention = h * (16 + 2 * 4) * 64 + 16 * 64 * h + 2 * 64
    branch = h * (4 + 1) * 32 + 2 * 32
    experts = (8 * 128 + 256) * 3 * h + 8 * (h + 1)
    layers = 3 * attention + 2 * branch + 3 * h * 1024 + 2 * experts + 3 * 2 * h
    assert spec_of().params == layers + h + 2 * 1000 * h


def test_every_token_is_cached_with_a_key_of_the_branch():
    spec = spec_of()
    assert spec.layer_attention == ("full", "blocks", "blocks")
    assert keeps_every_token(spec)
    assert spec.kv_bytes_per_token() == 2 * (3 * 2 * 4 * 64 + 2 * 32)


def test_lists_that_are_too_short_are_refused():
    with pytest.raises(ValueError, match="moe_layer_freq names 2 layers"):
        spec_of(moe_layer_freq=[0, 1])


def test_the_branch_is_on_each_device_and_the_heads_are_split():
    work = stage_work(spec_of(), ParallelConfig(tensor=2), 0)
    assert [(op.n, op.k, op.layers) for op in work.linears if op.name == "index_qk"] == [(5 * 32, 512, 2)]
    full, blocks = work.attention
    assert (full.kind, full.layers, full.n_heads) == ("gqa", 1, 8)
    assert (blocks.kind, blocks.layers, blocks.n_heads, blocks.chosen) == ("compressed", 2, 8, 128)
    assert blocks.kv_bytes == 2 * (2 * 2 * 64 + 32)


def test_one_tile_of_queries_comes_to_all_keys_in_turn():
    """However few queries there are, their scores take a key after the other; many queries hide it."""
    params = CompressedParams(walk_s=2e-8, choose_s=0.0)
    few, long = (
        compressed_prefill_s(params, SHEET, rows=1, chunks=1, pairs=kv, kv_tokens=kv, **LAYER)
        for kv in (100_000, 200_000)
    )
    assert long - few == pytest.approx(100_000 * 2e-8)
    alone = compressed_prefill_s(
        CompressedParams(choose_s=0.0), SHEET, rows=65536, chunks=1, pairs=65536e5, kv_tokens=1e5, **LAYER
    )
    assert compressed_prefill_s(params, SHEET, rows=65536, chunks=1, pairs=65536e5, kv_tokens=1e5, **LAYER) == alone


def test_a_query_reads_no_more_than_its_blocks_and_the_keys_of_the_branch():
    params = CompressedParams(launch_s=1e-6, row_s=0.0, head_s=0.0, wide_s=0.0, choose_s=0.0)
    shape = {**LAYER, "token_bytes": 256.0, "entry_bytes": 512.0}
    short, long = (compressed_decode_s(params, SHEET, seqs=1, kv_tokens=kv, **shape) for kv in (4096, 8192))
    scored = LAYER["index_flops"] / (SHEET.flops_per_s("fp8") * params.score_efficiency)
    read = 256.0 / (SHEET.hbm_bytes_per_s * params.bandwidth_efficiency)
    assert long - short == pytest.approx(4096 * (scored + read))


def test_layers_are_priced_by_the_module_of_their_cache():
    cost = Calibrated.for_stack("vllm")
    for kv_precision, variant, number_bytes in (("bf16", "msa/vllm", 2.0), ("fp8", "msa-fp8/vllm", 1.0)):
        found = deploy(
            model="minimax-m3", hardware="b200", parallel={"tensor": 8}, cost=cost, kv_precision=kv_precision
        )
        params = found.profile.get("compressed_decode", [variant])
        stage = found.cost._stages[0]
        at = [shape.kind for shape in stage.work.attention].index("compressed")
        shape = {
            **LAYER,
            "token_bytes": 128 * number_bytes,
            "entry_bytes": 256 * number_bytes,
            "multiplied_heads": 16.0,
        }
        one_s = compressed_decode_s(params, found.profile.datasheet, seqs=32, kv_tokens=32 * 4000, **shape)
        assert stage.attention[at][1](SCALARS, 32, 32, 32 * 4000) == pytest.approx(57 * one_s)


def test_a_datasheet_bounds_what_a_decode_reads():
    spec = load_model("minimax-m3")
    shape = stage_work(spec, ParallelConfig(tensor=8), 0).attention[1]
    seconds = Roofline(spec, load_device("h200")).kernels.decode_form(shape)(SCALARS, 1, 1, 100_000)
    moved = 57 * (100_000 * 128 * 2 + 2048 * 2 * 128 * 2)
    assert seconds == pytest.approx(moved / SHEET.hbm_bytes_per_s)
