"""Which scenarios a sweep runs: axes, rows of a table, replications."""

from __future__ import annotations

import csv
import functools
import hashlib
import itertools
import math
import os
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from sim.errors import RooftraceError
from sim.packages import home
from sim.scenario import Scenario, named
from sim.scenario.explain import entries_in, section_in
from sim.scenario.keys import Settings
from sim.scenario.section import settings_of
from sim.scenario.yaml import parse_yaml, read_text
from sim.text import shown, unknown

if TYPE_CHECKING:
    import pandas as pd

META = "meta."
SWEEP_KEYS = ("scenario", "set", "axes", "points", "replications")
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER}):({_NUMBER}):(\d+)(:log)?")
_SEXAGESIMAL = re.compile(r"(?<![\w.'\"])[-+]?\d[\d.]*:\d")  # YAML 1.1 would read 4:16 as 256


_SHOWS_RESULTS = (
    "bench",
    "cli",
    "explore",
    "placement",
    "plots",
    "report",
    "reproduce",
    "study",
    "theory",
    "tokens",
    "validation",
)
_BEARS_NO_RESULT = (".pyc", ".md")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One scenario of a sweep: settings changed from the base, and columns that only go along."""

    settings: Mapping[str, Any]
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One replication of a point: the scenario to run, or why there is none."""

    key: str
    """Hexadecimal digits of the content: settings, files that they name, the user's policies, Rooftrace's code."""
    scenario: Scenario | None
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A plan of runs: every combination of the *axes*' values for every row of *points*, each *replications* times.

    *axes*: dotted key to values. *points*: a CSV file, or rows as mappings; keys are dotted settings, or begin with
    `meta.` and are only carried along. Replication r of every point runs with the base seed plus r: common random
    numbers. Settings are changed in the order of columns, then axes. Raises RooftraceError for a key that is no
    setting, a key given twice, an axis without values.
    """

    base: Scenario
    axes: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    points: Path | Sequence[Mapping[str, Any]] | None = None
    replications: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.replications, bool) or not isinstance(self.replications, int) or self.replications < 1:
            raise RooftraceError(f"replications is a whole number of at least 1; got {self.replications!r}")
        columns = self.columns()
        for key in (*self.axes, *columns):
            check_key(key, meta=key in columns)
        for key, values in self.axes.items():
            if not values:
                raise RooftraceError(f"axis {key} has no values")
        twice = sorted(set(self.axes) & set(columns))
        if twice:
            raise RooftraceError(f"{twice[0]} is an axis and a column of the points; leave one out")
        if self.replications > 1 and "seed" in (*self.axes, *columns):
            raise RooftraceError("replications choose the seeds, so seed cannot vary too; leave out one of them")

    def columns(self) -> list[str]:
        """Keys of the points, in order of appearance."""
        if self.points is None:
            return []
        if isinstance(self.points, Path):
            return _header(self.points)
        return list(dict.fromkeys(key for row in self.points for key in row))

    def __len__(self) -> int:
        """Number of points; runs are *replications* times as many."""
        rows = 1 if self.points is None else sum(1 for _ in self._rows())
        return rows * math.prod(len(values) for values in self.axes.values())

    def __iter__(self) -> Iterator[Point]:
        for row in self._rows():
            settings = {key: value for key, value in row.items() if not key.startswith(META)}
            meta = {key: value for key, value in row.items() if key.startswith(META)}
            for values in itertools.product(*self.axes.values()):
                yield Point(settings={**settings, **dict(zip(self.axes, values, strict=True))}, meta=meta)

    def runs(self, point: Point) -> list[Run]:
        """The replications of *point*, in order of seed. Cheap: nothing is built yet."""
        try:
            scenario = self.base.with_values(point.settings)
            seeds = range(scenario.seed, scenario.seed + self.replications)
            versions = [scenario.with_value("seed", seed) if seed else scenario for seed in seeds]
            return [Run(key=content_key(version), scenario=version) for version in versions]
        except (RooftraceError, OSError) as error:
            text = f"{self.base.hash} {point.settings!r}"
            return [
                Run(key=_digest(f"{text} {replication}"), scenario=None, error=str(error))
                for replication in range(self.replications)
            ]

    def _rows(self) -> Iterable[Mapping[str, Any]]:
        if self.points is None:
            return ({},)
        return _csv_rows(self.points) if isinstance(self.points, Path) else self.points

    def describe(self) -> dict[str, Any]:
        """The manifest's facts about the sweep."""
        points: Any = None
        if isinstance(self.points, Path):
            points = {"file": self.points.name, "sha256": hashlib.sha256(self.points.read_bytes()).hexdigest()}
        elif self.points is not None:
            points = {"rows": len(self.points)}
        return {
            "base": self.base.resolved(),
            "axes": {key: list(values) for key, values in self.axes.items()},
            "points": points,
            "replications": self.replications,
            "seeds": [self.base.seed, self.base.seed + self.replications - 1],
        }


