"""Generative models that share the stages of a group: each a replica of its own, taking turns.

Every hosted model has a queue, a scheduler, a running set and a KV pool of its own, as in `sim.engine.replica`. What they share
is the stages: when the first is free, the models of the group are asked in rotation, and the first that plans something sends
its micro-batch through. Iterations are events of their own here, since any of them may be followed by another model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import simpy

from policies.routers import ReplicaLoad, RoutedRequest
from sim.engine.clock import TICK_BITS
from sim.engine.cluster import _Cluster
from sim.engine.columns import BUBBLES, Columns
from sim.engine.experiment import Experiment, ReplicaSpec
from sim.engine.lane import Cluster, RequestState
from sim.engine.replica import Replica
from workloads import Trace


@dataclass(frozen=True, kw_only=True)
class GenerativeGroup:
    """Devices whose stages several generative models share."""

    models: tuple[int, ...]
    """Rows of the workload's models, each once."""
    replicas: tuple[ReplicaSpec, ...]
    """For each of `models`: its costs on this group, its scheduler, and its part of the group's KV memory."""

    def __post_init__(self) -> None:
        if len(self.models) != len(self.replicas):
            raise ValueError(f"replicas has one for each of the {len(self.models)} models; got {len(self.replicas)}")
        if len(set(self.models)) != len(self.models):
            raise ValueError(f"models of a group are different; got {self.models!r}")
        if len({spec.cost.n_stages for spec in self.replicas}) > 1:
            raise ValueError(
                "models of a group run on the same stages; got pipelines of "
                f"{', '.join(str(spec.cost.n_stages) for spec in self.replicas)} stages"
            )


@dataclass(frozen=True, kw_only=True)
class GenerativeGroups:
    """A workload of several generative models, and the groups that serve it."""

    workload: Trace
    groups: tuple[GenerativeGroup, ...]
    seed: int = 0

    def __post_init__(self) -> None:
        asked = set(range(max(len(self.workload.models), 1)))
        missing = asked - {model for group in self.groups for model in group.models}
        if missing:
            names = ", ".join(self.workload.models[model] for model in sorted(missing)) or "the model"
            raise ValueError(f"no group hosts {names}; place every model that the workload asks for")


@dataclass(frozen=True)
class LeastBacklogHosting:
    """Of the groups that host the request's model, the one with fewest requests waiting or running, all models counted."""

    hosting: tuple[tuple[int, ...], ...]
    """For each model its replicas."""
    group_of: tuple[int, ...]
    """For each replica its group."""

    def route(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad], /) -> int:
        backlog: dict[int, int] = {}
        for group, load in zip(self.group_of, replicas, strict=True):
            backlog[group] = backlog.get(group, 0) + load.waiting + load.running
        return min(self.hosting[request.model], key=lambda replica: (backlog[self.group_of[replica]], replica))


def run_generative(groups: GenerativeGroups) -> Columns:
    """Serve the workload to its end; replica i of the columns is the i-th hosted model, group after group."""
    hosted = [
        (index, model, spec)
        for index, group in enumerate(groups.groups)
        for model, spec in zip(group.models, group.replicas, strict=True)
    ]
    n_models = max(len(groups.workload.models), 1)
    router = LeastBacklogHosting(
        hosting=tuple(tuple(i for i, (_, m, _) in enumerate(hosted) if m == model) for model in range(n_models)),
        group_of=tuple(index for index, _, _ in hosted),
    )
    experiment = Experiment(
        workload=groups.workload, replicas=tuple(spec for _, _, spec in hosted), router=router, seed=groups.seed
    )
    return _SharingCluster(experiment, router.group_of).run()


class _Stages:
    """The stages of one group, and whose turn it is."""

    def __init__(self, n_stages: int) -> None:
        self.free = [0] * n_stages
        self.members: list[_SharingReplica] = []
        self._next = 0

    def offer(self, now_ns: int) -> None:
        """Ask the members in rotation until one sends a micro-batch off."""
        n = len(self.members)
        for step in range(n):
            if self.free[0] >> TICK_BITS > now_ns:
                return
            member = self.members[(self._next + step) % n]
            if member.take_turn():
                self._next = (self._next + step + 1) % n
                return


class _SharingReplica(Replica):
    """A replica whose stages are those of its group."""

    def __init__(
        self, env: simpy.Environment, index: int, spec: ReplicaSpec, state: RequestState, cluster: Cluster, seed: int,
        stages: _Stages,
    ) -> None:  # fmt: skip
        super().__init__(env, index, spec, state, cluster, seed, False)
        self._stages = stages
        self._stage_free = stages.free
        self._pipelined = True
        stages.members.append(self)

    def take_turn(self) -> bool:
        """Plan now; whether a micro-batch was sent off."""
        sent = self._n_dispatched
        super()._pump()
        return self._n_dispatched > sent

    def _pump(self) -> None:
        # Whoever has cause to look for work finds it for the whole group.
        self._stages.offer(self._env.now)


class _SharingCluster(_Cluster):
    def __init__(self, experiment: Experiment, group_of: tuple[int, ...]) -> None:
        super().__init__(experiment, False)
        n = self._n
        if not self._state.bubbles:
            self._state.bubbles = tuple(type(self._state.finish)("q", bytes(8 * n)) for _ in BUBBLES)
        stages = {group: _Stages(spec.cost.n_stages) for group, spec in zip(group_of, experiment.replicas, strict=True)}
        self._replicas = [
            _SharingReplica(self._env, index, spec, self._state, self, experiment.seed, stages[group])
            for index, (group, spec) in enumerate(zip(group_of, experiment.replicas, strict=True))
        ]
        if self._only is not None:
            self._only = self._replicas[0]
