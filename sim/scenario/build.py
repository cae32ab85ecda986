"""From a scenario to the objects that the engine runs."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from sim.errors import ScenarioError
from sim.scenario import named
from sim.scenario.decoding import BuiltDecoding, build_decoding
from sim.scenario.explain import told_by as _told_by
from sim.scenario.settings import Scenario
from sim.scenario.workload import workload_of
from sim.text import unknown

if TYPE_CHECKING:
    from hwmodels.deployment import Deployment
    from hwmodels.device import Device
    from hwmodels.memory import EngineDefaults, MemoryPlan
    from hwmodels.model import ModelSpec
    from sim.engine import Experiment, ReplicaSpec
    from sim.engine.experiment import PrefixCacheKind
    from sim.engine.streaming import Stream
    from workloads import ClosedLoop, Trace

ITERATION_TOKENS = ("token_budget", "max_num_batched_tokens", "max_num_tokens", "chunked_prefill_size", "chunk")
"""What schedulers call the most tokens of an iteration, for the batch of the profile run."""
SEQUENCES = ("max_sequences", "max_num_seqs", "max_running_requests", "max_batch_size", "batch_size")
"""What they call the most sequences."""
SAME_FOR_KV = ("bf16", "fp16", "fp32", "fp8")
"""Weight formats that the KV cache takes over; integer and 4-bit weights leave it in the checkpoint's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """An experiment, and what its results should say about where it came from."""

    experiment: Experiment
    manifest: dict[str, Any]
    slo: dict[str, float | None]


def build(scenario: Scenario) -> Experiment:
    """Everything resolved to objects: files read, workload generated, model placed in memory.

    ScenarioError for what cannot be found, read or fitted.
    """
    return resolve(scenario).experiment


def resolve(scenario: Scenario) -> Built:
    """The experiment that *scenario* describes, with its provenance.

    Raises ScenarioError, naming the scenario and the key, where something cannot be found, read or fitted.
    """
    from sim.engine import Experiment, MachineSpec

    pools = [_deployed(pool) for pool in pools_of(scenario)]
    workload = workload_of(scenario)
    if scenario.pools is not None or scenario.placement is not None:
        workload, rows = _asked_for(scenario, workload, pools)
    else:
        rows = {}
    router = _policy(scenario, "router", named.ROUTERS, "route")
    built = [_build_pool(pool, workload, rows) for pool in pools]
    allowed, longest = scenario.workload.max_tokens, int(workload.output_tokens.max(initial=0))
    if allowed is not None and getattr(workload, "max_tokens", None) is not None:
        raise ScenarioError(
            f"{scenario.source}: workload.max_tokens: the trace has a column max_tokens; leave out one of them"
        )
    if allowed is not None and allowed < longest:
        raise ScenarioError(
            f"{scenario.source}: workload.max_tokens is at least the longest output, {longest} tokens; got {allowed}"
        )
    experiment = Experiment(
        workload=workload,
        max_tokens=allowed,
        replicas=tuple(
            machine
            for pool, hosted in zip(pools, built, strict=True)
            for machine in (
                (hosted[0].spec if len(hosted) == 1 else MachineSpec(tenants=tuple(each.spec for each in hosted))),
            )
            * pool.replicas
        ),
        router=router,
        seed=scenario.seed,
        stream=_stream(scenario, pools),
        **_front_end(scenario, pools),
    )
    manifest = _manifest(scenario, pools, built, experiment)
    chosen = {
        f"{pool.prefix(i)}{key}": {"tokens": tokens, "why": why}
        for pool, hosted in zip(pools, built, strict=True)
        for i, each in enumerate(hosted)
        for key, (tokens, why) in each.chosen.items()
    }
    if chosen:
        manifest["auto"] = chosen
    return Built(
        experiment=experiment,
        manifest=manifest,
        slo=scenario.slo.model_dump(),
    )


@dataclass(frozen=True, kw_only=True)
class PoolOf:
    """Equal machines: each of *scenarios* is a model that they host, as a scenario of its own."""

    name: str
    """Empty where the scenario has no pools."""
    serves: tuple[str, ...]
    """By what names a workload asks for the models."""
    scenarios: tuple[Scenario, ...]
    deployments: tuple[Deployment, ...] = ()

    @property
    def replicas(self) -> int:
        return self.scenarios[0].replicas

    def prefix(self, i: int) -> str:
        """What comes before the keys of the settings of its model *i*."""
        if not self.name:
            return ""
        return f"pools.{self.name}.{self.serves[i]}." if len(self.serves) > 1 else f"pools.{self.name}."

    @property
    def gpus(self) -> int:
        """GPUs of all its machines."""
        parallel = self.scenarios[0].parallel
        return self.replicas * parallel.tensor * parallel.pipeline


@dataclass(frozen=True, kw_only=True)
class _Hosted:
    """A model on the machines of a pool."""

    spec: ReplicaSpec
    decoding: BuiltDecoding | None
    chosen: dict[str, tuple[int, str]]
    plan: MemoryPlan


