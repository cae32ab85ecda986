"""From a model's shapes to the operations of one device: what each kind of layer runs, and how it is split."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from hwmodels.experts import even_load
from hwmodels.model import (
    EXPAND,
    LOCAL,
    Attention,
    AttentionKind,
    CompressedAttention,
    Experts,
    LatentAttention,
    ModelSpec,
)
from hwmodels.operations import (
    HEAD_TILE,
    AttentionShape,
    Collective,
    Elementwise,
    Exchange,
    ExpertMlp,
    HeadProducts,
    Linear,
    Recurrence,
    SharedKv,
    StageWork,
)
from hwmodels.parallel import ParallelConfig
from hwmodels.precision import precision

_Matrices = list[tuple[str, int, int]]
"""A row for each matrix: name, columns n of the result, inner size k."""


class _Layers(NamedTuple):
    """The number of layers of each kind in a stage."""

    attention: Mapping[AttentionKind, int]
    """By what their queries see."""
    indexers: int
    """Layers of sparse attention that choose tokens themselves."""
    dense: Mapping[int, int]
    """By the width of their dense MLP."""
    moe: int
    hashed: int
    """Those of them that choose experts by the token's id."""
    norms: Mapping[int, int]
    """By their normalisations."""

    @property
    def linear(self) -> int:
        return self.attention.get("linear", 0)

    @property
    def mixing(self) -> int:
        """Layers with attention of any kind."""
        return sum(n for kind, n in self.attention.items() if kind != "none")

    @property
    def softmax(self) -> int:
        """Layers with softmax attention, windowed or not."""
        return self.mixing - self.linear


class _Softmax(NamedTuple):
    """Layers whose softmax attention is alike in shape."""

    shape: Attention | LatentAttention | CompressedAttention
    kind: AttentionKind
    """One of the kinds of its layers."""
    params: int
    """The parameters of one layer, an indexer apart."""
    full: int
    local: int
    """Layers with a window or chunks."""

    @property
    def layers(self) -> int:
        return self.full + self.local


class _Share(NamedTuple):
    """The weights that layers of a kind put on one device: matrices, and bytes of weights that are none (biases, norms, tables)."""

    linears: list[Linear]
    other_bytes: float


def stage_work(spec: ModelSpec, parallel: ParallelConfig, stage: int, *, kv_precision: str | None = None) -> StageWork:
    """The operations of one device of *stage*; ValueError where the model cannot be split so.

    Vocabulary shards are rounded up, as engines pad them; key-value heads are replicated where tensor exceeds them.
    """
    parallel.check(spec)
    if not 0 <= stage < parallel.pipeline:
        raise ValueError(f"stage {stage} does not exist; there are {parallel.pipeline}")
    count = _counted(spec, parallel.stage_layers(spec.n_layers)[stage])
    first, last = stage == 0, stage == parallel.pipeline - 1
    experts = _expert_mlp(spec, parallel, count.moe)
    softmax = _softmax(spec, count)
    shares = [
        _attention_share(spec, parallel.tensor, count, softmax),
        _mlp_share(spec, parallel.tensor, count.dense),
        _expert_share(spec, parallel, experts, count.hashed),
        _mtp_share(spec) if spec.is_mtp else _Share([], 0.0),
        _ends_share(spec, parallel.tensor, first, last),
    ]
    beside = sum(layers * (n * spec.norm_params + spec.hyper_params) for n, layers in count.norms.items())
    norms = beside * precision(spec.base_precision).weight_bytes
    linears = [op for share in shares for op in share.linears]
    return StageWork(
        linears=tuple(linears),
        experts=experts,
        attention=tuple(_attention_shapes(spec, parallel.tensor, kv_precision, count, softmax)),
        elementwise=tuple(_elementwise(spec, parallel.tensor, count, softmax, first)),
        collectives=(
            *_collectives_of_ends(spec, parallel.tensor, first, last),
            *_collectives_of_layers(spec, parallel, count, softmax),
            *_collectives_of_context(spec, parallel, softmax, kv_precision),
        ),
        recurrence=_recurrence(spec, parallel.tensor, count.linear),
        exchange=_exchange(spec, parallel, count.moe),
        head_products=_head_products(spec, parallel.tensor, count.softmax),
        shared_kv=_shared_kv(spec, parallel, count.softmax, kv_precision),
        resident_bytes=sum(share.other_bytes for share in shares) + norms + sum(op.weight_bytes for op in linears),
    )


