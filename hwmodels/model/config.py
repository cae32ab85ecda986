"""From a HuggingFace config.json to a model, family by family."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from hwmodels.model.fields import (
    AFTER_DENSE,
    CLASS_DEFAULTS,
    COHERE,
    COMPRESSED,
    GEMMA,
    HYBRID,
    LATENT,
    OLMO,
    PLAIN,
    READ_AS,
    SPARSE,
    STATE_SPACE,
    STATED,
    SYNONYMS,
    Config,
    object_of,
    refuse_what_is_not_modelled,
)
from hwmodels.model.quantisation import quantised
from hwmodels.model.spec import (
    Attention,
    AttentionKind,
    CompressedAttention,
    Experts,
    LatentAttention,
    LinearAttention,
    ModelSpec,
)
from hwmodels.model.speech import speech_of
from hwmodels.model.tower import Tower
from hwmodels.model.vision import vision_of
from hwmodels.precision import precision

_KINDS: Mapping[str, AttentionKind] = {
    "minimax_m3_sparse": "blocks",
    "full_attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "chunked",
    "linear_attention": "linear",
}
"""`layer_types` of a config.json."""


def _blocks_of(c: Config) -> Mapping[str, Any]:
    return object_of(c.data["sparse_attention_config"], f"{c.where}: sparse_attention_config")


def _delta_of(c: Config) -> Mapping[str, Any]:
    return object_of(c.data["linear_attn_config"], f"{c.where}: linear_attn_config")


def _layer_types(c: Config, family: str, n_layers: int) -> list[str] | None:
    if family == "mimo_v2_flash":
        return [
            "sliding_attention" if each else "full_attention" for each in c.listed("hybrid_layer_pattern", int) or ()
        ]
    if family == "minimax_m3":
        marks = Config(_blocks_of(c), c.where).listed("sparse_attention_freq", int) or ()
        return ["minimax_m3_sparse" if each else "full_attention" for each in marks]
    if family == "kimi_linear":
        # Layers are counted from one.
        marks = set(Config(_delta_of(c), c.where).listed("kda_layers", int) or ())
        return ["linear_attention" if i + 1 in marks else "full_attention" for i in range(n_layers)]
    types = c.listed("layer_types", str)
    # Behind Step's layers may stand those for multi-token prediction.
    return types[:n_layers] if types and family == "step3p5" else types


def _attention_kinds(c: Config, family: str, n_layers: int) -> tuple[AttentionKind, ...]:
    """Layer by layer, from `layer_types` or from what stands for it in the configs of a family."""
    types = _layer_types(c, family, n_layers)
    if types is not None and family not in PLAIN | SPARSE:
        if len(types) != n_layers:
            raise ValueError(f"{c.where}: layer_types names {len(types)} layers, num_hidden_layers says {n_layers}")
        return tuple(_KINDS[each] for each in types)
    rule = _KINDS_OF.get(family)
    if rule is not None:
        return rule(c, n_layers)
    return _all("full" if family in PLAIN or not c.integer("sliding_window", 0) else "window", n_layers)


def _all(kind: AttentionKind, n_layers: int) -> tuple[AttentionKind, ...]:
    return (kind,) * n_layers


def _but_each(step: int, kind: AttentionKind, n_layers: int) -> tuple[AttentionKind, ...]:
    """Layers of *kind*, and full attention in each *step*-th."""
    return tuple(kind if (i + 1) % step else "full" for i in range(n_layers))


def _gemma_kinds(c: Config, n_layers: int) -> tuple[AttentionKind, ...]:
    return _but_each(c.integer("sliding_window_pattern", 6), "window", n_layers)


def _hybrid_kinds(c: Config, n_layers: int) -> tuple[AttentionKind, ...]:
    return _but_each(c.integer("full_attention_interval", 4), "linear", n_layers)


def _kinds_by_pattern(c: Config, n_layers: int) -> tuple[AttentionKind, ...]:
    """`sliding_window_pattern` is a number, or a text of an L or a G for each layer in turn."""
    if not c.has("sliding_window"):
        return _all("full", n_layers)
    pattern = c.data.get("sliding_window_pattern", 4)
    if not isinstance(pattern, str):
        return _but_each(c.integer("sliding_window_pattern", 4), "window", n_layers)
    return tuple("full" if pattern[i % len(pattern)] == "G" else "window" for i in range(n_layers))


def _kinds_from_a_layer_on(c: Config, n_layers: int) -> tuple[AttentionKind, ...]:
    """Windows from `max_window_layers` on, where they are used."""
    if not c.integer("sliding_window", 0) or not c.flag("use_sliding_window", False):
        return _all("full", n_layers)
    first = c.integer("max_window_layers", n_layers, least=0)
    return tuple("window" if i >= first else "full" for i in range(n_layers))


def _kinds_not_stated(c: Config, _: int) -> tuple[AttentionKind, ...]:
    raise ValueError(f"{c.where}: layer_types is missing; a gpt_oss config.json states it")


def _rotary_kinds(c: Config, n_layers: int) -> tuple[AttentionKind, ...]:
    """Layers of Llama 4 with rotary embeddings (a 1 in `no_rope_layers`) attend within chunks, those without to everything."""
    rotary = c.listed("no_rope_layers", int)
    if not rotary:
        step = c.integer("no_rope_layer_interval", 4)
        rotary = [int((i + 1) % step != 0) for i in range(n_layers)]
    if len(rotary) != n_layers:
        raise ValueError(f"{c.where}: no_rope_layers names {len(rotary)} layers, num_hidden_layers says {n_layers}")
    return tuple("chunked" if each else "full" for each in rotary)


_KINDS_OF: Mapping[str, Callable[[Config, int], tuple[AttentionKind, ...]]] = {
    **dict.fromkeys(("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "smollm3"), _kinds_from_a_layer_on),
    **dict.fromkeys(("cohere2", "exaone4", "olmo3"), _kinds_by_pattern),
    **dict.fromkeys(GEMMA, _gemma_kinds),
    "gemma2": lambda _, n_layers: _but_each(2, "window", n_layers),
    **dict.fromkeys(HYBRID, _hybrid_kinds),
    "llama4_text": _rotary_kinds,
    "gpt_oss": _kinds_not_stated,
}
"""Families whose config.json states the kinds of layers in a way of its own."""


def _reach(c: Config, kinds: tuple[AttentionKind, ...]) -> tuple[int | None, tuple[AttentionKind, ...]]:
    """Tokens of the window or chunk (None without), and the kinds: a null chunk size leaves full attention."""
    if "window" in kinds:
        if not c.has("sliding_window"):
            raise ValueError(f"{c.where}: sliding_window is missing, and layers attend to a sliding window")
        return c.integer("sliding_window"), kinds
    if "chunked" in kinds:
        # Llama4TextConfig's own default is 8,192; null switches chunks off.
        if "attention_chunk_size" in c.data and c.data["attention_chunk_size"] is None:
            return None, tuple("full" if kind == "chunked" else kind for kind in kinds)
        return c.integer("attention_chunk_size", 8192), kinds
    return None, kinds


def _moe_layers(c: Config, n_layers: int, family: str) -> tuple[bool, ...]:
    """Whether each layer is a mixture of experts, by `mlp_layer_types` or by the keys of its family."""
    kinds = c.listed("mlp_layer_types", str)
    if kinds is not None:
        if len(kinds) != n_layers:
            raise ValueError(f"{c.where}: mlp_layer_types names {len(kinds)} layers, num_hidden_layers says {n_layers}")
        return tuple(kind == "sparse" for kind in kinds)
    if family in AFTER_DENSE:
        return _after_dense(c, n_layers, 0)
    rule = _MOE_LAYERS.get(family)
    return (True,) * n_layers if rule is None else rule(c, n_layers)


def _after_dense(c: Config, n_layers: int, first_k_dense: int) -> tuple[bool, ...]:
    first = c.integer("first_k_dense_replace", first_k_dense, least=0)
    step = c.integer("moe_layer_freq", 1)
    return tuple(i >= first and i % step == 0 for i in range(n_layers))


def _between(c: Config, n_layers: int) -> tuple[bool, ...]:
    first, step = c.integer("moe_layer_start_index", 0, least=0), c.integer("moe_layer_interval", 1)
    last = n_layers - 1 if c.data.get("moe_layer_end_index", -1) == -1 else c.integer("moe_layer_end_index")
    return tuple((i + 1) % step == 0 and first <= i <= last for i in range(n_layers))


def _layer_by_layer(c: Config, n_layers: int) -> tuple[bool, ...]:
    found = tuple(bool(each) for each in c.listed("moe_layer_freq", int) or ())
    if len(found) != n_layers:
        raise ValueError(f"{c.where}: moe_layer_freq names {len(found)} layers, num_hidden_layers says {n_layers}")
    return found


def _enumerated(c: Config, n_layers: int) -> tuple[bool, ...]:
    if not c.has("moe_layers_enum"):
        return _after_dense(c, n_layers, 3)
    listed = {each.strip() for each in str(c.data["moe_layers_enum"]).strip("[]").split(",")}
    return tuple(str(i) in listed for i in range(n_layers))


def _interleaved(c: Config, n_layers: int) -> tuple[bool, ...]:
    step = c.integer("interleave_moe_layer_step", 1)
    listed = c.listed("moe_layers", int)
    chosen = set(range(step - 1, n_layers, step) if listed is None else listed)
    return tuple(i in chosen for i in range(n_layers))


def _sparse_steps(c: Config, n_layers: int) -> tuple[bool, ...]:
    step = c.integer("decoder_sparse_step", 1)
    dense = set(c.listed("mlp_only_layers", int) or ())
    return tuple((i + 1) % step == 0 and i not in dense for i in range(n_layers))


_MOE_LAYERS: Mapping[str, Callable[[Config, int], tuple[bool, ...]]] = {
    "ernie4_5_moe": _between,
    "mimo_v2_flash": _layer_by_layer,
    "minimax_m3": _layer_by_layer,
    "step3p5": _enumerated,
    "llama4_text": _interleaved,
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text"), _sparse_steps),
}


_NO_OUT_BIAS = ("qwen2", "qwen2_moe", "glm", "glm4", "glm4_moe", "seed_oss")
"""Families whose `attention_bias` is of queries, keys and values alone."""


def _gated_attention(c: Config, family: str, hidden: int) -> Attention:
    heads = c.integer("num_attention_heads")
    if not c.has("head_dim") and hidden % heads:
        raise ValueError(
            f"{c.where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}; state head_dim"
        )
    kv_heads, head_dim = c.integer("num_key_value_heads", heads), c.integer("head_dim", max(1, hidden // heads))
    if heads % kv_heads:
        raise ValueError(f"{c.where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    norm, over_heads = 0, False
    if family in ("qwen3", "qwen3_moe", "gemma3_text", "gemma4_text", "exaone4", "step3p5") or family in HYBRID:
        norm = 2 * head_dim
    elif family in OLMO:
        norm, over_heads = (heads + kv_heads) * head_dim, True
    elif family == "llama4_text":
        # Llama4TextL2Norm has no parameters.
        norm = 0
    elif c.flag("use_qk_norm", False):
        # Cohere's weights differ from head to head, and each head is normalised by itself.
        over_heads = c.data.get("qk_norm_type") == "per_layer"
        norm = (heads + kv_heads) * head_dim if over_heads or family in COHERE else 2 * head_dim
    bias = c.flag("use_bias" if family == "starcoder2" else "attention_bias", False)
    return Attention(
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        qkv_bias=bias or family in ("qwen2", "qwen2_moe"),
        out_bias=c.flag("attention_out_bias", bias and family not in _NO_OUT_BIAS),
        qk_norm_params=norm,
        norm_over_heads=over_heads,
        sink_params=heads if family == "gpt_oss" else 0,
        output_gate=c.flag("attn_output_gate", family in HYBRID),
        head_gate=family == "step3p5",
        value_dim=c.integer("v_head_dim") if family == "mimo_v2_flash" else None,
    )


def _by_reach(c: Config, family: str, attention: Attention) -> tuple[Attention, Attention | None]:
    """The attention of full layers and of those with a window (None: alike), from *attention*, which the config's plain fields
    state."""
    if family == "gemma4_text":
        wide, tied = c.integer("global_head_dim"), c.flag("attention_k_eq_v", False)
        kv_heads = c.integer("num_global_key_value_heads", attention.n_kv_heads) if tied else attention.n_kv_heads
        full = replace(attention, n_kv_heads=kv_heads, head_dim=wide, qk_norm_params=2 * wide, keys_as_values=tied)
        return full, attention
    if family == "mimo_v2_flash":
        local = replace(
            attention,
            n_heads=c.integer("swa_num_attention_heads", attention.n_heads),
            n_kv_heads=c.integer("swa_num_key_value_heads"),
            head_dim=c.integer("swa_head_dim", attention.head_dim),
            value_dim=c.integer("swa_v_head_dim", attention.v_dim),
        )
        sinks = (c.flag("add_full_attention_sink_bias", False), c.flag("add_swa_attention_sink_bias", False))
        full, local = (
            replace(each, sink_params=each.n_heads * sink) for each, sink in zip((attention, local), sinks, strict=True)
        )
        return full, local
    if family == "minimax_m3":
        blocks = Config(_blocks_of(c), f"{c.where}: sparse_attention_config")
        chosen = blocks.integer("sparse_topk_blocks") * blocks.integer("sparse_block_size")
        index = {
            "index_heads": blocks.integer("sparse_num_index_heads"),
            "index_dim": blocks.integer("sparse_index_dim"),
        }
        return replace(attention, index_tokens=chosen, **index), None
    if family == "step3p5":
        other = Config(object_of(c.data.get("attention_other_setting"), f"{c.where}: attention_other_setting"), c.where)
        heads = c.integer("num_sliding_attention_heads", other.integer("num_attention_heads", attention.n_heads))
        if heads != attention.n_heads:
            return attention, replace(attention, n_heads=heads)
    return attention, None


def _latent_attention(c: Config) -> LatentAttention:
    topk = c.integer("index_topk", 0)
    return LatentAttention(
        n_heads=c.integer("num_attention_heads"),
        q_lora_rank=c.integer("q_lora_rank", 0),
        kv_lora_rank=c.integer("kv_lora_rank"),
        nope_dim=c.integer("qk_nope_head_dim"),
        rope_dim=c.integer("qk_rope_head_dim"),
        v_dim=c.integer("v_head_dim"),
        output_gate=c.flag("mla_use_output_gate", False),
        index_topk=topk,
        index_heads=c.integer("index_n_heads") if topk else 0,
        index_dim=c.integer("index_head_dim") if topk else 0,
    )


def _linear_attention(c: Config, base: str) -> LinearAttention:
    # vLLM 0.32.0, model_executor/models/config.py: Qwen3.5's mamba_ssm_dtype, else the state is fp32 in its kernels.
    state = c.dtype("mamba_ssm_dtype", default="float32")
    if c.data.get("linear_attn_config"):
        delta = Config(_delta_of(c), f"{c.where}: linear_attn_config")
        heads, width = delta.integer("num_heads"), delta.integer("head_dim")
        return LinearAttention(
            rule="kda",
            gate_rank=0 if delta.flag("use_full_rank_gate", False) else width,
            n_key_heads=heads,
            n_value_heads=heads,
            key_dim=width,
            value_dim=width,
            conv_width=delta.integer("short_conv_kernel_size", 4),
            state_bytes=precision(state).element_bytes,
            conv_bytes=precision(base).element_bytes,
        )
    return LinearAttention(
        n_key_heads=c.integer("linear_num_key_heads"),
        n_value_heads=c.integer("linear_num_value_heads"),
        key_dim=c.integer("linear_key_head_dim"),
        value_dim=c.integer("linear_value_head_dim"),
        conv_width=c.integer("linear_conv_kernel_dim"),
        state_bytes=precision(state).element_bytes,
        conv_bytes=precision(base).element_bytes,
    )


# Family -> the fields that hold the number of experts and the width of one.
_EXPERT_FIELDS = {
    "mixtral": ("num_local_experts", "intermediate_size"),
    "minimax_m2": ("num_local_experts", "intermediate_size"),
    "gpt_oss": ("num_local_experts", "intermediate_size"),
    "llama4_text": ("num_local_experts", "intermediate_size"),
    "granitemoe": ("num_local_experts", "intermediate_size"),
    "olmoe": ("num_experts", "intermediate_size"),
    "ernie4_5_moe": ("num_experts", "moe_intermediate_size"),
    "gemma4_text": ("num_experts", "moe_intermediate_size"),
    "mimo_v2_flash": ("n_routed_experts", "moe_intermediate_size"),
    "minimax_m3": ("num_local_experts", "intermediate_size"),
    "step3p5": ("num_experts", "moe_intermediate_size"),
    "qwen2_moe": ("num_experts", "moe_intermediate_size"),
    "qwen3_moe": ("num_experts", "moe_intermediate_size"),
    "qwen3_next": ("num_experts", "moe_intermediate_size"),
    "qwen3_5_moe_text": ("num_experts", "moe_intermediate_size"),
    **dict.fromkeys(AFTER_DENSE, ("n_routed_experts", "moe_intermediate_size")),
}


_ROUTED_BY_BIAS = {
    "mimo_v2_flash": "share_expert_dim",
    "step3p5": "share_expert_dim",
    "minimax_m3": "shared_intermediate_size",
}
"""Families whose routers have a bias without saying so (transformers 5.23), with the field of a shared expert's width."""


