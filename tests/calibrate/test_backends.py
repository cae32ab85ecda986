"""Real back ends, end to end: from operations to a profile and its report."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from hwmodels.calibrate.backend import ELEMENTWISE, Backend, Operation, open_backend
from hwmodels.calibrate.samples import read_log
from hwmodels.profiles import read_profile
from sim.cli import build_app

ROOT = Path(__file__).parents[2]
OPERATIONS = [
    Operation.of("gemm", "fp32", m=4, n=256, k=128),
    Operation.of("attention", "fp32", batch=2, query=8, past=0, heads=4, kv_heads=2, head_dim=16),
    Operation.of("attention", "fp32", batch=1, query=3, past=20, heads=4, kv_heads=4, head_dim=16),
    Operation.of("attention", "fp32", batch=1, query=1, past=20, heads=4, kv_heads=4, head_dim=16),
    Operation.of("launch", "fp32", count=1),
    Operation.of("host", "fp32", layers=2),
    *(Operation.of(kind, "fp32", rows=4, width=64) for kind in ELEMENTWISE),
]


def every_operation_has_a_time(backend: Backend) -> None:
    for op in OPERATIONS:
        assert backend.supports(op) is None, op.key
        run = backend.prepare(op)
        run(1)
        assert 0.0 < run(3) < 1.0, op.key
    small, large = (Operation.of("gemm", "fp32", m=m, n=1024, k=1024) for m in (16, 512))
    times = []
    for op in (small, large):
        run = backend.prepare(op)
        run(1)
        times.append(min(run(1) for _ in range(3)))
    assert times[1] > 3.0 * times[0]
    assert backend.supports(Operation.of("gemm", "fp8", m=1, n=16, k=16)) is not None
    backend.close()


@pytest.mark.slow(reason="every operation is timed")
def test_numpy_times_every_operation() -> None:
    every_operation_has_a_time(open_backend("numpy", "cpu", clock="cpu"))


@pytest.mark.slow(reason="kernels are timed")
def test_numpy_calibrates_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The budget runs down by the look, not by the second: a busy machine takes as many samples as a quiet one.
    ticks = itertools.count()
    monkeypatch.setattr("hwmodels.calibrate.session.time", SimpleNamespace(monotonic=lambda: 0.022 * next(ticks)))
    arguments = ["calibrate", "--backend", "numpy", "--budget", "6s", "--clock", "cpu", "--allow-noise"]
    done = CliRunner().invoke(build_app(), [*arguments, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert f"hardware: {tmp_path / 'profile.toml'}" in done.output
    profile = read_profile(tmp_path / "profile.toml")
    own = profile.calibration
    assert own is not None
    assert own.backend == f"numpy {np.__version__}"
    assert profile.find("cpu_gemm", ["fp32/numpy"]) is not None
    for name in ("roofline.png", "fit.png"):
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG"
    report = (tmp_path / "report.md").read_text()
    assert "held-back shapes" in report
    assert "Worst shapes" in report
    checked = CliRunner().invoke(
        build_app(),
        ["validate", "--measured", str(tmp_path / "measured"), "--hardware", str(tmp_path / "profile.toml")],
    )
    assert checked.exit_code == 0, checked.output
    assert "gemm_" in checked.output


@pytest.mark.slow(reason="a process is started and ended")
def test_ctrl_c_ends_the_command_with_its_samples_kept(tmp_path: Path) -> None:
    arguments = ["--backend", "numpy", "--budget", "1h", "--clock", "cpu", "--allow-noise", "--out", str(tmp_path)]
    # A process in the background of a script, as these tests may be, inherits that Ctrl-C is ignored.
    start = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from sim.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", start, "calibrate", *arguments],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    path = tmp_path / "samples.jsonl"
    try:
        while process.poll() is None and not (path.exists() and path.read_bytes().count(b"\n") > 5):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "the samples" in errors
    assert len(read_log(tmp_path)[2]) >= 5


def test_live_without_a_profile_of_this_machine_says_how_to_take_one() -> None:
    refused = CliRunner().invoke(build_app(), ["validate", "--live"])
    assert refused.exit_code == 2
    assert "rooftrace calibrate" in refused.output
    both = CliRunner().invoke(build_app(), ["validate", "--live", "--measured", "."])
    assert both.exit_code == 2
    assert "give one of" in both.output


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA L40S", "l40s"),
    ],
)
@pytest.mark.torch
def test_gpus_are_labelled_as_measured_files_name_them(name: str, label: str) -> None:
    from hwmodels.calibrate.torch_backend import cuda_label

    assert cuda_label(name) == label


@pytest.mark.torch
def test_torch_times_every_operation() -> None:
    every_operation_has_a_time(open_backend("torch", "cpu", threads=1, clock="cpu"))


@pytest.mark.torch
def test_a_missing_cuda_device_is_refused_with_the_reason() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    refused = CliRunner().invoke(build_app(), ["calibrate", "--backend", "torch", "--device", "cuda", "--out", "x"])
    assert refused.exit_code == 2
    assert "there is no CUDA device" in refused.output


@pytest.mark.torch
def test_a_live_run_compares_every_step_and_speed_up(tmp_path: Path) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers, of the torch extra")
    folder = tmp_path / "profile"
    arguments = ["--backend", "torch", "--threads", "1", "--clock", "cpu", "--budget", "25s", "--allow-noise"]
    taken = CliRunner().invoke(build_app(), ["calibrate", *arguments, "--out", str(folder)])
    assert taken.exit_code == 0, taken.output
    live = ["validate", "--live", "--hardware", str(folder / "profile.toml"), "--scale", "0.002"]
    out = tmp_path / "live.json"
    done = CliRunner().invoke(build_app(), [*live, "--out", str(out), "--plots", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "Weights are random" in done.output
    result = json.loads(out.read_text())
    assert {step["name"] for step in result["steps"]} == {
        "prefill", "decode", "chunk", "verify", "draft", "generate"
    }  # fmt: skip
    assert [s["k"] for s in result["speedups"]] == list(range(1, 9))
    for step in result["steps"]:
        assert step["measured_s"] > 0
        assert math.isfinite(step["error"])
        assert step["closed_form_s"] <= step["simulated_s"] * 1.5
    # Small models on a shared machine: far looser than the figures that docs/validation/kernels.md reports.
    assert result["median_step_error"] < 1.0
    assert (tmp_path / "live.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.torch
def test_the_live_cache_gives_the_logits_of_a_run_without_one(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.cache_utils import Cache

    from sim.validation.live_models import cache_layer, scaled_config

    config = {k: v for k, v in scaled_config("gpt2", 0.01).items() if k not in ("model_type", "torch_dtype")}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model("gpt2", **config), attn_implementation="sdpa"
    ).eval()
    ids = torch.randint(1000, (1, 24))
    kind = cache_layer(torch)
    layers = [kind(32) for _ in range(config["n_layer"])]
    cache = Cache(layers=layers)
    with torch.inference_mode():
        whole = model(input_ids=ids, use_cache=False).logits
        model(input_ids=ids[:, :16], past_key_values=cache, use_cache=True)
        model(input_ids=ids[:, :5], past_key_values=cache, use_cache=True)
        for layer in layers:
            layer.length -= 5  # rolled back: these tokens were wrong
        verified = model(input_ids=ids[:, 16:], past_key_values=cache, use_cache=True).logits
    assert torch.allclose(verified, whole[:, 16:], atol=1e-4)


@pytest.mark.jax
def test_jax_times_every_operation() -> None:
    every_operation_has_a_time(open_backend("jax", "cpu"))
