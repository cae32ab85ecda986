"""A fleet whose pools prefill, decode or do both: machines start, stop and fail while requests are between two of them.

A new request needs a machine that prefills, or does both; a request whose prompt has been computed needs one that decodes, and
waits for it with the machine that has its KV. Each is held for the stage for which no machine is ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sim.engine.disaggregation.handovers import DECODES, PREFILLS, Handovers, Interrupted
from sim.engine.fleet.fleet import Fleet, given_up
from sim.engine.machine.machine import Machine
from sim.engine.record.columns import UNFINISHED
from sim.engine.spec.lifecycle import DRAINING, READY


class DisaggregatedFleet(Fleet):
    """A `Fleet` that holds, counts and routes again by stages of a request's life.

    It also implements `sim.engine.disaggregation.handovers.Present` for `Handovers`.
    """

    def __init__(self, *args: Any, handovers: Handovers) -> None:
        super().__init__(*args)
        self.handovers = handovers
        handovers.present = self
        self._taken = bytearray(len(self._state.prompt))
        """The stages of each request's life that have been counted for a pool, as bits."""
        self._releases = False

    def clear(self) -> None:
        super().clear()
        del self._taken[:]

    def add(self) -> None:
        super().add()
        self._taken.append(0)

    # Called by hand-overs.

    def ready(self, machines: Sequence[Machine]) -> list[Machine]:
        """The ready ones of *machines*."""
        states = self.states
        return [machine for machine in machines if states[machine.index] == READY]

    def took(self, id_: int, machines: Sequence[Machine], stage: int) -> None:
        """Count a request that reaches one of *machines* for a stage of its life; it counts once for each stage."""
        if not self._taken[id_] & stage:
            self._taken[id_] |= stage
            for number in dict.fromkeys(self._spec.pools[machine.index] for machine in machines):
                self.pools[number].took(self._state.prompt[id_])

    def hold(self, id_: int) -> None:
        """Hold a new request, since no machine is ready."""
        if self._releases:
            self.held.append(id_)
        else:
            self._hold(id_)

    def hold_computed(self, id_: int) -> bool:
        """Whether a request with a computed prompt waits for a machine that decodes; else it is lost."""
        if self._spec.when_none == "lose":
            self._discard(id_, sender_is_there=True)
            self._lose(id_, "no machine that decodes was ready")
            return False
        if not self._releases:
            self._held_since[id_] = self._clock.now_ns
        self.took(id_, self.handovers.able(id_), DECODES)
        return True

    def computed(self, machine: Machine) -> None:
        """Count a computed prompt that is decoded elsewhere: for its pool it has finished, with a token where that is used."""
        pool = self.pools[self._spec.pools[machine.index]]
        pool.finished += 1
        pool.finished_tokens += self.handovers.least_left

    def compute_again(self, id_: int) -> None:
        """Send a request with a computed prompt again, without its KV; it has not failed."""
        self._discard(id_, sender_is_there=True)
        assert self._state.again is not None
        self._state.again[id_] = 1
        self.handovers.come_again(id_)
        self.send_again([id_])

    def perhaps_empty(self, machine: Machine) -> None:
        """Look soon whether *machine* is empty: a request between machines needs it no more."""
        if self.states[machine.index] == DRAINING:
            self._sweep.set(self._clock.now_ns + 1)

    # Requests that wait.

    def in_wait(self) -> tuple[int, ...]:
        """Requests that wait for a ready machine; computed prompts wait for one that decodes."""
        return (*self.held, *self.handovers.awaiting)

    def _route(self, id_: int) -> None:
        self.handovers.come(id_)

    def _count_as_held(self, id_: int) -> None:
        missing = self._lacks(id_)
        for stage, machines in ((PREFILLS, self._gate.hosting(id_)), (DECODES, self.handovers.able(id_))):
            if missing & stage:
                self.took(id_, machines, stage)

    def _release(self) -> None:
        """Route the requests that were held, computed prompts before the others."""
        handovers, now_ns, since = self.handovers, self._clock.now_ns, self._held_since
        self._releases = True
        for id_ in list(handovers.awaiting):
            handovers.choose_again(id_)
            if id_ not in handovers.awaiting:
                self.held_ns[id_] += now_ns - since[id_]
        for _ in range(len(self.held)):
            id_ = self.held.popleft()
            if self._state.status[id_] != UNFINISHED:
                continue
            held = len(self.held)
            handovers.come(id_)
            if len(self.held) == held:
                self.held_ns[id_] += now_ns - since[id_]
        self._releases = False

    def held_for(self, machine: Machine) -> int:
        """Number of requests that wait for a machine of the role of *machine*, with a computed prompt or without."""
        handovers = self.handovers
        stage = DECODES if handovers.role_of(machine) == "decode" else PREFILLS
        computed = sum(machine in handovers.able(id_) for id_ in handovers.awaiting)
        return sum(bool(self._lacks(id_) & stage) for id_ in self._held_by_model(machine)) + computed

    def _lacks(self, id_: int) -> int:
        """The stages of a held request's life for which no machine is ready, as bits."""
        handovers = self.handovers
        able = handovers.able(id_) if handovers.decodes(id_) else []
        found = 0 if self.ready(self._gate.hosting(id_)) else PREFILLS
        if able and handovers.needs_decoder_first(id_, able) and not self.ready(able):
            found |= DECODES
        return found

    def _can_be_served(self, id_: int) -> bool:
        """Whether a waiting request can ever be served: each stage left has a machine that has not failed for good."""
        handovers = self.handovers
        able = self._not_lost(handovers.able(id_)) if handovers.decodes(id_) else None
        if id_ in handovers.awaiting:
            return bool(able)
        firsts = self._not_lost(self._gate.hosting(id_))
        if any(handovers.role_of(machine) == "both" for machine in firsts):
            return True
        if able and handovers.is_short(id_, able):
            return True
        return bool(firsts) and (able is None or bool(able))

    def _not_lost(self, machines: Sequence[Machine]) -> list[Machine]:
        return [machine for machine in machines if not self._is_lost(machine)]

    # A machine stops.

    def is_needed(self, machine: Machine) -> bool:
        """Whether a request between machines needs *machine*."""
        return self.handovers.needs(machine)

    def _hand_on(self, index: int) -> None:
        machine, handovers = self.machines[index], self.handovers
        aborted = given_up(machine)
        interrupted = handovers.interrupt(machine)
        ids = [id_ for id_ in dict.fromkeys(self._abort(machine)) if id_ in interrupted.here]
        sent = self._survivors(ids, aborted) + self._survivors_between(interrupted)
        for id_ in sent:
            handovers.come_again(id_)
        if sent:
            self.send_again(sent)

    def _survivors_between(self, interrupted: Interrupted) -> list[int]:
        """Requests between a stopping machine and another that are routed again; the others are lost, or continue as they are."""
        self._counts["chosen_again"] += interrupted.chosen_again + len(interrupted.unharmed)
        sent: list[int] = []
        for id_ in interrupted.lent:
            self._discard(id_, sender_is_there=False)
            if self._goes_on(id_):
                sent.append(id_)
        for id_ in interrupted.on_link:
            # The machine that computed it has its KV still.
            stays = self._spec.in_flight == "resume" and not self._too_often(id_)
            if not stays:
                self._discard(id_, sender_is_there=True)
            if self._goes_on(id_):
                if stays:
                    self.handovers.choose_anew(id_)
                else:
                    sent.append(id_)
        return sent + interrupted.unharmed

    def _discard(self, id_: int, *, sender_is_there: bool) -> None:
        """Give up the KV of a request between machines."""
        self._counts["discarded_tokens"] += self.handovers.give_up_kv(id_, sender_is_there=sender_is_there)

    # Counts.

    def _roles(self) -> list[str]:
        return [self.handovers.role_of(machine) for machine in self.machines]

    def _first_token_by(self, id_: int) -> list[int]:
        """Numbers of the engine cores of both stages: each has its part in the first token."""
        prefilled_by = self.handovers.prefill_replica[id_]
        return super()._first_token_by(id_) + ([prefilled_by] if prefilled_by >= 0 else [])

    def _tokens_of(self, id_: int) -> int:
        """Output tokens that the decoding pool counts, without those of prefill."""
        return super()._tokens_of(id_) - (self.handovers.least_left if self.handovers.prefill_replica[id_] >= 0 else 0)
