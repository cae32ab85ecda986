"""Whether and how KV blocks are found again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sim.errors import ScenarioError
from sim.scenario.settings import Scenario

if TYPE_CHECKING:
    from sim.engine.experiment import PrefixCacheKind
    from workloads import ClosedLoop, Trace

_READS_THE_TARGET = ("eagle", "mtp")
"""Methods whose drafter reads the target's states: what is found of a prompt lacks its last block, which is computed again
(`SpeculativeConfig.use_eagle_block_drop` of vLLM 0.32.0)."""

_CACHES: dict[str, PrefixCacheKind] = {"vllm": "blocks", "sglang": "blocks", "trtllm": "blocks"}
"""Serving stacks that find KV blocks again unless they are told not to, and how. The rules are vLLM's for all of them: SGLang's
tree and TensorRT-LLM's order of eviction are not modelled, which a note says."""

_EVICTS = {"sglang": "SGLang evicts leaves of its tree", "trtllm": "TensorRT-LLM evicts by priority"}


def cache_of(scenario: Scenario, workload: Trace | ClosedLoop, block_tokens: int) -> dict[str, Any]:
    """The prefix cache of a `ReplicaSpec`; ScenarioError where ids and KV blocks have sizes of which neither divides the other."""
    kind = _kind(scenario)
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
    if _kind(scenario) is not None and stack in _EVICTS:
        yield (
            f"KV blocks are found again and evicted by vLLM's rules; {_EVICTS[stack]}, which changes what is found where memory is "
            "short."
        )
    if _kind(scenario) is None:
        asked = scenario.memory.prefix_caching is False
        why = "memory.prefix_caching is off" if asked else f"serving_stack {scenario.stack_name} has no prefix cache"
        yield (
            f"The trace says which prompts share a beginning, and {why}: every prompt is computed in full"
            + ("." if asked else "; memory.prefix_caching: true finds them.")
        )


def _kind(scenario: Scenario) -> PrefixCacheKind | None:
    stack, asked = scenario.stack_name, scenario.memory.prefix_caching
    return _CACHES.get(stack, "blocks") if (stack in _CACHES if asked is None else asked) else None
