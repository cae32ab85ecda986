"""Names of checkpoints as their publishers write them, each with the model and the formats that they stand for."""

import json

import pytest

from hwmodels.model import load_model, model_catalogue
from hwmodels.model.fields import PLAIN
from hwmodels.model.names import read_name
from tests.sample import few

# Name -> model of the catalogue, format of the MLPs or experts, format of the cache ("" where the checkpoint asks for none).
NAMES = {
    "Qwen/Qwen3-8B": ("qwen3-8b", "bf16", ""),
    "Qwen/Qwen3-8B-Base": ("qwen3-8b", "bf16", ""),
    "Qwen/Qwen3-8B-FP8": ("qwen3-8b", "fp8_block", ""),
    "Qwen/Qwen3-8B-AWQ": ("qwen3-8b", "int4", ""),
    "Qwen/Qwen3-14B-FP8": ("qwen3-14b", "fp8_block", ""),
    "Qwen/Qwen3-32B-AWQ": ("qwen3-32b", "int4", ""),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": ("qwen3-30b-a3b-2507", "bf16", ""),
    "Qwen/Qwen3-30B-A3B-Instruct-2507-FP8": ("qwen3-30b-a3b-2507", "fp8_block", ""),
    "Qwen/Qwen3-30B-A3B-GPTQ-Int4": ("qwen3-30b-a3b", "int4", ""),
    "Qwen/Qwen3-235B-A22B-Thinking-2507-FP8": ("qwen3-235b-a22b-2507", "fp8_block", ""),
    "Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8": ("qwen3-coder-480b-a35b", "fp8_block", ""),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": ("qwen3-coder-30b-a3b", "bf16", ""),
    "Qwen/Qwen3-Next-80B-A3B-Instruct-FP8": ("qwen3-next-80b-a3b", "fp8_block", ""),
    "Qwen/Qwen3-VL-235B-A22B-Thinking-FP8": ("qwen3-vl-235b-a22b", "fp8_block", ""),
    "Qwen/Qwen2.5-7B-Instruct-AWQ": ("qwen2.5-7b", "int4", ""),
    "Qwen/Qwen2.5-72B-Instruct-GPTQ-Int4": ("qwen2.5-72b", "int4", ""),
    "Qwen/Qwen2.5-Coder-32B-Instruct": ("qwen2.5-32b", "bf16", ""),
    "Qwen/Qwen2.5-Coder-7B-Instruct-AWQ": ("qwen2.5-7b", "int4", ""),
    "Qwen/Qwen2.5-Math-72B-Instruct": ("qwen2.5-72b", "bf16", ""),
    "Qwen/QwQ-32B-AWQ": ("qwq-32b", "int4", ""),
    "Qwen/Qwen3.5-397B-A17B-FP8": ("qwen3.5-397b-a17b", "fp8_block", ""),
    "meta-llama/Llama-3.1-8B-Instruct": ("llama-3.1-8b", "bf16", ""),
    "meta-llama/Meta-Llama-3.1-8B-Instruct": ("llama-3.1-8b", "bf16", ""),
    "meta-llama/Llama-3.3-70B-Instruct": ("llama-3.1-70b", "bf16", ""),
    "meta-llama/Meta-Llama-3-8B": ("llama-3-8b", "bf16", ""),
    "meta-llama/Llama-3.2-3B-Instruct": ("llama-3.2-3b", "bf16", ""),
    "meta-llama/Llama-3.1-405B-Instruct-FP8": ("llama-3.1-405b", "fp8", ""),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": ("llama-4-scout", "bf16", ""),
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct-FP8": ("llama-4-maverick", "fp8", ""),
    "meta-llama/Llama-2-70b-chat-hf": ("llama-2-70b", "bf16", ""),
    "meta-llama/CodeLlama-34b-Instruct-hf": ("codellama-34b", "bf16", ""),
    "mistralai/Mistral-7B-Instruct-v0.1": ("mistral-7b", "bf16", ""),
    "mistralai/Mistral-7B-Instruct-v0.2": ("mistral-7b-v0.2", "bf16", ""),
    "mistralai/Mistral-7B-Instruct-v0.3": ("mistral-7b-v0.3", "bf16", ""),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": ("mixtral-8x7b", "bf16", ""),
    "mistralai/Mixtral-8x22B-Instruct-v0.1": ("mixtral-8x22b", "bf16", ""),
    "mistralai/Mistral-Nemo-Instruct-2407": ("mistral-nemo-12b", "bf16", ""),
    "mistralai/Mistral-Small-24B-Instruct-2501": ("mistral-small-24b", "bf16", ""),
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": ("mistral-small-3.1-24b", "bf16", ""),
    "mistralai/Devstral-Small-2507": ("mistral-small-3.1-24b", "bf16", ""),
    "mistralai/Mistral-Large-Instruct-2411": ("mistral-large-123b", "bf16", ""),
    "deepseek-ai/DeepSeek-V3": ("deepseek-v3", "fp8_block", ""),
    "deepseek-ai/DeepSeek-V3-0324": ("deepseek-v3", "fp8_block", ""),
    "deepseek-ai/DeepSeek-V3.1-Terminus": ("deepseek-v3", "fp8_block", ""),
    "deepseek-ai/DeepSeek-V3.2-Exp": ("deepseek-v3.2", "fp8_block", ""),
    "deepseek-ai/DeepSeek-R1-0528": ("deepseek-r1", "fp8_block", ""),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-70B": ("llama-3.1-70b", "bf16", ""),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": ("deepseek-r1-distill-qwen-32b", "bf16", ""),
    "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B": ("qwen3-8b", "bf16", ""),
    "deepseek-ai/DeepSeek-V2-Lite-Chat": ("deepseek-v2-lite", "bf16", ""),
    "nvidia/Llama-3.1-8B-Instruct-FP8": ("llama-3.1-8b", "fp8_static", "fp8"),
    "nvidia/Qwen3-32B-FP8": ("qwen3-32b", "fp8_static", "fp8"),
    "nvidia/Llama-3.3-70B-Instruct-FP4": ("llama-3.1-70b", "nvfp4", "fp8"),
    "nvidia/Llama-3.3-70B-Instruct-NVFP4": ("llama-3.1-70b", "nvfp4", "fp8"),
    "nvidia/DeepSeek-R1-FP4": ("deepseek-r1", "nvfp4", "fp8"),
    "nvidia/DeepSeek-R1-0528-NVFP4": ("deepseek-r1", "nvfp4", "fp8"),
    "nvidia/DeepSeek-V3-0324-FP4": ("deepseek-v3", "nvfp4", "fp8"),
    "nvidia/Qwen3-30B-A3B-FP4": ("qwen3-30b-a3b", "nvfp4", "fp8"),
    "nvidia/Llama-3.1-Nemotron-70B-Instruct-HF": ("llama-3.1-70b", "bf16", ""),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8": ("llama-3.1-8b", "fp8", ""),
    "RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic": ("llama-3.1-70b", "fp8", ""),
    "RedHatAI/Meta-Llama-3.1-70B-Instruct-quantized.w4a16": ("llama-3.1-70b", "int4", ""),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8": ("llama-3.1-8b", "int8", ""),
    "RedHatAI/Qwen3-32B-NVFP4": ("qwen3-32b", "nvfp4", ""),
    "RedHatAI/Qwen3-8B-NVFP4A16": ("qwen3-8b", "nvfp4_a16", ""),
    "RedHatAI/Qwen3-32B-FP8-block": ("qwen3-32b", "fp8_block", ""),
    "RedHatAI/gemma-3-27b-it-FP8-dynamic": ("gemma-3-27b", "fp8", ""),
    "neuralmagic/Meta-Llama-3.1-405B-Instruct-FP8": ("llama-3.1-405b", "fp8", ""),
    "neuralmagic/Meta-Llama-3-8B-Instruct-FP8-KV": ("llama-3-8b", "fp8", "fp8"),
    "neuralmagic/Mixtral-8x7B-Instruct-v0.1-FP8": ("mixtral-8x7b", "fp8", ""),
    "unsloth/Llama-3.2-1B-Instruct": ("llama-3.2-1b", "bf16", ""),
    "unsloth/Meta-Llama-3.1-8B-Instruct": ("llama-3.1-8b", "bf16", ""),
    "unsloth/gemma-3-12b-it": ("gemma-3-12b", "bf16", ""),
    "TheBloke/Llama-2-7B-Chat-AWQ": ("llama-2-7b", "int4", ""),
    "TheBloke/Llama-2-13B-chat-GPTQ": ("llama-2-13b", "int4", ""),
    "TheBloke/Mistral-7B-Instruct-v0.2-AWQ": ("mistral-7b-v0.2", "int4", ""),
    "TheBloke/CodeLlama-34B-Instruct-AWQ": ("codellama-34b", "int4", ""),
    "TheBloke/Mixtral-8x7B-Instruct-v0.1-GPTQ": ("mixtral-8x7b", "int4", ""),
    "TheBloke/deepseek-coder-33B-instruct-AWQ": ("deepseek-coder-33b", "int4", ""),
    "hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4": ("llama-3.1-8b", "int4", ""),
    "hugging-quants/Meta-Llama-3.1-405B-Instruct-GPTQ-INT4": ("llama-3.1-405b", "int4", ""),
    "casperhansen/llama-3-70b-instruct-awq": ("llama-3-70b", "int4", ""),
    "casperhansen/llama-3.3-70b-instruct-awq": ("llama-3.1-70b", "int4", ""),
    "cognitivecomputations/DeepSeek-R1-AWQ": ("deepseek-r1", "int4", ""),
    "QuantTrio/Qwen3-235B-A22B-Instruct-2507-AWQ": ("qwen3-235b-a22b-2507", "int4", ""),
    "amd/Llama-3.1-70B-Instruct-FP8-KV": ("llama-3.1-70b", "fp8", "fp8"),
    "amd/Llama-3.1-405B-Instruct-FP8-KV": ("llama-3.1-405b", "fp8", "fp8"),
    "amd/Mixtral-8x7B-Instruct-v0.1-FP8-KV": ("mixtral-8x7b", "fp8", "fp8"),
    "google/gemma-2-9b-it": ("gemma-2-9b", "bf16", ""),
    "google/gemma-3-27b-it": ("gemma-3-27b", "bf16", ""),
    "google/gemma-2-2b-it": ("gemma-2-2b", "bf16", ""),
    "openai/gpt-oss-120b": ("gpt-oss-120b", "mxfp4", ""),
    "unsloth/gpt-oss-20b-BF16": ("gpt-oss-20b", "bf16", ""),
    "lmsys/gpt-oss-120b-bf16": ("gpt-oss-120b", "bf16", ""),
    "microsoft/Phi-3-mini-4k-instruct": ("phi-3-mini", "bf16", ""),
    "microsoft/Phi-3.5-mini-instruct": ("phi-3.5-mini", "bf16", ""),
    "microsoft/phi-4": ("phi-4", "bf16", ""),
    "RedHatAI/phi-4-FP8-dynamic": ("phi-4", "fp8", ""),
    "nvidia/Phi-4-reasoning-plus-FP8": ("phi-4-reasoning", "fp8_static", "fp8"),
    "ibm-granite/granite-3.3-8b-instruct": ("granite-3.3-8b", "bf16", ""),
    "RedHatAI/granite-3.1-8b-instruct-quantized.w8a8": ("granite-3.1-8b", "int8", ""),
    "01-ai/Yi-34B-Chat": ("yi-34b", "bf16", ""),
    "TheBloke/Yi-34B-Chat-AWQ": ("yi-34b", "int4", ""),
    "zai-org/GLM-4.5-Air-FP8": ("glm-4.5-air", "fp8_block", ""),
    "zai-org/GLM-4.6": ("glm-4.6", "bf16", ""),
    "zai-org/GLM-5-FP8": ("glm-5", "fp8_block", ""),
    "cpatonn/GLM-4.5-Air-AWQ-4bit": ("glm-4.5-air", "int4", ""),
    "moonshotai/Kimi-K2-Instruct-0905": ("kimi-k2", "fp8_block", ""),
    "moonshotai/Kimi-K2-Thinking": ("kimi-k2.5", "int4_g32", ""),
    "nvidia/Kimi-K2.5-NVFP4": ("kimi-k2.5", "nvfp4", "fp8"),
    "MiniMaxAI/MiniMax-M2.1": ("minimax-m2.5", "fp8_block", ""),
    "NousResearch/Hermes-3-Llama-3.1-8B": ("llama-3.1-8b", "bf16", ""),
    "NousResearch/Meta-Llama-3.1-8B-Instruct": ("llama-3.1-8b", "bf16", ""),
    "lmsys/vicuna-7b-v1.5": ("llama-2-7b", "fp16", ""),
    "HuggingFaceH4/zephyr-7b-beta": ("mistral-7b", "bf16", ""),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": ("tinyllama-1.1b", "bf16", ""),
    "allenai/OLMo-2-1124-7B-Instruct": ("olmo-2-7b", "bf16", ""),
    "CohereLabs/c4ai-command-r-08-2024": ("command-r-32b", "fp16", ""),
    "tiiuae/Falcon3-7B-Instruct": ("falcon3-7b", "bf16", ""),
    "LGAI-EXAONE/EXAONE-3.5-7.8B-Instruct-AWQ": ("exaone-3.5-7.8b", "int4", ""),
    "bigcode/starcoder2-15b": ("starcoder2-15b", "bf16", ""),
    "llama3.1:8b": ("llama-3.1-8b", "bf16", ""),
    "llama3.3:70b": ("llama-3.1-70b", "bf16", ""),
    "gemma3:27b": ("gemma-3-27b", "bf16", ""),
    "qwen3:30b-a3b": ("qwen3-30b-a3b", "bf16", ""),
    "phi4:14b": ("phi-4", "bf16", ""),
    "/models/Llama-3.1-8B-Instruct": ("llama-3.1-8b", "bf16", ""),
}

