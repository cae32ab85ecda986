"""Parameters, active parameters and cache of the catalogue against published totals."""

import json
from pathlib import Path

import pytest

from hwmodels.calibrated import Calibrated
from hwmodels.device import load_device
from hwmodels.model import CATALOGUE, load_model, model_catalogue, spec_from_config
from hwmodels.parallel import ParallelConfig
from hwmodels.totals import Totals
from hwmodels.work import stage_work

SHARED = Path(__file__).resolve().parents[3] / "shared" / "model_configs"
SHARED2 = SHARED.with_name("model_configs2")

# Billions of parameters; model cards and papers (exact element counts of the released checkpoints where four digits).
PARAMS = {
    "llama-3-8b": 8.0303,
    "llama-3-70b": 70.5537,
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


def test_parameters_agree_with_the_released_checkpoint():
    assert {name: load_model(name).params / 1e9 for name in PARAMS} == pytest.approx(PARAMS, rel=1e-4)


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
    assert (spec.window_tokens, spec.layer_attention) == (128, ("window", "full") * 18)
    assert set(load_model("mistral-7b").layer_attention) == {"window"}
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
    assert any("Linear attention" in note for note in load_model("qwen3.5-397b-a17b").notes)
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
    with pytest.raises(
        ValueError, match=r"unknown model 'x/zzz'; no name that `rooftrace models` lists is near \(or a path"
    ):
        load_model("x/zzz")
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"torch_dtype": ["bfloat16"]}, r"torch_dtype must be one of .* got \['bfloat16'\]"),
        ({"layer_types": 32}, "layer_types must be a list of texts, got 32"),
        ({"layer_types": [0] * 32}, "layer_types must be a list of texts"),
        ({"text_config": [1]}, "text_config must be an object"),
        ({"rooftrace": "mine"}, "rooftrace must be an object, got 'mine'"),
        ({"quantization_config": "fp8"}, "quantization_config must be an object, got 'fp8'"),
        (
            {"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": "lm_head"}},
            "modules_to_not_convert 'lm_head', which is no list of modules",
        ),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"group_0": None}}},
            "compressed-tensors with weights None of group_0",
        ),
        ({"model_type": "qwen3_moe", "mlp_only_layers": True}, "mlp_only_layers must be a list of integers, got True"),
    ],
)
def test_a_field_of_the_wrong_kind_is_an_error_that_names_it(change, message):
    experts = (
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64} if "model_type" in change else {}
    )
    with pytest.raises(ValueError, match=message):
        spec_from_config({**LLAMA, **experts, **change}, name="x", where="config.json")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("qwen3-0.6b", "head_dim"), ("qwen3-32b", "num_key_value_heads"), ("mixtral-8x7b", "num_key_value_heads"),
        ("gpt-oss-20b", "head_dim"), ("deepseek-r1", "n_routed_experts"), ("deepseek-r1", "first_k_dense_replace"),
        ("glm-5", "index_topk"),
    ],
)  # fmt: skip
def test_what_a_family_states_is_not_made_up_where_it_is_missing(name, key):
    """Without it Qwen3-0.6B had heads half as wide, DeepSeek-R1 no experts, and nothing said so."""
    data = {k: v for k, v in json.loads((CATALOGUE / f"{name}.json").read_text()).items() if k != key}
    with pytest.raises(ValueError, match=f"{key} is missing; a .* config.json states it"):
        spec_from_config(data, name="x", where="config.json")


def test_a_folder_without_a_config_is_said_to_have_none(tmp_path):
    with pytest.raises(ValueError, match=r"folder .* has no config\.json"):
        load_model(tmp_path)


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


def test_eight_bit_weights_do_not_narrow_the_cache():
    """Only what the checkpoint says of its cache does."""
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert spec_from_config({**LLAMA, "quantization_config": fp8}, name="x", where="config.json").kv_precision is None
    group = {"weights": {"type": "float", "num_bits": 8}, "input_activations": {"type": "float", "num_bits": 8}}
    tensors = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    without = spec_from_config({**LLAMA, "quantization_config": tensors}, name="x", where="config.json")
    assert (without.mlp_precision, without.kv_precision) == ("fp8", None)
    scheme = {"kv_cache_scheme": {"type": "float", "num_bits": 8}}
    told = spec_from_config({**LLAMA, "quantization_config": {**tensors, **scheme}}, name="x", where="config.json")
    assert told.kv_precision == "fp8"
    odd = {"kv_cache_scheme": {"type": "int", "num_bits": 4}}
    with pytest.raises(ValueError, match="quantisation of the KV cache in int4 is not modelled"):
        spec_from_config({**LLAMA, "quantization_config": {**tensors, **odd}}, name="x", where="config.json")


