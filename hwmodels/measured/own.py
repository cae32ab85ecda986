"""Tables of one's own: what they measured by their columns, under the names and units that people give them.

A table says in each line a shape and a time. Columns may be called as in `kinds` or by the usual other words, times and bytes
carry their unit in the name (`latency_ms`, `message_kib`), and device, format and software are columns, words of the file's
name, or said beside it. What a table lacks is said in one sentence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hwmodels.device import load_device
from hwmodels.measured.files import Measurement, Refusals, read_csv
from hwmodels.measured.kinds import SAME_FORMAT
from hwmodels.measured.names import SOFTWARE, catalogue_name, hints
from hwmodels.precision import PRECISIONS
from hwmodels.stacks import default_stack

_TIME_US = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6, "usec": 1.0, "msec": 1e3, "sec": 1e6, "seconds": 1e6}
_BYTES = {
    "bytes": 1.0, "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Field:
    """A quantity of a table, by its name in `kinds`."""

    name: str
    words: tuple[str, ...]
    """The names that its column may have, the unit left out where it has one."""
    units: Mapping[str, float] | None = None
    """Unit -> what one of it is in the unit of *name*; None: a count or a word."""
    text: bool = False
    least: float = 1.0
    default: str | None = None
    """Its value where the table does not say; None: a table must say."""

    def factor(self, column: str) -> float | None:
        """The factor on numbers of *column* if it is this quantity's; None if it is not, NaN where it lacks its unit."""
        if self.units is None:
            return 1.0 if column in self.words else None
        if column in self.words:
            return float("nan")
        stem, _, unit = column.rpartition("_")
        return self.units.get(unit) if stem in self.words else None


def _time(name: str, *words: str, per_us: float = 1.0) -> _Field:
    return _Field(name, words, {unit: us * per_us for unit, us in _TIME_US.items()}, least=0.0)


def _optional(name: str, *words: str, default: str, least: float = 1.0) -> _Field:
    return _Field(name, (name, *words), least=least, default=default)


_LATENCY = _time("latency_us", "latency", "time", "duration", "elapsed", "median", "mean")
_BATCH = _Field("batch_size", ("batch_size", "batch", "bs", "num_seqs", "sequences"))
_HEADS = (
    _Field("num_heads", ("num_heads", "n_heads", "heads", "num_q_heads", "q_heads", "num_attention_heads")),
    _Field("num_kv_heads", ("num_kv_heads", "n_kv_heads", "kv_heads", "num_key_value_heads")),
    _Field("head_dim", ("head_dim", "head_size", "d_head")),
)
_DEVICE = _Field("device", ("device", "gpu", "hardware", "accelerator", "system"), text=True, default="")
_DTYPE = _Field("dtype", ("dtype", "precision", "data_type", "format"), text=True, default="")
_SOURCE = _Field("source", ("source", "backend", "framework", "stack", "engine", "software"), text=True, default="")
_VERSION = _Field("version", ("version", "backend_version", "software_version"), text=True, default="")
_LABELS = (_DEVICE, _DTYPE, _SOURCE, _VERSION)
_PROTOCOL = "genai-perf"
"""The protocol of the clients of a serving table where it does not say: lengths are equal, and a warm-up is answered first."""
_PASSED_OVER = "meta."
"""Begins the names of columns that a table keeps for itself."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of `kinds.KINDS` that a table of one's own may be."""

    kind: str
    fields: tuple[_Field, ...]

    @property
    def known(self) -> tuple[_Field, ...]:
        return (*self.fields, *_LABELS)


