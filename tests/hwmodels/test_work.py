"""FLOPs and bytes by hand, from shapes written out here."""

import numpy as np
import pytest

from hwmodels.calibrated import Calibrated
from hwmodels.device import load_device
from hwmodels.model import load_model, model_catalogue
from hwmodels.operations import expected_active_experts
from hwmodels.parallel import ParallelConfig
from hwmodels.roofline import Roofline
from hwmodels.slowed import slowed
from hwmodels.totals import Totals
from hwmodels.work import stage_work


def linears(name, **degrees):
    work = stage_work(load_model(name), ParallelConfig(**degrees), 0)
    return {op.name: (op.n, op.k, op.layers) for op in work.linears}


def test_llama_8b_matrices():
    assert linears("llama-3.1-8b") == {
        "qkv": (4096 + 2 * 1024, 4096, 32),
        "attention_out": (4096, 4096, 32),
        "mlp_gate_up": (2 * 14336, 4096, 32),
        "mlp_down": (4096, 14336, 32),
        "lm_head": (128256, 4096, 1),
    }


def test_tensor_parallel_shards_columns_then_rows():
    assert linears("llama-3.1-8b", tensor=8) == {
        "qkv": (512 + 2 * 128, 4096, 32),
        "attention_out": (4096, 512, 32),
        "mlp_gate_up": (2 * 1792, 4096, 32),
        "mlp_down": (4096, 1792, 32),
        "lm_head": (16032, 4096, 1),
    }


def test_kv_heads_are_replicated_beyond_their_number():
    # Four KV heads on eight devices: each holds one whole head.
    spec = load_model("qwen3-235b-a22b")
    work = stage_work(spec, ParallelConfig(tensor=8), 0)
    assert work.linears[0].n == 8 * 128 + 2 * 128
    assert work.attention[0].kv_bytes == 2 * 128 * 2


