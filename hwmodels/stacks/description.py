"""The facts of a serving stack that the rest asks for. A field that is left out has the value of a stack that has no such thing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from hwmodels.device import Device

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class EngineDefaults:
    """Limits that an engine sets itself where its user gives none."""

    max_num_seqs: int
    max_num_batched_tokens: int
    graph_sequences: int
    """Sequences of the largest decode step that a CUDA graph replays."""
    source: str


class Limits(Protocol):
    """The limits of an engine on a *device* whose driver shows *memory_bytes*; *offline*: in a program, not behind a server."""

    def __call__(self, device: Device, memory_bytes: float, *, offline: bool, tensor: int) -> EngineDefaults: ...


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """The facts that an engine's choice of settings depends on, beside the settings of its scheduler that are given."""

    limits: EngineDefaults
    decoding: str
    """The method of decoding."""
    draft_has_kv: bool
    data: int
    """Ranks of data-parallel attention."""
    max_positions: int
    """The longest context of the model in tokens; 0 where its config has none."""
    no_overlap: str | None
    """Why no iteration is planned while the one before it runs; None where it may be."""
    has_windows: bool = False
    """Whether layers attend to fewer tokens than a context has."""


class RefusedSettingError(ValueError):
    """The engine does not take the *setting* of its scheduler in these circumstances."""

    def __init__(self, setting: str, why: str) -> None:
        super().__init__(why)
        self.setting = setting


def without_overlap(settings: Mapping[str, Any], around: Circumstances, name: str) -> dict[str, Any]:
    """The setting *name*, which disables overlap, where it is left out and there is none."""
    if around.no_overlap is None:
        return {}
    if settings.get(name) is False:
        raise RefusedSettingError(name, around.no_overlap)
    return {} if name in settings else {name: True}


@dataclass(frozen=True, kw_only=True)
class Scheduler:
    """A scheduler that an engine has, or had."""

    policy: str
    """package.module:Class."""
    known_from: str
    compared_with: str
    chosen_for: bool = False
    """Settings that are left out are chosen for this scheduler as the engine chooses them for its own."""


@dataclass(frozen=True, kw_only=True)
class Graphs:
    """The CUDA graphs of decode steps."""

    sizes: Callable[[int], Iterable[int]]
    """The sizes that the engine captures by itself for a largest one, which may be missing among them, and smaller than some."""
    of_sequences: bool
    """Sizes count sequences, each of which verifies K + 1 tokens; otherwise they count tokens."""
    source: str


@dataclass(frozen=True, kw_only=True)
class Handover:
    """The way in which a serving stack hands requests from a machine that prefills to one that decodes."""

    first_token: Literal["prefill", "decode", "arrival"]
    room: Literal["before_prefill", "after_prefill"]
    headroom_tokens: int
    repack: bool
    source: str


