"""The parameters that were not measured on a device, made from the measured devices that are the most like it.

A parameter says what it is a share of, or which numbers of the datasheet it follows (`scales_with`); a borrowed one is the
donors' mean after that, each donor counting the more the nearer its datasheet is. Nothing borrowed is written down: it is
made when it is asked for, so that a new measurement is lent as soon as its profile is there.
"""

from __future__ import annotations

import functools
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hwmodels.device import Device, device_catalogue, load_device
from hwmodels.kernels.families import FAMILIES
from hwmodels.kernels.parameters import Datasheet, blended, of_server
from hwmodels.profiles.files import FOLDER, calibrated_devices, read_kernel, read_profile
from hwmodels.profiles.profile import Kernel, Profile, Provenance, datasheet_of
from hwmodels.tables import read_toml

LOANS = FOLDER.with_name("loans.toml")
"""The error of what is lent on measured devices that were left out: see `hwmodels.left_out`."""
_LENDERS = {"NVIDIA": ("NVIDIA",), "AMD": ("AMD", "NVIDIA"), "Google": ("Google",)}
"""Maker -> makers whose measured devices lend to its own. AITER and RCCL run on AMD's alone."""
_LINKS = ("collective", "stepped", "exchange")
"""Families that run over the links between devices."""
_BY_FORMAT = ("gemm", "moe")
"""Families whose variants are format/software."""
_ARITHMETIC = {
    "fp16": "bf16", "fp8_block": "fp8", "nvfp4": "fp4", "mxfp4": "bf16", "mxfp4_mxfp8": "fp8", "mxfp4_mxfp4": "fp4", "int4": "bf16",
    "int4_fp8": "fp8",
}  # fmt: skip
"""The arithmetic of formats that bear another name than their arithmetic."""
_ONE_LAYER = "bf16/lss"
"""Tables of one measured layer, which say nothing of another device."""
_WORDS = {
    "gemm": "GEMM", "prefill": "prompts", "decode": "decodes", "encoder": "encoders", "moe": "experts",
    "mla_prefill": "latent attention", "mla_decode": "latent attention", "mla_bmm": "latent attention",
    "linear_prefill": "linear attention", "linear_decode": "linear attention",
    "compressed_prefill": "attention to compressed tokens", "compressed_decode": "attention to compressed tokens",
    "collective": "collectives", "stepped": "collectives", "exchange": "exchange with experts",
    "tpu_gemm": "GEMM", "tpu_prefill": "prompts", "tpu_decode": "decodes",
}  # fmt: skip
"""Families whose factor a note states."""
_USUAL_CLOCK_HZ = 1.9e9
_NEAR = 0.15
"""Distance below which donors no longer differ: about the spread between two servers with the same device."""


@functools.cache
def load_profile(name_or_path: str) -> Profile:
    """A calibrated profile, a file's (a path ending in .toml), or a borrowed one for another catalogue device.

    What a catalogue device was not measured for is lent by others as it is asked for.
    """
    if name_or_path.endswith(".toml"):
        return read_profile(name_or_path)
    device = load_device(name_or_path)
    if device.name not in calibrated_devices():
        return borrow_for(device)
    profile = read_profile(FOLDER / f"{device.name}.toml")
    own = _own(profile.kernels)
    kept = tuple(sorted({_format(kernel.family, kernel.variant) for kernel in own}))
    return replace(profile, kernels=own, lender=Loans(device=device, without=(device.name,), kept=kept))


def borrow_for(device: Device, *, without: Sequence[str] = ()) -> Profile:
    """A profile of what measured devices other than *without* lend to *device*, on its own datasheet numbers.

    A device of the catalogue lends itself nothing; one of the same name with other numbers is another.
    """
    itself = (device.name,) if device_catalogue().get(device.name) == device else ()
    lender = Loans(device=device, without=(*itself, *without))
    if not lender.donors:
        raise ValueError(
            f"{device.name} has no calibrated profile and no calibrated device is of a kind with those from "
            f"{device.vendor}; fit one with rooftrace fit, or price it by its datasheet (cost_model: roofline)"
        )
    return Profile(name=device.name, datasheet=datasheet_of(device), kernels=(), note=lender.note, lender=lender)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loans:
    """Makes what *device* borrows from the calibrated devices, but those of *without*; a `Lender`."""

    device: Device
    without: tuple[str, ...] = ()
    kept: tuple[tuple[str, str], ...] = ()
    """Families and formats of products and experts that the device has been measured for with some software, which serves
    the others better than another device's."""

    @property
    def donors(self) -> tuple[str, ...]:
        """Calibrated devices of the same kind, the nearest first."""
        return _donors(self.device, self.without)

    @property
    def note(self) -> str:
        return self.note_of({family: self.factors(family) for family in _WORDS})

    def note_of(self, factors: Mapping[str, Sequence[float]]) -> str:
        near = ", ".join(self.donors[:2])
        by_word: dict[str, list[float]] = {}
        for family, word in _WORDS.items():
            by_word.setdefault(word, []).extend(factors.get(family, ()))
        within = [f"{word} {_range(values)}" for word, values in by_word.items() if values]
        return (
            f"efficiencies and latencies borrowed from {near}{' and others' if len(self.donors) > 2 else ''}, with the "
            f"datasheet numbers of {self.device.name}; nine times in ten a kernel's time is within a factor of what is "
            f"priced: {', '.join(within)}"
        )

    def factors(self, family: str) -> tuple[float, ...]:
        return tuple(_factor(family, self.distance(family, variant)) for variant in self.variants(family))

    def distance(self, family: str, variant: str) -> float:
        """Mean distance of the devices that lend a parameter set."""
        return _shares(self.device, _owners(self.device, self.without, family, variant), family)[1]

    def variants(self, family: str) -> Sequence[str]:
        found = _lendable(self.donors, family)
        if family not in _BY_FORMAT:
            return found
        peaks = datasheet_of(self.device).peak_flops_per_s
        return tuple(
            variant
            for variant in found
            if _format(family, variant) not in self.kept and arithmetic_of(family, variant) in peaks
        )

    def kernel(self, family: str, variant: str) -> Kernel:
        return _lent(self.device, self.without, family, variant)


