"""Measured steps as a file has them: columns in, points of prompts and of decodes out."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hwmodels.steps.surface import Floats, Points
from hwmodels.steps.table import keys_of_prompts

Columns = Mapping[str, Sequence[Any]]


@dataclass(frozen=True, kw_only=True)
class StepRows:
    """The measured steps of one deployment, and what their file says of it."""

    kind: str
    prompts: Points
    decodes: Points
    says: Mapping[str, str]
    """Facts about the deployment that the file states, by the names of its columns."""
    notes: tuple[str, ...] = ()


IDENTITY = (
    *("cell_id", "model_path", "model", "system", "gpu", "backend", "backend_version", "weight_quantization"),
    *("gemm_quant_mode", "moe_quant_mode", "fmha_quant_mode", "comm_quant_mode", "kv_cache_dtype"),
    *("tp", "pp", "dp", "moe_tp", "moe_ep", "cp", "moe_backend", "attention_backend", "enable_wideep", "enable_eplb"),
)
"""Columns that say which deployment a row is of."""
PROVENANCE = (
    *("source_plan_sha256", "collector_attempt_id", "runtime_run_id", "runtime_grid_digest", "partition_policy"),
    *("kv_seed_regime", "measurement_policy", "warmup_repeats", "measurement_repeats"),
)
"""Columns that say how a row was taken, and change nothing."""
_FORWARD = ("workload_kind", "batch_size", "total_prefill_tokens", "total_kv_read_tokens", "latency_ms")
_PLAIN = {
    "phase": ("phase", "workload_kind"),
    "batch_size": ("batch_size", "batch"),
    "new_tokens": ("new_tokens",),
    "cached_tokens": ("cached_tokens", "past_kv"),
    "latency": ("latency_ms", "latency_us", "latency_s"),
}
"""The columns of a plain table by what they are; tokens are those of each sequence."""
_SECONDS = {"latency_ms": 1e-3, "latency_us": 1e-6, "latency_s": 1.0}
_KINDS = ("prefill", "decode")


def is_forward(columns: Iterable[str]) -> bool:
    """Whether these are the columns of aiconfigurator's whole-forward tables, whose tokens are those of the whole batch."""
    return "total_kv_read_tokens" in columns


def read_csv(file: Path) -> Columns:
    """The columns of a CSV file as texts, lines that begin with # left out."""
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"{file} is no text in UTF-8") from None
    reader = csv.reader(line for line in lines if line.strip() and not line.startswith("#"))
    head = [name.strip() for name in next(reader, [])]
    if len(set(head)) < len(head):
        raise ValueError(f"{file} has two columns of one name")
    rows = list(reader)
    short = next((i for i, row in enumerate(rows) if len(row) != len(head)), None)
    if short is not None:
        raise ValueError(f"{file}: row {short + 1} has {len(rows[short])} values under {len(head)} columns")
    return {name: [row[i].strip() for row in rows] for i, name in enumerate(head)}


def forward_rows(columns: Columns, file: Path, where: Mapping[str, Any]) -> StepRows:
    """The steps of a table in the form of aiconfigurator and AISimulate: tokens are totals of a batch of equal sequences."""
    known = (*IDENTITY, *PROVENANCE, *_FORWARD)
    _check_columns(columns, _FORWARD, known, file)
    taken, says = _chosen(columns, file, where)
    policies = {str(columns["partition_policy"][i]) for i in taken} if "partition_policy" in columns else set()
    if policies - {"balanced_v1"}:
        raise ValueError(
            f"{file}: partition_policy is {', '.join(sorted(policies))}; sequences that differ are not read"
        )
    kinds = [str(columns["workload_kind"][i]) for i in taken]
    batch, new, read = (_numbers(columns, name, taken, file) for name in _FORWARD[1:4])
    seconds = _latencies(columns, "latency_ms", taken, file)
    decode = _are_decodes(kinds, taken, file)
    _check_counts(batch, np.where(decode, 1.0, new), read, taken, file)
    if (new[decode] > 0).any():
        raise ValueError(f"{file}: decode rows have prefill tokens; steps with both are not measured in this form")
    if len(set(zip(kinds, batch.tolist(), new.tolist(), read.tolist(), strict=True))) < len(kinds):
        raise ValueError(f"{file} measures one step twice; a whole-forward table has each step once")
    each = np.where(decode, batch, np.maximum(new, 1.0))
    keys = np.where(decode, np.maximum(read, batch) / batch, keys_of_prompts(each / batch, read / batch))
    points = Points(each, keys, seconds)
    return StepRows(kind="whole-forward table", prompts=points.at(~decode), decodes=points.at(decode), says=says)


