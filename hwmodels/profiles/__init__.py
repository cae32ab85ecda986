"""Calibrated profiles: fitted kernel parameters of a device, where each came from, and its datasheet numbers apart."""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from hwmodels.device import Device, Interconnect, load_device
from hwmodels.kernels.families import FAMILIES
from hwmodels.kernels.parameters import Datasheet, with_values

FORMAT = 1
FOLDER = Path(__file__).parent
# Calibrated device -> file. For any other, the relative whose library kernels are the most alike; a device of the same
# architecture before one of the same size.
_RELATIVES = {
    "h100-pcie": "h100-sxm",
    "h20": "h200",
    "b200": "h200",
    "gb200": "h200",
    "a100-40gb-sxm": "a100-80gb-sxm",
    "a100-80gb-pcie": "a100-80gb-sxm",
    "a6000": "a100-80gb-sxm",
    "a40": "a100-80gb-sxm",
    "a10": "a100-80gb-sxm",
    "v100-32": "a100-80gb-sxm",
    "v100-16": "a100-80gb-sxm",
    "l4": "l40s",
    "rtx-4090": "l40s",
    "mi300x": "h100-sxm",
    "tpu-v3": "tpu-v6e",
    "tpu-v4": "tpu-v6e",
    "tpu-v5e": "tpu-v6e",
    "tpu-v5p": "tpu-v6e",
}
_BORROWERS_BY_VENDOR = {"NVIDIA": "h100-sxm", "Google": "tpu-v6e"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where a parameter set came from; errors in percent, `held_*` on shapes that the scored fit did not see."""

    files: tuple[str, ...]
    software: str
    fitted_on: str
    """ISO date of the fit."""
    points: int
    fit_mape_pct: float
    fit_median_pct: float
    held_mape_pct: float
    held_median_pct: float
    held_p90_pct: float
    borrowed_from: str = ""
    """The device whose measurements these are, when it is not this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One fitted parameter set: a family, the variant it describes (format, operation, software) and its origin."""

    family: str
    variant: str
    params: Any
    provenance: Provenance
    interval: Mapping[str, tuple[float, float]] = field(default_factory=dict, hash=False)
    """95 % interval of each fitted parameter; empty where the fit that gave it kept none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The machine and the run behind a profile that `rooftrace calibrate` took."""

    title: str
    backend: str
    memory_bytes: float
    cores: int
    clock: str
    """wall, cpu (processor time of the process) or device (events)."""
    driver: str
    clocks: str
    libraries: str
    taken_on: str
    operations: int
    median_spread_pct: float
    """Median over operations of the interquartile range of their repeats."""
    outliers: int
    """Repeats more than half above their median: kept in the log, without weight in a median."""
    kernels: tuple[str, ...]
    """Operations timed, each with its count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Everything the kernel models need of one device."""

    name: str
    datasheet: Datasheet
    kernels: tuple[Kernel, ...] = field(repr=False)
    note: str = ""
    calibration: Calibration | None = None

    @property
    def kind(self) -> str:
        """The kind of device whose kernels these are: gpu, tpu or cpu."""
        families = {kernel.family for kernel in self.kernels}
        return "cpu" if "cpu_gemm" in families else "tpu" if "tpu_gemm" in families else "gpu"

    @property
    def links_measured(self) -> bool:
        """Whether there are collectives, the device's own or borrowed."""
        return any(kernel.family == "collective" for kernel in self.kernels)

    def find(self, family: str, variants: Sequence[str]) -> Any | None:
        """Parameters of the first of `variants` that the profile has, or None."""
        kernel = self.kernel(family, variants)
        return None if kernel is None else kernel.params

    def kernel(self, family: str, variants: Sequence[str]) -> Kernel | None:
        """As `find`, with the origin of the parameters."""
        if family not in FAMILIES:
            raise ValueError(f"family must be one of {', '.join(FAMILIES)}; got {family!r}")
        have = {kernel.variant: kernel for kernel in self.kernels if kernel.family == family}
        return next((have[variant] for variant in variants if variant in have), None)

    def get(self, family: str, variants: Sequence[str]) -> Any:
        """As `find`, but ValueError says what the profile has when it has none of them."""
        params = self.find(family, variants)
        if params is None:
            have = ", ".join(kernel.variant for kernel in self.kernels if kernel.family == family) or "none"
            raise ValueError(
                f"profile {self.name} has no {family} parameters for {' or '.join(variants)}; it has {have}"
            )
        return params


def device_of(profile: Profile) -> Device:
    """The device that a profile describes: of the catalogue by name, else from the profile's calibration.

    A machine that was calibrated has one device and no links, so that what needs links is refused as too slow rather
    than priced: its link runs at the speed of its memory. Its power is not known and counts as 1 W.
    """
    sheet, own = profile.datasheet, profile.calibration
    if own is None or profile.kind != "cpu":
        return load_device(profile.name)
    link = Interconnect(kind="memory", latency_s=1e-6, bytes_per_s=sheet.hbm_bytes_per_s)
    source = f"measured with {own.backend} on {own.taken_on}"
    return Device(
        name=profile.name,
        title=own.title,
        vendor=own.title.split()[0],
        peak_flops_per_s=dict(sheet.peak_flops_per_s),
        memory_bytes=own.memory_bytes,
        hbm_bytes_per_s=sheet.hbm_bytes_per_s,
        n_cores=sheet.sm_count,
        link=link,
        network=link,
        devices_per_node=1,
        tdp_w=1.0,
        l2_bytes=sheet.l2_bytes,
        sources={f"peak.{name}": source for name in sheet.peak_flops_per_s} | {"hbm_bytes_per_s": source},
    )


def datasheet_of(device: Device) -> Datasheet:
    """The numbers of the device catalogue that kernel models use.

    fp16 stands in for bf16 on devices without it (both run at one rate where both exist). A device without a stated L2
    counts as having 1 MiB, which no kernel's working set fits.
    """
    peaks = {name: value for name, value in device.peak_flops_per_s.items() if name in ("bf16", "fp8", "int8", "fp4")}
    peaks.setdefault("bf16", device.first_peak(("bf16", "fp16"), "matrix multiplication"))
    return Datasheet(
        name=device.name,
        peak_flops_per_s=peaks,
        vector_flops_per_s=device.peak_flops_per_s.get("fp32", peaks["bf16"]),
        hbm_bytes_per_s=device.hbm_bytes_per_s,
        sm_count=device.n_cores,
        l2_bytes=device.l2_bytes or float(2**20),
        link_bytes_per_s=device.link.bytes_per_s,
    )


def calibrated_devices() -> tuple[str, ...]:
    """Names of the devices whose profiles were fitted to their own measurements."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


@functools.cache
def load_profile(name_or_path: str) -> Profile:
    """A calibrated profile, a file's (a path ending in .toml), or a borrowed one for another catalogue device."""
    if name_or_path.endswith(".toml"):
        return read_profile(name_or_path)
    device = load_device(name_or_path)
    if device.name in calibrated_devices():
        return read_profile(FOLDER / f"{device.name}.toml")
    relative = _RELATIVES.get(device.name) or _BORROWERS_BY_VENDOR.get(device.vendor)
    if relative is None:
        raise ValueError(
            f"{device.name} has no calibrated profile and no calibrated relative; fit one with rooftrace fit, or name "
            f"the profile file of one of {', '.join(calibrated_devices())}"
        )
    return _lend(relative, device)


def borrow_for(device: Device) -> Profile:
    """The profile of the nearest calibrated device of the same vendor, on the datasheet numbers of *device*."""
    relative = _BORROWERS_BY_VENDOR.get(device.vendor)
    if relative is None:
        raise ValueError(
            f"{device.name} has no calibrated profile and no calibrated device is from {device.vendor}; fit one with "
            "rooftrace fit, or price it by its datasheet (cost_model: roofline)"
        )
    return _lend(relative, device)


def _lend(relative: str, device: Device) -> Profile:
    """What *device* borrows: kernels from *relative*, and in-node collectives from whichever has links like its own."""
    donor = read_profile(FOLDER / f"{relative}.toml")
    borrowed = borrow(donor, datasheet_of(device))
    if _alike_links(donor, borrowed):
        return borrowed
    others = [read_profile(FOLDER / f"{name}.toml") for name in calibrated_devices()]
    own = borrowed.datasheet.link_bytes_per_s
    by_distance = sorted(others, key=lambda other: abs(math.log(other.datasheet.link_bytes_per_s / own)))
    kernels = tuple(kernel for kernel in borrowed.kernels if not _within_node(kernel))
    return complete(
        replace(borrowed, kernels=kernels), [other for other in by_distance if _alike_links(other, borrowed)]
    )


def _alike_links(first: Profile, second: Profile) -> bool:
    """Whether the links within a node are of one kind: switched and PCIe links are more than a factor three apart."""
    return 1 / 3 <= first.datasheet.link_bytes_per_s / second.datasheet.link_bytes_per_s <= 3


def _within_node(kernel: Kernel) -> bool:
    return kernel.family == "collective" and not kernel.variant.endswith("-network")


def is_profile(path: str | Path) -> bool:
    """Whether a TOML file is a calibrated profile rather than a device's datasheet."""
    try:
        return "kernel_count" in tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return False


def borrow(profile: Profile, datasheet: Datasheet) -> Profile:
    """The fitted efficiencies and latencies of one device on another's datasheet numbers; every origin says so."""
    kernels = tuple(
        replace(
            kernel, provenance=replace(kernel.provenance, borrowed_from=kernel.provenance.borrowed_from or profile.name)
        )
        for kernel in profile.kernels
    )
    note = f"efficiencies and latencies borrowed from {profile.name}, with the datasheet numbers of {datasheet.name}"
    return Profile(name=datasheet.name, datasheet=datasheet, kernels=kernels, note=note)


def complete(profile: Profile, donors: Sequence[Profile]) -> Profile:
    """The profile with what it lacks taken from the donors, in their order; every origin says so.

    Tables of one measured layer stay where they were measured, and in-node collectives do not cross between switched
    and PCIe links (more than a factor three apart).
    """
    kernels = list(profile.kernels)
    have = {(kernel.family, kernel.variant) for kernel in kernels}
    for donor in donors:
        alike = _alike_links(donor, profile)
        for kernel in donor.kernels:
            other_links = _within_node(kernel) and not alike
            if (kernel.family, kernel.variant) in have or other_links or kernel.variant == "bf16/lss":
                continue
            have.add((kernel.family, kernel.variant))
            origin = replace(kernel.provenance, borrowed_from=kernel.provenance.borrowed_from or donor.name)
            kernels.append(replace(kernel, provenance=origin))
    return replace(profile, kernels=tuple(kernels))


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One number of two profiles; None where one of them lacks it."""

    kernel: str
    name: str
    first: float | None
    second: float | None
    remark: str

    @property
    def ratio(self) -> float | None:
        """Second over first."""
        return None if not self.first or self.second is None else self.second / self.first


def compare_profiles(first: Profile, second: Profile) -> list[Difference]:
    """Every datasheet number, parameter and held-back error that differs or that one of the two lacks.

    The remark says whether the 95 % intervals of a fitted parameter overlap, where both profiles kept them.
    """
    found: list[Difference] = []

    def add(kernel: str, name: str, a: float | None, b: float | None, remark: str = "") -> None:
        if a != b:
            found.append(Difference(kernel=kernel, name=name, first=a, second=b, remark=remark))

    sheets = [asdict(profile.datasheet) for profile in (first, second)]
    for name in sheets[0]:
        if name == "peak_flops_per_s":
            for dtype in sorted({*sheets[0][name], *sheets[1][name]}):
                add("datasheet", f"peak {dtype}", sheets[0][name].get(dtype), sheets[1][name].get(dtype))
        elif name != "name":
            add("datasheet", name, sheets[0][name], sheets[1][name])
    kernels = [{(kernel.family, kernel.variant): kernel for kernel in profile.kernels} for profile in (first, second)]
    for key in sorted({*kernels[0], *kernels[1]}):
        label, one, other = " ".join(key), kernels[0].get(key), kernels[1].get(key)
        if one is None or other is None:
            have = one or other
            assert have is not None
            error = have.provenance.held_median_pct
            pair = (error, None) if other is None else (None, error)
            add(label, "held-back median %", *pair, f"only the {'first' if other is None else 'second'} has it")
            continue
        for name, value in asdict(one.params).items():
            ends = [kernel.interval.get(name) for kernel in (one, other)]
            remark = ""
            if ends[0] is not None and ends[1] is not None:
                apart = ends[0][1] < ends[1][0] or ends[1][1] < ends[0][0]
                remark = "intervals apart" if apart else "intervals overlap"
            add(label, name, value, getattr(other.params, name), remark)
        add(label, "held-back median %", one.provenance.held_median_pct, other.provenance.held_median_pct)
    return found


def read_profile(path: str | Path) -> Profile:
    """Read and check a profile file; ValueError names the file and the first thing that is wrong."""
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; calibrated profiles: {', '.join(calibrated_devices())}") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path.name}: not readable as TOML ({error}); is the file truncated?") from None
    where = path.name
    version = table.get("format")
    if not isinstance(version, int) or isinstance(version, bool):
        raise ValueError(f"{where}: format is missing; expected format = {FORMAT}")
    if version > FORMAT:
        raise ValueError(f"{where}: written in format {version}, this release reads up to {FORMAT}; update rooftrace")
    known = {"format", "device", "note", "kernel_count", "datasheet", "calibration", "kernel"}
    _only(where, table, known, {"note", "calibration"})
    sheet = table["datasheet"]
    names = {f.name for f in fields(Datasheet)} - {"name"}
    _only(f"{where}: datasheet", sheet, names, set())
    for key, value in [*sheet.items(), *((f"peak_flops_per_s.{k}", v) for k, v in sheet["peak_flops_per_s"].items())]:
        if key != "peak_flops_per_s":
            _number(f"{where}: datasheet.{key}", value)
    datasheet = Datasheet(name=table["device"], **sheet)
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
        lines += [f"{name} = {_digits(value)}" for name, value in asdict(kernel.params).items()]
        if kernel.interval:
            lines += ["[kernel.interval]"]
            lines += [f"{name} = [{_digits(low)}, {_digits(high)}]" for name, (low, high) in kernel.interval.items()]
        lines += ["[kernel.provenance]", *_lines(asdict(kernel.provenance))]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _lines(values: Mapping[str, Any], significant: int = 0) -> list[str]:
    """Settings as TOML; floats with two decimals, or with so many significant digits."""
    lines = []
    for name, value in values.items():
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
    names = {f.name for f in fields(Provenance)}
    _only(f"{where}: provenance", origin, names, set())
    for name in ("fit_mape_pct", "fit_median_pct", "held_mape_pct", "held_median_pct", "held_p90_pct"):
        _number(f"{where}: provenance.{name}", origin[name])
    provenance = Provenance(**{**origin, "files": tuple(origin["files"])})
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
