"""Models whose layers are not alike: the work of an iteration by explicit sums, and the cache that sequences hold."""

from __future__ import annotations

import dataclasses

import pytest

from hwmodels.cache import StageCache, groups_of, held_bytes, mean_block_bytes, paged
from hwmodels.calibrated import Calibrated
from hwmodels.deployment import deploy
from hwmodels.device import load_device
from hwmodels.gpu import GpuKernels
from hwmodels.kernels.linear_attention import linear_decode_s, linear_prefill_s
from hwmodels.kernels.ops import SCALARS
from hwmodels.memory import LargestBatch, memory_plan, stack_memory
from hwmodels.model import load_model
from hwmodels.parallel import ParallelConfig
from hwmodels.reach import Chunk
from hwmodels.roofline import Roofline
from hwmodels.totals import Totals
from hwmodels.work import stage_work

H200 = load_device("h200")


def test_work_of_gated_delta_nets_by_an_explicit_sum():
    """Qwen3-Next-80B-A3B: 36 layers with a state, 12 that attend; 512 experts, 10 and a shared one a token."""
    h, rows, prompt, past, context, decodes = 2048, 100 + 7, 100, 50, 900, 7
    cost = Roofline(load_model("qwen3-next-80b-a3b"), H200)
    pairs = sum(past + i + 1 for i in range(prompt))
    found = cost.work(Totals(rows, prompt, 1, pairs, past + prompt, decodes, decodes * context, decodes + 1))
    keys, values, cells = 16 * 128, 32 * 128, 32 * 128 * 128
    # Queries, keys, values and gate; write strength and decay of each head; the way out; the convolution; the delta rule.
    linear = 2 * h * (2 * keys + 2 * values) + 2 * h * 64 + 2 * values * h + 2 * 4 * (2 * keys + values) + 6 * cells
    # Queries with a gate as wide; two heads of keys and of values; the way out.
    softmax = 2 * h * (2 * 16 * 256 + 2 * 2 * 256) + 2 * 16 * 256 * h
    mlp = 2 * h * 512 + (10 + 1) * 6 * h * 512
    attend = 12 * 4 * 16 * 256 * (pairs + decodes * context)
    logits = 2 * h * 151_936 * (decodes + 1)
    assert found.flops == pytest.approx(rows * (36 * linear + 12 * softmax + 48 * mlp) + attend + logits, rel=1e-12)

    more = cost.work(Totals(rows, prompt, 1, pairs, past + prompt, decodes, decodes * context + 1000, decodes + 1))
    assert more.hbm_bytes - found.hbm_bytes == 1000 * 12 * 2 * 2 * 256 * 2
    # One decode more, with no context: its state is read and written, and the last three inputs of each convolution.
    other = cost.work(Totals(rows, prompt, 1, pairs, past + prompt, decodes + 1, decodes * context, decodes + 1))
    state = 36 * (cells * 4 + 3 * (2 * keys + values) * 2)
    assert other.hbm_bytes - found.hbm_bytes == pytest.approx(2 * state, rel=1e-9)


def test_a_state_costs_the_same_at_any_context():
    cost = Roofline(load_model("qwen3.5-397b-a17b"), load_device("b200"), ParallelConfig(tensor=8))
    recurrence = stage_work(load_model("qwen3.5-397b-a17b"), ParallelConfig(tensor=8), 0).recurrence
    assert recurrence is not None
    assert recurrence.held_bytes == 45 * (8 * 128 * 128 * 4 + 3 * (2 * 2 + 8) * 128 * 2)
    short, long = (cost.work(Totals(1, 0, 0, 0, 0, 1, kv, 1)).hbm_bytes for kv in (10, 100_010))
    assert long - short == 100_000 * 15 * 2 * 256 * 2 * 8  # each device holds one of the two heads, replicated


def test_work_of_windows_by_an_explicit_sum():
    """Gemma-3-4B: 29 of 34 layers see 1,024 tokens; 8 heads of 256, 4 of keys and values, a vocabulary of 262,208."""
    h, contexts = 2560, [300, 5000]
    window = sum(min(c, 1024) for c in contexts)
    found = Roofline(load_model("gemma-3-4b"), H200).work(Totals(2, 0, 0, 0, 0, 2, sum(contexts), 2, 0, window))
    matrices = 2 * h * (8 * 256 + 2 * 4 * 256) + 2 * 8 * 256 * h + 3 * 2 * h * 10_240
    attend = 4 * 8 * 256 * (5 * sum(contexts) + 29 * window)
    assert found.flops == 2 * (34 * matrices + 2 * h * 262_208) + attend
    cache = 2 * 4 * 256 * 2 * (5 * sum(contexts) + 29 * window)
    assert found.hbm_bytes == pytest.approx(34 * matrices + 2 * h * 262_208 + cache, rel=1e-12)


