"""A device's fitted kernels, where each came from, and its datasheet numbers apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from hwmodels.device import Device, Interconnect, load_device
from hwmodels.kernels.families import FAMILIES
from hwmodels.kernels.intervals import Estimate, Spread
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
    """The devices whose measurements these are, when they are not this one's."""
    held_low_pct: float | None = None
    """5th percentile of measured / predicted - 1 on unseen shapes, in percent (lent: on devices left out of the loan)."""
    held_high_pct: float | None = None
    """95th percentile of it."""
    held_coverage_pct: float | None = None
    """Unseen rows inside the interval that the other half of the unseen rows gives."""
    shortest_us: float | None = None
    """Least time that was measured."""
    longest_us: float | None = None

    @property
    def judged(self) -> bool:
        """Whether some shapes were left out of a fit; where there were too few, `held_*` are the errors of the fit itself."""
        return (self.held_mape_pct, self.held_median_pct) != (self.fit_mape_pct, self.fit_median_pct)

    @property
    def spread(self) -> Spread:
        """The 90 % interval of a prediction; profiles that do not state its ends have the 90th percentile of the errors."""
        p90 = min(self.held_p90_pct, 1e4)
        return Spread(
            low_pct=-100.0 * p90 / (100.0 + p90) if self.held_low_pct is None else self.held_low_pct,
            high_pct=p90 if self.held_high_pct is None else self.held_high_pct,
            shortest_s=(self.shortest_us or 0.0) * 1e-6,
            longest_s=math.inf if self.longest_us is None else self.longest_us * 1e-6,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One fitted parameter set: a family, the variant it describes (format, operation, software) and its origin."""

    family: str
    variant: str
    params: Any
    provenance: Provenance
    interval: Mapping[str, tuple[float, float]] = field(default_factory=dict, hash=False)
    """95 % interval of each fitted parameter; empty where the fit that gave it kept none."""


class Lender(Protocol):
    """Makes the parameter sets that a device was not measured for, one at a time: most are never asked for."""

    @property
    def note(self) -> str:
        """The devices that lend, and the error that what is lent may have."""
        ...

    def note_of(self, factors: Mapping[str, Sequence[float]]) -> str:
        """The note with these factors, by family of kernels."""
        ...

    def factors(self, family: str) -> tuple[float, ...]:
        """Within which factor of what is priced each parameter set of a family lies nine times in ten."""
        ...

    def variants(self, family: str) -> Sequence[str]:
        """Those that can be lent."""
        ...

    def kernel(self, family: str, variant: str) -> Kernel: ...

    def distance(self, family: str, variant: str) -> float:
        """The distance of the devices that lend a parameter set."""
        ...


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

    lender: Lender | None = field(default=None, repr=False, compare=False)
    """The lender that stands in for kernels that were not measured."""

    def __hash__(self) -> int:
        # The hash of everything went through hundreds of kernels whenever a table of theirs was looked up.
        return hash((self.name, self.note, len(self.kernels)))

    @property
    def kind(self) -> str:
        """The kind of device whose kernels these are: gpu, tpu or cpu."""
        return "cpu" if self.has("cpu_gemm") else "tpu" if self.has("tpu_gemm") else "gpu"

    @property
    def links_measured(self) -> bool:
        """Whether there are collectives, the device's own or borrowed."""
        return self.has("collective")

    def variants(self, family: str) -> tuple[str, ...]:
        """The variants of the kernels of a family, the device's own first and then what it can borrow."""
        own = [kernel.variant for kernel in self.kernels if kernel.family == family]
        lent = self.lender.variants(family) if self.lender is not None else ()
        return tuple(dict.fromkeys((*own, *lent)))

    def has(self, family: str) -> bool:
        """Whether there are kernels of a family, the device's own or borrowed."""
        return any(kernel.family == family for kernel in self.kernels) or bool(self.variants(family))

    def whole(self) -> Profile:
        """The profile with everything that it can borrow among its kernels."""
        have = {(kernel.family, kernel.variant) for kernel in self.kernels}
        lent = [] if self.lender is None else [
            self.lender.kernel(family, variant)
            for family in FAMILIES
            for variant in self.lender.variants(family)
            if (family, variant) not in have
        ]  # fmt: skip
        return replace(self, kernels=(*self.kernels, *lent), lender=None)

    def find(self, family: str, variants: Sequence[str]) -> Any | None:
        """Parameters of the first of `variants` that the profile has, or None."""
        kernel = self.kernel(family, variants)
        return None if kernel is None else kernel.params

    def kernel(self, family: str, variants: Sequence[str]) -> Kernel | None:
        """As `find`, with the origin of the parameters."""
        if family not in FAMILIES:
            raise ValueError(f"family must be one of {', '.join(FAMILIES)}; got {family!r}")
        have = {kernel.variant: kernel for kernel in self.kernels if kernel.family == family}
        lent = set() if self.lender is None else set(self.lender.variants(family))
        for variant in variants:
            if variant in have:
                return have[variant]
            if self.lender is not None and variant in lent:
                return self.lender.kernel(family, variant)
        return None

    def estimate(self, family: str, variants: Sequence[str], **shape: Any) -> Estimate:
        """Seconds of a kernel on this device, with the ends of their 90 % interval; ValueError as `get`.

        `shape` is what the family's equation takes (`FAMILIES[family].equation`), numbers or columns. The interval comes
        from rows that the fit did not see, or, for what is borrowed, from measured devices predicted as this one is; it
        widens outside the range of times that was measured. The low end of a product is no less than its weights, and that of a
        decode no less than its cache, over the datasheet's bandwidth, where they do not fit the L2.
        """
        self.get(family, variants)
        kernel = self.kernel(family, variants)
        assert kernel is not None
        seconds = FAMILIES[family].seconds(kernel.params, self.datasheet, shape)
        found = kernel.provenance.spread.around(seconds)
        if family not in _READ_BYTES:
            return found
        floor_s = np.minimum(found.seconds, _read_s(self.datasheet, _READ_BYTES[family](**shape)))
        low = np.maximum(found.low, floor_s)
        return found._replace(low=float(low) if low.ndim == 0 else low)

    def get(self, family: str, variants: Sequence[str]) -> Any:
        """As `find`, but ValueError says what the profile has when it has none of them."""
        params = self.find(family, variants)
        if params is None:
            have = ", ".join(self.variants(family)) or "none"
            raise ValueError(
                f"profile {self.name} has no {family} parameters for {' or '.join(variants)}; it has {have}"
            )
        return params


def _weight_bytes(*, n: Any, k: Any, weight_bytes: Any = 2.0, **_: Any) -> Any:
    return np.asarray(n, float) * k * weight_bytes


def _cache_bytes(
    *, kv_tokens: Any, seqs: Any, kv_heads: Any, head_dim: Any, kv_bytes: Any = 2.0, query_width: Any = 1, **_: Any
) -> Any:
    """Keys and values of the context; those of the query tokens need not come from memory."""
    cached = np.asarray(kv_tokens, float) - np.asarray(seqs) * query_width
    return 2.0 * kv_bytes * head_dim * kv_heads * cached


_READ_BYTES = {"gemm": _weight_bytes, "decode": _cache_bytes}
"""The bytes that a kernel of a family must read, from the shape that its equation takes."""


def _read_s(sheet: Datasheet, size_bytes: Any) -> Any:
    """Least seconds that bytes take from memory; 0 where the L2 may hold them from one call to the next."""
    return np.where(size_bytes > sheet.l2_bytes, size_bytes / sheet.hbm_bytes_per_s, 0.0)


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
