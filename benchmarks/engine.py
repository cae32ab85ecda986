"""Replay speed of the engine, as a ratio to a bare SimPy loop measured in the same run.

    python -m benchmarks.engine [--trace AZURE_CONVERSATION.csv] [--only WORD] [--million]

Prints requests and iterations per second of processor time, peak memory, and requests per second divided by the events per
second of a SimPy process that does nothing but sleep. Each case runs in a process of its own, beside its own bare loop; absolute
times on shared machines mean little, ratios more. The batch-limit cases step through every iteration with the batch full nearly
all of the time and few sequences coming or going, so that what they compare is the cost of an iteration by batch size.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import simpy

from sim.engine import run
from sim.plots import save_run
from sim.results import Result
from sim.run import completed, simulate
from sim.scenario import Scenario
from sim.scenario.assembly import build
from workloads import Fixed, LogNormal, Poisson, synthesize

DEFAULT_TRACE = Path(__file__).parents[2] / "shared" / "traces" / "AzureLLMInferenceTrace_conv.csv"
REPEATS = 3


_SARATHI = {"scheduler": "{policy: sarathi}"}

_DECODING = {
    name: f"{{method: draft_model, num_speculative_tokens: {k}, acceptance: {acceptance}, draft: {draft}}}"
    for name, k, acceptance, draft in (
        ("i.i.d. K = 4", 4, "{alpha: 0.8}", "{cost_ratio: 0.05}"),
        ("1B draft, K = 4", 4, "{alpha: 0.8}", "{model: llama-3.2-1b}"),
        ("beta, K = 4", 4, "{beta: {mean: 0.7, sd: 0.1}}", "{cost_ratio: 0.05}"),
        (
            "two-state, K = 4",
            4,
            "{two_state: {alpha_good: 0.9, alpha_bad: 0.4, stay_good: 0.8, stay_bad: 0.6}}",
            "{cost_ratio: 0.05}",
        ),
        ("K by batch", "[[1, 8, 5], [9, 64, 3], [65, null, 0]]", "{alpha: 0.8}", "{cost_ratio: 0.05}"),
    )
}


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    trace: str | None = None
    rate_scale: float = 1.0
    synthetic_requests: int = 0
    synthetic_rate_per_s: float = 5.0
    output_tokens: int | None = None
    fast_forward: bool = True
    save: bool = False
    batch: int = 0
    """Fill a batch of this many sequences at once, with a KV pool that holds them."""


def bare_events_per_s(n: int = 300_000) -> float:
    """Events per second of a SimPy process that only sleeps."""

    def sleeper(env: simpy.Environment) -> Iterator[simpy.Event]:
        for _ in range(n):
            yield env.timeout(1)

    best = 0.0
    for _ in range(REPEATS):
        env = simpy.Environment()
        env.process(sleeper(env))
        began = time.process_time()
        env.run()
        best = max(best, n / (time.process_time() - began))
    return best


def measure(case: Case) -> dict[str, float]:
    """Run one case in this process; the best of a few runs, beside the bare loop."""
    experiment = _experiment(case)
    repeats = 1 if len(experiment.workload) > 200_000 else REPEATS
    bare = bare_events_per_s()
    run_s = math.inf
    for _ in range(repeats):
        began = time.process_time()
        columns = run(experiment, fast_forward=case.fast_forward)
        run_s = min(run_s, time.process_time() - began)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    iterations = sum(int(replica.spans["n"].sum()) for replica in columns.replicas)
    n = len(experiment.workload)
    figures = {
        "requests_per_s": n / run_s,
        "iterations_per_s": iterations / run_s,
        "run_s": run_s,
        "iterations": iterations,
        "peak_mb": peak_bytes / 1e6,
        "bare_events_per_s": bare,
        "ratio": n / run_s / bare,
    }
    if case.save:
        with tempfile.TemporaryDirectory() as folder:
            # The first import of matplotlib and its fonts are set-up.
            _save(simulate(_experiment(Case(name="warm", synthetic_requests=10))), Path(folder) / "warm")
            manifest = {"label": case.name}
            result = Result(completed(experiment, columns, manifest), manifest=manifest)
            del columns
            began = time.process_time()
            _save(result, Path(folder) / "results")
            figures["save_s"] = time.process_time() - began
            figures["saved_peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    return figures


def _save(result: Any, folder: Path) -> None:
    """Writes what `rooftrace run` does: files, and pictures."""
    kept = result.kept()
    save_run(kept, kept.save(folder))


def _experiment(case: Case) -> Any:
    scenario = Scenario.default()
    for key, value in case.settings.items():
        scenario = scenario.with_set(f"{key}={value}")
    if case.trace is not None:
        scenario = scenario.with_set(f"workload={{trace: {case.trace}, rate_scale: {case.rate_scale}}}")
        return build(scenario)
    experiment = build(scenario)
    if case.batch:
        workload = synthesize(
            arrivals=Poisson(rate_per_s=1e9),
            prompt=Fixed(tokens=16),
            output=Fixed(tokens=8192),
            n_requests=case.batch,
            seed=0,
        )
        spec = dataclasses.replace(experiment.replicas[0], kv_blocks=case.batch * 520)
        return dataclasses.replace(experiment, workload=workload, replicas=(spec,))
    output = (
        Fixed(tokens=case.output_tokens) if case.output_tokens else LogNormal.from_mean_median(mean=211, median=129)
    )
    workload = synthesize(
        arrivals=Poisson(rate_per_s=case.synthetic_rate_per_s),
        prompt=LogNormal.from_mean_median(mean=1155, median=1020),
        output=output,
        n_requests=case.synthetic_requests,
        seed=0,
    )
    return dataclasses.replace(experiment, workload=workload)


def cases(trace: Path, million: bool) -> list[Case]:
    """The cases that the figures are of."""
    found: list[Case] = []
    if trace.exists():
        for policy in ("sarathi", "vllm-v0", "vllm"):
            for scale in (0.25, 0.5, 1.0, 2.0):
                found.append(
                    Case(
                        name=f"conversation x{scale:g}, {policy}, 1 replica",
                        settings={"scheduler": f"{{policy: {policy}}}"},
                        trace=str(trace),
                        rate_scale=scale,
                        save=policy == "sarathi" and scale == 1.0,
                    )
                )
            found.append(
                Case(
                    name=f"conversation x4, {policy}, 4 replicas",
                    settings={"scheduler": f"{{policy: {policy}}}", "replicas": 4, "router": "least_outstanding"},
                    trace=str(trace),
                    rate_scale=4.0,
                )
            )
        found += [
            Case(name="conversation x1, stepping", settings=_SARATHI, trace=str(trace), fast_forward=False),
            Case(name="conversation x0.05 (light load)", settings=_SARATHI, trace=str(trace), rate_scale=0.05),
            Case(name="conversation x16 (saturated)", settings=_SARATHI, trace=str(trace), rate_scale=16.0),
        ]
        # To be held against "conversation x1, sarathi, 1 replica": a third of its requests per second is asked for.
        found += [
            Case(
                name=f"conversation x1, speculative {name}",
                settings={**_SARATHI, "decoding": section},
                trace=str(trace),
            )
            for name, section in _DECODING.items()
        ]
    sizes = [1_000, 10_000, 100_000] + ([1_000_000] if million else [])
    found += [Case(name=f"synthetic, {n:,} requests", synthetic_requests=n, save=n > 100_000) for n in sizes]
    for batch in (16, 64, 256, 1024):
        found.append(
            Case(
                name=f"batch of {batch}, stepping",
                settings={"scheduler": f"{{policy: sarathi, max_sequences: {batch}, token_budget: {2 * batch}}}"},
                batch=batch,
                fast_forward=False,
            )
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trace", type=Path, default=DEFAULT_TRACE, help="Azure conversation trace")
    parser.add_argument("--only", default="", help="run only cases whose name holds this word")
    parser.add_argument("--million", action="store_true", help="also a million requests, and the memory to save them")
    options = parser.parse_args()
    if not options.trace.exists():
        print(f"{options.trace} is not here: the conversation cases are left out")
    print(
        f"{'case':44} {'requests/s':>11} {'iterations/s':>13} {'us/iteration':>13} {'peak MB':>8} {'ratio to bare':>14}"
    )
    for case in cases(options.trace, options.million):
        if options.only in case.name:
            figures = _in_its_own_process(measure, case)
            saved = ""
            if "save_s" in figures:
                saved = f"  saving {figures['save_s']:.2f} s beside {figures['run_s']:.2f} s, {figures['saved_peak_mb']:.0f} MB"
            print(
                f"{case.name:44} {figures['requests_per_s']:11,.0f} {figures['iterations_per_s']:13,.0f} "
                f"{1e6 * figures['run_s'] / figures['iterations']:13.2f} {figures['peak_mb']:8.0f} "
                f"{figures['ratio']:14.4f}{saved}",
                flush=True,
            )


def _in_its_own_process(function: Callable[[Case], dict[str, float]], case: Case) -> dict[str, float]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, case).result()


if __name__ == "__main__":
    main()
