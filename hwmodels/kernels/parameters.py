"""Parameters with bounds, datasheet numbers and the smooth maximum: what every kernel family shares."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import numpy as np

P = TypeVar("P")
CYCLES: Mapping[str, float] = {"clock": -1.0}
"""The scaling of a time that is a number of cycles."""
_SHARE: Mapping[str, float] = {}


def parameter(
    start: float,
    low: float,
    high: float,
    why: str,
    *,
    scales_with: Mapping[str, float] | None = None,
    server: bool = False,
    optional: bool = False,
) -> Any:
    """A dataclass field with a default, the bounds a fit respects and the physical reason for them.

    `scales_with` says how the number changes from one device to another: datasheet quantities (`QUANTITIES`) and their
    powers. None: a time (a name that ends in `_s`) is a number of cycles, anything else a share of a datasheet's number,
    which is the same everywhere. A *server* parameter belongs to the machine around the device more than to the device. An
    *optional* one stands for something that not every library shows; its default leaves the equation as it is without, and
    files leave it out where it has that value.
    """
    scaling = None if scales_with is None else dict(scales_with)
    if unknown := sorted(set(scaling or ()) - set(QUANTITIES)):
        raise ValueError(f"{unknown[0]} is not a datasheet quantity; there are {', '.join(QUANTITIES)}")
    return field(
        default=start,
        metadata={"low": low, "high": high, "why": why, "scales_with": scaling, "server": server, "optional": optional},
    )


def of_server(kind: type[Any]) -> tuple[str, ...]:
    """Parameters that belong to the machine around a device."""
    return tuple(f.name for f in _fields(kind) if f.metadata.get("server"))


def optional_defaults(kind: type[Any]) -> dict[str, float]:
    """Name -> default of the parameters that files may leave out."""
    return {f.name: cast("float", f.default) for f in _fields(kind) if f.metadata.get("optional")}


def bounds(kind: type[Any]) -> dict[str, tuple[float, float, float]]:
    """Name -> (start, low, high) of each parameter of a parameter dataclass."""
    return {f.name: (cast("float", f.default), f.metadata["low"], f.metadata["high"]) for f in _fields(kind)}


def check_bounds(params: Any) -> None:
    """Raise ValueError when a parameter is not a finite number inside its bounds."""
    kind = cast("type[Any]", type(params))
    for f in _fields(kind):
        value, low, high = getattr(params, f.name), f.metadata["low"], f.metadata["high"]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"{f.name} must be a finite number; got {value!r}")
        # A bound read back from text may differ in its last digit.
        slack = 1e-9 * max(abs(low), abs(high))
        if not low - slack <= value <= high + slack:
            raise ValueError(f"{f.name} must lie in [{low:g}, {high:g}] ({f.metadata['why']}); got {value:g}")


def with_values(kind: type[P], values: Mapping[str, float]) -> P:
    """A parameter object from a mapping that names its parameters, but for optional ones, checked against the bounds."""
    values = {**optional_defaults(kind), **values}
    names = [f.name for f in _fields(kind)]
    unknown = sorted(set(values) - set(names))
    missing = sorted(set(names) - set(values))
    if unknown:
        raise ValueError(f"{unknown[0]} is not a parameter of {kind.__name__}; it has {', '.join(names)}")
    if missing:
        raise ValueError(f"{kind.__name__} needs {', '.join(missing)}; the values given are incomplete")
    params = kind(**values)
    check_bounds(params)
    return params


def _fields(kind: type[Any]) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Datasheet:
    """The vendor's numbers that a kernel model scales with: dense peaks, memory, cores and cache of one device.

    `peak_flops_per_s` maps a format (bf16, fp8, int8, fp4) to its dense tensor-core rate; `link_bytes_per_s` is one
    direction of one device's in-node link (NVLink, PCIe, ICI).
    """

    name: str
    peak_flops_per_s: Mapping[str, float] = field(hash=False)
    vector_flops_per_s: float
    hbm_bytes_per_s: float
    sm_count: int
    l2_bytes: float
    link_bytes_per_s: float

    def __post_init__(self) -> None:
        for name in ("vector_flops_per_s", "hbm_bytes_per_s", "sm_count", "l2_bytes", "link_bytes_per_s"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
                raise ValueError(f"datasheet {self.name}: {name} must be a positive number; got {value!r}")
        if not {"bf16", "fp32"} & set(self.peak_flops_per_s):
            raise ValueError(
                f"datasheet {self.name}: peak_flops_per_s needs at least bf16 (fp16 on older devices, fp32 on CPUs)"
            )
        for dtype, value in self.peak_flops_per_s.items():
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"datasheet {self.name}: peak_flops_per_s.{dtype} must be positive; got {value!r}")

    def flops_per_s(self, dtype: str) -> float:
        """Dense peak of *dtype*; ValueError names the formats the device has."""
        try:
            return self.peak_flops_per_s[dtype]
        except KeyError:
            have = ", ".join(sorted(self.peak_flops_per_s))
            raise ValueError(
                f"{self.name} has no {dtype} tensor cores; it has {have}. Price weight-only formats as bf16"
            ) from None


QUANTITIES = ("sms", "clock", "peak", "hbm", "l2", "link")
"""Datasheet numbers that a parameter may scale with."""


def blended(kind: type[P], donors: Sequence[tuple[float, P, Mapping[str, float]]], own: Mapping[str, float]) -> P:
    """Parameters for a device of the `QUANTITIES` *own* from those of *donors*, each with its share of 1 and its quantities.

    Each number is scaled as its field says, then averaged: geometrically where it cannot be 0, for a rate or a latency
    of twice is as far off as one of half; within the bounds.
    """
    found: dict[str, float] = {}
    for f in _fields(kind):
        low, high = f.metadata["low"], f.metadata["high"]
        powers = cast("Mapping[str, float] | None", f.metadata["scales_with"])
        if powers is None:
            powers = CYCLES if f.name.endswith("_s") else _SHARE
        values = [(share, getattr(params, f.name) * _scale(powers, theirs, own)) for share, params, theirs in donors]
        if low > 0:
            value = math.exp(sum(share * math.log(max(value, low)) for share, value in values))
        else:
            value = sum(share * value for share, value in values)
        found[f.name] = min(high, max(low, value))
    return kind(**found)


def _scale(powers: Mapping[str, float], theirs: Mapping[str, float], own: Mapping[str, float]) -> float:
    return math.prod((own[name] / theirs[name]) ** power for name, power in powers.items())


def smooth_max(x: Any, y: Any, overlap_loss: Any) -> Any:
    """Between max(x, y) (`overlap_loss` 0) and x + y (`overlap_loss` 4), by arithmetic and square roots only.

    (x + y + sqrt((x - y)^2 + s x y)) / 2: non-decreasing in x and y for x, y >= 0 and s in [0, 4]; scalars and arrays
    give the same bits, which a general power does not promise.
    """
    gap = x - y
    return 0.5 * (x + y + np.sqrt(gap * gap + overlap_loss * (x * y)))
