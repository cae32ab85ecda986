"""Disaggregated prefill: requests whose prompt one machine computes and another one decodes.

A request is routed to a machine that computes its prompt, which then holds the KV blocks; another machine takes room for them; they
cross the link between the two; the first frees its blocks, and the second decodes from there. With `room: before_prefill` the
second takes room before the first has the prompt. Requests wait for room first come, first served, and for the link.

With `room: before_prefill` memory is taken in one order, that of the machine that decodes before that of the machine that computes:
no request waits for the former while it holds some of the latter, so that requests never wait for each other in a circle. Where the
decode machine of a computed prompt stops, the prompt takes room at another one at once, or its KV is freed and it is computed
again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import numpy as np

from sim.engine.disaggregation.course import HEARD_AFTER_NS, Course, Interrupted, Messages, Present, requests_at
from sim.engine.disaggregation.handover import Handover, KvLinks
from sim.engine.gateway.gateway import Gateway
from sim.engine.machine.any_machine import AnyMachine
from sim.engine.machine.machine import Machine
from sim.engine.record.columns import ABORTED, DEVICE, HAND_OVER, UNFINISHED, sent_bytes
from sim.engine.requests.state import RequestState
from sim.engine.serve.engine_core import EngineCore
from sim.engine.serve.kv_connector import COLLECT, LAND
from sim.engine.spec.roles import DECODE, PREFILL, HandoverSpec
from sim.engine.tiers.links import Link, Links, Transfer
from sim.engine.time.events import Clock

_ARRIVED: Final = 0
_GONE: Final = 1
_ROOM: Final = 2
_PREFILLED: Final = 3
_NO_ROOM: Final = 4

_TIMES: Final = ("prefilled_ns", "room_ns", "sent_ns", "landed_ns", "joined_ns")


class Rejects(Protocol):
    """The cluster, as it hears of requests between machines."""

    def rejected(self, id_: int, reason: str, /) -> None: ...

    def first_token_elsewhere(self, id_: int, at_ns: int, /) -> None:
        """A request has its first token, from the machine that computed its prompt."""
        ...


class Handovers(Course[Machine]):
    """Requests between the machine that computes their prompt and the one that decodes them."""

    def __init__(
        self, spec: HandoverSpec, machines: Sequence[Machine], gates: Sequence[Gateway[Machine]], state: RequestState,
        clock: Clock, outside: Rejects, links: Links,
    ) -> None:  # fmt: skip
        """*gates* route to the machines of each stage."""
        entry, self._gate = gates
        super().__init__(entry, state)
        self.stages = spec.stages
        self._spec = spec
        self._clock = clock
        self._outside = outside
        self._links = KvLinks(spec, links)
        self.ongoing: dict[int, Handover] = {}
        """Requests between machines, or whose receiver is chosen, by id."""
        self._messages = Messages(clock, self._hear)
        """Messages to machines, with the number of the handover or of the prompt's computation that they are about."""
        self._n_handovers = 0
        self._at = {name: state.column("q", -1) for name in _TIMES}
        self.passages = state.column("i")
        """Times that a request's prompt was given up, computed for another machine or to be."""
        self.n_computed = state.column("i")
        """Times that it was computed."""
        self._found = state.column("q")
        self.prefill_replica = state.column("i", -1)
        self._lenders = [(machine, core) for machine in machines for core in machine.cores]
        self._kinds: dict[int, dict[int, list[tuple[Machine, EngineCore]]]] = {}
        """The machines that decode each model, grouped by equal memory."""
        self._able: dict[tuple[int, ...], list[Machine]] = {}
        """Those without the kinds that could not hold a request, by the model and these kinds."""
        self.least_left = 0 if spec.first_token == "decode" else 1
        """Tokens that prefill gives."""
        for machine in machines:
            for core in machine.cores:
                core.sequences.connector.joined_ns = self._at["joined_ns"]

    # Arrival.

    def come(self, id_: int) -> None:
        if id_ in self.awaiting:
            del self.awaiting[id_]
            self._on_prefilled(id_)
            return
        spec, state, present = self._spec, self._state, self.present
        if state.carried is not None:
            state.carried[id_] = state.output[id_] - state.left[id_]
        # A request with no more tokens than prefill emits has nothing to decode.
        able = self.able(id_) if self.decodes(id_) else []
        hosting = self._entry.hosting(id_)
        firsts, seconds = hosting, able
        if present is not None:
            firsts, seconds = _ready_for(spec, present, hosting, able)
            may_stay = bool(seconds) and spec.local_tokens > 0
            if not firsts and not may_stay and (hosting or self.is_short(id_, able)):
                present.hold(id_)
                return
        receiver = None
        if spec.chosen_at_arrival and seconds:
            receiver = self._gate.choose(id_, seconds)
            if receiver is None:
                return
            if self._stays(id_, receiver):
                self._took(id_, receiver, DECODE)
                receiver.deliver(id_)
                return
        if present is not None and hosting and not firsts:
            present.hold(id_)
            return
        sender = self._entry.choose(id_, firsts)
        if sender is not None:
            self._come_to(id_, sender, receiver, able)

    def _come_to(self, id_: int, sender: Machine, receiver: Machine | None, able: Sequence[Machine]) -> None:
        """Have *sender* compute the prompt; *receiver* decodes, where one has been chosen among those *able* to."""
        spec = self._spec
        self._took(id_, sender, PREFILL)
        if spec.roles[sender.index] == "both" or not self.decodes(id_):
            sender.deliver(id_)
            return
        core = sender.core_of(self._model(id_))
        if not able:
            self._state.replica[id_] = core.number
            self._outside.rejected(id_, self._never(id_))
            return
        if receiver is not None:
            self._took(id_, receiver, DECODE)
            self.ongoing[id_] = self._handover(id_, receiver, sender)
        if spec.room == "after_prefill":
            if receiver is not None:
                self.ongoing[id_].deliver()
            sender.deliver(id_)
            return
        if core.sequences.refusal(id_) is not None:
            # The sender says why.
            self.ongoing.pop(id_).end()
            sender.deliver(id_)
            return
        handover = self.ongoing[id_]
        handover.ask(id_)
        assert handover.keeper is not None
        self._state.replica[id_] = handover.keeper.number

    def decodes(self, id_: int) -> bool:
        """Whether anything is left to decode when the prompt has been computed."""
        return self._state.left[id_] > self.least_left

    def is_short(self, id_: int, able: Sequence[Machine]) -> bool:
        """Whether a prompt stays with the machine that decodes it, whatever that has cached."""
        return bool(able) and self._state.to_hand(id_) <= self._spec.local_tokens

    def _handover(self, id_: int, receiver: Machine, sender: Machine) -> Handover:
        self._n_handovers += 1
        return Handover(self._n_handovers, receiver, sender, self._state.to_hand(id_))

    def _model(self, id_: int) -> int:
        return 0 if self._state.model is None else self._state.model[id_]

    def able(self, id_: int) -> list[Machine]:
        """Machines that can decode the request, since their memory could hold it."""
        model, hosting = self._model(id_), self._gate.hosting(id_)
        kinds = self._kinds.get(model)
        if kinds is None:
            kinds = self._kinds[model] = {}
            for machine in hosting:
                core = machine.core_of(model)
                kinds.setdefault(id(core.spec), []).append((machine, core))
        refusing = [kind for kind, each in kinds.items() if each[0][1].sequences.refusal(id_) is not None]
        if not refusing:
            return hosting
        able = self._able.get((model, *refusing))
        if able is None:
            gone = {machine for kind in refusing for machine, _ in kinds[kind]}
            able = self._able[model, *refusing] = [machine for machine in hosting if machine not in gone]
        return able

    # Messages from machines.

    def prefilled(self, id_: int, end_ns: int) -> None:
        """A prompt has been computed, and its first token."""
        state = self._state
        self._at["prefilled_ns"][id_] = end_ns
        self.prefill_replica[id_] = state.replica[id_]
        self.n_computed[id_] += 1
        if self._entry.routing is not None:
            self._entry.routing.leave(id_)
        if self._spec.first_token == "prefill":
            if state.first_token[id_] < 0:
                state.first_token[id_] = end_ns
            self._outside.first_token_elsewhere(id_, end_ns)
        if self.present is not None:
            self.present.computed(self._lenders[state.replica[id_]][0], self.least_left)
        self._messages.later(end_ns + HEARD_AFTER_NS, _PREFILLED, id_, self.passages[id_])

    def ended(self, id_: int, now_ns: int) -> None:
        if id_ in self.ongoing:
            self._messages.later(now_ns + HEARD_AFTER_NS, _GONE, id_, 0)

    def has_room(self, id_: int, now_ns: int, found_tokens: int, number: int) -> None:
        """The receiver has taken room, where it has *found_tokens* tokens already, for the handover with that number."""
        handover = self.ongoing.get(id_)
        if handover is None or handover.number != number:
            # Its client has gone, or its sender, which a plan made ahead does not know yet; the room is freed when one does.
            return
        self._at["room_ns"][id_] = now_ns
        handover.has_room, handover.found = True, found_tokens
        self._messages.later(now_ns + HEARD_AFTER_NS, _ROOM, id_, number)

    def no_room(self, id_: int, now_ns: int, number: int) -> None:
        """The receiver has looked for the first time for room for the handover with that number, and found none yet."""
        handover = self.ongoing.get(id_)
        if handover is not None and handover.number == number and handover.late:
            self._messages.later(now_ns + HEARD_AFTER_NS, _NO_ROOM, id_, number)

    # Messages to machines, a nanosecond later.

    def _hear(self, what: int, id_: int, which: int) -> None:
        if what == _PREFILLED:
            if which == self.passages[id_]:
                self._on_prefilled(id_)
        elif what == _GONE:
            if id_ in self.ongoing:
                self._end(id_)
        elif id_ in self.ongoing and self.ongoing[id_].number == which:
            if what == _ROOM:
                self._on_room(id_)
            elif what == _ARRIVED:
                self._on_arrived(id_)
            elif not self.ongoing[id_].has_room:
                self._on_no_room(id_)

    def _on_prefilled(self, id_: int) -> None:
        if self._state.status[id_] != UNFINISHED:
            # Its client has gone meanwhile.
            self._collect(id_)
            return
        handover = self.ongoing.get(id_)
        if handover is None:
            handover = self._decoder_for(id_)
            if handover is None:
                return
        handover.lender = self._lenders[self.prefill_replica[id_]][1]
        handover.computed = True
        handover.deliver()
        if handover.has_room:
            self._send(id_, handover)
        elif handover.keeper is None:
            handover.ask(id_)

    def _decoder_for(self, id_: int) -> Handover | None:
        """Choose the machine that decodes a computed prompt; None where there is none now."""
        late = self._spec.room == "before_prefill"
        able = self.able(id_)
        if self.present is not None:
            able = self.present.ready(able)
            if not able and late:
                self._compute_again(id_)
                return None
            if not able:
                self._await(id_)
                return None
        receiver = self._gate.choose(id_, able)
        if receiver is None:
            self._collect(id_)
            return None
        self._took(id_, receiver, DECODE)
        handover = self.ongoing[id_] = self._handover(id_, receiver, self._lenders[self.prefill_replica[id_]][0])
        handover.late = late
        return handover

    def _await(self, id_: int) -> None:
        """Hold a request with a computed prompt until a machine that decodes is ready."""
        assert self.present is not None
        self.awaiting[id_] = None
        if not self.present.hold(id_):
            self._discard(id_, sender_is_there=True)

    def _collect(self, id_: int) -> None:
        """The machine that computed a prompt may give its blocks back."""
        sender, lender = self._lenders[self.prefill_replica[id_]]
        sender.post(lender, id_, COLLECT)
        self._needs_no_more(sender)

    def _needs_no_more(self, *machines: Machine) -> None:
        if self.present is not None:
            for machine in machines:
                self.present.perhaps_empty(machine)

    def _on_room(self, id_: int) -> None:
        handover = self.ongoing.get(id_)
        if handover is None or self._state.status[id_] != UNFINISHED:
            return
        if self._at["prefilled_ns"][id_] < 0:
            handover.deliver()
            handover.sender.deliver(id_)
        else:
            self._send(id_, handover)

    def _on_arrived(self, id_: int) -> None:
        now_ns, state = self._clock.now_ns, self._state
        handover = self.ongoing.pop(id_)
        assert handover.keeper is not None
        handover.collect(id_)
        self._needs_no_more(handover.sender, handover.receiver)
        if state.status[id_] != UNFINISHED:
            handover.drop(id_)
            return
        self._at["landed_ns"][id_] = now_ns
        tokens = state.to_hand(id_)
        first_token = self._spec.first_token
        if first_token == "decode":
            # The last token is computed again.
            tokens -= 1
            state.recomputed[id_] += 1
        elif first_token == "arrival":
            if state.first_token[id_] < 0:
                state.first_token[id_] = now_ns
            else:
                handover.keeper.recorder.resumed_gaps_ns.append(now_ns - state.token_ns[id_])
            state.token_ns[id_] = now_ns
            self._outside.first_token_elsewhere(id_, now_ns)
        state.replica[id_] = handover.keeper.number
        handover.receiver.post(handover.keeper, id_, LAND, tokens)

    def _stays(self, id_: int, receiver: Machine) -> bool:
        """Whether the machine that decodes computes the prompt as well, which is short or most of which it has."""
        local = self._spec.local_tokens
        if not local:
            return False
        prompt = self._state.to_hand(id_)
        return prompt <= local or prompt - receiver.found_tokens(self._gate.request(id_)) <= local

    def _never(self, id_: int) -> str:
        machines = self._gate.hosting(id_)
        if not machines:
            return "no machine decodes for the model"
        return f"to decode it, {machines[0].core_of(self._model(id_)).sequences.refusal(id_)}"

    def _on_no_room(self, id_: int) -> None:
        self._end(id_)
        self._compute_again(id_)

    def _send(self, id_: int, handover: Handover) -> None:
        """Send the KV of a request whose prompt is computed and whose receiver has room."""
        now_ns, state = self._clock.now_ns, self._state
        sender, receiver = handover.sender, handover.receiver
        handover.sends = True
        path = self._links.path(sender, receiver)
        tokens = state.to_hand(id_) - handover.found
        n_bytes = path.n_bytes(tokens)
        self._found[id_] = handover.found
        arrived_ns = now_ns
        if n_bytes:
            since_ns, last_bytes = None, 0
            came_once = not state.preemptions[id_] and not (state.again is not None and state.again[id_])
            if path.layers > 1 and came_once and not handover.late:
                begun_ns = state.scheduled[id_]
                since_ns = begun_ns + (self._at["prefilled_ns"][id_] - begun_ns) // path.layers
                last_bytes = -(-n_bytes // path.layers)
            link = self._links.between(sender, receiver)
            transfer = link.send(now_ns, n_bytes, since_ns=since_ns, last_bytes=last_bytes)
            handover.carrier = link, transfer
            self._at["sent_ns"][id_] = max(transfer.begin_ns, now_ns)
            arrived_ns = transfer.arrived_ns + round(n_bytes * path.repack_s_per_byte * 1e9)
            assert handover.lender is not None
            assert handover.keeper is not None
            handover.lender.recorder.add_transfer(
                HAND_OVER, id_, n_bytes, (*transfer.times[:3], arrived_ns),
                (DEVICE, handover.lender.number), (DEVICE, handover.keeper.number),
            )  # fmt: skip
        else:
            self._at["sent_ns"][id_] = now_ns
        self._messages.later(arrived_ns, _ARRIVED, id_, handover.number)

    # Aborts.

    def give_up(self, id_: int) -> bool:
        state = self._state
        handover = self.ongoing.get(id_)
        prefilled = self._at["prefilled_ns"][id_] >= 0
        if prefilled and self._at["landed_ns"][id_] < 0:
            state.status[id_] = ABORTED
            if id_ in self.awaiting:
                del self.awaiting[id_]
                self._collect(id_)
            if handover is not None and not handover.sends:
                # A transfer that has started is completed.
                self._end(id_)
                if handover.computed:
                    handover.collect(id_)
            return True
        if handover is None or prefilled:
            return False
        self._end(id_)
        sender = handover.sender.cores
        if self._spec.room == "after_prefill" or sender[0].number <= state.replica[id_] <= sender[-1].number:
            return False
        state.status[id_] = ABORTED
        return True

    def _end(self, id_: int) -> None:
        """End what is between two machines for a request; the receiver frees its blocks, if it was asked for any."""
        handover = self.ongoing.pop(id_)
        handover.end()
        handover.drop(id_)
        self._needs_no_more(handover.sender, handover.receiver)

    # Machines that stop.

    def interrupt(self, machine: AnyMachine, keeps_kv: Callable[[int], bool]) -> Interrupted:
        state, now_ns = self._state, self._clock.now_ns
        found = Interrupted(requests_at(machine))
        cancelled: list[tuple[Link, Transfer]] = []
        for id_, handover in list(self.ongoing.items()):
            if handover.sender is machine:
                if not handover.delivered and state.status[id_] == UNFINISHED:
                    found.unharmed.append(id_)
                self._end(id_)
            elif handover.receiver is machine:
                if handover.carrier is not None:
                    cancelled.append(handover.carrier)
                self._lose_receiver(id_, handover, found, keeps_kv)
        lent = [id_ for id_ in _lent(machine) if self._is_between(id_, machine) and state.status[id_] == UNFINISHED]
        for id_ in lent:
            self._discard(id_, sender_is_there=False)
        found.lost_kv = lent + found.lost_kv
        for id_ in _lent(machine):
            # Messages about it are dropped from now on, aborts too.
            self.passages[id_] += 1
        # The last first: the place behind a cancelled transfer becomes free with it.
        for link, transfer in sorted(cancelled, key=lambda each: each[1].sent_ns, reverse=True):
            link.cancel(transfer, now_ns)
        self._links.stop(machine, now_ns)
        return found

    def _lose_receiver(self, id_: int, handover: Handover, found: Interrupted, keeps_kv: Callable[[int], bool]) -> None:
        del self.ongoing[id_]
        delivered, goes_on = handover.delivered, self._state.status[id_] == UNFINISHED
        handover.end()
        self._needs_no_more(handover.sender)
        if handover.sends and not goes_on:
            handover.collect(id_)
        elif handover.sends and keeps_kv(id_):
            found.kept_kv.append(id_)
            self._choose_anew(id_)
        elif handover.sends:
            found.lost_kv.append(id_)
            self._discard(id_, sender_is_there=True)
        elif delivered:
            found.chosen_again += 1
            if handover.computed:
                self._choose_anew(id_)
        elif goes_on:
            found.unharmed.append(id_)

    def _is_between(self, id_: int, sender: AnyMachine | None = None) -> bool:
        """Whether the KV of a request is with the machine that computed it, *sender* where that is given, and has not arrived."""
        number = self.prefill_replica[id_]
        if self._at["prefilled_ns"][id_] < 0 or self._at["landed_ns"][id_] >= 0:
            return False
        return sender is None or self._lenders[number][0] is sender

    def places(self, id_: int) -> int:
        handover = self.ongoing.get(id_)
        # Or it waits for room before its prompt is computed.
        return self._is_between(id_) + (handover is not None and not handover.delivered)

    def needs(self, machine: AnyMachine) -> bool:
        return any(
            handover.sender is machine or handover.receiver is machine for handover in self.ongoing.values()
        ) or any(self._state.status[id_] == UNFINISHED and self._is_between(id_, machine) for id_ in _lent(machine))

    def _choose_anew(self, id_: int) -> None:
        """Choose another machine that decodes for a request whose prompt has been computed."""
        for name in ("room_ns", "sent_ns"):
            self._at[name][id_] = -1
        self._messages.later(self._clock.now_ns + HEARD_AFTER_NS, _PREFILLED, id_, self.passages[id_])

    def _discard(self, id_: int, *, sender_is_there: bool) -> None:
        """Give up the KV of a request between machines, and with it a token that its client never got, if any."""
        assert self.present is not None
        state = self._state
        self.awaiting.pop(id_, None)
        state.recomputed[id_] += state.to_hand(id_)
        if sender_is_there:
            self._collect(id_)
        if self._spec.first_token == "arrival":
            state.left[id_] += 1
            self.present.discarded(1)

    def _compute_again(self, id_: int) -> None:
        """Send a request with a computed prompt again, without its KV; it has not failed."""
        self._discard(id_, sender_is_there=True)
        assert self.present is not None
        assert self._state.again is not None
        self._state.again[id_] = 1
        self.come_again(id_)
        self.present.send_again([id_])

    def come_again(self, id_: int) -> None:
        # Earlier messages about it are dropped.
        self.passages[id_] += 1
        for column in self._at.values():
            column[id_] = -1
        self.prefill_replica[id_] = -1

    # Questions of the fleet.

    def role_of(self, machine: AnyMachine) -> str:
        return self._spec.roles[machine.index]

    def wanted(self, id_: int) -> list[tuple[str, Sequence[AnyMachine]]]:
        able = self.able(id_) if self.decodes(id_) else []
        if id_ in self.awaiting:
            return [(DECODE, able)]
        found: list[tuple[str, Sequence[AnyMachine]]] = [(PREFILL, self._entry.hosting(id_))]
        if able and (self._spec.room == "before_prefill" or self.is_short(id_, able)):
            # It cannot begin before one of these is ready.
            found.append((DECODE, able))
        return found

    def ways(self, id_: int) -> list[list[Sequence[AnyMachine]]]:
        decodes = self.decodes(id_)
        able = self.able(id_) if decodes else []
        if id_ in self.awaiting:
            return [[able]]
        firsts = self._entry.hosting(id_)
        whole = [machine for machine in firsts if self.role_of(machine) == "both"]
        short: list[list[Sequence[AnyMachine]]] = [[able]] if self.is_short(id_, able) else []
        return [[whole], *short, [firsts, able] if decodes else [firsts]]

    def first_token_by(self, id_: int) -> list[int]:
        prefilled_by = self.prefill_replica[id_]
        return super().first_token_by(id_) + ([prefilled_by] if prefilled_by >= 0 else [])

    def last_tokens(self, id_: int) -> int:
        return super().last_tokens(id_) - (self.least_left if self.prefill_replica[id_] >= 0 else 0)

    # The columns.

    def columns(self) -> dict[str, Any]:
        times = {name: np.frombuffer(values, np.int64) for name, values in self._at.items()}
        return {
            "prefill_replica": np.frombuffer(self.prefill_replica, np.int32),
            **times,
            "sent_bytes": sent_bytes(
                (core.recorder.transfers.array() for _, core in self._lenders), len(self.prefill_replica)
            ),
            "found_at_decode_tokens": np.frombuffer(self._found, np.int64),
            **({} if self.present is None else {"prompts_computed": np.frombuffer(self.n_computed, np.int32)}),
        }

    def facts(self) -> dict[str, Any]:
        return {"links": self._links.facts()}


def _ready_for(
    spec: HandoverSpec, present: Present, firsts: Sequence[Machine], able: Sequence[Machine]
) -> tuple[list[Machine], list[Machine]]:
    """The ready machines of *firsts*, which compute the prompt, and of *able*, which decode it; where room is taken first and no
    machine decodes, those of the first that do both."""
    ready, seconds = present.ready(firsts), present.ready(able)
    if able and not seconds and spec.room == "before_prefill":
        ready = [machine for machine in ready if spec.roles[machine.index] == "both"]
    return ready, seconds


def _lent(machine: AnyMachine) -> list[int]:
    return [id_ for core in machine.cores for id_ in core.sequences.connector.machines.lent]
