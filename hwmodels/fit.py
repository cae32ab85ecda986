"""Fit a kernel's parameters to measured seconds: bounded robust least squares on log ratios, part held back."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from hwmodels.kernels.parameters import bounds

P = TypeVar("P")
Columns = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Relative errors of predictions in percent; bias is the mean of predicted / measured - 1."""

    points: int
    mape_pct: float
    median_pct: float
    p90_pct: float
    bias_pct: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit(Generic[P]):
    """Fitted parameters, the 95 % interval of each, and errors on the fitted and the held-back points."""

    params: P
    interval: Mapping[str, tuple[float, float]]
    fitted: Errors
    held_back: Errors | None


def errors(predicted_s: Any, measured_s: Any) -> Errors:
    """Errors over the points that were predicted (NaN predictions are left out; count them apart)."""
    predicted, measured = np.asarray(predicted_s, float), np.asarray(measured_s, float)
    known = np.isfinite(predicted)
    if not known.any():
        raise ValueError("there is nothing to compare: no point has a finite prediction")
    ratio = predicted[known] / measured[known] - 1.0
    size = 100.0 * np.abs(ratio)
    return Errors(
        points=int(known.sum()),
        mape_pct=float(size.mean()),
        median_pct=float(np.median(size)),
        p90_pct=float(np.percentile(size, 90)),
        bias_pct=float(100.0 * ratio.mean()),
    )


def held_back_groups(columns: Columns, names: Sequence[str], *, fraction: float = 0.5) -> np.ndarray:
    """Mask of the rows to hold back: whole groups of equal `names`, chosen by a hash of the values.

    Shapes are held back as groups, (n, k) say: neighbouring token counts of one shape are nearly the same point.
    """
    texts = [[f"{name}:{value}" for value in np.asarray(columns[name]).astype(str).tolist()] for name in names]
    keys = ["|".join(values) for values in zip(*texts, strict=True)]
    held = {key: zlib.crc32(key.encode()) % 10_000 < 10_000 * fraction for key in set(keys)}
    return np.array([held[key] for key in keys], bool)


def fit(
    predict: Callable[[P, Columns], Any],
    start: P,
    columns: Columns,
    measured_s: Any,
    *,
    held_back: Any = None,
    fixed: Sequence[str] = (),
    max_points: int = 1500,
    loss_scale: float = 0.1,
    starts: Sequence[P] = (),
    seed: int = 0,
) -> Fit[P]:
    """Fit the parameters of the dataclass `start` so that predict(params, columns) meets `measured_s`.

    Residuals are log(predicted / measured) under a soft-L1 loss of scale `loss_scale`, parameters stay within the
    bounds of their dataclass, and names in `fixed` keep the value of `start`. Rows of the mask `held_back` are only
    scored. At most `max_points` rows are fitted, spread evenly over the sorted latencies; all rows are scored. Further
    `starts` are tried and the best kept. Intervals are asymptotic (linearised): 1.96 standard errors, cut at the
    bounds. ValueError for too few points, measurements that are not positive, and columns of unequal length.
    """
    from scipy.optimize import least_squares

    measured = np.asarray(measured_s, float)
    if measured.ndim != 1 or not len(measured):
        raise ValueError(f"measured_s must be a non-empty one-dimensional column; got shape {measured.shape}")
    if not (np.isfinite(measured) & (measured > 0)).all():
        raise ValueError("measured_s must be positive finite seconds; drop or repair the other rows first")
    table = {name: np.asarray(column) for name, column in columns.items()}
    for name, column in table.items():
        if column.shape != measured.shape:
            raise ValueError(f"column {name} has shape {column.shape} but there are {len(measured)} measurements")
    limits = bounds(type(start))
    unknown = sorted(set(fixed) - set(limits))
    if unknown:
        raise ValueError(f"fixed names {unknown[0]}, which is no parameter; there are {', '.join(limits)}")
    free = [name for name in limits if name not in fixed]
    hold = np.zeros(len(measured), bool) if held_back is None else np.asarray(held_back, bool)
    train = np.flatnonzero(~hold)
    if len(train) < len(free):
        raise ValueError(f"{len(train)} points cannot determine {len(free)} parameters; measure more or fix some")
    rows = _spread(train, measured, max_points, seed)
    low = np.array([limits[name][1] for name in free])
    high = np.array([limits[name][2] for name in free])
    sample = {name: column[rows] for name, column in table.items()}
    log_measured = np.log(measured[rows])

    def rebuild(unit: np.ndarray, base: P) -> P:
        values = {name: float(v) for name, v in zip(free, low + np.clip(unit, 0, 1) * (high - low), strict=True)}
        kept = {name: getattr(base, name) for name in fixed}
        return type(base)(**values, **kept)

    def residual(unit: np.ndarray) -> np.ndarray:
        predicted = np.asarray(predict(rebuild(unit, start), sample), float)
        return np.log(np.maximum(predicted, 1e-12)) - log_measured

    best: Any = None
    for candidate in (start, *starts):
        unit = np.array([getattr(candidate, name) for name in free])
        unit = np.clip((unit - low) / (high - low), 1e-4, 1 - 1e-4)
        # The forms are only piecewise smooth (ceilings, minima), hence the wide difference step.
        result = least_squares(
            residual,
            unit,
            bounds=(0, 1),
            loss="soft_l1",
            f_scale=loss_scale,
            diff_step=2e-3,
            max_nfev=60,
            x_scale="jac",
        )
        if best is None or result.cost < best.cost:
            best = result
    params = rebuild(best.x, start)
    predicted = np.asarray(predict(params, table), float)
    held = errors(predicted[hold], measured[hold]) if hold.any() else None
    return Fit(
        params=params,
        interval=_intervals(best, free, low, high),
        fitted=errors(predicted[~hold], measured[~hold]),
        held_back=held,
    )


