"""The meaning of names of files and of their labels: kind, device, model, format and software."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hwmodels.device import load_device
from hwmodels.measured.kinds import CALIBRATING, DTYPE, KINDS
from hwmodels.model import ModelSpec, catalogue_base
from hwmodels.stacks import default_stack, servers

# Labels that are no name of the catalogue: query heads, KV heads, head dimension; others are looked up there.
HEADS = {
    "llama3.1-8b": (32, 8, 128),
    "llama3.1-70b": (64, 8, 128),
    "llama70b": (64, 8, 128),
    "qwen3-32b": (64, 8, 128),
    "qwen3-30b": (32, 4, 128),
    "qwen3-8b": (32, 8, 128),
}
EXPERTS = {"qwen3-30b": (2048, 768, 8, 128), "mixtral-8x7b": (4096, 14336, 2, 8)}  # hidden, inner, top-k, experts


def catalogue_name(label: str) -> str:
    """The device catalogue's name or alias for the device in a file's name (TPUs leave out "tpu-")."""
    if version := re.fullmatch(r"(?:tpu)?(v\d+[a-z]*)", label):
        return label if label == "v100" else f"tpu-{version[1]}"
    # Names of files have no hyphens: h100pcie, a100sxm.
    return re.sub(r"(?<=\d)(pcie|sxm\d?|nvl)$", r"-\1", label)


def catalogue_model(label: str) -> ModelSpec:
    """The catalogue's model for a label such as llama3.1-8b, llama2-70b or nvidia/Llama-3.1-70B-Instruct-FP8.

    Releases of one model (tuned, dated, quantised) have its shapes; ValueError for what the catalogue does not hold.
    """
    found = catalogue_base(label)
    if found is None:
        raise ValueError(f"model {label} is not in the catalogue; give one that `rooftrace models` lists")
    return found


# What columns and usual name together must say; a name that is not the usual one may say it in any order.
_NEEDED = {
    "attention_mixed": ("model",),
    "moe_layer": ("model", "tp"),
    "mla": ("phase",),
    "compressed_prefill": ("layer",),
    "compressed_decode": ("layer",),
    "collectives_nodes": ("topology",),
    "e2e_requests": ("model", "tp", "source"),
    "e2e_timeseries": ("model", "tp"),
    **{kind: ("model",) for kind in KINDS if kind.startswith(("e2e_agentic", "e2e_multiturn"))},
}
_EXAMPLES = {
    "model": "a model of the catalogue, such as llama3.1-8b",
    "tp": "the tensor parallelism, as in tp1",
    "phase": "prefill or decode",
    "layer": "csa or hca, as in dsv4_csa_module_decode_h100_vllm0.24.csv",
    "source": "the serving stack, as in vllm0.19",
    "topology": "how the devices are joined, dgx or pairwise_nvlink, as in collectives_h100_dgx_vidur.csv",
}
SOFTWARE = "|".join(
    (*servers(), "aiter", "llmcompass", "vidur", "lssv", "lss", "nccl", "rccl", "splitwise", *CALIBRATING)
)


def recognise(stem: str, header: Sequence[str]) -> tuple[str | None, dict[str, str]]:
    """The kind of a file with these columns and the labels in its name; None and the reason where there is none."""
    if len(set(header)) < len(header):
        twice = next(name for name in header if header.count(name) > 1)
        return None, {"reason": f"the column {twice or 'without a name'} is there twice"}
    by_columns = [
        kind
        for kind, (_, required, optional) in KINDS.items()
        if set(required) <= set(header) <= {*required, *optional}
    ]
    if not by_columns:
        return None, {"reason": _nearest(stem, header)}
    return _by_name(stem, by_columns) or _by_hints(stem, by_columns)


def _by_name(stem: str, kinds: Sequence[str]) -> tuple[str, dict[str, str]] | None:
    """The first of *kinds* whose usual name a file has, and its labels."""
    for kind in kinds:
        if match := re.fullmatch(KINDS[kind][0], stem):
            labels = {name: value or "" for name, value in match.groupdict().items()}
            # A word of another order may stand where the usual pattern expects the device.
            if "device" not in labels or _is_device(labels["device"]) or not hints(stem).get("device"):
                return kind, labels
    return None


def _by_hints(stem: str, kinds: Sequence[str]) -> tuple[str | None, dict[str, str]]:
    """One of *kinds* for a name in an order of its own, with the labels found in it; None and the reason where some are lacking."""
    labels = hints(stem)
    tpu = bool(re.fullmatch(r"v\d+[a-z]*", labels.get("device", ""))) and labels.get("device") != "v100"
    kinds = [kind for kind in kinds if tpu or not kind.startswith("tpu_") or len(kinds) == 1]
    # Of kinds whose columns all fit, the one that asks for the most: a layers file is a gemm file with more in it.
    kind = max(kinds, key=lambda kind: (tpu and kind.startswith("tpu_"), len(KINDS[kind][1])))
    if lacking := [what for what in _NEEDED.get(kind, ()) if not labels.get(what)]:
        return None, {
            "reason": f"its columns are those of {kind}; let its name also say {_EXAMPLES[lacking[0]]}",
            "kind": kind,
        }
    if not kind.startswith(("e2e_silicon", "iteration")) and (assumed := _assume(kind, labels)):
        labels["assumed"] = f"read as {kind} by its columns; the name says no other: {' and '.join(assumed)} assumed"
    if kind == "collectives_nccl":
        labels["source"] = "nccl"
    return kind, labels


def _assume(kind: str, labels: dict[str, str]) -> list[str]:
    """Whatever is taken for granted of a file whose name says neither format nor software; the software goes into *labels*."""
    assumed = []
    if not labels.get("dtype") and not kind.startswith(("collective", "allreduce", "dispatch", "moe", "e2e")):
        assumed.append("bf16")
    if not labels.get("source") and not kind.startswith(("collective", "allreduce", "dispatch", "tpu_")):
        labels["source"] = default_stack().name
        assumed.append(f"{default_stack().title}'s kernels")
    return assumed


def _nearest(stem: str, header: Sequence[str]) -> str:
    """Why columns fit no kind: the kind that the name or most columns speak for, and the first difference."""
    named = [kind for kind, (pattern, _, _) in KINDS.items() if re.fullmatch(pattern, stem)]
    shared = {kind: len(set(header) & set(required)) / len(required) for kind, (_, required, _) in KINDS.items()}
    kind = named[0] if named else max(shared, key=lambda kind: shared[kind])
    if not named and shared[kind] < 0.5:
        shown = ", ".join(header[:6]) + (", ..." if len(header) > 6 else "")
        return f"its columns ({shown}) are those of no kind of measurement; there are {', '.join(KINDS)}"
    _, required, optional = KINDS[kind]
    missing = [name for name in required if name not in header]
    what = (
        f"lacks {', '.join(missing)}"
        if missing
        else "has the unknown column " + next(name for name in header if name not in {*required, *optional})
    )
    article = "an" if kind[0] in "aeiou" else "a"
    return f"{article} {kind} file has the columns {', '.join(required)}; this one {what}"


def named(stem: str) -> bool:
    """Whether a name follows the pattern of a kind."""
    return any(re.fullmatch(pattern, stem) for pattern, _, _ in KINDS.values())


def hints(stem: str) -> dict[str, str]:
    """Device, format, software, model, parallelism and phase where a name holds them, in any order."""
    found: dict[str, str] = {}
    words = [word for word in re.split(r"[_\s]+", stem.lower()) if word]
    for at, word in enumerate(words):
        if match := re.fullmatch(rf"(?P<source>{SOFTWARE})(?P<version>[0-9][0-9a-z.]*)?", word):
            found |= {name: value for name, value in match.groupdict().items() if value}
        elif match := re.fullmatch(r"tp(\d+)", word):
            found["tp"] = match[1]
        elif re.fullmatch(DTYPE.removesuffix("?"), f"_{word}"):
            found["dtype"] = word
        elif word in ("prefill", "decode"):
            found["phase"] = word
        elif "device" not in found and _is_device(
            card := word + "".join(w for w in words[at + 1 : at + 2] if w in _FORMS)
        ):
            found["device"] = card
        elif "device" not in found and _is_device(word):
            found["device"] = word
        elif "model" not in found and _is_model(word):
            found["model"] = word
    return found


_FORMS = ("pcie", "sxm", "nvl")


def _is_device(word: str) -> bool:
    try:
        load_device(catalogue_name(word))
    except ValueError:
        return False
    return True


def _is_model(word: str) -> bool:
    if word in HEADS or word in EXPERTS:
        return True
    return catalogue_base(word) is not None


def card_of(device: str, topology: str) -> str:
    """A100 and H100 come as PCIe cards too, which the name of a collectives file says as the topology."""
    return f"{device}pcie" if device in ("a100", "h100") and topology.startswith("pcie") else device
