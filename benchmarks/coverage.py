"""How often the intervals of `compare` hold the truth, printed as the table of docs/coverage.md.

    python -m benchmarks.coverage [--pairs 1000] [--truth 10000] [--loads 0.5 0.8 0.9] [--requests 2000 10000]
                                  [--replications 5 10] [--system "M/D/1"] [--series] [--warmup]

B serves every request 5 % slower than A, on the same arrivals. Two systems, both with Poisson arrivals and single-pass requests
served one at a time: M/D/1, and two replicas behind `least_outstanding` whose service grows with uniform prompt lengths.
Runs come from recursions over arrays, which are first laid over the event loop: equal to the nanosecond, or the script ends
with an error. The intervals are those of `compare` itself (`latency_change` and `queue_stretches` for two results,
`ratio_interval` for two scenarios), pairs that it calls saturated are counted as declined.

Truths: in the long run, the closed form of M/D/1, elsewhere the second half of --truth replications of 10,000 requests; of a
run this long, the ratio of the means of the figure over --truth replications. `--series` prints the coverage on series that
are no queues, on which the constants of the intervals were chosen; `--warmup` what MSER-5 does to the mean of a run.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hwmodels.cost import Work
from hwmodels.totals import Totals
from policies.published import OrcaPaged
from policies.routers import LeastOutstanding, RoundRobin
from sim import metrics
from sim.engine import Experiment, ReplicaSpec, run
from sim.errors import RooftraceError
from sim.study import statistics as st
from sim.study.paired import STATISTICS, latency_change, queue_stretches
from sim.theory.queueing import md1_wait_s
from workloads import Fixed, Poisson, Trace, Uniform, synthesize

IntArray = NDArray[np.int64]
SLOWER = 1.05
FIGURES = ("mean", "p50", "p99")
LONG_RUN = 10_000
_TRUTH_SEED = 10_000_000
_AT_ONCE = 500


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Seconds of an iteration: so many, and more for every prompt token. Whole nanoseconds, as the recursions have them."""

    fixed_ns: int
    token_ns: int
    slower: float = 1.0
    n_stages: int = 1
    window_tokens: int | None = None
    peak_flops_per_s: float = 1e15
    peak_bytes_per_s: float = 1e12

    def service_ns(self, prompt_tokens: Any) -> Any:
        return round(self.fixed_ns * self.slower) + round(self.token_ns * self.slower) * prompt_tokens

    def iteration_s(self, totals: Totals, stage: int = 0, /) -> Any:
        return self.service_ns(totals.prefill_rows) / 1e9

    def handover_s(self, rows: Any, /) -> Any:
        return 0.0 * rows

    def work(self, totals: Totals, /) -> Work:
        return Work(1.0 * totals.rows, 1.0 * totals.rows)


@dataclass(frozen=True, kw_only=True)
class System:
    """A system that is compared with its slower self: costs, prompt lengths, replicas."""

    name: str
    cost: Prompts
    prompt: Fixed | Uniform
    replicas: int

    def mean_service_s(self) -> float:
        tokens = self.prompt.tokens if isinstance(self.prompt, Fixed) else 0.5 * (
            self.prompt.min_tokens + self.prompt.max_tokens
        )  # fmt: skip
        return self.cost.service_ns(tokens) / 1e9

    def trace(self, load: float, n: int, seed: int) -> Trace:
        """Requests that keep A's replicas busy for *load* of the time."""
        return synthesize(
            arrivals=Poisson(rate_per_s=load * self.replicas / self.mean_service_s()),
            prompt=self.prompt,
            output=Fixed(tokens=0),
            n_requests=n,
            seed=seed,
        )

    def long_run(self, load: float) -> float | None:
        """The change of the mean latency in closed form; None where there is none."""
        if self.replicas > 1:
            return None
        service = self.mean_service_s()
        rate = load / service
        a, b = (s + float(md1_wait_s(rate, s)) for s in (service, SLOWER * service))
        return b / a - 1


