"""Many models on one cluster: groups of devices whose pipeline stages several single-pass models take turns on.

The rules are those of AlpaServe's simulator (Li et al., OSDI 2023; artifact alpa-projects/mms):

* A request goes to the hosting group with the least backlog: the one whose last stage is promised to be free first, or
  with batching the one with fewest requests waiting or in service. The lowest index wins a tie.
* Groups serve in order of arrival. A request that would miss its deadline is rejected on arrival and costs nothing.
* With batching, each model of a group has a queue. When the first stage is free, the model whose head is oldest goes
  next: heads that would miss their deadline even alone are dropped, then the largest batch that is there and keeps the
  oldest one's deadline is taken. Nothing waits for a batch to fill.

These rules are `policies.single_pass`; groups are machines, and models are what they host. `run_groups` is the one entry. The
event loop is the reference; without batching what becomes of a request is known when it arrives, and one loop over the requests
(`sim.placement.screening`) gives the same columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.single_pass import DeadlineBatches, InOrder, LeastBacklog
from sim.build import is_compiled
from sim.engine import FINISHED, REJECTED, Experiment, MachineSpec, ReplicaSpec, StageTable, run
from sim.placement import screening
from sim.placement.screening import NEVER_NS, Host, Hosted, Line, Times, serve
from workloads import Trace

IntArray = NDArray[np.int64]

_ENOUGH = 1 << 40
"""KV blocks, and micro-batches in flight: single-pass models are limited by neither."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """One group: the models that it hosts and how long each of its stages takes for them."""

    models: tuple[int, ...]
    """Rows of the workload's models, each once."""
    stage_ns: tuple[tuple[tuple[int, ...], ...], ...]
    """For each of `models`, for each of the experiment's batch sizes: nanoseconds of every stage."""
    n_stages: int

    def __post_init__(self) -> None:
        if self.n_stages < 1:
            raise ValueError(f"n_stages is at least 1; got {self.n_stages!r}")
        if len(set(self.models)) != len(self.models):
            raise ValueError(f"models of a group are different; got {self.models!r}")
        if len(self.stage_ns) != len(self.models):
            raise ValueError(f"stage_ns has a row for each of the {len(self.models)} models; got {len(self.stage_ns)}")
        for batches in self.stage_ns:
            for stages in batches:
                if len(stages) != self.n_stages or min(stages) < 0:
                    raise ValueError(f"stage_ns has {self.n_stages} times of at least 0 for each batch; got {stages!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupExperiment:
    """A workload of single-pass models and the groups that serve it."""

    workload: Trace
    groups: tuple[GroupSpec, ...]
    batch_sizes: tuple[int, ...] = (1,)
    """Sizes of batches that may be formed, ascending from 1; (1,) is no batching."""
    overhead_ns: int = 0
    """Added to each request's time beside its stages; it counts against the deadline and occupies nothing."""

    def __post_init__(self) -> None:
        sizes = self.batch_sizes
        if not sizes or sizes[0] != 1 or list(sizes) != sorted(set(sizes)):
            raise ValueError(f"batch_sizes are ascending and start with 1; got {sizes!r}")
        if self.overhead_ns < 0:
            raise ValueError(f"overhead_ns is at least 0; got {self.overhead_ns!r}")
        n_models = max(len(self.workload.models), 1)
        for index, group in enumerate(self.groups):
            if any(not 0 <= model < n_models for model in group.models):
                raise ValueError(f"group {index} hosts models {group.models!r}; the workload has {n_models}")
            if any(len(batches) != len(sizes) for batches in group.stage_ns):
                raise ValueError(f"group {index}: stage_ns needs one row for each of the {len(sizes)} batch sizes")
        if self.workload.output_tokens.any():
            raise ValueError(
                "groups serve single-pass models, whose requests have output_tokens 0; this workload asks for tokens: "
                "give it output_tokens 0, or serve generative models with replicas (rooftrace run)"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupColumns:
    """The times of each request; -1 where an event did not happen."""

    start_ns: IntArray
    """When the first stage took it up."""
    finish_ns: IntArray
    """When its answer was there, overhead included."""
    group: IntArray
    """Where it was sent, also when it was rejected there; -1 where no group hosts its model."""
    batch: IntArray
    """Requests in the batch that it was served in."""

    @property
    def status(self) -> NDArray[np.int8]:
        return np.where(self.finish_ns >= 0, FINISHED, REJECTED).astype(np.int8)


def loop_is_compiled() -> bool:
    """Whether the loop without events was compiled where Rooftrace was installed."""
    return is_compiled(screening)


Engine = Literal["auto", "events", "loop"]


def run_groups(experiment: GroupExperiment, *, engine: Engine = "auto") -> GroupColumns:
    """Serve the workload to its end.

    *engine* is for tests and measurements: `events` is the SimPy reference; `loop` does without events and cannot batch;
    `auto` takes the loop wherever it can. Both give the same columns. ValueError for batches without events.
    """
    if engine == "auto":
        engine = "events" if len(experiment.batch_sizes) > 1 else "loop"
    if engine == "events":
        return _on_machines(experiment)[0]
    if len(experiment.batch_sizes) > 1:
        raise ValueError(f"engine {engine!r} cannot form batches; use 'auto' or 'events', or batch_sizes=(1,)")
    overhead_ns, times = experiment.overhead_ns, Times()
    Screen(experiment.workload, overhead_ns).serve(experiment.groups, times)
    finish = np.array(times.left_ns, np.int64)
    finish[finish >= 0] += overhead_ns
    return GroupColumns(
        start_ns=np.array(times.start_ns, np.int64),
        finish_ns=finish,
        group=np.array(times.group, np.int64),
        batch=np.where(finish >= 0, 1, -1),
    )


class Screen:
    """A workload without batching, ready to be served by one placement after another."""

    def __init__(self, workload: Trace, overhead_ns: int) -> None:
        n = len(workload)
        self._n_models = max(len(workload.models), 1)
        self._overhead_ns = overhead_ns
        latest = np.full(n, NEVER_NS)
        if workload.deadline_ns is not None:
            latest = np.where(
                workload.deadline_ns < 0, latest, workload.arrival_ns + workload.deadline_ns - overhead_ns
            )
        model = np.zeros(n, np.int64) if workload.model_index is None else workload.model_index
        self._requests = workload.arrival_ns.tolist(), model.tolist(), latest.tolist()

    def serve(self, groups: Sequence[GroupSpec], times: Times | None = None) -> Served:
        models = [Hosted() for _ in range(self._n_models)]
        lines: list[Line] = []
        for number, group in enumerate(groups):
            lines.append(line := Line(number, group.n_stages))
            for model, batches in zip(group.models, group.stage_ns, strict=True):
                models[model].hosts.append(Host(line, batches[0]))
        total_ns = serve(*self._requests, models, times)
        requests = [line.served for line in lines]
        return Served(total_ns + self._overhead_ns * sum(requests), [model.unserved for model in models], requests)


class Served(NamedTuple):
    """How a placement served a workload."""

    latency_ns: int
    """The latencies of the requests that were served, summed."""
    unserved: list[int]
    """For each model, requests that were not served in time."""
    requests: list[int]
    """For each group, requests that it served."""


def machines_of(experiment: GroupExperiment) -> Experiment:
    """The same on machines: each group one, its models take turns by the age of their oldest request."""
    batching = len(experiment.batch_sizes) > 1
    overhead_ns = experiment.overhead_ns
    scheduler = DeadlineBatches(experiment.batch_sizes, overhead_ns) if batching else InOrder()
    return Experiment(
        workload=experiment.workload,
        replicas=tuple(
            MachineSpec(
                hosted=tuple(
                    ReplicaSpec(
                        cost=StageTable(batch_sizes=experiment.batch_sizes, stage_ns=stage_ns),
                        scheduler=scheduler,
                        kv_blocks=_ENOUGH,
                        micro_batches=_ENOUGH,
                        model=model,
                    )
                    for model, stage_ns in zip(group.models, group.stage_ns, strict=True)
                ),
                turn="oldest",
            )
            for group in experiment.groups
            if group.models
        ),
        router=LeastBacklog(batching=batching, overhead_ns=overhead_ns),
    )


def _on_machines(experiment: GroupExperiment) -> tuple[GroupColumns, IntArray]:
    """The columns from the event loop, and every use of a stage (see `stage_record`)."""
    n = len(experiment.workload)
    nothing = np.full(n, -1, np.int64)
    of_machine = [index for index, group in enumerate(experiment.groups) if group.models]
    if not of_machine:
        empty = GroupColumns(start_ns=nothing, finish_ns=nothing, group=nothing, batch=nothing)
        return empty, np.empty((0, 5), np.int64)
    found = run(machines_of(experiment))
    group_of = np.array([*(g for g in of_machine for _ in experiment.groups[g].models), -1], np.int64)
    requests = found.requests
    finish = requests["finish_ns"]
    replica = requests["replica"].astype(np.int64)
    batch, uses = nothing.copy(), []
    for number, columns in enumerate(found.replicas):
        # Micro-batches are numbered as they start, and so are the spans: one each.
        sizes, starts = columns.spans["prefill_chunks"].astype(np.int64), columns.spans["start_ns"]
        rows = np.flatnonzero((replica == number) & (finish >= 0))
        batch[rows] = sizes[np.searchsorted(starts, requests["scheduled_ns"][rows], side="right") - 1]
        stages = columns.stages
        group = np.full(len(stages), group_of[number])
        uses.append(
            np.column_stack(
                [group, stages["stage"], stages["start_ns"], stages["duration_ns"], sizes[stages["micro_batch"]]]
            )
        )
    record = np.concatenate(uses)
    served = GroupColumns(
        start_ns=np.where(finish >= 0, requests["scheduled_ns"], -1),
        finish_ns=np.where(finish >= 0, finish + experiment.overhead_ns, -1),
        group=group_of[replica],
        batch=batch,
    )
    return served, record[np.lexsort((record[:, 1], record[:, 2]))]


def stage_record(experiment: GroupExperiment) -> IntArray:
    """Every use of a stage: rows of group, stage, start_ns, duration_ns, requests of the batch. Runs the event loop."""
    return _on_machines(experiment)[1]
