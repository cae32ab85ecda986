"""Parameters, active parameters and cache of the catalogue against published totals."""

import json
from pathlib import Path

import pytest

from hwmodels.model import load_model, model_catalogue, spec_from_config

SHARED = Path(__file__).resolve().parents[3] / "shared" / "model_configs"

# Billions of parameters; model cards and papers (exact element counts of the released checkpoints where four digits).
PARAMS = {
    "llama-3.1-8b": 8.0303,
    "llama-3.1-70b": 70.5537,
    "llama-3.1-405b": 405.8534,
    "llama-3.2-1b": 1.2358,
    "llama-3.2-3b": 3.2128,
    "llama-2-7b": 6.7384,
    "llama-2-13b": 13.0159,
    "llama-2-70b": 68.9766,
    "llama-33b": 32.5289,
    "yi-34b": 34.3889,
    "codellama-34b": 33.7440,
    "mistral-7b": 7.2417,
    "mistral-nemo-12b": 12.2478,
    "mixtral-8x7b": 46.7028,
    "mixtral-8x22b": 140.6206,
    "qwen2.5-7b": 7.6156,
    "qwen3-0.6b": 0.5960,
    "qwen3-8b": 8.1907,
    "qwen3-32b": 32.7621,
    "qwen3-30b-a3b": 30.5321,
    "qwen3-235b-a22b": 235.0936,
    "deepseek-r1": 671.0264,
    "gpt-oss-120b": 116.83,
    "gpt-oss-20b": 20.915,
    "gpt2": 0.124440,
    "gpt2-medium": 0.354823,
    "gpt2-large": 0.774030,
    "gpt2-xl": 1.557611,
    "opt-125m": 0.125239,
    "opt-6.7b": 6.658474,
    "opt-13b": 12.853473,
    "bloom-176b": 176.247271,
    "bert-base": 0.109482,
    "bert-large": 0.335142,
}


@pytest.mark.parametrize("name", PARAMS)
def test_parameters_agree_with_the_released_checkpoint(name):
    assert load_model(name).params / 1e9 == pytest.approx(PARAMS[name], rel=1e-4)


@pytest.mark.parametrize(
    ("name", "total", "rel"),
    [("opt-30b", 30, 0.01), ("opt-66b", 66, 0.01), ("opt-175b", 175, 0.01), ("gpt3-175b", 175, 0.01)],
)
def test_parameters_agree_with_the_name(name, total, rel):
    assert load_model(name).params / 1e9 == pytest.approx(total, rel=rel)


@pytest.mark.parametrize("name", ["glm-5", "kimi-k2.5", "minimax-m2.5", "qwen3.5-397b-a17b"])
def test_new_architectures_agree_with_their_rounded_totals(name):
    stated = {
        "glm-5": (744, 41.8),
        "kimi-k2.5": (1026, 32.9),
        "minimax-m2.5": (229, 11),
        "qwen3.5-397b-a17b": (397, 17.3),
    }
    spec = load_model(name)
    total, active = stated[name]
    assert spec.params / 1e9 == pytest.approx(total, rel=0.003)
    assert spec.active_params / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize(
    ("name", "active", "embedding_counted"),
    [
        ("mixtral-8x7b", 12.9, True),
        ("mixtral-8x22b", 39.1, True),
        ("qwen3-235b-a22b", 22.0, True),
        ("qwen3-30b-a3b", 3.3, True),
        ("deepseek-r1", 37.0, True),
        ("gpt-oss-120b", 5.13, False),
        ("gpt-oss-20b", 3.61, False),
    ],
)
def test_active_parameters(name, active, embedding_counted):
    spec = load_model(name)
    count = spec.active_params - (0 if embedding_counted else spec.embedding_params)
    assert count / 1e9 == pytest.approx(active, rel=0.017)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("llama-2-7b", 524_288),
        ("llama-3.1-8b", 131_072),
        ("llama-3.1-70b", 327_680),
        ("deepseek-r1", 70_272),
        ("qwen2.5-7b", 57_344),
        ("gpt-oss-120b", 73_728),
        ("bloom-176b", 4_014_080),
        # 15 full layers of 60 cache two heads of 256.
        ("qwen3.5-397b-a17b", 15 * 2 * 2 * 256 * 2),
        # Latent 576 and, for the indexer, 128 fp8 elements with an fp32 scale.
        ("glm-5", 78 * (576 * 2 + 132)),
    ],
)
def test_kv_bytes_per_token_in_16_bits(name, size):
    assert load_model(name).kv_bytes_per_token("bf16") == size


def test_kv_precision_halves_the_cache():
    spec = load_model("llama-3.1-8b")
    assert spec.kv_bytes_per_token("fp8") == 65_536


def test_windows_alternate_in_gpt_oss_and_cover_mistral():
    spec = load_model("gpt-oss-120b")
    assert (spec.window_tokens, sum(spec.layer_is_windowed), spec.layer_is_windowed[0]) == (128, 18, True)
    assert all(load_model("mistral-7b").layer_is_windowed)
    assert load_model("qwen2.5-7b").window_tokens is None


