"""Power of a device by what it does: nothing, or an iteration that moves so many bytes and computes so much a second.

    share = min(1, idle + memory * bandwidth_share + compute * m * (arithmetic_share / m)^(1/4))   while an iteration runs
    share = idle                                                                                   otherwise

are shares of a device's power limit (TDP). Arithmetic is that which the kernels do: rows that only fill tiles count
(`hwmodels.cost.Work.tile_flops`), and happens in the part m of the time in which kernels multiply at all: not while all-reduces and
kernels that stream run (`still_s`). It counts by its fourth root, which fits models held back better than any of 1/3, 1/2 and 1: at
the same rate small products draw more than large ones, for operands travel farther. power.toml has the terms of the devices
that were measured (`python -m sim.validation.fit_power` writes it), and those of all together, which stand for any other device.

Under a limit below the TDP (`limited`) power ends at that limit. The clock is the one at which arithmetic at full rate draws no
more: what a device draws beyond idling goes by the cube of its clock, for voltage follows it (`clock_share`). Reading memory keeps
its speed. No measured table varies the limit: these are assumptions.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hwmodels.tables import ROOM, read_toml

FloatArray = NDArray[np.float64]
FILE = ROOM / "power.toml"
TERMS = ("idle", "memory", "compute")
ANY = "any"
"""The entry of power.toml for devices that were not measured."""
ARITHMETIC_EXPONENT = 1 / 4
_LEAST_MULTIPLYING = 0.05
"""Part of the time in which kernels multiply, at least."""
CLOCK_EXPONENT = 3.0


def arithmetic_term(share: ArrayLike, still: ArrayLike = 0.0) -> FloatArray:
    """The number that the term `compute` counts by, at this share of peak arithmetic, where nothing is multiplied for the part
    *still* of the time."""
    multiplying = np.clip(1.0 - np.asarray(still, float), _LEAST_MULTIPLYING, 1.0)
    return multiplying * np.clip(np.asarray(share, float) / multiplying, 0.0, 1.0) ** ARITHMETIC_EXPONENT


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerModel:
    """Shares of a device's power limit (TDP)."""

    idle: float
    memory: float
    compute: float
    watt: tuple[float, float]
    """Measured over predicted power, 5th and 95th percentile over runs of models that the fit had not seen."""
    joule: tuple[float, float]
    """The same of energy per output token, whose error has that of the run's speed in it too."""
    measured_on: str
    """The device that the terms are of; empty: of all that were measured."""
    most: float = 1.0
    """The limit that was set, as a share of the TDP."""

    def iteration_share(
        self, bandwidth_share: ArrayLike, arithmetic_share: ArrayLike, still: ArrayLike = 0.0
    ) -> FloatArray:
        """Share of the TDP while an iteration reaches these shares of peak bandwidth and arithmetic, elementwise; nothing is
        multiplied for the part *still* of it."""
        memory = self.memory * np.clip(np.asarray(bandwidth_share, float), 0.0, 1.0)
        compute = self.compute * arithmetic_term(arithmetic_share, still)
        return np.minimum(self.most, self.idle + memory + compute)

    def limited(self, limit_w: float, tdp_w: float) -> PowerModel:
        """The model under a limit of *limit_w*; ValueError where it is none, or less than idling draws."""
        least_w = self.idle * tdp_w
        if not least_w < limit_w <= tdp_w:
            raise ValueError(
                f"power_limit_w lies above {least_w:.0f} W, which the device draws whatever it does, and at most at its TDP of "
                f"{tdp_w:g} W; got {limit_w:g}"
            )
        return replace(self, most=limit_w / tdp_w)

    @property
    def clock_share(self) -> float:
        """The clock under the limit, as a share of the clock at the TDP."""
        full = min(1.0, self.idle + self.compute)
        return min(1.0, (self.most - self.idle) / (full - self.idle)) ** (1.0 / CLOCK_EXPONENT)


@functools.cache
def power_model(device: str) -> PowerModel:
    """The model for the device called *device* (catalogue name); that of all measured devices where it was not measured."""
    table = read_toml(FILE)
    name = device if device in table else ANY
    entry = table[name]
    return PowerModel(
        **{term: entry[term] for term in TERMS},
        watt=tuple(entry["watt"]),
        joule=tuple(entry["joule"]),
        measured_on="" if name == ANY else name,
    )


def basis_of(devices: Iterable[str]) -> str:
    """The basis of the power of *devices* (catalogue names), for people."""
    names = list(dict.fromkeys(devices))
    known = [name for name in names if power_model(name).measured_on]
    lent = [name for name in names if name not in known]
    all_known = " and ".join(name for name in read_toml(FILE) if name != ANY)
    parts = [f"measured on {' and '.join(known)}"] if known else []
    if lent:
        parts.append(f"shares of TDP as measured on {all_known}, not on {' and '.join(lent)}")
    return "; ".join(parts)
