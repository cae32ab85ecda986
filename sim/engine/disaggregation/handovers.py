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

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, Final, Protocol

import numpy as np

from sim.engine.disaggregation.handover import Handover, KvLinks
from sim.engine.gateway.gateway import Gateway
from sim.engine.machine.machine import Machine
from sim.engine.record.columns import ABORTED, DEVICE, HAND_OVER, UNFINISHED, sent_bytes
from sim.engine.requests.state import RequestState
from sim.engine.serve.engine_core import EngineCore
from sim.engine.serve.kv_connector import COLLECT, LAND
from sim.engine.spec.roles import HandoverSpec, Role
from sim.engine.tiers.links import Link, Links, Transfer
from sim.engine.time.events import HANDOVERS, Alarm, Clock

_ARRIVED: Final = 0
_GONE: Final = 1
_ROOM: Final = 2
_PREFILLED: Final = 3
_NO_ROOM: Final = 4

HEARD_AFTER_NS: Final = 1
"""Messages from one machine reach another this much later; see `sim.engine.simulation.cluster.FELT_AFTER_NS`."""

_TIMES: Final = ("prefilled_ns", "room_ns", "sent_ns", "landed_ns", "joined_ns")


class Rejects(Protocol):
    """The cluster, as it hears of requests between machines."""

    def rejected(self, id_: int, reason: str, /) -> None: ...

    def first_token_elsewhere(self, id_: int, at_ns: int, /) -> None:
        """A request has its first token, from the machine that computed its prompt."""
        ...


class Present(Protocol):
    """The fleet, where machines start and stop: it says which are ready, and hears of requests."""

    def ready(self, machines: Sequence[Machine], /) -> list[Machine]: ...

    def took(self, id_: int, machines: Sequence[Machine], stage: int, /) -> None:
        """A request has reached one of *machines* for a stage of its life, or would have."""
        ...

    def hold(self, id_: int, /) -> None:
        """Hold a request for which no machine is ready until one is, or lose it."""
        ...

    def hold_computed(self, id_: int, /) -> bool:
        """Whether a request with a computed prompt waits for a machine that decodes; else it is lost."""
        ...

    def computed(self, machine: Machine, /) -> None:
        """A prompt that is decoded elsewhere has been computed."""
        ...

    def compute_again(self, id_: int, /) -> None:
        """A computed prompt's KV is freed, and its request is routed anew."""
        ...

    def perhaps_empty(self, machine: Machine, /) -> None:
        """A request between machines needs *machine* no more."""
        ...


PREFILLS: Final = 1
DECODES: Final = 2
"""Stages of a request's life, as bits."""


@dataclass(slots=True)
class Interrupted:
    """The requests that had to do with a machine that stops."""

    here: set[int]
    """Requests that are queued, loading, landing or running there."""
    lent: list[int] = field(default_factory=list[int])
    """Requests whose prompt it has computed and whose KV has not arrived elsewhere."""
    on_link: list[int] = field(default_factory=list[int])
    """Requests whose KV is on its way to it from a machine that still has it."""
    unharmed: list[int] = field(default_factory=list[int])
    """Requests that wait for room before anything is computed: they are routed again and have lost nothing."""
    chosen_again: int = 0
    """Requests for which another machine that decodes is chosen: their prompt is computed, or on its way to be, elsewhere."""


