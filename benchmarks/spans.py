"""Whether spans give what stepping gives, to the nanosecond, over many random runs.

    python -m benchmarks.spans [RUNS] [--first SEED] [--processes 2]

Every run is made twice: once in spans, and once with each iteration stepped through. Requests, iterations, gaps between tokens and
what routers were told are compared. Prints the runs that differ, fail or take longer than `LIMIT_S` of processor time, and how many
had each feature of the engine; the exit code is 1 where one differs.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from benchmarks.same_results import random_run
from policies.routers import knowledge_of
from policies.view import plans_ahead
from sim.engine import Columns, Experiment, UnservedError, run
from sim.engine.record.columns import ABORTED, LOST
from tests.engine import test_polled
from tests.engine.random_runs import (
    Noting,
    assert_same,
    partly_speculative,
    with_late_news,
    with_long_answers,
)
from tests.policies import test_classes
from workloads import ClosedLoop, Trace

LIMIT_S = 20.0
"""Processor time of a run's two ways together, which usually take a twentieth of a second."""


class Outcome(NamedTuple):
    """The features of a random run, and how its two ways differ."""

    seed: int
    features: list[str]
    difference: str


def drawn(seed: int) -> Experiment:
    """The random run of *seed*: a fifth have classes, a tenth published loads, and of the others some long answers or routers that
    hear late what machines have cached."""
    kind = seed % 10
    if kind in (0, 5) and (classed := test_classes.a_run(seed)) is not None:
        return classed
    if kind == 3:
        return test_polled.a_run(seed)
    rng = random.Random(f"spans of {seed}")
    experiment = partly_speculative(random_run(rng.randrange(1 << 20)), seed)
    if rng.random() < 0.4:
        experiment = with_long_answers(experiment, seed)
    return with_late_news(experiment, seed) if rng.random() < 0.3 else experiment


def _of_setting(experiment: Experiment) -> Iterator[tuple[str, bool]]:
    machines, cores, workload = experiment.machines, experiment.hosted, experiment.workload
    shared = [machine.hosted for machine in machines if len(machine.hosted) > 1]
    knows = [
        knowledge_of(router)
        for router in (experiment.router, None if experiment.handover is None else experiment.handover.router)
    ]
    handover, fleet = experiment.handover, experiment.fleet
    yield "asynchronous scheduling", makes_plans_ahead(experiment)
    yield "routers that hear late of caches", any(each is not None and each.event_delay_s > 0 for each in knows)
    yield "routers that read published loads", any(each is not None and each.poll_s > 0 for each in knows)
    yield "tiers", any(core.tiers for core in cores)
    yield "swapping", any(core.swaps for core in cores)
    yield "ranks", any(machine.ranks > 1 for machine in machines)
    yield "pools of prefill and decode", handover is not None
    yield "fleets", fleet is not None
    yield "fleets that scale", fleet is not None and any(fleet.scaling)
    yield "fleets that fail", fleet is not None and (any(fleet.failing) or bool(fleet.outages))
    yield "classes", isinstance(workload, Trace) and bool(workload.terms)
    yield "pipelines", any(core.cost.n_stages > 1 for core in cores)
    yield "micro-batches", any((core.micro_batches or core.cost.n_stages) > 1 for core in cores)
    yield "shared machines", bool(shared)
    yield "speculation", any(core.decoding is not None for core in cores)
    yield "shared machines, all models speculate", any(all(core.decoding for core in each) for each in shared)
    yield (
        "shared machines, some models speculate",
        any(any(core.decoding for core in each) and not all(core.decoding for core in each) for each in shared),
    )
    yield "prefix trees", any(core.prefix_cache == "tree" for core in cores)
    yield "closed loops", isinstance(workload, ClosedLoop)
    yield "requests that follow others", getattr(workload, "follows", None) is not None


def makes_plans_ahead(experiment: Experiment) -> bool:
    """Whether a machine schedules asynchronously: one with a model of its own and one batch."""
    return any(
        plans_ahead(machine.hosted[0].scheduler)
        for machine in experiment.machines
        if len(machine.hosted) == 1 and (machine.hosted[0].micro_batches or machine.hosted[0].cost.n_stages) == 1
    )


def _of_run(experiment: Experiment, spanned: Columns, stepped: Columns) -> Iterator[tuple[str, bool]]:
    status = spanned.requests["status"]
    fewer = spanned.meta["events"] / max(stepped.meta["events"], 1)
    yield "spans", fewer < 1
    yield "asynchronous scheduling with long spans", fewer < 1 / 4 and makes_plans_ahead(experiment)
    yield "aborts", bool(np.any(status == ABORTED))
    yield "requests lost with machines", bool(np.any(status == LOST))
    yield "preemptions", spanned.meta["preemptions"] > 0


def told(experiment: Experiment) -> list[Any]:
    """The messages to the routers that write them down."""
    routers = (experiment.router, None if experiment.handover is None else experiment.handover.router)
    return [router.told for router in routers if isinstance(router, Noting | test_polled.Polls)]


def _too_long(*_: object) -> None:
    raise TimeoutError(f"took longer than {LIMIT_S:g} s")


def _ran(experiment: Experiment, *, fast_forward: bool) -> Columns | str:
    """The run, or the error by which it says that requests can never be served."""
    try:
        return run(experiment, fast_forward=fast_forward)
    except UnservedError as error:
        return str(error)


def outcome(seed: int) -> Outcome:
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGPROF, _too_long)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    # Routers that write down what they are told are of one run each.
    in_spans, in_steps = drawn(seed), drawn(seed)
    try:
        spanned, stepped = _ran(in_spans, fast_forward=True), _ran(in_steps, fast_forward=False)
        if isinstance(spanned, str) or isinstance(stepped, str):
            assert spanned == stepped, f"one way ends with an error: {spanned if isinstance(spanned, str) else stepped}"
            return Outcome(seed, ["requests that can never be served"], "")
        features = [name for name, has in (*_of_setting(in_spans), *_of_run(in_spans, spanned, stepped)) if has]
        assert told(in_spans) == told(in_steps), "routers were told otherwise"
        assert_same(spanned, stepped)
    except Exception as error:
        return Outcome(seed, [], f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return Outcome(seed, features, "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("runs", type=int, nargs="?", default=10_000)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    had: Counter[str] = Counter()
    n_different = n_stopped = 0
    with ProcessPoolExecutor(options.processes) as pool:
        for found in pool.map(outcome, range(options.first, options.first + options.runs), chunksize=20):
            had.update(found.features)
            if found.difference:
                stopped = found.difference.startswith(TimeoutError.__name__)
                n_stopped += stopped
                n_different += not stopped
                print(f"seed {found.seed}: {found.difference}", flush=True)
            if (found.seed - options.first) % 1000 == 999:
                print(f"{found.seed - options.first + 1:,} runs", flush=True)
    for name, n in sorted(had.items(), key=lambda each: -each[1]):
        print(f"{n:7,} {name}")
    print(f"{options.runs:,} runs, seeds from {options.first}: {n_different} differ, {n_stopped} took too long")
    return int(n_different > 0)


if __name__ == "__main__":
    sys.exit(main())