# Formats that are not modelled: the sentence says so and what to set in their place.
FORMATS_REFUSED = [
    "TheBloke/Llama-2-7B-Chat-GGUF",
    "unsloth/Llama-3.2-3B-Instruct-bnb-4bit",
    "unsloth/Meta-Llama-3.1-8B-Instruct-unsloth-bnb-4bit",
    "unsloth/Qwen3-32B-GGUF",
    "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF",
    "mlx-community/Llama-3.2-3B-Instruct-4bit",
    "mlx-community/Qwen3-8B-MLX-8bit",
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8",
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a16",
    "llama3.1:8b-instruct-q4_K_M",
    "turboderp/Llama-3.1-8B-Instruct-exl2",
]

# Other shapes under a name that holds a model's: drafters, encoders, pruned ones, sizes that are not in the catalogue.
UNKNOWN = [
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
    "yuhuili/EAGLE-LLaMA3-Instruct-8B",
    "RedHatAI/Qwen3-8B-speculator.eagle3",
    "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3",
    "lmsys/gpt-oss-120b-Eagle3",
    "nvidia/gpt-oss-120b-Eagle3-short-context",
    "AngelSlim/Qwen3-32B_eagle3",
    "lmsys/SGLang-EAGLE3-Llama-4-Scout-17B-16E-Instruct-v1",
    "z-lab/Qwen3-8B-DFlash-b16",
    "ibm-ai-platform/llama3-70b-accelerator",
    "Qwen/Qwen3-Embedding-8B",
    "Qwen/Qwen3-Reranker-8B",
    "Qwen/Qwen2.5-VL-7B-Instruct",
    "Qwen/Qwen2.5-Omni-3B",
    "Qwen/Qwen-Audio-Chat",
    "nvidia/Llama-3.1-Minitron-4B-Width-Base",
    "nvidia/Llama-3_3-Nemotron-Super-49B-v1",
    "nvidia/Llama-3_1-Nemotron-Ultra-253B-v1",
    "meta-llama/Llama-3.2-11B-Vision-Instruct",
    "meta-llama/Llama-3.1-7B-Instruct",
    "Qwen/Qwen3-9B",
    "mistralai/Mistral-Medium-3",
    "tiiuae/falcon-40b-instruct",
    "google/gemma-3n-E4B-it",
    "google/gemma-4-E4B-it",
    "Salesforce/Llama-xLAM-2-8b-fc-r",
    "nvidia/Nemotron-H-8B-Base-8K",
    "liuhaotian/llava-v1.5-7b",
]


