"""Read measured latencies by their columns, and predict kernel-level rows from a profile.

The columns say what a file measured. Its name is a hint, for what they lack: device, arithmetic, software
(`gemm_h200_fp8_vllm0.24.csv`), and which of two kinds with the same columns. Files and rows that are not understood are
refused, or left out with the reason and counted; rows without a model are NaN with the reason, never dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hwmodels.kernels import attention, collectives, cpu, elementwise, gemm, mla, moe, tpu
from hwmodels.kernels.parameters import Datasheet
from hwmodels.model import Attention, ModelSpec, load_model
from hwmodels.precision import precision

if TYPE_CHECKING:
    from hwmodels.profiles import Profile

_PREFILL = ("batch_size", "seq_len", "num_heads", "num_kv_heads", "head_dim", "latency_us")
_DECODE = ("batch_size", "kv_len", "num_heads", "num_kv_heads", "head_dim", "latency_us")
_PAGED = (
    "is_prefill", "batch_size", "prefill_chunk_size", "kv_cache_size", "latency_us", "heads_per_rank",
    "kv_heads_per_rank",
)  # fmt: skip
_SILICON = (
    "model_path", "system", "backend", "backend_version", "precision", "gemm_quant_mode", "moe_quant_mode", "mode",
    "isl", "osl", "concurrency",
)  # fmt: skip
_NODE = r"(?P<device>[a-z0-9]+)"
_SOFTWARE = r"(?P<source>[a-z]+)(?P<version>[0-9][0-9a-z.]*)?"
_SAME_FORMAT = {
    "fp16": "bf16", "float16": "bf16", "bfloat16": "bf16", "float32": "fp32", "fp8block": "fp8", "fp8static": "fp8",
    "nvfp4": "fp4",
}  # fmt: skip
# Back ends of `hwmodels.calibrate`, which add the spread of their repeats, and formats to more names.
CALIBRATING = ("torch", "jax", "numpy", "fake")
_SPREAD = ("min_us", "max_us", "repeats")
# Any format's name, so that one without a model is counted by that name and not read as part of another word.
_DTYPE = (
    r"(?:_(?P<dtype>(?:(?:bfloat|float|bf|tf|mxfp|nvfp|fp|int)\d+|w\d+a(?:fp)?\d+)"
    r"(?:_?(?:block|static|wo|ootb|mxfp\d|tensor))*))?"
)

# fmt: off
# kind -> (usual pattern of the stem, columns that must be there, columns that may be)
_KINDS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "gemm": (
        rf"gemm_{_NODE}{_DTYPE}(?:_(?P<model>[a-z0-9.-]+?))?_{_SOFTWARE}",
        ("m", "n", "k", "latency_us"),
        ("model", "op", "tp", "layer", *_SPREAD),
    ),
    "attention_prefill": (
        rf"attention_prefill_{_NODE}{_DTYPE}_{_SOFTWARE}", _PREFILL, ("past_len", *_SPREAD)
    ),
    "attention_decode": (
        rf"attention_decode_{_NODE}{_DTYPE}_{_SOFTWARE}", _DECODE, ("query_len", *_SPREAD)
    ),
    "host": (rf"host_{_NODE}{_DTYPE}_{_SOFTWARE}", ("op", "layers", "latency_us"), _SPREAD),
    "attention_mixed": (
        rf"attention_mixed_{_NODE}_(?P<model>[a-z0-9.-]+)_tp(?P<tp>\d+)_{_SOFTWARE}",
        ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "latency_us"),
        (),
    ),
    "attention_paged": (rf"attention_{_NODE}_(?P<model>[a-z0-9.-]+)_tp(?P<tp>\d+)_{_SOFTWARE}", _PAGED, ()),
    "collectives_nccl": (
        rf"collectives_(?P<source>nccl)_{_NODE}(?:_(?P<topology>[a-z_]+))?",
        ("collective", "dtype", "num_gpus", "message_bytes", "latency_us"),
        _SPREAD,
    ),
    "collectives_nodes": (
        rf"collectives_{_NODE}_(?P<topology>[a-z_]+)_(?P<source>vidur)",
        ("collective", "num_workers", "devices_per_node", "size_bytes", "latency_us"),
        ("min_us",),
    ),
    "allreduce": (
        rf"allreduce_(?P<source>[a-z]+)custom_{_NODE}",
        ("backend", "num_gpus", "message_bytes", "latency_us"),
        (),
    ),
    "elementwise": (
        rf"elementwise_{_NODE}{_DTYPE}_(?P<source>vidur|{'|'.join(CALIBRATING)})(?P<version>[0-9][0-9a-z.]*)?",
        ("model", "op", "tp", "m", "width", "gated", "latency_us"),
        _SPREAD,
    ),
    "elementwise_rates": (
        rf"elementwise_{_NODE}_(?P<source>llmcompass)",
        ("op", "rows", "cols", "gelements_per_s", "latency_us"),
        (),
    ),
    "layers": (
        rf"layers_{_NODE}_(?P<model>[a-z0-9.-]+)_{_SOFTWARE}",
        ("model", "tp", "layer", "m", "n", "k", "latency_us"),
        (),
    ),
    "moe": (
        rf"moe_{_NODE}{_DTYPE}_{_SOFTWARE}",
        (
            "moe_dtype", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size",
            "moe_ep_size", "distribution", "latency_us",
        ),
        (),
    ),
    "moe_layer": (
        rf"moe_{_NODE}_(?P<model>[a-z0-9.-]+)_tp(?P<tp>\d+)_{_SOFTWARE}",
        ("tokens", "activated_experts", "latency_us"),
        (),
    ),
    "mla": (
        rf"mla_(?P<phase>prefill|decode)_{_NODE}{_DTYPE}(?:_{_SOFTWARE})?",
        ("batch_size", "isl", "step", "num_heads", "tp_size", "latency_us"),
        (),
    ),
    "tpu_attention": (r"tpu_(?P<device>[a-z0-9]+)_attention_(?P<model>[a-z0-9.-]+)", _PAGED, ()),
    "tpu_layers": (
        r"tpu_(?P<device>[a-z0-9]+)_layers_(?P<model>[a-z0-9.-]+)",
        ("layer", "m", "n", "k", "latency_us", "flag"),
        (),
    ),
    "iteration": (
        rf"iteration_(?P<source>[a-z]+)_{_NODE}_(?P<model>[a-z0-9.-]+)",
        (
            "model", "hardware", "tensor_parallel", "prompt_size", "batch_size", "token_size", "prompt_time_ms",
            "token_time_ms",
        ),
        ("repeats", "e2e_time_ms", "prompt_std_ms", "flag"),
    ),
    "e2e_silicon_agg": (
        r"e2e_silicon_agg",
        (*_SILICON, "batch_size", "tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size", "ttft_ms",
         "tpot_ms"),
        ("measured", "provenance", "speculation"),
    ),
    "e2e_silicon_disagg": (
        r"e2e_silicon_disagg",
        (
            *_SILICON,
            *(
                f"{phase}_{what}"
                for phase in ("prefill", "decode")
                for what in ("batch_size", "num_workers", "tp_size", "pp_size", "attention_dp_size", "moe_tp_size",
                             "moe_ep_size")
            ),
            "ttft_ms",
            "tpot_ms",
        ),
        ("measured", "provenance", "speculation"),
    ),
    "e2e_requests": (
        rf"e2e_requests_{_NODE}_(?P<model>[a-z0-9.-]+)_tp(?P<tp>\d+)_{_SOFTWARE}",
        ("request_id", "input_toks", "output_toks", "arrival_s", "queued_s", "scheduled_s", "first_token_s",
         "last_token_s"),
        (),
    ),
    "e2e_timeseries": (
        rf"e2e_timeseries_{_NODE}_(?P<model>[a-z0-9.-]+)_tp(?P<tp>\d+)_{_SOFTWARE}",
        ("t", "prompt_throughput", "gen_throughput", "running", "waiting", "kv_cache_pct"),
        (),
    ),
}
# fmt: on
KINDS = tuple(_KINDS)
_TEXT = {
    "model", "op", "layer", "collective", "dtype", "backend", "moe_dtype", "distribution", "flag", "hardware",
    "model_path", "system", "backend_version", "precision", "gemm_quant_mode", "moe_quant_mode", "mode", "request_id",
    "measured", "provenance", "speculation",
}  # fmt: skip
_FLAGS = {"is_prefill", "gated"}
_COUNTS = {
    "m", "n", "k", "batch_size", "seq_len", "num_heads", "num_kv_heads", "head_dim", "heads_per_rank",
    "kv_heads_per_rank", "num_gpus", "num_workers", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts",
    "moe_tp_size", "moe_ep_size", "width", "rows", "cols",
}  # fmt: skip
# Blank cells that the conventions allow: operations that are no GEMM, one-dimensional operations, unknown settings.
_MAY_BE_BLANK = {
    "layers": {"n", "k"},
    "tpu_layers": {"n", "k"},
    "elementwise_rates": {"rows", "cols"},
    "e2e_silicon_agg": None,
    "e2e_silicon_disagg": None,
    "iteration": {"prompt_std_ms", "e2e_time_ms", "prompt_time_ms"},
}
# Labels that are no name of the catalogue: query heads, KV heads, head dimension; others are looked up there.
_HEADS = {
    "llama3.1-8b": (32, 8, 128),
    "llama3.1-70b": (64, 8, 128),
    "llama70b": (64, 8, 128),
    "qwen3-32b": (64, 8, 128),
    "qwen3-30b": (32, 4, 128),
    "qwen3-8b": (32, 8, 128),
}
_EXPERTS = {"qwen3-30b": (2048, 768, 8, 128), "mixtral-8x7b": (4096, 14336, 2, 8)}  # hidden, inner, top-k, experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One measured file: what its name says, its columns as numpy arrays, and for kernels the measured seconds."""

    path: Path
    kind: str
    device: str
    source: str
    version: str
    dtype: str
    labels: Mapping[str, str]
    columns: Mapping[str, np.ndarray]
    measured_s: np.ndarray | None
    refused: Mapping[str, int] = field(default_factory=dict)
    """Reason -> rows of the file that were refused for it; they are in no column."""
    notes: tuple[str, ...] = ()
    """What neither columns nor name say and was assumed."""

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows of a measurement that one kernel model with one parameter set describes."""

    family: str
    variants: tuple[str, ...]
    """Parameter sets that may serve, the best first; a fit fills the first."""
    rows: np.ndarray
    columns: Mapping[str, np.ndarray]
    seconds: Callable[[Any, Mapping[str, np.ndarray]], Any]
    """(parameters, columns) -> seconds."""
    groups: tuple[str, ...]
    """Columns whose values make a shape: held back together."""
    starts: tuple[Any, ...]
    fixed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Seconds for each row (NaN: no model) and how many rows each reason left without one."""

    seconds: np.ndarray
    unmodelled: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """A folder of measurements: the files that were understood, and the reason for each that was not."""

    measurements: tuple[Measurement, ...]
    not_understood: Mapping[str, str]

    @property
    def left_out(self) -> tuple[str, ...]:
        """A sentence for each file that was not understood and each reason for refused rows; empty: all was read."""
        rows = [
            f"{m.path.name}: {count:,} of {len(m) + sum(m.refused.values()):,} rows refused: {reason}"
            for m in self.measurements
            for reason, count in m.refused.items()
        ]
        return (*(f"{name}: not understood: {reason}" for name, reason in self.not_understood.items()), *rows)

    @property
    def refused_rows(self) -> int:
        return sum(sum(m.refused.values()) for m in self.measurements)


