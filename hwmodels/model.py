"""Transformers as the cost models see them: shapes, parameters, cache and number formats, read from config.json."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hwmodels.precision import precision
from hwmodels.tables import read_json

CATALOGUE = Path(__file__).with_name("models")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """One layer's attention with grouped keys and values (`n_kv_heads == n_heads`: the classic kind)."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm_params: int = 0
    """Parameters of query and key normalisation in one layer."""
    sink_params: int = 0
    output_gate: bool = False
    """Queries come with a gate of the same width (Qwen3.5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, 2.1): one cached latent for all heads.

    With `index_topk` each query attends to that many tokens, chosen by a small indexer that scores all of them
    (DeepSeek sparse attention, arXiv 2512.02556).
    """

    n_heads: int
    q_lora_rank: int
    """0: queries are projected directly."""
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    index_topk: int = 0
    index_heads: int = 0
    index_dim: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """Gated delta-rule layer with a fixed state (Qwen3-Next and Qwen3.5): no KV cache, one state a sequence."""

    n_key_heads: int
    n_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    state_bytes: float = 4.0
    """Of one element of the state (fp32)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture-of-experts MLP: gated experts behind a router, and experts that every token visits."""

    n_experts: int
    per_token: int
    ffn: int
    n_shared: int = 0
    shared_ffn: int = 0
    """Width of all shared experts together."""
    shared_gate: bool = False
    bias: bool = False
    router_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What a cost model and a memory budget must know of a model. Parameters are counted, never stated."""

    name: str
    family: str
    hidden: int
    vocab: int
    attention: Attention | LatentAttention
    ffn: int
    """Width of the dense MLP."""
    layer_is_moe: tuple[bool, ...]
    layer_is_windowed: tuple[bool, ...]
    layer_is_linear: tuple[bool, ...]
    experts: Experts | None = None
    linear_attention: LinearAttention | None = None
    gated_mlp: bool = True
    mlp_bias: bool = False
    norm_params: int
    """Parameters of one normalisation: hidden (RMS) or twice that (layer norm)."""
    norms_per_layer: int = 2
    extra_norms: int = 1
    """Normalisations outside the layers: the final one, one behind the embedding."""
    tied_embeddings: bool = False
    lm_head: bool = True
    lm_head_params: int = 0
    """Parameters of the head beyond the vocabulary matrix (BERT's pooler)."""
    position_rows: int = 0
    """Rows of learned position and token-type tables."""
    is_encoder: bool = False
    """Every token sees every token; nothing is decoded."""
    window_tokens: int | None = None
    max_positions: int | None = None
    attention_precision: str = "bf16"
    mlp_precision: str = "bf16"
    """Dense MLPs and shared experts."""
    expert_precision: str = "bf16"
    base_precision: str = "bf16"
    """Embedding, LM head, router, normalisations, and the activations."""
    kv_precision: str | None = None
    """What the checkpoint asks for; None: the base precision."""
    notes: tuple[str, ...] = ()
    """What the model leaves out or approximates, in sentences."""
    source: str = ""

    @property
    def n_layers(self) -> int:
        return len(self.layer_is_moe)

    @property
    def attention_params(self) -> int:
        """Of one softmax-attention layer."""
        h, a = self.hidden, self.attention
        if isinstance(a, Attention):
            q, kv = a.n_heads * a.head_dim, a.n_kv_heads * a.head_dim
            q_out = q * (2 if a.output_gate else 1)
            weights = h * (q_out + 2 * kv) + q * h
            return weights + (q_out + 2 * kv) * a.qkv_bias + h * a.out_bias + a.qk_norm_params + a.sink_params
        q = a.n_heads * (a.nope_dim + a.rope_dim)
        query = h * a.q_lora_rank + a.q_lora_rank + a.q_lora_rank * q if a.q_lora_rank else h * q
        latent = h * (a.kv_lora_rank + a.rope_dim) + a.kv_lora_rank
        up = a.kv_lora_rank * a.n_heads * (a.nope_dim + a.v_dim)
        index = 0
        if a.index_topk:
            index = a.q_lora_rank * a.index_heads * a.index_dim + h * (a.index_dim + a.index_heads) + 2 * a.index_dim
        return query + latent + up + a.n_heads * a.v_dim * h + index

    @property
    def linear_attention_params(self) -> int:
        """Of one linear-attention layer (0 without): projections, short convolution, decay, gated norm."""
        a = self.linear_attention
        if a is None:
            return 0
        keys, values = a.n_key_heads * a.key_dim, a.n_value_heads * a.value_dim
        project = self.hidden * (2 * keys + 2 * values + 2 * a.n_value_heads) + values * self.hidden
        return project + a.conv_width * (2 * keys + values) + 2 * a.n_value_heads + a.value_dim

    @property
    def dense_mlp_params(self) -> int:
        return self.hidden * self.ffn * (3 if self.gated_mlp else 2) + (
            self.mlp_bias * (self.hidden + self.ffn * (2 if self.gated_mlp else 1))
        )

    @property
    def expert_params(self) -> int:
        """Of one routed expert."""
        if self.experts is None:
            return 0
        f = self.experts.ffn
        return 3 * self.hidden * f + self.experts.bias * (2 * f + self.hidden)

    @property
    def shared_expert_params(self) -> int:
        """Of the experts of one layer that every token visits, with their gate."""
        if self.experts is None:
            return 0
        return 3 * self.hidden * self.experts.shared_ffn + self.experts.shared_gate * self.hidden

    @property
    def router_params(self) -> int:
        if self.experts is None:
            return 0
        return self.experts.n_experts * (self.hidden + self.experts.router_bias)

    @property
    def embedding_params(self) -> int:
        return self.vocab * self.hidden

    def _count(self, experts_per_layer: int) -> int:
        n_moe, n_linear = sum(self.layer_is_moe), sum(self.layer_is_linear)
        total = (self.n_layers - n_linear) * self.attention_params + n_linear * self.linear_attention_params
        total += (self.n_layers - n_moe) * self.dense_mlp_params
        total += n_moe * (experts_per_layer * self.expert_params + self.shared_expert_params + self.router_params)
        total += (self.n_layers * self.norms_per_layer + self.extra_norms) * self.norm_params
        total += self.embedding_params * (2 if self.lm_head and not self.tied_embeddings else 1)
        return total + self.position_rows * self.hidden + self.lm_head_params

    @property
    def params(self) -> int:
        """All parameters of the decoder (or encoder), the multi-token-prediction layer apart."""
        return self._count(self.experts.n_experts if self.experts else 0)

    @property
    def active_params(self) -> int:
        """Parameters that one token visits, the embedding table counted whole as is usual."""
        return self._count(self.experts.per_token if self.experts else 0)

    def kv_elements_per_layer(self) -> int:
        """Cached elements of one token in one softmax-attention layer, over all GPUs, nothing replicated."""
        a = self.attention
        if isinstance(a, Attention):
            return 2 * a.n_kv_heads * a.head_dim
        return a.kv_lora_rank + a.rope_dim

    def index_bytes_per_layer(self) -> int:
        """Cached bytes of one token for the sparse-attention indexer: fp8 keys and one fp32 scale."""
        a = self.attention
        return a.index_dim + 4 if isinstance(a, LatentAttention) and a.index_topk else 0

    def kv_bytes_per_token(self, kv_precision: str | None = None) -> float:
        """Cache of one token over all layers and GPUs, nothing replicated; the model's own precision by default."""
        element = precision(kv_precision or self.kv_precision or self.base_precision).element_bytes
        layers = self.n_layers - sum(self.layer_is_linear)
        return layers * (self.kv_elements_per_layer() * element + self.index_bytes_per_layer())

    @property
    def state_bytes_per_sequence(self) -> float:
        """Recurrent state of one sequence over all linear-attention layers (0 without)."""
        a = self.linear_attention
        if a is None:
            return 0.0
        return sum(self.layer_is_linear) * a.n_value_heads * a.key_dim * a.value_dim * a.state_bytes

    def weight_bytes(self) -> float:
        """All weights with their block scales, nothing replicated."""
        n_moe = sum(self.layer_is_moe)
        attention = (self.n_layers - sum(self.layer_is_linear)) * self.attention_params
        attention += sum(self.layer_is_linear) * self.linear_attention_params
        mlp = (self.n_layers - n_moe) * self.dense_mlp_params + n_moe * self.shared_expert_params
        experts = n_moe * self.expert_params * (self.experts.n_experts if self.experts else 0)
        rest = self.params - attention - mlp - experts
        return (
            attention * precision(self.attention_precision).weight_bytes
            + mlp * precision(self.mlp_precision).weight_bytes
            + experts * precision(self.expert_precision).weight_bytes
            + rest * precision(self.base_precision).weight_bytes
        )

    def with_precision(self, name: str, *, experts: str | None = None) -> ModelSpec:
        """The same model with its weights in another format.

        16- and 32-bit formats apply to everything. Smaller ones apply to the linear layers; embedding, LM head, router
        and normalisations stay in 16 bits, as serving engines keep them. *experts* names another format for the
        experts. A checkpoint that is already in the format (or a block-scaled form of it) stays as it is.
        """
        found = precision(name)
        own = {self.attention_precision, self.mlp_precision, self.expert_precision}
        if found.element_bytes < 2 and experts is None and any(o == name or o.startswith(f"{name}_") for o in own):
            return self
        base = self.base_precision
        if found.element_bytes >= 2:
            base = name
        elif precision(base).element_bytes > 2:
            base = "bf16"
        expert = precision(experts).name if experts else name
        return dataclasses.replace(
            self,
            attention_precision=name,
            mlp_precision=name,
            expert_precision=expert,
            base_precision=base,
        )


class _Config:
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


_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_GATED = {"llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gpt_oss", "minimax_m2"}
_LATENT = {"deepseek_v2", "deepseek_v3", "kimi_k2", "glm_moe_dsa"}
_PLAIN = {"gpt2", "opt", "bloom", "bert"}
_HYBRID = {"qwen3_5_moe_text"}
FAMILIES = tuple(sorted(_GATED | _LATENT | _PLAIN | _HYBRID))


def _refuse_what_is_not_modelled(data: Mapping[str, Any], family: str, where: str) -> None:
    def refuse(what: str) -> None:
        raise ValueError(f"{where}: {what} is not modelled; choose another model (see `rooftrace models`)")

    if family.startswith("llama4"):
        size = data.get("attention_chunk_size")
        refuse(f"the chunked attention of Llama 4 (attention_chunk_size {size}, interleaved with full layers)")
    if family not in FAMILIES:
        near = difflib.get_close_matches(family, FAMILIES, n=2)
        hint = f"nearest: {', '.join(near)}" if near else f"modelled: {', '.join(FAMILIES)}"
        refuse(f"model_type {family!r} ({hint})")
    if data.get("is_encoder_decoder") or data.get("add_cross_attention"):
        refuse("an encoder-decoder with cross-attention")
    if data.get("attention_chunk_size"):
        refuse(f"chunked attention (attention_chunk_size {data['attention_chunk_size']})")
    for key in data:
        if any(word in key for word in ("mamba", "ssm_", "rwkv", "hyena")) and family not in _HYBRID and data[key]:
            refuse(f"a state-space layer ({key})")
    kinds = set(data.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if "linear_attention" in kinds and data.get("_accept_linear_attention"):
        kinds.discard("linear_attention")
    if kinds:
        refuse(f"a hybrid with {', '.join(sorted(k.replace('_', ' ') for k in kinds))} layers ({family})")
    if family not in _LATENT and data.get("kv_lora_rank"):
        refuse(f"latent attention (kv_lora_rank) in a {family} model")
    dense = _PLAIN | {"llama", "mistral", "qwen2", "qwen3"}
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        if family in dense and data.get(key):
            refuse(f"a mixture of experts ({key}) in a {family} model")
    if family != "glm_moe_dsa" and data.get("index_topk"):
        refuse(f"sparse attention (index_topk) in a {family} model")


def _windows(c: _Config, family: str, n_layers: int) -> tuple[int | None, tuple[bool, ...]]:
    window = c.integer("sliding_window", 0)
    none = (False,) * n_layers
    if not window or family in _PLAIN:
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


def _moe_layers(c: _Config, n_layers: int, family: str) -> tuple[bool, ...]:
    if family in _LATENT:
        first = c.integer("first_k_dense_replace", 0, least=0)
        step = c.integer("moe_layer_freq", 1)
        return tuple(i >= first and i % step == 0 for i in range(n_layers))
    if family == "qwen3_moe":
        step = c.integer("decoder_sparse_step", 1)
        dense = set(c.data.get("mlp_only_layers") or ())
        return tuple((i + 1) % step == 0 and i not in dense for i in range(n_layers))
    return (True,) * n_layers


def _gated_attention(c: _Config, family: str, hidden: int) -> Attention:
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


def _latent_attention(c: _Config) -> LatentAttention:
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


def _experts(c: _Config, family: str) -> Experts | None:
    if family == "mixtral":
        return Experts(
            n_experts=c.integer("num_local_experts"),
            per_token=c.integer("num_experts_per_tok"),
            ffn=c.integer("intermediate_size"),
        )
    if family == "minimax_m2":
        if c.integer("shared_intermediate_size", 0, least=0):
            raise ValueError(f"{c.where}: the shared expert of MiniMax (shared_intermediate_size) is not modelled")
        return Experts(
            n_experts=c.integer("num_local_experts"),
            per_token=c.integer("num_experts_per_tok"),
            ffn=c.integer("intermediate_size"),
            router_bias=c.flag("use_routing_bias", False),
        )
    if family == "gpt_oss":
        return Experts(
            n_experts=c.integer("num_local_experts"),
            per_token=c.integer("num_experts_per_tok"),
            ffn=c.integer("intermediate_size"),
            bias=True,
            router_bias=True,
        )
    if family == "qwen3_moe":
        return Experts(
            n_experts=c.integer("num_experts"),
            per_token=c.integer("num_experts_per_tok"),
            ffn=c.integer("moe_intermediate_size"),
        )
    if family == "qwen3_5_moe_text":
        return Experts(
            n_experts=c.integer("num_experts"),
            per_token=c.integer("num_experts_per_tok"),
            ffn=c.integer("moe_intermediate_size"),
            n_shared=1,
            shared_ffn=c.integer("shared_expert_intermediate_size"),
            shared_gate=True,
        )
    if family in _LATENT and c.integer("n_routed_experts", 0, least=0):
        shared, width = c.integer("n_shared_experts", 0, least=0), c.integer("moe_intermediate_size")
        return Experts(
            n_experts=c.integer("n_routed_experts"),
            per_token=c.integer("num_experts_per_tok"),
            ffn=width,
            n_shared=shared,
            shared_ffn=shared * width,
            router_bias=c.data.get("topk_method") == "noaux_tc",
        )
    return None


def _quantisation(data: Mapping[str, Any], side: Mapping[str, Any] | None, base: str, where: str) -> dict[str, str]:
    """Formats of attention, MLP, experts and cache where they differ from *base*."""
    everywhere = ("attention_precision", "mlp_precision", "expert_precision")

    def refuse(what: str) -> ValueError:
        return ValueError(f"{where}: quantisation {what} is not modelled; pass a precision that overrides it")

    if side is not None:
        table = side.get("quantization", {})
        algorithm = table.get("quant_algo")
        names = {"FP8": "fp8", "FP8_PB_WO": "fp8_block", "NVFP4": "nvfp4", "W4A16_AWQ": "int4", "INT4_AWQ": "int4"}
        found: dict[str, str] = {}
        if algorithm is not None:
            if algorithm not in names:
                raise refuse(f"{algorithm} of hf_quant_config.json")
            found = dict.fromkeys(everywhere, names[algorithm])
            excluded = " ".join(table.get("exclude_modules") or ())
            if "self_attn" in excluded:
                found["attention_precision"] = base
        cache = table.get("kv_cache_quant_algo")
        if cache is not None:
            if cache != "FP8":
                raise refuse(f"of the KV cache in {cache}")
            found["kv_precision"] = "fp8"
        return found
    quantised = data.get("quantization_config")
    if not quantised:
        return {}
    method = quantised.get("quant_method")
    if method == "fp8":
        return dict.fromkeys(everywhere, "fp8_block" if quantised.get("weight_block_size") else "fp8")
    if method == "mxfp4":
        return {"expert_precision": "mxfp4"}
    if method in ("awq", "gptq"):
        bits = quantised.get("bits", quantised.get("w_bit"))
        if bits != 4:
            raise refuse(f"{method} with {bits} bits")
        return dict.fromkeys(everywhere, "int4")
    if method == "compressed-tensors":
        groups = list((quantised.get("config_groups") or {}).values())
        if len(groups) != 1:
            raise refuse(f"compressed-tensors with {len(groups)} groups")
        weights = groups[0]["weights"]
        kind = (weights.get("type"), weights.get("num_bits"))
        names = {
            ("float", 8): "fp8",
            ("int", 8): "int8",
            ("int", 4): "int4_g32" if weights.get("group_size") == 32 else "int4",
        }
        if kind not in names:
            raise refuse(f"compressed-tensors {kind[0]}{kind[1]}")
        found = dict.fromkeys(everywhere, names[kind])
        ignored = " ".join(quantised.get("ignore") or ())
        if "self_attn" in ignored:
            found["attention_precision"] = base
        if "shared_experts" in ignored or "gate_up|down" in ignored:
            found["mlp_precision"] = base
        return found
    raise refuse(f"{method!r}")


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
    _refuse_what_is_not_modelled(data, family, where)
    c = _Config(data, where)
    dtype = data.get("torch_dtype") or data.get("dtype") or "bfloat16"
    if dtype not in _DTYPES:
        raise ValueError(f"{where}: torch_dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
    base = _DTYPES[dtype]
    formats = {"attention_precision": base, "mlp_precision": base, "expert_precision": base, "base_precision": base}
    formats |= _quantisation(data, quant_config, base, where)
    common: dict[str, Any] = {"name": name, "family": family, "source": own.get("source", where), **formats}
    if family in _PLAIN:
        return _plain_spec(c, family, common, tuple(notes))
    hidden, n_layers = c.integer("hidden_size"), c.integer("num_hidden_layers")
    experts = _experts(c, family)
    is_moe = _moe_layers(c, n_layers, family) if experts else (False,) * n_layers
    # gpt-oss, Mixtral and MiniMax give the width of an expert in intermediate_size and have no dense layer.
    ffn = c.integer("intermediate_size") if not all(is_moe) else 0
    window, windowed = _windows(c, family, n_layers)
    attention = _latent_attention(c) if family in _LATENT else _gated_attention(c, family, hidden)
    is_linear, linear = (False,) * n_layers, None
    if family in _HYBRID:
        is_linear = tuple(t == "linear_attention" for t in data["layer_types"])
        linear = LinearAttention(
            n_key_heads=c.integer("linear_num_key_heads"),
            n_value_heads=c.integer("linear_num_value_heads"),
            key_dim=c.integer("linear_key_head_dim"),
            value_dim=c.integer("linear_value_head_dim"),
            conv_width=c.integer("linear_conv_kernel_dim"),
        )
    if isinstance(attention, LatentAttention) and attention.index_topk:
        window, windowed = attention.index_topk, (True,) * n_layers
        notes.append(
            f"Sparse attention: each query reads {attention.index_topk} chosen tokens, priced as a window of "
            "that size, plus an indexer over all tokens."
        )
    mtp = c.integer(
        "num_nextn_predict_layers",
        c.integer("mtp_num_hidden_layers", c.integer("num_mtp_modules", 0), least=0),
        least=0,
    )
    if mtp:
        notes.append(f"The multi-token-prediction layers ({mtp}) are left out: neither loaded nor run.")
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
        linear_attention=linear,
        mlp_bias=c.flag("mlp_bias", False),
        norm_params=hidden,
        tied_embeddings=c.flag("tie_word_embeddings", False),
        window_tokens=window,
        max_positions=c.integer("max_position_embeddings") if c.has("max_position_embeddings") else None,
        notes=tuple(notes),
    )


def _plain_spec(c: _Config, family: str, common: dict[str, Any], notes: tuple[str, ...]) -> ModelSpec:
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


@functools.cache
def model_catalogue() -> Mapping[str, Path]:
    """Names of the shipped models, each with its file."""
    return {path.stem: path for path in sorted(CATALOGUE.glob("*.json"))}


@functools.cache
def _aliases() -> Mapping[str, str]:
    found: dict[str, str] = {}
    for name, path in model_catalogue().items():
        for alias in read_json(path).get("rooftrace", {}).get("aliases", ()):
            found[alias.lower()] = name
    return found


@functools.lru_cache(maxsize=256)
def _shipped(name: str) -> ModelSpec:
    path = model_catalogue()[name]
    return spec_from_config(read_json(path), name=name, where=f"models/{path.name}")


def load_model(name_or_path: str | Path) -> ModelSpec:
    """The model called *name_or_path* in the catalogue (alias or hub name too), or that of a config.json or its folder.

    A `hf_quant_config.json` beside the file is read as well. ValueError names the nearest valid models for an unknown
    name, and file and field for a config that cannot be used.
    """
    text = str(name_or_path)
    key = text.strip().lower()
    key = _aliases().get(key, _aliases().get(key.rpartition("/")[2], key))
    if key in model_catalogue():
        return _shipped(key)
    path = Path(text)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        side = path.with_name("hf_quant_config.json")
        quant = read_json(side) if side.is_file() else None
        name = path.parent.resolve().name if path.name == "config.json" else path.stem
        return spec_from_config(read_json(path), name=name, where=str(path), quant_config=quant)
    if text.endswith(".json") or ("/" in text.strip("/") and Path(text).parent.is_dir()):
        raise ValueError(f"model file {text} does not exist")
    known = [*model_catalogue(), *_aliases()]
    near = difflib.get_close_matches(key, known, n=3, cutoff=0.4) or list(model_catalogue())
    raise ValueError(f"unknown model {text!r}; nearest valid names: {', '.join(near)} (or a path to a config.json)")