def test_a_publishers_name_is_read_as_a_model_and_its_formats():
    for name, (base, fmt, cache) in NAMES.items():
        spec, model = load_model(name), load_model(base)
        assert (spec.params, spec.layer_attention, spec.max_positions) == (
            model.params,
            model.layer_attention,
            model.max_positions,
        ), name
        assert (spec.mlp_precision if spec.experts is None else spec.expert_precision) == fmt, name
        assert (spec.kv_precision or "") == cache, name


@pytest.mark.parametrize("name", FORMATS_REFUSED)
def test_a_format_that_is_not_modelled_is_refused_with_the_way_out(name):
    with pytest.raises(ValueError, match=r"the format .* is not modelled; name .* with another format in its place"):
        load_model(name)


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_name_of_another_shape_is_no_model_of_the_catalogue(name):
    with pytest.raises(ValueError, match=r"unknown model .*or a path to a config\.json, or --fetch"):
        load_model(name)


def test_a_reading_is_said_in_a_note():
    (note,) = load_model("nvidia/Llama-3.1-8B-Instruct-FP8").notes
    assert note == (
        "The model nvidia/Llama-3.1-8B-Instruct-FP8 is read as llama-3.1-8b of the catalogue; its weights are in fp8_static, "
        "and its KV cache in fp8, from 'fp8' in its name. A path to its own config.json takes the place of this reading."
    )
    assert "'sft' in its name is taken to leave the shape as it is" in load_model("me/Qwen3-8B-SFT").notes[-1]
    assert load_model("llama-3.1-8b").notes == ()