GLM = {
    "model_type": "glm4_moe", "vocab_size": 151552, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
    "attention_bias": True, "n_shared_experts": 1, "num_experts_per_tok": 8, "num_nextn_predict_layers": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("shapes", "params", "buffers", "active"),
    [
        (
            {"hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 92,
             "n_routed_experts": 160, "first_k_dense_replace": 3, "use_qk_norm": True}, 352_797_814_784, 14_240, 32e9,
        ),
        (
            {"hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 46,
             "n_routed_experts": 128, "first_k_dense_replace": 1, "use_qk_norm": False}, 106_852_245_504, 5_760, 12e9,
        ),
    ],
)  # fmt: skip
def test_glm_with_grouped_attention_has_the_parameters_that_transformers_counts(shapes, params, buffers, active):
    """GLM-4.5 and GLM-4.5-Air in transformers 5.19, which keeps the bias of the routers as buffers."""
    spec = spec_from_config({**GLM, **shapes}, name="x", where="config.json")
    assert spec.params == params + buffers
    assert spec.active_params - 2 * spec.embedding_params == pytest.approx(active, rel=0.02)
    assert sum(spec.layer_is_moe) == shapes["num_hidden_layers"] - shapes["first_k_dense_replace"]
    assert spec.mtp_layers == 1


def test_deepseek_with_sparse_attention_has_the_parameters_that_transformers_counts():
    """DeepSeek-V3.2 is DeepSeek-V3 with an indexer in each layer; transformers 5.19 counts 671,877,929,216."""
    data = json.loads((CATALOGUE / "deepseek-v3.json").read_text()) | {
        "model_type": "deepseek_v32", "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048,
    }  # fmt: skip
    spec = spec_from_config(data, name="x", where="config.json")
    assert spec.params == 671_877_929_216 + 58 * 256
    assert spec.window_tokens == 2048
    assert spec.kv_bytes_per_token() == 61 * (576 * 2 + 132)


# Elements of all parameters and of the routers' correction biases (buffers there) that transformers 5.19 makes on the meta
# device from the catalogue's config.json, the text model alone.
IN_TRANSFORMERS = {
    "minimax-m2.5": 228_689_748_992 + 15_872,
    "qwen3-0.6b": 596_049_920,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-32b": 32_762_123_264,
    "qwen3-8b": 8_190_735_360,
    "qwen3.5-397b-a17b": 396_346_350_336,
    "codellama-34b": 33_743_970_304,
    "deepseek-r1": 671_026_404_352 + 14_848,
    "llama-2-7b": 6_738_415_616,
    "llama-4-scout": 107_769_861_120,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "mistral-nemo-12b": 12_247_782_400,
    "mixtral-8x22b": 140_620_634_112,
    "mixtral-8x7b": 46_702_792_704,
    "kimi-k2.5": 1_026_408_209_408 + 23_040,
    "gpt-oss-120b": 116_829_156_672,
    "gpt-oss-20b": 20_914_757_184,
    "qwen2.5-7b": 7_615_616_512,
    "yi-34b": 34_388_917_248,
    "glm-5": 743_911_199_232 + 19_200,
}


def test_parameters_are_to_the_last_those_that_transformers_makes():
    assert {name: load_model(name).params for name in IN_TRANSFORMERS} == IN_TRANSFORMERS


STACKS = (("vllm", "b200"), ("sglang", "h200"), ("trtllm", "b200"), ("vllm-rocm", "mi355x"))


