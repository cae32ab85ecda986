"""Profile files: what is written is read back, and what is broken is refused with the first thing that is wrong."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from hwmodels.kernels.families import FAMILIES
from hwmodels.kernels.parameters import Datasheet, optional_defaults, with_values
from hwmodels.profiles.profile import Calibration, Kernel, Profile, Provenance
from hwmodels.tables import read_toml

FORMAT = 1
FOLDER = Path(__file__).parent
"""The folder of the shipped profiles."""


def calibrated_devices() -> tuple[str, ...]:
    """Names of the devices whose profiles were fitted to their own measurements."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def read_profile(path: str | Path) -> Profile:
    """Read and check a profile file; ValueError names the file and the first thing that is wrong."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} does not exist; calibrated profiles: {', '.join(calibrated_devices())}")
    table = read_toml(path)
    where = path.name
    version = table.get("format")
    if not isinstance(version, int) or isinstance(version, bool):
        raise ValueError(f"{where}: format is missing; expected format = {FORMAT}")
    if version > FORMAT:
        raise ValueError(f"{where}: written in format {version}, this release reads up to {FORMAT}; update rooftrace")
    known = {"format", "device", "note", "kernel_count", "datasheet", "calibration", "columns", "kernel"}
    _only(where, table, known, {"note", "calibration", "columns"})
    datasheet = _datasheet(f"{where}: datasheet", table["device"], table["datasheet"])
    rows = table["kernel"]
    if len(rows) != table["kernel_count"]:
        raise ValueError(f"{where}: holds {len(rows)} of {table['kernel_count']} kernels; the file is truncated")
    columns = table.get("columns", {})
    kernels = tuple(_kernel(f"{where}: kernel {index + 1}", row, columns) for index, row in enumerate(rows))
    keys = [(kernel.family, kernel.variant) for kernel in kernels]
    if doubled := next((key for key in keys if keys.count(key) > 1), None):
        raise ValueError(f"{where}: {' '.join(doubled)} appears twice; keep one")
    return Profile(
        name=table["device"],
        datasheet=datasheet,
        kernels=kernels,
        note=table.get("note", ""),
        calibration=_calibration(where, table.get("calibration")),
    )


def _datasheet(where: str, name: str, sheet: Any) -> Datasheet:
    _only(where, sheet, {f.name for f in fields(Datasheet)} - {"name"}, set())
    for key, value in [*sheet.items(), *((f"peak_flops_per_s.{k}", v) for k, v in sheet["peak_flops_per_s"].items())]:
        if key != "peak_flops_per_s":
            _number(f"{where}.{key}", value)
    return Datasheet(name=name, **sheet)


def write_profile(profile: Profile, path: str | Path) -> None:
    """Write the `profile_text` of a profile to *path*."""
    Path(path).write_text(profile_text(profile), encoding="utf-8")


def profile_text(profile: Profile) -> str:
    """A profile as TOML that `read_profile` gives back; fitted numbers keep five significant digits."""
    lines = [
        f"format = {FORMAT}",
        f"device = {_text(profile.name)}",
        f"note = {_text(profile.note)}",
        f"kernel_count = {len(profile.kernels)}",
        "",
        "[datasheet]",
    ]
    for name, value in asdict(profile.datasheet).items():
        if name == "peak_flops_per_s":
            lines.append(f"{name} = {{ " + ", ".join(f"{k} = {_digits(v, 15)}" for k, v in value.items()) + " }")
        elif name != "name":
            lines.append(f"{name} = {value if isinstance(value, int) else _digits(value, 15)}")
    if profile.calibration is not None:
        lines += ["", "[calibration]", *_lines(asdict(profile.calibration), 15)]
    columns = _columns(profile.kernels)
    lines += ["", "[columns]"]
    lines += [f"{family} = [" + ", ".join(map(_text, names)) + "]" for family, names in columns.items()]
    for kernel in profile.kernels:
        lines += ["", "[[kernel]]", f"family = {_text(kernel.family)}", f"variant = {_text(kernel.variant)}"]
        own = asdict(kernel.params)
        lines += ["values = [" + ", ".join(f"{own[name]:.5g}" for name in columns[kernel.family]) + "]"]
        if kernel.interval:
            lines += ["[kernel.interval]"]
            lines += [f"{name} = [{_digits(low)}, {_digits(high)}]" for name, (low, high) in kernel.interval.items()
                      if name in columns[kernel.family]]  # fmt: skip
        lines += ["[kernel.provenance]", *_lines(_short(kernel.provenance))]
    return "\n".join(lines) + "\n"


def _columns(kernels: Sequence[Kernel]) -> dict[str, list[str]]:
    """Names of the parameters of each family, said once a file; without optional ones that no kernel of it needs."""
    found: dict[str, dict[str, bool]] = {}
    for kernel in kernels:
        absent = optional_defaults(type(kernel.params))
        needed = found.setdefault(kernel.family, {})
        for name, value in asdict(kernel.params).items():
            needed[name] = needed.get(name, False) or name not in absent or value != absent[name]
    return {family: [name for name, needed in names.items() if needed] for family, names in found.items()}


# Several numbers of an origin on one line, in this order; a file may also give each by its name.
_TOGETHER = {
    "errors_pct": ("fit_mape_pct", "fit_median_pct", "held_mape_pct", "held_median_pct", "held_p90_pct"),
    "interval_pct": ("held_low_pct", "held_high_pct", "held_coverage_pct"),
    "measured_us": ("shortest_us", "longest_us"),
}


def _short(origin: Provenance) -> dict[str, Any]:
    """An origin with the numbers of `_TOGETHER` in lists, without what is absent."""
    values = asdict(origin)
    if not origin.borrowed_from:
        del values["borrowed_from"]
    for name, members in _TOGETHER.items():
        if all(values[member] is not None for member in members):
            values[name] = [values.pop(member) for member in members]
    return values


def _long(where: str, row: Any) -> Any:
    """The reverse of `_short`; what is no table is left for the caller to refuse."""
    if not isinstance(row, Mapping):
        return row
    values: dict[str, Any] = dict(row)
    values.setdefault("borrowed_from", "")
    for name, members in _TOGETHER.items():
        if name in values:
            numbers = values.pop(name)
            if not isinstance(numbers, list) or len(numbers) != len(members):
                raise ValueError(
                    f"{where}.{name} must be the {len(members)} numbers {', '.join(members)}; got {numbers!r}"
                )
            values |= dict(zip(members, numbers, strict=True))
    return values


def _lines(values: Mapping[str, Any], significant: int = 0) -> list[str]:
    """Settings as TOML; floats with two decimals, or with so many significant digits."""
    lines = []
    for name, value in values.items():
        if value is None or (name == "borrowed_from" and not value):
            continue
        if isinstance(value, list):
            text = "[" + ", ".join(f"{number:.4g}" for number in value) + "]"
        elif isinstance(value, tuple):
            text = "[" + ", ".join(_text(item) for item in value) + "]"
        elif isinstance(value, str):
            text = _text(value)
        elif isinstance(value, int):
            text = str(value)
        else:
            text = _digits(value, significant) if significant else f"{value:.2f}"
        lines.append(f"{name} = {text}")
    return lines


def _calibration(where: str, table: Any) -> Calibration | None:
    if table is None:
        return None
    _only(f"{where}: calibration", table, {f.name for f in fields(Calibration)}, set())
    for name in ("memory_bytes", "cores", "operations", "median_spread_pct", "outliers"):
        _number(f"{where}: calibration.{name}", table[name])
    return Calibration(**{**table, "kernels": tuple(table["kernels"])})


def read_kernel(where: str, text: str, columns: Mapping[str, Sequence[str]]) -> Kernel:
    """One parameter set from its part of a profile file, from [[kernel]] on, under the file's [columns]."""
    return _kernel(where, tomllib.loads(text)["kernel"][0], columns)


