"""Arrivals that follow the hour: their counts against the integral of the rate, their inverse, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from workloads import Piecewise, Poisson, Sinusoidal, arrivals_ns, read_rates


@pytest.mark.parametrize(
    "curve",
    [
        Piecewise(rates_per_s=(3.0, 0.0, 1.0), window_s=100.0),
        Sinusoidal(rate_per_s=2.0, amplitude=1.0, period_s=500.0, peak_s=120.0),
        Sinusoidal(rate_per_s=2.0, amplitude=0.3),
    ],
)
def test_what_is_reached_is_the_inverse_of_what_is_expected(curve: Piecewise | Sinusoidal) -> None:
    levels = np.sort(np.random.default_rng(1).random(500)) * 3_000 + 0.01
    assert curve.expected(curve.reached(levels)) == pytest.approx(levels, rel=1e-9)


def test_even_gaps_follow_the_rates_of_the_windows() -> None:
    times = arrivals_ns(Piecewise(rates_per_s=(2.0, 0.0, 0.5), window_s=10.0, cv=0.0), 1, duration_s=60.0) / 1e9
    assert np.histogram(times, bins=np.arange(0, 61, 10) + 1e-6)[0].tolist() == [
        20,
        0,
        5,
        20,
        0,
        4,
    ]  # the last falls on the end


def test_a_flat_curve_is_a_poisson_process_of_its_rate() -> None:
    flat = arrivals_ns(Piecewise(rates_per_s=(5.0,), window_s=7.0), 3, n_requests=20_000)
    gaps = np.diff(flat) / 1e9
    assert gaps.mean() == pytest.approx(0.2, rel=0.03)
    assert gaps.std() == pytest.approx(0.2, rel=0.03)
    assert len(arrivals_ns(Poisson(rate_per_s=5.0), 3, duration_s=100.0)) == pytest.approx(500, abs=90)


def test_gaps_of_a_flat_curve_vary_as_they_are_told() -> None:
    """Gamma with shape 1/4: 100,000 gaps say their variation within about 1 %."""
    gaps = np.diff(arrivals_ns(Piecewise(rates_per_s=(5.0,), cv=2.0), 3, n_requests=100_000))
    assert gaps.std() / gaps.mean() == pytest.approx(2.0, rel=0.04)


def test_counts_of_a_day_are_the_integral_of_its_rate() -> None:
    curve = Sinusoidal(rate_per_s=3.0, amplitude=0.8, period_s=8_000.0, peak_s=2_000.0)
    edges = np.linspace(0, 8_000, 9)
    counts = np.mean(
        [np.histogram(arrivals_ns(curve, seed, duration_s=8_000.0) / 1e9, bins=edges)[0] for seed in range(6)], axis=0
    )
    expected = np.diff(curve.expected(edges))
    # Poisson counts: five standard errors of the mean of six.
    assert np.all(np.abs(counts - expected) < 5 * np.sqrt(expected / 6))
    assert counts[1:3].min() > 3 * counts[5:7].max()


def test_bursts_raise_the_rate_by_their_share_of_the_time() -> None:
    curve = Piecewise(rates_per_s=(4.0,), window_s=50.0, burst_factor=5.0, burst_every_s=90.0, burst_s=10.0)
    assert curve.mean_rate_per_s == pytest.approx(4 * 1.4)
    times = arrivals_ns(curve, 7, n_requests=200_000) / 1e9
    assert len(times) / times[-1] == pytest.approx(curve.mean_rate_per_s, rel=0.05)
    counts = np.histogram(times, bins=np.arange(0, times[-1], 5.0))[0]
    assert counts.var() / counts.mean() > 3  # a Poisson process has 1
    assert np.array_equal(times[:50_000], arrivals_ns(curve, 7, n_requests=50_000) / 1e9)


def test_rates_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "day.csv"
    file.write_text("# by the hour\nstart_s,rate_per_s\n0,1.5\n3600,4\n7200,0\n")
    assert Piecewise(**read_rates(file)) == Piecewise(rates_per_s=(1.5, 4.0, 0.0), window_s=3600.0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("start_s,rate\n0,1\n", "columns start_s and rate_per_s"),
        ("start_s,rate_per_s\n0,1\n60,2\n90,2\n", "equal steps"),
        ("start_s,rate_per_s\n5,1\n65,2\n", "begins at 0"),
        ("start_s,rate_per_s\n0,many\n60,2\n", "are numbers"),
        ("", "columns start_s"),
    ],
)
def test_a_file_that_holds_no_rates_is_refused(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "day.csv"
    file.write_text(text)
    with pytest.raises(ValueError, match=says):
        read_rates(file)


def test_what_no_curve_can_be_is_refused() -> None:
    with pytest.raises(ValueError, match="only zeros"):
        Piecewise(rates_per_s=(0.0, 0.0))
    with pytest.raises(ValueError, match="got none"):
        Piecewise(rates_per_s=())
    with pytest.raises(ValueError, match="between 0 and 1"):
        Sinusoidal(rate_per_s=1.0, amplitude=1.5)