def _experts(c: Config, family: str) -> Experts | None:
    if family not in _EXPERT_FIELDS or (family in AFTER_DENSE and not c.integer("n_routed_experts", 0, least=0)):
        return None
    if family == "gemma4_text" and not c.flag("enable_moe_block", False):
        return None
    number, width = _EXPERT_FIELDS[family]
    chosen = "top_k_experts" if family == "gemma4_text" else "num_experts_per_tok"
    routed = Experts(n_experts=c.integer(number), per_token=c.integer(chosen), ffn=c.integer(width))
    if family in _ROUTED_BY_BIAS:
        width = c.integer(_ROUTED_BY_BIAS[family], 0, least=0) * c.integer("n_shared_experts", 1, least=0)
        return replace(routed, shared_ffn=width, router_bias=True)
    if family == "gemma4_text":
        # The dense MLP stands beside the experts in each layer; the router scales its input and each expert's result.
        scales = c.integer("hidden_size") + routed.n_experts
        return replace(routed, shared_ffn=c.integer("intermediate_size"), router_scales=scales)
    if family == "minimax_m2":
        if c.integer("shared_intermediate_size", 0, least=0):
            raise ValueError(f"{c.where}: the shared expert of MiniMax (shared_intermediate_size) is not modelled")
        return replace(routed, router_bias=c.flag("use_routing_bias", False))
    if family == "gpt_oss":
        return replace(routed, bias=True, router_bias=True)
    if family == "llama4_text":
        return replace(routed, shared_ffn=routed.ffn)
    if family == "ernie4_5_moe":
        return replace(
            routed, shared_ffn=c.integer("moe_num_shared_experts", 0, least=0) * routed.ffn, router_bias=True
        )
    if family in ("qwen2_moe", "qwen3_next", "qwen3_5_moe_text"):
        shared_ffn = c.integer("shared_expert_intermediate_size")
        return replace(routed, shared_ffn=shared_ffn, shared_gate=True)
    if family in AFTER_DENSE:
        shared = c.integer("n_shared_experts", 0, least=0)
        # GLM-4.5 and GLM-4.7-Flash have the bias without saying so (transformers 5.23, Glm4MoeTopkRouter).
        bias = family in ("glm4_moe", "glm4_moe_lite", "kimi_linear") or c.data.get("topk_method") == "noaux_tc"
        latent = c.integer("routed_expert_hidden_size", 0)
        norm = latent if c.flag("latent_moe_use_norm", False) else 0
        return replace(routed, shared_ffn=shared * routed.ffn, router_bias=bias, latent=latent, router_scales=norm)
    return routed