def test_work_of_llama_4_by_an_explicit_sum():
    """Maverick: 36 of 48 layers see their chunk; every other layer has one of 128 experts and a shared one, the rest 16,384."""
    spec = load_model("llama-4-maverick")
    cost = Roofline(spec, load_device("b200"))
    assert type(cost.window_tokens) is Chunk
    assert cost.window_tokens == 8192
    h, contexts = 5120, [9000, 100]
    chunks = (9000 - 8192) + 100
    found = cost.work(Totals(2, 0, 0, 0, 0, 2, sum(contexts), 2, 0, chunks))
    attention = 2 * h * (40 * 128 + 2 * 8 * 128) + 2 * 40 * 128 * h
    mlp = 24 * 6 * h * 16_384 + 24 * (2 * 6 * h * 8192 + 2 * h * 128)
    attend = 4 * 40 * 128 * (12 * sum(contexts) + 36 * chunks)
    assert found.flops == pytest.approx(2 * (48 * attention + mlp + 2 * h * 202_048) + attend, rel=1e-12)


def test_layers_are_grouped_as_vllm_groups_them():
    """Against vLLM 0.32.0's `_get_kv_cache_groups_uniform_page_size` on the same layers."""
    sizes = {
        "gpt-oss-20b": [12, 12],
        "gemma-3-27b": [9, 9, 9, 9, 8, 8, 10],
        "gemma-3-4b": [5, 5, 5, 5, 5, 4, 5],
        "llama-4-scout": [12, 12, 12, 12],
        "qwen3.5-397b-a17b": [15, 15, 15, 15],
        "llama-3.1-8b": [32],
    }
    for name, expected in sizes.items():
        groups = groups_of(load_model(name).layer_attention)
        assert [len(group.layers) for group in groups] == expected
        assert sorted(i for group in groups for i in group.layers) == list(range(sum(expected)))
    # Nearly as many of the one as of the other: one group each, the smaller padded.
    assert [len(g.layers) for g in groups_of((*("window", "full") * 12, "full"))] == [12, 13]


# Blocks of 16 tokens that vLLM 0.32.0's managers of a window and of chunks of 100 tokens hold while a token is computed behind
# so many others.
WINDOW = {110: 7, 114: 8, 115: 7, 127: 7, 128: 8, 143: 7, 175: 7, 207: 7, 208: 8, 300: 7}
CHUNKS = {110: 1, 114: 2, 127: 2, 128: 3, 150: 4, 199: 7, 200: 1, 207: 1, 208: 2, 300: 1}


@pytest.mark.parametrize(("kind", "held"), [("window", WINDOW), ("chunked", CHUNKS)])
def test_a_sequence_gives_back_what_no_token_sees_any_more(kind, held):
    cache = StageCache(kinds=(kind,), layers=range(1), token_bytes=10.0, state_bytes=0.0, window_tokens=100)
    assert {context: paged(cache, 16).blocks(context) for context in held} == held


def test_pages_of_attention_grow_until_a_state_fits():
    cache = deploy(model="qwen3.5-397b-a17b", hardware="h200", parallel={"tensor": 8}).stage_caches()[0]
    # A state takes 533,504 bytes, a token 1,024: 521 tokens, in whole sixteens.
    assert (cache.state_bytes, cache.token_bytes) == (8 * 128 * 128 * 4 + 3 * 12 * 128 * 2, 2 * 256 * 2)
    pages = paged(cache, 16)
    assert (pages.page_tokens, pages.block_bytes) == (528, 15 * 528 * 1024)
    assert [pages.blocks(context) for context in (1, 527, 528, 5000)] == [3 + 1, 3 + 1, 3 + 2, 3 + 10]


def test_what_layers_need_is_their_reach():
    kinds = ("full", "window", "chunked", "linear")
    cache = StageCache(kinds=kinds, layers=range(4), token_bytes=10.0, state_bytes=777.0, window_tokens=100)
    assert held_bytes(cache, 250) == 10 * (250 + 99 + 50) + 777
    assert held_bytes(cache, 40) == 10 * (40 + 40 + 40) + 777
    assert mean_block_bytes(cache, 16, 250, in_pages=False) == (10 * 399 + 777) / 16


def test_a_pool_holds_as_many_mean_sequences_as_the_stack():
    deployment = deploy(model="gpt-oss-20b", hardware="h200")
    settings = {"largest": LargestBatch(tokens=8192, sequences=1024)}
    found = memory_plan(deployment, stack_memory("vllm"), **settings, context_tokens=4000)
    page = 12 * 16 * 2 * 8 * 64 * 2
    # 4,001 tokens in the full layers, 127 and the next in the others, which begin within a block.
    held = 251 + 9
    sequences = found.stages[0].kv_bytes / page / held
    assert found.device_blocks * 16 / 4000 == pytest.approx(sequences, rel=1e-4)
    assert "12 keep a window of 128 tokens" in found.notes[0]
    assert "every sequence held 4,000" in found.notes[0]
    whole = memory_plan(deploy(model="llama-3.1-8b", hardware="h200"), stack_memory("vllm"), **settings)
    assert whole.notes == ()
    assert memory_plan(
        deploy(model="llama-3.1-8b", hardware="h200"), stack_memory("vllm"), **settings, context_tokens=9
    ).kv_blocks == (whole.kv_blocks)


