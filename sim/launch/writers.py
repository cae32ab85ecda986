"""The options by which each engine's command says a scenario, the counterparts of `vllm`, `sglang` and `trtllm`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hwmodels.model import hub_name
from sim.launch.tiers import GIB, host_tiers_to_write
from sim.launch.writing import BESIDE, Writing, beside
from sim.scenario import Scenario
from sim.scenario.tiers import Tier


def model_name(scenario: Scenario) -> str:
    """The name that a server loads: the scenario's where it is the hub's or a folder, or else the hub's of the catalogue's."""
    return _to_load(scenario.model)


def _to_load(model: str) -> str:
    return model if "/" in model else hub_name(model) or model


_CACHES = {"fp8": "fp8", "bf16": "bfloat16", "fp16": "float16"}


def _vllm(command: Writing) -> None:
    scenario = command.scenario
    parallel = scenario.parallel
    command.carries("parallel", "stream_interval")
    command.start("vllm serve", model_name(scenario))
    command.flag("--tensor-parallel-size", parallel.tensor if parallel.tensor > 1 else None)
    command.flag("--pipeline-parallel-size", parallel.pipeline if parallel.pipeline > 1 else None)
    data, expert = parallel.data, parallel.expert
    command.flag("--data-parallel-size", data if data > 1 else None)
    command.flag("--enable-expert-parallel", expert > 1)
    if expert > 1 and expert != parallel.tensor * data:
        command.not_carried(
            f"parallel.expert: {expert}; vLLM spreads experts over all {parallel.tensor * data} devices"
        )
    _formats(command)
    command.flag("--gpu-memory-utilization", command.memory("gpu_memory_utilization"))
    command.flag("--num-gpu-blocks-override", command.memory("kv_blocks"))
    command.flag("--block-size", command.memory("block_tokens"))
    command.flag("--max-model-len", command.memory("max_model_len"))
    cached = command.memory("prefix_caching")
    if cached is not None:
        command.flag("--enable-prefix-caching" if cached else "--no-enable-prefix-caching", True)
    _vllm_graphs_and_tiers(command)
    for key in (
        *("max_num_seqs", "max_num_batched_tokens", "max_num_active_seqs", "max_num_scheduled_tokens"),
        *("long_prefill_token_threshold", "watermark", "scheduling_policy"),
    ):
        command.flag(f"--{key.replace('_', '-')}", command.scheduler(key))
    for key in (
        *("enable_chunked_prefill", "async_scheduling", "scheduler_reserve_full_isl"),
        "long_prefill_token_threshold_adaptive",
    ):
        given = command.scheduler(key)
        if given is not None:
            command.flag(f"--{'' if given else 'no-'}{key.replace('_', '-')}", True)
    if scenario.stream_interval > 1:
        command.flag("--stream-interval", scenario.stream_interval)
    _vllm_speculation(command)


def _vllm_graphs_and_tiers(command: Writing) -> None:
    graphs = command.scenario.cuda_graphs
    command.carries("cuda_graphs")
    if graphs is not None:
        command.flag("--enforce-eager", graphs.eager)
        command.flag("--max-cudagraph-capture-size", graphs.largest)
        command.numbers("--cudagraph-capture-sizes", graphs.sizes)
    _vllm_connector(command, host_tiers_to_write(command))
    experts = command.scenario.experts
    if experts is None:
        return
    command.carries("experts.placement", "experts.redundant", "experts.exchange")
    if experts.placement == "eplb":
        command.flag("--enable-eplb", True)
        if experts.redundant:
            command.flag("--eplb-config", json.dumps({"num_redundant_experts": experts.redundant}))
    elif experts.placement != "linear":
        command.not_carried(f"experts.placement: {experts.placement}; vLLM places by --enable-eplb or in order")
    if experts.exchange == "all_to_all":
        command.not_carried("experts.exchange: all_to_all; vLLM has others (--all2all-backend)")
    else:
        command.flag("--all2all-backend", experts.exchange)


_SIDES = {"prefill": "kv_producer", "decode": "kv_consumer"}


def _vllm_connector(command: Writing, tier: Tier | None) -> None:
    """The option that takes KV to or from another server, and to host memory; both together need a connector of connectors."""
    offload = None if tier is None or tier.gib is None else tier.gib
    if command.role == "both":
        command.flag("--kv-offloading-size", None if offload is None else f"{offload:g}")
        return
    between = "MooncakeConnector" if command.connector == "mooncake_vllm" else "NixlConnector"
    config: dict[str, Any] = {"kv_connector": between, "kv_role": _SIDES[command.role]}
    if offload is not None:
        inner = {"cpu_bytes_to_use": round(offload * GIB)}
        tiers = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": inner}
        both = {"connectors": [config, tiers]}
        config = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": both}
    command.flag("--kv-transfer-config", json.dumps(config))


def _formats(command: Writing) -> None:
    """Number formats, where the scenario changes what the checkpoint has."""
    scenario = command.scenario
    command.carries("precision", "kv_precision")
    if scenario.precision in ("bf16", "fp16", "fp32"):
        command.flag("--dtype", {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[scenario.precision])
    elif scenario.precision == "fp8":
        command.flag("--quantization", "fp8")
    elif scenario.precision is not None:
        command.not_carried(f"precision {scenario.precision}: serve a checkpoint that has it")
    if scenario.kv_precision is not None:
        name = {"fp8": "fp8_e4m3"}.get(scenario.kv_precision) if command.target == "sglang" else None
        command.flag("--kv-cache-dtype", name or _CACHES.get(scenario.kv_precision, scenario.kv_precision))


def _vllm_speculation(command: Writing) -> None:
    decoding = command.scenario.decoding
    k = decoding.num_speculative_tokens
    if decoding.method == "autoregressive" or not isinstance(k, int):
        return
    config: dict[str, Any] = {"method": decoding.method, "num_speculative_tokens": k}
    command.carries("decoding.method", "decoding.num_speculative_tokens")
    draft = decoding.draft
    if draft is not None and draft.model is not None:
        config["model"] = _to_load(draft.model)
        command.carries("decoding.draft.model")
        if draft.tensor is not None:
            config["draft_tensor_parallel_size"] = draft.tensor
            command.carries("decoding.draft.tensor")
    elif decoding.method in ("eagle", "medusa"):
        command.not_carried("the heads that draft: add their checkpoint as model to --speculative-config")
    command.flag("--speculative-config", json.dumps(config))


def _sglang(command: Writing) -> None:
    scenario = command.scenario
    parallel = scenario.parallel
    data, expert = parallel.data, parallel.expert
    command.carries("parallel", "stream_interval", "cuda_graphs")
    command.start("python -m sglang.launch_server")
    command.flag("--model-path", model_name(scenario))
    command.flag("--tp-size", parallel.tensor * data if parallel.tensor * data > 1 else None)
    command.flag("--pp-size", parallel.pipeline if parallel.pipeline > 1 else None)
    if data > 1:
        command.flag("--dp-size", data)
        command.flag("--enable-dp-attention", True)
    command.flag("--ep-size", expert if expert > 1 else None)
    _formats(command)
    command.flag("--mem-fraction-static", command.memory("mem_fraction_static"))
    _sglang_tier(command, host_tiers_to_write(command))
    if command.role != "both":
        command.flag("--disaggregation-mode", command.role)
        command.flag("--disaggregation-transfer-backend", "mooncake" if command.connector else "nixl")
    command.flag("--context-length", command.memory("max_model_len"))
    page = command.memory("block_tokens")
    command.flag("--page-size", page)
    blocks = command.memory("kv_blocks")
    command.flag("--max-total-tokens", None if blocks is None else blocks * (page or 1))
    if command.memory("prefix_caching") is False or command.scheduler("disable_radix_cache"):
        command.flag("--disable-radix-cache", True)
    eviction = command.memory("eviction")
    if eviction is not None and eviction["policy"] in ("lru", "lfu", "fifo", "mru"):
        command.flag("--radix-eviction-policy", eviction["policy"])
    elif eviction is not None:
        command.not_carried(f"memory.eviction: {eviction['policy']}; SGLang has lru, lfu, fifo and mru")
    graphs = scenario.cuda_graphs
    if graphs is not None:
        command.flag("--disable-cuda-graph", graphs.eager)
        command.flag("--cuda-graph-max-bs-decode", graphs.largest)
        command.numbers("--cuda-graph-bs-decode", graphs.sizes)
    for key in (
        *("chunked_prefill_size", "max_prefill_tokens", "prefill_max_requests", "max_running_requests"),
        *("schedule_policy", "schedule_conservativeness", "scheduler_recv_interval", "enable_mixed_chunk"),
        *("disable_overlap_schedule",),
    ):
        command.flag(f"--{key.replace('_', '-')}", command.scheduler(key))
    if scenario.stream_interval > 1:
        command.flag("--stream-interval", scenario.stream_interval)
    decoding = scenario.decoding
    algorithm = {"ngram": "NGRAM", "eagle": "EAGLE", "mtp": "NEXTN", "draft_model": "STANDALONE"}.get(decoding.method)
    if algorithm is not None and isinstance(decoding.num_speculative_tokens, int):
        command.carries("decoding.method", "decoding.num_speculative_tokens", "decoding.draft.model")
        command.flag("--speculative-algorithm", algorithm)
        command.flag("--speculative-num-steps", decoding.num_speculative_tokens)
        command.flag("--speculative-eagle-topk", 1)
        command.flag("--speculative-num-draft-tokens", decoding.num_speculative_tokens + 1)
        if decoding.draft is not None and decoding.draft.model is not None:
            command.flag("--speculative-draft-model-path", _to_load(decoding.draft.model))


def _sglang_tier(command: Writing, tier: Tier | None) -> None:
    """The host tier as hierarchical cache: whole gigabytes of each rank."""
    if tier is None or tier.gib is None:
        return
    parallel = command.scenario.parallel
    ranks = parallel.tensor * parallel.pipeline * parallel.data
    each = tier.gib * GIB / 1e9 / ranks
    size = max(1, round(each))
    command.flag("--enable-hierarchical-cache", True)
    command.flag("--hicache-size", size)
    command.flag("--hicache-write-policy", "write_back" if tier.write == "eviction" else None)
    if abs(size - each) > 1e-6:
        command.not_carried(
            f"memory.tiers: {tier.gib:g} GiB are {each:.3f} GB of each rank, and --hicache-size takes whole ones"
        )


def _trtllm(command: Writing) -> None:
    scenario = command.scenario
    parallel = scenario.parallel
    data, expert = parallel.data, parallel.expert
    command.carries("parallel", "stream_interval", "cuda_graphs", "precision", "kv_precision")
    if data > 1 and parallel.tensor > 1:
        command.not_carried(
            f"parallel.tensor: {parallel.tensor}; --enable_attention_dp has one rank of attention for each GPU"
        )
    command.start("trtllm-serve", model_name(scenario))
    command.flag("--tp_size", parallel.tensor * data if parallel.tensor * data > 1 else None)
    command.flag("--pp_size", parallel.pipeline if parallel.pipeline > 1 else None)
    command.flag("--ep_size", expert if expert > 1 else None)
    command.flag("--enable_attention_dp", data > 1)
    for key in ("max_batch_size", "max_num_tokens", "enable_chunked_prefill"):
        command.flag(f"--{key}", command.scheduler(key))
    command.flag("--free_gpu_memory_fraction", command.memory("free_gpu_memory_fraction"))
    command.flag("--max_seq_len", command.memory("max_model_len"))
    command.flag("--kv_cache_dtype", scenario.kv_precision)
    if scenario.precision is not None:
        command.not_carried(f"precision {scenario.precision}: serve a checkpoint that has it")
    file = _trtllm_file(command)
    if file:
        name = f"config-{command.name}.yaml" if command.name else "config.yaml"
        command.flag("--config", name)
        command.file(name, file)


def _trtllm_file(command: Writing) -> dict[str, Any]:
    """The settings that trtllm-serve takes in its YAML file alone."""
    scenario = command.scenario
    found: dict[str, Any] = {}
    tier = host_tiers_to_write(command, write="eviction")
    parallel = scenario.parallel
    ranks = parallel.tensor * parallel.pipeline * parallel.data
    if command.role != "both":
        command.flag("--server_role", "context" if command.role == "prefill" else "generation")
        found["cache_transceiver_config"] = {"backend": "DEFAULT"}
    cache = {
        "tokens_per_block": command.memory("block_tokens"),
        "enable_block_reuse": command.memory("prefix_caching"),
        "host_cache_size": None if tier is None or tier.gib is None else round(tier.gib * GIB / ranks),
    }
    rules = {key: command.scheduler(key) for key in ("capacity_scheduler_policy", "context_chunking_policy")}
    for section, values in (("kv_cache_config", cache), ("scheduler_config", rules)):
        if given := {key: value for key, value in values.items() if value is not None}:
            found[section] = given
    for key in ("disable_overlap_scheduler", "batch_wait_timeout_iters", "batch_wait_max_tokens_ratio"):
        value = command.scheduler(key)
        if value is not None:
            found[key] = value
    if scenario.stream_interval > 1:
        found["stream_interval"] = scenario.stream_interval
    graphs = scenario.cuda_graphs
    if graphs is not None:
        sizes = {"max_batch_size": graphs.largest, "batch_sizes": graphs.sizes}
        given = {key: value for key, value in sizes.items() if value is not None}
        found["cuda_graph_config"] = None if graphs.eager else given
    decoding = scenario.decoding
    kind = {"ngram": "NGram", "mtp": "MTP", "eagle": "Eagle", "draft_model": "DraftTarget"}.get(decoding.method)
    if kind is not None and isinstance(decoding.num_speculative_tokens, int):
        drafted = "num_nextn_predict_layers" if kind == "MTP" else "max_draft_len"
        found["speculative_config"] = {"decoding_type": kind, drafted: decoding.num_speculative_tokens}
        command.carries("decoding.method", "decoding.num_speculative_tokens")
        if decoding.draft is not None and decoding.draft.model is not None:
            found["speculative_config"]["speculative_model_dir"] = _to_load(decoding.draft.model)
            command.carries("decoding.draft.model")
    return found


WRITERS: Mapping[str, Callable[[Writing], None]] = {"vllm": _vllm, "sglang": _sglang, "trtllm": _trtllm}


def commands(scenario: Scenario, target: str | None) -> Iterator[tuple[str, Writing]]:
    """A command of *target* (None: of each pool's own stack, or else of vLLM) for each pool, by its name; for a scenario without
    pools one, without a name."""
    links = (scenario.links or {}).values()
    connector = next((link.connector for link in links if link.connector is not None), None)
    for name in scenario.pools or ("",):
        part = scenario.pool(name) if name else scenario
        role = scenario.pools[name].role if scenario.pools else "both"
        engine = target or (part.stack_name if part.stack_name in ("vllm", "sglang") else "vllm")
        command = Writing(part, engine, name=name, role=role, connector=connector)
        if name:
            command.carries("router", *(key for key in BESIDE if key != "autoscale"))
        WRITERS[engine](command)
        yield name, command


def of_the_whole(scenario: Scenario) -> Iterator[str]:
    """The settings that a scenario has for all pools, and no command says."""
    if not scenario.pools:
        return
    if any(pool.models for pool in scenario.pools.values()):
        yield "pools.*.models: a server of one model is written for each pool; others that share its machine are not"
    given = scenario.model_dump(exclude_defaults=True)
    yield from (beside(key, given[key]) for key in BESIDE if key in given and key != "autoscale")
    for key, value in scenario.router.settings.items():
        yield f"router.{key}: {value}"
