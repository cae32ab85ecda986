"""`vllm serve`, written for a scenario: the counterpart of `reader`."""

from __future__ import annotations

import json
from typing import Any

from sim.launch.engines.vllm import adapters
from sim.launch.forced import forced_rates
from sim.launch.tiers import GIB, host_tiers_to_write
from sim.launch.writing import Writing, formats, model_name, to_load
from sim.scenario.tiers import Tier


def write(command: Writing) -> None:
    scenario = command.scenario
    parallel = scenario.parallel
    command.carries("parallel", "stream_interval")
    command.start("vllm serve", model_name(scenario))
    command.flag("--tensor-parallel-size", parallel.tensor if parallel.tensor > 1 else None)
    command.flag("--pipeline-parallel-size", parallel.pipeline if parallel.pipeline > 1 else None)
    for option, degree in (
        ("--decode-context-parallel-size", parallel.decode_context),
        ("--prefill-context-parallel-size", parallel.prefill_context),
        ("--cp-kv-cache-interleave-size", parallel.kv_interleave),
    ):
        command.flag(option, degree if degree > 1 else None)
    data, expert = parallel.data, parallel.expert
    command.flag("--data-parallel-size", data if data > 1 else None)
    command.flag("--enable-expert-parallel", expert > 1)
    if expert > 1 and expert != parallel.tensor * data * parallel.prefill_context:
        command.not_carried(
            f"parallel.expert: {expert}; vLLM spreads experts over all {parallel.tensor * data} devices"
        )
    formats(command)
    command.flag("--gpu-memory-utilization", command.memory("gpu_memory_utilization"))
    command.flag("--num-gpu-blocks-override", command.memory("kv_blocks"))
    command.flag("--block-size", command.memory("block_tokens"))
    command.flag("--max-model-len", command.memory("max_model_len"))
    cached = command.memory("prefix_caching")
    if cached is not None:
        command.flag("--enable-prefix-caching" if cached else "--no-enable-prefix-caching", True)
    _graphs_and_tiers(command)
    for key in (
        *("max_num_seqs", "max_num_batched_tokens", "max_num_active_seqs", "max_num_scheduled_tokens"),
        *("long_prefill_token_threshold", "prefill_schedule_interval", "watermark", "scheduling_policy"),
    ):
        command.flag(f"--{key.replace('_', '-')}", command.scheduler(key))
    for key in (
        *("enable_chunked_prefill", "async_scheduling", "scheduler_reserve_full_isl"),
        "long_prefill_token_threshold_adaptive",
    ):
        given = command.scheduler(key)
        if given is not None:
            command.flag(f"--{'' if given else 'no-'}{key.replace('_', '-')}", True)
    # Rules come with the server that is started.
    command.scheduler("release")
    if scenario.stream_interval > 1:
        command.flag("--stream-interval", scenario.stream_interval)
    _speculation(command)
    adapters.write(command)


def _graphs_and_tiers(command: Writing) -> None:
    graphs = command.scenario.cuda_graphs
    command.carries("cuda_graphs")
    if graphs is not None:
        command.flag("--enforce-eager", graphs.eager)
        if graphs.decode_only:
            command.flag("--compilation-config", json.dumps({"cudagraph_mode": "FULL_DECODE_ONLY"}))
        command.flag("--max-cudagraph-capture-size", graphs.largest)
        command.several("--cudagraph-capture-sizes", graphs.sizes)
    _connector(command, host_tiers_to_write(command))
    experts = command.scenario.experts
    if experts is None:
        return
    command.carries("experts.placement", "experts.redundant", "experts.exchange", "experts.backend")
    command.flag("--moe-backend", experts.backend)
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


def _connector(command: Writing, tier: Tier | None) -> None:
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


def _speculation(command: Writing) -> None:
    decoding = command.scenario.decoding
    k = decoding.num_speculative_tokens
    if decoding.method == "autoregressive" or not isinstance(k, int):
        return
    config: dict[str, Any] = {"method": decoding.method, "num_speculative_tokens": k}
    command.carries("decoding.method", "decoding.num_speculative_tokens")
    draft = decoding.draft
    if draft is not None and draft.model is not None:
        config["model"] = to_load(draft.model)
        command.carries("decoding.draft.model")
        if draft.tensor is not None:
            config["draft_tensor_parallel_size"] = draft.tensor
            command.carries("decoding.draft.tensor")
    elif decoding.method in ("eagle", "medusa"):
        command.not_carried("the heads that draft: add their checkpoint as model to --speculative-config")
    rates = forced_rates(command)
    if rates is not None:
        config |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": list(rates)}
    command.flag("--speculative-config", json.dumps(config))
