"""Many models on one cluster: groups of devices whose pipeline stages several one-shot models take turns on.

The rules are those of AlpaServe's simulator (Li et al., OSDI 2023; artifact alpa-projects/mms):

* A request goes to the hosting group with the least backlog: the one whose last stage is promised to be free first, or
  with batching the one with fewest requests waiting or in service. The lowest index wins a tie.
* Groups serve in order of arrival. A request that would miss its deadline is rejected on arrival and costs nothing.
* With batching, each model of a group has a queue. When the first stage is free, the model whose head is oldest goes
  next: heads that would miss their deadline even alone are dropped, then the largest batch that is there and keeps the
  oldest one's deadline is taken. Nothing waits for a batch to fill.

`run_groups` is the one entry. Its event loop on SimPy is the reference; without batching what becomes of a request is
known when it arrives, and one compiled loop over the requests gives the same columns.
"""

from __future__ import annotations

import functools
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import simpy
from numpy.typing import NDArray

from sim.engine.clock import ARRIVAL_PRIORITY, ITERATION_PRIORITY, Clock
from sim.engine.columns import FINISHED, REJECTED
from workloads import Trace

IntArray = NDArray[np.int64]

NO_GROUP = "no group hosts the model"
TOO_LATE = "deadline cannot be met"


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
    """A workload of one-shot models and the groups that serve it."""

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
                "groups serve one-shot models, whose requests have output_tokens 0; this workload asks for tokens: "
                "give it output_tokens 0, or serve generative models with replicas (rooftrace run)"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupColumns:
    """What became of each request; -1 where an event did not happen."""

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


Engine = Literal["auto", "events", "loop"]


def run_groups(experiment: GroupExperiment, *, engine: Engine = "auto") -> GroupColumns:
    """Serve the workload to its end.

    *engine* is for tests and measurements: `events` is the SimPy reference, `loop` does without events and cannot batch,
    `auto` takes the loop wherever it can. Both give the same columns. ValueError for batches without events.
    """
    if engine == "auto":
        engine = "events" if len(experiment.batch_sizes) > 1 else "loop"
    if engine == "events":
        return _Groups(experiment).run()
    if len(experiment.batch_sizes) > 1:
        raise ValueError(f"engine {engine!r} cannot form batches; use 'auto' or 'events', or batch_sizes=(1,)")
    tables = GroupTables(experiment.groups, max(len(experiment.workload.models), 1))
    return replay(experiment.workload, tables, experiment.overhead_ns)


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


def replay(trace: Trace, tables: GroupTables, overhead_ns: int) -> GroupColumns:
    """The columns of a workload without batching, in one pass over its requests."""
    n = len(trace)
    model = np.zeros(n, np.int64) if trace.model_index is None else trace.model_index
    deadline = np.full(n, -1, np.int64) if trace.deadline_ns is None else trace.deadline_ns
    start, finish, group = (np.full(n, -1, np.int64) for _ in range(3))
    work = (
        np.zeros(max(tables.n_clocks, 1), np.int64),
        np.zeros_like(tables.stages),
        np.zeros(max(tables.stages), np.int64),
    )
    _compiled()(
        *(trace.arrival_ns, model, deadline),
        *(tables.host_start, tables.host_group, tables.host_times, tables.times, tables.stages, tables.first_clock),
        *work,
        *(overhead_ns, start, finish, group),
    )
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
    deadline: Any,
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
    """Every request in order of arrival.

    *clocks* hold when each stage of each group is free, *ready* the last of them, *through* the stages of one request.
    """
    for i in range(len(arrival)):
        m = model[i]
        low, high = host_start[m], host_start[m + 1]
        if low == high:
            continue
        chosen = low
        least = ready[host_group[low]]
        for host in range(low + 1, high):
            backlog = ready[host_group[host]]
            if backlog < least:
                least, chosen = backlog, host
        g, at = host_group[chosen], host_times[chosen]
        base, n = first_clock[g], stages[g]
        group[i] = g
        now = arrival[i]
        t = now
        for k in range(n):
            t = max(t, clocks[base + k]) + times[at + k]
            through[k] = t
        if deadline[i] >= 0 and t + overhead_ns > now + deadline[i]:
            continue
        start[i] = max(now, clocks[base])
        finish[i] = t + overhead_ns
        for k in range(n):
            clocks[base + k] = through[k]
        ready[g] = t


