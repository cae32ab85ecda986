"""How serving stacks divide memory: literals of the formulas, and the blocks that published logs report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hwmodels import memory_logs
from hwmodels.cache import keeps_every_token
from hwmodels.deployment import deploy
from hwmodels.device import load_device
from hwmodels.memory import (
    GIB,
    LargestBatch,
    cache_text,
    engine_defaults,
    forward_bytes,
    memory_plan,
    parts_text,
    sampler_bytes,
    share_machine,
    stack_memories,
    stack_memory,
    visible_bytes,
    workspace_bytes,
)
from hwmodels.model import load_model, model_catalogue
from hwmodels.parallel import ParallelConfig

H100 = load_device("h100-sxm")
LLAMA = load_model("llama-3.1-8b")
SERVER = {"largest": LargestBatch(tokens=8192, sequences=1024)}


def plan(model="llama-3.1-8b", *, stack="vllm", release=None, hardware="h100-sxm", parallel=None, **settings):
    deployment = deploy(model=model, hardware=hardware, parallel=parallel)
    return memory_plan(deployment, stack_memory(stack, release), **{**SERVER, **settings})


def test_the_samplers_peak_is_every_form_of_the_logits_at_once():
    rules = stack_memory("vllm", "0.19")
    # 16-bit logits, fp32 logits, probabilities and noise; a row for each of 132 SMs; hidden tensors.
    logits = 1024 * 128_256 * (2 + 4 + 4 + 4) + 132 * 128_256 * 4
    assert sampler_bytes(LLAMA, H100, rules, 8192, 1024) == pytest.approx(logits + 1.876 * 8192 * 4096 * 2)
    assert sampler_bytes(LLAMA, H100, rules, 64, 1024) == pytest.approx(
        64 * 128_256 * 14 + 64 * 128_256 * 4 + 1.876 * 64 * 4096 * 2
    )


def test_the_forward_pass_holds_the_mlp_and_a_few_hidden_tensors():
    alone, staged = ParallelConfig(), ParallelConfig(pipeline=2)
    assert forward_bytes(LLAMA, alone, 8192) == 8192 * 2 * (3 * 14_336 + 4 * 4096)
    assert forward_bytes(LLAMA, staged, 8192) == 8192 * 2 * (3 * 14_336 + 6 * 4096)
    assert forward_bytes(LLAMA, ParallelConfig(tensor=4), 8192) == 8192 * 2 * (3 * 14_336 // 4 + 4 * 4096)


def test_fused_experts_keep_a_row_for_each_token_and_expert_and_four_bit_ones_none():
    qwen = load_model("qwen3-30b-a3b")
    assert workspace_bytes(qwen, ParallelConfig(), 8192) == 8192 * 8 * (2048 + 768) * 2
    assert workspace_bytes(load_model("gpt-oss-20b"), ParallelConfig(), 8192) == 0


def test_the_parts_and_the_cache_make_up_the_share():
    found = plan(release="0.32", share=0.9)
    (stage,) = found.stages
    assert stage.device_bytes == pytest.approx(79.19 * GIB)
    assert stage.budget_bytes == 0.9 * stage.device_bytes
    assert stage.graph_bytes == pytest.approx(1.86 * GIB / 2, rel=1e-6)
    assert stage.context_bytes == 0.25 * GIB
    assert stage.communicator_bytes == 0
    parts = stage.weight_bytes + stage.activation_bytes + stage.graph_bytes + stage.context_bytes
    assert stage.kv_bytes == pytest.approx(stage.budget_bytes - parts)
    assert found.device_blocks == int(stage.kv_bytes // (16 * 131_072))
    assert found.kv_blocks == found.device_blocks - 1


def test_graphs_come_out_of_the_share_since_their_release():
    newer, older = plan(share=0.9), plan(release="0.19", share=0.9)
    assert newer.stages[0].kv_bytes == pytest.approx(older.stages[0].kv_bytes - newer.stages[0].graph_bytes)
    assert older.stages[0].graph_bytes == 0


def test_a_tpu_captures_no_graphs():
    assert plan(hardware="tpu-v6e").stages[0].graph_bytes == 0
    assert plan(hardware="mi300x").stages[0].graph_bytes > 0


def test_each_stack_takes_its_own_share():
    visible, weights = visible_bytes(H100), plan().stages[0].weight_bytes
    vllm, sglang, trtllm = (plan(stack=stack) for stack in ("vllm", "sglang", "trtllm"))
    assert vllm.share == 0.92
    assert (vllm.block_tokens, sglang.block_tokens, trtllm.block_tokens) == (16, 1, 32)
    # SGLang: weights and cache of what is free before loading, the rest is for activations and graphs.
    free = visible - sglang.stages[0].context_bytes
    assert sglang.stages[0].kv_bytes == pytest.approx(sglang.share * free - weights)
    # TensorRT-LLM: the cache alone, of what is free after loading.
    stage = trtllm.stages[0]
    left = visible - weights - stage.activation_bytes - stage.context_bytes
    assert (trtllm.share, stage.kv_bytes) == (0.9, pytest.approx(0.9 * left))
    assert stage.activation_bytes == 2 * 8192 * 4096 * 11


def test_sglang_reserves_by_device():
    # H100, MiB: 512 + 1.5 * 8192 + 1024 / 8 + 2 * 256 + 8 for each of 58 captured sizes of at most 8192.
    capacity = 79.19 * 1024
    sizes = 8 + 14 + 8 + 8 + 12 + 8
    reserved = 512 + 1.5 * 8192 + 128 + 512 + 8 * sizes
    assert stack_memory("sglang").default_share(H100) == round((capacity - reserved) / capacity, 3)


def test_the_fewest_blocks_of_any_stage_count():
    found = plan(parallel={"pipeline": 4}, share=0.9)
    assert len(found.stages) == 4
    assert found.device_blocks == min(stage.blocks for stage in found.stages)
    # The last stage alone runs the sampler.
    assert found.tightest is found.stages[-1]
    assert found.stages[-1].activation_bytes > found.stages[0].activation_bytes


def test_a_draft_takes_weights_and_cache_of_the_first_stage():
    target = deploy(model="llama-3.1-8b", hardware="h100-sxm")
    draft = deploy(model="llama-3.2-1b", hardware="h100-sxm")
    rules = stack_memory("vllm", "0.19")
    plain, both = (memory_plan(target, rules, **SERVER, draft=each) for each in (None, draft))
    left = plain.stages[0].kv_bytes - draft.weight_bytes_per_device
    assert both.stages[0].kv_bytes == pytest.approx(left)
    assert both.device_blocks == int(left // (16 * (131_072 + draft.kv_bytes_per_token_per_device)))


def test_models_that_take_turns_share_what_all_leave():
    one, other = plan("llama-3.1-8b"), plan("qwen3-8b")
    shared = share_machine((one, other))
    left = one.stages[0].budget_bytes - one.stages[0].used_bytes - other.stages[0].used_bytes
    assert [each.stages[0].kv_bytes for each in shared] == [pytest.approx(left / 2)] * 2


def test_a_stack_that_is_no_server_sets_nothing_aside():
    found = plan(stack="ideal")
    assert found.share == 0.9
    assert found.kv_blocks == found.device_blocks == int((80 * 2**30 * 0.9 - 16_060_522_496) // (131_072 * 16))


def test_blocks_can_be_given():
    found = replace(plan(), override=100)
    assert (found.device_blocks, found.kv_blocks) == (100, 99)


@pytest.mark.parametrize(
    ("stack", "hardware", "usage", "expected"),
    [
        ("vllm", "h100-sxm", "server", (1024, 8192)),
        ("vllm", "h100-sxm", "offline", (1024, 16384)),
        ("vllm", "h200", "server", (1024, 8192)),
        ("vllm", "a100-80gb-sxm", "server", (256, 2048)),
        ("vllm", "l40s", "offline", (256, 8192)),
        ("vllm", "b200", "server", (1024, 16384)),
        ("vllm", "tpu-v6e", "server", (256, 1024)),
        ("sglang", "h100-sxm", "server", (4096, 8192)),
        ("sglang", "l4", "server", (4096, 4096)),
        ("sglang", "b200", "server", (4096, 16384)),
        ("trtllm", "h100-sxm", "server", (2048, 8192)),
    ],
)
def test_engines_choose_their_limits_by_device_and_use(stack, hardware, usage, expected):
    found = engine_defaults(stack, load_device(hardware), usage)
    assert (found.max_num_seqs, found.max_num_batched_tokens) == expected
    assert found.source


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: stack_memory("vllm", "0.zz"),
            r"memory\.release: a release is numbers with dots, such as 0\.32 or 0\.19 or 0\.11, .* got '0\.zz'",
        ),
        (lambda: stack_memory("eager", "0.19"), "eager has no account of memory; leave it out"),
        (lambda: engine_defaults("vllm", H100, "batch"), "usage is server or offline; got 'batch'"),
        (lambda: plan(share=1.2), r"the share of the memory lies in \(0, 1\]; got 1\.2"),
        (lambda: plan(reserve_bytes=-1.0), "reserve_bytes must be a finite number"),
    ],
)
def test_what_cannot_be_planned_is_said(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_what_does_not_fit_says_what_is_missing():
    deployment = deploy(model="qwen3-32b", hardware="h100-sxm")
    with pytest.raises(ValueError, match=r"65\.5 GB of weights and .* GB of what else its stack sets aside .*tensor 2"):
        deployment.fitted(memory_plan(deployment, stack_memory("vllm"), **SERVER, share=0.8))
    with pytest.raises(ValueError, match="leaves nothing"):
        deployment.fitted(memory_plan(deployment, stack_memory("vllm"), **SERVER, reserve_bytes=80e9))
    with pytest.raises(ValueError, match="kv_blocks 1 leaves no block for a sequence; give at least 2"):
        deployment.fitted(replace(memory_plan(deployment, stack_memory("vllm"), **SERVER), override=1))


def test_every_constant_names_a_document():
    for releases in stack_memories().values():
        for rules in releases.values():
            assert all(" " in source for source in rules.sources.values()), rules.sources


@pytest.mark.parametrize("release", ["0.11", "0.19"])
def test_fitted_constants_are_what_the_fit_gives(release):
    table, fit = stack_memory("vllm", release), memory_logs.fitted(release)
    for name in ("logit_bytes", "hidden_copies", "context_bytes", "worker_bytes"):
        assert getattr(table, name) == pytest.approx(getattr(fit, name), rel=1e-3), name
    assert table.communicator_bytes == pytest.approx(fit.communicator_bytes, rel=1e-3)


def test_blocks_of_published_logs_come_out_where_the_flags_are_published():
    rows = [row for row in memory_logs.table() if not row.log.assumed]
    printed = [row for row in rows if row.log.printed in ("kv_tokens", "kv_gib")]
    assert len(printed) >= 10
    for row in rows:
        assert abs(row.unseen_error) <= 0.03, row.log.name


def test_the_parts_lie_beside_those_that_the_logs_print():
    for log in memory_logs.published_logs():
        stage = log.plan().stages[0]
        if log.weight_gib == log.weight_gib:
            assert stage.weight_bytes / GIB == pytest.approx(log.weight_gib, abs=0.13), log.name
        if log.activation_gib == log.activation_gib:
            assert stage.activation_bytes / GIB == pytest.approx(log.activation_gib, abs=0.18), log.name


def test_a_deployment_that_was_never_fitted_has_the_blocks_of_its_log():
    (lustre,) = (log for log in memory_logs.published_logs() if log.name == "vllm-0.19-qwen3-32b-tp2-lustre")
    assert lustre.measured_blocks == 8474
    assert lustre.predicted_blocks() == pytest.approx(8474, rel=0.01)


def test_the_page_shows_what_the_logs_and_the_account_say():
    page = (Path(__file__).parents[2] / "docs" / "validation.md").read_text(encoding="utf-8")
    assert memory_logs.markdown() in page


def test_graphs_reach_as_far_as_the_device_lets_them():
    largest = {
        name: engine_defaults("vllm", load_device(name)).graph_sequences for name in ("l40s", "h100-sxm", "b200")
    }
    assert largest == {"l40s": 512, "h100-sxm": 512, "b200": 1024}


def test_an_account_that_no_log_was_held_against_says_so():
    assert [plan(stack=stack).account for stack in ("vllm", "sglang", "trtllm", "ideal")] == [
        "vllm 0.32",
        "sglang 0.5.23, held against no log",
        "trtllm 1.3, held against no log",
        "the datasheet, nothing set aside",
    ]


def test_the_texts_say_what_a_log_says():
    facts = plan(release="0.19", share=0.95).facts
    blocks = facts["blocks"]
    assert cache_text(facts) == f"{blocks:,} blocks of 16 tokens = {16 * blocks:,} tokens, 58.13 GiB a GPU"
    assert parts_text(facts) == (
        "gpu_memory_utilization 0.95 of 79.19 GiB, by vllm 0.19: weights 14.96, activations 1.89, context 0.25"
    )


def test_layers_in_groups_have_the_tokens_that_vllms_log_prints():
    """18 of gpt-oss-120b's layers keep all of 131,072 tokens, and 18 a window of 128 with what is in flight, and a block more."""
    settings = {"model": "gpt-oss-120b", "hardware": "h200", "block_tokens": 128, "share": 0.95}
    settings["largest"] = LargestBatch(tokens=16384, sequences=1024)
    logged = plan(**settings).logged
    assert logged is not None
    longest_blocks = 1024 + (16384 + 127) // 128 + 1 + 1
    assert logged["tokens"] == int(logged["blocks"] / longest_blocks * 131_072)
    # A log of vLLM 0.27.1 has 1,630,790 tokens.
    assert logged["tokens"] == pytest.approx(1_630_790, rel=0.02)
    # Releases 0.11 and 0.19 divide the blocks by the groups, whatever fits.
    before = plan(**settings, release="0.19").logged
    assert before is not None
    assert before["tokens"] == before["blocks"] // 2 * 128


