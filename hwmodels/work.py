"""From a model's shapes to the operations of one device: what each kind of layer runs, and how it is split."""

from __future__ import annotations

from hwmodels.model import Attention, Experts, ModelSpec
from hwmodels.operations import (
    AttentionShape,
    Collective,
    Elementwise,
    ExpertMlp,
    Linear,
    Recurrence,
    StageWork,
)
from hwmodels.parallel import ParallelConfig
from hwmodels.precision import precision


def _attention_matrices(spec: ModelSpec, tensor: int) -> list[tuple[str, int, int]]:
    a, h = spec.attention, spec.hidden
    heads = a.n_heads // tensor
    if isinstance(a, Attention):
        kv = max(1, a.n_kv_heads // tensor)
        width = heads * a.head_dim
        return [
            ("qkv", width * (2 if a.output_gate else 1) + 2 * kv * a.head_dim, h),
            ("attention_out", h, width),
        ]
    found: list[tuple[str, int, int]] = []
    query = heads * (a.nope_dim + a.rope_dim)
    if a.q_lora_rank:
        found += [("qkv_down", a.q_lora_rank + a.kv_lora_rank + a.rope_dim, h), ("q_up", query, a.q_lora_rank)]
    else:
        found += [("q", query, h), ("kv_down", a.kv_lora_rank + a.rope_dim, h)]
    found += [("kv_up", heads * (a.nope_dim + a.v_dim), a.kv_lora_rank), ("attention_out", h, heads * a.v_dim)]
    if a.index_topk:
        found += [
            ("index_q", a.index_heads * a.index_dim, a.q_lora_rank),
            ("index_k", a.index_dim + a.index_heads, h),
        ]
    return found


def _linear_attention_matrices(spec: ModelSpec, tensor: int) -> list[tuple[str, int, int]]:
    a = spec.linear_attention
    assert a is not None
    keys, values = a.n_key_heads * a.key_dim, a.n_value_heads * a.value_dim
    return [
        ("linear_attention_in", (2 * keys + 2 * values + 2 * a.n_value_heads) // tensor, spec.hidden),
        ("linear_attention_out", spec.hidden, values // tensor),
    ]


def _mlp_matrices(hidden: int, ffn: int, gated: bool, prefix: str = "mlp") -> list[tuple[str, int, int]]:
    return [
        (f"{prefix}_gate_up" if gated else f"{prefix}_up", ffn * (2 if gated else 1), hidden),
        (f"{prefix}_down", hidden, ffn),
    ]


def _attention_shapes(
    spec: ModelSpec, tensor: int, kv_precision: str, plain: int, windowed: int
) -> list[AttentionShape]:
    element = precision(kv_precision).element_bytes
    a, found = spec.attention, []
    for layers, is_window in ((plain, False), (windowed, True)):
        if not layers:
            continue
        window = spec.window_tokens if is_window else None
        if isinstance(a, Attention):
            kv = max(1, a.n_kv_heads // tensor)
            found.append(
                AttentionShape(
                    kind="gqa",
                    n_heads=a.n_heads // tensor,
                    n_kv_heads=kv,
                    qk_dim=a.head_dim,
                    v_dim=a.head_dim,
                    kv_bytes=2 * kv * a.head_dim * element,
                    precision=spec.base_precision,
                    layers=layers,
                    windowed=is_window,
                    window_tokens=window,
                )
            )
            continue
        heads = a.n_heads // tensor
        found.append(
            AttentionShape(
                kind="mla",
                n_heads=heads,
                n_kv_heads=1,
                qk_dim=a.nope_dim + a.rope_dim,
                v_dim=a.v_dim,
                kv_bytes=(a.kv_lora_rank + a.rope_dim) * element,
                precision=spec.base_precision,
                layers=layers,
                windowed=is_window,
                window_tokens=window,
                latent_dim=a.kv_lora_rank,
                rope_dim=a.rope_dim,
                absorbed=bool(a.index_topk),
                expand_flops=0.0 if a.index_topk else 2.0 * a.kv_lora_rank * heads * (a.nope_dim + a.v_dim),
            )
        )
        if a.index_topk:
            # Queries and keys only: the indexer scores every pair and mixes no values.
            found.append(
                AttentionShape(
                    kind="indexer",
                    n_heads=a.index_heads,
                    n_kv_heads=1,
                    qk_dim=a.index_dim,
                    v_dim=0,
                    kv_bytes=spec.index_bytes_per_layer(),
                    precision=spec.base_precision,
                    layers=layers,
                )
            )
    return found


def stage_work(spec: ModelSpec, parallel: ParallelConfig, stage: int, *, kv_precision: str | None = None) -> StageWork:
    """The operations of one device of *stage*; ValueError where the model cannot be split so.

    Vocabulary shards are rounded up, as engines pad them; key-value heads are replicated where tensor exceeds them.
    """
    parallel.check(spec)
    if not 0 <= stage < parallel.pipeline:
        raise ValueError(f"stage {stage} does not exist; there are {parallel.pipeline}")
    layers = parallel.stage_layers(spec.n_layers)[stage]
    t, h = parallel.tensor, spec.hidden
    cache = kv_precision or spec.kv_precision or spec.base_precision
    act = precision(spec.base_precision).element_bytes
    n_linear = sum(spec.layer_is_linear[i] for i in layers)
    n_windowed = sum(spec.layer_is_windowed[i] and not spec.layer_is_linear[i] for i in layers)
    n_softmax = len(layers) - n_linear
    n_moe = sum(spec.layer_is_moe[i] for i in layers)
    n_dense = len(layers) - n_moe
    first, last = stage == 0, stage == parallel.pipeline - 1

    linears: list[Linear] = []
    resident = 0.0

    def add(matrices: list[tuple[str, int, int]], fmt: str, count: int) -> None:
        linears.extend(
            Linear(name=n, n=rows, k=cols, precision=fmt, layers=count) for n, rows, cols in matrices if count
        )

    add(_attention_matrices(spec, t), spec.attention_precision, n_softmax)
    whole = sum(n * k for _, n, k in _attention_matrices(spec, 1))
    resident += n_softmax * (spec.attention_params - whole) * precision(spec.attention_precision).weight_bytes
    if n_linear:
        add(_linear_attention_matrices(spec, t), spec.attention_precision, n_linear)
        whole = sum(n * k for _, n, k in _linear_attention_matrices(spec, 1))
        resident += n_linear * (spec.linear_attention_params - whole) * precision(spec.attention_precision).weight_bytes
    if n_dense:
        add(_mlp_matrices(h, spec.ffn // t, spec.gated_mlp), spec.mlp_precision, n_dense)
        whole = sum(n * k for _, n, k in _mlp_matrices(h, spec.ffn, spec.gated_mlp))
        resident += n_dense * (spec.dense_mlp_params - whole) * precision(spec.mlp_precision).weight_bytes
    experts: ExpertMlp | None = None
    base_bytes = precision(spec.base_precision).weight_bytes
    if n_moe:
        e = spec.experts
        assert isinstance(e, Experts)
        add([("router", e.n_experts, h)], spec.base_precision, n_moe)
        resident += n_moe * e.n_experts * e.router_bias * base_bytes
        if e.shared_ffn:
            # Shared experts split over the devices of an attention group, like a dense MLP.
            width = -(-e.shared_ffn // t)
            add(_mlp_matrices(h, width, True, "shared"), spec.mlp_precision, n_moe)
            resident += n_moe * e.shared_gate * h * precision(spec.mlp_precision).weight_bytes
        experts = ExpertMlp(
            name="experts",
            hidden=h,
            ffn=e.ffn // parallel.expert_tensor,
            n_experts=e.n_experts,
            per_token=e.per_token,
            expert=parallel.expert,
            precision=spec.expert_precision,
            layers=n_moe,
        )
        local = e.n_experts // parallel.expert
        small = spec.expert_params - 3 * h * e.ffn
        resident += n_moe * local * (experts.expert_bytes + small * precision(spec.expert_precision).weight_bytes)
    vocab_shard = -(-spec.vocab // t)
    collectives: list[Collective] = []
    if first:
        resident += (vocab_shard + spec.position_rows) * h * base_bytes
        resident += (spec.extra_norms - 1) * spec.norm_params * base_bytes
        if t > 1:
            collectives.append(Collective(name="embedding", kind="all_reduce", bytes_per_row=h * act, n=t))
    if last:
        resident += (spec.norm_params + spec.lm_head_params) * base_bytes
        if spec.lm_head:
            head = Linear(name="lm_head", n=vocab_shard, k=h, precision=spec.base_precision, of_logits=True)
            linears.append(head)
            if spec.tied_embeddings and first:
                resident -= head.weight_bytes
            if t > 1:
                collectives.append(
                    Collective(name="logits", kind="all_gather", bytes_per_row=spec.vocab * act, n=t, of_logits=True)
                )
    resident += len(layers) * spec.norms_per_layer * spec.norm_params * base_bytes
    resident += sum(op.weight_bytes for op in linears)

    if t > 1:
        # One behind attention; one behind the MLP, where experts with data-parallel attention reduce otherwise.
        after_mlp = len(layers) if parallel.data == 1 else n_dense
        for name, count in (("attention", len(layers)), ("mlp", after_mlp)):
            if count:
                collectives.append(Collective(name=name, kind="all_reduce", bytes_per_row=h * act, n=t, layers=count))
    if parallel.data > 1 and n_moe and spec.experts is not None:
        group = parallel.tensor * parallel.data
        if parallel.expert > 1:
            # Every token travels once to each of its experts, its row split over the devices of its attention group.
            kind, sent = "all_to_all", min(spec.experts.per_token, parallel.expert) / t
        else:
            # Every device holds a slice of every expert and needs the rows of all groups; back it is a reduce-scatter.
            kind, sent = "all_gather", parallel.data
        for name in ("dispatch", "combine"):
            collectives.append(Collective(name=name, kind=kind, bytes_per_row=h * act * sent, n=group, layers=n_moe))
        if t > 1:
            collectives.append(Collective(name="experts", kind="all_gather", bytes_per_row=h * act, n=t, layers=n_moe))
    q_width = (
        spec.attention.n_heads
        // t
        * (spec.attention.head_dim if isinstance(spec.attention, Attention) else spec.attention.v_dim)
    )
    elementwise = [
        # Each norm reads the residual and the update, and writes both sum and result.
        Elementwise(
            name="norms",
            bytes_per_row=4.0 * h * act * spec.norms_per_layer,
            launches=spec.norms_per_layer,
            layers=len(layers),
        ),
        Elementwise(name="rotary_and_cache", bytes_per_row=4.0 * q_width * act, launches=2, layers=len(layers)),
    ]
    if n_dense:
        width = spec.ffn // t
        elementwise.append(
            Elementwise(
                name="activation",
                bytes_per_row=(3.0 if spec.gated_mlp else 2.0) * width * act,
                launches=1,
                layers=n_dense,
            )
        )
    if first:
        elementwise.append(Elementwise(name="embedding", bytes_per_row=2.0 * h * act, launches=1))
    recurrence = None
    if n_linear and spec.linear_attention is not None:
        s = spec.linear_attention
        cells = s.n_value_heads * s.key_dim * s.value_dim / t
        # Delta rule: read with the key, write the outer product, read with the query (Yang et al., arXiv 2406.06484).
        recurrence = Recurrence(
            flops_per_row=6.0 * cells * n_linear, bytes_per_sequence=2.0 * cells * s.state_bytes * n_linear
        )
    return StageWork(
        linears=tuple(linears),
        experts=experts,
        attention=tuple(_attention_shapes(spec, t, cache, n_softmax - n_windowed, n_windowed)),
        elementwise=tuple(elementwise),
        collectives=tuple(collectives),
        recurrence=recurrence,
        resident_bytes=resident,
    )


def kv_bytes_per_token_per_device(
    spec: ModelSpec, parallel: ParallelConfig, stage: int, kv_precision: str | None
) -> float:
    """Cached bytes of one token on one device of *stage*; data-parallel attention keeps a token on one group only."""
    shapes = stage_work(spec, parallel, stage, kv_precision=kv_precision).attention
    return sum(shape.kv_bytes * shape.layers for shape in shapes)