def pools_of(scenario: Scenario) -> list[PoolOf]:
    """The pools of *scenario*, nothing of them deployed yet; one without a name where it has none."""
    if scenario.placement is not None:
        return _placed(scenario)
    if scenario.pools is None:
        return [PoolOf(name="", serves=(scenario.model,), scenarios=(scenario,))]
    found = []
    for name, pool in scenario.pools.items():
        if pool.models is None:
            one = scenario.pool(name)
            found.append(PoolOf(name=name, serves=(one.model,), scenarios=(one,)))
        else:
            models = tuple(scenario.pool(name, model=_original(scenario, model)) for model in pool.models)
            found.append(PoolOf(name=name, serves=tuple(pool.models), scenarios=models))
    return found


def _original(scenario: Scenario, model: str) -> str:
    """Of which model NAME#TAG is a copy."""
    return model if scenario.find(model) is not None else model.partition("#")[0]


def _placed(scenario: Scenario) -> list[PoolOf]:
    """A pool of one machine for each group of the placement that hosts anything."""
    from hwmodels.single_pass import single_pass_catalogue
    from sim.scenario.placement_file import placed_groups

    assert scenario.placement is not None
    file = scenario.find(scenario.placement)
    if file is None:
        raise ScenarioError(f"{scenario.source}: placement: {scenario.placement} does not exist")
    with _told_by(scenario, "placement"):
        groups = placed_groups(file)
        pools: dict[str, Any] = {}
        for number, group in enumerate(groups):
            table = [model for model in group.models if _original(scenario, model) in single_pass_catalogue()]
            if table:
                raise ScenarioError(
                    f"placement: {file} hosts {table[0]}, of which only a table of single-pass latencies is known; run replays "
                    "placements of catalogue models (rooftrace models), and rooftrace place scores this one"
                )
            if group.models:
                pools[f"group-{number}"] = {
                    "models": list(group.models),
                    "parallel": {"pipeline": group.inter_op, "tensor": group.intra_op},
                    "replicas": 1,
                }
        if not pools:
            raise ScenarioError(f"placement: {file} hosts no model")
    settings = {key: value for key, value in scenario.settings().items() if key != "placement"}
    return pools_of(Scenario.from_mapping({**settings, "pools": pools}, source=scenario.source, folder=scenario.folder))


def _deployed(pool: PoolOf) -> PoolOf:
    return replace(pool, deployments=tuple(deployment_of(scenario) for scenario in pool.scenarios))


def _asked_for(
    scenario: Scenario, workload: Trace | ClosedLoop, pools: list[PoolOf]
) -> tuple[Trace | ClosedLoop, dict[str, int]]:
    """The workload with the pools' models among its own, and the row of each; no rows where all pools host one model.

    ScenarioError where requests ask for a model that no pool hosts.
    """
    names = list(dict.fromkeys(name for pool in pools for name in pool.serves))
    if len(names) == 1 and not getattr(workload, "models", ()):
        return workload, {}
    if not hasattr(workload, "models"):
        raise ScenarioError(
            f"{scenario.source}: closed-loop clients do not say which of the pools' models ({', '.join(names)}) they ask for; "
            "give other workload.arrivals"
        )
    trace: Trace = workload  # type: ignore[assignment]
    if not trace.models:
        shares = ", ".join(f"{name}: 1" for name in names)
        raise ScenarioError(
            f"{scenario.source}: the pools host {', '.join(names)}, and the workload does not say which of them a request asks "
            f"for; give workload.models, such as {{{shares}}}, or a trace with a column model"
        )
    catalogue = [
        (deployment.model.name, name)
        for pool in pools
        for name, deployment in zip(pool.serves, pool.deployments, strict=True)
    ]
    # A model given as a file is asked for by the name in it as well, and copies are told apart.
    hosted_as = {model: {name for each, name in catalogue if each == model} for model, _ in catalogue}
    aliases = {model: next(iter(served)) for model, served in hosted_as.items() if len(served) == 1}
    index = np.zeros(len(trace), np.int64) if trace.model_index is None else trace.model_index
    counts = np.bincount(index, minlength=len(trace.models)).tolist()
    asked = [name if name in names else aliases.get(name, name) for name in trace.models]
    for name, count in zip(asked, counts, strict=True):
        if count and name not in names:
            what = f"{scenario.source}: {count:,} requests ask for {name}, which no pool hosts"
            raise ScenarioError(unknown(what, name, names))
    rows = {name: row for row, name in enumerate(names)}
    moved = np.array([rows.get(name, 0) for name in asked], np.int64)
    return trace.with_models(names, moved[index]), rows


def _stream(scenario: Scenario, pools: Sequence[PoolOf]) -> Stream:
    """Which tokens reach a client together, by the rule of the serving stack."""
    from sim.engine.streaming import Stream

    stacks = dict.fromkeys(each.serving_stack for pool in pools for each in pool.scenarios)
    rules: list[Literal["tokens", "iterations"]] = ["iterations" if stack == "trtllm" else "tokens" for stack in stacks]
    if scenario.stream_interval > 1 and len(set(rules)) > 1:
        raise ScenarioError(
            f"{scenario.source}: stream_interval: {' and '.join(stacks)} group tokens by different rules; give all pools one "
            "serving_stack"
        )
    return Stream(scenario.stream_interval, rules[0])