def spec_from_config(
    config: Mapping[str, Any],
    *,
    name: str,
    where: str,
    quant_config: Mapping[str, Any] | None = None,
    given: Collection[str] = (),
) -> ModelSpec:
    """The model that a HuggingFace *config* describes; *where* names the file in errors.

    *quant_config*: a hf_quant_config.json beside it. *given*: formats that the caller sets in place of the files', which are
    not read (`precision`: of the weights, `kv_precision`). ValueError for a missing or impossible field, and for an
    architecture or a number format that is not modelled, by name.
    """
    own = object_of(config.get("rooftrace"), f"{where}: rooftrace")
    notes: list[str] = [*(Config(own, f"{where}: rooftrace").listed("notes", str) or ())]
    if thinker := object_of(config.get("thinker_config"), f"{where}: thinker_config"):
        config = thinker
        notes.append("The thinker alone: the talker, which speaks its answers, is not modelled and left out.")
    data: dict[str, Any] = dict(config)
    named_text = "llm_config" if "llm_config" in config else "text_config"
    if text := object_of(config.get(named_text), f"{where}: {named_text}"):
        data = {**{k: v for k, v in config.items() if k != named_text}, **text}
    family = data.get("model_type")
    if not isinstance(family, str):
        raise ValueError(f"{where}: model_type is missing; a HuggingFace config.json states it")
    refuse_what_is_not_modelled(Config(data, where), family)
    named = SYNONYMS.get(family, {})
    data = {**CLASS_DEFAULTS.get(family, {}), **{named.get(key, key): value for key, value in data.items()}}
    c = Config(data, where)
    layers = READ_AS.get(family, family)
    for key in STATED.get(layers, ()):
        if key not in data:
            raise ValueError(f"{where}: {key} is missing; a {family} config.json states it")
    base = c.dtype("torch_dtype", "dtype")
    formats = {"attention_precision": base, "mlp_precision": base, "expert_precision": base, "base_precision": base}
    common: dict[str, Any] = {"name": name, "family": family, "source": own.get("source", where), **formats}
    spec = _MAKERS.get(layers, _layered_spec)(c, layers, common, tuple(notes))
    vision, speech = (find(config, text_hidden=spec.hidden, where=where) for find in (vision_of, speech_of))
    encoders = _about_encoders(config, {"images": vision, "speech": speech})
    spec = replace(spec, vision=vision, speech=speech, notes=(*spec.notes, *encoders))
    return quantised(spec, data, quant_config, where, given=given)