def _range(factors: Sequence[float]) -> str:
    ends = dict.fromkeys(f"{end:.2g}" for end in (min(factors), max(factors)))
    return " to ".join(ends)


def _format(family: str, variant: str) -> tuple[str, str]:
    """Family and number format of a kernel whose variants are format/software."""
    return family, variant.partition("/")[0]


def arithmetic_of(family: str, variant: str) -> str:
    """The key of a datasheet's peaks that products or experts of a variant are multiplied at."""
    name = variant.partition("/")[0]
    if (family, name) == ("gemm", "mxfp4"):  # of both operands, which experts call mxfp4_mxfp4
        return "fp4"
    return _ARITHMETIC.get(name.partition("-")[0], name.partition("-")[0])


def distance(device: Device, other: Device, family: str) -> float:
    """The distance of two devices for a kernel: 0 where their datasheets agree, about 1 at a factor e in all that counts."""
    return _distance(device, other, family)


def _distance(device: Device, other: Device, family: str) -> float:
    if family in _LINKS:
        apart = abs(math.log(device.link.bytes_per_s / other.link.bytes_per_s))
        return apart + (1.0 if _switched(device) != _switched(other) else 0.0)
    first, second = datasheet_of(device), datasheet_of(other)
    logs = [
        math.log(of(first) / of(second))
        for of in (
            lambda sheet: sheet.sm_count,
            lambda sheet: sheet.peak_flops_per_s["bf16"] / sheet.sm_count,
            lambda sheet: sheet.hbm_bytes_per_s / sheet.sm_count,
        )
    ]
    # A datasheet that states no such memory says nothing of how far apart two devices are in it.
    if device.l2_bytes is not None and other.l2_bytes is not None:
        logs.append(math.log((first.l2_bytes / first.sm_count) / (second.l2_bytes / second.sm_count)))
    return math.sqrt(sum(value * value for value in logs) / len(logs))


def quantities(device: Device) -> dict[str, float]:
    """The quantities that parameters may scale with; a device without a stated clock scales as if all clocks were alike."""
    sheet = datasheet_of(device)
    return {
        "sms": sheet.sm_count,
        "clock": device.clock_hz or _USUAL_CLOCK_HZ,
        "peak": sheet.peak_flops_per_s["bf16"],
        "hbm": sheet.hbm_bytes_per_s,
        "l2": sheet.l2_bytes,
        "link": sheet.link_bytes_per_s,
    }


def _switched(device: Device) -> bool:
    return device.link.kind not in ("PCIe", "memory")


@functools.lru_cache(maxsize=1024)
def _donors(device: Device, without: tuple[str, ...]) -> tuple[str, ...]:
    makers = _LENDERS.get(device.vendor, ())
    alike = [name for name in calibrated_devices() if name not in without and load_device(name).vendor in makers]
    return tuple(sorted(alike, key=lambda name: _distance(device, load_device(name), "gemm")))


