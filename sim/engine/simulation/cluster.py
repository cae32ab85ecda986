"""Replays a workload: arrivals, the router, the machines, and their columns."""

from __future__ import annotations

import gc
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import index as whole
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from policies.routers import Router, least_of
from sim.engine.disaggregation.course import Course
from sim.engine.disaggregation.encoding import Encoding
from sim.engine.disaggregation.handovers import Handovers
from sim.engine.fleet.fleet import Fleet
from sim.engine.gateway.gateway import Gateway, eligible
from sim.engine.gateway.in_order import InOrder
from sim.engine.kv.content import Contents, ContentsIn, contents_of
from sim.engine.machine.any_machine import AnyMachine, M
from sim.engine.machine.encoder import Encoder, encoders_of
from sim.engine.machine.machine import Machine
from sim.engine.machine.ranks import machine_of, ranked
from sim.engine.record.columns import ABORTED, LOST, REJECTED, UNFINISHED, Columns, IntArray, ReplicaColumns
from sim.engine.record.spill import Spill
from sim.engine.requests.service_classes import terms_of
from sim.engine.requests.state import RequestState
from sim.engine.serve.engine_core import EngineCore, InCommon
from sim.engine.simulation.front_end import FrontEnd
from sim.engine.simulation.invariants import Watch
from sim.engine.simulation.result_columns import (
    adapter_facts,
    as_column,
    bubble_columns,
    request_columns,
    tier_columns,
    tier_facts,
)
from sim.engine.spec.experiment import Experiment, MachineSpec
from sim.engine.tiers.links import Links
from sim.engine.tiers.tiers import SharedStores
from sim.engine.time.errors import PolicyError, UnservedError
from sim.engine.time.events import ARRIVALS, Alarm, Clock
from workloads import Stop, Workload

_ROUTING_STREAM = 0x726F7574
"""Names the random stream of routing draws; the other streams are in `workloads` and `policies`."""

_NEW_OBJECTS = 50_000
"""New objects between two searches for cycles."""

FELT_AFTER_NS = 1
"""No machine feels an event of another one sooner."""


def run(
    experiment: Experiment,
    *,
    fast_forward: bool = True,
    check_invariants: bool = False,
    spill_to: Path | None = None,
    followed: Callable[[Callable[[], int]], AbstractContextManager[None]] = lambda _ended: nullcontext(),
) -> Columns:
    """Replay the experiment's workload to its end, or to its horizon.

    Records of iterations beyond 64 MB are written to a file without a name in the folder *spill_to*, or in that of temporary files.

    With *fast_forward* off every iteration is an event of its own: the same columns, slower. With *check_invariants* the invariants
    that docs/exactness.md names are checked at every event, slower still; `InvariantError` names the broken one. *followed* makes a
    context that the run happens in, of a function that counts the requests that have ended: it may be called from another thread,
    and costs nothing otherwise.
    """
    began = time.perf_counter()
    with _COLLECTIONS.few():
        cluster = Cluster(experiment, fast_forward, check_invariants, spill_to)
        with followed(cluster.ended):
            columns = cluster.run()
    columns.meta["wall_s"] = time.perf_counter() - began
    return columns


class _Collections:
    """The rate at which Python looks for cycles, which belongs to the process: the first of several runs in threads changes it, and
    the last to end restores it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._runs = 0
        self._before = gc.get_threshold()

    @contextmanager
    def few(self) -> Generator[None]:
        """Makes Python look less often: what a run keeps is in use, and with a prefix cache a tenth of the time went into
        looking through it."""
        with self._lock:
            self._runs += 1
            if self._runs == 1:
                self._before = gc.get_threshold()
                if self._before[0]:
                    gc.set_threshold(max(self._before[0], _NEW_OBJECTS), *self._before[1:])
        try:
            yield
        finally:
            with self._lock:
                self._runs -= 1
                if not self._runs:
                    gc.set_threshold(*self._before)


_COLLECTIONS = _Collections()


def _as_array(column: IntArray) -> array[int]:
    """A column that is read one value at a time: eight bytes a value, and faster than numpy."""
    return array("q", np.ascontiguousarray(column, np.int64).tobytes())


def _stores(specs: Sequence[MachineSpec]) -> SharedStores:
    """The stores and links that machines share."""
    return SharedStores(peers=any(tier.kind == "peer" for spec in specs for core in spec.hosted for tier in core.tiers))


def _turns(models: array[int]) -> array[int]:
    """For each request, the number of earlier ones for the same model."""
    turns, seen = array("q"), Counter[int]()
    for model in models:
        turns.append(seen[model])
        seen[model] += 1
    return turns


def _kept(state: RequestState, column: IntArray | None) -> array[int] | None:
    """A column of the workload that some have alone, as one of the requests' state."""
    return None if column is None else state.keep(_as_array(column), -1)


