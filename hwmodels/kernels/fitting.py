"""Fit a kernel's parameters to measured seconds: bounded robust least squares on log ratios, part held back."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar, cast

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


def group_names(columns: Columns, names: Sequence[str]) -> np.ndarray:
    """A text for each row, the same for rows whose *names* are equal."""
    texts = [[f"{name}:{value}" for value in np.asarray(columns[name]).astype(str).tolist()] for name in names]
    return np.array(["|".join(values) for values in zip(*texts, strict=True)])


def held_back_groups(
    columns: Columns, names: Sequence[str], *, fraction: float = 0.5, strata: Sequence[str] = ()
) -> np.ndarray:
    """Mask of the rows to hold back: whole groups of equal `names`, chosen by a hash of the values.

    Shapes are held back as groups, (n, k) say: neighbouring token counts of one shape are nearly the same point. Where
    `strata` are named, of the groups with equal values of those every other one is held back, in the hash's order: few
    shapes of a kernel of its own shall neither all be fitted nor all be held back.
    """
    if strata:
        return _every_other(columns, names, strata)
    keys = group_names(columns, names).tolist()
    held = {key: zlib.crc32(key.encode()) % 10_000 < 10_000 * fraction for key in set(keys)}
    return np.array([held[key] for key in keys], bool)


def _every_other(columns: Columns, names: Sequence[str], strata: Sequence[str]) -> np.ndarray:
    def keys(of: Sequence[str]) -> list[str]:
        texts = [[f"{name}:{value}" for value in np.asarray(columns[name]).astype(str).tolist()] for name in of]
        return ["|".join(values) for values in zip(*texts, strict=True)]

    groups, layers = keys(names), keys(strata)
    held: set[tuple[str, str]] = set()
    for layer in set(layers):
        within = {group for group, other in zip(groups, layers, strict=True) if other == layer}
        ordered = sorted(within, key=lambda group: (zlib.crc32(group.encode()), group))
        held |= {(layer, group) for group in ordered[1::2]}
    return np.array([pair in held for pair in zip(layers, groups, strict=True)], bool)


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
    measured = np.asarray(measured_s, float)
    table = {name: np.asarray(column) for name, column in columns.items()}
    free = _checked(measured, table, bounds(type(start)), fixed)
    hold = np.zeros(len(measured), bool) if held_back is None else np.asarray(held_back, bool)
    train = np.flatnonzero(~hold)
    if len(train) < len(free):
        raise ValueError(f"{len(train)} points cannot determine {len(free)} parameters; measure more or fix some")
    rows = _spread(train, measured, max_points, seed)
    low = np.array([ends[0] for ends in free.values()])
    high = np.array([ends[1] for ends in free.values()])
    sample = {name: column[rows] for name, column in table.items()}
    log_measured = np.log(measured[rows])

    def rebuild(unit: np.ndarray) -> P:
        values = {name: float(v) for name, v in zip(free, low + np.clip(unit, 0, 1) * (high - low), strict=True)}
        return type(start)(**values, **{name: getattr(start, name) for name in fixed})

    def residual(unit: np.ndarray) -> np.ndarray:
        predicted = np.asarray(predict(rebuild(unit), sample), float)
        return np.log(np.maximum(predicted, 1e-12)) - log_measured

    found: list[_Solved] = []
    for candidate in (start, *starts):
        unit = np.array([getattr(candidate, name) for name in free])
        found.append(_solved(residual, np.clip((unit - low) / (high - low), 1e-4, 1 - 1e-4), loss_scale))
    best = min(found, key=lambda solved: solved.cost)
    params = rebuild(best.x)
    predicted = np.asarray(predict(params, table), float)
    held = errors(predicted[hold], measured[hold]) if hold.any() else None
    return Fit(
        params=params,
        interval=_intervals(best, tuple(free), low, high),
        fitted=errors(predicted[~hold], measured[~hold]),
        held_back=held,
    )


def _checked(
    measured: np.ndarray,
    table: Mapping[str, np.ndarray],
    limits: Mapping[str, tuple[float, float, float]],
    fixed: Sequence[str],
) -> dict[str, tuple[float, float]]:
    """The bounds of the parameters to fit; ValueError for measurements, columns or names that cannot be used."""
    if measured.ndim != 1 or not len(measured):
        raise ValueError(f"measured_s must be a non-empty one-dimensional column; got shape {measured.shape}")
    if not (np.isfinite(measured) & (measured > 0)).all():
        raise ValueError("measured_s must be positive finite seconds; drop or repair the other rows first")
    for name, column in table.items():
        if column.shape != measured.shape:
            raise ValueError(f"column {name} has shape {column.shape} but there are {len(measured)} measurements")
    if unknown := sorted(set(fixed) - set(limits)):
        raise ValueError(f"fixed names {unknown[0]}, which is no parameter; there are {', '.join(limits)}")
    return {name: (low, high) for name, (_, low, high) in limits.items() if name not in fixed}


class _Solved(NamedTuple):
    """The solution that the solver found: parameters in units of their bounds, half the loss, residuals and their derivatives."""

    x: np.ndarray
    cost: float
    fun: np.ndarray
    jac: np.ndarray


def _solved(residual: Callable[[np.ndarray], np.ndarray], start: np.ndarray, loss_scale: float) -> _Solved:
    # Imported here: pricing fits nothing.
    from scipy.optimize import (  # pyright: ignore[reportMissingTypeStubs]
        least_squares,  # pyright: ignore[reportUnknownVariableType]
    )

    solve = cast("Callable[..., Any]", least_squares)
    # The forms are only piecewise smooth (ceilings, minima), hence the wide difference step.
    result = solve(
        residual,
        start,
        bounds=(0, 1),
        loss="soft_l1",
        f_scale=loss_scale,
        diff_step=2e-3,
        max_nfev=60,
        x_scale="jac",
    )
    return _Solved(x=result.x, cost=float(result.cost), fun=result.fun, jac=result.jac)


def _spread(train: np.ndarray, measured: np.ndarray, max_points: int, seed: int) -> np.ndarray:
    """At most `max_points` of the rows, one drawn from each of as many equal slices of the sorted latencies."""
    if len(train) <= max_points:
        return train
    ordered = train[np.argsort(measured[train], kind="stable")]
    edges = np.linspace(0, len(ordered), max_points + 1).astype(int)
    draw = np.random.default_rng(seed).random(max_points)
    return ordered[edges[:-1] + (draw * np.diff(edges)).astype(int)]


def _intervals(
    result: _Solved, free: Sequence[str], low: np.ndarray, high: np.ndarray
) -> dict[str, tuple[float, float]]:
    information = result.jac.T @ result.jac
    freedom = max(1, len(result.fun) - len(free))
    covariance: np.ndarray = np.linalg.pinv(information) * (2.0 * result.cost / freedom)
    spread = 1.96 * np.sqrt(np.maximum(np.diag(covariance), 0.0)) * (high - low)
    centre = low + result.x * (high - low)
    return {
        name: (float(max(lo, c - s)), float(min(hi, c + s)))
        for name, c, s, lo, hi in zip(free, centre, spread, low, high, strict=True)
    }
