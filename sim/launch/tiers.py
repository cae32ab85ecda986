"""Memory behind the KV cache, which engines' commands say, and `memory.tiers`: what they share.

Of LMCache (sizes are of each rank) from knowledge: its source was not at hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from sim.errors import RooftraceError
from sim.launch.arguments import yaml_file
from sim.launch.reading import Reading
from sim.launch.writing import Writing
from sim.scenario.tiers import Tier

GIB = 1 << 30
LRU: Mapping[str, Any] = {"policy": "lru"}
_LMCACHE_POLICIES = ("lru", "lfu", "fifo", "mru")
"""`cache_policy`."""


def devices(reading: Reading) -> int:
    """GPUs of the server as read so far."""
    parallel = reading.settings.get("parallel", {})
    return parallel.get("tensor", 1) * parallel.get("pipeline", 1) * parallel.get("data", 1)


def host(gib: float, **given: Any) -> dict[str, Any]:
    return {"kind": "host", "gib": gib, **given}


def evicts(policy: str) -> dict[str, Any]:
    """The setting of a tier for the eviction *policy*; empty for the least recently used, which is the default."""
    return {} if policy == "lru" else {"eviction": {"policy": policy}}


def positive(value: Any, where: str, name: str) -> float:
    """The number that *value* is; RooftraceError where it is none above 0."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = 0.0
    if not (isfinite(found) and found > 0):
        raise RooftraceError(f"{where}: {name} is a number above 0; got {value!r}")
    return found


SAY = "{where}: how fast the {kind} is stands in no command; memory.tiers takes {{kind: {kind}, gib: ..., read_gb_per_s: ...}}"


def lmcache_server(reading: Reading, where: str) -> list[dict[str, Any]]:
    reading.notes.append(
        f"{where}: how much it holds is said to LMCache's own server; memory.tiers takes {{kind: host, gib: ...}}"
    )
    return []


def lmcache_tiers(reading: Reading, values: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The tier that LMCache's settings describe, by name; sizes are of each rank."""
    values = dict(values)
    found: list[dict[str, Any]] = []
    size = positive(values.pop("max_local_cpu_size", 5.0), where, "max_local_cpu_size")
    rule = str(values.get("cache_policy", "lru")).lower()
    if rule in _LMCACHE_POLICIES:
        values.pop("cache_policy", None)
    if str(values.pop("local_cpu", True)).lower() not in ("false", "0"):
        found.append(host(size * devices(reading), **evicts(rule if rule in _LMCACHE_POLICIES else "lru")))
    kinds = {"local_disk": "disk", "max_local_disk_size": "disk", "remote_url": "remote"}
    for kind in sorted({kinds[key] for key in kinds if values.pop(key, None)}):
        reading.notes.append(SAY.format(where=where, kind=kind))
    reading.notes += [f"{where}: {key} {value} is not modelled" for key, value in values.items()]
    return found


def lmcache_variables(aside: tuple[str, ...]) -> dict[str, str]:
    """LMCache's settings among the variables before a command: LMCACHE_MAX_LOCAL_CPU_SIZE=20 and so on."""
    pairs = (word.partition("=") for word in aside if word.startswith("LMCACHE_"))
    return {name.removeprefix("LMCACHE_").lower(): value for name, _, value in pairs}


def lmcache_file(path: str | None) -> dict[str, Any]:
    """LMCache's YAML file; RooftraceError where it cannot be read."""
    if path is None:
        return {}
    found = yaml_file(path, "LMCache's file")
    return dict(found) if isinstance(found, Mapping) else {}


def host_tiers_to_write(
    command: Writing, *, write: str | None = "through", evicts_by: Mapping[str, Any] = LRU
) -> Tier | None:
    """The one host tier that a command can say; all else of `memory.tiers` is not carried. *write*: how the engine writes; None: as
    it is told. *evicts_by*: the policy of its host memory."""
    tiers: list[Tier] = command.memory("tiers") or []
    chosen: Tier | None = None
    for at, tier in enumerate(tiers):
        if tier.kind != "host":
            command.not_carried(f"memory.tiers.{at} ({tier.kind}): set up its backend beside the command")
            continue
        chosen = tier
        if write not in (None, tier.write):
            command.not_carried(f"memory.tiers.{at}.write: {tier.write}; {command.target} writes by {write}")
        facts = tier.model_dump(exclude_defaults=True, exclude={"kind", "gib", "write"})
        eviction = facts.pop("eviction", LRU)
        if eviction != evicts_by:
            names = (eviction["policy"], command.target, evicts_by["policy"])
            command.not_carried("memory.tiers.{}.eviction: {}; {} evicts there by {}".format(at, *names))
        for key, value in facts.items():
            command.not_carried(f"memory.tiers.{at}.{key}: {value}, of the machine and of the simulation")
    return chosen