def _counted(spec: ModelSpec, layers: Sequence[int]) -> _Layers:
    widths, norms = spec.dense_widths, spec.layer_norms
    return _Layers(
        attention=Counter(spec.layer_attention[i] for i in layers),
        indexers=sum(spec.layer_has_indexer[i] for i in layers) if spec.layer_has_indexer else 0,
        dense=Counter(widths[i] for i in layers if widths[i]),
        moe=sum(spec.layer_is_moe[i] for i in layers),
        hashed=sum(spec.layer_is_moe[i] and i < spec.experts.hash_layers for i in layers) if spec.experts else 0,
        norms=Counter(norms[i] for i in layers),
    )


def _softmax(spec: ModelSpec, count: _Layers) -> tuple[_Softmax, ...]:
    full = count.attention.get("full", 0)
    local = sum(count.attention.get(kind, 0) for kind in LOCAL)
    if isinstance(spec.attention, CompressedAttention):
        kinds: tuple[AttentionKind, ...] = "window", "csa", "hca"
        found = [
            _Softmax(spec.attention, kind, spec.attention_params(kind), count.attention.get(kind, 0), 0)
            for kind in kinds
        ]
    elif spec.local_attention is None:
        blocks = count.attention.get("blocks", 0)
        found = [
            _Softmax(spec.attention, "full", spec.attention_params(), full, local),
            _Softmax(spec.attention, "blocks", spec.attention_params("blocks"), blocks, 0),
        ]
    else:
        found = [
            _Softmax(spec.attention, "full", spec.attention_params(), full, 0),
            _Softmax(spec.local_attention, "window", spec.attention_params("window"), 0, local),
        ]
    return tuple(each for each in found if each.layers)


def _linears(matrices: _Matrices, fmt: str, layers: int) -> list[Linear]:
    return [Linear(name=name, n=n, k=k, precision=fmt, layers=layers) for name, n, k in matrices]


def _beside(matrices: _Matrices, params: int, fmt: str, layers: int) -> float:
    """Bytes of those of a layer's *params* that are in none of its *matrices*, neither being split."""
    return layers * (params - sum(n * k for _, n, k in matrices)) * precision(fmt).weight_bytes


def _attention_share(spec: ModelSpec, tensor: int, count: _Layers, softmax: Sequence[_Softmax]) -> _Share:
    fmt = spec.attention_precision
    linears: list[Linear] = []
    other = 0.0
    for each in softmax:
        split, whole = (each.shape.matrices(spec.hidden, each.kind, devices) for devices in (tensor, 1))
        linears += [replace(op, of_prompts=op.name == EXPAND) for op in _linears(split, fmt, each.layers)]
        other += _beside(whole, each.params, fmt, each.layers)
    if count.indexers:
        linears += _linears(_indexer_matrices(spec), fmt, count.indexers)
        other += _beside(_indexer_matrices(spec), spec.indexer_params, fmt, count.indexers)
    if count.linear:
        linears += _linears(_linear_attention_matrices(spec, tensor), fmt, count.linear)
        other += _beside(_linear_attention_matrices(spec, 1), spec.linear_attention_params, fmt, count.linear)
    return _Share(linears, other)


