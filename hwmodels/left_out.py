"""Measured devices predicted as if they had not been measured: what a loan is worth, and how wide its interval has to be."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hwmodels import measured
from hwmodels.device import Device, load_device
from hwmodels.measured import Measurement
from hwmodels.profiles import borrow_for, calibrated_devices
from hwmodels.profiles.lending import LOANS

GROUPS = {
    "GEMM": ("gemm",),
    "attention": ("prefill", "decode", "mixed"),
    "latent attention": ("mla_prefill", "mla_decode"),
    "experts": ("moe",),
    "collectives": ("collective", "exchange"),
}
"""Heading -> families under it; every other family stands under its own name."""
ROWS_HELD = 0.95
"""Share of the rows of the devices left out that a loan's interval holds. Rows of another device differ by more than those of
two to six: with 0.90 the intervals that the others give hold 80 to 89 % of a device's rows, with this 84 to 94."""
FEWEST_DEVICES = 2
"""Devices left out below which a family's interval is taken from all families."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loan:
    """One parameter set of one file of a device, predicted from what others lend."""

    file: str
    device: str
    family: str
    variant: str
    """The one that was lent."""
    wanted: str
    """The one that the file would fit."""
    distance: float
    """The distance from the donors, as lent."""
    ratio: np.ndarray
    """Measured / lent, at most `ROWS` of them, spread over the file."""

    @property
    def mape_pct(self) -> float:
        return float(100.0 * np.mean(np.abs(1.0 / self.ratio - 1.0)))

    @property
    def bias_pct(self) -> float:
        return float(100.0 * np.mean(1.0 / self.ratio - 1.0))


ROWS = 1000
"""Rows of a parameter set that are predicted at the most."""


def loans(measurements: Iterable[Measurement]) -> list[Loan]:
    """Each kernel-level part of files of calibrated devices, predicted from the profiles of the others.

    Collectives of a topology that no other device was measured in are left out: what they would say is of the server.
    """
    found: list[Loan] = []
    for m in measurements:
        device = _calibrated(m)
        if device is None or m.measured_s is None or not measured.is_kernel_level(m):
            continue
        try:
            profile = borrow_for(device)
            parts = list(measured.parts(m, profile.datasheet))
        except ValueError:  # no relative, or a format without a model: `validate` names it
            continue
        for part in parts:
            kernel = profile.kernel(part.family, part.variants)
            if kernel is None or not len(part.rows) or _place(part.variants[0]) != _place(kernel.variant):
                continue
            some = _spread(len(part.rows))
            columns = {name: np.asarray(column)[some] for name, column in part.columns.items()}
            lent_s = np.asarray(part.seconds(kernel.params, columns), float)
            measured_s = m.measured_s[part.rows][some]
            fine = np.isfinite(lent_s) & (lent_s > 0)
            if fine.any():
                found.append(
                    Loan(
                        file=m.path.name,
                        device=device.name,
                        family=part.family,
                        variant=kernel.variant,
                        wanted=part.variants[0],
                        distance=profile.lender.distance(part.family, kernel.variant) if profile.lender else 0.0,
                        ratio=measured_s[fine] / lent_s[fine],
                    )
                )
    return found


def _place(variant: str) -> str:
    """Where a collective was timed: no node lends to a pair of nodes, and none to a node of bridged pairs."""
    words = variant.replace("/", "-").split("-")
    return " ".join(word for word in ("pairs", "network") if word in words)


def _calibrated(m: Measurement) -> Device | None:
    try:
        device = load_device(measured.catalogue_name(m.device))
    except ValueError:
        return None
    return device if device.name in calibrated_devices() else None


def _spread(rows: int) -> np.ndarray:
    return np.arange(rows) if rows <= ROWS else np.random.default_rng(0).permutation(rows)[:ROWS]


def widths(found: Sequence[Loan]) -> dict[str, tuple[float, float]]:
    """Family -> the middle `ROWS_HELD` of ln(measured / lent) / (1 + distance); `other` is over all families.

    Each file of a family counts alike. A family that was lent to fewer devices than `FEWEST_DEVICES` has none of its own.
    """
    by_family: dict[str, list[Loan]] = {"other": list(found)}
    for loan in found:
        by_family.setdefault(loan.family, []).append(loan)
    return {
        family: _middle(some)
        for family, some in sorted(by_family.items())
        if family == "other" or len({loan.device for loan in some}) >= FEWEST_DEVICES
    }


def _middle(some: Sequence[Loan]) -> tuple[float, float]:
    logs = np.concatenate([np.log(loan.ratio) / (1.0 + loan.distance) for loan in some])
    weight = np.concatenate([np.full(len(loan.ratio), 1.0 / len(loan.ratio)) for loan in some])
    order = np.argsort(logs)
    position = np.cumsum(weight[order]) / weight.sum()
    tail = (1.0 - ROWS_HELD) / 2.0
    low, high = (float(logs[order][min(len(logs) - 1, np.searchsorted(position, at))]) for at in (tail, 1.0 - tail))
    return min(low, 0.0), max(high, 0.0)


def covered_pct(found: Sequence[Loan], families: Sequence[str]) -> float:
    """Percent of rows inside intervals that the other devices' loans give; each file counts alike. NaN without others."""
    shares = []
    for loan in found:
        if loan.family not in families:
            continue
        others = [other for other in found if other.family == loan.family and other.device != loan.device]
        if not others:
            continue
        low, high = _middle(others)
        logs = np.log(loan.ratio) / (1.0 + loan.distance)
        shares.append(float(((logs >= low) & (logs <= high)).mean()))
    return 100.0 * float(np.mean(shares)) if shares else math.nan


