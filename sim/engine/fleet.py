"""Machines that come and go: started and drained as control policies ask, failing and coming back.

Everything here happens first in its instant. A request is sent to a machine that is ready; it is held, lost, or on its way again
where its machine has failed, and nowhere twice.
"""

# pyright: reportPrivateUsage=false
# The functions below the class are its own, kept outside of it so that either can be read in one sitting.

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, Protocol

from policies.control import PoolSeen
from sim.engine.apart import Apart
from sim.engine.columns import ABORTED, FINISHED, UNFINISHED
from sim.engine.control import Controller, Pool
from sim.engine.events import ARRIVALS, CONTROL, Alarm, Clock
from sim.engine.gate import Gate
from sim.engine.handover import Handovers
from sim.engine.lives import DRAINING, FAILED, OFF, READY, STARTING, FleetSpec
from sim.engine.machine import Machine
from sim.engine.parted import come_again, cut
from sim.engine.requests import RequestState
from sim.engine.stores import Store
from sim.engine.tenant import n_loading

AGAIN_AFTER_NS: Final = 1
"""Requests of a machine that has failed are at the router this much later; see `sim.engine.cluster.FELT_AFTER_NS`."""


class Loses(Protocol):
    """What this tells the cluster."""

    def lost(self, id_: int, reason: str, /) -> None: ...

    def begins_anew(self, id_: int, /) -> None:
        """The tokens that a request has emitted are discarded; it emits all of them again."""
        ...