def read(path: str | Path, *, strict: bool = True) -> Measurement:
    """Read one file; ValueError names the file and what was expected where header or cells do not fit.

    Without *strict* rows that do not fit are left out and counted in `refused`; ValueError when no row is left.
    """
    path = Path(path)
    header, rows, lines = _read_csv(path)
    kind, labels = _recognise(path.stem, header)
    if kind is None:
        raise ValueError(f"{path.name}: {labels['reason']}")
    refused: dict[str, int] = {}
    bad = np.zeros(len(rows), bool)

    def refuse(mask: np.ndarray, reason: str, plainly: str) -> None:
        """Refuse the rows of *mask*; *plainly* is the sentence where nothing may be refused, {line} the first's line."""
        fresh = mask & ~bad
        if not fresh.any():
            return
        line = int(lines[np.flatnonzero(fresh)[0]])
        if strict:
            raise ValueError(f"{path.name}: {plainly.format(line=line)}")
        refused[f"{reason} (line {line}{' and others' if fresh.sum() > 1 else ''})"] = int(fresh.sum())
        bad[fresh] = True

    width = len(header)
    lengths = np.array([len(row) for row in rows])
    for length in np.unique(lengths[lengths != width]):
        text = f"{length} cells, the header {width}"
        refuse(lengths == length, f"the line has {text}", f"line {{line}} has {text}; truncated file?")
    whole = ~bad
    rows, lines, bad = [row for row, keep in zip(rows, whole, strict=True) if keep], lines[whole], bad[whole]
    columns: dict[str, np.ndarray] = {}
    for name, cells in zip(header, zip(*rows, strict=True) if rows else [()] * width, strict=True):
        columns[name] = _column(kind, name, cells, refuse)
    if "latency_us" in columns:
        wrong = ~(columns["latency_us"] > 0)
        refuse(
            wrong, "latency_us must be positive", "latency_us must be positive; line {line} is not; remove or repair it"
        )
    if bad.any():
        columns = {name: column[~bad] for name, column in columns.items()}
    if not len(bad) or bad.all():
        raise ValueError(f"{path.name}: no row is left: {'; '.join(refused)}")
    word = (labels.get("dtype") or "bf16").replace("_", "")
    dtype = _SAME_FORMAT.get(word, word)
    return Measurement(
        path=path,
        kind=kind,
        device=_card(labels.get("device") or "", labels.get("topology") or ""),
        source=labels.get("source") or "",
        version=labels.get("version") or "",
        dtype=dtype,
        labels={name: value for name, value in labels.items() if value and name != "assumed"},
        columns=columns,
        measured_s=columns["latency_us"] * 1e-6 if "latency_us" in columns else None,
        refused=refused,
        notes=(labels["assumed"],) if labels.get("assumed") else (),
    )


def read_folder(folder: str | Path) -> list[Measurement]:
    """Every CSV of a folder, sorted by name; a file or row that is not understood is an error, not a gap."""
    return list(survey(folder, strict=True).measurements)