class Handovers:
    """Requests between the machine that computes their prompt and the one that decodes them."""

    def __init__(
        self, spec: HandoverSpec, machines: Sequence[Machine], entry: Gateway, gate: Gateway, state: RequestState,
        clock: Clock, outside: Rejects, links: Links,
    ) -> None:  # fmt: skip
        """*entry* routes to machines that compute prompts, *gate* to those that decode them."""
        self._spec = spec
        self._entry = entry
        self._gate = gate
        self._state = state
        self._clock = clock
        self._outside = outside
        self._machines = machines
        self._links = KvLinks(spec, links)
        self.ongoing: dict[int, Handover] = {}
        """Requests between machines, or whose receiver is chosen, by id."""
        self._alarm = Alarm(clock, HANDOVERS, self._on_news)
        self._due: list[tuple[int, int, int, int]] = []
        """Messages to machines: instant, kind, request, and number of the handover or of the prompt's computation, since messages
        of one that is over are dropped. Messages of one instant are read in this order."""
        self._n_handovers = 0
        self.present: Present | None = None
        """The fleet, which knows the ready machines; None: all are."""
        self.awaiting: dict[int, None] = {}
        """Requests with a computed prompt for which no machine that decodes is ready, the longest wait first."""
        self._set_to = -1
        n = len(state.prompt)
        self._at: dict[str, array[int]] = {name: array("q", [-1]) * n for name in _TIMES}
        self.passages = array("i", bytes(4 * n))
        """Times that a request's prompt was given up, computed for another machine or to be."""
        self.n_computed = array("i", bytes(4 * n))
        """Times that it was computed."""
        self._found = array("q", bytes(8 * n))
        self.prefill_replica: array[int] = array("i", [-1]) * n
        self._lenders = [(machine, core) for machine in machines for core in machine.cores]
        self._kinds: dict[int, dict[int, list[tuple[Machine, EngineCore]]]] = {}
        """The machines that decode each model, grouped by equal memory."""
        self.least_left = 0 if spec.first_token == "decode" else 1
        """Tokens that prefill gives."""
        for machine in machines:
            for core in machine.cores:
                core.sequences.connector.joined_ns = self._at["joined_ns"]

    def clear(self) -> None:
        """Forget all requests."""
        for column, _ in self._columns():
            del column[:]
        self._gate.clear()

    def add(self, model: int, session: int) -> None:
        """Add a request after all others."""
        for column, blank in self._columns():
            column.append(blank)
        self._gate.add(model, session)

    def _columns(self) -> list[tuple[array[int], int]]:
        """Each column of requests, and its value for a request of which nothing is known yet."""
        times = [(values, -1) for values in self._at.values()]
        counts = (self._found, self.passages, self.n_computed)
        return [*times, (self.prefill_replica, -1), *((values, 0) for values in counts)]

    # Arrival.

    def come(self, id_: int) -> None:
        """Route a request that has passed the front end, or is routed again."""
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
                self._took(id_, receiver, DECODES)
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
        self._took(id_, sender, PREFILLS)
        if spec.roles[sender.index] == "both" or not self.decodes(id_):
            sender.deliver(id_)
            return
        core = sender.core_of(self._model(id_))
        if not able:
            self._state.replica[id_] = core.number
            self._outside.rejected(id_, self._never(id_))
            return
        if receiver is not None:
            self._took(id_, receiver, DECODES)
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

    def role_of(self, machine: Machine) -> Role:
        return self._spec.roles[machine.index]

    def decodes(self, id_: int) -> bool:
        """Whether anything is left to decode when the prompt has been computed."""
        return self._state.left[id_] > self.least_left

    def is_short(self, id_: int, able: Sequence[Machine]) -> bool:
        """Whether a prompt stays with the machine that decodes it, whatever that has cached."""
        return bool(able) and self._state.to_hand(id_) <= self._spec.local_tokens

    def needs_decoder_first(self, id_: int, able: Sequence[Machine]) -> bool:
        """Whether a request cannot begin before one of the machines *able* to decode it is ready."""
        return self._spec.room == "before_prefill" or self.is_short(id_, able)

    def _handover(self, id_: int, receiver: Machine, sender: Machine) -> Handover:
        self._n_handovers += 1
        return Handover(self._n_handovers, receiver, sender, self._state.to_hand(id_))

    def _took(self, id_: int, machine: Machine, stage: int) -> None:
        if self.present is not None:
            self.present.took(id_, (machine,), stage)

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
        gone = {machine for kind in refusing for machine, _ in kinds[kind]}
        return [machine for machine in hosting if machine not in gone]

    # Messages from machines.

    def prefilled(self, id_: int, end_ns: int) -> None:
        """A prompt has been computed, and its first token."""
        state = self._state
        self._at["prefilled_ns"][id_] = end_ns
        self.prefill_replica[id_] = state.replica[id_]
        self.n_computed[id_] += 1
        if self._spec.first_token == "prefill":
            if state.first_token[id_] < 0:
                state.first_token[id_] = end_ns
            self._outside.first_token_elsewhere(id_, end_ns)
        if self.present is not None:
            self.present.computed(self._lenders[state.replica[id_]][0])
        self._later(end_ns + HEARD_AFTER_NS, _PREFILLED, id_, self.passages[id_])

    def ended(self, id_: int, now_ns: int) -> None:
        """A request has ended on the machine that computes prompts, or been rejected there."""
        if id_ in self.ongoing:
            self._later(now_ns + HEARD_AFTER_NS, _GONE, id_, 0)

    def has_room(self, id_: int, now_ns: int, found_tokens: int, number: int) -> None:
        """The receiver has taken room, where it has *found_tokens* tokens already, for the handover with that number."""
        handover = self.ongoing.get(id_)
        if handover is None or handover.number != number:
            # Its client has gone, or its sender, which a plan made ahead does not know yet; the room is freed when one does.
            return
        self._at["room_ns"][id_] = now_ns
        handover.has_room, handover.found = True, found_tokens
        self._later(now_ns + HEARD_AFTER_NS, _ROOM, id_, number)

    def no_room(self, id_: int, now_ns: int, number: int) -> None:
        """The receiver has looked for the first time for room for the handover with that number, and found none yet."""
        handover = self.ongoing.get(id_)
        if handover is not None and handover.number == number and handover.late:
            self._later(now_ns + HEARD_AFTER_NS, _NO_ROOM, id_, number)

    # Messages to machines, a nanosecond later.

    def _later(self, at_ns: int, what: int, id_: int, which: int) -> None:
        heappush(self._due, (at_ns, what, id_, which))
        if self._due[0][0] != self._set_to:
            self._set_to = self._due[0][0]
            self._alarm.set(self._set_to)

    def _on_news(self, _event: object) -> None:
        due, now_ns = self._due, self._clock.now_ns
        # While it runs nothing needs to be set.
        self._set_to = now_ns
        while due and due[0][0] <= now_ns:
            _, what, id_, which = heappop(due)
            self._hear(what, id_, which)
        self._set_to = -1
        if due:
            self._set_to = due[0][0]
            self._alarm.set(self._set_to)

    def _hear(self, what: int, id_: int, which: int) -> None:
        if what == _PREFILLED:
            if which == self.passages[id_]:
                self._on_prefilled(id_)
        elif what == _GONE:
            gone = self.ongoing.pop(id_, None)
            if gone is not None:
                gone.end()
                gone.drop(id_)
                self._needs_no_more(gone.sender, gone.receiver)
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
        # If all are of one kind, they were found able at its arrival.
        one_kind = len(self._kinds[self._model(id_)]) == 1
        able = None if one_kind and self.present is None else self.able(id_)
        if self.present is not None and able is not None:
            able = self.present.ready(able)
            if not able and late:
                self.present.compute_again(id_)
                return None
            if not able:
                self._await(id_)
                return None
        receiver = self._gate.choose(id_, able)
        if receiver is None:
            self._collect(id_)
            return None
        self._took(id_, receiver, DECODES)
        handover = self.ongoing[id_] = self._handover(id_, receiver, self._lenders[self.prefill_replica[id_]][0])
        handover.late = late
        return handover

    def _await(self, id_: int) -> None:
        """Hold a request with a computed prompt until a machine that decodes is ready."""
        assert self.present is not None
        self.awaiting[id_] = None
        if not self.present.hold_computed(id_):
            self.awaiting.pop(id_, None)

    def _collect(self, id_: int) -> None:
        """The machine that computed a prompt may give its blocks back."""
        sender, lender = self._lenders[self.prefill_replica[id_]]
        sender.post(lender, id_, COLLECT)
        self._needs_no_more(sender)

    def choose_again(self, id_: int) -> None:
        """Look again for a machine that decodes a request that awaits one."""
        del self.awaiting[id_]
        self._on_prefilled(id_)

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
        handover = self.ongoing.pop(id_)
        handover.end()
        handover.drop(id_)
        self._needs_no_more(handover.receiver)
        assert self.present is not None
        self.present.compute_again(id_)

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
        self._later(arrived_ns, _ARRIVED, id_, handover.number)

    # Aborts.

    def give_up(self, id_: int) -> bool:
        """Abort a request whose client has gone; False where it is at a machine, which has to abort it."""
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
                self.ongoing.pop(id_).end()
                handover.drop(id_)
                if handover.computed:
                    handover.collect(id_)
                self._needs_no_more(handover.sender, handover.receiver)
            return True
        if handover is None or prefilled:
            return False
        if self._spec.room == "after_prefill":
            # Its receiver was chosen and has no message of it.
            self.ongoing.pop(id_).end()
            self._needs_no_more(handover.receiver)
            return False
        self.ongoing.pop(id_).end()
        handover.drop(id_)
        self._needs_no_more(handover.sender, handover.receiver)
        if handover.sender.cores[0].number <= state.replica[id_] <= handover.sender.cores[-1].number:
            return False
        state.status[id_] = ABORTED
        return True

    # Machines that stop.

    def interrupt(self, machine: Machine) -> Interrupted:
        """End everything between *machine*, which stops, and others, before its state is lost."""
        state, now_ns = self._state, self._clock.now_ns
        found = Interrupted(_requests_at(machine))
        cancelled: list[tuple[Link, Transfer]] = []
        for id_, handover in list(self.ongoing.items()):
            if handover.sender is machine:
                self._lose_sender(id_, handover, found)
            elif handover.receiver is machine:
                if handover.carrier is not None:
                    cancelled.append(handover.carrier)
                self._lose_receiver(id_, handover, found)
        found.lent = [
            id_ for id_ in _lent(machine) if self.is_between(id_, machine) and state.status[id_] == UNFINISHED
        ]
        for id_ in _lent(machine):
            # Messages about it are dropped from now on, aborts too.
            self.passages[id_] += 1
        # The last first: the place behind a cancelled transfer becomes free with it.
        for link, transfer in sorted(cancelled, key=lambda each: each[1].sent_ns, reverse=True):
            link.cancel(transfer, now_ns)
        self._links.stop(machine, now_ns)
        return found

    def _lose_sender(self, id_: int, handover: Handover, found: Interrupted) -> None:
        del self.ongoing[id_]
        delivered = handover.delivered
        handover.end()
        handover.drop(id_)
        self._needs_no_more(handover.receiver)
        if not delivered and self._state.status[id_] == UNFINISHED:
            found.unharmed.append(id_)

    def _lose_receiver(self, id_: int, handover: Handover, found: Interrupted) -> None:
        del self.ongoing[id_]
        delivered, goes_on = handover.delivered, self._state.status[id_] == UNFINISHED
        handover.end()
        self._needs_no_more(handover.sender)
        if handover.sends and not goes_on:
            handover.collect(id_)
        elif handover.sends:
            found.on_link.append(id_)
        elif delivered:
            found.chosen_again += 1
            if handover.computed:
                self.choose_anew(id_)
        elif goes_on:
            found.unharmed.append(id_)

    def is_between(self, id_: int, sender: Machine | None = None) -> bool:
        """Whether the KV of a request is with the machine that computed it, *sender* where that is given, and has not arrived."""
        number = self.prefill_replica[id_]
        if self._at["prefilled_ns"][id_] < 0 or self._at["landed_ns"][id_] >= 0:
            return False
        return sender is None or self._lenders[number][0] is sender

    def waits_for_room(self, id_: int) -> bool:
        """Whether a request waits for room before its prompt is computed."""
        handover = self.ongoing.get(id_)
        return handover is not None and not handover.delivered

    def needs(self, machine: Machine) -> bool:
        """Whether any request between machines needs *machine*."""
        return any(
            handover.sender is machine or handover.receiver is machine for handover in self.ongoing.values()
        ) or any(self._state.status[id_] == UNFINISHED and self.is_between(id_, machine) for id_ in _lent(machine))

    def choose_anew(self, id_: int) -> None:
        """Choose another machine that decodes for a request whose prompt has been computed."""
        for name in ("room_ns", "sent_ns"):
            self._at[name][id_] = -1
        self._later(self._clock.now_ns + HEARD_AFTER_NS, _PREFILLED, id_, self.passages[id_])

    def give_up_kv(self, id_: int, *, sender_is_there: bool) -> int:
        """Give up the KV of a request between machines; return the number of emitted tokens that its client never got."""
        state = self._state
        self.awaiting.pop(id_, None)
        state.recomputed[id_] += state.to_hand(id_)
        if sender_is_there:
            self._collect(id_)
        if self._spec.first_token != "arrival":
            return 0
        state.left[id_] += 1
        return 1

    def come_again(self, id_: int) -> None:
        """Begin anew with a request: earlier messages about it are dropped."""
        self.passages[id_] += 1
        for column in self._at.values():
            column[id_] = -1
        self.prefill_replica[id_] = -1

    # The columns.

    def columns(self) -> dict[str, Any]:
        """The columns of requests that disaggregation adds, by name."""
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

    def links(self) -> list[dict[str, int]]:
        """Each link that carried anything, as `KvLinks.facts`."""
        return self._links.facts()


def _ready_for(
    spec: HandoverSpec, present: Present, firsts: Sequence[Machine], able: Sequence[Machine]
) -> tuple[list[Machine], list[Machine]]:
    """The ready machines of *firsts*, which compute the prompt, and of *able*, which decode it; where room is taken first and no
    machine decodes, those of the first that do both."""
    ready, seconds = present.ready(firsts), present.ready(able)
    if able and not seconds and spec.room == "before_prefill":
        ready = [machine for machine in ready if spec.roles[machine.index] == "both"]
    return ready, seconds


def _lent(machine: Machine) -> list[int]:
    return [id_ for core in machine.cores for id_ in core.sequences.connector.machines.lent]


def _requests_at(machine: Machine) -> set[int]:
    """Requests that are queued, loading, landing or running at *machine*."""
    here: set[int] = set()
    for core in machine.cores:
        here.update(seq.id for seq in core.sequences.queue)
        here.update(id_ for batch in core.batches for id_ in batch.admitted)
        here.update(core.sequences.connector.tiers.in_transit)
        here.update(core.sequences.connector.landing())
    return here
