"""Names of checkpoints, read as a model of the catalogue and a number format.

A checkpoint on the HuggingFace hub is mostly a known shape under another name: tuned for instructions, dated, quantised. The
rules here take such words off a name until a catalogue model is left. They say which words they took and what they assumed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple


class NameReading(NamedTuple):
    """A checkpoint's name as a model of the catalogue."""

    base: str
    """The catalogue's name, or an alias of it."""
    words: tuple[str, ...]
    """Words of the name that say nothing of the shape, in the order of the name."""
    spelt: str | None
    """The words that state a number format, as in the name; None where none do."""
    format: str
    """That format of the weights; empty for the model's base format, REFUSED for one that is not modelled."""
    fp8_cache: bool
    """Whether checkpoints of this name ask for a KV cache in FP8."""


_TUNED = frozenset(
    {"instruct", "chat", "it", "hf", "base", "pt", "thinking", "reasoning", "dpo", "sft", "preview", "latest"}
    | {"terminus", "qat", "coder", "math", "ungated", "abliterated"}
)
"""Words for how a checkpoint was trained: its shape is that of the model without them."""
_DATE_OR_VERSION = re.compile(r"\d{4}|\d{6}|v\d+(?:\.\d+)*")
_SIZE = re.compile(r"(?:\d+x)?\d+(?:\.\d+)?[bm]")
_OTHER_SHAPE = re.compile(
    r"eagle\d?|medusa|mtp|draft|drafter|speculators?|dflash|accelerator|embed(?:ding)?|rerank(?:er)?|reward|vision|vl|omni|audio|minitron|pruned"
)
"""Words of checkpoints whose layers are not those of the model that they are called after."""

REFUSED = "refused"
_FORMATS: Mapping[str, str] = {
    "fp8_block": r"(?:fp8-block(?:wise)?|block-fp8)",
    "fp8_static": r"fp8(?:-(?:per-?tensor|kv))*-static(?:-(?:per-?tensor|kv))*",
    "fp8": r"fp8(?:-(?:dynamic|per-?tensor|per-?channel|kv))*",
    "int8": r"(?:quantized\.)?w8a8(?:-int8)?|int8-w8a8",
    "int4": (
        r"(?:quantized\.)?w4a16(?:-g128)?|(?:awq|gptq|autoround)(?:-(?:int4|4bit|w4a16|marlin))?"
        r"|int4(?:-(?:awq|gptq|autoround))?"
    ),
    "nvfp4": r"nvfp4|fp4",
    "nvfp4_a16": r"nvfp4a16|w4a16-nvfp4",
    "mxfp4": r"mxfp4",
    "int4_fp8": r"w4afp8|(?:quantized\.)?w4a8(?:-(?:awq|fp8))?",
    "": r"bf16|fp16|bfloat16|float16",
    REFUSED: (
        r"(?:i?q\d[^-]*-)?gguf|i?q\d(?:-[a-z\d]{1,2}){1,2}|bnb(?:-[48]bit)?|(?:mlx-)?[48]bit|mlx|exl[23]|hqq|aqlm"
        r"|gptq-(?:int8|8bit)|(?:quantized\.)?w8a16|int8"
    ),
}
"""Format -> the ends of names that state it; the empty one is the model's base format. A bare `int8` is 8-bit weights alone."""
_ENDS = {fmt: re.compile(rf"(?P<base>.+?)-(?P<words>{pattern})") for fmt, pattern in _FORMATS.items()}

_FP8_IN_BLOCKS = frozenset(("qwen", "deepseek-ai", "zai-org", "stepfun-ai", "sgl-project", "minimaxai", "xiaomimimo"))
"""Publishers whose -FP8 checkpoints have scales for blocks of 128 x 128 weights (`weight_block_size` of their config.json)."""
_FP8_STATIC = frozenset(("nvidia",))
"""Publishers whose -FP8 checkpoints state the scales of activations (ModelOpt's `quant_algo` FP8)."""
_FP8_CACHE = frozenset(("nvidia",))
"""Publishers whose quantised checkpoints ask for an FP8 KV cache (`kv_cache_quant_algo` of their hf_quant_config.json)."""

_FLOAT8 = {"type": "float", "num_bits": 8}
_SCHEMES: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any] | None]] = {
    "fp8": (_FLOAT8, {**_FLOAT8, "dynamic": True}),
    "fp8_static": (_FLOAT8, {**_FLOAT8, "dynamic": False}),
    "fp8_block": ({**_FLOAT8, "strategy": "block"}, _FLOAT8),
    "int8": ({"type": "int", "num_bits": 8}, {"type": "int", "num_bits": 8}),
    "int4": ({"type": "int", "num_bits": 4, "group_size": 128}, None),
    "int4_fp8": ({"type": "int", "num_bits": 4, "group_size": 128}, _FLOAT8),
    "nvfp4": ({"type": "float", "num_bits": 4, "group_size": 16}, {"type": "float", "num_bits": 4}),
    "nvfp4_a16": ({"type": "float", "num_bits": 4, "group_size": 16}, None),
    "mxfp4": ({"type": "float", "num_bits": 4, "group_size": 32}, None),
}
"""Format -> weights and activations, as the compressed-tensors format writes them."""


