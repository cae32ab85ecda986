"""Profile files: what is written is read back, and what is broken is refused with the first thing that is wrong."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from hwmodels.kernels.families import FAMILIES
from hwmodels.kernels.parameters import Datasheet, bounds, optional_defaults, with_values
from hwmodels.profiles.profile import Calibration, Kernel, Profile, Provenance
from hwmodels.tables import read_toml

FORMAT = 1
FOLDER = Path(__file__).parent
"""Of the shipped profiles."""


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
    known = {"format", "device", "note", "kernel_count", "datasheet", "calibration", "kernel"}
    _only(where, table, known, {"note", "calibration"})
    datasheet = _datasheet(f"{where}: datasheet", table["device"], table["datasheet"])
    rows = table["kernel"]
    if len(rows) != table["kernel_count"]:
        raise ValueError(f"{where}: holds {len(rows)} of {table['kernel_count']} kernels; the file is truncated")
    kernels = tuple(_kernel(f"{where}: kernel {index + 1}", row) for index, row in enumerate(rows))
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
    """Write a profile as TOML that `read_profile` gives back; fitted numbers keep six significant digits."""
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
    for kernel in profile.kernels:
        lines += ["", "[[kernel]]", f"family = {_text(kernel.family)}", f"variant = {_text(kernel.variant)}"]
        lines += ["[kernel.parameters]"]
        absent, ends = optional_defaults(type(kernel.params)), bounds(type(kernel.params))
        # A fit leaves what it does not need a hair's breadth from where it changes nothing.
        own = {
            name: value
            for name, value in asdict(kernel.params).items()
            if name not in absent or abs(value - absent[name]) > 1e-3 * (ends[name][2] - ends[name][1])
        }
        lines += [f"{name} = {_digits(value)}" for name, value in own.items()]
        if kernel.interval:
            lines += ["[kernel.interval]"]
            lines += [f"{name} = [{_digits(low)}, {_digits(high)}]" for name, (low, high) in kernel.interval.items()]
        lines += ["[kernel.provenance]", *_lines(asdict(kernel.provenance))]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _lines(values: Mapping[str, Any], significant: int = 0) -> list[str]:
    """Settings as TOML; floats with two decimals, or with so many significant digits."""
    lines = []
    for name, value in values.items():
        if value is None or (name == "borrowed_from" and not value):
            continue
        if isinstance(value, tuple):
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


def read_kernel(where: str, text: str) -> Kernel:
    """One parameter set from its part of a profile file, from [[kernel]] on."""
    return _kernel(where, tomllib.loads(text)["kernel"][0])


def _kernel(where: str, row: Any) -> Kernel:
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
    origin = row["provenance"]
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


def _digits(value: float, significant: int = 6) -> str:
    text = f"{value:.{significant}g}"
    return text if any(mark in text for mark in ".e") else f"{text}.0"


def _text(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
