"""The number formats that a checkpoint says its weights and cache are in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_EVERYWHERE: tuple[str, ...] = ("attention_precision", "mlp_precision", "expert_precision")
_ALGORITHMS = {"FP8": "fp8", "FP8_PB_WO": "fp8_block", "NVFP4": "nvfp4", "W4A16_AWQ": "int4", "INT4_AWQ": "int4"}
"""`quant_algo` of a hf_quant_config.json."""


def quantisation(data: Mapping[str, Any], side: Mapping[str, Any] | None, base: str, where: str) -> dict[str, str]:
    """Formats of attention, MLP, experts and cache where they differ from *base*; *side* is a hf_quant_config.json.

    ValueError, naming *where*, for a format that is not modelled.
    """
    try:
        if side is not None:
            return _of_side_file(side.get("quantization", {}), base)
        return _of_config(data.get("quantization_config") or {}, base)
    except _NotModelled as error:
        raise ValueError(f"{where}: quantisation {error} is not modelled; pass a precision that overrides it") from None


class _NotModelled(Exception):
    """What is not modelled, in words."""


def _of_side_file(table: Mapping[str, Any], base: str) -> dict[str, str]:
    found: dict[str, str] = {}
    algorithm = table.get("quant_algo")
    if algorithm is not None:
        if algorithm not in _ALGORITHMS:
            raise _NotModelled(f"{algorithm} of hf_quant_config.json")
        found = dict.fromkeys(_EVERYWHERE, _ALGORITHMS[algorithm])
        if "self_attn" in " ".join(table.get("exclude_modules") or ()):
            found["attention_precision"] = base
    cache = table.get("kv_cache_quant_algo")
    if cache is not None:
        if cache != "FP8":
            raise _NotModelled(f"of the KV cache in {cache}")
        found["kv_precision"] = "fp8"
    return found


def _of_config(quantised: Mapping[str, Any], base: str) -> dict[str, str]:
    if not quantised:
        return {}
    return _of_weights(quantised, base) | _of_cache(quantised)


def _of_cache(quantised: Mapping[str, Any]) -> dict[str, str]:
    """`kv_cache_scheme` of compressed-tensors and of newer ModelOpt checkpoints; the weights' format says nothing of the cache."""
    scheme = quantised.get("kv_cache_scheme")
    if not scheme:
        return {}
    kind = (scheme.get("type"), scheme.get("num_bits"))
    if kind != ("float", 8):
        raise _NotModelled(f"of the KV cache in {kind[0]}{kind[1]}")
    return {"kv_precision": "fp8"}


def _of_weights(quantised: Mapping[str, Any], base: str) -> dict[str, str]:
    method = quantised.get("quant_method")
    if method == "fp8":
        return dict.fromkeys(_EVERYWHERE, "fp8_block" if quantised.get("weight_block_size") else "fp8")
    if method == "mxfp4":
        return {"expert_precision": "mxfp4"}
    if method in ("awq", "gptq"):
        bits = quantised.get("bits", quantised.get("w_bit"))
        if bits != 4:
            raise _NotModelled(f"{method} with {bits} bits")
        return dict.fromkeys(_EVERYWHERE, "int4")
    if method == "compressed-tensors":
        return _of_compressed_tensors(quantised, base)
    raise _NotModelled(f"{method!r}")


def _of_compressed_tensors(quantised: Mapping[str, Any], base: str) -> dict[str, str]:
    groups = list((quantised.get("config_groups") or {}).values())
    if len(groups) != 1:
        raise _NotModelled(f"compressed-tensors with {len(groups)} groups")
    weights = groups[0]["weights"]
    kind = (weights.get("type"), weights.get("num_bits"))
    names = {
        ("float", 8): "fp8",
        ("int", 8): "int8",
        ("int", 4): "int4_g32" if weights.get("group_size") == 32 else "int4",
    }
    if kind not in names:
        raise _NotModelled(f"compressed-tensors {kind[0]}{kind[1]}")
    found = dict.fromkeys(_EVERYWHERE, names[kind])
    ignored = " ".join(quantised.get("ignore") or ())
    if "self_attn" in ignored:
        found["attention_precision"] = base
    if "shared_experts" in ignored or "gate_up|down" in ignored:
        found["mlp_precision"] = base
    return found