def by_group(found: Sequence[Loan]) -> list[dict[str, Any]]:
    """Rows of a table: heading, device, files, mean error over files in percent, bias; a device "all" is their mean."""
    heading = {family: name for name, families in GROUPS.items() for family in families}

    def group_of(loan: Loan) -> str:
        if "network" in _place(loan.wanted):
            return "collectives between nodes"
        if loan.family == "gemm":
            return "GEMM" if loan.wanted.startswith("bf16") else "GEMM in 8 and 4 bits"
        return heading.get(loan.family, loan.family)

    rows: list[dict[str, Any]] = []
    order = [*GROUPS, "GEMM in 8 and 4 bits"]
    groups = sorted({group_of(loan) for loan in found}, key=lambda g: (g not in order, g))
    for group in groups:
        mine = [loan for loan in found if group_of(loan) == group]
        means = []
        for device in sorted({loan.device for loan in mine}):
            files: dict[str, list[Loan]] = {}
            for loan in mine:
                if loan.device == device:
                    files.setdefault(loan.file, []).append(loan)
            error = float(np.mean([_over_rows(some, "mape") for some in files.values()]))
            bias = float(np.mean([_over_rows(some, "bias") for some in files.values()]))
            means.append((error, bias))
            rows.append({"group": group, "device": device, "files": len(files), "mape_pct": error, "bias_pct": bias})
        error, bias = np.mean(means, axis=0)
        whole = {"group": group, "device": "mean of the devices", "files": len({loan.file for loan in mine})}
        rows.append({**whole, "mape_pct": float(error), "bias_pct": float(bias)})
    return rows


def _over_rows(some: Sequence[Loan], what: str) -> float:
    errors = np.concatenate([1.0 / loan.ratio - 1.0 for loan in some])
    return float(100.0 * np.mean(np.abs(errors) if what == "mape" else errors))


def write_widths(found: Sequence[Loan], path: str | Path = LOANS) -> None:
    """Write what `widths` gives as the file that loans take their intervals from."""
    lines = [
        f"# The middle {ROWS_HELD:.0%} of ln(measured / lent) / (1 + distance) of measured devices predicted from the others:",
        "# `python -m hwmodels.left_out MEASURED` writes it, `hwmodels.profiles.lending` reads it.",
        "# Intervals are meant to hold nine rows in ten of a device that is none of these. Rows of another device differ by",
        "# more than those of the few that were measured, so that more of the latter has to lie inside (`ROWS_HELD`).",
    ]
    for family, (low, high) in widths(found).items():
        lines += ["", f"[family.{family}]", f"low = {low:.4f}", f"high = {high:.4f}"]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m hwmodels.left_out MEASURED_DIR")
    every = loans(measured.survey(sys.argv[1]).measurements)
    write_widths(every)
    for row in by_group(every):
        print(
            f"{row['group']:<28}{row['device']:<22}{row['files']:>4} files {row['mape_pct']:6.1f} % (bias {row['bias_pct']:+.1f})"
        )
    for name, families in GROUPS.items():
        print(f"{name}: {covered_pct(every, families):.1f} % of rows inside the intervals that other devices give")