def _front_end(scenario: Scenario, pools: list[PoolOf]) -> dict[str, Any]:
    """The delays before the router, which stands in front of all pools."""
    found = {deployment.front_end for pool in pools for deployment in pool.deployments}
    if len(found) > 1:
        delays = ", ".join(f"{first * 1e3:g} ms and {each * 1e6:g} us a token" for first, each in sorted(found))
        raise ScenarioError(
            f"{scenario.source}: pools: the serving stacks' front ends take different times ({delays}), and one router with "
            "several front ends is not modelled; give all pools one serving_stack and cost_model"
        )
    (front_end,) = found
    return front_end._asdict()


def _build_pool(pool: PoolOf, workload: Trace | ClosedLoop, rows: Mapping[str, int]) -> list[_Hosted]:
    return [
        _build_hosted(pool, i, _of_model(workload, rows.get(name)), rows.get(name))
        for i, name in enumerate(pool.serves)
    ]


def _of_model(workload: Trace | ClosedLoop, row: int | None) -> Trace | ClosedLoop:
    """The requests of one model; all where nobody asks for it."""
    if row is None:
        return workload
    chosen = np.flatnonzero(workload.model_index == row)  # type: ignore[union-attr]
    return workload.take(chosen) if len(chosen) else workload  # type: ignore[union-attr]


def _build_hosted(pool: PoolOf, i: int, workload: Trace | ClosedLoop, row: int | None) -> _Hosted:
    from policies.view import evicts
    from policies.wrappers import EvictNewest
    from sim.engine import ReplicaSpec

    scenario, deployment = pool.scenarios[i], pool.deployments[i]
    chosen = _chosen(scenario, deployment, workload)
    scheduler = _scheduler(scenario, deployment, chosen, shared=len(pool.serves) > 1)
    memory = scenario.memory
    outer: Any = scheduler
    while outer is not None:
        if isinstance(outer, EvictNewest) and evicts(outer.inner):
            raise ScenarioError(
                f"{scenario.source}: scheduler: evict_newest wraps a scheduler that says itself who gives way when memory runs "
                "out; leave evict_newest out"
            )
        outer = getattr(outer, named.INNER, None)
    if memory.preemption == "none" and evicts(scheduler):
        raise ScenarioError(
            f"{scenario.source}: memory.preemption none: {scenario.scheduler.policy} says itself who gives way when memory runs "
            "out; leave it out, or choose another scheduler"
        )
    if memory.preemption == "recompute" and not evicts(scheduler):
        scheduler = EvictNewest(inner=scheduler)
    with _told_by(scenario):
        plan = (
            deployment.fitted(memory_of(scenario, deployment, scheduler))
            if len(pool.serves) == 1
            else _shared_plan(pool, i, scheduler)
        )
        decoding = build_decoding(
            scenario.decoding,
            target=deployment,
            plan=plan,
            beside=lambda draft: memory_of(scenario, deployment, scheduler, draft=draft),
            scheduler=scheduler,
            workload=workload,
            find=scenario.find,
        )
        stuck = _never_gets_on(scheduler, plan.block_tokens, decoding, _slots_of_drafts(scenario, decoding), workload)
        if stuck is not None:
            raise ScenarioError(stuck)
        if decoding is not None and len(pool.serves) > 1:
            raise ScenarioError(
                "decoding: models that share a machine do not speculate yet; give each a pool of its own"
            )
    if deployment.model.is_encoder and workload.output_tokens.any():
        raise ScenarioError(
            f"{scenario.source}: {deployment.model.name} is an encoder and emits no tokens, but the workload asks for "
            "some; give output_tokens: 0 or another model"
        )
    spec = ReplicaSpec(
        cost=deployment.cost,
        scheduler=scheduler,
        kv_blocks=plan.kv_blocks,
        block_tokens=plan.block_tokens,
        micro_batches=scenario.micro_batches,
        max_model_len=deployment.model.max_positions,
        model=row,
        prefix_cache=_prefix_cache(scenario),
        prefix_drops_last=scenario.decoding.method in _READS_THE_TARGET,
        **_slots_of_drafts(scenario, decoding),
    )
    if spec.prefix_cache is not None:
        _ids_fit(scenario, getattr(workload, "prefix_block_tokens", None), plan.block_tokens)
    if decoding is not None:
        spec = replace(
            spec,
            decoding=decoding.decoding,
            draft_cost=decoding.draft_cost,
            kv_blocks=decoding.plan.kv_blocks,
            speculation_overhead_s=decoding.overhead_s,
        )
        plan = decoding.plan
    return _Hosted(spec=spec, decoding=decoding, chosen=chosen, plan=plan)


