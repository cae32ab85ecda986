"""Kernels of a device whose memory or arithmetic were faster by so much, everything else being its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any


def with_rates(kernels: Any, *, bandwidth: float = 1.0, arithmetic: float = 1.0) -> Any:
    """*kernels* on a device with these factors on its memory bandwidth and on all its peaks."""
    own = getattr(kernels, "with_rates", None)
    if own is not None:
        return own(bandwidth=bandwidth, arithmetic=arithmetic)
    profile = getattr(kernels, "profile", None)
    sheet = kernels.device if profile is None else profile.datasheet
    faster: dict[str, Any] = {
        "hbm_bytes_per_s": sheet.hbm_bytes_per_s * bandwidth,
        "peak_flops_per_s": {name: peak * arithmetic for name, peak in sheet.peak_flops_per_s.items()},
    }
    if hasattr(sheet, "vector_flops_per_s"):
        faster["vector_flops_per_s"] = sheet.vector_flops_per_s * arithmetic
    sheet = replace(sheet, **faster)
    return (
        replace(kernels, device=sheet)
        if profile is None
        else replace(kernels, profile=replace(profile, datasheet=sheet))
    )
