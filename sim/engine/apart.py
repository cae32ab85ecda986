"""Machines that come, go and fail where prefill and decode are apart: what requests between two machines ask of a fleet.

A request that comes needs a machine that prefills, or does both; one whose prompt has been computed needs one that decodes, and
waits for it with the machine that has its KV. Each is held for the stage for which no machine is ready.
"""

# pyright: reportPrivateUsage=false
# What a fleet has, and does for those that are apart, stands in `sim.engine.fleet`, so that either can be read in one sitting.

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from sim.engine.columns import UNFINISHED
from sim.engine.control import Pool
from sim.engine.events import Alarm, Clock
from sim.engine.gate import Gate
from sim.engine.handover import DECODES, PREFILLS, Handovers
from sim.engine.lives import DRAINING, FAILED, READY, FleetSpec
from sim.engine.machine import Machine
from sim.engine.parted import Cut, choose_anew, come_again, give_up_kv, needs
from sim.engine.requests import RequestState


class Whole(Protocol):
    """The `sim.engine.fleet.Fleet`."""

    states: list[int]
    returns: list[bool]
    pools: list[Pool]
    held: deque[int]
    held_ns: array[int]
    _spec: FleetSpec
    _state: RequestState
    _clock: Clock
    _gate: Gate
    _counts: dict[str, int]
    _held_since: array[int]
    _sweep: Alarm

    def _hold(self, id_: int, /) -> None: ...

    def _lose(self, id_: int, reason: str, /) -> None: ...

    def send_again(self, ids: list[int], /) -> None: ...


