"""From measured files to a profile: every kernel of a device fitted and scored on shapes that the fit did not see."""

from __future__ import annotations

import datetime
import math
import sys
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hwmodels import measured
from hwmodels.device import load_device
from hwmodels.kernels.fitting import Columns, errors, group_names, held_back_groups
from hwmodels.kernels.intervals import coverage_pct, spread
from hwmodels.kernels.parameters import Datasheet, bounds
from hwmodels.measured import Measurement, Part
from hwmodels.profiles import (
    Kernel,
    Profile,
    Provenance,
    calibrated_devices,
    datasheet_of,
    loan_ends,
    read_profile,
    write_profile,
)
from hwmodels.profiles.files import FOLDER


class Pool(NamedTuple):
    """The rows of all files that feed one parameter set."""

    files: tuple[Measurement, ...]
    part: Part
    columns: Columns
    measured_s: np.ndarray


def pools_of(measurements: Sequence[Measurement], datasheet: Datasheet) -> dict[tuple[str, str], Pool]:
    """Family and variant -> the rows that are fitted together, over the kernel-level files of one device."""
    found: dict[tuple[str, str], list[tuple[Measurement, Part, np.ndarray]]] = {}
    for measurement in measurements:
        seconds = measurement.measured_s
        if seconds is not None and measured.is_kernel_level(measurement):
            for part in measured.parts(measurement, datasheet):
                if part.groups and len(part.rows):
                    some = found.setdefault((part.family, part.variants[0]), [])
                    some.append((measurement, part, seconds[part.rows]))
    pools: dict[tuple[str, str], Pool] = {}
    for key, several in sorted(found.items()):
        # What one file says nothing of another may: what a window costs, say.
        part = several[0][1]
        part = replace(part, fixed=tuple(name for name in part.fixed if all(name in p.fixed for _, p, _ in several)))
        pools[key] = Pool(
            files=tuple(m for m, *_ in several),
            part=part,
            columns={name: np.concatenate([other.columns[name] for _, other, _ in several]) for name in part.columns},
            measured_s=np.concatenate([seconds for *_, seconds in several]),
        )
    return pools


def fit_profile(
    measurements: Sequence[Measurement],
    datasheet: Datasheet,
    *,
    fitted_on: str,
    max_points: int = 1500,
    partial: bool = False,
    only: Collection[str] = (),
    counted: Callable[[Collection[Any]], Iterable[Any]] = iter,
) -> Profile:
    """A profile fitted to measurements of one device (from `measured.read`), with errors on held-back shapes.

    Each parameter set is fitted on all shapes, for the profile, and without some of them, which are then scored:
    without half, or, of few rows, without each quarter in turn. Files that feed one parameter set are pooled.
    `fitted_on` is the ISO date to record. Kernels with fewer points than parameters are an error, or, with `partial`,
    left out and named in the profile's note. With *only*, families of `kernels.families`, no others are fitted. *counted* hands on
    what is fitted one by one, and may show how far that is.
    """
    pools = {key: pool for key, pool in pools_of(measurements, datasheet).items() if not only or key[0] in only}
    if not pools:
        if only:
            raise ValueError(f"the measurements hold nothing of {' or '.join(sorted(only))}")
        raise ValueError(
            "no kernel-level measurement to fit; name files as gemm_DEVICE_DTYPE_SOFTWARE.csv and the like"
        )
    kernels = []
    left_out = []
    for (family, variant), (files, part, columns, measured_s) in counted(pools.items()):
        hold = held_back_groups(columns, part.groups, strata=part.strata)
        free = len(bounds(type(part.starts[0]))) - len(part.fixed)
        if partial and len(measured_s) < free:
            left_out.append(f"{family} {variant} ({len(measured_s)} points)")
            continue
        predicted_s, params = unseen_s(part, columns, measured_s, hold, free=free, max_points=max_points)
        # The fit on all shapes goes on from one that was scored.
        again = part if params is None else replace(part, starts=(params,))
        whole = again.fit(columns, measured_s, max_points=max_points)
        # Too few points for a fit that leaves some out: the errors are those of the fit, and say nothing of an interval.
        held = errors(predicted_s, measured_s) if np.isfinite(predicted_s).any() else whole.fitted
        software = sorted({f"{m.source} {m.version}".strip() for m in files})
        origin = Provenance(
            files=tuple(sorted({m.path.name for m in files})),
            software=", ".join(software),
            fitted_on=fitted_on,
            points=whole.fitted.points,
            fit_mape_pct=whole.fitted.mape_pct,
            fit_median_pct=whole.fitted.median_pct,
            held_mape_pct=held.mape_pct,
            held_median_pct=held.median_pct,
            held_p90_pct=held.p90_pct,
        )
        origin = replace(origin, **_reach(part, columns, measured_s, predicted_s))
        if origin.held_low_pct is None:
            # No shape was left to judge the fit: another shape is as far off as another device's would be.
            low, high = (100.0 * math.expm1(end) for end in loan_ends(family))
            origin = replace(origin, held_low_pct=low, held_high_pct=high)
        kernels.append(
            Kernel(family=family, variant=variant, params=whole.params, provenance=origin, interval=whole.interval)
        )
    note = "fitted to measurements" + (f"; too few points for {', '.join(left_out)}" if left_out else "")
    return Profile(name=datasheet.name, datasheet=datasheet, kernels=tuple(kernels), note=note)


FEW_ROWS = 400
"""Below it each quarter of the shapes is left out in turn, so that a fit is left enough and every row is scored."""


