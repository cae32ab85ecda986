"""`vllm serve`: its options as settings (release 0.32.0, vllm/engine/arg_utils.py and vllm/entrypoints/launchers/cli_args.py)."""

from __future__ import annotations

import json
from typing import Any

from hwmodels.overheads import at_or_before
from policies.vllm import Vllm
from policies.vllm_settings import RELEASES
from sim.errors import RooftraceError
from sim.launch.drafters import assumed
from sim.launch.encoders import put_encode, refuse_encoder
from sim.launch.engines.vllm import adapters
from sim.launch.engines.vllm.tiers import tiers
from sim.launch.forced import put_mean_length, put_rates
from sim.launch.reading import Reading, formats

_SAME_INTEGERS = (
    "max-num-seqs",
    "max-num-batched-tokens",
    "max-num-active-seqs",
    "max-num-scheduled-tokens",
    "long-prefill-token-threshold",
    "prefill-schedule-interval",
)
_SAME_SWITCHES = (
    "enable-chunked-prefill",
    "async-scheduling",
    "scheduler-reserve-full-isl",
    "long-prefill-token-threshold-adaptive",
)


def settings(reading: Reading, *, experts: bool) -> None:
    """Put what the command says; *experts*: the model is a mixture of experts, whose data parallelism shares them."""
    reading.put("serving_stack", "vllm")
    reading.put("scheduler.policy", "vllm")
    formats(reading)
    reading.put("parallel.tensor", reading.integer("tensor-parallel-size"))
    reading.put("parallel.pipeline", reading.integer("pipeline-parallel-size"))
    reading.put("parallel.decode_context", reading.integer("decode-context-parallel-size"))
    reading.put("parallel.prefill_context", reading.integer("prefill-context-parallel-size"))
    interleave = reading.integer("dcp-kv-cache-interleave-size")
    reading.put(
        "parallel.kv_interleave", reading.integer("cp-kv-cache-interleave-size") if interleave is None else interleave
    )
    _data_parallel(reading, experts)
    reading.put("memory.gpu_memory_utilization", reading.number("gpu-memory-utilization"))
    reading.put("memory.kv_blocks", reading.integer("num-gpu-blocks-override"))
    reading.put("memory.block_tokens", reading.integer("block-size"))
    reading.put("memory.prefix_caching", reading.switch("enable-prefix-caching"))
    reading.longest("max-model-len")
    tiers(reading)
    _graphs(reading)
    if reading.switch("enable-eplb"):
        _eplb(reading)
    exchange = reading.text("all2all-backend")
    if exchange is not None and experts and exchange in _EXCHANGES:
        reading.put("experts.exchange", exchange)
    elif exchange is not None:
        reading.give_back("all2all-backend", exchange)
    _expert_backend(reading, experts)
    for name in _SAME_INTEGERS:
        reading.put(f"scheduler.{name.replace('-', '_')}", reading.integer(name))
    for name in _SAME_SWITCHES:
        reading.put(f"scheduler.{name.replace('-', '_')}", reading.switch(name))
    reading.put("scheduler.watermark", reading.number("watermark"))
    reading.put("scheduler.scheduling_policy", reading.text("scheduling-policy"))
    _rules_of_release(reading)
    reading.put("stream_interval", reading.integer("stream-interval"))
    _speculation(reading)
    adapters.read(reading)
    refuse_encoder(reading, "mm-encoder-only")
    put_encode(reading)


_EXCHANGES = ("allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency")


def _rules_of_release(reading: Reading) -> None:
    """Put the release whose rules the scheduler has: the server's, or the nearest before it, or the oldest that is known; a later
    one where the command has settings that came with that."""
    if reading.release is None:
        return
    given = reading.settings.get("scheduler", {})
    known = tuple(RELEASES)
    nearest = at_or_before(reading.release, known[::-1])
    following = known[known.index(nearest) :]
    rules = next(each for each in following if not any(given.get(name) for name in RELEASES[each].lacks))
    if rules != Vllm().release:
        reading.put("scheduler.release", rules)
    if not f"{reading.release}.".startswith(f"{rules}."):
        reading.notes.append(f"rules of the scheduler are known of vllm {', '.join(known)}: those of {rules} are taken")


# Variables of releases before --moe-backend, each with what it chooses where it is set to 1.
_BACKENDS = {
    "VLLM_MXFP4_USE_MARLIN": "marlin",
    "VLLM_USE_FLASHINFER_MOE_MXFP4_BF16": "flashinfer_trtllm_bf16",
    "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8": "flashinfer_trtllm_mxfp8",
}