def survey(folder: str | Path, *, strict: bool = False) -> Survey:
    """Every CSV of a folder, sorted by name; what is not understood is in `Survey.left_out`, or, with *strict*, an error."""
    folder = Path(folder)
    paths = sorted(path for path in folder.glob("*") if path.suffix.lower() == ".csv")
    if not paths:
        raise ValueError(f"{folder} holds no CSV files; expected names such as gemm_h100_bf16_vllm0.24.csv")
    found, reasons = [], {}
    for path in paths:
        try:
            found.append(read(path, strict=strict))
        except (ValueError, OSError) as error:
            if strict:
                raise
            text = f"{error.strerror}" if isinstance(error, OSError) else str(error)
            reasons[path.name] = text.removeprefix(f"{path.name}: ")
    return Survey(measurements=tuple(found), not_understood=reasons)


def catalogue_name(label: str) -> str:
    """The device catalogue's name or alias for the device in a file's name (TPUs leave out "tpu-")."""
    if version := re.fullmatch(r"(?:tpu)?(v\d+[a-z]*)", label):
        return label if label == "v100" else f"tpu-{version[1]}"
    # Names of files have no hyphens: h100pcie, a100sxm.
    return re.sub(r"(?<=\d)(pcie|sxm\d?|nvl)$", r"-\1", label)


# A release's date, tuning or number format, which leave its shapes as they are.
_RELEASE = r"-(?:instruct|chat|thinking|hf|it|base|\d{4}|fp8|fp4|nvfp4|mxfp4|int4|int8|awq|gptq|bf16|dynamic|v0\.[1-3])"


def catalogue_model(label: str) -> ModelSpec:
    """The catalogue's model for a label such as llama3.1-8b, llama2-70b or nvidia/Llama-3.1-70B-Instruct-FP8.

    Releases of one model (tuned, dated, quantised) have its shapes; ValueError for what the catalogue does not hold.
    """
    name = label.strip().lower()
    bare = re.sub(r"^meta-(?=llama)", "", name.rpartition("/")[2])
    shapes = re.sub(rf"(?:{_RELEASE})+$", "", bare)
    for candidate in dict.fromkeys((name, bare, shapes)):
        for spelt in (candidate, re.sub(r"^(llama|qwen|opt)(?=\d)", r"\1-", candidate)):
            try:
                return load_model(spelt)
            except ValueError:
                continue
    raise ValueError(f"model {label} is not in the catalogue; give one that `rooftrace models` lists")


def is_kernel_level(measurement: Measurement) -> bool:
    """Whether `predict` covers the file; iteration and end-to-end files need a whole model or a simulation."""
    return not measurement.kind.startswith(("iteration", "e2e_"))


def predict(measurement: Measurement, profile: Profile) -> Prediction:
    """Seconds of every row of a kernel-level file on the profile's device."""
    if not is_kernel_level(measurement):
        raise ValueError(
            f"{measurement.path.name}: {measurement.kind} files are simulated, not priced kernel by kernel"
        )
    seconds = np.full(len(measurement), np.nan)
    reasons: dict[str, int] = {}
    covered = np.zeros(len(measurement), bool)
    try:
        found = list(parts(measurement, profile.datasheet))
    except ValueError as error:
        return Prediction(seconds=seconds, unmodelled={str(error).partition(";")[0]: len(measurement)})
    for part in found:
        covered[part.rows] = True
        params = profile.find(part.family, part.variants)
        if params is None:
            reason = f"{profile.name} has no {part.family} parameters for {part.variants[0]}"
            reasons[reason] = reasons.get(reason, 0) + len(part.rows)
            continue
        try:
            seconds[part.rows] = part.seconds(params, part.columns)
        except ValueError as error:
            reasons[str(error)] = reasons.get(str(error), 0) + len(part.rows)
    for reason, mask in _unmodelled(measurement):
        if (left := int((mask & ~covered).sum())) > 0:
            reasons[reason] = left
            covered |= mask
    if not covered.all():
        reasons["no kernel model covers this kind of row"] = int((~covered).sum())
    return Prediction(seconds=seconds, unmodelled=reasons)


def parts(measurement: Measurement, device: Datasheet) -> Iterator[Part]:
    """The kernel models behind a file's rows, for prediction and for fitting alike."""
    yield from _PARTS[measurement.kind](measurement, device)


# What columns and usual name together must say; a name that is not the usual one may say it in any order.
_NEEDED = {
    "attention_mixed": ("model",),
    "moe_layer": ("model", "tp"),
    "mla": ("phase",),
    "e2e_requests": ("model", "tp", "source"),
    "e2e_timeseries": ("model", "tp"),
}
_EXAMPLES = {
    "model": "a model of the catalogue, such as llama3.1-8b",
    "tp": "the tensor parallelism, as in tp1",
    "phase": "prefill or decode",
    "source": "the serving stack, as in vllm0.19",
}
_STACKS = "vllm|trtllm|sglang|llmcompass|vidur|lssv|lss|nccl|splitwise|" + "|".join(CALIBRATING)


def _recognise(stem: str, header: Sequence[str]) -> tuple[str | None, dict[str, str]]:
    """The kind of a file with these columns and the labels in its name; None and the reason where there is none."""
    if len(set(header)) < len(header):
        twice = next(name for name in header if header.count(name) > 1)
        return None, {"reason": f"the column {twice or 'without a name'} is there twice"}
    by_columns = [
        kind
        for kind, (_, required, optional) in _KINDS.items()
        if set(required) <= set(header) <= {*required, *optional}
    ]
    if not by_columns:
        return None, {"reason": _nearest(stem, header)}
    for kind in by_columns:
        if match := re.fullmatch(_KINDS[kind][0], stem):
            labels = {name: value or "" for name, value in match.groupdict().items()}
            # A word of another order may stand where the usual pattern expects the device.
            if "device" not in labels or _is_device(labels["device"]) or not _hints(stem).get("device"):
                return kind, labels
    labels = _hints(stem)
    tpu = bool(re.fullmatch(r"v\d+[a-z]*", labels.get("device", ""))) and labels.get("device") != "v100"
    by_columns = [kind for kind in by_columns if tpu or not kind.startswith("tpu_") or len(by_columns) == 1]
    # Of kinds whose columns all fit, the one that asks for the most: a layers file is a gemm file with more in it.
    kind = max(by_columns, key=lambda kind: (tpu and kind.startswith("tpu_"), len(_KINDS[kind][1])))
    if lacking := [what for what in _NEEDED.get(kind, ()) if not labels.get(what)]:
        return None, {"reason": f"its columns are those of {kind}; let its name also say {_EXAMPLES[lacking[0]]}"}
    if not kind.startswith(("e2e_silicon", "iteration")):
        assumed = [] if labels.get("dtype") or kind.startswith(("collective", "allreduce", "moe", "e2e")) else ["bf16"]
        if not labels.get("source") and not kind.startswith(("collective", "allreduce", "tpu_")):
            labels["source"] = "vllm"
            assumed.append("vLLM's kernels")
        if assumed:
            labels["assumed"] = (
                f"read as {kind} by its columns; the name says no other: {' and '.join(assumed)} assumed"
            )
    if kind == "collectives_nccl":
        labels["source"] = "nccl"
    return kind, labels


