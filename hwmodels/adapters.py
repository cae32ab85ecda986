"""The cost of LoRA adapters in vLLM: memory of slots, loads, and what adapters add to an iteration.

Each linear layer of the base model has a slot of `max_lora_rank` for every one of `max_loras` adapters, whatever adapter is in it
(vLLM, lora/layers.py); a kernel shrinks the inputs of all tokens to the rank, and one expands them again (lora/ops/triton_ops).
Both are launched for all slots, and those without tokens end at once, so that a step gets longer with slots, with the different
adapters in it, and with its tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hwmodels.model import Attention, ModelSpec
from hwmodels.overheads import known_for
from hwmodels.parallel import ParallelConfig
from hwmodels.precision import precision
from hwmodels.stacks import default_stack, file_of
from hwmodels.tables import read_toml

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values that `max_lora_rank` of vLLM may have (config/lora.py)."""
KERNELS_OF_LAYER = 8
"""Launches for a layer: to shrink and to expand, for queries, keys and values together, for the output, gate and up, and down."""


class Target(NamedTuple):
    """A linear layer that adapters change, on one device."""

    inner: int
    """Columns of A."""
    outer: int
    """Rows of B."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterTimes:
    """Times of one release; `sources` has the document behind each number."""

    stack: str
    release: str
    measured: str
    """The release that was measured, in words."""
    extra_vocab_rows: float
    """Rows of the hidden size that every slot has beside A and B."""
    launch_s: float
    """Seconds of each kernel, in every iteration."""
    slot_launch_s: float
    """The same for each slot."""
    slot_root_s: float
    """The same for each slot and the root of the number of tokens."""
    adapter_launch_s: float
    """The same for each different adapter of the iteration."""
    adapter_s_per_byte: float
    """Seconds for each byte of A and B of a slot, for each different adapter of the iteration."""
    row_launch_s: float
    """Seconds of each kernel for each token."""
    tensor_read_s: float
    """Seconds to read a tensor from disk into host memory, beside its bytes."""
    read_bytes_per_s: float
    tensor_copy_s: float
    """Seconds to copy a tensor into a slot."""
    padded_copy_s: float
    """The same, more, for an adapter of a lower rank than the slot's."""
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)


FILE = "adapters.toml"


@functools.cache
def adapter_times(stack: str) -> Mapping[str, AdapterTimes]:
    """The times of *stack* by release, the newest first; a release has what it does not say itself from the one that says
    everything. KeyError for a stack of which none are known."""
    file = file_of(stack, FILE)
    if file is None:
        raise KeyError(stack)
    table = read_toml(file)
    documents = table.pop("documents")
    complete = max(table.values(), key=len)
    found: dict[str, AdapterTimes] = {}
    for release, own in table.items():
        entries: Mapping[str, tuple[float, str]] = {
            key: entry for key, entry in {**complete, **own}.items() if key != "measured"
        }
        numbers: dict[str, Any] = {key: number for key, (number, _) in entries.items()}
        sources = {key: documents[source] for key, (_, source) in entries.items()}
        found[release] = AdapterTimes(
            stack=stack, release=release, measured=own.get("measured", complete["measured"]), sources=sources, **numbers
        )
    return found


def times_of(stack: str, release: str | None = None) -> AdapterTimes:
    """The times of the newest release of *stack* that is not after *release*, or else of the oldest; None: of the newest. Those of
    the default stack's newest for a stack of which none are known."""
    if file_of(stack, FILE) is None:
        stack, release = default_stack().name, None
    known = adapter_times(stack)
    return next(iter(known.values())) if release is None else known[known_for(release, known)]


def targets_of(spec: ModelSpec, tensor: int = 1) -> list[list[Target]]:
    """The linear layers of each layer that adapters change, on one of *tensor* devices: A of a layer that is split by columns is
    whole on each, and so is B of one that is split by rows. ValueError for models whose layers are of other kinds."""
    plain = isinstance(spec.attention, Attention) and spec.local_attention is None and spec.linear_attention is None
    if not plain or spec.experts is not None or not spec.gated_mlp:
        raise ValueError(
            f"adapters are modelled for dense models with grouped-query attention alone, and {spec.name} is another; leave "
            "adapters out"
        )
    attention = spec.attention
    assert isinstance(attention, Attention)
    heads, kv = attention.n_heads // tensor, max(1, attention.n_kv_heads // tensor)
    hidden, found = spec.hidden, []
    for layer in range(spec.n_layers):
        width = (spec.layer_ffn[layer] if spec.layer_ffn else spec.ffn) // tensor
        found.append(
            [
                Target(hidden, heads * attention.head_dim),
                Target(hidden, kv * attention.head_dim),
                Target(hidden, kv * attention.v_dim),
                Target(heads * attention.v_dim, hidden),
                Target(hidden, width),
                Target(hidden, width),
                Target(width, hidden),
            ]
        )
    return found


