"""The number formats that a checkpoint says its weights and cache are in.

Which matrices a format is of is found as engines find it: representative module names of each kind of layer are held against
what the checkpoint lists as quantised (`targets`) and as left alone (`ignore`, `modules_to_not_convert`, `exclude_modules`).
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hwmodels.model.fields import object_of
from hwmodels.model.spec import ModelSpec
from hwmodels.precision import precision

_ALGORITHMS = {
    "FP8": "fp8_static", "FP8_PER_CHANNEL_PER_TOKEN": "fp8", "FP8_PB_WO": "fp8_block", "FP8_BLOCK_SCALES": "fp8_block",
    "MXFP8": "fp8_block", "NVFP4": "nvfp4", "NVFP4_AWQ": "nvfp4", "W4A16_NVFP4": "nvfp4_a16",
    "W4A16_AWQ": "int4", "INT4_AWQ": "int4", "W4A8_AWQ": "int4_fp8",
}  # fmt: skip
"""`quant_algo` of ModelOpt, in a hf_quant_config.json or in a config.json. FP8_PB_WO multiplies in FP8 in spite of its name (vLLM
0.32.0, quantization/modelopt.py)."""
_ATTENTION = tuple(
    f"{block}.{name}"
    for block, names in (
        (
            "self_attn",
            ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"),
        ),
        ("linear_attn", ("in_proj_qkvz", "in_proj_qkv", "in_proj_z", "out_proj")),
        ("attn", ("c_attn", "c_proj")),
        ("mixer", ("in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj")),
    )
    for name in names
)
_MATRICES = ("gate_proj", "up_proj", "down_proj", "gate_up_proj")
_MODULES: Mapping[str, tuple[str, ...]] = {
    "attention": _ATTENTION,
    "mlp": tuple(f"{block}.{name}" for block in ("mlp", "feed_forward", "mixer") for name in _MATRICES),
    "shared": tuple(
        f"{block}.{name}"
        for block in (
            *("mlp.shared_experts", "mlp.shared_expert", "feed_forward.shared_expert"),
            *("mixer.shared_experts", "ffn.shared_experts", "block_sparse_moe.shared_experts"),
        )
        for name in _MATRICES
    ),
    "expert": (
        *(f"{block}.experts.{which}{name}" for block in ("mlp", "feed_forward", "block_sparse_moe", "mixer", "ffn")
          for which in ("0.", "") for name in _MATRICES),
        *(f"block_sparse_moe.experts.0.{name}" for name in ("w1", "w2", "w3")),
    ),
    # Gemma 4 has them beside the MLP, not in it.
    "expert_beside": tuple(f"experts.{which}{name}" for which in ("0.", "") for name in _MATRICES),
}  # fmt: skip
"""Part of a layer -> names that its matrices have in checkpoints; which of them a model has does not matter."""
_PREFIXES = (
    "model.layers.",
    "language_model.model.layers.",
    "model.language_model.layers.",
    "transformer.h.",
    "backbone.layers.",
    "layers.",
)
_KNOWN = {word for modules in _MODULES.values() for name in modules for word in name.split(".")} | {
    "layers",
    "model",
    "h",
}
"""Words that a module of a list may end in, or a layer's number, to be one of these."""
_FIELDS = {"attention": "attention_precision", "mlp": "mlp_precision", "expert": "expert_precision"}
_WORDS = {"attention": "attention", "mlp": "dense or shared MLP", "expert": "experts"}


class _Selects(NamedTuple):
    """Some of a checkpoint's modules."""

    of: Callable[[str], bool]
    """Whether a module, by its whole name, is one of them."""
    by_layer: bool = False
    """Whether layers may differ in it."""


class _NotModelled(Exception):
    """Words on what is not modelled."""


class _Group(NamedTuple):
    fmt: str
    modules: _Selects


class _Stated(NamedTuple):
    """The formats that a checkpoint states of its weights."""

    groups: Sequence[_Group]
    """The first that selects a module says its format."""
    kept: _Selects
    """Modules left in the base format."""


