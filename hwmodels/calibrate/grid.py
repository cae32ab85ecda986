"""Which kernels to time, in an order such that wherever time runs out, what was timed covers the range."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hwmodels.calibrate.backend import Facts, Operation
from hwmodels.model import Attention, load_model
from hwmodels.parallel import ParallelConfig
from hwmodels.work import stage_work

_ROWS = (
    1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192,
)  # fmt: skip
# Serving's usual sizes on a log scale, so that a profile taken for one model serves another.
_CPU_SIDES = (256, 512, 1024, 2048, 4096)
_GPU_SIDES = (1024, 2048, 4096, 8192, 16384)
# Share of the time for each kind; matrix products dominate steps and have the most parameters.
_SHARES = {"gemm": 0.5, "attention": 0.26, "memory": 0.06, "elementwise": 0.12, "host": 0.03, "collective": 0.03}
_LONGEST_CPU_S = 1.0
_CPU_FLOPS_PER_S = 6e10  # of one core, to leave out what would take longer than that
_CPU_BYTES_PER_S = 1e10
_FEWEST_OPERATIONS = 1500.0  # runs of an operation that a budget has room for at least; each is repeated some ten times
_GPU_LONGEST_FLOPS = 2e13


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """The shapes of a model that decide its kernels: (n, k) of its matrix products, attention heads, widths, layers."""

    matrices: tuple[tuple[int, int], ...]
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    ffn: int
    vocabulary: int


def shapes_of(model: str) -> Shapes:
    """Shapes of a catalogue model or a HuggingFace config.json."""
    spec = load_model(model)
    if not isinstance(spec.attention, Attention):
        raise ValueError(f"{model} has latent attention, which no back end times; name a model with grouped queries")
    matrices = {(op.n, op.k) for op in stage_work(spec, ParallelConfig(), 0).linears}
    return Shapes(
        matrices=tuple(sorted(matrices)),
        heads=spec.attention.n_heads,
        kv_heads=spec.attention.n_kv_heads,
        head_dim=spec.attention.head_dim,
        hidden=spec.hidden,
        ffn=spec.ffn,
        vocabulary=spec.vocab,
    )


def grid(facts: Facts, models: Sequence[Shapes], dtypes: Sequence[str], *, budget_s: float = 900.0) -> list[Operation]:
    """Every operation worth timing on the device, the most telling first and the kinds interleaved by `_SHARES`.

    What would take more than a small part of *budget_s* is left out.
    """
    on_cpu = facts.device == "cpu"
    kinds: dict[str, list[Operation]] = {
        "gemm": [],
        "attention": [],
        "memory": [],
        "elementwise": [],
        "host": [],
        "collective": [],
    }
    for dtype in dtypes:
        kinds["gemm"] += _gemms(models, dtype, on_cpu)
        if dtype == "fp8":
            continue
        kinds["attention"] += _attention(models, dtype, on_cpu)
        kinds["memory"] += _spread(
            Operation.of(kind, dtype, rows=rows, width=1024)
            for kind in ("copy", "read")
            for rows in ((256, 1024, 4096, 16384, 32768) if on_cpu else (1024, 16384, 131072, 524288, 1048576))
        )
        kinds["elementwise"] += _spread(_elementwise(models, dtype, on_cpu))
        kinds["host"] += [Operation.of("launch", dtype, count=1)]
        kinds["host"] += [Operation.of(kind, dtype, layers=n) for n in (2, 8, 24) for kind in ("host", "graph")]
    if facts.devices > 1:
        kinds["collective"] += [
            Operation.of("all_reduce", "bf16", bytes=2**power, devices=devices)
            for devices in (2, 4, 8)
            if devices <= facts.devices
            for power in range(12, 30, 2)
        ]
    return _interleave(kinds, {op.key for ops in kinds.values() for op in ops if not _fits(op, facts, budget_s)})


def _gemms(models: Sequence[Shapes], dtype: str, on_cpu: bool) -> list[Operation]:
    """The models' own shapes and the general ones in turn, each list spread on its own."""
    sides = _CPU_SIDES if on_cpu else _GPU_SIDES
    own = sorted({pair for model in models for pair in model.matrices})
    general = [(n, k) for n in sides for k in sides if max(n, k) <= 4 * min(n, k) and (n, k) not in own]
    rows = [m for m in _ROWS if m <= 1024] if on_cpu else list(_ROWS)
    lists = [
        _spread(Operation.of("gemm", dtype, m=m, n=n, k=k) for n, k in pairs for m in rows) for pairs in (own, general)
    ]
    # A decode step at batch one is the most common step of all: the model's own matrices at one row come first.
    lists[0].sort(key=lambda op: op["m"] > 1)
    return _in_turn(lists)


