"""The memory behind a replica's KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from hwmodels.deployment import Deployment
from hwmodels.memory import MemoryPlan
from sim.engine.tiers.links import Limit
from sim.engine.tiers.tiers import TierSpec, check_tiers
from sim.errors import ScenarioError
from sim.scenario.assembly.pools import PoolOf
from sim.scenario.assembly.prefix_cache import caches, eviction_of
from sim.scenario.explain import told_by
from sim.scenario.settings import Scenario
from sim.scenario.tiers import Fabric, Tier
from workloads import Workload

_GIB = 1 << 30


def tiers_of(scenario: Scenario, deployment: Deployment, plan: MemoryPlan, *, models: int) -> dict[str, Any]:
    """The tiers of a `ReplicaSpec`, none where none are asked for; ScenarioError for tiers that cannot be. *models* share its
    machine: they have equal parts of its memory, and the same links."""
    tiers, swaps = scenario.memory.tiers, scenario.memory.preemption == "swap"
    where = f"{scenario.source}: memory.tiers"
    if swaps and not any(tier.kind == "host" for tier in tiers):
        raise ScenarioError(
            f"{scenario.source}: memory.preemption swap: sequences that give way are moved to a tier of kind host, and "
            "memory.tiers has none; give one, or preemption: recompute"
        )
    if not tiers:
        return {}
    if not caches(scenario) and not swaps:
        raise ScenarioError(
            f"{where}: tiers keep the blocks of a prefix cache, and there is none (memory.prefix_caching); switch it on, or "
            "leave tiers out"
        )
    # A block is on the devices of one group of data-parallel attention, a part of it on each.
    block_bytes = round(sum(stage.block_bytes for stage in plan.stages) * deployment.parallel.tensor)
    for i, tier in enumerate(tiers):
        if tier.gib is not None and tier.gib * _GIB / models < block_bytes:
            raise ScenarioError(
                f"{where}.{i}: {tier.gib:g} GiB do not hold one KV block of {block_bytes / 1e6:.3g} MB; give more, or leave the "
                "tier out"
            )
    parts = scenario.parallel.data * models
    specs: tuple[TierSpec, ...] = ()
    for i, tier in enumerate(tiers):
        key = f"memory.tiers.{i}"
        spec = _spec(tier, deployment, f"{where}.{i}", scenario.parallel.data, parts)
        with told_by(scenario, key):
            policy = None if tier.eviction is None else eviction_of(scenario, tier.eviction, f"{key}.eviction")
            specs += (replace(spec, eviction=policy),)
    if models > 1:
        specs = tuple(replace(spec, link=f"{i} {spec.kind}") for i, spec in enumerate(specs))
    try:
        check_tiers(specs)
    except ValueError as error:
        raise ScenarioError(f"{where}: {error}") from None
    return {"tiers": specs, "swaps": swaps, "block_bytes": block_bytes}


def _spec(tier: Tier, deployment: Deployment, where: str, ranks: int, parts: int) -> TierSpec:
    """A tier of one rank: each of them has its share of the link. What is not a store of all has so many *parts*."""
    read, latency_s = tier.read_gb_per_s, 0.0 if tier.latency_ms is None else tier.latency_ms / 1e3
    if tier.kind == "host":
        link = deployment.device.host
        if read is None and link is None:
            raise ScenarioError(
                f"{where}: a tier of kind host needs read_gb_per_s: nothing is known of the link between {deployment.device.title} "
                "and its host"
            )
        if read is None and link is not None:
            read = link.bytes_per_s * deployment.parallel.n_devices / 1e9
        if tier.latency_ms is None and link is not None:
            latency_s = link.latency_s
    assert read is not None
    return TierSpec(
        kind=tier.kind,
        read_bytes_per_s=read * 1e9 / ranks,
        write_bytes_per_s=None if tier.write_gb_per_s is None else tier.write_gb_per_s * 1e9 / ranks,
        latency_s=latency_s,
        capacity_bytes=0 if tier.gib is None else round(tier.gib * _GIB / (1 if tier.kind == "remote" else parts)),
        write=tier.write,
        min_load_tokens=tier.min_load_tokens,
        skip_when_slower=tier.skip_when_slower,
        concurrent_transfers=tier.concurrent_transfers,
        staged=tier.staged and tier.kind != "host",
        store=tier.store if tier.kind == "remote" else "",
        slowdowns=tier.degraded,
        limits=_limits(tier),
    )


def _limits(tier: Tier) -> tuple[Limit, ...]:
    """The limits that all replicas share: those of the tier's store, and of the network that it crosses."""
    ways: tuple[tuple[Literal["read", "write"], float | None], ...] = (
        ("read", tier.store_read_gb_per_s),
        ("write", tier.store_write_gb_per_s),
    )
    of_store = (Limit(f"{way} {tier.store}", rate * 1e9, way) for way, rate in ways if rate is not None)
    return (*of_store, *fabric_of(tier.fabric))