def test_formats_come_from_the_checkpoint():
    r1, oss, kimi = load_model("deepseek-r1"), load_model("gpt-oss-120b"), load_model("kimi-k2.5")
    assert (r1.attention_precision, r1.expert_precision, r1.base_precision) == ("fp8_block", "fp8_block", "bf16")
    assert (oss.attention_precision, oss.expert_precision) == ("bf16", "mxfp4")
    assert (kimi.attention_precision, kimi.mlp_precision, kimi.expert_precision) == ("bf16", "bf16", "int4_g32")
    # Published sizes on disk: gpt-oss-120b 65 GB, Kimi-K2.5 595 GB.
    assert oss.weight_bytes() / 1e9 == pytest.approx(65.2, rel=0.005)
    assert kimi.weight_bytes() / 1e9 == pytest.approx(594, rel=0.01)


def test_precision_override_keeps_the_head_in_16_bits():
    spec = load_model("llama-3.1-8b").with_precision("fp8")
    head = 2 * spec.vocab * spec.hidden + 65 * spec.hidden
    assert spec.weight_bytes() == (spec.params - head) + 2 * head
    assert load_model("deepseek-r1").with_precision("fp8") is load_model("deepseek-r1")
    assert load_model("llama-3.1-8b").with_precision("fp32").weight_bytes() == 4 * spec.params
    with pytest.raises(ValueError, match="'fp7' is not a precision"):
        spec.with_precision("fp7")


def test_catalogue_says_where_it_approximates():
    assert any("Linear-attention" in note for note in load_model("qwen3.5-397b-a17b").notes)
    assert any("Sparse attention" in note for note in load_model("glm-5").notes)
    assert all(load_model(name).source for name in model_catalogue())


@pytest.mark.parametrize(
    "hub",
    [
        "deepseek-ai/DeepSeek-R1",
        "nvidia/DeepSeek-R1-NVFP4",
        "deepseek-ai/DeepSeek-V3",
        "moonshotai/Kimi-K2.5",
        "zhipuai/GLM-5",
        "Qwen/Qwen3.5-397B-A17B",
        "Qwen/Qwen3-235B-A22B-FP8",
        "openai/gpt-oss-120b",
        "meta-llama/Llama-3.1-70B",
        "meta-llama/Llama-3.1-8B",
        "Qwen/Qwen3-32B",
    ],
)
def test_hub_names_of_the_measured_deployments_are_known(hub):
    assert load_model(hub).params > 0


def test_unknown_model_names_the_nearest():
    with pytest.raises(ValueError, match=r"unknown model 'lama-3\.1-8b'.*llama-3\.1-8b"):
        load_model("lama-3.1-8b")
    with pytest.raises(ValueError, match="does not exist"):
        load_model("/nowhere/config.json")


LLAMA = json.loads(model_catalogue()["llama-3.1-8b"].read_text())


@pytest.mark.parametrize(
    "field",
    ["model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"],
)
def test_a_missing_field_is_named_with_its_file(tmp_path, field):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({k: v for k, v in LLAMA.items() if k != field}))
    with pytest.raises(ValueError, match=rf"config\.json: {field} is missing"):
        load_model(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 4097, "head_dim": None}, "hidden_size 4097 is not a multiple"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers must be an integer"),
        ({"num_key_value_heads": 5}, "num_attention_heads 32 is not a multiple of num_key_value_heads 5"),
        ({"model_type": "falcon"}, "model_type 'falcon'.* is not modelled"),
        ({"model_type": "jamba", "mamba_d_state": 16}, "'jamba'.* is not modelled"),
        ({"layer_types": ["linear_attention"] * 32}, "hybrid with linear attention layers"),
        ({"attention_chunk_size": 8192}, r"chunked attention \(attention_chunk_size 8192\) is not modelled"),
        ({"num_local_experts": 8}, r"a mixture of experts \(num_local_experts\) in a llama model"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"torch_dtype": "float8"}, "torch_dtype must be one of"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantisation 'hqq' is not modelled"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false"),
    ],
)
def test_a_config_that_cannot_be_modelled_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        spec_from_config({**LLAMA, **change}, name="x", where="config.json")


def test_text_that_is_not_json_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        load_model(tmp_path)


def test_awq_and_modelopt_formats_are_read(tmp_path):
    awq = spec_from_config(
        {**LLAMA, "quantization_config": {"quant_method": "awq", "bits": 4}}, name="x", where="config.json"
    )
    assert awq.mlp_precision == "int4"
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    side = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(side))
    spec = load_model(tmp_path)
    assert (spec.mlp_precision, spec.kv_precision, spec.base_precision) == ("nvfp4", "fp8", "bf16")


REFUSED = {
    "Qwen--Qwen3.5-397B-A17B": "linear attention",
    "meta-llama--Llama-4-Scout-17B-16E-Instruct": "chunked attention of Llama 4",
}


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"the shared configs are not at {SHARED}")
def test_every_shared_config_loads_or_is_refused_by_name():
    for folder in sorted(p for p in SHARED.iterdir() if p.is_dir()):
        if folder.name in REFUSED:
            with pytest.raises(ValueError, match=REFUSED[folder.name]):
                load_model(folder)
        else:
            spec = load_model(folder / "config.json")
            assert spec.params > 5e8
            assert spec.name == folder.name
