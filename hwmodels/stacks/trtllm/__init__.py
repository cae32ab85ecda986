"""TensorRT-LLM, PyTorch backend. Its source was not at hand."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from hwmodels.stacks.description import (
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
    return EngineDefaults(
        max_num_seqs=2048,
        max_num_batched_tokens=8192,
        graph_sequences=2048,
        source="TensorRT-LLM's documentation, BuildConfig.max_batch_size and max_num_tokens; its source was not at hand",
    )


def _choices(settings: Mapping[str, Any], around: Circumstances) -> dict[str, Any]:
    # Its loop for pipelines has no overlap (py_executor.py, `_executor_loop_pp`).
    found = without_overlap(settings, around, "disable_overlap_scheduler")
    if around.has_windows:
        # Where a context may be longer than the smallest window (py_executor_creator.py, `chunk_unit_size`), and where windows
        # differ (capacityScheduler.cpp, `beneficialToSkip`).
        chosen = {"chunk_unit_size": 256, "enable_prefix_aware_scheduling": False}
        found |= {name: value for name, value in chosen.items() if name not in settings}
    return found


def _published(told: Mapping[str, Any], around: Circumstances, clients: int) -> dict[str, Any]:
    return {
        "max_batch_size": told["max_sequences"] or around.limits.max_num_seqs,
        "max_num_tokens": told["token_budget"] or around.limits.max_num_batched_tokens,
        "batch_wait_timeout_iters": told["wait_iterations"],
        "batch_wait_max_tokens_ratio": told["wait_tokens_share"],
        "disable_overlap_scheduler": not told["asynchronous"],
    }


def _sizes(largest: int) -> Iterable[int]:
    return (1, 2, 4, *range(8, 129, 8), *(1 << power for power in range(8, max(largest - 1, 1).bit_length())))


STACK = Stack(
    name="trtllm",
    title="TensorRT-LLM",
    place=1,
    release="1.2",
    vendors=("NVIDIA",),
    scheduler="trtllm",
    schedulers={
        "trtllm": Scheduler(
            policy="policies.trtllm:TrtLlm",
            known_from="files of releases 1.0 to 1.2 and of 2026, "
            "[rule by rule](validation/schedulers.md#tensorrt-llm-what-was-read-and-what-was-not)",
            compared_with="literal tests, the same rules written twice",
        )
    },
    choices=_choices,
    limits=_limits,
    prefix_cache="blocks",
    eviction="least recently used, as vLLM's",
    eviction_borrowed="KV blocks are found again and evicted by vLLM's rules; TensorRT-LLM evicts by priority, which changes what "
    "is found where memory is short.",
    graphs=Graphs(sizes=_sizes, of_sequences=True, source="`CudaGraphConfig` with `enable_padding`, as documented"),
    stream_by="iterations",
    rank_router="trtllm_ranks",
    routers={"trtllm_ranks": "policies.routers:TrtLlmRanks"},
    handover=Handover(
        first_token="arrival",
        room="after_prefill",
        headroom_tokens=0,
        repack=True,
        source="TensorRT-LLM as Dynamo 1.6.1 drives it (context_only, then generation_only with the context's result); that the "
        "context's token is emitted by the generation side, and that unequal layouts are copied through buffers, is from knowledge",
    ),
    kernels=Kernels(
        equal_scores_until=12288.0,
        # 118 us for 32,768 tokens on H100 with 32 value heads and with 64, where vLLM's kernel takes 123 for 2,048 channels, the
        # keys', and 479 and 719 for all of these two.
        convolved_keys_alone=True,
        gemm={"fp8_block": "unsplit", "nvfp4": "unsplit"},
        # On workstation parts kernels with few rows exist in FP8.
        gemm_on={("fp8_block", "l40s"): "narrow"},
        # Products were timed with a scale found for each tensor in passes of their own, 9 to 10 us at any size.
        passes_with_scales=("scale", "quantise"),
        weight_copies=math.inf,
        # Paged context kernels over an 8-bit cache take 8-bit queries alone (attentionOp.cpp), and so does its MHA back end
        # (trtllm_mha_backend.py).
        quantises_queries=True,
        attention="single heads apart",
        widest_group=32.0,
        one_token_is_decode=False,
        head_products="8 bits before FP4",
        # On Blackwell the NVFP4 table is of CUTLASS experts alone, and so is that of block-scaled FP8, by which two tokens of
        # DeepSeek's experts split over eight devices take 114 us a layer, more than its servers' whole step has for one. They
        # run the generated kernels of its TRTLLM back end, which FlashInfer hands to SGLang.
        experts_with_fp4="sglang",
    ),
    published=Published(
        settings=_published,
        # `attention_dp_config` with enable_balance, as InferenceX's launch scripts of DeepSeek write it (from knowledge, to be
        # checked there; the settings table has no column for it). Taken for all of its rows with data-parallel attention.
        prompt_balance={"timeout_iters": 60, "batching_wait_iters": 0},
        narrows_cache=True,
        seats_by_load=True,
        # `num_nextn_predict_layers` of InferenceX's scripts; from knowledge of them.
        drafted=3,
        drafted_on_ranks=1,
    ),
    checks=(
        Check(
            what="scheduler",
            release="1.0 to 1.2",
            against="the same rules written a second time, 4,000 random states; nothing of the engine itself",
            on="2026-11-21",
        ),
        Check(
            what="launch options",
            release="1.2",
            against="its documentation, which lists them; the package was not at hand",
            on="2026-11-22",
        ),
    ),
    left_out="Not modelled: the priorities by which blocks are evicted, parts of blocks that are found, beam search, LoRA "
    "adapters, encoders, and the setting `batch_wait_timeout_ms`. The account of memory has been compared with no log of a server.",
)
