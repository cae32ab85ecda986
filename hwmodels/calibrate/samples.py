"""Samples on disk: an append-only log that survives being killed, and measured files as the reader wants them."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hwmodels.calibrate.backend import CalibrationError, Facts, Operation

FORMAT = 1
LOG = "samples.jsonl"
FOLDER = "measured"
_WIDEST_VERIFY = 16  # query tokens beside a past up to which attention is a decode, above a prompt chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One operation's timings: seconds of one run, each repeat of them, and the wall time that taking them took."""

    operation: Operation
    seconds: tuple[float, ...]
    spent_s: float

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Interquartile range over the median."""
        if len(self.seconds) < 4:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / self.median_s

    @property
    def outliers(self) -> int:
        """Repeats more than half above the median."""
        return sum(s > 1.5 * self.median_s for s in self.seconds)


class Log:
    """The log of one device in *folder*; made where there is none.

    ValueError where the folder's samples are of another device, back end, thread count or a newer format.
    """

    def __init__(self, folder: str | Path, facts: Facts, *, taken_on: str) -> None:
        self.path = Path(folder) / LOG
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and self.path.stat().st_size:
            header, self.samples, good_bytes = _read(self.path)
            self.facts = _facts(self.path, header)
            if self.facts.identity != facts.identity:
                was, now = _named(self.facts), _named(facts)
                raise CalibrationError(
                    f"{self.path} holds samples of {was}, and this run is on {now}; give another --out"
                )
            # A torn last line is what a killed run was writing: its operation is timed again.
            with self.path.open("r+b") as file:
                file.truncate(good_bytes)
        else:
            self.facts, self.samples = facts, []
            self._append({"format": FORMAT, "taken_on": taken_on, "facts": dataclasses.asdict(facts)})

    def add(self, sample: Sample) -> None:
        """Write one sample; it is on the disk when this returns."""
        self._append(
            {
                "kind": sample.operation.kind,
                "dtype": sample.operation.dtype,
                "shape": dict(sample.operation.shape),
                "seconds": [float(f"{s:.6g}") for s in sample.seconds],
                "spent_s": round(sample.spent_s, 4),
            }
        )
        self.samples.append(sample)

    def _append(self, entry: Mapping[str, Any]) -> None:
        with self.path.open("ab") as file:
            file.write(json.dumps(entry).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def read_log(folder: str | Path) -> tuple[Facts, str, list[Sample]]:
    """The facts about what was timed, the ISO date of the start, and the samples of a folder; ValueError where there are none."""
    path = Path(folder) / LOG
    if not path.exists():
        raise CalibrationError(f"{path} does not exist; take samples first with rooftrace calibrate --out {folder}")
    header, samples, _ = _read(path)
    return _facts(path, header), str(header.get("taken_on", "")), samples


def _read(path: Path) -> tuple[dict[str, Any], list[Sample], int]:
    good, header, samples = 0, None, []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            break
        try:
            entry = json.loads(line)
            if header is None:
                header = dict(entry)
                if int(header["format"]) > FORMAT:
                    raise CalibrationError(
                        f"{path}: written in format {header['format']}, this release reads up to {FORMAT}; "
                        "update rooftrace"
                    )
            else:
                samples.append(_sample(entry))
        except CalibrationError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise CalibrationError(
                f"{path}: line {number} is damaged ({error}); delete that line to go on without it"
            ) from None
        good += len(line)
    if header is None:
        raise CalibrationError(f"{path} has no complete first line; delete the file to start again")
    return header, samples, good


def _sample(entry: Mapping[str, Any]) -> Sample:
    seconds = tuple(float(s) for s in entry["seconds"])
    if not seconds or not all(math.isfinite(s) and s > 0 for s in seconds):
        raise ValueError("seconds must be positive finite numbers")
    operation = Operation.of(entry["kind"], entry["dtype"], **{k: int(v) for k, v in entry["shape"].items()})
    return Sample(operation=operation, seconds=seconds, spent_s=float(entry["spent_s"]))


def _facts(path: Path, header: Mapping[str, Any]) -> Facts:
    try:
        facts = dict(header["facts"])
        return Facts(**{**facts, "dtypes": tuple(facts["dtypes"])})
    except (KeyError, TypeError) as error:
        raise CalibrationError(f"{path}: the first line does not describe a device ({error}); start again") from None


def _named(facts: Facts) -> str:
    return (
        f"{facts.title} ({facts.device}, {facts.cores} cores, {facts.clock} clock) with {facts.backend} "
        f"{facts.backend_version}"
    )


def write_measured(samples: Iterable[Sample], facts: Facts, folder: str | Path) -> list[Path]:
    """Medians as CSV files named and headed as `hwmodels.measured` reads them, in `folder`/measured; their paths."""
    software = f"{facts.backend}{facts.backend_version}"
    tables: dict[str, tuple[tuple[str, ...], list[tuple[Any, ...]]]] = {}
    for sample in samples:
        op = sample.operation
        s = dict(op.shape)
        name, columns = _row(op, s, facts, software)
        times = {
            "latency_us": f"{sample.median_s * 1e6:.6g}",
            "min_us": f"{min(sample.seconds) * 1e6:.6g}",
            "max_us": f"{max(sample.seconds) * 1e6:.6g}",
            "repeats": len(sample.seconds),
        }
        row = {**columns, **times}
        head, rows = tables.setdefault(name, (tuple(row), []))
        rows.append(tuple(row[column] for column in head))
    out = Path(folder) / FOLDER
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, (head, rows) in sorted(tables.items()):
        paths.append(out / name)
        with paths[-1].open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(head)
            writer.writerows(sorted(rows, key=lambda row: [(isinstance(c, str), c) for c in row]))
    return paths


def _row(op: Operation, s: Mapping[str, int], facts: Facts, software: str) -> tuple[str, dict[str, Any]]:
    where, dtype = facts.label, op.dtype
    if op.kind == "gemm":
        return f"gemm_{where}_{dtype}_{software}.csv", {"m": s["m"], "n": s["n"], "k": s["k"]}
    if op.kind == "attention":
        heads = {"num_heads": s["heads"], "num_kv_heads": s["kv_heads"], "head_dim": s["head_dim"]}
        if s["past"] and s["query"] <= _WIDEST_VERIFY:
            columns = {"batch_size": s["batch"], "kv_len": s["past"], **heads, "query_len": s["query"]}
            return f"attention_decode_{where}_{dtype}_{software}.csv", columns
        columns = {"batch_size": s["batch"], "seq_len": s["query"], **heads, "past_len": s["past"]}
        return f"attention_prefill_{where}_{dtype}_{software}.csv", columns
    if op.kind == "all_reduce":
        columns = {
            "collective": "all_reduce", "dtype": dtype, "num_gpus": s["devices"], "message_bytes": s["bytes"],
        }  # fmt: skip
        return f"collectives_nccl_{where}.csv", columns
    if op.kind in ("launch", "host", "graph"):
        layers = s.get("layers", 0)
        return f"host_{where}_{dtype}_{software}.csv", {"op": op.kind, "layers": layers}
    columns = {"model": "", "op": op.kind, "tp": 1, "m": s["rows"], "width": s["width"], "gated": False}
    return f"elementwise_{where}_{dtype}_{software}.csv", columns


def median_spread(samples: Sequence[Sample]) -> float:
    """Median over operations of interquartile range over median; 0 without repeats."""
    return statistics.median([s.spread for s in samples if len(s.seconds) >= 4] or [0.0])