@pytest.mark.skipif(not SHARED2.is_dir(), reason=f"the shared configs are not at {SHARED2}")
@pytest.mark.parametrize("step", [10, pytest.param(1, marks=pytest.mark.slow(reason="whole tables of measurements"))])
def test_every_shared_config_loads_and_all_are_priced(step):
    folders = [each for root in (SHARED, SHARED2) for each in sorted(root.iterdir()) if each.is_dir()]
    for folder in folders[::step]:
        spec = load_model(folder)
        assert spec.params > 5e8
        assert spec.name == folder.name
        for stack, device in STACKS if step == 1 else STACKS[:1]:
            cost = Calibrated.for_stack(stack)(spec, load_device(device), ParallelConfig(tensor=4))
            prompt, decodes = Totals(1000, 1000, 1, 500_500, 0, 0, 0, 1), Totals(64, 0, 0, 0, 0, 64, 64_000, 64)
            assert 1e-3 < cost.iteration_s(decodes) < 1.0, (folder.name, stack)
            assert 1e-3 < cost.iteration_s(prompt) < 1.0, (folder.name, stack)


# Elements of the released checkpoints that their pages on the hub state, written from knowledge.
RELEASED = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwq-32b": 32_763_876_352,
    "qwen3-4b": 4_022_468_096,
    "deepseek-r1-distill-qwen-1.5b": 1_777_088_000,
    "deepseek-r1-distill-qwen-7b": 7_615_616_512,
    "deepseek-r1-distill-qwen-14b": 14_770_033_664,
    "deepseek-r1-distill-qwen-32b": 32_763_876_352,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "phi-3-mini": 3_821_079_552,
    "phi-3.5-mini": 3_821_079_552,
    "phi-3-medium": 13_960_238_080,
    "phi-4": 14_659_507_200,
    "phi-4-reasoning": 14_659_507_200,
    "phi-4-mini": 3_836_021_760,
    "mistral-7b-v0.2": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-small-22b": 22_247_282_688,
    "mistral-small-24b": 23_572_403_200,
    "mistral-small-3.1-24b": 23_572_403_200,
    "ministral-8b": 8_019_808_256,
    "mistral-large-123b": 122_610_069_504,
    "codellama-7b": 6_738_546_688,
    "codellama-13b": 13_016_028_160,
    "codellama-70b": 68_976_910_336,
    "tinyllama-1.1b": 1_100_048_384,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "smollm3-3b": 3_075_098_624,
    "yi-1.5-6b": 6_061_035_520,
    "yi-1.5-9b": 8_829_407_232,
    "yi-1.5-34b": 34_388_917_248,
    "solar-10.7b": 10_731_524_096,
    "falcon3-1b": 1_669_408_768,
    "falcon3-3b": 3_227_655_168,
    "falcon3-7b": 7_455_550_464,
    "falcon3-10b": 10_305_653_760,
    "deepseek-llm-7b": 6_910_365_696,
    "deepseek-coder-6.7b": 6_740_512_768,
    "deepseek-coder-33b": 33_342_991_360,
    "granite-3.3-2b": 2_533_539_840,
    "granite-3.3-8b": 8_170_864_640,
    "granite-3.1-2b": 2_533_531_648,
    "granite-3.1-8b": 8_170_848_256,
    "granite-3.1-1b-a400m": 1_334_628_352,
    "olmo-2-1b": 1_484_916_736,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-13b": 13_716_198_400,
    "olmo-2-32b": 32_234_279_936,
    "olmo-3-7b": 7_298_011_136,
    "olmo-3-32b": 32_233_522_176,
    "olmoe-1b-7b": 6_919_161_856,
    "starcoder2-3b": 3_030_371_328,
    "starcoder2-7b": 7_173_923_840,
    "starcoder2-15b": 15_957_889_024,
    "command-r-35b": 34_980_831_232,
    "command-r-32b": 32_296_476_672,
    "command-r-plus-104b": 103_810_674_688,
    "command-a-111b": 111_057_580_032,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma-2-2b": 2_614_341_888,
    "gemma-3-270m": 268_098_176,
    "glm-4-9b": 9_400_279_040,
    "glm-4-9b-chat": 9_399_951_360,
    "deepseek-v2": 235_741_434_880,
    "internlm2.5-7b": 7_737_708_544,
    "internlm2.5-20b": 19_861_149_696,
    "seed-oss-36b": 36_151_104_512,
    "exaone-3.5-7.8b": 7_818_448_896,
    "exaone-3.5-32b": 32_003_200_000,
    "exaone-4.0-32b": 32_003_216_384,
}


