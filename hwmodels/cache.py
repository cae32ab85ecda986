"""The cache of the sequences of a model whose layers do not all cache every token: windows, chunks, and states of constant size.

A pool that counts tokens knows one number of bytes for each. For these models that number depends on how long contexts are, so it
is worked out at one mean context: a pool of so many blocks then holds as many sequences of that length as the stack does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hwmodels.model import AttentionKind, CompressedAttention, LatentAttention, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCache:
    """The cache that one device of a stage keeps, layer by layer."""

    kinds: tuple[AttentionKind, ...]
    """The kinds of all layers of the model."""
    layers: range
    """Those of the stage."""
    token_bytes: float
    """One token in one layer of softmax attention."""
    local_token_bytes: float | None = None
    """One token in one with a window or chunks, where that is other."""
    state_bytes: float
    """One sequence in one layer of linear attention."""
    window_tokens: int | None

    def bytes_of(self, kind: AttentionKind) -> float:
        """One token in one layer of *kind* that caches tokens."""
        return self.token_bytes if self.local_token_bytes is None or kind == "full" else self.local_token_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Layers that share a block table: the i-th of every so many layers of a kind."""

    kind: AttentionKind
    layers: tuple[int, ...]


def cached_kinds(spec: ModelSpec) -> tuple[AttentionKind, ...]:
    """Layer by layer, what its cache keeps: sparse attention reads a few tokens, but any of them, so that it keeps all."""
    if isinstance(spec.attention, (LatentAttention, CompressedAttention)):
        return tuple("linear" if kind == "linear" else "full" for kind in spec.layer_attention)
    return tuple("full" if kind == "blocks" else kind for kind in spec.layer_attention)


def keeps_every_token(spec: ModelSpec) -> bool:
    """Each layer that has attention caches each token, so that bytes for each token say it all."""
    return all(kind in ("full", "none") for kind in cached_kinds(spec))


@functools.lru_cache(maxsize=256)
def groups_of(kinds: tuple[AttentionKind, ...]) -> tuple[Group, ...]:
    """The groups in which vLLM keeps layers of these *kinds*, each with its own block table.

    As many layers a group as the rarest kind has, or as the commonest has where that is less than half as many again. vLLM
    0.32.0, v1/core/kv_cache_utils.py `_get_kv_cache_groups_uniform_page_size`.
    """
    by_kind: dict[AttentionKind, list[int]] = {}
    for i, kind in enumerate(kinds):
        if kind != "none":
            by_kind.setdefault(kind, []).append(i)
    rarest, commonest = min(map(len, by_kind.values())), max(map(len, by_kind.values()))
    size = commonest if commonest < 1.5 * rarest else rarest
    found = []
    for kind, layers in by_kind.items():
        n = math.ceil(len(layers) / size)
        found += [Group(kind=kind, layers=tuple(layers[i::n])) for i in range(n)]
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedCache:
    """A stage's cache as vLLM pages it: one pool, each block as large as a group's layers, whatever their kind."""

    groups: tuple[Group, ...]
    page_tokens: int
    """Tokens of a block of softmax attention: enlarged until a state fits in as many bytes."""
    local_page_tokens: int
    """Tokens of a block of layers with a window or chunks: where a token takes other bytes there, so many that blocks are alike."""
    block_bytes: float
    """The bytes of a block on one device of the stage; 0 where none of its layers keeps anything."""
    window_tokens: int | None

    def blocks(self, context: int) -> int:
        """Blocks that a sequence holds which has computed *context* tokens and computes one more."""
        return sum(_held(group.kind, context, self._page(group.kind), self.window_tokens) for group in self.groups)

    def _page(self, kind: AttentionKind) -> int:
        return self.page_tokens if kind == "full" else self.local_page_tokens

    def peak_blocks(self, context: int, in_flight: int) -> int:
        """Blocks that vLLM counts a sequence of *context* tokens at when it says how many fit, *in_flight* tokens of it in one
        iteration: `max_memory_usage_bytes` of v1/kv_cache_interface.py."""
        window, found = self.window_tokens, 0
        for group in self.groups:
            page = self._page(group.kind)
            if group.kind == "linear":
                found += 1
            elif group.kind == "window":
                assert window is not None
                found += math.ceil(min(window - 1 + in_flight, context) / page) + 1
            elif group.kind == "chunked":
                assert window is not None
                found += math.ceil(min(window + in_flight, context) / page)
            else:
                found += math.ceil(context / page)
        return found


