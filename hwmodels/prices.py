"""List prices of an hour of a device by provider, each with its date and source."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hwmodels.tables import ROOM, read_toml

_KEYS = {"provider": str, "usd_per_hour": (int, float), "listed": str, "seen": str}


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The list price of an hour of a device at one provider."""

    provider: str
    usd_per_hour: float
    listed: str
    """The item that the price list names: an instance, or the device alone."""
    seen: str
    """When, as YYYY, YYYY-MM or YYYY-MM-DD."""
    page: str
    """Name and address of the page."""

    @property
    def source(self) -> str:
        return f"list price of {self.provider} as seen in {self.seen} ({self.listed}); {self.page}"


@dataclass(frozen=True, slots=True)
class Prices:
    """The prices of a table, by device; the first of a device is its default."""

    of: Mapping[str, tuple[Price, ...]]

    @property
    def providers(self) -> tuple[str, ...]:
        """Those that list a device, by name."""
        return tuple(sorted({price.provider for listed in self.of.values() for price in listed}))

    def find(self, device: str, provider: str | None = None) -> Price | None:
        """The list price of *device* at *provider*, or the default one; None where there is none."""
        return next((each for each in self.of.get(device, ()) if provider in (None, each.provider)), None)


@functools.cache
def list_prices() -> Prices:
    """The prices that are shipped."""
    return read_prices(ROOM / "prices.toml")


def read_prices(path: str | Path) -> Prices:
    """The prices of a file in the form of `prices.toml`; ValueError names the file and the row of what is missing or wrong."""
    data = read_toml(Path(path))
    pages, devices = data.get("providers", {}), data.get("devices")
    if not isinstance(devices, Mapping) or not devices:
        raise ValueError(f"{path} holds no price; expected a table [devices] with a list of rows for each device")
    found = {}
    for device, rows in devices.items():
        if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
            raise ValueError(f"{path}: devices.{device} is a list of rows {{{', '.join(_KEYS)}}}; got {rows!r}")
        found[device] = tuple(_price(row, f"{path}: devices.{device}", pages) for row in rows)
    return Prices(found)


def _price(row: Mapping[str, object], where: str, pages: Mapping[str, str]) -> Price:
    for key in row:
        if key not in _KEYS:
            raise ValueError(f"{where}: {key} is not part of a price; valid: {', '.join(_KEYS)}")
    for key, kind in _KEYS.items():
        if not isinstance(row.get(key), kind) or isinstance(row[key], bool):
            raise ValueError(f"{where}: {key} is missing, or neither a text nor a number; got {row.get(key)!r}")
    provider, usd = str(row["provider"]), row["usd_per_hour"]
    assert isinstance(usd, int | float)
    if not 0 < usd < math.inf:
        raise ValueError(f"{where}: usd_per_hour is a finite number above 0; got {usd}")
    if provider not in pages:
        raise ValueError(f"{where}: {provider} is not among [providers], which names the page of each")
    return Price(
        provider=provider,
        usd_per_hour=float(usd),
        listed=str(row["listed"]),
        seen=str(row["seen"]),
        page=pages[provider],
    )
