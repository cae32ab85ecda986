"""Operations in JAX: compiled by XLA for a TPU, a GPU or the CPU, timed to `block_until_ready`.

Only the CPU has been run; TPU and GPU follow JAX's documented interfaces.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import jax  # pyright: ignore[reportMissingImports]  # an extra of its own
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]

from hwmodels.calibrate import machine
from hwmodels.calibrate.backend import ELEMENTWISE, NUMBER_BYTES, CalibrationError, Facts, Operation, OutOfMemory

_DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}
_VOCABULARY = 50_000
_BUFFER_BYTES = 256 << 20


def open_device(device: str, threads: int | None, clock: str) -> JaxBackend:
    """JAX's default device, or the one asked for; CalibrationError where it is missing."""
    if threads is not None:
        raise CalibrationError(
            "XLA's threads cannot be set from here; leave --threads out and start under taskset to use fewer cores"
        )
    platform = {"auto": None, "cuda": "gpu"}.get(device, device)
    try:
        found = jax.devices(platform)[0]
    except RuntimeError as error:
        raise CalibrationError(f"JAX finds no {device} ({str(error).splitlines()[0]}); take --device cpu") from None
    cores, chosen = machine.available_cores(), "wall"
    if found.platform == "cpu" and clock != "wall":
        # XLA computes on a pool of threads: only with one core is processor time the time that a run takes.
        chosen = "cpu" if cores == 1 else "wall"
        if clock == "cpu" and chosen != "cpu":
            raise CalibrationError("processor time is for one core; start under `taskset -c 0`, or take --clock wall")
    return JaxBackend(found, cores, chosen)


class JaxBackend:
    """Times JAX on one device."""

    def __init__(self, device: Any, cores: int, clock: str) -> None:
        self._device, self._now = device, machine.timer(clock)
        on_cpu = device.platform == "cpu"
        title = machine.cpu_title() if on_cpu else str(device.device_kind)
        stats = None if on_cpu else device.memory_stats()
        self.facts = Facts(
            backend="jax",
            backend_version=jax.__version__,
            device="cuda" if device.platform == "gpu" else str(device.platform),
            label=machine.label_of(title) if on_cpu else _label(title),
            title=title,
            cores=cores if on_cpu else 1,
            memory_bytes=machine.memory_bytes() if stats is None else float(stats["bytes_limit"]),
            cache_bytes=machine.cache_bytes() if on_cpu else float(128 << 20),
            clock=clock,
            dtypes=("fp32", "bf16"),
            clocks=machine.clock_mhz() if on_cpu else "",
            devices=len(jax.devices(device.platform)),
            libraries={"jax": jax.__version__},
        )

    def supports(self, operation: Operation, /) -> str | None:
        if operation.dtype not in self.facts.dtypes:
            return f"the jax back end times {', '.join(self.facts.dtypes)}, not {operation.dtype}"
        if operation.kind in ("gemm", "attention", "launch", "host", *ELEMENTWISE):
            return None
        return f"the jax back end has no {operation.kind}"

    def prepare(self, operation: Operation, /) -> Callable[[int], float]:
        try:
            function, buffers = self._compiled(operation)
            jax.block_until_ready([function(*b) for b in buffers[:2]])
        except Exception as error:
            if "RESOURCE_EXHAUSTED" in str(error) or isinstance(error, MemoryError):
                raise OutOfMemory(f"{operation.key} does not fit in the memory of {self.facts.title}") from None
            raise
        position = 0

        def run(n: int) -> float:
            nonlocal position
            start = self._now()
            for _ in range(n):
                # Waiting for each keeps a queue of results from filling the memory.
                jax.block_until_ready(function(*buffers[position % len(buffers)]))
                position += 1
            return (self._now() - start) / n

        return run

    def close(self) -> None:
        jax.clear_caches()

    def _random(self, dtype: str, *shape: int, copies: int | None = None) -> list[Any]:
        size = math.prod(shape) * NUMBER_BYTES[dtype]
        wanted = max(2, min(32, math.ceil(2 * self.facts.cache_bytes / size), int(_BUFFER_BYTES // size)))
        keys = jax.random.split(jax.random.key(0), wanted if copies is None else copies)
        with jax.default_device(self._device):
            return [jax.random.normal(key, shape, _DTYPES[dtype]) for key in keys]

    def _compiled(self, op: Operation) -> tuple[Callable[..., Any], list[tuple[Any, ...]]]:
        s, dtype = dict(op.shape), op.dtype
        if op.kind == "gemm":
            x = self._random(dtype, s["m"], s["k"], copies=1)[0]
            return jax.jit(lambda a, w: a @ w.T), [(x, w) for w in self._random(dtype, s["n"], s["k"])]
        if op.kind == "attention":
            b, q, past, h, kv, d = (s[name] for name in ("batch", "query", "past", "heads", "kv_heads", "head_dim"))
            queries = self._random(dtype, b, q, h, d, copies=1)[0]
            mask = jnp.arange(past + q)[None, :] <= past + jnp.arange(q)[:, None]

            def attend(x: Any, cache: Any) -> Any:
                return jax.nn.dot_product_attention(x, cache[0], cache[1], mask=mask[None, None])

            return jax.jit(attend), [(queries, cache) for cache in self._random(dtype, 2, b, past + q, kv, d)]
        if op.kind == "launch":
            return jax.jit(lambda x: x + 1), [(jnp.zeros(1),)]
        if op.kind == "host":
            w = jnp.ones((64, 64), _DTYPES[dtype])

            def layers(x: Any) -> Any:
                for _ in range(s["layers"]):
                    x = x + jax.nn.gelu(x @ w) @ w
                return x

            return jax.jit(layers), [(jnp.ones((1, 64), _DTYPES[dtype]),)]
        rows, width = s["rows"], s["width"]
        if op.kind == "embedding":
            table = self._random(dtype, _VOCABULARY, width, copies=1)[0]
            ids = jax.random.randint(jax.random.key(1), (8, rows), 0, _VOCABULARY)
            return jax.jit(lambda t, i: t[i]), [(table, i) for i in ids]
        functions: dict[str, Callable[[Any], Any]] = {
            "copy": lambda x: jnp.negative(x),  # XLA would elide a plain copy
            "read": jnp.sum,
            "norm": lambda x: jax.nn.standardize(x, axis=-1),
            "act": lambda x: jax.nn.gelu(x, approximate=True),
            "add": lambda x: x + x[::-1],
            "softmax": lambda x: jax.nn.softmax(x, axis=-1),
        }
        return jax.jit(functions[op.kind]), [(x,) for x in self._random(dtype, rows, width)]


def _label(kind: str) -> str:
    """ "TPU v5 lite" is v5e, "TPU v6 lite" v6e, "TPU v5p" v5p; GPUs by their first word with a digit."""
    text = kind.lower().replace(" lite", "e")
    found = re.search(r"v\d+[a-z]*", text) if "tpu" in text else re.search(r"[a-z]*\d+[a-z]*", text)
    return found.group(0) if found else "device"
