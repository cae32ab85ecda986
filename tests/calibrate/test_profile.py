"""Profile files of calibrated machines: round trip, refusal, comparison, use in a scenario."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from hwmodels.calibrate.fake import DATASHEET, FakeBackend
from hwmodels.calibrate.fitting import fit_samples
from hwmodels.calibrate.grid import grid, shapes_of
from hwmodels.calibrate.samples import Log
from hwmodels.calibrate.session import collect
from hwmodels.cpu import cpu_cost
from hwmodels.hardware import load_hardware
from hwmodels.kernels.cpu import CpuGemmParams, HostParams
from hwmodels.model import load_model
from hwmodels.parallel import ParallelConfig
from hwmodels.profiles import compare_profiles, read_profile
from hwmodels.totals import Totals
from sim.cli import build_app


def taken(folder: Path, **settings: CpuGemmParams) -> Path:
    backend = FakeBackend(noise=0.01, **settings)
    chosen = grid(backend.facts, [shapes_of("gpt2")], ["fp32"])[:220]
    collect(backend, chosen, Log(folder, backend.facts, taken_on="2026-01-01"), budget_s=60.0)
    fit_samples(folder, fitted_on="2026-01-02", sheet=DATASHEET)
    return folder / "profile.toml"


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return taken(tmp_path_factory.mktemp("first"))


def test_a_calibrated_profile_reads_back_with_intervals_and_origin(profile: Path) -> None:
    read = read_profile(profile)
    kernel = read.kernel("cpu_gemm", ["fp32/fake"])
    assert kernel is not None
    low, high = kernel.interval["compute_efficiency"]
    assert low <= kernel.params.compute_efficiency <= high
    assert read.calibration is not None
    assert read.calibration.clock == "wall"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("format = 1", "format = 2", "written in format 2, this release reads up to 1"),
        ("values = [", "values = [nan, ", "values must be as many numbers as"),
        ("memory_bytes = ", "memory_bytes = inf #", "calibration.memory_bytes must be a finite number"),
        ("taken_on = ", "#", "taken_on is missing; is the file truncated"),
        ("[kernel.interval]", "[kernel.intervals]", "intervals is not a setting"),
    ],
)
def test_a_profile_that_cannot_be_trusted_is_refused(
    profile: Path, tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(profile.read_text().replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        read_profile(path)


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.9])
def test_a_truncated_profile_is_refused(profile: Path, tmp_path: Path, share: float) -> None:
    text = profile.read_text()
    path = tmp_path / "cut.toml"
    path.write_text(text[: int(len(text) * share)])
    with pytest.raises(ValueError, match=r"cut\.toml"):
        read_profile(path)


@pytest.mark.slow(reason="a fit of many samples")
def test_two_profiles_compare(profile: Path, tmp_path: Path) -> None:
    slower = taken(tmp_path, gemm=CpuGemmParams(compute_efficiency=0.45))
    lines = {(d.kernel, d.name): d for d in compare_profiles(read_profile(profile), read_profile(slower))}
    changed = lines["cpu_gemm fp32/fake", "compute_efficiency"]
    assert changed.ratio == pytest.approx(0.5, rel=0.1)
    assert changed.remark == "intervals apart"
    shown = CliRunner().invoke(build_app(), ["hardware", "diff", str(profile), str(slower)])
    assert shown.exit_code == 0
    assert "compute_efficiency" in shown.output
    assert "intervals apart" in shown.output
    assert compare_profiles(read_profile(profile), read_profile(profile)) == []


def test_a_profile_works_as_the_hardware_of_a_scenario(profile: Path, tmp_path: Path) -> None:
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text(
        f"model: gpt2\nhardware: {profile}\nprecision: fp32\n"
        "workload: {arrivals: {process: poisson, rate_per_s: 1.0}, prompt_tokens: 64, output_tokens: 16, requests: 5}\n"
    )
    done = CliRunner().invoke(build_app(), ["run", str(scenario), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "5 finished" in done.output


def test_the_device_of_a_profile_has_the_peaks_of_its_samples(profile: Path) -> None:
    device = load_hardware(profile)
    assert device.title == "A CPU that does not exist"
    assert device.peak("fp32") == DATASHEET.peak_flops_per_s["fp32"]


def test_what_a_cpu_profile_does_not_price_is_refused(profile: Path) -> None:
    read, spec = read_profile(profile), load_model("gpt2")
    with pytest.raises(ValueError, match="no cpu_gemm kernels in bf16, only fp32"):
        cpu_cost(spec, read)
    with pytest.raises(ValueError, match="of one device"):
        cpu_cost(spec.with_precision("fp32"), read, parallel=ParallelConfig(tensor=2))
    with pytest.raises(ValueError, match="experts are not timed"):
        cpu_cost(load_model("mixtral-8x7b").with_precision("fp32"), read).iteration_s(
            Totals(1, 0, 0, 0, 0, 1, 10, 1, 0, 0)
        )


def test_scalars_and_arrays_price_alike_and_nothing_falls(profile: Path) -> None:
    import numpy as np

    cost = cpu_cost(load_model("gpt2").with_precision("fp32"), read_profile(profile), host=HostParams())
    contexts = np.arange(1, 4000, 37)
    columns = Totals(*(np.full(len(contexts), v) for v in (3, 0, 0, 0, 0, 1)), contexts, contexts * 0 + 3,
                     contexts * 0, contexts * 0)  # fmt: skip
    many = cost.iteration_s(columns)
    assert (np.diff(many) >= 0).all()
    one = [cost.iteration_s(Totals(3, 0, 0, 0, 0, 1, int(kv), 3, 0, 0)) for kv in contexts]
    assert np.array_equal(many, one)
    rows = [cost.iteration_s(Totals(q, q, 1, q * (q + 1) // 2, q, 0, 0, 1, 0, 0)) for q in range(1, 300)]
    assert (np.diff(rows) >= 0).all()
