"""Every model of the catalogue has the parameters that transformers makes from its config.json, on the meta device."""

import json

import pytest

from hwmodels.model import load_model, model_catalogue
from hwmodels.model.fields import PLAIN

pytestmark = [pytest.mark.torch, pytest.mark.slow(reason="transformers is imported, which takes seconds")]

AS = {
    # Their code is on the hub alone; transformers has these shapes under another name.
    "internlm2": "llama", "exaone": "llama", "mimo": "qwen2", "kimi_k2": "deepseek_v3", "minimax_m3": "minimax_m3_vl_text",
    # Where transformers makes the text model with the talker alone.
    "qwen2_5_omni_text": "qwen2", "qwen3_omni_moe_text": "qwen3_moe",
}  # fmt: skip
LAYERS = 6
"""Layers of a model from its front: building all of them takes minutes. Each kind of layer is among them."""


def shortened(config, layers):
    """The text model's config with so many layers, and the same kinds of them."""
    data = {key: value for key, value in config.items() if key not in ("rooftrace", "quantization_config")}
    for within in ("thinker_config", "text_config"):
        data = {**{key: value for key, value in data.items() if key != within}, **data.get(within, {})}
    data.pop("quantization_config", None)
    by_layer = (
        "layer_types",
        "mlp_layer_types",
        "indexer_types",
        "no_rope_layers",
        "hybrid_layer_pattern",
        "moe_layer_freq",
    )
    for key in by_layer:
        if isinstance(data.get(key), list):
            data[key] = data[key][:layers]
    if sparse := data.get("sparse_attention_config"):
        cut = {key: value[:layers] if isinstance(value, list) else value for key, value in sparse.items()}
        data["sparse_attention_config"] = cut
    if data.get("hybrid_override_pattern"):
        data["hybrid_override_pattern"] = data["hybrid_override_pattern"][:layers]
    if data["model_type"] == "exaone4":
        data["layer_types"] = ["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention"] * (layers - 4)
    return {**data, "num_hidden_layers": layers}


def in_transformers(data):
    """Elements of all parameters, and of the routers' biases, which are buffers there; the head apart."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    kind = AS.get(data["model_type"], data["model_type"])
    config = transformers.AutoConfig.for_model(kind, **{k: v for k, v in data.items() if k != "model_type"})
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    biases = sum(each.numel() for name, each in model.named_buffers() if "correction_bias" in name)
    return sum(each.numel() for each in model.parameters()) + biases


CHECKED = [name for name, path in model_catalogue().items() if json.loads(path.read_text())["model_type"] not in PLAIN]


@pytest.mark.parametrize("name", CHECKED)
def test_a_model_has_the_parameters_that_transformers_makes(name, tmp_path):
    data = shortened(json.loads(model_catalogue()[name].read_text()), LAYERS)
    (tmp_path / "config.json").write_text(json.dumps(data))
    spec = load_model(tmp_path)
    head = 0 if spec.tied_embeddings else spec.embedding_params
    assert spec.params - head == in_transformers(data)
