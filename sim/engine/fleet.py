"""Machines that come and go: started and drained as control policies ask, failing and coming back.

Everything here happens first in its instant. A request is sent to a machine that is ready; it is held, lost, or on its way again
where its machine has failed, and nowhere twice.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, Protocol

from policies.control import PoolSeen, Seen, remembers_s, stabilised
from sim.engine.columns import ABORTED, FINISHED, UNFINISHED
from sim.engine.errors import PolicyError
from sim.engine.events import ARRIVALS, CONTROL, Alarm, Clock
from sim.engine.gate import Gate
from sim.engine.lives import DRAINING, FAILED, OFF, READY, STARTING, STATE_NAMES, FleetSpec, Scaling
from sim.engine.machine import Machine
from sim.engine.requests import RequestState

AGAIN_AFTER_NS: Final = 1
"""Requests of a machine that has failed are at the router this much later; see `sim.engine.cluster.FELT_AFTER_NS`."""

_MOST_WITHOUT: Final = 10_000
"""Intervals without any machine, while requests wait for one, after which a run is said not to end."""


class Loses(Protocol):
    """What this tells the cluster."""

    def lost(self, id_: int, reason: str, /) -> None: ...


class _Pool:
    """What one pool saw since its policy was last asked, and what the policy has said."""

    __slots__ = (
        *("alarm", "asked", "at_least", "at_most", "came", "came_tokens", "finished", "finished_tokens", "firsts_ns"),
        *("machines", "name", "past", "remembers_ns", "scaling", "wanted", "without"),
    )

    def __init__(self, name: str, machines: list[int], scaling: Scaling | None) -> None:
        self.name = name
        self.machines = machines
        self.scaling = scaling
        self.came = self.came_tokens = self.finished = self.finished_tokens = 0
        self.firsts_ns: list[int] = []
        self.past: deque[tuple[int, PoolSeen]] = deque()
        self.asked: deque[tuple[float, int]] = deque()
        self.at_least = self.at_most = 0
        """Intervals after which the policy asked for fewer than the pool's least, or for more than there can be."""
        self.without = 0
        """Intervals in a row without a machine while requests were held."""
        self.remembers_ns = 0 if scaling is None else round(remembers_s(scaling.policy) * 1e9)
        self.alarm: Alarm | None = None

    def took(self, prompt_tokens: int) -> None:
        self.came += 1
        self.came_tokens += prompt_tokens

    def start_anew(self) -> None:
        self.came = self.came_tokens = self.finished = self.finished_tokens = 0
        self.firsts_ns.clear()