def _mlp_share(spec: ModelSpec, tensor: int, dense: Mapping[int, int]) -> _Share:
    """*dense*: layers by the width of their MLP."""
    linears: list[Linear] = []
    other = 0.0
    for width, layers in dense.items():
        split, whole = (_mlp_matrices(spec.hidden, width // devices, spec.gated_mlp) for devices in (tensor, 1))
        linears += _linears(split, spec.mlp_precision, layers)
        other += _beside(whole, spec.dense_mlp_params(width), spec.mlp_precision, layers)
    return _Share(linears, other)


def _expert_mlp(spec: ModelSpec, parallel: ParallelConfig, layers: int) -> ExpertMlp | None:
    if not layers:
        return None
    e = spec.experts
    assert isinstance(e, Experts)
    return ExpertMlp(
        name="experts",
        hidden=spec.expert_hidden,
        ffn=e.ffn // parallel.expert_tensor,
        gated=e.gated,
        n_experts=e.n_experts,
        per_token=e.per_token,
        expert=parallel.expert,
        precision=spec.expert_precision,
        layers=layers,
        load=parallel.layout.load(e.n_experts, e.per_token, parallel.expert),
        redundant=parallel.layout.redundant,
        backend=parallel.layout.backend,
    )


def _expert_share(spec: ModelSpec, parallel: ParallelConfig, experts: ExpertMlp | None, hashed: int) -> _Share:
    """Router, shared experts, and the weights of the routed ones, which are no `Linear`; *hashed* layers have no router's bias."""
    e, h = spec.experts, spec.hidden
    if experts is None or e is None:
        return _Share([], 0.0)
    layers = experts.layers
    linears = _linears([("router", e.n_experts, h)], spec.base_precision, layers)
    beside = (layers - hashed) * e.n_experts * e.router_bias + layers * e.router_scales
    other = beside * precision(spec.base_precision).weight_bytes
    if e.shared_ffn:
        # Shared experts split over the devices of an attention group, like a dense MLP.
        width = -(-e.shared_ffn // parallel.tensor)
        linears += _linears(_mlp_matrices(h, width, spec.gated_mlp, "shared"), spec.mlp_precision, layers)
        other += layers * e.shared_gate * h * precision(spec.mlp_precision).weight_bytes
    if e.latent:
        # Each device projects all rows.
        linears += _linears([("latent_in", e.latent, h), ("latent_out", h, e.latent)], spec.mlp_precision, layers)
    local = (e.n_experts + experts.redundant) // parallel.expert
    biases = e.bias * (2 * e.ffn + spec.expert_hidden) * precision(spec.expert_precision).weight_bytes
    return _Share(linears, other + layers * local * (experts.expert_bytes + biases))


def _mtp_share(spec: ModelSpec) -> _Share:
    """The product that joins state and embedding in front of each layer for multi-token prediction.

    A plain product in the base format on every device, as vLLM loads it (`eh_proj` of model_executor/models/deepseek_mtp.py).
    """
    return _Share(_linears([("mtp_projection", spec.hidden, 2 * spec.hidden)], spec.base_precision, spec.n_layers), 0.0)


def _ends_share(spec: ModelSpec, tensor: int, first: bool, last: bool) -> _Share:
    """Embedding and head, with the norms beside them."""
    shard, h = -(-spec.vocab // tensor), spec.hidden
    base_bytes = precision(spec.base_precision).weight_bytes
    linears: list[Linear] = []
    other = 0.0
    if first and not spec.is_mtp:
        other += (shard + spec.position_rows) * h * base_bytes
    if first:
        other += (spec.extra_norms - 1) * spec.norm_params * base_bytes
    if last:
        other += (spec.norm_params + spec.lm_head_params + spec.hyper_head_params) * base_bytes
        if spec.lm_head:
            head = Linear(name="lm_head", n=shard, k=h, precision=spec.base_precision, of_logits=True)
            linears.append(head)
            if spec.is_mtp or (spec.tied_embeddings and first):
                other -= head.weight_bytes
    return _Share(linears, other)


def _attention_shapes(
    spec: ModelSpec, tensor: int, kv_precision: str | None, count: _Layers, softmax: Sequence[_Softmax]
) -> Iterator[AttentionShape]:
    element = precision(kv_precision or spec.kv_precision or spec.base_precision).element_bytes
    for each in softmax:
        if isinstance(each.shape, Attention) and each.kind == "blocks":
            shape = _chosen(spec, each.shape, tensor, element)
        elif isinstance(each.shape, Attention):
            shape = _grouped(each.shape, tensor, element, spec.base_precision)
        elif isinstance(each.shape, CompressedAttention):
            shape = _compressed(spec, each.shape, each.kind, tensor)
        else:
            shape = _latent(each.shape, tensor, element, spec.base_precision)
            if each.shape.index_topk:
                shape = replace(shape, timed_as=_shared(spec, each.shape, shape, each.layers - count.indexers))
        for layers, windowed in ((each.full, False), (each.local, True)):
            window = spec.window_tokens if windowed else None
            if layers:
                yield replace(shape, layers=layers, windowed=windowed, window_tokens=window)
    if count.indexers:
        assert isinstance(spec.attention, LatentAttention)
        latent = _latent(spec.attention, tensor, element, spec.base_precision)
        yield _indexer(spec, spec.attention, latent, count.indexers)


def _grouped(a: Attention, tensor: int, element_bytes: float, fmt: str) -> AttentionShape:
    kv_heads = max(1, a.n_kv_heads // tensor)
    return AttentionShape(
        kind="gqa",
        n_heads=a.n_heads // tensor,
        n_kv_heads=kv_heads,
        qk_dim=a.head_dim,
        v_dim=a.v_dim,
        kv_bytes=kv_heads * (a.head_dim + a.v_dim) * element_bytes,
        precision=fmt,
    )


def _chosen(spec: ModelSpec, a: Attention, tensor: int, element_bytes: float) -> AttentionShape:
    """Attention to the tokens of chosen blocks: each token is a key, and its key of the scoring branch is on each device."""
    grouped = _grouped(a, tensor, element_bytes, spec.base_precision)
    return replace(
        grouped,
        kind="compressed",
        module="msa" if element_bytes > 1.5 else "msa-fp8",
        kv_bytes=grouped.kv_bytes + a.index_dim * element_bytes,
        compress=1,
        chosen=a.index_tokens,
        index_flops=2.0 * a.index_heads * a.index_dim,
        entry_bytes=grouped.kv_bytes,
        multiplied_heads=max(grouped.n_heads, a.n_heads // a.n_kv_heads),
        hidden=spec.hidden,
        in_blocks=spec.attention_precision == "fp8_block",
    )


def _compressed(spec: ModelSpec, a: CompressedAttention, kind: AttentionKind, tensor: int) -> AttentionShape:
    """Each device has the one key of all heads; the indexer is not split."""
    choosing = kind == "csa"
    return AttentionShape(
        kind="compressed",
        n_heads=a.n_heads // tensor,
        n_kv_heads=1,
        qk_dim=a.head_dim,
        v_dim=a.head_dim,
        kv_bytes=spec.compressed_bytes_per_token(kind),
        precision=spec.base_precision,
        module="csa" if choosing else "hca",
        compress=a.tokens_of(kind),
        near=spec.compressed_window,
        chosen=a.index_topk if choosing else 0,
        index_flops=2.0 * a.index_heads * a.index_dim if choosing else 0.0,
        entry_bytes=a.entry_bytes,
        in_blocks=spec.attention_precision == "fp8_block",
        hidden=spec.hidden,
    )


def _latent(a: LatentAttention, tensor: int, element_bytes: float, fmt: str) -> AttentionShape:
    heads = a.n_heads // tensor
    return AttentionShape(
        kind="mla",
        n_heads=heads,
        n_kv_heads=1,
        qk_dim=a.nope_dim + a.rope_dim,
        v_dim=a.v_dim,
        kv_bytes=(a.kv_lora_rank + a.rope_dim) * element_bytes,
        precision=fmt,
        latent_dim=a.kv_lora_rank,
        rope_dim=a.rope_dim,
        absorbed=bool(a.index_topk),
        expand_flops=0.0 if a.index_topk else 2.0 * a.kv_lora_rank * heads * (a.nope_dim + a.v_dim),
    )


def _shared(spec: ModelSpec, a: LatentAttention, latent: AttentionShape, layers: int) -> AttentionShape:
    """Layers that attend to the tokens which another has chosen, as their modules were timed; their sums are of those tokens."""
    return AttentionShape(
        kind="compressed",
        module="dsa-shared" if latent.kv_bytes > a.kv_lora_rank + a.rope_dim else "dsa-shared-fp8",
        n_heads=latent.n_heads,
        n_kv_heads=1,
        qk_dim=a.absorbed_width,
        v_dim=a.absorbed_width,
        kv_bytes=latent.kv_bytes,
        precision=latent.precision,
        layers=layers,
        near=math.inf,
        entry_bytes=latent.kv_bytes,
        multiplied_heads=max(latent.n_heads, HEAD_TILE),
        hidden=spec.hidden,
    )


def _indexer(spec: ModelSpec, a: LatentAttention, latent: AttentionShape, layers: int) -> AttentionShape:
    """Queries and keys only: the indexer scores every pair and mixes no values."""
    shared, key_bytes = _shared(spec, a, latent, layers), spec.index_bytes_per_layer()
    return AttentionShape(
        kind="indexer",
        n_heads=a.index_heads,
        n_kv_heads=1,
        qk_dim=a.index_dim,
        v_dim=0,
        kv_bytes=key_bytes,
        precision=latent.precision,
        layers=layers,
        timed_as=replace(
            shared,
            module=shared.module.replace("-shared", ""),
            kv_bytes=latent.kv_bytes + key_bytes,
            compress=1,
            near=0,
            chosen=a.index_topk,
            index_flops=2.0 * a.index_heads * a.index_dim,
        ),
    )


def _collectives_of_ends(spec: ModelSpec, tensor: int, first: bool, last: bool) -> Iterator[Collective]:
    act = precision(spec.base_precision).element_bytes
    if tensor == 1:
        return
    if first:
        yield Collective(name="embedding", kind="all_reduce", bytes_per_row=spec.hidden * act, n=tensor)
    if last and spec.lm_head:
        yield Collective(name="logits", kind="all_gather", bytes_per_row=spec.vocab * act, n=tensor, of_logits=True)


def _collectives_of_layers(
    spec: ModelSpec, parallel: ParallelConfig, count: _Layers, softmax: Sequence[_Softmax]
) -> Iterator[Collective]:
    t, row = parallel.tensor, spec.hidden * precision(spec.base_precision).element_bytes
    if t > 1:
        # One behind attention; one behind the MLP, where experts with data-parallel attention reduce otherwise.
        after_mlp = sum(count.dense.values()) + (count.moe if parallel.groups == 1 else 0)
        for name, layers in (("attention", count.mixing), ("mlp", after_mlp)):
            if layers:
                yield Collective(name=name, kind="all_reduce", bytes_per_row=row, n=t, layers=layers)
        for each in softmax:
            if isinstance(each.shape, Attention) and each.shape.norm_over_heads:
                # A sum of squares in 32 bits of queries and one of keys, as engines have it of MiniMax (from knowledge). OLMo's
                # layers gather queries and keys whole, which is no less.
                yield Collective(name="query_key_norm", kind="all_reduce", bytes_per_row=8.0, n=t, layers=each.layers)
    if parallel.groups > 1 and count.moe and t > 1:
        # Each device of a group has brought back its share of the group's rows.
        yield Collective(name="experts", kind="all_gather", bytes_per_row=row, n=t, layers=count.moe)


def _joined(
    name: str, n: int, layers: int, query_bytes: float, output_bytes: float, heads: int
) -> tuple[Collective, ...]:
    """Bytes that *n* devices which share KV send of each query token in each layer: queries of all heads, a sum of exponentials in
    32 bits of each head from each device, and results that are added up (vLLM 0.32.0, `cp_lse_ag_out_rs`)."""
    sizes = (
        ("queries", "all_gather", query_bytes * heads * n),
        ("sums", "all_gather", 4.0 * heads * n * n),
        ("outputs", "reduce_scatter", output_bytes * heads * n),
    )
    return tuple(
        Collective(name=f"{name}_{what}", kind=kind, bytes_per_row=size, n=n, layers=layers)
        for what, kind, size in sizes
    )


def _collectives_of_context(
    spec: ModelSpec, parallel: ParallelConfig, softmax: Sequence[_Softmax], kv_precision: str | None
) -> Iterator[Collective]:
    """Collectives of all rows between devices that share sequences."""
    act = precision(spec.base_precision).element_bytes
    element = precision(kv_precision or spec.kv_precision or spec.base_precision).element_bytes
    shards, groups = parallel.decode_context, parallel.prefill_context
    for each in softmax:
        a = each.shape
        if shards > 1 and isinstance(a, Attention):
            heads = a.n_heads // parallel.tensor
            yield from _joined("context", shards, each.layers, a.head_dim * act, a.v_dim * act, heads)
        if groups > 1 and isinstance(a, Attention | LatentAttention):
            # Each group caches what all have computed.
            shape = (
                _grouped(a, parallel.tensor, element, spec.base_precision)
                if isinstance(a, Attention)
                else _latent(a, parallel.tensor, element, spec.base_precision)
            )
            size = shape.kv_bytes * groups
            yield Collective(name="context_kv", kind="all_gather", bytes_per_row=size, n=groups, layers=each.layers)


def _shared_kv(spec: ModelSpec, parallel: ParallelConfig, layers: int, kv_precision: str | None) -> SharedKv | None:
    n, a = parallel.decode_context, spec.attention
    if n == 1:
        return None
    if not isinstance(a, LatentAttention):
        return SharedKv(n=n, interleave=parallel.kv_interleave)
    act = precision(spec.base_precision).element_bytes
    element = precision(kv_precision or spec.kv_precision or spec.base_precision).element_bytes
    latent, heads = a.kv_lora_rank + a.rope_dim, a.n_heads // parallel.tensor
    return SharedKv(
        n=n,
        interleave=parallel.kv_interleave,
        of_decodes=_joined("context", n, layers, latent * act, a.kv_lora_rank * act, heads),
        of_past=Collective(name="context_past", kind="all_gather", bytes_per_row=latent * element, n=n, layers=layers),
    )


def _exchange(spec: ModelSpec, parallel: ParallelConfig, layers: int) -> Exchange | None:
    e = spec.experts
    if parallel.groups == 1 or not layers or e is None:
        return None
    shape = e.n_experts, e.per_token, parallel.expert
    return Exchange(
        row_bytes=spec.expert_hidden * precision(spec.base_precision).element_bytes,
        hidden=spec.expert_hidden,
        n=parallel.tensor * parallel.groups,
        tensor=parallel.tensor,
        expert=parallel.expert,
        per_token=e.per_token,
        n_experts=e.n_experts + parallel.layout.redundant,
        layers=layers,
        mode=parallel.layout.exchange,
        # Rows go where experts lie, whatever else is known of their popularity.
        load=parallel.layout.load(*shape) or even_load(*shape),
        sent_bytes=1.0 if spec.expert_precision in ("fp8", "fp8_static", "fp8_block") else 2.0,
    )


def _head_products(spec: ModelSpec, tensor: int, layers: int) -> HeadProducts | None:
    a = spec.attention
    if not layers or not isinstance(a, LatentAttention):
        return None
    return HeadProducts(
        heads=a.n_heads // tensor,
        shapes=((a.nope_dim, a.kv_lora_rank), (a.kv_lora_rank, a.v_dim)),
        precision=spec.attention_precision,
        layers=layers,
    )


def _elementwise(
    spec: ModelSpec, tensor: int, count: _Layers, softmax: Sequence[_Softmax], first: bool
) -> Iterator[Elementwise]:
    h, act = spec.hidden, precision(spec.base_precision).element_bytes
    # Each norm reads the residual and the update, and writes both sum and result.
    if spec.hyper_streams:
        # At attention and at the MLP: the streams are read and give one input; they and the result are read, and they written.
        n, places = spec.hyper_streams, 2 * sum(count.norms.values())
        yield Elementwise(name="hyper_in", bytes_per_row=(n + 1.0) * h * act, launches=1, layers=places, op="mhc_pre")
        yield Elementwise(
            name="hyper_out", bytes_per_row=(2.0 * n + 1) * h * act, launches=1, layers=places, op="mhc_post"
        )
    for norms, layers in count.norms.items():
        yield Elementwise(name="norms", bytes_per_row=4.0 * h * act * norms, launches=norms, layers=layers)
    for each in softmax:
        a, layers = each.shape, each.layers
        chosen = each.kind == "blocks" or (isinstance(a, LatentAttention) and a.index_topk)
        if isinstance(a, CompressedAttention) or chosen:
            # The modules that were timed have these within.
            continue
        width = a.n_heads // tensor * (a.head_dim if isinstance(a, Attention) else a.v_dim)
        yield Elementwise(name="rotary_and_cache", bytes_per_row=4.0 * width * act, launches=2, layers=layers)
        if isinstance(a, Attention) and a.norm_over_heads:
            # Squares and their sum, and the products with root and weights: queries and keys are read twice and written once.
            heads = a.n_heads // tensor + max(1, a.n_kv_heads // tensor)
            yield Elementwise(
                name="query_key_norm", bytes_per_row=3.0 * heads * a.head_dim * act, launches=2, layers=layers
            )
    if count.linear and spec.linear_attention is not None:
        s = spec.linear_attention
        values = s.n_value_heads // tensor * s.value_dim
        # The gated norm reads the layer's result and the gate, and writes their product.
        yield Elementwise(
            name="linear_attention_norm", bytes_per_row=3.0 * values * act, launches=1, layers=count.linear
        )
    for width, layers in count.dense.items():
        passes = 3.0 if spec.gated_mlp else 2.0
        yield Elementwise(name="activation", bytes_per_row=passes * (width // tensor) * act, launches=1, layers=layers)
    if first:
        yield Elementwise(name="embedding", bytes_per_row=2.0 * h * act, launches=1)


def _recurrence(spec: ModelSpec, tensor: int, layers: int) -> Recurrence | None:
    s = spec.linear_attention
    if not layers or s is None:
        return None
    return Recurrence(
        rule=s.rule,
        n_key_heads=max(1, s.n_key_heads // tensor),
        n_value_heads=s.n_value_heads // tensor,
        key_dim=s.key_dim,
        value_dim=s.value_dim,
        conv_width=s.conv_width,
        state_bytes=s.state_bytes,
        conv_bytes=s.conv_bytes,
        layers=layers,
    )


def _indexer_matrices(spec: ModelSpec) -> _Matrices:
    a = spec.attention
    assert isinstance(a, LatentAttention)
    return a.index_matrices(spec.hidden)


def _linear_attention_matrices(spec: ModelSpec, tensor: int) -> _Matrices:
    a = spec.linear_attention
    assert a is not None
    if a.rule == "kda":
        return a.kda_matrices(spec.hidden, tensor)
    keys, values = max(1, a.n_key_heads // tensor) * a.key_dim, a.n_value_heads * a.value_dim
    if a.rule == "mamba2":
        # Gate, values, B, C and the step size of each head in one product.
        columns = 2 * keys + (2 * values + a.n_value_heads) // tensor
        return [("linear_attention_in", columns, spec.hidden), ("linear_attention_out", spec.hidden, values // tensor)]
    return [
        # Queries, keys, values and their gate in one product; the write strength and decay of each head in another.
        ("linear_attention_in", 2 * keys + 2 * values // tensor, spec.hidden),
        ("linear_attention_decay", 2 * a.n_value_heads // tensor, spec.hidden),
        ("linear_attention_out", spec.hidden, values // tensor),
    ]


def _mlp_matrices(hidden: int, ffn: int, gated: bool, prefix: str = "mlp") -> _Matrices:
    return [
        (f"{prefix}_gate_up" if gated else f"{prefix}_up", ffn * (2 if gated else 1), hidden),
        (f"{prefix}_down", hidden, ffn),
    ]