class _At(simpy.Event):
    """Fires once, at an instant and with a priority."""

    def __init__(self, env: Clock, delay: int, priority: int, callback: Any) -> None:
        self.env = env
        self.callbacks = [callback]
        self._value = None
        self._ok = True
        self._defused = False
        env.schedule(self, priority, delay)


@dataclass(slots=True)
class _Batch:
    requests: list[int]
    stage_ns: tuple[int, ...]
    promised_ns: int


class _DeviceGroup:
    """One group as a machine of events: queues by model, a first-come queue before each stage."""

    def __init__(self, cluster: _Groups, index: int, spec: GroupSpec) -> None:
        self.index = index
        self._cluster = cluster
        # SimPy types its clock as a number of either kind; ours counts integer nanoseconds.
        self._env: Any = cluster.env
        self._sizes = cluster.batch_sizes
        self._stage_ns = dict(zip(spec.models, spec.stage_ns, strict=True))
        self._queues: dict[int, deque[int]] = {model: deque() for model in spec.models}
        self._before: list[deque[_Batch]] = [deque() for _ in range(spec.n_stages)]
        self._busy = [False] * spec.n_stages
        self._clocks = [0] * spec.n_stages
        """When each stage will have done all that has been promised."""
        self._dispatching = False
        self._unfinished = 0

    def hosts(self, model: int) -> bool:
        return model in self._queues

    @property
    def backlog(self) -> int:
        return self._unfinished if len(self._sizes) > 1 else self._clocks[-1]

    def arrive(self, id_: int) -> None:
        cluster, now = self._cluster, self._env.now
        model = cluster.model[id_]
        if len(self._sizes) == 1:
            # In order of arrival without batches, the time that a request will be ready is known now.
            clocks = self._through(self._stage_ns[model][0], now)
            if not cluster.in_time(id_, clocks[-1]):
                return
            self._clocks = clocks
            cluster.promised[id_] = clocks[-1]
        elif not cluster.in_time(id_, self._through(self._stage_ns[model][0], now)[-1]):
            return
        self._unfinished += 1
        self._queues[model].append(id_)
        self._wake()

    def _through(self, stage_ns: Sequence[int], now: int) -> list[int]:
        t, clocks = now, []
        for free, duration in zip(self._clocks, stage_ns, strict=True):
            t = max(t, free) + duration
            clocks.append(t)
        return clocks

    def _wake(self) -> None:
        # After all arrivals of this instant, so that a batch sees them all.
        if not self._busy[0] and not self._dispatching:
            self._dispatching = True
            _At(self._env, 0, ITERATION_PRIORITY + self.index, self._dispatch)

    def _dispatch(self, _event: _At) -> None:
        self._dispatching = False
        if self._busy[0]:
            return
        while True:
            waiting = [(queue[0], model) for model, queue in self._queues.items() if queue]
            if not waiting:
                return
            model = min(waiting)[1]
            batch = self._form(model)
            if batch is not None:
                self._start(0, batch)
                return

    def _form(self, model: int) -> _Batch | None:
        """The next batch of *model*; None where every request of it that waited was too late and has been dropped."""
        cluster, queue, now = self._cluster, self._queues[model], self._env.now
        rows = self._stage_ns[model]
        if len(self._sizes) == 1:
            id_ = queue.popleft()
            return _Batch([id_], rows[0], cluster.promised[id_])
        while queue and not cluster.in_time(queue[0], self._through(rows[0], now)[-1]):
            queue.popleft()
            self._unfinished -= 1
        if not queue:
            return None
        oldest = queue[0]
        for size, stage_ns in zip(reversed(self._sizes), reversed(rows), strict=True):
            if size > len(queue):
                continue
            clocks = self._through(stage_ns, now)
            if size == 1 or cluster.in_time(oldest, clocks[-1]):
                self._clocks = clocks
                return _Batch([queue.popleft() for _ in range(size)], stage_ns, clocks[-1])
        raise AssertionError("a batch of one is always there")

    def _start(self, stage: int, batch: _Batch) -> None:
        self._busy[stage] = True
        now, duration = self._env.now, batch.stage_ns[stage]
        if stage == 0:
            for id_ in batch.requests:
                self._cluster.start[id_] = now
        self._cluster.record(self.index, stage, batch, now, duration)
        _At(self._env, duration, ITERATION_PRIORITY + self.index, lambda _: self._end(stage, batch))

    def _end(self, stage: int, batch: _Batch) -> None:
        self._busy[stage] = False
        if stage + 1 < len(self._busy):
            self._before[stage + 1].append(batch)
            self._next(stage + 1)
        else:
            now = self._env.now
            assert now == batch.promised_ns, "a group kept another time than it promised on arrival"
            self._unfinished -= len(batch.requests)
            for id_ in batch.requests:
                self._cluster.finish[id_] = now + self._cluster.overhead_ns
                self._cluster.batch[id_] = len(batch.requests)
        if stage:
            self._next(stage)
        else:
            self._wake()

    def _next(self, stage: int) -> None:
        if self._before[stage] and not self._busy[stage]:
            self._start(stage, self._before[stage].popleft())


