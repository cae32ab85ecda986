"""Number formats of checkpoints, as they are published: which matrices a format is of."""

import json

import pytest

from hwmodels.calibrated import Calibrated
from hwmodels.deployment import deploy
from hwmodels.model import CATALOGUE, load_model, spec_from_config
from hwmodels.totals import Totals

DENSE = json.loads((CATALOGUE / "llama-3.1-8b.json").read_text())
SPARSE = json.loads((CATALOGUE / "qwen3-30b-a3b.json").read_text())
LATENT = {
    k: v for k, v in json.loads((CATALOGUE / "deepseek-r1.json").read_text()).items() if k != "quantization_config"
}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def read(config, quantised=None, side=None, **options):
    data = config if quantised is None else {**config, "quantization_config": quantised}
    return spec_from_config(data, name="x", where="config.json", quant_config=side, **options)


def tensors(*groups, ignore=("lm_head",)):
    """A checkpoint of compressed-tensors whose groups are (targets, weights, activations)."""
    named = {
        f"group_{i}": {"targets": targets, "weights": weights, "input_activations": activations}
        for i, (targets, weights, activations) in enumerate(groups)
    }
    return {"quant_method": "compressed-tensors", "config_groups": named, "ignore": [*ignore]}


def number(kind, bits, **more):
    return {"type": kind, "num_bits": bits, **more}


def formats(spec):
    return spec.attention_precision, spec.mlp_precision, spec.expert_precision


@pytest.mark.parametrize(("scheme", "fmt"), [("static", "fp8_static"), ("dynamic", "fp8")])
def test_a_checkpoint_says_whether_scales_of_activations_are_stated(scheme, fmt):
    assert read(DENSE, {"quant_method": "fp8", "activation_scheme": scheme}).mlp_precision == fmt


@pytest.mark.parametrize(
    ("weights", "activations", "fmt"),
    [
        (number("float", 8, strategy="channel"), number("float", 8, dynamic=True), "fp8"),
        (number("float", 8, strategy="tensor"), number("float", 8, dynamic=False), "fp8_static"),
        (number("float", 8, strategy="block", block_structure=[128, 128]), number("float", 8), "fp8_block"),
        (number("int", 8), number("int", 8), "int8"),
        (number("int", 4, group_size=128), None, "int4"),
        (number("int", 4, group_size=32), None, "int4_g32"),
        (number("int", 4, group_size=128), number("float", 8), "int4_fp8"),
        (number("float", 4, group_size=16), number("float", 4, group_size=16), "nvfp4"),
        (number("float", 4, group_size=32), None, "mxfp4"),
        (number("float", 4, group_size=16), None, "nvfp4_a16"),
    ],
)
def test_schemes_of_compressed_tensors(weights, activations, fmt):
    assert formats(read(DENSE, tensors((["Linear"], weights, activations))))[:2] == (fmt, fmt)


@pytest.mark.parametrize(
    ("weights", "activations", "words"),
    [
        (number("int", 8), None, "int8 with 16-bit activations"),
        (number("float", 8), None, "float8 with 16-bit activations"),
        (number("float", 8, group_size=32), number("float", 8), "float8 in groups of 32 with float8 activations"),
        (number("int", 4), number("int", 8), "int4 with int8 activations"),
        (number("float", 4, group_size=64), None, "float4 in groups of 64 with 16-bit activations"),
        (number(["int"], 4), None, "with 16-bit activations"),
    ],
)
def test_schemes_whose_arithmetic_is_not_modelled_are_refused(weights, activations, words):
    """Weights alone in 8 bits are multiplied in 16: they would be priced as twice as fast arithmetic."""
    with pytest.raises(ValueError, match=f"{words} is not modelled; set another format in its place"):
        read(DENSE, tensors((["Linear"], weights, activations)))


@pytest.mark.parametrize(
    ("algorithm", "fmt"),
    [
        ("NVFP4", "nvfp4"),
        ("FP8", "fp8_static"),
        ("FP8_PB_WO", "fp8_block"),
        ("fp8_pb_wo", "fp8_block"),
        ("W4A8_AWQ", "int4_fp8"),
    ],
)
def test_modelopt_is_read_from_a_config_as_from_the_file_beside_it(algorithm, fmt):
    ignore = ["lm_head", "model.layers.*.self_attn*"]
    scheme = {"kv_cache_scheme": number("float", 8)}
    within = read(DENSE, {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ignore, **scheme})
    table = {"quant_algo": algorithm, "exclude_modules": ignore, "kv_cache_quant_algo": "FP8"}
    beside = read(DENSE, side={"quantization": table})
    assert formats(within) == formats(beside) == ("bf16", fmt, fmt)
    assert within.kv_precision == beside.kv_precision == "fp8"