def plain_rows(columns: Columns, file: Path, where: Mapping[str, Any]) -> StepRows:
    """The steps of a table with a batch, the new and the cached tokens of each of its sequences, and a latency."""
    names = {what: next((name for name in of if name in columns), "") for what, of in _PLAIN.items()}
    needed = [names[what] or of[0] for what, of in _PLAIN.items() if what != "phase"]
    _check_columns(columns, needed, (*IDENTITY, *(name for name in names.values() if name)), file)
    taken, says = _chosen(columns, file, where)
    batch, new, cached = (
        _numbers(columns, names[what], taken, file) for what in ("batch_size", "new_tokens", "cached_tokens")
    )
    seconds = _latencies(columns, names["latency"], taken, file)
    _check_counts(batch, new, cached, taken, file)
    decode = (new == 1) & (cached > 0)
    if names["phase"]:
        decode = _are_decodes([str(columns[names["phase"]][i]) for i in taken], taken, file)
        if (new[decode] != 1).any():
            raise ValueError(
                f"{file}: decode rows compute {new[decode].max():g} tokens a sequence; steps that verify drafted tokens are not "
                "read, so leave them out"
            )
    points = Points(batch * new, np.where(decode, cached + 1, keys_of_prompts(new, cached)), seconds)
    repeated = len(taken) - len(set(zip(decode.tolist(), batch.tolist(), new.tolist(), cached.tolist(), strict=True)))
    notes = (f"{file.name} measures {repeated} steps again: the median of each counts.",) if repeated else ()
    return StepRows(
        kind="table of steps", prompts=points.at(~decode), decodes=points.at(decode), says=says, notes=notes
    )


def _check_columns(columns: Columns, needed: Iterable[str], known: Sequence[str], file: Path) -> None:
    missing = [name for name in needed if name not in columns]
    if missing:
        raise ValueError(
            f"{file} has no column {', '.join(missing)}; a table of steps has {', '.join(of[0] for of in _PLAIN.values())} "
            "(_ms, _us or _s), phase being optional"
        )
    strange = [name for name in columns if name not in known]
    if strange:
        raise ValueError(
            f"{file} has a column {strange[0]}, which is not read, so that its rows may be of different things; leave it out, or "
            f"call what tells deployments apart by one of {', '.join(IDENTITY)}"
        )
    if not len(columns["batch_size" if "batch_size" in columns else "batch"]):
        raise ValueError(f"{file} has no rows")


def _chosen(columns: Columns, file: Path, where: Mapping[str, Any]) -> tuple[list[int], dict[str, str]]:
    """The rows of one deployment, and what says which it is; ValueError where *where* leaves none, or several."""
    identity = [name for name in IDENTITY if name in columns]
    for name in where:
        if name not in identity:
            raise ValueError(f"{file} has no column {name} that says whose rows they are; it has {', '.join(identity)}")
    n = len(next(iter(columns.values())))
    wanted = {name: str(value).lower() for name, value in where.items()}
    taken = [i for i in range(n) if all(str(columns[name][i]).lower() == text for name, text in wanted.items())]
    if not taken:
        found = "; ".join(f"{name} {', '.join(sorted({str(each) for each in columns[name]}))}" for name in where)
        raise ValueError(f"{file} has no rows with {_said(where)}; it has {found}")
    values = {name: sorted({str(columns[name][i]) for i in taken}) for name in identity}
    several = {name: of for name, of in values.items() if len(of) > 1 and name != "cell_id"}
    if several:
        name, of = next(iter(several.items()))
        raise ValueError(
            f"{file} has rows of several deployments: {name} is {', '.join(of)}; say which in hardware.where, such as "
            f"{{{name}: {of[0]}}}"
        )
    return taken, {name: of[0] for name, of in values.items() if name != "cell_id"}


def _said(where: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in where.items())


def _check(wrong: Iterable[Any], values: Sequence[Any] | Floats, must: str, taken: Sequence[int], file: Path) -> None:
    """ValueError that says what the values *must* be, and the first row whose value is *wrong*."""
    at = next((i for i, each in enumerate(wrong) if each), None)
    if at is not None:
        got = f"{values[at]:g}" if isinstance(values, np.ndarray) else repr(values[at])
        raise ValueError(f"{file}, row {taken[at] + 1}: {must}; got {got}")


def _are_decodes(kinds: Sequence[str], taken: Sequence[int], file: Path) -> Any:
    _check([kind not in _KINDS for kind in kinds], kinds, "a step's kind is prefill or decode", taken, file)
    return np.array([kind == "decode" for kind in kinds])


def _numbers(columns: Columns, name: str, taken: Sequence[int], file: Path) -> Floats:
    values = [columns[name][i] for i in taken]
    _check([not _is_number(value) for value in values], values, f"{name} is a number", taken, file)
    found = np.array([float(value) for value in values])
    _check(~np.isfinite(found), found, f"{name} is a finite number", taken, file)
    return found


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _latencies(columns: Columns, name: str, taken: Sequence[int], file: Path) -> Floats:
    found = _numbers(columns, name, taken, file)
    _check(found <= 0, found, f"{name} is above 0", taken, file)
    return found * _SECONDS[name]


def _check_counts(batch: Floats, new: Floats, cached: Floats, taken: Sequence[int], file: Path) -> None:
    """ValueError for batches or tokens that are no counts."""
    for values, least, what in ((batch, 1, "sequences"), (new, 1, "new tokens"), (cached, 0, "cached tokens")):
        must = f"a step has a whole number of {what}, at least {least}"
        _check((values < least) | (values % 1 != 0), values, must, taken, file)
