"""`python -m sglang.launch_server`, written for a scenario: the counterpart of `reader`."""

from __future__ import annotations

from sim.launch.engines.sglang import adapters
from sim.launch.engines.sglang.reader import FORCED_LENGTH, POLICIES
from sim.launch.forced import forced_rates, mean_length
from sim.launch.tiers import GIB, LRU, host_tiers_to_write
from sim.launch.writing import Writing, formats, model_name, to_load
from sim.scenario.tiers import Tier


def write(command: Writing) -> None:
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
    formats(command, {"fp8": "fp8_e4m3"})
    command.flag("--mem-fraction-static", command.memory("mem_fraction_static"))
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
    if eviction is not None and eviction["policy"] not in POLICIES:
        command.not_carried(f"memory.eviction: {eviction['policy']}; SGLang has {', '.join(POLICIES)}")
        eviction = None
    command.flag("--radix-eviction-policy", None if eviction is None else eviction["policy"])
    _tier(command, host_tiers_to_write(command, write=None, evicts_by=eviction or LRU))
    graphs = scenario.cuda_graphs
    if graphs is not None:
        if graphs.decode_only:
            command.not_carried("cuda_graphs.decode_only: true; SGLang is not told so")
        command.flag("--disable-cuda-graph", graphs.eager)
        command.flag("--cuda-graph-max-bs-decode", graphs.largest)
        command.several("--cuda-graph-bs-decode", graphs.sizes)
    for key in (
        *("chunked_prefill_size", "max_prefill_tokens", "prefill_max_requests", "max_running_requests"),
        *("schedule_policy", "schedule_conservativeness", "scheduler_recv_interval", "enable_mixed_chunk"),
        *(
            "disable_overlap_schedule",
            "prefill_decode_interval",
            "prefill_decode_interval_min_bs",
            "enable_prefill_delayer",
        ),
        *(
            f"prefill_delayer_{name}"
            for name in ("max_delay_passes", "token_usage_low_watermark", "queue_min_ratio", "max_delay_ms")
        ),
    ):
        command.flag(f"--{key.replace('_', '-')}", command.scheduler(key))
    if scenario.stream_interval > 1:
        command.flag("--stream-interval", scenario.stream_interval)
    _speculation(command)
    adapters.write(command)


def _speculation(command: Writing) -> None:
    decoding = command.scenario.decoding
    algorithm = {"ngram": "NGRAM", "eagle": "EAGLE", "mtp": "NEXTN", "draft_model": "STANDALONE"}.get(decoding.method)
    if algorithm is not None and isinstance(decoding.num_speculative_tokens, int):
        command.carries("decoding.method", "decoding.num_speculative_tokens", "decoding.draft.model")
        command.flag("--speculative-algorithm", algorithm)
        command.flag("--speculative-num-steps", decoding.num_speculative_tokens)
        command.flag("--speculative-eagle-topk", 1)
        command.flag("--speculative-num-draft-tokens", decoding.num_speculative_tokens + 1)
        if decoding.draft is not None and decoding.draft.model is not None:
            command.flag("--speculative-draft-model-path", to_load(decoding.draft.model))
        rates = forced_rates(command)
        if rates is not None:
            # Its method match-expected, the default, draws the whole numbers around this mean.
            command.variables.append(f"{FORCED_LENGTH}={mean_length(rates):g}")
            command.not_carried(
                f"decoding.acceptance by position ({', '.join(f'{rate:g}' for rate in rates)}): SGLang forces a mean length, of "
                "which every step has the whole number below or above"
            )


def _tier(command: Writing, tier: Tier | None) -> None:
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
