"""A measured run simulated under its own protocol: a scenario and a `BenchRun` in, the figures that its tool would print out."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sim import metrics
from sim.bench.load import Load, NotReplayable, assumed, in_step, load_of
from sim.bench.measured import BenchRun, Latency
from sim.metrics.spread import block_quantile, weighted_statistics
from sim.run import simulate
from sim.scenario.assembly import resolve
from sim.study.statistics import alike

if TYPE_CHECKING:
    from sim.engine import Experiment
    from sim.engine.record.columns import Columns
    from sim.scenario import Scenario

LATENCIES = ("ttft", "tpot", "itl", "e2el")
GAPS = ("itl_prompt", "itl_decode")
"""Gaps between tokens in which another request's first token came, and in which none did."""
RATES = ("requests_per_s", "output_tokens_per_s")
REPLICATIONS = 3
_NS = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The figures of a run's simulation, in the words of the measurement.

    Figures are named `ttft_mean_s`, `tpot_p99_s`, `requests_per_s`, `duration_s`; `measured` has those that the file gives, and
    `predicted` the same and the mean and median of every latency.
    """

    run: BenchRun
    measured: Mapping[str, float]
    predicted: Mapping[str, float]
    """Means over the replications."""
    spread: Mapping[str, float]
    """Standard deviation between replications; 0 where there is one."""
    replications: int
    saturated: bool | None
    """Whether the simulated server could not take what was offered; None as for `BenchRun.saturated`."""
    assumed: tuple[str, ...] = ()
    unjudged: tuple[str, ...] = ()
    """Latencies of which an error would tell of what the file does not say: `ttft` where clients go in step (`load.in_step`)."""

    def error(self, name: str) -> float | None:
        """predicted / measured - 1; None where either is missing, nothing was measured, or the latency is not judged."""
        if name.partition("_")[0] in self.unjudged:
            return None
        theirs, ours = self.measured.get(name), self.predicted.get(name)
        return None if not theirs or ours is None or not np.isfinite(ours) else ours / theirs - 1.0


def replay(scenario: Scenario, run: BenchRun, *, seeds: Iterable[int] | None = None) -> Replayed:
    """*run* on the deployment of *scenario*, whose own workload is put aside, once for each of *seeds*.

    Without *seeds* these are `REPLICATIONS` from the scenario's own. Where the first two have the same figures, nothing is drawn
    and one stands for all. `NotReplayable` where the run lacks facts, ScenarioError where the deployment cannot be built.
    """
    chosen = list(range(scenario.seed, scenario.seed + REPLICATIONS) if seeds is None else seeds)
    found: list[dict[str, float]] = []
    first: Experiment | None = None
    for seed in chosen:
        load = load_of(run, seed)
        first = experiment_of(scenario, load, seed, like=first)
        found.append(figures(first, load, run))
        if alike(found):
            return replayed(run, found[:1])
    return replayed(run, found)


def replayed(run: BenchRun, found: Sequence[Mapping[str, float]]) -> Replayed:
    """Replications of `figures` put together."""
    names = list(found[0])
    predicted = {name: statistics.fmean(each[name] for each in found) for name in names}
    spread = {name: statistics.stdev([each[name] for each in found]) if len(found) > 1 else 0.0 for name in names}
    return Replayed(
        run=run,
        measured=measured_figures(run),
        predicted=predicted,
        spread=spread,
        replications=len(found),
        saturated=_saturated(run, predicted),
        assumed=tuple(assumed(run)),
        unjudged=("ttft",) if in_step(run) else (),
    )


def experiment_of(scenario: Scenario, load: Load, seed: int, *, like: Experiment | None = None) -> Experiment:
    """The deployment of *scenario* under *load*.

    *like* is one that was made for another draw of the same load: its machines serve again, which saves their assembly.
    """
    if like is None:
        like = resolve(scenario, load.workload).experiment
    return replace(like, workload=load.workload, in_flight=load.in_flight, seed=seed)


def figures(experiment: Experiment, load: Load, run: BenchRun) -> dict[str, float]:
    """Simulate *experiment*, and say what the tool that measured *run* would have printed: every figure that `measured_figures`
    has, and mean and median of all latencies. Requests that only warm the server up do not count."""
    return figures_of(simulate(experiment).columns, load, run)  # type: ignore[arg-type]


def figures_of(columns: Columns, load: Load, run: BenchRun) -> dict[str, float]:
    """The same of a simulation that has been run."""
    requests = columns.requests
    warm = np.arange(len(requests["arrival_ns"])) < load.warm_requests
    sent_ns = requests["arrival_ns"]
    if load.warm_requests and requests["finish_ns"][warm].max() > sent_ns[~warm].min():
        raise NotReplayable(
            f"{run.name}: warming the server up with {load.warm_requests} prompts takes more than an hour"
        )
    counted = counted_of(columns, load, run)
    begin_ns = int(sent_ns[~warm].min())
    if not counted.any():
        raise NotReplayable(
            f"{run.name}: no request of its simulation ends; the deployment rejects {_reasons(columns)}"
        )
    end_ns = int(requests["finish_ns"][counted].max())
    offered = run.offered
    from_ns, until_ns = begin_ns + (offered.warmup_s or 0.0) / _NS, end_ns - (offered.cooldown_s or 0.0) / _NS
    counted &= (sent_ns >= from_ns) & (sent_ns <= until_ns)
    if not counted.any():
        raise NotReplayable(
            f"{run.name}: its figures leave out {offered.warmup_s or 0:g} s at the beginning and {offered.cooldown_s or 0:g} s "
            f"at the end, and none of its {len(sent_ns):,} requests is left; say run.warmup_s and run.cooldown_s, or run.requests"
        )
    window_s = (until_ns - from_ns) * _NS
    part = {name: column[counted] for name, column in requests.items()}
    span_s = (end_ns - begin_ns) * _NS
    values = {"ttft": metrics.ttft_s(part), "tpot": metrics.tpot_s(part), "e2el": metrics.e2el_s(part)}
    found: dict[str, float] = {"duration_s": span_s}
    for name in LATENCIES:
        wanted = dict.fromkeys(("mean", "median"))
        latency: Latency | None = getattr(run, name)
        wanted |= dict.fromkeys(() if latency is None else latency.statistics)
        if name == "itl":
            of_gaps = _gap_statistics(columns.itl_blocks(), list(wanted)) if latency is not None else {}
            found |= {f"itl_{key}_s": value for key, value in of_gaps.items()}
            continue
        finite = values[name][np.isfinite(values[name])]
        if finite.size:
            found |= {f"{name}_{key}_s": _statistic(finite, key) for key in wanted}
    found |= _split_gaps(columns, run)
    found["requests_per_s"] = float(counted.sum() / window_s) if window_s > 0 else float("nan")
    found["output_tokens_per_s"] = float(part["output_tokens"].sum() / window_s) if window_s > 0 else float("nan")
    ran_ns = (part["finish_ns"] - part["scheduled_ns"])[part["scheduled_ns"] >= 0].sum()
    found["running_s_per_token"] = float(ran_ns * _NS / max(int(part["output_tokens"].sum()), 1))
    found["prompt_tokens_mean"] = float(part["prompt_tokens"].mean())
    found["output_tokens_mean"] = float(part["output_tokens"].mean())
    return found


def counted_of(columns: Columns, load: Load, run: BenchRun) -> NDArray[np.bool_]:
    """The requests that ended and that a figure of *run* may be over."""
    requests = columns.requests
    counted = (np.arange(len(requests["status"])) >= load.warm_requests) & (requests["status"] == 0)
    if run.protocol is not None:
        counted &= run.protocol.counted(requests["arrival_ns"], run.offered.concurrency or 1)
    return counted


def measured_figures(run: BenchRun) -> dict[str, float]:
    """The figures that the file of *run* gives, by the names of `Replayed`."""
    found: dict[str, float] = {}
    for name in (*LATENCIES, *GAPS):
        latency: Latency | None = getattr(run, name)
        for key in () if latency is None else latency.statistics:
            value = latency.at(key) if latency is not None else None
            if value is not None:
                found[f"{name}_{key}_s"] = value
    for name in ("duration_s", "running_s_per_token", *RATES):
        value = getattr(run, name)
        if value is not None:
            found[name] = value
    return found


def _saturated(run: BenchRun, predicted: Mapping[str, float]) -> bool | None:
    """Whether the run is saturated by the rule of the measured run, on the simulated figures."""
    if not (run.offered.open or run.offered.ramped):
        return None
    first = [value for name, value in predicted.items() if name.startswith("ttft_") and "std" not in name]
    simulated = replace(
        run,
        duration_s=predicted["duration_s"],
        offered=replace(
            run.offered,
            requests=run.offered.requests or round((run.offered.rate_per_s or 0.0) * (run.offered.duration_s or 0.0)),
            output=replace(run.offered.output, mean_tokens=predicted["output_tokens_mean"]),
        ),
        requests_per_s=predicted["requests_per_s"],
        ttft=Latency(min_s=min(first, default=0.0), mean_s=predicted.get("ttft_mean_s")),
        tpot=Latency(mean_s=predicted.get("tpot_mean_s", 0.0)),
        e2el=Latency(mean_s=predicted.get("e2el_mean_s")),
    )
    return simulated.saturated


def _statistic(values: np.ndarray, name: str) -> float:
    if name in ("mean", "median", "std", "min", "max"):
        return float(getattr(np, name)(values))
    return float(np.percentile(values, float(name.removeprefix("p"))))


def _split_gaps(columns: Columns, run: BenchRun) -> dict[str, float]:
    """The statistics of gaps with and without another's first token, of those that *run* has measured."""
    wanted: dict[str, Latency] = {name: of for name in GAPS if (of := getattr(run, name)) is not None}
    if not wanted:
        return {}
    first_ns = columns.requests["first_token_ns"]
    firsts = np.sort(first_ns[first_ns >= 0])
    blocks: dict[str, list[tuple[NDArray[np.int64], NDArray[np.int64]]]] = {name: [] for name in GAPS}
    for gaps, weights, ends in columns.itl_ends():
        some = np.searchsorted(firsts, ends, "right") > np.searchsorted(firsts, ends - gaps, "right")
        for name, mine in zip(GAPS, (some, ~some), strict=True):
            blocks[name].append((gaps[mine], weights[mine]))
    return {
        f"{name}_{key}_s": value
        for name, of in wanted.items()
        for key, value in _gap_statistics(blocks[name], list(dict.fromkeys(("mean", "median", *of.statistics)))).items()
    }


def _gap_statistics(
    pieces: Iterable[tuple[NDArray[np.int64], NDArray[np.int64]]], names: list[str]
) -> dict[str, float]:
    """The statistics of gaps between tokens, given in pieces with their weights."""
    blocks = [(gaps, weights) for gaps, weights in pieces if len(gaps)]
    if not blocks:
        return {}
    plain = weighted_statistics(lambda: blocks)
    shares = [float(name.removeprefix("p")) / 100 for name in names if name.startswith("p")]
    quantiles = iter(block_quantile(lambda: blocks, shares) * _NS if shares else [])
    found = {}
    for name in names:
        if name.startswith("p"):
            found[name] = float(next(quantiles))
        elif name == "min":
            found[name] = min(int(gaps.min()) for gaps, _ in blocks) * _NS
        else:
            value = plain[name]
            assert value is not None
            found[name] = value
    return found


def _reasons(columns: Columns) -> str:
    return "; ".join(columns.reasons) or "all of them"
