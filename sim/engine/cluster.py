"""Replays a workload: arrivals, the router, the replicas, and the columns that they leave."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import simpy
from numpy.typing import NDArray

from policies.routers import RoutedRequest
from sim.engine.clock import ARRIVAL_PRIORITY, Clock
from sim.engine.columns import BUBBLES, REJECTED, Columns, IntArray
from sim.engine.experiment import Experiment
from sim.engine.lane import PolicyError, RequestState
from sim.engine.replica import Replica
from workloads import ClosedLoop, Trace

_ROUTING_STREAM = 0x726F7574
"""Names the random stream of routing draws; the other streams are in `workloads` and `policies`."""


def run(experiment: Experiment, *, fast_forward: bool = True) -> Columns:
    """Replay the experiment's workload to its end, or to its horizon.

    With *fast_forward* off every iteration is an event of its own: the same columns, slower.
    """
    began = time.perf_counter()
    cluster = _Cluster(experiment, fast_forward)
    columns = cluster.run()
    columns.meta["wall_s"] = time.perf_counter() - began
    return columns


def _as_array(column: IntArray) -> array[int]:
    """A column that is read one value at a time: eight bytes a value, and faster than numpy."""
    return array("q", np.ascontiguousarray(column, np.int64).tobytes())


def _as_column(values: array[int], dtype: Any = np.int64) -> NDArray[Any]:
    """The same memory as a numpy column."""
    return np.frombuffer(values, dtype)


class _Arrival(simpy.Event):
    """Fires when the next requests of a trace, or one of a client, arrive."""

    def __init__(self, env: Clock, delay: int, callback: Any, id_: int = -1) -> None:
        self.env = env
        self.callbacks = [callback]
        self._value = None
        self._ok = True
        self._defused = False
        self.id = id_
        env.schedule(self, ARRIVAL_PRIORITY, delay)


class _Cluster:
    def __init__(self, experiment: Experiment, fast_forward: bool) -> None:
        workload = experiment.workload
        self.turn = ARRIVAL_PRIORITY
        self._experiment = experiment
        self._n = n = len(workload)
        self._prompt = _as_array(workload.prompt_tokens)
        model = deadline = None
        if isinstance(workload, Trace):
            arrival = _as_array(workload.arrival_ns)
            if workload.model_index is not None:
                model = _as_array(workload.model_index)
            if workload.deadline_ns is not None:
                deadline = _as_array(workload.deadline_ns)
        else:
            arrival = array("q", [-1]) * n
        pipelined = any(spec.cost.n_stages > 1 or (spec.micro_batches or 1) > 1 for spec in experiment.replicas)
        self._state = RequestState(self._prompt, _as_array(workload.output_tokens), arrival, model, deadline, pipelined)
        env: Clock = simpy.Environment(initial_time=0)
        self._env = env
        self._replicas: Sequence[Replica] = [
            Replica(env, index, spec, self._state, self, experiment.seed, fast_forward)
            for index, spec in enumerate(experiment.replicas)
        ]
        self._only = self._replicas[0] if len(self._replicas) == 1 else None
        self._luck = None if self._only else np.random.default_rng([experiment.seed, _ROUTING_STREAM]).random((n, 2))
        self._reasons: dict[str, int] = {}
        self._rejected = 0
        self._sent = 0
        self._think = None
        if isinstance(workload, ClosedLoop):
            self._think = workload.think_ns.tolist() if workload.think_ns is not None else [0] * n

    def run(self) -> Columns:
        workload, env = self._experiment.workload, self._env
        if isinstance(workload, ClosedLoop):
            for _ in range(min(workload.concurrency, self._n)):
                self._send_next(0)
        else:
            visible = workload.arrival_ns + self._admission_ns(workload.prompt_tokens)
            order = np.argsort(visible, kind="stable")
            self._visible, self._order = _as_array(visible[order]), _as_array(order)
            self._next = 0
            _Arrival(env, self._visible[0], self._on_trace)
        env.run(until=self._experiment.horizon_ns)
        for replica in self._replicas:
            replica.stop()
        return self._columns()

    def _admission_ns(self, prompt_tokens: Any) -> Any:
        experiment = self._experiment
        seconds = experiment.admission_s + experiment.admission_s_per_token * prompt_tokens
        return np.rint(np.asarray(seconds) * 1e9).astype(np.int64)

    def _on_trace(self, _event: simpy.Event) -> None:
        visible, order, env = self._visible, self._order, self._env
        now, i, n = env.now, self._next, self._n
        while i < n and visible[i] == now:
            self._route(order[i])
            i += 1
        self._next = i
        if i < n:
            _Arrival(env, visible[i] - now, self._on_trace)

    def _on_client(self, event: Any) -> None:
        self._route(event.id)

    def _route(self, id_: int) -> None:
        if self._only is not None:
            self._only.enqueue(id_)
            return
        replicas = self._replicas
        model = self._state.model
        assert self._luck is not None
        request = RoutedRequest(
            id_,
            self._prompt[id_],
            0 if model is None else model[id_],
            luck=tuple(self._luck[id_].tolist()),
        )
        index = self._experiment.router.route(request, replicas)
        if not 0 <= index < len(replicas):
            raise PolicyError(
                f"{self._experiment.router!r} sent request {id_} to replica {index!r}; expected 0 to {len(replicas) - 1}"
            )
        replicas[index].enqueue(id_)

    def _send_next(self, now_ns: int) -> None:
        """A client of a closed loop sends the next request, after its thinking time."""
        id_ = self._sent
        if id_ >= self._n:
            return
        self._sent += 1
        assert self._think is not None
        sent_ns = now_ns + (self._think[id_] if now_ns else 0)
        self._state.arrival[id_] = sent_ns
        seen_ns = sent_ns + int(self._admission_ns(self._prompt[id_]))
        if seen_ns > self._env.now or self.turn == ARRIVAL_PRIORITY:
            _Arrival(self._env, seen_ns - self._env.now, self._on_client, id_)
        else:
            self._route(id_)

    # What replicas tell.

    def finished(self, now_ns: int, turn: int) -> None:
        if self._think is not None:
            self.turn = turn
            self._send_next(now_ns)
            self.turn = ARRIVAL_PRIORITY

    def rejected(self, id_: int, reason: str) -> None:
        state = self._state
        state.status[id_] = REJECTED
        state.reason[id_] = self._reasons.setdefault(reason, len(self._reasons))
        self._rejected += 1
        if self._think is not None:
            self._send_next(self._env.now)

    def _columns(self) -> Columns:
        state = self._state
        finish, output, left = (_as_column(column) for column in (state.finish, state.output, state.left))
        replicas = tuple(replica.columns() for replica in self._replicas)
        makespan_ns = int(finish.max(initial=0))
        if self._experiment.horizon_ns is not None:
            makespan_ns = min(max(makespan_ns, int(self._env.now)), self._experiment.horizon_ns)
        none = np.zeros(self._n, np.int64)
        bubbles = [_as_column(kind) for kind in state.bubbles] or [none] * len(BUBBLES)
        return Columns(
            requests={
                "request_id": np.arange(self._n),
                "deadline_ns": _as_column(state.deadline) if state.deadline is not None else none - 1,
                "model_index": none if state.model is None else _as_column(state.model),
                "arrival_ns": _as_column(state.arrival),
                "scheduled_ns": _as_column(state.scheduled),
                "first_token_ns": _as_column(state.first_token),
                "finish_ns": finish,
                "prompt_tokens": _as_column(state.prompt),
                "output_tokens": output,
                "emitted_tokens": output - left,
                "replica": _as_column(state.replica, np.int32),
                "preemptions": _as_column(state.preemptions, np.int32),
                "status": np.frombuffer(state.status, np.int8),
                "reason": _as_column(state.reason, np.int32),
                "bubble_ns": np.sum(bubbles, axis=0),
                **{f"bubble_{name}_ns": kind for name, kind in zip(BUBBLES[:3], bubbles, strict=False)},
            },
            reasons=tuple(self._reasons),
            replicas=replicas,
            meta={
                "kv_blocks_total": [replica.kv_blocks_total for replica in replicas],
                "makespan_ns": makespan_ns,
                "preemptions": sum(state.preemptions),
                "n_stages": sum(replica.n_stages for replica in replicas),
                "busy_ns": sum(replica.busy_ns() for replica in replicas),
                "events": sum(replica.events for replica in self._replicas),
            },
        )