class Fleet:
    """Which machines are ready, and where requests are meanwhile."""

    def __init__(
        self, spec: FleetSpec, machines: Sequence[Machine], gate: Gate, state: RequestState, clock: Clock, outside: Loses,
        seed: int, handovers: Handovers | None = None,
    ) -> None:  # fmt: skip
        self._spec = spec
        self.machines = machines
        self._gate = gate
        self._state = state
        self._clock = clock
        self._outside = outside
        self._seed = seed
        n = len(machines)
        self.states = [OFF] * n
        self._phase = [-1] * n
        self.returns = [True] * n
        """Whether a machine that has failed comes back."""
        self._n_failures = [0] * n
        self.since_ns = [0] * n
        self._life = [Alarm(clock, CONTROL, partial(self._on_life, i)) for i in range(n)]
        """Ring when a phase, a repair or the time to drain is over."""
        self._failure = [Alarm(clock, CONTROL, partial(self._on_failure, i)) for i in range(n)]
        self._down_ns = [0] * n
        self._sweep = Alarm(clock, CONTROL, lambda _event: self.sweep())
        self.pools = [
            Pool(name, spec.machines_of(i), scaling)
            for i, (name, scaling) in enumerate(zip(spec.names, spec.scaling, strict=True))
        ]
        self._machine_of = [machine.index for machine in machines for _ in machine.tenants]
        """Of each tenant, by its number."""
        self._controllers: list[Controller] = []
        self._shown: dict[int, list[Machine]] = {}
        """By model the machines that are ready."""
        self.held: deque[int] = deque()
        self.again: set[int] = set()
        """Requests between a machine that has failed and the router."""
        n_requests = len(state.prompt)
        self.came = bytearray(n_requests)
        self.more_come = False
        """Requests may come of which nobody knows yet: whatever happens to machines matters."""
        self._open: list[int] = []
        """Requests that have come and had no first token when it was last looked."""
        self._first_unfinished = 0
        self._held_since = array("q", bytes(8 * n_requests))
        self.held_ns = array("q", bytes(8 * n_requests))
        self.failures = array("i", bytes(4 * n_requests))
        state.again = bytearray(n_requests)
        self._log = [array("q") for _ in range(4)]
        self._counts: dict[str, int] = dict.fromkeys(
            (
                "drains_cut_short", "failures", "outages_missed", "resumed", "retried", "lost", "discarded_tokens",
                "chosen_again", "held_to_the_end",
            ), 0
        )  # fmt: skip

        self._apart = (
            None if handovers is None else Apart(self, handovers, partial(_goes_on, self), partial(_too_often, self))
        )

    def clear(self) -> None:
        """There are no requests."""
        for column in (self.came, self._held_since, self.held_ns, self.failures):
            del column[:]
        if self._apart is not None:
            self._apart.clear()

    def add(self) -> None:
        """One request more, behind the others."""
        for column in (self.came, self._held_since, self.held_ns, self.failures):
            column.append(0)
        if self._apart is not None:
            self._apart.add()

    # The run.

    def begin(self) -> None:
        """At the beginning of the run: who is there, and when it will be looked again."""
        for pool in self.pools:
            scaling = pool.scaling
            ready = len(pool.machines) if scaling is None else scaling.initial
            for place, index in enumerate(pool.machines):
                if place < ready:
                    self._ready(index)
                else:
                    self._note(index)
            if scaling is not None:
                self._controllers.append(Controller(pool, scaling, self, self._clock))
        for outage in self._spec.outages:
            down_ns = -1 if outage.for_s is None else max(round(outage.for_s * 1e9), 1)
            Alarm(self._clock, CONTROL, partial(self._on_outage, outage.machine, down_ns)).set(round(outage.at_s * 1e9))

    def over(self) -> bool:
        """Whether nothing that happens to machines from here on matters: all requests have ended, or those that have not wait for
        what cannot come."""
        if self.more_come:
            return False
        at = self._state.status.find(UNFINISHED, self._first_unfinished)
        if at < 0:
            return True
        self._first_unfinished = at
        return not self._clock.expects(CONTROL) and not any(_can_be_served(self, id_) for id_ in self.in_wait())

    def in_wait(self) -> tuple[int, ...]:
        """Requests that wait for a machine to be ready; those whose prompt has been computed, for one that decodes."""
        return (*self.held, *(() if self._apart is None else self._apart.handovers.awaiting))

    def close(self, horizon_ns: int | None) -> None:
        """At the end of the run: who is held still is held until its horizon or, without one, until the last request finished."""
        end_ns = max(self._state.finish, default=0) if horizon_ns is None else horizon_ns
        for id_ in self.in_wait():
            if self._state.status[id_] == UNFINISHED:
                self._counts["held_to_the_end"] += 1
                self.held_ns[id_] += max(end_ns - self._held_since[id_], 1)

    # Requests.

    def come(self, id_: int) -> None:
        """A request has come through the front end."""
        if not self.came[id_]:
            self.came[id_] = 1
            self._open.append(id_)
        self.again.discard(id_)
        if self._apart is not None:
            self._apart.handovers.come(id_)
            return
        machines = self._ready_for(id_)
        if not machines and self._gate.hosting(id_):
            self._hold(id_)
            return
        machine = self._gate.choose(id_, machines)
        if machine is None:
            return
        if not self.failures[id_]:
            self.pools[self._spec.pools[machine.index]].took(self._state.prompt[id_])
        machine.deliver(id_)

    def _ready_for(self, id_: int) -> list[Machine]:
        model = 0 if self._state.model is None else self._state.model[id_]
        shown = self._shown.get(model)
        if shown is None:
            shown = [machine for machine in self._gate.hosting(id_) if self.states[machine.index] == READY]
            self._shown[model] = shown
        return shown

    def _hold(self, id_: int) -> None:
        if self._spec.when_none == "lose":
            self._lose(id_, "no machine was ready")
            return
        if self._apart is not None:
            self._apart.count_as_held(id_)
        elif not self.failures[id_]:
            hosts = dict.fromkeys(self._spec.pools[machine.index] for machine in self._gate.hosting(id_))
            for number in hosts:
                self.pools[number].took(self._state.prompt[id_])
        self._held_since[id_] = self._clock.now_ns
        self.held.append(id_)

    def _release(self) -> None:
        """A machine is ready: who was held for one goes on, in the order in which they came."""
        if self._apart is not None:
            self._apart.release()
            return
        for _ in range(len(self.held)):
            id_ = self.held.popleft()
            if self._state.status[id_] != UNFINISHED:
                continue
            machines = self._ready_for(id_)
            if not machines:
                self.held.append(id_)
                continue
            self.held_ns[id_] += self._clock.now_ns - self._held_since[id_]
            machine = self._gate.choose(id_, machines)
            if machine is not None:
                machine.deliver(id_)

    def _lose(self, id_: int, reason: str) -> None:
        self._counts["lost"] += 1
        self._outside.lost(id_, reason)

    def ended(self, id_: int, now_ns: int) -> None:
        """A request has finished or was rejected."""
        number = self._state.replica[id_]
        if number < 0:
            return
        index = self._machine_of[number]
        if self._state.status[id_] == FINISHED:
            pool = self.pools[self._spec.pools[index]]
            pool.finished += 1
            pool.finished_tokens += self._state.output[id_] if self._apart is None else self._apart.tokens_of(id_)
        if self.states[index] == DRAINING:
            self._sweep.set(max(now_ns, self._clock.now_ns) + 1)

    # Machines.

    def _note(self, index: int, state: int = OFF, phase: int = -1) -> None:
        self.states[index] = state
        self._phase[index] = phase
        if phase <= 0:
            # A machine that starts has begun with its first phase.
            self.since_ns[index] = self._clock.now_ns
        self._shown.clear()
        for column, value in zip(self._log, (self._clock.now_ns, index, state, phase), strict=True):
            column.append(value)

    def _ready(self, index: int) -> None:
        now_ns = self._clock.now_ns
        self._life[index].cancel()
        self._note(index, READY)
        failing = self._spec.failing[self._spec.pools[index]]
        if failing is not None:
            up_ns, self._down_ns[index] = failing.draw_ns(self._seed, index, self._n_failures[index])
            self._failure[index].set(now_ns + up_ns)
        if self.in_wait():
            self._release()

    def _start(self, index: int, phase: int = 0) -> None:
        """A machine enters the phase, or is ready where there is none left."""
        scaling = self.pools[self._spec.pools[index]].scaling
        phases = () if scaling is None else scaling.phases
        if phase >= len(phases):
            self._ready(index)
            return
        self._note(index, STARTING, phase)
        self._life[index].set(self._clock.now_ns + round(phases[phase][1] * 1e9))

    def _on_life(self, index: int, _event: object) -> None:
        if self.over():
            return
        state = self.states[index]
        if state == STARTING:
            self._start(index, self._phase[index] + 1)
        elif state == FAILED:
            self._ready(index)
        elif state == DRAINING:
            self._counts["drains_cut_short"] += 1
            self._off(index)

    def _off(self, index: int) -> None:
        """A machine goes: what it had cached is gone, and whom it still had goes elsewhere."""
        self._life[index].cancel()
        self._failure[index].cancel()
        had = self.states[index] in (READY, DRAINING)
        self._note(index)
        if had:
            _hand_on(self, index)

    def _on_failure(self, index: int, _event: object) -> None:
        if not self.over():
            self._n_failures[index] += 1
            self._fail(index, self._down_ns[index])

    def _on_outage(self, index: int, down_ns: int, _event: object) -> None:
        if self.over():
            return
        if self.states[index] in (READY, DRAINING):
            self._fail(index, down_ns)
        else:
            self._counts["outages_missed"] += 1

    def _fail(self, index: int, down_ns: int) -> None:
        """A machine fails, for *down_ns* or (-1) for good; one that was to go does not come back."""
        self._counts["failures"] += 1
        self._failure[index].cancel()
        self._life[index].cancel()
        drained = self.states[index] == DRAINING
        self.returns[index] = down_ns >= 0
        self._note(index, OFF if drained and down_ns >= 0 else FAILED)
        if down_ns >= 0 and not drained:
            self._life[index].set(self._clock.now_ns + down_ns)
        _hand_on(self, index)

    def send_again(self, ids: list[int]) -> None:
        """Requests go to the router again."""
        for id_ in ids:
            self._state.replica[id_] = -1
            self.again.add(id_)
        Alarm(self._clock, ARRIVALS, partial(self._on_again, ids)).set(self._clock.now_ns + AGAIN_AFTER_NS)

    def _on_again(self, ids: list[int], _event: object) -> None:
        for id_ in ids:
            if self._state.status[id_] == UNFINISHED:
                self.come(id_)
            else:
                self.again.discard(id_)

    # What controllers ask for.

    def start(self, index: int) -> None:
        """A machine begins with the first of its phases."""
        self._start(index)

    def call_back(self, index: int) -> None:
        """One that drains is ready as before."""
        self._life[index].cancel()
        self._note(index, READY)

    def drain(self, index: int, within_ns: int | None) -> None:
        """A machine gets nothing more and goes when it is empty, or *within_ns*; one that is not ready goes at once."""
        if self.states[index] != READY:
            self._off(index)
            return
        self._note(index, DRAINING)
        if within_ns is not None:
            self._life[index].set(self._clock.now_ns + within_ns)

    def sweep(self) -> None:
        """Machines that drain and are empty go, and who is held goes to those that are ready."""
        for index, state in enumerate(self.states):
            machine = self.machines[index]
            empty = not (machine.running or machine.waiting or any(map(n_loading, machine.tenants)))
            if state == DRAINING and empty and not (self._apart is not None and self._apart.is_needed(machine)):
                self._off(index)
        if self.in_wait():
            self._release()

    def held_for(self, machine: Machine) -> int:
        """Requests that are held and that *machine* could serve: of a machine that decodes alone, those who wait for one."""
        state = self._state
        held = [
            id_
            for id_ in self.held
            if state.status[id_] == UNFINISHED and machine.hosts(0 if state.model is None else state.model[id_])
        ]
        return len(held) if self._apart is None else self._apart.held_for(machine, held)

    def looks(self) -> dict[str, PoolSeen]:
        """What is seen of each pool, by name."""
        _look_for_first_tokens(self)
        return {pool.name: pool.look(self) for pool in self.pools}


