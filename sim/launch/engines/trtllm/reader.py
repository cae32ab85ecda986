"""`trtllm-serve`: its options, and the YAML file beside it, as settings (release 1.2, tensorrt_llm/llmapi/llm_args.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sim.errors import RooftraceError
from sim.launch.arguments import yaml_file
from sim.launch.drafters import assumed
from sim.launch.encoders import by_hand
from sim.launch.reading import CACHES, Reading
from sim.launch.tiers import GIB, devices

_METHODS = {"NGram": "ngram", "MTP": "mtp", "Eagle": "eagle", "Eagle3": "eagle", "DraftTarget": "draft_model"}


def settings(reading: Reading, *, experts: bool) -> None:
    """Put what the command says; *experts*: the model is a mixture of experts."""
    reading.put("serving_stack", "trtllm")
    reading.put("scheduler.policy", "trtllm")
    file = reading.text("config")
    given = _File(file)
    tensor = reading.integer("tp-size") or given.integer("tensor_parallel_size") or 1
    shared = reading.switch("enable-attention-dp") or given.take("enable_attention_dp")
    if shared and tensor > 1:
        reading.put("parallel.data", tensor)
    elif tensor > 1:
        reading.put("parallel.tensor", tensor)
    reading.put("parallel.pipeline", reading.integer("pp-size") or given.integer("pipeline_parallel_size"))
    spread = reading.integer("ep-size") or given.integer("moe_expert_parallel_size")
    reading.put("parallel.expert", spread if experts and spread and spread > 1 else None)
    for name in ("max_batch_size", "max_num_tokens"):
        reading.put(f"scheduler.{name}", reading.integer(name.replace("_", "-")) or given.integer(name))
    reading.longest("max-seq-len")
    longest = given.integer("max_seq_len")
    if "max_model_len" not in reading.settings.get("memory", {}):
        reading.put("memory.max_model_len", longest)
    chunked = reading.switch("enable-chunked-prefill")
    reading.put(
        "scheduler.enable_chunked_prefill", given.take("enable_chunked_prefill") if chunked is None else chunked
    )
    _scheduling(reading, given)
    share = reading.number("free-gpu-memory-fraction")
    within = given.take("kv_cache_config.free_gpu_memory_fraction")
    reading.put("memory.free_gpu_memory_fraction", within if share is None else share)
    reading.put("memory.block_tokens", given.integer("kv_cache_config.tokens_per_block"))
    reading.put("memory.prefix_caching", given.take("kv_cache_config.enable_block_reuse"))
    host = given.integer("kv_cache_config.host_cache_size")
    if host:
        # Of each rank; blocks go there when the device gives them up.
        reading.put("memory.tiers", [{"kind": "host", "gib": host * devices(reading) / GIB, "write": "eviction"}])
    role = {"context": "prefill", "generation": "decode"}.get((reading.text("server-role") or "").lower())
    if role is not None:
        reading.took_role(role, "--server_role")
        given.take("cache_transceiver_config.backend")
    cache = reading.text("kv-cache-dtype") or given.take("kv_cache_config.dtype")
    if cache is not None:
        if cache in CACHES:
            reading.put("kv_precision", CACHES[cache])
        else:
            reading.give_back("kv-cache-dtype", cache)
    reading.put("stream_interval", reading.integer("stream-interval") or given.integer("stream_interval"))
    _speculation(reading, given)
    if reading.encoders:
        reading.notes.append(
            f"the model has an encoder of {' and of '.join(reading.encoders)}, and encoding in steps of TensorRT-LLM is not "
            f"modelled; for machines that only encode, {by_hand()}"
        )
    reading.notes.extend(f"{file}: {key} is not modelled" for key in given.left())


def _scheduling(reading: Reading, given: _File) -> None:
    """Read the settings of scheduling and of CUDA graphs."""
    reading.put("scheduler.disable_overlap_scheduler", given.take("disable_overlap_scheduler"))
    reading.put("scheduler.batch_wait_timeout_iters", given.take("batch_wait_timeout_iters"))
    reading.put("scheduler.batch_wait_max_tokens_ratio", given.take("batch_wait_max_tokens_ratio"))
    reading.put("scheduler.capacity_scheduler_policy", given.take("scheduler_config.capacity_scheduler_policy"))
    reading.put("scheduler.context_chunking_policy", given.take("scheduler_config.context_chunking_policy"))
    for key in ("use_kv_cache_manager_v2", "max_util_for_resume"):
        value = given.take(f"kv_cache_config.{key}")
        if value == "auto":
            reading.notes.append(
                f"kv_cache_config.{key} auto is left to the server, which decides by the model: it is read as false"
            )
        else:
            reading.put(f"scheduler.{key}", value)
    reading.put_graphs(
        eager=given.says_none("cuda_graph_config") or None,
        largest=given.integer("cuda_graph_config.max_batch_size"),
        sizes=given.take("cuda_graph_config.batch_sizes"),
    )


def _speculation(reading: Reading, given: _File) -> None:
    kind = given.take("speculative_config.decoding_type")
    if kind is None:
        return
    method = _METHODS.get(str(kind))
    if method is None:
        reading.notes.append(f"speculative_config.decoding_type {kind} is not modelled")
        return
    reading.put("decoding.method", method)
    names = ("max_draft_len", "num_nextn_predict_layers")
    drafted = next((n for name in names if (n := given.integer(f"speculative_config.{name}")) is not None), None)
    reading.put("decoding.num_speculative_tokens", drafted)
    if method in ("eagle", "mtp"):
        drafter = given.take("speculative_config.speculative_model_dir")
        assumed(reading, generation=None if method == "mtp" else str(kind).lower(), drafter=drafter)
    if method == "draft_model":
        reading.put("decoding.draft.model", given.take("speculative_config.speculative_model_dir"))


class _File:
    """The YAML file of --config, its keys taken one by one by their dotted names."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._values: dict[str, Any] = {}
        if path is None:
            return
        found = yaml_file(path, "--config")
        if not isinstance(found, Mapping):
            raise RooftraceError(f"--config {path} holds no settings: keys with values are expected")
        self._flatten(found, "")

    def _flatten(self, values: Mapping[Any, Any], prefix: str) -> None:
        for key, value in values.items():
            if isinstance(value, Mapping):
                self._flatten(value, f"{prefix}{key}.")
            else:
                self._values[f"{prefix}{key}"] = value

    def take(self, key: str) -> Any:
        return self._values.pop(key, None)

    def says_none(self, key: str) -> bool:
        """Whether *key* is given as null."""
        return self._values.pop(key, 0) is None

    def integer(self, key: str) -> int | None:
        value = self._values.pop(key, None)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise RooftraceError(f"{self._path}: {key} takes a whole number; got {value!r}")
        return value

    def left(self) -> list[str]:
        return sorted(self._values)