def normalised(name: str) -> str:
    """A name in the form in which names are compared: the last part of a path, lower case, words joined by hyphens."""
    last = re.sub(r"[_ :]", "-", name.strip().lower().rpartition("/")[2])
    return re.sub(r"\b(llama|gemma|phi|opt)(?=\d)", r"\1-", last).removeprefix("meta-")


def _publisher(name: str) -> str:
    return name.strip().lower().rpartition("/")[0].rpartition("/")[2]


def releases_fp8_in_blocks(name: str) -> bool:
    """Whether the publisher of the checkpoint called *name* (publisher/model) makes FP8 checkpoints with scales for blocks of
    weights itself, so that nobody else has to make one."""
    return _publisher(name) in _FP8_IN_BLOCKS


def stated_anew(name: str, known: Collection[str]) -> bool:
    """Whether *name* is another publisher's FP8 checkpoint, with static scales, of a model of *known*."""
    text = normalised(name)
    return _publisher(name) in _FP8_STATIC and text.endswith("-fp8") and text.removesuffix("-fp8") in known


def read_name(name: str, known: Collection[str]) -> NameReading | None:
    """*name* as a model of *known*, whose names are normalised; None if no rule leads to one."""
    text, publisher = normalised(name), _publisher(name)
    fmt, spelt = None, None
    taken: list[str] = []
    if text not in known or stated_anew(name, known):
        rest = text
        while (ends := _format_at_the_end(rest)) is None:
            rest, _, last = rest.rpartition("-")
            if not _says_nothing(last):
                break
            taken.insert(0, last)
        if ends is None:
            taken = []
        else:
            fmt, text, spelt = ends
    shorter = _shorter(text, known)
    if shorter is not None:
        text, words = shorter
        taken = [*words, *taken]
    base = text if text in known else _contained(text, known)
    if base is None:
        return None
    if base != text:
        taken = [*text.replace(base, "").strip("-").replace("--", "-").split("-"), *taken]
    if fmt is None:
        return NameReading(base, tuple(taken), None, "", False)
    if fmt == spelt == "fp8":
        fmt = "fp8_block" if publisher in _FP8_IN_BLOCKS else "fp8_static" if publisher in _FP8_STATIC else fmt
    cache = fmt not in ("", REFUSED) and (publisher in _FP8_CACHE or "kv" in (spelt or "").split("-"))
    return NameReading(base, tuple(taken), spelt, fmt, cache)


def _shorter(text: str, known: Collection[str]) -> tuple[str, tuple[str, ...]] | None:
    """The known name that is left of *text* when the fewest words that say nothing of the shape are taken, the last
    ones first, and those words."""
    words = text.split("-")
    free = [i for i in reversed(range(1, len(words))) if _says_nothing(words[i])]
    for n in range(len(free) + 1):
        for left_out in itertools.combinations(free, n):
            short = "-".join(word for i, word in enumerate(words) if i not in left_out)
            if short in known:
                return short, tuple(words[i] for i in reversed(left_out))
    return None


def _format_at_the_end(text: str) -> tuple[str, str, str] | None:
    """The format that the end of *text* states, the name without it, and how it is spelt; the longest spelling counts."""
    found = [(fmt, match["base"], match["words"]) for fmt, ends in _ENDS.items() if (match := ends.fullmatch(text))]
    return max(found, key=lambda each: len(each[2]), default=None)


def _says_nothing(word: str) -> bool:
    return word in _TUNED or _DATE_OR_VERSION.fullmatch(word) is not None


def _contained(text: str, known: Collection[str]) -> str | None:
    """The longest known name of which *text* is a fine-tune: it holds that name's words in a row, and no other size."""
    words = text.split("-")
    if any(_OTHER_SHAPE.fullmatch(word) for word in re.split(r"[-.]", text)):
        return None
    found = [
        "-".join(words[first:end])
        for first in range(len(words))
        for end in range(first + 1, len(words) + 1)
        if "-".join(words[first:end]) in known
        and any(_SIZE.fullmatch(word) for word in words[first:end])
        and not any(_SIZE.fullmatch(word) for word in (*words[:first], *words[end:]))
    ]
    return max(found, key=len, default=None)


def quantization_config(fmt: str, *, latent: bool, fp8_cache: bool) -> Mapping[str, Any]:
    """The `quantization_config` of a checkpoint whose linear layers are all in *fmt*, as compressed-tensors writes it.

    NVFP4 leaves *latent* attention in the base format, as the checkpoints of DeepSeek, Kimi and GLM-5 do (`exclude_modules`,
    `ignore` of their configs).
    """
    weights, activations = _SCHEMES[fmt]
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", *(["re:.*self_attn.*"] if latent and fmt == "nvfp4" else [])],
        **({"kv_cache_scheme": _FLOAT8} if fp8_cache else {}),
    }
