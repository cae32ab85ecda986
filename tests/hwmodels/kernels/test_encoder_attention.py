"""Attention of vision encoders: its form, and the shipped parameters."""

from __future__ import annotations

import pytest

from hwmodels.kernels.families import ENCODER
from hwmodels.profiles import load_profile


@pytest.mark.parametrize("device", ["h100-sxm", "h200", "b200"])
@pytest.mark.parametrize("software", ["vllm", "sglang", "trtllm"])
def test_shapes_that_the_fit_did_not_see_are_within_twelve_percent(device: str, software: str) -> None:
    profile = load_profile(device)
    for width in (64, 72, 80):
        kernel = profile.kernel("encoder", (f"{width}/{software}",))
        assert kernel is not None
        assert kernel.provenance.borrowed_from == ""
        assert kernel.provenance.held_mape_pct < 12.0


def test_twice_as_long_an_image_takes_four_times_the_pairs() -> None:
    profile = load_profile("h100-sxm")
    params = profile.get("encoder", ("72/vllm",))

    def seconds(tokens: float) -> float:
        shape = {"chunks": 1.0, "rows": tokens, "pairs": tokens * tokens, "kv_tokens": tokens}
        shape |= {"heads": 16.0, "kv_heads": 16.0, "head_dim": 72.0}
        return float(ENCODER.seconds(params, profile.datasheet, shape))

    assert 3.0 < seconds(32768.0) / seconds(16384.0) < 4.2