def _never_gets_on(
    scheduler: Any,
    block_tokens: int,
    decoding: BuiltDecoding | None,
    slots: Mapping[str, int],
    workload: Trace | ClosedLoop,
) -> str | None:
    """Why *scheduler*, or one that it wraps, could plan nothing for some sequence, whatever else runs; None where it can."""
    from policies.sglang import Sglang
    from policies.trtllm import TrtLlm
    from policies.vllm import Vllm

    query = 1 if decoding is None else decoding.decoding.max_query_tokens
    of_drafting = query + slots.get("draft_slots", 0)
    while scheduler is not None:
        if isinstance(scheduler, Sglang) and 0 < scheduler.chunked_prefill_size < block_tokens:
            return (
                f"scheduler: chunked_prefill_size ({scheduler.chunked_prefill_size}) holds no whole page of {block_tokens} tokens, "
                "and a prompt that is cut is cut to whole pages; give more, or less as memory.block_tokens"
            )
        if isinstance(scheduler, TrtLlm) and scheduler.max_num_tokens < query:
            return (
                f"scheduler: max_num_tokens ({scheduler.max_num_tokens}) holds no round of speculation, {query} tokens of a "
                "sequence; give more, or draft fewer"
            )
        if isinstance(scheduler, Vllm):
            scheduled = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
            longest = int((workload.prompt_tokens + workload.output_tokens).max(initial=0))
            if not scheduler.enable_chunked_prefill and longest > scheduled:
                # Release 0.32.0 asks for a budget of its longest context then, `SchedulerConfig.verify_max_model_len`.
                return (
                    f"scheduler: without enable_chunked_prefill an iteration holds all tokens of a request, {longest} in this "
                    f"workload, and max_num_batched_tokens is {scheduled}; give more, or leave enable_chunked_prefill on"
                )
            if scheduled < query or scheduler.max_num_batched_tokens < of_drafting:
                return (
                    f"scheduler: max_num_batched_tokens ({min(scheduled, scheduler.max_num_batched_tokens)}) holds no round of "
                    f"speculation, {of_drafting} tokens of a sequence; vLLM verifies a part of one, which is not modelled: give "
                    "more, or draft fewer"
                )
        scheduler = getattr(scheduler, named.INNER, None)
    return None


def memory_of(
    scenario: Scenario, deployment: Deployment, scheduler: Any = None, *, draft: Deployment | None = None
) -> MemoryPlan:
    """How the memory of *scenario*'s devices is divided; its *scheduler*'s limits, or else the stack's, are those of the profile
    run. ValueError for a share by another stack's name, or a release that is not known."""
    from hwmodels.memory import engine_defaults, memory_plan, stack_memory

    memory, stack = scenario.memory, scenario.serving_stack
    if scenario.cost_model == "roofline":
        stack = "ideal"
    rules = stack_memory(stack, memory.release)
    setting = "gpu_memory_utilization" if rules is None else rules.setting
    strange = next((name for name in memory.shares if name != setting), None)
    if strange is not None:
        who = "cost_model roofline" if scenario.cost_model == "roofline" else f"serving_stack {stack}"
        raise ValueError(f"memory.{strange} is another stack's name; with {who} it is memory.{setting}")
    defaults = engine_defaults(stack, deployment.device, tensor=deployment.parallel.tensor)
    tokens = _limit(scheduler, ITERATION_TOKENS)
    sequences = _limit(scheduler, SEQUENCES)
    return memory_plan(
        deployment,
        rules,
        tokens=defaults.max_num_batched_tokens if tokens is None else tokens,
        sequences=defaults.max_num_seqs if sequences is None else sequences,
        share=memory.shares.get(setting),
        reserve_bytes=memory.reserve_bytes,
        block_tokens=memory.block_tokens,
        draft=draft,
        override=memory.kv_blocks,
    )


def _limit(scheduler: Any, names: tuple[str, ...]) -> int | None:
    """The smallest that *scheduler*, or one that it wraps, sets of these; None where none does."""
    found = []
    while scheduler is not None:
        found += [value for name in names if isinstance(value := getattr(scheduler, name, None), int)]
        scheduler = getattr(scheduler, named.INNER, None)
    return min(found, default=None)


def _shared_plan(pool: PoolOf, i: int, scheduler: Any) -> MemoryPlan:
    """Memory of a model among those that share a machine: an equal part of what all the others leave, stage by stage."""
    from hwmodels.memory import share_machine

    plans = [
        memory_of(scenario, deployment, scheduler)
        for scenario, deployment in zip(pool.scenarios, pool.deployments, strict=True)
    ]
    plan = share_machine(tuple(plans))[i]
    if plan.device_blocks - plan.null_blocks < 1:
        used = max(
            sum(stage.used_bytes - stage.reserve_bytes for stage in stages)
            for stages in zip(*(each.stages for each in plans), strict=True)
        )
        raise ScenarioError(
            f"{', '.join(pool.serves)} do not fit beside each other: their weights and what their stack sets aside take "
            f"{used / 1e9:.1f} GB of the {plans[i].stages[0].budget_bytes / 1e9:.1f} GB that a "
            f"{pool.deployments[i].device.name} offers, and a KV cache of each has to fit as well; share less or spread them "
            "over more devices (parallel)"
        )
    return plan


def _policy(
    scenario: Scenario, key: str, table: Mapping[str, str], method: str, chosen: Mapping[str, int] | None = None
) -> Any:
    settings = getattr(scenario, key)
    with _told_by(scenario, key):
        found = settings.settings
        for path, value in (chosen or {}).items():
            found = _with_value(found, path.split(".")[1:], value)
        return named.policy(settings.policy, found, table, key=key, method=method)


_READS_THE_TARGET = ("eagle", "mtp")
"""Methods whose drafter reads the target's states: what is found of a prompt lacks its last block, which is computed again
(`SpeculativeConfig.use_eagle_block_drop` of vLLM 0.32.0)."""