def _nearest(stem: str, header: Sequence[str]) -> str:
    """Why columns fit no kind: the kind that the name or most columns speak for, and the first difference."""
    named = [kind for kind, (pattern, _, _) in _KINDS.items() if re.fullmatch(pattern, stem)]
    shared = {kind: len(set(header) & set(required)) / len(required) for kind, (_, required, _) in _KINDS.items()}
    kind = named[0] if named else max(shared, key=lambda kind: shared[kind])
    if not named and shared[kind] < 0.5:
        shown = ", ".join(header[:6]) + (", ..." if len(header) > 6 else "")
        return f"its columns ({shown}) are those of no kind of measurement; there are {', '.join(KINDS)}"
    _, required, optional = _KINDS[kind]
    missing = [name for name in required if name not in header]
    what = (
        f"lacks {', '.join(missing)}"
        if missing
        else "has the unknown column " + next(name for name in header if name not in {*required, *optional})
    )
    article = "an" if kind[0] in "aeiou" else "a"
    return f"{article} {kind} file has the columns {', '.join(required)}; this one {what}"


def _hints(stem: str) -> dict[str, str]:
    """Device, format, software, model, parallelism and phase where a name holds them, in any order."""
    found: dict[str, str] = {}
    words = [word for word in re.split(r"[_\s]+", stem.lower()) if word]
    for at, word in enumerate(words):
        if match := re.fullmatch(rf"(?P<source>{_STACKS})(?P<version>[0-9][0-9a-z.]*)?", word):
            found |= {name: value for name, value in match.groupdict().items() if value}
        elif match := re.fullmatch(r"tp(\d+)", word):
            found["tp"] = match[1]
        elif re.fullmatch(_DTYPE.removesuffix("?"), f"_{word}"):
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
    from hwmodels.device import load_device

    try:
        load_device(catalogue_name(word))
    except ValueError:
        return False
    return True


def _is_model(word: str) -> bool:
    if word in _HEADS or word in _EXPERTS:
        return True
    try:
        catalogue_model(word)
    except ValueError:
        return False
    return True


def _card(device: str, topology: str) -> str:
    """A100 and H100 come as PCIe cards too, which the name of a collectives file says as the topology."""
    return f"{device}pcie" if device in ("a100", "h100") and topology.startswith("pcie") else device


def _read_csv(path: Path) -> tuple[list[str], list[list[str]], np.ndarray]:
    """Header, rows as they stand and the line that each ends on; ValueError for what is no table."""
    import csv

    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            header = next(reader, None)
            if not header:
                raise ValueError(f"{path.name}: the file is empty; expected a header and rows")
            numbered = [(row, reader.line_num) for row in reader if row]
    except UnicodeDecodeError:
        raise ValueError(f"{path.name}: the file is no text in UTF-8; export it as CSV") from None
    except csv.Error as error:
        raise ValueError(f"{path.name}: the file is no CSV: {error}") from None
    if not numbered:
        raise ValueError(f"{path.name}: there is a header but no row; the file looks truncated")
    return [name.strip() for name in header], [row for row, _ in numbered], np.array([line for _, line in numbered])


def _column(kind: str, name: str, cells: Sequence[str], refuse: Callable[[np.ndarray, str, str], None]) -> np.ndarray:
    """A column's values; cells that do not fit are given to *refuse* with the reason, and hold NaN or False."""
    if name in _TEXT:
        return np.array(cells, dtype=str)
    if name in _FLAGS:
        words = np.char.lower(np.array(cells, dtype=str))
        wrong = ~np.isin(words, ("true", "false"))
        got = repr(cells[int(np.flatnonzero(wrong)[0])]) if wrong.any() else ""
        text = f"{name} must be True or False; got {got}"
        refuse(wrong, text, text)
        return words == "true"
    allowed = _MAY_BE_BLANK.get(kind, set())
    may_be_blank = allowed is None or name in allowed
    values, wrong, text = np.full(len(cells), np.nan), np.zeros(len(cells), bool), ""
    for index, cell in enumerate(cells):
        if cell == "" and may_be_blank:
            continue
        try:
            values[index] = float(cell)
        except ValueError:
            wrong[index] = True
            text = text or cell
    refuse(wrong, f"{name} must be a number; got {text!r}", f"{name} in line {{line}} must be a number; got {text!r}")
    endless = np.isinf(values) | (np.isnan(values) & ~wrong & (not may_be_blank))
    refuse(endless, f"{name} must be finite", f"{name} must be finite numbers; line {{line}} is not")
    if name in _COUNTS:
        least = 0 if kind.startswith("e2e_") and name in _NONE_WHEN_DENSE else 1
        refuse(
            values < least,
            f"{name} must be at least {least}",
            f"{name} must be at least {least}; line {{line}} is not; remove or repair it",
        )
    return values


_NONE_WHEN_DENSE = ("moe_tp_size", "moe_ep_size")
"""Columns that serving files fill with 0 for a model without experts; `sim.measured_runs` reads that as 1."""


def _pick(m: Measurement, mask: np.ndarray, names: Mapping[str, str]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    rows = np.flatnonzero(mask)
    return rows, {new: m.columns[old][rows] for new, old in names.items()}


_NARROW = ("fp8", "int8", "fp4")


def _gemm_options(dtype: str, source: str) -> dict[str, Any]:
    """How a benchmark of this software and format ran its GEMMs."""
    narrow = {"fp32": 4.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5}.get(dtype, 2.0)
    options: dict[str, Any] = {"dtype": dtype, "weight_bytes": narrow, "activation_bytes": narrow}
    if source in CALIBRATING:  # cuBLAS on operands that are in the format already, from buffers larger than the cache
        return options | {"weight_copies": np.inf}
    if dtype in _NARROW:
        options |= {"quantise_activations": True, "library": "dispatch"}
    # The serving-kernel collector cycles six weight tensors; the others repeat one layer.
    return options | {"weight_copies": 6.0 if source in ("vllm", "trtllm", "sglang") else 1.0}


def _gemm_part(m: Measurement, device: Datasheet, mask: np.ndarray, source: str, dtype: str) -> Part:
    rows, columns = _pick(m, mask, {"m": "m", "n": "n", "k": "k"})
    options = _gemm_options(dtype, source)
    fixed = () if options.get("quantise_activations") else gemm.QUANTISE_FIELDS
    start = gemm.GemmParams(launch_s=3e-5) if source == "llmcompass" else gemm.GemmParams()
    if dtype in _NARROW and source not in CALIBRATING:
        start = gemm.GemmParams(launch_s=5e-6, fill_k=500.0, tile_edge=2.0, l2_intensity=60.0, block_bandwidth=3.0)
        fixed = ("split_s",)
    if source == "llmcompass":  # 20 points: what a few large shapes can tell
        fixed = (*gemm.QUANTISE_FIELDS, "cache_gain", "block_bandwidth", "split_s", "throttle_after_s", "wave_softness",
                 "l2_intensity", "fill_k")  # fmt: skip
    return Part(
        family="gemm",
        variants=(
            *(f"{dtype}/{name}" for name in dict.fromkeys((source, "vllm", "trtllm", "vidur"))),
            *(() if dtype not in _NARROW or source in CALIBRATING else ("fp8/vllm",)),
        ),
        rows=rows,
        columns=columns,
        seconds=lambda p, c: gemm.gemm_s(p, device, c["m"], c["n"], c["k"], **options),
        groups=("n", "k"),
        starts=(start,),
        fixed=fixed,
    )


def _on_cpu(m: Measurement) -> bool:
    return m.device.startswith("cpu")


def _number_bytes(m: Measurement) -> float:
    return 4.0 if m.dtype == "fp32" else 2.0


def _cpu_gemm(m: Measurement, device: Datasheet) -> Part:
    rows, columns = _pick(m, np.ones(len(m), bool), {"m": "m", "n": "n", "k": "k"})
    return Part(
        family="cpu_gemm", variants=(f"{m.dtype}/{m.source}",), rows=rows, columns=columns,
        seconds=lambda p, c: cpu.cpu_gemm_s(
            p, device, c["m"], c["n"], c["k"], dtype=m.dtype, number_bytes=_number_bytes(m)
        ),
        groups=("n", "k"),
        starts=(cpu.CpuGemmParams(), cpu.CpuGemmParams(launch_s=2e-5, vector_efficiency=1.0, bandwidth_efficiency=0.4),
                cpu.CpuGemmParams(launch_s=2e-5, vector_efficiency=1.0, extra_rows=4.0, overlap_loss=1.0)),
    )  # fmt: skip


def _cpu_attention(m: Measurement, device: Datasheet, family: str) -> Part:
    query, past = ("query_len", "kv_len") if family == "cpu_decode" else ("seq_len", "past_len")
    rows, columns = _pick(m, np.ones(len(m), bool), dict(_HEAD_COLUMNS))
    ones = np.ones(len(rows))
    columns["query"], columns["past"] = m.columns.get(query, ones), m.columns.get(past, 0.0 * ones)

    def seconds(p: Any, c: Mapping[str, np.ndarray]) -> Any:
        b, q, past = c["batch"], c["query"], c["past"]
        return cpu.cpu_attention_s(
            p, device, sequences=b, rows=b * q, pairs=b * (q * past + q * (q + 1) / 2), kv_tokens=b * (past + q),
            heads=c["heads"], kv_heads=c["kv_heads"], head_dim=c["head_dim"], dtype=m.dtype, kv_bytes=_number_bytes(m),
        )  # fmt: skip

    return Part(
        family=family, variants=(f"{m.dtype}/{m.source}",), rows=rows, columns=columns, seconds=seconds,
        groups=("batch", "past", "query"),
        starts=(cpu.CpuAttentionParams(), cpu.CpuAttentionParams(compute_efficiency=0.1, softmax_flops=300.0)),
    )  # fmt: skip


def _host(m: Measurement, device: Datasheet) -> Iterator[Part]:
    for op in ("host", "graph"):
        mask = m.columns["op"] == op
        if mask.any():
            rows, columns = _pick(m, mask, {"layers": "layers"})
            yield Part(
                family="host", variants=(f"{op}/{m.source}",), rows=rows, columns=columns,
                seconds=lambda p, c: cpu.host_s(p, c["layers"]), groups=("layers",), starts=(cpu.HostParams(),),
            )  # fmt: skip


def _gemm(m: Measurement, device: Datasheet) -> Iterator[Part]:
    if _on_cpu(m):
        yield _cpu_gemm(m, device)
        return
    if m.dtype in ("fp32", "bf16", *_NARROW):
        yield _gemm_part(m, device, np.ones(len(m), bool), m.source, m.dtype)


_CACHE_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0}


