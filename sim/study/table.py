"""The tidy tables of a sweep, written piece by piece from the stored runs."""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.results import reading
from sim.study.notes import Noted, Notes
from sim.study.points import Point, Run, Sweep
from sim.study.statistics import LEVEL, alike, mean_interval
from sim.study.store import Store
from workloads.write import open_whole

if TYPE_CHECKING:
    import pyarrow as pa

HALF_WIDTH = ".half_width"
SATURATED = "saturated"
UNSTEADY = ("ttft_s.", "e2el_s.", "queue_s.")
"""Latencies that grow with the length of the run where arrivals outrun the deployment."""
KEPT = ("slo_kept", "_s.kept")
"""Verdicts on limits of means and percentiles."""
_HELD = re.compile(r"\b(ttft|e2el)_\w+_s\.value_s$")
_NOT_ESTIMATES = ("intervals.", "trust.", "memory.", "request_limits.")
"""Figures that no mean over replications estimates: they have no half-width."""
_NOT_RESULTS = ("wall_s",)  # differs from run to run of the same scenario
_ROWS_A_GROUP = 512


def flatten(summary: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested summary as dotted keys; lists become JSON text.

    >>> flatten({"ttft_s": {"p50": 0.1}, "iterations": 3})
    {'ttft_s.p50': 0.1, 'iterations': 3}
    """
    flat: dict[str, Any] = {}
    for key, value in summary.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        elif isinstance(value, list | tuple):
            flat[prefix + key] = json.dumps(value)
        else:
            flat[prefix + key] = value
    return flat


def results_of(record: Mapping[str, Any], axes: Collection[str] = ()) -> dict[str, Any]:
    """The dotted results of one stored run but those called as one of *axes*, whose column says it; empty where it failed."""
    if "summary" not in record:
        return {}
    found = {"gpus": record["gpus"], **flatten(record.get("fleet", {}), "fleet."), **flatten(record["summary"])}
    return {key: value for key, value in found.items() if key not in _NOT_RESULTS and key not in axes}


def aggregate(runs: Sequence[Mapping[str, Any]], *, half_widths: bool = True, level: float = LEVEL) -> dict[str, Any]:
    """One point's row from the dotted results of its finished replications: means, and half-widths beside them.

    `saturated` is the verdict of most replications that have one; where it is true, latencies that would only tell
    how long the run was are None. Half-widths are None where the replications do not differ at all: nothing in them
    is random, and zero would claim a certainty that is not there. A text is kept where all agree.
    """
    row: dict[str, Any] = {}
    keys = list(dict.fromkeys(key for run in runs for key in run))
    certain = alike(runs)
    verdicts = [run[SATURATED] for run in runs if run.get(SATURATED) is not None]
    saturated = 2 * sum(verdicts) > len(verdicts) if verdicts else None
    for key in keys:
        values = [run[key] for run in runs if run.get(key) is not None]
        if key == SATURATED:
            row[key] = saturated
        elif key.endswith(KEPT):
            # As a rate is judged: missed where most of the replications miss it.
            row[key] = 2 * sum(values) >= len(values)
        elif any(isinstance(value, str | bool) for value in values):
            row[key] = values[0] if all(value == values[0] for value in values) else None
        elif (saturated and (key.startswith(UNSTEADY) or _HELD.search(key))) or not values:
            row[key] = None
            if half_widths and _estimated(key):
                row[key + HALF_WIDTH] = None
        elif not _estimated(key):
            row[key] = sum(values) / len(values)
        else:
            interval = mean_interval(values, level=level)
            row[key] = interval.mean
            if half_widths:
                known = not certain and not math.isnan(interval.half_width)
                row[key + HALF_WIDTH] = interval.half_width if known else None
    return row


def _estimated(key: str) -> bool:
    return not key.startswith(_NOT_ESTIMATES)


class RunIndex:
    """Keys and errors of a sweep's runs in order, in a file: working them out again costs a validation each."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  (closed by __exit__)

    def add(self, run: Run) -> None:
        self._file.write(f"{json.dumps([run.key, run.error])}\n")

    def __iter__(self) -> Iterator[tuple[str, str]]:
        self._file.seek(0)
        for line in self._file:
            key, error = json.loads(line)
            yield key, error

    def __enter__(self) -> RunIndex:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def write_tables(sweep: Sweep, store: Store, folder: Path, index: RunIndex) -> tuple[dict[str, int], tuple[Noted, ...]]:
    """Write results.parquet and .csv (a row a point), runs.parquet (a row a run) and, if any, failures.csv.

    Returns counts: points, runs, failed (runs), saturated (points), alike (points whose replications do not differ);
    and what the runs note, with the points that it holds for.
    Two passes over the stored runs, one row at a time: memory does not grow with their number.
    """
    axes = list(dict.fromkeys([*sweep.columns(), *sweep.axes]))
    keys, kinds = _survey(sweep, store, axes, index)
    half = sweep.replications > 1
    metrics: dict[str, str] = {}
    for key, kind in keys.items():
        metrics[key] = kind
        if half and kind == "number" and _estimated(key):
            metrics[key + HALF_WIDTH] = "number"
    counts: dict[str, int] = dict.fromkeys(("points", "runs", "failed", "saturated", "alike"), 0)
    shown = {key: kinds[key] for key in axes}
    notes = Notes()
    point_columns = {**shown, "replications": "whole", "failed": "whole", "error": "text", **metrics}
    run_columns = {"point": "whole", **shown, "run_seed": "whole", "key": "text", "error": "text", **keys}
    with (
        _table(folder / "results.parquet", point_columns) as add_point,
        _csv(folder / "results.csv", list(point_columns)) as add_line,
        _table(folder / "runs.parquet", run_columns) as add_run,
        _failures(folder / "failures.csv", axes) as add_failure,
    ):
        for number, (point, records) in enumerate(_points(sweep, store, index)):
            varied = {key: _cell(value, kinds[key]) for key, value in {**point.settings, **point.meta}.items()}
            finished, errors, noted = [], [], []
            for replication, (key, record) in enumerate(records):
                seed = record.get("seed", sweep.base.seed + replication)
                results, error = results_of(record, axes), record.get("error")
                row = {"point": number, **varied, "run_seed": seed, "key": key, "error": error, **results}
                add_run(row)
                if error is None:
                    finished.append(results)
                    noted += record["notes"]
                else:
                    errors.append(error)
                    add_failure({**varied, "run_seed": seed, "error": error})
            row = aggregate(finished, half_widths=half)
            head = {"replications": len(finished), "failed": len(errors), "error": errors[0] if errors else None}
            add_point({**varied, **head, **row})
            add_line({**varied, **head, **row})
            notes.add(", ".join(f"{key}={value}" for key, value in varied.items()), noted)
            counts["points"] += 1
            counts["runs"] += len(records)
            counts["failed"] += len(errors)
            counts["saturated"] += bool(row.get(SATURATED))
            counts["alike"] += alike(finished)
    return counts, notes.found


def _points(sweep: Sweep, store: Store, index: RunIndex) -> Iterator[tuple[Point, list[tuple[str, Mapping[str, Any]]]]]:
    runs = iter(index)
    for point in sweep:
        found = itertools.islice(runs, sweep.replications)
        yield point, [(key, {"error": error} if error else store.get(key)) for key, error in found]


def _survey(sweep: Sweep, store: Store, axes: Sequence[str], index: RunIndex) -> tuple[dict[str, str], dict[str, str]]:
    """Result keys in order of appearance with their kinds, and the kinds of the axes' columns."""
    keys: dict[str, str] = {}
    kinds = dict.fromkeys(axes, "")
    for point, records in _points(sweep, store, index):
        for key, value in {**point.settings, **point.meta}.items():
            kinds[key] = _wider(kinds[key], _kind(value))
        for _, record in records:
            for key, value in results_of(record, axes).items():
                kind = "flag" if key == SATURATED else _kind(value)
                keys[key] = _wider(keys.get(key, ""), "number" if kind == "whole" else kind)
    return {key: kind or "number" for key, kind in keys.items()}, {key: kind or "text" for key, kind in kinds.items()}


def _kind(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "flag"
    if isinstance(value, int):
        return "whole" if abs(value) < 2**63 else "number"
    return "number" if isinstance(value, float) else "text"


def _wider(first: str, second: str) -> str:
    """The kind that holds values of both."""
    if first == second or not second:
        return first
    if not first:
        return second
    return "number" if {first, second} == {"whole", "number"} else "text"


def _cell(value: Any, kind: str) -> Any:
    if kind != "text" or value is None or isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        value = dict(value)
    return json.dumps(value)


def _types() -> dict[str, pa.DataType]:
    import pyarrow as pa

    return {"number": pa.float64(), "whole": pa.int64(), "flag": pa.bool_(), "text": pa.string()}


@contextmanager
def _table(path: Path, columns: Mapping[str, str]) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = _types()
    schema = pa.schema([(name, types[kind]) for name, kind in columns.items()])
    rows: list[Mapping[str, Any]] = []
    with open_whole(path, binary=True) as file, pq.ParquetWriter(file, schema) as writer:

        def flush() -> None:
            # Column by column: from_pylist would import pandas, 0.25 s that nothing else needs.
            arrays = [pa.array([row.get(name) for row in rows], type=schema.field(name).type) for name in columns]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
            rows.clear()

        def add(row: Mapping[str, Any]) -> None:
            rows.append({name: float(v) if columns[name] == "number" and v is not None else v
                         for name, v in row.items()})  # fmt: skip
            if len(rows) == _ROWS_A_GROUP:
                flush()

        yield add
        flush()


@contextmanager
def _csv(path: Path, columns: Sequence[str]) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    with open_whole(path) as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        yield lambda row: writer.writerow(["" if row.get(name) is None else row[name] for name in columns])


@contextmanager
def _failures(path: Path, axes: Sequence[str]) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A CSV file that is there only where something failed."""
    columns = [*axes, "run_seed", "error"]
    n = 0
    with _csv(path, columns) as write:

        def add(row: Mapping[str, Any]) -> None:
            nonlocal n
            n += 1
            write(row)

        yield add
    if not n:
        path.unlink()


def read_failures(path: Path, n: int) -> list[dict[str, str]]:
    """The first *n* failed runs listed in *path*; OutputError where it is missing or damaged."""
    with reading(path), path.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        if "error" not in (rows.fieldnames or ()):
            raise ValueError("it has no column error")
        return list(itertools.islice(rows, n))