def test_parameters_are_to_the_last_those_of_the_released_checkpoint():
    assert {name: load_model(name).params for name in RELEASED} == RELEASED


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"the shared configs are not at {SHARED}")
@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("Qwen--Qwen3.5-397B-A17B", "qwen3.5-397b-a17b"),
        ("meta-llama--Llama-4-Scout-17B-16E-Instruct", "llama-4-scout"),
        ("openai--gpt-oss-120b", "gpt-oss-120b"),
    ],
)
def test_the_catalogue_agrees_with_the_config_of_the_hub(folder, name):
    hub, own = load_model(SHARED / folder), load_model(name)
    assert (hub.params, hub.layer_attention, hub.layer_is_moe) == (own.params, own.layer_attention, own.layer_is_moe)
    assert (hub.attention, hub.linear_attention, hub.experts) == (own.attention, own.linear_attention, own.experts)
    assert hub.window_tokens == own.window_tokens


# Gemma 2 (arXiv 2408.00118) and Gemma 3 (arXiv 2503.19786): parameters in millions, beside the embedding's.
GEMMA = {
    "gemma-2-9b": 8324,
    "gemma-2-27b": 26047,
    "gemma-3-1b": 698,
    "gemma-3-4b": 3209,
    "gemma-3-12b": 10759,
    "gemma-3-27b": 25600,
}


@pytest.mark.parametrize("name", GEMMA)
def test_gemma_agrees_with_the_table_of_its_report(name):
    spec = load_model(name)
    assert (spec.params - spec.embedding_params) / 1e6 == pytest.approx(GEMMA[name], rel=1e-3)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    # Model cards: meta-llama/Llama-4-*, Qwen/Qwen3-Next-80B-A3B-Instruct. Llama's totals count the image encoder (0.9
    # billion) too; Qwen's 3 billion active ones are rounded, and leave the embedding and the head out.
    [("llama-4-scout", 108.6, 17.2), ("llama-4-maverick", 401.6, 17.2), ("qwen3-next-80b-a3b", 80, 3.9)],
)
def test_hybrids_agree_with_their_cards(name, total, active):
    spec = load_model(name)
    assert spec.params / 1e9 == pytest.approx(total, rel=0.01)
    assert spec.active_params / 1e9 == pytest.approx(active, rel=0.01)


def kinds(config, **change):
    data = json.loads(model_catalogue()[config].read_text())
    data["text_config"] = {**data["text_config"], **change}
    return spec_from_config(data, name="x", where="config.json")


def test_layers_say_what_they_attend_to():
    oss, gemma, qwen = (load_model(name) for name in ("gpt-oss-20b", "gemma-3-27b", "qwen3-next-80b-a3b"))
    assert oss.layer_attention == ("window", "full") * 12
    assert gemma.layer_attention == (*(("window",) * 5 + ("full",)) * 10, "window", "window")
    assert load_model("gemma-2-9b").layer_attention == ("window", "full") * 21
    assert qwen.layer_attention == (("linear",) * 3 + ("full",)) * 12
    scout, maverick = load_model("llama-4-scout"), load_model("llama-4-maverick")
    assert scout.layer_attention == maverick.layer_attention == (("chunked",) * 3 + ("full",)) * 12
    assert scout.is_chunked
    assert all(scout.layer_is_moe)
    assert maverick.layer_is_moe == (False, True) * 24
    assert not any(load_model("deepseek-v3").layer_is_moe[:3])
    assert all(load_model("deepseek-v3").layer_is_moe[3:])


