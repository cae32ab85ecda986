"""Jobs about measured runs: laid beside their simulation, and a stack fitted to them."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sim.bench.cases import cases_of, priors_of
from sim.bench.compare import compared, load_text, strange
from sim.bench.fitting import Case
from sim.bench.fitting import fit as fitted
from sim.bench.load import shortened
from sim.bench.measured import BenchRun
from sim.bench.overlay import stack_text
from sim.bench.parameters import KV, PARAMETERS
from sim.bench.reading import read_bytes
from sim.bench.replay import Replayed
from sim.errors import RooftraceError
from sim.explore.work import Asked
from workloads.write import write_whole

Events = Iterator[tuple[str, dict[str, Any]]]
_MOST_RUNS = 64
_MOST_REQUESTS = 1000
"""Simulated at most of an open load that the server kept up with, as of `rooftrace bench fit`."""


def runs_in(name: str, data: bytes) -> tuple[list[BenchRun], list[str]]:
    """The measured runs in *data*, the content of a file called *name*, and what of it was not read. RooftraceError without any."""
    found = read_bytes(data, name=Path(name).stem or "run", file=name or "the file")
    if not found.runs:
        raise RooftraceError("; ".join(found.problems) or f"{name} has no measured run")
    if len(found.runs) > _MOST_RUNS:
        raise RooftraceError(
            f"{name} has {len(found.runs):,} runs, and the page takes {_MOST_RUNS} at most; use rooftrace bench"
        )
    return [shortened(run, _MOST_REQUESTS) for run in found.runs], list(found.problems)


def bench(asked: Asked, name: str, data: bytes) -> Events:
    """The measured runs of a file beside their simulation on the deployment that is asked about."""
    runs, problems = runs_in(name, data)
    found = compared(asked.scenario, runs, replications=1)
    notes = [*problems, *strange(asked.scenario, runs), *found.problems]
    notes += dict.fromkeys(text for each in found.replays for text in (*each.run.notes, *each.assumed))
    yield "bench", {"name": name, "points": [_point(each) for each in found.replays], "notes": notes}


def _point(found: Replayed) -> dict[str, Any]:
    offered = found.run.offered
    rate = offered.rate_per_s if offered.open else found.measured.get("requests_per_s")
    return {
        "run": found.run.name,
        "load": load_text(found.run),
        **({} if rate is None else {"rate_per_s": rate}),
        **({} if offered.concurrency is None else {"concurrency": offered.concurrency}),
        "saturated": found.run.saturated,
        "measured": _named(found.measured),
        "simulated": _named(found.predicted),
        "error": {_name(each): error for each in found.measured if (error := found.error(each)) is not None},
    }


def _named(values: Mapping[str, float]) -> dict[str, float]:
    return {_name(name): float(value) for name, value in values.items() if math.isfinite(value)}


def _name(name: str) -> str:
    """The name on the page of a figure of `sim.bench.replay`."""
    return name.replace("_median_", "_p50_").replace("e2el_", "e2e_")


def fit(asked: Asked, name: str, data: bytes, folder: str) -> Events:
    """The stack of the deployment fitted to the measured runs of a file, written into *folder*; the setting that takes it, and the
    errors of each run before and after."""
    scenario = asked.scenario
    if scenario.stack_file is not None:
        raise RooftraceError(
            f"serving_stack is {scenario.serving_stack}, a fit already; name the stack that it was fitted over "
            f"({scenario.stack_name})"
        )
    runs, problems = runs_in(name, data)
    cases, base = cases_of(scenario, runs, problems=problems)
    if not cases:
        raise RooftraceError("; ".join(problems))
    names = None if scenario.memory.kv_blocks is None else [each.name for each in PARAMETERS if each.name != KV]
    try:
        found = fitted(cases, base, priors_of(cases[0]), names=names)
    except ValueError as error:
        raise RooftraceError(str(error)) from None
    text = stack_text(found, scenario, [name], found.left_out() if len(found.cases) > 1 else [])
    file = Path(folder) / f"{Path(name).stem or 'fitted'}-{hashlib.sha256(data).hexdigest()[:8]}.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, text)
    yield (
        "fitted",
        {
            "set": {"serving_stack": str(file.resolve())},
            "before": _errors(cases, found.before),
            "after": _errors(cases, found.figures),
            "runs": len(cases),
            "set_aside": [found.cases[i].name for i in found.contradicting],
            "notes": problems,
        },
    )


def _errors(cases: Sequence[Case], figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean size of the relative errors of each figure over the runs."""
    found: dict[str, list[float]] = {}
    for case, of in zip(cases, figures, strict=True):
        for quantity, measured_s in case.measured_s.items():
            error = of.get(quantity, math.nan) / measured_s - 1.0
            if math.isfinite(error):
                found.setdefault(f"{quantity.removesuffix('_s')}_mean_s", []).append(abs(error))
    return {name: statistics.fmean(errors) for name, errors in found.items()}
