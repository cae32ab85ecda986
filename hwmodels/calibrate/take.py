"""One call from options to samples on disk, for the command line and for `python -m hwmodels.calibrate`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hwmodels.calibrate.backend import Backend, CalibrationError, Facts, open_backend
from hwmodels.calibrate.grid import grid, shapes_of
from hwmodels.calibrate.samples import Log
from hwmodels.calibrate.session import Progress, Taken, collect

FULL_S, QUICK_S = 900.0, 120.0
# Models whose shapes are timed where none is named.
USUAL_MODELS = {"cpu": ("gpt2",), "accelerator": ("llama-3.1-8b",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The operations to time, and for how long; None leaves the choice to the device."""

    out: Path
    backend: str = "auto"
    device: str = "auto"
    models: Sequence[str] = ()
    dtypes: Sequence[str] = ()
    budget_s: float = FULL_S
    threads: int | None = None
    clock: str = "auto"
    allow_noise: bool = False


def seconds_of(text: str) -> float:
    """Seconds of "90s", "10min", "1h" or a plain number of seconds; CalibrationError otherwise."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|sec|m|min|h)?\s*", text)
    if not found or float(found[1]) <= 0:
        raise CalibrationError(f"budget is a time such as 90s, 10min or 1h; got {text!r}")
    return float(found[1]) * {"m": 60.0, "min": 60.0, "h": 3600.0}.get(found[2] or "s", 1.0)


def take(
    request: Request,
    *,
    taken_on: str,
    opened: Callable[[Facts], None] = lambda _: None,
    report: Callable[[Progress], None] = lambda _: None,
    backend: Backend | None = None,
) -> Taken:
    """Open the device (or use *backend*), and time its grid into `request.out`, going on from what is there."""
    device = backend or open_backend(request.backend, request.device, threads=request.threads, clock=request.clock)
    try:
        facts = device.facts
        opened(facts)
        names = request.models or USUAL_MODELS["cpu" if facts.device == "cpu" else "accelerator"]
        for dtype in request.dtypes:
            if dtype not in facts.dtypes:
                raise CalibrationError(f"{facts.title} has no {dtype} here; it has {', '.join(facts.dtypes)}")
        # A CPU serves in its first format; GPUs and TPUs in all that were asked for, or 16 bits and fp8.
        usual = facts.dtypes[:1] + (("fp8",) if "fp8" in facts.dtypes else ())
        try:
            shapes = [shapes_of(name) for name in names]
        except ValueError as error:
            raise CalibrationError(str(error)) from None
        operations = grid(facts, shapes, request.dtypes or usual, budget_s=request.budget_s)
        log = Log(request.out, facts, taken_on=taken_on)
        return collect(
            device, operations, log, budget_s=request.budget_s, allow_noise=request.allow_noise, report=report
        )
    finally:
        device.close()
