"""Deployments that fit, and the error of those that do not."""

import pytest

from hwmodels.deployment import Deployment, deploy
from hwmodels.memory import LargestBatch, MemoryPlan, memory_plan
from hwmodels.parallel import ParallelConfig


def plan(found: Deployment, **settings: float) -> MemoryPlan:
    """The memory of a deployment with nothing set aside beside weights and cache."""
    return found.fitted(memory_plan(found, None, largest=LargestBatch(0, 0), **settings))


def test_pool_of_llama_8b_by_hand():
    found = deploy(model="llama-3.1-8b", hardware="h100-sxm")
    free = 80 * 2**30 * 0.9 - 16_060_522_496 - 1e9
    assert found.weight_bytes_per_device == 16_060_522_496
    assert found.kv_bytes_per_token_per_device == 131_072
    assert plan(found, reserve_bytes=1e9).kv_blocks == int(free // (131_072 * 16))


def test_the_fullest_stage_limits_the_pool():
    # 32 layers on 3 stages: 11, 11 and 10, the last with the head.
    found = deploy(model="llama-3.1-8b", hardware="h100-sxm", parallel={"pipeline": 3})
    blocks = [stage.blocks for stage in plan(found).stages]
    assert len(set(blocks)) > 1
    assert plan(found).kv_blocks == min(blocks)


def test_fp8_cache_doubles_the_pool():
    plain = plan(deploy(model="llama-3.1-8b", hardware="h100-sxm")).kv_blocks
    fp8 = plan(deploy(model="llama-3.1-8b", hardware="h100-sxm", kv_precision="fp8")).kv_blocks
    assert fp8 in (2 * plain, 2 * plain + 1)


def test_replicated_kv_heads_limit_the_pool():
    eight = deploy(model="llama-3.1-8b", hardware="h100-sxm", parallel={"tensor": 8})
    sixteen = deploy(model="llama-3.1-8b", hardware="h100-sxm", parallel={"tensor": 16})
    assert eight.kv_bytes_per_token_per_device == sixteen.kv_bytes_per_token_per_device == 131_072 / 8


def test_latent_cache_is_on_every_device_and_data_parallel_groups_add_up():
    tensor = deploy(model="deepseek-r1", hardware="h200", parallel={"tensor": 8})
    data = deploy(model="deepseek-r1", hardware="h200", parallel={"data": 8, "expert": 8})
    assert tensor.kv_bytes_per_token_per_device == data.kv_bytes_per_token_per_device == 70_272
    assert plan(data).kv_blocks > 5 * plan(tensor).kv_blocks


def test_a_tied_head_is_stored_once_but_on_both_ends_of_a_pipeline():
    one = deploy(model="qwen3-0.6b", hardware="l4")
    two = deploy(model="qwen3-0.6b", hardware="l4", parallel={"pipeline": 2})
    table = 151_936 * 1024 * 2
    assert one.weight_bytes_per_device == 596_049_920 * 2
    total = sum(stage.weight_bytes for stage in plan(two).stages)
    assert total == pytest.approx(596_049_920 * 2 + table, rel=1e-12)


def test_a_model_that_does_not_fit_says_what_is_missing_and_what_would_fit():
    found = deploy(model="llama-3.1-70b", hardware="h100-sxm")
    with pytest.raises(
        ValueError,
        match=r"llama-3\.1-70b \(bf16\) does not fit: a h100-sxm offers 77\.3 GB .* 141\.1 GB of weights .* "
        r"63\.8 GB is missing with tensor 1, pipeline 1; it would fit with tensor 2 or with pipeline 2 "
        r"or with b200 \(193 GB\)",
    ):
        plan(found)


def test_a_larger_device_that_is_proposed_is_of_the_same_maker():
    """MI325X (275 GB) is smaller than B300, and what is measured of one maker's devices may not run on another's."""
    found = deploy(model="llama-3.1-405b", hardware="b200", parallel={"tensor": 4})
    with pytest.raises(ValueError, match="does not fit") as caught:
        plan(found)
    assert not any(name in str(caught.value) for name in ("mi3", "gaudi", "tpu", "trainium"))


@pytest.mark.parametrize(("name", "degree"), [("tensor", 2), ("pipeline", 2)])
def test_what_the_error_proposes_does_fit(name, degree):
    assert plan(deploy(model="llama-3.1-70b", hardware="h100-sxm", parallel={name: degree})).kv_blocks > 0
    assert plan(deploy(model="llama-3.1-70b", hardware="b200")).kv_blocks > 0


def test_a_model_that_fits_nowhere_says_so():
    found = deploy(model="llama-3.1-405b", hardware="a10", precision="fp32")
    with pytest.raises(ValueError, match="no tensor or pipeline degree up to 64 and no larger device fits"):
        plan(found, share=0.1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"share": 1.5}, r"the share of the memory lies in \(0, 1\]; got 1.5"),
        ({"reserve_bytes": -1.0}, "reserve_bytes must be a finite number of at least 0; got -1.0"),
        ({"block_tokens": 0}, "block_tokens must be an integer of at least 1; got 0"),
        ({"reserve_bytes": 80e9}, "leaves nothing"),
        ({"reserve_bytes": 70e9}, "does not fit"),
    ],
)
def test_bad_memory_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        plan(deploy(model="llama-3.1-8b", hardware="h100-sxm"), **settings)


def test_equal_arguments_give_the_same_deployment():
    one = deploy(model="llama-3.1-8b", hardware="h100", parallel={"tensor": 2})
    assert deploy(model="llama-3.1-8b", hardware="h100-sxm", parallel=ParallelConfig(tensor=2)) is one


def test_precisions_reach_the_model():
    found = deploy(model="llama-3.1-70b", hardware="h200", precision="fp8", kv_precision="fp8")
    assert (found.model.mlp_precision, found.kv_precision) == ("fp8", "fp8")
    kept = deploy(model="gpt-oss-120b", hardware="h100-sxm")
    assert (kept.model.expert_precision, kept.kv_precision) == ("mxfp4", "bf16")
    apart = deploy(model="mixtral-8x7b", hardware="h100-sxm", expert_precision="int4")
    assert (apart.model.attention_precision, apart.model.expert_precision) == ("bf16", "int4")
    with pytest.raises(ValueError, match="has no experts"):
        deploy(model="llama-3.1-8b", hardware="h100-sxm", expert_precision="int4")
    with pytest.raises(ValueError, match=r"parallel\.tensr is not a degree"):
        deploy(model="llama-3.1-8b", hardware="h100-sxm", parallel={"tensr": 2})
