"""The cost of LoRA adapters: memory of slots, loads, and what adapters add to an iteration.

Each linear layer of the base model has a slot of `max_lora_rank` for every one of `max_loras` adapters, whatever adapter is in it
(vLLM, lora/layers.py; SGLang, srt/lora/mem_pool.py); a kernel shrinks the inputs of all tokens to the rank, and one expands them
again (vLLM, lora/ops/triton_ops). Both are launched for all slots, and those without tokens end at once, so that a step gets longer
with slots, with the different adapters in it, and with its tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hwmodels.model import Attention, ModelSpec
from hwmodels.overheads import known_for
from hwmodels.parallel import ParallelConfig
from hwmodels.precision import precision
from hwmodels.stacks import default_stack, file_of
from hwmodels.tables import read_toml

LINEAR = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
"""The linear layers of a layer of the model, those that engines merge as one."""
ENDS = ("embed_tokens", "lm_head")
JOINED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), LINEAR[0]),
    **dict.fromkeys(("gate_proj", "up_proj"), LINEAR[2]),
}
"""The merged layer of each that checkpoints have apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRules:
    """The slots of one stack."""

    max_loras: int
    """Slots where the command says no number."""
    ranks: tuple[int, ...]
    """The values that `max_lora_rank` may have; (): any."""
    modules: tuple[str, ...]
    """The layers with slots where the command names none."""
    base_has_slot: bool
    """The base model takes a slot like an adapter."""
    by_own_rank: bool
    """Kernels compute as many rows of a slot as its adapter has; False: all of them."""
    keeps_all: bool
    """Host memory keeps every adapter where the command says no number; False: as many as there are slots."""
    ends_twice: bool
    """Where embedding and head both have slots, each has two sets of them."""

    def least_rank(self, rank: int) -> int:
        """The least `max_lora_rank` that has room for adapters of *rank*; ValueError where there is none."""
        found = rank if not self.ranks else next((each for each in self.ranks if each >= rank), None)
        if found is None:
            raise ValueError(f"slots have ranks up to {self.ranks[-1]}; got an adapter of rank {rank}")
        return found


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
    """The stack that was measured."""
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
    in_base_steps: float
    """1: iterations without any adapter launch the kernels as well; 0: they do not."""
    tensor_read_s: float
    """Seconds to read a tensor from disk into host memory, beside its bytes."""
    read_bytes_per_s: float
    tensor_copy_s: float
    """Seconds to copy a tensor into a slot."""
    padded_copy_s: float
    """The same, more, for an adapter of a lower rank than the slot's."""
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)


FILE = "adapters.toml"


def _read(stack: str) -> dict[str, Any]:
    """The file of *stack*, or that of the default stack, with its name as `stack`."""
    file = file_of(stack, FILE)
    if file is None:
        return _read(default_stack().name)
    return {**read_toml(file), "stack": stack}


@functools.cache
def slot_rules(stack: str) -> SlotRules:
    """The slots of *stack*, or those of the default stack where none are known."""
    given: dict[str, Any] = _read(stack)["slots"]
    return SlotRules(**{**given, "ranks": tuple(given["ranks"]), "modules": tuple(given["modules"])})


@functools.cache
def adapter_times(stack: str) -> Mapping[str, AdapterTimes]:
    """The times of *stack* by release, the newest first. What a release does not state is taken from the one that states all of
    them, of this stack or of the default one."""
    table, usual = _read(stack), _read(default_stack().name)
    documents = {**usual.pop("documents"), **table.pop("documents")}
    measured, stack = usual.pop("stack"), table.pop("stack")
    del usual["slots"], table["slots"]
    complete = max((*table.values(), *usual.values()), key=len)
    found: dict[str, AdapterTimes] = {}
    for release, own in table.items():
        entries: Mapping[str, tuple[float, str]] = {
            key: entry for key, entry in {**complete, **own}.items() if key != "measured"
        }
        numbers: dict[str, Any] = {key: number for key, (number, _) in entries.items()}
        sources = {key: documents[source] for key, (_, source) in entries.items()}
        found[release] = AdapterTimes(
            stack=measured,
            release=release,
            measured=own.get("measured", complete["measured"]),
            sources=sources,
            **numbers,
        )
    return found


def times_of(stack: str, release: str | None = None) -> AdapterTimes:
    """The times of the newest release of *stack* that is not after *release*, or else of the oldest; None: of the newest. Those of
    the default stack's newest for a stack of which none are known."""
    if file_of(stack, FILE) is None:
        stack, release = default_stack().name, None
    known = adapter_times(stack)
    return next(iter(known.values())) if release is None else known[known_for(release, known)]


def modules_of(named: Sequence[str]) -> tuple[str, ...]:
    """The layers with slots that a command names, as engines join them; `all`: every one. ValueError for another."""
    known = (*LINEAR, *ENDS)
    found = {*known} if "all" in named else {JOINED.get(name, name) for name in named}
    if not named or not found <= {*known}:
        raise ValueError(
            f"target_modules are among {', '.join([*JOINED, *known])} and all; got {', '.join(named) or 'none'}"
        )
    return tuple(name for name in known if name in found)