def _state_of(experiment: Experiment, workload: Workload, contents_in: ContentsIn | None) -> RequestState:
    """The columns of the workload's requests, of which nothing has happened yet."""
    sent_ns = workload.sent_ns
    pipelined = any(
        len(spec.hosted) > 1 or core.cost.n_stages > 1 or (core.micro_batches or 1) > 1
        for spec in experiment.machines
        for core in spec.hosted
    )
    state = RequestState(
        _as_array(workload.prompt_tokens),
        _as_array(workload.output_tokens),
        array("q", [-1]) * len(workload) if sent_ns is None else _as_array(sent_ns),
        pipelined=pipelined,
        # A workload without limits allows each answer its actual length: the best that a scheduler could know.
        max_tokens=None if workload.max_tokens is None else _as_array(workload.max_tokens),
        contents_in=contents_in,
    )
    state.model = _kept(state, workload.model_index)
    state.turn = None if state.model is None else state.keep(_turns(state.model))
    state.priority = _kept(state, workload.priority)
    state.session = _kept(state, workload.session)
    state.adapter = _kept(state, workload.adapter)
    state.deadline = _kept(state, workload.deadline_ns)
    state.terms = terms_of(workload)
    if any(core.grammars is not None for spec in experiment.machines for core in spec.hosted):
        state.grammar_wait_ns = state.column("q")
    if experiment.fleet is not None and experiment.handover is not None:
        state.carried = state.column("q")
    return state