def paged(cache: StageCache, block_tokens: int) -> PagedCache:
    """*cache* in blocks of *block_tokens* tokens, or of more where a state needs them (`_align_hybrid_block_size`) or where tokens
    of other layers take more bytes (`unify_kv_cache_spec_page_size` of v1/core/kv_cache_utils.py)."""
    groups = groups_of(cache.kinds)
    page = block_tokens
    if "linear" in cache.kinds and cache.token_bytes:
        page = max(page, block_tokens * math.ceil(cache.state_bytes / (block_tokens * cache.token_bytes)))
    local, local_bytes = page, cache.local_token_bytes
    if local_bytes and cache.token_bytes:
        page *= max(1, round(local_bytes / cache.token_bytes))
        local *= max(1, round(cache.token_bytes / local_bytes))
    page_bytes = max(page * cache.token_bytes, local * (local_bytes or 0.0)) or cache.state_bytes
    wide = max(sum(i in cache.layers for i in group.layers) for group in groups)
    return PagedCache(
        groups=groups,
        page_tokens=page,
        local_page_tokens=local,
        block_bytes=wide * page_bytes,
        window_tokens=cache.window_tokens,
    )


def held_bytes(cache: StageCache, context: int) -> float:
    """The bytes that a sequence of *context* tokens needs on one device, no page or pool being wasted."""
    kinds: Iterable[AttentionKind] = (cache.kinds[i] for i in cache.layers)
    return sum(
        cache.state_bytes if kind == "linear" else _reach(kind, context, cache.window_tokens) * cache.bytes_of(kind)
        for kind in kinds
        if kind != "none"
    )


def mean_block_bytes(cache: StageCache, block_tokens: int, context: int, *, in_pages: bool) -> float:
    """Bytes to count for a block of *block_tokens* tokens, so that a pool holds as many sequences of *context* tokens as fit.

    *in_pages*: as vLLM pages them; else what the layers need, in the rooms that they need it.
    """
    if in_pages:
        pages = paged(cache, block_tokens)
        return pages.blocks(context) * pages.block_bytes / math.ceil(context / block_tokens)
    return held_bytes(cache, context) / math.ceil(context / block_tokens)


def note(spec: ModelSpec, context: int, *, in_pages: bool) -> str:
    """The approximation, in a sentence for the user."""
    kinds = cached_kinds(spec)
    parts = []
    local = sum(kind in ("window", "chunked") for kind in kinds)
    if local:
        what = "a chunk" if "chunked" in kinds else "a window"
        parts.append(f"{local} keep {what} of {spec.window_tokens:,} tokens")
    if "linear" in kinds:
        parts.append(f"{kinds.count('linear')} keep a state of constant size")
    how = "in vLLM's groups of layers" if in_pages else "what each layer needs"
    return (
        f"Cache of {spec.name}: of {len(kinds)} layers {_and(parts)}; blocks count tokens as if every sequence held {context:,}, "
        f"{how}: short contexts take more than is counted, long ones less, and a prompt's unfinished part counts as the rest."
    )


def _and(parts: Sequence[str]) -> str:
    return " and ".join(parts)


def _held(kind: AttentionKind, context: int, page: int, window: int | None) -> int:
    if kind == "linear":
        return 1
    return math.ceil((context + 1) / page) - _skipped(kind, context, window) // page


def _skipped(kind: AttentionKind, context: int, window: int | None) -> int:
    """The number of *context* tokens that no further token sees (v1/core/single_type_kv_cache_manager.py)."""
    if kind == "full" or window is None:
        return 0
    return max(0, context - window + 1) if kind == "window" else context // window * window


def _reach(kind: AttentionKind, context: int, window: int | None) -> int:
    return context - _skipped(kind, context, window)