def test_stages_of_a_pipeline_hold_their_own_layers_of_each_group():
    caches = deploy(model="qwen3-next-80b-a3b", hardware="h200", parallel={"pipeline": 5}).stage_caches()
    assert sum(len(cache.layers) for cache in caches) == 48
    # Ten layers of the first stage: two that attend, eight with a state, of each group at most three.
    assert paged(caches[0], 16).block_bytes == 3 * paged(caches[0], 16).page_tokens * caches[0].token_bytes
    assert len({paged(cache, 16).page_tokens for cache in caches}) == 1


def test_sparse_attention_keeps_every_token():
    assert deploy(model="glm-5", hardware="b200", parallel={"tensor": 8}).stage_caches()[0].kinds == ("full",) * 78


@pytest.mark.parametrize("device", ["h100-sxm", "h200", "b200"])
def test_a_convolution_that_was_timed_over_keys_alone_is_priced_over_all_channels(device):
    """TensorRT-LLM's, for a prompt of 32,768 tokens: twice the value heads are half as many channels more, as in vLLM's table."""
    profile = Calibrated.for_stack("trtllm").load(load_device(device))

    def prompt_s(software, value_heads):
        shape = {"key_heads": 16, "key_dim": 128, "value_heads": value_heads, "value_dim": 128, "conv_width": 4}
        params = profile.get("linear_prefill", [f"conv/{software}"])
        return linear_prefill_s(params, profile.datasheet, kernel="conv", rows=32768, chunks=1, **shape)

    for heads in (32, 64):
        assert prompt_s("trtllm", heads) == pytest.approx(prompt_s("vllm", heads), rel=0.35)
    assert prompt_s("trtllm", 64) > 1.3 * prompt_s("trtllm", 32)


def test_linear_attention_is_priced_by_the_kernels_of_the_stack():
    """36 layers of Qwen3-Next on four GPUs: a convolution and a delta rule each, of 4 key heads and 8 value heads."""
    cost = Calibrated.for_stack("vllm")
    found = deploy(model="qwen3-next-80b-a3b", hardware="h100-sxm", parallel={"tensor": 4}, cost=cost)
    assert not any("has not been measured" in note for note in found.notes)
    profile = found.profile
    shape = {"key_heads": 4, "key_dim": 128, "value_heads": 8, "value_dim": 128, "conv_width": 4}
    launched = (
        profile.get("linear_decode", ["conv/vllm"]).launch_s + profile.get("linear_decode", ["delta/vllm"]).launch_s
    )

    def alone(family, equation, **batch):
        return sum(
            equation(profile.get(family, [f"{kernel}/vllm"]), profile.datasheet, kernel=kernel, **shape, **batch)
            for kernel in ("conv", "delta")
        )

    stage = found.cost._stages[0]
    prefill, decode, _ = stage.attention[-1]
    hidden = 36 * launched * cost.stack.overheads.launch_overlap
    assert decode(SCALARS, 64, 64, 0) == pytest.approx(36 * alone("linear_decode", linear_decode_s, seqs=64) - hidden)
    # A round of speculation reads each state once and writes one for each token.
    assert decode(SCALARS, 64, 192, 0) == decode(SCALARS, 128, 128, 0)
    assert prefill(SCALARS, 8192, 4, 0, 0) > 36 * alone("linear_prefill", linear_prefill_s, rows=8192, chunks=4) * 0.98
    # Whatever the context is.
    assert decode(SCALARS, 64, 64, 10**6) == decode(SCALARS, 64, 64, 0)


def test_linear_attention_without_measured_kernels_says_so():
    cost = Calibrated.for_stack("vllm")
    bare = deploy(model="qwen3-next-80b-a3b", hardware="h100-sxm", parallel={"tensor": 4}, cost=cost)
    kernels = tuple(kernel for kernel in bare.profile.kernels if not kernel.family.startswith("linear"))
    profile = dataclasses.replace(bare.profile, kernels=kernels, lender=None)
    forms = GpuKernels(device=bare.device, profile=profile, stack=cost.stack, layers=48)
    recurrence = stage_work(bare.model, ParallelConfig(tensor=4), 0).recurrence
    _, decode = forms.recurrence_forms(recurrence)
    memory_s = recurrence.bytes_per_sequence / bare.device.hbm_bytes_per_s
    assert decode(SCALARS, 64, 64, 0) == pytest.approx(64 * memory_s / 0.8)
    assert not any("measured" in note for note in deploy(model="qwen3-next-80b-a3b", hardware="b200").notes)