def _hand_on(fleet: Fleet, index: int) -> None:
    """The requests of a machine that stops: sent again, or lost."""
    machine, state, apart = fleet.machines[index], fleet._state, fleet._apart
    gone = {id_ for tenant in machine.tenants for id_ in tenant.sequences.given_up}
    parted = None if apart is None else cut(apart.handovers, machine)
    now_ns = fleet._clock.now_ns
    loadings = [tenant.loading for tenant in machine.tenants if tenant.loading is not None]
    for loading in loadings:
        state.given_back |= loading.stop(now_ns)
    ids = machine.abort(now_ns)
    for loading in loadings:
        _lose_sources(fleet, loading.tiers.lost(now_ns))
    for id_, tokens in state.given_back.items():
        state.recomputed[id_] += tokens
    state.given_back.clear()
    if parted is not None:
        ids = [id_ for id_ in dict.fromkeys(ids) if id_ in parted.here]
    sent: list[int] = []
    for id_ in ids:
        if state.status[id_] != UNFINISHED:
            continue
        if id_ in gone:
            state.status[id_] = ABORTED
        elif _goes_on(fleet, id_):
            sent.append(id_)
    if apart is not None and parted is not None:
        sent += apart.hand_on(parted)
        for id_ in sent:
            come_again(apart.handovers, id_)
    if sent:
        fleet.send_again(sent)