_CACHES: dict[str, PrefixCacheKind] = {"vllm": "blocks", "sglang": "blocks", "trtllm": "blocks"}
"""Serving stacks that find KV blocks again unless they are told not to, and how. The rules are vLLM's for all of them: SGLang's
tree and TensorRT-LLM's order of eviction are not modelled, which a note says."""


def _prefix_cache(scenario: Scenario) -> PrefixCacheKind | None:
    stack = scenario.serving_stack
    asked = scenario.memory.prefix_caching
    return _CACHES.get(stack, "blocks") if (stack in _CACHES if asked is None else asked) else None


def _ids_fit(scenario: Scenario, tokens: int | None, block_tokens: int) -> None:
    """ScenarioError where ids and KV blocks have sizes of which neither divides the other."""
    if tokens is not None and tokens % block_tokens and block_tokens % tokens:
        raise ScenarioError(
            f"{scenario.source}: memory.block_tokens: the trace's ids stand for {tokens} tokens each and a KV block holds "
            f"{block_tokens}, and one has to divide the other for blocks to be found again; give another block_tokens, or "
            "memory.prefix_caching: false"
        )


_DRAFT_HAS_KV = ("draft_model", "eagle", "mtp")
"""Methods whose drafter writes KV for the tokens that it drafts (`VllmConfig.num_lookahead_tokens` of vLLM 0.32.0); also those that
vLLM schedules asynchronously (`VllmConfig.__post_init__`), and none else that are modelled here."""


def _slots_of_drafts(scenario: Scenario, decoding: BuiltDecoding | None) -> dict[str, Any]:
    """What drafting takes beside the tokens that are verified: KV slots of each sequence, and tokens of the budget."""
    method = scenario.decoding.method if scenario.decoding is not None else "autoregressive"
    if decoding is None or method not in _DRAFT_HAS_KV:
        return {}
    # `SpeculativeConfig.max_num_new_slots_for_drafting` of vLLM 0.32.0.
    return {"lookahead_tokens": decoding.decoding.max_query_tokens - 1, "draft_slots": int(method == "draft_model")}


_PLANNED_AS_IT_IS = "micro-batches of a pipeline are planned while others run as it is"
_TAKE_TURNS = "models that share a machine take turns, and no turn is planned ahead"


def _scheduler(
    scenario: Scenario, deployment: Deployment, chosen: Mapping[str, tuple[int, str]], *, shared: bool = False
) -> Any:
    """The scheduler of *scenario*, without what `memory.preemption` puts around it; *shared*: its machine serves others too."""
    tokens = {key: value for key, (value, _) in chosen.items()}
    settings = {**tokens, **_as_the_engine(scenario, deployment, tokens, shared=shared)}
    return _policy(scenario, "scheduler", named.SCHEDULERS, "plan", settings)


def _as_the_engine(
    scenario: Scenario, deployment: Deployment, chosen: Mapping[str, int], *, shared: bool
) -> dict[str, Any]:
    """Settings by their dotted keys that the engine whose scheduler is asked for chooses by itself, where they are left out;
    *chosen* are those that were `auto`."""
    from hwmodels.memory import engine_defaults

    method = scenario.decoding.method if scenario.decoding is not None else "autoregressive"
    pipelined = scenario.parallel.pipeline > 1 or (scenario.micro_batches or 1) > 1
    no_overlap = _PLANNED_AS_IT_IS if pipelined else _TAKE_TURNS if shared else None
    if method not in ("autoregressive", *_DRAFT_HAS_KV):
        synchronous = f"vLLM does not schedule asynchronously with {method}"
    else:
        synchronous = no_overlap
    found: dict[str, Any] = {}
    for at, settings in named.chain({"policy": scenario.scheduler.policy, **scenario.scheduler.settings}, "scheduler"):
        settings = {name: chosen.get(f"{at}.{name}", value) for name, value in settings.items()}
        if settings.get("policy") == "sglang":
            if "chunked_prefill_size" not in settings:
                defaults = engine_defaults("sglang", deployment.device, tensor=scenario.parallel.tensor)
                found[f"{at}.chunked_prefill_size"] = defaults.max_num_batched_tokens
            if no_overlap is not None:
                # arg_groups/overrides.py of SGLang 0.5.23, _pipeline_parallel_overlap_disable.
                if settings.get("disable_overlap_schedule") is False:
                    raise ScenarioError(f"{scenario.source}: {at}.disable_overlap_schedule: {no_overlap}; leave it out")
                found[f"{at}.disable_overlap_schedule"] = True
        if settings.get("policy") == "trtllm" and no_overlap is not None:
            # Its loop for pipelines has no overlap (py_executor.py, `_executor_loop_pp`).
            if settings.get("disable_overlap_scheduler") is False:
                raise ScenarioError(f"{scenario.source}: {at}.disable_overlap_scheduler: {no_overlap}; leave it out")
            found[f"{at}.disable_overlap_scheduler"] = True
        if settings.get("policy") != "vllm":
            continue
        if synchronous is not None:
            if settings.get("async_scheduling"):
                raise ScenarioError(f"{scenario.source}: {at}.async_scheduling: {synchronous}; leave it out")
            found[f"{at}.async_scheduling"] = False
        limits = engine_defaults("vllm", deployment.device, tensor=scenario.parallel.tensor)
        found |= {f"{at}.{name}": value for name, value in _limits_of_vllm(settings, limits, deployment.model).items()}
    return found