def _attention(models: Sequence[Shapes], dtype: str, on_cpu: bool) -> list[Operation]:
    shapes = {(model.heads, model.kv_heads, model.head_dim) for model in models}
    if on_cpu:
        shapes |= {(5, 5, 64), (16, 16, 64)}
    else:
        shapes |= {(32, 8, 128), (8, 1, 128), (16, 16, 64)}
    prompts = (16, 32, 64, 128, 256, 512, 1024) + (() if on_cpu else (2048, 4096, 8192))
    contexts = (16, 64, 128, 256, 512, 1024, 2048) + (() if on_cpu else (4096, 8192, 32768))
    prefill: list[Operation] = []
    decode: list[Operation] = []
    for heads, kv_heads, head_dim in sorted(shapes):
        what = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        prefill += [
            Operation.of("attention", dtype, batch=b, query=q, past=0, **what) for q in prompts for b in (1, 2, 8)
        ]
        prefill += [
            Operation.of("attention", dtype, batch=1, query=q, past=past, **what)
            for q in (32, 64, 128, 256, 512)
            for past in (64, 256, 512, 1024)
        ]
        decode += [
            Operation.of("attention", dtype, batch=b, query=1, past=past, **what)
            for past in contexts
            for b in ((1, 2, 4, 8, 16) if on_cpu else (1, 4, 16, 64, 256))
        ]
        decode += [
            Operation.of("attention", dtype, batch=b, query=width, past=past, **what)
            for past in contexts
            for b in (1, 4)
            for width in (2, 3, 5, 7, 9)
        ]
    return _in_turn([_spread(prefill), _spread(decode)])


def _elementwise(models: Sequence[Shapes], dtype: str, on_cpu: bool) -> list[Operation]:
    rows = (1, 8, 64, 256, 1024) if on_cpu else (1, 16, 128, 1024, 8192)
    found = []
    for model in models:
        for count in rows:
            widths = {"norm": model.hidden, "add": model.hidden, "embedding": model.hidden, "act": model.ffn}
            found += [Operation.of(kind, dtype, rows=count, width=width) for kind, width in widths.items()]
            if count <= 256:
                found.append(Operation.of("softmax", dtype, rows=count, width=model.vocabulary))
    return list(dict.fromkeys(found))


def _fits(op: Operation, facts: Facts, budget_s: float) -> bool:
    if 4 * op.traffic_bytes > 0.5 * facts.memory_bytes:
        return False
    if facts.device == "cpu":
        seconds = op.flops / (_CPU_FLOPS_PER_S * facts.cores) + op.traffic_bytes / _CPU_BYTES_PER_S
        return seconds <= min(_LONGEST_CPU_S, budget_s / _FEWEST_OPERATIONS)
    return op.flops <= _GPU_LONGEST_FLOPS


def _in_turn(lists: Sequence[list[Operation]]) -> list[Operation]:
    return [op for several in itertools.zip_longest(*lists) for op in several if op is not None]


def _spread(operations: Iterable[Operation]) -> list[Operation]:
    """The operations in van der Corput order: each prefix is spread evenly over the list."""
    items = list(operations)
    bits = max(1, (len(items) - 1).bit_length())
    order = (int(format(i, f"0{bits}b")[::-1], 2) for i in range(1 << bits))
    return [items[i] for i in order if i < len(items)]


def _interleave(kinds: dict[str, list[Operation]], left_out: set[str]) -> list[Operation]:
    queues = {kind: [op for op in ops if op.key not in left_out] for kind, ops in kinds.items()}
    queues = {kind: ops for kind, ops in queues.items() if ops}
    taken = dict.fromkeys(queues, 0)
    order: list[Operation] = []
    while queues:
        # The kind that is the furthest behind its share; ties go by name.
        kind = min(queues, key=lambda name: (taken[name] / _SHARES[name], name))
        order.append(queues[kind].pop(0))
        taken[kind] += 1
        if not queues[kind]:
            del queues[kind]
    return order
