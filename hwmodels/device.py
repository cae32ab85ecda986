"""Accelerators: what their makers promise, in SI units, with the source of each number."""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hwmodels.precision import math_of, precision
from hwmodels.prices import list_prices
from hwmodels.tables import is_profile, read_toml

CATALOGUE = Path(__file__).with_name("devices.toml")
PRECISION_KEYS = ("fp32", "tf32", "fp16", "bf16", "fp8", "int8", "fp4")


@dataclass(frozen=True, slots=True, kw_only=True)
class Interconnect:
    """A link as latency plus size over bandwidth (the alpha-beta model)."""

    kind: str
    """NVLink, PCIe, ICI, Infinity Fabric, InfiniBand, ..."""
    latency_s: float
    bytes_per_s: float
    """The bandwidth in one direction, of one device."""

    def send_s(self, size_bytes: Any) -> Any:
        """Seconds to hand *size_bytes* to a neighbour."""
        return self.latency_s + size_bytes / self.bytes_per_s

    def ring_all_reduce_s(self, size_bytes: Any, n: int) -> Any:
        """Seconds of a ring all-reduce of *size_bytes* over *n* devices: 2(n-1) steps of 1/n of the data each.

        Patarasuk and Yuan, J. Parallel Distrib. Comput. 69 (2009): bandwidth-optimal all-reduce.
        """
        if n <= 1:
            return size_bytes * 0.0
        steps = 2 * (n - 1)
        return steps * self.latency_s + size_bytes * (steps / n) / self.bytes_per_s

    def ring_all_gather_s(self, size_bytes: Any, n: int) -> Any:
        """Seconds until each of *n* devices holds all *size_bytes*, having started with 1/n (reduce-scatter alike)."""
        if n <= 1:
            return size_bytes * 0.0
        return (n - 1) * self.latency_s + size_bytes * ((n - 1) / n) / self.bytes_per_s

    def collective_s(self, kind: str, size_bytes: Any, n: int) -> Any:
        """Seconds of an all_reduce, all_gather, reduce_scatter (all as rings) or all_to_all."""
        if kind == "all_reduce":
            return self.ring_all_reduce_s(size_bytes, n)
        if kind in ("all_gather", "reduce_scatter"):
            return self.ring_all_gather_s(size_bytes, n)
        if kind == "all_to_all":
            # Each device sends 1/n of its bytes to each other one, as many as in a ring.
            return self.ring_all_gather_s(size_bytes, n)
        raise ValueError(f"a link prices all_reduce, all_gather, reduce_scatter and all_to_all; got {kind!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator: dense peaks, memory, links, power and price.

    `sources` maps a field name (peaks as `peak.bf16`) to the document behind the number.
    """

    name: str
    title: str
    vendor: str
    peak_flops_per_s: Mapping[str, float] = field(hash=False)
    """Dense (never sparse) peak by arithmetic: fp32, tf32, fp16, bf16, fp8, int8, fp4, where the device has it."""
    memory_bytes: float
    hbm_bytes_per_s: float
    n_cores: int
    """Streaming multiprocessors, compute units or TensorCores."""
    link: Interconnect
    """The link to the other devices of the node."""
    network: Interconnect
    """The network between nodes, a device's share."""
    devices_per_node: int
    """Devices that `link` joins: eight of a board, 72 of an NVL72 rack, a pod."""
    tdp_w: float
    host: Interconnect | None = None
    """The bandwidth to the memory of the machine around it: PCIe, or NVLink-C2C to a Grace. None where it is not stated."""
    l2_bytes: float | None = None
    clock_hz: float | None = None
    """Highest clock of the multiprocessors."""
    price_usd_per_hour: float | None = None
    aliases: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    def peak(self, arithmetic: str) -> float:
        """Dense FLOP/s in *arithmetic*; ValueError naming what the device offers if it has none."""
        value = self.peak_flops_per_s.get(arithmetic)
        if value is None:
            raise ValueError(
                f"{self.name} has no {arithmetic} arithmetic in its datasheet; "
                f"it offers {', '.join(self.peak_flops_per_s)}"
            )
        return value

    def peak_of(self, fmt: str) -> float:
        """Dense FLOP/s of the arithmetic that multiplies the format *fmt*; ValueError where there is none."""
        return self.first_peak(math_of(fmt, self.peak_flops_per_s, self.vendor), f"precision {precision(fmt)}")

    def first_peak(self, choices: tuple[str, ...], what: str) -> float:
        """Dense FLOP/s of the first of *choices* that the device offers; *what* names the format in the error."""
        for arithmetic in choices:
            if arithmetic in self.peak_flops_per_s:
                return self.peak_flops_per_s[arithmetic]
        raise ValueError(
            f"{self.name} has no {' or '.join(choices)} arithmetic, which {what} needs; "
            f"it offers {', '.join(self.peak_flops_per_s)}: choose another precision or device"
        )


_NUMBERS = {
    "memory_bytes": True,
    "hbm_bytes_per_s": True,
    "n_cores": True,
    "devices_per_node": True,
    "tdp_w": True,
    "l2_bytes": False,
    "clock_hz": False,
    "price_usd_per_hour": False,
    "link.latency_s": True,
    "link.bytes_per_s": True,
    "network.latency_s": True,
    "network.bytes_per_s": True,
    "host.latency_s": False,
    "host.bytes_per_s": False,
}
_KEYS = {"title", "vendor", "aliases", "peak", "link", "network", "host", "like"} | {
    k for k in _NUMBERS if "." not in k
}


def _sourced(where: str, entry: Any, documents: Mapping[str, str]) -> tuple[float, str]:
    if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], str)):
        raise ValueError(f'{where}: expected [number, "source"], got {entry!r}')
    number, source = entry
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number) or number <= 0:
        raise ValueError(f"{where}: expected a positive finite number, got {number!r}")
    return float(number), documents.get(source, source)


