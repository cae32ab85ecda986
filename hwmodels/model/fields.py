"""Fields of a config.json, with complaints by file and field; which families are modelled, and what of them is not."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any


class Config:
    """A config.json that complains by file and field."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data, self.where = data, where

    def has(self, key: str) -> bool:
        return self.data.get(key) is not None

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        value = self.data.get(key)
        if value is None:
            if default is None:
                raise ValueError(
                    f"{self.where}: {key} is missing; a {self.data.get('model_type')} config.json states it"
                )
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{self.where}: {key} must be an integer of at least {least}, got {value!r}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.data.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ValueError(f"{self.where}: {key} must be true or false, got {value!r}")
        return value

    def listed(self, key: str, kind: type[int] | type[str]) -> list[Any] | None:
        """A list of integers or of texts; None where there is none."""
        value = self.data.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or any(isinstance(each, bool) or not isinstance(each, kind) for each in value):
            what = "integers" if kind is int else "texts"
            raise ValueError(f"{self.where}: {key} must be a list of {what}, got {value!r}")
        return value

    def dtype(self, *keys: str, default: str = "bfloat16") -> str:
        """The number format that the first stated of *keys* says."""
        for key in keys:
            if self.data.get(key):
                value = self.data[key]
                if not isinstance(value, str) or value not in DTYPES:
                    raise ValueError(f"{self.where}: {key} must be one of {', '.join(DTYPES)}, got {value!r}")
                return DTYPES[value]
        return DTYPES[default]


DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
READ_AS: Mapping[str, str] = {
    **dict.fromkeys(("internlm2", "internlm3", "granite", "exaone"), "llama"),
    **dict.fromkeys(
        ("mimo", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_5_omni_text"), "qwen2"
    ),
    "ministral3": "mistral",
    "qwen3_vl_text": "qwen3",
    **dict.fromkeys(("qwen3_vl_moe_text", "qwen3_omni_moe_text"), "qwen3_moe"),
    "step3p7": "step3p5",
    "deepseek_ref": "deepseek_v4",
    "minimax_m3_vl": "minimax_m3",
    "minimax_m3_vl_text": "minimax_m3",
}
"""Families whose language models have the layers of another: a name, a position embedding or scalars tell them apart."""
_STEP = {
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "num_experts",
    "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim",
}
SYNONYMS: Mapping[str, Mapping[str, str]] = {
    "exaone": {"num_layers": "num_hidden_layers"},
    "nemotron_h": {"attention_head_dim": "head_dim"},
    "kimi_linear": {
        "num_experts": "n_routed_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
    },
    "ernie4_5_moe": {"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"},
    "step3p5": _STEP,
    "step3p7": _STEP,
}
"""Fields that a family's config.json has under names of its own."""
GEMMA = {"gemma2", "gemma3_text", "gemma4_text"}
OLMO = {"olmo2", "olmo3", "olmoe"}
COHERE = {"cohere", "cohere2"}
EXPERTS = {
    "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "minimax_m2", "glm4_moe", "granitemoe", "olmoe", "ernie4_5_moe",
    "llama4_text", "qwen3_next", "qwen3_5_moe_text", "gemma4_text", "mimo_v2_flash", "step3p5", "minimax_m3",
}  # fmt: skip
"""Mixtures of experts without latent attention."""
GATED = GEMMA | OLMO | COHERE | EXPERTS - {"qwen3_next", "qwen3_5_moe_text"} | {
    "llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "glm", "glm4", "smollm3", "exaone4", "seed_oss", "starcoder2",
    "nemotron-nas",
}  # fmt: skip
SPARSE = {"deepseek_v32", "glm_moe_dsa"}
"""Latent attention to the tokens that an indexer chooses."""
LATENT = {"deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "kimi_linear"} | SPARSE
AFTER_DENSE = LATENT | {"glm4_moe"}
"""Experts behind the first `first_k_dense_replace` layers, beside shared ones of the same width."""
PLAIN = {"gpt2", "opt", "bloom", "bert"}
HYBRID = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
"""Gated delta nets between layers of full attention."""
STATE_SPACE = {"nemotron_h"}
"""Layers of Mamba-2, of attention, of experts and of plain MLPs, one of them each."""
COMPRESSED = {"deepseek_v4"}
"""Attention to compressed tokens."""
FAMILIES = tuple(sorted(GATED | LATENT | PLAIN | HYBRID | STATE_SPACE | COMPRESSED | set(READ_AS)))
_TIED = {"tie_word_embeddings": True}
CLASS_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma2": {"vocab_size": 256000, "head_dim": 256, "sliding_window": 4096},
    "gemma3_text": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "max_position_embeddings": 131072,
    },
    "gpt_oss": {"attention_bias": True},
    "seed_oss": {"attention_bias": True},
    "glm": {"attention_bias": True},
    "starcoder2": {"use_bias": True, **_TIED},
    **dict.fromkeys(("gemma", "cohere", "cohere2", "smollm3", "ernie4_5_moe"), _TIED),
}
"""Keys that a family's config.json leaves out on the hub: the defaults of its class in transformers 5.23."""
_HEADS = ("num_key_value_heads", "head_dim")
_DEEPSEEK = ("n_routed_experts", "n_shared_experts", "first_k_dense_replace", "q_lora_rank")
STATED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(GATED - {"llama", "nemotron-nas", *GEMMA}, _HEADS[:1]),
    "gemma4_text": (*_HEADS, "layer_types", "global_head_dim", "enable_moe_block"),
    "deepseek_v4": (
        *("head_dim", "qk_rope_head_dim", "q_lora_rank", "o_groups", "o_lora_rank", "index_topk", "index_n_heads"),
        *("index_head_dim", "sliding_window", "compress_ratios", "hc_mult", "num_hash_layers", "n_shared_experts"),
    ),
    "nemotron-nas": ("block_configs",),
    "minimax_m3": (
        *_HEADS,
        "dense_intermediate_size",
        "shared_intermediate_size",
        "moe_layer_freq",
        "sparse_attention_config",
    ),
    "nemotron_h": (*_HEADS, "ssm_state_size", "mamba_num_heads", "mamba_head_dim", "n_groups", "conv_kernel"),
    "mimo_v2_flash": (*_HEADS, "v_head_dim", "swa_num_key_value_heads", "hybrid_layer_pattern", "moe_layer_freq"),
    "step3p5": (*_HEADS, "layer_types", "share_expert_dim"),
    **dict.fromkeys(("qwen3", "gpt_oss", "minimax_m2", "llama4_text", "gemma", "seed_oss", *sorted(HYBRID)), _HEADS),
    **dict.fromkeys(LATENT, _DEEPSEEK),
    **dict.fromkeys(SPARSE, (*_DEEPSEEK, "index_topk")),
    "kimi_linear": (*_DEEPSEEK, "linear_attn_config"),
}
"""Fields that a family's config.json states, null or not: where one is left out the classes of transformers have each a number of
their own for it, which would be of another model."""
_LAYER_KINDS = {
    **{family: {"full_attention", "linear_attention"} for family in HYBRID},
    "llama4_text": {"full_attention", "chunked_attention"},
    **{family: {"deepseek_sparse_attention"} for family in SPARSE},
}
"""`layer_types` that a family is modelled with, where they are other than full and sliding attention."""