def _limits_of_vllm(settings: Mapping[str, Any], limits: EngineDefaults, model: ModelSpec) -> dict[str, int]:
    """The limits that are left out of *settings*: `EngineArgs._set_default_max_num_seqs_and_batched_tokens_args`, 0.32.0."""
    found = {}
    sequences = settings.get("max_num_seqs", limits.max_num_seqs)
    tokens = settings.get("max_num_batched_tokens", limits.max_num_batched_tokens)
    if "max_num_batched_tokens" not in settings:
        longest = model.max_positions
        if longest and settings.get("enable_chunked_prefill") is False:
            # A whole prompt has to fit.
            tokens = max(tokens, longest)
        if longest and type(sequences) is int and sequences > 0:
            tokens = min(tokens, sequences * longest)
        found["max_num_batched_tokens"] = tokens
    if "max_num_seqs" not in settings:
        # What is no number of tokens is refused by the policy itself.
        found["max_num_seqs"] = min(sequences, tokens) if type(tokens) is int and tokens > 0 else sequences
    return found


def _with_value(settings: Mapping[str, Any] | str, path: list[str], value: Any) -> dict[str, Any]:
    if isinstance(settings, str):
        settings = {"policy": settings}
    first, *rest = path
    return {**settings, first: _with_value(settings[first], rest, value) if rest else value}


def _chosen(scenario: Scenario, deployment: Deployment, workload: Trace | ClosedLoop) -> dict[str, tuple[int, str]]:
    """Scheduler settings that are `auto` by their dotted keys, with the tokens chosen from the cost model and the reason."""
    found = _left_to_choose(scenario)
    if not found:
        return {}
    from hwmodels.budget import saturating_tokens, tokens_within

    limit_s = scenario.slo.tpot_s
    chosen = {}
    for key, settings in found:
        with _told_by(scenario, key):
            if limit_s is None:
                tokens = saturating_tokens(deployment.cost)
                why = "fewest tokens that reach 80 % of the best throughput"
            else:
                decodes = settings.get("max_sequences", settings.get("max_num_seqs", 128))
                context = int((workload.prompt_tokens + workload.output_tokens).mean())
                tokens = tokens_within(deployment.cost, tbt_s=limit_s, decodes=decodes, context_tokens=context)
                why = f"most tokens within slo.tpot_s {limit_s:g} s beside {decodes} decodes of {context} tokens"
            chosen[key] = (tokens, why)
    return chosen


def _left_to_choose(scenario: Scenario) -> list[tuple[str, Mapping[str, Any]]]:
    """Scheduler settings that are `auto`, by their dotted keys, each with all settings of its policy."""
    return [
        (f"{at}.{key}", settings)
        for at, settings in named.chain(scenario.scheduler.settings, "scheduler")
        for key in named.AUTO
        if settings.get(key) == named.AUTO_VALUE
    ]


def memory_plan_of(scenario: Scenario) -> tuple[Deployment, MemoryPlan]:
    """The replica that *scenario* describes and how its memory is divided, without a draft model; ScenarioError where it does
    not fit."""
    deployment = deployment_of(scenario)
    chosen = _chosen(scenario, deployment, workload_of(scenario)) if _left_to_choose(scenario) else {}
    scheduler = _scheduler(scenario, deployment, chosen)
    with _told_by(scenario):
        return deployment, deployment.fitted(memory_of(scenario, deployment, scheduler))


def deployment_of(scenario: Scenario) -> Deployment:
    """The replica that *scenario* describes, its memory not yet looked at; ScenarioError where it has pools."""
    from hwmodels.calibrated import Calibrated
    from hwmodels.deployment import deploy
    from hwmodels.model import load_model
    from hwmodels.roofline import Roofline

    if scenario.pools is not None or scenario.placement is not None:
        what = "pools" if scenario.pools is not None else "placement"
        raise ScenarioError(
            f"{scenario.source}: {what}: this is about one deployment; leave {what} out (--set {what}=null)"
        )
    with _told_by(scenario, "model"):
        model = load_model(scenario.find(scenario.model) or scenario.model)
    with _told_by(scenario, "hardware"):
        hardware, profile = _hardware(scenario)
    factory = Roofline if scenario.cost_model == "roofline" else Calibrated.for_stack(scenario.serving_stack, profile)
    precision, kv_precision = scenario.precision, scenario.kv_precision
    if kv_precision is None and precision in SAME_FOR_KV:
        kv_precision = precision
    with _told_by(scenario):
        return deploy(
            model=model,
            hardware=hardware,
            parallel=scenario.parallel.model_dump(),
            precision=precision,
            kv_precision=kv_precision,
            cost=factory,
        )


def _hardware(scenario: Scenario) -> tuple[Device, str | None]:
    """The device, and the path of the calibrated profile that the scenario names in its place."""
    from hwmodels.hardware import load_hardware
    from hwmodels.tables import is_profile

    file = scenario.find(scenario.hardware)
    if file is not None and is_profile(file):
        if scenario.cost_model == "roofline":
            raise ScenarioError(
                f"{file} is a calibrated profile and cost_model asks for the datasheet; name the device, or leave "
                "cost_model out"
            )
        return load_hardware(file), str(file)
    return load_hardware(file or scenario.hardware), None