@pytest.mark.parametrize("release", ["0.11", "0.32"])
def test_what_the_log_counts_does_not_depend_on_how_long_contexts_are(release):
    settings = {"hardware": "b200", "release": release}
    grouped = [name for name in model_catalogue() if not keeps_every_token(load_model(name))]
    assert len(grouped) > 3
    for name in grouped:
        a = load_model(name).attention
        divides = (n for n in (8, 4, 2, 1) if a.n_heads % n == 0 and (a.n_kv_heads % n == 0 or n % a.n_kv_heads == 0))
        settings["parallel"] = {"tensor": next(divides)}
        short, long = (plan(name, **settings, context_tokens=tokens) for tokens in (500, 50_000))
        logged = short.facts["logged"]
        assert long.facts["logged"] == logged
        assert short.device_blocks != long.device_blocks
        text = cache_text(short.facts)
        assert (
            f"{logged['blocks']:,} blocks of {logged['block_tokens']} tokens in {logged['layer_groups']} groups" in text
        )
        assert f"groups of layers = {logged['tokens']:,} tokens" in text
        # Blocks that are given in place of what fits are as many bytes.
        given = replace(short, override=short.device_blocks).logged
        assert given is not None
        assert given["blocks"] == pytest.approx(logged["blocks"], rel=1e-3)


def test_models_whose_layers_keep_every_token_have_the_tokens_of_their_blocks():
    assert plan().facts["logged"] is None
    assert plan("gpt-oss-120b", stack="sglang", hardware="h200").facts["logged"] is None