def targets_of(spec: ModelSpec, tensor: int = 1, modules: Collection[str] = LINEAR) -> list[list[Target]]:
    """The linear layers that adapters of *modules* change in each layer of the model, on one of *tensor* devices. Each device has
    the whole of A where a linear layer is split by columns, and the whole of B where it is split by rows. ValueError for models
    whose layers are of other kinds."""
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
        of_layer = {
            "qkv_proj": [
                Target(hidden, heads * attention.head_dim),
                Target(hidden, kv * attention.head_dim),
                Target(hidden, kv * attention.v_dim),
            ],
            "o_proj": [Target(heads * attention.v_dim, hidden)],
            "gate_up_proj": [Target(hidden, width)] * 2,
            "down_proj": [Target(width, hidden)],
        }
        found.append([target for name, targets in of_layer.items() if name in modules for target in targets])
    return found


@dataclass(frozen=True, kw_only=True)
class AdapterCost:
    """Slots of *max_lora_rank* for *max_loras* adapters of a model on its devices."""

    spec: ModelSpec
    parallel: ParallelConfig
    max_loras: int
    max_lora_rank: int
    times: AdapterTimes
    rules: SlotRules
    target_modules: tuple[str, ...] | None = None
    """The layers with slots; None: those that the stack gives them."""
    host_bytes_per_s: float | None = None
    """The bandwidth of each device's link to the host; None where it is not known."""

    def __post_init__(self) -> None:
        if self.rules.ranks and self.max_lora_rank not in self.rules.ranks:
            ranks = ", ".join(map(str, self.rules.ranks))
            raise ValueError(f"max_lora_rank is one of {ranks}; got {self.max_lora_rank}")
        targets_of(self.spec)

    @property
    def modules(self) -> tuple[str, ...]:
        return self.rules.modules if self.target_modules is None else self.target_modules

    @functools.cached_property
    def _targets(self) -> list[list[Target]]:
        return targets_of(self.spec, self.parallel.tensor, self.modules)

    def _numbers(self, layers: range) -> int:
        """Numbers of A and B for each rank, on one device."""
        return sum(target.inner + target.outer for layer in layers for target in self._targets[layer])

    def slot_bytes(self, layers: range, *, first: bool = True, last: bool = True) -> float:
        """Bytes of a slot on one device that has *layers*; those of the embedding are on the *first*, of the head on the *last*."""
        spec, rank, rows = self.spec, self.max_lora_rank, self.times.extra_vocab_rows
        ends = (first and ENDS[0] in self.modules) + (last and spec.lm_head and ENDS[1] in self.modules)
        if self.rules.ends_twice and {*ENDS} <= {*self.modules}:
            ends *= 2
        numbers = (self._numbers(layers) + ends * (spec.vocab + rows / 3 + spec.hidden)) * rank
        return (numbers + rows * spec.hidden * ends / 2) * precision(spec.base_precision).element_bytes

    def memory_bytes(self, layers: range, *, first: bool = True, last: bool = True) -> float:
        """Bytes of all slots on one device."""
        return self.max_loras * self.slot_bytes(layers, first=first, last=last)

    def step_s(self, rows: int, ranks: Collection[int]) -> float:
        """Seconds that adapters add to an iteration of *rows* tokens with different adapters of these *ranks*."""
        times, slots, adapters = self.times, self.max_loras, len(ranks)
        if not (adapters or times.in_base_steps):
            return 0.0
        of_kernel = (
            times.launch_s
            + slots * (times.slot_launch_s + times.slot_root_s * math.sqrt(rows))
            + adapters * times.adapter_launch_s
            + rows * times.row_launch_s
        )
        computed = sum(ranks) if self.rules.by_own_rank else adapters * self.max_lora_rank
        return self._kernels * of_kernel + computed * times.adapter_s_per_byte * self._bytes_of_rank

    @functools.cached_property
    def _kernels(self) -> int:
        """Launches: to shrink and to expand, for each of the joined layers."""
        return self.spec.n_layers * 2 * sum(name in self.modules for name in LINEAR)

    @functools.cached_property
    def _bytes_of_rank(self) -> float:
        """Bytes of A and B on one device for each rank."""
        return self._numbers(range(self.spec.n_layers)) * precision(self.spec.base_precision).element_bytes

    def _tensors(self) -> int:
        return sum(2 * len(layer) for layer in self._targets)

    def host_bytes(self, rank: int) -> float:
        """Bytes of an adapter of *rank* in host memory, where each device's process has all of it."""
        element = precision(self.spec.base_precision).element_bytes
        whole = targets_of(self.spec, modules=self.modules)
        return sum(t.inner + t.outer for layer in whole for t in layer) * rank * element

    def disk_s(self, rank: int) -> float:
        """Seconds to read an adapter of *rank* into host memory."""
        return self._tensors() * self.times.tensor_read_s + self.host_bytes(rank) / self.times.read_bytes_per_s

    def slot_s(self, rank: int) -> float:
        """Seconds to copy an adapter of *rank* from host memory into a slot: a copy of each tensor, or where that takes longer its
        bytes over the link to the host, one device's part of them on each."""
        padded = self.times.padded_copy_s if rank < self.max_lora_rank else 0.0
        copies_s = self._tensors() * (self.times.tensor_copy_s + padded)
        if self.host_bytes_per_s is None:
            return copies_s
        return max(copies_s, rank * self._bytes_of_rank / self.host_bytes_per_s)