@dataclass(frozen=True, kw_only=True)
class ExpertBackends:
    """The implementations of experts that an engine chooses from, and what was timed of them.

    The first of a list that supports device, layer and parallelism runs; which layers one supports is not stated here.
    """

    generations: Mapping[str, tuple[str, ...]]
    """Devices of the catalogue by generation; others are of none ("")."""
    order: Mapping[str, Mapping[str, tuple[str, ...]]]
    """By the format of the weights, and by generation ("": all that are not named): the backends, the first choice first."""
    timed: Mapping[tuple[str, str], Mapping[str, str]]
    """By generation and format: the names of the parameter sets of those whose tables tell them apart."""
    source: str

    def of(self, weights: str, device: str) -> tuple[tuple[str, ...], Mapping[str, str]]:
        """The backends for experts in a format on a device (catalogue name), and the parameter sets of those that were timed."""
        generation = next((name for name, devices in self.generations.items() if device in devices), "")
        order = self.order.get(weights, {})
        return order.get(generation, order.get("", ())), self.timed.get((generation, weights), {})


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The kernels that a stack chooses, and how its benchmarks timed them. The defaults hold for software that is no stack.

    Other software is named as in the files of measurements.
    """

    gemm: Mapping[str, str] = field(default_factory=dict)
    """The way in which matrix products choose their tiles, by format: one of `hwmodels.kernels.gemm.LIBRARIES`, "search" for
    others."""
    gemm_on: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """The same by (format, device), which goes before."""
    gemm_timed_as: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Formats whose products were timed as Python launches them, with the software whose tables have the kernels alone."""
    passes_with_scales: tuple[str, ...] = ()
    """Passes in the time of its FP8 products that a checkpoint with static scales does not run."""
    quantises_by_row: bool = False
    """One block brings a whole row to 8 bits, and finds the row's own scale in the same kernel where none is given."""
    weight_copies: float = 1.0
    """Weight tensors that a benchmark cycles through; infinite: more than the cache holds."""
    quantises_queries: bool = False
    """Prompts over an 8-bit cache are attended with 8-bit queries."""
    attention: Literal["own", "single heads apart", "triton behind"] = "own"
    """The choice among kernels of attention (`hwmodels.kernels.attention.kernel_source`)."""
    widest_group: float = float("inf")
    """Query heads of a group that one block takes; above, each head has its own."""
    one_token_is_decode: bool = True
    """A prompt of one token runs as a decode does, by the kernel and the CUDA graph of decode steps."""
    head_products: Literal["16 bits", "8 bits before FP4", "8 bits"] = "16 bits"
    """The arithmetic of latent attention's products head by head, for an FP8 checkpoint."""
    latent_alone: bool = True
    """Latent attention was measured by the kernel; otherwise by the launches of its module, so that others' kernels stand in."""
    latent_absorbed_on: tuple[str, ...] = ()
    """Devices on which prompts of latent attention were timed over the latent."""
    recurrent_from: str = ""
    """The software whose convolution and decode of recurrent layers it runs; empty: its own."""
    timed_by_launches: tuple[str, ...] = ()
    """Kernels whose tables hold the launches of Python, so that nothing is fitted to them."""
    convolved_keys_alone: bool = False
    """Its table of the convolution of prompts has the channels of the keys alone, whatever the shape says of queries and values."""
    equal_scores_until: float = 8192.0
    """Tokens up to which the kernel that chooses among compressed keys is slow at equal scores, which its benchmarks have."""
    prompts_by_all_reduce: bool = False
    """Rows of prompts go to the experts of other attention groups and back by an all-reduce over those of all groups each."""
    maps_experts: bool = False
    """Its kernels of experts with expanded weights have launches of their own where other ranks have experts, too."""
    experts_with_fp4: str = ""
    """The software under whose name its experts of FP4 and block-scaled FP8 were measured on devices with FP4; empty: its own."""
    expert_backends: ExpertBackends | None = None
    """None: its rules are not known."""
    refused_experts: Mapping[str, tuple[tuple[int, int, int], ...]] = field(default_factory=dict)
    """Layers (hidden size, experts a token, experts) that its fast kernels on Blackwell do not take, by format: their rows in the
    tables of B200 are 1.3 to 2.5 times slower than their neighbours and than the same rows of another stack."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """The stack's servers in published rows, whose settings have one name for all stacks (`sim.bench.published.servers`)."""

    settings: Callable[[Mapping[str, Any], Circumstances, int], dict[str, Any]]
    """The settings of its scheduler from those of a server, for so many clients."""
    generated: tuple[str, ...] = ("token_budget", "max_sequences")
    """Settings that the generator of aiconfigurator writes."""
    mixed_chunk_since: tuple[int, ...] | None = None
    """The first release for which it lets prompts share iterations with decodes; None: it leaves that to the engine."""
    overlap_since: tuple[int, ...] = ()
    """The first release that schedules asynchronously by itself."""
    prompt_balance: Mapping[str, int] | None = None
    """The balance of prompts between ranks of data-parallel attention."""
    narrows_cache: bool = False
    """Checkpoints in 8 bits and fewer have a cache in 8 bits."""
    seats_by_load: bool = False
    """Recipes of separate pools give decode ranks as many seats as the highest load fills; otherwise they have no limit."""
    prefill_ranks: str | None = None
    """The router among the ranks of workers that only compute prompts; None: that of the stack."""
    memory_release: str | None = None
    """The release whose account of memory stands for those of its servers; None: the newest."""
    drafted: int | None = None
    """Tokens that multi-token prediction drafts in a round; None: not known."""
    drafted_on_ranks: int | None = None
    """The same where attention is data-parallel; None: as many."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """A comparison of a part with the engine itself, or with what it printed."""

    what: str
    release: str
    against: str
    on: str
    """The day of the last comparison, as 2026-11-21."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Stack:
    """A serving stack, but for what the files beside it have (`hwmodels.stacks`)."""

    name: str
    """As settings and files of measurements have it."""
    title: str
    place: int
    """The place in lists. The first stack is the default, and has the limits of those that are no servers; among the kernels that
    stand in for missing ones the earlier are the better."""
    release: str = ""
    """The release whose rules are modelled, and whose launch options are read and written."""
    like: str | None = None
    """The stack whose engine it is, built for other makers' devices: it has all that is not of kernels and host work from there."""
    vendors: tuple[str, ...] = ()
    """The makers of the devices that it runs on; empty: all."""
    scheduler: str | None = None
    """The policy that plans where a scenario names none: one of `schedulers` or package.module:Class; None: the default stack's."""
    schedulers: Mapping[str, Scheduler] = field(default_factory=dict)
    """By the name of the policy."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Names that policies had before, or that one may look for."""
    choices: Callable[[Mapping[str, Any], Circumstances], dict[str, Any]] | None = None
    """The settings of `scheduler` that the engine chooses by itself among those that are left out."""
    limits: Limits | None = None
    memory_share: Callable[[float, EngineDefaults, int], float] | None = None
    """The share of the memory where the account has none: from its bytes, the limits and the number of a replica's devices."""
    pages_by_group: bool = False
    """Groups of layers take pages of one size from one pool, and leave in the cache what their windows have passed."""
    needs_longest: bool = False
    """The engine does not start where the KV cache does not hold one request of the longest context."""
    prefix_cache: Literal["blocks", "tree"] | None = None
    """The cache that finds KV again unless it is told not to; None: there is none."""
    eviction: str = ""
    """The engine's order of eviction, in words."""
    eviction_borrowed: str = ""
    """A sentence where another engine's order stands in."""
    graphs: Graphs | None = None
    published: Published | None = None
    stream_by: Literal["tokens", "iterations"] = "tokens"
    """Tokens that are sent together (`stream_interval`) are counted in these."""
    shares_context: bool = False
    """Devices may share the KV of a sequence, or the tokens of a prompt, as `hwmodels.parallel` has it."""
    compiled_go_first: bool = False
    """A request whose grammar has been compiled is looked at before those that wait for nothing else; otherwise it comes to the
    end of the queue."""
    rank_router: str | None = None
    """The router among the ranks of a machine, one of `routers`; None: in turn."""
    routers: Mapping[str, str] = field(default_factory=dict)
    """package.module:Class by the short name."""
    handover: Handover | None = None
    connector: str | None = None
    """The connector between machines that prefill and decode whose terms were measured with it."""
    kernels: Kernels = Kernels()
    kernels_modelled: str = ""
    """The kernels that a stack which is `like` another has of its own, in words."""
    kernels_from: str = ""
    """The source of the times of these kernels, with its date."""
    checks: tuple[Check, ...] = ()
    left_out: str = ""
    """Parts that are not modelled, in a sentence."""
