"""From a HuggingFace config.json to a model, family by family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hwmodels.model.fields import DTYPES, HYBRID, LATENT, PLAIN, Config, refuse_what_is_not_modelled
from hwmodels.model.quantisation import quantisation
from hwmodels.model.spec import Attention, Experts, LatentAttention, LinearAttention, ModelSpec


def _windows(c: Config, family: str, n_layers: int) -> tuple[int | None, tuple[bool, ...]]:
    window = c.integer("sliding_window", 0)
    none = (False,) * n_layers
    if not window or family in PLAIN:
        return None, none
    types = c.data.get("layer_types")
    if types is not None:
        if len(types) != n_layers:
            raise ValueError(f"{c.where}: layer_types names {len(types)} layers, num_hidden_layers says {n_layers}")
        windowed = tuple(t == "sliding_attention" for t in types)
    elif family == "gpt_oss":
        raise ValueError(f"{c.where}: layer_types is missing; a gpt_oss config.json states it")
    elif family in ("qwen2", "qwen3", "qwen3_moe"):
        if not c.flag("use_sliding_window", False):
            return None, none
        first = c.integer("max_window_layers", n_layers, least=0)
        windowed = tuple(i >= first for i in range(n_layers))
    else:
        windowed = (True,) * n_layers
    return (window, windowed) if any(windowed) else (None, none)


def _moe_layers(c: Config, n_layers: int, family: str) -> tuple[bool, ...]:
    if family in LATENT:
        first = c.integer("first_k_dense_replace", 0, least=0)
        step = c.integer("moe_layer_freq", 1)
        return tuple(i >= first and i % step == 0 for i in range(n_layers))
    if family == "qwen3_moe":
        step = c.integer("decoder_sparse_step", 1)
        dense = set(c.data.get("mlp_only_layers") or ())
        return tuple((i + 1) % step == 0 and i not in dense for i in range(n_layers))
    return (True,) * n_layers


def _gated_attention(c: Config, family: str, hidden: int) -> Attention:
    heads = c.integer("num_attention_heads")
    if not c.has("head_dim") and hidden % heads:
        raise ValueError(
            f"{c.where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}; state head_dim"
        )
    kv_heads, head_dim = c.integer("num_key_value_heads", heads), c.integer("head_dim", max(1, hidden // heads))
    if heads % kv_heads:
        raise ValueError(f"{c.where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    norm = 0
    if family in ("qwen3", "qwen3_moe", "qwen3_5_moe_text"):
        norm = 2 * head_dim
    elif c.flag("use_qk_norm", False):
        norm = (heads + kv_heads) * head_dim if c.data.get("qk_norm_type") == "per_layer" else 2 * head_dim
    bias = c.flag("attention_bias", False)
    return Attention(
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        qkv_bias=bias or family == "qwen2",
        out_bias=bias,
        qk_norm_params=norm,
        sink_params=heads if family == "gpt_oss" else 0,
        output_gate=c.flag("attn_output_gate", False),
    )


def _latent_attention(c: Config) -> LatentAttention:
    topk = c.integer("index_topk", 0)
    return LatentAttention(
        n_heads=c.integer("num_attention_heads"),
        q_lora_rank=c.integer("q_lora_rank", 0),
        kv_lora_rank=c.integer("kv_lora_rank"),
        nope_dim=c.integer("qk_nope_head_dim"),
        rope_dim=c.integer("qk_rope_head_dim"),
        v_dim=c.integer("v_head_dim"),
        index_topk=topk,
        index_heads=c.integer("index_n_heads") if topk else 0,
        index_dim=c.integer("index_head_dim") if topk else 0,
    )


def _linear_attention(c: Config) -> LinearAttention:
    return LinearAttention(
        n_key_heads=c.integer("linear_num_key_heads"),
        n_value_heads=c.integer("linear_num_value_heads"),
        key_dim=c.integer("linear_key_head_dim"),
        value_dim=c.integer("linear_value_head_dim"),
        conv_width=c.integer("linear_conv_kernel_dim"),
    )


# Family -> the fields that hold the number of experts and the width of one.
_EXPERT_FIELDS = {
    "mixtral": ("num_local_experts", "intermediate_size"),
    "minimax_m2": ("num_local_experts", "intermediate_size"),
    "gpt_oss": ("num_local_experts", "intermediate_size"),
    "qwen3_moe": ("num_experts", "moe_intermediate_size"),
    "qwen3_5_moe_text": ("num_experts", "moe_intermediate_size"),
    **dict.fromkeys(LATENT, ("n_routed_experts", "moe_intermediate_size")),
}


def _experts(c: Config, family: str) -> Experts | None:
    if family not in _EXPERT_FIELDS or (family in LATENT and not c.integer("n_routed_experts", 0, least=0)):
        return None
    number, width = _EXPERT_FIELDS[family]
    routed = Experts(n_experts=c.integer(number), per_token=c.integer("num_experts_per_tok"), ffn=c.integer(width))
    if family == "minimax_m2":
        if c.integer("shared_intermediate_size", 0, least=0):
            raise ValueError(f"{c.where}: the shared expert of MiniMax (shared_intermediate_size) is not modelled")
        return replace(routed, router_bias=c.flag("use_routing_bias", False))
    if family == "gpt_oss":
        return replace(routed, bias=True, router_bias=True)
    if family == "qwen3_5_moe_text":
        shared_ffn = c.integer("shared_expert_intermediate_size")
        return replace(routed, n_shared=1, shared_ffn=shared_ffn, shared_gate=True)
    if family in LATENT:
        shared = c.integer("n_shared_experts", 0, least=0)
        bias = c.data.get("topk_method") == "noaux_tc"
        return replace(routed, n_shared=shared, shared_ffn=shared * routed.ffn, router_bias=bias)
    return routed


def spec_from_config(
    config: Mapping[str, Any], *, name: str, where: str, quant_config: Mapping[str, Any] | None = None
) -> ModelSpec:
    """The model that a HuggingFace *config* describes; *where* names the file in errors.

    ValueError for a missing or impossible field, and for an architecture that is not modelled, by name.
    """
    own = config.get("rooftrace") or {}
    notes: list[str] = list(own.get("notes", ()))
    data: dict[str, Any] = dict(config)
    if "text_config" in config:
        data = {**{k: v for k, v in config.items() if k != "text_config"}, **config["text_config"]}
        if config.get("model_type") != data.get("model_type") or "vision_config" in config:
            notes.append("The text model only: image and video encoders are left out.")
    if own.get("accept_linear_attention"):
        data["_accept_linear_attention"] = True
    family = data.get("model_type")
    if not isinstance(family, str):
        raise ValueError(f"{where}: model_type is missing; a HuggingFace config.json states it")
    refuse_what_is_not_modelled(data, family, where)
    c = Config(data, where)
    dtype = data.get("torch_dtype") or data.get("dtype") or "bfloat16"
    if dtype not in DTYPES:
        raise ValueError(f"{where}: torch_dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    base = DTYPES[dtype]
    formats = {"attention_precision": base, "mlp_precision": base, "expert_precision": base, "base_precision": base}
    formats |= quantisation(data, quant_config, base, where)
    common: dict[str, Any] = {"name": name, "family": family, "source": own.get("source", where), **formats}
    if family in PLAIN:
        return _plain_spec(c, family, common, tuple(notes))
    return _layered_spec(c, family, common, tuple(notes))


def _layered_spec(c: Config, family: str, common: dict[str, Any], notes: tuple[str, ...]) -> ModelSpec:
    """Everything with RMS norms: gated MLPs, experts, windows, latent and linear attention."""
    hidden, n_layers = c.integer("hidden_size"), c.integer("num_hidden_layers")
    experts = _experts(c, family)
    is_moe = _moe_layers(c, n_layers, family) if experts else (False,) * n_layers
    # gpt-oss, Mixtral and MiniMax give the width of an expert in intermediate_size and have no dense layer.
    ffn = c.integer("intermediate_size") if not all(is_moe) else 0
    window, windowed = _windows(c, family, n_layers)
    attention = _latent_attention(c) if family in LATENT else _gated_attention(c, family, hidden)
    hybrid = family in HYBRID
    types = c.data["layer_types"] if hybrid else (None,) * n_layers
    is_linear = tuple(kind == "linear_attention" for kind in types)
    if isinstance(attention, LatentAttention) and attention.index_topk:
        window, windowed = attention.index_topk, (True,) * n_layers
        notes += (
            f"Sparse attention: each query reads {attention.index_topk} chosen tokens, priced as a window of "
            "that size, plus an indexer over all tokens.",
        )
    mtp = c.integer(
        "num_nextn_predict_layers",
        c.integer("mtp_num_hidden_layers", c.integer("num_mtp_modules", 0), least=0),
        least=0,
    )
    if mtp:
        notes += (f"The multi-token-prediction layers ({mtp}) are left out: neither loaded nor run.",)
    return ModelSpec(
        **common,
        hidden=hidden,
        vocab=c.integer("vocab_size"),
        attention=attention,
        ffn=ffn,
        layer_is_moe=is_moe,
        layer_is_windowed=windowed,
        layer_is_linear=is_linear,
        experts=experts,
        linear_attention=_linear_attention(c) if hybrid else None,
        mlp_bias=c.flag("mlp_bias", False),
        norm_params=hidden,
        tied_embeddings=c.flag("tie_word_embeddings", False),
        window_tokens=window,
        max_positions=c.integer("max_position_embeddings") if c.has("max_position_embeddings") else None,
        notes=notes,
    )


def _plain_spec(c: Config, family: str, common: dict[str, Any], notes: tuple[str, ...]) -> ModelSpec:
    """GPT-2, OPT, BLOOM and BERT: layer norms, biases, no gate."""
    if family == "gpt2":
        hidden, n_layers, heads = c.integer("n_embd"), c.integer("n_layer"), c.integer("n_head")
        positions = c.integer("n_positions", 1024, least=0)
        ffn = c.integer("n_inner", 4 * hidden)
    elif family == "bloom":
        hidden = c.integer("hidden_size") if c.has("hidden_size") else c.integer("n_embed")
        n_layers = c.integer("n_layer")
        heads = c.integer("n_head") if c.has("n_head") else c.integer("num_attention_heads")
        positions, ffn = 0, 4 * hidden
    else:
        hidden, n_layers = c.integer("hidden_size"), c.integer("num_hidden_layers")
        heads, positions = c.integer("num_attention_heads"), c.integer("max_position_embeddings")
        ffn = c.integer("ffn_dim" if family == "opt" else "intermediate_size")
    if hidden % heads:
        raise ValueError(f"{c.where}: the hidden size {hidden} is not a multiple of the {heads} heads")
    if family == "opt":
        if c.integer("word_embed_proj_dim", hidden) != hidden or not c.flag("do_layer_norm_before", True):
            raise ValueError(
                f"{c.where}: OPT with projected embeddings or norms behind the layers (350m) is not modelled"
            )
        positions += 2
    encoder = family == "bert"
    norm = 2 * hidden
    return ModelSpec(
        **common,
        hidden=hidden,
        vocab=c.integer("vocab_size"),
        attention=Attention(n_heads=heads, n_kv_heads=heads, head_dim=hidden // heads, qkv_bias=True, out_bias=True),
        ffn=ffn,
        layer_is_moe=(False,) * n_layers,
        layer_is_windowed=(False,) * n_layers,
        layer_is_linear=(False,) * n_layers,
        gated_mlp=False,
        mlp_bias=True,
        norm_params=norm,
        extra_norms=2 if family == "bloom" else 1,
        tied_embeddings=c.flag("tie_word_embeddings", True),
        lm_head=not encoder,
        lm_head_params=hidden * hidden + hidden if encoder else 0,
        position_rows=positions + (c.integer("type_vocab_size", 2) if encoder else 0),
        is_encoder=encoder,
        max_positions=positions or None,
        notes=notes,
    )
