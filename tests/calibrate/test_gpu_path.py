"""The part of the GPU path that a CPU can run: samples as a GPU would give them, through the fit, to a price."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hwmodels.calibrate.backend import ELEMENTWISE, Facts, Operation
from hwmodels.calibrate.fitting import fit_samples
from hwmodels.calibrate.grid import grid, shapes_of
from hwmodels.calibrate.samples import Log, Sample
from hwmodels.calibrated import Calibrated
from hwmodels.device import load_device
from hwmodels.kernels.attention import DecodeParams, PrefillParams, attention_decode_s, attention_prefill_s
from hwmodels.kernels.elementwise import ElementwiseParams, elementwise_s
from hwmodels.kernels.gemm import GemmParams, gemm_s
from hwmodels.model import load_model
from hwmodels.overheads import Overheads, serving_stack
from hwmodels.profiles import datasheet_of, device_of
from hwmodels.totals import Totals

FACTS = Facts(
    backend="torch", backend_version="2.13.0", device="cuda", label="h200", title="NVIDIA H200", cores=132,
    memory_bytes=1.4e11, cache_bytes=5.2e7, clock="device", dtypes=("bf16", "fp8"), driver="570.1", clocks="1980 MHz",
)  # fmt: skip


def seconds(op: Operation) -> float | None:
    sheet, s = datasheet_of(load_device("h200")), dict(op.shape)
    if op.kind == "gemm" and op.dtype == "bf16":
        return gemm_s(GemmParams(compute_efficiency=0.8), sheet, s["m"], s["n"], s["k"])
    if op.kind == "attention":
        b, q, past = s["batch"], s["query"], s["past"]
        heads = {"heads": s["heads"], "kv_heads": s["kv_heads"], "head_dim": s["head_dim"]}
        if past and q <= 16:
            return attention_decode_s(
                DecodeParams(), sheet, seqs=b, kv_tokens=b * (past + q), query_width=q, longest_kv=past + q,
                resident=True, **heads,
            )  # fmt: skip
        return attention_prefill_s(
            PrefillParams(), sheet, chunks=b, rows=b * q, pairs=b * (q * past + q * (q + 1) / 2),
            kv_tokens=b * (past + q), longest_kv=past + q, resident=True, **heads,
        )  # fmt: skip
    if op.kind in ("host", "graph"):
        return 1e-5 + 1e-4 * s["layers"]
    if op.kind in ELEMENTWISE:
        return elementwise_s(ElementwiseParams(), sheet, op.kind, s["rows"], s["width"])
    return None


def test_samples_of_a_gpu_become_a_profile_that_prices_a_model(tmp_path: Path) -> None:
    log = Log(tmp_path, FACTS, taken_on="2026-01-01")
    for op in grid(FACTS, [shapes_of("llama-3.1-8b")], ["bf16"])[:240]:
        exact = seconds(op)
        if exact is not None:
            log.add(Sample(operation=op, seconds=(exact, exact * 1.01, exact * 0.99, exact, exact), spent_s=0.1))
    profile = fit_samples(tmp_path, fitted_on="2026-01-02")
    assert profile.name == "h200"
    assert profile.datasheet == datasheet_of(load_device("h200"))
    assert device_of(profile).name == "h200"
    found = {(kernel.family, kernel.variant) for kernel in profile.kernels}
    assert {("gemm", "bf16/torch"), ("prefill", "torch"), ("decode", "torch"), ("host", "graph/torch")} <= found
    kernel = profile.kernel("gemm", ["bf16/torch"])
    assert kernel is not None
    assert kernel.provenance.held_median_pct < 5.0
    experts = profile.kernel("moe", ["bf16/vllm"])
    assert experts is not None
    assert experts.provenance.borrowed_from
    own = profile.calibration
    assert own is not None
    assert (own.driver, own.clock) == ("570.1", "device")

    stack = replace(serving_stack("eager"), overheads=Overheads(layer_host_s=1e-4), kernels="torch")
    cost = Calibrated(stack=stack, profile=str(tmp_path / "profile.toml"))(
        load_model("llama-3.2-1b"), load_device("h200")
    )
    prompt = cost.iteration_s(Totals(2048, 2048, 1, 2048 * 2049 // 2, 2048, 0, 0, 1, 0, 0))
    assert 5e-3 < prompt < 0.1
    assert cost.iteration_s(Totals(1, 0, 0, 0, 0, 1, 500, 1, 0, 0)) == pytest.approx(16e-4, rel=1.0)