def test_a_name_may_say_how_long_sequences_get():
    spec = load_model("01-ai/Yi-1.5-9B-Chat-16K")
    assert (load_model("yi-1.5-9b").max_positions, spec.max_positions) == (4096, 16_384)
    assert "sequences have up to 16,384 tokens" in spec.notes[-1]


@pytest.mark.parametrize(
    "ending",
    few(["Instruct-v2-FP8", "AWQ", "SFT", "FP8-dynamic", "GPTQ-Int4"], 2, reason="the whole catalogue each time"),
)
def test_every_model_of_the_catalogue_keeps_its_shape_under_another_ending(ending):
    for name, path in model_catalogue().items():
        if json.loads(path.read_text())["model_type"] in PLAIN:
            continue
        spec, own = load_model(f"somebody/{name}-{ending}"), load_model(name)
        assert (spec.params, spec.n_layers, spec.attention) == (own.params, own.n_layers, own.attention), name


def test_the_reading_that_takes_the_fewest_words_counts():
    known = {"mistral-7b", "mistral-7b-v0.3"}
    third, ninth = (read_name(f"somebody/Mistral-7B-Chat-v0.{n}-AWQ", known) for n in (3, 9))
    assert third is not None
    assert ninth is not None
    assert (third.base, third.words) == ("mistral-7b-v0.3", ("chat",))
    assert (ninth.base, ninth.words) == ("mistral-7b", ("chat", "v0.9"))


def test_a_format_of_ones_own_takes_the_place_of_one_that_is_not_modelled():
    spec = load_model("TheBloke/Llama-2-7B-Chat-GGUF", given=("precision",))
    assert spec.params == load_model("llama-2-7b").params
