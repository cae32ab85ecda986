"""Fits find the parameters that made the data, and refuse data that cannot hold them."""

from __future__ import annotations

import numpy as np
import pytest

from hwmodels.kernels.attention import DecodeParams, attention_decode_s
from hwmodels.kernels.fitting import errors, fit, held_back_groups
from hwmodels.kernels.gemm import QUANTISE_FIELDS, GemmParams, gemm_s
from hwmodels.kernels.parameters import bounds
from tests.hwmodels.kernels.test_forms import DEVICE


def gemm_columns():
    rng = np.random.default_rng(0)
    shapes = rng.choice([256, 1024, 4096, 8192, 16384], (120, 2))
    m = rng.choice([1, 8, 64, 128, 512, 1024, 4096, 16384], (120, 8))
    return {"m": m.ravel(), "n": np.repeat(shapes[:, 0], 8), "k": np.repeat(shapes[:, 1], 8)}


def price_gemm(params, columns):
    return gemm_s(params, DEVICE, columns["m"], columns["n"], columns["k"])


def test_a_fit_recovers_the_gemm_parameters_behind_noisy_times():
    truth = GemmParams(launch_s=5e-6, compute_efficiency=0.7, bandwidth_efficiency=0.75, fill_k=400.0, throttle=0.0)
    columns = gemm_columns()
    noise = np.exp(np.random.default_rng(1).normal(0, 0.02, len(columns["m"])))
    fixed = (*QUANTISE_FIELDS, "cache_gain", "throttle", "throttle_after_s")
    start = GemmParams(cache_gain=truth.cache_gain, throttle=0.0)
    result = fit(price_gemm, start, columns, price_gemm(truth, columns) * noise, fixed=fixed, max_points=500)
    for name in ("launch_s", "compute_efficiency", "bandwidth_efficiency", "fill_k"):
        assert getattr(result.params, name) == pytest.approx(getattr(truth, name), rel=0.06), name
    assert result.fitted.mape_pct < 2.5


def test_a_fit_recovers_the_decode_parameters_and_scores_shapes_it_did_not_see():
    truth = DecodeParams(launch_s=7e-6, bandwidth_efficiency=0.7, block_s=5e-6, regroup_s=0.0)
    rng = np.random.default_rng(2)
    columns = {
        "seqs": rng.integers(1, 1500, 500), "kv": rng.integers(128, 20_000, 500),
        "heads": rng.choice([8, 16, 32, 64], 500),
    }  # fmt: skip

    def price(params, c):
        return attention_decode_s(
            params, DEVICE, seqs=c["seqs"], kv_tokens=c["seqs"] * c["kv"], heads=c["heads"], kv_heads=8, head_dim=128
        )

    hold = held_back_groups(columns, ("seqs",))
    noise = np.exp(rng.normal(0, 0.01, 500))
    result = fit(price, DecodeParams(), columns, price(truth, columns) * noise, held_back=hold)
    assert result.params.bandwidth_efficiency == pytest.approx(0.7, rel=0.03)
    assert result.held_back is not None
    assert result.held_back.mape_pct < 1.5
    low, high = result.interval["bandwidth_efficiency"]
    assert low < 0.7 < high


def test_fitted_parameters_stay_within_their_bounds():
    columns = gemm_columns()
    result = fit(
        price_gemm, GemmParams(), columns, price_gemm(GemmParams(), columns) / 3, fixed=QUANTISE_FIELDS, max_points=200
    )
    for name, (_, low, high) in bounds(GemmParams).items():
        assert low <= getattr(result.params, name) <= high


def test_held_back_groups_keep_shapes_whole_and_take_the_asked_share():
    columns = {"n": np.repeat(np.arange(2000), 3), "m": np.tile([1, 2, 3], 2000)}
    held = held_back_groups(columns, ("n",), fraction=0.3).reshape(2000, 3)
    assert (held == held[:, :1]).all()
    # Binomial(2000, 0.3): five standard deviations are 0.051.
    assert abs(held[:, 0].mean() - 0.3) < 0.051


def test_errors_by_hand():
    result = errors([1.1, 0.8, np.nan], [1.0, 1.0, 1.0])
    assert (result.points, result.mape_pct, result.bias_pct) == (2, pytest.approx(15), pytest.approx(-5))


@pytest.mark.parametrize(
    ("measured", "message"),
    [
        (np.array([1.0, -1.0]), "positive finite seconds"),
        (np.array([1.0, np.nan]), "positive finite seconds"),
        (np.ones(3), "column m has shape"),
        (np.ones((2, 2)), "one-dimensional column"),
        (np.ones(2), "2 points cannot determine 15 parameters"),
    ],
)
def test_a_fit_refuses_data_it_cannot_use(measured, message):
    columns = {"m": np.ones(2), "n": np.full(2, 64), "k": np.full(2, 64)}
    with pytest.raises(ValueError, match=message):
        fit(price_gemm, GemmParams(), columns, measured)


def test_a_fit_refuses_to_fix_what_is_no_parameter():
    columns = gemm_columns()
    with pytest.raises(ValueError, match="fixed names speed"):
        fit(price_gemm, GemmParams(), columns, price_gemm(GemmParams(), columns), fixed=("speed",))