def test_modelopt_may_state_a_format_for_each_module():
    layers = {
        f"model.layers.{i}.{module}": {"quant_algo": algorithm}
        for i in range(64)
        for module, algorithm in (("self_attn.q_proj", "FP8"), ("mlp.up_proj", "W4A16_NVFP4"))
    }
    mixed = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    spec = read(DENSE, mixed)
    assert (spec.attention_precision, spec.mlp_precision) == ("fp8_static", "nvfp4_a16")
    for wrong in ({}, {"model.layers.0.mlp.up_proj": {"quant_algo": "FP7"}}, {"model.layers.0.mlp.up_proj": None}):
        with pytest.raises(ValueError, match=r"of ModelOpt.* is not modelled; set another format in its place"):
            read(DENSE, {**mixed, "quantized_layers": wrong})
    head = {**mixed, "quantized_layers": {**layers, "lm_head": {"quant_algo": "W4A16_NVFP4"}}}
    assert any("narrow LM head" in note for note in read(DENSE, head).notes)


def test_a_file_that_says_the_cache_alone_leaves_the_weights_to_the_config():
    """TensorRT-LLM takes a hf_quant_config.json of one line beside a released checkpoint."""
    spec = read(DENSE, {**FP8, "weight_block_size": [128, 128]}, side={"quantization": {"kv_cache_quant_algo": "FP8"}})
    assert (spec.mlp_precision, spec.kv_precision) == ("fp8_block", "fp8")


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
@pytest.mark.parametrize("module", ["model.layers.{}.self_attn", "model.layers.{}.self_attn.q_proj"])
def test_modules_that_are_left_alone_stay_in_sixteen_bits(key, module):
    spec = read(DENSE, {**FP8, key: ["lm_head", *(module.format(i) for i in range(32))]})
    assert formats(spec)[:2] == ("bf16", "fp8")
    assert spec.notes == ()


def test_layers_that_differ_are_priced_as_most_and_said():
    spec = read(DENSE, {**FP8, "modules_to_not_convert": ["model.layers.0.mlp", "model.layers.31.mlp"]})
    assert formats(spec)[:2] == ("fp8", "fp8")
    assert spec.notes == (
        "The checkpoint has the dense or shared MLP of 2 of 32 layers in bf16; priced as the others, in fp8.",
    )


def test_a_router_is_no_mlp():
    spec = read(SPARSE, {**FP8, "modules_to_not_convert": [f"model.layers.{i}.mlp.gate" for i in range(48)]})
    assert formats(spec) == ("fp8", "fp8", "fp8")
    assert spec.notes == ()


def test_targets_say_what_is_quantised():
    eight = (number("float", 8), number("float", 8))
    four = (number("float", 4, group_size=16), number("float", 4))
    alone = read(SPARSE, tensors(([r"re:.*mlp\.experts.*"], *four)))
    assert formats(alone) == ("bf16", "bf16", "nvfp4")
    both = read(SPARSE, tensors((["Linear"], *eight), ([r"re:.*mlp\.experts.*"], *four)))
    assert formats(both) == ("fp8", "fp8", "nvfp4")
    assert formats(read(LATENT, tensors((["Linear"], *four), ignore=["re:.*shared_experts.*", "re:.*mlp.gate$"]))) == (
        "nvfp4", "bf16", "nvfp4",
    )  # fmt: skip


def test_only_experts_are_in_mxfp4():
    assert formats(load_model("gpt-oss-120b")) == ("bf16", "bf16", "mxfp4")
    with pytest.raises(ValueError, match="mxfp4 of a model without experts is not modelled"):
        read(DENSE, {"quant_method": "mxfp4"})


def test_experts_of_w4afp8_are_four_bits_that_eight_bit_activations_meet():
    """SGLang's W4AFP8 of DeepSeek: expert weights of half a byte at the FP8 rate, all else FP8 in blocks."""
    spec = read(LATENT, {"quant_method": "w4afp8"})
    assert formats(spec) == ("fp8_block", "fp8_block", "int4_fp8")
    released = load_model("deepseek-r1")
    experts = 58 * 256 * 3 * 7168 * 2048
    assert released.weight_bytes() - spec.weight_bytes() == pytest.approx(experts * (1 + 4 / 128**2 - 0.5 - 2 / 128))

    def step_s(model, totals):
        cost = Calibrated.for_stack("sglang")
        return deploy(model=model, hardware="h200", parallel={"tensor": 8}, cost=cost).cost.iteration_s(totals)

    decode = Totals(rows=64, decode_seqs=64, decode_kv_tokens=64000, logit_rows=64)
    assert step_s(spec, decode) < 0.85 * step_s(released, decode)


@pytest.mark.parametrize(
    ("quantised", "given"),
    [
        ({"quant_method": "bitsandbytes"}, "precision"),
        ({**FP8, "kv_cache_scheme": number("int", 4)}, "kv_precision"),
    ],
)
def test_what_is_not_modelled_gives_way_to_a_format_of_ones_own(tmp_path, quantised, given):
    (tmp_path / "config.json").write_text(json.dumps({**DENSE, "quantization_config": quantised}))
    with pytest.raises(ValueError, match=rf"not modelled; set another format in its place \({given}: fp8"):
        deploy(model=tmp_path, hardware="h100-sxm")
    found = deploy(model=tmp_path, hardware="h100-sxm", **{given: "fp8"})
    assert formats(found.model)[:2] == ("fp8", "fp8")
    assert found.kv_precision == ("fp8" if given == "kv_precision" else "bf16")