def _manifest(
    scenario: Scenario, pools: list[PoolOf], built: list[list[_Hosted]], experiment: Experiment
) -> dict[str, Any]:
    from policies.view import reserves

    workload = experiment.workload
    speculating = any(hosted.decoding is not None for pool in built for hosted in pool)
    plain = scenario.pools is None and scenario.placement is None
    methods = dict.fromkeys(
        pool.scenarios[0].decoding.method
        for pool, hosted in zip(pools, built, strict=True)
        if any(each.decoding is not None for each in hosted)
    )
    schedulers = dict.fromkeys(pool.scenarios[0].scheduler.policy for pool in pools)
    parts = [
        f"{' and '.join(_name(pool, i, plain) for i in range(len(pool.serves)))} on {pool.gpus} x {pool.deployments[0].device.name}"
        for pool in pools
    ]
    names = list(dict.fromkeys(deployment.model.name for pool in pools for deployment in pool.deployments))
    notes = _notes(workload, names[0]) if len(names) == 1 else _notes(workload, "")
    notes += list(
        dict.fromkeys(
            note
            for pool in pools
            for deployment in pool.deployments
            for note in (*deployment.model.notes, *_borrowed(deployment))
        )
    )
    notes += _unused(scenario)
    if getattr(workload, "prefix_blocks", None) is not None:
        notes += dict.fromkeys(
            note for pool in pools for each in pool.scenarios for note in _without_prefix_cache(each)
        )
    notes += dict.fromkeys(note for pool in pools for each in pool.scenarios for note in _of_two_engines(each))
    schedulers_made = [hosted.spec.scheduler for pool in built for hosted in pool]
    if getattr(workload, "priority", None) is not None and not any(map(_asks_for_priority, schedulers_made)):
        notes.append(
            "The trace gives priorities and no scheduler asks for them; take {policy: vllm, scheduling_policy: priority}, or wrap "
            "one in {policy: order, by: priority}."
        )
    if getattr(workload, "priority", None) is None and any(map(_orders_by_priority, schedulers_made)):
        notes.append(
            "The scheduler orders by priority and no request has one, so that all stay in the order of the queue; give the trace a "
            "column priority or order by something else."
        )
    told = scenario.workload.max_tokens is not None or getattr(workload, "max_tokens", None) is not None
    if not told and any(map(reserves, schedulers_made)) and workload.output_tokens.any():
        notes.append(
            "The scheduler keeps memory for what clients allow, and nothing says what that is: each request is taken to be allowed "
            "what it emits, which no server knows. workload.max_tokens says it, or a column max_tokens of a plain trace."
        )
    if plain:
        facts = _facts(pools[0], built[0], 0)
    else:
        facts = {"models": list(getattr(workload, "models", ()) or names), "pools": _pool_facts(pools, built)}
        facts["router"] = named.shown_policy(experiment.router)
    head = {
        "label": " + ".join(parts) + f", {'/'.join(schedulers)}" + (f", {'/'.join(methods)}" if speculating else ""),
        "hash": scenario.hash,
        "seed": scenario.seed,
        "scenario": scenario.resolved(),
    }
    tail = {
        "workload": {"source": workload.source, "requests": len(workload)},
        "notes": notes,
        "versions": versions(),
    }
    if not plain:
        return {**head, **facts, **tail}
    policies = {"scheduler": facts["scheduler"], "router": named.shown_policy(experiment.router)}
    return {
        **head,
        "model": facts["model"],
        "hardware": facts["hardware"],
        "memory": facts["memory"],
        **policies,
        "decoding": facts["decoding"],
        **tail,
    }


def _name(pool: PoolOf, i: int, plain: bool) -> str:
    name = pool.deployments[i].model.name
    tag = "" if plain else pool.serves[i].partition("#")[2]
    return f"{name}#{tag}" if tag else name


def _pool_facts(pools: list[PoolOf], built: list[list[_Hosted]]) -> dict[str, Any]:
    """What the manifest says of each pool; `rows` are the values of the column `replica` that are its own."""
    found, first = {}, 0
    for pool, hosted in zip(pools, built, strict=True):
        facts = [_facts(pool, hosted, i) for i in range(len(hosted))]
        last = first + pool.replicas * len(hosted) - 1
        found[pool.name] = {
            "role": "both",
            "replicas": pool.replicas,
            "gpus": pool.gpus,
            "rows": [first, last],
            "hardware": facts[0]["hardware"],
            "models": [
                {
                    "serves": name,
                    **each["model"],
                    "memory": each["memory"],
                    "scheduler": each["scheduler"],
                    "decoding": each["decoding"],
                }
                for name, each in zip(pool.serves, facts, strict=True)
            ],
        }
        first = last + 1
    return found


