"""Memory behind the KV cache in the words of each engine, and `memory.tiers`.

vLLM 0.32.0: --kv-offloading-size and the connectors of --kv-transfer-config (vllm/config/cache.py, vllm/config/vllm.py,
vllm/v1/kv_offload, v1/simple_cpu_offload_connector.py); SGLang 0.5.23: hierarchical cache (srt/arg_groups/fields/memory.py, each
rank its own, in units of 1e9 bytes). Of LMCache and of TensorRT-LLM's host_cache_size (both of each rank) from knowledge: their
sources were not at hand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from sim.errors import RooftraceError
from sim.launch.reading import Reading
from sim.launch.writing import Writing
from sim.scenario.tiers import Tier
from sim.scenario.yaml import parse_yaml

GIB = 1 << 30
_BETWEEN_SERVERS = ("Nixl", "Mooncake", "MoRIIO", "P2pNccl")
"""Connectors, by how their names begin, that take KV from a server that prefills to one that decodes."""
_LMCACHE = ("LMCacheConnectorV1", "LMCacheMPConnector")
_HICACHE_RATIO = 2.0
"""Host memory to device memory of SGLang's hierarchical cache where nothing is said, and there is room."""
_SIMPLE_BYTES = 8 * GIB
"""The size that SimpleCPUOffloadConnector takes where nothing is said."""


def devices(reading: Reading) -> int:
    """GPUs of the server as read so far."""
    parallel = reading.settings.get("parallel", {})
    return parallel.get("tensor", 1) * parallel.get("pipeline", 1) * parallel.get("data", 1)


def vllm_tiers(reading: Reading) -> None:
    """Tiers that a command of vLLM asks for; what of them is not modelled goes to the notes."""
    size, backend = reading.number("kv-offloading-size"), reading.text("kv-offloading-backend")
    config = reading.json("kv-transfer-config")
    if size is not None:
        # It takes the place of the connector that the other option names.
        if config and config.get("kv_connector"):
            reading.notes.append(
                f"--kv-offloading-size replaces the connector {config['kv_connector']} of --kv-transfer-config"
            )
        if backend == "lmcache":
            _lmcache_server(reading, "--kv-offloading-backend lmcache")
        else:
            reading.put("memory.tiers", [_host(size)])
    elif config:
        tiers = _of_connector(reading, config)
        reading.put("memory.tiers", tiers or None)


def _host(gib: float, **given: Any) -> dict[str, Any]:
    return {"kind": "host", "gib": gib, **given}


