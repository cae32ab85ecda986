"""Speed beside what other simulators publish, on the same traces: processor seconds and peak memory, plain or compiled.

    python -m benchmarks.peers [ROW ...] [--repeats N]

Rows: azure, mooncake, ragpulse-40, ragpulse-72, million, fleet, sessions, folder; all of them where none is named. Each run is
in a process of its own, which builds the experiment first; its time is the processor time of `sim.engine.run`, the least of the
repeats, and its memory the most that the process held. Published figures are from other machines and of other models of
engines: they say how much work a trace is thought to be, not who is faster. RAGPulse's public days are repeated to the number
of requests that was published, squeezed into one day; what occurs once in the trace has another content in each copy, what
occurs again is shared by all.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.prefix import DEFAULT_SESSIONS, sessions_cost
from sim.build import is_compiled
from sim.engine import Columns, run
from sim.engine.spec.experiment import Experiment
from sim.plots import save_run
from sim.results import Result
from sim.run import completed
from sim.scenario import Scenario
from sim.scenario.assembly import build
from workloads import LogNormal, Poisson, Trace, read_trace, synthesize

SHARED = Path(__file__).parents[2] / "shared"
AZURE = SHARED / "traces" / "AzureLLMInferenceTrace_conv.csv"
MOONCAKE = SHARED / "traces" / "mooncake_conversation.jsonl"
RAGPULSE = SHARED / "measured3" / "ragpulse_mooncake512.jsonl"
STRETCHED_TO = 537_600
DAY_MS = 86_400_000
MILLION = 1_000_000
FLEET_REQUESTS, FLEET = 200_000, 1_000
FOLDER_REQUESTS = 150_000


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of a run."""

    requests: int
    run_s: float
    peak_gb: float
    saved_s: Mapping[str, float]
    """Seconds by part of the results folder; empty where none was written."""


def stretched(path: Path, requests: int) -> str:
    """A file of *requests* requests in a day, in Mooncake's format: copies of those of *path*, one after the other."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    uses = Counter(name for row in rows for name in row["hash_ids"])
    names = max(uses) + 1
    lines: list[str] = []
    for number in range(requests):
        copy, at = divmod(number, len(rows))
        row = rows[at]
        ids = [name if uses[name] > 1 else name + names * copy for name in row["hash_ids"]]
        lines.append(json.dumps({**row, "timestamp": number * DAY_MS // requests, "hash_ids": ids}))
    return "\n".join(lines) + "\n"


def synthetic(requests: int, rate_per_s: float) -> Trace:
    """Prompts and answers about as long as those of the Azure conversation trace."""
    return synthesize(
        arrivals=Poisson(rate_per_s=rate_per_s),
        prompt=LogNormal.from_mean_median(mean=1155, median=1020),
        output=LogNormal.from_mean_median(mean=211, median=129),
        n_requests=requests,
        seed=0,
    )


def scenario_of(**settings: Any) -> Scenario:
    """Llama-3.1-8B on H100s under vLLM's scheduler."""
    scenario = Scenario.default().with_set("scheduler={policy: vllm}")
    for key, value in settings.items():
        scenario = scenario.with_set(f"{key}={value}")
    return scenario


def azure() -> Experiment:
    return build(scenario_of(workload=f"{{trace: {AZURE}}}"))


def mooncake(caching: bool = True, replicas: int = 8, router: str = "round_robin") -> Experiment:
    scenario = scenario_of(workload=f"{{trace: {MOONCAKE}}}", replicas=replicas, router=router)
    return build(scenario.with_set(f"memory.prefix_caching={str(caching).lower()}"))


def ragpulse(replicas: int) -> Experiment:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ragpulse.jsonl")
        path.write_text(stretched(RAGPULSE, STRETCHED_TO))
        trace = read_trace(path)
    experiment = build(scenario_of(workload=f"{{trace: {MOONCAKE}}}", replicas=replicas, router="least_outstanding"))
    return replace(experiment, workload=trace)


def million(requests: int = MILLION) -> Experiment:
    return replace(build(scenario_of()), workload=synthetic(requests, 5.0))


def fleet(replicas: int, router: str) -> Experiment:
    experiment = build(scenario_of(replicas=replicas, router=router))
    return replace(experiment, workload=synthetic(FLEET_REQUESTS, 5.0 * replicas))


