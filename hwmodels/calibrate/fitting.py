"""From samples to a profile, by the same `fit` that measured files go through."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hwmodels import measured
from hwmodels.calibrate.backend import CalibrationError, Facts
from hwmodels.calibrate.samples import Sample, median_spread, read_log, write_measured
from hwmodels.device import load_device
from hwmodels.fit import fit_profile
from hwmodels.kernels.fitting import held_back_groups
from hwmodels.kernels.parameters import Datasheet
from hwmodels.measured import catalogue_name
from hwmodels.profiles import Calibration, Profile, datasheet_of, load_profile, write_profile

PROFILE = "profile.toml"


def fit_samples(folder: str | Path, *, fitted_on: str, sheet: Datasheet | None = None) -> Profile:
    """Fit a profile to the samples in *folder*; leaves `profile.toml` and the measured files there and returns it.

    `fitted_on` is the ISO date to record; `sheet` replaces the peaks found by `datasheet`. CalibrationError where the
    samples cannot carry a fit, with the reason.
    """
    folder = Path(folder)
    facts, taken_on, samples = read_log(folder)
    paths = write_measured(samples, facts, folder)
    sheet = sheet or datasheet(facts, samples)
    try:
        profile = fit_profile([measured.read(path) for path in paths], sheet, fitted_on=fitted_on, partial=True)
    except ValueError as error:
        raise CalibrationError(f"{folder}: the samples cannot be fitted: {error}") from None
    if not any(kernel.family in ("cpu_gemm", "gemm") for kernel in profile.kernels):
        raise CalibrationError(
            f"{folder}: {len(samples)} operations were timed, too few of them matrix products to fit a profile; run "
            "again with a larger --budget, which goes on from these samples"
        )
    profile = _with_unmeasured(profile, facts)
    profile = replace(profile, calibration=_calibration(facts, samples, taken_on), note=_note(facts, profile.note))
    write_profile(profile, folder / PROFILE)
    return profile


def datasheet(facts: Facts, samples: Sequence[Sample]) -> Datasheet:
    """Peaks that the fitted shares refer to: the catalogue's for a GPU or TPU it knows, else the best that was measured.

    The measured bandwidth is that of copies and reads that no cache holds, or of the weights in a product with one row.
    """
    if facts.device != "cpu" and (known := _catalogue(facts.label)) is not None:
        return known
    peaks: dict[str, float] = {}
    best_bytes = 0.0
    for sample in samples:
        op = sample.operation
        if op.kind == "gemm":
            peaks[op.dtype] = max(peaks.get(op.dtype, 0.0), op.flops / sample.median_s)
        streams = op.kind in ("copy", "read") or (op.kind == "gemm" and op["m"] == 1)
        if streams and op.traffic_bytes > (2.0 * facts.cache_bytes if op.kind != "gemm" else 1e6):
            best_bytes = max(best_bytes, op.traffic_bytes / sample.median_s)
    if not peaks or not best_bytes:
        what = "matrix product" if not peaks else "copy or read larger than the cache"
        raise CalibrationError(f"no {what} was timed, and {facts.title} has no datasheet here; raise --budget")
    if "fp16" in peaks:
        peaks.setdefault("bf16", peaks["fp16"])
    top = max(peaks.values())
    return Datasheet(
        name=facts.label,
        peak_flops_per_s=peaks,
        vector_flops_per_s=top,
        hbm_bytes_per_s=best_bytes,
        sm_count=facts.cores,
        l2_bytes=facts.cache_bytes,
        link_bytes_per_s=best_bytes,
    )


def _with_unmeasured(profile: Profile, facts: Facts) -> Profile:
    """On a GPU, kernel families that were not timed (experts, links) from the shipped profile, each marked as borrowed.

    Families that were timed keep to what this machine said, whatever other software the shipped profile knows.
    """
    if facts.device == "cpu":
        return profile
    try:
        shipped = load_profile(catalogue_name(facts.label))
    except ValueError:
        return profile
    own = {kernel.family for kernel in profile.kernels}
    borrowed = tuple(
        replace(
            kernel, provenance=replace(kernel.provenance, borrowed_from=kernel.provenance.borrowed_from or "shipped")
        )
        for kernel in shipped.whole().kernels
        if kernel.family not in own
    )
    return replace(profile, kernels=(*profile.kernels, *borrowed))


def _catalogue(label: str) -> Datasheet | None:
    try:
        return datasheet_of(load_device(catalogue_name(label)))
    except ValueError:
        return None


def _calibration(facts: Facts, samples: Sequence[Sample], taken_on: str) -> Calibration:
    counts: dict[str, int] = {}
    for sample in samples:
        name = f"{sample.operation.kind} {sample.operation.dtype}"
        counts[name] = counts.get(name, 0) + 1
    return Calibration(
        title=facts.title,
        backend=f"{facts.backend} {facts.backend_version}",
        memory_bytes=facts.memory_bytes,
        cores=facts.cores,
        clock=facts.clock,
        driver=facts.driver,
        clocks=facts.clocks,
        libraries=", ".join(f"{name} {version}" for name, version in sorted(facts.libraries.items())),
        taken_on=taken_on,
        operations=len(samples),
        median_spread_pct=round(100.0 * median_spread(samples), 2),
        outliers=sum(sample.outliers for sample in samples),
        kernels=tuple(f"{name}: {count}" for name, count in sorted(counts.items())),
    )


def _note(facts: Facts, note: str) -> str:
    threads = f", {facts.cores} threads" if facts.device == "cpu" else ""
    return re.sub("^fitted to measurements", f"calibrated with {facts.backend} on {facts.title}{threads}", note)


def residuals(folder: str | Path, profile: Profile) -> list[dict[str, Any]]:
    """Each timed shape beside its prediction: file, shape, measured_s, predicted_s, whether the scored fit saw it."""
    found: list[dict[str, Any]] = []
    for measurement in measured.read_folder(Path(folder) / "measured"):
        seconds = measurement.measured_s
        assert seconds is not None
        for part in measured.parts(measurement, profile.datasheet):
            params = profile.find(part.family, part.variants)
            if params is None or not len(part.rows):
                continue
            predicted = part.seconds(params, part.columns)
            held = held_back_groups(part.columns, part.groups)
            names = [name for name in measurement.columns if not name.endswith("_us") and name != "repeats"]
            for at, row in enumerate(part.rows):
                shape = " ".join(f"{name}={_short(measurement.columns[name][row])}" for name in names)
                found.append(
                    {
                        "family": part.family,
                        "variant": part.variants[0],
                        "shape": shape,
                        "measured_s": float(seconds[row]),
                        "predicted_s": float(predicted[at]),
                        "held_back": bool(held[at]),
                    }
                )
    return found


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