OWN: Mapping[str, _Kind] = {
    "GEMM": _Kind("gemm", (*(_Field(name, (name,)) for name in "mnk"), _LATENCY)),
    "prefill attention": _Kind(
        "attention_prefill",
        (
            _BATCH,
            _Field("seq_len", ("seq_len", "sequence_length", "prompt_len", "prompt_tokens", "query_len", "q_len")),
            *_HEADS,
            _optional("past_len", "past_kv_len", "cached_len", "cached_tokens", default="0", least=0.0),
            _LATENCY,
        ),
    ),
    "decode attention": _Kind(
        "attention_decode",
        (
            _BATCH,
            _Field("kv_len", ("kv_len", "context_len", "context", "cache_len", "kv_seq_len", "kv_tokens")),
            *_HEADS,
            _optional("query_len", "q_len", "query_tokens", default="1"),
            _LATENCY,
        ),
    ),
    "collective": _Kind(
        "collectives_nccl",
        (
            _Field("collective", ("collective", "operation", "op", "primitive"), text=True),
            _Field("num_gpus", ("num_gpus", "n_gpus", "gpus", "world_size", "num_devices", "devices", "ranks")),
            _Field("message_bytes", ("message", "size", "message_size"), _BYTES),
            _LATENCY,
        ),
    ),
    "MoE": _Kind(
        "moe",
        (
            _Field("num_tokens", ("num_tokens", "tokens", "n_tokens")),
            _Field("hidden_size", ("hidden_size", "hidden")),
            _Field("inter_size", ("inter_size", "intermediate_size", "moe_intermediate_size", "inner")),
            _Field("topk", ("topk", "top_k", "experts_per_token", "num_experts_per_tok")),
            _Field("num_experts", ("num_experts", "experts", "n_experts")),
            _optional("moe_tp_size", "tp_size", "tp", "tensor_parallel", default="1"),
            _optional("moe_ep_size", "ep_size", "ep", "expert_parallel", default="1"),
            _Field("distribution", ("distribution", "routing"), text=True, default="balanced"),
            _LATENCY,
        ),
    ),
    "serving": _Kind(
        "e2e_silicon_agg",
        (
            _Field("model_path", ("model_path", "model", "model_name", "model_id"), text=True),
            _Field("isl", ("isl", "prompt_tokens", "input_tokens", "prompt_len", "input_len")),
            _Field("osl", ("osl", "output_tokens", "output_len", "generated_tokens")),
            _Field("concurrency", ("concurrency", "clients", "max_concurrency", "num_clients")),
            _optional("tp_size", "tp", "tensor_parallel", default="1"),
            _optional("pp_size", "pp", "pipeline_parallel", default="1"),
            _optional("attention_dp_size", "dp_size", "dp", "data_parallel", default="1"),
            _optional("moe_ep_size", "ep_size", "ep", "expert_parallel", default="1"),
            _Field("protocol", ("protocol",), text=True, default=_PROTOCOL),
            _time("ttft_ms", "ttft", "mean_ttft", "median_ttft", "time_to_first_token", per_us=1e-3),
            _time("tpot_ms", "tpot", "mean_tpot", "median_tpot", "time_per_output_token", per_us=1e-3),
        ),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """The facts that are given beside the files, for those that do not say them."""

    device: str = ""
    dtype: str = ""

    def of(self, m: Measurement) -> Measurement:
        """*m* with what neither its columns nor its name say; it stays as it is where they say all."""
        if m.kind.startswith(("e2e_", "iteration")):
            return m
        device = "" if m.device else self.device
        dtype = "" if "dtype" in m.labels or m.kind.startswith("collective") else self.dtype
        notes = self.notes(device, dtype)
        return replace(
            m,
            device=device or m.device,
            dtype=format_of(dtype) if dtype else m.dtype,
            labels={**m.labels, **({"dtype": dtype} if dtype else {})},
            notes=(*(_less(note, "bf16") if dtype else note for note in m.notes), *notes),
        )

    @staticmethod
    def notes(device: str, dtype: str) -> tuple[str, ...]:
        """The facts that were taken from beside the file, in words."""
        taken = (("device", device), ("number format", dtype))
        return tuple(f"the file says no {what}: {value}, as given beside it" for what, value in taken if value)


def _less(note: str, assumed: str) -> str:
    """*note* of a file without one of the things that it says were assumed."""
    return note.replace(f"{assumed} and ", "").replace(f": {assumed} assumed", "")


@dataclass(frozen=True, slots=True)
class _Fit:
    """The match of a table's columns with a kind."""

    kind: str
    columns: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """Field -> its column as normalised, and what its numbers are multiplied by."""
    lacks: tuple[str, ...] = ()
    unitless: tuple[str, ...] = ()
    twice: tuple[tuple[str, str], ...] = ()
    strange: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        return not (self.lacks or self.unitless or self.twice or self.strange)

    @property
    def needed(self) -> int:
        """Needed quantities that are there."""
        return sum(f.default is None and f.name in self.columns for f in OWN[self.kind].fields)

    def sentence(self) -> str:
        """The fault, after "for a table of this kind it"."""
        parts = []
        if self.lacks:
            parts.append(f"lacks {' and '.join(self.lacks)}")
        if self.unitless:
            parts.append(f"has {self.unitless[0]} without a unit (name it {_with_units(self.unitless[0])})")
        if self.twice:
            parts.append(f"says the same with {self.twice[0][0]} and {self.twice[0][1]} (keep one)")
        if self.strange:
            which = "the unknown column" if len(self.strange) == 1 else "the unknown columns"
            parts.append(f"has {which} {', '.join(self.strange[:3])} (meta.{self.strange[0]} would be passed over)")
        return " and ".join(parts)


def _with_units(column: str) -> str:
    units = ("bytes", "kib", "mib") if column in ("message", "size", "message_size") else ("us", "ms", "s")
    return f"{column}_{units[0]}, {column}_{units[1]} or {column}_{units[2]}"


def _plain(name: str) -> str:
    """A header's name as compared: 'Latency (ms)' is latency_ms."""
    return re.sub(r"[\s\-()\[\]/]+", "_", name.strip().lower().replace("µ", "u").replace("μ", "u")).strip("_")


def _fit(kind: str, names: Sequence[str]) -> _Fit:
    columns: dict[str, tuple[str, float]] = {}
    unitless, twice, strange = [], [], []
    for name in names:
        if name.startswith(_PASSED_OVER):
            continue
        for known in OWN[kind].known:
            factor = known.factor(name)
            if factor is None:
                continue
            if factor != factor:
                unitless.append(name)
            elif known.name in columns:
                twice.append((columns[known.name][0], name))
            columns.setdefault(known.name, (name, factor))
            break
        else:
            strange.append(name)
    lacks = [f.name for f in OWN[kind].fields if f.default is None and f.name not in columns]
    return _Fit(kind, columns, tuple(lacks), tuple(unitless), tuple(twice), tuple(strange))


def kind_of(header: Sequence[str]) -> _Fit:
    """The kind that a table with these columns is; ValueError in a sentence that says which are near and what each lacks."""
    names = [_plain(name) for name in header]
    fits = sorted((_fit(kind, names) for kind in OWN), key=lambda fit: (not fit.good, -fit.needed))
    if fits[0].good:
        return fits[0]
    near = [fit for fit in fits if 2 * fit.needed >= sum(f.default is None for f in OWN[fit.kind].fields)]
    near.sort(key=lambda fit: len(fit.lacks) + len(fit.unitless) + len(fit.twice) + len(fit.strange))
    if not near:
        shown = ", ".join(header[:6]) + (", ..." if len(header) > 6 else "")
        raise ValueError(
            f"its columns ({shown}) are those of no kind of measurement; a table of one's own is "
            + "; or ".join(f"{kind}: {', '.join(_needs(kind))}" for kind in OWN)
        )
    near = [fit for fit in near if len(fit.lacks) <= len(near[0].lacks) + 1][:3]
    raise ValueError(
        "its columns fit no kind of measurement: "
        + "; ".join(f"for {_article(fit.kind)} table it {fit.sentence()}" for fit in near)
    )


def _needs(kind: str) -> list[str]:
    return [f.name for f in OWN[kind].fields if f.default is None]


def _article(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiouM" else f"a {kind}"


def format_of(word: str) -> str:
    """The format called *word*, as `Measurement.dtype` has it; ValueError for one that is not known."""
    plain = word.strip().lower().removeprefix("torch.").replace("float8_e4m3fn", "fp8").replace("e4m3", "fp8")
    plain = {"half": "fp16", "float": "fp32", "fp8_fp8": "fp8", "w4afp8": "int4_fp8"}.get(plain, plain)
    short = plain.replace("_", "")
    known = {name.replace("_", ""): name for name in PRECISIONS} | SAME_FORMAT
    if short not in known:
        raise ValueError(f"{word!r} is not a number format; give one of {', '.join(PRECISIONS)}")
    return known[short]


def read_own(path: str | Path, *, said: Said | None = None, strict: bool = True) -> list[Measurement]:
    """The measurements of one table, one for each device, format and software in it, from CSV or Parquet.

    ValueError names the file, and in a sentence what its columns lack or which cells do not fit. Without *strict* rows that
    do not fit are left out and counted in `Measurement.refused`.
    """
    path = Path(path)
    header, rows, lines = _read_parquet(path) if path.suffix.lower() == ".parquet" else read_csv(path)
    try:
        fit = kind_of(header)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None
    table = _Table(path, header, rows, lines, fit, strict)
    columns = {f.name: table.column(f) for f in OWN[fit.kind].fields}
    with np.errstate(divide="ignore", invalid="ignore"):  # cells that are refused already
        for wrong, reason in _impossible(fit.kind, columns):
            table.refuse(wrong, reason)
    labels = _labels(table, said or Said())
    keep = table.refusals.kept()
    columns, labels = {name: values[keep] for name, values in columns.items()}, labels.of(keep)
    return [_serving(table, columns, labels)] if fit.kind == "serving" else _by_label(table, columns, labels)


class _Labels(NamedTuple):
    """A word for each row of a table, blank where nothing says it."""

    device: np.ndarray
    dtype: np.ndarray
    source: np.ndarray
    version: np.ndarray

    def of(self, rows: np.ndarray) -> _Labels:
        """The words of *rows*, a mask."""
        return _Labels(*(words[rows] for words in self))


def _labels(table: _Table, said: Said) -> _Labels:
    """The words of columns, or else of the file's name, or else *said* beside it; *table* notes what comes from elsewhere."""
    own = {f.name: table.labels(f) for f in _LABELS}
    named, kind = hints(table.path.stem), table.fit.kind
    device = table.checked("device", own["device"], named.get("device", "") or said.device, _device)
    dtype = table.checked("dtype", own["dtype"], named.get("dtype", "") or said.dtype, _format_word)
    source = table.checked("source", own["source"], named.get("source", ""), _software)
    if kind != "collective" and (source == "").any():
        table.assumed.append(f"{default_stack().title}'s kernels" if kind != "serving" else default_stack().title)
        source = np.where(source == "", default_stack().name, source)
    beside = {
        name: given if not named.get(name) and (own[name] == "").any() else ""
        for name, given in (("device", said.device), ("dtype", "" if kind == "collective" else said.dtype))
    }
    table.beside = said.notes(**beside)
    return _Labels(device, dtype, source, np.where(own["version"] == "", named.get("version", ""), own["version"]))


def _by_label(table: _Table, columns: dict[str, np.ndarray], labels: _Labels) -> list[Measurement]:
    """A measurement of kernels for each combination of labels; where some differ, the path says which."""
    if table.fit.kind != "collective" and (labels.dtype == "").any():
        table.assumed.append("bf16")
    keys = list(zip(*(words.tolist() for words in labels), strict=True))
    differ = [len(set(words)) > 1 for words in zip(*keys, strict=True)]
    found = []
    for key in sorted(set(keys)):
        mask = np.array([each == key for each in keys])
        made = _kernels(table, {n: c[mask] for n, c in columns.items()}, key)
        which = ", ".join(word or "unsaid" for word, several in zip(key, differ, strict=True) if several)
        found.append(replace(made, path=table.path.with_name(f"{table.path.name} ({which})")) if which else made)
    # What belongs to the whole table is said once.
    return [found[0], *(replace(each, refused={}, notes=()) for each in found[1:])]


def _kernels(table: _Table, columns: dict[str, np.ndarray], key: tuple[str, str, str, str]) -> Measurement:
    device, word, source, version = key
    kind = OWN[table.fit.kind].kind
    n = len(columns["latency_us"])
    if kind == "collectives_nccl":
        columns["collective"] = np.array([_plain(str(each)).replace("_", "") for each in columns["collective"]])
        columns["collective"] = np.array([_COLLECTIVES.get(each, each) for each in columns["collective"].tolist()])
        columns, source = columns | {"dtype": np.full(n, word or "bf16")}, "nccl"
    if kind == "moe":
        columns["moe_dtype"] = np.full(n, _MOE_FORMATS.get(word or "bf16", word))
    return Measurement(
        path=table.path,
        kind=kind,
        device=device,
        source=source,
        version=version,
        dtype=format_of(word or "bf16"),
        labels={"device": device, "source": source, **({"dtype": word} if word else {})},
        columns=columns,
        measured_s=columns["latency_us"] * 1e-6,
        refused=table.refusals.refused,
        notes=table.notes(),
    )


_COLLECTIVES = {
    "allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter", "alltoall": "alltoall",
    "sendrecv": "sendrecv",
}  # fmt: skip
_MOE_FORMATS = {
    "bf16": "bfloat16", "fp16": "float16", "int4": "int4_wo", "int4_g32": "int4_wo", "int4_fp8": "w4afp8",
    "mxfp4": "w4a16_mxfp4",
}  # fmt: skip
_GEMM_MODES = {"bf16": "bfloat16", "fp16": "float16", "int4": "int4_wo", "int8": "int8_wo"}


def _impossible(kind: str, c: Mapping[str, np.ndarray]) -> Iterator[tuple[np.ndarray, str]]:
    """Rows of a *kind* of table whose cells fit one by one and not together, with what is wrong."""
    if kind in ("prefill attention", "decode attention"):
        yield c["num_heads"] % c["num_kv_heads"] != 0, "num_heads must be a multiple of num_kv_heads"
    elif kind == "collective":
        yield c["num_gpus"] < 2, "a collective takes at least 2 GPUs"
    elif kind == "MoE":
        yield c["topk"] > c["num_experts"], "a token cannot choose more experts (topk) than there are (num_experts)"
        yield c["num_experts"] % c["moe_ep_size"] != 0, "moe_ep_size must divide num_experts"
        yield c["inter_size"] % c["moe_tp_size"] != 0, "moe_tp_size must divide inter_size"


def _serving(table: _Table, columns: dict[str, np.ndarray], labels: _Labels) -> Measurement:
    if (labels.device == "").any():
        raise ValueError(
            f"{table.path.name}: a serving table says the device, which neither a column nor its name does here"
        )
    if "protocol" not in table.fit.columns:
        table.assumed.append(f"the protocol {_PROTOCOL}")
    if (labels.dtype == "").any():
        table.assumed.append("the model's own format")
    n = len(labels.device)
    blank = np.full(n, "")
    sizes = columns["tp_size"] * columns["attention_dp_size"]
    made = columns | {
        "system": labels.device,
        "backend": labels.source,
        "backend_version": labels.version,
        "precision": blank,
        "gemm_quant_mode": np.array([_GEMM_MODES.get(word, word) for word in labels.dtype.tolist()]),
        "moe_quant_mode": blank,
        "mode": np.full(n, "agg"),
        "batch_size": columns["concurrency"],
        "moe_tp_size": np.maximum(sizes // columns["moe_ep_size"], 1.0),
    }
    return Measurement(
        path=table.path,
        kind=OWN["serving"].kind,
        device="",
        source="",
        version="",
        dtype="bf16",
        labels={},
        columns=made,
        measured_s=None,
        refused=table.refusals.refused,
        notes=table.notes(),
    )


class _Table:
    """Cells of a table, and which rows of it are refused."""

    def __init__(
        self, path: Path, header: Sequence[str], rows: list[list[str]], lines: np.ndarray, fit: _Fit, strict: bool
    ) -> None:
        self.path, self.fit, self._n_rows = path, fit, len(rows)
        self._names = [_plain(name) for name in header]
        self._shown = dict(zip(self._names, header, strict=True))
        self.refusals = Refusals(path.name, lines, strict)
        self.assumed: list[str] = []
        """In words, what was assumed because nothing says it."""
        self.beside: tuple[str, ...] = ()
        """Notes on what was said beside the file."""
        width = np.array([len(row) for row in rows])
        self.refuse(width != len(header), f"a line has not the {len(header)} cells of the header; truncated file?")
        padded = [[*row, *[""] * len(header)][: len(header)] for row in rows]
        self._cells = dict(zip(self._names, zip(*padded, strict=True), strict=True))

    def refuse(self, mask: np.ndarray, reason: str) -> None:
        """Leaves the rows of *mask* out that are still in; ValueError where the table is strict."""
        self.refusals.refuse(mask, reason, f"{reason}; see line {{line}}, and repair or remove it")

    def labels(self, known: _Field) -> np.ndarray:
        """Words of a column as they stand; blank where the table has none."""
        column = self.fit.columns.get(known.name)
        cells = self._cells[column[0]] if column else [""] * self._n_rows
        return np.array([cell.strip() for cell in cells], dtype=object)

    def column(self, known: _Field) -> np.ndarray:
        """A column in the unit of its field; cells that do not fit refuse their rows."""
        if known.name not in self.fit.columns:
            assert known.default is not None
            return np.full(self._n_rows, known.default if known.text else float(known.default))
        name, factor = self.fit.columns[known.name]
        cells = [cell.strip() for cell in self._cells[name]]
        shown = self._shown[name]
        if known.text:
            values = np.array(cells, dtype=str)
            self.refuse(values == "", f"{shown} is blank")
            return values
        numbers = np.array([_number(cell) for cell in cells])
        wrong = np.isnan(numbers)
        if wrong.any():
            first = (
                cells[int(np.flatnonzero(wrong & ~self.refusals.bad)[0])] if (wrong & ~self.refusals.bad).any() else ""
            )
            self.refuse(wrong, f"{shown} must be a number; got {first!r}")
        self.refuse(np.isinf(numbers), f"{shown} must be finite")
        if known.least == 0.0 and known.units is not None:
            self.refuse(~(numbers > 0), f"{shown} must be positive")
        else:
            self.refuse(numbers * factor < known.least, f"{shown} must be at least {known.least:g}")
        return numbers * factor

    def checked(self, name: str, words: np.ndarray, otherwise: str, check: Callable[[str], str]) -> np.ndarray:
        """*words*, with *otherwise* where they are blank, each as *check* spells it; rows of others are refused."""
        spelt: dict[str, str] = {"": ""}
        for word in dict.fromkeys(str(each) or otherwise for each in words):
            try:
                spelt[word] = check(word) if word else ""
            except ValueError as error:
                self.refuse(np.array([(str(each) or otherwise) == word for each in words]), f"{name}: {error}")
                spelt[word] = ""
        return np.array([spelt[str(each) or otherwise] for each in words], dtype=str)

    def notes(self) -> tuple[str, ...]:
        read = f"read as {_article(self.fit.kind)} table by its columns"
        if self.assumed:
            read += f"; nothing says other: {' and '.join(self.assumed)} assumed"
        return read, *self.beside


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return float("nan")


def _device(word: str) -> str:
    try:
        return load_device(word).name
    except ValueError as error:
        try:
            return load_device(catalogue_name(word.lower())).name
        except ValueError:
            raise error from None


def _format_word(word: str) -> str:
    found = format_of(word)
    plain = word.strip().lower().removeprefix("torch.")
    return "fp16" if plain in ("fp16", "float16", "half") else found


def _software(word: str) -> str:
    found = re.fullmatch(rf"({SOFTWARE})[0-9.a-z]*", word.strip().lower())
    if not found:
        raise ValueError(f"{word!r} is not software whose kernels are known; give one of {SOFTWARE.replace('|', ', ')}")
    return found[1]


def _read_parquet(path: Path) -> tuple[list[str], list[list[str]], np.ndarray]:
    """Header, cells as text and row numbers; ValueError for what is no Parquet or has no rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ValueError(f"{path.name}: the file is no Parquet: {str(error).splitlines()[0]}") from None
    if not table.num_rows or not table.num_columns:
        raise ValueError(f"{path.name}: the table has no row")
    columns = [["" if cell is None else str(cell) for cell in column.to_pylist()] for column in table.columns]
    return table.column_names, [list(row) for row in zip(*columns, strict=True)], np.arange(1, table.num_rows + 1)