def quantised(
    spec: ModelSpec, data: Mapping[str, Any], side: Mapping[str, Any] | None, where: str, *, given: Collection[str] = ()
) -> ModelSpec:
    """*spec*, whose weights are in its base format, in the formats that its files state, with a note where layers differ.

    *data* is the config.json, *side* a hf_quant_config.json beside it, whose words count first. ValueError, naming *where*, for
    a format that is not modelled; *given*: what the caller sets in place of the files' words, which are not read
    (`precision`: of the weights, `kv_precision`).
    """
    quantised = object_of(data.get("quantization_config"), f"{where}: quantization_config")
    if quantised and "expert_dtype" in data:
        quantised = {"expert_dtype": data["expert_dtype"], **quantised}
    beside = object_of((side or {}).get("quantization"), f"{where}: quantization of hf_quant_config.json")
    found: dict[str, str] = {}
    notes: list[str] = []
    setting = "kv_precision"
    try:
        if "kv_precision" not in given:
            found |= _of_cache(quantised) | _of_cache(beside)
        setting = "precision"
        stated = None if "precision" in given else (_of_algorithm(beside) or _of_weights(quantised, spec))
        if (
            stated is not None
            and quantised.get("quant_method") == "fp8"
            and beside.get("quant_algo") == "MIXED_PRECISION"
        ):
            # What ModelOpt's list does not name stays in the FP8 of the checkpoint that it was made from.
            rest = _of_weights({**quantised, "expert_dtype": None}, spec)
            stated = stated if rest is None else _Stated([*stated.groups, *rest.groups], rest.kept)
        if stated is not None:
            for part, layers in _parts(spec):
                found[_FIELDS[part]] = _format_of(stated, spec, part, layers, notes)
            if any("MXFP8" in str(table.get("quantized_layers")) for table in (quantised, beside)):
                notes.append("The checkpoint has MXFP8 in blocks of 32; priced as FP8 in blocks of 128.")
            if "lm_head" in {**(quantised.get("quantized_layers") or {}), **(beside.get("quantized_layers") or {})}:
                notes.append("The checkpoint has a narrow LM head; priced in 16 bits.")
    except _NotModelled as error:
        raise ValueError(
            f"{where}: quantisation {error} is not modelled; set another format in its place ({setting}: fp8, ...)"
        ) from None
    return dataclasses.replace(spec, **found, notes=(*spec.notes, *notes))


def _parts(spec: ModelSpec) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """Parts that have a format of their own, each with its matrices by kind of module and layer."""
    moe = [i for i, each in enumerate(spec.layer_is_moe) if each]
    shared = moe if spec.experts is not None and spec.experts.shared_ffn else []
    beside = spec.family == "gemma4_text"
    yield "attention", [("attention", i) for i, kind in enumerate(spec.layer_attention) if kind != "none"]
    mlp = [("mlp", i) for i, width in enumerate(spec.dense_widths) if width]
    mlp += [("mlp" if beside else "shared", i) for i in shared]
    # What a model has not is in the format that it would be in.
    yield "mlp", mlp or [("shared", 0)]
    yield "expert", [("expert_beside" if beside else "expert", i) for i in moe or (0,)]


def _format_of(stated: _Stated, spec: ModelSpec, part: str, layers: Sequence[tuple[str, int]], notes: list[str]) -> str:
    """The format that most *layers* have; where some have another a note says so."""
    by_layer = stated.kept.by_layer or any(group.modules.by_layer for group in stated.groups)
    counts: dict[str, int] = {}
    known: dict[tuple[str, int], str] = {}
    for kind, layer in layers:
        key = kind, layer if by_layer else 0
        if key not in known:
            known[key] = _format_in(stated, *key) or spec.base_precision
        counts[known[key]] = counts.get(known[key], 0) + 1
    usual = max(counts, key=lambda fmt: counts[fmt])
    for fmt, n in counts.items():
        if fmt != usual:
            notes.append(
                f"The checkpoint has the {_WORDS[part]} of {n} of {len(layers)} layers in {fmt}; priced as the others, in {usual}."
            )
    return usual