def _about_encoders(config: Mapping[str, Any], encoders: Mapping[str, Tower | None]) -> Iterator[str]:
    """Notes on the encoders of a model that reads more than text; none on one that reads text alone."""
    stated = {"images": "vision_config" in config, "speech": "audio_config" in config}
    counted = [name for name, tower in encoders.items() if tower is not None]
    left_out = [name for name, tower in encoders.items() if tower is None and stated[name]]
    if counted:
        several = len(counted) > 1
        yield f"Its encoder{'s' * several} of {' and '.join(counted)} {'count' if several else 'counts'} where encode is given."
    if left_out:
        several = len(left_out) > 1
        yield f"Its encoder{'s' * several} of {' and '.join(left_out)} {'are' if several else 'is'} not modelled and left out."
    elif not counted and {"text_config", "llm_config"} & config.keys():
        yield "The text model alone: the encoders of its other inputs are not modelled and left out."


_DENSE_FIELDS = {"llama4_text": "intermediate_size_mlp", "minimax_m3": "dense_intermediate_size"}


def _layered_spec(c: Config, family: str, common: dict[str, Any], notes: tuple[str, ...]) -> ModelSpec:
    """Everything with RMS norms: gated MLPs, experts, windows, latent and linear attention."""
    hidden, n_layers = c.integer("hidden_size"), c.integer("num_hidden_layers")
    experts = _experts(c, family)
    is_moe = _moe_layers(c, n_layers, family) if experts else (False,) * n_layers
    # gpt-oss, Mixtral and MiniMax give the width of an expert in intermediate_size and have no dense layer.
    dense = _DENSE_FIELDS.get(family, "intermediate_size")
    ffn = c.integer(dense) if not all(is_moe) else 0
    window, kinds = _reach(c, _attention_kinds(c, family, n_layers))
    attention: Attention | LatentAttention
    local: Attention | None = None
    if family in LATENT:
        attention = _latent_attention(c)
    else:
        attention, local = _by_reach(c, family, _gated_attention(c, family, hidden))
    linear = _linear_attention(c, common["base_precision"]) if "linear" in kinds else None
    indexers: tuple[bool, ...] = ()
    if isinstance(attention, LatentAttention) and attention.index_topk:
        indexers = _indexers(c, n_layers)
        window = attention.index_topk
        kinds = tuple[AttentionKind, ...]("window" for _ in kinds)
        notes += (
            f"Sparse attention: each query reads {attention.index_topk} chosen tokens, counted as a window of "
            "that size, plus an indexer over all tokens.",
        )
        if shared := indexers.count(False):
            notes += (
                f"{shared} of {n_layers} layers have no indexer and take the tokens that an earlier layer chose.",
            )
    if isinstance(attention, Attention) and attention.index_tokens:
        notes += (
            f"Sparse attention in {kinds.count('blocks')} of {n_layers} layers: each query reads the chosen blocks of "
            f"{attention.index_tokens:,} tokens, and a branch of {attention.index_heads} heads scores all of them.",
        )
    if c.has("attn_res_block_size"):
        notes += (
            f"Attention residuals (attn_res_block_size {c.data['attn_res_block_size']}) are neither counted nor priced; output "
            "gates and the experts' projections are counted as their keys name them.",
        )
    if linear is not None:
        notes += (
            f"Linear attention in {kinds.count('linear')} of {n_layers} layers: a state of constant size for each sequence, "
            "read and written once an iteration, in place of a cache.",
        )
    mtp = c.integer(
        "num_nextn_predict_layers",
        c.integer("mtp_num_hidden_layers", c.integer("num_mtp_modules", 0), least=0),
        least=0,
    )
    return ModelSpec(
        **common,
        hidden=hidden,
        vocab=c.integer("vocab_size"),
        attention=attention,
        local_attention=local,
        ffn=ffn,
        layer_is_moe=is_moe,
        layer_attention=kinds,
        layer_has_indexer=indexers,
        experts=experts,
        linear_attention=linear,
        gated_mlp=family != "starcoder2",
        mlp_bias=c.flag("use_bias" if family == "starcoder2" else "mlp_bias", False),
        norm_params=2 * hidden if family == "starcoder2" else hidden,
        norms_per_layer=_norms(family, experts),
        tied_embeddings=c.flag("tie_word_embeddings", family in GEMMA),
        window_tokens=window,
        max_positions=c.integer("max_position_embeddings") if c.has("max_position_embeddings") else None,
        mtp_layers=mtp,
        notes=notes,
    )


