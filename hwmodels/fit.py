"""From measured files to a profile: every kernel of a device fitted and scored on shapes that the fit did not see."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from hwmodels import measured
from hwmodels.device import load_device
from hwmodels.kernels.fitting import held_back_groups
from hwmodels.kernels.parameters import Datasheet, bounds
from hwmodels.measured import Measurement, Part
from hwmodels.profiles import Kernel, Profile, Provenance, complete, datasheet_of, write_profile


def fit_profile(
    measurements: Sequence[Measurement],
    datasheet: Datasheet,
    *,
    fitted_on: str,
    max_points: int = 1500,
    partial: bool = False,
) -> Profile:
    """A profile fitted to measurements of one device (from `measured.read`), with errors on held-back shapes.

    Each parameter set is fitted twice: without half of the shapes, which are then scored, and, for the profile, on all
    of them. Files that feed one parameter set are pooled. `fitted_on` is the ISO date to record. Kernels with fewer
    points than parameters are an error, or, with `partial`, left out and named in the profile's note.
    """
    pools: dict[tuple[str, str], list[tuple[Measurement, Part, np.ndarray]]] = {}
    for measurement in measurements:
        seconds = measurement.measured_s
        if seconds is not None and measured.is_kernel_level(measurement):
            for part in measured.parts(measurement, datasheet):
                if part.groups and len(part.rows):
                    pool = pools.setdefault((part.family, part.variants[0]), [])
                    pool.append((measurement, part, seconds[part.rows]))
    if not pools:
        raise ValueError(
            "no kernel-level measurement to fit; name files as gemm_DEVICE_DTYPE_SOFTWARE.csv and the like"
        )
    kernels = []
    left_out = []
    for (family, variant), pool in sorted(pools.items()):
        part = pool[0][1]
        names = set(part.columns)
        columns = {name: np.concatenate([other.columns[name] for _, other, _ in pool]) for name in names}
        measured_s = np.concatenate([seconds for *_, seconds in pool])
        hold = held_back_groups(columns, part.groups)
        free = len(bounds(type(part.starts[0]))) - len(part.fixed)
        if partial and len(measured_s) < free:
            left_out.append(f"{family} {variant} ({len(measured_s)} points)")
            continue
        scored = None
        if hold.any() and (~hold).sum() >= 2 * free:
            scored = part.fit(columns, measured_s, held_back=hold, max_points=max_points)
        # The fit on all shapes goes on from the one that was scored.
        again = part if scored is None else replace(part, starts=(scored.params,))
        whole = again.fit(columns, measured_s, max_points=max_points)
        held = scored.held_back if scored is not None and scored.held_back is not None else whole.fitted
        software = sorted({f"{m.source} {m.version}".strip() for m, *_ in pool})
        origin = Provenance(
            files=tuple(sorted({m.path.name for m, *_ in pool})),
            software=", ".join(software),
            fitted_on=fitted_on,
            points=whole.fitted.points,
            fit_mape_pct=whole.fitted.mape_pct,
            fit_median_pct=whole.fitted.median_pct,
            held_mape_pct=held.mape_pct,
            held_median_pct=held.median_pct,
            held_p90_pct=held.p90_pct,
        )
        kernels.append(
            Kernel(family=family, variant=variant, params=whole.params, provenance=origin, interval=whole.interval)
        )
    note = "fitted to measurements" + (f"; too few points for {', '.join(left_out)}" if left_out else "")
    return Profile(name=datasheet.name, datasheet=datasheet, kernels=tuple(kernels), note=note)


# Measured label -> devices, the most alike first, that lend what was not measured on it.
_DONORS = {
    "h200": ("h100", "a100", "rtxpro6000"),
    "h100": ("h200", "a100", "rtxpro6000"),
    "a100": ("h100", "h200", "rtxpro6000"),
    "l40s": ("rtxpro6000", "h200", "h100", "a100"),
    "rtxpro6000": ("l40s", "h200", "h100", "a100"),
    "b200": ("h200", "h100", "rtxpro6000"),
    "v6e": (),
}


def fit_folder(folder: str | Path, out: str | Path, *, fitted_on: str) -> list[Profile]:
    """Fit a profile to each device of a folder of measurements, complete it from its relatives, write it to `out`."""
    by_label: dict[str, list[Measurement]] = {}
    for measurement in measured.read_folder(folder):
        if measured.is_kernel_level(measurement):
            by_label.setdefault(measurement.device, []).append(measurement)
    own = {
        label: fit_profile(files, datasheet_of(load_device(measured.catalogue_name(label))), fitted_on=fitted_on)
        for label, files in by_label.items()
    }
    whole = []
    for label, profile in own.items():
        donors = [own[donor] for donor in _DONORS.get(label, ()) if donor in own]
        whole.append(complete(profile, donors))
        write_profile(whole[-1], Path(out) / f"{profile.name}.toml")
    return whole


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m hwmodels.fit MEASURED_DIR OUT_DIR")
    for fitted in fit_folder(sys.argv[1], sys.argv[2], fitted_on=datetime.date.today().isoformat()):
        for kernel in fitted.kernels:
            origin = kernel.provenance
            if not origin.borrowed_from:
                held = f"{origin.held_mape_pct:.1f} ({origin.held_median_pct:.1f}), p90 {origin.held_p90_pct:.1f}"
                fitted_pct = f"{origin.fit_mape_pct:.1f}"
                print(f"{fitted.name} {kernel.family} {kernel.variant}: fit {fitted_pct} %, held back {held} %")
