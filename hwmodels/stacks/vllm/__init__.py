"""vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hwmodels.stacks.description import (
    GIB,
    Check,
    Circumstances,
    EngineDefaults,
    ExpertBackends,
    Graphs,
    Handover,
    Kernels,
    Published,
    RefusedSettingError,
    Scheduler,
    Stack,
)

if TYPE_CHECKING:
    from hwmodels.device import Device


def _limits(device: Device, memory_bytes: float, *, offline: bool, tensor: int) -> EngineDefaults:
    """Offline: the class `LLM`."""
    if device.name.startswith("tpu-"):
        # Named by generation there; others than these have SchedulerConfig's own default.
        by_generation = {"tpu-v6e": (1024, 2048), "tpu-v5e": (512, 1024), "tpu-v5p": (256, 512)}
        (server, program), sequences = by_generation.get(device.name, (2048, 8192)), 256
    elif memory_bytes >= 160 * GIB:
        server, program, sequences = 16384, 16384, 1024
    elif memory_bytes >= 70 * GIB and "a100" not in device.name:
        server, program, sequences = 8192, 16384, 1024
    else:
        server, program, sequences = 2048, 8192, 256
    return EngineDefaults(
        max_num_seqs=sequences,
        max_num_batched_tokens=program if offline else server,
        graph_sequences=min(2 * sequences, 1024 if device.name in ("b200", "gb200") else 512),
        source="vLLM 0.32.0, engine/arg_utils.py get_batch_defaults",
    )


def _choices(settings: Mapping[str, Any], around: Circumstances) -> dict[str, Any]:
    if around.decoding != "autoregressive" and not around.draft_has_kv:
        synchronous = f"vLLM does not schedule asynchronously with {around.decoding}"
    else:
        synchronous = around.no_overlap
    found: dict[str, Any] = {}
    if synchronous is not None:
        if settings.get("async_scheduling"):
            raise RefusedSettingError("async_scheduling", synchronous)
        found["async_scheduling"] = False
    return found | _limits_left_out(settings, around)


def _limits_left_out(settings: Mapping[str, Any], around: Circumstances) -> dict[str, int]:
    """The limits that are left out of *settings*: `EngineArgs._set_default_max_num_seqs_and_batched_tokens_args`, 0.32.0."""
    found = {}
    sequences = settings.get("max_num_seqs", around.limits.max_num_seqs)
    tokens = settings.get("max_num_batched_tokens", around.limits.max_num_batched_tokens)
    if "max_num_batched_tokens" not in settings:
        longest = around.max_positions
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


def _published(told: Mapping[str, Any], around: Circumstances, clients: int) -> dict[str, Any]:
    # The budget of releases before 0.20; 0.32.0 has 16384 tokens on devices of 160 GiB and more.
    tokens, sequences = told["token_budget"] or 8192, told["max_sequences"]
    found = {"max_num_batched_tokens": max(tokens, sequences or 0), "async_scheduling": told["asynchronous"]}
    return found if sequences is None else found | {"max_num_seqs": sequences}


_MXFP4 = (
    "flashinfer_trtllm_bf16",
    "flashinfer_trtllm_mxfp8",
    "aiter",
    "triton",
    "flashinfer_cutlass",
    "cutlass",
    "marlin",
)
_FP8 = "aiter", "flashinfer_trtllm", "flashinfer_cutlass", "deep_gemm", "cutlass", "triton", "marlin", "humming"
_BF16 = "flashinfer_trtllm", "flashinfer_cutlass", "triton"
_NVFP4 = "flashinfer_trtllm", "cutedsl", "flashinfer_cutlass", "cutlass", "marlin", "humming", "emulation"
# What the tables of 0.24 time on Blackwell: TensorRT-LLM's kernels, and CUTLASS for layers that these do not take (`-refused`).
_EXPERTS = ExpertBackends(
    generations={
        "sm90": ("h100-sxm", "h100-pcie", "h100-nvl", "h200", "h20"),
        "sm100": ("b200", "b300", "gb200", "gb300"),
    },
    order={
        "bf16": {"sm90": ("triton", "flashinfer_trtllm", "flashinfer_cutlass"), "": _BF16},
        "fp8": {"": _FP8},
        "fp8_static": {"": _FP8},
        "fp8_block": {"sm90": ("triton", "flashinfer_cutlass", "deep_gemm", "cutlass", "marlin", "humming"), "": _FP8},
        "nvfp4": {"": _NVFP4},
        "mxfp4": {"": _MXFP4},
        "int4": {"": ("marlin",)},
    },
    timed={
        ("sm100", "nvfp4"): {"flashinfer_trtllm": "nvfp4", "flashinfer_cutlass": "nvfp4-refused"},
        ("sm100", "mxfp4"): {"flashinfer_trtllm_bf16": "mxfp4", "flashinfer_trtllm_mxfp8": "mxfp4_mxfp8"},
        ("sm100", "fp8_block"): {"flashinfer_trtllm": "fp8_block"},
        ("sm90", "bf16"): {"triton": "bf16"},
        ("sm90", "fp8_block"): {"triton": "fp8_block", "flashinfer_cutlass": "fp8_block"},
        ("sm90", "mxfp4"): {"triton": "mxfp4", "marlin": "mxfp4-other"},
        **{(generation, "int4"): {"marlin": "int4"} for generation in ("sm90", "sm100")},
    },
    source="vLLM 0.32.0 and 0.33.0, model_executor/layers/fused_moe/oracle/{unquantized,fp8,nvfp4,mxfp4}.py",
)


STACK = Stack(
    name="vllm",
    title="vLLM",
    place=0,
    release="0.32.0",
    scheduler="vllm",
    schedulers={
        "vllm": Scheduler(
            policy="policies.vllm:Vllm",
            known_from="release 0.32.0, and 0.24, 0.28 and 0.33 by `release`: `v1/core/sched/scheduler.py`, "
            "`v1/core/kv_cache_manager.py`",
            compared_with="each release's own scheduler, step for step",
        ),
        "vllm_installed": Scheduler(
            policy="policies.installed:VllmInstalled",
            known_from="the release that is installed: its class decides, 0.24.0 to 0.33.0 tried",
            compared_with="`vllm` by the rules of the release, step for step",
            chosen_for=True,
        ),
        "vllm-v0": Scheduler(
            policy="policies.vllm:VllmV0",
            known_from="`core/scheduler.py` of releases to 0.10, without chunked prefill; SOSP 2023, 4.5",
            compared_with="literal tests",
        ),
    },
    renamed={"vllm-v1": "vllm", "vllm_v0": "vllm-v0"},
    choices=_choices,
    limits=_limits,
    pages_by_group=True,
    needs_longest=True,
    prefix_cache="blocks",
    eviction="least recently used, of a sequence its last blocks first",
    graphs=Graphs(
        sizes=lambda largest: (1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)),
        of_sequences=False,
        source="0.32.0, `config/vllm.py _set_cudagraph_sizes`",
    ),
    shares_context=True,
    compiled_go_first=True,
    rank_router="vllm_ranks",
    routers={"vllm_ranks": "policies.routers:VllmRanks"},
    handover=Handover(
        first_token="decode",
        room="after_prefill",
        headroom_tokens=0,
        repack=False,
        source="vLLM 0.32.0, NixlConnector (pull): the prefill request asks for one token, which the proxy drops; the decode "
        "engine allocates, reads, and computes the last prompt token again (`_update_waiting_for_remote_kv` of its scheduler); "
        "ranks of unequal tensor parallelism read their slices of the heads in place (nixl/tp_mapping.py)",
    ),
    connector="mooncake_vllm",
    kernels=Kernels(
        # Up to 0.4 ms of the host are in the times of Kimi delta attention's convolution of prompts, 0.8 on H200.
        timed_by_launches=("causal_conv1d_fn_qkv3",),
        # One CUTLASS kernel is compiled for each range of rows for FP8 on Hopper (sm90). On workstation parts kernels with few rows
        # exist in FP8, and one tile serves FP4.
        gemm={"fp8": "unsplit", "fp8_block": "unsplit", "nvfp4": "unsplit"},
        gemm_on={("fp8", "rtx-pro-6000"): "narrow", ("nvfp4", "rtx-pro-6000"): "one"},
        # 55 to 360 us each, and only rows of 1 ms or more are kept: the kernels that it calls (DeepGEMM) are known from SGLang's
        # table.
        gemm_timed_as={"fp8_block": ("sglang", "trtllm")},
        # The pass is 0.4 us shorter with a static scale than with one a token at small sizes (computescale_*): priced alike.
        passes_with_scales=(),
        # csrc/quantization/w8a8/fp8/common.cu: a block a token, `static_scaled_fp8_quant` and `dynamic_per_token_scaled_fp8_quant`.
        quantises_by_row=True,
        weight_copies=6.0,
        # Its own kernel was measured inside its module alone: it decodes by FlashAttention or TensorRT-LLM's kernel.
        latent_alone=False,
        # Matrices stay in 16 bits whatever the checkpoint: 0.32.0, model_executor/layers/attention/mla_attention.py.
        head_products="16 bits",
        # Marlin of few rows in MXFP4 on Hopper: 37 us on all experts at tensor parallelism 32, 64 us on a sixteenth of them.
        maps_experts=True,
        refused_experts={"nvfp4": ((6144, 4, 128),)},
        expert_backends=_EXPERTS,
    ),
    # The account of 0.19 stands for those of 0.11 to 0.20.
    published=Published(settings=_published, overlap_since=(0, 14), memory_release="0.19"),
    checks=(
        Check(
            what="scheduler",
            release="0.32.0",
            against="the release's own, step for step: 2,000 workloads, 240 with rare limits (`tests/oracle/test_vllm.py`)",
            on="2026-11-21",
        ),
        Check(
            what="scheduler and prefix cache by `release`",
            release="0.24.0, 0.28.0, 0.32.0, 0.33.0",
            against="each release's own class in the event loop, step for step, drafters that read the target's states among them: "
            "500 workloads of 0.28 and 0.33, 250 of 0.24 and 0.32 (`python -m benchmarks.engines_diff`)",
            on="2026-11-23",
        ),
        Check(
            what="prefix cache",
            release="0.32.0",
            against="the release's own, tokens found and blocks evicted in every step: 2,000 workloads",
            on="2026-11-21",
        ),
        Check(
            what="launch options",
            release="0.32.0",
            against="the release's own argument parser, of which the list was made",
            on="2026-11-22",
        ),
        Check(
            what="memory",
            release="0.11, 0.19, 0.32",
            against="published logs, all 22 whose flags are known within 3 % (`python -m benchmarks.kv_blocks`)",
            on="2026-11-21",
        ),
    ),
)