class Apart:
    """A fleet as `Handovers` sees it (`sim.engine.handover.Present`), and those between machines as the fleet does."""

    def __init__(
        self, fleet: Whole, handovers: Handovers, goes_on: Callable[[int], bool], too_often: Callable[[int], bool]
    ) -> None:
        """*goes_on*: books that the machine of a request has failed, and says whether it goes on elsewhere; *too_often*: whether it
        would not, for having done so before."""
        self._fleet = fleet
        self._goes_on = goes_on
        self._too_often = too_often
        self.handovers = handovers
        handovers.present = self
        self._taken = bytearray(len(fleet._state.prompt))
        """Of each request the stages of its life that have been counted for a pool."""
        self._releases = False

    def clear(self) -> None:
        """There are no requests."""
        del self._taken[:]

    def add(self) -> None:
        """One request more, behind the others."""
        self._taken.append(0)

    # What requests between machines ask.

    def ready(self, machines: Sequence[Machine]) -> list[Machine]:
        """Those of *machines* that are."""
        states = self._fleet.states
        return [machine for machine in machines if states[machine.index] == READY]

    def took(self, id_: int, machines: Sequence[Machine], stage: int) -> None:
        """A request has come for a stage of its life to one of *machines*; it counts once for each stage."""
        fleet = self._fleet
        if not self._taken[id_] & stage:
            self._taken[id_] |= stage
            for number in dict.fromkeys(fleet._spec.pools[machine.index] for machine in machines):
                fleet.pools[number].took(fleet._state.prompt[id_])

    def hold(self, id_: int) -> None:
        """No machine is ready for one that has come."""
        if self._releases:
            self._fleet.held.append(id_)
        else:
            self._fleet._hold(id_)

    def hold_computed(self, id_: int) -> bool:
        """No machine that decodes is ready for one whose prompt has been computed: whether it waits; else it is lost."""
        fleet = self._fleet
        if fleet._spec.when_none == "lose":
            fleet._counts["discarded_tokens"] += give_up_kv(self.handovers, id_, sender_is_there=True)
            fleet._lose(id_, "no machine that decodes was ready")
            return False
        if not self._releases:
            fleet._held_since[id_] = fleet._clock.now_ns
        self.took(id_, self.handovers.able(id_), DECODES)
        return True

    def computed(self, machine: Machine) -> None:
        """A prompt that is decoded elsewhere has been computed: for its pool it has ended, with a token where that is used."""
        pool = self._fleet.pools[self._fleet._spec.pools[machine.index]]
        pool.finished += 1
        pool.finished_tokens += self.handovers.least_left

    def compute_again(self, id_: int) -> None:
        """A computed prompt gives its KV up, and its request comes again; it has not failed."""
        fleet = self._fleet
        fleet._counts["discarded_tokens"] += give_up_kv(self.handovers, id_, sender_is_there=True)
        assert fleet._state.again is not None
        fleet._state.again[id_] = 1
        come_again(self.handovers, id_)
        fleet.send_again([id_])

    def perhaps_empty(self, machine: Machine) -> None:
        """A request between machines needs *machine* no more."""
        fleet = self._fleet
        if fleet.states[machine.index] == DRAINING:
            fleet._sweep.set(fleet._clock.now_ns + 1)

    # What a fleet asks.

    def count_as_held(self, id_: int) -> None:
        """A request is held that counts for the pools for which it waits."""
        missing = self._lacks(id_)
        for stage, machines in ((PREFILLS, self._fleet._gate.hosting(id_)), (DECODES, self.handovers.able(id_))):
            if missing & stage:
                self.took(id_, machines, stage)

    def release(self) -> None:
        """A machine is ready: who was held for one goes on, those whose prompt has been computed before the others."""
        fleet, handovers = self._fleet, self.handovers
        now_ns, since = fleet._clock.now_ns, fleet._held_since
        self._releases = True
        for id_ in list(handovers.awaiting):
            handovers.choose_again(id_)
            if id_ not in handovers.awaiting:
                fleet.held_ns[id_] += now_ns - since[id_]
        for _ in range(len(fleet.held)):
            id_ = fleet.held.popleft()
            if fleet._state.status[id_] != UNFINISHED:
                continue
            held = len(fleet.held)
            handovers.come(id_)
            if len(fleet.held) == held:
                fleet.held_ns[id_] += now_ns - since[id_]
        self._releases = False

    def held_for(self, machine: Machine, held: Sequence[int]) -> int:
        """Of *held* those who wait for a machine of the role of *machine*, and those who wait for it with a computed prompt."""
        handovers = self.handovers
        stage = DECODES if handovers.role_of(machine) == "decode" else PREFILLS
        computed = sum(machine in handovers.able(id_) for id_ in handovers.awaiting)
        return sum(bool(self._lacks(id_) & stage) for id_ in held) + computed

    def _lacks(self, id_: int) -> int:
        """Of one that is held, the stages of its life for which no machine is ready."""
        handovers = self.handovers
        able = handovers.able(id_) if handovers.decodes(id_) else []
        found = 0 if self.ready(self._fleet._gate.hosting(id_)) else PREFILLS
        needed = handovers._spec.room == "before_prefill" or handovers.is_short(id_, able)
        if able and needed and not self.ready(able):
            found |= DECODES
        return found

    def can_be_served(self, id_: int) -> bool:
        """Whether one that waits can ever go on: whether for each stage that is left a machine has not failed for good."""
        handovers = self.handovers
        able = self._not_lost(handovers.able(id_)) if handovers.decodes(id_) else None
        if id_ in handovers.awaiting:
            return bool(able)
        firsts = self._not_lost(self._fleet._gate.hosting(id_))
        if any(handovers.role_of(machine) == "both" for machine in firsts):
            return True
        if able and handovers.is_short(id_, able):
            return True
        return bool(firsts) and (able is None or bool(able))

    def _not_lost(self, machines: Sequence[Machine]) -> list[Machine]:
        fleet = self._fleet
        return [each for each in machines if fleet.states[each.index] != FAILED or fleet.returns[each.index]]

    def is_needed(self, machine: Machine) -> bool:
        """Whether a request between machines needs *machine*."""
        return needs(self.handovers, machine)

    def tokens_of(self, id_: int) -> int:
        """Output tokens of one that has finished, those of prefill left out."""
        state, handovers = self._fleet._state, self.handovers
        return state.output[id_] - (handovers.least_left if handovers.prefill_replica[id_] >= 0 else 0)

    def hand_on(self, parted: Cut) -> list[int]:
        """Of those between a machine that stops and another, who is to be sent again; the others are lost, or go on as they are."""
        fleet, handovers, counts = self._fleet, self.handovers, self._fleet._counts
        counts["chosen_again"] += parted.chosen_again + len(parted.unharmed)
        sent: list[int] = []
        for id_ in parted.lent:
            counts["discarded_tokens"] += give_up_kv(handovers, id_, sender_is_there=False)
            if self._goes_on(id_):
                sent.append(id_)
        for id_ in parted.on_link:
            # The machine that computed it has its KV still.
            stays = fleet._spec.in_flight == "resume" and not self._too_often(id_)
            if not stays:
                counts["discarded_tokens"] += give_up_kv(handovers, id_, sender_is_there=True)
            if self._goes_on(id_):
                if stays:
                    choose_anew(handovers, id_)
                else:
                    sent.append(id_)
        return sent + parted.unharmed
