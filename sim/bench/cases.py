"""From an experiment and what was measured of it to a `Case` that a fit can replay."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hwmodels.calibrated import Calibrated
from sim import engine
from sim.bench.fitting import Case, Simulated
from sim.bench.frozen import frozen
from sim.bench.load import NotReplayable, in_step, load_of
from sim.bench.parameters import Prior, Setting, priors
from sim.bench.replay import counted_of, experiment_of, figures_of
from sim.engine import MachineSpec, ReplicaSpec
from sim.errors import ScenarioError
from sim.scenario.assembly.deployment import deployment_of

if TYPE_CHECKING:
    from hwmodels.deployment import Deployment
    from hwmodels.overheads import ServingStack
    from sim.bench.frozen import Frozen
    from sim.bench.load import Load
    from sim.bench.measured import BenchRun
    from sim.engine import Experiment
    from sim.engine.record.columns import Columns
    from sim.scenario import Scenario

Figure = Callable[["Columns"], tuple[NDArray[np.bool_], Mapping[str, float]]]
"""The requests of a finished run that count, and the figures over them in seconds by quantity."""
FULL = 0.95
"""Share of the KV cache in use from which its size matters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """An experiment on one deployment, run with another setting of its stack each time."""

    experiment: Experiment
    deployment: Deployment
    figure: Figure
    ranks_stay: bool = False
    """Whether the schedule of data-parallel ranks tells of other settings too, as that of one replica does."""

    def __call__(self, setting: Setting) -> Simulated:
        columns = engine.run(at(self.experiment, self.deployment, setting))
        counted, figures = self.figure(columns)
        moved = None
        if (len(columns.replicas) == 1 or self.ranks_stay) and self.deployment.parallel.pipeline == 1:
            moved = _Moved(self, setting, figures, frozen(columns, counted), counted)
        return Simulated(figures=figures, moved=moved, short_of_memory=_short(columns))


def priors_of(case: Case) -> dict[str, Prior]:
    """Priors for the deployment that a case replays (`sim.bench.parameters.priors`); TypeError for a case of another making."""
    if not isinstance(case.replay, Replay):
        raise TypeError(f"case {case.name} is no replay of a deployment, so nothing says how sure its parameters are")
    return priors(case.replay.deployment.profile)


@dataclass(frozen=True, slots=True, kw_only=False, eq=False)
class _Moved:
    """The change of a replay's figures while its schedule stays."""

    of: Replay
    before: Setting
    figures: Mapping[str, float]
    schedule: Frozen
    counted: NDArray[np.bool_]

    def __call__(self, other: Setting) -> Mapping[str, float]:
        """Log of the figures with the terms of *other* over those that were replayed."""
        old, new = (restacked(self.of.deployment, each.stack).cost for each in (self.before, other))
        ttft_s, tpot_s = self.schedule.moved_s(old, new)
        first, then = (front_end_s(self.of.experiment, self.counted, each.stack) for each in (self.before, other))
        longer_s = {"tpot_s": tpot_s, "ttft_s": ttft_s + then - first}
        return {
            # More than all of it cannot be taken away.
            name: float(np.log(max(1.0 + longer_s[name] / seconds, 0.05)))
            for name, seconds in self.figures.items()
            if name in longer_s
        }


def _short(columns: Columns) -> bool:
    """Whether some request was preempted or the cache was all but full."""
    return bool((columns.requests["preemptions"] > 0).any()) or any(
        len(replica.spans) and replica.spans["kv_blocks_used"].max() >= FULL * replica.kv_blocks_total
        for replica in columns.replicas
    )


def front_end_s(experiment: Experiment, counted: NDArray[np.bool_], stack: ServingStack) -> float:
    """Mean delay before the scheduler of the requests of a mask, but for queues in the front end."""
    tokens = np.asarray(experiment.workload.prompt_tokens, float)
    mean = float(tokens[counted].mean()) if counted.any() else float(tokens.mean())
    own = stack.overheads
    return own.admission_s + own.admission_serial_s + own.admission_s_per_token * mean


def at(experiment: Experiment, deployment: Deployment, setting: Setting) -> Experiment:
    """*experiment* with the terms of *setting*: its prices, its front end, and how many KV blocks there are."""
    priced = restacked(deployment, setting.stack)

    def changed(spec: ReplicaSpec) -> ReplicaSpec:
        return replace(spec, cost=priced.cost, kv_blocks=max(1, round(spec.kv_blocks * setting.kv_factor)))

    machines = tuple(
        replace(each, hosted=tuple(map(changed, each.hosted))) if isinstance(each, MachineSpec) else changed(each)
        for each in experiment.replicas
    )
    return replace(experiment, replicas=machines, **priced.front_end._asdict())


def restacked(deployment: Deployment, stack: ServingStack) -> Deployment:
    """*deployment* priced under *stack*."""
    made_by = deployment.made_by
    assert isinstance(made_by, Calibrated)
    return _restacked(_Key(deployment), replace(made_by, stack=stack))