def slower(cost: Prompts) -> Prompts:
    return Prompts(fixed_ns=cost.fixed_ns, token_ns=cost.token_ns, slower=SLOWER)


SYSTEMS = (
    System(
        name="M/D/1",
        cost=Prompts(fixed_ns=20_000_000, token_ns=0),
        prompt=Fixed(tokens=8),
        replicas=1,
    ),
    System(
        name="two replicas",
        cost=Prompts(fixed_ns=5_000_000, token_ns=10_000),
        prompt=Uniform(min_tokens=200, max_tokens=1800),
        replicas=2,
    ),
)


def recursion(arrival_ns: IntArray, service_ns: IntArray, replicas: int) -> tuple[IntArray, IntArray]:
    """When requests are taken, and by which replica: first come, first served, one at a time. Shapes [runs, n].

    One replica: Lindley's recursion, start = max over j of (arrival of j - work before j) + work before. More: each goes
    to the replica with the fewest requests that have not ended by its arrival, the lowest index among equals; what ends
    in the instant of an arrival has not ended for it.
    """
    if replicas == 1:
        before = np.cumsum(service_ns, axis=1) - service_ns
        return np.maximum.accumulate(arrival_ns - before, axis=1) + before, np.zeros_like(arrival_ns)
    runs, n = arrival_ns.shape
    start, chosen = np.empty_like(arrival_ns), np.empty_like(arrival_ns)
    # Flat over (run, replica): ends of its requests in order, how many were sent and had ended, the next end, the last.
    never = np.iinfo(np.int64).max
    ends = np.full((runs * replicas, n + 1), never)
    sent, ended, last = np.zeros((3, runs * replicas), np.int64)
    coming = np.full(runs * replicas, never)
    base = np.arange(runs) * replicas
    for i in range(n):
        now = np.ascontiguousarray(arrival_ns[:, i])
        over = np.flatnonzero(coming < np.repeat(now, replicas))
        while over.size:
            ended[over] += 1
            coming[over] = ends[over, ended[over]]
            over = over[coming[over] < now[over // replicas]]
        best = np.argmin((sent - ended).reshape(runs, replicas), axis=1)
        at = base + best
        begin = np.maximum(now, last[at])
        end = begin + service_ns[:, i]
        ends[at, sent[at]] = end
        coming[at] = np.minimum(coming[at], end)
        last[at] = end
        sent[at] += 1
        start[:, i], chosen[:, i] = begin, best
    return start, chosen


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Runs of one system on some seeds, A and B on the same arrivals. Shapes [runs, n]."""

    arrival_ns: IntArray
    start_ns: tuple[IntArray, IntArray]
    replica: tuple[IntArray, IntArray]
    latency_s: tuple[NDArray[np.float64], NDArray[np.float64]]


def simulated(system: System, load: float, n: int, seeds: range) -> Runs:
    traces = [system.trace(load, n, seed) for seed in seeds]
    arrival = np.stack([trace.arrival_ns for trace in traces])
    tokens = np.stack([trace.prompt_tokens for trace in traces]).astype(np.int64)
    starts, replicas, latencies = [], [], []
    for cost in (system.cost, slower(system.cost)):
        service = cost.service_ns(tokens)
        start, replica = recursion(arrival, service, system.replicas)
        starts.append(start)
        replicas.append(replica)
        latencies.append((start + service - arrival) / 1e9)
    return Runs(
        arrival_ns=arrival,
        start_ns=(starts[0], starts[1]),
        replica=(replicas[0], replicas[1]),
        latency_s=(latencies[0], latencies[1]),
    )


def batches_of(system: System, load: float, n: int, seeds: range) -> Iterator[Runs]:
    for first in range(seeds.start, seeds.stop, _AT_ONCE):
        yield simulated(system, load, n, range(first, min(first + _AT_ONCE, seeds.stop)))


def largest_gap_ns(system: System, load: float, n: int, seeds: range) -> int:
    """How far the recursion's finish times are from the event loop's, at most."""
    found = simulated(system, load, n, seeds)
    worst = 0
    for side, cost in enumerate((system.cost, slower(system.cost))):
        replica = ReplicaSpec(
            cost=cost,  # type: ignore[arg-type]  # frozen, which the protocol's plain attributes do not foresee
            scheduler=OrcaPaged(max_sequences=1),
            kv_blocks=10_000,
        )
        router = RoundRobin() if system.replicas == 1 else LeastOutstanding()
        for row, seed in enumerate(seeds):
            workload = system.trace(load, n, seed)
            specs = (replica,) * system.replicas
            loop = run(Experiment(workload=workload, replicas=specs, router=router)).requests
            finish = found.arrival_ns[row] + np.rint(found.latency_s[side][row] * 1e9).astype(np.int64)
            worst = max(
                worst,
                int(np.abs(loop["finish_ns"] - finish).max()),
                int(np.abs(loop["scheduled_ns"] - found.start_ns[side][row]).max()),
            )
    return worst


def figure_of(values: NDArray[np.float64], figure: str) -> NDArray[np.float64]:
    probability = STATISTICS[figure]
    return values.mean(axis=-1) if probability is None else np.quantile(values, probability, axis=-1)


def figures(system: System, load: float, n: int, seeds: range) -> dict[str, NDArray[np.float64]]:
    """Every figure of every run, A and B: shape [2, runs] each."""
    parts: dict[str, list[NDArray[np.float64]]] = {figure: [] for figure in FIGURES}
    for runs in batches_of(system, load, n, seeds):
        for figure in FIGURES:
            parts[figure].append(np.stack([figure_of(side, figure) for side in runs.latency_s]))
    return {figure: np.concatenate(found, axis=1) for figure, found in parts.items()}


Truth = tuple[dict[str, float], dict[int, dict[str, float]]]


def truths(system: System, load: float, requests: list[int], replications: int) -> Truth:
    """The change of each figure in the long run, and that of its expectation over runs of so many requests.

    The same replications serve for both: requests of a run do not depend on how many follow.
    """
    own: dict[int, dict[str, list[Any]]] = {n: {figure: [] for figure in FIGURES} for n in requests}
    thinned: tuple[list[Any], list[Any]] = ([], [])
    halves = np.zeros(2)
    length = max(LONG_RUN, *requests)
    for runs in batches_of(system, load, length, range(_TRUTH_SEED, _TRUTH_SEED + replications)):
        for side in (0, 1):
            late = runs.latency_s[side][:, length // 2 :]
            halves[side] += late.sum()
            thinned[side].append(late[:, ::20].ravel())
        for n, parts in own.items():
            for figure, part in parts.items():
                part.append(np.stack([figure_of(side[:, :n], figure) for side in runs.latency_s]))
    long_run = {}
    for figure in FIGURES:
        a, b = halves if figure == "mean" else (figure_of(np.concatenate(side), figure) for side in thinned)
        long_run[figure] = float(b / a - 1)
    exact = system.long_run(load)
    if exact is not None:
        long_run["mean"] = exact
    changes = {}
    for n, parts in own.items():
        means = {figure: np.concatenate(part, axis=1).mean(axis=1) for figure, part in parts.items()}
        changes[n] = {figure: float(b / a - 1) for figure, (a, b) in means.items()}
    return long_run, changes


@dataclass(slots=True)
class Tally:
    """Intervals of one cell of the table."""

    given: int = 0
    long_run: int = 0
    own: int = 0
    would_do: list[int] | None = None

    def add(self, change: st.Change, long_run: float, own: float) -> None:
        self.given += 1
        self.long_run += change.low <= long_run <= change.high
        self.own += change.low <= own <= change.high


def of_results(
    system: System, load: float, n: int, pairs: int, long_run: dict[str, float], own: dict[str, float]
) -> dict[str, Tally]:
    """Intervals from two results each."""
    tallies = {figure: Tally(would_do=[]) for figure in FIGURES}
    for runs in batches_of(system, load, n, range(pairs)):
        for row in range(len(runs.arrival_ns)):
            arrival = runs.arrival_ns[row]
            sides = [(runs.start_ns[side][row], runs.replica[side][row]) for side in (0, 1)]
            if any(_saturated(arrival, start) for start, _ in sides):
                continue
            stretches = min(queue_stretches(arrival, start, replica) for start, replica in sides)
            for figure, tally in tallies.items():
                before, after = (runs.latency_s[side][row] for side in (0, 1))
                change, why = latency_change(before, after, figure, stretches=stretches)
                assert change is not None
                if not math.isnan(change.half_width):
                    tally.add(change, long_run[figure], own[figure])
                elif "about" in why:
                    assert tally.would_do is not None
                    tally.would_do.append(int(why.split("about ")[1].split()[0].replace(",", "")))
    return tallies


def _saturated(arrival_ns: IntArray, start_ns: IntArray) -> bool:
    status = np.zeros(arrival_ns.size, np.int8)
    return bool(metrics.saturated({"arrival_ns": arrival_ns, "scheduled_ns": start_ns, "status": status}))


def of_scenarios(
    found: dict[str, NDArray[np.float64]],
    pairs: int,
    replications: int,
    long_run: dict[str, float],
    own: dict[str, float],
) -> dict[str, Tally]:
    """Intervals from *replications* pairs of runs each, on the first seeds, those that follow, and so on."""
    tallies = {figure: Tally() for figure in FIGURES}
    for figure, both in found.items():
        a, b = both[:, : pairs * replications].reshape(2, pairs, replications)
        for row_a, row_b in zip(a, b, strict=True):
            tallies[figure].add(st.ratio_interval(row_a, row_b), long_run[figure], own[figure])
    return tallies


def print_table(args: argparse.Namespace) -> None:
    for system in args.systems:
        gap = max(largest_gap_ns(system, load, 2_000, range(3)) for load in args.loads)
        if gap:
            raise SystemExit(f"{system.name}: the recursion is {gap} ns from the event loop; its figures mean nothing")
        print(
            f"{system.name}: recursion and event loop agree to the nanosecond over {len(args.loads) * 6} runs of 2,000"
        )
    heads = ("system", "load", "requests", "figure", "truth", "two results", "declined", "would do", "truth")
    heads = (*heads, *(f"{m} pairs" for m in args.replications))
    print(f"\nOf {args.pairs:,} intervals at 95 %; a share in brackets is of the other truth.\n")
    print(f"| {' | '.join(heads)} |")
    print(f"|{'|'.join('---' for _ in heads)}|", flush=True)
    for system in args.systems:
        for load in args.loads:
            long_run, changes = truths(system, load, args.requests, args.truth)
            for n in args.requests:
                own = changes[n]
                results = of_results(system, load, n, args.pairs, long_run, own)
                found = figures(system, load, n, range(args.pairs * max(args.replications)))
                scenarios = [of_scenarios(found, args.pairs, m, long_run, own) for m in args.replications]
                for figure in FIGURES:
                    tally = results[figure]
                    would = sorted(tally.would_do or [])
                    cells = [
                        *(system.name, f"{load:g}", f"{n:,}", figure, f"{long_run[figure]:+.2%}"),
                        _share(tally.long_run, tally.given) + f" ({_share(tally.own, tally.given)})",
                        f"{1 - tally.given / args.pairs:.1%}",
                        f"{would[len(would) // 2]:,}" if would else "",
                        f"{own[figure]:+.2%}",
                    ]
                    for each in (tallies[figure] for tallies in scenarios):
                        cells.append(_share(each.own, each.given) + f" ({_share(each.long_run, each.given)})")
                    print(f"| {' | '.join(cells)} |", flush=True)


def _share(part: int, whole: int) -> str:
    return "-" if whole < 10 else f"{part / whole:.1%}"


def print_series(args: argparse.Namespace) -> None:
    """Coverage of the mean of series that are no queues: the constants of the intervals were chosen here."""
    from scipy.signal import lfilter

    rng = np.random.default_rng(1)
    heads = ("series", "values", "time constant", "independent values (median)", "covered", "declined")
    print(f"| {' | '.join(heads)} |\n|{'|'.join('---' for _ in heads)}|")
    for name, of, truth in (("square", np.square, 1.0), ("exponential", np.exp, math.exp(0.5))):
        for n, steps in (
            (2_000, 5),
            (2_000, 20),
            (2_000, 60),
            (2_000, 100),
            (10_000, 60),
            (10_000, 300),
            (10_000, 600),
        ):
            phi = math.exp(-1 / steps)
            noise = rng.normal(size=(args.pairs, n)) * math.sqrt(1 - phi * phi)
            noise[:, 0] /= math.sqrt(1 - phi * phi)
            series = of(lfilter([1], [1, -phi], noise, axis=1))
            held, given, worth = 0, 0, []
            for row in series:
                worth.append(st.independent_values(row))
                change, _ = latency_change(np.ones(n), row, "mean")
                assert change is not None
                if not math.isnan(change.half_width):
                    given += 1
                    held += change.low <= truth - 1 <= change.high
            cells = (name, f"{n:,}", f"{steps}", f"{np.median(worth):.0f}", _share(held, given))
            print(f"| {' | '.join(cells)} | {1 - given / args.pairs:.1%} |", flush=True)


def print_warmup(args: argparse.Namespace) -> None:
    """Prints the mean latency of M/D/1 runs with `window: after_warmup` and without, against its value in the long run."""
    system, n = SYSTEMS[0], 2_000
    heads = ("begins with", "load", "whole run: bias", "root mean square", "after warm-up: bias", "root mean square")
    print(f"| {' | '.join((*heads, 'cut'))} |\n|{'|'.join('---' for _ in (*heads, 'cut'))}|")
    for backlog in (0, 200):
        for load in args.loads:
            service = system.mean_service_s()
            truth = service + float(md1_wait_s(load / service, service))
            arrival = np.stack([system.trace(load, n, seed).arrival_ns for seed in range(args.pairs)])
            arrival = np.concatenate([np.repeat(arrival[:, :1], backlog, axis=1), arrival], axis=1)
            start, _ = recursion(arrival, np.full_like(arrival, round(service * 1e9)), 1)
            finish = start + round(service * 1e9)
            whole, after, cuts = [], [], []
            for row in range(args.pairs):
                requests = {
                    "arrival_ns": arrival[row],
                    "finish_ns": finish[row],
                    "status": np.zeros(arrival.shape[1], np.int8),
                }
                latency = metrics.e2el_s(requests)
                whole.append(latency.mean())
                try:
                    begin, end = metrics.window_of(requests, {"rule": "after_warmup"})
                except RooftraceError:
                    continue
                kept = (arrival[row] >= begin) & (arrival[row] <= end)
                cuts.append(1 - kept.mean())
                after.append(latency[kept].mean())
            cells = [f"{backlog} in line" if backlog else "an empty queue", f"{load:g}"]
            for found in (whole, after):
                off = np.array(found) / truth - 1
                cells += [f"{off.mean():+.1%}", f"{math.sqrt(np.square(off).mean()):.1%}"]
            cells.append(f"{np.mean(cuts):.0%}; refused {1 - len(after) / args.pairs:.0%}")
            print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=1_000)
    parser.add_argument("--truth", type=int, default=10_000)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.8, 0.9])
    parser.add_argument("--requests", type=int, nargs="+", default=[2_000, 10_000])
    parser.add_argument("--replications", type=int, nargs="+", default=[5, 10])
    parser.add_argument("--system", choices=[system.name for system in SYSTEMS], help="this one only")
    parser.add_argument("--series", action="store_true", help="series that are no queues, instead")
    parser.add_argument("--warmup", action="store_true", help="what MSER-5 does to a mean, instead")
    args = parser.parse_args()
    args.systems = [system for system in SYSTEMS if args.system in (None, system.name)]
    (print_series if args.series else print_warmup if args.warmup else print_table)(args)


if __name__ == "__main__":
    main()