def _format_in(stated: _Stated, kind: str, layer: int) -> str | None:
    names = [f"{prefix}{layer}.{module}" for prefix in _PREFIXES for module in _MODULES[kind]]
    if any(map(stated.kept.of, names)):
        return None
    return next((group.fmt for group in stated.groups if any(map(group.modules.of, names))), None)


_EVERYTHING, _NOTHING = _Selects(lambda _: True), _Selects(lambda _: False)


def _selected(patterns: Sequence[str]) -> _Selects:
    """The modules that a list selects: whole names or parts of them between dots, globs (ModelOpt), `re:` (compressed-tensors)."""
    paths: set[str] = set()
    others: list[re.Pattern[str]] = []
    for pattern in patterns:
        if pattern.startswith("re:"):
            try:
                others.append(re.compile(pattern[3:]))
            except re.error as error:
                raise _NotModelled(f"of modules {pattern!r} ({error})") from None
        elif "*" in pattern:
            others.append(re.compile(f"(?:{fnmatch.translate(pattern)})|(?:{fnmatch.translate(pattern + '.*')})"))
        elif (last := pattern.rpartition(".")[2]) in _KNOWN or last.isdigit():
            paths.add(pattern)

    def selects(name: str) -> bool:
        if any(pattern.match(name) for pattern in others):
            return True
        words = name.split(".") if paths else ()
        ends = range(1, len(words) + 1)
        return any(".".join(words[start:end]) in paths for end in ends for start in range(end))

    return _Selects(selects, any(re.search(r"\d", text) for text in (*paths, *(pattern.pattern for pattern in others))))


def _texts(table: Mapping[str, Any], *keys: str) -> list[str]:
    found: list[str] = []
    for key in keys:
        value = table.get(key) or []
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise _NotModelled(f"with {key} {value!r}, which is no list of modules,")
        found += value
    return found


def _of_cache(table: Mapping[str, Any]) -> dict[str, str]:
    """The cache's format, of which that of the weights says nothing: `kv_cache_scheme` of compressed-tensors and of newer ModelOpt
    checkpoints, `kv_cache_quant_algo` of a hf_quant_config.json."""
    algorithm = table.get("kv_cache_quant_algo")
    if algorithm is not None:
        if algorithm != "FP8":
            raise _NotModelled(f"of the KV cache in {algorithm}")
        return {"kv_precision": "fp8"}
    scheme = table.get("kv_cache_scheme")
    if not scheme:
        return {}
    if scheme == "FP8":
        return {"kv_precision": "fp8"}
    if not isinstance(scheme, Mapping):
        raise _NotModelled(f"of the KV cache in {scheme}")
    kind, bits = scheme.get("type"), scheme.get("num_bits")
    if (kind, bits) != ("float", 8):
        raise _NotModelled(f"of the KV cache in {kind}{bits}")
    return {"kv_precision": "fp8"}


def _of_algorithm(table: Mapping[str, Any]) -> _Stated | None:
    """ModelOpt names one format and modules that are left alone, or a format for each module that is quantised."""
    algorithm = table.get("quant_algo")
    if algorithm is None:
        return None
    kept = _selected(_texts(table, "exclude_modules", "ignore"))
    if algorithm != "MIXED_PRECISION":
        return _Stated([_Group(_algorithm(algorithm), _EVERYTHING)], kept)
    modules: dict[str, list[str]] = {}
    layers = table.get("quantized_layers")
    if not isinstance(layers, Mapping) or not layers:
        raise _NotModelled(f"MIXED_PRECISION of ModelOpt with quantized_layers {layers!r}")
    for name, says in layers.items():
        modules.setdefault(_algorithm(says.get("quant_algo") if isinstance(says, Mapping) else says), []).append(name)
    return _Stated([_Group(fmt, _selected(names)) for fmt, names in modules.items()], kept)


def _algorithm(name: Any) -> str:
    if not isinstance(name, str) or name.upper() not in _ALGORITHMS:
        raise _NotModelled(f"{name} of ModelOpt")
    return _ALGORITHMS[name.upper()]


