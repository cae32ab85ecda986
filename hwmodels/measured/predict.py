"""Predicting kernel-level files from a profile, row by row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from hwmodels.measured.experts import unspread
from hwmodels.measured.files import Measurement, is_kernel_level
from hwmodels.measured.parts import parts
from hwmodels.measured.tpus import FUSED
from hwmodels.stacks import kernels_of

if TYPE_CHECKING:
    from hwmodels.profiles import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Seconds for each row (NaN: no model) and how many rows each reason left without one."""

    seconds: np.ndarray
    unmodelled: Mapping[str, int] = field(default_factory=dict)


def predict(measurement: Measurement, profile: Profile) -> Prediction:
    """Seconds of every row of a kernel-level file on the profile's device."""
    if not is_kernel_level(measurement):
        raise ValueError(
            f"{measurement.path.name}: {measurement.kind} files are simulated, not priced kernel by kernel"
        )
    seconds = np.full(len(measurement), np.nan)
    reasons: dict[str, int] = {}
    covered = np.zeros(len(measurement), bool)
    try:
        found = list(parts(measurement, profile.datasheet))
    except ValueError as error:
        return Prediction(seconds=seconds, unmodelled={str(error).partition(";")[0]: len(measurement)})
    for part in found:
        covered[part.rows] = True
        params = profile.find(part.family, part.variants)
        if params is None:
            reason = f"{profile.name} has no {part.family} parameters for {part.variants[0]}"
            reasons[reason] = reasons.get(reason, 0) + len(part.rows)
            continue
        try:
            seconds[part.rows] = part.seconds(params, part.columns)
        except ValueError as error:
            reasons[str(error)] = reasons.get(str(error), 0) + len(part.rows)
    for reason, mask in _unmodelled(measurement):
        if (left := int((mask & ~covered).sum())) > 0:
            reasons[reason] = left
            covered |= mask
    if not covered.all():
        reasons["no kernel model covers this kind of row"] = int((~covered).sum())
    return Prediction(seconds=seconds, unmodelled=reasons)


def _unmodelled(m: Measurement) -> Iterator[tuple[str, np.ndarray]]:
    """Reasons why rows have no model, with the rows each explains."""
    if m.kind in ("gemm", "quantize", "attention_prefill", "attention_decode", "mla"):
        yield f"format {m.dtype} has no kernel model", np.ones(len(m), bool)
    if m.kind == "tpu_layers":
        for flag in np.unique(m.columns["flag"]):
            if flag != "ok":
                yield f"flagged {flag}: the row times more or less than its operation", m.columns["flag"] == flag
        yield "normalisation that the compiler fused into its neighbours", np.isin(m.columns["layer"], FUSED)
    if m.kind == "attention_paged":
        few = m.columns["kv_cache_size"] < 2 * m.columns["batch_size"]
        yield "less than two cached tokens a sequence", few & ~m.columns["is_prefill"]
    if m.kind == "kda":
        launched = np.isin(m.columns["kernel"], kernels_of(m.source).timed_by_launches)
        yield "timed as Python launches them: the host is in them", launched
        yield "one kernel for convolution, update and norm: priced as the two that it joins", ~launched
    if m.kind == "attention_mixed":
        yield "an empty batch", (m.columns["prefill_chunk"] <= 0) & (m.columns["n_decode"] <= 0)
    yield from _unknown_kinds(m)


def _unknown_kinds(m: Measurement) -> Iterator[tuple[str, np.ndarray]]:
    for name in ("layer", "op", "dtype", "gemm_dtype", "kv_dtype"):
        if name in m.columns:
            for value in np.unique(m.columns[name]):
                yield f"{name} {value} has no kernel model", m.columns[name] == value
    if "distribution" in m.columns:
        unknown = unspread(m)
        for value in np.unique(m.columns["distribution"][unknown]):
            yield f"distribution {value} has no model", unknown & (m.columns["distribution"] == value)
    if "moe_dtype" in m.columns:
        for value in np.unique(m.columns["moe_dtype"]):
            yield f"moe_dtype {value} has no kernel model", m.columns["moe_dtype"] == value