def read_axis(text: str) -> tuple[str, list[Any]]:
    """The key and values of 'key.path=VALUES': a list with commas (each value YAML), or FROM:TO:COUNT[:log].

    >>> read_axis("workload.rate_scale=0.5:2:4")
    ('workload.rate_scale', [0.5, 1.0, 1.5, 2.0])
    >>> read_axis("scheduler={policy: vllm}, sarathi")
    ('scheduler', [{'policy': 'vllm'}, 'sarathi'])
    """
    key, equals, values = text.partition("=")
    key, values = key.strip(), values.strip()
    if not equals or not key or not values:
        raise RooftraceError(f"--axis {text!r}: expected key.path=VALUES, such as replicas=1,2,4 or seed=0:9:10")
    return key, axis_values(values, key)


def read_axes(given: Sequence[str] | None) -> dict[str, Any]:
    """The values of each --axis by its key; RooftraceError where a key is given twice."""
    axes: dict[str, Any] = {}
    for text in given or ():
        key, values = read_axis(text)
        if key in axes:
            raise RooftraceError(f"--axis {key} is given twice; put its values into one list")
        axes[key] = values
    return axes


def axis_values(given: Any, key: str) -> list[Any]:
    """The values of an axis: a list as it is, a text as `read_axis` reads it, anything else as the only value."""
    if isinstance(given, str):
        found = _RANGE.fullmatch(given.strip())
        if found:
            return _range(*found.groups(), key=key)
        if _SEXAGESIMAL.search(given):
            raise RooftraceError(
                f"axis {key}: {given!r} is neither a list with commas nor one range FROM:TO:COUNT, such as 1:4:4"
            )
        given = parse_yaml(f"[{given}]", f"axis {key}")
    if isinstance(given, Mapping) or not isinstance(given, Iterable):
        given = [given]
    return [_plain(value) for value in given]


def _range(first: str, last: str, count: str, log: str | None, *, key: str) -> list[Any]:
    low, high, n = float(first), float(last), int(count)
    if n < 2:
        raise RooftraceError(f"axis {key}: a range has at least 2 values; got {n}")
    if log:
        if low <= 0 or high <= 0:
            raise RooftraceError(f"axis {key}: a logarithmic range lies above 0; got {first}:{last}")
        values = [low * (high / low) ** (i / (n - 1)) for i in range(n)]
        values[-1] = high
    else:
        values = [low + (high - low) * i / (n - 1) for i in range(n)]
    # Twelve digits, so that 0.1 steps do not end in 0.30000000000000004.
    values = [float(f"{value:.12g}") for value in values]
    whole = all("." not in end and end_value.is_integer() for end, end_value in ((first, low), (last, high)))
    if whole and log:
        return list(dict.fromkeys(round(value) for value in values))
    return [int(value) for value in values] if whole and all(value.is_integer() for value in values) else values


def check_key(key: str, *, meta: bool = False) -> None:
    """RooftraceError where the dotted *key* is no setting, with the nearest that is."""
    if meta and key.startswith(META):
        return
    section: type = Settings
    parts = key.split(".")
    entry: Any = None
    for depth, part in enumerate(parts):
        if entry is not None:
            # The name of a pool.
            section, entry = entry, None
            continue
        if part not in settings_of(section):
            # A setting of a policy, or of one that it wraps.
            wrapped = all(inner == named.INNER for inner in parts[depth:-1])
            if getattr(section, "model_config", {}).get("extra") == "allow" and wrapped:
                return
            prefix = "".join(f"{before}." for before in parts[:depth])
            hint = "; columns that only go along begin with meta." if meta else ""
            choices = [prefix + name for name in settings_of(section)]
            raise RooftraceError(unknown(f"{key} is not a setting", prefix + part, choices, hint=hint))
        annotation = settings_of(section)[part]
        entry = entries_in(annotation)
        inner = section_in(annotation)
        if entry is not None:
            continue
        if inner is None:
            if _maps_names(annotation) and depth == len(parts) - 2:
                return
            if depth < len(parts) - 1:
                raise RooftraceError(f"{key} is not a setting: {'.'.join(parts[: depth + 1])} has none of its own")
            return
        section = inner


def _maps_names(annotation: Any) -> bool:
    """Whether a setting maps names of the user's to values, such as shares of models."""
    return typing.get_origin(annotation) is dict or any(map(_maps_names, typing.get_args(annotation)))