class Fleet:
    """Which machines are ready, and where requests are meanwhile."""

    def __init__(
        self, spec: FleetSpec, machines: Sequence[Machine], gate: Gate, state: RequestState, clock: Clock, outside: Loses,
        seed: int,
    ) -> None:  # fmt: skip
        self._spec = spec
        self._machines = machines
        self._gate = gate
        self._state = state
        self._clock = clock
        self._outside = outside
        self._seed = seed
        n = len(machines)
        self.states = [OFF] * n
        self._phase = [-1] * n
        self._returns = [True] * n
        """Whether a machine that has failed comes back."""
        self._n_failures = [0] * n
        self._since_ns = [0] * n
        self._life = [Alarm(clock, CONTROL, partial(self._on_life, i)) for i in range(n)]
        """Ring when a phase, a repair or the time to drain is over."""
        self._failure = [Alarm(clock, CONTROL, partial(self._on_failure, i)) for i in range(n)]
        self._down_ns = [0] * n
        self._sweep = Alarm(clock, CONTROL, self._on_sweep)
        self.pools = [
            _Pool(name, spec.machines_of(i), scaling)
            for i, (name, scaling) in enumerate(zip(spec.names, spec.scaling, strict=True))
        ]
        self._machine_of = [machine.index for machine in machines for _ in machine.tenants]
        """Of each tenant, by its number."""
        self._shown: dict[int, list[Machine]] = {}
        """By model the machines that are ready."""
        self.held: deque[int] = deque()
        self.again: set[int] = set()
        """Requests between a machine that has failed and the router."""
        n_requests = len(state.prompt)
        self.came = bytearray(n_requests)
        self._open: list[int] = []
        """Requests that have come and had no first token when it was last looked."""
        self._first_unfinished = 0
        self._held_since = array("q", bytes(8 * n_requests))
        self.held_ns = array("q", bytes(8 * n_requests))
        self.failures = array("i", bytes(4 * n_requests))
        state.again = bytearray(n_requests)
        self._log: tuple[array[int], array[int], array[int], array[int]] = (
            array("q"),
            array("q"),
            array("q"),
            array("q"),
        )
        self._counts = dict.fromkeys(
            ("starts", "called_back", "drains", "drains_cut_short", "failures", "outages_missed", "resumed", "retried", "lost",
             "discarded_tokens"), 0,
        )  # fmt: skip

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
                pool.asked.append((0.0, scaling.initial))
                pool.alarm = Alarm(self._clock, CONTROL, partial(self._on_interval, pool))
                pool.alarm.set(round(scaling.interval_s * 1e9))
        for outage in self._spec.outages:
            down_ns = -1 if outage.for_s is None else max(round(outage.for_s * 1e9), 1)
            Alarm(self._clock, CONTROL, partial(self._on_outage, outage.machine, down_ns)).set(round(outage.at_s * 1e9))

    def _over(self) -> bool:
        """Whether nothing that happens to machines from here on matters: all requests have ended, or those that have not wait for
        what cannot come."""
        at = self._state.status.find(UNFINISHED, self._first_unfinished)
        if at < 0:
            return True
        self._first_unfinished = at
        return not self._clock.expects(CONTROL) and not any(map(self._can_be_served, self.held))

    def _can_be_served(self, id_: int) -> bool:
        """Whether a machine that has not failed for good hosts the model that a request asks for."""
        return self._state.status[id_] == UNFINISHED and any(
            self.states[machine.index] != FAILED or self._returns[machine.index] for machine in self._gate.hosting(id_)
        )

    def close(self) -> None:
        """At the end of the run: who is held still is held until then."""
        for id_ in self.held:
            if self._state.status[id_] == UNFINISHED:
                self.held_ns[id_] += self._clock.now_ns - self._held_since[id_]

    def facts(self) -> dict[str, Any]:
        """Counts, and every change of a machine's state: when, which, its state and (of one that starts) its phase."""
        at_ns, machine, state, phase = (list(column) for column in self._log)
        return {
            "pools": list(self._spec.pools),
            "names": list(self._spec.names),
            "phases": [[] if pool.scaling is None else [name for name, _ in pool.scaling.phases] for pool in self.pools],
            "in_flight": self._spec.in_flight,
            "n_stages": [machine.n_stages for machine in self._machines],
            "n_tenants": [len(machine.tenants) for machine in self._machines],
            "fails": any(each is not None for each in self._spec.failing) or bool(self._spec.outages),
            "scales": any(pool.scaling is not None for pool in self.pools),
            "log": {"at_ns": at_ns, "machine": machine, "state": state, "phase": phase},
            "asked_below_least": sum(pool.at_least for pool in self.pools),
            "asked_above_most": sum(pool.at_most for pool in self.pools),
            **self._counts,
        }  # fmt: skip

    # Requests.

    def come(self, id_: int) -> None:
        """A request has come through the front end."""
        if not self.came[id_]:
            self.came[id_] = 1
            self._open.append(id_)
        self.again.discard(id_)
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
        if not self.failures[id_]:
            hosts = dict.fromkeys(self._spec.pools[machine.index] for machine in self._gate.hosting(id_))
            for number in hosts:
                self.pools[number].took(self._state.prompt[id_])
        self._held_since[id_] = self._clock.now_ns
        self.held.append(id_)

    def _release(self) -> None:
        """A machine is ready: who was held for one goes on, in the order in which they came."""
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
            pool.finished_tokens += self._state.output[id_]
        if self.states[index] == DRAINING:
            self._sweep.set(max(now_ns, self._clock.now_ns) + 1)

    # Machines.

    def _note(self, index: int, state: int = OFF, phase: int = -1) -> None:
        self.states[index] = state
        self._phase[index] = phase
        self._since_ns[index] = self._clock.now_ns
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
        if self.held:
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
        if self._over():
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
            self._hand_on(index)

    def _on_failure(self, index: int, _event: object) -> None:
        if not self._over():
            self._n_failures[index] += 1
            self._fail(index, self._down_ns[index])

    def _on_outage(self, index: int, down_ns: int, _event: object) -> None:
        if self._over():
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
        self._returns[index] = down_ns >= 0
        self._note(index, OFF if drained and down_ns >= 0 else FAILED)
        if down_ns >= 0 and not drained:
            self._life[index].set(self._clock.now_ns + down_ns)
        self._hand_on(index)

    def _hand_on(self, index: int) -> None:
        """The requests of a machine that stops: sent again, or lost."""
        machine, state, now_ns = self._machines[index], self._state, self._clock.now_ns
        gone = {id_ for tenant in machine.tenants for id_ in tenant.sequences.given_up}
        sent: list[int] = []
        ids = machine.abort(now_ns)
        for tenant in machine.tenants:
            for id_, tokens in tenant.sequences.given_back.items():
                state.recomputed[id_] += tokens
        spec, counts = self._spec, self._counts
        for id_ in ids:
            if state.status[id_] != UNFINISHED:
                continue
            if id_ in gone:
                state.status[id_] = ABORTED
                continue
            self.failures[id_] += 1
            if spec.in_flight == "lose":
                self._lose(id_, "its machine failed")
                continue
            if spec.retries is not None and self.failures[id_] > spec.retries:
                self._lose(id_, f"its machine failed {spec.retries + 1} times")
                continue
            if spec.in_flight == "retry":
                counts["retried"] += 1
                counts["discarded_tokens"] += state.output[id_] - state.left[id_]
                state.left[id_] = state.output[id_]
                state.first_token[id_] = state.token_ns[id_] = -1
            else:
                counts["resumed"] += 1
            assert state.again is not None
            state.again[id_] = 1
            state.replica[id_] = -1
            self.again.add(id_)
            sent.append(id_)
        if sent:
            Alarm(self._clock, ARRIVALS, partial(self._on_again, sent)).set(now_ns + AGAIN_AFTER_NS)

    def _on_again(self, ids: list[int], _event: object) -> None:
        for id_ in ids:
            if self._state.status[id_] == UNFINISHED:
                self.come(id_)
            else:
                self.again.discard(id_)

    def _on_sweep(self, _event: object) -> None:
        """Machines that drain and are empty go."""
        for index, state in enumerate(self.states):
            machine = self._machines[index]
            if state == DRAINING and not (machine.running or machine.waiting):
                self._off(index)

    # Control.

    def _on_interval(self, pool: _Pool, _event: object) -> None:
        if self._over():
            return
        scaling, now_ns = pool.scaling, self._clock.now_ns
        assert scaling is not None
        assert pool.alarm is not None
        self._on_sweep(None)
        self._look_for_first_tokens()
        looks = {each.name: self._look(each) for each in self.pools}
        mine = looks[pool.name]
        pool.start_anew()
        while pool.past and pool.past[0][0] <= now_ns - pool.remembers_ns:
            pool.past.popleft()
        pool.past.append((now_ns, mine))
        past = tuple(seen for _, seen in pool.past)
        now_s = now_ns * 1e-9
        asked = scaling.policy.wanted(
            Seen(now_s=now_s, interval_s=scaling.interval_s, mine=mine, pools=looks, past=past)
        )
        if not isinstance(asked, int) or isinstance(asked, bool) or asked < 0:
            raise PolicyError(
                f"{scaling.policy!r} asked for {asked!r} machines of pool {pool.name} at t={now_s:g} s; expected a number of at "
                "least 0"
            )
        pool.asked.append((now_s, asked))
        longest_s = max(scaling.down_window_s, scaling.up_window_s)
        while pool.asked[0][0] <= now_s - longest_s and len(pool.asked) > 1:
            pool.asked.popleft()
        wanted = stabilised(
            pool.asked, now_s, mine.machines, down_window_s=scaling.down_window_s, up_window_s=scaling.up_window_s
        )
        most = sum(self.states[index] != FAILED or self._returns[index] for index in pool.machines)
        pool.at_least += wanted < scaling.min_machines
        pool.at_most += wanted > most
        wanted = min(max(wanted, scaling.min_machines), most)
        self._go_to(pool, wanted, mine.machines)
        self._check_that_somebody_comes(pool, wanted)
        pool.alarm.set(now_ns + round(scaling.interval_s * 1e9))

    def _check_that_somebody_comes(self, pool: _Pool, wanted: int) -> None:
        left = not wanted and any(self._would_serve(pool, id_) and self._can_be_served(id_) for id_ in self.held)
        pool.without = pool.without + 1 if left else 0
        if pool.without >= _MOST_WITHOUT:
            assert pool.scaling is not None
            raise PolicyError(
                f"{pool.scaling.policy!r} asked for no machine of pool {pool.name} {_MOST_WITHOUT:,} times in a row while "
                f"{len(self.held)} requests wait for one; give a minimum of 1, or a policy that asks for one when somebody waits"
            )

    def _go_to(self, pool: _Pool, wanted: int, have: int) -> None:
        """Start or drain machines: from those that are starting or drain to those that are ready, and the least busy of these."""
        states = self.states
        for _ in range(wanted - have):
            back = next((index for index in pool.machines if states[index] == DRAINING), None)
            if back is not None:
                # It is there, and warm.
                self._counts["called_back"] += 1
                self._life[back].cancel()
                self._note(back, READY)
                continue
            self._counts["starts"] += 1
            self._start(next(index for index in pool.machines if states[index] == OFF))
        for _ in range(have - wanted):
            self._counts["drains"] += 1
            index = min((index for index in pool.machines if self._counted(index)), key=self._cost_of_going)
            if states[index] != READY:
                self._off(index)
                continue
            self._note(index, DRAINING)
            drain_s = None if pool.scaling is None else pool.scaling.drain_s
            if drain_s is not None:
                self._life[index].set(self._clock.now_ns + max(round(drain_s * 1e9), 1))
        self._on_sweep(None)
        if self.held:
            self._release()

    def _counted(self, index: int) -> bool:
        """Whether a machine is one of those that are wanted."""
        state = self.states[index]
        return state in (STARTING, READY) or (state == FAILED and self._returns[index])

    def _cost_of_going(self, index: int) -> tuple[int, int, int]:
        state, machine = self.states[index], self._machines[index]
        if state == READY:
            return 2, machine.running + machine.waiting, -index
        return int(state == STARTING), -self._since_ns[index], -index

    def _look(self, pool: _Pool) -> PoolSeen:
        ready = [self._machines[index] for index in pool.machines if self.states[index] == READY]
        serving = [self._machines[index] for index in pool.machines if self.states[index] in (READY, DRAINING)]
        held = sum(self._would_serve(pool, id_) for id_ in self.held)
        firsts = sorted(pool.firsts_ns)
        return PoolSeen(
            machines=sum(map(self._counted, pool.machines)),
            ready=len(ready),
            waiting=sum(machine.waiting for machine in serving) + held,
            running=sum(machine.running for machine in serving),
            kv_use=sum(machine.kv_use for machine in ready) / len(ready) if ready else 0.0,
            came=pool.came,
            came_tokens=pool.came_tokens,
            finished=pool.finished,
            finished_tokens=pool.finished_tokens,
            ttft_mean_s=sum(firsts) / len(firsts) * 1e-9 if firsts else None,
            ttft_p95_s=firsts[-(-95 * len(firsts) // 100) - 1] * 1e-9 if firsts else None,
        )

    def _would_serve(self, pool: _Pool, id_: int) -> bool:
        if self._state.status[id_] != UNFINISHED:
            return False
        model = 0 if self._state.model is None else self._state.model[id_]
        return self._machines[pool.machines[0]].hosts(model)

    def _look_for_first_tokens(self) -> None:
        """Times to first tokens that have come since, each to the pool that gave it."""
        state, still = self._state, []
        for id_ in self._open:
            first_ns = state.first_token[id_]
            if first_ns >= 0 and state.replica[id_] >= 0:
                index = self._machine_of[state.replica[id_]]
                self.pools[self._spec.pools[index]].firsts_ns.append(first_ns - state.arrival[id_])
            elif state.status[id_] == UNFINISHED:
                still.append(id_)
        self._open = still


def named(states: Sequence[int]) -> list[str]:
    """The states of machines in words."""
    return [STATE_NAMES[state] for state in states]
