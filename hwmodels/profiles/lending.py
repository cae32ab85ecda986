"""Whose measurements stand in for what was not measured on a device."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

from hwmodels.device import Device, load_device
from hwmodels.kernels.moe import EXPERT_FORMATS
from hwmodels.kernels.parameters import Datasheet
from hwmodels.profiles.files import FOLDER, calibrated_devices, read_profile
from hwmodels.profiles.profile import Kernel, Profile, datasheet_of

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


def _format(kernel: Kernel) -> tuple[str, str]:
    """Family and number format of a kernel whose variants are format/software."""
    return kernel.family, kernel.variant.partition("/")[0]


def _multiplies(profile: Profile, kernel: Kernel) -> bool:
    """Whether the device of *profile* has the arithmetic of a product's or an expert's format."""
    family, fmt = _format(kernel)
    if family == "moe":
        fmt = fmt.partition("-")[0]
        arithmetic = EXPERT_FORMATS[fmt].dtype if fmt in EXPERT_FORMATS else fmt
    else:
        arithmetic = {"fp8_block": "fp8", "nvfp4": "fp4"}.get(fmt, fmt)
    return arithmetic in profile.datasheet.peak_flops_per_s


def complete(profile: Profile, donors: Sequence[Profile]) -> Profile:
    """The profile with what it lacks taken from the donors, in their order; every origin says so.

    Tables of one measured layer stay where they were measured, and in-node collectives do not cross between switched
    and PCIe links (more than a factor three apart). Products and experts are lent by format: where a device has a
    format from one stack, that serves the others, and formats that it cannot multiply are of no use to it.
    """
    kernels = list(profile.kernels)
    own_formats = {_format(kernel) for kernel in profile.kernels}
    have = {(kernel.family, kernel.variant) for kernel in kernels}
    for donor in donors:
        alike = _alike_links(donor, profile)
        for kernel in donor.kernels:
            other_links = _within_node(kernel) and not alike
            if (kernel.family, kernel.variant) in have or other_links or kernel.variant == "bf16/lss":
                continue
            if kernel.family in ("gemm", "moe") and (
                _format(kernel) in own_formats or not _multiplies(profile, kernel)
            ):
                continue
            have.add((kernel.family, kernel.variant))
            origin = replace(kernel.provenance, borrowed_from=kernel.provenance.borrowed_from or donor.name)
            kernels.append(replace(kernel, provenance=origin))
    return replace(profile, kernels=tuple(kernels))
