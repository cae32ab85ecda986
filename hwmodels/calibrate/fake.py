"""A CPU that does not exist: times from known parameters, with noise, outliers and gaps on request, for tests."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np

from hwmodels.calibrate.backend import ELEMENTWISE, Facts, Operation, OutOfMemory
from hwmodels.kernels.cpu import (
    CpuAttentionParams,
    CpuGemmParams,
    HostParams,
    cpu_attention_s,
    cpu_gemm_s,
    host_s,
)
from hwmodels.kernels.elementwise import ElementwiseParams, elementwise_s
from hwmodels.kernels.parameters import Datasheet

DATASHEET = Datasheet(
    name="cpufake", peak_flops_per_s={"fp32": 1e11}, vector_flops_per_s=1e11, hbm_bytes_per_s=2e10, sm_count=1,
    l2_bytes=float(32 << 20), link_bytes_per_s=2e10,
)  # fmt: skip


@dataclass(kw_only=True)
class FakeBackend:
    """Answers with the kernel models at the given parameters; *noise* is the log-normal scale of one repeat."""

    gemm: CpuGemmParams = field(default_factory=CpuGemmParams)
    attention: CpuAttentionParams = field(default_factory=CpuAttentionParams)
    elementwise: ElementwiseParams = field(default_factory=ElementwiseParams)
    host: HostParams = field(default_factory=HostParams)
    noise: float = 0.0
    outlier_share: float = 0.0
    missing: Collection[str] = ()
    memory_bytes: float = float(8 << 30)
    seed: int = 0
    on_run: Callable[[Operation], None] = lambda _: None
    facts: Facts = field(init=False)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)
        self.facts = Facts(
            backend="fake", backend_version="1", device="cpu", label=DATASHEET.name, title="A CPU that does not exist",
            cores=1, memory_bytes=self.memory_bytes, cache_bytes=DATASHEET.l2_bytes, clock="wall", dtypes=("fp32",),
        )  # fmt: skip

    def supports(self, operation: Operation, /) -> str | None:
        if operation.kind in self.missing:
            return f"the fake device has no {operation.kind}"
        known = operation.kind in ("gemm", "attention", "launch", "host", *ELEMENTWISE)
        return None if known else f"the fake device has no {operation.kind}"

    def prepare(self, operation: Operation, /) -> Callable[[int], float]:
        if operation.traffic_bytes > self.memory_bytes:
            raise OutOfMemory(f"{operation.key} does not fit")
        exact = self.exact_s(operation)

        def run(n: int) -> float:
            self.on_run(operation)
            seconds = exact * float(np.exp(self.noise * self._rng.standard_normal()))
            return seconds * (8.0 if self._rng.random() < self.outlier_share else 1.0)

        return run

    def close(self) -> None:
        pass

    def exact_s(self, op: Operation) -> float:
        """The time without noise."""
        s = dict(op.shape)
        if op.kind == "gemm":
            return cpu_gemm_s(self.gemm, DATASHEET, s["m"], s["n"], s["k"])
        if op.kind == "attention":
            b, q, past = s["batch"], s["query"], s["past"]
            return cpu_attention_s(
                self.attention, DATASHEET, sequences=b, rows=b * q, pairs=b * (q * past + q * (q + 1) / 2),
                kv_tokens=b * (past + q), heads=s["heads"], kv_heads=s["kv_heads"], head_dim=s["head_dim"],
            )  # fmt: skip
        if op.kind == "launch":
            return 1e-6
        if op.kind == "host":
            return host_s(self.host, s["layers"])
        return elementwise_s(self.elementwise, DATASHEET, op.kind, s["rows"], s["width"], bytes_per_number=4.0)
