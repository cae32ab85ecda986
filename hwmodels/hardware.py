"""Hardware as a person names it: a device of the catalogue, a datasheet of one's own, or a calibrated profile."""

from __future__ import annotations

from pathlib import Path

from hwmodels.device import Device, load_device
from hwmodels.profiles import device_of, read_profile
from hwmodels.tables import is_profile


def load_hardware(name_or_path: str | Path) -> Device:
    """The device called *name_or_path*, that of a datasheet file, or the one that a calibrated profile describes.

    ValueError with the nearest names for an unknown one.
    """
    text = str(name_or_path)
    if text.endswith(".toml") and is_profile(text):
        return device_of(read_profile(text))
    return load_device(text)
