"""Operations in PyTorch, on CUDA (device events, captured graphs) or on the CPU.

The CUDA half follows PyTorch's documented interfaces (torch.cuda.Event, CUDAGraph, scaled_dot_product_attention); it has
not run on a GPU yet.
"""

from __future__ import annotations

import math
import re
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from hwmodels.calibrate import machine
from hwmodels.calibrate.backend import (
    ELEMENTWISE,
    HOST,
    NUMBER_BYTES,
    CalibrationError,
    Facts,
    Operation,
    OutOfMemory,
    cpu_facts,
)

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_FP8_FROM = (8, 9)  # Ada; _scaled_mm needs it (PyTorch documentation of float8 matrix products)
_VOCABULARY = 50_000
_TINY_WIDTH = 64


def open_device(device: str, threads: int | None, clock: str) -> TorchBackend:
    """CUDA where it is there (or asked for), else the CPU; CalibrationError where what was asked for is missing."""
    if device == "tpu":
        raise CalibrationError("the torch back end reaches cuda and cpu; take --backend jax for a tpu")
    if device == "cuda" and not torch.cuda.is_available():
        built = "this PyTorch is built without CUDA" if torch.version.cuda is None else "no CUDA device is visible"
        raise CalibrationError(f"there is no CUDA device: {built}; take --device cpu, or install a CUDA build")
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        if threads is not None:
            raise CalibrationError("--threads is for the CPU; leave it out on cuda")
        return TorchBackend("cuda", machine.available_cores(), "device")
    threads, clock = machine.choose_threads(threads, clock)
    torch.set_num_threads(threads)
    return TorchBackend("cpu", threads, clock)