def _spread(train: np.ndarray, measured: np.ndarray, max_points: int, seed: int) -> np.ndarray:
    """At most `max_points` of the rows, one drawn from each of as many equal slices of the sorted latencies."""
    if len(train) <= max_points:
        return train
    ordered = train[np.argsort(measured[train], kind="stable")]
    edges = np.linspace(0, len(ordered), max_points + 1).astype(int)
    draw = np.random.default_rng(seed).random(max_points)
    return ordered[edges[:-1] + (draw * np.diff(edges)).astype(int)]


def _intervals(result: Any, free: Sequence[str], low: np.ndarray, high: np.ndarray) -> dict[str, tuple[float, float]]:
    information = result.jac.T @ result.jac
    freedom = max(1, len(result.fun) - len(free))
    covariance = np.linalg.pinv(information) * (2.0 * result.cost / freedom)
    spread = 1.96 * np.sqrt(np.maximum(np.diag(covariance), 0.0)) * (high - low)
    centre = low + result.x * (high - low)
    return {
        name: (float(max(lo, c - s)), float(min(hi, c + s)))
        for name, c, s, lo, hi in zip(free, centre, spread, low, high, strict=True)
    }


def fit_profile(
    measurements: Sequence[Any], datasheet: Any, *, fitted_on: str, max_points: int = 1500, partial: bool = False
) -> Any:
    """A profile fitted to measurements of one device (from `measured.read`), with errors on held-back shapes.

    Each parameter set is fitted twice: without half of the shapes, which are then scored, and, for the profile, on all
    of them. Files that feed one parameter set are pooled. `fitted_on` is the ISO date to record. Kernels with fewer
    points than parameters are an error, or, with `partial`, left out and named in the profile's note.
    """
    from hwmodels import measured
    from hwmodels.profiles import Kernel, Profile, Provenance

    pools: dict[tuple[str, str], list[tuple[Any, Any]]] = {}
    for measurement in measurements:
        if measured.is_kernel_level(measurement):
            for part in measured.parts(measurement, datasheet):
                if part.groups and len(part.rows):
                    pools.setdefault((part.family, part.variants[0]), []).append((measurement, part))
    if not pools:
        raise ValueError(
            "no kernel-level measurement to fit; name files as gemm_DEVICE_DTYPE_SOFTWARE.csv and the like"
        )
    kernels = []
    left_out = []
    for (family, variant), pool in sorted(pools.items()):
        part = pool[0][1]
        names = set(part.columns)
        columns = {name: np.concatenate([other.columns[name] for _, other in pool]) for name in names}
        measured_s = np.concatenate([m.measured_s[other.rows] for m, other in pool])
        settings: dict[str, Any] = {"fixed": part.fixed, "starts": part.starts[1:], "max_points": max_points}
        hold = held_back_groups(columns, part.groups)
        free = len(bounds(type(part.starts[0]))) - len(part.fixed)
        if partial and len(measured_s) < free:
            left_out.append(f"{family} {variant} ({len(measured_s)} points)")
            continue
        scored = None
        if hold.any() and (~hold).sum() >= 2 * free:
            scored = fit(part.seconds, part.starts[0], columns, measured_s, held_back=hold, **settings)
        whole = fit(part.seconds, part.starts[0], columns, measured_s, **settings)
        held = scored.held_back if scored is not None and scored.held_back is not None else whole.fitted
        software = sorted({f"{m.source} {m.version}".strip() for m, _ in pool})
        origin = Provenance(
            files=tuple(sorted({m.path.name for m, _ in pool})),
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
    "v6e": (),
}


def fit_folder(folder: Any, out: Any, *, fitted_on: str) -> list[Any]:
    """Fit a profile to each device of a folder of measurements, complete it from its relatives, write it to `out`."""
    from pathlib import Path

    from hwmodels import measured
    from hwmodels.device import load_device
    from hwmodels.profiles import complete, datasheet_of, write_profile

    by_label: dict[str, list[Any]] = {}
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
    import datetime
    import sys

    if len(sys.argv) != 3:
        sys.exit("usage: python -m hwmodels.fit MEASURED_DIR OUT_DIR")
    for fitted in fit_folder(sys.argv[1], sys.argv[2], fitted_on=datetime.date.today().isoformat()):
        for kernel in fitted.kernels:
            origin = kernel.provenance
            if not origin.borrowed_from:
                held = f"{origin.held_mape_pct:.1f} ({origin.held_median_pct:.1f}), p90 {origin.held_p90_pct:.1f}"
                fitted_pct = f"{origin.fit_mape_pct:.1f}"
                print(f"{fitted.name} {kernel.family} {kernel.variant}: fit {fitted_pct} %, held back {held} %")
