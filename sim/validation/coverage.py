"""Whether 90 % intervals of kernels hold nine rows in ten, and what devices that were left out say of loans."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hwmodels import measured
from hwmodels.device import load_device
from hwmodels.left_out import GROUPS, Loan, by_group, covered_pct
from hwmodels.measured import Measurement
from hwmodels.profiles import Profile, calibrated_devices, load_profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """The coverage of the intervals of one family, in percent; NaN where there is nothing to count."""

    family: str
    rows: int
    inside_pct: float
    """The share of all rows, which the fits may have seen, inside their intervals."""
    held_pct: float
    """The share of rows that fits did not see inside intervals that other such rows give: as the profiles state."""


def coverage(measurements: Iterable[Measurement], profile: Profile | None = None) -> list[Coverage]:
    """Coverage by family over kernel-level files, priced with *profile* or with that of the device in their names.

    Files without a model or a device are left out; `validate` names them.
    """
    inside: dict[str, list[np.ndarray]] = {}
    for m in measurements:
        if m.measured_s is None or not measured.is_kernel_level(m):
            continue
        try:
            own = profile or load_profile(load_device(measured.catalogue_name(m.device)).name)
            parts = list(measured.parts(m, own.datasheet))
        except ValueError:
            continue
        for part in parts:
            kernel = own.kernel(part.family, part.variants)
            if kernel is None or not len(part.rows):
                continue
            try:
                predicted_s = np.asarray(part.seconds(kernel.params, part.columns), float)
            except ValueError:
                continue
            known = np.isfinite(predicted_s)
            around = kernel.provenance.spread.around(predicted_s[known])
            measured_s = m.measured_s[part.rows][known]
            inside.setdefault(part.family, []).append((measured_s >= around.low) & (measured_s <= around.high))
    held = _held_pct([profile] if profile is not None else [load_profile(name) for name in calibrated_devices()])
    found: list[Coverage] = []
    for family, several in sorted(inside.items()):
        rows = np.concatenate(several)
        found.append(
            Coverage(
                family=family,
                rows=len(rows),
                inside_pct=100.0 * float(rows.mean()) if len(rows) else math.nan,
                held_pct=held.get(family, math.nan),
            )
        )
    return found


def _held_pct(profiles: Sequence[Profile]) -> dict[str, float]:
    """Family -> the coverage on unseen rows that profiles state, each parameter set counting by its rows."""
    counts: dict[str, list[tuple[int, float]]] = {}
    for profile in profiles:
        for kernel in profile.kernels:
            stated = kernel.provenance.held_coverage_pct
            if stated is not None and not kernel.provenance.borrowed_from:
                counts.setdefault(kernel.family, []).append((kernel.provenance.points, stated))
    return {
        family: sum(rows * stated for rows, stated in several) / sum(rows for rows, _ in several)
        for family, several in counts.items()
    }


def coverage_markdown(found: Sequence[Coverage]) -> str:
    """The section of docs/validation.md on intervals."""
    rows = [_INTERVALS, "| kernels | rows | held-back rows inside % | all rows inside % |", "| --- | --: | --: | --: |"]
    rows += [f"| {line.family} | {line.rows:,} | {_cell(line.held_pct)} | {_cell(line.inside_pct)} |" for line in found]
    return "\n".join(rows)


def loans_markdown(found: Sequence[Loan]) -> str:
    """The section of docs/validation.md on devices left out."""
    table: dict[str, dict[str, str]] = {}
    for row in by_group(found):
        table.setdefault(row["group"], {})[row["device"]] = f"{row['mape_pct']:.1f} ({row['bias_pct']:+.1f})"
    devices = [*sorted({loan.device for loan in found}), "mean of the devices"]
    rows = [_LOANS, f"| kernels | {' | '.join(devices)} |", f"| --- | {' | '.join('--:' for _ in devices)} |"]
    rows += [f"| {group} | {' | '.join(cells.get(name, '-') for name in devices)} |" for group, cells in table.items()]
    shares = "; ".join(f"{name} {_cell(covered_pct(found, families))} %" for name, families in GROUPS.items())
    rows.append(f"\nRows inside the intervals that the loans to the other devices give: {shares}.")
    return "\n".join(rows)


def _cell(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1f}"


_INTERVALS = """\
## Intervals

`Profile.estimate` gives each kernel a 90 % interval: the middle 90 % of the errors on shapes that the scored fit did not see, wider
outside the measured range of times. The first figure judges each such row by the interval that the other half of them gives.
"""
_LOANS = """\
## Devices left out

Each measured device is predicted from the profiles of the others, as a device without a profile is (`python -m hwmodels.left_out
DIR`). The error is the mean over a device's files of each file's mean error, with the bias in brackets, in %.
"""