def least_slot_rank(rank: int) -> int:
    """The least `max_lora_rank` that has room for adapters of *rank*; ValueError where there is none."""
    found = next((each for each in RANKS if each >= rank), None)
    if found is None:
        raise ValueError(f"vLLM's slots have ranks up to {RANKS[-1]}; got an adapter of rank {rank}")
    return found


@dataclass(frozen=True, kw_only=True)
class AdapterCost:
    """Slots of *max_lora_rank* for *max_loras* adapters of a model on its devices."""

    spec: ModelSpec
    parallel: ParallelConfig
    max_loras: int
    max_lora_rank: int
    times: AdapterTimes
    host_bytes_per_s: float | None = None
    """The bandwidth of each device's link to the host; None where it is not known."""

    def __post_init__(self) -> None:
        if self.max_lora_rank not in RANKS:
            ranks = ", ".join(map(str, RANKS))
            raise ValueError(f"max_lora_rank is one of {ranks}, as in vLLM; got {self.max_lora_rank}")
        targets_of(self.spec)

    @functools.cached_property
    def _targets(self) -> list[list[Target]]:
        return targets_of(self.spec, self.parallel.tensor)

    def _numbers(self, layers: range) -> int:
        """Numbers of A and B for each rank, on one device."""
        return sum(target.inner + target.outer for layer in layers for target in self._targets[layer])

    def slot_bytes(self, layers: range, *, first: bool = True, last: bool = True) -> float:
        """Bytes of a slot on one device that has *layers*; those of the embedding are on the *first*, of the head on the *last*."""
        spec, rank, rows = self.spec, self.max_lora_rank, self.times.extra_vocab_rows
        ends = first + (last and spec.lm_head)
        numbers = (self._numbers(layers) + ends * (spec.vocab + rows / 3 + spec.hidden)) * rank
        return (numbers + rows * spec.hidden * ends / 2) * precision(spec.base_precision).element_bytes

    def memory_bytes(self, layers: range, *, first: bool = True, last: bool = True) -> float:
        """Bytes of all slots on one device."""
        return self.max_loras * self.slot_bytes(layers, first=first, last=last)

    def step_s(self, rows: int, adapters: int) -> float:
        """Seconds that adapters add to an iteration of *rows* tokens with so many different *adapters*."""
        times, slots = self.times, self.max_loras
        of_kernel = (
            times.launch_s
            + slots * (times.slot_launch_s + times.slot_root_s * math.sqrt(rows))
            + adapters * times.adapter_launch_s
            + rows * times.row_launch_s
        )
        return self._kernels * of_kernel + adapters * times.adapter_s_per_byte * self._rank_bytes

    @functools.cached_property
    def _kernels(self) -> int:
        return self.spec.n_layers * KERNELS_OF_LAYER

    @functools.cached_property
    def _rank_bytes(self) -> float:
        element = precision(self.spec.base_precision).element_bytes
        return self._numbers(range(self.spec.n_layers)) * self.max_lora_rank * element

    def _tensors(self) -> int:
        return sum(2 * len(layer) for layer in self._targets)

    def disk_s(self, rank: int) -> float:
        """Seconds to read an adapter of *rank* into host memory."""
        element = precision(self.spec.base_precision).element_bytes
        n_bytes = sum(t.inner + t.outer for layer in targets_of(self.spec) for t in layer) * rank * element
        return self._tensors() * self.times.tensor_read_s + n_bytes / self.times.read_bytes_per_s

    def slot_s(self, rank: int) -> float:
        """Seconds to copy an adapter of *rank* from host memory into a slot: a copy of each tensor, or where that takes longer its
        bytes over the link to the host, one device's part of them on each."""
        padded = self.times.padded_copy_s if rank < self.max_lora_rank else 0.0
        copies_s = self._tensors() * (self.times.tensor_copy_s + padded)
        if self.host_bytes_per_s is None:
            return copies_s
        element = precision(self.spec.base_precision).element_bytes
        return max(copies_s, self._numbers(range(self.spec.n_layers)) * rank * element / self.host_bytes_per_s)
