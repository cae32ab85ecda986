"""Random workloads for ranks of SGLang in step, with its rules for the moments of prompts."""

from __future__ import annotations

import random
from typing import Any

from policies.sglang import Sglang
from tests.oracle.vllm_cases import STEP_NS
from tests.oracle.vllm_ranks_cases import a_ranks_case, ran_on_ranks

BURST_S = 100_000
"""Between two bursts all requests end."""


def an_sglang_ranks_case(seed: int) -> dict[str, Any]:
    """A workload and the settings of ranks; memory is ample, and nobody gives up.

    Requests come when all ranks are idle: here a rank without work hears of one at once, there with the step after the next.
    """
    rng = random.Random(seed + 31)
    case = a_ranks_case(seed)
    delays = rng.random() < 0.7
    tokens = case["kv_blocks"] * case["block_tokens"]
    by_queue = delays and rng.random() < 0.4
    settings = {
        "chunked_prefill_size": rng.choice([-1, 64, 128, 512]),
        "max_prefill_tokens": rng.choice([100, 1000, 16384]),
        "prefill_max_requests": rng.choice([None, None, 1, 2, 4]),
        "max_running_requests": min(rng.choice([2, 4, 8, 40]), tokens // 2),
        "schedule_policy": rng.choice(["fcfs", "lof"]),
        "prefill_decode_interval": rng.choice([0, 0, 1, 3, 10]),
        "prefill_decode_interval_min_bs": 0 if delays else rng.choice([0, 0, 1, 2, 4]),
        "enable_prefill_delayer": delays,
        "prefill_delayer_max_delay_passes": rng.choice([1, 2, 3, 7, 30]),
        "prefill_delayer_token_usage_low_watermark": rng.choice([None, None, 0.01, 0.1]) if delays else None,
        "prefill_delayer_queue_min_ratio": rng.choice([0.3, 0.6, 1.0]) if by_queue else None,
        "prefill_delayer_max_delay_ms": rng.choice([None, 2000.0, 10_000.0]) if by_queue else None,
    }
    last = rng.choice([1, 1, 2])
    requests = [
        {**request, "arrival": BURST_S * (i * last // len(case["requests"]))}
        for i, request in enumerate(case["requests"])
    ]
    return {**case, "requests": requests, "max_model_len": 1 << 20, "async_scheduling": True, "settings": settings}


def our_ranks(case: dict[str, Any], *, fast_forward: bool = True) -> list[Any]:
    """[second, prompt tokens and decodes of each rank that computes] of every step, as `in_ranks` has those of the release."""
    scheduler = Sglang(**case["settings"], disable_radix_cache=True)
    columns = ran_on_ranks(case, scheduler, fast_forward=fast_forward, check_invariants=not fast_forward)
    steps: dict[int, dict[int, list[int]]] = {}
    rows = columns.iterations()
    names = ("start_ns", "replica", "prefill_tokens", "decode_tokens")
    for start_ns, rank, prompts, decodes in zip(*(rows[name].tolist() for name in names), strict=True):
        steps.setdefault(start_ns // STEP_NS, {})[rank] = [prompts, decodes]
    return [[second, found] for second, found in sorted(steps.items())]


def in_ranks(steps: list[Any]) -> list[Any]:
    """Steps of the release in the words of `our_ranks`."""
    return [
        [second, {rank: [prompts, decodes] for rank, (prompts, decodes) in enumerate(ran) if prompts or decodes}]
        for second, ran in steps
    ]
