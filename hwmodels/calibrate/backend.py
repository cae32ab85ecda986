"""The seam between what is timed and what times it."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from hwmodels.calibrate import machine

BACKENDS = ("torch", "jax", "numpy")
DEVICES = ("cuda", "tpu", "cpu")
# Bytes of one number in each format that a back end may be asked for.
NUMBER_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0}


class CalibrationError(ValueError):
    """Calibration cannot go on; the message says why and the way out."""


class OutOfMemory(CalibrationError):
    """One operation does not fit in the device's memory; the others may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One kernel at one shape: what a back end is asked to run. `shape` is sorted (name, value) pairs."""

    kind: str
    dtype: str
    shape: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, kind: str, dtype: str, **shape: int) -> Operation:
        return cls(kind=kind, dtype=dtype, shape=tuple(sorted(shape.items())))

    def __getitem__(self, name: str) -> int:
        return dict(self.shape)[name]

    @property
    def key(self) -> str:
        return " ".join([self.kind, self.dtype, *(f"{name}={value}" for name, value in self.shape)])

    @property
    def flops(self) -> float:
        """The operations of one run; 0 where arithmetic is not what limits it."""
        s = dict(self.shape)
        if self.kind == "gemm":
            return 2.0 * s["m"] * s["n"] * s["k"]
        if self.kind == "attention":
            q, past = s["query"], s["past"]
            return 4.0 * s["batch"] * s["heads"] * s["head_dim"] * (q * past + q * (q + 1) / 2)
        return 0.0

    @property
    def traffic_bytes(self) -> float:
        """Read and written by one run."""
        s, number = dict(self.shape), NUMBER_BYTES[self.dtype]
        if self.kind == "gemm":
            return number * (s["n"] * s["k"] + s["m"] * (s["n"] + s["k"]))
        if self.kind == "attention":
            cache = 2 * s["kv_heads"] * s["head_dim"] * (s["past"] + s["query"])
            return number * s["batch"] * (cache + 2 * s["query"] * s["heads"] * s["head_dim"])
        if self.kind == "all_reduce":
            return 2.0 * s["bytes"]
        if "rows" in s:
            return number * s["rows"] * s["width"] * {"add": 3.0, "read": 1.0}.get(self.kind, 2.0)
        return 0.0


# Operations over rows x width numbers.
ELEMENTWISE = ("copy", "read", "norm", "act", "add", "embedding", "softmax")
# Host operations: one nearly empty call; a stack of `layers` decoder layers of hardly any arithmetic, run eagerly; the
# same replayed from a captured graph.
HOST = ("launch", "host", "graph")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The subject of the timing: written into the profile, and compared before samples are added to those of a file."""

    backend: str
    backend_version: str
    device: str
    """cpu, cuda, tpu or gpu, as the back end calls it."""
    label: str
    """The device in the names of measured files: lower case letters and digits."""
    title: str
    cores: int
    memory_bytes: float
    cache_bytes: float
    """Last-level cache: rotating buffers are larger."""
    clock: str
    """wall, cpu (processor time of the process) or device (events)."""
    dtypes: tuple[str, ...]
    driver: str = ""
    clocks: str = ""
    devices: int = 1
    libraries: Mapping[str, str] = field(default_factory=dict)

    @property
    def identity(self) -> tuple[Any, ...]:
        """The facts that must be equal for samples to belong together."""
        return (self.backend, self.backend_version, self.device, self.label, self.title, self.cores, self.clock)


def cpu_facts(backend: str, version: str, dtypes: tuple[str, ...], threads: int, clock: str) -> Facts:
    """The facts about this machine's processor, with *threads* of it."""
    title = machine.cpu_title()
    return Facts(
        backend=backend,
        backend_version=version.split("+")[0],
        device="cpu",
        label=machine.label_of(title),
        title=title,
        cores=threads,
        memory_bytes=machine.memory_bytes(),
        cache_bytes=machine.cache_bytes(),
        clock=clock,
        dtypes=dtypes,
        clocks=machine.clock_mhz(),
        libraries={backend: version},
    )


class Backend(Protocol):
    """Runs operations on one device.

    `prepare` builds an operation's data (random, in buffers that rotate through more than the last-level cache) and
    returns a function that runs it *n* times and gives the seconds of one run; it raises `OutOfMemory` where the data
    does not fit. `supports` is the reason why an operation cannot be run, or None.
    """

    @property
    def facts(self) -> Facts: ...

    def supports(self, operation: Operation, /) -> str | None: ...

    def prepare(self, operation: Operation, /) -> Callable[[int], float]: ...

    def close(self) -> None: ...


def open_backend(
    backend: str = "auto", device: str = "auto", *, threads: int | None = None, clock: str = "auto"
) -> Backend:
    """The back end called *backend* on *device*; `auto` takes torch, then jax, then numpy, and an accelerator first.

    *threads* limits the CPU's; None asks `quiet_cores` how many are free of other work. *clock* is wall, cpu or auto.
    CalibrationError says what is missing: the package or the device.
    """
    if backend not in ("auto", *BACKENDS):
        raise CalibrationError(f"backend must be auto, {', '.join(BACKENDS)}; got {backend!r}")
    if device not in ("auto", *DEVICES):
        raise CalibrationError(f"device must be auto, {', '.join(DEVICES)}; got {device!r}")
    if clock not in ("auto", "wall", "cpu"):
        raise CalibrationError(f"clock must be auto, wall or cpu; got {clock!r}")
    if threads is not None and threads < 1:
        raise CalibrationError(f"threads must be at least 1; got {threads}")

    names = BACKENDS if backend == "auto" else (backend,)
    if backend == "auto":
        names = tuple(name for name in names if importlib.util.find_spec(name) is not None)
        if device == "cuda":
            names = tuple(name for name in names if name != "numpy")
        elif device == "tpu":
            names = tuple(name for name in names if name == "jax")
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise CalibrationError(
                f"the {name} back end needs the package {name}, which is not installed; "
                f"pip install {name}, or take --backend numpy for the CPU"
            )
    if not names:
        raise CalibrationError(f"no installed back end reaches a {device}; install torch for cuda or jax for tpu")
    module = importlib.import_module(f"hwmodels.calibrate.{names[0]}_backend")
    return module.open_device(device, threads, clock)