def object_of(value: Any, what: str) -> Mapping[str, Any]:
    """An object of a config, empty where there is none; ValueError for anything else."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} must be an object, got {value!r}")
    return value


def _refuse_attention(data: Mapping[str, Any], family: str, refuse: Callable[[str], None]) -> None:
    # Gemma 4's tokens of one image see each other, and tokens of text what is before them.
    if data.get("use_bidirectional_attention") not in (None, False, "vision"):
        refuse("attention in both directions (use_bidirectional_attention)")
    # MiMo-V2 states its window a second time under the name of a chunk.
    if data.get("attention_chunk_size") and family not in ("llama4_text", "mimo_v2_flash"):
        refuse(f"chunked attention (attention_chunk_size {data['attention_chunk_size']})")
    if family not in LATENT and data.get("kv_lora_rank"):
        refuse(f"latent attention (kv_lora_rank) in a {family} model")
    if READ_AS.get(family, family) not in SPARSE | COMPRESSED and data.get("index_topk"):
        refuse(f"sparse attention (index_topk) in a {family} model")


def refuse_what_is_not_modelled(c: Config, family: str) -> None:
    """ValueError, which begins with the config's name, for the first thing in it that would be priced wrongly."""
    data, where = c.data, c.where

    def refuse(what: str) -> None:
        raise ValueError(f"{where}: {what} is not modelled; choose another model (see `rooftrace models`)")

    if data.get("is_encoder_decoder") or data.get("add_cross_attention"):
        refuse("an encoder-decoder with cross-attention")
    if family not in FAMILIES:
        near = difflib.get_close_matches(family, FAMILIES, n=2)
        hint = f"nearest: {', '.join(near)}" if near else f"modelled: {', '.join(FAMILIES)}"
        refuse(f"model_type {family!r} ({hint})")
    _refuse_attention(data, family, refuse)
    for key in data:
        if (
            any(word in key for word in ("mamba", "ssm_", "rwkv", "hyena"))
            and family not in HYBRID | STATE_SPACE
            and data[key]
        ):
            refuse(f"a state-space layer ({key})")
    kinds = set(c.listed("layer_types", str) or ()) - _LAYER_KINDS.get(family, {"full_attention", "sliding_attention"})
    if kinds:
        refuse(f"a hybrid with {', '.join(sorted(k.replace('_', ' ') for k in kinds))} layers ({family})")
    for key in ("num_kv_shared_layers", "hidden_size_per_layer_input"):
        if data.get(key):
            refuse(f"a layer that takes its cache or part of its input from elsewhere ({key})")
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        if READ_AS.get(family, family) not in EXPERTS | AFTER_DENSE | STATE_SPACE | COMPRESSED and data.get(key):
            refuse(f"a mixture of experts ({key}) in a {family} model")