def _prefill_part(m: Measurement, device: Datasheet, rows: np.ndarray, columns: dict, groups: tuple[str, ...]) -> Part:
    def seconds(p: Any, c: Mapping[str, np.ndarray]) -> Any:
        b, q, past = c["batch"], c["query"], c["past"]
        return attention.attention_prefill_s(
            p, device, chunks=b, rows=b * q, pairs=b * (q * past + q * (q + 1) / 2), kv_tokens=b * (q + past),
            heads=c["heads"], kv_heads=c["kv_heads"], head_dim=c["head_dim"], longest_kv=q + past, resident=True,
            kv_bytes=2.0 if m.source in CALIBRATING else _CACHE_BYTES[m.dtype],
        )  # fmt: skip

    return Part(
        family="prefill", variants=(m.source, "vllm"), rows=rows, columns=columns, seconds=seconds, groups=groups,
        starts=(attention.PrefillParams(), attention.PrefillParams(launch_s=3e-6)),
    )  # fmt: skip


def _decode_part(m: Measurement, device: Datasheet, rows: np.ndarray, columns: dict, groups: tuple[str, ...]) -> Part:
    widest = attention.WIDEST_GROUP.get(m.source, np.inf)

    def seconds(p: Any, c: Mapping[str, np.ndarray]) -> Any:
        kv = c["kv"]
        return attention.attention_decode_s(
            p, device, seqs=c["batch"], kv_tokens=c["batch"] * kv, heads=c["heads"], kv_heads=c["kv_heads"],
            head_dim=c["head_dim"], longest_kv=kv, resident=True, widest_group=widest, query_width=c.get("width", 1),
            kv_bytes=2.0 if m.source in CALIBRATING else _CACHE_BYTES[m.dtype],
        )  # fmt: skip

    return Part(
        family="decode", variants=(m.source, "vllm"), rows=rows, columns=columns, seconds=seconds, groups=groups,
        starts=(attention.DecodeParams(), attention.DecodeParams(single_blocks=1.0),
                attention.DecodeParams(launch_s=3e-6, combine_s=0.0)),
    )  # fmt: skip


_HEAD_COLUMNS = {"batch": "batch_size", "heads": "num_heads", "kv_heads": "num_kv_heads", "head_dim": "head_dim"}
_WIDEST_HEAD = 256.0  # wider heads run a fallback kernel, up to 200 times slower than the bandwidth allows


def _attention_prefill(m: Measurement, device: Datasheet) -> Iterator[Part]:
    if _on_cpu(m):
        yield _cpu_attention(m, device, "cpu_prefill")
        return
    if m.dtype not in _CACHE_BYTES:
        return
    usual = m.columns["head_dim"] <= _WIDEST_HEAD
    # vLLM runs a prompt of one token as a decode without a past: predicted so, and not fitted.
    single = (m.columns["seq_len"] <= 1) & (m.source != "trtllm")
    rows, columns = _pick(m, usual & ~single, {**_HEAD_COLUMNS, "query": "seq_len"})
    columns["past"] = m.columns["past_len"][rows] if "past_len" in m.columns else 0.0 * columns["query"]
    yield _prefill_part(m, device, rows, columns, ("heads", "kv_heads", "head_dim"))
    rows, columns = _pick(m, usual & single, {**_HEAD_COLUMNS, "kv": "seq_len"})
    if len(rows):
        yield _decode_part(m, device, rows, columns, ())


def _attention_decode(m: Measurement, device: Datasheet) -> Iterator[Part]:
    if _on_cpu(m):
        yield _cpu_attention(m, device, "cpu_decode")
        return
    if m.dtype not in _CACHE_BYTES:
        return
    rows, columns = _pick(m, m.columns["head_dim"] <= _WIDEST_HEAD, {**_HEAD_COLUMNS, "kv": "kv_len"})
    columns["width"] = m.columns["query_len"][rows] if "query_len" in m.columns else np.ones(len(rows))
    columns["kv"] = columns["kv"] + columns["width"]
    yield _decode_part(m, device, rows, columns, ("heads", "kv_heads", "head_dim"))


def _heads_of(m: Measurement) -> tuple[float, float, float]:
    model, tp = m.labels["model"], float(m.labels.get("tp", "1"))
    if model not in _HEADS:
        found = catalogue_model(model).attention
        if not isinstance(found, Attention):
            raise ValueError(f"{model} has latent attention; the columns of {m.path.name} describe heads")
        return found.n_heads / tp, max(1.0, found.n_kv_heads / tp), float(found.head_dim)
    heads, kv_heads, head_dim = _HEADS[model]
    return heads / tp, max(1.0, kv_heads / tp), float(head_dim)