def _norms(family: str, experts: Experts | None) -> int:
    """Normalisations of a layer."""
    if family in COHERE:
        return 1
    if family in {*GEMMA, "glm4"}:
        # Gemma 4 has one before its experts, one behind them, and one behind the MLP beside them.
        return 4 if experts is None else 7
    return 2


def _pruned_spec(c: Config, family: str, common: dict[str, Any], notes: tuple[str, ...]) -> ModelSpec:
    """Nemotron's pruned Llamas: each block states its attention and its MLP, or that it has none.

    Widths are as in DeciLM's code on the hub: two thirds of the multiple of the hidden size, up to a multiple of 256.
    """
    hidden, n_layers = c.integer("hidden_size"), c.integer("num_hidden_layers")
    blocks = c.data["block_configs"]
    if not isinstance(blocks, list) or len(blocks) != n_layers:
        raise ValueError(f"{c.where}: block_configs must be a list of {n_layers} blocks, as num_hidden_layers says")
    kinds: list[AttentionKind] = []
    widths: list[int] = []
    groups: set[int] = set()
    for i, block in enumerate(blocks):
        where = f"{c.where}: block {i}"
        attention, ffn = (
            Config(object_of(object_of(block, where).get(part), where), where) for part in ("attention", "ffn")
        )
        for part in (attention, ffn):
            odd = [
                key
                for key, value in part.data.items()
                if value and key not in ("no_op", "n_heads_in_group", "ffn_mult")
            ]
            if odd:
                raise ValueError(f"{where}: {odd[0]} is not modelled; choose another model (see `rooftrace models`)")
        none = attention.flag("no_op", False)
        kinds.append("none" if none else "full")
        if not none:
            groups.add(attention.integer("n_heads_in_group"))
        multiple = 0.0 if ffn.flag("no_op", False) else ffn.data.get("ffn_mult")
        if isinstance(multiple, bool) or not isinstance(multiple, int | float) or multiple < 0:
            raise ValueError(f"{where}: ffn_mult must be a number, got {multiple!r}")
        widths.append(-(-int(2 * multiple * hidden / 3) // 256) * 256)
    if len(groups) != 1:
        raise ValueError(
            f"{c.where}: n_heads_in_group of {', '.join(map(str, sorted(groups)))} in one model is not modelled; choose another "
            "model (see `rooftrace models`)"
        )
    heads = c.integer("num_attention_heads")
    bias = c.flag("attention_bias", False)
    return ModelSpec(
        **common,
        hidden=hidden,
        vocab=c.integer("vocab_size"),
        attention=Attention(
            n_heads=heads,
            n_kv_heads=heads // groups.pop(),
            head_dim=c.integer("head_dim", hidden // heads),
            qkv_bias=bias,
            out_bias=bias,
        ),
        ffn=max(widths),
        layer_is_moe=(False,) * n_layers,
        layer_ffn=tuple(widths),
        layer_attention=tuple(kinds),
        mlp_bias=c.flag("mlp_bias", False),
        norm_params=hidden,
        tied_embeddings=c.flag("tie_word_embeddings", False),
        max_positions=c.integer("max_position_embeddings") if c.has("max_position_embeddings") else None,
        notes=(*notes, f"{kinds.count('none')} of {n_layers} layers have no attention, and MLPs differ in width."),
    )


_RATIOS: Mapping[int, AttentionKind] = {0: "window", 4: "csa", 128: "hca"}
"""`compress_ratios` of DeepSeek-V4: tokens that a compressed vector stands for."""


def _compressed_spec(c: Config, family: str, common: dict[str, Any], notes: tuple[str, ...]) -> ModelSpec:
    """DeepSeek-V4: attention to compressed tokens, hyper-connections, experts in every layer, the first chosen by a hash."""
    hidden, n_layers = c.integer("hidden_size"), c.integer("num_hidden_layers")
    ratios = c.listed("compress_ratios", int) or []
    if len(ratios) < n_layers or {*ratios} - {*_RATIOS}:
        raise ValueError(f"{c.where}: compress_ratios must name {n_layers} layers with 0, 4 or 128, got {ratios!r}")
    attention = CompressedAttention(
        n_heads=c.integer("num_attention_heads"),
        head_dim=c.integer("head_dim"),
        rope_dim=c.integer("qk_rope_head_dim"),
        q_lora_rank=c.integer("q_lora_rank"),
        o_groups=c.integer("o_groups"),
        o_lora_rank=c.integer("o_lora_rank"),
        index_topk=c.integer("index_topk"),
        index_heads=c.integer("index_n_heads"),
        index_dim=c.integer("index_head_dim"),
    )
    kinds = tuple[AttentionKind, ...](_RATIOS[each] for each in ratios[:n_layers])
    window, ffn = c.integer("sliding_window"), c.integer("moe_intermediate_size")
    held = window * attention.entry_bytes * n_layers / 1e6
    return ModelSpec(
        **common,
        hidden=hidden,
        vocab=c.integer("vocab_size"),
        attention=attention,
        ffn=0,
        layer_is_moe=(True,) * n_layers,
        layer_attention=kinds,
        window_tokens=None,
        compressed_window=window,
        experts=Experts(
            n_experts=c.integer("n_routed_experts"),
            per_token=c.integer("num_experts_per_tok"),
            ffn=ffn,
            shared_ffn=c.integer("n_shared_experts", 0, least=0) * ffn,
            router_bias=True,
            hash_layers=c.integer("num_hash_layers", 0, least=0),
        ),
        hyper_streams=c.integer("hc_mult"),
        norm_params=hidden,
        tied_embeddings=c.flag("tie_word_embeddings", False),
        max_positions=c.integer("max_position_embeddings") if c.has("max_position_embeddings") else None,
        mtp_layers=c.integer("num_nextn_predict_layers", 0, least=0),
        notes=(
            *notes,
            f"Compressed attention: {kinds.count('csa')} of {n_layers} layers cache a vector for every 4 tokens and attend to "
            f"{attention.index_topk} chosen ones, {kinds.count('hca')} one for every 128 and attend to all; the last {window} "
            f"tokens beside them, {held:.1f} MB of each sequence, are not counted in its cache.",
        ),
    )


_BLOCKS = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
_BLOCK_NAMES = {"linear_attention": "mamba", "full_attention": "attention"}


def _blocks(c: Config) -> list[str]:
    """Layer by layer, mamba, attention, moe or mlp."""
    listed = c.listed("layers_block_type", str)
    pattern = c.data.get("hybrid_override_pattern")
    if listed is None and not isinstance(pattern, str):
        raise ValueError(f"{c.where}: hybrid_override_pattern is missing; a nemotron_h config.json states it")
    names: list[str] = listed or [_BLOCKS.get(each, each) for each in str(pattern)]
    found = [_BLOCK_NAMES.get(each, each) for each in names]
    if strange := sorted({*found} - {*_BLOCKS.values()}):
        raise ValueError(f"{c.where}: layers of {strange[0]!r}; known are {', '.join(_BLOCKS.values())}")
    return found


def _state_space_spec(c: Config, family: str, common: dict[str, Any], notes: tuple[str, ...]) -> ModelSpec:
    """Nemotron-H: each layer is one of Mamba-2, attention, experts or an MLP, none of them gated."""
    hidden, blocks = c.integer("hidden_size"), _blocks(c)
    ffn = c.integer("intermediate_size") if "mlp" in blocks else 0
    experts = None
    if "moe" in blocks:
        experts = Experts(
            n_experts=c.integer("n_routed_experts"),
            per_token=c.integer("num_experts_per_tok"),
            ffn=c.integer("moe_intermediate_size"),
            gated=False,
            latent=c.integer("moe_latent_size", 0),
            shared_ffn=c.integer("moe_shared_expert_intermediate_size") * c.integer("n_shared_experts", 1, least=0),
            router_bias=True,
        )
    kinds: Mapping[str, AttentionKind] = {"mamba": "linear", "attention": "full"}
    return ModelSpec(
        **common,
        hidden=hidden,
        vocab=c.integer("vocab_size"),
        attention=_gated_attention(c, family, hidden),
        ffn=ffn,
        layer_is_moe=tuple(each == "moe" for each in blocks),
        layer_ffn=tuple(ffn if each == "mlp" else 0 for each in blocks),
        layer_attention=tuple(kinds.get(each, "none") for each in blocks),
        experts=experts,
        linear_attention=LinearAttention(
            rule="mamba2",
            n_key_heads=c.integer("n_groups"),
            n_value_heads=c.integer("mamba_num_heads"),
            key_dim=c.integer("ssm_state_size"),
            value_dim=c.integer("mamba_head_dim"),
            conv_width=c.integer("conv_kernel"),
            conv_bias=c.flag("use_conv_bias", True),
            # transformers 5.23, NemotronHConfig: states in 32 bits unless the config says otherwise.
            state_bytes=precision(c.dtype("mamba_ssm_cache_dtype", default="float32")).element_bytes,
            conv_bytes=precision(common["base_precision"]).element_bytes,
        ),
        gated_mlp=False,
        mlp_bias=c.flag("mlp_bias", False),
        norm_params=hidden,
        tied_embeddings=c.flag("tie_word_embeddings", False),
        max_positions=c.integer("max_position_embeddings") if c.has("max_position_embeddings") else None,
        mtp_layers=c.integer("num_nextn_predict_layers", 0, least=0),
        notes=(
            *notes,
            f"Mamba-2 in {blocks.count('mamba')} of {len(blocks)} layers: a state of constant size for each sequence, read and "
            "written once an iteration, in place of a cache.",
        ),
    )


def _indexers(c: Config, n_layers: int) -> tuple[bool, ...]:
    """Layer by layer, whether sparse attention has an indexer there; in all of them where the config does not say."""
    kinds = c.listed("indexer_types", str) or ["full"] * n_layers
    if len(kinds) != n_layers:
        raise ValueError(f"{c.where}: indexer_types are of {len(kinds)} layers, and the model has {n_layers}")
    if strange := sorted({*kinds} - {"full", "shared"}):
        raise ValueError(f"{c.where}: indexer_types {strange[0]!r}; known are full and shared")
    if kinds[0] == "shared":
        raise ValueError(f"{c.where}: indexer_types begin with shared, and no layer before it has chosen tokens")
    return tuple(kind == "full" for kind in kinds)


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
        layer_attention=("full",) * n_layers,
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


_MAKERS = {
    **dict.fromkeys(PLAIN, _plain_spec),
    **dict.fromkeys(STATE_SPACE, _state_space_spec),
    **dict.fromkeys(COMPRESSED, _compressed_spec),
    "nemotron-nas": _pruned_spec,
}
"""Families that are no layers of one kind."""