def _lose_sources(fleet: Fleet, gone: Sequence[Store]) -> None:
    """Memory of a machine is gone, which others may be reading."""
    for machine in fleet.machines:
        for tenant in machine.tenants:
            if tenant.loading is not None:
                tenant.loading.lose_sources(gone, fleet._clock.now_ns)


def _too_often(fleet: Fleet, id_: int) -> bool:
    """Whether one whose machine fails now is not sent again."""
    return fleet._spec.retries is not None and fleet.failures[id_] >= fleet._spec.retries


def _goes_on(fleet: Fleet, id_: int) -> bool:
    """The machine of a request has failed: whether it is to go on elsewhere; else it is lost."""
    spec, state, counts = fleet._spec, fleet._state, fleet._counts
    too_often = _too_often(fleet, id_)
    fleet.failures[id_] += 1
    if spec.in_flight == "lose":
        fleet._lose(id_, "its machine failed")
        return False
    if too_often:
        fleet._lose(id_, f"its machine failed {fleet.failures[id_]} times")
        return False
    if spec.in_flight == "retry":
        counts["retried"] += 1
        counts["discarded_tokens"] += state.output[id_] - state.left[id_]
        state.left[id_] = state.output[id_]
        state.first_token[id_] = state.token_ns[id_] = -1
        fleet._outside.begins_anew(id_)
    else:
        counts["resumed"] += 1
    assert state.again is not None
    state.again[id_] = 1
    return True