def cost(make: Callable[[], Experiment], repeats: int, saves: bool = False) -> Cost:
    """The cost of a run, in this process; with *saves* that of its results folder, too."""
    experiment = make()
    run_s, saved_s = math.inf, dict[str, float]()
    columns = None
    for _ in range(repeats):
        columns = None
        began = time.process_time()
        columns = run(experiment)
        run_s = min(run_s, time.process_time() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if saves:
        assert columns is not None
        with tempfile.TemporaryDirectory() as folder:
            # The first import of matplotlib and its fonts are set-up.
            small = replace(experiment, workload=synthetic(10, 5.0))
            _save(_result(small, run(small)), Path(folder, "warm"))
            result = _result(experiment, columns)
            saved_s = _save(result, Path(folder, "results"))
    return Cost(requests=len(experiment.workload), run_s=run_s, peak_gb=peak * 1024e-9, saved_s=saved_s)


def _result(experiment: Experiment, columns: Columns) -> Result:
    manifest = {"label": "peers"}
    return Result(completed(experiment, columns, manifest), manifest=manifest)


def _save(result: Any, folder: Path) -> dict[str, float]:
    began = time.process_time()
    kept = result.kept()
    written = kept.save(folder)
    files_s = time.process_time()
    save_run(kept, written)
    return {"files": files_s - began, "pictures": time.process_time() - files_s}


def shown(name: str, found: Cost, aside: str = "") -> None:
    """Prints the row of a run."""
    each = 1e6 * found.run_s / found.requests
    print(
        f"{name:44} {found.requests:>9,} {found.run_s:8.2f} s {each:8.1f} us {found.peak_gb:7.2f} GB  {aside}",
        flush=True,
    )


def alone(make: Callable[[], Experiment], repeats: int, saves: bool = False) -> Cost:
    """`cost` in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(cost, make, repeats, saves).result()


def azure_row(repeats: int) -> None:
    shown("Azure conversation, 1 replica", alone(azure, repeats), "nobody has published a figure")


def mooncake_row(repeats: int) -> None:
    theirs = "DynoSim: 23,608 requests of a Mooncake trace in 2.41 s (102 us each) on one thread of an Apple M4"
    on, off = (alone(partial(mooncake, caching), repeats) for caching in (True, False))
    shown("Mooncake, 8 replicas, prefix cache", on, theirs)
    shown("  without the cache", off, f"speed with the cache {off.run_s / on.run_s:.2f} of without")
    shown("  on 5 replicas, by prefix", alone(partial(mooncake, True, 5, "prefix"), repeats))


def sessions_row(_repeats: int) -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        requests, read_s, ended_s, peak_gb = pool.submit(sessions_cost, DEFAULT_SESSIONS).result()
    found = Cost(requests=requests, run_s=ended_s, peak_gb=peak_gb, saved_s={})
    shown("recorded sessions, 4 replicas, whole process", found, f"{read_s:.2f} s of it until they are read")


def ragpulse_row(replicas: int, repeats: int) -> None:
    theirs = "AISimulate: 188 s (40 GPUs) to 276 s (72), at most 7.6 GB, its machine not said"
    shown(f"RAGPulse in a day, {replicas} replicas, prefix cache", alone(partial(ragpulse, replicas), repeats), theirs)


def million_row(repeats: int) -> None:
    shown("a million synthetic requests, 1 replica", alone(million, repeats))


def fleet_row(repeats: int) -> None:
    for router in ("round_robin", "least_outstanding", "power_of_two"):
        one = alone(partial(fleet, 1, router), repeats)
        many = alone(partial(fleet, FLEET, router), repeats)
        shown(f"1 replica, {router}", one)
        shown(f"{FLEET:,} replicas, {router}", many, f"{many.run_s / one.run_s:.2f} of the time a request of one")


def folder_row(repeats: int) -> None:
    for requests in (FOLDER_REQUESTS, MILLION):
        found = alone(partial(million, requests), repeats, True)
        parts = ", ".join(f"{part} {took_s:.2f} s" for part, took_s in found.saved_s.items())
        share = sum(found.saved_s.values()) / found.run_s
        shown(f"{requests:,} synthetic requests, results folder", found, f"{parts}: {share:.2f} of the run")


ROWS: dict[str, tuple[Callable[[int], None], Path | None]] = {
    "azure": (azure_row, AZURE),
    "mooncake": (mooncake_row, MOONCAKE),
    "ragpulse-40": (partial(ragpulse_row, 40), RAGPULSE),
    "ragpulse-72": (partial(ragpulse_row, 72), RAGPULSE),
    "million": (million_row, None),
    "fleet": (fleet_row, None),
    "sessions": (sessions_row, DEFAULT_SESSIONS),
    "folder": (folder_row, None),
}
"""Rows, and the trace that each needs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("rows", nargs="*", choices=[*ROWS, []], metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, of which the fastest counts")
    options = parser.parse_args()
    print(
        f"{'compiled' if is_compiled() else 'plain'} engine, Python {platform.python_version()}, "
        f"{platform.machine()}, {sys.platform}; processor seconds of one process"
    )
    for name in options.rows or ROWS:
        row, needs = ROWS[name]
        if needs is None or needs.exists():
            row(options.repeats)
        else:
            print(f"{needs} is not here: {name} is left out")


if __name__ == "__main__":
    main()
