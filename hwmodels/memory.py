"""The division of a device's memory by a serving stack: what the weights, the profile run, the graphs and the communicator
take, and how many blocks that leaves for the KV cache.

The constants are in memory.toml in the folder of each stack (`hwmodels.stacks`), by release, today's first: each number is
[value, source]. Logs are those of memory_logs.csv; `python -m benchmarks.kv_blocks` leaves each deployment out in turn and
prints the errors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol

from hwmodels.adapters import AdapterCost
from hwmodels.cache import StageCache, keeps_every_token, mean_block_bytes, note, paged
from hwmodels.device import Device
from hwmodels.model import ModelSpec
from hwmodels.overheads import known_for
from hwmodels.parallel import ParallelConfig
from hwmodels.precision import precision
from hwmodels.stacks import default_stack, file_of, stacks
from hwmodels.stacks.description import GIB, EngineDefaults
from hwmodels.tables import read_toml

FILE = "memory.toml"

LONGEST = 131072
"""Tokens of a context where neither workload nor model says how long one gets."""

ShareOf = Literal["total", "free before loading", "free after loading"]

VISIBLE_SHARE = 79.19 / 80
"""The share of its nominal memory that CUDA reports for an NVIDIA device: 79.19 GiB of an H100's 80, from vLLM's logs
(llm-d-planner 0.3.3, docs/accuracy/vllm-v0.19.0-accuracy-report.md); taken for every NVIDIA device."""
HIDDEN_TENSORS = 4
"""Tensors of tokens x hidden size alive beside the MLP's own at the peak of the forward pass, fitted: 0.77 GiB for
CodeLlama-7B on vLLM 0.19 (llm-d-planner 0.3.3, docs/accuracy)."""
RECEIVED_TENSORS = 2
"""The same, more, in a pipeline: hidden states and residual from the stage before. 0.96 to 1.10 GiB for Qwen3-8B and
Llama-3.1-8B in two to four stages, as above."""
PADDED_TO = 256
"""vLLM lays mxfp4 experts out with one side padded to a multiple of this: gpt-oss-20b loads as 13.47 GiB where the
checkpoint has 12.81, gpt-oss-120b as 64.38 where it has 60.71 (llm-d-planner 0.3.3, docs/empirical-vllm-memory-results.md)."""


class LargestBatch(NamedTuple):
    """The most of one iteration (vLLM's max_num_batched_tokens and max_num_seqs), which a stack's profile run measures."""

    tokens: int
    sequences: int


class Deployed(Protocol):
    """The interface that an account of memory asks of a deployment."""

    @property
    def model(self) -> ModelSpec: ...

    @property
    def device(self) -> Device: ...

    @property
    def parallel(self) -> ParallelConfig: ...

    @property
    def weight_bytes_per_device(self) -> float: ...

    @property
    def kv_bytes_per_token_per_device(self) -> float: ...

    def stage_caches(self) -> tuple[StageCache, ...]:
        """For each stage, what one of its devices keeps, layer by layer."""
        ...

    def stage_bytes(self) -> tuple[tuple[float, float, range], ...]:
        """For each stage, on one device: weights, recurrent states, cache of one token, and which layers."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StackMemory:
    """The account of memory of one release of a stack; `sources` has the document behind each number."""

    stack: str
    release: str
    setting: str
    """The stack's own name for the share."""
    share_of: ShareOf
    """`total`: of the device's memory, everything included; `free before loading`: weights and cache, of what is free when
    the process has started; `free after loading`: the cache alone, of what all else leaves."""
    share: float | None = None
    """The stack's default; None: from the device, as its description has it (`memory_share`)."""
    block_tokens: int = 16
    null_blocks: int = 0
    """Blocks of the cache that no sequence gets."""
    logit_bytes: float = 0.0
    """The bytes of each logit in the profile run's sampler, beside the logits in the model's own format."""
    core_bytes: float = 0.0
    """A buffer of the sampler, for each entry of the vocabulary and each of the device's cores."""
    hidden_copies: float = 0.0
    """Tensors of tokens x hidden size that the sampler's run finds still alive."""
    workspace_kept: bool = False
    """The workspace of fused experts stays allocated while the sampler runs."""
    activation_factors: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Where the sampler is not modelled: 2 bytes x tokens x hidden size x this, by tensor degree."""
    expert_factors: Mapping[int, float] = field(default_factory=dict, hash=False)
    tokens_by_concurrency: bool = False
    """The log counts, for layers in groups, the tokens of as many longest contexts as fit; otherwise blocks over groups."""
    graphs_in_share: bool = False
    """CUDA graphs are taken from the cache; otherwise they are captured outside of the share."""
    graph_bytes_per_layer: float = 0.0
    context_bytes: float = 0.0
    """CUDA context, libraries and workspaces of a process alone on its replica."""
    worker_bytes: float = 0.0
    """The same where a replica has several devices."""
    communicator_bytes: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Buffers of collectives by devices of a stage; a larger number takes the largest given."""
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    def default_share(self, device: Device, *, tensor: int = 1, pipeline: int = 1) -> float:
        """The share that the stack takes by itself on *device*."""
        if self.share is not None:
            return self.share
        work_out = stacks()[self.stack].memory_share
        assert work_out is not None
        limits = engine_defaults(self.stack, device, tensor=tensor)
        return work_out(visible_bytes(device), limits, tensor * pipeline)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes on one device of one pipeline stage."""

    device_bytes: float
    """As the driver shows it."""
    budget_bytes: float
    """The bytes that all that follows and the cache may take together."""
    weight_bytes: float
    activation_bytes: float
    graph_bytes: float
    context_bytes: float
    communicator_bytes: float
    reserve_bytes: float
    draft_bytes: float
    """Weights of a draft model."""
    adapter_bytes: float = 0.0
    """Slots of LoRA adapters."""
    encoder_bytes: float = 0.0
    """Weights of an encoder of images or speech."""
    cache_share: float
    """The share of what is left that the cache gets."""
    block_bytes: float
    """One block of the cache, at the mean context where layers do not keep every token; 0 for a stage that caches nothing."""
    logged_block_bytes: float = 0.0
    """One block as vLLM's log counts it, where that is of a group of layers (`LayerGroups`)."""

    @property
    def used_bytes(self) -> float:
        """Everything but the cache."""
        return (
            self.weight_bytes
            + self.draft_bytes
            + self.adapter_bytes
            + self.activation_bytes
            + self.graph_bytes
            + self.context_bytes
            + self.communicator_bytes
            + self.encoder_bytes
            + self.reserve_bytes
        )

    @property
    def kv_bytes(self) -> float:
        """The bytes that are left for the cache; negative where it does not fit."""
        left = self.budget_bytes - self.used_bytes
        return left * self.cache_share if left > 0 else left

    @property
    def blocks(self) -> int:
        """Blocks that the cache has room for; negative where not even the rest fits."""
        if self.kv_bytes < 0:
            return -1
        return int(self.kv_bytes // self.block_bytes) if self.block_bytes else 1 << 40


class LayerGroups(NamedTuple):
    """Groups of layers that take their blocks from one pool, as vLLM keeps layers that do not all keep every token."""

    groups: int
    block_tokens: int
    longest: int
    """Tokens of the longest context."""
    longest_blocks: int
    """Blocks that vLLM counts it at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """A replica's memory, stage by stage, as its stack divides it."""

    rules: StackMemory | None
    """None: weights and cache share the memory, and nothing else is counted."""
    share: float
    block_tokens: int
    largest: LargestBatch
    stages: tuple[StageMemory, ...]
    groups: int = 1
    """Groups of data-parallel attention, each with a cache of its own."""
    override: int | None = None
    """Blocks that a setting gives in place of what the memory has room for."""
    notes: tuple[str, ...] = ()
    """The approximations of the account, in sentences."""
    layer_groups: LayerGroups | None = None
    """None: each layer keeps every token, or the stack's log does not count by groups."""
    adapters: AdapterCost | None = None
    """The slots of LoRA adapters in it."""

    @property
    def device_blocks(self) -> int:
        """Blocks as the stack's log counts them, null block included: those of the stage with the fewest."""
        return min(stage.blocks for stage in self.stages) if self.override is None else self.override

    @property
    def kv_blocks(self) -> int:
        """Blocks that sequences can get, over all groups."""
        return (self.device_blocks - self.null_blocks) * self.groups

    @property
    def rank_blocks(self) -> int:
        """Blocks that sequences of one group can get."""
        return self.device_blocks - self.null_blocks

    @property
    def null_blocks(self) -> int:
        return self.rules.null_blocks if self.rules is not None else 0

    @property
    def tightest(self) -> StageMemory:
        """The stage that decides."""
        return min(self.stages, key=lambda stage: stage.blocks)

    @property
    def logged(self) -> dict[str, int] | None:
        """Blocks and tokens as vLLM's log counts them where layers are in groups; None where these are `device_blocks` and their
        tokens."""
        of = self.layer_groups
        if of is None:
            return None
        blocks = min(
            int(
                (stage.kv_bytes if self.override is None else self.override * stage.block_bytes)
                // stage.logged_block_bytes
            )
            for stage in self.stages
            if stage.logged_block_bytes
        )
        by_concurrency = self.rules is not None and self.rules.tokens_by_concurrency
        tokens = (
            int(blocks / of.longest_blocks * of.longest) if by_concurrency else blocks // of.groups * of.block_tokens
        )
        return {"blocks": blocks, "block_tokens": of.block_tokens, "layer_groups": of.groups, "tokens": tokens}

    @property
    def account(self) -> str:
        """The stack and release whose account of memory it is, and whether logs were at hand to hold it against."""
        if self.rules is None:
            return "the datasheet, nothing set aside"
        held = any("logs of" in source for source in self.rules.sources.values())
        return f"{self.rules.stack} {self.rules.release}" + ("" if held else ", held against no log")

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that results keep of the memory: bytes on one device of the stage that decides, and the blocks."""
        stage, rules = self.tightest, self.rules
        return {
            "account": self.account,
            "setting": rules.setting if rules is not None else "gpu_memory_utilization",
            "share": self.share,
            "share_of": rules.share_of if rules is not None else "total",
            "profile_run": self.largest._asdict(),
            "device_bytes": stage.device_bytes,
            "budget_bytes": stage.budget_bytes,
            "weight_bytes": stage.weight_bytes,
            "draft_bytes": stage.draft_bytes,
            "adapter_bytes": stage.adapter_bytes,
            "encoder_bytes": stage.encoder_bytes,
            "activation_bytes": stage.activation_bytes,
            "graph_bytes": stage.graph_bytes,
            "context_bytes": stage.context_bytes,
            "communicator_bytes": stage.communicator_bytes,
            "reserve_bytes": stage.reserve_bytes,
            "kv_bytes": self.device_blocks * stage.block_bytes if self.override is not None else stage.kv_bytes,
            "block_tokens": self.block_tokens,
            "blocks": self.device_blocks,
            "logged": self.logged,
            "null_blocks": self.null_blocks,
            "groups": self.groups,
        }


@functools.cache
def stack_memories() -> Mapping[str, Mapping[str, StackMemory]]:
    """The accounts by stack and release, the stack's newest first, read once; of stacks that set something aside."""
    found = {}
    for stack in stacks():
        file = file_of(stack, FILE)
        if file is not None:
            releases = read_toml(file)
            documents = releases.pop("documents", {})
            found[stack] = {release: _rules(stack, release, entry, documents) for release, entry in releases.items()}
    return found


def stack_memory(stack: str, release: str | None = None) -> StackMemory | None:
    """The account of memory of *stack*, today or in *release*: the newest that is not after it, or else the oldest; None for a
    stack that sets nothing aside (eager, ideal). ValueError for what is no release.
    """
    releases = stack_memories().get(stack)
    if releases is None:
        if release is not None:
            raise ValueError(
                f"memory.release is for {', '.join(stack_memories())}; {stack} has no account of memory; leave it out"
            )
        return None
    if release is None:
        return next(iter(releases.values()))
    try:
        return releases[known_for(release, releases)]
    except ValueError as error:
        raise ValueError(f"memory.release: {error}") from None


def _rules(stack: str, release: str, entry: Mapping[str, Any], documents: Mapping[str, str]) -> StackMemory:
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for key, given in entry.items():
        if isinstance(given, str):
            values[key] = given
        elif isinstance(given, Mapping):
            values[key] = {int(degree): float(number) for degree, (number, _) in given.items()}
            sources[key] = "; ".join(dict.fromkeys(documents.get(source, source) for _, source in given.values()))
        else:
            number, source = given
            values[key] = number
            sources[key] = documents.get(source, source)
    for key in ("workspace_kept", "graphs_in_share", "tokens_by_concurrency"):
        values[key] = bool(values.get(key, False))
    return StackMemory(stack=stack, release=release, sources=sources, **values)


def visible_bytes(device: Device) -> float:
    """The bytes that the driver shows of *device*'s memory: `VISIBLE_SHARE` of it for NVIDIA's, all of it for others."""
    return device.memory_bytes * (VISIBLE_SHARE if device.vendor == "NVIDIA" else 1.0)


def engine_defaults(
    stack: str, device: Device, usage: Literal["server", "offline"] = "server", *, tensor: int = 1
) -> EngineDefaults:
    """The limits of *stack* on *device*, behind an API server or in a program of one's own (vLLM's `LLM` class).

    Stacks that are no servers have the default stack's. ValueError for another *usage*.
    """
    if usage not in ("server", "offline"):
        raise ValueError(f"usage is server or offline; got {usage!r}")
    described = stacks().get(stack)
    limits = (described and described.limits) or default_stack().limits
    assert limits is not None
    return limits(device, visible_bytes(device), offline=usage == "offline", tensor=tensor)


def _by_degree(table: Mapping[int, float], degree: int) -> float:
    """The entry of the largest degree that *degree* reaches; 0 where there is none."""
    reached = [each for each in table if each <= degree]
    return table[max(reached)] if reached else 0.0


def workspace_bytes(spec: ModelSpec, parallel: ParallelConfig, tokens: int) -> float:
    """The workspace of vLLM's fused experts (model_executor/layers/fused_moe/fused_moe.py): a row for each token and each of its
    experts, as wide as gate and up together or as the output, whichever is wider, and one as wide as the expert.

    The kernels for four-bit formats work without it, as the logs of gpt-oss show.
    """
    if spec.experts is None or precision(spec.expert_precision).weight_bytes < 1:
        return 0.0
    ffn = math.ceil(spec.experts.ffn / parallel.expert_tensor)
    rows = tokens * spec.experts.per_token / parallel.expert
    first = ffn * (2 if spec.experts.gated else 1)
    return rows * (max(first, spec.expert_hidden) + ffn) * precision(spec.base_precision).element_bytes


def forward_bytes(spec: ModelSpec, parallel: ParallelConfig, tokens: int) -> float:
    """The most that activations of a forward pass over *tokens* take on one device: the MLP's gate, up and product, and a few
    tensors of the hidden size; for experts the workspace of their kernel."""
    element = precision(spec.base_precision).element_bytes
    wide = (3 if spec.gated_mlp else 2) * spec.ffn / parallel.tensor
    dense = 0.0 if all(spec.layer_is_moe) else tokens * wide * element
    tensors = HIDDEN_TENSORS + (RECEIVED_TENSORS if parallel.pipeline > 1 else 0)
    return max(dense, workspace_bytes(spec, parallel, tokens)) + tensors * tokens * spec.hidden * element


def sampler_bytes(spec: ModelSpec, device: Device, rules: StackMemory, tokens: int, sequences: int) -> float:
    """The most that the profile run's sampler takes: logits of *sequences* in every form that they are alive in at once."""
    if not spec.lm_head or spec.is_encoder:
        return 0.0
    element = precision(spec.base_precision).element_bytes
    rows = min(sequences, tokens)
    logits = rows * spec.vocab * (element + rules.logit_bytes)
    buffer = min(rows, device.n_cores) * spec.vocab * rules.core_bytes
    return logits + buffer + rules.hidden_copies * tokens * spec.hidden * element


def _activation_bytes(
    spec: ModelSpec,
    device: Device,
    parallel: ParallelConfig,
    rules: StackMemory,
    largest: LargestBatch,
    *,
    last: bool,
) -> float:
    tokens, sequences = largest
    if rules.share_of == "free before loading":
        # Activations and graphs live in what the share leaves.
        return 0.0
    if rules.activation_factors:
        table = rules.activation_factors if spec.experts is None else rules.expert_factors
        return 2.0 * tokens * spec.hidden * _by_degree(table, parallel.tensor)
    forward = forward_bytes(spec, parallel, tokens)
    if not last:
        return forward
    kept = workspace_bytes(spec, parallel, tokens) if rules.workspace_kept else 0.0
    return max(forward, sampler_bytes(spec, device, rules, tokens, sequences) + kept)


def _padding_bytes(spec: ModelSpec, parallel: ParallelConfig, layers: range) -> float:
    """The padding of mxfp4 experts in `PADDED_TO`, on one device."""
    experts = spec.experts
    if experts is None or spec.expert_precision != "mxfp4":
        return 0.0
    padded = math.ceil(spec.hidden / PADDED_TO) * PADDED_TO / spec.hidden - 1
    matrices = 3.0 if experts.gated else 2.0
    parameters = matrices * spec.hidden * experts.ffn * experts.n_experts / (parallel.expert * parallel.expert_tensor)
    return padded * parameters * precision("mxfp4").weight_bytes * sum(spec.layer_is_moe[i] for i in layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Used:
    """Bytes of one device that a serving stack takes beside weights and cache, and the budget of all together."""

    budget_bytes: float
    padding_bytes: float = 0
    """Weights beyond the model's own, of experts that its kernels pad."""
    cache_share: float = 1.0
    """Share of what the budget leaves that the cache takes."""
    activation_bytes: float = 0.0
    graph_bytes: float = 0.0
    context_bytes: float = 0.0
    communicator_bytes: float = 0.0


def _used_by_the_stack(
    deployment: Deployed,
    rules: StackMemory | None,
    share: float,
    total: float,
    stage: int,
    layers: range,
    largest: LargestBatch,
) -> _Used:
    if rules is None:
        return _Used(budget_bytes=share * total)
    spec, device, parallel = deployment.model, deployment.device, deployment.parallel
    context = rules.context_bytes if parallel.n_devices == 1 else rules.worker_bytes
    communicator = _by_degree(rules.communicator_bytes, parallel.tensor * parallel.groups)
    budget, cache_share = share * total, 1.0
    if rules.share_of == "free before loading":
        # Context and buffers are there before the share is taken.
        budget = share * (total - context - communicator) + context + communicator
    elif rules.share_of == "free after loading":
        budget, cache_share = total, share
    last = stage == parallel.pipeline - 1
    return _Used(
        budget_bytes=budget,
        padding_bytes=_padding_bytes(spec, parallel, layers),
        cache_share=cache_share,
        activation_bytes=_activation_bytes(spec, device, parallel, rules, largest, last=last),
        graph_bytes=rules.graph_bytes_per_layer * len(layers) if _captured(rules, device) else 0.0,
        context_bytes=context,
        communicator_bytes=communicator,
    )


def _captured(rules: StackMemory, device: Device) -> bool:
    """Whether graphs lie in the share. A TPU's programs are compiled as a whole: there is nothing to capture."""
    return rules.graphs_in_share and device.vendor != "Google"


def memory_plan(
    deployment: Deployed,
    rules: StackMemory | None,
    *,
    largest: LargestBatch,
    share: float | None = None,
    reserve_bytes: float = 0.0,
    block_tokens: int | None = None,
    draft: Deployed | None = None,
    context_tokens: int | None = None,
) -> MemoryPlan:
    """The division of the memory of *deployment*'s devices under *rules*, with what is said here in place of their defaults.

    *context_tokens* is the mean context of a sequence, which blocks are counted at where layers do not all keep every token
    (`hwmodels.cache`); None: the longest the model takes, as vLLM's log counts.

    *largest* is the batch of the profile run. A *draft* lies on the devices of the first stage, weights and cache. Without
    *rules* weights and cache share 0.9 of the memory as it is sold, and nothing else is counted.
    ValueError for a share outside (0, 1] and the like.
    """
    spec, device, parallel = deployment.model, deployment.device, deployment.parallel
    share = _share(deployment, rules, share)
    if not 0 <= reserve_bytes < math.inf:
        raise ValueError(f"reserve_bytes must be a finite number of at least 0; got {reserve_bytes!r}")
    if block_tokens is not None and block_tokens < 1:
        raise ValueError(f"block_tokens must be an integer of at least 1; got {block_tokens!r}")
    block_tokens = _block_tokens(parallel, rules, block_tokens)
    total = device.memory_bytes if rules is None else visible_bytes(device)
    in_pages = rules is not None and stacks()[rules.stack].pages_by_group
    alike = keeps_every_token(spec)
    longest = spec.max_positions or LONGEST
    context_tokens = max(1, context_tokens or longest)
    layer_groups = None
    stages = []
    caches = deployment.stage_caches()
    for i, (weights, per_token, layers) in enumerate(deployment.stage_bytes()):
        used = _used_by_the_stack(deployment, rules, share, total, i, layers, largest)
        drafts = _draft_of(draft if i == 0 else None, rules, device)
        draft_bytes = drafts.token_bytes * block_tokens
        logged_block_bytes = 0.0
        if alike:
            block_bytes = per_token * block_tokens
        else:
            block_bytes = mean_block_bytes(caches[i], block_tokens, context_tokens, in_pages=in_pages)
            if in_pages:
                pages = paged(caches[i], block_tokens)
                layer_groups = LayerGroups(
                    len(pages.groups), pages.page_tokens, longest, pages.peak_blocks(longest, largest.tokens)
                )
                # A draft's layers are counted with those of the target.
                logged_block_bytes = pages.block_bytes * (1.0 + draft_bytes / block_bytes if block_bytes else 1.0)
        stages.append(
            StageMemory(
                device_bytes=total,
                budget_bytes=used.budget_bytes,
                weight_bytes=weights + used.padding_bytes,
                activation_bytes=used.activation_bytes,
                graph_bytes=used.graph_bytes + drafts.graph_bytes,
                context_bytes=used.context_bytes,
                communicator_bytes=used.communicator_bytes,
                reserve_bytes=reserve_bytes,
                draft_bytes=drafts.weight_bytes,
                cache_share=used.cache_share,
                block_bytes=block_bytes + draft_bytes,
                logged_block_bytes=logged_block_bytes,
            )
        )
    return MemoryPlan(
        rules=rules,
        share=share,
        # The scheduler sees blocks of all devices that share a sequence (vLLM 0.32.0, `resolve_dcp_kv_block_size`).
        block_tokens=block_tokens * parallel.decode_context,
        largest=largest,
        stages=tuple(stages),
        groups=parallel.data,
        notes=() if alike else (note(spec, context_tokens, in_pages=in_pages),),
        layer_groups=layer_groups,
    )


def _share(deployment: Deployed, rules: StackMemory | None, asked: float | None) -> float:
    """The share of the memory that weights and cache have; ValueError outside (0, 1]."""
    share, parallel = 0.9 if asked is None else asked, deployment.parallel
    if asked is None and rules is not None:
        share = rules.default_share(deployment.device, tensor=parallel.tensor, pipeline=parallel.pipeline)
    if not 0 < share <= 1:
        raise ValueError(f"the share of the memory lies in (0, 1]; got {share!r}")
    return share


def usual_block_tokens(rules: StackMemory | None) -> int:
    """Tokens of a KV block on one device where nothing else is said; without *rules* those of vLLM."""
    return 16 if rules is None else int(rules.block_tokens)


def _block_tokens(parallel: ParallelConfig, rules: StackMemory | None, asked: int | None) -> int:
    """Tokens of a block on one device; ValueError where devices cannot share it as they are to."""
    tokens = usual_block_tokens(rules) if asked is None else asked
    if tokens % parallel.kv_interleave:
        raise ValueError(
            f"parallel.kv_interleave {parallel.kv_interleave} does not divide the {tokens} tokens of a KV block"
        )
    return tokens


class _Draft(NamedTuple):
    """Bytes of a draft model on one device."""

    weight_bytes: float = 0.0
    token_bytes: float = 0.0
    """The cache of one token."""
    graph_bytes: float = 0


def _draft_of(draft: Deployed | None, rules: StackMemory | None, device: Device) -> _Draft:
    if draft is None:
        return _Draft()
    graphs = 0
    if rules is not None and _captured(rules, device):
        graphs = rules.graph_bytes_per_layer * draft.model.n_layers
    return _Draft(draft.weight_bytes_per_device, draft.kv_bytes_per_token_per_device, graphs)


def with_slots(plan: MemoryPlan, adapters: AdapterCost) -> MemoryPlan:
    """*plan* with the slots of LoRA *adapters* beside the weights, which the cache lacks."""
    each = adapters.parallel.stage_layers(adapters.spec.n_layers)
    last = len(each) - 1
    stages = tuple(
        replace(stage, adapter_bytes=adapters.memory_bytes(layers, first=i == 0, last=i == last))
        for i, (stage, layers) in enumerate(zip(plan.stages, each, strict=True))
    )
    return replace(plan, stages=stages, adapters=adapters)


def with_encoder(plan: MemoryPlan, n_bytes: float) -> MemoryPlan:
    """*plan* with *n_bytes* of an encoder's weights on each device, which are taken from the cache."""
    return replace(plan, stages=tuple(replace(stage, encoder_bytes=n_bytes) for stage in plan.stages))


_PARTS = (
    ("weights", "weight_bytes"),
    ("draft", "draft_bytes"),
    ("adapters", "adapter_bytes"),
    ("encoder", "encoder_bytes"),
    ("activations", "activation_bytes"),
    ("CUDA graphs", "graph_bytes"),
    ("context", "context_bytes"),
    ("communicator", "communicator_bytes"),
    ("reserved", "reserve_bytes"),
)


def cache_text(facts: Mapping[str, Any]) -> str:
    """The cache as an engine's log prints it, from `MemoryPlan.facts`: blocks and tokens, null block included."""
    logged = facts.get("logged") or facts
    blocks, block_tokens = logged["blocks"], logged["block_tokens"]
    of_layers = f" in {logged['layer_groups']} groups of layers" if "layer_groups" in logged else ""
    tokens = logged.get("tokens", blocks * block_tokens)
    groups = f" in each of {facts['groups']} groups" if facts["groups"] > 1 else ""
    gib = facts["kv_bytes"] / GIB
    return f"{blocks:,} blocks of {block_tokens} tokens{of_layers} = {tokens:,} tokens{groups}, {gib:.2f} GiB a GPU"


def parts_text(facts: Mapping[str, Any]) -> str:
    """The other parts that take memory on the GPU that decides, in GiB, from `MemoryPlan.facts`."""
    parts = ", ".join(f"{name} {facts[key] / GIB:.2f}" for name, key in _PARTS if facts.get(key))
    return f"{facts['setting']} {facts['share']:g} of {facts['device_bytes'] / GIB:.2f} GiB, by {facts['account']}: {parts}"


def share_machine(plans: tuple[MemoryPlan, ...]) -> tuple[MemoryPlan, ...]:
    """The plans of models that take turns on the same devices: all keep what is theirs, and each gets an equal part of what is
    left for caches on each stage."""
    found = []
    for plan in plans:
        others = [other for other in plans if other is not plan]
        stages = tuple(
            replace(
                stage,
                reserve_bytes=stage.reserve_bytes
                + sum(other.stages[i].used_bytes - other.stages[i].reserve_bytes for other in others),
                cache_share=stage.cache_share / len(plans),
            )
            for i, stage in enumerate(plan.stages)
        )
        found.append(replace(plan, stages=stages))
    return tuple(found)
