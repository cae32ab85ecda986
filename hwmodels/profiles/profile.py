"""A device's fitted kernels, where each came from, and its datasheet numbers apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hwmodels.device import Device, Interconnect, load_device
from hwmodels.kernels.families import FAMILIES
from hwmodels.kernels.parameters import Datasheet


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