@functools.cache
def _shelf(name: str) -> tuple[Mapping[tuple[str, str], str], Mapping[str, list[str]]]:
    """The text of each parameter set that a shipped profile has of its own, few of which are ever read, and its columns."""
    head, *blocks = re.split(r"(?m)^(?=\[\[kernel\]\])", (FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    found: dict[tuple[str, str], str] = {}
    for block in blocks:
        keys = dict(re.findall(r'(?m)^(family|variant|borrowed_from) = "(.*)"$', block))
        if not keys.get("borrowed_from"):
            found[keys["family"], keys["variant"]] = block
    return found, tomllib.loads(head).get("columns", {})


@functools.cache
def _lendable(donors: tuple[str, ...], family: str) -> tuple[str, ...]:
    found = {variant: None for name in donors for own, variant in _shelf(name)[0] if own == family}
    return tuple(variant for variant in sorted(found) if variant != _ONE_LAYER)


@functools.cache
def _entry(name: str, family: str, variant: str) -> Kernel:
    texts, columns = _shelf(name)
    return read_kernel(f"{name}.toml", texts[family, variant], columns)


def _owners(device: Device, without: tuple[str, ...], family: str, variant: str) -> tuple[str, ...]:
    """The devices that have a parameter set to lend, the nearest first."""
    owners = [name for name in Loans(device=device, without=without).donors if (family, variant) in _shelf(name)[0]]
    if not owners or variant == _ONE_LAYER:
        raise ValueError(f"nobody lends {family} {variant} to {device.name}; ask `variants` first")
    if family in _LINKS and _switched(device):
        # Behind a switch no two devices share a path: servers without one say nothing of that.
        owners = [name for name in owners if _switched(load_device(name))] or owners
    return tuple(sorted(owners, key=lambda name: _distance(device, load_device(name), family)))


def _shares(device: Device, owners: Sequence[str], family: str) -> tuple[tuple[float, ...], float]:
    """The weight of each donor, in shares of 1, and their mean distance."""
    apart = [_distance(device, load_device(name), family) for name in owners]
    weights = [1.0 / (_NEAR + far) ** 2 for far in apart]
    whole = sum(weights)
    return tuple(weight / whole for weight in weights), sum(
        w * far for w, far in zip(weights, apart, strict=True)
    ) / whole


@functools.lru_cache(maxsize=4096)
def _lent(device: Device, without: tuple[str, ...], family: str, variant: str) -> Kernel:
    owners = _owners(device, without, family, variant)
    shares, apart = _shares(device, owners, family)
    kernels = [_entry(name, family, variant) for name in owners]
    kind, numbers = FAMILIES[family].parameters, quantities(device)
    theirs = [quantities(load_device(name)) for name in owners]
    params = blended(
        kind, [(share, k.params, own) for share, k, own in zip(shares, kernels, theirs, strict=True)], numbers
    )
    if family in _LINKS and not _switched(device):
        # How many devices share a path is the server's doing, of which no datasheet says a word: any server counts alike.
        even = blended(
            kind, [(1 / len(owners), k.params, own) for k, own in zip(kernels, theirs, strict=True)], numbers
        )
        params = replace(params, **{name: getattr(even, name) for name in of_server(kind)})
    return Kernel(family=family, variant=variant, params=params, provenance=_origin(family, owners, kernels, apart))


def _origin(family: str, owners: Sequence[str], kernels: Sequence[Kernel], apart: float) -> Provenance:
    """Where a loan comes from; its interval is that of devices left out, which grows with the distance *apart*."""
    origins = [kernel.provenance for kernel in kernels]
    low, high = loan_ends(family)
    worst = max(origins, key=lambda origin: origin.held_p90_pct)
    return replace(
        worst,
        files=tuple(sorted({file for origin in origins for file in origin.files})),
        software=", ".join(sorted({origin.software for origin in origins})),
        points=sum(origin.points for origin in origins),
        borrowed_from=", ".join(owners),
        held_low_pct=100.0 * math.expm1(low * (1.0 + apart)),
        held_high_pct=100.0 * math.expm1(high * (1.0 + apart)),
        held_coverage_pct=None,
        shortest_us=None,
        longest_us=None,
    )


def _factor(family: str, apart: float) -> float:
    """The wider side of a loan's interval."""
    low, high = loan_ends(family)
    return math.exp(max(-low, high) * (1.0 + apart))


def loan_ends(family: str) -> tuple[float, float]:
    """Ends of the interval of ln(measured / lent) of a family, at distance 0."""
    return _loan_errors().get(family, _loan_errors()["other"])


@functools.cache
def _loan_errors() -> Mapping[str, tuple[float, float]]:
    """Family -> ends of an interval of ln(measured / lent), divided by 1 + distance (`hwmodels.left_out.widths`)."""
    if not LOANS.is_file():
        return {"other": (-0.5, 0.5)}
    return {family: (float(row["low"]), float(row["high"])) for family, row in read_toml(LOANS)["family"].items()}


def _own(kernels: Sequence[Kernel]) -> tuple[Kernel, ...]:
    return tuple(kernel for kernel in kernels if not kernel.provenance.borrowed_from)


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
    """The profile with what it lacks taken from the donors, in their order, for a file of its own; every origin says so.

    Products and experts are lent by format: where a device has a format from one stack, that serves the others, and formats
    that it cannot multiply are of no use to it.
    """
    kernels = list(profile.kernels)
    own_formats = {_format(kernel.family, kernel.variant) for kernel in profile.kernels}
    have = {(kernel.family, kernel.variant) for kernel in kernels}
    for donor in donors:
        for kernel in donor.whole().kernels:
            if (kernel.family, kernel.variant) in have or kernel.variant == _ONE_LAYER:
                continue
            if kernel.family in _BY_FORMAT and (
                _format(kernel.family, kernel.variant) in own_formats
                or arithmetic_of(kernel.family, kernel.variant) not in profile.datasheet.peak_flops_per_s
            ):
                continue
            have.add((kernel.family, kernel.variant))
            origin = replace(kernel.provenance, borrowed_from=kernel.provenance.borrowed_from or donor.name)
            kernels.append(replace(kernel, provenance=origin))
    return replace(profile, kernels=tuple(kernels))
