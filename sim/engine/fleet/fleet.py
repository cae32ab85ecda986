"""Machines that start and drain as control policies decide, and that fail and return.

Everything here happens first in its instant. A request is sent to a ready machine; it is held, lost, or on its way again where its
machine has failed, and nowhere twice. It waits for the stages of its course for which no machine is ready: a new one for a machine
of the first stage, one whose prompt has been computed for one that decodes.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence, Set
from functools import partial
from typing import Any, Final, Protocol

from policies.control import PoolSeen
from sim.engine.disaggregation.course import Course
from sim.engine.fleet.autoscaling import Controller, Pool
from sim.engine.machine.any_machine import AnyMachine, M
from sim.engine.record.columns import ABORTED, FINISHED, UNFINISHED
from sim.engine.requests.state import RequestState
from sim.engine.spec.lifecycle import DRAINING, FAILED, OFF, PENDING, READY, STARTING, FleetSpec
from sim.engine.tiers.stores import Store
from sim.engine.time.errors import UnservedError
from sim.engine.time.events import ARRIVALS, CONTROL, Alarm, Clock

AGAIN_AFTER_NS: Final = 1
"""Requests of a machine that has failed are at the router this much later; see `sim.engine.simulation.cluster.FELT_AFTER_NS`."""


_MOST_STARTS: Final = 1_000
"""Times in a row that a request may come to a machine without one token more; then a run is said not to end."""


class Loses(Protocol):
    """The cluster, as it hears of requests whose machine has gone."""

    def lost(self, id_: int, reason: str, /) -> None: ...

    def begins_anew(self, id_: int, /) -> None:
        """The tokens that a request has emitted are discarded; it emits all of them again."""
        ...


_COUNTED = (
    "drains_cut_short", "failures", "outages_missed", "resumed", "retried", "lost", "discarded_tokens", "chosen_again",
    "held_to_the_end",
)  # fmt: skip
"""A fleet counts these over a run; the names are those of its facts."""


class Fleet:
    """The states of machines, and the requests that wait meanwhile.

    It implements `sim.engine.disaggregation.course.Present` for the course of requests.
    """

    def __init__(
        self, spec: FleetSpec, machines: Sequence[AnyMachine], course: Course[Any], state: RequestState, clock: Clock,
        outside: Loses, seed: int,
    ) -> None:  # fmt: skip
        self._spec = spec
        self.machines = machines
        self._course = course
        course.attend(self)
        self._state = state
        self._clock = clock
        self._outside = outside
        self._seed = seed
        n = len(machines)
        self.states = [OFF] * n
        self._phase = [-1] * n
        self.returns = [True] * n
        """Whether a failed machine comes back."""
        self._n_failures = [0] * n
        self.since_ns = [0] * n
        self._life = [Alarm(clock, CONTROL, partial(self._on_life, i)) for i in range(n)]
        """Alarms that ring when a phase, a repair or the time to drain is over."""
        self._failure = [Alarm(clock, CONTROL, partial(self._on_failure, i)) for i in range(n)]
        self._down_ns = [0] * n
        self._sweep = Alarm(clock, CONTROL, lambda _event: self.sweep())
        self.pools = [
            Pool(name, spec.machines_of(i), scaling)
            for i, (name, scaling) in enumerate(zip(spec.names, spec.scaling, strict=True))
        ]
        self._machine_of = [machine.index for machine in machines for _ in machine.cores]
        """The index of each engine core's machine, by the engine core's number."""
        self._controllers: list[Controller] = []
        self._shown: dict[int, tuple[Sequence[AnyMachine], list[int]]] = {}
        """Machines that were asked for since the latest change, and the places among them of those that are ready."""
        self.held: deque[int] = deque()
        self.again: set[int] = set()
        """Requests between a machine that has failed and the router."""
        self.came = state.column("b")
        self.more_come = False
        """Whether unknown requests may still arrive, so that every change of a machine matters."""
        self._open: list[int] = []
        """Requests that have arrived and had no first token at the last look."""
        self._first_unfinished = 0
        self._taken = state.column("b")
        """The stages of each request that have been counted for a pool, as bits."""
        self._starts = state.column("i")
        """Times that each request has come to a machine since its latest progress."""
        self._least_left = state.column("q", -1)
        """The fewest tokens that each request has had left as it came to one."""
        self._releases = False
        """Whether held requests are being routed."""
        self._held_since = state.column("q")
        self.held_ns = state.column("q")
        self.failures = state.column("i")
        state.again = state.column("b")
        self._log = [array("q") for _ in range(4)]
        self._counts = dict.fromkeys(_COUNTED, 0)

    # The run.

    def begin(self) -> None:
        """Begin the run: set which machines are there, and when policies and outages act."""
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
        """Whether no change of a machine matters any more: all requests have ended, or the others wait for what cannot happen."""
        if self.more_come:
            return False
        at = self._state.status.find(UNFINISHED, self._first_unfinished)
        if at < 0:
            return True
        self._first_unfinished = at
        status = self._state.status
        return not self._clock.expects(CONTROL) and not any(
            status[id_] == UNFINISHED and self._can_be_served(id_) for id_ in self.in_wait()
        )

    def in_wait(self) -> tuple[int, ...]:
        """Requests that wait for a machine to be ready, computed prompts before the others."""
        return (*self._course.awaiting, *self.held)

    def close(self, horizon_ns: int | None) -> None:
        """End the run: a request that is still held is held until the horizon or, without one, until the last request finished."""
        end_ns = max(self._state.finish, default=0) if horizon_ns is None else horizon_ns
        for id_ in self.in_wait():
            if self._state.status[id_] == UNFINISHED:
                self._counts["held_to_the_end"] += 1
                self.held_ns[id_] += max(end_ns - self._held_since[id_], 1)

    # Requests.

    def come(self, id_: int) -> None:
        """Route a request that has passed the front end."""
        if not self.came[id_]:
            self.came[id_] = 1
            self._open.append(id_)
        self.again.discard(id_)
        self._course.come(id_)

    def ready(self, machines: Sequence[M]) -> list[M]:
        """The ready ones of *machines*."""
        known = self._shown.get(id(machines))
        if known is None:
            states = self.states
            known = machines, [i for i, machine in enumerate(machines) if states[machine.index] == READY]
            self._shown[id(machines)] = known
        return [machines[i] for i in known[1]]

    def took(self, id_: int, machine: AnyMachine, stage: str) -> None:
        """Count a request that reaches *machine* for a stage of its life."""
        self._count(id_, (machine,), stage)
        left, least = self._state.left[id_], self._least_left[id_]
        if least < 0 or left < least:
            self._least_left[id_] = left
            self._starts[id_] = 0
        self._starts[id_] += 1
        if self._starts[id_] > _MOST_STARTS:
            raise UnservedError(
                f"request {id_} has come to a machine {_MOST_STARTS:,} times until t={self._clock.now_ns / 1e9:.6f} s without one "
                "token more: each machine stopped before; give a longer time to drain, a minimum of 1 machine, or fewer retries"
            )

    def _count(self, id_: int, machines: Sequence[AnyMachine], stage: str) -> None:
        """Count a request for the pools of *machines*; it counts once for each stage."""
        bit = 1 << self._course.stages.index(stage)
        if not self._taken[id_] & bit:
            self._taken[id_] |= bit
            for number in dict.fromkeys(self._spec.pools[machine.index] for machine in machines):
                self.pools[number].took(self._state.prompt[id_])

    def computed(self, machine: AnyMachine, tokens: int) -> None:
        """Count a request that goes on elsewhere: for its pool it has finished, with *tokens* output tokens."""
        pool = self.pools[self._spec.pools[machine.index]]
        pool.finished += 1
        pool.finished_tokens += tokens

    def discarded(self, tokens: int) -> None:
        """Count output tokens that no client ever got."""
        self._counts["discarded_tokens"] += tokens

    def perhaps_empty(self, machine: AnyMachine) -> None:
        """Look soon whether *machine* is empty: a request between machines needs it no more."""
        if self.states[machine.index] == DRAINING:
            self._sweep.set(self._clock.now_ns + 1)

    def hold(self, id_: int) -> bool:
        """Whether a request for which no machine is ready waits until one is; else it is lost."""
        computed = id_ in self._course.awaiting
        if not self._releases:
            if self._spec.when_none == "lose":
                self._lose(id_, "no machine that decodes was ready" if computed else "no machine was ready")
                return False
            for stage, machines in self._lacks(id_):
                self._count(id_, machines, stage)
            self._held_since[id_] = self._clock.now_ns
        if not computed:
            self.held.append(id_)
        return True

    def _lacks(self, id_: int) -> list[tuple[str, Sequence[AnyMachine]]]:
        """The stages for which a held request waits, and the machines of which none is ready."""
        return [(stage, machines) for stage, machines in self._course.wanted(id_) if not self.ready(machines)]

    def _release(self) -> None:
        """Route the requests that were held, computed prompts before the others, each in order of arrival."""
        waiting = [id_ for id_ in self.in_wait() if self._state.status[id_] == UNFINISHED]
        self.held.clear()
        self._releases = True
        for id_ in waiting:
            self._course.come(id_)
        self._releases = False
        still = set(self.in_wait())
        for id_ in waiting:
            if id_ not in still:
                self.held_ns[id_] += self._clock.now_ns - self._held_since[id_]

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
            pool.finished_tokens += self._course.last_tokens(id_)
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
        """Switch a machine off: its cache is lost, and its requests are routed again."""
        self._life[index].cancel()
        self._failure[index].cancel()
        had = self.states[index] in (READY, DRAINING)
        self._note(index)
        if had:
            self._hand_on(index)

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
        """Fail a machine for *down_ns* or (-1) for good; one that was draining does not return."""
        self._counts["failures"] += 1
        self._failure[index].cancel()
        self._life[index].cancel()
        drained = self.states[index] == DRAINING
        self.returns[index] = down_ns >= 0
        self._note(index, OFF if drained and down_ns >= 0 else FAILED)
        if down_ns >= 0 and not drained:
            self._life[index].set(self._clock.now_ns + down_ns)
        self._hand_on(index)

    def send_again(self, ids: list[int]) -> None:
        """Route requests again."""
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

    # Called by controllers.

    def pending(self, index: int) -> bool:
        """Whether a machine starts and has no server yet."""
        scaling = self.pools[self._spec.pools[index]].scaling
        return (
            self.states[index] == STARTING and scaling is not None and scaling.phases[self._phase[index]][0] in PENDING
        )

    def start(self, index: int) -> None:
        """A machine begins with the first of its phases."""
        self._start(index)

    def call_back(self, index: int) -> None:
        """Make a machine that drains ready as before."""
        self._life[index].cancel()
        self._note(index, READY)

    def drain(self, index: int, within_ns: int | None) -> None:
        """Route nothing more to a machine and stop it when it is empty, or *within_ns*; one that is not ready stops at once."""
        if self.states[index] != READY:
            self._off(index)
            return
        self._note(index, DRAINING)
        if within_ns is not None:
            self._life[index].set(self._clock.now_ns + within_ns)

    def sweep(self) -> None:
        """Stop draining machines that are empty, and send held requests to ready ones."""
        for index, state in enumerate(self.states):
            machine = self.machines[index]
            empty = not (machine.running or machine.waiting or any(core.n_loading for core in machine.cores))
            if state == DRAINING and empty and not self._course.needs(machine):
                self._off(index)
        if self.in_wait():
            self._release()

    def held_for(self, machine: AnyMachine) -> int:
        """The number of held requests that wait for *machine* or another that could do as much for them."""
        return sum(
            self._state.status[id_] == UNFINISHED and any(machine in machines for _, machines in self._lacks(id_))
            for id_ in self.in_wait()
        )

    def looks(self) -> dict[str, PoolSeen]:
        """Each pool as its control policy sees it, by name."""
        self._look_for_first_tokens()
        return {pool.name: pool.look(self) for pool in self.pools}

    # A machine stops.

    def _hand_on(self, index: int) -> None:
        """Send the requests of a machine that stops again, or lose them."""
        machine, course = self.machines[index], self._course
        aborted = {id_ for core in machine.cores for id_ in core.sequences.given_up}
        found = course.interrupt(machine, self._keeps_kv)
        self._counts["chosen_again"] += found.chosen_again + len(found.unharmed)
        ids = [id_ for id_ in dict.fromkeys(self._abort(machine)) if id_ in found.here]
        sent = self._survivors(ids, aborted)
        sent += [id_ for id_ in found.lost_kv if self._goes_on(id_)]
        for id_ in found.kept_kv:
            self._goes_on(id_)
        sent += found.unharmed
        for id_ in sent:
            course.come_again(id_)
        if sent:
            self.send_again(sent)

    def _abort(self, machine: AnyMachine) -> list[int]:
        """End everything on a machine that stops; the requests that it had."""
        state, now_ns = self._state, self._clock.now_ns
        loadings = [core.loading for core in machine.cores if core.loading is not None]
        for loading in loadings:
            state.given_back |= loading.stop(now_ns)
        ids = machine.abort(now_ns)
        for loading in loadings:
            self._lose_sources(loading.tiers.lost(now_ns))
        for id_, tokens in state.given_back.items():
            state.recomputed[id_] += tokens
        state.given_back.clear()
        return ids

    def _survivors(self, ids: Iterable[int], aborted: Set[int]) -> list[int]:
        """Requests of a machine that stops that continue elsewhere; the clients of *aborted* have gone."""
        status = self._state.status
        found: list[int] = []
        for id_ in ids:
            if status[id_] != UNFINISHED:
                continue
            if id_ in aborted:
                status[id_] = ABORTED
            elif self._goes_on(id_):
                found.append(id_)
        return found

    def _lose_sources(self, gone: Sequence[Store]) -> None:
        """End loads from memory of a machine that is gone."""
        for machine in self.machines:
            for core in machine.cores:
                if core.loading is not None:
                    core.loading.lose_sources(gone, self._clock.now_ns)

    def _too_often(self, id_: int) -> bool:
        """Whether a request whose machine fails now is not sent again."""
        return self._spec.retries is not None and self.failures[id_] >= self._spec.retries

    def _keeps_kv(self, id_: int) -> bool:
        """Whether a request whose machine fails while its KV is on the way there continues with that KV."""
        return self._spec.in_flight == "resume" and not self._too_often(id_)

    def _goes_on(self, id_: int) -> bool:
        """Whether a request whose machine has failed continues elsewhere; else it is lost."""
        spec, state, counts = self._spec, self._state, self._counts
        too_often = self._too_often(id_)
        self.failures[id_] += 1
        if spec.in_flight == "lose":
            self._lose(id_, "its machine failed")
            return False
        if too_often:
            self._lose(id_, f"its machine failed {self.failures[id_]} times")
            return False
        if spec.in_flight == "retry":
            counts["retried"] += 1
            counts["discarded_tokens"] += state.output[id_] - state.left[id_]
            state.left[id_] = state.output[id_]
            state.first_token[id_] = state.token_ns[id_] = -1
            self._outside.begins_anew(id_)
        else:
            counts["resumed"] += 1
        assert state.again is not None
        state.again[id_] = 1
        return True

    # Queries.

    def _can_be_served(self, id_: int) -> bool:
        """Whether a waiting request can ever be served: each stage left has a machine that has not failed for good."""
        return any(
            all(any(not self._is_lost(machine) for machine in machines) for machines in way)
            for way in self._course.ways(id_)
        )

    def _is_lost(self, machine: AnyMachine) -> bool:
        """Whether a machine has failed for good."""
        return self.states[machine.index] == FAILED and not self.returns[machine.index]

    def facts(self) -> dict[str, Any]:
        """Counts, and every change of a machine's state: its instant, the machine, the state and, where it starts, the phase."""
        at_ns, machine, state, phase = (list(column) for column in self._log)
        return {
            "pools": list(self._spec.pools),
            "names": list(self._spec.names),
            "phases": [[] if pool.scaling is None else [name for name, _ in pool.scaling.phases] for pool in self.pools],
            "in_flight": self._spec.in_flight,
            "roles": [self._course.role_of(machine) for machine in self.machines],
            "n_stages": [machine.n_stages for machine in self.machines],
            "n_tenants": [len(machine.cores) for machine in self.machines],
            "fails": any(each is not None for each in self._spec.failing) or bool(self._spec.outages),
            "scales": any(pool.scaling is not None for pool in self.pools),
            "log": {"at_ns": at_ns, "machine": machine, "state": state, "phase": phase},
            "asked_below_least": sum(pool.at_least for pool in self.pools),
            "asked_above_most": sum(pool.at_most for pool in self.pools),
            **{name: sum(getattr(each, name) for each in self._controllers) for name in ("starts", "called_back", "drains")},
            **self._counts,
        }  # fmt: skip

    def _look_for_first_tokens(self) -> None:
        """Give pools the times to first tokens since the last look."""
        state = self._state
        still: list[int] = []
        for id_ in self._open:
            first_ns = state.first_token[id_]
            if first_ns >= 0 and state.replica[id_] >= 0:
                for number in dict.fromkeys(
                    self._spec.pools[self._machine_of[each]] for each in self._course.first_token_by(id_)
                ):
                    self.pools[number].firsts_ns.append(first_ns - state.arrival[id_])
            elif state.status[id_] == UNFINISHED:
                still.append(id_)
        self._open = still
