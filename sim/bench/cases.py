"""From an experiment and what was measured of it to a `Case` that a fit can replay."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sim.bench.fitting import Case, Replayed
from sim.bench.parameters import Setting

if TYPE_CHECKING:
    from hwmodels.deployment import Deployment
    from hwmodels.overheads import ServingStack
    from sim.engine import Experiment
    from sim.engine.columns import Columns

Figure = Callable[["Columns"], tuple[NDArray[np.bool_], Mapping[str, float]]]
"""Of a finished run: which requests count, and the figures over them in seconds by quantity."""
FULL = 0.97
"""Share of the KV cache in use from which its size matters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """An experiment on one deployment, run with another setting of its stack each time."""

    experiment: Experiment
    deployment: Deployment
    figure: Figure

    def __call__(self, setting: Setting) -> Replayed:
        from sim.engine import run
        from sim.validation.frozen import frozen

        columns = run(at(self.experiment, self.deployment, setting))
        counted, figures = self.figure(columns)
        moved = None
        if len(columns.replicas) == 1 and self.deployment.parallel.pipeline == 1:
            # The schedule is held rather than the run, which is larger.
            schedule = functools.cache(lambda: frozen(columns, counted))
            before = restacked(self.deployment, setting.stack).cost
            first = front_end_s(self.experiment, counted, setting.stack)

            def moved(other: Setting) -> Mapping[str, float]:
                ttft_s, tpot_s = schedule().moved_s(before, restacked(self.deployment, other.stack).cost)
                ttft_s += front_end_s(self.experiment, counted, other.stack) - first
                longer_s = {"tpot_s": tpot_s, "ttft_s": ttft_s}
                return {
                    # More than all of it cannot be taken away.
                    name: float(np.log(max(1.0 + longer_s[name] / seconds, 0.05)))
                    for name, seconds in figures.items()
                    if name in longer_s
                }

        return Replayed(figures=figures, moved=moved, short_of_memory=_short(columns))


def _short(columns: Columns) -> bool:
    """Whether some request was preempted or the cache was all but full."""
    if (columns.requests["preemptions"] > 0).any():
        return True
    return False


def front_end_s(experiment: Experiment, counted: NDArray[np.bool_], stack: ServingStack) -> float:
    """Mean delay before the scheduler of the requests of a mask, but for queues in the front end."""
    tokens = np.asarray(experiment.workload.prompt_tokens, float)
    mean = float(tokens[counted].mean()) if counted.any() else float(tokens.mean())
    own = stack.overheads
    return own.admission_s + own.admission_serial_s + own.admission_s_per_token * mean


def at(experiment: Experiment, deployment: Deployment, setting: Setting) -> Experiment:
    """*experiment* with the terms of *setting*: its prices, its front end, and how many KV blocks there are."""
    from sim.engine import ReplicaSpec

    priced = restacked(deployment, setting.stack)
    machines = []
    for spec in experiment.replicas:
        assert isinstance(spec, ReplicaSpec)
        blocks = max(1, round(spec.kv_blocks * setting.kv_factor))
        machines.append(replace(spec, cost=priced.cost, kv_blocks=blocks))
    return replace(experiment, replicas=tuple(machines), **priced.front_end._asdict())


def restacked(deployment: Deployment, stack: ServingStack) -> Deployment:
    """*deployment* priced under *stack*."""
    from hwmodels.calibrated import Calibrated

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
) -> Case:
    """A case of *experiment* on *deployment*; ValueError for several kinds of machine, and for prices of no serving stack."""
    from hwmodels.calibrated import Calibrated
    from sim.engine import ReplicaSpec

    if not isinstance(deployment.made_by, Calibrated):
        raise ValueError("cost_model roofline has no serving stack whose terms could be fitted; leave cost_model out")
    if not all(isinstance(spec, ReplicaSpec) and spec.decoding is None for spec in experiment.replicas):
        raise ValueError("only deployments of one model without speculation are fitted")
    return Case(
        name=name,
        measured_s={q: s for q, s in measured_s.items() if s is not None and np.isfinite(s)},
        replay=Replay(experiment=experiment, deployment=deployment, figure=figure),
    )


def fitted_together(cases: Sequence[Case]) -> None:
    """ValueError where two cases have one name."""
    names = [case.name for case in cases]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"two runs are called {twice}")