def _refuse_misspelt(where: str, table: Mapping[str, Any]) -> None:
    """ValueError for a key that a device does not have, and for a needed one that is missing."""
    for key in table:
        if key not in _KEYS:
            near = difflib.get_close_matches(key, sorted(_KEYS), n=1)
            raise ValueError(
                f"{where}.{key} is not a setting of a device" + (f"; did you mean {near[0]}?" if near else "")
            )
    for key in ("title", "vendor", "peak", "link", "network"):
        if key not in table:
            raise ValueError(f"{where}.{key} is missing")


def _peaks(
    where: str, table: Mapping[str, Any], documents: Mapping[str, str]
) -> tuple[dict[str, float], dict[str, str]]:
    """Dense peaks by arithmetic, and where each is from."""
    sources: dict[str, str] = {}
    peaks: dict[str, float] = {}
    for arithmetic, entry in table["peak"].items():
        if arithmetic not in PRECISION_KEYS:
            raise ValueError(f"{where}.peak.{arithmetic} is not an arithmetic; valid: {', '.join(PRECISION_KEYS)}")
        peaks[arithmetic], sources[f"peak.{arithmetic}"] = _sourced(f"{where}.peak.{arithmetic}", entry, documents)
    if not peaks:
        raise ValueError(f"{where}.peak is empty; give at least one dense peak")
    return peaks, sources


def _device(name: str, table: Mapping[str, Any], documents: Mapping[str, str], path: Path) -> Device:
    where = f"{path}: {name}"
    _refuse_misspelt(where, table)
    peaks, sources = _peaks(where, table, documents)
    numbers: dict[str, float | None] = {}
    for key, needed in _NUMBERS.items():
        head, _, tail = key.partition(".")
        if head == "host" and table["link"].get("kind") == "PCIe":
            sources[key] = sources[f"link.{tail}"]
            continue
        entry = table.get(head) if not tail else table.get(head, {}).get(tail)
        if entry is not None:
            numbers[key], sources[key] = _sourced(f"{where}.{key}", entry, documents)
        elif needed:
            raise ValueError(f"{where}.{key} is missing")
        else:
            numbers[key] = None

    def need(key: str) -> float:
        value = numbers[key]
        assert value is not None
        return value

    def link(head: str) -> Interconnect:
        return Interconnect(
            kind=str(table[head].get("kind", head)),
            latency_s=need(f"{head}.latency_s"),
            bytes_per_s=need(f"{head}.bytes_per_s"),
        )

    return Device(
        name=name,
        title=str(table["title"]),
        vendor=str(table["vendor"]),
        aliases=tuple(table.get("aliases", ())),
        peak_flops_per_s=peaks,
        memory_bytes=need("memory_bytes"),
        hbm_bytes_per_s=need("hbm_bytes_per_s"),
        n_cores=int(need("n_cores")),
        devices_per_node=int(need("devices_per_node")),
        link=link("link"),
        network=link("network"),
        host=_host(where, table, link),
        tdp_w=need("tdp_w"),
        l2_bytes=numbers["l2_bytes"],
        clock_hz=numbers["clock_hz"],
        price_usd_per_hour=numbers["price_usd_per_hour"],
        sources=sources,
    )