class _Key:
    """A deployment by what prices it, so that runs of one deployment share their tables."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.key = (deployment.model, deployment.device, deployment.parallel, deployment.kv_precision)

    def __hash__(self) -> int:
        return hash((self.deployment.model.name, self.deployment.device.name, self.deployment.parallel))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.key == other.key


@functools.lru_cache(maxsize=256)
def _restacked(key: _Key, factory: Any) -> Deployment:
    own = key.deployment
    cost = factory(own.model, own.device, own.parallel, kv_precision=own.kv_precision)
    return replace(own, cost=cost, made_by=factory)


def case_of(
    name: str,
    measured_s: Mapping[str, float],
    experiment: Experiment,
    deployment: Deployment,
    figure: Figure,
    noise: Mapping[str, float] | None = None,
) -> Case:
    """A case of *experiment* on *deployment*; ValueError for several kinds of machine, and for prices of no serving stack."""
    if not isinstance(deployment.made_by, Calibrated):
        raise ValueError(
            "cost_model roofline and measured steps have no serving stack whose terms could be fitted; leave cost_model and "
            "hardware.steps out"
        )
    if any(spec.decoding is not None or spec.model is not None for spec in experiment.hosted):
        raise ValueError("only deployments of one model without speculation are fitted")
    return Case(
        name=name,
        measured_s={q: s for q, s in measured_s.items() if s is not None and np.isfinite(s)},
        replay=Replay(experiment=experiment, deployment=deployment, figure=figure),
        noise=noise or {},
        bends=experiment.workload.planned_ns is not None,
    )


def cases_of(
    scenario: Scenario, runs: Sequence[BenchRun], seed: int | None = None, *, problems: list[str] | None = None
) -> tuple[list[Case], Setting]:
    """*runs* as cases on the deployment of *scenario*, and the setting that the scenario gives it.

    TPOT and TTFT are compared by their means, or by their medians where a file has no mean; a run without TPOT by its gaps between
    tokens, and one with neither latency by how long requests run over their output tokens (`BenchRun.running_s_per_token`).
    ScenarioError for a scenario that cannot be built or has no serving stack to fit. A run that lacks facts or has neither
    figure is left out, with a sentence in *problems*; `NotReplayable` without that list.
    """
    seed = scenario.seed if seed is None else seed
    deployment = deployment_of(scenario)
    if not isinstance(deployment.made_by, Calibrated) or deployment.profile is None or deployment.profile.kind != "gpu":
        raise ScenarioError(
            f"{scenario.source}: only deployments on GPUs, calibrated and not by measured steps, have terms that can be fitted"
        )
    cases: list[Case] = []
    first: Experiment | None = None
    for run in runs:
        try:
            if not _known(run):
                raise NotReplayable(
                    f"{run.name}: the file has neither a TPOT nor a TTFT, so that there is nothing to fit to"
                )
            load = load_of(run, seed)
        except NotReplayable as error:
            if problems is None:
                raise
            problems.append(str(error))
            continue
        first = experiment_of(scenario, load, seed, like=first)
        cases.append(case_of_run(run, load, first, deployment))
    return cases, Setting(stack=deployment.made_by.stack)


def case_of_run(run: BenchRun, load: Load, experiment: Experiment, deployment: Deployment) -> Case:
    """*run* as a case of the *experiment* that replays its *load* on *deployment*."""
    known = _known(run)
    names = {f"{name}_s": where for name, (where, _) in known.items()}
    error = run.server.running_error if run.server is not None else None
    return case_of(
        run.name,
        {f"{name}_s": value for name, (_, value) in known.items()},
        experiment,
        deployment,
        _Printed(load=load, run=run, names=names),
        noise={"tpot_s": error} if error and names.get("tpot_s") == "running_s_per_token" else {},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Printed:
    """The figures that the tool of *run* prints, by quantity: `names` says under which name of `sim.bench.replay`."""

    load: Load
    run: BenchRun
    names: Mapping[str, str]

    def __call__(self, columns: Columns) -> tuple[NDArray[np.bool_], Mapping[str, float]]:
        printed = figures_of(columns, self.load, self.run)
        found = {quantity: printed.get(name, float("nan")) for quantity, name in self.names.items()}
        return counted_of(columns, self.load, self.run), found


def _known(run: BenchRun) -> dict[str, tuple[str, float]]:
    """TPOT and TTFT of a run, where it gives them and a simulation can tell them: under which name, and seconds."""
    found = {name: _figure_of(run, name) for name in ("tpot", "ttft")}
    # Clients that go in step in the simulation alone would be fitted as a slow first token.
    return {
        name: figure for name, figure in found.items() if figure is not None and not (name == "ttft" and in_step(run))
    }


def _figure_of(run: BenchRun, name: str) -> tuple[str, float] | None:
    """Under which name of `sim.bench.replay` a run's TPOT or TTFT stands, and its seconds."""
    for instead in (name, *(("itl",) if name == "tpot" else ())):
        latency = getattr(run, instead)
        for statistic in ("mean", "median"):
            value = None if latency is None else latency.at(statistic)
            if value is not None and np.isfinite(value) and value > 0:
                return f"{instead}_{statistic}_s", float(value)
    # It moves with the terms all but as TPOT does: most of what a request runs it decodes.
    seconds = run.running_s_per_token if name == "tpot" and run.ttft is None and run.e2el is None else None
    return None if seconds is None else ("running_s_per_token", seconds)