def load_sweep(path: str | os.PathLike[str]) -> Sweep | Scenario:
    """The content of the YAML file at *path*: a sweep where it has axes, points or replications, else a scenario."""
    file = Path(path)
    text = read_text(file)
    content = parse_yaml(text, str(file))
    if not isinstance(content, Mapping) or not {"axes", "points", "replications", "scenario"} & set(content):
        return Scenario.load(file)
    for key in content:
        if key not in SWEEP_KEYS:
            raise RooftraceError(unknown(f"{file}: {key} is not a key of a sweep file", str(key), SWEEP_KEYS))
    base = _base(content.get("scenario"), file)
    for key, value in _mapping(content, "set", file).items():
        base = base.with_value(key, value)
    written = {**_mapping(content, "axes", file), **_unquoted_ranges(text, file)}
    axes = {key: axis_values(values, key) for key, values in written.items()}
    points = content.get("points")
    if isinstance(points, str):
        points = file.parent / points
    elif points is not None and not (isinstance(points, list) and all(isinstance(row, Mapping) for row in points)):
        raise RooftraceError(f"{file}: points is a CSV file or a list of mappings; got {shown(points)}")
    try:
        return Sweep(base=base, axes=axes, points=points, replications=content.get("replications", 1))
    except RooftraceError as error:
        raise RooftraceError(f"{file}: {error}") from None


def _unquoted_ranges(text: str, file: Path) -> dict[str, str]:
    """Axes that are written as 1:9:5 without quotes, as the text that they are: YAML 1.1 reads a number to base 60."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    axes = next((value for key, value in root.value if key.value == "axes"), None)
    found = {}
    for key, value in axes.value if isinstance(axes, yaml.MappingNode) else ():
        if _base_sixty(value):
            found[key.value] = value.value
        elif isinstance(value, yaml.SequenceNode):
            wrong = next(filter(_base_sixty, value.value), None)
            if wrong is not None:
                raise RooftraceError(f"{file}: axis {key.value}: {wrong.value} is no value; a range stands alone")
    return found


def _base_sixty(node: Any) -> bool:
    return node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float") and ":" in node.value


def _base(given: Any, file: Path) -> Scenario:
    if given is None:
        return Scenario.default()
    if isinstance(given, str):
        return Scenario.load(file.parent / given)
    return Scenario.from_mapping(given, source=str(file), folder=file.parent)


def _mapping(content: Mapping[str, Any], key: str, file: Path) -> Mapping[str, Any]:
    found = content.get(key) or {}
    if not isinstance(found, Mapping) or not all(isinstance(inner, str) for inner in found):
        raise RooftraceError(f"{file}: {key} is a mapping from dotted settings; got {shown(found)}")
    return found


def frame_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a DataFrame as points: missing cells are left at the base's setting."""
    return [
        {str(key): _plain(value) for key, value in row.items() if value is not None and value == value}
        for row in frame.to_dict("records")
    ]


def _header(path: Path) -> list[str]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = next(csv.reader(file), None)
    except OSError as error:
        raise RooftraceError(f"cannot read points {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise RooftraceError(f"{path} is not text; points are a CSV file in UTF-8") from None
    if not header:
        raise RooftraceError(f"{path} is empty; its first line names the settings")
    names = [name.strip() for name in header]
    for name in names:
        if not name or names.count(name) > 1:
            raise RooftraceError(f"{path}: column {name!r} is {'named twice' if name else 'without a name'}")
    return names


def _csv_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    names = _header(path)
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file)
        next(rows)
        for cells in rows:
            if not any(cell.strip() for cell in cells):
                continue
            if len(cells) != len(names):
                raise RooftraceError(
                    f"{path}, line {rows.line_num}: {len(cells)} cells for {len(names)} columns; "
                    "a value with a comma goes in double quotes"
                )
            for name, cell in zip(names, cells, strict=True):
                if not name.startswith(META) and re.fullmatch(r"[-+]?[\d.]+(:[\d.]+)+", cell.strip()):
                    raise RooftraceError(
                        f"{path}, line {rows.line_num}: {name} is {cell.strip()}, and a row holds one value of each; "
                        "give a range with --axis"
                    )
            yield {
                name: _meta(cell) if name.startswith(META) else parse_yaml(cell, f"{path}, line {rows.line_num}")
                for name, cell in zip(names, cells, strict=True)
                if cell.strip()
            }


def _meta(text: str) -> Any:
    if re.fullmatch(r"-?(0|[1-9]\d{0,17})", text):
        return int(text)
    if re.fullmatch(_NUMBER, text) and not re.match(r"[-+]?0\d", text):
        return float(text)
    return text


def _plain(value: Any) -> Any:
    """A numpy scalar as Python's own."""
    return value.item() if hasattr(value, "item") and not isinstance(value, str) else value


def content_key(scenario: Scenario) -> str:
    """Twenty hexadecimal digits: equal for equal settings, files, policies of the user's own and Rooftrace code."""
    return _digest(f"{scenario.hash} {code_digest()}")


@functools.cache
def code_digest() -> str:
    """Twenty hexadecimal digits of what results follow from: Rooftrace's code and data, but for what only shows them."""
    digest = hashlib.sha256()
    for package in ("hwmodels", "policies", "sim", "workloads"):
        root = home() / package
        for path in sorted(root.rglob("*")):
            name = path.relative_to(root)
            if path.suffix in _BEARS_NO_RESULT or (package == "sim" and name.parts[0] in _SHOWS_RESULTS):
                continue
            if path.is_file():
                digest.update(f"{package}/{name.as_posix()}".encode() + path.read_bytes())
    return digest.hexdigest()[:20]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:20]
