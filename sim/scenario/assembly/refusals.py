"""Schedulers that could plan nothing for some sequence, and are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from policies.sglang import Sglang
from policies.trtllm import TrtLlm
from policies.vllm import Vllm
from sim.scenario import named
from sim.scenario.assembly.decoding import BuiltDecoding

if TYPE_CHECKING:
    from workloads import Workload


def never_gets_on(
    scheduler: Any,
    block_tokens: int,
    decoding: BuiltDecoding | None,
    slots: Mapping[str, int],
    workload: Workload,
) -> str | None:
    """Why *scheduler*, or one that it wraps, could plan nothing for some sequence, whatever else runs; None where it can."""
    query = 1 if decoding is None else decoding.decoding.max_query_tokens
    of_drafting = query + slots.get("draft_slots", 0)
    for each in named.layers(scheduler):
        why = None
        if isinstance(each, Sglang) and 0 < each.chunked_prefill_size < block_tokens:
            why = (
                f"scheduler: chunked_prefill_size ({each.chunked_prefill_size}) holds no whole page of {block_tokens} tokens, "
                "and a prompt that is cut is cut to whole pages; give more, or less as memory.block_tokens"
            )
        elif isinstance(each, TrtLlm) and each.max_num_tokens < query:
            why = (
                f"scheduler: max_num_tokens ({each.max_num_tokens}) holds no round of speculation, {query} tokens of a "
                "sequence; give more, or draft fewer"
            )
        elif isinstance(each, Vllm):
            longest = int((workload.prompt_tokens + workload.output_tokens).max(initial=0))
            why = _stuck_vllm(each, longest, query, of_drafting)
        if why is not None:
            return why
    return None


def _stuck_vllm(scheduler: Vllm, longest: int, query: int, of_drafting: int) -> str | None:
    scheduled = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
    if not scheduler.enable_chunked_prefill and longest > scheduled:
        # Release 0.32.0 asks for a budget of its longest context then, `SchedulerConfig.verify_max_model_len`.
        return (
            f"scheduler: without enable_chunked_prefill an iteration holds all tokens of a request, {longest} in this "
            f"workload, and max_num_batched_tokens is {scheduled}; give more, or leave enable_chunked_prefill on"
        )
    if scheduled < query or scheduler.max_num_batched_tokens < of_drafting:
        return (
            f"scheduler: max_num_batched_tokens ({min(scheduled, scheduler.max_num_batched_tokens)}) holds no round of "
            f"speculation, {of_drafting} tokens of a sequence; vLLM verifies a part of one, which is not modelled: give "
            "more, or draft fewer"
        )
    return None
