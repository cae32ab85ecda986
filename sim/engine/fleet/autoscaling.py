"""A control policy at work: what it sees of its pool, and how machines start and drain as it decides."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol, cast

from policies.control import PoolSeen, Seen, highest, most_at_once, remembers_s, stabilised, wanted_of
from sim.engine.machine.any_machine import AnyMachine
from sim.engine.spec.lifecycle import DRAINING, FAILED, OFF, READY, STARTING, Scaling
from sim.engine.time.errors import PolicyError
from sim.engine.time.events import CONTROL, Alarm, Clock

_MOST_WITHOUT: Final = 10_000
"""Intervals without any machine, while requests wait for one, after which a run is said not to end."""


class Steered(Protocol):
    """The fleet, as a controller uses it."""

    machines: Sequence[AnyMachine]
    states: list[int]
    returns: list[bool]
    """Whether each failed machine comes back."""
    since_ns: list[int]
    """The instant at which each entered its state, or began to start (ns)."""

    def over(self) -> bool:
        """Whether nothing that happens to machines from here on matters."""
        ...

    def held_for(self, machine: AnyMachine) -> int:
        """Requests that are held until a machine is ready, and that *machine* could serve."""
        ...

    def looks(self) -> Mapping[str, PoolSeen]:
        """The state of each pool, as policies see it."""
        ...

    def pending(self, index: int) -> bool:
        """Whether a machine starts and has no server yet."""
        ...

    def start(self, index: int) -> None: ...

    def call_back(self, index: int) -> None: ...

    def drain(self, index: int, within_ns: int | None) -> None: ...

    def sweep(self) -> None:
        """Stop draining machines that are empty, and send held requests to ready ones."""
        ...


def _waiting(machine: AnyMachine) -> int:
    """Requests that wait there, including for their KV."""
    return machine.waiting + sum(core.n_loading for core in machine.cores)


class Pool:
    """Equal machines: what was seen of them since their policy was last asked, and what the policy has said."""

    def __init__(self, name: str, machines: list[int], scaling: Scaling | None) -> None:
        self.name = name
        self.machines = machines
        self.scaling = scaling
        self.came = self.came_tokens = self.finished = self.finished_tokens = 0
        self.firsts_ns: list[int] = []
        self.past: deque[tuple[int, PoolSeen]] = deque()
        self.asked: deque[tuple[float, int]] = deque()
        self.changes: list[tuple[float, int]] = []
        """When machines were started or drained, and how many more there were then."""
        self.at_least = self.at_most = 0
        """Intervals after which the policy wanted fewer than the pool's least, or more than there can be."""

    def took(self, prompt_tokens: int) -> None:
        self.came += 1
        self.came_tokens += prompt_tokens

    def start_anew(self) -> None:
        self.came = self.came_tokens = self.finished = self.finished_tokens = 0
        self.firsts_ns.clear()

    def counted(self, fleet: Steered, index: int) -> bool:
        """Whether a machine counts among the wanted ones."""
        state = fleet.states[index]
        return state in (STARTING, READY) or (state == FAILED and fleet.returns[index])

    def look(self, fleet: Steered) -> PoolSeen:
        """The pool's state as a policy sees it now."""
        ready = [fleet.machines[index] for index in self.machines if fleet.states[index] == READY]
        serving = [fleet.machines[index] for index in self.machines if fleet.states[index] in (READY, DRAINING)]
        firsts = sorted(self.firsts_ns)
        return PoolSeen(
            machines=sum(self.counted(fleet, index) for index in self.machines),
            ready=len(ready),
            pending=sum(fleet.pending(index) for index in self.machines),
            waiting=sum(map(_waiting, serving)) + fleet.held_for(fleet.machines[self.machines[0]]),
            running=sum(machine.running for machine in serving),
            kv_use=sum(machine.kv_use for machine in ready) / len(ready) if ready else 0.0,
            came=self.came,
            came_tokens=self.came_tokens,
            finished=self.finished,
            finished_tokens=self.finished_tokens,
            ttft_mean_s=sum(firsts) / len(firsts) * 1e-9 if firsts else None,
            ttft_p95_s=firsts[-(-95 * len(firsts) // 100) - 1] * 1e-9 if firsts else None,
        )


class Controller:
    """Asks the policy of one pool after each interval."""

    def __init__(self, pool: Pool, scaling: Scaling, fleet: Steered, clock: Clock) -> None:
        self._pool = pool
        self._scaling = scaling
        self._fleet = fleet
        self._clock = clock
        self._interval_ns = round(scaling.interval_s * 1e9)
        self._remembers_ns = round(remembers_s(scaling.policy) * 1e9)
        self._without = 0
        """Intervals in a row without a machine while requests were held."""
        self.starts = self.called_back = self.drains = 0
        # The machines at the beginning count as asked for.
        pool.asked.append((0.0, scaling.initial))
        self._alarm = Alarm(clock, CONTROL, self._on_interval)
        self._alarm.set(self._interval_ns)

    def _on_interval(self, _event: Any) -> None:
        fleet, pool, scaling, now_ns = self._fleet, self._pool, self._scaling, self._clock.now_ns
        if fleet.over():
            return
        fleet.sweep()
        looks = fleet.looks()
        mine = looks[pool.name]
        pool.start_anew()
        wanted = self._wanted(mine, looks)
        most = sum(fleet.states[index] != FAILED or fleet.returns[index] for index in pool.machines)
        pool.at_least += wanted < scaling.min_machines
        pool.at_most += wanted > most
        if scaling.hpa is not None:
            wanted = min(wanted, most_at_once(scaling.hpa, mine.machines, pool.changes, now_ns * 1e-9))
        wanted = min(max(wanted, scaling.min_machines), most)
        self._go_to(wanted, mine.machines)
        self._check_that_somebody_comes(wanted, most)
        self._alarm.set(now_ns + self._interval_ns)

    def _wanted(self, mine: PoolSeen, looks: Mapping[str, PoolSeen]) -> int:
        """The number of machines that the policy wants, stabilised."""
        pool, scaling, now_ns = self._pool, self._scaling, self._clock.now_ns
        while pool.past and pool.past[0][0] <= now_ns - self._remembers_ns:
            pool.past.popleft()
        pool.past.append((now_ns, mine))
        past, now_s = tuple(seen for _, seen in pool.past), now_ns * 1e-9
        seen = Seen(now_s=now_s, interval_s=scaling.interval_s, mine=mine, pools=looks, past=past)
        asked = cast(object, wanted_of(scaling.policy)(seen))
        if not isinstance(asked, int) or isinstance(asked, bool) or asked < 0:
            raise PolicyError(
                f"{scaling.policy!r} asked for {asked!r} machines of pool {pool.name} at t={now_s:g} s; expected a whole number "
                "of at least 0"
            )
        pool.asked.append((now_s, asked))
        longest_s = max(scaling.down_window_s, scaling.up_window_s)
        while pool.asked[0][0] <= now_s - longest_s and len(pool.asked) > 1:
            pool.asked.popleft()
        if scaling.hpa == "default":
            return highest(pool.asked, now_s, scaling.down_window_s)
        return stabilised(
            pool.asked, now_s, mine.machines, down_window_s=scaling.down_window_s, up_window_s=scaling.up_window_s
        )

    def _check_that_somebody_comes(self, wanted: int, most: int) -> None:
        pool, fleet = self._pool, self._fleet
        left = most and not wanted and fleet.held_for(fleet.machines[pool.machines[0]])
        self._without = self._without + 1 if left else 0
        if self._without >= _MOST_WITHOUT:
            raise PolicyError(
                f"{self._scaling.policy!r} asked for no machine of pool {pool.name} {_MOST_WITHOUT:,} times in a row while "
                f"{left} requests wait for one; give a minimum of 1, or a policy that asks for one when somebody waits"
            )

    def _go_to(self, wanted: int, have: int) -> None:
        """Start or drain machines: draining ones are called back first; failed ones are drained first, then starting ones."""
        pool, fleet, states = self._pool, self._fleet, self._fleet.states
        for _ in range(wanted - have):
            back = next((index for index in pool.machines if states[index] == DRAINING), None)
            if back is not None:
                # It is there, and warm.
                self.called_back += 1
                fleet.call_back(back)
                continue
            self.starts += 1
            fleet.start(next(index for index in pool.machines if states[index] == OFF))
        drain_s = self._scaling.drain_s
        within_ns = None if drain_s is None else max(round(drain_s * 1e9), 1)
        for _ in range(have - wanted):
            self.drains += 1
            counted = (index for index in pool.machines if pool.counted(fleet, index))
            fleet.drain(min(counted, key=self._cost_of_going), within_ns)
        if wanted != have:
            pool.changes.append((self._clock.now_ns * 1e-9, wanted - have))
            fleet.sweep()

    def _cost_of_going(self, index: int) -> tuple[int, int, int]:
        state, machine = self._fleet.states[index], self._fleet.machines[index]
        if state == READY:
            return 2, machine.running + _waiting(machine), -index
        return int(state == STARTING), -self._fleet.since_ns[index], -index