class _Groups:
    """The event loop: arrivals, dispatch to groups, and the columns that they leave."""

    def __init__(self, experiment: GroupExperiment, stages: list[tuple[int, int, int, int, int]] | None = None) -> None:
        trace = experiment.workload
        n = len(trace)
        self.env: Any = simpy.Environment(initial_time=0)
        self.batch_sizes = experiment.batch_sizes
        self.overhead_ns = experiment.overhead_ns
        self.model = [0] * n if trace.model_index is None else trace.model_index.tolist()
        self._arrival = trace.arrival_ns.tolist()
        self._deadline = [-1] * n if trace.deadline_ns is None else trace.deadline_ns.tolist()
        self.start, self.finish, self.sent, self.batch, self.promised = (array("q", [-1]) * n for _ in range(5))
        self._stages = stages
        self._groups = [_DeviceGroup(self, index, spec) for index, spec in enumerate(experiment.groups)]
        self._hosts = {
            model: [group for group in self._groups if group.hosts(model)] for model in range(max(len(trace.models), 1))
        }
        self._next = 0

    def run(self) -> GroupColumns:
        _At(self.env, self._arrival[0], ARRIVAL_PRIORITY, self._on_arrival)
        self.env.run()
        start, finish, sent, batch = (
            np.frombuffer(column, np.int64).copy() for column in (self.start, self.finish, self.sent, self.batch)
        )
        return GroupColumns(start_ns=start, finish_ns=finish, group=sent, batch=batch)

    def _on_arrival(self, _event: _At) -> None:
        now, i, arrival = self.env.now, self._next, self._arrival
        while i < len(arrival) and arrival[i] == now:
            hosts = self._hosts[self.model[i]]
            if hosts:
                group = min(hosts, key=lambda host: host.backlog)
                self.sent[i] = group.index
                group.arrive(i)
            i += 1
        self._next = i
        if i < len(arrival):
            _At(self.env, arrival[i] - now, ARRIVAL_PRIORITY, self._on_arrival)

    def in_time(self, id_: int, ready_ns: int) -> bool:
        """Whether an answer that leaves the last stage at *ready_ns* keeps the deadline of request *id_*."""
        deadline = self._deadline[id_]
        return deadline < 0 or ready_ns + self.overhead_ns <= self._arrival[id_] + deadline

    def record(self, group: int, stage: int, batch: _Batch, start_ns: int, duration_ns: int) -> None:
        if self._stages is not None:
            self._stages.append((group, stage, start_ns, duration_ns, len(batch.requests)))


def stage_record(experiment: GroupExperiment) -> IntArray:
    """Every use of a stage: rows of group, stage, start_ns, duration_ns, requests of the batch. Runs the event loop."""
    stages: list[tuple[int, int, int, int, int]] = []
    _Groups(experiment, stages).run()
    return np.array(stages, np.int64).reshape(-1, 5)