def _of_weights(table: Mapping[str, Any], spec: ModelSpec) -> _Stated | None:
    if not table:
        return None
    method = table.get("quant_method")
    kept = _selected(_texts(table, "modules_to_not_convert", "ignored_layers"))
    if method in ("fp8", "fbgemm_fp8"):
        return _of_fp8(table, kept)
    if method == "mxfp4":
        if spec.experts is None:
            raise _NotModelled("mxfp4 of a model without experts")
        return _Stated([_Group("mxfp4", _selected(["experts"]))], _NOTHING)
    if method == "w4afp8":
        # SGLang 0.5.23, quantization/w4afp8.py: experts as its name says, FP8 in blocks of 128 x 128 elsewhere.
        return _Stated([_Group("int4_fp8", _selected(["experts"])), _Group("fp8_block", _EVERYTHING)], kept)
    if method in ("awq", "gptq"):
        bits = table.get("bits", table.get("w_bit"))
        if bits != 4:
            raise _NotModelled(f"{method} with {bits} bits")
        if table.get("dynamic"):
            raise _NotModelled(f"{method} with rules for single modules (dynamic)")
        group = table.get("group_size", table.get("q_group_size"))
        return _Stated([_Group("int4_g32" if group == 32 else "int4", _EVERYTHING)], kept)
    if method == "compressed-tensors":
        return _of_compressed_tensors(table)
    if isinstance(method, str) and method.startswith("modelopt"):
        stated = _of_algorithm(table)
        if stated is not None:
            return stated
        raise _NotModelled(f"{method!r} without a quant_algo")
    raise _NotModelled(f"{method!r}")


def _of_fp8(table: Mapping[str, Any], kept: _Selects) -> _Stated:
    static = "fp8_static" if table.get("activation_scheme") == "static" else "fp8"
    every = _Group("fp8_block" if table.get("weight_block_size") else static, _EVERYTHING)
    if table.get("expert_dtype") not in (None, "fp8", "fp4"):
        raise _NotModelled(f"of experts in {table['expert_dtype']}")
    # DeepSeek-V4's own checkpoints: MXFP4 in blocks of 32, scaled by powers of two.
    experts = [_Group("mxfp4", _selected(["experts"]))] if table.get("expert_dtype") == "fp4" else []
    return _Stated([*experts, every], kept)


def _of_compressed_tensors(table: Mapping[str, Any]) -> _Stated:
    groups = table.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _NotModelled(f"compressed-tensors with config_groups {groups!r}")
    found: list[_Group] = []
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise _NotModelled(f"compressed-tensors with weights {weights!r} of {name}")
        targets = _texts(group, "targets") or ["Linear"]
        modules = _EVERYTHING if "Linear" in targets else _selected(targets)
        found.append(_Group(_scheme(weights, group.get("input_activations")), modules))
    # What names its modules goes before what is of all of them.
    found.sort(key=lambda group: group.modules is _EVERYTHING)
    return _Stated(found, _selected(_texts(table, "ignore")))


def _scheme(weights: Mapping[str, Any], activations: Any) -> str:
    """The format of one scheme of compressed-tensors."""
    kind, bits, group = weights.get("type"), weights.get("num_bits"), weights.get("group_size")
    taken = (activations.get("type"), activations.get("num_bits")) if isinstance(activations, Mapping) else None
    eight = "fp8_static" if taken is not None and activations.get("dynamic") is False else "fp8"
    names = {
        ("float", 8, ("float", 8)): "fp8_block" if weights.get("strategy") == "block" else eight,
        ("int", 8, ("int", 8)): "int8",
        ("int", 4, None): "int4_g32" if group == 32 else "int4",
        ("int", 4, ("float", 8)): "int4_fp8",
        ("float", 4, ("float", 4)): "nvfp4" if group == 16 else None,
        ("float", 4, None): "nvfp4_a16" if group == 16 else "mxfp4" if group == 32 else None,
    }
    try:
        fmt = names.get((kind, bits, taken))
    except TypeError:
        fmt = None
    if fmt is None or (fmt == eight and group == 32):
        beside = "16-bit" if taken is None else f"{taken[0]}{taken[1]}"
        in_groups = f" in groups of {group}" if group else ""
        raise _NotModelled(f"compressed-tensors {kind}{bits}{in_groups} with {beside} activations")
    return precision(fmt).name
