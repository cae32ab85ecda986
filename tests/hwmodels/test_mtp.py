"""Multi-token prediction: the extra layers as a model of its own, what a pass costs, and what they take beside the target."""

from dataclasses import replace

import numpy as np
import pytest

from hwmodels.calibrated import Calibrated
from hwmodels.deployment import deploy
from hwmodels.model import load_model, spec_from_config
from hwmodels.mtp import mtp_draft
from hwmodels.roofline import Roofline
from hwmodels.totals import Totals
from sim.engine.batch.pricing import Pricing
from sim.engine.batch.rank_prices import CommonPrices


def decodes(n: int, tokens: int = 1, kv: int = 1000) -> Totals:
    return Totals(n * tokens, 0, 0, 0, 0, n, n * kv, n)


def prompt(n: int) -> Totals:
    return Totals(n, n, 1, n * (n + 1) // 2, n, 0, 0, 0)


def test_the_extra_layer_has_the_parameters_that_the_model_card_says():
    # README_WEIGHTS.md of deepseek-ai/DeepSeek-V3: 11.5 billion unique parameters, embedding and head apart.
    model = load_model("deepseek-v3")
    assert model.mtp_layers == 1
    assert model.mtp_draft().params / 1e9 == pytest.approx(11.5, rel=0.015)
    # A layer of experts, the projection of both inputs, and the three norms beside the two of every layer.
    layer = (replace(model, layer_is_moe=(True,) * 2, layer_attention=("full",) * 2).params) - replace(
        model, layer_is_moe=(True,), layer_attention=("full",)
    ).params
    assert model.mtp_draft().params == layer + 2 * 7168 * 7168 + 3 * 7168


def test_a_model_without_extra_layers_says_where_they_would_be():
    with pytest.raises(
        ValueError, match=r"llama-3\.1-8b has no layers for multi-token prediction: its config\.json has none of"
    ):
        load_model("llama-3.1-8b").mtp_draft()


def test_embedding_and_head_are_the_targets_own():
    target = deploy(model="deepseek-v3", hardware="b200", parallel={"tensor": 8})
    held = mtp_draft(target, 1).held
    spec = held.model
    # Experts and attention are split; projection, router and norms are on every device.
    assert held.weight_bytes_per_device < spec.weight_bytes() / 8 + 2 * (
        spec.mtp_projection_params + spec.router_params + 1e5
    )
    assert held.weight_bytes_per_device > spec.weight_bytes() / 8
    assert held.kv_bytes_per_token_per_device == pytest.approx(target.kv_bytes_per_token_per_device / 61)


def test_a_pass_costs_a_layer_of_the_target_and_its_head():
    target = deploy(model="deepseek-v3", hardware="b200", parallel={"tensor": 8})
    cost = mtp_draft(target, 3).cost
    one = cost.iteration_s(decodes(64))
    plain = target.cost.iteration_s(decodes(64))
    # One of 58 such layers, with a head and a projection that the other layers do not have.
    assert plain / 61 < one < 3 * plain / 61
    many = Totals(*(np.array([x, x], np.int64) for x in decodes(64)))
    assert cost.iteration_s(many).tolist() == [one, one]


def test_several_modules_all_read_the_prompt_and_take_memory():
    model = replace(load_model("deepseek-v3"), mtp_layers=3)
    target = deploy(model=model, hardware="b200", parallel={"tensor": 8})
    one, two, four = (mtp_draft(target, k) for k in (1, 2, 4))
    assert (one.cost.modules, two.cost.modules, four.cost.modules) == (1, 2, 3)
    assert two.cost.iteration_s(prompt(512)) == 2 * one.cost.iteration_s(prompt(512))
    assert four.cost.iteration_s(decodes(8)) == one.cost.iteration_s(decodes(8))
    assert two.cost.work(prompt(512)) == tuple(2 * each for each in one.cost.work(prompt(512)))
    single = mtp_draft(deploy(model=replace(model, mtp_layers=1), hardware="b200", parallel={"tensor": 8}), 1)
    assert one.held.weight_bytes_per_device == pytest.approx(3 * single.held.weight_bytes_per_device)
    assert one.held.kv_bytes_per_token_per_device == 3 * single.held.kv_bytes_per_token_per_device


def test_prompts_of_any_rank_pass_through_every_module() -> None:
    target = deploy(
        model=replace(load_model("deepseek-v3"), mtp_layers=3), hardware="b200", parallel={"data": 2, "expert": 2}
    )
    one, two = (mtp_draft(target, k).cost for k in (1, 2))
    assert two.common_step([decodes(0), prompt(512)]) == 2 * one.common_step([decodes(0), prompt(512)])
    assert two.common_step([decodes(8), decodes(9)]) == one.common_step([decodes(8), decodes(9)])


def test_a_pass_has_no_host_work_of_its_own():
    made_by = Calibrated.for_stack("sglang")
    target = deploy(model="deepseek-v3", hardware="b200", parallel={"tensor": 8}, cost=made_by)
    cost = mtp_draft(target, 1).cost
    own = made_by.stack.overheads
    assert own.sequence_s > 0
    slower = replace(made_by, stack=replace(made_by.stack, overheads=replace(own, sequence_s=5 * own.sequence_s)))
    other = deploy(model="deepseek-v3", hardware="b200", parallel={"tensor": 8}, cost=slower)
    assert mtp_draft(other, 1).cost.iteration_s(decodes(64)) == cost.iteration_s(decodes(64))
    assert other.cost.iteration_s(decodes(64)) > target.cost.iteration_s(decodes(64))


def test_the_first_pass_reads_what_the_target_verified():
    target = deploy(model="deepseek-v3", hardware="b200", parallel={"tensor": 8})
    cost = mtp_draft(target, 3).cost
    pricing = Pricing(target.cost, cost, 0.0)
    n, k = 32, 3
    expected = (
        target.cost.iteration_s(Totals(n * 4, 0, 0, 0, 0, n, n * 1000, n * 4))
        + cost.iteration_s(decodes(n, 4))
        + 2 * cost.iteration_s(decodes(n))
    )
    line = pricing.decode_lines(n, k + 1, k)(n * 1000, 0)
    per_s = 1e9 * 2 ** pricing_bits()
    assert (line.base + line.slope * n * 1000) / per_s == pytest.approx(expected, rel=1e-3)
    mixed = Totals(n * 4 + 512, 512, 1, 512 * 513 // 2, 512, n, n * 1000, n * 4)
    ticks = pricing.iteration(mixed, k)
    whole = target.cost.iteration_s(mixed) + cost.iteration_s(prompt(512)) + cost.iteration_s(decodes(n, 4))
    assert ticks / per_s == pytest.approx(whole + 2 * cost.iteration_s(decodes(n)), rel=1e-3)


def pricing_bits() -> int:
    from sim.engine.time.clock import TICK_BITS

    return TICK_BITS


def test_ranks_take_a_pass_together():
    target = deploy(model="deepseek-v3", hardware="b200", parallel={"data": 8, "expert": 8})
    cost = mtp_draft(target, 1).cost
    even = cost.common_step([decodes(4)] * 8)
    uneven = cost.common_step([decodes(32), *[Totals(*(0,) * 10)] * 7])
    assert cost.parallel.data == 8
    assert 0 < even <= uneven


def test_a_step_of_ranks_has_the_passes_of_all_ranks_behind_the_targets() -> None:
    target = deploy(model="deepseek-v3", hardware="b200", parallel={"data": 2, "expert": 2})
    draft = mtp_draft(target, 3).cost
    prices = CommonPrices(Pricing(target.cost, draft, 0.0), 2)
    ranks = [Totals(4 * n + tokens, tokens, *((1, tokens * (tokens + 1) // 2, tokens) if tokens else (0, 0, 0)), n, n * 1000, 4 * n)
             for n, tokens in ((8, 0), (24, 512))]  # fmt: skip
    # The target's; prompts through the module; what was verified; then a token a sequence, as often as the rank that drafts most.
    expected = (
        target.cost.common_step(ranks)
        + draft.common_step([decodes(0), prompt(512)])
        + draft.common_step([decodes(8, 4), decodes(24, 4)])
        + 2 * draft.common_step([decodes(8), decodes(24)])
    )
    assert prices.step(ranks, [1, 3]) / (1e9 * 2 ** pricing_bits()) == pytest.approx(expected, rel=1e-9)


def test_a_hybrid_model_drafts_with_a_layer_that_keeps_a_cache():
    model = load_model("qwen3.5-397b-a17b")
    draft = replace(model, mtp_layers=1).mtp_draft()
    assert draft.layer_attention == ("full",)
    assert draft.state_bytes_per_sequence == 0


def test_each_name_of_the_layers_in_a_config_counts():
    shapes = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "vocab_size": 256}  # fmt: skip
    for name in ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules"):
        spec = spec_from_config({**shapes, name: 2}, name="x", where="x")
        assert spec.mtp_layers == 2
        assert spec.params == spec_from_config(shapes, name="x", where="x").params
        draft = spec.mtp_draft(1)
        assert not any(draft.layer_is_moe)
        target = deploy(model=spec, hardware="h100-sxm", cost=Roofline)
        assert mtp_draft(target, 1).held.weight_bytes_per_device == pytest.approx(2 * 2 * draft.params)
