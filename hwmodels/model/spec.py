"""Transformers as the cost models see them: shapes, parameters, cache and number formats, counted and never stated."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from hwmodels.model.speech import Speech
from hwmodels.model.vision import Vision
from hwmodels.precision import precision

AttentionKind = Literal["full", "window", "chunked", "linear", "csa", "hca", "blocks", "none"]
"""Tokens that a layer's queries see: every token before them, the last `window_tokens`, those of their own chunk of `window_tokens`
(Llama 4), a state of constant size in place of tokens, the last `window_tokens` and chosen (csa) or all (hca) keys that stand for
several of those before (DeepSeek-V4), the tokens of chosen blocks (MiniMax-M3), or nothing: the layer has no attention."""
LOCAL: tuple[AttentionKind, ...] = "window", "chunked"
Rule = Literal["delta", "kda", "mamba2"]
"""How a layer of linear attention updates its state: the gated delta rule (Yang et al., arXiv 2412.06464), the same with a decay of
each number of a key (Kimi delta attention, arXiv 2510.26692), or Mamba-2's selective state space (Dao and Gu, arXiv 2405.21060)."""


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
    norm_over_heads: bool = False
    """Queries and keys are normalised over all heads together, of which devices that split them know the sum alone."""
    sink_params: int = 0
    output_gate: bool = False
    """Queries come with a gate of the same width (Qwen3.5)."""
    head_gate: bool = False
    """A gate of one number for each head, projected beside the queries (Step-3.7)."""
    value_dim: int | None = None
    """Width of a head's values; None: that of its keys."""
    keys_as_values: bool = False
    """Values are projected by the keys' matrix, and are cached beside them all the same (Gemma 4)."""
    index_heads: int = 0
    """Layers that attend to blocks: heads of the branch that scores every token for a choice of them (MiniMax-M3)."""
    index_dim: int = 0
    index_tokens: int = 0
    """Tokens of the blocks that a query chooses."""

    @property
    def v_dim(self) -> int:
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def query_columns(self) -> int:
        """Columns of the projection of queries, with what gates them."""
        return self.n_heads * (self.head_dim * (2 if self.output_gate else 1) + self.head_gate)

    @property
    def kv_columns(self) -> int:
        """Columns of the projection of one head's keys and values."""
        return self.head_dim + (0 if self.keys_as_values else self.v_dim)

    def matrices(self, hidden: int, kind: AttentionKind, tensor: int = 1) -> list[tuple[str, int, int]]:
        """Name, columns n and inner size k of a layer's products on one of *tensor* devices; a branch that scores is on each."""
        heads, kv = self.n_heads // tensor, max(1, self.n_kv_heads // tensor)
        found = [
            ("qkv", self.query_columns // tensor + kv * self.kv_columns, hidden),
            ("attention_out", hidden, heads * self.v_dim),
        ]
        return [*found, ("index_qk", (self.index_heads + 1) * self.index_dim, hidden)] if kind == "blocks" else found


EXPAND = "kv_up"
"""The product that expands latents into keys and values of all heads, which decodes do not: they absorb it."""


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
    output_gate: bool = False
    """A gate as wide as the heads' values, projected from the hidden state (Kimi-K3)."""
    index_topk: int = 0
    index_heads: int = 0
    index_dim: int = 0

    @property
    def absorbed_width(self) -> int:
        """Half of the numbers that a head multiplies for a key: key and value are the latent, and the rotated part is of the key
        alone."""
        return self.kv_lora_rank + self.rope_dim // 2

    def matrices(self, hidden: int, _: AttentionKind, tensor: int = 1) -> list[tuple[str, int, int]]:
        """Name, columns n and inner size k of a layer's products on one of *tensor* devices, but an indexer's: heads are split."""
        heads = self.n_heads // tensor
        query, latent = heads * (self.nope_dim + self.rope_dim), self.kv_lora_rank + self.rope_dim
        if self.q_lora_rank:
            found = [("qkv_down", self.q_lora_rank + latent, hidden), ("q_up", query, self.q_lora_rank)]
        else:
            found = [("q", query, hidden), ("kv_down", latent, hidden)]
        if self.output_gate:
            found.append(("attention_gate", heads * self.v_dim, hidden))
        expand = (EXPAND, heads * (self.nope_dim + self.v_dim), self.kv_lora_rank)
        return [*found, expand, ("attention_out", hidden, heads * self.v_dim)]

    def index_matrices(self, hidden: int) -> list[tuple[str, int, int]]:
        """As `matrices`, of an indexer, which every device has whole."""
        return [
            ("index_q", self.index_heads * self.index_dim, self.q_lora_rank),
            ("index_k", self.index_dim + self.index_heads, hidden),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedAttention:
    """DeepSeek-V4's attention: one cached vector a token, key and value of all heads at once.

    Layers see a window of them and, beyond it, vectors that stand for `csa_tokens` tokens, of which an indexer chooses
    `index_topk`, or for `hca_tokens`, all of which are attended. Outputs leave through groups of heads.
    """

    n_heads: int
    head_dim: int
    rope_dim: int
    """Those of the `head_dim` numbers that are rotated."""
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    index_topk: int
    index_heads: int
    index_dim: int
    csa_tokens: int = 4
    hca_tokens: int = 128

    @property
    def v_dim(self) -> int:
        return self.head_dim

    @property
    def entry_bytes(self) -> float:
        """One cached vector: fp8 with a scale for each 64 numbers, rotated ones in 16 bits (as engines keep it, from knowledge)."""
        plain = self.head_dim - self.rope_dim
        return plain + plain / 64 + 2.0 * self.rope_dim

    @property
    def index_bytes(self) -> float:
        """One key of the indexer: fp8 and one fp32 scale."""
        return self.index_dim + 4.0

    def tokens_of(self, kind: AttentionKind) -> int:
        """The tokens that a compressed vector stands for in layers of *kind*; 0: they have none."""
        return {"csa": self.csa_tokens, "hca": self.hca_tokens}.get(kind, 0)

    def matrices(self, hidden: int, kind: AttentionKind, tensor: int = 1) -> list[tuple[str, int, int]]:
        """Name, columns n and inner size k of a layer's products on one of *tensor* devices: heads and groups are split."""
        heads, groups = self.n_heads // tensor, max(1, self.o_groups // tensor)
        found = [
            ("qkv_down", self.q_lora_rank + self.head_dim, hidden),
            ("q_up", heads * self.head_dim, self.q_lora_rank),
            ("group_out", groups * self.o_lora_rank, heads // groups * self.head_dim),
            ("attention_out", hidden, groups * self.o_lora_rank),
        ]
        if kind == "hca":
            found.append(("compress", 2 * self.head_dim, hidden))
        if kind == "csa":
            found += [
                # Of two overlapping runs of tokens a vector and its gate, of attention and of the indexer.
                ("compress", 4 * self.head_dim, hidden),
                ("index_compress", 4 * self.index_dim, hidden),
                ("index_q", self.index_heads * self.index_dim, self.q_lora_rank),
                ("index_weights", self.index_heads, hidden),
            ]
        return found

    def params(self, hidden: int, kind: AttentionKind) -> int:
        total = sum(n * k for _, n, k in self.matrices(hidden, kind))
        # Norms of the latent query and of the vector, a sink for each head; of compressed ones a place's bias and a norm.
        total += self.q_lora_rank + self.head_dim + self.n_heads
        if kind == "hca":
            total += (self.hca_tokens + 1) * self.head_dim
        if kind == "csa":
            total += (2 * self.csa_tokens + 1) * (self.head_dim + self.index_dim)
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """A layer with a fixed state (Qwen3-Next, Qwen3.5, Nemotron-H): no KV cache, one state a sequence.

    Beside the state of each head the layer keeps the last `conv_width - 1` inputs of its short convolution. Of Mamba-2 the heads
    of queries and keys are its groups of C and B, and their width that of the state.
    """

    rule: Rule = "delta"
    gate_rank: int = 0
    """Kimi delta attention: the inner width of the output gate's projection; 0: it is one matrix."""
    n_key_heads: int
    n_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    state_bytes: float = 4.0
    """Bytes of one element of the state (fp32 unless the config says otherwise)."""
    conv_bias: bool = False
    conv_bytes: float = 2.0
    """Bytes of one kept input of the convolution: the model's own format."""

    def kda_matrices(self, hidden: int, tensor: int = 1) -> list[tuple[str, int, int]]:
        """Name, n and k of Kimi delta attention's products on one of *tensor* devices: heads are split, inner widths are not."""
        values = self.n_value_heads * self.value_dim // tensor
        gate = [("linear_attention_gate", values, self.gate_rank or hidden)]
        return [
            ("linear_attention_in", 3 * values, hidden),
            ("linear_attention_low", self.key_dim + self.gate_rank + self.n_value_heads // tensor, hidden),
            ("linear_attention_decay", values, self.key_dim),
            *gate,
            ("linear_attention_out", hidden, values),
        ]

    @property
    def conv_channels(self) -> int:
        """Queries, keys and values, which the convolution runs over."""
        return 2 * self.n_key_heads * self.key_dim + self.n_value_heads * self.value_dim

    @property
    def cells(self) -> int:
        """Elements of one sequence's state in one layer."""
        return self.n_value_heads * self.key_dim * self.value_dim

    @property
    def sequence_bytes(self) -> float:
        """Kept for one sequence in one layer: its state and the inputs of the convolution."""
        return self.cells * self.state_bytes + self.conv_channels * (self.conv_width - 1) * self.conv_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture-of-experts MLP: experts behind a router, and experts that every token visits."""

    n_experts: int
    per_token: int
    ffn: int
    gated: bool = True
    latent: int = 0
    """Width of the projection of the hidden state that routed experts work on; 0: they work on the state itself."""
    shared_ffn: int = 0
    """Width of all shared experts together."""
    shared_gate: bool = False
    bias: bool = False
    router_bias: bool = False
    hash_layers: int = 0
    """Layers that choose by the token's id, without a bias (DeepSeek-V4)."""
    router_scales: int = 0
    """Parameters of a layer's router beside its matrix and bias."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """All that a cost model and a memory budget must know of a model. Parameters are counted, never stated."""

    name: str
    family: str
    hidden: int
    vocab: int
    attention: Attention | LatentAttention | CompressedAttention
    local_attention: Attention | None = None
    """The attention of layers with a window or chunks, where its shape is another than `attention`."""
    ffn: int
    """Width of the dense MLP; of the widest where layers differ."""
    layer_ffn: tuple[int, ...] = ()
    """Layer by layer: the width of the dense MLP, 0 where there is none; empty: `ffn` in all layers without experts."""
    layer_is_moe: tuple[bool, ...]
    """Layer by layer: experts, or the dense MLP."""
    layer_attention: tuple[AttentionKind, ...]
    """Layer by layer: what its queries see."""
    layer_has_indexer: tuple[bool, ...] = ()
    """Layer by layer: sparse attention with an indexer of its own; others attend to the tokens that an earlier layer chose."""
    experts: Experts | None = None
    linear_attention: LinearAttention | None = None
    gated_mlp: bool = True
    mlp_bias: bool = False
    hyper_streams: int = 0
    """Residual streams of hyper-connections (DeepSeek-V4), mixed before and after attention and MLP; 0: a plain residual."""
    norm_params: int
    """Parameters of one normalisation: hidden (RMS) or twice that (layer norm)."""
    norms_per_layer: int = 2
    """Half of them a layer's attention's, half its MLP's."""
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
    """Windowed layers: tokens that a query sees, itself included; of chunked ones, the tokens of a chunk."""
    compressed_window: int = 0
    """Compressed attention: tokens that a query sees as they are, itself included."""
    max_positions: int | None = None
    attention_precision: str = "bf16"
    mlp_precision: str = "bf16"
    """Dense MLPs and shared experts."""
    expert_precision: str = "bf16"
    base_precision: str = "bf16"
    """Embedding, LM head, router, normalisations, and the activations."""
    kv_precision: str | None = None
    """The format that the checkpoint asks for; None: the base precision."""
    mtp_layers: int = 0
    """Layers that predict further tokens, beside `n_layers` and in none of the counts here; `mtp_draft` makes them a model."""
    is_mtp: bool = False
    """Its layers are another model's for multi-token prediction: each normalises that model's state and the embedding of the next
    token, projects both together to the hidden size, and ends in a normalisation; embedding and head are that model's own."""
    vision: Vision | None = None
    """The encoder of images beside it, which is in none of the counts here; None: there is none, or it is not modelled."""
    speech: Speech | None = None
    """The encoder of speech, likewise."""
    notes: tuple[str, ...] = ()
    """Sentences on what is left out or approximated."""
    source: str = ""

    @property
    def n_layers(self) -> int:
        return len(self.layer_is_moe)

    @property
    def layer_is_linear(self) -> tuple[bool, ...]:
        """Layer by layer: linear attention."""
        return tuple(kind == "linear" for kind in self.layer_attention)

    @property
    def softmax_kinds(self) -> tuple[AttentionKind, ...]:
        """The kinds of the layers whose attention keeps a cache of tokens, in their order."""
        return tuple(kind for kind in self.layer_attention if kind not in ("linear", "none"))

    @property
    def dense_widths(self) -> tuple[int, ...]:
        """Layer by layer: the width of the dense MLP, 0 where there is none."""
        return self.layer_ffn or tuple(0 if is_moe else self.ffn for is_moe in self.layer_is_moe)

    @property
    def layer_norms(self) -> tuple[int, ...]:
        """Layer by layer: normalisations; a layer without attention, or without an MLP, has half of them."""
        half = self.norms_per_layer // 2
        return tuple(
            self.norms_per_layer - half * (kind == "none") - half * (not ffn and not is_moe)
            for kind, ffn, is_moe in zip(self.layer_attention, self.dense_widths, self.layer_is_moe, strict=True)
        )

    def attention_of(self, kind: AttentionKind) -> Attention | LatentAttention | CompressedAttention:
        """The attention of layers of *kind*."""
        return self.attention if self.local_attention is None or kind not in LOCAL else self.local_attention

    @property
    def is_chunked(self) -> bool:
        """Local layers attend within chunks of fixed places, not within a window that moves along."""
        return "chunked" in self.layer_attention

    def attention_params(self, kind: AttentionKind = "full") -> int:
        """Parameters of one softmax-attention layer of *kind*, an indexer apart."""
        h, a = self.hidden, self.attention_of(kind)
        if isinstance(a, Attention):
            columns = a.query_columns + a.n_kv_heads * a.kv_columns
            weights = h * columns + a.n_heads * a.v_dim * h
            weights += columns * a.qkv_bias + h * a.out_bias + a.qk_norm_params + a.sink_params
            # Queries and the one key of the branch that scores, with a norm each.
            return weights + (kind == "blocks") * (h * (a.index_heads + 1) * a.index_dim + 2 * a.index_dim)
        if isinstance(a, CompressedAttention):
            return a.params(h, kind)
        q = a.n_heads * (a.nope_dim + a.rope_dim)
        query = h * a.q_lora_rank + a.q_lora_rank + a.q_lora_rank * q if a.q_lora_rank else h * q
        latent = h * (a.kv_lora_rank + a.rope_dim) + a.kv_lora_rank
        up = a.kv_lora_rank * a.n_heads * (a.nope_dim + a.v_dim)
        return query + latent + up + a.n_heads * a.v_dim * h * (1 + a.output_gate)

    @property
    def indexer_params(self) -> int:
        """Parameters of one indexer of sparse attention (0 without), beside the layer's attention."""
        h, a = self.hidden, self.attention
        if not isinstance(a, LatentAttention) or not a.index_topk:
            return 0
        return a.q_lora_rank * a.index_heads * a.index_dim + h * (a.index_dim + a.index_heads) + 2 * a.index_dim

    @property
    def linear_attention_params(self) -> int:
        """Parameters of one linear-attention layer (0 without): projections, short convolution, decay, gated norm."""
        a = self.linear_attention
        if a is None:
            return 0
        keys, values = a.n_key_heads * a.key_dim, a.n_value_heads * a.value_dim
        if a.rule == "kda":
            matrices = sum(n * k for _, n, k in a.kda_matrices(self.hidden))
            # Convolutions, the decay's scale of each head and bias of each number, and a norm of one head.
            return matrices + (a.conv_width + a.conv_bias) * a.conv_channels + a.n_value_heads + values + a.value_dim
        # Of each head a step size and a skip beside the decay, and a norm over all of them; or decay and write strength.
        steps, own, norm = (1, 3, values) if a.rule == "mamba2" else (2, 2, a.value_dim)
        project = self.hidden * (2 * keys + 2 * values + steps * a.n_value_heads) + values * self.hidden
        return project + (a.conv_width + a.conv_bias) * a.conv_channels + own * a.n_value_heads + norm

    def dense_mlp_params(self, width: int) -> int:
        """Parameters of one dense MLP of that width; none where it is 0."""
        matrices = self.hidden * width * (3 if self.gated_mlp else 2)
        return matrices + self.mlp_bias * bool(width) * (self.hidden + width * (2 if self.gated_mlp else 1))

    @property
    def expert_params(self) -> int:
        """Parameters of one routed expert."""
        if self.experts is None:
            return 0
        f, h = self.experts.ffn, self.expert_hidden
        return (2 + self.experts.gated) * h * f + self.experts.bias * (2 * f + h)

    @property
    def expert_hidden(self) -> int:
        """Width of the rows that routed experts read and write."""
        return self.hidden if self.experts is None or not self.experts.latent else self.experts.latent

    @property
    def shared_expert_params(self) -> int:
        """Parameters of what every token visits beside the routed experts of one layer: shared experts with their gate, and the
        projections of the hidden state to the routed ones' width and back."""
        if self.experts is None:
            return 0
        matrices = (3 if self.gated_mlp else 2) * self.hidden * self.experts.shared_ffn
        return matrices + self.experts.shared_gate * self.hidden + 2 * self.experts.latent * self.hidden

    @property
    def router_params(self) -> int:
        if self.experts is None:
            return 0
        return self.experts.n_experts * (self.hidden + self.experts.router_bias) + self.experts.router_scales

    @property
    def hyper_params(self) -> int:
        """Parameters of the two hyper-connections of one layer (0 without): gates in and out and the mixing of the streams, each
        from all of them, with a base, and three scales."""
        n = self.hyper_streams
        return 2 * ((2 + n) * n * (n * self.hidden + 1) + 3) if n else 0

    @property
    def hyper_head_params(self) -> int:
        """Parameters of the gates through which the head reads the streams (0 without)."""
        n = self.hyper_streams
        return n * (n * self.hidden + 1) + 1 if n else 0

    @property
    def mtp_projection_params(self) -> int:
        """Parameters of the product in a layer for multi-token prediction that joins state and embedding."""
        return 2 * self.hidden * self.hidden

    @property
    def embedding_params(self) -> int:
        return self.vocab * self.hidden

    @property
    def _all_attention_params(self) -> int:
        """Parameters of the attention of all layers."""
        total = sum(map(self.attention_params, self.softmax_kinds))
        total += sum(self.layer_is_linear) * self.linear_attention_params
        return total + sum(self.layer_has_indexer) * self.indexer_params

    def _count(self, experts_per_layer: int) -> int:
        n_moe = sum(self.layer_is_moe)
        total = self._all_attention_params + sum(map(self.dense_mlp_params, self.dense_widths))
        total += n_moe * (experts_per_layer * self.expert_params + self.shared_expert_params + self.router_params)
        if self.experts is not None:
            total -= min(self.experts.hash_layers, n_moe) * self.experts.n_experts * self.experts.router_bias
        total += (sum(self.layer_norms) + self.extra_norms) * self.norm_params + self.n_layers * self.hyper_params
        total += self.hyper_head_params
        if self.is_mtp:
            total += self.n_layers * self.mtp_projection_params
        else:
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

    def kv_elements_per_layer(self, kind: AttentionKind = "full") -> int:
        """Cached elements of one token in one softmax-attention layer of *kind*, over all GPUs, nothing replicated."""
        a = self.attention_of(kind)
        if isinstance(a, Attention):
            return a.n_kv_heads * (a.head_dim + a.v_dim) + (kind == "blocks") * a.index_dim
        if isinstance(a, CompressedAttention):
            raise ValueError("compressed attention caches bytes, not elements of a format")
        return a.kv_lora_rank + a.rope_dim

    def index_bytes_per_layer(self) -> int:
        """Cached bytes of one token for one indexer of sparse attention: fp8 keys and one fp32 scale."""
        a = self.attention
        return a.index_dim + 4 if isinstance(a, LatentAttention) and a.index_topk else 0

    def kv_bytes_per_token(self, kv_precision: str | None = None) -> float:
        """Cache of one token over all layers and GPUs, nothing replicated; the model's own precision by default."""
        element = precision(kv_precision or self.kv_precision or self.base_precision).element_bytes
        indexers = sum(self.layer_has_indexer) * self.index_bytes_per_layer()
        if isinstance(self.attention, CompressedAttention):
            return sum(map(self.compressed_bytes_per_token, self.softmax_kinds))
        return sum(map(self.kv_elements_per_layer, self.softmax_kinds)) * element + indexers

    def compressed_bytes_per_token(self, kind: AttentionKind) -> float:
        """Cache of one token in one layer of compressed attention, in the one format that there is; its window apart."""
        a = self.attention
        assert isinstance(a, CompressedAttention)
        tokens = a.tokens_of(kind)
        return (a.entry_bytes + (a.index_bytes if kind == "csa" else 0.0)) / tokens if tokens else 0.0

    @property
    def state_bytes_per_sequence(self) -> float:
        """Recurrent state of one sequence over all linear-attention layers, with the inputs of their convolutions (0 without)."""
        a = self.linear_attention
        if a is None:
            return 0.0
        return sum(self.layer_is_linear) * a.sequence_bytes

    def weight_bytes(self) -> float:
        """All weights with their block scales, nothing replicated."""
        n_moe = sum(self.layer_is_moe)
        attention = self._all_attention_params
        mlp = sum(map(self.dense_mlp_params, self.dense_widths)) + n_moe * self.shared_expert_params
        experts = n_moe * self.expert_params * (self.experts.n_experts if self.experts else 0)
        rest = self.params - attention - mlp - experts
        return (
            attention * precision(self.attention_precision).weight_bytes
            + mlp * precision(self.mlp_precision).weight_bytes
            + experts * precision(self.expert_precision).weight_bytes
            + rest * precision(self.base_precision).weight_bytes
        )

    def mtp_draft(self, layers: int | None = None) -> ModelSpec:
        """The layers for multi-token prediction as a model of its own: *layers* of them, all where it is None.

        Each has the shape of the last layer that keeps a cache (of DeepSeek-V4, of one with a window alone), as in DeepSeek-V3
        (arXiv 2412.19437, section 2.2), whose module k is one Transformer block behind a projection of both inputs; embedding
        and head are shared with the model. ValueError where there are no such layers.
        """
        if not self.mtp_layers:
            raise ValueError(
                f"{self.name} has no layers for multi-token prediction: its config.json has none of num_nextn_predict_layers, "
                "mtp_num_hidden_layers and num_mtp_modules, or 0 there"
            )
        n = self.mtp_layers if layers is None else layers
        kind = "window"
        if not isinstance(self.attention, CompressedAttention):
            kind = next(kind for kind in reversed(self.layer_attention) if kind not in ("linear", "none"))
        is_moe = self.layer_is_moe[-1]
        return dataclasses.replace(
            self,
            name=f"{self.name} MTP",
            layer_is_moe=(is_moe,) * n,
            layer_ffn=(0 if is_moe else self.ffn,) * n if self.layer_ffn else (),
            layer_attention=(kind,) * n,
            layer_has_indexer=(True,) * n if self.layer_has_indexer else (),
            linear_attention=None,
            experts=None if self.experts is None else dataclasses.replace(self.experts, hash_layers=0),
            # One for each input, and one before the head.
            norms_per_layer=self.norms_per_layer + 3,
            extra_norms=0,
            position_rows=0,
            lm_head_params=0,
            mtp_layers=0,
            is_mtp=True,
            notes=(),
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