def _facts(pool: PoolOf, hosted: list[_Hosted], i: int) -> dict[str, Any]:
    """What the manifest says of a model on its machines."""
    deployment, decoding = pool.deployments[i], hosted[i].decoding
    model, device = deployment.model, deployment.device
    return {
        "model": {
            "name": model.name,
            "source": model.source,
            "params": model.params,
            "weight_bytes_per_device": deployment.weight_bytes_per_device,
            "kv_precision": deployment.kv_precision,
        },
        "hardware": {
            "name": device.name,
            "title": device.title,
            **deployment.provenance,
            "memory_bytes": device.memory_bytes,
            "hbm_bytes_per_s": device.hbm_bytes_per_s,
            "peak_flops_per_s": dict(device.peak_flops_per_s),
            "tdp_w": device.tdp_w,
            "price_usd_per_hour": device.price_usd_per_hour,
            "sources": dict(device.sources),
        },
        "memory": hosted[i].plan.facts,
        "scheduler": named.shown_policy(hosted[i].spec.scheduler),
        "decoding": {"method": "autoregressive"} if decoding is None else decoding.manifest,
    }


def _borrowed(deployment: Deployment) -> Iterator[str]:
    """Says so where another device's measurements stand in."""
    profile = deployment.profile
    if profile is None:
        return
    if deployment.parallel.n_devices > 1 and not profile.links_measured:
        yield (
            f"{deployment.device.name}'s links have not been measured: what crosses them is priced as rings at the "
            "datasheet's bandwidth."
        )
    if profile.note.startswith("efficiencies"):
        yield f"{deployment.device.name} has not been calibrated: {profile.note}."


_STACK_OF = {"vllm": "vllm", "vllm-v0": "vllm", "sglang": "sglang", "trtllm": "trtllm"}
"""The serving stack of a scheduler that has an engine's name."""


def _of_two_engines(scenario: Scenario) -> Iterator[str]:
    """A note where the scheduler is one engine's and the serving stack another's."""
    stack = scenario.serving_stack
    for _, settings in named.chain({"policy": scenario.scheduler.policy, **scenario.scheduler.settings}, "scheduler"):
        policy = settings.get("policy")
        engine = _STACK_OF.get(policy, stack) if isinstance(policy, str) else stack
        if engine != stack and stack in _STACK_OF.values():
            yield (
                f"The scheduler {policy} plans here for the serving stack {stack}, whose host work, memory and pages the run has; "
                f"serving_stack: {engine} has those of the same engine."
            )


def _notes(workload: Trace | ClosedLoop, model: str) -> list[str]:
    """What of the workload the run leaves out; *model* serves everything, unless it is empty."""
    notes = []
    models = getattr(workload, "models", ())
    if len(models) > 1 and model:
        notes.append(f"The trace asks for {len(models)} models ({', '.join(models[:4])}); all requests go to {model}.")
    left_out = getattr(workload, "left_out", ())
    if left_out:
        notes.append(f"Closed-loop clients leave out what the trace says of {', '.join(left_out)}.")
    return notes


def _without_prefix_cache(scenario: Scenario) -> Iterator[str]:
    """A note where a trace says which prompts share a beginning and nobody asks, or where another engine's rules answer."""
    if _prefix_cache(scenario) is not None and scenario.serving_stack in ("sglang", "trtllm"):
        engine = {"sglang": "SGLang evicts leaves of its tree", "trtllm": "TensorRT-LLM evicts by priority"}[
            scenario.serving_stack
        ]
        yield (
            f"KV blocks are found again and evicted by vLLM's rules; {engine}, which changes what is found where memory is short."
        )
    if _prefix_cache(scenario) is None:
        asked = scenario.memory.prefix_caching is False
        why = "memory.prefix_caching is off" if asked else f"serving_stack {scenario.serving_stack} has no prefix cache"
        yield (
            f"The trace says which prompts share a beginning, and {why}: every prompt is computed in full"
            + ("." if asked else "; memory.prefix_caching: true finds them.")
        )


def _unused(scenario: Scenario) -> list[str]:
    """Says which settings of the top level no pool takes, each having its own."""
    if scenario.placement is not None:
        own = [{"model", "replicas", "parallel"}]
        whose = "the placement says its own"
    elif scenario.pools is not None:
        own = [
            {
                "model" if key == "models" else key
                for key, value in pool.model_dump(exclude_unset=True).items()
                if value is not None
            }
            for pool in scenario.pools.values()
        ]
        whose = "every pool has its own"
    else:
        return []
    # Of `parallel` and `memory` a pool may take some keys from the top.
    unused = set.intersection(*own) & set(scenario.settings()) - {"memory", "parallel"}
    return (
        [f"The top level's {' and '.join(sorted(unused))} {'is' if len(unused) == 1 else 'are'} not used: {whose}."]
        if unused
        else []
    )


def _asks_for_priority(scheduler: Any) -> bool:
    """Whether *scheduler* orders by priority, or may do so, not being one of ours."""
    while scheduler is not None:
        module = getattr(scheduler, "__module__", None) or type(scheduler).__module__
        if not module.startswith("policies.") or _orders_by_priority(scheduler):
            return True
        scheduler = getattr(scheduler, named.INNER, None)
    return False


def _orders_by_priority(scheduler: Any) -> bool:
    """Whether *scheduler*, or one that it wraps, is a policy of ours that orders by priority."""
    while scheduler is not None:
        if "priority" in (getattr(scheduler, "by", None), getattr(scheduler, "scheduling_policy", None)):
            return True
        scheduler = getattr(scheduler, named.INNER, None)
    return False


def versions() -> dict[str, str]:
    """Versions of Python, Rooftrace and the libraries whose numbers a result depends on."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for name in ("rooftrace", "numpy", "simpy", "pyarrow"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