def unseen_s(
    part: Part, columns: Columns, measured_s: np.ndarray, hold: np.ndarray, *, free: int, max_points: int
) -> tuple[np.ndarray, Any | None]:
    """Seconds predicted for rows by fits that did not see them or others of their shape (NaN where there is none), and the
    parameters of the last such fit.

    *hold* is the half to leave out of tables that have rows enough.
    """
    folds = [hold]
    if len(measured_s) < FEW_ROWS:
        names = group_names(columns, part.groups)
        quarter = {name: zlib.crc32(f"quarter:{name}".encode()) % 4 for name in set(names.tolist())}
        each = np.array([quarter[name] for name in names.tolist()])
        folds = [each == number for number in range(4)]
    found, params = np.full(len(measured_s), np.nan), None
    for fold in folds:
        if not fold.any() or (~fold).sum() < 2 * free:
            continue
        params = part.fit(columns, measured_s, held_back=fold, max_points=max_points).params
        found[fold] = np.asarray(part.seconds(params, {name: column[fold] for name, column in columns.items()}), float)
    return found, params


def _reach(part: Part, columns: Columns, measured_s: np.ndarray, predicted_s: np.ndarray) -> dict[str, float]:
    """The intervals that an origin states, from predictions of rows that their fits did not see."""
    found = {"shortest_us": float(measured_s.min() * 1e6), "longest_us": float(measured_s.max() * 1e6)}
    unseen = np.isfinite(predicted_s)
    if unseen.any():
        ratio = measured_s[unseen] / predicted_s[unseen]
        found["held_low_pct"], found["held_high_pct"] = spread(ratio)
        coverage = coverage_pct(ratio, group_names(columns, part.groups)[unseen])
        if not math.isnan(coverage):
            found["held_coverage_pct"] = coverage
    return found


def refitted(profile: Profile, fitted: Profile) -> Profile:
    """*profile* with the kernels of *fitted* in the place of its own of their names; all others stay as they are."""
    fresh = {(kernel.family, kernel.variant): kernel for kernel in fitted.kernels}
    kept = [fresh.pop((kernel.family, kernel.variant), kernel) for kernel in profile.kernels]
    return replace(profile, kernels=(*kept, *fresh.values()))


def with_intervals(profile: Profile, measurements: Sequence[Measurement], *, max_points: int = 600) -> Profile:
    """The profile with intervals for those of its own kernels that state none, from fits that leave shapes out.

    Those fits start from the kernel's parameters. Kernels that *measurements* do not hold stay as they are.
    """
    pools = pools_of(measurements, profile.datasheet)
    kernels: list[Kernel] = []
    for kernel in profile.kernels:
        pool = pools.get((kernel.family, kernel.variant))
        if pool is None or kernel.provenance.borrowed_from or kernel.provenance.held_low_pct is not None:
            kernels.append(kernel)
            continue
        part = replace(pool.part, starts=(kernel.params,))
        hold = held_back_groups(pool.columns, part.groups, strata=part.strata)
        free = len(bounds(type(kernel.params))) - len(part.fixed)
        predicted_s, _ = unseen_s(part, pool.columns, pool.measured_s, hold, free=free, max_points=max_points)
        reach = _reach(part, pool.columns, pool.measured_s, predicted_s)
        kernels.append(replace(kernel, provenance=replace(kernel.provenance, **reach)))
    return replace(profile, kernels=tuple(kernels))


def complete_intervals(folder: str | Path) -> None:
    """Add the intervals that kernels of the shipped profiles do not state, from a folder of measurements, and write them."""
    files = [m for m in measured.survey(folder).measurements if measured.is_kernel_level(m)]
    for name in calibrated_devices():
        device = load_device(name)
        own = [m for m in files if measured.catalogue_name(m.device) in (name, *device.aliases)]
        path = FOLDER / f"{name}.toml"
        write_profile(with_intervals(read_profile(path), own), path)


def fit_folder(folder: str | Path, out: str | Path, *, fitted_on: str) -> list[Profile]:
    """Fit a profile to each device of a folder of measurements and write it to `out`: what was measured and no more."""
    by_label: dict[str, list[Measurement]] = {}
    for measurement in measured.read_folder(folder):
        if measured.is_kernel_level(measurement):
            by_label.setdefault(measurement.device, []).append(measurement)
    found = []
    for label, files in by_label.items():
        sheet = datasheet_of(load_device(measured.catalogue_name(label)))
        found.append(fit_profile(files, sheet, fitted_on=fitted_on))
        write_profile(found[-1], Path(out) / f"{found[-1].name}.toml")
    return found


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "--intervals":
        complete_intervals(sys.argv[2])
        sys.exit()
    if len(sys.argv) != 3:
        sys.exit(
            "usage: python -m hwmodels.fit MEASURED_DIR OUT_DIR, or --intervals MEASURED_DIR for the shipped profiles"
        )
    for fitted in fit_folder(sys.argv[1], sys.argv[2], fitted_on=datetime.date.today().isoformat()):
        for kernel in fitted.kernels:
            origin = kernel.provenance
            held = f"{origin.held_mape_pct:.1f} ({origin.held_median_pct:.1f}), p90 {origin.held_p90_pct:.1f}"
            fitted_pct = f"{origin.fit_mape_pct:.1f}"
            print(f"{fitted.name} {kernel.family} {kernel.variant}: fit {fitted_pct} %, held back {held} %")