def _expert_backend(reading: Reading, experts: bool) -> None:
    chosen = reading.text("moe-backend")
    for variable, backend in _BACKENDS.items():
        if reading.variable(variable):
            chosen = chosen or backend
    if chosen is not None and chosen != "auto":
        if experts:
            reading.put("experts.backend", chosen)
        else:
            reading.give_back("moe-backend", chosen)


def _eplb(reading: Reading) -> None:
    reading.put("experts.placement", "eplb")
    config = reading.json("eplb-config")
    if config:
        reading.put("experts.redundant", config.pop("num_redundant_experts", None))
        if config:
            reading.give_back("eplb-config", json.dumps(config))


def _graphs(reading: Reading) -> None:
    config, mode = reading.object_or_word("compilation-config"), None
    if isinstance(config, dict) and config.get("cudagraph_mode") in ("NONE", "FULL_DECODE_ONLY"):
        mode = config.pop("cudagraph_mode")
    if config:
        reading.give_back("compilation-config", json.dumps(config) if isinstance(config, dict) else config)
    eager = reading.switch("enforce-eager")
    if mode == "FULL_DECODE_ONLY" and not eager:
        reading.put("cuda_graphs.decode_only", True)
    reading.put_graphs(
        eager=True if mode == "NONE" else eager,
        largest=reading.integer("max-cudagraph-capture-size"),
        sizes=reading.integers("cudagraph-capture-sizes"),
    )


def _data_parallel(reading: Reading, experts: bool) -> None:
    ranks = reading.integer("data-parallel-size")
    over_all = reading.switch("enable-expert-parallel")
    if ranks and ranks > 1:
        if experts:
            reading.put("parallel.data", ranks)
        else:
            reading.put("replicas", ranks)
            reading.put("router", "least_outstanding")
            reading.notes.append(
                f"--data-parallel-size {ranks} of a dense model is {ranks} replicas behind one router, which is how they work"
            )
    if over_all:
        parallel = reading.settings.get("parallel", {})
        tensor = parallel.get("tensor", 1) * parallel.get("prefill_context", 1)
        reading.put("parallel.expert", tensor * (ranks or 1) if experts else None)


def _speculation(reading: Reading) -> None:
    config: dict[str, Any] = reading.json("speculative-config") or {}
    for option, key in (("spec-method", "method"), ("spec-model", "model"), ("spec-tokens", "num_speculative_tokens")):
        value = reading.text(option)
        if value is not None:
            config[key] = value
    if not config:
        return
    method = str(config.pop("method", "draft_model" if "model" in config else ""))
    model = config.pop("model", None)
    known = {"ngram": "ngram", "draft_model": "draft_model", "medusa": "medusa", "eagle": "eagle", "eagle3": "eagle"}
    named = "mtp" if method.endswith("mtp") else known.get(method)
    if named is None:
        reading.give_back("speculative-config", json.dumps({"method": method, **config}))
        return
    reading.put("decoding.method", named)
    reading.put("decoding.num_speculative_tokens", _whole(config, "num_speculative_tokens"))
    if named == "draft_model" and model is not None:
        reading.put("decoding.draft.model", model)
        reading.put("decoding.draft.tensor", _whole(config, "draft_tensor_parallel_size"))
    if named in ("eagle", "mtp"):
        assumed(reading, generation=None if named == "mtp" else method, drafter=model)
    elif named != "draft_model" and model is not None:
        config["model"] = model
    _forced(reading, config)
    if config:
        reading.give_back("speculative-config", json.dumps(config))


def _forced(reading: Reading, config: dict[str, Any]) -> None:
    """Acceptance that the command forces (config/speculative.py of release 0.32.0), taken out of *config*."""
    if config.get("rejection_sample_method") != "synthetic":
        return
    del config["rejection_sample_method"]
    rates, length = config.pop("synthetic_acceptance_rates", None), config.pop("synthetic_acceptance_length", None)
    try:
        if rates is not None:
            put_rates(reading, [float(rate) for rate in rates])
        elif length is not None:
            put_mean_length(reading, float(length), reading.settings["decoding"].get("num_speculative_tokens"))
    except (TypeError, ValueError):
        raise RooftraceError(
            f"--speculative-config: forced acceptance is in numbers; got {rates if rates is not None else length!r}"
        ) from None


def _whole(config: dict[str, Any], key: str) -> int | None:
    """The whole number at *key*, which is taken out; None where there is none."""
    value = config.pop(key, None)
    try:
        return None if value is None else int(value)
    except (TypeError, ValueError):
        raise RooftraceError(f"--speculative-config: {key} takes a whole number; got {value!r}") from None