def test_deepseek_matrices_and_attention():
    found = linears("deepseek-v3", tensor=8)
    assert found["qkv_down"] == (1536 + 512 + 64, 7168, 61)
    assert found["q_up"] == (16 * 192, 1536, 61)
    assert found["kv_up"] == (16 * 256, 512, 61)
    assert found["attention_out"] == (7168, 16 * 128, 61)
    assert found["mlp_gate_up"] == (2 * 18432 // 8, 7168, 3)
    assert found["shared_down"] == (7168, 2048 // 8, 58)
    (shape,) = stage_work(load_model("deepseek-v3"), ParallelConfig(tensor=8), 0).attention
    # The latent is on every device; decode multiplies 512 + 64 and 512 wide, prefill 192 and 128.
    assert shape.kv_bytes == 576 * 2
    assert shape.decode_flops_per_pair == 2 * 16 * (576 + 512)
    assert shape.prefill_flops_per_pair == 2 * 16 * (192 + 128)
    assert shape.expand_flops == 2 * 512 * 16 * 256


def test_experts_by_hand():
    spec = load_model("mixtral-8x7b")
    experts = stage_work(spec, ParallelConfig(tensor=2), 0).experts
    assert experts is not None
    assert (experts.ffn, experts.layers) == (7168, 32)
    assert experts.expert_bytes == 3 * 4096 * 7168 * 2
    assert experts.flops(10) == 10 * 2 * 3 * 2 * 4096 * 7168 * 32
    assert experts.read_bytes(1) == pytest.approx(2 * experts.expert_bytes * 32)


def test_expected_active_experts():
    assert expected_active_experts(1, 8, 2) == pytest.approx(2.0)
    # Two tokens that choose 2 of 8 each: 8 (1 - 0.75^2).
    assert expected_active_experts(2, 8, 2) == pytest.approx(3.5)
    assert expected_active_experts(10_000, 8, 2) == pytest.approx(8.0)


def test_expert_parallel_splits_experts_and_keeps_the_total():
    spec = load_model("mixtral-8x7b")
    by_tensor = stage_work(spec, ParallelConfig(tensor=4), 0).experts
    by_expert = stage_work(spec, ParallelConfig(tensor=4, expert=4), 0).experts
    assert by_tensor is not None
    assert by_expert is not None
    assert by_expert.ffn == 4 * by_tensor.ffn
    assert by_expert.flops(64) == by_tensor.flops(64)
    assert by_expert.read_bytes(64) == pytest.approx(by_tensor.read_bytes(64))


def test_one_device_holds_exactly_the_model():
    models = {name: load_model(name) for name in model_catalogue()}
    held = {name: stage_work(spec, ParallelConfig(), 0).resident_bytes for name, spec in models.items()}
    assert held == pytest.approx({name: spec.weight_bytes() for name, spec in models.items()}, rel=1e-12)


@pytest.mark.parametrize("name", ["llama-3.1-70b", "deepseek-r1", "gpt-oss-120b", "qwen3.5-397b-a17b"])
def test_shards_add_up_to_the_model_but_for_replicated_parts(name):
    spec = load_model(name)
    parallel = ParallelConfig(tensor=4, pipeline=2)
    total = 4 * sum(stage_work(spec, parallel, s).resident_bytes for s in range(2))
    assert 1.0 <= total / spec.weight_bytes() < 1.01


def test_flops_of_a_mixed_iteration_by_hand():
    cost = Roofline(load_model("llama-3.1-8b"), load_device("h100-sxm"))
    per_row = 2 * 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336)
    pairs = 300 * 100 + 300 * 301 // 2
    work = cost.work(Totals(310, 300, 1, pairs, 400, 10, 5000, 11))
    attention = 4 * 32 * 128 * 32 * (pairs + 5000)
    assert work.flops == 310 * per_row + 11 * 2 * 4096 * 128256 + attention
    assert work.hbm_bytes == per_row + 4096 * 128256 * 2 + (400 + 5000) * 131072


def test_verification_reads_the_cache_once_and_multiplies_it_for_each_query():
    cost = Roofline(load_model("llama-3.1-8b"), load_device("h100-sxm"))
    one = cost.work(Totals(8, 0, 0, 0, 0, 8, 8000, 8))
    five = cost.work(Totals(40, 0, 0, 0, 0, 8, 8000, 40))
    assert five.flops == 5 * one.flops
    assert five.hbm_bytes == one.hbm_bytes


def test_decodes_fill_tiles_of_64_rows_of_queries():
    """Llama-3.1-8B has 4 query heads a KV head: one token of them fills 4 rows, 16 tokens fill the tile."""
    cost = Roofline(load_model("llama-3.1-8b"), load_device("h100-sxm"), ParallelConfig(tensor=2))
    pair = 4 * 32 * 128 * 32
    one = cost.work(Totals(8, 0, 0, 0, 0, 8, 8000, 8))
    five = cost.work(Totals(40, 0, 0, 0, 0, 8, 8000, 40))
    many = cost.work(Totals(160, 0, 0, 0, 0, 8, 8000, 160))
    assert [each.tile_flops for each in (one, five, many)] == [15 * 8000 * pair, 11 * 8000 * pair, 0]
    prompt = cost.work(Totals(300, 300, 1, 300 * 301 // 2, 300, 0, 0, 1))
    assert prompt.tile_flops == 0


def test_latent_decodes_multiply_all_heads_of_a_device_together():
    decode = Totals(8, 0, 0, 0, 0, 8, 8000, 8)
    spec, device = load_model("deepseek-v3"), load_device("h200")
    one, eight = (Roofline(spec, device, ParallelConfig(tensor=tensor)).work(decode).tile_flops for tensor in (1, 8))
    assert one == 0  # 128 heads
    assert eight == 3 * 8000 * 61 * 2 * 128 * (2 * 512 + 64)  # 16 of 64 rows


def test_windowed_decodes_fill_tiles_of_the_window():
    cost = Roofline(load_model("gpt-oss-120b"), load_device("h100-sxm"))
    base = Totals(4, 0, 0, 0, 0, 4, 4000, 4, 0, 512)
    wider = base._replace(decode_kv_window=612)
    assert cost.work(wider).tile_flops - cost.work(base).tile_flops == 7 * 100 * 18 * 4 * 64 * 64


def test_encoder_attends_to_every_pair():
    cost = Roofline(load_model("bert-base"), load_device("v100-16"))
    work = cost.work(Totals(128, 128, 1, 128 * 129 // 2, 128, 0, 0, 0))
    assert work.flops == 128 * 2 * 12 * (4 * 768 * 768 + 8 * 768 * 768) + 12 * 4 * 768 * 128 * 128


def test_windowed_layers_count_the_window_totals():
    cost = Roofline(load_model("gpt-oss-120b"), load_device("h100-sxm"))
    base = Totals(4, 0, 0, 0, 0, 4, 4000, 4, 0, 512)
    more = base._replace(decode_kv_tokens=5000)
    wider = base._replace(decode_kv_window=612)
    layer_bytes = 2 * 8 * 64 * 2
    assert cost.work(more).hbm_bytes - cost.work(base).hbm_bytes == 18 * layer_bytes * 1000
    assert cost.work(wider).hbm_bytes - cost.work(base).hbm_bytes == 18 * layer_bytes * 100
    assert cost.window_tokens == 128


def test_work_does_not_depend_on_the_split():
    spec, device = load_model("llama-3.1-70b"), load_device("h100-sxm")
    totals = Totals(600, 500, 2, 100_000, 700, 100, 90_000, 101)
    whole = Roofline(spec, device).work(totals)
    split = Roofline(spec, device, ParallelConfig(tensor=4, pipeline=2)).work(totals)
    assert split.flops == pytest.approx(whole.flops, rel=1e-12)
    assert split.hbm_bytes == pytest.approx(whole.hbm_bytes, rel=1e-12)


def test_what_each_device_repeats_counts_on_each():
    """GLM-5 on eight: down-projections, router, indexer projections and scores, over 64 decodes behind 3,000 tokens."""
    rows, context = 64, 3001
    decode = Totals(rows, 0, 0, 0, 0, rows, rows * context, rows, 0, rows * 2048)
    one, eight = (
        Roofline(load_model("glm-5"), load_device("b200"), ParallelConfig(tensor=tensor)).work(decode).flops
        for tensor in (1, 8)
    )
    down = 78 * 6144 * (2048 + 512 + 64)
    router = 75 * 6144 * 256
    indexer = 78 * (2048 * 32 * 128 + 6144 * (128 + 32))
    scores = 78 * rows * 2 * 32 * 128 * context
    assert eight - one == pytest.approx(7 * (2 * rows * (down + router + indexer) + scores), rel=1e-9)
    assert eight / one == pytest.approx(1.405, rel=0.01)


def test_work_of_arrays_equals_work_of_scalars():
    cost = Roofline(load_model("gpt-oss-20b"), load_device("h200"), ParallelConfig(tensor=2))
    rng = np.random.default_rng(5)
    columns = rng.integers(0, 4000, (10, 50))
    columns[0] = np.maximum(columns[0], columns[1])
    arrays = cost.work(Totals(*columns))
    for i in range(50):
        one = cost.work(Totals(*(int(c[i]) for c in columns)))
        assert tuple(one) == (arrays.flops[i], arrays.hbm_bytes[i], arrays.tile_flops[i], arrays.still_s[i])


def test_nothing_is_multiplied_while_kernels_stream_or_send():
    """The elementwise kernels and all-reduces of the layers, of the even share of a group's rows, and the exchange with experts."""
    spec, device, decode = load_model("qwen3-30b-a3b"), load_device("h100-sxm"), Totals(64, 0, 0, 0, 0, 64, 64_000, 64)
    for parallel in (ParallelConfig(), ParallelConfig(tensor=4), ParallelConfig(data=2, expert=2)):
        cost = Calibrated.for_stack("vllm")(spec, device, parallel)
        (work,), kernels, own = cost.work_by_stage, cost.kernels, 64 / parallel.data
        still_s = sum(
            op.layers * kernels.elementwise_s(own * op.bytes_per_row, op.launches, op.op) for op in work.elementwise
        )
        for op in work.collectives:
            if not op.of_logits:
                still_s += op.layers * kernels.collective_s(op.kind, own * op.bytes_per_row, op.n)
        if work.exchange is not None:
            still_s += work.exchange.layers * kernels.exchange_s(64, work.exchange)
        assert cost.work(decode).still_s == pytest.approx(float(still_s), rel=1e-9)


def test_each_stage_multiplies_nothing_for_its_own_part_and_a_slow_machine_for_longer():
    spec, device, decode = load_model("llama-3.1-8b"), load_device("h100-sxm"), Totals(64, 0, 0, 0, 0, 64, 64_000, 64)
    made = Calibrated.for_stack("vllm")
    whole, halves = (made(spec, device, ParallelConfig(pipeline=stages)) for stages in (1, 2))
    assert halves.work(decode).still_s == pytest.approx(whole.work(decode).still_s / 2, rel=0.05)
    slow = slowed(whole, 1.5)
    assert slow.work(decode) == whole.work(decode)._replace(still_s=1.5 * whole.work(decode).still_s)


def test_remainder_layers_go_to_the_first_stages():
    assert [len(r) for r in ParallelConfig(pipeline=4).stage_layers(61)] == [16, 15, 15, 15]
    costs = Roofline(load_model("deepseek-r1"), load_device("h200"), ParallelConfig(tensor=4, pipeline=4)).work_by_stage
    assert [w.experts.layers for w in costs if w.experts] == [13, 15, 15, 15]


@pytest.mark.parametrize(
    ("name", "degrees", "message"),
    [
        ("llama-3.1-8b", {"tensor": 3}, "parallel.tensor 3 does not divide the 32 attention heads"),
        ("llama-3.1-8b", {"pipeline": 33}, "parallel.pipeline 33 exceeds the 32 layers"),
        ("llama-3.1-8b", {"data": 2}, "parallel.data needs a mixture of experts"),
        ("mixtral-8x7b", {"data": 16, "expert": 16}, "parallel.expert 16 does not divide the 8 experts"),
        ("deepseek-v3", {"tensor": 128, "data": 32}, "an expert of deepseek-v3 is 2048 wide"),
        ("yi-34b", {"tensor": 7}, "key-value heads"),
    ],
)
def test_impossible_splits_are_refused(name, degrees, message):
    with pytest.raises(ValueError, match=message):
        stage_work(load_model(name), ParallelConfig(**degrees), 0)


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"tensor": 0}, "parallel.tensor must be an integer of at least 1, got 0"),
        ({"pipeline": 1.5}, "parallel.pipeline must be an integer"),
        ({"tensor": 2, "expert": 4}, "parallel.expert 4 must divide"),
    ],
)
def test_degrees_are_positive_integers(degrees, message):
    with pytest.raises(ValueError, match=message):
        ParallelConfig(**degrees)


@pytest.mark.parametrize(
    ("model", "over_heads"),
    [
        ("minimax-m2.5", True),
        ("olmo-2-7b", True),
        ("qwen3-8b", False),
        ("command-r-plus-104b", False),
        ("llama-3.1-8b", False),
    ],
)
def test_a_norm_over_all_heads_adds_a_sum_of_squares_over_the_devices_that_split_them(model, over_heads):
    spec = load_model(model)
    for tensor in (1, 4):
        work = stage_work(spec, ParallelConfig(tensor=tensor), 0)
        sums = [op for op in work.collectives if op.name == "query_key_norm"]
        launched = [op for op in work.elementwise if op.name == "query_key_norm"]
        assert [(op.kind, op.n, op.layers) for op in sums] == [("all_reduce", tensor, spec.n_layers)] * (
            over_heads and tensor > 1
        )
        assert len(launched) == over_heads
