"""Operations in numpy: BLAS and memory of a CPU."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hwmodels.calibrate import machine
from hwmodels.calibrate.backend import ELEMENTWISE, CalibrationError, Operation, OutOfMemory, cpu_facts

_POOL_CACHES = 4.0  # the pool of random numbers that operands are cut from, in last-level caches
_DRAWN = 1 << 20  # numbers of it that are drawn


def open_device(device: str, threads: int | None, clock: str) -> NumpyBackend:
    """The CPU; CalibrationError for any other device."""
    if device not in ("auto", "cpu"):
        raise CalibrationError(f"numpy runs on the CPU only, not on {device}; take --backend torch or jax")
    chosen, clock = machine.choose_threads(threads, clock)
    if not _set_blas_threads(chosen) and chosen != machine.available_cores():
        if threads is not None:
            raise CalibrationError(
                f"this numpy's BLAS cannot be told to use {chosen} threads from here; set OPENBLAS_NUM_THREADS, "
                "MKL_NUM_THREADS or OMP_NUM_THREADS before starting and leave --threads out"
            )
        chosen = machine.available_cores()
    return NumpyBackend(chosen, clock)


class NumpyBackend:
    """Times numpy on *threads* threads of the CPU."""

    def __init__(self, threads: int, clock: str) -> None:
        self.facts = cpu_facts("numpy", np.__version__, ("fp32",), threads, clock)
        self._now = machine.timer(clock)
        size = int(max(64 << 20, _POOL_CACHES * self.facts.cache_bytes) // 4)
        # Drawn once and repeated, as far as operands are cut from it: no operation takes longer for its numbers, only for the
        # memory that they lie in.
        self._drawn = np.random.default_rng(0).standard_normal(_DRAWN, dtype=np.float32)
        self._pool, self._filled = np.empty(size, np.float32), 0

    def supports(self, operation: Operation, /) -> str | None:
        if operation.dtype != "fp32":
            return f"numpy has no {operation.dtype} arithmetic in BLAS"
        if operation.kind in ("gemm", "attention", "launch", "host", *ELEMENTWISE):
            return None
        return f"numpy has no {operation.kind}"

    def prepare(self, operation: Operation, /) -> Callable[[int], float]:
        try:
            calls = self._calls(operation)
        except MemoryError:
            raise OutOfMemory(f"{operation.key} does not fit in memory") from None
        return _looped(calls, self._now)

    def close(self) -> None:
        self._pool = np.empty(0, np.float32)

    def _cut(self, *shape: int, most: int = 64) -> list[np.ndarray]:
        """Views of the pool of this shape, as many as fit up to *most*; at least one, in memory of its own if need be."""
        numbers = math.prod(shape)
        if 2 * numbers > self._pool.size:
            return [np.resize(self._drawn, shape) for _ in range(2)]
        count = min(most, self._pool.size // numbers)
        if count * numbers > self._filled:
            self._pool[self._filled : count * numbers] = np.resize(self._drawn, count * numbers - self._filled)
            self._filled = count * numbers
        return [self._pool[i * numbers : (i + 1) * numbers].reshape(shape) for i in range(count)]

    def _calls(self, op: Operation) -> list[Callable[[], object]]:
        shape = dict(op.shape)
        if op.kind == "gemm":
            x = np.array(self._cut(shape["m"], shape["k"], most=1)[0])
            out = np.empty((shape["m"], shape["n"]), np.float32)
            return [lambda w=w: np.matmul(x, w.T, out=out) for w in self._cut(shape["n"], shape["k"])]
        if op.kind == "attention":
            return self._attention(shape)
        if op.kind == "launch":
            one = np.zeros(1, np.float32)
            return [lambda: np.add(one, 1.0, out=one)]
        if op.kind == "host":
            return [lambda: _tiny_layers(shape["layers"])]
        rows, width = shape["rows"], shape["width"]
        out = np.empty((rows, width), np.float32)
        if op.kind == "embedding":
            words = min(50_000, self._pool.size // (2 * width))
            table = self._cut(words, width, most=1)[0]
            ids = [np.random.default_rng(i).integers(0, words, rows) for i in range(8)]
            return [lambda i=i: np.take(table, i, axis=0, out=out, mode="clip") for i in ids]
        inputs = self._cut(rows, width)
        run: dict[str, Callable[[np.ndarray], object]] = {
            "copy": lambda x: np.copyto(out, x),
            "read": np.sum,
            "norm": _norm,
            "act": lambda x: np.tanh(x, out=out),
            "add": lambda x: np.add(x, inputs[0], out=out),
            "softmax": _softmax,
        }
        return [lambda x=x: run[op.kind](x) for x in inputs]

    def _attention(self, shape: dict[str, int]) -> list[Callable[[], object]]:
        b, q, past, h, kv, d = (shape[k] for k in ("batch", "query", "past", "heads", "kv_heads", "head_dim"))
        queries = np.array(self._cut(b, kv, h // kv * q, d, most=1)[0])
        hidden = np.where(np.arange(past + q) > past + np.arange(q)[:, None], -np.inf, 0.0).astype(np.float32)
        hidden = np.tile(hidden, (h // kv, 1))
        caches = self._cut(2, b, kv, past + q, d)

        def one(cache: np.ndarray) -> np.ndarray:
            scores = queries @ cache[0].transpose(0, 1, 3, 2)
            scores *= d**-0.5
            if q > 1:
                scores += hidden
            return _softmax(scores) @ cache[1]

        return [lambda c=c: one(c) for c in caches]


def _looped(calls: list[Callable[[], object]], now: Callable[[], float]) -> Callable[[int], float]:
    position = 0

    def run(n: int) -> float:
        nonlocal position
        start = now()
        for _ in range(n):
            calls[position % len(calls)]()
            position += 1
        return (now() - start) / n

    return run


def _norm(x: np.ndarray) -> np.ndarray:
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt((centred * centred).mean(axis=-1, keepdims=True) + 1e-5)


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    e /= e.sum(axis=-1, keepdims=True)
    return e


_TINY = np.ones((8, 8), np.float32)


def _tiny_layers(layers: int) -> np.ndarray:
    x = np.ones((1, 8), np.float32)
    for _ in range(layers):
        y = _norm(x) @ _TINY
        x = x + _softmax(y @ y.T) @ y @ _TINY
        x = x + np.tanh(_norm(x) @ _TINY) @ _TINY
    return x


def _set_blas_threads(threads: int) -> bool:
    """Tell the OpenBLAS that numpy has loaded how many threads to use; False where there is none to tell."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:
        return False
    done = False
    for path in sorted(set(re.findall(r"(/\S*openblas\S*)", maps))):
        library = ctypes.CDLL(path)
        for prefix in ("scipy_openblas", "openblas"):
            for suffix in ("64_", ""):
                if (call := getattr(library, f"{prefix}_set_num_threads{suffix}", None)) is not None:
                    call(ctypes.c_int(threads))
                    done = True
    return done