def _attention_mixed(m: Measurement, device: Datasheet) -> Iterator[Part]:
    heads, kv_heads, head_dim = _heads_of(m)
    prompt, decodes = m.columns["prefill_chunk"] > 0, m.columns["n_decode"] > 0
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}

    def filled(mask: np.ndarray, names: Mapping[str, str]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        rows, columns = _pick(m, mask, names)
        return rows, columns | {name: np.full(len(rows), value) for name, value in shape.items()}

    rows, columns = filled(prompt & ~decodes, {"query": "prefill_chunk", "past": "kv_prefill"})
    columns["batch"] = np.ones(len(rows))
    yield _prefill_part(m, device, rows, columns, ("query", "past"))
    rows, columns = filled(decodes & ~prompt, {"batch": "n_decode", "kv": "kv_decode"})
    columns["kv"] = columns["kv"] + 1.0
    yield _decode_part(m, device, rows, columns, ("batch", "kv"))
    rows, columns = filled(
        prompt & decodes, {"query": "prefill_chunk", "past": "kv_prefill", "seqs": "n_decode", "kv": "kv_decode"}
    )

    def seconds(p: Any, c: Mapping[str, np.ndarray]) -> Any:
        q, past, kv = c["query"], c["past"], c["kv"] + 1.0
        return attention.attention_mixed_s(
            p, device, chunks=np.ones_like(q), rows=q, pairs=q * past + q * (q + 1) / 2, kv_tokens=q + past,
            seqs=c["seqs"], decode_kv_tokens=c["seqs"] * kv, heads=c["heads"], kv_heads=c["kv_heads"],
            head_dim=c["head_dim"], longest_kv=np.maximum(q + past, kv), resident=True,
        )  # fmt: skip

    yield Part(
        family="mixed", variants=(m.source, "lss"), rows=rows, columns=columns, seconds=seconds,
        groups=("query", "past"), starts=(attention.PrefillParams(unpacked=0.5, padding=2.0, block_s=5e-6),),
    )  # fmt: skip


def _attention_paged(m: Measurement, device: Datasheet) -> Iterator[Part]:
    names = {"batch": "batch_size", "heads": "heads_per_rank", "kv_heads": "kv_heads_per_rank"}
    prompt = m.columns["is_prefill"]
    rows, columns = _pick(m, prompt, {**names, "query": "prefill_chunk_size", "past": "kv_cache_size"})
    columns["head_dim"] = np.full(len(rows), 128.0)
    yield _prefill_part(m, device, rows, columns, ("query", "past"))
    # Fewer cached tokens than sequences: some have no cache, and the profiled kernel returned at once.
    cached = m.columns["kv_cache_size"] >= 2 * m.columns["batch_size"]
    rows, columns = _pick(m, ~prompt & cached, {**names, "kv": "kv_cache_size"})
    # On GPUs the column sums the batch (times fall with the batch at one size); on the TPU it is each sequence's.
    columns["kv"] = columns["kv"] / columns["batch"] + 1.0
    columns["head_dim"] = np.full(len(rows), 128.0)
    yield _decode_part(m, device, rows, columns, ("batch", "kv"))


_COLLECTIVES = {"alltoall": "all_to_all", "sendrecv": "send_recv"}


def _collective_part(
    m: Measurement, mask: np.ndarray, kind: str, names: Mapping[str, str], variants: tuple[str, ...], link: float
) -> Part:
    rows, columns = _pick(m, mask, names)
    columns.setdefault("adapters", np.ones(len(rows)))
    start = collectives.CollectiveParams()
    return Part(
        family="collective", variants=variants, rows=rows, columns=columns,
        seconds=lambda p, c: collectives.collective_s(p, kind, c["bytes"], c["devices"], link * c["adapters"]),
        groups=("devices", "bytes"),
        starts=(start, collectives.CollectiveParams(contention=1.0, bandwidth_high=0.5, bandwidth_mid=0.2),
                collectives.CollectiveParams(start_s=3e-5), collectives.CollectiveParams(host_s=2e-5)),
    )  # fmt: skip


def _collectives_nccl(m: Measurement, device: Datasheet) -> Iterator[Part]:
    for name in np.unique(m.columns["collective"]):
        kind = _COLLECTIVES.get(str(name), str(name))
        yield _collective_part(
            m, m.columns["collective"] == name, kind, {"bytes": "message_bytes", "devices": "num_gpus"},
            (f"{kind}/nccl", f"{kind}/vidur-node"), device.link_bytes_per_s,
        )  # fmt: skip


def _collectives_nodes(m: Measurement, device: Datasheet) -> Iterator[Part]:
    across = m.columns["devices_per_node"] < m.columns["num_workers"]
    pairs = "pairwise" in m.labels["topology"]
    for name in np.unique(m.columns["collective"]):
        for network in (False, True):
            mask = (m.columns["collective"] == name) & (across == network)
            if not mask.any():
                continue
            place = "network" if network else "node"
            variants = (f"{name}/vidur-{place}", f"{name}/nccl")
            if pairs:
                variants = (f"{name}/vidur-pairs-{place}", *variants)
            link = collectives.NETWORK_BYTES_PER_S if network else device.link_bytes_per_s
            names = {"bytes": "size_bytes", "devices": "num_workers"}
            if network:  # each device of a node has its adapter, and NCCL runs a ring over each
                names["adapters"] = "devices_per_node"
            yield _collective_part(m, mask, str(name), names, variants, link)


def _allreduce(m: Measurement, device: Datasheet) -> Iterator[Part]:
    for backend in np.unique(m.columns["backend"]):
        yield _collective_part(
            m, m.columns["backend"] == backend, "all_reduce", {"bytes": "message_bytes", "devices": "num_gpus"},
            (f"all_reduce/{str(backend).replace('_', '-')}", "all_reduce/nccl"), device.link_bytes_per_s,
        )  # fmt: skip


def _elementwise_part(
    device: Datasheet, op: str, variants: tuple[str, ...], rows: np.ndarray, columns: dict, calls: float = 1.0,
    number_bytes: float = 2.0, fixed: tuple[str, ...] = (),
) -> Part:  # fmt: skip
    return Part(
        family="elementwise", variants=variants, rows=rows, columns=columns,
        seconds=lambda p, c: calls
        * elementwise.elementwise_s(
            p, device, op, c["rows"], c["width"], gated=c.get("gated", False), bytes_per_number=number_bytes
        ),
        groups=("rows",),
        starts=(elementwise.ElementwiseParams(), elementwise.ElementwiseParams(launch_s=2e-5)),
        fixed=fixed,
    )  # fmt: skip


_VIDUR_OPS = {
    "add": "add", "attn_rope": "rope", "emb": "embedding", "input_layernorm": "norm", "mlp_act": "act",
    "post_attention_layernorm": "norm",
}  # fmt: skip


def _elementwise(m: Measurement, device: Datasheet) -> Iterator[Part]:
    if m.source in CALIBRATING:
        for op in np.unique(m.columns["op"]):
            if op in elementwise.OPS:
                rows, columns = _pick(m, m.columns["op"] == op, {"rows": "m", "width": "width"})
                yield _elementwise_part(
                    device, str(op), (f"{op}/{m.source}",), rows, columns, number_bytes=_number_bytes(m),
                    fixed=("row_s", "overlap_loss"),  # a handful of points for each operation
                )  # fmt: skip
        return
    ops = np.array([_VIDUR_OPS.get(str(op), "") for op in m.columns["op"]])
    for op in np.unique(ops):
        for gated in (True, False):
            mask = (ops == op) & (m.columns["gated"] == gated)
            if not op or not mask.any():
                continue
            rows, columns = _pick(m, mask, {"rows": "m", "width": "width", "gated": "gated"})
            # Models with a gated feed-forward use RMSNorm from elementary kernels; the others LayerNorm from one, and
            # add attention and feed-forward to the residual in two calls.
            name = "layer-norm" if op == "norm" and not gated else op
            calls = 2.0 if op == "add" and not gated else 1.0
            variants = (f"{name}/{m.source}", f"{op}/{m.source}", f"{op}/lss", f"{op}/llmcompass")
            yield _elementwise_part(device, op, variants, rows, columns, calls)


def _elementwise_rates(m: Measurement, device: Datasheet) -> Iterator[Part]:
    for name, op in (("gelu", "act"), ("layernorm", "norm"), ("softmax", "softmax")):
        mask = m.columns["op"] == name
        if mask.any():
            rows, columns = _pick(m, mask, {"rows": "rows", "width": "cols"})
            # gelu ran over one long vector: rows of 1024 numbers stand for its blocks.
            if op == "act":
                columns = {"rows": columns["rows"] / 1024.0, "width": np.full(len(rows), 1024.0)}
            yield _elementwise_part(device, op, (f"{op}/{m.source}", f"{op}/vidur"), rows, columns)


_LAYER_OPS = {
    "act_fn": "act", "embedding": "embedding", "final_layernorm": "norm", "layernorm": "norm", "rotary_emb": "rope",
    "rope": "rope", "sampler": "softmax", "input_layernorm": "norm", "post_layernorm": "norm",
}  # fmt: skip


def _layer_widths(m: Measurement, tp: float | None = None) -> dict[str, float]:
    """Widths of the elementwise layers, from the GEMMs of the same file and parallelism."""
    mine = ~np.isnan(m.columns["k"])
    if tp is not None:
        mine &= m.columns["tp"] == tp
    shapes = {
        str(layer): (n, k) for layer, n, k in zip(*(m.columns[c][mine] for c in ("layer", "n", "k")), strict=True)
    }
    inputs = [name for name in ("qkv_proj", "q_proj", "gate_up_proj", "gate_proj") if name in shapes]
    if not inputs:
        raise ValueError("no matrix multiplication in the file says how wide its other layers are; keep their rows")
    hidden = shapes[inputs[0]][1]
    inner = shapes["gate_up_proj"][0] / 2 if "gate_up_proj" in shapes else shapes.get("gate_proj", (hidden, 0))[0]
    rotary = shapes.get("qkv_proj", shapes.get("q_proj", (hidden, 0)))[0]
    vocabulary = shapes.get("lm_head", (hidden, 0))[0]
    widths = {"norm": hidden, "embedding": hidden, "act": inner, "rope": rotary, "softmax": vocabulary}
    return {name: float(width) for name, width in widths.items()}


def _layers(m: Measurement, device: Datasheet) -> Iterator[Part]:
    matrix = ~np.isnan(m.columns["k"])
    yield _gemm_part(m, device, matrix, m.source, m.dtype)
    for layer in np.unique(m.columns["layer"][~matrix]):
        op = _LAYER_OPS.get(str(layer))
        mask = ~matrix & (m.columns["layer"] == layer)
        if op is None:
            continue
        rows, columns = _pick(m, mask, {"rows": "m", "tp": "tp"})
        by_tp = {tp: _layer_widths(m, tp)[op] for tp in np.unique(columns["tp"])}
        columns["width"] = np.array([by_tp[tp] for tp in columns.pop("tp")])
        columns["gated"] = np.full(len(rows), op == "act")
        name = str(layer).replace("_", "-") if op in ("norm", "softmax") else op
        yield _elementwise_part(device, op, (f"{name}/{m.source}", f"{op}/vidur"), rows, columns)


# moe_dtype -> arithmetic and weight format; a weight-only format is expanded to the arithmetic.
_MOE_DTYPES = {
    "bfloat16": ("bf16", "bf16"), "float16": ("bf16", "bf16"), "fp8_block": ("fp8", "fp8"), "fp8": ("fp8", "fp8"),
    "nvfp4": ("fp4", "nvfp4"), "int4_wo": ("bf16", "int4"), "w4a16_mxfp4": ("bf16", "mxfp4"), "w4afp8": ("fp8", "int4"),
}  # fmt: skip
_MOE_FALL_BACK = {"bf16": ("bf16",), "fp8": ("fp8",), "fp4": ("fp8", "bf16")}
_MOE_SHAPE = ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")


def _moe(m: Measurement, device: Datasheet) -> Iterator[Part]:
    for name in np.unique(m.columns["moe_dtype"]):
        if str(name) not in _MOE_DTYPES:
            continue
        dtype, weights = _MOE_DTYPES[str(name)]
        width = precision(weights).weight_bytes
        names = {c: c for c in (*_MOE_SHAPE, "num_tokens", "distribution")}
        rows, columns = _pick(m, (m.columns["moe_dtype"] == name) & ~_unspread(m), names)
        if not len(rows):
            continue

        def seconds(p: Any, c: Mapping[str, np.ndarray], dtype: str = dtype, width: float = width) -> Any:
            keys = np.stack([c[column].astype(str) for column in (*_MOE_SHAPE, "distribution")])
            _, first, inverse = np.unique(keys, axis=1, return_index=True, return_inverse=True)
            inverse = inverse.reshape(-1)
            out = np.empty(len(c["num_tokens"]))
            for group, at in enumerate(first):
                mine = inverse == group
                hidden, inner, topk, experts, tp, ep = (int(c[column][at]) for column in _MOE_SHAPE)
                # Nemotron's experts have two matrices (squared ReLU), all others of the tables three.
                gated = not (topk == 22 or (hidden, inner) == (2688, 1856))
                out[mine] = moe.moe_s(
                    p, device, c["num_tokens"][mine], hidden_size=hidden, inter_size=inner, topk=topk, experts=experts,
                    tp=tp, ep=ep, distribution=str(c["distribution"][at]), dtype=dtype, weight_bytes=width, gated=gated,
                )  # fmt: skip
            return out

        yield Part(
            family="moe", rows=rows, columns=columns,
            variants=(
                *((f"{weights}/{m.source}",) if weights != dtype else ()),
                *(f"{wide}/{name}" for wide in _MOE_FALL_BACK[dtype] for name in (m.source, "vllm")),
            ),
            seconds=seconds, groups=_MOE_SHAPE, starts=(moe.MoeParams(),),
        )  # fmt: skip


def _unspread(m: Measurement) -> np.ndarray:
    """Rows whose routing follows no known distribution."""
    return np.array([not re.fullmatch(r"balanced|uniform|power_law_\d+(\.\d+)?", d) for d in m.columns["distribution"]])


def _moe_layer(m: Measurement, device: Datasheet) -> Iterator[Part]:
    model = m.labels["model"]
    if model in _EXPERTS:
        hidden, inner, topk, experts = _EXPERTS[model]
    else:
        spec = catalogue_model(model)
        if spec.experts is None:
            raise ValueError(f"model {model} has no experts; the columns of {m.path.name} describe them")
        hidden, inner = spec.hidden, spec.experts.ffn
        topk, experts = spec.experts.per_token, spec.experts.n_experts
    rows, columns = _pick(m, np.ones(len(m), bool), {"tokens": "tokens", "active": "activated_experts"})
    tp = int(m.labels["tp"])
    yield Part(
        family="moe", variants=(f"bf16/{m.source}", "bf16/vllm"), rows=rows, columns=columns,
        seconds=lambda p, c: moe.moe_s(
            p, device, c["tokens"], hidden_size=hidden, inter_size=inner, topk=topk, experts=experts, tp=tp,
            experts_active=c["active"],
        ),
        groups=("tokens", "active"),
        starts=(moe.MoeParams(),),
        fixed=("rank_skew", "expert_s", "fill_k", "inner_passes"),
    )  # fmt: skip


def _mla(m: Measurement, device: Datasheet) -> Iterator[Part]:
    if m.dtype not in _CACHE_BYTES:
        return
    source = m.source or "vllm"
    rows, columns = _pick(
        m, np.ones(len(m), bool), {"batch": "batch_size", "isl": "isl", "step": "step", "heads": "num_heads"}
    )
    if m.labels["phase"] == "decode":

        def seconds(p: Any, c: Mapping[str, np.ndarray]) -> Any:
            kv = c["batch"] * (c["isl"] + c["step"])
            width = _CACHE_BYTES[m.dtype]
            return mla.mla_decode_s(p, device, seqs=c["batch"], kv_tokens=kv, heads=c["heads"], kv_bytes=width)

    else:

        def seconds(p: Any, c: Mapping[str, np.ndarray]) -> Any:
            b, q, past = c["batch"], c["isl"], c["step"]
            pairs = b * (q * past + q * (q + 1) / 2)
            return mla.mla_prefill_s(
                p, device, chunks=b, rows=b * q, pairs=pairs, kv_tokens=b * (q + past), heads=c["heads"]
            )

    yield Part(
        family=f"mla_{m.labels['phase']}", variants=(source, "vllm"), rows=rows, columns=columns, seconds=seconds,
        groups=("heads", "batch", "isl", "step"), starts=(mla.MlaParams(),),
    )  # fmt: skip


def _tpu_attention(m: Measurement, device: Datasheet) -> Iterator[Part]:
    names = {"batch": "batch_size", "query": "prefill_chunk_size", "kv": "kv_cache_size", "heads": "heads_per_rank",
             "kv_heads": "kv_heads_per_rank"}  # fmt: skip
    decode_fields = ("decode_launch_s", "decode_seq_s", "decode_token_s")
    prefill_fields = ("prefill_launch_s", "prefill_row_s", "prefill_pair_s", "prefill_token_s", "overlap_loss")
    prompt = m.columns["is_prefill"]
    rows, columns = _pick(m, ~prompt, names)
    yield Part(
        family="tpu_decode", variants=("jax",), rows=rows, columns=columns,
        seconds=lambda p, c: tpu.tpu_decode_s(
            p, seqs=c["batch"], kv_tokens=c["batch"] * c["kv"], kv_heads=c["kv_heads"]
        ),
        groups=("batch", "kv"), starts=(tpu.TpuAttentionParams(),), fixed=prefill_fields,
    )  # fmt: skip
    rows, columns = _pick(m, prompt, names)
    yield Part(
        family="tpu_prefill", variants=("jax",), rows=rows, columns=columns,
        seconds=lambda p, c: tpu.tpu_prefill_s(
            p, rows=c["batch"] * c["query"], heads=c["heads"], kv_tokens=c["batch"] * (c["kv"] + c["query"]),
            pairs=c["batch"] * (c["query"] * c["kv"] + c["query"] * (c["query"] + 1) / 2),
        ),
        groups=("query", "kv"), starts=(tpu.TpuAttentionParams(),), fixed=decode_fields,
    )  # fmt: skip


# Compiled into their neighbours: what is left takes 30 ns to 4 us without a trend in the rows.
_TPU_FUSED = ("final_layernorm", "post_layernorm")


def _tpu_layers(m: Measurement, device: Datasheet) -> Iterator[Part]:
    clean, matrix = m.columns["flag"] == "ok", ~np.isnan(m.columns["k"])
    rows, columns = _pick(m, clean & matrix, {"m": "m", "n": "n", "k": "k"})
    yield Part(
        family="tpu_gemm", variants=("bf16",), rows=rows, columns=columns,
        seconds=lambda p, c: tpu.tpu_gemm_s(p, device, c["m"], c["n"], c["k"]),
        groups=("m",), starts=(tpu.TpuGemmParams(),),
    )  # fmt: skip
    widths = _layer_widths(m)
    for layer in np.unique(m.columns["layer"][~matrix]):
        op = _LAYER_OPS.get(str(layer))
        mask = clean & ~matrix & (m.columns["layer"] == layer)
        if op is None or layer in _TPU_FUSED or not mask.any():
            continue
        rows, columns = _pick(m, mask, {"rows": "m"})
        columns["width"] = np.full(len(rows), widths[op])
        columns["gated"] = np.full(len(rows), op == "act")
        name = str(layer).replace("_", "-") if op == "norm" else op
        yield _elementwise_part(device, op, (f"{name}/jax",), rows, columns)


_PARTS: dict[str, Callable[[Measurement, Datasheet], Iterator[Part]]] = {
    "gemm": _gemm,
    "attention_prefill": _attention_prefill,
    "attention_decode": _attention_decode,
    "attention_mixed": _attention_mixed,
    "host": _host,
    "attention_paged": _attention_paged,
    "collectives_nccl": _collectives_nccl,
    "collectives_nodes": _collectives_nodes,
    "allreduce": _allreduce,
    "elementwise": _elementwise,
    "elementwise_rates": _elementwise_rates,
    "layers": _layers,
    "moe": _moe,
    "moe_layer": _moe_layer,
    "mla": _mla,
    "tpu_attention": _tpu_attention,
    "tpu_layers": _tpu_layers,
}


def _unmodelled(m: Measurement) -> Iterator[tuple[str, np.ndarray]]:
    """Reasons why rows have no model, with the rows each explains."""
    if "head_dim" in m.columns:
        yield "head_dim above 256 runs a fallback kernel", m.columns["head_dim"] > _WIDEST_HEAD
    if m.kind in ("gemm", "attention_prefill", "attention_decode", "mla"):
        yield f"format {m.dtype} has no kernel model", np.ones(len(m), bool)
    if m.kind == "tpu_layers":
        for flag in np.unique(m.columns["flag"]):
            if flag != "ok":
                yield f"flagged {flag}: the row times more or less than its operation", m.columns["flag"] == flag
        yield "normalisation that the compiler fused into its neighbours", np.isin(m.columns["layer"], _TPU_FUSED)
    if m.kind == "attention_paged":
        few = m.columns["kv_cache_size"] < 2 * m.columns["batch_size"]
        yield "less than two cached tokens a sequence", few & ~m.columns["is_prefill"]
    if m.kind == "attention_mixed":
        yield "an empty batch", (m.columns["prefill_chunk"] <= 0) & (m.columns["n_decode"] <= 0)
    for name in ("layer", "op"):
        if name in m.columns:
            for value in np.unique(m.columns[name]):
                yield f"{name} {value} has no kernel model", m.columns[name] == value
    if "distribution" in m.columns:
        unknown = _unspread(m)
        for value in np.unique(m.columns["distribution"][unknown]):
            yield f"distribution {value} has no model", unknown & (m.columns["distribution"] == value)
    if "moe_dtype" in m.columns:
        for value in np.unique(m.columns["moe_dtype"]):
            yield f"moe_dtype {value} has no kernel model", m.columns["moe_dtype"] == value