def _named(where: str, row: Any, columns: Any) -> Any:
    """The row with its parameters by name, where it gives values under the names of [columns]."""
    if not isinstance(row, Mapping) or "values" not in row:
        return row
    names = columns.get(row.get("family"))
    values = row["values"]
    if names is None or not isinstance(values, list) or len(values) != len(names):
        raise ValueError(f"{where}: values must be as many numbers as [columns] has names for {row.get('family')!r}")
    return {**{key: value for key, value in row.items() if key != "values"},
            "parameters": dict(zip(names, values, strict=True))}  # fmt: skip


def _kernel(where: str, row: Any, columns: Any) -> Kernel:
    row = _named(where, row, columns)
    if not isinstance(row, Mapping):
        raise ValueError(f"{where}: expected a table; got {row!r}")
    _only(where, row, {"family", "variant", "parameters", "interval", "provenance"}, {"interval"})
    family = row["family"]
    if family not in FAMILIES:
        raise ValueError(f"{where}: family must be one of {', '.join(FAMILIES)}; got {family!r}")
    where = f"{where} ({family} {row['variant']})"
    for name, value in row["parameters"].items():
        _number(f"{where}: {name}", value)
    try:
        params = with_values(
            FAMILIES[family].parameters, {name: float(value) for name, value in row["parameters"].items()}
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    origin = _long(f"{where}: provenance", row["provenance"])
    optional = {f.name for f in fields(Provenance) if f.default is None}
    _only(f"{where}: provenance", origin, {f.name for f in fields(Provenance)}, {*optional, "borrowed_from"})
    for name in ("fit_mape_pct", "fit_median_pct", "held_mape_pct", "held_median_pct", "held_p90_pct", *optional):
        if name in origin:
            _number(f"{where}: provenance.{name}", origin[name])
    provenance = Provenance(**{**origin, "files": tuple(origin["files"])})
    try:
        _ = provenance.spread
    except ValueError as error:
        raise ValueError(f"{where}: provenance: {error}") from None
    interval = row.get("interval", {})
    for name, ends in interval.items():
        if name not in row["parameters"] or not isinstance(ends, list) or len(ends) != 2:
            raise ValueError(f"{where}: interval.{name} must be the two ends of a parameter's interval; got {ends!r}")
        for end in ends:
            _number(f"{where}: interval.{name}", end)
    return Kernel(
        family=family,
        variant=row["variant"],
        params=params,
        provenance=provenance,
        interval={name: (float(low), float(high)) for name, (low, high) in interval.items()},
    )


def _only(where: str, table: Any, known: set[str], optional: set[str]) -> None:
    if not isinstance(table, Mapping):
        raise ValueError(f"{where}: expected a table; got {table!r}")
    if unknown := sorted(set(table) - known):
        raise ValueError(f"{where}: {unknown[0]} is not a setting; expected {', '.join(sorted(known))}")
    if missing := sorted(known - optional - set(table)):
        raise ValueError(f"{where}: {missing[0]} is missing; is the file truncated?")


def _number(where: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{where} must be a finite number; got {value!r}")


def _digits(value: float, significant: int = 5) -> str:
    text = f"{value:.{significant}g}"
    return text if any(mark in text for mark in ".e") else f"{text}.0"


def _text(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
