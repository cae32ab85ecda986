"""A device with known parameters is recovered, through noise, outliers and gaps."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from hwmodels import measured
from hwmodels.calibrate.backend import CalibrationError, Operation
from hwmodels.calibrate.fake import DATASHEET, FakeBackend
from hwmodels.calibrate.fitting import datasheet, fit_samples, residuals
from hwmodels.calibrate.grid import grid, shapes_of
from hwmodels.calibrate.samples import Log, read_log
from hwmodels.calibrate.session import collect
from hwmodels.kernels.cpu import CpuAttentionParams, CpuGemmParams
from hwmodels.kernels.parameters import check_bounds
from hwmodels.profiles import Profile
from sim.report.calibration import write_report

TRUTH = CpuGemmParams(
    launch_s=8e-6, compute_efficiency=0.8, bandwidth_efficiency=0.4, vector_efficiency=0.7, vector_repeat=0.7,
    activation_efficiency=0.6,
    extra_rows=2.0, column_start=100.0, fill_n=8.0, fill_k=16.0, overlap_loss=2.0,
)  # fmt: skip
ATTENTION = CpuAttentionParams(launch_s=2e-5, compute_efficiency=0.3, softmax_flops=100.0)


def calibrated(folder: Path, backend: FakeBackend, operations: int = 300) -> Profile:
    chosen = grid(backend.facts, [shapes_of("gpt2")], ["fp32"])[:operations]
    collect(backend, chosen, Log(folder, backend.facts, taken_on="2026-01-01"), budget_s=60.0, allow_noise=True)
    return fit_samples(folder, fitted_on="2026-01-02", sheet=DATASHEET)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Profile]:
    """A folder and the profile fitted in it, with 2 % of noise."""
    folder = tmp_path_factory.mktemp("calm")
    return folder, calibrated(folder, FakeBackend(gemm=TRUTH, attention=ATTENTION, noise=0.02, seed=3))


def test_parameters_of_a_fake_device_lie_in_the_stated_intervals(calm: tuple[Path, Profile]) -> None:
    _, profile = calm
    kernel = profile.kernel("cpu_gemm", ["fp32/fake"])
    assert kernel is not None
    outside = []
    for name, true in asdict(TRUTH).items():
        low, high = kernel.interval[name]
        if not low <= true <= high:
            outside.append(name)
    # Ten 95 % intervals: all but two hold the truth with 98.8 % chance; the seed is fixed, so this is no lottery.
    assert len(outside) <= 2, outside
    assert not {"launch_s", "compute_efficiency", "bandwidth_efficiency", "vector_efficiency"} & set(outside)
    low, high = kernel.interval["compute_efficiency"]
    assert low <= 0.8 <= high
    assert high - low < 0.1
    assert kernel.provenance.held_median_pct < 3.0


def test_the_report_has_its_pictures_and_the_errors_of_held_back_shapes(calm: tuple[Path, Profile]) -> None:
    folder, profile = calm
    for path in write_report(folder, profile, read_log(folder)[2]):
        assert path.read_bytes()[:4] == (b"\x89PNG" if path.suffix == ".png" else b"# A "), path
    assert "held-back shapes" in (folder / "report.md").read_text()


@pytest.mark.parametrize(
    "disturbance",
    [
        {"noise": 0.02, "outlier_share": 0.1},
        pytest.param({"noise": 0.1}, marks=pytest.mark.slow(reason="a fit of many samples")),
    ],
)
def test_noise_and_one_outlier_in_ten_do_not_break_the_fit(tmp_path: Path, disturbance: dict[str, float]) -> None:
    profile = calibrated(tmp_path, FakeBackend(gemm=TRUTH, seed=5, **disturbance))
    kernel = profile.kernel("cpu_gemm", ["fp32/fake"])
    assert kernel is not None
    exact = FakeBackend(gemm=TRUTH)
    rows = [row for row in residuals(tmp_path, profile) if row["family"] == "cpu_gemm"]
    true = []
    for row in rows:
        shape = {name: int(float(value)) for name, value in (word.split("=") for word in row["shape"].split())}
        true.append(exact.exact_s(Operation.of("gemm", "fp32", **shape)))
    errors = np.abs(np.array([row["predicted_s"] for row in rows]) / np.array(true) - 1.0)
    assert np.median(errors) < 0.05
    if "outlier_share" in disturbance:
        assert profile.calibration is not None
        assert profile.calibration.outliers > 50


def test_a_missing_kernel_leaves_the_others_fitted(tmp_path: Path) -> None:
    profile = calibrated(tmp_path, FakeBackend(missing=("attention", "norm"), noise=0.01), operations=150)
    families = {kernel.family for kernel in profile.kernels}
    assert "cpu_gemm" in families
    assert "cpu_decode" not in families
    assert profile.find("elementwise", ["norm/fake"]) is None


def test_too_few_points_are_named_not_fitted(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="too few of them matrix products"):
        calibrated(tmp_path, FakeBackend(), operations=12)


def test_samples_are_measured_files_that_the_profile_predicts(calm: tuple[Path, Profile]) -> None:
    folder, profile = calm
    files = measured.read_folder(folder / "measured")
    assert {m.kind for m in files} == {"gemm", "attention_prefill", "attention_decode", "elementwise", "host"}
    for measurement in files:
        prediction = measured.predict(measurement, profile)
        if measurement.kind == "host":
            assert prediction.unmodelled == {"op launch has no kernel model": 1}
        else:
            assert prediction.unmodelled == {}
            assert np.isfinite(prediction.seconds).all()


def test_the_profile_says_what_it_was_taken_with(calm: tuple[Path, Profile]) -> None:
    own = calm[1].calibration
    assert own is not None
    assert own.title == "A CPU that does not exist"
    assert own.taken_on == "2026-01-01"
    assert any(line.startswith("gemm fp32: ") for line in own.kernels)


def test_peaks_without_a_datasheet_are_the_best_that_was_measured(calm: tuple[Path, Profile]) -> None:
    facts, _, samples = read_log(calm[0])
    sheet = datasheet(facts, samples)
    best = max(s.operation.flops / s.median_s for s in samples if s.operation.kind == "gemm")
    assert sheet.peak_flops_per_s == {"fp32": best}
    assert sheet.hbm_bytes_per_s < 1.1 * DATASHEET.hbm_bytes_per_s


def test_start_values_lie_within_their_bounds() -> None:
    for kind in (CpuGemmParams, CpuAttentionParams):
        check_bounds(kind())
