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
gives the same columns. numba compiles it where it is installed (the extra `fast`); Python runs the same lines where it is not.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from policies.single_pass import DeadlineBatches, InOrder, LeastBacklog
from sim.engine import FINISHED, REJECTED, Experiment, MachineSpec, ReplicaSpec, StageTable, run
from workloads import Trace

IntArray = NDArray[np.int64]

_NEVER_NS = np.int64(2**63 - 1)

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


Engine = Literal["auto", "events", "loop", "plain"]


def run_groups(experiment: GroupExperiment, *, engine: Engine = "auto") -> GroupColumns:
    """Serve the workload to its end.

    *engine* is for tests and measurements: `events` is the SimPy reference; `loop` does without events and cannot batch,
    compiled where numba is installed; `plain` is that loop as Python runs it; `auto` takes the loop wherever it can. All give
    the same columns. ValueError for batches without events.
    """
    if engine == "auto":
        engine = "events" if len(experiment.batch_sizes) > 1 else "loop"
    if engine == "events":
        return _on_machines(experiment)[0]
    if len(experiment.batch_sizes) > 1:
        raise ValueError(f"engine {engine!r} cannot form batches; use 'auto' or 'events', or batch_sizes=(1,)")
    tables = GroupTables(experiment.groups, max(len(experiment.workload.models), 1))
    return replay(experiment.workload, tables, experiment.overhead_ns, compiled=engine == "loop" and can_compile())


@functools.cache
def can_compile() -> bool:
    """Whether the loop without events is compiled here: numba, of the extra `fast`, is installed."""
    return importlib.util.find_spec("numba") is not None


class GroupTables:
    """Groups as flat arrays of integers, for the loop without events."""

    def __init__(self, groups: Sequence[GroupSpec], n_models: int) -> None:
        hosts: list[list[tuple[int, int]]] = [[] for _ in range(n_models)]
        times: list[int] = []
        first_clock, clocks = [], 0
        for index, group in enumerate(groups):
            first_clock.append(clocks)
            clocks += group.n_stages
            for model, batches in zip(group.models, group.stage_ns, strict=True):
                hosts[model].append((index, len(times)))
                times += batches[0]
        self.n_clocks = clocks
        self.stages = np.array([group.n_stages for group in groups] or [0], np.int64)
        self.first_clock = np.array(first_clock or [0], np.int64)
        self.host_start = np.cumsum([0, *map(len, hosts)]).astype(np.int64)
        flat = [pair for pairs in hosts for pair in pairs]
        self.host_group = np.array([group for group, _ in flat] or [0], np.int64)
        self.host_times = np.array([at for _, at in flat] or [0], np.int64)
        self.times = np.array(times or [0], np.int64)


def replay(trace: Trace, tables: GroupTables, overhead_ns: int, *, compiled: bool) -> GroupColumns:
    """The columns of a workload without batching, in one pass over its requests; *compiled* needs numba."""
    n = len(trace)
    model = np.zeros(n, np.int64) if trace.model_index is None else trace.model_index
    latest = np.full(n, _NEVER_NS)
    if trace.deadline_ns is not None:
        latest = np.where(trace.deadline_ns < 0, latest, trace.arrival_ns + trace.deadline_ns - overhead_ns)
    told = (
        *(trace.arrival_ns, model, latest),
        *(tables.host_start, tables.host_group, tables.host_times, tables.times, tables.stages, tables.first_clock),
    )
    work = tuple(np.zeros(size, np.int64) for size in (max(tables.n_clocks, 1), len(tables.stages), max(tables.stages)))
    start, finish, group = (np.full(n, -1, np.int64) for _ in range(3))
    loop: Callable[..., None] = _compiled() if compiled else _replay
    if compiled:
        loop(*told, *work, overhead_ns, start, finish, group)
    else:
        # Python reads and writes lists several times as fast as arrays.
        lists = [column.tolist() for column in (start, finish, group)]
        loop(*(column.tolist() for column in (*told, *work)), overhead_ns, *lists)
        start, finish, group = (np.array(column, np.int64) for column in lists)
    return GroupColumns(start_ns=start, finish_ns=finish, group=group, batch=np.where(finish >= 0, 1, -1))


@functools.cache
def _compiled() -> Callable[..., None]:
    """The loop compiled, once a process; numba is loaded here, so that what serves no groups does without it."""
    import numba

    try:
        return numba.njit(cache=True, nogil=True)(_replay)
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        return numba.njit(nogil=True)(_replay)


def _replay(
    arrival: Any,
    model: Any,
    latest: Any,
    host_start: Any,
    host_group: Any,
    host_times: Any,
    times: Any,
    stages: Any,
    first_clock: Any,
    clocks: Any,
    ready: Any,
    through: Any,
    overhead_ns: int,
    start: Any,
    finish: Any,
    group: Any,
) -> None:
    """Every request in order of arrival; columns are arrays where it is compiled and lists where Python runs it.

    *latest* is when the last stage may end, *clocks* hold when each stage of each group is free, *ready* the last of them,
    *through* when one request is through its stages. Conditions stand for `max`, whose call takes Python as long as a stage.
    """
    for i in range(len(arrival)):
        m = model[i]
        chosen, end = host_start[m], host_start[m + 1]
        if chosen == end:
            continue
        least = ready[host_group[chosen]]
        for host in range(chosen + 1, end):
            backlog = ready[host_group[host]]
            if backlog < least:
                least, chosen = backlog, host
        g, at = host_group[chosen], host_times[chosen]
        base, n = first_clock[g], stages[g]
        group[i] = g
        begin = arrival[i]
        if clocks[base] > begin:
            begin = clocks[base]
        t = begin + times[at]
        for k in range(1, n):
            through[k - 1] = t
            free = clocks[base + k]
            if free > t:
                t = free
            t += times[at + k]
        if t > latest[i]:
            continue
        start[i] = begin
        finish[i] = t + overhead_ns
        for k in range(n - 1):
            clocks[base + k] = through[k]
        clocks[base + n - 1] = t
        ready[g] = t


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
