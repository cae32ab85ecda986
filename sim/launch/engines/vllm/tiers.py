"""`--kv-offloading-size` and the connectors of `--kv-transfer-config` as `memory.tiers`.

Release 0.32.0: vllm/config/cache.py, vllm/config/vllm.py, vllm/v1/kv_offload, v1/simple_cpu_offload_connector.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sim.errors import RooftraceError
from sim.launch.reading import Reading
from sim.launch.tiers import GIB, SAY, host, lmcache_file, lmcache_server, lmcache_tiers, lmcache_variables, positive

_BETWEEN_SERVERS = ("Nixl", "Mooncake", "MoRIIO", "P2pNccl")
"""Connectors, by how their names begin, that take KV from a server that prefills to one that decodes."""
_LMCACHE = ("LMCacheConnectorV1", "LMCacheMPConnector")
_SIMPLE_BYTES = 8 * GIB
"""The size that SimpleCPUOffloadConnector takes where nothing is said."""


def tiers(reading: Reading) -> None:
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
            lmcache_server(reading, "--kv-offloading-backend lmcache")
        else:
            reading.put("memory.tiers", [host(size)])
    elif config:
        tiers = _of_connector(reading, config)
        reading.put("memory.tiers", tiers or None)


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
        found = [host(positive(extra.pop("cpu_bytes_to_use", _SIMPLE_BYTES), where, "cpu_bytes_to_use") / GIB)]
        if extra.pop("lazy_offload", False):
            found[0]["write"] = "eviction"
        if extra.get("kv_offload_backend") == "disk":
            reading.notes.append(SAY.format(where=where, kind="disk"))
    elif name in _LMCACHE:
        return _lmcache(reading, extra, where)
    else:
        reading.notes.append(f"{where} is not modelled")
        return []
    for key, value in extra.items():
        reading.notes.append(f"{where}: {key} {json.dumps(value)} is not modelled")
    return found


def _offloading(reading: Reading, extra: dict[str, Any], where: str) -> list[dict[str, Any]]:
    size = extra.pop("cpu_bytes_to_use", None)
    if not size:
        raise RooftraceError(f"{where} needs cpu_bytes_to_use in kv_connector_extra_config")
    extra.pop("spec_name", None)
    for tier in extra.pop("secondary_tiers", []):
        which = tier.get("type") if isinstance(tier, Mapping) else tier
        kind = {"fs": "disk", "obj": "remote", "p2p": "peer"}.get(str(which))
        secondary = f"{where}: secondary tier {which}"
        reading.notes.append(f"{secondary} is not modelled" if kind is None else SAY.format(where=secondary, kind=kind))
    if extra.get("eviction_policy") == "lru":
        del extra["eviction_policy"]
    return [host(positive(size, where, "cpu_bytes_to_use") / GIB)]


def _lmcache(reading: Reading, extra: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """LMCache within the server: from its file, its variables, and keys of the connector, the latter over the former."""
    said = lmcache_variables(reading.command.aside)
    values = {**lmcache_file(said.pop("config_file", None)), **said}
    values |= {key.removeprefix("lmcache."): value for key, value in extra.items()}
    if where.endswith("MPConnector"):
        return lmcache_server(reading, where)
    return lmcache_tiers(reading, values, where)
