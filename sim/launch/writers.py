"""What each engine's command says of a scenario, the counterparts of `vllm`, `sglang` and `trtllm`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from sim.launch.writing import Writing
from sim.scenario import Scenario


def model_name(scenario: Scenario) -> str:
    """The name that a server loads: the hub's where the catalogue knows it."""
    from hwmodels.model import hub_name

    return hub_name(scenario.model) or scenario.model


_CACHES = {"fp8": "fp8", "bf16": "bfloat16", "fp16": "float16"}


def _vllm(command: Writing) -> None:
    scenario = command.scenario
    parallel = scenario.parallel
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
    cached = command.memory("prefix_caching")
    if cached is not None:
        command.flag("--enable-prefix-caching" if cached else "--no-enable-prefix-caching", True)
    _vllm_graphs_and_tiers(command)
    for key in (
        *("max_num_seqs", "max_num_batched_tokens", "max_num_active_seqs", "max_num_scheduled_tokens"),
        *("long_prefill_token_threshold", "watermark", "scheduling_policy"),
    ):
        command.flag(f"--{key.replace('_', '-')}", command.scheduler(key))
    for key in ("enable_chunked_prefill", "async_scheduling", "scheduler_reserve_full_isl"):
        given = command.scheduler(key)
        if given is not None:
            command.flag(f"--{'' if given else 'no-'}{key.replace('_', '-')}", True)
    if scenario.stream_interval > 1:
        command.flag("--stream-interval", scenario.stream_interval)
    _vllm_speculation(command)


def _vllm_graphs_and_tiers(command: Writing) -> None:
    graphs = command.scenario.cuda_graphs
    if graphs is not None:
        command.flag("--enforce-eager", graphs.eager)
        command.flag("--max-cudagraph-capture-size", graphs.largest)
        command.numbers("--cudagraph-capture-sizes", graphs.sizes)
    tiers = command.scenario.memory.tiers or []
    if len(tiers) == 1 and tiers[0].kind == "host":
        command.memory("tiers")
        command.flag("--kv-offloading-size", f"{tiers[0].gib:g}")
    experts = command.scenario.experts
    if experts is not None and experts.placement == "eplb":
        command.flag("--enable-eplb", True)
        if experts.redundant:
            command.flag("--eplb-config", json.dumps({"num_redundant_experts": experts.redundant}))


def _formats(command: Writing) -> None:
    """Number formats, where the scenario changes what the checkpoint has."""
    scenario = command.scenario
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
    if decoding.draft is not None and decoding.draft.model is not None:
        config["model"] = decoding.draft.model
    elif decoding.method in ("eagle", "medusa"):
        command.not_carried("the heads that draft: add their checkpoint as model to --speculative-config")
    command.flag("--speculative-config", json.dumps(config))
    command.carries_speculation()


def _sglang(command: Writing) -> None:
    scenario = command.scenario
    parallel = scenario.parallel
    data, expert = parallel.data, parallel.expert
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
    page = command.memory("block_tokens")
    command.flag("--page-size", page)
    blocks = command.memory("kv_blocks")
    command.flag("--max-total-tokens", None if blocks is None else blocks * (page or 1))
    if command.memory("prefix_caching") is False or command.scheduler("disable_radix_cache"):
        command.flag("--disable-radix-cache", True)
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
        command.carries_speculation()
        command.flag("--speculative-algorithm", algorithm)
        command.flag("--speculative-num-steps", decoding.num_speculative_tokens)
        command.flag("--speculative-eagle-topk", 1)
        command.flag("--speculative-num-draft-tokens", decoding.num_speculative_tokens + 1)
        if decoding.draft is not None and decoding.draft.model is not None:
            command.flag("--speculative-draft-model-path", decoding.draft.model)


def _trtllm(command: Writing) -> None:
    scenario = command.scenario
    parallel = scenario.parallel
    data, expert = parallel.data, parallel.expert
    command.start("trtllm-serve", model_name(scenario))
    command.flag("--tp_size", parallel.tensor * data if parallel.tensor * data > 1 else None)
    command.flag("--pp_size", parallel.pipeline if parallel.pipeline > 1 else None)
    command.flag("--ep_size", expert if expert > 1 else None)
    command.flag("--enable_attention_dp", data > 1)
    for key in ("max_batch_size", "max_num_tokens", "enable_chunked_prefill"):
        command.flag(f"--{key}", command.scheduler(key))
    command.flag("--free_gpu_memory_fraction", command.memory("free_gpu_memory_fraction"))
    command.flag("--kv_cache_dtype", scenario.kv_precision)
    if scenario.precision is not None:
        command.not_carried(f"precision {scenario.precision}: serve a checkpoint that has it")
    file = _trtllm_file(command)
    if file:
        command.flag("--config", "config.yaml")
        command.file("config.yaml", file)


def _trtllm_file(command: Writing) -> dict[str, Any]:
    """What trtllm-serve takes in its YAML file alone."""
    scenario = command.scenario
    found: dict[str, Any] = {}
    cache = {
        "tokens_per_block": command.memory("block_tokens"),
        "enable_block_reuse": command.memory("prefix_caching"),
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
        command.carries_speculation()
    return found


WRITERS: Mapping[str, Callable[[Writing], None]] = {"vllm": _vllm, "sglang": _sglang, "trtllm": _trtllm}