def _host(where: str, table: Mapping[str, Any], link: Callable[[str], Interconnect]) -> Interconnect | None:
    """The link to the host; a card's is the slot that joins it to other cards."""
    if table["link"].get("kind") == "PCIe":
        return link("link")
    if "host" not in table:
        return None
    if missing := {"latency_s", "bytes_per_s"} - set(table["host"]):
        raise ValueError(f"{where}.host.{min(missing)} is missing")
    return link("host")


def read_devices(path: str | Path) -> dict[str, Device]:
    """The devices of a TOML file in the form of `devices.toml`, by name.

    Each number is `[value, "source"]`, where the source is a key of the file's `[documents]` table or free text; what a device
    does not say it has from the one that it is `like`, of its file or of the catalogue.
    ValueError names the file and the key of what is missing, unknown or not a positive number.
    """
    tables, documents = _tables(Path(path))
    return {name: _device(name, table, documents, Path(path)) for name, table in tables.items()}


def _tables(path: Path) -> tuple[dict[str, Mapping[str, Any]], Mapping[str, str]]:
    """The devices of a file with what they have from others, and the documents that their sources name."""
    data = read_toml(path)
    documents: Mapping[str, str] = data.pop("documents", {})
    given = {name: table for name, table in data.items() if isinstance(table, dict)}
    if path == CATALOGUE:
        prices = {name: list_prices().find(name) for name in given}
        listed = {
            name: {"price_usd_per_hour": [each.usd_per_hour, each.source]} for name, each in prices.items() if each
        }
        # A device without a price of its own has none: that of the one that it is like is another's.
        given = {name: {"price_usd_per_hour": None, **table, **listed.get(name, {})} for name, table in given.items()}
    if not given:
        raise ValueError(f"{path} holds no device; expected a table for each, such as [my-gpu]")
    tables: dict[str, Mapping[str, Any]] = {}
    for name, table in given.items():
        base = str(table["like"]) if "like" in table else None
        like: Mapping[str, Any] | None = {} if base is None else given.get(base)
        if base is not None and like is None and path != CATALOGUE:
            lent, of_them = _tables(CATALOGUE)
            like, documents = lent.get(base), {**of_them, **documents}
        if like is None or ("like" in like and base in given):
            near = difflib.get_close_matches(str(base), [*given, *device_catalogue()], n=1) if path != CATALOGUE else ()
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(
                f"{path}: {name}.like names {base!r}, which is neither a full device of this file nor one of the catalogue{hint}"
            )
        tables[name] = {**like, "aliases": [], **table} if base is not None else table
    return tables, documents


@functools.cache
def device_catalogue() -> Mapping[str, Device]:
    """Every shipped device, by its name."""
    return read_devices(CATALOGUE)


@functools.cache
def _by_name() -> dict[str, Device]:
    """Devices of the catalogue by their names and aliases."""
    return {name: device for device in device_catalogue().values() for name in (device.name, *device.aliases)}


def load_device(name_or_path: str | Path) -> Device:
    """The device called *name_or_path* (name or alias, case and underscores ignored), or that of a datasheet in TOML.

    Names may have the maker before them, as drivers print them: NVIDIA H100 80GB HBM3.

    ValueError with the nearest names for an unknown one.
    """
    text = str(name_or_path)
    if text.endswith(".toml"):
        if not Path(text).is_file():
            raise ValueError(f"hardware profile {text} does not exist")
        if is_profile(text):
            raise ValueError(f"{text} is a calibrated profile and no datasheet; take the device that it describes")
        found = read_devices(text)
        if len(found) != 1:
            raise ValueError(f"{text} holds {len(found)} devices; a hardware profile holds one")
        return next(iter(found.values()))
    names = _by_name()
    key = text.strip().lower().replace("_", "-").replace(" ", "-")
    for spelt in (key, re.sub(r"^(nvidia-(geforce-)?|tesla-|amd-(instinct-)?)", "", key)):
        if spelt in names:
            return names[spelt]
    near = difflib.get_close_matches(key, names, n=3, cutoff=0.4) or sorted(device_catalogue())
    raise ValueError(
        f"unknown hardware {text!r}; nearest valid names: {', '.join(near)} (or a path to a .toml profile)"
    )
