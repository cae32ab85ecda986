"""`trtllm-serve` and the YAML file beside it, written for a scenario: the counterpart of `reader`."""

from __future__ import annotations

from typing import Any

from sim.launch.forced import forced_rates, mean_length
from sim.launch.tiers import GIB, host_tiers_to_write
from sim.launch.writing import Writing, model_name, to_load


def write(command: Writing) -> None:
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
    file = _file(command)
    if file:
        name = f"config-{command.name}.yaml" if command.name else "config.yaml"
        command.flag("--config", name)
        command.file(name, file)


def _file(command: Writing) -> dict[str, Any]:
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
        **{key: command.scheduler(key) for key in ("use_kv_cache_manager_v2", "max_util_for_resume")},
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
        if graphs.decode_only:
            command.not_carried("cuda_graphs.decode_only: true; TensorRT-LLM is not told so")
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
            found["speculative_config"]["speculative_model_dir"] = to_load(decoding.draft.model)
            command.carries("decoding.draft.model")
        rates = forced_rates(command)
        if rates is not None:
            command.not_carried(
                f"forced acceptance: {mean_length(rates) - 1:g} accepted drafts a step are yours to force, one less than tokens"
            )
    return found