def _can_be_served(fleet: Fleet, id_: int) -> bool:
    """Whether a machine that has not failed for good hosts the model that a request asks for."""
    if fleet._state.status[id_] != UNFINISHED:
        return False
    if fleet._apart is not None:
        return fleet._apart.can_be_served(id_)
    return any(
        fleet.states[machine.index] != FAILED or fleet.returns[machine.index] for machine in fleet._gate.hosting(id_)
    )


def facts_of(fleet: Fleet) -> dict[str, Any]:
    """Counts, and every change of a machine's state: when, which, its state and (of one that starts) its phase."""
    at_ns, machine, state, phase = (list(column) for column in fleet._log)
    return {
        "pools": list(fleet._spec.pools),
        "names": list(fleet._spec.names),
        "phases": [[] if pool.scaling is None else [name for name, _ in pool.scaling.phases] for pool in fleet.pools],
        "in_flight": fleet._spec.in_flight,
        "roles": ["both"] * len(fleet.machines)
        if fleet._apart is None
        else [fleet._apart.handovers.role_of(machine) for machine in fleet.machines],
        "n_stages": [machine.n_stages for machine in fleet.machines],
        "n_tenants": [len(machine.tenants) for machine in fleet.machines],
        "fails": any(each is not None for each in fleet._spec.failing) or bool(fleet._spec.outages),
        "scales": any(pool.scaling is not None for pool in fleet.pools),
        "log": {"at_ns": at_ns, "machine": machine, "state": state, "phase": phase},
        "asked_below_least": sum(pool.at_least for pool in fleet.pools),
        "asked_above_most": sum(pool.at_most for pool in fleet.pools),
        **{name: sum(getattr(each, name) for each in fleet._controllers) for name in ("starts", "called_back", "drains")},
        **fleet._counts,
    }  # fmt: skip


def _look_for_first_tokens(fleet: Fleet) -> None:
    """Times to first tokens that have come since, each to the pool that gave it; to both where prefill and decode are apart."""
    state = fleet._state
    still: list[int] = []
    for id_ in fleet._open:
        first_ns = state.first_token[id_]
        if first_ns >= 0 and state.replica[id_] >= 0:
            replicas = [state.replica[id_]]
            if fleet._apart is not None and fleet._apart.handovers.prefill_replica[id_] >= 0:
                # Both stages have their part in it.
                replicas.append(fleet._apart.handovers.prefill_replica[id_])
            for number in dict.fromkeys(fleet._spec.pools[fleet._machine_of[replica]] for replica in replicas):
                fleet.pools[number].firsts_ns.append(first_ns - state.arrival[id_])
        elif state.status[id_] == UNFINISHED:
            still.append(id_)
    fleet._open = still