def _of_connector(reading: Reading, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tiers of one connector, or of those in a MultiConnector."""
    name, given = str(config.get("kv_connector")), config.get("kv_connector_extra_config") or {}
    where = f"--kv-transfer-config: {name}"
    if not isinstance(given, Mapping):
        raise RooftraceError(f"{where}: kv_connector_extra_config is an object; got {given!r}")
    extra = dict(given)
    if name == "MultiConnector":
        inner = extra.get("connectors", [])
        if not isinstance(inner, list) or not all(isinstance(each, Mapping) for each in inner):
            raise RooftraceError(f"{where} takes a list of connectors, each an object; got {inner!r}")
        return [tier for each in inner for tier in _of_connector(reading, each)]
    if name.startswith(_BETWEEN_SERVERS) and "Store" not in name:
        role = {"kv_producer": "prefill", "kv_consumer": "decode"}.get(str(config.get("kv_role")))
        reading.took_role(role, where)
        reading.connector = "mooncake_vllm" if name.startswith("Mooncake") else None
        found: list[dict[str, Any]] = []
    elif name == "OffloadingConnector":
        found = _offloading(reading, extra, where)
    elif name == "SimpleCPUOffloadConnector":
        found = [_host(_positive(extra.pop("cpu_bytes_to_use", _SIMPLE_BYTES), where, "cpu_bytes_to_use") / GIB)]
        if extra.pop("lazy_offload", False):
            found[0]["write"] = "eviction"
        if extra.get("kv_offload_backend") == "disk":
            reading.notes.append(_SAY.format(where=where, kind="disk"))
    elif name in _LMCACHE:
        return _lmcache(reading, extra, where)
    else:
        reading.notes.append(f"{where} is not modelled")
        return []
    for key, value in extra.items():
        reading.notes.append(f"{where}: {key} {json.dumps(value)} is not modelled")
    return found


def _positive(value: Any, where: str, name: str) -> float:
    """The number that *value* is; RooftraceError where it is none above 0."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = 0.0
    if not (isfinite(found) and found > 0):
        raise RooftraceError(f"{where}: {name} is a number above 0; got {value!r}")
    return found


_SAY = "{where}: how fast the {kind} is stands in no command; memory.tiers takes {{kind: {kind}, gib: ..., read_gb_per_s: ...}}"


def _offloading(reading: Reading, extra: dict[str, Any], where: str) -> list[dict[str, Any]]:
    size = extra.pop("cpu_bytes_to_use", None)
    if not size:
        raise RooftraceError(f"{where} needs cpu_bytes_to_use in kv_connector_extra_config")
    extra.pop("spec_name", None)
    for tier in extra.pop("secondary_tiers", []):
        which = tier.get("type") if isinstance(tier, Mapping) else tier
        kind = {"fs": "disk", "obj": "remote", "p2p": "peer"}.get(str(which))
        secondary = f"{where}: secondary tier {which}"
        reading.notes.append(
            f"{secondary} is not modelled" if kind is None else _SAY.format(where=secondary, kind=kind)
        )
    if extra.get("eviction_policy") == "lru":
        del extra["eviction_policy"]
    return [_host(_positive(size, where, "cpu_bytes_to_use") / GIB)]


def _lmcache(reading: Reading, extra: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """LMCache within the server: from its file, its variables, and keys of the connector, the latter over the former."""
    said = lmcache_variables(reading.command.aside)
    values = {**lmcache_file(said.pop("config_file", None)), **said}
    values |= {key.removeprefix("lmcache."): value for key, value in extra.items()}
    if where.endswith("MPConnector"):
        return _lmcache_server(reading, where)
    return lmcache_tiers(reading, values, where)


def _lmcache_server(reading: Reading, where: str) -> list[dict[str, Any]]:
    reading.notes.append(
        f"{where}: how much it holds is said to LMCache's own server; memory.tiers takes {{kind: host, gib: ...}}"
    )
    return []


def lmcache_tiers(reading: Reading, values: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The tier that LMCache's settings describe, by name; sizes are of each rank."""
    values = dict(values)
    found: list[dict[str, Any]] = []
    size = _positive(values.pop("max_local_cpu_size", 5.0), where, "max_local_cpu_size")
    if str(values.pop("local_cpu", True)).lower() not in ("false", "0"):
        found.append(_host(size * devices(reading)))
    kinds = {"local_disk": "disk", "max_local_disk_size": "disk", "remote_url": "remote"}
    for kind in sorted({kinds[key] for key in kinds if values.pop(key, None)}):
        reading.notes.append(_SAY.format(where=where, kind=kind))
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
    try:
        found = parse_yaml(Path(path).read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        raise RooftraceError(f"LMCache's file {path} cannot be read: {error}") from None
    return dict(found) if isinstance(found, Mapping) else {}


def sglang_tiers(reading: Reading) -> None:
    """The host tier of SGLang's hierarchical cache."""
    hierarchical = reading.switch("enable-hierarchical-cache")
    size, ratio = reading.integer("hicache-size"), reading.number("hicache-ratio")
    policy, backend = reading.text("hicache-write-policy"), reading.text("hicache-storage-backend")
    if reading.switch("enable-lmcache"):
        file = reading.text("lmcache-config-file")
        values = {**lmcache_file(file), **lmcache_variables(reading.command.aside)}
        values.pop("config_file", None)
        reading.put("memory.tiers", lmcache_tiers(reading, values, "--enable-lmcache") or None)
    if not hierarchical:
        return
    if backend is not None:
        reading.notes.append(_SAY.format(where=f"--hicache-storage-backend {backend}", kind="remote"))
    if policy == "write_through_selective":
        reading.give_back("hicache-write-policy", policy)
    written = {"write": "eviction"} if policy == "write_back" else {}
    if size:
        reading.put("memory.tiers", [_host(size * 1e9 * devices(reading) / GIB, **written)])
    else:
        reading.host_tier = (_HICACHE_RATIO if ratio is None else ratio, {"kind": "host", **written})


def host_tiers_to_write(command: Writing, *, write: str = "through") -> Tier | None:
    """The one host tier that a command can say; all else of `memory.tiers` is not carried. *write*: how the engine writes."""
    tiers: list[Tier] = command.memory("tiers") or []
    chosen: Tier | None = None
    for at, tier in enumerate(tiers):
        if tier.kind != "host":
            command.not_carried(f"memory.tiers.{at} ({tier.kind}): set up its backend beside the command")
            continue
        chosen = tier
        if tier.write != write and command.target != "sglang":
            command.not_carried(f"memory.tiers.{at}.write: {tier.write}; {command.target} writes by {write}")
        facts = tier.model_dump(exclude_defaults=True, exclude={"kind", "gib", "write"})
        for key, value in facts.items():
            command.not_carried(f"memory.tiers.{at}.{key}: {value}, of the machine and of the simulation")
    return chosen
