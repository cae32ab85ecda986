"""Whether and how KV blocks are found again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from sim.errors import ScenarioError
from sim.scenario import named
from sim.scenario.settings import Scenario

if TYPE_CHECKING:
    from sim.engine.experiment import PrefixCacheKind
    from workloads import ClosedLoop, Trace

_READS_THE_TARGET = ("eagle", "mtp")
"""Methods whose drafter reads the target's states: what is found of a prompt lacks its last block, which is computed again
(`SpeculativeConfig.use_eagle_block_drop` of vLLM 0.32.0)."""

_CACHES: dict[str, PrefixCacheKind] = {"vllm": "blocks", "sglang": "tree", "trtllm": "blocks"}
"""Serving stacks that find KV blocks again unless they are told not to, and how. TensorRT-LLM's order of eviction is not modelled,
which a note says: vLLM's rules stand in for it."""

_EVICTS = {"sglang": "SGLang evicts leaves of its tree", "trtllm": "TensorRT-LLM evicts by priority"}


def cache_of(scenario: Scenario, workload: Trace | ClosedLoop, block_tokens: int) -> dict[str, Any]:
    """The prefix cache of a `ReplicaSpec`; ScenarioError where ids and KV blocks have sizes of which neither divides the other, and
    where the scheduler is told to have no cache and the memory to have one."""
    kind = _kind(scenario)
    if scenario.memory.prefix_caching and _looks_nothing_up(scenario):
        raise ScenarioError(
            f"{scenario.source}: memory.prefix_caching is on and scheduler.disable_radix_cache is as well; leave one of them out"
        )
    tokens = getattr(workload, "prefix_block_tokens", None)
    if kind is not None and tokens is not None and tokens % block_tokens and block_tokens % tokens:
        raise ScenarioError(
            f"{scenario.source}: memory.block_tokens: the trace's ids stand for {tokens} tokens each and a KV block holds "
            f"{block_tokens}, and one has to divide the other for blocks to be found again; give another block_tokens, or "
            "memory.prefix_caching: false"
        )
    return {"prefix_cache": kind, "prefix_drops_last": scenario.decoding.method in _READS_THE_TARGET}


def caches(scenario: Scenario) -> bool:
    """Whether KV blocks are found again."""
    return _kind(scenario) is not None


def check_router(scenario: Scenario, router: object, workload: Trace | ClosedLoop) -> None:
    """ScenarioError where a router's index has blocks that the workload's ids cannot be told in."""
    from policies.routers import knowledge_of

    knows, tokens = knowledge_of(router), getattr(workload, "prefix_block_tokens", None)
    size = None if knows is None or knows.sent is None else knows.sent.block_tokens
    if size is not None and tokens is not None and tokens % size and size % tokens:
        raise ScenarioError(
            f"{scenario.source}: router.block_tokens: the trace's ids stand for {tokens} tokens each and a block of the router's "
            f"index for {size}, and one has to divide the other; give another block_tokens"
        )


def without_cache(scenario: Scenario) -> Iterator[str]:
    """A note for a trace that says which prompts share a beginning, where nobody asks, or another engine's rules answer."""
    stack = scenario.stack_name
    if _kind(scenario) == "blocks" and stack in _EVICTS:
        tiers = ", as in every run with memory.tiers" if _CACHES.get(stack) == "tree" and scenario.memory.tiers else ""
        yield (
            f"KV blocks are found again and evicted by vLLM's rules{tiers}; {_EVICTS[stack]}, which changes what is found where "
            "memory is short."
        )
    if _kind(scenario) is None:
        asked = scenario.memory.prefix_caching is False or _looks_nothing_up(scenario)
        why = f"serving_stack {scenario.stack_name} has no prefix cache"
        if asked:
            why = (
                "memory.prefix_caching is off"
                if scenario.memory.prefix_caching is False
                else "scheduler.disable_radix_cache is on"
            )
        yield (
            f"The trace says which prompts share a beginning, and {why}: every prompt is computed in full"
            + ("." if asked else "; memory.prefix_caching: true finds them.")
        )


def sorts_by_nothing(scenario: Scenario) -> Iterator[str]:
    """A note where a scheduler is to sort who waits by what a prefix cache holds, and there is none."""
    if _kind(scenario) != "tree" and any(each.get("schedule_policy") == "lpm" for _, each in _schedulers(scenario)):
        yield "scheduler.schedule_policy is lpm and there is no radix cache: requests are served first come, first served."


def _schedulers(scenario: Scenario) -> list[tuple[str, Mapping[str, Any]]]:
    """The settings of the scheduler and of those that it wraps."""
    return named.chain({"policy": scenario.scheduler.policy, **scenario.scheduler.settings}, "scheduler")


def _looks_nothing_up(scenario: Scenario) -> bool:
    return any(each.get("policy") == "sglang" and each.get("disable_radix_cache") for _, each in _schedulers(scenario))


def _kind(scenario: Scenario) -> PrefixCacheKind | None:
    stack, asked = scenario.stack_name, scenario.memory.prefix_caching
    if _looks_nothing_up(scenario) or not (stack in _CACHES if asked is None else asked):
        return None
    # What a tree gives up does not go to tiers yet.
    return "blocks" if scenario.memory.tiers else _CACHES.get(stack, "blocks")