class TorchBackend:
    """Times PyTorch on one device."""

    def __init__(self, device: str, threads: int, clock: str) -> None:
        self._device = device
        self._now = time.perf_counter if device == "cuda" else machine.timer(clock)
        self.facts = (
            _cuda_facts()
            if device == "cuda"
            else cpu_facts("torch", torch.__version__, ("fp32", "bf16"), threads, clock)
        )
        caches = 8.0 if device == "cuda" else 4.0
        self._pool_bytes = int(max(64 << 20, caches * self.facts.cache_bytes))
        self._pools: dict[str, Any] = {}

    def supports(self, operation: Operation, /) -> str | None:
        if operation.dtype not in self.facts.dtypes:
            return f"{self.facts.title} has no {operation.dtype} here; it has {', '.join(self.facts.dtypes)}"
        if operation.dtype == "fp8" and operation.kind != "gemm":
            return f"fp8 is timed for matrix products only, not for {operation.kind}"
        if operation.kind == "graph" and self._device != "cuda":
            return "only CUDA captures graphs"
        if operation.kind == "all_reduce":
            return None if self.facts.devices > 1 else "collectives need more than one device"
        if operation.kind in ("gemm", "attention", *HOST, *ELEMENTWISE):
            return None
        return f"the torch back end has no {operation.kind}"

    def prepare(self, operation: Operation, /) -> Callable[[int], float]:
        try:
            with torch.inference_mode():
                calls = self._calls(operation)
                if self._device == "cpu":
                    return self._on_host(calls)
                if operation.kind in ("launch", "host", "all_reduce"):
                    return self._on_host(calls)
                return self._captured(calls)
        except (torch.OutOfMemoryError, MemoryError):
            self.close()
            raise OutOfMemory(f"{operation.key} does not fit in the memory of {self.facts.title}") from None
        except RuntimeError as error:
            # The CPU allocator reports exhaustion as a plain RuntimeError.
            if "memory" not in str(error).lower():
                raise
            self.close()
            raise OutOfMemory(f"{operation.key} does not fit in the memory of {self.facts.title}") from None

    def close(self) -> None:
        self._pools.clear()
        if self._device == "cuda":
            torch.cuda.empty_cache()

    def _on_host(self, calls: list[Callable[[], Any]]) -> Callable[[int], float]:
        position = 0

        def run(n: int) -> float:
            nonlocal position
            with torch.inference_mode():
                self._synchronise()
                start = self._now()
                for _ in range(n):
                    calls[position % len(calls)]()
                    position += 1
                self._synchronise()
                return (self._now() - start) / n

        return run

    def _captured(self, calls: list[Callable[[], Any]]) -> Callable[[int], float]:
        """Device seconds of one call, replayed from a graph that goes through all buffers once."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # warm-up outside of the capture, as the documentation of CUDAGraph asks
            for call in calls[:3]:
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

        def run(n: int) -> float:
            replays = max(1, math.ceil(n / len(calls)))
            begin.record()
            for _ in range(replays):
                graph.replay()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) * 1e-3 / (replays * len(calls))

        return run

    def _synchronise(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()

    def _cut(self, dtype: str, *shape: int) -> list[Any]:
        """Views of a pool of random numbers, as many as fit up to 64; at least two, with memory of their own if not."""
        numbers = math.prod(shape)
        kind = _DTYPES[dtype]
        if dtype not in self._pools:
            size = self._pool_bytes // int(NUMBER_BYTES[dtype])
            self._pools[dtype] = torch.randn(size, dtype=torch.float32, device=self._device).to(kind)
        pool = self._pools[dtype]
        if 2 * numbers > pool.numel():
            return [torch.randn(*shape, device=self._device).to(kind) for _ in range(2)]
        count = min(64, pool.numel() // numbers)
        return [pool[i * numbers : (i + 1) * numbers].view(*shape) for i in range(count)]

    def _calls(self, op: Operation) -> list[Callable[[], Any]]:
        s, dtype = dict(op.shape), op.dtype
        if op.kind == "gemm" and dtype == "fp8":
            return self._fp8_gemm(s["m"], s["n"], s["k"])
        if op.kind == "gemm":
            x = self._cut(dtype, s["m"], s["k"])[0].clone()
            if self._device == "cpu":
                # Weights by rows of k, as GPT-2 keeps them: the other way round two and three rows take longer than
                # four, and no cost model may fall as rows are added.
                return [lambda w=w: torch.mm(x, w) for w in self._cut(dtype, s["k"], s["n"])]
            return [lambda w=w: F.linear(x, w) for w in self._cut(dtype, s["n"], s["k"])]
        if op.kind == "attention":
            return self._attention(dtype, s)
        if op.kind == "launch":
            one = torch.zeros(1, device=self._device)
            return [lambda: one.add_(1.0)]
        if op.kind in ("host", "graph"):
            block = self._tiny_block(dtype)
            return [lambda: block(s["layers"])]
        if op.kind == "all_reduce":
            from torch.cuda import nccl

            devices = s["devices"]
            parts = [torch.zeros(s["bytes"] // 2, dtype=torch.bfloat16, device=f"cuda:{i}") for i in range(devices)]
            return [lambda: nccl.all_reduce(parts)]
        rows, width = s["rows"], s["width"]
        if op.kind == "embedding":
            words = min(_VOCABULARY, self._pool_bytes // int(2 * NUMBER_BYTES[dtype] * width))
            table = self._cut(dtype, words, width)[0]
            ids = [torch.randint(words, (rows,), device=self._device) for _ in range(8)]
            return [lambda i=i: F.embedding(i, table) for i in ids]
        inputs = self._cut(dtype, rows, width)
        out = torch.empty_like(inputs[0])
        run: dict[str, Callable[[Any], Any]] = {
            "copy": out.copy_,
            "read": torch.sum,
            "norm": lambda x: F.layer_norm(x, (width,)),
            "act": lambda x: F.gelu(x, approximate="tanh"),
            "add": lambda x: torch.add(x, out),
            "softmax": lambda x: torch.softmax(x, -1),
        }
        return [lambda x=x: run[op.kind](x) for x in inputs]

    def _fp8_gemm(self, m: int, n: int, k: int) -> list[Callable[[], Any]]:
        one = torch.ones((), device=self._device)
        x = torch.randn(m, k, device=self._device).to(torch.float8_e4m3fn)
        count = max(2, min(64, self._pool_bytes // (n * k)))
        weights = [torch.randn(n, k, device=self._device).to(torch.float8_e4m3fn) for _ in range(count)]
        return [
            lambda w=w: torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
                x, w.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16
            )
            for w in weights
        ]

    def _attention(self, dtype: str, s: dict[str, int]) -> list[Callable[[], Any]]:
        b, q, past, h, kv, d = (s[name] for name in ("batch", "query", "past", "heads", "kv_heads", "head_dim"))
        queries = self._cut(dtype, b, h, q, d)[0].clone()
        settings: dict[str, Any] = {"enable_gqa": h != kv}
        if q > 1 and past == 0:
            settings["is_causal"] = True
        elif q > 1 and self._device == "cuda":
            from torch.nn.attention.bias import causal_lower_right

            settings["attn_mask"] = causal_lower_right(q, past + q)
        elif q > 1:
            settings["attn_mask"] = torch.ones(q, past + q, dtype=torch.bool).tril(past)
        caches = self._cut(dtype, 2, b, kv, past + q, d)
        return [lambda c=c: F.scaled_dot_product_attention(queries, c[0], c[1], **settings) for c in caches]

    def _tiny_block(self, dtype: str) -> Callable[[int], Any]:
        w = torch.randn(_TINY_WIDTH, _TINY_WIDTH, device=self._device).to(_DTYPES[dtype])
        first = torch.randn(1, 1, _TINY_WIDTH, device=self._device).to(_DTYPES[dtype])

        def block(layers: int) -> Any:
            x = first
            for _ in range(layers):
                y = F.layer_norm(x, (_TINY_WIDTH,))
                query, key, value = (F.linear(y, w).view(1, 1, 1, _TINY_WIDTH) for _ in range(3))
                y = F.scaled_dot_product_attention(query, key, value).view(1, 1, _TINY_WIDTH)
                x = x + F.linear(y, w)
                y = F.layer_norm(x, (_TINY_WIDTH,))
                x = x + F.linear(F.gelu(F.linear(y, w), approximate="tanh"), w)
            return x

        return block


def _cuda_facts() -> Facts:
    found = torch.cuda.get_device_properties(0)
    capability = torch.cuda.get_device_capability(0)
    dtypes = ["bf16", "fp16", "fp32"] if capability >= (8, 0) else ["fp16", "fp32"]
    driver, clocks = _nvidia_smi()
    return Facts(
        backend="torch",
        backend_version=torch.__version__.split("+")[0],
        device="cuda",
        label=cuda_label(found.name),
        title=found.name,
        cores=found.multi_processor_count,
        memory_bytes=float(found.total_memory),
        cache_bytes=float(found.L2_cache_size),
        clock="device",
        dtypes=(*dtypes, "fp8") if capability >= _FP8_FROM else tuple(dtypes),
        driver=driver,
        clocks=clocks,
        devices=torch.cuda.device_count(),
        libraries={"torch": torch.__version__, "cuda": str(torch.version.cuda)},
    )


def _nvidia_smi() -> tuple[str, str]:
    """Driver version and current clocks, as text; empty where nvidia-smi cannot be asked."""
    question = "--query-gpu=driver_version,clocks.sm,clocks.mem,clocks.max.sm"
    try:
        answer = subprocess.run(
            ["nvidia-smi", question, "--format=csv,noheader"], capture_output=True, text=True, timeout=20, check=True
        ).stdout.splitlines()[0]
        driver, sm, memory, highest = (cell.strip() for cell in answer.split(","))
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return "", ""
    return driver, f"SM {sm} of {highest}, memory {memory}"


def cuda_label(name: str) -> str:
    """A GPU's name as measured files spell it: "NVIDIA H100 80GB HBM3" is h100, "NVIDIA RTX PRO 6000 ..." rtxpro6000."""
    words = [w for w in re.split(r"[\s\-]+", name.lower()) if w not in ("nvidia", "geforce", "tesla", "quadro")]
    taken: list[str] = []
    for word in words:
        taken.append(re.sub(r"[^a-z0-9]", "", word))
        if any(c.isdigit() for c in word):
            break
    return "".join(taken) or "gpu"
