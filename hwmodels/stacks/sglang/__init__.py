"""SGLang."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hwmodels.stacks.description import (
    GIB,
    Check,
    Circumstances,
    EngineDefaults,
    Graphs,
    Handover,
    Kernels,
    Published,
    Scheduler,
    Stack,
    without_overlap,
)

if TYPE_CHECKING:
    from hwmodels.device import Device


def _limits(device: Device, memory_bytes: float, *, offline: bool, tensor: int) -> EngineDefaults:
    """Sequences are limited by the cache, to 2,048 to 4,096."""
    large = tensor >= 4
    # (below GiB, tokens of a prefill chunk, sequences of the largest graph)
    steps = (
        (20, 2048, 8),
        (35, 4096, 160 if large else 48),
        (60, 4096, 160 if large else 32),
        (160, 8192, 512 if large else 256),
        (math.inf, 16384, 512),
    )
    tokens, largest = next((tokens, largest) for below, tokens, largest in steps if memory_bytes < below * GIB)
    return EngineDefaults(
        max_num_seqs=4096,
        max_num_batched_tokens=tokens,
        graph_sequences=largest,
        source="SGLang 0.5.23, srt/arg_groups/memory_hook.py, srt/mem_cache/kv_cache_configurator.py resolve_max_num_reqs",
    )


def _memory_share(memory_bytes: float, limits: EngineDefaults, devices: int) -> float:
    """`mem_fraction_static` where none is given: what the estimate of activations and graphs leaves.

    In MiB: 512, 1.5 for each token of a prefill chunk, 1,024 for eight devices, 2 for each sequence of the largest decode
    graph and 8 for each captured prefill size; 10,240 at least above 60 GiB. SGLang 0.5.23,
    srt/arg_groups/memory_hook.py `handle_gpu_memory_settings` and `reserve_for_graph_mb`.
    """
    capacity, chunk = memory_bytes / 2**20, limits.max_num_batched_tokens
    reserved = (
        512 + 1.5 * max(chunk, 2048) + devices / 8 * 1024 + 2 * limits.graph_sequences + 8 * _prefill_sizes(chunk)
    )
    if capacity > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    return round((capacity - reserved) / capacity, 3)


def _prefill_sizes(largest: int) -> int:
    """The number of sizes of prefill that are captured: srt/arg_groups/cuda_graph_hook.py, 0.5.23."""
    steps = ((4, 33, 4), (48, 257, 16), (288, 513, 32), (576, 1025, 64), (1280, 4097, 256), (4608, largest + 1, 512))
    return sum(size <= largest for first, stop, step in steps for size in range(first, stop, step))


def _choices(settings: Mapping[str, Any], around: Circumstances) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "chunked_prefill_size" not in settings:
        # arg_groups/parallel_hook.py of SGLang 0.5.23: ranks share it.
        found["chunked_prefill_size"] = max(around.limits.max_num_batched_tokens // around.data, 1)
    # arg_groups/overrides.py of SGLang 0.5.23, _pipeline_parallel_overlap_disable.
    return found | without_overlap(settings, around, "disable_overlap_schedule")


def _published(told: Mapping[str, Any], around: Circumstances, clients: int) -> dict[str, Any]:
    """Ranks share limits: srt/arg_groups/parallel_hook.py (chunks), srt/model_executor/pool_configurator.py (requests), 0.5.23."""
    limits = (told["token_budget"] or around.limits.max_num_batched_tokens, told["max_sequences"])
    chunk, requests = (None if limit is None else max(limit // around.data, 1) for limit in limits)
    if told["mixed_chunk"] and chunk is not None:
        requests = requests or min(clients, chunk - 1)
    return {
        "chunked_prefill_size": chunk,
        "max_prefill_tokens": told["max_prefill_tokens"] or 16384,
        "prefill_max_requests": told["prompts_per_iteration"],
        "max_running_requests": requests,
        "enable_mixed_chunk": told["mixed_chunk"],
        "scheduler_recv_interval": told["receive_interval"],
        "ignore_eos": True,
        "disable_radix_cache": not told["prefix_cache"],
    }


STACK = Stack(
    name="sglang",
    title="SGLang",
    place=2,
    release="0.5.23",
    scheduler="sglang",
    schedulers={
        "sglang": Scheduler(
            policy="policies.sglang:Sglang",
            known_from="release 0.5.23: `srt/managers/schedule_policy.py`, `scheduler.py`, `schedule_batch.py`",
            compared_with="the release's own classes",
        ),
        "sglang_installed": Scheduler(
            policy="policies.installed:SglangInstalled",
            known_from="the release that is installed: its class decides, 0.5.20 and 0.5.23 tried",
            compared_with="`sglang`, step for step, where the release is 0.5.23",
            chosen_for=True,
        ),
    },
    choices=_choices,
    limits=_limits,
    memory_share=_memory_share,
    prefix_cache="tree",
    eviction="leaves of the radix tree, least recently used first",
    graphs=Graphs(
        sizes=lambda largest: (
            *(1, 2, 4, 8, 12),
            *range(16, 257, 8),
            *range(272, 512, 16),
            *range(512, largest + 1, 32),
        ),
        of_sequences=True,
        source="0.5.23, `srt/arg_groups/cuda_graph_hook.py generate_decode_cuda_graph_batch_sizes`",
    ),
    handover=Handover(
        first_token="arrival",
        room="before_prefill",
        headroom_tokens=512,
        repack=True,
        source="SGLang 0.5.23: the decode server allocates before prefill begins and keeps num_reserved_decode_tokens (512) for "
        "each request; the first token comes with the KV and is emitted by the decode server (srt/disaggregation/decode.py)",
    ),
    connector="mooncake_sglang",
    kernels=Kernels(
        # One CUTLASS kernel is compiled for each range of rows for FP8 on Hopper (sm90).
        gemm={"fp8": "unsplit", "fp8_block": "unsplit", "nvfp4": "unsplit"},
        weight_copies=6.0,
        # The FlashAttention 3 back end casts queries for an 8-bit cache (flashattention_backend.py).
        quantises_queries=True,
        attention="triton behind",
        one_token_is_decode=False,
        head_products="8 bits",
        # The FlashAttention 3 back end was timed over the latent; that on Blackwell expands keys and values.
        latent_absorbed_on=("h100", "h200"),
        # 0.5.8, srt/layers/dp_attention.py: prompts have DpPaddingMode.SUM_LEN, which gathers rows by an all-reduce, and only
        # MAX_LEN brings sums back by a reduce-scatter (srt/layers/communicator.py).
        prompts_by_all_reduce=True,
        recurrent_from="vllm",
        equal_scores_until=131072.0,
        # The routing of these models is none of FlashInfer's, and Triton multiplies them.
        refused_experts={
            "bf16": (
                *((4096, 8, 256), (2816, 8, 128), (5120, 1, 16), (5120, 1, 128)),
                *((6144, 4, 128), (6144, 2, 8), (4096, 2, 8)),
            ),
            "fp8_block": ((4096, 8, 256), (4096, 6, 256), (7168, 6, 384), (4096, 2, 8), (6144, 2, 8)),
        },
    ),
    published=Published(
        settings=_published,
        generated=("max_prefill_tokens",),
        # Servers of 0.5.1 had the default, off.
        mixed_chunk_since=(0, 5, 6),
        # A prefill server takes the rank of a request's room (0.5.8, srt/managers/data_parallel_controller.py
        # follow_bootstrap_room_scheduler; load_balance_method "round_robin" means that there too), which Dynamo 0.8 draws
        # (dynamo/sglang/request_handlers).
        prefill_ranks="random",
        # `--speculative-num-steps 2 --speculative-num-draft-tokens 3` of InferenceX's scripts; from knowledge of them.
        drafted=2,
    ),
    checks=(
        Check(
            what="scheduler",
            release="0.5.23",
            against="the release's own, step for step: 1,800 workloads without overlap, 900 with (`tests/oracle/test_sglang.py`)",
            on="2026-11-21",
        ),
        Check(
            what="radix cache",
            release="0.5.23",
            against="the release's own, tokens found, evicted, free and kept in every step: 1,800 workloads",
            on="2026-11-22",
        ),
        Check(
            what="prompts of ranks",
            release="0.5.23",
            against="the release's own schedulers in step and its prefill delayer: 500 workloads of 2 to 4 ranks",
            on="2026-11-23",
        ),
        Check(
            what="launch options",
            release="0.5.23",
            against="the release's own argument parser, of which the list was made",
            on="2026-11-22",
        ),
    ),
    left_out="Speculation, priorities and clients that leave have not been compared. The account of memory has been compared with "
    "no log of a server.",
)
