"""Whether and how KV blocks are found again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from math import ceil
from typing import Any

from hwmodels.cache import cached_kinds, groups_of
from hwmodels.model import ModelSpec
from policies.eviction import CachedBlocks, foresees, rank_of
from policies.routers import Knowledge, knowledge_of
from sim.engine.spec.experiment import LeftBehind, PrefixCacheKind
from sim.errors import ScenarioError
from sim.scenario import named
from sim.scenario.chosen import Eviction
from sim.scenario.explain import told_by
from sim.scenario.settings import Scenario
from sim.text import shown
from workloads import Workload

_READS_THE_TARGET = ("eagle", "mtp")
"""Methods whose drafter reads the target's states: what is found of a prompt lacks its last block, which is computed again
(`SpeculativeConfig.use_eagle_block_drop` of vLLM 0.32.0)."""


def cache_of(scenario: Scenario, workload: Workload, block_tokens: int, model: ModelSpec) -> dict[str, Any]:
    """The prefix cache of a `ReplicaSpec` that serves *model*.

    ScenarioError where ids and KV blocks have sizes of which neither divides the other, and where the scheduler is told to have no
    cache and the memory to have one."""
    kind = _kind(scenario)
    if scenario.memory.prefix_caching and _looks_nothing_up(scenario):
        raise ScenarioError(
            f"{scenario.source}: memory.prefix_caching is on and scheduler.disable_radix_cache is as well; leave one of them out"
        )
    tokens = workload.prefix_block_tokens
    if kind is not None and tokens is not None and tokens % block_tokens and block_tokens % tokens:
        raise ScenarioError(
            f"{scenario.source}: memory.block_tokens: the trace's ids stand for {tokens} tokens each and a KV block holds "
            f"{block_tokens}, and one has to divide the other for blocks to be found again; give another block_tokens, or "
            "memory.prefix_caching: false"
        )
    return {
        "prefix_cache": kind,
        "eviction": _eviction(scenario, kind),
        "prefix_drops_last": scenario.decoding.method in _READS_THE_TARGET,
        "left_behind": _left_behind(scenario, model, block_tokens) if kind == "blocks" else None,
    }


def _eviction(scenario: Scenario, kind: PrefixCacheKind | None) -> Any:
    asked = scenario.memory.eviction
    if asked is None:
        return None
    if kind is None:
        raise ScenarioError(
            f"{scenario.source}: memory.eviction orders the blocks of a prefix cache, and there is none here; leave it out, or "
            "give memory.prefix_caching: true"
        )
    return eviction_of(scenario, asked, "memory.eviction")


def eviction_of(scenario: Scenario, asked: Eviction, key: str) -> Any:
    """The eviction policy that the setting *key* asks for; one of the user's own has ranked a block once, and is refused in a
    ScenarioError where it cannot."""
    with told_by(scenario, key):
        policy = asked.made(key)
        if ":" not in asked.policy:
            return policy
        try:
            rank = rank_of(policy)(CachedBlocks())
        except Exception as error:  # code of the user's own may fail in any way
            raise ScenarioError(
                f"{key}: {asked.policy} fails at {CachedBlocks()}: {type(error).__name__}: {error}"
            ) from error
        numbers = rank if isinstance(rank, tuple) else (rank,)
        if not numbers or not all(isinstance(number, int | float) and number == number for number in numbers):
            raise ScenarioError(f"{key}: {asked.policy} ranks by a number, or a tuple of numbers; got {shown(rank)}")
    return policy


def caches(scenario: Scenario) -> bool:
    """Whether KV blocks are found again."""
    return _kind(scenario) is not None


def check_router(scenario: Scenario, router: object, workload: Workload, block_tokens: Iterable[int]) -> None:
    """ScenarioError where a router counts in blocks that the workload's ids cannot be told in; *block_tokens*: of the machines."""
    knows, tokens = knowledge_of(router) or Knowledge(), workload.prefix_block_tokens
    if tokens is None:
        return
    engine = set(block_tokens)
    index = set() if knows.sent is None else {knows.sent.tokens_in(size) for size in engine}
    at, _ = named.innermost(
        router, scenario.router.model_dump(), "router", lambda each: (knowledge_of(each) or Knowledge()).prefixes
    )
    for size in sorted(index | (engine if knows.booked else set())):
        if tokens % size and size % tokens:
            raise ScenarioError(
                f"{scenario.source}: {at}.block_tokens: the trace's ids stand for {tokens} tokens each and a block of the "
                f"router's index for {size}, and one has to divide the other; give another block_tokens"
                + (", or memory.block_tokens" if size in engine else "")
            )