def fabric_of(fabric: Fabric | None) -> tuple[Limit, ...]:
    """The limit of a network that links share, if any."""
    return () if fabric is None else (Limit(f"fabric {fabric.name}", fabric.gb_per_s * 1e9),)


def check_stores(scenario: Scenario, pools: Sequence[PoolOf]) -> None:
    """ScenarioError for a remote store that a replica names twice, and for stores and networks of which different things are
    said."""
    first: dict[str, Tier] = {}
    rates: dict[str, float] = {}
    tiers = [tier for pool in pools for each in pool.scenarios for tier in each.memory.tiers]
    fabrics = [fabric_of(each.fabric) for each in (scenario.links or {}).values()]
    for limit in (limit for limits in (*map(_limits, tiers), *fabrics) for limit in limits):
        if rates.setdefault(limit.name, limit.bytes_per_s) != limit.bytes_per_s:
            way, _, name = limit.name.partition(" ")
            key = "fabric.gb_per_s" if way == "fabric" else f"store_{way}_gb_per_s"
            raise ScenarioError(
                f"{scenario.source}: {key}: of {name}, which is shared, {rates[limit.name] / 1e9:g} and "
                f"{limit.bytes_per_s / 1e9:g} GB/s are said; give one rate, or two names"
            )
    for each in (each for pool in pools for each in pool.scenarios):
        stores = [tier for tier in each.memory.tiers if tier.kind == "remote"]
        names = [tier.store for tier in stores]
        for tier in stores:
            if names.count(tier.store) > 1:
                raise ScenarioError(
                    f"{scenario.source}: memory.tiers: two tiers of kind remote are the store {tier.store}; give each a name of "
                    "its own (store), or leave one out"
                )
            other = first.setdefault(tier.store, tier)
            if other.gib != tier.gib:
                raise ScenarioError(
                    f"{scenario.source}: memory.tiers: replicas share the store {tier.store}, and say that it has "
                    f"{other.gib:g} and {tier.gib:g} GiB; give one size, or two names (store)"
                )
            if other.eviction != tier.eviction:
                raise ScenarioError(
                    f"{scenario.source}: memory.tiers: replicas share the store {tier.store}, and do not say the same of its "
                    "eviction; give one policy, or two names (store)"
                )


def check_room(scenario: Scenario, plan: MemoryPlan) -> None:
    """ScenarioError for a KV cache, given in blocks, that is larger than the memory of its devices."""
    for stage in plan.stages:
        if plan.override is not None and plan.override * stage.block_bytes > stage.device_bytes > 0:
            raise ScenarioError(
                f"{scenario.source}: memory.kv_blocks: {plan.override:,} blocks of {stage.block_bytes / 1e6:.3g} MB are "
                f"{plan.override * stage.block_bytes / 1e9:.0f} GB on each device, which has {stage.device_bytes / 1e9:.0f}; "
                "give fewer, or leave it out for as many as fit"
            )


def about_tiers(scenario: Scenario, workload: Workload, machines: int) -> Iterator[str]:
    """A note for tiers that have nothing to find, or whose bandwidth is that of a datasheet. *machines*: of the run, their ranks
    counted."""
    tiers = scenario.memory.tiers
    if tiers and workload.prefix_blocks is None:
        what = (
            "only swapped sequences use the host tier" if scenario.memory.preemption == "swap" else "tiers find nothing"
        )
        yield f"The workload does not say which prompts begin alike: {what}."
    if machines == 1 and any(tier.kind == "peer" for tier in tiers):
        yield "A tier of kind peer is the host memory of other replicas, and there is one replica: it finds nothing."
    if any(tier.kind == "host" and tier.read_gb_per_s is None for tier in tiers):
        yield (
            "The host tier's bandwidth is the rate of the GPU's link by its datasheet, which copies do not quite reach; "
            "read_gb_per_s of the tier takes a measured one."
        )