class Cluster:
    """Arrivals, the router between machines, clients that wait for answers, and the end of the run."""

    def __init__(
        self, experiment: Experiment, fast_forward: bool, check_invariants: bool, spill_to: Path | None = None
    ) -> None:
        limit = experiment.in_flight
        self._workload = workload = experiment.workload if limit is None else experiment.workload.behind(limit)
        self._experiment = experiment
        self._n = len(workload)
        self._contents: dict[tuple[int, int], Contents] = {}
        contents_in = None if workload.prefix_blocks is None else self._contents_in
        specs = experiment.machines
        self._state = _state_of(experiment, workload, contents_in)
        self._prompt = self._state.prompt
        self._clock = Clock()
        self._serving: list[Machine] = []
        """The machines that run models; they come first."""
        spill = Spill(spill_to, sum(len(spec.hosted) * spec.ranks for spec in specs))
        stores = _stores(specs)
        common = InCommon(self._clock, self._state, self, experiment.seed, fast_forward, {}, stores, spill)
        first = 0
        for index, spec in enumerate(specs):
            self._serving.append(machine_of(common, index, spec, first, experiment.part_of(index)))
            first += len(self._serving[-1].cores)
        encode = experiment.encode
        self._encoders: list[Encoder] = [] if encode is None else encoders_of(encode, len(specs), self._clock)
        self._machines: list[AnyMachine] = [*self._serving, *self._encoders]
        self._caching = any(core.finds for machine in self._machines for core in machine.cores)
        alone = len(self._machines) == 1 and eligible(self._machines, workload) is None and experiment.fleet is None
        self._only = self._machines[0] if alone else None
        self._gates: list[Gateway[Any]] = []
        """The router of each stage."""
        self._course: Course[Any] | None = None
        self._handovers: Handovers | None = None
        if self._only is None:
            self._course, self._handovers = self._course_of(experiment, stores.links)
        self._routing = self._gates[0].routing if self._gates else None
        self._fleet: Fleet | None = None
        if experiment.fleet is not None and self._course is not None:
            given = self._state, self._clock, self, experiment.seed
            self._fleet = Fleet(experiment.fleet, self._machines, self._course, *given)
        load = least_of(experiment.router)
        if (
            load is not None
            and self._gates
            and not (self._fleet or self._handovers or encode or self._gates[0].in_part)
        ):
            self._gates[0].in_order = InOrder(load, self._serving)
        self._watch = (
            Watch(self._state, self._machines, self._clock, self._handovers, self._fleet, self._course)
            if check_invariants
            else None
        )
        self._reasons: dict[str, int] = {}
        self._front_end = FrontEnd(experiment)
        self._clients = workload.clients()
        self._cancelled: Callable[[], Iterable[int]] | None = getattr(self._clients, "cancelled", None)
        self._stops: Callable[[], Iterable[Stop]] | None = getattr(self._clients, "stops", None)
        self._aborts: deque[tuple[int, int]] = deque()
        self._giving_up = Alarm(self._clock, ARRIVALS, self._on_abort)

    def _course_of(self, experiment: Experiment, links: Links) -> tuple[Course[Any], Handovers | None]:
        """The stages of requests, with a router for each; and what is between machines where prefill and decode are apart."""
        spec, machines, gates = experiment.handover, self._serving, list[Gateway[Machine]]()
        routers = [experiment.router] if spec is None else [experiment.router, spec.router]
        for place, router in enumerate(routers):
            mine = machines if spec is None else [m for m in machines if spec.stage_of(m.index) == spec.stages[place]]
            # The router of each further stage has a stream of its own: the first one draws the same numbers whatever follows.
            gates.append(self._gate_to(router, mine, place))
        self._gates += gates
        handovers = None
        if spec is not None:
            handovers = Handovers(spec, machines, gates, self._state, self._clock, self, links)
        course = Course(gates[0], self._state) if handovers is None else handovers
        if experiment.encode is None:
            return course, handovers
        gate = self._gate_to(experiment.encode.router, self._encoders, len(self._gates))
        self._gates.append(gate)
        return Encoding(experiment.encode, self._encoders, gate, course, self._state, self._clock), handovers

    def _gate_to(self, router: Router, machines: Sequence[M], stream: int) -> Gateway[M]:
        experiment = self._experiment
        stream_of_draws = [experiment.seed, _ROUTING_STREAM, *([stream] if stream else [])]
        given = self._workload, self._state, self._clock, stream_of_draws, self.rejected
        return Gateway(router, machines, self._machines, *given)

    def _contents_in(self, block_tokens: int, next_tokens: int = 0, /) -> Contents:
        """Named contents of the workload in blocks of *block_tokens* tokens, named with the *next_tokens* tokens behind them."""
        found = self._contents.get((block_tokens, next_tokens))
        if found is None:
            trace = self._workload
            assert trace.prefix_blocks is not None
            assert trace.prefix_offsets is not None
            assert trace.prefix_block_tokens is not None
            found = self._contents[block_tokens, next_tokens] = contents_of(
                trace.prefix_blocks, trace.prefix_offsets, trace.prefix_block_tokens, trace.prompt_tokens,
                trace.output_tokens, block_tokens, next_tokens,
            )  # fmt: skip
        return found

    def ended(self) -> int:
        """Requests that have ended so far."""
        return self._n - self._state.status.count(UNFINISHED)

    def run(self) -> Columns:
        """Replay the workload to its end or the horizon."""
        clock = self._clock
        self._begin()
        if self._fleet is not None:
            self._fleet.begin()
        horizon_ns = self._experiment.horizon_ns
        if self._watch is not None:
            self._watch.run(horizon_ns)
        else:
            clock.run(until=horizon_ns)
        if not clock.expects(0):
            self._check_nobody_is_left()
        if self._fleet is not None:
            self._fleet.close(horizon_ns)
        for machine in self._machines:
            machine.abort(clock.now_ns)
        return self.columns()

    def _check_nobody_is_left(self) -> None:
        """UnservedError where nothing is left to happen and requests have arrived that have not ended.

        The fleet counts requests that wait for a machine that is gone for good (`held_to_the_end`); requests that arrived behind
        them wait too, at a machine whose memory they hold.
        """
        state, handovers, fleet = self._state, self._handovers, self._fleet
        waiting = set[int]() if fleet is None else set(fleet.in_wait())
        jammed = set[int]() if handovers is None else {handovers.prefill_replica[id_] for id_ in handovers.awaiting}
        left = [
            id_
            for id_ in range(len(state.status))  # mypyc cannot enumerate a bytearray
            if state.status[id_] == UNFINISHED
            and state.arrival[id_] >= 0
            and id_ not in waiting
            and state.replica[id_] not in jammed
        ]
        if not left:
            unsent = [id_ for id_ in range(len(state.status)) if state.status[id_] == UNFINISHED]
            if unsent and all(state.arrival[id_] < 0 for id_ in unsent):
                named = ", ".join(map(str, unsent[:5]))
                raise PolicyError(
                    f"clients of {self._workload!r} have not sent {len(unsent):,} requests ({named}), and nothing is left to "
                    "happen; send them at a start or when another has ended"
                )
            return
        ongoing = {} if handovers is None else handovers.ongoing
        machine_of = [machine.index for machine in self._machines for _ in machine.cores]
        places = Counter(
            f"wait for room at machine {ongoing[id_].receiver.index}"
            if id_ in ongoing and not ongoing[id_].has_room
            else f"are at machine {machine_of[state.replica[id_]]}"
            for id_ in left
        )
        named = ", ".join(map(str, left[:5])) + (f" and {len(left) - 5:,} more" if len(left) > 5 else "")
        raise UnservedError(
            f"{len(left):,} of {len(state.status):,} requests can never be served ({named}): at "
            f"t={self._clock.now_ns / 1e9:.6f} s nothing is left to happen, "
            f"{', '.join(f'{n:,} {where}' for where, n in places.items())}, and each waits for memory that others hold; give more "
            "KV blocks, or look at the scheduler if it is your own"
        )

    def _begin(self) -> None:
        """Send the first requests, and set the clock for known arrivals."""
        if self._clients is not None:
            try:
                starts_ns = [whole(start_ns) for start_ns in self._clients.starts_ns]
            except TypeError as error:
                raise PolicyError(f"clients of {self._workload!r} start at whole nanoseconds: {error}") from error
            for start_ns in starts_ns:
                if start_ns > self._clock.now_ns:
                    Alarm(self._clock, ARRIVALS, self._on_start).set(start_ns)
                else:
                    self._on_start(None)
        sent_ns = self._workload.sent_ns
        if sent_ns is not None:
            self._expect(sent_ns)

    def _on_start(self, _event: object) -> None:
        """A client sends without having waited for an answer."""
        assert self._clients is not None
        self._send_all(self._clients.start(self._clock.now_ns), self._clock.now_ns, None)

    def _expect(self, sent_ns: IntArray) -> None:
        """Set the clock for the requests that are sent whatever the machines do, at *sent_ns*; -1: others."""
        first = np.flatnonzero(sent_ns >= 0)
        if self._front_end.serial_ns and self._clients is not None:
            # Requests that follow an answer enter the front end among these, at times that are not known yet.
            for id_ in first.tolist():
                self._send(id_, int(sent_ns[id_]), None)
        elif len(first):
            visible = self._front_end.visible_ns(sent_ns, self._workload.prompt_tokens)
            order = first[np.argsort(visible[first], kind="stable")]
            self._visible, self._order = _as_array(visible[order]), _as_array(order)
            self._next = 0
            if self._routing is not None:
                self._routing.expect(self._order, self._visible)
            self._arrivals = Alarm(self._clock, ARRIVALS, self._on_trace)
            self._arrivals.set(self._visible[0])
        abort_ns = self._workload.abort_ns
        if abort_ns is not None and (abort_ns >= 0).any():
            self._expect_aborts(sent_ns, abort_ns)

    def _expect_aborts(self, sent_ns: IntArray, abort_ns: IntArray) -> None:
        """Set the clock for the requests that their clients abort, *abort_ns* after they were sent; -1: others."""
        ids = np.flatnonzero(abort_ns >= 0)
        at_ns = (sent_ns + abort_ns)[ids]
        order = np.argsort(at_ns, kind="stable")
        self._aborts.extend(zip(at_ns[order].tolist(), ids[order].tolist(), strict=True))
        self._giving_up.set(self._aborts[0][0])

    def _cancel(self, ids: Iterable[int], now_ns: int) -> None:
        """Clients give up *ids*, which is felt when a request that they sent instead would be (see `FELT_AFTER_NS`)."""
        for id_ in ids:
            if not self._aborts:
                self._giving_up.set(now_ns + FELT_AFTER_NS)
            self._aborts.append((now_ns + FELT_AFTER_NS, id_))

    def _expect_stop(self, stop: Stop, now_ns: int) -> None:
        """Clients have machines stand still."""
        spec, cores = self._experiment, [core for machine in self._serving for core in machine.cores]
        among = spec.fleet is not None or spec.handover is not None or spec.encode is not None
        if among or any(core.loading is not None or core.driven is not None for core in cores):
            raise PolicyError(
                f"clients of {self._workload!r} have machines stand still, which is not modelled where machines come and go, hand "
                "over, encode or have tiers, or under an installed scheduler"
            )
        at_ns = max(stop.at_ns, now_ns + FELT_AFTER_NS)
        going_on: list[int] = []
        Alarm(self._clock, ARRIVALS, lambda _event: self._on_stop(stop, going_on)).set(at_ns)
        Alarm(self._clock, ARRIVALS, lambda _event: self._route_all(going_on)).set(max(stop.until_ns, at_ns))

    def _on_stop(self, stop: Stop, going_on: list[int]) -> None:
        """Have machines stand still; *going_on* is given the requests that are routed again at the end."""
        machines, now_ns = self._serving, self._clock.now_ns
        if stop.only_fuller:
            loads = [machine.running + machine.waiting for machine in machines]
            fullest = -(-sum(loads) // len(loads))
            machines = [machine for machine, load in zip(machines, loads, strict=True) if load > fullest]
        for machine in machines:
            if stop.drops_kv:
                going_on += self._give_back(machine)
            if stop.until_ns > now_ns:
                machine.pause(stop.until_ns)

    def _give_back(self, machine: Machine) -> list[int]:
        """End everything on a machine; the requests that go on."""
        state = self._state
        aborted = {id_ for core in machine.cores for id_ in core.sequences.given_up}
        ids = machine.abort(self._clock.now_ns)
        for id_, tokens in state.given_back.items():
            state.recomputed[id_] += tokens
        state.given_back.clear()
        for id_ in ids:
            state.replica[id_] = -1
            if id_ in aborted:
                state.status[id_] = ABORTED
        return ids

    def _route_all(self, ids: Sequence[int]) -> None:
        for id_ in ids:
            if self._state.status[id_] == UNFINISHED:
                self._route(id_)

    def _on_abort(self, _event: object) -> None:
        aborts, now_ns = self._aborts, self._clock.now_ns
        while aborts and aborts[0][0] <= now_ns:
            self._give_up(aborts.popleft()[1])
        if aborts:
            self._giving_up.set(aborts[0][0])

    def _give_up(self, id_: int) -> None:
        """The client of a request has gone."""
        number = self._state.replica[id_]
        if self._state.status[id_] != UNFINISHED:
            return
        if self._course is not None and self._course.give_up(id_):
            return
        if number < 0:
            # It has not passed the front end yet.
            self._state.status[id_] = ABORTED
            return
        next(m for m in self._serving if m.cores[0].number <= number <= m.cores[-1].number).give_up(id_)

    def _on_trace(self, _event: object) -> None:
        visible, order = self._visible, self._order
        now, i, n = visible[self._next], self._next, len(visible)
        while i < n and visible[i] == now:
            self._route(order[i])
            i += 1
        self._next = i
        if i < n:
            self._arrivals.set(visible[i])

    def _route(self, id_: int) -> None:
        if self._state.status[id_] == ABORTED:
            return
        if self._fleet is not None:
            self._fleet.come(id_)
        elif self._course is not None:
            self._course.come(id_)
        elif self._only is not None:
            self._only.deliver(id_)

    def _send_all(self, requests: Iterable[tuple[int, int]], now_ns: int, ended_ns: int | None) -> None:
        """Clients send *requests*, each with its instant."""
        try:
            pairs = [(whole(id_), whole(sent_ns)) for id_, sent_ns in requests]
        except (TypeError, ValueError) as error:
            raise PolicyError(
                f"clients of {self._workload!r} do not answer with pairs of a row and an instant in ns, both whole numbers: {error}"
            ) from error
        for id_, sent_ns in pairs:
            if not 0 <= id_ < self._n or self._state.arrival[id_] >= 0 or sent_ns < now_ns:
                raise PolicyError(
                    f"clients of {self._workload!r} send request {id_} at {sent_ns} ns; expected one of {self._n} that has not "
                    f"been sent, and an instant from {now_ns} ns"
                )
            self._send(id_, sent_ns, ended_ns)

    def _send(self, id_: int, sent_ns: int, ended_ns: int | None) -> None:
        """A client sends a request: felt 1 ns after the end that it waited for, if any, at the earliest (see `FELT_AFTER_NS`)."""
        self._state.arrival[id_] = sent_ns
        felt_ns = 0 if ended_ns is None else ended_ns + FELT_AFTER_NS
        if self._front_end.serial_ns and sent_ns > self._clock.now_ns:
            # A longer think time means a later place in the front end, whichever request ended first.
            Alarm(self._clock, ARRIVALS, lambda _event: self._admit(id_, sent_ns, felt_ns)).set(sent_ns)
        else:
            self._admit(id_, sent_ns, felt_ns)

    def _admit(self, id_: int, sent_ns: int, felt_ns: int) -> None:
        seen_ns = max(self._front_end.seen_ns(sent_ns, self._prompt[id_]), felt_ns)
        if self._routing is not None:
            self._routing.expect_one(id_, seen_ns)
        Alarm(self._clock, ARRIVALS, lambda _event: self._route(id_)).set(seen_ns)

    # Calls from machines.

    def finished(self, id_: int, now_ns: int) -> None:
        if self._course is not None:
            self._course.ended(id_, now_ns)
        if self._fleet is not None:
            self._fleet.ended(id_, now_ns)
        if self._clients is not None:
            sent = self._clients.ended(id_, now_ns)
            if self._stops is not None:
                sent = list(sent)
                for stop in self._stops():
                    # Requests that go on then are routed ahead of those that are sent for that instant.
                    self._expect_stop(stop, now_ns)
            self._send_all(sent, now_ns, now_ns)
            if self._cancelled is not None:
                self._cancel(self._cancelled(), now_ns)

    def prefilled(self, id_: int, end_ns: int) -> None:
        assert self._handovers is not None
        self._handovers.prefilled(id_, end_ns)

    def has_room(self, id_: int, now_ns: int, found_tokens: int, leg: int) -> None:
        assert self._handovers is not None
        self._handovers.has_room(id_, now_ns, found_tokens, leg)

    def no_room(self, id_: int, now_ns: int, leg: int) -> None:
        assert self._handovers is not None
        self._handovers.no_room(id_, now_ns, leg)

    def first_token_elsewhere(self, id_: int, at_ns: int) -> None:
        """A request has its first token without an iteration of the machine that emits the others."""

    def begins_anew(self, id_: int) -> None:
        """The machine of a request has failed, and it emits all of its tokens again."""

    def lost(self, id_: int, reason: str) -> None:
        self.rejected(id_, reason, LOST)

    def rejected(self, id_: int, reason: str, status: int = REJECTED) -> None:
        state = self._state
        state.status[id_] = status
        state.reason[id_] = self._reasons.setdefault(reason, len(self._reasons))
        self.finished(id_, self._clock.now_ns)

    # Results.

    def columns(self) -> Columns:
        """The records of the run."""
        state = self._state
        cores = [core for machine in self._machines for core in machine.cores]
        for core in cores:
            core.recorder.close(core.sequences.kv.block_tokens)
        replicas = tuple(core.columns() for core in cores)
        requests = request_columns(state, self._workload, caching=self._caching)
        if self._course is not None:
            requests |= self._course.columns()
        if self._fleet is not None:
            requests |= {
                "failures": as_column(self._fleet.failures, np.int32),
                "held_ns": as_column(self._fleet.held_ns),
            }
        return Columns(
            requests={**requests, **tier_columns(state), **bubble_columns(state)},
            reasons=tuple(self._reasons),
            replicas=replicas,
            stream=self._experiment.stream,
            meta=self._meta(cores, replicas),
        )

    def _meta(self, cores: Sequence[EngineCore], replicas: Sequence[ReplicaColumns]) -> dict[str, Any]:
        """Figures of the whole run."""
        state, machines = self._state, self._machines
        horizon_ns = self._experiment.horizon_ns
        makespan_ns = int(as_column(state.finish).max(initial=0))
        if horizon_ns is not None:
            makespan_ns = min(max(makespan_ns, self._clock.now_ns), horizon_ns)
        meta: dict[str, Any] = {
            "kv_blocks_total": [replica.kv_blocks_total for replica in replicas],
            "makespan_ns": makespan_ns,
            "preemptions": sum(state.preemptions),
        }
        if self._caching:
            meta["prefix_evictions"] = sum(core.sequences.kv.evicted for core in cores)
        if self._course is not None:
            meta |= self._course.facts()
        if self._fleet is not None:
            meta["fleet"] = self._fleet.facts()
        meta["n_machines"] = len(self._experiment.replicas)
        meta["n_stages"] = sum(machine.n_stages for machine in machines)
        releases = sorted({core.driven.release for core in cores if core.driven is not None})
        if releases:
            meta["releases"] = releases
        if state.tier_hits:
            meta["tiers"] = tier_facts(cores)
        adapters = adapter_facts(replicas)
        if adapters:
            meta["adapters"] = adapters
        ranks = ranked(machines)
        if ranks:
            meta["ranks"] = ranks
        meta["busy_ns"] = sum(replica.busy_ns() for replica in replicas)
        meta["events"] = sum(machine.events for machine in machines)
        return meta