def without_cache(scenario: Scenario) -> Iterator[str]:
    """A note for a trace that says which prompts share a beginning, where no cache is asked for or another engine's rules hold."""
    if scenario.memory.eviction is not None and foresees(_eviction(scenario, _kind(scenario))):
        yield (
            f"memory.eviction {scenario.memory.eviction.policy} knows the next use of every block from the trace: it shows what a "
            "cache of one machine can find at best, and no server can run it."
        )
    if _kind(scenario) is not None and scenario.stack.eviction_borrowed and scenario.memory.eviction is None:
        yield scenario.stack.eviction_borrowed
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


def windows_left_behind(scenario: Scenario, model: ModelSpec) -> Iterator[str]:
    """A note for a model of which the stack caches more than is ever found."""
    local, every = _groups(scenario, model)
    if local and every and caches(scenario):
        found = Fraction(every, local + every)
        yield (
            f"Prefix cache of {model.name}: {scenario.stack.title} also caches pages that layers with windows have passed, "
            f"{local} of every {local + every} pages of a new prompt, until they are evicted. Where prompts do not all fit, only "
            f"about {found} of the cache can be found again."
        )


def _left_behind(scenario: Scenario, model: ModelSpec, block_tokens: int) -> LeftBehind | None:
    """The pages that a model's layers with windows leave in vLLM's cache.

    Groups of layers take their pages from one pool. A page that a group's window has passed counts as free with its content kept,
    like what a finished sequence had (vLLM 0.32.0, v1/core/single_type_kv_cache_manager.py: `remove_skipped_blocks`; where pages of
    all groups are as many tokens `reachable_block_mask` leaves none out).
    """
    local, every = _groups(scenario, model)
    if not (local and every) or model.window_tokens is None:
        return None
    return LeftBehind(per_block=local / every, window_blocks=ceil((model.window_tokens - 1) / block_tokens) + 1)


def _groups(scenario: Scenario, model: ModelSpec) -> tuple[int, int]:
    """Groups of layers with pages of one pool that keep a window or a chunk, and groups that keep every token."""
    if not scenario.stack.pages_by_group:
        return 0, 0
    groups = groups_of(cached_kinds(model))
    return (
        sum(group.kind in ("window", "chunked") for group in groups),
        sum(group.kind == "full" for group in groups),
    )


def sorts_by_nothing(scenario: Scenario) -> Iterator[str]:
    """A note where a scheduler is to sort waiting requests by what a prefix cache holds, and there is none."""
    if _kind(scenario) != "tree" and any(each.get("schedule_policy") == "lpm" for _, each in _schedulers(scenario)):
        yield "scheduler.schedule_policy is lpm and there is no radix cache: requests are served first come, first served."


def _schedulers(scenario: Scenario) -> list[tuple[str, Mapping[str, Any]]]:
    """The settings of the scheduler and of those that it wraps."""
    return named.chain({"policy": scenario.scheduler.policy, **scenario.scheduler.settings}, "scheduler")


def _looks_nothing_up(scenario: Scenario) -> bool:
    return any(each.get("disable_radix_cache") for _, each in _schedulers(scenario))


def _kind(scenario: Scenario) -> PrefixCacheKind | None:
    own, asked = scenario.stack.prefix_cache, scenario.memory.prefix_caching
    if _looks_nothing_up(scenario) or not (own if asked is None else asked):
        return None
    return own or "blocks"
