"""Samples of metrics over time from files: scrapes in Prometheus' text format, answers of its API, tables with a row a scrape."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.bench.formats.prometheus import text_sample
from sim.errors import RooftraceError

FloatArray = NDArray[np.float64]
_UNIX = re.compile(r"(?<!\d)(\d{9,11}(?:\.\d+)?)(?!\d)")
_ISO = re.compile(r"(?<!\d)(\d{4})-?(\d\d)-?(\d\d)[T_](\d\d)[:-]?(\d\d)[:-]?(\d\d)(?:\.\d+)?(Z|[+-]\d\d:?\d\d)?")
_MS = 1e11
"""Time stamps above this are in milliseconds, as Prometheus' text format has them; OpenMetrics has seconds."""
_TIME = "t_s"
_OWN = ("run", "instance", "model_name")
"""Columns of a table that are labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Samples of one metric with one set of labels, in order of time."""

    metric: str
    labels: Mapping[str, str]
    at_s: FloatArray
    """Unix time, or seconds from the start of a table."""
    values: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """Labels that samples must have: the way to one deployment among several."""

    labels: Mapping[str, str]

    @classmethod
    def of(cls, texts: Iterable[str]) -> Matching:
        """From LABEL=VALUE texts; RooftraceError for another."""
        found = {}
        for text in texts:
            label, equals, value = text.partition("=")
            if not equals or not label:
                raise RooftraceError(f"--match {text!r}: expected LABEL=VALUE, such as model_name=llama-3.1-8b")
            found[label.strip()] = value.strip().strip('"')
        return cls(labels=found)

    def keeps(self, labels: Mapping[str, str]) -> bool:
        return all(labels.get(label) == value for label, value in self.labels.items())


class Collected:
    """Samples as they come in, which `series` puts in order."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._samples: dict[tuple[str, tuple[tuple[str, str], ...]], list[tuple[float, float]]] = {}

    def add(self, metric: str, labels: Mapping[str, str], at_s: float, value: float) -> None:
        self._samples.setdefault((metric, tuple(sorted(labels.items()))), []).append((at_s, value))

    def series(self, matching: Matching) -> list[Series]:
        """All that *matching* keeps; where two samples are of one instant the later one counts."""
        found = []
        for (metric, labels), samples in self._samples.items():
            if matching.keeps(dict(labels)):
                unique = sorted(dict(samples).items())
                pairs = np.array(unique, dtype=np.float64)
                found.append(Series(metric=metric, labels=dict(labels), at_s=pairs[:, 0], values=pairs[:, 1]))
        return found


def read_files(files: Sequence[Path], matching: Matching, notes: list[str] | None = None) -> list[Series]:
    """The samples of *files*, and into *notes* what their times are by; RooftraceError for a file that holds none."""
    collected = Collected()
    collected.notes = [] if notes is None else notes
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RooftraceError(f"{path} cannot be read: {error}") from None
        _read_one(path, text, collected)
    return collected.series(matching)


def _read_one(path: Path, text: str, collected: Collected) -> None:
    head = text.lstrip()[:1]
    if head in ("{", "["):
        try:
            read_answer(json.loads(text), collected)
        except (json.JSONDecodeError, KeyError, TypeError, ValueError):
            raise RooftraceError(f"{path}: it is no answer of Prometheus' /api/v1/query_range") from None
    elif path.suffix == ".csv":
        _read_table(path, text, collected)
    else:
        _read_scrape(path, text, collected)


def read_answer(answer: Mapping[str, Any], collected: Collected) -> None:
    """The series of an answer of Prometheus' API into *collected*; KeyError, TypeError or ValueError where it is none."""
    for each in answer["data"]["result"]:
        labels = dict(each["metric"])
        metric = labels.pop("__name__")
        for at_s, value in each["values"]:
            if math.isfinite(float(value)):
                collected.add(metric, labels, float(at_s), float(value))


def _read_scrape(path: Path, text: str, collected: Collected) -> None:
    """One exposition: its instant is that of its samples, or that in the file's name, or when the file was written."""
    at_s = _time_in(path)
    name, at_sign, _ = path.stem.partition("@")
    own = {"instance": name} if at_sign else {}
    seen, by_file = 0, False
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        sample = text_sample(line.strip())
        if sample is None or math.isnan(sample.value):
            continue
        seen += 1
        when_s = sample.at / 1e3 if sample.at > _MS else sample.at
        if math.isnan(when_s):
            by_file |= at_s is None
            when_s = path.stat().st_mtime if at_s is None else at_s
        collected.add(sample.name, {**own, **sample.labels}, when_s, sample.value)
    if by_file:
        collected.notes.append(
            f"{path}: neither its samples nor its name say an instant, so that it is when the file was written"
        )
    if not seen:
        raise RooftraceError(
            f"{path}: it has no sample of Prometheus' text format; give what /metrics answers, an answer of its API (JSON), or a "
            f"CSV table with the column {_TIME}"
        )


def _time_in(path: Path) -> float | None:
    """The instant that a file's name says, first behind an `@`: Unix seconds, or a date and time."""
    for part in dict.fromkeys((path.name.rpartition("@")[2], path.name)):
        if unix := _UNIX.search(part):
            return float(unix[1])
        if iso := _ISO.search(part):
            try:
                date, clock = "-".join(iso.groups()[:3]), ":".join(iso.groups()[3:6])
                return datetime.fromisoformat(f"{date}T{clock}{(iso[7] or 'Z').replace('Z', '+00:00')}").timestamp()
            except ValueError:
                raise RooftraceError(f"{path}: {iso[0]} in its name is no date and time") from None
    return None


def _read_table(path: Path, text: str, collected: Collected) -> None:
    rows = list(csv.DictReader(text.splitlines()))
    if not rows or _TIME not in rows[0]:
        raise RooftraceError(
            f"{path}: a table of counters has a column {_TIME}, seconds of each scrape; this one has none"
        )
    for number, row in enumerate(rows, 2):
        if None in row:
            raise RooftraceError(f"{path}, line {number}: it has more cells than the table has columns")
        labels = {name: row[name] for name in _OWN if row.get(name)}
        found: dict[str, float] = {}
        for column, cell in row.items():
            if column in _OWN or (cell in ("", None) and column != _TIME):
                continue
            try:
                found[column] = float(cell or "")
            except ValueError:
                raise RooftraceError(f"{path}, line {number}: {column} is {cell!r}, and no number") from None
        at_s = found.pop(_TIME)
        if not math.isfinite(at_s):
            raise RooftraceError(f"{path}, line {number}: {_TIME} is {at_s}, and no time")
        for column, value in found.items():
            if math.isfinite(value):
                collected.add(column, labels, at_s, value)


def labels_of(series: Iterable[Series], label: str) -> Iterator[str]:
    """The values that *label* has among *series*, each once."""
    yield from dict.fromkeys(each.labels[label] for each in series if label in each.labels)