def test_layer_kinds_follow_the_keys_of_the_config():
    assert kinds("llama-4-scout", no_rope_layers=[1, 0] * 24).layer_attention == ("chunked", "full") * 24
    assert kinds("llama-4-scout", attention_chunk_size=None).layer_attention == ("full",) * 48
    assert kinds("llama-4-scout", attention_chunk_size=None).window_tokens is None
    assert kinds("llama-4-maverick", moe_layers=[47]).layer_is_moe == (False,) * 47 + (True,)
    assert kinds("gemma-3-4b", sliding_window_pattern=2).layer_attention == ("window", "full") * 17
    types = ["full_attention"] * 30 + ["linear_attention"] * 30
    assert kinds("qwen3.5-397b-a17b", layer_types=types).layer_attention == ("full",) * 30 + ("linear",) * 30
    assert kinds("qwen3.5-397b-a17b", mamba_ssm_dtype="bfloat16").linear_attention.state_bytes == 2.0
    # What the hub's gemma-3-4b-it leaves to the defaults of its class.
    short = json.loads(model_catalogue()["gemma-3-4b"].read_text())
    for key in ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings"):
        del short["text_config"][key]
    assert spec_from_config(short, name="x", where="config.json").params == load_model("gemma-3-4b").params


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        ("gemma-3-4b", {"layer_types": ["linear_attention"] * 34}, "hybrid with linear attention layers"),
        ("llama-4-scout", {"layer_types": ["sliding_attention"] * 48}, "hybrid with sliding attention layers"),
        ("qwen3.5-397b-a17b", {"layer_types": ["mamba"] * 60}, "hybrid with mamba layers"),
        ("gemma-3-4b", {"layer_types": ["full_attention"]}, "layer_types names 1 layers, num_hidden_layers says 34"),
        ("llama-4-scout", {"no_rope_layers": [1]}, "no_rope_layers names 1 layers"),
        ("qwen3.5-397b-a17b", {"mamba_ssm_dtype": "int8"}, "mamba_ssm_dtype must be one of"),
        ("gemma-3-4b", {"use_bidirectional_attention": True}, "attention in both directions"),
        ("gemma-3-4b", {"sliding_window": None}, "sliding_window is missing, and layers attend to a sliding window"),
    ],
)
def test_layers_that_cannot_be_modelled_are_refused(config, change, message):
    with pytest.raises(ValueError, match=message):
        kinds(config, **change)


def test_linear_attention_by_its_formula():
    """Qwen3.5-397B: 16 key heads and 64 value heads of 128, a convolution of 4 taps."""
    spec = load_model("qwen3.5-397b-a17b")
    keys, values = 16 * 128, 64 * 128
    project = 4096 * (keys + keys + values + values + 64 + 64) + values * 4096
    assert spec.linear_attention_params == project + 4 * (keys + keys + values) + 64 + 64 + 128
    assert spec.state_bytes_per_sequence == 45 * (64 * 128 * 128 * 4 + 3 * (2 * keys + values) * 2)


@pytest.mark.parametrize(
    ("hub", "name", "positions"),
    [
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b", 8192),
        ("meta-llama/Meta-Llama-3-70B", "llama-3-70b", 8192),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b", 131072),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.1-70b", 131072),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b", 32768),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3", 163840),
    ],
)
def test_a_server_is_started_with_the_name_of_the_hub(hub, name, positions):
    model = load_model(hub)
    assert (model.name, model.max_positions) == (name, positions)


def test_a_folder_called_as_a_model_of_the_catalogue_is_read_itself(tmp_path):
    folder = tmp_path / "llama-3.1-8b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 2}))
    assert load_model(folder).n_layers == 2


def test_layers_that_take_tokens_from_an_earlier_one_have_no_indexer():
    """GLM-5.2 has 21 indexers in 78 layers, and GLM-5, of the same shape, one in each."""
    one, other = load_model("glm-5.2"), load_model("glm-5")
    assert [sum(each.layer_has_indexer) for each in (one, other)] == [21, 78]
    assert other.params - one.params == 57 * one.indexer_params == 57 * (2048 * 32 * 128 + 6144 * (128 + 32) + 256)
    assert other.kv_bytes_per_token() - one.kv_bytes_per_token() == 57 * 132
    assert other.weight_bytes() - one.weight_bytes() == 57 * one.indexer_params * 2
    assert one.mtp_draft().layer_has_indexer == (True,)
    stages = [stage_work(one, ParallelConfig(tensor=8, pipeline=2), stage) for stage in (0, 1)]
    assert [[shape.layers for shape in stage.attention if shape.kind == "indexer"] for stage in stages] == [[12], [9]]
    assert [[op.layers for op in stage.linears if op.name == "index_q"] for stage in stages] == [[12], [9]]


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        (["full"] * 77, "indexer_types are of 77 layers, and the model has 78"),
        (["shared"] * 78, "indexer_types begin with shared, and no layer before it has chosen tokens"),
        (["full", "none"] * 39, "indexer_types 'none'; known are full and shared"),
        ("full", "indexer_types must be a list of texts"),
    ],
)
def test_indexers_that_cannot_be_are_refused(kinds, said):
    data = json.loads((CATALOGUE / "glm-5.2.json").read_text()) | {"indexer_types": kinds}
    with pytest.raises(ValueError, match=f"config.json: {said}"):
        spec_from_config(data, name="x", where="config.json")
